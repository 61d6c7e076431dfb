"""GSM8K as verl reads it: train.parquet and test.parquet in a folder.

python experiments/verl/data.py DATA [TRAIN.jsonl TEST.jsonl]      without files: the hub's openai/gsm8k
"""

from __future__ import annotations

import sys
from pathlib import Path

from mxrl.integrations.verl.tasks import write_parquet
from mxrl.rl.tasks import load_task


def main(folder: str, *files: str) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    for i, split in enumerate(("train", "test")):
        path = files[i] if files else None
        problems = load_task("gsm8k", seed=None, split=split, path=path)
        write_parquet(Path(folder, f"{split}.parquet"), problems, "gsm8k")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""A run of `mxrl train` on one GPU, and the most memory that it took, for check.py to compare with the estimate.

    python experiments/paper_scale/peak.py run.yaml --steps 2 --eval-problems 0 --out runs/peak
    python experiments/paper_scale/check.py runs/peak

Takes what `mxrl train` takes. Evaluation decodes other batches, so leave it out. Writes OUT/peak.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from mxrl.report.files import write_atomically
from mxrl.rl.config import ConfigError, TrainConfig
from mxrl.rl.policy import resolve_model
from mxrl.rl.tasks import load_task
from mxrl.rl.train import GENERATED, train


def options(arguments: list[str]) -> TrainConfig:
    """The configuration of `[CONFIG] [--OPTION VALUE]…`."""
    config = arguments.pop(0) if arguments and not arguments[0].startswith("--") else None
    if len(arguments) % 2 or not all(name.startswith("--") for name in arguments[::2]):
        raise ConfigError("peak.py: expected [CONFIG.yaml] and pairs of --option value")
    given: dict[str, Any] = {n[2:].replace("-", "_"): v for n, v in zip(arguments[::2], arguments[1::2], strict=True)}
    return TrainConfig.from_options(config, **given)


def longest_prompt(config: TrainConfig) -> int:
    """Tokens of the longest training prompt."""
    tokenizer: Any = AutoTokenizer.from_pretrained(resolve_model(config.model))
    n = config.steps * config.prompts_per_step if config.task in GENERATED else None
    problems = load_task(config.task, seed=config.seed, n=n, split="train", **config.task_options)
    chats = [p.prompt if isinstance(p.prompt, str) else tokenizer.apply_chat_template(
        p.prompt, add_generation_prompt=True, tokenize=False) for p in problems]  # fmt: skip
    return max(len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in chats)


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("peak.py: needs a CUDA device, whose allocator counts; check.py has what a CPU can tell")
    try:
        config = options(sys.argv[1:])
    except ConfigError as error:
        sys.exit(f"peak.py: {error}")
    torch.cuda.reset_peak_memory_stats()
    train(config, resume="never")
    found = {
        "max_memory_allocated": torch.cuda.max_memory_allocated(),
        "max_memory_reserved": torch.cuda.max_memory_reserved(),
        "total_memory": torch.cuda.get_device_properties(0).total_memory,
        "prompt": longest_prompt(config),
    }
    write_atomically(Path(config.out) / "peak.json", json.dumps(found))
    print(json.dumps(found))


if __name__ == "__main__":
    main()

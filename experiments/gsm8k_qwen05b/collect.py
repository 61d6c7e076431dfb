"""results/ from the folders that run.sh filled: small rows, from which tables.py makes every figure of the page.

    python experiments/gsm8k_qwen05b/collect.py out/gsm8k     its evals/ and runs/, whatever is there → results/*.jsonl

    evals.jsonl    a row a recipe, untrained: untrained.py's, without its example texts
    runs.jsonl     a row a run: options, what it ran on, how it ended, its evaluations with a digit a problem
    steps.jsonl    a row a step: the columns that the page or a reader's first questions need, to 6 digits

A part that the folder has nothing of stays as it is in results/. With a second word the rows of runs go beside:
`collect.py out/gsm8k-hot -lr1e-5` writes runs-lr1e-5.jsonl and steps-lr1e-5.jsonl.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from mxrl.report.run_rows import rows_of, runs_below, short, write_rows

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
COLUMNS = (
    "step", "reward", "accuracy", "loss", "grad_norm", "entropy", "completions/mean_length", "completions/max_length",
    "completions/clipped_ratio", "frac_reward_zero_std", "group/distinct_answers", "num_tokens", "rollout/tokens",
    "rollout/entropy", "aqn/sigma", "aqn/effective_sigma", "gap/k1", "gap/k3", "gap/pearson", "gap/chi2", "gap/ess",
    "gap/mean_abs", "gap/max_abs", "gap/truncated", "logits/sigma_eta", "weights/rel_mse", "decode/flipped",
    "time/sync", "time/rollout", "time/score", "time/reward", "time/update", "time/eval", "time/monitor", "time/step",
)  # fmt: skip


def evaluation(row: dict[str, Any]) -> dict[str, Any]:
    """A committed row of an untrained recipe."""
    return {name: short(value) for name, value in row.items() if name != "examples"}


def collect(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Rows by the name of their file. Raises ValueError where the folder has neither evaluations nor runs."""
    found: dict[str, list[dict[str, Any]]] = {}
    files = folder / "evals" / "evals.jsonl"
    if files.is_file():
        found["evals"] = [evaluation(json.loads(line)) for line in files.read_text().splitlines()]
    if runs := runs_below(folder / "runs"):
        found |= rows_of(runs, COLUMNS)
    if not found:
        raise ValueError(f"{folder} has no evals/evals.jsonl and no run in runs/: give the folder that run.sh fills")
    return found


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: collect.py FOLDER [SUFFIX], the folder that run.sh fills (out/gsm8k)")
    suffix = "".join(sys.argv[2:])
    try:
        rows = collect(Path(sys.argv[1]))
        write_rows(RESULTS, {name if name == "evals" else name + suffix: found for name, found in rows.items()})
    except ValueError as error:
        sys.exit(f"collect.py: {error}")

"""results/ from the folder that run.sh fills: small rows, from which tables.py makes every figure of the page.

    python experiments/long_responses/collect.py out/long     its eval.json, log.jsonl and runs/, whatever is there

    policy.jsonl   one row: how the policy was trained, and what it can do, by the chain's numbers
    runs.jsonl     a row a run: options, what it ran on, how it ended, its evaluations with a digit a problem
    steps.jsonl    a row a step: the columns that the page needs, to 6 digits

A part that the folder has nothing of stays as it is in results/.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from mxrl.report.run_rows import Row, rows_of, runs_below, short, write_rows

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
COLUMNS = (
    "step", "reward", "entropy", "grad_norm", "completions/mean_length", "completions/max_length",
    "completions/clipped_ratio", "frac_reward_zero_std", "style/rewrite", "style/skip", "style/guess", "style/careful",
    "rollout/tokens", "gap/k1", "gap/k3", "gap/pearson", "gap/chi2", "gap/ess", "gap/mean_abs", "gap/max_abs",
    "gap/truncated", "logits/sigma_eta", "weights/rel_mse", "time/rollout", "time/update", "time/eval",
    "time/monitor", "time/step",
)  # fmt: skip


def policy_row(folder: Path) -> Row:
    """The supervised training's settings and last logged step, and its evaluation without per-problem scores."""
    found = json.loads((folder / "eval.json").read_text())
    log = folder / "log.jsonl"
    logged = [json.loads(line) for line in log.read_text().splitlines()] if log.is_file() else []
    kept = {key: value for key, value in found.items() if key not in ("greedy", "sampled", "recipes")}
    kept["settings"] = {key: value for key, value in found["settings"].items() if key != "out"}
    for decoding in ("greedy", "sampled"):
        kept[decoding] = {key: value for key, value in found[decoding].items() if key != "scores"}
    return short(kept | {"last_logged": logged[-1] if logged else None})


def collect(folder: Path) -> dict[str, list[Row]]:
    """Rows by the name of their file. Raises ValueError where the folder has neither a policy's nor a run's results."""
    found: dict[str, list[Row]] = {}
    if (folder / "eval.json").is_file():
        found["policy"] = [policy_row(folder)]
    if runs := runs_below(folder / "runs"):
        found |= rows_of(runs, COLUMNS, without=("by_group",))
    if not found:
        raise ValueError(f"{folder} has no eval.json and no run in runs/: give the folder that run.sh fills")
    return found


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: collect.py FOLDER, the one that run.sh fills (out/long)")
    try:
        write_rows(RESULTS, collect(Path(sys.argv[1])))
    except ValueError as error:  # ReportError among them
        sys.exit(f"collect.py: {error}")

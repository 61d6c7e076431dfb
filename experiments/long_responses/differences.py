"""What is compared with what, in pairs, and what a difference decides.

A run is named LENGTH/RECIPE/sSEED. Recipes of one length and seed share prompts, order and held-out problems, so their
difference is paired: a_i − b_i of each problem, averaged over the seeds that both have, mean ± t·sd/√n over the
problems. That says how far other problems could have moved it; how far another seed would is seen only from the seeds
themselves, which are listed (two or three give no interval worth the name). A difference is decided where the interval
excludes zero *and* every seed has its sign.

Lengths have problems of their own, so a difference between lengths is of two independent means.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from mxrl.probes.intervals import Mean, mean

Row = Mapping[str, Any]
Runs = Mapping[str, Mapping[int, Row]]  # "long/mxfp4" → {seed: row of runs.jsonl}
BORNE_OUT, CONTRADICTED, UNDECIDED, NOT_RUN = "borne out", "contradicted", "undecided", "not run"


class Difference(NamedTuple):
    """A paired difference of accuracies, 0 … 1: over the problems, and each seed's."""

    problems: Mean
    seeds: dict[int, float]


def by_name(rows: Sequence[Row]) -> dict[str, dict[int, Row]]:
    """Runs of each length and recipe, by seed."""
    found: dict[str, dict[int, Row]] = {}
    for row in sorted(rows, key=lambda r: r["options"]["seed"]):
        found.setdefault(row["run"].rpartition("/")[0], {})[row["options"]["seed"]] = row
    return found


def first(run: Row) -> Row | None:
    """The evaluation before training."""
    return run["evals"][0] if run["evals"] and run["evals"][0]["step"] == 0 else None


def last(run: Row) -> Row | None:
    """The evaluation after the last step; None unless the run is done."""
    return run["evals"][-1] if run["state"] == "done" and run["evals"] else None


def accuracy(runs: Mapping[int, Row], which: Any, sampled: bool = False) -> float | None:
    """Mean over the seeds of the first or last evaluation's accuracy, greedy or of its samples."""
    rows = [row for run in runs.values() if (row := which(run))]
    found = [
        row["sampled"]["accuracy"] if sampled else row["accuracy"] for row in rows if not sampled or "sampled" in row
    ]
    return fmean(found) if found else None


def difference(
    a: Mapping[int, Row], b: Mapping[int, Row], which_a: Any = last, which_b: Any = last
) -> Difference | None:
    """Greedy accuracy of runs `a` minus that of runs `b`; None without a common seed that both evaluated."""
    pairs = {s: (x, y) for s in a if s in b and (x := which_a(a[s])) and (y := which_b(b[s]))}
    if not pairs:
        return None
    sums: list[float] = []
    for x, y in pairs.values():
        each = [int(p) - int(q) for p, q in zip(x["right"], y["right"], strict=True)]
        sums = [s + d for s, d in zip(sums or [0] * len(each), each, strict=True)]
    return Difference(
        mean([s / len(pairs) for s in sums]), {s: x["accuracy"] - y["accuracy"] for s, (x, y) in pairs.items()}
    )


def between_lengths(a: Difference | None, b: Difference | None) -> Difference | None:
    """a − b of two lengths, whose problems are independent; seeds by their number."""
    if a is None or b is None:
        return None
    value = a.problems.value - b.problems.value
    half = math.hypot(a.problems.high - a.problems.value, b.problems.high - b.problems.value)
    common = {s: a.seeds[s] - b.seeds[s] for s in a.seeds if s in b.seeds}
    return Difference(Mean(value, value - half, value + half, min(a.problems.n, b.problems.n)), common)


def recovered(runs: Runs, length: str, recipe: str) -> float | None:
    """Share of plain MXFP4's loss that a recipe gives back; None where no loss is clear."""
    bf16, plain, own = (runs.get(f"{length}/{name}", {}) for name in ("bf16", "mxfp4", recipe))
    seeds = {seed for seed in own if all(seed in group and last(group[seed]) for group in (bf16, plain, own))}
    plain = {seed: run for seed, run in plain.items() if seed in seeds}  # the loss and the gain are of the same seeds
    loss, gain = difference(plain, bf16), difference(own, plain)
    if loss is None or gain is None or not loss.problems.excludes() or loss.problems.value > 0:
        return None
    return gain.problems.value / -loss.problems.value


def verdict(found: Difference | None, sign: int) -> str:
    """What a difference says of the claim that it is positive (sign 1) or negative (−1)."""
    if found is None:
        return NOT_RUN
    values = list(found.seeds.values())
    agree = bool(values) and (all(v > 0 for v in values) or all(v < 0 for v in values))
    if not found.problems.excludes() or not agree:
        return UNDECIDED
    word = BORNE_OUT if found.problems.value * sign > 0 else CONTRADICTED
    return f"{word}, on {len(values)} seed{'s' * (len(values) > 1)}"

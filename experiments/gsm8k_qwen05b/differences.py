"""What is compared with what, in pairs, and what a difference decides.

Differences are paired. Of one seed's runs, over the problems: a_i − b_i of the 1319, mean ± t·sd/√n, which says how far
other problems could have moved the difference, not how far another seed would. With two or more common seeds, over the
seeds. Recovered: how much of plain MXFP4's distance to bf16 a row gives back, (row − mxfp4) / (bf16 − mxfp4).

Runs are compared at the last step that all of them were evaluated at, so a table of runs that were cut says what it is
of. A run that diverged or collapsed holds the others back in no way: it keeps its row.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any, NamedTuple

from mxrl.probes.intervals import Mean, paired
from mxrl.report.markdown import points

SMALL = 0.02  # a claimed effect of up to this takes SEEDS paired seeds
SEEDS = 8
Row = dict[str, Any]


class Difference(NamedTuple):
    """A paired difference of accuracies, 0 … 1; over "problems" (one seed) or "seeds"."""

    mean: Mean
    over: str


# --- cells -----------------------------------------------------------------------------------------------------------


def span(found: Difference | None) -> str:
    """`−3.1 [−5.0, −1.2]` in points; without the interval where one value gives none."""
    if found is None:
        return "—"
    value, low, high, _ = found.mean
    return points(value) + ("" if low != low else f" [{points(low)}, {points(high)}]")


def recovered(value: float, bf16: float, mxfp4: float) -> str:
    """Share of plain MXFP4's loss given back, in percent; — where there is hardly a loss to give back."""
    return "—" if bf16 - mxfp4 < 0.005 else f"{100 * (value - mxfp4) / (bf16 - mxfp4):.0f}"


# --- runs ------------------------------------------------------------------------------------------------------------


def digits(right: str) -> list[float]:
    return [float(c) for c in right]


def by_recipe(runs: Sequence[Row]) -> dict[str, list[Row]]:
    """Runs of each recipe, by seed; bf16 and plain MXFP4 first."""
    found: dict[str, list[Row]] = {}
    for run in sorted(runs, key=lambda r: r["options"]["seed"]):
        found.setdefault(run["options"]["recipe"], []).append(run)
    return dict(sorted(found.items(), key=lambda item: (item[0] != "bf16", item[0] != "mxfp4", item[0])))


def common_step(runs: Sequence[Row]) -> int | None:
    """The last step that every run which has not failed was evaluated at; None where there is none after the first."""
    steps = [{e["step"] for e in run["evals"]} for run in runs if run["state"] in ("done", "unfinished")]
    found = set.intersection(*steps) if steps else set()
    return max(found) if found and max(found) > 0 else None


def at(run: Row, step: int) -> Row | None:
    return next((e for e in run["evals"] if e["step"] == step), None)


def difference(a: Sequence[Row], b: Sequence[Row], step_a: int, step_b: int) -> Difference | None:
    """Accuracy of runs `a` at step_a minus runs `b` at step_b, of the seeds that both have; None without any."""
    theirs = {run["options"]["seed"]: at(run, step_b) for run in b}
    pairs = [(mine, theirs.get(run["options"]["seed"])) for run in a if (mine := at(run, step_a))]
    known = [(x, y) for x, y in pairs if x and y]
    if not known:
        return None
    if len(known) > 1:
        return Difference(paired([x["accuracy"] for x, _ in known], [y["accuracy"] for _, y in known]), "seeds")
    return Difference(paired(digits(known[0][0]["right"]), digits(known[0][1]["right"])), "problems")


def accuracy(runs: Sequence[Row], step: int) -> float | None:
    found = [e["accuracy"] for run in runs if (e := at(run, step))]
    return fmean(found) if found else None


def verdict(found: Difference | None, paper: float, seeds: int) -> str:
    """What a paired difference says of a claimed one of the paper's, of the same sign, both 0 … 1.

    An interval that holds zero decides nothing. A claim of up to SMALL can't be told from another seed's luck before
    there are SEEDS paired seeds, whatever an interval over one seed's problems says.
    """
    if found is None:
        return "not run"
    if abs(paper) <= SMALL and seeds < SEEDS:
        return f"undecided: so small a claim takes {SEEDS} paired seeds"
    if not found.mean.excludes():
        return "undecided"
    word = "borne out" if (found.mean.value > 0) == (paper > 0) else "contradicted"
    return word if found.over == "seeds" else f"{word}, on one seed"

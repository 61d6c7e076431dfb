"""What a row's runs come to, paired differences of rows, and what they decide.

A *row* is a policy's kind and a recipe, "dense/mxfp4"; its runs differ in the seed. A *measure* gives a run's value
(greedy accuracy after training), and where it has them its problems' values. An *effect* is a weighted sum of rows:

    {"dense/of": 1, "dense/mxfp4": -1}                                              a difference
    {"dense/of": 1, "dense/mxfp4": -1, "moe/of": -1, "moe/mxfp4": 1}                a difference of two differences

It is paired twice over: Σ w·value of each seed that all rows have, with its interval over the seeds (other training
prompts and samples, the same problems); and Σ w·(mean over those seeds) of each problem, with its interval over the
problems (other problems, the same training). Both are 95 %, mean ± t·sd/√n, and both have to agree for a verdict.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple, Protocol

import torch

from mxrl.probes.intervals import Mean, jackknife, mean

BORNE_OUT, CONTRADICTED, UNDECIDED, NOT_RUN = "borne out", "contradicted", "undecided", "not run"
SMALL, SEEDS = 0.02, 8  # an effect nearer than so much to the bound takes so many paired seeds
Row = Mapping[str, Any]
Terms = Mapping[str, float]


class Measure(Protocol):
    """A run's value, None where it has none; and its problems' values, whose mean it is (None: not one a problem)."""

    def __call__(self, run: Row, steps: Sequence[Row]) -> tuple[float, list[float] | None] | None: ...


def last(run: Row) -> Row | None:
    """The evaluation after the last step; None unless the run is done."""
    options = run["options"]
    planned = options["steps"] * options["updates_per_rollout"] * options["iterations"]
    at_end = run["state"] == "done" and run["evals"] and run["evals"][-1]["step"] == planned
    return run["evals"][-1] if at_end else None


def greedy(run: Row, steps: Sequence[Row] = ()) -> tuple[float, list[float] | None] | None:
    """Greedy accuracy after training, under the run's own recipe."""
    row = last(run)
    return (row["accuracy"], [float(c) for c in row["right"]]) if row else None


def before(run: Row, steps: Sequence[Row] = ()) -> tuple[float, list[float] | None] | None:
    """Greedy accuracy before training, under the run's own recipe; of runs that ended well, as `greedy` is."""
    row = run["evals"][0] if last(run) and run["evals"][0]["step"] == 0 else None
    return (row["accuracy"], [float(c) for c in row["right"]]) if row else None


def gain(run: Row, steps: Sequence[Row] = ()) -> tuple[float, list[float] | None] | None:
    """Greedy accuracy after training minus before."""
    a, b = greedy(run), before(run)
    if a is None or b is None or a[1] is None or b[1] is None:
        return None
    return a[0] - b[0], [x - y for x, y in zip(a[1], b[1], strict=True)]


def sampled(run: Row, steps: Sequence[Row] = ()) -> tuple[float, list[float] | None] | None:
    """Accuracy of samples at the run's temperature, after training."""
    row = (last(run) or {}).get("sampled")
    return (row["accuracy"], [int(c) / row["samples"] for c in row["right"]]) if row else None


def sampled_gain(run: Row, steps: Sequence[Row] = ()) -> tuple[float, None] | None:
    """Accuracy of samples after training minus before."""
    after, first = sampled(run), run["evals"][0] if run["evals"] else {}
    return (after[0] - first["sampled"]["accuracy"], None) if after and first.get("sampled") else None


def _late(run: Row, steps: Sequence[Row], name: str) -> tuple[float, None] | None:
    late = [s[name] for s in steps if s["step"] > run["options"]["steps"] / 4 and name in s]
    return (fmean(late), None) if late else None


def late_entropy(run: Row, steps: Sequence[Row]) -> tuple[float, None] | None:
    """Entropy of the training policy (no noise), nats a token: mean over the steps after the first quarter."""
    return _late(run, steps, "entropy")


def late_rollout_entropy(run: Row, steps: Sequence[Row]) -> tuple[float, None] | None:
    """The same of the rollout policy, with AQN's noise where the recipe has it."""
    return _late(run, steps, "rollout/entropy")


def error_change(run: Row, steps: Sequence[Row]) -> tuple[float, None] | None:
    """The weights' relative MSE under the recipe where it was measured last, by where it was first, minus 1."""
    found = [s["weights/rel_mse"] for s in steps if s.get("weights/rel_mse")]
    return (found[-1] / found[0] - 1, None) if len(found) > 1 else None


@dataclass(frozen=True)
class Results:
    """runs: by row and seed, "dense/mxfp4" → {0: …}. steps: of each run, by its name."""

    runs: Mapping[str, Mapping[int, Row]]
    steps: Mapping[str, Sequence[Row]]

    @classmethod
    def of(cls, runs: Sequence[Row], steps: Sequence[Row]) -> Results:
        by_row: dict[str, dict[int, Row]] = {}
        for run in sorted(runs, key=lambda r: r["options"]["seed"]):
            by_row.setdefault(run["run"].rpartition("/")[0], {})[run["options"]["seed"]] = run
        by_run: dict[str, list[Row]] = {run["run"]: [] for run in runs}
        for step in steps:
            by_run[step["run"]].append(step)
        return cls(by_row, by_run)

    def values(self, row: str, measure: Measure) -> dict[int, tuple[float, list[float] | None]]:
        """Seed → the measure, of the runs that have it."""
        found = {seed: measure(run, self.steps[run["run"]]) for seed, run in self.runs.get(row, {}).items()}
        return {seed: value for seed, value in found.items() if value is not None}

    def mean(self, row: str, measure: Measure) -> Mean | None:
        """The measure over the row's seeds."""
        found = self.values(row, measure)
        return mean([value for value, _ in found.values()]) if found else None


class Effect(NamedTuple):
    """A weighted sum of rows, over the seeds they share, and over the problems (None: not measured by problems)."""

    seeds: Mean
    problems: Mean | None


def effect(results: Results, terms: Terms, measure: Measure) -> Effect | None:
    """Σ w·measure, paired; None where the rows have no seed in common."""
    values = {row: results.values(row, measure) for row in terms}
    common = sorted(set.intersection(*(set(v) for v in values.values())))
    if not common:
        return None
    over_seeds = mean([sum(w * values[row][seed][0] for row, w in terms.items()) for seed in common])
    sums: list[float] | None = None
    for row, w in terms.items():
        for seed in common:
            scores = values[row][seed][1]
            if scores is None:
                return Effect(over_seeds, None)
            sums = sums or [0.0] * len(scores)
            sums = [s + w * x / len(common) for s, x in zip(sums, scores, strict=True)]
    assert sums is not None
    return Effect(over_seeds, mean(sums))


def recovered(results: Results, rows: Mapping[str, float], measure: Measure) -> Effect | None:
    """Share of plain MXFP4's loss that a row gives back, (row − mxfp4) / (bf16 − mxfp4); rows: {"dense/of": 1}.

    Of several rows the weighted sum of their shares, each of its own kind's loss. Intervals are the jackknife's, over
    the seeds and over the problems (None: not measured by problems). None where the rows share no seed, or where it
    isn't clear that there is a loss.
    """
    kinds = [row.split("/")[0] for row in rows]
    for kind in kinds:
        found = effect(results, {f"{kind}/bf16": 1, f"{kind}/mxfp4": -1}, measure)
        if found is None or not found.seeds.excludes() or found.seeds.value < 0:
            return None
    # the columns of a fraction: numerator and denominator of each row
    terms = [
        {name: 1.0, f"{kind}/mxfp4": -1.0}
        for row, kind in zip(rows, kinds, strict=True)
        for name in (row, f"{kind}/bf16")
    ]
    values = {name: results.values(name, measure) for term in terms for name in term}
    common = sorted(set.intersection(*(set(v) for v in values.values())))
    if not common:
        return None
    weights = torch.tensor(list(rows.values()), dtype=torch.float64)

    def share(sums: torch.Tensor) -> torch.Tensor:
        return ((sums[..., 0::2] / sums[..., 1::2]) * weights).sum(-1)

    seeds = torch.tensor(
        [[sum(w * values[n][s][0] for n, w in term.items()) for term in terms] for s in common], dtype=torch.float64
    )
    scores = {name: [found[s][1] for s in common] for name, found in values.items()}
    if any(one is None for every in scores.values() for one in every):
        return Effect(jackknife(seeds, share)[0], None)
    # [seeds, problems] of a name → mean over the seeds
    means = {name: torch.tensor(every, dtype=torch.float64).mean(0) for name, every in scores.items()}
    problems = torch.stack([sum(w * means[n] for n, w in term.items()) for term in terms], dim=1)
    return Effect(jackknife(seeds, share)[0], jackknife(problems, share)[0])


# --- verdicts --------------------------------------------------------------------------------------------------------


def inside(found: Mean, low: float, high: float) -> str:
    """Whether a value lies between the bounds: borne out where its interval does, contradicted where none does."""
    if math.isnan(found.low):
        return UNDECIDED
    if low < found.low and found.high < high:
        return BORNE_OUT
    return CONTRADICTED if found.high < low or high < found.low else UNDECIDED


def verdict(found: Effect | None, low: float, high: float, small: float = SMALL) -> str:
    """What an effect says of the claim that it lies between `low` and `high`, in words that begin with one of four.

    Undecided unless the intervals over seeds and over problems say the same; and where the value is within `small` of
    a bound and there are fewer than SEEDS paired seeds.
    """
    if found is None:
        return NOT_RUN
    if found.seeds.n < 2:
        return f"{UNDECIDED}: one seed"
    word = inside(found.seeds, low, high)
    if word == UNDECIDED:
        return word
    if min(abs(found.seeds.value - bound) for bound in (low, high)) < small and found.seeds.n < SEEDS:
        return f"{UNDECIDED}: less than {100 * small:g} pp takes {SEEDS} paired seeds"
    if found.problems is not None and inside(found.problems, low, high) != word:
        return f"{UNDECIDED}: other problems could turn it"
    return word


def diverging(runs: Mapping[int, Row], change: Mean | None) -> str:
    """What a row's runs say of the claim that it diverges; change: its gain, over the runs that ended well.

    A run diverges that ended by a loss that is no number, or whose policy collapsed. Borne out where all of three or
    more did; contradicted where none of three or more did and accuracy rose; else undecided.
    """
    if not runs:
        return NOT_RUN
    lost = sum(run["state"] in ("diverged", "collapsed") for run in runs.values())
    if len(runs) >= 3 and lost == len(runs):
        return BORNE_OUT
    if len(runs) >= 3 and not lost and change is not None and change.n == len(runs) and change.low > 0:
        return CONTRADICTED
    return UNDECIDED

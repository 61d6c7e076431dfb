"""The questions that an analysis answers, each a key of summary.json, from what is measured already: no tensor is read.

    fingerprint      the terms of the error over T, excess, cos, deadzone, δ: for all, by kind of layer, by depth
    delta            is δ of plain MXFP4 uniform on [0, 1): distances of its histogram, and of single tensors'
    sweep            T / floor with 0 to 8 mantissa bits in the scale
    compared         every recipe: where its bits go, and its error
    corrections      what MBS, OF and both do to each component of plain MXFP4's error
    worst            the tensors with the largest error, and what sets each apart (outliers.py)
    recommendation   a recipe for each kind of layer under a budget of bits (budget.py); none for a source that is
                     already quantized, whose decoded values say little of the model's own

Recipes that were not asked for are measured on every n-th row of each tensor (`summary["sampled"]`, with plain MXFP4 on
the same rows). Their whole error is estimated by a ratio: T = T_sample · T(mxfp4) / T_sample(mxfp4).
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mxrl.decompose import ErrorStats
from mxrl.formats import MXFP4
from mxrl.recipes import Recipe
from mxrl.report.budget import BudgetError, Choice, Option, cheapest, front
from mxrl.report.outliers import Row, worst
from mxrl.report.summary import already_quantized

PLAIN = "mxfp4"
SWEEP = (PLAIN, *(f"mxfp4:e8m{k}" for k in range(1, 9)))
CORRECTIONS = (PLAIN, "mxfp4+mbs", "mxfp4+of", "mxfp4+mbs+of")
EXTRA = tuple(dict.fromkeys((*SWEEP, *CORRECTIONS, "mxfp8")))  # what the questions need beside a scan's own columns
BITS = 4.5  # the default budget, an element: NVFP4's price
LADDER = (4.25, 4.3125, 4.5, 5.0, 6.0, 7.0, 8.25)  # other budgets that are answered beside the one asked for
_SD_UNIFORM = math.sqrt(1 / 12)


def check_budget(bits: float) -> None:
    """BudgetError for a budget that even plain MXFP4 exceeds, or for infinity: known before anything is measured."""
    least = Recipe.parse(PLAIN).bits
    if not least <= bits < math.inf:
        raise BudgetError(
            f"a budget of {bits:g} bits an element; give a number, at least {least:g}, which is {PLAIN}'s price"
        )


def keep(row: Row) -> Row:
    """A row without its histogram, which is the larger part of it."""
    return {k: v for k, v in row.items() if k != "delta_hist"}


class Collector:
    """Takes the rows of tensors.jsonl one after another, and keeps what the answers need of them."""

    def __init__(self, main: str):
        self._main = main
        self.own: list[Row] = []
        self.departures: list[tuple[float, str]] = []  # of each tensor's δ under plain MXFP4 from uniform

    def add(self, row: Row) -> None:
        if row["recipe"] == self._main:
            self.own.append(keep(row))
        if row["recipe"] == PLAIN and row.get("delta_count"):
            self.departures.append((distances(row["delta_hist"])["ks"], row["name"]))


def answers(summary: Mapping[str, Any], rows: Collector, bits: float = BITS) -> dict[str, Any]:
    """The keys named above, for a summary of the shape of `mxrl.report.summary`. Raises BudgetError."""
    found: dict[str, Any] = {"fingerprint": _fingerprints(summary, rows.own)}
    if PLAIN in summary["total"]:
        found["delta"] = _delta(summary, rows.departures)
    found["compared"] = _compared(summary)
    if "sampled" in summary:
        found["sweep"] = _sweep(summary)
        found["corrections"] = _corrections(summary)
        if lossy := already_quantized(summary):
            found["recommendation"] = {"budget": bits, "withheld": list(lossy)}
        elif any(_elements(entry) for entry in summary["kinds"].values()):
            found["recommendation"] = _recommendation(summary, bits)
    found["worst"] = worst(rows.own)
    return found


def ratio(a: float, b: float) -> float | None:
    """a / b; None (JSON has no NaN) where there is nothing to divide by."""
    return a / b if b and math.isfinite(a / b) else None


# ---- the fingerprint -------------------------------------------------------------------------------------------------


def fingerprint(s: ErrorStats) -> dict[str, Any]:
    """What a format does to a kind of data, in figures that don't depend on its size: all shares are of T."""
    mean = s.delta_mean
    return {
        "elements": s.numel,
        "rel_mse": ratio(s.sq_error, s.sq_norm),
        "t_over_floor": ratio(s.sq_error, s.floor),
        "scale": ratio(s.sq_scale, s.sq_error),
        "deadzone": ratio(s.sq_deadzone, s.sq_error),
        "grid": ratio(s.sq_grid, s.sq_error),
        "scale_grid": ratio(2 * s.dot_scale_grid, s.sq_error),
        "scale_deadzone": ratio(2 * s.dot_scale_deadzone, s.sq_error),
        "excess": ratio(s.excess, s.sq_error),
        "cos": _finite(s.cos_scale_grid),
        "deadzone_fraction": ratio(s.deadzone_count, s.numel),
        "delta_mean": _finite(mean),
        "delta_sd": _finite(math.sqrt(s.delta_var)) if s.delta_count else None,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _fingerprints(summary: Mapping[str, Any], own: Sequence[Row]) -> dict[str, Any]:
    main = summary["recipes"][0]
    layers: dict[int, list[ErrorStats]] = defaultdict(list)
    for row in own:
        if row.get("layer") is not None:
            layers[row["layer"]].append(ErrorStats.from_dict(row))
    kinds = {
        kind: {"tensors": entry["tensors"]} | fingerprint(ErrorStats.from_dict(entry["recipes"][main]))
        for kind, entry in summary["kinds"].items()
    }
    return {
        "recipe": main,
        "total": {"tensors": summary["tensors"]} | fingerprint(ErrorStats.from_dict(summary["total"][main])),
        "kinds": kinds,
        "layers": {
            str(i): {"tensors": len(layers[i])} | fingerprint(ErrorStats.merged(layers[i])) for i in sorted(layers)
        },
    }


# ---- is δ uniform ----------------------------------------------------------------------------------------------------


def distances(hist: Sequence[int]) -> dict[str, float]:
    """Of a histogram over [−1, 1) from the uniform distribution on [0, 1): total variation, and Kolmogorov–Smirnov.

    tv: the share of the blocks that would have to move. ks: the largest gap between the two distribution functions, at
    the edges of the bins.
    """
    n, bins = sum(hist), len(hist)
    expected = [0.0 if i < bins // 2 else 2 / bins for i in range(bins)]
    shares = [h / n for h in hist]
    gap, ks = 0.0, 0.0
    for share, uniform in zip(shares, expected, strict=True):
        gap += share - uniform
        ks = max(ks, abs(gap))
    return {"tv": sum(abs(a - b) for a, b in zip(shares, expected, strict=True)) / 2, "ks": ks}


def _delta(summary: Mapping[str, Any], departures: Sequence[tuple[float, str]]) -> dict[str, Any]:
    s = ErrorStats.from_dict(summary["total"][PLAIN])
    if not s.delta_count:
        return {"recipe": PLAIN, "blocks": 0}
    bins = len(s.delta_hist) // 2
    out: dict[str, Any] = {
        "recipe": PLAIN,
        "blocks": s.delta_count,
        **distances(s.delta_hist),
        # of independent uniform draws: E|share − 1/bins| = √(2 (1 − 1/bins) / (π n bins)), half of it times the bins
        "tv_by_chance": math.sqrt(bins * (1 - 1 / bins) / (2 * math.pi * s.delta_count)),
        "ks_by_chance": 1.358 / math.sqrt(s.delta_count),  # exceeded by 5 % of samples of independent draws
        "mean": s.delta_mean,
        "sd": math.sqrt(s.delta_var),
        "uniform_mean": 0.5,
        "uniform_sd": _SD_UNIFORM,
    }
    if departures:
        largest, name = max(departures)
        out["tensors"] = {
            "count": len(departures),
            "median_ks": statistics.median(ks for ks, _ in departures),
            "largest_ks": largest,
            "largest": name,
        }
    return out


# ---- recipes side by side --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """A recipe's error: the whole squared error (an estimate if `sampled`), and the statistics that it stands on."""

    sq_error: float
    stats: ErrorStats
    sampled: bool


def measured(summary: Mapping[str, Any], recipe: str, kind: str | None = None) -> Measured | None:
    """What is known of a recipe over all weights or those of a kind: of all elements, else of the sample."""
    columns = summary["total"] if kind is None else summary["kinds"][kind]["recipes"]
    if recipe in columns:
        stats = ErrorStats.from_dict(columns[recipe])
        return Measured(stats.sq_error, stats, False)
    sampled = summary.get("sampled", {"total": {}, "kinds": {}})
    columns_there = sampled["total"] if kind is None else sampled["kinds"].get(kind, {})
    if recipe not in columns_there:
        return None
    stats = ErrorStats.from_dict(columns_there[recipe])
    if sampled["every"] == 1:
        return Measured(stats.sq_error, stats, False)
    whole, part = ErrorStats.from_dict(columns[PLAIN]), ErrorStats.from_dict(columns_there[PLAIN])
    scale = whole.sq_error / part.sq_error if part.sq_error else math.nan
    return Measured(stats.sq_error * scale, stats, True)


def recipes_of(summary: Mapping[str, Any]) -> list[str]:
    """Every recipe with a number, those asked for first."""
    return list(dict.fromkeys((*summary["total"], *summary.get("sampled", {"total": {}})["total"])))


def price(recipe: str) -> dict[str, float]:
    """Bits an element, by what they are spent on: element codes, scales, extra mantissas; OF stores all of it twice."""
    r = Recipe.parse(recipe)
    assert r.format is not None
    codes, passes = float(r.format.element.bits), 2 if r.of else 1
    scales = 8 / r.format.block
    mantissas = (8 / r.macro if r.mbs else 0.0) + (int(r.rule[3:]) / MXFP4.block if r.rule.startswith("e8m") else 0.0)
    return {"codes": codes, "scales": scales, "mantissas": mantissas, "passes": passes, "bits": r.bits}


def _compared(summary: Mapping[str, Any]) -> dict[str, Any]:
    plain = measured(summary, PLAIN)
    whole = ErrorStats.from_dict(next(iter(summary["total"].values())))
    out: dict[str, Any] = {}
    for recipe in recipes_of(summary):
        if recipe in SWEEP[1:]:
            continue  # they have a section of their own
        m = measured(summary, recipe)
        assert m is not None
        stored = summary["total"].get(recipe, {}).get("bits")
        cost = price(recipe) if recipe != "stored" else {"bits": stored}
        out[recipe] = cost | {
            "rel_mse": ratio(m.sq_error, whole.sq_norm),
            "relative_to_mxfp4": ratio(m.sq_error, plain.sq_error) if plain else None,
            "t_over_floor": ratio(m.stats.sq_error, m.stats.floor),
            "sampled": m.sampled,
        }
    return out


def _sweep(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    out = []
    for bits, recipe in enumerate(SWEEP):
        s = _paired(summary, recipe)
        if s is not None:
            out.append(
                {
                    "scale": f"E8M{bits}",
                    "recipe": recipe,
                    "bits": Recipe.parse(recipe).bits,
                    "t_over_floor": ratio(s.sq_error, s.floor),
                    "excess_over_floor": ratio(s.excess, s.floor),
                    "rel_mse": ratio(s.sq_error, s.sq_norm),
                }
            )
    return out


def _paired(summary: Mapping[str, Any], recipe: str) -> ErrorStats | None:
    """The statistics of a recipe on the sample's rows (on all of them where the sample is everything)."""
    entry = summary["sampled"]["total"].get(recipe)
    if entry is None and summary["sampled"]["every"] == 1:
        entry = summary["total"].get(recipe)
    return None if entry is None else ErrorStats.from_dict(entry)


def _corrections(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Each relative to plain MXFP4 on the same rows: see the page for what stands for which component."""
    plain = _paired(summary, PLAIN)
    out: dict[str, Any] = {}
    for recipe in CORRECTIONS:
        s = _paired(summary, recipe)
        if s is None or plain is None:
            continue
        out[recipe] = {
            "whole": ratio(s.sq_error, plain.sq_error),
            "scale": ratio(s.sq_scale, plain.sq_scale),
            "deadzone": ratio(s.sq_error_deadzone, plain.sq_error_deadzone),
            "grid": ratio(s.sq_error_elsewhere, plain.sq_error_elsewhere),
            "gamma_mean": _finite(s.gamma_mean),
            "deadzone_nonzero": ratio(s.deadzone_nonzero_count, s.deadzone_count),
        }
    return out


# ---- a recipe for each kind ------------------------------------------------------------------------------------------


def candidates(summary: Mapping[str, Any]) -> list[str]:
    """Recipes that something can store: not ideal scales, nor E8Mk ones with extra mantissa bits."""
    stored = [r for r in recipes_of(summary) if r != "stored"]
    return [r for r in stored if not Recipe.parse(r).rule.startswith(("ideal", "e8m"))]


def _recommendation(summary: Mapping[str, Any], budget: float) -> dict[str, Any]:
    elements = {k: _elements(e) for k, e in summary["kinds"].items()}
    elements = {k: n for k, n in elements.items() if n}
    names = candidates(summary)
    options: dict[str, list[Option]] = {}
    for kind in elements:
        found = [(r, measured(summary, r, kind)) for r in names]
        options[kind] = [
            Option(r, Recipe.parse(r).bits, m.sq_error) for r, m in found if m and math.isfinite(m.sq_error)
        ]
    choice = cheapest(elements, options, budget)
    whole = sum(elements.values())
    energy = ErrorStats.from_dict(summary["total"][PLAIN]).sq_norm
    uniform = _uniform(options, names, budget)
    return {
        "budget": budget,
        "bits": choice.bits,
        "rel_mse": ratio(choice.error, energy),
        "candidates": names,
        "kinds": {kind: _reasoned(kind, options[kind], choice, elements, budget) for kind in choice.options},
        "uniform": uniform and uniform | {"rel_mse": ratio(uniform.pop("error"), energy)},
        "elements": whole,
        "ladder": [_rung(elements, options, b, energy) for b in sorted({*LADDER, budget}) if b >= _least(options)],
    }


def _least(options: Mapping[str, Sequence[Option]]) -> float:
    """A budget that every kind can meet."""
    return max((min(o.bits for o in found) for found in options.values()), default=0.0)


def _rung(
    elements: Mapping[str, int], options: Mapping[str, Sequence[Option]], budget: float, energy: float
) -> dict[str, Any]:
    choice = cheapest(elements, options, budget)
    recipes = {kind: o.recipe for kind, o in choice.options.items()}
    return {"budget": budget, "bits": choice.bits, "rel_mse": ratio(choice.error, energy), "kinds": recipes}


def _elements(entry: Mapping[str, Any]) -> int:
    return next(iter(entry["recipes"].values()))["numel"]


def _uniform(options: Mapping[str, Sequence[Option]], names: Iterable[str], budget: float) -> dict[str, Any] | None:
    """The best single recipe for every kind within the budget."""
    best: tuple[float, float, str] | None = None
    for name in names:
        own = [next((o for o in options[k] if o.recipe == name), None) for k in options]
        found = [o for o in own if o is not None]
        if found and len(found) == len(own) and found[0].bits <= budget:
            entry = (sum(o.error for o in found), found[0].bits, name)
            best = min(best, entry) if best else entry
    return None if best is None else {"recipe": best[2], "bits": best[1], "error": best[0]}


def _reasoned(
    kind: str, options: Sequence[Option], choice: Choice, elements: Mapping[str, int], budget: float
) -> dict[str, Any]:
    """A kind's recipe with the next cheaper and the next dearer one: what each would change in the whole."""
    chosen, whole = choice.options[kind], sum(elements.values())
    steps = front(options)
    place = next(i for i, o in enumerate(steps) if o.bits == chosen.bits)
    share = elements[kind] / whole

    def change(other: Option) -> dict[str, Any]:
        bits = choice.bits + (other.bits - chosen.bits) * share
        return {
            "recipe": other.recipe,
            "mean_bits": bits,
            "error_change": ratio(other.error - chosen.error, choice.error),
        }

    return {
        "recipe": chosen.recipe,
        "bits": chosen.bits,
        "share": share,
        "error_share": ratio(chosen.error, choice.error),
        "cheaper": change(steps[place - 1]) if place else None,
        "dearer": change(steps[place + 1]) if place + 1 < len(steps) else None,
    }

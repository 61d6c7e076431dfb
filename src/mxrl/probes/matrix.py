"""Component × failure: what the probes' measures say together, by one rule.

A failure is one primary metric, an effect against the unquantized model on the same prompts (COLUMNS). W is the effect
of the whole recipe, and 10 % of it, m = |W| / 10, is what counts as some effect (m = 0 where W's interval includes 0).

    alone      the component alone has an effect beyond m             @scale
    removed    leaving it out takes more than m of the effect away    W − @-scale
    structure  alone, it does more than noise of its energy           @scale − @~scale

    "causes"           alone and removed               "no part"    neither
    "only alone"       alone, yet leaving it out doesn't help: in company others cancel it or do the same
    "only in company"  not alone, yet leaving it out helps
    "undecided"        an interval that decides it straddles m

A whole recipe "has it", and a correction "helps" or "harms" where the paired difference to the plain recipe excludes 0.
yes / no need the whole 95 % interval on one side. Differences are paired prompt by prompt where the measures carry
their `values`; else the two intervals are taken as independent, which is wider. Many cells are looked at: of 20
intervals without any effect, one excludes 0 by chance.

Source: the rule is ours; arXiv 2605.20402 assigns a failure to each component (claims.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mxrl.ops.inject import COMPONENTS
from mxrl.probes.intervals import paired
from mxrl.probes.treatments import Treatment, TreatmentError
from mxrl.recipes import RecipeError

Result = Mapping[str, Any]
MARGIN = 0.1
YES, NO, UNDECIDED = "yes", "no", "undecided"


class Failure(NamedTuple):
    """A column: `harm` is the sign of the metric's effect that the failure is."""

    name: str
    probe: str
    metric: str
    harm: int
    says: str


COLUMNS = (
    Failure("gradient", "gradient", "grad_cosine", +1, "1 − cos(gradient, unquantized gradient)"),
    Failure("rollout", "deadzone", "greedy_accuracy_change", -1, "change of greedy accuracy"),
    Failure("entropy", "temperature", "entropy_change", +1, "change of the policy's entropy, nats"),
    Failure("routing", "routing", "topk_flip", +1, "share of token × layer whose top-k experts changed"),
)
WHOLE = "whole recipe"


@dataclass(frozen=True)
class Effect:
    """A measure: value, its 95 % interval (None: not known), n values; `values` one a prompt or seed, if kept."""

    value: float
    low: float | None
    high: float | None
    n: int
    values: tuple[float | None, ...] | None = None
    unit: str = ""

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Effect:
        """A row of a result's "measures".

        A fraction whose values are all equal gets the rule of three's interval, ± 3/n: that 32 prompts all agree does
        not say that every prompt would.
        """
        values, low, high = row.get("values"), row["low"], row["high"]
        if low is not None and low == high and row.get("unit") == "fraction":
            half = min(1.0, 3 / row["n"])
            low, high = low - half, high + half
        return cls(row["value"], low, high, row["n"], None if values is None else tuple(values), row.get("unit", ""))

    def over(self, bound: float, harm: int = 1) -> str:
        """Whether harm · effect exceeds `bound`: yes or no where the whole interval says so."""
        if self.low is None or self.high is None:
            return UNDECIDED
        low, high = sorted((self.low * harm, self.high * harm))
        return YES if low > bound else NO if high < bound else UNDECIDED

    def minus(self, other: Effect) -> Effect:
        """The difference with its interval, paired where both have values of the same prompts."""
        if self.values and other.values and len(self.values) == len(other.values):
            both = [(a, b) for a, b in zip(self.values, other.values, strict=True) if a is not None and b is not None]
            if len(both) > 1:
                found = paired([a for a, _ in both], [b for _, b in both])
                row = {"value": found.value, "low": found.low, "high": found.high, "n": found.n, "unit": self.unit}
                return Effect.of(row | {"values": [a - b for a, b in both]})
        value, n = self.value - other.value, min(self.n, other.n)
        if None in (self.low, self.high, other.low, other.high):
            return Effect(value, None, None, n, unit=self.unit)
        half = math.hypot(*((e.high - e.low) / 2 for e in (self, other)))  # type: ignore[operator]
        return Effect(value, value - half, value + half, n, unit=self.unit)

    def to_dict(self) -> dict[str, Any]:
        return {"value": self.value, "low": self.low, "high": self.high, "n": self.n, "paired": self.values is not None}


class Effects:
    """Every measure of the results by metric and treatment.

    base: the recipe whose components were injected; corrections: the other recipes, as they were given.
    """

    def __init__(self, results: Mapping[str, Result]) -> None:
        self._found = {
            (name, row["metric"], row["treatment"]): Effect.of(row)
            for name, result in results.items()
            for row in result["measures"]
        }
        columns = {(c.probe, c.metric) for c in COLUMNS}
        everywhere = _parsed(treatment for _, _, treatment in self._found)
        shown = _parsed(treatment for probe, metric, treatment in self._found if (probe, metric) in columns)
        apart = [str(t.recipe) for t in everywhere if not _is_whole(t)]
        whole = [str(t.recipe) for t in everywhere if _is_whole(t)]
        self.base = (apart or whole or [""])[0]
        self.corrections = tuple(str(t.recipe) for t in shown if _is_whole(t) and str(t.recipe) != self.base)

    def get(self, probe: str, metric: str, treatment: str) -> Effect | None:
        return self._found.get((probe, metric, treatment))

    def of(self, failure: Failure, mark: str = "") -> Effect | None:
        """The effect of the base recipe (""), or of it as `mark` says: "@scale", "@-scale", "@~scale"."""
        return self.get(failure.probe, failure.metric, self.base + mark)


def _parsed(names: Iterable[str]) -> list[Treatment]:
    """Each once; without the baseline, one pass alone, and what is no treatment of a model, as a probe's variants."""
    found = []
    for name in dict.fromkeys(names):
        try:
            treatment = Treatment.parse(name)
        except (TreatmentError, RecipeError):
            continue
        if treatment.passes == "both" and treatment.recipe.quantizes:
            found.append(treatment)
    return found


def _is_whole(treatment: Treatment) -> bool:
    return treatment.components == frozenset(COMPONENTS) and not treatment.control


def failure(name: str) -> Failure:
    """The column of that name."""
    return next(c for c in COLUMNS if c.name == name)


def margin(whole: Effect | None) -> float:
    """What counts as some effect: a tenth of the whole recipe's; 0 where that one is not known to have any."""
    if whole is None or whole.low is None or whole.high is None or whole.low <= 0 <= whole.high:
        return 0.0
    return MARGIN * abs(whole.value)


def component_cell(effects: Effects, component: str, column: Failure) -> dict[str, Any]:
    """One component and one failure, by the rule above."""
    whole, alone = effects.of(column), effects.of(column, f"@{component}")
    without, noise = effects.of(column, f"@-{component}"), effects.of(column, f"@~{component}")
    bound = margin(whole)
    removed = whole.minus(without) if whole and without else None
    beyond = alone.minus(noise) if alone and noise else None
    says = {
        "alone": alone.over(bound, column.harm) if alone else None,
        "removed": removed.over(bound, column.harm) if removed else None,
        "structure": beyond.over(0.0, column.harm) if beyond else None,
    }
    return {
        "row": component,
        "column": column.name,
        "metric": column.metric,
        "margin": bound,
        "share": alone.value / whole.value if alone and whole and bound else None,
        "effect": alone and alone.to_dict(),
        "removed": removed and removed.to_dict(),
        "structure": beyond and beyond.to_dict(),
        "says": says,
        "verdict": _verdict(says["alone"], says["removed"]),
    }


def _verdict(alone: str | None, removed: str | None) -> str:
    return {
        (YES, YES): "causes",
        (NO, NO): "no part",
        (YES, NO): "only alone",
        (NO, YES): "only in company",
    }.get((alone or "", removed or ""), "not measured" if None in (alone, removed) else UNDECIDED)


def recipe_cell(effects: Effects, recipe: str, column: Failure) -> dict[str, Any]:
    """A recipe and one failure: whether it has it; of another one than the base, whether it helps against it."""
    whole, own = effects.of(column), effects.get(column.probe, column.metric, recipe)
    gain = whole.minus(own) if whole and own and recipe != effects.base else None
    cell: dict[str, Any] = {"row": WHOLE if recipe == effects.base else recipe, "recipe": recipe}
    cell |= {"column": column.name, "metric": column.metric, "effect": own and own.to_dict()}
    if recipe == effects.base:
        told = own.over(0.0, column.harm) if own else None
        return cell | {
            "verdict": {YES: "has it", NO: "the opposite", UNDECIDED: UNDECIDED, None: "not measured"}[told],
        }
    told = gain.over(0.0, column.harm) if gain else None
    return cell | {
        "gain": gain and gain.to_dict(),
        "share": own.value / whole.value if own and whole and margin(whole) else None,
        "verdict": {YES: "helps", NO: "harms", UNDECIDED: UNDECIDED, None: "not measured"}[told],
    }


def matrix(results: Mapping[str, Result]) -> dict[str, Any]:
    """{"base", "rows", "columns", "cells"}: scale, deadzone, grid, the whole recipe and every other one, × failures.

    results: by probe; the columns are those of the probes that are there.
    """
    effects = Effects(results)
    columns = [c for c in COLUMNS if c.probe in results]
    cells = [component_cell(effects, name, c) for name in COMPONENTS for c in columns]
    cells += [recipe_cell(effects, r, c) for r in _ordered(effects) for c in columns]
    return {
        "base": effects.base,
        "margin": MARGIN,
        "rows": list(dict.fromkeys(cell["row"] for cell in cells)),
        "columns": [{"name": c.name, "probe": c.probe, "metric": c.metric, "says": c.says} for c in columns],
        "cells": cells,
    }


def _ordered(effects: Effects) -> Iterable[str]:
    return ([effects.base] if effects.base else []) + list(effects.corrections)


def cell_of(table: Mapping[str, Any], row: str, column: str) -> Mapping[str, Any] | None:
    """The cell of a matrix; None where there is none."""
    cells: Sequence[Mapping[str, Any]] = table["cells"]
    return next((c for c in cells if (c["row"], c["column"]) == (row, column)), None)

"""Which recipe for which kind of layer, so that the total error is least and the mean bits stay within a budget: exact.

    minimise   Σ error[kind][recipe[kind]]      subject to   Σ elements[kind] · bits[recipe[kind]] ≤ budget · Σ elements

A multiple-choice knapsack with few groups. Kinds are added one at a time, and of the partial choices those are kept
that no other beats in both bits and error (the Pareto front); what can't stay within the budget, or can't reach the
best complete choice known even if the rest were allowed fractions of recipes, is dropped. Nothing that could be optimal
is ever dropped, so the answer is the optimum of the numbers given; the tests try every combination beside it.

Bits are compared as exact fractions.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction


class BudgetError(ValueError):
    """A budget that no choice meets: the message says the least that one needs."""


@dataclass(frozen=True)
class Option:
    """A recipe for one kind: bits an element, and the squared error it leaves in all of the kind's elements."""

    recipe: str
    bits: float
    error: float


@dataclass(frozen=True)
class Choice:
    """The optimum: an option for each kind, the mean bits an element, and the sum of the errors."""

    options: dict[str, Option]
    bits: float
    error: float


def front(options: Sequence[Option]) -> list[Option]:
    """Those that no other one beats: bits going up, error strictly down. Of equals, the first stays."""
    kept: list[Option] = []
    for option in sorted(options, key=lambda o: (o.bits, o.error)):
        if not kept or option.error < kept[-1].error:
            kept.append(option)
    return kept


def cheapest(elements: Mapping[str, int], options: Mapping[str, Sequence[Option]], budget: float) -> Choice:
    """The options with the least total error whose mean is at most `budget` bits an element.

    Of choices with the same error the one with fewer bits. Raises BudgetError where even the fewest bits are too many.
    """
    kinds = [k for k in elements if elements[k]]
    fronts = {k: front(options[k]) for k in kinds}
    whole = sum(elements[k] for k in kinds)
    limit = Fraction(budget) * whole
    cost = {k: [Fraction(o.bits) * elements[k] for o in fronts[k]] for k in kinds}
    least = sum((cost[k][0] for k in kinds), Fraction(0))
    if least > limit:
        raise BudgetError(
            f"{budget:g} bits an element is less than any choice takes; the least is {float(least / whole):g}"
        )
    hulls = {k: _hull(cost[k], [o.error for o in fronts[k]]) for k in kinds}
    best = _rounded(kinds, hulls, limit - least) if kinds else 0.0
    states: list[tuple[Fraction, float, tuple[int, ...]]] = [(Fraction(0), 0.0, ())]
    for position, kind in enumerate(kinds):
        rest = kinds[position + 1 :]
        bound = _Relaxed([hulls[k] for k in rest])
        grown = sorted(
            ((spent + c, error + o.error, (*chosen, i))
             for spent, error, chosen in states
             for i, (c, o) in enumerate(zip(cost[kind], fronts[kind], strict=True))),
        )  # fmt: skip
        states = []
        for spent, error, chosen in grown:
            if states and error >= states[-1][1]:
                continue
            room = limit - spent - bound.least_cost
            if room >= 0 and error + bound.error(room) <= best * (1 + 1e-9):  # the slack: float sums in another order
                states.append((spent, error, chosen))
    spent, error, chosen = min(states, key=lambda s: (s[1], s[0]))
    picked = {k: fronts[k][i] for k, i in zip(kinds, chosen, strict=True)}
    return Choice(picked, float(spent / whole) if whole else math.nan, error)


_Hull = list[tuple[Fraction, float]]


def _hull(costs: Sequence[Fraction], errors: Sequence[float]) -> _Hull:
    """The lower convex hull of a front's points (cost, error)."""
    hull: _Hull = []
    for point in zip(costs, errors, strict=True):
        while len(hull) >= 2 and _slope(hull[-2], point) <= _slope(hull[-2], hull[-1]):
            hull.pop()
        hull.append(point)
    return hull


def _slope(a: tuple[Fraction, float], b: tuple[Fraction, float]) -> float:
    return (b[1] - a[1]) / float(b[0] - a[0])


class _Relaxed:
    """The least error of the remaining kinds where fractions of recipes are allowed: a bound for every real choice."""

    def __init__(self, hulls: Sequence[_Hull]):
        self.least_cost = sum((h[0][0] for h in hulls), Fraction(0))
        steps = sorted((_slope(a, b), b[0] - a[0], b[1] - a[1]) for h in hulls for a, b in itertools.pairwise(h))
        self._room, self._error = [Fraction(0)], [sum(h[0][1] for h in hulls)]
        for _, width, gain in steps:
            self._room.append(self._room[-1] + width)
            self._error.append(self._error[-1] + gain)

    def error(self, room: Fraction) -> float:
        """At `room` bits above the least cost."""
        i = bisect.bisect_right(self._room, room) - 1
        if i == len(self._room) - 1:
            return self._error[-1]
        part = float((room - self._room[i]) / (self._room[i + 1] - self._room[i]))
        return self._error[i] + part * (self._error[i + 1] - self._error[i])


def _rounded(kinds: Sequence[str], hulls: Mapping[str, _Hull], room: Fraction) -> float:
    """The error of one real choice, to begin with: the steepest steps along the hulls that still fit."""
    error = sum(hulls[k][0][1] for k in kinds)
    steps = sorted(
        (_slope(a, b), position, index, b[0] - a[0], b[1] - a[1])
        for position, k in enumerate(kinds)
        for index, (a, b) in enumerate(itertools.pairwise(hulls[k]))
    )
    stopped: set[int] = set()
    for _, position, _, width, gain in steps:
        if position in stopped or width > room:
            stopped.add(position)
            continue
        room, error = room - width, error + gain
    return error

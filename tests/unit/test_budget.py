"""A recipe for each kind under a budget: the optimum, against every combination."""

from __future__ import annotations

import itertools
import random
from fractions import Fraction

import pytest

from mxrl.report.budget import BudgetError, Option, cheapest, front


def every_combination(
    elements: dict[str, int], options: dict[str, list[Option]], budget: float
) -> tuple[float, Fraction] | None:
    """(least error, its bits)"""
    found = []
    for picked in itertools.product(*options.values()):
        bits = sum((Fraction(o.bits) * n for o, n in zip(picked, elements.values(), strict=True)), Fraction(0))
        if bits <= Fraction(budget) * sum(elements.values()):
            error = 0.0
            for option in picked:
                error += option.error
            found.append((error, bits))
    return min(found, default=None)


@pytest.mark.parametrize("seed", range(200))
def test_it_is_the_optimum(seed: int) -> None:
    draw = random.Random(seed)
    kinds = [f"k{i}" for i in range(draw.randint(1, 5))]
    elements = {k: draw.randint(1, 20) for k in kinds}
    options = {
        k: [
            Option(f"r{j}", draw.choice([4.25, 4.3125, 4.5, 8.25, 8.5]), draw.choice([draw.random(), 0.5]))
            for j in range(draw.randint(1, 5))
        ]
        for k in kinds
    }
    budget = draw.uniform(4.3, 9)
    expected = every_combination(elements, options, budget)
    if expected is None:
        with pytest.raises(BudgetError, match="the least is"):
            cheapest(elements, options, budget)
        return
    choice = cheapest(elements, options, budget)
    assert choice.error == expected[0]
    assert choice.bits == float(expected[1] / sum(elements.values()))
    assert list(choice.options) == kinds
    assert all(choice.options[k] in options[k] for k in kinds)


def test_a_budget_that_is_met_exactly() -> None:
    elements = {"q": 3, "down": 1}
    options = {k: [Option("mxfp4", 4.25, 1.0), Option("mxfp8", 8.25, 0.1)] for k in elements}
    recipes = [o.recipe for o in cheapest(elements, options, 5.25).options.values()]
    assert recipes == ["mxfp4", "mxfp8"]
    assert cheapest(elements, options, 5.2499).bits == 4.25
    assert cheapest(elements, options, 7.25).bits == 5.25  # the same error as with mxfp8 for q, in fewer bits
    assert cheapest(elements, options, 100).bits == 8.25


def test_many_kinds_are_quick_and_few_are_enough() -> None:
    draw = random.Random(0)
    elements = {f"k{i}": draw.randint(10**6, 10**9) for i in range(16)}
    options = {
        k: [Option(str(b), b, n * draw.random() * 4**-b) for b in (4.25, 4.28125, 4.3125, 4.5, 8.25, 8.5, 8.625)]
        for k, n in elements.items()
    }
    for budget in (4.4, 5, 6, 8):
        choice = cheapest(elements, options, budget)  # 7^16 combinations
        assert choice.bits <= budget
        for kind, option in choice.options.items():  # no single step is better
            for other in options[kind]:
                bits = choice.bits + (other.bits - option.bits) * elements[kind] / sum(elements.values())
                assert bits > budget * (1 - 1e-12) or other.error >= option.error
    assert cheapest({}, {}, 4.5).options == {}
    assert cheapest({"q": 0}, {"q": []}, 4.5).options == {}


def test_the_front_keeps_what_nothing_beats() -> None:
    found = front([Option("a", 4.25, 2.0), Option("b", 4.25, 1.5), Option("c", 4.5, 1.5), Option("d", 8.25, 0.5)])
    assert [o.recipe for o in found] == ["b", "d"]

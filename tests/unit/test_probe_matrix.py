"""The rule of the matrix on measures made by hand, whose verdicts are known."""

from __future__ import annotations

import math
from typing import Any

import pytest

from mxrl.probes.matrix import WHOLE, Effect, Effects, cell_of, component_cell, failure, margin, matrix, recipe_cell

Rows = dict[str, tuple[float, float]]  # treatment -> (value, half of the interval)


def result(probe: str, metric: str, rows: Rows, **more: Any) -> dict[str, Any]:
    """A probe's result with one metric; more: values by treatment instead of intervals."""
    measures = [
        {"treatment": t, "metric": metric, "value": v, "low": v - h, "high": v + h, "n": 16, "unit": "cosine"}
        for t, (v, h) in rows.items()
    ]
    return {"probe": probe, "measures": measures, "theory": [], **more}


def gradients(**rows: tuple[float, float]) -> dict[str, dict[str, Any]]:
    """Results of the gradient probe alone; `whole` is mxfp4, `less_` stands for @-, `noise_` for @~."""
    names = {"whole": "mxfp4", "mbs": "mxfp4+mbs"}
    found = {
        names.get(k, "mxfp4@" + k.replace("less_", "-").replace("noise_", "~")): v for k, v in rows.items()
    }  # fmt: skip
    return {"gradient": result("gradient", "grad_cosine", found)}


@pytest.mark.parametrize(
    ("alone", "without", "verdict"),
    [  # the whole effect is .10 ± .01, so a tenth of it, .01, is what counts
        ((0.08, 0.01), (0.03, 0.01), "causes"),  # alone .08; leaving it out takes .07 ± .014 away
        ((0.004, 0.003), (0.1, 0.002), "no part"),  # alone less than .01; takes 0 ± .0102 away… too wide, see below
        ((0.08, 0.01), (0.14, 0.01), "only alone"),  # without it there is even more
        ((0.004, 0.003), (0.05, 0.01), "only in company"),
        ((0.02, 0.015), (0.03, 0.01), "undecided"),  # alone [.005, .035] straddles .01
        ((0.08, 0.01), (0.09, 0.01), "undecided"),  # takes .01 ± .014 away
    ],
)
def test_the_six_outcomes(alone: tuple[float, float], without: tuple[float, float], verdict: str) -> None:
    whole = (0.1, 0.01) if verdict != "no part" else (0.1, 0.004)  # √(.004² + .002²) = .0045 < .01
    effects = Effects(gradients(whole=whole, scale=alone, less_scale=without))
    cell = component_cell(effects, "scale", failure("gradient"))
    assert cell["verdict"] == verdict
    assert cell["margin"] == pytest.approx(0.01)
    assert cell["share"] == pytest.approx(alone[0] / 0.1)
    assert cell["removed"]["value"] == pytest.approx(0.1 - without[0])
    assert cell["removed"]["high"] - cell["removed"]["value"] == pytest.approx(math.hypot(whole[1], without[1]))
    assert not cell["removed"]["paired"] and cell["structure"] is None


def test_a_loss_of_accuracy_is_the_harm_there() -> None:
    rows = {"mxfp4": (-0.2, 0.03), "mxfp4@deadzone": (-0.1, 0.03), "mxfp4@-deadzone": (-0.05, 0.03),
            "mxfp4@scale": (0.1, 0.03), "mxfp4@-scale": (-0.3, 0.03), "mxfp4+of": (-0.1, 0.02)}  # fmt: skip
    table = matrix({"deadzone": result("deadzone", "greedy_accuracy_change", rows)})
    found = {row: cell_of(table, row, "rollout") for row in table["rows"]}
    assert {row: cell["verdict"] for row, cell in found.items() if cell} == {
        "scale": "no part", "deadzone": "causes", "grid": "not measured", WHOLE: "has it", "mxfp4+of": "helps",
    }  # fmt: skip
    assert found["deadzone"] and found["deadzone"]["share"] == pytest.approx(0.5)


def test_differences_are_paired_where_the_values_are_kept() -> None:
    """Prompts differ by ± 1, treatments by .1 on every one: apart the intervals overlap, paired they are narrow."""
    a = Effect(0.1, -0.5, 0.7, 4, (1.1, -0.9, 1.12, -0.92))
    b = Effect(0.0, -0.6, 0.6, 4, (1.0, -1.0, 1.0, -1.0))
    apart = Effect(a.value, a.low, a.high, 4).minus(b)
    assert apart.over(0.0) == "undecided" and apart.values is None
    difference = a.minus(b)
    assert difference.value == pytest.approx(0.1) and difference.values == pytest.approx((0.1, 0.1, 0.12, 0.08))
    assert difference.over(0.0) == "yes" and difference.over(0.0, harm=-1) == "no"
    # .1, .1, .12, .08: sd = √(.0008/3) = .01633, t(3) = 3.182, half = 3.182 · .01633 / 2 = .02598
    assert difference.high is not None and difference.high - difference.value == pytest.approx(0.02598, abs=1e-5)


def test_prompts_without_a_value_are_left_out_of_both() -> None:
    a = Effect(1.0, 0.0, 2.0, 3, (1.0, None, 3.0, 4.0))
    b = Effect(1.0, 0.0, 2.0, 3, (0.5, 9.0, 2.0, None))
    assert a.minus(b).values == (0.5, 1.0)
    assert a.minus(Effect(1.0, None, None, 1)).over(0.0) == "undecided"


def test_equal_shares_are_no_certainty() -> None:
    """Of 30 problems not one changed: the change may still be up to 3/30."""
    row = {"treatment": "mxfp4", "metric": "greedy_accuracy_change", "value": 0.0, "low": 0.0, "high": 0.0, "n": 30}
    found = Effect.of(row | {"unit": "fraction"})
    assert (found.low, found.high) == pytest.approx((-0.1, 0.1))
    assert Effect.of(row | {"unit": "nats"}).low == 0.0


def test_without_an_effect_of_the_whole_everything_counts() -> None:
    effects = Effects(gradients(whole=(0.01, 0.02), scale=(0.004, 0.003), less_scale=(0.0, 0.001)))
    cell = component_cell(effects, "scale", failure("gradient"))
    assert margin(effects.of(failure("gradient"))) == 0 and cell["margin"] == 0 and cell["share"] is None
    assert cell["says"]["alone"] == "yes" and cell["verdict"] == "undecided"


def test_more_than_noise_of_its_energy() -> None:
    effects = Effects(gradients(whole=(0.1, 0.01), scale=(0.08, 0.01), noise_scale=(0.02, 0.01),
                                grid=(0.02, 0.01), noise_grid=(0.05, 0.01)))  # fmt: skip
    scale, grid = (component_cell(effects, c, failure("gradient")) for c in ("scale", "grid"))
    assert (scale["says"]["structure"], grid["says"]["structure"]) == ("yes", "no")
    assert scale["structure"]["value"] == pytest.approx(0.06)


def test_a_correction_is_compared_with_the_plain_recipe() -> None:
    effects = Effects(gradients(whole=(0.1, 0.01), scale=(0.1, 0.01), mbs=(0.05, 0.01)))
    assert effects.base == "mxfp4" and effects.corrections == ("mxfp4+mbs",)
    cell = recipe_cell(effects, "mxfp4+mbs", failure("gradient"))
    assert cell["verdict"] == "helps" and cell["gain"]["value"] == pytest.approx(0.05)
    assert cell["share"] == pytest.approx(0.5)
    assert recipe_cell(effects, "mxfp4", failure("gradient"))["verdict"] == "has it"


def test_the_base_is_the_recipe_that_is_taken_apart() -> None:
    rows = {"mxfp4": (0.2, 0.01), "nvfp4": (0.1, 0.01), "nvfp4@scale": (0.05, 0.01), "bf16": (0.0, 0.0),
            "mxfp4@grid@backward": (9.0, 0.0), "α = .5": (9.0, 0.0)}  # fmt: skip
    effects = Effects({"gradient": result("gradient", "grad_cosine", rows)})
    assert (effects.base, effects.corrections) == ("nvfp4", ("mxfp4",))  # not bf16, nor one pass, nor a foreign name


def test_only_the_probes_that_ran_have_columns() -> None:
    assert [c["name"] for c in matrix(gradients(whole=(0.1, 0.01)))["columns"]] == ["gradient"]
    empty = matrix({"drift": result("drift", "gap_mean_abs", {"mxfp4+of:0.5": (0.1, 0.01)})})
    assert (empty["columns"], empty["cells"]) == ([], [])

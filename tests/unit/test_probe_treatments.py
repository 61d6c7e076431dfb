"""The grammar of treatments, what they leave behind, and the intervals of probes."""

from __future__ import annotations

import math
from statistics import NormalDist

import pytest
import torch
from tiny_models import tiny_model, tokens

import mxrl
from mxrl.nn import RolloutError, quantized_layers
from mxrl.probes.intervals import mean, paired, t95
from mxrl.probes.treatments import Treatment, TreatmentError, treated, treatments
from mxrl.recipes import RecipeError


@pytest.mark.parametrize(
    ("text", "components", "control", "passes"),
    [
        ("mxfp4", "scale deadzone grid", False, "both"),
        ("mxfp4+mbs+of@scale", "scale", False, "both"),
        ("mxfp4@-grid", "scale deadzone", False, "both"),
        ("nvfp4@~deadzone", "deadzone", True, "both"),
        ("mxfp4@~", "scale deadzone grid", True, "both"),
        ("mxfp4@forward", "scale deadzone grid", False, "forward"),
        ("mxfp4@~scale@backward", "scale", True, "backward"),
        ("bf16", "scale deadzone grid", False, "both"),
    ],
)
def test_grammar_reads_and_prints(text: str, components: str, control: bool, passes: str) -> None:
    found = Treatment.parse(text)
    assert (found.components, found.control, found.passes) == (frozenset(components.split()), control, passes)
    assert str(found) == text and Treatment.parse(found) is found


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("mxfp4@scales", "can't read '@scales'; possible: @NAME"),
        ("mxfp4@scale@grid", "can't read '@grid'"),
        ("mxfp4@--scale", "can't read '@--scale'"),
        ("mxfp4@forward@backward", "can't read '@backward'"),
        ("mxfp4+aqn@scale", "takes no aqn"),
        ("bf16@scale", "has no error"),
        ("mxfp4@", "can't read '@'"),
    ],
)
def test_grammar_says_what_is_wrong(text: str, match: str) -> None:
    with pytest.raises(TreatmentError, match=match):
        Treatment.parse(text)


def test_unknown_recipe_is_a_recipe_error() -> None:
    with pytest.raises(RecipeError, match="mxfp5"):
        Treatment.parse("mxfp5@scale")


def test_usual_set_names_every_component_three_ways_once() -> None:
    found = list(map(str, treatments(("mxfp4", "mxfp4+of", "mxfp4"))))
    assert found == [
        "mxfp4", "mxfp4+of", "mxfp4@scale", "mxfp4@deadzone", "mxfp4@grid", "mxfp4@-scale", "mxfp4@-deadzone",
        "mxfp4@-grid", "mxfp4@~scale", "mxfp4@~deadzone", "mxfp4@~grid",
    ]  # fmt: skip
    parsed = Treatment.parse("mxfp4@-grid")
    assert (parsed.component, parsed.without, Treatment.parse("mxfp4@~grid").component) == ("", "grid", "grid")


def test_forward_alone_leaves_every_gradient_to_the_master_weights() -> None:
    model = tiny_model("qwen3")
    mxrl.convert(model, "mxfp4")
    layer = model.model.layers[0].mlp.down_proj
    x = torch.randn(5, layer.in_features, requires_grad=True)
    dy = torch.randn(5, layer.out_features)
    for recipe in ("mxfp4", "mxfp4+quantize_grad=True"):
        with treated(model, f"{recipe}@forward"):
            (dx,) = torch.autograd.grad(layer(x), x, dy)
        assert torch.equal(dx, dy @ layer.weight)


def test_treated_restores_layers_and_random_state_after_an_error() -> None:
    model = tiny_model("qwen3")
    mxrl.convert(model, "mxfp4+mbs", skip=["*.0.*.down_proj"])
    ids = tokens()
    before, operands = model(ids).logits, [layer.operands for layer in quantized_layers(model)]
    state = torch.get_rng_state()
    with pytest.raises(KeyError), treated(model, "mxfp4@~scale", seed=5):
        noisy = model(ids).logits
        raise KeyError
    assert torch.equal(torch.get_rng_state(), state)
    assert [layer.operands for layer in quantized_layers(model)] == operands
    assert torch.equal(model(ids).logits, before)
    with treated(model, "mxfp4@~scale", seed=5):
        assert torch.equal(model(ids).logits, noisy)
    with treated(model, "mxfp4@~scale", seed=6):
        assert not torch.equal(model(ids).logits, noisy)


def test_treated_needs_a_converted_model() -> None:
    with pytest.raises(RolloutError, match="convert"), treated(tiny_model("qwen3"), "mxfp4"):
        pass


def test_mean_with_students_interval() -> None:
    found = mean([1.0, 2.0, 3.0, 6.0])  # mean 3, sd √(14/3), t(3) = 3.182
    half = 3.182 * math.sqrt(14 / 3) / 2
    assert found.value == 3.0 and found.n == 4
    assert math.isclose(found.high - 3.0, half) and math.isclose(3.0 - found.low, half)
    assert not found.excludes(0.0) and found.excludes(7.0)
    assert paired([2.0, 4.0], [1.0, 3.0]) == (1.0, 1.0, 1.0, 2)
    single = mean([4.0])
    assert math.isnan(single.low) and not single.excludes(0.0)
    with pytest.raises(ValueError, match="at least one"):
        mean([])
    with pytest.raises(ValueError, match="2 and 1"):
        paired([1.0, 2.0], [1.0])


def test_t_quantile_runs_into_the_normals() -> None:
    known = {1: 12.706, 10: 2.228, 30: 2.042, 40: 2.0211, 60: 2.0003, 120: 1.9799}  # of any table
    assert all(abs(t95(n) - value) < 2e-3 for n, value in known.items())
    assert abs(t95(10**9) - NormalDist().inv_cdf(0.975)) < 1e-6

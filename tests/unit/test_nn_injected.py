"""A layer whose operands get some components of the error: against x + the components, and in one pass only."""

from __future__ import annotations

import pytest
import torch
from tiny_models import MOE, tiny_model, tokens

import mxrl
from mxrl.nn import RolloutError, quantized_layers, rollout_weights
from mxrl.nn.injected import Injected
from mxrl.nn.operands import Operands
from mxrl.ops.inject import COMPONENTS
from mxrl.probes.treatments import Treatment, treated
from mxrl.recipes import Recipe

ALL = frozenset(COMPONENTS)


def x_of(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(5, 3, 80, generator=torch.Generator().manual_seed(3)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", ["mxfp4", "mxfp4+mbs+of", "nvfp4", "mxfp8"])
@pytest.mark.parametrize("dim", [-1, -2])
def test_all_components_are_the_recipe_and_a_part_is_x_plus_it(recipe: str, dtype: torch.dtype, dim: int) -> None:
    x, parsed = x_of(dtype), Recipe.parse(recipe)
    assert torch.equal(Injected(parsed, ALL)(x, dim), mxrl.fake_quantize(x, recipe, dim=dim))
    parts = mxrl.decompose(x, recipe, dim=dim)
    for name in COMPONENTS:
        expected = (x.double() + getattr(parts, name)).to(dtype)
        assert torch.equal(Injected(parsed, frozenset({name}))(x, dim), expected)


@pytest.mark.parametrize("dim", [-1, -2])
def test_control_has_the_energy_of_each_row_and_none_of_the_structure(dim: int) -> None:
    x, names = torch.randn(20, 48, 80, generator=torch.Generator().manual_seed(3)), frozenset({"grid"})
    x[0, 0] = 0.0  # a row without an error gets no noise
    error = Injected(Recipe.parse("mxfp4"), names)(x, dim) - x
    torch.manual_seed(0)
    noise = Injected(Recipe.parse("mxfp4"), names, control=True)(x, dim) - x
    # x + noise is rounded to float32, so its norm is that of the error to a few rounding errors of x
    torch.testing.assert_close(noise.norm(dim=dim), error.norm(dim=dim), rtol=1e-4, atol=1e-5)
    assert abs(float((noise * error).sum() / error.norm() ** 2)) < 0.02  # 6 sd of 76,800 independent products
    if dim == -1:
        assert torch.equal(noise[0, 0], torch.zeros(80))
    torch.manual_seed(0)
    assert torch.equal(Injected(Recipe.parse("mxfp4"), names, control=True)(x, dim) - x, noise)


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("family", ["qwen3", *MOE])
def test_treated_models_by_pass(family: str) -> None:
    """Forward only: backward="master"'s numbers. Backward only: bf16's forward pass, the recipe's backward GEMMs."""
    model = tiny_model(family)
    mxrl.convert(model, "bf16")
    ids = tokens()

    def run(text: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
        model.zero_grad()
        with treated(model, text):
            logits = model(ids).logits
            logits.float().square().mean().backward()
        return logits.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]

    plain, whole = run("bf16"), run("mxfp4")
    forward, backward = run("mxfp4@forward"), run("mxfp4@backward")
    assert torch.equal(forward[0], whole[0]) and not torch.equal(whole[0], plain[0])
    assert torch.equal(backward[0], plain[0])
    assert not same(backward[1], plain[1]) and not same(forward[1], whole[1]) and not same(forward[1], plain[1])
    assert not torch.equal(run("mxfp4@scale")[0], whole[0])
    with treated(model, "mxfp4+backward=master"):
        assert torch.equal(model(ids).logits, forward[0])
    assert torch.equal(model(ids).logits, plain[0])


def test_backward_only_layer_written_out() -> None:
    layer = mxrl.nn.QuantizedLinear(64, 32, bias=False)
    layer.operands = Treatment.parse("mxfp4@backward").operands()
    x, dy = torch.randn(4, 64), torch.randn(4, 32)
    x.requires_grad_()
    y = layer(x)
    y.backward(dy)
    assert torch.equal(y, torch.nn.functional.linear(x, layer.weight))
    assert torch.equal(x.grad, dy @ mxrl.fake_quantize(layer.weight.detach(), "mxfp4"))
    assert torch.equal(layer.weight.grad, dy.t() @ mxrl.fake_quantize(x.detach(), "mxfp4"))


def test_rollout_holds_injected_weights_and_refuses_backward_only() -> None:
    model = tiny_model("qwen3")
    mxrl.convert(model, "bf16")
    ids = tokens()
    with treated(model, "mxfp4@-scale"), torch.no_grad():
        plain = model(ids).logits
        with rollout_weights(model):
            layer = next(quantized_layers(model))
            expected = Injected(Recipe(), ALL - {"scale"})(layer.module.weight)
            assert torch.equal(layer.module.held.value, expected)
            assert torch.equal(model(ids).logits, plain)
            with pytest.raises(RolloutError, match="inside rollout_weights"), treated(model, "mxfp4"):
                pass
    with (
        treated(model, "mxfp4@backward"),
        pytest.raises(RolloutError, match="backward pass only"),
        rollout_weights(model),
    ):
        pass


def test_operands_of_nvfp4_stay_tensor_scaled() -> None:
    assert Treatment.parse("nvfp4@scale").operands().tensor_scaled
    assert not Treatment.parse("mxfp4@scale").operands().tensor_scaled
    assert Treatment.parse("mxfp4").operands() == Operands.of(Recipe())

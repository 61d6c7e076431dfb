"""The straight-through linear layer against its formulas, written out.

Most comparisons are exact: in float64, MXFP4 values and small integers have so few bits that every product and every
partial sum is exact, so the order of summation can't matter.
"""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

import mxrl
from mxrl.nn import QuantizedLinear
from mxrl.nn.operands import quantize_operand
from mxrl.recipes import Recipe

T, K, OUT = 6, 80, 48  # two blocks and a ragged one of 16
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def few_bits(*shape: int, seed: int) -> Tensor:
    """Multiples of 1/64 within ±8, with column scales 1/16 ... 16 so that blocks differ; float64."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-512, 513, shape, generator=generator).double() / 64
    return values * torch.exp2(torch.randint(-4, 5, (shape[-1],), generator=generator).double())


def layer_with(recipe: Recipe | str, dtype: torch.dtype = torch.float64, bias: bool = True) -> QuantizedLinear:
    layer = QuantizedLinear(K, OUT, bias=bias, recipe=recipe, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(few_bits(OUT, K, seed=1))
        if bias:
            layer.bias.copy_(few_bits(OUT, seed=2))
    return layer.to(dtype)


def run(layer: nn.Module, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x = x.clone().requires_grad_()
    layer.zero_grad()
    y = layer(x)
    y.backward(dy)
    return y.detach(), x.grad, layer.weight.grad.clone(), layer.bias.grad.clone()


def q(x: Tensor, recipe: str | None, dim: int = -1) -> Tensor:
    return x if recipe is None else mxrl.fake_quantize(x, recipe, dim=dim)


@pytest.mark.parametrize("backward", ["quantized", "master"])
@pytest.mark.parametrize("quantize_grad", [False, True])
@pytest.mark.parametrize(
    ("recipe", "weight", "activation", "grad"),
    [
        ("bf16", None, None, None),
        ("mxfp4", "mxfp4", "mxfp4", "mxfp4"),
        ("mxfp4:even+of", "mxfp4:even+of", "mxfp4:even+of", "mxfp4:even"),
        ("mxfp4+of+w4a8", "mxfp4+of", "mxfp8", "mxfp4"),
        ("mxfp4+w4a16", "mxfp4", None, "mxfp4"),
        ("mxfp8", "mxfp8", "mxfp8", "mxfp8"),
        ("mxfp4+aqn", "mxfp4", "mxfp4", "mxfp4"),
    ],
)
def test_forward_and_gradients(recipe, weight, activation, grad, quantize_grad, backward):
    if recipe == "bf16":
        quantize_grad = False  # there is nothing to quantize with
    text = f"{recipe}+backward={backward}+quantize_grad={quantize_grad}"
    layer = layer_with(text)
    x = few_bits(2, T // 2, K, seed=3)
    dy = torch.randint(-50, 51, (2, T // 2, OUT), generator=torch.Generator().manual_seed(4)).double()
    y, dx, dw, db = run(layer, x, dy)

    w, b, rows, drows = layer.weight.detach(), layer.bias.detach(), x.view(T, K), dy.view(T, OUT)
    y_ref = torch.zeros(T, OUT, dtype=torch.float64)
    wq, xq = q(w, weight), q(rows, activation)
    for t in range(T):
        for o in range(OUT):
            y_ref[t, o] = (xq[t] * wq[o]).sum() + b[o]
    assert torch.equal(y.view(T, OUT), y_ref)

    if quantize_grad:  # every operand blocked along the axis that the GEMM contracts: OUT for dx, tokens for dw
        dy_o, dy_t = q(drows, grad, 1), q(drows, grad, 0)
        w_back, x_back = (w, rows) if backward == "master" else (q(w, weight, 0), q(rows, activation, 0))
    else:
        dy_o = dy_t = drows
        w_back, x_back = (w, rows) if backward == "master" else (wq, xq)
    assert torch.equal(dx.view(T, K), (dy_o[:, :, None] * w_back[None]).sum(1))
    assert torch.equal(dw, (dy_t[:, :, None] * x_back[:, None, :]).sum(0))
    assert torch.equal(db, drows.sum(0))


@pytest.mark.parametrize("recipe", ["mxfp4+mbs", "mxfp4+mbs:search16+of:0.25", "nvfp4", "nvfp4:4over6", "mxfp4:e8m3"])
def test_scales_that_are_no_powers_of_two(recipe):
    layer, x = layer_with(recipe), few_bits(T, K, seed=3)
    dy = torch.randint(-50, 51, (T, OUT)).double()
    y, dx, dw, _ = run(layer, x, dy)
    xq, wq = mxrl.fake_quantize(x, recipe), mxrl.fake_quantize(layer.weight.detach(), recipe)
    close = dict(rtol=1e-13, atol=1e-10)  # such products have more than 53 bits; sums reach 1e4
    torch.testing.assert_close(y, xq @ wq.T + layer.bias.detach(), **close)
    torch.testing.assert_close(dx, dy @ wq, **close)
    torch.testing.assert_close(dw, dy.T @ xq, **close)


def block_values(packed: mxrl.QuantizedTensor) -> list[tuple[Tensor, Tensor]]:
    """(element values [R, blocks, 32], block scales [R, blocks]) of each pass, from the stored bytes alone."""
    low, high = packed.codes & 15, packed.codes >> 4
    codes = torch.stack([low, high], dim=-1).flatten(-2)
    elements = torch.tensor(E2M1 + [-v for v in E2M1], dtype=torch.float64)[codes.long()]
    elements = nn.functional.pad(elements, (0, -elements.shape[-1] % 32)).unflatten(-1, (-1, 32))
    scales = torch.exp2(packed.scales.double() - 127)
    passes = [(elements, scales)]
    if packed.residual is not None:
        passes += block_values(packed.residual)
    return passes


@pytest.mark.parametrize(("recipe", "weights_of_passes"), [("mxfp4", [1.0]), ("mxfp4+of:0.25", [1.0, 0.25])])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_emulation_is_a_block_scaled_dot_product(recipe, weights_of_passes, dtype):
    """What a 4-bit kernel computes, Σ_blocks s_x·s_w·Σ codes in float64, against quantize-dequantize and a GEMM."""
    layer, x = layer_with(recipe, dtype, bias=False), few_bits(T, K, seed=3).to(dtype)
    x_passes = block_values(mxrl.quantize(x, recipe))
    w_passes = block_values(mxrl.quantize(layer.weight.detach(), recipe))
    dot = torch.zeros(T, OUT, dtype=torch.float64)
    for alpha_x, (x_codes, x_scale) in zip(weights_of_passes, x_passes, strict=True):
        for alpha_w, (w_codes, w_scale) in zip(weights_of_passes, w_passes, strict=True):
            for b in range(x_codes.shape[1]):
                block = x_codes[:, b] @ w_codes[:, b].T
                dot += alpha_x * alpha_w * x_scale[:, b, None] * w_scale[None, :, b] * block
    with torch.no_grad():
        y = layer(x).double()
    if dtype == torch.float64:
        assert torch.equal(y, dot)
    else:  # the result is rounded to bf16 once, and OF's operands too: 2^-8 each, of the sum of magnitudes
        xq, wq = mxrl.fake_quantize(x, recipe), mxrl.fake_quantize(layer.weight.detach(), recipe)
        size = xq.double().abs() @ wq.double().abs().T
        assert ((y - dot).abs() <= 2**-8 * (dot.abs() + 2 * size * (len(weights_of_passes) > 1)) + 1e-6 * size).all()


@pytest.mark.parametrize("recipe", ["mxfp4", "mxfp4+mbs+of", "nvfp4", "bf16"])
def test_float32_weight_is_cast_before_it_is_quantized(recipe):
    layer = layer_with(recipe, torch.float32)
    torch.nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(5))
    x = torch.randn(T, K, generator=torch.Generator().manual_seed(6))
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x.requires_grad_())
    y.backward(torch.ones_like(y))
    wq = mxrl.fake_quantize(layer.weight.detach().bfloat16(), recipe)
    xq = mxrl.fake_quantize(x.detach().bfloat16(), recipe)
    assert y.dtype == torch.bfloat16 and torch.equal(y, nn.functional.linear(xq, wq, layer.bias.detach().bfloat16()))
    if recipe == "mxfp4":
        assert not torch.equal(
            wq, mxrl.fake_quantize(layer.weight.detach(), recipe).bfloat16()
        )  # the other order differs
    dy = torch.ones(T, OUT, dtype=torch.bfloat16)
    for gradient, reference in ((layer.weight.grad, dy.T @ xq), (x.grad, dy @ wq), (layer.bias.grad, dy.sum(0))):
        assert gradient.dtype == torch.float32 and torch.equal(gradient, reference.float())


@pytest.mark.parametrize("autocast", [False, True])
def test_bf16_recipe_is_the_plain_linear_layer(autocast):
    layer = layer_with("bf16", torch.float32)
    plain = nn.Linear(K, OUT)
    plain.load_state_dict(layer.state_dict())
    x, dy = torch.randn(2, 3, K), torch.randn(2, 3, OUT)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        if autocast:
            dy = dy.bfloat16()
        for ours, theirs in zip(run(layer, x, dy), run(plain, x, dy), strict=True):
            assert torch.equal(ours, theirs) and ours.dtype == theirs.dtype


def test_autocast_leaves_float64_alone():
    layer, x = layer_with("mxfp4"), few_bits(T, K, seed=3)
    with torch.no_grad():
        expected = layer(x)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(layer(x), expected)


def test_meta_device():
    with torch.device("meta"):
        assert QuantizedLinear(K, OUT, recipe="bf16")(torch.empty(T, K)).shape == (T, OUT)


@pytest.mark.parametrize(("recipe", "quantized"), [("mxfp4", True), ("mxfp4+backward=master", False)])
def test_backward_keeps_only_the_two_tensors_it_uses(recipe, quantized):
    layer, x = layer_with(recipe), few_bits(T, K, seed=3).requires_grad_()
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer(x)
    expected = [x.detach(), layer.weight.detach()]
    expected = [mxrl.fake_quantize(t, "mxfp4") for t in expected] if quantized else expected
    assert len(saved) == 2 and all(torch.equal(a, b) for a, b in zip(saved, expected, strict=True))


def test_second_derivative_is_refused():
    layer, x = layer_with("mxfp4"), few_bits(T, K, seed=3).requires_grad_()
    (dx,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def test_frozen_weight_gets_no_gradient():
    layer = layer_with("mxfp4").requires_grad_(False)
    x = few_bits(T, K, seed=3).requires_grad_()
    layer(x).sum().backward()
    assert layer.weight.grad is None and x.grad is not None


def test_copies_and_pickles():
    layer, x = layer_with("mxfp4+mbs+of:0.25"), few_bits(T, K, seed=3)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert other.recipe == layer.recipe and torch.equal(other(x), layer(x))
    assert list(layer.state_dict()) == ["weight", "bias"] and "recipe=mxfp4+mbs+of:0.25" in repr(layer)


@pytest.mark.parametrize("recipe", ["mxfp4+mbs+of", "mxfp4+w4a8+quantize_grad=True", "bf16"])
def test_compiles_without_a_graph_break(recipe):
    torch.manual_seed(0)
    model = nn.Sequential(QuantizedLinear(K, OUT, recipe=recipe), nn.SiLU(), QuantizedLinear(OUT, 8, recipe=recipe))
    x = torch.randn(T, K)

    def gradients(module: nn.Module) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        y = module(leaf)
        return [y, *torch.autograd.grad(y.square().sum(), [leaf, *model.parameters()])]

    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)  # inductor takes 25 s here
    for ours, eager in zip(gradients(compiled), gradients(model), strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-6, atol=1e-5)  # bias sums may be ordered otherwise


def test_operand_without_recipe_is_the_tensor_itself():
    x = few_bits(2, 32, seed=0)
    assert quantize_operand(x, None) is x

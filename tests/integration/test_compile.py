"""torch.compile of whole converted models, forward and backward: one graph, and eager's numbers."""

from __future__ import annotations

import shutil

import pytest
import torch
from tiny_models import tiny_model, tokens
from torch import Tensor, nn

import mxrl
from mxrl.nn import QuantizedLinear
from mxrl.recipes import Recipe


def converted(family: str, recipe: str, dtype: torch.dtype):
    model = tiny_model(family, dtype=dtype)
    mxrl.convert(model, recipe)
    return model.train()


def gradients(model: nn.Module, fn, t: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    out = fn(input_ids=t, labels=t, use_cache=False)
    out.loss.backward()
    return {"logits": out.logits.detach(), **{name: p.grad.clone() for name, p in model.named_parameters()}}


@pytest.mark.parametrize(
    ("family", "recipe", "dtype"),
    [
        ("qwen3", "mxfp4+mbs+of", torch.float32),
        ("qwen3_moe", "mxfp4+of+pack_saved=True", torch.bfloat16),  # grouped GEMMs
        ("qwen3_moe", "nvfp4", torch.float32),  # the loop
    ],
)
def test_one_graph_and_the_same_bits(family, recipe, dtype):
    """aot_eager runs the same kernels in the same order, so that nothing may differ."""
    model, t = converted(family, recipe, dtype), tokens()
    expected = gradients(model, model, t)
    torch._dynamo.reset()
    ours = gradients(model, torch.compile(model, backend="aot_eager", fullgraph=True), t)
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[name], value) for name, value in expected.items())


def test_no_graph_breaks_under_autocast():
    model, t = converted("qwen3_moe", "mxfp4", torch.float32), tokens()
    torch._dynamo.reset()
    with torch.autocast("cpu", torch.bfloat16):
        explained = torch._dynamo.explain(model)(input_ids=t, labels=t, use_cache=False)
    assert explained.graph_break_count == 0 and explained.graph_count == 1, explained.break_reasons


@pytest.mark.skipif(not (shutil.which("c++") or shutil.which("g++")), reason="inductor needs a C++ compiler")
def test_inductor():
    torch.manual_seed(0)
    recipe = "mxfp4+of+pack_saved=True"
    model = nn.Sequential(QuantizedLinear(64, 48, recipe=recipe), nn.SiLU(), QuantizedLinear(48, 32, recipe=recipe))
    x = torch.randn(5, 64)

    def run(fn) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        y = fn(leaf)
        return [y, *torch.autograd.grad(y.square().sum(), [leaf, *model.parameters()])]

    torch._dynamo.reset()
    for ours, eager in zip(run(torch.compile(model, fullgraph=True)), run(model), strict=True):
        # its SiLU and sums round otherwise; none of these values lies so close to a threshold that it moves
        torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("recipe", ["bf16", "mxfp4", Recipe.parse("mxfp4+mbs+of"), "nvfp4"])
@pytest.mark.parametrize("dim", [-1, 0])
def test_fake_quantize_is_one_operator_of_a_whole_graph(recipe, dim):
    def function(x):
        return mxrl.fake_quantize(x, recipe, dim=dim) * 2 + mxrl.fake_quantize(x, recipe, dim=dim, out=x.clone())

    x = torch.randn(40, 96, generator=torch.Generator().manual_seed(0), requires_grad=True)
    y = torch.compile(function, fullgraph=True, backend="aot_eager")(x)
    assert torch.equal(y, function(x))

"""Grouped GEMMs against one GEMM an expert, and experts against a loop of the linear layer; no host synchronisation."""

from __future__ import annotations

import pytest
import torch
from tiny_models import MOE, tiny_model
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException

import mxrl
from mxrl.nn import grouped, operands
from mxrl.nn.activations import quantize_activation
from mxrl.nn.experts import quantize_weight, quantized_experts_forward, weight_names
from mxrl.nn.grouped import fits, grouped_mm, grouped_outer, quantize_groups, route
from mxrl.nn.linear import straight_through
from mxrl.recipes import Recipe

E, BF16 = 4, torch.bfloat16
COUNTS = [[10, 0, 20, 7], [0, 0, 0, 5], [37, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]]


def rows_of(counts: list[int]) -> tuple[Tensor, Tensor]:
    """(expert of each row, ends)"""
    counts_E = torch.tensor(counts)
    return torch.arange(len(counts)).repeat_interleave(counts_E), counts_E.cumsum(0).to(torch.int32)


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, BF16])
@pytest.mark.parametrize(("k", "o"), [(64, 96), (33, 20)])  # the second has no 16-byte strides
@pytest.mark.parametrize("transposed", [False, True])
def test_one_gemm_an_expert(counts, dtype, k, o, transposed):
    expert_S, ends_E = rows_of(counts)
    x, dy = randn(len(expert_S), k, dtype=dtype), randn(len(expert_S), o, dtype=dtype, seed=1)
    w = randn(E, k, o, dtype=dtype, seed=2) if transposed else randn(E, o, k, dtype=dtype, seed=2).mT
    ends = [0, *ends_E.tolist()]
    parts = [slice(ends[e], ends[e + 1]) for e in range(E)]
    y = grouped_mm(x, w, None, expert_S, ends_E)
    assert torch.equal(y, torch.cat([x[rows] @ w[e] for e, rows in enumerate(parts)]))
    outer = grouped_outer(dy, x, ends_E)
    assert outer.shape == (E, o, k) and outer.is_contiguous()
    assert torch.equal(outer, torch.stack([dy[rows].t() @ x[rows] for rows in parts]))
    bias = randn(E, o, dtype=dtype, seed=3)
    ours = grouped_mm(x, w, bias, expert_S, ends_E)
    if fits(dtype, k, o):  # the product is rounded, then the sum
        assert torch.equal(ours, y + bias[expert_S])
    else:
        assert torch.equal(ours, torch.cat([torch.addmm(bias[e], x[rows], w[e]) for e, rows in enumerate(parts)]))


def test_rule():
    assert fits(BF16, 64, 96) and not fits(BF16, 64, 33)
    assert not any(fits(dtype, 64, 96) for dtype in (torch.float16, torch.float32, torch.float64))


def test_route():
    index = torch.tensor([[2, 0], [3, 2], [0, 2], [4, 3]])  # 4 = E: an expert on another rank
    where = route(index, E)
    flat = [2, 0, 3, 2, 0, 2, 3, 3]
    order = sorted(range(8), key=lambda pair: flat[pair])
    assert where.order_S.tolist() == order and where.expert_S.tolist() == sorted(flat)
    assert where.place_S[where.order_S].tolist() == list(range(8))
    assert where.ends_E.tolist() == [2, 2, 5, 8] and where.ends_E.dtype == torch.int32
    empty = route(index[:0], E)
    assert empty.ends_E.tolist() == [0] * E and len(empty.order_S) == 0


@pytest.mark.parametrize("recipe", ["mxfp4", "nvfp4"])
@pytest.mark.parametrize("dim", [0, 1])
def test_groups_are_quantized_by_themselves(recipe, dim):
    x, (_, ends_E) = randn(37, 64, dtype=torch.float32), rows_of(COUNTS[0])
    x = x * torch.arange(1, 38)[:, None]
    ours = quantize_groups(x, Recipe.parse(recipe), dim, ends_E)
    groups = [x[:10], x[10:30], x[30:]]
    assert torch.equal(ours, torch.cat([mxrl.fake_quantize(g, recipe, dim=dim) for g in groups]))


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_operators_for_torch_compile(dtype):
    (expert_S, ends_E), x = rows_of(COUNTS[0]), randn(37, 64, dtype=dtype)
    w, bias = randn(E, 64, 96, dtype=dtype), randn(E, 96, dtype=dtype)
    torch.library.opcheck(grouped._grouped_mm_operator, (x, w, bias, expert_S, ends_E))
    torch.library.opcheck(grouped._grouped_mm_operator, (x, w.mT.contiguous().mT, None, expert_S, ends_E))
    torch.library.opcheck(grouped._grouped_outer_operator, (x, x, ends_E))
    torch.library.opcheck(grouped._quantize_groups_operator, (x, "mxfp4", 0, ends_E))


# --- the layer -------------------------------------------------------------------------------------------------------


def loop(module, x_TH: Tensor, index: Tensor, gates: Tensor) -> Tensor:
    """One linear layer an expert, one expert after another."""
    ops = module.mxrl_state.operands
    expert_S, order_S = index.reshape(-1).sort(stable=True)
    counts = torch.bincount(expert_S, minlength=E).tolist()
    rows = x_TH[order_S // index.shape[1]]
    xq = quantize_activation(x_TH, ops, x_TH.dtype).value[order_S // index.shape[1]]
    for name in weight_names(module):
        weight = getattr(module, name)
        weight_q = quantize_weight(module, name, weight.detach(), ops)
        if module.is_transposed:
            weight, weight_q = weight.mT, weight_q.mT
        bias = getattr(module, f"{name}_bias").unbind(0) if module.has_bias else [None] * E
        parts = zip(rows.split(counts), weight.unbind(0), bias, xq.split(counts), weight_q.unbind(0), strict=True)
        out = [
            straight_through(x, w, b, type(ACTIVATION)(q), wq, ops, x.dtype)
            for n, (x, w, b, q, wq) in zip(counts, parts, strict=True)
            if n
        ]
        rows = torch.cat(out)
        if name != "down_proj":
            rows = module._apply_gate(rows)
            xq = quantize_activation(rows, ops, rows.dtype).value
    pairs = (rows * gates.reshape(-1)[order_S, None])[order_S.argsort()]
    return pairs.view(*index.shape, -1).sum(1)


ACTIVATION = quantize_activation(torch.zeros(1, 32), operands.Operands.of(Recipe("bf16")), torch.float32)


def experts_of(family: str, recipe: str, dtype: torch.dtype):
    model = tiny_model(family, dtype=dtype)
    mxrl.convert(model, recipe)
    return model.model.layers[0].mlp.experts


def inputs(dtype: torch.dtype, tokens: int = 37) -> tuple[Tensor, Tensor, Tensor]:
    """Token states, expert indices (expert 3 is idle) and routing weights."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, 64, generator=generator).to(dtype)
    index = torch.stack([torch.randperm(E - 1, generator=generator)[:2] for _ in range(tokens)])
    return x, index, torch.rand(tokens, 2, generator=generator).to(dtype)


RECIPES = [
    "bf16", "mxfp4+mbs+of", "nvfp4", "mxfp4+backward=master", "mxfp4+w4a16", "mxfp4+quantize_grad=True",
    "nvfp4+quantize_grad=True+backward=master",
]  # fmt: skip


@pytest.mark.parametrize("family", MOE)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_the_layer_is_a_loop_over_experts(family, recipe, dtype):
    module = experts_of(family, recipe, dtype)
    results = []
    for forward in (quantized_experts_forward, loop):
        x, index, gates = inputs(dtype)
        leaves = [x.requires_grad_(), gates.requires_grad_(), *module.parameters()]
        y = forward(module, x, index, gates)
        results.append([y, *torch.autograd.grad(y, leaves, randn(*y.shape, dtype=dtype, seed=5))])
    names = ["y", "x", "routing", *dict(module.named_parameters())]
    for name, ours, theirs in zip(names, *results, strict=True):
        if family != "gpt_oss":
            assert torch.equal(ours, theirs), name
        elif dtype == torch.float32:  # biases' gradients are GEMMs with ones: float32 sums in another order
            assert torch.equal(ours, theirs) or name.endswith("_bias"), name
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        elif "quantize_grad" not in recipe and "nvfp4" not in recipe:
            # A bias is added to the rounded product, an ulp (2^-8) from the loop; that may move a value of the inner
            # activation over a 4-bit threshold. nvfp4: over that of the whole tensor's scale, and all move.
            assert (ours - theirs).norm() <= 0.03 * theirs.norm(), name


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_nothing_waits_for_the_device(family, monkeypatch):
    """FakeTensorMode has no values to give to the host: .tolist(), .item() and nonzero() raise."""
    monkeypatch.setattr(operands, "fake_quantize", lambda x, recipe, dim: x.clone())  # its kernels aren't the question
    module = experts_of(family, "mxfp4", BF16)
    x, index, gates = inputs(BF16)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        x, index, gates = (mode.from_tensor(v) for v in (x, index, gates))
        y = quantized_experts_forward(module, x.requires_grad_(), index, gates.requires_grad_())
        assert y.shape == (37, 64)
        grads = torch.autograd.grad(y.sum(), [x, gates, *module.parameters()])
        assert [g.shape for g in grads[2:]] == [p.shape for p in module.parameters()]
        with torch.no_grad():
            quantized_experts_forward(module, x, index, gates)
    for other in ("mxfp4+quantize_grad=True", "mxfp4"):  # the two that are said to wait
        module = experts_of(family, other, BF16 if "grad" in other else torch.float32)
        dtype = next(module.parameters()).dtype
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, pytest.raises(DataDependentOutputException):
            x, index, gates = (mode.from_tensor(v) for v in inputs(dtype))
            quantized_experts_forward(module, x.requires_grad_(), index, gates).sum().backward()


def test_only_what_needs_a_gradient_gets_one():
    module = experts_of("gpt_oss", "mxfp4+pack_saved=True", BF16)
    x, index, gates = inputs(BF16)
    module(x, index, gates).sum().backward()
    assert x.grad is None and module.gate_up_proj.grad is not None
    module.requires_grad_(False)
    y = module(x.requires_grad_(), index, gates)
    y.sum().backward()
    assert x.grad is not None and x.grad.dtype == BF16


# --- on a GPU --------------------------------------------------------------------------------------------------------

on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@on_cuda
@pytest.mark.parametrize("counts", COUNTS)
def test_cuda_gives_an_idle_expert_zeros_whatever_memory_held(counts):
    expert_S, ends_E = (v.cuda() for v in rows_of(counts))
    x, dy = (randn(len(expert_S), size, dtype=BF16).cuda() for size in (64, 96))
    expected = torch.stack(
        [dy[expert_S == e].double().t() @ x[expert_S == e].double() for e in range(E)]
    )  # sums of up to 37 products, rounded to bf16
    for _ in range(10):
        poison = torch.full((1 << 24,), float("nan"), dtype=BF16, device="cuda")
        del poison
        outer = grouped_outer(dy, x, ends_E)
        assert (outer[[n == 0 for n in counts]] == 0).all()
        torch.testing.assert_close(outer.double(), expected, rtol=2**-8, atol=1e-4)


@on_cuda
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("recipe", ["mxfp4+mbs+of", "nvfp4", "mxfp4+pack_saved=True", "bf16"])
def test_cuda_does_not_wait(family, recipe):
    module = experts_of(family, recipe, BF16).cuda()
    x, index, gates = (v.cuda() for v in inputs(BF16))
    leaves = [x.requires_grad_(), gates.requires_grad_(), *module.parameters()]
    torch.autograd.grad(module(x, index, gates), leaves, torch.ones_like(x))  # compiles kernels
    dy = torch.ones_like(x)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.autograd.grad(module(x, index, gates), leaves, dy)
    finally:
        torch.cuda.set_sync_debug_mode("default")

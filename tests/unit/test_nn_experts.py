"""Fused experts against a loop over tokens and experts, with each matrix taken apart and quantized by itself."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from tiny_models import MOE, tiny_model, tokens
from torch import Tensor

import mxrl
from mxrl.nn.experts import is_known_experts

T, A, E = 7, 2, 4


class _Identity(torch.autograd.Function):
    """Forward: `value`; backward: to x, unchanged. The straight-through estimator in its plainest form."""

    @staticmethod
    def forward(ctx, x: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx, dy: Tensor):
        return dy, None


def ste(x: Tensor, recipe: str | None, dim: int = -1) -> Tensor:
    return x if recipe is None else _Identity.apply(x, mxrl.fake_quantize(x.detach(), recipe, dim=dim))


def experts_of(family: str, recipe: str | None = None, dtype: torch.dtype = torch.float64):
    model = tiny_model(family, dtype=dtype)
    if recipe is not None:
        mxrl.convert(model, recipe)
    return model.model.layers[0].mlp.experts


def inputs(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Token states, expert indices (expert 3 is idle) and routing weights."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(T, 64, generator=generator, dtype=torch.float64)
    index = torch.stack([torch.randperm(E - 1, generator=generator)[:A] for _ in range(T)])
    weights = torch.rand(T, A, generator=generator, dtype=torch.float64)
    return x, index, weights


def reference(
    experts, family: str, x: Tensor, index: Tensor, gates: Tensor, weight: str | None, act: str | None
) -> Tensor:
    """y_t = Σ_a g_ta · down_e(gate(up_e(x_t))), e = index[t, a]; e's matrices quantized one by one."""
    xq = ste(x, act)
    inner, order = [], [(t, a) for e in range(E) for t in range(T) for a in range(A) if index[t, a] == e]
    for t, a in order:
        e = int(index[t, a])
        if family == "gpt_oss":
            up = xq[t] @ ste(experts.gate_up_proj[e], weight, dim=0) + experts.gate_up_proj_bias[e]
            gate, linear = up[::2].clamp(max=7.0), up[1::2].clamp(-7.0, 7.0)
            inner.append((linear + 1) * gate * torch.sigmoid(1.702 * gate))
        else:
            w_gate, w_up = experts.gate_up_proj[e].chunk(2)
            gate, linear = ste(w_gate, weight) @ xq[t], ste(w_up, weight) @ xq[t]
            inner.append(torch.nn.functional.silu(gate) * linear)
    hq = ste(torch.stack(inner), act)  # one tensor, as the layer has it: NVFP4's scale is the tensor's
    out = [x.new_zeros(64) for _ in range(T)]
    for (t, a), h in zip(order, hq, strict=True):
        e = int(index[t, a])
        if family == "gpt_oss":
            y = h @ ste(experts.down_proj[e], weight, dim=0) + experts.down_proj_bias[e]
        else:
            y = ste(experts.down_proj[e], weight) @ h
        out[t] = out[t] + gates[t, a] * y
    return torch.stack(out)


@pytest.mark.parametrize("family", MOE)
@pytest.mark.parametrize(
    ("recipe", "weight", "act"),
    [
        ("bf16", None, None),
        ("mxfp4", "mxfp4", "mxfp4"),
        ("mxfp4+mbs+of+w4a8", "mxfp4+mbs+of", "mxfp8"),
        ("nvfp4", "nvfp4", "nvfp4"),
        ("mxfp4+w4a16", "mxfp4", None),
    ],
)
def test_forward_and_gradients(family, recipe, weight, act):
    experts = experts_of(family, recipe)
    x, index, gates = inputs()
    leaves = [x.requires_grad_(), gates.requires_grad_(), *experts.parameters()]
    dy = torch.randn(T, 64, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    y = experts(x, index, gates)
    ours = torch.autograd.grad(y, leaves, dy)
    expected = reference(experts, family, x, index, gates, weight, act)
    theirs = torch.autograd.grad(expected, leaves, dy)
    # float64 sums in another order; nothing lies close enough to a rounding boundary of Q to flip
    close = dict(rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(y, expected, **close)
    for name, a, b in zip(["x", "routing", *dict(experts.named_parameters())], ours, theirs, strict=True):
        torch.testing.assert_close(a, b, **close, msg=lambda text, name=name: f"{name}: {text}")
        assert name in ("x", "routing") or (a[E - 1] == 0).all()  # the idle expert


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("backward", ["quantized", "master"])
def test_quantized_gradient_is_blocked_by_expert(family, backward):
    """dW of one expert: dY and X of its own tokens, blocked along those tokens; dX: along the outputs."""
    experts = experts_of(family, f"mxfp4+quantize_grad=True+backward={backward}")
    x, index, gates = inputs()
    index[:] = torch.tensor([0, 1])  # every token goes to experts 0 and 1, so dY_e = gate[:, e] · dy
    x.requires_grad_()
    dy = torch.randn(T, 64, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    seen: list[Tensor] = []
    gate = type(experts)._apply_gate
    experts._apply_gate = lambda h: seen.append(gate(experts, h)) or seen[-1]
    experts(x, index, gates).backward(dy)
    inner = seen[0].detach()
    for e in (0, 1):
        h, dy_e = inner[e * T : (e + 1) * T], gates[:, e, None] * dy
        h_back = h if backward == "master" else mxrl.fake_quantize(h, dim=0)
        dw = mxrl.fake_quantize(dy_e, dim=0).T @ h_back
        grad = experts.down_proj.grad[e]
        torch.testing.assert_close(grad.T if family == "gpt_oss" else grad, dw, rtol=1e-12, atol=1e-12)  # order of sums


@pytest.mark.parametrize("family", MOE)
def test_whole_model_with_bf16_recipe_is_the_plain_model(family):
    model = tiny_model(family)
    t = tokens()
    with torch.no_grad():
        before = model(t).logits
        mxrl.convert(model, "bf16")
        # float32 sums: transformers' grouped GEMM may order them otherwise
        torch.testing.assert_close(model(t).logits, before, rtol=1e-5, atol=1e-5)
        mxrl.convert(model, "mxfp4")
        assert (model(t).logits - before).abs().max() > 1e-2


def test_no_tokens():
    experts = experts_of("qwen3_moe", "mxfp4")
    x = torch.zeros(0, 64, dtype=torch.float64, requires_grad=True)
    y = experts(x, torch.zeros(0, A, dtype=torch.long), torch.zeros(0, A, dtype=torch.float64))
    y.sum().backward()
    assert y.shape == (0, 64) and (experts.gate_up_proj.grad == 0).all()


def test_autocast_casts_before_quantizing():
    experts = experts_of("mixtral", "mxfp4", torch.float32)
    x, index, gates = inputs()
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            y = experts(x.float(), index, gates.float())
        experts.to(torch.bfloat16)
        expected = experts(x.bfloat16(), index, gates.float())
    assert y.dtype == torch.float32 and torch.equal(y.bfloat16(), expected)


def test_an_unconverted_model_of_the_same_config_stays_plain():
    model = tiny_model("qwen3_moe")
    other = type(model)(model.config).eval()
    other.load_state_dict(model.state_dict())
    t = tokens()
    with torch.no_grad():
        before = other(t).logits
        mxrl.convert(model, "mxfp4")
        assert torch.equal(other(t).logits, before)


def test_copies_and_pickles():
    model, t = tiny_model("gpt_oss"), tokens()
    mxrl.convert(model, "mxfp4+of")
    with torch.no_grad():
        expected = model(t).logits
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(other(t).logits, expected)


@pytest.mark.parametrize(
    ("family", "recipe"),
    [("qwen3_moe", "mxfp4+of"), ("gpt_oss", "mxfp4+backward=master"), ("qwen3_moe", "nvfp4+quantize_grad=True")],
)
def test_compiles_without_a_graph_break(family, recipe):
    model = tiny_model(family)
    mxrl.convert(model, recipe)
    block = model.model.layers[0].mlp
    x = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0))

    def gradients(fn) -> list[Tensor]:
        y = fn(x)
        y = y[0] if isinstance(y, tuple) else y
        return [y, *torch.autograd.grad(y.square().sum(), list(block.parameters()))]

    torch._dynamo.reset()
    compiled = gradients(torch.compile(block, backend="aot_eager", fullgraph=True))
    assert all(torch.equal(a, b) for a, b in zip(compiled, gradients(block), strict=True))


def test_only_experts_with_the_decorators_parameters_are_known():
    experts = experts_of("qwen3_moe")
    assert is_known_experts(experts)
    experts.extra = torch.nn.Parameter(torch.zeros(E, 2, 2))
    assert not is_known_experts(experts)

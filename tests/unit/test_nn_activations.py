"""Activations quantized once for the layers that share them, never stale; and packed until the backward pass."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref

import edge_cases
import pytest
import torch
from tiny_models import tiny_model, tokens
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import mxrl
from mxrl.nn import activations, forget_activations, share_activations
from mxrl.nn.activations import pack, quantize_activation, unpack
from mxrl.nn.operands import Operands
from mxrl.ops import dispatch
from mxrl.quantize import _fake_quantize_operator
from mxrl.recipes import Recipe

MXFP4 = Operands.of(Recipe())
BF16 = torch.bfloat16


def q(x: Tensor, dtype: torch.dtype = torch.float32, ops: Operands = MXFP4) -> Tensor:
    return quantize_activation(x, ops, dtype).value


def gradients(model: nn.Module, t: Tensor) -> list[Tensor]:
    model.zero_grad()
    out = model(input_ids=t, labels=t, use_cache=False)
    out.loss.backward()
    return [out.logits.detach(), *(p.grad.clone() for p in model.parameters())]


def converted(family: str, recipe: str, dtype: torch.dtype = torch.float32):
    model = tiny_model(family, dtype=dtype)
    mxrl.convert(model, recipe)
    return model.train()


# --- shared ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_q_k_v_and_gate_up_quantize_their_input_once(quantized_shapes, autocast, grad):
    model, t = converted("qwen3", "mxfp4"), tokens()
    with torch.set_grad_enabled(grad), torch.autocast("cpu", BF16, enabled=autocast):
        model(t)
    assert len([s for s in quantized_shapes if s[:2] == t.shape]) == 2 * 4  # qkv, o, gate and up, down, in two blocks


@pytest.mark.parametrize("recipe", ["mxfp4+mbs+of", "nvfp4", "mxfp4+w4a8", "mxfp4+w4a16", "mxfp4+pack_saved=True"])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_the_same_numbers_as_without_sharing(family, recipe, autocast, monkeypatch):
    model, t = converted(family, recipe), tokens()
    with torch.autocast("cpu", BF16, enabled=autocast):
        shared = gradients(model, t)
        monkeypatch.setattr(activations, "records_values", lambda x: False)
        for a, b in zip(shared, gradients(model, t), strict=True):
            assert torch.equal(a, b)


def test_what_is_saved_is_one_tensor():
    model, t = converted("qwen3", "mxfp4+w4a8", BF16), tokens()
    attention = model.model.layers[0].self_attn
    x = torch.randn(*t.shape, 64, dtype=BF16, requires_grad=True)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda s: saved.append(s) or s, lambda s: s):
        for layer in (attention.q_proj, attention.k_proj, attention.v_proj):
            layer(x)
    assert len({s.data_ptr() for s in saved if s.shape == x.shape}) == 1 and len(saved) == 6


def in_place(x: Tensor) -> None:
    x.mul_(2)


def in_a_view(x: Tensor) -> None:
    x.view(-1)[:5].add_(1)


def in_the_base(x: Tensor) -> None:
    assert x._base is not None
    x._base.mul_(2)


def in_inference_mode(x: Tensor) -> None:
    with torch.inference_mode():
        x.mul_(2)


def by_out(x: Tensor) -> None:
    torch.mul(x, 2, out=x)


def beside_torch(x: Tensor) -> None:
    x.data.mul_(2)  # counts no version, so the writer has to
    torch.autograd.graph.increment_version(x)


@pytest.mark.parametrize("write", [in_place, in_a_view, in_the_base, in_inference_mode, by_out, beside_torch])
def test_a_write_in_place_is_seen(write):
    with torch.no_grad():
        x = torch.randn(8, 64)[2:6]  # a view
        first = q(x)
        assert q(x) is first
        write(x)
        assert torch.equal(q(x), mxrl.fake_quantize(x)) and not torch.equal(q(x), first)


def test_inference_tensors_are_never_remembered():
    with torch.inference_mode():
        x = torch.randn(4, 64)
        first = q(x)
        x.mul_(2)
        assert torch.equal(q(x), mxrl.fake_quantize(x)) and not torch.equal(q(x), first)


def test_only_the_very_same_tensor_operands_and_dtype():
    x = torch.randn(4, 64)
    first = q(x)
    assert q(x) is first and q(x.clone()) is not first
    assert torch.equal(q(x, BF16), mxrl.fake_quantize(x.bfloat16()))
    other = Operands.of(Recipe.parse("nvfp4"))
    assert torch.equal(q(x, ops=other), mxrl.fake_quantize(x, "nvfp4"))
    assert torch.equal(q(x), first)
    assert quantize_activation(x, Operands.of(Recipe("bf16")), torch.float32).value is x


def test_nothing_outlives_its_tensor_or_the_next():
    x = torch.randn(4, 64)
    gone = weakref.ref(q(x))
    assert gone() is not None
    y = torch.randn(4, 64)
    q(y)
    assert gone() is None  # the next one replaced it
    gone = weakref.ref(q(y))
    del y
    assert gone() is None
    gone = weakref.ref(q(x))
    forget_activations()
    assert gone() is None


def test_no_reference_cycle_keeps_an_activation():
    gc.disable()
    try:
        x = torch.randn(4, 64)
        gone = weakref.ref(q(x))
        q(torch.randn(4, 64))
        del x
        assert gone() is None
    finally:
        gc.enable()


def test_each_thread_has_its_own():
    x = torch.randn(4, 64)
    first, seen = q(x), []
    thread = threading.Thread(target=lambda: seen.append(q(x)))
    thread.start()
    thread.join()
    assert seen[0] is not first and torch.equal(seen[0], first) and q(x) is first


def test_tracing_leaves_no_fake_values():
    x = torch.randn(4, 64)
    wide = Operands.of(Recipe("bf16"))  # only a cast, so that no kernel is asked for fake values
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = q(x, BF16, wide)
    assert type(fake) is not Tensor and type(q(x, BF16, wide)) is Tensor


def test_a_scope_shares_nothing_with_outside():
    x = torch.randn(4, 64)
    first = q(x)
    with share_activations():
        inside = q(x)
        assert inside is not first and q(x) is inside
    assert q(x) is not inside


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("scope", [False, True])
def test_a_cuda_graph_uses_nothing_from_outside(quantized_shapes, scope):
    """The layers have seen the static input before; a replay must quantize what is in it then."""
    layers = [mxrl.nn.QuantizedLinear(64, 64, recipe="mxfp4", device="cuda", dtype=BF16) for _ in range(3)]
    x = torch.randn(16, 64, device="cuda", dtype=BF16)
    with torch.no_grad():
        for layer in layers:
            layer(x)
        quantized_shapes.clear()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), share_activations() if scope else contextlib.nullcontext():
            y = layers[0](x) + layers[1](x) + layers[2](x)
        assert quantized_shapes.count((16, 64)) == (1 if scope else 3)
        for _ in range(3):
            x.copy_(torch.randn(16, 64))
            graph.replay()
            assert torch.equal(y, layers[0](x) + layers[1](x) + layers[2](x))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_recomputation(use_reentrant):
    model, t = converted("qwen3", "mxfp4+pack_saved=True"), tokens()
    expected = gradients(model, t)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    assert all(torch.equal(a, b) for a, b in zip(gradients(model, t), expected, strict=True))


def test_a_compiled_training_graph_merges_equal_quantizations(monkeypatch):
    """torch.compile's own CSE, in the partitioner that inductor uses; a graph without backward repeats them."""
    from functorch.compile import min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.q(x) + self.k(x) * self.v(x)

    def keep(graph, inputs):
        return graph

    block, x = Block(), torch.randn(4, 32)
    mxrl.convert(block, "mxfp4")
    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition)
    compiled = torch.compile(block, backend=backend, fullgraph=True)
    sizes, operation = [], dispatch.operation

    def counting(name, x_ABK, *args, **kwargs):
        sizes.append(x_ABK.numel())
        return operation(name, x_ABK, *args, **kwargs)

    monkeypatch.setattr(dispatch, "operation", counting)
    y = compiled(x)
    assert sizes.count(x.numel()) == 1 and torch.equal(y, block(x))
    with torch.no_grad():
        compiled(x)
        sizes.clear()
        compiled(x)
        assert sizes.count(x.numel()) == 3


# --- packed ----------------------------------------------------------------------------------------------------------

PACKED = [
    "mxfp4", "mxfp4:even+of", "mxfp4+mbs", "mxfp4+mbs:search16+of:0.25", "mxfp4:e8m3+of:0", "mxfp4+mbs+macro=64",
    "nvfp4", "nvfp4:4over6", "mxfp4+w4a8",
]  # fmt: skip


@pytest.mark.parametrize("text", PACKED)
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(5, 80), (2, 3, 64), (3, 31), (0, 64), (4, 0)])
def test_unpacked_is_the_quantized_activation(text, dtype, shape):
    recipe = Operands.of(Recipe.parse(text)).activation
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    parts = pack(x, recipe)
    assert torch.equal(unpack(parts, recipe, x.shape, dtype), mxrl.fake_quantize(x, recipe))
    packed = mxrl.quantize(x, recipe)
    assert sum(p.nbytes for p in parts) == packed.nbytes


@pytest.mark.parametrize("text", ["mxfp4", "mxfp4:e8m3+of", "mxfp4+mbs+of", "nvfp4", "mxfp8"])
def test_operators_for_torch_compile(text):
    x = torch.randn(3, 80)
    torch.library.opcheck(activations._pack_operator, (x, text))
    parts = pack(x, Recipe.parse(text))
    torch.library.opcheck(activations._unpack_operator, (parts, text, [3, 80], torch.float32))
    torch.library.opcheck(_fake_quantize_operator, (x, text, 0, None))


@pytest.mark.parametrize("recipe", ["mxfp4", "mxfp4+mbs+of", "nvfp4", "mxfp4+w4a8"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_gradients_are_those_without_packing(family, recipe, dtype):
    t = tokens()
    expected = gradients(converted(family, recipe, dtype), t)
    ours = gradients(converted(family, f"{recipe}+pack_saved=True", dtype), t)
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


def test_packed_under_autocast_and_after_a_pass_without_gradient():
    x = torch.randn(4, 64, requires_grad=True)
    layer = mxrl.nn.QuantizedLinear(64, 32, recipe="mxfp4+pack_saved=True")
    with torch.autocast("cpu", BF16):
        with torch.no_grad():
            layer(x)  # nothing is packed for it, and what it leaves is not saved
        saved: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda s: saved.append(s) or s, lambda s: s):
            y = layer(x)
    assert [s.dtype for s in saved] == [torch.uint8, torch.uint8, BF16]
    y.sum().backward()
    dy = torch.ones(4, 32, dtype=BF16)
    xq = mxrl.fake_quantize(x.detach().bfloat16())
    assert torch.equal(layer.weight.grad, (dy.T @ xq).float())


@pytest.mark.parametrize("text", ["mxfp4", "mxfp4+mbs+of", "nvfp4"])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_every_kind_of_value_survives_packing(text, dtype):
    recipe = Recipe.parse(text)
    for name, x in edge_cases.edge_cases(dtype):
        value = unpack(pack(x, recipe), recipe, x.shape, dtype)
        expected = mxrl.fake_quantize(x, recipe)
        assert torch.equal(value.isnan(), expected.isnan()), name
        bits = torch.int16 if dtype == BF16 else torch.int32
        assert torch.equal(value.nan_to_num(0).view(bits), expected.nan_to_num(0).view(bits)), name

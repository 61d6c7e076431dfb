"""Weights that the micro-batches of a step share: once a step, never stale, the same bits as without sharing."""

from __future__ import annotations

import copy
import pickle
import weakref

import pytest
import torch
from tiny_models import tiny_model, tokens
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import mxrl
from mxrl.nn import (
    ConvertError,
    RolloutError,
    aqn_noise,
    operands,
    quantized_layers,
    rollout_weights,
    shared_weights,
)

FAMILIES = ["qwen3", "qwen3_moe", "gpt_oss"]
BATCHES = [tokens(seed=1), tokens(seed=2), tokens(seed=3)]


def converted(family: str = "qwen3", recipe: str = "mxfp4", dtype: torch.dtype = torch.float32):
    model = tiny_model(family, dtype=dtype)
    mxrl.convert(model, recipe)
    return model.train()


def step_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Gradients accumulated over micro-batches."""
    model.zero_grad()
    for t in BATCHES:
        model(input_ids=t, labels=t, use_cache=False).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def count(model: nn.Module) -> int:
    return sum(len(layer.weights) for layer in quantized_layers(model))


@pytest.fixture
def weight_shapes(monkeypatch):
    """The shapes of the quantized tensors that aren't activations (activations here have 27 rows, or 3 x 9)."""
    shapes: list[tuple[int, ...]] = []
    real = operands.fake_quantize

    def counting(x, *args, **kwargs):
        if 27 not in x.shape and x.shape[:2] != (3, 9) and 54 not in x.shape:
            shapes.append(tuple(x.shape))
        return real(x, *args, **kwargs)

    monkeypatch.setattr(operands, "fake_quantize", counting)
    return shapes


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("recipe", ["mxfp4+mbs+of", "nvfp4", "mxfp4+backward=master", "mxfp4+quantize_grad=True"])
def test_one_quantization_a_step_and_the_same_gradients(family, recipe, weight_shapes):
    model = converted(family, recipe)
    expected = step_gradients(model)
    if "quantize_grad" not in recipe:  # which quantizes the weights along another axis too
        assert len(weight_shapes) % len(BATCHES) == 0 and len(weight_shapes) >= len(BATCHES) * count(model)
    once = len(weight_shapes) // len(BATCHES)
    weight_shapes.clear()
    with shared_weights(model) as shared:
        assert equal(step_gradients(model), expected)
    if "quantize_grad" not in recipe:
        assert len(weight_shapes) == once
    assert shared.computed == count(model) and shared.reused == (len(BATCHES) - 1) * count(model)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_recomputation_shares(use_reentrant):
    model = converted("qwen3_moe", "mxfp4+of")
    expected = step_gradients(model)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    with shared_weights(model) as shared:
        assert equal(step_gradients(model), expected)
    assert shared.computed == count(model) and shared.reused == (2 * len(BATCHES) - 1) * count(model)


OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "foreach": lambda ps: torch.optim.AdamW(ps, lr=0.1, foreach=True),
    "fused": lambda ps: torch.optim.AdamW(ps, lr=0.1, fused=True),  # counts no versions
}


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_steps_are_seen(family, name):
    model, other = converted(family), converted(family)
    optimizer, its = OPTIMIZERS[name](model.parameters()), OPTIMIZERS[name](other.parameters())
    with shared_weights(model) as shared:
        for step in (1, 2):
            assert equal(step_gradients(model), step_gradients(other))
            optimizer.step()
            its.step()
            assert shared.computed == step * count(model)


@pytest.mark.parametrize("write", ["mul_", "data=", "load_state_dict"])
def test_other_writes_are_seen(write):
    model, t = converted(), BATCHES[0]
    weight = model.model.layers[0].mlp.up_proj.weight
    with torch.no_grad(), shared_weights(model) as shared:
        before = model(t).logits
        if write == "mul_":
            weight.mul_(2)
        elif write == "data=":
            weight.data = 2 * weight.data
        else:
            state = {k: v.clone() for k, v in model.state_dict().items()}
            state["model.layers.0.mlp.up_proj.weight"].mul_(2)
            model.load_state_dict(state)
        inside = model(t).logits
        assert shared.computed > count(model)
    with torch.no_grad():
        assert torch.equal(inside, model(t).logits) and not torch.equal(inside, before)


def test_writes_through_data_need_drop():
    """The known gap: nothing in torch counts this write."""
    model, t = converted(), BATCHES[0]
    with torch.no_grad(), shared_weights(model) as shared:
        before = model(t).logits
        model.model.layers[0].mlp.up_proj.weight.data.mul_(2)
        assert torch.equal(model(t).logits, before)
        shared.drop()
        inside = model(t).logits
    with torch.no_grad():
        assert torch.equal(inside, model(t).logits) and not torch.equal(inside, before)


def test_autocast_and_a_change_of_dtype():
    model, t = converted("qwen3_moe", "mxfp4+mbs"), BATCHES[0]

    def run(dtype: torch.dtype | None) -> tuple[Tensor, dict[str, Tensor]]:
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            gradients = step_gradients(model)
            return model(t).logits, gradients

    dtypes = (torch.bfloat16, None, torch.bfloat16)
    expected = [run(dtype) for dtype in dtypes]
    with shared_weights(model) as shared:
        for dtype, (logits, gradients) in zip(dtypes, expected, strict=True):
            ours = run(dtype)
            assert torch.equal(ours[0], logits) and equal(ours[1], gradients)
    assert shared.computed == 3 * count(model)


def test_bf16_recipe_shares_the_cast_of_autocast():
    model = converted("qwen3_moe", "bf16")
    with torch.autocast("cpu", torch.bfloat16):
        expected = step_gradients(model)
        with shared_weights(model) as shared:
            assert equal(step_gradients(model), expected)
    assert shared.computed == count(model)
    with shared_weights(model) as shared:  # in the weights' own dtype there is nothing to compute
        step_gradients(model)
        with torch.no_grad(), rollout_weights(model):
            model(BATCHES[0])
        assert shared.computed == 0 and shared.nbytes == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_rollouts_inside(family, weight_shapes):
    model, t = converted(family, "mxfp4+aqn"), BATCHES[0]
    noise = aqn_noise("mxfp4+aqn", 3, 1, 4)
    with torch.no_grad():
        with rollout_weights(model):
            plain = model(t).logits
        with rollout_weights(model, noise) as report:
            noised = model(t).logits
        assert not torch.equal(plain, noised)
    expected = step_gradients(model)
    with shared_weights(model) as shared:
        with torch.no_grad(), rollout_weights(model):
            assert torch.equal(model(t).logits, plain)
        weight_shapes.clear()
        with torch.no_grad(), rollout_weights(model):
            assert not weight_shapes  # a rollout without noise holds the very tensors of the step
            assert torch.equal(model(t).logits, plain)
        with torch.no_grad(), rollout_weights(model, noise) as inside:
            assert torch.equal(model(t).logits, noised) and inside.layers == report.layers
        assert equal(step_gradients(model), expected)
    assert shared.computed == count(model)


def test_a_fused_optimizer_inside_a_rollout_is_an_error():
    model = converted()
    optimizer = OPTIMIZERS["fused"](model.parameters())
    model(BATCHES[0], labels=BATCHES[0]).loss.backward()
    with pytest.raises(RolloutError, match="changed inside rollout_weights"), rollout_weights(model):
        optimizer.step()


def test_lora_keeps_the_frozen_base():
    peft = pytest.importorskip("peft")
    model, other = (
        peft.get_peft_model(converted(), peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"])) for _ in range(2)
    )
    other.load_state_dict(model.state_dict())
    optimizer, its = (torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=1.0) for m in (model, other))
    with shared_weights(model) as shared:
        for _ in range(2):
            assert equal(step_gradients(model), step_gradients(other))
            optimizer.step()
            its.step()
        assert shared.computed == count(model)  # over both steps
        model.merge_adapter()
        other.merge_adapter()
        shared.drop()  # PEFT writes through .data
        with torch.no_grad():
            assert torch.equal(model(BATCHES[0]).logits, other(BATCHES[0]).logits)


def test_a_parameter_that_came_later_is_computed_every_time():
    model, t = converted(), BATCHES[0]
    layer = model.model.layers[0].mlp.up_proj
    with torch.no_grad(), shared_weights(model) as shared:
        model(t)
        layer.weight = nn.Parameter(2 * layer.weight)
        inside = [model(t).logits, model(t).logits]
        assert shared.computed == count(model) and shared.reused == 2 * (count(model) - 1)
    with torch.no_grad():
        assert all(torch.equal(logits, model(t).logits) for logits in inside)
        state = {name: 2 * p for name, p in model.named_parameters() if "up_proj" in name}
        expected = torch.func.functional_call(model, state, t).logits
        with shared_weights(model):
            assert torch.equal(torch.func.functional_call(model, state, t).logits, expected)


def test_inference_mode_leaves_values_that_can_be_saved_for_backward():
    model = converted()
    expected = step_gradients(model)
    with shared_weights(model):
        with torch.inference_mode():
            model(BATCHES[0])
        assert equal(step_gradients(model), expected)


def test_tracing_leaves_no_fake_values():
    model = nn.Sequential(nn.Linear(32, 32))
    mxrl.convert(model, "bf16")
    x = torch.randn(2, 32)
    with torch.autocast("cpu", torch.bfloat16), shared_weights(model) as shared:
        with FakeTensorMode(allow_non_fake_inputs=True):
            model(x)
        assert shared.computed == 0
        assert type(model(x)) is Tensor


def test_end_nesting_and_copies():
    model = converted("qwen3_moe")
    with pytest.raises(ZeroDivisionError), shared_weights(model) as shared:
        step_gradients(model)
        values = [weakref.ref(weight.value) for weight in shared.weights]
        assert all(v() is not None for v in values) and shared.nbytes > 0
        with shared_weights(model) as inner:  # the outer block's
            step_gradients(model)
            assert inner.weights == []
        assert all(layer.shared(name) is not None for layer in quantized_layers(model) for name in layer.weights)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert not any(layer.shared(name) for layer in quantized_layers(other) for name in layer.weights)
            assert equal(step_gradients(other), step_gradients(model))
        with pytest.raises(ConvertError, match="inside shared_weights"):
            mxrl.convert(model, "bf16")
        raise ZeroDivisionError
    model.zero_grad()
    assert not any(layer.shared(name) for layer in quantized_layers(model) for name in layer.weights)
    assert all(v() is None for v in values) and shared.nbytes == 0
    assert "shared" not in str(model.state_dict().keys())


def test_needs_converted_layers():
    with pytest.raises(RolloutError, match=r"no converted layer; call mxrl\.convert first"):
        with shared_weights(tiny_model("qwen3")):
            pass


def test_compiled_models_compute_their_own():
    model = nn.Sequential(nn.Linear(64, 32))
    mxrl.convert(model, "mxfp4")
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(4, 64)
    with torch.no_grad(), shared_weights(model):
        first = compiled(x)
        assert torch.equal(first, model(x))
        model[0].weight.mul_(2)
        assert torch.equal(compiled(x), model(x)) and not torch.equal(compiled(x), first)

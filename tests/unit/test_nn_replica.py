"""A replica computes, bit for bit, what the model does inside rollout_weights; outside the block it has no weights.

One process, model not sharded; two ranks are in tests/integration/test_fsdp2_replica.py.
"""

from __future__ import annotations

import functools
import gc
from contextlib import nullcontext
from types import MethodType
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, tiny_model, tokens
from torch import Tensor, nn

import mxrl
from mxrl.nn import RolloutError, aqn_noise, quantized_layers, rollout_weights, shared_weights
from mxrl.nn.replica import Replica
from mxrl.rl.chain import Problem
from mxrl.rl.engine_slots import EngineError, unsupported
from mxrl.rl.evaluate import decode, evaluate
from mxrl.rl.policy import build_policy, char_tokenizer
from mxrl.rl.rewards import chain_reward
from mxrl.rl.rollout import sample

PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12], [13], [14, 15, 16, 17]]


def converted(family: str = "qwen3", recipe: str = "mxfp4", dtype: torch.dtype = torch.float32):
    model = tiny_model(family, dtype=dtype)
    mxrl.convert(model, recipe)
    return model


def with_lora(model):
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(
        model, peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    )


def held(model: nn.Module) -> dict[str, Tensor]:
    out = {}
    for layer in quantized_layers(model):
        for name in layer.weights:
            weight = layer.module.held if layer.is_linear else layer.module.mxrl_state.held[name]
            out[f"{layer.name}.{name}"] = weight.value
    return out


def is_empty(replica: Replica) -> bool:
    layers = quantized_layers(replica.model)
    return all(p.is_meta for p in replica.model.parameters()) and not any(layer.holds for layer in layers)


def assert_same_rollout(model, noise=None, dtype=None, autocast=False):
    t = tokens()
    replica = Replica(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    compute = torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext()
    with torch.no_grad(), compute:
        with rollout_weights(model, noise, dtype=dtype) as report:
            expected, weights = model(t).logits, held(model)
            norms = {n: p.clone() for n, p in model.named_parameters() if "norm" in n}
        with replica.filled(model, noise, dtype=dtype) as again:
            assert torch.equal(replica.model(t).logits, expected)
            got = held(replica.model)
            assert got.keys() == weights.keys() and all(torch.equal(got[n], w) for n, w in weights.items())
            own = dict(replica.model.named_parameters())
            assert norms and all(torch.equal(own[n], p) for n, p in norms.items())
            assert not any(layer.holds for layer in quantized_layers(model))
    assert again.sigma == report.sigma and again.layers == report.layers
    assert is_empty(replica)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    return replica


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("recipe", ["mxfp4+mbs+of+aqn", "bf16"])
def test_the_same_bits_as_in_rollout_weights(family, recipe):
    noise = aqn_noise(recipe, 5, 1, 3)
    assert (noise is None) == (recipe == "bf16")
    assert_same_rollout(converted(family, recipe), noise)


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
@pytest.mark.parametrize(
    "recipe", ["mxfp4+aqn+aqn_target=norm", "mxfp4+aqn+aqn_placement=after", "nvfp4+aqn", "bf16+aqn"]
)
def test_under_autocast_with_noise_anywhere(family, recipe):
    """float32 masters: norms and the head's cast must see float32, as in one process."""
    assert_same_rollout(converted(family, recipe), aqn_noise(recipe, 5, 1, 3), torch.bfloat16, autocast=True)


def test_bf16_weights_any_noise_and_skipped_layers():
    model = tiny_model("qwen3", dtype=torch.bfloat16)
    mxrl.convert(model, "mxfp4", skip=["model.layers.0.*"])
    assert_same_rollout(model, lambda name, w: 0.1 * w.float())


def test_adapters():
    recipe = "mxfp4+aqn"
    model = with_lora(converted(recipe=recipe))
    replica = assert_same_rollout(model, aqn_noise(recipe, 5, 1, 3))
    with torch.no_grad(), replica.filled(model):
        assert sum("lora_" in name for name, p in replica.model.named_parameters() if not p.is_meta) == 8
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        assert trained == {name for name, p in replica.model.named_parameters() if p.requires_grad}
        with model.disable_adapter():
            plain = model(tokens()).logits
        assert not torch.equal(replica.model(tokens()).logits, plain)


def test_a_parameter_is_filled_with_what_its_place_computes_with():
    model = converted("qwen2")
    replica = Replica(model)
    with replica.filled(model, dtype=torch.bfloat16):
        body = replica.model.model
        assert replica.model.lm_head.weight is body.embed_tokens.weight  # tied
        assert torch.equal(body.embed_tokens.weight, model.lm_head.weight)
        q = body.layers[0].self_attn.q_proj
        assert q.weight.dtype == torch.bfloat16 and q.weight.data_ptr() == q.held.value.data_ptr()  # no master kept
        assert q.bias.dtype == torch.float32 and torch.equal(q.bias, model.model.layers[0].self_attn.q_proj.bias)
        assert not replica.model.training
        assert unsupported(replica.model) is None
    assert replica.model.lm_head.weight is replica.model.model.embed_tokens.weight and is_empty(replica)


def test_the_model_given_is_left_as_it_is():
    model = converted("qwen3_moe").train()
    parameters = dict(model.named_parameters())
    replica = Replica(model)
    assert is_empty(replica) and type(replica.model) is type(model)
    assert all(p is parameters[name] and p.requires_grad for name, p in model.named_parameters())
    assert all(module.training for module in model.modules()) and replica.model.config is not model.config
    assert not any(module.training for module in replica.model.modules())


def test_filled_again_it_has_the_new_weights():
    model, t = converted("qwen3_moe"), tokens()
    replica = Replica(model)
    with torch.no_grad(), replica.filled(model):
        first = replica.model(t).logits
    model(t, labels=t).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    model.model.rotary_emb.inv_freq.mul_(2)  # a buffer
    with torch.no_grad():
        with replica.filled(model):
            second = replica.model(t).logits
        with rollout_weights(model):
            assert torch.equal(second, model(t).logits) and not torch.equal(second, first)
        frequencies = model.model.rotary_emb.inv_freq.clone()
        model.model.rotary_emb.inv_freq.mul_(2)
        with replica.filled(model):
            replica.model.model.rotary_emb.inv_freq.zero_()
        assert torch.equal(model.model.rotary_emb.inv_freq, 2 * frequencies)


def test_the_training_passes_share_what_is_held():
    model = converted()
    replica = Replica(model)
    with shared_weights(model) as shared:
        with torch.no_grad():
            model(tokens())
        assert (shared.computed, shared.reused) == (14, 0)
        with replica.filled(model):
            assert (shared.computed, shared.reused) == (14, 14)
            weight = replica.model.model.layers[1].mlp.up_proj.weight
            assert weight.data_ptr() == model.model.layers[1].mlp.up_proj.shared.value.data_ptr()


def test_everything_is_dropped_after_an_error_too():
    model = converted("qwen3_moe", "mxfp4+aqn")
    replica = Replica(model)

    def tensors() -> int:
        gc.collect()
        return sum(type(x) in (Tensor, nn.Parameter) and not x.is_meta for x in gc.get_objects())

    with replica.filled(model, aqn_noise("mxfp4+aqn", 0, 0, 2)):
        pass
    before = tensors()
    with replica.filled(model, aqn_noise("mxfp4+aqn", 0, 0, 2)):
        assert tensors() > before + 14
    assert tensors() <= before  # other tests' garbage may go meanwhile
    with pytest.raises(ZeroDivisionError), replica.filled(model):
        raise ZeroDivisionError
    assert is_empty(replica)
    with pytest.raises(KeyError), replica.filled(model, lambda name, w: {}[name]):  # while it is filled
        pass
    assert is_empty(replica) and tensors() <= before


def test_hooks_come_along():
    model, t = converted(), tokens()

    def doubled(module, args, output):
        return 2 * output

    model.model.norm.register_forward_hook(doubled)
    replica = Replica(model)
    model.model.norm._forward_hooks.clear()
    with torch.no_grad(), replica.filled(model):
        assert torch.equal(replica.model(t).logits, 2 * model(t).logits)


def test_a_function_that_runs_the_original_is_found():
    """TRL replaces forward by a closure over the model's own: a copy of it would gather a sharded model's weights."""
    model, t = converted(), tokens()
    forward = model.forward

    @functools.wraps(type(model).forward)
    def closed(self, *args, **kwargs):
        return forward(*args, **kwargs)

    model.forward = MethodType(closed, model)
    replica = Replica(model)
    message = r"Qwen3ForCausalLM runs .*forward, which calls the Qwen3ForCausalLM that it was made for"
    with pytest.raises(RolloutError, match=message) as error, replica.filled(model):
        pass
    assert "\n" not in str(error.value) and is_empty(replica)
    del replica.model.forward
    with torch.no_grad(), replica.filled(model):
        expected = replica.model(t).logits

    def bound(self, *args, **kwargs):
        return type(self).forward(self, *args, **kwargs)

    model.forward = MethodType(bound, model)
    replica = Replica(model)
    with torch.no_grad(), replica.filled(model):  # of the copy, since methods are copied with what they are bound to
        assert torch.equal(replica.model(t).logits, expected)

    head = model.lm_head
    replica.model.lm_head.register_forward_pre_hook(lambda module, args: (args[0].to(head.weight.dtype),))
    with pytest.raises(RolloutError, match=r"lm_head runs .*lambda.* the Linear"), replica.filled(model):
        pass


def test_another_model_is_refused_by_name():
    model = converted("qwen3", "mxfp4")
    replica = Replica(model)

    def refused(other, message):
        with pytest.raises(RolloutError, match=message) as error, replica.filled(other):
            pytest.fail("filled")
        assert "\n" not in str(error.value) and is_empty(replica)

    refused(with_lora(converted("qwen3", "mxfp4")), r"the model has \S*lora_A\S* \[2, 64\] where its replica has")
    refused(converted("llama", "mxfp4"), r"where its replica has model.layers.0.self_attn.q_norm.weight \[32\]")
    refused(
        converted("qwen3", "mxfp4+of"), r"has converted model.layers.0.self_attn.q_proj in mxfp4\+of where .*mxfp4;"
    )
    other = tiny_model("qwen3")
    mxrl.convert(other, "mxfp4", skip=["*.layers.1.mlp.down_proj"])
    refused(other, "has converted nothing where its replica has model.layers.1.mlp.down_proj in mxfp4")
    refused(tiny_model("qwen3"), "no converted layer")
    with pytest.raises(RolloutError, match="no converted layer"):
        Replica(tiny_model("qwen3"))


def test_blocks_do_not_nest():
    model = converted()
    replica = Replica(model)
    with replica.filled(model):
        with pytest.raises(RolloutError, match="already inside"), replica.filled(model):
            pass
        with pytest.raises(RolloutError, match="already inside"):
            Replica(replica.model)
        assert not any(p.is_meta for p in replica.model.parameters())
    with rollout_weights(model), pytest.raises(RolloutError, match="already inside"), replica.filled(model):
        pass
    with rollout_weights(model), pytest.raises(RolloutError, match="already inside"):
        Replica(model)
    assert is_empty(replica)


def test_masters_that_change_inside_are_detected():
    model, t = converted(), tokens()
    replica = Replica(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)  # counts no version itself
    model(t, labels=t).loss.backward()
    with pytest.raises(RolloutError, match="changed inside"), replica.filled(model):
        optimizer.step()
    with torch.no_grad(), pytest.raises(RolloutError, match=r"self_attn\.q_proj"), replica.filled(model):
        model.model.layers[0].self_attn.q_proj.weight.mul_(2)
        replica.model(t)
        pytest.fail("the forward pass used a stale weight")
    assert is_empty(replica)


@pytest.mark.parametrize("engine", ["slots", "generate"])
def test_sampling_from_a_replica(engine):
    model = converted("qwen3_moe", "mxfp4+mbs")
    replica = Replica(model)
    options: dict[str, Any] = dict(max_new_tokens=8, eos_token_id=2, pad_token_id=0, seed=3, engine=engine)
    with pytest.raises(EngineError, match=r"no weights .* inside `with replica\.filled\(model\)`") as error:
        sample(replica.model, PROMPTS, **options)
    assert "\n" not in str(error.value)
    with rollout_weights(model):
        expected = sample(model, PROMPTS, **options)
    with replica.filled(model):
        got = sample(replica.model, PROMPTS, **options)
    assert all(torch.equal(a, b) for a, b in zip(vars(got).values(), vars(expected).values(), strict=True))


def test_evaluating_a_replica(quantized_shapes):
    tokenizer = char_tokenizer()
    model = build_policy("dense", size="tiny", seed=1).eval()
    mxrl.convert(model, "mxfp4+aqn+w4a16")
    replica = Replica(model)
    noise = aqn_noise("mxfp4+aqn", 0, 0, 2)
    with rollout_weights(model, noise):
        expected = decode(model, tokenizer, ["1+2=", "3+4="], max_new_tokens=6, temperature=1.0)
    problems = [Problem("1+2+3=", "6", {"group": 3})] * 2
    with replica.filled(model, noise):
        quantized_shapes.clear()
        assert decode(replica.model, tokenizer, ["1+2=", "3+4="], max_new_tokens=6, temperature=1.0) == expected
        found = evaluate(replica.model, tokenizer, problems, reward=chain_reward, max_new_tokens=4)
        assert len(found.scores) == 2 and not quantized_shapes  # what is held was used
    assert decode(model, tokenizer, ["1+2=", "3+4="], max_new_tokens=6, temperature=1.0) != expected  # without noise

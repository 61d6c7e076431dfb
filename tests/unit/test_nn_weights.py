"""Rollout weights and AQN: quantized once, the right noise in the right place, the master weights untouched."""

from __future__ import annotations

import math

import pytest
import torch
from tiny_models import MOE, tiny_model, tokens
from torch import Tensor, nn

import mxrl
from mxrl.corrections import aqn_sigma, philox_normal
from mxrl.nn import RolloutError, aqn_noise, master_matrices, quantized_layers, rollout_weights
from mxrl.recipes import RecipeError


def converted(family: str = "qwen3", recipe: str = "mxfp4", dtype: torch.dtype = torch.float32):
    model = tiny_model(family, dtype=dtype)
    mxrl.convert(model, recipe)
    return model


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same_bits(model: nn.Module, before: dict[str, Tensor]) -> bool:
    now = model.state_dict()
    return all(torch.equal(now[name].view(torch.uint8), value.view(torch.uint8)) for name, value in before.items())


def held_matrices(model: nn.Module) -> dict[str, Tensor]:
    """The held weights by canonical name, experts unfused."""
    out = {}
    for layer in quantized_layers(model):
        for attribute in layer.weights:
            held = layer.module.held if layer.is_linear else layer.module.mxrl_state.held[attribute]
            out |= {f"{layer.name}.{name}": m.clone() for name, m in layer.matrices(attribute, held.value)}
    return out


def blocked_dim(name: str) -> int:
    return -2 if name.endswith(("gate_up_proj", "down_proj")) else -1  # gpt-oss: no ".weight"


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gpt_oss"])
def test_generation_quantizes_each_weight_once(family, quantized_shapes):
    model, t = converted(family), tokens()
    before = snapshot(model)
    settings = dict(max_new_tokens=6, min_new_tokens=6, do_sample=False)
    plain = model.generate(t, **settings)
    weights = [tuple(layer.parameter(a).shape) for layer in quantized_layers(model) for a in layer.weights]
    quantized_shapes.clear()
    with rollout_weights(model):
        assert sorted(quantized_shapes) == sorted(weights)
        quantized_shapes.clear()
        assert torch.equal(model.generate(t, **settings), plain)
        assert quantized_shapes and not any(shape in weights for shape in quantized_shapes)
        assert list(model.state_dict()) == list(before)
    assert same_bits(model, before) and not any(layer.holds for layer in quantized_layers(model))
    quantized_shapes.clear()
    model(t)
    assert set(weights) <= set(quantized_shapes)


@pytest.mark.parametrize("family", ["llama", *MOE])
@pytest.mark.parametrize("recipe", ["mxfp4+mbs+of", "nvfp4", "bf16"])
def test_held_forward_is_the_forward(family, recipe):
    model, t = converted(family, recipe, torch.bfloat16), tokens()
    with torch.no_grad():
        expected = model(t).logits
        with rollout_weights(model):
            assert torch.equal(model(t).logits, expected)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_gradients_flow_through_held_weights(family):
    """With the noise n = w the layers hold Q(2w) = 2Q(w): the gradients are those of a model with doubled weights."""
    t = tokens()

    def gradients(model: nn.Module) -> dict[str, Tensor]:
        model(t).logits.square().sum().backward()
        return {name: p.grad for name, p in model.named_parameters()}

    model, doubled = converted(family), converted(family)
    with torch.no_grad():
        for layer in quantized_layers(doubled):
            for attribute in layer.weights:
                layer.parameter(attribute).mul_(2)
    with rollout_weights(model, lambda name, w: w):
        held = gradients(model)
    expected = gradients(doubled)
    assert all(torch.equal(held[name], expected[name]) for name in expected)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("base", ["mxfp4", "nvfp4", "bf16"])
@pytest.mark.parametrize("options", ["", "+aqn_placement=after", "+aqn_relative=False"])
def test_noise_is_what_the_formula_says(family, base, options):
    recipe = f"{base}+aqn:0.02:0.005{options}"
    model = converted(family, recipe)
    before = snapshot(model)
    master = {name: m.clone() for name, m in master_matrices(model)}
    noise = aqn_noise(recipe, seed=7, rollout=2, total_rollouts=5)
    sigma = aqn_sigma(2, 5, 0.02, 0.005)
    with rollout_weights(model, noise, dtype=torch.bfloat16) as report:
        held = held_matrices(model)
    assert same_bits(model, before)
    assert held.keys() == master.keys()
    change = size = 0.0
    for name, w in master.items():
        rms = math.sqrt(sum(v * v for v in w.double().flatten().tolist()) / w.numel())
        std = sigma if "relative=False" in options else sigma * rms
        n = philox_normal(7, 2, name, 0, w.numel()).view(w.shape) * std
        clean = mxrl.fake_quantize(w.bfloat16(), base, dim=blocked_dim(name))
        if "after" in options:
            expected = (clean.float() + n).bfloat16()
        else:
            expected = mxrl.fake_quantize((w + n).bfloat16(), base, dim=blocked_dim(name))
        # 1e-6 of rms may move a value over a rounding boundary; none of these does
        assert torch.equal(held[name], expected), name
        change += float((expected.double() - clean.double()).square().sum())
        size += float(w.double().square().sum())
    assert report.sigma == sigma
    assert report.effective_sigma == pytest.approx(math.sqrt(change / size), rel=1e-6)  # differences in float32
    names = {f"{layer.name}.{attribute}" for layer in quantized_layers(model) for attribute in layer.weights}
    assert set(report.by_layer) == names == set(report.to_dict()["layers"])
    if base == "bf16":
        assert report.effective_sigma == pytest.approx(sigma if "False" not in options else sigma / 0.1, rel=0.1)


def test_rounding_amplifies_noise_before_but_not_after():
    before, after = converted(recipe="mxfp4+aqn"), converted(recipe="mxfp4+aqn+aqn_placement=after")
    reports = []
    for model in (before, after):
        recipe = next(quantized_layers(model)).operands.recipe
        with rollout_weights(model, aqn_noise(recipe, 0, 9, 10)) as report:
            reports.append(report.effective_sigma)
    assert reports[1] == pytest.approx(0.001, rel=0.02) and reports[0] > 10 * reports[1]


def test_noise_depends_on_seed_and_rollout_alone():
    model = converted("qwen3_moe", "mxfp4+aqn")

    def draw(seed: int, rollout: int) -> dict[str, Tensor]:
        with rollout_weights(model, aqn_noise("mxfp4+aqn", seed, rollout, 10)):
            return held_matrices(model)

    first, again, next_rollout, other_seed = draw(0, 3), draw(0, 3), draw(0, 4), draw(1, 3)
    for name in first:
        assert torch.equal(first[name], again[name])
        assert not torch.equal(first[name], next_rollout[name]) and not torch.equal(first[name], other_seed[name])


def test_beyond_the_last_rollout_sigma_stays_and_the_draw_does_not():
    model = converted("qwen3", "mxfp4+aqn")
    last, beyond = aqn_noise("mxfp4+aqn", 0, 3, 4), aqn_noise("mxfp4+aqn", 0, 4, 4)
    assert last.sigma == beyond.sigma == pytest.approx(1e-3)
    drawn = []
    for noise in (last, beyond):
        with rollout_weights(model, noise):
            drawn.append(held_matrices(model))
    assert all(not torch.equal(drawn[0][name], drawn[1][name]) for name in drawn[0])


def test_noise_changes_the_rollout_and_is_gone_after_it():
    model, t = converted("mixtral", "mxfp4+aqn"), tokens()
    with torch.no_grad():
        before = model(t).logits
        with rollout_weights(model, aqn_noise("mxfp4+aqn", 0, 0, 1)):
            assert not torch.equal(model(t).logits, before)
        assert torch.equal(model(t).logits, before)


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
def test_noise_on_norms(family):
    recipe = "mxfp4+aqn:0.05:0.01+aqn_target=norm"
    model, t = converted(family, recipe, torch.bfloat16), tokens()
    before = snapshot(model)
    with torch.no_grad():
        plain = model(t).logits
        with rollout_weights(model):
            clean = held_matrices(model)
        with rollout_weights(model, aqn_noise(recipe, 3, 0, 4)) as report:
            inside = snapshot(model)
            assert all(torch.equal(m, clean[name]) for name, m in held_matrices(model).items())
            assert not torch.equal(model(t).logits, plain)
    assert same_bits(model, before)
    changed = {name for name in before if not torch.equal(before[name], inside[name])}
    layernorms = ("input_layernorm", "post_attention_layernorm")
    assert changed == {f"model.layers.{i}.{n}.weight" for i in (0, 1) for n in layernorms} == set(report.layers)
    name = "model.layers.1.input_layernorm.weight"
    w = before[name].float()
    std = 0.05 * math.sqrt(float(w.double().square().mean()))
    assert torch.equal(inside[name], (w + philox_normal(3, 0, name, 0, 64) * std).bfloat16())
    assert report.effective_sigma == pytest.approx(0.05, rel=0.2)  # 256 draws


def test_noise_on_norms_is_removed_after_an_error():
    recipe = "mxfp4+aqn+aqn_target=norm"
    model = converted(recipe=recipe)
    before = snapshot(model)
    with pytest.raises(ZeroDivisionError), rollout_weights(model, aqn_noise(recipe, 0, 0, 1)):
        raise ZeroDivisionError
    assert same_bits(model, before) and not any(layer.holds for layer in quantized_layers(model))


def test_noise_on_norms_needs_norms():
    model = nn.Sequential(nn.Linear(32, 32))
    mxrl.convert(model, "mxfp4+aqn+aqn_target=norm")
    with (
        pytest.raises(RecipeError, match="no RMSNorm"),
        rollout_weights(model, aqn_noise("mxfp4+aqn+aqn_target=norm", 0, 0, 1)),
    ):
        pass


def test_any_callable_is_noise():
    model = converted()
    with rollout_weights(model, lambda name, w: torch.zeros_like(w)) as report:
        noised = held_matrices(model)
    with rollout_weights(model) as clean_report:
        clean = held_matrices(model)
    assert all(torch.equal(noised[name], clean[name]) for name in clean)
    assert report.sigma is None and report.effective_sigma == 0 and len(report.layers) == 14
    assert clean_report.layers == {} and clean_report.effective_sigma == 0


def test_no_noise_without_aqn():
    assert aqn_noise("mxfp4+mbs", 0, 0, 10) is None


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_weights_that_change_inside_are_detected(family):
    model, t = converted(family), tokens()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(t, labels=t).loss.backward()
    with pytest.raises(RolloutError, match="changed inside rollout_weights"), rollout_weights(model):
        optimizer.step()
    assert not any(layer.holds for layer in quantized_layers(model))
    with torch.no_grad(), pytest.raises(RolloutError, match=r"self_attn\.q_proj"), rollout_weights(model):
        model.model.layers[0].self_attn.q_proj.weight.mul_(2)
        model(t)  # raises at once, not only at the end of the block
        pytest.fail("the forward pass used a stale weight")


def test_another_compute_dtype_is_an_error_that_says_what_to_write():
    model, t = converted(), tokens()
    with torch.no_grad(), rollout_weights(model), torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(RolloutError, match=r"rollout_weights\(model, dtype=torch.bfloat16\)"):
            model(t)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = model(t).logits
        with rollout_weights(model):  # entered under autocast: its dtype
            assert torch.equal(model(t).logits, expected)
    with torch.no_grad(), rollout_weights(model, dtype=torch.bfloat16), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(t).logits, expected)


def test_rollouts_do_not_nest_and_need_converted_layers():
    model = converted()
    with rollout_weights(model), pytest.raises(RolloutError, match="already inside"), rollout_weights(model):
        pass
    with pytest.raises(RolloutError, match=r"no converted layer; call mxrl\.convert first"):
        with rollout_weights(tiny_model("qwen3")):
            pass


def test_noise_under_an_adapter_has_the_base_models_names():
    peft = pytest.importorskip("peft")
    model = converted(recipe="mxfp4+aqn")
    with rollout_weights(model, aqn_noise("mxfp4+aqn", 0, 1, 4)):
        expected = held_matrices(model)
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"]))
    with rollout_weights(model, aqn_noise("mxfp4+aqn", 0, 1, 4)):
        held = held_matrices(model)
    assert held.keys() == expected.keys() and all(torch.equal(held[name], expected[name]) for name in held)


def test_compiled_layer_uses_the_held_weight():
    model = nn.Sequential(nn.Linear(64, 32))
    mxrl.convert(model, "mxfp4")
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(4, 64)
    with torch.no_grad(), rollout_weights(model, lambda name, w: w):  # noise = w: twice the weight
        assert torch.equal(compiled(x), model(x))
        inside = compiled(x)
    with torch.no_grad():
        assert torch.equal(compiled(x), model(x)) and not torch.equal(compiled(x), inside)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("recipe", ["mxfp4+aqn", "mxfp4+mbs+of+aqn+w4a16", "mxfp8+aqn"])
def test_noise_and_quantization_in_one_pass_are_the_two_steps(family, recipe):
    model = tiny_model(family)
    mxrl.convert(model, recipe)
    noise = aqn_noise(recipe, 5, 1, 3)
    assert noise is not None
    with rollout_weights(model, noise, dtype=torch.bfloat16) as one_report:
        one = held_matrices(model)
    with rollout_weights(model, lambda name, weight: noise(name, weight), dtype=torch.bfloat16) as two_report:
        two = held_matrices(model)  # a plain callable takes the two steps
    assert len(one) > 2 and all(torch.equal(one[name], two[name]) for name in two)
    assert one_report.layers == two_report.layers and one_report.effective_sigma > 0

"""Converting models: what is converted and left, in every family; copies, checkpoints, adapters, recomputation."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from tiny_models import DENSE, FAMILIES, MOE, VOCAB, tiny_model, tokens
from torch import nn
from transformers import AutoModelForCausalLM, JetMoeConfig

import mxrl
from mxrl.nn import ConvertError, QuantizedLinear, canonical_name, master_matrices, quantized_layers, rollout_weights

ATTENTION = [f"self_attn.{p}_proj.weight" for p in "qkvo"]


def gradients(model: nn.Module, t: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    logits = model(t).logits
    nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), t[:, 1:].flatten()).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_report(family):
    model = tiny_model(family)
    before = dict(model.named_parameters())
    report = mxrl.convert(model, "mxfp4+mbs")
    mlp = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    if family in DENSE:
        mlp = [f"mlp.{p}_proj.weight" for p in ("gate", "up", "down")]
    expected = {f"model.layers.{i}.{name}" for i in (0, 1) for name in ATTENTION + mlp}
    assert {c.name for c in report.converted} == expected and len(report.converted) == len(expected)
    assert all(c.shape == tuple(before[c.name].shape) for c in report.converted)
    assert report.quantized_parameters == sum(before[name].numel() for name in expected)
    assert report.parameters == sum(p.numel() for p in model.parameters())

    # Every parameter is accounted for: its module is converted or left with a reason. Biases stay with their layer.
    reasons = {item.name: item.reason for item in report.left}
    owners = {name.rsplit(".", 1)[0] for name in before if name not in expected and not name.endswith("bias")}
    assert owners <= set(reasons)
    assert reasons["model.embed_tokens"] == "embedding" and reasons["lm_head"] == "output head"
    assert all(reasons[name] == "norm" for name in reasons if "norm" in name)
    if family in MOE:
        assert reasons[f"model.layers.0.mlp.{'router' if family == 'gpt_oss' else 'gate'}"] == "router"
    assert json.loads(json.dumps(report.to_dict()))["recipe"] == "mxfp4+mbs"
    text = str(report)
    assert "model.layers.*.self_attn.q_proj.weight" in text and "2 × 64×64" in text and "output head" in text

    # The very same Parameters under the same names.
    assert {name: id(p) for name, p in model.named_parameters()} == {name: id(p) for name, p in before.items()}


def test_tied_weights_stay_tied_and_the_head_is_plain():
    model = tiny_model("qwen2")
    mxrl.convert(model, "mxfp4")
    assert model.lm_head.weight is model.model.embed_tokens.weight and type(model.lm_head) is nn.Linear


def test_any_other_dense_model():
    class Toy(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(VOCAB, 32)
            self.body = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 32, bias=False))
            self.conv = nn.Conv1d(32, 32, 3)
            self.attention = nn.MultiheadAttention(32, 2)
            self.tied = nn.Linear(32, VOCAB, bias=False)
            self.tied.weight = self.embed.weight
            self.unembed = nn.Linear(32, VOCAB)

        def get_output_embeddings(self):
            return self.unembed

    report = mxrl.convert(Toy(), "mxfp4")
    assert {c.name for c in report.converted} == {"body.0.weight", "body.2.weight"}
    assert {item.name: item.reason for item in report.left} == {
        "embed": "embedding",
        "body.1": "norm",
        "conv": "Conv1d is not a linear layer that mxrl knows",
        "attention": "MultiheadAttention is not a linear layer that mxrl knows",
        "attention.out_proj": "NonDynamicallyQuantizableLinear is a linear layer of its own kind",
        "tied": "output head, tied to the embedding",
        "unembed": "output head",
    }


def test_skip_patterns():
    model = tiny_model("qwen3_moe")
    report = mxrl.convert(model, "mxfp4+skip=*.o_proj", skip=["model.layers.1", "*.k_proj"])
    assert {c.name for c in report.converted} == {
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.self_attn.v_proj.weight",
        "model.layers.0.mlp.experts.gate_up_proj",
        "model.layers.0.mlp.experts.down_proj",
    }
    reasons = {item.name: item.reason for item in report.left}
    assert reasons["model.layers.1.mlp.experts"] == "skipped by 'model.layers.1'"
    assert reasons["model.layers.0.self_attn.o_proj"] == "skipped by '*.o_proj'"
    assert type(model.model.layers[1].self_attn.q_proj) is nn.Linear


def test_one_pattern_as_a_string():
    report = mxrl.convert(tiny_model("llama"), "mxfp4", skip="*.down_proj")
    assert len(report.converted) == 12  # six layers of each of two blocks
    assert all(item.reason == "skipped by '*.down_proj'" for item in report.left if item.name.endswith("down_proj"))


def test_patterns_that_leave_everything_out_are_named():
    model = tiny_model("llama")
    with pytest.raises(ConvertError, match=r"skip leaves out all 14 layers of Llama\w+ .*: \*\.self_attn, \*\.mlp$"):
        mxrl.convert(model, "mxfp4+skip=*.self_attn", skip=["*.mlp"])
    assert not list(quantized_layers(model))


@pytest.mark.parametrize("pattern", ["*.no_such", "model.norm", "lm_head"])
def test_a_pattern_that_leaves_nothing_out_is_an_error(pattern):
    model = tiny_model("llama")
    with pytest.raises(ConvertError, match="matches no layer that would be converted") as error:
        mxrl.convert(model, "mxfp4", skip=[pattern])
    assert f"'{pattern}'" in str(error.value) and "\n" not in str(error.value)
    assert not list(quantized_layers(model))


def test_unknown_experts_are_an_error_before_anything_changes():
    config = JetMoeConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_key_value_heads=1,
        num_local_experts=2, num_experts_per_tok=1, kv_channels=16,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ConvertError, match="JetMoeParallelExperts") as error:
        mxrl.convert(model, "mxfp4")
    assert "Qwen3MoeExperts" in str(error.value) and "\n" not in str(error.value)
    assert "skip=['model.layers.*.mlp.input_linear']" in str(error.value)
    assert not list(quantized_layers(model))
    report = mxrl.convert(model, "mxfp4", skip=["*.mlp.*_linear", "*.experts.*_linear"])
    assert [c.name for c in report.converted] == ["model.layers.0.self_attention.kv_proj.weight"]
    assert {i.reason for i in report.left if "router" in i.name} == {"router"}


def test_a_stack_of_matrices_is_taken_for_unknown_experts():
    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.zeros(2, 32, 32))

    with pytest.raises(ConvertError, match="1 is a Stack, experts that mxrl doesn't know"):
        mxrl.convert(nn.Sequential(nn.Linear(32, 32), Stack()), "mxfp4")


def test_an_mlp_that_is_called_gating_is_no_router():
    """Moshi's; JetMoE's and GraniteMoE's TopKGating is one."""

    class MoshiGatingMLP(nn.Sequential):
        pass

    class TopKGating(nn.Sequential):
        pass

    report = mxrl.convert(nn.Sequential(MoshiGatingMLP(nn.Linear(32, 32)), TopKGating(nn.Linear(32, 4))), "mxfp4")
    assert [c.name for c in report.converted] == ["0.0.weight"]
    assert [(i.name, i.reason) for i in report.left] == [("1.0", "router")]


def test_experts_that_are_a_list_of_linear_layers():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(32, 4)
            self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    report = mxrl.convert(Block(), "mxfp4")
    assert [c.name for c in report.converted] == [f"experts.{e}.weight" for e in range(4)]
    assert [(i.name, i.reason) for i in report.left] == [("gate", "router")]


def test_a_replaced_forward_is_an_error():
    model = tiny_model("llama")
    layer = model.model.layers[0].mlp.up_proj
    layer.forward = layer.forward
    with pytest.raises(ConvertError, match=r"mlp\.up_proj\.forward was replaced"):
        mxrl.convert(model, "mxfp4")


@pytest.mark.parametrize("model", ["policy:dense", None])
def test_what_is_no_model(model):
    with pytest.raises(TypeError, match=f"convert: expected a model .*, got {type(model).__name__}; load it first"):
        mxrl.convert(model, "mxfp4")


def test_nothing_to_convert_is_an_error():
    with pytest.raises(ConvertError, match="LayerNorm has no linear layer to convert, only LayerNorm"):
        mxrl.convert(nn.LayerNorm(8), "mxfp4")


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_converting_again_switches_the_recipe(family):
    model, t = tiny_model(family), tokens()
    with torch.no_grad():
        plain = model(t).logits
        mxrl.convert(model, "mxfp4")
        mxrl.convert(model, "nvfp4+w4a16")
        fresh = tiny_model(family)
        mxrl.convert(fresh, "nvfp4+w4a16")
        assert torch.equal(model(t).logits, fresh(t).logits)
        assert {str(layer.operands.recipe) for layer in quantized_layers(model)} == {"nvfp4+w4a16"}
        mxrl.convert(model, "mxfp4", skip=["model.layers.0"])  # skipped now, so plain again
        mxrl.convert(fresh, "bf16")
        mxrl.convert(fresh, "mxfp4", skip=["model.layers.0"])
        assert torch.equal(model(t).logits, fresh(t).logits)
        assert all(layer.name.startswith("model.layers.1") for layer in quantized_layers(model))
        mxrl.convert(model, "bf16")
        torch.testing.assert_close(model(t).logits, plain, rtol=1e-5, atol=1e-5)  # MoE: order of float32 sums


def test_converting_inside_a_rollout_is_an_error():
    model = tiny_model("llama")
    mxrl.convert(model, "mxfp4")
    with rollout_weights(model), pytest.raises(ConvertError, match="inside rollout_weights"):
        mxrl.convert(model, "bf16")


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_model_is_a_plain_checkpoint_of_the_master_weights(family, tmp_path):
    model, t = tiny_model(family), tokens()
    with torch.no_grad():
        before = model(t).logits
    keys = list(model.state_dict())
    mxrl.convert(model, "mxfp4+mbs+of+aqn")
    assert list(model.state_dict()) == keys
    with rollout_weights(model):
        model.save_pretrained(tmp_path)
    assert "mxrl" not in (tmp_path / "config.json").read_text()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    assert not any(isinstance(m, QuantizedLinear) for m in loaded.modules())
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    with torch.no_grad():
        assert torch.equal(loaded(t).logits, before)


@pytest.mark.parametrize("family", ["qwen3", "mixtral"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(family, use_reentrant):
    model, t = tiny_model(family), tokens()
    mxrl.convert(model, "mxfp4+of")
    model.train()
    plain = gradients(model, t)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    checkpointed = gradients(model, t)
    assert plain.keys() == checkpointed.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(plain[name], checkpointed[name]) for name in plain)


def test_training_with_an_optimizer_made_before_conversion():
    model, t = tiny_model("qwen3_moe"), tokens()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    mxrl.convert(model, "mxfp4+mbs+of")
    losses = []
    for _ in range(8):
        loss = model(t, labels=t).loss
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0] - 1


@pytest.mark.parametrize("convert_first", [False, True])
def test_lora_adapter_on_a_quantized_base(convert_first):
    peft = pytest.importorskip("peft")
    reference, model, t = tiny_model("qwen3", dtype=torch.bfloat16), tiny_model("qwen3", dtype=torch.bfloat16), tokens()
    mxrl.convert(reference, "mxfp4")
    with torch.no_grad():
        expected = reference(t).logits
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=True)
    if convert_first:
        mxrl.convert(model, "mxfp4")
        model = peft.get_peft_model(model, config)
    else:
        model = peft.get_peft_model(model, config)
        report = mxrl.convert(model, "mxfp4")
        assert len(report.converted) == 14 and report.converted[0].name == "model.layers.0.self_attn.q_proj.weight"
        assert "adapter" in {item.reason for item in report.left}
    with torch.no_grad():
        assert torch.equal(model(t).logits, expected)  # a new adapter adds nothing to the quantized base
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    assert isinstance(layer.base_layer, QuantizedLinear) and type(layer.lora_A["default"]) is nn.Linear
    grads = gradients(model, t)
    assert set(grads) == {n for n, p in model.named_parameters() if p.requires_grad} and all("lora" in n for n in grads)
    assert layer.lora_A["default"].weight.dtype == torch.float32  # PEFT's own choice, untouched
    names = {layer.name for layer in quantized_layers(model)}
    assert names == {layer.name for layer in quantized_layers(reference)}


def test_deepcopy_is_independent():
    model, t = tiny_model("qwen3"), tokens()
    mxrl.convert(model, "mxfp4")
    other = copy.deepcopy(model)
    with torch.no_grad():
        assert torch.equal(other(t).logits, model(t).logits)
        mxrl.convert(other, "bf16")
        assert not torch.equal(other(t).logits, model(t).logits)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("model.layers.0.mlp.up_proj", "model.layers.0.mlp.up_proj"),
        ("base_model.model.model.layers.0.mlp.up_proj.base_layer", "model.layers.0.mlp.up_proj"),
        ("module._orig_mod.model.layers.0._checkpoint_wrapped_module.mlp", "model.layers.0.mlp"),
    ],
)
def test_canonical_name(path, name):
    assert canonical_name(path) == name


@pytest.mark.parametrize("family", FAMILIES)
def test_master_matrices_are_views_with_unfused_names(family):
    model = tiny_model(family)
    mxrl.convert(model, "mxfp4")
    matrices = dict(master_matrices(model))
    layers = model.model.layers
    assert torch.equal(matrices["model.layers.1.self_attn.o_proj.weight"], layers[1].self_attn.o_proj.weight)
    if family == "gpt_oss":
        assert torch.equal(matrices["model.layers.1.mlp.experts.3.gate_up_proj"], layers[1].mlp.experts.gate_up_proj[3])
        assert matrices["model.layers.0.mlp.experts.0.down_proj"].shape == (48, 64)
    elif family in MOE:
        fused = layers[1].mlp.experts
        assert torch.equal(matrices["model.layers.1.mlp.experts.3.gate_proj.weight"], fused.gate_up_proj[3, :48])
        assert torch.equal(matrices["model.layers.1.mlp.experts.3.up_proj.weight"], fused.gate_up_proj[3, 48:])
        assert torch.equal(matrices["model.layers.1.mlp.experts.3.down_proj.weight"], fused.down_proj[3])
    assert sum(m.numel() for m in matrices.values()) == sum(
        layer.parameter(a).numel() for layer in quantized_layers(model) for a in layer.weights
    )

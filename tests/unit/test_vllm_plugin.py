"""The vLLM plugin without vLLM: settings, names, shards, numerics against mxrl.nn's layers, what a worker reports.

These modules must import where vLLM isn't installed, as in CI; tests/integration/test_vllm_layers.py has vLLM's own
layers and models, where vLLM can be imported.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
import torch
from tiny_models import tiny_model
from torch import Tensor, nn
from torch.nn.functional import silu

import mxrl
from mxrl.integrations.vllm.forward import experts_forward, quantize_, quantized_input
from mxrl.integrations.vllm.settings import Settings, VllmPluginError
from mxrl.integrations.vllm.worker import WorkerExtension, check_matrices, digest, quantized_matrices
from mxrl.nn import quantized_layers, rollout_weights
from mxrl.nn.experts import state_of
from mxrl.recipes import Recipe

PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
A4 = ("mxfp4", "mxfp4+mbs+of", "mxfp4:even+mbs:search16", "mxfp4+w4a8", "mxfp8")


def settings(recipe: str = "mxfp4", **values) -> Settings:
    return Settings.from_config({"quant_method": "mxrl", "recipe": recipe, **values})


# --- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "recipe is missing"),
        ({"recipe": 4}, "recipe is missing or no text"),
        ({"recipe": "mxfp5"}, "recipe: recipe 'mxfp5': unknown base"),
        ({"recipe": "mxfp4", "skp": []}, "did you mean 'skip'"),
        ({"recipe": "mxfp4", "skip": "*.o_proj"}, "must be a list"),
        ({"recipe": "mxfp4", "weights": "yes"}, "none of loaded, quantize"),
        ({"recipe": "mxfp4", "experts": "cutlass"}, "none of triton, grouped"),
        ({"recipe": "nvfp4"}, "one scale for the whole tensor"),
    ],
)
def test_a_wrong_setting_is_one_line_that_names_it(config, words):
    with pytest.raises(VllmPluginError, match=words) as caught:
        Settings.from_config({"quant_method": "mxrl", **config})
    assert "\n" not in str(caught.value) and str(caught.value).startswith("quantization_config.")


def test_settings_are_the_recipes_activation_operand_and_no_weight_operand_unless_asked_for():
    assert settings("mxfp4+mbs+of+aqn").operand == Recipe.parse("mxfp4+mbs+of")
    assert settings("mxfp4+w4a8").operand == Recipe("mxfp8")
    assert settings("mxfp4+w4a16").operand is settings("bf16").operand is None
    assert settings("nvfp4+w4a16").operand is None
    assert settings("mxfp4+of").weight_operand is None
    assert settings("mxfp4+of", weights="quantize").weight_operand == Recipe.parse("mxfp4+of")


# --- which layers ----------------------------------------------------------------------------------------------------


def test_a_merged_layer_is_named_by_its_parts_and_heads_and_routers_are_left():
    plain = settings()
    attention, mlp = "model.layers.3.self_attn.", "model.layers.3.mlp."
    assert plain.linear_matrices(attention + "qkv_proj", PACKED) == tuple(
        f"{attention}{part}.weight" for part in ("q_proj", "k_proj", "v_proj")
    )
    assert plain.linear_matrices(mlp + "gate_up_proj", {}) == (mlp + "gate_proj.weight", mlp + "up_proj.weight")
    assert plain.linear_matrices(mlp + "gate_up_proj", {"gate_up_proj": ["gate_up_proj"]}) == (  # Phi-3 stores it so
        mlp + "gate_up_proj.weight",
    )
    assert plain.linear_matrices(mlp + "down_proj", PACKED) == (mlp + "down_proj.weight",)
    for name in ("lm_head", "score", mlp + "gate", mlp + "shared_expert_gate"):
        assert plain.linear_matrices(name, PACKED) is None
    with pytest.raises(VllmPluginError, match="MLA"):
        plain.linear_matrices(attention + "kv_b_proj", PACKED)
    assert settings("mxfp4+w4a16").linear_matrices("m.kv_b_proj", PACKED) == ("m.kv_b_proj.weight",)
    assert settings(skip=["*.kv_b_proj"]).linear_matrices(attention + "kv_b_proj", PACKED) is None


def test_skip_patterns_take_hugging_face_names_and_whole_merged_layers():
    first = settings(skip=["model.layers.0.*", "*.k_proj", "*.q_proj", "*.v_proj"])
    assert first.linear_matrices("model.layers.0.self_attn.o_proj", PACKED) is None
    assert first.expert_matrices("model.layers.0.mlp.experts", 2, True) is None
    assert first.linear_matrices("model.layers.1.self_attn.qkv_proj", PACKED) is None
    assert first.linear_matrices("model.layers.1.self_attn.o_proj", PACKED) is not None
    assert settings("mxfp4+skip=*.o_proj").linear_matrices("m.o_proj", PACKED) is None  # the recipe's own
    with pytest.raises(VllmPluginError, match=r"'\*\.k_proj' leaves out m\.k_proj but not m\.q_proj.*m\.qkv_proj"):
        settings(skip=["*.k_proj"]).linear_matrices("m.qkv_proj", PACKED)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_the_names_are_those_of_convert(family):
    model = tiny_model(family)
    mxrl.convert(model, "mxfp4")
    training = {
        f"{layer.name}.{name}"
        for layer in quantized_layers(model)
        for attribute in layer.weights
        for name, _ in layer.matrices(attribute, layer.parameter(attribute))
    }
    plain, found = settings(), set()
    for i in range(model.config.num_hidden_layers):
        block = f"model.layers.{i}"
        for name in ("self_attn.qkv_proj", "self_attn.o_proj"):
            found.update(plain.linear_matrices(f"{block}.{name}", PACKED) or ())
        if family == "qwen3_moe":
            found.update(plain.expert_matrices(f"{block}.mlp.experts", model.config.num_experts, True) or ())
        else:
            for name in ("mlp.gate_up_proj", "mlp.down_proj"):
                found.update(plain.linear_matrices(f"{block}.{name}", PACKED) or ())
    assert found == training


@pytest.mark.parametrize(
    ("recipe", "k", "ranks", "fits"),
    [
        ("mxfp4", 768, 8, None),  # 96 = 3 · 32
        ("mxfp4", 768, 16, 8),  # 48
        ("mxfp4+mbs", 768, 2, None),  # 384 = 3 · 128
        ("mxfp4+mbs", 768, 4, 2),  # 192
        ("mxfp4+mbs+macro=32", 768, 4, None),
        ("mxfp4+w4a8", 64, 4, 2),
        ("mxfp4+w4a16", 64, 4, None),
        ("mxfp4", 40, 1, None),  # a ragged last block is no cut
        ("mxfp4", 40, 2, 1),
    ],
)
def test_a_shard_may_not_cut_a_block(recipe, k, ranks, fits):
    if fits is None:
        settings(recipe).check_shard("m.down_proj", k, ranks)
        return
    words = rf"m\.down_proj: K={k} over {ranks} .*tensor_parallel_size={fits} or enable_expert_parallel"
    with pytest.raises(VllmPluginError, match=words):
        settings(recipe).check_shard("m.down_proj", k, ranks, experts=True)


# --- numerics --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", A4)
def test_a_linear_layer_has_the_bits_of_the_layer_that_trains(recipe, dtype):
    torch.manual_seed(0)
    linear = nn.Linear(160, 48).to(dtype)
    x = torch.randn(5, 160).to(dtype)
    model = nn.Sequential(linear)
    mxrl.convert(model, recipe)
    with torch.no_grad(), rollout_weights(model, dtype=dtype):
        expected, exported = model(x), linear.held.value
    found = nn.functional.linear(quantized_input(x, settings(recipe).operand), exported, linear.bias)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert not torch.equal(found, nn.functional.linear(x, exported, linear.bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", [*A4, "mxfp4+w4a16"])
def test_experts_have_the_bits_of_the_experts_that_train(recipe, dtype):
    model = tiny_model("qwen3_moe", dtype=dtype)
    mxrl.convert(model, recipe)
    experts = model.model.layers[0].mlp.experts
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(9, experts.hidden_dim, generator=generator).to(dtype)
    index = torch.stack([torch.randperm(experts.num_experts, generator=generator)[:2] for _ in range(9)])
    gates = torch.rand(9, 2, generator=generator)

    def gated(hidden: Tensor) -> Tensor:
        gate, up = hidden.chunk(2, dim=-1)
        return silu(gate) * up

    with torch.no_grad(), rollout_weights(model, dtype=dtype):
        expected = experts(x, index, gates.to(dtype))
        held = state_of(experts).held
        w13, w2 = held["gate_up_proj"].value, held["down_proj"].value
        found = experts_forward(x, w13, w2, gates, index.int(), settings(recipe).operand, gated)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    if settings(recipe).operand is not None:
        assert not torch.equal(found, experts_forward(x, w13, w2, gates, index, None, gated))


def test_quantization_in_place_is_the_same_and_without_an_operand_nothing():
    x = torch.randn(3, 64)
    y = x.clone()
    quantize_(y, Recipe("mxfp4"))
    assert torch.equal(y, mxrl.fake_quantize(x, "mxfp4")) and not torch.equal(y, x)
    quantize_(y, None)
    assert torch.equal(y, mxrl.fake_quantize(x, "mxfp4")) and quantized_input(x, None) is x


def test_compiled_it_is_one_registered_operator_in_a_whole_graph_of_any_number_of_tokens():
    operand, seen = Recipe.parse("mxfp4+mbs+of"), []
    weight = torch.randn(16, 128)

    def forward(x: Tensor) -> Tensor:
        return nn.functional.linear(quantized_input(x, operand), weight)

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]):
        seen.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    compiled = torch.compile(forward, backend=backend, fullgraph=True, dynamic=True)
    with torch.inference_mode():
        for tokens in (3, 7):
            x = torch.randn(tokens, 128)
            assert torch.equal(compiled(x), forward(x))
    assert len(seen) == 1 and sum("mxrl.fake_quantize" in target for target in seen[0]) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("recipe", ["mxfp4", "mxfp4+mbs+of"])
def test_a_cuda_graph_holds_a_linear_layer_and_experts(recipe):
    """As vLLM captures a decoding step; replayed on other tokens it gives what eager execution gives."""
    operand = settings(recipe).operand
    make = functools.partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    weight, w13, w2, gates = make(256, 256), make(8, 256, 256), make(8, 256, 128), torch.rand(16, 2, device="cuda")
    x, index = make(16, 256), torch.randint(8, (16, 2), device="cuda")

    def gated(hidden: Tensor) -> Tensor:
        gate, up = hidden.chunk(2, dim=-1)
        return silu(gate) * up

    def step() -> Tensor:
        y = nn.functional.linear(quantized_input(x, operand), weight)
        return experts_forward(y, w13, w2, gates, index, operand, gated)

    with torch.inference_mode():
        step()  # compiles the kernels
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        for _ in range(2):
            x.copy_(make(16, 256))
            index.copy_(torch.randint(8, (16, 2), device="cuda"))
            graph.replay()
            assert torch.equal(captured, step())


# --- what a worker reports -------------------------------------------------------------------------------------------


class _Layer(nn.Module):
    """A layer as vLLM has it: a weight, and a method that may carry names."""

    def __init__(self, *matrices: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.quant_method = SimpleNamespace(matrices=matrices) if matrices else object()


def vllm_model(*layers: int) -> nn.Module:
    """model.layers.N.{o_proj, down_proj} for the layers that this pipeline rank has, and a head."""
    model = nn.Module()
    model.model = nn.Module()
    model.model.layers = nn.ModuleDict(
        {
            str(n): nn.ModuleDict({part: _Layer(f"model.layers.{n}.{part}.weight") for part in ("o_proj", "down_proj")})
            for n in layers
        }
    )
    model.lm_head = _Layer()
    return model


TRAINING = {f"model.layers.{n}.{part}.weight" for n in range(4) for part in ("o_proj", "down_proj")}


def test_a_worker_names_what_it_quantizes_and_takes_the_layers_it_has():
    assert quantized_matrices(vllm_model(0, 1, 2, 3)) == TRAINING
    assert check_matrices(vllm_model(0, 1, 2, 3), TRAINING) == TRAINING
    half = check_matrices(vllm_model(2, 3), TRAINING)
    assert half == {name for name in TRAINING if ".2." in name or ".3." in name}
    worker = type("Worker", (WorkerExtension,), {})()
    worker.model_runner, worker.rank = SimpleNamespace(get_model=lambda: vllm_model(2, 3)), 1
    assert worker.mxrl_matrices() == sorted(half)
    assert worker.mxrl_check(sorted(TRAINING)) == 4


def test_a_worker_that_quantizes_something_else_than_training_says_which(capsys):
    with pytest.raises(VllmPluginError, match=r"1 matrices are quantized in training only, model\.layers\.1\.v"):
        check_matrices(vllm_model(0, 1), TRAINING | {"model.layers.1.v"})
    with pytest.raises(VllmPluginError, match=r"quantized in vLLM only, model\.layers\.1\.o_proj\.weight"):
        check_matrices(vllm_model(0, 1), TRAINING - {"model.layers.1.o_proj.weight"})
    with pytest.raises(VllmPluginError, match="hf_overrides"):
        check_matrices(nn.Sequential(_Layer()), {"0.weight"})  # the plugin is not in use at all


def test_equal_sets_have_equal_digests():
    assert digest(["b", "a"]) == digest(("a", "b")) != digest(["a"])

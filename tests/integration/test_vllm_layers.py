"""The vLLM plugin in vLLM's own classes (0.33), on a CPU: config, layers, loading, reloading, whole models.

Run where vLLM's Python sources can be imported (docs/verl.md says how); skipped elsewhere. No GPU is needed, so what
vLLM has as CUDA code is written out here in torch: attention, the router's top-k, the kernels of its Triton experts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tiny_models import VOCAB, tiny_model
from torch import Tensor, nn

pytest.importorskip("vllm", reason="vLLM isn't installed")
# vLLM's import order matters: its config first
from vllm.config import CompilationConfig, DeviceConfig, ModelConfig, VllmConfig, set_current_vllm_config

import mxrl
import mxrl.integrations.vllm as plugin
from mxrl.integrations.verl.export import Export, ExportPlan
from mxrl.integrations.vllm import method
from mxrl.integrations.vllm.forward import experts_forward
from mxrl.integrations.vllm.settings import Settings, VllmPluginError
from mxrl.integrations.vllm.worker import check_matrices, quantized_matrices
from mxrl.nn import rollout_weights

RECIPE = "mxfp4+mbs+of"
ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory) -> Iterator[None]:
    """vLLM's process groups for one rank on gloo, and the plugin as vLLM loads it."""
    from vllm.distributed import (
        destroy_distributed_environment,
        destroy_model_parallel,
        init_distributed_environment,
        initialize_model_parallel,
    )

    plugin.register()
    plugin.register()  # vLLM does so in every process, some of them more than once
    where = f"file://{tmp_path_factory.mktemp('gloo')}/store"
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig(device="cpu"))):
        init_distributed_environment(1, 0, where, 0, "gloo")
        initialize_model_parallel(1)
    yield
    destroy_model_parallel()
    destroy_distributed_environment()


@pytest.fixture(autouse=True)
def without_cuda(monkeypatch) -> None:
    """What vLLM would call in its compiled extension or on a device."""
    import vllm._custom_ops as ops

    def topk_softmax(weights: Tensor, ids: Tensor, source: Tensor, logits: Tensor, renormalize: bool = False, **_):
        top, index = logits.float().softmax(-1).topk(ids.shape[1], -1)
        weights.copy_(top / top.sum(-1, keepdim=True) if renormalize else top)
        ids.copy_(index)

    monkeypatch.setattr(ops, "topk_softmax", topk_softmax)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)


def model_config(folder: Any, model: nn.Module, dtype: str = "float32", **quantization: Any) -> ModelConfig:
    """vLLM's ModelConfig of `model`, with the plugin's settings by hf_overrides where there are some."""
    config = {**model.config.to_dict(), "architectures": [ARCHITECTURES[model.config.model_type]]}
    (folder / "config.json").write_text(json.dumps(config))
    overrides = {"quantization_config": {"quant_method": "mxrl", **quantization}} if quantization else {}
    return ModelConfig(model=str(folder), skip_tokenizer_init=True, dtype=dtype, hf_overrides=overrides)


@contextmanager
def vllm_config(config: ModelConfig) -> Iterator[VllmConfig]:
    whole = VllmConfig(
        model_config=config,
        device_config=DeviceConfig(device="cpu"),
        compilation_config=CompilationConfig(mode=0, custom_ops=["none"]),
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(config.dtype)
    try:
        with set_current_vllm_config(whole):
            yield whole
    finally:
        torch.set_default_dtype(before)


class Attention(nn.Module):
    """Causal attention over the tokens of one sequence, with vLLM's constructor."""

    def __init__(self, num_heads: int, head_dim: int, scale: float, num_kv_heads: int, **_: Any) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width, self.scale = num_heads, num_kv_heads, head_dim, scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        count = q.shape[0]
        q_HTD = q.view(count, self.heads, self.width).transpose(0, 1)
        k_HTD, v_HTD = (
            x.view(count, self.kv_heads, self.width).transpose(0, 1).repeat_interleave(self.heads // self.kv_heads, 0)
            for x in (k, v)
        )
        mask = torch.full((count, count), torch.finfo(q.dtype).min, dtype=q.dtype).triu(1)
        weights = (q_HTD @ k_HTD.mT * self.scale + mask).softmax(-1, dtype=torch.float32).to(q.dtype)
        return (weights @ v_HTD).transpose(0, 1).reshape(count, -1)


def build(whole: VllmConfig, monkeypatch) -> nn.Module:
    """vLLM's own model of that config, attention aside."""
    from vllm.model_executor.model_loader.utils import configure_quant_config
    from vllm.model_executor.models.registry import ModelRegistry

    cls, _ = ModelRegistry.resolve_model_cls(whole.model_config.architectures, whole.model_config)
    monkeypatch.setattr(f"{cls.__module__}.Attention", Attention)
    if whole.quant_config is not None:
        configure_quant_config(whole.quant_config, cls)
    return cls(vllm_config=whole, prefix="")


def stream(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """A model's weights by name with experts apart, as verl's engines send them."""
    for name, tensor in model.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            for e, expert in enumerate(tensor):
                for part, matrix in zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True):
                    yield name.replace("gate_up_proj", f"{e}.{part}.weight"), matrix
        elif name.endswith("experts.down_proj"):
            for e, expert in enumerate(tensor):
                yield name.replace("down_proj", f"{e}.down_proj.weight"), expert
        else:
            yield name, tensor


def logits(model: nn.Module, whole: VllmConfig, ids: Tensor) -> Tensor:
    from vllm.forward_context import set_forward_context
    from vllm.v1.worker.workspace import init_workspace_manager

    init_workspace_manager(torch.device("cpu"))
    with torch.inference_mode(), set_forward_context(None, whole, num_tokens=len(ids)):
        return model.compute_logits(model(ids, torch.arange(len(ids))))


# --- whole models ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["loaded", "quantize"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen3_moe"])
def test_vllms_model_has_the_logits_of_the_model_that_trains(family, weights, tmp_path, monkeypatch):
    """Exported weights (or masters, quantized at load) in vLLM's model; float32, equal sums: bit for bit.

    Loaded twice, as a trainer does each step; the second weights count.
    """
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    training = tiny_model(family)
    mxrl.convert(training, RECIPE)
    ids = torch.randint(3, VOCAB, (23,), generator=torch.Generator().manual_seed(2))
    quantization = dict(recipe=RECIPE, experts="grouped", weights=weights)
    with vllm_config(model_config(tmp_path, training, **quantization)) as whole:
        model = build(whole, monkeypatch)
        for seed in (5, 0):
            training.load_state_dict(tiny_model(family, seed=seed).state_dict())
            export = Export(stream(training), ExportPlan(training), None, None)
            model.load_weights(export if weights == "loaded" else stream(training))
            process_weights_after_loading(model, whole.model_config, torch.device("cpu"))
        assert check_matrices(model, export.matrices) == export.matrices
        found = logits(model, whole, ids)
    with torch.inference_mode(), rollout_weights(training, dtype=torch.float32):
        expected = training(ids[None]).logits[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    mxrl.convert(training, f"{RECIPE}+w4a16")
    with torch.inference_mode(), rollout_weights(training, dtype=torch.float32):
        assert not torch.allclose(found, training(ids[None]).logits[0], rtol=0, atol=1e-3)


def test_a_model_whose_patterns_differ_from_training_is_refused(tmp_path, monkeypatch):
    training = tiny_model("qwen3")
    mxrl.convert(training, RECIPE, skip=["model.layers.0.*"])
    names = ExportPlan(training).matrices
    skip = ["model.layers.0.*"]
    with vllm_config(model_config(tmp_path, training, recipe=RECIPE, skip=skip)) as whole:
        assert check_matrices(build(whole, monkeypatch), names) == names
    with vllm_config(model_config(tmp_path, training, recipe=RECIPE)) as whole:
        with pytest.raises(VllmPluginError, match=r"quantized in vLLM only, model\.layers\.0\."):
            check_matrices(build(whole, monkeypatch), names)
    with vllm_config(model_config(tmp_path, training)) as whole:  # the plugin is not asked for
        model = build(whole, monkeypatch)
        assert quantized_matrices(model) == frozenset()
        with pytest.raises(VllmPluginError, match="quantized in training only"):
            check_matrices(model, names)


# --- config ----------------------------------------------------------------------------------------------------------


def test_the_recipe_comes_by_hf_overrides_and_is_in_the_key_of_vllms_compilation_cache(tmp_path):
    training = tiny_model("qwen3")
    hashes = set()
    for recipe in (RECIPE, "mxfp4"):
        with vllm_config(model_config(tmp_path, training, recipe=recipe)) as whole:
            assert whole.model_config.quantization == "mxrl"
            assert whole.quant_config.settings.recipe == recipe
            hashes.add(whole.compute_hash())
    assert len(hashes) == 2


def test_a_method_without_a_recipe_is_one_line(tmp_path):
    model_config(tmp_path, tiny_model("qwen3"))
    config = ModelConfig(model=str(tmp_path), skip_tokenizer_init=True, dtype="float32", quantization="mxrl")
    with pytest.raises(VllmPluginError, match="needs a recipe"):
        VllmConfig(model_config=config, device_config=DeviceConfig(device="cpu"))


# --- layers ----------------------------------------------------------------------------------------------------------


def quant_config(recipe: str = RECIPE, **values: Any) -> method.MxrlConfig:
    return method.MxrlConfig.from_config({"quant_method": "mxrl", "recipe": recipe, **values})


@pytest.fixture
def bare() -> Iterator[None]:
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig(device="cpu"))):
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", ["mxfp4", RECIPE, "mxfp4+w4a8"])
def test_a_merged_layer_gives_each_parts_bits(bare, recipe, dtype):
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear

    torch.manual_seed(0)
    parts = nn.ModuleList(nn.Linear(160, 64, bias=False, dtype=dtype) for _ in range(2))
    x = torch.randn(9, 160).to(dtype)
    mxrl.convert(parts, recipe)
    layer = MergedColumnParallelLinear(
        160, [64, 64], bias=False, params_dtype=dtype, quant_config=quant_config(recipe), prefix="m.gate_up_proj"
    )
    assert layer.quant_method.matrices == ("m.gate_proj.weight", "m.up_proj.weight")
    with torch.no_grad(), rollout_weights(parts, dtype=dtype):
        for shard, part in enumerate(parts):
            layer.weight.weight_loader(layer.weight, part.held.value, shard)
        expected = torch.cat([part(x) for part in parts], -1)
        found, _ = layer(x)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_weights_are_quantized_at_each_load_if_asked_for_before_they_are_sharded(bare, monkeypatch):
    from vllm.model_executor.layers import linear

    torch.manual_seed(0)
    monkeypatch.setattr(linear, "get_tensor_model_parallel_world_size", lambda: 2)
    monkeypatch.setattr(linear, "get_tensor_model_parallel_rank", lambda: 1)
    layer = linear.RowParallelLinear(
        512, 48, bias=False, quant_config=quant_config(weights="quantize"), prefix="m.down_proj"
    )
    for seed in range(2):  # a reload is quantized too
        whole = torch.randn(48, 512, generator=torch.Generator().manual_seed(seed))
        layer.weight.weight_loader(layer.weight, whole)
        assert torch.equal(layer.weight, mxrl.fake_quantize(whole, RECIPE)[:, 256:])
    plain = linear.RowParallelLinear(512, 48, bias=False, quant_config=quant_config(), prefix="m.down_proj")
    plain.weight.weight_loader(plain.weight, whole)
    assert torch.equal(plain.weight, whole[:, 256:])


def test_a_tensor_parallel_cut_through_a_macro_block_is_refused(bare, monkeypatch):
    from vllm.model_executor.layers import linear

    monkeypatch.setattr(linear, "get_tensor_model_parallel_world_size", lambda: 4)
    with pytest.raises(VllmPluginError, match=r"m\.down_proj: K=768 over 4 .* 192 a rank.*tensor_parallel_size=2"):
        linear.RowParallelLinear(768, 64, bias=False, quant_config=quant_config(), prefix="m.down_proj")
    linear.RowParallelLinear(768, 64, bias=False, quant_config=quant_config("mxfp4"), prefix="m.down_proj")
    linear.ColumnParallelLinear(768, 64, bias=False, quant_config=quant_config(), prefix="m.up_proj")


def test_a_compiled_linear_layer_is_one_graph_with_the_operator_in_it(bare):
    from vllm.model_executor.layers.linear import RowParallelLinear

    layer = RowParallelLinear(128, 64, bias=False, quant_config=quant_config(), prefix="m.o_proj")
    nn.init.normal_(layer.weight)
    targets = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]):
        targets.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    x = torch.randn(5, 128)
    with torch.inference_mode():
        found, _ = torch.compile(layer, backend=backend, fullgraph=True, dynamic=True)(x)
        expected, _ = layer(x)
    assert torch.equal(found, expected) and sum("mxrl.fake_quantize" in target for target in targets) == 1


# --- vLLM's Triton experts -------------------------------------------------------------------------------------------


def test_vllms_triton_experts_get_quantized_inputs(tmp_path, monkeypatch):
    """TritonExperts.apply as it is, its kernels written out in torch: both GEMMs see what training's GEMMs see."""
    import vllm.model_executor.layers.fused_moe.experts.triton_moe as triton_moe
    import vllm.model_executor.layers.fused_moe.modular_kernel as mk
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.model_loader.utils import process_weights_after_loading
    from vllm.v1.worker.workspace import init_workspace_manager

    seen: list[Tensor] = []

    def gemm(a, w, out, a_scale, w_scale, gates, rows, experts, padded, multiply, top_k, config, **_):
        seen.append(a.clone())
        y = torch.einsum("sk,sok->so", a.repeat_interleave(top_k, 0), w[experts])
        out.view(y.shape).copy_(y * gates.reshape(-1, 1) if multiply else y)

    def silu_and_mul(activation, output, input, **_):
        gate, up = input.chunk(2, -1)
        output.copy_(nn.functional.silu(gate) * up)

    def moe_sum(input: Tensor, output: Tensor, *_: Any) -> None:
        output.copy_(input.sum(1))

    monkeypatch.setattr(triton_moe, "invoke_fused_moe_triton_kernel", gemm)
    monkeypatch.setattr(triton_moe, "_prepare_expert_assignment", lambda ids, *_, **__: (None, ids.reshape(-1), None))
    monkeypatch.setattr(triton_moe, "try_get_optimal_moe_config", lambda *_, **__: {})
    monkeypatch.setattr(triton_moe.tl, "float32", "float32", raising=False)
    monkeypatch.setattr(triton_moe.ops, "moe_sum", moe_sum)
    monkeypatch.setattr(triton_moe.TritonExperts, "_supports_current_device", staticmethod(lambda: True))
    monkeypatch.setattr(mk, "apply_moe_activation", silu_and_mul)

    init_workspace_manager(torch.device("cpu"))
    training = tiny_model("qwen3_moe")
    with vllm_config(model_config(tmp_path, training, recipe=RECIPE)) as whole:
        model = build(whole, monkeypatch)
        model.load_weights(stream(training))
        process_weights_after_loading(model, whole.model_config, torch.device("cpu"))
        experts = model.model.layers[0].mlp.experts.routed_experts
        assert isinstance(experts.quant_method.moe_kernel.fused_experts, triton_moe.TritonExperts)
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(9, 64, generator=generator)
        index = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(9)])
        gates = torch.rand(9, 2, generator=generator)
        found = experts.quant_method.apply(experts, x, gates, index, None, None)
    assert experts.activation == MoEActivation.SILU and found.shape == x.shape
    assert torch.equal(seen[0], mxrl.fake_quantize(x, RECIPE))

    def gated(hidden: Tensor) -> Tensor:
        gate, up = hidden.chunk(2, dim=-1)
        return nn.functional.silu(gate) * up

    hidden = torch.einsum("sk,sok->so", seen[0].repeat_interleave(2, 0), experts.w13_weight[index.reshape(-1)])
    assert torch.equal(seen[1], mxrl.fake_quantize(gated(hidden), RECIPE))
    expected = experts_forward(x, experts.w13_weight, experts.w2_weight, gates, index, Settings(RECIPE).operand, gated)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)  # other orders of the sums


def test_experts_that_cant_be_served_are_one_line(tmp_path, monkeypatch):
    training = tiny_model("qwen3_moe")
    with vllm_config(model_config(tmp_path, training, recipe=RECIPE)) as whole:  # no Triton on this platform
        with pytest.raises(VllmPluginError, match=r"layers\.0\.mlp\.experts: experts=triton.*device.*experts=grouped"):
            build(whole, monkeypatch)
    with vllm_config(model_config(tmp_path, training, recipe=RECIPE, experts="grouped")) as whole:
        whole.kernel_config.moe_backend = "flashinfer_cutlass"
        with pytest.raises(VllmPluginError, match="moe_backend=flashinfer_cutlass hides"):
            build(whole, monkeypatch)

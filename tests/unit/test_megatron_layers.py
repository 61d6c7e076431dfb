"""Megatron-core's layers, converted: the bits of the Hugging Face layers, whatever is fused, cut or sorted.

On a CPU megatron-core (0.16, without TransformerEngine, apex and grouped_gemm) lacks only torch.cuda.current_device,
which a few of its functions ask for a place to put a tensor (the tests answer "cpu"), and CUDA's random states, for
dropout.
"""

from __future__ import annotations

import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gloo_ranks import RANKS, spawn
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

import mxrl
from mxrl.nn import ConvertError, Operands, quantized_layers, quantized_linear
from mxrl.nn.operands import quantize_operand
from mxrl.recipes import Recipe

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that apex and TransformerEngine aren't there
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe import experts as megatron_experts
    from megatron.core.transformer.moe import moe_utils

    from mxrl.integrations.megatron import QuantizedGemm, convert_megatron, expert_matrices

RECIPE = "mxfp4+mbs+of"
RECIPES = ("mxfp4", RECIPE, "mxfp4:even+mbs:search16", "mxfp4+w4a8", "mxfp4+of+w4a16", "mxfp4+backward=master")
HIDDEN, HEADS, GROUPS, HEAD, INNER, EXPERTS, TOP, VOCAB = 128, 4, 2, 32, 256, 4, 2, 64
MOE_INNER = 128


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory):
    """A process group of one, and Megatron's groups."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "current_device", lambda: "cpu")
        without_dropout = SimpleNamespace(fork=nullcontext)
        patch.setattr(tensor_parallel, "get_cuda_rng_tracker", lambda: without_dropout)
        patch.setattr(moe_utils, "te_general_gemm", None, raising=False)  # not defined without TransformerEngine
        store = tmp_path_factory.mktemp("megatron") / "store"
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        yield
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def config(moe: bool = False, **settings: Any) -> TransformerConfig:
    sparse = dict(
        num_moe_experts=EXPERTS,
        moe_router_topk=TOP,
        moe_ffn_hidden_size=MOE_INNER,
        moe_token_dispatcher_type="allgather",
        moe_router_load_balancing_type="none",
    )
    defaults: dict[str, Any] = dict(
        num_layers=2,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        kv_channels=HEAD,
        ffn_hidden_size=INNER,
        use_cpu_initialization=True,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        layernorm_epsilon=1e-6,
        qk_layernorm=True,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return TransformerConfig(**{**defaults, **(sparse if moe else {}), **settings})


def megatron_model(moe: bool = False, **settings: Any) -> Any:
    made = config(moe, **settings)
    spec = get_gpt_layer_local_spec(
        num_experts=EXPERTS if moe else None, moe_grouped_gemm=False, qk_layernorm=True, normalization="RMSNorm"
    )
    return GPTModel(
        made, spec, VOCAB, 64, position_embedding_type="rope", share_embeddings_and_output_weights=False
    ).float()


def hf_model(moe: bool = False) -> Any:
    torch.manual_seed(0)
    shape: dict[str, Any] = dict(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        head_dim=HEAD,
        intermediate_size=INNER,
        attn_implementation="eager",
        tie_word_embeddings=False,
        rope_theta=10000.0,
    )
    if not moe:
        return AutoModelForCausalLM.from_config(Qwen3Config(**shape)).float()
    sparse = dict(num_experts=EXPERTS, num_experts_per_tok=TOP, moe_intermediate_size=MOE_INNER, norm_topk_prob=True)
    return AutoModelForCausalLM.from_config(Qwen3MoeConfig(**shape, **sparse)).float()


def interleave(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Rows of linear_qkv: by group, its queries, its key, its value."""
    parts = [x.unflatten(0, (GROUPS, -1)) for x in (q, k, v)]
    return torch.cat(parts, dim=1).flatten(0, 1)


def megatron_weights(hf: dict[str, Tensor], moe: bool) -> dict[str, Tensor]:
    """A Hugging Face model's values (weights, gradients or quantized weights by name) as Megatron stores them."""
    out = {
        "embedding.word_embeddings.weight": hf["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": hf["model.norm.weight"],
        "output_layer.weight": hf["lm_head.weight"],
    }
    for i in range(2):
        a, b = f"model.layers.{i}", f"decoder.layers.{i}"
        out[f"{b}.input_layernorm.weight"] = hf[f"{a}.input_layernorm.weight"]
        out[f"{b}.pre_mlp_layernorm.weight"] = hf[f"{a}.post_attention_layernorm.weight"]
        out[f"{b}.self_attention.q_layernorm.weight"] = hf[f"{a}.self_attn.q_norm.weight"]
        out[f"{b}.self_attention.k_layernorm.weight"] = hf[f"{a}.self_attn.k_norm.weight"]
        qkv = (hf[f"{a}.self_attn.{x}_proj.weight"] for x in "qkv")
        out[f"{b}.self_attention.linear_qkv.weight"] = interleave(*qkv)
        out[f"{b}.self_attention.linear_proj.weight"] = hf[f"{a}.self_attn.o_proj.weight"]
        if not moe:
            gate, up = hf[f"{a}.mlp.gate_proj.weight"], hf[f"{a}.mlp.up_proj.weight"]
            out[f"{b}.mlp.linear_fc1.weight"] = torch.cat([gate, up])
            out[f"{b}.mlp.linear_fc2.weight"] = hf[f"{a}.mlp.down_proj.weight"]
            continue
        out[f"{b}.mlp.router.weight"] = hf[f"{a}.mlp.gate.weight"]
        for e in range(EXPERTS):
            c = f"{b}.mlp.experts.local_experts.{e}"
            out[f"{c}.linear_fc1.weight"] = hf[f"{a}.mlp.experts.gate_up_proj"][e]
            out[f"{c}.linear_fc2.weight"] = hf[f"{a}.mlp.experts.down_proj"][e]
    return out


def pair(moe: bool) -> tuple[Any, Any]:
    """A Hugging Face model and a Megatron model of the same weights."""
    theirs, ours = hf_model(moe), megatron_model(moe)
    missing, unexpected = ours.load_state_dict(megatron_weights(theirs.state_dict(), moe), strict=False)
    assert not unexpected and all(name.endswith("_extra_state") for name in missing)
    return theirs, ours


def run(model: Any, ids: Tensor) -> Tensor:
    """Megatron's logits [b, s, V], causal."""
    b, s = ids.shape
    mask = torch.ones(1, 1, s, s).tril().logical_not()
    return model(ids, torch.arange(s).expand(b, s), mask)


def draw(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return (x * (1 + 20 * (x > 2))).to(dtype)  # some outliers


# --- one layer -------------------------------------------------------------------------------------------------------


def layer(kind: str, dtype: torch.dtype, bias: bool = False, **settings: Any) -> Any:
    made = config(params_dtype=dtype, **settings)
    init = torch.nn.init.normal_
    common: dict[str, Any] = dict(config=made, init_method=init, bias=bias, skip_bias_add=False)
    if kind == "column":
        return ColumnParallelLinear(HIDDEN, INNER, gather_output=False, **common)
    return RowParallelLinear(HIDDEN, INNER, input_is_parallel=True, **common)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["column", "row"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_layer_has_the_bits_of_quantized_linear(recipe: str, kind: str, dtype: torch.dtype) -> None:
    operands = Operands.of(Recipe.parse(recipe))
    module = layer(kind, dtype)
    module._forward_impl = QuantizedGemm(operands)
    x = draw(6, 2, HIDDEN, dtype=dtype).requires_grad_()
    y, _ = module(x)
    y.backward(dy := draw(6, 2, INNER, seed=2, dtype=dtype))
    x2, w2 = x.detach().clone().requires_grad_(), module.weight.detach().clone().requires_grad_()
    y2 = quantized_linear(x2, w2, None, operands)
    y2.backward(dy)
    assert torch.equal(y, y2) and torch.equal(x.grad, x2.grad) and torch.equal(module.weight.grad, w2.grad)
    plain = F.linear(x.detach(), module.weight.detach())
    assert 0.01 < ((y - plain).norm() / plain.norm()).item() < 0.3


def test_bias_and_frozen_weight() -> None:
    operands = Operands.of(Recipe.parse(RECIPE))
    module = layer("column", torch.float32, bias=True)
    module._forward_impl = QuantizedGemm(operands)
    torch.nn.init.normal_(module.bias)
    module.weight.requires_grad_(False)
    x = draw(6, HIDDEN).requires_grad_()
    y, bias = module(x)
    assert bias is None and torch.equal(y, quantized_linear(x, module.weight, module.bias, operands))
    y.sum().backward()
    assert module.weight.grad is None and module.bias.grad is not None and x.grad is not None


# --- the whole model -------------------------------------------------------------------------------------------------


def quantized(hf: Any) -> dict[str, Tensor]:
    """Q of every converted weight of a Hugging Face model by name, everything else as it is."""
    out = dict(hf.state_dict())
    for found in quantized_layers(hf):
        for a in found.weights:
            out[f"{found.name}.{a}"] = found.quantize(a, found.parameter(a).detach())
    return out


@pytest.mark.parametrize("moe", [False, True])
@pytest.mark.parametrize("recipe", [r for r in RECIPES if "master" not in r])
def test_quantized_weights_are_hugging_faces_bits(recipe: str, moe: bool) -> None:
    theirs, ours = pair(moe)
    mxrl.convert(theirs, recipe)
    expected = megatron_weights(quantized(theirs), moe)
    convert_megatron(ours, recipe)
    seen = 0
    for path, module in ours.named_modules():
        gemm = getattr(module, "_forward_impl", None)
        if isinstance(gemm, QuantizedGemm):
            # what the GEMM multiplies with, read off its output: Q(w) · 1
            eye = torch.eye(module.weight.shape[1])
            weights_only = QuantizedGemm(Operands.of(Recipe.parse(recipe + ("" if "w4a" in recipe else "+w4a16"))))
            if "w4a8" not in recipe:
                got = weights_only(eye, module.weight, None, False, False, False).t()
                assert torch.equal(got, expected[f"{path}.weight"]), path
            assert torch.equal(quantize_operand(module.weight, gemm.operands.weight), expected[f"{path}.weight"]), path
            assert not torch.equal(module.weight, expected[f"{path}.weight"])
            seen += 1
    assert seen == 2 * (2 + (2 * EXPERTS if moe else 2))


@pytest.mark.parametrize("moe", [False, True])
def test_the_model_computes_what_hugging_faces_does(moe: bool) -> None:
    """Logits and weight gradients in float32. Not bit for bit: the two differ outside the GEMMs (rotary embedding,
    softmax, sum over experts), by 1e-6, and where that crosses a rounding boundary a 4-bit step follows. Here none
    does: dense logits are equal, the others within 1e-7."""
    ids = torch.randint(VOCAB, (2, 12), generator=torch.Generator().manual_seed(0))
    errors = {}
    for recipe in ("bf16", RECIPE):
        theirs, ours = pair(moe)
        mxrl.convert(theirs, recipe)
        convert_megatron(ours, recipe)
        a, b = theirs(ids).logits, run(ours, ids)
        weights = draw(*a.shape, seed=3)
        (a * weights).sum().backward()
        (b * weights).sum().backward()
        grads = megatron_weights({name: p.grad for name, p in theirs.named_parameters()}, moe)
        own = {name: p.grad for name, p in ours.named_parameters()}
        assert own.keys() == grads.keys()
        worst = max(float((own[name] - grads[name]).norm() / grads[name].norm()) for name in own)
        errors[recipe] = float((a - b).norm() / a.norm()), worst
        if recipe != "bf16":
            plain = hf_model(moe)(ids).logits
            assert (a - plain).norm() / plain.norm() > 0.02  # quantization does something
    assert errors["bf16"][0] < 1e-5 and errors["bf16"][1] < 1e-4, errors
    assert errors[RECIPE][0] < 2e-3 and errors[RECIPE][1] < 1e-2, errors


def test_bf16_changes_nothing() -> None:
    ids = torch.randint(VOCAB, (1, 8), generator=torch.Generator().manual_seed(0))
    for moe in (False, True):
        model = pair(moe)[1]
        before = run(model, ids)
        convert_megatron(model, "bf16")
        # experts are multiplied by their probability after, not before, the second projection
        assert torch.allclose(run(model, ids), before, rtol=0, atol=1e-6 if moe else 0)


# --- experts ---------------------------------------------------------------------------------------------------------


def probabilities(tokens: int) -> tuple[Tensor, Tensor]:
    """Two experts a token, [T, 2], and their gates; expert 2 gets none."""
    g = torch.Generator().manual_seed(5)
    index = torch.tensor([0, 1, 3])[torch.stack([torch.randperm(3, generator=g)[:TOP] for _ in range(tokens)])]
    return index, torch.rand(tokens, TOP, generator=g)


def sort(x: Tensor, index: Tensor, gates: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Megatron's arguments: rows sorted by expert, how many each has, their gates; and the row of each pair."""
    order = index.flatten().argsort(stable=True)
    counts = torch.bincount(index.flatten(), minlength=EXPERTS)
    return x[order // TOP], counts, gates.flatten()[order], order.argsort()


def groups() -> Any:
    group = dist.group.WORLD
    return SimpleNamespace(ep=group, expt_tp=group, expt_dp=group)


@pytest.fixture
def grouped(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A GroupedMLP; its own GEMM library, which is CUDA's, isn't needed once it is converted."""
    monkeypatch.setattr(megatron_experts.gg, "assert_grouped_gemm_is_available", lambda: None)
    made = config(moe=True, moe_grouped_gemm=True)
    return megatron_experts.GroupedMLP(EXPERTS, made, groups())


def in_a_layer(model: Any, experts: Any) -> Any:
    model.decoder.layers[0].mlp.experts = experts
    return model


@pytest.mark.parametrize("kind", ["sequential", "grouped"])
@pytest.mark.parametrize("recipe", ["mxfp4", RECIPE, "mxfp4+w4a8"])
def test_experts_are_hugging_faces(kind: str, recipe: str, request: pytest.FixtureRequest) -> None:
    theirs, ours = pair(moe=True)
    mxrl.convert(theirs, recipe)
    hf = theirs.model.layers[0].mlp.experts
    if kind == "grouped":
        in_a_layer(ours, request.getfixturevalue("grouped"))
        w1, w2 = expert_matrices(ours.decoder.layers[0].mlp.experts)
        with torch.no_grad():
            w1.copy_(hf.gate_up_proj.mT)
            w2.copy_(hf.down_proj.mT)
    convert_megatron(ours, recipe)
    experts = ours.decoder.layers[0].mlp.experts

    x = draw(24, HIDDEN)
    index, gates = probabilities(24)
    a, b = (t.clone().requires_grad_() for t in (x, x))
    ga, gb = (t.clone().requires_grad_() for t in (gates, gates))
    expected = hf(a, index, ga)
    rows, counts, probs, place = sort(b, index, gb)
    y, bias = experts(rows, counts, probs)
    got = y[place].view(24, TOP, HIDDEN).sum(1)
    assert bias is None
    # the grouped layout is transposed in memory, so its GEMM may sum in another order
    close = dict(rtol=0, atol=0) if kind == "sequential" else dict(rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got, expected, **close)
    dy = draw(24, HIDDEN, seed=7)
    expected.backward(dy)
    got.backward(dy)
    torch.testing.assert_close(b.grad, a.grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gb.grad, ga.grad, rtol=1e-5, atol=1e-4)
    if kind == "grouped":
        g1, g2 = (g.mT for g in (experts.weight1.grad.view_as(w1), experts.weight2.grad.view_as(w2)))
    else:
        empty = [e.linear_fc1.weight.grad is None or not e.linear_fc1.weight.grad.any() for e in experts.local_experts]
        assert empty == [False, False, True, False]
        g1, g2 = torch.zeros_like(hf.gate_up_proj), torch.zeros_like(hf.down_proj)
        for e in (0, 1, 3):
            g1[e] = experts.local_experts[e].linear_fc1.weight.grad
            g2[e] = experts.local_experts[e].linear_fc2.weight.grad
    torch.testing.assert_close(g1, hf.gate_up_proj.grad, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(g2, hf.down_proj.grad, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("recipe", ["mxfp4", RECIPE])
def test_grouped_weights_are_quantized_along_the_contraction_axis(recipe: str, grouped: Any) -> None:
    hf = hf_model(moe=True)
    mxrl.convert(hf, recipe)
    experts, state = hf.model.layers[0].mlp.experts, hf.model.layers[0].mlp.experts.mxrl_state
    w1, w2 = expert_matrices(grouped)
    with torch.no_grad():
        w1.copy_(experts.gate_up_proj.mT)
        w2.copy_(experts.down_proj.mT)
    for stored, name in ((w1, "gate_up_proj"), (w2, "down_proj")):
        expected = quantize_operand(getattr(experts, name).detach(), state.operands.weight)
        assert torch.equal(quantize_operand(stored.detach(), state.operands.weight, -2).mT, expected)
        assert not torch.equal(quantize_operand(stored.detach(), state.operands.weight, -1).mT, expected)


def test_grouped_experts_without_a_token(grouped: Any) -> None:
    model = in_a_layer(megatron_model(moe=True), grouped)
    convert_megatron(model, RECIPE)
    experts = model.decoder.layers[0].mlp.experts
    y, _ = experts(torch.zeros(0, HIDDEN), torch.zeros(EXPERTS, dtype=torch.long), torch.zeros(0))
    y.sum().backward()
    assert y.shape == (0, HIDDEN) and not experts.weight1.grad.any() and not experts.weight2.grad.any()


def test_checkpoints_keep_their_names() -> None:
    model = megatron_model(moe=True)
    before = {name: value for name, value in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    convert_megatron(model, RECIPE)
    assert list(model.state_dict()) == list(before)
    assert all(parameters[name] is parameter for name, parameter in model.named_parameters())
    assert {type(m).__name__ for m in model.modules()} == {type(m).__name__ for m in megatron_model(moe=True).modules()}


# --- report, patterns, errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("moe", [False, True])
def test_report_has_the_hugging_face_matrices(moe: bool) -> None:
    from mxrl.integrations.verl.export import ExportPlan, check_same

    theirs, ours = pair(moe)
    for skip in ((), ("model.layers.0.*",), ("*.o_proj", "model.layers.1.mlp*")):
        mxrl.convert(theirs, RECIPE, skip=skip)
        report = convert_megatron(ours, RECIPE, skip=skip)
        check_same(ExportPlan(theirs).matrices, report.matrices, "Megatron's layers")
        quantizing = [p for p, m in ours.named_modules() if isinstance(getattr(m, "_forward_impl", 0), QuantizedGemm)]
        assert len(quantizing) == len(report.converted)
    reasons = {item.name: item.reason for item in convert_megatron(ours, RECIPE).left}
    assert reasons["embedding.word_embeddings"] == "embedding" and reasons["output_layer"] == "output head"
    assert reasons["decoder.layers.0.input_layernorm"] == "norm"
    assert (reasons.get("decoder.layers.0.mlp.router") == "router") is moe
    text = str(convert_megatron(ours, RECIPE))
    assert "model.layers.*.self_attn.{q,k,v}_proj.weight" in text


def test_names_count_over_all_stages_and_experts(grouped: Any) -> None:
    """What a later pipeline stage, on a later expert-parallel rank, says."""
    model = in_a_layer(megatron_model(moe=True), grouped)
    for i, block in enumerate(model.decoder.layers):
        block.layer_number = 7 + i  # from 1
        block.mlp.local_expert_indices = [4, 5, 6, 7]
        block.config.pipeline_model_parallel_size = 4
    report = convert_megatron(model, RECIPE, skip=["model.layers.0.*", "model.layers.7.self_attn.o_proj"])
    names = {"model.layers.6.self_attn.o_proj.weight"}
    for i in (6, 7):
        names |= {f"model.layers.{i}.self_attn.{x}_proj.weight" for x in "qkv"}
        names |= {
            f"model.layers.{i}.mlp.experts.{e}.{x}_proj.weight" for e in range(4, 8) for x in ("gate", "up", "down")
        }
    assert report.matrices == names
    assert {c.name for c in report.converted if c.kind == "experts"} == {
        "model.layers.6.mlp.experts.gate_up_proj",
        "model.layers.6.mlp.experts.down_proj",
    }
    assert (
        report.quantized_parameters
        == sum(p.numel() for n, p in model.named_parameters() if "experts" in n or "linear" in n)
        - model.decoder.layers[1].self_attention.linear_proj.weight.numel()
    )


def test_skipped_experts_are_megatrons_again() -> None:
    ids = torch.randint(VOCAB, (1, 8), generator=torch.Generator().manual_seed(0))
    model = pair(moe=True)[1]
    before = run(model, ids)
    convert_megatron(model, RECIPE)
    assert not torch.equal(run(model, ids), before)
    convert_megatron(model, RECIPE, skip=["*"])
    assert torch.equal(run(model, ids), before)


@pytest.mark.parametrize(
    ("recipe", "skip", "words"),
    [
        ("nvfp4", (), "nvfp4 has one scale a matrix"),
        ("mxfp4+quantize_grad=True", (), "quantize_grad blocks along outputs and tokens"),
        (RECIPE, ("*.q_proj",), "{q,k,v}_proj in one layer, and skip pattern '\\*.q_proj' leaves .*k_proj quantized"),
        (RECIPE, ("*.up_proj",), "{gate,up}_proj in one layer"),
        (RECIPE, ("decoder.layers.0.*",), "matches no layer that would be converted; write Hugging Face's names"),
    ],
)
def test_what_cannot_be_is_one_line(recipe: str, skip: tuple[str, ...], words: str) -> None:
    model = megatron_model()
    with pytest.raises(ConvertError, match=words) as caught:
        convert_megatron(model, recipe, skip=skip)
    assert "\n" not in str(caught.value)
    assert not any("_forward_impl" in m.__dict__ for m in model.modules())


def test_unknown_layers_are_errors() -> None:
    class TERowParallelLinear(torch.nn.Linear): ...

    model = megatron_model()
    model.decoder.layers[1].mlp.linear_fc2 = TERowParallelLinear(INNER, HIDDEN)
    with pytest.raises(ConvertError, match=r"layers.1.mlp.linear_fc2 is a TERowParallelLinear of TransformerEngine"):
        convert_megatron(model, RECIPE)
    model.decoder.layers[1].mlp.linear_fc2 = torch.nn.Linear(INNER, HIDDEN)
    with pytest.raises(ConvertError, match=r"layers.1.mlp.linear_fc2 is a Linear, which mxrl doesn't know"):
        convert_megatron(model, RECIPE)
    model.decoder.layers[1].mlp.linear_fc2 = layer("row", torch.float32)
    model.decoder.layers[1].mlp.extra = layer("row", torch.float32)
    with pytest.raises(ConvertError, match=r"mlp.extra \(RowParallelLinear\) has no Hugging Face name"):
        convert_megatron(model, RECIPE)
    model = megatron_model()
    model.decoder.layers[0].config.fp8 = "e4m3"
    with pytest.raises(ConvertError, match="fp8=e4m3 can't be combined"):
        convert_megatron(model, RECIPE)


# --- verl's engine, without verl's initialization -------------------------------------------------------------------


def test_the_engine_converts_and_exports(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Our engine's own methods, on top of a stand-in for verl's, which need a GPU and Megatron-Bridge."""
    pytest.importorskip("verl", reason="verl is not installed")
    engine_module = pytest.importorskip("mxrl.integrations.verl.megatron", reason="verl has no Megatron engine")
    from mxrl.integrations.verl.config import VerlConfig
    from mxrl.integrations.verl.export import ExportError
    from mxrl.nn import aqn_noise, rollout_weights

    recipe = "mxfp4+mbs+of+aqn"
    theirs, ours = pair(moe=True)
    stored: Any = SimpleNamespace(transformer_layer_spec=None)
    specs = SimpleNamespace(modelopt_transformer_layer_spec="megatron-core's own linear layers")
    monkeypatch.setitem(sys.modules, "megatron.bridge.models.gpt_provider", specs)  # type: ignore[arg-type]

    def whole_weights(*args: Any, **kwargs: Any) -> Any:
        for name, value in theirs.state_dict().items():
            if name.endswith("experts.gate_up_proj"):
                for e, (gate, up) in enumerate(x.chunk(2) for x in value):
                    yield name.replace("gate_up_proj", f"{e}.gate_proj.weight"), gate
                    yield name.replace("gate_up_proj", f"{e}.up_proj.weight"), up
            elif name.endswith("experts.down_proj"):
                yield from ((name.replace("down_proj", f"{e}.down_proj.weight"), x) for e, x in enumerate(value))
            else:
                yield name, value

    parent = engine_module.MegatronEngineWithLMHead
    monkeypatch.setattr(parent, "__init__", lambda self: None)
    monkeypatch.setattr(parent, "_build_tf_config", lambda self: setattr(self, "provider", stored))
    monkeypatch.setattr(parent, "_build_megatron_module", lambda self: [ours])
    monkeypatch.setattr(parent, "get_per_tensor_param", lambda self, **kwargs: (whole_weights(), None))
    monkeypatch.setattr(engine_module.VerlConfig, "from_environment", lambda: VerlConfig(recipe, seed=3))
    engine = engine_module.QuantizedMegatronEngine()
    engine.engine_config = SimpleNamespace(forward_only=False)
    engine.optimizer_config = SimpleNamespace(total_training_steps=8)
    engine.lr_scheduler = SimpleNamespace(num_steps=2)
    engine.model_config = SimpleNamespace(hf_config=theirs.config)
    engine.param_dtype = torch.bfloat16

    engine._build_tf_config()
    assert stored.transformer_layer_spec == specs.modelopt_transformer_layer_spec
    assert engine._build_megatron_module() == [ours]
    assert isinstance(ours.decoder.layers[0].self_attention.linear_qkv._forward_impl, QuantizedGemm)
    line = capsys.readouterr().out.strip()
    assert "actor Megatron" in line and f"{2 * (4 + 3 * EXPERTS)} matrices in all" in line

    exported, _ = engine.get_per_tensor_param()
    got = dict(exported)
    mxrl.convert(theirs, recipe)
    with rollout_weights(theirs, aqn_noise(recipe, 3, 2, 8), dtype=torch.bfloat16):
        for found in quantized_layers(theirs):
            for a in found.weights:
                held = found.module.held if found.is_linear else found.module.mxrl_state.held[a]
                for name, matrix in found.matrices(a, held.value):
                    assert torch.equal(got[f"{found.name}.{name}"], matrix)

    engine.model_config.hf_config.num_hidden_layers = 3  # the rollout would have a layer that nobody trains
    with pytest.raises(ExportError, match=r"quantized in training only, model.layers.2.*Megatron's layers"):
        engine._build_megatron_module()


# --- two ranks -------------------------------------------------------------------------------------------------------


def _on_a_rank(rank: int, mesh: Any, folder: Path) -> None:
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=RANKS)
    found: dict[str, Any] = {}
    for sequence in (False, True):
        column = layer("column", torch.float32, sequence_parallel=sequence, tensor_model_parallel_size=RANKS)
        row = layer("row", torch.float32, sequence_parallel=sequence, tensor_model_parallel_size=RANKS)
        w1, w2 = draw(INNER, HIDDEN, seed=11), draw(INNER, HIDDEN, seed=12)
        with torch.no_grad():
            column.weight.copy_(w1.chunk(RANKS)[rank])
            row.weight.copy_(w2.chunk(RANKS, dim=1)[rank])
        for module in (column, row):
            module._forward_impl = QuantizedGemm(Operands.of(Recipe.parse("mxfp4+of")))
        x = draw(8, 2, HIDDEN, seed=13)
        x = (x.chunk(RANKS)[rank] if sequence else x).clone().requires_grad_()
        y, _ = column(x)
        y.backward(draw(8, 2, INNER, seed=14).chunk(RANKS, dim=-1)[rank])
        z = draw(8, 2, HIDDEN, seed=15).chunk(RANKS, dim=-1)[rank].clone().requires_grad_()
        out, _ = row(z)
        dy = draw(8, 2, INNER, seed=16)
        out.backward(dy.chunk(RANKS)[rank] if sequence else dy)
        found[f"{sequence}"] = [t.detach() for t in (y, x.grad, column.weight.grad, out, z.grad, row.weight.grad)]

    errors = []
    for inner, recipe in ((96, "mxfp4"), (128, "mxfp4+mbs"), (128, "mxfp4")):
        model = megatron_model(ffn_hidden_size=inner, tensor_model_parallel_size=RANKS, params_dtype=torch.float32)
        try:
            convert_megatron(model, recipe, skip=["*.o_proj"])
            errors.append("")
        except ConvertError as error:
            errors.append(str(error))
    torch.save((found, errors), folder / f"{rank}.pt")
    parallel_state.destroy_model_parallel()


def test_two_ranks_cut_no_block(tmp_path: Path) -> None:
    spawn(_on_a_rank, tmp_path)
    found, errors = zip(*(torch.load(tmp_path / f"{rank}.pt") for rank in range(RANKS)), strict=True)
    operands = Operands.of(Recipe.parse("mxfp4+of"))
    w1, w2 = (draw(INNER, HIDDEN, seed=seed).requires_grad_() for seed in (11, 12))
    x, z = (draw(8, 2, HIDDEN, seed=seed).requires_grad_() for seed in (13, 15))
    y, out = quantized_linear(x, w1, None, operands), quantized_linear(z, w2, None, operands)
    y.backward(draw(8, 2, INNER, seed=14))
    out.backward(draw(8, 2, INNER, seed=16))
    for sequence in ("False", "True"):
        parts = list(zip(*(found[rank][sequence] for rank in range(RANKS)), strict=True))
        cut = (lambda t: torch.cat(t)) if sequence == "True" else (lambda t: t[0])
        # only sums over the ranks, of two halves instead of one whole, are another order
        loose = dict(rtol=1e-5, atol=2e-3)
        torch.testing.assert_close(torch.cat(parts[0], -1), y, rtol=1e-6, atol=1e-4)
        torch.testing.assert_close(cut(parts[1]), x.grad, **loose)
        torch.testing.assert_close(torch.cat(parts[2]), w1.grad, rtol=1e-6, atol=1e-4)
        torch.testing.assert_close(cut(parts[3]), out, **loose)
        torch.testing.assert_close(torch.cat(parts[4], -1), z.grad, rtol=1e-6, atol=1e-4)
        torch.testing.assert_close(torch.cat(parts[5], 1), w2.grad, rtol=1e-6, atol=1e-4)
    for cut96, mbs, whole in errors:
        assert "model.layers.0.mlp.down_proj (decoder.layers.0.mlp.linear_fc2): tensor parallelism over tp=2" in cut96
        assert "cuts K=96 into 48, which is no multiple of the block of 32; use tp=3 or a divisor of it" in cut96
        assert "cuts K=128 into 64, which is no multiple of the macro-block of 128; use tp=1 or a divisor" in mbs
        assert whole == ""

"""Megatron-core's parallel layers with quantized operands (megatron-core 0.16; independent of verl).

    ColumnParallelLinear   w [O/tp, K]         linear_qkv (q, k, v interleaved by head group), linear_fc1 (gate, up)
    RowParallelLinear      w [O, K/tp]         linear_proj, linear_fc2: the contraction axis is cut
    SequentialMLP          the two above, once an expert
    GroupedMLP             weight1 [H, E·2I], weight2 [E·I, H], which are [E, H, 2I] and [E, I, H]: contraction axis -2

Both linear layers compute in one method, `_forward_impl(input, weight, …)`; everything around it (scattering, reducing,
biases) knows nothing of the GEMM. So a converted layer has an attribute of that name, a `QuantizedGemm`: the class, its
name (by which Megatron-Bridge tells columns from rows), parameters and checkpoints stay Megatron's. Gradients are those
of mxrl.nn.linear.

Blocks of 32, and macro-blocks of 128, lie along K. Fusing q, k, v or gate, up stacks rows, in whatever order, so each
row's quantized bits are those of the Hugging Face layer. A RowParallelLinear must give each rank whole (macro-)blocks.

Megatron multiplies an expert's *inner* activation by the router's probability, before its second projection would
quantize it; transformers, vLLM and mxrl.nn multiply the expert's output. Without rounding that is the same, with it
rollout and training would differ: a converted expert multiplies its output.

Sequence parallelism: the input is gathered, and its gradient scattered, by Megatron's own functions; Q(x) of the whole
sequence is kept for backward (Megatron gathers again). Gradient accumulation fusion: these layers' weight gradients are
rounded to the parameter's dtype and then added to `main_grad`, by Megatron's hook, as without fusion.
Not supported, refused: TransformerEngine's layers, multi-latent attention, shared experts, multi-token prediction,
adapters, NVFP4 (its scale belongs to a whole matrix), quantize_grad (blocks along O and T are cut otherwise here).
"""

# megatron-core is nobody's dependency
# pyright: reportMissingImports=false

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.moe.experts import GroupedMLP, SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import Router
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from mxrl.nn.activations import quantize_activation
from mxrl.nn.convert import ConversionReport, Converted, ConvertError, Left, matches
from mxrl.nn.grouped import Route, straight_through_experts
from mxrl.nn.linear import quantized_linear
from mxrl.nn.operands import Operands, compute_dtype, quantize_operand
from mxrl.recipes import Recipe

_HEAD = re.compile(r"(module\.)*output_layer$")
_LAYER = re.compile(r"(module\.)*decoder\.layers\.\d+$")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])$")
_PARTS = {  # of a TransformerLayer: Hugging Face's modules
    "self_attention.linear_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention.linear_proj": ("self_attn.o_proj",),
    "mlp.linear_fc1": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.linear_fc2": ("mlp.down_proj",),
}


@dataclass(frozen=True)
class MegatronReport(ConversionReport):
    """What is converted on this rank. `converted` has Megatron's parameters (a rank's shapes) under Hugging Face names;
    `matrices` the Hugging Face name of each matrix in them, for `ExportPlan.matrices` to be compared with."""

    matrices: frozenset[str] = frozenset()


class QuantizedGemm:
    """Takes the place of a layer's `_forward_impl`: Q(x) · Q(w)ᵀ with straight-through gradients."""

    def __init__(self, operands: Operands):
        self.operands = operands

    def __call__(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gradient_accumulation_fusion: bool,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        grad_output_buffer: list[Tensor] | None = None,
        wgrad_deferral_limit: int | None = None,
        tp_group: Any = None,
    ) -> Tensor:
        """input [s, b, K] ([s/tp, b, K] with sequence_parallel), weight [O, K]; returns [s, b, O]."""
        if sequence_parallel:
            input = gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True, group=tp_group)
        elif allreduce_dgrad:
            input = copy_to_tensor_model_parallel_region(input, group=tp_group)
        return quantized_linear(input, weight, bias, self.operands)


def _expert_forward(self: Any, hidden_states: Tensor, per_token_scale: Tensor | None = None, **kwargs: Any) -> Any:
    """MLP.forward of an expert of SequentialMLP; the router's probability multiplies its output."""
    output, bias = type(self).forward(self, hidden_states, **kwargs)
    if per_token_scale is None:
        return output, bias
    output = output if bias is None else output + bias
    return (output * per_token_scale.unsqueeze(-1)).to(output.dtype), None


def _grouped_forward(
    self: Any, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
) -> tuple[Tensor, None]:
    """GroupedMLP.forward: hidden states [S, H] sorted by expert, tokens_per_expert [E], probabilities [S]."""
    x_SH, operands = permuted_local_hidden_states, self.mxrl_operands
    rows, experts = x_SH.shape[0], self.num_local_experts
    counts_E = tokens_per_expert.to(x_SH.device)
    expert_S = torch.arange(experts, device=x_SH.device).repeat_interleave(counts_E, output_size=rows)
    order_S = torch.arange(rows, device=x_SH.device)
    where = Route(expert_S, order_S, order_S, counts_E.cumsum(0).to(torch.int32))
    w1_EHI, w2_EIH = expert_matrices(self)
    hidden_SI = _project(x_SH, w1_EHI, where, operands)
    if self.config.gated_linear_unit:
        gate, up = hidden_SI.chunk(2, dim=-1)
        inner_SI = self.config.activation_func(gate) * up
    else:
        inner_SI = self.config.activation_func(hidden_SI)
    y_SH = _project(inner_SI, w2_EIH, where, operands)
    return (y_SH * permuted_probs.unsqueeze(-1)).to(y_SH.dtype), None


def expert_matrices(module: Any) -> tuple[Tensor, Tensor]:
    """A GroupedMLP's weights as [E, H, 2I] (or [E, H, I], not gated) and [E, I, H]; views, so gradients pass."""
    experts, hidden = module.num_local_experts, module.config.hidden_size
    return module.weight1.view(experts, hidden, -1), module.weight2.view(experts, -1, hidden)


def _project(x_SK: Tensor, w_EKO: Tensor, where: Route, operands: Operands) -> Tensor:
    dtype = compute_dtype(x_SK)
    activation = quantize_activation(x_SK, operands, dtype)
    wq_EKO = quantize_operand(w_EKO.detach().to(dtype), operands.weight, -2)
    return straight_through_experts(
        x_SK, w_EKO, None, activation, wq_EKO, where, active=0, transposed=True, operands=operands
    )


# --- converting ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Found:
    """A layer that can be converted, and what Hugging Face calls it."""

    path: str
    module: Any
    skipped_by: tuple[str, ...]  # names that skip patterns are matched with: of one module each
    matrices: tuple[str, ...]

    @property
    def label(self) -> str:
        """model.layers.0.self_attn.{q,k,v}_proj"""
        head = self.matrices[0].removesuffix(".weight").rpartition(".")[0]
        if isinstance(self.module, GroupedMLP):
            return head.rpartition(".")[0]
        last = [name.removesuffix("_proj.weight").rpartition(".")[2] for name in self.matrices]
        return f"{head}.{last[0] if len(last) == 1 else '{' + ','.join(last) + '}'}_proj"


def convert_megatron(
    model: nn.Module | Sequence[nn.Module], recipe: Recipe | str, *, skip: Iterable[str] = ()
) -> MegatronReport:
    """Make the linear layers and experts of a Megatron GPTModel compute as `recipe` says; again: switch the recipe.

    model: the model, wrapped or not (DDP, Float16Module), or the chunks of a virtual pipeline. skip: fnmatch patterns
        of Hugging Face module names as `mxrl.convert` takes them ("model.layers.0.*", "*.down_proj"; experts by
        "model.layers.*.mlp.experts"), besides `recipe.skip`. q, k, v are one layer here, so are gate and up: a pattern
        must take all of them or none.
    Embeddings, output layer, norms and routers are left. Call it before a CUDA graph is captured.
    Raises ConvertError, before anything is changed, for a layer that isn't known, a tensor-parallel split that cuts a
    block, a recipe or setting listed in the module's docstring, and (without pipeline parallelism) a pattern without
    effect.
    """
    recipe = Recipe.parse(recipe)
    chunks: list[Any] = list(model) if isinstance(model, list | tuple) else [model]
    patterns = (*recipe.skip, *skip)
    _check_recipe(recipe)
    plan: list[_Found] = []
    skipped: list[_Found] = []
    left: list[Left] = []
    unused = set(patterns)
    for chunk in chunks:
        _check_settings(chunk)
        for item in _walk(chunk):
            if isinstance(item, Left):
                left.append(item)
                continue
            taken = {name: [p for p in patterns if matches(p, name)] for name in item.skipped_by}
            unused.difference_update(*taken.values())
            if not any(taken.values()):
                _check_split(item, recipe)
                plan.append(item)
            elif all(taken.values()):
                skipped.append(item)
                left.append(Left(item.label, f"skipped by '{taken[item.skipped_by[0]][0]}'"))
            else:
                kept = next(name for name, by in taken.items() if not by)
                pattern = next(by[0] for by in taken.values() if by)
                raise ConvertError(
                    f"convert: Megatron stores {item.label} in one layer, and skip pattern '{pattern}' leaves {kept} "
                    "quantized; skip all of them or none"
                )
    stages = max((getattr(m.config, "pipeline_model_parallel_size", 1) for m in _configured(chunks)), default=1)
    if unused and stages == 1:
        raise ConvertError(
            f"convert: skip pattern '{min(unused)}' matches no layer that would be converted; write Hugging Face's "
            "names, model.layers.0.mlp.down_proj for one"
        )
    if not plan and not skipped and stages == 1:
        raise ConvertError(f"convert: {type(chunks[0]).__name__} has no Megatron layer to convert")
    return _apply(chunks, recipe, plan, skipped, left)


def _apply(
    chunks: list[Any], recipe: Recipe, plan: list[_Found], skipped: list[_Found], left: list[Left]
) -> MegatronReport:
    operands = Operands.of(recipe)
    converted: list[Converted] = []
    for item in plan:
        _use(item.module, operands)
        if isinstance(item.module, GroupedMLP):
            pair = (("gate_up_proj", item.module.weight1), ("down_proj", item.module.weight2))
            converted += [Converted(f"{item.label}.{name}", tuple(w.shape), "experts") for name, w in pair]
        else:
            converted.append(Converted(f"{item.label}.weight", tuple(item.module.weight.shape), "linear"))
    for item in skipped:
        _use(item.module, None)
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, SequentialMLP):
                _scale_outputs(module)
    quantized = sum(parameter.numel() for item in plan for parameter in _weights(item.module))
    total = sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters())
    matrices = frozenset(name for item in plan for name in item.matrices)
    return MegatronReport(recipe, tuple(converted), tuple(left), total, quantized, matrices)


def convert_experts(module: GroupedMLP | SequentialMLP, recipe: Recipe | str) -> None:
    """Make experts outside a model (a test's, a benchmark's) compute as `recipe` says; nothing of it is checked."""
    operands = Operands.of(Recipe.parse(recipe))
    if isinstance(module, GroupedMLP):
        _use(module, operands)
        return
    for expert in module.local_experts:
        _use(expert.linear_fc1, operands)
        _use(expert.linear_fc2, operands)
    _scale_outputs(module)


def _use(module: Any, operands: Operands | None) -> None:
    """Let one layer compute with these quantizers; None: as Megatron does."""
    if isinstance(module, GroupedMLP):
        for name in ("mxrl_operands", "forward"):
            module.__dict__.pop(name, None)
        if operands is not None:
            module.__dict__.update(mxrl_operands=operands, forward=MethodType(_grouped_forward, module))
    elif operands is None:
        module.__dict__.pop("_forward_impl", None)
    else:
        module._forward_impl = QuantizedGemm(operands)


def _scale_outputs(module: Any) -> None:
    """Where an expert is converted, multiply what comes out of it, else what goes into its second projection."""
    for expert in module.local_experts:
        expert.__dict__.pop("forward", None)
        if "_forward_impl" in expert.linear_fc2.__dict__:
            expert.forward = MethodType(_expert_forward, expert)


def _weights(module: Any) -> tuple[Tensor, ...]:
    return (module.weight1, module.weight2) if isinstance(module, GroupedMLP) else (module.weight,)


def _walk(model: nn.Module) -> Iterator[_Found | Left]:
    """Every module that owns parameters: a layer to convert, or one that is left and why."""
    layers: dict[str, Any] = {}
    for path, module in model.named_modules():
        if isinstance(module, TransformerLayer):
            layers[path] = module
        own = dict(module.named_parameters(recurse=False))
        if not own:
            continue
        kind = type(module).__name__
        if isinstance(module, VocabParallelEmbedding | LanguageModelEmbedding | nn.Embedding):
            yield Left(path, "embedding")
        elif isinstance(module, Router):
            yield Left(path, "router")
        elif _HEAD.match(path):
            yield Left(path, "output head")
        elif isinstance(module, ColumnParallelLinear | RowParallelLinear | GroupedMLP):
            yield _named(path, module, layers)
        elif all(parameter.ndim <= 1 for parameter in own.values()) and "linear" not in kind.lower():
            yield Left(path, "norm" if "norm" in kind.lower() else f"no matrix: {', '.join(own)}")
        elif kind.startswith("TE") or type(module).__module__.startswith("transformer_engine"):
            raise ConvertError(
                f"convert: {path} is a {kind} of TransformerEngine, which mxrl can't convert; build the model from "
                "megatron-core's own layers (get_gpt_modelopt_spec keeps TransformerEngine's norms and attention)"
            )
        else:
            raise ConvertError(f"convert: {path} is a {kind}, which mxrl doesn't know")


def _named(path: str, module: Any, layers: dict[str, Any]) -> _Found:
    owner = next((p for p in layers if path.startswith(f"{p}.")), "")
    inside = path[len(owner) + 1 :]
    if _LAYER.match(owner):
        layer = layers[owner]
        base = f"model.layers.{layer.layer_number - 1}"  # counted over all pipeline stages, from 1
        gated = layer.config.gated_linear_unit
        expert = _EXPERT.match(inside)
        if expert and gated and isinstance(layer.mlp, MoELayer):
            number = layer.mlp.local_expert_indices[int(expert[1])]
            names = ("gate_proj", "up_proj") if expert[2] == "linear_fc1" else ("down_proj",)
            matrices = tuple(f"{base}.mlp.experts.{number}.{name}.weight" for name in names)
            return _Found(path, module, (f"{base}.mlp.experts",), matrices)
        if isinstance(module, GroupedMLP) and gated and inside == "mlp.experts" and isinstance(layer.mlp, MoELayer):
            names = ("gate_proj", "up_proj", "down_proj")
            numbers = layer.mlp.local_expert_indices
            matrices = tuple(f"{base}.mlp.experts.{e}.{name}.weight" for e in numbers for name in names)
            return _Found(path, module, (f"{base}.mlp.experts",), matrices)
        if inside in _PARTS and (gated or inside != "mlp.linear_fc1"):
            names = tuple(f"{base}.{part}" for part in _PARTS[inside])
            return _Found(path, module, names, tuple(f"{name}.weight" for name in names))
    raise ConvertError(
        f"convert: {path} ({type(module).__name__}) has no Hugging Face name that mxrl knows; known in "
        f"decoder.layers.*: {', '.join(_PARTS)} and gated mlp.experts"
    )


# --- what can't be ---------------------------------------------------------------------------------------------------


def _check_recipe(recipe: Recipe) -> None:
    for problem in unsupported(recipe):
        raise ConvertError(f"convert: recipe '{recipe}' on Megatron layers: {problem}")


def unsupported(recipe: Recipe) -> Iterator[str]:
    """What of a recipe Megatron's layers can't do, in words."""
    if recipe.base == "nvfp4":
        yield "nvfp4 has one scale a matrix, and Megatron cuts and fuses matrices; use mxfp4"
    if recipe.quantize_grad:
        yield "quantize_grad blocks along outputs and tokens, which Megatron cuts and fuses; leave it out"


def _configured(chunks: Iterable[nn.Module]) -> Iterator[Any]:
    return (m for chunk in chunks for m in chunk.modules() if isinstance(m, TransformerLayer))


def _check_settings(model: nn.Module) -> None:
    for layer in _configured([model]):
        config = layer.config
        for name in ("fp8", "fp4", "defer_embedding_wgrad_compute", "moe_apply_probs_on_input", "moe_latent_size"):
            if getattr(config, name, None):
                raise ConvertError(f"convert: Megatron's {name}={getattr(config, name)} can't be combined with mxrl")
    for path, module in model.named_modules():
        if isinstance(module, GroupedMLP) and module.activation_recompute:
            raise ConvertError(f"convert: {path} recomputes moe_act; leave it out of recompute_modules")


def _check_split(item: _Found, recipe: Recipe) -> None:
    """Raise where tensor parallelism would cut a block, or a macro-block, of a weight's contraction axis."""
    if recipe.format is None:
        return
    unit = recipe.macro if recipe.mbs is not None else recipe.format.block
    what = "macro-block" if recipe.mbs is not None else "block"
    module = item.module
    if isinstance(module, GroupedMLP):
        mine, ranks = expert_matrices(module)[1].shape[1], module.tp_group.size()
    elif isinstance(module, RowParallelLinear):
        mine, ranks = module.input_size_per_partition, module.input_size // module.input_size_per_partition
    else:
        return  # cut along O
    if ranks > 1 and mine % unit:
        whole = mine * ranks
        raise ConvertError(
            f"convert: {item.label} ({item.path}): tensor parallelism over tp={ranks} ranks cuts K={whole} into "
            f"{mine}, which is no multiple of the {what} of {unit}; "
            + (f"use tp={whole // unit} or a divisor of it" if whole % unit == 0 else "use tp=1")
        )

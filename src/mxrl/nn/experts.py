"""Mixture-of-experts layers: transformers 5 fuses all experts' matrices into 3-D parameters.

    gate_up_proj [E, 2I, H], down_proj [E, H, I]      Qwen3-MoE, Mixtral, OLMoE, ...: contraction axis last
    gate_up_proj [E, H, 2I], down_proj [E, I, H]      gpt-oss: transposed, contraction axis -2; gate and up interleaved

so swapping `nn.Linear` misses every expert. `transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS` is the clean hook: an
experts module that carries the decorator `use_experts_implementation` looks its forward function up there, by the name
in its config. Ours quantizes the token states once (before they are sent to the experts), the weights along their
contraction axis, and the input of the down projection; routing weights and biases are left alone.

Each projection is one grouped GEMM over all experts (grouped.py), with linear.py's gradients. Nothing waits for the
device, so that a CUDA graph can hold the layer, and nothing depends on the data but values, so that torch.compile can.
E experts, A experts a token, S = T · A token-expert pairs sorted by expert, H hidden size, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from mxrl.nn.activations import Activation, quantize_activation
from mxrl.nn.grouped import Reorder, Route, grouped_mm, route, straight_through_experts
from mxrl.nn.operands import HeldWeight, Operands, SharedWeight, compute_dtype, quantize_operand

try:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward
except ImportError as error:
    raise ImportError("mxrl.nn needs transformers 5.9 or later: pip install 'mxrl[train]'") from error

Experts: TypeAlias = Any  # an nn.Module with the decorator's attributes (has_gate, is_transposed, ...) and parameters
NAME = "mxrl"  # of the registered experts implementation
KNOWN = ("Qwen3MoeExperts", "MixtralExperts", "OlmoeExperts", "GptOssExperts")  # tested; others by the same decorator


@dataclass
class ExpertsState:
    """What an experts module of a converted model carries, as its attribute `mxrl_state`."""

    operands: Operands
    held: dict[str, HeldWeight] = field(default_factory=dict)  # by parameter name, during a rollout
    shared: dict[str, SharedWeight] = field(default_factory=dict)  # likewise, inside shared_weights


def state_of(module: Experts) -> ExpertsState | None:
    return getattr(module, "mxrl_state", None)


def weight_names(module: Experts) -> tuple[str, str]:
    """The fused weight parameters: the first projection and the second."""
    return ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")


def is_known_experts(module: Experts) -> bool:
    """Whether transformers' decorator dispatches `module`, and its parameters are the ones that the decorator names."""
    flags = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "num_experts", "config", "_apply_gate")
    if not all(hasattr(module, flag) for flag in flags) or not hasattr(type(module).forward, "__wrapped__"):
        return False
    weights = set(weight_names(module))
    biases = {f"{name}_bias" for name in weights} if module.has_bias else set()
    own = dict(module.named_parameters(recurse=False))
    return set(own) == weights | biases and all(own[name].ndim == 3 for name in weights)


def contraction_dim(module: Experts) -> int:
    return -2 if module.is_transposed else -1


def matrices(module: Experts, name: str, weight_E: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The experts' own matrices, as views of the fused weight `name` (or of a tensor of its shape).

    Yields (canonical name below the module, view): "3.gate_proj.weight" and "3.up_proj.weight" [I, H],
    "3.down_proj.weight" [H, I]; for transposed experts the stored layout, "3.gate_up_proj" [H, 2I], "3.down_proj".
    """
    for e, weight in enumerate(weight_E.unbind(0)):
        if module.is_transposed:
            yield f"{e}.{name}", weight
        elif name == "gate_up_proj" and module.is_concatenated:
            gate, up = weight.chunk(2, dim=0)
            yield f"{e}.gate_proj.weight", gate
            yield f"{e}.up_proj.weight", up
        else:
            yield f"{e}.{name}.weight", weight


def quantize_weight(module: Experts, name: str, weight_E: Tensor, operands: Operands) -> Tensor:
    """Q of a fused weight [E, ...], each expert's matrices as if stored apart; same shape and dtype, no gradient."""
    dim = contraction_dim(module)
    if not operands.tensor_scaled:
        return quantize_operand(weight_E, operands.weight, dim)
    parts = [quantize_operand(weight, operands.weight, dim) for _, weight in matrices(module, name, weight_E)]
    return torch.cat(parts).view(weight_E.shape)


def _project(
    module: Experts, state: ExpertsState, name: str, x: Tensor, activation: Activation, where: Route, active: int
) -> Tensor:
    """One projection of every expert, [S, O]: of x [T, K] with `active` experts a token, or of sorted rows (0)."""
    operands, dtype = state.operands, activation.value.dtype
    weight: Tensor = getattr(module, name)
    bias_EO: Tensor | None = getattr(module, f"{name}_bias") if module.has_bias else None
    held = state.held.get(name)
    if held is not None:
        weight_q = held.get(dtype)
        if not torch.is_grad_enabled():  # decoding
            rows = activation.value[where.order_S // active] if active else activation.value
            bias_EO = None if bias_EO is None else bias_EO.to(dtype)
            weight_EKO = weight_q if module.is_transposed else weight_q.mT
            return grouped_mm(rows, weight_EKO, bias_EO, where.expert_S, where.ends_E)
    elif operands.weight is None and weight.dtype == dtype:
        weight_q = weight
    else:
        shared = None if torch.compiler.is_compiling() else state.shared.get(name)

        def quantize() -> Tensor:
            return quantize_weight(module, name, weight.detach().to(dtype), operands)

        weight_q = quantize() if shared is None else shared.get(weight, dtype, operands, quantize)
    return straight_through_experts(
        x,
        weight,
        bias_EO,
        activation,
        weight_q,
        where,
        active=active,
        transposed=module.is_transposed,
        operands=operands,
    )


def quantized_experts_forward(
    self: Experts, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The experts' forward pass as transformers calls it.

    hidden_states [T, H], top_k_index and top_k_weights [T, A]; returns [T, H] in hidden_states' dtype.
    """
    state = state_of(self)
    if state is None:  # the config is shared with a model that isn't converted, or this module is skipped
        return grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)
    y_TAH = expert_outputs(self, state, hidden_states, top_k_index)
    return (y_TAH * top_k_weights.unsqueeze(-1)).sum(dim=1).to(hidden_states.dtype)


def expert_outputs(module: Experts, state: ExpertsState, hidden_states: Tensor, top_k_index: Tensor) -> Tensor:
    """What each token's experts answer, before the gates: [T, A, H] in the compute dtype, for index [T, A]."""
    operands = state.operands
    tokens, active = top_k_index.shape
    dtype = compute_dtype(hidden_states)
    where = route(top_k_index, module.num_experts)
    first, second = weight_names(module)

    x_q = quantize_activation(hidden_states, operands, dtype)
    hidden = _project(module, state, first, hidden_states, x_q, where, active)
    inner_SI = module._apply_gate(hidden) if module.has_gate else module.act_fn(hidden)
    y_SH = _project(module, state, second, inner_SI, quantize_activation(inner_SI, operands, dtype), where, 0)

    # Back to token order, to be summed over the A experts of a token: no atomics, so the same bits every time.
    return Reorder.apply(y_SH, where.place_S, where.order_S).view(tokens, active, y_SH.shape[-1])


ALL_EXPERTS_FUNCTIONS.register(NAME, quantized_experts_forward)

"""What is measured on the policy now and then during a run: the weights' error, and the noise it puts on the logits.

weight_stats   ErrorStats of every quantized matrix, in the dtype that is quantized, summed over the model
logit_noise    σ_η: η = ℓ_quantized − ℓ_unquantized on fixed contexts, minus its mean over the vocabulary at each
               position (softmax doesn't see a shift); σ_η is the root mean square of what is left
distinct       how many different answers a group of samples of one prompt has ("blander rollouts" have fewer)
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mxrl.decompose import ErrorStats, error_stats
from mxrl.nn import Operands, quantized_layers
from mxrl.nn.experts import contraction_dim
from mxrl.nn.layers import QuantizedLayer, full_tensor
from mxrl.recipes import Recipe
from mxrl.rl.rollout import inference, positions, takes_positions


@torch.no_grad()
def weight_stats(model: nn.Module, *, dtype: torch.dtype | None = None) -> ErrorStats | None:
    """Quantization error of the model's converted weights; None where the recipe leaves weights as they are.

    dtype: the compute dtype, to which a weight is cast before it is quantized (None: the weight's own).
    """
    total: ErrorStats | None = None
    for layer in quantized_layers(model):
        recipe = layer.operands.weight
        if recipe is None:
            continue
        dim = -1 if layer.is_linear else contraction_dim(layer.module)
        for attribute in layer.weights:
            weight = full_tensor(layer.parameter(attribute))
            for _, matrix in layer.matrices(attribute, weight.to(dtype or weight.dtype)):
                stats = error_stats(matrix, recipe, dim=dim)
                total = stats if total is None else total + stats
    return total


@contextmanager
def unquantized(model: nn.Module) -> Iterator[None]:
    """Inside, every converted layer computes with its own unquantized operands, by the same code ("bf16" recipe)."""
    layers = list(quantized_layers(model))
    plain = Operands.of(Recipe("bf16"))
    for layer in layers:
        _set_operands(layer, plain)
    try:
        yield
    finally:
        for layer in layers:
            _set_operands(layer, layer.operands)


def _set_operands(layer: QuantizedLayer, operands: Operands) -> None:
    if layer.is_linear:
        layer.module.operands = operands
    else:
        layer.module.mxrl_state = replace(layer.module.mxrl_state, operands=operands)


def logit_noise(model: Any, ids: Tensor, mask: Tensor) -> float:
    """σ_η of a converted Hugging Face model on contexts ids [B, T] with attention mask [B, T]; NaN without a token.

    Call it outside `rollout_weights`, and under the autocast that the run computes in. Two forward passes.
    """
    inputs = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    if takes_positions(model):
        inputs["position_ids"] = positions(mask)
    with inference(model):
        noisy = model(**inputs).logits.float()
        with unquantized(model):
            clean = model(**inputs).logits.float()
    eta = (noisy - clean)[mask.bool()]
    eta = eta - eta.mean(-1, keepdim=True)
    return math.sqrt(float(eta.square().mean())) if eta.numel() else math.nan


def distinct(answers: Sequence[Hashable], group: int) -> float:
    """Mean number of different answers in each run of `group` consecutive ones; 1 = all the same, `group` = none."""
    if group < 1 or not answers or len(answers) % group:
        raise ValueError(f"distinct: {len(answers)} answers are no whole number of groups of {group}")
    starts = range(0, len(answers), group)
    return sum(len(set(answers[i : i + group])) for i in starts) / len(starts)

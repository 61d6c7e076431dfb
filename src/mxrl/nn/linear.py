"""The straight-through W4A4 linear layer: quantize-dequantize (QDQ) emulation of a 4-bit GEMM.

    y = Q(x) · Q(w)ᵀ + b       dx = dy · Q(w)       dw = dyᵀ · Q(x)       db = Σ dy

`Q` is piecewise constant, so its own derivative is zero almost everywhere; the straight-through estimator takes it to
be the identity. "The STE ignores the deadzone" (arXiv 2605.20402) can be read two ways, so there are two backward
passes: `backward="quantized"` (above) and `backward="master"` (`dx = dy · w`, `dw = dyᵀ · x`). In both the backward
GEMMs are *not* 4-bit, since `dy` is not quantized; `quantize_grad=True` quantizes it too, each operand then blocked
along the contraction axis of the GEMM that it enters (see operands.py).

A weight kept in float32 is cast to the compute dtype *before* it is quantized: training and rollout quantize the same
numbers. Accumulation is whatever the GEMM has (float32 for bf16 inputs). Shape letters: T tokens, K inputs, O outputs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mxrl.nn.operands import HeldWeight, Operands, compute_dtype, quantize_operand
from mxrl.recipes import Recipe


class StraightThroughLinear(torch.autograd.Function):
    """`F.linear(xq, wq, bias)` whose gradients go to `x` and `w`, as if quantization were the identity.

    An operand that isn't quantized is given as None (torch.compile refuses the same tensor twice).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w_OK: Tensor,
        bias_O: Tensor | None,
        xq: Tensor | None,
        wq_OK: Tensor | None,
        operands: Operands,
    ) -> Tensor:
        xq = x if xq is None else xq
        wq_OK = w_OK if wq_OK is None else wq_OK
        ctx.save_for_backward(*((x, w_OK) if operands.saves_master else (xq, wq_OK)))
        ctx.operands = operands
        return F.linear(xq, wq_OK, bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, w_OK = ctx.saved_tensors
        operands: Operands = ctx.operands
        needs_x, needs_w, needs_bias = ctx.needs_input_grad[:3]
        x_TK, dy_TO = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
        dx = dw_OK = db_O = None
        if needs_x:
            w_used = quantize_operand(w_OK, operands.weight, 0) if operands.requantizes else w_OK
            dx = (quantize_operand(dy_TO, operands.grad, 1) @ w_used).view(x.shape)
        if needs_w:
            x_used = quantize_operand(x_TK, operands.activation, 0) if operands.requantizes else x_TK
            dw_OK = quantize_operand(dy_TO, operands.grad, 0).t() @ x_used
        if needs_bias:
            db_O = dy_TO.sum(0)
        return dx, dw_OK, db_O, None, None, None


def quantized_linear(
    x: Tensor, weight_OK: Tensor, bias_O: Tensor | None, operands: Operands, held: HeldWeight | None = None
) -> Tensor:
    """Q(x) · Q(weight)ᵀ + bias with straight-through gradients.

    x [..., K] and weight [O, K] of any float dtypes; the result [..., O] is in the compute dtype (autocast's,
    else x's). Gradients come back in each argument's own dtype. `held` stands in for Q(weight) during a rollout.
    """
    dtype = compute_dtype(x)
    x = x.to(dtype)
    bias_O = None if bias_O is None else bias_O.to(dtype)
    xq = quantize_operand(x, operands.activation)
    if held is not None and not torch.is_grad_enabled():
        return F.linear(xq, held.get(dtype), bias_O)  # decoding: the master weight isn't even cast
    w_OK = weight_OK.to(dtype)
    wq_OK = quantize_operand(w_OK, operands.weight) if held is None else held.get(dtype)
    return straight_through(x, w_OK, bias_O, xq, wq_OK, operands)


def straight_through(
    x: Tensor, w_OK: Tensor, bias_O: Tensor | None, xq: Tensor, wq_OK: Tensor, operands: Operands
) -> Tensor:
    """xq · wqᵀ + bias, differentiated with respect to x, w and bias as `operands` says. All of one dtype."""
    xq_or_none, wq_or_none = None if xq is x else xq, None if wq_OK is w_OK else wq_OK
    return StraightThroughLinear.apply(x, w_OK, bias_O, xq_or_none, wq_or_none, operands)


class QuantizedLinear(nn.Linear):
    """An `nn.Linear` that computes with quantized operands; its parameters and state dict are `nn.Linear`'s.

    `mxrl.convert` turns a model's linear layers into this class in place. `operands` is None in a layer that a later
    `convert` skipped: it then computes as `nn.Linear` does.
    """

    operands: Operands | None
    held: HeldWeight | None = None  # set by rollout_weights; no buffer, so it is in no state dict

    def __init__(self, *args: Any, recipe: Recipe | str = "mxfp4", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.operands = Operands.of(Recipe.parse(recipe))

    @property
    def recipe(self) -> Recipe | None:
        return None if self.operands is None else self.operands.recipe

    def forward(self, input: Tensor) -> Tensor:
        if self.operands is None:
            return super().forward(input)
        return quantized_linear(input, self.weight, self.bias, self.operands, self.held)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe}"

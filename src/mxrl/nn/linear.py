"""The straight-through W4A4 linear layer: quantize-dequantize (QDQ) emulation of a 4-bit GEMM.

    y = Q(x) · Q(w)ᵀ + b       dx = dy · Q(w)       dw = dyᵀ · Q(x)       db = Σ dy

`Q` is piecewise constant, so its own derivative is zero almost everywhere; the straight-through estimator takes it to
be the identity. "The STE ignores the deadzone" (arXiv 2605.20402) can be read two ways, so there are two backward
passes: `backward="quantized"` (above) and `backward="master"` (`dx = dy · w`, `dw = dyᵀ · x`). In both the backward
GEMMs are *not* 4-bit, since `dy` is not quantized; `quantize_grad=True` quantizes it too, each operand then blocked
along the contraction axis of the GEMM that it enters (see operands.py).

A weight kept in float32 is cast to the compute dtype *before* it is quantized: training and rollout quantize the same
numbers. Accumulation is whatever the GEMM has (float32 for bf16 inputs). Shape letters: T tokens, K inputs, O outputs.

Computed once: Q(x) for the layers that share an input (activations.py), Q(w) for the micro-batches of a step
(`shared_weights`). What is kept for backward is Q(x), packed if the recipe says so, and Q(w).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mxrl.nn.activations import Activation, quantize_activation, unpack
from mxrl.nn.operands import HeldWeight, Operands, SharedWeight, compute_dtype, quantize_operand
from mxrl.recipes import Recipe


class StraightThroughLinear(torch.autograd.Function):
    """`F.linear(xq, wq, bias)` whose gradients go to `x` and `w`, as if quantization were the identity.

    x, w and bias may be wider than the compute dtype; their gradients are cast back. An operand that isn't quantized is
    given as None (torch.compile refuses the same tensor twice), a packed xq as its parts besides.
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
        dtype: torch.dtype,
        *packed: Tensor,
    ) -> Tensor:
        xq = x.to(dtype) if xq is None else xq
        wq_OK = w_OK.to(dtype) if wq_OK is None else wq_OK
        if operands.saves_master:
            ctx.save_for_backward(x.to(dtype), w_OK.to(dtype))
        else:
            ctx.save_for_backward(*(packed or (xq,)), wq_OK)
        ctx.operands, ctx.dtype, ctx.shape, ctx.packed = operands, dtype, x.shape, len(packed)
        ctx.dtypes = x.dtype, w_OK.dtype, None if bias_O is None else bias_O.dtype
        if not operands.forward:
            xq, wq_OK = x.to(dtype), w_OK.to(dtype)
        return F.linear(xq, wq_OK, None if bias_O is None else bias_O.to(dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        *x_parts, w_OK = ctx.saved_tensors
        operands: Operands = ctx.operands
        needs_x, needs_w, needs_bias = ctx.needs_input_grad[:3]
        x_dtype, w_dtype, bias_dtype = ctx.dtypes
        dy_TO = dy.reshape(-1, dy.shape[-1])
        dx = dw_OK = db_O = None
        if needs_x:
            w_used = quantize_operand(w_OK, operands.weight, 0) if operands.requantizes else w_OK
            dx = (quantize_operand(dy_TO, operands.grad, 1) @ w_used).view(ctx.shape).to(x_dtype)
        if needs_w:
            x = saved_activation(x_parts, ctx)
            x_TK = x.reshape(-1, x.shape[-1])
            x_used = quantize_operand(x_TK, operands.activation, 0) if operands.requantizes else x_TK
            dw_OK = (quantize_operand(dy_TO, operands.grad, 0).t() @ x_used).to(w_dtype)
        if needs_bias:
            db_O = dy_TO.sum(0).to(bias_dtype)
        return dx, dw_OK, db_O, *(None for _ in range(4 + ctx.packed))


def saved_activation(parts: list[Tensor], ctx: Any) -> Tensor:
    """The activation that a forward pass saved: itself, or dequantized from its packed parts."""
    return unpack(parts, ctx.operands.activation, ctx.shape, ctx.dtype) if ctx.packed else parts[0]


def quantized_linear(
    x: Tensor,
    weight_OK: Tensor,
    bias_O: Tensor | None,
    operands: Operands,
    held: HeldWeight | None = None,
    shared: SharedWeight | None = None,
) -> Tensor:
    """Q(x) · Q(weight)ᵀ + bias with straight-through gradients.

    x [..., K] and weight [O, K] of any float dtypes; the result [..., O] is in the compute dtype (autocast's,
    else x's). Gradients come back in each argument's own dtype. `held` stands in for Q(weight) during a rollout;
    `shared` keeps it for the other uses of the same weight.
    """
    dtype = compute_dtype(x)
    activation = quantize_activation(x, operands, dtype)
    if held is not None:
        wq_OK = held.get(dtype)
        if not torch.is_grad_enabled():  # decoding
            return F.linear(activation.value, wq_OK, None if bias_O is None else bias_O.to(dtype))
    elif operands.weight is None and weight_OK.dtype == dtype:
        wq_OK = weight_OK
    else:

        def quantize() -> Tensor:
            return quantize_operand(weight_OK.detach().to(dtype), operands.weight)

        wq_OK = quantize() if shared is None else shared.get(weight_OK, dtype, operands, quantize)
    return straight_through(x, weight_OK, bias_O, activation, wq_OK, operands, dtype)


def straight_through(
    x: Tensor,
    w_OK: Tensor,
    bias_O: Tensor | None,
    activation: Activation,
    wq_OK: Tensor,
    operands: Operands,
    dtype: torch.dtype,
) -> Tensor:
    """xq · wqᵀ + bias in `dtype`, differentiated with respect to x, w and bias as `operands` says."""
    xq = None if activation.value is x else activation.value
    wq_or_none = None if wq_OK is w_OK else wq_OK
    packed = activation.packed or ()
    return StraightThroughLinear.apply(x, w_OK, bias_O, xq, wq_or_none, operands, dtype, *packed)


class QuantizedLinear(nn.Linear):
    """An `nn.Linear` that computes with quantized operands; its parameters and state dict are `nn.Linear`'s.

    `mxrl.convert` turns a model's linear layers into this class in place. `operands` is None in a layer that a later
    `convert` skipped: it then computes as `nn.Linear` does.
    """

    operands: Operands | None
    held: HeldWeight | None = None  # set by rollout_weights; no buffer, so it is in no state dict
    shared: SharedWeight | None = None  # set by shared_weights; likewise

    def __init__(self, *args: Any, recipe: Recipe | str = "mxfp4", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.operands = Operands.of(Recipe.parse(recipe))

    @property
    def recipe(self) -> Recipe | None:
        return None if self.operands is None else self.operands.recipe

    def forward(self, input: Tensor) -> Tensor:
        if self.operands is None:
            return super().forward(input)
        shared = None if torch.compiler.is_compiling() else self.shared
        return quantized_linear(input, self.weight, self.bias, self.operands, self.held, shared)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe}"

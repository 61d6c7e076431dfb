"""Grouped GEMMs: all experts of one projection at once, straight-through as in linear.py, without asking the host.

Token-expert pairs are sorted by expert; how many each expert got stays on the device, as the ends of its rows.

    forward       y_SO   = x_SK · w_eᵀ          e = the row's expert, rows [ends[e-1], ends[e])
    grad_input    dx_SK  = dy_SO · w_e
    grad_weight   dw_EOK = dy_Sᵀ · x_S          over the rows of each expert; zeros for an idle one

One rule: `torch.nn.functional.grouped_mm` for bf16 with every size a multiple of 8 (16-byte strides, which it asks
for), one expert after another for everything else; that loop reads `ends` on the host. On CUDA grouped_mm is CUTLASS on
Hopper and Blackwell, without synchronisation (before, torch itself loops); on a CPU it gives the loop's bits. CUTLASS
sums in another order than cuBLAS: results agree to bf16 rounding. Biases are added to the rounded product there, and
before rounding in the loop. With `quantize_grad`, dw contracts over the tokens of one expert, so dy and x are quantized
one expert after another; that too reads `ends`.

T tokens, A experts a token, S = T · A pairs, E experts, K inputs, O outputs. Under torch.compile each GEMM is one
opaque operator.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mxrl.nn.activations import Activation
from mxrl.nn.linear import saved_activation
from mxrl.nn.operands import Operands, Quantizer, quantize_operand
from mxrl.recipes import Recipe


class Route(NamedTuple):
    """Which expert each row of S belongs to, and where it comes from. All int64 [S] but ends."""

    expert_S: Tensor  # sorted
    order_S: Tensor  # sorted row -> pair t·A + a
    place_S: Tensor  # pair -> sorted row
    ends_E: Tensor  # int32; expert e's rows end before it


def route(top_k_index: Tensor, num_experts: int) -> Route:
    """Sort the pairs of top_k_index [T, A] by expert, stably; no host synchronisation.

    Experts on another rank (expert parallelism) have index E and routing weight 0, as in transformers; they count as
    the last expert.
    """
    expert_S, order_S = top_k_index.reshape(-1).clamp(0, num_experts - 1).sort(stable=True)
    place_S = torch.empty_like(order_S).scatter_(0, order_S, torch.arange(order_S.shape[0], device=order_S.device))
    experts_E = torch.arange(num_experts, device=expert_S.device)
    ends_E = torch.searchsorted(expert_S, experts_E, right=True, out_int32=True)
    return Route(expert_S, order_S, place_S, ends_E)


class Reorder(torch.autograd.Function):
    """x[index] for a permutation `index` and its inverse: the gradient is a gather too, no scatter with atomics."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x[index]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return dy[inverse], None, None


# --- the GEMMs -------------------------------------------------------------------------------------------------------


def fits(dtype: torch.dtype, *sizes: int) -> bool:
    """Whether grouped_mm takes operands of this dtype whose rows and columns have these sizes."""
    return dtype == torch.bfloat16 and all(size % 8 == 0 for size in sizes)


def grouped_mm(x_SK: Tensor, w_EKO: Tensor, bias_EO: Tensor | None, expert_S: Tensor, ends_E: Tensor) -> Tensor:
    """x_SK · w_e [+ bias_e] for each row's expert: [S, O]. w_EKO may be a transposed view; all of one dtype."""
    operator = _grouped_mm_operator if torch.compiler.is_compiling() else _grouped_mm
    return operator(x_SK, w_EKO, bias_EO, expert_S, ends_E)


def grouped_outer(a_SM: Tensor, b_SN: Tensor, ends_E: Tensor) -> Tensor:
    """a_Sᵀ · b_S over the rows of each expert: [E, M, N], zeros for an expert without rows."""
    operator = _grouped_outer_operator if torch.compiler.is_compiling() else _grouped_outer
    return operator(a_SM, b_SN, ends_E)


def _grouped_mm(x_SK: Tensor, w_EKO: Tensor, bias_EO: Tensor | None, expert_S: Tensor, ends_E: Tensor) -> Tensor:
    if x_SK.shape[0] == 0:
        return x_SK.new_zeros(0, w_EKO.shape[-1])
    if fits(x_SK.dtype, *w_EKO.shape[1:]):
        y_SO = torch.nn.functional.grouped_mm(x_SK, w_EKO, offs=ends_E)
        return y_SO if bias_EO is None else y_SO.add_(bias_EO[expert_S])
    y_SO = x_SK.new_empty(x_SK.shape[0], w_EKO.shape[-1])
    for e, rows in _groups(ends_E):
        if bias_EO is None:
            torch.mm(x_SK[rows], w_EKO[e], out=y_SO[rows])
        else:
            torch.addmm(bias_EO[e], x_SK[rows], w_EKO[e], out=y_SO[rows])
    return y_SO


def _grouped_outer(a_SM: Tensor, b_SN: Tensor, ends_E: Tensor) -> Tensor:
    shape = (len(ends_E), a_SM.shape[1], b_SN.shape[1])
    if a_SM.shape[0] and fits(a_SM.dtype, *shape[1:]):
        return torch.nn.functional.grouped_mm(
            a_SM.t(), b_SN, offs=ends_E
        )  # CUTLASS sums nothing to 0, as tests hold it to
    out_EMN = a_SM.new_zeros(shape)
    for e, rows in _groups(ends_E):
        torch.mm(a_SM[rows].t(), b_SN[rows], out=out_EMN[e])
    return out_EMN


def _groups(ends_E: Tensor) -> list[tuple[int, slice]]:
    """(expert, its rows) of every expert that has some; waits for the device."""
    ends = ends_E.tolist()
    return [(e, slice(a, b)) for e, (a, b) in enumerate(zip([0, *ends], ends, strict=False)) if b > a]


def quantize_groups(x_SK: Tensor, recipe: Quantizer | None, dim: int, ends_E: Tensor) -> Tensor:
    """Q of each expert's rows by themselves, blocked along `dim`: along their tokens (0) or along K (1)."""
    if recipe is None:
        return x_SK
    if dim == 1 and recipe.base != "nvfp4":  # rows don't know of each other, unless a scale is the whole tensor's
        return quantize_operand(x_SK, recipe, dim)
    if torch.compiler.is_compiling():
        return _quantize_groups_operator(x_SK, str(recipe), dim, ends_E)
    return _quantize_groups(x_SK, recipe, dim, ends_E)


def _quantize_groups(x_SK: Tensor, recipe: Quantizer, dim: int, ends_E: Tensor) -> Tensor:
    out = torch.empty_like(x_SK, memory_format=torch.contiguous_format)
    for _, rows in _groups(ends_E):
        out[rows] = quantize_operand(x_SK[rows], recipe, dim)
    return out


# Operators for torch.compile. Their shapes follow from the arguments', whatever the experts got.


@torch.library.custom_op("mxrl::grouped_mm", mutates_args=())
def _grouped_mm_operator(x: Tensor, w: Tensor, bias: Tensor | None, expert: Tensor, ends: Tensor) -> Tensor:
    return _grouped_mm(x, w, bias, expert, ends)


@_grouped_mm_operator.register_fake
def _(x: Tensor, w: Tensor, bias: Tensor | None, expert: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[-1])


@torch.library.custom_op("mxrl::grouped_outer", mutates_args=())
def _grouped_outer_operator(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    return _grouped_outer(a, b, ends)


@_grouped_outer_operator.register_fake
def _(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    return a.new_empty(ends.shape[0], a.shape[1], b.shape[1])


@torch.library.custom_op("mxrl::quantize_groups", mutates_args=())
def _quantize_groups_operator(x: Tensor, recipe: str, dim: int, ends: Tensor) -> Tensor:
    return _quantize_groups(x, Recipe.parse(recipe), dim, ends)


@_quantize_groups_operator.register_fake
def _(x: Tensor, recipe: str, dim: int, ends: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


# --- straight-through ------------------------------------------------------------------------------------------------


class StraightThroughExperts(torch.autograd.Function):
    """`grouped_mm(xq, wq, bias)` whose gradients go to `x` and `w`: StraightThroughLinear for every expert.

    x [T, K] with active = A: the rows are gathered here, so that what is kept for backward is Q(x) of T tokens, not of
    S pairs. x [S, K] with active = 0: the rows are sorted already. w and wq as stored: [E, O, K], transposed [E, K, O].
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        bias_EO: Tensor | None,
        xq: Tensor | None,
        wq: Tensor | None,
        expert_S: Tensor,
        order_S: Tensor,
        place_S: Tensor,
        ends_E: Tensor,
        active: int,
        transposed: bool,
        operands: Operands,
        dtype: torch.dtype,
        *packed: Tensor,
    ) -> Tensor:
        xq = x.to(dtype) if xq is None else xq
        wq = w.to(dtype) if wq is None else wq
        routing = (expert_S, order_S, place_S, ends_E)
        if operands.saves_master:
            ctx.save_for_backward(*routing, w.to(dtype), x.to(dtype))
        else:
            ctx.save_for_backward(*routing, wq, *(packed or (xq,)))
        ctx.operands, ctx.dtype, ctx.shape, ctx.packed = operands, dtype, x.shape, len(packed)
        ctx.active, ctx.transposed = active, transposed
        ctx.dtypes = x.dtype, w.dtype, None if bias_EO is None else bias_EO.dtype
        if not operands.forward:
            xq, wq = x.to(dtype), w.to(dtype)
        rows = xq[order_S // active] if active else xq
        bias = None if bias_EO is None else bias_EO.to(dtype)
        return grouped_mm(rows, wq if transposed else wq.mT, bias, expert_S, ends_E)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_SO: Tensor) -> tuple[Tensor | None, ...]:
        expert_S, order_S, place_S, ends_E, w, *x_parts = ctx.saved_tensors
        operands: Operands = ctx.operands
        needs_x, needs_w, needs_bias = ctx.needs_input_grad[:3]
        x_dtype, w_dtype, bias_dtype = ctx.dtypes
        dy_SO = dy_SO.contiguous()
        dx = dw = db_EO = None
        if needs_x:
            w_used = _along_outputs(w, ctx.transposed, operands) if operands.requantizes else w
            dy_used = quantize_groups(dy_SO, operands.grad, 1, ends_E)
            dx = grouped_mm(dy_used, w_used.mT if ctx.transposed else w_used, None, expert_S, ends_E)
            if ctx.active:  # a token's pairs, in the order of its experts: the same sum every time
                dx = dx[place_S].view(-1, ctx.active, dx.shape[-1]).sum(1)
            dx = dx.to(x_dtype)
        if needs_w:
            x = saved_activation(x_parts, ctx)
            x_SK = x[order_S // ctx.active] if ctx.active else x
            x_SK = quantize_groups(x_SK, operands.activation if operands.requantizes else None, 0, ends_E)
            dy_used = quantize_groups(dy_SO, operands.grad, 0, ends_E)
            dw = grouped_outer(x_SK, dy_used, ends_E) if ctx.transposed else grouped_outer(dy_used, x_SK, ends_E)
            dw = dw.to(w_dtype)
        if needs_bias:  # Σ of each expert's rows, as a GEMM with ones (8: 16-byte strides)
            db_EO = grouped_outer(dy_SO, dy_SO.new_ones(dy_SO.shape[0], 8), ends_E)[..., 0].to(bias_dtype)
        return dx, dw, db_EO, *(None for _ in range(10 + ctx.packed))


def _along_outputs(w: Tensor, transposed: bool, operands: Operands) -> Tensor:
    """Q(w) blocked along O; NVFP4's scale is of each expert's stored matrix."""
    dim = -1 if transposed else -2
    if not operands.tensor_scaled:
        return quantize_operand(w, operands.weight, dim)
    return torch.stack([quantize_operand(w_e, operands.weight, dim) for w_e in w.unbind(0)])


def straight_through_experts(
    x: Tensor,
    w: Tensor,
    bias_EO: Tensor | None,
    activation: Activation,
    wq: Tensor,
    where: Route,
    *,
    active: int,
    transposed: bool,
    operands: Operands,
) -> Tensor:
    """One projection of all experts, [S, O] in the compute dtype, differentiated as `operands` says.

    activation and wq: x and w quantized, in the compute dtype; see StraightThroughExperts for the shapes.
    """
    xq = None if activation.value is x else activation.value
    dtype = activation.value.dtype
    wq_or_none = None if wq is w else wq
    return StraightThroughExperts.apply(
        x, w, bias_EO, xq, wq_or_none, *where, active, transposed, operands, dtype, *(activation.packed or ())
    )

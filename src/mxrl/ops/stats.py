"""The statistics of the decomposition, the torch reference: sums over a tensor's finite blocks, in fixed chunks.

    e = C(x) − x = e_scale + e_dz + e_grid       e_scale = C − Q*,  e_dz = (Q* − x)·1[D],  e_grid = (Q* − x)·1[not D]

Q and Q* are rounded once to float32 (float64 for float64 inputs), never to x's dtype; differences, products and sums
are float64. The order of the sums depends on the shape alone, not on the number of threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mxrl.ops.layout import fitted, row_chunks
from mxrl.ops.qdq import format_of, passes, to_blocks
from mxrl.recipes import Recipe
from mxrl.scaling import block_scale, divide, from_grid, to_grid

DELTA_BINS = 64  # of width 1/32 over [−1, 1): ceil fills [0, 1), floor and even reach below; the ends collect the rest


@dataclass(frozen=True)
class Chunk:
    """Some rows as blocks [R, B, n], in the arithmetic's dtype; columns from K on are padding."""

    x: Tensor
    quantized: Tensor
    ideal: Tensor
    mask: Tensor  # the deadzone D, bool
    maxima: Tensor  # [R, B]
    valid: Tensor  # [R, B] finite, and a real block (not the padding of a ragged macro-block)
    delta: Tensor | None  # [R, B] log2 of the effective scale over the ideal one
    clamped: Tensor | None  # [R, B]

    def components(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """e_scale, e_dz, e_grid and their sum, float64 [R, B, n]: x + the three is C(x) exactly."""
        x, quantized, ideal = self.x.double(), self.quantized.double(), self.ideal.double()
        rest = ideal - x
        deadzone = torch.where(self.mask, rest, 0.0)
        return quantized - ideal, deadzone, rest - deadzone, quantized - x


def chunks(
    x_ABK: Tensor, recipe: Recipe, foreign_ABK: Tensor | None, tensor_scale: Tensor | None
) -> Iterator[tuple[int, int, Chunk]]:
    """(first row, end row, chunk). recipe: gives Q, Q* and D; foreign: stands in for Q(x), then there is no delta."""
    fmt, recipe = format_of(recipe), fitted(recipe, x_ABK.shape[-1])
    largest = torch.finfo(x_ABK.dtype).max
    others = row_chunks(foreign_ABK) if foreign_ABK is not None else None
    for begin, end, rows in row_chunks(x_ABK):
        x = to_blocks(rows, recipe)
        maxima = x.abs().amax(-1)
        valid = torch.isfinite(maxima)
        valid[:, -(-rows.shape[1] // fmt.block) :] = False
        ideal_scale = block_scale(maxima, fmt, "ideal")
        grid = to_grid(x, ideal_scale, fmt, "ideal", torch.finfo(x.dtype).max)
        ideal = from_grid(grid, ideal_scale.value, fmt, "ideal")
        mask = x.abs().double() * fmt.deadzone_ratio < maxima.unsqueeze(-1)  # exact: 24·x fits float64
        mask &= valid.unsqueeze(-1)  # beside an Inf, every finite element would count as small
        if others is not None:
            yield begin, end, Chunk(x, to_blocks(next(others)[2], recipe), ideal, mask, maxima, valid, None, None)
            continue
        done, quantized = passes(x, recipe, largest, tensor_scale)
        effective = done[0].scale.value.double()
        if recipe.rule == "ideal":
            effective = divide(effective, fmt.q_max)
        if done[0].mantissa is not None:
            p = (256 + done[0].mantissa.double()) / 256
            effective = effective / p.repeat_interleave(recipe.macro // fmt.block, -1)
        delta = torch.log2(effective / divide(maxima.double(), fmt.q_max))
        yield begin, end, Chunk(x, quantized, ideal, mask, maxima, valid, delta, done[0].scale.clamped)


def stats(x_ABK: Tensor, recipe: Recipe, foreign_ABK: Tensor | None, tensor_scale: Tensor | None) -> dict[str, Any]:
    """The fields of `mxrl.ErrorStats`, by name. foreign_ABK: float32 (float64 for float64), or None for Q(x)."""
    total: dict[str, Any] = {}
    for _, _, chunk in chunks(x_ABK, recipe, foreign_ABK, tensor_scale):
        total = add(total, _sums(chunk, x_ABK.shape[-1]))
    return total


def add(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """Two sets of sums as one; {} is zero."""
    if not a or not b:
        return a or b
    hist = tuple(x + y for x, y in zip(a["delta_hist"], b["delta_hist"], strict=True))
    return {name: a[name] + b[name] for name in a if name != "delta_hist"} | {"delta_hist": hist}


def _total(x: Tensor) -> float:
    """A float64 sum that does not depend on the number of threads: blocks first, each by one thread, then in order."""
    return float(x.sum(-1).flatten().cpu().numpy().sum()) if x.dim() > 1 else float(x.cpu().numpy().sum())


def _sums(c: Chunk, columns: int) -> dict[str, Any]:
    valid = c.valid.unsqueeze(-1)
    real = torch.arange(c.x.shape[1] * c.x.shape[2], device=c.x.device).view(c.x.shape[1:]) < columns
    counted = valid & real
    scale, deadzone, grid, error = (torch.where(counted, part, 0.0) for part in c.components())
    x = torch.where(counted, c.x, 0.0).double()
    q = torch.where(counted, c.quantized, 0.0).double()
    inside = c.mask & counted
    square = error * error
    square_inside = torch.where(inside, square, 0.0)
    zero_block = (c.maxima == 0) & c.valid
    sums: dict[str, Any] = dict(
        numel=int(counted.sum()),
        sq_norm=_total(x * x),
        dot_q_x=_total(q * x),
        sq_error=_total(square),
        sq_scale=_total(scale * scale),
        sq_deadzone=_total(deadzone * deadzone),
        sq_grid=_total(grid * grid),
        dot_scale_grid=_total(scale * grid),
        dot_scale_deadzone=_total(scale * deadzone),
        dot_deadzone_grid=_total(deadzone * grid),
        deadzone_count=int(inside.sum()),
        exact_zero_count=int(((c.x == 0) & counted).sum()),
        zero_blocks=int(zero_block.sum()),
        nonfinite_blocks=int((~torch.isfinite(c.maxima)).sum()),
        sq_error_deadzone=_total(square_inside),
        sq_error_elsewhere=_total(square - square_inside),
        deadzone_nonzero_count=int((inside & (q != 0)).sum()),
        clamped_blocks=0,
        delta_count=0,
        delta_sum=0.0,
        delta_sq_sum=0.0,
        gamma_sum=0.0,
        delta_hist=(0,) * DELTA_BINS,
    )
    if c.delta is not None and c.clamped is not None:
        clamped = c.clamped & c.valid
        used = c.valid & ~zero_block & ~clamped
        delta = torch.where(used, c.delta, 0.0)
        bins = ((delta + 1) * (DELTA_BINS / 2)).long().clamp(0, DELTA_BINS - 1)[used]
        sums |= dict(
            clamped_blocks=int(clamped.sum()),
            delta_count=int(used.sum()),
            delta_sum=_total(delta),
            delta_sq_sum=_total(delta * delta),
            gamma_sum=_total(torch.where(used, torch.exp2(delta), 0.0)),
            delta_hist=tuple(torch.bincount(bins.cpu(), minlength=DELTA_BINS).tolist()),
        )
    return sums

"""Statistics of bf16 tensors under mxfp4:ceil and e8m{k}: the same sums as `stats_triton`, cheaper.

Where the scale is at least the ideal one, D goes to zero, so every sum is over N = not D, or Σ_D x². For bf16, N's
numbers are so short that sums of a block of 32 are *exact* in float32 (x in N is a multiple of s·2^-10, |e| <= s):

    Σ g²   g·x   in units of s²/4, s·2^-11: 13 and 22 bits         Q(x) = s·g; from them, in float64 and exactly,
    Σ e²   e = s·g - x in s·2^-10: 24 bits for 16 elements         Σ Q·x = s·Σ g·x,  Σ x² = Σ e² + 2s·Σ g·x - s²·Σ g²

and float64 products are left for r = Q* - x and e_scale = e - r alone (24-bit numbers), and for Σ_D x². e, r, e - r are
exact in float32: neighbours on two grids are within a factor of two (Sterbenz; the ends are equal, and rounding keeps
order). Q*, g*·m/6 rounded once, is fl(g*·fl(m/6)) where m has 8 bits; products with 1/s and 6/m are snapped to 2^-16,
which decides every tie of 8-bit numbers. D's count rides in Σ g²'s low bits: each element of D adds 2^-12.

delta depends on the maximum's 7 mantissa bits alone: they are counted, and the logarithms taken once, on the host.

All of it wants 2^-60 <= m < 2^60 (squares fit float32) or m = 0. A tile that holds another block (NaN, Inf,
subnormals) is flagged, and `stats_triton`'s kernel takes it. One thread holds a whole block, 8 elements at a time.
An element costs about 46 instructions (3.5 conversions to float64 and 4.8 of its arithmetic among them; the general
kernel's 56 to 65), where bf16 at full bandwidth has time for 14: that, not memory, is what bounds this kernel.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from mxrl.formats import MXFP4
from mxrl.ops.grids_triton import larger
from mxrl.ops.passes_triton import as_bits, as_float, widen
from mxrl.ops.stats import DELTA_BINS
from mxrl.recipes import Recipe
from mxrl.scaling import block_scale, divide

BLOCKS = 128  # of a tile: one a thread
PROGRAMS = 2112  # like stats_triton's, a constant of the result's last bits
MANTISSAS = 128
OPTIONS: dict[str, Any] = {"num_warps": BLOCKS // 32}  # of the launch; `maxnreg` trades registers for occupancy


def serves(x_ABK: Tensor, recipe: Recipe, mode: str) -> bool:
    """Whether this kernel applies: bf16, contiguous along K, an uncorrected scale that is never below the ideal one."""
    plain = recipe.base == "mxfp4" and not recipe.mbs and not recipe.of
    above = recipe.rule == "ceil" or recipe.rule.startswith("e8m")
    return x_ABK.dtype == torch.bfloat16 and plain and above and mode != "columns" and x_ABK.stride(2) == 1


def tiles(x_ABK: Tensor) -> int:
    a, b, k = x_ABK.shape
    return -(-(a * b * -(-k // MXFP4.block)) // BLOCKS)


@triton.jit
def _round(x, inverse, POWER: tl.constexpr):
    """RNE of x · inverse to E2M1 (magnitudes). 2^22 times a number has its last place at the grid's spacing there."""
    if POWER:  # the product is exact
        big = tl.maximum(x * (inverse * 4194304.0), 4194304.0)
        return tl.fma(x, inverse, big) - big
    near = tl.fma(x, inverse, 192.0) - 192.0  # multiples of 2^-16
    big = tl.maximum(near * 4194304.0, 4194304.0)
    return (near + big) - big


@triton.jit
def _add(
    x,
    s,
    inverse,
    sixth,
    sixth_inverse,
    edge,
    scales,
    cross,
    grids,
    deads,
    errors,
    dots,
    squares,
    POWER: tl.constexpr,
):
    """Adds a few elements x [N, 4] of every block to its sums, [N, 4]."""
    g = _round(x, inverse, POWER)
    ideal = _round(x, sixth_inverse, False)
    outside = x >= edge
    kept = tl.where(outside, x, 0.0)
    error = tl.fma(g, s, -kept)
    rest = ideal * sixth - kept  # Q* - x
    by_scale = (error - rest).to(tl.float64)
    dead = (x - kept).to(tl.float64)
    errors = tl.fma(error, error, errors)
    dots = tl.fma(g, kept, dots)
    counted = tl.where(outside, g, 0.015625)  # 2^-6; g is 0 in D
    squares = tl.fma(counted, counted, squares)
    rest = rest.to(tl.float64)
    scales = tl.fma(by_scale, by_scale, scales)
    cross = tl.fma(by_scale, rest, cross)
    grids = tl.fma(rest, rest, grids)
    deads = tl.fma(dead, dead, deads)
    return scales, cross, grids, deads, errors, dots, squares


@triton.jit
def _add_8(
    x,
    s,
    inverse,
    sixth,
    sixth_inverse,
    edge,
    scales,
    cross,
    grids,
    deads,
    errors,
    dots,
    squares,
    POWER: tl.constexpr,
):
    """x [N, 8] in two halves: 8 elements are one load, but 8-wide float64 sums would be too many registers."""
    even, odd = tl.split(tl.reshape(x, [x.shape[0], 4, 2]))
    scales, cross, grids, deads, errors, dots, squares = _add(
        even, s, inverse, sixth, sixth_inverse, edge, scales, cross, grids, deads, errors, dots, squares, POWER
    )
    return _add(odd, s, inverse, sixth, sixth_inverse, edge, scales, cross, grids, deads, errors, dots, squares, POWER)


@triton.jit
def _load(pointer, start, column, valid, K, at, EDGE: tl.constexpr):
    """|x| of elements at ... at + 7 of every block, [N, 8]; EDGE as in `components_triton.load_piece`."""
    inside = tl.arange(0, 8)[None, :] + at
    mask = valid[:, None] & (inside >= 0)
    if EDGE == "eighths":
        mask = (valid & (column + at < K))[:, None] & (inside >= 0)
    elif EDGE == "any":
        mask = mask & (column[:, None] + inside < K)
    return tl.abs(widen(tl.load(pointer + (start[:, None] + inside), mask=mask, other=0.0)))


@triton.jit(do_not_specialize=["count", "tiles", "programs"])
def _fast_kernel(
    x, sums, words, flags, count, B, K, x_a, x_b, tiles, programs,
    MANTISSA: tl.constexpr, FLAT: tl.constexpr, EDGE: tl.constexpr, WIDTH: tl.constexpr, FLOATS: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    scales = tl.zeros([N, 4], tl.float64)
    cross = tl.zeros([N, 4], tl.float64)
    grids = tl.zeros([N, 4], tl.float64)
    deads = tl.zeros([N, 4], tl.float64)
    norm = tl.zeros([N], tl.float64)
    dot = tl.zeros([N], tl.float64)
    total_error = tl.zeros([N], tl.float64)
    n_elements = tl.zeros([N], tl.int32)
    n_inside = tl.zeros([N], tl.int32)
    n_zero = tl.zeros([N], tl.int32)
    n_zero_block = tl.zeros([N], tl.int32)
    POWER: tl.constexpr = MANTISSA == 0
    for tile in range(program, tiles, programs):
        index = (tl.full([], 0, tl.int64) + tile) * N + tl.arange(0, N)
        valid = index < count
        if FLAT:
            column = index * 32
            start = column
            real = tl.where(valid, 32, 0)
        else:
            units = tl.cdiv(K, 32)
            row = index // units
            column = (index - row * units) * 32
            start = row // B * x_a + row % B * x_b + column
            if EDGE == "eighths":
                start = tl.multiple_of(start, 8)
            real = tl.where(valid, tl.minimum(K - column, 32), 0).to(tl.int32)
        x0 = _load(x, start, column, valid, K, 0, EDGE)
        x1 = _load(x, start, column, valid, K, 8, EDGE)
        x2 = _load(x, start, column, valid, K, 16, EDGE)
        x3 = _load(x, start, column, valid, K, 24, EDGE)
        m = tl.max(as_bits(larger(larger(x0, x1), larger(x2, x3))), axis=1)
        least = tl.min(tl.minimum(tl.minimum(x0, x1), tl.minimum(x2, x3)), axis=1)
        zero = m == 0
        plain = zero | ((m >= 0x21800000) & (m < 0x5D800000))  # 2^-60, 2^60
        kind = tl.max(tl.where(plain, tl.where(least == 0.0, 1, 0), 2), axis=0)
        tl.store(flags + tile, (kind == 2).to(tl.int8))
        if kind < 2:
            m = tl.where(zero, 0x3F800000, m)
            maximum = as_float(m)
            sixth = maximum.to(tl.float64) / 6.0
            if POWER:
                exponent = (((m + 0x3FFFFF) >> 23) - 2) << 23
                s = as_float(exponent)
                inverse = as_float(0x7F000000 - exponent)
            else:  # the mantissa of m / 6 rounded up to k bits
                step: tl.constexpr = 1 << (52 - MANTISSA)
                up = (sixth.to(tl.int64, bitcast=True) + (step - 1)) & -step
                s = up.to(tl.float64, bitcast=True).to(tl.float32)
                inverse = tl.div_rn(tl.full([N], 1.0, tl.float32), s)
            sixth_high = sixth.to(tl.float32)
            sixth_inverse = tl.div_rn(tl.full([N], 6.0, tl.float32), maximum)
            edge = (sixth * 0.25).to(tl.float32)  # the least float32 that is not below m / 24
            below = edge.to(tl.float64) * 24.0 < maximum.to(tl.float64)
            edge = as_float(as_bits(edge) + below.to(tl.int32))
            s_, i_, q_, e_ = s[:, None], inverse[:, None], sixth_inverse[:, None], edge[:, None]
            h_ = sixth_high[:, None]
            error = tl.zeros([N], tl.float64)
            dots = tl.zeros([N, 4], tl.float32)
            squares = tl.zeros([N, 4], tl.float32)
            for piece in range(0, 32, 8):  # read again, from L1: a loop holds the registers of 8 elements, not 32
                x8 = _load(x, start, column, valid, K, piece, EDGE)
                if kind == 1:
                    n_zero += tl.sum((x8 == 0.0).to(tl.int32), axis=1)
                errors = tl.zeros([N, 4], tl.float32)
                scales, cross, grids, deads, errors, dots, squares = _add_8(
                    x8, s_, i_, h_, q_, e_, scales, cross, grids, deads, errors, dots, squares, POWER
                )
                error += tl.sum(errors, axis=1).to(tl.float64)
            square = tl.sum(squares, axis=1)
            whole = tl.floor(square * 4.0) * 0.25
            wide = s.to(tl.float64)
            quantized_x = wide * tl.sum(dots, axis=1).to(tl.float64)
            total_error += error
            dot += quantized_x
            norm += error + 2.0 * quantized_x - wide * wide * whole.to(tl.float64)
            n_elements += real
            n_inside += tl.where(zero, 0, ((square - whole) * 4096.0).to(tl.int32) - (32 - real))
            n_zero_block += (zero & (real > 0)).to(tl.int32)
            if kind == 1:
                n_zero -= 32 - real
            place = words + program * WIDTH + (WIDTH - 128) + ((m >> 16) & 127)
            tl.atomic_add(place, tl.full([N], 1, tl.int64), mask=(zero == 0) & valid, sem="relaxed")
    row = sums + program * WIDTH
    dead = tl.sum(tl.sum(deads, axis=1), axis=0)
    error = tl.sum(total_error, axis=0)
    tl.store(row, tl.sum(norm, axis=0) + dead)
    tl.store(row + 1, tl.sum(dot, axis=0))
    tl.store(row + 2, dead)
    tl.store(row + 3, error)
    tl.store(row + 4, tl.sum(tl.sum(scales, axis=1), axis=0))
    tl.store(row + 5, dead)
    tl.store(row + 6, tl.sum(tl.sum(grids, axis=1), axis=0))
    tl.store(row + 7, tl.sum(tl.sum(cross, axis=1), axis=0))
    row = words + program * WIDTH + FLOATS
    tl.store(row, tl.sum(n_elements.to(tl.int64), axis=0))
    tl.store(row + 1, tl.sum(n_inside.to(tl.int64), axis=0))
    tl.store(row + 2, tl.sum(n_zero.to(tl.int64), axis=0))
    tl.store(row + 3, tl.sum(n_zero_block.to(tl.int64), axis=0))


def launch(x_ABK: Tensor, recipe: Recipe, sums: Tensor, words: Tensor, floats: int) -> Tensor:
    """Fill the rows sums = words (one a program, columns as in `stats_triton`); returns flags, int8, one a tile."""
    a, b, k = x_ABK.shape
    flags = torch.empty(tiles(x_ABK), dtype=torch.int8, device=x_ABK.device)
    flat = x_ABK.is_contiguous() and k % MXFP4.block == 0
    eighths = k % 8 == x_ABK.stride(0) % 8 == x_ABK.stride(1) % 8 == x_ABK.data_ptr() % 16 == 0
    _fast_kernel[(len(words),)](
        x_ABK, sums, words, flags, a * b * -(-k // MXFP4.block), b, k, x_ABK.stride(0), x_ABK.stride(1), len(flags),
        len(words), MANTISSA=int(recipe.rule[3:]) if recipe.rule.startswith("e8m") else 0, FLAT=flat,
        EDGE="whole" if flat else "eighths" if eighths else "any", WIDTH=words.shape[1], FLOATS=floats, N=BLOCKS,
        enable_fp_fusion=False, **OPTIONS,
    )  # fmt: skip
    return flags


@functools.lru_cache(maxsize=64)
def _delta(*rules: str) -> tuple[np.ndarray, np.ndarray]:
    """Of blocks whose maximum has mantissa 1 + i/128: delta, delta², 2^delta [rules, 3, 128], and its bin [rules, 128].

    Bins of the n-th rule begin at n · DELTA_BINS.
    """
    m = 1 + torch.arange(MANTISSAS, dtype=torch.float64) / MANTISSAS
    scales = [block_scale(m.float(), MXFP4, rule).value.double() for rule in rules]
    delta = torch.log2(torch.stack(scales) / divide(m, MXFP4.q_max))
    bins = ((delta + 1) * (DELTA_BINS / 2)).long().clamp(0, DELTA_BINS - 1)
    bins += DELTA_BINS * torch.arange(len(rules)).unsqueeze(1)
    return torch.stack([delta, delta * delta, torch.exp2(delta)], dim=1).numpy(), bins.numpy()


def deltas(counts: np.ndarray, recipes: Sequence[Recipe]) -> tuple[np.ndarray, ...]:
    """Blocks by mantissa, int64 [R, 128] -> delta_count [R], its sum, sq_sum and gamma_sum [R, 3], hist [R, bins]."""
    powers, bins = _delta(*(recipe.rule for recipe in recipes))
    hist = np.bincount(bins.ravel(), counts.ravel(), bins.shape[0] * DELTA_BINS)  # float64: exact up to 2^53
    return counts.sum(1), (counts[:, None] * powers).sum(2), hist.astype(np.int64).reshape(-1, DELTA_BINS)

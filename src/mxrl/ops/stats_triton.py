"""The decomposition's statistics on the GPU: x is read once, and only sums are written.

    e = C(x) − x = e_scale + e_dz + e_grid       per element, from float32 Q and Q*: differences, products, sums float64

A fixed number of programs walk the tiles; each keeps its sums in registers, in the order of its own tiles, and writes
one row of `sums`; a second launch adds the rows. So the order of every sum depends on the shape alone: equal bit for
bit from run to run and at any occupancy, and to 1e-12 relative with the reference. Counts are exact.

    sums [programs, WIDTH], 8-byte words:  FLOATS float64 | COUNTS int64 | delta's histogram | stats_fast_triton's own

Magnitudes as in `passes_triton`: x is taken as positive and Q(x) flipped with it, which leaves every product as it is.
In D, Q* is 0, so e_dz is -x. Poisoned blocks are counted, then taken as zeros, which add nothing (a macro-block ignores
them as it ignores zeros). Plain ceil and e8m{k} of bf16 take the shorter way of `stats_fast_triton`; the tiles that it
leaves out come back here.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from mxrl.ops import stats_fast_triton as fast
from mxrl.ops.components_triton import (
    add_tile,
    deadzone_edge,
    ideal_scale,
    load_piece,
    log2,
    macro_mantissa,
    one_pass,
)
from mxrl.ops.grids_triton import is_power_of_two
from mxrl.ops.pack_triton import cut
from mxrl.ops.passes_triton import (
    INF_BITS,
    INTERPRETED,
    SIGN,
    as_bits,
    as_float,
    block_amax,
    mbs_factors,
    quantize_tile,
    widen,
    with_sign,
)
from mxrl.ops.qdq_triton import Config, unsupported
from mxrl.ops.stats import DELTA_BINS
from mxrl.ops.tiles_triton import Tiling, load_tile, locate
from mxrl.recipes import Recipe

__all__ = ["CONFIGS", "PROGRAMS", "fields", "launch", "stats", "unsupported"]

CONFIGS = {
    "plain": Config(4096, 4),
    "mbs": Config(4096, 4),
    "search": Config(4096, 8, owned=True),
    "columns": Config(4096, 4),
    "nvfp4": Config(2048, 4),
}
PROGRAMS = 1056  # a constant of the result's last bits: sums are taken in this many parts
LEFT_OVER = 264  # programs for what stats_fast_triton leaves, mostly nothing

FLOATS = (
    "sq_norm", "dot_q_x", "sq_error_deadzone", "sq_error_elsewhere", "sq_scale", "sq_deadzone", "sq_grid",
    "dot_scale_grid", "dot_scale_deadzone", "delta_sum", "delta_sq_sum", "gamma_sum",
)  # fmt: skip
COUNTS = (
    "numel", "deadzone_count", "exact_zero_count", "zero_blocks", "nonfinite_blocks", "deadzone_nonzero_count",
    "clamped_blocks", "delta_count",
)  # fmt: skip
COUNTS_AT = 16  # 12 are used
HIST = COUNTS_AT + len(COUNTS)
WIDTH = 224  # HIST + DELTA_BINS + fast.MANTISSAS, and to a multiple of 16

_HIST = tl.constexpr(HIST)
_FLOATS = tl.constexpr(COUNTS_AT)
_WIDTH = tl.constexpr(WIDTH)


@triton.jit
def _any(flags, begin, end):
    """Whether a flag in [begin, end) is set."""
    found = 0
    for at in range(begin, end, 128):
        index = at + tl.arange(0, 128)
        found = tl.maximum(found, tl.max(tl.load(flags + index, mask=index < end, other=0).to(tl.int32), axis=0))
    return found != 0


@triton.jit(do_not_specialize=["count", "tiles", "programs"])
def _stats_kernel(
    x, foreign, tensor_scale, sums, words, flags, alpha, count, B, K, x_a, x_b, x_k, f_a, f_b, f_k, tiles, programs,
    RULE: tl.constexpr, MBS: tl.constexpr, OF: tl.constexpr, G: tl.constexpr, N: tl.constexpr, LARGEST: tl.constexpr,
    NARROW: tl.constexpr, FOREIGN: tl.constexpr, ORTHOGONAL: tl.constexpr, FLAGGED: tl.constexpr, MODE: tl.constexpr,
    MASK: tl.constexpr, M: tl.constexpr, OWNED: tl.constexpr, PIECES: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """sums, words: the same rows as float64 and as int64. FLAGGED: blocks a flag (tiles without one are left), or 0."""
    program = tl.program_id(0)
    T: tl.constexpr = M * G
    W: tl.constexpr = 4 if FOREIGN or EDGE == "strided" else 128 // x.dtype.element_ty.primitive_bitwidth
    WIDE: tl.constexpr = W // 2 if PIECES else N // 2
    R: tl.constexpr = T if PIECES else M  # block scalars are [R, C]: a block a row under PIECES
    C: tl.constexpr = 1 if PIECES else G
    norm = tl.zeros([T, WIDE], tl.float64)
    dot = tl.zeros([T, WIDE], tl.float64)
    error = tl.zeros([T, WIDE], tl.float64)
    scales = tl.zeros([T, WIDE], tl.float64)
    cross = tl.zeros([T, WIDE], tl.float64)
    grids = tl.zeros([T, WIDE], tl.float64)
    deads = tl.zeros([T, WIDE], tl.float64)
    error_dead = tl.zeros([T, WIDE], tl.float64)
    scale_dead = tl.zeros([T, WIDE], tl.float64)
    dot_dead = tl.zeros([T, WIDE], tl.float64)
    delta_sum = tl.zeros([R, C], tl.float64)
    delta_square = tl.zeros([R, C], tl.float64)
    gamma = tl.zeros([R, C], tl.float64)
    n_elements = tl.zeros([R, C], tl.int32)
    n_inside = tl.zeros([R, C], tl.int32)
    n_zero = tl.zeros([R, C], tl.int32)
    n_zero_block = tl.zeros([R, C], tl.int32)
    n_bad = tl.zeros([R, C], tl.int32)
    n_inside_kept = tl.zeros([R, C], tl.int32)
    n_clamped = tl.zeros([R, C], tl.int32)
    n_delta = tl.zeros([R, C], tl.int32)
    e4m3: tl.constexpr = RULE == "mxfp8"
    tensor = 0.0
    if not FOREIGN and (RULE == "nvfp4" or RULE == "4over6"):
        tensor = tl.load(tensor_scale)
    begin = program
    end = tiles
    step = programs
    if FLAGGED > 0:  # a run of tiles each, left at one look where none is flagged
        ratio: tl.constexpr = FLAGGED // M
        run = tl.cdiv(tl.cdiv(tiles, ratio), programs)
        begin = program * run * ratio
        end = tl.minimum(begin + run * ratio, tiles)
        step = 1
        if not _any(flags, program * run, tl.minimum((program + 1) * run, tl.cdiv(tiles, ratio))):
            return  # its row is zeros already
    for tile in range(begin, end, step):
        wanted = 1
        if FLAGGED > 0:
            wanted = tl.load(flags + tile // (FLAGGED // M)).to(tl.int32)
        if wanted != 0:
            a, b, column, valid = locate(tl.full([], 0, tl.int32) + tile, count, B, K, MODE, M, G * N)
            start = a * x_a + b * x_b + column * x_k
            at = a * f_a + b * f_b + column * f_k
            if PIECES and G > 1:
                block = tl.arange(0, G)[None, :] * N
                start = tl.reshape(start[:, None] + block * x_k, [T])
                at = tl.reshape(at[:, None] + block * f_k, [T])
                column = tl.reshape(column[:, None] + block, [T])
                valid = tl.reshape(valid[:, None] & (block >= 0), [T])
            if EDGE == "aligned" or EDGE == "eighths":
                start, at = tl.multiple_of(start, 8), tl.multiple_of(at, 8)
            if PIECES:
                m = tl.zeros([T, 1], tl.int32)
                for piece in range(0, N, W):
                    m = tl.maximum(m, block_amax(widen(load_piece(x, start, column, valid, K, x_k, piece, W, EDGE))))
            else:
                loaded = widen(load_tile(x, start, column, valid, K, x_k, G, N, MASK, OWNED))
                m = block_amax(loaded)
            bad = m >= INF_BITS
            m = tl.where(bad, 0, m)
            first = tl.arange(0, C)[None, :] * N
            real = tl.where(valid[:, None] & (first >= 0), N, 0)  # elements of a block that exist
            if MASK == "all":
                real = tl.where(valid[:, None], tl.minimum(tl.maximum(K - column[:, None] - first, 0), N), 0)
            real = real.to(tl.int32)
            padding = N - real
            zero = m == 0
            inverse, sixth = ideal_scale(m, e4m3)
            edge = deadzone_edge(m, sixth, e4m3)
            if not PIECES:
                sign = as_bits(loaded) & SIGN
                magnitude = tl.where(bad[:, :, None], 0.0, tl.abs(loaded))
            if not FOREIGN:
                if PIECES:
                    k = macro_mantissa(m, MBS, G)
                    whole = one_pass(as_float(m)[:, :, None], m, k, tensor, RULE, MBS, LARGEST, NARROW)
                    scale, clamped = whole[1], whole[2]
                    m2, k2 = m, k
                    if OF > 0:
                        m2 = tl.zeros([T, 1], tl.int32)
                        for piece in range(0, N, W):
                            loaded = widen(load_piece(x, start, column, valid, K, x_k, piece, W, EDGE))
                            magnitude = tl.where(bad[:, :, None], 0.0, tl.abs(loaded))
                            q = one_pass(magnitude, m, k, tensor, RULE, MBS, LARGEST, NARROW)[0]
                            m2 = tl.maximum(m2, block_amax(magnitude - q))
                        k2 = macro_mantissa(m2, MBS, G)
                else:
                    q, _, scale, _, clamped, k, _, _, _, _, _ = quantize_tile(
                        magnitude, tensor, alpha, RULE, MBS, OF, LARGEST, NARROW, OWNED > 0
                    )
                # delta: the effective scale over the ideal one, m / q_max
                rho = scale.to(tl.float64)
                if RULE == "ideal":
                    rho = rho / 6.0
                if MBS != "":
                    p, _ = mbs_factors(k)
                    rho = rho / p.to(tl.float64)[:, None]
                clamped = clamped & (real > 0) & (bad == 0)
                used = (zero == 0) & (clamped == 0) & (real > 0)
                if is_power_of_two(RULE) and MBS == "":
                    rho = rho * inverse
                else:  # a scale that equals the ideal one must give 1 here too
                    rho = rho / tl.where(zero, 1.0, sixth)
                rho = tl.where(used, rho, 1.0)
                delta = tl.where(rho > 0.0, log2(tl.where(rho > 0.0, rho, 1.0)), float("-inf"))
                delta_sum += delta
                delta_square += delta * delta
                gamma += tl.where(used, rho, 0.0)
                n_clamped += clamped.to(tl.int32)
                n_delta += used.to(tl.int32)
                bins = tl.minimum(tl.maximum((delta + 1.0) * 32.0, 0.0), 63.0).to(tl.int32)
                bins = words + program * _WIDTH + _HIST + bins
                tl.atomic_add(bins, tl.full([R, C], 1, tl.int64), mask=used, sem="relaxed")
            if PIECES:
                c_inside, c_zero, c_kept = m * 0, m * 0, m * 0
                for piece in range(0, N, W):  # again, from L1: a loop holds the registers of W elements
                    loaded = widen(load_piece(x, start, column, valid, K, x_k, piece, W, EDGE))
                    magnitude = tl.where(bad[:, :, None], 0.0, tl.abs(loaded))
                    if FOREIGN:
                        q = load_piece(foreign, at, column, valid, K, f_k, piece, W, EDGE)
                        q = tl.where(bad[:, :, None], 0.0, with_sign(q, loaded))
                    else:
                        q = one_pass(magnitude, m, k, tensor, RULE, MBS, LARGEST, NARROW)[0]
                        if OF > 0:
                            rest = magnitude - q
                            second = one_pass(tl.abs(rest), m2, k2, tensor, RULE, MBS, LARGEST, False)[0]
                            q = tl.minimum(q + with_sign(second, rest) * alpha, LARGEST)
                    (
                        norm, dot, error, scales, cross, grids, deads, error_dead, scale_dead, dot_dead, n1, n2, n3,
                    ) = add_tile(
                        magnitude, q, m, inverse, sixth, edge, norm, dot, error, scales, cross, grids, deads,
                        error_dead, scale_dead, dot_dead, e4m3, ORTHOGONAL,
                    )  # fmt: skip
                    c_inside += n1
                    c_zero += n2
                    c_kept += n3
            else:
                if FOREIGN:
                    q = load_tile(foreign, at, column, valid, K, f_k, G, N, MASK, OWNED)
                    q = tl.where(bad[:, :, None], 0.0, as_float(as_bits(q) ^ sign))
                (
                    norm, dot, error, scales, cross, grids, deads, error_dead, scale_dead, dot_dead, c_inside, c_zero,
                    c_kept,
                ) = add_tile(
                    magnitude, q, m, inverse, sixth, edge, norm, dot, error, scales, cross, grids, deads, error_dead,
                    scale_dead, dot_dead, e4m3, ORTHOGONAL,
                )  # fmt: skip
            good = (bad == 0).to(tl.int32)
            n_elements += real * good
            n_inside += c_inside - tl.where(zero, 0, padding)
            n_zero += (c_zero - padding) * good
            n_zero_block += (zero & (bad == 0) & (real > 0)).to(tl.int32)
            n_bad += bad.to(tl.int32)
            n_inside_kept += c_kept
    row = sums + program * _WIDTH
    dead = _all(deads)
    dot_off, dot_in = _all(dot), _all(dot_dead)
    cross_off, error_off = _all(cross), _all(error)
    cross_in = 0.0 - dot_in  # e_dz is -x in D
    if FOREIGN:  # a foreign quantizer's NaN reaches both sides: the reference multiplies it by zeros
        cross_off += 0.0 * dot_in
        cross_in += 0.0 * dot_off
        error_off += 0.0 * _all(error_dead)
    tl.store(row, _all(norm) + dead)
    tl.store(row + 1, dot_off + dot_in)
    tl.store(row + 2, dead if ORTHOGONAL else _all(error_dead))
    tl.store(row + 3, error_off)
    tl.store(row + 4, _all(scales) + _all(scale_dead))
    tl.store(row + 5, dead)
    tl.store(row + 6, _all(grids))
    tl.store(row + 7, cross_off)
    tl.store(row + 8, cross_in)
    tl.store(row + 9, _all(delta_sum))
    tl.store(row + 10, _all(delta_square))
    tl.store(row + 11, _all(gamma))
    row = words + program * _WIDTH + _FLOATS
    tl.store(row, _all(n_elements.to(tl.int64)))
    tl.store(row + 1, _all(n_inside.to(tl.int64)))
    tl.store(row + 2, _all(n_zero.to(tl.int64)))
    tl.store(row + 3, _all(n_zero_block.to(tl.int64)))
    tl.store(row + 4, _all(n_bad.to(tl.int64)))
    tl.store(row + 5, _all(n_inside_kept.to(tl.int64)))
    tl.store(row + 6, _all(n_clamped.to(tl.int64)))
    tl.store(row + 7, _all(n_delta.to(tl.int64)))


@triton.jit
def _all(x):
    """The sum of a [P, Q] tensor, all of whose threads' partial sums are combined in one order."""
    return tl.sum(tl.sum(x, axis=1), axis=0)


@triton.jit
def _total_kernel(sums, words, total, total_words, rows, ROWS: tl.constexpr, C: tl.constexpr):
    """C columns of rows [rows, WIDTH] summed: float64 for the first FLOATS, int64 for the rest."""
    first = tl.program_id(0) * C
    column = first + tl.arange(0, C)
    row = tl.arange(0, ROWS)[:, None]
    at = row * _WIDTH + column[None, :]
    if first < _FLOATS:
        tl.store(total + column, tl.sum(tl.load(sums + at, mask=row < rows, other=0.0), axis=0))
    else:
        tl.store(total_words + column, tl.sum(tl.load(words + at, mask=row < rows, other=0), axis=0))


def stats(x_ABK: Tensor, recipe: Recipe, foreign_ABK: Tensor | None, tensor_scale: Tensor | None) -> dict[str, Any]:
    """The fields of `mxrl.ErrorStats`, by name. x_ABK: bf16, fp16 or float32, any strides.

    recipe gives Q, Q* and D; foreign_ABK (float32, x's shape) stands in for Q(x), then there is no delta. tensor_scale:
    NVFP4's, 0-d float32 on the device, else None. Raises ValueError for what `unsupported` names.
    """
    total, short = launch(x_ABK, recipe, foreign_ABK, tensor_scale)
    return fields(total.cpu().numpy()[None], [recipe if short else None])[0]


def orthogonal(recipe: Recipe) -> bool:
    """Whether Q is surely 0 in D: the effective scale is at least the ideal one (as `mxrl.decompose.is_orthogonal`)."""
    above = recipe.rule == "ceil" or recipe.rule.startswith("e8m") or (recipe.rule == "ideal" and not recipe.mbs)
    return recipe.base in ("mxfp4", "mxfp8") and above and recipe.mbs != "joint" and not recipe.of


def edge_of(x_ABK: Tensor, q_ABK: Tensor, plan: Tiling) -> str:
    """`load_piece`'s EDGE."""
    if plan.mode == "columns" or not x_ABK.stride(2) == q_ABK.stride(2) == 1:
        return "strided"
    aligned = all(
        plan.mode == "flat" or all(t.shape[i] == 1 or t.stride(i) % 8 == 0 for i in (0, 1)) for t in (x_ABK, q_ABK)
    )
    if plan.mask != "all":
        return "aligned" if aligned else "whole"
    return "eighths" if aligned and x_ABK.shape[2] % 8 == 0 else "any"


def launch(
    x_ABK: Tensor, recipe: Recipe, foreign_ABK: Tensor | None, tensor_scale: Tensor | None,
    *, config: Config | None = None, programs: int = PROGRAMS, shortcut: bool = True, pieces: bool = True,
) -> tuple[Tensor, bool]:  # fmt: skip
    """-> the sums as they lie on the device, int64 [WIDTH], and whether stats_fast_triton served (see `fields`).

    config, programs, shortcut (False: stats_fast_triton may not serve) are for tuning; they move the sums' last bits.
    """
    if x_ABK.numel() == 0:
        return torch.zeros(WIDTH, dtype=torch.int64, device=x_ABK.device), False
    plan, constants = cut(x_ABK, foreign_ABK, recipe, x_ABK.dtype, CONFIGS, config)
    short = shortcut and foreign_ABK is None and fast.serves(x_ABK, recipe, plan.mode)
    if short and constants["M"] > fast.BLOCKS:  # a flag is for whole tiles
        smaller = Config(fast.BLOCKS * constants["N"], constants["num_warps"])
        plan, constants = cut(x_ABK, foreign_ABK, recipe, x_ABK.dtype, CONFIGS, smaller)
    rows = min(plan.programs, LEFT_OVER if short else programs)
    short_rows = min(fast.tiles(x_ABK), fast.PROGRAMS) if short else 0
    words = torch.zeros(rows + short_rows, WIDTH, dtype=torch.int64, device=x_ABK.device)
    sums = words.view(torch.float64)
    flags = fast.launch(x_ABK, recipe, sums[rows:], words[rows:], COUNTS_AT) if short else None
    q_ABK = x_ABK if foreign_ABK is None else foreign_ABK
    # a search and 4/6 decide by a block's errors, so they need all of it at once
    pieces = pieces and recipe.mbs in (None, "align") and recipe.rule != "4over6"
    _stats_kernel[(rows,)](
        x_ABK, foreign_ABK, tensor_scale, sums, words, flags, recipe.of or 0.0, plan.count, *x_ABK.shape[1:],
        *x_ABK.stride(), *q_ABK.stride(), plan.programs, rows, FOREIGN=foreign_ABK is not None,
        ORTHOGONAL=foreign_ABK is None and orthogonal(recipe), FLAGGED=fast.BLOCKS if short else 0,
        PIECES=pieces, EDGE=edge_of(x_ABK, q_ABK, plan), **constants,
    )  # fmt: skip
    total = torch.empty(WIDTH, dtype=torch.int64, device=x_ABK.device)
    columns = 16 if INTERPRETED else 1  # there a program costs milliseconds
    _total_kernel[(WIDTH // columns,)](
        sums, words, total.view(torch.float64), total, len(words), ROWS=triton.next_power_of_2(len(words)), C=columns
    )
    return total, short


def fields(totals: np.ndarray, short: Sequence[Recipe | None]) -> list[dict[str, Any]]:
    """Sums int64 [R, WIDTH] -> R times ErrorStats' fields. short: the recipe if stats_fast_triton served, or None."""
    floats = totals[:, : len(FLOATS)].view(np.float64)
    counts, hist = totals[:, COUNTS_AT:HIST], totals[:, HIST : HIST + DELTA_BINS]
    if any(short):
        served = [i for i, recipe in enumerate(short) if recipe]
        counted = fast.deltas(totals[served, -fast.MANTISSAS :], [recipe for recipe in short if recipe])
        floats, counts, hist = floats.copy(), counts.copy(), hist.copy()
        counts[served, COUNTS.index("delta_count")] += counted[0]
        floats[served, FLOATS.index("delta_sum") :] += counted[1]  # and the two after it
        hist[served] += counted[2]
    out = []
    for f, c, h in zip(floats.tolist(), counts.tolist(), hist.tolist(), strict=True):
        found: dict[str, Any] = dict(zip(FLOATS, f, strict=True)) | dict(zip(COUNTS, c, strict=True))
        found["delta_hist"] = tuple(h)
        found["sq_error"] = found["sq_error_deadzone"] + found["sq_error_elsewhere"]
        found["dot_deadzone_grid"] = 0.0  # of disjoint supports
        out.append(found)
    return out

"""MBS as device functions: the prescaled pass, `align`, and the searches for k (tiles as in `grids_triton`).

align      256 + k = floor(384 / g), g = f or f / 2: Newton's reciprocal and one FMA that settles the last unit
search     the reference's sums decide. Summing by another tree, with FMAs and one product less an element is faster
           by half, so a fast search runs first, with a bound on how far its totals can be from the reference's;
           a tile where two candidates are closer than that (1 % of ordinary tiles) is searched again exactly.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from mxrl.ops.grids_triton import (
    FUSED,
    INF_BITS,
    as_bits,
    as_float,
    block_scale,
    from_grid,
    halving_sum,
    is_power_of_two,
    round_product_to_grid,
    round_to_grid,
    to_grid,
)


@triton.jit
def _minus_reciprocal(p):
    """-fl(1 / p) for p = (256 + k) / 256. Newton's steps are exact for each of the 256 (a test tries them all).

    Negative, because -(1 / p) needs no negation on the way, and a negation is a subtraction that takes an instruction.
    """
    if not FUSED:
        return tl.div_rn(tl.full(p.shape, -1.0, tl.float32), p)
    r = tl.fma(p, 8 / 17, -24 / 17)  # within 1/17
    for _ in tl.static_range(3):
        r = tl.fma(tl.fma(p, r, 1.0), r, r)
    return r


@triton.jit
def align_mantissa(macro):
    """`corrections.mbs_align` of macro-block maxima as bits (finite): int32 [M].

    With g = f or f / 2 in (3/4, 3/2], 256 + k = floor(384 / g): Newton's quotient, a little high, is right or one too
    many, and the sign of 384 - (256 + k)·g, one FMA, says which.
    """
    bits = tl.where(macro < 0x800000, as_bits(as_float(macro) * 16777216.0), macro)  # subnormals are normalised
    fraction = bits & 0x7FFFFF
    g = as_float(fraction | tl.where(fraction <= 0x400000, 0x3F800000, 0x3F000000))
    r = tl.fma(g, 0.8366, -1.8823)  # -1 / g
    for _ in tl.static_range(3):
        r = tl.fma(tl.fma(g, r, 1.0), r, r)
    q = as_float(as_bits(tl.fma(r, -384.0, 0.01)) & -0x8000)  # floor, in [256, 1024)
    k = q.to(tl.int32) - tl.where(tl.fma(q, g, -384.0) > 0, 257, 256)
    return tl.where(macro == 0, 0, k)


@triton.jit
def mbs_factors(k):
    """k int32 [M] -> p = (256 + k) / 256 and fl(1 / p)."""
    p = (k + 256).to(tl.float32) * 0.00390625
    return p, 0.0 - _minus_reciprocal(p)


@triton.jit
def mbs_pass(
    a, m, p, inverse_p, lower, RULE: tl.constexpr, LARGEST: tl.constexpr, CAPPED: tl.constexpr, NARROW: tl.constexpr
):
    """One MBS pass on magnitudes a [M, G, n] with block maxima m (bits); returns as `base_pass`.

    p, inverse_p: `mbs_factors`, [M, 1] or scalars. CAPPED: as in `to_grid`, and whether p·a can saturate. NARROW: `a`
    came from 16 bits, so that p·a is exact, and so is p·a / s for a power of two: one product will do.
    """
    # rounding is monotonic, so the prescaled block's maximum is the prescaled maximum
    scaled_m = as_bits(tl.minimum(as_float(tl.where(m >= INF_BITS, 0, m)) * p, LARGEST))
    scaled_m = tl.where(m >= INF_BITS, m, scaled_m)
    value, inverse, code, clamped = block_scale(scaled_m, lower, 0.0, RULE)
    p = tl.zeros(m.shape, tl.float32) + p
    inverse_p = tl.zeros(m.shape, tl.float32) + inverse_p
    if NARROW and is_power_of_two(RULE):
        grid = to_grid(a, value, inverse, p, RULE, LARGEST, CAPPED, True)  # saturating p·a is left to the grid's cap
    else:
        y = a * p[:, :, None]
        if CAPPED:
            y = tl.minimum(y, LARGEST)
        grid = to_grid(y, value, inverse, 1.0, RULE, LARGEST, CAPPED)
    return from_grid(grid, value, RULE) * inverse_p[:, :, None], grid, value, code, clamped


@triton.jit
def macro_amax(m):
    """Block maxima m [M, G] (bits) -> those of the macro-blocks' finite blocks, [M]."""
    return tl.max(tl.where(m >= INF_BITS, 0, m), axis=1)


# --- searches --------------------------------------------------------------------------------------------------------


@triton.jit
def _block_error(a, value, unit, bad):
    """Squared errors [M, G] in units of the macro-block's power of two; 0 for poisoned blocks."""
    error = (value - a) * unit[:, None, None]
    return tl.where(bad, 0.0, halving_sum(error * error))


@triton.jit
def _macro_sum(error):
    """[M, G] -> [M], by the same tree."""
    return tl.reshape(halving_sum(tl.expand_dims(error, 1)), [error.shape[0]])


@triton.jit
def _macro_unit(macro):
    """2^-clamp(floor(log2 M), -126, 127) of macro-block maxima as bits."""
    return as_float(tl.maximum((254 - tl.maximum(macro >> 23, 1)) << 23, 0x400000))


@triton.jit
def _quarters(x):
    """[M, G, 32] -> four [M, G, 8]; no data moves where a thread holds whole blocks."""
    x = tl.reshape(x, [x.shape[0], x.shape[1], 2, 2, 8])
    low, high = tl.split(tl.permute(x, (0, 1, 3, 4, 2)))
    x0, x1 = tl.split(tl.permute(low, (0, 1, 3, 2)))
    x2, x3 = tl.split(tl.permute(high, (0, 1, 3, 2)))
    return x0, x1, x2, x3


@triton.jit
def _candidate_error(a, c, q, RULE: tl.constexpr, NARROW: tl.constexpr):
    """Errors a + g·q of magnitudes a, with g = RNE(a·c): c = p / s and q = -s · fl(1 / p), both [M, G]."""
    c, q = c[:, :, None], q[:, :, None]
    if NARROW and RULE == "ceil":
        grid = round_product_to_grid(a, c)
    elif RULE == "ceil":
        grid = round_to_grid(a * c, False)
    else:
        grid = round_to_grid(tl.minimum(a * c, 6.0), False)
    return tl.fma(grid, q, a)


@triton.jit
def _fast_search(
    a, m, MODE: tl.constexpr, RULE: tl.constexpr, LARGEST: tl.constexpr, NARROW: tl.constexpr, OWNED: tl.constexpr
):
    """k [M] by sums that are rounded differently, and whether it is certainly the reference's (bool [M]).

    Everything is taken times the macro-block's power of two, so that |a| < 2, and blocks below 2^-80, whose squared
    errors round to 0, count as 2^-80. With u = 2^-24, T a candidate's total and X² the sum of squares, this total and
    the reference's are apart by no more than u times
        2·X·√T + 6·T      g·q, the difference and its square: one rounding more or less each
        4·X·√T            only where p·a is not exact: an element between two grid values may go to the other one
        (d + d')·T        two sums of d and d' additions in a row
    so the least is certain if the next one is above it by twice as much. Beside that nothing may be poisoned, clip,
    saturate or be subnormal: macro maxima in [2^-40, largest / 4).
    """
    macro = tl.max(m, axis=1)  # a poisoned block is left to the exact search
    m = tl.minimum(m, INF_BITS)
    unit = _macro_unit(tl.minimum(macro, 0x7F000000))[:, None]
    a = a * unit[:, :, None]
    top = tl.maximum(as_float(m) * unit, 8.271806125530277e-25)
    if OWNED:
        a0, a1, a2, a3 = _quarters(a)
        squares = tl.fma(a3, a3, tl.fma(a2, a2, tl.fma(a1, a1, a0 * a0)))
    else:
        squares = a * a
    norm = tl.sum(tl.sum(squares, axis=2), axis=1)
    step: tl.constexpr = 1 if MODE == "search256" else 16
    best = macro * 0
    least = tl.full(macro.shape, float("inf"), tl.float32)
    second = least
    for index in tl.range(0, 256 // step):
        p = (tl.full([1, 1], 256, tl.int32) + index * step).to(tl.float32) * 0.00390625
        # the scale's bits, as in block_scale
        bits = as_bits(top * p)
        if RULE == "ceil":
            bits += 0x3FFFFF
        elif RULE == "even":
            bits += 0x200000
        bits = (bits & INF_BITS) - 0x1000000
        c = as_float(0x7F000000 - bits) * p
        q = as_float(bits) * _minus_reciprocal(p)
        if OWNED:
            e = _candidate_error(a0, c, q, RULE, NARROW)
            total = e * e
            e = _candidate_error(a1, c, q, RULE, NARROW)
            total = tl.fma(e, e, total)
            e = _candidate_error(a2, c, q, RULE, NARROW)
            total = tl.fma(e, e, total)
            e = _candidate_error(a3, c, q, RULE, NARROW)
            total = tl.fma(e, e, total)
        else:
            e = _candidate_error(a, c, q, RULE, NARROW)
            total = e * e
        total = tl.sum(tl.sum(total, axis=2), axis=1)
        better = total < least
        best = tl.where(better, index * step, best)
        second = tl.minimum(second, tl.maximum(total, least))
        least = tl.minimum(least, total)
    spread: tl.constexpr = 3.0 if NARROW else 7.0  # each a little more than the bound, for its own rounding
    depth: tl.constexpr = 16 + a.shape[1] + (16 if OWNED else a.shape[2])
    margin = (tl.sqrt_rn(norm * second) * spread + second * depth) * 1.1920928955078125e-07  # 2u
    certain = (second - least > margin) & (macro >= 0x2B800000) & (as_float(macro) < LARGEST / 4)
    return best, certain | (macro == 0)


@triton.jit
def _exact_search(a, m, MODE: tl.constexpr, RULE: tl.constexpr, LARGEST: tl.constexpr, NARROW: tl.constexpr):
    """`ops.qdq._search`: the k int32 [M] of least squared error, and (joint) lower int32 [M, G]: 1 where a block takes
    ceil - 1."""
    bad = m >= INF_BITS
    macro = macro_amax(m)
    unit = _macro_unit(macro)
    step: tl.constexpr = 1 if MODE == "search256" else 16
    best = macro * 0
    best_lower = m * 0
    best_error = tl.full(macro.shape, float("inf"), tl.float32)
    for index in tl.range(0, 256 // step):
        p, inverse_p = mbs_factors(tl.full([1, 1], 0, tl.int32) + index * step)
        value, _, _, _, _ = mbs_pass(a, m, p, inverse_p, 0, RULE, LARGEST, True, NARROW)
        error = _block_error(a, value, unit, bad)
        lower = m * 0
        if MODE == "joint":
            value, _, _, _, _ = mbs_pass(a, m, p, inverse_p, 1, RULE, LARGEST, True, NARROW)
            below = _block_error(a, value, unit, bad)
            lower = (below < error).to(tl.int32)
            error = tl.where(below < error, below, error)
        total = _macro_sum(error)
        better = total < best_error
        best = tl.where(better, index * step, best)
        best_lower = tl.where(better[:, None], lower, best_lower)
        best_error = tl.where(better, total, best_error)
    return best, best_lower


@triton.jit
def search_mantissa(
    a, m, MODE: tl.constexpr, RULE: tl.constexpr, LARGEST: tl.constexpr, NARROW: tl.constexpr, OWNED: tl.constexpr
):
    """`ops.qdq._search`: k int32 [M], and for joint lower int32 [M, G].

    Where a fast search is possible, the exact one runs only for tiles in which it was not certain.
    """
    if MODE == "joint" or not (RULE == "ceil" or RULE == "floor" or RULE == "even"):
        return _exact_search(a, m, MODE, RULE, LARGEST, NARROW)
    k, certain = _fast_search(a, m, MODE, RULE, LARGEST, NARROW, OWNED)
    if tl.min(certain.to(tl.int32), axis=0) == 0:
        k, _ = _exact_search(a, m, MODE, RULE, LARGEST, NARROW)
    return k, m * 0

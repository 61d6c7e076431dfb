"""Q* and the deadzone on the GPU, shared by `stats_triton` and `inject_triton`.

Q*, the quantizer with the unrounded ideal scale m / q_max, is defined in float64 and rounded once to float32. Two
divisions an element would be most of a kernel; E2M1 takes neither, by two facts (x and m are float32, 24 bits each):

    6x/m against a tie k/4    their difference is 0 or at least 1/(4·24·2^24) > 2^-31, so the product with fl64(6/m),
                              wrong by 2^-49, snapped to the multiples of 2^-34 decides as the quotient does
    g·(m/6) in float32        g·m/6 is a multiple of a third: a float32, a midpoint (of subnormals), or a sixth of a
                              place away from one. fl64(g · fl64(m/6)) is exact where that is short, so it rounds alike

E4M3 (q_max = 448 = 7·64, 4-bit g) has real midpoints, where the reference's own two roundings decide: there they are
taken as they stand.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportOptionalSubscript=false

from __future__ import annotations

import triton
import triton.language as tl

from mxrl.ops.mbs_triton import align_mantissa, macro_amax, mbs_factors, mbs_pass
from mxrl.ops.passes_triton import as_bits, as_float, base_pass


@triton.jit
def _power(q, least: tl.constexpr, shift: tl.constexpr):
    """max(2^floor(log2 q), 2^least) · 2^shift of float64 q >= 0, by the high word alone."""
    high = (q.to(tl.int64, bitcast=True) >> 32).to(tl.int32) & 0x7FF00000
    high = tl.maximum(high, (1023 + least) << 20) + (shift << 20)
    return (high.to(tl.int64) << 32).to(tl.float64, bitcast=True)


@triton.jit
def ideal_scale(m, E4M3: tl.constexpr):
    """Of finite block maxima m (bits): q_max / m (of zeros: q_max) and m / q_max, float64, each rounded once."""
    maximum = as_float(m).to(tl.float64)
    divisor = tl.where(m == 0, 1.0, maximum)
    if E4M3:
        return 448.0 / divisor, maximum / 448.0
    sixth = maximum * 0.16666666666666666
    rest = tl.fma(sixth, tl.full(m.shape, -6.0, tl.float64), maximum)  # exact; one step makes it the rounded quotient
    return 6.0 / divisor, sixth + rest * 0.16666666666666666


@triton.jit
def ideal_values(exact, m, inverse, sixth, E4M3: tl.constexpr):
    """Q* of magnitudes [M, G, n], float32 numbers as float64, in finite blocks of maxima m (bits, [M, G]): float32.

    inverse, sixth: `ideal_scale` of m.
    """
    if E4M3:
        maximum = as_float(m).to(tl.float64)
        q = exact * 448.0 / tl.where(m == 0, 1.0, maximum)[:, :, None]
        power = _power(q, -6, 49)  # 49 = 52 - 3 mantissa bits: q + power has its last place at the grid's spacing
        grid = (q + power) - power
        return (grid / 448.0 * maximum[:, :, None]).to(tl.float32)
    q = (exact * inverse[:, :, None] + 393216.0) - 393216.0  # 1.5 · 2^18: multiples of 2^-34
    power = _power(q, 0, 51)
    grid = (q + power) - power
    return (grid * sixth[:, :, None]).to(tl.float32)


@triton.jit
def deadzone_edge(m, sixth, E4M3: tl.constexpr):
    """The least float32 that is not below D's edge, m / 24 (E4M3: m / 458752); a magnitude is in D where it is less."""
    if E4M3:
        edge = (sixth * 0.0009765625).to(tl.float32)  # m / 448 / 1024
        ratio: tl.constexpr = 458752.0
    else:
        edge = (sixth * 0.25).to(tl.float32)
        ratio: tl.constexpr = 24.0
    below = edge.to(tl.float64) * ratio < as_float(m).to(tl.float64)  # exact
    return as_float(as_bits(edge) + below.to(tl.int32))


@triton.jit
def log2(v):
    """log2 of positive normal float64, to about 2^-52, exact at powers of two, from + - x / alone."""
    bits = v.to(tl.int64, bitcast=True)
    f = ((bits & 0xFFFFFFFFFFFFF) | 0x3FF0000000000000).to(tl.float64, bitcast=True)
    high = f > 1.4142135623730951
    f = tl.where(high, f * 0.5, f)
    exponent = ((bits >> 52).to(tl.int32) - 1023 + high.to(tl.int32)).to(tl.float64)
    z = (f - 1.0) / (f + 1.0)  # |z| < .172; log f = 2 atanh z
    y = z * z
    series = y * (1.0 / 19) + 1.0 / 17
    series = series * y + 1.0 / 15
    series = series * y + 1.0 / 13
    series = series * y + 1.0 / 11
    series = series * y + 1.0 / 9
    series = series * y + 1.0 / 7
    series = series * y + 1.0 / 5
    series = series * y + 1.0 / 3
    series = series * y + 1.0
    return exponent + z * series * 2.8853900817779268


# --- sums ------------------------------------------------------------------------------------------------------------


@triton.jit
def add_elements(
    exact, kept, q, q_dead, ideal, norm, dot, error, scales, cross, grids, deads, error_dead, scale_dead, dot_dead,
    ORTHOGONAL: tl.constexpr,
):  # fmt: skip
    """Adds elements [T, n / 2] to the sums on both sides of D's edge: kept, q, ideal are 0 in D, q_dead is 0 off it."""
    kept, q, ideal = kept.to(tl.float64), q.to(tl.float64), ideal.to(tl.float64)
    by_scale, rest, off, dead = q - ideal, ideal - kept, q - kept, exact - kept
    norm = tl.fma(kept, kept, norm)
    dot = tl.fma(q, kept, dot)
    error = tl.fma(off, off, error)
    scales = tl.fma(by_scale, by_scale, scales)
    cross = tl.fma(by_scale, rest, cross)
    grids = tl.fma(rest, rest, grids)
    deads = tl.fma(dead, dead, deads)
    if not ORTHOGONAL:
        q_dead = q_dead.to(tl.float64)
        off = q_dead - dead
        error_dead = tl.fma(off, off, error_dead)
        scale_dead = tl.fma(q_dead, q_dead, scale_dead)
        dot_dead = tl.fma(q_dead, dead, dot_dead)
    return norm, dot, error, scales, cross, grids, deads, error_dead, scale_dead, dot_dead


@triton.jit
def halves(x):
    """[M, G, n] -> two of [M·G, n / 2]; a thread keeps what it has."""
    return tl.split(tl.reshape(x, [x.shape[0] * x.shape[1], x.shape[2] // 2, 2]))


@triton.jit
def count(which):
    """bool [M, G, n] -> int32 [M, G]."""
    return tl.sum(which.to(tl.int32), axis=2)


@triton.jit
def add_tile(magnitude, q, m, inverse, sixth, edge, norm, dot, error, scales, cross, grids, deads, error_dead,
             scale_dead, dot_dead, E4M3: tl.constexpr, ORTHOGONAL: tl.constexpr):  # fmt: skip
    """Adds magnitudes [M, G, n] of finite blocks and their Q(x), as if x were positive, to the sums [M·G, n / 2].

    ORTHOGONAL: Q is surely 0 in D. Returns the sums, and int32 [M, G]: elements in D, zeros, elements of D with Q ≠ 0.
    """
    exact = magnitude.to(tl.float64)
    ideal = ideal_values(exact, m, inverse, sixth, E4M3)  # 0 in D
    inside = magnitude < edge[:, :, None]
    kept = tl.where(inside, 0.0, magnitude)
    x0, x1 = halves(exact)
    k0, k1 = halves(kept)
    i0, i1 = halves(ideal)
    if ORTHOGONAL:
        q0, q1 = halves(q)
        n0, n1 = q0, q1
        n_kept = m * 0
    else:
        q0, q1 = halves(tl.where(inside, 0.0, q))
        n0, n1 = halves(tl.where(inside, q, 0.0))
        n_kept = count(inside & (q != 0.0))
    norm, dot, error, scales, cross, grids, deads, error_dead, scale_dead, dot_dead = add_elements(
        x0, k0, q0, n0, i0, norm, dot, error, scales, cross, grids, deads, error_dead, scale_dead, dot_dead, ORTHOGONAL
    )
    norm, dot, error, scales, cross, grids, deads, error_dead, scale_dead, dot_dead = add_elements(
        x1, k1, q1, n1, i1, norm, dot, error, scales, cross, grids, deads, error_dead, scale_dead, dot_dead, ORTHOGONAL
    )
    n_inside, n_zero = count(inside), count(magnitude == 0.0)
    return (
        norm, dot, error, scales, cross, grids, deads, error_dead, scale_dead, dot_dead, n_inside, n_zero, n_kept
    )  # fmt: skip


@triton.jit
def macro_mantissa(m, MBS: tl.constexpr, G: tl.constexpr):
    """Finite block maxima m [T, 1], T whole macro-blocks of G -> `align`'s k of each block's macro-block, int32 [T]."""
    T: tl.constexpr = m.shape[0]
    if MBS == "":
        k = tl.zeros([T], tl.int32)
    else:
        k = align_mantissa(macro_amax(tl.reshape(m, [T // G, G])))
        k = tl.reshape(tl.broadcast_to(k[:, None], [T // G, G]), [T])
    return k


@triton.jit
def one_pass(a, m, k, tensor_scale, RULE: tl.constexpr, MBS: tl.constexpr, LARGEST: tl.constexpr, NARROW: tl.constexpr):
    """One pass on magnitudes a [T, 1, n] of blocks with maxima m (bits, [T, 1]): values, and scale and clamped [T, 1].

    k: `macro_mantissa`'s, [T]. A piece of a block is quantized as the block is: m decides.
    """
    if MBS == "":
        value, _, scale, _, clamped = base_pass(a, m, 0, tensor_scale, RULE, LARGEST, True)
    else:
        p, inverse_p = mbs_factors(k)
        value, _, scale, _, clamped = mbs_pass(a, m, p[:, None], inverse_p[:, None], 0, RULE, LARGEST, True, NARROW)
    return value, scale, clamped


@triton.jit
def load_piece(pointer, start, column, valid, K, stride, at, W: tl.constexpr, EDGE: tl.constexpr):
    """Elements at ... at + W - 1 of every block, [M, 1, W], a block to a thread.

    EDGE: how rows of contiguous elements end: in "whole" blocks, or in "any"; where all starts are multiples of 8 (the
    caller hints at it), "aligned" blocks or whole "eighths": 16 bytes are loaded at once. "strided": elements are
    `stride` apart, and loaded one by one, neighbouring threads' together (W = 4).
    """
    if EDGE == "strided":
        x0 = _load_element(pointer, start, column, valid, K, stride, at)
        x1 = _load_element(pointer, start, column, valid, K, stride, at + 1)
        x2 = _load_element(pointer, start, column, valid, K, stride, at + 2)
        x3 = _load_element(pointer, start, column, valid, K, stride, at + 3)
        x = tl.reshape(tl.join(tl.join(x0, x2), tl.join(x1, x3)), [start.shape[0], 1, 4])
    else:
        inside = tl.arange(0, W)[None, None, :] + at
        mask = valid[:, None, None] & (inside >= 0)
        if EDGE == "eighths":
            mask = (valid & (column + at < K))[:, None, None] & (inside >= 0)
        elif EDGE == "any":
            mask = mask & (column[:, None, None] + inside < K)
        x = tl.load(pointer + (start[:, None, None] + inside), mask=mask, other=0.0)
    return x


@triton.jit
def _load_element(pointer, start, column, valid, K, stride, at):
    return tl.load(pointer + (start + at * stride), mask=valid & (column + at < K), other=0.0)

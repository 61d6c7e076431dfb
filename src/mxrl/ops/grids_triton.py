"""Grids and scales as device functions: what `elements` and `scaling` are in torch, for every Triton kernel.

A *tile* is x [M, G, n] in float32: M macro-blocks of G blocks of n elements (without MBS G = 1, and M counts blocks).
Scalars of a block are [M, G], of a macro-block [M]. The tile's layout over threads does not matter to a result: sums
are by the halving tree of `corrections.halving_sum`, and every other reduction is a maximum.

    max|x|     as an integer: `bits & 0x7fffffff` orders like the numbers, and NaN and Inf are >= 0x7f800000
    scale      powers of two from those bits by integer addition: `ceil` is (m + 0x3fffff) >> 23, a carry past f = 1.5
    grid       two FMAs: with P = max(2^floor(log2 |a|), 2^e_min), t = P·C + a has its last place at the grid's
               spacing, so it is rounded to nearest, ties to even, and t - P·C is exact
    signs      grids and values are magnitudes until the end: a zero then takes x's sign like everything else

What must hold where this runs: no FMA contraction (`enable_fp_fusion=False`), no flushing of subnormals (Triton's
default). Division is `tl.div_rn` (`/` is approximate on the GPU), or a product with an exact power of two.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED: tl.constexpr = tl.constexpr(bool(triton.knobs.runtime.interpret))  # where bf16 casts are wrong
_VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
FUSED: tl.constexpr = tl.constexpr(
    not triton.knobs.runtime.interpret or _VERSION >= (3, 9)
)  # whether an FMA rounds once

INF_BITS: tl.constexpr = tl.constexpr(0x7F800000)
MAGNITUDE: tl.constexpr = tl.constexpr(0x7FFFFFFF)
SIGN: tl.constexpr = tl.constexpr(-0x80000000)


@triton.constexpr_function
def mantissa_bits(rule):
    """k of e8m{k}; 0 for every other rule."""
    return int(rule[3:]) if rule.startswith("e8m") else 0


@triton.constexpr_function
def is_power_of_two(rule):
    return rule in ("ceil", "floor", "even", "mxfp8")


@triton.constexpr_function
def is_two_level(rule):
    return rule in ("nvfp4", "4over6")


@triton.constexpr_function
def log2_of(n):
    return n.bit_length() - 1


# --- bits ------------------------------------------------------------------------------------------------------------


@triton.jit
def as_bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def as_float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def with_sign(magnitude, x):
    """The magnitude with x's sign; a negative "magnitude" (an OF sum that crossed zero) has it flipped."""
    return as_float(as_bits(magnitude) ^ (as_bits(x) & SIGN))


@triton.jit
def widen(x):
    """bf16, fp16 or float32 -> float32, exact."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        return as_float(x.to(tl.uint16, bitcast=True).to(tl.int32) << 16)
    return x.to(tl.float32)


@triton.jit
def round_once(x, DTYPE: tl.constexpr):
    """float32 -> DTYPE, to nearest, ties to even."""
    if INTERPRETED and DTYPE == tl.bfloat16:
        bits = as_bits(x)
        up = ((bits & MAGNITUDE) + 0x7FFF + ((bits >> 16) & 1)) >> 16  # of finite values: can't reach 2^31
        bits = tl.where((bits & MAGNITUDE) > INF_BITS, 0x7FC0, up | ((bits >> 16) & 0x8000))
        return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def block_amax(x):
    """x [M, G, n] -> the bits of max|x|, int32 [M, G]; at least 0x7f800000 where the block holds a NaN or an Inf."""
    if INTERPRETED:  # which is slow in general reductions, and drops NaN in its own
        return tl.max(as_bits(x) & MAGNITUDE, axis=2)
    return as_bits(tl.reduce(tl.abs(x), 2, larger))


@triton.jit
def halving_sum(x):
    """[M, G, n] -> the sum over n: i and i + n/2, then i and i + n/4, ... (n a power of two).

    Each step is a sum over an axis of two, so that no order of the compiler's is left.
    """
    for _ in tl.static_range(log2_of(x.shape[2])):
        x = tl.sum(tl.reshape(x, [x.shape[0], x.shape[1], 2, x.shape[2] // 2]), axis=2)
    return tl.reshape(x, [x.shape[0], x.shape[1]])


# --- grids -----------------------------------------------------------------------------------------------------------


@triton.jit
def round_to_grid(a, E4M3: tl.constexpr):
    """To the nearest value of E2M1 or E4M3, ties to even; the grid goes on above its largest. `a` may be signed, but a
    negative one that rounds to zero gives +0."""
    power = as_float(as_bits(a) & INF_BITS)
    if E4M3:
        power = tl.maximum(power, 0.015625)
        shift: tl.constexpr = 1572864.0  # 1.5 · 2^20: 23 - 3 mantissa bits
    else:
        power = tl.maximum(power, 1.0)
        shift: tl.constexpr = 6291456.0  # 1.5 · 2^22: 23 - 1
    return tl.fma(power, -shift, tl.fma(power, shift, a))


@triton.jit
def round_narrow_to_grid(a, E4M3: tl.constexpr):
    """`round_to_grid` of a >= 0 with at most 20 significant bits, by arithmetic alone.

    Then a·2^22 (E4M3: 2^20) is an even number of grid units, and does as well for an anchor as a power of two: adding
    a to it does not reach the next one.
    """
    shift: tl.constexpr = 1048576.0 if E4M3 else 4194304.0
    anchor = tl.maximum(a * shift, 16384.0 if E4M3 else 4194304.0)
    return (a + anchor) - anchor


@triton.jit
def round_product_to_grid(a, c):
    """`round_narrow_to_grid` of a·c for E2M1, an operation less; c <= 2^104."""
    anchor = tl.maximum(a * (c * 4194304.0), 4194304.0)
    return tl.fma(a, tl.broadcast_to(c, a.shape), anchor) - anchor


@triton.jit
def _floor_to_grid(a, E4M3: tl.constexpr):
    """The largest grid value <= a, for a >= 1, saturated: the bits cut off after the mantissa."""
    if E4M3:
        return as_float(as_bits(tl.minimum(a, 448.0)) & -0x100000)
    return as_float(as_bits(tl.minimum(a, 6.0)) & -0x400000)


# --- scales ----------------------------------------------------------------------------------------------------------


@triton.jit
def block_scale(m, lower, tensor_scale, RULE: tl.constexpr, TO_FOUR: tl.constexpr = False):
    """`scaling.block_scale` of maxima given as bits m (int32 [...], NaN and Inf poison).

    lower: int32 [...] taken off the exponent (joint search), or 0. tensor_scale: a float32 scalar, for NVFP4.
    Returns value (float32; NaN if poisoned; for ideal the maximum), inverse (1 / value for powers of two, else value),
    code (int32), clamped (bool).
    """
    bad = m >= INF_BITS
    m = tl.where(bad, 0, m)
    clamped = m < 0
    if is_power_of_two(RULE):
        # m = f · 2^e: adding 2^23 - 1 - (the mantissa of the threshold) carries into the exponent where f is above it
        if RULE == "ceil":
            raw = ((m + 0x3FFFFF) >> 23) - 2
        elif RULE == "floor":
            raw = (m >> 23) - 2
        elif RULE == "even":
            raw = ((m + 0x200000) >> 23) - 2
        else:
            raw = ((m + 0x1FFFFF) >> 23) - 8
        raw = raw - lower
        code = tl.maximum(raw, 0)  # the top, 254, is out of reach: largest / 4
        clamped = (raw < 0) & (m != 0)
        value = as_float(tl.maximum(code << 23, 0x400000))  # 2^-127 is subnormal
        inverse = as_float(0x7F000000 - (code << 23))
        nan_code = 255
    elif mantissa_bits(RULE) > 0:
        k: tl.constexpr = mantissa_bits(RULE)
        # m / 6 = f / 1.5 · 2^(e-2) or f / .75 · 2^(e-3); j = ceil of its mantissa times 2^k, all in integers
        high = (m & 0x7FFFFF) >= 0x400000
        integer = (m & 0x7FFFFF) | 0x800000
        cut = tl.where(high, 22 - k, 21 - k)
        steps = (((integer + (1 << cut) - 1) >> cut) + 2) // 3  # ceil(ceil(f 2^23 / 2^cut) / 3), in [2^k, 2^(k+1)]
        raw = (m >> 23) - tl.where(high, 2, 3) + (steps >> (k + 1))
        raw = raw - lower
        mantissa = steps & ((1 << k) - 1)
        keep = raw >= 0
        clamped = (raw < 0) & (m != 0)
        mantissa = tl.where(keep, mantissa, 0)
        exponent = tl.maximum(raw, 0)
        value = as_float(
            tl.where(exponent > 0, (exponent << 23) | (mantissa << (23 - k)), 0x400000 | (mantissa << (22 - k)))
        )
        inverse = value
        code = (exponent << k) | mantissa
        nan_code = 255 << k
    elif RULE == "ideal":
        value = as_float(m)
        inverse = value
        code = m * 0
        nan_code = 0
    else:
        divisor = tl.where(tensor_scale == 0, 1.0, tensor_scale)
        relative = tl.div_rn(tl.div_rn(as_float(m), 6.0), divisor)
        if TO_FOUR:
            relative = relative * 1.5
        grid = round_to_grid(tl.minimum(relative, 448.0), True)
        grid = tl.where(m > 0, tl.maximum(grid, 0.001953125), 0.0)
        value = grid * tensor_scale
        inverse = value
        # normal: exponent and mantissa bits rebiased from 127 to 7; subnormal: units of 2^-9
        code = tl.where(grid >= 0.015625, (as_bits(grid) >> 20) - 960, (grid * 512.0).to(tl.int32))
        nan_code = 0x7F
    return tl.where(bad, float("nan"), value), inverse, tl.where(bad, nan_code, code), clamped


# --- elements under a scale -------------------------------------------------------------------------------------------


@triton.jit
def _quotient(a, s):
    """fl(a / s) of signed a [M, G, n] and s > 0 [M, G], where it matters to the grid (not below 2^-100).

    Both times the power of two that brings s into [1, 2); then, with r = fl(1 / s), a first quotient within 2 ulp, a
    second within 1, and by Markstein's theorem the third is the correctly rounded one: six operations, no branch.
    """
    if not FUSED:
        return tl.div_rn(a, tl.broadcast_to(s[:, :, None], a.shape))
    factor = as_float(tl.maximum(0x7F000000 - (as_bits(s) & INF_BITS), 0x400000))
    s = s * factor
    r = tl.div_rn(tl.full(s.shape, 1.0, tl.float32), s)[:, :, None]
    minus_s = tl.broadcast_to((0.0 - s)[:, :, None], a.shape)
    a = a * factor[:, :, None]
    q = a * r
    r = tl.broadcast_to(r, a.shape)
    q = tl.fma(tl.fma(q, minus_s, a), r, q)
    return tl.fma(tl.fma(q, minus_s, a), r, q)


@triton.jit
def to_grid(
    a, value, inverse, factor, RULE: tl.constexpr, LARGEST: tl.constexpr, CAPPED: tl.constexpr,
    NARROW: tl.constexpr = False,
):  # fmt: skip
    """Magnitudes a [M, G, n] under scales [M, G] -> grid magnitudes; anything where the scale is NaN.

    factor: 1.0, or p [M, 1] that is still to be multiplied to `a` (powers of two only, where p·a is exact).
    LARGEST: of the output dtype; a grid value that would overflow it gives way to one that fits. CAPPED = False leaves
    that and the saturation at the grid's end out, where neither can be needed; then `a` may be signed. NARROW: `a` came
    from 16 bits, and is not negative.
    """
    e4m3: tl.constexpr = RULE == "mxfp8"
    if RULE == "ideal":  # float64 decides every float32 tie: 6 · a is exact
        poisoned = value != value
        s = tl.where((value == 0) | poisoned, 1.0, value).to(tl.float64)
        quotient = (a.to(tl.float64) * 6.0) / s[:, :, None]
        # RNE on the float64 quotient as in round_to_grid; 51 = 52 - 1 mantissa bits
        bits = quotient.to(tl.int64, bitcast=True) & 0x7FF0000000000000
        power = tl.maximum(bits.to(tl.float64, bitcast=True), 1.0) * 2251799813685248.0
        return tl.minimum((quotient + power) - power, 6.0).to(tl.float32)
    if is_power_of_two(RULE):
        scaled = a * (inverse * factor)[:, :, None]
        if CAPPED:
            cap = _floor_to_grid(inverse * LARGEST, e4m3)
            scaled = tl.minimum(scaled, cap[:, :, None])  # a grid value: the same before rounding as after
        if NARROW:
            return round_narrow_to_grid(scaled, e4m3)
        return round_to_grid(scaled, e4m3)
    s = tl.where((value == 0) | (value != value), 1.0, value)
    grid = round_to_grid(_quotient(a, s), False)
    if CAPPED:
        top = tl.full(s.shape, LARGEST, tl.float32)
        grid = tl.minimum(grid, _floor_to_grid(tl.div_rn(top, s), False)[:, :, None])
    return grid


@triton.jit
def from_grid(grid, value, RULE: tl.constexpr):
    """Grid magnitudes [M, G, n] and scales [M, G] -> magnitudes, rounded once to float32; NaN where the scale is."""
    if RULE == "ideal":
        s = value.to(tl.float64)
        return (grid.to(tl.float64) / 6.0 * s[:, :, None]).to(tl.float32)
    return grid * value[:, :, None]

"""The quantizer's arithmetic inside the CPU kernels: block scales, rounding, MBS, on blocks of 32 lanes.

    y       one block, float32; m = bits of max|y| as int32 (integers order like the floats, and NaN and Inf come last)
    spec    the recipe as numbers, see `spec_of`
    group   the blocks that are quantized together: one macro-block of MBS, else one block

The formulas are those of scaling.py, elements.py and corrections.py, written on bits:

    2^ceil(log2(m / 6))     exponent field of m + carry, less q: the carry overflows into the exponent iff f > 1.5
    RNE(a) on a grid        (a + 2^23 u) - 2^23 u, u the grid's spacing around a: float32 addition rounds ties to even
    ideal m / 6, unrounded  the float32 thresholds between which |x| rounds to each grid value, exact by float64

A poisoned block has scale NaN, hence values NaN. NVFP4's blocks of 16 are the two halves of a vector.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import torch

from mxrl.formats import E4M3
from mxrl.ops.lane_functions_cpu import (
    bits,
    bits64,
    concat,
    constant,
    floats,
    floats64,
    halve,
    high_half,
    lane,
    low_half,
    magnitude,
    maximum,
    minimum,
    select,
    splat,
    to_f32,
    to_f64,
)
from mxrl.ops.lanes_cpu import inlined
from mxrl.ops.memory_cpu import DTYPES, INF, F
from mxrl.recipes import Recipe

POW2, E8M, IDEAL, NV, FOUR_OVER_SIX = 0, 1, 2, 3, 4  # spec.rule
ALIGN, SEARCH16, SEARCH256, JOINT = 1, 2, 3, 4  # spec.mbs
SIGN, EXPONENT = 0x80000000, 0x7F800000
NAN_BITS = 0x7FC00000


class Spec(NamedTuple):
    """A recipe and the dtype that its values are rounded to, as numbers: numba passes them in registers."""

    rule: int
    carry: int  # pow2: added to m's bits, overflows into the exponent where the scale is one step higher
    q: int  # pow2: exponents between the maximum's and the scale's
    steps: int  # e8m{k}: k
    nan_code: int  # of a poisoned block's scale
    mantissa_bits: int  # of an element
    least: int  # bits of the element's smallest normal value as float32
    top: float  # the element's largest value
    mbs: int
    group: int  # vectors of 32 that are in cache together: MBS's macro-block
    blocks: int  # blocks in a vector: 1, NVFP4 2
    corrected: bool  # whether there is a second pass (OF with alpha > 0)
    alpha: float
    largest: float  # the largest finite value of the tensor's dtype


@functools.lru_cache(maxsize=256)
def spec_of(recipe: Recipe, dtype: torch.dtype) -> Spec:
    """`dtype`: the tensor's, whose largest finite value caps the grid."""
    fmt = recipe.format
    assert fmt is not None
    steps = int(recipe.rule[3:]) if recipe.rule.startswith("e8m") else 0
    above = {"floor": 0x7FFFFF, "even": 0x5FFFFF}.get(recipe.rule, 0x600000 if recipe.base == "mxfp8" else 0x400000)
    if recipe.base == "nvfp4":
        rule, nan_code = (FOUR_OVER_SIX if recipe.rule == "4over6" else NV), 0x7F
    else:
        rule, nan_code = (E8M if steps else IDEAL if recipe.rule == "ideal" else POW2), 255 << steps
    return Spec(
        rule=rule,
        carry=0x7FFFFF - above,
        q=8 if recipe.base == "mxfp8" else 2,
        steps=steps,
        nan_code=nan_code,
        mantissa_bits=fmt.element.mantissa_bits,
        least=(127 + fmt.element.min_exponent) << 23,
        top=fmt.element.max,
        mbs=0 if recipe.mbs is None else {"align": 1, "search16": 2, "search256": 3, "joint": 4}[recipe.mbs],
        group=recipe.macro // 32 if recipe.mbs else 4,
        blocks=32 // fmt.block,
        corrected=bool(recipe.of),
        alpha=float(recipe.of or 0.0),
        largest=torch.finfo(dtype).max,
    )


class Paths(NamedTuple):
    """What a kernel is compiled for: an argument that is None leaves a branch out, and half of the time to compile."""

    nv: int | None
    searched: int | None


def paths_of(spec: Spec) -> Paths:
    return Paths(1 if spec.blocks == 2 else None, 1 if spec.mbs > ALIGN else None)


def unsupported(recipe: Recipe, dtype: torch.dtype) -> str | None:
    """Why the CPU kernels can't serve `recipe` in `dtype`; None: they can."""
    return None if dtype in DTYPES else f"its kernels take float32, bfloat16 and float16, not {dtype}"


# --- one block --------------------------------------------------------------------------------------------------------


@inlined
def round_to_grid(a, mantissa_bits, least):
    """Magnitudes to the nearest value of the element grid, ties to even; the grid goes on above its largest value."""
    unit = maximum(bits(a) & EXPONENT, least)  # 2^floor(log2 a), not below the smallest normal value
    magic = floats(unit + ((23 - mantissa_bits) << 23))
    return (a + magic) - magic


@inlined
def halving_sum_16(v):
    v = halve(halve(halve(v)))
    return lane(v, 0) + lane(v, 1)


@inlined
def halving_sum(v):
    """The sum of 32 lanes by corrections.halving_sum's tree."""
    return halving_sum_16(halve(v))


@inlined
def pow2_of_code(code):
    """2^(code - 127), code in [0, 254]."""
    return floats(max(code << 23, 0x00400000))


@inlined
def grid_cap(largest_over_scale, spec):
    """The largest grid value not above largest / s (at least 1: a normal value of every grid)."""
    a = min(largest_over_scale, F(spec.top))
    return floats(bits(a) & ~((1 << (23 - spec.mantissa_bits)) - 1))


@inlined
def scale_pow2(m, lower, spec):
    """(scale, code, clamped) of ceil, floor, even. lower: 1 takes one off the exponent."""
    raw = ((m + spec.carry) >> 23) - spec.q - lower
    code = max(raw, 0)
    return pow2_of_code(code), code, raw < 0 and m != 0


@inlined
def scale_e8m(m, lower, steps):
    """The smallest (1 + j / 2^k) 2^E that is at least m / 6."""
    if m == 0:
        return pow2_of_code(0), 0, False
    b = bits64(np.float64(floats(m)) / 6.0)
    j = ((b & ((1 << 52) - 1)) + (1 << (52 - steps)) - 1) >> (52 - steps)
    raw = (b >> 52) - 1023 - lower
    if j == 1 << steps:
        raw += 1
        j = 0
    clamped = raw < -127
    if clamped:
        raw = -127
        j = 0
    s = pow2_of_code(raw + 127) * (F(1) + F(j) * F(1.0 / (1 << steps)))
    return s, ((raw + 127) << steps) | j, clamped


STRICT = [1, 0, 1, 0, 1, 0, 1, 0]  # a tie goes to the even code: below the 1st, 3rd ... middle
MIDDLES = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 0.25]  # between E2M1's values; and the deadzone's edge, m / 24
_middles = constant("f64", MIDDLES)
_middles_over_6 = constant("f64", [t / 6 for t in MIDDLES])
_values_over_6 = constant("f64", [g / 6 for g in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)])
_strict = constant("m", STRICT)
_one = constant("i32", [1] * 8)


@inlined
def ideal_thresholds(m):
    """int32 bits of the least float32 |x| that lies above each of MIDDLES · m / 6 (at or above, where not STRICT).

    The float32 nearest to the quotient is within an ulp; 6·c and t·m are exact in float64 and tell on which side.
    """
    m64 = np.float64(floats(m))
    c = to_f32(_middles_over_6() * m64)
    six, wanted = to_f64(c) * 6.0, _middles() * m64
    short = (six < wanted) | ((six == wanted) & _strict())
    return bits(c) + select(short, _one(), 0)


@inlined
def ideal_values(m):
    """g · m / 6 of E2M1's eight g, rounded once to float32."""
    return to_f32(_values_over_6() * np.float64(floats(m)))


@inlined
def ideal_e2m1(a, m):
    """|Q*|: each magnitude's nearest of g · m / 6."""
    b, thresholds, values = bits(a), ideal_thresholds(m), ideal_values(m)
    out = select(b >= lane(thresholds, 0), lane(values, 1), splat(0.0, a))
    out = select(b >= lane(thresholds, 1), lane(values, 2), out)
    out = select(b >= lane(thresholds, 2), lane(values, 3), out)
    out = select(b >= lane(thresholds, 3), lane(values, 4), out)
    out = select(b >= lane(thresholds, 4), lane(values, 5), out)
    out = select(b >= lane(thresholds, 5), lane(values, 6), out)
    return select(b >= lane(thresholds, 6), lane(values, 7), out)


@inlined
def _ideal_e4m3_part(a, m64):
    quotient = to_f64(a) * E4M3_MAX / (m64 if m64 > 0 else 1.0)
    unit = maximum(bits64(quotient) & (0x7FF << 52), (1023 - 6) << 52)
    magic = floats64(unit + ((52 - 3) << 52))
    return to_f32(minimum((quotient + magic) - magic, E4M3_MAX) / E4M3_MAX * m64)


E4M3_MAX = E4M3.max


@inlined
def ideal_e4m3(a, m):
    """The same for E4M3, in float64 throughout."""
    m64 = np.float64(floats(m))
    low, high = low_half(a), high_half(a)
    return concat(
        concat(_ideal_e4m3_part(low_half(low), m64), _ideal_e4m3_part(high_half(low), m64)),
        concat(_ideal_e4m3_part(low_half(high), m64), _ideal_e4m3_part(high_half(high), m64)),
    )


@inlined
def quantize_pow2(y, m, lower, spec):
    """A block of MXFP4 (ceil, floor, even) or MXFP8 -> (|grid|, |value|, scale, code, clamped)."""
    s, code, clamped = scale_pow2(m, lower, spec)
    inverse = floats((254 - code) << 23)  # exact: the product is the quotient
    cap = grid_cap(F(spec.largest) * inverse, spec)
    if m >= INF:
        s, code = floats(NAN_BITS), spec.nan_code
    grid = minimum(round_to_grid(magnitude(y) * inverse, spec.mantissa_bits, spec.least), cap)
    return grid, grid * s, s, code, clamped and m < INF


@inlined
def quantize_e8m(y, m, lower, spec):
    s, code, clamped = scale_e8m(m, lower, spec.steps)
    cap = grid_cap(F(spec.largest) / s, spec)
    grid = minimum(round_to_grid(magnitude(y) / s, spec.mantissa_bits, spec.least), cap)
    if m >= INF:
        s, code, clamped = floats(NAN_BITS), spec.nan_code, False
    return grid, grid * s, s, code, clamped


@inlined
def quantize_ideal(y, m):
    a = magnitude(y)
    value = ideal_e2m1(a, m)
    if m >= INF:
        value = splat(floats(NAN_BITS), a)
    return splat(0.0, a), value, floats(m) if m < INF else floats(NAN_BITS), 0, False


@inlined
def quantize_block(y, m, lower, spec):
    """A block of MXFP4 or MXFP8 by spec.rule -> (|grid|, |value|, scale, code, clamped).

    `ideal` gives no grid, and as its scale the block's maximum, like scaling.block_scale.
    """
    if spec.rule == POW2:
        return quantize_pow2(y, m, lower, spec)
    if spec.rule == E8M:
        return quantize_e8m(y, m, lower, spec)
    return quantize_ideal(y, m)


# --- NVFP4 ------------------------------------------------------------------------------------------------------------


@inlined
def scale_e4m3(m, tensor_scale, factor):
    """(scale, code): RNE to E4M3 of m / 6 / tensor_scale · factor, not 0 for a block that isn't zero."""
    relative = floats(m) / F(6) / (tensor_scale if tensor_scale != F(0) else F(1)) * factor
    unit = max(bits(relative) & EXPONENT, (127 - 6) << 23)
    magic = floats(unit + (20 << 23))
    grid = min((relative + magic) - magic, F(448))
    grid = max(grid, F(2.0**-9)) if m != 0 else F(0)
    b = bits(grid)
    code = (b >> 20) - (120 << 3) if b >= (127 - 6) << 23 else int(grid * F(2.0**9))
    return grid * tensor_scale, code


@inlined
def _halves(first, second, like):
    """Two numbers, each in one half of a vector."""
    return concat(splat(first, low_half(like)), splat(second, low_half(like)))


@inlined
def _under_scales(y, s0, s1, spec):
    d0, d1 = s0 if s0 != F(0) else F(1), s1 if s1 != F(0) else F(1)
    cap = _halves(grid_cap(F(spec.largest) / d0, spec), grid_cap(F(spec.largest) / d1, spec), y)
    grid = minimum(round_to_grid(magnitude(y) / _halves(d0, d1, y), 1, 127 << 23), cap)
    return grid, grid * _halves(s0, s1, y)


@inlined
def quantize_nv(y, m0, m1, tensor_scale, spec):
    """Two blocks of NVFP4 -> (|grid|, |value|, the scales, their codes)."""
    (s0, c0), (s1, c1) = scale_e4m3(m0, tensor_scale, F(1)), scale_e4m3(m1, tensor_scale, F(1))
    grid, value = _under_scales(y, s0, s1, spec)
    if spec.rule == FOUR_OVER_SIX:
        (t0, d0), (t1, d1) = scale_e4m3(m0, tensor_scale, F(1.5)), scale_e4m3(m1, tensor_scale, F(1.5))
        grid4, value4 = _under_scales(y, t0, t1, spec)
        error, error4 = value - magnitude(y), value4 - magnitude(y)
        error, error4 = error * error, error4 * error4
        if halving_sum_16(low_half(error4)) < halving_sum_16(low_half(error)):
            s0, c0 = t0, d0
            grid, value = concat(low_half(grid4), high_half(grid)), concat(low_half(value4), high_half(value))
        if halving_sum_16(high_half(error4)) < halving_sum_16(high_half(error)):
            s1, c1 = t1, d1
            grid, value = concat(low_half(grid), high_half(grid4)), concat(low_half(value), high_half(value4))
    if m0 >= INF:
        s0, c0 = floats(NAN_BITS), spec.nan_code
        value = concat(splat(s0, low_half(y)), high_half(value))
    if m1 >= INF:
        s1, c1 = floats(NAN_BITS), spec.nan_code
        value = concat(low_half(value), splat(s1, low_half(y)))
    return grid, value, s0, s1, c0, c1

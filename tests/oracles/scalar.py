"""The numerics written out a second time, one number at a time, in exact rational arithmetic.

Slow and plain on purpose: this is what every vectorised implementation is compared with, bit for bit. It imports
nothing from mxrl, torch or numpy; a number is a Python float (every float16, bfloat16, float32 and float64 value is one
exactly) and every operation is exact (`fractions.Fraction` or whole numbers), then rounded once, by `round_to`, where
the arithmetic rounds.

    x_RK    rows of K numbers, quantized in blocks along K
    A       the arithmetic's format: float64 for float64 tensors, float32 for everything else
    T       the tensor's own format; the result is rounded to it once

Sources: OCP Microscaling Formats v1.0 (E2M1, E4M3, E8M0, floor), arXiv 2605.20402 (ceil, decomposition, OF),
arXiv 2603.08713 (MBS), arXiv 2512.02010 (NVFP4 4/6).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

# --- floats ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Float:
    """An IEEE-like binary float with subnormals and infinities."""

    exponent_bits: int
    mantissa_bits: int

    @property
    def max_exponent(self) -> int:
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def min_exponent(self) -> int:
        return 1 - self.max_exponent

    @property
    def max(self) -> Fraction:
        return (2 - pow2(-self.mantissa_bits)) * pow2(self.max_exponent)


def pow2(exponent: int) -> Fraction:
    return Fraction(2**exponent) if exponent >= 0 else Fraction(1, 2**-exponent)


def floor_log2(value: Fraction) -> int:
    """The e with 2^e <= value < 2^(e+1), exactly."""
    e = value.numerator.bit_length() - value.denominator.bit_length()
    return e if pow2(e) <= value else e - 1


FLOAT64 = Float(11, 52)
FLOAT32 = Float(8, 23)
BFLOAT16 = Float(8, 7)
FLOAT16 = Float(5, 10)
FLOATS = {"float64": FLOAT64, "float32": FLOAT32, "bfloat16": BFLOAT16, "float16": FLOAT16}


def round_to(value: Fraction, fmt: Float, negative: bool = False) -> float:
    """Round to nearest, ties to even; beyond the largest value: infinity. `negative` is the sign of an exact zero."""
    return round_ratio(value.numerator, value.denominator, fmt, negative)


def round_ratio(n: int, d: int, fmt: Float, negative: bool = False) -> float:
    """`round_to` of n / d, d > 0, in whole numbers (Fraction's own arithmetic spends its time on common divisors)."""
    if n == 0:
        return -0.0 if negative else 0.0
    size = abs(n)
    e = size.bit_length() - d.bit_length()
    if size << max(-e, 0) < d << max(e, 0):
        e -= 1  # 2^e <= size / d < 2^(e + 1)
    unit = max(e, fmt.min_exponent) - fmt.mantissa_bits  # the last place is worth 2^unit
    count, rest = divmod(size << max(-unit, 0), d << max(unit, 0))
    twice = 2 * rest - (d << max(unit, 0))
    count += twice > 0 or (twice == 0 and count % 2 == 1)
    too_large = count.bit_length() + unit - 1 > fmt.max_exponent
    result = math.inf if too_large else math.ldexp(count, unit)
    return -result if n < 0 else result


def is_negative(x: float) -> bool:
    return math.copysign(1.0, x) < 0


def mul(a: float, b: float, fmt: Float) -> float:
    (an, ad), (bn, bd) = a.as_integer_ratio(), b.as_integer_ratio()
    return round_ratio(an * bn, ad * bd, fmt, is_negative(a) != is_negative(b))


def add(a: float, b: float, fmt: Float) -> float:
    (an, ad), (bn, bd) = a.as_integer_ratio(), b.as_integer_ratio()
    return round_ratio(an * bd + bn * ad, ad * bd, fmt, is_negative(a) and is_negative(b))


def div(a: float, b: float, fmt: Float) -> float:
    (an, ad), (bn, bd) = a.as_integer_ratio(), b.as_integer_ratio()
    sign = -1 if bn < 0 else 1
    return round_ratio(sign * an * bd, sign * ad * bn, fmt, is_negative(a) != is_negative(b))


def saturate(x: float, fmt: Float) -> float:
    """The largest finite value of `fmt` instead of anything beyond it."""
    largest = float(fmt.max)
    return math.copysign(largest, x) if abs(x) > largest else x


# --- element grids --------------------------------------------------------------------------------------------------

# Non-negative values by code without the sign bit. E2M1, OCP MX table 5; E4M3, OCP FP8: 0x7f is NaN.
E2M1 = [Fraction(v) for v in ("0", "1/2", "1", "3/2", "2", "3", "4", "6")]
E4M3 = [(Fraction(c, 8) if c < 8 else 1 + Fraction(c % 8, 8)) * pow2(max(c // 8, 1) - 7) for c in range(0x7F)]
E2M1_MIDDLES, E4M3_MIDDLES = ([float((a + b) / 2) for a, b in pairwise(grid)] for grid in (E2M1, E4M3))  # exact


def nearest(value: Fraction | float, grid: list[Fraction]) -> int:
    """Code of the grid value nearest to |value|; ties to the even code (its mantissa bit is then 0); saturates."""
    middles = E4M3_MIDDLES if grid is E4M3 else E2M1_MIDDLES
    size = abs(value)
    code = bisect_left(middles, size)  # how many middles are below; Python compares floats and Fractions exactly
    tie = code < len(middles) and middles[code] == size
    return code + (code % 2) if tie else code


# --- one block ------------------------------------------------------------------------------------------------------


@dataclass
class Block:
    """One quantized block: codes with the sign bit on top (None in a NaN block), scale code, values in A."""

    codes: list[int | None]
    scale: int | None
    values: list[float]


def e8m0(exponent: int) -> int:
    return max(-127, min(127, exponent))


def mx_exponent(maximum: Fraction, base: str, rule: str) -> int:
    """The exponent of the power-of-two scale of a block whose largest magnitude is `maximum` > 0."""
    e = floor_log2(maximum)
    f = maximum / pow2(e)
    if base == "mxfp8":  # the smallest power of two with maximum / s <= 448 = 1.75 * 2^8
        return e8m0(e - 8 if f <= Fraction(7, 4) else e - 7)
    if rule == "ceil":  # the smallest with maximum / s <= 6 = 1.5 * 2^2
        return e8m0(e - 2 if f <= Fraction(3, 2) else e - 1)
    if rule == "floor":
        return e8m0(e - 2)
    if rule == "even":  # 1.75 and above round up to 2 when one mantissa bit is kept
        return e8m0(e - 2 if f < Fraction(7, 4) else e - 1)
    raise ValueError(rule)


def e8m_scale(maximum: Fraction, k: int) -> tuple[Fraction, int]:
    """The smallest (1 + j / 2^k) 2^E that is at least maximum / 6, and its code (E + 127) << k | j."""
    wanted = max(maximum / 6, pow2(-127))
    e = floor_log2(wanted)
    j = math.ceil((wanted / pow2(e) - 1) * 2**k)
    if j == 2**k:
        e, j = e + 1, 0
    if e > 127:  # float64 only
        e, j = 127, 0
    return (1 + Fraction(j, 2**k)) * pow2(e), ((e + 127) << k) | j


def encode(xs: list[float], quotient, scale: Fraction, grid: list[Fraction], a: Float, t: Float) -> tuple:
    """Codes and values of a block with a known scale; a grid value that overflows T gives way to one that fits."""
    top = len(grid) - 1
    while overflows(round_to(grid[top] * scale, a), t):
        top -= 1
    sign_bit = 128 if grid is E4M3 else 8
    codes, values, known = [], [], {}
    for x in xs:
        code = min(nearest(quotient(x), grid), top)
        if code not in known:
            known[code] = round_to(grid[code] * scale, a)
        codes.append(code + sign_bit * is_negative(x))
        values.append(-known[code] if is_negative(x) else known[code])
    return codes, values


def overflows(value: float, t: Float) -> bool:
    return math.isinf(value) or math.isinf(round_to(Fraction(value), t))


def finite(xs: list[float]) -> bool:
    return all(math.isfinite(x) for x in xs)


def largest(xs: list[float]) -> Fraction:
    return max((Fraction(abs(x)) for x in xs), default=Fraction(0))


def quantize_block(xs: list[float], base: str, rule: str, a: Float, t: Float, lower: int = 0) -> Block:
    """MXFP4 and MXFP8. `lower` takes that much off the exponent (the joint search's ceil - 1)."""
    k = int(rule[3:]) if rule.startswith("e8m") else 0
    if not finite(xs):
        return Block([None] * len(xs), None if rule == "ideal" else 255 << k, [math.nan] * len(xs))
    grid = E4M3 if base == "mxfp8" else E2M1
    m = largest(xs)
    if m == 0:
        codes, values = encode(xs, lambda x: Fraction(0), Fraction(0), grid, a, t)
        return Block(codes, 0, values)
    if rule == "ideal":  # the quotient is decided exactly; only the value is rounded
        codes, values = encode(xs, lambda x: Fraction(x) * 6 / m, m / 6, grid, a, t)
        return Block(codes, None, values)
    if k:
        scale, code = e8m_scale(m, k)
        codes, values = encode(xs, lambda x: Fraction(round_to(Fraction(x) / scale, a)), scale, grid, a, t)
        return Block(codes, code, values)
    exponent = e8m0(mx_exponent(m, base, rule) - lower)

    def over_power_of_two(x: float) -> Fraction | float:  # a float32 over 2^exponent is a Python float exactly
        return math.ldexp(x, -exponent) if a is FLOAT32 else Fraction(x) / pow2(exponent)

    codes, values = encode(xs, over_power_of_two, pow2(exponent), grid, a, t)
    return Block(codes, exponent + 127, values)


# --- NVFP4 ----------------------------------------------------------------------------------------------------------


def nv_block(xs: list[float], e4m3_code: int, tensor_scale: float, a: Float, t: Float) -> Block:
    scale = Fraction(round_to(E4M3[e4m3_code] * Fraction(tensor_scale), a))
    if scale == 0:
        codes, values = encode(xs, lambda x: Fraction(0), Fraction(0), E2M1, a, t)
    else:
        codes, values = encode(xs, lambda x: Fraction(round_to(Fraction(x) / scale, a)), scale, E2M1, a, t)
    return Block(codes, e4m3_code, values)


def nv_scale(m: Fraction, tensor_scale: float, expand: Fraction, a: Float) -> int:
    """E4M3 code of a block's scale: m / 6 / tensor_scale (times 3/2 for 'the maximum goes to 4'), each step rounded."""
    if m == 0 or tensor_scale == 0:
        return 0
    ratio = div(round_to(m / 6, a), tensor_scale, a)
    ratio = round_to(Fraction(ratio) * expand, a) if math.isfinite(ratio) else math.inf
    return max(1, nearest(Fraction(min(ratio, 448.0)), E4M3))


def halving_sum(values: list[float], a: Float) -> float:
    """Add i and i + n/2, then i and i + n/4, ...; the length is a power of two."""
    while len(values) > 1:
        half = len(values) // 2
        values = [add_finite(values[i], values[i + half], a) for i in range(half)]
    return values[0]


def add_finite(x: float, y: float, a: Float) -> float:
    return math.inf if math.inf in (x, y) else add(x, y, a)


def pad(values: list[float], length: int) -> list[float]:
    return values + [0.0] * (length - len(values))


def square(x: float, a: Float) -> float:
    return math.inf if math.isinf(x) else mul(x, x, a)


def nv_quantize(rows: list[list[float]], rule: str, a: Float, t: Float) -> tuple[list[list[Block]], float]:
    """Blocks of 16 and the float32 tensor scale."""
    blocks_of = [[row[i : i + 16] for i in range(0, len(row), 16)] for row in rows]
    top = max((largest(b) for blocks in blocks_of for b in blocks if finite(b)), default=Fraction(0))
    tensor_scale = saturate(round_to(top / (6 * (256 if rule == "4over6" else 448)), FLOAT32), FLOAT32)
    if top > 0:
        tensor_scale = max(tensor_scale, 2.0**-149)
    out = []
    for blocks in blocks_of:
        out.append([])
        for xs in blocks:
            if not finite(xs):
                out[-1].append(Block([None] * len(xs), 0x7F, [math.nan] * len(xs)))
                continue
            m = largest(xs)
            best = nv_block(xs, nv_scale(m, tensor_scale, Fraction(1), a), tensor_scale, a, t)
            if rule == "4over6" and m > 0:
                four = nv_block(xs, nv_scale(m, tensor_scale, Fraction(3, 2), a), tensor_scale, a, t)
                errors = [
                    halving_sum(pad([square(add(v, -x, a), a) for v, x in zip(b.values, xs, strict=True)], 16), a)
                    for b in (best, four)
                ]
                best = four if errors[1] < errors[0] else best
            out[-1].append(best)
    return out, tensor_scale


# --- MBS ------------------------------------------------------------------------------------------------------------


def align_mantissa(maximum: Fraction) -> int:
    """k of the prescale p = (256 + k) / 256 that brings the macro-block's maximum to (just below) 6 * 2^E."""
    if maximum == 0:
        return 0
    f = maximum / pow2(floor_log2(maximum))
    return math.floor((384 if f <= Fraction(3, 2) else 768) / f) - 256


def mbs_block(xs: list[float], k: int, rule: str, lower: int, a: Float, t: Float) -> Block:
    """Q(p x) * fl(1 / p) with p x saturated in T; a block that is not finite stays so."""
    p = 1 + Fraction(k, 256)
    if not finite(xs):
        return quantize_block(xs, "mxfp4", rule, a, t)
    scaled = [saturate(mul(x, float(p), a), t) for x in xs]
    block = quantize_block(scaled, "mxfp4", rule, a, t, lower)
    inverse = round_to(1 / p, a)
    block.values = [mul(v, inverse, a) for v in block.values]
    return block


def block_error(block: Block, xs: list[float], exponent: int, a: Float) -> float:
    """Squared error of one block, in units of 2^exponent, by the fixed tree; a block that is not finite counts 0."""
    if not finite(xs):
        return 0.0
    unit = float(pow2(-max(-126, min(127, exponent))))
    errors = [mul(add(r, -x, a), unit, a) for r, x in zip(block.values, xs, strict=True)]
    return halving_sum(pad([square(e, a) for e in errors], 32), a)


def mbs_macro(
    blocks: list[list[float]], mode: str, rule: str, count: int, a: Float, t: Float
) -> tuple[list[Block], int]:
    """One macro-block, the blocks of which are `blocks`; a whole one has `count` of them."""
    top = max((largest(b) for b in blocks if finite(b)), default=Fraction(0))
    if mode == "align":
        k = align_mantissa(top)
        return [mbs_block(b, k, rule, 0, a, t) for b in blocks], k
    if top == 0:
        return [mbs_block(b, 0, rule, 0, a, t) for b in blocks], 0
    exponent = floor_log2(top)
    padded = 1 << (count - 1).bit_length()
    best: tuple[float, list[Block], int] | None = None
    for k in range(0, 256, 1 if mode == "search256" else 16):
        chosen, errors = [], []
        for xs in blocks:
            block = mbs_block(xs, k, rule, 0, a, t)
            error = block_error(block, xs, exponent, a)
            if mode == "joint":
                lower = mbs_block(xs, k, rule, 1, a, t)
                lower_error = block_error(lower, xs, exponent, a)
                if lower_error < error:
                    block, error = lower, lower_error
            chosen.append(block)
            errors.append(error)
        total = halving_sum(pad(errors, padded), a)
        if best is None or total < best[0]:
            best = (total, chosen, k)
    assert best is not None
    return best[1], best[2]


# --- tensors --------------------------------------------------------------------------------------------------------


@dataclass
class Pass:
    """One set of codes: blocks by row, macro-block mantissas by row (or None), NVFP4's tensor scale (or None)."""

    blocks: list[list[Block]]
    mantissas: list[list[int]] | None = None
    tensor_scale: float | None = None

    @property
    def values(self) -> list[list[float]]:
        return [[v for block in row for v in block.values] for row in self.blocks]

    @property
    def scales(self) -> list[list[int | None]]:
        return [[block.scale for block in row] for row in self.blocks]

    @property
    def codes(self) -> list[list[int | None]]:
        return [[c for block in row for c in block.codes] for row in self.blocks]


@dataclass
class Quantized:
    """`values` in T: what fake_quantize returns. `first`, and with OF `second`: what is stored."""

    values: list[list[float]]
    first: Pass
    second: Pass | None = None


def base_pass(rows: list[list[float]], recipe, a: Float, t: Float) -> Pass:
    """One pass of the base quantizer with MBS, without OF."""
    if recipe.base == "nvfp4":
        blocks, tensor_scale = nv_quantize(rows, recipe.rule, a, t)
        return Pass(blocks, tensor_scale=tensor_scale)
    out = Pass([], [] if recipe.mbs else None)
    for row in rows:
        blocks = [row[i : i + 32] for i in range(0, len(row), 32)]
        if out.mantissas is None:
            out.blocks.append([quantize_block(b, recipe.base, recipe.rule, a, t) for b in blocks])
            continue
        out.blocks.append([])
        out.mantissas.append([])
        count = recipe.macro // 32
        for i in range(0, len(blocks), count):
            done, k = mbs_macro(blocks[i : i + count], recipe.mbs, recipe.rule, count, a, t)
            out.blocks[-1] += done
            out.mantissas[-1].append(k)
    return out


def quantize(rows: list[list[float]], recipe, dtype: str) -> Quantized:
    """Quantize rows of numbers of format `dtype`; `recipe` has the fields base, rule, mbs, of and macro."""
    t = FLOATS[dtype]
    a = FLOAT64 if dtype == "float64" else FLOAT32

    def final(value: float) -> float:
        return value if math.isnan(value) else round_to(Fraction(value), t, is_negative(value))

    first = base_pass(rows, recipe, a, t)
    if recipe.of is None:
        return Quantized([[final(v) for v in row] for row in first.values], first)
    alpha = round_to(Fraction(recipe.of), a)
    residual = [
        [math.nan if math.isnan(v) else add(x, -v, a) for x, v in zip(row, vs, strict=True)]
        for row, vs in zip(rows, first.values, strict=True)
    ]
    second = base_pass(residual, recipe, a, t)
    out = []
    for row, ones, twos in zip(rows, first.values, second.values, strict=True):
        out.append([])
        for x, x1, x2 in zip(row, ones, twos, strict=True):
            if math.isnan(x1):
                out[-1].append(math.nan)
                continue
            total = saturate(add(x1, mul(alpha, x2, a), a), t)
            out[-1].append(final(total if total else math.copysign(0.0, x)))
    return Quantized(out, first, second)


# --- the decomposition ----------------------------------------------------------------------------------------------


@dataclass
class Parts:
    """Error components of one tensor, exact, by row; None in a block that is not finite."""

    scale: list[list[Fraction | None]]
    deadzone: list[list[Fraction | None]]
    grid: list[list[Fraction | None]]
    mask: list[list[bool]]
    ideal: list[list[float]]


def decompose(rows: list[list[float]], quantized: list[list[float]], base: str, dtype: str) -> Parts:
    """Split quantized - x over Q*, the quantizer with scale m / q_max, and D = {|x| < m q_min / (2 q_max)}."""
    a = FLOAT64 if dtype == "float64" else FLOAT32
    grid, size = {"mxfp4": (E2M1, 32), "nvfp4": (E2M1, 16), "mxfp8": (E4M3, 32)}[base]
    parts = Parts([], [], [], [], [])
    for row, quantized_row in zip(rows, quantized, strict=True):
        for field in (parts.scale, parts.deadzone, parts.grid, parts.mask, parts.ideal):
            field.append([])
        for i in range(0, len(row), size):
            xs, cs = row[i : i + size], quantized_row[i : i + size]
            if not finite(xs):
                for field in (parts.scale, parts.deadzone, parts.grid):
                    field[-1] += [None] * len(xs)
                parts.mask[-1] += [False] * len(xs)
                parts.ideal[-1] += [math.nan] * len(xs)
                continue
            m = largest(xs)
            star = m / grid[-1]
            for x, c in zip(xs, cs, strict=True):
                code = nearest(Fraction(x) / star, grid) if m else 0
                ideal = math.copysign(round_to(grid[code] * star, a), x)
                dead = abs(Fraction(x)) < star * grid[1] / 2
                rest = Fraction(ideal) - Fraction(x)
                parts.scale[-1].append(Fraction(c) - Fraction(ideal))
                parts.deadzone[-1].append(rest if dead else Fraction(0))
                parts.grid[-1].append(Fraction(0) if dead else rest)
                parts.mask[-1].append(dead)
                parts.ideal[-1].append(ideal)
    return parts


# --- storage --------------------------------------------------------------------------------------------------------


def pack(codes: list[int], base: str) -> list[int]:
    """Bytes of one row: MXFP8 one code a byte; FP4 two, the low nibble is the even index."""
    if base == "mxfp8":
        return codes
    padded = codes + [0] * (len(codes) % 2)
    return [low | high << 4 for low, high in zip(padded[::2], padded[1::2], strict=True)]

"""The quantization passes as device functions: `ops.qdq.passes` of one tile, for every Triton kernel.

`quantize_tile` is the whole of it; a kernel takes what it wants of the results, and the compiler drops the rest. Tiles,
and what must hold where this runs, are described in `grids_triton`.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from mxrl.ops.grids_triton import (
    INF_BITS,
    INTERPRETED,
    MAGNITUDE,
    SIGN,
    as_bits,
    as_float,
    block_amax,
    block_scale,
    from_grid,
    halving_sum,
    mantissa_bits,
    round_once,
    round_product_to_grid,
    round_to_grid,
    to_grid,
    widen,
    with_sign,
)
from mxrl.ops.mbs_triton import align_mantissa, macro_amax, mbs_factors, mbs_pass, search_mantissa
from mxrl.recipes import Recipe

__all__ = [
    "INF_BITS", "INTERPRETED", "MAGNITUDE", "SIGN", "as_bits", "as_float", "block_amax", "block_scale", "from_grid",
    "halving_sum", "macro_amax", "mantissa_bits", "mbs_factors", "quantize_tile", "quantize_values", "round_once",
    "round_to_grid", "rule_of", "to_grid", "widen", "with_sign",
]  # fmt: skip


def rule_of(recipe: Recipe) -> str:
    """The RULE of the functions below: a rule of mxfp4, or "mxfp8", "nvfp4", "4over6"."""
    if recipe.base == "nvfp4":
        return recipe.rule or "nvfp4"
    return recipe.rule if recipe.base == "mxfp4" else recipe.base


@triton.jit
def base_pass(
    a, m, lower, tensor_scale, RULE: tl.constexpr, LARGEST: tl.constexpr, CAPPED: tl.constexpr,
    NARROW: tl.constexpr = False,
):  # fmt: skip
    """The base quantizer on magnitudes a [M, G, n] with block maxima m (bits, [M, G]).

    Returns the dequantized magnitudes, the grid's, and value, code, clamped of the scales as `block_scale`.
    """
    value, inverse, code, clamped = block_scale(m, lower, tensor_scale, RULE)
    grid = to_grid(a, value, inverse, 1.0, RULE, LARGEST, CAPPED, NARROW)
    dequantized = from_grid(grid, value, RULE)
    if RULE == "4over6":
        value4, inverse4, code4, _ = block_scale(m, lower, tensor_scale, RULE, True)
        grid4 = to_grid(a, value4, inverse4, 1.0, RULE, LARGEST, CAPPED)
        dequantized4 = from_grid(grid4, value4, RULE)
        error, error4 = dequantized - a, dequantized4 - a
        four = halving_sum(error4 * error4) < halving_sum(error * error)
        grid = tl.where(four[:, :, None], grid4, grid)
        dequantized = tl.where(four[:, :, None], dequantized4, dequantized)
        value = tl.where(four, value4, value)
        code = tl.where(four, code4, code)
    return dequantized, grid, value, code, clamped


@triton.jit
def _one_pass(
    a, m, tensor_scale, RULE: tl.constexpr, MBS: tl.constexpr, LARGEST: tl.constexpr, CAPPED: tl.constexpr,
    NARROW: tl.constexpr, OWNED: tl.constexpr,
):  # fmt: skip
    """One pass with its choice of k: base_pass's five, and k [M] (0 without MBS)."""
    k = tl.max(m * 0, axis=1)
    if MBS == "":
        value, grid, scale, code, clamped = base_pass(a, m, 0, tensor_scale, RULE, LARGEST, CAPPED, NARROW)
    else:
        lower = 0
        if MBS == "align":
            k = align_mantissa(macro_amax(m))
        else:
            k, lower = search_mantissa(a, m, MBS, RULE, LARGEST, NARROW, OWNED)
        p, inverse_p = mbs_factors(k)
        value, grid, scale, code, clamped = mbs_pass(
            a, m, p[:, None], inverse_p[:, None], lower, RULE, LARGEST, CAPPED, NARROW
        )
    return value, grid, scale, code, clamped, k


@triton.constexpr_function
def second_capped(rule, mbs):
    """Whether OF's second pass can clip, saturate or overflow: then it works on magnitudes, else on signed values.

    floor and even clip above 6 at any size. Otherwise the residuals are at most 5/8 of `largest`: x - g·s/p is largest
    where p·x saturated, and then g·s is 3/4 of it. `align` sends them no higher than 3/4 of it; a searched p may.
    """
    return not ((rule == "ceil" or rule.startswith("e8m")) and mbs in ("", "align"))


@triton.jit
def quantize_tile(
    x, tensor_scale, alpha, RULE: tl.constexpr, MBS: tl.constexpr, OF: tl.constexpr, LARGEST: tl.constexpr,
    NARROW: tl.constexpr, OWNED: tl.constexpr = False,
):  # fmt: skip
    """`ops.qdq.passes` of a tile x [M, G, n] float32: everything that a kernel may want.

    tensor_scale: float32 scalar (NVFP4), else 0.0. alpha: float32 scalar; OF: 0 without, else
    `of_kind`. MBS: "" or its mode. LARGEST: of the dtype that is quantized. NARROW: x came from bf16 or fp16.
    OWNED: whether a thread holds whole blocks (`load_tile`); a hint for the search, the result is the same.
    Returns
        value                                signed, before the last rounding [M, G, n]
        grid1, scale1, code1, clamped1, k1   magnitudes [M, G, n]; of blocks [M, G]: float32 (NaN if poisoned), int32,
                                             bool; int32 [M]
        residual, grid2, scale2, code2, k2   the second pass's, of x - x1 [M, G, n]; without OF the first one's again
    A grid's sign is its input's: x for grid1, residual for grid2.
    """
    a = tl.abs(x)
    m = block_amax(x)
    v1, grid1, scale1, code1, clamped1, k1 = _one_pass(a, m, tensor_scale, RULE, MBS, LARGEST, True, NARROW, OWNED)
    if OF == 0:
        value = with_sign(v1, x)
        return value, grid1, scale1, code1, clamped1, k1, x, grid1, scale1, code1, k1
    rest = a - v1  # the residual's magnitude and, where x1 overshot, a sign
    m = block_amax(rest)
    if second_capped(RULE, MBS):
        v2, grid2, scale2, code2, _, k2 = _one_pass(
            tl.abs(rest), m, tensor_scale, RULE, MBS, LARGEST, True, False, OWNED
        )
        v2 = with_sign(v2, rest)
        signed = with_sign(grid2, rest)
    else:
        v2, grid2, scale2, code2, _, k2 = _one_pass(rest, m, tensor_scale, RULE, MBS, LARGEST, False, False, OWNED)
        signed = grid2
        grid2 = tl.abs(grid2)
    if (OF & 2) != 0:  # so is α · the scale
        total = tl.fma(signed, tl.broadcast_to((scale2 * alpha)[:, :, None], x.shape), v1)
    else:
        total = v1 + v2 * alpha
    if (OF & 4) == 0:  # v1 >= +0, so only the upper end can be passed
        total = tl.minimum(total, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    value = with_sign(total, x)  # a zero sum is +0, and takes x's sign
    residual = x - with_sign(v1, x)
    return value, grid1, scale1, code1, clamped1, k1, residual, grid2, scale2, code2, k2


# --- values alone, in the ordinary range ------------------------------------------------------------------------------


@triton.constexpr_function
def _has_swift_values(rule, mbs):
    return rule in ("ceil", "floor", "even") and mbs == "align"


@triton.jit
def _swift_pass(x, m, RULE: tl.constexpr, NARROW: tl.constexpr):
    """An aligned MBS pass in the ordinary range: grid values, signed like x, and q = s · fl(1 / p) [M, G]."""
    m = tl.minimum(m, 0x7E800000)  # 2^126: whatever is not ordinary must not overflow the integers
    p, inverse_p = mbs_factors(align_mantissa(tl.max(m, axis=1)))
    p, inverse_p = p[:, None], inverse_p[:, None]
    m = as_bits(as_float(m) * p)
    if RULE == "ceil":
        m += 0x3FFFFF
    elif RULE == "even":
        m += 0x200000
    scale = tl.maximum((m & INF_BITS) - 0x1000000, 0x800000)  # a zero block: anything that is finite
    c = (as_float(0x7F000000 - scale) * p)[:, :, None]
    if NARROW:
        grid = round_product_to_grid(x, c)
    else:
        grid = round_to_grid(x * c, False)
    if RULE != "ceil":
        grid = tl.minimum(tl.maximum(grid, -6.0), 6.0)
    return grid, as_float(scale) * inverse_p


@triton.jit
def _extraordinary(m, LARGEST: tl.constexpr):
    """1 for block maxima (bits) outside [2^-100, largest / 4) that are not 0: int32 [M, G]."""
    return ((m != 0) & ((m < 0x0D800000) | (as_float(tl.minimum(m, INF_BITS)) >= LARGEST / 4))).to(tl.int32)


@triton.jit
def quantize_values(
    x, tensor_scale, alpha, RULE: tl.constexpr, MBS: tl.constexpr, OF: tl.constexpr, LARGEST: tl.constexpr,
    NARROW: tl.constexpr, OWNED: tl.constexpr = False,
):  # fmt: skip
    """`quantize_tile`'s values alone, [M, G, n], with the same arguments.

    Where every block maximum of the tile (and of its residual) is in [2^-100, largest / 4) or 0, nothing saturates, no
    product is subnormal, and powers of two can be multiplied in any order: p·x / s is one product, and so is g·s / p.
    Any other tile is done again by `quantize_tile`.
    """
    if not _has_swift_values(RULE, MBS):
        return quantize_tile(x, tensor_scale, alpha, RULE, MBS, OF, LARGEST, NARROW, OWNED)[0]
    a = tl.abs(x)
    m = block_amax(x)
    strange = _extraordinary(m, LARGEST)
    grid, q = _swift_pass(a, m, RULE, NARROW)
    total = grid * q[:, :, None]
    if OF != 0:
        rest = a - total
        m = block_amax(rest)
        strange |= _extraordinary(m, LARGEST)
        grid, q = _swift_pass(rest, m, RULE, False)
        if (OF & 8) == 0:
            total = total + (grid * q[:, :, None]) * alpha
        else:
            total = tl.fma(grid * q[:, :, None], tl.zeros_like(x) + alpha, total)
    value = with_sign(total, x)
    if tl.max(tl.reshape(strange, [strange.shape[0] * strange.shape[1]]), axis=0) != 0:
        value = quantize_tile(x, tensor_scale, alpha, RULE, MBS, OF, LARGEST, NARROW, OWNED)[0]
    return value

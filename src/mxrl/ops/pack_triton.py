"""Packed quantization on the GPU: `pack` reads x once and writes every output of both passes, `unpack` reads them once.

Codes are read off a grid value's float32 bits once its exponent is moved so that the grid's subnormals are float32's:

    E2M1   code = bits(g · 2^-126) >> 22        1 -> 0x00800000 -> 2,  .5 -> 0x00400000 -> 1,  6 -> 0x01c00000 -> 7
    E4M3   code = bits(g · 2^-120) >> 20        2^-6 -> 8, 2^-9 -> 1, 448 -> 126
    back   g = float(code << 22) · 2^126        exact both ways (2^126 a power of two)

Layout, R = A · B rows (row = a·B + b), K elements, n a block, G blocks a macro-block, `column` a unit's first element:

    codes[row, column / 2 + j]        byte j = elements 2j (low nibble) and 2j + 1; E4M3: codes[row, column + j]
    scales[row, column / n + g]       mantissas[row, column / (G·n)]

Under tiling mode `flat` row is 0 and column counts on through the rows, so the same formulas hold.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxrl.ops.pack import PackedPass
from mxrl.ops.passes_triton import (
    as_bits,
    as_float,
    from_grid,
    mantissa_bits,
    mbs_factors,
    quantize_tile,
    round_once,
    widen,
    with_sign,
)
from mxrl.ops.qdq import format_of
from mxrl.ops.qdq_triton import Config, of_kind, owned_layout, recipe_constants
from mxrl.ops.qdq_triton import unsupported as _unsupported
from mxrl.ops.tiles_triton import Tiling, load_tile, locate, store_tile, tiling
from mxrl.recipes import Recipe

PACK = {  # these three: measured on an H200 (8192 x 16384)
    "plain": Config(4096, 4),
    "mbs": Config(2048, 4, owned=True),
    "search": Config(4096, 4, owned=True),
    "columns": Config(2048, 1),
}
UNPACK = {"plain": Config(1024, 2), "mbs": Config(2048, 4), "search": Config(2048, 4), "columns": Config(2048, 1)}


def unsupported(recipe: Recipe, dtype: torch.dtype) -> str | None:
    """Why these kernels can't pack a `dtype` tensor by `recipe` (or unpack one), in a phrase; None if they can."""
    if recipe.rule == "ideal":
        return "mxfp4:ideal has an unrounded scale and no packed form"
    return _unsupported(recipe, dtype)


def cut(
    x_ABK: Tensor, out_ABK: Tensor | None, recipe: Recipe, dtype: torch.dtype, configs: dict[str, Config],
    config: Config | None,
) -> tuple[Tiling, dict[str, Any]]:  # fmt: skip
    """How one launch over x_ABK is cut: its tiling, and the constexpr arguments of recipe, tensor and tiling.

    configs: by kind of work (plain, mbs, search, or a base) and layout (columns); config: instead of them, for tuning.
    """
    constants = recipe_constants(recipe, dtype)
    unit = constants["G"] * constants["N"]
    if config is None:
        kind = "search" if recipe.mbs not in (None, "align") else "mbs" if recipe.mbs else "plain"
        kind = recipe.base if recipe.base in configs else kind
        config = configs["columns" if tiling(x_ABK, out_ABK, unit, 1).mode == "columns" else kind]
    if constants["N"] == 16:  # a thread's run of 8 elements is half a block already
        config = config._replace(owned=False)
    units = max(1, config.elements // unit)
    plan = tiling(x_ABK, out_ABK, unit, units)
    return plan, constants | dict(
        MODE=plan.mode, MASK=plan.mask, M=units, OWNED=owned_layout(config, x_ABK, plan.mode), num_warps=config.warps,
        enable_fp_fusion=False,
    )  # fmt: skip


# --- codes -----------------------------------------------------------------------------------------------------------


@triton.jit
def encode(grid, x, bad, E4M3: tl.constexpr):
    """Grid magnitudes [M, G, n], the signs of x, poisoned blocks bad [M, G] -> bytes as uint32, 0 where bad.

    [M, G·n / 2] of two codes, [M, G·n] of E4M3's. What is left above the 8 bits is anything.
    """
    M: tl.constexpr = grid.shape[0]
    G: tl.constexpr = grid.shape[1]
    n: tl.constexpr = grid.shape[2]
    if E4M3:
        bits = as_bits(with_sign(grid * 7.52316384526264e-37, x)).to(tl.uint32, bitcast=True)  # 2^-120
        bytes_ = tl.where(bad[:, :, None], 0, ((bits >> 20) & 127) | ((bits >> 24) & 128))
        bytes_ = tl.reshape(bytes_, [M, G * n])
    else:
        bits = as_bits(with_sign(grid * 1.1754943508222875e-38, x)).to(tl.uint32, bitcast=True)  # 2^-126
        low, high = tl.split(tl.reshape(bits, [M, G, n // 2, 2]))
        both = (low >> 22) | (high >> 18)  # codes without signs at bits 0 and 4, signs at bits 9 and 13
        both = (both & 0x77) | ((both >> 6) & 0xFFFFFF88)
        bytes_ = tl.reshape(tl.where(bad[:, :, None], 0, both), [M, G * n // 2])
    return bytes_


@triton.jit
def decode(code, E4M3: tl.constexpr):
    """int32 codes -> grid magnitudes (E4M3's 0x7f is NaN)."""
    if E4M3:
        grid = as_float((code & 127) << 20) * 1.329227995784916e36  # 2^120
        return tl.where((code & 127) == 127, float("nan"), grid)
    return as_float((code & 7) << 22) * 8.507059173023462e37  # 2^126


@triton.jit
def decode_scale(code, tensor_scale, RULE: tl.constexpr):
    """`scaling.scale_from_code`: int32 codes [...] -> float32 scales, NaN where poisoned."""
    if RULE == "nvfp4" or RULE == "4over6":
        value = decode(code, True)
        return as_float(as_bits(value) | ((code >> 7) << 31)) * tensor_scale
    k: tl.constexpr = mantissa_bits(RULE)
    biased = code >> k
    mantissa = (code & ((1 << k) - 1)) << (23 - k)
    exponent = tl.minimum(biased, 254)
    value = as_float(tl.where(exponent > 0, (exponent << 23) | mantissa, 0x400000 | (mantissa >> 1)))
    return tl.where(biased == 255, float("nan"), value)


@triton.jit
def _store_pass(
    codes, scales, mantissas, bytes_, scale_code, k, row, column, valid, K, codes_row, scales_row, mantissas_row,
    E4M3: tl.constexpr, MBS: tl.constexpr, G: tl.constexpr, N: tl.constexpr, MASK: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """Write one pass: bytes of codes [M, width], scale codes [M, G] and, with MBS, mantissas k [M]."""
    width: tl.constexpr = bytes_.shape[1]
    step: tl.constexpr = 1 if E4M3 else 2  # elements a byte
    j = tl.arange(0, width)[None, :]
    start = row * codes_row + column // step
    if MASK != "all":
        start = tl.multiple_of(start, width)
    mask = valid[:, None] & (j >= 0)
    block = tl.arange(0, G)[None, :]
    block_mask = valid[:, None] & (block >= 0)
    if MASK == "all":
        mask = mask & (column[:, None] + j * step < K)
        block_mask = block_mask & (column[:, None] + block * N < K)
    # a thread writes the bytes of the elements that it read at once, so that nothing is exchanged between threads
    tl.store(codes + tl.max_contiguous(start[:, None] + j, [1, RUN // step]), bytes_.to(tl.uint8), mask=mask)
    at = (row * scales_row + column // N)[:, None] + block
    tl.store(scales + at, scale_code.to(scales.dtype.element_ty), mask=block_mask)
    if MBS != "":
        tl.store(mantissas + (row * mantissas_row + column // (G * N)), k.to(tl.uint8), mask=valid)


@triton.jit(do_not_specialize=["count"])
def _pack_kernel(
    x, tensor_scale, codes1, scales1, mantissas1, codes2, scales2, mantissas2, alpha, count, B, K, x_a, x_b, x_k,
    codes_row, scales_row, mantissas_row,
    RULE: tl.constexpr, MBS: tl.constexpr, OF: tl.constexpr, G: tl.constexpr, N: tl.constexpr, LARGEST: tl.constexpr,
    NARROW: tl.constexpr, MODE: tl.constexpr, MASK: tl.constexpr, M: tl.constexpr, OWNED: tl.constexpr,
):  # fmt: skip
    a, b, column, valid = locate(tl.program_id(0), count, B, K, MODE, M, G * N)
    tile = widen(load_tile(x, a * x_a + b * x_b + column * x_k, column, valid, K, x_k, G, N, MASK, OWNED))
    scale = 0.0
    if RULE == "nvfp4" or RULE == "4over6":
        scale = tl.load(tensor_scale)
    _, grid1, value1, code1, _, k1, rest, grid2, value2, code2, k2 = quantize_tile(
        tile, scale, alpha, RULE, MBS, OF, LARGEST, NARROW, OWNED > 0
    )
    e4m3: tl.constexpr = RULE == "mxfp8"
    RUN: tl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth  # elements of one load
    row = a * B + b
    codes = encode(grid1, tile, value1 != value1, e4m3)
    _store_pass(
        codes1, scales1, mantissas1, codes, code1, k1, row, column, valid, K, codes_row, scales_row, mantissas_row,
        e4m3, MBS, G, N, MASK, RUN,
    )  # fmt: skip
    if OF > 0:
        codes = encode(grid2, rest, value2 != value2, e4m3)
        _store_pass(
            codes2, scales2, mantissas2, codes, code2, k2, row, column, valid, K, codes_row, scales_row, mantissas_row,
            e4m3, MBS, G, N, MASK, RUN,
        )  # fmt: skip


def pack(
    x_ABK: Tensor, recipe: Recipe, tensor_scale: Tensor | None, *, config: Config | None = None
) -> list[PackedPass]:
    """x_ABK (bf16, fp16 or float32, any strides) -> one PackedPass, or two with OF (α > 0), in one launch.

    tensor_scale: NVFP4's, 0-d float32 on the device of x, else None. Fields as in PackedPass, R = A · B. config: for
    tuning. Raises ValueError for what `unsupported` names.
    """
    passes = [_empty(x_ABK, recipe) for _ in range(2 if of_kind(recipe) else 1)]
    if x_ABK.numel() == 0:
        return passes
    plan, constants = cut(x_ABK, None, recipe, x_ABK.dtype, PACK, config)
    first, second = passes[0], passes[-1]
    _pack_kernel[(plan.programs,)](
        x_ABK, tensor_scale, *first, *second, recipe.of or 0.0, plan.count, *x_ABK.shape[1:], *x_ABK.stride(),
        *_widths(first), **constants,
    )  # fmt: skip
    return passes


def _empty(x_ABK: Tensor, recipe: Recipe) -> PackedPass:
    fmt = format_of(recipe)
    a, b, k = x_ABK.shape
    device = x_ABK.device
    codes = torch.empty(a * b, -(-k // 2) if fmt.element.bits == 4 else k, dtype=torch.uint8, device=device)
    scale_dtype = torch.int32 if recipe.rule.startswith("e8m") else torch.uint8
    scales = torch.empty(a * b, -(-k // fmt.block), dtype=scale_dtype, device=device)
    mantissas = torch.empty(a * b, -(-k // recipe.macro), dtype=torch.uint8, device=device) if recipe.mbs else None
    return PackedPass(codes, scales, mantissas)


def _widths(p: PackedPass) -> tuple[int, int, int]:
    """Bytes of codes, scales and mantissas a row."""
    return p.codes.shape[1], p.scales.shape[1], 0 if p.mantissas is None else p.mantissas.shape[1]


# --- back ------------------------------------------------------------------------------------------------------------


@triton.jit
def _load_pass(
    codes, scales, mantissas, tensor_scale, row, column, valid, K, codes_row, scales_row, mantissas_row,
    RULE: tl.constexpr, MBS: tl.constexpr, G: tl.constexpr, N: tl.constexpr, MASK: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """-> the magnitudes that one pass stands for, float32 [M, G, N], and the codes' signs (bit 31 of int32)."""
    M: tl.constexpr = column.shape[0]
    e4m3: tl.constexpr = RULE == "mxfp8"
    width: tl.constexpr = G * N if e4m3 else G * N // 2
    step: tl.constexpr = 1 if e4m3 else 2
    j = tl.arange(0, width)[None, :]
    start = row * codes_row + column // step
    if MASK != "all":
        start = tl.multiple_of(start, width)
    mask = valid[:, None] & (j >= 0)
    block = tl.arange(0, G)[None, :]
    block_mask = valid[:, None] & (block >= 0)
    if MASK == "all":
        mask = mask & (column[:, None] + j * step < K)
        block_mask = block_mask & (column[:, None] + block * N < K)
    bytes_ = tl.load(codes + tl.max_contiguous(start[:, None] + j, [1, RUN // step]), mask=mask, other=0).to(tl.int32)
    at = (row * scales_row + column // N)[:, None] + block
    value = decode_scale(tl.load(scales + at, mask=block_mask, other=0).to(tl.int32), tensor_scale, RULE)
    if e4m3:
        code = tl.reshape(bytes_, [M, G, N])
        sign = (code >> 7) << 31
    else:
        code = tl.reshape(tl.join(bytes_ & 15, bytes_ >> 4), [M, G, N])
        sign = (code >> 3) << 31
    magnitude = from_grid(decode(code, e4m3), value, RULE)
    if MBS != "":
        k = tl.load(mantissas + (row * mantissas_row + column // (G * N)), mask=valid, other=0).to(tl.int32)
        _, reciprocal = mbs_factors(k)
        magnitude = magnitude * reciprocal[:, None, None]
    return magnitude, as_float(sign)


@triton.jit(do_not_specialize=["count"])
def _unpack_kernel(
    out, tensor_scale, codes1, scales1, mantissas1, codes2, scales2, mantissas2, alpha, count, B, K, out_a, out_b,
    out_k, codes_row, scales_row, mantissas_row,
    RULE: tl.constexpr, MBS: tl.constexpr, OF: tl.constexpr, G: tl.constexpr, N: tl.constexpr, LARGEST: tl.constexpr,
    MODE: tl.constexpr, MASK: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    a, b, column, valid = locate(tl.program_id(0), count, B, K, MODE, M, G * N)
    scale = 0.0
    if RULE == "nvfp4" or RULE == "4over6":
        scale = tl.load(tensor_scale)
    row = a * B + b
    RUN: tl.constexpr = 128 // out.dtype.element_ty.primitive_bitwidth  # elements of one store
    value, sign = _load_pass(
        codes1, scales1, mantissas1, scale, row, column, valid, K, codes_row, scales_row, mantissas_row, RULE, MBS, G,
        N, MASK, RUN,
    )  # fmt: skip
    if OF > 0:
        second, sign2 = _load_pass(
            codes2, scales2, mantissas2, scale, row, column, valid, K, codes_row, scales_row, mantissas_row, RULE, MBS,
            G, N, MASK, RUN,
        )  # fmt: skip
        # magnitudes as if x were positive, so that a zero sum is +0 here and takes the sign of x's code below
        value = value + with_sign(with_sign(second, sign2), sign) * alpha
        value = tl.maximum(value, -LARGEST, propagate_nan=tl.PropagateNan.ALL)
    value = with_sign(tl.minimum(value, LARGEST, propagate_nan=tl.PropagateNan.ALL), sign)
    rounded = round_once(value, out.dtype.element_ty)
    store_tile(out, a * out_a + b * out_b + column * out_k, column, valid, K, out_k, rounded, MASK)


def unpack(
    passes: list[PackedPass], recipe: Recipe, out_ABK: Tensor, dtype: torch.dtype, tensor_scale: Tensor | None,
    *, config: Config | None = None,
) -> None:  # fmt: skip
    """Write the values of `passes`, of a tensor that was `dtype`, to out_ABK (float dtype, any strides), in one launch.

    Equal to quantize-dequantize bit for bit; into a narrower dtype the values saturate at its largest finite one.
    tensor_scale: NVFP4's, 0-d float32 on the device, else None. Raises ValueError for what `unsupported` names.
    """
    if out_ABK.numel() == 0:
        return
    plan, constants = cut(out_ABK, None, recipe, dtype, UNPACK, config)
    constants["LARGEST"] = min(torch.finfo(out_ABK.dtype).max, constants["LARGEST"])
    del constants["NARROW"], constants["OWNED"]
    first, second = passes[0], passes[-1]
    _unpack_kernel[(plan.programs,)](
        out_ABK, tensor_scale, *first, *second, recipe.of or 0.0, plan.count, *out_ABK.shape[1:], *out_ABK.stride(),
        *_widths(first), **constants,
    )  # fmt: skip

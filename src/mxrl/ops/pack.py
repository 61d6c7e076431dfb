"""Packed quantization, the torch reference: what a 4-bit kernel would read, and back.

    pack     x_ABK -> one PackedPass, or two with OF (α > 0): codes, scales, MBS mantissas
    unpack   the passes -> values, equal to quantize-dequantize bit for bit

R = A · B rows. Codes are two to a byte, the low nibble is the even index (E4M3: one to a byte); an odd row's last high
nibble is padding. The codes of a poisoned block are 0: its scale says NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mxrl.corrections import of_blend
from mxrl.elements import decode, encode
from mxrl.ops.layout import fitted, row_chunks, write_rows
from mxrl.ops.qdq import Pass, dequantize_pass, format_of, passes, to_blocks
from mxrl.recipes import Recipe
from mxrl.scaling import scale_from_code


class PackedPass(NamedTuple):
    """One pass over R rows of K elements, contiguous."""

    codes: Tensor  # uint8 [R, ceil(K / 2)]; MXFP8 [R, K]
    scales: Tensor  # uint8 [R, ceil(K / block)]: E8M0, or E4M3 for NVFP4; int32 (E8M0 << k | mantissa) for e8m{k}
    mantissas: Tensor | None  # uint8 [R, ceil(K / macro)], MBS's k


def pack(x_ABK: Tensor, recipe: Recipe, tensor_scale: Tensor | None) -> list[PackedPass]:
    a, b, k_axis = x_ABK.shape
    recipe = fitted(recipe, k_axis)
    largest = torch.finfo(x_ABK.dtype).max
    rows = x_ABK if a * b else x_ABK.new_zeros(1, 1, k_axis)
    parts = [
        [_pack(p, recipe, k_axis) for p in passes(to_blocks(chunk, recipe), recipe, largest, tensor_scale)[0]]
        for _, _, chunk in row_chunks(rows)
    ]
    return [_joined(of_one_pass, a * b) for of_one_pass in zip(*parts, strict=True)]


def _joined(parts: tuple[PackedPass, ...], rows: int) -> PackedPass:
    mantissas = (
        None if parts[0].mantissas is None else torch.cat([p.mantissas for p in parts if p.mantissas is not None])
    )
    return PackedPass(
        torch.cat([p.codes for p in parts])[:rows],
        torch.cat([p.scales for p in parts])[:rows],
        None if mantissas is None else mantissas[:rows],
    )


def _pack(p: Pass, recipe: Recipe, k_axis: int) -> PackedPass:
    fmt = format_of(recipe)
    codes = encode(torch.where(p.scale.value.isnan().unsqueeze(-1), 0.0, p.grid), fmt.element).flatten(1)
    if fmt.element.bits == 4:
        codes = codes[:, : 2 * -(-k_axis // 2)]
        codes = codes[:, 0::2] | (codes[:, 1::2] << 4)
    else:
        codes = codes[:, :k_axis]
    scales = p.scale.code[:, : -(-k_axis // fmt.block)]
    if not recipe.rule.startswith("e8m"):
        scales = scales.to(torch.uint8)
    mantissas = None if p.mantissa is None else p.mantissa[:, : -(-k_axis // recipe.macro)].to(torch.uint8)
    return PackedPass(codes.contiguous(), scales.contiguous(), None if mantissas is None else mantissas.contiguous())


def unpack(
    packed: list[PackedPass], recipe: Recipe, out_ABK: Tensor, dtype: torch.dtype, tensor_scale: Tensor | None
) -> None:
    """Write the values of `packed`, of a tensor that was `dtype`, to out; into a narrower dtype they saturate."""
    own = torch.finfo(dtype).max
    largest = min(torch.finfo(out_ABK.dtype).max, own)
    k_axis = out_ABK.shape[-1]
    recipe = fitted(recipe, k_axis)
    work = torch.float64 if dtype == torch.float64 else torch.float32
    for begin, end, _ in row_chunks(out_ABK):
        chunk = [PackedPass(*(None if t is None else t[begin:end] for t in p)) for p in packed]  # type: ignore[arg-type]
        grid, value = _values(chunk[0], recipe, k_axis, work, tensor_scale)
        if len(chunk) > 1:
            assert recipe.of is not None
            second = _values(chunk[1], recipe, k_axis, work, tensor_scale)[1]
            value = of_blend(grid, value, second, recipe.of, own)  # grid carries the sign of every zero of x
        value = value.clamp(-largest, largest).flatten(1)[:, :k_axis]
        write_rows(out_ABK, begin, end, value.to(out_ABK.dtype))


def _values(
    p: PackedPass, recipe: Recipe, k_axis: int, dtype: torch.dtype, tensor_scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(signed grid values, dequantized values) [r, B, n], padded to whole (macro-)blocks."""
    fmt = format_of(recipe)
    codes = p.codes
    if fmt.element.bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1)[:, :k_axis]
    unit = fmt.block if p.mantissas is None else recipe.macro
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % unit))
    grid = decode(codes, fmt.element, dtype)
    grid = grid.reshape(grid.shape[0], grid.shape[1] // fmt.block, fmt.block)
    scales = scale_from_code(p.scales, fmt, recipe.rule, dtype, tensor_scale)
    scales = torch.nn.functional.pad(scales, (0, grid.shape[1] - scales.shape[-1]))
    mantissas = None if p.mantissas is None else p.mantissas.to(torch.int32)
    return grid, dequantize_pass(grid, scales, mantissas, recipe)

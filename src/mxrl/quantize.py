"""The public operations: `fake_quantize` (quantize-dequantize), and the packed `quantize` / `dequantize`.

Both take a tensor of any float dtype, any shape and the axis that is blocked (the contraction axis). The arithmetic is
float32 whatever the dtype (float64 stays float64); the result is rounded once to the dtype of the input, and that
rounded tensor *is* the quantized tensor: training and rollout use the same one, and nobody quantizes it again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mxrl.corrections import of_blend
from mxrl.elements import decode, encode
from mxrl.ops.qdq import Pass, dequantize_pass, finite_max, format_of, passes, qdq_rows, to_blocks
from mxrl.recipes import Recipe
from mxrl.scaling import nvfp4_tensor_scale, scale_from_code

CHUNK = 1 << 20  # elements at a time: temporaries stay in cache and memory stays bounded


def check_input(x: Tensor, dim: int, what: str) -> int:
    """The axis as a non-negative number; one clear line for a tensor that can't be quantized."""
    if not x.is_floating_point() or x.element_size() < 2:
        raise TypeError(f"{what}: expected a bfloat16, float16, float32 or float64 tensor, got {x.dtype}")
    if x.dim() == 0:
        raise ValueError(f"{what}: a 0-d tensor has no axis to block; give it at least one dimension")
    if not -x.dim() <= dim < x.dim():
        raise IndexError(f"{what}: dim={dim} is outside a tensor of {x.dim()} dimensions")
    return dim % x.dim()


def as_rows(x: Tensor, dim: int) -> Tensor:
    """[..., K at dim, ...] -> [R, K], a view where the strides allow."""
    moved = x.movedim(dim, -1)
    return moved.reshape(moved.shape[:-1].numel(), moved.shape[-1])


def row_chunks(rows: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Rows [R, K] in fixed chunks of about CHUNK elements."""
    step = max(1, CHUNK // max(rows.shape[-1], 1))
    for begin in range(0, rows.shape[0], step):
        yield slice(begin, begin + step), rows[begin : begin + step]


def whole_tensor_scale(rows: Tensor, recipe: Recipe) -> Tensor | None:
    """NVFP4's scale over all rows (the chunks' maximum is the whole's); None for other formats."""
    if recipe.base != "nvfp4":
        return None
    maxima = [finite_max(to_blocks(chunk, recipe)) for _, chunk in row_chunks(rows)]
    zero = torch.zeros((), dtype=torch.float64 if rows.dtype == torch.float64 else torch.float32, device=rows.device)
    return nvfp4_tensor_scale(torch.stack([zero, *maxima]).amax(), recipe.rule)


@torch.no_grad()
def fake_quantize(x: Tensor, recipe: str | Recipe = "mxfp4", *, dim: int = -1, out: Tensor | None = None) -> Tensor:
    """Quantize and dequantize `x` along `dim` as an operand of `recipe`: same shape and dtype.

    x: bfloat16, float16, float32 or float64, any shape with at least one axis; blocks never straddle rows, the last
        block of a row may be ragged. recipe: its grammar or a Recipe; roles, noise and backward play no part here, and
        bf16 gives `x` back. out: written and returned if given (x itself is allowed).
    A block with a NaN or an Inf becomes NaN; a finite input never gives an Inf. No gradient flows: see `mxrl.nn`.
    Raises TypeError for other dtypes, RecipeError for a recipe that can't be. Source: arXiv 2605.20402, section 2.
    """
    recipe = Recipe.parse(recipe)
    dim = check_input(x, dim, "fake_quantize")
    if out is not None and (out.shape != x.shape or out.dtype != x.dtype):
        raise ValueError(f"fake_quantize: out is {tuple(out.shape)} {out.dtype}, x is {tuple(x.shape)} {x.dtype}")
    if not recipe.quantizes:
        return x if out is None else out.copy_(x)
    rows = as_rows(x.detach(), dim)
    tensor_scale = whole_tensor_scale(rows, recipe)
    result = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    moved = result.movedim(dim, -1)
    direct = moved.is_contiguous()
    target = moved.view(rows.shape) if direct else torch.empty_like(rows)
    for where, chunk in row_chunks(rows):
        target[where] = qdq_rows(chunk, recipe, tensor_scale)
    if not direct:
        moved.copy_(target.view(moved.shape))
    return result


@dataclass(frozen=True)
class QuantizedTensor:
    """A packed tensor: what a 4-bit kernel would read. The blocked axis is moved last in every field.

    codes: uint8 [..., ceil(K/2)], two E2M1 codes a byte, the low nibble is the even index (MXFP8: [..., K]).
    scales: uint8 [..., ceil(K/block)], E8M0 (255 = NaN) or NVFP4's E4M3; int32 `(E8M0 << k) | mantissa` for e8m{k}.
    macro_mantissas: uint8 [..., ceil(K/macro)], MBS's k; None without MBS.
    tensor_scale: float32 0-d, NVFP4 only. residual: OF's second pass, None without.
    """

    codes: Tensor
    scales: Tensor
    macro_mantissas: Tensor | None
    tensor_scale: Tensor | None
    residual: QuantizedTensor | None
    shape: torch.Size
    dtype: torch.dtype
    dim: int
    recipe: Recipe

    @property
    def nbytes(self) -> int:
        parts = [self.codes, self.scales, self.macro_mantissas, self.tensor_scale]
        own = sum(p.numel() * p.element_size() for p in parts if p is not None)
        return own + (self.residual.nbytes if self.residual is not None else 0)

    @torch.no_grad()
    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values in `dtype` (default: the dtype that was quantized), equal to `fake_quantize` bit for bit.

        Into a narrower dtype than that, values saturate at its largest finite one.
        """
        dtype = dtype or self.dtype
        largest = min(torch.finfo(dtype).max, torch.finfo(self.dtype).max)
        value = _pass_values(self)
        if self.residual is not None:
            assert self.recipe.of is not None
            sign = _grid(self)  # carries the sign of every zero of x
            value = of_blend(sign, value, _pass_values(self.residual), self.recipe.of, torch.finfo(self.dtype).max)
        value = value.clamp(-largest, largest).flatten(-2)[..., : self.shape[self.dim]]
        moved_shape = (*(s for i, s in enumerate(self.shape) if i != self.dim), self.shape[self.dim])
        return value.to(dtype).reshape(moved_shape).movedim(-1, self.dim).contiguous()


@torch.no_grad()
def quantize(x: Tensor, recipe: str | Recipe = "mxfp4", *, dim: int = -1) -> QuantizedTensor:
    """Pack `x` along `dim` as `recipe` says; see QuantizedTensor and `fake_quantize` for shapes, dtypes and errors.

    Raises ValueError for bf16 and for mxfp4:ideal, whose unrounded scale has no packed form.
    """
    recipe = Recipe.parse(recipe)
    dim = check_input(x, dim, "quantize")
    format_of(recipe)
    if recipe.rule == "ideal":
        raise ValueError("quantize: mxfp4:ideal has an unrounded scale and no packed form; use fake_quantize")
    rows = as_rows(x.detach(), dim)
    tensor_scale = whole_tensor_scale(rows, recipe)
    largest = torch.finfo(x.dtype).max
    parts: list[list[Pass]] = [
        passes(to_blocks(chunk, recipe), recipe, largest, tensor_scale)[0]
        for _, chunk in row_chunks(rows if rows.shape[0] else rows.new_zeros(1, rows.shape[1]))
    ]
    lead = torch.Size(s for i, s in enumerate(x.shape) if i != dim)
    packed: QuantizedTensor | None = None
    for index in reversed(range(len(parts[0]))):
        packed = _pack([p[index] for p in parts], x, dim, lead, recipe, tensor_scale, residual=packed)
    assert packed is not None
    return packed


def _pack(
    parts: list[Pass],
    x: Tensor,
    dim: int,
    lead: torch.Size,
    recipe: Recipe,
    tensor_scale: Tensor | None,
    residual: QuantizedTensor | None,
) -> QuantizedTensor:
    fmt, k_axis = format_of(recipe), x.shape[dim]
    rows = lead.numel()
    grid = torch.cat([p.grid for p in parts])[:rows]
    bad = torch.cat([p.scale.value for p in parts])[:rows].isnan()
    codes = encode(torch.where(bad.unsqueeze(-1), 0.0, grid), fmt.element).flatten(1)
    if fmt.element.bits == 4:
        codes = codes[:, : 2 * -(-k_axis // 2)]  # an odd row's last high nibble is padding
        codes = codes[:, 0::2] | (codes[:, 1::2] << 4)
    else:
        codes = codes[:, :k_axis]
    scales = torch.cat([p.scale.code for p in parts])[:rows, : -(-k_axis // fmt.block)]
    if not recipe.rule.startswith("e8m"):
        scales = scales.to(torch.uint8)
    macro = None
    if parts[0].mantissa is not None:
        macro = torch.cat([p.mantissa for p in parts if p.mantissa is not None])[:rows]
        macro = macro[:, : -(-k_axis // recipe.macro)].to(torch.uint8).reshape(*lead, -(-k_axis // recipe.macro))
    return QuantizedTensor(
        codes=codes.reshape(*lead, codes.shape[-1]),
        scales=scales.reshape(*lead, scales.shape[-1]),
        macro_mantissas=macro,
        tensor_scale=tensor_scale,
        residual=residual,
        shape=x.shape,
        dtype=x.dtype,
        dim=dim,
        recipe=recipe,
    )


def _work_dtype(packed: QuantizedTensor) -> torch.dtype:
    return torch.float64 if packed.dtype == torch.float64 else torch.float32


def _rows(stored: Tensor) -> Tensor:
    """[..., n] -> [R, n], empty tensors too."""
    return stored.reshape(stored.shape[:-1].numel(), stored.shape[-1])


def _grid(packed: QuantizedTensor) -> Tensor:
    """Signed grid values [R, B, n], padded to whole (macro-)blocks."""
    fmt = format_of(packed.recipe)
    codes = _rows(packed.codes)
    if fmt.element.bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1)[:, : packed.shape[packed.dim]]
    unit = packed.recipe.macro if packed.macro_mantissas is not None else fmt.block
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % unit))
    grid = decode(codes, fmt.element, _work_dtype(packed))
    return grid.reshape(grid.shape[0], grid.shape[1] // fmt.block, fmt.block)


def _pass_values(packed: QuantizedTensor) -> Tensor:
    grid = _grid(packed)
    recipe, fmt = packed.recipe, format_of(packed.recipe)
    scales = scale_from_code(_rows(packed.scales), fmt, recipe.rule, grid.dtype, packed.tensor_scale)
    scales = torch.nn.functional.pad(scales, (0, grid.shape[1] - scales.shape[-1]))
    macro = packed.macro_mantissas
    return dequantize_pass(grid, scales, None if macro is None else _rows(macro).to(torch.int32), recipe)

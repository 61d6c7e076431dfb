"""Quantize-dequantize of rows, the torch reference that every kernel must equal bit for bit.

Shapes: R rows, K elements along the contraction axis, B blocks of n elements a row (zeros fill a ragged last one),
M macro-blocks a row. Arithmetic is float32 (float64 for float64 rows), each operation rounded on its own.

    base pass   m_RB -> scale -> grid = RNE(x / s) -> grid · s
    MBS         k_RM -> base pass on p·x -> · fl(1/p)
    OF          base or MBS pass on x, then on the residual x - x1, blended by α
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mxrl.corrections import (
    halving_sum,
    mbs_align,
    mbs_candidates,
    mbs_factor,
    normal_of_key,
    of_blend,
    prescale,
)
from mxrl.formats import BlockFormat
from mxrl.ops.layout import fitted, row_chunks, write_rows
from mxrl.recipes import Recipe
from mxrl.scaling import BlockScale, block_scale, from_grid, pow2, to_grid


@dataclass(frozen=True)
class Pass:
    """One quantization pass over rows: what is stored, and the values it stands for."""

    grid: Tensor  # [R, B, n] signed grid values
    scale: BlockScale  # [R, B]
    mantissa: Tensor | None  # [R, M] int32, MBS's k

    def value(self, recipe: Recipe) -> Tensor:
        """The dequantized values [R, B, n]."""
        return dequantize_pass(self.grid, self.scale.value, self.mantissa, recipe)


def format_of(recipe: Recipe) -> BlockFormat:
    fmt = recipe.format
    if fmt is None:
        raise ValueError("recipe 'bf16' quantizes nothing; choose mxfp4, nvfp4 or mxfp8")
    return fmt


def to_blocks(rows: Tensor, recipe: Recipe) -> Tensor:
    """[R, K] of any float dtype -> [R, B, n] in the arithmetic's dtype, padded with zeros to whole (macro-)blocks."""
    n = format_of(recipe).block
    unit = recipe.macro if recipe.mbs else n
    x = rows if rows.dtype == torch.float64 else rows.float()
    if x.shape[-1] % unit:
        x = torch.nn.functional.pad(x, (0, unit - x.shape[-1] % unit))
    return x.reshape(x.shape[0], x.shape[-1] // n, n)


def finite_max(x: Tensor) -> Tensor:
    """max|x| over the finite blocks of x [R, B, n], 0 without any: what NVFP4's scale of a tensor is taken from."""
    m = x.abs().amax(-1)
    m = torch.where(torch.isfinite(m), m, 0.0)
    return m.amax() if m.numel() else m.new_zeros(())


def _per_block(macro: Tensor, recipe: Recipe) -> Tensor:
    """[R, M] -> [R, B, 1]."""
    return macro.repeat_interleave(recipe.macro // format_of(recipe).block, -1).unsqueeze(-1)


def dequantize_pass(grid: Tensor, scale_value: Tensor, mantissa: Tensor | None, recipe: Recipe) -> Tensor:
    """Signed grid values [R, B, n], scales [R, B], MBS mantissas [R, M] or None -> values [R, B, n]."""
    value = from_grid(grid, scale_value, format_of(recipe), recipe.rule)
    if mantissa is None:
        return value
    return value * _per_block(1 / mbs_factor(mantissa, grid.dtype), recipe)


def _base(x: Tensor, recipe: Recipe, largest: float, tensor_scale: Tensor | None, lower: Tensor | None = None) -> Pass:
    """One pass of the base quantizer over blocks x [R, B, n]."""
    fmt = format_of(recipe)
    m = x.abs().amax(-1)
    if recipe.rule == "4over6":
        return _four_over_six(x, m, fmt, largest, tensor_scale)
    scale = block_scale(m, fmt, recipe.rule, tensor_scale=tensor_scale, lower=lower)
    return Pass(to_grid(x, scale, fmt, recipe.rule, largest), scale, None)


def _four_over_six(x: Tensor, m: Tensor, fmt: BlockFormat, largest: float, tensor_scale: Tensor | None) -> Pass:
    """NVFP4 4/6: per block, the maximum goes to 6 or to 4, whichever has the lesser squared error (ties: 6)."""
    choices = []
    for to_four in (False, True):
        scale = block_scale(m, fmt, "", tensor_scale=tensor_scale, to_four=to_four)
        grid = to_grid(x, scale, fmt, "", largest)
        error = from_grid(grid, scale.value, fmt, "") - x
        choices.append((grid, scale, halving_sum(error * error)))
    (grid6, scale6, error6), (grid4, scale4, error4) = choices
    four = error4 < error6
    scale = BlockScale(
        torch.where(four, scale4.value, scale6.value), torch.where(four, scale4.code, scale6.code), scale6.clamped
    )
    return Pass(torch.where(four.unsqueeze(-1), grid4, grid6), scale, None)


def _mbs(x: Tensor, recipe: Recipe, largest: float) -> Pass:
    """One MBS pass over blocks x [R, B, n], B a whole number of macro-blocks."""
    m = x.abs().amax(-1)
    bad = ~torch.isfinite(m)
    group = recipe.macro // x.shape[-1]
    macro_max = torch.where(bad, 0.0, m).unflatten(-1, (-1, group)).amax(-1)
    lower = None
    if recipe.mbs == "align":
        k = mbs_align(macro_max)
    else:
        k, lower = _search(x, macro_max, bad, recipe, largest)
    y = prescale(x, _per_block(mbs_factor(k, x.dtype), recipe), largest)
    y = torch.where(bad.unsqueeze(-1), float("nan"), y)  # saturation must not make an Inf finite
    base = _base(y, recipe, largest, None, lower)
    return Pass(base.grid, base.scale, k)


def _search(x: Tensor, macro_max: Tensor, bad: Tensor, recipe: Recipe, largest: float) -> tuple[Tensor, Tensor | None]:
    """The k [R, M] of least squared error, ties to the smallest; for `joint` also where a block takes ceil − 1.

    Errors are taken relative to the power of two of the macro maximum, so that the choice does not depend on the
    tensor's scale, and squares of small numbers do not vanish.
    """
    group = recipe.macro // x.shape[-1]
    exponent = (torch.frexp(macro_max).exponent - 1).clamp(-126, 127)
    unit = _per_block(pow2(-exponent, x.dtype), recipe)

    def block_error(candidate: Pass, inverse: float) -> Tensor:
        value = from_grid(candidate.grid, candidate.scale.value, format_of(recipe), recipe.rule) * inverse
        error = (value - x) * unit
        return torch.where(bad, 0.0, halving_sum(error * error))

    best = best_error = best_lower = None
    for k in mbs_candidates(recipe.mbs or ""):
        p = torch.tensor((256 + k) / 256, dtype=x.dtype, device=x.device)
        inverse = (1 / p).item()
        y = prescale(x, p, largest)
        error = block_error(_base(y, recipe, largest, None), inverse)
        lower = None
        if recipe.mbs == "joint":
            below = block_error(_base(y, recipe, largest, None, torch.ones_like(bad)), inverse)
            lower = below < error
            error = torch.where(lower, below, error)
        total = halving_sum(error.unflatten(-1, (-1, group)))
        if best is None or best_error is None:
            best, best_error, best_lower = torch.zeros_like(total, dtype=torch.int32), total, lower
            continue
        better = total < best_error
        best = torch.where(better, k, best)
        best_error = torch.where(better, total, best_error)
        if lower is not None and best_lower is not None:
            best_lower = torch.where(better.repeat_interleave(group, -1), lower, best_lower)
    assert best is not None
    return best, best_lower


def passes(x: Tensor, recipe: Recipe, largest: float, tensor_scale: Tensor | None = None) -> tuple[list[Pass], Tensor]:
    """Blocks x [R, B, n] -> the passes (two with OF), and the quantized values [R, B, n] before the last rounding.

    largest: the largest finite value of the dtype that the values are rounded to.
    """

    def one(t: Tensor) -> Pass:
        return _mbs(t, recipe, largest) if recipe.mbs else _base(t, recipe, largest, tensor_scale)

    first = one(x)
    value = first.value(recipe)
    if not recipe.of:
        return [first], value
    second = one(x - value)
    return [first, second], of_blend(x, value, second.value(recipe), recipe.of, largest)


def qdq_rows(rows: Tensor, recipe: Recipe, tensor_scale: Tensor | None = None) -> Tensor:
    """Rows [R, K] -> their quantized values [R, K], same dtype."""
    recipe = fitted(recipe, rows.shape[-1])
    _, value = passes(to_blocks(rows, recipe), recipe, torch.finfo(rows.dtype).max, tensor_scale)
    return value.flatten(1)[:, : rows.shape[-1]].to(rows.dtype)


# --- the operations: what dispatch.py hands out (qdq_triton.py and qdq_cpu.py have the same functions) ----------------


def qdq(x_ABK: Tensor, recipe: Recipe, out_ABK: Tensor, tensor_scale: Tensor | None) -> None:
    """out = Q(x), rounded once to their dtype; out may be x, or have other strides."""
    for begin, end, rows in row_chunks(x_ABK):
        write_rows(out_ABK, begin, end, qdq_rows(rows, recipe, tensor_scale))


def noisy_qdq(
    w_ABK: Tensor,
    recipe: Recipe,
    out_ABK: Tensor,
    key: tuple[int, int, int, int],
    std: float,
    tensor_scale: Tensor | None,
) -> None:
    """out = Q(cast(float32(w) + z · float32(std))), the cast to out's dtype.

    z: the standard normal noise of `corrections.philox_normal`'s `key`, by an element's offset in memory from
    w_ABK[0, 0, 0]: w is a contiguous matrix, its axes moved or not. Two float32 roundings, the product's and the sum's.
    """
    memory = sorted(range(3), key=w_ABK.stride, reverse=True)
    z = normal_of_key(key, 0, w_ABK.numel(), w_ABK.device).view([w_ABK.shape[i] for i in memory])
    z_ABK = z.permute([memory.index(i) for i in range(3)])
    noised = w_ABK.to(torch.promote_types(w_ABK.dtype, torch.float32)) + z_ABK * std
    qdq(noised.to(out_ABK.dtype), recipe, out_ABK, tensor_scale)


def finite_amax(x_ABK: Tensor, recipe: Recipe) -> Tensor:
    """max|x| over the blocks without NaN or Inf, 0 without any: 0-d, float32 (float64 of a float64 tensor)."""
    maxima = [finite_max(to_blocks(rows, recipe)) for _, _, rows in row_chunks(x_ABK)]
    dtype = torch.float64 if x_ABK.dtype == torch.float64 else torch.float32
    return torch.stack([torch.zeros((), dtype=dtype, device=x_ABK.device), *maxima]).amax()

"""Rounding to an element grid, and the codes of its values.

One rule serves every small float: with `unit` the spacing of the grid around |v|,

    RNE(v) = round_half_even(|v| / unit) · unit      unit = 2^(max(floor(log2 |v|), e_min) - mantissa_bits)

which for E2M1 sends .25→0, .75→1, 1.25→1, 1.75→2, 2.5→2, 3.5→4, 5→4 (ties to the even mantissa).
All functions take float32 or float64 and are exact: a division by `unit` is one by a power of two.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from mxrl.formats import ElementFormat

_EXPONENT_BITS = {torch.float32: (torch.int32, 0x7F800000), torch.float64: (torch.int64, 0x7FF0000000000000)}


def pow2_floor(a: Tensor) -> Tensor:
    """2^floor(log2 a) for a >= 0, read from the bits; 0 for zeros and subnormals, Inf for Inf and NaN."""
    integer, mask = _EXPONENT_BITS[a.dtype]
    return (a.view(integer) & mask).view(a.dtype)


def _unit(a: Tensor, element: ElementFormat) -> Tensor:
    return pow2_floor(a).clamp_(min=2.0**element.min_exponent).mul_(2.0**-element.mantissa_bits)


def round_to_grid(a: Tensor, element: ElementFormat) -> Tensor:
    """Magnitudes a >= 0 to the nearest grid value, ties to even; the grid goes on above `element.max` (clamp after)."""
    unit = _unit(a, element)
    return (a / unit).round_().mul_(unit)


def floor_to_grid(a: Tensor, element: ElementFormat) -> Tensor:
    """The largest grid value <= a, for a >= 0 (Inf gives `element.max`)."""
    a = a.clamp(max=element.max)
    unit = _unit(a, element)
    return (a / unit).floor_().mul_(unit)


def encode(grid: Tensor, element: ElementFormat) -> Tensor:
    """Signed grid values (no NaN) -> uint8 codes: sign bit, then exponent and mantissa. -0.0 keeps its sign."""
    a = grid.abs()
    unit = _unit(a, element)
    exponent = torch.frexp(unit).exponent - 1 + element.mantissa_bits - element.min_exponent
    code = (a / unit).to(torch.int32) + exponent * 2**element.mantissa_bits
    sign = torch.signbit(grid).to(torch.int32) << (element.exponent_bits + element.mantissa_bits)
    return (code | sign).to(torch.uint8)


@functools.lru_cache(maxsize=64)
def _table(element: ElementFormat, dtype: torch.dtype, device: torch.device) -> Tensor:
    magnitudes = torch.full((2 ** (element.exponent_bits + element.mantissa_bits),), float("nan"), dtype=dtype)
    magnitudes[: len(element.values)] = torch.tensor(element.values, dtype=dtype)
    return torch.cat([magnitudes, -magnitudes]).to(device)


def decode(codes: Tensor, element: ElementFormat, dtype: torch.dtype) -> Tensor:
    """uint8 codes -> signed grid values in `dtype`; codes beyond the grid (E4M3's 0x7f, 0xff) are NaN."""
    return _table(element, dtype, codes.device)[codes.long()]

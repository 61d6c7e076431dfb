"""How tensors reach the operations: as x_ABK, a view whose last axis K is blocked.

    x [..., K at dim, ...]  ->  x_ABK    A: the axes before dim, B: those behind it; strides as they come

so a kernel sees any contiguous tensor blocked along any axis without a copy (gpt-oss's [E, H, 2I] along H is A = E,
B = 2I, K = H). R = A · B rows; blocks never straddle rows. The references work through R in fixed chunks: temporaries
stay in cache, memory stays bounded, and sums are added in an order that depends on the shape alone.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from mxrl.recipes import Recipe

CHUNK = 1 << 20  # elements at a time


def check_input(x: Tensor, dim: int, what: str) -> int:
    """The axis as a non-negative number; one clear line for what can't be quantized."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{what}: expected a torch.Tensor, got {type(x).__name__} (torch.as_tensor makes one)")
    if x.layout != torch.strided:
        raise TypeError(f"{what}: expected a dense tensor, got one of layout {x.layout}; x.to_dense() is one")
    if not x.is_floating_point() or x.element_size() < 2:
        raise TypeError(f"{what}: expected a bfloat16, float16, float32 or float64 tensor, got {x.dtype}")
    if x.dim() == 0:
        raise ValueError(f"{what}: a 0-d tensor has no axis to block; give it at least one dimension")
    try:
        dim = operator.index(dim)
    except TypeError:
        raise TypeError(f"{what}: dim={dim!r} must be a whole number, the axis whose blocks share a scale") from None
    if not -x.dim() <= dim < x.dim():
        raise IndexError(f"{what}: dim={dim} is outside a tensor of {x.dim()} dimensions")
    return dim % x.dim()


def as_abk(x: Tensor, dim: int) -> Tensor:
    """[..., K at dim, ...] -> [A, B, K]; a view of every contiguous tensor, and of others where the strides allow."""
    a, b = math.prod(x.shape[:dim]), math.prod(x.shape[dim + 1 :])
    return x.reshape(a, x.shape[dim], b).movedim(1, -1)


def is_view_of(view: Tensor, x: Tensor) -> bool:
    """Whether writing to `view`, as `as_abk` made it, writes to `x`."""
    return view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() or x.numel() == 0


def fitted(recipe: Recipe, k: int) -> Recipe:
    """`recipe` with macro-blocks no longer than a row of K: the same bits, since the rest of them would be padding."""
    row = 32 * max(1, -(-k // 32))
    return replace(recipe, macro=row) if recipe.mbs and recipe.macro > row else recipe


def row_chunks(x_ABK: Tensor) -> Iterator[tuple[int, int, Tensor]]:
    """(first row, end row, rows [r, K]) in fixed chunks of about CHUNK elements of a contiguous or strided x_ABK."""
    a, b, k = x_ABK.shape
    step = max(1, CHUNK // max(k, 1))
    flat = x_ABK.reshape(a * b, k) if _flat(x_ABK) else None
    for begin in range(0, a * b, step):
        end = min(begin + step, a * b)
        yield begin, end, flat[begin:end] if flat is not None else _gather(x_ABK, begin, end)


def write_rows(out_ABK: Tensor, begin: int, end: int, rows: Tensor) -> None:
    """out's rows [begin, end) = rows [r, K]."""
    if _flat(out_ABK):
        a, b, k = out_ABK.shape
        out_ABK.view(a * b, k)[begin:end] = rows
        return
    b = out_ABK.shape[1]
    for a in range(begin // b, (end - 1) // b + 1):
        low, high = max(begin, a * b), min(end, (a + 1) * b)
        out_ABK[a, low - a * b : high - a * b] = rows[low - begin : high - begin]


def _flat(x_ABK: Tensor) -> bool:
    """Whether the rows are one axis (a view [R, K] exists)."""
    a, b, _ = x_ABK.shape
    return a == 1 or b == 1 or x_ABK.stride(0) == b * x_ABK.stride(1)


def _gather(x_ABK: Tensor, begin: int, end: int) -> Tensor:
    b = x_ABK.shape[1]
    parts = []
    for a in range(begin // b, (end - 1) // b + 1):
        parts.append(x_ABK[a, max(begin - a * b, 0) : min(end - a * b, b)])
    return torch.cat(parts)

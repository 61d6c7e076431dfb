"""Tensors to the scalar oracle's rows and back, and bit equality (any NaN equals any NaN, -0.0 is not 0.0)."""

from __future__ import annotations

import torch
from torch import Tensor

from oracles import scalar

NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float64: "float64"}
_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def rows_of(x: Tensor, dim: int = -1) -> list[list[float]]:
    """[..., K at dim, ...] -> rows of K Python floats (exact)."""
    moved = x.movedim(dim, -1)
    return moved.reshape(moved.shape[:-1].numel(), moved.shape[-1]).double().tolist()


def tensor_of(rows: list[list[float]], like: Tensor, dim: int = -1) -> Tensor:
    """The inverse of rows_of, in the shape and dtype of `like`."""
    moved = like.movedim(dim, -1)
    return torch.tensor(rows, dtype=torch.float64).reshape(moved.shape).movedim(-1, dim).to(like.dtype).contiguous()


def differences(a: Tensor, b: Tensor) -> Tensor:
    """Bool, in a's shape: where the bits differ, all NaN taken as one."""
    assert a.shape == b.shape and a.dtype == b.dtype, f"{tuple(a.shape)} {a.dtype} against {tuple(b.shape)} {b.dtype}"
    if not a.is_floating_point():
        return a != b
    ints = _INTS[a.element_size()]
    return (a.contiguous().view(ints) != b.contiguous().view(ints)) & ~(a.isnan() & b.isnan())


def assert_same(got: Tensor, want: Tensor, what: str = "") -> None:
    """Bit equality; says which element differs first."""
    wrong = differences(got, want)
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        count = f"{int(wrong.sum())} of {wrong.numel()} differ"
        raise AssertionError(f"{what}: {count}, first at {at}: got {got[at].item()!r}, want {want[at].item()!r}")


def oracle(x: Tensor, recipe, dim: int = -1) -> tuple[Tensor, scalar.Quantized]:
    """The scalar oracle's quantize-dequantized tensor, and all it knows."""
    quantized = scalar.quantize(rows_of(x, dim), recipe, NAMES[x.dtype])
    return tensor_of(quantized.values, x, dim), quantized

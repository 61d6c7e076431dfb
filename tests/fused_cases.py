"""What the fused CPU kernels are compared on: recipes, the edge cases as one tensor, layouts of x_ABK.

Blocks don't see each other (but for NVFP4's tensor scale), so every edge case goes, filled with zeros, into one tensor:
one call a recipe instead of eighty. Ragged widths are their own list.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from edge_cases import edge_cases
from torch import Tensor

from mxrl import Recipe
from mxrl.ops import qdq
from mxrl.scaling import NVFP4_SCALE_MAX, nvfp4_tensor_scale

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
IDS = [str(d).removeprefix("torch.") for d in DTYPES]
WIDTH = 160
MX = (
    "mxfp4", "mxfp4:floor", "mxfp4:even", "mxfp8", "mxfp4:e8m1", "mxfp4:e8m3", "mxfp4:e8m8", "mxfp4:ideal",
    "mxfp4+of", "mxfp4+of:0", "mxfp4+of:1", "mxfp4+mbs", "mxfp4+mbs+of:0.3", "mxfp4:floor+mbs", "mxfp4:ideal+mbs+of",
    "mxfp4:e8m2+mbs+of:0.7", "mxfp4+mbs+macro=32", "mxfp4+mbs+macro=96",
)  # fmt: skip
NV = ("nvfp4", "nvfp4:4over6")
SEARCHED = (
    "mxfp4+mbs:search16", "mxfp4+mbs:joint", "mxfp4+mbs:search256", "mxfp4:floor+mbs:search16+of",
    "mxfp4:e8m2+mbs:search16", "mxfp4+mbs:search16+macro=96", "mxfp4+mbs:joint+of+macro=64",
)  # fmt: skip
MAIN = ("mxfp4", "nvfp4", "mxfp8", "mxfp4+mbs+of")
WIDTHS = (1, 2, 15, 16, 17, 31, 32, 33, 48, 95, 97, 129, 577)


def every_edge_case(dtype: torch.dtype) -> Tensor:
    """[1, R, WIDTH]: the rows of all edge cases that fit, and wild numbers of every size."""
    rows = []
    for _, x in edge_cases(dtype):
        x = x.reshape(-1, x.shape[-1]) if x.numel() else x.new_zeros(0, 1)
        if x.shape[1] <= WIDTH:
            rows.append(torch.nn.functional.pad(x, (0, WIDTH - x.shape[1])))
    g = torch.Generator().manual_seed(0)
    size = 2.0 ** torch.randint(-20 if dtype == torch.float16 else -140, 15, (40, WIDTH // 32), generator=g).double()
    rows.append((torch.randn(40, WIDTH, generator=g, dtype=torch.float64) * size.repeat_interleave(32, 1)).to(dtype))
    return torch.cat(rows)[None]


def ordinary(dtype: torch.dtype, *shape: int, seed: int = 1) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02).to(dtype)


def tensor_scale(x_ABK: Tensor, recipe: Recipe) -> Tensor | None:
    return nvfp4_tensor_scale(qdq.finite_amax(x_ABK, recipe), recipe.rule) if recipe.base == "nvfp4" else None


def inputs(dtype: torch.dtype, recipe: Recipe) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """(name, x_ABK, tensor scale): edges and ordinary numbers; NVFP4 with scales that suit parts of the edges too."""
    x = every_edge_case(dtype)
    if recipe.base == "nvfp4":
        maxima = x.float().abs().unflatten(-1, (-1, 16)).amax(-1).repeat_interleave(16, -1)
        for scale in (1e-30, 1e-3, 1e-2, 2.0**-149, 1e35):  # each with the blocks that a tensor of that scale can have
            held = (maxima <= 6 * NVFP4_SCALE_MAX[recipe.rule] * scale) | ~maxima.isfinite()
            yield f"edge cases, tensor scale {scale:g}", torch.where(held, x, 0), torch.tensor(scale)
        yield "zeros", torch.zeros(1, 1, 40, dtype=dtype), torch.zeros(())
    else:
        yield "edge cases", x, None
    x = ordinary(dtype, 1, 3, 576)
    yield "ordinary", x, tensor_scale(x, recipe)


def layouts(dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """x_ABK as dense tensors blocked along any axis give it, and views that aren't dense."""
    base = ordinary(dtype, 3, 70, 50)
    yield "last axis", base
    yield "middle axis", base.transpose(1, 2)
    yield "first axis", base.permute(1, 2, 0)
    yield "32 by 48", ordinary(dtype, 2, 64, 48).transpose(1, 2)
    yield "columns of a wider matrix", ordinary(dtype, 2, 9, 130)[:, :, 3:99]
    yield "every other element", ordinary(dtype, 2, 9, 130)[:, ::2, ::3]
    yield "expanded", ordinary(dtype, 1, 1, 70).expand(2, 3, 70)
    yield "longer than a segment", ordinary(dtype, 1, 1100, 20).transpose(1, 2)
    for shape in ((0, 3, 32), (2, 0, 32), (2, 3, 0)):
        yield f"empty {shape}", torch.zeros(shape, dtype=dtype)


def near_the_largest(dtype: torch.dtype) -> torch.Tensor:
    """[1, 16, 128], all above half of the dtype's largest value: a component alone can lead beyond it."""
    g = torch.Generator().manual_seed(6)
    x = torch.rand(1, 16, 128, generator=g, dtype=torch.float64) * 0.5 + 0.5
    sign = torch.randint(0, 2, x.shape, generator=g) * 2 - 1
    return (x * sign * torch.finfo(dtype).max).to(dtype)

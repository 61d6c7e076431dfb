"""Where the Triton kernels' tests run, and the edge cases as one tensor for them.

On the GPU where there is one, else in Triton's interpreter (tests/conftest.py switches it on), where a program costs
milliseconds whatever its tile.
"""

from __future__ import annotations

import functools

import torch
from edge_cases import edge_cases
from torch import Tensor

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@functools.lru_cache(maxsize=4)
def edge_rows(dtype: torch.dtype) -> Tensor:
    """Every edge case as rows of 165 elements (odd, two macro-blocks, the second ragged): [1, R, 165]."""
    rows = [x.reshape(-1, x.shape[-1])[:, :165] for _, x in edge_cases(dtype) if x.numel()]
    return torch.cat([torch.nn.functional.pad(row, (0, 165 - row.shape[1])) for row in rows])[None]


def on_device(x: Tensor) -> Tensor:
    """x with its strides, on DEVICE."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=DEVICE).copy_(x)

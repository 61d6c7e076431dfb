"""A GPU that repeats itself.

Some CUDA kernels add with atomics, in whatever order the threads come (backward passes of attention among them), so
two runs of one configuration differ in the last digits of a gradient. Adam's first steps turn those into whole ones:
its first is about lr × the gradient's sign, also where the sign is chance.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def deterministic(wanted: bool = True) -> Iterator[None]:
    """Inside it torch takes kernels that give the same bits every time; RuntimeError names an operation that has none.

    Not torch's warning form: under that one attention's backward pass keeps its atomics. Best entered before the
    process's first work on the GPU: cuBLAS reads its workspace's size when it starts.
    """
    former = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(former[0], warn_only=former[1])

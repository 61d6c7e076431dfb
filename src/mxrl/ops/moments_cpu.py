"""Sums of powers and block maxima in one pass over the tensor, on the CPU (numba); `mxrl.moments` says what they are.

Eight lanes of float64 take every eighth element; lanes are added at the end of a chunk of rows, chunks in their order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from mxrl.ops.lane_functions_cpu import (
    bits,
    constant,
    floats,
    high_half,
    lane,
    largest_lane,
    low_half,
    multiply_add,
    quarter_0,
    quarter_1,
    quarter_2,
    quarter_3,
    to_f64,
)
from mxrl.ops.lane_memory_cpu import write_double, write_int64
from mxrl.ops.lanes_cpu import inlined, kernel
from mxrl.ops.memory_cpu import DTYPES, INF, MAGNITUDE, load, load_part, size_of
from mxrl.ops.rows_cpu import Rows, each_chunk

_zeros = constant("f64", [0.0] * 8)


@inlined
def add_powers(sums, x):
    x = to_f64(x)
    square = x * x
    return (
        sums[0] + x,
        multiply_add(x, x, sums[1]),
        multiply_add(square, x, sums[2]),
        multiply_add(square, square, sums[3]),
    )


@inlined
def total(v):
    v = low_half(v) + high_half(v)
    v = low_half(v) + high_half(v)
    return lane(v, 0) + lane(v, 1)


@kernel
def moments_rows(x, xa, xb, b, k, begin, end, dtype, sums_at, counts_at):
    """Rows [begin, end): float64 [Σx, Σx², Σx³, Σx⁴, Σ maxima, largest] and int64 [elements, blocks, poisoned]."""
    size = size_of(dtype)
    zero = _zeros()
    sums = (zero, zero, zero, zero)
    peak_sum = largest = 0.0
    count = blocks = nonfinite = 0
    for r in range(begin, end):
        row = x + (r // b) * xa + (r % b) * xb
        for first in range(0, k, 32):
            left = min(k - first, 32)
            at = row + first * size
            v = load(at, dtype) if left == 32 else load_part(at, dtype, left)
            m = largest_lane(bits(v) & MAGNITUDE)
            if m >= INF:
                nonfinite += 1
            else:
                peak = np.float64(floats(m))
                peak_sum += peak
                largest = max(largest, peak)
                count += left
                blocks += 1
                sums = add_powers(sums, quarter_0(v))
                sums = add_powers(sums, quarter_1(v))
                sums = add_powers(sums, quarter_2(v))
                sums = add_powers(sums, quarter_3(v))
    for i, v in enumerate(sums):
        write_double(sums_at, i, total(v))
    write_double(sums_at, 4, peak_sum)
    write_double(sums_at, 5, largest)
    write_int64(counts_at, 0, count)
    write_int64(counts_at, 1, blocks)
    write_int64(counts_at, 2, nonfinite)


def moments(x_ABK: Tensor) -> tuple[Any, ...]:
    """The fields of `mxrl.moments.Moments`, in their order. x_ABK: float32, bfloat16 or float16."""
    a, b, k = x_ABK.shape
    dtype = DTYPES[x_ABK.dtype]

    def work(begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        source = Rows(x_ABK, begin, end).gather()
        sums, counts = np.zeros(6), np.zeros(3, np.int64)
        moments_rows(*source.operand, b, k, begin, end, dtype, sums.ctypes.data, counts.ctypes.data)
        return sums, counts

    parts = each_chunk(work, a * b, k, cost=2) if x_ABK.numel() else []
    sums, counts = [0.0] * 5, [0] * 3
    largest = 0.0
    for part, counted in parts:
        *added, peak = part.tolist()
        sums = [s + p for s, p in zip(sums, added, strict=True)]
        counts = [c + p for c, p in zip(counts, counted.tolist(), strict=True)]
        largest = max(largest, peak)
    return counts[0], *sums[:4], largest, counts[1], sums[4], counts[2]

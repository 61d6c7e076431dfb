"""How x_ABK reaches the CPU kernels: chunks of rows, on threads, each row contiguous.

    row r = a · B + b      begins at address + a · stride_a + b · stride_b, and its K elements lie side by side

A kernel works on rows [begin, end) of such operands, without the GIL. Where K is not the axis that is contiguous in
memory, a chunk's rows are gathered into a buffer and scattered from one: bounded memory, whatever the strides.
The chunks depend on the shape alone, so sums that are taken chunk by chunk don't depend on the number of threads.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mxrl.ops.lane_functions_cpu import riffle_high, riffle_low
from mxrl.ops.lane_memory_cpu import (
    fence,
    load_16_i32,
    load_16_u16,
    read_int,
    read_int16,
    store_16_i32,
    store_16_u16,
    stream_16_i32,
    write_int,
    write_int16,
)
from mxrl.ops.lanes_cpu import inlined, kernel

CHUNK = 1 << 18  # elements at a time
TILE = 256  # rows gathered at a time: whole stretches of the axis that is contiguous
SEGMENT = 1024  # columns gathered at a time
PADDING = 32  # elements behind a buffer's row, lest its rows fall on the same lines of the cache
WORTH_A_THREAD = 1 << 18  # elements times `cost`: handing work over takes some 50 µs


class Operand(NamedTuple):
    """Rows in memory: bytes, all three."""

    address: int
    stride_a: int
    stride_b: int


def contiguous_rows(x_ABK: Tensor) -> bool:
    return x_ABK.stride(2) == 1 or x_ABK.shape[2] <= 1


def operand(x_ABK: Tensor) -> Operand:
    """x_ABK as it lies in memory, for contiguous rows."""
    size = x_ABK.element_size()
    return Operand(x_ABK.data_ptr(), x_ABK.stride(0) * size, x_ABK.stride(1) * size)


_kept = threading.local()
KEPT_BYTES = 1 << 22


def _buffer(slot: int, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """[rows, columns] of this thread's memory `slot`: fresh memory would cost a page fault for every 4 KiB."""
    size = rows * columns * dtype.itemsize
    if size > KEPT_BYTES:
        return torch.empty(rows, columns, dtype=dtype)
    kept: dict[int, Tensor] = _kept.__dict__.setdefault("slots", {})
    if slot not in kept:
        kept[slot] = torch.empty(KEPT_BYTES, dtype=torch.uint8)
    return kept[slot][:size].view(dtype).view(rows, columns)


class Rows:
    """Rows [begin, end) of x_ABK as an operand: in place where they are contiguous, else in a buffer.

    A buffered operand keeps the tensor's row numbers. `slot` tells apart the buffers that a thread needs at one time.
    """

    def __init__(self, x_ABK: Tensor, begin: int, end: int, slot: int = 0):
        self.x_ABK, self.begin, self.end = x_ABK, begin, end
        self.buffer = None
        if contiguous_rows(x_ABK):
            self.operand = operand(x_ABK)
            return
        _, b, k = x_ABK.shape
        self.buffer = _buffer(slot, end - begin, k + PADDING, x_ABK.dtype)
        row = (k + PADDING) * x_ABK.element_size()
        self.operand = Operand(self.buffer.data_ptr() - begin * row, b * row, row)

    def gather(self) -> Rows:
        """Fill the buffer, if there is one."""
        self._move(True)
        return self

    def scatter(self) -> None:
        """Write the buffer, if there is one, to the tensor."""
        self._move(False)

    def _move(self, inwards: bool) -> None:
        if self.buffer is None:
            return
        x, size = self.x_ABK, self.x_ABK.element_size()
        strides = (s * size for s in x.stride())
        row = self.buffer.stride(0) * size
        place = (x.shape[1], x.shape[2], self.begin, self.end, self.buffer.data_ptr(), row, size, inwards)
        _move_rows(x.data_ptr(), *strides, *place)


SIDE = 16  # of a square that is transposed in registers


@inlined
def _riffle(v):
    """One perfect shuffle of 16 vectors of 16: four of them transpose the square."""
    return (
        riffle_low(v[0], v[8]), riffle_high(v[0], v[8]), riffle_low(v[1], v[9]), riffle_high(v[1], v[9]),
        riffle_low(v[2], v[10]), riffle_high(v[2], v[10]), riffle_low(v[3], v[11]), riffle_high(v[3], v[11]),
        riffle_low(v[4], v[12]), riffle_high(v[4], v[12]), riffle_low(v[5], v[13]), riffle_high(v[5], v[13]),
        riffle_low(v[6], v[14]), riffle_high(v[6], v[14]), riffle_low(v[7], v[15]), riffle_high(v[7], v[15]),
    )  # fmt: skip


@inlined
def _load_side(at, size):
    if size == 4:
        v = load_16_i32(at)
    else:
        v = load_16_u16(at)
    return v


@inlined
def _store_side(at, v, size, stream):
    if stream and size == 4 and at & 63 == 0:  # a whole line: need not be read first
        stream_16_i32(at, v)
    elif size == 4:
        store_16_i32(at, v)
    else:
        store_16_u16(at, v)


@inlined
def _transpose(source, source_step, target, target_step, size, stream):
    """A square of elements: line i is at source + i · source_step, and becomes column i at target."""
    s, d, z = source, source_step, size
    v = (
        _load_side(s, z), _load_side(s + d, z), _load_side(s + 2 * d, z), _load_side(s + 3 * d, z),
        _load_side(s + 4 * d, z), _load_side(s + 5 * d, z), _load_side(s + 6 * d, z), _load_side(s + 7 * d, z),
        _load_side(s + 8 * d, z), _load_side(s + 9 * d, z), _load_side(s + 10 * d, z), _load_side(s + 11 * d, z),
        _load_side(s + 12 * d, z), _load_side(s + 13 * d, z), _load_side(s + 14 * d, z), _load_side(s + 15 * d, z),
    )  # fmt: skip
    for i, line in enumerate(_riffle(_riffle(_riffle(_riffle(v))))):
        _store_side(target + i * target_step, line, size, stream)


@kernel
def _move_rows(x, stride_a, stride_b, stride_k, b, k, begin, end, rows, row_size, size, inwards):
    """Rows [begin, end) of x to (or from) contiguous `rows`.

    TILE rows side by side, so that both are read in whole lines; by squares where neighbouring rows are neighbours in
    memory.
    """
    for first in range(begin, end, TILE):
        last = min(first + TILE, end)
        for i in range(0, k, SIDE):
            r = first
            while r < last:
                at = x + (r // b) * stride_a + (r % b) * stride_b + i * stride_k
                row = rows + (r - begin) * row_size + i * size
                square = stride_b == size and r + SIDE <= last and r % b + SIDE <= b and i + SIDE <= k
                if square and inwards:
                    _transpose(at, stride_k, row, row_size, size, False)
                elif square:
                    _transpose(row, row_size, at, stride_k, size, True)
                else:
                    for j in range(min(SIDE, k - i)):
                        source, target = at + j * stride_k, row + j * size
                        if not inwards:
                            source, target = target, source
                        if size == 4:
                            write_int(target, 0, read_int(source, 0))
                        else:
                            write_int16(target, 0, read_int16(source, 0))
                r += SIDE if square else 1
    fence()


def segment(unit: int) -> int:
    """Columns to gather at a time: a multiple of `unit`, the elements that are quantized together."""
    return max(SEGMENT // unit, 1) * unit


def each_chunk(
    work: Callable[[int, int], Any], rows: int, columns: int, *, chunk: int | None = None, cost: int = 1
) -> list:
    """[work(begin, end), ...] over fixed chunks of about `chunk` elements (default CHUNK), in order.

    On torch.get_num_threads() threads. cost: about how many times a copy's time the work takes; what is little stays
    on the calling thread.
    """
    step = max(1, (chunk or CHUNK) // max(columns, 1))
    begins = range(0, rows, step)
    threads = min(torch.get_num_threads(), len(begins)) if rows * columns * cost >= WORTH_A_THREAD else 1
    if threads <= 1:
        return [work(begin, min(begin + step, rows)) for begin in begins]
    results: list[Any] = [None] * len(begins)
    taken = itertools.count()  # next() is atomic: each chunk is taken once

    def run() -> None:
        while (i := next(taken)) < len(begins):
            results[i] = work(begins[i], min(begins[i] + step, rows))

    tasks = [_pool().submit(run) for _ in range(threads - 1)]
    try:
        run()
    finally:  # a task that has not begun has nothing left to do
        for task in tasks:
            if not task.cancel():
                task.result()
    return results


_executor: ThreadPoolExecutor | None = None
_lock = threading.Lock()


def _pool() -> ThreadPoolExecutor:
    global _executor
    with _lock:
        if _executor is None:
            _executor = ThreadPoolExecutor(max(os.cpu_count() or 1, 1), thread_name_prefix="mxrl")
        return _executor


def _forget_pool() -> None:
    """A forked process has the pool's object, not its threads."""
    global _executor, _lock
    _executor, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)

"""Groups of blocks inside the CPU kernels: MBS's macro-blocks, the two passes of OF.

A group is up to G vectors of 32 elements, float32 in a scratch (`Room`) that stays in the first cache: a macro-block
under MBS, a few blocks otherwise, so that the processor has independent work.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mxrl.ops.lane_functions_cpu import amax, high_half, low_half, magnitude, maximum, minimum, select, with_sign
from mxrl.ops.lane_memory_cpu import load_f32, read_int, store_f32, write_float, write_int
from mxrl.ops.lanes_cpu import inlined
from mxrl.ops.mbs_cpu import align_mantissa, macro_maximum, prescale, prescaled_maximum, search
from mxrl.ops.memory_cpu import F, load, load_part, size_of
from mxrl.ops.passes_cpu import JOINT, Spec, quantize_block, quantize_nv


class Room(NamedTuple):
    """Scratch for one group of G vectors, as addresses: float32 [32 G] each, then one number a block.

    Plain numbers, because numba counts the references of arrays at each call, which costs more than a block.
    """

    x: int
    first: int
    second: int
    residual: int
    grid: int
    scales: int  # float32 [4 G]
    codes: int  # int32 [4 G], like those below
    clamped: int
    maxima: int  # bits
    lowers: int
    errors: int  # float32 [2 G, 16], the search's
    tables: int  # the same memory, Q*'s: [2 G] of 64 bytes
    noted: int  # float64 [3, 8], statistics' own


def scratch(spec: Spec) -> np.ndarray:
    """Memory for a kernel's `room_in`; keep it as long as the kernel runs."""
    return np.zeros((5 * 32 + 4 * 5 + 2 * 16) * spec.group + 64, np.float32)


@inlined
def room_in(memory, group):
    start = (memory + 63) & ~63
    lanes, number = 128 * group, 16 * group
    numbers = start + 5 * lanes
    return Room(
        start,
        start + lanes,
        start + 2 * lanes,
        start + 3 * lanes,
        start + 4 * lanes,
        numbers,
        numbers + number,
        numbers + 2 * number,
        numbers + 3 * number,
        numbers + 4 * number,
        numbers + 5 * number,
        numbers + 5 * number,
        numbers + 5 * number + lanes,
    )


# --- a group of blocks ------------------------------------------------------------------------------------------------


KEEP_NOTHING, KEEP_SCALES, KEEP_GRID = 0, 1, 2


@inlined
def _note(room, i, s, code, clamped):
    write_float(room.scales, i, s)
    write_int(room.codes, i, code)
    write_int(room.clamped, i, 1 if clamped else 0)


@inlined
def _quantize_nv_group(source, target, room, spec, tensor_scale, count, keep):
    for i in range(count):
        y = load_f32(source + 128 * i)
        m0, m1 = amax(low_half(y)), amax(high_half(y))
        grid, value, s0, s1, code0, code1 = quantize_nv(y, m0, m1, tensor_scale, spec)
        store_f32(target + 128 * i, with_sign(value, y))
        if keep:
            _note(room, 2 * i, s0, code0, False)
            _note(room, 2 * i + 1, s1, code1, False)
        if keep == KEEP_GRID:
            store_f32(room.grid + 128 * i, with_sign(grid, y))


@inlined
def quantize_group(source, target, room, spec, nv, searched, tensor_scale, count, keep):
    """One pass over `count` vectors: float32 at `source` -> values at `target`; k is returned, 0 without MBS.

    keep: KEEP_SCALES leaves scales, codes and clamped in `room`, KEEP_GRID the signed grid values too.
    """
    k = 0
    if nv is not None:
        _quantize_nv_group(source, target, room, spec, tensor_scale, count, keep)
    else:
        p = inverse = F(1)
        if spec.mbs:
            for i in range(count):
                write_int(room.maxima, i, amax(load_f32(source + 128 * i)))
            if searched is None:
                k = align_mantissa(macro_maximum(room.maxima, count))
            else:
                k = search(source, room, spec, count)
            p = F(256 + k) / F(256)
            inverse = F(1) / p
        for i in range(count):
            y = load_f32(source + 128 * i)
            lower = 0
            if spec.mbs:
                y = prescale(y, p, F(spec.largest))
                m = prescaled_maximum(read_int(room.maxima, i), p, F(spec.largest))
                if spec.mbs == JOINT:
                    lower = read_int(room.lowers, i)
            else:
                m = amax(y)
            grid, value, s, code, clamped = quantize_block(y, m, lower, spec)
            store_f32(target + 128 * i, with_sign(value * inverse, y))
            if keep:
                _note(room, i, s, code, clamped)
            if keep == KEEP_GRID:
                store_f32(room.grid + 128 * i, with_sign(grid, y))
    return k


@inlined
def blend(x, first, second, spec):
    """OF: x1 + α·x2, saturated; zeros keep x's sign."""
    largest = F(spec.largest)
    total = maximum(minimum(first + second * F(spec.alpha), largest), -largest)
    return select(total == F(0), with_sign(magnitude(total), x), total)


@inlined
def load_group(address, dtype, left, room, spec):
    """Up to 32 G elements, of the `left` in the row, to room.x, zeros behind them; returns the number of vectors."""
    count = min(spec.group, (left + 31) // 32)
    for i in range(count):
        at = address + 32 * i * size_of(dtype)
        v = load(at, dtype) if left >= 32 * (i + 1) else load_part(at, dtype, left - 32 * i)
        store_f32(room.x + 128 * i, v)
    return count


@inlined
def subtract(x, y, out, count):
    """out = x - y, `count` vectors."""
    for i in range(count):
        store_f32(out + 128 * i, load_f32(x + 128 * i) - load_f32(y + 128 * i))


@inlined
def quantized_group(room, spec, nv, searched, tensor_scale, count, keep):
    """The quantized values of room.x, in room.first; returns the first pass's k. keep: see quantize_group."""
    k = 0
    for n in range(2 if spec.corrected else 1):
        source, target = room.x, room.first
        if n == 1:
            source, target = room.residual, room.second
            subtract(room.x, room.first, source, count)
        mantissa = quantize_group(
            source, target, room, spec, nv, searched, tensor_scale, count, keep if n == 0 else KEEP_NOTHING
        )
        if n == 0:
            k = mantissa
    if spec.corrected:
        for i in range(count):
            x, first = load_f32(room.x + 128 * i), load_f32(room.first + 128 * i)
            store_f32(room.first + 128 * i, blend(x, first, load_f32(room.second + 128 * i), spec))
    return k

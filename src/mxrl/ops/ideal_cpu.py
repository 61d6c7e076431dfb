"""Q* and the deadzone D of a block inside the CPU kernels: what statistics and injection compare with.

    Q*   the quantizer with scale m / q_max, unrounded; its value rounded once to float32
    D    |x| < m · q_min / (2 q_max), strictly: as a threshold on the bits of |x|

A block's thresholds and values (passes_cpu.py) go to a table in memory first, eight of each: a comparison with a number
from memory costs no shuffle. Loops are short and apart, so that the processor works on several blocks at once.
"""

from __future__ import annotations

import numpy as np

from mxrl.formats import MXFP8
from mxrl.ops.lane_functions_cpu import (
    amax,
    bits,
    concat,
    floats,
    high_half,
    low_half,
    magnitude,
    select,
    splat,
    with_sign,
)
from mxrl.ops.lane_memory_cpu import load_f32, read_float, read_int, store_8_f32, store_8_i32, store_f32, write_int
from mxrl.ops.lanes_cpu import inlined
from mxrl.ops.memory_cpu import MAGNITUDE, F
from mxrl.ops.passes_cpu import ideal_e4m3, ideal_thresholds, ideal_values

MXFP8_RATIO = MXFP8.deadzone_ratio
E4M3_BITS = MXFP8.element.mantissa_bits
TABLE = 64  # bytes: eight thresholds, the last one D's edge, and eight values


@inlined
def _write_table(at, m):
    store_8_i32(at, ideal_thresholds(m))
    store_8_f32(at + 32, ideal_values(m))


@inlined
def _from_table(x, at):
    """Q* of a block of any width."""
    b = bits(x) & MAGNITUDE
    out = select(b >= read_int(at, 0), read_float(at + 32, 1), splat(0.0, x))
    out = select(b >= read_int(at, 1), read_float(at + 32, 2), out)
    out = select(b >= read_int(at, 2), read_float(at + 32, 3), out)
    out = select(b >= read_int(at, 3), read_float(at + 32, 4), out)
    out = select(b >= read_int(at, 4), read_float(at + 32, 5), out)
    out = select(b >= read_int(at, 5), read_float(at + 32, 6), out)
    out = select(b >= read_int(at, 6), read_float(at + 32, 7), out)
    return with_sign(out, x)


@inlined
def _edge_mxfp8(m):
    edge = F(np.float64(floats(m)) / MXFP8_RATIO)
    below = np.float64(edge) * MXFP8_RATIO < np.float64(floats(m))  # exact
    return np.int64(bits(edge)) + (1 if below else 0)


@inlined
def ideal_group(room, spec, nv, count):
    """room.x -> Q* in room.second; block maxima as bits in room.maxima, two a vector (the same one, unless NVFP4)."""
    for i in range(count):
        x = load_f32(room.x + 128 * i)
        if nv is not None:
            m0, m1 = amax(low_half(x)), amax(high_half(x))
        else:
            m0 = amax(x)
            m1 = m0
        write_int(room.maxima, 2 * i, m0)
        write_int(room.maxima, 2 * i + 1, m1)
    if nv is not None:
        for i in range(2 * count):
            _write_table(room.tables + TABLE * i, read_int(room.maxima, i))
        for i in range(count):
            x, at = load_f32(room.x + 128 * i), room.tables + TABLE * 2 * i
            ideal = concat(_from_table(low_half(x), at), _from_table(high_half(x), at + TABLE))
            store_f32(room.second + 128 * i, ideal)
    elif spec.mantissa_bits == E4M3_BITS:
        for i in range(count):
            x, m = load_f32(room.x + 128 * i), read_int(room.maxima, 2 * i)
            write_int(room.tables + TABLE * 2 * i, 7, _edge_mxfp8(m))
            store_f32(room.second + 128 * i, with_sign(ideal_e4m3(magnitude(x), m), x))
    else:
        for i in range(count):
            _write_table(room.tables + TABLE * 2 * i, read_int(room.maxima, 2 * i))
        for i in range(count):
            x = load_f32(room.x + 128 * i)
            store_f32(room.second + 128 * i, _from_table(x, room.tables + TABLE * 2 * i))


@inlined
def in_deadzone(x, room, nv, i):
    """The mask of D in vector i of the group; beside an Inf every finite element is in it."""
    b, at = bits(x) & MAGNITUDE, room.tables + TABLE * 2 * i
    if nv is not None:
        low, high = read_int(at, 7), read_int(at + TABLE, 7)
        inside = b < concat(splat(low, low_half(b)), splat(high, low_half(b)))
    else:
        inside = b < read_int(at, 7)
    return inside

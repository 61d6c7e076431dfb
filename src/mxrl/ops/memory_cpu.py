"""Memory as the CPU kernels see it: 32 elements of any dtype as float32 lanes, and back with one rounding.

float16 is converted in bits and by exact products, so that the same code serves machines without the instructions.
"""

from __future__ import annotations

import numpy as np
import torch

from mxrl.ops.lane_functions_cpu import bits, floats, select
from mxrl.ops.lane_memory_cpu import (
    load_f32,
    load_f32_part,
    load_u16,
    load_u16_part,
    store_f32,
    store_f32_part,
    store_u16,
    store_u16_part,
    stream_f32,
    stream_u16,
)
from mxrl.ops.lanes_cpu import inlined

FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2
DTYPES = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
MAGNITUDE, INF = 0x7FFFFFFF, 0x7F800000
F = np.float32


@inlined
def half_to_float(h):
    """float16 bits -> float32, exact: the exponent is rebiased by a product, which makes subnormals normal."""
    magnitude = floats((h & 0x7FFF) << 13) * F(2.0**112)
    special = (h & 0x7C00) == 0x7C00
    b = select(special, bits(magnitude) | INF, bits(magnitude))
    return floats(b | ((h & 0x8000) << 16))


@inlined
def float_to_half(v):
    """float32 -> float16 bits, to nearest, ties to even."""
    a = bits(v) & MAGNITUDE
    normal = (a + (0xC8000FFF + ((a >> 13) & 1))) >> 13  # rebiased; the carry of rounding may reach the exponent
    small = bits(floats(a) + F(0.5)) - 0x3F000000  # an ulp of 0.5 is float16's least subnormal
    h = select(a < 0x38800000, small, normal)
    h = select(a >= 0x47800000, 0x7C00, h)  # 65536 and beyond
    h = select(a > INF, 0x7E00, h)
    return h | ((bits(v) >> 16) & 0x8000)


@inlined
def float_to_bfloat(v):
    """float32 -> bfloat16 bits, to nearest, ties to even."""
    b = bits(v)
    rounded = (b + (((b >> 16) & 1) + 0x7FFF)) >> 16
    return select((b & MAGNITUDE) > INF, 0x7FC0, rounded)


@inlined
def load(address, dtype):
    """32 elements of any dtype as float32."""
    if dtype == FLOAT32:
        v = load_f32(address)
    elif dtype == BFLOAT16:
        v = floats(load_u16(address) << 16)
    else:
        v = half_to_float(load_u16(address))
    return v


@inlined
def load_part(address, dtype, count):
    """The first `count` of 32 elements, zeros behind them."""
    if dtype == FLOAT32:
        v = load_f32_part(address, count)
    elif dtype == BFLOAT16:
        v = floats(load_u16_part(address, count) << 16)
    else:
        v = half_to_float(load_u16_part(address, count))
    return v


@inlined
def store(address, dtype, v, stream, exact=False):
    """Round 32 lanes to dtype and write them, past the caches where `stream` says so.

    exact: the values are bfloat16 as they stand, if dtype is bfloat16.
    """
    if dtype == FLOAT32:
        if stream:
            stream_f32(address, v)
        else:
            store_f32(address, v)
    else:
        if dtype == FLOAT16:
            h = float_to_half(v)
        elif exact:
            h = bits(v) >> 16
        else:
            h = float_to_bfloat(v)
        if stream:
            stream_u16(address, h)
        else:
            store_u16(address, h)


@inlined
def store_part(address, dtype, v, count):
    if dtype == FLOAT32:
        store_f32_part(address, v, count)
    else:
        store_u16_part(address, float_to_bfloat(v) if dtype == BFLOAT16 else float_to_half(v), count)


@inlined
def size_of(dtype):
    """Bytes an element."""
    return 4 if dtype == FLOAT32 else 2

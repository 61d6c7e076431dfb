"""Packing and unpacking in one pass over the tensor, on the CPU (numba); equal to ops/pack.py bit for bit.

code of |grid|     its float32 bits without the trailing zeros: exponent and mantissa, rebiased; below the smallest
                   normal value, its multiple of the smallest one
two codes a byte   even lanes | odd lanes << 4
"""

from __future__ import annotations

import torch
from torch import Tensor

from mxrl.formats import E4M3
from mxrl.ops.groups_cpu import KEEP_GRID, blend, load_group, quantize_group, room_in, scratch, subtract
from mxrl.ops.lane_functions_cpu import (
    bits,
    concat,
    count_to_f32,
    evens,
    floats,
    high_half,
    interleave,
    low_half,
    maximum,
    minimum,
    odds,
    select,
    splat,
    truncate,
)
from mxrl.ops.lane_memory_cpu import (
    load_16_u8,
    load_16_u8_part,
    load_f32,
    load_u8,
    load_u8_part,
    read_byte,
    read_int,
    store_16_u8,
    store_16_u8_part,
    store_u8,
    store_u8_part,
    write_byte,
    write_int,
)
from mxrl.ops.lanes_cpu import inlined, kernel
from mxrl.ops.layout import fitted
from mxrl.ops.memory_cpu import DTYPES, INF, MAGNITUDE, F, size_of, store, store_part
from mxrl.ops.pack import PackedPass
from mxrl.ops.passes_cpu import E8M, NAN_BITS, Spec, paths_of, pow2_of_code, spec_of, unsupported
from mxrl.ops.qdq_cpu import cost_of
from mxrl.ops.rows_cpu import Rows, each_chunk
from mxrl.recipes import Recipe

__all__ = ["pack", "unpack", "unsupported"]

E4M3_BITS, E4M3_NAN = E4M3.mantissa_bits, 0x7F


@inlined
def encode(grid, spec):
    """Signed grid values -> codes, int32 lanes."""
    b = bits(grid) & MAGNITUDE
    shift = 23 - spec.mantissa_bits
    offset = ((spec.least >> 23) - 1) << spec.mantissa_bits
    multiple = truncate(floats(b) * floats((254 - (spec.least >> 23) + spec.mantissa_bits) << 23))
    code = select(b >= spec.least, (b >> shift) - offset, multiple)
    sign_bit = 7 if spec.mantissa_bits == E4M3_BITS else 3
    return code | ((bits(grid) >> 31) << sign_bit)


@inlined
def decode(codes, spec):
    """Codes, int32 lanes -> signed grid values; E4M3's code beyond the grid is NaN."""
    sign_bit = 7 if spec.mantissa_bits == E4M3_BITS else 3
    code = codes & ((1 << sign_bit) - 1)
    shift = 23 - spec.mantissa_bits
    offset = ((spec.least >> 23) - 1) << spec.mantissa_bits
    smallest = floats(spec.least - (spec.mantissa_bits << 23))
    b = select(code >= 1 << spec.mantissa_bits, (code + offset) << shift, bits(count_to_f32(code) * smallest))
    if sign_bit == 7:
        b = select(code == E4M3_NAN, NAN_BITS, b)
    return floats(b | ((codes >> sign_bit) << 31))


@inlined
def write_pass(codes, scales, mantissas, row, first, left, k, count, room, spec, sizes):
    """One pass of a group at column `first` of row `row`, `left` elements from the row's end."""
    codes_row, scales_row, mantissas_row, scale_size = sizes
    for i in range(count):
        c = encode(load_f32(room.grid + 128 * i), spec)
        if spec.blocks == 2:
            low = select(splat(read_int(room.scales, 2 * i) & MAGNITUDE, low_half(c)) > INF, 0, low_half(c))
            high = select(splat(read_int(room.scales, 2 * i + 1) & MAGNITUDE, low_half(c)) > INF, 0, high_half(c))
            c = concat(low, high)
        elif read_int(room.scales, i) & MAGNITUDE > INF:
            c = c & 0
        here = min(left - 32 * i, 32)
        if spec.mantissa_bits == E4M3_BITS:
            at = codes + row * codes_row + first + 32 * i
            if here == 32:
                store_u8(at, c)
            else:
                store_u8_part(at, c, here)
        else:
            at = codes + row * codes_row + first // 2 + 16 * i
            pairs = evens(c) | (odds(c) << 4)
            if here == 32:
                store_16_u8(at, pairs)
            else:
                store_16_u8_part(at, pairs, (here + 1) // 2)
    block = 32 // spec.blocks
    begin = first // block
    for i in range(min(count * spec.blocks, scales_row - begin)):
        at = scales + (row * scales_row + begin + i) * scale_size
        if scale_size == 4:
            write_int(at, 0, read_int(room.codes, i))
        else:
            write_byte(at, 0, read_int(room.codes, i))
    if spec.mbs:
        write_byte(mantissas + row * mantissas_row, first // (32 * spec.group), k)


@kernel
def pack_rows(
    x, xa, xb, b, k, begin, end, dtype, spec, nv, searched, tensor_scale, memory, first_pass, second_pass, sizes
):
    """first_pass, second_pass: the addresses of codes, scales and mantissas; sizes: what a row of each takes."""
    room = room_in(memory, spec.group)
    tensor_scale = F(tensor_scale)
    for r in range(begin, end):
        source = x + (r // b) * xa + (r % b) * xb
        for first in range(0, k, 32 * spec.group):
            left = k - first
            count = load_group(source + first * size_of(dtype), dtype, left, room, spec)
            for n in range(2 if spec.corrected else 1):
                at = room.x
                codes, scales, mantissas = first_pass
                if n == 1:
                    at = room.residual
                    codes, scales, mantissas = second_pass
                    subtract(room.x, room.first, at, count)
                mantissa = quantize_group(at, room.first, room, spec, nv, searched, tensor_scale, count, KEEP_GRID)
                write_pass(codes, scales, mantissas, r, first, left, mantissa, count, room, spec, sizes)


def _empty_pass(rows: int, k: int, recipe: Recipe, spec: Spec) -> PackedPass:
    block, codes = 32 // spec.blocks, k if recipe.base == "mxfp8" else -(-k // 2)
    scale_type = torch.int32 if spec.rule == E8M else torch.uint8
    return PackedPass(
        torch.empty(rows, codes, dtype=torch.uint8),
        torch.empty(rows, -(-k // block), dtype=scale_type),
        torch.empty(rows, -(-k // recipe.macro), dtype=torch.uint8) if spec.mbs else None,
    )


def _addresses(p: PackedPass) -> tuple[int, int, int]:
    return p.codes.data_ptr(), p.scales.data_ptr(), p.mantissas.data_ptr() if p.mantissas is not None else 0


def _sizes(p: PackedPass) -> tuple[int, int, int, int]:
    """Elements a row of codes, scales and mantissas takes, and the bytes of a scale."""
    mantissas = p.mantissas.shape[1] if p.mantissas is not None else 0
    return p.codes.shape[1], p.scales.shape[1], mantissas, p.scales.element_size()


def pack(x_ABK: Tensor, recipe: Recipe, tensor_scale: Tensor | None) -> list[PackedPass]:
    """Codes, scales and mantissas of one pass, or of two with OF; see ops/pack.py."""
    a, b, k = x_ABK.shape
    spec, dtype = spec_of(fitted(recipe, k), x_ABK.dtype), DTYPES[x_ABK.dtype]
    packed = [_empty_pass(a * b, k, recipe, spec) for _ in range(2 if spec.corrected else 1)]
    scale = 1.0 if tensor_scale is None else float(tensor_scale)
    addresses, sizes = [_addresses(p) for p in packed], _sizes(packed[0])

    def work(begin: int, end: int) -> None:
        source, memory = Rows(x_ABK, begin, end).gather(), scratch(spec)
        place = (b, k, begin, end, dtype, spec, *paths_of(spec), scale, memory.ctypes.data)
        pack_rows(*source.operand, *place, addresses[0], addresses[-1], sizes)

    if x_ABK.numel():
        each_chunk(work, a * b, k, cost=cost_of(spec) + 1)
    return packed


@inlined
def scale_from_code(code, spec, tensor_scale):
    """What block_scale gave."""
    if spec.blocks == 2:
        value = F(code) * F(2.0**-9) if code < 8 else floats((code + (120 << 3)) << 20)
        s = value * tensor_scale if code != E4M3_NAN else floats(NAN_BITS)
    else:
        biased, j = code >> spec.steps, code & ((1 << spec.steps) - 1)
        s = pow2_of_code(min(biased, 254)) * (F(1) + F(j) * F(1.0 / (1 << spec.steps)))
        s = s if biased != 255 else floats(NAN_BITS)
    return s


@inlined
def read_pass(codes, scales, mantissas, row, first, left, spec, tensor_scale, sizes):
    """(signed grid values, values) of the 32 elements at column `first`."""
    codes_row, scales_row, mantissas_row, scale_size = sizes
    if spec.mantissa_bits == E4M3_BITS:
        at = codes + row * codes_row + first
        c = load_u8(at) if left >= 32 else load_u8_part(at, left)
    else:
        at = codes + row * codes_row + first // 2
        pairs = load_16_u8(at) if left >= 32 else load_16_u8_part(at, (left + 1) // 2)
        c = interleave(pairs & 15, pairs >> 4)
    grid = decode(c, spec)
    index = row * scales_row + first * spec.blocks // 32
    if spec.blocks == 2:
        low = scale_from_code(read_byte(scales, index), spec, tensor_scale)
        high = low
        if left > 16:
            high = scale_from_code(read_byte(scales, index + 1), spec, tensor_scale)
        return grid, concat(low_half(grid) * low, high_half(grid) * high)
    code = read_int(scales, index) if scale_size == 4 else read_byte(scales, index)
    value = grid * scale_from_code(code, spec, tensor_scale)
    if spec.mbs:
        mantissa = read_byte(mantissas + row * mantissas_row, first // (32 * spec.group))
        value = value * (F(1) / (F(256 + mantissa) / F(256)))
    return grid, value


@kernel
def unpack_rows(out, oa, ob, b, k, begin, end, dtype, spec, tensor_scale, largest, first_pass, second_pass, sizes):
    tensor_scale, largest = F(tensor_scale), F(largest)
    size = size_of(dtype)
    for r in range(begin, end):
        target = out + (r // b) * oa + (r % b) * ob
        for first in range(0, k, 32):
            left = k - first
            codes, scales, mantissas = first_pass
            grid, value = read_pass(codes, scales, mantissas, r, first, left, spec, tensor_scale, sizes)
            if spec.corrected:
                codes, scales, mantissas = second_pass
                _, second = read_pass(codes, scales, mantissas, r, first, left, spec, tensor_scale, sizes)
                value = blend(grid, value, second, spec)  # grid carries the sign of every zero
            value = maximum(minimum(value, largest), -largest)
            if left >= 32:
                store(target + first * size, dtype, value, False)
            else:
                store_part(target + first * size, dtype, value, left)


def unpack(
    packed: list[PackedPass], recipe: Recipe, out_ABK: Tensor, dtype: torch.dtype, tensor_scale: Tensor | None
) -> None:
    """Write the values of `packed`, of a tensor that was `dtype`, to out; into a narrower dtype they saturate."""
    if out_ABK.dtype not in DTYPES:  # float64 holds every float32 value
        values = torch.empty(out_ABK.shape, dtype=torch.float32)
        unpack(packed, recipe, values, dtype, tensor_scale)
        out_ABK.copy_(values)
        return
    spec = spec_of(recipe, dtype)
    largest = min(torch.finfo(out_ABK.dtype).max, torch.finfo(dtype).max)
    scale = 1.0 if tensor_scale is None else float(tensor_scale)
    a, b, k = out_ABK.shape
    packed = [PackedPass(*(None if t is None else t.contiguous() for t in p)) for p in packed]  # type: ignore[arg-type]
    addresses, sizes = [_addresses(p) for p in packed], _sizes(packed[0])

    def work(begin: int, end: int) -> None:
        target = Rows(out_ABK, begin, end)
        place = (b, k, begin, end, DTYPES[out_ABK.dtype], spec, scale, largest)
        unpack_rows(*target.operand, *place, addresses[0], addresses[-1], sizes)
        target.scatter()

    if out_ABK.numel():
        each_chunk(work, a * b, k, cost=1 + len(packed))

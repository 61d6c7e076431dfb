"""Quantize-dequantize in one pass over the tensor, on the CPU (numba); equal to ops/qdq.py bit for bit.

    qdq_plain      MXFP4 (ceil, floor, even) and MXFP8 without corrections: a block stays in registers
    qdq_corrected  every other recipe, by groups of blocks in a scratch that stays in the first cache

A large output is written past the caches, which would otherwise read every line before it is overwritten.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mxrl.ops.groups_cpu import KEEP_NOTHING, load_group, quantized_group, room_in, scratch
from mxrl.ops.lane_functions_cpu import amax, high_half, low_half, with_sign
from mxrl.ops.lane_memory_cpu import fence, load_f32
from mxrl.ops.lanes_cpu import kernel
from mxrl.ops.layout import fitted
from mxrl.ops.memory_cpu import DTYPES, INF, F, load, load_part, size_of, store, store_part
from mxrl.ops.noise_cpu import add_noise
from mxrl.ops.passes_cpu import POW2, Spec, paths_of, quantize_pow2, spec_of, unsupported
from mxrl.ops.rows_cpu import Operand, Rows, contiguous_rows, each_chunk, operand, segment
from mxrl.recipes import Recipe

__all__ = ["finite_amax", "noisy_qdq", "qdq", "unsupported"]

STREAM_BYTES = 1 << 24  # outputs from this size on are written past the caches: they would not stay there
ALIGNMENT = 64


@kernel
def qdq_plain(x, xa, xb, out, oa, ob, b, k, begin, end, dtype, spec, stream):
    """Rows [begin, end) of b rows a plane, k elements each; x, out: addresses, xa ... ob: strides in bytes.

    A bfloat16 comes out as one without rounding: few significant bits, and where the grid is finer than the least
    subnormal, x is on it.
    """
    size = size_of(dtype)
    for r in range(begin, end):
        source = x + (r // b) * xa + (r % b) * xb
        target = out + (r // b) * oa + (r % b) * ob
        for i in range(0, k, 32):
            left = k - i
            y = load(source + i * size, dtype) if left >= 32 else load_part(source + i * size, dtype, left)
            _, value, _, _, _ = quantize_pow2(y, amax(y), 0, spec)
            if left >= 32:
                store(target + i * size, dtype, with_sign(value, y), stream, True)
            else:
                store_part(target + i * size, dtype, with_sign(value, y), left)
    if stream:
        fence()


@kernel
def qdq_corrected(x, xa, xb, out, oa, ob, b, k, begin, end, dtype, spec, nv, searched, tensor_scale, memory, stream):
    room = room_in(memory, spec.group)
    tensor_scale = F(tensor_scale)
    size = size_of(dtype)
    for r in range(begin, end):
        source = x + (r // b) * xa + (r % b) * xb
        target = out + (r // b) * oa + (r % b) * ob
        for first in range(0, k, 32 * spec.group):
            count = load_group(source + first * size, dtype, k - first, room, spec)
            quantized_group(room, spec, nv, searched, tensor_scale, count, KEEP_NOTHING)
            for i in range(count):
                left = k - first - 32 * i
                at = target + (first + 32 * i) * size
                if left >= 32:
                    store(at, dtype, load_f32(room.first + 128 * i), stream)
                else:
                    store_part(at, dtype, load_f32(room.first + 128 * i), left)
    if stream:
        fence()


@kernel
def amax_rows(x, xa, xb, b, k, begin, end, dtype, spec):
    """The bits of max|x| over the blocks that are finite."""
    top = 0
    for r in range(begin, end):
        source = x + (r // b) * xa + (r % b) * xb
        for i in range(0, k, 32):
            at = source + i * size_of(dtype)
            y = load(at, dtype) if k - i >= 32 else load_part(at, dtype, k - i)
            if spec.blocks == 2:
                m0, m1 = amax(low_half(y)), amax(high_half(y))
                top = max(top, m0 if m0 < INF else 0, m1 if m1 < INF else 0)
            else:
                m = amax(y)
                top = max(top, m if m < INF else 0)
    return top


def cost_of(spec: Spec) -> int:
    """About how many copies the arithmetic takes: what is worth a thread."""
    return (2 if spec.corrected else 1) * (2, 3, 20, 300, 40)[spec.mbs]


def qdq(x_ABK: Tensor, recipe: Recipe, out_ABK: Tensor, tensor_scale: Tensor | None) -> None:
    """out = Q(x), rounded once to their dtype; out may be x, or have other strides."""
    a, b, k = x_ABK.shape
    spec, dtype = spec_of(fitted(recipe, k), x_ABK.dtype), DTYPES[x_ABK.dtype]
    if x_ABK.numel() == 0:
        return
    plain = spec.rule == POW2 and not spec.mbs and not spec.corrected
    scale = 1.0 if tensor_scale is None else float(tensor_scale)

    def run(source: Operand, target: Operand, begin: int, end: int, stream: bool, k: int) -> None:
        if plain:
            qdq_plain(*source, *target, b, k, begin, end, dtype, spec, stream)
        else:
            memory = scratch(spec)
            qdq_corrected(
                *source, *target, b, k, begin, end, dtype, spec, *paths_of(spec), scale, memory.ctypes.data, stream
            )

    if contiguous_rows(x_ABK) and contiguous_rows(out_ABK):
        source, target = operand(x_ABK), operand(out_ABK)
        apart = x_ABK.data_ptr() != out_ABK.data_ptr()
        large = x_ABK.nbytes >= STREAM_BYTES
        stream = large and apart and not any(part % ALIGNMENT for part in target)
        each_chunk(lambda begin, end: run(source, target, begin, end, stream, k), a * b, k, cost=cost_of(spec))
        return

    for first in range(0, k, step := segment(32 * spec.group)):
        x, out = x_ABK[:, :, first : first + step], out_ABK[:, :, first : first + step]

        def through_buffers(begin: int, end: int, x: Tensor = x, out: Tensor = out) -> None:
            source, target = Rows(x, begin, end).gather(), Rows(out, begin, end)
            run(source.operand, target.operand, begin, end, False, x.shape[2])
            target.scatter()

        each_chunk(through_buffers, a * b, step, cost=cost_of(spec) + 2)


def noisy_qdq(
    w_ABK: Tensor,
    recipe: Recipe,
    out_ABK: Tensor,
    key: tuple[int, int, int, int],
    std: float,
    tensor_scale: Tensor | None,
) -> None:
    """out = Q(cast(float32(w) + z · float32(std))), see ops/qdq.py. The noise is added in memory's order, into out
    where its strides are w's, and quantized there."""
    noised = out_ABK
    if out_ABK.stride() != w_ABK.stride():
        noised = torch.empty_strided(w_ABK.shape, w_ABK.stride(), dtype=out_ABK.dtype)
    add_noise(w_ABK, noised, key, std)
    qdq(noised, recipe, out_ABK, tensor_scale)


def finite_amax(x_ABK: Tensor, recipe: Recipe) -> Tensor:
    """max|x| over the blocks without NaN or Inf, 0 without any: 0-d float32."""
    spec, dtype = spec_of(recipe, x_ABK.dtype), DTYPES[x_ABK.dtype]
    a, b, k = x_ABK.shape
    if x_ABK.numel() == 0:
        return torch.zeros(())

    def work(begin: int, end: int) -> int:
        source = Rows(x_ABK, begin, end).gather()
        return amax_rows(*source.operand, b, k, begin, end, dtype, spec)

    return torch.tensor(max(each_chunk(work, a * b, k)), dtype=torch.int32).view(torch.float32)

"""Component injection in one pass over the tensor, on the CPU (numba); equal to ops/inject.py bit for bit.

x + (e_scale + e_dz + e_grid)      in float64, eight lanes at a time, in this order; rounded to float32, saturated to
                                   x's dtype and rounded to it
"""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor

from mxrl.ops.groups_cpu import KEEP_NOTHING, load_group, quantized_group, room_in, scratch
from mxrl.ops.ideal_cpu import ideal_group, in_deadzone
from mxrl.ops.lane_functions_cpu import (
    concat,
    floats,
    magnitude,
    maximum,
    minimum,
    quarter_0,
    quarter_1,
    quarter_2,
    quarter_3,
    select,
    splat,
    to_f32,
    to_f64,
    with_sign,
)
from mxrl.ops.lane_memory_cpu import load_f32, read_int
from mxrl.ops.lanes_cpu import inlined, kernel
from mxrl.ops.layout import fitted
from mxrl.ops.memory_cpu import DTYPES, INF, F, size_of, store, store_part
from mxrl.ops.passes_cpu import NAN_BITS, paths_of, spec_of, unsupported
from mxrl.ops.qdq_cpu import cost_of
from mxrl.ops.rows_cpu import Rows, each_chunk
from mxrl.recipes import Recipe

__all__ = ["inject", "unsupported"]


@inlined
def _injected(x, q, ideal, inside, scale, deadzone, grid):
    """Eight elements, float32."""
    x, q, ideal = to_f64(x), to_f64(q), to_f64(ideal)
    rest = ideal - x
    error = splat(0.0, x)
    if scale:
        error = error + (q - ideal)
    if deadzone:
        error = error + select(inside, rest, 0.0)
    if grid:
        error = error + select(inside, 0.0, rest)
    return to_f32(x + error)


@kernel
def inject_rows(
    x, xa, xb, out, oa, ob, b, k, begin, end, dtype, spec, nv, searched, tensor_scale, memory, scale, deadzone, grid
):
    room = room_in(memory, spec.group)
    tensor_scale, largest = F(tensor_scale), F(spec.largest)
    size = size_of(dtype)
    for r in range(begin, end):
        source = x + (r // b) * xa + (r % b) * xb
        target = out + (r // b) * oa + (r % b) * ob
        for first in range(0, k, 32 * spec.group):
            count = load_group(source + first * size, dtype, k - first, room, spec)
            quantized_group(room, spec, nv, searched, tensor_scale, count, KEEP_NOTHING)
            ideal_group(room, spec, nv, count)
            for i in range(count):
                v = load_f32(room.x + 128 * i)
                q = load_f32(room.first + 128 * i)
                ideal, inside = load_f32(room.second + 128 * i), in_deadzone(v, room, nv, i)
                y0 = _injected(quarter_0(v), quarter_0(q), quarter_0(ideal), quarter_0(inside), scale, deadzone, grid)
                y1 = _injected(quarter_1(v), quarter_1(q), quarter_1(ideal), quarter_1(inside), scale, deadzone, grid)
                y2 = _injected(quarter_2(v), quarter_2(q), quarter_2(ideal), quarter_2(inside), scale, deadzone, grid)
                y3 = _injected(quarter_3(v), quarter_3(q), quarter_3(ideal), quarter_3(inside), scale, deadzone, grid)
                low, high = concat(y0, y1), concat(y2, y3)
                if scale or deadzone or grid:  # a poisoned block has no components
                    low, high = maximum(minimum(low, largest), -largest), maximum(minimum(high, largest), -largest)
                    low = low if read_int(room.maxima, 2 * i) < INF else splat(floats(NAN_BITS), low)
                    high = high if read_int(room.maxima, 2 * i + 1) < INF else splat(floats(NAN_BITS), high)
                y = concat(low, high)
                y = select(y == F(0), with_sign(magnitude(y), v), y)  # zeros keep x's sign
                left = k - first - 32 * i
                at = target + (first + 32 * i) * size
                if left >= 32:
                    store(at, dtype, y, False)
                else:
                    store_part(at, dtype, y, left)


def inject(
    x_ABK: Tensor, recipe: Recipe, chosen: Collection[str], out_ABK: Tensor, tensor_scale: Tensor | None
) -> None:
    """out = x + the components in `chosen` of recipe's error; out may be x."""
    a, b, k = x_ABK.shape
    spec, dtype = spec_of(fitted(recipe, k), x_ABK.dtype), DTYPES[x_ABK.dtype]
    wanted = tuple(name in chosen for name in ("scale", "deadzone", "grid"))
    tensor = 1.0 if tensor_scale is None else float(tensor_scale)

    def work(begin: int, end: int) -> None:
        source, target, memory = Rows(x_ABK, begin, end).gather(), Rows(out_ABK, begin, end), scratch(spec)
        place = (b, k, begin, end, dtype, spec, *paths_of(spec), tensor, memory.ctypes.data)
        inject_rows(*source.operand, *target.operand, *place, *wanted)
        target.scatter()

    if x_ABK.numel():
        each_chunk(work, a * b, k, cost=cost_of(spec) + 4)

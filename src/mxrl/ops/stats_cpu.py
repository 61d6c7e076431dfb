"""The decomposition's statistics in one pass over the tensor, on the CPU (numba); ops/stats.py says what they are.

Per element, eight lanes of float64 at a time, with error = q − x, scale = q − q*, rest = q* − x:

    x²  q·x  scale²          and, in D and outside of it apart,   error²  rest²  scale·rest

which are all of the sums: D and its complement add up without cancellation. Per block, log2 of s / s* is taken eight
blocks at a time, because a call into the C library would spill every vector.

Counts are exact. Sums are added lane by lane along fixed chunks of rows, then over lanes, then over the chunks in their
order: the same whatever the number of threads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from mxrl.formats import E2M1, E4M3
from mxrl.ops.groups_cpu import KEEP_SCALES, load_group, quantized_group, room_in, scratch
from mxrl.ops.ideal_cpu import ideal_group, in_deadzone
from mxrl.ops.lane_functions_cpu import (
    bits,
    bits64,
    constant,
    count_true,
    floats,
    high_half,
    lane,
    lane_numbers,
    low_half,
    maximum,
    minimum,
    multiply_add,
    quarter_0,
    quarter_1,
    quarter_2,
    quarter_3,
    select,
    to_f64,
    truncate_f64,
)
from mxrl.ops.lane_memory_cpu import (
    load_8_f64,
    load_f32,
    load_f32_part,
    read_float,
    read_int,
    read_int64,
    store_8_i64,
    write_double,
    write_int64,
)
from mxrl.ops.lanes_cpu import inlined, kernel
from mxrl.ops.layout import fitted
from mxrl.ops.memory_cpu import DTYPES, INF, F, size_of
from mxrl.ops.noise_cpu import LN2, log_parts
from mxrl.ops.passes_cpu import IDEAL, paths_of, spec_of, unsupported
from mxrl.ops.qdq_cpu import cost_of
from mxrl.ops.rows_cpu import Operand, Rows, each_chunk
from mxrl.ops.stats import DELTA_BINS
from mxrl.recipes import Recipe

__all__ = ["stats", "unsupported"]

SUMS = (
    "sq_norm", "dot_q_x", "sq_scale", "sq_error_deadzone", "sq_error_elsewhere", "sq_deadzone", "sq_grid",
    "dot_scale_deadzone", "dot_scale_grid", "delta_sum", "delta_sq_sum", "gamma_sum",
)  # fmt: skip
COUNTS = (
    "numel", "deadzone_count", "exact_zero_count", "deadzone_nonzero_count",
    "zero_blocks", "clamped_blocks", "nonfinite_blocks", "delta_count",
)  # fmt: skip
Q_MAX_E2M1, Q_MAX_E4M3 = E2M1.max, E4M3.max
INVERSE_LN2 = 1 / LN2
E4M3_BITS = E4M3.mantissa_bits
_zeros = constant("f64", [0.0] * 8)


@inlined
def add_eight(sums, x, q, ideal, inside):
    """The products of eight elements added to `sums`, nine vectors in the order of SUMS, and `quiet`."""
    x, q, ideal = to_f64(x), to_f64(q), to_f64(ideal)
    error, scale, rest = q - x, q - ideal, ideal - x
    squares, rests, crosses = (
        multiply_add(error, error, select(inside, sums[3], sums[4])),
        multiply_add(rest, rest, select(inside, sums[5], sums[6])),
        multiply_add(scale, rest, select(inside, sums[7], sums[8])),
    )
    return (
        multiply_add(x, x, sums[0]),
        multiply_add(q, x, sums[1]),
        multiply_add(scale, scale, sums[2]),
        select(inside, squares, sums[3]),
        select(inside, sums[4], squares),
        select(inside, rests, sums[5]),
        select(inside, sums[6], rests),
        select(inside, crosses, sums[7]),
        select(inside, sums[8], crosses),
        sums[9],
    )


@inlined
def add_eight_quiet(sums, x, q, ideal, dead):
    """The same where Q and Q* are zero in all of D: `dead` has its elements, x has zeros in their place."""
    x, q, ideal, dead = to_f64(x), to_f64(q), to_f64(ideal), to_f64(dead)
    error, scale, rest = q - x, q - ideal, ideal - x
    return (
        multiply_add(x, x, sums[0]),
        multiply_add(q, x, sums[1]),
        multiply_add(scale, scale, sums[2]),
        sums[3],
        multiply_add(error, error, sums[4]),
        sums[5],
        multiply_add(rest, rest, sums[6]),
        sums[7],
        multiply_add(scale, rest, sums[8]),
        multiply_add(dead, dead, sums[9]),
    )


@inlined
def add_block(sums, x, q, ideal, inside, quiet):
    if quiet:
        dead = select(inside, x, 0.0)
        x = select(inside, 0.0, x)
        sums = add_eight_quiet(sums, quarter_0(x), quarter_0(q), quarter_0(ideal), quarter_0(dead))
        sums = add_eight_quiet(sums, quarter_1(x), quarter_1(q), quarter_1(ideal), quarter_1(dead))
        sums = add_eight_quiet(sums, quarter_2(x), quarter_2(q), quarter_2(ideal), quarter_2(dead))
        return add_eight_quiet(sums, quarter_3(x), quarter_3(q), quarter_3(ideal), quarter_3(dead))
    sums = add_eight(sums, quarter_0(x), quarter_0(q), quarter_0(ideal), quarter_0(inside))
    sums = add_eight(sums, quarter_1(x), quarter_1(q), quarter_1(ideal), quarter_1(inside))
    sums = add_eight(sums, quarter_2(x), quarter_2(q), quarter_2(ideal), quarter_2(inside))
    return add_eight(sums, quarter_3(x), quarter_3(q), quarter_3(ideal), quarter_3(inside))


@inlined
def total(v):
    v = low_half(v) + high_half(v)
    v = low_half(v) + high_half(v)
    return lane(v, 0) + lane(v, 1)


@inlined
def note_scale(at, i, m, s, k):
    """The i-th of eight blocks whose delta is wanted: its maximum, scale and MBS factor, as float64."""
    write_double(at, i, np.float64(floats(m)))
    write_double(at + 64, i, np.float64(s))
    write_double(at + 128, i, (256.0 + k) / 256.0)


@inlined
def add_deltas(deltas, at, n, hist, q_max, spec):
    """log2(s / s*) of the first n blocks noted: their sums, and a count in `hist` (address of int64) each."""
    effective = load_8_f64(at + 64)
    if spec.rule == IDEAL:
        effective = effective / q_max  # its scale is the block's maximum
    if spec.mbs:
        effective = effective / load_8_f64(at + 128)
    ratio = effective / (load_8_f64(at) / q_max)
    real = lane_numbers(bits64(ratio)) < n
    ratio = select(real, ratio, 1.0)
    exponent, rest = log_parts(ratio)
    delta = exponent + rest * INVERSE_LN2
    bins = maximum(minimum(truncate_f64((delta + 1.0) * (DELTA_BINS / 2)), DELTA_BINS - 1), 0)
    store_8_i64(at, bins)
    for i in range(n):
        write_int64(hist, read_int64(at, i), read_int64(hist, read_int64(at, i)) + 1)
    return deltas[0] + delta, deltas[1] + delta * delta, select(real, deltas[2] + ratio, deltas[2])


@kernel
def stats_rows(
    x,
    xa,
    xb,
    other,
    oa,
    ob,
    foreign,
    b,
    k,
    begin,
    end,
    dtype,
    spec,
    nv,
    searched,
    tensor_scale,
    memory,
    sums_at,
    counts,
):
    """Rows [begin, end); `other`: float32 rows that replace Q(x) where `foreign`.

    sums_at, counts: the addresses of float64 [SUMS] and int64 [COUNTS + DELTA_BINS].
    """
    room = room_in(memory, spec.group)
    tensor_scale = F(tensor_scale)
    size = size_of(dtype)
    q_max = Q_MAX_E4M3 if spec.mantissa_bits == E4M3_BITS else Q_MAX_E2M1
    zero = _zeros()
    sums = (zero, zero, zero, zero, zero, zero, zero, zero, zero, zero)
    deltas = (zero, zero, zero)
    numel = dead = exact_zeros = dead_nonzero = zero_blocks = clamped = nonfinite = used = pending = 0
    for r in range(begin, end):
        source, theirs = x + (r // b) * xa + (r % b) * xb, other + (r // b) * oa + (r % b) * ob
        for first in range(0, k, 32 * spec.group):
            count = load_group(source + first * size, dtype, k - first, room, spec)
            mantissa = 0
            if not foreign:
                mantissa = quantized_group(room, spec, nv, searched, tensor_scale, count, KEEP_SCALES)
            ideal_group(room, spec, nv, count)
            for i in range(count):
                left = min(k - first - 32 * i, 32)
                v, ideal = load_f32(room.x + 128 * i), load_f32(room.second + 128 * i)
                if foreign:
                    at = theirs + 4 * (first + 32 * i)
                    q = load_f32(at) if left == 32 else load_f32_part(at, left)
                else:
                    q = load_f32(room.first + 128 * i)
                low = 0 if read_int(room.maxima, 2 * i) < INF else 16  # the lanes that count
                high = left if read_int(room.maxima, 2 * i + 1) < INF else min(left, 16)
                if low < high:
                    inside, is_zero = in_deadzone(v, room, nv, i), v == 0.0
                    if high - low < 32:
                        lanes = lane_numbers(bits(v))
                        valid = (lanes >= low) & (lanes < high)
                        v, q, ideal = select(valid, v, 0.0), select(valid, q, 0.0), select(valid, ideal, 0.0)
                        inside, is_zero = inside & valid, is_zero & valid
                    nonzero = count_true(inside & (q != 0.0))
                    numel += high - low
                    dead += count_true(inside)
                    exact_zeros += count_true(is_zero)
                    dead_nonzero += nonzero
                    sums = add_block(sums, v, q, ideal, inside, nonzero == 0)
            for i in range(count):
                halves = 2 if nv is not None and k - first - 32 * i > 16 else 1
                for j in range(halves):
                    m, at = read_int(room.maxima, 2 * i + j), i * spec.blocks + j
                    if m >= INF:
                        nonfinite += 1
                    elif m == 0:
                        zero_blocks += 1
                    elif not foreign:
                        if read_int(room.clamped, at):
                            clamped += 1
                        else:
                            used += 1
                            note_scale(room.noted, pending, m, read_float(room.scales, at), mantissa)
                            pending += 1
                            if pending == 8:
                                deltas = add_deltas(deltas, room.noted, 8, counts + 8 * len(COUNTS), q_max, spec)
                                pending = 0
    if pending:
        deltas = add_deltas(deltas, room.noted, pending, counts + 8 * len(COUNTS), q_max, spec)
    quiet = sums[9]
    sums = (
        sums[0] + quiet, sums[1], sums[2], sums[3] + quiet, sums[4], sums[5] + quiet, sums[6], sums[7], sums[8]
    )  # fmt: skip
    for i, v in enumerate(sums + deltas):
        write_double(sums_at, i, total(v))
    for i, n in enumerate((numel, dead, exact_zeros, dead_nonzero, zero_blocks, clamped, nonfinite, used)):
        write_int64(counts, i, n)


def stats(x_ABK: Tensor, recipe: Recipe, foreign_ABK: Tensor | None, tensor_scale: Tensor | None) -> dict[str, Any]:
    """The fields of `mxrl.ErrorStats`, by name. foreign_ABK: float32, or None for Q(x)."""
    a, b, k = x_ABK.shape
    spec, dtype = spec_of(fitted(recipe, k), x_ABK.dtype), DTYPES[x_ABK.dtype]
    tensor = 1.0 if tensor_scale is None else float(tensor_scale)

    def work(begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        source, memory = Rows(x_ABK, begin, end).gather(), scratch(spec)
        theirs = None if foreign_ABK is None else Rows(foreign_ABK, begin, end, slot=1).gather()
        other = Operand(0, 0, 0) if theirs is None else theirs.operand
        sums, counts = np.zeros(len(SUMS)), np.zeros(len(COUNTS) + DELTA_BINS, np.int64)
        place = (b, k, begin, end, dtype, spec, *paths_of(spec), tensor, memory.ctypes.data)
        stats_rows(*source.operand, *other, theirs is not None, *place, sums.ctypes.data, counts.ctypes.data)
        return sums, counts

    parts = each_chunk(work, a * b, k, cost=cost_of(spec) + 4) if x_ABK.numel() else []
    sums, counts = np.zeros(len(SUMS)), np.zeros(len(COUNTS) + DELTA_BINS, np.int64)
    for part_sums, part_counts in parts:
        sums += part_sums
        counts += part_counts
    out: dict[str, Any] = dict(zip(SUMS, sums.tolist(), strict=True))
    out |= dict(zip(COUNTS, counts.tolist(), strict=False))
    out["sq_error"] = out["sq_error_deadzone"] + out["sq_error_elsewhere"]
    out["dot_deadzone_grid"] = 0.0  # disjoint supports
    out["delta_hist"] = tuple(counts[len(COUNTS) :].tolist())
    return out

"""MBS inside the CPU kernels: the prescale p = (256 + k) / 256 of a macro-block, aligned or searched for.

The search for k tries 16 candidates at a time, one a lane: scales of all of them at once, then each candidate's error
over the block, and the 16 trees of sums are merged pairwise, which gives the errors as lanes again:

    lanes of a, lanes of b   ->   first halves + second halves   ->  ...  ->  sum of a, sum of b, ...

level by level the tree of corrections.halving_sum. It runs on |x| / 2^e, e the macro maximum's exponent, where p / s
and s · fl(1/p) are exact products. Every number differs from the reference's by a power of two alone, so it is rounded
alike, except where squares vanish in both. Maxima near the ends of the range take the plain way.
"""

from __future__ import annotations

import numpy as np

from mxrl.ops.lane_functions_cpu import (
    bits,
    constant,
    first_2,
    first_4,
    first_8,
    first_16,
    first_true,
    floats,
    halve,
    lane,
    magnitude,
    mask_bits,
    maximum,
    minimum,
    second_2,
    second_4,
    second_8,
    second_16,
    smallest_lane,
    with_sign,
)
from mxrl.ops.lane_memory_cpu import load_16_f32, load_f32, read_float, read_int, store_16_f32, write_float, write_int
from mxrl.ops.lanes_cpu import inlined
from mxrl.ops.memory_cpu import INF, F
from mxrl.ops.passes_cpu import (
    JOINT,
    NAN_BITS,
    POW2,
    SEARCH256,
    halving_sum,
    pow2_of_code,
    quantize_block,
    round_to_grid,
)


@inlined
def align_mantissa(m):
    """k that gives the macro-block's maximum its ideal scale; m: the bits of a finite maximum."""
    if m == 0:
        return 0
    fraction = (m & 0x7FFFFF) | 0x800000
    if m < 0x800000:  # subnormal
        fraction = m
        while fraction < 0x800000:
            fraction <<= 1
    numerator = (384.0 if fraction <= 0xC00000 else 768.0) * 2.0**23
    return int(numerator / fraction) - 256  # a quotient of 24-bit numbers that isn't whole is 2^-33 away from one


@inlined
def macro_maximum(maxima, n):
    """The largest of the finite blocks' maxima, as bits."""
    top = 0
    for i in range(n):
        m = read_int(maxima, i)
        if m < INF:
            top = max(top, m)
    return top


@inlined
def prescale(x, p, largest):
    return maximum(minimum(x * p, largest), -largest)


@inlined
def prescaled_maximum(m, p, largest):
    """The bits of max|prescale(x)|, which keeps order; a poisoned block stays so."""
    return np.int64(bits(min(floats(m) * p, largest))) if m < INF else NAN_BITS


@inlined
def _squared_error(x, m, p, inverse, unit, lower, spec):
    largest = F(spec.largest)
    y = prescale(x, p, largest)
    _, value, _, _, _ = quantize_block(y, prescaled_maximum(m, p, largest), lower, spec)
    error = (with_sign(value, y) * inverse - x) * unit
    return halving_sum(error * error)


@inlined
def _search_plainly(xs, room, spec, count):
    """`search` on the numbers as they are, one candidate after the other."""
    n, errors, lowers = spec.group, room.errors, room.lowers
    unit = pow2_of_code(254 - max(macro_maximum(room.maxima, count) >> 23, 1))
    best, best_error = 0, F(np.inf)
    for k in range(0, 256, 1 if spec.mbs == SEARCH256 else 16):
        p = F(256 + k) / F(256)
        inverse = F(1) / p
        size = padded(n)
        for i in range(size):
            error, lower = F(0), 0
            m = read_int(room.maxima, i) if i < count else INF
            if m < INF:
                x = load_f32(xs + 128 * i)
                for less in range(2 if spec.mbs == JOINT else 1):
                    other = _squared_error(x, m, p, inverse, unit, less, spec)
                    if less == 0 or other < error:
                        error, lower = other, less
            write_float(errors, i, error)
            write_int(lowers, size + i, lower)
        while size > 1:
            size //= 2
            for i in range(size):
                write_float(errors, i, read_float(errors, i) + read_float(errors, size + i))
        total = read_float(errors, 0)
        if k == 0 or total < best_error:
            best, best_error = k, total
            for i in range(count):
                write_int(lowers, i, read_int(lowers, padded(n) + i))
    return best


@inlined
def padded(n):
    """The power of two from n on."""
    size = 1
    while size < n:
        size *= 2
    return size


_candidates = constant("f32", [16.0 * j for j in range(16)])


@inlined
def _error(a, over, back, j, spec):
    """Candidate j's squares over a block, added from 32 to 16 lanes. over: p / s; back: s · fl(1/p)."""
    grid = minimum(round_to_grid(a * lane(over, j), spec.mantissa_bits, spec.least), F(spec.top))
    error = grid * lane(back, j) - a
    return halve(error * error)


@inlined
def _four_errors(a, over, back, j, spec):
    """Of candidates j ... j + 3: their squares, added to 8 lanes each and laid side by side."""
    a0, a1 = _error(a, over, back, j, spec), _error(a, over, back, j + 1, spec)
    b0 = first_16(a0, a1) + second_16(a0, a1)
    a0, a1 = _error(a, over, back, j + 2, spec), _error(a, over, back, j + 3, spec)
    b1 = first_16(a0, a1) + second_16(a0, a1)
    return first_8(b0, b1) + second_8(b0, b1)


@inlined
def _errors(a, over, back, spec):
    """The 16 candidates' squared errors of one block of magnitudes, as lanes."""
    c0, c1 = _four_errors(a, over, back, 0, spec), _four_errors(a, over, back, 4, spec)
    d0 = first_4(c0, c1) + second_4(c0, c1)
    c0, c1 = _four_errors(a, over, back, 8, spec), _four_errors(a, over, back, 12, spec)
    d1 = first_4(c0, c1) + second_4(c0, c1)
    return first_2(d0, d1) + second_2(d0, d1)


@inlined
def _candidate_errors(a, m, p, inverse, lower, spec):
    """Lane j: the error under p[j], with the scale that p[j] · m gets. m: float32."""
    raw = ((bits(p * m) + spec.carry) >> 23) - (spec.q + lower)
    code = maximum(raw, 0)
    s = floats(maximum(code << 23, 0x00400000))
    return _errors(a, p * floats((254 - code) << 23), s * inverse, spec)


@inlined
def _search_by_lanes(xs, room, spec, count, top):
    """`search` for power-of-two scales far from the ends of the range; top: the macro maximum's bits."""
    unit = floats((254 - (top >> 23)) << 23)
    best, best_error = 0, INF
    step = F(1) if spec.mbs == SEARCH256 else F(16)
    for first in range(0, 256, 16 if spec.mbs == SEARCH256 else 256):
        p = (_candidates() * (step * F(1 / 16)) + F(256 + first)) * F(1 / 256)
        inverse = F(1) / p
        size = padded(spec.group)
        for i in range(size):
            total = p * F(0)
            m = read_int(room.maxima, i) if i < count else 0
            if 0 < m < INF:
                a = magnitude(load_f32(xs + 128 * i)) * unit
                for less in range(2 if spec.mbs == JOINT else 1):
                    other = _candidate_errors(a, floats(m) * unit, p, inverse, less, spec)
                    if less == 0:
                        total = other
                    else:
                        write_int(room.lowers, size + i, mask_bits(other < total))
                        total = minimum(total, other)
            elif spec.mbs == JOINT:
                write_int(room.lowers, size + i, 0)
            store_16_f32(room.errors + 64 * i, total)
        while size > 1:
            size //= 2
            for i in range(size):
                at = room.errors + 64 * i
                store_16_f32(at, load_16_f32(at) + load_16_f32(at + 64 * size))
        totals = bits(load_16_f32(room.errors))  # integers order like floats that aren't negative
        least = smallest_lane(totals)
        if least < best_error:
            best_lane = first_true(totals == least)
            best, best_error = first + best_lane * int(step), least
            if spec.mbs == JOINT:
                for i in range(count):
                    write_int(room.lowers, i, (read_int(room.lowers, padded(spec.group) + i) >> best_lane) & 1)
    return best


@inlined
def search(xs, room, spec, count):
    """The k of least squared error, ties to the smallest; joint: room.lowers is 1 where a block takes ceil - 1."""
    top = macro_maximum(room.maxima, count)
    room_above = (bits(F(spec.largest)) >> 23) - 3  # 4 M must not overflow
    if spec.rule == POW2 and 127 - 40 <= top >> 23 <= room_above:
        return _search_by_lanes(xs, room, spec, count, top)
    return _search_plainly(xs, room, spec, count)

"""AQN's noise on the CPU: corrections.philox_normal's bits, added to a weight matrix in memory's order.

    out[i] = cast(float32(w[i]) + z[i] · float32(std))      z[4j ... 4j + 3]: the four words of Philox's counter j

Eight counters at a time give 32 values. Both branches of AS 241 are computed for every lane, and one is taken: the
operations and their order are corrections.py's, so the bits are too.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from mxrl.corrections import _CENTRAL, _LN2, _TAIL
from mxrl.ops.lane_functions_cpu import (
    bits64,
    constant,
    count_to_f64,
    floats64,
    interleave,
    maximum,
    minimum,
    select,
    splat,
    square_root,
    to_f32,
)
from mxrl.ops.lane_memory_cpu import I64
from mxrl.ops.lanes_cpu import inlined, kernel
from mxrl.ops.memory_cpu import DTYPES, F, load, load_part, size_of, store, store_part
from mxrl.ops.rows_cpu import each_chunk

WORD = 0xFFFFFFFF
ROW = 4096  # elements: what chunks are counted in
COST = 16  # copies that the arithmetic takes
CENTRAL_NUMERATOR, CENTRAL_DENOMINATOR = _CENTRAL
TAIL_NUMERATOR, TAIL_DENOMINATOR = _TAIL
ATANH = tuple(1.0 / n for n in range(23, 0, -2))
LN2 = _LN2
_numbers = constant("i64", list(range(I64.count)))


@inlined
def philox(index, k0, k1, c2, c3):
    """Philox4x32-10 of eight 64-bit counters: four vectors of words in int64."""
    x0, x1, x2, x3 = index & WORD, index >> 32, splat(c2, index), splat(c3, index)
    for _ in range(10):
        product0, product1 = x0 * 0xD2511F53, x2 * 0xCD9E8D57
        x0, x1, x2, x3 = (product1 >> 32) ^ x1 ^ k0, product1 & WORD, (product0 >> 32) ^ x3 ^ k1, product0 & WORD
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    return x0, x1, x2, x3


@inlined
def horner8(c, r):
    out = r * c[0] + c[1]
    out = out * r + c[2]
    out = out * r + c[3]
    out = out * r + c[4]
    out = out * r + c[5]
    out = out * r + c[6]
    return out * r + c[7]


@inlined
def log_parts(x):
    """(e, t) with log x = e · ln 2 + t, of normal float64 x > 0: corrections._log, by atanh's series."""
    b = bits64(x)
    mantissa = floats64((b & ((1 << 52) - 1)) | (0x3FE << 52))  # in [1/2, 1)
    exponent = count_to_f64((b >> 52) - 1022)
    low = mantissa < 0.7071067811865476
    mantissa = select(low, mantissa * 2.0, mantissa)
    exponent = select(low, exponent - 1.0, exponent)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    t = s * s
    series = t * ATANH[0] + ATANH[1]
    series = series * t + ATANH[2]
    series = series * t + ATANH[3]
    series = series * t + ATANH[4]
    series = series * t + ATANH[5]
    series = series * t + ATANH[6]
    series = series * t + ATANH[7]
    series = series * t + ATANH[8]
    series = series * t + ATANH[9]
    series = series * t + ATANH[10]
    series = series * t + ATANH[11]
    return exponent, s * series * 2.0


@inlined
def normal(word):
    """float32 normal deviates of eight words."""
    u = (count_to_f64(word) + 0.5) * 2.0**-32
    q = u - 0.5
    r = 0.180625 - q * q
    central = q * horner8(CENTRAL_NUMERATOR, r) / horner8(CENTRAL_DENOMINATOR, r)
    exponent, rest = log_parts(minimum(u, 1.0 - u))
    t = square_root((exponent * LN2 + rest) * -1.0) - 1.6
    tail = horner8(TAIL_NUMERATOR, t) / horner8(TAIL_DENOMINATOR, t)
    tail = select(q < 0.0, tail * -1.0, tail)
    return to_f32(select(maximum(q, q * -1.0) > 0.425, tail, central))


@inlined
def normals(index, k0, k1, c2, c3):
    """The 32 deviates of counters index ... index + 7, in order."""
    w0, w1, w2, w3 = philox(_numbers() + index, k0, k1, c2, c3)
    return interleave(interleave(normal(w0), normal(w2)), interleave(normal(w1), normal(w3)))


@kernel
def add_noise_flat(w, w_type, out, out_type, begin, end, k0, k1, c2, c3, std):
    """Elements [begin, end), begin a multiple of 32."""
    for i in range(begin, end, 32):
        noise = normals(i // 4, k0, k1, c2, c3) * F(std)
        source, target = w + i * size_of(w_type), out + i * size_of(out_type)
        if end - i >= 32:
            store(target, out_type, load(source, w_type) + noise, False)
        else:
            store_part(target, out_type, load_part(source, w_type, end - i) + noise, end - i)


def add_noise(w: Tensor, out: Tensor, key: tuple[int, int, int, int], std: float) -> None:
    """out = cast(w + z · std), for w and out dense in memory with the same strides; out may be w."""
    n = w.numel()
    w_type, out_type = DTYPES[w.dtype], DTYPES[out.dtype]

    def work(begin: int, end: int) -> None:
        last = min(end * ROW, n)
        add_noise_flat(w.data_ptr(), w_type, out.data_ptr(), out_type, begin * ROW, last, *key, float(np.float32(std)))

    each_chunk(work, -(-n // ROW), ROW, cost=COST)

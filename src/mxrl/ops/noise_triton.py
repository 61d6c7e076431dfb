"""`corrections.philox_normal` as device functions: the same bits, element by element.

Element i is word i % 4 of Philox4x32-10 at counter (i // 4, c2, c3) under the key (k0, k1), mapped to (0, 1) and
through the normal quantile in float64 (Wichura's AS 241). The polynomials are Horner's with separate products and sums,
the log is made of + − × ÷ alone, and the square root is correctly rounded: no library function's last bit is relied on.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from mxrl import corrections

_WORD: tl.constexpr = tl.constexpr(0xFFFFFFFF)
_CENTRAL_TOP: tl.constexpr = tl.constexpr(corrections._CENTRAL[0])
_CENTRAL_BOTTOM: tl.constexpr = tl.constexpr(corrections._CENTRAL[1])
_TAIL_TOP: tl.constexpr = tl.constexpr(corrections._TAIL[0])
_TAIL_BOTTOM: tl.constexpr = tl.constexpr(corrections._TAIL[1])
_ATANH: tl.constexpr = tl.constexpr(tuple(1.0 / n for n in range(23, 0, -2)))


@triton.constexpr_function
def _count(values):
    return len(values)


@triton.constexpr_function
def _at(values, i):
    return values[i]


@triton.jit
def _word(index, k0, k1, c2, c3):
    """The 32-bit word (uint64 [...]) of each element index (int64 [...]); key words are uint64 scalars."""
    counter = (index >> 2).to(tl.uint64)
    w0 = counter & _WORD
    w1 = counter >> 32
    w2 = w0 * 0 + c2
    w3 = w0 * 0 + c3
    for _ in tl.static_range(10):
        product0 = w0 * 0xD2511F53  # 32 by 32 bits: exact in 64
        product1 = w2 * 0xCD9E8D57
        w0 = (product1 >> 32) ^ w1 ^ k0
        w1 = product1 & _WORD
        w2 = (product0 >> 32) ^ w3 ^ k1
        w3 = product0 & _WORD
        k0 = (k0 + 0x9E3779B9) & _WORD
        k1 = (k1 + 0xBB67AE85) & _WORD
    which = index & 3
    return tl.where(which < 2, tl.where(which == 0, w0, w1), tl.where(which == 2, w2, w3))


@triton.jit
def _horner(r, COEFFICIENTS: tl.constexpr):
    out = tl.full(r.shape, _at(COEFFICIENTS, 0), tl.float64)
    for i in tl.static_range(1, _count(COEFFICIENTS)):
        out = out * r + _at(COEFFICIENTS, i)
    return out


@triton.jit
def _log(x):
    """Natural log of normal float64 x > 0."""
    bits = x.to(tl.int64, bitcast=True)
    mantissa = ((bits & 0xFFFFFFFFFFFFF) | 0x3FE0000000000000).to(tl.float64, bitcast=True)  # in [1/2, 1)
    exponent = (bits >> 52) - 1022
    low = mantissa < 0.7071067811865476
    mantissa = tl.where(low, mantissa * 2.0, mantissa)
    power = tl.where(low, exponent - 1, exponent).to(tl.float64)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    return power * 0.6931471805599453 + s * _horner(s * s, _ATANH) * 2.0


@triton.jit
def standard_normal(index, k0, k1, c2, c3):
    """float32 noise of element indices int64 [...]; k0, k1, c2, c3: 32-bit words as (signed) integers."""
    k0, k1 = k0.to(tl.uint64) & _WORD, k1.to(tl.uint64) & _WORD
    word = _word(index, k0, k1, c2.to(tl.uint64) & _WORD, c3.to(tl.uint64) & _WORD)
    u = (word.to(tl.int64).to(tl.float64) + 0.5) * 2.3283064365386963e-10  # 2^-32
    q = u - 0.5
    r = 0.180625 - q * q
    central = q * _horner(r, _CENTRAL_TOP) / _horner(r, _CENTRAL_BOTTOM)
    t = tl.sqrt(-_log(tl.minimum(u, 1.0 - u))) - 1.6
    tail = _horner(t, _TAIL_TOP) / _horner(t, _TAIL_BOTTOM)
    tail = tl.where(q < 0, -tail, tail)
    return tl.where(tl.abs(q) > 0.425, tail, central).to(tl.float32)

"""Block maximum -> block scale, for every rule.

With m = max|x| of a block, m = f · 2^e and f in [1, 2) (from `frexp`, never from a floating log2), the exponent E of
the power-of-two scale is, for E2M1 (q_max = 6 = 1.5 · 2^2):

    ceil    e - 2 if f <= 1.5 else e - 1     2^ceil(log2(m / 6)): never clips; the paper's rule, and the default
    floor   e - 2                            OCP's rule: m / s in [4, 8), clips above 6
    even    e - 2 + [f >= 1.75]              the maximum is rounded to the element's mantissa first

and in general q_max = c · 2^q gives e - q and e - q + 1 on either side of f = c. Beside them: `ideal` m / 6, unrounded;
`e8m{k}` the smallest (1 + j/2^k) · 2^E that is at least m / 6; NVFP4's E4M3 scale under one float32 scale a tensor.
Note that ceil has a *higher* squared error than floor and even on ordinary data; what it buys is that nothing clips.

Sources: numerics of arXiv 2605.20402; OCP Microscaling Formats v1.0 section 6.3 (floor).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mxrl.elements import decode, encode, floor_to_grid, round_to_grid
from mxrl.formats import E4M3, E8M0_BIAS, E8M0_MAX_EXPONENT, E8M0_MIN_EXPONENT, E8M0_NAN, BlockFormat

E4M3_NAN = 0x7F


@dataclass(frozen=True)
class BlockScale:
    """Scales of a set of blocks, all of one shape [...].

    value: float32 or float64, NaN where the block held a NaN or an Inf. For `ideal`, the block *maximum* (the
        quotient m / 6 is never rounded on its own: see `to_grid` and `from_grid`).
    code: int32, what is stored: E8M0, `(E8M0 << k) | mantissa` for e8m{k}, E4M3 for NVFP4, 0 for ideal.
    clamped: bool, where the exponent left [-127, 127] and was clamped.
    """

    value: Tensor
    code: Tensor
    clamped: Tensor


@functools.lru_cache(maxsize=16)
def _powers(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor([2.0**e for e in range(E8M0_MIN_EXPONENT, E8M0_MAX_EXPONENT + 1)], dtype=dtype, device=device)


def pow2(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    """2^exponent exactly (subnormals too) for an integer tensor within [-127, 127]."""
    return _powers(dtype, exponent.device)[exponent.long() + E8M0_BIAS]


def _split(m: Tensor) -> tuple[Tensor, Tensor]:
    """m = f · 2^e with f in [1, 2), exact; zeros give f = 0."""
    mantissa, exponent = torch.frexp(m)
    return mantissa * 2, exponent - 1


def divide(a: Tensor, b: float) -> Tensor:
    """a / b, correctly rounded on every device: CUDA turns a division by a Python number into a product with 1 / b."""
    return a / torch.full((), b, dtype=a.dtype, device=a.device)


def pow2_exponent(m: Tensor, fmt: BlockFormat, rule: str) -> Tensor:
    """The unclamped exponent of the power-of-two scale: int32, for m > 0."""
    q = math.floor(math.log2(fmt.q_max))
    f, e = _split(m)
    if rule == "floor":
        return e - q
    if rule == "even":
        halfway = 2 - 2.0 ** -(fmt.element.mantissa_bits + 1)
        return e - q + (f >= halfway).to(e.dtype)
    return e - q + (f > fmt.q_max / 2**q).to(e.dtype)


def block_scale(
    m: Tensor,
    fmt: BlockFormat,
    rule: str,
    *,
    tensor_scale: Tensor | None = None,
    lower: Tensor | None = None,
    to_four: bool = False,
) -> BlockScale:
    """Scales for the block maxima `m` (float32 or float64; NaN or Inf poisons its block).

    tensor_scale: NVFP4's float32 scale of the tensor, 0-d. lower: bool like m, one exponent less (joint search).
    to_four: NVFP4 4/6, the scale that sends the maximum to 4 instead of 6.
    """
    bad = ~torch.isfinite(m)
    m = torch.where(bad, 0.0, m)
    zero = m == 0
    if rule == "ideal":
        value, code, clamped, nan_code = m, torch.zeros_like(m, dtype=torch.int32), torch.zeros_like(bad), 0
    elif fmt.scale == "e4m3":
        assert tensor_scale is not None, "NVFP4 needs the tensor's scale"
        value, code = _e4m3_scale(m, fmt, tensor_scale, 1.5 if to_four else 1.0)
        clamped = torch.zeros_like(bad)
        nan_code = E4M3_NAN
    else:
        k = int(rule[3:]) if rule.startswith("e8m") else 0
        if k:
            f, raw = _split(divide(m.double(), fmt.q_max))
            steps = torch.ceil(f * 2**k).to(torch.int32)  # in [2^k, 2^(k+1)]
            raw = raw + (steps == 2 ** (k + 1)).to(raw.dtype)
            mantissa = steps % 2**k
        else:
            raw = pow2_exponent(m, fmt, rule)
            mantissa = torch.zeros_like(raw)
        if lower is not None:
            raw = raw - lower.to(raw.dtype)
        exponent = raw.clamp(E8M0_MIN_EXPONENT, E8M0_MAX_EXPONENT)
        clamped = (raw != exponent) & ~zero
        exponent = torch.where(zero, E8M0_MIN_EXPONENT, exponent)
        mantissa = torch.where(zero | clamped, 0, mantissa)
        code = ((exponent + E8M0_BIAS) << k) | mantissa
        value = pow2(exponent, m.dtype) * (1 + mantissa.to(m.dtype) * 2.0**-k)
        nan_code = E8M0_NAN << k
    value = torch.where(bad, float("nan"), value)
    return BlockScale(value, torch.where(bad, nan_code, code).to(torch.int32), clamped)


def scale_from_code(
    code: Tensor, fmt: BlockFormat, rule: str, dtype: torch.dtype, tensor_scale: Tensor | None
) -> Tensor:
    """Stored scale codes -> the scales' values, the same numbers that `block_scale` gave."""
    if fmt.scale == "e4m3":
        assert tensor_scale is not None
        return decode(code.to(torch.uint8), E4M3, dtype) * tensor_scale.to(dtype)
    k = int(rule[3:]) if rule.startswith("e8m") else 0
    code = code.to(torch.int32)
    biased, mantissa = code >> k, code & (2**k - 1)
    exponent = (biased - E8M0_BIAS).clamp(max=E8M0_MAX_EXPONENT)
    value = pow2(exponent, dtype) * (1 + mantissa.to(dtype) * 2.0**-k)
    return torch.where(biased == E8M0_NAN, float("nan"), value)


# --- NVFP4 -----------------------------------------------------------------------------------------------------------

NVFP4_SCALE_MAX = {"": E4M3.max, "4over6": 256.0}  # 4/6 leaves room: a block scaled to 4 takes 1.5 times the scale


def nvfp4_tensor_scale(amax: Tensor, rule: str) -> Tensor:
    """The scale of a tensor with finite maximum `amax`: amax / (6 · 448), or / (6 · 256) under 4over6; 0 for zeros.

    Float32 for a float64 tensor too, as it is stored, and within [2^-149, the largest float32].
    """
    scale = divide(amax, 6.0 * NVFP4_SCALE_MAX[rule]).clamp(max=torch.finfo(torch.float32).max).to(torch.float32)
    return torch.where((amax > 0) & (scale == 0), 2.0**-149, scale)


def _e4m3_scale(m: Tensor, fmt: BlockFormat, tensor_scale: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """RNE to E4M3 of (m / 6) / tensor_scale · factor; never 0 for a block that is not zero."""
    relative = divide(m, fmt.q_max) / torch.where(tensor_scale == 0, 1.0, tensor_scale) * factor
    grid = round_to_grid(relative, E4M3).clamp(max=E4M3.max)
    grid = torch.where(m > 0, grid.clamp(min=E4M3.min), 0.0)
    return grid * tensor_scale, encode(grid, E4M3).to(torch.int32)


# --- elements under a scale -------------------------------------------------------------------------------------------


def to_grid(x: Tensor, scale: BlockScale, fmt: BlockFormat, rule: str, largest: float) -> Tensor:
    """x [..., n] under scales [...] -> signed grid values RNE(x / s), saturated; same dtype as x.

    largest: the largest finite value of the output dtype; where the chosen grid value would overflow it, the largest
        grid value that fits is taken. Poisoned blocks come out as anything (their scale is NaN).
    """
    s = scale.value.unsqueeze(-1)
    s = torch.where((s == 0) | s.isnan(), 1.0, s)
    if rule == "ideal":  # the exact quotient x / (m / 6): float64 decides every float32 tie (24-bit operands)
        s, x_exact = _normalise(s.double(), x.double())
        a = (x_exact.abs() * fmt.q_max / s).to(torch.float64)
        return torch.copysign(round_to_grid(a, fmt.element).clamp(max=fmt.q_max).to(x.dtype), x)
    cap = floor_to_grid(torch.full_like(s, largest) / s, fmt.element)  # `largest / s` would round twice
    return torch.copysign(torch.minimum(round_to_grid((x / s).abs(), fmt.element), cap), x)


def from_grid(grid: Tensor, scale_value: Tensor, fmt: BlockFormat, rule: str) -> Tensor:
    """Signed grid values [..., n] and scales [...] -> values, rounded once to grid's dtype."""
    s = scale_value.unsqueeze(-1)
    if rule == "ideal":
        return (divide(grid.double(), fmt.q_max) * s.double()).to(grid.dtype)  # grid · s could overflow
    return grid * s


def _normalise(s: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Both times one power of two that brings s near 1, so that 6 · x can't overflow (float64 near its limits)."""
    exponent = torch.frexp(s).exponent.clamp(-1000, 1000)
    factor = torch.ldexp(torch.ones_like(s), -exponent)
    return s * factor, x * factor

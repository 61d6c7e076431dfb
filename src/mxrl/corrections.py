"""The three corrections as pure functions: MBS, OF, AQN. How they are applied to tensors is in `ops`.

MBS (macro-block scaling, arXiv 2603.08713): 128 elements share one byte k, p = (256 + k)/256 in [1, 2), and
    Q_MBS(x) = Q(p·x) · fl32(1/p).  k moves one block's maximum onto its ideal scale (`align`), or is searched for.
OF (outlier fallback, arXiv 2605.20402): x1 = Q(x), x2 = Q(x - x1), x̂ = x1 + α·x2; α = 0 is Q itself.
AQN (adaptive quantization noise, arXiv 2510.11696, 2605.20402): before each rollout, Gaussian noise on the weights,
    annealed over rollouts. The noise is counter-based: a function of (seed, rollout, parameter name, flat index) alone,
    so that every rank, shard, engine and restart draws the same.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

# --- MBS -------------------------------------------------------------------------------------------------------------


def mbs_align(macro_max: Tensor) -> Tensor:
    """k that gives the macro-block's maximum M = f·2^e its ideal scale: ⌊384/f⌋ − 256 if f ≤ 1.5, else ⌊768/f⌋ − 256.

    macro_max: float32 or float64, finite, [...]; returns int32 [...], 0 for M = 0. Rounded *down*, by integer division
    on the mantissa: rounding up would push p·M just past 6·2^E and double that block's scale.
    """
    bits = 24 if macro_max.dtype == torch.float32 else 53
    mantissa = torch.frexp(macro_max).mantissa  # f / 2
    integer = (mantissa.double() * 2.0**bits).to(torch.int64)  # f · 2^(bits-1), exact
    numerator = torch.where(mantissa <= 0.75, 384, 768) * 2 ** (bits - 1)
    k = torch.div(numerator, integer.clamp(min=1), rounding_mode="floor") - 256
    return torch.where(macro_max == 0, 0, k).to(torch.int32)


def mbs_candidates(mode: str) -> range:
    """The k that `search16`, `search256` and `joint` try."""
    return range(0, 256, 1 if mode == "search256" else 16)


def mbs_factor(k: Tensor, dtype: torch.dtype) -> Tensor:
    """p = (256 + k) / 256, exact."""
    return (256 + k).to(dtype) / 256


def prescale(x: Tensor, p: Tensor, largest: float) -> Tensor:
    """p·x, one rounding, saturated at the dtype's largest finite value."""
    return (x * p).clamp_(-largest, largest)


def halving_sum(x: Tensor) -> Tensor:
    """Sum over the last axis by a fixed tree: i and i + n/2, then i and i + n/4, ... (n padded to a power of two).

    Any implementation can follow it bit for bit, on any number of threads.
    """
    n = x.shape[-1]
    size = 1 << max(n - 1, 0).bit_length()
    if size != n:
        x = torch.nn.functional.pad(x, (0, size - n))
    while size > 1:
        size //= 2
        x = x[..., :size] + x[..., size:]
    return x.squeeze(-1)


# --- OF --------------------------------------------------------------------------------------------------------------


def of_blend(x: Tensor, x1: Tensor, x2: Tensor, alpha: float, largest: float) -> Tensor:
    """x1 + α·x2, two roundings (no FMA), saturated at the dtype's largest finite value; a zero keeps x's sign."""
    total = (x1 + x2 * alpha).clamp_(-largest, largest)
    return torch.where(total == 0, torch.copysign(total, x), total)


# --- AQN -------------------------------------------------------------------------------------------------------------


def aqn_sigma(t: int, total: int, start: float, end: float) -> float:
    """σ_t = σ_start · (σ_end/σ_start)^(t/(T−1)); t counts rollouts from 0, T = total; T = 1 gives σ_start.

    Raises ValueError where t is outside [0, T).
    """
    if not 0 <= t < total:
        raise ValueError(f"aqn_sigma: rollout t={t} is outside [0, {total})")
    if total == 1 or start == 0:
        return start
    return start * (end / start) ** (t / (total - 1))


_MASK = 0xFFFFFFFF


def philox4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int], rounds: int = 10
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10 (Salmon et al., SC'11) on int64 tensors that hold 32-bit words; returns four words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        product0 = c0 * 0xD2511F53  # wraps modulo 2^64, which leaves the bits of the unsigned product
        product1 = c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            ((product1 >> 32) & _MASK) ^ c1 ^ k0,
            product1 & _MASK,
            ((product0 >> 32) & _MASK) ^ c3 ^ k1,
            product0 & _MASK,
        )
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


# Wichura's AS 241 (Applied Statistics 37, 1988), routine PPND16: relative accuracy about 1e-16.
_CENTRAL = (
    (2509.0809287301226727, 33430.575583588128105, 67265.770927008700853, 45921.953931549871457, 13731.693765509461125,
     1971.5909503065514427, 133.14166789178437745, 3.387132872796366608),
    (5226.495278852854561, 28729.085735721942674, 39307.89580009271061, 21213.794301586595867, 5394.1960214247511077,
     687.1870074920579083, 42.313330701600911252, 1.0),
)  # fmt: skip
_TAIL = (
    (7.7454501427834140764e-4, 0.0227238449892691845833, 0.24178072517745061177, 1.27045825245236838258,
     3.64784832476320460504, 5.7694972214606914055, 4.6303378461565452959, 1.42343711074968357734),
    (1.05075007164441684324e-9, 5.475938084995344946e-4, 0.0151986665636164571966, 0.14810397642748007459,
     0.68976733498510000455, 1.6763848301838038494, 2.05319162663775882187, 1.0),
)  # fmt: skip
_LN2 = 0.6931471805599453


def _horner(coefficients: tuple[float, ...], r: Tensor) -> Tensor:
    out = torch.full_like(r, coefficients[0])
    for c in coefficients[1:]:
        out = out * r + c
    return out


def _log(x: Tensor) -> Tensor:
    """Natural log of normal float64 x > 0 from + − × ÷ alone: libraries' logs differ between devices."""
    mantissa, exponent = torch.frexp(x)
    low = mantissa < 0.7071067811865476
    mantissa = torch.where(low, mantissa * 2, mantissa)
    exponent = torch.where(low, exponent - 1, exponent).to(x.dtype)
    s = (mantissa - 1) / (mantissa + 1)
    series = _horner(tuple(1.0 / n for n in range(23, 0, -2)), s * s)  # atanh(s) / s, |s| < .172
    return exponent * _LN2 + s * series * 2


def normal_quantile(u: Tensor) -> Tensor:
    """The standard normal's quantile of float64 u in [2^-34, 1 - 2^-34], bit-identical on every IEEE device."""
    q = u - 0.5
    r = 0.180625 - q * q
    out = q * _horner(_CENTRAL[0], r) / _horner(_CENTRAL[1], r)
    tail = q.abs() > 0.425
    u_tail = u[tail]
    r = torch.sqrt(-_log(torch.minimum(u_tail, 1 - u_tail))) - 1.6
    out[tail] = torch.copysign(_horner(_TAIL[0], r) / _horner(_TAIL[1], r), u_tail - 0.5)
    return out


def noise_key(seed: int, rollout: int, name: str) -> tuple[int, int, int, int]:
    """Philox's key (two words) and the upper counter words of (seed, rollout, name).

    name: the canonical Hugging Face parameter name, experts unfused.
    """
    digest = hashlib.blake2b(f"{seed}\0{rollout}\0{name}".encode(), digest_size=16).digest()
    k0, k1, c2, c3 = (int.from_bytes(digest[i : i + 4], "little") for i in (0, 4, 8, 12))
    return k0, k1, c2, c3


def philox_normal(
    seed: int, rollout: int, name: str, start: int, count: int, device: torch.device | str = "cpu"
) -> Tensor:
    """Elements start ... start + count − 1 of the standard normal noise of (seed, rollout, name): float32 [count].

    Any slice equals that slice of the whole.
    """
    return normal_of_key(noise_key(seed, rollout, name), start, count, device)


def normal_of_key(key: tuple[int, int, int, int], start: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """`philox_normal` of a `noise_key`: element i is word i mod 4 of the counter (⌊i/4⌋, c2, c3), made normal."""
    k0, k1, c2, c3 = key
    out = torch.empty(count, dtype=torch.float32, device=device)
    step = 1 << 20  # elements at a time: bounded temporaries, and they stay in cache
    for begin in range(start, start + count, step):
        end = min(begin + step, start + count)
        first = begin // 4
        index = torch.arange(first, (end + 3) // 4, device=device, dtype=torch.int64)
        words = philox4x32(
            (index & _MASK, index >> 32, torch.full_like(index, c2), torch.full_like(index, c3)), (k0, k1)
        )
        u = (torch.stack(words, dim=-1).reshape(-1)[begin - 4 * first : end - 4 * first].double() + 0.5) * 2.0**-32
        out[begin - start : end - start] = normal_quantile(u).float()
    return out

"""One draw from each row of logits, with its log-probability: the definition, in plain torch, for every device.

Legend: B rows, V vocabulary. Of logits ℓ [B, V], a uniform u [B] and a temperature T:

    x = float32(ℓ) / T      logp = x − log Σ exp x      entropy = −Σ exp(logp) · logp      argmax: lowest index of max x
    token = the lowest index v with  Σ_{w ≤ v} exp x_w  >  u · Σ_w exp x_w                    (greedy: the argmax)

The token is the inverse of the distribution function at u, so it is a function of the logits and of one number, which
`uniforms` takes from a counter: (seed, row, step) alone decide it, whatever was decoded beside it and when.
u has 23 bits, so that it is exact in float32 and neither 0 nor 1: a token's share of the draws is off by at most 2^-23.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mxrl.corrections import philox4x32

_WORD = 0xFFFFFFFF
_DOMAIN = 0x73616D70  # "samp": the third word of the counter, so that no other use of a seed meets these draws


class Drawn(NamedTuple):
    """[B] each: token and argmax int64; log-probability of the token and entropy (nats) float32."""

    tokens: Tensor
    logps: Tensor
    entropies: Tensor
    argmax: Tensor


def uniforms(seed: int, rows: int, steps: int, device: torch.device | str = "cpu", *, first_row: int = 0) -> Tensor:
    """float32 [rows, steps] in (0, 1), each a function of (seed, row, step): Philox4x32-10 at counter (step, row).

    seed: any integer; its lowest 64 bits are the key. first_row: the number of the first of these rows. Raises
    ValueError for more than 2^32 rows or steps.
    """
    if max(first_row + rows, steps) > 1 << 32:
        raise ValueError(f"uniforms: {first_row + rows} rows × {steps} steps are more than a 32-bit counter counts")
    row = torch.arange(first_row, first_row + rows, device=device).unsqueeze(1).expand(rows, steps)
    step = torch.arange(steps, device=device).expand(rows, steps)
    domain, zero = torch.full_like(row, _DOMAIN), torch.zeros_like(row)
    word = philox4x32((step, row, domain, zero), (seed & _WORD, (seed >> 32) & _WORD))[0]
    return ((word >> 9).float() + 0.5) * 2.0**-23


def draw(logits_BV: Tensor, u_B: Tensor, temperature: float, greedy: bool) -> Drawn:
    """One token a row. logits_BV of any float dtype; u_B float32 in (0, 1), not read where greedy."""
    x_BV = logits_BV.float() / temperature
    logp_BV = x_BV.log_softmax(-1)
    p_BV = logp_BV.exp()
    argmax = x_BV.argmax(-1)
    tokens = argmax
    if not greedy:
        cdf_BV = p_BV.double().cumsum(-1)  # float64: the sum of 150,000 terms keeps more bits than u has
        tokens = torch.searchsorted(cdf_BV, (u_B.double() * cdf_BV[:, -1]).unsqueeze(-1), right=True).squeeze(-1)
        tokens = tokens.clamp_(max=x_BV.shape[-1] - 1)  # NaN logits alone get this far
    logps = logp_BV.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return Drawn(tokens, logps, torch.special.entr(p_BV).sum(-1), argmax)

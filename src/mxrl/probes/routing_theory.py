"""The theory of routing under noise: margins and flips, and the redundancy of errors that are summed.

    margin m_t       logit of a token's k-th expert less that of its k+1-th, k = A the number of chosen ones
    boundary pair    P(flip) ≈ mean_t Φ(−m_t / (σ√2)): independent N(0, σ²) on those two logits makes them change places
    drawn            share of flips when N(0, σ²) is drawn on all E logits: what the pair alone leaves out
    σ²               sample variance of the noise over a token's E experts (what all of them share moves no choice)
    redundancy       R = 1 − ‖Σ v_k‖² / Σ ‖v_k‖² of the A gated errors v_k = g_k e_k: 0 on average for independent ones,
                     1 where they cancel, 1 − A (the least, by Cauchy–Schwarz) where all are equal

All of it is ours; R is the measure that our reading of arXiv 2605.20402's MoE results calls for. N tokens, E experts.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def margins(logits_NE: Tensor, active: int) -> Tensor:
    """How far the last chosen expert's logit is above the first that isn't chosen: [N], at least 0."""
    top = logits_NE.topk(active + 1, dim=-1).values
    return top[:, active - 1] - top[:, active]


def flip_probability(margin: Tensor, sigma: float) -> Tensor:
    """P(noise on two logits `margin` apart exchanges them) = Φ(−m / (σ√2)), independent N(0, σ²) on each."""
    if sigma == 0:
        return (margin < 0).to(margin.dtype)
    return torch.special.ndtr(-margin / (sigma * math.sqrt(2)))


def noise_variance(before_NE: Tensor, after_NE: Tensor) -> Tensor:
    """σ² of a token's router noise, [N]: the sample variance over its experts, blind to what all of them share."""
    return (after_NE - before_NE).var(dim=-1, correction=1)


def changed_experts(before_NA: Tensor, after_NA: Tensor) -> Tensor:
    """How many of a token's chosen experts are others now: [N], 0 … A; their order doesn't count."""
    return before_NA.shape[-1] - (before_NA.unsqueeze(-1) == after_NA.unsqueeze(-2)).any(-1).sum(-1)


def drawn_flips(logits_NE: Tensor, active: int, sigma: float, draws: int, generator: torch.Generator) -> Tensor:
    """Share of `draws` of N(0, σ²) on every logit that change the top-k set: [N]."""
    before = logits_NE.topk(active, dim=-1).indices
    flips = torch.zeros(logits_NE.shape[0], dtype=torch.float64)
    for _ in range(draws):
        noise = torch.randn(logits_NE.shape, generator=generator, dtype=logits_NE.dtype)
        flips += changed_experts(before, (logits_NE + sigma * noise).topk(active, dim=-1).indices) > 0
    return flips / draws


def energies(gated_NAH: Tensor) -> tuple[Tensor, Tensor]:
    """(‖Σ v_k‖², Σ ‖v_k‖²) [N] of v_k = g_k e_k; redundancy is 1 less the first over the second."""
    return energy(gated_NAH.sum(-2)), energy(gated_NAH).sum(-1)


def energy(x: Tensor) -> Tensor:
    """‖x‖² over the last axis, in float32."""
    return x.float().square().sum(-1)

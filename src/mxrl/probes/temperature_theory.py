"""How far does a quantizer's noise on the logits act as a higher sampling temperature?

ℓ_tv: logits of the unquantized policy at context t, token v; η = ℓ_treated − ℓ, less its mean over v (softmax doesn't
see a shift, so a constant is no noise). Contexts are positions of the unquantized policy's own completions. T: the one
temperature that fits all contexts best,

    T = argmin Σ_t KL(p̄_t ‖ softmax(ℓ_t/T)),   p̄ = E_η softmax(ℓ + η)

With β = 1/T this is convex, and its minimum is where Σ_t E_p̄[ℓ] = Σ_t E_softmax(βℓ)[ℓ]: p̄ enters by its mean logit
alone, linearly. So one draw of η at many contexts estimates the same T as an ensemble at each.

**E_η of a deterministic quantizer.** One η exists at each context. What stands for the expectation, one assumption of
the formula less at a time:

    gaussian   σ_η · N(0, 1), independent of everything: the formula in its own terms (in pairs ±, so that E η = 0)
    shuffled   the measured η, rolled along the vocabulary by a random offset: its real shape, and σ of each context
    signs      ±η: where it really is; what is left out is only its mean, the direction in which it points
    (none)     η as it is: the policy that RL samples from. Its T is `t_eff`
    aqn        the treated policy with AQN's weight noise drawn anew: an ensemble of real quantizations

**Predicted.** With σ_η² the variance of η over the vocabulary, mean over contexts:

    √(1 + 2σ_η²/Var Δℓ)     arXiv 2605.20402; Var Δℓ over all pairs of different tokens (2 Var ℓ, over V − 1), or over
                            two tokens drawn from the policy (2 Var_p ℓ)
                            (`both`, ours: Var Δη, which 2σ_η² is over all pairs, then weighted by probability, too)
    1 + σ_η² C/Var_p ℓ      ours, exact to second order for independent noise, C = Cov_p(p, ℓ); the weighted formula has
                            1/2 for C. Noise on tokens without probability moves nothing
    1/(1 + b_p)             ours, exact to first order for any η, b_p = Cov_p(η, ℓ)/Var_p ℓ the slope of η on ℓ: logits
                            that shrink (b < 0) are a temperature without any noise

Covariances are summed over contexts before they are divided. Entropy: of one noisy draw it may fall; of the mean policy
it is never below the draws' mean (Jensen), and for small independent noise it rises by σ_η² Cov_p(p, log p).

Intervals: 95 %, jackknife over prompts (a one-step refit of T without each).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

SYNTHETIC = ("gaussian", "shuffled", "signs")  # ensembles made from the measured η, most assumptions first
COLDEST, HOTTEST = 1 / 64, 64.0  # temperatures outside mean that none fits
EDGES = tuple(x / 2 for x in range(-12, 13))  # of the histogram of η/σ
_CHUNK = 1 << 24  # elements of a [positions, V] piece that is computed with at once


# --- the fit ----------------------------------------------------------------------------------------------------------


class Fit(NamedTuple):
    """temperature: None where the minimum lies outside [COLDEST, HOTTEST]. beta: 1/T (at a bound then).

    gradient, curvature: [N] float64, first and second derivative of −KL and KL by β at each context, at `beta`.
    """

    temperature: float | None
    beta: float
    gradient: Tensor
    curvature: Tensor


def below_peak(logits: Tensor) -> Tensor:
    """Logits [N, V] less the largest of their row, in float32 (float64 stays)."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide - wide.amax(-1, keepdim=True)


def mean_logit(logits: Tensor, policy: Tensor) -> Tensor:
    """Σ_v p_v (ℓ_v − max ℓ), [N] float64: all that a fitted temperature knows of a policy p [N, V]."""
    return (policy * below_peak(logits)).sum(-1).double()


def fit_temperature(logits: Tensor, target: Tensor) -> Fit:
    """The T with the least Σ_t KL(p̄_t ‖ softmax(ℓ_t/T)), by Newton's method in 1/T inside a bracket.

    logits: ℓ [N, V], any float dtype, computed with in pieces. target: mean_logit(ℓ, p̄), [N].
    """
    low, high, beta = 1 / HOTTEST, 1 / COLDEST, 1.0
    for _ in range(60):
        gradient, curvature = _derivatives(logits, target, beta)
        up, bend = float(gradient.sum()), float(curvature.sum())
        low, high = (beta, high) if up > 0 else (low, beta)
        step = beta + up / bend if bend > 0 else math.inf
        following = step if low <= step <= high else math.sqrt(low * high)
        done = abs(following - beta) <= 1e-7 * beta
        beta = following
        if done:
            break
    fits = 1 / HOTTEST < beta * (1 - 1e-5) and beta * (1 + 1e-5) < 1 / COLDEST
    return Fit(1 / beta if fits else None, beta, *_derivatives(logits, target, beta))


def _derivatives(logits: Tensor, target: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    parts = []
    for rows in pieces(logits):
        ell = below_peak(logits[rows])
        p = (ell * beta).softmax(-1)
        here = (p * ell).sum(-1, keepdim=True)
        parts.append((target[rows] - here.squeeze(-1).double(), (p * (ell - here).square()).sum(-1).double()))
    gradient, curvature = zip(*parts, strict=True)
    return torch.cat(gradient), torch.cat(curvature)


def pieces(logits: Tensor) -> Iterator[slice]:
    size = max(1, _CHUNK // logits.shape[-1])
    return (slice(start, start + size) for start in range(0, logits.shape[0], size))


def predicted(sigma_sq: float, pair_variance: float) -> float:
    """√(1 + 2σ_η²/Var Δℓ): the formula of arXiv 2605.20402."""
    return math.sqrt(1 + 2 * sigma_sq / pair_variance) if pair_variance > 0 else math.nan


def two_classes(sigma: float = 1.0, sd: float = 2.0) -> tuple[float, float]:
    """(predicted, fitted) T of two logits drawn from N(0, sd²) with noise N(0, σ²) on each; no sampling in it.

    The gap between the logits has standard deviation √2·sd (its quantiles stand for it), its noise √2·σ (trapezoids).
    """
    gap = math.sqrt(2) * sd * torch.special.ndtri((torch.arange(2000, dtype=torch.float64) + 0.5) / 2000)
    z = torch.linspace(-9, 9, 721, dtype=torch.float64)
    weight = torch.exp(-z.square() / 2)
    first = torch.sigmoid(gap[:, None] + math.sqrt(2) * sigma * z) @ (weight / weight.sum())
    logits = torch.stack([gap, torch.zeros_like(gap)], -1)
    fit = fit_temperature(logits, mean_logit(logits, torch.stack([first, 1 - first], -1)))
    return predicted(sigma**2, 2 * sd**2), fit.temperature or math.nan


# --- what is measured at each context ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Baseline:
    """The unquantized policy at every context: its logits, and columns [N]."""

    logits: Tensor  # [N, V]
    mean: Tensor  # E_p ℓ below the peak: `mean_logit` of the policy itself
    variance: Tensor  # of ℓ over the vocabulary, over V − 1
    weighted: Tensor  # Var_p ℓ
    peaked: Tensor  # Cov_p(p, ℓ)
    entropy: Tensor  # nats

    @classmethod
    def of(cls, logits: Tensor) -> Baseline:
        parts = []
        for rows in pieces(logits):
            ell = below_peak(logits[rows])
            p = ell.softmax(-1)
            middle = (p * ell).sum(-1, keepdim=True)
            off = ell - middle
            columns = middle.squeeze(-1), ell.var(-1), (p * off.square()).sum(-1), (p * off * p).sum(-1), entropy(p)
            parts.append(torch.stack([c.double() for c in columns], -1))
        return cls(logits, *torch.cat(parts).unbind(-1))


def entropy(policy: Tensor) -> Tensor:
    """Nats of each row of [N, V] probabilities."""
    return torch.special.entr(policy).sum(-1)


def noise(logits: Tensor, noisy: Tensor) -> Tensor:
    """η [N, V], float32: the difference of two policies' logits, less its mean over the vocabulary."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    eta = noisy.to(wide) - logits.to(wide)
    return eta - eta.mean(-1, keepdim=True)


class Moments(NamedTuple):
    """Columns [N] of η at each context."""

    square: Tensor  # Σ_v η² / (V − 1)
    fourth: Tensor  # mean of η⁴
    second: Tensor  # mean of η²
    kurtosis: Tensor  # excess, unbiased for a normal sample of V (G2); 0 where η is 0
    weighted: Tensor  # Var_p η
    cov: Tensor  # of η and ℓ over the vocabulary, over V − 1
    cov_weighted: Tensor  # Cov_p(η, ℓ)


def moments(logits: Tensor, noisy: Tensor) -> tuple[Moments, list[float]]:
    """Moments of η, and the shares of the bins of η/σ (σ of its own context) between EDGES, ends included."""
    parts, counts = [], torch.zeros(len(EDGES) - 1, dtype=torch.float64, device=logits.device)
    v = logits.shape[-1]
    for rows in pieces(logits):
        ell, eta = below_peak(logits[rows]), noise(logits[rows], noisy[rows])
        p = ell.softmax(-1)
        second, fourth = eta.square().mean(-1).double(), eta.pow(4).mean(-1).double()
        excess = torch.where(second > 0, fourth / second.square().clamp(min=1e-300) - 3, 0)
        if v > 3:
            excess = torch.where(second > 0, (v - 1) * ((v + 1) * excess + 6) / ((v - 2) * (v - 3)), 0)
        off, here = ell - (p * ell).sum(-1, keepdim=True), eta - (p * eta).sum(-1, keepdim=True)
        cov = (eta * (ell - ell.mean(-1, keepdim=True))).sum(-1) / (v - 1)
        columns = (
            second * v / (v - 1),
            fourth,
            second,
            excess,
            (p * here.square()).sum(-1),
            cov,
            (p * off * here).sum(-1),
        )
        parts.append(torch.stack([c.double() for c in columns], -1))
        sigma = (second * v / (v - 1)).sqrt().to(eta.dtype).unsqueeze(-1)
        shape = (eta / torch.where(sigma > 0, sigma, 1))[sigma.squeeze(-1) > 0].clamp(EDGES[0], EDGES[-1])
        bins = ((shape - EDGES[0]) * 2).long().clamp(max=len(EDGES) - 2).flatten()
        counts += torch.bincount(bins, minlength=len(EDGES) - 1)
    shares = (counts / counts.sum().clamp(min=1)).tolist()
    return Moments(*torch.cat(parts).unbind(-1)), shares


class Policy(NamedTuple):
    """A mean policy p̄ as columns [N]: its mean logit, its entropy, and the mean entropy of its draws."""

    target: Tensor
    entropy: Tensor
    draw: Tensor


def ensemble(kind: str, eta: Tensor, sigma: float, draws: int, generator: torch.Generator) -> Iterator[Tensor]:
    """The noises [n, V] that stand for E_η (see the module); "" is η as it is."""
    if kind == "gaussian":
        for _ in range(max(draws // 2, 1)):
            z = sigma * torch.randn(eta.shape, generator=generator, dtype=eta.dtype, device=eta.device)
            yield from (z, -z)
    elif kind == "shuffled":
        v = eta.shape[-1]
        for _ in range(draws):
            by = torch.randint(1, v, (len(eta), 1), generator=generator, device=eta.device)
            yield eta.gather(-1, (torch.arange(v, device=eta.device) + by) % v)
    else:
        yield from (eta, -eta) if kind == "signs" else (eta,)


def mean_policy(
    kind: str, logits: Tensor, noisy: Tensor, *, sigma: float = 0.0, draws: int = 8, seed: int = 0
) -> Policy:
    """p̄ over `ensemble(kind, …)` at every context, computed piece by piece."""
    generator, parts = torch.Generator(logits.device).manual_seed(seed), []
    for rows in pieces(logits):
        ell, eta = below_peak(logits[rows]), noise(logits[rows], noisy[rows])
        policies, spread, count = torch.zeros_like(ell), torch.zeros_like(ell[:, 0]), 0
        for draw in ensemble(kind, eta, sigma, draws, generator):
            p = (ell + draw).softmax(-1)
            policies, spread, count = policies + p, spread + entropy(p), count + 1
        policies /= count
        columns = (policies * ell).sum(-1), entropy(policies), spread / count
        parts.append(torch.stack([c.double() for c in columns], -1))
    return Policy(*torch.cat(parts).unbind(-1))

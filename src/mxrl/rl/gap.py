"""How far the policy that wrote the tokens (rollout) is from the policy that learns from them (training).

Both score the same tokens y ~ p_rollout, at the same temperature. With d = logp_train − logp_rollout and w = exp(d):

    k1       mean(−d)                          unbiased for KL(rollout ‖ train), may be negative
    k3       mean(w − 1 − d)                   the same KL, never negative, less noise (Schulman's k3)
    chi2     mean((w − 1)²)                    χ²(train ‖ rollout): what decides the variance of importance weights
    ess      (Σ w)² / (n Σ w²)                 effective sample size as a share of n, in (0, 1]
    pearson  correlation of logp_train and logp_rollout over the tokens
    mean_abs, max_abs                          |d|
    truncated                                  share of tokens with w > C (C = 2 by default): those TIS cuts

chi2 uses E[w] = 1: mean(w² ) − 1 has the same expectation but noise of first order in d, and may be negative.

`GapStats` holds sums only, so that batches, ranks and accumulation steps merge with `+`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

DEFAULT_CAP = 2.0
MAX_LOG_RATIO = 300.0  # exp(2 · 300) is still finite in float64; nothing real comes near it


@dataclass(frozen=True)
class GapStats:
    """Mergeable sums over tokens (float64). Moments are centred, so that the correlation doesn't lose digits."""

    tokens: int = 0
    nonfinite: int = 0  # tokens left out of every sum: either log-probability is NaN or infinite
    sum_delta: float = 0.0  # Σ d
    sum_abs: float = 0.0  # Σ |d|
    max_abs: float = 0.0
    sum_k3: float = 0.0  # Σ (w − 1 − d)
    sum_excess: float = 0.0  # Σ (w − 1)
    sum_excess_sq: float = 0.0  # Σ (w − 1)²
    truncated: int = 0  # tokens with w > cap
    mean_train: float = 0.0
    mean_rollout: float = 0.0
    var_train: float = 0.0  # Σ (logp_train − mean)²
    var_rollout: float = 0.0
    cov: float = 0.0

    def __add__(self, other: GapStats) -> GapStats:
        """Merge two disjoint sets of tokens (Chan's update for the centred moments)."""
        if not isinstance(other, GapStats):
            return NotImplemented
        n = self.tokens + other.tokens
        merged = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        merged["max_abs"] = max(self.max_abs, other.max_abs)
        share = other.tokens / n if n else 0.0
        by_train, by_rollout = other.mean_train - self.mean_train, other.mean_rollout - self.mean_rollout
        merged["mean_train"] = self.mean_train + by_train * share
        merged["mean_rollout"] = self.mean_rollout + by_rollout * share
        merged["var_train"] += by_train**2 * share * self.tokens
        merged["var_rollout"] += by_rollout**2 * share * self.tokens
        merged["cov"] += by_train * by_rollout * share * self.tokens
        return GapStats(**merged)

    def _mean(self, total: float) -> float:
        return total / self.tokens if self.tokens else math.nan

    @property
    def k1(self) -> float:
        return self._mean(-self.sum_delta) + 0.0  # no −0

    @property
    def k3(self) -> float:
        return self._mean(self.sum_k3)

    @property
    def chi2(self) -> float:
        return self._mean(self.sum_excess_sq)

    @property
    def ess(self) -> float:
        total = self.tokens + self.sum_excess
        squares = self.sum_excess_sq + 2 * self.sum_excess + self.tokens
        return total * total / (self.tokens * squares) if self.tokens and squares > 0 else math.nan

    @property
    def pearson(self) -> float:
        """NaN where it is undefined: fewer than two tokens, or one side is constant."""
        scale = math.sqrt(self.var_train) * math.sqrt(self.var_rollout)
        return max(-1.0, min(1.0, self.cov / scale)) if scale > 0 else math.nan

    @property
    def mean_abs(self) -> float:
        return self._mean(self.sum_abs)

    @property
    def truncated_share(self) -> float:
        return self._mean(self.truncated)

    def metrics(self, prefix: str = "gap/") -> dict[str, float]:
        """The eight logged numbers, plus the count of tokens left out where there are any."""
        out = {
            "k1": self.k1,
            "k3": self.k3,
            "pearson": self.pearson,
            "chi2": self.chi2,
            "ess": self.ess,
            "mean_abs": self.mean_abs,
            "max_abs": self.max_abs if self.tokens else math.nan,
            "truncated": self.truncated_share,
        }
        if self.nonfinite:
            out["nonfinite"] = float(self.nonfinite)
        return {prefix + name: value for name, value in out.items()}


@torch.no_grad()
def gap_stats(logp_train: Tensor, logp_rollout: Tensor, mask: Tensor, *, cap: float = DEFAULT_CAP) -> GapStats:
    """Gap between two scorings of the same tokens.

    logp_train, logp_rollout: [..., T] log-probabilities of the sampled tokens, any float dtype, at one temperature;
    mask: the same shape, true (or non-zero) on completion tokens; cap: TIS's C.
    Computed in float64 on the tensors' device with one transfer to the host. Raises ValueError on differing shapes.
    """
    if not logp_train.shape == logp_rollout.shape == mask.shape:
        shapes = ", ".join(str(tuple(t.shape)) for t in (logp_train, logp_rollout, mask))
        raise ValueError(f"gap_stats: logp_train, logp_rollout and mask must have one shape, got {shapes}")
    chosen = mask.bool()
    train, rollout = logp_train.detach()[chosen].double(), logp_rollout.detach()[chosen].double()
    finite = torch.isfinite(train) & torch.isfinite(rollout)
    count = chosen.sum()
    train, rollout = train[finite], rollout[finite]
    if not train.numel():
        return GapStats(nonfinite=int(count))
    delta = (train - rollout).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    excess = torch.expm1(delta)
    mean_train, mean_rollout = train.mean(), rollout.mean()
    centred_train, centred_rollout = train - mean_train, rollout - mean_rollout
    sums = {
        "sum_delta": delta.sum(),
        "sum_abs": delta.abs().sum(),
        "max_abs": delta.abs().max(),
        "sum_k3": (excess - delta).sum(),
        "sum_excess": excess.sum(),
        "sum_excess_sq": (excess * excess).sum(),
        "truncated": (delta > math.log(cap)).sum().double(),
        "mean_train": mean_train,
        "mean_rollout": mean_rollout,
        "var_train": (centred_train * centred_train).sum(),
        "var_rollout": (centred_rollout * centred_rollout).sum(),
        "cov": (centred_train * centred_rollout).sum(),
    }
    values = dict(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True))  # one transfer
    truncated = round(values.pop("truncated"))
    return GapStats(train.numel(), int(count) - train.numel(), truncated=truncated, **values)

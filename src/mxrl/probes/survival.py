"""Survival of answers that may or may not have forked when they end: Kaplan–Meier, the hazard, and exact intervals.

Answer i is watched for T_i tokens: until the token in which it forks (included), or until its own end, unforked; that
is censoring. Of the n_t answers with T_i ≥ t, d_t fork at token t:

    S(t) = Π_{s ≤ t} (1 − d_s / n_s)          an answer that ended unforked at t is still among the n_t
    hazard h = Σ d_t / Σ n_t = Σ d_t / Σ T_i  forks a token watched

Under a constant hazard S(t) = (1 − h)^t; `first_half` tests that, since half of the tokens watched then hold half of
the forks. S's band is Greenwood's on the scale log(−log S), which stays inside (0, 1). The hazard's interval takes the
forks for a Poisson count of its exposure (Garwood 1936), shares get Clopper and Pearson's (1934): both exact.

Source: Kaplan and Meier 1958; Greenwood 1926; Kalbfleisch and Prentice 1980 for the band.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mxrl.probes.intervals import Mean, mean

_TAIL = 0.025  # each side of 95 %
_Z = 1.959964


@dataclass(frozen=True)
class Survival:
    """S(t) with its 95 % band for t = 0 … the longest watch; at_risk[t] answers were still watched at token t."""

    at_risk: list[int]
    forks: list[int]
    share: list[float]
    low: list[float]
    high: list[float]

    def reaches(self, level: float = 0.5) -> Mean | None:
        """The first t at which S(t) ≤ level; None where the curve stays above.

        Its ends are where the band's two edges reach it (Brookmeyer and Crowley), NaN where one never does.
        """
        at = first_below(self.share, level)
        if at is None:
            return None
        ends = [first_below(edge, level) for edge in (self.low, self.high)]
        low, high = (math.nan if end is None else float(end) for end in ends)
        return Mean(float(at), low, high, self.at_risk[0])


def first_below(curve: Sequence[float], level: float) -> int | None:
    """The first index at which a curve is at or below `level`, but for rounding."""
    return next((t for t, value in enumerate(curve) if value <= level + 1e-12), None)


def kaplan_meier(times: Sequence[int], forked: Sequence[bool]) -> Survival:
    """S(t) of answers watched for times[i] ≥ 1 tokens, the last of which was the fork where forked[i].

    Raises ValueError without answers, for lists of different lengths, and for a time below 1.
    """
    if not times or len(times) != len(forked):
        raise ValueError(f"survival takes as many times as outcomes, and at least one: {len(times)}, {len(forked)}")
    if min(times) < 1:
        raise ValueError("survival: an answer is watched for at least one token")
    events, ends = Counter(t for t, f in zip(times, forked, strict=True) if f), Counter(times)
    n = len(times)
    at_risk, forks, share, low, high = [n], [0], [1.0], [1.0], [1.0]
    greenwood = 0.0
    for t in range(1, max(times) + 1):
        d = events[t]
        s = share[-1] * (1 - d / n)
        if d and d < n:
            greenwood += d / (n * (n - d))
        edges = (s, s)
        if 0 < s < 1:
            spread = math.exp(_Z * math.sqrt(greenwood) / abs(math.log(s)))
            edges = (s**spread, s ** (1 / spread))
        at_risk.append(n)
        forks.append(d)
        share.append(s)
        low.append(edges[0])
        high.append(edges[1])
        n -= ends[t]
    return Survival(at_risk, forks, share, low, high)


def hazard(times: Sequence[int], forked: Sequence[bool]) -> Mean:
    """Forks a token watched, with the exact Poisson interval."""
    count, exposure = sum(forked), sum(times)
    low, high = poisson_interval(count)
    return Mean(count / exposure, low / exposure, high / exposure, len(times))


def hazard_effects(times: Sequence[int], forked: Sequence[bool]) -> list[float]:
    """One value an answer, whose mean is the hazard h: h + (forked_i − h·T_i) / mean T.

    Their standard error is that of the ratio Σ forked / Σ T (delta method), so that two hazards of the same prompts can
    be compared paired.
    """
    h, middle = sum(forked) / sum(times), sum(times) / len(times)
    return [h + (f - h * t) / middle for t, f in zip(times, forked, strict=True)]


def first_half(times: Sequence[int], forked: Sequence[bool]) -> tuple[float, Mean] | None:
    """Whether the hazard is constant: (share of the tokens watched that lie in the first half, share of the forks).

    The halves are cut at the token that leaves them as equal as it can. Under a constant hazard the forks of the first
    half are binomial with that share, given all forks; the interval is Clopper and Pearson's. None without a fork.
    """
    forks = sum(forked)
    if not forks:
        return None
    whole = sum(times)
    watched = [0]
    for t in range(1, max(times) + 1):
        watched.append(watched[-1] + sum(time >= t for time in times))
    cut = min(range(len(watched)), key=lambda t: abs(watched[t] - whole / 2))
    early = sum(f and t <= cut for t, f in zip(times, forked, strict=True))
    return watched[cut] / whole, share(early, forks)


def share(count: int, n: int) -> Mean:
    """count / n with Clopper and Pearson's interval."""
    return Mean(count / n, *binomial_interval(count, n), n)


def accuracy(scores: Sequence[float]) -> Mean | None:
    """Mean reward: a share where every reward is 0 or 1, so that the interval stays inside; None without scores."""
    if not scores:
        return None
    return share(round(sum(scores)), len(scores)) if {*scores} <= {0.0, 1.0} else mean(scores)


def poisson_interval(count: int) -> tuple[float, float]:
    """95 % interval of a Poisson mean, given one count: each end leaves 2.5 % of its tail."""

    def at_most(k: int, mean: float) -> float:
        return sum(math.exp(i * math.log(mean) - mean - math.lgamma(i + 1)) for i in range(k + 1))

    top = count + 10 * math.sqrt(count + 1) + 10
    low = _root(lambda m: 1 - at_most(count - 1, m) - _TAIL, 1e-12, top) if count else 0.0
    return low, _root(lambda m: _TAIL - at_most(count, m), 1e-12, top)


def binomial_interval(count: int, n: int) -> tuple[float, float]:
    """95 % interval of a probability, given `count` of n (Clopper and Pearson). Raises ValueError for n < 1."""
    if n < 1:
        raise ValueError("a share takes at least one trial")

    def at_most(k: int, p: float) -> float:
        terms = (
            math.lgamma(n + 1)
            - math.lgamma(i + 1)
            - math.lgamma(n - i + 1)
            + i * math.log(p)
            + (n - i) * math.log1p(-p)
            for i in range(k + 1)
        )
        return sum(map(math.exp, terms))

    edge = 1e-12
    low = _root(lambda p: 1 - at_most(count - 1, p) - _TAIL, edge, 1 - edge) if count else 0.0
    high = _root(lambda p: _TAIL - at_most(count, p), edge, 1 - edge) if count < n else 1.0
    return low, high


def _root(f: Callable[[float], float], low: float, high: float) -> float:
    """Where an increasing function crosses zero, by halving the bracket."""
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if f(middle) > 0 else (middle, high)
    return (low + high) / 2

"""95 % intervals of means, and what they decide."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean, stdev
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Student's t, two-sided 95 %, by degrees of freedom (1 … 30); beyond, Cornish–Fisher from the normal's 1.96.
_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


class Mean(NamedTuple):
    """A mean with its 95 % interval; low and high are NaN where one value gives none. n: independent values."""

    value: float
    low: float
    high: float
    n: int

    def excludes(self, value: float = 0.0) -> bool:
        """Whether the interval is known and `value` lies outside."""
        return self.value == self.value and not math.isnan(self.low) and not self.low <= value <= self.high

    def to_dict(self) -> dict[str, float | int]:
        return self._asdict()


def t95(freedom: int) -> float:
    """The two-sided 95 % quantile of Student's t."""
    z = 1.959964
    return _T95[freedom - 1] if freedom <= len(_T95) else z + (z**3 + z) / (4 * freedom)


def mean(values: Sequence[float]) -> Mean:
    """The mean of independent values (one a prompt, or one a seed) and its interval, mean ± t·sd/√n.

    Raises ValueError without values.
    """
    n = len(values)
    if not n:
        raise ValueError("a mean takes at least one value")
    middle = fmean(values)
    if n == 1:
        return Mean(middle, math.nan, math.nan, 1)
    half = t95(n - 1) * stdev(values) / math.sqrt(n)
    return Mean(middle, middle - half, middle + half, n)


def paired(a: Sequence[float], b: Sequence[float]) -> Mean:
    """mean(a − b) over the same prompts or seeds, with its interval. Raises ValueError where they aren't as many."""
    if len(a) != len(b):
        raise ValueError(f"paired values must be of the same things: {len(a)} and {len(b)} differ")
    return mean([x - y for x, y in zip(a, b, strict=True)])


def jackknife(sums: Tensor, figure: Callable[[Tensor], Tensor]) -> tuple[Mean, list[float]]:
    """figure(Σ of sums over prompts), its interval, and one value a prompt whose mean and spread those are.

    sums: [m, columns]; figure: [..., columns] -> [...]. The values are m·f(all) − (m − 1)·f(all but one), shifted so
    that their mean is f(all) itself, not the jackknife's correction of it.
    """
    total, m = sums.sum(0), len(sums)
    whole = float(figure(total))
    apart = (m - 1) * (whole - figure(total - sums)) if m > 1 else torch.zeros(1, dtype=torch.float64)
    values = (whole + apart - apart.mean()).tolist()
    return (mean(values) if all(map(math.isfinite, values)) else Mean(whole, math.nan, math.nan, m)), values


# --- as the probes' JSON has them -------------------------------------------------------------------------------------


def finite(value: float | None) -> float | None:
    """None for NaN and Inf, which JSON has not."""
    return value if value is not None and math.isfinite(value) else None


def measure(
    treatment: object, metric: str, found: Mean | None, unit: str, values: Sequence[float | None] | None = None
) -> dict[str, Any]:
    """A row of a probe's "measures"; None stands for what isn't known. values: the effects that the mean is of."""
    value, low, high, n = found or (None, None, None, 0)
    ends = {"value": finite(value), "low": finite(low), "high": finite(high)}
    row: dict[str, Any] = {"treatment": str(treatment), "metric": metric, **ends, "n": n, "unit": unit}
    return row if values is None else row | {"values": list(map(finite, values))}


def comparison(
    name: str, treatment: object | None, predicted: float | None, found: Mean | None, source: str, note: str
) -> dict[str, Any]:
    """A row of a probe's "theory". within: whether the interval holds the predicted value; None without an interval."""
    value, low, high, _ = found or (None, None, None, 0)
    known = predicted is not None and finite(low) is not None and finite(high) is not None
    return {
        "name": name,
        "treatment": None if treatment is None else str(treatment),
        "predicted": predicted,
        "measured": finite(value),
        "low": finite(low),
        "high": finite(high),
        "source": source,
        "within": low <= predicted <= high if known else None,  # type: ignore[operator]
        "note": note,
    }


def band(points: Sequence[Mean | None]) -> dict[str, list[float | None]]:
    """Three columns of a curve: mean, low, high at every point."""
    every = [(p.value, p.low, p.high) if p else (None, None, None) for p in points]
    return {name: [finite(point[i]) for point in every] for i, name in enumerate(("mean", "low", "high"))}

"""Is a curve over α a U, does it fall, or is it noise? Paired by seed, so that a seed's own level cancels.

    U                    the least mean lies at an inner α, and both ends are higher: the 95 % interval of each paired
                         difference (end − minimum) lies above 0
    falling              every mean is below the one before, and the interval of (first − last) lies above 0
    lower at the last α  only the latter
    undecided            none of these; `rising` and `higher at the last α` as their opposites

The minimum is chosen from the same values as it is then compared with, which favours a U. Yet both ends must pass: of
curves of pure noise, five α's by four or more seeds, under 5 % are called a U (a test draws them).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

from mxrl.probes.intervals import Mean, finite, mean, paired

CLAIM = "arXiv 2605.20402, drift against α"
CLAIMED_MINIMUM, CLAIMED_RATIO = 0.5, (1.5, 2.0)


def over(a: Sequence[float], b: Sequence[float]) -> Mean:
    """The geometric mean of a/b over seeds, with its interval (from that of the mean log ratio).

    NaN where a value isn't positive, except that 0/0 throughout is 1.
    """
    if a == b:
        return Mean(1.0, 1.0, 1.0, len(a))
    if min(*a, *b) <= 0:
        return Mean(math.nan, math.nan, math.nan, len(a))
    found = mean([math.log(x / y) for x, y in zip(a, b, strict=True)])
    return Mean(*map(math.exp, found[:3]), n=found.n)


def shape(alphas: Sequence[float], values: Sequence[Sequence[float]]) -> dict[str, Any]:
    """What the curve is. values[i][s]: of seed s at alphas[i], which increase. Raises ValueError for under three α.

    Returns {"minimum": α of the least mean, "u": bool, "monotone": "falling" | "rising" | None, "verdict": one of the
    words above, "ends_over_minimum": for the first and the last α {"alpha", "ratio", "low", "high"} of the gap there
    over the minimum's, "differences": likewise {"alpha", "value", "low", "high", "n"}}.
    """
    if len(alphas) < 3 or len(values) != len(alphas) or any(b <= a for a, b in pairwise(alphas)):
        raise ValueError(f"shape: at least three increasing α with values each, got {list(alphas)}")
    means = [fmean(v) for v in values]
    least = means.index(min(means))
    ends = (0, len(alphas) - 1)
    differences = [paired(values[end], values[least]) for end in ends]
    ratios = [over(values[end], values[least]) for end in ends]
    u = all(d.low > 0 for d in differences)  # and so the least is no end: there the difference is 0
    fall = paired(values[0], values[-1])
    monotone, verdict = None, "undecided"
    if fall.low > 0:
        monotone = "falling" if all(b < a for a, b in pairwise(means)) else None
        verdict = monotone or "lower at the last α"
    elif fall.high < 0:
        monotone = "rising" if all(b > a for a, b in pairwise(means)) else None
        verdict = monotone or "higher at the last α"
    return {
        "minimum": alphas[least],
        "u": u,
        "monotone": monotone,
        "verdict": "U" if u else verdict,
        "ends_over_minimum": [
            {"alpha": alphas[end], "ratio": finite(r.value), "low": finite(r.low), "high": finite(r.high)}
            for end, r in zip(ends, ratios, strict=True)
        ],
        "differences": [
            {"alpha": alphas[end], "value": d.value, "low": finite(d.low), "high": finite(d.high), "n": d.n}
            for end, d in zip(ends, differences, strict=True)
        ],
    }


def claims(
    source: str, alphas: Sequence[float], values: Sequence[Sequence[float]], found: dict[str, Any], *, primary: bool
) -> list[dict[str, Any]]:
    """Rows of the paper's claim about one source, where α = .5 was measured.

    The minimum: borne out by a U there, refuted where another α is lower (its paired interval excludes 0). An end over
    the value at .5: borne out where the interval meets 1.5 to 2 and excludes 1, refuted where it misses 1.5 to 2.
    Rows are named u_minimum, u_end_0 and u_end_1 for the primary source, and with ":source" behind for the others.
    """
    if CLAIMED_MINIMUM not in alphas:
        return []
    claimed = values[list(alphas).index(CLAIMED_MINIMUM)]
    lower = [a for a, v in zip(alphas, values, strict=True) if paired(v, claimed).high < 0]
    within = True if found["u"] and found["minimum"] == CLAIMED_MINIMUM else False if lower else None
    at = f"; lower than at .5: {', '.join(f'{a:g}' for a in lower)}" if lower else ""
    of = "" if primary else f":{source}"
    about = {"treatment": None, "source": CLAIM, "gap_source": source}
    rows = [
        {
            **about,
            "name": f"u_minimum{of}",
            "predicted": CLAIMED_MINIMUM,
            "measured": found["minimum"],
            "low": None,
            "high": None,
            "within": within,
            "note": f"{source}: {found['verdict']}{at}",
        }
    ]
    low, high = CLAIMED_RATIO
    for end in (0, len(alphas) - 1):
        ratio = over(values[end], claimed)
        known = ratio.low == ratio.low
        meets = known and ratio.low <= high and ratio.high >= low
        rows.append(
            {
                **about,
                "name": f"u_end_{alphas[end]:g}{of}",
                "predicted": (low + high) / 2,
                "measured": finite(ratio.value),
                "low": finite(ratio.low),
                "high": finite(ratio.high),
                "within": None if not known or (meets and not ratio.excludes(1.0)) else meets,
                "note": f"{source}: the gap at α = {alphas[end]:g} over that at .5; the claim is {low:g} to {high:g}",
            }
        )
    return rows

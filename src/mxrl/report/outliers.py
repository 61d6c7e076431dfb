"""The tensors with the largest error, and what sets each apart from the others of its checkpoint.

A figure (kurtosis, block maxima, …) sets a tensor apart where it lies more than _FAR deviations above the median of all
tensors; a deviation is 1.4826 times the median absolute one, which is a normal distribution's standard deviation and
is not moved by the outliers themselves. How closely the error follows each figure is their rank correlation.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]
WORST = 25  # tensors listed

CAUSES = {  # key of a row -> what it is called
    "block_peak": "block maxima",
    "kurtosis": "kurtosis",
    "outlier_ratio": "largest value",
    "deadzone_fraction": "deadzone",
    "excess": "excess",
}
_FAR = 2.0  # from the median, in units of the median absolute deviation × 1.4826 (a normal's standard deviation)


def _causes(row: Row) -> dict[str, float | None]:
    excess = None if not row["sq_error"] else (row["sq_error"] - row["sq_grid"] - row["sq_deadzone"]) / row["sq_error"]
    return {c: excess if c == "excess" else row.get(c) for c in CAUSES}


def worst(own: Sequence[Row]) -> dict[str, Any]:
    """The tensors by relative MSE; for each figure that lies far above the tensors' median: by how many deviations."""
    known = [r for r in own if r.get("rel_mse") is not None]
    if not known:
        return {"tensors": []}
    values = {c: [v for r in known if (v := _causes(r)[c]) is not None] for c in CAUSES}
    middle = {c: statistics.median(v) for c, v in values.items() if v}
    spread = {c: 1.4826 * statistics.median(abs(x - middle[c]) for x in values[c]) for c in middle}
    listed = []
    for row in sorted(known, key=lambda r: (-r["rel_mse"], r["name"]))[:WORST]:
        figures = _causes(row)
        far = {c: (v - middle[c]) / spread[c] for c, v in figures.items() if v is not None and spread.get(c)}
        because = sorted((c for c in far if far[c] > _FAR), key=lambda c: -far[c])
        listed.append(
            {"name": row["name"], "kind": row["kind"], "rel_mse": row["rel_mse"]}
            | ({"stored_as": row["stored_as"]} if row.get("quantized") else {})
            | figures
            | {"because": {c: round(far[c], 2) for c in because}}
        )
    ranked = {
        c: spearman(
            [r["rel_mse"] for r in known if _causes(r)[c] is not None],
            values[c],
        )
        for c in middle
    }
    return {
        "median_rel_mse": statistics.median(r["rel_mse"] for r in known),
        "medians": middle,
        "rank_correlation": ranked,
        "tensors": listed,
    }


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Rank correlation of two figures over the same tensors, ties at their mean rank; None where one is constant."""
    if len(a) < 3:
        return None
    x, y = _ranks(a), _ranks(b)
    try:
        return statistics.correlation(x, y)
    except statistics.StatisticsError:
        return None


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=lambda i: values[i])
    ranks = [0.0] * len(values)
    begin = 0
    while begin < len(order):
        end = begin
        while end + 1 < len(order) and values[order[end + 1]] == values[order[begin]]:
            end += 1
        for i in range(begin, end + 1):
            ranks[order[i]] = (begin + end) / 2
        begin = end + 1
    return ranks

"""The rows of a probe's result, by treatment and metric, and a row as a cell of a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mxrl.probes.treatments import BASELINE, Treatment
from mxrl.report.svg import number, plain

Row = Mapping[str, Any]
Form = Callable[[float | None], str]


def by_treatment(result: Row) -> dict[str, dict[str, Row]]:
    """treatment → metric → row of result["measures"], in their order."""
    found: dict[str, dict[str, Row]] = {}
    for row in result["measures"]:
        found.setdefault(row["treatment"], {})[row["metric"]] = row
    return found


def recipes(names: Sequence[str]) -> list[str]:
    """Those of the treatments that are whole recipes."""
    return [name for name in names if name != BASELINE and "@" not in name]


def parts(names: Sequence[str]) -> list[str]:
    """Those that let one component through, as it is."""
    found = {name: Treatment.parse(name) for name in names if "@" in name}
    return [name for name, t in found.items() if t.component and not t.control]


def stated(row: Row | None, form: Form = plain) -> str:
    """ "0.0061 [0.0025, 0.0126]"; an en dash where there is no value."""
    if row is None or row["value"] is None:
        return "–"
    value = _minus(form(row["value"]))
    if row["low"] is None and row["high"] is None:
        return value
    return f"{value} [{_minus(form(row['low']))}, {_minus(form(row['high']))}]"


def whiskers(rows: Sequence[Row]) -> list[tuple[float, float]]:
    """The rows' intervals, as `Page.bars` takes them."""
    return [(number(row["low"]), number(row["high"])) for row in rows]


def excludes_zero(row: Row) -> bool:
    """Whether the row's interval is known and lies on one side of 0."""
    low, high = row["low"], row["high"]
    return low is not None and high is not None and not low <= 0 <= high


def _minus(text: str) -> str:
    return text.replace("-", "−")

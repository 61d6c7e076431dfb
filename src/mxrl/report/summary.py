"""The numbers of an analysis as plain dictionaries: what summary.json and tensors.jsonl hold.

    summary(scan, …)     sums by recipe and by kind of layer, what was left out, where the numbers come from
    tensor_rows(scan)    one flat row a tensor and recipe
    FIGURES, RAW         the columns of every table: name, how to get it from ErrorStats, how to print it

Field names are those of ErrorStats: `to_dict()` and its derived figures.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from mxrl.decompose import ErrorStats
from mxrl.recipes import Recipe
from mxrl.report.svg import decimals, percent, plain
from mxrl.scan import Scan

DERIVED = (
    "rel_mse", "floor", "excess", "cos_scale_grid", "deadzone_fraction",
    "delta_mean", "delta_var", "gamma_mean", "gain",
)  # fmt: skip
SCHEMA = 1

Row = dict[str, Any]


def over_t(stats: ErrorStats, value: float) -> float:
    """`value` as a share of the whole squared error; NaN where there is no error."""
    return _part(value, stats.sq_error)


def excess_over_t(stats: ErrorStats) -> float:
    """The excess as a share of T; 0 where T and the floor differ by nothing but the order of their sums (`ideal`)."""
    share = over_t(stats, stats.excess)
    return 0.0 if abs(share) < 1e-12 else share


def _part(value: float, whole: float) -> float:
    return value / whole if whole else math.nan


class Column(NamedTuple):
    """A column of the tables: heading on the page, heading in the terminal ("" where there's no room), value, print."""

    name: str
    short: str
    of: Callable[[ErrorStats], float]
    form: Callable[[float], str]

    def cell(self, stats: ErrorStats) -> str:
        return self.form(self.of(stats))


FIGURES = (
    Column("rel. MSE", "rel. MSE", lambda s: s.rel_mse, plain),
    Column("T / floor", "", lambda s: s.sq_error / s.floor if s.floor else math.nan, plain),
    Column("excess / T", "excess", excess_over_t, percent),
    Column("deadzone / T", "", lambda s: over_t(s, s.sq_deadzone), percent),
    Column("elements in D", "in D", lambda s: s.deadzone_fraction, percent),
    Column("cos (scale, grid)", "cos", lambda s: s.cos_scale_grid, decimals),
    Column("mean 2^δ", "2^δ", lambda s: s.gamma_mean, decimals),
    Column("⟨Q(x),x⟩ / ‖x‖²", "", lambda s: s.gain, plain),
)
RAW = (
    Column("‖scale‖² / T", "", lambda s: over_t(s, s.sq_scale), plain),
    Column("‖grid‖² / T", "", lambda s: over_t(s, s.sq_grid), plain),
    Column("‖dz‖² / T", "", lambda s: over_t(s, s.sq_deadzone), plain),
    Column("2⟨scale, grid⟩ / T", "", lambda s: over_t(s, 2 * s.dot_scale_grid), plain),
    Column("2⟨scale, dz⟩ / T", "", lambda s: over_t(s, 2 * s.dot_scale_deadzone), plain),
    Column("error on D / T", "", lambda s: over_t(s, s.sq_error_deadzone), percent),
    Column("of D, made non-zero", "", lambda s: _part(s.deadzone_nonzero_count, s.deadzone_count), percent),
)


def stats_dict(stats: ErrorStats) -> dict[str, Any]:
    """`to_dict()` and the derived figures; a figure with nothing to divide by is None (JSON has no NaN)."""
    derived = {name: getattr(stats, name) for name in DERIVED}
    return stats.to_dict() | {k: v if math.isfinite(v) else None for k, v in derived.items()}


def summary(scan: Scan, files: Sequence[Mapping[str, Any]], origin: Mapping[str, Any]) -> dict[str, Any]:
    """Everything about a scan but its single tensors. files: fingerprints. origin: versions, device, commit."""
    weights = [t.weight for t in scan.tensors]
    types: dict[str, dict[str, Any]] = {}
    for weight in weights:
        entry = types.setdefault(weight.dtype, {"tensors": 0, "elements": 0, "quantized": weight.quantized})
        entry["tensors"] += 1
        entry["elements"] += weight.numel
    left: dict[str, list[str]] = defaultdict(list)
    for tensor in scan.checkpoint.left:
        left[tensor.reason].append(f"{tensor.name} {list(tensor.shape)} {tensor.dtype}")
    return {
        "schema": SCHEMA,
        "model": scan.checkpoint.name,
        "source": {
            "path": scan.checkpoint.source,
            "format": scan.checkpoint.format,
            "files": [dict(f) for f in files],
            "stored_types": types,
        },
        "recipes": list(scan.recipes),
        "baselines": list(scan.baselines),
        "tensors": len(weights),
        "elements": sum(w.numel for w in weights),
        "total": {
            r: stats_dict(scan.total(r)) | {"bits": Recipe.parse(r).bits, "relative_to_mxfp4": _json(scan.relative(r))}
            for r in scan.columns
        },
        "kinds": {
            kind: {
                "tensors": sum(w.kind == kind for w in weights),
                "recipes": {r: stats_dict(scan.total(r, kind)) for r in scan.columns},
            }
            for kind in scan.kinds
        },
        "left": dict(sorted(left.items())),
        "skipped": [{"name": s.weight.name, "kind": s.weight.kind, "reason": s.reason} for s in scan.skipped],
        "warnings": list(scan.checkpoint.warnings),
        "seconds": round(scan.seconds, 3),
        **origin,
    }


def tensor_rows(scan: Scan) -> Iterator[Row]:
    """One row a tensor and recipe: what the tensor is, then the statistics, in one flat dictionary."""
    for tensor in scan.tensors:
        w = tensor.weight
        about = {
            "name": w.name,
            "kind": w.kind,
            "layer": w.layer,
            "shape": list(w.shape),
            "dtype": w.dtype,
            "dim": w.dim,
        }
        for recipe, stats in tensor.stats.items():
            yield about | {"recipe": recipe} | stats_dict(stats)


def to_json(value: Any, *, indent: int | None = None) -> str:
    """JSON without NaN or Infinity; a number that isn't finite is an error here, not in whoever reads the file."""
    return json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False)


def _json(value: float) -> float | None:
    return value if math.isfinite(value) else None

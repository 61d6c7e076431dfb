"""The numbers of an analysis as plain dictionaries: what summary.json and tensors.jsonl hold.

    summary(scan, …)     sums by recipe and by kind of layer, what was left out, where the numbers come from
    tensor_rows(scan)    one flat row a tensor and recipe
    FIGURES, RAW         the columns of every table: name, how to get it from ErrorStats, how to print it

Field names are those of ErrorStats: `to_dict()` and its derived figures.
"""

from __future__ import annotations

import functools
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from mxrl.decompose import ErrorStats
from mxrl.moments import Moments
from mxrl.recipes import Recipe
from mxrl.report.svg import decimals, percent, plain
from mxrl.scan import PLAIN, Scan, TensorScan

DERIVED = (
    "rel_mse", "floor", "excess", "cos_scale_grid", "deadzone_fraction",
    "delta_mean", "delta_var", "gamma_mean", "gain",
)  # fmt: skip
SCHEMA = 2

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
    forms: dict[str, dict[str, Any]] = {}
    for weight in weights:
        bits = {"bits": 0.0}
        for table, name, more in ((types, weight.dtype, {}), (forms, weight.stored_as, bits)):
            zero = {"tensors": 0, "elements": 0, "quantized": weight.quantized} | more
            entry = table.setdefault(name, zero)
            entry["tensors"] += 1
            entry["elements"] += weight.numel
        forms[weight.stored_as]["bits"] += weight.bits * weight.numel
    for entry in forms.values():
        entry["bits"] /= max(entry["elements"], 1)
    left: dict[str, list[str]] = defaultdict(list)
    for tensor in scan.checkpoint.left:
        left[tensor.reason].append(f"{tensor.name} {list(tensor.shape)} {tensor.dtype}")
    sums = {recipe: scan.by_kind(recipe) for recipe in scan.columns}
    unit = sums[PLAIN][""].sq_error
    return {
        "schema": SCHEMA,
        "model": scan.checkpoint.name,
        "source": {
            "path": scan.checkpoint.source,
            "format": scan.checkpoint.format,
            "files": [dict(f) for f in files],
            "stored_types": types,
            "stored_as": forms,
        },
        "recipes": list(scan.recipes),
        "baselines": list(scan.baselines),
        "tensors": len(weights),
        "elements": sum(w.numel for w in weights),
        "total": {
            r: stats_dict(of[""])
            # T over plain MXFP4's; None where that makes no error at all
            | {"bits": Recipe.parse(r).bits, "relative_to_mxfp4": _json(of[""].sq_error / unit) if unit else None}
            for r, of in sums.items()
        },
        "kinds": {
            kind: {
                "tensors": sum(w.kind == kind for w in weights),
                "recipes": {r: stats_dict(of[kind]) for r, of in sums.items()},
            }
            for kind in scan.kinds
        },
        **({"sampled": _sampled(scan)} if scan.extra else {}),
        "left": dict(sorted(left.items())),
        "skipped": [{"name": s.weight.name, "kind": s.weight.kind, "reason": s.reason} for s in scan.skipped],
        "warnings": list(scan.checkpoint.warnings),
        "seconds": round(scan.seconds, 3),
        **origin,
    }


def _sampled(scan: Scan) -> dict[str, Any]:
    """The recipes that were measured on every n-th row."""
    sums = {recipe: scan.by_kind(recipe, sampled=True) for recipe in scan.extra}
    return {
        "every": scan.every,
        "elements": sums[scan.extra[0]][""].numel,
        "total": {r: stats_dict(of[""]) for r, of in sums.items()},
        "kinds": {kind: {r: stats_dict(of[kind]) for r, of in sums.items()} for kind in scan.kinds},
    }


_MOMENTS = ("mean", "rms", "kurtosis", "outlier_ratio", "block_peak")


def moments_dict(moments: Moments) -> dict[str, Any]:
    """The sums, and the figures derived from them; a figure with nothing to divide by is None."""
    return {name: _json(getattr(moments, name)) for name in _MOMENTS} | {"moments": asdict(moments)}


def already_quantized(summary: Mapping[str, Any]) -> dict[str, Any]:
    """The forms, by the words for them, in which weights are stored that have lost information already."""
    source = summary.get("source", {})
    forms = source.get("stored_as") or source.get("stored_types", {})
    return {name: entry for name, entry in forms.items() if entry["quantized"]}


def tensor_rows(scan: Scan) -> Iterator[Row]:
    """One row a tensor and recipe: what the tensor is, then the statistics, in one flat dictionary."""
    for tensor in scan.tensors:
        yield from rows_of(tensor)


def rows_of(tensor: TensorScan) -> Iterator[Row]:
    """The rows of one tensor."""
    w = tensor.weight
    about = {
        "name": w.name,
        "kind": w.kind,
        "layer": w.layer,
        "shape": list(w.shape),
        "dtype": w.dtype,
        "dim": w.dim,
        "stored_as": w.stored_as,
        "quantized": w.quantized,
        "bits": w.bits,
    }
    if tensor.moments is not None:
        about |= moments_dict(tensor.moments)
    for recipe, stats in tensor.stats.items():
        yield about | {"recipe": recipe} | stats_dict(stats)


def to_json(value: Any, *, indent: int | None = None) -> str:
    """JSON without NaN or Infinity; a number that isn't finite is an error here, not in whoever reads the file."""
    return _encoder(indent).encode(value)


@functools.lru_cache(maxsize=2)
def _encoder(indent: int | None) -> json.JSONEncoder:
    return json.JSONEncoder(indent=indent, ensure_ascii=False, allow_nan=False)


def _json(value: float) -> float | None:
    return value if math.isfinite(value) else None

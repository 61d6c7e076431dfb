"""The numbers of the comparisons as plain dictionaries: what their summary.json and tensors.jsonl hold.

    against_summary, against_rows            of mxrl.against.Against: a weights summary with one column more, "stored"
    diff_summary, diff_rows                  of mxrl.changes.Changes
    activations_summary, activations_rows    of mxrl.calibration.Calibration: a weights summary of layer inputs

`summary["analysis"]` says which it is. Statistics are `report.summary.stats_dict`'s; a share of nothing is None.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import mxrl.against as compared
from mxrl.changes import Changes, Seen, Update
from mxrl.checkpoint import Checkpoint
from mxrl.decompose import ErrorStats
from mxrl.pairs import Lone
from mxrl.recipes import Recipe
from mxrl.report.summary import SCHEMA, Row, excess_over_t, stats_dict, summary, tensor_rows
from mxrl.scan import PLAIN

_FIGURES = ("rel_mse", "excess_over_t", "deadzone_fraction", "cos_scale_grid", "gamma_mean", "delta_mean")


def _side(checkpoint: Checkpoint, files: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    types: dict[str, dict[str, Any]] = {}
    for w in checkpoint.weights:
        entry = types.setdefault(w.dtype, {"tensors": 0, "elements": 0, "quantized": w.quantized})
        entry["tensors"] += 1
        entry["elements"] += w.numel
    return {
        "model": checkpoint.name,
        "path": checkpoint.source,
        "format": checkpoint.format,
        "files": [dict(f) for f in files],
        "stored_types": types,
    }


def _lone(found: Sequence[Lone]) -> list[dict[str, Any]]:
    return [
        {"name": x.weight.name, "kind": x.weight.kind, "shape": list(x.weight.shape), "reason": x.reason} for x in found
    ]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


# ---- against ---------------------------------------------------------------------------------------------------------


def against_summary(
    result: compared.Against, files: Sequence[Sequence[Mapping[str, Any]]], origin: Mapping[str, Any]
) -> dict[str, Any]:
    """Everything but the single tensors; files: fingerprints of the quantized checkpoint's, then the original's."""
    whole = summary(result.ours, [], origin)
    elements = max(sum(s.pair.weight.numel for s in result.stored), 1)
    plain = result.ours.total(PLAIN).sq_error
    total = result.total()
    entry = stats_dict(total) | {
        "bits": sum(s.bits * s.pair.weight.numel for s in result.stored) / elements,
        "relative_to_mxfp4": _finite(total.sq_error / plain) if plain else None,
    }
    side = _side(result.quantized, files[0])
    original = result.ours.checkpoint
    return whole | {
        "analysis": "against",
        "model": side.pop("model"),
        "source": side,
        "original": _side(original, files[1]),
        "recipes": [compared.STORED, *dict.fromkeys((PLAIN, *result.ours.recipes))],
        "total": {compared.STORED: entry} | whole["total"],
        "kinds": {
            kind: {
                "tensors": known["tensors"],
                "recipes": {compared.STORED: stats_dict(result.total(kind))} | known["recipes"],
            }
            for kind, known in whole["kinds"].items()
        },
        "formats": _formats(result.stored),
        "reading": compared.reading(result),
        "only_in_original": _lone(result.pairing.only_a),
        "only_in_quantized": _lone(result.pairing.only_b),
        "skipped": [{"name": s.weight.name, "kind": s.weight.kind, "reason": s.reason} for s in result.skipped],
        "warnings": [*result.quantized.warnings, *original.warnings, *_lossy(original), *_strangers(result.stored)],
        "seconds": round(result.seconds, 3),
    }


def _lossy(original: Checkpoint) -> list[str]:
    lossy = sum(w.quantized for w in original.weights)
    return [f"{original.name} is no original: {lossy} of its weights are quantized already"] if lossy else []


def _strangers(stored: Sequence[compared.StoredError]) -> list[str]:
    """Weights whose difference is no rounding: two bits an element still keep more than half of a weight's energy."""
    far = [s for s in stored if s.stats.rel_mse > 0.5]
    if not far:
        return []
    return [
        f"{len(far)} of {len(stored)} weights differ from the original's by more than half of their energy (the first "
        f"is '{far[0].pair.weight.name}', {far[0].stats.rel_mse:.3g} of it): no rounding, but rows in another order, a "
        "rotation, factors moved between layers, or another model"
    ]


def _formats(stored: Sequence[compared.StoredError]) -> dict[str, dict[str, Any]]:
    found: dict[str, list[compared.StoredError]] = defaultdict(list)
    for s in stored:
        found[s.stored_as].append(s)
    out = {}
    for name, entries in found.items():
        elements = sum(s.pair.weight.numel for s in entries)
        same: dict[str, int] = defaultdict(int)
        equal: dict[str, int] = defaultdict(int)
        for s in entries:
            if s.same_as is not None:
                same[s.same_as] += 1
            for recipe, count in s.equal.items():
                equal[recipe] += count
        out[name] = {
            "tensors": len(entries),
            "elements": elements,
            "bits": sum(s.bits * s.pair.weight.numel for s in entries) / max(elements, 1),
            "reference": entries[0].reference,
            "same_grid": all(s.same_grid for s in entries),
            "same_as": dict(same),
            "equal_elements": {recipe: count / max(elements, 1) for recipe, count in equal.items()},
        }
    return out


def against_rows(result: compared.Against) -> Iterator[Row]:
    """One row a matched tensor and column, "stored" first."""
    stored = {s.pair.weight.name: s for s in result.stored}
    seen: set[str] = set()
    for row in tensor_rows(result.ours):
        if row["name"] not in seen:
            seen.add(row["name"])
            s = stored[row["name"]]
            about = {key: row[key] for key in ("name", "kind", "layer", "shape", "dtype", "dim")}
            yield (
                about
                | {
                    "recipe": compared.STORED,
                    "stored_name": ", ".join(w.name for w in s.pair.others),
                    "stored_as": s.stored_as,
                    "bits": s.bits,
                    "group": s.pair.others[0].group,
                    "reference": s.reference,
                    "same_grid": s.same_grid,
                    "same_as": s.same_as,
                    "equal_elements": {r: n / max(s.pair.weight.numel, 1) for r, n in s.equal.items()},
                }
                | stats_dict(s.stats)
            )
        yield row


# ---- diff ------------------------------------------------------------------------------------------------------------


def update_dict(update: Update) -> dict[str, Any]:
    return {
        "numel": update.numel,
        "changed": update.changed,
        "changed_fraction": update.changed / max(update.numel, 1),
        "sq_norm_a": update.sq_norm_a,
        "sq_norm_b": update.sq_norm_b,
        "sq_change": update.sq_change,
        "dot_a_change": update.dot_a_change,
        "max_change": update.max_change,
        "relative_change": _finite(update.relative_change),
        "cos": _finite(update.cos),
    }


def seen_dict(seen: Seen, update: Update) -> dict[str, Any]:
    """What a recipe sees of `update`; a share of nothing is None."""

    def share(part: float | None, whole: float) -> float | None:
        return None if part is None or not whole else part / whole

    jump = math.sqrt(seen.sq_quantized_change)
    figures = {"a": _figures(seen.a), "b": _figures(seen.b)}
    return {
        "codes_changed": seen.codes_changed,
        "codes_changed_fraction": share(seen.codes_changed, update.numel),
        "scales_changed": seen.scales_changed,
        "blocks": seen.blocks,
        "scales_changed_fraction": share(seen.scales_changed, seen.blocks),
        "values_changed": seen.values_changed,
        "values_changed_fraction": share(seen.values_changed, update.numel),
        "below_half_step": share(seen.sq_below, update.sq_change),
        "below_half_step_elements": share(seen.changed_below, update.changed),
        "unseen": share(seen.sq_unseen, update.sq_change),
        "sq_quantized_change": seen.sq_quantized_change,
        "dot_quantized_change": seen.dot_quantized_change,
        "kept": share(seen.dot_quantized_change, update.sq_change),
        "relative_quantized_change": share(jump, math.sqrt(update.sq_change)),
        "a": stats_dict(seen.a),
        "b": stats_dict(seen.b),
        "difference": {k: _finite(figures["b"][k] - figures["a"][k]) for k in _FIGURES},
    }


def _figures(stats: ErrorStats) -> dict[str, float]:
    return {k: excess_over_t(stats) if k == "excess_over_t" else getattr(stats, k) for k in _FIGURES}


def _change(update: Update, seen: Mapping[str, Seen]) -> dict[str, Any]:
    return update_dict(update) | {"recipes": {r: seen_dict(s, update) for r, s in seen.items()}}


def diff_summary(
    result: Changes, files: Sequence[Sequence[Mapping[str, Any]]], origin: Mapping[str, Any]
) -> dict[str, Any]:
    """Everything but the single tensors; files: fingerprints of A's, then B's."""
    weights = [t.pair.weight for t in result.tensors]
    return {
        "schema": SCHEMA,
        "analysis": "diff",
        "model": f"{result.a.name} → {result.b.name}",
        "a": _side(result.a, files[0]),
        "b": _side(result.b, files[1]),
        "recipes": list(result.recipes),
        "tensors": len(weights),
        "elements": sum(w.numel for w in weights),
        "total": _change(*result.total()),
        "kinds": {
            kind: {"tensors": sum(w.kind == kind for w in weights)} | _change(*result.total(kind))
            for kind in result.kinds
        },
        "layers": {str(layer): _change(*result.total(layer=layer)) for layer in result.layers},
        "only_in_a": _lone(result.pairing.only_a),
        "only_in_b": _lone(result.pairing.only_b),
        "skipped": [{"name": s.weight.name, "kind": s.weight.kind, "reason": s.reason} for s in result.skipped],
        "warnings": [*result.a.warnings, *result.b.warnings],
        "seconds": round(result.seconds, 3),
        **origin,
    }


def diff_rows(result: Changes) -> Iterator[Row]:
    """One row a matched tensor and recipe."""
    for t in result.tensors:
        w = t.pair.weight
        about = {
            "name": w.name, "kind": w.kind, "layer": w.layer, "shape": list(w.shape), "dtype": w.dtype, "dim": w.dim,
            "b_name": ", ".join(o.name for o in t.pair.others),
            "b_dtype": ", ".join(dict.fromkeys(o.dtype for o in t.pair.others)),
        }  # fmt: skip
        for recipe, seen in t.seen.items():
            yield about | {"recipe": recipe} | update_dict(t.update) | seen_dict(seen, t.update)


# ---- activations -----------------------------------------------------------------------------------------------------


def activations_summary(result: Any, model: str, task: Mapping[str, Any], origin: Mapping[str, Any]) -> dict[str, Any]:
    """Everything but the single layers, of a `mxrl.calibration.Calibration`."""
    plain = result.total(PLAIN).sq_error
    total = {}
    for r in result.columns:
        stats = result.total(r)
        relative = _finite(stats.sq_error / plain) if plain else None
        total[r] = stats_dict(stats) | {"bits": Recipe.parse(r).bits, "relative_to_mxfp4": relative}
    left: dict[str, list[str]] = defaultdict(list)
    for name, reason in result.left:
        left[reason].append(name)
    return {
        "schema": SCHEMA,
        "analysis": "activations",
        "model": model,
        "source": {"path": model, "format": "Hugging Face model", "files": [], "stored_types": {}},
        "task": dict(task),
        "dtype": result.dtype,
        "recipes": list(result.recipes),
        "baselines": list(result.baselines),
        "tensors": len(result.inputs),
        "elements": sum(i.rows * i.width for i in result.inputs),
        "total": total,
        "kinds": {
            kind: {
                "tensors": sum(i.kind == kind for i in result.inputs),
                "recipes": {r: stats_dict(result.total(r, kind)) for r in result.columns},
            }
            for kind in result.kinds
        },
        "layers": {
            str(layer): {r: stats_dict(result.total(r, layer=layer)) for r in result.columns} for layer in result.layers
        },
        "left": dict(sorted(left.items())),
        "skipped": [],
        "warnings": [],
        "seconds": round(result.seconds, 3),
        **origin,
    }


def activations_rows(result: Any) -> Iterator[Row]:
    """One row a layer input and recipe."""
    for i in result.inputs:
        about = {
            "name": i.name, "kind": i.kind, "layer": i.layer, "shape": [i.rows, i.width], "dtype": i.dtype, "dim": -1,
        }  # fmt: skip
        for recipe, stats in i.stats.items():
            yield about | {"recipe": recipe, "rows": i.rows} | stats_dict(stats)

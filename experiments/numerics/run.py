"""Where MXFP4's error lies, and what each correction does to each component: the tables of README.md beside this.

    python experiments/numerics/run.py [--weights model.safetensors] [--elements 4194304] [--out experiments/numerics]

Data: N(0, 1) and N(0, 0.02²) from a fixed seed, float32, rows of 4096, and (with --weights) every linear weight of a
checkpoint. Writes results.jsonl (a line a measurement) and tables.md. Everything is summed in float64.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from mxrl.checkpoint import open_checkpoint
from mxrl.decompose import ErrorStats, decompose, error_stats
from mxrl.provenance import provenance
from mxrl.recipes import Recipe
from mxrl.report.files import write_atomically

RULES = ["mxfp4", "mxfp4:floor", "mxfp4:even", "mxfp4:ideal", "nvfp4", "nvfp4:4over6", "mxfp8"]
SWEEP = ["mxfp4", *(f"mxfp4:e8m{k}" for k in (1, 2, 3, 4, 5, 8))]
CORRECTIONS = [
    "mxfp4", "mxfp4+mbs", "mxfp4+mbs:search16", "mxfp4+mbs:search256", "mxfp4+mbs:joint",
    "mxfp4+of:0.25", "mxfp4+of", "mxfp4+of:0.75", "mxfp4+of:1", "mxfp4+mbs+of",
]  # fmt: skip


def normal(sigma: float, elements: int) -> Tensor:
    return torch.randn(elements // 4096, 4096, generator=torch.Generator().manual_seed(0)) * sigma


def measure(tensors: list[tuple[Tensor, int]], recipe: str) -> ErrorStats:
    total = ErrorStats.zero()
    for x, dim in tensors:
        total = total + error_stats(x, recipe, dim=dim)
    return total


def macro_split(tensors: list[tuple[Tensor, int]]) -> dict[str, float]:
    """‖e_scale‖² under MBS align relative to plain: in the block that holds the macro maximum, and elsewhere."""
    sums = {"holder": [0.0, 0.0], "others": [0.0, 0.0]}
    for x, dim in tensors:
        rows = x.movedim(dim, -1).float()
        rows = rows[..., : rows.shape[-1] // 128 * 128].reshape(-1, 128)
        holder = rows.view(-1, 4, 32).abs().amax(-1)
        holder = holder == holder.amax(-1, keepdim=True)
        for i, recipe in enumerate(("mxfp4", "mxfp4+mbs")):
            energy = decompose(rows, recipe).scale.square().view(-1, 4, 32).sum(-1)
            sums["holder"][i] += float(energy[holder].sum())
            sums["others"][i] += float(energy[~holder].sum())
    return {name: after / before for name, (before, after) in sums.items()}


def rows_of(name: str, tensors: list[tuple[Tensor, int]]) -> Iterator[dict[str, object]]:
    plain = measure(tensors, "mxfp4")
    for recipe in dict.fromkeys([*RULES, *SWEEP, *CORRECTIONS]):
        s = plain if recipe == "mxfp4" else measure(tensors, recipe)
        yield {
            "data": name, "recipe": recipe, "bits": Recipe.parse(recipe).bits, "rel_mse": s.rel_mse,
            "over_plain": s.sq_error / plain.sq_error, "over_floor": s.sq_error / s.floor,
            "scale": s.sq_scale / s.sq_error, "deadzone": s.sq_deadzone / s.sq_error, "grid": s.sq_grid / s.sq_error,
            "cross": 2 * s.dot_scale_grid / s.sq_error, "cos": s.cos_scale_grid,
            "deadzone_fraction": s.deadzone_fraction, "gamma_mean": s.gamma_mean, "gain": s.gain,
            "error_deadzone_over_plain": s.sq_error_deadzone / plain.sq_error_deadzone,
            "error_elsewhere_over_plain": s.sq_error_elsewhere / plain.sq_error_elsewhere,
            "scale_over_plain": s.sq_scale / plain.sq_scale,
            "deadzone_nonzero": s.deadzone_nonzero_count / s.deadzone_count if s.deadzone_count else 0,
        }  # fmt: skip
    yield {"data": name, "recipe": "mxfp4+mbs", "scale_energy_kept": macro_split(tensors)}


def table(rows: list[dict], recipes: list[str], columns: list[tuple[str, str, str]]) -> str:
    """Markdown: a line for each recipe and data set; columns are (heading, key, format)."""
    head = "| data | recipe | " + " | ".join(c[0] for c in columns) + " |"
    lines = [head, "|" + "---|" * (len(columns) + 2)]
    for row in rows:
        if row["recipe"] in recipes and "rel_mse" in row:
            cells = " | ".join(format(row[key], spec) for _, key, spec in columns)
            lines.append(f"| {row['data']} | `{row['recipe']}` | {cells} |")
    return "\n".join(lines)


def render(rows: list[dict], about: str) -> str:
    kept = "\n".join(
        f"| {r['data']} | {r['scale_energy_kept']['holder']:.1%} | {r['scale_energy_kept']['others']:.1%} |"
        for r in rows
        if "scale_energy_kept" in r
    )
    terms = [("rel. MSE", "rel_mse", ".5f"), ("T/floor", "over_floor", ".3f"), ("‖scale‖²/T", "scale", ".3f"),
             ("‖dz‖²/T", "deadzone", ".3f"), ("‖grid‖²/T", "grid", ".3f"), ("2·cross/T", "cross", ".3f"),
             ("cos", "cos", ".3f"), ("in D", "deadzone_fraction", ".2%"), ("mean 2^δ", "gamma_mean", ".3f"),
             ("⟨Q,x⟩/‖x‖²", "gain", ".4f")]  # fmt: skip
    effect = [("bits", "bits", ".5g"), ("T/plain", "over_plain", ".3f"),
              ("error on D", "error_deadzone_over_plain", ".3f"),
              ("error off D", "error_elsewhere_over_plain", ".3f"), ("‖C − Q*‖²", "scale_over_plain", ".3f"),
              ("D now non-zero", "deadzone_nonzero", ".1%")]  # fmt: skip
    return "\n\n".join([
        about,
        "**The terms**", table(rows, ["mxfp4"], terms),
        "**Scale rules**",
        table(rows, RULES, [("bits", "bits", ".5g"), ("rel. MSE", "rel_mse", ".5f"), ("T/mxfp4", "over_plain", ".3f")]),
        "**Scale precision E8M*k***",
        table(rows, SWEEP, [("T/floor", "over_floor", ".3f"), ("mean 2^δ", "gamma_mean", ".3f")]),
        "**Correction × component** (each relative to plain MXFP4)", table(rows, CORRECTIONS, effect),
        "**Scale energy kept under MBS `align`** (‖e_scale‖² after / before)",
        "| data | block that holds the macro maximum | the other blocks |\n|---|---|---|\n" + kept,
    ]) + "\n"  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", help="a checkpoint whose linear weights are measured too")
    parser.add_argument("--name", default="weights", help="what to call it")
    parser.add_argument("--elements", type=int, default=1 << 22)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    args = parser.parse_args()
    data = {"N(0, 1)": [(normal(1.0, args.elements), -1)], "N(0, .02²)": [(normal(0.02, args.elements), -1)]}
    if args.weights:
        checkpoint = open_checkpoint(args.weights)
        data[args.name] = [(checkpoint.load(w), w.dim) for w in checkpoint.weights]
    rows = []
    for name, tensors in data.items():
        for row in rows_of(name, tensors):
            rows.append(row)
            print(row["data"], row["recipe"], flush=True)
    origin = {**provenance("cpu", "torch"), "seed": 0, "elements": args.elements}
    versions = ", ".join(f"{name} {version}" for name, version in origin["versions"].items())
    about = (
        f"Measured on a CPU ({origin['machine']}), {versions}, commit {str(origin['commit'])[:12]}, seed 0, "
        f"{args.elements:,} normal elements, {origin['created'][:10]}."
    )
    write_atomically(args.out / "results.jsonl", "".join(json.dumps({**r, **origin}) + "\n" for r in rows))
    write_atomically(args.out / "tables.md", render(rows, about))


if __name__ == "__main__":
    main()

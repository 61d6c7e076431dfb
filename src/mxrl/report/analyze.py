"""`mxrl analyze`: a checkpoint -> summary.json, tensors.jsonl and report.html.

    analyze(model, recipes, out)   open, scan, write: the whole command
    build_page(summary, rows)      the page, from what the two files hold and nothing else

T is the whole squared error of a recipe, the floor ‖e_grid‖² + ‖e_dz‖². ‖e_scale‖² exceeds T (its cross term with the
grid is negative), so it is never drawn as a part of it: plots stack grid, deadzone and the *excess* T − floor, and the
raw terms stand in the table.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from mxrl.checkpoint import fingerprint, open_checkpoint
from mxrl.decompose import ErrorStats
from mxrl.formats import MXFP4, MXFP8
from mxrl.provenance import provenance
from mxrl.recipes import Recipe
from mxrl.report.files import staged
from mxrl.report.page import Page, percent, plain
from mxrl.report.summary import FIGURES, RAW, Row, excess_over_t, summary, tensor_rows, to_json
from mxrl.scan import PLAIN, parse_recipes, scan

_WORST = 25  # tensors listed on the page


class Progress(Protocol):
    """Told what is being done: a phase with its amount of work, then how much of it is done."""

    def start(self, phase: str, total: int) -> None: ...

    def advance(self, amount: int) -> None: ...


class Silent:
    """A Progress that shows nothing."""

    def start(self, phase: str, total: int) -> None:
        pass

    def advance(self, amount: int) -> None:
        pass


def analyze(
    model: str | Path,
    recipes: Sequence[str] = (PLAIN,),
    *,
    out: Path,
    on_nonfinite: str = "error",
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Scan `model` and write `out`/{summary.json, tensors.jsonl, report.html}; returns the summary.

    Nothing appears in `out` before all three are complete. Raises RecipeError, CheckpointError, NonFiniteError and
    OSError.
    """
    progress = progress or Silent()
    recipes = parse_recipes(recipes)  # a wrong word is known before anything is read
    checkpoint = open_checkpoint(model)
    with staged(out) as folder:
        progress.start("hashing", sum(file.stat().st_size for file in checkpoint.files))
        files = [fingerprint(file, progress.advance) for file in checkpoint.files]
        progress.start("scanning", checkpoint.numel)
        done = scan(checkpoint, recipes, on_nonfinite=on_nonfinite, progress=lambda w: progress.advance(w.numel))
        result = summary(done, files, provenance("cpu", "torch", "safetensors", "gguf", "numpy"))
        rows = list(tensor_rows(done))
        (folder / "summary.json").write_text(to_json(result, indent=1) + "\n", encoding="utf-8")
        (folder / "tensors.jsonl").write_text("".join(to_json(r) + "\n" for r in rows), encoding="utf-8")
        (folder / "report.html").write_text(build_page(result, rows).html(), encoding="utf-8")
    return result


# ---- the page --------------------------------------------------------------------------------------------------------


def build_page(summary: Mapping[str, Any], rows: Iterable[Row]) -> Page:
    """The page of one analysis, from `summary.json` and the rows of `tensors.jsonl`."""
    main = summary["recipes"][0]
    total = {r: ErrorStats.from_dict(s) for r, s in summary["total"].items()}
    own = [r for r in rows if r["recipe"] == main]
    page = Page(
        f"MXFP4 error of {summary['model']}",
        lead=f"{summary['tensors']} linear weights, {summary['elements']:,} elements; `{summary['source']['path']}`",
        footer=f"Made by mxrl {summary['versions']['mxrl']} on {summary['created']}. Every number here is in "
        "`summary.json`; every tensor's are in `tensors.jsonl`.",
    )
    _short(page, summary, main, total[main])
    _recipes(page, summary, total)
    _kinds(page, summary, main, total[main])
    _depth(page, own, main, summary["kinds"])
    _scales(page, main, total)
    _tensors(page, own, main)
    _reading(page)
    _origin(page, summary)
    return page


def _short(page: Page, summary: Mapping[str, Any], main: str, stats: ErrorStats) -> None:
    page.section("In short")
    page.text(
        f"`{main}` changes these weights by {percent(stats.rel_mse)} of their energy. {_excess_sentence(stats)} "
        f"{percent(stats.deadzone_fraction)} of the elements lie in the deadzone, where even the ideal scale rounds "
        "to zero."
    )
    tiles = {
        "relative MSE": plain(stats.rel_mse),
        "excess / T": percent(excess_over_t(stats)),
        "elements in the deadzone": percent(stats.deadzone_fraction),
        "cos(scale, grid)": plain(stats.cos_scale_grid),
    }
    if main != PLAIN:
        tiles = {"T relative to mxfp4": _times(summary["total"][main]["relative_to_mxfp4"])} | tiles
    page.facts(tiles | {"bits an element": plain(summary["total"][main]["bits"])})
    lossy = {t: v for t, v in summary["source"]["stored_types"].items() if v["quantized"]}
    if lossy:
        kinds = ", ".join(f"{v['tensors']} × {t}" for t, v in lossy.items())
        page.note(
            f"The source is already quantized ({kinds}). Its values were dequantized to float32 first, so that these "
            "numbers are the further error on top of what the source has lost, and its grid shows in them; the model's "
            "own weights may give other figures.",
            warn=True,
        )
    for skipped in summary["skipped"]:
        page.note(f"Left out on request: `{skipped['name']}` has {skipped['reason']}.", warn=True)
    for warning in summary["warnings"]:
        page.note(f"Warning: {warning}.", warn=True)


def _excess_sentence(stats: ErrorStats) -> str:
    if not excess_over_t(stats) < 0:
        return (
            f"{percent(excess_over_t(stats))} of that error is excess over the floor, which the ideal scales "
            "m/q_max would leave."
        )
    return f"That is below the floor of the ideal scales m/q_max, at {plain(stats.sq_error / stats.floor)} of it."


def _times(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f} ×"


def stack(stats: Sequence[ErrorStats]) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Grid, deadzone and excess relative to ‖x‖², to be stacked, and the floor as a mark.

    Where T lies below the floor there is no excess to add: the bar is then T, whole, beside its mark.
    """
    below = [excess_over_t(s) < 0 for s in stats]
    parts = {
        "grid": [0.0 if b else _ratio(s.sq_grid, s.sq_norm) for s, b in zip(stats, below, strict=True)],
        "deadzone": [0.0 if b else _ratio(s.sq_deadzone, s.sq_norm) for s, b in zip(stats, below, strict=True)],
        "excess (scales)": [
            0.0 if b else max(0.0, _ratio(s.excess, s.sq_norm)) for s, b in zip(stats, below, strict=True)
        ],
    }
    if any(below):
        parts["T, below the floor"] = [s.rel_mse if b else 0.0 for s, b in zip(stats, below, strict=True)]
    return parts, {"floor (ideal scales)": [_ratio(s.floor, s.sq_norm) for s in stats]}


def _ratio(a: float, b: float) -> float:
    return a / b if b else math.nan


def _recipes(page: Page, summary: Mapping[str, Any], total: Mapping[str, ErrorStats]) -> None:
    page.section("Recipes compared")
    names = sorted(total, key=lambda r: (r != PLAIN, r not in summary["recipes"]))
    parts, marks = stack([total[r] for r in names])
    page.bars(
        "Relative MSE of each recipe",
        names,
        parts,
        marks=marks,
        axis="T / ‖x‖²",
        explain="Grid and deadzone together are the floor, the error under the ideal scale of each block. The excess "
        "is what the recipe's own scales add to it.",
    )
    table = []
    for name in names:
        entry = summary["total"][name]
        cells = [plain(entry["bits"]), _times(entry["relative_to_mxfp4"])]
        table.append([name, *cells, *(c.cell(total[name]) for c in FIGURES)])
    page.table(["recipe", "bits / element", "T / T(mxfp4)", *(c.name for c in FIGURES)], table)
    page.table(
        ["recipe", *(c.name for c in RAW)],
        [[name, *(c.cell(total[name]) for c in RAW)] for name in names],
        caption="The raw terms. T = ‖scale‖² + ‖dz‖² + ‖grid‖² + twice the inner products.",
    )
    page.note(
        "The `ceil` rule of plain `mxfp4` usually has a higher MSE than OCP's `floor` and than `even`. It never clips, "
        "and the orthogonality of the decomposition rests on it: where a rule can clip, ⟨scale, dz⟩ need not be zero."
    )
    page.note(
        "The floor is the limit of better scales under the max-to-6 rule, not a lower bound on error: a scale searched "
        "for the least squared error goes below it, and so does a second pass (`+of`)."
    )


def _kinds(page: Page, summary: Mapping[str, Any], main: str, total: ErrorStats) -> None:
    page.section("By kind of layer")
    stats = {k: ErrorStats.from_dict(v["recipes"][main]) for k, v in summary["kinds"].items()}
    labels = [*stats, "all"]
    everything = [*stats.values(), total]
    parts, marks = stack(everything)
    page.bars(f"Relative MSE by kind of layer, `{main}`", labels, parts, marks=marks, axis="T / ‖x‖²")
    counts = [*(v["tensors"] for v in summary["kinds"].values()), summary["tensors"]]
    page.table(
        ["kind", "tensors", "elements", *(c.name for c in FIGURES)],
        [
            [label, str(count), f"{s.numel:,}", *(c.cell(s) for c in FIGURES)]
            for label, count, s in zip(labels, counts, everything, strict=True)
        ],
        strong=[len(labels) - 1],
    )
    page.table(
        ["kind", *(c.name for c in RAW)],
        [[label, *(c.cell(s) for c in RAW)] for label, s in zip(labels, everything, strict=True)],
        strong=[len(labels) - 1],
        fold="The raw terms by kind of layer",
    )


def _depth(page: Page, rows: Sequence[Row], main: str, order: Iterable[str]) -> None:
    layers = sorted({r["layer"] for r in rows if r["layer"] is not None})
    if len(layers) < 2:
        return
    cells: dict[tuple[str, int], ErrorStats] = defaultdict(ErrorStats.zero)
    for row in rows:
        if row["layer"] is not None:
            cells[row["kind"], row["layer"]] += ErrorStats.from_dict(row)
    kinds = [k for k in order if any(kind == k for kind, _ in cells)]
    page.section("By depth")
    page.lines(
        f"Relative MSE by layer, `{main}`",
        layers,
        {k: [cells[k, layer].rel_mse if (k, layer) in cells else math.nan for layer in layers] for k in kinds},
        x_label="layer",
        y_label="T / ‖x‖²",
    )


def _scales(page: Page, main: str, total: Mapping[str, ErrorStats]) -> None:
    stats = total[main]
    if not stats.delta_count:
        return
    page.section("Scales")
    page.text(
        "δ = log₂(scale / ideal scale) of a block: how much coarser its grid is than it need be. A power of two "
        "rounded up gives δ in [0, 1). Over a population of tensors with mixed scales it is uniform; a single tensor "
        "departs from that. All-zero blocks and clamped exponents are counted apart."
    )
    bins = len(stats.delta_hist)
    edges = [-1 + 2 * i / bins for i in range(bins + 1)]
    used = [i for i, n in enumerate(stats.delta_hist) if n]
    first, last = min(used), max(used) + 1
    recipe = Recipe.parse(main)
    reference: dict[str, list[float]] = {}
    if recipe.rule == "ceil" and recipe.mbs is None and recipe.format in (MXFP4, MXFP8):
        first, last = min(first, bins // 2), max(last, bins)
        reference = {"uniform on [0, 1)": [2 / bins if e >= -1e-9 else 0.0 for e in edges[first:last]]}
    shares = [n / stats.delta_count for n in stats.delta_hist[first:last]]
    page.histogram(
        f"δ of {stats.delta_count:,} blocks, `{main}`",
        edges[first : last + 1],
        shares,
        reference=reference,
        x_label="δ",
    )
    page.table(
        ["recipe", "blocks", "mean δ", "variance of δ", "mean 2^δ", "⟨Q(x),x⟩/‖x‖²", "all-zero blocks", "clamped"],
        [
            [
                r,
                f"{s.delta_count:,}",
                *(plain(v) for v in (s.delta_mean, s.delta_var, s.gamma_mean, s.gain)),
                f"{s.zero_blocks:,}",
                f"{s.clamped_blocks:,}",
            ]
            for r, s in total.items()
        ],
        caption="mean 2^δ says how much larger than ideal the scales are. It is no gain of the tensor: that is "
        "⟨Q(x),x⟩/‖x‖². Uniform δ would have mean .5, variance .0833, mean 2^δ 1.443.",
    )


def _tensors(page: Page, rows: Sequence[Row], main: str) -> None:
    page.section("Tensors with the largest error")
    ranked = sorted(rows, key=lambda r: -(r["rel_mse"] or 0.0))
    page.table(
        ["tensor", "kind", "shape", "stored as", *(c.name for c in FIGURES)],
        [
            [
                *(r["name"], r["kind"], " × ".join(map(str, r["shape"])), r["dtype"]),
                *(c.cell(ErrorStats.from_dict(r)) for c in FIGURES),
            ]
            for r in ranked[:_WORST]
        ],
        caption=f"By relative MSE under `{main}`, the first {min(_WORST, len(ranked))} of {len(ranked)}; "
        "`tensors.jsonl` has them all.",
        text_columns=(1, 2, 3),
    )


def _reading(page: Page) -> None:
    page.section("How to read this")
    page.text(
        "The error of each element is split exactly: Q(x) − x = scale + deadzone + grid. Q* is the same quantizer with "
        "the unrounded ideal scale m/q_max of its block (m: the block's largest magnitude). scale = Q(x) − Q*(x); "
        "deadzone = Q*(x) − x where |x| lies below half the smallest step, so that Q* gives zero; grid = Q*(x) − x "
        "elsewhere.",
        "‖scale‖² is larger than the whole error T, because its cross term with the grid is negative: it is no part of "
        "T and is not drawn as one. The part that better scales could win is the excess, T − floor = ‖scale‖² + "
        "2⟨scale, grid⟩.",
        "Deadzone and Q* are those of the format itself: blocks of 32 for MXFP4 and MXFP8, of 16 for NVFP4, whose "
        "floor therefore differs. Bits an element include the scales. What touches activations or is random (noise) "
        "is not part of an analysis of weights.",
        "Sources: arXiv 2605.20402 (decomposition, OF), arXiv 2603.08713 (macro-block scaling), OCP Microscaling "
        "Formats v1.0.",
    )


def _origin(page: Page, summary: Mapping[str, Any]) -> None:
    page.section("Left out")
    page.table(["reason", "tensors"], [[reason, str(len(names))] for reason, names in summary["left"].items()])
    names = [[name, reason] for reason, found in summary["left"].items() for name in found]
    page.table(["tensor", "reason"], names, text_columns=(1,), fold=f"All {len(names)} by name")
    page.section("Where the numbers come from")
    source = summary["source"]
    stored = ", ".join(f"{v['tensors']} × {t}" for t, v in source["stored_types"].items())
    facts = [["model", f"{source['path']} ({source['format']}; weights stored as {stored})"]]
    facts += [[f["name"], f"{f['bytes']:,} bytes, sha256 {f['sha256']}"] for f in source["files"]]
    facts += [["versions", ", ".join(f"{k} {v}" for k, v in summary["versions"].items())]]
    facts += [["commit", summary["commit"] or "not known (an installed copy)"]]
    facts += [["device", f"{summary['device']} ({summary['machine']})"], ["seconds", plain(summary["seconds"])]]
    page.table(["", ""], facts, text_columns=(1,))

"""The sections of the analyses that look at two checkpoints: one against its original, and A against B."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mxrl.report.dots import Dot
from mxrl.report.outliers import Row
from mxrl.report.page import Page, percent, plain
from mxrl.report.svg import decimals, number

Summary = Mapping[str, Any]
_LISTED = 25


def against(page: Page, summary: Summary) -> None:
    """What is stored, beside what plain MXFP4 and the recipes would have made of the original."""
    page.section("What is stored, against the original")
    page.text(*summary["reading"])
    page.table(
        [
            "stored as",
            "tensors",
            "elements",
            "bits / element",
            "split relative to",
            "same grid",
            "bit for bit",
            "equal elements, at most",
        ],
        [
            [
                name,
                str(e["tensors"]),
                f"{e['elements']:,}",
                plain(e["bits"]),
                e["reference"],
                "yes" if e["same_grid"] else "no",
                ", ".join(f"{n} as {what}" for what, n in e["same_as"].items()) or "none",
                _nearest(e["equal_elements"]),
            ]
            for name, e in summary["formats"].items()
        ],
        caption="Bit for bit: tensors that equal what a recipe makes of the original, or the original itself. Not on "
        "the same grid: the scale term then holds everything in which the quantizer differs from the reference.",
        text_columns=(4, 5, 6, 7),
    )
    _missing(page, {"only in the original": summary["only_in_original"], "only here": summary["only_in_quantized"]})


def _nearest(shares: Mapping[str, float]) -> str:
    """The recipe that has most elements in common with what is stored."""
    if not shares:
        return "–"
    recipe = max(shares, key=lambda r: shares[r])
    return f"{percent(shares[recipe])} with {recipe}"


def _missing(page: Page, found: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    rows = [
        [e["name"], where, e["kind"], " × ".join(map(str, e["shape"])), e["reason"]]
        for where, entries in found.items()
        for e in entries
    ]
    if rows:
        page.table(
            ["tensor", "where", "kind", "shape", "why it isn't compared"],
            rows,
            text_columns=(1, 2, 3, 4),
            fold=f"{len(rows)} tensors without a partner",
        )


def diff(page: Page, summary: Summary, own: Sequence[Row]) -> None:
    """Before and after: how large the update is, and what of it the quantized weights see."""
    main, total = summary["recipes"][0], summary["total"]
    q = total["recipes"][main]
    page.section("In short")
    page.text(
        f"B differs from A in {percent(total['changed_fraction'])} of the elements; ‖B − A‖ is "
        f"{percent(total['relative_change'])} of ‖A‖. Under `{main}` {percent(q['values_changed_fraction'])} of the "
        f"quantized values and {percent(q['scales_changed_fraction'])} of the scales change. "
        f"{percent(q['unseen'])} of the update's energy lies in elements whose quantized value stays the same. "
        f"⟨Q(B) − Q(A), B − A⟩ is {plain(q['kept'])} of ‖B − A‖² (1: the update arrives whole), and ‖Q(B) − Q(A)‖ is "
        f"{plain(q['relative_quantized_change'])} times ‖B − A‖: what is above 1 is noise of the grid's jumps."
    )
    for warning in summary["warnings"]:
        page.note(f"Warning: {warning}.", warn=True)
    page.section("The update, as each recipe sees it")
    page.table(*_update("recipe", {r: e for r, e in total["recipes"].items()}))
    kinds = summary["kinds"]
    page.section("By kind of layer")
    page.bars(
        "‖B − A‖ / ‖A‖ by kind of layer",
        [*kinds, "all"],
        {"relative change": [number(e["relative_change"]) for e in (*kinds.values(), total)]},
        axis="‖B − A‖ / ‖A‖",
    )
    page.bars(
        f"Quantized values that change, `{main}`",
        [*kinds, "all"],
        {"changed": [number(e["recipes"][main]["values_changed_fraction"]) for e in (*kinds.values(), total)]},
        axis="share of the elements",
        form=percent,
    )
    page.table(*_change("kind", kinds | {"all": total}), strong=[len(kinds)])
    page.table(
        *_update("kind", {k: e["recipes"][main] for k, e in kinds.items()}), fold=f"As `{main}` sees it, by kind"
    )
    layers = summary["layers"]
    if len(layers) > 1:
        page.section("By depth")
        at = [int(i) for i in layers]
        page.lines(
            "‖B − A‖ / ‖A‖ by layer",
            at,
            {"relative change": [number(e["relative_change"]) for e in layers.values()]},
            x_label="layer",
            zero=True,
        )
        page.lines(
            f"What arrives, by layer, `{main}`",
            at,
            {
                "kept": [number(e["recipes"][main]["kept"]) for e in layers.values()],
                "unseen": [number(e["recipes"][main]["unseen"]) for e in layers.values()],
            },
            x_label="layer",
            zero=True,
            explain="kept: ⟨Q(B) − Q(A), B − A⟩ / ‖B − A‖². unseen: the share of ‖B − A‖² in elements whose quantized "
            "value stays.",
        )
        page.table(*_change("layer", layers), fold="Each layer")
    _fingerprints(page, total["recipes"])
    _tensors(page, own, main, list(kinds))
    _missing(page, {"only in A": summary["only_in_a"], "only in B": summary["only_in_b"]})


def _change(first: str, entries: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    columns = [first, "elements", "changed", "‖B−A‖ / ‖A‖", "largest change", "cos(A, B)"]
    rows = [
        [
            name,
            f"{e['numel']:,}",
            percent(e["changed_fraction"]),
            plain(e["relative_change"]),
            plain(e["max_change"]),
            "–" if e["cos"] is None else f"{e['cos']:.6f}",
        ]
        for name, e in entries.items()
    ]
    return columns, rows


def _update(first: str, entries: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    columns = [
        first, "codes changed", "scales changed", "values changed", "below half a step", "unseen", "kept",
        "‖Q(B)−Q(A)‖ / ‖B−A‖",
    ]  # fmt: skip
    keys = (
        "codes_changed_fraction",
        "scales_changed_fraction",
        "values_changed_fraction",
        "below_half_step",
        "unseen",
    )
    rows = [
        [name, *(percent(e[k]) for k in keys), plain(e["kept"]), plain(e["relative_quantized_change"])]
        for name, e in entries.items()
    ]
    return columns, rows


_DIFFERENCES = {
    "rel_mse": "rel. MSE",
    "excess_over_t": "excess / T",
    "deadzone_fraction": "in D",
    "cos_scale_grid": "cos",
    "gamma_mean": "mean 2^δ",
    "delta_mean": "mean δ",
}


def _fingerprints(page: Page, recipes: Mapping[str, Mapping[str, Any]]) -> None:
    page.section("Has the fingerprint moved?")
    page.table(
        ["recipe", "rel. MSE of A", "rel. MSE of B", *(f"Δ {name}" for name in _DIFFERENCES.values())],
        [
            [r, plain(e["a"]["rel_mse"]), plain(e["b"]["rel_mse"]), *(_delta(e["difference"][k]) for k in _DIFFERENCES)]
            for r, e in recipes.items()
        ],
        caption="B − A; the figures of `mxrl analyze A` and `mxrl analyze B`.",
    )


def _delta(value: float | None) -> str:
    return "–" if value is None else f"{value:+.3g}"


def _tensors(page: Page, own: Sequence[Row], main: str, kinds: Sequence[str]) -> None:
    known = [r for r in own if r["relative_change"] is not None]
    if not known:
        return
    page.section("The tensors that changed most")
    ranked = sorted(known, key=lambda r: (-r["relative_change"], r["name"]))
    kept = [r for r in ranked if r["kept"] is not None][:1500]
    series: dict[str, list[Dot]] = {k: [] for k in kinds}
    for row in kept:
        series[row["kind"]].append(Dot(row["name"], number(row["relative_change"]), number(row["kept"])))
    if len(kept) > 1:
        page.dots(
            f"Every tensor, `{main}`",
            series,
            x_label="‖B − A‖ / ‖A‖",
            y_label="kept",
            explain="Each dot is a tensor; hover for its name.",
        )
    page.table(
        ["tensor", "kind", "‖B−A‖ / ‖A‖", "changed", "values changed", "unseen", "kept", "cos(A, B)"],
        [
            [
                r["name"],
                r["kind"],
                plain(r["relative_change"]),
                percent(r["changed_fraction"]),
                percent(r["values_changed_fraction"]),
                percent(r["unseen"]),
                plain(r["kept"]),
                decimals(r["cos"]),
            ]
            for r in ranked[:_LISTED]
        ],
        caption=f"The first {min(_LISTED, len(ranked))} of {len(own)}; `tensors.jsonl` has them all.",
        text_columns=(1,),
    )

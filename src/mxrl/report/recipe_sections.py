"""The sections that compare recipes: the scale's precision, all side by side, the corrections, the recommendation."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from mxrl.report.answers import CORRECTIONS, PLAIN, SWEEP, measured
from mxrl.report.dots import Dot
from mxrl.report.page import Page, percent, plain
from mxrl.report.sections import Summary, stack
from mxrl.report.summary import FIGURES, RAW
from mxrl.report.svg import decimals, number


def times(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f} ×"


def _bits(value: float | None) -> str:
    return "–" if value is None else f"{value:.5g}"


def _signed(value: float | None) -> str:
    return "–" if value is None else f"{'+' if value >= 0 else '−'}{percent(abs(value))}"


def on_what(summary: Summary) -> str:
    """Which rows the extra recipes were measured on."""
    sampled = summary["sampled"]
    if sampled["every"] == 1:
        return "Measured on every element."
    return (
        f"Measured on one row in {sampled['every']} of each tensor, the first included (a row lies along the "
        f"contraction axis): {sampled['elements']:,} of {summary['elements']:,} elements."
    )


def sweep(page: Page, summary: Summary) -> None:
    found = summary.get("sweep")
    if not found:
        return
    page.section("How precise must a scale be?")
    enough = next((e for e in found if e["excess_over_floor"] is not None and 0 <= e["excess_over_floor"] < 0.05), None)
    sentence = (
        "The scale rounded up to E8Mk, k mantissa bits beside the power of two, against the floor of the ideal scale. "
    )
    if enough:
        sentence += (
            f"`{enough['scale']}` is the first within 5 % of the floor, at {_bits(enough['bits'])} bits an element. "
        )
    page.text(sentence + on_what(summary))
    page.lines(
        "T over the floor, by mantissa bits of the scale",
        [SWEEP.index(e["recipe"]) for e in found],
        {"T / floor": [number(e["t_over_floor"]) for e in found], "floor": [1.0] * len(found)},
        x_label="mantissa bits of the scale",
        y_label="T / floor",
    )
    page.table(
        ["scale", "bits / element", "T / floor", "excess / floor", "rel. MSE"],
        [
            [
                e["scale"],
                _bits(e["bits"]),
                plain(e["t_over_floor"]),
                percent(e["excess_over_floor"]),
                plain(e["rel_mse"]),
            ]
            for e in found
        ],
        caption="E8M0 is `mxfp4` itself. No format stores the others: the sweep shows what a scale's precision buys.",
    )


def compared(page: Page, summary: Summary) -> None:
    page.section("Recipes side by side")
    found = summary["compared"]
    names = sorted(found, key=lambda r: (r != PLAIN, r not in summary["recipes"], r not in summary["total"]))
    stats = {}
    for name in names:
        m = measured(summary, name)
        assert m is not None
        stats[name] = m.stats
    parts, marks = stack(list(stats.values()))
    page.bars(
        "Relative MSE of each recipe",
        names,
        parts,
        marks=marks,
        axis="T / ‖x‖²",
        explain="Grid and deadzone together are the floor, the error under the ideal scale of each block. The excess "
        "is what the recipe's own scales add to it.",
    )
    series: dict[str, list[Dot]] = defaultdict(list)
    for name in names:
        error = found[name]["rel_mse"]
        if error and found[name]["bits"]:
            series[name].append(Dot(name, found[name]["bits"], -10 * math.log10(error)))
    page.dots(
        "Bits an element against error",
        series,
        x_label="bits an element, everything included",
        y_label="‖x‖² / T, dB",
        explain="Higher is better: 3 dB are half the squared error.",
    )
    page.table(
        ["recipe", "bits / element", "codes", "scales", "mantissas", "passes", "T / T(mxfp4)", "rel. MSE", "T / floor"],
        [_priced(name, found[name]) for name in names],
        caption="Bits: passes × (codes + scales + mantissas). `+of` stores a second pass, so twice everything."
        + _starred(summary, found),
    )
    full = [n for n in names if n in summary["total"]]
    page.table(["recipe", *(c.name for c in FIGURES)], [[n, *(c.cell(stats[n]) for c in FIGURES)] for n in full])
    page.table(
        ["recipe", *(c.name for c in RAW)],
        [[n, *(c.cell(stats[n]) for c in RAW)] for n in full],
        fold="The raw terms: T = ‖scale‖² + ‖dz‖² + ‖grid‖² + twice the inner products",
    )
    page.note(
        "The `ceil` rule of plain `mxfp4` usually has a higher MSE than OCP's `floor` and than `even`. It never clips, "
        "and the orthogonality of the decomposition rests on it: where a rule can clip, ⟨scale, dz⟩ need not be zero."
    )
    page.note(
        "The floor is the limit of better scales under the max-to-6 rule, not a lower bound on error: a scale searched "
        "for the least squared error goes below it, and so does a second pass (`+of`). Deadzone and floor are those of "
        "the format itself, so NVFP4's and MXFP8's differ from MXFP4's."
    )


def _priced(name: str, entry: Mapping[str, Any]) -> list[str]:
    parts = [entry.get(key) for key in ("codes", "scales", "mantissas")]
    return [
        name + (" *" if entry["sampled"] else ""),
        _bits(entry["bits"]),
        *("–" if p is None else f"{p:g}" for p in parts),
        str(entry.get("passes", "–")),
        times(entry["relative_to_mxfp4"]),
        plain(entry["rel_mse"]),
        plain(entry["t_over_floor"]),
    ]


def _starred(summary: Summary, found: Mapping[str, Any]) -> str:
    if not any(e["sampled"] for e in found.values()):
        return ""
    every = summary["sampled"]["every"]
    return (
        f" *: not asked for with --recipe, so measured on one row in {every} of each tensor; its rel. MSE is "
        "`mxfp4`'s on everything times the ratio of the two on those rows."
    )


def corrections(page: Page, summary: Summary) -> None:
    found = summary.get("corrections")
    if not found or len(found) < 2:
        return
    page.section("What each correction does")
    page.text(
        "What is left of each component of plain MXFP4's error, on the same rows (1: untouched). Scale bias: ‖C − Q*‖²"
        ", how far the recipe C is from the quantizer with ideal scales. Deadzone: the squared error on D. Grid: the "
        "squared error outside of D, which is rounding between grid points and what the scales add to it. AQN is noise "
        "for training's rollouts and no correction of a stored weight, so it isn't here. " + on_what(summary)
    )
    names = [r for r in CORRECTIONS if r in found and r != PLAIN]
    columns = {"scale bias": "scale", "deadzone": "deadzone", "grid": "grid", "whole error": "whole"}
    page.bars(
        "Error left by each correction, relative to plain `mxfp4`",
        names,
        {label: [number(found[r][key]) for r in names] for label, key in columns.items()},
        stacked=False,
        axis="relative to mxfp4",
        form=decimals,
    )
    page.table(
        ["recipe", *columns, "mean 2^δ", "of D, made non-zero"],
        [
            [
                r,
                *(decimals(found[r][key]) for key in columns.values()),
                decimals(found[r]["gamma_mean"]),
                percent(found[r]["deadzone_nonzero"]),
            ]
            for r in CORRECTIONS
            if r in found
        ],
    )
    page.note(
        "The corrections are targeted, not exclusive: OF's second pass shrinks what is left of every component alike. "
        "For it ‖C − Q*‖² is no scale bias in the word's sense, because C goes nearer to x than Q* does."
    )


def recommendation(page: Page, summary: Summary) -> None:
    found = summary.get("recommendation")
    if not found:
        return
    page.section("Recommended recipes")
    if "withheld" in found:
        page.text(
            f"None: weights are stored as {', '.join(found['withheld'])} already. What a recipe would do to "
            "their decoded values says little of what it would do to the model's own; analyze the original."
        )
        return
    page.text(
        f"Under a budget of {found['budget']:g} bits an element, scales included, this choice leaves the least total "
        f"squared error of all {len(found['candidates'])} ^ {len(found['kinds'])} there are: {plain(found['rel_mse'])} "
        f"of ‖x‖² at {_bits(found['bits'])} bits. {_uniform(found)} It weighs all kinds by their squared error alone: "
        "what an error does to the model's output is for an evaluation to say (`--bits` sets another budget)."
    )
    page.table(
        ["kind", "recipe", "bits", "of the elements", "of the error left", "why"],
        [
            [
                kind,
                e["recipe"],
                _bits(e["bits"]),
                percent(e["share"]),
                percent(e["error_share"]),
                why(e, found["budget"]),
            ]
            for kind, e in found["kinds"].items()
        ],
        caption="Candidates: " + ", ".join(f"`{r}`" for r in found["candidates"]) + ". Left out: `ideal` and E8Mk "
        "scales, which nothing stores.",
        text_columns=(1, 5),
    )
    page.table(
        ["budget", "bits taken", "rel. MSE", "recipes"],
        [[f"{e['budget']:g}", _bits(e["bits"]), plain(e["rel_mse"]), _grouped(e["kinds"])] for e in found["ladder"]],
        caption="The least error under other budgets.",
        text_columns=(3,),
    )


def _grouped(kinds: Mapping[str, str]) -> str:
    """`nvfp4`: q, k; `mxfp8`: down."""
    by: dict[str, list[str]] = defaultdict(list)
    for kind, recipe in kinds.items():
        by[recipe].append(kind)
    if len(by) == 1:
        return f"`{next(iter(by))}` everywhere"
    return "; ".join(f"`{recipe}`: {', '.join(found)}" for recipe, found in by.items())


def _uniform(found: Mapping[str, Any]) -> str:
    one = found["uniform"]
    if one is None:
        return "No single recipe for all kinds fits the budget."
    if all(e["recipe"] == one["recipe"] for e in found["kinds"].values()):
        return f"It is one recipe for all kinds, `{one['recipe']}`."
    return f"The best single recipe for all kinds, `{one['recipe']}`, leaves {plain(one['rel_mse'])}."


def why(entry: Mapping[str, Any], budget: float) -> str:
    """Both neighbours on the kind's front: what a step down would cost, and why a step up isn't possible."""
    parts = []
    if entry["cheaper"]:
        c = entry["cheaper"]
        parts.append(f"`{c['recipe']}` would change the total error by {_signed(c['error_change'])}")
    else:
        parts.append("nothing has fewer bits")
    if entry["dearer"]:
        d = entry["dearer"]
        parts.append(
            f"`{d['recipe']}` by {_signed(d['error_change'])}, but the mean would be {_bits(d['mean_bits'])} bits, "
            f"over {budget:g}"
        )
    else:
        parts.append("nothing has less error")
    return "; ".join(parts)

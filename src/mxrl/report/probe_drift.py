"""The drift probe's part of the page: the gap over α by source, whether it is a U, and the gap's other measures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mxrl.report.page import Page, percent, plain
from mxrl.report.svg import number

Result = Mapping[str, Any]

# source -> (rollout policy, training policy, arithmetic of the two)
SOURCES = {
    "cached_bfloat16": ("W4A4, cached decoding", "W4A4, full pass", "bfloat16"),
    "cached_float32": ("W4A4, cached decoding", "W4A4, full pass", "float32"),
    "master": ("Q of the bf16 export", "Q of the float32 master", "float32, full passes"),
    "w4a16": ("activations in 16 bits", "W4A4", "float32, full passes"),
    "aqn_start": ("AQN's first noise on the weights", "without noise", "float32, full passes"),
    "aqn_end": ("AQN's last noise on the weights", "without noise", "float32, full passes"),
    "unquantized": ("W4A4", "nothing quantized", "float32, full passes"),
}
OTHERS = {
    "gap_mean_abs": ("mean |Δ logp|", plain),
    "gap_max_abs": ("max |Δ logp|", plain),
    "gap_k1": ("k1", plain),
    "gap_k3": ("k3", plain),
    "gap_chi2": ("χ²", plain),
    "gap_ess": ("ESS", percent),
    "gap_pearson": ("Pearson r", lambda value: "–" if value is None else f"{value:.5f}"),
    "gap_truncated": ("truncated", percent),
    "argmax_flipped": ("argmax flipped", percent),
}


def sections(page: Page, result: Result) -> None:
    """Add the drift probe's section. result: of mxrl.probes.drift, from JSON."""
    settings = result["settings"]
    page.section("Drift between rollout and training, against α")
    page.text(
        f"How far apart are rollout and training policy before anything is learned, and does OF's α move it? "
        f"{result['subject']['prompts']} prompts, {settings['seeds']} seeds (a seed is one completion of each), paired "
        "across treatments; intervals are over seeds. Each row of the first table is one reason for a gap, alone.",
        outcome(result),
    )
    page.table(
        ["source", "rollout", "training", "arithmetic"],
        [[f"`{source}`", *SOURCES[source]] for source in settings["sources"]],
        text_columns=(1, 2, 3),
    )
    for curve in result["curves"]:
        base, _, relative = curve["name"].partition(": ")
        if not relative.endswith("relative to the first"):
            continue
        page.lines(
            f"{base} + OF: the gap at each α, relative to α = {curve['x'][0]:g}",
            curve["x"],
            {
                name: ([*map(number, band["mean"])], [*map(number, band["low"])], [*map(number, band["high"])])
                for name, band in curve["series"].items()
            },
            x_label="α",
            y_label="gap / gap at the first α",
            zero=True,
            explain="Geometric mean over seeds of the ratio of mean |Δ logp|, with its 95 % interval. A source without "
            "any gap at some α has no point there.",
        )
    page.table(
        ["treatment", *(f"`{source}`" for source in settings["sources"])],
        [
            [f"`{treatment}`", *(_value(result, treatment, source) for source in settings["sources"])]
            for treatment in settings["treatments"]
        ],
        caption="Mean |Δ logp| in nats, with its 95 % interval over seeds. `mxfp4+of` is α = .5, α = 0 is `mxfp4`.",
    )
    if result["shapes"]:
        page.table(
            ["series", "source", "shape", "least at α", "first α / least", "last α / least"],
            [
                [
                    f"`{s['base']}` + OF",
                    f"`{s['source']}`",
                    s["verdict"],
                    f"{s['minimum']:g}",
                    *map(_ratio, s["ends_over_minimum"]),
                ]
                for s in result["shapes"]
            ],
            caption="A U takes a minimum at an inner α and both ends higher, each paired 95 % interval above 0; "
            "falling takes every step and ends that differ, lower at the last α only the latter.",
            text_columns=(1, 2),
        )
    _theory(page, result)
    for source in settings["sources"]:
        page.table(
            ["treatment", *(name for name, _ in OTHERS.values())],
            [
                [f"`{treatment}`", *(form(found[metric]) for metric, (_, form) in OTHERS.items())]
                for treatment in settings["treatments"]
                if (found := _metrics(result, treatment, source))
            ],
            fold=f"All measures of the gap: {source}",
        )


def outcome(result: Result) -> str:
    """What came out, in one or two sentences."""
    if not result["shapes"]:
        return "No three treatments differ in α alone, so there is no curve over α to judge."
    of = [s for s in result["shapes"] if s["base"] == "mxfp4"] or result["shapes"]
    us = [f"`{s['source']}` (at {s['minimum']:g})" for s in of if s["u"]]
    by: dict[str, list[str]] = {}
    for s in of:
        if not s["u"]:
            by.setdefault(s["verdict"], []).append(f"`{s['source']}`")
    found = f"A U over α is found in {', '.join(us)}." if us else "In no source is the gap shown to be a U over α."
    rest = "; ".join(f"{verdict}: {', '.join(names)}" for verdict, names in by.items())
    return found + (f" The rest: {rest}." if us and rest else f" They are {rest}." if rest else "")


def _metrics(result: Result, treatment: str, source: str) -> dict[str, float | None]:
    return {
        row["metric"]: row["value"]
        for row in result["measures"]
        if row["treatment"] == treatment and row["source"] == source
    }


def _value(result: Result, treatment: str, source: str) -> str:
    for row in result["measures"]:
        if (row["treatment"], row["source"], row["metric"]) == (treatment, source, "gap_mean_abs"):
            known = row["low"] is not None
            return plain(row["value"]) + (f" [{plain(row['low'])}, {plain(row['high'])}]" if known else "")
    return "–"


def _ratio(end: Mapping[str, Any]) -> str:
    if end["ratio"] is None:
        return "–"
    return f"{end['ratio']:.3g}" + (f" [{end['low']:.3g}, {end['high']:.3g}]" if end["low"] is not None else "")


def _theory(page: Page, result: Result) -> None:
    if not result["theory"]:
        return
    words = {True: "borne out", False: "contradicted", None: "undecided"}
    rows: Sequence[Mapping[str, Any]] = result["theory"]
    page.table(
        ["quantity", "claimed", "measured", "", "note"],
        [
            [
                f"`{row['name']}`",
                f"{row['predicted']:g}",
                _ratio({"ratio": row["measured"], "low": row["low"], "high": row["high"]}),
                words[row["within"]],
                row["note"],
            ]
            for row in rows
        ],
        caption=f"Against {rows[0]['source']}: OF alone, least at .5, both ends 1.5 to 2 times as high. It doesn't say "
        "what its gap consists of, so every source is compared; the names without a source are `cached_bfloat16`'s.",
        text_columns=(3, 4),
    )

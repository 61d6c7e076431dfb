"""The sections of an analysis's page, one a question; each from the keys of summary.json that answers.py writes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mxrl.decompose import ErrorStats
from mxrl.moments import NORMAL_PEAK
from mxrl.report.answers import PLAIN
from mxrl.report.dots import Dot
from mxrl.report.outliers import CAUSES, Row
from mxrl.report.page import Page, percent, plain
from mxrl.report.summary import excess_over_t
from mxrl.report.svg import decimals, number

Summary = Mapping[str, Any]
_DOTS = 1500  # tensors drawn: the largest errors, and of the others every n-th


def stack(stats: Sequence[ErrorStats]) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Grid, deadzone and excess relative to ‖x‖², to be stacked, and the floor as a mark.

    ‖e_scale‖² exceeds T, because its cross term with the grid is negative: it is never drawn as a part. Where T lies
    below the floor there is no excess to add: the bar is then T, whole, beside its mark.
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


# ---- the fingerprint -------------------------------------------------------------------------------------------------

_Form = Callable[[float | None], str]
PRINT: tuple[tuple[str, str, _Form], ...] = (
    ("rel. MSE", "rel_mse", plain),
    ("T / floor", "t_over_floor", plain),
    ("excess / T", "excess", percent),
    ("cos (scale, grid)", "cos", decimals),
    ("in D", "deadzone_fraction", percent),
    ("mean δ", "delta_mean", decimals),
    ("sd of δ", "delta_sd", decimals),
)
TERMS: tuple[tuple[str, str, _Form], ...] = (
    ("‖scale‖² / T", "scale", plain),
    ("‖dz‖² / T", "deadzone", plain),
    ("‖grid‖² / T", "grid", plain),
    ("2⟨scale, grid⟩ / T", "scale_grid", plain),
    ("2⟨scale, dz⟩ / T", "scale_deadzone", plain),
)


def _prints(
    first: str, entries: Mapping[str, Mapping[str, Any]], figures: Sequence[tuple[str, str, _Form]]
) -> tuple[list[str], list[list[str]]]:
    columns = [first, "tensors", "elements", *(name for name, _, _ in figures)]
    rows = [
        [label, str(e["tensors"]), f"{e['elements']:,}", *(form(e[key]) for _, key, form in figures)]
        for label, e in entries.items()
    ]
    return columns, rows


def fingerprint(page: Page, summary: Summary, own: Sequence[Row]) -> None:
    found, main = summary["fingerprint"], summary["fingerprint"]["recipe"]
    page.section("The fingerprint")
    page.text(
        f"The error of `{main}` in figures that don't depend on a tensor's size. T is the whole squared error, the "
        "floor what ideal scales would leave, D the deadzone. δ = log₂(scale / ideal scale) of a block. The terms add "
        "up: T = ‖scale‖² + ‖dz‖² + ‖grid‖² + twice the inner products."
    )
    stats = {k: ErrorStats.from_dict(v["recipes"][main]) for k, v in summary["kinds"].items()}
    parts, marks = stack([*stats.values(), ErrorStats.from_dict(summary["total"][main])])
    page.bars(f"Relative MSE by kind of layer, `{main}`", [*stats, "all"], parts, marks=marks, axis="T / ‖x‖²")
    entries, last = found["kinds"] | {"all": found["total"]}, [len(found["kinds"])]
    page.table(*_prints("kind", entries, PRINT), strong=last)
    page.table(*_prints("kind", entries, TERMS), strong=last, caption="The terms of the error, over T.")
    _depth(page, summary, own, main)
    _each(page, own, main, list(summary["kinds"]))


def _depth(page: Page, summary: Summary, own: Sequence[Row], main: str) -> None:
    layers = summary["fingerprint"]["layers"]
    if len(layers) < 2:
        return
    at = [int(i) for i in layers]
    cells: dict[tuple[str, int], ErrorStats] = defaultdict(ErrorStats.zero)
    for row in own:
        if row["layer"] is not None:
            cells[row["kind"], row["layer"]] += ErrorStats.from_dict(row)
    kinds = [k for k in summary["kinds"] if any(kind == k for kind, _ in cells)]
    page.lines(
        f"Relative MSE by depth and kind of layer, `{main}`",
        at,
        {k: [cells[k, i].rel_mse if (k, i) in cells else math.nan for i in at] for k in kinds},
        x_label="layer",
        y_label="T / ‖x‖²",
    )
    page.lines(
        f"What the error consists of, by depth, `{main}`",
        at,
        {
            name: [number(layers[str(i)][key]) for i in at]
            for name, key in (("grid / T", "grid"), ("excess / T", "excess"), ("deadzone / T", "deadzone"))
        },
        x_label="layer",
        form=percent,
        zero=True,
        explain="The three add up to 100 %.",
    )
    page.table(*_prints("layer", layers, PRINT), fold="The fingerprint of each layer")
    page.table(*_prints("layer", layers, TERMS), fold="The terms of each layer's error, over T")


def thinned(own: Sequence[Row]) -> list[Row]:
    """At most _DOTS rows: half of them the largest errors, the others every n-th of the rest."""
    if len(own) <= _DOTS:
        return list(own)
    ranked = sorted(own, key=lambda r: -(r["rel_mse"] or 0.0))
    head, rest = ranked[: _DOTS // 2], ranked[_DOTS // 2 :]
    return head + rest[:: math.ceil(len(rest) / (_DOTS - len(head)))]


def _each(page: Page, own: Sequence[Row], main: str, kinds: Sequence[str]) -> None:
    shown = thinned([r for r in own if r["rel_mse"] is not None])
    if len(shown) < 2:
        return
    peaks = all(r.get("block_peak") is not None for r in shown)
    key, label = ("block_peak", "mean block maximum / RMS") if peaks else ("deadzone_fraction", "share in the deadzone")
    series: dict[str, list[Dot]] = {k: [] for k in kinds}
    for row in shown:
        series[row["kind"]].append(Dot(row["name"], number(row[key]), number(row["rel_mse"])))
    explain = "Each dot is a tensor; hover for its name. "
    if peaks:
        explain += f"For normal values the mean block maximum is {NORMAL_PEAK:.2f} RMS. "
    if len(shown) < len(own):
        explain += f"{len(shown):,} of {len(own):,} tensors: the largest errors, and every n-th of the others."
    page.dots(f"Every tensor, `{main}`", series, x_label=label, y_label="T / ‖x‖²", explain=explain.strip())


# ---- is δ uniform ----------------------------------------------------------------------------------------------------


def delta(page: Page, summary: Summary) -> None:
    found = summary.get("delta")
    if not found or not found["blocks"]:
        return
    page.section("Is δ uniform?")
    page.text(_delta_sentence(found))
    if "tensors" in found:
        t = found["tensors"]
        page.text(
            f"A single tensor departs more: over {t['count']} tensors the KS distance has median "
            f"{plain(t['median_ks'])}; it is largest in `{t['largest']}`, {plain(t['largest_ks'])}. A tensor's block "
            "maxima lie within a factor of two or so, so that their logarithms don't fill all phases alike; over many "
            "tensors of different scale the phases even out."
        )
    s = ErrorStats.from_dict(summary["total"][PLAIN])
    bins = len(s.delta_hist)
    edges = [-1 + 2 * i / bins for i in range(bins + 1)]
    first = min(bins // 2, *(i for i, n in enumerate(s.delta_hist) if n))
    page.histogram(
        f"δ of {s.delta_count:,} blocks, `{PLAIN}`",
        edges[first:],
        [n / s.delta_count for n in s.delta_hist[first:]],
        reference={"uniform on [0, 1)": [2 / bins if e >= -1e-9 else 0.0 for e in edges[first:-1]]},
        x_label="δ",
    )
    total = {r: ErrorStats.from_dict(e) for r, e in summary["total"].items()}
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
            if s.delta_count
        ],
        caption="mean 2^δ says how much larger than ideal the scales are. It is no gain of the tensor: that is "
        "⟨Q(x),x⟩/‖x‖². Uniform δ would have mean .5, variance .0833, mean 2^δ 1.443. All-zero blocks and clamped "
        "exponents are counted apart.",
    )


def _delta_sentence(found: Mapping[str, Any]) -> str:
    tv = found["tv"]
    verdict = "Yes, nearly" if tv < 0.02 else "Roughly" if tv < 0.1 else "No"
    return (
        f"{verdict}: {percent(tv)} of the blocks would have to move to make the histogram uniform on [0, 1) (total "
        f"variation {plain(tv)}; Kolmogorov–Smirnov distance {plain(found['ks'])}). As many independent uniform "
        f"draws would show {plain(found['tv_by_chance'])}, and a KS distance above {plain(found['ks_by_chance'])} in "
        f"one case of twenty. Mean {decimals(found['mean'])} and standard deviation {decimals(found['sd'])}; uniform: "
        "0.500 and 0.289. A power of two rounded up from the ideal scale gives δ in [0, 1)."
    )


# ---- the worst tensors --------------------------------------------------------------------------------------------

_FORMS: dict[str, Callable[[float | None], str]] = {"deadzone_fraction": percent, "excess": percent}
_NAMES = {
    "block_peak": "block maximum / RMS",
    "kurtosis": "kurtosis",
    "outlier_ratio": "largest |x| / RMS",
    "deadzone_fraction": "in D",
    "excess": "excess / T",
}


def worst(page: Page, summary: Summary, own: Sequence[Row]) -> None:
    found = summary["worst"]
    if not found["tensors"]:
        return
    page.section("The worst tensors, and why")
    known = [c for c in CAUSES if c in found["medians"]]
    strong = {c: v for c, v in found["rank_correlation"].items() if v is not None}
    if len(own) >= 8 and strong:
        best = max(strong, key=lambda c: abs(strong[c]))
        page.text(
            f"Over the {len(own)} tensors the relative MSE follows {_called(best)} most closely: rank correlation "
            f"{strong[best]:.2f}. The others: "
            + ", ".join(f"{_called(c)} {v:.2f}" for c, v in strong.items() if c != best)
            + "."
        )
    rows = [
        [t["name"], _kind(t), plain(t["rel_mse"]), *(_FORMS.get(c, plain)(t[c]) for c in known), _because(t)]
        for t in found["tensors"]
    ]
    median = ["median of all", "", plain(found["median_rel_mse"])]
    median += [*(_FORMS.get(c, plain)(found["medians"][c]) for c in known), ""]
    page.table(
        ["tensor", "kind", "rel. MSE", *(_NAMES[c] for c in known), "what sets it apart"],
        [*rows, median],
        caption=f"By relative MSE under `{summary['recipes'][0]}`, the first {len(rows)} of {len(own)}; "
        "`tensors.jsonl` has them all. What sets a tensor apart: figures more than two deviations above the median (a "
        "deviation: 1.4826 times the median absolute one), the farthest first."
        + (f" Normal values: kurtosis 3, block maximum {NORMAL_PEAK:.2f} RMS." if "kurtosis" in known else ""),
        text_columns=(1, 3 + len(known)),
        strong=[len(rows)],
    )


def _kind(tensor: Mapping[str, Any]) -> str:
    return tensor["kind"] + (f", already {tensor['stored_as']}" if "stored_as" in tensor else "")


def _called(cause: str) -> str:
    return f"the {_NAMES[cause]}" if cause in ("block_peak", "outlier_ratio") else _SHORT[cause]


_SHORT = {"kurtosis": "the kurtosis", "deadzone_fraction": "the deadzone's share", "excess": "the excess"}


def _because(tensor: Mapping[str, Any]) -> str:
    if not tensor["because"]:
        return "nothing stands out"
    return ", ".join(CAUSES[c] for c in tensor["because"])

"""The section of the effective temperature: fitted against predicted, entropy, and where the formula's terms fail."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mxrl.report.dots import Dot
from mxrl.report.page import Page, percent, plain
from mxrl.report.svg import Format, cell, decimals, number

Result = Mapping[str, Any]
Measures = Mapping[tuple[str, str], Mapping[str, Any]]  # by (treatment, metric)

_LADDER = (  # metric, column: from the formula's own terms to what RL samples from, then the real ensemble
    ("t_gaussian", "Gaussian"),
    ("t_shuffled", "η shuffled"),
    ("t_signs", "±η"),
    ("t_eff", "as it is"),
    ("t_aqn", "AQN mean"),
)
_PREDICTED = (
    ("predicted_all", "all pairs"),
    ("predicted_weighted", "weighted"),
    ("predicted_weighted_both", "both weighted"),
    ("predicted_small_noise", "2nd order"),
    ("predicted_slope", "slope"),
)
_NOISE = (
    ("sigma_eta", "σ_η"),
    ("sigma_eta_weighted", "σ_η weighted"),
    ("sigma_between", "σ between AQN draws"),
    ("kurtosis", "kurtosis"),
    ("kurtosis_pooled", "kurtosis, pooled"),
    ("slope", "slope"),
    ("slope_weighted", "slope, weighted"),
    ("concentration", "top 1 % of contexts"),
)
_ENTROPIES = (
    ("entropy_change", "as it is"),
    ("entropy_change_aqn_draw", "one AQN draw"),
    ("entropy_change_aqn", "AQN mean"),
    ("entropy_change_signs", "±η, mean"),
    ("entropy_change_gaussian_draw", "one Gaussian draw"),
    ("entropy_change_gaussian", "Gaussian mean"),
)


def sections(page: Page, result: Result) -> None:
    """Add the temperature probe's section to a page. result: what `probes.temperature.temperature` returned."""
    found = {(row["treatment"], row["metric"]): row for row in result["measures"]}
    names = list(result["settings"]["treatments"])
    page.section("Effective temperature")
    page.text(_asked(result, found), _answer(result, found, names))
    page.bars(
        "Fitted temperature above 1",
        names,
        {label: [number(_value(found, n, m)) - 1 for n in names] for m, label in _fitted(found, names)},
        stacked=False,
        intervals={label: [_interval(found, n, m, 1) for n in names] for m, label in _fitted(found, names)},
        axis="T − 1",
        form=decimals,
        explain="As it is: the policy that RL samples from. Gaussian: independent noise of the measured σ_η, the "
        "formula's own assumption. AQN mean: the mean policy over draws of AQN's weight noise.",
    )
    page.dots(
        "Predicted and fitted temperature",
        {
            label: [Dot(n, number(_value(found, n, m)), number(_value(found, n, "t_eff"))) for n in names]
            for m, label in _PREDICTED
        },
        x_label="predicted T",
        y_label="fitted T",
        explain="All pairs and weighted are the paper's formula, with the variance of logit differences over all pairs "
        "of tokens or over pairs drawn from the policy; the others are ours. Mind the two scales: a good prediction "
        "has x = y.",
    )
    page.table(
        *_table(found, names, _LADDER, decimals),
        caption="Fitted T. From Gaussian to as it is the noise loses what the formula assumes: independent draws of "
        "one σ; the measured η, rolled along the vocabulary; η in its place, with both signs; η itself.",
    )
    page.table(*_table(found, names, _PREDICTED, decimals, intervals=False), caption="Predicted T.")
    page.bars(
        "Change of the policy's entropy, same contexts",
        names,
        {"as it is": [number(_value(found, n, "entropy_change")) for n in names]},
        stacked=False,
        intervals={"as it is": [_interval(found, n, "entropy_change") for n in names]},
        axis="nats, against the unquantized policy",
    )
    page.table(*_table(found, names, _ENTROPIES, plain), caption="Change of the mean entropy, nats.")
    page.text(
        "One draw of the noise can lower the entropy; the entropy of the mean policy is never below the mean of the "
        "draws' (Jensen). A deterministic quantizer is one draw."
    )
    page.table(
        *_table(found, names, _NOISE, plain), caption="The noise on the logits. The formula takes one σ for all."
    )
    _shape(page, result, names)
    page.table(
        ["prediction", "treatment", "predicted", "fitted", "within", "source", "what it says"],
        [
            [
                row["name"],
                row["treatment"] or "–",
                decimals(row["predicted"]),
                cell(number(row["measured"]), (number(row["low"]), number(row["high"])), decimals),
                {True: "yes", False: "no", None: "–"}[row["within"]],
                row["source"],
                row["note"],
            ]
            for row in result["theory"]
        ],
        text_columns=(1, 4, 5, 6),
        fold="Every prediction against its fit",
    )
    for note in result["notes"]:
        page.note(note)


def _asked(result: Result, found: Measures) -> str:
    settings, subject = result["settings"], result["subject"]
    return (
        "Does the noise that 4-bit arithmetic puts on the logits act as a higher sampling temperature, and as high as "
        f"predicted? Asked on {settings['contexts']} contexts, positions of the unquantized policy's own answers to "
        f"{subject['prompts']} prompts (mean entropy {plain(_value(found, 'bf16', 'entropy'))} nats)."
    )


def _answer(result: Result, found: Measures, names: Sequence[str]) -> str:
    fits = [(n, found[n, "t_eff"]) for n in names if found[n, "t_eff"]["value"] is not None]
    if not fits:
        return "No temperature between 1/64 and 64 fits any treatment."
    hottest, row = max(fits, key=lambda fit: fit[1]["value"])
    away = sum(r["low"] is not None and not r["low"] <= 1 <= r["high"] for _, r in fits)
    held = {
        name: [r["within"] for r in result["theory"] if r["name"] == name and r["within"] is not None]
        for name in ("t_eff", "fitted T, weighted formula")
    }
    counts = " and ".join(
        f"{sum(found)} of {len(found)} {what}"
        for found, what in zip(held.values(), ("over all pairs", "weighted by probability"), strict=True)
    )
    exact = next(r for r in result["theory"] if r["treatment"] is None)
    return (
        f"Fitted T is largest under `{hottest}`: {_with_interval(row)}. It differs from 1 by more than its interval "
        f"for {away} of {len(fits)} treatments. The formula lies within the fit's interval for {counts}. Where the "
        f"answer is known, two classes, it gives {decimals(exact['predicted'])} for {decimals(exact['measured'])}."
    )


def _shape(page: Page, result: Result, names: Sequence[str]) -> None:
    curve = next((c for c in result["curves"] if c["name"] == "shape of η"), None)
    if curve is None or not sum(curve["series"][names[0]]):
        return
    half = (curve["x"][1] - curve["x"][0]) / 2
    page.histogram(
        f"η over its own context's σ, `{names[0]}`",
        [curve["x"][0] - half, *(x + half for x in curve["x"])],
        curve["series"][names[0]],
        reference={"normal": curve["series"]["normal"]},
        x_label="η / σ",
        form=percent,
        explain="The outermost bins hold all beyond.",
    )


def _fitted(found: Measures, names: Sequence[str]) -> list[tuple[str, str]]:
    shown = [(m, label) for m, label in _LADDER if m in ("t_eff", "t_gaussian", "t_aqn")]
    return [(m, label) for m, label in shown if all((n, m) in found for n in names)]


def _table(
    found: Measures, names: Sequence[str], metrics: Sequence[tuple[str, str]], form: Format, *, intervals: bool = True
) -> tuple[list[str], list[list[str]]]:
    """(columns, rows) of a table with a row a treatment; metrics that nobody has are left out."""
    known = [(m, label) for m, label in metrics if all((n, m) in found for n in names)]
    rows = [
        [n, *(cell(number(_value(found, n, m)), _interval(found, n, m) if intervals else None, form) for m, _ in known)]
        for n in names
    ]
    return ["treatment", *(label for _, label in known)], rows


def _value(found: Measures, treatment: str, metric: str) -> float | None:
    return found[treatment, metric]["value"]


def _interval(found: Measures, treatment: str, metric: str, less: float = 0.0) -> tuple[float, float]:
    row = found[treatment, metric]
    return number(row["low"]) - less, number(row["high"]) - less


def _with_interval(row: Mapping[str, Any]) -> str:
    return cell(number(row["value"]), (number(row["low"]), number(row["high"])), decimals)

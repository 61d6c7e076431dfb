"""What the temperature probe reports of its columns: measures with intervals, predictions against fits, notes.

Metrics of a treatment:

    sigma_eta, sigma_eta_weighted     σ of η over the vocabulary, and weighted by the policy's probability
    sigma_between                     of η between AQN's draws
    kurtosis, kurtosis_pooled         excess; of η at each context (mean), and of all contexts thrown together: "one σ"
                                      assumes that this is 0, too
    slope, slope_weighted             of η on ℓ
    concentration                     the most moved 1 % of contexts' share of Σ_t |E_p̄ ℓ − E_p ℓ|, what T is fitted to
    predicted_all, _weighted, …       the formulas of temperature_theory.py
    t_eff; t_gaussian, t_shuffled, t_signs, t_aqn       fitted: to the policy as it is; to mean policies
    entropy_change                    of the policy as it is against the unquantized, nats, mean over contexts
    entropy_change_KIND, _KIND_draw   of a mean policy, and the mean of its single draws
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mxrl.probes.intervals import Mean, comparison, finite, jackknife, measure
from mxrl.probes.temperature_theory import EDGES, Baseline, pieces, two_classes
from mxrl.probes.treatments import BASELINE

PAPER = "arXiv 2605.20402"
Columns = dict[str, Tensor]
ByPrompt = Callable[[Columns], Tensor]  # columns [N] -> their sums over each prompt's contexts [prompts, columns]
Figure = Callable[[Columns], Tensor]  # of sums over prompts, by their name

FIGURES: dict[str, tuple[str, Figure]] = {
    "sigma_eta": ("logits", lambda c: (c["square"] / c["count"]).sqrt()),
    "sigma_eta_weighted": ("logits", lambda c: (c["weighted"] / c["count"]).sqrt()),
    "kurtosis": ("", lambda c: c["kurtosis"] / c["count"]),
    "kurtosis_pooled": ("", lambda c: c["fourth"] * c["count"] / c["second"].square() - 3),
    "slope": ("", lambda c: c["cov"] / c["variance"]),
    "slope_weighted": ("", lambda c: c["cov_weighted"] / c["variance_p"]),
    "predicted_all": ("T", lambda c: (1 + c["square"] / c["variance"]).sqrt()),
    "predicted_weighted": ("T", lambda c: (1 + c["square"] / c["variance_p"]).sqrt()),
    "predicted_weighted_both": ("T", lambda c: (1 + c["weighted"] / c["variance_p"]).sqrt()),
    "predicted_small_noise": ("T", lambda c: 1 + c["square"] / c["count"] * c["peaked"] / c["variance_p"]),
    "predicted_slope": ("T", lambda c: 1 / (1 + c["cov_weighted"] / c["variance_p"])),
}


def _fitted(kind: str, beta: float) -> Figure:
    """T; left out prompts move 1/T by one Newton step."""
    return lambda c: 1 / (beta + c[f"gradient {kind}"] / c[f"curvature {kind}"])


def _entropy_change(column: str) -> Figure:
    return lambda c: (c[column] - c["entropy"]) / c["count"]


def treatment_rows(
    treatment: str, columns: Columns, fits: dict[str, float | None], by_prompt: ByPrompt
) -> list[dict[str, Any]]:
    """Every metric of one treatment. columns: [N]; fits: 1/T of each fitted policy, "" for the policy as it is."""
    figures = dict(FIGURES)
    if "between" in columns:
        figures["sigma_between"] = ("logits", lambda c: (c["between"] / c["count"]).sqrt())
    for kind, beta in fits.items():
        name = f"_{kind}" if kind else ""
        figures[f"t{name}" if kind else "t_eff"] = ("T", _fitted(kind, math.nan if beta is None else beta))
        figures[f"entropy_change{name}"] = ("nats", _entropy_change(f"mean {kind}"))
        if kind:
            figures[f"entropy_change{name}_draw"] = ("nats", _entropy_change(f"draw {kind}"))
    sums, n = by_prompt(columns), list(columns)
    rows = [_row(treatment, name, unit, sums, n, figure) for name, (unit, figure) in figures.items()]
    moved = columns["moved"].sort(descending=True).values
    share = float(moved[: math.ceil(len(moved) / 100)].sum() / moved.sum())
    none = {"low": None, "high": None, "n": len(moved), "unit": ""}
    return [*rows, {"treatment": treatment, "metric": "concentration", "value": finite(share), **none}]


def _row(treatment: str, metric: str, unit: str, sums: Tensor, names: list[str], figure: Figure) -> dict[str, Any]:
    """One measure with its interval, and what each prompt says (jackknife), for paired comparisons."""
    found, values = jackknife(sums, lambda s: figure({name: s[..., i] for i, name in enumerate(names)}))
    return measure(treatment, metric, found, unit, values if metric in ("t_eff", "entropy_change") else None)


def baseline_rows(base: Baseline, by_prompt: ByPrompt) -> list[dict[str, Any]]:
    """Entropy and spread of the unquantized logits."""
    columns = {
        "count": torch.ones_like(base.entropy),
        "variance": base.variance,
        "variance_p": base.weighted,
        "entropy": base.entropy,
    }
    figures: dict[str, tuple[str, Figure]] = {
        "entropy": ("nats", lambda c: c["entropy"] / c["count"]),
        "logit_sd": ("logits", lambda c: (c["variance"] / c["count"]).sqrt()),
        "logit_sd_weighted": ("logits", lambda c: (c["variance_p"] / c["count"]).sqrt()),
    }
    sums = by_prompt(columns)
    return [_row(BASELINE, name, unit, sums, list(columns), figure) for name, (unit, figure) in figures.items()]


_COMPARED = (  # name, predicted, measured, source, what it says
    ("t_eff", "predicted_all", "t_eff", PAPER, "the formula over all pairs of tokens, against the quantized policy"),
    ("fitted T, weighted formula", "predicted_weighted", "t_eff", PAPER, "pairs weighted by probability"),
    ("fitted T, both weighted", "predicted_weighted_both", "t_eff", "ours", "Var of Δη, too, weighted by probability"),
    ("fitted T, slope of η", "predicted_slope", "t_eff", "ours", "shrinking or growing logits alone, no noise"),
    ("Gaussian T", "predicted_all", "t_gaussian", PAPER, "the formula under its own assumption, all pairs"),
    ("Gaussian T, weighted formula", "predicted_weighted", "t_gaussian", PAPER, "the same, weighted by probability"),
    ("Gaussian T, second order", "predicted_small_noise", "t_gaussian", "ours", "exact for small independent noise"),
)


def predictions(treatment: str, rows: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Each prediction against what was fitted; nothing for a treatment without noise."""
    if not rows["sigma_eta"]["value"]:
        return []
    return [
        comparison(name, treatment, rows[prediction]["value"], _mean_of(rows[measured]), source, note)
        for name, prediction, measured, source, note in _COMPARED
    ]


def _mean_of(row: dict[str, Any]) -> Mean:
    value, low, high = (math.nan if row[name] is None else row[name] for name in ("value", "low", "high"))
    return Mean(value, low, high, row["n"])


def two_classes_row() -> dict[str, Any]:
    """The formula against its known answer, whatever the model."""
    prediction, fitted = two_classes()
    return comparison(
        "two classes", None, prediction, Mean(fitted, math.nan, math.nan, 1), PAPER,
        "two logits of standard deviation 2 with noise 1 on each, by quadrature: no model, the formula alone",
    )  # fmt: skip


def shape_curve(shapes: dict[str, list[float]]) -> dict[str, Any]:
    """Shares of η/σ in each bin, the normal's beside them; the outermost bins hold all beyond."""
    below = [0.5 * math.erfc(-edge / math.sqrt(2)) for edge in EDGES]
    below[0], below[-1] = 0.0, 1.0
    normal = [high - low for low, high in itertools.pairwise(below)]
    middle = [(low + high) / 2 for low, high in itertools.pairwise(EDGES)]
    return {"name": "shape of η", "x": middle, "series": {"normal": normal, **shapes}}


# --- notes ------------------------------------------------------------------------------------------------------------


def rounding(logits: Tensor) -> float:
    """Root mean square of the difference that rounding to the logits' dtype makes between two passes."""
    total = 0.0
    for rows in pieces(logits):
        spacing = torch.exp2(torch.frexp(logits[rows].float()).exponent.double()) * torch.finfo(logits.dtype).eps / 2
        total += float(spacing.square().sum())
    return math.sqrt(total / logits.numel() / 6)


def notes(logits: Tensor, measures: list[dict[str, Any]]) -> list[str]:
    """What a reader must know. logits: of the unquantized policy, in the model's dtype."""

    def of(metric: str) -> dict[str, dict[str, Any]]:
        return {row["treatment"]: row for row in measures if row["metric"] == metric}

    def away(metric: str, least: float, from_: float = 0.0) -> list[str]:
        """Treatments whose interval excludes `from_` and whose value is at least `least` off, with their value."""
        rows = of(metric).items()
        known = [(t, r) for t, r in rows if r["low"] is not None and of("sigma_eta")[t]["value"]]
        return [
            f"{t} {r['value']:+.3g}"
            for t, r in known
            if not r["low"] <= from_ <= r["high"] and abs(r["value"] - from_) >= least
        ]

    said = [
        "η is the difference of the logits less its mean over the vocabulary at each position: softmax does not see a "
        "constant, so a constant is no noise.",
        "A deterministic quantizer has one η at each context. t_eff is fitted to that one over all contexts; since a "
        "policy enters the fit by its mean logit, linearly, contexts average as draws do. The ensembles beside it are "
        "made from η (gaussian, shuffled, signs), or from AQN's weight noise (aqn).",
    ]
    tails, pooled, slopes = away("kurtosis", 0.5), away("kurtosis_pooled", 0.5), away("slope_weighted", 0.01)
    if tails:
        said.append(f"η is not Gaussian within a context: excess kurtosis {', '.join(tails)}.")
    if pooled:
        said.append(f"One σ for all contexts does not hold: excess kurtosis over all contexts {', '.join(pooled)}.")
    if slopes:
        said.append(
            "η is not independent of ℓ: its slope on ℓ, weighted by probability, excludes 0. The logits shrink (−) or "
            f"grow (+), which is a temperature by itself: {', '.join(slopes)}."
        )
    few = [f"{t} {r['value']:.0%}" for t, r in of("concentration").items() if (r["value"] or 0) > 0.2]
    if few:
        said.append(
            "A few contexts decide T, those where the treated policy prefers a token that the unquantized one all but "
            f"rules out. Share of the most moved 1 % in what T is fitted to: {', '.join(few)}."
        )
    lost = [t for name in ("t_eff", "t_gaussian", "t_aqn") for t, row in of(name).items() if row["value"] is None]
    if lost:
        said.append(f"No temperature between 1/64 and 64 fits: {', '.join(dict.fromkeys(lost))}.")
    if logits.dtype != torch.float32:
        said.append(
            f"The logits are {logits.dtype} numbers: rounding alone makes two of them differ by "
            f"{rounding(logits):.3g}, which is part of every σ_η here."
        )
    return said

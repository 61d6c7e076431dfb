"""The gradient probe's sections: components and passes, depth, kinds of weights, the summed δ, theory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mxrl.ops.inject import COMPONENTS
from mxrl.probes.intervals import Mean, paired
from mxrl.probes.treatments import Treatment
from mxrl.report.page import Page, percent, plain
from mxrl.report.svg import number

Result = dict[str, Any]
METRICS = {  # of the table: metric -> column
    "grad_cosine": "1 − cos",
    "grad_log2_ratio": "|log2 ‖g_q‖/‖g‖|, blocks",
    "grad_norm_log2": "log2 ‖g_q‖/‖g‖, all",
    "dx_at_output": "dL/dh_L, log2",
    "dx_growth": "added on the way back",
    "dx_step": "rms a block",
    "stream_log2_ratio": "‖h_L‖, log2",
    "stream_error": "‖h_q − h‖/‖h‖",
}
_DEPTH = {  # curve -> caption, axis, explanation
    "grad_log2_ratio": ("Norm of each decoder block's gradient", "log2 ‖g_q‖ / ‖g‖", "All parameters of a block."),
    "grad_cosine": ("Direction of each decoder block's gradient", "1 − cos", "0: the same direction; 1: orthogonal."),
    "dx_log2_ratio": (
        "Gradient of the residual stream, by depth",
        "log2 ‖dL/dh_q‖ / ‖dL/dh‖",
        "Read from right to left: what enters from the loss, and what the blocks add on its way back to depth 0.",
    ),
    "stream_log2_ratio": (
        "Norm of the residual stream, by depth",
        "log2 ‖h_q‖ / ‖h‖",
        "Mean over tokens. Near 0 at every depth where normalisation keeps the scale error from adding up.",
    ),
}


def sections(page: Page, result: Result) -> None:
    """Add what the gradient probe found to the page."""
    page.section("Gradients")
    page.text(*_answer(result))
    _passes(page, result)
    _by_depth(page, result)
    _by_kind(page, result)
    _summed_delta(page, result)
    _theory(page, result)
    page.note(" ".join(result["notes"]))


def _measures(result: Result, metric: str) -> dict[str, Result]:
    return {m["treatment"]: m for m in result["measures"] if m["metric"] == metric}


def _whole(result: Result) -> str | None:
    """The plain recipe that the components are taken of: the first treatment without a mark."""
    names = _measures(result, "grad_cosine")
    return next((n for n in names if "@" not in n and n != "bf16"), None)


def _stated(row: Result | Mean) -> str:
    """A value with its interval: 0.364 [0.214, 0.514]."""
    value, low, high = row[:3] if isinstance(row, tuple) else (row["value"], row["low"], row["high"])
    interval = "" if low is None or math.isnan(low) else f" [{plain(low)}, {plain(high)}]"
    return f"{plain(value)}{interval}"


def _difference(result: Result, a: str, b: str) -> Mean | None:
    """1 − cos under `a` less that under `b`, paired by group; None where either wasn't run or has no value."""
    rows = _measures(result, "grad_cosine")
    if a not in rows or b not in rows:
        return None
    pairs = [(x, y) for x, y in zip(rows[a]["values"], rows[b]["values"], strict=True) if None not in (x, y)]
    return paired([x for x, _ in pairs], [y for _, y in pairs]) if pairs else None


def _answer(result: Result) -> list[str]:
    cosine, settings = _measures(result, "grad_cosine"), result["settings"]
    asked = (
        f"How far is the gradient of a quantized model from the unquantized one's, on the same {settings['tokens']:,} "
        f"tokens of the policy's own completions (loss {settings['loss']}, {settings['groups']} groups of prompts)? "
    )
    whole = _whole(result)
    if whole is None:
        return [asked]
    asked += f"Under `{whole}` 1 − cos is {_stated(cosine[whole])}"
    one_pass = {name: cosine.get(f"{whole}@{name}") for name in ("forward", "backward")}
    if one_pass["forward"] and one_pass["backward"]:
        asked += (
            f"; with the forward pass alone quantized and the gradient sent through the master weights "
            f"{_stated(one_pass['forward'])}, with the backward pass alone {_stated(one_pass['backward'])}"
        )
    entered, added = (_measures(result, m)[whole] for m in ("dx_at_output", "dx_growth"))
    asked += (
        f". The stream's gradient enters the last block with a log2 ratio of {_stated(entered)}, and the blocks add "
        f"{_stated(added)} on its way back."
    )
    return [asked, *_components(result, whole)]


def _components(result: Result, whole: str) -> list[str]:
    cosine = _measures(result, "grad_cosine")
    alone = {c: cosine[f"{whole}@{c}"] for c in COMPONENTS if f"{whole}@{c}" in cosine}
    if len(alone) < 2:
        return []
    order = sorted(alone, key=lambda c: -number(alone[c]["value"]))
    text = "Alone, " + ", ".join(f"`{c}` gives {_stated(alone[c])}" for c in order) + ". "
    for c in order:
        control = _difference(result, f"{whole}@{c}", f"{whole}@~{c}")
        if control is not None:
            text += f"Less noise of its energy, `{c}`: {_stated(control)}{_verdict(control)}. "
    for c in order:
        company = _difference(result, whole, f"{whole}@-{c}")
        if company is not None:
            text += f"Leaving `{c}` out of the whole error takes away {_stated(company)}{_verdict(company)}. "
    gap = _difference(result, f"{whole}@scale", f"{whole}@deadzone")
    if gap is not None:
        held = (
            "more than"
            if gap.excludes(0) and gap.value > 0
            else "less than"
            if gap.excludes(0)
            else "not clearly unlike"
        )
        text += (
            f"The paper's pathway has the scale error reach gradients and the deadzone not: alone, the scale error "
            f"turns the gradient {held} the deadzone does (difference of 1 − cos {_stated(gap)})"
        )
        text += f"; the deadzone's effect is {percent(_ratio(alone['deadzone'], alone['scale']))} of the scale's."
    return [text.strip()]


def _ratio(a: Result, b: Result) -> float | None:
    return None if not b["value"] or a["value"] is None else a["value"] / b["value"]


def _verdict(found: Mean) -> str:
    return "" if found.excludes(0) else " (undecided)"


def _passes(page: Page, result: Result) -> None:
    cosine = _measures(result, "grad_cosine")
    names = [n for n in cosine if Treatment.parse(n).passes == "both"]
    page.bars(
        "How far quantization turns the gradient",
        names,
        {"1 − cos": [number(cosine[n]["value"]) for n in names]},
        stacked=False,
        intervals={"1 − cos": [_bounds(cosine[n]) for n in names]},
        axis="1 − cos of the two gradients, all parameters",
        explain="`@scale`: that component alone; `@-scale`: all but it; `@~scale`: noise with its energy.",
    )
    split = [n for n in names if f"{n}@forward" in cosine and f"{n}@backward" in cosine]
    if split:
        lanes = {"both passes": "", "forward alone": "@forward", "backward alone": "@backward"}
        page.bars(
            "By the pass that is quantized",
            split,
            {lane: [number(cosine[n + mark]["value"]) for n in split] for lane, mark in lanes.items()},
            stacked=False,
            intervals={lane: [_bounds(cosine[n + mark]) for n in split] for lane, mark in lanes.items()},
            axis="1 − cos",
            explain="Forward alone sends the gradient through the master weights and unquantized activations.",
        )
    columns = {metric: _measures(result, metric) for metric in METRICS}
    page.table(
        ["treatment", *METRICS.values()],
        [[n, *(_stated(rows[n]) for rows in columns.values())] for n in cosine],
        caption="Means over groups of prompts with 95 % intervals. A group's gradient is of few completions; the more "
        "completions there are in one, the smaller the share of single tokens in these numbers.",
    )


def _bounds(row: Result) -> tuple[float, float]:
    return number(row["low"]), number(row["high"])


def _by_depth(page: Page, result: Result) -> None:
    curves = {c["name"]: c for c in result["curves"]}
    whole = _whole(result)
    wanted = [whole, *(f"{whole}@{c}" for c in COMPONENTS), f"{whole}@backward"]
    for name, (caption, axis, explain) in _DEPTH.items():
        found = curves[name]
        shown = [n for n in wanted if n in found["series"]] or list(found["series"])[:4]
        series: dict[str, Any] = {n: _band(found["series"][n]) for n in shown}
        page.lines(caption, found["x"], series, x_label="decoder block", y_label=axis, explain=explain)
    if whole is None or f"{whole}@backward" not in curves["dx_log2_ratio"]["series"]:
        return
    depth, series = curves["dx_log2_ratio"]["x"], curves["dx_log2_ratio"]["series"]
    growth: dict[str, Any] = {
        n: [number(v) - number(series[n]["mean"][-1]) for v in series[n]["mean"]] for n in (whole, f"{whole}@backward")
    }
    spread = [math.sqrt((depth[-1] - d) / 12) for d in depth]
    growth["0 ± √(blocks / 12)"] = ([0.0] * len(depth), [-s for s in spread], spread)
    page.lines(
        "What the blocks add to the stream's gradient, and one σ of the paper's pathway",
        depth,
        growth,
        x_label="decoder block",
        y_label="log2 ratio, 0 at the last block's output",
        explain="The band is the spread of a sum of independent uniform δ, one for each block passed.",
    )


def _band(series: Result) -> tuple[list[float], list[float], list[float]]:
    """(mean, low, high); where there is no interval, the mean itself."""
    middle = [number(v) for v in series["mean"]]
    low, high = ([m if v is None else v for m, v in zip(middle, series[k], strict=True)] for k in ("low", "high"))
    return middle, low, high


def _by_kind(page: Page, result: Result) -> None:
    whole = _whole(result)
    names = [n for n in (whole, *(f"{whole}@{c}" for c in COMPONENTS)) if n in _measures(result, "grad_cosine")]
    rows = [r for r in result["layers"] if r["kind"] not in ("delta", "block")]
    kinds = list(dict.fromkeys(r["kind"] for r in rows))
    if not names:
        return
    page.bars(
        "By kind of weight",
        kinds,
        {n: [_mean_of(rows, n, kind, "grad_cosine") for kind in kinds] for n in names},
        stacked=False,
        axis="1 − cos, mean over decoder blocks",
    )
    page.table(
        ["kind", *(f"{n}: |log2 ratio|" for n in names)],
        [[kind, *(plain(_mean_of(rows, n, kind, "grad_log2_ratio")) for n in names)] for kind in kinds],
        caption="The norms' log2 ratio, its size averaged over decoder blocks.",
    )


def _mean_of(rows: Sequence[Result], treatment: str, kind: str, key: str) -> float:
    """Mean over the blocks of |value|; NaN without any."""
    found = [abs(r[key]) for r in rows if (r["treatment"], r["kind"]) == (treatment, kind) and r[key] is not None]
    return math.fsum(found) / len(found) if found else math.nan


def _summed_delta(page: Page, result: Result) -> None:
    sums = [c for c in result["curves"] if c["name"].startswith("sum_delta")]
    if not sums:
        return
    drawn, settings = sums[0], result["settings"]
    recipe = drawn["name"].split()[-1]
    row = next(t for t in result["theory"] if t["name"] == "sum_delta_sd" and t["treatment"] == recipe)
    layers, sigma = round(12 * row["predicted"] ** 2), _stated({**row, "value": row["measured"]})
    page.text(
        f"From the weights alone: one block of 32 drawn in each of the {layers} decoder blocks, {settings['seeds']} × "
        f"{settings['draws']:,} times. The summed δ of `{recipe}` has a σ of {sigma}; a uniform δ would have "
        f"√({layers}/12) = {plain(row['predicted'])}."
    )
    page.histogram(
        f"Σδ over the depth under `{recipe}`, centred",
        drawn["edges"],
        drawn["series"]["drawn"],
        reference={"normal, σ = √(L/12)": drawn["series"]["normal, σ = √(L/12)"]},
        x_label="Σ (δ − mean δ), log2",
    )
    page.table(
        ["decoder block", "mean δ", "12 · Var δ"],
        [
            [str(r["layer"]), plain(r["delta_mean"]), plain(12 * r["delta_var"])]
            for r in result["layers"]
            if r["kind"] == "delta" and r["treatment"] == recipe
        ],
        caption="12 · Var δ is 1 for a uniform δ. Draws are independent from block to block.",
        fold=f"δ of each decoder block under {recipe}",
    )


def _theory(page: Page, result: Result) -> None:
    page.table(
        ["theory", "treatment", "predicted", "measured", "agrees", "what is compared"],
        [
            [
                t["name"],
                t["treatment"] or "",
                plain(t["predicted"]),
                _stated({**t, "value": t["measured"]}),
                {True: "yes", False: "no", None: "–"}[t["within"]],
                t["note"],
            ]
            for t in result["theory"]
        ],
        caption="Agrees: the measured 95 % interval holds the predicted value.",
        text_columns=(1, 5),
    )

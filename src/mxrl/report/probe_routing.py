"""The routing probe's part of a page: flips and what predicts them, the experts' errors, what replay removes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mxrl.report.page import Page, percent, plain
from mxrl.report.svg import number

Result = Mapping[str, Any]
Row = Mapping[str, Any]
_PREDICTED = "predicted by Gaussian noise"


def sections(page: Page, result: Result) -> None:
    """Everything of the probe but its notes."""
    settings = result["settings"]
    names, main = settings["treatments"], settings["treatments"][0]
    page.section("Routing of the experts")
    page.text(
        f"Does the error send tokens to other experts, do the errors of the {settings['active']} experts of a token "
        f"cancel when they are summed, and how much of the error is gone once routing is replayed from the unquantized "
        f"model? At {settings['tokens']:,} tokens that it wrote itself, in {settings['moe_layers']} MoE layers. The "
        "routers are not quantized; their inputs carry the error.",
        " ".join(_answers(result, main)),
    )
    _flips(page, result, names)
    _depth(page, result, names)
    _margins(page, result, main)
    _experts(page, result, names)
    _replay(page, result, names)
    _tables(page, result, names)


def _measure(result: Result, treatment: str, metric: str) -> Row:
    missing = {"value": None, "low": None, "high": None}
    rows = (r for r in result["measures"] if (r["treatment"], r["metric"]) == (treatment, metric))
    return next(rows, missing)


def _signed(value: float | None) -> str:
    return percent(value).replace("-", "−")


def _cell(row: Row) -> str:
    if row["value"] is None:
        return "–"
    known = row["low"] is not None and row["high"] is not None
    return _signed(row["value"]) + (f" [{_signed(row['low'])}, {_signed(row['high'])}]" if known else "")


def _number(row: Row) -> str:
    ends = [plain(row[key]).replace("-", "−") for key in ("value", "low", "high")]
    return ends[0] if row["low"] is None else f"{ends[0]} [{ends[1]}, {ends[2]}]"


def _sides(row: Row, below: str, between: str, above: str) -> str:
    """Which side of 0 the interval lies on."""
    if row["low"] is None or row["high"] is None:
        return "one prompt gives no interval"
    return below if row["high"] < 0 else above if row["low"] > 0 else between


def _answers(result: Result, main: str) -> list[str]:
    flip, local = _measure(result, main, "topk_flip"), _measure(result, main, "topk_flip_local")
    top, share = _measure(result, main, "top1_flip"), _measure(result, main, "error_at_flips")
    out = [
        f"Under `{main}` the set of chosen experts is another one at {_cell(flip)} of all tokens and layers, and the "
        f"first choice at {_cell(top)}. With the error of each block's own attention alone it is {_cell(local)}."
    ]
    drawn = [r for r in result["theory"] if r["name"] == "top-k flips, drawn"]
    if drawn:
        inside = sum(r["within"] is True for r in drawn)
        out.append(
            f"Gaussian noise of the size measured at the routers, drawn on the margins that the model has, predicts "
            f"{percent(drawn[0]['predicted'])}; of {len(drawn)} treatments it is inside the interval for {inside}."
        )
    alone = {t: _measure(result, t, "topk_flip")["value"] for t in result["settings"]["treatments"] if _alone(t)}
    if alone and None not in alone.values():
        most = max(alone, key=lambda t: alone[t])
        out.append(f"Of the components alone, `{most}` flips most: {percent(alone[most])}.")
    redundancy, mixing = _measure(result, main, "redundancy"), _measure(result, main, "mixing_removed")
    if redundancy["value"] is not None:
        verdict = _sides(
            redundancy, "on the side of adding up", "not to be told from independent", "on the side of cancelling"
        )
        least = f"−{result['settings']['active'] - 1}"
        out.append(
            f"The experts' errors have redundancy {_number(redundancy)} (1: they cancel; 0: independent; {least}: all "
            f"equal, the least possible), {verdict}. Summing them takes {_cell(mixing)} off their relative error."
        )
    logits, blocks = _measure(result, main, "replay_removed"), _measure(result, main, "replay_removed_blocks")
    if logits["value"] is not None:
        verdict = _sides(
            logits, "that is, it adds some", "which can't be told from nothing", "which is more than nothing"
        )
        out.append(
            f"Replayed routing removes {_cell(logits)} of the logits' squared error, {verdict}; and {_cell(blocks)} of "
            f"the MoE blocks'. {_cell(share)} of the blocks' error lies at tokens that flipped there."
        )
    return out


def _alone(treatment: str) -> bool:
    """Whether one component alone is injected: base@name, neither left out nor noise."""
    _, _, mark = treatment.partition("@")
    return bool(mark) and mark[0] not in "-~" and "@" not in mark


def _bars(
    page: Page, result: Result, names: Sequence[str], caption: str, parts: Mapping[str, str], **more: Any
) -> None:
    rows = {label: [_measure(result, t, metric) for t in names] for label, metric in parts.items()}
    page.bars(
        caption,
        names,
        {label: [number(r["value"]) for r in found] for label, found in rows.items()},
        stacked=False,
        intervals={label: [(number(r["low"]), number(r["high"])) for r in found] for label, found in rows.items()},
        form=_signed,
        **more,
    )


def _flips(page: Page, result: Result, names: Sequence[str]) -> None:
    drawn = {r["treatment"]: r["predicted"] for r in result["theory"] if r["name"] == "top-k flips, drawn"}
    _bars(
        page, result, names,
        "Tokens whose set of experts changes, share of token × layer",
        {"end to end": "topk_flip", "own block alone": "topk_flip_local"},
        marks={_PREDICTED: [number(drawn.get(t)) for t in names]},
        axis="share of token × layer",
        explain="Own block alone: every block is fed its unquantized input, so the router sees the error of its own "
        "block's attention only. The prediction is of the flips end to end.",
    )  # fmt: skip


def _of_layer(result: Result, treatment: str, field: str) -> tuple[list[int], list[float]]:
    rows = [r for r in result["layers"] if r["treatment"] == treatment]
    return [r["layer"] for r in rows], [number(r[field]) for r in rows]


def _depth(page: Page, result: Result, names: Sequence[str]) -> None:
    at, measured = _of_layer(result, names[0], "topk_flip")
    if len(at) < 2:
        return
    series = {t: _of_layer(result, t, "topk_flip")[1] for t in names if "@" not in t} or {names[0]: measured}
    first = next(iter(series))
    series[f"{first}, own block alone"] = _of_layer(result, first, "topk_flip_local")[1]
    series[f"{first}, predicted"] = _of_layer(result, first, "drawn_flip")[1]
    page.lines(
        "Flips by depth", at, series, x_label="layer", y_label="share of tokens", form=percent, zero=True
    )  # fmt: skip


def _margins(page: Page, result: Result, main: str) -> None:
    curves = result["curves"]
    by_margin = next(c for c in curves if c["name"] == "flips_by_margin" and c["treatment"] == main)
    margin = next(c for c in curves if c["name"] == "margin")
    page.lines(
        f"Flips by the router's margin, {main}", by_margin["x"], by_margin["series"],
        x_label="margin: logit of the last chosen expert less that of the next", y_label="share that flips",
        form=percent, zero=True,
        explain="Each point holds a tenth of all tokens and layers. Boundary pair: Φ(−m / (σ√2)), which looks at two "
        "experts only; drawn: Gaussian noise of the same σ on all of them. σ is one number a layer.",
    )  # fmt: skip
    page.lines(
        "The router's margins in the unquantized model", margin["x"], margin["series"],
        x_label="margin", y_label="share of tokens below", form=percent, zero=True,
    )  # fmt: skip


def _experts(page: Page, result: Result, names: Sequence[str]) -> None:
    _bars(
        page, result, names,
        "What summing a token's experts does to their errors",
        {"redundancy R": "redundancy", "taken off the relative error": "mixing_removed"},
        axis="R: 0 independent, above 0 cancel, below 0 add up",
        explain="Same input, same routing, same gates; only the experts are quantized. The relative error falls where "
        "the experts' outputs add up more than their errors do.",
    )  # fmt: skip


def _replay(page: Page, result: Result, names: Sequence[str]) -> None:
    _bars(
        page, result, names,
        "Squared error that replaying the unquantized model's routing removes",
        {"of the logits": "replay_removed", "of the MoE blocks' outputs": "replay_removed_blocks"},
        axis="share of the squared error",
        explain="Each token goes to the experts that the unquantized pass chose; the gates are computed from the "
        "quantized pass's router logits. Below 0: the error is larger with routing replayed.",
    )  # fmt: skip


_COLUMNS = {
    "sets changed": "topk_flip", "own block alone": "topk_flip_local", "first choice": "top1_flip",
    "taken off the relative error": "mixing_removed", "logits' error removed by replay": "replay_removed",
    "blocks' error removed": "replay_removed_blocks", "blocks' error at flips": "error_at_flips",
}  # fmt: skip


def _tables(page: Page, result: Result, names: Sequence[str]) -> None:
    page.table(
        ["treatment", *_COLUMNS, "experts changed a token and layer", "redundancy"],
        [
            [t, *(_cell(_measure(result, t, m)) for m in _COLUMNS.values()),
             *(_number(_measure(result, t, m)) for m in ("changed_experts", "redundancy"))]
            for t in names
        ],
        caption=f"95 % intervals, jackknife over {result['subject']['prompts']} prompts.",
    )  # fmt: skip
    page.table(
        ["theory", "treatment", "predicted", "measured", "inside the interval"],
        [
            [r["name"], r["treatment"], plain(r["predicted"]), _number(r | {"value": r["measured"]}),
             {True: "yes", False: "no", None: "–"}[r["within"]]]
            for r in result["theory"]
        ],
        text_columns=(1, 4),
        fold=f"Theory: {len(result['theory'])} predictions beside what was measured",
    )  # fmt: skip
    columns = {
        "flips": ("topk_flip", percent), "predicted": ("drawn_flip", percent), "pair": ("predicted_flip", percent),
        "own block": ("topk_flip_local", percent), "σ of the noise": ("noise_sd", plain),
        "σ, own block": ("noise_sd_local", plain), "median margin": ("margin_median", plain),
        "redundancy": ("redundancy", plain), "of the outputs": ("output_redundancy", plain),
        "relative error": ("relative_error", percent), "removed by replay": ("replay_removed_blocks", percent),
    }  # fmt: skip
    page.table(
        ["treatment", "layer", *columns],
        [[r["treatment"], str(r["layer"]), *(form(r[key]).replace("-", "−") for key, form in columns.values())]
         for r in result["layers"]],
        fold=f"Layer by layer: {len(result['layers'])} rows",
    )  # fmt: skip

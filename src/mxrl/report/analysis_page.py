"""The page of an analysis, from `summary.json` and the rows of `tensors.jsonl`, and nothing else.

    build_page(summary, rows)

`summary["analysis"]` says what kind it is: "weights" (the default), "against" an original, "activations" or a "diff".
All but the diff have the same shape and share their sections.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mxrl.decompose import ErrorStats
from mxrl.report import other_sections, recipe_sections, sections
from mxrl.report.answers import PLAIN
from mxrl.report.outliers import Row
from mxrl.report.page import Page, percent, plain
from mxrl.report.recipe_sections import times
from mxrl.report.summary import already_quantized, excess_over_t

Summary = Mapping[str, Any]
_TITLES = {
    "weights": "MXFP4 error of {model}",
    "lossy": "{model}, already quantized, quantized once more",
    "against": "Quantization error of {model} against its original",
    "activations": "MXFP4 error of the activations of {model}",
    "diff": "Two checkpoints compared: {model}",
}


def build_page(summary: Summary, rows: Iterable[Row]) -> Page:
    """The page of one analysis. Rows of other recipes than the first are passed over."""
    analysis = summary.get("analysis", "weights")
    main = summary["recipes"][0]
    own = [r for r in rows if r["recipe"] == main]
    title = _TITLES["lossy" if analysis == "weights" and already_quantized(summary) else analysis]
    page = Page(
        title.format(model=summary["model"]),
        lead=_lead(summary, analysis),
        footer=f"Made by mxrl {summary['versions']['mxrl']} on {summary['created']}. Every number here is in "
        "`summary.json`; every tensor's are in `tensors.jsonl`.",
    )
    if analysis == "diff":
        other_sections.diff(page, summary, own)
        _origin(page, summary)
        return page
    _short(page, summary, analysis)
    if analysis == "against":
        other_sections.against(page, summary)
    sections.fingerprint(page, summary, own)
    sections.delta(page, summary)
    recipe_sections.sweep(page, summary)
    recipe_sections.compared(page, summary)
    recipe_sections.corrections(page, summary)
    sections.worst(page, summary, own)
    recipe_sections.recommendation(page, summary)
    _reading(page)
    _origin(page, summary)
    return page


def _lead(summary: Summary, analysis: str) -> str:
    what = "layer inputs" if analysis == "activations" else "linear weights"
    text = f"{summary['tensors']:,} {what}, {summary['elements']:,} elements"
    return text if analysis == "diff" else f"{text}; `{summary['source']['path']}`"


def _short(page: Page, summary: Summary, analysis: str) -> None:
    main = summary["recipes"][0]
    stats = ErrorStats.from_dict(summary["total"][main])
    page.section("In short")
    lossy = already_quantized(summary) if analysis == "weights" else {}
    if lossy:
        page.note(_lossy_note(summary, lossy), warn=True)
    if analysis == "activations":
        t = summary["task"]
        page.text(
            f"Inputs of every linear layer for {t['prompts']} prompts of `{t['name']}` ({t['tokens']:,} tokens, "
            f"padding left out; {t['split']}, seed {t['seed']}), quantized along the contraction axis."
        )
    done = {
        "weights": f"`{main}` changes these weights" if not lossy else f"`{main}` changes the decoded values once more",
        "against": "What is stored differs from the original",
        "activations": f"`{main}` changes these inputs",
    }[analysis]
    whose = "the original's" if analysis == "against" else "their"
    page.text(
        f"{done} by {percent(stats.rel_mse)} of {whose} energy. {_excess_sentence(stats, analysis)} "
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
        tiles = {"T relative to mxfp4": times(summary["total"][main]["relative_to_mxfp4"])} | tiles
    page.facts(tiles | {"bits an element": plain(summary["total"][main]["bits"])})
    best = summary.get("recommendation")
    if best and not lossy:
        words = dict.fromkeys(e["recipe"] for e in best["kinds"].values())
        page.text(
            f"Under {best['budget']:g} bits an element the least squared error is {plain(best['rel_mse'])} of ‖x‖², "
            "with " + ", ".join(f"`{w}`" for w in words) + " (see Recommended recipes)."
        )
    for skipped in summary["skipped"]:
        page.note(f"Left out on request: `{skipped['name']}` has {skipped['reason']}.", warn=True)
    for warning in summary["warnings"]:
        page.note(f"Warning: {warning}.", warn=True)


def _lossy_note(summary: Summary, lossy: Mapping[str, Any]) -> str:
    kinds = ", ".join(
        f"{e['tensors']} × {name}" + (f" at {plain(e['bits'])} bits an element" if "bits" in e else "")
        for name, e in lossy.items()
    )
    tensors = sum(e["tensors"] for e in lossy.values())
    part = "all" if tensors == summary["tensors"] else f"{tensors} of the {summary['tensors']}"
    return (
        f"The source is already quantized ({kinds}): {part} of its weights have lost information before this analysis "
        "began, and how much can't be told without the original (`--against ORIGINAL` measures it). The figures below "
        "are the further error of quantizing the decoded values once more. They are not the error of the model's own "
        "weights: a format's own grid fits its own output, so its error here is far too small, or zero."
    )


def _excess_sentence(stats: ErrorStats, analysis: str) -> str:
    if not stats.sq_error:
        return "There is no error to split."
    if analysis == "against":  # the quantizer may have another grid, and then the excess is not its scales' price
        return (
            f"The floor, what the reference format would lose on the original under ideal scales, is "
            f"{plain(stats.floor / stats.sq_error)} of that error; the note on reading says what the rest is."
        )
    if not excess_over_t(stats) < 0:
        return (
            f"{percent(excess_over_t(stats))} of that error is excess over the floor, which the ideal scales "
            "m/q_max would leave."
        )
    return f"That is below the floor of the ideal scales m/q_max, at {plain(stats.sq_error / stats.floor)} of it."


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


def _origin(page: Page, summary: Summary) -> None:
    if left := summary.get("left"):
        page.section("Left out")
        page.table(["reason", "tensors"], [[reason, str(len(names))] for reason, names in left.items()])
        names = [[name, reason] for reason, found in left.items() for name in found]
        page.table(["tensor", "reason"], names, text_columns=(1,), fold=f"All {len(names)} by name")
    page.section("Where the numbers come from")
    facts: list[list[str]] = []
    for label, side in _sides(summary):
        stored = ", ".join(f"{v['tensors']} × {t}" for t, v in side["stored_types"].items())
        what = f"{side['path']} ({side['format']}" + (f"; weights stored as {stored})" if stored else ")")
        facts.append([label, what])
        facts += [[f["name"], f"{f['bytes']:,} bytes, sha256 {f['sha256']}"] for f in side["files"]]
    facts += [["versions", ", ".join(f"{k} {v}" for k, v in summary["versions"].items())]]
    facts += [["commit", summary["commit"] or "not known (an installed copy)"]]
    facts += [["device", f"{summary['device']} ({summary['machine']})"], ["seconds", plain(summary["seconds"])]]
    page.table(["", ""], facts, text_columns=(1,))
    if stored_as := summary.get("source", {}).get("stored_as"):
        page.table(
            ["stored as", "tensors", "elements", "bits / element", "already quantized"],
            [
                [name, str(e["tensors"]), f"{e['elements']:,}", plain(e["bits"]), "yes" if e["quantized"] else "no"]
                for name, e in stored_as.items()
            ],
        )


def _sides(summary: Summary) -> list[tuple[str, Mapping[str, Any]]]:
    """The checkpoints that were read, with what to call them."""
    if summary.get("analysis") == "diff":
        return [("A", summary["a"]), ("B", summary["b"])]
    sides = [("model", summary["source"])]
    return [*sides, ("original", summary["original"])] if "original" in summary else sides

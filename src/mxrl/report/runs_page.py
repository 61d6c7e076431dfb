"""The comparison of runs (run_groups.py) as one HTML page, and the table and sentences that the Markdown shares.

build(result)        the Page
COLUMNS, rows(subject)   the table: a row a group
findings(subject), stopped(subject)   what came out, and which runs did not end well, as sentences
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mxrl.report.page import Page
from mxrl.report.run_groups import REFERENCES
from mxrl.report.svg import Band, number, percent, plain

Subject = Mapping[str, Any]
COLUMNS = (
    "runs", "seeds done", "before, %", "after, %", "gain", "against bf16", "against mxfp4", "tokens/s", "decoding/s",
)  # fmt: skip
INTERVALS = (
    "Accuracy is greedy, on the held-out problems, of the quantized policy. Brackets are 95 % intervals: mean ± "
    "t·sd/√n over seeds; or over problems, where it says so, because only one seed is there: that says how far other "
    "problems could have moved the difference, not how far another seed would. One seed alone has no interval over "
    "seeds. Differences are in percentage points, and paired: the same seeds, prompts and problems."
)
SPEED = "Tokens a second are completion tokens of the median rollout: with training, and of decoding alone."


def rows(subject: Subject) -> list[list[str]]:
    """A row a group, under COLUMNS."""
    return [
        [
            group["label"],
            f"{group['done']} of {len(group['seeds'])}",
            _hundred(group["accuracy_before"]),
            _hundred(group["accuracy_after"]),
            points(group["gain"]),
            *("reference" if group["recipe"] == name else points(group["against"][name]) for name in REFERENCES),
            _speed(group["tokens_per_second"]),
            _speed(group["rollout_tokens_per_second"]),
        ]
        for group in subject["groups"]
    ]


def points(difference: Mapping[str, Any] | None) -> str:
    """A difference of accuracies in percentage points, as "+3.1 [+1.0, +5.2]"; an en dash where there is none."""
    if difference is None:
        return "–"
    text = _signed(difference["value"])
    if difference["low"] is None:
        return f"{text} (one seed)"
    text += f" [{_signed(difference['low'])}, {_signed(difference['high'])}]"
    return f"{text} (over problems)" if difference["over"] == "problems" else text


def heading(subject: Subject) -> str:
    """ "policy:dense on chain"."""
    options = f" {json.dumps(subject['task_options'])}" if subject["task_options"] else ""
    return f"{subject['model']} on {subject['task']}{options}"


def findings(subject: Subject) -> list[str]:
    """What the paired differences decide, a sentence for each reference."""
    said = []
    for name in REFERENCES:
        found = [(g["label"], g["against"][name]) for g in subject["groups"] if g["against"][name]]
        if not found:
            reason = (
                "none of its runs that are done shares seed and all other options with a run of another recipe"
                if any(g["recipe"] == name for g in subject["groups"])
                else f"no run of `{name}` is among them"
            )
            said.append(f"Nothing is compared with `{name}`: {reason}.")
            continue
        above = [f"`{label}` ({points(d)})" for label, d in found if _sign(d) > 0]
        below = [f"`{label}` ({points(d)})" for label, d in found if _sign(d) < 0]
        open_ = [f"`{label}` ({points(d)})" for label, d in found if _sign(d) == 0]
        parts = [f"{what} {', '.join(which)}" for what, which in
                 (("better", above), ("worse", below), ("undecided", open_)) if which]  # fmt: skip
        said.append(f"Against `{name}`, by accuracy after training: {'; '.join(parts)}.")
    single = [f"`{g['label']}`" for g in subject["groups"] if len(g["seeds"]) == 1]
    if single:
        said.append(f"One seed each, so no interval over seeds: {', '.join(single)}.")
    return said


def stopped(subject: Subject) -> list[str]:
    """The runs that are not done, a sentence each: where they stopped and why."""
    return [
        f"`{group['label']}`, seed {run['seed']} (`{run['path']}`): {run['ending']}"
        for group in subject["groups"]
        for run in group["runs"]
        if run["state"] != "done"
    ]


def differing(subject: Subject) -> str:
    """In what the groups differ, as their configurations say."""
    if not subject["differs"]:
        return "One group: the runs differ in their seed alone."
    return f"The configurations differ in {', '.join(f'`{n}`' for n in subject['differs'])}, and in the seed."


def build(result: Mapping[str, Any], footer: str = "") -> Page:
    """The page of a comparison."""
    subjects = result["subjects"]
    page = Page(
        "Training runs compared",
        lead=f"{result['runs']} runs, grouped by what their configurations say; means and 95 % intervals over seeds.",
        footer=footer,
    )
    for note in result["notes"]:
        page.note(note)
    for subject in subjects:
        _tables(page, subject)
        _curves(page, subject, heading(subject) if len(subjects) > 1 else "")
    return page


def _tables(page: Page, subject: Subject) -> None:
    groups = subject["groups"]
    page.section(heading(subject)).text(differing(subject), *findings(subject))
    lost = stopped(subject)
    if lost:
        page.note(
            f"Runs that did not reach their end: {len(lost)}. Their curves are drawn as far as they go; accuracy after "
            f"training, gain and differences are of the others alone, which may flatter a group. {'; '.join(lost)}.",
            warn=True,
        )
    for note in subject["notes"]:
        page.note(note)
    page.table(list(COLUMNS), rows(subject), caption=INTERVALS)
    page.text(SPEED)
    measured = [g for g in groups if g["accuracy_before"] or g["accuracy_after"]]
    if measured:
        sides = {"before": "accuracy_before", "after": "accuracy_after"}
        page.bars(
            "Greedy accuracy before and after training",
            [g["label"] for g in measured],
            {side: [number(g[key] and g[key]["value"]) for g in measured] for side, key in sides.items()},
            stacked=False,
            intervals={
                side: [
                    (number(g[key] and g[key]["low"]), number(g[key] and g[key]["high"])) for g in measured
                ]
                for side, key in sides.items()
            },
            form=percent,
        )  # fmt: skip
    page.table(
        ["run", "group", "seed", "how it ended", "before, %", "last, %", "at step"],
        [
            [
                run["path"], group["label"], str(run["seed"]), run["ending"], _one(run["accuracy_before"]),
                _one(run["accuracy_last"]), str(run["accuracy_last_step"] if run["accuracy_last"] is not None else "–"),
            ]
            for group in groups for run in group["runs"]
        ],
        text_columns=(1, 3),
        fold="Every run",
    )  # fmt: skip
    page.table(
        ["option", "value"],
        [[name, str(value)] for name, value in subject["alike"].items()],
        text_columns=(1,),
        fold="The options that all these runs have in common",
    )


def _curves(page: Page, subject: Subject, of: str) -> None:
    page.section(f"Curves: {of}" if of else "Curves")
    page.text(
        "A line is the mean over the seeds that have the step, its band the 95 % interval where there are several "
        "(of shares: cut at 0 and 100 %)."
    )
    if not subject["curves"]:
        page.note("None of these runs has logged a step.", warn=True)
    for curve in subject["curves"]:
        form = percent if curve["share"] else plain
        page.lines(
            curve["title"],
            curve["x"],
            {label: _band(series, curve["share"]) for label, series in curve["series"].items()},
            x_label="optimizer step",
            form=form,
            explain=thinned(curve),
        )
    if not any(curve["name"] == "aqn_sigma" for curve in subject["curves"]):
        page.text("None of these runs has AQN noise, so there is no curve of its σ.")


def thinned(curve: Mapping[str, Any]) -> str:
    """What a point of the curve is, where it isn't one step."""
    width = curve["steps_a_point"]
    return f"Each point is the mean of {width} consecutive steps." if width > 1 else ""


def bounds(series: Mapping[str, Sequence[float | None]], share: bool) -> tuple[list[float], list[float]]:
    """(low, high) as they are drawn, NaN where there is no interval; those of a share end at 0 and 1."""
    low, high = ([number(v) for v in series[name]] for name in ("low", "high"))
    if share:
        low, high = [v if v != v else max(v, 0.0) for v in low], [v if v != v else min(v, 1.0) for v in high]
    return low, high


def _band(series: Mapping[str, Sequence[float | None]], share: bool) -> Sequence[float] | Band:
    means = [number(v) for v in series["mean"]]
    return means if all(v is None for v in series["low"]) else (means, *bounds(series, share))


# --- cells -----------------------------------------------------------------------------------------------------------


def _sign(difference: Mapping[str, Any]) -> int:
    """1 or −1 where the interval lies on one side of zero, else 0. Seeds that agree to the last problem decide nothing:
    their interval has no width, which says more of how few they are than of the recipe."""
    if not _has_width(difference):
        return 0
    return 1 if difference["low"] > 0 else -1 if difference["high"] < 0 else 0


def _has_width(found: Mapping[str, Any]) -> bool:
    return found["low"] is not None and found["high"] - found["low"] > 1e-9


def _signed(share: float) -> str:
    return f"{100 * share:+.1f}".replace("-", "−")


def _one(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f}"


def _hundred(found: Mapping[str, Any] | None) -> str:
    """A share in percent, with its interval; the seeds that it is of are the row's `seeds done`."""
    if found is None:
        return "–"
    text = _one(found["value"])
    if not _has_width(found):  # before training every seed has the same policy
        return text
    return f"{text} [{_one(found['low'])}, {_one(found['high'])}]".replace("-", "−")


def _speed(found: Mapping[str, Any] | None) -> str:
    return "–" if found is None else f"{found['value']:,.0f}"

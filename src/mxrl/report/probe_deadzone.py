"""The deadzone probe's part of the page: zeros and ranks of the weights, then the answers decoded with them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from mxrl.probes.treatments import BASELINE, Treatment
from mxrl.report.demo import points
from mxrl.report.page import Page, percent, plain
from mxrl.report.probe_rows import Row, by_treatment, excludes_zero, parts, recipes, stated, whiskers
from mxrl.report.svg import number

Result = Mapping[str, Any]
Rows = Mapping[str, Mapping[str, Row]]
_ACCURACY = {"greedy": "greedy_accuracy_change", "sampled": "sampled_accuracy_change"}


def sections(page: Page, result: Result) -> None:
    """Add the deadzone probe's sections. result: of mxrl.probes.deadzone, from JSON."""
    rows = by_treatment(result)
    treated = [name for name in rows if name != BASELINE]
    page.section("The deadzone and the weights")
    page.text(_asked_weights(result), *_found_weights(result, rows, treated))
    _weights(page, result, rows, treated)
    page.section("The deadzone and rollouts")
    page.text(_asked_answers(result, rows), *_found_answers(result, rows, treated))
    _answers(page, result, rows, treated)


# --- weights ---------------------------------------------------------------------------------------------------------


def _asked_weights(result: Result) -> str:
    settings = result["settings"]
    some = "all" if settings["matrices_measured"] == settings["matrices"] else f"{settings['matrices_measured']} of the"
    return (
        f"How many weights does a format set to zero, and does that take rank away? {some.capitalize()} "
        f"{settings['matrices']} weight matrices; intervals over layers."
    )


def _found_weights(result: Result, rows: Rows, treated: Sequence[str]) -> list[str]:
    out = []
    for row in result["theory"]:
        if row["name"] == "deadzone_share":
            base = Treatment.parse(row["treatment"]).recipe.base
            out.append(
                f"{stated({**row, 'value': row['measured']}, percent)} of the weights lie in the deadzone of `{base}`; "
                f"of Gaussian weights {percent(row['predicted'])} would."
            )
    for name in recipes(treated):
        out.append(
            f"`{name}` stores {stated(rows[name]['zeros'], percent)} zeros, and takes "
            f"{stated(rows[name]['effective_rank_lost'], percent)} of the effective rank (below 0: adds)."
        )
    for name in parts(treated):
        control = _control(name, treated)
        if Treatment.parse(name).component == "deadzone" and control is not None:
            out.append(
                f"The deadzone's zeros alone take {stated(rows[name]['effective_rank_lost'], percent)} of the "
                f"effective and {stated(rows[name]['stable_rank_lost'], percent)} of the stable rank; noise of their "
                f"energy takes {stated(rows[control]['effective_rank_lost'], percent)} and "
                f"{stated(rows[control]['stable_rank_lost'], percent)}."
            )
    return out


def _control(name: str, treated: Sequence[str]) -> str | None:
    """The energy-matched control of a component among the treatments."""
    t = Treatment.parse(name)
    same = str(Treatment(t.recipe, t.components, True, t.passes))
    return same if same in treated else None


def _weights(page: Page, result: Result, rows: Rows, treated: Sequence[str]) -> None:
    curves = {c["name"]: c for c in result["curves"]}
    shown = [*recipes(treated), *parts(treated)] or list(treated)
    for name, caption in (
        ("zeros_by_layer", "Share of zeros, by layer"),
        ("effective_rank_lost_by_layer", "Effective rank lost, by layer"),
    ):
        curve = curves[name]
        page.lines(
            caption, curve["x"], {k: curve["series"][k] for k in shown}, x_label="layer", form=percent, zero=True,
            explain="Below 0: gained." if "rank" in name else "",
        )  # fmt: skip
    page.table(
        ["treatment", "zeros", "effective rank lost", "stable rank lost"],
        [
            [f"`{n}`", *(stated(rows[n][m], percent) for m in ("zeros", "effective_rank_lost", "stable_rank_lost"))]
            for n in treated
        ],
        caption="Shares of the weights; relative losses, means over matrices. Below 0: gained.",
    )
    _kinds(page, result)
    page.table(
        ["", "treatment", "predicted", "measured", "agrees", "what it says"],
        [_against(row) for row in result["theory"] if row["name"] in ("deadzone_share", "stable_rank_lost")],
        text_columns=(1, 5),
    )


def _kinds(page: Page, result: Result) -> None:
    """Means over the layers of every kind, under each treatment."""
    found: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in result["layers"]:
        found[row["treatment"], row["kind"]].append(row)
    columns = {"zeros": percent, "deadzone": percent, "effective_rank_before": plain, "effective_rank": plain,
               "stable_rank_before": plain, "stable_rank": plain}  # fmt: skip
    page.table(
        ["treatment", "kind", "matrices", "zeros", "in the deadzone", "effective rank of W", "treated",
         "stable rank of W", "treated"],
        [
            [f"`{name}`", kind, str(sum(r["matrices"] for r in some)), *(f(_mean(some, c)) for c, f in columns.items())]
            for (name, kind), some in found.items()
        ],
        fold="By kind of weight",
        text_columns=(1,),
    )  # fmt: skip


def _mean(rows: Sequence[Row], name: str) -> float:
    return sum(r[name] * r["matrices"] for r in rows) / sum(r["matrices"] for r in rows)


def _against(row: Row) -> list[str]:
    form = points if row["name"].startswith("deadzone_beyond") else percent
    return [
        row["name"].replace("_", " "),
        f"`{row['treatment']}`",
        form(row["predicted"]).replace("-", "−"),
        stated({**row, "value": row["measured"]}, form),
        "–" if row["within"] is None else "yes" if row["within"] else "no",
        row["note"],
    ]


# --- answers ---------------------------------------------------------------------------------------------------------


def _asked_answers(result: Result, rows: Rows) -> str:
    subject, settings, plain_row = result["subject"], result["settings"], rows[BASELINE]
    return (
        f"Does zeroing small values make answers worse or blander? {subject['prompts']} problems of "
        f"`{subject['task']}`, one greedy answer and {settings['samples']} drawn at temperature "
        f"{settings['temperature']:g} for each. The "
        f"unquantized policy gets {stated(plain_row['greedy_accuracy'], percent)} greedy and "
        f"{stated(plain_row['sampled_accuracy'], percent)} sampled, with {stated(plain_row['distinct'])} different "
        "completions a problem. All changes are paired by problem."
    )


def _found_answers(result: Result, rows: Rows, treated: Sequence[str]) -> list[str]:
    alone = {name: rows[name]["greedy_accuracy_change"] for name in parts(treated)}
    out = []
    for name, row in alone.items():
        if Treatment.parse(name).component == "deadzone":
            out.append(
                f"Only the deadzone (`{name}`): greedy {stated(row, points)} points, sampled "
                f"{stated(rows[name]['sampled_accuracy_change'], points)}, different completions a problem "
                f"{stated(rows[name]['distinct_change'])}. {_verdict(rows[name])}"
            )
    if len(alone) > 1:
        worst = sorted(alone, key=lambda n: number(alone[n]["value"]))
        out.append("Alone, by greedy accuracy: " + ", ".join(f"`{n}` {stated(alone[n], points)}" for n in worst) + ".")
    for row in result["theory"]:
        if row["name"] == "deadzone_beyond_noise_greedy":
            says = (
                "can't be told from noise of the same energy" if row["within"] else "differ from noise of their energy"
            )
            out.append(
                f"The zeros {says}: greedy accuracy under the one minus under the other is "
                f"{stated({**row, 'value': row['measured']}, points)} points."
            )
    return out


def _verdict(row: Mapping[str, Row]) -> str:
    moved = [f"{how} accuracy" for how, metric in _ACCURACY.items() if excludes_zero(row[metric])]
    moved += ["the number of different completions"] if excludes_zero(row["distinct_change"]) else []
    return f"Decided: {' and '.join(moved)}." if moved else "None of the three is decided: every interval holds 0."


def _answers(page: Page, result: Result, rows: Rows, treated: Sequence[str]) -> None:
    page.bars(
        "Change of accuracy, paired by problem",
        treated,
        {how: [number(rows[n][metric]["value"]) for n in treated] for how, metric in _ACCURACY.items()},
        stacked=False,
        intervals={how: whiskers([rows[n][metric] for n in treated]) for how, metric in _ACCURACY.items()},
        axis="percentage points",
        form=points,
    )
    columns = {
        "greedy_accuracy": ("greedy", percent),
        "greedy_accuracy_change": ("change, points", points),
        "sampled_accuracy": ("sampled", percent),
        "sampled_accuracy_change": ("change, points", points),
        "distinct_change": ("different completions", plain),
        "distinct_answers_change": ("different answers", plain),
        "rollout_entropy_change": ("entropy, nats a token", plain),
        "mean_tokens_change": ("tokens", plain),
    }
    columns = {metric: column for metric, column in columns.items() if any(metric in row for row in rows.values())}
    page.table(
        ["treatment", *(heading for heading, _ in columns.values())],
        [[f"`{n}`", *(stated(row.get(m), form) for m, (_, form) in columns.items())] for n, row in rows.items()],
        caption="From the fifth column on: changes a problem against the unquantized policy.",
    )
    structure = [_against(row) for row in result["theory"] if row["name"].startswith("deadzone_beyond")]
    if structure:
        page.table(["", "treatment", "predicted", "measured", "agrees", "what it says"], structure, text_columns=(1, 5))

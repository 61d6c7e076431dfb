"""The fork probe's part of the page: survival, hazard, what a fork costs, where it happens, length, extrapolation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mxrl.probes.treatments import BASELINE
from mxrl.report.demo import points
from mxrl.report.page import Page, percent, plain
from mxrl.report.probe_rows import Row, by_treatment, excludes_zero, parts, recipes, stated, whiskers
from mxrl.report.svg import Band, number

Result = Mapping[str, Any]


def sections(page: Page, result: Result) -> None:
    """Add the fork probe's section. result: of mxrl.probes.fork, from JSON."""
    rows = by_treatment(result)
    names = list(rows)
    page.section("Trajectory forks")
    page.text(_asked(result), *_found(rows, recipes(names)))
    for caption, chosen in (("the recipes", recipes(names)), ("one component alone", parts(names))):
        if chosen:
            _survival(page, result, caption, [BASELINE, *chosen])
    page.bars(
        "Hazard: forks a token watched",
        names,
        {"hazard": [number(rows[n]["fork_hazard"]["value"]) for n in names]},
        stacked=False,
        intervals={"hazard": whiskers([rows[n]["fork_hazard"] for n in names])},
        axis="forks a token",
        explain=f"`{BASELINE}` is the control: the unquantized policy decoded again in other company. Whiskers: the "
        "exact 95 % interval of a Poisson count.",
    )
    _cost(page, rows)
    _undecided(page, rows)
    _length(page, result, recipes(names))
    _theory(page, result)


def _asked(result: Result) -> str:
    subject = result["subject"]
    return (
        f"At which token does greedy decoding under 4-bit noise leave the unquantized policy's own answer, and what "
        f"does that cost? {subject['prompts']} problems of `{subject['task']}`, each decoded by the unquantized policy "
        "and under every treatment. An answer that ends without a different token is censored there."
    )


def _found(rows: Mapping[str, Mapping[str, Row]], whole: Sequence[str]) -> list[str]:
    out = []
    control = rows[BASELINE]
    full = control["fork_hazard_full_pass"]
    out.append(
        f"Rounding alone: {stated(control['fork_hazard'])} forks a token in other company, {stated(full)} by full "
        "forward passes."
    )
    for name in whole:
        row = rows[name]
        half, change = row["survival_half"], row["forked_accuracy_change"]
        lasted = (
            f"half have forked after {stated(half, _tokens)} tokens" if half["value"] else "fewer than half ever do"
        )
        above = "more than rounding" if excludes_zero(row["fork_hazard_above_bf16"]) else "not told apart from rounding"
        text = f"`{name}`: {stated(row['fork_hazard'])} forks a token ({above}); {lasted}. "
        if change["n"]:
            surely = "" if excludes_zero(change) else ", which is undecided"
            text += (
                f"The {change['n']} forked answers change accuracy by {stated(change, points)} points{surely}; on "
                "those problems the unquantized policy was right in "
                f"{stated(row['forked_accuracy_unquantized'], percent)}, on the others in "
                f"{stated(row['unforked_accuracy'], percent)}."
            )
        out.append(text.strip())
    return out


def _tokens(value: float | None) -> str:
    return "–" if value is None else f"{value:g}"


def _survival(page: Page, result: Result, caption: str, chosen: Sequence[str]) -> None:
    curve = next(c for c in result["curves"] if c["name"] == "survival")
    page.lines(
        f"Answers that haven't forked yet: {caption}",
        curve["x"],
        {name: [number(v) for v in curve["series"][name]["mean"]] for name in chosen},
        x_label="token of the answer",
        y_label="share unforked",
        form=percent,
        zero=True,
        explain="Kaplan–Meier: an answer that ended unforked counts as long as it was watched.",
    )


def _cost(page: Page, rows: Mapping[str, Mapping[str, Row]]) -> None:
    page.table(
        ["treatment", "forks a token", "half forked after", "forked", "accuracy, forked", "unquantized, same problems",
         "change, points", "accuracy, unforked"],
        [
            [
                f"`{name}`",
                stated(row["fork_hazard"]),
                stated(row["survival_half"], _tokens),
                stated(row["fork_share"], percent),
                stated(row["forked_accuracy"], percent),
                stated(row["forked_accuracy_unquantized"], percent),
                stated(row["forked_accuracy_change"], points),
                stated(row["unforked_accuracy"], percent),
            ]
            for name, row in rows.items()
        ],
        caption="The change is paired by problem. Unforked answers are the unquantized ones, token by token.",
    )  # fmt: skip


def _undecided(page: Page, rows: Mapping[str, Mapping[str, Row]]) -> None:
    forked = {name: row for name, row in rows.items() if row["fork_entropy"]["n"]}
    if not forked:
        return
    more = [name for name, row in forked.items() if number(row["fork_entropy_excess"]["low"]) > 0]
    page.text(
        "Where forks happen, by what the unquantized policy says of that token: its entropy is higher than on the same "
        f"answer's other tokens, with an interval above 0, for {len(more)} of {len(forked)} treatments that fork."
    )
    page.table(
        ["treatment", "entropy at the fork", "minus the rest", "margin at the fork", "minus the rest"],
        [
            [
                f"`{name}`",
                *(stated(row[f"fork_{what}"]) for what in ("entropy", "entropy_excess", "margin", "margin_excess")),
            ]
            for name, row in forked.items()
        ],
        caption="Nats. Margin: log-probability of the most likely token minus that of the second.",
    )


def _length(page: Page, result: Result, whole: Sequence[str]) -> None:
    found = {c["name"]: c for c in result["curves"]}
    shown = whole or list(found["survival"]["series"])
    for name, caption, form in (
        ("fork_share_by_length", "Share that forks, by length of the unquantized answer", percent),
        ("accuracy_change_by_length", "Change of accuracy, by length of the unquantized answer", points),
    ):
        curve = found[name]
        page.lines(
            caption,
            curve["x"],
            {k: _band(curve["series"][k]) for k in shown},
            x_label="tokens (mean of the bin)",
            form=form,
            zero=True,
            explain=f"Bins of {', '.join(map(str, curve['answers']))} answers; 95 % intervals.",
        )


def _band(found: Mapping[str, Sequence[float | None]]) -> Band:
    mean, low, high = ([number(v) for v in found[end]] for end in ("mean", "low", "high"))
    return mean, low, high


def _theory(page: Page, result: Result) -> None:
    constant = [row for row in result["theory"] if row["name"] == "constant_hazard"]
    ahead = [row for row in result["theory"] if row["name"] != "constant_hazard"]
    if constant:
        kept = sum(bool(row["within"]) for row in constant)
        page.text(
            f"Is the hazard constant? Then the first half of the tokens watched holds half of the forks. {kept} of "
            f"{len(constant)} treatments are consistent with that."
        )
        page.table(
            ["treatment", "tokens in the first half", "forks there", "consistent"],
            [
                [
                    f"`{row['treatment']}`",
                    percent(row["predicted"]),
                    stated({**row, "value": row["measured"]}, percent),
                    "yes" if row["within"] else "no",
                ]
                for row in constant
            ],
        )
    if ahead:
        page.table(
            ["recipe", "tokens", "unforked, by (1 − h)^L", "measured", "how it was obtained"],
            [
                [
                    f"`{row['treatment']}`",
                    row["name"].removeprefix("unforked_at_"),
                    plain(row["predicted"]),
                    stated({**row, "value": row["measured"]}),
                    row["note"],
                ]
                for row in ahead
            ],
            caption="The paper's recipes recover GSM8K (answers of about 280 tokens) and less so answers of 795 tokens "
            "and of thousands. What the hazard measured here would mean at those lengths; a fork is not yet a wrong "
            "answer.",
            text_columns=(4,),
        )

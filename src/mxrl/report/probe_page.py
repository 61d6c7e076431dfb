"""The page of `mxrl probe`, from probe.json and nothing else: matrix and claims first, then each probe's own part.

    build_page(json.loads(Path("probe-dense/probe.json").read_text())).write("probe.html")

Each probe's part is `sections(page, result)` of report/probe_NAME.py.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mxrl.probes.claims import BORNE_OUT, CONTRADICTED, NOT_MEASURED, VERDICTS
from mxrl.probes.matrix import WHOLE, cell_of
from mxrl.report.demo import points
from mxrl.report.page import Page, percent, plain
from mxrl.report.probe_rows import stated

Data = Mapping[str, Any]
Cell = Mapping[str, Any]


def build_page(data: Data) -> Page:
    """The whole page. Raises KeyError where `data` is no probe.json of this version."""
    subject = data["subject"]
    page = Page(
        f"Which error breaks what: {subject['model']}",
        lead=f"{subject['architecture']}, {subject['parameters'] / 1e6:.4g} M parameters, {subject['layers']} decoder "
        f"blocks{_experts(subject)}, in {subject['dtype']}; prompts of {subject['task']}.",
        footer=f"Made by mxrl {data['versions']['mxrl']} on {data['created']}. Every number here is in `probe.json`.",
    )
    _short(page, data)
    _matrix(page, data)
    _claims(page, data)
    for name, result in data["results"].items():
        importlib.import_module(f"mxrl.report.probe_{name}").sections(page, result)
        _notes(page, result)
    _origin(page, data)
    return page


def _experts(subject: Data) -> str:
    return f", {subject['experts']} experts each" if subject["experts"] else ""


# ---- text ------------------------------------------------------------------------------------------------------------


def form_of(metric: str) -> Callable[[float | None], str]:
    """How a metric's effects are written: points of accuracy, percent of tokens, or a plain number."""
    if metric.endswith("accuracy_change"):
        return points
    return percent if metric == "topk_flip" else _digits


def _digits(value: float | None) -> str:
    """Three significant digits, and no more than four places: an interval's ends say how many count."""
    if value is None:
        return "–"
    return f"{value:.4f}" if 0 < abs(value) < 0.1 else f"{value:#.3g}".removesuffix(".")


def unit_of(metric: str) -> str:
    return "percentage points" if metric.endswith("accuracy_change") else ""


def interval(found: Mapping[str, Any] | None, metric: str) -> str:
    """ "0.0132 [0.0101, 0.0163]", or an en dash."""
    return stated(found, form_of(metric))


def tally(claims: Sequence[Data]) -> str:
    """ "5 borne out, 2 contradicted, 4 undecided, 1 not measured"."""
    counts = Counter(c["verdict"] for c in claims)
    return ", ".join(f"{counts[v]} {v}" for v in VERDICTS if counts[v])


def sentences(data: Data) -> list[str]:
    """What came out, a sentence for each failure: which components cause it, and which have no part in it."""
    table = data["matrix"]
    out = []
    for column in table["columns"]:
        cells = {row: cell_of(table, row, column["name"]) for row in table["rows"]}
        whole = cells.get(WHOLE)
        had = interval(whole and whole["effect"], column["metric"])
        by: dict[str, list[str]] = {}
        for row, cell in cells.items():
            if cell is not None and "says" in cell:
                by.setdefault(cell["verdict"], []).append(row)
        said = "; ".join(f"{verdict}: {', '.join(rows)}" for verdict, rows in by.items() if verdict != NOT_MEASURED)
        told = f" {said[0].upper()}{said[1:]}." if said else ""
        unit = unit_of(column["metric"])
        out.append(
            f"{column['name'].capitalize()} ({column['says']}): `{table['base']}` {had}{' ' + unit if unit else ''}."
            + told
        )
    return out


# ---- sections --------------------------------------------------------------------------------------------------------


def _short(page: Page, data: Data) -> None:
    page.section("In short")
    counts = Counter(c["verdict"] for c in data["claims"])
    page.facts({
        "probes": str(len(data["results"])),
        **({v: str(counts[v]) for v in VERDICTS if counts[v]} if data["claims"] else {}),
        "seconds": plain(sum(data["seconds"].values())),
    })  # fmt: skip
    page.text(*sentences(data))
    for why in data["skipped"].values():
        page.note(f"Left out: {why}.")


def _matrix(page: Page, data: Data) -> None:
    table = data["matrix"]
    columns = table["columns"]
    if not columns:
        return
    page.section("Component × failure")
    page.text(
        "Effects against the unquantized model on the same prompts, with 95 % intervals. A component is injected alone "
        f"into weights and activations, left out of `{table['base']}`, and replaced by Gaussian noise of its energy. "
        f"It causes a failure where alone it has more than {percent(table['margin'])} of the whole recipe's effect and "
        "leaving it out takes more than that away; both intervals must say so."
    )
    page.table(
        ["", *(c["name"] for c in columns)],
        [[row_name(table, row), *(_short_cell(cell_of(table, row, c["name"])) for c in columns)]
         for row in table["rows"]],
        caption="; ".join(f"{c['name']}: {c['says']}{in_unit(c['metric'])}" for c in columns) + ".",
    )  # fmt: skip
    _shares(page, table)
    for column in columns:
        _column(page, data, column)
    page.note(
        "Many cells are looked at: of 20 intervals without any effect one excludes 0 by chance. Components don't add "
        "up: the scale's and the grid's error point against each other, so that one alone can do more than all "
        "together, and a component can look harmless because another cancels it."
    )


def in_unit(metric: str) -> str:
    """ ", percentage points" where that is the unit."""
    unit = unit_of(metric)
    return f", {unit}" if unit else ""


def row_name(table: Data, row: str) -> str:
    """A row of the matrix as it is shown: the whole recipe with its name."""
    return f"{row}, {table['base']}" if row == WHOLE else row


def _short_cell(cell: Cell | None) -> str:
    if cell is None or cell["effect"] is None:
        return "–"
    return f"{interval(cell['effect'], cell['metric'])} · {cell['verdict']}"


def _shares(page: Page, table: Data) -> None:
    """Each row's effect as a share of the whole recipe's, where that one has an effect."""
    parts: dict[str, list[float]] = {}
    spread: dict[str, list[tuple[float, float]]] = {}
    rows = [row for row in table["rows"] if row != WHOLE]
    for column in table["columns"]:
        cells = [cell_of(table, row, column["name"]) for row in rows]
        if all(c is None or c["share"] is None for c in cells):
            continue
        whole = cell_of(table, WHOLE, column["name"])
        assert whole is not None and whole["effect"] is not None  # a share is of it
        size = whole["effect"]["value"]
        parts[column["name"]] = [_nan(c["share"] if c else None) for c in cells]
        spread[column["name"]] = [_bounds(c, size) for c in cells]
    if not parts:
        return
    page.bars(
        f"Share of the effect of {table['base']} that each component has alone, and each corrected recipe has left",
        rows,
        parts,
        stacked=False,
        intervals=spread,
        axis="1: as much as the whole recipe",
        explain="Shares of components need not add up to 1. A failure is left out where the whole recipe's interval "
        "includes no effect. Whiskers are the 95 % intervals of the effects.",
    )


def _bounds(cell: Cell | None, size: float) -> tuple[float, float]:
    if cell is None or cell["share"] is None or cell["effect"]["low"] is None:
        return (_nan(None), _nan(None))
    low, high = sorted((cell["effect"]["low"] / size, cell["effect"]["high"] / size))
    return (low, high)


def _nan(value: float | None) -> float:
    return float("nan") if value is None else value


def _column(page: Page, data: Data, column: Data) -> None:
    """One failure: every row with what decided it, and the paper's claim beside it."""
    table, metric = data["matrix"], column["metric"]
    rows, claimed = [], []
    for row in table["rows"]:
        cell = cell_of(table, row, column["name"])
        if cell is None:
            continue
        moved = cell.get("removed") or cell.get("gain")
        rows.append([
            row_name(table, row), interval(cell["effect"], metric), percent(cell.get("share")),
            interval(moved, metric), interval(cell.get("structure"), metric), cell["verdict"],
        ])  # fmt: skip
        claimed += [[row_name(table, row), *told] for told in _claimed(data, cell, column["name"])]
    page.table(
        ["", "effect alone", "share of the whole", "less without it", "more than noise", "verdict"],
        rows,
        caption=f"{column['name'].capitalize()}: {column['says']}{in_unit(metric)} [95 %]. Less without it: the whole "
        f"recipe's effect minus that with the component left out; of a correction, the plain recipe's minus its own. "
        f"More than noise: alone minus Gaussian noise of the same energy. {_paired(table, column['name'])}",
        text_columns=(5,),
    )
    if claimed:
        page.table(["", "this model", "the paper says"], claimed, text_columns=(1, 2))


def _paired(table: Data, column: str) -> str:
    cells = [c for c in table["cells"] if c["column"] == column]
    found = [c[k]["paired"] for c in cells for k in ("removed", "structure", "gain") if c.get(k)]
    if not found:
        return ""
    if all(found):
        return "Differences are paired over the same prompts."
    return "Differences whose values were not kept by prompt take the two intervals as independent."


def _claimed(data: Data, cell: Cell, column: str) -> list[list[str]]:
    """The paper's claims of this cell: verdict and claim of each."""
    component = cell["recipe"].removeprefix(data["matrix"]["base"]) if "recipe" in cell else cell["row"]
    found = [c for c in data["claims"] if c["failure"] == column and c["component"] == component]
    return [[c["verdict"], c["says"]] for c in found]


def _claims(page: Page, data: Data) -> None:
    if not data["claims"]:
        return
    page.section("What the paper says, and what this model says")
    page.text(
        "Statements of arXiv 2605.20402 in our words, each with the test that decides it here: "
        f"{tally(data['claims'])}. What one model contradicts, it contradicts for itself; the paper's models have 3 "
        "and 30 billion parameters."
    )
    page.table(
        ["verdict", "about", "number [95 %]", "claim; what decides it; detail"],
        [
            [c["verdict"], " × ".join(filter(None, (c["component"], c["failure"]))) or "–", interval(c, c["metric"]),
             "; ".join(filter(None, (c["says"], c["test"], c["detail"])))]
            for c in sorted(data["claims"], key=lambda c: VERDICTS.index(c["verdict"]))
        ],
        text_columns=(1, 3),
        caption=f"{BORNE_OUT}: the whole interval agrees; {CONTRADICTED}: the whole interval disagrees; undecided: it "
        f"straddles what decides; {NOT_MEASURED}: no probe here measures it. Accuracies in percentage points.",
    )  # fmt: skip


def _notes(page: Page, result: Data) -> None:
    for note in result["notes"]:
        page.note(note)


def _origin(page: Page, data: Data) -> None:
    page.section("Where the numbers come from")
    subject = data["subject"]
    rows = [["model", subject["model"]]]
    rows += [[f["name"], f"{f['bytes']:,} bytes, sha256 {f['sha256']}"] for f in data["files"]]
    for name, result in data["results"].items():
        settings = ", ".join(f"{k} {_setting(v)}" for k, v in result["settings"].items())
        about = result["subject"]
        rows.append([
            name,
            f"{data['seconds'][name]:g} s; {about['prompts']} prompts of {about['task']} (test split, seed "
            f"{about['seed']}), up to {about['max_new_tokens']} new tokens; {settings or 'no settings'}",
        ])  # fmt: skip
    rows += [
        ["device", f"{data['device']} ({data['machine']}), {data['threads']} threads, {subject['dtype']}"],
        ["versions", ", ".join(f"{k} {v}" for k, v in data["versions"].items())],
        ["commit", data["commit"] or "not known (an installed copy)"],
    ]
    page.table(["", ""], rows, text_columns=(1,))


def _setting(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)

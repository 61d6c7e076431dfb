"""`mxrl probe` in a terminal: the matrix and the claims as tables, the same cells as the page's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from mxrl.probes.matrix import cell_of
from mxrl.report.probe_page import in_unit, interval, row_name, tally


def print_probe(data: Mapping[str, Any], console: Console) -> None:
    """Component × failure with intervals and verdicts, then each claim of the paper with its verdict."""
    table = data["matrix"]
    if table["columns"]:
        shown = _table(f"{data['subject']['model']}, effects against the unquantized model [95 %]", "")
        for column in table["columns"]:
            shown.add_column(f"{column['name']}: {column['says']}{in_unit(column['metric'])}", overflow="fold")
        for row in table["rows"]:
            cells = [cell_of(table, row, column["name"]) for column in table["columns"]]
            shown.add_row(row_name(table, row), *map(_cell, cells))
        console.print(shown)
    if data["claims"]:
        shown = _table(f"arXiv 2605.20402 on this model: {tally(data['claims'])}", "verdict")
        shown.add_column("claim", overflow="fold")
        shown.add_column("number [95 %]", justify="right", no_wrap=True)
        for claim in data["claims"]:
            shown.add_row(claim["verdict"], claim["says"], interval(claim, claim["metric"]))
        console.print(shown)
    for why in data["skipped"].values():
        console.print(f"left out: {why}", markup=False, highlight=False, soft_wrap=True)


def _cell(cell: Mapping[str, Any] | None) -> str:
    if cell is None or cell["effect"] is None:
        return "–"
    return f"{interval(cell['effect'], cell['metric'])}\n{cell['verdict']}"


def _table(title: str, first: str) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )
    table.add_column(first, no_wrap=True)
    return table

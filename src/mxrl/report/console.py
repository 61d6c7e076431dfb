"""The figures of an analysis as tables in the terminal; the same columns as the page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich import progress as rich_progress
from rich.console import Console
from rich.table import Table

from mxrl.decompose import ErrorStats
from mxrl.report.summary import FIGURES
from mxrl.report.svg import plain
from mxrl.scan import PLAIN


def print_analysis(summary: Mapping[str, Any], console: Console) -> None:
    """Two tables: the first recipe by kind of layer, then every recipe over all of them."""
    main = summary["recipes"][0]
    table = _table(f"{summary['model']} · {main}", "kind", "tensors")
    for kind, entry in summary["kinds"].items():
        table.add_row(kind, str(entry["tensors"]), *_cells(entry["recipes"][main]))
    table.add_section()
    table.add_row("all", str(summary["tensors"]), *_cells(summary["total"][main]), style="bold")
    console.print(table)
    table = _table("All linear weights, by recipe", "recipe", "bits", "T/mxfp4")
    for name in sorted(summary["total"], key=lambda r: (r != PLAIN, r not in summary["recipes"])):
        entry = summary["total"][name]
        relative = "–" if entry["relative_to_mxfp4"] is None else f"{entry['relative_to_mxfp4']:.3f}"
        table.add_row(name, plain(entry["bits"]), relative, *_cells(entry))
    console.print(table)
    console.print(
        "[dim]excess: share of the squared error T beyond the floor, the error under the ideal scales m/q_max (no "
        "lower bound: a searched scale goes below it). D: deadzone. cos: scale against grid error. 2^δ: mean scale "
        "over ideal scale. mxfp4's ceil rule usually has a higher MSE than floor and even, but never clips.[/dim]"
    )


_SHOWN = tuple(c for c in FIGURES if c.short)


def _table(title: str, first: str, *more: str) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )
    table.add_column(first, overflow="fold")
    for name in (*more, *(c.short for c in _SHOWN)):
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _cells(entry: Mapping[str, Any]) -> list[str]:
    stats = ErrorStats.from_dict(dict(entry))
    return [c.cell(stats) for c in _SHOWN]


class Bar:
    """Progress on a terminal, one bar a phase; nothing where stderr is no terminal."""

    def __init__(self, console: Console) -> None:
        self._bar = rich_progress.Progress(
            rich_progress.TextColumn("{task.description}"),
            rich_progress.BarColumn(),
            rich_progress.TaskProgressColumn(),
            rich_progress.TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task: rich_progress.TaskID | None = None

    def __enter__(self) -> Bar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def start(self, phase: str, total: int) -> None:
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._task = self._bar.add_task(phase, total=total)

    def advance(self, amount: int) -> None:
        if self._task is not None:
            self._bar.advance(self._task, amount)

"""The figures of an analysis as tables in the terminal; the same columns as the page."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rich import box
from rich import progress as rich_progress
from rich.console import Console
from rich.table import Table

from mxrl.decompose import ErrorStats
from mxrl.report.summary import FIGURES, already_quantized
from mxrl.report.svg import plain
from mxrl.scan import PLAIN


def print_analysis(summary: Mapping[str, Any], console: Console) -> None:
    """Two tables: the first recipe by kind of layer, then every recipe over all of them."""
    if (lossy := already_quantized(summary)) and summary.get("analysis", "weights") == "weights":
        console.print(
            f"Already quantized: weights are stored as {'; '.join(lossy)}. What was lost then can't be told without "
            "the original (--against ORIGINAL). The tables are about quantizing the decoded values once more.",
            markup=False, highlight=False,
        )  # fmt: skip
    main = summary["recipes"][0]
    table = _table(f"{summary['model']} · {main}", "kind", "tensors")
    for kind, entry in summary["kinds"].items():
        table.add_row(kind, str(entry["tensors"]), *_cells(entry["recipes"][main]))
    table.add_section()
    table.add_row("all", str(summary["tensors"]), *_cells(summary["total"][main]), style="bold")
    console.print(table)
    what = "layer inputs" if summary.get("analysis") == "activations" else "linear weights"
    table = _table(f"All {what}, by recipe", "recipe", "bits", "T/mxfp4")
    for name in sorted(summary["total"], key=lambda r: (r != PLAIN, r not in summary["recipes"])):
        entry = summary["total"][name]
        relative = "–" if entry["relative_to_mxfp4"] is None else f"{entry['relative_to_mxfp4']:.3f}"
        table.add_row(name, plain(entry["bits"]), relative, *_cells(entry))
    console.print(table)
    if (found := summary.get("recommendation")) and "withheld" not in found:
        console.print(recommended(found), markup=False, highlight=False)
    console.print(
        "[dim]excess: share of the squared error T beyond the floor, the error under the ideal scales m/q_max (no "
        "lower bound: a searched scale goes below it). D: deadzone. cos: scale against grid error. 2^δ: mean scale "
        "over ideal scale. mxfp4's ceil rule usually has a higher MSE than floor and even, but never clips.[/dim]"
    )


def recommended(found: Mapping[str, Any]) -> str:
    """One sentence: which recipe for which kinds of layer."""
    by: dict[str, list[str]] = {}
    for kind, entry in found["kinds"].items():
        by.setdefault(entry["recipe"], []).append(kind)
    choice = ", ".join(f"{r} for {'all' if len(by) == 1 else ', '.join(kinds)}" for r, kinds in by.items())
    return f"Least error within {found['budget']:g} bits an element: {choice}; rel. MSE {plain(found['rel_mse'])}."


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
    """Progress in bytes, with the rate and the time left: a bar a phase on a terminal, else a line now and then."""

    EVERY = 30.0  # seconds between the lines

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = rich_progress.Progress(
            rich_progress.TextColumn("{task.description}"),
            rich_progress.BarColumn(),
            *self._columns(),
            rich_progress.TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task: rich_progress.TaskID | None = None
        self._phase, self._total, self._done = "", 0.0, 0.0
        self._began = self._said = time.monotonic()

    def __enter__(self) -> Bar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def start(self, phase: str, total: float) -> None:
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._task = self._bar.add_task(phase, total=total)
        self._phase, self._total, self._done = phase, total, 0.0
        self._began = self._said = time.monotonic()

    def advance(self, amount: float) -> None:
        if self._task is not None:
            self._bar.advance(self._task, amount)
        self._done += amount
        now = time.monotonic()
        if not self._console.is_terminal and now - self._said >= self.EVERY and self._done:
            self._said = now
            rate = self._done / (now - self._began)
            left = max(0.0, self._total - self._done) / rate
            self.note(f"{self._phase}: {self._told(self._done, self._total, rate)}, {left:.0f} s left")

    @staticmethod
    def _columns() -> tuple[rich_progress.ProgressColumn, ...]:
        """What stands between the bar and the time left."""
        return (
            rich_progress.TaskProgressColumn(),
            rich_progress.DownloadColumn(),
            rich_progress.TransferSpeedColumn(),
        )

    @staticmethod
    def _told(done: float, total: float, rate: float) -> str:
        """The same in a line."""
        return f"{done / 1e9:.1f} of {total / 1e9:.1f} GB, {rate / 1e9:.2f} GB/s"

    def note(self, text: str) -> None:
        """A line of its own on stderr."""
        self._console.print(f"mxrl: {text}", markup=False, highlight=False, soft_wrap=True)

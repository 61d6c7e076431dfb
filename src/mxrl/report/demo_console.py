"""`mxrl demo` in a terminal: the phase it is in with an estimate, on stderr, and the result as a short table."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from mxrl.report.demo import half_width, interval
from mxrl.report.svg import percent, plain


class Phases:
    """A demo.Display: one live line on a terminal, elsewhere a line for each phase that has ended.

    The estimate starts from the phases' expected seconds and is scaled by how long the finished ones took.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(24),
            TimeElapsedColumn(),
            _Left(self),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("loading torch, transformers and trl", total=None)
        self._costs: list[float] = []
        self._at = 0
        self._title = ""
        self._share = 0.0
        self._spent = self._expected = 0.0  # seconds of the phases that were run, and what had been expected of them
        self._began = 0.0

    def __enter__(self) -> Phases:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def plan(self, costs: Sequence[float]) -> None:
        self._costs = list(costs)
        self._bar.update(self._task, total=sum(costs))
        if not self.console.is_terminal:
            self._say(f"{len(costs)} phases, {_clock(self.left())} on two idle cores")

    def begin(self, title: str) -> None:
        self._title, self._share, self._began = title, 0.0, time.monotonic()
        self._bar.update(self._task, description=f"{self._at + 1}/{len(self._costs)} {title}")

    def within(self, share: float) -> None:
        self._share = share
        self._bar.update(self._task, completed=sum(self._costs[: self._at]) + share * self._costs[self._at])

    def end(self, seconds: float, kept: bool) -> None:
        if not kept:
            self._spent += seconds
            self._expected += self._costs[self._at]
        self._at += 1
        self._share = 0.0
        self._bar.update(self._task, completed=sum(self._costs[: self._at]))
        if not self.console.is_terminal:
            took = "kept from before" if kept else f"{seconds:.0f} s"
            self._say(f"{self._at}/{len(self._costs)} {self._title}: {took}; {_clock(self.left())} left")

    def left(self) -> float:
        """Seconds that the phases not yet ended will take, by what the ended ones took."""
        if not self._costs:
            return 0.0
        rate = self._spent / self._expected if self._expected else 1.0
        later = sum(self._costs[self._at + 1 :]) * rate
        if self._at == len(self._costs):
            return 0.0
        expected = self._costs[self._at] * rate
        running = time.monotonic() - self._began if self._began else 0.0
        this = running / self._share - running if self._share > 0.1 else max(0.0, expected - running)
        return later + this

    def _say(self, text: str) -> None:
        self.console.print(f"mxrl demo: {text}", markup=False, highlight=False, soft_wrap=True)


class _Left(ProgressColumn):
    max_refresh = 0.5

    def __init__(self, phases: Phases) -> None:
        super().__init__()
        self.phases = phases

    def render(self, task: Task) -> Text:
        return Text(f"about {_clock(self.phases.left())} left" if task.total else "", style="progress.remaining")


def _clock(seconds: float) -> str:
    return f"{int(seconds + 0.5) // 60}:{int(seconds + 0.5) % 60:02d}"


def print_demo(demo: Mapping[str, Any], console: Console) -> None:
    """The accuracies with their intervals, beside the weights' error and the model card's figure."""
    settings, card = demo["settings"], demo["card"]
    base, plain_name = settings["evaluated"][:2]
    errors = next(iter(demo["weights"].values()), {"total": {}})["total"]
    table = Table(
        title=f"{settings['model']}, greedy, {settings['problems']} problems",
        title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False,
    )  # fmt: skip
    table.add_column("recipe", no_wrap=True)
    heads = ["rel. MSE", "accuracy", f"− {base}, pp [95 %]", *([f"card, n={card['bf16']['n']}"] if card else [])]
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for recipe, found in demo["accuracy"].items():
        entry = (card["bf16"] if recipe == base else card["recipes"].get(recipe)) if card else None
        cells = [
            plain(errors[recipe]["rel_mse"]) if recipe in errors else "–",
            percent(found["accuracy"]),
            interval(demo["minus_baseline"].get(recipe)),
        ]
        if card:
            cells.append("–" if entry is None else percent(entry["accuracy"]))
        table.add_row(recipe, *cells)
    console.print(table)
    runs = [
        f"{recipe} gap {plain(sum(r['gap/mean_abs'] or 0.0 for r in run['rows']) / len(run['rows']))}"
        for recipe, run in demo["grpo"].items()
    ]
    if runs:
        console.print(f"GRPO, {settings['steps']} steps: {', '.join(runs)} (mean |Δ logp|)", highlight=False)
    console.print(
        f"[dim]An interval is up to ±{half_width(demo) * 100:.1f} pp at {settings['problems']} problems: "
        f"the loss under {plain_name} shows, the order of the corrections is the model card's to tell.[/dim]",
        highlight=False,
    )

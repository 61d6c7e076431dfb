"""The phases of a long command in a terminal: the one it is in, with an estimate, on stderr."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text


class Phases:
    """A phases.Display: one live line on a terminal, elsewhere a line for each phase that has ended.

    The estimate starts from the phases' expected seconds and is scaled by how long the finished ones took.
    verb: the command's. loading: what happens before the first phase.
    """

    def __init__(self, console: Console, verb: str, loading: str) -> None:
        self.console = console
        self.verb = verb
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
        self._task = self._bar.add_task(loading, total=None)
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
            self._say(f"{len(costs)} phase{'s' if len(costs) > 1 else ''}, {clock(self.left())} on two idle cores")

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
            self._say(f"{self._at}/{len(self._costs)} {self._title}: {took}; {clock(self.left())} left")

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
        self.console.print(f"mxrl {self.verb}: {text}", markup=False, highlight=False, soft_wrap=True)


class _Left(ProgressColumn):
    max_refresh = 0.5

    def __init__(self, phases: Phases) -> None:
        super().__init__()
        self.phases = phases

    def render(self, task: Task) -> Text:
        return Text(f"about {clock(self.phases.left())} left" if task.total else "", style="progress.remaining")


def clock(seconds: float) -> str:
    """Minutes and seconds, as 2:05."""
    return f"{int(seconds + 0.5) // 60}:{int(seconds + 0.5) % 60:02d}"

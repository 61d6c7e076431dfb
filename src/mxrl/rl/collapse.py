"""When a run's policy has collapsed: what ends a run early, beside a loss that is no number.

What goes by the name in reports on GRPO is of three kinds, and this is how each is seen in what a run logs anyway:

    reward collapse     rewards fall to a fraction of what they were, and stay there: rule 1
    entropy collapse    the policy has become deterministic while still wrong, so that all samples of a prompt get one
                        reward, all advantages are 0, and nothing is learned any more: rule 2
    length collapse     every completion is empty, or runs into the limit: no answer is right, so rule 1 or 2 sees it

A *window* is 10 rollouts, or as many as hold 256 prompts if those are more.

1.  Accuracy over the last window is below half of the best window's, below the first window's too, and the fall is one
    that chance doesn't make: more than 4·√(2p(1 − p)/n), the best window's accuracy being p and its prompts n.
2.  In none of the last window's rollouts did a group of samples have two different rewards, although earlier ones did,
    and less than 95 % of the answers are right. (With more the task is solved, which is no collapse.)

Low entropy alone is none: a healthy run ends with little of it. Nor is a policy that training has made a little worse,
or a task that the policy never got anything of. Both rules are blind to what happens within a window, on purpose: a dip
that mends is no collapse. Sources: DAPO (arXiv 2503.14476) on entropy collapse and groups of equal rewards.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

ROLLOUTS, PROMPTS = 10, 256  # a window has at least so many of each
SHARE = 0.5  # of the best window's accuracy
SOLVED = 0.95  # accuracy from which equal rewards mean success
ERRORS = 4  # standard errors of the difference of two windows


class CollapsedError(RuntimeError):
    """The policy has collapsed; the message says at which step, by which numbers, and which checkpoint is kept."""


@dataclass
class Watch:
    """The accuracies of a run's rollouts, as they come: `add` rows of metrics.jsonl, ask `verdict`.

    prompts: of a rollout.
    """

    prompts: int
    rows: list[Mapping[str, Any]] = field(default_factory=list)  # one for each rollout, the first step trained on it
    best: tuple[float, int] = (-1.0, 0)  # the best window's accuracy, and the step at its end
    mixed: bool = False  # whether any group of samples before the last window has had two different rewards

    def __post_init__(self) -> None:
        self.window = max(ROLLOUTS, math.ceil(PROMPTS / self.prompts))

    def add(self, row: Mapping[str, Any]) -> None:
        """One row of metrics.jsonl. Rows that train on a rollout once more, or have no accuracy, don't count."""
        known = self.rows and row.get("rollout") == self.rows[-1]["rollout"]
        if known or row.get("rollout") is None or row.get("accuracy") is None:
            return
        self.rows.append(row)
        if len(self.rows) >= self.window:
            self.best = max(self.best, (self._mean(self.rows[-self.window :]), int(row["step"])))
        if len(self.rows) > self.window:
            self.mixed = self.mixed or not _uniform(self.rows[-self.window - 1])

    def extend(self, rows: Iterable[Mapping[str, Any]]) -> Watch:
        for row in rows:
            self.add(row)
        return self

    def level(self, step: int) -> float:
        """Mean accuracy of the window that ends with this optimizer step (of a shorter one at a run's start)."""
        return self._mean([row for row in self.rows if row["step"] <= step][-self.window :])

    def verdict(self) -> str | None:
        """Why the policy counts as collapsed after the rollouts so far, in one line; None where it doesn't."""
        if len(self.rows) <= self.window:
            return None
        last, first = self.rows[-self.window :], self._mean(self.rows[: self.window])
        now, (best, at) = self._mean(last), self.best
        chance = ERRORS * math.sqrt(2 * best * (1 - best) / (self.window * self.prompts))
        if now < SHARE * best and now < first and best - now > chance:
            why = (
                f"accuracy over the last {self.window} rollouts is {now:.3g}, after {first:.3g} over the first "
                f"{self.window} and {best:.3g} over the best (to step {at})"
            )
        elif self.mixed and all(map(_uniform, last)) and now < SOLVED:
            why = (
                f"in the last {self.window} rollouts all samples of a prompt had one reward, {now:.3g} on average: "
                "there is nothing left to learn from"
            )
        else:
            return None
        return f"step {last[-1]['step']}: the policy has collapsed: {why} ({_state(last[-1])})"

    @staticmethod
    def _mean(rows: list[Mapping[str, Any]]) -> float:
        return fmean(row["accuracy"] for row in rows) if rows else 0.0


def _uniform(row: Mapping[str, Any]) -> bool:
    """Whether in no group of this rollout two samples had different rewards."""
    return (row.get("frac_reward_zero_std") or 0.0) > 1 - 1e-6


def _state(row: Mapping[str, Any]) -> str:
    """What else a reader wants to know of the last rollout."""
    names = {"entropy": "entropy", "completions/mean_length": "mean length",
             "completions/clipped_ratio": "cut off", "gap/mean_abs": "mean |Δ logp|"}  # fmt: skip
    return ", ".join(f"{word} {row[name]:.3g}" for name, word in names.items() if row.get(name) is not None)

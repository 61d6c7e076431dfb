"""What a training step says about itself: how long each phase took, and the numbers of the rollout it learns from."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from mxrl.rl.gap import GapStats

# The trainer's metrics that belong to a rollout; the others belong to an optimizer step.
ROLLOUT_METRICS = ("reward", "accuracy", "completions/", "group/", "frac_reward_zero_std", "sampling/", "style/")


class StepRecord:
    """Collects between two logs; `metrics` gives one step's row and starts the next.

    rollout: metrics of the last rollout. A step that reuses its samples repeats them, so that every row is whole;
    the metric `rollout` says which rollout it was.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.rollout: dict[str, float] = {}
        self.carried: dict[str, float] = {}  # the trainer's metrics of that rollout
        self.gap = GapStats()
        self.fresh = False  # whether there was a rollout since the last log
        self._tokens = 0.0  # of all rollouts since then
        self.seconds: dict[str, float] = {}
        self._entropy = torch.zeros(2, dtype=torch.float64, device=device)  # nats, tokens
        self._inner: list[float] = []  # for each open phase, the time spent in phases inside it
        self._last = time.perf_counter()

    def drawn(self, metrics: dict[str, float]) -> None:
        """A rollout's own metrics, `rollout/tokens` among them."""
        self.rollout = metrics
        self._tokens += metrics["rollout/tokens"]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the block's wall time, less that of phases inside it, to `time/<name>` of the next row."""
        before = time.perf_counter()
        self._inner.append(0.0)
        try:
            yield
        finally:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            spent = time.perf_counter() - before
            self.seconds[name] = self.seconds.get(name, 0.0) + spent - self._inner.pop()
            if self._inner:
                self._inner[-1] += spent

    def entropies(self, values: Tensor, mask: Tensor) -> None:
        """Those of a pass's tokens, in nats, [B, T] both; they count until the next `entropy`."""
        self._entropy += torch.stack([(values * mask).double().sum(), mask.double().sum()])

    def entropy(self, summed: Callable[[Tensor], Tensor]) -> float:
        """Nats a token, of all tokens since the last call; summed: the sum over all processes."""
        nats, tokens = summed(self._entropy).tolist()
        self._entropy = torch.zeros_like(self._entropy)
        return nats / max(tokens, 1.0)

    def slowest(self, processes: Sequence[Mapping[str, float]]) -> None:
        """Several processes' times, of which the longest counts; how long the first done waits for the last rollout."""
        self.seconds = {name: max(p.get(name, 0.0) for p in processes) for name in processes[0]}
        if "rollout" in self.seconds:
            self.seconds["rollout_wait"] = self.seconds["rollout"] - min(p["rollout"] for p in processes)

    def metrics(self, trainer: Mapping[str, Sequence[float]]) -> dict[str, float]:
        """This step's row; trainer: the lists of values that the trainer will average under its own names."""
        now = time.perf_counter()
        self.seconds["step"], self._last = now - self._last, now
        out = {f"time/{name}": value for name, value in self.seconds.items()}
        if self.fresh:
            self.rollout.update(self.gap.metrics())
            self.carried = {
                name: sum(values) / len(values) for name, values in trainer.items() if name.startswith(ROLLOUT_METRICS)
            }
            if self.seconds.get("rollout"):
                out["speed/rollout_tokens_per_second"] = self._tokens / self.seconds["rollout"]
            out["speed/tokens_per_second"] = self._tokens / self.seconds["step"]
        else:
            out.update(self.carried)
        self.seconds, self.gap, self.fresh, self._tokens = {}, GapStats(), False, 0.0
        return {**self.rollout, **out}

"""What watches a run while it goes: its metrics and evaluations as lines in files, and how it is asked to stop.

Of several processes the first one writes; all of them evaluate, and stop after the same step.
"""

from __future__ import annotations

import json
import math
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from mxrl.rl import ranks
from mxrl.rl.config import TrainConfig
from mxrl.rl.evaluate import Evaluation


class Keeper(TrainerCallback):
    """Writes metrics and evaluations as they come, and ends the run when it was asked to."""

    def __init__(self, config: TrainConfig, out: Path, phase: Callable, measure: Callable[[], Evaluation] | None):
        self.config, self.out, self.phase, self.measure = config, out, phase, measure
        self.stop = False
        self.evaluated = -1

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 0:
            self.evaluate(0)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if not logs or "loss" not in logs or ranks.rank():
            return
        _append(self.out / "metrics.jsonl", {"step": state.global_step, **logs})
        if state.global_step % 10 == 0 or state.global_step <= 3:
            shown = ("reward", "completions/mean_length", "entropy", "gap/mean_abs", "grad_norm", "time/step")
            numbers = "  ".join(
                f"{name.split('/')[-1]} {logs[name]:.4g}" for name in shown if logs.get(name) is not None
            )
            print(f"step {state.global_step}/{state.max_steps}  {numbers}", file=sys.stderr, flush=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        every = self.config.eval_every * self.config.updates
        if every and state.global_step % every == 0:
            self.evaluate(state.global_step)
        if ranks.any_of(self.stop):
            control.should_training_stop = True
            control.should_save = self.config.save_every > 0

    def evaluate(self, step: int) -> None:
        """Greedy accuracy of the quantized policy without noise, once a step."""
        if self.measure is None or self.evaluated == step:
            return
        self.evaluated = step
        with self.phase("eval"):
            result = self.measure()
        if ranks.rank():
            return
        right = "".join("1" if score >= 1 else "0" for score in result.scores)
        groups = {str(g): {"accuracy": a, "n": n} for g, (a, n) in result.by_group().items()}
        row = {
            "step": step,
            "accuracy": result.accuracy,
            "n": len(result.scores),
            "mean_tokens": result.mean_tokens,
            "truncated": result.truncated,
            "entropy_per_token": result.entropy,
            "styles": result.styles,
            "by_group": groups,
            "right": right,
        }
        _append(self.out / "evals.jsonl", row)
        print(f"step {step}  greedy accuracy {result.accuracy:.4f} of {len(right)}", file=sys.stderr, flush=True)


@contextmanager
def stop_signals(keeper: Keeper) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM asks the run to stop after its step; the second one interrupts."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: Any) -> None:
        if keeper.stop:
            raise KeyboardInterrupt
        keeper.stop = True
        if ranks.rank() == 0:
            print("stopping after this step (once more: at once)", file=sys.stderr, flush=True)

    former = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _append(path: Path, row: dict[str, Any]) -> None:
    clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
    with path.open("a") as file:
        file.write(json.dumps(clean) + "\n")

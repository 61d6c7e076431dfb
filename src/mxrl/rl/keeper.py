"""What watches a run while it goes: its metrics and evaluations as lines in files, and how it is asked to stop.

Of several processes the first one writes; all of them evaluate, and stop after the same step.
"""

from __future__ import annotations

import json
import math
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from mxrl.integrations.trl_shards import complete_checkpoints, step_of
from mxrl.rl import ranks
from mxrl.rl.collapse import Watch
from mxrl.rl.config import TrainConfig
from mxrl.rl.evaluate import Evaluation
from mxrl.rl.folder import CHECKPOINTS, EVALS, METRICS

# what a row of evals.jsonl has of an Evaluation, of the greedy completions and of the sampled ones
GREEDY = ("accuracy", "n", "mean_tokens", "truncated", "entropy_per_token", "styles", "by_group")
SAMPLED = ("samples", "accuracy", "entropy_per_token", "mean_tokens", "truncated", "distinct", "scores")


class Keeper(TrainerCallback):
    """Writes metrics and evaluations as they come, and ends the run when it was asked to, or the policy has collapsed.

    measure: (completions a problem, or 0 for one greedy completion) -> Evaluation; None: the run evaluates nothing.
    rows, evals: the lines of metrics.jsonl and evals.jsonl that the folder has already.
    `collapsed` is the reason, once there is one. The best checkpoint by the rollouts' accuracy up to it is kept from
    the trainer's rotation, since the last one may be of a policy that was about to collapse.
    """

    def __init__(
        self,
        config: TrainConfig,
        out: Path,
        phase: Callable,
        measure: Callable[[int], Evaluation] | None,
        rows: Iterable[dict[str, Any]] = (),
        evals: Iterable[dict[str, Any]] = (),
    ):
        self.config, self.out, self.phase, self.measure = config, out, phase, measure
        self.stop = False
        self.collapsed = ""
        self.watch = Watch(config.prompts_per_step).extend(rows)
        self.evaluated = max((row["step"] for row in evals), default=-1)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._keep_good(state)
        if state.global_step == 0:
            self.evaluate(0)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if not logs or "loss" not in logs:
            return
        self.watch.add({"step": state.global_step, **logs})
        if self.config.stop_collapsed:
            self.collapsed = ranks.on_first(self.watch.verdict) or ""
        if self.collapsed:
            control.should_training_stop, control.should_save = True, False
        if ranks.rank():
            return
        _append(self.out / METRICS, {"step": state.global_step, **logs})
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

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._keep_good(state)

    def checkpoints(self) -> list[Path]:
        """The complete ones, oldest first."""
        return complete_checkpoints(self.out / CHECKPOINTS)

    def good(self) -> list[Path]:
        """The checkpoint whose last rollouts were the most accurate, the later one of two; empty without any."""
        found = self.checkpoints()
        best = max(enumerate(found), key=lambda at: (self.watch.level(step_of(at[1])), at[0]), default=None)
        return [best[1]] if best else []

    def _keep_good(self, state: Any) -> None:
        if self.config.stop_collapsed:
            for path in self.good():
                state.best_model_checkpoint = str(path)  # what transformers' rotation leaves alone

    def evaluate(self, step: int) -> None:
        """Greedy accuracy of the quantized policy without noise, once a step; sampled too before and after the run."""
        if self.measure is None or self.evaluated == step:
            return
        self.evaluated = step
        ends = step in (0, self.config.steps * self.config.updates) or self.collapsed
        samples = self.config.eval_samples if ends else 0
        with self.phase("eval"):
            greedy = self.measure(0)
            sampled = self.measure(samples) if samples else None
        if ranks.rank():
            return
        right = "".join("1" if score >= 1 else "0" for score in greedy.scores)
        row = {"step": step, **_named(greedy, GREEDY), "right": right}
        line = f"step {step}  greedy accuracy {greedy.accuracy:.4f} of {len(right)}"
        if sampled is not None:
            row["sampled"] = _named(sampled, SAMPLED)
            line += f", sampled {sampled.accuracy:.4f} ({samples} a problem)"
        _append(self.out / EVALS, row)
        print(line, file=sys.stderr, flush=True)


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


def _named(result: Evaluation, names: tuple[str, ...]) -> dict[str, Any]:
    values = result.to_dict()
    return {name: values[name] for name in names}


def _append(path: Path, row: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(_finite(row)) + "\n")


def _finite(value: Any) -> Any:
    """Without NaN and infinity, which JSON doesn't have: None."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value

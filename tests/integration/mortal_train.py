"""Runs that are killed and resumed until they end, for test_train_kill.py; prints what happened as one JSON line.

    python tests/integration/mortal_train.py FOLDER

Imports everything once, then forks a child for each attempt. A child kills itself (SIGKILL, so nothing is cleaned up)
at the n-th event of a kind, or its parent does so after some milliseconds. Kinds, from the audit events of Python:

    checkpoint   something below checkpoints/ is opened for writing, renamed or deleted
    log          metrics.jsonl or evals.jsonl is opened for writing, or replaced
    evaluation   a batch of an evaluation is to be judged
    end          the model or the summary is being written, after the last step
    time         any moment

Which kind, which event and which millisecond come from random.Random(seed). What a forked child computes is what any
other process would: it starts from the same state every time.
"""

import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tiny_grpo import digits

import mxrl.rl.train as module
from mxrl.rl.config import TrainConfig
from mxrl.rl.policy import build_policy, char_tokenizer, save_policy
from mxrl.rl.tasks import Task, get_task

PROBLEMS = 9  # held out: another number than a rollout has completions, so that rewards tell the two apart
OPTIONS = {
    "recipe": "mxfp4+mbs+of+aqn", "steps": 9, "prompts_per_step": 2, "samples_per_prompt": 4, "max_new_tokens": 5,
    "lr": 1e-3, "device": "cpu", "eval_problems": PROBLEMS, "eval_every": 3, "eval_samples": 2, "save_every": 2,
    "monitor_every": 4, "seed": 3, "updates_per_rollout": 2,
}  # fmt: skip
MOST = {"checkpoint": 40, "log": 12, "evaluation": 3, "end": 9}  # of which event of a kind a child may die
KILLS = ("checkpoint", "log", "evaluation", "time", "checkpoint", "time", "evaluation", "end", "end")
SECONDS = 1.5  # within which a child that dies at any moment does so


def kind_of(out: Path, event: str, args: tuple) -> str | None:
    """The kind of an audit event that changes the run's folder; None for any other event."""
    changes = {"os.rename": 1, "os.remove": 0, "os.rmdir": 0, "os.mkdir": 0}
    if event == "open":
        changes = {"open": 0} if args[2] & (os.O_WRONLY | os.O_RDWR) else {}
    if event not in changes or not str(args[changes[event]]).startswith(f"{out}/"):
        return None
    inside = str(args[changes[event]]).removeprefix(f"{out}/")
    if inside.startswith("checkpoints/"):
        return "checkpoint"
    if "model" in inside or "summary" in inside:
        return "end"
    return "log" if "jsonl" in inside else None


def train(config: TrainConfig, kind: str | None = None, count: int = 0) -> None:
    """Until the end, or until the count-th event of this kind."""
    left, out = [count], Path(config.out)

    def happened(what: str | None) -> None:
        if what is not None and what == kind:
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)

    def reward(completions, answer, **columns):
        if len(completions) % PROBLEMS == 0:
            happened("evaluation")
        return digits(completions)

    sys.addaudithook(lambda event, args: happened(kind_of(out, event, args)))
    chain = get_task("chain")
    module.get_task = lambda name: Task("chain", chain.load, reward, chain.options)
    module.train(config)


def killed(work: Callable[[], None], seconds: float | None = None) -> bool:
    """Do it in a child; whether that was killed. It is an error if it ended in any way but by that or by success."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(pid, signal.SIGKILL)  # one that has ended is a zombie until it is waited for
    status = os.waitpid(pid, 0)[1]
    if status not in (0, signal.SIGKILL):
        sys.exit(f"a child ended with status {status}")
    return status == signal.SIGKILL


def main(folder: Path) -> None:
    # all of torch's work is done in children: its thread pool does not survive a fork
    policy = str(folder / "policy")
    killed(lambda: save_policy(build_policy("dense", size="tiny", seed=0), char_tokenizer(), policy))
    killed(lambda: train(TrainConfig(out=str(folder / "straight"), model=policy, **OPTIONS)))
    attempts = []
    for seed in range(2):
        draw = random.Random(seed)
        config = TrainConfig(out=str(folder / f"killed-{seed}"), model=policy, **OPTIONS)
        for kind in (*draw.sample(KILLS[:-2], len(KILLS) - 2), *KILLS[-2:]):
            count, seconds = draw.randint(1, MOST.get(kind, 1)), draw.uniform(0, SECONDS) if kind == "time" else None
            died = killed(partial(train, config, kind, count), seconds)
            saved = sorted(p.name for p in Path(config.out).glob("checkpoints/checkpoint-*"))
            attempts.append({"seed": seed, "kind": kind, "died": died, "checkpoints": saved})
        killed(partial(train, config))
    print(json.dumps(attempts))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

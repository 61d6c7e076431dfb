"""Does a run of the 0.5 B model that is killed and resumed go where an undisturbed one goes?

    python experiments/gsm8k_qwen05b/resume.py --devices cuda:0,cuda:1 --out out/gsm8k/resume

Two short runs of one configuration: `straight`, and `killed`, which gets SIGKILL twice, at a random moment of a random
step, and is started anew by the same command. Of every step's numbers but times, the largest difference goes to
OUT/resume.json. Where there is one, a third run, `again`, tells whether this machine repeats itself at all. On GPUs the
first two run side by side; on a CPU, whose memory may not hold both, one after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from mxrl.report.files import write_atomically
from mxrl.report.runs import read_run
from mxrl.rl.config import METRICS
from mxrl.rl.folder import read_rows

WORK = Path("out/gsm8k")
TIMES = ("time/", "speed/", "step_time")
KILLS = 2
Running = dict[str, "subprocess.Popen[bytes]"]  # by the run's name
SHOWN = ("reward", "grad_norm", "completions/mean_length")  # step by step, in the result


def start(name: str, device: str, args: argparse.Namespace) -> subprocess.Popen[bytes]:
    options: dict[str, Any] = {
        "recipe": args.recipe, "model": args.model, "task": "gsm8k", "steps": args.steps, "seed": 0,
        "task-options": json.dumps({"path": str(args.data)}), "prompts-per-step": args.prompts,
        "micro-batch": args.micro_batch, "lr": 1e-5, "max-new-tokens": args.tokens, "eval-problems": 0,
        "monitor-every": 0, "save-every": args.save_every, "save-model": "false",
        "deterministic": args.deterministic, "device": device.partition(":")[0], "out": args.out / name,
    }  # fmt: skip
    env = dict(os.environ)
    if device.startswith("cuda:"):
        env["CUDA_VISIBLE_DEVICES"] = device.partition(":")[2]
    pairs = [text for key, value in options.items() for text in (f"--{key}", str(value))]
    command = [sys.executable, "-m", "mxrl", "train", *pairs]
    with (args.out / f"{name}.txt").open("ab") as log:
        return subprocess.Popen(command, env=env, stdout=log, stderr=log)


def logged(out: Path) -> int:
    """Whole lines of a run's log so far: a step's last may be in the writing."""
    file = out / METRICS
    return file.read_bytes().count(b"\n") if file.is_file() else 0


def differences(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> dict[str, float]:
    """Largest |a − b| over the steps, by the column, of those that differ; NaN where only one has a number."""
    found: dict[str, float] = {}
    for x, y in zip(a, b, strict=True):
        for name in sorted(x.keys() | y.keys()):
            if name.startswith(TIMES) or x.get(name) == y.get(name):
                continue
            p, q = x.get(name), y.get(name)
            known = isinstance(p, int | float) and isinstance(q, int | float)
            found[name] = max(found.get(name, 0.0), abs(p - q)) if known else float("nan")  # type: ignore[operator]
    return found


def kill(running: Running, device: str, args: argparse.Namespace, chance: random.Random) -> list[int]:
    """`killed`, up to its last start; how many steps had been logged at each kill."""
    out, at = args.out / "killed", []
    for steps in sorted(chance.sample(range(args.save_every, args.steps), KILLS)):
        process = running["killed"] = start("killed", device, args)
        begin = time.monotonic()
        while logged(out) < steps and process.poll() is None:
            time.sleep(0.05)
        if process.poll() is None:
            time.sleep(chance.uniform(0, 0.1) * (time.monotonic() - begin))  # somewhere in the step or the checkpoint
            process.send_signal(signal.SIGKILL)
        if process.wait() != -signal.SIGKILL:
            sys.exit(f"resume.py: `killed` ended with {process.returncode} by itself; see {args.out / 'killed.txt'}")
        at.append(logged(out))
        print(f"killed with {at[-1]} steps logged, {time.monotonic() - begin:.0f} s after its start", flush=True)
    running["killed"] = start("killed", device, args)
    return at


def wait(running: Running, args: argparse.Namespace) -> None:
    for name, process in running.items():
        if process.wait():
            sys.exit(f"resume.py: `{name}` ended with {process.returncode}; see {args.out / f'{name}.txt'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(WORK / "Qwen2.5-Coder-0.5B-Instruct"))
    parser.add_argument("--data", default=WORK / "{split}.jsonl")
    parser.add_argument("--recipe", default="mxfp4+mbs+of+aqn")
    parser.add_argument("--devices", default="cuda:0", help="cuda:0,cuda:1, or cpu")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--save-every", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=300, help="new ones at most, of a completion")
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    parser.add_argument("--deterministic", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--out", type=Path, default=WORK / "resume")
    args = parser.parse_args()
    if args.steps - args.save_every < KILLS:
        parser.error(f"--steps {args.steps}: at least {args.save_every + KILLS}, for {KILLS} kills after a checkpoint")
    if args.out.exists():
        parser.error(f"--out {args.out}: is there already; its runs would go on instead of starting")
    args.out.mkdir(parents=True)
    devices = args.devices.split(",")
    running = {"straight": start("straight", devices[0], args)}
    try:
        if devices == ["cpu"]:
            wait(running, args)
        kills = kill(running, devices[-1], args, random.Random(args.seed))
        wait(running, args)
        if differences(*(read_rows(args.out / name / METRICS) for name in ("straight", "killed"))):
            running["again"] = start("again", devices[-1], args)
            wait(running, args)
    finally:
        for process in running.values():
            process.kill()
    rows = {name: read_rows(args.out / name / METRICS) for name in running}
    found = {
        "recipe": args.recipe, "steps": args.steps, "save_every": args.save_every, "deterministic": args.deterministic,
        "samples_a_step": 8 * args.prompts, "tokens": args.tokens, "devices": args.devices, "killed_after": kills,
        "columns": sum(not name.startswith(TIMES) for name in rows["straight"][-1]),
        "differs": {name: differences(rows["straight"], r) for name, r in rows.items() if name != "straight"},
        **{key: {name: [row[key] for row in r] for name, r in rows.items()} for key in SHOWN},
        "run": read_run(args.out / "straight").info,
    }  # fmt: skip
    print(write_atomically(args.out / "resume.json", json.dumps(found, indent=1) + "\n"))
    print(json.dumps({name: found[name] for name in ("killed_after", "differs")}))


if __name__ == "__main__":
    main()

"""Many runs of `mxrl train` side by side, each in a folder of its own, resumable as a whole.

    python experiments/sweep.py SWEEP.yaml --out DIR --devices cuda:0,cuda:1 --jobs 10     ten runs at a time a GPU
    python experiments/sweep.py SWEEP.yaml --out DIR --only 'dense/mxfp4*' --seconds 560   some of them, for so long
    python experiments/sweep.py SWEEP.yaml --out DIR --list                                which runs there are
    python experiments/sweep.py pack DIR FILE.tar.gz       ended runs without checkpoints and models, to be carried
    python experiments/sweep.py unpack FILE.tar.gz DIR     they are skipped where they are unpacked

    SWEEP.yaml    defaults: {model: policy:dense, steps: 40}                       options of TrainConfig
                  runs:                                                            in the order in which they are begun
                    - {name: dense/mbs, options: {recipe: mxfp4+mbs}, seeds: [0, 1, 2]}
                    - {name: dense/mbs, options: {recipe: mxfp4+mbs}, seeds: [3, 4]}    a name may come again

A run's folder is DIR/NAME/sSEED, as `mxrl train` writes it, with its output in log.txt; `mxrl report DIR/*/*` compares
them. A run that has a summary is skipped: done, diverged or collapsed, all of them are results. One that fails is a
line of DIR/failed.jsonl, and is tried again by the next call.

Workers are processes that take run after run and call `mxrl.rl.train.train` themselves: torch's import, the CUDA
context and compiled kernels are paid once a worker. Small runs share a GPU best under MPS (nvidia-cuda-mps-control -d,
started before): their kernels then run side by side instead of in turns.

Exit code: 0 when all was done or time ran out, 1 where a run failed, 2 for a call that can't be.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import json
import multiprocessing
import os
import sys
import tarfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing import connection
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import yaml

from mxrl.rl.config import CONFIG, EVALS, METRICS, SUMMARY, ConfigError, TrainConfig

KEPT = (CONFIG, METRICS, EVALS, SUMMARY)  # what a run's results are
GRACE = 120.0  # seconds that a run gets at the deadline, for the step it is in and its checkpoint


class SweepError(ValueError):
    """A sweep that can't be: one line that names the file or the option."""


class Job(NamedTuple):
    """One run: its name with the seed ("dense/mbs/s0", its folder below --out), and its options."""

    name: str
    config: TrainConfig

    @property
    def folder(self) -> Path:
        return Path(self.config.out)

    @property
    def summary(self) -> dict[str, Any] | None:
        path = self.folder / SUMMARY
        return json.loads(path.read_text()) if path.is_file() else None


def load(path: Path, out: Path, changes: dict[str, str] | None = None) -> list[Job]:
    """The runs of a sweep's file, in its order. changes: options over those of the file.

    Raises SweepError for a file that can't be read, a run that isn't complete, or two runs of one name and seed.
    """
    try:
        sweep = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise SweepError(f"{path}: can't be read ({str(error).splitlines()[0]})") from None
    if not isinstance(sweep, dict) or not isinstance(sweep.get("runs"), list):
        raise SweepError(f"{path}: expected `defaults:` and a list `runs:`")
    if unknown := set(sweep) - {"defaults", "runs"}:
        raise SweepError(f"{path}: unknown key '{sorted(unknown)[0]}'; possible: defaults, runs")
    jobs: dict[str, Job] = {}
    for number, run in enumerate(sweep["runs"], 1):
        if (
            not isinstance(run, dict)
            or set(run) - {"options"} != {"name", "seeds"}
            or not isinstance(run["seeds"], list)
        ):
            raise SweepError(f"{path}: run {number}: expected {{name: …, options: {{…}}, seeds: […]}}")
        for seed in run["seeds"]:
            name = f"{run['name']}/s{seed}"
            if name in jobs:
                raise SweepError(f"{path}: run {number}: {name} is there already")
            options = {**(sweep.get("defaults") or {}), **(run.get("options") or {}), **(changes or {})}
            try:
                config = TrainConfig.from_options(**{**options, "seed": seed, "out": str(out / name)})
            except ValueError as error:  # of the configuration or the recipe
                raise SweepError(f"{path}: {name}: {error}") from None
            jobs[name] = Job(name, config)
    return list(jobs.values())


# --- workers ---------------------------------------------------------------------------------------------------------


def work(pipe: connection.Connection, device: str) -> None:
    """A worker's life: run after run, until it is sent None, or asked to stop while it trains."""
    from mxrl.rl.train import train

    while (job := pipe.recv()) is not None:
        job.folder.mkdir(parents=True, exist_ok=True)
        config = dataclasses.replace(job.config, device="cpu" if device == "cpu" else "cuda")
        begin, error = time.monotonic(), None
        with (job.folder / "log.txt").open("a", buffering=1) as log, redirect_stdout(log), redirect_stderr(log):
            try:
                state = train(config)["status"]
            except Exception as problem:
                lines = str(problem).strip().splitlines() or [""]
                error = f"{type(problem).__name__}: {lines[0]}"
                # a run that diverged or collapsed has written its summary before it raised
                state = (job.summary or {}).get("status", "failed")
                print(error)
        _free()
        pipe.send((state, time.monotonic() - begin, error))
        if state == "interrupted":
            return


def _free() -> None:
    """Give back what the run held, for those that share the GPU."""
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class Worker:
    """A process on one device, the pipe to it and the run that it is at."""

    def __init__(self, device: str):
        self.device = device
        self.job: Job | None = None
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs, device), daemon=True)
        former = dict(os.environ)
        if device.startswith("cuda"):  # it sees this GPU alone
            os.environ["CUDA_VISIBLE_DEVICES"] = device.partition(":")[2] or "0"
        try:
            self.process.start()
        finally:
            os.environ.clear()
            os.environ.update(former)
        theirs.close()

    def give(self, job: Job) -> None:
        self.job = job
        self.pipe.send(job)

    def end(self) -> None:
        self.process.terminate()  # `train` stops after its step and saves; between two runs it just ends


class Sweep:
    """Gives jobs to workers until none is left or time is up. `failed` has a line for each run that failed."""

    def __init__(self, jobs: list[Job], out: Path, devices: list[str], jobs_each: int, seconds: float | None):
        self.out, self.devices, self.each = out, devices, jobs_each
        self.queue = deque(job for job in jobs if job.summary is None)
        self.total, self.skipped = len(jobs), len(jobs) - len(self.queue)
        self.begin = time.monotonic()
        self.deadline = self.begin + seconds if seconds is not None else None
        self.took: list[float] = []
        self.failed: list[dict[str, str]] = []
        self.ended = self.skipped
        self.replaced = 0

    def run(self) -> None:
        if self.skipped:
            say(f"{self.skipped} of {self.total} runs have ended earlier")
        (self.out / "failed.jsonl").unlink(missing_ok=True)
        wanted = min(len(self.queue), self.each * len(self.devices))
        workers = [Worker(self.devices[i % len(self.devices)]) for i in range(wanted)]  # the devices in turn
        try:
            for worker in workers:
                self.feed(worker)
            while busy := [worker for worker in workers if worker.job]:
                ready = connection.wait([worker.pipe for worker in busy], self.left())
                if not ready:
                    break  # time is up
                for worker in [w for w in busy if w.pipe in ready]:
                    if not self.receive(worker):
                        workers.remove(worker)
                        if self.replaced < len(self.devices) * self.each and self.queue:
                            self.replaced += 1
                            worker = Worker(worker.device)
                            workers.append(worker)
                        else:
                            continue
                    self.feed(worker)
            self.stop(workers)
        except KeyboardInterrupt:  # a terminal's Ctrl-C has reached the workers too, which stop after their step
            self.stop(workers, ask=False)
            raise
        finally:
            for worker in workers:
                worker.process.kill()

    def left(self) -> float | None:
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())

    def feed(self, worker: Worker) -> None:
        """The next run, if there is one that can end before the deadline."""
        left = self.left()
        if self.queue and (left is None or left > (median(self.took) if self.took else 0)):
            worker.give(self.queue.popleft())

    def receive(self, worker: Worker) -> bool:
        """Take in how a run ended; False where the worker died of it."""
        job = worker.job
        assert job is not None
        worker.job = None
        try:
            state, seconds, error = worker.pipe.recv()
        except (EOFError, OSError):
            worker.process.join()
            self.fail(job, f"its process ended with exit code {worker.process.exitcode}")
            return False
        if state == "failed":
            self.fail(job, error)
        elif state != "interrupted":
            self.ended += 1
            self.took.append(seconds)
            summary = job.summary or {}
            before, after = summary.get("accuracy_before"), summary.get("accuracy_after")
            told = f", accuracy {before:.3f} → {after:.3f}" if before is not None and after is not None else ""
            told += f" ({error})" if error else ""
            say(f"{self.ended}/{self.total}  {job.name}: {state} in {seconds:.0f} s{told}")
        return True

    def fail(self, job: Job, error: str) -> None:
        self.failed.append({"run": job.name, "error": error})
        with (self.out / "failed.jsonl").open("a") as file:
            file.write(json.dumps(self.failed[-1]) + "\n")
        say(f"{job.name}: failed: {error}; see {job.folder / 'log.txt'}")

    def stop(self, workers: list[Worker], ask: bool = True) -> None:
        """Ask those that are at a run to stop after the step they are in, and wait for them."""
        busy = [worker for worker in workers if worker.job]
        if busy:
            say(f"{len(busy)} runs stop after their step")
        for worker in busy if ask else []:
            worker.end()
        until = time.monotonic() + GRACE
        while busy and (left := until - time.monotonic()) > 0:
            for pipe in connection.wait([worker.pipe for worker in busy], left):
                worker = next(w for w in busy if w.pipe is pipe)
                self.receive(worker)
                busy.remove(worker)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# --- results that travel ---------------------------------------------------------------------------------------------


def ended_runs(out: Path) -> Iterator[Path]:
    """Folders below `out` of runs that have a summary, sorted."""
    return (path.parent for path in sorted(out.rglob(SUMMARY)) if (path.parent / CONFIG).is_file())


def pack(out: Path, file: Path) -> int:
    """Write ended runs' results (KEPT) as a .tar.gz; how many runs."""
    runs = list(ended_runs(out))
    temporary = file.with_name(f".{file.name}.tmp")
    with tarfile.open(temporary, "w:gz") as archive:
        for run in runs:
            for name in KEPT:
                if (run / name).is_file():
                    archive.add(run / name, str((run / name).relative_to(out)))
    temporary.replace(file)
    return len(runs)


def unpack(file: Path, out: Path) -> int:
    """What `pack` wrote, below `out`; how many runs lie there then."""
    out.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file) as archive:
        archive.extractall(out, filter="data")
    return len(list(ended_runs(out)))


# --- the command -----------------------------------------------------------------------------------------------------


def main(arguments: list[str]) -> int:
    if arguments[:1] in (["pack"], ["unpack"]):
        verb, first, second = arguments if len(arguments) == 3 else (*arguments, "", "")[:3]
        if not Path(first).exists() or not second:
            usage = "DIR FILE.tar.gz" if verb == "pack" else "FILE.tar.gz DIR"
            raise SweepError(f"{verb}: expected {usage}, and that the first exists")
        say(f"{(pack if verb == 'pack' else unpack)(Path(first), Path(second))} ended runs in {second}")
        return 0
    parser = argparse.ArgumentParser(prog="sweep.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sweep", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", metavar="GLOB", help="runs whose NAME/sSEED matches, as 'dense/*'")
    parser.add_argument("--devices", default="cpu", help="cpu, or GPUs: cuda:0,cuda:1")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time on each device")
    parser.add_argument("--seconds", type=float, help="stop after so many; the same command goes on from there")
    parser.add_argument(
        "--set", action="append", default=[], metavar="OPTION=VALUE", help="of every run's configuration"
    )
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args(arguments)
    if args.jobs < 1:
        raise SweepError(f"--jobs {args.jobs}: at least 1")
    if wrong := [text for text in args.set if "=" not in text]:
        raise SweepError(f"--set {wrong[0]}: expected OPTION=VALUE")
    jobs = load(args.sweep, args.out, dict(text.split("=", 1) for text in args.set))
    if args.only:
        jobs = [job for job in jobs if fnmatch.fnmatch(job.name, args.only)]
        if not jobs:
            raise SweepError(f"--only '{args.only}': no run of {args.sweep} has such a name")
    if args.list:
        for job in jobs:
            print(f"{(job.summary or {}).get('status', '-'):12} {job.name:40} {job.config.recipe}")
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    sweep = Sweep(jobs, args.out, args.devices.split(","), args.jobs, args.seconds)
    sweep.run()
    missing = sweep.total - sweep.ended - len(sweep.failed)
    say(
        f"{sweep.ended} of {sweep.total} runs have ended, {len(sweep.failed)} failed, {missing} are left"
        + ("; the same command goes on" if missing or sweep.failed else "")
    )
    return 1 if sweep.failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (SweepError, ConfigError) as error:
        print(f"sweep.py: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)

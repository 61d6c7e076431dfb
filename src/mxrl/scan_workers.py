"""Who does a scan's tasks: one lane in this process, or several processes of one lane each.

    Lane        in this process (scan_lane.py)
    Processes   one Lane in each of several processes, a pipe to each
    Joining     Processes for several GPUs, and a Lane here until they are up
    Shape       how many of them, on what, within how much memory: `shape_of`

All are pools: `submit(task)` while `free`, `next() -> (task, result)` while `busy`, `close()`.

Workers are programs of their own (no fork of a process with threads, no second import of the caller's script). They
read tasks from their pipe and end when it closes, however their parent ended. The threads of all workers together are
`jobs`. A worker that dies is named in one line, WorkerError; Ctrl-C reaches the parent alone, which ends them.

Memory is what the processes hold for themselves (`Anonymous` in /proc/PID/smaps_rollup): mapped files are the system's
to take back. Importing torch takes most of a worker's, so a limit of `memory` bytes is kept by starting fewer processes
of more threads each. On a GPU the CUDA driver's own memory on the host (some hundred MB a process) comes on top.
"""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any, Protocol

import torch

from mxrl.checkpoint import Checkpoint
from mxrl.scan_lane import Lane
from mxrl.scan_tasks import Result, Task, cost, mapped, ranges, width

MEMORY = 2_000_000_000
# Bytes that processes took for themselves (torch 2.13, numba 0.68), rounded up:
_MAIN = 350_000_000  # the first one: 180 MB with torch, the journal and the page, 320 MB where numba compiles too …
_RESULT = 2_200  # … and for each range and column, whose statistics it keeps
_WORKER = 300_000_000  # a worker besides its buffers: 200 MB, 290 MB where numba compiles
_DECODER = 200_000_000  # temporaries of whoever decodes what isn't stored as floats
_REFERENCE = 400_000_000  # temporaries of the torch reference, which serves float64
_READERS = 8  # threads that fill a GPU's buffers, at most
_JOBS = 4  # to a core, at most: more only take memory and wait for one another
_SMALL = 1 << 32  # elements times recipes, below which starting processes takes longer than it saves


class OptionError(ValueError):
    """A number of jobs, a device or a limit of memory that can't be: the message says what could."""


class WorkerError(RuntimeError):
    """A worker process that died: the message says of what, and on which tensor."""


class Pool(Protocol):
    """Takes tasks, gives results, in any order."""

    @property
    def free(self) -> bool: ...
    @property
    def busy(self) -> bool: ...
    def submit(self, task: Task) -> None: ...
    def next(self) -> tuple[Task, Result]: ...
    def close(self) -> None: ...


# ---- how many of them ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """devices: of each lane. threads: of each, that compute (0: as many as torch has now). readers: that read ahead."""

    devices: tuple[str, ...]
    threads: int
    readers: int


def parse_size(text: str) -> int:
    """Bytes of "2GB", "500 MB", "1.5GiB" or "2000000000". OptionError for anything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?)b?|b?)\s*", text, re.IGNORECASE)
    if not match:
        raise OptionError(f"'{text}' is no amount of memory; write 2GB, 500MB or 1.5GiB")
    power = " kmgt".index((match[2] or " ").lower())
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


def devices_of(device: str, *, small: bool = False) -> tuple[str, ...]:
    """("cpu",), ("cuda:1",), or every visible GPU for "cuda". "auto": the GPUs, if there are any and it isn't small.

    Raises OptionError where there is no such device.
    """
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        raise OptionError(f"device '{device}': possible are auto, cpu, cuda (every GPU) and cuda:N")
    count = torch.cuda.device_count() if device != "cpu" and torch.cuda.is_available() else 0
    if device == "cpu" or (device == "auto" and (small or not count)):
        return ("cpu",)
    if device in ("auto", "cuda"):
        found = tuple(f"cuda:{i}" for i in range(count))
    else:
        found = (device,) if int(device[5:]) < count else ()
    if not found:
        seen = f"GPUs 0 to {count - 1}" if count > 1 else "one GPU, cuda:0" if count else "no CUDA GPU"
        raise OptionError(f"device '{device}': torch sees {seen} here; --device cpu always works")
    return found


def shape_of(
    checkpoint: Checkpoint, columns: Sequence[str], *, jobs: int | None, memory: int = MEMORY, device: str = "auto"
) -> Shape:
    """How to scan `checkpoint`. columns: all that are measured (scan.wanted_of), whose results are kept. jobs: cores to
    use, each a process where memory allows (1: this process alone).

    None: every core, or this process alone for so little work that processes would only delay it. On GPUs: a process
    for each where memory allows, or this one for one. Raises OptionError where not even one fits into `memory`, and
    for more jobs than four a core.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if jobs is not None and jobs < 1:
        raise OptionError(f"jobs={jobs}: one process is the least")
    if jobs is not None and jobs > _JOBS * cores:
        raise OptionError(f"jobs={jobs}: {_JOBS * cores} is the most here, {_JOBS} for each of {cores} cores")
    small = jobs is None and checkpoint.numel * cost(columns) < _SMALL
    devices = devices_of(device, small=small)
    rows, decoded, extra = _rows(checkpoint)
    main = _MAIN + _RESULT * len(columns) * sum(len(ranges(w.shape, w.dim)) for w in checkpoint.weights)
    if devices[0] != "cpu":
        return _gpus(devices, cores, memory, main, extra, max(rows + decoded, 1))
    one = extra + 2 * decoded  # the rows that are read ahead, and those that are worked on
    if memory < main + one:
        raise _too_little(memory, main + one)
    if small:
        return Shape(devices, 0, 1)
    jobs = jobs or cores
    workers = max(1, min(jobs, (memory - main) // (_WORKER + one)))
    return Shape(devices * workers, max(1, jobs // workers), 1)


def _gpus(devices: tuple[str, ...], cores: int, memory: int, main: int, extra: int, each: int) -> Shape:
    """As many GPUs, then readers, as fit. main: of this process, extra: of a lane, each: of a reader.

    With several GPUs a lane is here too.
    """
    for count in range(len(devices), 0, -1):
        workers = count if count > 1 else 0
        fixed = main + workers * _WORKER
        readers = min(_READERS, max(2, cores // count - 1), ((memory - fixed) // (workers + 1) - extra) // each)
        if readers > 0:
            return Shape(devices[:count], 1, readers)
    raise _too_little(memory, main + extra + each)


def _rows(checkpoint: Checkpoint) -> tuple[int, int, int]:
    """Bytes of the largest range's rows; of those that are decoded; what decoder and arithmetic take besides."""
    rows = decoded = extra = 0
    alike = {(w.shape, w.dim, w.dtype, mapped(w), width(w)) for w in checkpoint.weights}
    for shape, dim, dtype, in_place, bytes_each in alike:
        nbytes = max(stop - start for start, stop in ranges(shape, dim)) * shape[-1] * bytes_each
        rows = max(rows, nbytes)
        if not in_place:
            decoded, extra = max(decoded, nbytes), max(extra, _DECODER)
        if dtype == "F64":
            extra = max(extra, _REFERENCE)
    return rows, decoded, extra


def _too_little(memory: int, need: int) -> OptionError:
    return OptionError(f"memory={memory / 1e9:.3g}GB is too little here, which takes up to {need / 1e9:.2g}GB")


def open_pool(checkpoint: Checkpoint, shape: Shape) -> Pool:
    """One lane of a shape runs here, more in processes."""
    if len(shape.devices) == 1:
        return Lane(checkpoint, shape.devices[0], shape.readers, shape.threads)
    return Processes(checkpoint, shape) if shape.devices[0] == "cpu" else Joining(checkpoint, shape)


# ---- processes -------------------------------------------------------------------------------------------------------

# The first message is longer than a pipe holds: taken before torch is imported, lest the parent waits for that.
# The parent's path before anything else is imported: `python -c` looks into the current folder first.
_START = """import sys
sys.path[:] = sys.argv[2:]
from multiprocessing.connection import Connection
pipe = Connection(int(sys.argv[1]))
try:
    work = pipe.recv_bytes()
except (EOFError, OSError):  # the parent is gone
    sys.exit()
from mxrl.scan_workers import serve
serve(pipe, work)"""


class _Worker:
    """A process, the pipe to it and what it is working on."""

    def __init__(self, checkpoint: Checkpoint, device: str, readers: int, threads: int):
        self.pipe, theirs = connection.Pipe()
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        command = [sys.executable, "-c", _START, str(theirs.fileno()), *sys.path]
        # A signal that is blocked when a program starts stays blocked in it: Ctrl-C is for the parent alone.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self.process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        theirs.close()
        self.tasks: list[Task] = []
        self.up = False  # it has said that it can begin
        self.send((checkpoint, device, readers, threads))

    def send(self, message: Any) -> None:
        try:
            self.pipe.send(message)
        except OSError:
            pass  # it has died; whoever waits for its results will learn of what

    def fate(self) -> str:
        """How it ended."""
        code = self.process.wait()
        if code >= 0:
            return f"ended with exit code {code}"
        return f"was killed by {signal.Signals(-code).name}"


class Processes:
    """A Lane in each of several processes."""

    def __init__(self, checkpoint: Checkpoint, shape: Shape):
        self._checkpoint, self._capacity = checkpoint, shape.readers + 2  # one more than a lane's: no pause between two
        self._arrived: deque[tuple[Task, Result]] = deque()
        self._workers: list[_Worker] = []
        try:
            for device in shape.devices:
                self._workers.append(_Worker(checkpoint, device, shape.readers, shape.threads))
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers]

    @property
    def free(self) -> bool:
        return any(len(worker.tasks) < self._capacity for worker in self._workers)

    @property
    def up(self) -> bool:
        """Whether all of them are."""
        return all(worker.up for worker in self._workers)

    @property
    def free_and_up(self) -> bool:
        return any(len(worker.tasks) < self._capacity for worker in self._workers if worker.up)

    @property
    def busy(self) -> bool:
        return self.arrived or any(worker.tasks for worker in self._workers)

    @property
    def arrived(self) -> bool:
        """Whether `next` need not wait."""
        return bool(self._arrived)

    def submit(self, task: Task) -> None:
        worker = min(self._workers, key=lambda w: (len(w.tasks) >= self._capacity, not w.up, len(w.tasks)))
        worker.tasks.append(task)
        worker.send(task)

    def next(self) -> tuple[Task, Result]:
        while not self._arrived:
            self.look(None)
        return self._arrived.popleft()

    def look(self, timeout: float | None = 0) -> None:
        """Take in what workers have sent; waits for `timeout` seconds at most (None: until one has sent something)."""
        pipes = {worker.pipe: worker for worker in self._workers}
        for pipe in connection.wait(list(pipes), timeout):
            self._receive(pipes[pipe])  # type: ignore[index]

    def _receive(self, worker: _Worker) -> None:
        try:
            outcome = worker.pipe.recv()
        except (EOFError, OSError):
            names = [self._checkpoint.weights[task.weight].name for task in worker.tasks[:1]]
            doing = f"while it worked on tensor '{names[0]}'" if names else "before its first tensor"
            fate = worker.fate()
            hint = "out of memory? --memory 1GB or --jobs 1 take less" if "SIGKILL" in fate else "see above"
            raise WorkerError(f"a worker process {fate} {doing} ({hint})") from None
        if isinstance(outcome, BaseException):
            raise outcome
        if outcome is None:
            worker.up = True
        else:
            self._arrived.append((worker.tasks.pop(0), outcome))

    def close(self) -> None:
        """End them: they only read, so there's nothing to wait for."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.wait()
            worker.pipe.close()


class Joining:
    """A process for each device, which get tasks once they are up; until all of them are, a Lane here works too.

    A process takes seconds to import torch, in which one GPU does much of a scan, or all of it: nobody waits then for
    the others, so that more GPUs are not slower than one. Afterwards this process has the results, the journal and the
    rows of all of them to see to, and would hold them up with a lane of its own.
    """

    def __init__(self, checkpoint: Checkpoint, shape: Shape):
        self.others = Processes(checkpoint, shape)
        try:
            self._own = Lane(checkpoint, shape.devices[0], shape.readers, shape.threads)
        except BaseException:
            self.others.close()
            raise

    @property
    def pids(self) -> list[int]:
        return self.others.pids

    @property
    def free(self) -> bool:
        return self.others.free_and_up or (self._own.free and not self.others.up)

    @property
    def busy(self) -> bool:
        return self._own.busy or self.others.busy

    def submit(self, task: Task) -> None:
        (self.others if self.others.free_and_up else self._own).submit(task)

    def next(self) -> tuple[Task, Result]:
        if not self.others.arrived:  # else they'd send more than is taken from them here, and the journal lag behind
            self.others.look()
        mine = self._own.busy and (self.others.up or not self.others.arrived)  # what is left of it comes first
        return self._own.next() if mine else self.others.next()

    def close(self) -> None:
        self._own.close()
        self.others.close()


def serve(pipe: connection.Connection, work: bytes) -> None:
    """A worker's life: None once it is up; then tasks in, results out in the same order, until the pipe closes.

    work: a pickle of the checkpoint, and of a lane's device, readers and threads.
    """
    try:
        checkpoint, device, readers, threads = pickle.loads(work)
        lane = Lane(checkpoint, device, readers, threads)
        pipe.send(None)
        while True:
            while lane.free and (not lane.busy or pipe.poll()):
                lane.submit(pipe.recv())
            pipe.send(_portable(lane))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)  # the parent is gone or has what it wants; threads that read ahead have nothing to finish


def _portable(lane: Lane) -> Result | BaseException:
    """The next result, or the exception that took its place, as something that can be sent."""
    try:
        return lane.next()[1]
    except Exception as err:
        plain = RuntimeError(f"{type(err).__name__}: {err}")
        try:
            again = pickle.loads(pickle.dumps(err))
        except Exception:  # an exception class whose arguments don't survive
            return plain
        return again if str(again) == str(err) else plain

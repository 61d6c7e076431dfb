"""The processes of one run: how they start, what only the first one does, and what happens when one of them dies.

    torchrun --nproc-per-node 2 -m mxrl train …         RANK, LOCAL_RANK, WORLD_SIZE come from the launcher

A process that is killed leaves the others waiting in a collective, where Python doesn't run: signal handlers neither,
and NCCL gives up after many minutes only. `watching` has a thread that sees a process of this host end and ends its
own; a launcher does the same between hosts.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from mxrl.rl.config import ConfigError

T = TypeVar("T")
GRACE = 5.0  # seconds in which a process may still end by an error of its own, once another one has ended


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def count() -> int:
    """How many processes the launcher started; 1 without one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def start(device: str) -> None:
    """Join the other processes, each with a GPU of its own (NCCL) or on the CPU (gloo). Nothing for a single one.

    device: cpu or cuda. Raises ConfigError where the host has fewer GPUs than processes.
    """
    if count() == 1:
        return
    here = int(os.environ.get("LOCAL_WORLD_SIZE", count()))
    if device == "cuda" and here > torch.cuda.device_count():
        raise ConfigError(
            f"{here} processes were started on this host, but it has {torch.cuda.device_count()} GPU(s): start as many "
            "as there are GPUs (torchrun --nproc-per-node), or use device='cpu'"
        )
    from accelerate import PartialState

    # as long as a step may take in which the others wait for one process
    PartialState(cpu=device == "cpu", timeout=timedelta(minutes=30))


def on_first(work: Callable[[], T]) -> T:
    """Run `work` in the first process only; every process returns its result, or raises its exception."""
    if count() == 1:
        return work()
    found: list[Any] = [None, None]
    if rank() == 0:
        try:
            found[0] = work()
        except Exception as error:
            found[1] = error
    dist.broadcast_object_list(found, src=0)
    if found[1] is not None:
        raise found[1]
    return found[0]


def any_of(flag: bool) -> bool:
    """Whether any process says so; all of them have to ask."""
    if count() == 1:
        return flag
    flags: list[Any] = [None] * count()
    dist.all_gather_object(flags, flag)
    return any(flags)


class LostError(RuntimeError):
    """Another process of the run has ended; the message says which, and what to do next."""


class _Others:
    """The other processes of this host, by a file descriptor each that becomes readable when the process ends."""

    def __init__(self) -> None:
        everyone: list[Any] = [None] * count()
        dist.all_gather_object(everyone, (socket.gethostname(), os.getpid()))
        self.names: dict[int, str] = {}
        for other, (host, pid) in enumerate(everyone):
            if host == everyone[rank()][0] and other != rank():
                self.names[os.pidfd_open(pid)] = f"rank {other} (process {pid})"

    def ended(self, seconds: float) -> str | None:
        """One that has ended, or does within so many seconds."""
        poll = select.poll()  # one for each call: two threads ask
        for fd in self.names:
            poll.register(fd, select.POLLIN)
        found = poll.poll(1000 * seconds)
        return self.names[found[0][0]] if found else None

    def close(self) -> None:
        for fd in self.names:
            os.close(fd)


@contextmanager
def watching(advice: Callable[[], str]) -> Iterator[None]:
    """While the block runs, the end of another process of this host ends this one, with exit code 1 and one line.

    advice: makes the end of that line: what to do next. The block ends by waiting for all the others.
    Raises LostError where a collective has failed because of the other's end (gloo); where it would wait forever (NCCL)
    the line is written and the process ended.
    """
    if count() == 1:
        yield
        return
    others, done = _Others(), threading.Event()

    def line(who: str) -> str:
        return f"{who} has ended, so the run can't go on; {advice()}"

    def watch() -> None:
        who = None
        while who is None and not done.is_set():
            who = others.ended(0.5)
        if who is not None and not done.wait(GRACE):
            print(f"mxrl: rank {rank()}: {line(who)}", file=sys.stderr, flush=True)
            os._exit(1)  # the main thread waits in a collective and will not come back

    def terminate(number: int, frame: Any) -> None:
        if others.ended(0) is None:
            raise SystemExit(128 + number)
        # the launcher ends the rest of the run: what has happened is said first

    thread = threading.Thread(target=watch, name="mxrl-ranks", daemon=True)
    thread.start()
    former = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
        dist.barrier()
    except RuntimeError as error:
        own = isinstance(error, dist.DistError) or type(error) is RuntimeError
        who = others.ended(2.0) if own else None
        if who is None:
            raise
        raise LostError(line(who)) from error
    finally:
        done.set()
        thread.join()
        others.close()
        signal.signal(signal.SIGTERM, former)


def finish() -> None:
    """Leave the process group; for a command's end."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()

"""The tasks of a scan on an existing Ray cluster: a pool as those of `scan_workers`.

    ray.init(address)     the cluster's address, "auto" or "ray://host:port"
    run_task.remote(…)    one task on one of its CPUs: reads its rows there, sends the statistics back

Every machine of the cluster must have mxrl and see the checkpoint under the same path. A task whose machine fails is
tried again by Ray, on another one. (docs.ray.io, "Ray Core: Tasks")
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections import deque
from typing import Any

from mxrl.checkpoint import Checkpoint
from mxrl.scan_tasks import Result, Task, read, run
from mxrl.scan_workers import WorkerError

_PATIENCE = 5.0  # seconds to wait for the cluster's head to answer
_AHEAD = 2  # tasks given to each CPU: one that is computed, one that waits


class ClusterError(RuntimeError):
    """A cluster that can't be used: the message names its address and says why."""


def run_task(checkpoint: Checkpoint, task: Task) -> Result:
    """What a CPU of the cluster does."""
    import torch

    torch.set_num_threads(1)
    weight = checkpoint.weights[task.weight]
    return run(task, weight, read(checkpoint, weight, task.start, task.stop))


class Cluster:
    """A pool on the cluster at `address`; `close` leaves it as it was found."""

    def __init__(self, checkpoint: Checkpoint, address: str):
        try:
            import ray
        except ModuleNotFoundError:
            raise ClusterError("a cluster needs Ray: pip install 'mxrl[ray]'") from None
        self._ray, self._checkpoint = ray, checkpoint
        _reach(address)
        if ray.is_initialized():
            raise ClusterError(f"cluster {address}: this process is connected to a Ray cluster already")
        try:
            ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
        except Exception as err:  # Ray's, gRPC's and the system's errors have no common base
            raise ClusterError(f"cluster {address}: can't connect ({_first_line(err)})") from err
        try:
            self.cpus = int(ray.cluster_resources().get("CPU", 0))
            if not self.cpus:
                raise ClusterError(f"cluster {address} has no CPUs")
            self._shared = ray.put(checkpoint)
            self._remote: Any = ray.remote(num_cpus=1)(run_task)
        except BaseException:
            ray.shutdown()
            raise
        self._running: dict[Any, Task] = {}
        self._arrived: deque[Any] = deque()

    @property
    def free(self) -> bool:
        return len(self._running) < _AHEAD * self.cpus

    @property
    def busy(self) -> bool:
        return bool(self._running)

    def submit(self, task: Task) -> None:
        self._running[self._remote.remote(self._shared, task)] = task

    def next(self) -> tuple[Task, Result]:
        (done,), _ = self._ray.wait(list(self._running), num_returns=1)
        task = self._running.pop(done)
        try:
            return task, self._ray.get(done)
        except self._ray.exceptions.RayTaskError as err:
            raise err.cause if isinstance(err.cause, Exception) else err from None
        except self._ray.exceptions.RayError as err:
            name = self._checkpoint.weights[task.weight].name
            raise WorkerError(f"the cluster gave up on tensor '{name}': {_first_line(err)}") from err

    def close(self) -> None:
        with contextlib.suppress(Exception):
            for reference in self._running:
                self._ray.cancel(reference, force=True)
        self._ray.shutdown()


def _reach(address: str) -> None:
    """ClusterError unless something answers at host:port: Ray itself would try for a minute, and print pages."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if address in ("auto", "local") or not host:
        if address != "auto":
            raise ClusterError(f"cluster '{address}': give host:port, ray://host:port or auto")
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _PATIENCE).close()
    except (OSError, ValueError) as err:
        raise ClusterError(f"cluster {address}: nobody answers there ({_first_line(err)})") from err


def _first_line(err: BaseException) -> str:
    text = str(err).strip()
    return text.splitlines()[0] if text else type(err).__name__

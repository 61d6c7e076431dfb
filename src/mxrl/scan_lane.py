"""One lane of a scan: reads ahead in threads, computes on its device, in the order of its tasks.

file → rows (→ pinned memory → GPU) → statistics
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from mxrl.checkpoint import Checkpoint, Weight
from mxrl.scan_replay import Replay
from mxrl.scan_tasks import Result, Task, read, read_into, run, width

_PAGE = 4096


class Lane:
    """Tasks in their order, on one device; while one is computed, `readers` threads fetch the next ones' rows."""

    def __init__(self, checkpoint: Checkpoint, device: str, readers: int = 1, threads: int = 0):
        self._checkpoint, self._device = checkpoint, torch.device(device)
        self.capacity = readers + 1
        self._queue: deque[tuple[Task, Future[Tensor]]] = deque()
        self._readers = ThreadPoolExecutor(readers, thread_name_prefix="mxrl-read")
        self._own = threading.local()
        self._replay = Replay()
        self._threads_before = torch.get_num_threads()
        if threads:
            torch.set_num_threads(threads)

    @property
    def free(self) -> bool:
        return len(self._queue) < self.capacity

    @property
    def busy(self) -> bool:
        return bool(self._queue)

    def submit(self, task: Task) -> None:
        self._queue.append((task, self._readers.submit(self._fetch, task)))

    def next(self) -> tuple[Task, Result]:
        task, future = self._queue.popleft()
        rows = future.result()
        weight = self._checkpoint.weights[task.weight]
        if self._device.type == "cpu":
            return task, run(task, weight, rows)
        with torch.cuda.device(self._device):  # Triton launches on the current device
            return task, self._replay.run(task, weight, rows)

    def close(self) -> None:
        self._readers.shutdown(cancel_futures=True)
        torch.set_num_threads(self._threads_before)

    def _fetch(self, task: Task) -> Tensor:
        weight = self._checkpoint.weights[task.weight]
        if self._device.type == "cpu":
            rows = read(self._checkpoint, weight, task.start, task.stop)
            touch(rows)
            return rows
        return self._upload(task, weight)

    def _upload(self, task: Task, weight: Weight) -> Tensor:
        """Through this thread's pinned buffer and stream: the copy runs beside the kernels of the task before.

        The result's memory belongs to this stream; its reader waits for its sums before it lets go of it.
        """
        own = self._own.__dict__
        nbytes = (task.stop - task.start) * weight.shape[-1] * width(weight)
        with torch.cuda.device(self._device):  # else pinning would open a context on the first GPU
            if "stream" not in own:
                own["stream"], own["buffer"] = torch.cuda.Stream(), torch.empty(0, dtype=torch.uint8)
            if own["buffer"].numel() < nbytes:
                own["buffer"] = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
            pinned = read_into(self._checkpoint, weight, task.start, task.stop, own["buffer"])
            with torch.cuda.stream(own["stream"]):
                there = pinned.to(self._device, non_blocking=True)
                own["stream"].synchronize()
        return there


def touch(rows: Tensor) -> None:
    """Read one byte of every page: the disk's part of the work, for rows that are mapped and not yet in memory."""
    if rows.numel() and rows.is_contiguous():
        rows.view(-1).view(torch.uint8)[::_PAGE].max()

"""A scan's tasks on a GPU: a task's kernels launched at once, read back at once, and replayed for the next one alike.

    launched(task)   17 columns and the moments: a hundred small kernels, milliseconds of Python; one buffer of sums
    Replay.run       the same kernels as a CUDA graph, from the second task of a shape on: a launch

A checkpoint has few shapes and very many tensors, so nearly every task is a replay. A graph holds the launches of one
shape with their arguments, so it gives the same bits. What Triton doesn't serve (float64, another backend asked for by
name), and NVFP4's second round, whose scale is an argument, goes the usual way: `scan_tasks.run`.

All graphs are captured on one stream. Torch gives out the same 32 streams in turn, so one stream a graph would at last
be one that a reader copies on, which ends the capture; and memory is shared on one stream only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mxrl.checkpoint import Weight
from mxrl.decompose import ErrorStats
from mxrl.moments import from_sums, sums_of
from mxrl.ops import dispatch
from mxrl.recipes import Recipe
from mxrl.scan_tasks import Result, Task, finite_amax, operand, operands, run, split

GRAPHS = 32  # at most, each with a range's rows (32 MB): a model has a dozen shapes, in ranges each is several


@dataclass(frozen=True)
class Launched:
    """What a task leaves on the device, int64 [words]: each column's sums, the largest magnitudes, the moments.

    short: by column, the recipe if stats_fast_triton served it (see `stats_triton.fields`).
    """

    words: Tensor
    short: dict[str, Recipe | None]

    def result(self, task: Task) -> Result:
        """Wait for it. task: the one that was launched, or one alike."""
        from mxrl.ops.stats_triton import WIDTH, fields

        words = self.words.cpu().numpy()
        sums, numbers = np.split(words, [WIDTH * len(self.short)])
        found = fields(sums.reshape(-1, WIDTH), list(self.short.values()))
        stats = {column: ErrorStats(**values) for column, values in zip(self.short, found, strict=True)}
        numbers = numbers.view(np.float64).tolist()
        amax = dict(zip(task.amax, numbers, strict=False))
        return Result(stats, amax, from_sums(numbers[len(amax) :]) if task.moments else None)


@torch.no_grad()
def launched(task: Task, weight: Weight, rows: Tensor) -> Launched:
    """Start all of a task, waiting for nothing. rows: on the device, of a dtype and for columns that Triton serves."""
    from mxrl.ops.stats_triton import launch

    x_ABK = operand(rows, weight)
    words, short = [], {}
    for column, recipe, x, scale in operands(task, weight, x_ABK):
        total, fast = launch(x, recipe, None, scale)
        words.append(total)
        short[column] = recipe if fast else None
    numbers = [finite_amax(x_ABK, column).double().view(1) for column in task.amax]
    if task.moments:
        numbers.append(sums_of(x_ABK.reshape(-1, x_ABK.shape[2])))
    return Launched(torch.cat([*words, *(n.view(torch.int64) for n in numbers)]), short)


def served(task: Task, rows: Tensor) -> bool:
    """Whether Triton serves all of a task."""
    recipes = [split(column)[0] for column in (*task.columns, *task.amax)]
    modules = {dispatch.operation(name, rows, recipe).__name__ for recipe in recipes for name in ("stats", "qdq")}
    return rows.numel() > 0 and modules <= {"mxrl.ops.stats_triton", "mxrl.ops.qdq_triton"}


class Replay:
    """Runs tasks on the current GPU; the launches of those that come again are kept."""

    def __init__(self) -> None:
        self._known: dict[object, _Graph | None] = {}
        self._stream: Any = None  # of all captures
        self._pool: Any = None  # one memory for all graphs: the sums of one are read before the next one runs

    def graphs(self) -> list[torch.cuda.CUDAGraph]:
        """Those that are kept."""
        return [known.graph for known in self._known.values() if known]

    def run(self, task: Task, weight: Weight, rows: Tensor) -> Result:
        k = weight.shape[-2] if weight.dim == -2 else 0
        phases = tuple(-task.start % split(column)[1] for column in task.columns)  # of the sample's rows
        key = (rows.shape, rows.dtype, weight.dim, k, task.columns, phases, task.amax, task.moments)
        if task.maxima or (key not in self._known and not served(task, rows)):
            return run(task, weight, rows)
        first = key not in self._known  # it loads the kernels, which a capture may not
        graph = self._known.setdefault(key)
        if graph is None and (first or len(self.graphs()) >= GRAPHS):
            return launched(task, weight, rows).result(task)
        if graph is None:
            self._stream = self._stream or torch.cuda.Stream()
            graph = self._known[key] = _Graph(task, weight, rows, self._stream, self._pool)
            self._pool = graph.pool
        return graph.run(task, rows)


class _Graph:
    """A task's launches, captured, and the rows that they read."""

    def __init__(self, task: Task, weight: Weight, rows: Tensor, stream: Any, pool: Any):
        self._rows = torch.empty_like(rows)
        self.graph = torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.graph.capture_begin(pool, capture_error_mode="thread_local")  # other threads go on reading ahead
            try:
                self._launched = launched(task, weight, self._rows)
            finally:
                self.graph.capture_end()
        self.pool = self.graph.pool()

    def run(self, task: Task, rows: Tensor) -> Result:
        self._rows.copy_(rows)
        self.graph.replay()
        return self._launched.result(task)

"""The unit of a scan: one tensor's fixed range of rows, and what is summed over it.

    rows      weight.shape viewed as [-1, shape[-1]]; a task reads rows [start, stop), one stretch of the file
    ranges    about 2^24 elements, cut where no block or macro-block is: they depend on shape and axis alone

    [N, K], [E, N, K]   blocks along K, the last axis    any row may be the first: 128 rows at a time
    [E, K, N]           blocks along K, the one before   whole experts; one that is larger is cut at multiples of 128
                                                         (of 1024 where there is room) along its K

Who computes a range, when, on how many threads and in which process changes none of its bits, and the results of a
tensor's ranges are added in their order: totals are the same for every way through the work, also for one that was
killed and went on. Devices differ: a GPU's sums equal the CPU's to 1e-12, its counts exactly.

Not every recipe has to see every row. A column `mxfp4+of/61` is taken on every 61st row of the tensor, the first
included (a row is what lies along the contraction axis): the same rows whatever the ranges are.

NVFP4 has one scale a tensor, so a tensor of several ranges takes two rounds: the first finds each range's maximum
beside the other recipes' statistics, the second quantizes under the maximum of them all. `Ledger` knows which is due.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mxrl.checkpoint import Checkpoint, Weight
from mxrl.checkpoints.encodings import Plain
from mxrl.decompose import ErrorStats
from mxrl.moments import Moments, moments_abk
from mxrl.ops import dispatch
from mxrl.ops.layout import as_abk
from mxrl.quantize import whole_tensor_scale
from mxrl.recipes import Recipe, RecipeError
from mxrl.scaling import nvfp4_tensor_scale

ELEMENTS = 1 << 24  # of a range, about
_CUT = 128  # rows at a time: a multiple of every block's length and of the default macro-block's
WHOLE = 1 << 25  # elements of a checkpoint, up to which every row is taken
EVERY = 61  # else every 61st: a prime, lest rows be always the same ones of their attention head
_DECODED = 1 << 22  # elements decoded at once, of a weight that isn't stored as floats

Place = tuple[str, int, int]  # tensor, first row, end row: what names a range in the journal


@dataclass(frozen=True)
class Task:
    """What to do with rows [start, stop) of weight number `weight`.

    columns: recipes to take statistics of, with `/n` on every n-th row. amax: recipes whose largest finite magnitude is
    wanted. maxima: the whole tensor's, for those of `columns` that have one scale a tensor and don't see all of it.
    moments: take those of the rows too.
    """

    weight: int
    start: int
    stop: int
    columns: tuple[str, ...]
    amax: tuple[str, ...] = ()
    maxima: tuple[tuple[str, float], ...] = ()
    moments: bool = False


@dataclass(frozen=True)
class Result:
    """What a task gives: statistics and maxima, by column; the rows' moments."""

    stats: dict[str, ErrorStats] = field(default_factory=dict)
    amax: dict[str, float] = field(default_factory=dict)
    moments: Moments | None = None


def every_of(numel: int) -> int:
    """Of a checkpoint with so many elements: the n of the `every n-th row` on which a sample is taken."""
    return 1 if numel <= WHOLE else EVERY


def column_of(recipe: str, every: int) -> str:
    """The column of a recipe on every n-th row."""
    return recipe if every == 1 else f"{recipe}/{every}"


@functools.lru_cache(maxsize=1024)
def split(column: str) -> tuple[Recipe, int]:
    """The recipe of a column, and on every how manieth row it is taken."""
    recipe, _, every = column.partition("/")
    return Recipe.parse(recipe), int(every or 1)


def ranges(shape: Sequence[int], dim: int) -> tuple[tuple[int, int], ...]:
    """The (start, stop) of each range of rows; dim: the blocked axis, -1 or -2."""
    return _ranges(tuple(shape), dim, ELEMENTS)


@functools.lru_cache(maxsize=1024)
def _ranges(shape: tuple[int, ...], dim: int, elements: int) -> tuple[tuple[int, int], ...]:
    if dim not in (-1, -2):
        raise ValueError(f"blocks along axis {dim} of {len(shape)}: a weight's lie along -1 or -2")
    rows, columns = math.prod(shape[:-1]), shape[-1]
    if rows * columns <= elements:
        return ((0, rows),)
    unit = rows  # what may be cut freely
    step = _multiple(elements // columns, _CUT)
    if dim == -2:
        if shape[-2] * columns <= elements:
            step = elements // (shape[-2] * columns) * shape[-2]
        else:
            unit, room = shape[-2], elements // columns
            step = max(_multiple(room, 8 * _CUT if room >= 8 * _CUT else _CUT), _CUT)
    return tuple(
        (begin, min(begin + step, first + unit))
        for first in range(0, rows, unit)
        for begin in range(first, first + unit, step)
    )


def _multiple(n: int, unit: int) -> int:
    """n rounded down to a multiple of `unit`; as it is, but at least 1, where it is less than one."""
    return n // unit * unit if n >= unit else max(n, 1)


def mapped(weight: Weight) -> bool:
    """Whether a weight's rows are the file's own pages, which take no memory of the process."""
    return isinstance(weight.encoding, Plain) and not (weight.encoding.as_float32 and weight.dtype != "F32")


def width(weight: Weight) -> int:
    """Bytes of one element of a weight's rows as `read` gives them."""
    return {"F64": 8, "F32": 4}.get(weight.dtype, 2) if mapped(weight) else 4


def read(checkpoint: Checkpoint, weight: Weight, start: int, stop: int) -> Tensor:
    """Rows [start, stop) of a weight, [stop - start, shape[-1]], on the CPU: the one place where a scan meets a file.

    What has to be decoded is decoded a little at a time, into one float32 tensor: decoders take several times that.
    """
    columns = weight.shape[-1]
    step = max(1, _DECODED // max(columns, 1))
    if mapped(weight) or stop - start <= step:
        return checkpoint.read(weight, start, stop)
    out = torch.empty(stop - start, columns)
    for begin in range(start, stop, step):
        end = min(begin + step, stop)
        out[begin - start : end - start] = checkpoint.read(weight, begin, end)
    return out


def read_into(checkpoint: Checkpoint, weight: Weight, start: int, stop: int, buffer: Tensor) -> Tensor:
    """The same rows in `buffer` (uint8, as many bytes as `weight` has in those rows, or more): for a GPU's copy."""
    rows = None
    if mapped(weight) and isinstance(weight.encoding, Plain):
        rows = weight.encoding.codes.rows_into(start, stop, buffer)
    if rows is None:
        found = read(checkpoint, weight, start, stop)
        rows = buffer[: found.nbytes].view(found.dtype).view(found.shape)
        rows.copy_(found)
    return rows


def operand(rows: Tensor, weight: Weight) -> Tensor:
    """Rows of a weight as [A, B, K], a view."""
    if weight.dim == -1:
        return as_abk(rows, 1)
    k = min(weight.shape[-2], rows.shape[0])
    return as_abk(rows.view(-1, k, rows.shape[1]) if k else rows.view(0, 0, rows.shape[1]), 1)


def sample(x_ABK: Tensor, weight: Weight, start: int, every: int) -> Tensor:
    """Every n-th row of a range that begins at row `start` of the weight, as [A', B', K]: a copy."""
    return (x_ABK[-start % every :: every] if weight.dim == -1 else x_ABK[:, ::every]).contiguous()


def operands(task: Task, weight: Weight, x_ABK: Tensor) -> Iterator[tuple[str, Recipe, Tensor, Tensor | None]]:
    """Of each of a task's columns: its name, the recipe, what it is taken on [A, B, K], and NVFP4's tensor scale."""
    maxima, sampled = dict(task.maxima), {1: x_ABK}
    for column in task.columns:
        recipe, every = split(column)
        if every not in sampled:
            sampled[every] = sample(x_ABK, weight, task.start, every)
        x = sampled[every]
        if column in maxima:
            dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
            scale = nvfp4_tensor_scale(torch.tensor(maxima[column], dtype=dtype, device=x.device), recipe.rule)
        else:
            scale = whole_tensor_scale(x, recipe)
        yield column, recipe, x, scale


def finite_amax(x_ABK: Tensor, column: str) -> Tensor:
    """The largest finite magnitude that a column's recipe sees, 0-d on x's device."""
    recipe, _ = split(column)
    return dispatch.operation("qdq", x_ABK, recipe).finite_amax(x_ABK, recipe)


@torch.no_grad()
def run(task: Task, weight: Weight, rows: Tensor) -> Result:
    """Do it. rows: as `read` gives them, on the device that shall compute."""
    x_ABK = operand(rows, weight)
    stats = {
        column: ErrorStats(**dispatch.operation("stats", x, recipe).stats(x, recipe, None, scale))
        for column, recipe, x, scale in operands(task, weight, x_ABK)
    }
    amax = {column: float(finite_amax(x_ABK, column)) for column in task.amax}
    return Result(stats, amax, moments_abk(x_ABK) if task.moments else None)


class Ledger:
    """What is known of every range of a checkpoint, and what is still to be done.

    found: results by place, from an earlier run. moments: whether they are wanted too. Raises RecipeError for a
    macro-block that a range would cut, and for a sample of a recipe that has one scale a tensor.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        columns: Sequence[str],
        found: Mapping[Place, Result] | None = None,
        *,
        moments: bool = False,
    ):
        self.checkpoint, self.columns, self._moments = checkpoint, tuple(columns), moments
        self._whole = tuple(c for c in columns if split(c)[0].base == "nvfp4")
        for column in self._whole:
            if split(column)[1] > 1:
                raise RecipeError(f"recipe '{column}': nvfp4 has one scale a tensor, so it is taken on all rows")
        self._results: dict[Place, Result] = {}
        self._due: dict[int, int] = {}  # ranges whose maximum is still awaited, of weights that need a second round
        for weight in checkpoint.weights:
            self._check_macro(weight)
            for place in self._places(weight):
                if found and (known := found.get(place)):
                    stats = {c: known.stats[c] for c in self.columns if c in known.stats}
                    self._results[place] = Result(stats, dict(known.amax), known.moments)

    def _check_macro(self, weight: Weight) -> None:
        if weight.dim == -1 or weight.shape[-2] * weight.shape[-1] <= ELEMENTS:
            return
        starts = {start % weight.shape[-2] for start, _ in ranges(weight.shape, weight.dim)}
        for column in self.columns:
            recipe, _ = split(column)
            if recipe.mbs and any(start % recipe.macro for start in starts):
                raise RecipeError(
                    f"recipe '{column}': tensor '{weight.name}' {list(weight.shape)} is so large that it is analysed "
                    f"in pieces of a multiple of {_CUT} along its blocked axis, which macro={recipe.macro} must divide"
                )

    def _places(self, weight: Weight) -> list[Place]:
        return [(weight.name, start, stop) for start, stop in ranges(weight.shape, weight.dim)]

    def _known(self, place: Place) -> Result:
        known = self._results.get(place)
        if known is None:
            known = self._results[place] = Result()
        return known

    def tasks(self) -> Iterator[Task]:
        """The first round of every weight, in order; made as they are asked for."""
        for index, weight in enumerate(self.checkpoint.weights):
            places = self._places(weight)
            whole = self._whole if len(places) > 1 else ()
            whole = tuple(c for c in whole if any(c not in self._known(p).stats for p in places))
            first = []
            for place in places:
                known = self._known(place)
                columns = tuple(c for c in self.columns if c not in known.stats and c not in whole)
                amax = tuple(c for c in whole if c not in known.amax)
                moments = self._moments and known.moments is None
                if columns or amax or moments:
                    first.append(Task(index, place[1], place[2], columns, amax, moments=moments))
            if whole:
                self._due[index] = sum(bool(task.amax) for task in first)
            yield from first
            if whole and not self._due[index]:
                del self._due[index]
                yield from self._second(index)

    def add(self, task: Task, result: Result) -> list[Task]:
        """Note a result; returns the tasks that it makes possible."""
        weight = self.checkpoint.weights[task.weight]
        place = (weight.name, task.start, task.stop)
        known = self._known(place)
        known.stats.update(result.stats)
        known.amax.update(result.amax)
        if result.moments is not None:
            self._results[place] = Result(known.stats, known.amax, result.moments)
        if task.weight not in self._due or not task.amax:
            return []
        self._due[task.weight] -= 1
        if self._due[task.weight]:
            return []
        del self._due[task.weight]
        return self._second(task.weight)

    def _second(self, index: int) -> list[Task]:
        places = self._places(self.checkpoint.weights[index])
        maxima = tuple((c, max(self._known(p).amax.get(c, 0.0) for p in places)) for c in self._whole)
        tasks = []
        for place in places:
            columns = tuple(c for c in self._whole if c not in self._known(place).stats)
            if columns:
                tasks.append(Task(index, place[1], place[2], columns, maxima=maxima))
        return tasks

    def parts(self, weight: Weight, column: str) -> Iterator[ErrorStats]:
        """The statistics of a weight's ranges, in their order, as far as they are known."""
        for place in self._places(weight):
            if column in self._known(place).stats:
                yield self._known(place).stats[column]

    def moments(self, weight: Weight) -> Moments:
        """A weight's moments, its ranges' added in their order, as far as they are known."""
        found = (self._known(place).moments for place in self._places(weight))
        return functools.reduce(operator.add, (m for m in found if m is not None), Moments())

    def complete(self, weight: Weight) -> bool:
        """Whether all of a weight is known."""
        wanted = set(self.columns)
        found = (self._known(place) for place in self._places(weight))
        return all(wanted <= f.stats.keys() and not (self._moments and f.moments is None) for f in found)

    def nonfinite(self, weight: Weight) -> bool:
        """Whether a block with a NaN or an Inf has been met in a weight."""
        return any(s.nonfinite_blocks for p in self._places(weight) for s in self._known(p).stats.values())

    def share(self, index: int, task: Task | None = None) -> float:
        """Which part of a weight's work a task is, in [0, 1]; without one: which part is done."""
        weight = self.checkpoint.weights[index]
        places = [(task.start, task.stop, cost(task.columns))] if task else [
            (start, stop, cost(self._known((name, start, stop)).stats)) for name, start, stop in self._places(weight)
        ]  # fmt: skip
        rows = ranges(weight.shape, weight.dim)[-1][1]
        if not rows:
            return float(any(columns for *_, columns in places))
        return sum((stop - start) * columns for start, stop, columns in places) / (rows * cost(self.columns))


def cost(columns: Iterable[str]) -> float:
    """What columns take, in passes over all rows."""
    return sum(1 / split(c)[1] for c in columns)

"""A whole checkpoint through the decomposition: for every linear weight and every recipe, one `ErrorStats`.

    for weight in checkpoint.weights:                            # fixed order
        for start, stop in ranges(weight.shape, weight.dim):     # fixed too: shape and axis alone decide
            rows = checkpoint.read(weight, start, stop)          # a task, wherever it is done (scan_tasks)
            stats[weight, recipe] += error_stats(rows, recipe)
    total[recipe] = Σ stats[weight, recipe]                      # merged in that same order

`scan` keeps a pool of workers busy (scan_workers; scan_ray on a cluster), notes what is finished (scan_journal) and
forms every sum afterwards, from the list of results, in the checkpoint's order. So it does not matter who computed
what, when, or whether it was yesterday: sums come out bit for bit the same (on one kind of device; a GPU's differ by up
to 1e-12).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from mxrl.checkpoint import Checkpoint, Weight
from mxrl.decompose import ErrorStats, Stacked
from mxrl.kinds import KINDS
from mxrl.moments import Moments
from mxrl.recipes import Recipe, RecipeError
from mxrl.scan_journal import Journal
from mxrl.scan_tasks import Ledger, Task, column_of, every_of, ranges, read
from mxrl.scan_workers import MEMORY, Pool, Shape, open_pool, shape_of

PLAIN = "mxfp4"
BASELINES = ("mxfp4:floor", "mxfp4:even", "nvfp4")
_FINITE_CHUNK = 1 << 22  # elements looked at together when a tensor is searched for NaN and Inf


class NonFiniteError(ValueError):
    """A weight holds NaN or Inf: the message names the tensor, how many there are and where the first one is.

    Or its values are finite (float64's), and their squares are not.
    """


@dataclass(frozen=True)
class TensorScan:
    """One weight's statistics, by recipe (`str(recipe)`, in the scan's order).

    sampled: those of the scan's `extra` recipes, on every n-th row. moments: of its values, if asked for.
    """

    weight: Weight
    stats: dict[str, ErrorStats]
    sampled: dict[str, ErrorStats] = field(default_factory=dict)
    moments: Moments | None = None


@dataclass(frozen=True)
class Skipped:
    """A linear weight that was left out on request, and why."""

    weight: Weight
    reason: str


@dataclass(frozen=True)
class Step:
    """Progress: a part of a weight's work, as elements and as bytes of its file, and whether it was `measured` now.

    What an earlier run had measured comes first. The steps of a weight add up to all of it.
    """

    weight: Weight
    numel: float
    nbytes: float
    measured: bool


@dataclass(frozen=True)
class Scan:
    """Every weight's statistics; the sums over them are formed here, in the order of `tensors`."""

    checkpoint: Checkpoint
    recipes: tuple[str, ...]
    baselines: tuple[str, ...]
    tensors: tuple[TensorScan, ...]
    skipped: tuple[Skipped, ...]
    seconds: float
    device: str = "cpu"
    extra: tuple[str, ...] = ()
    every: int = 1  # rows from one of the sample to the next, for `extra`

    @property
    def columns(self) -> tuple[str, ...]:
        """Every recipe that was applied: plain MXFP4, the ones asked for, the baselines."""
        return tuple(dict.fromkeys((PLAIN, *self.recipes, *self.baselines)))

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of layer found, in order of first appearance in a block's forward pass (q, k, v, o, gate, …)."""
        found = {t.weight.kind for t in self.tensors}
        return tuple(k for k in KINDS if k in found)

    def total(self, recipe: str, kind: str | None = None, layer: int | None = None) -> ErrorStats:
        """The merged statistics of `recipe` over all weights, or those of one kind, one layer, or both."""
        return ErrorStats.merged(
            t.stats[recipe]
            for t in self.tensors
            if (kind is None or t.weight.kind == kind) and (layer is None or t.weight.layer == layer)
        )

    def sampled(self, recipe: str, kind: str | None = None) -> ErrorStats:
        """The merged statistics of one of the `extra` recipes over the sample's rows of all weights or of a kind's."""
        return ErrorStats.merged(t.sampled[recipe] for t in self.tensors if kind is None or t.weight.kind == kind)

    def by_kind(self, recipe: str, *, sampled: bool = False) -> dict[str, ErrorStats]:
        """What `total` or `sampled` gives for every kind, and under "" over all weights: in one pass over them."""
        stacked = Stacked([(t.sampled if sampled else t.stats)[recipe] for t in self.tensors])
        kinds = np.array([t.weight.kind for t in self.tensors])
        return {"": stacked.sum()} | {kind: stacked.sum(kinds == kind) for kind in self.kinds}


def parse_recipes(texts: Sequence[str]) -> tuple[str, ...]:
    """The weight operand of each recipe, printed the canonical way, each once. RecipeError for one that can't be.

    What doesn't touch the weights (activations, noise, the backward pass) is dropped: `mxfp4+mbs+aqn+w4a16` is scanned
    as `mxfp4+mbs`.
    """
    recipes = [Recipe.parse(text) for text in texts]
    for text, recipe in zip(texts, recipes, strict=True):
        if not recipe.quantizes:
            raise RecipeError(f"recipe '{text}' quantizes nothing, so there is no error to analyse; leave it out")
    return tuple(dict.fromkeys(str(r.operand) for r in recipes))


def columns_of(recipes: Sequence[str], baselines: Sequence[str] = BASELINES) -> tuple[str, ...]:
    """What a scan of `recipes` computes: plain MXFP4, then those, then the baselines, each once."""
    return tuple(dict.fromkeys((PLAIN, *parse_recipes(recipes), *parse_recipes(baselines))))


def samples_of(checkpoint: Checkpoint, extra: Sequence[str]) -> dict[str, str]:
    """The columns of recipes for which a sample is enough."""
    every = every_of(checkpoint.numel)
    return {recipe: column_of(recipe, every) for recipe in parse_recipes(extra)}


def wanted_of(
    checkpoint: Checkpoint,
    recipes: Sequence[str],
    baselines: Sequence[str] = BASELINES,
    extra: Sequence[str] = (),
) -> tuple[str, ...]:
    """Every column that a scan measures."""
    return tuple(dict.fromkeys((*columns_of(recipes, baselines), *samples_of(checkpoint, extra).values())))


def scan(
    checkpoint: Checkpoint,
    recipes: Sequence[str] = (PLAIN,),
    *,
    baselines: Sequence[str] = BASELINES,
    extra: Sequence[str] = (),
    moments: bool = False,
    on_nonfinite: str = "error",
    progress: Callable[[Step], None] | None = None,
    jobs: int | None = None,
    memory: int = MEMORY,
    device: str = "auto",
    cluster: str | None = None,
    journal: Journal | None = None,
    finished: Callable[[TensorScan], None] = lambda tensor: None,
) -> Scan:
    """Scan every linear weight of `checkpoint` with plain MXFP4, `recipes` and `baselines`.

    extra: further recipes, for which a sample is enough: every n-th row of each weight (scan_tasks.every_of), all of
        them in a small checkpoint. moments: take those of every weight's values too (mxrl.moments).
    on_nonfinite: "error" raises NonFiniteError for the first weight with a NaN or an Inf; "skip" leaves such weights
        out and reports them. progress: called after each task.
    jobs: cores to use, each a process where memory allows; 1: this process alone; None: all of them, or this process
        alone where there's little to do. memory: bytes that all processes together may take, mapped files apart.
    device: "auto" (GPUs for much work, if there are any), "cpu", "cuda" (every GPU, a process each) or "cuda:N".
    cluster: a Ray cluster's address; then jobs, memory and device are the cluster's affair, and its CPUs compute.
    journal: of earlier results, and where new ones go; it must be for the same kind of device.
    finished: told of each of `Scan.tensors`, in their order, as soon as it and all before it are measured.
    Raises RecipeError, NonFiniteError, CheckpointError, WorkerError, ClusterError, JournalError, OptionError, and
    ValueError for another `on_nonfinite`.
    """
    if on_nonfinite not in ("error", "skip"):
        raise ValueError(f"on_nonfinite='{on_nonfinite}'; possible: error, skip")
    started = time.monotonic()
    asked, others = parse_recipes(recipes), parse_recipes(baselines)
    columns = columns_of(recipes, baselines)
    sampled, wanted = samples_of(checkpoint, extra), wanted_of(checkpoint, recipes, baselines, extra)
    ledger = Ledger(checkpoint, wanted, journal.found if journal else None, moments=moments)
    shape = Shape(("cpu",), 1, 1) if cluster else shape_of(checkpoint, wanted, jobs=jobs, memory=memory, device=device)
    tell = _teller(ledger, progress)
    ordered = _Ordered(ledger, columns, sampled, moments, finished)
    ordered.collect()
    poisoned = _poisoned(ledger)
    tasks = list(ledger.tasks())
    if tasks and not (poisoned and on_nonfinite == "error"):
        pool = _on_cluster(checkpoint, cluster) if cluster else open_pool(checkpoint, shape)

        def measured(task: Task) -> None:
            tell(task)
            ordered.collect()

        try:
            drive(pool, ledger, iter(tasks), measured, journal, stop_at_nonfinite=on_nonfinite == "error")
        finally:
            pool.close()
        poisoned = _poisoned(ledger)
    skipped = []
    for weight in poisoned.values():
        found = nonfinite((read(checkpoint, weight, *r) for r in ranges(weight.shape, weight.dim)), weight.shape)
        if on_nonfinite == "error":
            raise NonFiniteError(f"tensor '{weight.name}' has {found}; --on-nonfinite skip leaves it out")
        skipped.append(Skipped(weight, found))
    devices = ", ".join(dict.fromkeys(shape.devices))
    seconds = time.monotonic() - started
    done, every = tuple(ordered.found), every_of(checkpoint.numel)
    return Scan(checkpoint, asked, others, done, tuple(skipped), seconds, devices, tuple(sampled), every)


@dataclass
class _Ordered:
    """The finite tensors, merged in the checkpoint's order while the scan is going on."""

    ledger: Ledger
    columns: Sequence[str]
    sampled: Mapping[str, str]
    moments: bool
    finished: Callable[[TensorScan], None]
    found: list[TensorScan] = field(default_factory=list)
    seen: int = 0

    def collect(self) -> None:
        """Take what has become complete."""
        weights, ledger = self.ledger.checkpoint.weights, self.ledger
        while self.seen < len(weights) and ledger.complete(weight := weights[self.seen]):
            self.seen += 1
            if ledger.nonfinite(weight):
                continue
            tensor = TensorScan(
                weight,
                {c: ErrorStats.merged(ledger.parts(weight, c)) for c in self.columns},
                {recipe: ErrorStats.merged(ledger.parts(weight, c)) for recipe, c in self.sampled.items()},
                ledger.moments(weight) if self.moments else None,
            )
            self.found.append(tensor)
            self.finished(tensor)


def _poisoned(ledger: Ledger) -> dict[str, Weight]:
    """The weights in which a NaN or an Inf has been met, by name, in order."""
    return {weight.name: weight for weight in ledger.checkpoint.weights if ledger.nonfinite(weight)}


def _on_cluster(checkpoint: Checkpoint, address: str) -> Pool:
    from mxrl.scan_ray import Cluster  # Ray is optional, and takes a second to import

    return Cluster(checkpoint, address)


def drive(
    pool: Pool,
    ledger: Ledger,
    tasks: Iterator[Task],
    tell: Callable[[Task], None] = lambda task: None,
    journal: Journal | None = None,
    *,
    stop_at_nonfinite: bool = False,
) -> None:
    """Give `tasks`, and those that their results make possible, to `pool` until none is left.

    stop_at_nonfinite: give out no more once a NaN or an Inf has been met; what was given out before is awaited, so that
    every weight before that one has been looked at.
    """
    second: deque[Task] = deque()
    stopping = False
    while True:
        while pool.free and not stopping:
            task = second.popleft() if second else next(tasks, None)
            if task is None:
                break
            pool.submit(task)
        if not pool.busy:
            return
        task, result = pool.next()
        if journal:
            journal.add(task, result)
        second.extend(ledger.add(task, result))
        tell(task)
        stopping |= stop_at_nonfinite and any(s.nonfinite_blocks for s in result.stats.values())


def _teller(ledger: Ledger, progress: Callable[[Step], None] | None) -> Callable[[Task], None]:
    """Tells `progress` what is known already, at once; returns what tells it of a task."""

    def step(index: int, share: float, measured: bool) -> None:
        weight = ledger.checkpoint.weights[index]
        if progress and share:
            progress(Step(weight, weight.numel * share, weight.nbytes * share, measured))

    for index in range(len(ledger.checkpoint.weights)):
        step(index, ledger.share(index), False)
    return lambda task: step(task.weight, ledger.share(task.weight, task), True)


def nonfinite(pieces: Iterable[Tensor], shape: Sequence[int]) -> str:
    """ "" when every element of a tensor is finite, else how many are not and where the first one is.

    pieces: the tensor of `shape`, cut along its rows.
    """
    nan = inf = 0
    first, seen = -1, 0
    for piece in pieces:
        for part in piece.reshape(-1).split(_FINITE_CHUNK):
            bad = ~torch.isfinite(part)
            if bad.any():
                if first < 0:
                    first = seen + int(bad.nonzero()[0])
                here = int(torch.isnan(part).sum())
                nan, inf = nan + here, inf + int(bad.sum()) - here
            seen += part.numel()
    if first < 0:
        return ""
    index = [int(i) for i in torch.unravel_index(torch.tensor(first), tuple(shape))]
    what = [f"{count} {name}" for count, name in ((nan, "NaN"), (inf, "Inf")) if count]
    return f"{' and '.join(what)} among its {seen:,} elements (the first at {index})"

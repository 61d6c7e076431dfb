"""A whole checkpoint through the decomposition: for every linear weight and every recipe, one `ErrorStats`.

    for weight in checkpoint.weights:                 # fixed order
        x = checkpoint.load(weight)                   # one tensor in memory
        stats[weight, recipe] = error_stats(x, recipe, dim=weight.dim)
    total[recipe] = Σ stats[weight, recipe]           # merged in that same order

`scan_tensor` is the unit of work and depends on nothing but its tensor; every sum is formed afterwards from the list of
results, in the checkpoint's order. So it does not matter who computed which tensor, or when: sums come out bit for bit
the same.
"""

from __future__ import annotations

import functools
import operator
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mxrl.checkpoint import Checkpoint, Weight
from mxrl.decompose import ErrorStats, error_stats
from mxrl.kinds import KINDS
from mxrl.recipes import Recipe, RecipeError

PLAIN = "mxfp4"
BASELINES = ("mxfp4:floor", "mxfp4:even", "nvfp4")
_FINITE_CHUNK = 1 << 22  # elements looked at together when a tensor is checked for NaN and Inf


class NonFiniteError(ValueError):
    """A weight holds NaN or Inf: the message names the tensor, how many there are and where the first one is."""


@dataclass(frozen=True)
class TensorScan:
    """One weight's statistics, by recipe (`str(recipe)`, in the scan's order)."""

    weight: Weight
    stats: dict[str, ErrorStats]


@dataclass(frozen=True)
class Skipped:
    """A linear weight that was left out on request, and why."""

    weight: Weight
    reason: str


@dataclass(frozen=True)
class Scan:
    """Every weight's statistics; the sums over them are formed here, in the order of `tensors`."""

    checkpoint: Checkpoint
    recipes: tuple[str, ...]
    baselines: tuple[str, ...]
    tensors: tuple[TensorScan, ...]
    skipped: tuple[Skipped, ...]
    seconds: float

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
        return merge(
            t.stats[recipe]
            for t in self.tensors
            if (kind is None or t.weight.kind == kind) and (layer is None or t.weight.layer == layer)
        )

    def relative(self, recipe: str) -> float:
        """T of `recipe` over T of plain MXFP4 (NaN where plain MXFP4 makes no error at all)."""
        plain = self.total(PLAIN).sq_error
        return self.total(recipe).sq_error / plain if plain else float("nan")


def merge(stats: Iterable[ErrorStats]) -> ErrorStats:
    """The sum, taken from left to right."""
    return functools.reduce(operator.add, stats, ErrorStats.zero())


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


def scan(
    checkpoint: Checkpoint,
    recipes: Sequence[str] = (PLAIN,),
    *,
    baselines: Sequence[str] = BASELINES,
    on_nonfinite: str = "error",
    progress: Callable[[Weight], None] | None = None,
) -> Scan:
    """Scan every linear weight of `checkpoint` with plain MXFP4, `recipes` and `baselines`.

    `on_nonfinite`: "error" raises NonFiniteError at the first weight with a NaN or an Inf; "skip" leaves the weight out
    and reports it. `progress` is called after each weight. Memory: one tensor and the decomposition's chunks.
    """
    if on_nonfinite not in ("error", "skip"):
        raise ValueError(f"on_nonfinite='{on_nonfinite}'; possible: error, skip")
    started = time.monotonic()
    asked, others = parse_recipes(recipes), parse_recipes(baselines)
    columns = tuple(dict.fromkeys((PLAIN, *asked, *others)))
    done: list[TensorScan] = []
    skipped: list[Skipped] = []
    for weight, x in checkpoint.stream():
        if found := nonfinite(x):
            if on_nonfinite == "error":
                raise NonFiniteError(f"tensor '{weight.name}' has {found}; --on-nonfinite skip leaves it out")
            skipped.append(Skipped(weight, found))
        else:
            done.append(TensorScan(weight, scan_tensor(x, columns, dim=weight.dim)))
        del x  # before the next one is read
        if progress:
            progress(weight)
    return Scan(checkpoint, asked, others, tuple(done), tuple(skipped), time.monotonic() - started)


def scan_tensor(x: Tensor, recipes: Sequence[str], *, dim: int = -1) -> dict[str, ErrorStats]:
    """One tensor's statistics by recipe; blocks lie along `dim`."""
    return {recipe: error_stats(x, recipe, dim=dim) for recipe in recipes}


def nonfinite(x: Tensor) -> str:
    """ "" when every element is finite, else how many are not and where the first one is."""
    flat = x.reshape(-1)
    nan = inf = 0
    first = -1
    for start in range(0, flat.numel(), _FINITE_CHUNK):
        part = flat[start : start + _FINITE_CHUNK]
        bad = ~torch.isfinite(part)
        if not bad.any():
            continue
        if first < 0:
            first = start + int(bad.nonzero()[0])
        here = int(torch.isnan(part).sum())
        nan, inf = nan + here, inf + int(bad.sum()) - here
    if first < 0:
        return ""
    index = [int(i) for i in torch.unravel_index(torch.tensor(first), x.shape)]
    what = [f"{count} {name}" for count, name in ((nan, "NaN"), (inf, "Inf")) if count]
    return f"{' and '.join(what)} among its {x.numel():,} elements (the first at {index})"

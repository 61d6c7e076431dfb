"""What changed between two checkpoints of one model, and how much of it a 4-bit format can see.

    d = B − A                    the update (of RL, of fine-tuning), per weight of A; B's values are put in A's places
    relative change              ‖d‖ / ‖A‖
    codes, scales, values        elements whose stored code differs, blocks whose scale does, elements whose value does
    below half a step            share of ‖d‖² in elements with |d| < step / 2, step: the grid's spacing at A's element
                                 under A's own scale. No single such element needs to move to another grid point.
    unseen                       share of ‖d‖² in elements whose quantized value is the same, bit for bit
    kept                         ⟨Q(B) − Q(A), d⟩ / ‖d‖²: what arrives of the update, 1 where all of it does

The last two differ from "below half a step" in both directions: a small step may cross the border between two cells of
the grid, and a changed scale moves a whole block. Where the elements of A are spread evenly over the cells, rounding
keeps all of an update in the mean (the few that jump make up for the many that stay), while ‖Q(B) − Q(A)‖ ≫ ‖d‖: the
price is noise. Where A is stored in bfloat16, one element in 64 lies exactly on the border of two of E2M1's cells under
a power-of-two scale, so that an update smaller than bfloat16's own step moves those alone, too far: kept exceeds 1.

Fingerprints: ErrorStats of A and B under each recipe, over the same ranges as a scan of A. Sums are float64, in an
order that depends on A's shapes alone.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from mxrl.checkpoint import Checkpoint
from mxrl.decompose import ErrorStats
from mxrl.formats import FORMATS, ElementFormat
from mxrl.kinds import KINDS
from mxrl.ops import dispatch
from mxrl.ops.layout import row_chunks
from mxrl.ops.pack import PackedPass
from mxrl.ops.qdq import format_of
from mxrl.pairs import Pair, Pairing, each_range, match
from mxrl.quantize import whole_tensor_scale
from mxrl.recipes import Recipe
from mxrl.scaling import nvfp4_tensor_scale, scale_from_code
from mxrl.scan import PLAIN, NonFiniteError, Skipped, nonfinite, parse_recipes
from mxrl.scan_tasks import Task, operand, ranges, run


@dataclass(frozen=True)
class Update:
    """Sums over an update, whatever the recipe; `a + b` merges. max_change: the largest |B − A|."""

    numel: int = 0
    changed: int = 0
    sq_norm_a: float = 0.0
    sq_norm_b: float = 0.0
    sq_change: float = 0.0
    dot_a_change: float = 0.0
    max_change: float = 0.0

    def __add__(self, other: Update) -> Update:
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        return Update(**{**sums, "max_change": max(self.max_change, other.max_change)})

    @property
    def relative_change(self) -> float:
        """‖B − A‖ / ‖A‖."""
        return _ratio(math.sqrt(self.sq_change), math.sqrt(self.sq_norm_a))

    @property
    def cos(self) -> float:
        """Between A and B, from ⟨A, B⟩ = ‖A‖² + ⟨A, d⟩."""
        return _ratio(self.sq_norm_a + self.dot_a_change, math.sqrt(self.sq_norm_a) * math.sqrt(self.sq_norm_b))


@dataclass(frozen=True)
class Seen:
    """Sums over what a recipe sees of an update; `a + b` merges.

    codes_changed: elements of which a stored element code differs (either pass's, with OF); None where the recipe has
    no stored form (mxfp4:ideal). sq_below: Σ d² over |d| < step / 2, changed_below: how many of the changed elements
    that are; None with OF, whose two passes have no one step, and for mxfp4:ideal.
    """

    a: ErrorStats = field(default_factory=ErrorStats)
    b: ErrorStats = field(default_factory=ErrorStats)
    codes_changed: int | None = 0
    scales_changed: int | None = 0
    blocks: int = 0
    values_changed: int = 0
    sq_below: float | None = 0.0
    changed_below: int | None = 0
    sq_unseen: float = 0.0
    sq_quantized_change: float = 0.0
    dot_quantized_change: float = 0.0

    def __add__(self, other: Seen) -> Seen:
        sums: dict[str, Any] = {f.name: _sum(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)}
        return Seen(**sums)


def _sum(x: Any, y: Any) -> Any:
    return None if x is None or y is None else x + y


def _ratio(a: float, b: float) -> float:
    return a / b if b else math.nan


@dataclass(frozen=True)
class Change:
    """One weight of A: its update, and what each recipe sees of it."""

    pair: Pair
    update: Update
    seen: dict[str, Seen]


@dataclass(frozen=True)
class Changes:
    """Every weight that A and B share; the sums over them are formed here, in A's order."""

    a: Checkpoint
    b: Checkpoint
    recipes: tuple[str, ...]
    pairing: Pairing
    tensors: tuple[Change, ...]
    skipped: tuple[Skipped, ...]
    seconds: float

    @property
    def kinds(self) -> tuple[str, ...]:
        found = {t.pair.weight.kind for t in self.tensors}
        return tuple(k for k in KINDS if k in found)

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(sorted({t.pair.weight.layer for t in self.tensors if t.pair.weight.layer is not None}))

    def total(self, kind: str | None = None, layer: int | None = None) -> tuple[Update, dict[str, Seen]]:
        """The sums over all weights, or those of one kind or layer."""
        update, seen = Update(), {r: Seen() for r in self.recipes}
        for t in self.tensors:
            if (kind is None or t.pair.weight.kind == kind) and (layer is None or t.pair.weight.layer == layer):
                update += t.update
                seen = {r: seen[r] + t.seen[r] for r in self.recipes}
        return update, seen


def changes(
    a: Checkpoint,
    b: Checkpoint,
    recipes: Sequence[str] = (),
    *,
    on_nonfinite: str = "error",
    progress: Callable[[float], None] = lambda nbytes: None,
) -> Changes:
    """Compare `b` with `a` under plain MXFP4 and `recipes`, one range of rows after another, on the CPU.

    progress: told the bytes done, of `passes_over(recipes)` readings of both. Raises PairError, RecipeError, and
    NonFiniteError for a weight that has a NaN or an Inf in either checkpoint (on_nonfinite "skip" leaves it out).
    """
    started = time.monotonic()
    columns = tuple(dict.fromkeys((PLAIN, *parse_recipes(recipes))))
    pairing = match(a, b)
    maxima = _maxima(a, b, pairing, columns, progress)
    done: list[Change] = []
    skipped: list[Skipped] = []
    parts: list[tuple[Update, dict[str, Seen]]] = []
    bad = ""
    for pair, x, y in each_range(a, b, pairing.pairs, progress):
        bad = bad or _bad(x, a.name) or _bad(y, b.name)
        if bad and on_nonfinite == "error":
            raise NonFiniteError(f"tensor '{pair.weight.name}' has {bad}; --on-nonfinite skip leaves it out")
        if not bad:
            parts.append((update_of(x, y), _seen(pair, x, y, columns, maxima.get(pair.index, {}))))
        else:
            parts.append((Update(), {}))
        if len(parts) < len(ranges(pair.weight.shape, pair.weight.dim)):
            continue
        if bad:
            skipped.append(Skipped(pair.weight, bad))
        else:
            update = functools.reduce(lambda p, q: p + q, (u for u, _ in parts), Update())
            seen = {r: functools.reduce(lambda p, q: p + q, (s[r] for _, s in parts)) for r in columns}
            done.append(Change(pair, update, seen))
        parts, bad = [], ""
    return Changes(a, b, columns, pairing, tuple(done), tuple(skipped), time.monotonic() - started)


def passes_over(recipes: Sequence[str]) -> int:
    """How often `changes` reads the two checkpoints: twice where a recipe has one scale a tensor."""
    return 2 if any(Recipe.parse(r).base == "nvfp4" for r in recipes) else 1


def _bad(rows: Tensor, name: str) -> str:
    return "" if torch.isfinite(rows).all() else f"{nonfinite([rows], rows.shape)} in {name}"


Maxima = dict[str, tuple[float, float]]  # of A's and B's weight, by recipe


def _maxima(
    a: Checkpoint, b: Checkpoint, pairing: Pairing, columns: Sequence[str], progress: Callable[[float], None]
) -> dict[int, Maxima]:
    """The largest finite magnitude of either weight, for recipes that have one scale a tensor."""
    whole = tuple(c for c in columns if Recipe.parse(c).base == "nvfp4")
    found: dict[int, Maxima] = {}
    if not whole:
        return found
    for pair, x, y in each_range(a, b, pairing.pairs, progress):
        task = Task(pair.index, 0, x.shape[0], (), amax=whole)
        here, there = run(task, pair.weight, x).amax, run(task, pair.weight, y).amax
        known = found.setdefault(pair.index, {})
        for c in whole:
            p, q = known.get(c, (0.0, 0.0))
            known[c] = max(p, here[c]), max(q, there[c])
    return found


def _pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same few rows of each tensor at a time, as float64."""
    step = max(1, (1 << 20) // max(tensors[0].shape[-1], 1))
    for begin in range(0, tensors[0].shape[0], step):
        yield tuple(t[begin : begin + step].double() for t in tensors)


def _sq(x: Tensor) -> float:
    """Σ x² in an order that no number of threads changes: rows first, each by one thread, then one after another."""
    return _dot(x, x)


def _dot(x: Tensor, y: Tensor) -> float:
    return float((x * y).sum(-1).numpy().sum())


def update_of(x: Tensor, y: Tensor) -> Update:
    """The sums over rows of A, `x`, and of B, `y`: [rows, columns], finite."""
    total = Update()
    for p, q in _pieces(x, y):
        d = q - p
        largest = float(d.abs().amax()) if d.numel() else 0.0
        total += Update(p.numel(), int((d != 0).sum()), _sq(p), _sq(q), _sq(d), _dot(p, d), largest)
    return total


@torch.no_grad()
def _seen(pair: Pair, x: Tensor, y: Tensor, columns: Sequence[str], maxima: Maxima) -> dict[str, Seen]:
    weight = pair.weight
    tasks = [
        Task(pair.index, 0, x.shape[0], tuple(columns), maxima=tuple((c, m[side]) for c, m in maxima.items()))
        for side in (0, 1)
    ]
    stats = [run(task, weight, rows).stats for task, rows in zip(tasks, (x, y), strict=True)]
    wide = torch.float64 if torch.float64 in (x.dtype, y.dtype) else torch.float32
    x_ABK, y_ABK = operand(x.to(wide), weight), operand(y.to(wide), weight)
    return {c: seen_by(Recipe.parse(c), x_ABK, y_ABK, stats[0][c], stats[1][c], maxima.get(c)) for c in columns}


def seen_by(
    recipe: Recipe,
    x_ABK: Tensor,
    y_ABK: Tensor,
    a: ErrorStats,
    b: ErrorStats,
    maxima: tuple[float, float] | None = None,
) -> Seen:
    """What `recipe` sees of y − x: float32 (or float64) operands of one shape, finite; a, b: their fingerprints.

    maxima: of the whole tensors that x and y are rows of, for nvfp4; None: of x and y themselves.
    """
    if maxima is None:
        scales = [whole_tensor_scale(v, recipe) for v in (x_ABK, y_ABK)]
    else:
        scales = [nvfp4_tensor_scale(torch.tensor(m, dtype=x_ABK.dtype), recipe.rule) for m in maxima]
    values = []
    for v, scale in zip((x_ABK, y_ABK), scales, strict=True):
        values.append(torch.empty(v.shape, dtype=v.dtype))
        dispatch.operation("qdq", v, recipe).qdq(v, recipe, values[-1], scale)
    codes = scale_count = sq_below = changed_below = None
    steps: Iterator[tuple[int, int, Tensor]] | None = None
    if recipe.rule != "ideal":
        packed = [
            dispatch.operation("pack", v, recipe).pack(v, recipe, scale)
            for v, scale in zip((x_ABK, y_ABK), scales, strict=True)
        ]
        codes, scale_count = _codes_changed(packed[0], packed[1], recipe, scales)
        if not recipe.of:
            sq_below, changed_below = 0.0, 0
            steps = _half_steps(x_ABK, packed[0][0], recipe, scales[0])
    moved, sq_unseen, sq_q, dot_q = 0, 0.0, 0.0, 0.0
    chunks = zip(*(row_chunks(t) for t in (x_ABK, y_ABK, *values)), strict=True)
    for (begin, end, p), (_, _, q), (_, _, p_quantized), (_, _, q_quantized) in chunks:
        d, jump = q.double() - p.double(), q_quantized.double() - p_quantized.double()
        still = q_quantized == p_quantized
        moved += int((~still).sum())
        sq_unseen += _sq(torch.where(still, d, 0.0))
        sq_q += _sq(jump)
        dot_q += _dot(jump, d)
        if steps is not None:
            low, high, half = next(steps)
            assert (low, high) == (begin, end)
            below = d.abs() < half
            assert sq_below is not None and changed_below is not None
            sq_below += _sq(torch.where(below, d, 0.0))
            changed_below += int((below & (d != 0)).sum())
    blocks = x_ABK.shape[0] * x_ABK.shape[1] * -(-x_ABK.shape[2] // format_of(recipe).block)
    return Seen(a, b, codes, scale_count, blocks, moved, sq_below, changed_below, sq_unseen, sq_q, dot_q)


def _codes_changed(
    a: list[PackedPass], b: list[PackedPass], recipe: Recipe, tensor_scales: Sequence[Tensor | None]
) -> tuple[int, int]:
    """(elements with a differing code in any pass, blocks whose scale of the first pass differs as a number)."""
    fmt = format_of(recipe)
    differs: Tensor | None = None
    for p, q in zip(a, b, strict=True):
        other = p.codes ^ q.codes
        differs = other if differs is None else differs | other
    assert differs is not None
    if fmt.element.bits == 4:
        codes = int(((differs & 15) != 0).sum()) + int(((differs >> 4) != 0).sum())
    else:
        codes = int((differs != 0).sum())
    effective = [_effective_scales(p[0], recipe, s) for p, s in zip((a, b), tensor_scales, strict=True)]
    return codes, int((effective[0] != effective[1]).sum())


def _effective_scales(packed: PackedPass, recipe: Recipe, tensor_scale: Tensor | None) -> Tensor:
    """float64 [R, blocks of the row]: a block's scale, with MBS's factor (256 + k) / 256 divided out."""
    fmt = format_of(recipe)
    scale = scale_from_code(packed.scales, fmt, recipe.rule, torch.float32, tensor_scale).double()
    if packed.mantissas is None:
        return scale
    factor = (256 + packed.mantissas.double()) / 256
    return scale / factor.repeat_interleave(recipe.macro // fmt.block, -1)[:, : scale.shape[1]]


def _half_steps(
    x_ABK: Tensor, packed: PackedPass, recipe: Recipe, tensor_scale: Tensor | None
) -> Iterator[tuple[int, int, Tensor]]:
    """(first row, end row, half the grid's spacing at each element of x, float64 [r, K])."""
    fmt = format_of(recipe)
    scales = _effective_scales(packed, recipe, tensor_scale)
    for begin, end, rows in row_chunks(x_ABK):
        scale = scales[begin:end].repeat_interleave(fmt.block, -1)[:, : rows.shape[1]]
        yield begin, end, spacing(rows.double().abs() / scale, FORMATS[fmt.name].element) * scale / 2


def spacing(magnitude: Tensor, element: ElementFormat) -> Tensor:
    """The distance between the grid points around each |x| / scale, float64: for E2M1 .5 below 2, 1 below 4, then 2.

    Below the smallest normal value it is the subnormal one, beyond the largest value that of the last interval.
    """
    top = math.frexp(element.max)[1] - 1
    exponent = torch.frexp(magnitude)[1] - 1
    exponent = torch.where(magnitude > 0, exponent, element.min_exponent).clamp(element.min_exponent, top)
    return torch.ldexp(torch.ones_like(magnitude), exponent - element.mantissa_bits)

"""The error of a checkpoint that someone quantized, relative to its original, in the same three components.

    C(x)      what QUANTIZED stores for ORIGINAL's weight x, dequantized
    Q*, D     the ideal-scale quantizer and the deadzone of the *reference format*, on x
    C(x) − x = e_scale + e_dz + e_grid    with e_scale = C(x) − Q*(x), as in mxrl.decompose, exactly

The reference is the format in which the weight is stored where that is MXFP4, MXFP8 or NVFP4, and MXFP4 for everything
else. There, grid and deadzone (the floor) are what MXFP4 under ideal scales would lose on x, and e_scale is *all* that
distinguishes C from it: other levels (INT4), other groups (128), zero points, calibration (GPTQ moves the rounding of
one column into the next). The excess T − floor then says how much worse (or better: below zero) C is than that, not
what its scales cost. `same_grid` tells the two cases apart.

Where C(x) equals a recipe of ours bit for bit on every element, that is said (`same_as`), and the statistics are that
recipe's own: with δ, which values alone don't give. Ours and C's are measured over the same ranges of rows, in the same
order (scan_tasks), so they are comparable to the last bit. AWQ and rotations (QuaRot, SpinQuant) move factors from one
layer into another: against the original, the weights of such a checkpoint differ by more than rounding (`warnings`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mxrl.checkpoint import Checkpoint, Weight
from mxrl.checkpoints.encodings import Scaled
from mxrl.decompose import ErrorStats
from mxrl.formats import FORMATS
from mxrl.ops import dispatch
from mxrl.pairs import Pair, Pairing, each_range, match, stored_bytes
from mxrl.quantize import fake_quantize
from mxrl.recipes import Recipe
from mxrl.scan import BASELINES, NonFiniteError, Scan, Skipped, nonfinite, parse_recipes, scan
from mxrl.scan_tasks import operand, ranges
from mxrl.scan_workers import MEMORY

STORED = "stored"  # the column of QUANTIZED's own error, beside the recipes'
ORIGINAL = "original"  # `same_as` of a weight that was left as it was
_REFERENCES = {"MXFP4": "mxfp4", "NVFP4": "nvfp4"}
_LOOK = 1 << 18  # elements by which the recipe that a stored weight comes closest to is chosen
_RULES = ("mxfp4", "mxfp4:floor", "mxfp4:even")


@dataclass(frozen=True)
class StoredError:
    """The error of one weight as QUANTIZED stores it.

    reference: the format whose Q* and D `stats` refer to. same_grid: its elements are that format's. same_as: the
    recipe that C(x) equals bit for bit (where it is stored as floats, in their type), "original" where it equals x,
    else None. equal: for weights stored on a recipe's grid, how many elements of C(x) are those of the closest recipe
    (of each, where several are as close). bits: stored, an element, scales included.
    """

    pair: Pair
    stats: ErrorStats
    reference: str
    same_grid: bool
    same_as: str | None
    equal: dict[str, int]
    bits: float

    @property
    def stored_as(self) -> str:
        """How QUANTIZED stores it, in words."""
        return "; ".join(dict.fromkeys(w.stored_as for w in self.pair.others))


@dataclass(frozen=True)
class Against:
    """`ours`: the scan of ORIGINAL's matched weights; `stored`: one entry for each of its tensors, in its order."""

    quantized: Checkpoint
    pairing: Pairing
    ours: Scan
    stored: tuple[StoredError, ...]
    skipped: tuple[Skipped, ...]
    seconds: float

    def total(self, kind: str | None = None, layer: int | None = None) -> ErrorStats:
        """The merged statistics of QUANTIZED's error over all weights, or those of one kind or layer."""
        return ErrorStats.merged(
            s.stats
            for s in self.stored
            if (kind is None or s.pair.weight.kind == kind) and (layer is None or s.pair.weight.layer == layer)
        )


def reference_of(weights: Sequence[Weight]) -> tuple[str, bool]:
    """(the format that C's error is referred to, whether C's elements are of that format) for how C is stored."""
    found = {_REFERENCES.get(w.dtype) or ("mxfp8" if _is_mxfp8(w) else None) for w in weights}
    (reference, *more) = found
    if more or reference is None:
        return "mxfp4", False
    return reference, True


def _is_mxfp8(weight: Weight) -> bool:
    scaled = weight.encoding
    return (
        isinstance(scaled, Scaled)
        and weight.dtype == "F8_E4M3"
        and scaled.block == (1, 32)
        and scaled.scale.dtype in ("U8", "F8_E8M0")
    )


@torch.no_grad()
def foreign_stats(x_rows: Tensor, c_rows: Tensor, weight: Weight, reference: str) -> ErrorStats:
    """The statistics of C(x) − x over a range of ORIGINAL's `weight`: both [rows, shape[-1]], any float dtype."""
    x_ABK, c_ABK = operand(x_rows, weight), operand(_wide(c_rows, x_rows.dtype), weight)
    recipe = Recipe(reference, "" if reference == "nvfp4" else "ceil")
    return ErrorStats(**dispatch.operation("stats", x_ABK, recipe).stats(x_ABK, recipe, c_ABK, None))


def _wide(rows: Tensor, like: torch.dtype) -> Tensor:
    return rows.to(torch.float64 if like == torch.float64 else torch.float32)


def against(
    quantized: Checkpoint,
    original: Checkpoint,
    recipes: Sequence[str] = (),
    *,
    baselines: Sequence[str] = BASELINES,
    on_nonfinite: str = "error",
    jobs: int | None = None,
    memory: int = MEMORY,
    device: str = "auto",
    scanned: Callable[[float], None] = lambda nbytes: None,
    compared: Callable[[float], None] = lambda nbytes: None,
) -> Against:
    """Measure `quantized` relative to `original`, beside plain MXFP4, `recipes` and `baselines` on the original.

    scanned, compared: told the bytes done of either half. jobs, memory, device: of the scan of the original
    (`mxrl.scan.scan`); the comparison runs in this process, on the CPU, and holds a few ranges of 2^24 elements.
    Raises PairError (nothing in common), NonFiniteError, and what `scan` raises.
    """
    started = time.monotonic()
    pairing = match(original, quantized)
    ours = scan(
        pairing.of_a(original), tuple(recipes) or ("mxfp4",), baselines=baselines, on_nonfinite=on_nonfinite,
        progress=lambda step: scanned(step.nbytes), jobs=jobs, memory=memory, device=device,
    )  # fmt: skip
    asked = parse_recipes(recipes)
    by_weight = {t.weight.name: t.stats for t in ours.tensors}
    kept = [pair for pair in pairing.pairs if pair.weight.name in by_weight]
    stored: list[StoredError] = []
    skipped: list[Skipped] = list(ours.skipped)
    gathered: _Gathered | None = None
    for pair, x, c in each_range(original, quantized, kept, lambda nbytes: compared(nbytes)):
        if gathered is None or gathered.pair is not pair:
            gathered = _Gathered(pair, asked)
        gathered.add(x, c)
        if not gathered.complete:
            continue
        if gathered.bad:
            found = f"{gathered.bad} in {quantized.name}"
            if on_nonfinite == "error":
                raise NonFiniteError(f"tensor '{pair.weight.name}' has {found}; --on-nonfinite skip leaves it out")
            skipped.append(Skipped(pair.weight, found))
        else:
            stored.append(gathered.result(by_weight[pair.weight.name], quantized))
    poisoned = {s.weight.name for s in skipped}
    ours = _without(ours, poisoned)
    return Against(quantized, pairing, ours, tuple(stored), tuple(skipped), time.monotonic() - started)


def _without(ours: Scan, names: set[str]) -> Scan:
    return replace(ours, tensors=tuple(t for t in ours.tensors if t.weight.name not in names))


class _Gathered:
    """What is known of one pair, range after range."""

    def __init__(self, pair: Pair, recipes: Sequence[str]):
        self.pair = pair
        self.reference, self.same_grid = reference_of(pair.others)
        self.bad = ""
        self._floats = not any(w.quantized for w in pair.others)
        self._parts: list[ErrorStats] = []
        self._left = len(ranges(pair.weight.shape, pair.weight.dim))
        self._seen = 0
        self._equal = dict.fromkeys(_candidates(pair, self.reference, self.same_grid, recipes), 0)
        self._rounded: set[str] = set()  # candidates that C equals only once they are rounded to the type of its file

    @property
    def complete(self) -> bool:
        return self._left == 0

    def add(self, x: Tensor, c: Tensor) -> None:
        self._left -= 1
        if not self.bad and not torch.isfinite(c).all():
            self.bad = nonfinite([c], c.shape)
        if self.bad:
            return
        self._parts.append(foreign_stats(x, c, self.pair.weight, self.reference))
        if not self._seen and len(self._equal) > 1 and not self._floats and self.pair.weight.dim == -1:
            self._keep_closest(x, c)
        for candidate, before in self._equal.items():
            if before == self._seen or not self._floats:  # of floats only a whole weight's equality tells anything
                self._equal[candidate] += self._equals(candidate, x, c)
        self._seen += x.numel()

    def _keep_closest(self, x: Tensor, c: Tensor) -> None:
        """Drop the candidates that a first look at some rows finds behind another one."""
        rows = max(1, _LOOK // max(x.shape[1], 1))
        found = {candidate: self._equals(candidate, x[:rows], c[:rows]) for candidate in self._equal}
        self._equal = dict.fromkeys((r for r, count in found.items() if count == max(found.values())), 0)

    def _equals(self, candidate: str, x: Tensor, c: Tensor) -> int:
        """How many elements of C are those of `candidate` on x (zeros of either sign are the same)."""
        rows = q = _wide(x, x.dtype)
        if candidate != ORIGINAL:
            weight = self.pair.weight
            k = min(weight.shape[-2], rows.shape[0]) if weight.dim == -2 else 1
            view = rows.view(-1, k, rows.shape[1]) if weight.dim == -2 and k else rows
            q = fake_quantize(view, candidate, dim=weight.dim).view(rows.shape)
        wide = int((q == _wide(c, x.dtype)).sum())
        if wide == q.numel() or c.dtype.itemsize >= q.dtype.itemsize:
            return wide
        narrow = int((q.to(c.dtype) == c).sum())
        if narrow > wide:
            self._rounded.add(candidate)
        return max(narrow, wide)

    def result(self, ours: dict[str, ErrorStats], quantized: Checkpoint) -> StoredError:
        same_as = next((c for c, count in self._equal.items() if count == self._seen), None)
        stats = ErrorStats.merged(self._parts)
        if same_as is not None and same_as in ours and same_as not in self._rounded:
            stats = ours[same_as]
        same_grid = self.same_grid or bool(same_as and same_as != ORIGINAL)
        bits = 8 * stored_bytes(quantized, self.pair) / max(self.pair.weight.numel, 1)
        equal = {} if self._floats else dict(self._equal)
        return StoredError(self.pair, stats, self.reference, same_grid, same_as, equal, bits)


def _candidates(pair: Pair, reference: str, same_grid: bool, recipes: Sequence[str]) -> Iterable[str]:
    """What C may equal bit for bit: to compare takes longer than the statistics, so only what its type allows.

    Not NVFP4's recipes, whose scale is the whole tensor's.
    """
    if not any(w.quantized for w in pair.others):
        found = dict.fromkeys((ORIGINAL, *_RULES, *recipes))
        return [c for c in found if c == ORIGINAL or Recipe.parse(c).base != "nvfp4"]
    return {"mxfp4": _RULES, "mxfp8": ("mxfp8",)}.get(reference, ()) if same_grid else ()


def reading(result: Against) -> list[str]:
    """The sentences that must stand beside the numbers: what the split means for how these weights are stored."""
    own = sorted({s.reference for s in result.stored if s.same_grid and s.same_as != ORIGINAL})
    other = sorted({_grid_in_words(s) for s in result.stored if not s.same_grid and s.same_as != ORIGINAL})
    kept = sum(s.same_as == ORIGINAL for s in result.stored)
    out = []
    if own:
        out.append(
            f"Weights stored as {' and '.join(FORMATS[f].name.upper() for f in own)}: grid and deadzone are the error "
            "under that format's own ideal scales. The scale term is the scales' where each weight was rounded to the "
            "nearest level, as a recipe does; a calibrated quantizer (GPTQ) rounds on purpose elsewhere, and the scale "
            "term and the excess hold that too."
        )
    if other:
        out.append(
            f"Weights stored as {'; '.join(other)}: not on MXFP4's grid. They are split by MXFP4's ideal-scale "
            "quantizer: grid and deadzone (the floor) are what that would lose on the original, and the scale term "
            "holds everything in which this quantizer differs from it: levels, groups, zero points, calibration. Its "
            "excess says how much more it loses than MXFP4 under ideal scales (below zero: less), not what its scales "
            "cost."
        )
    if len({s.reference for s in result.stored}) > 1:
        out.append("Sums over weights of different reference formats add up errors that are split by different rules.")
    if kept:
        out.append(f"{kept} of {len(result.stored)} weights are the original's, bit for bit.")
    return out


def _grid_in_words(error: StoredError) -> str:
    floats = not any(w.quantized for w in error.pair.others)
    return f"{error.stored_as} (equal to no recipe here bit for bit)" if floats else error.stored_as

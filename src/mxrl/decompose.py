"""The exact decomposition of a quantization error, its statistics, and component injection.

Per block b with maximum m_b, Q* is the quantizer with the unrounded ideal scale m_b / q_max, and D the deadzone
{|x| < m_b · q_min / (2 q_max)} (for E2M1: |x| < m_b / 24). Any quantizer C is split as

    C(x) − x = e_scale + e_dz + e_grid
    e_scale  = C(x) − Q*(x)               the scale is not the ideal one (or C is another quantizer altogether)
    e_dz     = (Q*(x) − x)·1[D]           small values zeroed
    e_grid   = (Q*(x) − x)·1[not D]       rounding between grid points

Q and Q* are rounded once to float32 (float64 for float64 inputs), differences are taken in float64: exact.
‖e_scale‖² exceeds the whole error T, because 2⟨e_scale, e_grid⟩ is about −1.4·T: it is no slice of a pie. What better
scales could win is the *excess* T − floor, floor = ‖e_grid‖² + ‖e_dz‖² — the limit under the max-to-6 rule, not a
lower bound on error: an MSE-searched scale goes below it.

Source: arXiv 2605.20402 (the decomposition); the excess and the control injections are ours.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mxrl.formats import BlockFormat
from mxrl.ops import dispatch
from mxrl.ops.inject import COMPONENTS
from mxrl.ops.inject import inject as reference_inject
from mxrl.ops.layout import as_abk, check_input, write_rows
from mxrl.ops.stats import DELTA_BINS, chunks
from mxrl.quantize import whole_tensor_scale
from mxrl.recipes import Recipe

Quantizer = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class ErrorStats:
    """Sums over a tensor's finite blocks; `a + b` merges. Counts are exact, sums are float64.

    Field names are those of the JSON files. `delta` is log2(s_b / s*_b) of a block's effective scale, over blocks that
    are not zero and whose exponent was not clamped; `gamma` is 2^delta. For a plain callable there is no scale, so no
    delta. `sq_scale` is ‖C − Q*‖². Blocks with a NaN or an Inf are counted and left out of everything else.
    """

    numel: int = 0
    sq_norm: float = 0.0
    dot_q_x: float = 0.0
    sq_error: float = 0.0
    sq_scale: float = 0.0
    sq_deadzone: float = 0.0
    sq_grid: float = 0.0
    dot_scale_grid: float = 0.0
    dot_scale_deadzone: float = 0.0
    dot_deadzone_grid: float = 0.0
    deadzone_count: int = 0
    exact_zero_count: int = 0
    zero_blocks: int = 0
    clamped_blocks: int = 0
    nonfinite_blocks: int = 0
    delta_count: int = 0
    delta_sum: float = 0.0
    delta_sq_sum: float = 0.0
    gamma_sum: float = 0.0
    delta_hist: tuple[int, ...] = (0,) * DELTA_BINS
    sq_error_deadzone: float = 0.0
    sq_error_elsewhere: float = 0.0
    deadzone_nonzero_count: int = 0

    def __add__(self, other: ErrorStats) -> ErrorStats:
        merged: dict[str, Any] = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        merged["delta_hist"] = tuple(a + b for a, b in zip(self.delta_hist, other.delta_hist, strict=True))
        return ErrorStats(**merged)

    @classmethod
    def zero(cls) -> ErrorStats:
        return cls()

    @classmethod
    def merged(cls, stats: Iterable[ErrorStats]) -> ErrorStats:
        """zero + a + b + …, taken from left to right: the bits of `+`."""
        several = tuple(stats)
        return several[0] if len(several) == 1 else Stacked(several).sum()

    def to_dict(self) -> dict[str, Any]:
        return vars(self) | {"delta_hist": list(self.delta_hist)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ErrorStats:
        known = {f.name for f in fields(cls)}
        kept = {k: v for k, v in values.items() if k in known}
        return cls(**{**kept, "delta_hist": tuple(kept.get("delta_hist", (0,) * DELTA_BINS))})

    # Derived figures: NaN where there is nothing to divide by.
    @property
    def rel_mse(self) -> float:
        """T / ‖x‖²."""
        return _ratio(self.sq_error, self.sq_norm)

    @property
    def floor(self) -> float:
        """‖e_grid‖² + ‖e_dz‖²: the error left under ideal scales."""
        return self.sq_grid + self.sq_deadzone

    @property
    def excess(self) -> float:
        """T − floor, in the units of T: what the scales cost."""
        return self.sq_error - self.floor

    @property
    def cos_scale_grid(self) -> float:
        return _ratio(self.dot_scale_grid, math.sqrt(self.sq_scale * self.sq_grid))

    @property
    def deadzone_fraction(self) -> float:
        return _ratio(self.deadzone_count, self.numel)

    @property
    def delta_mean(self) -> float:
        return _ratio(self.delta_sum, self.delta_count)

    @property
    def delta_var(self) -> float:
        """Population variance of delta."""
        variance = _ratio(self.delta_sq_sum, self.delta_count) - self.delta_mean**2
        return variance if math.isnan(variance) else max(0.0, variance)

    @property
    def gamma_mean(self) -> float:
        """mean 2^delta: how much larger than ideal the scales are. No gain of the tensor: see `gain`."""
        return _ratio(self.gamma_sum, self.delta_count)

    @property
    def gain(self) -> float:
        """⟨C(x), x⟩ / ‖x‖², about .99: the gain that the tensor itself sees."""
        return _ratio(self.dot_q_x, self.sq_norm)


_TYPES = {f.name: np.int64 if f.type == "int" else np.float64 for f in fields(ErrorStats) if f.name != "delta_hist"}
_numbers = operator.attrgetter(*_TYPES)


class Stacked:
    """Very many tensors' statistics, field by field, for sums over all and over some of them."""

    def __init__(self, several: Sequence[ErrorStats]):
        columns = zip(*map(_numbers, several), strict=True) if several else [()] * len(_TYPES)
        self._fields = {n: np.array(c, _TYPES[n]) for n, c in zip(_TYPES, columns, strict=True)}
        bins = itertools.chain.from_iterable(one.delta_hist for one in several)
        self._hist = np.fromiter(bins, np.int64, len(several) * DELTA_BINS).reshape(-1, DELTA_BINS)

    def sum(self, which: np.ndarray | slice = slice(None)) -> ErrorStats:
        """zero + a + b + …, taken from left to right: the bits of `+`. which: of them, as numpy picks rows."""
        sums: dict[str, Any] = {}
        for name, values in self._fields.items():
            some = values[which]
            sums[name] = np.add.accumulate(np.append(some.dtype.type(0), some))[-1].item()  # an np.sum adds in pairs
        return ErrorStats(**sums, delta_hist=tuple(self._hist[which].sum(0).tolist()))


def _ratio(a: float, b: float) -> float:
    return a / b if b else math.nan


@dataclass(frozen=True)
class Decomposition:
    """The components of one tensor's error, float64 in its shape (NaN in poisoned blocks).

    mask: bool, the deadzone D. orthogonal: whether ⟨e_dz, e_scale⟩ = ⟨e_dz, e_grid⟩ = 0 is *guaranteed* for this
    quantizer (and float64 tensor: one whose scales were clamped isn't); the inner products themselves are in `stats`,
    measured, never assumed.
    """

    scale: Tensor
    deadzone: Tensor
    grid: Tensor
    total: Tensor
    mask: Tensor
    stats: ErrorStats
    orthogonal: bool


def is_orthogonal(recipe: Recipe | Quantizer) -> bool:
    """True where the effective scale is at least the ideal one, so that all of D goes to zero."""
    if not isinstance(recipe, Recipe):
        return False
    ceiling = recipe.rule == "ceil" or recipe.rule.startswith("e8m")
    ceiling |= recipe.rule == "ideal" and not recipe.mbs  # p·x and p·m are rounded apart, and the ratio may pass 1/4
    return recipe.base in ("mxfp4", "mxfp8") and ceiling and recipe.mbs != "joint" and not recipe.of


@dataclass(frozen=True)
class _Job:
    """What the operations take: x and a foreign C(x), if there is one, as [A, B, K], and the recipe they refer to."""

    x_ABK: Tensor
    recipe: Recipe
    foreign_ABK: Tensor | None
    tensor_scale: Tensor | None

    @classmethod
    def of(
        cls, x: Tensor, recipe: Recipe | Quantizer, dim: int, fmt: BlockFormat | None, backend: str | None = None
    ) -> _Job:
        if not isinstance(fmt, BlockFormat | None):
            raise TypeError(f"decompose: format={fmt!r}; possible: MXFP4, MXFP8, NVFP4 (mxrl.formats)")
        x = x.detach()
        x_ABK = as_abk(x, dim)
        if isinstance(recipe, Recipe) and recipe.quantizes and fmt in (None, recipe.format):
            # Q is rounded once to float32, so a bf16 or fp16 tensor is quantized as the float32 tensor of its values.
            return cls(x_ABK, recipe, None, whole_tensor_scale(x_ABK, recipe, backend))
        if isinstance(recipe, Recipe):
            foreign = x
            if recipe.quantizes:
                raise ValueError(f"decompose: {recipe} is of format {recipe.base}; format= is for callables")
        else:
            foreign = recipe(x)
        if not isinstance(foreign, Tensor):
            raise TypeError(f"decompose: the quantizer gave a {type(foreign).__name__}; it must give a tensor")
        if foreign.shape != x.shape:
            shapes = f"{tuple(x.shape)} to {tuple(foreign.shape)}"
            raise ValueError(f"decompose: the quantizer changed the shape from {shapes}; it must keep it")
        foreign = foreign.detach().to(x.dtype if x.dtype == torch.float64 else torch.float32)
        name = fmt.name if fmt else "mxfp4"
        return cls(x_ABK, Recipe(name, "" if name == "nvfp4" else "ceil"), as_abk(foreign, dim), None)


@torch.no_grad()
def error_stats(
    x: Tensor,
    recipe: str | Recipe | Quantizer = "mxfp4",
    *,
    dim: int = -1,
    format: BlockFormat | None = None,
    backend: str | None = None,
) -> ErrorStats:
    """The statistics of the decomposition alone, streamed (no whole-tensor temporaries).

    Arguments and errors as `decompose`. Equal bit for bit however many threads run it; between backends counts are
    equal, and sums to 1e-12 relative.
    """
    recipe, dim = _checked(x, recipe, dim, "error_stats")
    job = _Job.of(x, recipe, dim, format, backend)
    operation = dispatch.operation("stats", job.x_ABK, job.recipe, backend)
    return ErrorStats(**operation.stats(job.x_ABK, job.recipe, job.foreign_ABK, job.tensor_scale))


@torch.no_grad()
def decompose(
    x: Tensor,
    recipe: str | Recipe | Quantizer = "mxfp4",
    *,
    dim: int = -1,
    format: BlockFormat | None = None,
    backend: str | None = None,
) -> Decomposition:
    """Split the quantization error of `x` along `dim` exactly into scale, deadzone and grid.

    x: any float dtype and shape (bf16 and fp16 are taken as the float32 values they are). recipe: its grammar, a
        Recipe, or any callable Tensor -> Tensor of the same shape. format: the block format whose Q* and D a callable
        is referred to (default MXFP4); a recipe brings its own. backend: of the statistics, see `mxrl.ops.dispatch`.
    Returns a Decomposition with x + scale + deadzone + grid == C(x) exactly; of float64 tensors to a rounding of each.
    """
    recipe, dim = _checked(x, recipe, dim, "decompose")
    job = _Job.of(x, recipe, dim, format, backend)
    columns = x.shape[dim]

    def like_x(dtype: torch.dtype) -> Tensor:
        return torch.empty(x.shape, dtype=dtype, device=x.device)

    out = [like_x(torch.float64) for _ in range(4)]
    mask = like_x(torch.bool)
    for begin, end, c in chunks(job.x_ABK, job.recipe, job.foreign_ABK, job.tensor_scale):
        for target, part in zip(out, c.components(), strict=True):
            part = torch.where(c.valid.unsqueeze(-1), part, float("nan")).flatten(1)[:, :columns]
            write_rows(as_abk(target, dim), begin, end, part)
        write_rows(as_abk(mask, dim), begin, end, c.mask.flatten(1)[:, :columns])
    operation = dispatch.operation("stats", job.x_ABK, job.recipe, backend)
    stats = ErrorStats(**operation.stats(job.x_ABK, job.recipe, job.foreign_ABK, job.tensor_scale))
    scale, deadzone, grid, total = out
    clamped = x.dtype == torch.float64 and stats.clamped_blocks > 0  # to a scale that may be below the ideal one
    return Decomposition(scale, deadzone, grid, total, mask, stats, is_orthogonal(recipe) and not clamped)


@torch.no_grad()
def inject(
    x: Tensor,
    components: Iterable[str] = ("scale",),
    *,
    recipe: str | Recipe | Quantizer = "mxfp4",
    dim: int = -1,
    energy_matched: bool = False,
    generator: torch.Generator | None = None,
    backend: str | None = None,
) -> Tensor:
    """x plus any subset of {"scale", "deadzone", "grid"} of its error, rounded once to x's dtype: a causal probe.

    All three give C(x); none gives x; two of them *leave one out*. energy_matched: Gaussian noise (drawn from
    `generator`) with the chosen components' ‖·‖ instead of them, a control: e_scale alone exceeds the whole error.
    Raises ValueError for an unknown component.
    """
    chosen = frozenset((components,) if isinstance(components, str) else components)
    for name in sorted(chosen - set(COMPONENTS)):
        raise ValueError(f"inject: unknown component '{name}'; possible: {', '.join(COMPONENTS)}")
    if energy_matched:
        return _energy_matched(x, chosen, recipe, dim, generator)
    recipe, dim = _checked(x, recipe, dim, "inject")
    job = _Job.of(x, recipe, dim, None, backend)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    out_ABK = as_abk(out, dim)
    if job.foreign_ABK is not None:
        reference_inject(job.x_ABK, job.recipe, chosen, out_ABK, None, job.foreign_ABK)
        return out
    operation = dispatch.operation("inject", job.x_ABK, job.recipe, backend)
    operation.inject(job.x_ABK, job.recipe, chosen, out_ABK, job.tensor_scale)
    return out


def _energy_matched(
    x: Tensor, chosen: frozenset[str], recipe: str | Recipe | Quantizer, dim: int, generator: torch.Generator | None
) -> Tensor:
    """x plus Gaussian noise with the norm of the chosen components."""
    if not chosen:
        return x.clone()
    parts = decompose(x, recipe, dim=dim)
    error = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for name in COMPONENTS:
        if name in chosen:
            error += getattr(parts, name)
    noise = torch.randn(x.shape, dtype=torch.float64, device=x.device, generator=generator)
    whole = ~torch.isnan(error)  # a poisoned block has no components, and stays NaN alone
    norm, of_noise = (torch.where(whole, part, 0.0).norm() for part in (error, noise))
    if of_noise:
        noise *= norm / of_noise
    largest = torch.finfo(x.dtype).max
    result = torch.where(whole, (x.double() + noise).clamp(-largest, largest), error)
    return torch.where(result == 0, torch.copysign(result, x.double()), result).to(x.dtype)  # zeros keep x's sign


def _checked(x: Tensor, recipe: str | Recipe | Quantizer, dim: int, what: str) -> tuple[Recipe | Quantizer, int]:
    if not callable(recipe):
        recipe = Recipe.parse(recipe)
    return recipe, check_input(x, dim, what)

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

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from mxrl.formats import MXFP4, BlockFormat
from mxrl.ops.qdq import passes, to_blocks
from mxrl.quantize import as_rows, check_input, row_chunks, whole_tensor_scale
from mxrl.recipes import Recipe
from mxrl.scaling import block_scale, divide, from_grid, to_grid

Quantizer = Callable[[Tensor], Tensor]
COMPONENTS = ("scale", "deadzone", "grid")
DELTA_BINS = 64  # of width 1/32 over [−1, 1): ceil fills [0, 1), floor and even reach below; the ends collect the rest


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

    def to_dict(self) -> dict[str, Any]:
        out: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        out["delta_hist"] = list(self.delta_hist)
        return out

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


def _ratio(a: float, b: float) -> float:
    return a / b if b else math.nan


@dataclass(frozen=True)
class Decomposition:
    """The components of one tensor's error, float64 in its shape (NaN in poisoned blocks).

    mask: bool, the deadzone D. orthogonal: whether ⟨e_dz, e_scale⟩ = ⟨e_dz, e_grid⟩ = 0 is *guaranteed* for this
    quantizer; the inner products themselves are in `stats`, measured, never assumed.
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
class _Chunk:
    """One chunk of rows as blocks [R, B, n], in the arithmetic's dtype; `log_gamma` [R, B] or None is delta."""

    x: Tensor
    quantized: Tensor
    ideal: Tensor
    mask: Tensor
    maxima: Tensor
    valid: Tensor  # [R, B] finite, and a real block (not the padding of a ragged macro-block)
    delta: Tensor | None
    clamped: Tensor | None


def _chunks(x: Tensor, recipe: Recipe | Quantizer, dim: int, fmt: BlockFormat | None) -> Iterable[tuple[slice, _Chunk]]:
    rows = as_rows(x.detach(), dim)
    reference = Recipe(base=fmt.name, rule="" if fmt.name == "nvfp4" else "ceil") if fmt else Recipe()
    foreign = None
    tensor_scale = None
    if isinstance(recipe, Recipe):
        if recipe.quantizes:
            reference = recipe
        # Q is rounded once to float32, so a bf16 or fp16 tensor is quantized as the float32 tensor of its values.
        tensor_scale = whole_tensor_scale(rows, recipe) if recipe.quantizes else None
    else:
        foreign = recipe(x.detach())
        if foreign.shape != x.shape:
            shapes = f"{tuple(x.shape)} to {tuple(foreign.shape)}"
            raise ValueError(f"decompose: the quantizer changed the shape from {shapes}; it must keep it")
        foreign = as_rows(foreign.detach().to(x.dtype if x.dtype == torch.float64 else torch.float32), dim)
    fmt = fmt or reference.format or MXFP4
    for where, chunk in row_chunks(rows):
        blocks = to_blocks(chunk, reference)
        maxima = blocks.abs().amax(-1)
        valid = torch.isfinite(maxima)
        valid[:, -(-rows.shape[1] // fmt.block) :] = False
        ideal_scale = block_scale(maxima, fmt, "ideal")
        grid = to_grid(blocks, ideal_scale, fmt, "ideal", torch.finfo(blocks.dtype).max)
        ideal = from_grid(grid, ideal_scale.value, fmt, "ideal")
        mask = blocks.abs().double() * fmt.deadzone_ratio < maxima.unsqueeze(-1)  # exact: 24·x fits float64
        mask &= valid.unsqueeze(-1)  # beside an Inf, every finite element would count as small
        delta = clamped = None
        if foreign is not None:
            quantized = to_blocks(foreign[where], reference)
        elif isinstance(recipe, Recipe) and recipe.quantizes:
            done, quantized = passes(blocks, recipe, torch.finfo(x.dtype).max, tensor_scale)
            effective = done[0].scale.value.double() / (1 if recipe.rule != "ideal" else fmt.q_max)
            if done[0].mantissa is not None:
                p = (256 + done[0].mantissa.double()) / 256
                effective = effective / p.repeat_interleave(recipe.macro // fmt.block, -1)
            delta = torch.log2(effective / divide(maxima.double(), fmt.q_max))
            clamped = done[0].scale.clamped
        else:
            quantized = blocks
        yield where, _Chunk(blocks, quantized, ideal, mask, maxima, valid, delta, clamped)


def _total(x: Tensor) -> float:
    """A float64 sum that does not depend on the number of threads: blocks first, each by one thread, then in order."""
    return float(x.sum(-1).flatten().cpu().numpy().sum()) if x.dim() > 1 else float(x.cpu().numpy().sum())


def _chunk_stats(c: _Chunk, columns: int) -> ErrorStats:
    valid = c.valid.unsqueeze(-1)
    real = torch.arange(c.x.shape[1] * c.x.shape[2], device=c.x.device).view(c.x.shape[1:]) < columns
    counted = valid & real
    x = torch.where(counted, c.x, 0.0).double()
    q = torch.where(counted, c.quantized, 0.0).double()
    ideal = torch.where(counted, c.ideal, 0.0).double()
    inside = c.mask & counted
    error = q - x
    scale = q - ideal
    rest = ideal - x
    deadzone = torch.where(inside, rest, 0.0)
    grid = rest - deadzone
    square = error * error
    square_inside = torch.where(inside, square, 0.0)
    zero_block = (c.maxima == 0) & c.valid
    stats: dict[str, Any] = dict(
        numel=int(counted.sum()),
        sq_norm=_total(x * x),
        dot_q_x=_total(q * x),
        sq_error=_total(square),
        sq_scale=_total(scale * scale),
        sq_deadzone=_total(deadzone * deadzone),
        sq_grid=_total(grid * grid),
        dot_scale_grid=_total(scale * grid),
        dot_scale_deadzone=_total(scale * deadzone),
        dot_deadzone_grid=_total(deadzone * grid),
        deadzone_count=int(inside.sum()),
        exact_zero_count=int(((c.x == 0) & counted).sum()),
        zero_blocks=int(zero_block.sum()),
        nonfinite_blocks=int((~torch.isfinite(c.maxima)).sum()),
        sq_error_deadzone=_total(square_inside),
        sq_error_elsewhere=_total(square - square_inside),
        deadzone_nonzero_count=int((inside & (q != 0)).sum()),
    )
    if c.delta is not None and c.clamped is not None:
        clamped = c.clamped & c.valid
        used = c.valid & ~zero_block & ~clamped
        delta = torch.where(used, c.delta, 0.0)
        bins = ((delta + 1) * (DELTA_BINS / 2)).long().clamp(0, DELTA_BINS - 1)[used]
        stats |= dict(
            clamped_blocks=int(clamped.sum()),
            delta_count=int(used.sum()),
            delta_sum=_total(delta),
            delta_sq_sum=_total(delta * delta),
            gamma_sum=_total(torch.where(used, torch.exp2(delta), 0.0)),
            delta_hist=tuple(torch.bincount(bins.cpu(), minlength=DELTA_BINS).tolist()),
        )
    return ErrorStats(**stats)


@torch.no_grad()
def error_stats(
    x: Tensor, recipe: str | Recipe | Quantizer = "mxfp4", *, dim: int = -1, format: BlockFormat | None = None
) -> ErrorStats:
    """The statistics of the decomposition alone, streamed in fixed chunks (no whole-tensor temporaries).

    Arguments and errors as `decompose`. Equal bit for bit however many threads run it.
    """
    recipe, dim = _checked(x, recipe, dim)
    total = ErrorStats.zero()
    for _, chunk in _chunks(x, recipe, dim, format):
        total = total + _chunk_stats(chunk, x.shape[dim])
    return total


@torch.no_grad()
def decompose(
    x: Tensor, recipe: str | Recipe | Quantizer = "mxfp4", *, dim: int = -1, format: BlockFormat | None = None
) -> Decomposition:
    """Split the quantization error of `x` along `dim` exactly into scale, deadzone and grid.

    x: any float dtype and shape (bf16 and fp16 are taken as the float32 values they are). recipe: its grammar, a
        Recipe, or any callable Tensor -> Tensor of the same shape. format: the block format whose Q* and D a callable
        is referred to (default MXFP4); a recipe brings its own.
    Returns a Decomposition with x + scale + deadzone + grid == C(x) exactly.
    """
    recipe, dim = _checked(x, recipe, dim)
    moved = x.movedim(dim, -1)
    rows, columns = moved.shape[:-1].numel(), moved.shape[-1]
    out = [torch.empty(rows, columns, dtype=torch.float64, device=x.device) for _ in range(4)]
    masks = torch.empty(rows, columns, dtype=torch.bool, device=x.device)
    total = ErrorStats.zero()
    for where, c in _chunks(x, recipe, dim, format):
        total = total + _chunk_stats(c, columns)
        xd, q, ideal = c.x.double(), c.quantized.double(), c.ideal.double()
        rest = ideal - xd
        parts = (q - ideal, torch.where(c.mask, rest, 0.0), torch.where(c.mask, 0.0, rest), q - xd)
        for target, part in zip(out, parts, strict=True):
            target[where] = torch.where(c.valid.unsqueeze(-1), part, float("nan")).flatten(1)[:, :columns]
        masks[where] = c.mask.flatten(1)[:, :columns]

    def back(t: Tensor) -> Tensor:
        return t.view(moved.shape).movedim(-1, dim)

    scale, deadzone, grid, error = map(back, out)
    return Decomposition(scale, deadzone, grid, error, back(masks), total, is_orthogonal(recipe))


def _checked(x: Tensor, recipe: str | Recipe | Quantizer, dim: int) -> tuple[Recipe | Quantizer, int]:
    if isinstance(recipe, str):
        recipe = Recipe.parse(recipe)
    return recipe, check_input(x, dim, "decompose")


@torch.no_grad()
def inject(
    x: Tensor,
    components: Iterable[str] = ("scale",),
    *,
    recipe: str | Recipe | Quantizer = "mxfp4",
    dim: int = -1,
    energy_matched: bool = False,
    generator: torch.Generator | None = None,
) -> Tensor:
    """x plus any subset of {"scale", "deadzone", "grid"} of its error, rounded once to x's dtype: a causal probe.

    All three give C(x); none gives x; two of them *leave one out*. energy_matched: Gaussian noise (drawn from
    `generator`) with the chosen components' ‖·‖ instead of them, a control: e_scale alone exceeds the whole error.
    Raises ValueError for an unknown component.
    """
    chosen = (components,) if isinstance(components, str) else tuple(components)
    for name in chosen:
        if name not in COMPONENTS:
            raise ValueError(f"inject: unknown component '{name}'; possible: {', '.join(COMPONENTS)}")
    parts = decompose(x, recipe, dim=dim)
    error = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for name in COMPONENTS:  # this order: x + (scale + deadzone + grid) is C(x) exactly
        if name in chosen:
            error = error + getattr(parts, name)
    if energy_matched:
        noise = torch.randn(x.shape, dtype=torch.float64, device=x.device, generator=generator)
        error = noise * (error.norm() / noise.norm()) if x.numel() else noise
    result = x.double() + error
    return torch.where(result == 0, torch.copysign(result, x.double()), result).to(x.dtype)  # zeros keep x's sign

"""What a tensor's values are like, whatever quantizes them: sums of powers and block maxima, in one pass.

    m = moments(x)                     m + n merges; sums are float64, counts and the largest magnitude exact
    m.kurtosis                         Σ(x − mean)⁴ / (n σ⁴): 3 for normal values, more where the tails are heavy
    m.outlier_ratio                    largest |x| / RMS
    m.block_peak                       mean of the blocks' maxima / RMS: what stretches a block's grid

Why these explain an error: a block of 32 spreads its grid up to its own maximum m, so everything below m / 24 is lost,
and the rest is rounded to steps of m / 12 or more. A tensor whose blocks have high maxima for its RMS pays in both
places. For normal values block_peak is 2.35 (`NORMAL_PEAK`).

Blocks are MXFP4's, 32 along the contraction axis; one with a NaN or an Inf is counted and left out of everything else,
as in `ErrorStats`, so `square_sum` is `ErrorStats.sq_norm` up to the order of the sum. float64 is taken as float32.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import operator
import os
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from mxrl.formats import MXFP4
from mxrl.ops import dispatch
from mxrl.ops.layout import as_abk, check_input, row_chunks

BLOCK = MXFP4.block
NORMAL_PEAK = 2.3471  # mean maximum of 32 |z|, z ~ N(0, 1): ∫ 1 − erf(t/√2)^32 dt over t > 0


@dataclass(frozen=True)
class Moments:
    """Sums over a tensor's finite blocks; `a + b` merges. `peak_sum` is the sum of the blocks' largest magnitudes."""

    count: int = 0
    sum: float = 0.0
    square_sum: float = 0.0
    cube_sum: float = 0.0
    fourth_sum: float = 0.0
    amax: float = 0.0
    blocks: int = 0
    peak_sum: float = 0.0
    nonfinite_blocks: int = 0

    def __add__(self, other: Moments) -> Moments:
        merged: dict[str, Any] = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        merged["amax"] = max(self.amax, other.amax)
        return Moments(**merged)

    def values(self) -> list[Any]:
        """The fields in their order."""
        return list(astuple(self))

    @classmethod
    def of(cls, values: Sequence[Any]) -> Moments:
        """From what `values` gave. ValueError for another number of fields."""
        if len(values) != len(fields(cls)):
            raise ValueError(f"moments: {len(values)} values for {len(fields(cls))} fields")
        return cls(*values)

    # Derived figures: NaN where there is nothing to divide by.
    @property
    def mean(self) -> float:
        return self.sum / self.count if self.count else math.nan

    @property
    def rms(self) -> float:
        return math.sqrt(self.square_sum / self.count) if self.count else math.nan

    @property
    def kurtosis(self) -> float:
        """The fourth central moment over the squared variance."""
        if not self.count:
            return math.nan
        n, a = self.count, self.mean
        variance = self.square_sum / n - a * a
        fourth = self.fourth_sum / n - 4 * a * self.cube_sum / n + 6 * a * a * self.square_sum / n - 3 * a**4
        return fourth / variance**2 if variance > 0 else math.nan

    @property
    def outlier_ratio(self) -> float:
        return self.amax / self.rms if self.square_sum else math.nan

    @property
    def block_peak(self) -> float:
        return self.peak_sum / self.blocks / self.rms if self.square_sum else math.nan


@torch.no_grad()
def moments(x: Tensor, *, dim: int = -1, backend: str | None = None) -> Moments:
    """The moments of `x`, blocks of 32 along `dim`. x: any float dtype and shape.

    backend: "cpu" (numba) or "reference" (torch); by default MXRL_BACKEND, else numba on the CPU. The same bits however
    many threads run it; between the two counts are equal, and sums to 1e-12 of Σ|x|ᵖ. Raises TypeError, IndexError and
    ValueError as `mxrl.decompose`.
    """
    return moments_abk(as_abk(x.detach(), check_input(x, dim, "moments")), backend)


def moments_abk(x_ABK: Tensor, backend: str | None = None) -> Moments:
    """The same of a view [A, B, K] (see ops/layout.py)."""
    if x_ABK.dtype == torch.float64:
        x_ABK = x_ABK.float()
    asked = backend or os.environ.get(dispatch.VARIABLE) or "auto"
    numba = x_ABK.device.type == "cpu" and importlib.util.find_spec("numba") is not None
    if numba and asked != "reference":
        from mxrl.ops.moments_cpu import moments as fast

        return Moments(*fast(x_ABK))
    return _reference(x_ABK)


def _reference(x_ABK: Tensor) -> Moments:
    parts = (from_sums(sums_of(rows).tolist()) for rows in _pieces(x_ABK))
    return functools.reduce(operator.add, parts, Moments())


def sums_of(rows: Tensor) -> Tensor:
    """Moments' fields, float64 [9] on the device of rows [r, K], without waiting for it; see `from_sums`."""
    padded = torch.nn.functional.pad(rows.float(), (0, -rows.shape[1] % BLOCK))
    blocks = padded.unflatten(-1, (-1, BLOCK))
    peaks = blocks.abs().amax(-1)
    valid = torch.isfinite(peaks)
    real = torch.arange(padded.shape[1], device=rows.device).view(-1, BLOCK) < rows.shape[1]
    x = torch.where(valid.unsqueeze(-1), blocks, 0.0).double()
    square = x * x
    peaks = torch.where(valid, peaks, 0.0).double()
    amax = peaks.amax() if peaks.numel() else peaks.new_zeros(())
    count, finite, bad = (n.sum().double() for n in (valid.unsqueeze(-1) & real, valid, ~valid))
    powers = (_sum(part) for part in (x, square, square * x, square * square))
    return torch.stack([count, *powers, amax, finite, _sum(peaks), bad])


def from_sums(values: Sequence[float]) -> Moments:
    """Of what `sums_of` gave: its counts as whole numbers."""
    found: dict[str, Any] = dict(zip((f.name for f in fields(Moments)), values, strict=True))
    for name in ("count", "blocks", "nonfinite_blocks"):
        found[name] = int(found[name])
    return Moments(**found)


def _pieces(x_ABK: Tensor) -> Iterator[Tensor]:
    """Rows [r, K]: what fits a CPU's cache, or all of them on a GPU, which would wait for the host between pieces."""
    if x_ABK.device.type == "cpu":
        yield from (rows for _, _, rows in row_chunks(x_ABK))
    else:
        yield x_ABK.reshape(-1, x_ABK.shape[2])


def _sum(x: Tensor) -> Tensor:
    """Rows first, each by one thread, then in order: no number of threads changes the result."""
    return x.sum() if x.device.type != "cpu" else torch.tensor(x.sum(-1).flatten().numpy().sum(), dtype=torch.float64)

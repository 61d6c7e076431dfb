"""Moments: numba against torch, against sums that are exact, and what they say of data whose shape is known."""

from __future__ import annotations

import math

import pytest
import torch

from mxrl.decompose import error_stats
from mxrl.moments import NORMAL_PEAK, Moments, moments

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def data(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [-1, 0])
@pytest.mark.parametrize("shape", [(1, 1), (3, 31), (64, 96), (130, 257), (700, 1030)])
def test_numba_equals_the_reference(shape: tuple[int, int], dim: int, dtype: torch.dtype) -> None:
    x = data(*shape, dtype)
    if x.numel() > 100:
        x[2, 5], x[-1, -1], x[0, 7] = float("nan"), float("inf"), -float("inf")
    fast, slow = moments(x, dim=dim, backend="cpu"), moments(x, dim=dim, backend="reference")
    for name in ("count", "blocks", "nonfinite_blocks", "amax"):
        assert getattr(fast, name) == getattr(slow, name), name
    finite = torch.nan_to_num(x.double(), 0.0, 0.0, 0.0).abs()
    sums = (fast.sum, fast.square_sum, fast.cube_sum, fast.fourth_sum)
    for power, (a, b) in enumerate(zip(sums, (slow.sum, slow.square_sum, slow.cube_sum, slow.fourth_sum), strict=True)):
        assert abs(a - b) <= 1e-12 * float((finite ** (power + 1)).sum())  # float64 sums in another order
    assert fast.peak_sum == pytest.approx(slow.peak_sum, rel=1e-12, abs=0)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_sums_of_whole_numbers_are_exact(backend: str) -> None:
    x = torch.randint(-9, 10, (37, 70), generator=torch.Generator().manual_seed(1)).float()
    values = [[int(v) for v in row] for row in x.tolist()]
    flat = [v for row in values for v in row]
    peaks = [max(abs(v) for v in row[i : i + 32]) for row in values for i in range(0, 70, 32)]
    assert moments(x, backend=backend) == Moments(
        count=37 * 70,
        sum=sum(flat),
        square_sum=sum(v**2 for v in flat),
        cube_sum=sum(v**3 for v in flat),
        fourth_sum=sum(v**4 for v in flat),
        amax=max(map(abs, flat)),
        blocks=37 * 3,
        peak_sum=sum(peaks),
    )
    assert moments(x.T.contiguous(), dim=0, backend=backend) == moments(x, backend=backend)
    assert moments(x.double(), backend=backend) == moments(x, backend=backend)


def test_parts_merge_and_threads_change_nothing() -> None:
    x = data(2048, 512, torch.float32)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = moments(x)
        torch.set_num_threads(3)
        assert moments(x) == one
    finally:
        torch.set_num_threads(threads)
    merged = moments(x[:1000]) + moments(x[1000:])
    assert (merged.count, merged.amax, merged.blocks) == (one.count, float(x.abs().max()), one.blocks)
    assert merged.fourth_sum == pytest.approx(one.fourth_sum, rel=1e-12, abs=0)
    assert one + Moments() == one
    assert Moments.of(one.values()) == one
    with pytest.raises(ValueError, match="8 values for 9 fields"):
        Moments.of(one.values()[:-1])


def test_blocks_and_energy_are_those_of_error_stats() -> None:
    x = data(40, 100, torch.bfloat16)
    x[1, 99] = float("nan")
    m, s = moments(x), error_stats(x)
    assert (m.count, m.nonfinite_blocks) == (s.numel, s.nonfinite_blocks) == (40 * 100 - 4, 1)
    assert m.square_sum == pytest.approx(s.sq_norm, rel=1e-12, abs=0)


def test_figures_of_known_data() -> None:
    normal = moments(data(4000, 512, torch.float32))
    assert normal.kurtosis == pytest.approx(3, abs=0.02)  # sd of the estimate: √(24 / n) = .003
    assert normal.block_peak == pytest.approx(NORMAL_PEAK, rel=0.005)
    step = 1e-3
    tail = sum(1 - math.erf((i + 0.5) * step / math.sqrt(2)) ** 32 for i in range(10_000)) * step
    assert pytest.approx(tail, abs=1e-4) == NORMAL_PEAK
    signs = moments(torch.tensor([[3.0, -3.0] * 32]) + 5)  # two values, 2 and 8: kurtosis 1 around the mean 5
    assert (signs.mean, signs.kurtosis) == (5, pytest.approx(1, rel=1e-12))
    spike = torch.zeros(2, 32)
    spike[0, 3] = -8.0
    m = moments(spike)
    assert (m.amax, m.rms, m.outlier_ratio, m.block_peak) == (8, 1, 8, 4)
    empty = moments(torch.zeros(3, 32))
    assert math.isnan(empty.kurtosis) and math.isnan(empty.outlier_ratio) and math.isnan(empty.block_peak)
    assert moments(torch.zeros(0, 32)) == Moments()


def test_what_has_no_moments() -> None:
    with pytest.raises(TypeError, match="moments: expected a bfloat16"):
        moments(torch.zeros(3, 32, dtype=torch.int32))
    with pytest.raises(IndexError, match="dim=2"):
        moments(torch.zeros(3, 32), dim=2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [-1, 0])
def test_a_gpu_gives_the_same(dtype: torch.dtype, dim: int) -> None:
    x = data(700, 1030, dtype)
    x[2, 5] = float("nan")
    here, there = moments(x, dim=dim), moments(x.cuda(), dim=dim)
    for name in ("count", "blocks", "nonfinite_blocks", "amax"):
        assert getattr(here, name) == getattr(there, name), name
    for name in ("square_sum", "fourth_sum", "peak_sum"):  # float64 sums in another order
        assert getattr(there, name) == pytest.approx(getattr(here, name), rel=1e-12, abs=0)

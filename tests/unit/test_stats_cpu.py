"""ops/stats_cpu.py against the torch reference: counts exactly, sums to 1e-12, whatever the number of threads."""

from __future__ import annotations

import math
from dataclasses import fields

import pytest
import torch
from fused_cases import DTYPES, IDS, MAIN, MX, NV, WIDTHS, every_edge_case, inputs, layouts, ordinary, tensor_scale

from mxrl import ErrorStats, Recipe
from mxrl.ops import rows_cpu, stats_cpu
from mxrl.ops import stats as reference


def agree(got: dict, want: dict, what: str) -> None:
    """Sums to 1e-12 of their terms' sizes: where terms cancel, no order of addition is the true one."""
    want = want or ErrorStats().__dict__  # the reference of an empty tensor
    assert got.keys() == want.keys() == {f.name for f in fields(ErrorStats)}
    for name, b in want.items():
        a = got[name]
        if isinstance(b, int | tuple):
            assert a == b, f"{what}: {name} is {a}, not {b}"
            continue
        size = abs(b)
        if name.startswith("dot_scale"):  # Cauchy-Schwarz
            size = math.sqrt(want["sq_scale"] * want["sq_" + name.rsplit("_", 1)[1]])
        elif name == "delta_sum":
            size = math.sqrt(want["delta_sq_sum"] * want["delta_count"])
        assert abs(a - b) <= 1e-12 * size, f"{what}: {name} is {a!r}, not {b!r}"


def check(x: torch.Tensor, recipe: Recipe, scale: torch.Tensor | None, what: str, foreign=None) -> dict:
    got = stats_cpu.stats(x, recipe, foreign, scale)
    agree(got, reference.stats(x, recipe, foreign, scale), what)
    return got


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("text", (*MX, *NV, "mxfp4+mbs:joint"))
def test_equals_the_reference(text, dtype):
    recipe = Recipe.parse(text)
    for name, x, scale in inputs(dtype, recipe):
        check(x, recipe, scale, f"{text} {name}")
        if name == "edge cases":  # ordinary sizes apart: beside 1e38 their sums don't show
            large = x.float().abs().amax(-1, keepdim=True).nan_to_num(torch.inf)
            check(torch.where((large < 1e6) & (large > 1e-6), x, 0), recipe, scale, f"{text} {name} of ordinary size")


@pytest.mark.parametrize("text", MAIN)
def test_widths_and_layouts(text):
    recipe = Recipe.parse(text)
    widths = ((f"width {w}", ordinary(torch.bfloat16, 2, 3, w)) for w in WIDTHS)
    for name, x in (*widths, *layouts(torch.float32)):
        check(x, recipe, tensor_scale(x, recipe), f"{text} {name}")


@pytest.mark.parametrize("text", ("mxfp4", "mxfp8", "nvfp4"))
def test_a_foreign_quantizer(text):
    """Another quantizer's values instead of Q(x), in any strides: no deltas; what it keeps of D is counted."""
    recipe = Recipe.parse(text)
    for name, x in (*layouts(torch.bfloat16), ("edges", every_edge_case(torch.bfloat16))):
        foreign = (x.float().view(torch.int32) & ~0x1FFFFF).view(torch.float32)  # two bits of mantissa, towards zero
        got = check(x, recipe, None, f"{text} {name}", foreign)
        assert got["delta_count"] == got["clamped_blocks"] == 0
        if name == "last axis":
            assert got["deadzone_nonzero_count"] > 0 or text == "mxfp8"  # whose D is tiny
            other = torch.empty(x.shape[::-1]).permute(2, 1, 0).copy_(foreign)
            assert check(x, recipe, None, name, other) == got


def test_identities():
    """The error is the sum of its parts; no error without one."""
    x = ordinary(torch.float32, 1, 64, 512)
    got = ErrorStats(**stats_cpu.stats(x, Recipe(), None, None))
    total = got.sq_scale + got.sq_deadzone + got.sq_grid + 2 * got.dot_scale_grid
    assert got.dot_scale_deadzone == got.dot_deadzone_grid == 0 and math.isclose(total, got.sq_error, rel_tol=1e-12)
    assert got.numel == x.numel() and got.delta_count == sum(got.delta_hist) == x.numel() // 32
    on_grid = torch.tensor([6.0, 0.5, 1.0, 1.5, -2.0, 3.0, -4.0, 0.0] * 8)[None, None]
    exact = stats_cpu.stats(on_grid, Recipe(), None, None)
    assert exact["sq_error"] == exact["sq_scale"] == 0 and exact["delta_hist"][32] == 2
    same = stats_cpu.stats(x, Recipe(), x, None)
    assert same["sq_error"] == 0 < same["sq_scale"]
    assert math.isclose(same["sq_scale"], same["sq_grid"] + same["sq_deadzone"], rel_tol=1e-12)


def test_threads(monkeypatch):
    """Sums are the same bits on one thread and on several."""
    monkeypatch.setattr(rows_cpu, "WORTH_A_THREAD", 0)
    x = ordinary(torch.bfloat16, 1, 700, 577)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results += [stats_cpu.stats(x, Recipe.parse("mxfp4+mbs"), None, None) for _ in range(2)]
    finally:
        torch.set_num_threads(before)
    assert all(r == results[0] for r in results)
    agree(results[0], reference.stats(x, Recipe.parse("mxfp4+mbs"), None, None), "threads")

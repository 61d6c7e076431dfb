"""Ranges of a tensor: where they are cut, that the cut changes nothing, and the two rounds that NVFP4 takes."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mxrl.checkpoint import Checkpoint, open_checkpoint
from mxrl.decompose import ErrorStats, error_stats
from mxrl.recipes import RecipeError
from mxrl.scan import scan
from mxrl.scan_tasks import ELEMENTS, Ledger, Result, ranges, read, run

RECIPES = ("mxfp4", "mxfp4+mbs:search16", "mxfp4+of", "nvfp4", "nvfp4:4over6")


@pytest.mark.parametrize(
    ("shape", "dim"),
    [
        ((64, 64), -1),
        ((0, 64), -1),
        ((64, 0), -1),
        ((4096, 4096), -1),  # exactly one
        ((4097, 4096), -1),
        ((200_000, 5120), -1),
        ((128, 5120, 2048), -1),
        ((1, 1 << 30), -1),  # a row is never cut
        ((128, 768, 2048), -2),  # whole experts, ten at a time
        ((3, 8192, 4096), -2),  # an expert in pieces along K
        ((3, 5000, 40_000), -2),  # fewer than 1024 rows at a time
        ((2, 1000, 1 << 20), -2),  # fewer than 128
        ((11008, 4096), -2),  # GPT-2's layout
    ],
)
def test_ranges_cover_every_row_once_and_cut_no_macro_block(shape: tuple[int, ...], dim: int) -> None:
    found = ranges(shape, dim)
    assert found[0][0] == 0 and found[-1][1] == math.prod(shape[:-1])
    assert all(a < b for a, b in found) or math.prod(shape) == 0
    assert [b for _, b in found[:-1]] == [a for a, _ in found[1:]]
    k = shape[-2] if dim == -2 else 1
    for start, stop in found:
        if dim == -2:
            assert start % k % 128 == 0  # in units of the blocked axis
            assert start // k == (stop - 1) // k or (start % k == stop % k == 0)  # one expert, or whole ones
        smallest = max(shape[-1] * (128 if dim == -2 and k > 1 else 1), 1)
        assert (stop - start) * shape[-1] <= max(ELEMENTS, smallest)
    if math.prod(shape) > 4 * ELEMENTS and shape[0] > 8:
        assert len(found) <= math.prod(shape) / ELEMENTS * 1.4  # about 2^24 elements, not far fewer


def test_an_axis_that_no_weight_has() -> None:
    with pytest.raises(ValueError, match="axis 0"):
        ranges((4, 4, 4), 0)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    """One weight of each orientation, a little of it zero and of different magnitude from row to row."""
    g = torch.Generator().manual_seed(3)

    def tensor(*shape: int) -> torch.Tensor:
        x = torch.randn(*shape, generator=g) * torch.exp(torch.randn(*shape[:-1], 1, generator=g))
        x.flatten()[::17] = 0
        return x.to(torch.bfloat16)

    data = {
        "model.layers.0.self_attn.q_proj.weight": tensor(700, 160),
        "model.layers.0.mlp.experts.gate_up_proj": tensor(3, 512, 96),  # [E, H, 2I], blocked along H
        "model.layers.0.mlp.experts.down_proj": tensor(3, 48, 512),  # [E, I, H], blocked along I
    }
    save_file(data, tmp_path / "model.safetensors")
    found = open_checkpoint(tmp_path / "model.safetensors")
    assert [w.dim for w in found.weights] == [-2, -2, -1]
    return found


def statistics(checkpoint: Checkpoint, columns: tuple[str, ...]) -> list[dict[str, ErrorStats]]:
    return [t.stats for t in scan(checkpoint, columns, baselines=(), jobs=1).tensors]


@pytest.mark.parametrize("elements", [1 << 14, 40_000, 1 << 24])
def test_ranges_change_no_count_and_sums_only_in_their_order(
    checkpoint: Checkpoint, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums: the ranges' are added in float64 in another order than the whole tensor's, so 1e-13; counts: exactly."""
    monkeypatch.setattr("mxrl.scan_tasks.ELEMENTS", elements)
    counts = [f.name for f in dataclasses.fields(ErrorStats) if f.type == "int"]
    assert len(counts) == 8
    for weight, stats in zip(checkpoint.weights, statistics(checkpoint, RECIPES), strict=True):
        assert len(ranges(weight.shape, weight.dim)) > 1 or elements == 1 << 24
        for recipe, found in stats.items():
            whole = error_stats(checkpoint.load(weight), recipe, dim=weight.dim)
            for name in counts:
                assert getattr(found, name) == getattr(whole, name), (weight.name, recipe, name)
            assert found.delta_hist == whole.delta_hist
            sums = {name: v for name, v in found.to_dict().items() if name != "delta_hist"}
            expected = {name: v for name, v in whole.to_dict().items() if name != "delta_hist"}
            # a cross product adds up terms of both signs: its error is relative to the squares
            assert sums == pytest.approx(expected, rel=1e-13, abs=1e-13 * whole.sq_norm)


def test_nvfp4_quantizes_every_range_under_the_whole_tensors_scale(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A range's own maximum would give another scale and other counts."""
    monkeypatch.setattr("mxrl.scan_tasks.ELEMENTS", 1 << 14)
    ledger = Ledger(checkpoint, ("mxfp4", "nvfp4"))
    weight = checkpoint.weights[0]
    first = [t for t in ledger.tasks() if t.weight == 0]
    assert len(first) > 1 and all(t.columns == ("mxfp4",) and t.amax == ("nvfp4",) for t in first)
    second: list = []
    for task in first:
        assert second == []  # nothing is due before the last maximum is known
        second += ledger.add(task, run(task, weight, read(checkpoint, weight, task.start, task.stop)))
    amax = float(checkpoint.load(weight).abs().max())
    assert [t.maxima for t in second] == [(("nvfp4", amax),)] * len(first)
    assert [(t.start, t.stop, t.columns) for t in second] == [(t.start, t.stop, ("nvfp4",)) for t in first]
    own = [error_stats(read(checkpoint, weight, t.start, t.stop).unsqueeze(0), "nvfp4", dim=-2) for t in second]
    here = [run(t, weight, read(checkpoint, weight, t.start, t.stop)).stats["nvfp4"] for t in second]
    assert own != here


def test_a_ledger_asks_only_for_what_is_missing(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever subset is known, the rest is asked for once, and the sums are the same bit for bit."""
    monkeypatch.setattr("mxrl.scan_tasks.ELEMENTS", 1 << 14)

    def finish(ledger: Ledger, stop: int = 1 << 30) -> list[tuple]:
        done, tasks = [], list(ledger.tasks())
        while tasks and len(done) < stop:
            task = tasks.pop(0)
            weight = checkpoint.weights[task.weight]
            result = run(task, weight, read(checkpoint, weight, task.start, task.stop))
            done.append((task, result))
            tasks = ledger.add(task, result) + tasks
        return done

    def known(done: list[tuple]) -> dict:
        found: dict = {}
        for task, result in done:
            place = found.setdefault((checkpoint.weights[task.weight].name, task.start, task.stop), Result())
            place.stats.update(result.stats)
            place.amax.update(result.amax)
        return found

    whole = Ledger(checkpoint, RECIPES)
    everything = finish(whole)
    for stop in range(0, len(everything) + 1, 7):
        part = finish(Ledger(checkpoint, RECIPES), stop)
        again = Ledger(checkpoint, RECIPES, known(part))
        shares = sum(again.share(i) for i in range(len(checkpoint.weights)))
        rest = finish(again)
        assert len(part) + len(rest) == len(everything)
        assert shares + sum(again.share(t.weight, t) for t, _ in rest) == pytest.approx(len(checkpoint.weights))
        for weight in checkpoint.weights:
            for recipe in RECIPES:
                assert list(again.parts(weight, recipe)) == list(whole.parts(weight, recipe))
    fewer = finish(Ledger(checkpoint, ("mxfp4", "nvfp4")))
    more = finish(Ledger(checkpoint, ("mxfp4", "nvfp4", "mxfp4:even"), known(fewer)))
    assert {t.columns for t, _ in more} == {("mxfp4:even",)}


def test_a_macro_block_that_a_range_would_cut_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = {
        "model.layers.0.mlp.experts.gate_up_proj": torch.randn(1, 768, 512),
        "model.layers.0.mlp.experts.down_proj": torch.randn(1, 256, 768),
    }
    save_file(data, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path / "model.safetensors")
    scan(checkpoint, ["mxfp4+mbs+macro=96"], baselines=(), jobs=1)
    monkeypatch.setattr("mxrl.scan_tasks.ELEMENTS", 128 * 512)
    with pytest.raises(RecipeError, match=r"down_proj.*macro=96 must divide"):
        scan(checkpoint, ["mxfp4+mbs+macro=96"], baselines=(), jobs=1)
    scan(checkpoint, ["mxfp4+mbs+macro=64"], baselines=(), jobs=1)

"""A scan's sample and moments: kept by the journal, merged in order, and part of the progress."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mxrl import scan_lane, scan_tasks
from mxrl.checkpoint import Checkpoint, open_checkpoint
from mxrl.decompose import ErrorStats, error_stats
from mxrl.moments import Moments, moments
from mxrl.recipes import RecipeError
from mxrl.scan import Scan, Step, scan
from mxrl.scan_journal import NAME, Journal
from mxrl.scan_tasks import EVERY, WHOLE, Ledger, Result, Task, column_of, every_of, split

EXTRA = ("mxfp4", "mxfp4+of", "mxfp8")


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkpoint:
    """Three tensors of several ranges each, of which every 5th row is the sample."""
    monkeypatch.setattr(scan_tasks, "WHOLE", 0)
    monkeypatch.setattr(scan_tasks, "EVERY", 5)
    monkeypatch.setattr(scan_tasks, "ELEMENTS", 1 << 14)
    g = torch.Generator().manual_seed(1)
    save_file(
        {f"layers.0.{n}_proj.weight": torch.randn(600, 96, generator=g) for n in "qkv"}, tmp_path / "m.safetensors"
    )
    return open_checkpoint(tmp_path / "m.safetensors")


def journaled(checkpoint: Checkpoint, out: Path, steps: list[Step]) -> Scan:
    journal = Journal(out, checkpoint, "cpu")
    try:
        return scan(
            checkpoint, baselines=("nvfp4",), extra=EXTRA, moments=True, progress=steps.append, journal=journal, jobs=1
        )
    finally:
        journal.close()


def same(a: Scan, b: Scan) -> bool:
    return [(t.stats, t.sampled, t.moments) for t in a.tensors] == [(t.stats, t.sampled, t.moments) for t in b.tensors]


def test_columns() -> None:
    assert (every_of(WHOLE), every_of(WHOLE + 1)) == (1, EVERY)
    assert (column_of("mxfp4+of", 1), column_of("mxfp4+of", 61)) == ("mxfp4+of", "mxfp4+of/61")
    assert [(str(r), n) for r, n in map(split, ("mxfp4+of", "mxfp4+of/61"))] == [("mxfp4+of", 1), ("mxfp4+of", 61)]


def test_ranges_are_merged_in_their_order(checkpoint: Checkpoint) -> None:
    found = scan(checkpoint, baselines=(), extra=EXTRA, moments=True)
    assert found.every == 5 and found.extra == EXTRA
    for tensor in found.tensors:
        x = checkpoint.load(tensor.weight)
        parts = scan_tasks.ranges(x.shape, -1)
        assert len(parts) == 5
        expected, stats = Moments(), error_stats(x[:0], "mxfp4+of")
        for start, stop in parts:
            expected = expected + moments(x[start:stop])
            first = start + -start % 5
            stats = stats + error_stats(x[first:stop:5].contiguous(), "mxfp4+of")
        assert tensor.moments == expected
        assert tensor.sampled["mxfp4+of"] == stats
        assert stats.numel == 120 * 96


def test_the_journal_keeps_them(checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Task] = []
    real = scan_lane.run

    def run(task: Task, *rest: Any) -> Result:
        done.append(task)
        return real(task, *rest)

    monkeypatch.setattr(scan_lane, "run", run)
    first: list[Step] = []
    whole = journaled(checkpoint, tmp_path / "out", first)
    assert sum(s.nbytes for s in first) == pytest.approx(sum(w.nbytes for w in checkpoint.weights), rel=1e-12)
    path = tmp_path / "out" / NAME
    lines = path.read_bytes().splitlines(keepends=True)
    assert all(len(json.loads(line)["moments"]) == 9 for line in lines[1:6])
    for kept in (len(lines), 7, 3, 1):
        path.write_bytes(b"".join(lines[:kept]))
        again: list[Step] = []
        done.clear()
        assert same(journaled(checkpoint, tmp_path / "out", again), whole)
        assert any(s.measured for s in again) == bool(done) == (kept < len(lines))
        assert sum(s.nbytes for s in again) == pytest.approx(sum(s.nbytes for s in first), rel=1e-12)
    without = [json.dumps({k: v for k, v in json.loads(line).items() if k != "moments"}) for line in lines]
    path.write_text("".join(line + "\n" for line in without))
    done.clear()
    assert same(journaled(checkpoint, tmp_path / "out", []), whole)
    assert {(task.columns, task.amax, task.moments) for task in done} == {((), (), True)}  # moments alone


def test_several_processes_give_the_same(checkpoint: Checkpoint) -> None:
    here = scan(checkpoint, baselines=(), moments=True, jobs=1)
    there = scan(checkpoint, baselines=(), moments=True, jobs=2)
    assert same(here, there)


def test_progress_counts_a_sample_for_what_it_takes(checkpoint: Checkpoint) -> None:
    """A full recipe takes a pass over all rows, a sampled one a fifth of it."""
    weight = checkpoint.weights[0]
    known = {(weight.name, *r): Result({"mxfp4": ErrorStats()}) for r in scan_tasks.ranges(weight.shape, weight.dim)}
    ledger = Ledger(checkpoint, ("mxfp4", "mxfp8/5"), known)
    assert ledger.share(0) == pytest.approx(1 / 1.2, rel=1e-12)
    tasks = [task for task in ledger.tasks() if task.weight == 0]
    assert {task.columns for task in tasks} == {("mxfp8/5",)}
    assert sum(ledger.share(0, task) for task in tasks) == pytest.approx(0.2 / 1.2, rel=1e-12)
    assert ledger.share(1) == 0


def test_nvfp4_has_no_sample(checkpoint: Checkpoint) -> None:
    with pytest.raises(RecipeError, match="'nvfp4/5': nvfp4 has one scale a tensor"):
        scan(checkpoint, extra=("nvfp4",))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_a_gpu_takes_the_same_rows(checkpoint: Checkpoint) -> None:
    here = scan(checkpoint, baselines=(), extra=EXTRA, moments=True, device="cpu")
    there = scan(checkpoint, baselines=(), extra=EXTRA, moments=True, device="cuda:0")
    for a, b in zip(here.tensors, there.tensors, strict=True):
        assert a.moments is not None and b.moments is not None
        assert (a.moments.count, a.moments.amax) == (b.moments.count, b.moments.amax)
        for recipe in EXTRA:
            assert a.sampled[recipe].numel == b.sampled[recipe].numel
            assert a.sampled[recipe].delta_hist == b.sampled[recipe].delta_hist
            assert b.sampled[recipe].sq_error == pytest.approx(a.sampled[recipe].sq_error, rel=1e-12, abs=0)

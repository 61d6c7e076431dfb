"""A task's launches all at once, and as a graph that is replayed: the bits of one column after the other."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

pytest.importorskip("triton")

from triton_cases import CUDA, DEVICE

from mxrl.checkpoint import Weight, open_checkpoint
from mxrl.moments import Moments, moments_abk
from mxrl.scan import scan
from mxrl.scan_replay import Replay, launched, served
from mxrl.scan_tasks import Result, Task, operand, read, run

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter: overflow is meant

COLUMNS = ("mxfp4", "mxfp4:floor", "nvfp4", "mxfp4/61", "mxfp4:e8m3/61", "mxfp4+mbs+of/61", "mxfp8/7")
needs_gpu = pytest.mark.skipif(not CUDA, reason="needs a CUDA GPU")


def tensor(seed: int, *shape: int) -> Tensor:
    """Rows of different sizes, some zeros; every other one has a NaN and an Inf."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=g) * torch.exp(torch.randn(*shape[:-1], 1, generator=g))
    x.flatten()[::17] = 0
    if seed % 2:
        x[0, 3], x[-1, -1] = math.nan, math.inf
    return x.to(torch.bfloat16)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Weight, Tensor]]:
    """Several of each shape, blocked along the last axis and along the one before, with their rows."""
    data = {f"model.layers.{i}.self_attn.q_proj.weight": tensor(i, 70, 96) for i in range(4)}
    data |= {f"model.layers.{i}.mlp.down_proj.weight": tensor(10 + i, 64, 200) for i in range(3)}
    data |= {f"model.layers.{i}.mlp.experts.gate_up_proj": tensor(2 * i, 3, 64, 96) for i in range(3)}
    data |= {f"model.layers.{i}.mlp.experts.down_proj": tensor(2 * i, 3, 48, 64) for i in range(3)}
    folder = tmp_path_factory.mktemp("replay")
    save_file(data, folder / "model.safetensors")
    checkpoint = open_checkpoint(folder / "model.safetensors")
    found = [(w, read(checkpoint, w, 0, math.prod(w.shape[:-1])).to(DEVICE)) for w in checkpoint.weights]
    assert {w.dim for w, _ in found} == {-1, -2}
    return found


@pytest.fixture(autouse=True)
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MXRL_BACKEND", "triton")


def assert_same(got: Result, want: Result) -> None:
    """Bit for bit; on a CPU the moments to 1e-12 of the sum of magnitudes, since numba adds in another order."""
    assert list(got.stats) == list(want.stats)
    assert repr(got.stats) == repr(want.stats)
    assert got.amax == want.amax
    assert (got.moments is None) == (want.moments is None)
    if got.moments is not None and want.moments is not None:
        if CUDA:
            assert repr(got.moments) == repr(want.moments)
        size = want.moments.square_sum + want.moments.fourth_sum + want.moments.count
        for f in dataclasses.fields(Moments):
            a, b = getattr(got.moments, f.name), getattr(want.moments, f.name)
            assert type(a) is type(b) and (a == b if isinstance(a, int) else abs(a - b) <= 1e-12 * size), f.name


@pytest.mark.parametrize("start", [0, 13])
def test_all_at_once(weights: list[tuple[Weight, Tensor]], start: int) -> None:
    for weight, rows in (weights[1], weights[-2], weights[-1]):
        columns = COLUMNS if CUDA else COLUMNS[:: 2 if start else 3]
        task = Task(0, start, start + len(rows), columns, ("nvfp4",) if start else (), moments=not start)
        assert served(task, rows)
        assert_same(launched(task, weight, rows).result(task), run(task, weight, rows))


def test_a_range_without_a_row_of_the_sample(weights: list[tuple[Weight, Tensor]]) -> None:
    """The last one of a tensor may be shorter than the way to its next 61st row."""
    weight, rows = weights[0]
    task = Task(0, 2015, 2015 + 33, ("mxfp4", "mxfp4/61", "mxfp8/61"))
    assert -task.start % 61 > 33
    got = launched(task, weight, rows[:33]).result(task)
    assert_same(got, run(task, weight, rows[:33]))
    assert got.stats["mxfp4/61"].numel == 0 < got.stats["mxfp4"].numel


class PretendedGraph:
    """What is launched while it is captured is computed there and then."""

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        self._pool = pool or object()

    def capture_end(self) -> None: ...
    def replay(self) -> None: ...

    def pool(self) -> object:
        return self._pool


def test_graphs_share_a_stream_and_its_memory(
    weights: list[tuple[Weight, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many there are: a stream each would at last be one that a reader copies on."""
    made: list[MagicMock] = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", PretendedGraph)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: made.append(MagicMock()) or made[-1])
    monkeypatch.setattr(torch.cuda, "current_stream", MagicMock())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr("mxrl.scan_replay.GRAPHS", 2)
    monkeypatch.setattr(torch, "empty_like", lambda rows: rows.clone())  # what is launched in a capture sees them
    weight, rows = weights[0]
    replay = Replay()
    for _ in range(3):
        for start in range(3):  # of a sample of every 7th row: three shapes to Replay
            task = Task(0, start, start + 32, ("mxfp4", "mxfp4/7"))
            assert_same(replay.run(task, weight, rows[:32]), run(task, weight, rows[:32]))
    assert len(made) == 1 and len(replay.graphs()) == 2
    assert len({graph.pool() for graph in replay.graphs()}) == 1


def test_what_is_not_served(weights: list[tuple[Weight, Tensor]], monkeypatch: pytest.MonkeyPatch) -> None:
    _, rows = weights[0]
    assert not served(Task(0, 0, 0, ("mxfp4",)), rows[:0])
    monkeypatch.setenv("MXRL_BACKEND", "reference")
    assert not served(Task(0, 0, 70, ("mxfp4",)), rows)
    monkeypatch.delenv("MXRL_BACKEND")
    assert not served(Task(0, 0, 70, ("mxfp4",)), rows.double())


@needs_gpu
def test_replays(weights: list[tuple[Weight, Tensor]]) -> None:
    """Rows of one shape follow each other, and shapes take turns, with and without moments and maxima."""
    replay = Replay()
    for _ in range(3):
        for weight, rows in weights:
            for start in (0, 13):
                plain = Task(0, start, start + len(rows), COLUMNS, moments=True)
                first = dataclasses.replace(plain, amax=("nvfp4",), columns=COLUMNS[:2])
                second = dataclasses.replace(plain, columns=("nvfp4",), maxima=(("nvfp4", 2.0 + start),), moments=False)
                for task in (plain, first, second):
                    assert_same(replay.run(task, weight, rows), run(task, weight, rows))
    assert len(replay.graphs()) == 4 * (2 + 1)  # samples begin elsewhere


@needs_gpu
def test_only_so_many_graphs_are_kept(weights: list[tuple[Weight, Tensor]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mxrl.scan_replay.GRAPHS", 2)
    replay = Replay()
    for _ in range(4):
        for weight, rows in weights:
            task = Task(0, 0, len(rows), COLUMNS[:2], moments=True)
            assert_same(replay.run(task, weight, rows), run(task, weight, rows))
    assert len(replay.graphs()) == 2


@needs_gpu
def test_more_graphs_than_torch_has_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 40 shapes, while readers copy."""
    monkeypatch.setattr("mxrl.scan_replay.GRAPHS", 40)
    data = {f"model.layers.{i}.mlp.up_proj.weight": tensor(2 * i, 256, 32 * (1 + i % 40)) for i in range(160)}
    save_file(data, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path / "model.safetensors")
    found = scan(checkpoint, device="cuda:0")
    monkeypatch.setattr(Replay, "run", lambda self, *args: run(*args))
    for a, b in zip(found.tensors, scan(checkpoint, device="cuda:0").tensors, strict=True):
        assert repr(a.stats) == repr(b.stats)


@needs_gpu
def test_a_scan_is_the_same_without_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With readers that pin memory and copy while a graph is captured."""
    data = {f"model.layers.{i}.mlp.up_proj.weight": tensor(2 * i, 256, 64 * (1 + i % 3)) for i in range(80)}
    save_file(data, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path / "model.safetensors")
    with_graphs = scan(checkpoint, ["mxfp4+mbs"], moments=True, device="cuda:0")
    monkeypatch.setattr(Replay, "run", lambda self, *args: run(*args))
    without = scan(checkpoint, ["mxfp4+mbs"], moments=True, device="cuda:0")
    for a, b in zip(with_graphs.tensors, without.tensors, strict=True):
        assert repr((a.stats, a.moments)) == repr((b.stats, b.moments))
    x = operand(checkpoint.load(checkpoint.weights[0]), checkpoint.weights[0])
    assert with_graphs.tensors[0].moments.fourth_sum == pytest.approx(moments_abk(x).fourth_sum, rel=1e-12)

"""Lanes and processes: the same bits from each, limits of memory, and workers that die."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mxrl.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from mxrl.scan import Step, drive, scan
from mxrl.scan_lane import Lane
from mxrl.scan_tasks import Ledger, Result, Task
from mxrl.scan_workers import Joining, Pool, Processes, Shape, WorkerError, devices_of, parse_size, shape_of

COLUMNS = ("mxfp4", "nvfp4")


def make(path: Path, count: int = 6, rows: int = 256, columns: int = 320) -> Checkpoint:
    g = torch.Generator().manual_seed(1)
    save_file({f"layers.{i}.q_proj.weight": torch.randn(rows, columns, generator=g) for i in range(count)}, path)
    return open_checkpoint(path)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return make(tmp_path / "model.safetensors")


def gone(pid: int) -> bool:
    """Whether a process has ended (or is a zombie, which has)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_until(condition, seconds: float = 60) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def test_processes_and_lanes_give_the_same_bits(tmp_path: Path) -> None:
    """One tensor of three ranges beside small ones: two rounds over processes."""
    g = torch.Generator().manual_seed(2)
    data = {f"layers.{i}.q_proj.weight": torch.randn(64, 96, generator=g).bfloat16() for i in range(4)}
    data["layers.2.up_proj.weight"] = torch.randn(9000, 4096, generator=g).bfloat16()
    save_file(data, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path / "model.safetensors")
    steps: list[Step] = []
    one = scan(checkpoint, baselines=("nvfp4",), jobs=1)
    two = scan(checkpoint, baselines=("nvfp4",), jobs=2, progress=steps.append)
    assert [t.stats for t in one.tensors] == [t.stats for t in two.tensors]
    assert sum(s.numel for s in steps) == pytest.approx(checkpoint.numel)
    assert len(steps) == 4 + 2 * 3
    ahead = Lane(checkpoint, "cpu", readers=3, threads=1)
    ledger = Ledger(checkpoint, COLUMNS)
    assert ahead.capacity == 4
    drive(ahead, ledger, ledger.tasks())
    ahead.close()
    for tensor in one.tensors:
        assert {
            c: sum(ledger.parts(tensor.weight, c), start=type(tensor.stats[c]).zero()) for c in COLUMNS
        } == tensor.stats


def test_threads_are_put_back(checkpoint: Checkpoint) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        scan(checkpoint, jobs=1)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_ctrl_c_is_for_the_parent_alone(checkpoint: Checkpoint) -> None:
    """A terminal sends SIGINT to workers too, at any moment: while they start, and while they work."""
    pool = Processes(checkpoint, Shape(("cpu",), 1, 1))
    try:
        ledger = Ledger(checkpoint, ("mxfp4",))
        os.kill(pool.pids[0], signal.SIGINT)
        tasks = list(ledger.tasks())
        drive(pool, ledger, iter(tasks[:2]))
        os.kill(pool.pids[0], signal.SIGINT)
        drive(pool, ledger, iter(tasks[2:]))
        assert all(len(list(ledger.parts(w, "mxfp4"))) == 1 for w in checkpoint.weights)
    finally:
        pool.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_worker_that_dies_is_one_line_and_no_hang(checkpoint: Checkpoint, number: signal.Signals) -> None:
    pool = Processes(checkpoint, Shape(("cpu", "cpu"), 1, 1))
    ledger = Ledger(checkpoint, COLUMNS)
    tasks = list(ledger.tasks())
    try:
        for task in tasks[:2]:
            pool.submit(task)
        for _ in range(2):
            pool.next()  # both are at work
        os.kill(pool.pids[0], number)
        assert wait_until(lambda: gone(pool.pids[0]))
        with pytest.raises(
            WorkerError, match=rf"killed by {number.name} while it worked on tensor 'layers\.[2-5]\.q_proj"
        ):
            drive(pool, ledger, iter(tasks[2:]))
    finally:
        pids = pool.pids
        pool.close()
    assert all(gone(pid) for pid in pids)


def parts(checkpoint: Checkpoint, pool: Pool) -> list[object]:
    ledger = Ledger(checkpoint, COLUMNS)
    drive(pool, ledger, ledger.tasks())
    return [list(ledger.parts(w, column)) for w in checkpoint.weights for column in COLUMNS]


def test_a_lane_here_does_the_whole_scan_while_the_others_start(checkpoint: Checkpoint) -> None:
    """A process that never gets up (stopped before it could) is not waited for."""
    alone = parts(checkpoint, Lane(checkpoint, "cpu"))
    pool = Joining(checkpoint, Shape(("cpu", "cpu", "cpu"), 1, 1))
    try:
        for pid in pool.pids:
            os.kill(pid, signal.SIGSTOP)
        assert parts(checkpoint, pool) == alone
        assert not pool.busy
    finally:
        pool.close()
    assert all(gone(pid) for pid in pool.pids)


def test_processes_that_are_up_take_their_share(tmp_path: Path) -> None:
    """And all of it once all of them are, however much there is to do."""
    checkpoint = make(tmp_path / "model.safetensors", count=24)
    alone = parts(checkpoint, Lane(checkpoint, "cpu"))
    pool = Joining(checkpoint, Shape(("cpu", "cpu"), 1, 1))
    mine: list[Task] = []
    own = pool._own.submit
    pool._own.submit = lambda task: (mine.append(task), own(task))[1]  # type: ignore[method-assign]
    others = pool.others
    try:
        os.kill(pool.pids[1], signal.SIGSTOP)
        others.look(None)  # until the first is up
        assert not others.up
        assert parts(checkpoint, pool) == alone
        assert 0 < len(mine) < len(list(Ledger(checkpoint, COLUMNS).tasks()))
        mine.clear()
        os.kill(pool.pids[1], signal.SIGCONT)
        assert wait_until(lambda: others.look(1) or others.up)
        assert parts(checkpoint, pool) == alone
        assert not mine
        os.kill(pool.pids[0], signal.SIGKILL)
        assert wait_until(lambda: gone(pool.pids[0]))
        with pytest.raises(WorkerError, match="killed by SIGKILL before its first tensor"):
            others.look(10)
    finally:
        pool.close()


def test_results_are_taken_no_faster_than_they_are_kept(checkpoint: Checkpoint) -> None:
    """What is here is given out before more is read; once all are up, what this process had begun comes first."""
    events: list[str] = []

    class Pretended:
        def __init__(self, name: str, results: int):
            self.name, self.left, self.arrived, self.up = name, results, 0, False

        @property
        def busy(self) -> bool:
            return self.left > 0

        def look(self) -> None:
            events.append("look")
            self.arrived = min(2, self.left)

        def next(self) -> tuple[Task, Result]:
            events.append(self.name)
            self.left -= 1
            self.arrived = max(0, self.arrived - 1)
            return Task(0, 0, 1, ()), Result()

    pool = object.__new__(Joining)
    pool.others, pool._own = others, _ = Pretended("theirs", 5), Pretended("mine", 3)  # type: ignore[assignment]
    for _ in range(3):
        pool.next()
    others.up = True
    while pool.busy:
        pool.next()
    assert " ".join(events) == "look theirs theirs look theirs mine mine mine theirs look theirs"


def test_workers_import_nothing_from_the_folder_they_are_started_in(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tempfile.py").write_text("raise ImportError('a file of the user, not the module')")
    monkeypatch.chdir(tmp_path)
    alone = parts(checkpoint, Lane(checkpoint, "cpu"))
    pool = Processes(checkpoint, Shape(("cpu", "cpu"), 1, 1))
    try:
        assert parts(checkpoint, pool) == alone
    finally:
        pool.close()


def test_an_error_in_a_worker_is_the_same_error_here(checkpoint: Checkpoint) -> None:
    weight = dataclasses.replace(checkpoint.weights[3], shape=(1024, 320))  # longer than its file
    broken = dataclasses.replace(checkpoint, weights=(*checkpoint.weights[:3], weight))
    with pytest.raises((CheckpointError, RuntimeError)) as here:
        scan(broken, baselines=(), jobs=1)
    with pytest.raises(type(here.value)) as there:
        scan(broken, baselines=(), jobs=2)
    assert str(here.value) == str(there.value)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_their_parent(tmp_path: Path, number: signal.Signals) -> None:
    """However it ends: none of them stays behind, and none of them prints."""
    make(tmp_path / "model.safetensors")
    script = tmp_path / "script.py"
    script.write_text(  # no `if __name__ == "__main__"`: workers must not run it again
        "import sys, time\n"
        "from mxrl.checkpoint import open_checkpoint\n"
        "from mxrl.scan_workers import Processes, Shape\n"
        "from mxrl.scan_tasks import Ledger\n"
        f"c = open_checkpoint({str(tmp_path / 'model.safetensors')!r})\n"
        "pool = Processes(c, Shape(('cpu', 'cpu'), 1, 1))\n"
        "try:\n"
        "    for task in list(Ledger(c, ('mxfp4',)).tasks())[:2]: pool.submit(task)\n"
        "    pool.next(), pool.next()\n"
        "    print(*pool.pids, flush=True)\n"
        "    time.sleep(100)\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted', flush=True)\n"
        "finally:\n"
        "    pool.close()\n"
    )
    process = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    pids = [int(word) for word in process.stdout.readline().split()]
    assert len(pids) == 2 and not any(gone(pid) for pid in pids)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does: to the workers as well
    else:
        process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (out, err) == ("interrupted\n" if number == signal.SIGINT else "", "")
    assert wait_until(lambda: all(gone(pid) for pid in pids))


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2GB", 2e9),
        ("500 MB", 5e8),
        ("1.5GiB", 1.5 * 2**30),
        ("3000000000", 3e9),
        ("64k", 64e3),
        ("1t", 1e12),
        ("7b", 7),
    ],
)
def test_sizes(text: str, size: float) -> None:
    assert parse_size(text) == int(size)


@pytest.mark.parametrize("text", ["", "GB", "2 G B", "-1GB", "1e9", "2GBs", "2PB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match=r"2GB, 500MB or 1\.5GiB"):
        parse_size(text)


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert devices_of("auto") == devices_of("cpu") == ("cpu",)
    with pytest.raises(ValueError, match="sees no CUDA GPU here; --device cpu"):
        devices_of("cuda")
    with pytest.raises(ValueError, match="possible are auto, cpu, cuda"):
        devices_of("tpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert devices_of("auto") == devices_of("cuda") == ("cuda:0", "cuda:1")
    assert devices_of("auto", small=True) == devices_of("cpu") == ("cpu",)
    assert devices_of("cuda:1") == ("cuda:1",)
    with pytest.raises(ValueError, match=r"cuda:2'.*GPUs 0 to 1"):
        devices_of("cuda:2")


def test_memory_decides_how_many_processes(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)), raising=False)
    large = dataclasses.replace(checkpoint.weights[0], shape=(1 << 20, 1 << 14))
    many = dataclasses.replace(checkpoint, weights=(large,))

    def shape(memory: float, jobs: int | None = None, c: Checkpoint = many) -> tuple[int, int]:
        found = shape_of(c, COLUMNS, jobs=jobs, memory=int(memory))
        return len(found.devices), found.threads

    assert shape(2e9) == (5, 2)
    assert shape(20e9) == (12, 1)
    assert shape(1e9) == (2, 6)
    assert shape(5e8) == (1, 12)
    assert shape(20e9, jobs=3) == (3, 1)
    assert shape(20e9, c=checkpoint) == (1, 0)  # too little to do for processes
    assert shape(20e9, jobs=2, c=checkpoint) == (2, 1)
    with pytest.raises(ValueError, match=r"memory=0.2GB is too little here, which takes up to 0.35GB"):
        shape(2e8)
    small = dataclasses.replace(checkpoint, weights=(checkpoint.weights[0],) * 100_000)  # their results: 440 MB
    assert shape(2e9, c=small) == (4, 3)
    with pytest.raises(ValueError, match=r"memory=0.5GB is too little here, which takes up to 0.79GB"):
        shape(5e8, c=small)
    assert shape(20e9, jobs=48) == (48, 1)
    with pytest.raises(ValueError, match="jobs=0"):
        shape(2e9, jobs=0)
    with pytest.raises(ValueError, match="jobs=100000: 48 is the most here, 4 for each of 12 cores"):
        shape(20e9, jobs=100_000)


def test_gpus_get_a_process_each_and_readers_as_memory_allows(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(32)), raising=False)
    large = dataclasses.replace(checkpoint.weights[0], shape=(1 << 20, 1 << 14))  # float32: ranges of 64 MiB
    many = dataclasses.replace(checkpoint, weights=(large,))
    assert shape_of(many, COLUMNS, jobs=None) == Shape(("cuda:0", "cuda:1"), 1, 5)
    assert shape_of(many, COLUMNS, jobs=None, memory=1_000_000_000) == Shape(("cuda:0",), 1, 8)
    assert shape_of(many, COLUMNS, jobs=None, device="cuda:1") == Shape(("cuda:1",), 1, 8)
    assert shape_of(checkpoint, COLUMNS, jobs=None) == Shape(("cpu",), 0, 1)
    with pytest.raises(ValueError, match=r"memory=0.4GB is too little here, which takes up to 0.42GB"):
        shape_of(many, COLUMNS, jobs=None, memory=400_000_000)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert shape_of(many, COLUMNS, jobs=None) == Shape(tuple(f"cuda:{i}" for i in range(4)), 1, 1)
    assert shape_of(many, COLUMNS, jobs=None, memory=20_000_000_000) == Shape(
        tuple(f"cuda:{i}" for i in range(8)), 1, 3
    )

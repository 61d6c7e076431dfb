"""The journal: what it keeps, when it counts, and that a changed file is never taken for the old one."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mxrl.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from mxrl.scan import Step, scan
from mxrl.scan_journal import NAME, Journal, JournalError, identity, sample

COLUMNS = ("mxfp4", "nvfp4")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    g = torch.Generator().manual_seed(1)
    for shard in (1, 2):
        data = {f"layers.{shard}.{n}_proj.weight": torch.randn(64, 96, generator=g) for n in "qkv"}
        save_file(data, tmp_path / f"model-0000{shard}-of-00002.safetensors")
    return open_checkpoint(tmp_path)


def measured(checkpoint: Checkpoint, out: Path, *recipes: str, device: str = "cpu", fresh: bool = False) -> tuple:
    """Scan with the journal in `out`: how many steps were measured, the statistics, the journal's note."""
    steps: list[Step] = []
    journal = Journal(out, checkpoint, device, fresh=fresh)
    try:
        found = scan(checkpoint, recipes or ("mxfp4",), baselines=("nvfp4",), progress=steps.append, journal=journal)
    finally:
        journal.close()
    return sum(s.measured for s in steps), [t.stats for t in found.tensors], journal.note


def test_what_is_known_is_not_measured_again(checkpoint: Checkpoint, tmp_path: Path) -> None:
    first = measured(checkpoint, tmp_path / "out")
    assert first[0] == 6
    assert measured(checkpoint, tmp_path / "out") == (0, *first[1:])
    more = measured(checkpoint, tmp_path / "out", "mxfp4+mbs")
    assert more[0] == 6
    lines = [json.loads(line) for line in (tmp_path / "out" / NAME).read_text().splitlines()]
    assert [set(line["stats"]) for line in lines[1:]] == [{"mxfp4", "nvfp4"}] * 6 + [{"mxfp4+mbs"}] * 6
    assert [{k: s[k] for k in ("mxfp4", "nvfp4")} for s in more[1]] == first[1]
    assert more[1] == [t.stats for t in scan(checkpoint, ["mxfp4+mbs"], baselines=("nvfp4",)).tensors]
    assert measured(checkpoint, tmp_path / "out", fresh=True) == first


def test_a_journal_cut_anywhere_gives_the_same_results(checkpoint: Checkpoint, tmp_path: Path) -> None:
    _, expected, _ = measured(checkpoint, tmp_path / "out")
    path = tmp_path / "out" / NAME
    whole = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == 10]
    for end in [0, 1, *range(5, len(whole), 997), *ends, ends[2] + 1, ends[2] - 1]:
        path.write_bytes(whole[:end])
        finished = max(sum(e <= end for e in ends) - 1, 0)
        assert measured(checkpoint, tmp_path / "out") == (6 - finished, expected, "")
        assert measured(checkpoint, tmp_path / "out") == (0, expected, "")  # what it wrote behind the cut counts
        assert path.read_bytes().count(b"\n") == 7
    for damaged in (
        whole[: ends[2]] + b"{}\n" + whole[ends[3] :],
        whole[: ends[2]] + b"\0" * 50 + whole[ends[2] + 50 :],
    ):
        path.write_bytes(damaged)
        assert measured(checkpoint, tmp_path / "out") == (4, expected, "")


def test_a_changed_file_is_never_taken_for_the_old_one(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In place, size and modification time put back, in bytes that aren't sampled: the change time gives it away."""
    for name, value in (("_HEAD", 4096), ("_SAMPLES", 2), ("_SAMPLE", 16)):
        monkeypatch.setattr(f"mxrl.scan_journal.{name}", value)
    file = checkpoint.files[1]
    _, before, _ = measured(checkpoint, tmp_path / "out")
    stat, content = file.stat(), sample(file)
    with file.open("r+b") as stream:
        stream.seek(stat.st_size // 3 // 4 * 4)
        stream.write(torch.full((5,), 7.25).numpy().tobytes())
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    now = file.stat()
    assert (now.st_mtime_ns, now.st_size, now.st_ino) == (stat.st_mtime_ns, stat.st_size, stat.st_ino)
    assert sample(file) == content
    count, after, note = measured(open_checkpoint(tmp_path), tmp_path / "out")
    assert (count, note) == (6, f"{file.name} has changed since, or is another file")
    assert before != after == [t.stats for t in scan(open_checkpoint(tmp_path), baselines=("nvfp4",)).tensors]


def test_what_is_sampled_of_a_large_file(tmp_path: Path) -> None:
    path = tmp_path / "big"
    with path.open("wb") as file:
        file.truncate(1 << 30)
    before = identity(path)
    assert identity(path) == before
    seen = 0
    places = [10, (1 << 20) - 1, (1 << 30) - 1, ((1 << 30) - 4096) // 2, (1 << 30) // 3]
    for place in places:
        with path.open("r+b") as file:
            file.seek(place)
            file.write(b"x")
        seen += sample(path) != before["content"]
        assert identity(path) != before
        with path.open("r+b") as file:
            file.seek(place)
            file.write(b"\0")
    assert seen == 4 and sample(path) == before["content"]


@pytest.mark.parametrize(
    ("change", "note"),
    [
        (lambda m: m.setenv("MXRL_BACKEND", "reference"), "another device, backend or version"),
        (lambda m: m.setattr("mxrl.scan_journal.source_hash", lambda: "x"), "another version of mxrl"),
        (lambda m: m.setattr("mxrl.scan_journal.ELEMENTS", 5), "another version of mxrl"),
    ],
)
def test_other_arithmetic_starts_over(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change, note: str
) -> None:
    measured(checkpoint, tmp_path / "out")
    change(monkeypatch)
    count, _, why = measured(checkpoint, tmp_path / "out")
    assert count == 6 and note in why


def test_another_device_starts_over(checkpoint: Checkpoint, tmp_path: Path) -> None:
    measured(checkpoint, tmp_path / "out")
    assert "another device" in measured(checkpoint, tmp_path / "out", device="cuda")[2]


def test_a_file_that_changes_under_a_scan_makes_it_fail(checkpoint: Checkpoint, tmp_path: Path) -> None:
    journal = Journal(tmp_path / "out", checkpoint, "cpu")
    journal.check_unchanged()
    os.utime(checkpoint.files[0])
    with pytest.raises(CheckpointError, match=r"model-00001-of-00002.safetensors changed while it was analysed"):
        journal.check_unchanged()
    assert journal.close() is False
    assert not (tmp_path / "out").exists()


def test_one_run_at_a_time_and_places_that_can_not_be_written(checkpoint: Checkpoint, tmp_path: Path) -> None:
    journal = Journal(tmp_path / "out", checkpoint, "cpu")
    with pytest.raises(JournalError, match=r"another run is writing to .*out; .*--out"):
        Journal(tmp_path / "out", checkpoint, "cpu")
    journal.close()
    assert not (tmp_path / "out").exists()  # nothing was measured
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "out"):
        with pytest.raises(JournalError, match="can't write to"):
            Journal(place, checkpoint, "cpu")


def test_the_journal_reads_back_exactly(checkpoint: Checkpoint, tmp_path: Path) -> None:
    _, expected, _ = measured(checkpoint, tmp_path / "out")
    journal = Journal(tmp_path / "out", checkpoint, "cpu")
    journal.add_hash(checkpoint.files[0], "abc")
    journal.close()
    again = Journal(tmp_path / "out", checkpoint, "cpu")
    again.close()
    assert [again.found[(w.name, 0, 64)].stats for w in checkpoint.weights] == expected
    assert again.hashes == {str(checkpoint.files[0].resolve()): "abc"}

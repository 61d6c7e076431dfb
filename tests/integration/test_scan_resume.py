"""kill -9 at ten random moments: the same command goes on, and its totals are the same bit for bit."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mxrl.cli import main
from mxrl.scan_journal import NAME

SMALL = 1 << 16  # elements of a range here, so that small tensors have several and NVFP4 takes its two rounds
RUN = (  # the command line with small ranges
    "import sys, mxrl.scan_tasks; mxrl.scan_tasks.ELEMENTS = int(sys.argv[1]); "
    "from mxrl.cli import main; sys.exit(main(sys.argv[2:]))"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    g = torch.Generator().manual_seed(5)
    names = {}
    for shard in (1, 2):
        data = {}
        for kind, rows in (("self_attn.q", 200), ("self_attn.o", 640), ("mlp.down", 300)):
            data[f"model.layers.{shard}.{kind}_proj.weight"] = torch.randn(rows, 512, generator=g).bfloat16()
        file = f"model-0000{shard}-of-00002.safetensors"
        save_file(data, folder / file)
        names |= dict.fromkeys(data, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return folder


def numbers(out: Path) -> tuple[dict, bytes]:
    """What has to be the same: everything but when and how long."""
    found = json.loads((out / "summary.json").read_text())
    return {k: v for k, v in found.items() if k not in ("created", "seconds")}, (out / "tensors.jsonl").read_bytes()


def lines(out: Path) -> int:
    try:
        return (out / NAME).read_bytes().count(b"\n")
    except OSError:
        return 0


def test_killed_at_ten_random_moments(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Some of them with workers, all of the process group at once; torch's own arithmetic is slow enough to be hit."""
    monkeypatch.setenv("MXRL_BACKEND", "reference")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for module in ("scan_tasks", "scan_journal"):
        monkeypatch.setattr(f"mxrl.{module}.ELEMENTS", SMALL)
    recipes = ["-r", "mxfp4+mbs:search16", "-r", "nvfp4:4over6"]
    assert main(["analyze", str(model), *recipes, "--jobs", "1", "--out", str(tmp_path / "whole")]) == 0
    capsys.readouterr()
    expected, total = numbers(tmp_path / "whole"), lines(tmp_path / "whole")
    assert total > 35  # 6 weights, most of several ranges, in two rounds
    moments = random.Random(4)
    hit = 0
    for i in range(10):
        out = tmp_path / f"out{i}"
        command = [sys.executable, "-c", RUN, str(SMALL), "analyze", str(model), *recipes, "--out", str(out)]
        process = subprocess.Popen(
            [*command, "--jobs", str(1 + (i % 3 == 1))],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        wanted, delay = moments.randrange(0, total - 4), moments.uniform(0, 0.03)
        deadline = time.monotonic() + 120
        while lines(out) < wanted and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(delay)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL, "it ended before it could be killed"
        assert not (out / "summary.json").exists()
        kept = max(lines(out) - 1, 0)
        hit += 0 < kept < total - 3  # the key, and a hash for each of the two files
        assert main(["analyze", str(model), *recipes, "--jobs", "1", "--out", str(out), "--resume"]) == 0
        err = capsys.readouterr().err
        assert ("% of the work is taken from" in err) == (kept > 0)
        assert numbers(out) == expected
        assert lines(out) == total  # nothing was done twice
        assert sorted(p.name for p in out.iterdir()) == sorted([NAME, "report.html", "summary.json", "tensors.jsonl"])
    assert hit >= 7

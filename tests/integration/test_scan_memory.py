"""What a scan takes for itself doesn't grow with the checkpoint: one tensor of 1.2 GB, of zeros in a sparse file."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mxrl.scan_journal import NAME
from mxrl.scan_tasks import ranges

ROWS, COLUMNS = 120_000, 5_000


def anonymous(pid: int) -> int:
    """Bytes that a process and its children hold for themselves; mapped files apart."""
    total = 0
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Anonymous:"):
                total += int(line.split()[1]) * 1024
        for task in Path(f"/proc/{pid}/task").iterdir():
            total += sum(anonymous(int(child)) for child in (task / "children").read_text().split())
    except OSError:
        pass  # it has ended
    return total


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="counts memory as Linux does")
def test_one_large_tensor(tmp_path: Path) -> None:
    about = {"dtype": "BF16", "shape": [ROWS, COLUMNS], "data_offsets": [0, 2 * ROWS * COLUMNS]}
    header = json.dumps({"model.layers.0.mlp.up_proj.weight": about}).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + 2 * ROWS * COLUMNS)
    command = [sys.executable, "-m", "mxrl.cli", "analyze", str(tmp_path / "model.safetensors"), "--jobs", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([*command, "--out", str(tmp_path / "out")], env=environment, stdout=subprocess.DEVNULL)
    peak = 0
    while process.poll() is None:
        peak = max(peak, anonymous(process.pid))
        time.sleep(0.02)
    assert process.returncode == 0
    assert 2e8 < peak < 1e9  # three processes with torch in them; the tensor alone is 1.2 GB
    total = json.loads((tmp_path / "out" / "summary.json").read_text())["total"]
    assert total["mxfp4"]["exact_zero_count"] == total["nvfp4"]["exact_zero_count"] == ROWS * COLUMNS
    tasks = 2 * len(ranges((ROWS, COLUMNS), -1))  # two rounds
    assert tasks == 74 and len((tmp_path / "out" / NAME).read_text().splitlines()) == 1 + tasks + 1  # key, hash

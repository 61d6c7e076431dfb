"""What `mxrl analyze` takes for itself on one tensor of 20 GB: zeros in a sparse file, so that no disk is needed.

    python benchmarks/peak_memory.py [--gigabytes 20] [--jobs 2]

Prints the largest sum, over the command's processes, of `Anonymous` in /proc/PID/smaps_rollup, looked at 20 times a
second: memory that isn't a mapped file's. Linux.
"""

from __future__ import annotations

import argparse
import json
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measure import origin, pick_device, write_rows

COLUMNS = 8192


def anonymous(pid: int) -> int:
    """Bytes that a process and its children hold for themselves."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=20.0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "peak_memory_cpu.jsonl")
    args = parser.parse_args()
    rows = int(args.gigabytes * 1e9 / 2 / COLUMNS)
    with tempfile.TemporaryDirectory() as folder:
        about = {"dtype": "BF16", "shape": [rows, COLUMNS], "data_offsets": [0, 2 * rows * COLUMNS]}
        header = json.dumps({"model.layers.0.mlp.up_proj.weight": about}).encode()
        model = Path(folder) / "model.safetensors"
        with model.open("wb") as file:
            file.write(struct.pack("<Q", len(header)) + header)
            file.truncate(8 + len(header) + 2 * rows * COLUMNS)
        command = [sys.executable, "-m", "mxrl", "analyze", str(model), "--jobs", str(args.jobs), "-o", f"{folder}/out"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        peak = 0
        while process.poll() is None:
            peak = max(peak, anonymous(process.pid))
            time.sleep(0.05)
    if process.returncode:
        sys.exit(process.returncode)
    row = {"benchmark": "peak_memory", "bytes": 2 * rows * COLUMNS, "jobs": args.jobs, "anonymous": peak}
    write_rows(args.out, [row | origin(pick_device("cpu"), 0, "safetensors")])
    print(f"one tensor of {2 * rows * COLUMNS / 1e9:.1f} GB: peak of {peak / 1e9:.3f} GB anonymous, {args.jobs} jobs")


if __name__ == "__main__":
    main()

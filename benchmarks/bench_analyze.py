"""The whole command `mxrl analyze --device cuda` on one GPU and on several: how long it takes, and where the time goes.

    python benchmarks/bench_analyze.py --gpus 1,2 --folder /dev/shm/mxrl-analyze --gigabytes 12,61 --rounds 3,1

Checkpoints in memory-backed files, made as bench_scan.py makes its own (61 GB: the size of Qwen3-30B-A3B in bf16, and
about as many tensors). Each command is a process of its own, as a user starts it; once to warm up (Triton compiles),
then in turn on each number of GPUs. A row is one size on so many GPUs: `ms` of the whole process, and `parts` of the
median one, the seconds since its start at which each part ended (analyze_parts.py); `speedup` over the fewest GPUs.
The rows of the table that the command writes, tensors.jsonl, must be the same on every number of GPUs: `same_rows`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from bench_scan import make
from measure import Row, origin, percentiles, write_rows

from mxrl.checkpoint import open_checkpoint

HERE = Path(__file__).parent


def command(checkpoint: Path, gpus: int) -> tuple[float, Row, str]:
    """-> seconds, parts, sha256 of the rows."""
    with tempfile.TemporaryDirectory() as out:
        times = Path(out) / "times.json"
        words = [sys.executable, str(HERE / "analyze_parts.py"), str(times), str(checkpoint), "--device", "cuda"]
        env = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(gpus)))}
        begin = time.perf_counter()
        subprocess.run(
            [*words, "-o", f"{out}/out"], env=env, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        seconds = time.perf_counter() - begin
        rows = hashlib.sha256((Path(out) / "out" / "tensors.jsonl").read_bytes()).hexdigest()
        return seconds, json.loads(times.read_text()), rows


def rows_of(folder: Path, gigabytes: float, rounds: int, counts: list[int], common: Row) -> list[Row]:
    make(folder, gigabytes, common["seed"])
    checkpoint = open_checkpoint(folder)
    found: dict[int, list[tuple[float, Row, str]]] = {count: [] for count in counts}
    for _ in range(rounds):
        for count in counts:
            found[count].append(command(folder, count))
            print(f"{gigabytes:g} GB, {count} GPUs: {found[count][-1][0]:.1f} s  {found[count][-1][1]}", flush=True)
    digests = {digest for runs in found.values() for *_, digest in runs}
    rows = []
    for count, runs in found.items():
        ms = percentiles([1e3 * seconds for seconds, *_ in runs])
        parts = min(runs, key=lambda run: abs(1e3 * run[0] - ms["p50"]))[1]
        size = sum(file.stat().st_size for file in checkpoint.files)
        about = {"op": "analyze", "recipe": "", "backend": "triton", "gpus": count, "ms": ms, "rounds": len(runs)}
        about |= {"bytes": size, "tensors": len(checkpoint.weights), "shape": [checkpoint.numel], "parts": parts}
        rows.append(common | about | {"same_rows": len(digests) == 1})
    for row in rows:
        row["speedup"] = rows[0]["ms"]["p50"] / row["ms"]["p50"]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", default="1,2")
    parser.add_argument("--gigabytes", default="12,61")
    parser.add_argument("--rounds", default="3,1", help="of each size")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "mxrl-bench-analyze")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "analyze_cuda.jsonl")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench_analyze.py: torch sees no CUDA GPU here; bench_scan.py times the command on a CPU")
    device = torch.device("cuda")
    counts = sorted(map(int, args.gpus.split(",")))
    if counts[-1] > torch.cuda.device_count():
        sys.exit(f"--gpus {args.gpus}: torch sees {torch.cuda.device_count()} here; give that many or fewer")
    common = {"benchmark": "analyze", "dtype": "bfloat16"} | origin(device, args.seed, "safetensors")
    warm = args.folder / "warm"
    make(warm, 1, args.seed)
    command(warm, counts[-1])
    rows: list[Row] = []
    for gigabytes, rounds in zip(args.gigabytes.split(","), args.rounds.split(","), strict=True):
        folder = args.folder / gigabytes
        rows += rows_of(folder, float(gigabytes), int(rounds), counts, common)
        write_rows(args.out, rows)  # what is known so far
        shutil.rmtree(folder)
    shutil.rmtree(args.folder)
    print(f"written: {args.out}")


if __name__ == "__main__":
    main()

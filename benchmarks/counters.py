"""What limits a kernel, counted by the hardware: instructions and DRAM bytes an element, under Nsight Compute.

    python benchmarks/counters.py [--size 8192 16384] [--dtypes bfloat16] [--recipes mxfp4 …]    needs `ncu` and a GPU

A row for each (operation, recipe, dtype): thread instructions an element, DRAM bytes an element (bf16 in and out: 4
are needed), and of its longest kernel the instructions a cycle and multiprocessor (4 are the most there can be), the
share of peak DRAM throughput and the registers a thread. A kernel near 4 instructions a cycle is bound by
instructions, one near DRAM's peak by bytes. The clocks are left alone (--clock-control none).
"""

from __future__ import annotations

import argparse
import csv
import io
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from measure import Row, origin, pick_device, write_rows
from targets import told

import mxrl

RECIPES = ("mxfp4", "mxfp4+mbs", "mxfp4+of", "mxfp4+mbs+of", "mxfp4+mbs:search16", "mxfp4+mbs:joint", "nvfp4")
OPS = ("copy", "qdq", "stats", "pack")
MARKER = "spin_kernel"  # torch.cuda._sleep's kernel stands before each operation's
METRICS = {
    "instructions": "smsp__inst_executed.sum",  # of warps
    "read": "dram__bytes_read.sum",
    "written": "dram__bytes_write.sum",
    "ns": "gpu__time_duration.sum",
    "per cycle": "sm__inst_executed.avg.per_cycle_elapsed",
    "dram": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "registers": "launch__registers_per_thread",
}


def operations(args: argparse.Namespace) -> list[tuple[str, str, str]]:
    return [(op, r, d) for d in args.dtypes for op in args.ops for r in (args.recipes if op != "copy" else [""])]


def run(args: argparse.Namespace) -> None:
    """What ncu watches: each operation once, after a marker, once all are compiled."""
    rows, columns = args.size
    for profiled in (False, True):
        if profiled:
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
        for op, recipe, dtype in operations(args):
            x = torch.full((rows, columns), 0.02, device="cuda", dtype=getattr(torch, dtype))
            x *= torch.linspace(-1, 1, columns, device="cuda", dtype=x.dtype)
            out = torch.empty_like(x)
            torch.cuda._sleep(1)
            if op == "copy":
                out.copy_(x)
            elif op == "qdq":
                mxrl.fake_quantize(x, recipe, out=out, backend="triton")
            elif op == "stats":
                mxrl.error_stats(x, recipe, backend="triton")
            else:
                mxrl.quantize(x, recipe, backend="triton")
            torch.cuda._sleep(1)
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def kernels(report: str) -> Iterator[dict[str, str | float]]:
    """ncu's CSV, a line for each (kernel, metric), as one dictionary for each kernel in the order of launches."""
    names = {metric: name for name, metric in METRICS.items()}
    start = report.index('"ID"')
    current: dict[str, str | float] = {}
    for line in csv.DictReader(io.StringIO(report[start:])):
        if line["ID"] != current.get("id"):
            if current:
                yield current
            current = {"id": line["ID"], "kernel": line["Kernel Name"]}
        if line["Metric Name"] in names:
            current[names[line["Metric Name"]]] = float(line["Metric Value"].replace(",", "") or "nan")
    if current:
        yield current


def counted(report: str, args: argparse.Namespace, source: Row) -> list[Row]:
    groups: list[list[dict]] = []
    for kernel in kernels(report):
        if MARKER in str(kernel["kernel"]):
            groups.append([])
        elif groups:
            groups[-1].append(kernel)
    numel = args.size[0] * args.size[1]
    results = []
    for own, (op, recipe, dtype) in zip(
        groups[::2], operations(args), strict=True
    ):  # every second gap sets up the next
        total = {name: sum(k[name] for k in own) for name in ("instructions", "read", "written", "ns")}
        longest = max(own, key=lambda k: k["ns"])
        results.append(
            {
                "benchmark": "counters",
                "op": op,
                "recipe": recipe,
                "backend": "triton",
                "dtype": dtype,
                "shape": args.size,
                "kernels": len(own),
                "instructions": 32 * total["instructions"] / numel,
                "read": total["read"] / numel,
                "written": total["written"] / numel,
                "profiled_ms": total["ns"] / 1e6,
                "per_cycle": longest["per cycle"],
                "dram": longest["dram"] / 100,
                "registers": longest["registers"],
            }
            | source
        )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, nargs=2, default=[8192, 16384])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"])
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--ops", nargs="+", choices=OPS, default=list(OPS))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "counters_cuda.jsonl")
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)  # this process is the watched one
    args = parser.parse_args()
    if args.run:
        return run(args)
    pick_device("cuda")
    if shutil.which("ncu") is None:
        sys.exit("counters: needs Nsight Compute's ncu on the PATH")
    ncu = ["ncu", "--csv", "--clock-control", "none", "--profile-from-start", "off", "--print-units", "base"]
    command = [*ncu, "--metrics", ",".join(METRICS.values()), sys.executable, *sys.argv, "--run"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode or '"ID"' not in done.stdout:
        sys.exit(f"counters: ncu failed: {(done.stdout + done.stderr)[-2000:]}")
    results = counted(done.stdout, args, origin(pick_device("cuda"), 0))
    write_rows(args.out, results)
    for row in results:
        print(f"{row['op']:6s} {row['recipe']:20s} {row['dtype']:9s} " + told(row))


if __name__ == "__main__":
    main()

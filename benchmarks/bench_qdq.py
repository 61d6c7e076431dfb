"""Quantize-dequantize on the CPU, against a copy and against other libraries, interleaved in one run.

    python benchmarks/bench_qdq.py [--size 4096] [--rounds 7] [--out benchmarks/results/qdq_cpu.jsonl]

A row for each (operation, dtype): p20, p50, p80 of its time as a ratio to the median copy of the same tensor in that
run. Peers are the ones that the development extra installs; what is missing is said, not skipped in silence.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from mxrl import error_stats, fake_quantize, quantize
from mxrl.provenance import provenance
from mxrl.report.files import write_atomically

RECIPES = ["mxfp4", "mxfp4+mbs", "mxfp4+of", "mxfp4+mbs+of", "nvfp4"]


def ours(x: torch.Tensor) -> dict[str, Callable[[], object]]:
    out = torch.empty_like(x)
    operations: dict[str, Callable[[], object]] = {"copy": lambda: out.copy_(x)}
    for recipe in RECIPES:
        operations[f"fake_quantize {recipe}, out="] = lambda recipe=recipe: fake_quantize(x, recipe, out=out)
    operations["quantize mxfp4"] = lambda: quantize(x, "mxfp4")
    operations["error_stats mxfp4"] = lambda: error_stats(x, "mxfp4")
    return operations


def peers(x: torch.Tensor) -> dict[str, Callable[[], object]]:
    operations: dict[str, Callable[[], object]] = {}
    try:
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
        from torchao.prototype.mx_formats.mx_tensor import MXTensor

        operations["torchao RCEIL"] = lambda: MXTensor.to_mx(
            x, torch.float4_e2m1fn_x2, 32, scaling_mode=ScaleCalculationMode.RCEIL
        ).dequantize(x.dtype)
    except ImportError as error:
        print(f"torchao: not measured ({error})")
    try:
        from fouroversix import QuantizationConfig, dequantize, quantize_to_fp4

        config = QuantizationConfig(dtype="mxfp4", scale_rule="static_6", backend="pytorch")
        operations["fouroversix static_6"] = lambda: dequantize(
            quantize_to_fp4(x, config), dtype=x.dtype, intermediate_dtype=torch.float32
        )
    except ImportError as error:
        print(f"fouroversix: not measured ({error})")
    return operations


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "qdq_cpu.jsonl")
    args = parser.parse_args()
    origin = provenance("cpu", "torch", "torchao", "fouroversix") | {"threads": torch.get_num_threads(), "seed": 0}
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(args.size, args.size, generator=torch.Generator().manual_seed(0)).to(dtype)
        operations = {**ours(x), **peers(x)}
        times: dict[str, list[float]] = {name: [] for name in operations}
        for turn in range(args.rounds + 1):
            for name, operation in operations.items():
                start = time.perf_counter()
                operation()
                if turn:  # the first turn warms up
                    times[name].append(time.perf_counter() - start)
        unit = statistics.median(times["copy"])
        for name, seconds in times.items():
            p20, p50, p80 = (sorted(seconds)[round(q * (len(seconds) - 1))] / unit for q in (0.2, 0.5, 0.8))
            rows.append({"op": name, "dtype": str(dtype).removeprefix("torch."), "size": args.size,
                         "p20": p20, "p50": p50, "p80": p80} | origin)  # fmt: skip
            print(f"{rows[-1]['dtype']:9s} {name:34s} {p50:8.1f} × copy  [{p20:.1f}, {p80:.1f}]", flush=True)
    write_atomically(args.out, "".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()

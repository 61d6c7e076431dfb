"""Timing for every benchmark here: what a row is, and how its numbers come about.

    round 1:  copy  op_1  op_2 …  peer_1 …        each timed once, in turn
    round 2:  copy  op_1  op_2 …  peer_1 …        so that a slow minute of the machine hits all of them
    …                                             p20, p50, p80 over the rounds; ratios are taken between medians

On CUDA a call is timed with events behind a short sleep of the device: the launches queue up meanwhile, and what Python
takes to issue them stays out of the time (as far as the sleep reaches: what issues hundreds of launches pays for them).
Tensors smaller than a few times the L2 cache rotate, so that nothing is read back from it. On a CPU it is a wall clock.

    fraction  of a bandwidth: (bytes / p50) of the operation over (bytes / p50) of `copy`, or of `read` for operations
              that only read, measured in the same rounds. bytes: each input read once, each output written once.

A row is one JSON line: benchmark, op, recipe, backend, dtype, shape, ms {p20, p50, p80}, rounds, bytes, against,
fraction, and its origin (device, accelerator, versions, commit, date, seed, threads). What couldn't be measured is a
row that says why under `missing`, never left out.
"""

from __future__ import annotations

import gc
import json
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mxrl.ops import dispatch
from mxrl.provenance import provenance
from mxrl.recipes import Recipe
from mxrl.report.files import write_atomically

Row = dict[str, Any]
SLEEP = 2_000_000  # cycles, about 1 ms: the queue that hides launches
CACHE = 256 << 20  # bytes: buffers of an operation rotate until they add up to this


@dataclass
class Operation:
    """One thing to time: `run(i)` in turn i, `bytes` it has to move at least (0: no bandwidth is meant)."""

    op: str
    run: Callable[[int], object]
    recipe: str = ""
    backend: str = ""
    bytes: int = 0
    against: str = "copy"  # the operation whose bandwidth it is compared with
    extra: Row = field(default_factory=dict)
    missing: str = ""
    prepare: Callable[[], object] | None = None  # before each time it is run, untimed

    def row(self) -> Row:
        names = {"op": self.op, "recipe": self.recipe, "backend": self.backend}
        return names | self.extra | ({"missing": self.missing} if self.missing else {})


def absent(op: str, why: object, recipe: str = "", backend: str = "") -> Operation:
    """What can't be measured here, as a row that says so."""
    return Operation(op, lambda i: None, recipe, backend, missing=one_line(why))


def one_line(why: object) -> str:
    text = f"{type(why).__name__}: {why}" if isinstance(why, BaseException) else str(why)
    return " ".join(text.split())[:300]


def pick_device(name: str) -> torch.device:
    """The device; ends the program in one line where there is no such."""
    if name == "cuda" and not torch.cuda.is_available():
        sys.exit("--device cuda: torch sees no CUDA GPU here; --device cpu measures the CPU")
    return torch.device(name)


def device_name(device: torch.device) -> str:
    """The GPU's name, or the CPU's model and the threads that torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    model = platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model)
    return f"{model}, {torch.get_num_threads()} threads"


def origin(device: torch.device, seed: int, *packages: str) -> Row:
    """Where rows come from."""
    names = ("torch", "triton", "numba", "transformers", "torchao", "fouroversix", "nvidia-modelopt", *packages)
    where = provenance(device_name(device), *names)
    return where | {"accelerator": device.type != "cpu", "threads": torch.get_num_threads(), "seed": seed}


def serving(recipe: str, device: torch.device, dtype: torch.dtype) -> str:
    """The backend that quantizes by default here: "triton", "cpu" or "reference"; "" where nothing is quantized."""
    parsed = Recipe.parse(recipe)
    if not parsed.quantizes:
        return ""
    module = dispatch.operation("qdq", torch.zeros(1, device=device, dtype=dtype), parsed).__name__
    return module.partition("qdq_")[2] or "reference"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def percentiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {f"p{q}": ordered[round(q / 100 * (len(ordered) - 1))] for q in (20, 50, 80)}


def time_ms(run: Callable[[], object], device: torch.device) -> float:
    """Milliseconds of one call."""
    if device.type != "cuda":
        begin = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - begin)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(SLEEP)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def rotated(make: Callable[[int], Tensor], nbytes: int, device: torch.device) -> list[Tensor]:
    """make(0), make(1), … until they are several times the cache; one on a CPU, and one of CACHE bytes or more."""
    count = 1 if device.type != "cuda" else max(1, -(-CACHE // max(nbytes, 1)))
    return [make(i) for i in range(min(count, 64))]


def measure(
    operations: Sequence[Operation], device: torch.device, *, rounds: int, slow_ms: float, common: Row, warmups: int = 2
) -> list[Row]:
    """Time `operations` in interleaved rounds -> one row each, in their order.

    slow_ms: an operation that takes longer sits out rounds in proportion, but never has fewer than 5 of them.
    common: what every row says besides (dtype, shape, origin).
    """
    strides: dict[int, int] = {}
    for n, operation in enumerate(operations):
        if operation.missing:
            continue
        try:
            for _ in range(warmups):  # compiles, then shows how long it takes
                estimate = _once(operation, 0, device)
        except Exception as error:  # one that can't run must not take the others with it: its row says why
            operation.missing = one_line(error)
            print(f"  {operation.op} {operation.recipe} {operation.backend}: not measured ({operation.missing})")
            continue
        strides[n] = max(1, min(int(estimate / slow_ms), rounds // 5))
    times: dict[int, list[float]] = {n: [] for n in strides}
    gc.collect()
    gc.disable()
    try:
        for turn in range(rounds):
            for n, stride in strides.items():
                if turn % stride == 0:
                    times[n].append(_once(operations[n], turn, device))
    finally:
        gc.enable()
    rows = [operation.row() | common for operation in operations]
    for n, values in times.items():
        rows[n] |= {"ms": percentiles(values), "rounds": len(values), "bytes": operations[n].bytes}
    speed = {o.op: rows[n]["bytes"] / rows[n]["ms"]["p50"] for n, o in enumerate(operations) if n in times and o.bytes}
    for n in times:
        own, unit = operations[n], speed.get(operations[n].against)
        if own.bytes and unit:
            rows[n] |= {"against": own.against, "fraction": own.bytes / rows[n]["ms"]["p50"] / unit}
            rows[n]["GB/s"] = own.bytes / rows[n]["ms"]["p50"] / 1e6
    for row in rows:
        print("  " + line(row), flush=True)
    return rows


def _once(operation: Operation, turn: int, device: torch.device) -> float:
    if operation.prepare is not None:
        operation.prepare()
    return time_ms(lambda: operation.run(turn), device)


def line(row: Row) -> str:
    """One row for people who watch."""
    name = f"{row['op']:22s} {row['recipe']:24s} {row.get('engine') or row['backend']:10s}"
    if "ms" not in row:
        return f"{name} not measured: {row.get('missing', '')[:90]}"
    ms = row["ms"]
    share = f"  {row['fraction']:7.1%} of {row['against']}" if "fraction" in row else ""
    return f"{name} {ms['p50']:10.3f} ms [{ms['p20']:.3f}, {ms['p80']:.3f}]{share}"


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    write_atomically(path, "".join(json.dumps(row) + "\n" for row in rows))


def read_rows(*paths: Path) -> list[Row]:
    return [json.loads(text) for path in paths for text in path.read_text().splitlines() if text.strip()]

"""A checkpoint's scan against what limits it: reading the files, and the arithmetic on data in memory.

    python benchmarks/bench_scan.py                                       8 GB, CPU, every core
    python benchmarks/bench_scan.py --device cuda --gpus 1,2 --folder /dev/shm/scan --gigabytes 8
    python benchmarks/bench_scan.py --folder F --keep                     leaves the checkpoint for the next run

The checkpoint is a random Qwen3-MoE in bf16 (128 experts of 768 × 2048 a layer), a shard a layer, with its index; made
anew unless it lies in --folder already. One pass of each in every round, interleaved:

    read          every tensor of every shard by safetensors' own safe_open, copied out of the map, as a loader would
    arithmetic    error_stats on tensors in memory, all recipes of a scan, every core (CPU) or a GPU
    scan          mxrl.scan.scan, from start to end: processes started, torch imported, kernels loaded
    task          on a GPU: one expert's tensor, 100 times, all of analyze's recipes and moments, launched in three ways
    steady        the same tasks by workers that are up and warm, journal and sums included; on GPUs also by two on one
    analyze       scan, sha256 of every file, page (on GPUs: bench_analyze.py)

`fraction` is a throughput as a share of what binds, which `against` names: the slower of read and arithmetic; on GPUs
the read, since a scan launches all recipes at once, where arithmetic waits for each.
On GPUs `gpus` says how many (read and arithmetic: one), `speedup` is steady's or scan's throughput over that of the
fewest GPUs, and start-up has rows of its own: from starting the workers to each one's first results, which includes the
CUDA context and loading the kernels (compiling them, where Triton's cache is empty: the first such row).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from measure import Operation, Row, line, measure, origin, pick_device, write_rows
from safetensors import safe_open
from safetensors.torch import save_file

from mxrl.checkpoint import Checkpoint, open_checkpoint
from mxrl.decompose import error_stats
from mxrl.report.analyze import analyze
from mxrl.report.answers import EXTRA
from mxrl.scan import columns_of, drive, scan
from mxrl.scan_journal import Journal
from mxrl.scan_replay import Replay, launched
from mxrl.scan_tasks import EVERY, Ledger, Task, column_of, run
from mxrl.scan_workers import Joining, Pool, Shape, open_pool, shape_of

HIDDEN, INNER, EXPERTS = 2048, 768, 128
LAYER = (4096 * HIDDEN * 2 + 512 * HIDDEN * 2) * 2, INNER * HIDDEN * 3 * 2  # bytes: attention, one expert
TASKS = 100  # at a time
SAMPLE = 1 << 29  # bytes of weights on which the arithmetic is timed


def make(folder: Path, gigabytes: float, seed: int) -> None:
    """Write the checkpoint: slices of one random block, each tensor by a power of two of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    block = torch.randn(1 << 24, generator=generator).to(torch.bfloat16)

    def tensor(rows: int, columns: int) -> torch.Tensor:
        offset = int(torch.randint(0, block.numel() - rows * columns + 1, (), generator=generator))
        scale = 2.0 ** int(torch.randint(-8, -3, (), generator=generator))
        return block[offset : offset + rows * columns].view(rows, columns) * scale

    left, layer, places = int(gigabytes * 1e9), 0, {}
    while left > 0:
        prefix = f"model.layers.{layer}."
        shapes = {"q": (4096, HIDDEN), "k": (512, HIDDEN), "v": (512, HIDDEN), "o": (HIDDEN, 4096)}
        data = {f"{prefix}self_attn.{n}_proj.weight": tensor(*shape) for n, shape in shapes.items()}
        data[f"{prefix}mlp.gate.weight"] = tensor(EXPERTS, HIDDEN)
        data[f"{prefix}input_layernorm.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
        experts = min(EXPERTS, max(1, round((left - LAYER[0]) / LAYER[1])))
        for e in range(experts):
            for name, shape in (("gate", (INNER, HIDDEN)), ("up", (INNER, HIDDEN)), ("down", (HIDDEN, INNER))):
                data[f"{prefix}mlp.experts.{e}.{name}_proj.weight"] = tensor(*shape)
        file = f"model-layer-{layer:03d}.safetensors"
        save_file(data, folder / file)
        places |= dict.fromkeys(data, file)
        left -= LAYER[0] + experts * LAYER[1]
        layer += 1
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def read(checkpoint: Checkpoint) -> None:
    """Every tensor, copied out of the map into one buffer."""
    buffer = torch.empty(max(w.numel for w in checkpoint.weights), dtype=torch.bfloat16)
    for file in checkpoint.files:
        with safe_open(file, framework="pt") as shard:
            for name in shard.keys():
                tensor = shard.get_tensor(name)
                buffer[: tensor.numel()].copy_(tensor.view(-1))


def sample(checkpoint: Checkpoint, device: torch.device) -> list[torch.Tensor]:
    """The first weights, in memory, SAMPLE bytes of them."""
    found, size = [], 0
    for weight in checkpoint.weights:
        if size >= SAMPLE:
            break
        found.append(checkpoint.load(weight).clone().to(device))
        size += weight.nbytes
    return found


class Workers:
    """A pool that stays up between passes, and what its start took."""

    def __init__(self, checkpoint: Checkpoint, columns: tuple[str, ...], shape: Shape):
        self.checkpoint, self.columns = checkpoint, columns
        begin = time.perf_counter()
        self.pool: Pool = open_pool(checkpoint, shape)
        while isinstance(self.pool, Joining) and not self.pool.others.up:
            self.pool.others.look(None)
        ledger = Ledger(checkpoint, columns)
        tasks = list(ledger.tasks())
        few = {checkpoint.weights[t.weight].shape: t for t in tasks}  # one of each shape …
        drive(self.pool, ledger, iter([t for t in few.values() for _ in range(4 * len(shape.devices))]))  # … for each
        self.startup = time.perf_counter() - begin

    def run(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            journal = Journal(Path(folder), self.checkpoint, "any")
            ledger = Ledger(self.checkpoint, self.columns, journal.found)
            tasks: Iterator[Task] = ledger.tasks()
            drive(self.pool, ledger, tasks, journal=journal)
            for weight in self.checkpoint.weights:
                for column in self.columns:
                    list(ledger.parts(weight, column))
            journal.close()


def analyzed(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as out:
        analyze(folder, out=Path(out) / "out", device="cpu")


def operations_cpu(folder: Path, checkpoint: Checkpoint, columns: tuple[str, ...], args: Any) -> Iterator[Operation]:
    shape = shape_of(checkpoint, columns, jobs=args.jobs, device="cpu")
    about: Row = {"jobs": len(shape.devices) * max(shape.threads, 1), "processes": len(shape.devices)}
    yield from common(checkpoint, columns, torch.device("cpu"), about)
    workers = Workers(checkpoint, columns, shape)
    total = sum(w.nbytes for w in checkpoint.weights)

    def whole(_: int) -> None:
        scan(checkpoint, jobs=args.jobs, device="cpu")

    yield Operation("scan", whole, bytes=total, against="read", extra=about)
    steady = about | {"startup_s": workers.startup}
    yield Operation("steady", lambda _: workers.run(), bytes=total, against="read", extra=steady)
    if not args.no_analyze:
        yield Operation("analyze", lambda _: analyzed(folder), bytes=total, against="read", extra=about)


def operations_gpu(checkpoint: Checkpoint, columns: tuple[str, ...], args: Any) -> Iterator[Operation]:
    yield from common(checkpoint, columns, torch.device("cuda:0"), {"gpus": 1})
    yield from tasks_gpu(checkpoint, columns)
    total = sum(w.nbytes for w in checkpoint.weights)
    everything = shape_of(checkpoint, columns, jobs=1, device="cuda", memory=args.memory)
    for count in args.gpus:
        if count > len(everything.devices):
            yield Operation("steady", lambda _: None, extra={"gpus": count}, missing=f"{len(everything.devices)} GPUs")
            continue
        shape = Shape(everything.devices[:count], everything.threads, everything.readers)
        workers = Workers(checkpoint, columns, shape)
        about: Row = {"gpus": count, "processes": count, "readers": shape.readers, "startup_s": workers.startup}
        yield Operation("steady", lambda _, w=workers: w.run(), bytes=total, against="read", extra=about)

        def whole(_: int, shape: Shape = shape) -> None:
            ledger = Ledger(checkpoint, columns)
            pool = open_pool(checkpoint, shape)
            try:
                drive(pool, ledger, ledger.tasks())
            finally:
                pool.close()

        yield Operation("scan", whole, bytes=total, against="read", extra=about)
    two = Workers(checkpoint, columns, Shape(everything.devices[:1] * 2, everything.threads, everything.readers))
    about = {"gpus": 1, "processes": 2, "readers": everything.readers, "startup_s": two.startup}
    yield Operation("steady, 2 a GPU", lambda _: two.run(), bytes=total, against="read", extra=about)


def tasks_gpu(checkpoint: Checkpoint, columns: tuple[str, ...]) -> Iterator[Operation]:
    """One expert's tensor with everything that `mxrl analyze` takes of it, read back: three ways to launch the same."""
    weight = next(w for w in checkpoint.weights if w.kind.startswith("experts"))
    rows = checkpoint.read(weight, 0, weight.shape[0]).to("cuda:0")
    every = (*columns, *(column_of(recipe, EVERY) for recipe in EXTRA))
    task = Task(0, 0, weight.shape[0], every, moments=True)
    replay = Replay()
    about: Row = {"gpus": 1, "task_columns": len(every), "tasks": TASKS}
    for name, one in (
        ("task, recipe by recipe", lambda: run(task, weight, rows)),
        ("task, launched at once", lambda: launched(task, weight, rows).result(task)),
        ("task, replayed", lambda: replay.run(task, weight, rows)),
    ):
        yield Operation(
            name, lambda _, one=one: [one() for _ in range(TASKS)], bytes=TASKS * weight.nbytes, extra=about
        )

    def kernels(_: int) -> None:
        """The graph alone: what the GPU does in it."""
        for _ in range(TASKS):
            graph.replay()
        torch.cuda.synchronize()

    for _ in range(2):
        replay.run(task, weight, rows)
    graph = replay.graphs()[0]
    yield Operation("task, the GPU's part", kernels, bytes=TASKS * weight.nbytes, extra=about)


def common(checkpoint: Checkpoint, columns: tuple[str, ...], device: torch.device, about: Row) -> Iterator[Operation]:
    files = sum(f.stat().st_size for f in checkpoint.files)
    yield Operation("read", lambda _: read(checkpoint), bytes=files, against="read", extra=about)
    tensors = sample(checkpoint, device)

    def arithmetic(_: int) -> None:
        for x in tensors:
            for column in columns:
                error_stats(x, column)

    size = sum(x.numel() * x.element_size() for x in tensors)
    yield Operation("arithmetic", arithmetic, bytes=size, against="read", extra=about)


def judge(rows: list[Row]) -> None:
    """`fraction` against what binds; speed-ups over the fewest GPUs."""
    speed = {row["op"]: row["GB/s"] for row in rows if row["op"] in ("read", "arithmetic")}
    binds = "read" if any(row.get("gpus") for row in rows) else min(speed, key=lambda op: speed[op])
    for row in rows:
        if "ms" in row and row["op"] not in speed and "processes" in row:
            row |= {"against": binds, "fraction": row["GB/s"] / speed[binds]}
            of = [r for r in rows if r["op"] == row["op"] and "ms" in r and r.get("gpus")]
            if of:
                least = min(of, key=lambda r: r["gpus"])
                row["speedup"] = row["GB/s"] / least["GB/s"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "--gpus", default="1", help="how many at a time: 1,2", type=lambda s: [int(n) for n in s.split(",")]
    )
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "mxrl-bench-scan")
    parser.add_argument("--gigabytes", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--memory", type=float, default=2e9, help="as mxrl analyze's, in bytes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true", help="leave the checkpoint where it is")
    parser.add_argument("--no-analyze", action="store_true", help="on a CPU: leave it out")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.memory = int(args.memory)
    device = pick_device(args.device)
    torch.set_num_threads(args.jobs)
    if not (args.folder / "model.safetensors.index.json").exists():
        begin = time.perf_counter()
        make(args.folder, args.gigabytes, args.seed)
        print(f"made {args.folder} in {time.perf_counter() - begin:.0f} s")
    checkpoint = open_checkpoint(args.folder)
    columns = columns_of(("mxfp4",))
    common_row = {"benchmark": "scan", "dtype": "bfloat16", "shape": [checkpoint.numel], "columns": list(columns)}
    common_row |= {"files": len(checkpoint.files), "tensors": len(checkpoint.weights)}
    common_row |= origin(device, args.seed, "safetensors")
    if args.device == "cpu":
        operations = list(operations_cpu(args.folder, checkpoint, columns, args))
    else:
        operations = list(operations_gpu(checkpoint, columns, args))
    rows = measure(
        operations, torch.device("cpu"), rounds=args.rounds, slow_ms=float("inf"), common=common_row, warmups=1
    )  # wall clock on every device: a scan is whole processes
    judge(rows)
    print()
    for row in rows:
        more = {k: row[k] for k in ("gpus", "startup_s", "speedup") if k in row}
        print(f"  {line(row)}  {row.get('GB/s', 0):.3f} GB/s  {more or ''}")
    out = args.out or Path(__file__).parent / "results" / f"scan_{args.device}.jsonl"
    write_rows(out, rows)
    print(f"written: {out}")
    if not args.keep:
        shutil.rmtree(args.folder)


if __name__ == "__main__":
    main()

"""What limits a Triton kernel, counted without a GPU: the instructions of its sm_90 machine code, an element.

    python benchmarks/instructions.py [--out benchmarks/results/instructions_sm90.jsonl]

Each operation's launch is caught, compiled for sm_90 by the Triton that is installed, and disassembled. Counted is the
*shortest way* through the code, loops as often as they run: the fewest instructions with which a program can do its
tile, so what is done again for unusual tiles (near ties of a search, subnormals) is left out. The statistics' way is
their loop over tiles. In a cycle an SM of a Hopper GPU starts at most 128 instructions (lanes), of which 64 of the
integer and comparison kind, 64 float64, 16 conversions: 132 SMs at 1.98 GHz start 3.3e13 a second.
"""

from __future__ import annotations

import argparse
import collections
import heapq
import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"

import torch
import triton
from measure import Row, write_rows
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mxrl.ops import qdq_triton, stats_fast_triton, stats_triton
from mxrl.provenance import provenance
from mxrl.recipes import Recipe

TYPES = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64", torch.int64: "i64", torch.uint8: "u8",
         torch.int32: "i32", torch.int8: "i8"}  # fmt: skip
HALF = {"LOP3", "FMNMX", "FMNMX3", "IMNMX", "VIMNMX", "VIADDMNMX", "SHF", "ISETP", "FSETP", "SEL", "FSEL", "PRMT",
        "IADD3", "LEA", "IABS", "PLOP3"}  # fmt: skip
DOUBLE = {"DFMA", "DADD", "DMUL", "DSETP"}
CONVERSIONS = {"F2F", "F2I", "I2F", "MUFU"}
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
SHAPE = (1, 8192, 16384)


class Launch:
    """Stands in for a kernel: keeps the arguments of its last launch instead of running."""

    def __init__(self, kernel: Any):
        self.kernel, self.arguments = kernel, {}

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **named: Any) -> None:
            self.arguments = dict(zip(self.kernel.arg_names, args, strict=False)) | named

        return launch

    def compiled(self) -> Any:
        """The kernel as the launch would have it compiled: types, alignments and constants from its arguments."""
        signature, constants, hints = {}, {}, {}
        for i, parameter in enumerate(self.kernel.params):
            name, value = parameter.name, self.arguments[parameter.name]
            if (
                parameter.is_constexpr
                or value is None
                or (isinstance(value, int) and value == 1 and not parameter.do_not_specialize)
            ):
                signature[name], constants[name] = "constexpr", value
                continue
            if isinstance(value, torch.Tensor):
                signature[name] = "*" + TYPES[value.dtype]
            else:
                signature[name] = "fp32" if isinstance(value, float) else "i32" if abs(value) < 2**31 else "i64"
            if isinstance(value, torch.Tensor) or (
                isinstance(value, int) and not parameter.do_not_specialize and value % 16 == 0
            ):
                hints[(i,)] = [["tt.divisibility", 16]]
        source = ASTSource(self.kernel, signature, constexprs=constants, attrs=hints)
        options = {k: v for k, v in self.arguments.items() if k in ("num_warps", "enable_fp_fusion", "maxnreg")}
        return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def machine_code(compiled: Any) -> tuple[list[tuple[str, str]], dict[str, int], int]:
    """([(opcode, operands)], label -> index, registers)."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run([TOOLS / "nvdisasm", file.name], capture_output=True, text=True, check=True).stdout
        usage = subprocess.run([TOOLS / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True)
    code, labels = [], {}
    for line in text.splitlines():
        if label := re.match(r"(\.L_\w+):", line):
            labels[label[1]] = len(code)
        elif found := re.match(r"\s*(?:/\*[0-9a-f]+\*/)?\s+(@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]+)\s*(.*?);", line):
            code.append((found[2], (found[1] or "") + found[3]))
    registers = re.search(r"REG:(\d+)", usage.stdout + usage.stderr)
    return code, labels, int(registers[1]) if registers else 0


def shortest(code: list[tuple[str, str]], labels: dict[str, int]) -> list[int]:
    """Indices along the shortest way from the first instruction to an EXIT."""
    queue, before, done = [(0, 0, -1)], {}, set()
    while queue:
        cost, at, come_from = heapq.heappop(queue)
        if at in done or at >= len(code):
            continue
        done.add(at)
        before[at] = come_from
        name, operands = code[at]
        predicated = operands.startswith("@")
        if name.startswith("EXIT") and not predicated:
            way = []
            while at >= 0:
                way.append(at)
                at = before[at]
            return way[::-1]
        target = re.search(r"\.L_\w+", operands) if name.startswith("BRA") else None
        if target and target[0] in labels:
            heapq.heappush(queue, (cost + 1, labels[target[0]], at))
        if not (target and not predicated):
            heapq.heappush(queue, (cost + 1, at + 1, at))
    raise RuntimeError("no way to an EXIT")


def loops(code: list[tuple[str, str]], labels: dict[str, int]) -> list[tuple[int, int]]:
    """[begin, end) of every stretch that a backward branch repeats, the longest first."""
    spans = []
    for at, (name, operands) in enumerate(code):
        target = re.search(r"\.L_\w+", operands) if name.startswith("BRA") else None
        if target and labels.get(target[0], at + 1) < at:
            spans.append((labels[target[0]], at + 1))
    return sorted(spans, key=lambda span: span[0] - span[1])


def names(code: list[tuple[str, str]], begin: int, end: int) -> list[str]:
    return [name.partition(".")[0] for name, _ in code[begin:end]]


def counted(op: str, recipe: str, dtype: torch.dtype, launch: Launch, elements: int, *, trips: int, tiles: bool) -> Row:
    """elements: that a thread handles on the way. tiles: whether the way is the loop over tiles. trips: how often the
    loop on the way runs (over the candidates of a search, or over the pieces of a block), 1 without one.
    """
    code, labels, registers = machine_code(launch.compiled())
    found = loops(code, labels)
    if tiles:
        (begin, end), *rest = found
        way = names(code, begin, end)
        inner = next(span for span in rest if begin <= span[0] and span[1] <= end)
    else:
        way = [code[at][0].partition(".")[0] for at in shortest(code, labels)]
        inner = found[1] if trips > 1 else (0, 0)  # the longest loop is the exact search, for near ties
    way += names(code, *inner) * (trips - 1)
    counts = collections.Counter(way)
    row = {"benchmark": "instructions", "op": op, "recipe": recipe, "dtype": str(dtype).removeprefix("torch."),
           "instructions": sum(counts.values()) / elements, "registers": registers}  # fmt: skip
    for name, kind in (("half_rate", HALF), ("float64", DOUBLE), ("conversions", CONVERSIONS)):
        row[name] = sum(n for opcode, n in counts.items() if opcode in kind) / elements
    return row


def qdq(recipe: str, dtype: torch.dtype) -> Row:
    x = torch.empty(SHAPE, dtype=dtype, device="meta")
    launch = Launch(qdq_triton._qdq_kernel)
    qdq_triton._qdq_kernel = launch
    try:
        qdq_triton.qdq(x, Recipe.parse(recipe), x, None)
    finally:
        qdq_triton._qdq_kernel = launch.kernel
    a = launch.arguments
    elements = a["M"] * a["G"] * a["N"] // (32 * a["num_warps"])
    return counted("qdq", recipe, dtype, launch, elements, trips=16 if "search16" in recipe else 1, tiles=False)


def stats(recipe: str, dtype: torch.dtype, *, fast: bool) -> Row:
    x = torch.empty(SHAPE, dtype=dtype, device="meta")
    module, name = (stats_fast_triton, "_fast_kernel") if fast else (stats_triton, "_stats_kernel")
    launch, others = Launch(getattr(module, name)), {}
    for m, n in ((stats_triton, "_stats_kernel"), (stats_triton, "_total_kernel"), (stats_fast_triton, "_fast_kernel")):
        others[m, n] = getattr(m, n)
        setattr(m, n, launch if (m, n) == (module, name) else Launch(others[m, n]))
    try:
        stats_triton.launch(x, Recipe.parse(recipe), None, None)
    finally:
        for (m, n), kernel in others.items():
            setattr(m, n, kernel)
    op = "stats, bf16 path" if fast else "stats"
    trips = 32 // (16 // dtype.itemsize)  # a thread has a block, and reads it in pieces of 16 bytes
    return counted(op, recipe, dtype, launch, 32, trips=trips, tiles=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "instructions_sm90.jsonl")
    args = parser.parse_args()
    source = provenance("sm_90, compiled here", "torch", "triton")
    rows = []
    for dtype in (torch.bfloat16, torch.float32):
        for recipe in ("mxfp4", "mxfp4+mbs", "mxfp4+of", "mxfp4+mbs+of", "mxfp4+mbs:search16"):
            rows.append(qdq(recipe, dtype))
        rows.append(stats("mxfp4", dtype, fast=dtype == torch.bfloat16))
        rows.append(stats("mxfp4:floor", dtype, fast=False))
    for row in rows:
        print(
            f"{row['op']:18s} {row['recipe']:20s} {row['dtype']:9s} {row['instructions']:6.1f} an element "
            f"(half rate {row['half_rate']:.1f}, float64 {row['float64']:.1f}, conversions {row['conversions']:.1f}), "
            f"{row['registers']} registers",
            flush=True,
        )
    write_rows(args.out, [row | source for row in rows])


if __name__ == "__main__":
    main()

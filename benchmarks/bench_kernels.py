"""Every kernel against the device's own copy (or read) bandwidth, and against other libraries, in one run.

    python benchmarks/bench_kernels.py --device cuda        an H200: 8192 × 16384, bf16 256 MiB, float32 512 MiB
    python benchmarks/bench_kernels.py --device cpu         4096 × 4096

Groups, each interleaved with a copy of the same tensor: qdq, stats (beside qdq), pack, inject and noise, and the peers
beside our plain mxfp4.
The kernels are called through the public operations (`mxrl.fake_quantize(…, backend=…)`, …); `noisy_qdq`, which
rollouts call, is internal. Before it is timed, a kernel's first rows are compared with the reference (`equal`), and a
peer's with the plain mxfp4 (`differs`: the share of elements; another rule, or other ties).
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from measure import (
    Operation,
    Row,
    absent,
    dtype_name,
    line,
    measure,
    one_line,
    origin,
    pick_device,
    rotated,
    time_ms,
    write_rows,
)
from peers import PEERS
from targets import targets
from torch import Tensor

import mxrl
from mxrl import Recipe
from mxrl.corrections import noise_key

QDQ = (
    "mxfp4", "mxfp4+mbs", "mxfp4+of", "mxfp4+mbs+of", "mxfp4+mbs:search16", "mxfp4+mbs:search256", "mxfp4+mbs:joint",
    "mxfp4:floor", "mxfp4:even", "mxfp4:ideal", "mxfp4:e8m3", "nvfp4", "nvfp4:4over6", "mxfp8",
)  # fmt: skip
PACK = ("mxfp4", "mxfp4+mbs", "mxfp4+mbs+of", "nvfp4")
STATS = ("mxfp4", "mxfp4+mbs", "mxfp4+of", "mxfp4+mbs+of", "nvfp4")
REFERENCE = ("mxfp4", "mxfp4+mbs+of")  # in plain torch, one row each
ROWS_CHECKED = 16
SIGMA = 1e-3


@dataclass
class Case:
    """One dtype's tensors: x[i] in turn i (they rotate where they are small), `out` to write to."""

    xs: list[Tensor]
    out: Tensor
    backend: str
    compile_peers: bool
    reference: bool

    def x(self, turn: int) -> Tensor:
        return self.xs[turn % len(self.xs)]

    @property
    def bytes(self) -> int:
        return self.out.nbytes

    @property
    def dtype(self) -> torch.dtype:
        return self.out.dtype

    @property
    def device(self) -> torch.device:
        return self.out.device


def copy(case: Case) -> Operation:
    return Operation("copy", lambda i: case.out.copy_(case.x(i)), bytes=2 * case.bytes)


def read(case: Case) -> Operation:
    """The fastest of torch's reductions over the same bytes: what reading alone can reach."""
    candidates: dict[str, Callable[[Tensor], Tensor]] = {
        "sum of the bytes as float32": lambda x: x.view(torch.float32).sum(),
        "amax": lambda x: x.amax(),
        "amax of the bytes as float32": lambda x: x.view(torch.float32).amax(),
    }
    times = {
        name: min(time_ms(lambda f=f: f(case.x(0)), case.device) for _ in range(6)) for name, f in candidates.items()
    }
    name = min(times, key=times.__getitem__)
    return Operation("read", lambda i: candidates[name](case.x(i)), bytes=case.bytes, extra={"as": name})


def qdq(case: Case) -> Iterator[Operation]:
    for recipe in QDQ:
        passes = 3 if recipe.startswith("nvfp4") else 2  # nvfp4's tensor scale asks for a reading of its own
        yield Operation(
            "qdq", lambda i, r=recipe: mxrl.fake_quantize(case.x(i), r, out=case.out, backend=case.backend),
            recipe, case.backend, passes * case.bytes, extra=_equal(case, recipe),
        )  # fmt: skip
    yield Operation(
        "qdq, new output", lambda i: mxrl.fake_quantize(case.x(i), "mxfp4", backend=case.backend),
        "mxfp4", case.backend, 2 * case.bytes,
    )  # fmt: skip
    for recipe in REFERENCE:
        yield Operation(
            "qdq, first axis",
            lambda i, r=recipe: mxrl.fake_quantize(case.x(i), r, dim=0, out=case.out, backend=case.backend),
            recipe, case.backend, 2 * case.bytes, extra=_equal(case, recipe, dim=0),
        )  # fmt: skip
    yield from _by_reference(
        case, "qdq", REFERENCE, lambda i, r: mxrl.fake_quantize(case.x(i), r, out=case.out, backend="reference"), 2
    )


def peers(case: Case) -> Iterator[Operation]:
    plain = _plain(case)
    yield plain
    try:
        plain.run(0)
    except Exception as error:  # its row says why; the peers are measured all the same
        plain.missing = one_line(error)
    for name, factory in PEERS.items():
        if "compile" in name and not case.compile_peers:
            yield absent(name, "left out by --no-compile", recipe="mxfp4", backend="peer")
            continue
        try:
            quantize_dequantize = factory()
            values = quantize_dequantize(case.x(0))
            differs = {} if plain.missing else {"differs": (values != case.out).float().mean().item()}
        except Exception as error:  # not installed, or it refuses this tensor: a row that says so
            yield absent(name, error, recipe="mxfp4", backend="peer")
            continue
        yield Operation(
            name,
            lambda i, f=quantize_dequantize: f(case.x(i)),
            "mxfp4",
            "peer",
            2 * case.bytes,
            extra=differs,
        )


def _plain(case: Case) -> Operation:
    """What the others of a group stand beside."""
    return Operation(
        "qdq", lambda i: mxrl.fake_quantize(case.x(i), "mxfp4", out=case.out, backend=case.backend),
        "mxfp4", case.backend, 2 * case.bytes,
    )  # fmt: skip


def _equal(case: Case, recipe: str, dim: int = -1) -> Row:
    """Whether the kernel gives what the CPU's reference gives, bit for bit, on a slice of x."""
    rows = case.x(0)[:ROWS_CHECKED] if dim else case.x(0)[:, :ROWS_CHECKED]
    try:
        ours = mxrl.fake_quantize(rows, recipe, dim=dim, backend=case.backend)
    except Exception:  # the row says why when it is measured
        return {}
    theirs = mxrl.fake_quantize(rows.cpu(), recipe, dim=dim, backend="reference")
    integer = torch.int16 if ours.element_size() == 2 else torch.int32
    return {"equal": torch.equal(ours.cpu().contiguous().view(integer), theirs.contiguous().view(integer))}


def _by_reference(
    case: Case,
    op: str,
    recipes: tuple[str, ...],
    run: Callable[[int, str], object],
    passes: float,
    against: str = "copy",
) -> Iterator[Operation]:
    if case.reference:
        for r in recipes:
            yield Operation(op, lambda i, r=r: run(i, r), r, "reference", int(passes * case.bytes), against)


def pack(case: Case) -> Iterator[Operation]:
    for recipe in PACK:
        try:
            packed = mxrl.quantize(case.x(0), recipe, backend=case.backend)
        except Exception as error:
            yield absent("pack", error, recipe=recipe, backend=case.backend)
            continue
        reads = 2 if recipe.startswith("nvfp4") else 1
        yield Operation(
            "pack", lambda i, r=recipe: mxrl.quantize(case.x(i), r, backend=case.backend),
            recipe, case.backend, reads * case.bytes + packed.nbytes,
        )  # fmt: skip
        yield Operation(
            "unpack", lambda i, p=packed: p.dequantize(backend=case.backend),
            recipe, case.backend, case.bytes + packed.nbytes,
        )  # fmt: skip
    yield from _by_reference(
        case, "pack", REFERENCE, lambda i, r: mxrl.quantize(case.x(i), r, backend="reference"), 1.27
    )


def stats(case: Case) -> Iterator[Operation]:
    yield _plain(case)
    for recipe in STATS:
        yield Operation(
            "stats", lambda i, r=recipe: mxrl.error_stats(case.x(i), r, backend=case.backend),
            recipe, case.backend, (2 if recipe.startswith("nvfp4") else 1) * case.bytes, "read",
        )  # fmt: skip
    if case.backend == "triton":  # without the copy of the sums to the host, which the next call has to wait for
        launch, recipe = importlib.import_module("mxrl.ops.stats_triton").launch, Recipe.parse("mxfp4")
        yield Operation(
            "stats, sums left on the GPU", lambda i: launch(case.x(i)[None], recipe, None, None),
            "mxfp4", case.backend, case.bytes, "read",
        )  # fmt: skip
    yield from _by_reference(
        case, "stats", REFERENCE, lambda i, r: mxrl.error_stats(case.x(i), r, backend="reference"), 1, "read"
    )


def inject(case: Case) -> Iterator[Operation]:
    for recipe in ("mxfp4", "mxfp4+mbs+of"):
        yield Operation(
            "inject", lambda i, r=recipe: mxrl.inject(case.x(i), ("scale",), recipe=r, backend=case.backend),
            recipe, case.backend, 2 * case.bytes,
        )  # fmt: skip
    key = noise_key(0, 0, "model.layers.0.mlp.up_proj.weight")
    module = importlib.import_module("mxrl.ops.qdq" + ("" if case.backend == "reference" else f"_{case.backend}"))
    master, target = case.x(0)[None], case.out[None]  # [1, B, K]
    for recipe in map(Recipe.parse, ("mxfp4", "mxfp4+mbs+of")):
        yield Operation(
            "noisy qdq", lambda i, r=recipe: module.noisy_qdq(master, r, target, key, SIGMA, None),
            str(recipe), case.backend, 2 * case.bytes,
        )  # fmt: skip
    if case.dtype == torch.float32:
        narrow = torch.empty_like(target, dtype=torch.bfloat16)
        yield Operation(
            "noisy qdq to bf16", lambda i: module.noisy_qdq(master, Recipe.parse("mxfp4"), narrow, key, SIGMA, None),
            "mxfp4", case.backend, case.bytes + case.bytes // 2,
        )  # fmt: skip


GROUPS = {"qdq": qdq, "stats": stats, "pack": pack, "inject": inject, "peers": peers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", choices=("triton", "cpu", "reference"), help="default: the device's own")
    parser.add_argument(
        "--size", type=int, nargs="+", help="rows [columns]; default 8192 16384 on CUDA, 4096 on the CPU"
    )
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--groups", nargs="+", choices=tuple(GROUPS), default=list(GROUPS))
    parser.add_argument("--rounds", type=int, help="default 40 on CUDA, 21 on the CPU")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-compile", action="store_true", help="leave out the peers under torch.compile")
    parser.add_argument("--no-reference", action="store_true", help="leave out our own reference in plain torch")
    parser.add_argument("--out", type=Path, help="default benchmarks/results/kernels_DEVICE.jsonl")
    args = parser.parse_args()
    device = pick_device(args.device)
    size = args.size or ([8192, 16384] if device.type == "cuda" else [4096])
    rows, columns = size[0], size[-1]
    out = args.out or Path(__file__).parent / "results" / f"kernels_{device.type}.jsonl"
    rounds = args.rounds or (40 if device.type == "cuda" else 21)
    source = origin(device, args.seed)
    backend = args.backend or {"cuda": "triton", "cpu": "cpu"}[device.type]
    cases: list[Case] = []
    for dtype in (getattr(torch, name) for name in args.dtypes):
        generator = torch.Generator(device).manual_seed(args.seed)

        def make(i: int, dtype: torch.dtype = dtype, generator: torch.Generator = generator) -> Tensor:
            return (torch.randn(rows, columns, device=device, generator=generator) * 0.02).to(dtype)

        xs = rotated(make, rows * columns * dtype.itemsize, device)
        cases.append(Case(xs, torch.empty_like(xs[0]), backend, not args.no_compile, not args.no_reference))
    results: list[Row] = []
    for group in args.groups:  # the peers last: what they cost can't keep ours from being measured
        for case in cases:
            print(f"{group}, {dtype_name(case.dtype)} {rows} × {columns}, {source['device']}", flush=True)
            operations = [copy(case), read(case), *GROUPS[group](case)]
            common = {"benchmark": "kernels", "group": group, "dtype": dtype_name(case.dtype), "shape": [rows, columns]}
            common |= {"tensor_bytes": case.bytes} | source
            limit = 4.0 if device.type == "cuda" else 100.0
            results += measure(operations, device, rounds=rounds, slow_ms=limit, common=common)
            write_rows(out, results)  # after each group: what is measured stays, whatever comes next
    print("\n".join(targets(results, measured=True)))
    wrong = [row for row in results if row.get("equal") is False]
    missing = [row for row in results if "missing" in row]
    for row in [*wrong, *missing]:
        print("NOTE " + ("not equal to the reference: " if row in wrong else "") + line(row))
    sys.exit(1 if wrong or any(row["backend"] != "peer" for row in missing) else 0)  # a missing peer is no failure


if __name__ == "__main__":
    main()

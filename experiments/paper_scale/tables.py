"""The figures of README.md: printed, or written between its marks.

    python experiments/paper_scale/tables.py            print
    python experiments/paper_scale/tables.py --write    replace the parts between <!-- NAME --> and <!-- /NAME -->

From the YAML files, models/*/config.json, benchmarks/results/ranks_cuda.jsonl and results/check.jsonl (check.py).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from estimate import CARDS, COUNTS, HERE, HOST, USABLE, Shape, Speed, breakdown, host, table

from mxrl.report.files import write_atomically
from mxrl.report.markdown import between
from mxrl.rl.config import TrainConfig

LENGTHS: dict[str, Any] = {"prompt": 160, "tokens": 280}  # tokens of the longest prompt (chosen); a mean answer (paper)
MODELS = {"dense": "qwen2.5-3b", "moe": "qwen3-30b-a3b"}


def parts(check: Path = HERE / "results" / "check.jsonl") -> Iterator[tuple[str, str]]:
    """(name of a mark, its Markdown)."""
    shapes = {}
    for kind, name in MODELS.items():
        config = TrainConfig.from_options(HERE / f"{name}.yaml")
        shape = shapes[name] = Shape.of(HERE / "models" / name, config.recipe)
        speed = Speed.measured(model=kind)
        yield f"{kind} table", table(shape, config, speed, **LENGTHS)
        yield f"{kind} parts", breakdown(shape, config, HOST, 141, speed, **LENGTHS)
    yield "counts", counts(shapes)
    yield "host", hosts(shapes)
    yield "speed", speeds()
    if not check.is_file():
        sys.exit(f"tables.py: {check} is missing; python experiments/paper_scale/check.py makes it")
    rows = [json.loads(line) for line in check.read_text().splitlines()]
    yield "peaks", peaks(rows)
    yield "activations", activations(rows)
    yield "seconds", took(rows)
    yield "source", source(rows[0])


def counts(shapes: dict[str, Shape]) -> str:
    lines = [
        "| model | parameters | quantized | multiply a token | keys and values a token, bytes |",
        "|---|---|---|---|---|",
    ]
    for name, s in shapes.items():
        lines.append(f"| {name} | {s.parameters:,} | {s.quantized:,} | {s.used:,} | {s.kv_bytes:,} |")
    return "\n".join(lines)


def hosts(shapes: dict[str, Shape]) -> str:
    lines = [
        "| model | GPUs of a host | host memory while loading, GB | first process at a checkpoint, GB |",
        "|---|---|---|---|",
    ]
    for name, shape in shapes.items():
        for gpus in (n for n in COUNTS if n <= HOST):
            found = {k: v / 1e9 for k, v in host(shape, gpus).items()}
            lines.append(f"| {name} | {gpus} | {found['loading']:.0f} | {found['checkpoint']:.0f} |")
    return "\n".join(lines)


def speeds() -> str:
    lines = [
        "| from the steps of | update, TFLOP/s | score, TFLOP/s | decoding, TFLOP/s | latency of a layer, µs |",
        "|---|---|---|---|---|",
    ]
    for kind in MODELS:
        s = Speed.measured(model=kind)
        flops = " | ".join(f"{x / 1e12:.0f}" for x in (s.train, s.score, s.decode))
        lines.append(f"| bench_ranks.py {kind} | {flops} | {s.latency * 1e6:.0f} |")
    return "\n".join(lines)


def peaks(rows: list[dict[str, Any]]) -> str:
    lines = ["| run | recipe | GPUs | measured, GB | estimated, GB | ratio |", "|---|---|---|---|---|---|"]
    for r in rows:
        if r["check"] in ("peak", "run"):
            a, b = r["measured"] / 1e9, r["estimated"] / 1e9
            lines.append(f"| {r['model']} | {r['recipe']} | {r['gpus']} | {a:.2f} | {b:.2f} | {b / a:.3f} |")
    return "\n".join(lines)


def activations(rows: list[dict[str, Any]]) -> str:
    lines = ["| shrunk copy of | recipe | rows | measured | estimated | ratio |", "|---|---|---|---|---|---|"]
    for r in rows:
        if r["check"] == "activations":
            rows_are = "padded" if r["padded"] else "equal"
            ratio = r["estimated"] / r["measured"]
            cells = f"{r['measured']:,.0f} | {r['estimated']:,.0f} | {ratio:.3f}"
            lines.append(f"| {r['model']} | {r['recipe']} | {rows_are} | {cells} |")
    return "\n".join(lines)


def took(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| step of | GPUs | phase | speeds from | measured, s | estimated, s | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        if r["check"] == "seconds":
            cells = f"{r['measured']:.2f} | {r['estimated']:.2f} | {r['estimated'] / r['measured']:.2f}"
            lines.append(f"| {r['model']} | {r['gpus']} | {r['phase']} | {r['speed']} | {cells} |")
    return "\n".join(lines)


def source(row: dict[str, Any]) -> str:
    versions = ", ".join(f"{k} {v}" for k, v in row["versions"].items())
    usable = ", ".join(f"{gb} GB: {room * USABLE / 1e9:.0f}" for gb, room in CARDS.items())
    return (
        f"Activations: {row['machine']} CPU, {versions}, commit {row['commit']}, seed 0. Bytes that an estimate may "
        f"fill (in 10⁹): {usable}. Prompt {LENGTHS['prompt']} tokens, answers {LENGTHS['tokens']}, at most 1024."
    )


def written(page: str, made: dict[str, str]) -> str:
    """`page` with each marked part replaced. Raises ValueError for a part that has no marks."""
    for name, text in made.items():
        page = between(page, name, text)
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="into README.md")
    args = parser.parse_args()
    made = dict(parts())
    if args.write:
        page = HERE / "README.md"
        write_atomically(page, written(page.read_text(), made))
    else:
        print("\n\n".join(f"{name}\n{text}" for name, text in made.items()))


if __name__ == "__main__":
    main()

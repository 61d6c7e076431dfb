"""The figures of README.md, from results/*.jsonl.

    python benchmarks/tables.py [FILE …]      prints them
    python benchmarks/tables.py --write       puts them on the page, between its markers

First the targets, each met or missed by a factor; then a Markdown table for each benchmark and device, with what
couldn't be measured under it. Nothing on the page is typed by hand.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import median

from measure import Row, read_rows
from targets import mean_seconds, median_ms, same_run, speed_over, targets, times_of, tokens_per_second

from mxrl.report.files import write_atomically

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parent / "README.md"
BEGIN, END = "<!-- tables.py --write -->", "<!-- end -->"


def _unique(values: Iterable[object]) -> list:
    return list(dict.fromkeys(values))


def _from(rows: list[Row]) -> str:
    """One line of where these rows come from."""
    first = rows[0]
    versions = ", ".join(f"{k} {v}" for k, v in first["versions"].items())
    dates = " to ".join(_unique((min(r["created"] for r in rows)[:10], max(r["created"] for r in rows)[:10])))
    commits = ", ".join(str(c)[:12] for c in _unique(r["commit"] for r in rows))
    seed = f"seed {first['seed']}; " if "seed" in first else ""
    return f"{first['device']}; {versions}; commit {commits}; {seed}{dates}."


def _ms(row: Row) -> str:
    ms = row["ms"]
    digits = 3 if ms["p50"] < 10 else 1
    return f"{ms['p50']:.{digits}f} [{ms['p20']:.{digits}f}, {ms['p80']:.{digits}f}]"


def kernels(rows: list[Row]) -> Iterator[str]:
    """Per group: a row for each operation, columns for each dtype: ms, and the share of a bandwidth or × copy."""
    for group in _unique(r["group"] for r in rows):
        own = [r for r in rows if r["group"] == group]
        for shape in _unique(tuple(r["shape"]) for r in own):
            chosen = [r for r in own if tuple(r["shape"]) == shape]
            dtypes = _unique(r["dtype"] for r in chosen)
            yield f"\n**{group}**, {' × '.join(map(str, shape))}\n"
            unit = "ms" if chosen[0]["accelerator"] else "× copy"  # a CPU's own speed is nobody's but its
            heads = [f"{d}: {unit} p50 [p20, p80] | of bandwidth | × copy" for d in dtypes]
            yield "| operation | recipe | by | " + " | ".join(heads) + " |"
            yield "|---|---|---|" + "---|---|---|" * len(dtypes)
            for name in _unique(map(_named, chosen)):
                cells = []
                for dtype in dtypes:
                    found = [r for r in chosen if _named(r) == name and r["dtype"] == dtype]
                    cells.append(_kernel_cells(found[-1], rows) if found else " | | ")
                yield f"| {name[0]} | {name[1]} | {name[2]} | " + " | ".join(cells) + " |"
            differs = {r["op"]: r["differs"] for r in chosen if "differs" in r}
            if differs:
                told = "; ".join(f"{op} {share:.2%}" for op, share in differs.items())
                yield f"\nElements that differ from ours ({dtypes[-1]}): {told}."


def _named(row: Row) -> tuple[str, str, str]:
    return row["op"], row["recipe"], row["backend"]


def _kernel_cells(row: Row, rows: list[Row]) -> str:
    if "ms" not in row:
        return "not measured | | "
    copy = times_of("copy")(row, same_run(row, rows))
    share = f"{row['fraction']:.1%} of {row['against']}" if "fraction" in row else ""
    unequal = " (NOT EQUAL)" if row.get("equal") is False else ""
    took = _ms(row) if row["accelerator"] else _ratios(row, copy)
    return f"{took}{unequal} | {share} | " + (f"{copy:.2f}" if copy else "")


def _ratios(row: Row, p50: float | None) -> str:
    """p50 [p20, p80] as ratios to what `p50` is one to."""
    if not p50:
        return ""
    low, high = (row["ms"][p] / median_ms(row) * p50 for p in ("p20", "p80"))
    return f"{p50:.2f} [{low:.2f}, {high:.2f}]"


def train_step(rows: list[Row]) -> Iterator[str]:
    for precision in _unique(r["precision"] for r in rows):
        own = [r for r in rows if r["precision"] == precision]
        yield f"\n**{precision}**, {own[0]['workload']}\n"
        unit = "ms" if own[0]["accelerator"] else "× bf16"
        yield f"| recipe | by | {unit} p50 [p20, p80] | × bf16 | peak in a step, MiB | saved for backward, MiB |"
        yield "|---|---|---|---|---|---|"
        for row in own:
            if "ms" not in row:
                yield f"| {row['recipe']} | {row['backend']} | not measured | | | |"
                continue
            times = times_of("train step", recipe="bf16")(row, same_run(row, rows))
            sizes = [f"{row[k] / 2**20:,.0f}" if row.get(k) else "" for k in ("peak_bytes", "saved_bytes")]
            took = _ms(row) if row["accelerator"] else _ratios(row, times)
            yield f"| {row['recipe']} | {row['backend']} | {took} | {times or 0:.3f} | {sizes[0]} | {sizes[1]} |"


def rollout(rows: list[Row]) -> Iterator[str]:
    for case in _unique(r["case"] for r in rows):
        own = [r for r in rows if r["case"] == case]
        yield f"\n**{case}**, {own[0]['workload']}\n"
        yield "| engine | recipe | by | tokens/s | s p50 [p20, p80] | × generate, static cache | share of our bf16 |"
        yield "|---|---|---|---|---|---|---|"
        for row in own:
            if "ms" not in row:
                yield f"| {row['engine']} | {row['recipe']} | {row['backend']} | not measured | | | |"
                continue
            run = same_run(row, rows)
            ratios = [speed_over(engine=e, recipe="bf16")(row, run) for e in ("hf static", "slots")]
            shown = " | ".join("" if r is None else f"{r:.2f}" for r in ratios)
            seconds = ", ".join(f"{row['ms'][p] / 1e3:.2f}" for p in ("p20", "p80"))
            speed, took = f"{row['tokens/s']:,.0f}", f"{median_ms(row) / 1e3:.2f} [{seconds}]"
            if not row["accelerator"]:
                speed = took = "–"
            yield f"| {row['engine']} | {row['recipe']} | {row['backend']} | {speed} | {took} | {shown} |"


def passes(rows: list[Row]) -> Iterator[str]:
    for workload in _unique(r["workload"] for r in rows):
        yield f"\n**{workload}**\n"
        yield "| recipe | passes | steps | computed tokens a real one | scoring, × padded | update, × padded |"
        yield "|---|---|---|---|---|---|"
        for recipe in _unique(r["recipe"] for r in rows if r["workload"] == workload):
            own = [r for r in rows if (r["workload"], r["recipe"]) == (workload, recipe)]
            padded = [r for r in own if r["op"] == "padded"]
            for op in _unique(r["op"] for r in own):
                these = [r for r in own if r["op"] == op]
                waste = sum(r["computed"] for r in these) / sum(r["tokens"] for r in these)
                shares = [_per_token(these, name) / _per_token(padded, name) for name in ("score", "update")]
                yield f"| {recipe} | {op} | {len(these)} | {waste:.2f} | {shares[0]:.2f} | {shares[1]:.2f} |"


def _per_token(rows: list[Row], phase: str) -> float:
    """Seconds of a phase a token that counts, median over steps."""
    return median(r["seconds"][phase] / r["tokens"] for r in rows)


def counters(rows: list[Row]) -> Iterator[str]:
    yield "\nInstructions and DRAM bytes are an element's.\n"
    yield "| operation | recipe | dtype | instructions | B read | B written | a cycle (of 4) | of DRAM | registers |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        counts = f"{row['instructions']:.1f} | {row['read']:.2f} | {row['written']:.2f} | {row['per_cycle']:.2f}"
        names = f"{row['op']} | {row['recipe']} | {row['dtype']}"
        yield f"| {names} | {counts} | {row['dram']:.0%} | {row['registers']:.0f} |"


# An H200: SMs · clock in GHz; what an SM starts in a cycle; the copy's and the fastest read's bandwidth in bytes a ns
H200_CYCLES, COPY, READ = 132 * 1.98, 4150, {2: 3460, 4: 3920}  # the read: by an element's bytes
ISSUE = {"instructions": 128, "half_rate": 64, "float64": 64, "conversions": 16}


def instructions(rows: list[Row]) -> Iterator[str]:
    """Counted by instructions.py; what arithmetic alone allows: cycles that bandwidth leaves over cycles needed."""
    yield "\nInstructions an element, on the shortest way; the share of an H200's bandwidth that they alone allow.\n"
    yield "| operation | recipe | dtype | instructions | half rate | float64 | conversions | registers | allows |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        size = 2 if row["dtype"] == "bfloat16" else 4
        left = size / READ[size] if row["op"].startswith("stats") else 2 * size / COPY
        needed = max(row[kind] / rate for kind, rate in ISSUE.items())
        counts = " | ".join(f"{row[kind]:.1f}" for kind in ISSUE)
        allows = min(1, left * H200_CYCLES / needed)
        yield f"| {row['op']} | {row['recipe']} | {row['dtype']} | {counts} | {row['registers']} | {allows:.0%} |"


def ranks(rows: list[Row]) -> Iterator[str]:
    """For each model and recipe: seconds of a step's phases on one GPU and on two; then decoding alone."""
    for model, recipe in _unique((r["model"], r["recipe"]) for r in rows if r["op"] == "step"):
        own = [r for r in rows if (r["model"], r["recipe"], r["op"]) == (model, recipe, "step")]
        first = own[0]
        yield (
            f"\n**{model}, {recipe}**: {first['parameters'] / 1e6:,.0f} M parameters, a step of {first['sequences']} "
            f"sequences of {first['prompt']} + {first['new']} tokens, {first['micro']} to a micro-batch\n"
        )
        counts = _unique(r["processes"] for r in own)
        yield "| phase | " + " | ".join(f"{n} GPU{'s' * (n > 1)}, s" for n in counts) + " | × |"
        yield "|---|" + "---|" * (len(counts) + 1)
        for phase in ("sync", "rollout", "score", "update", "step"):
            means = [mean_seconds(own, phase, n) for n in counts]
            times = f"{means[0] / means[-1]:.2f}" if len(means) > 1 and phase != "sync" else ""
            yield f"| {phase} | " + " | ".join(f"{m:.2f}" for m in means) + f" | {times} |"
        yield from (
            f"\n{n} GPU{'s' * (n > 1)}: "
            f"{tokens_per_second(own, n, 'rollout', 'rollout_tokens'):,.0f} tokens/s decoded, "
            f"{tokens_per_second(own, n, 'update', 'trained_tokens'):,.0f} trained on in the update; peak "
            f"{max(r['peak_bytes'] for r in own if r['processes'] == n) / 2**30:.0f} GiB; quantized weights "
            f"{own[0]['digest'][:12] if all(r['digest'] == own[0]['digest'] for r in own) else 'DIFFER'}; the first "
            f"gradient's norm {next(r['first_grad_norm'] for r in own if r['processes'] == n):.6f}"
            for n in counts
        )
    decoded = [r for r in rows if r["op"] == "decode"]
    yield "\n**Decoding alone**, weights already there\n"
    yield "| model | recipe | sequences | at a time, each GPU | 1 GPU, tokens/s | 2 GPUs, tokens/s | × |"
    yield "|---|---|---|---|---|---|---|"
    for key in _unique((r["model"], r["recipe"], r["sequences"], r["slots"]) for r in decoded):
        found = {r["processes"]: r for r in decoded if (r["model"], r["recipe"], r["sequences"], r["slots"]) == key}
        speeds = [found[n]["rollout_tokens"] / found[n]["seconds"]["rollout"] if n in found else None for n in (1, 2)]
        shown = " | ".join("not measured" if v is None else f"{v:,.0f}" for v in speeds)
        times = f"{speeds[1] / speeds[0]:.2f}" if speeds[0] and speeds[1] else ""
        yield f"| {key[0]} | {key[1]} | {key[2]} | {key[3] or 'all'} | {shown} | {times} |"


def scan(rows: list[Row]) -> Iterator[str]:
    """Throughput as a share of what binds; on GPUs the speed-up over one."""
    first = rows[0]
    size = f"{first['tensors']} tensors, {first['shape'][0] / 1e9:.1f} G elements"
    yield f"\n{size}, columns {', '.join(first['columns'])}\n"
    gpu = any("gpus" in r for r in rows)
    heads = ["pass", *(("GPUs", "GB/s") if gpu else ("× the read",)), "of what binds"]
    heads += ["× one GPU", "start-up, s"] if gpu else []
    yield f"| {' | '.join(heads)} |"
    yield "|" + "---|" * len(heads)
    reading = next(r["GB/s"] for r in rows if r["op"] == "read")
    tasks = [r for r in rows if "tasks" in r and "ms" in r]
    for row in rows:
        if "ms" not in row or row in tasks:
            continue
        share = "" if row["op"] in ("read", "arithmetic") else f"{row['fraction']:.0%} of {row['against']}"
        speed = f"{row['gpus']} | {row['GB/s']:.2f}" if gpu else f"{row['GB/s'] / reading:.3f}"
        times = [f"{row['speedup']:.2f}" if "speedup" in row else ""]
        times += [f"{row['startup_s']:.1f}" if "startup_s" in row else ""]
        yield f"| {' | '.join([row['op'], speed, share, *(times if gpu else [])])} |"
    if tasks:
        megabytes = tasks[0]["bytes"] / tasks[0]["tasks"] / 1e6
        yield f"\nOne tensor of {megabytes:.1f} MB, {tasks[0]['task_columns']} recipes:\n"
        yield "| | ms |\n|---|---|"
        yield from (f"| {r['op'].removeprefix('task, ')} | {r['ms']['p50'] / r['tasks']:.2f} |" for r in tasks)


def analyze(rows: list[Row]) -> Iterator[str]:
    """The whole command, and how its time is divided."""
    same = all(r["same_rows"] for r in rows)
    yield f"\nSeconds of the whole process; tensors.jsonl {'is the same in every run' if same else 'DIFFERS'}.\n"
    heads = ["checkpoint", "GPUs", "seconds", "× one GPU", "import", "open", "to the first result", "scan", "sums"]
    heads += ["hash", "page", "the second GPU joins at"]
    yield f"| {' | '.join(heads)} |"
    yield "|" + "---|" * len(heads)
    for row in rows:
        ends = row["parts"]
        order = ("import", "open", "first", "scanned", "summed", "hashed", "written")
        took = [ends[b] - a for a, b in zip((0.0, *(ends[name] for name in order)), order, strict=False)]
        size = f"{row['bytes'] / 1e9:.0f} GB, {row['tensors']:,} tensors"
        joined = f"{ends['joined'][0]:.1f}" if "joined" in ends else ""
        cells = [size, str(row["gpus"]), f"{row['ms']['p50'] / 1e3:.1f}", f"{row['speedup']:.2f}"]
        yield f"| {' | '.join([*cells, *(f'{s:.1f}' for s in took), joined])} |"


PAGES = {
    "kernels": kernels,
    "instructions": instructions,
    "counters": counters,
    "train_step": train_step,
    "rollout": rollout,
    "passes": passes,
    "ranks": ranks,
    "scan": scan,
    "analyze": analyze,
}


def tables(rows: list[Row]) -> Iterator[str]:
    for benchmark, page in PAGES.items():
        of_benchmark = [r for r in rows if r["benchmark"] == benchmark]
        for device in _unique(r["device"] for r in of_benchmark):
            own = [r for r in of_benchmark if r["device"] == device]
            yield f"\n## {benchmark}, {device}\n"
            yield _from(own)
            yield from page(own)
            missing = _unique((_title(r), r["missing"]) for r in own if "missing" in r)
            if missing:
                yield "\nNot measured: " + "; ".join(f"{name} ({why})" for name, why in missing) + "."


def _title(row: Row) -> str:
    return " ".join(filter(None, (row["op"], row.get("engine", ""), row.get("recipe", ""), row["backend"])))


def write(page: Path, text: str) -> None:
    """Replace what stands between the page's two markers."""
    head, rest = page.read_text().split(BEGIN)
    _, tail = rest.split(END)
    write_atomically(page, f"{head}{BEGIN}\n\n{text}\n\n{END}{tail}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="*", help="default: every file in benchmarks/results")
    parser.add_argument("--write", action="store_true", help="into README.md, between its markers")
    args = parser.parse_args()
    rows = read_rows(*(args.files or sorted(RESULTS.glob("*.jsonl"))))
    text = "\n".join([*targets(rows), *tables(rows)])
    if args.write:
        write(PAGE, text)
    else:
        print(text)


if __name__ == "__main__":
    main()

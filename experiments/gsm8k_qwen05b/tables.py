"""Every figure of README.md, from results/*.jsonl alone.

    python experiments/gsm8k_qwen05b/tables.py            prints the blocks
    python experiments/gsm8k_qwen05b/tables.py --write    puts them between README.md's markers, and draws curves/*.png

What is compared with what, and what a difference decides: differences.py.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from differences import (
    SEEDS,
    Difference,
    Row,
    accuracy,
    by_recipe,
    common_step,
    difference,
    digits,
    recovered,
    span,
    verdict,
)

from mxrl.probes.intervals import paired
from mxrl.recipes import Recipe
from mxrl.report.files import write_atomically
from mxrl.report.markdown import between, figure, percent, points, table
from mxrl.report.run_rows import read_rows

HERE = Path(__file__).resolve().parent
PAGE, RESULTS, CURVES = HERE / "README.md", HERE / "results", HERE / "curves"
RANKS = HERE.parents[1] / "benchmarks" / "results" / "ranks_cuda.jsonl"
DRAWN = ("greedy_accuracy", "reward", "entropy", "gap_k3", "gap_pearson", "gap_truncated", "grad_norm", "length")
MEASURES = (  # column of steps.jsonl, heading, digits
    ("reward", "reward", 3), ("completions/mean_length", "tokens", 0), ("completions/clipped_ratio", "cut", 3),
    ("entropy", "entropy", 3), ("group/distinct_answers", "distinct of 8", 2), ("grad_norm", "gradient", 3),
    ("gap/k3", "KL (k3)", 5), ("gap/pearson", "Pearson", 4), ("gap/chi2", "χ²", 4),
    ("gap/truncated", "TIS cut, %", 3), ("gap/ess", "ESS", 4),
)  # fmt: skip
LAST = 10  # steps that a "last" column is the mean of
NOT_RUN = "*Not run yet.*\n"


# --- without training ------------------------------------------------------------------------------------------------


def same_texts(a: str, b: str) -> float:
    """Share of completions with the same hash (four digits each)."""
    pairs = [(a[i : i + 4], b[i : i + 4]) for i in range(0, len(a), 4)]
    return fmean(x == y for x, y in pairs)


def untrained(rows: Sequence[Row]) -> str:
    """A row a recipe, in untrained.py's order, against bf16 and plain MXFP4."""
    if not rows:
        return NOT_RUN
    by = {row["row"]: row for row in rows}
    bf16, plain = by.get("bf16"), by.get("mxfp4")
    body = []
    for name, row in by.items():
        cells = [f"`{name}`", percent(row["accuracy"])]
        for other in (bf16, plain):
            if other is None or other is row:
                cells.append("")
            else:
                found = paired(digits(row["right"]), digits(other["right"]))
                cells.append(span(Difference(found, "problems")))
        back = ""
        if bf16 and plain and row["recipe"] not in ("bf16", "mxfp4"):
            back = recovered(row["accuracy"], bf16["accuracy"], plain["accuracy"])
        same = percent(same_texts(row["texts"], bf16["texts"])) if bf16 and row is not bf16 else ""
        cells += [back, same, f"{row['mean_tokens']:.0f}", percent(row["truncated"]), percent(row["marked"]),
                  figure(row["entropy_per_token"], 3), f"{row['tokens_per_second'] / 1e3:.0f}"]  # fmt: skip
        body.append(cells)
    head = ["recipe", "greedy, %", "minus bf16, pp", "minus mxfp4, pp", "recovered, %", "texts as bf16's, %", "tokens",
            "cut, %", "with ####, %", "entropy", "1000 tokens/s"]  # fmt: skip
    return table(head, body)


# --- GRPO ------------------------------------------------------------------------------------------------------------


def sampled(runs: Sequence[Row], which: int) -> float | None:
    """Accuracy at temperature 1 of the first (0) or last (−1) evaluation, where that one sampled."""
    found = [s["accuracy"] for run in runs if run["evals"] and (s := run["evals"][which].get("sampled"))]
    return fmean(found) if found else None


def trained(runs: Sequence[Row]) -> str:
    """Accuracy before and after GRPO under each recipe, at the last step that all have in common."""
    if not runs:
        return NOT_RUN
    groups, step = by_recipe(runs), common_step(runs)
    bf16, plain = groups.get("bf16", []), groups.get("mxfp4", [])
    body = []
    for recipe, group in groups.items():
        ends = {f"{r['state']} at {r['last_step']} of {r['options']['steps']}" for r in group}
        cells = [f"`{recipe}`", ", ".join(str(r["options"]["seed"]) for r in group), ", ".join(sorted(ends)),
                 percent(accuracy(group, 0))]  # fmt: skip
        after = accuracy(group, step) if step else None
        cells += [percent(after), span(difference(group, group, step, 0) if step else None)]
        for other in (bf16, plain):
            cells.append(
                "" if other is group else span(difference(group, other, step, step) if step and other else None)
            )
        known = step and after is not None and recipe not in ("bf16", "mxfp4")
        ends_of = [accuracy(other, step) for other in (bf16, plain)] if known and step else [None, None]
        share = recovered(after, *ends_of) if after is not None and None not in ends_of else ""  # type: ignore[arg-type]
        cells += [share, f"{percent(sampled(group, 0))} → {percent(sampled(group, -1))}"]
        body.append(cells)
    head = ["recipe", "seeds", "ended", "before, %", f"step {step}, %" if step else "after, %", "gain, pp",
            "minus bf16, pp", "minus mxfp4, pp", "recovered, %", "sampled, %"]  # fmt: skip
    return table(head, body, text=3)


def accuracies(runs: Sequence[Row]) -> str:
    """Greedy accuracy of every run at every evaluation."""
    if not runs:
        return NOT_RUN
    steps = sorted({e["step"] for run in runs for e in run["evals"]})
    rows = []
    for recipe, group in by_recipe(runs).items():
        for run in group:
            found = {e["step"]: percent(e["accuracy"]) for e in run["evals"]}
            rows.append([f"`{recipe}`", str(run["options"]["seed"]), *(found.get(s, "—") for s in steps)])
    return table(["recipe", "seed", *(f"step {s}" for s in steps)], rows, text=2)


def means(rows: Sequence[Row], name: str) -> float | None:
    found = [row[name] for row in rows if row.get(name) is not None]
    return fmean(found) if found else None


def measures(runs: Sequence[Row], steps: Sequence[Row]) -> str:
    """What a run logged, mean of its first and of its last steps."""
    if not runs:
        return NOT_RUN
    body = []
    for recipe, group in by_recipe(runs).items():
        for run in group:
            own = [row for row in steps if row["run"] == run["run"]]
            few = min(LAST, len(own) // 2) or len(own)
            for label, part in ((f"1–{few}", own[:few]), (f"{len(own) - few + 1}–{len(own)}", own[-few:])):
                cells = [f"`{recipe}`", str(run["options"]["seed"]), label]
                for name, _, places in MEASURES:
                    value = means(part, name)
                    by = 100 if name == "gap/truncated" else 1
                    cells.append(figure(None if value is None else by * value, places))
                body.append(cells)
    return table(["recipe", "seed", "steps", *(title for _, title, _ in MEASURES)], body, text=3)


def speed(runs: Sequence[Row], steps: Sequence[Row]) -> str:
    """Where a step's time goes (medians), and what was decoded and trained on a second."""
    if not steps:
        return NOT_RUN
    phases = ("rollout", "sync", "score", "update", "step")
    body = []
    for recipe, group in by_recipe(runs).items():
        for run in group:
            every = [row for row in steps if row["run"] == run["run"]]
            own = every[1:]  # the first compiles
            if not own:
                continue
            seconds = {p: median(r.get(f"time/{p}") or 0.0 for r in own) for p in phases}
            measuring = [(r.get("time/eval") or 0.0) + (r.get("time/monitor") or 0.0) for r in own]
            seconds["step"] = median(r["time/step"] - m for r, m in zip(own, measuring, strict=True))
            decoded = median(r["rollout/tokens"] / r["time/rollout"] for r in own)
            real, padded = tokens_a_step(every, run["options"])
            body.append([f"`{recipe}`", str(run["options"]["seed"]), *(f"{seconds[p]:.1f}" for p in phases),
                         f"{100 * seconds['rollout'] / seconds['step']:.0f}", f"{decoded / 1e3:.0f}",
                         f"{real / 1e3:.0f}", f"{real / seconds['update'] / 1e3:.0f}",
                         f"{100 * (1 - real / padded):.0f}"])  # fmt: skip
    head = ["recipe", "seed", *(f"{p}, s" for p in phases), "rollout's share, %", "decoded, 1000 tokens/s",
            "1000 tokens a step", "update, 1000 tokens/s", "to the longest, % at least"]  # fmt: skip
    return table(head, body, text=2)


def tokens_a_step(rows: Sequence[Row], options: Row) -> tuple[float, float]:
    """(real tokens of prompts and completions, tokens of the padded batch at least), medians over steps.

    A batch is as wide as its longest prompt and its longest completion together. The longest prompt isn't logged, so
    the mean prompt stands for it.
    """
    sequences = options["prompts_per_step"] * options["samples_per_prompt"]
    counts = [0.0, *(row["num_tokens"] for row in rows)]
    real = [b - a for a, b in pairwise(counts)]
    padded = [
        tokens + sequences * (row["completions/max_length"] - row["completions/mean_length"])
        for tokens, row in zip(real, rows, strict=True)
    ]
    return median(real), median(padded)


# --- claims ----------------------------------------------------------------------------------------------------------


def claims(evals: Sequence[Row], runs: Sequence[Row]) -> str:
    """The paper's claims for a dense model on GSM8K (82.0 bf16, 60.1 MXFP4, 77.6 OF, 81.3 all), beside ours."""
    if not (evals or runs):
        return NOT_RUN
    groups, step = by_recipe(runs), common_step(runs)
    half, whole = str(Recipe.parse("mxfp4+mbs+of:0.5+aqn")), str(Recipe.parse("mxfp4+mbs+of:1+aqn"))
    body = []

    def after(text: str, a: str, b: str, paper: float) -> None:
        ours, theirs = groups.get(a, []), groups.get(b, [])
        found = difference(ours, theirs, step, step) if step else None
        seeds = len({r["options"]["seed"] for r in ours} & {r["options"]["seed"] for r in theirs})
        body.append([text, f"GRPO, `{a}` − `{b}`", points(paper), span(found), verdict(found, paper, seeds)])

    def before(text: str, a: str, b: str, paper: float | None, sign: int) -> None:
        by = {row["row"]: digits(row["right"]) for row in evals}
        found = Difference(paired(by[a], by[b]), "untrained") if a in by and b in by else None
        word = verdict(found, sign, SEEDS).replace(", on one seed", ", untrained")
        body.append([text, f"untrained, `{a}` − `{b}`", "—" if paper is None else points(paper), span(found), word])

    gain = difference(groups.get("bf16", []), groups.get("bf16", []), step, 0) if step else None
    seeds = len(groups.get("bf16", []))
    body.append(["GRPO improves the model", "`bf16`, after − before", "—", span(gain), verdict(gain, 1.0, seeds)])
    after("Plain MXFP4 loses accuracy", "mxfp4", "bf16", -0.219)
    before("", "mxfp4", "bf16", None, -1)
    after("All corrections help", half, "mxfp4", 0.212)
    before("", "mxfp4+mbs+of", "mxfp4", None, 1)
    after("… and end just below bf16 on a dense model", half, "bf16", -0.007)
    before("OF carries a dense model: alone it helps", "mxfp4+of", "mxfp4", None, 1)
    before("… more than MBS alone", "mxfp4+of", "mxfp4+mbs", None, 1)
    after("α = .5 beats α = 1", half, whole, 0.01)
    before("", "mxfp4+mbs+of", str(Recipe.parse("mxfp4+mbs+of:1")), None, 1)
    at_step = f" at step {step}" if step else ""
    return table(["claim", f"compared{at_step}", "paper, pp", "here, pp", ""], body, text=2)


# --- memory ----------------------------------------------------------------------------------------------------------


def memory() -> str:
    """Bytes a token of a pass's activations, from a measured step of the same model, and this sweep's peak."""
    import yaml

    rows = [json.loads(line) for line in RANKS.read_text().splitlines()]
    options = yaml.safe_load((HERE / "sweep.yaml").read_text())["defaults"]
    width = options["max_new_tokens"] + 190  # the longest of 128 prompts has 188 tokens in the mean, of all 256
    body = []
    for recipe in ("bf16", "mxfp4+mbs+of+aqn"):
        row = next(r for r in rows if r["op"] == "step" and r["model"] == "dense" and r["processes"] == 1
                   and r["recipe"] == recipe)  # fmt: skip
        fixed = 16 * row["parameters"]  # float32: weight, gradient, Adam's two moments
        tokens = row["micro"] * (row["prompt"] + row["new"])
        each = (row["peak_bytes"] - fixed) / tokens
        ours = fixed + each * options["micro_batch"] * width
        slots = options["prompts_per_step"] * options["samples_per_prompt"]
        cache = slots * width * 24 * 2 * 2 * 64 * 2  # layers, keys and values, heads, width of one, bytes
        body.append([f"`{recipe}`", f"{row['peak_bytes'] / 1e9:.1f}", f"{fixed / 1e9:.1f}", f"{each / 1e6:.2f}",
                     f"{ours / 1e9:.0f}", f"{cache / 1e9:.1f}", f"{(ours + cache) / 1e9:.0f}"])  # fmt: skip
    head = ["recipe", "measured peak, GB", "weights, gradient, Adam, GB", "the rest a token, MB",
            "here, training, GB", "the rollout's cache, GB", "both kept, GB"]  # fmt: skip
    return table(head, body)


# --- the page --------------------------------------------------------------------------------------------------------


def about(evals: Sequence[Row], runs: Sequence[Row]) -> str:
    """Devices, versions, commits and dates of what the results hold."""
    parts = []
    for what, infos in (("Without training", list(evals)), ("GRPO", [r["info"] for r in runs])):
        if infos:
            devices, commits = ({str(i[name]) for i in infos} for name in ("device", "commit"))
            versions = {", ".join(f"{n} {v}" for n, v in i["versions"].items()) for i in infos}
            dates = sorted({i["created"][:10] for i in infos})
            parts.append(f"{what}: {', '.join(sorted(devices))}; {'; '.join(sorted(versions))}; "
                         f"{', '.join(dates)}; commit {', '.join(sorted(c[:13] for c in commits))}.\n")  # fmt: skip
    return "\n".join(parts) or NOT_RUN


def curves(runs: Sequence[Row]) -> str:
    if not runs:
        return NOT_RUN
    return "".join(f"![{name.replace('_', ' ')}](curves/{name}.png)\n" for name in DRAWN)


def draw() -> list[Path]:
    """The curves of results/ as PNG, by what `mxrl report` draws with."""
    from mxrl.report import runs_png
    from mxrl.report.run_groups import compare
    from mxrl.report.runs import Run

    steps, runs = read_rows(RESULTS, "steps"), []
    for row in read_rows(RESULTS, "runs"):
        own: list[Mapping[str, Any]] = [step for step in steps if step["run"] == row["run"]]
        runs.append(Run(Path(row["run"]), row["options"], row["info"], own, row["evals"], row["state"], row["reason"]))
    if not runs:
        return []
    if not runs_png.available():
        raise SystemExit(runs_png.MISSING)
    CURVES.mkdir(exist_ok=True)
    (subject,) = compare(runs)["subjects"]
    drawn = []
    for curve in subject["curves"]:
        if curve["name"] in DRAWN:
            runs_png.draw(curve, CURVES / f"{curve['name']}.png")
            drawn.append(CURVES / f"{curve['name']}.png")
    return drawn


def blocks() -> dict[str, str]:
    """The page's generated parts, by the name of their markers."""
    evals, runs, steps = read_rows(RESULTS, "evals"), read_rows(RESULTS, "runs"), read_rows(RESULTS, "steps")
    hotter, cut = read_rows(RESULTS, "runs-lr1e-5"), read_rows(RESULTS, "runs-cut-short")
    return {
        "about": about(evals, runs),
        "claims": claims(evals, runs),
        "untrained": untrained(evals),
        "trained": trained(runs),
        "accuracies": accuracies(runs),
        "cut-short": accuracies(cut) + "\n" + about([], cut),
        "hotter": trained(hotter) + "\n" + accuracies(hotter) + "\n" + about([], hotter),
        "measures": measures(runs, steps),
        "curves": curves(runs),
        "speed": speed(runs, steps),
        "padded": speed(hotter, read_rows(RESULTS, "steps-lr1e-5")),
        "memory": memory(),
    }


def page(text: str) -> str:
    for name, content in blocks().items():
        text = between(text, name, content)
    return text


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        write_atomically(PAGE, page(PAGE.read_text(encoding="utf-8")))
        print(f"written: {PAGE}, {len(draw())} curves")
    elif sys.argv[1:]:
        sys.exit("usage: tables.py [--write]")
    else:
        print("\n".join(f"{name}:\n\n{content}" for name, content in blocks().items()))

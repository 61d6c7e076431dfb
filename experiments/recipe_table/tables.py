"""Every figure of README.md, and the table of the project's own README.md, from results/*.jsonl.gz alone.

    python experiments/recipe_table/tables.py            prints the blocks
    python experiments/recipe_table/tables.py --write    puts them between README.md's markers, and draws curves/*.png

What is compared with what, and what a difference decides: effects.py. The paper's claims: claims.py. The curves are
`mxrl report`'s.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import collect
import yaml
from claims import CLAIMS, ENTROPY, KINDS, LATER, ROWS, Claim, difference, minus, with_aqn
from effects import (
    BORNE_OUT,
    CONTRADICTED,
    NOT_RUN,
    SMALL,
    UNDECIDED,
    Effect,
    Measure,
    Results,
    Row,
    before,
    diverging,
    effect,
    gain,
    greedy,
    last,
    recovered,
    sampled,
    sampled_gain,
    verdict,
)

from mxrl.probes.intervals import Mean, mean
from mxrl.report import runs_png
from mxrl.report.files import write_atomically
from mxrl.report.markdown import between, table
from mxrl.report.run_groups import compare
from mxrl.report.runs import Run, step_seconds

HERE = Path(__file__).resolve().parent
PAGE, CURVES = HERE / "README.md", HERE / "curves"
FRONT = HERE.parents[1] / "README.md"  # has the overview alone
LOGS = {"gap_k3": "gap/k3", "gap_chi2": "gap/chi2", "grad_norm": "grad_norm"}  # drawn as log₁₀: a few steps tower
DRAWN = ("greedy_accuracy", "reward", "entropy", "gap_k3", "gap_pearson", "gap_chi2", "gap_truncated", "grad_norm")
MISSING = "*Not run yet.*\n"


def planned() -> dict[str, list[int]]:
    """The seeds of every row of sweep.yaml."""
    rows: dict[str, list[int]] = {}
    for run in yaml.safe_load((HERE / "sweep.yaml").read_text(encoding="utf-8"))["runs"]:
        rows.setdefault(run["name"], []).extend(run["seeds"])
    return rows


def load(folder: Path = collect.RESULTS) -> Results:
    return Results.of(collect.read(folder / "runs.jsonl.gz"), collect.read(folder / "steps.jsonl.gz"))


# --- cells -----------------------------------------------------------------------------------------------------------


def signed(value: float, digits: int = 1) -> str:
    """With a sign, a real minus, and no negative zero."""
    text = f"{value:+.{digits}f}"
    return f"{0:.{digits}f}" if float(text) == 0 else text.replace("-", "−")


def points(found: Mean | None) -> str:
    """`−3.1 [−5.0, −1.2]`, of shares in percentage points; without the interval where one value gives none."""
    return spanned(found, lambda v: signed(100 * v))


def percent(found: Mean | None) -> str:
    """`77.4 [76.0, 78.8]`."""
    return spanned(found, lambda v: f"{100 * v:.1f}".replace("-", "−"))


def spanned(found: Mean | None, form: Callable[[float], str]) -> str:
    if found is None:
        return "—"
    return form(found.value) + (f" [{form(found.low)}, {form(found.high)}]" if found.low == found.low else "")


FORMS: dict[str, Callable[[Mean | None], str]] = {
    "pp": points,
    "%": lambda found: spanned(found, lambda v: signed(100 * v, 2)),
    "nats": lambda found: spanned(found, lambda v: signed(v, 4)),
}


def plain(values: Sequence[float], digits: int) -> str:
    return f"{fmean(values):.{digits}f}".replace("-", "−") if values else "—"


def over(results: Results, a: str, b: str, kind: str, measure: Measure = greedy) -> Effect | None:
    return effect(results, difference(a, b, kind), measure)


# --- the tables ------------------------------------------------------------------------------------------------------


def overview(results: Results) -> str:
    """Accuracy after training of every row, and its difference to bf16, both kinds side by side."""
    body = []
    for row, shown in ROWS.items():
        cells = [shown]
        for kind in KINDS:
            found = over(results, row, "bf16", kind)
            cells += [percent(results.mean(f"{kind}/{row}", greedy)).split(" ")[0],
                      "" if row == "bf16" else points(found and found.seeds)]  # fmt: skip
        body.append(cells)
    head = ["", *(text for kind in KINDS.values() for text in (f"{kind}, %", "minus bf16, pp"))]
    return table(head, body)


def accuracy(results: Results, kind: str) -> str:
    """The table of one kind: a row a recipe, intervals over seeds."""
    plan, body = planned(), []
    for row, shown in ROWS.items():
        name = f"{kind}/{row}"
        runs = results.runs.get(name, {})
        done = sum(last(run) is not None for run in runs.values())
        first = results.mean(name, before)
        cells = [shown, f"{done} of {len(plan[name])}", percent(first).split(" ")[0],
                 percent(results.mean(name, greedy)), percent(results.mean(name, sampled))]  # fmt: skip
        for reference in ("bf16", "mxfp4"):
            found = over(results, row, reference, kind) if row != reference else None
            cells.append("" if row == reference else points(found and found.seeds))
        share = recovered(results, {name: 1.0}, greedy) if row not in ("bf16", "mxfp4") else None
        cells.append(
            "" if row in ("bf16", "mxfp4") else spanned(share and share.seeds, lambda v: signed(100 * v, 0).lstrip("+"))
        )
        body.append(cells)
    head = ["", "seeds done", "before, %", "after, %", "sampled, %", "minus bf16, pp", "minus MXFP4, pp",
            "of the loss given back, %"]  # fmt: skip
    return table(head, body)


def line(results: Results, claim: Claim) -> tuple[list[str], str]:
    """A claim's cells and its verdict. Beside greedy accuracy stands that of samples."""
    found = effect(results, claim.terms, claim.measure)
    word = verdict(found, claim.low, claim.high, small=SMALL if claim.unit == "pp" else 0.0)
    here = FORMS[claim.unit](found and found.seeds) + (f" {claim.unit}" if found and claim.unit != "pp" else "")
    paper = "—" if claim.paper is None else signed(100 * claim.paper)
    beside = ["", ""]
    if claim.unit == "pp":
        more = effect(results, claim.terms, sampled)
        beside = [points(found and found.problems), points(more and more.seeds)]
    return [claim.text, claim.compared, paper, here, str(found.seeds.n) if found else "—", *beside, f"**{word}**"], word


def divergence(results: Results, kind: str) -> tuple[list[str], str]:
    """The claim that AQN without MBS diverges."""
    runs = results.runs.get(f"{kind}/aqn", {})
    change = results.mean(f"{kind}/aqn", gain)
    word = diverging(runs, change)
    lost = sum(run["state"] in ("diverged", "collapsed") for run in runs.values())
    cells = [f"{KINDS[kind]}: AQN without MBS diverges", "+ AQN: runs lost; after − before", "all lost"]
    told = f"{lost} of {len(runs)} lost; {points(change)}" if runs else "—"
    more = results.mean(f"{kind}/aqn", sampled_gain)
    return [*cells, told, str(len(runs)) if runs else "—", "", points(more), f"**{word}**"], word


def shares(results: Results) -> tuple[list[str], str]:
    """OF's part on dense against its part on MoE, each as a share of its own loss."""
    found = recovered(results, {"dense/of": 1.0, "moe/of": -1.0}, greedy)
    word = verdict(found, 0.0, float("inf"), small=0.0)
    if found is None and {"dense/of", "moe/of"} <= set(results.runs):
        word = f"{UNDECIDED}: no clear loss to share"
    cells = [
        "OF gives back a larger share of the loss on dense than on MoE",
        "OF's share, dense − MoE, %",
        signed(100 * (17.5 / 21.9 - 1.5 / 2.7)),
    ]
    over_seeds, over_problems = (points(found and part) for part in (found or (None, None)))
    count = str(found.seeds.n) if found else "—"
    return [*cells, over_seeds, count, over_problems, "", f"**{word}**"], word


def judged(results: Results) -> list[tuple[list[str], str]]:
    """Every claim's line, in the page's order."""
    found = []
    for claim in CLAIMS:
        found.append(line(results, claim))
        if claim.text.startswith("OF helps dense"):
            found.append(shares(results))
    return [
        *found,
        *(divergence(results, kind) for kind in KINDS),
        *(line(results, claim) for claim in (*ENTROPY, *LATER)),
    ]


def claims(results: Results) -> str:
    if not results.runs:
        return MISSING
    found = judged(results)
    count = Counter(word.split(":")[0] for _, word in found)
    told = ", ".join(f"{count[word]} {word}" for word in (BORNE_OUT, CONTRADICTED, UNDECIDED, NOT_RUN) if count[word])
    head = ["claim", "compared", "paper, pp", "here, pp, over seeds", "seeds", "over problems", "sampled", ""]
    return f"Of {len(found)} lines: {told}.\n\n" + table(head, [cells for cells, _ in found], text=2)


def short_claims(results: Results) -> str:
    """A line a verdict: which claims have it."""
    by_word: dict[str, list[str]] = {}
    for cells, word in judged(results):
        by_word.setdefault(word.split(":")[0], []).append(f"{cells[0]} ({cells[3]})")
    text = ""
    for word in (BORNE_OUT, CONTRADICTED, UNDECIDED, NOT_RUN):
        if word in by_word:
            text += f"* **{word.capitalize()}:** {'; '.join(by_word[word])}.\n"
    return text


def findings(results: Results) -> str:
    """What stands out beside the claims, in figures."""

    def each(text: Callable[[str], str]) -> str:
        return "; ".join(f"{KINDS[kind]} {text(kind)}" for kind in KINDS)

    def seeds(a: str, b: str) -> Callable[[str], str]:
        return lambda kind: points((found := over(results, a, b, kind)) and found.seeds)

    def loss(kind: str) -> str:
        first, end = (over(results, "mxfp4", "bf16", kind, measure) for measure in (before, greedy))
        return f"{points(first and first.problems)} → {points(end and end.seeds)}"

    def aqn(kind: str) -> str:
        found = effect(results, with_aqn(kind), greedy)
        return points(found and found.seeds)

    def fall(kind: str) -> str:
        left = []
        for name in (name for name in ROWS if name != "qerl"):
            runs = results.runs.get(f"{kind}/{name}", {}).values()
            logged = [[s["entropy"] for s in results.steps[run["run"]] if "entropy" in s] for run in runs]
            if logged := [own for own in logged if own]:
                left.append(fmean(own[-1] for own in logged) / fmean(own[0] for own in logged))
        return f"{100 * min(left):.0f} to {100 * max(left):.0f} % of it is left" if left else "—"

    bullets = [
        f"What plain MXFP4 costs, before (interval over problems) → after training, pp: {each(loss)}.",
        f"α = 1 in the full recipe, minus bf16: {each(seeds('full-of1', 'bf16'))}; minus plain MXFP4: "
        f"{each(seeds('full-of1', 'mxfp4'))}.",
        f"What MBS and AQN add to OF alone: {each(seeds('full', 'of'))}; MBS without AQN: "
        f"{each(seeds('mbs+of', 'of'))}.",
        f"AQN's accuracy, with − without, mean of the three pairs: {each(aqn)}. Without MBS alone: "
        f"{each(seeds('aqn', 'mxfp4'))}.",
        f"NVFP4 − MXFP4: {each(seeds('nvfp4', 'mxfp4'))}; NVFP4 − [+ OF]: {each(seeds('nvfp4', 'of'))}.",
        f"Entropy from the first to the last step, of the ten rows at one learning rate: {each(fall)}.",
    ]
    return "".join(f"* {text}\n" for text in bullets)


def alphas(results: Results) -> str:
    """α = .5 minus α = 1, and the full recipe minus bf16, seed by seed."""
    body = []
    for kind in KINDS:
        for a, b in (("full", "full-of1"), ("full", "bf16")):
            ours, theirs = results.values(f"{kind}/{a}", greedy), results.values(f"{kind}/{b}", greedy)
            seeds = sorted(set(ours) & set(theirs))
            found = over(results, a, b, kind)
            each = [signed(100 * (ours[s][0] - theirs[s][0])) if s in seeds else "—" for s in range(8)]
            body.append([KINDS[kind], minus(a, b), *each, points(found and found.seeds)])
    return table(["", "pp", *(f"seed {s}" for s in range(8)), "mean"], body, text=2)


def curve_table(results: Results) -> str:
    """Greedy accuracy at every evaluation, mean over seeds; and what the last ten steps still changed."""
    steps = sorted({e["step"] for runs in results.runs.values() for run in runs.values() for e in run["evals"]})
    body = []
    for kind in KINDS:
        for row, shown in ROWS.items():
            runs = results.runs.get(f"{kind}/{row}", {}).values()
            at = [[e["accuracy"] for run in runs for e in run["evals"] if e["step"] == step] for step in steps]
            ends = [(run["evals"][-2], run["evals"][-1]) for run in runs if last(run) and len(run["evals"]) > 1]
            moved = mean([b["accuracy"] - a["accuracy"] for a, b in ends]) if ends else None
            body.append([KINDS[kind], shown, *(plain([100 * v for v in values], 1) for values in at), points(moved)])
    return table(["", "", *(f"step {s}" for s in steps), "last to one before, pp"], body, text=2)


def measures(results: Results, kind: str) -> str:
    """Means over a run's first and last five steps (of what the monitor measures, one), then over seeds."""
    body = []
    for row, shown in ROWS.items():
        runs = results.runs.get(f"{kind}/{row}", {})
        steps = [results.steps[run["run"]] for run in runs.values() if results.steps[run["run"]]]

        def span(name: str, digits: int, count: int = 5, by: float = 1.0, steps: Any = steps) -> str:
            logged = [[by * s[name] for s in own if name in s] for own in steps]
            first, final = ([fmean(own[part]) for own in logged if own] for part in (slice(count), slice(-count, None)))
            return f"{plain(first, digits)} → {plain(final, digits)}" if first else "—"

        seconds = [v for own in steps for step in own if (v := step_seconds(step)) is not None]
        body.append([shown, span("reward", 2), span("entropy", 4), span("group/distinct_answers", 2),
                     span("completions/mean_length", 0), span("gap/k3", 5), span("gap/pearson", 4),
                     span("gap/chi2", 4), span("gap/truncated", 3, by=100), span("grad_norm", 2),
                     span("weights/rel_mse", 5, 1), span("logits/sigma_eta", 3, 1),
                     f"{median(seconds):.1f}" if seconds else "—"])  # fmt: skip
    head = ["", "reward", "entropy", "distinct of 8", "tokens", "KL (k3)", "Pearson", "χ²", "TIS cut, %", "gradient",
            "weights' error", "σ_η", "s a step"]  # fmt: skip
    return table(head, body)


def lost(results: Results) -> str:
    """The runs that did not reach their end, and the rows that are short of seeds."""
    text = ""
    for name, seeds in planned().items():
        runs = results.runs.get(name, {})
        for seed, run in runs.items():
            if not last(run):
                reason = f": {run['reason']}" if run["reason"] else ""
                text += f"* `{name}`, seed {seed}: {run['state']}{reason}.\n"
        if gone := [str(seed) for seed in seeds if seed not in runs]:
            text += f"* `{name}`: seed{'s' * (len(gone) > 1)} {', '.join(gone)} not run.\n"
    return text or "Every run of the sweep reached its end.\n"


def about(results: Results) -> str:
    """What the runs have in common and where they ran."""
    rows = [run for runs in results.runs.values() for run in runs.values()]
    if not rows:
        return MISSING
    infos = [run["info"] for run in rows]
    versions = {", ".join(f"{n} {v}" for n, v in info["versions"].items()) for info in infos}
    told = {name: "; ".join(sorted({str(info[name])[:cut] for info in infos}))
            for name, cut in (("device", 80), ("created", 10), ("commit", 13))}  # fmt: skip
    names = ("task", "steps", "prompts_per_step", "samples_per_prompt", "micro_batch", "loss", "eval_problems",
             "eval_samples", "temperature", "max_new_tokens")  # fmt: skip
    common = [f"{n} {', '.join(sorted({str(r['options'][n]) for r in rows}))}" for n in names]
    rates = Counter(f"{run['options']['lr']:.0e}".replace("e-0", "e-") for run in rows)
    return (
        f"{len(rows)} runs; {told['device']}; {'; '.join(sorted(versions))}; {told['created']}; commit "
        f"{told['commit']}.\n\nOptions: {', '.join(common)}, lr {', '.join(rates)}.\n"
    )


# --- curves ----------------------------------------------------------------------------------------------------------


def logs(step: Row) -> Row:
    """A step with the columns of LOGS as log₁₀, so that a mean over seeds isn't one seed's peak."""
    positive = {name: math.log10(step[name]) for name in LOGS.values() if step.get(name, 0) > 0}
    return {name: value for name, value in step.items() if name not in LOGS.values()} | positive


def images(results: Results) -> dict[str, Mapping[str, Any]]:
    """File name → curve, of every curve that the page shows; named as the page names the rows."""
    runs = [
        Run(Path(run["run"]), run["options"], run["info"], [logs(step) for step in results.steps[run["run"]]],
            run["evals"], run["state"], run["reason"])
        for own in results.runs.values() for run in own.values()
    ]  # fmt: skip
    found = {}
    for subject in compare(runs)["subjects"] if runs else []:
        kind = subject["model"].partition(":")[2]
        names = {g["label"]: g["runs"][0]["path"].split("/")[1] for g in subject["groups"]}
        for curve in subject["curves"]:
            if curve["name"] in DRAWN:
                series = {names[label]: values for label, values in curve["series"].items()}
                ordered = {ROWS[name]: series[name] for name in ROWS if name in series}
                title = f"{KINDS[kind]}. {curve['title']}" + (", log₁₀" if curve["name"] in LOGS else "")
                found[f"{kind}-{curve['name']}.png"] = curve | {"series": ordered, "title": title}
    return found


def curves(results: Results) -> str:
    return "".join(f"![{curve['title']}](curves/{name})\n" for name, curve in images(results).items()) or MISSING


def draw(results: Results) -> int:
    """Draw the curves; how many."""
    found = images(results)
    if found and not runs_png.available():
        raise SystemExit(f"tables.py: {runs_png.MISSING}")
    CURVES.mkdir(exist_ok=True)
    for name, curve in found.items():
        runs_png.draw(curve, CURVES / name)
    return len(found)


# --- the page --------------------------------------------------------------------------------------------------------


def blocks(results: Results) -> dict[str, str]:
    """The page's generated parts, by the name of their markers."""
    if not results.runs:
        return dict.fromkeys(BLOCKS, MISSING)
    return {name: make(results) for name, make in BLOCKS.items()}


BLOCKS: dict[str, Callable[[Results], str]] = {
    "about": about,
    "overview": overview,
    "short": short_claims,
    "claims": claims,
    "dense": lambda results: accuracy(results, "dense"),
    "moe": lambda results: accuracy(results, "moe"),
    "findings": findings,
    "alphas": alphas,
    "evaluations": curve_table,
    "measures-dense": lambda results: measures(results, "dense"),
    "measures-moe": lambda results: measures(results, "moe"),
    "lost": lost,
    "curves": curves,
}


def page(text: str, results: Results) -> str:
    for name, content in blocks(results).items():
        text = between(text, name, content)
    return text


def front(text: str, results: Results) -> str:
    return between(text, "overview", blocks(results)["overview"])


if __name__ == "__main__":
    found = load()
    if sys.argv[1:] == ["--write"]:
        write_atomically(PAGE, page(PAGE.read_text(encoding="utf-8"), found))
        write_atomically(FRONT, front(FRONT.read_text(encoding="utf-8"), found))
        print(f"written: {PAGE}, {draw(found)} curves")
    elif sys.argv[1:]:
        sys.exit("usage: tables.py [--write]")
    else:
        print("\n".join(f"{name}:\n\n{content}" for name, content in blocks(found).items()))

"""Every figure of README.md, from results/*.jsonl alone.

    python experiments/long_responses/tables.py            prints the blocks
    python experiments/long_responses/tables.py --write    puts them between README.md's markers, and draws curves/*.png

What is compared with what, and what a difference decides: differences.py.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import gate
from differences import (
    Difference,
    Row,
    Runs,
    accuracy,
    between_lengths,
    by_name,
    difference,
    first,
    last,
    recovered,
    verdict,
)

from mxrl.report import runs_png
from mxrl.report.files import write_atomically
from mxrl.report.markdown import between, figure, percent, points, table
from mxrl.report.run_groups import compare
from mxrl.report.run_rows import read_rows
from mxrl.report.runs import Run, step_seconds

HERE = Path(__file__).resolve().parent
PAGE, RESULTS, CURVES = HERE / "README.md", HERE / "results", HERE / "curves"
LENGTHS = ("short", "mid", "long")
RECIPES = {  # of sweep.yaml, as the page names them
    "bf16": "bf16",
    "mxfp4": "mxfp4",
    "w4a8": "mxfp4+w4a8",
    "full": "mxfp4+mbs+of:0.5+aqn",
    "full-w4a8": "mxfp4+mbs+of:0.5+aqn+w4a8",
}
DRAWN = ("gap_pearson", "reward", "length")
NOT_RUN = "*Not run yet.*\n"


# --- cells -----------------------------------------------------------------------------------------------------------


def span(found: Difference | None) -> str:
    """`−3.1 [−5.0, −1.2] (−3.0, −3.2)` in points: the interval over problems, then each seed's value."""
    if found is None:
        return "—"
    value, low, high, _ = found.problems
    ends = f" [{points(low)}, {points(high)}]" if low == low else ""
    return f"{points(value)}{ends} ({', '.join(points(v) for v in found.seeds.values())})"


def per_step(runs: Sequence[Row], steps: Sequence[Row], column: str, part: str = "all") -> float | None:
    """Mean over the runs of a column's mean over all of their steps, the first quarter or the last."""
    found = []
    for run in runs:
        own = [row[column] for row in steps if row["run"] == run["run"] and row.get(column) is not None]
        few = max(1, len(own) // 4)
        own = {"all": own, "first": own[:few], "last": own[-few:]}[part]
        if own:
            found.append(fmean(own))
    return fmean(found) if found else None


def groups(runs: Runs) -> list[tuple[str, str, list[Row]]]:
    """(length, recipe's name, its runs) of what was run, in the page's order."""
    return [
        (length, name, list(runs[f"{length}/{name}"].values()))
        for length in LENGTHS for name in RECIPES if f"{length}/{name}" in runs
    ]  # fmt: skip


# --- blocks ----------------------------------------------------------------------------------------------------------


def policy(rows: Sequence[Row]) -> str:
    """What the supervised policy can do before any GRPO, and how it got there."""
    if not rows:
        return NOT_RUN
    (row,) = rows
    body = []
    for name, band in gate.bands(row).items():
        low, high = gate.BANDS[name]
        body.append([name, f"{low}–{high}", percent(band["greedy"]), percent(band["rewrite"]), percent(band["share"]),
                     "passed" if gate.passes(band) else "not passed"])  # fmt: skip
    head = ["", "numbers", "greedy, %", "rewritten samples right, %", "share rewritten, %", "gate"]
    log = row["last_logged"]
    made = (
        f"Trained {row['train_seconds']:.0f} s, {row['steps']} steps; loss {log['loss']:.4f} at step {log['step']}, "
        f"{log['completion_tokens_per_s']} completion tokens/s. {row['greedy']['n']} held-out problems, "
        f"{row['sampled']['samples']} samples each.\n\n"
    )  # fmt: skip
    return made + table(head, body)


def accuracies(runs: Runs) -> str:
    """Greedy accuracy under the run's own recipe, before and after GRPO; against bf16 and plain MXFP4."""
    if not runs:
        return NOT_RUN
    body = []
    for length, name, found in groups(runs):
        own, bf16 = runs[f"{length}/{name}"], runs.get(f"{length}/bf16", {})
        tokens = [row["mean_tokens"] for run in found if (row := last(run))]
        ended = sum(last(run) is not None for run in found)
        share = recovered(runs, length, name) if name not in ("bf16", "mxfp4") else None
        body.append([
            length, f"`{RECIPES[name]}`", f"{ended} of {len(found)}", figure(fmean(tokens) if tokens else None, 0),
            percent(accuracy(own, first)), percent(accuracy(own, last)), span(difference(own, own, last, first)),
            "" if name == "bf16" else span(difference(own, bf16)),
            "" if name in ("bf16", "mxfp4") else figure(None if share is None else 100 * share, 0),
            f"{percent(accuracy(own, first, True))} → {percent(accuracy(own, last, True))}",
        ])  # fmt: skip
    head = ["length", "recipe", "runs that ended", "tokens after", "before, %", "after, %", "gain, pp",
            "minus bf16, pp", "recovered, %", "sampled, %"]  # fmt: skip
    return table(head, body, text=2)


def untrained(runs: Runs) -> str:
    """Greedy accuracy before any step, under each recipe, minus bf16's: the same policy and problems for all seeds."""
    if not runs:
        return NOT_RUN
    body = []
    for length, name, found in groups(runs):
        row = first(found[0])  # every seed evaluates the same policy on the same problems
        own, bf16 = {0: found[0]}, dict(enumerate(list(runs.get(f"{length}/bf16", {}).values())[:1]))
        if row is None:
            continue
        apart = "" if name == "bf16" else span(difference(own, bf16, first, first)).partition(" (")[0]
        sampled = row.get("sampled", {})
        body.append([length, f"`{RECIPES[name]}`", str(row["n"]), percent(row["accuracy"]), apart,
                     figure(row["mean_tokens"], 0), percent(sampled.get("accuracy")),
                     figure(sampled.get("mean_tokens"), 0), percent(sampled.get("truncated"))])  # fmt: skip
    head = ["length", "recipe", "problems", "greedy, %", "minus bf16, pp", "tokens", "sampled, %", "sampled: tokens",
            "sampled: cut, %"]  # fmt: skip
    return table(head, body, text=2)


def gap(runs: Runs, steps: Sequence[Row]) -> str:
    """The rollout–training gap a step, mean over steps and seeds, beside what accuracy was recovered."""
    if not runs:
        return NOT_RUN
    body = []
    for length, name, found in groups(runs):
        pearson = [figure(per_step(found, steps, "gap/pearson", part), 4) for part in ("first", "last")]
        cut = per_step(found, steps, "gap/truncated")
        share = recovered(runs, length, name) if name not in ("bf16", "mxfp4") else None
        apart = difference(runs[f"{length}/{name}"], runs.get(f"{length}/bf16", {})) if name != "bf16" else None
        rewritten = [percent(per_step(found, steps, "style/rewrite", part)) for part in ("first", "last")]
        on_gpu = {run["run"] for run in found if run["options"]["device"] == "cuda"}
        seconds = [v for row in steps if row["run"] in on_gpu and (v := step_seconds(row))]
        body.append([
            length, f"`{RECIPES[name]}`", figure(per_step(found, steps, "completions/mean_length"), 0),
            figure(per_step(found, steps, "gap/pearson"), 4), " → ".join(pearson),
            figure(per_step(found, steps, "gap/k3"), 5), figure(per_step(found, steps, "gap/chi2"), 4),
            figure(None if cut is None else 100 * cut, 3), " → ".join(rewritten),
            "" if apart is None else points(apart.problems.value),
            figure(None if share is None else 100 * share, 0), figure(median(seconds) if seconds else None, 1),
        ])  # fmt: skip
    head = ["length", "recipe", "tokens", "Pearson", "first → last quarter", "KL (k3)", "χ²", "TIS cut, %",
            "rewritten, %", "after, minus bf16, pp", "recovered, %", "s a step"]  # fmt: skip
    return table(head, body, text=2)


def claims(runs: Runs) -> str:
    """The paper's scope: corrections recover at some 280 tokens, under-recover at thousands; and what W4A8 changes."""
    if not runs:
        return NOT_RUN

    def minus(length: str, a: str, b: str) -> Difference | None:
        return difference(runs.get(f"{length}/{a}", {}), runs.get(f"{length}/{b}", {}))

    body = []

    def row(text: str, compared: str, found: Difference | None, sign: int) -> None:
        body.append([text, compared, span(found), verdict(found, sign)])

    for length in LENGTHS:
        own = runs.get(f"{length}/bf16", {})
        row(f"{length}: GRPO improves the policy", "`bf16`, after − before", difference(own, own, last, first), 1)
    for length in LENGTHS:
        row(f"{length}: plain MXFP4 loses accuracy", "`mxfp4` − `bf16`", minus(length, "mxfp4", "bf16"), -1)
    for length in LENGTHS:
        row(f"{length}: the corrections give some back", "`full` − `mxfp4`", minus(length, "full", "mxfp4"), 1)
    for length in ("mid", "long"):
        row(f"{length}: they leave more missing than at short", f"(`full` − `bf16`) {length} − short",
            between_lengths(minus(length, "full", "bf16"), minus("short", "full", "bf16")), -1)  # fmt: skip
    for length in LENGTHS:
        row(f"{length}: 8-bit activations help plain MXFP4", "`w4a8` − `mxfp4`", minus(length, "w4a8", "mxfp4"), 1)
    for length in LENGTHS:
        row(f"{length}: … and the corrected recipe", "`full-w4a8` − `full`", minus(length, "full-w4a8", "full"), 1)
    return table(["claim", "compared", "here, pp", ""], body, text=2)


def came_from(infos: Sequence[Row]) -> str:
    """Devices; versions; dates; commits of what mxrl.provenance noted beside the results."""
    devices = {str(info["device"]) for info in infos}
    versions = {", ".join(f"{name} {version}" for name, version in info["versions"].items()) for info in infos}
    dates = {info["created"][:10] for info in infos}
    commits = {mark[:12] + "+dirty" * mark.endswith("+dirty") for info in infos if (mark := info["commit"])}
    told = [", ".join(sorted(devices)), *sorted(versions), ", ".join(sorted(dates))]
    return "; ".join([*told, f"commit {', '.join(sorted(commits)) or 'unknown'}"])


def lengths(rows: Sequence[Row]) -> str:
    """How long right answers are at each length, beside the sweep's settings for it."""
    if not rows:
        return NOT_RUN
    first = rows[0]
    body = [
        [row["length"], str(row["numbers"]), f"{row['mean']:.0f} ({row['least']}–{row['most']})", str(row["room"]),
         str(row["longer"]), str(row["steps"]), f"{row['prompts']} × {row['samples']}",
         ", ".join(map(str, row["seeds"]))]
        for row in rows
    ]  # fmt: skip
    head = ["", "numbers", f"tokens of a rewritten answer: mean (least–most of {first['problems']:,})",
            "new tokens at most", "answers longer than that", "steps", "prompts × samples", "seeds"]  # fmt: skip
    return f"{table(head, body)}\n{came_from([row['provenance'] for row in rows])}; seed {first['seed']}.\n"


def about(rows: Sequence[Row], runs: Runs) -> str:
    """Devices, versions, commits and dates of what the results hold, and the runs that did not reach their end."""
    if not (rows or runs):
        return NOT_RUN
    text = f"The policy: {came_from([rows[0]['provenance']])}; seed {rows[0]['settings']['seed']}.\n" if rows else ""
    every = [run for own in runs.values() for run in own.values()]
    for device in dict.fromkeys(run["options"]["device"] for run in every):
        own = [run for run in every if run["options"]["device"] == device]
        named = f" ({', '.join(run['run'] for run in own)})" if len(own) <= 3 else ""
        text += f"{len(own)} run{'s' * (len(own) > 1)}{named}: {came_from([run['info'] for run in own])}.\n"
    text += "".join(
        f"* `{run['run']}`: {run['state']} at step {run['last_step']} of {run['options']['steps']}"
        f"{': ' + run['reason'] if run['reason'] else ''}.\n"
        for run in every if last(run) is None
    )  # fmt: skip
    return text


# --- curves ----------------------------------------------------------------------------------------------------------


def images(runs: Runs, steps: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """File name → curve, of every curve that the page shows, by length."""
    found = {}
    for length in LENGTHS:
        own = [
            Run(Path(run["run"]), run["options"], run["info"], [s for s in steps if s["run"] == run["run"]],
                run["evals"], run["state"], run["reason"])
            for where, _, group in groups(runs) if where == length for run in group
        ]  # fmt: skip
        if not own:
            continue
        (subject,) = compare(own)["subjects"]
        for curve in subject["curves"]:
            if curve["name"] in DRAWN:
                found[f"{length}-{curve['name']}.png"] = {**curve, "title": f"{length}. {curve['title']}"}
    return found


def curves(runs: Runs, steps: Sequence[Row]) -> str:
    found = images(runs, steps)
    return "".join(f"![{curve['title']}](curves/{name})\n" for name, curve in found.items()) or NOT_RUN


def draw(runs: Runs, steps: Sequence[Row]) -> int:
    """Draw the curves; how many."""
    found = images(runs, steps)
    if found and not runs_png.available():
        raise SystemExit(f"tables.py: {runs_png.MISSING}")
    for name, curve in found.items():
        CURVES.mkdir(exist_ok=True)
        runs_png.draw(curve, CURVES / name)
    return len(found)


# --- the page --------------------------------------------------------------------------------------------------------


def blocks(folder: Path = RESULTS) -> dict[str, str]:
    """The page's generated parts, by the name of their markers."""
    rows, runs, steps = read_rows(folder, "policy"), by_name(read_rows(folder, "runs")), read_rows(folder, "steps")
    return {
        "lengths": lengths(read_rows(folder, "lengths")),
        "about": about(rows, runs),
        "claims": claims(runs),
        "policy": policy(rows),
        "untrained": untrained(runs),
        "accuracies": accuracies(runs),
        "gap": gap(runs, steps),
        "curves": curves(runs, steps),
    }


def page(text: str) -> str:
    for name, content in blocks().items():
        text = between(text, name, content)
    return text


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        write_atomically(PAGE, page(PAGE.read_text(encoding="utf-8")))
        print(f"written: {PAGE}, {draw(by_name(read_rows(RESULTS, 'runs')), read_rows(RESULTS, 'steps'))} curves")
    elif sys.argv[1:]:
        sys.exit("usage: tables.py [--write]")
    else:
        print("\n".join(f"{name}:\n\n{content}" for name, content in blocks().items()))

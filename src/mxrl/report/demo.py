"""The page of `mxrl demo`, from demo.json and nothing else.

    build_page(json.loads(Path("demo/demo.json").read_text())).write("demo.html")

Accuracies are of few problems on this machine; beside each stands the model card's figure, of more problems on a GPU.
Differences are paired, over the same problems, with 95 % intervals (rl/evaluate.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mxrl.decompose import ErrorStats
from mxrl.report.page import Page, percent, plain
from mxrl.report.sections import stack
from mxrl.report.summary import FIGURES

Demo = Mapping[str, Any]
_SAID = {"+mbs": "MBS", "+of": "OF", "+mbs+of": "MBS and OF"}


def points(value: float | None) -> str:
    """A difference of accuracies in percentage points, signed: −.132 is −13.2."""
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value * 100:+.1f}".replace("-", "−")


def lost(value: float | None) -> str:
    """A loss of accuracy in percentage points: .132 is 13.2."""
    return "–" if value is None or not math.isfinite(value) else f"{value * 100:.1f}".replace("-", "−")


def interval(values: Sequence[float] | None) -> str:
    """[difference, low, high] as "−13.2 [−14.9, −11.4]"."""
    return "–" if values is None else f"{points(values[0])} [{points(values[1])}, {points(values[2])}]"


def half_width(demo: Demo) -> float:
    """Half the width of the widest interval of a difference, as a fraction: what this many problems can resolve."""
    found = [*demo["minus_baseline"].values(), *demo["minus_plain"].values()]
    return max(((high - low) / 2 for _, low, high in found), default=math.nan)


def sentences(demo: Demo) -> list[str]:
    """The result in words, each with its interval: first the loss, then what each correction gives back."""
    base, plain_name = demo["settings"]["evaluated"][:2]
    drop = demo["minus_baseline"][plain_name]
    found = demo["accuracy"]
    out = [
        f"`{plain_name}` for weights and activations takes greedy accuracy from {percent(found[base]['accuracy'])} to "
        f"{percent(found[plain_name]['accuracy'])}: {interval(drop)} points{_undecided(drop)}."
    ]
    for recipe, gain in demo["minus_plain"].items():
        out.append(f"`{recipe}` gives back {interval(gain)} points{_undecided(gain)}.")
    return out


def _undecided(difference: Sequence[float]) -> str:
    return ", undecided at this size" if difference[1] <= 0 <= difference[2] else ""


def build_page(demo: Demo) -> Page:
    """The whole page. Raises KeyError where `demo` is no demo.json of this version."""
    page = Page(
        "What 4-bit numbers cost a small policy, and what gives it back",
        lead="A policy of a few million parameters that works out chains of additions, subtractions and "
        "multiplications, run with its weights and activations rounded to 4-bit MXFP4 and with corrections.",
        footer=f"Made by mxrl {demo['versions']['mxrl']} on {demo['created']}. Every number here is in `demo.json`.",
    )
    _short(page, demo)
    _accuracy(page, demo)
    _weights(page, demo)
    _grpo(page, demo)
    _next(page, demo)
    _origin(page, demo)
    return page


def _short(page: Page, demo: Demo) -> None:
    base, plain_name = demo["settings"]["evaluated"][:2]
    n, found, card = demo["settings"]["problems"], demo["accuracy"], demo["card"]
    page.section("In short")
    page.facts({
        f"accuracy, {base}": percent(found[base]["accuracy"]),
        f"accuracy, {plain_name}": percent(found[plain_name]["accuracy"]),
        **{f"{recipe} gives back": f"{points(gain[0])} pp" for recipe, gain in demo["minus_plain"].items()},
    })  # fmt: skip
    page.text(*sentences(demo))
    size = (
        f"These are {n} problems: an interval reaches up to ±{half_width(demo) * 100:.1f} points: "
        "enough for the loss, not for the order of the corrections."
    )
    if card:
        size += (
            f" For that, look at the model card's figures beside them: {card['bf16']['n']} problems on one "
            f"{card.get('device', 'GPU')}."
        )
    page.note(size, warn=True)


# --- accuracy --------------------------------------------------------------------------------------------------------


def _accuracy(page: Page, demo: Demo) -> None:
    base, plain_name = demo["settings"]["evaluated"][:2]
    found, card = demo["accuracy"], demo["card"]
    names = [recipe for recipe in found if recipe != base]
    here = f"this run, {demo['settings']['problems']} problems"
    page.section("Accuracy")
    differences = {here: [demo["minus_baseline"][r] for r in names]}
    if card:
        differences[f"model card, {card['bf16']['n']} problems"] = [_card_difference(card, r) for r in names]
    page.bars(
        f"Greedy accuracy lost against `{base}`",
        names,
        {name: [-d for d, _, _ in rows] for name, rows in differences.items()},
        stacked=False,
        intervals={name: [(-high, -low) for _, low, high in rows] for name, rows in differences.items()},
        axis="percentage points lost",
        form=lost,
        explain="Paired over the same problems; whiskers are 95 % intervals over problems. Shorter is better.",
    )
    columns = ["recipe", "accuracy", f"− {base}", f"− {plain_name}"]
    if card:
        columns += ["card: accuracy", f"card: − {base}", "card: loss given back"]
    rows = []
    for recipe, result in found.items():
        row = [recipe, percent(result["accuracy"])]
        row += [interval(demo["minus_baseline"].get(recipe)), interval(demo["minus_plain"].get(recipe))]
        rows.append(row + (_card_cells(card, recipe, base) if card else []))
    shown = len(rows)
    if card:
        others = [r for r in card["recipes"] if r not in found]
        rows += [[recipe, "–", "–", "–", *_card_cells(card, recipe, base)] for recipe in others]
    page.table(
        columns,
        rows,
        strong=[0],
        caption="Differences in percentage points [95 % interval]." + (
            f" Recipes below the first {shown} were measured for the card only." if len(rows) > shown else ""
        ),
    )  # fmt: skip
    _same_problems(page, demo)
    groups = list(found[base]["by_group"])
    page.table(
        ["recipe", *(f"{g} numbers (n = {found[base]['by_group'][g]['n']})" for g in groups)],
        [[r, *(percent(result["by_group"][g]["accuracy"]) for g in groups)] for r, result in found.items()],
        fold="Accuracy by the length of the chain",
    )


def _same_problems(page: Page, demo: Demo) -> None:
    card, settings = demo["card"], demo["settings"]
    if not card:
        page.text("There is no model card for these weights, so there are no figures of more problems beside them.")
    elif settings["seed"] == card["problems"]["seed"]:
        page.text(
            f"The {settings['problems']} problems are the first of the card's {card['bf16']['n']}, so the two are not "
            "independent."
        )
    else:
        page.text("The problems here were drawn with another seed than the card's.")
    page.text(
        "`bf16` stands for no quantization. Here whatever is not 4-bit is computed in float32 on a CPU; the card's "
        "figures are of bf16 on a GPU, and differ by that too."
    )


def _card_difference(card: Mapping[str, Any], recipe: str) -> Sequence[float]:
    return card["recipes"].get(recipe, {}).get("minus_bf16") or [math.nan] * 3


def _card_cells(card: Mapping[str, Any], recipe: str, base: str) -> list[str]:
    if recipe == base:
        return [percent(card["bf16"]["accuracy"]), "–", "–"]
    entry = card["recipes"].get(recipe)
    if entry is None:
        return ["–", "–", "–"]
    recovered = entry.get("recovered")
    return [
        percent(entry["accuracy"]),
        interval(entry["minus_bf16"]),
        "–" if recovered is None else f"{recovered * 100:.0f} %",
    ]


# --- weights ---------------------------------------------------------------------------------------------------------


def _weights(page: Page, demo: Demo) -> None:
    page.section("Error of the weights")
    page.text(
        "How much of the weights' energy each recipe's rounding changes. Grid and deadzone together are the floor, the "
        "error that an unrounded scale would leave; the excess is what power-of-two scales add. OF quantizes what the "
        "first pass left, for twice the bits, and so goes below the floor. `mxrl analyze` splits any checkpoint like "
        "this, with the terms explained."
    )
    for name, found in demo["weights"].items():
        stats = {recipe: ErrorStats.from_dict(dict(entry)) for recipe, entry in found["total"].items()}
        parts, marks = stack(list(stats.values()))
        title = f"`{found['model']}`: {found['tensors']} linear weights, {found['elements'] / 1e6:.1f} M elements"
        if name == next(iter(demo["weights"])):
            page.bars(f"Relative MSE, {title}", list(stats), parts, marks=marks, axis="T / ‖x‖²")
        page.table(
            ["recipe", "bits / element", "T / T(mxfp4)", *(c.name for c in FIGURES)],
            [
                [recipe, plain(found["total"][recipe]["bits"]), plain(found["total"][recipe]["relative_to_mxfp4"]),
                 *(c.cell(s) for c in FIGURES)]
                for recipe, s in stats.items()
            ],
            caption=title,
        )  # fmt: skip


# --- GRPO ------------------------------------------------------------------------------------------------------------


def _grpo(page: Page, demo: Demo) -> None:
    runs, settings = demo["grpo"], demo["settings"]
    if not runs:
        return
    page.section("A few GRPO steps")
    batch = settings["prompts"] * settings["samples"]
    page.note(
        f"These curves are noise: {settings['steps']} steps of {settings['prompts']} prompts × {settings['samples']} "
        "samples show that training runs under every recipe and how far its rollout is from its training pass, not "
        "what it learns. " + _card_gain(demo["card"]),
        warn=True,
    )
    steps = [row["step"] for row in next(iter(runs.values()))["rows"]]
    page.lines(
        f"Accuracy of the {batch} sampled completions of a step",
        steps,
        {recipe: _column(run, "accuracy") for recipe, run in runs.items()},
        x_label="step",
        y_label="accuracy",
        form=percent,
        explain="Sampled at temperature 1 from the quantized policy (with AQN's noise where the recipe has it). Every "
        "recipe sees the same prompts.",
    )
    page.lines(
        "Gap between rollout and training, mean |Δ logp| a token",
        steps,
        {recipe: _column(run, "gap/mean_abs") for recipe, run in runs.items()},
        x_label="step",
        y_label="mean |Δ logp|",
        zero=True,
        explain="What truncated importance sampling corrects. Without noise both sides compute the same numbers up to "
        "float32 rounding, which a 4-bit activation can amplify; AQN moves the rollout's weights on purpose.",
    )
    columns = {"accuracy": percent, "entropy": plain, "gap/mean_abs": plain, "gap/ess": plain, "gap/truncated": percent,
               "group/distinct_answers": plain, "grad_norm": plain, "aqn/sigma": plain, "time/step": plain}  # fmt: skip
    heads = ["accuracy", "entropy", "mean |Δ logp|", "effective sample size", "truncated weights", "distinct answers",
             "gradient norm", "AQN σ", "s / step"]  # fmt: skip
    page.table(
        ["recipe", *heads],
        [
            [recipe, *(form(_mean(_column(run, name))) for name, form in columns.items())]
            for recipe, run in runs.items()
        ],
        caption="Means over the steps.",
    )
    _card_runs(page, demo["card"])


def _card_gain(card: Mapping[str, Any] | None) -> str:
    runs = (card or {}).get("grpo") or []
    if not runs:
        return "There is no model card with longer runs beside these weights."
    gains = sorted(run["gain"] for run in runs)
    return (
        f"What bf16 GRPO learns is in the model card: {points(gains[0])} to {points(gains[-1])} points of greedy "
        f"accuracy in {max(run['steps'] for run in runs)} steps on a GPU, {len(runs)} seeds (below)."
    )


def _card_runs(page: Page, card: Mapping[str, Any] | None) -> None:
    runs = (card or {}).get("grpo") or []
    if not runs:
        return
    steps = sorted({e["step"] for run in runs for e in run["evals"]})
    series = {}
    for run in runs:
        at = {e["step"]: e["accuracy"] for e in run["evals"]}
        series[f"seed {run['seed']}"] = [at.get(step, math.nan) for step in steps]
    page.lines(
        "From the model card: greedy accuracy during GRPO in bf16 on a GPU",
        steps,
        series,
        x_label="step",
        y_label="accuracy",
        form=percent,
        explain=f"{runs[0]['prompts']} prompts × {runs[0]['samples']} samples a step, learning rate {runs[0]['lr']:g}, "
        "held-out problems.",
    )
    page.table(
        ["seed", "steps", "before", "after", "gain, points [95 %]"],
        [
            [str(r["seed"]), str(r["steps"]), percent(r["before"]), percent(r["after"]),
             interval([r["gain"], *r["interval"]]) if r.get("interval") else points(r["gain"])]
            for r in runs
        ],
    )  # fmt: skip


def _column(run: Mapping[str, Any], name: str) -> list[float]:
    return [math.nan if row.get(name) is None else row[name] for row in run["rows"]]


def _mean(values: Sequence[float]) -> float:
    known = [v for v in values if math.isfinite(v)]
    return sum(known) / len(known) if known else math.nan


# --- what next, and where it comes from ------------------------------------------------------------------------------


def _next(page: Page, demo: Demo) -> None:
    page.section("With your own model")
    page.table(
        ["", ""],
        [
            ["`mxrl analyze MODEL`", "the error of a checkpoint's weights, split (.safetensors, .gguf or a folder)"],
            ["`mxrl train --model MODEL --recipe mxfp4+mbs+of+aqn --out runs/a`", "GRPO on quantized rollouts"],
            ["`mxrl.convert(model, \"mxfp4+mbs+of\")`", "in Python: the model with 4-bit linear layers, trainable"],
        ],
        text_columns=(1,),
    )  # fmt: skip


def _origin(page: Page, demo: Demo) -> None:
    page.section("Where the numbers come from")
    settings, card = demo["settings"], demo["card"]
    parts = {**{f"accuracy, {r}": v["seconds"] for r, v in demo["accuracy"].items()},
             **{f"weights, {r}": v["seconds"] for r, v in demo["weights"].items()},
             **{f"GRPO, {r}": v["seconds"] for r, v in demo["grpo"].items()}}  # fmt: skip
    first = next(iter(demo["grpo"].values()), {})
    rows = [["policy", settings["model"]]]
    rows += [
        [f"{name}/{file['name']}", f"{file['bytes']:,} bytes, sha256 {file['sha256']}"]
        for name, found in demo["weights"].items() for file in found["files"]
    ]  # fmt: skip
    rows += [
        ["problems", f"task chain, test split, seed {settings['seed']}, n = {settings['problems']}; greedy decoding"],
        ["GRPO", ", ".join(f"{k} {v}" for k, v in first.get("pinned", {}).items() if k != "recipe")
         + f", learning rate {settings['lr']:g}, seed {settings['seed']}"],
        ["device", f"{demo['device']} ({demo['machine']}), {demo['threads']} threads, {demo['dtype']}"],
        ["seconds", f"{demo['seconds']:g} in all: " + ", ".join(f"{k} {v:g}" for k, v in parts.items())],
        ["versions", ", ".join(f"{k} {v}" for k, v in demo["versions"].items())],
        ["commit", demo["commit"] or "not known (an installed copy)"],
    ]  # fmt: skip
    if card:
        versions = ", ".join(f"{k} {v}" for k, v in card.get("versions", {}).items())
        rows.append(["model card", f"{card.get('device', '–')}, {card.get('date', '–')}; {versions}"])
    page.table(["", ""], rows, text_columns=(1,))

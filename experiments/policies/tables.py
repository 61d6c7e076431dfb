"""The markdown of the small policies, made from their cards (used by collect.py): tables, and the text with figures.

Accuracies are in percent; differences in percentage points with their paired 95 % interval over the problems,
`d ± 1.96·sd(d_i)/√n`. A difference whose interval holds zero is called undecided, and no sentence leans on it.
Text is made here where it carries figures, so that a figure has one source; the model cards are in model_card.py.
"""

from __future__ import annotations

import textwrap
from itertools import pairwise
from typing import Any

from mxrl.report.markdown import table

Card = dict[str, Any]
NAMES = {"dense": "dense", "moe": "MoE"}
MEANING = {
    "bf16": "no quantization",
    "mxfp4": "plain: power-of-two scales, blocks of 32",
    "mxfp4:ideal": "the block's exact scale, not rounded to a power of two",
    "nvfp4": "blocks of 16, E4M3 scales",
    "mxfp4+mbs": "macro block scaling",
    "mxfp4+of": "outlier fallback, α = .5",
    "mxfp4+of:1": "outlier fallback, α = 1",
    "mxfp4+mbs+of": "both, α = .5",
}
# Recipes compared with one another: each correction with none, and each with the one that it would have to beat.
PAIRS = (
    ("mxfp4+mbs", "mxfp4"), ("mxfp4:ideal", "mxfp4"), ("nvfp4", "mxfp4"), ("mxfp4+of", "mxfp4"),
    ("mxfp4+mbs+of", "mxfp4"), ("mxfp4+of:1", "mxfp4"), ("mxfp4:ideal", "mxfp4+mbs"), ("nvfp4", "mxfp4:ideal"),
    ("mxfp4+of", "nvfp4"), ("mxfp4+mbs+of", "mxfp4+of"), ("mxfp4+of:1", "mxfp4+of"), ("mxfp4+of:1", "mxfp4+mbs+of"),
)  # fmt: skip


def percent(value: float) -> str:
    return f"{100 * value:.1f}"


def points(value: float) -> str:
    """`-.1318` → `−13.2`."""
    return f"{100 * value:+.1f}".replace("-", "−")


def span(difference: list[float], unit: str = "") -> str:
    """`[d, low, high]` → `−13.2 [−14.9, −11.4]`, marked where zero lies inside; `unit` (as " pp") follows d."""
    d, low, high = difference
    return f"{points(d)}{unit} [{points(low)}, {points(high)}]" + (", undecided" if low <= 0 <= high else "")


def rate(lr: float) -> str:
    """`5e-05` → `5e-5`."""
    return f"{lr:.0e}".replace("e-0", "e-")


def path(row: dict[str, Any]) -> str:
    """A run's accuracies: `77.4 → 90.2 → 89.2`."""
    return " → ".join(percent(e["accuracy"]) for e in row["evals"])


def paragraph(text: str, first: str = "") -> str:
    """Text filled to 120 columns, `first` before it and as much room before its other lines."""
    return textwrap.fill(
        text,
        120,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_long_words=False,
        break_on_hyphens=False,
    )


def pair(card: Card, a: str, b: str) -> list[float]:
    """`[d, low, high]` of recipe a minus recipe b, whichever way round the card holds it."""
    for p in card["pairs"]:
        if (p["a"], p["b"]) == (a, b):
            return p["difference"]
        if (p["a"], p["b"]) == (b, a):
            d, low, high = p["difference"]
            return [-d + 0.0, -high + 0.0, -low + 0.0]  # + 0.0: no negative zero
    raise KeyError(f"the card of {card['kind']} compares no {a} with {b}")


def loss(card: Card) -> list[float]:
    """Plain MXFP4 minus bf16."""
    return card["recipes"]["mxfp4"]["minus_bf16"]


# --- tables --------------------------------------------------------------------------------------------------------


def recipe_table(card: Card) -> str:
    """Greedy accuracy of bf16 and of every recipe, best first."""
    rows = [["bf16", MEANING["bf16"], percent(card["bf16"]["accuracy"]), "", ""]]
    for name, row in card["recipes"].items():
        share = "" if name == "mxfp4" else f"{100 * row['recovered']:.0f} %"
        rows.append([f"`{name}`", MEANING[name], percent(row["accuracy"]), span(row["minus_bf16"]), share])
    return table(["recipe", "", "greedy %", "minus bf16, pp", "of the loss given back"], rows, text=2)


def length_table(card: Card) -> str:
    """Greedy accuracy by the chain's length, and sampled bf16."""
    groups = list(card["bf16"]["by_group"])
    head = ["", *(f"{g} numbers" for g in groups)]
    everything = {"bf16, greedy": card["bf16"], "bf16, sampled": card["bf16"]["sampled"]}
    everything |= {f"`{name}`": row for name, row in card["recipes"].items()}
    rows = [["problems", *(str(card["bf16"]["by_group"][g]["n"]) for g in groups)]]
    rows += [[name, *(percent(row["by_group"][g]["accuracy"]) for g in groups)] for name, row in everything.items()]
    return table(head, rows)


def pair_table(cards: dict[str, Card]) -> str:
    """Recipe against recipe, on the same problems."""
    rows = [[f"`{a}` − `{b}`", *(span(pair(card, a, b)) for card in cards.values())] for a, b in PAIRS]
    return table(["pp", *(NAMES[kind] for kind in cards)], rows)


def grpo_table(rows: list[dict[str, Any]], *, verdict: bool) -> str:
    """GRPO runs: accuracy at each evaluation and the gain over the run's own step 0."""
    steps = sorted({e["step"] for row in rows for e in row["evals"]})
    head = ["policy", "lr", "seed", *(f"step {s}" for s in steps), "gain, pp", *(["gate"] if verdict else [])]
    body = []
    for row in rows:
        at = {e["step"]: percent(e["accuracy"]) for e in row["evals"]}
        gain = gained(row) + ("" if row["finished"] else " (unfinished)")
        cells = [NAMES[row["run"].split("-")[0]], rate(row["lr"]), str(row["seed"])]
        passed = ["passed" if row["passed"] else "failed"] if verdict else []
        body.append([*cells, *(at.get(s, "") for s in steps), gain, *passed])
    return table(head, body)


def gained(row: dict[str, Any]) -> str:
    """The run's gain over its own step 0; empty if it ended before a second evaluation."""
    return "" if row["gain"] is None else span([row["gain"], *row["interval"]])


def grpo_recipe_table(rows: list[dict[str, Any]]) -> str:
    """GRPO under a recipe: accuracy under it at each evaluation, the gain, and the difference to bf16's run."""
    steps = sorted({e["step"] for row in rows for e in row["evals"]})
    minus = [f"minus bf16 at {s}, pp" for s in steps]
    head = ["recipe", "seed", "steps done", *(f"step {s}" for s in steps), "gain, pp", *minus]
    body = []
    for row in rows:
        at = {e["step"]: percent(e["accuracy"]) for e in row["evals"]}
        other = {d["step"]: span(d["difference"]) for d in row["minus_bf16"]}
        body.append([f"`{row['recipe']}`", str(row["seed"]), f"{row['steps_done']} of {row['steps_asked']}",
                     *(at.get(s, "") for s in steps), gained(row), *(other.get(s, "") for s in steps)])  # fmt: skip
    return table(head, body)


def grpo_recipe_text(card: Card, results: dict[str, Any]) -> str:
    """What the runs under a recipe show, and where each was cut."""
    text = ""
    for recipe in dict.fromkeys(row["recipe"] for row in card["grpo_recipes"]):
        rows = [row for row in card["grpo_recipes"] if row["recipe"] == recipe]
        names = {row["run"] for row in rows}
        seconds = sorted(step["time/step"] for step in results["grpo_steps"] if step["run"] in names)
        start, end = rows[0]["minus_bf16"][0], [row["minus_bf16"][-1] for row in rows]
        cut = ", ".join(f"{row['steps_done']} of {row['steps_asked']}" for row in rows)
        if rows[0]["gain"] is None:
            said = ("no after-figure: the runs ended before their second evaluation. At step 0 it is "
                    f"{percent(rows[0]['before'])} %, {span(start['difference'], ' pp')} to bf16.")  # fmt: skip
        else:
            gains = ", ".join(points(row["gain"]) for row in rows)
            left = ", ".join(span(d["difference"]) for d in end)
            said = (f"after {rows[0]['steps']} steps seeds 0, 1, 2 gain {gains} pp, under the recipe itself, from "
                    f"{percent(rows[0]['before'])} %. Paired with the bf16 run of the same seed: "
                    f"{span(start['difference'], ' pp')} at step 0; {left} pp at step {end[0]['step']}. "
                    "So after as many steps each is below its bf16 counterpart, by less than before GRPO.")  # fmt: skip
        said += f" Steps done: {cut}; median {seconds[len(seconds) // 2]:.0f} s a step. {rows[0]['note']}."
        text += paragraph(f"`{recipe}`: {said}", "* ") + "\n"
    return text


def sampled_table(cards: dict[str, Card]) -> str:
    """What sampling at temperature 1 finds: the headroom."""
    sampled = {kind: card["bf16"]["sampled"] for kind, card in cards.items()}
    count = next(iter(sampled.values()))["samples"]
    rows = [
        ["greedy accuracy, %", *(percent(card["bf16"]["accuracy"]) for card in cards.values())],
        ["sampled accuracy, %", *(percent(row["accuracy"]) for row in sampled.values())],
        [f"solved by at least one of {count} samples, %", *(percent(row["pass_at_k"]) for row in sampled.values())],
    ]
    for style in ("careful", "skip", "guess"):
        share = [percent(row["styles"].get(style, 0.0)) for row in sampled.values()]
        right = [percent(row["accuracy_by_style"][style]) for row in sampled.values()]
        both = [f"{s} / {r}" for s, r in zip(share, right, strict=True)]
        rows.append([f"{style}: share of samples, % / right, %", *both])
    entropy = [f"{row['entropy_per_token']:.3f}" for row in sampled.values()]
    rows.append(["entropy while sampling, nats a token", *entropy])
    return table(["", *(NAMES[kind] for kind in cards)], rows)


def training_table(cards: dict[str, Card]) -> str:
    rows = []
    for kind, card in cards.items():
        last = card["made"]["last_logged"]
        rows.append([NAMES[kind], str(last["step"]), f"{last['seconds']:.0f}", f"{last['loss']:.4f}",
                     f"{last['completion_tokens_per_s']}", f"{card['weights']['bytes'] / 1e6:.1f}",
                     f"`{card['weights']['sha256'][:16]}…`"])  # fmt: skip
    head = ["policy", "last logged step", "seconds", "loss there", "completion tokens/s", "weights, MB", "sha256"]
    return table(head, rows)


# --- text with figures ---------------------------------------------------------------------------------------------


def gate_text(card: Card) -> str:
    """One bullet: the gate's verdict, seed by seed."""
    word = "passed" if card["gate"]["passed"] else "failed"
    gains = ", ".join(f"seed {r['seed']} {points(r['gain'])} pp in {r['steps']} steps" for r in card["grpo"])
    return paragraph(f"**{NAMES[card['kind']]}: {word}** at lr {rate(card['gate']['lr'])}: {gains}.", "* ") + "\n"


def order_text(card: Card) -> str:
    """The recipes in order of accuracy; `~` where two neighbours' paired interval holds zero, `=` for equal figures."""
    names = list(card["recipes"])
    text = f"`{names[0]}`"
    for a, b in pairwise(names):
        d, low, high = pair(card, a, b)
        text += f" {'=' if d == 0 else '~' if low <= 0 <= high else '>'} `{b}`"
    return text


def relative(card: Card) -> str:
    """Plain MXFP4's loss as a share of what bf16 solves."""
    return f"{100 * -loss(card)[0] / card['bf16']['accuracy']:.0f} %"


def flipped(results: dict[str, Any]) -> dict[str, int]:
    """Problems that greedy decoding judges differently in the two bf16 paths, for each policy."""
    counts = {}
    for row in results["evals"]:
        if (row["recipe"], row["decoding"]) == ("bf16", "greedy"):
            runs = (r for r in results["grpo"] if (r["kind"], r["recipe"]) == (row["kind"], "bf16"))
            right = next(runs)["evals"][0]["right"]
            counts[row["kind"]] = sum(a != b for a, b in zip(row["scores"], right, strict=True))
    return counts


def findings(cards: dict[str, Card], results: dict[str, Any]) -> str:
    """What the tables say, as bullets."""
    runs = {row["run"]: row for card in cards.values() for row in (*card["grpo"], *card["lr_search"])}

    def each(text: Any) -> str:
        return ", ".join(f"{NAMES[kind]} {text(card)}" for kind, card in cards.items())

    def back(name: str) -> str:
        return each(lambda card: f"{100 * card['recipes'][name]['recovered']:.0f} %")

    def versus(a: str, b: str) -> str:
        return each(lambda card: span(pair(card, a, b), " pp"))

    flips = flipped(results)
    ended = [row for row in results["grpo"] if row["status"] == "done" and row["recipe"] == "bf16"]
    before = {percent(row["evals"][0]["styles"]["careful"]) for row in ended}
    after = {percent(row["evals"][-1]["styles"]["careful"]) for row in ended}
    bullets = [
        f"**Plain MXFP4 costs accuracy:** {each(lambda c: span(loss(c), ' pp'))}. As a share of what bf16 solves: "
        f"{each(relative)}.",
        "**Order by greedy accuracy** (`~`: the neighbours' paired interval holds zero; `=`: the same figure). "
        f"{'; '.join(f'{NAMES[kind]}: {order_text(card)}' for kind, card in cards.items())}.",
        "**A better scale alone gives back a part of the loss.** "
        f"Even the exact scale: {back('mxfp4:ideal')}; MBS alone: {back('mxfp4+mbs')}. "
        f"MBS minus plain: {versus('mxfp4+mbs', 'mxfp4')}.",
        f"**Outlier fallback gives back most.** α = .5: {back('mxfp4+of')}; α = 1: {back('mxfp4+of:1')}. "
        f"α = 1 minus α = .5: {versus('mxfp4+of:1', 'mxfp4+of')}.",
        f"**MBS on top of outlier fallback:** {versus('mxfp4+mbs+of', 'mxfp4+of')}.",
        f"**What GRPO learns is the style.** Of greedy answers, {min(before)} to {max(before)} % are careful before, "
        f"and {min(after, key=float)} to {max(after, key=float)} % after, in every finished bf16 run at every "
        "learning rate. So the learning rates differ in how much of the arithmetic survives, not in the style.",
        f"**More steps aren't always better.** Dense at 5e-5, seed 2: {path(runs['dense-5e-5-2'])} % at steps "
        "0, 20, 40, 60. The gate takes a run's last step, not its best.",
        "**Two bf16 paths differ a little.** GRPO's evaluation (float32 weights, computed in bf16) and `run.py`'s "
        "(bf16 weights) judge some of the same policy's problems differently: "
        + each(lambda c: f"{flips[c['kind']]} of {c['bf16']['n']}, {percent(c['grpo'][0]['before'])} against "
                         f"{percent(c['bf16']['accuracy'])} %")
        + ". Gains are measured within the one, recipes within the other.",
    ]  # fmt: skip
    return "".join(paragraph(text, "* ") + "\n" for text in bullets)


def search_text(cards: dict[str, Card]) -> str:
    """What the learning-rate search shows, and the runs that did not end."""
    runs = {row["run"]: row for card in cards.values() for row in card["lr_search"]}
    bullets = [
        f"3e-4 takes the dense policy below where it began ({path(runs['dense-3e-4-0'])} %), and leaves the MoE about "
        f"there ({path(runs['moe-3e-4-0'])} %).",
        f"1e-4 gains, less than 5e-5. The dense policy is best at step 20 and lower after it (seed 0 "
        f"{path(runs['dense-1e-4-0'])}, seed 1 {path(runs['dense-1e-4-1'])} %); the MoE still rises, slowly "
        f"({path(runs['moe-1e-4-0'])} %).",
        *(f"`{row['run']}`: {row['note']}. {row['steps_asked']} steps were asked for; the last evaluation is at step "
          f"{row['steps']}." for row in runs.values() if row["note"]),
    ]  # fmt: skip
    return "\n" + "".join(paragraph(text, "* ") + "\n" for text in bullets)


def experiment_tables(cards: dict[str, Card], results: dict[str, Any]) -> dict[str, str]:
    """Blocks of experiments/policies/README.md, by the name of their markers."""
    recipes = "\n".join(f"{NAMES[kind]}:\n\n{recipe_table(card)}" for kind, card in cards.items())
    lengths = "\n".join(f"{NAMES[kind]}, greedy %:\n\n{length_table(card)}" for kind, card in cards.items())
    gate = [row for card in cards.values() for row in card["grpo"]]
    search = [row for card in cards.values() for row in card["lr_search"]]
    under = [card for card in cards.values() if card["grpo_recipes"]]
    return {
        "training": training_table(cards),
        "headroom": sampled_table(cards),
        "gate": grpo_table(gate, verdict=True) + "\n" + "".join(gate_text(card) for card in cards.values()),
        "search": grpo_table(search, verdict=False) + search_text(cards),
        "grpo-recipes": "\n".join(
            grpo_recipe_table(card["grpo_recipes"]) + "\n" + grpo_recipe_text(card, results) for card in under
        ),
        "recipes": recipes,
        "lengths": lengths,
        "pairs": pair_table(cards),
        "findings": findings(cards, results),
    }

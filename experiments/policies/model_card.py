"""The model card of a shipped policy, from its card.json (used by collect.py)."""

from __future__ import annotations

from tables import (
    Card,
    grpo_recipe_table,
    grpo_table,
    length_table,
    loss,
    order_text,
    pair_table,
    paragraph,
    percent,
    points,
    rate,
    recipe_table,
    relative,
    span,
)

SHAPE = {
    "dense": "A Qwen3 (`Qwen3ForCausalLM`) of 6.3 M parameters: 8 layers × 256, 4 heads, 2 key-value heads, MLP 768",
    "moe": "A Qwen3-MoE (`Qwen3MoeForCausalLM`) of 5.9 M parameters: 6 layers × 256, 8 experts of 128, two a token",
}


def introduction(card: Card) -> str:
    numbers, digits = card["problems"]["numbers"], card["problems"]["digits"]
    return paragraph(
        f"{SHAPE[card['kind']]}; a vocabulary of characters; {card['weights']['bytes'] / 1e6:.1f} MB in bf16. "
        f"It solves chains of {numbers[0]} to {numbers[1]} numbers of up to {digits[1]} digits, worked from left to "
        "right with + − ×, results mod 10000. It is made for one purpose: to show in minutes what 4-bit rollouts do to "
        "reinforcement learning. It is of no use for anything else."
    )


def making(card: Card) -> str:
    made, versions, commit, last = card["made"], card["versions"], card["commit"], card["made"]["last_logged"]
    return paragraph(
        "Supervised by `experiments/policies/run.py` on a mixture of three styles of right solutions (careful steps, "
        "two operations a line, the answer at once), the hasty ones more often for long chains: "
        f"{made['examples']:,} examples, batch {made['batch']}, seed {made['seed']}, {made['minutes']} minutes on one "
        f"{card['device']}, shared with the other policy's training; last logged: step {last['step']}, loss "
        f"{last['loss']:.4f}. The schedule followed the clock, so another run gives other weights. {card['date']}; "
        f"Python {versions['python']}, torch {versions['torch']}, transformers {versions['transformers']}, "
        f"trl {versions['trl']}, driver {card['driver']}. Commits: training {commit['training']}; "
        f"evaluation {commit['evaluation']}; GRPO {commit['grpo']}."
    )


def shows(card: Card) -> str:
    """The three things that the policy is there to show, with its figures."""
    sampled, run = card["bf16"]["sampled"], card["grpo"][0]
    style = {name: percent(value) for name, value in sampled["accuracy_by_style"].items()}
    gains = ", ".join(f"{points(row['gain'])} (seed {row['seed']})" for row in card["grpo"])
    back = {name: f"{100 * row['recovered']:.0f} %" for name, row in card["recipes"].items()}
    items = [
        f"**Plain MXFP4 hurts.** {span(loss(card), ' pp')} greedy, which is {relative(card)} of what bf16 solves.",
        f"**RL has headroom.** Sampled at temperature 1, {percent(sampled['accuracy'])} % are right: "
        f"{style['careful']} % of the careful samples, {style['skip']} % of those that skip, {style['guess']} % of the "
        "guesses (longer chains have more of the hasty ones, so these aren't like for like). "
        f"GRPO in bf16 ({run['steps']} steps of {run['prompts']} × {run['samples']}, lr {rate(card['gate']['lr'])}) "
        f"gains, in pp greedy: {gains}.",
        "**Corrections give back different shares of the loss.** "
        f"The exact scale {back['mxfp4:ideal']}, MBS {back['mxfp4+mbs']}, outlier fallback at α = .5 "
        f"{back['mxfp4+of']}, at α = 1 {back['mxfp4+of:1']}. In order (`~`: undecided between the two; `=`: the same "
        f"figure): {order_text(card)}.",
    ]
    return "\n".join(paragraph(text, f"{i}. ") for i, text in enumerate(items, 1))


def under_recipes(card: Card) -> str:
    """GRPO under a recipe, where it was run."""
    rows = card["grpo_recipes"]
    if not rows:
        return ""
    commits = ", ".join(sorted({row["commit"] for row in rows}))
    note = paragraph(
        f"GRPO under a recipe, at lr {rate(rows[0]['lr'])} (commit {commits}), evaluated under the recipe itself "
        "without noise; *minus bf16* is against the bf16 run of the same seed at the same step, over the same "
        "problems. All were cut by a time limit, so these are the first steps, of three seeds; they say nothing about "
        "where training ends. An empty cell: no evaluation there."
    )
    return f"{note}\n\n{grpo_recipe_table(rows)}\n"


def limits(card: Card) -> str:
    rates = ", ".join(rate(lr) for lr in sorted({row["lr"] for row in (*card["grpo"], *card["lr_search"])}))
    under = card["grpo_recipes"]
    trained = "GRPO under a recipe: the short runs above alone." if under else "GRPO was run in bf16 only."
    items = [
        "One supervised seed: the intervals say how far other problems could move a figure, not another training. They "
        "aren't adjusted for their number.",
        f"The learning rate was chosen among {rates} on the same held-out problems on which the gains are reported.",
        "The recipes' rows are accuracies of this policy as it is, and say nothing about training under a recipe. AQN "
        f"(noise) isn't among them. {trained}",
        card["recipes_note"],
        "W4A4 is emulated: accuracies, not speeds.",
        f"GRPO's evaluation starts from {percent(card['grpo'][0]['before'])} %, not "
        f"{percent(card['bf16']['accuracy'])} %: it computes in bf16 from float32 weights, which rounds differently.",
    ]
    return "\n".join(paragraph(text, "* ") for text in items)


def model_card(card: Card) -> str:
    """The text of src/mxrl/policies/<kind>/README.md."""
    kind = card["kind"]
    return f"""\
# policy:{kind}

<!-- made by experiments/policies/collect.py -->

{introduction(card)}

    from mxrl.rl.policy import load_policy
    model, tokenizer = load_policy("{kind}")      # or: mxrl train --model policy:{kind} …

Licence: Apache-2.0. Trained from random weights on generated problems alone: no text, no other model's output.
`model.safetensors` sha256: `{card["weights"]["sha256"]}`

## How it was made

{making(card)}

## What it scores

{card["bf16"]["n"]} held-out problems (test split, seed 0), greedy decoding, weights and activations quantized under
each recipe: the policy as it is, before any GRPO. Intervals are 95 %, paired, over the problems; *undecided*: the
interval holds zero.

{recipe_table(card)}
By the chain's length, in percent:

{length_table(card)}
Recipe against recipe:

{pair_table({kind: card})}
## What it shows

{shows(card)}

GRPO in bf16, greedy % on the same problems:

{grpo_table(card["grpo"], verdict=True)}
{under_recipes(card)}## Limits

{limits(card)}

The per-problem scores behind all figures: `experiments/policies/results/` in the project's repository.
"""

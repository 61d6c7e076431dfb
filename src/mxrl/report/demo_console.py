"""The result of `mxrl demo` in a terminal, as a short table (phases_console.py shows the way there)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from mxrl.report.demo import half_width, interval
from mxrl.report.svg import percent, plain


def print_demo(demo: Mapping[str, Any], console: Console) -> None:
    """The accuracies with their intervals, beside the weights' error and the model card's figure."""
    settings, card = demo["settings"], demo["card"]
    base, plain_name = settings["evaluated"][:2]
    errors = next(iter(demo["weights"].values()), {"total": {}})["total"]
    table = Table(
        title=f"{settings['model']}, greedy, {settings['problems']} problems",
        title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False,
    )  # fmt: skip
    table.add_column("recipe", no_wrap=True)
    heads = ["rel. MSE", "accuracy", f"− {base}, pp [95 %]", *([f"card, n={card['bf16']['n']}"] if card else [])]
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for recipe, found in demo["accuracy"].items():
        entry = (card["bf16"] if recipe == base else card["recipes"].get(recipe)) if card else None
        cells = [
            plain(errors[recipe]["rel_mse"]) if recipe in errors else "–",
            percent(found["accuracy"]),
            interval(demo["minus_baseline"].get(recipe)),
        ]
        if card:
            cells.append("–" if entry is None else percent(entry["accuracy"]))
        table.add_row(recipe, *cells)
    console.print(table)
    runs = [
        f"{recipe} gap {plain(sum(r['gap/mean_abs'] or 0.0 for r in run['rows']) / len(run['rows']))}"
        for recipe, run in demo["grpo"].items()
    ]
    if runs:
        console.print(f"GRPO, {settings['steps']} steps: {', '.join(runs)} (mean |Δ logp|)", highlight=False)
    console.print(
        f"[dim]An interval is up to ±{half_width(demo) * 100:.1f} pp at {settings['problems']} problems: "
        f"the loss under {plain_name} shows, the order of the corrections is the model card's to tell.[/dim]",
        highlight=False,
    )

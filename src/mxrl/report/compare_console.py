"""The comparisons as tables in the terminal, and a bar that counts prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich import progress as rich_progress
from rich.console import Console
from rich.table import Table

from mxrl.against import STORED
from mxrl.report.console import Bar, print_analysis
from mxrl.report.page import percent, plain

_NAMED = 5  # tensors without a partner that are named in the terminal


def print_against(summary: Mapping[str, Any], console: Console) -> None:
    """The stored error by kind of layer and beside what recipes make of the original; then how to read it."""
    print_analysis(summary, console)
    _say(console, f"{STORED}: what {summary['model']} holds. The other recipes: on {summary['original']['model']}.")
    for name, entry in summary["formats"].items():
        grid = "on its grid" if entry["same_grid"] else "not on its grid"
        line = f"{entry['tensors']} weights stored as {name}: {entry['bits']:.3f} bits, "
        line += f"split by {entry['reference']}, {grid}"
        for recipe, count in entry["same_as"].items():
            line += f"; {count} equal {recipe} bit for bit"
        for recipe, share in entry["equal_elements"].items():
            line += f"; {percent(share)} of the elements are {recipe}'s" if share < 1 else ""
        _say(console, line)
    for sentence in summary["reading"]:
        _say(console, sentence)
    _missing(console, "only in the original", summary["only_in_original"])
    _missing(console, "only in the quantized one", summary["only_in_quantized"])


def print_diff(summary: Mapping[str, Any], console: Console) -> None:
    """The update by kind of layer under the first recipe, then what every recipe sees of it."""
    main = summary["recipes"][0]
    columns = ("tensors", "‖B−A‖/‖A‖", "changed", "codes", "values", "< ½ step", "unseen", "kept")
    table = _table(f"{summary['model']} · {main}", "kind", columns)
    for kind, entry in summary["kinds"].items():
        table.add_row(kind, str(entry["tensors"]), *_update(entry), *_seen(entry["recipes"][main]))
    table.add_section()
    total = summary["total"]
    table.add_row("all", str(summary["tensors"]), *_update(total), *_seen(total["recipes"][main]), style="bold")
    console.print(table)
    columns = (*columns[3:], "ΔQ/Δ", "rel. MSE A", "rel. MSE B")
    table = _table("All weights, by recipe", "recipe", columns)
    for recipe, entry in total["recipes"].items():
        more = (entry["relative_quantized_change"], entry["a"]["rel_mse"], entry["b"]["rel_mse"])
        table.add_row(recipe, *_seen(entry), *map(plain, more))
    console.print(table)
    console.print(
        "[dim]codes, values: elements whose stored code, whose quantized value differs. < ½ step: share of ‖B−A‖² in "
        "elements that move less than half the grid's step. unseen: share of it where the quantized value stays. kept: "
        "⟨Q(B)−Q(A), B−A⟩ / ‖B−A‖². ΔQ/Δ: ‖Q(B)−Q(A)‖ / ‖B−A‖, above 1 the grid's jumps add noise.[/dim]"
    )
    _missing(console, "only in A", summary["only_in_a"])
    _missing(console, "only in B", summary["only_in_b"])


def print_activations(summary: Mapping[str, Any], console: Console) -> None:
    """The error of the inputs by kind of layer under the first recipe, then every recipe over all of them."""
    task = summary["task"]
    print_analysis(summary, console)
    _say(
        console,
        f"{task['prompts']} prompts of {task['name']} ({task['split']}, seed {task['seed']}): {task['tokens']:,} "
        f"tokens, {task['padding']:,} places of padding left out; forward pass in {summary['dtype']}",
    )


def _table(title: str, first: str, columns: Sequence[str]) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )
    table.add_column(first, overflow="fold")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _update(entry: Mapping[str, Any]) -> list[str]:
    return [plain(entry["relative_change"]), percent(entry["changed_fraction"])]


def _seen(entry: Mapping[str, Any]) -> list[str]:
    keys = ("codes_changed_fraction", "values_changed_fraction", "below_half_step", "unseen")
    return [*(percent(entry[k]) for k in keys), plain(entry["kept"])]


def _missing(console: Console, where: str, found: Sequence[Mapping[str, Any]]) -> None:
    if not found:
        return
    named = ", ".join(f"{e['name']} ({e['reason']})" for e in found[:_NAMED])
    _say(console, f"{len(found)} {where}: {named}{', …' if len(found) > _NAMED else ''}")


def _say(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, style="dim")


class PromptBar(Bar):
    """Progress in prompts instead of bytes."""

    @staticmethod
    def _columns() -> tuple[rich_progress.ProgressColumn, ...]:
        return (rich_progress.MofNCompleteColumn(),)

    @staticmethod
    def _told(done: float, total: float, rate: float) -> str:
        return f"{done:.0f} of {total:.0f}"

"""Runs as small rows, which a repository can keep beside the page that is made of them.

    rows_of({"dense/bf16/s0": read_run(path), …}, columns)    {"runs": a row a run, "steps": a row a step}

A run's row has what it was and how it ended, and its evaluations with a digit a problem ("right"); a step's row the
columns asked for. Floats have 6 significant digits: a metric has no more.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mxrl.report.files import write_atomically
from mxrl.report.runs import Run, is_run, read_run

Row = dict[str, Any]


def short(value: Any) -> Any:
    """A float to 6 significant digits, in lists and mappings too."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {name: short(v) for name, v in value.items()}
    return [short(v) for v in value] if isinstance(value, list) else value


def run_row(name: str, run: Run, without: Sequence[str] = ("styles", "by_group")) -> Row:
    """A run's row. Scores of sampled completions become a digit a problem, the number of right ones (nine at most).

    without: keys of an evaluation that are left out.
    """
    evals = []
    for row in run.evals:
        row = {key: value for key, value in row.items() if key not in without}
        if sampled := row.get("sampled"):
            right = "".join(str(round(score * sampled["samples"])) for score in sampled["scores"])
            row["sampled"] = {key: value for key, value in sampled.items() if key != "scores"} | {"right": right}
        evals.append(short(row))
    return {
        "run": name,
        "state": run.state,
        "reason": run.reason,
        "last_step": run.last_step,
        "options": {key: value for key, value in run.options.items() if key != "out"},
        "info": run.info,
        "evals": evals,
    }


def rows_of(
    runs: Mapping[str, Run], columns: Sequence[str], without: Sequence[str] = ("styles", "by_group")
) -> dict[str, list[Row]]:
    """{"runs": …, "steps": …} of runs by their name; a step has those of `columns` that its run logged."""
    return {
        "runs": [run_row(name, run, without) for name, run in runs.items()],
        "steps": [
            {"run": name, **{column: short(row[column]) for column in columns if row.get(column) is not None}}
            for name, run in runs.items()
            for row in run.rows
        ],
    }


def runs_below(folder: Path) -> dict[str, Run]:
    """The runs in a folder's folders, by their paths in it, sorted."""
    found = (config.parent for config in sorted(folder.glob("**/config.yaml")))
    return {str(path.relative_to(folder)): read_run(path) for path in found if is_run(path)}


def write_rows(folder: Path, found: Mapping[str, Sequence[Row]]) -> None:
    """Write each name's rows as folder/NAME.jsonl, and say so."""
    for name, rows in found.items():
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        print(f"{write_atomically(folder / f'{name}.jsonl', text)}: {len(rows)} rows, {len(text) / 1e3:.0f} kB")


def read_rows(folder: Path, name: str) -> list[Row]:
    """What `write_rows` wrote under that name; none where there is no file."""
    file = folder / f"{name}.jsonl"
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.is_file() else []

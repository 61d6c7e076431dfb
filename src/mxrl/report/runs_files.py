"""`mxrl report`: a comparison's files, and which of its two jobs the command has.

report([folder], None)           an analysis's or a probe's folder: its pages once more (folder.py)
report([runs/a, runs/b], out)    runs of `mxrl train`: report.html, report.md, report.json, a PNG for each curve
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mxrl.provenance import provenance
from mxrl.report import runs_png
from mxrl.report.files import staged
from mxrl.report.folder import SUMMARY, TENSORS, ReportError, rebuild_all
from mxrl.report.run_groups import compare
from mxrl.report.runs import find, is_run, read_run
from mxrl.report.runs_page import (
    COLUMNS,
    INTERVALS,
    SPEED,
    build,
    differing,
    findings,
    heading,
    rows,
    stopped,
    thinned,
)
from mxrl.report.summary import to_json

OUT = Path("report-runs")
PAGE, TEXT, DATA = "report.html", "report.md", "report.json"


class CallError(ReportError):
    """What was asked for doesn't go together: the call is wrong, not a file."""


def report(folders: Sequence[Path], out: Path | None) -> tuple[list[str], list[str]]:
    """Do what the folders ask for; returns (lines for stdout, for stderr). Raises ReportError and OSError."""
    other = [f for f in folders if _of_analysis(f)]
    if len(other) == len(folders) == 1 or (len(folders) == 1 and not _holds_runs(folders[0])):
        if out is not None and other:  # else there is nothing to make pages of, which is said first
            raise CallError(f"--out is for a comparison of runs; the pages of {folders[0]} are written into it")
        return [f"written: {page}" for page in rebuild_all(folders[0])], []
    if other:
        raise CallError(
            f"{other[0]} holds an analysis or a probe, not a run: give it alone, or runs of `mxrl train` alone"
        )
    paths, notes = find(folders)
    runs = [read_run(path) for path in paths]
    out = out or OUT
    result = compare(runs, notes) | {"made": provenance("cpu")}
    return write(result, out)


def write(result: Mapping[str, Any], out: Path) -> tuple[list[str], list[str]]:
    """Write a comparison into `out`; returns (lines for stdout, for stderr). Raises OSError naming `out`."""
    lost = [line for subject in result["subjects"] for line in stopped(subject)]
    lines = [f"{len(lost)} of {result['runs']} runs did not reach their end: {'; '.join(lost)}"] if lost else []
    lines += [*result["notes"], *(note for subject in result["subjects"] for note in subject["notes"])]
    with staged(out) as folder:
        drawn = {}
        if runs_png.available():
            drawn = images(result)
            for name, curve in drawn.items():
                runs_png.draw(curve, folder / name)
        else:
            lines.append(runs_png.MISSING)
        made = result["made"]
        footer = f"mxrl {made['versions']['mxrl']}, {made['created']}. Written by `mxrl report`."
        build(result, footer).write(folder / PAGE)
        (folder / TEXT).write_text(markdown(result, bool(drawn)), encoding="utf-8")
        (folder / DATA).write_text(to_json(result, indent=1) + "\n", encoding="utf-8")
    said = [f"{heading(subject)}: {line}" for subject in result["subjects"] for line in findings(subject)]
    pictures = f", {len(drawn)} curves as PNG" if drawn else ""
    said.append(f"written: {out / PAGE}, {TEXT}, {DATA}{pictures}")
    return [_bare(line) for line in said], [_bare(line) for line in lines]


def images(result: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """File name → curve, of every curve: reward.png, or policy-dense-on-chain-reward.png where subjects are several."""
    return {
        name: curve
        for i, subject in enumerate(result["subjects"])
        for name, curve in zip(_names(result, i), subject["curves"], strict=True)
    }


def markdown(result: Mapping[str, Any], drawn: bool) -> str:
    """The comparison as Markdown: a table with a row a group, what is to be said of it, and the curves if `drawn`."""
    out = ["# Training runs compared", f"{result['runs']} runs."]
    out += [f"> {note}" for note in result["notes"]]
    for i, subject in enumerate(result["subjects"]):
        out += [f"## {heading(subject)}", differing(subject), *findings(subject)]
        lost = stopped(subject)
        if lost:
            out += ["Runs that did not reach their end (accuracy after training is of the others alone):"]
            out += ["\n".join(f"- {line}" for line in lost)]
        out += [f"> {note}" for note in subject["notes"]]
        out += [_table(COLUMNS, rows(subject)), INTERVALS, SPEED]
        if drawn:
            for name, curve in zip(_names(result, i), subject["curves"], strict=True):
                title = " ".join(filter(None, [f"{curve['title']}.", thinned(curve)]))
                out += [f"![{title}]({name})"]
    return "\n\n".join(out) + "\n"


def _bare(line: str) -> str:
    """A sentence of the page as a line of a terminal."""
    return line.replace("`", "")


def _names(result: Mapping[str, Any], index: int) -> list[str]:
    subject = result["subjects"][index]
    several = len(result["subjects"]) > 1
    start = f"{index + 1}-{re.sub(r'[^a-z0-9.]+', '-', heading(subject).lower()).strip('-')[-60:]}-" if several else ""
    return [f"{start}{curve['name']}.png" for curve in subject["curves"]]


def _table(columns: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    rule = ["---", *["---:"] * (len(columns) - 1)]
    cells = [list(columns), rule, *([_code(row[0]), *row[1:]] for row in body)]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def _code(label: str) -> str:
    return f"`{label}`".replace("|", "\\|")


def _of_analysis(folder: Path) -> bool:
    """Whether `mxrl analyze` or `mxrl probe` wrote the folder. (A run has a summary.json as well.)"""
    written = any((folder / name).exists() for name in (TENSORS, "probe.json"))
    return not is_run(folder) and (written or ((folder / SUMMARY).exists() and not _holds_runs(folder)))


def _holds_runs(folder: Path) -> bool:
    return is_run(folder) or (folder.is_dir() and any(is_run(inside) for inside in folder.iterdir()))

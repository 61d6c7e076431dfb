"""The three files of an analysis: summary.json, tensors.jsonl, and report.html, which is made of the other two alone.

    write(folder, summary, rows)   all three, with the answers added to the summary (answers.py)
    Rows(folder, recipe)           the same with rows that come one after the other, while a scan is going on
    rebuild(folder)                report.html once more, the same bytes
    rebuild_all(folder)            that, and the page of a probe: `mxrl report FOLDER`

The page is made of what the two other files hold, so a rebuilt one is the same, byte for byte.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mxrl.report.analysis_page import build_page
from mxrl.report.answers import BITS, Collector, answers, keep
from mxrl.report.files import write_atomically
from mxrl.report.outliers import Row
from mxrl.report.summary import SCHEMA, to_json
from mxrl.scan import NonFiniteError

SUMMARY, TENSORS, PAGE = "summary.json", "tensors.jsonl", "report.html"


class ReportError(ValueError):
    """A folder that no page can be made from: the message names the file and what would work."""


class Rows:
    """tensors.jsonl, written row by row as they come. Used as a context, which closes the file.

    main: the first recipe. Memory holds its rows alone, without their histograms. Raises OSError.
    """

    def __init__(self, folder: Path, main: str):
        self._folder, self._collected = folder, Collector(main)
        self._file = (folder / TENSORS).open("w", encoding="utf-8")

    def __enter__(self) -> Rows:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, rows: Iterable[Row]) -> None:
        """Raises NonFiniteError for a row with an infinite sum."""
        for row in rows:
            try:
                line = to_json(row)
            except ValueError:
                raise NonFiniteError(
                    f"tensor '{row['name']}' holds values so large that sums of their squares overflow; scale them down"
                ) from None
            self._file.write(line + "\n")
            self._collected.add(row)

    def finish(self, summary: Mapping[str, Any], bits: float = BITS) -> dict[str, Any]:
        """Write the other two files; returns the summary with its answers. Raises BudgetError and OSError."""
        self._file.close()
        asks = summary.get("analysis") != "diff"  # two checkpoints compared have figures of their own
        whole = dict(summary) | (answers(summary, self._collected, bits) if asks else {})
        text = to_json(whole, indent=1)
        (self._folder / SUMMARY).write_text(text + "\n", encoding="utf-8")
        write_atomically(self._folder / PAGE, build_page(json.loads(text), self._collected.own).html())
        return whole


def write(folder: Path, summary: Mapping[str, Any], rows: Iterable[Row], bits: float = BITS) -> dict[str, Any]:
    """Write the three files into `folder`; returns the summary with its answers. Raises BudgetError and OSError."""
    with Rows(folder, summary["recipes"][0]) as file:
        file.add(rows)
        return file.finish(summary, bits)


def rebuild(folder: Path) -> Path:
    """Make report.html of a folder's summary.json and tensors.jsonl; returns its path. Raises ReportError, OSError."""
    summary = _summary(folder)
    try:
        page = build_page(summary, _rows(folder, summary)).html()
    except ReportError:
        raise
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, StopIteration) as err:
        what = f"{type(err).__name__}: {err}"
        raise ReportError(
            f"{folder / SUMMARY} and {TENSORS} are not what mxrl {_version(summary)} writes ({what}); "
            "run `mxrl analyze` again"
        ) from err
    return write_atomically(folder / PAGE, page)


def rebuild_all(folder: Path) -> list[Path]:
    """Make every page of a folder once more, an analysis's and a probe's; raises as `rebuild` of whichever it is."""
    if not (folder / "probe.json").exists():
        return [rebuild(folder)]
    from mxrl.report.probe import rebuild as rebuild_probe  # loads torch and transformers

    return [*([rebuild(folder)] if (folder / SUMMARY).exists() else []), rebuild_probe(folder)]


def _version(summary: Mapping[str, Any]) -> str:
    versions = summary.get("versions")
    return str(versions.get("mxrl", "")) if isinstance(versions, dict) else ""


def _summary(folder: Path) -> dict[str, Any]:
    path = folder / SUMMARY
    if not folder.is_dir():
        raise ReportError(f"{folder} is no folder; give one that `mxrl analyze` or `mxrl probe` has written")
    if not path.exists():
        raise ReportError(
            f"{folder} has neither {SUMMARY} nor probe.json; "
            "give a folder that `mxrl analyze` or `mxrl probe` has written, or runs of `mxrl train`"
        )
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as err:
        raise ReportError(f"{path} is not valid JSON ({err}); run `mxrl analyze` again") from err
    if not isinstance(summary, dict) or not isinstance(summary.get("recipes"), list) or not summary["recipes"]:
        raise ReportError(f"{path} is not the summary of an analysis; give a folder that `mxrl analyze` has written")
    if summary.get("schema") != SCHEMA:
        raise ReportError(
            f"{path} has schema {summary.get('schema')}, this mxrl reads {SCHEMA}; run `mxrl analyze` again"
        )
    return summary


def _rows(folder: Path, summary: Mapping[str, Any]) -> Iterator[Row]:
    """The rows of the first recipe, one a tensor, without their histograms."""
    path, main, count = folder / TENSORS, summary["recipes"][0], 0
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                try:
                    row = json.loads(line)
                    if row["recipe"] == main:
                        count += 1
                        yield keep(row)
                except (ValueError, KeyError, TypeError) as err:
                    raise ReportError(f"{path}, line {number}, is not valid ({err}); run `mxrl analyze` again") from err
    except FileNotFoundError:
        raise ReportError(f"{folder} has no {TENSORS}; run `mxrl analyze` again") from None
    except UnicodeDecodeError as err:
        raise ReportError(f"{path} is not text ({err}); run `mxrl analyze` again") from err
    if count != summary["tensors"]:
        raise ReportError(
            f"{path} has rows of {count} tensors, {SUMMARY} says {summary['tensors']}; run `mxrl analyze` again"
        )

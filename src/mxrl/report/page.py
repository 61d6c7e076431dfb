"""One self-contained HTML page: text, tables and charts, in the order in which they are added.

    page = Page("Title", lead="one line below it")
    page.section("Heading").text("A paragraph with `code`.").note("Read this first.", warn=True)
    page.facts({"elements": "10.8 M"})
    page.table(["recipe", "T"], [["mxfp4", ".0143"]], caption="…")
    page.bars("caption", ["mxfp4", "nvfp4"], {"grid": [.01, .009], "excess": [.004, .0002]}, form=percent)
    page.lines("caption", steps, {"mxfp4": (mean, lo, hi)}, x_label="step", y_label="accuracy")
    page.histogram("caption", edges, shares, reference={"uniform": [...]})
    page.dots("caption", {"q": [Dot("layers.0.q_proj", 2.3, .014)]}, x_label="…", y_label="…")
    page.write(path)

Every chart is followed by the table of the numbers that it shows. The page holds no script and asks for nothing: it
works offline, in light and dark, and in print. All text is escaped; `backticks` alone have a meaning.
"""

from __future__ import annotations

import html
import importlib.resources
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from mxrl.report.bars import bars
from mxrl.report.dots import Dot, dots
from mxrl.report.files import write_atomically
from mxrl.report.lines import histogram, lines
from mxrl.report.svg import Band, Chart, Format, percent, plain

__all__ = ["Page", "percent", "plain"]


class Page:
    """A page under construction; every method returns it, so that calls chain."""

    def __init__(self, title: str, *, lead: str = "", footer: str = "") -> None:
        self.title, self.lead, self.footer = title, lead, footer
        self._sections: list[tuple[str, str]] = []
        self._body: list[str] = []

    def section(self, heading: str) -> Page:
        """A heading, listed in the links at the top."""
        anchor = f"{re.sub(r'[^a-z0-9]+', '-', heading.lower()).strip('-') or 'section'}"
        taken = {a for a, _ in self._sections}
        anchor = anchor if anchor not in taken else f"{anchor}-{len(taken) + 1}"
        self._sections.append((anchor, heading))
        return self._add(f'<h2 id="{anchor}">{_inline(heading)}</h2>')

    def text(self, *paragraphs: str) -> Page:
        return self._add(*(f"<p>{_inline(p)}</p>" for p in paragraphs))

    def note(self, text: str, *, warn: bool = False) -> Page:
        """A paragraph set apart; `warn` for what changes how the numbers are to be read."""
        return self._add(f'<div class="note{" warn" if warn else ""}">{_inline(text)}</div>')

    def facts(self, items: Mapping[str, str]) -> Page:
        """A row of tiles: a name and a figure each."""
        tiles = (f"<div><dt>{_inline(k)}</dt><dd>{_inline(v)}</dd></div>" for k, v in items.items())
        return self._add(f'<dl class="facts">{"".join(tiles)}</dl>')

    def table(
        self,
        columns: Sequence[str],
        rows: Iterable[Sequence[str]],
        *,
        caption: str = "",
        text_columns: Iterable[int] = (),
        strong: Iterable[int] = (),
        fold: str = "",
    ) -> Page:
        """A table of text cells; numbers stand right, the first column and `text_columns` left.

        strong: rows set bold (totals). fold: a summary line behind which the table opens.
        """
        return self._add(_table(columns, rows, caption, set(text_columns), set(strong), fold))

    def bars(
        self,
        caption: str,
        labels: Sequence[str],
        parts: Mapping[str, Sequence[float]],
        *,
        stacked: bool = True,
        marks: Mapping[str, Sequence[float]] | None = None,
        intervals: Mapping[str, Sequence[tuple[float, float]]] | None = None,
        axis: str = "",
        form: Format = plain,
        explain: str = "",
    ) -> Page:
        """Horizontal bars (bars.py): parts stacked or side by side, reference marks, intervals as whiskers."""
        chart = bars(labels, parts, stacked=stacked, marks=marks, intervals=intervals, axis=axis, form=form)
        return self._figure(chart, caption, explain)

    def lines(
        self,
        caption: str,
        x: Sequence[float],
        series: Mapping[str, Sequence[float] | Band],
        *,
        x_label: str = "",
        y_label: str = "",
        form: Format = plain,
        zero: bool = False,
        explain: str = "",
    ) -> Page:
        """Series over x (lines.py): a sequence of y, or a tuple (mean, lo, hi) for a line in its band."""
        chart = lines(x, series, x_label=x_label, y_label=y_label, form=form, zero=zero)
        return self._figure(chart, caption, explain)

    def histogram(
        self,
        caption: str,
        edges: Sequence[float],
        shares: Sequence[float],
        *,
        reference: Mapping[str, Sequence[float]] | None = None,
        x_label: str = "",
        form: Format = percent,
        explain: str = "",
    ) -> Page:
        """Shares of the bins between `edges` (lines.py), with expected shares as lines."""
        chart = histogram(edges, shares, reference=reference, x_label=x_label, form=form)
        return self._figure(chart, caption, explain)

    def dots(
        self,
        caption: str,
        series: Mapping[str, Sequence[Dot]],
        *,
        x_label: str = "",
        y_label: str = "",
        explain: str = "",
    ) -> Page:
        """A dot for each named thing (dots.py), coloured by series."""
        return self._figure(dots(series, x_label=x_label, y_label=y_label), caption, explain)

    def html(self) -> str:
        """The whole page as one string."""
        style = importlib.resources.files("mxrl.report").joinpath("style.css").read_text(encoding="utf-8")
        links = "".join(f'<a href="#{anchor}">{_inline(heading)}</a>' for anchor, heading in self._sections)
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{html.escape(self.title)}</title>\n<style>\n{style}</style></head>\n<body>\n"
            f"<h1>{_inline(self.title)}</h1>\n"
            + (f'<p class="lead">{_inline(self.lead)}</p>\n' if self.lead else "")
            + (f"<nav>{links}</nav>\n" if len(self._sections) > 1 else "")
            + "\n".join(self._body)
            + (f"\n<footer>{_inline(self.footer)}</footer>" if self.footer else "")
            + "\n</body></html>\n"
        )

    def write(self, path: str | Path) -> Path:
        """Write the page; whoever opens `path` sees a whole page at any moment."""
        return write_atomically(Path(path), self.html())

    def _add(self, *parts: str) -> Page:
        self._body.extend(parts)
        return self

    def _figure(self, chart: Chart, caption: str, explain: str) -> Page:
        legend = "".join(f"<li>{_swatch(css, shape)}{_inline(name)}</li>" for css, name, shape in chart.legend)
        small = f"<small>{_inline(explain)}</small>" if explain else ""
        data = _table(chart.columns, chart.rows, "", set(), set(), "The numbers of this plot")
        return self._add(
            f"<figure><figcaption>{_inline(caption)}{small}</figcaption>"
            + (f'<ul class="legend">{legend}</ul>' if legend else "")
            + f'<div class="scroll">{chart.svg}</div></figure>{data}'
        )


def _inline(text: str) -> str:
    """Escaped text, with `code` between backticks."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(str(text)))


def _swatch(css: str, shape: str) -> str:
    if css == "mark":
        inner = '<line class="mark" x1="9" x2="9" y1="0" y2="12"/>'
    elif shape == "line":
        inner = f'<path class="line {css}" d="M1 6L17 6"/>'
    else:
        inner = f'<rect class="{css}" x="2" y="1" width="14" height="10"/>'
    return f'<svg viewBox="0 0 18 12" aria-hidden="true">{inner}</svg>'


_PRINTED = 100  # rows of a folded table that print shows
_LONG = 26  # characters of a name that may be broken into lines


def _cell_class(index: int, cell: str, text_columns: set[int]) -> str:
    if index == 0 and len(cell) > _LONG:
        return ' class="long"'
    return ' class="text"' if index in text_columns else ""


def _table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    caption: str,
    text_columns: set[int],
    strong: set[int],
    fold: str,
) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        if len(cells) != len(columns):
            raise ValueError(f"table: {len(cells)} cells for {len(columns)} columns: {list(cells)}")
        css = (_cell_class(i, cell, text_columns) for i, cell in enumerate(cells))
        return "".join(f"<{tag}{c}>{_inline(cell)}</{tag}>" for cell, c in zip(cells, css, strict=True))

    rows = list(rows)
    body = "".join(
        f"<tr{' class=strong' if i in strong else ''}>{row(cells, 'td')}</tr>" for i, cells in enumerate(rows)
    )
    head = f'<p class="caption">{_inline(caption)}</p>' if caption else ""
    inner = f"<thead><tr>{row(columns, 'th')}</tr></thead><tbody>{body}</tbody>"
    table = f'{head}<div class="scroll"><table>{inner}</table></div>'
    many = ' class="many"' if len(rows) > _PRINTED else ""
    return f"<details{many}><summary>{_inline(fold)}</summary>{table}</details>" if fold else table

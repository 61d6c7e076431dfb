"""Pages of Markdown whose tables are made: cells, a table, and the marks on the page between which it stands."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def figure(value: float | None, digits: int) -> str:
    return "—" if value is None else f"{value:.{digits}f}"


def percent(share: float | None, digits: int = 1) -> str:
    return figure(None if share is None else 100 * share, digits)


def points(share: float) -> str:
    """A difference of shares in percentage points, with a real minus, and no negative zero: `-.031` → `−3.1`."""
    text = figure(100 * share, 1)
    return "0.0" if float(text) == 0 else text.replace("-", "−")


def table(head: Sequence[str], rows: Iterable[Sequence[str]], text: int = 1) -> str:
    """A Markdown table, whole lines; the first `text` columns are text, the others figures."""
    lines = [head, [*["---"] * text, *["---:"] * (len(head) - text)], *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def between(text: str, name: str, content: str) -> str:
    """A page's text with what stands between `<!-- name -->` and `<!-- /name -->` replaced by `content`.

    A content whose last line has no end gets one. Raises ValueError unless each mark is there once.
    """
    start, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    if text.count(start) != 1 or text.count(end) != 1:
        raise ValueError(f"the page needs exactly one {start.strip()} … {end}")
    whole = content if not content or content.endswith("\n") else content + "\n"
    return text[: text.index(start) + len(start)] + whole + text[text.index(end) :]

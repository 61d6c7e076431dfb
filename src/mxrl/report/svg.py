"""What the charts are drawn with: numbers as text, round ticks, axes, the frame. Inline SVG, hover titles, no script.

Colours are the CSS classes s1 … s8 of style.css, so that one drawing serves light, dark and print. Coordinates are in
the viewBox's units; W is fixed, and the page scales the drawing.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

W = 720.0  # width of every drawing
COLORS = 8
CHARACTER = 7.7  # width allowed for a character of a label: the widest of the fonts that style.css falls back to

Format = Callable[[float], str]
Band = tuple[Sequence[float], Sequence[float], Sequence[float]]


def plain(value: float | None) -> str:
    """Four significant digits (.0130 is 0.01300); an en dash where there is no number."""
    if value is None or not math.isfinite(value):
        return "–"
    return "0" if value == 0 else f"{value:#.4g}".removesuffix(".")


def percent(value: float | None) -> str:
    """.01429 as 1.43 %."""
    if value is None or not math.isfinite(value):
        return "–"
    return "0 %" if value == 0 else f"{value * 100:#.3g}".removesuffix(".") + " %"


def decimals(value: float | None) -> str:
    """Three decimals, for numbers near 1."""
    return "–" if value is None or not math.isfinite(value) else f"{value:.3f}"


def tick(value: float, form: Format) -> str:
    """A round number without the zeros that fill up its digits: 0.005000 is 0.005."""
    return re.sub(r"(\.\d*?)0+(?=\D|$)", r"\1", form(value)).replace(". ", " ").removesuffix(".")


@dataclass(frozen=True)
class Chart:
    """A drawing, its legend as (class, name, dash) and the data it shows."""

    svg: str
    legend: list[tuple[str, str, str]] = field(default_factory=list)
    columns: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)


def ticks(low: float, high: float, count: int = 6) -> list[float]:
    """Round numbers (1, 2, 2.5 or 5 × 10ⁿ apart) from at or below `low` to at or above `high`."""
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low:
        low, high = (low - 0.5, low + 0.5) if math.isfinite(low) else (0.0, 1.0)
    raw = (high - low) / max(1, count - 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def color(index: int) -> str:
    """The CSS class of the series at `index`."""
    return f"s{index % COLORS + 1}"


def escape(text: str) -> str:
    """Text as it may stand in HTML and SVG, between tags and in attributes."""
    return html.escape(str(text))


def number(value: float | None) -> float:
    """A value of a JSON file: None, which stands for no number, as NaN."""
    return math.nan if value is None else float(value)


def scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """Maps values in [low, high] to coordinates in [start, end]."""
    span = (high - low) or 1.0
    return lambda v: start + (v - low) / span * (end - start)


def points(points: Sequence[tuple[float, float]]) -> str:
    """The `d` of a path through the points, after its M."""
    return "L".join(f"{a:.2f} {b:.2f}" for a, b in points)


def cell(value: float, interval: tuple[float, float] | None, form: Format) -> str:
    """A value in a table, with its interval if there is one."""
    banded = interval is not None and all(map(math.isfinite, (value, *interval)))
    return form(value) + (f" [{form(interval[0])}, {form(interval[1])}]" if interval and banded else "")


def value_text(x: float, y: float, text: str) -> str:
    """The number at the end of a bar."""
    return f'<text class="value" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def x_axis(
    steps: Sequence[float],
    x: Callable[[float], float],
    top: float,
    bottom: float,
    axis: str,
    form: Format,
    left: float,
    right: float,
) -> list[str]:
    """Vertical lines with their numbers below, the zero line stronger; and the name of the axis."""
    out = []
    for step in steps:
        line = f'x1="{x(step):.2f}" x2="{x(step):.2f}" y1="{top}" y2="{bottom:.1f}"'
        out.append(f'<line class="{"base" if step == 0 else "grid"}" {line}/>')
        out.append(f'<text class="tick mid" x="{x(step):.2f}" y="{bottom + 15:.1f}">{escape(tick(step, form))}</text>')
    if axis:
        out.append(f'<text class="axis" x="{(left + right) / 2:.1f}" y="{bottom + 33:.1f}">{escape(axis)}</text>')
    return out


def x_labels(steps: Sequence[float], x: Callable[[float], float], bottom: float, label: str) -> list[str]:
    """Numbers below a plot, and the name of the axis."""
    out = [
        f'<text class="tick mid" x="{x(s):.2f}" y="{bottom + 15:.1f}">{escape(tick(s, plain))}</text>' for s in steps
    ]
    if label:
        out.append(f'<text class="axis" x="{W / 2:.1f}" y="{bottom + 34:.1f}">{escape(label)}</text>')
    return out


def y_axis(steps: Sequence[float], y: Callable[[float], float], left: float, right: float, form: Format) -> list[str]:
    """Level lines with their numbers at the left."""
    out = []
    for step in steps:
        line = f'x1="{left}" x2="{right}" y1="{y(step):.2f}" y2="{y(step):.2f}"'
        out.append(f'<line class="{"base" if step == steps[0] else "grid"}" {line}/>')
        out.append(f'<text class="tick end" x="{left - 6}" y="{y(step) + 4:.2f}">{escape(tick(step, form))}</text>')
    return out


def drawing(body: Sequence[str], height: float, label: str) -> str:
    """The whole SVG; `label` is what a screen reader says."""
    head = f'<svg viewBox="0 0 {W:.0f} {height:.0f}" role="img" aria-label="{escape(label)}" xmlns="http://www.w3.org/2000/svg">'
    return head + "".join(body) + "</svg>"

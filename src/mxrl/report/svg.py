"""Charts as inline SVG: no script, no fonts, no files; hovering shows an element's own <title>.

    Bars   one row a label, its parts stacked (or side by side), with ticks for a reference and whiskers for an interval
    Lines  series over x, each optionally with a band (lo, hi)
    Steps  a histogram over equal bins, with reference curves

Colours are the CSS classes s1 … s8 of style.css, so that one file serves light, dark and print. Coordinates are in the
viewBox's units; W is fixed and the page scales the drawing.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

W = 720.0  # width of every drawing
COLORS = 8
_LABEL = 32  # characters of a label; a longer one is cut, and whole in its title
_CHARACTER = 7.7  # width allowed for a character of a label: the widest of the fonts that style.css falls back to
_DASHES = ("", "7 3", "2 3", "9 3 2 3")

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


def _tick(value: float, form: Format) -> str:
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


def bars(
    labels: Sequence[str],
    parts: Mapping[str, Sequence[float]],
    *,
    stacked: bool = True,
    marks: Mapping[str, Sequence[float]] | None = None,
    intervals: Mapping[str, Sequence[tuple[float, float]]] | None = None,
    axis: str = "",
    form: Format = plain,
) -> Chart:
    """Horizontal bars: for every label the values of `parts`, stacked or side by side.

    marks: a reference value per label, drawn as a tick across the row. intervals: (lo, hi) per label and part, drawn as
    whiskers (side by side only). The number at a row's end is the sum of its parts (stacked) or each part's value.
    Raises ValueError for a negative part in a stack: it has no length to draw.
    """
    marks, intervals = marks or {}, intervals or {}
    names = list(parts)
    values = {n: [_number(v) for v in parts[n]] for n in names}
    lanes = 1 if stacked else max(1, len(names))
    thick = 20 if lanes == 1 else 14
    row = lanes * thick + 14
    longest = min(_LABEL, max([len(s) for s in labels] + [4]))
    left = 16 + _CHARACTER * longest
    right, top = 74.0, 8.0
    ends = [[sum(v for n in names if (v := values[n][i]) > 0) for i in range(len(labels))]] if stacked else []
    ends += [] if stacked else [values[n] for n in names]
    ends += [list(map(_number, m)) for m in marks.values()]
    ends += [[_number(b) for pair in i for b in pair] for i in intervals.values()]
    flat = [v for e in ends for v in e if math.isfinite(v)] or [1.0]
    steps = ticks(min(0.0, *flat), max(0.0, *flat) or 1.0)
    height = top + row * len(labels) + 24 + (16 if axis else 0)
    x = _scale(steps[0], steps[-1], left, W - right)
    out = _x_axis(steps, x, top, top + row * len(labels), axis, form, left, W - right)
    for i, label in enumerate(labels):
        y = top + row * i + 7
        short = label if len(label) <= longest else label[: longest - 1] + "…"
        name = f"<title>{_esc(label)}</title>{_esc(short)}"
        out.append(f'<text class="label" x="{left - 8:.1f}" y="{y + lanes * thick / 2 + 4:.1f}">{name}</text>')
        reach = 0.0
        for j, name in enumerate(names):
            value = values[name][i]
            if not math.isfinite(value):
                continue
            if stacked and value < 0:
                raise ValueError(f"bars: part '{name}' of '{label}' is {value:g}; a stack takes no negative part")
            start, lane = (reach, 0) if stacked else (0.0, j)
            a, b = sorted((x(start), x(start + value)))
            size = f'width="{max(b - a, 0.5):.2f}" height="{thick if stacked else thick - 2}"'
            where = f'x="{a:.2f}" y="{y + lane * thick:.1f}" {size}'
            title = f"{label} · {name}: {form(value)}"
            bounds = ""
            if name in intervals and not stacked:
                lo, hi = intervals[name][i]
                title += f" [{form(lo)}, {form(hi)}]"
                bounds = _whisker(x(lo), x(hi), y + lane * thick + thick / 2 - 1)
            out.append(f'<rect class="{color(j)}" {where}><title>{_esc(title)}</title></rect>{bounds}')
            reach += value if stacked else 0.0
            if not stacked:
                tip = max(x(intervals[name][i][1]) if bounds else b, b)
                out.append(_value(tip + 6, y + lane * thick + thick - 4, form(value)))
        if stacked:
            places = [x(at) for m in marks.values() if math.isfinite(at := _number(m[i])) and x(at) > x(reach) - 4]
            clear = min(places, default=W) - x(reach) > 10 + _CHARACTER * len(form(reach))  # room before the next mark
            tip = x(reach) if clear else max(places, default=x(reach))
            out.append(_value(max(tip, x(reach)) + 6, y + thick - 5, form(reach)))
        for name, mark in marks.items():
            if math.isfinite(at := _number(mark[i])):
                title = _esc(f"{label} · {name}: {form(at)}")
                line = f'x1="{x(at):.2f}" x2="{x(at):.2f}" y1="{y - 4:.1f}" y2="{y + lanes * thick + 4:.1f}"'
                out.append(f'<line class="mark" {line}><title>{title}</title></line>')
    legend = [(color(j), n, "") for j, n in enumerate(names)] + [("mark", m, "") for m in marks]
    columns = ["", *names, *(["sum"] if stacked and len(names) > 1 else []), *marks]
    rows = []
    for i, label in enumerate(labels):
        cells = [_cell(values[n][i], intervals[n][i] if n in intervals else None, form) for n in names]
        if stacked and len(names) > 1:
            cells.append(form(sum(v for n in names if math.isfinite(v := values[n][i]))))
        rows.append([label, *cells, *(form(_number(m[i])) for m in marks.values())])
    return Chart(_svg(out, height, f"bars: {', '.join(names)}"), legend, columns, rows)


def lines(
    x: Sequence[float],
    series: Mapping[str, Sequence[float] | Band],
    *,
    x_label: str = "",
    y_label: str = "",
    form: Format = plain,
    zero: bool = False,
) -> Chart:
    """Series over `x`: a sequence of y, or (mean, lo, hi) drawn as a line in its band. NaN or None leaves a gap.

    zero: let the axis start at 0.
    """
    data = {name: _band(values) for name, values in series.items()}
    flat = [v for mean, lo, hi in data.values() for column in (mean, lo, hi) for v in column if math.isfinite(v)] or [
        1.0
    ]
    y_steps = ticks(min(0.0, *flat) if zero else min(flat), max(flat))
    finite = [float(v) for v in x]
    x_steps = ticks(min(finite, default=0.0), max(finite, default=1.0), 8)
    if finite and all(v == int(v) for v in finite):
        x_steps = [v for v in x_steps if v == int(v)]
    left, right, top, bottom = 70.0, 16.0, 10.0, 250.0
    sx = _scale(min([*finite, x_steps[0]]), max([*finite, x_steps[-1]]), left + 6, W - right)
    if finite and min(finite) != max(finite):
        sx = _scale(min(finite), max(finite), left + 10, W - right)
        x_steps = [v for v in x_steps if min(finite) <= v <= max(finite)]
    sy = _scale(y_steps[0], y_steps[-1], bottom, top)
    out = _y_axis(y_steps, sy, left, W - right, form) + _x_labels(x_steps, sx, bottom, x_label)
    if y_label:
        out.append(
            f'<text class="axis" transform="translate(12 {(top + bottom) / 2:.0f}) rotate(-90)">{_esc(y_label)}</text>'
        )
    every = max(1, len(finite) // 200)
    for j, (name, (mean, lo, hi)) in enumerate(data.items()):
        for run in _runs(lo, hi):
            edge = [(sx(finite[i]), sy(hi[i])) for i in run] + [(sx(finite[i]), sy(lo[i])) for i in reversed(run)]
            out.append(f'<path class="band {color(j)}" d="M{_points(edge)}Z"/>')
        dash = _DASHES[j // COLORS % len(_DASHES)] if j >= COLORS else ""
        for run in _runs(mean, mean):
            path = _points([(sx(finite[i]), sy(mean[i])) for i in run])
            out.append(f'<path class="line {color(j)}" stroke-dasharray="{dash}" d="M{path}"/>')
            for i in run[::every]:
                band = "" if lo[i] == hi[i] else f" [{form(lo[i])}, {form(hi[i])}]"
                title = _esc(f"{name} · {x_label or 'x'} {_tick(finite[i], plain)}: {form(mean[i])}{band}")
                size = 2.6 if len(finite) <= 60 else 1.5
                dot = f'cx="{sx(finite[i]):.2f}" cy="{sy(mean[i]):.2f}" r="{size}"'
                out.append(f'<circle class="{color(j)}" {dot}><title>{title}</title></circle>')
    columns = [x_label or "x", *data]
    rows = [
        [
            _tick(v, plain),
            *(_cell(m[i], None if lo[i] == hi[i] else (lo[i], hi[i]), form) for m, lo, hi in data.values()),
        ]
        for i, v in enumerate(finite)
    ]
    legend = [(color(j), n, "line") for j, n in enumerate(data)]
    return Chart(_svg(out, bottom + 42, f"lines: {', '.join(data)}"), legend, columns, rows)


def histogram(
    edges: Sequence[float],
    shares: Sequence[float],
    *,
    reference: Mapping[str, Sequence[float]] | None = None,
    x_label: str = "",
    form: Format = percent,
) -> Chart:
    """Shares of `len(edges) − 1` bins as columns; `reference` holds expected shares, drawn as a line of steps."""
    reference = reference or {}
    values = [_number(v) for v in shares]
    flat = [v for v in (*values, *(v for r in reference.values() for v in r)) if math.isfinite(v)] or [1.0]
    y_steps = ticks(0.0, max(flat) or 1.0, 5)
    x_steps = [v for v in ticks(edges[0], edges[-1], 8) if edges[0] - 1e-9 <= v <= edges[-1] + 1e-9]
    left, right, top, bottom = 70.0, 16.0, 10.0, 220.0
    sx, sy = _scale(edges[0], edges[-1], left, W - right), _scale(0.0, y_steps[-1], bottom, top)
    out = _y_axis(y_steps, sy, left, W - right, form) + _x_labels(x_steps, sx, bottom, x_label)
    for i, value in enumerate(values):
        a, b = sx(edges[i]), sx(edges[i + 1])
        title = _esc(f"{_tick(edges[i], plain)} to {_tick(edges[i + 1], plain)}: {form(value)}")
        box = (
            f'x="{a + 0.5:.2f}" y="{sy(value):.2f}" width="{max(b - a - 1, 0.5):.2f}" height="{bottom - sy(value):.2f}"'
        )
        out.append(f'<rect class="s1" {box}><title>{title}</title></rect>')
    for j, (name, expected) in enumerate(reference.items(), start=1):
        steps = [p for i, v in enumerate(expected) for p in ((sx(edges[i]), sy(v)), (sx(edges[i + 1]), sy(v)))]
        out.append(f'<path class="line {color(j)}" d="M{_points(steps)}"><title>{_esc(name)}</title></path>')
    columns = ["from", "to", "share", *reference]
    rows = [
        [_tick(edges[i], plain), _tick(edges[i + 1], plain), form(v), *(form(r[i]) for r in reference.values())]
        for i, v in enumerate(values)
    ]
    legend = [("s1", "share", "")] + [(color(j), n, "line") for j, n in enumerate(reference, start=1)]
    return Chart(_svg(out, bottom + 42, f"histogram: {x_label}"), legend if reference else [], columns, rows)


# ---- pieces ----------------------------------------------------------------------------------------------------------


def color(index: int) -> str:
    """The CSS class of the series at `index`."""
    return f"s{index % COLORS + 1}"


def _esc(text: str) -> str:
    return html.escape(str(text))


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    span = (high - low) or 1.0
    return lambda v: start + (v - low) / span * (end - start)


def _points(points: Sequence[tuple[float, float]]) -> str:
    return "L".join(f"{a:.2f} {b:.2f}" for a, b in points)


def _band(values: Sequence[float] | Band) -> tuple[list[float], list[float], list[float]]:
    if isinstance(values, tuple) and len(values) == 3 and not isinstance(values[0], (int, float)):
        mean, lo, hi = values
    else:
        mean = lo = hi = values
    return [_number(v) for v in mean], [_number(v) for v in lo], [_number(v) for v in hi]  # type: ignore[union-attr,arg-type]


def _runs(a: Sequence[float], b: Sequence[float]) -> list[list[int]]:
    """Stretches of indices where both are finite: a gap in the data is a gap in the line."""
    runs: list[list[int]] = [[]]
    for i, (u, v) in enumerate(zip(a, b, strict=True)):
        if math.isfinite(u) and math.isfinite(v):
            runs[-1].append(i)
        elif runs[-1]:
            runs.append([])
    return [r for r in runs if r]


def _cell(value: float, interval: tuple[float, float] | None, form: Format) -> str:
    banded = interval is not None and all(map(math.isfinite, (value, *interval)))
    return form(value) + (f" [{form(interval[0])}, {form(interval[1])}]" if interval and banded else "")


def _value(x: float, y: float, text: str) -> str:
    return f'<text class="value" x="{x:.1f}" y="{y:.1f}">{_esc(text)}</text>'


def _whisker(a: float, b: float, y: float) -> str:
    ends = "".join(
        f'<line class="whisker" x1="{e:.2f}" x2="{e:.2f}" y1="{y - 4:.1f}" y2="{y + 4:.1f}"/>' for e in (a, b)
    )
    return f'<line class="whisker" x1="{a:.2f}" x2="{b:.2f}" y1="{y:.1f}" y2="{y:.1f}"/>{ends}'


def _x_axis(
    steps: Sequence[float],
    x: Callable[[float], float],
    top: float,
    bottom: float,
    axis: str,
    form: Format,
    left: float,
    right: float,
) -> list[str]:
    out = []
    for step in steps:
        line = f'x1="{x(step):.2f}" x2="{x(step):.2f}" y1="{top}" y2="{bottom:.1f}"'
        out.append(f'<line class="{"base" if step == 0 else "grid"}" {line}/>')
        out.append(f'<text class="tick mid" x="{x(step):.2f}" y="{bottom + 15:.1f}">{_esc(_tick(step, form))}</text>')
    if axis:
        out.append(f'<text class="axis" x="{(left + right) / 2:.1f}" y="{bottom + 33:.1f}">{_esc(axis)}</text>')
    return out


def _x_labels(steps: Sequence[float], x: Callable[[float], float], bottom: float, label: str) -> list[str]:
    out = [f'<text class="tick mid" x="{x(s):.2f}" y="{bottom + 15:.1f}">{_esc(_tick(s, plain))}</text>' for s in steps]
    if label:
        out.append(f'<text class="axis" x="{W / 2:.1f}" y="{bottom + 34:.1f}">{_esc(label)}</text>')
    return out


def _y_axis(steps: Sequence[float], y: Callable[[float], float], left: float, right: float, form: Format) -> list[str]:
    out = []
    for step in steps:
        line = f'x1="{left}" x2="{right}" y1="{y(step):.2f}" y2="{y(step):.2f}"'
        out.append(f'<line class="{"base" if step == steps[0] else "grid"}" {line}/>')
        out.append(f'<text class="tick end" x="{left - 6}" y="{y(step) + 4:.2f}">{_esc(_tick(step, form))}</text>')
    return out


def _svg(body: Sequence[str], height: float, label: str) -> str:
    head = f'<svg viewBox="0 0 {W:.0f} {height:.0f}" role="img" aria-label="{_esc(label)}" xmlns="http://www.w3.org/2000/svg">'
    return head + "".join(body) + "</svg>"

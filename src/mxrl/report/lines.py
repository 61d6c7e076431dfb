"""Charts over a numeric axis: series with bands, and histograms.

lines       series over x, each optionally with a band (lo, hi)
histogram   shares of bins, with reference curves
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from mxrl.report.svg import (
    COLORS,
    Band,
    Chart,
    Format,
    W,
    cell,
    color,
    drawing,
    escape,
    number,
    percent,
    plain,
    points,
    scale,
    tick,
    ticks,
    x_labels,
    y_axis,
)  # fmt: skip

_DASHES = ("", "7 3", "2 3", "9 3 2 3")  # from the second round of colours on


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
    drawn = [v for columns in data.values() for column in columns for v in column]
    flat = [v for v in drawn if math.isfinite(v)] or [1.0]
    y_steps = ticks(min(0.0, *flat) if zero else min(flat), max(flat))
    at = [float(v) for v in x]
    first, last = (min(at), max(at)) if at else (0.0, 1.0)
    if first == last:
        first, last = first - 0.5, last + 0.5
    x_steps = [v for v in ticks(first, last, 8) if first <= v <= last]
    if all(v == int(v) for v in at):  # steps and layers: no half ones
        x_steps = [v for v in x_steps if v == int(v)]
    left, right, top, bottom = 70.0, 16.0, 10.0, 250.0
    sx = scale(first, last, left + 10, W - right)
    sy = scale(y_steps[0], y_steps[-1], bottom, top)
    out = y_axis(y_steps, sy, left, W - right, form) + x_labels(x_steps, sx, bottom, x_label)
    if y_label:
        turn = f'transform="translate(12 {(top + bottom) / 2:.0f}) rotate(-90)"'
        out.append(f'<text class="axis" {turn}>{escape(y_label)}</text>')
    every = max(1, len(at) // 200)
    for j, (name, (mean, lo, hi)) in enumerate(data.items()):
        for run in _runs(lo, hi):
            edge = [(sx(at[i]), sy(hi[i])) for i in run] + [(sx(at[i]), sy(lo[i])) for i in reversed(run)]
            out.append(f'<path class="band {color(j)}" d="M{points(edge)}Z"/>')
        dash = _DASHES[j // COLORS % len(_DASHES)] if j >= COLORS else ""
        for run in _runs(mean, mean):
            path = points([(sx(at[i]), sy(mean[i])) for i in run])
            out.append(f'<path class="line {color(j)}" stroke-dasharray="{dash}" d="M{path}"/>')
            for i in run[::every]:
                band = "" if lo[i] == hi[i] else f" [{form(lo[i])}, {form(hi[i])}]"
                title = escape(f"{name} · {x_label or 'x'} {tick(at[i], plain)}: {form(mean[i])}{band}")
                size = 2.6 if len(at) <= 60 else 1.5
                dot = f'cx="{sx(at[i]):.2f}" cy="{sy(mean[i]):.2f}" r="{size}"'
                out.append(f'<circle class="{color(j)}" {dot}><title>{title}</title></circle>')
    columns = [x_label or "x", *data]
    rows = [
        [
            tick(v, plain),
            *(cell(m[i], None if lo[i] == hi[i] else (lo[i], hi[i]), form) for m, lo, hi in data.values()),
        ]
        for i, v in enumerate(at)
    ]
    legend = [(color(j), n, "line") for j, n in enumerate(data)]
    return Chart(drawing(out, bottom + 42, f"lines: {', '.join(data)}"), legend, columns, rows)


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
    values = [number(v) for v in shares]
    flat = [v for v in (*values, *(v for r in reference.values() for v in r)) if math.isfinite(v)] or [1.0]
    y_steps = ticks(0.0, max(flat) or 1.0, 5)
    x_steps = [v for v in ticks(edges[0], edges[-1], 8) if edges[0] - 1e-9 <= v <= edges[-1] + 1e-9]
    left, right, top, bottom = 70.0, 16.0, 10.0, 220.0
    sx, sy = scale(edges[0], edges[-1], left, W - right), scale(0.0, y_steps[-1], bottom, top)
    out = y_axis(y_steps, sy, left, W - right, form) + x_labels(x_steps, sx, bottom, x_label)
    for i, value in enumerate(values):
        a, b = sx(edges[i]), sx(edges[i + 1])
        title = escape(f"{tick(edges[i], plain)} to {tick(edges[i + 1], plain)}: {form(value)}")
        box = (
            f'x="{a + 0.5:.2f}" y="{sy(value):.2f}" width="{max(b - a - 1, 0.5):.2f}" height="{bottom - sy(value):.2f}"'
        )
        out.append(f'<rect class="s1" {box}><title>{title}</title></rect>')
    for j, (name, expected) in enumerate(reference.items(), start=1):
        steps = [p for i, v in enumerate(expected) for p in ((sx(edges[i]), sy(v)), (sx(edges[i + 1]), sy(v)))]
        out.append(f'<path class="line {color(j)}" d="M{points(steps)}"><title>{escape(name)}</title></path>')
    columns = ["from", "to", "share", *reference]
    rows = [
        [tick(edges[i], plain), tick(edges[i + 1], plain), form(v), *(form(r[i]) for r in reference.values())]
        for i, v in enumerate(values)
    ]
    legend = [("s1", "share", "")] + [(color(j), n, "line") for j, n in enumerate(reference, start=1)]
    return Chart(drawing(out, bottom + 42, f"histogram: {x_label}"), legend if reference else [], columns, rows)


def _band(values: Sequence[float] | Band) -> tuple[list[float], list[float], list[float]]:
    if isinstance(values, tuple) and len(values) == 3 and not isinstance(values[0], (int, float)):
        mean, lo, hi = values
    else:
        mean = lo = hi = values
    return [number(v) for v in mean], [number(v) for v in lo], [number(v) for v in hi]  # type: ignore[union-attr,arg-type]


def _runs(a: Sequence[float], b: Sequence[float]) -> list[list[int]]:
    """Stretches of indices where both are finite: a gap in the data is a gap in the line."""
    runs: list[list[int]] = [[]]
    for i, (u, v) in enumerate(zip(a, b, strict=True)):
        if math.isfinite(u) and math.isfinite(v):
            runs[-1].append(i)
        elif runs[-1]:
            runs.append([])
    return [r for r in runs if r]

"""A scatter plot: one dot a thing, its name on hover."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mxrl.report.svg import (
    Chart,
    Format,
    W,
    color,
    drawing,
    escape,
    plain,
    scale,
    ticks,
    x_labels,
    y_axis,
)  # fmt: skip


class Dot(NamedTuple):
    name: str
    x: float
    y: float


def dots(
    series: Mapping[str, Sequence[Dot]],
    *,
    x_label: str = "",
    y_label: str = "",
    x_form: Format = plain,
    y_form: Format = plain,
) -> Chart:
    """Every dot of every series; one without a finite x or y is left out. The table lists them in the series' order."""
    data = {n: [d for d in found if math.isfinite(d.x) and math.isfinite(d.y)] for n, found in series.items()}
    every = [d for found in data.values() for d in found]
    xs, ys = [d.x for d in every] or [0.0, 1.0], [d.y for d in every] or [0.0, 1.0]
    x_steps, y_steps = ticks(min(xs), max(xs), 8), ticks(min(ys), max(ys))
    left, right, top, bottom = 70.0, 16.0, 10.0, 300.0
    sx, sy = scale(x_steps[0], x_steps[-1], left + 8, W - right - 8), scale(y_steps[0], y_steps[-1], bottom, top)
    out = y_axis(y_steps, sy, left, W - right, y_form) + x_labels(x_steps, sx, bottom, x_label)
    if y_label:
        turn = f'transform="translate(12 {(top + bottom) / 2:.0f}) rotate(-90)"'
        out.append(f'<text class="axis" {turn}>{escape(y_label)}</text>')
    size = 4.0 if len(every) <= 300 else 2.6
    for j, (name, found) in enumerate(data.items()):
        for d in found:
            title = escape(f"{d.name} · {name}: {x_label or 'x'} {x_form(d.x)}, {y_label or 'y'} {y_form(d.y)}")
            at = f'cx="{sx(d.x):.2f}" cy="{sy(d.y):.2f}" r="{size}"'
            out.append(f'<circle class="dot {color(j)}" {at}><title>{title}</title></circle>')
    legend = [(color(j), n, "") for j, n in enumerate(data)]
    columns = ["", "group", x_label or "x", y_label or "y"]
    rows = [[d.name, n, x_form(d.x), y_form(d.y)] for n, found in data.items() for d in found]
    return Chart(drawing(out, bottom + 42, f"dots: {', '.join(data)}"), legend, columns, rows)

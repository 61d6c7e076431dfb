"""Horizontal bars: a row for each label, its parts stacked or side by side.

▆▆▆▆▆▆▆▆▆▒▒▒|░░░░  0.0143     stacked: the parts add up to the number; `|` marks a reference
▆▆▆▆▆├──┤  0.61               side by side: a lane for each part, whiskers for its interval
▒▒▒▒▒▒├─┤  0.74
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mxrl.report.svg import (
    CHARACTER,
    Chart,
    Format,
    W,
    cell,
    color,
    drawing,
    escape,
    number,
    plain,
    scale,
    ticks,
    value_text,
    x_axis,
)  # fmt: skip

_LABEL = 32  # characters of a label; a longer one is cut, and whole in its title
_TOP, _RIGHT, _GAP = 8.0, 74.0, 14  # above the rows, right of the axis (the numbers), between rows


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
    """For every label the values of `parts`, stacked or side by side.

    marks: a reference value per label, drawn as a tick across the row. intervals: (lo, hi) per label and part, drawn as
    whiskers (side by side only). The number at a row's end is the sum of its parts (stacked) or each part's value.
    Raises ValueError for a negative part in a stack: it has no length to draw.
    """
    data = {name: [number(v) for v in parts[name]] for name in parts}
    references = {name: [number(v) for v in values] for name, values in (marks or {}).items()}
    bounds = {name: [(number(a), number(b)) for a, b in pairs] for name, pairs in (intervals or {}).items()}
    if stacked:
        _check_stack(labels, data)
    longest = min(_LABEL, max([len(s) for s in labels] + [4]))
    left, thick = 16 + CHARACTER * longest, 20 if stacked or len(data) == 1 else 14
    high = thick * (1 if stacked else max(1, len(data)))
    reached = [_reach(data, i) for i in range(len(labels))]
    seen = [*reached] if stacked else [v for values in data.values() for v in values]
    seen += [v for values in references.values() for v in values]
    seen += [v for pairs in bounds.values() for pair in pairs for v in pair]
    finite = [v for v in seen if math.isfinite(v)] or [1.0]
    steps = ticks(min(0.0, *finite), max(0.0, *finite) or 1.0)
    bottom = _TOP + (high + _GAP) * len(labels)
    x = scale(steps[0], steps[-1], left, W - _RIGHT)
    out = x_axis(steps, x, _TOP, bottom, axis, form, left, W - _RIGHT)
    for i, label in enumerate(labels):
        short = label if len(label) <= longest else label[: longest - 1] + "…"
        row = _Row(label, _TOP + (high + _GAP) * i + _GAP / 2, thick, high, x, form)
        values = {name: data[name][i] for name in data}
        at = {name: references[name][i] for name in references}
        title = f"<title>{escape(label)}</title>{escape(short)}"
        out.append(f'<text class="label" x="{left - 8:.1f}" y="{row.y + high / 2 + 4:.1f}">{title}</text>')
        if stacked:
            out += row.stack(values, reached[i], at)
        else:
            out += row.lanes(values, {name: pairs[i] for name, pairs in bounds.items()})
        out += row.marks(at)
    legend = [(color(j), name, "") for j, name in enumerate(data)] + [("mark", name, "") for name in references]
    summed = stacked and len(data) > 1
    columns = ["", *data, *(["sum"] if summed else []), *references]
    rows = [
        [
            label,
            *(cell(data[name][i], bounds[name][i] if name in bounds else None, form) for name in data),
            *([form(reached[i])] if summed else []),
            *(form(values[i]) for values in references.values()),
        ]
        for i, label in enumerate(labels)
    ]
    return Chart(drawing(out, bottom + 24 + (16 if axis else 0), f"bars: {', '.join(data)}"), legend, columns, rows)


def _reach(data: Mapping[str, Sequence[float]], i: int) -> float:
    """The sum of a row's parts; parts without a value have no length."""
    return sum(values[i] for values in data.values() if math.isfinite(values[i]))


def _check_stack(labels: Sequence[str], data: Mapping[str, Sequence[float]]) -> None:
    for name, values in data.items():
        for label, value in zip(labels, values, strict=True):
            if value < 0:
                raise ValueError(f"bars: part '{name}' of '{label}' is {value:g}; a stack takes no negative part")


@dataclass(frozen=True)
class _Row:
    """Where one row is, and what is drawn in it."""

    label: str
    y: float
    thick: float
    high: float
    x: Callable[[float], float]
    form: Format

    def stack(self, values: Mapping[str, float], reach: float, marks: Mapping[str, float]) -> list[str]:
        out, start = [], 0.0
        for j, (name, value) in enumerate(values.items()):
            if math.isfinite(value):
                out.append(self._box(j, name, start, start + value, self.y, self.thick, self.form(value)))
                start += value
        end = self.x(reach)
        text = self.form(reach)
        ahead = [self.x(v) for v in marks.values() if math.isfinite(v) and self.x(v) > end - 4]
        room = min(ahead, default=W) - end > 10 + CHARACTER * len(text)  # for the number before the next mark
        return [*out, value_text((end if room else max(ahead)) + 6, self.y + self.thick - 5, text)]

    def lanes(self, values: Mapping[str, float], bounds: Mapping[str, tuple[float, float]]) -> list[str]:
        out = []
        for j, (name, value) in enumerate(values.items()):
            if not math.isfinite(value):
                continue
            y, text, tip = self.y + j * self.thick, self.form(value), max(self.x(value), self.x(0.0))
            low, high = bounds.get(name, (math.nan, math.nan))
            known = math.isfinite(low) and math.isfinite(high)
            title = f"{text} [{self.form(low)}, {self.form(high)}]" if known else text
            out.append(self._box(j, name, 0.0, value, y, self.thick - 2, title))
            if known:
                out.append(_whisker(self.x(low), self.x(high), y + self.thick / 2 - 1))
                tip = max(tip, self.x(high))
            out.append(value_text(tip + 6, y + self.thick - 4, text))
        return out

    def marks(self, marks: Mapping[str, float]) -> list[str]:
        out = []
        for name, value in marks.items():
            if math.isfinite(value):
                at, low, high = self.x(value), self.y - 4, self.y + self.high + 4
                where = f'x1="{at:.2f}" x2="{at:.2f}" y1="{low:.1f}" y2="{high:.1f}"'
                title = escape(f"{self.label} · {name}: {self.form(value)}")
                out.append(f'<line class="mark" {where}><title>{title}</title></line>')
        return out

    def _box(self, index: int, name: str, start: float, end: float, y: float, height: float, text: str) -> str:
        a, b = sorted((self.x(start), self.x(end)))
        where = f'x="{a:.2f}" y="{y:.1f}" width="{max(b - a, 0.5):.2f}" height="{height:.1f}"'
        return f'<rect class="{color(index)}" {where}><title>{escape(f"{self.label} · {name}: {text}")}</title></rect>'


def _whisker(a: float, b: float, y: float) -> str:
    ends = "".join(
        f'<line class="whisker" x1="{e:.2f}" x2="{e:.2f}" y1="{y - 4:.1f}" y2="{y + 4:.1f}"/>' for e in (a, b)
    )
    return f'<line class="whisker" x1="{a:.2f}" x2="{b:.2f}" y1="{y:.1f}" y2="{y:.1f}"/>{ends}'

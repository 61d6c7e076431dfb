"""The curves of a comparison of runs as PNG files, by matplotlib, which is optional (`mxrl[report]`)."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mxrl.report.runs_page import bounds
from mxrl.report.svg import number

MISSING = "the curves as PNG need matplotlib, which is not installed: pip install 'mxrl[report]'"
_STYLES = ("-", "--", ":", "-.")


def available() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def draw(curve: Mapping[str, Any], path: Path) -> None:
    """Write one curve of report.json: a line and a band for each group. Needs matplotlib."""
    from matplotlib.figure import Figure  # not pyplot: no global state, no display
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    by = 100.0 if curve["share"] else 1.0
    for i, (label, series) in enumerate(curve["series"].items()):
        mean = [by * number(v) for v in series["mean"]]
        low, high = ([by * v for v in side] for side in bounds(series, curve["share"]))
        color, style = f"C{i % 10}", _STYLES[i // 10 % len(_STYLES)]
        # evaluations are far apart and need not be at the same steps in every group: a line goes over the gaps
        known = [j for j, v in enumerate(mean) if v == v]
        axes.plot([curve["x"][j] for j in known], [mean[j] for j in known], style, color=color, label=label,
                  marker="o" if len(known) <= 30 else "", markersize=3)  # fmt: skip
        axes.fill_between(curve["x"], low, high, color=color, alpha=0.15, linewidth=0)
    axes.set_title(curve["title"], fontsize=11)
    axes.set_xlabel("optimizer step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("%" if curve["share"] else "")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, metadata={"Software": None})  # the same bytes whatever wrote them before

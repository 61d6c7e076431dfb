"""The tables of README.md, from results/*.jsonl alone: `write_tables` replaces what lies between the page's markers.

A figure of a checkpoint (of a kind, of a layer) is formed from sums over its tensors, never as a mean of ratios; the
spread over tensors is over tensors of at least 2^14 elements, each counted once.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mxrl.decompose import ErrorStats
from mxrl.kinds import KINDS
from mxrl.report.files import write_atomically
from mxrl.report.markdown import between, table

Line = dict[str, Any]
LEAST = 1 << 14  # elements of a tensor that counts in the spread over tensors


@dataclass(frozen=True)
class Print:
    """A fingerprint: plain MXFP4's merged statistics, each recipe's squared error, and the blocks' (peak / RMS)²."""

    stats: ErrorStats
    sq_error: dict[str, float]
    crest: float

    @classmethod
    def of(cls, lines: Sequence[Line]) -> Print:
        stats = ErrorStats.merged(ErrorStats.from_dict(line["plain"]) for line in lines)
        errors = {recipe: sum((line["sq_error"][recipe] for line in lines), 0.0) for recipe in lines[0]["sq_error"]}
        crest = sum((line["crest"] or 0.0) * line["plain"]["sq_norm"] for line in lines) / stats.sq_norm
        return cls(stats, errors, crest)

    def over_plain(self, recipe: str) -> float:
        return self.sq_error[recipe] / self.stats.sq_error


@dataclass(frozen=True)
class Figure:
    """A column: heading, what it is of a fingerprint, and how it is printed."""

    head: str
    value: Callable[[Print], float]
    form: str


def _ratio(recipe: str) -> Callable[[Print], float]:
    return lambda p: p.over_plain(recipe)


REL_MSE = Figure("rel. MSE", lambda p: p.stats.rel_mse, ".5f")
OVER_FLOOR = Figure("T/floor", lambda p: p.stats.sq_error / p.stats.floor, ".3f")
COS = Figure("cos(scale, grid)", lambda p: p.stats.cos_scale_grid, ".3f")
IN_D = Figure("in D", lambda p: p.stats.deadzone_fraction, ".2%")
D_ENERGY = Figure("‖dz‖²/T", lambda p: p.stats.sq_deadzone / p.stats.sq_error, ".2%")
DELTA = Figure("mean δ", lambda p: p.stats.delta_mean, ".3f")
DELTA_SD = Figure("sd δ", lambda p: math.sqrt(p.stats.delta_var), ".3f")
GAMMA = Figure("mean 2^δ", lambda p: p.stats.gamma_mean, ".3f")
CREST = Figure("(peak/RMS)²", lambda p: p.crest, ".2f")
MBS = Figure("+mbs", _ratio("mxfp4+mbs"), ".3f")
SEARCH = Figure("+mbs:search16", _ratio("mxfp4+mbs:search16"), ".3f")
OF = Figure("+of", _ratio("mxfp4+of"), ".4f")
MBS_OF = Figure("+mbs+of", _ratio("mxfp4+mbs+of"), ".3f")
FLOOR = Figure("floor", _ratio("mxfp4:floor"), ".3f")
EVEN = Figure("even", _ratio("mxfp4:even"), ".3f")
E8M3 = Figure("e8m3", _ratio("mxfp4:e8m3"), ".3f")
NVFP4 = Figure("nvfp4", _ratio("nvfp4"), ".3f")
MXFP8 = Figure("mxfp8", _ratio("mxfp8"), ".4f")
TERMS = (REL_MSE, OVER_FLOOR, COS, IN_D, D_ENERGY, DELTA, DELTA_SD, GAMMA, CREST)
GAINS = (MBS, SEARCH, OF, MBS_OF, FLOOR, EVEN, E8M3, NVFP4, MXFP8)
SHORT = (REL_MSE, OVER_FLOOR, COS, IN_D, D_ENERGY, GAMMA, MBS, OF, CREST)


@dataclass(frozen=True)
class Result:
    origin: Line
    lines: list[Line]

    @property
    def name(self) -> str:
        return self.origin["name"]

    def group_by(self, *keys: str) -> dict[tuple[Any, ...], list[Line]]:
        groups: dict[tuple[Any, ...], list[Line]] = {}
        for line in self.lines:
            groups.setdefault(tuple(line[k] for k in keys), []).append(line)
        return groups


def load(folder: Path) -> list[Result]:
    results = []
    for file in sorted(folder.glob("*.jsonl")):
        origin, *lines = map(json.loads, file.read_text().splitlines())
        results.append(Result(origin, lines))
    return sorted(results, key=lambda r: (-r.origin["linear_elements"] * (r.origin["group"] != "reference"), r.name))


def _cells(figures: Sequence[Figure], p: Print) -> list[str]:
    return [format(f.value(p), f.form).replace("-", "−") for f in figures]


def _elements(n: int) -> str:
    return f"{n / 1e6:.1f} M"


def what(results: list[Result]) -> str:
    rows = [
        [r.name, r.origin["what"], r.origin["stored"], _package(r.origin["package"]), r.origin["group"],
         str(len(r.lines)), _elements(r.origin["linear_elements"])]
        for r in results if r.origin["group"] != "reference"
    ]  # fmt: skip
    return table(["checkpoint", "what", "stored as", "package", "group", "linear weights", "elements"], rows, 5)


def _package(text: str) -> str:
    first, *more = text.split()
    return f"`{first}`" + (f" … {len(more) + 1} parts" if more else "")


def overview(results: list[Result], figures: Sequence[Figure], groups: Sequence[str]) -> str:
    rows = [
        [r.name, *_cells(figures, Print.of(r.lines))] for group in groups for r in results if r.origin["group"] == group
    ]
    return table(["", *(f.head for f in figures)], rows)


def spread(results: list[Result]) -> str:
    """For every figure: over the unquantized checkpoints, over the text transformers among all, over tensors."""
    real = [r for r in results if r.origin["group"] == "unquantized"]
    prints = [Print.of(r.lines) for r in real]
    drawn = [Print.of(r.lines) for r in results if r.name.endswith("mixed σ")]
    tensors = [Print.of([t]) for r in real for t in r.lines if math.prod(t["shape"]) >= LEAST]
    rows = []
    for f in (*TERMS, *GAINS):
        values = np.array([f.value(p) for p in prints])
        each = np.array([f.value(p) for p in tensors])
        low, high = np.percentile(each, [5, 95])
        rows.append([
            f.head, *_span(f, values), _relative_sd(values), *_span(f, np.array([low, high])), _relative_sd(each),
            *_span(f, np.array([f.value(p) for p in drawn])),
        ])  # fmt: skip
    head = ["figure", f"{len(real)} checkpoints, least", "most", "sd/mean", f"{len(tensors)} tensors, 5 %", "95 %",
            "sd/mean", f"{len(drawn)} distributions, least", "most"]  # fmt: skip
    return table(head, rows)


def _relative_sd(values: np.ndarray) -> str:
    return f"{values.std(ddof=1) / abs(values.mean()):.1%}"


def _span(f: Figure, values: np.ndarray) -> list[str]:
    return [format(v, f.form).replace("-", "−") for v in (values.min(), values.max())]


def explained(results: list[Result]) -> str:
    """R² over the unquantized tensors of a linear fit on log (peak/RMS)², on mean 2^δ, and on both."""
    real = [r for r in results if r.origin["group"] == "unquantized"]
    tensors = [Print.of([t]) for r in real for t in r.lines if math.prod(t["shape"]) >= LEAST]
    crest = np.log([p.crest for p in tensors])
    gamma = np.array([p.stats.gamma_mean for p in tensors])
    rows = []
    for f in (REL_MSE, OVER_FLOOR, COS, IN_D, D_ENERGY, MBS, SEARCH, OF, NVFP4):
        y = np.array([f.value(p) for p in tensors])
        rows.append([f.head, *(f"{_r2(y, *x):.2f}" for x in ((crest,), (gamma,), (crest, gamma)))])
    return table(["figure of a tensor", "log (peak/RMS)²", "mean 2^δ", "both"], rows)


def _r2(y: np.ndarray, *columns: np.ndarray) -> float:
    x = np.stack([np.ones_like(y), *columns], axis=1)
    left = y - x @ np.linalg.lstsq(x, y, rcond=None)[0]
    return 1 - float(left @ left) / float(((y - y.mean()) ** 2).sum())


def kinds(results: list[Result]) -> str:
    order = {k: i for i, k in enumerate(KINDS)}
    rows = []
    for r in results:
        if r.origin["group"] == "reference":
            continue
        for (kind,), lines in sorted(r.group_by("kind").items(), key=lambda g: order.get(g[0][0], len(order))):
            elements = sum(math.prod(t["shape"]) for t in lines)
            rows.append([r.name, kind, str(len(lines)), _elements(elements), *_cells(SHORT, Print.of(lines))])
    return table(["checkpoint", "kind", "tensors", "elements", *(f.head for f in SHORT)], rows, 2)


def depth(results: list[Result]) -> str:
    """Per stack of layers: each figure's first and last layer, its range over layers, Spearman's ρ with depth."""
    figures = (REL_MSE, OVER_FLOOR, COS, IN_D, GAMMA, MBS)
    rows = []
    for r in results:
        if r.origin["group"] == "reference":
            continue
        stacks = {stack for stack, _ in r.group_by("stack", "layer")}
        for stack in sorted(stacks):
            layers = {key[1]: Print.of(t) for key, t in r.group_by("stack", "layer").items() if key[0] == stack}
            layers = {layer: p for layer, p in layers.items() if layer is not None}
            if len(layers) < 3:
                continue
            cells = []
            for f in figures:
                values = np.array([f.value(layers[i]) for i in sorted(layers)])
                low, high = _span(f, values)
                cells.append(f"{low} … {high} ({_spearman(values):+.1f})".replace("(-", "(−"))
            rows.append([r.name + (f", {stack}" if len(stacks - {""}) > 1 else ""), str(len(layers)), *cells])
    return table(["checkpoint", "layers", *(f.head for f in figures)], rows)


def _spearman(values: np.ndarray) -> float:
    ranks = values.argsort().argsort()
    return float(np.corrcoef(ranks, np.arange(len(values)))[0, 1])


def encodings(results: list[Result]) -> str:
    rows = []
    for r in results:
        if r.origin["group"] != "low-bit":
            continue
        for (dtype, kind), lines in sorted(r.group_by("dtype", "kind").items()):
            elements = sum(math.prod(t["shape"]) for t in lines)
            zero = ErrorStats.merged(ErrorStats.from_dict(t["plain"]) for t in lines).exact_zero_count / elements
            rows.append([r.name, dtype, kind, str(len(lines)), f"{zero:.2%}", *_cells(SHORT, Print.of(lines))])
    return table(["checkpoint", "stored as", "kind", "tensors", "exact zeros", *(f.head for f in SHORT)], rows, 3)


def commit_of(origin: Line) -> str:
    """Seven digits, and whether the source had changes on top."""
    return str(origin["commit"])[:7] + ("+dirty" if str(origin["commit"]).endswith("+dirty") else "")


def about(results: list[Result]) -> str:
    """Where the figures come from; more than one commit or day is said."""
    origins = [r.origin for r in results]
    versions = {", ".join(f"{n} {v}" for n, v in o["versions"].items()) for o in origins}
    commits = sorted({commit_of(o) for o in origins})
    days = sorted({o["created"][:10] for o in origins})
    machines = sorted({o["machine"] for o in origins})
    return (
        f"Measured on a CPU ({', '.join(machines)}), {'; '.join(sorted(versions))}, commit {', '.join(commits)}, "
        f"{', '.join(days)}; seeds 0, 1, 2 for what is drawn, 0 for the controls. {len(results)} sources, "
        f"{sum(len(r.lines) for r in results):,} tensors, {sum(o['linear_elements'] for o in origins) / 1e6:,.0f} M "
        f"elements, in {sum(o['seconds'] for o in origins):.0f} s of scanning on two cores that others used too. The "
        "sha256 of every file is in the first line of its results file."
    )


def write_tables(folder: Path, page: Path) -> None:
    """Replace what lies between `<!-- NAME -->` and `<!-- /NAME -->` in the page. Raises ValueError for a marker that
    no table has."""
    results = load(folder)
    real = ("unquantized", "low-bit", "shipped")
    made = {
        "about": about(results),
        "what": what(results),
        "terms": overview(results, TERMS, real),
        "gains": overview(results, GAINS, real),
        "spread": spread(results),
        "reference": overview(results, (*TERMS[:5], GAMMA, CREST, MBS, SEARCH, OF, NVFP4), ("reference",)),
        "explained": explained(results),
        "kinds": kinds(results),
        "depth": depth(results),
        "encodings": encodings(results),
    }
    text = page.read_text(encoding="utf-8")
    for name in re.findall(r"<!-- (\w+) -->", text):
        if name not in made:
            raise ValueError(f"{page}: there is no table '{name}'; there are {', '.join(made)}")
        text = between(text, name, made[name])
    write_atomically(page, text)

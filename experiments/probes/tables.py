"""The tables of README.md, from results/*.json.gz alone (each a gzip of `mxrl probe`'s probe.json).

    python experiments/probes/tables.py            prints them
    python experiments/probes/tables.py --write    puts them on the page, each between <!-- NAME --> and <!-- /NAME -->

Nothing is measured or judged here: values, intervals and verdicts are the files'.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mxrl.report.files import write_atomically
from mxrl.report.markdown import between, table

HERE = Path(__file__).parent
RESULTS, PAGE = HERE / "results", HERE / "README.md"
NAMES = {"dense": "policy:dense", "moe": "policy:moe", "qwen": "Qwen2.5-Coder-0.5B"}
BASE, BEST = "mxfp4", "mxfp4+mbs+of"
NONE = "—"
VERDICTS = ("borne out", "contradicted", "undecided", "not measured")
Row = dict[str, Any]
Format = Callable[[float], str]


class Model:
    """One file: its measures by (probe, metric, treatment), its rows of theory by (probe, name, treatment)."""

    def __init__(self, name: str, data: Row) -> None:
        self.name, self.data = name, data
        self.results: dict[str, Row] = data["results"]
        # drift has a row for each source as well: its table is of its curves
        self._measures = {
            (p, m["metric"], m["treatment"]): m for p, r in self.results.items() for m in r["measures"] if p != "drift"
        }
        self._theory = {(p, t["name"], t["treatment"]): t for p, r in self.results.items() for t in r["theory"]}

    def measure(self, probe: str, metric: str, treatment: str = BASE) -> Row | None:
        return self._measures.get((probe, metric, treatment))

    def theory(self, probe: str, name: str, treatment: str = BASE) -> Row | None:
        return self._theory.get((probe, name, treatment))

    @property
    def treatments(self) -> list[str]:
        return self.results["deadzone"]["settings"]["treatments"]


def load(folder: Path = RESULTS) -> list[Model]:
    """Those of NAMES, in that order."""
    return [
        Model(label, json.loads(gzip.decompress((folder / f"{n}.json.gz").read_bytes()))) for n, label in NAMES.items()
    ]


# ---- cells -----------------------------------------------------------------------------------------------------------


def fixed(digits: int, factor: float = 1.0) -> Format:
    def show(value: float) -> str:
        text = f"{value * factor:.{digits}f}"
        return (text.removeprefix("-") if not float(text) else text).replace("-", "−")

    return show


def short(value: float) -> str:
    """Two digits, tiny shares as a power of ten."""
    return f"{value:.2g}".replace("-", "−")


POINTS = fixed(1, 100)  # a fraction in percent or percentage points
FORMATS = {"grad_cosine": fixed(3), "greedy_accuracy_change": POINTS, "entropy_change": fixed(4), "topk_flip": POINTS}


def interval(row: Row | None, show: Format) -> str:
    """value [low, high]; a dash for what wasn't measured."""
    if row is None or row.get("value", row.get("measured")) is None:
        return NONE
    value = show(row["value"] if "value" in row else row["measured"])
    return value if row["low"] is None else f"{value} [{show(row['low'])}, {show(row['high'])}]"


# ---- tables ----------------------------------------------------------------------------------------------------------


def about(models: list[Model]) -> str:
    """Device, versions, seed and commits; more than one is said."""
    data = [m.data for m in models]
    versions = {", ".join(f"{k} {v}" for k, v in d["versions"].items()) for d in data}
    devices = sorted({f"{d['device']}, {d['machine']}" for d in data})
    found = {commit for d in data for commit in d["commit"].split(", ")}  # a joined page may have several
    commits = sorted(c[:7] + ("+dirty" if c.endswith("+dirty") else "") for c in found)
    days = sorted({d["created"][:10] for d in data})
    seeds = sorted({d["settings"]["seed"] for d in data})
    return (
        f"{'; '.join(devices)}; {'; '.join(sorted(versions))}; seed {', '.join(map(str, seeds))}; {', '.join(days)}. "
        f"The files say commit {', '.join(commits)}."
    )


def runs(models: list[Model]) -> str:
    probes = list(dict.fromkeys(p for m in models for p in m.data["settings"]["probes"]))
    rows = []
    for m in models:
        about = m.data["subject"]
        rows.append([
            m.name, about["architecture"], f"{about['parameters'] / 1e6:.1f} M", str(about["layers"]), about["dtype"],
            f"{about['task']}, {about['max_new_tokens']}",
            "; ".join(_value(m, "deadzone", f"{kind}_accuracy", POINTS, "bf16") for kind in ("greedy", "sampled")),
            _value(m, "temperature", "entropy", fixed(3), "bf16"), *(_prompts(m, p) for p in probes),
        ])  # fmt: skip
    head = ["", "architecture", "parameters", "blocks", "dtype", "task, new tokens at most", "greedy; sampled, %",
            "entropy, nats", *probes]  # fmt: skip
    return table(head, rows, 2)


def _prompts(m: Model, probe: str) -> str:
    return f"{m.results[probe]['subject']['prompts']}; {m.data['seconds'][probe]:.0f} s" if probe in m.results else NONE


TOLD = {"yes": "+", "no": "−", "undecided": "?", None: "·"}


def matrix(models: list[Model]) -> str:
    first = next(m for m in models if "routing" in m.results).data["matrix"]  # has every column
    rows = []
    for column in first["columns"]:
        for i, row in enumerate(first["rows"]):
            cells = [_cell(m, row, column["name"]) for m in models]
            rows.append([f"**{column['name']}**" if i == 0 else "", row, *cells])
    return table(["failure", "component or recipe", *(m.name for m in models)], rows, 2)


def _cell(m: Model, row: str, column: str) -> str:
    cell = next((c for c in m.data["matrix"]["cells"] if (c["row"], c["column"]) == (row, column)), None)
    if cell is None:
        return NONE
    says = cell.get("says")
    told = f" {''.join(TOLD[says[k]] for k in ('alone', 'removed', 'structure'))}" if says else ""
    return f"{interval(cell['effect'], FORMATS[cell['metric']])} {cell['verdict']}{told}"


# What a claim's number is, and how it is shown; the files say it in full.
CLAIMED: dict[str, tuple[str, Format]] = {
    "scale-gradient": ("1 − cos that leaving the scale out takes away", fixed(3)),
    "scale-multiplies": ("log2 that a block adds, backward pass alone; claimed 0.289", fixed(4)),
    "scale-dominates": ("its 1 − cos less the strongest other's", fixed(3)),
    "deadzone-gradient": ("its 1 − cos alone", fixed(3)),
    "delta-spread": ("sd of the summed δ", fixed(3)),
    "layernorm-reset": ("log2 of the stream's norm at the end", fixed(3)),
    "mbs-gradient": ("1 − cos that MBS takes away", fixed(3)),
    "of-gradient": ("1 − cos that OF takes away", fixed(3)),
    "deadzone-rollout": ("greedy pp that leaving it out gives back, as −", POINTS),
    "deadzone-dominates": ("its greedy pp less the strongest other's", POINTS),
    "deadzone-bland": ("change of the distinct completions of 4", fixed(3)),
    "of-rollout": ("greedy pp that OF gives back, as −", POINTS),
    "grid-entropy": ("nats that leaving the grid out takes away", fixed(4)),
    "grid-dominates": ("its nats less the strongest other's", fixed(4)),
    "t-eff": ("fitted T", fixed(3)),
    "aqn-entropy": ("", fixed(3)),
    "drift-u": ("α of the least gap; claimed 0.5", fixed(2)),
    "fork-harm": ("accuracy of forked answers less the same unquantized, pp", POINTS),
    "moe-redundancy": ("redundancy", fixed(4)),
}


def claims(models: list[Model]) -> str:
    found = {c["id"]: c["says"] for m in models for c in m.data["claims"]}
    rows = []
    for name, (number, show) in CLAIMED.items():
        own = [next((c for c in m.data["claims"] if c["id"] == name), None) for m in models]
        rows.append([found[name], number, *(_claim(c, show) for c in own)])
    counts = [Counter(c["verdict"] for c in m.data["claims"]) for m in models]
    rows.append(["**all**", "", *("; ".join(f"{n[v]} {v}" for v in VERDICTS if n[v]) for n in counts)])
    return table(["claim", "number", *(m.name for m in models)], rows, 2)


def _claim(claim: Row | None, show: Format) -> str:
    if claim is None:
        return NONE
    return claim["verdict"] + ("" if claim["value"] is None else f": {interval(claim, show)}")


@dataclass(frozen=True)
class Figure:
    """A column of `measures`: `nothing` is the value of no effect (None: there is none to tell)."""

    head: str
    probe: str
    metric: str
    show: Format
    nothing: float | None = 0.0
    mark: str = ""

    def cell(self, models: list[Model], treatment: str) -> str:
        """The models that have the probe, in order; a dash for one without a value; empty where none has one."""
        texts = [self._text(m, treatment) for m in models if self.probe in m.results]
        return "" if set(texts) == {NONE} else "; ".join(texts)

    def _text(self, m: Model, treatment: str) -> str:
        row = m.measure(self.probe, self.metric, treatment + self.mark)
        if row is None or row["value"] is None:
            return NONE
        text = self.show(row["value"])
        unsure = self.nothing is not None and row["low"] is not None and row["low"] <= self.nothing <= row["high"]
        return f"({text})" if unsure else text


INSIDE = (
    Figure("1 − cos", "gradient", "grad_cosine", fixed(3), None),
    Figure("forward", "gradient", "grad_cosine", fixed(3), None, "@forward"),
    Figure("backward", "gradient", "grad_cosine", fixed(4), None, "@backward"),
    Figure("T fitted", "temperature", "t_eff", fixed(3), 1.0),
    Figure("T, all pairs", "temperature", "predicted_all", fixed(3), None),
    Figure("T, weighted", "temperature", "predicted_weighted", fixed(3), None),
    Figure("T, both weighted", "temperature", "predicted_weighted_both", fixed(3), None),
    Figure("T of Gaussian noise", "temperature", "t_gaussian", fixed(3), 1.0),
    Figure("ΔH, nats", "temperature", "entropy_change", fixed(4)),
)
ANSWERS = (
    Figure("greedy, pp", "deadzone", "greedy_accuracy_change", POINTS),
    Figure("sampled, pp", "deadzone", "sampled_accuracy_change", POINTS),
    Figure("forks/1000", "fork", "fork_hazard", fixed(1, 1000), None),
    Figure("half at", "fork", "survival_half", fixed(0), None),
    Figure("forked, pp", "fork", "forked_accuracy_change", POINTS),
    Figure("top-k flips, %", "routing", "topk_flip", POINTS, None),
    Figure("redundancy", "routing", "redundancy", fixed(4)),
    Figure("mixing, %", "routing", "mixing_removed", POINTS),
    Figure("replay, %", "routing", "replay_removed", POINTS),
)


def measures(models: list[Model], figures: Sequence[Figure]) -> str:
    rows = [[f"`{t}`", *(f.cell(models, t) for f in figures)] for t in models[0].treatments]
    return table(["treatment", *(f.head for f in figures)], rows)


Cell = Callable[[Model], str]


def against(probe: str, name: str, show: Format, treatment: str = BASE) -> Cell:
    """Predicted → measured."""

    def cell(m: Model) -> str:
        row = m.theory(probe, name, treatment)
        return NONE if row is None else f"{show(row['predicted'])} → {interval(row, show)}"

    return cell


def measured(probe: str, metric: str, show: Format, treatment: str = BASE) -> Cell:
    return lambda m: interval(m.measure(probe, metric, treatment), show)


def several(probe: str, metrics: Sequence[str], show: Format, treatment: str = BASE) -> Cell:
    return lambda m: "; ".join(_value(m, probe, metric, show, treatment) for metric in metrics)


def fork(metric: str) -> Cell:
    """At the forks; at the other tokens of the same answers."""

    def cell(m: Model) -> str:
        there, excess = m.measure("fork", metric), m.measure("fork", f"{metric}_excess")
        return f"{there['value']:.2f}; {there['value'] - excess['value']:.2f}" if there and excess else NONE

    return cell


def unforked(treatment: str) -> Cell:
    def cell(m: Model) -> str:
        rows = [m.theory("fork", f"unforked_at_{n}", treatment) for n in (280, 795, 4000)]
        return "; ".join(short(r["predicted"]) for r in rows if r)

    return cell


def _value(m: Model, probe: str, metric: str, show: Format, treatment: str = BASE) -> str:
    row = m.measure(probe, metric, treatment)
    return NONE if row is None or row["value"] is None else show(row["value"])


THEORY: tuple[tuple[str, Cell], ...] = (
    ("√(L/12) → sd of δ, summed over one block a layer", against("gradient", "sum_delta_sd", fixed(3))),
    ("√(1/12) → log2 that a layer adds to ‖dL/dh‖, backward pass alone",
     against("gradient", "dx_step", fixed(3), f"{BASE}@backward")),
    ("the same, forward and backward pass", against("gradient", "dx_step", fixed(3))),
    ("0 → log2 of the stream's norm after the last layer", against("gradient", "layernorm_reset", fixed(3))),
    ("error of the stream there, of its norm", measured("gradient", "stream_error", fixed(3))),
    ("second order → fitted T of Gaussian noise of η's size",
     against("temperature", "Gaussian T, second order", fixed(3))),
    ("excess kurtosis of η: in a context; over all", several("temperature", ("kurtosis", "kurtosis_pooled"), fixed(2))),
    ("what the 1 % most moved contexts are of what T is fitted to, %",
     several("temperature", ("concentration",), fixed(0, 100))),
    ("answers that forked, %", measured("fork", "fork_share", POINTS)),
    ("forks/1000 tokens", measured("fork", "fork_hazard", fixed(1, 1000))),
    ("the same, bf16: in other company; read by full passes",
     several("fork", ("fork_hazard", "fork_hazard_full_pass"), fixed(1, 1000), "bf16")),
    ("constant hazard → forks in the first half of the tokens watched, %", against("fork", "constant_hazard", POINTS)),
    ("entropy at the forks; elsewhere, nats", fork("fork_entropy")),
    ("lead of the first token over the second at the forks; elsewhere, nats", fork("fork_margin")),
    ("constant hazard: unforked at 280; 795; 4000 tokens", unforked(BASE)),
    (f"the same, `{BEST}`", unforked(BEST)),
    ("Gaussian router noise → top-k flips, %", against("routing", "top-k flips, drawn", POINTS)),
)  # fmt: skip


def theory(models: list[Model]) -> str:
    head = [f"predicted → measured, `{BASE}`", *(m.name for m in models)]
    return table(head, [[name, *(cell(m) for m in models)] for name, cell in THEORY])


def drift(models: list[Model]) -> str:
    """A cell has the models that were measured, in order."""
    found = [m.results["drift"] for m in models if "drift" in m.results]
    curves = [next(c for c in r["curves"] if c["name"] == f"{BASE}: gap over α") for r in found]
    rows = []
    for source in found[0]["settings"]["sources"]:
        shapes = [next(s for s in r["shapes"] if s["source"] == source) for r in found]
        means = zip(*(c["series"][source]["mean"] for c in curves), strict=True)
        cells = ["; ".join(map(fixed(4), gaps)) for gaps in means]
        us = "; ".join("yes" if s["u"] else "no" for s in shapes)
        rows.append([source, *cells, "; ".join(s["verdict"] for s in shapes), us])
    return table(["source", *(f"α = {a:g}" for a in curves[0]["x"]), "over α", "a U"], rows)


def made(models: list[Model]) -> dict[str, str]:
    """Every table by its marker's name."""
    return {
        "about": about(models),
        "runs": runs(models),
        "matrix": matrix(models),
        "claims": claims(models),
        "inside": measures(models, INSIDE),
        "answers": measures(models, ANSWERS),
        "theory": theory(models),
        "drift": drift(models),
    }


def page(text: str) -> str:
    """The page with every table made anew."""
    for name, new in made(load()).items():
        text = between(text, name, new)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="into README.md, between its markers")
    if parser.parse_args().write:
        write_atomically(PAGE, page(PAGE.read_text(encoding="utf-8")))
    else:
        print("\n\n".join(f"## {name}\n\n{text}" for name, text in made(load()).items()))


if __name__ == "__main__":
    main()

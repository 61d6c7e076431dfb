"""The runs of `mxrl train` as a comparison reads them: which folders they are in, what they wrote, how each one ended.

    find([Path("runs")])       the run folders among paths, and in them one level down
    read_run(Path("runs/a"))   Run: configuration, a row a step, evaluations, state ("done", "diverged", …) and reason

A run that was killed has no summary.json, and may end in the middle of a line. It is read like any other: what it has
logged counts, and its state says where it stopped.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from mxrl.recipes import Recipe, RecipeError
from mxrl.report.folder import ReportError
from mxrl.rl.config import CONFIG, EVALS, METRICS, SUMMARY, TrainConfig

# Options that change neither the policy that comes out nor what is measured of it: runs that differ in them are alike.
# The seed is what the runs of a group differ in.
NOT_COMPARED = (
    "out", "seed", "eval_every", "eval_batch", "eval_samples", "monitor_every", "save_every", "save_model", "reshard",
    "deterministic", "stop_collapsed",
)  # fmt: skip
UNFINISHED = "unfinished"

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    """What a run's folder holds.

    options: every option of TrainConfig (defaults stand in for those that an older run didn't have), the recipe in its
        canonical spelling, and `compute_dtype`, which "auto" options leave to the machine.
    info: what it ran on. rows: metrics.jsonl, by step. evals: evals.jsonl, by step. state: "done", "unfinished" (no
        summary: killed, interrupted or going on), or what its summary says. notes: what could not be read.
    """

    path: Path
    options: dict[str, Any]
    info: dict[str, Any]
    rows: list[Row]
    evals: list[Row]
    state: str
    reason: str
    notes: list[str] = field(default_factory=list)

    @property
    def seed(self) -> int:
        return self.options["seed"]

    @property
    def done(self) -> bool:
        return self.state == "done"

    @property
    def last_step(self) -> int:
        """The last optimizer step that it has logged; 0 before the first."""
        return int(self.rows[-1]["step"]) if self.rows else 0

    @property
    def planned(self) -> int:
        """Optimizer steps that it was started for."""
        return self.options["steps"] * self.options["updates_per_rollout"] * self.options["iterations"]

    @property
    def before(self) -> Row | None:
        """The evaluation before the first step."""
        return self.evals[0] if self.evals and self.evals[0]["step"] == 0 else None

    @property
    def after(self) -> Row | None:
        """The evaluation after the last step; None unless the run is done."""
        return self.evals[-1] if self.done and self.evals and self.evals[-1]["step"] == self.planned else None

    def ending(self) -> str:
        """ "done", or "diverged at step 40 of 100: the loss is nan"."""
        if self.done:
            return "done"
        return f"{self.state} at step {self.last_step} of {self.planned}" + (f": {self.reason}" if self.reason else "")

    def speed(self, rollout: bool = False) -> float | None:
        """Completion tokens a second, the median rollout: of decoding alone, or with everything but measuring.

        A rollout's time goes from its own step to the one before the next rollout (updates that reuse its samples),
        without evaluation and monitoring. The median leaves out what the first steps spend on compiling.
        """
        speeds: list[float] = []
        tokens = seconds = 0.0
        for row in [*self.rows, {"speed/tokens_per_second": 0.0}]:
            if "speed/tokens_per_second" in row:  # a fresh rollout; the sentinel closes the last one
                if tokens and seconds > 0:
                    speeds.append(tokens / seconds)
                tokens, seconds = row.get("rollout/tokens") or 0.0, 0.0
            seconds += (row.get("time/rollout") if rollout else step_seconds(row)) or 0.0
        return median(speeds) if speeds else None


def step_seconds(row: Row) -> float | None:
    """Wall time of an optimizer step without evaluation and monitoring; None where it wasn't logged."""
    whole = row.get("time/step")
    return None if whole is None else whole - (row.get("time/eval") or 0.0) - (row.get("time/monitor") or 0.0)


def is_run(folder: Path) -> bool:
    return (folder / CONFIG).is_file()


def find(paths: Iterable[Path]) -> tuple[list[Path], list[str]]:
    """(the run folders, notes on what was passed over), each folder once, in the order given.

    A path that is no run itself is searched one level down, by name. Raises ReportError for one that holds no run.
    """
    found: dict[Path, Path] = {}
    notes = []
    for path in paths:
        if not path.is_dir():
            raise ReportError(f"{path} is no folder; give runs of `mxrl train`, or a folder that holds some")
        inside = [path] if is_run(path) else sorted(p for p in path.iterdir() if p.is_dir() and is_run(p))
        if not inside:
            raise ReportError(f"{path} is no run and holds none (no {CONFIG} in it, nor one level down)")
        if not is_run(path):
            others = sorted(p.name for p in path.iterdir() if p.is_dir() and not is_run(p) and p.name[0] != ".")
            if others:
                notes.append(f"in `{path}`, {', '.join(f'`{n}`' for n in others)} is no run: it has no {CONFIG}")
        for run in inside:
            found.setdefault(run.resolve(), run)
    return list(found.values()), notes


def read_run(folder: Path) -> Run:
    """Read a run's files. Raises ReportError (one line) for a configuration that is not one of `mxrl train`."""
    options, info = _config(folder / CONFIG)
    notes: list[str] = []
    state, reason = _state(folder / SUMMARY, notes)
    rows = _rows(folder / METRICS, ("step",), notes, state)
    evals = _rows(folder / EVALS, ("step", "accuracy"), notes, state)
    return Run(folder, options, info, rows, evals, state, reason, notes)


def canonical(recipe: str) -> str:
    """One spelling for a recipe; a text that this mxrl can't parse stays as it is."""
    try:
        return str(Recipe.parse(recipe))
    except RecipeError:
        return recipe


def _config(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as err:
        line = str(err).splitlines()[-1].strip()
        raise ReportError(f"{path} is not YAML ({line}); is it a run of `mxrl train`?") from None
    if not isinstance(values, dict) or not {"recipe", "model", "task", "seed", "steps"} <= values.keys():
        raise ReportError(f"{path} is not the configuration of a run: give folders that `mxrl train` has written")
    info = values.pop("run", None)
    info = info if isinstance(info, dict) else {}
    options = {f.name: _default(f) for f in dataclasses.fields(TrainConfig)} | values
    for name in ("seed", "steps", "updates_per_rollout", "iterations"):
        if not isinstance(options[name], int):
            raise ReportError(f"{path}: {name}={options[name]!r} is no whole number")
    return options | {"recipe": canonical(str(options["recipe"])), "compute_dtype": info.get("compute_dtype")}, info


def _default(option: dataclasses.Field[Any]) -> Any:
    return option.default if option.default is not dataclasses.MISSING else option.default_factory()  # type: ignore[misc]


def _state(path: Path, notes: list[str]) -> tuple[str, str]:
    if not path.is_file():
        return UNFINISHED, "no summary.json: killed, failed, interrupted, or still going on"
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
        return str(summary["status"]), str(summary.get("reason") or "")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        notes.append(f"{path} is not a run's summary; the run counts as unfinished")
        return UNFINISHED, "its summary.json can't be read"


def _rows(path: Path, needed: tuple[str, ...], notes: list[str], state: str) -> list[Row]:
    """The lines that are whole, by step (of a step that stands twice, the later line); notes say what isn't."""
    found: dict[int, Row] = {}
    broken = []
    text = path.read_bytes().decode("utf-8", errors="replace") if path.is_file() else ""
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            if not all(isinstance(row[name], int | float) and math.isfinite(row[name]) for name in needed):
                raise ValueError
            found[int(row["step"])] = row
        except (ValueError, KeyError, TypeError, RecursionError):
            broken.append(number)
    if broken == [len(lines)] and not text.endswith("\n") and state != "done":
        notes.append(f"{path}: the last line is cut off, and left out")
    elif broken:
        which = f"line {broken[0]} is" if len(broken) == 1 else f"lines {', '.join(map(str, broken))} are"
        notes.append(f"{path}: {which} not valid, and left out")
    return [found[step] for step in sorted(found)]

"""Runs compared: groups of seeds, their means with 95 % intervals, paired differences, curves; as plain dictionaries.

    compare([read_run(path), …])   {"subjects": [{"model", "task", "groups": […], "curves": […]}], "notes": […]}

A *subject* is a model and its task: accuracies of different ones are never averaged, paired or drawn together. A
*group* is the runs that agree in every option but those of `runs.NOT_COMPARED`: they differ in the seed, which gives
the interval, mean ± t·sd/√n over seeds (probes/intervals.py). A group is named by its recipe and by the other options
in which the subject's groups differ.

Paired differences. A group and a reference (the group that differs from it in the recipe alone) have seeds in common:
    two or more     mean over seeds of a_s − b_s, with its interval over seeds
    one             mean over problems of a_i − b_i, with its interval over problems: it says how far other problems
                    could have moved the difference, not how far another seed would
Only runs that are done have an accuracy after training. That the others have none is said, not averaged over.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from mxrl.probes.intervals import Mean, mean, paired
from mxrl.report.runs import NOT_COMPARED, Row, Run, step_seconds

SCHEMA = 1
SUBJECT = ("model", "task", "task_options")
REFERENCES = ("bf16", "mxfp4")  # recipes that every other one is compared with
POINTS = 100  # of a curve; a longer run's steps are averaged into as many


class Curve(NamedTuple):
    """A curve of the page: its name in report.json and of its PNG, its heading, and a row's value (None: no value)."""

    name: str
    title: str
    value: Callable[[Row], float | None]
    share: bool = False  # shown in percent
    evals: bool = False  # of evals.jsonl, not metrics.jsonl


def _metric(name: str) -> Callable[[Row], float | None]:
    return lambda row: row.get(name)


CURVES = (
    Curve("greedy_accuracy", "Greedy accuracy on the held-out problems", _metric("accuracy"), share=True, evals=True),
    Curve("reward", "Reward of the samples", _metric("reward")),
    Curve("accuracy", "Accuracy of the samples", _metric("accuracy"), share=True),
    Curve("entropy", "Entropy of the policy, nats a token", _metric("entropy")),
    Curve("gap_k3", "Gap of rollout and training: KL (k3), nats a token", _metric("gap/k3")),
    Curve("gap_pearson", "Gap of rollout and training: Pearson of the log-probabilities", _metric("gap/pearson")),
    Curve("gap_chi2", "Gap of rollout and training: χ²", _metric("gap/chi2")),
    Curve("gap_truncated", "Share of tokens whose weight TIS cut", _metric("gap/truncated"), share=True),
    Curve("grad_norm", "Norm of the gradient, before clipping", _metric("grad_norm")),
    Curve("length", "Length of a response, tokens", _metric("completions/mean_length")),
    Curve("distinct", "Distinct answers of a prompt's samples", _metric("group/distinct_answers")),
    Curve("seconds", "Seconds a step, without evaluation and monitoring", step_seconds),
    Curve("aqn_sigma", "AQN's σ", lambda row: row.get("aqn/sigma") or None),  # 0 is what runs without AQN log
)


def compare(runs: Sequence[Run], notes: Iterable[str] = ()) -> dict[str, Any]:
    """The comparison as report.json holds it; finite floats or None. Raises ValueError without a run."""
    if not runs:
        raise ValueError("nothing to compare: no run was given")
    subjects: dict[str, list[Run]] = {}
    for run in runs:
        subjects.setdefault(_text({name: run.options[name] for name in SUBJECT}), []).append(run)
    said = [*notes, *(note for run in runs for note in run.notes)]
    if len(subjects) > 1:
        said.append(
            f"The runs are of {len(subjects)} different models or tasks. Each has a section of its own, and nothing is "
            "averaged or paired across them."
        )
    return {
        "schema": SCHEMA,
        "runs": len(runs),
        "subjects": [_subject(members) for members in subjects.values()],
        "notes": said,
    }


def _subject(runs: list[Run]) -> dict[str, Any]:
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(_text(_kept(run)), []).append(run)
    members = [_by_seed(group) for group in groups.values()]
    members.sort(key=lambda m: [m[0][0].options["recipe"] != name for name in REFERENCES])  # references first
    heads = [used[0] for used, _ in members]
    differs = [n for n in _kept(heads[0]) if len({_text(h.options.get(n)) for h in heads}) > 1]
    alike = {n: v for n, v in _kept(heads[0]).items() if n not in (*differs, *SUBJECT)}
    notes = [note for _, repeated in members for note in repeated] + _machines(runs)
    labels = [_label(head, differs) for head in heads]
    found = [_group(label, used, members, differs) for label, (used, _) in zip(labels, members, strict=True)]
    for label, (used, _) in zip(labels, members, strict=True):
        notes += _uneven(label, used)
    options = heads[0].options
    return {
        "model": options["model"],
        "task": options["task"],
        "task_options": options["task_options"],
        "differs": differs,
        "alike": alike,
        "groups": found,
        "curves": [c for c in (_curve(curve, labels, [u for u, _ in members]) for curve in CURVES) if c],
        "notes": notes,
    }


# --- groups ----------------------------------------------------------------------------------------------------------


def _kept(run: Run) -> dict[str, Any]:
    return {name: value for name, value in run.options.items() if name not in NOT_COMPARED}


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _label(run: Run, differs: Sequence[str]) -> str:
    others = [f"{name}={run.options.get(name)}" for name in differs if name != "recipe"]
    return " ".join([run.options["recipe"], *others])


def _by_seed(runs: list[Run]) -> tuple[list[Run], list[str]]:
    """(one run for each seed, notes on the others): the same run twice would make the interval too narrow."""
    used: dict[int, Run] = {}
    for run in sorted(runs, key=lambda r: (not r.done, -r.last_step)):
        used.setdefault(run.seed, run)
    notes = [
        f"`{run.path}` has the configuration and the seed of `{used[run.seed].path}`, and is left out."
        for run in runs
        if used[run.seed] is not run
    ]
    return [used[seed] for seed in sorted(used)], notes


def _group(label: str, runs: list[Run], members: Any, differs: Sequence[str]) -> dict[str, Any]:
    ended = [r for r in runs if r.after]
    both = [r for r in ended if r.before]
    return {
        "label": label,
        "recipe": runs[0].options["recipe"],
        "options": {name: runs[0].options.get(name) for name in differs},
        "seeds": [r.seed for r in runs],
        "done": sum(r.done for r in runs),
        "accuracy_before": _over_seeds([r.before["accuracy"] for r in runs if r.before]),
        "accuracy_after": _over_seeds([r.after["accuracy"] for r in ended if r.after]),
        "gain": _difference([(r.after, r.before) for r in both]),
        "against": {name: _against(runs, _reference(name, runs[0], members)) for name in REFERENCES},
        "tokens_per_second": _over_seeds([s for r in runs if (s := r.speed()) is not None]),
        "rollout_tokens_per_second": _over_seeds([s for r in runs if (s := r.speed(rollout=True)) is not None]),
        "runs": [_about(r) for r in runs],
    }


def _about(run: Run) -> dict[str, Any]:
    last = run.evals[-1] if run.evals else None
    return {
        "path": str(run.path),
        "seed": run.seed,
        "state": run.state,
        "reason": run.reason,
        "ending": run.ending(),
        "last_step": run.last_step,
        "planned": run.planned,
        "accuracy_before": run.before["accuracy"] if run.before else None,
        "accuracy_last": last["accuracy"] if last else None,
        "accuracy_last_step": last["step"] if last else None,
        "eval_problems": last.get("n") if last else None,
        "device": run.info.get("device"),
        "commit": run.info.get("commit"),
        "versions": run.info.get("versions"),
    }


def _reference(recipe: str, run: Run, members: Any) -> list[Run] | None:
    """The runs of the group that has `recipe` and otherwise the options of `run`; None where there is none."""
    wanted = _text(_kept(run) | {"recipe": recipe})
    return next((used for used, _ in members if _text(_kept(used[0])) == wanted), None)


def _against(runs: list[Run], reference: list[Run] | None) -> dict[str, Any] | None:
    if reference is None or reference is runs:
        return None
    theirs = {r.seed: r.after for r in reference}
    return _difference([(r.after, theirs.get(r.seed)) for r in runs])


def _difference(pairs: Sequence[tuple[Row | None, Row | None]]) -> dict[str, Any] | None:
    """Mean difference of the pairs' accuracies: over seeds, or where there is one pair over its problems."""
    known = [(a, b) for a, b in pairs if a and b]
    if not known:
        return None
    if len(known) > 1:
        return _as_dict(paired([a["accuracy"] for a, _ in known], [b["accuracy"] for _, b in known]), "seeds")
    (a, b) = known[0]
    scores = [[float(c == "1") for c in str(row.get("right") or "")] for row in (a, b)]
    # `right` says right or wrong; where a reward knows more, the accuracies themselves are what counts
    exact = all(s and math.isclose(fmean(s), r["accuracy"], abs_tol=1e-9) for s, r in zip(scores, (a, b), strict=True))
    if len(scores[0]) == len(scores[1]) > 1 and exact:
        return _as_dict(paired(*scores), "problems")
    return _as_dict(Mean(a["accuracy"] - b["accuracy"], math.nan, math.nan, 1), "seeds")


def _over_seeds(values: Sequence[float]) -> dict[str, Any] | None:
    return _as_dict(mean(values), "seeds") if values else None


def _as_dict(found: Mean, over: str) -> dict[str, Any]:
    return {k: _finite(v) for k, v in found.to_dict().items()} | {"over": over}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


# --- what has to be said ---------------------------------------------------------------------------------------------


def _machines(runs: list[Run]) -> list[str]:
    notes = []
    for name, what in (("device", "devices"), ("processes", "numbers of processes"), ("commit", "commits of mxrl")):
        values = sorted({str(r.info.get(name)) for r in runs if r.info})
        if len(values) > 1:
            speed = "" if name == "commit" else "; their speeds are not comparable"
            notes.append(f"The runs come from different {what} ({', '.join(values)}){speed}.")
    return notes


def _uneven(label: str, runs: list[Run]) -> list[str]:
    """Where a curve goes on with fewer seeds than it began with."""
    reached = sorted({r.last_step for r in runs})
    return [
        f"`{label}`: after step {step} its curves are the mean of {left} of {len(runs)} seeds, so they may jump there."
        for step in reached[:-1]
        if (left := sum(r.last_step > step for r in runs))
    ]


# --- curves ----------------------------------------------------------------------------------------------------------


def _curve(curve: Curve, labels: Sequence[str], groups: Sequence[list[Run]]) -> dict[str, Any] | None:
    """{"name", "title", "share", "steps_a_point", "x": […], "series": {label: {"mean", "low", "high", "n"}}}, or None.

    Every point is a mean over the seeds that have the step; n says how many. Groups without a value are left out.
    """
    longest = max((r.last_step for runs in groups for r in runs), default=0)
    width = 1 if curve.evals else max(1, math.ceil(longest / POINTS))
    by_run = [
        [_points(r.evals if curve.evals else r.rows, curve.value, width, longest) for r in runs] for runs in groups
    ]
    x = sorted({step for runs in by_run for found in runs for step in found})
    series = {}
    for label, runs in zip(labels, by_run, strict=True):
        means = [mean(v) if (v := [found[s] for found in runs if s in found]) else None for s in x]
        if any(means):
            series[label] = {
                "mean": [m and m.value for m in means],
                "low": [m and _finite(m.low) for m in means],
                "high": [m and _finite(m.high) for m in means],
                "n": [m.n if m else 0 for m in means],
            }
    if not series:
        return None
    return {
        "name": curve.name, "title": curve.title, "share": curve.share, "steps_a_point": width, "x": x,
        "series": series,
    }  # fmt: skip


def _points(rows: Sequence[Row], value: Callable[[Row], float | None], width: int, last: int) -> dict[int, float]:
    """step → value; `width` consecutive steps are one point, at the last of them; last: of the longest run."""
    bins: dict[int, list[float]] = {}
    for row in rows:
        found = value(row)
        if isinstance(found, int | float) and math.isfinite(found):
            step = int(row["step"])
            bins.setdefault(min(math.ceil(step / width) * width, max(last, step)), []).append(float(found))
    return {step: fmean(values) for step, values in bins.items()}

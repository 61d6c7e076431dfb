"""`mxrl report RUN…` on folders written here, whose means, intervals and differences are worked out by hand."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from mxrl.cli import main
from mxrl.report import runs_png
from mxrl.report.folder import ReportError
from mxrl.report.run_groups import POINTS, compare
from mxrl.report.runs import NOT_COMPARED, find, read_run
from mxrl.report.runs_files import CallError, report
from mxrl.report.runs_page import bounds, points
from mxrl.rl.config import TrainConfig

# Student's t, two-sided 95 %, of 1 and 2 degrees of freedom (any table)
T1, T2 = 12.706, 4.303


def run_at(
    folder: Path,
    *,
    after: float = 0.5,
    before: float = 0.25,
    logged: int | None = None,
    status: str | None = "done",
    reason: str = "",
    metrics: dict[str, Any] | None = None,
    right: tuple[str, str] | None = None,
    **options: Any,
) -> Path:
    """A run of 4 steps (or options["steps"]) as `mxrl train` writes it; metrics: name → f(step) or a constant."""
    config = TrainConfig(**({"recipe": "bf16", "steps": 4, "eval_problems": 8} | options), out=str(folder))
    folder.mkdir(parents=True)
    info = {"compute_dtype": "float32", "device": "x86_64", "commit": "abc", "processes": 1}
    (folder / "config.yaml").write_text(yaml.safe_dump({**config.to_dict(), "run": info}))
    base = {"reward": 0.5, "rollout/tokens": 100.0, "time/step": 2.0, "time/rollout": 1.0, "aqn/sigma": 0.0}
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, (config.steps if logged is None else logged) + 1):
            row = {n: v(step) if callable(v) else v for n, v in (base | (metrics or {})).items()}
            file.write(json.dumps({"step": step, "speed/tokens_per_second": 1.0, **row}) + "\n")
    evals = [{"step": 0, "accuracy": before, "n": 8, "right": right[0] if right else ""}]
    if status == "done":
        evals.append({"step": config.steps, "accuracy": after, "n": 8, "right": right[1] if right else ""})
    (folder / "evals.jsonl").write_text("".join(json.dumps(e) + "\n" for e in evals))
    if status:
        (folder / "summary.json").write_text(json.dumps({"status": status, "reason": reason}))
    return folder


def compared(*folders: Path) -> dict[str, Any]:
    return compare([read_run(f) for f in folders])


def groups_of(result: dict[str, Any]) -> dict[str, Any]:
    assert len(result["subjects"]) == 1
    return {g["label"]: g for g in result["subjects"][0]["groups"]}


def series_of(result: dict[str, Any], name: str) -> dict[str, Any]:
    (curve,) = [c for c in result["subjects"][0]["curves"] if c["name"] == name]
    return {"x": curve["x"]} | curve["series"]


# --- means, intervals, differences -----------------------------------------------------------------------------------


def test_means_and_intervals_over_seeds(tmp_path: Path) -> None:
    """after = .5, .6, .7: mean .6, sd .1, half = 4.303 · .1/√3. Gains .25, .35, .45 the same half."""
    folders = [run_at(tmp_path / f"{s}", seed=s, after=0.5 + s / 10) for s in range(3)]
    (group,) = groups_of(compared(*folders)).values()
    half = T2 * 0.1 / 3**0.5
    assert group["seeds"] == [0, 1, 2] and group["done"] == 3
    for name, value in (("accuracy_after", 0.6), ("gain", 0.35)):
        found = group[name]
        assert (found["n"], found["over"]) == (3, "seeds")
        assert [found[k] for k in ("value", "low", "high")] == pytest.approx([value, value - half, value + half])


def test_differences_are_paired_over_the_seeds_that_both_have(tmp_path: Path) -> None:
    """Seeds 0, 1 of both: .6 − .3 and .8 − .6, mean .25, sd .1/√2, half = 12.706 · .05; 2 and 7 don't count."""
    bf16 = [run_at(tmp_path / f"b{s}", seed=s, after=a) for s, a in ((0, 0.3), (1, 0.6), (7, 0.0))]
    mbs = [run_at(tmp_path / f"m{s}", seed=s, after=a, recipe="mxfp4+mbs") for s, a in ((0, 0.6), (1, 0.8), (2, 0.9))]
    groups = groups_of(compared(*mbs, *bf16))
    assert list(groups) == ["bf16", "mxfp4+mbs"]  # the reference comes first
    found = groups["mxfp4+mbs"]["against"]["bf16"]
    assert (found["n"], found["over"]) == (2, "seeds")
    assert [found[k] for k in ("value", "low", "high")] == pytest.approx([0.25, 0.25 - T1 * 0.05, 0.25 + T1 * 0.05])
    assert groups["bf16"]["against"]["bf16"] is None
    assert groups["mxfp4+mbs"]["against"]["mxfp4"] is None  # no such runs


def test_one_common_seed_is_compared_over_problems(tmp_path: Path) -> None:
    """Differences of 8 problems 1 1 1 1 0 0 0 0: mean .5, sd √(2/7), half = t(7) · √(2/7)/√8 = 2.365 · .18898."""
    a = run_at(tmp_path / "a", recipe="mxfp4+mbs", after=0.75, right=("11000000", "11111100"))
    b = run_at(tmp_path / "b", after=0.25, right=("11000000", "00001100"))
    group = groups_of(compared(a, b))["mxfp4+mbs"]
    found = group["against"]["bf16"]
    half = 2.365 * (2 / 7) ** 0.5 / 8**0.5
    assert (found["n"], found["over"]) == (8, "problems")
    assert [found[k] for k in ("value", "low", "high")] == pytest.approx([0.5, 0.5 - half, 0.5 + half])
    assert points(found) == "+50.0 [+5.3, +94.7] (over problems)"
    assert group["gain"]["over"] == "problems" and group["gain"]["value"] == pytest.approx(0.5)
    after = group["accuracy_after"]
    assert (after["value"], after["low"], after["high"], after["n"]) == (0.75, None, None, 1)


@pytest.mark.parametrize("right", [None, ("11000000", "1111"), ("11000000", "11111111")])
def test_one_seed_without_its_problems_has_no_interval(right: Any, tmp_path: Path) -> None:
    """No string, another number of problems, or one that contradicts the accuracy (a reward that knows more)."""
    a = run_at(tmp_path / "a", recipe="mxfp4+mbs", after=0.75, right=right)
    b = run_at(tmp_path / "b", after=0.25, right=("11000000", "00001100"))
    found = groups_of(compared(a, b))["mxfp4+mbs"]["against"]["bf16"]
    assert found == {"value": 0.5, "low": None, "high": None, "n": 1, "over": "seeds"}
    assert points(found) == "+50.0 (one seed)"


def test_speed_is_of_the_median_rollout_without_measuring(tmp_path: Path) -> None:
    """Seconds 30 (compiling), 2, 4 − 1 − 1, 2: 3.3, 50, 50, 50 tokens a second; decoding 100 a second."""
    seconds, measuring = {1: 30.0, 3: 4.0}, {3: 1.0}
    timing = {
        "time/step": lambda s: seconds.get(s, 2.0),
        "time/eval": lambda s: measuring.get(s),
        "time/monitor": lambda s: measuring.get(s),
    }
    run = read_run(run_at(tmp_path / "a", metrics=timing))
    assert (run.speed(), run.speed(rollout=True)) == (50.0, 100.0)
    assert series_of(compare([run]), "seconds")["bf16"]["mean"] == [30.0, 2.0, 2.0, 2.0]


def test_a_rollout_used_for_several_steps_takes_all_their_time(tmp_path: Path) -> None:
    folder = run_at(tmp_path / "a", iterations=2, steps=2, logged=4)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows[1::2]:
        del row["speed/tokens_per_second"], row["time/rollout"]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    run = read_run(folder)
    assert run.planned == 4
    assert (run.speed(), run.speed(rollout=True)) == (25.0, 100.0)


# --- curves ----------------------------------------------------------------------------------------------------------


def test_curves_are_means_over_seeds(tmp_path: Path) -> None:
    """reward = step and 3·step: mean 2·step, sd √2·step, half = 12.706 · √2/√2 · step."""
    folders = [run_at(tmp_path / f"{s}", seed=s, metrics={"reward": lambda t, s=s: (1 + 2 * s) * t}) for s in (0, 1)]
    found = series_of(compared(*folders), "reward")
    assert found["x"] == [1, 2, 3, 4]
    assert found["bf16"]["mean"] == [2.0, 4.0, 6.0, 8.0]
    assert found["bf16"]["high"] == pytest.approx([2 + T1, 4 + 2 * T1, 6 + 3 * T1, 8 + 4 * T1])
    assert found["bf16"]["n"] == [2] * 4


def test_different_lengths_count_where_they_are_and_say_so(tmp_path: Path) -> None:
    long = run_at(tmp_path / "0", seed=0, metrics={"reward": 1.0})
    short = run_at(tmp_path / "1", seed=1, logged=2, status=None, metrics={"reward": 0.0})
    result = compared(long, short)
    found = series_of(result, "reward")["bf16"]
    assert (found["mean"], found["n"]) == ([0.5, 0.5, 1.0, 1.0], [2, 2, 1, 1])
    assert found["low"][2:] == [None, None]
    assert any("after step 2 its curves are the mean of 1 of 2 seeds" in n for n in result["subjects"][0]["notes"])


def test_long_curves_are_averaged_into_points(tmp_path: Path) -> None:
    steps = 2 * POINTS + 2  # 3 steps a point
    folder = run_at(tmp_path / "a", steps=steps, metrics={"reward": lambda t: t, "entropy": lambda t: None})
    result = compared(folder)
    found = series_of(result, "reward")
    assert found["x"][:2] == [3, 6] and found["x"][-1] == steps and len(found["x"]) == 68
    assert found["bf16"]["mean"][:2] == [2.0, 5.0] and found["bf16"]["mean"][-2:] == [200.0, 202.0]
    assert all(
        c["steps_a_point"] == (1 if c["name"] == "greedy_accuracy" else 3) for c in result["subjects"][0]["curves"]
    )
    assert "entropy" not in [c["name"] for c in result["subjects"][0]["curves"]]  # never logged as a number


def test_sigma_is_drawn_for_aqn_alone(tmp_path: Path) -> None:
    plain = run_at(tmp_path / "a")
    noisy = run_at(tmp_path / "b", recipe="mxfp4+aqn", metrics={"aqn/sigma": 0.01})
    assert list(series_of(compared(plain, noisy), "aqn_sigma")) == ["x", "mxfp4+aqn"]
    assert "aqn_sigma" not in [c["name"] for c in compared(plain)["subjects"][0]["curves"]]


# --- groups ----------------------------------------------------------------------------------------------------------


def test_groups_are_named_by_what_differs(tmp_path: Path) -> None:
    a = run_at(tmp_path / "a", recipe="mxfp4+of+mbs", lr=1e-4)
    b = run_at(tmp_path / "b", recipe="mxfp4+mbs+of", lr=1e-4, seed=1, save_every=7, monitor_every=0)
    c = run_at(tmp_path / "c", recipe="mxfp4+mbs+of", lr=5e-5)
    d = run_at(tmp_path / "d", recipe="bf16", lr=5e-5)
    result = compared(a, b, c, d)
    groups = groups_of(result)
    assert result["subjects"][0]["differs"] == ["recipe", "lr"]
    assert {label: g["seeds"] for label, g in groups.items()} == {
        "bf16 lr=5e-05": [0], "mxfp4+mbs+of lr=0.0001": [0, 1], "mxfp4+mbs+of lr=5e-05": [0],
    }  # fmt: skip
    # compared with the bf16 runs of the same learning rate, or with none
    assert groups["mxfp4+mbs+of lr=0.0001"]["against"]["bf16"] is None
    assert groups["mxfp4+mbs+of lr=5e-05"]["against"]["bf16"]["n"] == 1


def test_different_models_and_tasks_are_kept_apart(tmp_path: Path) -> None:
    dense = run_at(tmp_path / "a", recipe="mxfp4")
    moe = run_at(tmp_path / "b", model="policy:moe")
    longer = run_at(tmp_path / "c", task_options={"steps": 9})
    result = compared(dense, moe, longer)
    assert [(s["model"], s["task_options"], len(s["groups"])) for s in result["subjects"]] == [
        ("policy:dense", {}, 1), ("policy:moe", {}, 1), ("policy:dense", {"steps": 9}, 1),
    ]  # fmt: skip
    assert all(g["against"]["bf16"] is None for s in result["subjects"] for g in s["groups"])
    assert "3 different models or tasks" in result["notes"][0]


def test_one_seed_twice_counts_once(tmp_path: Path) -> None:
    a = run_at(tmp_path / "a", status=None, logged=2)
    b = run_at(tmp_path / "b", after=0.75)
    result = compared(a, b)
    (group,) = groups_of(result).values()
    assert group["seeds"] == [0] and group["accuracy_after"]["value"] == 0.75  # the one that is done
    assert f"`{a}` has the configuration and the seed of `{b}`, and is left out." in result["subjects"][0]["notes"]


def test_options_that_a_resumed_run_may_change_are_not_compared() -> None:
    from mxrl.rl.train import MAY_DIFFER

    assert set(MAY_DIFFER) <= set(NOT_COMPARED) <= {f.name for f in dataclasses.fields(TrainConfig)}


# --- runs that did not end well --------------------------------------------------------------------------------------


def test_stopped_runs_are_marked_with_their_reason(tmp_path: Path) -> None:
    run_at(tmp_path / "runs/a", seed=0, recipe="mxfp4", after=0.75)
    run_at(tmp_path / "runs/b", seed=1, recipe="mxfp4", status="diverged", reason="the loss is nan", logged=3)
    run_at(tmp_path / "runs/c", seed=2, recipe="mxfp4", status=None, logged=1)
    said, warnings = report([tmp_path / "runs"], tmp_path / "out")
    (group,) = groups_of(json.loads((tmp_path / "out/report.json").read_text())).values()
    assert (group["done"], group["accuracy_after"]["n"], group["accuracy_before"]["n"]) == (1, 1, 3)
    endings = ["diverged at step 3 of 4: the loss is nan", "unfinished at step 1 of 4: no summary.json: killed"]
    for text in (warnings[0], (tmp_path / "out/report.html").read_text(), (tmp_path / "out/report.md").read_text()):
        assert all(ending in text for ending in endings)
    assert warnings[0].startswith("2 of 3 runs did not reach their end: ")
    assert "| 1 of 3 |" in (tmp_path / "out/report.md").read_text()
    assert said[-1].startswith(f"written: {tmp_path / 'out/report.html'}, report.md, report.json")


@pytest.mark.parametrize(
    ("spoil", "note"),
    [
        (lambda text: text + '{"step": 3, "rew', "the last line is cut off, and left out"),
        (lambda text: text.replace('{"step": 2', '{"st'), "line 2 is not valid, and left out"),
        (lambda text: text + "[]\n{}\n", "lines 5, 6 are not valid, and left out"),
    ],
)
def test_broken_lines_are_left_out_and_said(spoil: Any, note: str, tmp_path: Path) -> None:
    folder = run_at(tmp_path / "a", status=None)
    (folder / "metrics.jsonl").write_text(spoil((folder / "metrics.jsonl").read_text()))
    result = compared(folder)
    assert result["notes"] == [f"{folder / 'metrics.jsonl'}: {note}"]
    assert series_of(result, "reward")["x"] == ([1, 3, 4] if "line 2" in note else [1, 2, 3, 4])


def test_of_a_step_that_stands_twice_the_later_line_counts(tmp_path: Path) -> None:
    """A run that was killed and goes on repeats steps, until it has cut its files back to the checkpoint."""
    folder = run_at(tmp_path / "a", status=None)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "reward": 7.0}\n')
    assert series_of(compared(folder), "reward")["bf16"]["mean"] == [0.5, 7.0, 0.5, 0.5]


def test_only_a_run_that_is_done_has_an_accuracy_after_training(tmp_path: Path) -> None:
    folder = run_at(tmp_path / "a")
    (folder / "summary.json").unlink()
    (group,) = groups_of(compared(folder)).values()
    assert group["accuracy_after"] is None and group["gain"] is None
    assert group["runs"][0]["accuracy_last"] == 0.5 and group["runs"][0]["accuracy_last_step"] == 4


def test_a_run_that_has_logged_nothing_is_there(tmp_path: Path) -> None:
    folder = run_at(tmp_path / "a", status=None)
    for name in ("metrics.jsonl", "evals.jsonl"):
        (folder / name).unlink()
    (folder / "summary.json").write_text("{")
    _, warnings = report([folder], tmp_path / "out")
    assert "unfinished at step 0 of 4: its summary.json can't be read" in warnings[0]
    assert "None of these runs has logged a step." in (tmp_path / "out/report.html").read_text()


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_command_writes_page_markdown_json_and_curves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [
        run_at(tmp_path / f"{r}-{s}", seed=s, recipe=r, after=a + s / 100)
        for r, a in (("bf16", 0.9), ("mxfp4", 0.5), ("mxfp4+mbs", 0.5))
        for s in (0, 1, 2)
    ]
    monkeypatch.chdir(tmp_path)
    assert main(["report", *map(str, folders)]) == 0
    err = capsys.readouterr().err
    assert err == "" if runs_png.available() else runs_png.MISSING in err
    text = Path("report-runs/report.md").read_text()
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len(table) == 5 and table[2].startswith("| `bf16` | 3 of 3 | 25.0 | 91.0 [88.5, 93.5] |")
    assert "| +66.0 [+63.5, +68.5] | reference | +40.0 [+40.0, +40.0] | 50 | 100 |" in table[2]
    assert "Against `mxfp4`, by accuracy after training: undecided `bf16` (+40.0" in text  # an interval of no width
    page = Path("report-runs/report.html").read_text()
    assert "<script" not in page and "Against <code>bf16</code>, by accuracy after training" in page
    data = json.loads(Path("report-runs/report.json").read_text())
    assert data["schema"] == 1 and data["runs"] == 9 and data["made"]["versions"]["mxrl"]
    pictures = {p.name for p in Path("report-runs").glob("*.png")}
    assert set(re.findall(r"!\[.*?\]\((.*?)\)", text)) == pictures
    if runs_png.available():
        assert "reward.png" in pictures and Path("report-runs/reward.png").read_bytes()[:4] == b"\x89PNG"


def test_better_and_worse_are_said(tmp_path: Path) -> None:
    rising = {"bf16": (0.9, 0.8), "mxfp4": (0.5, 0.41), "mxfp4+mbs": (0.6, 0.8)}
    for recipe, accuracies in rising.items():
        for seed, a in enumerate(accuracies):
            run_at(tmp_path / f"runs/{recipe}-{seed}", recipe=recipe, seed=seed, after=a)
    said, _ = report([tmp_path / "runs"], tmp_path / "out")
    # .4, .39: mean .395, half 12.706 · .005 = .0635
    assert "worse mxfp4 (−39.5 [−45.9, −33.1]); undecided mxfp4+mbs (−15.0" in said[0]
    assert "better bf16 (+39.5 [+33.1, +45.9]); undecided mxfp4+mbs" in said[1]


def test_without_matplotlib_the_rest_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs_png, "available", lambda: False)
    said, warnings = report([run_at(tmp_path / "a")], tmp_path / "out")
    assert warnings == ["the curves as PNG need matplotlib, which is not installed: pip install 'mxrl[report]'"]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["report.html", "report.json", "report.md"]
    assert "![" not in (tmp_path / "out/report.md").read_text() and "PNG" not in said[-1]


def test_subjects_have_sections_and_pictures_of_their_own(tmp_path: Path) -> None:
    for model in ("policy:dense", "policy:moe"):
        run_at(tmp_path / "runs" / model[7:], model=model)
    report([tmp_path / "runs"], tmp_path / "out")
    text = (tmp_path / "out/report.md").read_text()
    assert "## policy:dense on chain" in text and "## policy:moe on chain" in text
    if runs_png.available():
        assert (tmp_path / "out/2-policy-moe-on-chain-reward.png").is_file()


def test_find_looks_one_level_down_and_says_what_it_passes(tmp_path: Path) -> None:
    a, b = run_at(tmp_path / "runs/a"), run_at(tmp_path / "runs/b")
    run_at(tmp_path / "runs/deep/er")
    found, notes = find([tmp_path / "runs", a, b])
    assert found == [a, b]
    assert notes == [f"in `{tmp_path / 'runs'}`, `deep` is no run: it has no config.yaml"]


def _analysis(folder: Path) -> Path:
    folder.mkdir()
    (folder / "tensors.jsonl").write_text("")
    return folder


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (lambda p: [run_at(p / "a"), _analysis(p / "b")], "b holds an analysis or a probe, not a run: give it alone"),
        (lambda p: [_analysis(p / "a"), _analysis(p / "b")], "a holds an analysis or a probe, not a run"),
        (lambda p: [run_at(p / "a"), p / "no"], "no is no folder; give runs"),
        (lambda p: [run_at(p / "a"), p], None),
        (lambda p: [p], "has neither summary.json nor probe.json; give"),
        (lambda p: [p / "no"], "is no folder; give"),
        (lambda p: [run_at(p / "a"), (p / "x").mkdir() or p / "x"], "x is no run and holds none"),
    ],
)
def test_what_is_no_run_is_one_clear_line(
    make: Any, part: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs_png, "available", lambda: False)
    monkeypatch.chdir(tmp_path)
    folders = [str(f) for f in make(tmp_path)]
    wrong = 2 if part and "an analysis or a probe, not a run" in part else 1
    assert main(["report", *folders]) == (wrong if part else 0)  # None: a run beside the folder that holds it
    out, err = capsys.readouterr()
    if part:
        assert out == "" and err.count("\n") == 1 and part in err and "this is a bug" not in err
        assert not Path("report-runs").exists()


@pytest.mark.parametrize(
    ("config", "part"),
    [("a: [", "is not YAML"), ("- 1", "is not the configuration of a run"), ("recipe: bf16", "is not the config"),
     ("{recipe: bf16, model: m, task: t, seed: x, steps: 1}", "seed='x' is no whole number")],
)  # fmt: skip
def test_a_config_that_is_none(config: str, part: str, tmp_path: Path) -> None:
    folder = run_at(tmp_path / "a")
    (folder / "config.yaml").write_text(config)
    with pytest.raises(ReportError, match=re.escape(part)) as error:
        read_run(folder)
    assert str(folder / "config.yaml") in str(error.value)


def test_an_older_run_has_todays_defaults(tmp_path: Path) -> None:
    a, b = run_at(tmp_path / "a"), run_at(tmp_path / "b", seed=1)
    values = yaml.safe_load((a / "config.yaml").read_text())
    del values["lm_head_fp32"], values["task_options"]
    (a / "config.yaml").write_text(yaml.safe_dump(values))
    (group,) = groups_of(compared(a, b)).values()
    assert group["seeds"] == [0, 1]


def test_out_is_for_runs(tmp_path: Path) -> None:
    with pytest.raises(CallError, match="--out is for a comparison of runs"):
        report([_analysis(tmp_path / "a")], tmp_path / "out")
    (tmp_path / "empty").mkdir()
    for folder, part in ((tmp_path / "no", "no is no folder"), (tmp_path / "empty", "has neither summary.json nor")):
        with pytest.raises(ReportError, match=part):  # said first
            report([folder], tmp_path / "out")


def test_the_bands_of_shares_stay_where_shares_can_be() -> None:
    series = {"mean": [0.5, 0.5, 0.5], "low": [-0.5, 0.2, None], "high": [1.5, 0.8, None]}
    low, high = bounds(series, True)
    assert (low[:2], high[:2]) == ([0.0, 0.2], [1.0, 0.8]) and low[2] != low[2]
    assert bounds(series, False)[0][:2] == [-0.5, 0.2]

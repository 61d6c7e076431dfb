"""experiments/sweep.py: which runs a file asks for, how workers share them, what is left when one fails, dies or time
is up, and results that travel. Workers are real processes; but for one test their `train` trains nothing."""

import importlib
import json
import re
import sys
import tarfile
import time
from pathlib import Path

import pytest
import yaml

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
# In a worker, instead of mxrl.rl.train: what a run does follows from its name.
PRETENDING = """
import json, os, signal, sys, time, types
from pathlib import Path


def train(config):
    out = Path(config.out)
    kind = out.parent.name
    print("training", kind)
    if kind == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "fails":
        raise ValueError("no such thing\\nas this")
    if kind == "long":
        asked = []
        signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
        (out / "begun").touch()
        while not asked:
            time.sleep(0.01)
        (out / "checkpoint").touch()
        return {"status": "interrupted"}
    if kind == "slow":
        time.sleep(0.5)
    status = "diverged" if kind == "diverges" else "done"
    (out / "config.yaml").write_text(f"seed: {config.seed}\\n")
    (out / "seen.json").write_text(json.dumps([os.getpid(), config.device, os.environ.get("CUDA_VISIBLE_DEVICES")]))
    summary = {"status": status, "accuracy_before": 0.25, "accuracy_after": 0.5}
    (out / "summary.json").write_text(json.dumps(summary))
    if status == "diverged":
        raise FloatingPointError("step 3: the loss is nan")
    return summary


def work(pipe, device):
    sys.modules["mxrl.rl.train"] = types.SimpleNamespace(train=train)
    import sweep
    sweep.work(pipe, device)
"""


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """The script under its own name and on the path, as its workers import it."""
    home = tmp_path_factory.mktemp("pretending")
    (home / "pretending.py").write_text(PRETENDING)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(home))
        patch.syspath_prepend(str(EXPERIMENTS))
        yield importlib.import_module("sweep")
        sys.modules.pop("sweep", None)
        sys.modules.pop("pretending", None)


@pytest.fixture
def pretended(sweep, monkeypatch):
    monkeypatch.setattr(sweep, "work", importlib.import_module("pretending").work)
    return sweep


def written(folder, runs, **defaults):
    """A sweep's file; runs: names with their seeds."""
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump({"defaults": defaults, "runs": [{"name": n, "seeds": s} for n, s in runs]}))
    return path


def loaded(sweep, folder, text):
    (folder / "sweep.yaml").write_text(text)
    return sweep.load(folder / "sweep.yaml", folder / "out")


# --- the file --------------------------------------------------------------------------------------------------------


def test_runs_in_the_files_order_with_options_over_defaults(sweep, tmp_path):
    jobs = loaded(
        sweep,
        tmp_path,
        """
defaults: {steps: 3, lr: 1.0e-4}
runs:
  - {name: b, options: {recipe: mxfp4, lr: 2.0e-4}, seeds: [1, 0]}
  - {name: a, seeds: [0]}
  - {name: b, options: {recipe: mxfp4}, seeds: [5]}
""",
    )
    assert [job.name for job in jobs] == ["b/s1", "b/s0", "a/s0", "b/s5"]
    configs = [(j.config.recipe, j.config.lr, j.config.seed, j.config.steps) for j in jobs]
    assert configs[0] == ("mxfp4", 2e-4, 1, 3) and configs[3] == ("mxfp4", 1e-4, 5, 3)
    assert jobs[2].config.out == str(tmp_path / "out" / "a" / "s0") == str(jobs[2].folder)
    changed = sweep.load(tmp_path / "sweep.yaml", tmp_path / "out", {"steps": "7", "lr": "1e-5"})
    assert {(j.config.steps, j.config.lr) for j in changed} == {(7, 1e-5)}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("runs: [", "can't be read"),
        ("runs: {a: 1}", "expected `defaults:` and a list `runs:`"),
        ("run: []\nruns: []", "unknown key 'run'; possible: defaults, runs"),
        ("runs: [{name: a}]", "run 1: expected {name: …, options: {…}, seeds: […]}"),
        ("runs: [{name: a, seeds: 3}]", "run 1: expected"),
        ("runs: [{name: a, seeds: [0], option: {}}]", "run 1: expected"),
        ("runs: [{name: a, seeds: [0]}, {name: a, seeds: [1, 0]}]", "run 2: a/s0 is there already"),
        ("runs: [{name: a, options: {stesp: 3}, seeds: [0]}]", "a/s0: unknown option 'stesp' (did you mean 'steps'?)"),
        ("runs: [{name: a, options: {recipe: mxpf4}, seeds: [0]}]", "a/s0: "),
    ],
)
def test_a_file_that_cant_be_is_one_line(sweep, tmp_path, text, said):
    with pytest.raises(sweep.SweepError, match=re.escape(said)) as caught:
        loaded(sweep, tmp_path, text)
    assert str(caught.value).startswith(f"{tmp_path / 'sweep.yaml'}: ") and "\n" not in str(caught.value)


def test_no_file_and_calls_that_cant_be(sweep, tmp_path):
    with pytest.raises(sweep.SweepError, match=r"no\.yaml: can't be read"):
        sweep.load(tmp_path / "no.yaml", tmp_path)
    call = [str(written(tmp_path, [("a", [0])])), "--out", str(tmp_path / "out")]
    for more, said in (
        (["--only", "b*"], "no run of"),
        (["--jobs", "0"], "--jobs 0: at least 1"),
        (["--set", "steps"], "--set steps: expected OPTION=VALUE"),
    ):
        with pytest.raises(sweep.SweepError, match=said):
            sweep.main([*call, *more])
    for verb in (["pack", str(tmp_path)], ["pack", str(tmp_path / "no"), "f"], ["unpack", str(tmp_path / "no"), "f"]):
        with pytest.raises(sweep.SweepError, match=f"{verb[0]}: expected"):
            sweep.main(verb)
    assert not (tmp_path / "out").exists()


def test_list_says_what_there_is_and_starts_nothing(sweep, tmp_path, capsys):
    call = [str(written(tmp_path, [("a", [0, 1]), ("b", [0])], recipe="mxfp4")), "--out", str(tmp_path / "out")]
    folder = tmp_path / "out" / "a" / "s1"
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text('{"status": "collapsed"}')
    assert sweep.main([*call, "--only", "a/*", "--list"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [["-", "a/s0", "mxfp4"], ["collapsed", "a/s1", "mxfp4"]]
    assert not (tmp_path / "out" / "a" / "s0").exists()


# --- workers ---------------------------------------------------------------------------------------------------------


def test_runs_that_end_in_every_way(pretended, tmp_path, capsys):
    """Two workers: results are counted, a divergence among them; a failed run and a dead worker stop nothing."""
    out = tmp_path / "out"
    path = written(tmp_path, [("dies", [0]), ("fails", [0]), ("diverges", [0]), ("good", [0, 1])])
    assert pretended.main([str(path), "--out", str(out), "--jobs", "2"]) == 1
    failed = {row["run"]: row["error"] for row in map(json.loads, (out / "failed.jsonl").read_text().splitlines())}
    assert failed == {
        "dies/s0": "its process ended with exit code -9",
        "fails/s0": "ValueError: no such thing",
    }
    said = capsys.readouterr().err.splitlines()
    assert said[-1] == "3 of 5 runs have ended, 2 failed, 0 are left; the same command goes on"
    assert any("diverges/s0: diverged in" in line and "(FloatingPointError: step 3: the loss is nan)" in line
               for line in said)  # fmt: skip
    assert any(re.match(r"\d/5  good/s1: done in 0 s, accuracy 0.250 → 0.500$", line) for line in said)
    assert (out / "fails" / "s0" / "log.txt").read_text() == "training fails\nValueError: no such thing\n"
    seen = [json.loads((out / name / "seen.json").read_text()) for name in ("good/s0", "good/s1", "diverges/s0")]
    assert len({pid for pid, _, _ in seen}) <= 2 and {device for _, device, _ in seen} == {"cpu"}

    # again: those that have ended are skipped, the others are tried, and the file is of this call
    before = (out / "good" / "s0" / "seen.json").read_text()
    assert pretended.main([str(path), "--out", str(out), "--only", "[fdg]*", "--set", "steps=1"]) == 1
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "3 of 5 runs have ended earlier"
    again = sorted(json.loads(line)["run"] for line in (out / "failed.jsonl").read_text().splitlines())
    assert again == ["dies/s0", "fails/s0"]
    assert (out / "good" / "s0" / "seen.json").read_text() == before


def test_workers_see_the_device_they_were_given(pretended, tmp_path):
    """Two devices in turn, each worker sees one, and this process's own environment stays."""
    path = written(tmp_path, [("slow", [0, 1])])
    environment = dict(pretended.os.environ)
    assert pretended.main([str(path), "--out", str(tmp_path / "out"), "--devices", "cuda:0,cuda:3"]) == 0
    seen = [json.loads(file.read_text())[1:] for file in sorted((tmp_path / "out").rglob("seen.json"))]
    assert sorted(seen) == [["cuda", "0"], ["cuda", "3"]]
    assert dict(pretended.os.environ) == environment


def test_at_the_deadline_runs_are_asked_to_stop_and_no_other_begins(pretended, tmp_path, capsys, monkeypatch):
    """Time is up when the first run has begun."""
    out, asked = tmp_path / "out", []

    def left(self):
        asked.append(1)
        if len(asked) == 1:
            return 1000.0  # may the first run begin
        until = time.monotonic() + 60
        while not (out / "long" / "s0" / "begun").exists() and time.monotonic() < until:
            time.sleep(0.02)
        return 0.0

    monkeypatch.setattr(pretended.Sweep, "left", left)
    path = written(tmp_path, [("long", [0]), ("good", [0])])
    assert pretended.main([str(path), "--out", str(out), "--seconds", "1000"]) == 0
    assert (out / "long" / "s0" / "begun").exists() and (out / "long" / "s0" / "checkpoint").exists()
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "1 runs stop after their step",
        "0 of 2 runs have ended, 0 failed, 2 are left; the same command goes on",
    ]
    assert not (out / "good").exists() and not (out / "failed.jsonl").exists()


def test_a_run_that_cant_end_in_time_is_not_begun(sweep, tmp_path):
    """The median of those that have ended decides; until one has, every run is begun."""
    jobs = sweep.load(written(tmp_path, [("a", [0, 1, 2])]), tmp_path / "out")
    plan = sweep.Sweep(jobs, tmp_path, ["cpu"], 1, 1000.0)

    class Taking:
        def give(self, job):
            self.job = job

    assert 990 < plan.left() <= 1000 and sweep.Sweep(jobs, tmp_path, ["cpu"], 1, None).left() is None
    worker = Taking()
    plan.feed(worker)
    assert worker.job.name == "a/s0"
    plan.took = [900.0, 900.0, 1100.0]
    plan.feed(worker)
    assert worker.job.name == "a/s1"
    plan.took = [1100.0, 1100.0, 900.0]
    plan.feed(worker)
    assert worker.job.name == "a/s1" and [job.name for job in plan.queue] == ["a/s2"]


# --- results that travel ---------------------------------------------------------------------------------------------


def test_packed_results_are_skipped_where_they_are_unpacked(pretended, tmp_path, capsys):
    out, other, file = tmp_path / "out", tmp_path / "elsewhere", tmp_path / "results.tar.gz"
    for name in ("a/s0", "b/s1", "b/s2"):
        folder = out / name
        (folder / "checkpoints").mkdir(parents=True)
        for kept in pretended.KEPT:
            (folder / kept).write_text(f"{kept} of {name}")
        (folder / "log.txt").write_text("long")
        (folder / "checkpoints" / "weights").write_text("large")
        (folder / "summary.json").write_text('{"status": "done"}')
    (out / "b/s2/summary.json").unlink()  # still going on
    assert pretended.main(["pack", str(out), str(file)]) == 0
    assert pretended.main(["unpack", str(file), str(other)]) == 0
    assert capsys.readouterr().err.splitlines() == [f"2 ended runs in {file}", f"2 ended runs in {other}"]
    files = sorted(str(p.relative_to(other)) for p in other.rglob("*") if p.is_file())
    assert files == sorted(f"{name}/{kept}" for name in ("a/s0", "b/s1") for kept in pretended.KEPT)
    assert (other / "b/s1/evals.jsonl").read_text() == "evals.jsonl of b/s1"
    assert [p.name for p in tmp_path.iterdir() if p.name.endswith(".tmp")] == []
    path = written(tmp_path, [("a", [0]), ("b", [1])])
    assert pretended.main([str(path), "--out", str(other)]) == 0  # nothing to do, so no worker either
    said = capsys.readouterr().err.splitlines()
    assert said == ["2 of 2 runs have ended earlier", "2 of 2 runs have ended, 0 failed, 0 are left"]


def test_unpack_leaves_the_folder_it_is_given(sweep, tmp_path):
    """An archive that would write beside it is refused."""
    outside = tmp_path / "summary.json"
    outside.write_text("mine")
    with tarfile.open(tmp_path / "bad.tar.gz", "w:gz") as archive:
        archive.add(outside, "../summary.json")
    outside.write_text("still mine")
    with pytest.raises(tarfile.FilterError):
        sweep.unpack(tmp_path / "bad.tar.gz", tmp_path / "out")
    assert outside.read_text() == "still mine"


# --- the whole -------------------------------------------------------------------------------------------------------


def test_a_real_run_and_one_that_cant_be(sweep, tmp_path, capsys):
    """One worker trains a tiny policy after it has failed at another run."""
    from mxrl.report.runs import read_run
    from mxrl.rl.policy import build_policy, char_tokenizer, save_policy

    save_policy(build_policy("dense", size="tiny", seed=0), char_tokenizer(), tmp_path / "policy")
    (tmp_path / "sweep.yaml").write_text(f"""
defaults: {{model: {tmp_path / "policy"}, steps: 1, prompts_per_step: 2, samples_per_prompt: 2, max_new_tokens: 8,
            eval_problems: 4, eval_samples: 2, monitor_every: 0, save_every: 0, save_model: false}}
runs:
  - {{name: tiny/bad, options: {{model: /nowhere}}, seeds: [0]}}
  - {{name: tiny/mxfp4, options: {{recipe: mxfp4}}, seeds: [4]}}
""")
    assert sweep.main([str(tmp_path / "sweep.yaml"), "--out", str(tmp_path / "out")]) == 1
    (failed,) = map(json.loads, (tmp_path / "out" / "failed.jsonl").read_text().splitlines())
    assert failed["run"] == "tiny/bad/s0" and "/nowhere" in failed["error"]
    run = read_run(tmp_path / "out" / "tiny" / "mxfp4" / "s4")
    assert run.done and run.seed == 4 and [row["step"] for row in run.evals] == [0, 1]
    assert run.evals[1]["sampled"]["samples"] == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("1 of 2 runs have ended, 1 failed, 0 are left")

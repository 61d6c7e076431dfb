"""What the command line makes of words: options of a run, exit codes, the one line."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from mxrl.cli import main
from mxrl.rl.config import TrainConfig
from mxrl.rl.policy import PolicyError
from mxrl.rl.tasks import TaskError


class Runs:
    """Stands in for mxrl.rl.train, which would load TRL."""

    def __init__(self) -> None:
        self.calls: list[tuple[TrainConfig, str]] = []
        self.summary: dict[str, Any] = {"status": "done", "accuracy_before": 0.25, "accuracy_after": 0.5}
        self.error: Exception | None = None

    def train(self, config: TrainConfig, *, resume: str) -> dict[str, Any]:
        self.calls.append((config, resume))
        if self.error:
            raise self.error
        return self.summary


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    stand_in = Runs()
    monkeypatch.setitem(sys.modules, "mxrl.rl.train", types.SimpleNamespace(train=stand_in.train))
    return stand_in


def test_train_takes_every_option_of_a_run(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "--recipe mxfp4+mbs --steps 7 --lr=2e-4 --prompts-per-step 4 --gradient-checkpointing --resume never".split()
    )
    assert main(["train", *words]) == 0
    ((config, resume),) = runs.calls
    assert resume == "never"
    assert config == TrainConfig(
        recipe="mxfp4+mbs", steps=7, lr=2e-4, prompts_per_step=4, gradient_checkpointing=True
    )  # fmt: skip
    assert "0.2500 → 0.5000" in capsys.readouterr().out


def test_options_go_over_the_file(runs: Runs, tmp_path: Any) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("steps: 3\nseed: 5\nrun: {device: whatever}\n")
    assert main(["train", str(path), "--steps", "9"]) == 0
    assert runs.calls[0] == (TrainConfig(steps=9, seed=5), "auto")


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--stepz", "3"], "did you mean 'steps'"),
        (["--steps", "many"], "steps='many'"),
        (["--recipe", "mxfp4+mbbs"], "mbbs"),
        (["a.yaml", "b.yaml"], "'b.yaml' is no option"),
        (["no-such-file.yaml"], "no-such-file.yaml"),
    ],
)
def test_a_wrong_call_of_train(runs: Runs, words: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *words]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert part in err
    assert runs.calls == []


def test_an_interrupted_run_ends_with_130_and_no_further_word(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    for before in (None, 0.25):  # evaluated before the first step, and not since: there is no "after" to show
        runs.summary = {"status": "interrupted", "accuracy_before": before, "accuracy_after": None}
        assert main(["train"]) == 130
        assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("error", "code", "part"),
    [
        (RuntimeError("the loss is NaN\nat step 3"), 1, "the loss is NaN at step 3"),
        (OSError(28, "No space left on device"), 1, "No space left"),
        (ModuleNotFoundError("No module named 'trl'", name="trl"), 1, "pip install 'mxrl[train]'"),
        (TaskError("unknown task 'nope'; possible: chain"), 2, "unknown task 'nope'"),
        (PolicyError("unknown policy 'policy:foo'"), 2, "unknown policy 'policy:foo'"),
        (KeyError("x"), 1, "this is a bug"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_every_failure_is_one_line(
    runs: Runs, error: Exception, code: int, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.error = error
    assert main(["train"]) == code
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("mxrl: ") and part in err


def test_no_words_print_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert "Usage" in out + err
    assert "mxrl: " not in err


# ---- Ctrl-C and SIGTERM ----------------------------------------------------------------------------------------------


def started(folder: Path, code: str, *words: str) -> subprocess.Popen[str]:
    """`python -m mxrl WORDS`, after `code`."""
    (folder / "sitecustomize.py").write_text(code)
    path = os.pathsep.join([str(folder), *sys.path])
    return subprocess.Popen(
        [sys.executable, "-m", "mxrl", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
        start_new_session=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM"])
def test_a_signal_while_torch_is_loaded(number: str, tmp_path: Path) -> None:
    """Raised by the import of torch itself, which swallows what it can."""
    (tmp_path / "torch.py").write_text(
        f"import os, signal, time\ntry: os.kill(os.getpid(), signal.{number}); time.sleep(9)\nexcept: pass\n"
    )
    assert ended(started(tmp_path, "", "analyze", "x")) == (130, "", "mxrl: interrupted\n")


def test_a_signal_that_is_ignored_stays_ignored(tmp_path: Path) -> None:
    """As under nohup, or in a script's background."""
    (tmp_path / "typer.py").write_text(
        "import os, signal\nfor n in (signal.SIGINT, signal.SIGTERM): os.kill(os.getpid(), n)\nraise SystemExit(5)\n"
    )
    code = "import signal\nfor n in (signal.SIGINT, signal.SIGTERM): signal.signal(n, signal.SIG_IGN)\n"
    assert ended(started(tmp_path, code, "analyze", "x")) == (5, "", "")


def test_a_signal_within_an_exec_is_no_death_by_it(tmp_path: Path) -> None:
    """Python remembers a KeyboardInterrupt that an exec() of text let through, and kills itself in the end."""
    code = """import mxrl.cli
def run():
    try: exec("raise KeyboardInterrupt")
    except KeyboardInterrupt: return 130
mxrl.cli.main = run
"""
    assert ended(started(tmp_path, code)) == (130, "", "")


def test_the_package_alone_loads_no_torch_and_functions_win_over_modules() -> None:
    code = """import sys, mxrl
from mxrl import Recipe
assert "torch" not in sys.modules
import mxrl.decompose, mxrl.quantize
from mxrl.quantize import quantize
assert mxrl.quantize is quantize and mxrl.decompose.__name__ == "decompose"
found = {}
exec("from mxrl import *", found)
assert set(mxrl.__all__) <= set(found)
assert not hasattr(mxrl, "nothing")
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)

"""Runs that are killed at random moments, again and again: they end with the numbers of a run that nobody disturbed.

Two runs with nine kills each (mortal_train.py says at which moments), half a minute on one core.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mxrl.rl.train import read_rows

TIMES = ("time/", "speed/", "step_time")


def untimed(row):
    if "last_10" in row:
        row = {**row, "last_10": untimed(row["last_10"])}
    return {k: v for k, v in row.items() if not k.startswith(TIMES) and k != "seconds"}


def numbers(out):
    """Everything that a run leaves, but for times."""
    rows = [untimed(row) for row in read_rows(out / "metrics.jsonl")]
    summary = untimed(json.loads((out / "summary.json").read_text()))
    return rows, read_rows(out / "evals.jsonl"), summary, (out / "model" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kill")
    worker = Path(__file__).with_name("mortal_train.py")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [sys.executable, str(worker), str(folder)], capture_output=True, text=True, env=env, timeout=400
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder, json.loads(done.stdout.splitlines()[-1])


def test_the_kills_were_where_they_should_be(runs):
    _, attempts = runs
    died = [a["kind"] for a in attempts if a["died"]]
    assert {"checkpoint", "log", "evaluation", "end"} <= set(died) and len(died) >= 12, attempts
    assert len({tuple(a["checkpoints"]) for a in attempts}) > 4  # at different places of the run


@pytest.mark.parametrize("seed", [0, 1])
def test_a_run_that_was_killed_ends_where_the_straight_one_does(runs, seed):
    folder, _ = runs
    rows, evals, summary, model = numbers(folder / "straight")
    assert [row["step"] for row in rows] == list(range(1, 19)) and [row["step"] for row in evals] == [0, 6, 12, 18]
    assert summary["status"] == "done" and all(row["grad_norm"] > 0 for row in rows)
    assert numbers(folder / f"killed-{seed}") == (rows, evals, summary, model)

"""Two processes (FSDP2) and one: the same numbers, a killed rank, a checkpoint that either goes on from.

On a host with two GPUs over NCCL, elsewhere over gloo.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from mxrl.rl.policy import build_policy, char_tokenizer, save_policy
from mxrl.rl.train import read_rows

WORKER = Path(__file__).with_name("ranks_worker.py")
TIMES = ("time/", "speed/", "step_time")
DEVICE = "cuda" if torch.cuda.device_count() > 1 else "cpu"
CASES = {"dense": "mxfp4+mbs+of+aqn", "moe": "mxfp4+mbs+of"}


def port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def command(processes: int, *rest: str) -> list[str]:
    if processes == 1:
        return [sys.executable, *rest]
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--master-port", str(port())]
    return [sys.executable, *launch, *rest]


def start(processes: int, *rest: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command(processes, *rest), capture_output=True, text=True, env=env, timeout=300)


def run(out: Path, processes: int, policy: Path, **options) -> subprocess.CompletedProcess[str]:
    values = {
        "model": str(policy), "out": str(out), "steps": 3, "prompts_per_step": 4, "samples_per_prompt": 4,
        "max_new_tokens": 8, "lr": 1e-3, "device": DEVICE, "precision": "fp32", "eval_problems": 7,
        "eval_every": 2, "save_every": 2,
        "monitor_every": 2, "seed": 3,
        # what rounds differently in GEMMs of other shapes is the same here: 4 sequences a training pass, 8 decoded
        "micro_batch": 4, "rollout_batch": 8,
        # Adam's first steps are ±lr whatever the gradient: a rounding of a gradient near 0 would become a whole step
        "trainer": {"adam_epsilon": 1e-2},
        **options,
    }  # fmt: skip
    file = out.with_suffix(".json")
    file.write_text(json.dumps(values))
    return start(processes, str(WORKER), str(file))


def finished(out: Path, processes: int, policy: Path, **options) -> list[dict]:
    """What every process of a run saw."""
    result = run(out, processes, policy, **options)
    assert result.returncode == 0, result.stderr[-4000:]
    return [torch.load(out / f"seen-{rank}.pt") for rank in range(processes)]


def numbers(out: Path) -> list[dict]:
    return [{k: v for k, v in row.items() if not k.startswith(TIMES)} for row in read_rows(out / "metrics.jsonl")]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    seen = {}
    for kind, recipe in CASES.items():
        policy = build_policy(kind, size="tiny", seed=0)
        policy.config.router_aux_loss_coef = 0.0  # formed over a micro-batch, so it depends on who is in it
        save_policy(policy, char_tokenizer(), folder / kind)
        for processes in (1, 2):
            name = f"{kind}-{processes}"
            seen[name] = finished(folder / name, processes, folder / kind, recipe=recipe, reshard=kind == "moe")
    return folder, seen


@pytest.mark.parametrize("kind", CASES)
def test_two_processes_compute_what_one_does(kind, runs):
    folder, seen = runs
    (one,), two = seen[f"{kind}-1"], seen[f"{kind}-2"]

    # the quantized weights of every rollout (noise included) are the same on both ranks, the first one's are those of
    # one process: 3 rollouts and the evaluations at 0, 2, 3 use them
    assert len(one["held"]) == 3 and len(one["held"][0]) >= 8
    assert two[0]["held"] == two[1]["held"]
    assert two[0]["held"][0] == one["held"][0]

    # the ranks draw what one process draws, each its half
    assert two[0]["tokens"][0] + two[1]["tokens"][0] == one["tokens"][0]
    assert two[0]["tokens"] != two[1]["tokens"]

    rows, theirs = (numbers(folder / f"{kind}-{n}") for n in (1, 2))
    assert [row["step"] for row in rows] == [row["step"] for row in theirs] == [1, 2, 3]
    # float32 sums over the batch in another order: 24 bits, some thousands of terms
    assert theirs[0]["loss"] == pytest.approx(rows[0]["loss"], rel=1e-5, abs=1e-7)
    for rank in two:
        assert rank["gradients"].keys() == one["gradients"].keys() and len(one["gradients"]) >= 15
        for name, gradient in one["gradients"].items():
            error = (rank["gradients"][name] - gradient).norm() / gradient.norm()
            assert gradient.norm() > 0 and error < 1e-5, name
    # where weights are gathered for every pass, gradients are reduced after every pass: none is whole in between
    assert [rank["reduced"] for rank in two] == [kind == "moe"] * 2
    # three steps: tokens the same, and the numbers to a thousandth
    for row, other in zip(rows, theirs, strict=True):
        assert other["grad_norm"] == pytest.approx(row["grad_norm"], rel=1e-3)
        assert other["rollout/tokens"] == row["rollout/tokens"] and other["reward"] == pytest.approx(row["reward"])
        assert other["rollout/entropy"] == pytest.approx(row["rollout/entropy"], rel=1e-3)
        for name in ("accuracy", "group/distinct_answers", "completions/mean_length", "num_tokens"):
            assert other[name] == pytest.approx(row[name])
        for name in ("gap/mean_abs", "gap/k3", "gap/ess"):
            assert other[name] == pytest.approx(row[name], rel=1e-3, abs=1e-6)
    evals, other_evals = (read_rows(folder / f"{kind}-{n}" / "evals.jsonl") for n in (1, 2))
    assert [row["step"] for row in evals] == [row["step"] for row in other_evals] == [0, 2, 3]
    for row, other in zip(evals, other_evals, strict=True):
        assert len(row["right"]) == 7  # 3 problems and 4
        assert other.pop("entropy_per_token") == pytest.approx(row.pop("entropy_per_token"), rel=1e-5)
        assert other == row
    assert json.loads((folder / f"{kind}-2" / "summary.json").read_text())["status"] == "done"


def test_a_killed_rank_ends_the_other_and_the_run_goes_on(runs, tmp_path):
    folder, _ = runs
    recipe = CASES["dense"]
    began = time.monotonic()
    result = run(tmp_path / "killed", 2, folder / "dense", recipe=recipe, die={"step": 3, "rank": 1})
    assert result.returncode != 0 and time.monotonic() - began < 60
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("mxrl: ")]
    assert re.fullmatch(
        r"mxrl: rank 0: rank 1 \(process \d+\) has ended, so the run can't go on; "
        r"the same command goes on from checkpoint-2", line
    )  # fmt: skip
    shutil.copytree(tmp_path / "killed", tmp_path / "alone")

    finished(tmp_path / "killed", 2, folder / "dense", recipe=recipe)
    assert numbers(tmp_path / "killed") == numbers(folder / "dense-2")
    evals = [read_rows(where / "evals.jsonl") for where in (tmp_path / "killed", folder / "dense-2")]
    assert evals[0] == evals[1]
    weights = [
        (where / "model" / "model.safetensors").read_bytes() for where in (tmp_path / "killed", folder / "dense-2")
    ]
    assert weights[0] == weights[1]

    # one process goes on from the two's checkpoint, as it would from its own
    finished(tmp_path / "alone", 1, folder / "dense", recipe=recipe)
    last, straight = numbers(tmp_path / "alone")[-1], numbers(folder / "dense-1")[-1]
    assert last["step"] == 3 and last["rollout"] == straight["rollout"] and last["num_tokens"] == straight["num_tokens"]
    assert last["grad_norm"] == pytest.approx(straight["grad_norm"], rel=1e-2)


def test_a_loss_that_is_no_number_on_one_rank_ends_both_with_the_reason(runs, tmp_path):
    folder, _ = runs
    began = time.monotonic()
    result = run(tmp_path / "nan", 2, folder / "dense", recipe=CASES["dense"], nan={"step": 3, "rank": 1})
    assert result.returncode != 0 and time.monotonic() - began < 60
    lines = [line for line in result.stderr.splitlines() if line.startswith("mxrl: ")]
    assert lines and not any("has ended" in line for line in lines)
    for line in lines:
        assert re.match(r"mxrl: rank \d: step 3: the loss is nan \(", line) and line.endswith("checkpoint-2 is kept")
    summary = json.loads((tmp_path / "nan" / "summary.json").read_text())
    assert (summary["status"], summary["kept"]) == ("diverged", "checkpoints/checkpoint-2")
    assert summary["reason"] in lines[0] and [row["step"] for row in numbers(tmp_path / "nan")] == [1, 2]


def test_two_processes_go_on_from_the_checkpoint_of_one(runs, tmp_path):
    folder, _ = runs
    recipe = CASES["moe"]
    shutil.copytree(folder / "moe-1", tmp_path / "moe")
    for name in ("summary.json", "checkpoints/checkpoint-3"):
        path = tmp_path / "moe" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    finished(tmp_path / "moe", 2, folder / "moe", recipe=recipe)
    last, straight = numbers(tmp_path / "moe")[-1], numbers(folder / "moe-1")[-1]
    assert last["step"] == 3 and last["num_tokens"] == straight["num_tokens"]
    assert last["grad_norm"] == pytest.approx(straight["grad_norm"], rel=1e-2)


def test_what_cant_be_shared_is_one_line(runs, tmp_path):
    folder, _ = runs
    words = f"--model {folder / 'dense'} --out {tmp_path / 'x'} --device {DEVICE} --prompts-per-step 3".split()
    result = start(2, "-m", "mxrl", "train", *words)
    lines = [line for line in result.stderr.splitlines() if line.startswith("mxrl: ")]
    assert result.returncode != 0 and not (tmp_path / "x" / "config.yaml").exists()
    assert lines == ["mxrl: rank 0: prompts_per_step=3 can't be shared by 2 processes: use a multiple of 2"]

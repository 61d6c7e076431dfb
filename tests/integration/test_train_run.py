"""A run from a configuration to a folder: what it writes, and that a killed one ends where a straight one does."""

import json
import os
import signal

import pytest
import yaml
from tiny_grpo import digits
from transformers import TrainerCallback

import mxrl.rl.train as module
from mxrl.rl.config import ConfigError, TrainConfig
from mxrl.rl.policy import build_policy, char_tokenizer, save_policy
from mxrl.rl.tasks import Task, get_task
from mxrl.rl.train import GRPOTrainer, NonFiniteError, read_rows, run_from_cli, train

TIMES = ("time/", "speed/", "step_time")


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policy") / "tiny"
    save_policy(build_policy("dense", size="tiny", seed=0), char_tokenizer(), folder)
    return str(folder)


@pytest.fixture(autouse=True)
def rewarded(monkeypatch):
    """The chain task with a reward that a random policy gets something of, so that gradients aren't zero."""
    chain = get_task("chain")
    task = Task("chain", chain.load, lambda completions, answer, **columns: digits(completions), chain.options)
    monkeypatch.setattr(module, "get_task", lambda name: task)


def config(policy, out, **options):
    values = {
        "recipe": "mxfp4+aqn", "model": policy, "out": str(out), "steps": 4, "prompts_per_step": 2,
        "samples_per_prompt": 4, "max_new_tokens": 5, "lr": 1e-3, "device": "cpu", "eval_problems": 8, "eval_every": 2,
        "save_every": 2, "monitor_every": 2, "seed": 3, **options,
    }  # fmt: skip
    return TrainConfig(**values)


def numbers(out):
    rows = read_rows(out / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not k.startswith(TIMES)} for row in rows], read_rows(out / "evals.jsonl")


class At(TrainerCallback):
    def __init__(self, step, act):
        self.step, self.act = step, act

    def on_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step + 1 == self.step:
            self.act()


def acting(monkeypatch, step, act):
    """Make the next trainers call `act` inside an optimizer step."""
    monkeypatch.setattr(
        module, "GRPOTrainer", lambda *args, **kwargs: GRPOTrainer(*args, callbacks=[At(step, act)], **kwargs)
    )


def kill():
    raise SystemError("killed")


def test_a_run_and_the_same_one_killed_and_resumed(policy, tmp_path, monkeypatch, capsys):
    straight = train(config(policy, tmp_path / "a"))
    out = capsys.readouterr().out
    assert "loss dapo" in out and "beta 0" in out and "clip [0.8, 1.2]" in out and "updates_per_rollout 1" in out
    rows, evals = numbers(tmp_path / "a")
    assert [row["step"] for row in rows] == [1, 2, 3, 4] and [row["step"] for row in evals] == [0, 2, 4]
    assert all(row["grad_norm"] > 0 for row in rows) and all("style/careful" in row for row in rows)
    assert "weights/rel_mse" in rows[0] and "weights/rel_mse" not in rows[1] and "decode/flipped" in rows[2]
    assert all(len(row["right"]) == row["n"] == 8 for row in evals)
    assert straight["status"] == "done" and straight["accuracy_before"] == evals[0]["accuracy"]
    assert straight["accuracy_after"] == evals[-1]["accuracy"]
    resolved = yaml.safe_load((tmp_path / "a" / "config.yaml").read_text())
    assert resolved["run"]["rollouts"] == 4 and resolved["run"]["versions"]["trl"].startswith("1.16")
    assert (tmp_path / "a" / "model" / "model.safetensors").is_file()

    with monkeypatch.context() as patched:
        acting(patched, 4, kill)
        with pytest.raises(SystemError):
            train(config(policy, tmp_path / "b"))
    assert len(read_rows(tmp_path / "b" / "metrics.jsonl")) == 3  # step 3 is after the checkpoint: cut, and run again
    with (tmp_path / "b" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "half a li')
    train(config(policy, tmp_path / "b"))
    assert numbers(tmp_path / "b") == numbers(tmp_path / "a")
    a, b = ((tmp_path / x / "model" / "model.safetensors").read_bytes() for x in "ab")
    assert a == b
    again = train(config(policy, tmp_path / "a"))
    assert again == json.loads((tmp_path / "a" / "summary.json").read_text())


def test_ctrl_c_ends_after_the_step_and_keeps_it(policy, tmp_path, monkeypatch, capsys):
    before = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patched:
        acting(patched, 1, lambda: os.kill(os.getpid(), signal.SIGINT))
        result = train(config(policy, tmp_path, steps=3, save_every=2, eval_problems=0))
    assert result["status"] == "interrupted" and signal.getsignal(signal.SIGINT) is before
    err = capsys.readouterr().err
    assert "stopped after step 1; the same command goes on from there" in err and "Traceback" not in err
    assert not (tmp_path / "summary.json").is_file()
    assert train(config(policy, tmp_path, steps=3, save_every=2, eval_problems=0))["status"] == "done"
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 2, 3]


def test_a_run_that_diverges_says_so_and_keeps_the_reason(policy, tmp_path, monkeypatch):
    def poison():
        raise NonFiniteError("step 1: the loss is nan")

    acting(monkeypatch, 1, poison)
    with pytest.raises(NonFiniteError):
        train(config(policy, tmp_path, steps=2, eval_problems=0))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["status"] == "diverged" and summary["reason"] == "step 1: the loss is nan"


def test_a_folder_of_another_run_is_refused_and_can_be_replaced(policy, tmp_path):
    options = {"steps": 1, "eval_problems": 0, "save_every": 0}
    train(config(policy, tmp_path, **options))
    with pytest.raises(ConfigError, match=r"holds a run with lr=0\.001, not 0\.002: .*resume='never'") as error:
        train(config(policy, tmp_path, lr=2e-3, **options))
    assert "\n" not in str(error.value)
    first = numbers(tmp_path)
    train(config(policy, tmp_path, lr=2e-3, **options), resume="never")
    assert numbers(tmp_path)[0][0]["learning_rate"] == 2e-3 != first[0][0]["learning_rate"]
    assert len(read_rows(tmp_path / "metrics.jsonl")) == 1


@pytest.mark.parametrize(
    "options, message",
    [
        ({"model": "no/such/folder"}, "model 'no/such/folder'"),
        ({"device": "cuda"}, "no CUDA device"),
        ({"prompts": 1}, "unknown option 'prompts'"),
    ],
)
def test_what_can_not_be_run(policy, tmp_path, monkeypatch, options, message):
    monkeypatch.setattr(module.torch.cuda, "is_available", lambda: False)
    values = {"model": policy, "out": str(tmp_path), "eval_problems": 4, "steps": 1, "device": "cpu", **options}
    with pytest.raises(ConfigError, match=message) as error:
        run_from_cli(**values)
    assert "\n" not in str(error.value)

"""A run from a configuration to a folder: what it writes, and that a killed one ends where a straight one does."""

import json
import os
import re
import shutil
import signal

import pytest
import torch
import yaml
from peft import PeftModel
from tiny_grpo import digits
from transformers import AutoModelForCausalLM, TrainerCallback

import mxrl.rl.train as module
from mxrl import cli
from mxrl.report.runs import read_run
from mxrl.rl import collapse
from mxrl.rl.adapters import lora_config
from mxrl.rl.config import ConfigError, TrainConfig
from mxrl.rl.policy import build_policy, char_tokenizer, save_policy
from mxrl.rl.tasks import Task, TaskError, get_task
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


@pytest.mark.parametrize(
    "options, kept, said",
    [
        ({"save_every": 1}, "checkpoints/checkpoint-2", "checkpoint-2 is kept"),
        ({"save_every": 5}, None, "no checkpoint is kept, as the first is saved after step 5"),
        ({"save_every": 0}, None, "no checkpoint is kept, as save_every is 0"),
    ],
)
def test_a_run_that_diverges_says_so_and_keeps_the_reason(policy, tmp_path, monkeypatch, options, kept, said):
    def poison():
        raise NonFiniteError("step 3: the loss is nan")

    acting(monkeypatch, 3, poison)
    with pytest.raises(NonFiniteError, match=f"^step 3: the loss is nan; .*{said}$"):
        train(config(policy, tmp_path, eval_every=0, **options))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["accuracy_before"] is not None and summary["accuracy_after"] is None is summary["accuracy_gain"]
    assert summary["status"] == "diverged" and summary["reason"] == "step 3: the loss is nan"
    assert summary["kept"] == kept and (kept is None or (tmp_path / kept / "model.safetensors").is_file())


def test_a_policy_that_collapses_ends_the_run_and_the_best_checkpoint_stays(policy, tmp_path, monkeypatch, capsys):
    """Made to collapse: from the fifth rollout on no completion gets a reward."""
    calls = []

    def reward(completions, answer, **columns):
        if len(completions) == 8:  # a rollout's; an evaluation has 7 problems
            calls.append(1)
        right = [float(i % 3 == 0) for i in range(len(completions))]
        return [0.0 if len(calls) > 4 else r for r in right]

    chain = get_task("chain")
    monkeypatch.setattr(module, "get_task", lambda name: Task("chain", chain.load, reward, chain.options))
    monkeypatch.setattr(collapse, "ROLLOUTS", 4)
    monkeypatch.setattr(collapse, "PROMPTS", 1)
    options = {"steps": 20, "save_every": 1, "eval_problems": 7, "eval_every": 0, "eval_samples": 2}
    settings = [f"--{k}={v}" for k, v in config(policy, tmp_path, **options).to_dict().items() if v not in (None, {})]
    assert cli.main(["train", *settings]) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("mxrl: step 8: the policy has collapsed: in the last 4 rollouts all samples of a prompt had")
    assert line.endswith("checkpoints/checkpoint-4 is kept")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["kept"]) == ("collapsed", "checkpoints/checkpoint-4") and summary["steps"] == 8
    assert summary["reason"] in line and summary["accuracy_after"] == 0 == summary["sampled_after"]
    steps = [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")]
    assert steps == list(range(1, 9)) and not (tmp_path / "model").exists()
    # the last two, and the best of all; the step that was found to be lost has none
    assert sorted(p.name for p in (tmp_path / "checkpoints").glob("checkpoint-*")) == [
        "checkpoint-4", "checkpoint-6", "checkpoint-7",
    ]  # fmt: skip
    assert train(config(policy, tmp_path, **options)) == summary
    assert cli.main(["train", *settings]) == 1
    assert capsys.readouterr().err.splitlines()[-1].endswith(f"holds a run that has collapsed: {summary['reason']}")
    assert read_run(tmp_path).ending() == f"collapsed at step 8 of 20: {summary['reason']}"

    result = train(config(policy, tmp_path, stop_collapsed=False, **options))
    assert result["status"] == "done" and [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")][-1] == 20


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


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


@pytest.fixture(scope="module")
def stopped(policy, tmp_path_factory):
    """A run's folder with two checkpoints and no end."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    train(config(policy, folder, save_every=1, steps=2, save_model=False))
    (folder / "summary.json").unlink()
    return folder


LAST = "checkpoints/checkpoint-2"


@pytest.mark.parametrize(
    "name, damage, says",
    [
        ("metrics.jsonl", lambda path: path.write_text("{bad\n"), "line 1: not a line that a run writes: remove it"),
        ("metrics.jsonl", lambda path: path.write_text("[]\n"), "line 1: not a line that a run writes: remove it"),
        ("evals.jsonl", lambda path: path.write_bytes(b"\xff\n"), "line 1: not a line that a run writes: remove it"),
        ("summary.json", lambda path: path.write_text("{"), "not what a run writes at its end: remove it"),
        ("summary.json", lambda path: path.write_text("{}"), "not what a run writes at its end: remove it"),
        ("config.yaml", lambda path: path.write_text("steps: x\n"), "steps='x' must be a whole number"),
        ("config.yaml", lambda path: path.write_text("steps: [\n"), "line 2: not YAML"),
        (f"{LAST}/optimizer.pt", cut, "damaged; remove .*checkpoint-2 to go on from checkpoint-1"),
        (f"{LAST}/model.safetensors", cut, "damaged; remove .*checkpoint-2 to go on from checkpoint-1"),
        (f"{LAST}/trainer_state.json", lambda path: path.write_text(""), "damaged; remove .*checkpoint-2 to go on"),
    ],
)
def test_a_damaged_file_of_a_run_is_named(stopped, policy, tmp_path, capsys, name, damage, says):
    out = tmp_path / "run"
    shutil.copytree(stopped, out)
    damage(out / name)
    settings = [f"--{k}={v}" for k, v in config(policy, out, save_every=1, steps=2, save_model=False).to_dict().items()
                if v not in (None, {})]  # fmt: skip
    assert cli.main(["train", *settings]) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(f"mxrl: {out / name}") and line.endswith("--resume never starts over")
    assert re.search(says, line) and "bug" not in line


def test_a_damaged_folder_can_be_started_over(stopped, policy, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(stopped, out)
    for name in ("metrics.jsonl", "summary.json", "config.yaml", f"{LAST}/optimizer.pt"):
        (out / name).write_text("{")
    options = {"save_every": 1, "steps": 2, "save_model": False}
    assert train(config(policy, out, **options), resume="never")["status"] == "done"


def test_the_first_and_last_evaluation_also_sample(policy, tmp_path):
    options = {"eval_every": 1, "steps": 2, "eval_samples": 3, "save_model": False}
    result = train(config(policy, tmp_path / "a", **options))
    first, middle, last = read_rows(tmp_path / "a" / "evals.jsonl")
    assert "sampled" not in middle and set(middle) == set(first) - {"sampled"}
    for row, accuracy in ((first, result["sampled_before"]), (last, result["sampled_after"])):
        sampled = row["sampled"]
        assert set(sampled) == {
            "samples", "accuracy", "entropy_per_token", "mean_tokens", "truncated", "distinct", "scores",
        }  # fmt: skip
        assert sampled["samples"] == 3 and len(sampled["scores"]) == row["n"] == 8
        assert sampled["accuracy"] == accuracy == pytest.approx(sum(sampled["scores"]) / 8, abs=1e-6)
        assert 1 < sampled["distinct"] <= 3  # an untrained policy draws different completions
        assert all(score == round(score, 6) for score in sampled["scores"])
    colder = train(config(policy, tmp_path / "b", **options, temperature=0.01))
    assert read_rows(tmp_path / "b" / "evals.jsonl")[0]["sampled"]["distinct"] == 1  # the run's temperature
    assert colder["sampled_before"] != result["sampled_before"]


def test_without_eval_samples_nothing_is_drawn(policy, tmp_path):
    result = train(config(policy, tmp_path, steps=1, save_model=False))
    assert result["sampled_before"] is None is result["sampled_after"]
    assert all("sampled" not in row for row in read_rows(tmp_path / "evals.jsonl"))


QERL = "nvfp4+w4a16+aqn+aqn_target=norm"


@pytest.mark.parametrize("kind, layers", [("dense", 14), ("moe", 8)])  # an MoE's experts stay frozen
def test_adapters_on_a_frozen_quantized_base(tmp_path, monkeypatch, capsys, kind, layers):
    base, folder = build_policy(kind, size="tiny", seed=0), tmp_path / "policy"
    save_policy(base, char_tokenizer(), folder, dtype=torch.float32)
    options = {"recipe": QERL, "lora_rank": 4, "lr": 1e-2, "eval_problems": 0, "eval_every": 0}
    train(config(str(folder), tmp_path / "a", **options))
    assert ("the experts stay frozen" in capsys.readouterr().err) is (kind == "moe")
    rows = read_rows(tmp_path / "a" / "metrics.jsonl")
    assert all(row["grad_norm"] > 0 and row["aqn/effective_sigma"] > 0 for row in rows)
    info = yaml.safe_load((tmp_path / "a" / "config.yaml").read_text())["run"]
    assert 0 < info["trained_parameters"] < 0.25 * info["parameters"]

    # model/ is an adapter's folder, which PEFT puts on the base
    saved = json.loads((tmp_path / "a" / "model" / "adapter_config.json").read_text())
    assert (saved["r"], saved["lora_alpha"]) == (4, 8.0) and not (
        tmp_path / "a" / "model" / "model.safetensors"
    ).exists()
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "a" / "model")
    trained = {name: value for name, value in model.state_dict().items() if "lora_B" in name}
    assert len(trained) == layers and all(value.abs().max() > 0 for value in trained.values())
    frozen = {name: value for name, value in model.get_base_model().state_dict().items() if "lora_" not in name}
    assert all(torch.equal(v, frozen[k if k in frozen else k.replace(".weight", ".base_layer.weight")])
               for k, v in base.state_dict().items())  # fmt: skip

    with monkeypatch.context() as patched:
        acting(patched, 4, kill)
        with pytest.raises(SystemError):
            train(config(str(folder), tmp_path / "b", **options))
    train(config(str(folder), tmp_path / "b", **options))
    assert numbers(tmp_path / "b") == numbers(tmp_path / "a")
    a, b = ((tmp_path / x / "model" / "adapter_model.safetensors").read_bytes() for x in "ab")
    assert a == b


def test_adapters_that_can_not_be(policy, tmp_path, monkeypatch):
    skipping = config(policy, tmp_path, recipe="bf16", lora_rank=4)
    with pytest.raises(ConfigError, match=r"lora_rank=4: .* one process, and 2 were started"):
        lora_config(skipping, None, processes=2)
    moe = build_policy("moe", size="tiny")
    only_experts = config(policy, tmp_path, recipe="mxfp4+skip=*.self_attn", lora_rank=4)
    with pytest.raises(ConfigError, match="converts no linear layer"):
        lora_config(only_experts, moe)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"model": "no/such/folder"}, "model 'no/such/folder'"),
        ({"device": "cuda"}, "no CUDA device"),
        (
            {"task": "gsm8k", "task_options": {"path": "g.jsonl"}},
            r"path=g\.jsonl: gsm8k .* name both files by \{split\}",
        ),
        ({"prompts": 1}, "unknown option 'prompts'"),
        ({"task_options": {1: 2}}, "task 'chain': unknown option '1'; possible: numbers, digits, ops"),
        ({"task_options": {"seed": 2}}, "task 'chain': unknown option 'seed'; possible: numbers, digits, ops"),
    ],
)
def test_what_can_not_be_run(policy, tmp_path, monkeypatch, options, message):
    monkeypatch.setattr(module.torch.cuda, "is_available", lambda: False)
    out = str(tmp_path / "runs" / "a")
    values = {"model": policy, "out": out, "eval_problems": 4, "steps": 1, "device": "cpu", **options}
    with pytest.raises((ConfigError, TaskError), match=message) as error:
        run_from_cli(**values)
    assert "\n" not in str(error.value) and not list(tmp_path.iterdir())


def test_what_a_refused_run_finds_it_leaves(policy, tmp_path):
    for out, holds in ((tmp_path / "empty", None), (tmp_path / "other", "notes.txt")):
        out.mkdir()
        if holds:
            (out / holds).write_text("mine")
        with pytest.raises(ConfigError, match="nope"):
            train(config("./nope", out))
        assert [path.name for path in out.iterdir()] == ([holds] if holds else [])


def test_a_place_that_can_not_be_written_is_named(policy, tmp_path, capsys):
    (tmp_path / "a.safetensors").write_text("weights")
    for out, why in (
        (tmp_path / "a.safetensors", "a.safetensors is a file"),
        (tmp_path / "a.safetensors" / "run", "Not a directory"),
        ("/proc/run", "No such file or directory"),
        ("/proc", "No such file or directory"),
    ):
        assert cli.main(["train", "--model", policy, "--device", "cpu", "--out", str(out)]) == 1
        line = capsys.readouterr().err
        assert line.startswith(f"mxrl: can't write to {out}: ") and why in line and line.count("\n") == 1

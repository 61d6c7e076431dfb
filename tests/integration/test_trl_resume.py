"""A run killed anywhere goes on from its last checkpoint to the same numbers, bit for bit (CPU, float32)."""

import resource
from contextlib import contextmanager

import pytest
import torch
import yaml
from tiny_grpo import steps, tiny_trainer
from transformers import TrainerCallback

from mxrl.integrations.trl_shards import complete_checkpoints, remove_incomplete
from mxrl.rl.config import TrainConfig
from mxrl.rl.folder import open_run

TIMES = ("time/", "speed/", "step_time", "train_runtime")


class Killed(Exception):
    pass


class KillAt(TrainerCallback):
    """Raises in the middle of a step, as a SIGKILL would end it: after the update, before anything is saved."""

    def __init__(self, step):
        self.step = step

    def on_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step + 1 == self.step:
            raise Killed


def numbers(trainer):
    return [{k: v for k, v in row.items() if not k.startswith(TIMES)} for row in steps(trainer)]


QUICK = {"recipe": "mxfp4+aqn", "max_completion_length": 5}

CASES = {
    "one update a rollout, accumulation": {"gradient_accumulation_steps": 2},
    "killed inside a rollout's updates": {
        "gradient_accumulation_steps": 1, "steps_per_generation": 2, "num_iterations": 2,
    },
    "experts": {"kind": "moe"},
    "several epochs": {"rows": 8},  # 4 prompts a step: the checkpoint is in the middle of the second epoch
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_three_steps_killed_and_resumed_equal_six_straight(tmp_path, case):
    options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "save_total_limit": 2, **QUICK, **CASES[case]}
    straight = tiny_trainer(tmp_path / "straight", **options)
    straight.train()

    killed = tiny_trainer(tmp_path / "killed", callbacks=[KillAt(5)], **options)
    with pytest.raises(Killed):
        killed.train()
    (checkpoint,) = complete_checkpoints(tmp_path / "killed")
    assert checkpoint.name == "checkpoint-3"
    torch.manual_seed(99)  # another process would be in another random state
    resumed = tiny_trainer(tmp_path / "killed", **options)
    resumed.train(resume_from_checkpoint=str(checkpoint))

    assert numbers(resumed) == numbers(straight)
    assert all(row["grad_norm"] > 0 for row in steps(straight))
    pairs = zip(straight.model.parameters(), resumed.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_a_checkpoint_that_a_kill_cut_short_is_not_taken(tmp_path):
    options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, **QUICK}
    tiny_trainer(tmp_path, **options).train()
    first, second = complete_checkpoints(tmp_path)
    (second / "mxrl_state-0.pt").unlink()
    assert complete_checkpoints(tmp_path) == [first]
    with pytest.raises(RuntimeError, match=r"checkpoint-2 is no complete checkpoint"):
        tiny_trainer(tmp_path, **options).train(resume_from_checkpoint=str(second))


@contextmanager
def files_of_at_most(size):
    """The system refuses to write more into one file: as on a disk that is full, on one that isn't."""
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, former[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.pt"])
def test_a_checkpoint_that_does_not_fit_is_one_line_and_leaves_nothing(tmp_path, file):
    options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, **QUICK}
    tiny_trainer(tmp_path / "whole", **options).train()
    (first, _) = complete_checkpoints(tmp_path / "whole")
    size = (first / file).stat().st_size - 1000
    assert all(p.stat().st_size < size for p in first.iterdir() if p.name not in ("model.safetensors", "optimizer.pt"))
    with files_of_at_most(size), pytest.raises(OSError) as found:
        tiny_trainer(tmp_path / "full", **options).train()
    said = str(found.value)
    assert said.startswith(f"{tmp_path / 'full' / 'checkpoint-1'} could not be written: ") and "\n" not in said
    assert said.endswith("GB are free there; there is no earlier checkpoint)")
    assert not list((tmp_path / "full").glob("checkpoint-*"))

    (kept,) = {p.name for p in complete_checkpoints(tmp_path / "whole")} - {"checkpoint-2"}
    with files_of_at_most(size), pytest.raises(OSError, match=rf"checkpoint-2 could.*checkpoint is {kept}\)$"):
        tiny_trainer(tmp_path / "whole", **options).train(resume_from_checkpoint=str(first))
    assert [p.name for p in (tmp_path / "whole").glob("checkpoint-*")] == [kept]


def test_what_a_kill_left_of_a_checkpoint_is_removed(tmp_path):
    for name, complete in (("checkpoint-2", True), ("checkpoint-4", False), ("checkpoint-10", False), ("model", False)):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".tmpAbC").write_text("part of a file")
        if complete:
            (tmp_path / name / "mxrl_state-0.pt").touch()
    remove_incomplete(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"checkpoint-2", "model"}
    remove_incomplete(tmp_path / "nowhere")


def test_a_run_that_goes_on_removes_them_first(tmp_path):
    config = TrainConfig(out=str(tmp_path))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config.to_dict()))
    for step in (5, 10):
        (tmp_path / "checkpoints" / f"checkpoint-{step}").mkdir(parents=True)
    torch.save({}, tmp_path / "checkpoints" / "checkpoint-5" / "mxrl_state-0.pt")
    assert open_run(tmp_path, config, "auto") == (tmp_path / "checkpoints" / "checkpoint-5", None)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["checkpoint-5"]


def test_a_checkpoint_of_another_recipe_is_refused(tmp_path):
    tiny_trainer(tmp_path, "bf16", max_steps=1, save_strategy="steps", save_steps=1).train()
    (checkpoint,) = complete_checkpoints(tmp_path)
    with pytest.raises(RuntimeError, match="is of recipe bf16, this run's is mxfp4"):
        tiny_trainer(tmp_path, "mxfp4").train(resume_from_checkpoint=str(checkpoint))

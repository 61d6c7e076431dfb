"""A run killed anywhere goes on from its last checkpoint to the same numbers, bit for bit (CPU, float32)."""

import pytest
import torch
from tiny_grpo import steps, tiny_trainer
from transformers import TrainerCallback

from mxrl.integrations.trl_shards import complete_checkpoints

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


def test_a_checkpoint_of_another_recipe_is_refused(tmp_path):
    tiny_trainer(tmp_path, "bf16", max_steps=1, save_strategy="steps", save_steps=1).train()
    (checkpoint,) = complete_checkpoints(tmp_path)
    with pytest.raises(RuntimeError, match="is of recipe bf16, this run's is mxfp4"):
        tiny_trainer(tmp_path, "mxfp4").train(resume_from_checkpoint=str(checkpoint))

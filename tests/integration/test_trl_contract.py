"""What mxrl.integrations.trl relies on inside TRL, so that an upgrade says what moved instead of training wrongly."""

import pytest
import trl
from tiny_grpo import tiny_trainer
from transformers import TrainerCallback
from trl.trainer.grpo_trainer import GRPOTrainer

from mxrl.integrations.trl_contract import TRL_VERSION, check_version, contract_breaks


def test_this_is_the_pinned_minor_version():
    assert trl.__version__.startswith(f"{TRL_VERSION}."), f"write the contract for trl {trl.__version__}"


def test_nothing_moved():
    assert contract_breaks() == []


def test_what_moved_is_named():
    class Later(GRPOTrainer):
        _compute_loss = None  # type: ignore[assignment]

        def training_step(self, model, inputs):
            return super().training_step(model, inputs, None)

        def _prepare_inputs(self, generation_batch):
            return generation_batch

    moved = contract_breaks(Later)
    assert "GRPOTrainer._compute_loss is gone" in moved
    assert any(line.startswith("GRPOTrainer.training_step takes (self, model, inputs), not") for line in moved)
    assert any("_prepare_inputs no longer has `shuffle_sequence_dict(`" in line for line in moved)


def test_another_version_is_refused_only_if_something_moved(monkeypatch):
    monkeypatch.setattr(trl, "__version__", "1.17.0")
    check_version()
    monkeypatch.setattr(GRPOTrainer, "_generate_single_turn", lambda self, prompt_ids: None)
    with pytest.raises(RuntimeError, match=r"trl 1\.17\.0: .*_generate_single_turn.*pip install 'trl==1\.16") as error:
        check_version()
    assert "\n" not in str(error.value)


class Events(TrainerCallback):
    def __init__(self):
        self.seen = []

    def __getattribute__(self, name):
        if name in ("on_step_begin", "on_substep_end", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end"):
            return lambda *args, **kwargs: self.seen.append(name)
        return super().__getattribute__(name)


def test_order_of_events_and_one_sync_a_step(tmp_path):
    events = Events()
    trainer = tiny_trainer(tmp_path, callbacks=[events], max_steps=2)
    backend = trainer.vllm_generation
    for name in ("sync_weights", "generate"):
        monitored(backend, name, events.seen)
    trainer.train()
    step = ["on_step_begin", "sync_weights", "generate", "on_substep_end",
            "on_pre_optimizer_step", "on_optimizer_step", "on_step_end"]  # fmt: skip
    assert events.seen == step * 2


def monitored(owner, name, seen):
    inner = getattr(owner, name)

    def outer(*args, **kwargs):
        seen.append(name)
        return inner(*args, **kwargs)

    setattr(owner, name, outer)


def test_generate_gets_each_prompt_as_often_as_it_is_to_be_completed(tmp_path):
    trainer = tiny_trainer(tmp_path, max_steps=1)
    inner, got = trainer.vllm_generation.generate, {}

    def outer(prompts, images, num_generations, profiler=None):
        out = inner(prompts, images, num_generations, profiler)
        got.update(prompts=prompts, images=images, n=num_generations, out=out)
        return out

    trainer.vllm_generation.generate = outer
    trainer.train()
    prompts = got["prompts"]
    assert len(prompts) == 16 and got["images"] is None and got["n"] == 4
    assert all(prompts[i] == prompts[i - i % 4] for i in range(16)) and len(set(map(tuple, prompts))) == 4
    _, ids, logps, rest = got["out"]
    assert rest is None and [len(x) for x in ids] == [len(x) for x in logps]
    assert all(len(lp) == 1 and lp[0] <= 0 for row in logps for lp in row)

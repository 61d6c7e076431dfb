"""What TRL takes for vLLM, and what a rollout and a training pass have in common: draws, order, positions, head."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from trl.trainer.utils import RepeatSampler

from mxrl.integrations.trl_config import UnsupportedError
from mxrl.nn import aqn_noise
from mxrl.nn.weights import Noise
from mxrl.rl.rollout import positions, sample

if TYPE_CHECKING:
    from mxrl.integrations.trl import GRPOTrainer


class QuantizedRollout:
    """What TRL takes for vLLM: draws AQN's noise when the weights are synchronized, then samples from the policy."""

    def __init__(self, trainer: GRPOTrainer):
        self.trainer = trainer
        self.rollout = -1  # t of AQN's schedule: the number of training syncs before this one
        self.synced_step = -1  # global step of the last training sync

    def sync_weights(self) -> None:
        """TRL calls it once before the first generation of each new global step."""
        if self.trainer.model.training:
            self.rollout += 1
            self.synced_step = self.trainer.state.global_step

    def noise(self) -> Noise | None:
        return aqn_noise(self.trainer.recipe, self.trainer.args.seed, self.rollout, self.trainer.total_rollouts)

    def generate(
        self, prompts: list[list[int]], images: Any, num_generations: int, profiler: Any = None
    ) -> tuple[list[list[int]], list[list[int]], list[list[list[float]]], None]:
        """(prompts, completion ids, [[[log-probability] a token] a sequence], None), as vLLM's wrapper returns it.

        prompts hold each prompt num_generations times. In evaluation there is no noise, and no rollout is counted.
        """
        if images is not None:
            raise UnsupportedError("GRPOTrainer: rollouts with images are not supported")
        trainer = self.trainer
        training = trainer.model.training
        with trainer.record.phase("rollout"), profiler or nullcontext():
            with trainer.rollout_policy(self.noise() if training else None) as (model, report):
                rollout = sample(
                    model,
                    prompts,
                    max_new_tokens=trainer.max_completion_length,
                    eos_token_id=trainer.eos_token_ids,
                    pad_token_id=trainer._tokenizer.pad_token_id,
                    temperature=trainer.temperature,
                    batch_size=trainer.rollout_batch_size,
                    first_row=trainer.accelerator.process_index * len(prompts),
                )
                logps = rollout.logps
                if trainer.score == "forward":
                    logps = trainer._score_as_training(model, rollout.inputs(), rollout.completion_ids.shape[1])
                if training:
                    trainer._rollout_drawn(model, rollout, report)
        if not training:
            trainer._last_loaded_step = self.synced_step  # an evaluation must not use up this step's sync
        lengths = rollout.completion_mask.sum(1).tolist()
        nested = [[[lp] for lp in row[:n]] for row, n in zip(logps.tolist(), lengths, strict=True)]
        return prompts, rollout.completions(), nested, None


class EpochRepeatSampler(RepeatSampler):
    """TRL's sampler, but each epoch's order is a function of (seed, epoch), so that a resumed epoch is the same one."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        if self.shuffle:
            self.generator.manual_seed((self.seed or 0) + self.epoch)
        return super().__iter__()


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Draw from `seed` inside, and leave the global generators (CPU, and the device's) as they were."""
    cuda = [device.index if device.index is not None else torch.cuda.current_device()] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        torch.manual_seed(seed)
        yield


@contextmanager
def in_compute_dtype(model: nn.Module) -> Iterator[None]:
    """Logits as autocast makes them: accelerate's wrapper would make float32 ones of all, [rows, V] in every step."""
    wrapped, original = vars(model).get("forward"), vars(model).get("_original_forward")
    if original is None:
        yield
        return
    model.forward = original  # type: ignore[method-assign]
    try:
        yield
    finally:
        model.forward = wrapped  # type: ignore[method-assign]


def real_positions(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """Count positions from the first real token in TRL's scoring passes, as decoding does; TRL counts padding too."""
    mask = kwargs.get("attention_mask")
    if not kwargs.get("fused_lm_head") or mask is None or kwargs.get("position_ids") is not None:
        return None
    return args, {**kwargs, "position_ids": positions(mask)}


def without_autocast(head: nn.Module) -> None:
    """TRL's float32 head runs under autocast while decoding, and in bf16 therefore; in training it doesn't."""

    def plain(self: nn.Module, hidden: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            return type(self).forward(self, hidden)

    head.forward = MethodType(plain, head)  # type: ignore[method-assign]

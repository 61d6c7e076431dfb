"""The settings of TRL's that decide whether a quantized rollout is what it says: pinned, or refused in one line."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from trl.trainer.grpo_config import GRPOConfig as TrlConfig

from mxrl.rl.rollout import NEUTRAL, refuse_biased_sampling

TRL_TIS = ("sequence_mask", 3.0)  # TRL's defaults of mode and C, which a plain trl.GRPOConfig can't be told from


@dataclass
class GRPOConfig(TrlConfig):
    """trl.GRPOConfig with token-level truncated importance sampling at C = 2 as the default."""

    vllm_importance_sampling_mode: str = field(default="token_truncate")
    vllm_importance_sampling_clip_max: float | None = field(default=2.0)


class UnsupportedError(ValueError):
    """A setting of TRL's under which the quantized rollout would be bypassed or biased."""


def refuse_dropout(model: nn.Module) -> None:
    """UnsupportedError where a part of the model drops anything in training, which no rollout does."""
    for name, module in model.named_modules():
        rates = {"p": module.p} if isinstance(module, _DropoutNd) else vars(module)
        for key, rate in rates.items():
            if isinstance(rate, float) and rate > 0 and (key == "p" or "dropout" in key):
                raise UnsupportedError(
                    f"GRPOTrainer: '{name}' ({type(module).__name__}) has {key}={rate:g}, so training would score the "
                    "rollout's tokens with another policy than the one that drew them; load the model with it at 0, "
                    "or set disable_dropout=True where it is a layer of its own"
                )


def pin(args: Any, extra: dict[str, Any]) -> None:
    """Refuse what bypasses the quantized rollout or biases it; pin TIS where the config has only TRL's defaults."""
    refuse_biased_sampling({name: getattr(args, name, None) for name in NEUTRAL}, "GRPOConfig")
    refuse_biased_sampling(args.generation_kwargs or {}, "GRPOConfig.generation_kwargs")
    if others := sorted(set(args.generation_kwargs or ()) - set(NEUTRAL)):
        raise UnsupportedError(
            f"GRPOConfig.generation_kwargs: {', '.join(others)} would not be applied by the quantized rollout, which "
            "takes temperature and max_completion_length from GRPOConfig; leave it out"
        )
    for name in ("use_vllm", "use_transformers_continuous_batching"):
        if getattr(args, name):
            raise UnsupportedError(f"GRPOConfig {name}=True would bypass the quantized rollout; leave it off")
    for name in ("rollout_func", "tools", "environment_factory"):
        if extra.get(name):
            raise UnsupportedError(f"GRPOTrainer {name}: only single-turn rollouts are quantized; leave it out")
    if not isinstance(args, GRPOConfig) and TRL_TIS == (
        args.vllm_importance_sampling_mode,
        args.vllm_importance_sampling_clip_max,
    ):
        args.vllm_importance_sampling_mode, args.vllm_importance_sampling_clip_max = "token_truncate", 2.0

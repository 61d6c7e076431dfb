"""The settings of TRL's that decide whether a quantized rollout is what it says: pinned, or refused in one line."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

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


def pin(args: Any, extra: dict[str, Any]) -> None:
    """Refuse what bypasses the quantized rollout or biases it; pin TIS where the config has only TRL's defaults."""
    refuse_biased_sampling({name: getattr(args, name, None) for name in NEUTRAL}, "GRPOConfig")
    refuse_biased_sampling(args.generation_kwargs or {}, "GRPOConfig.generation_kwargs")
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

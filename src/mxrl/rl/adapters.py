"""LoRA adapters on the layers that mxrl quantizes: the frozen base in 4 bits, the adapter in the compute dtype.

    y = Q(x) · Q(W)ᵀ + (alpha / rank) · B(A(x))         W frozen; A [rank, K] random at the start, B [O, rank] zero

QeRL's setting (arXiv 2510.11696): recipe nvfp4+w4a16+aqn+aqn_target=norm, where Q(W) is NVFP4, activations are not
quantized, and AQN's noise goes on the norms' weights. Only A and B get gradients; LoRA usually wants about ten times
the learning rate of full training.

Experts of an MoE are fused 3-D parameters. PEFT would adapt them by W + BA *before* the quantizer, which is another
thing than the above, so they stay frozen and quantized, and the adapters sit on the attention projections alone.
"""

from __future__ import annotations

import sys
from typing import Any

import mxrl
from mxrl.rl.config import ConfigError, TrainConfig


def lora_config(config: TrainConfig, model: Any, processes: int = 1) -> Any:
    """The peft.LoraConfig of `config.lora_rank` for this model, which is converted on the way; None for rank 0.

    Raises ConfigError for several processes, and for a recipe that leaves no linear layer to put an adapter on.
    """
    if not config.lora_rank:
        return None
    if processes > 1:
        raise ConfigError(
            f"lora_rank={config.lora_rank}: adapters are trained by one process, and {processes} were started; "
            "start one, or leave lora_rank at 0"
        )
    from peft import LoraConfig

    converted = mxrl.convert(model, config.recipe).converted
    names = [layer.name.removesuffix(".weight") for layer in converted if layer.kind == "linear"]
    if not names:
        raise ConfigError(
            f"lora_rank={config.lora_rank}: recipe '{config.recipe}' converts no linear layer of '{config.model}' "
            "to put an adapter on"
        )
    if len(names) < len(converted):
        print(f"lora_rank={config.lora_rank}: the experts stay frozen; adapters on {len(names)} linear layers alone",
              file=sys.stderr, flush=True)  # fmt: skip
    alpha = 2.0 * config.lora_rank if config.lora_alpha is None else config.lora_alpha
    return LoraConfig(r=config.lora_rank, lora_alpha=alpha, target_modules=names, task_type="CAUSAL_LM")  # type: ignore[arg-type]

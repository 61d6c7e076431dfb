"""Tiny random models of every family that `mxrl.convert` is held to: two blocks, width 64, no download.

Widths are no multiples of 128 and the experts' inner width (48) none of 32, as in real models (SmolLM2: 576).
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

VOCAB = 50
_SHAPE: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    attn_implementation="eager",
)
_CONFIGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen2": (Qwen2Config, dict(intermediate_size=96, tie_word_embeddings=True)),
    "qwen3": (Qwen3Config, dict(intermediate_size=96, head_dim=32)),
    "llama": (LlamaConfig, dict(intermediate_size=96)),
    "qwen3_moe": (
        Qwen3MoeConfig,
        dict(intermediate_size=96, moe_intermediate_size=48, num_experts=4, num_experts_per_tok=2, head_dim=32),
    ),
    "mixtral": (MixtralConfig, dict(intermediate_size=48, num_local_experts=4, num_experts_per_tok=2)),
    "olmoe": (OlmoeConfig, dict(intermediate_size=48, num_experts=4, num_experts_per_tok=2)),
    "gpt_oss": (
        GptOssConfig,
        dict(
            intermediate_size=48,
            num_local_experts=4,
            num_experts_per_tok=2,
            head_dim=32,
            sliding_window=16,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        ),
    ),
}
DENSE = ("qwen2", "qwen3", "llama")
MOE = ("qwen3_moe", "mixtral", "olmoe", "gpt_oss")
FAMILIES = DENSE + MOE


def tiny_model(family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A random causal language model; norms, biases and routers are random too, so that nothing is left out unseen."""
    config_class, extra = _CONFIGS[family]
    model = AutoModelForCausalLM.from_config(config_class(**{**_SHAPE, **extra}))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * noise if "norm" in name else 0.1 * noise)
    return model.to(dtype).eval()


def tokens(batch: int = 3, length: int = 9, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))

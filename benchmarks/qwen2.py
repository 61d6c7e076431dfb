"""A random Qwen2-shaped model, Qwen2.5-0.5B by default: 24 layers of width 896 = 7 × 128, 494 M parameters."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

SMALL = {"layers": 4, "hidden": 256, "intermediate": 704, "heads": 4, "kv_heads": 2, "vocab": 8192}
FULL = {"layers": 24, "hidden": 896, "intermediate": 4864, "heads": 14, "kv_heads": 2, "vocab": 151936}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=("full", "small"), help="default: full on CUDA, small on the CPU")
    for name in FULL:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help="overrides the model's")


def shape(args: argparse.Namespace, device: torch.device) -> dict[str, int]:
    base = {"full": FULL, "small": SMALL}[args.model or ("full" if device.type == "cuda" else "small")]
    return {name: getattr(args, name) or size for name, size in base.items()}


def build(sizes: dict[str, int], *, device: torch.device, dtype: torch.dtype, seed: int, positions: int) -> Any:
    """The same weights for the same seed and sizes, the head tied to the embedding; attention by torch's SDPA."""
    config = Qwen2Config(
        vocab_size=sizes["vocab"],
        hidden_size=sizes["hidden"],
        intermediate_size=sizes["intermediate"],
        num_hidden_layers=sizes["layers"],
        num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["kv_heads"],
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    return model.to(dtype)


def described(sizes: dict[str, int], model: Any) -> str:
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    return f"{sizes['layers']} layers of width {sizes['hidden']}, {millions:.1f} M parameters"

"""A shrunk copy of an architecture, as a folder that `mxrl train` takes: few layers, narrow, random weights.

    python experiments/paper_scale/shrunk.py experiments/paper_scale/models/qwen2.5-3b /tmp/shrunk-3b
    mxrl train experiments/paper_scale/qwen2.5-3b.yaml --model /tmp/shrunk-3b …      README.md has the whole line

What makes an architecture stays: the model's class, biases, tied or separate head, query heads to a key-value head,
normed heads, experts and how many of them a token takes (in proportion). The tokenizer is one character a token, with
a chat template of the real ones' form.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from mxrl.rl.policy import char_tokenizer, save_policy

ASCII = "\n" + "".join(map(chr, range(32, 127)))
CHAT = (
    "{% for m in messages %}{{ '[' + m['role'] + ']' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)


def shrink(config: Any, *, layers: int = 2, head_dim: int = 16, vocab: int | None = None) -> Any:
    """A small configuration of the same architecture: `config` itself is left as it is.

    Two key-value heads (one alone would be repeated without a copy, and count too little), each serving as many query
    heads as there; widths in proportion and in multiples of 32; of a MoE 16 experts, as many of them a token as there
    are in proportion, but at least 2.
    """
    small = type(config)(**config.to_dict())
    kv_heads = 2
    heads = kv_heads * config.num_attention_heads // config.num_key_value_heads
    width = 32 * max(1, heads * head_dim * config.hidden_size // (32 * config.num_attention_heads * _head(config)))
    scale = width / config.hidden_size
    sizes: dict[str, Any] = {
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "hidden_size": width, "intermediate_size": _multiple(config.intermediate_size * scale),
        "vocab_size": vocab or len(ASCII) + 3, "max_position_embeddings": 1024,
        "layer_types": ["full_attention"] * layers,
        "initializer_range": 0.05, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    if getattr(config, "head_dim", None):
        sizes["head_dim"] = head_dim
    if getattr(config, "num_experts", 0):
        sizes |= {
            "num_experts": 16,
            "num_experts_per_tok": max(2, 16 * config.num_experts_per_tok // config.num_experts),
            "moe_intermediate_size": _multiple(config.moe_intermediate_size * scale),
        }
    for name, value in sizes.items():
        setattr(small, name, value)
    return small


def build(config: Any, seed: int = 0) -> Any:
    """A float32 model of the configuration with random weights; the global random state stays as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").float()


def tokenizer() -> Any:
    found = char_tokenizer(ASCII)
    found.chat_template = CHAT
    return found


def _head(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _multiple(size: float, of: int = 32) -> int:
    return max(of, of * round(size / of))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="a folder with the architecture's config.json")
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=2)
    args = parser.parse_args()
    if not (args.source / "config.json").is_file():
        sys.exit(f"shrunk.py: {args.source}: no config.json there")
    model = build(shrink(AutoConfig.from_pretrained(args.source), layers=args.layers))
    save_policy(model, tokenizer(), args.out, dtype=torch.float32)
    print(f"{args.out}: {type(model).__name__}, {sum(p.numel() for p in model.parameters()):,} parameters")


if __name__ == "__main__":
    main()

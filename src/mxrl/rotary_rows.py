"""GGUF's order of the rows of q and k in Llama models, which differs from every other checkpoint's.

    Hugging Face    a head's rows: first all x_i, then all y_i of the rotary pairs (x_i, y_i)
    GGUF "llama"    the pairs side by side: x_0, y_0, x_1, y_1, …

Source: llama.cpp, convert_hf_to_gguf.py, LlamaModel.permute. Other architectures (qwen2, qwen3, gemma, …) keep the
rows as they are.
"""

from __future__ import annotations

from typing import Any

from mxrl.checkpoint import Checkpoint, CheckpointError

_ARCHITECTURES = ("llama",)


def heads_of(checkpoint: Checkpoint) -> dict[str, int]:
    """{"q": heads, "k": key heads} where `checkpoint` holds q and k in the rotary order; {} for every other one."""
    if checkpoint.format != "gguf":
        return {}
    import gguf

    path = checkpoint.files[0]
    try:
        fields = gguf.GGUFReader(path).fields
        architecture = _value(fields.get("general.architecture"))
        if architecture not in _ARCHITECTURES:
            return {}
        heads = _value(fields.get(f"{architecture}.attention.head_count"))
        key_heads = _value(fields.get(f"{architecture}.attention.head_count_kv"))
    except (ValueError, KeyError, IndexError, OSError) as err:
        raise CheckpointError(f"{path}: its metadata can't be read ({err})") from err
    if heads is None:
        return {}
    return {"q": int(heads), "k": int(key_heads if key_heads is not None else heads)}


def _value(field: Any) -> Any:
    return None if field is None else field.contents()

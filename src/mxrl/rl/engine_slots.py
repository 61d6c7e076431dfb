"""The cache of the decoding engine, and how a Hugging Face model is led to use it.

Legend: S slots (rows decoded together), J key-value heads, D head size, T room for tokens, N rows of a prefill.

A slot is one row of preallocated keys and values [S, J, T, D] a layer, filled from its position 0 on: rows of one batch
may be at different lengths, and a slot that is given another prompt is simply overwritten. The model's own forward pass
runs; two of its hooks are set while the engine does, and put back afterwards:

    config._attn_implementation      an attention function of ours, which writes to the slots and attends to them
    config._experts_implementation   grouped GEMMs where a model would loop over its experts on the host (CUDA only)

    prefill   N prompts, right-padded: causal attention among themselves. Padding stands behind every real token, so the
              causal mask alone hides it; what it leaves in a slot is overwritten before it is attended to.
    decode    one token a slot: ops/attention(_triton).py
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import Cache, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mxrl.nn.experts import is_known_experts, weight_names
from mxrl.nn.grouped import fits
from mxrl.nn.operands import compute_dtype
from mxrl.ops import attention

ATTENTION = "mxrl_slots"  # of the registered attention implementation
_ROPE_OF_BATCH = ("dynamic", "longrope")  # their frequencies depend on the longest row of the batch


class EngineError(ValueError):
    """The engine can't decode this model, or was asked for what it doesn't know; the message says what works."""


def base_model(model: Any) -> Any:
    """The Hugging Face model inside torch.compile's or PEFT's wrapper (adapters sit in its layers and stay)."""
    model = getattr(model, "_orig_mod", model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def unsupported(model: Any) -> str | None:
    """Why the engine can't decode `model`, in one phrase; None if it can."""
    base = base_model(model)
    name = type(base).__name__
    if not isinstance(base, PreTrainedModel):
        return f"{name} is no transformers model"
    config = base.config.get_text_config()
    if config is not base.config:
        return f"{name} is more than a language model"
    layers = set(getattr(config, "layer_types", None) or ())
    if layers - {"full_attention"}:
        return f"{name} has layers of {', '.join(sorted(layers - {'full_attention'}))}"
    if not layers and getattr(config, "sliding_window", None) is not None:
        return f"{name} attends to a sliding window"
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return f"{name} caps its attention scores"
    if getattr(config, "is_encoder_decoder", False) or base.get_output_embeddings() is None:
        return f"{name} is no decoder-only language model"
    if not base._supports_attention_backend:
        return f"{name} has an attention of its own"
    inputs = inspect.signature(type(base).forward).parameters
    if not {"position_ids", "past_key_values"} <= set(inputs):
        return f"{name} takes no position_ids or no cache"
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope in _ROPE_OF_BATCH:
        return f"{name}'s rotary frequencies ({rope}) depend on the longest row of a batch"
    if any(getattr(c, "is_prompt_learning", False) for c in getattr(model, "peft_config", {}).values()):
        return "PEFT's prompt learning puts tokens of its own into the cache"
    parameters = list(base.parameters())
    if any(isinstance(p, DTensor) for p in parameters):
        return "its parameters are sharded"
    devices = {p.device for p in parameters}
    if len(devices) > 1:
        return f"it is spread over {len(devices)} devices"
    if devices and next(iter(devices)).type == "cuda" and importlib.util.find_spec("triton") is None:
        return "the package triton isn't installed"
    return None


def waits_for_the_host(model: Any) -> bool:
    """Whether a forward pass goes through its experts one by one (nn/grouped.py), which no CUDA graph can hold."""
    for module in base_model(model).modules():
        if is_known_experts(module):
            weights = [getattr(module, name) for name in weight_names(module)]
            if not all(fits(compute_dtype(w), *w.shape[1:]) for w in weights):
                return True
    return False


def bytes_per_token(model: Any, dtype: torch.dtype) -> int:
    """Bytes of keys and values that one token takes, over all layers."""
    config = base_model(model).config.get_text_config()
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return 2 * config.num_hidden_layers * kv_heads * size * dtype.itemsize


def upload(numbers: list[Any], device: torch.device) -> Tensor:
    """(Nested) lists of ints as int64 on the device; on CUDA without waiting for it, as `torch.tensor` would."""
    if device.type != "cuda":
        return torch.tensor(numbers, device=device)
    return torch.tensor(numbers, pin_memory=True).to(device, non_blocking=True)


class SlotCache(Cache):
    """Keys and values of S slots with room for T tokens each; `positions` [S] is where the next token of each goes.

    The layers' tensors are made when the first token comes, in its dtype. `update` hands a layer's new keys and values
    on to the attention function, `attend`, which stores them.
    """

    def __init__(self, slots: int, room: int, positions: Tensor):
        super().__init__(layers=[])
        self.slots, self.room, self.positions = slots, room, positions
        self.keys: dict[int, Tensor] = {}  # layer -> [S, J, T, D]
        self.values: dict[int, Tensor] = {}
        self.destination: tuple[Any, Tensor | None] | None = None  # (slots, prompt of each) while prefilling

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    @contextmanager
    def prefilling(self, slots: list[int], prompt_of: list[int]) -> Iterator[None]:
        """Inside, row prompt_of[i] of the forward pass is stored in slot slots[i]."""
        adjacent = slots == list(range(slots[0], slots[0] + len(slots)))
        device = self.positions.device
        place = slice(slots[0], slots[0] + len(slots)) if adjacent else upload(slots, device)
        one_each = prompt_of == list(range(len(slots)))
        self.destination = (place, None if one_each else upload(prompt_of, device))
        try:
            yield
        finally:
            self.destination = None

    def keep(self, rows: Tensor) -> None:
        """Drop every slot but `rows`."""
        self.slots = len(rows)
        for layer in self.keys:
            self.keys[layer], self.values[layer] = self.keys[layer][rows], self.values[layer][rows]

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """The attention of one layer: query [N, H, W, D], key and value [N, J, W, D] -> [N, W, H, D]."""
        layer: int = module.layer_idx  # type: ignore[assignment]
        dtype = compute_dtype(query)  # under autocast, where rotated queries and keys are float32, attention is not
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        if layer not in self.keys:
            for store, new in ((self.keys, key), (self.values, value)):
                # zeros: what is masked out must be finite
                store[layer] = new.new_zeros(self.slots, new.shape[1], self.room, new.shape[3])
        keys, values = self.keys[layer], self.values[layer]
        if self.destination is not None:
            place, prompt_of = self.destination
            width = key.shape[2]
            for store, new in ((keys, key), (values, value)):
                store[place, :, :width] = new if prompt_of is None else new.index_select(0, prompt_of)
            return sdpa_attention_forward(module, query, key, value, None, scaling=scaling)[0]
        if query.is_cuda:
            from mxrl.ops.attention_triton import decode_attention
        else:
            decode_attention = attention.decode_attention
        new = (query.squeeze(2), key.squeeze(2), value.squeeze(2))
        return decode_attention(*new, keys, values, self.positions, scaling).unsqueeze(1)


_current: SlotCache | None = None  # of the engine that runs; attention functions are given no cache


def _attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls for each layer while the engine runs."""
    special = [name for name in ("sliding_window", "softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
    if special:
        raise EngineError(
            f"{type(module).__name__} uses {special[0]}, which the engine doesn't; take engine='generate'"
        )
    if _current is None:
        raise EngineError(f"attention '{ATTENTION}' works inside mxrl's engine only")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return _current.attend(module, query, key, value, scale), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attention_forward)


@contextmanager
def attending_to(cache: SlotCache, model: Any) -> Iterator[None]:
    """Inside, every attention layer of `model` works on `cache`; its configuration is as before afterwards."""
    global _current
    if _current is not None:
        raise EngineError("the engine is running already: one rollout at a time")
    configs = {id(m.config): m.config for m in base_model(model).modules() if hasattr(m, "config")}.values()
    before = [(c, c._attn_implementation_internal, c._experts_implementation_internal) for c in configs]
    try:
        _current = cache
        for config, _, experts in before:
            config._attn_implementation_internal = ATTENTION
            if cache.positions.is_cuda and experts == "eager":
                config._experts_implementation_internal = "grouped_mm"
        yield
    finally:
        _current = None
        for config, attention_name, experts in before:
            config._attn_implementation_internal = attention_name
            config._experts_implementation_internal = experts

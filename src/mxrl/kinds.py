"""Which tensors of a checkpoint are linear weights, of which kind, and along which axis they are contracted (no torch).

A linear layer computes `y_TN = x_TK · W_NK^T`: T tokens, N outputs, K the contraction axis along which blocks lie.

    W [N, K]      linear layer                          contraction axis -1
    W [K, N]      GPT-2's Conv1D                        contraction axis -2
    W [E, N, K]   experts fused (Qwen3-MoE, Mixtral)    contraction axis -1
    W [E, K, N]   experts fused (gpt-oss, Llama 4)      contraction axis -2

Names alone decide what a tensor is; shapes decide the orientation, because both layouts of fused experts use the same
names: with I the experts' inner width, `gate_up_proj` is [E, 2I, H] or [E, H, 2I], `down_proj` [E, H, I] or [E, I, H],
and no H and I fit both readings. Whatever is not counted is returned too, with the reason. A weight stored in another
form (packed codes) is judged by its logical shape: `mxrl.checkpoints` has put its parts together before.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

FLOATS = ("F64", "F32", "F16", "BF16")

# Ends of a module's name, longest match first. Hugging Face, GPT-2 style, original Llama, T5, BERT and GGUF names.
_SUFFIXES: dict[str, tuple[str, ...]] = {
    "qkv": ("qkv_proj", "query_key_value", "c_attn", "Wqkv", "qkv", "attn_qkv"),
    "q": ("q_proj", "query", "q_lin", "wq", "q_a_proj", "q_b_proj", "SelfAttention.q", "EncDecAttention.q",
          "attn_q", "attn_q_a", "attn_q_b"),
    "k": ("k_proj", "key", "k_lin", "wk", "SelfAttention.k", "EncDecAttention.k", "attn_k"),
    "v": ("v_proj", "value", "v_lin", "wv", "SelfAttention.v", "EncDecAttention.v", "attn_v"),
    "kv": ("kv_a_proj_with_mqa", "kv_b_proj", "attn_kv_a_mqa", "attn_kv_b"),
    "o": ("o_proj", "out_proj", "out_lin", "attention.output.dense", "attention.dense", "self_attention.dense",
          "attn.c_proj", "attention.wo", "SelfAttention.o", "EncDecAttention.o", "attn_output", "attn_out"),
    "gate_up": ("gate_up_proj", "input_linear", "ffn_gate_up"),
    "gate": ("gate_proj", "w1", "wi_0", "ffn_gate"),
    "up": ("up_proj", "w3", "wi_1", "wi", "fc1", "c_fc", "lin1", "intermediate.dense", "dense_h_to_4h", "ffn_up"),
    "down": ("down_proj", "w2", "fc2", "lin2", "mlp.c_proj", "output.dense", "dense_4h_to_h", "output_linear",
             "DenseReluDense.wo", "ffn_down"),
    "other": ("mixer.in_proj", "mixer.out_proj"),
}  # fmt: skip
_BY_LENGTH = sorted(((s, k) for k, ends in _SUFFIXES.items() for s in ends), key=lambda p: -len(p[0]))
_GGUF_EXPERTS = {"_exps": "experts.", "_chexps": "experts.", "_shexp": "shared_expert."}
KINDS = tuple(p + k for p in ("", "experts.", "shared_expert.") for k in _SUFFIXES)

# How a quantized checkpoint names the codes of a linear weight (GPTQ and AWQ, compressed-tensors, HQQ, AQLM, gpt-oss).
_CODES = (".weight", ".qweight", ".weight_packed", ".W_q", ".codes", "_blocks")
_EMBEDDING = re.compile(
    r"embeddings?$|^embed(_in|_positions|_tokens\w*)?$|_embd$|pos_embed$|^(wte|wpe|shared|token_types)$"
    r"|^relative_attention_bias$"
)
_HEAD = re.compile(r"^(lm_head|embed_out|score|classifier|v_head|qa_outputs)$")
_ROUTER = re.compile(r"^(gate|router|shared_expert_gate|ffn_gate_inp|ffn_gate_inp_shexp)$")
_NORM = re.compile(r"norm|^ln_|_ln$|^ln\d?$", re.IGNORECASE)


@dataclass(frozen=True)
class Header:
    """What is known of a tensor before its data are read: shape (slowest axis first) and stored type ("BF16", "Q4_1").

    `quantized`: it is stored in another form and decodes to float32. `why_dim`: the form itself says that the last axis
    of `shape` is contracted, in these words.
    """

    shape: tuple[int, ...]
    dtype: str
    quantized: bool = False
    why_dim: str | None = None


@dataclass(frozen=True)
class Role:
    """What a tensor is: `kind` of layer, contraction axis `dim` and how that was decided (`why_dim`) if it is a linear
    weight, else the `reason` why not.

    `fault` is set where a linear weight can't be read as numbers (codes without their scales), `warn` where something
    looks like a weight that this module doesn't know how to orient, or has had to guess (what, in words).
    """

    kind: str | None = None
    dim: int = -1
    why_dim: str = ""
    reason: str | None = None
    fault: str | None = None
    warn: str | None = None


def layer_of(name: str) -> int | None:
    """Index of the block a tensor belongs to: the first number in its name (`model.layers.7.…`, `blk.7.…`)."""
    match = re.search(r"(?:^|\.)(\d+)\.", name)
    return int(match[1]) if match else None


def natural_key(name: str) -> tuple[tuple[int, int | str], ...]:
    """Sorts layer 2 before layer 10: the fixed order of every scan, whatever order the files have."""
    return tuple((0, int(t)) if t.isdigit() else (1, t) for t in re.split(r"(\d+)", name) if t)


def kind_of(module: str) -> str:
    """Kind of the linear layer called `module`: q, k, v, o, gate, up, down, …, `experts.up`, or `other`."""
    prefix = ""
    for end, found in _GGUF_EXPERTS.items():
        if module.endswith(end):
            module, prefix = module.removesuffix(end), found
    parts = module.split(".")
    if any(p in ("shared_expert", "shared_experts", "shared_mlp") for p in parts):
        prefix = "shared_expert."
    elif "experts" in parts or parts[-1] in ("input_linear", "output_linear"):
        prefix = "experts."
    for suffix, kind in _BY_LENGTH:
        if module == suffix or module.endswith("." + suffix):
            return prefix + kind
    return prefix + "other"


def _not_linear(name: str, header: Header) -> str | None:
    """Why `name` is no linear weight, judged by its name and rank; None when it may be one."""
    parts = name.removesuffix(".weight").split(".")
    last = parts[-1]
    if last.endswith("bias"):
        return "embedding" if _EMBEDDING.search(last) else "bias"
    if _NORM.search(last):
        return "norm"
    if any(p.startswith(("lora_", "vera_")) for p in parts):
        return "adapter"
    if _EMBEDDING.search(last):
        return "embedding"
    if _HEAD.search(last) or name == "output.weight" or name.endswith("predictions.decoder.weight"):
        return "output head"
    if _ROUTER.search(last) or "router" in parts:
        return "router"
    if "conv" in last.lower():
        return "convolution"
    if len(header.shape) < 2:
        return "vector"
    return None


def classify(headers: Mapping[str, Header]) -> dict[str, Role]:
    """The role of every tensor of a checkpoint, from all of its headers (neighbours tell the orientation)."""
    conv1d = any(n.endswith("c_attn.weight") and h.shape[1:] == (3 * h.shape[0],) for n, h in headers.items())
    return {name: _classify_one(name, header, headers, conv1d) for name, header in headers.items()}


def _classify_one(name: str, header: Header, headers: Mapping[str, Header], conv1d: bool) -> Role:
    reason = _not_linear(name, header)
    numeric = header.dtype in FLOATS or header.quantized
    if not numeric:
        return _codes_or_bookkeeping(name, header, reason)
    if reason:
        return Role(reason=reason)
    is_weight = name.endswith(".weight")
    kind = kind_of(name.removesuffix(".weight"))
    fused = len(header.shape) == 3 and kind.startswith("experts.") and kind != "experts.other"
    if (fused or (len(header.shape) == 2 and is_weight)) and header.why_dim:
        return Role(kind, why_dim=header.why_dim)
    if len(header.shape) == 2 and is_weight:
        if conv1d and re.search(r"\.(c_attn|c_proj|c_fc|q_attn)\.weight$", name):
            return Role(kind, dim=-2, why_dim="GPT-2 Conv1D [in, out]")
        return Role(kind, why_dim="nn.Linear [out, in]")
    if fused:
        return _fused_experts(name, kind, headers)
    if "experts" in name.split("."):
        reason = "experts in a layout that mxrl does not know"
        return Role(reason=reason, warn=f"left out: {reason}")
    if len(header.shape) == 2:
        return Role(reason="parameter that is no layer's weight")
    return Role(reason=f"{len(header.shape)}-dimensional, no linear weight")


def _codes_or_bookkeeping(name: str, header: Header, reason: str | None) -> Role:
    """Codes that nothing was found to decode: a fault if they are a linear weight's; else indices, position ids, …"""
    float8 = header.dtype.startswith(("F8", "F6", "F4"))
    what = "8-bit (or smaller) float" if float8 else "integer"
    codes = next((name.removesuffix(end) for end in _CODES if name.endswith(end)), None)
    reason = reason or (_not_linear(f"{codes}.weight", header) if codes else None)
    fused = kind_of(name) if len(header.shape) == 3 else "other"
    if codes is None and fused.startswith("experts.") and fused != "experts.other":
        codes = name
    if codes is None or len(header.shape) < 2 or reason or (name.endswith("_blocks") and "experts" not in name):
        return Role(reason=f"{what} tensor" + (f" ({reason})" if reason not in (None, "vector") else ""))
    fault = (
        f"tensor '{name}' is a linear weight stored as {header.dtype} {list(header.shape)} (this checkpoint is already "
        "quantized), and no scales that mxrl knows lie beside it; give the whole checkpoint if they are in another "
        "file, or the float16, bfloat16 or float32 checkpoint it was made from"
    )
    return Role(reason=f"{what} tensor", fault=fault)


def _fused_experts(name: str, kind: str, headers: Mapping[str, Header]) -> Role:
    """The orientation of experts in one tensor; see the module's head for why both shapes together decide."""
    stem = name.removesuffix(".weight").rpartition(".")[0]
    gate_up, down = headers.get(f"{stem}.gate_up_proj"), headers.get(f"{stem}.down_proj")
    if gate_up is not None and down is not None and len(gate_up.shape) == len(down.shape) == 3:
        if gate_up.shape[1] == down.shape[2]:  # both H; in the other layout these are 2I and I
            return Role(kind, dim=-2, why_dim="gpt-oss experts [E, in, out]")
        return Role(kind, why_dim="fused experts [E, out, in]")
    if not name.endswith(("gate_up_proj", "down_proj")):
        return Role(kind, why_dim="fused experts [E, out, in]")
    other = "down_proj" if name.endswith("gate_up_proj") else "gate_up_proj"
    guess = (
        f"read as [E, out, in]: the shapes of gate_up_proj and down_proj decide that, and '{stem}.{other}' is missing"
    )
    return Role(kind, why_dim="fused experts [E, out, in], assumed", warn=guess)

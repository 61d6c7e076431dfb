"""Which stored tensors are parts of one weight: codes with their scales, zero points and order.

Names and shapes decide; `quantization_config` settles what they leave open (GPTQ's two conventions for zero points, the
blocks of an FP8 weight whose sides are no multiples of them), and names the formats that are known but not read.

    X_blocks, X_scales                                        gpt-oss's MXFP4: the weight X
    M.weight_packed u8, weight_scale[, weight_global_scale]   compressed-tensors' MXFP4, NVFP4
    M.weight_packed i32, weight_scale, weight_shape
                       [, weight_zero_point, weight_g_idx]    compressed-tensors' integers
    M.qweight, scales, qzeros[, g_idx]                        GPTQ (scales as wide as qweight), AWQ (8 times as wide)
    M.weight u8, weight_scale, weight_scale_2                 ModelOpt's NVFP4
    W f8 | i8, W_scale_inv | W_scale | M.scale                FP8, INT8 with scales: the weight W

A weight is named as its original would be (`….q_proj.weight` for `….q_proj.qweight`), so that two checkpoints compare.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mxrl.checkpoints import CheckpointError
from mxrl.checkpoints.encodings import Awq, Encoding, Float4, Gguf, Gptq, Packed, Plain, Scaled
from mxrl.checkpoints.tensors import Stored
from mxrl.kinds import FLOATS

_READ = ("gptq", "awq", "auto-round", "auto_round", "compressed-tensors", "fp8", "fbgemm_fp8", "mxfp4", "modelopt")
_UNREAD = {
    "bitsandbytes": "bitsandbytes",
    "hqq": "HQQ",
    "aqlm": "AQLM",
    "quanto": "optimum-quanto",
    "torchao": "torchao",
    "eetq": "EETQ",
    "higgs": "HIGGS",
    "vptq": "VPTQ",
    "spqr": "SpQR",
    "bitnet": "BitNet",
    "quark": "AMD Quark",
    "fp_quant": "FP-Quant",
    "sinq": "SINQ",
}
_ORIGINAL = "the float16, bfloat16 or float32 checkpoint it was made from, or one dequantized by its own library"
_INSTEAD = f"give {_ORIGINAL}"
_SCALE_TYPES = ("F32", "F16", "BF16")
_CODES8 = ("F8_E4M3", "F8_E5M2", "I8")


@dataclass
class Recognised:
    """`weights`: logical name -> encoding; `parts`: stored name -> what it is ("scales of 'x.weight'")."""

    weights: dict[str, Encoding] = field(default_factory=dict)
    parts: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def recognise(stored: Mapping[str, Stored], config: Mapping[str, Any], container: str) -> Recognised:
    """The encodings of a checkpoint's tensors. What is neither a part of a weight nor a float stays out of both maps.

    Raises CheckpointError, naming file and tensor, for codes without their scales, shapes that don't fit each other and
    formats that are known but not read.
    """
    out = Recognised()
    if container == "gguf":
        for name, tensor in stored.items():
            if tensor.dtype in FLOATS:
                out.weights[name] = Plain(tensor.shape, tensor, as_float32=True)
            elif tensor.dtype not in ("I8", "I16", "I32", "I64"):
                out.weights[name] = Gguf(tensor.shape, tensor)
        return out
    _check_method(stored, config, out)
    for ending, build in _BUILDERS:
        for name, tensor in stored.items():
            if name.endswith(ending) and name not in out.parts:
                build(tensor, name.removesuffix(ending), stored, config, out)
    for name, tensor in stored.items():
        if tensor.dtype in FLOATS and name not in out.parts:
            if name in out.weights:
                raise CheckpointError(f"{_at(tensor)} is there twice: as floats, and in packed form beside it")
            out.weights[name] = Plain(tensor.shape, tensor)
    return out


def _check_method(stored: Mapping[str, Stored], config: Mapping[str, Any], out: Recognised) -> None:
    method = str(config.get("quant_method", ""))
    for name in _formats(config):
        if name.startswith(("marlin", "sparse", "mxfp6")):
            raise CheckpointError(f"config.json: compressed-tensors format '{name}' is not read; {_INSTEAD}")
    if method == "awq":
        out.warnings.append(
            "AWQ moves scales from a weight's columns into the layer before it: against the original, weights whose "
            "norm or neighbour has changed differ by those scales too"
        )
    if config.get("transform_config"):
        out.warnings.append(
            "quantization_config has a transform_config: the weights are stored rotated, and compare with no original"
        )
    if not method or method in _READ:
        return
    if all(t.dtype in FLOATS for t in stored.values() if len(t.shape) > 1):
        out.warnings.append(
            f"config.json says quantization method '{method}', but the weights are floats: read as such"
        )
        return
    what = f"{_UNREAD[method]}'s format, which is not read" if method in _UNREAD else "which mxrl does not know"
    raise CheckpointError(
        f"config.json: quantization method '{method}' ({what}); {_INSTEAD}. Read are: {', '.join(_READ)}"
    )


# ---- one builder a naming scheme -------------------------------------------------------------------------------------


def _gpt_oss(
    codes: Stored, base: str, stored: Mapping[str, Stored], config: Mapping[str, Any], out: Recognised
) -> None:
    if codes.dtype != "U8" or len(codes.shape) < 3 or codes.shape[-1] != 16:
        return
    scale = _part(stored, f"{base}_scales", codes, f"{base}_blocks")
    _fit(codes, scale, codes.shape[:-1], ("U8", "F8_E8M0"))
    shape = (*codes.shape[:-2], codes.shape[-2] * 32)
    where = "gpt-oss blocks [E, out, in/32, 16]" if len(shape) == 3 else "MXFP4 blocks [out, in/32, 16]"
    _add(out, base, Float4(shape, codes, scale, 32, where))


def _weight_packed(
    codes: Stored, base: str, stored: Mapping[str, Stored], config: Mapping[str, Any], out: Recognised
) -> None:
    scale = _part(stored, f"{base}.weight_scale", codes, "weight_packed")
    if codes.dtype == "U8":
        _add(out, f"{base}.weight", _compressed_float4(codes, base, scale, stored))
        return
    shape = stored.get(f"{base}.weight_shape")
    if codes.dtype != "I32" or len(codes.shape) < 2:
        raise CheckpointError(f"{_at(codes)} is {codes.dtype} {list(codes.shape)}; packed codes are uint8 or int32")
    if shape is None:
        raise CheckpointError(f"{_at(codes)} has no '{base}.weight_shape' beside it, which says how wide the weight is")
    full = tuple(int(n) for n in shape.whole().tolist())
    bits = next((b for b in range(1, 9) if -(-full[-1] * b // 32) == codes.shape[-1]), 0) if full else 0
    if not bits or full[:-1] != codes.shape[:-1]:
        raise CheckpointError(f"{_at(codes)} {list(codes.shape)} does not fit its weight_shape {list(full)}")
    if 32 % bits:
        raise CheckpointError(f"{_at(codes)} has {bits}-bit codes, which straddle words and are not read; {_INSTEAD}")
    if scale.numel != 1:
        _divides(codes, scale, full[-1])
        _fit(codes, scale, (*full[:-1], scale.shape[-1] if scale.shape else 1), _SCALE_TYPES)
    zero, order = stored.get(f"{base}.weight_zero_point"), stored.get(f"{base}.weight_g_idx")
    if zero is not None:
        _fit(codes, zero, (-(-full[-2] * bits // 32), scale.shape[-1] if scale.shape else 1), ("I32",))
    if order is not None:
        _fit(codes, order, (full[-1],), ("I32", "I64"))
    _add(out, f"{base}.weight", Packed(full, codes, scale, zero, order, bits))
    out.parts[shape.name] = f"shape of '{base}.weight'"


def _compressed_float4(codes: Stored, base: str, scale: Stored, stored: Mapping[str, Stored]) -> Float4:
    size = 32 if scale.dtype in ("U8", "F8_E8M0") else 16
    _fit(codes, scale, (*codes.shape[:-1], codes.shape[-1] * 2 // size), ("U8", "F8_E8M0", "F8_E4M3"))
    shape, where = (*codes.shape[:-1], codes.shape[-1] * 2), "compressed-tensors' packed [out, in/2]"
    if size == 32:
        return Float4(shape, codes, scale, size, where)
    tensor_scale = _part(stored, f"{base}.weight_global_scale", codes, "weight_packed (NVFP4)")
    return Float4(shape, codes, scale, size, where, tensor_scale, name="NVFP4")


def _qweight(
    codes: Stored, base: str, stored: Mapping[str, Stored], config: Mapping[str, Any], out: Recognised
) -> None:
    scale = _part(stored, f"{base}.scales", codes, "qweight")
    zero, order = stored.get(f"{base}.qzeros"), stored.get(f"{base}.g_idx")
    if codes.dtype != "I32" or len(codes.shape) != 2 or len(scale.shape) != 2 or scale.dtype not in _SCALE_TYPES:
        raise CheckpointError(
            f"{_at(codes)} ({codes.dtype} {list(codes.shape)}, scales {scale.dtype} {list(scale.shape)}) has neither "
            f"GPTQ's nor AWQ's GEMM layout (int32 [in/8, out] or [in, out/8], scales [groups, out]); {_INSTEAD}"
        )
    outputs, method = scale.shape[1], str(config.get("quant_method", ""))
    label = "AutoRound" if method in ("auto-round", "auto_round") else ""
    if codes.shape[1] * 8 == outputs:
        _refuse_awq(codes, config)
        if codes.shape[0] % scale.shape[0]:
            raise CheckpointError(f"{_at(codes)}: {codes.shape[0]} inputs do not divide into {scale.shape[0]} groups")
        if zero is not None:
            _fit(codes, zero, (scale.shape[0], codes.shape[1]), ("I32",))
        encoding = Awq((outputs, codes.shape[0]), codes, scale, zero, label or "AWQ")
    elif codes.shape[1] == outputs:
        encoding = _gptq(codes, scale, zero, order, config, out, label or "GPTQ")
    else:
        raise CheckpointError(f"{_at(codes)} {list(codes.shape)} does not fit its scales {list(scale.shape)}")
    _add(out, f"{base}.weight", encoding)


def _gptq(
    codes: Stored,
    scale: Stored,
    zero: Stored | None,
    order: Stored | None,
    config: Mapping[str, Any],
    out: Recognised,
    label: str,
) -> Gptq:
    groups, outputs = scale.shape
    bits = zero.shape[1] * 32 // outputs if zero is not None else int(config.get("bits", 0))
    if bits not in (2, 4, 8):
        raise CheckpointError(
            f"{_at(codes)} has {bits or 'unknown'}-bit GPTQ codes; 2, 4 and 8 bits are read; {_INSTEAD}"
        )
    inputs = codes.shape[0] * 32 // bits
    if zero is not None:
        _fit(codes, zero, (groups, -(-outputs * bits // 32)), ("I32",))
    if order is not None:
        _fit(codes, order, (inputs,), ("I32", "I64"))
    elif inputs % groups:
        raise CheckpointError(
            f"{_at(codes)}: {inputs} inputs do not divide into {groups} groups, and there is no g_idx"
        )
    if not config and not any("zero point" in w for w in out.warnings):
        out.warnings.append(
            "no config.json beside the GPTQ tensors: zero points are taken as version 1 has them (stored less one)"
        )
    shuffled = bool(config.get("desc_act"))
    return Gptq((outputs, inputs), codes, scale, zero, order, bits, _stored_less_one(config), shuffled, label)


def _stored_less_one(config: Mapping[str, Any]) -> bool:
    """Whether zero points are stored less one: GPTQ's version 1, which is what a configuration that says nothing means.

    AutoRound has both: its own packing stores them as they are, the one that it names after AutoGPTQ does not.
    """
    if config.get("quant_method") in ("auto-round", "auto_round"):
        packing = str(config.get("packing_format", "auto_round:auto_gptq"))
        return "gptq" in packing and "gptqmodel" not in packing
    version = config.get("checkpoint_format") or config.get("format")
    if version not in (None, "gptq", "gptq_v2"):
        raise CheckpointError(
            f"config.json: GPTQ checkpoint_format '{version}' is not read (gptq and gptq_v2 are); {_INSTEAD}"
        )
    return version != "gptq_v2"


def _scaled(codes: Stored, base: str, stored: Mapping[str, Stored], config: Mapping[str, Any], out: Recognised) -> None:
    """`base` is the whole name here: any 8-bit tensor of two axes or more that has scales, or should have."""
    name, stem = codes.name, codes.name.removesuffix("weight")
    tensor_scale = stored.get(f"{stem}weight_scale_2") if name.endswith(".weight") else None
    if codes.dtype == "U8" and tensor_scale is not None and len(codes.shape) == 2:
        scale = _part(stored, f"{stem}weight_scale", codes, "weight (ModelOpt NVFP4)")
        _fit(codes, scale, (codes.shape[0], codes.shape[1] // 8), ("F8_E4M3",))
        shape, where = (codes.shape[0], codes.shape[1] * 2), "ModelOpt's packed [out, in/2]"
        _add(out, name, Float4(shape, codes, scale, 16, where, tensor_scale, multiplies=True, name="NVFP4"))
        return
    if codes.dtype not in _CODES8 or len(codes.shape) < 2:
        return
    ends = (f"{name}_scale_inv", f"{name}_scale", *((f"{stem}scale",) if name.endswith(".weight") else ()))
    scale = next((stored[end] for end in ends if end in stored), None)
    if scale is None:
        return  # `kinds` says whether a linear weight is meant, and then that its scales are missing
    if codes.dtype == "I8" and scale.dtype in ("F8_E8M0", "U8"):
        _fit(codes, scale, (*codes.shape[:-1], codes.shape[-1] // 16), ("F8_E8M0", "U8"))
        shape = (*codes.shape[:-1], codes.shape[-1] * 2)
        _add(out, name, Float4(shape, codes, scale, 32, "packed [out, in/2]"))
        return
    block = _block(codes, scale, config)
    zero = stored.get(f"{name}_zero_point")
    if zero is not None:
        _fit(codes, zero, scale.shape, (*_CODES8, "I32", "I64", *_SCALE_TYPES))  # the library has written all of these
    _add(out, name, Scaled(codes.shape, codes, scale, block, zero))


def _block(codes: Stored, scale: Stored, config: Mapping[str, Any]) -> tuple[int, int]:
    """How many rows and columns of the weight a scale serves."""
    *lead, rows, width = codes.shape
    if scale.dtype not in (*_SCALE_TYPES, "F8_E8M0", "U8"):
        raise CheckpointError(f"{_at(scale)} is {scale.dtype}; the scales of '{codes.name}' should be floats or E8M0")
    grid = scale.shape
    experts = math.prod(lead)
    if scale.numel == experts:
        return rows, width
    if grid in ((*lead, rows, 1), (*lead, rows)):
        return 1, width
    if len(grid) != len(codes.shape) or list(grid[:-2]) != lead:
        raise CheckpointError(f"{_at(scale)} {list(grid)} does not fit '{codes.name}' {list(codes.shape)}")
    block = []
    for axis, side in ((-2, rows), (-1, width)):
        even = side // grid[axis] if grid[axis] and side % grid[axis] == 0 else None
        # 300 columns under 3 scales: DeepSeek's 128 + 128 + 44 rather than 3 · 100
        fitting = [n for n in (_said_block(config, axis), 128, even) if n and -(-side // n) == grid[axis]]
        if not fitting:
            raise CheckpointError(f"{_at(scale)} {list(grid)} does not fit '{codes.name}' {list(codes.shape)}")
        block.append(fitting[0])
    return block[0], block[1]


def _said_block(config: Mapping[str, Any], axis: int) -> int | None:
    """The block's side that the configuration names (transformers, DeepSeek: weight_block_size; compressed-tensors)."""
    block = config.get("weight_block_size")
    if block is None:
        groups = config.get("config_groups") or {}
        found = [(g.get("weights") or {}).get("block_structure") for g in groups.values() if isinstance(g, Mapping)]
        block = next((b for b in found if b), None)
    return int(block[axis]) if isinstance(block, (list, tuple)) and len(block) == 2 else None


_Builder = Callable[[Stored, str, Mapping[str, Stored], Mapping[str, Any], Recognised], None]
_BUILDERS: tuple[tuple[str, _Builder], ...] = (
    ("_blocks", _gpt_oss),
    (".weight_packed", _weight_packed),
    (".qweight", _qweight),
    ("", _scaled),
)


# ---- what they share -------------------------------------------------------------------------------------------------


def _add(out: Recognised, name: str, encoding: Encoding) -> None:
    out.weights[name] = encoding
    words = {
        "codes": "codes",
        "scale": "scales",
        "zero": "zero points",
        "order": "group order",
        "tensor_scale": "scale",
    }
    for attribute, word in words.items():
        part = getattr(encoding, attribute, None)
        if isinstance(part, Stored) and part.name != name:
            out.parts[part.name] = f"{word} of '{name}'"


def _at(tensor: Stored) -> str:
    return f"{tensor.file.name}: tensor '{tensor.name}'"


def _part(stored: Mapping[str, Stored], name: str, codes: Stored, what: str) -> Stored:
    if name not in stored:
        raise CheckpointError(
            f"{_at(codes)} ({what}) is already quantized, and its scales are missing: there is no '{name}'; "
            f"give the whole checkpoint, or {_ORIGINAL}"
        )
    return stored[name]


def _fit(codes: Stored, part: Stored, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> None:
    if part.shape != tuple(shape) or part.dtype not in dtypes:
        raise CheckpointError(
            f"{_at(part)} is {part.dtype} {list(part.shape)}; beside '{codes.name}' {list(codes.shape)} it should be "
            f"{' or '.join(dtypes)} {list(shape)}"
        )


def _divides(codes: Stored, scale: Stored, width: int) -> None:
    if not scale.shape or not scale.shape[-1] or width % scale.shape[-1]:
        raise CheckpointError(f"{_at(scale)} {list(scale.shape)} does not fit '{codes.name}': {width} columns")


def _formats(config: Mapping[str, Any]) -> list[str]:
    """The formats that a compressed-tensors configuration names: of the model, of its groups, of its sparsity."""
    groups = [g for g in (config.get("config_groups") or {}).values() if isinstance(g, Mapping)]
    found = [config, *groups, config.get("sparsity_config") or {}]
    return sorted({str(each.get("format") or "") for each in found})


def _refuse_awq(codes: Stored, config: Mapping[str, Any]) -> None:
    version = str(config.get("version", "gemm")).lower()
    if version not in ("gemm", "exllama", "ipex") and config.get("quant_method") == "awq":
        raise CheckpointError(f"config.json: AWQ version '{version}' is not read (gemm is); {_INSTEAD}")

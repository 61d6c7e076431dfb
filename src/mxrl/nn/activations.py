"""Quantized activations: once per tensor for the layers that share an input, and packed until the backward pass.

    q, k, v = q_proj(h), k_proj(h), v_proj(h)      three layers, one tensor: Q(h) is computed once, and saved once
    gate, up = gate_proj(h), up_proj(h)

The layers don't know of each other. So the last quantized activation of each thread is remembered: the next layer uses
it if it is given the very same tensor object, unchanged (`_version`), for the same operands, dtype and CUDA stream.
The memory holds Q(h) only while h lives, and at most until the next tensor is quantized. It is off

* while compiling or tracing. torch.compile merges identical operators itself in graphs that have a backward pass (its
  min-cut partitioner, inductor's default); a compiled forward pass under `torch.no_grad` repeats them;
* for tensors made under `torch.inference_mode`, which count no versions (`torch.no_grad` keeps them);
* while a CUDA graph is captured, unless `share_activations` says where the capture's own tensors begin.

What escapes `_version` escapes the memory: a kernel of one's own, or `x.data`, that overwrites a tensor in place
between two layers. Call `torch.autograd.graph.increment_version(x)` after such a write.

Packed (`Recipe.pack_saved`): codes and scales, 4.25 bits an element for plain MXFP4 instead of 16. `dequantize` gives
the same bits that the forward pass used, so gradients are the same, bit for bit.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from mxrl.nn.injected import Injected
from mxrl.nn.operands import Operands, quantize_operand, records_values
from mxrl.quantize import QuantizedTensor, quantize
from mxrl.recipes import Recipe


class Activation(NamedTuple):
    """An activation as a GEMM's operand: its value, and what to keep of it for backward (None: the value)."""

    value: Tensor  # Q(cast(x)), in the compute dtype, x's shape
    packed: list[Tensor] | None = None


def quantize_activation(x: Tensor, operands: Operands, dtype: torch.dtype) -> Activation:
    """Q(cast(x)) without gradient, blocked along the last axis; `x` itself where there is nothing to do."""
    if operands.activation is None and x.dtype == dtype:
        return Activation(x)
    if torch.compiler.is_compiling() or x.is_inference():
        return _quantize(x, operands, dtype)
    slot = _threads.slot
    inside = slot.captures and x.is_cuda and not torch._C._len_torch_dispatch_stack()  # of share_activations
    if not (inside or records_values(x)):
        return _quantize(x, operands, dtype)
    version, stream = x._version, torch._C._cuda_getCurrentRawStream(x.device.index) if x.is_cuda else 0
    entry = slot.entry
    if (
        entry is not None
        and entry.x() is x
        and entry.version == version
        and entry.operands is operands
        and entry.dtype is dtype
        and entry.stream == stream
        and (entry.activation.packed is not None or not packs(operands))
    ):
        return entry.activation
    slot.entry = None  # before computing: two of them need not be there at once
    activation = _quantize(x, operands, dtype)
    slot.entry = _Entry(weakref.ref(x, slot.forget), version, operands, dtype, stream, activation)
    return activation


def packs(operands: Operands) -> bool:
    """Whether a quantized activation is to be packed for a backward pass that may come."""
    return operands.recipe.pack_saved and torch.is_grad_enabled()


def _quantize(x: Tensor, operands: Operands, dtype: torch.dtype) -> Activation:
    recipe = operands.activation
    if x.dtype != dtype:
        x = x.detach().to(dtype)
    if recipe is None or isinstance(recipe, Injected) or not packs(operands):
        return Activation(quantize_operand(x, recipe))
    packed = pack(x.detach(), recipe)
    return Activation(unpack(packed, recipe, x.shape, dtype), packed)


# --- the memory ------------------------------------------------------------------------------------------------------


class _Entry(NamedTuple):
    x: weakref.ref[Tensor]
    version: int
    operands: Operands
    dtype: torch.dtype
    stream: int
    activation: Activation


class _Slot:
    """One thread's last quantized activation. An autograd worker, which recomputes checkpoints, has its own."""

    def __init__(self) -> None:
        self.entry: _Entry | None = None
        self.captures = False  # inside share_activations, entered during the capture that still goes on

    def forget(self, x: weakref.ref[Tensor]) -> None:
        """The tensor died; its quantized copy is of no use to anyone else."""
        if self.entry is not None and self.entry.x is x:
            self.entry = None


class _Threads(threading.local):
    def __init__(self) -> None:
        self.slot = _Slot()


_threads = _Threads()


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def forget_activations() -> None:
    """Let go of this thread's last quantized activation."""
    _threads.slot.entry = None


@contextmanager
def share_activations() -> Iterator[None]:
    """Around a forward pass inside one CUDA graph capture: share quantized activations there too.

    Enter it after the capture began and leave it before the capture ends. Nothing from outside is used inside, nor the
    other way round. Elsewhere it changes nothing: sharing is on anyway.
    """
    slot = _threads.slot
    before = slot.captures
    slot.entry, slot.captures = None, _capturing()
    try:
        yield
    finally:
        slot.entry, slot.captures = None, before


# --- packed ----------------------------------------------------------------------------------------------------------


def pack(x: Tensor, recipe: Recipe) -> list[Tensor]:
    """The stored parts of `mxrl.quantize(x, recipe)`, in a fixed order (see `_fields`)."""
    return _pack_operator(x, str(recipe)) if torch.compiler.is_compiling() else _pack(x, recipe)


def unpack(parts: list[Tensor], recipe: Recipe, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """`pack`'s values again, in the dtype that was packed: equal to `fake_quantize` bit for bit."""
    if torch.compiler.is_compiling():
        return _unpack_operator(parts, str(recipe), list(shape), dtype)
    return _unpack(parts, recipe, shape, dtype)


def _fields(recipe: Recipe) -> tuple[str, ...]:
    if recipe.base == "nvfp4":
        return ("codes", "scales", "tensor_scale")
    return ("codes", "scales", "macro_mantissas") if recipe.mbs is not None else ("codes", "scales")


def _pack(x: Tensor, recipe: Recipe) -> list[Tensor]:
    packed: QuantizedTensor | None = quantize(x, recipe)
    parts: list[Tensor] = []
    while packed is not None:
        parts += [getattr(packed, name) for name in _fields(recipe)]
        packed = packed.residual
    return parts


def _unpack(parts: list[Tensor], recipe: Recipe, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    names = _fields(recipe)
    packed: QuantizedTensor | None = None
    for begin in reversed(range(0, len(parts), len(names))):
        own: dict[str, Tensor | None] = {"macro_mantissas": None, "tensor_scale": None}
        own.update(zip(names, parts[begin : begin + len(names)], strict=True))
        packed = QuantizedTensor(
            **own,  # type: ignore[arg-type]
            residual=packed,
            shape=torch.Size(shape),
            dtype=dtype,
            dim=len(shape) - 1,
            recipe=recipe,
        )
    assert packed is not None
    return packed.dequantize()


@torch.library.custom_op("mxrl::pack", mutates_args=())
def _pack_operator(x: Tensor, recipe: str) -> list[Tensor]:
    return _pack(x, Recipe.parse(recipe))


@_pack_operator.register_fake
def _(x: Tensor, recipe: str) -> list[Tensor]:
    parsed = Recipe.parse(recipe)
    assert parsed.format is not None
    lead, k_axis = x.shape[:-1], x.shape[-1]
    sizes = {
        "codes": -(-k_axis // 2) if parsed.format.element.bits == 4 else k_axis,
        "scales": -(-k_axis // parsed.format.block),
        "macro_mantissas": -(-k_axis // parsed.macro),
    }
    parts = []
    for name in _fields(parsed):
        if name == "tensor_scale":
            parts.append(x.new_empty((), dtype=torch.float64 if x.dtype == torch.float64 else torch.float32))
        else:
            wide = name == "scales" and parsed.rule.startswith("e8m")
            parts.append(x.new_empty((*lead, sizes[name]), dtype=torch.int32 if wide else torch.uint8))
    return parts + ([torch.empty_like(p) for p in parts] if parsed.of else [])


@torch.library.custom_op("mxrl::unpack", mutates_args=())
def _unpack_operator(parts: list[Tensor], recipe: str, shape: list[int], dtype: torch.dtype) -> Tensor:
    return _unpack(parts, Recipe.parse(recipe), torch.Size(shape), dtype)


@_unpack_operator.register_fake
def _(parts: list[Tensor], recipe: str, shape: list[int], dtype: torch.dtype) -> Tensor:
    return parts[0].new_empty(shape, dtype=dtype)

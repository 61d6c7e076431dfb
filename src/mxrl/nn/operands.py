"""Which quantizer each operand of a layer's GEMMs gets, and the weight that a rollout holds or a step shares.

    forward      y_TO  = Q(x_TK) · Q(w_OK)ᵀ        blocked along K (activations' and weight's quantizer)
    grad_input   dx_TK = dy_TO · Q(w_OK)           not 4-bit unless `quantize_grad`: then both are blocked along O
    grad_weight  dw_OK = dy_TOᵀ · Q(x_TK)          not 4-bit unless `quantize_grad`: then both are blocked along T

T tokens, K input features (the forward contraction), O output features.

A quantizer is a recipe's, or an `Injected` one that lets only some components of a recipe's error through (probes).
With `forward=False` the forward pass takes x and w as they are, and only the backward GEMMs take Q(x) and Q(w).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mxrl.nn.injected import Injected
from mxrl.quantize import fake_quantize
from mxrl.recipes import Recipe

Quantizer = Recipe | Injected


class RolloutError(RuntimeError):
    """Weights held for a rollout can't be used: they changed, have another dtype, or are held already."""


@dataclass(frozen=True)
class Operands:
    """A recipe, taken apart: the quantizer of each operand; None leaves that operand as it is."""

    recipe: Recipe
    weight: Quantizer | None
    activation: Quantizer | None
    grad: Recipe | None  # the base format alone: MBS and OF are never applied to dY
    forward: bool = True  # False: quantized operands in the backward pass only

    @classmethod
    @functools.lru_cache(maxsize=64)
    def of(cls, recipe: Recipe) -> Operands:
        if not recipe.quantizes:
            return cls(recipe, None, None, None)
        activation = {"a4": recipe.operand, "a8": Recipe("mxfp8"), "a16": None}[recipe.activations]
        return cls(recipe, recipe.operand, activation, recipe.plain if recipe.quantize_grad else None)

    @property
    def tensor_scaled(self) -> bool:
        """NVFP4 has one float32 scale a tensor, so fused weights are quantized one matrix at a time."""
        return self.weight is not None and self.weight.base == "nvfp4"

    @property
    def saves_master(self) -> bool:
        """Whether the backward pass needs the unquantized x and w (to use them, or to block them along other axes)."""
        return self.recipe.backward == "master" or self.grad is not None

    @property
    def requantizes(self) -> bool:
        """Whether the backward pass quantizes x and w again, along its own contraction axes."""
        return self.grad is not None and self.recipe.backward == "quantized"


def quantize_operand(x: Tensor, quantizer: Quantizer | None, dim: int = -1) -> Tensor:
    """`fake_quantize(x, recipe, dim=dim)`, same shape and dtype, without gradient; `x` itself without a quantizer."""
    if quantizer is None:
        return x
    return quantizer(x, dim) if isinstance(quantizer, Injected) else fake_quantize(x, quantizer, dim=dim)


def compute_dtype(x: Tensor) -> torch.dtype:
    """The GEMM's dtype: autocast's where it is on (it leaves float64 alone, and knows no meta device), else x's."""
    device = x.device.type
    autocast = device != "meta" and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if autocast and x.dtype != torch.float64 else x.dtype


def records_values(x: Tensor) -> bool:
    """Whether what is computed from `x` now may be kept and used by a later call: only in plain eager execution.

    Not while tracing (compilation, FakeTensorMode: there are no values), nor while a CUDA graph is captured: its
    tensors get their values at each replay, and a graph that used a value from outside would replay with stale memory.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())


@dataclass(frozen=True)
class HeldWeight:
    """A quantized weight computed once for a rollout, and the state of the parameter that it was computed from."""

    name: str
    value: Tensor
    parameter: nn.Parameter
    version: int

    def check(self) -> None:
        """Raise RolloutError if the parameter was written to since.

        Every in-place operation counts up `_version`, an optimizer's step too; a write through `.data` escapes it.
        """
        if self.parameter._version != self.version:
            raise RolloutError(
                f"{self.name}: the weight changed inside rollout_weights; update weights only after the block has ended"
            )

    def get(self, dtype: torch.dtype) -> Tensor:
        if not torch.compiler.is_compiling():  # a compiled graph can't read version counters; the block's end does
            self.check()
        if self.value.dtype != dtype:
            raise RolloutError(
                f"{self.name}: rollout_weights holds {self.value.dtype}, the forward pass computes in {dtype}; "
                f"write rollout_weights(model, dtype={dtype})"
            )
        return self.value


class SharedWeight:
    """Q(cast(w)) of one stored parameter: computed on first use inside `shared_weights`, kept until w changes.

    A value is used again only for the very parameter that was there when the block began, at the same `_version` and
    address, for the same operands and dtype. Under FSDP2 the forward pass sees another object, the gathered parameter,
    whose version FSDP2 hides; the version of the shard (a DTensor), which the optimizer writes to, stands for it.
    """

    def __init__(self, parameter: nn.Parameter) -> None:
        self.source = parameter
        self.sharded = isinstance(parameter, DTensor)
        self.value: Tensor | None = None
        self.key: tuple[object, ...] = ()
        self.computed = 0  # how often Q(w) was computed, and how often it was there already
        self.reused = 0

    def drop(self) -> None:
        self.value, self.key = None, ()

    def get(self, weight: Tensor, dtype: torch.dtype, operands: Operands, quantize: Callable[[], Tensor]) -> Tensor:
        """The shared value, or `quantize()`; `weight` is what the layer sees as its parameter now."""
        known = weight is self.source or (self.sharded and not isinstance(weight, DTensor))
        if not known or not records_values(weight):
            return quantize()
        address = None if self.sharded else weight.data_ptr()  # `parameter.data = ...` leaves the version as it was
        key = (self.source._version, address, dtype, operands)
        if self.value is not None and key == self.key:
            self.reused += 1
            return self.value
        self.drop()  # before computing: two of them need not be there at once
        with torch.inference_mode(False), torch.no_grad():  # an inference tensor can't be saved for backward
            value = quantize()
        self.computed += 1
        self.value, self.key = value, key
        return value

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()  # copied and pickled as None: a copy of a model is outside the block

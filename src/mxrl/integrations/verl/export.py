"""Rollout weights out of verl's stream: what an engine sends to a rollout, quantized on the way.

verl's engines yield (Hugging Face name, whole master weight), whatever shards them; fused experts come unfused
(`experts.3.gate_proj.weight`), or fused where an engine leaves them so (gpt-oss). `Export` goes through that stream:

    a converted layer's weight   Q(cast(w + n)) in the dtype of the training pass, by nn/weights.py, the code of
                                 `rollout_weights`: the same bits
    a norm that carries noise    cast(w + n)
    everything else              as it came

A matrix is quantized as a whole, and n is a function of (seed, rollout, name, index): the bits depend neither on the
sharding nor on the buckets, order or rank. The result is the tensor that training multiplies with, so the rollout must
not quantize it again; rounding it to the rollout's dtype, where that is another, is all that may follow.
A stream that ends before every converted weight has passed is an error: the rollout would keep an unquantized one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mxrl.nn.convert import convert
from mxrl.nn.layers import QuantizedLayer, canonical_name, quantized_layers
from mxrl.nn.operands import Operands, quantize_operand
from mxrl.nn.weights import Noise, RolloutReport, block_norms, noised_norm, on_norms, quantized_weight
from mxrl.recipes import Recipe


class ExportError(RuntimeError):
    """Training and rollout would compute with differently quantized weights; one line that names them."""


@dataclass(frozen=True)
class Matrix:
    """One matrix of a converted layer, in the interface that a QuantizedLayer has towards nn/weights.py."""

    name: str  # canonical, without the last part
    operands: Operands
    dim: int

    def parameter(self, attribute: str) -> Tensor:
        return torch.empty(0)  # its version is checked by nobody: what is exported is held by another process

    def shared(self, attribute: str) -> None:
        return None

    def quantize(self, attribute: str, weight: Tensor) -> Tensor:
        return quantize_operand(weight, self.operands.weight, self.dim)

    def matrices(self, attribute: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
        return iter([(attribute, weight)])


class _Fused(QuantizedLayer):
    """A layer of fused experts whose parameter is elsewhere: FSDP1 has taken it out of the module."""

    parameter, shared = Matrix.parameter, Matrix.shared  # type: ignore[assignment]


@dataclass(frozen=True)
class _Entry:
    layer: Any  # a Matrix, or a _Fused layer
    attribute: str
    matrices: frozenset[str]  # canonical names of the matrices in it


class ExportPlan:
    """Which names of a stream are quantized, and how; from a converted model that is not sharded yet."""

    def __init__(self, model: nn.Module):
        self.entries: dict[str, _Entry] = {}
        self.norms: frozenset[str] = frozenset()  # those that AQN's noise goes on, where the recipe says so
        for layer in quantized_layers(model):
            for attribute in layer.weights:
                self._add(layer, attribute)
            recipe = layer.operands.recipe
            if recipe.aqn is not None and recipe.aqn_target == "norm" and not self.norms:
                self.norms = frozenset(name for name, _ in block_norms(model))
        self.matrices = frozenset(name for entry in self.entries.values() for name in entry.matrices)

    def _add(self, layer: QuantizedLayer, attribute: str) -> None:
        shape = layer.parameter(attribute).shape
        inside = [f"{layer.name}.{name}" for name, _ in layer.matrices(attribute, torch.empty(shape, device="meta"))]
        if not layer.is_linear:
            fused = _Fused(layer.name, layer.module, layer.operands)
            self.entries[f"{layer.name}.{attribute}"] = _Entry(fused, attribute, frozenset(inside))
        for name in inside:
            owner, _, last = name.rpartition(".")
            matrix = Matrix(owner, layer.operands, layer.dim)
            self.entries[name] = _Entry(matrix, last, frozenset([name]))


def plan_of(model: nn.Module, recipe: Recipe, skip: Iterable[str]) -> ExportPlan:
    """What training quantizes in a model of this architecture, not yet converted; converts it ("meta" will do)."""
    convert(model, recipe, skip=skip)
    return ExportPlan(model)


class Export(Iterator[tuple[str, Tensor]]):
    """The stream with quantized weights; an iterator, as verl's checkpoint engines expect it.

    matrices: names of all that is quantized in it, for the rollout to compare with its own.
    report: fills as the stream passes (σ, effective σ).
    """

    def __init__(
        self,
        weights: Iterable[tuple[str, Tensor]],
        plan: ExportPlan,
        noise: Noise | None,
        dtype: torch.dtype | None,
    ):
        self.matrices = plan.matrices
        self.report = RolloutReport.of(noise)
        self._stream = self._quantize(weights, plan, noise, dtype)

    def __next__(self) -> tuple[str, Tensor]:
        return next(self._stream)

    def _quantize(
        self,
        weights: Iterable[tuple[str, Tensor]],
        plan: ExportPlan,
        noise: Noise | None,
        dtype: torch.dtype | None,
    ) -> Iterator[tuple[str, Tensor]]:
        missing = set(plan.matrices)
        for name, tensor in weights:
            canonical = canonical_name(name)
            entry = plan.entries.get(canonical)
            with torch.no_grad():
                if entry is not None:
                    on_weight = None if on_norms(noise) else noise
                    held = quantized_weight(
                        entry.layer, entry.attribute, tensor.detach(), on_weight, dtype, self.report
                    )
                    tensor = held.value
                    missing -= entry.matrices
                elif noise is not None and canonical in plan.norms:
                    tensor = noised_norm(canonical, tensor.detach(), noise, self.report)
            yield name, tensor
        if missing:
            raise ExportError(
                f"{len(missing)} weights are quantized in training, but the engine did not send them to the rollout, "
                f"{min(missing)} for one; so rollout and training would differ"
            )


def check_same(training: Iterable[str], rollout: Iterable[str], where: str) -> None:
    """Raise ExportError where the two sets of quantized matrices differ; `where` says who reported the second."""
    ours, theirs = set(training), set(rollout)
    for only, who in ((ours - theirs, "training"), (theirs - ours, where)):
        if only:
            raise ExportError(
                f"{len(only)} weights are quantized in {who} only, {min(only)} for one; training has {len(ours)}, "
                f"{where} {len(theirs)}: use one recipe, one list of skip patterns and one model for both"
            )

"""The model of a rollout whose weights come from a trainer already quantized: it quantizes activations only.

It is converted by the run's own recipe, so that its layers are the ones that train, and then loses the quantizers of
its weights: what `Export` sends is the very tensor that training multiplies with, and a second rounding would move it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import mxrl
from mxrl.integrations.verl.config import VerlConfig
from mxrl.integrations.verl.export import ExportError, ExportPlan, check_same
from mxrl.nn import quantized_layers


class Policy:
    """model: a fresh causal language model, converted here; its own weights are overwritten."""

    def __init__(self, model: nn.Module, config: VerlConfig):
        self.model: Any = model.eval()
        mxrl.convert(model, config.parsed, skip=config.skip)
        self.matrices = ExportPlan(model).matrices
        self._places: dict[str, tuple[Tensor, frozenset[str]]] = {}  # name -> where it goes, what it fills
        tied: dict[int, str] = {}
        for name, tensor in model.state_dict().items():
            self._places[name] = tensor, frozenset([tied.setdefault(tensor.data_ptr(), name)])
        for layer in quantized_layers(model):
            for attribute in () if layer.is_linear else layer.weights:
                fused = layer.parameter(attribute).data
                inside = {f"{layer.name}.{name}": view for name, view in layer.matrices(attribute, fused)}
                self._places[f"{layer.name}.{attribute}"] = fused, frozenset(inside)
                self._places.update((name, (view, frozenset([name]))) for name, view in inside.items())
            activation = None if config.rollout_activations == "a16" else layer.operands.activation
            layer.use(replace(layer.operands, weight=None, activation=activation))
        self._missing = {part for _, parts in self._places.values() for part in parts}

    @torch.no_grad()
    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy named weights into place, rounded to this model's dtype where it differs."""
        for name, tensor in weights:
            place, parts = self._places.get(name, (None, frozenset()))
            if place is None or place.shape != tensor.shape:
                here = "no such weight" if place is None else f"shape {list(place.shape)}"
                raise ExportError(f"the trainer sent {name} of shape {list(tensor.shape)}; the rollout has {here}")
            place.copy_(tensor)
            self._missing -= parts

    def complete(self, matrices: Iterable[str]) -> None:
        """Raise ExportError unless every weight has come, and training quantizes the same ones (`matrices`)."""
        check_same(matrices, self.matrices, "rollout")
        if self._missing:
            raise ExportError(f"{len(self._missing)} weights never came from the trainer, {min(self._missing)} for one")

    def digest(self) -> dict[str, str]:
        """Hash of each weight's bytes by name, to compare with what a trainer holds."""
        return {name: digest(place) for name, (place, _) in self._places.items()}


def digest(tensor: Tensor) -> str:
    """64 bits of a tensor's bytes."""
    raw = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(raw, digest_size=8).hexdigest()

"""The converted layers of a model behind one small interface, and the canonical names of what they store."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mxrl.nn import experts
from mxrl.nn.linear import QuantizedLinear
from mxrl.nn.operands import HeldWeight, Operands, SharedWeight, quantize_operand


def full_tensor(parameter: Tensor) -> Tensor:
    """A parameter's whole value, detached; under FSDP2 (a DTensor) gathered from all ranks."""
    value = parameter.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value


# Modules that wrap another one and add a step to its path: torch.compile, checkpointing, PEFT.
_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "base_layer"}


def canonical_name(path: str) -> str:
    """A module's path as Hugging Face has it: without the steps that DDP, torch.compile, checkpointing or PEFT add."""
    parts = [p for p in path.split(".") if p not in _WRAPPERS]
    if parts and parts[0] == "module":  # DistributedDataParallel
        parts = parts[1:]
    if parts[:2] == ["base_model", "model"]:  # PeftModel
        parts = parts[2:]
    return ".".join(parts)


@dataclass(frozen=True)
class QuantizedLayer:
    """A converted layer: a QuantizedLinear, or a module of fused experts."""

    name: str  # canonical
    module: Any  # an nn.Module
    operands: Operands

    @property
    def is_linear(self) -> bool:
        return isinstance(self.module, QuantizedLinear)

    @property
    def weights(self) -> tuple[str, ...]:
        """Names of the stored parameters that are quantized."""
        return ("weight",) if self.is_linear else experts.weight_names(self.module)

    def parameter(self, attribute: str) -> nn.Parameter:
        return getattr(self.module, attribute)

    @property
    def dim(self) -> int:
        """The contraction axis of the stored parameters and of their matrices."""
        return -1 if self.is_linear else experts.contraction_dim(self.module)

    def quantize(self, attribute: str, weight: Tensor) -> Tensor:
        """Q of the stored parameter `attribute`, given its value in the compute dtype."""
        if self.is_linear:
            return quantize_operand(weight, self.operands.weight)
        return experts.quantize_weight(self.module, attribute, weight, self.operands)

    def matrices(self, attribute: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
        """(canonical name below the module, view) of every matrix in the stored parameter: see experts.matrices."""
        return iter([(attribute, weight)]) if self.is_linear else experts.matrices(self.module, attribute, weight)

    def use(self, operands: Operands) -> None:
        """Compute with these quantizers from now on, whatever `convert` said."""
        if self.is_linear:
            self.module.operands = operands
        else:
            self.module.mxrl_state.operands = operands

    # --- the weights that a rollout holds ---

    @property
    def holds(self) -> bool:
        return bool(self.module.held if self.is_linear else self.module.mxrl_state.held)

    def hold(self, attribute: str, weight: HeldWeight) -> None:
        if self.is_linear:
            self.module.held = weight
        else:
            self.module.mxrl_state.held[attribute] = weight

    def drop(self) -> None:
        if self.is_linear:
            self.module.held = None
        else:
            self.module.mxrl_state.held.clear()

    # --- the weights that the micro-batches of a step share ---

    def shared(self, attribute: str) -> SharedWeight | None:
        return self.module.shared if self.is_linear else self.module.mxrl_state.shared.get(attribute)

    def share(self, attribute: str, weight: SharedWeight | None) -> None:
        """Let the forward pass keep Q of `attribute` in `weight`; None: compute it every time."""
        if self.is_linear:
            self.module.shared = weight
        elif weight is None:
            self.module.mxrl_state.shared.pop(attribute, None)
        else:
            self.module.mxrl_state.shared[attribute] = weight


def quantized_layers(model: nn.Module) -> Iterator[QuantizedLayer]:
    """The converted layers of a model (those that a recipe's `skip` left out are not among them), in module order."""
    for path, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            operands = module.operands
        else:
            operands = getattr(getattr(module, "mxrl_state", None), "operands", None)
        if operands is not None:
            yield QuantizedLayer(canonical_name(path), module, operands)


def master_matrices(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(canonical name, master weight) of every quantized matrix, experts unfused, as detached views.

    Under FSDP2 the whole weights, one parameter gathered at a time.
    """
    for layer in quantized_layers(model):
        for attribute in layer.weights:
            parameter = layer.parameter(attribute)
            for name, matrix in layer.matrices(attribute, full_tensor(parameter)):
                yield f"{layer.name}.{name}", matrix

"""Quantized weights that are computed once: for the micro-batches of a step, and for a rollout (with AQN's noise).

`shared_weights`: inside, each Q(w) is computed on first use and again after an optimizer step. `rollout_weights`:
a rollout decodes thousands of tokens with the same weights, so each converted layer's Q(w) is computed on entry and the
layer holds it; only activations are quantized while decoding. The master weights stay untouched:

    noise before quantization (default)   Q(cast(w + n))          rounding amplifies small noise
    noise after quantization              cast(Q(cast(w)) + n)    rounded once, not quantized again
    noise on the RMSNorm weights          QeRL's placement (arXiv 2510.11696); the layers hold plain Q(w)

n = σ_t · RMS(w) · z, added in float32 to the master weight. z is a function of (seed, rollout, name, flat index) alone
(`mxrl.corrections.philox_normal`), and RMS is of each matrix in float64: per expert, gate and up apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from mxrl.corrections import aqn_sigma, noise_key, philox_normal
from mxrl.nn.layers import QuantizedLayer, canonical_name, full_tensor, quantized_layers
from mxrl.nn.operands import HeldWeight, RolloutError, SharedWeight, compute_dtype
from mxrl.nn.shard import whole
from mxrl.quantize import fake_quantize_noisy
from mxrl.recipes import Recipe, RecipeError

Noise = Callable[[str, Tensor], Tensor]  # (canonical name, master weight [...]) -> noise, float32 [...]


@dataclass(frozen=True)
class AqnNoise:
    """The noise of one rollout, as a function of a parameter's canonical name and its master weight."""

    recipe: Recipe
    seed: int
    rollout: int
    sigma: float

    def std(self, weight: Tensor) -> float:
        return self.sigma * rms(weight) if self.recipe.aqn_relative else self.sigma

    def __call__(self, name: str, weight: Tensor) -> Tensor:
        """Noise of one whole matrix (or norm weight), float32 in `weight`'s shape and on its device."""
        z = philox_normal(self.seed, self.rollout, name, 0, weight.numel(), weight.device)
        return z.view(weight.shape) * self.std(weight)

    def quantized(self, name: str, weight: Tensor, recipe: Recipe, dim: int, out: Tensor) -> None:
        """out = Q(cast(weight + noise)) in one pass: the same bits as by `__call__`."""
        key = noise_key(self.seed, self.rollout, name)
        fake_quantize_noisy(weight, recipe, key, self.std(weight), dim=dim, out=out)


def aqn_noise(recipe: Recipe | str, seed: int, rollout: int, total_rollouts: int) -> AqnNoise | None:
    """AQN's noise of rollout `rollout` (counted from 0) of `total_rollouts`; None where the recipe has no `+aqn`.

    A rollout beyond the last one has the last one's σ, and a draw of its own.
    """
    recipe = Recipe.parse(recipe)
    if recipe.aqn is None:
        return None
    return AqnNoise(recipe, seed, rollout, aqn_sigma(min(rollout, total_rollouts - 1), total_rollouts, *recipe.aqn))


def rms(weight: Tensor) -> float:
    """Root mean square in float64; 0 for an empty tensor."""
    return _norm(weight) / math.sqrt(max(weight.numel(), 1))


def _norm(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x.detach(), dtype=torch.float64))


@dataclass
class RolloutReport:
    """What the noise did: for each noised parameter ‖Q(w+n) − Q(w)‖ and ‖w‖ (norm weights: ‖cast(w+n) − w‖)."""

    sigma: float | None = None  # σ_t; None where the noise is not AQN's, or there is none
    layers: dict[str, tuple[float, float]] = field(default_factory=dict)

    @classmethod
    def of(cls, noise: Noise | None) -> RolloutReport:
        return cls(noise.sigma if isinstance(noise, AqnNoise) else None)

    @property
    def effective_sigma(self) -> float:
        """‖Q(w + n) − Q(w)‖ / ‖w‖ over all noised weights; 0 without noise."""
        change = math.hypot(*(change for change, _ in self.layers.values()))
        size = math.hypot(*(size for _, size in self.layers.values()))
        return change / size if size else 0.0

    @property
    def by_layer(self) -> dict[str, float]:
        return {name: change / size if size else 0.0 for name, (change, size) in self.layers.items()}

    def to_dict(self) -> dict[str, Any]:
        return {"sigma": self.sigma, "effective_sigma": self.effective_sigma, "layers": self.by_layer}


# --- shared by the micro-batches of a step ---------------------------------------------------------------------------


@dataclass
class SharedWeights:
    """The Q(w) that a model's layers share inside `shared_weights`."""

    weights: list[SharedWeight]

    @property
    def computed(self) -> int:
        """How many times a Q(w) was computed inside the block."""
        return sum(weight.computed for weight in self.weights)

    @property
    def reused(self) -> int:
        """How many times a Q(w) was there already."""
        return sum(weight.reused for weight in self.weights)

    @property
    def nbytes(self) -> int:
        """Memory that the shared Q(w) take now."""
        return sum(w.value.nbytes for w in self.weights if w.value is not None)

    def drop(self) -> None:
        """Forget every Q(w): after a write that no version counter sees (`parameter.data.add_(...)`)."""
        for weight in self.weights:
            weight.drop()


@contextmanager
def shared_weights(model: nn.Module) -> Iterator[SharedWeights]:
    """While the block runs, every converted layer computes Q(cast(w)) once and again only when w has changed.

    Micro-batches, checkpoint recomputation, backward passes and rollouts without noise use that one tensor (bf16: 2
    bytes a weight). It is computed anew when the parameter's `_version` or address, the compute dtype or the recipe
    changed, and after every step of a torch optimizer, whose fused kernels don't count versions (frozen parameters
    excepted). Under FSDP2, enter after `fully_shard` and let the parameters be the same objects till the end; every
    rank keeps the full Q(w). On exit everything is dropped.
    Writes in place through `.data` (PEFT's merge_adapter) are seen by nobody: call `drop()` after them.
    Parameters that came after the block began, torch.compile and CUDA graph capture compute Q(w) at every forward pass.
    Inside another block for the same layers it does nothing. Raises RolloutError without converted layers.
    """
    layers = list(quantized_layers(model))
    if not layers:
        raise RolloutError(f"shared_weights: {type(model).__name__} has no converted layer; call mxrl.convert first")
    reshard(model)
    mine = [(layer, name) for layer in layers for name in layer.weights if layer.shared(name) is None]
    shared = SharedWeights([])
    for layer, name in mine:
        weight = SharedWeight(layer.parameter(name))
        layer.share(name, weight)
        shared.weights.append(weight)

    def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
        for weight in shared.weights:
            if weight.source.requires_grad:
                weight.drop()

    hook = register_optimizer_step_post_hook(stepped)
    try:
        yield shared
    finally:
        hook.remove()
        for layer, name in mine:
            layer.share(name, None)
        shared.drop()


# --- held by a rollout -----------------------------------------------------------------------------------------------


@contextmanager
def rollout_weights(
    model: nn.Module, noise: Noise | None = None, *, dtype: torch.dtype | None = None
) -> Iterator[RolloutReport]:
    """While the block runs, every converted layer of `model` computes with a Q(w [+ noise]) computed once, on entry.

    noise: None, `aqn_noise(...)`, or any callable (canonical name, master weight) -> float32 noise of its shape, added
        before quantization. dtype: of the forward pass; by default autocast's where it is on, else each weight's own.
    The held weights are in no state dict and are dropped at the end, and the master weights stay as they are. Under
    FSDP2 every rank enters, and holds the full quantized weights; a forward pass still gathers the others, so ranks
    must make the same passes (`Replica` is for those that don't).
    Raises RolloutError for a model without converted layers, a rollout inside a rollout, weights that change inside
    (by an optimizer's step or in place; writes through `.data` are not seen).
    """
    layers = layers_to_hold(model, "rollout_weights")
    reshard(model)
    report = RolloutReport.of(noise)
    norms: list[_NoisedNorm] = []
    try:
        if noise is not None and on_norms(noise):
            for name, parameter in block_norms(model):
                norms.append(_NoisedNorm.apply(name, parameter, noise, report))
        with holding([(layer, layer) for layer in layers], noise, dtype, report):
            yield report
            for norm in norms:
                norm.held.check()
    finally:
        for norm in norms:
            norm.restore()


def layers_to_hold(model: nn.Module, caller: str) -> list[QuantizedLayer]:
    """The converted layers, none of which holds a weight; RolloutError otherwise."""
    layers = list(quantized_layers(model))
    if not layers:
        raise RolloutError(f"{caller}: {type(model).__name__} has no converted layer; call mxrl.convert first")
    if any(layer.holds for layer in layers):
        raise RolloutError(f"{caller}: this model is already inside a rollout's block; leave that one first")
    if not all(layer.operands.forward for layer in layers):
        raise RolloutError(f"{caller}: this model is quantized in the backward pass only, and a rollout has none")
    return layers


def reshard(model: nn.Module) -> None:
    """FSDP2: put the sharded master parameters back in place (a forward pass may have left them gathered)."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextmanager
def holding(
    pairs: Sequence[tuple[QuantizedLayer, QuantizedLayer]],
    noise: Noise | None,
    dtype: torch.dtype | None,
    report: RolloutReport,
) -> Iterator[list[tuple[QuantizedLayer, str, HeldWeight]]]:
    """While the block runs, the second layer of each pair holds Q(w [+ noise]) of the first one's master weights.

    Yields (second layer, its parameter's name, what it holds). Sharded master weights are gathered in this order, some
    at a time (nn/shard.py).
    Noise on norms is not added here.
    """
    held: list[tuple[QuantizedLayer, str, HeldWeight]] = []
    hook = register_optimizer_step_post_hook(_count_versions)
    try:
        with torch.no_grad():
            todo = [(source, layer, attribute) for source, layer in pairs for attribute in source.weights]
            masters = whole(source.parameter(attribute) for source, _, attribute in todo)
            for (source, layer, attribute), master in zip(todo, masters, strict=True):
                weight = quantized_weight(source, attribute, master, None if on_norms(noise) else noise, dtype, report)
                layer.hold(attribute, weight)
                held.append((layer, attribute, weight))
        yield held
        for *_, weight in held:
            weight.check()
    finally:
        hook.remove()
        for _, layer in pairs:
            layer.drop()


def _count_versions(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Fused optimizers write to parameters without counting versions; the check for changed weights needs them."""
    torch.autograd.graph.increment_version([p for group in optimizer.param_groups for p in group["params"]])


def quantized_weight(
    layer: QuantizedLayer,
    attribute: str,
    master: Tensor,
    noise: Noise | None,
    dtype: torch.dtype | None,
    report: RolloutReport,
) -> HeldWeight:
    """Q(w) of one stored parameter, whose whole value is `master`, with the noise of each matrix in it."""
    parameter = layer.parameter(attribute)
    dtype = dtype or compute_dtype(master)
    name = f"{layer.name}.{attribute}"
    shared = layer.shared(attribute)

    def quantize() -> Tensor:
        return layer.quantize(attribute, master.to(dtype))

    plain = layer.operands.weight is None and master.dtype == dtype  # then Q(w) is w itself
    clean = quantize() if shared is None or plain else shared.get(parameter, dtype, layer.operands, quantize)
    if noise is None:
        return HeldWeight(name, clean, parameter, parameter._version)
    recipe = layer.operands.weight
    after = isinstance(noise, AqnNoise) and noise.recipe.aqn_placement == "after"
    fused = isinstance(noise, AqnNoise) and not after and isinstance(recipe, Recipe)
    fused = fused and not layer.operands.tensor_scaled
    base = clean if after else master
    value = torch.empty_like(master, dtype=dtype) if fused else base.to(_wide(base.dtype), copy=True)
    pairs = zip(layer.matrices(attribute, master), layer.matrices(attribute, value), strict=True)
    for (matrix_name, matrix), (_, target) in pairs:
        if isinstance(noise, AqnNoise) and fused and isinstance(recipe, Recipe):
            noise.quantized(f"{layer.name}.{matrix_name}", matrix, recipe, layer.dim, target)
        else:
            target.add_(noise(f"{layer.name}.{matrix_name}", matrix))
    if not fused:
        value = value.to(dtype) if after else layer.quantize(attribute, value.to(dtype))
    report.layers[name] = (_norm(value.float() - clean.float()), _norm(master))
    return HeldWeight(name, value, parameter, parameter._version)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What noise is added in."""
    return torch.promote_types(dtype, torch.float32)


def on_norms(noise: Noise | None) -> bool:
    """Whether the noise goes on the norms' weights, so that the layers hold plain Q(w)."""
    return isinstance(noise, AqnNoise) and noise.recipe.aqn_target == "norm"


@torch.no_grad()
def noised_norm(name: str, weight: Tensor, noise: Noise, report: RolloutReport) -> Tensor:
    """cast(w + n) of a norm's whole weight, and what it did in the report."""
    wide = weight.to(_wide(weight.dtype))
    noised = (wide + noise(name, weight)).to(weight.dtype)
    report.layers[name] = (_norm(noised.to(wide.dtype) - wide), _norm(weight))
    return noised


@dataclass
class _NoisedNorm:
    """A norm's weight with noise on it in place, and what brings it back bit for bit."""

    held: HeldWeight  # for the check that nobody else wrote to it; its value is the original

    @classmethod
    @torch.no_grad()
    def apply(cls, name: str, parameter: nn.Parameter, noise: Noise, report: RolloutReport) -> _NoisedNorm:
        noised = noised_norm(name, full_tensor(parameter), noise, report)
        original = parameter.detach().clone()
        parameter.copy_(_like(noised, parameter))
        return cls(HeldWeight(name, original, parameter, parameter._version))

    @torch.no_grad()
    def restore(self) -> None:
        self.held.parameter.copy_(self.held.value)


def _like(whole: Tensor, parameter: Tensor) -> Tensor:
    """`whole` sharded as `parameter` is; every rank has the same `whole`, so nothing is sent."""
    if not isinstance(parameter, DTensor):
        return whole
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)


def block_norms(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The weights of the RMSNorms that feed the layers: those that are a decoder block's own children.

    The norms of queries and keys inside attention, and the model's last norm, feed no converted layer.
    """
    found = False
    for path, module in model.named_modules():
        name = canonical_name(path)
        parts = name.split(".")
        weight = getattr(module, "weight", None)
        in_block = len(parts) >= 2 and parts[-2].isdigit()
        if in_block and type(module).__name__.endswith("RMSNorm") and isinstance(weight, nn.Parameter):
            found = True
            yield f"{name}.weight", weight
    if not found:
        name = type(model).__name__
        raise RecipeError(f"aqn_target=norm: {name} has no RMSNorm in its blocks; use aqn_target=weight")

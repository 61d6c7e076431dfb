"""What a quantizer's zeros take from the weights: share of zeros, effective and stable rank, layer by layer.

Of a weight W [O, K] with singular values σ_1 ≥ σ_2 ≥ … (float64), for W itself and for what a treatment makes of it:

    effective rank  exp(−Σ p_i ln p_i), p_i = σ_i / Σ σ     (Roy and Vetterli 2007); n for n equal σ, 1 for one
    stable rank     ‖W‖_F² / ‖W‖₂² = Σ σ_i² / σ_1²          moved by the largest σ, hardly by the tail

Zeros that struck directions out would lower both. Noise that knows nothing of W raises the effective rank, since it
fills the tail. So `@deadzone` is to be read against `@~deadzone`.

Two figures to hold the measured ones against:

    Gaussian weights   share in the deadzone {|x| < m_b / r}: (B − 1) ∫ 2φ(m) erf(m/√2)^{B−2} erf(m/(r√2)) dm, with m
                       the largest of a block of B and r = 2 q_max / q_min (E2M1: 24)
    stable rank lost   by the deadzone alone: with ε = ‖e_dz‖² / ‖W‖², ⟨W + e_dz, W⟩ = (1 − ε) ‖W‖² exactly. For
                       Gaussian weights that gain is every direction's (Bussgang 1952), the largest σ's too, so that
                       the stable rank becomes (1 − ε) / (1 − ε)² times what it was: it *rises*, by about ε

σ² are the eigenvalues of W Wᵀ in float64, which resolves σ down to about 1e-8 σ_1: batched over experts, and what
makes a 0.5B model's 168 matrices a matter of seconds on a GPU.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mxrl.decompose import ErrorStats, error_stats
from mxrl.formats import BlockFormat
from mxrl.kinds import kind_of, layer_of
from mxrl.nn import quantized_layers
from mxrl.nn.layers import QuantizedLayer
from mxrl.probes.subject import Subject
from mxrl.probes.treatments import Treatment, treated
from mxrl.recipes import Recipe

_ELEMENTS = 1 << 27  # of float64 at a time


class Ranks(NamedTuple):
    effective: float
    stable: float


@dataclass(frozen=True)
class Place:
    """A stored parameter of a layer, and the names of all matrices that are looked at (its own among them)."""

    layer: QuantizedLayer
    attribute: str
    names: frozenset[str]

    def matrices(self, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
        """(canonical name in the model, view) of the chosen matrices of the parameter, or of a tensor of its shape."""
        for name, matrix in self.layer.matrices(self.attribute, weight):
            if f"{self.layer.name}.{name}" in self.names:
                yield f"{self.layer.name}.{name}", matrix


@dataclass(frozen=True)
class Matrix:
    """One matrix as it is stored."""

    kind: str
    layer: int
    numel: int
    zeros: int
    ranks: Ranks


@dataclass
class Sums:
    """What a treatment did to the matrices of one layer (and kind)."""

    matrices: int = 0
    numel: int = 0
    zeros: int = 0
    zeros_before: int = 0
    effective: float = 0.0
    effective_before: float = 0.0
    effective_lost: float = 0.0
    stable: float = 0.0
    stable_before: float = 0.0
    stable_lost: float = 0.0

    def add(self, before: Matrix, zeros: int, ranks: Ranks) -> None:
        self.matrices += 1
        self.numel += before.numel
        self.zeros += zeros
        self.zeros_before += before.zeros
        self.effective += ranks.effective
        self.effective_before += before.ranks.effective
        self.effective_lost += _lost(before.ranks.effective, ranks.effective)
        self.stable += ranks.stable
        self.stable_before += before.ranks.stable
        self.stable_lost += _lost(before.ranks.stable, ranks.stable)

    def row(self) -> dict[str, float | int]:
        """Shares of the elements, means over the matrices."""
        n = self.matrices
        return {
            "matrices": n,
            "elements": self.numel,
            "zeros": self.zeros / self.numel,
            "zeros_before": self.zeros_before / self.numel,
            "effective_rank": self.effective / n,
            "effective_rank_before": self.effective_before / n,
            "effective_rank_lost": self.effective_lost / n,
            "stable_rank": self.stable / n,
            "stable_rank_before": self.stable_before / n,
            "stable_rank_lost": self.stable_lost / n,
        }


def _lost(before: float, after: float) -> float:
    return 1 - after / before if before else 0.0


def singular_values(stack_NOK: Tensor) -> Tensor:
    """[N, min(O, K)] float64, largest last; those below about 1e-8 of the largest are rounding."""
    wide = stack_NOK.double()
    if wide.shape[-2] > wide.shape[-1]:
        wide = wide.mT
    return torch.linalg.eigvalsh(wide @ wide.mT).clamp(min=0).sqrt()


def ranks(stack_NOK: Tensor) -> list[Ranks]:
    """Effective and stable rank of every matrix; 0 for one of zeros alone."""
    at_once = max(1, _ELEMENTS // stack_NOK[0].numel())
    found: list[Ranks] = []
    for part in stack_NOK.split(at_once):
        s = singular_values(part)
        total = s.sum(-1, keepdim=True)
        p = s / torch.where(total == 0, 1, total)
        effective = torch.where(total[:, 0] == 0, 0, torch.special.entr(p).sum(-1).exp())
        top = s[:, -1] ** 2
        stable = (s**2).sum(-1) / torch.where(top == 0, 1, top)
        found += [Ranks(e, f) for e, f in zip(effective.tolist(), stable.tolist(), strict=True)]
    return found


def gaussian_share(form: BlockFormat, steps: int = 20_000) -> float:
    """Share of independent Gaussian weights in the deadzone of their blocks (Simpson's rule over m in 0 … 12)."""
    b, r = form.block, form.deadzone_ratio

    def density(m: float) -> float:
        phi = math.exp(-m * m / 2) / math.sqrt(2 * math.pi)
        return 2 * phi * math.erf(m / math.sqrt(2)) ** (b - 2) * math.erf(m / (r * math.sqrt(2)))

    width = 12 / steps
    inner = sum((4 if i % 2 else 2) * density(i * width) for i in range(1, steps))
    return (b - 1) * (density(0) + inner + density(12)) * width / 3


def stable_rank_lost(energy: float) -> float:
    """What zeroing the deadzone, which holds the share `energy` of ‖W‖², takes from the stable rank (see above)."""
    return 1 - 1 / (1 - energy)


def chosen_places(subject: Subject, matrices: int | None) -> list[Place]:
    """Where the matrices lie that are looked at: all, or at most `matrices` of each kind, evenly spread."""
    by_kind: dict[str, list[str]] = defaultdict(list)
    for name in all_names(subject):
        by_kind[_kind(name)].append(name)
    names = frozenset(name for found in by_kind.values() for name in spread(found, matrices))
    places = [
        Place(layer, attribute, names) for layer in quantized_layers(subject.model) for attribute in layer.weights
    ]
    return [p for p in places if any(True for _ in p.matrices(p.layer.parameter(p.attribute).detach()))]


def all_names(subject: Subject) -> list[str]:
    """Canonical names of all matrices that are quantized, experts unfused."""
    return [
        f"{layer.name}.{name}"
        for layer in quantized_layers(subject.model)
        for attribute in layer.weights
        for name, _ in layer.matrices(attribute, layer.parameter(attribute).detach())
    ]


def spread(names: Sequence[str], most: int | None) -> list[str]:
    """At most `most` of them, evenly spread, the first and (from two on) the last included."""
    if most is None or most >= len(names):
        return list(names)
    return [names[round(i * (len(names) - 1) / max(1, most - 1))] for i in range(most)]


def _kind(name: str) -> str:
    return kind_of(name.removesuffix(".weight"))


def _layer(name: str) -> int:
    """The block that a matrix belongs to; -1 for one outside of the blocks."""
    found = layer_of(name)
    return -1 if found is None else found


@torch.no_grad()
def as_stored(places: Sequence[Place]) -> dict[str, Matrix]:
    """Every chosen matrix before anything is done to it, by name."""
    found = {}
    for place in places:
        named = place.matrices(place.layer.parameter(place.attribute).detach())
        for name, matrix, zeros, rank in _measured(dict(named)):
            found[name] = Matrix(_kind(name), _layer(name), matrix.numel(), zeros, rank)
    return found


def _measured(named: dict[str, Tensor]) -> Iterator[tuple[str, Tensor, int, Ranks]]:
    """(name, matrix, zeros, ranks), matrices of one shape at once."""
    by_shape: dict[torch.Size, list[str]] = defaultdict(list)
    for name, matrix in named.items():
        by_shape[matrix.shape].append(name)
    for names in by_shape.values():
        stack = torch.stack([named[name] for name in names])
        zeros = (stack == 0).flatten(1).sum(1).tolist()
        for name, count, rank in zip(names, zeros, ranks(stack), strict=True):
            yield name, named[name], count, rank


@torch.no_grad()
def under(subject: Subject, treatment: Treatment, places: Sequence[Place], before: dict[str, Matrix]) -> list[Any]:
    """[(layer, kind, Sums)] of the weights that the model computes with under a treatment, in the model's order."""
    sums: dict[tuple[int, str], Sums] = defaultdict(Sums)
    operands = treatment.operands()
    with treated(subject.model, treatment, seed=subject.seed):
        for place in places:
            layer = replace(place.layer, operands=operands)
            weight = layer.quantize(place.attribute, layer.parameter(place.attribute).detach())
            for name, _, zeros, rank in _measured(dict(place.matrices(weight))):
                matrix = before[name]
                sums[matrix.layer, matrix.kind].add(matrix, zeros, rank)
    return [(layer, kind, found) for (layer, kind), found in sums.items()]


@torch.no_grad()
def in_deadzone(places: Sequence[Place], recipe: Recipe) -> dict[tuple[int, str], dict[str, float]]:
    """(layer, kind) → shares of the elements that lie in the recipe's deadzone, and of ‖W‖²: ‖e_dz‖² / ‖W‖²."""
    sums: dict[tuple[int, str], ErrorStats] = defaultdict(ErrorStats)
    for place in places:
        for name, matrix in place.matrices(place.layer.parameter(place.attribute).detach()):
            sums[_layer(name), _kind(name)] += error_stats(matrix, recipe, dim=place.layer.dim)
    return {
        key: {"deadzone": s.deadzone_fraction, "deadzone_energy": s.sq_deadzone / (s.sq_norm or 1)}
        for key, s in sums.items()
    }

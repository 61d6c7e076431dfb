"""What the scales alone predict for gradients: δ of drawn blocks, summed over the depth.

    δ_b = log2(s_b / s*_b)        effective scale over the ideal one, s*_b = m_b / 6; in [0, 1) under the ceil rule
    Δ   = Σ_l (δ_{b(l)} − mean δ of layer l)        one block b(l) drawn in each of L decoder blocks
    σ(Δ) = √(Σ_l Var δ_l)  =  √(L/12) for a uniform δ

The paper reads 2^Δ as what a backward path through L layers is multiplied by. Draws are independent from layer to
layer, so nothing here can show a correlation between layers: σ differs from √(L/12) only where δ isn't uniform. And a
path through a real layer meets thousands of blocks, whose gains are averaged in every dot product: whether gradients
grow so is for the backward pass to say (gradient.py).

Source: arXiv 2605.20402 (√(L/12); 48 layers: 2.0, measured 1.97 on Qwen3-30B-A3B). Its one-σ interval of the gain,
[.18, 5.6], is neither 2^±2 = [.25, 4] nor e^±2 = [.14, 7.4]; it is e^±√3, √3 = √(36/12): that of 36 layers, base e.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import stdev

import torch
from torch import Tensor

from mxrl.kinds import layer_of
from mxrl.nn.layers import QuantizedLayer, full_tensor, quantized_layers
from mxrl.ops.layout import as_abk
from mxrl.ops.qdq import format_of
from mxrl.ops.stats import chunks
from mxrl.probes.intervals import Mean, mean
from mxrl.probes.subject import ProbeError, Subject
from mxrl.probes.treatments import Treatment
from mxrl.recipes import Recipe

UNIFORM = 1 / 12  # variance of a uniform δ


@dataclass(frozen=True)
class ScaleSums:
    """δ of drawn blocks under one recipe. layers: the decoder blocks that have quantized weights, L of them.

    sums: Δ of every draw, float64 [seeds, draws], NaN where a drawn block was all zeros or its exponent clamped.
    means, variances: of each layer's δ over all draws, [L] each.
    """

    recipe: Recipe
    layers: tuple[int, ...]
    sums: Tensor
    means: tuple[float, ...]
    variances: tuple[float, ...]

    @property
    def sigma(self) -> Mean:
        """σ(Δ) and its interval over the seeds of the draw."""
        return mean([stdev(row[~row.isnan()].tolist()) for row in self.sums])

    @property
    def uniform(self) -> float:
        """√(L/12)."""
        return math.sqrt(len(self.layers) * UNIFORM)

    @property
    def independent(self) -> float:
        """√(Σ_l Var δ_l): σ(Δ) of independent layers, whatever δ's distribution."""
        return math.sqrt(math.fsum(self.variances))

    def histogram(self, bins: int = 40) -> tuple[list[float], list[float], list[float]]:
        """(edges, share of the draws in each bin, share that a normal with σ = √(L/12) puts there), over ±4 σ."""
        edges = torch.linspace(-4, 4, bins + 1, dtype=torch.float64) * self.uniform
        kept = self.sums[~self.sums.isnan()]
        inside = kept[(kept >= edges[0]) & (kept < edges[-1])]
        counts = torch.bincount(torch.bucketize(inside, edges[1:-1], right=True), minlength=bins)
        normal = torch.special.ndtr(edges / self.uniform).diff()
        return edges.tolist(), (counts / kept.numel()).tolist(), normal.tolist()


def scale_recipes(treatments: Sequence[Treatment]) -> list[Recipe]:
    """The MXFP4 scale rules among the treatments' recipes, each once: a second pass (`+of`) changes no scale."""
    recipes = [t.recipe for t in treatments if t.recipe.base == "mxfp4"]
    return list(dict.fromkeys(dataclasses.replace(r.operand, of=None) for r in recipes))


def scale_sums(subject: Subject, recipe: Recipe, *, draws: int, seeds: int) -> ScaleSums:
    """Draw `draws` times one block of each decoder block's quantized weights, uniformly among all its blocks.

    recipe: an MXFP4 operand. The draws are of subject.seed, and the same blocks for every recipe. Reads the weights in
    the dtype they are in. Raises ProbeError where fewer than two draws met only blocks that have a δ.
    """
    by_layer: dict[int, list[QuantizedLayer]] = defaultdict(list)
    for layer in quantized_layers(subject.model):
        index = layer_of(layer.name)
        if index is not None:
            by_layer[index].append(layer)
    generator = torch.Generator().manual_seed(subject.seed)
    found = [_drawn(by_layer[index], recipe, draws * seeds, generator) for index in sorted(by_layer)]
    delta = torch.stack(found)  # [L, seeds · draws]
    known = ~delta.isnan()
    if bool((known.all(0).view(seeds, draws).sum(1) < 2).any()):
        raise ProbeError(f"{subject.name}: nearly all blocks drawn are zero or clamped, so {recipe} has no δ to sum")
    count = known.sum(1)
    means = delta.nansum(1) / count
    centred = delta - means.unsqueeze(1)
    variances = (centred * centred).nansum(1) / (count - 1)
    return ScaleSums(
        recipe,
        tuple(sorted(by_layer)),
        centred.sum(0).view(seeds, draws),
        tuple(means.tolist()),
        tuple(variances.tolist()),
    )


def _drawn(layers: Sequence[QuantizedLayer], recipe: Recipe, count: int, generator: torch.Generator) -> Tensor:
    """δ of `count` blocks drawn among all blocks of some layers' weights, float64 [count] on the CPU."""
    block = format_of(recipe).block
    weights = [as_abk(w, layer.dim % w.dim()) for layer in layers for w in _stored(layer)]
    blocks = torch.tensor([w.shape[0] * w.shape[1] * -(-w.shape[2] // block) for w in weights])
    ends = blocks.cumsum(0)
    which = torch.randint(int(ends[-1]), (count,), generator=generator)
    owner = torch.bucketize(which, ends, right=True)
    out = torch.empty(count, dtype=torch.float64)
    for i, w_ABK in enumerate(weights):
        mine = owner == i
        if bool(mine.any()):
            out[mine] = block_deltas(w_ABK, which[mine] - (ends[i] - blocks[i]), recipe).cpu()
    return out


def _stored(layer: QuantizedLayer) -> list[Tensor]:
    return [full_tensor(layer.parameter(name)) for name in layer.weights]


def block_deltas(w_ABK: Tensor, index: Tensor, recipe: Recipe) -> Tensor:
    """δ of the blocks of w [A, B, K] with these numbers (int64 [n], row by row), float64 [n]; NaN: zero or clamped.

    Each block is read with the macro-block that its scale depends on, and with nothing else.
    """
    block = format_of(recipe).block
    unit = recipe.macro if recipe.mbs else block
    columns = w_ABK.shape[2]
    row, place = index // -(-columns // block), index % -(-columns // block)
    begin = place * block // unit * unit
    column = begin.unsqueeze(1) + torch.arange(unit)
    a, b, k = (t.to(w_ABK.device) for t in (row // w_ABK.shape[1], row % w_ABK.shape[1], column.clamp(max=columns - 1)))
    values = w_ABK[a.unsqueeze(1), b.unsqueeze(1), k]
    values = values.masked_fill((column >= columns).to(w_ABK.device), 0.0)  # as a ragged block is padded
    parts = []
    for _, _, chunk in chunks(values.unsqueeze(0), recipe, None, None):
        assert chunk.delta is not None and chunk.clamped is not None
        none = ~chunk.valid | (chunk.maxima == 0) | chunk.clamped
        parts.append(chunk.delta.masked_fill(none, math.nan))
    inside = ((place * block - begin) // block).to(w_ABK.device)
    return torch.cat(parts).gather(1, inside.unsqueeze(1)).squeeze(1)

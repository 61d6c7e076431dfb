"""A quantizer that lets only some of the error's components through: what a layer's operand gets in a causal probe.

    Injected(recipe, {"scale"})                 x + e_scale
    Injected(recipe, {"deadzone", "grid"})      all but the scale's
    Injected(recipe, {"scale"}, control=True)   x + Gaussian noise with e_scale's energy, row by row
    Injected(recipe, all three)                 Q(x), bit for bit

The control's energy is matched along the blocked axis, so that a token's noise doesn't depend on its neighbours in the
batch, as its quantization error doesn't. Its draws come from torch's global generator of x's device (which a CUDA graph
can replay); seed it with `torch.manual_seed`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mxrl.decompose import inject
from mxrl.recipes import Recipe


@dataclass(frozen=True)
class Injected:
    """recipe: of the operand. components: of {"scale", "deadzone", "grid"}. control: noise instead of them."""

    recipe: Recipe
    components: frozenset[str]
    control: bool = False

    @property
    def base(self) -> str:
        return self.recipe.base

    def __call__(self, x: Tensor, dim: int = -1) -> Tensor:
        """x with the components' error (or the control's noise), rounded once to x's dtype; same shape, no gradient."""
        if not self.control:
            return inject(x, self.components, recipe=self.recipe, dim=dim)
        wide = x.detach().to(torch.promote_types(x.dtype, torch.float32))
        error = inject(wide, self.components, recipe=self.recipe, dim=dim) - wide
        noise = torch.randn(wide.shape, dtype=wide.dtype, device=wide.device)
        size = noise.norm(dim=dim, keepdim=True)
        share = error.norm(dim=dim, keepdim=True) / torch.where(size == 0, 1, size)
        return (wide + noise * share).to(x.dtype)

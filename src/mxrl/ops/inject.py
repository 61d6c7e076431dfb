"""Component injection, the torch reference: x plus a subset of its error's components, rounded once.

The sum is float64 and in one order, x + (e_scale + e_dz + e_grid), which is C(x) exactly (of float64 tensors, whose
components are rounded, all three are C(x) as such). It saturates as C does: a part of the error can be larger than all
of it. Zeros keep x's sign, and poisoned blocks come out NaN (with nothing chosen, as they are).
"""

from __future__ import annotations

import torch
from torch import Tensor

from mxrl.ops.layout import write_rows
from mxrl.ops.stats import chunks
from mxrl.recipes import Recipe

COMPONENTS = ("scale", "deadzone", "grid")


def inject(
    x_ABK: Tensor,
    recipe: Recipe,
    chosen: frozenset[str],
    out_ABK: Tensor,
    tensor_scale: Tensor | None,
    foreign_ABK: Tensor | None = None,
) -> None:
    """out = x + the components in `chosen`. foreign_ABK: as in `stats`, this reference's alone."""
    largest = torch.finfo(out_ABK.dtype).max
    for begin, end, c in chunks(x_ABK, recipe, foreign_ABK, tensor_scale):
        error = torch.zeros_like(c.x, dtype=torch.float64)
        for name, part in zip(COMPONENTS, c.components(), strict=False):
            if name in chosen:
                error += part
        x = c.x.double()
        result = c.quantized.double() if chosen == frozenset(COMPONENTS) else x + error
        if chosen:  # a poisoned block has no components
            result = torch.where(c.valid.unsqueeze(-1), result.clamp(-largest, largest), float("nan"))
        result = torch.where(result == 0, torch.copysign(result, x), result)
        write_rows(out_ABK, begin, end, result.flatten(1)[:, : x_ABK.shape[-1]].to(out_ABK.dtype))

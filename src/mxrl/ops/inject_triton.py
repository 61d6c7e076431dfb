"""Component injection on the GPU in one pass: x plus a subset of its error's components, rounded once to x's dtype.

    result = x + (e_scale + e_dz + e_grid, the chosen ones in this order)      float64; all three give C(x) exactly

It saturates at x's dtype. A zero keeps x's sign; a poisoned block comes out NaN (with nothing chosen, as it is).
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mxrl.ops.components_triton import deadzone_edge, ideal_scale, ideal_values
from mxrl.ops.inject import COMPONENTS
from mxrl.ops.pack_triton import cut
from mxrl.ops.passes_triton import INF_BITS, SIGN, as_bits, as_float, block_amax, quantize_tile, round_once, widen
from mxrl.ops.qdq_triton import Config, unsupported
from mxrl.ops.tiles_triton import load_tile, locate, store_tile
from mxrl.recipes import Recipe

__all__ = ["COMPONENTS", "CONFIGS", "inject", "unsupported"]

CONFIGS = {
    "plain": Config(1024, 4),
    "mbs": Config(2048, 4),
    "search": Config(4096, 4, owned=True),
    "columns": Config(2048, 1),
}


@triton.jit(do_not_specialize=["count"])
def _inject_kernel(
    x, out, tensor_scale, alpha, count, B, K, x_a, x_b, x_k, out_a, out_b, out_k,
    RULE: tl.constexpr, MBS: tl.constexpr, OF: tl.constexpr, G: tl.constexpr, N: tl.constexpr, LARGEST: tl.constexpr,
    NARROW: tl.constexpr, SCALE: tl.constexpr, DEADZONE: tl.constexpr, GRID: tl.constexpr, MODE: tl.constexpr,
    MASK: tl.constexpr, M: tl.constexpr, OWNED: tl.constexpr,
):  # fmt: skip
    a, b, column, valid = locate(tl.program_id(0), count, B, K, MODE, M, G * N)
    loaded = load_tile(x, a * x_a + b * x_b + column * x_k, column, valid, K, x_k, G, N, MASK, OWNED)
    tile = widen(loaded)
    tensor = 0.0
    if RULE == "nvfp4" or RULE == "4over6":
        tensor = tl.load(tensor_scale)
    value = tile
    if SCALE:
        value = quantize_tile(tile, tensor, alpha, RULE, MBS, OF, LARGEST, NARROW, OWNED > 0)[0]
    # The rest in magnitudes, as if x were positive: a zero then takes x's sign like everything else.
    m = block_amax(tile)
    bad = m >= INF_BITS
    m = tl.where(bad, 0, m)
    magnitude = tl.abs(tile)
    exact = magnitude.to(tl.float64)
    e4m3: tl.constexpr = RULE == "mxfp8"
    inverse, sixth = ideal_scale(m, e4m3)
    ideal = ideal_values(exact, m, inverse, sixth, e4m3).to(tl.float64)  # of anything in poisoned blocks
    rest = ideal - exact
    inside = magnitude < deadzone_edge(m, sixth, e4m3)[:, :, None]
    error = tl.zeros_like(exact)
    sign = as_bits(tile) & SIGN
    if SCALE:
        error += as_float(as_bits(value) ^ sign).to(tl.float64) - ideal
    if DEADZONE:
        error += tl.where(inside, rest, 0.0)
    if GRID:
        error += tl.where(inside, 0.0, rest)
    result = (exact + error).to(tl.float32)
    if SCALE or DEADZONE or GRID:
        result = tl.minimum(tl.maximum(result, -LARGEST), LARGEST)
        result = tl.where(bad[:, :, None], float("nan"), result)
    rounded = round_once(as_float(as_bits(result) ^ sign), out.dtype.element_ty)
    store_tile(out, a * out_a + b * out_b + column * out_k, column, valid, K, out_k, rounded, MASK)


def inject(
    x_ABK: Tensor, recipe: Recipe, chosen: frozenset[str], out_ABK: Tensor, tensor_scale: Tensor | None,
    *, config: Config | None = None,
) -> None:  # fmt: skip
    """out = x + the components in `chosen` (names of COMPONENTS) of x's error under `recipe`.

    x_ABK: bf16, fp16 or float32, any strides; out: same shape and dtype, may be x itself. tensor_scale: NVFP4's, 0-d
    float32 on the device, else None. config: for tuning. Raises ValueError for what `unsupported` names.
    """
    if x_ABK.numel() == 0:
        return
    plan, constants = cut(x_ABK, out_ABK, recipe, x_ABK.dtype, CONFIGS, config)
    _inject_kernel[(plan.programs,)](
        x_ABK, out_ABK, tensor_scale, recipe.of or 0.0, plan.count, *x_ABK.shape[1:], *x_ABK.stride(),
        *out_ABK.stride(), SCALE="scale" in chosen, DEADZONE="deadzone" in chosen, GRID="grid" in chosen, **constants,
    )  # fmt: skip

"""Quantize-dequantize on the GPU in one pass over memory: read once, every pass in registers, written once.

    qdq           out = Q(x)
    noisy_qdq     out = Q(w + z·σ): AQN's noise drawn, added and quantized on the way, the weights untouched
    finite_amax   max|x| over the blocks without NaN or Inf: what NVFP4's scale of a tensor is taken from

A program handles one tile (`tiles_triton`): for a contiguous tensor whose rows are whole (macro-)blocks, a flat run of
them without masks; else rows, or columns where the blocked axis is not the contiguous one. Plain QDQ, align and OF are
bound by memory, a search by arithmetic, and the noise by float64 (about 130 operations an element, so that every device
draws the same bits). Where a thread holds whole blocks (`Config.owned`), a block's scale is worked out once, not by
each of the four threads that would share it.
"""

# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxrl.ops.noise_triton import standard_normal
from mxrl.ops.passes_triton import INF_BITS, block_amax, quantize_values, round_once, rule_of, widen
from mxrl.ops.qdq import format_of
from mxrl.ops.tiles_triton import element_offsets, load_tile, locate, store_tile, tile_mask, tiling
from mxrl.recipes import Recipe

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LONGEST = 4096  # elements of a macro-block: the largest tile of a configuration


class Config(NamedTuple):
    """How one launch is cut: elements of a tile, warps of a program, whether a thread holds whole blocks (1) or halves
    of 32 (2), and the registers of a thread (0: as many as the compiler likes)."""

    elements: int
    warps: int
    owned: int = 0
    registers: int = 0

    @property
    def options(self) -> dict[str, Any]:
        """The launch's compiler options."""
        limit = {"maxnreg": self.registers} if self.registers else {}
        return {"num_warps": self.warps, "enable_fp_fusion": False, **limit}


# By kind of work and layout; measured on an H200 (8192 x 16384).
CONFIGS = {
    "plain": Config(1024, 4),
    "of": Config(2048, 4),
    "mbs": Config(1024, 1, owned=1),
    "mbs+of": Config(1024, 1, owned=1),
    "search": Config(1024, 1, owned=1),
    "columns": Config(4096, 1),
    "columns+mbs": Config(2048, 1),
    "nvfp4": Config(4096, 4, owned=1),
    "e8m": Config(2048, 2, owned=1),
    "amax": Config(16384, 16),
}


def unsupported(recipe: Recipe, dtype: torch.dtype) -> str | None:
    """Why these kernels can't quantize `dtype` tensors by `recipe`, in a phrase; None if they can."""
    if not recipe.quantizes:
        return "bf16 quantizes nothing"
    if dtype not in DTYPES:
        return f"no Triton kernel for {dtype}"
    if recipe.mbs and recipe.macro & (recipe.macro - 1):
        return f"the Triton kernels need a macro size that is a power of two, not {recipe.macro}"
    if recipe.mbs and recipe.macro > LONGEST:
        return f"the Triton kernels hold a macro-block in registers, {LONGEST} elements at most, not {recipe.macro}"
    return None


def of_kind(recipe: Recipe) -> int:
    """OF in `quantize_tile`: 0 without, else 1, plus
    2 where α·x2 is exact (α a power of two, x2 = g·2^E), so that an FMA rounds as the reference does;
    4 where the sum can't pass the largest value: under ceil, x1 <= 3·2^E and x2 <= 2^E in the top binade, which ends
    just below 4·2^E;
    8 where α is a power of two.
    """
    if not recipe.of:
        return 0
    power = recipe.of in (1.0, 0.5, 0.25, 0.125)
    exact = power and recipe.mbs is None and recipe.rule in ("ceil", "floor", "even")
    bounded = recipe.mbs is None and recipe.rule == "ceil" and recipe.of <= 0.9
    return 1 + 2 * exact + 4 * bounded + 8 * power


@functools.lru_cache(maxsize=256)
def recipe_constants(recipe: Recipe, dtype: torch.dtype) -> dict[str, Any]:
    """The constexpr arguments that a recipe and the quantized dtype determine: of `quantize_tile`, and G and N."""
    why = unsupported(recipe, dtype)
    if why is not None:
        raise ValueError(f"recipe '{recipe}': {why}")
    n = format_of(recipe).block
    return dict(
        RULE=rule_of(recipe), MBS=recipe.mbs or "", OF=of_kind(recipe), G=recipe.macro // n if recipe.mbs else 1, N=n,
        LARGEST=torch.finfo(dtype).max, NARROW=dtype != torch.float32,
    )  # fmt: skip


@functools.lru_cache(maxsize=256)
def _kind(recipe: Recipe) -> str:
    if recipe.mbs not in (None, "align"):
        return "search"
    if recipe.base == "nvfp4":
        return "nvfp4"
    if recipe.rule.startswith("e8m") and not recipe.mbs:
        return "e8m"
    return "+".join(part for part, on in (("mbs", recipe.mbs), ("of", recipe.of)) if on) or "plain"


@triton.jit(do_not_specialize=["count"])
def _qdq_kernel(
    x, out, tensor_scale, alpha, count, B, K, x_a, x_b, x_k, out_a, out_b, out_k,
    RULE: tl.constexpr, MBS: tl.constexpr, OF: tl.constexpr, G: tl.constexpr, N: tl.constexpr, LARGEST: tl.constexpr,
    NARROW: tl.constexpr, MODE: tl.constexpr, MASK: tl.constexpr, M: tl.constexpr, OWNED: tl.constexpr,
):  # fmt: skip
    a, b, column, valid = locate(tl.program_id(0), count, B, K, MODE, M, G * N)
    tile = load_tile(x, a * x_a + b * x_b + column * x_k, column, valid, K, x_k, G, N, MASK, OWNED)
    scale = 0.0
    if RULE == "nvfp4" or RULE == "4over6":
        scale = tl.load(tensor_scale)
    value = quantize_values(widen(tile), scale, alpha, RULE, MBS, OF, LARGEST, NARROW, OWNED == 1 or OWNED == 2)
    rounded = round_once(value, out.dtype.element_ty)
    store_tile(out, a * out_a + b * out_b + column * out_k, column, valid, K, out_k, rounded, MASK)


@triton.jit(do_not_specialize=["count", "k0", "k1", "c2", "c3"])
def _noisy_qdq_kernel(
    w, out, std, alpha, count, B, K, w_a, w_b, w_k, out_a, out_b, out_k, k0, k1, c2, c3,
    RULE: tl.constexpr, MBS: tl.constexpr, OF: tl.constexpr, G: tl.constexpr, N: tl.constexpr, LARGEST: tl.constexpr,
    NARROW: tl.constexpr, MODE: tl.constexpr, MASK: tl.constexpr, M: tl.constexpr, OWNED: tl.constexpr,
):  # fmt: skip
    a, b, column, valid = locate(tl.program_id(0), count, B, K, MODE, M, G * N)
    start = a * w_a + b * w_b + column * w_k
    tile = widen(load_tile(w, start, column, valid, K, w_k, G, N, MASK, OWNED))
    noise = standard_normal(element_offsets(start, w_k, G, N), k0, k1, c2, c3)
    noised = widen(round_once(tile + noise * std, out.dtype.element_ty))
    if MASK == "all":  # beyond K there is nothing to be noisy
        noised = tl.where(tile_mask(column, valid, K, G, N, MASK), noised, 0.0)
    value = quantize_values(noised, 0.0, alpha, RULE, MBS, OF, LARGEST, NARROW, OWNED == 1 or OWNED == 2)
    rounded = round_once(value, out.dtype.element_ty)
    store_tile(out, a * out_a + b * out_b + column * out_k, column, valid, K, out_k, rounded, MASK)


@triton.jit(do_not_specialize=["count"])
def _amax_kernel(
    x, out, count, B, K, x_a, x_b, x_k,
    N: tl.constexpr, MODE: tl.constexpr, MASK: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    a, b, column, valid = locate(tl.program_id(0), count, B, K, MODE, M, N)
    tile = load_tile(x, a * x_a + b * x_b + column * x_k, column, valid, K, x_k, 1, N, MASK, 0)
    m = tl.reshape(block_amax(widen(tile)), [M])
    tl.atomic_max(
        out, tl.max(tl.where(m >= INF_BITS, 0, m), axis=0), sem="relaxed"
    )  # non-negative floats order as ints


def owned_layout(config: Config, x_ABK: Tensor, mode: str) -> int:
    """`load_tile`'s OWNED for this tensor."""
    if not config.owned or mode == "columns" or x_ABK.stride(2) != 1:
        return 0
    aligned = mode == "flat" or all(s % 8 == 0 for s in x_ABK.stride()[:2])
    return 2 * int(config.owned) - 1 + aligned


def _geometry(x_ABK: Tensor, out_ABK: Tensor | None, mode: str) -> tuple[int, ...]:
    """B, K and the strides for a kernel; a flat run needs none, and then all shapes share one compilation."""
    if mode == "flat":
        return (1,) * (5 if out_ABK is None else 8)
    return (*x_ABK.shape[1:], *x_ABK.stride(), *(() if out_ABK is None else out_ABK.stride()))


def qdq(
    x_ABK: Tensor, recipe: Recipe, out_ABK: Tensor, tensor_scale: Tensor | None, *, config: Config | None = None
) -> None:
    """Write Q(x_ABK) to out_ABK: same shape and dtype (bf16, fp16 or float32), any strides; out may be x itself.

    tensor_scale: NVFP4's, 0-d float32 on the device of x, else None. config: for tuning. Raises ValueError for what
    `unsupported` names.
    """
    if x_ABK.numel() == 0:
        return
    constants = recipe_constants(recipe, x_ABK.dtype)
    kind = _kind(recipe)
    unit = constants["G"] * constants["N"]
    if config is None:
        config = _default(x_ABK, kind)
    units = max(1, config.elements // unit)
    plan = tiling(x_ABK, out_ABK, unit, units)
    _qdq_kernel[(plan.programs,)](
        x_ABK, out_ABK, tensor_scale, recipe.of or 0.0, plan.count, *_geometry(x_ABK, out_ABK, plan.mode), **constants,
        MODE=plan.mode, MASK=plan.mask, M=units, OWNED=owned_layout(config, x_ABK, plan.mode), **config.options,
    )  # fmt: skip


def noisy_qdq(
    w_ABK: Tensor,
    recipe: Recipe,
    out_ABK: Tensor,
    key: tuple[int, int, int, int],
    std: float,
    tensor_scale: Tensor | None,
    *,
    config: Config | None = None,
) -> None:
    """Write Q(w + z·std) to out_ABK: z is `corrections.philox_normal`'s noise at each element's offset in memory.

    w_ABK: a contiguous matrix, perhaps with its axes moved; float32 w may go to a bf16 or fp16 out: the noised value is
    rounded to out's dtype, then quantized. key: (k0, k1, c2, c3), 32-bit words. std: absolute, in w's units; z·std and
    the sum are rounded to float32 each. tensor_scale: None, NVFP4 is not offered. Raises ValueError as `qdq`.
    """
    if recipe.base == "nvfp4" or tensor_scale is not None:
        raise ValueError("noisy_qdq: nvfp4's scale is of the noised tensor; add the noise first, then quantize")
    if w_ABK.numel() == 0:
        return
    constants = recipe_constants(recipe, out_ABK.dtype)
    unit = constants["G"] * constants["N"]
    if config is None:
        config = _default(w_ABK, _kind(recipe))
    units = max(1, config.elements // unit)
    plan = tiling(w_ABK, out_ABK, unit, units)
    words = (word - (word >> 31 << 32) for word in key)  # signed, so that their type does not depend on the value
    _noisy_qdq_kernel[(plan.programs,)](
        w_ABK, out_ABK, float(std), recipe.of or 0.0, plan.count, *_geometry(w_ABK, out_ABK, plan.mode), *words,
        **constants, MODE=plan.mode, MASK=plan.mask, M=units, OWNED=owned_layout(config, w_ABK, plan.mode),
        **config.options,
    )  # fmt: skip


def finite_amax(x_ABK: Tensor, recipe: Recipe, *, config: Config | None = None) -> Tensor:
    """max|x| over the blocks of x_ABK without a NaN or an Inf: 0-d float32 on its device; 0 where there is none."""
    out = torch.zeros((), dtype=torch.int32, device=x_ABK.device)
    if x_ABK.numel():
        n = format_of(recipe).block
        if config is None:
            config = _default(x_ABK, "amax")
        units = config.elements // n
        plan = tiling(x_ABK, None, n, units)
        _amax_kernel[(plan.programs,)](
            x_ABK, out, plan.count, *_geometry(x_ABK, None, plan.mode), N=n, MODE=plan.mode, MASK=plan.mask, M=units,
            **config.options,
        )  # fmt: skip
    return out.view(torch.float32)


def _along_columns(x_ABK: Tensor) -> bool:
    """Whether `tiling` reads it in columns."""
    _, b, k = x_ABK.stride()
    return x_ABK.shape[1] > 1 and abs(b) < abs(k)


def _default(x_ABK: Tensor, kind: str) -> Config:
    if _along_columns(x_ABK):
        kind = "columns+mbs" if "mbs" in kind or kind == "search" else "columns"
    return CONFIGS[kind]

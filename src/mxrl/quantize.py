"""The public operations: `fake_quantize` (quantize-dequantize), and the packed `quantize` / `dequantize`.

Both take a tensor of any float dtype, any shape and the axis that is blocked (the contraction axis). The arithmetic is
float32 whatever the dtype (float64 stays float64); the result is rounded once to the dtype of the input, and that
rounded tensor *is* the quantized tensor: training and rollout use the same one, and nobody quantizes it again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mxrl.ops import dispatch
from mxrl.ops.layout import as_abk, check_input, is_view_of
from mxrl.ops.pack import PackedPass
from mxrl.ops.qdq import format_of
from mxrl.recipes import Recipe
from mxrl.scaling import nvfp4_tensor_scale


def whole_tensor_scale(x_ABK: Tensor, recipe: Recipe, backend: str | None = None) -> Tensor | None:
    """NVFP4's float32 scale of a tensor, 0-d; None for other formats."""
    if recipe.base != "nvfp4":
        return None
    return nvfp4_tensor_scale(dispatch.operation("qdq", x_ABK, recipe, backend).finite_amax(x_ABK, recipe), recipe.rule)


@torch.no_grad()
def fake_quantize(
    x: Tensor,
    recipe: str | Recipe = "mxfp4",
    *,
    dim: int = -1,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Quantize and dequantize `x` along `dim` as an operand of `recipe`: same shape and dtype.

    x: bfloat16, float16, float32 or float64, any shape with at least one axis; blocks never straddle rows, the last
        block of a row may be ragged. recipe: its grammar or a Recipe; roles, noise and backward play no part here, and
        bf16 gives `x` back. out: written and returned if given (x itself is allowed). backend: see `mxrl.ops.dispatch`.
    A block with a NaN or an Inf becomes NaN; a finite input never gives an Inf. No gradient flows: see `mxrl.nn`.
    Under torch.compile it is one operator, whichever kernel serves it, and the graph stays whole.
    Raises TypeError for other dtypes, RecipeError for a recipe that can't be. Source: arXiv 2605.20402, section 2.
    """
    if torch.compiler.is_compiling():
        text = recipe if isinstance(recipe, str) else str(recipe)
        result = x if text.startswith("bf16") else _fake_quantize_operator(x.detach(), text, dim, backend)
        return result if out is None else out.copy_(result)
    recipe = Recipe.parse(recipe)
    dim = check_input(x, dim, "fake_quantize")
    if out is not None and (out.shape != x.shape or out.dtype != x.dtype):
        raise ValueError(f"fake_quantize: out is {tuple(out.shape)} {out.dtype}, x is {tuple(x.shape)} {x.dtype}")
    if not recipe.quantizes:
        return x if out is None else out.copy_(x)
    x_ABK = as_abk(x.detach(), dim)
    operation = dispatch.operation("qdq", x_ABK, recipe, backend)
    result = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    out_ABK = as_abk(result, dim)
    operation.qdq(x_ABK, recipe, out_ABK, whole_tensor_scale(x_ABK, recipe, backend))
    return result if is_view_of(out_ABK, result) else result.copy_(_from_abk(out_ABK, result.shape, dim))


@torch.library.custom_op("mxrl::fake_quantize", mutates_args=())
def _fake_quantize_operator(x: Tensor, recipe: str, dim: int, backend: str | None) -> Tensor:
    return fake_quantize(x, recipe, dim=dim, backend=backend)


@_fake_quantize_operator.register_fake
def _(x: Tensor, recipe: str, dim: int, backend: str | None) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.no_grad()
def fake_quantize_noisy(
    w: Tensor,
    recipe: str | Recipe,
    key: tuple[int, int, int, int],
    std: float,
    *,
    dim: int = -1,
    out: Tensor,
    backend: str | None = None,
) -> Tensor:
    """out = Q(cast(float32(w) + std · z)), z the noise of `key` by flat index: AQN before quantization, in one pass.

    w: one matrix, any float dtype. out: w's shape, in the compute dtype that the sum is cast to. key: of
    `mxrl.corrections.noise_key`. Arithmetic as in `philox_normal(...) * std`, added in float32 (float64 for float64).
    Raises ValueError for bf16 and for nvfp4, whose scale of the tensor would need a pass of its own.
    """
    recipe = Recipe.parse(recipe)
    dim = check_input(w, dim, "fake_quantize_noisy")
    if format_of(recipe).scale == "e4m3":
        raise ValueError(f"fake_quantize_noisy: {recipe} has one scale a tensor; add the noise, then fake_quantize")
    w_ABK, out_ABK = as_abk(w.detach().contiguous(), dim), as_abk(out, dim)
    operation = dispatch.operation("qdq", w_ABK, recipe, backend)
    operation.noisy_qdq(w_ABK, recipe, out_ABK, key, std, None)
    return out if is_view_of(out_ABK, out) else out.copy_(_from_abk(out_ABK, out.shape, dim))


def _from_abk(x_ABK: Tensor, shape: torch.Size, dim: int) -> Tensor:
    """[A, B, K] -> [..., K at dim, ...]."""
    return x_ABK.movedim(-1, 1).reshape(shape)


@dataclass(frozen=True)
class QuantizedTensor:
    """A packed tensor: what a 4-bit kernel would read. The blocked axis is moved last in every field.

    codes: uint8 [..., ceil(K/2)], two E2M1 codes a byte, the low nibble is the even index (MXFP8: [..., K]).
    scales: uint8 [..., ceil(K/block)], E8M0 (255 = NaN) or NVFP4's E4M3; int32 `(E8M0 << k) | mantissa` for e8m{k}.
    macro_mantissas: uint8 [..., ceil(K/macro)], MBS's k; None without MBS.
    tensor_scale: float32 0-d, NVFP4 only. residual: OF's second pass, None without.
    """

    codes: Tensor
    scales: Tensor
    macro_mantissas: Tensor | None
    tensor_scale: Tensor | None
    residual: QuantizedTensor | None
    shape: torch.Size
    dtype: torch.dtype
    dim: int
    recipe: Recipe

    @property
    def nbytes(self) -> int:
        parts = [self.codes, self.scales, self.macro_mantissas, self.tensor_scale]
        own = sum(p.numel() * p.element_size() for p in parts if p is not None)
        return own + (self.residual.nbytes if self.residual is not None else 0)

    @torch.no_grad()
    def dequantize(self, dtype: torch.dtype | None = None, *, backend: str | None = None) -> Tensor:
        """The values in `dtype` (default: the dtype that was quantized), equal to `fake_quantize` bit for bit.

        Into a narrower dtype than that, values saturate at its largest finite one.
        """
        out = torch.empty(self.shape, dtype=dtype or self.dtype, device=self.codes.device)
        passes = [_flat(self)] + ([_flat(self.residual)] if self.residual is not None else [])
        out_ABK = as_abk(out, self.dim)
        operation = dispatch.operation("pack", out_ABK, self.recipe, backend, dtype=self.dtype)
        operation.unpack(passes, self.recipe, out_ABK, self.dtype, self.tensor_scale)
        return out


def _flat(packed: QuantizedTensor) -> PackedPass:
    """The stored fields [..., n] as rows [R, n], empty tensors too."""
    parts = (packed.codes, packed.scales, packed.macro_mantissas)
    return PackedPass(*(None if t is None else t.reshape(t.shape[:-1].numel(), t.shape[-1]) for t in parts))  # type: ignore[arg-type]


@torch.no_grad()
def quantize(
    x: Tensor, recipe: str | Recipe = "mxfp4", *, dim: int = -1, backend: str | None = None
) -> QuantizedTensor:
    """Pack `x` along `dim` as `recipe` says; see QuantizedTensor and `fake_quantize` for shapes, dtypes and errors.

    Raises ValueError for bf16 and for mxfp4:ideal, whose unrounded scale has no packed form.
    """
    recipe = Recipe.parse(recipe)
    dim = check_input(x, dim, "quantize")
    format_of(recipe)
    if recipe.rule == "ideal":
        raise ValueError("quantize: mxfp4:ideal has an unrounded scale and no packed form; use fake_quantize")
    x_ABK = as_abk(x.detach(), dim)
    tensor_scale = whole_tensor_scale(x_ABK, recipe, backend)
    lead = [s for i, s in enumerate(x.shape) if i != dim]
    packed: QuantizedTensor | None = None
    for part in reversed(dispatch.operation("pack", x_ABK, recipe, backend).pack(x_ABK, recipe, tensor_scale)):
        packed = QuantizedTensor(
            codes=part.codes.view(*lead, part.codes.shape[-1]),
            scales=part.scales.view(*lead, part.scales.shape[-1]),
            macro_mantissas=None if part.mantissas is None else part.mantissas.view(*lead, part.mantissas.shape[-1]),
            tensor_scale=tensor_scale,
            residual=packed,
            shape=x.shape,
            dtype=x.dtype,
            dim=dim,
            recipe=recipe,
        )
    assert packed is not None
    return packed

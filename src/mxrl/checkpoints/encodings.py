"""How stored bytes become a weight's numbers. One class a format; each can decode any rows of its weight alone.

    Plain       w                       bfloat16, float16, float32, float64 as they are
    Gguf        ggml's blocks           by the `gguf` package's dequantizers
    Scaled      code · scale            FP8 or INT8 codes [N, K]; a scale a tensor, channel, group or block of both axes
    Float4      E2M1 · scale (·tensor)  two codes a byte, the low nibble first: MXFP4 (2^(e-127), 32), NVFP4 (E4M3, 16)
    Gptq        (code - zero) · scale   codes packed along K: qweight int32 [K·b/32, N]; groups by g_idx [K]
    Awq         (code - zero) · scale   codes packed along N, interleaved: qweight int32 [K, N/8]
    Packed      (code - zero) · scale   compressed-tensors: int32 [N, K·b/32], codes stored with 2^(b-1) added

Letters: N outputs, K the contraction axis, E experts, G = K / group. Everything but `Plain` is decoded to float32.
That is exact (code and scale have at most 24 significant bits together) for every format here but two: a float32 scale
is multiplied with one rounding (FP8 blocks, GGUF), and NVFP4's two scales are first combined with one rounding, in the
order of the library that writes them. A library that decodes to bfloat16 or float16 gives these numbers, rounded.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, fields
from typing import ClassVar

import torch
from torch import Tensor

from mxrl.checkpoints.tensors import Stored
from mxrl.elements import decode
from mxrl.formats import E2M1, E8M0_BIAS, E8M0_NAN


@dataclass(frozen=True)
class Encoding:
    """A weight of shape [..., N, K] (or [..., K, N]) as a file stores it."""

    shape: tuple[int, ...]
    codes: Stored
    quantized: ClassVar[bool] = True
    why_dim: ClassVar[str | None] = None  # set where the format itself says which axis is contracted: the last

    @property
    def dtype(self) -> str:
        """A short name of the stored type, for tables."""
        return self.codes.dtype

    @property
    def stored_as(self) -> str:
        """The stored type in words."""
        raise NotImplementedError

    def group(self, dim: int) -> int | None:
        """Elements along the contraction axis `dim` that share a scale; None where there are no scales."""
        raise NotImplementedError

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of the weight viewed as [-1, shape[-1]]."""
        raise NotImplementedError

    @property
    def parts(self) -> tuple[Stored, ...]:
        """The stored tensors it is made of, the codes first."""
        return tuple(v for v in (getattr(self, f.name) for f in fields(self)) if isinstance(v, Stored))

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


@dataclass(frozen=True)
class Plain(Encoding):
    """Floats as they are; from GGUF they come as float32 (its F64 is rounded)."""

    quantized: ClassVar[bool] = False
    as_float32: bool = False

    @property
    def stored_as(self) -> str:
        return {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}[self.dtype]

    def group(self, dim: int) -> int | None:
        return None

    def rows(self, start: int, stop: int) -> Tensor:
        rows = self.codes.rows(start, stop)
        return rows.float() if self.as_float32 else rows


@dataclass(frozen=True)
class Gguf(Encoding):
    """One of ggml's block types: every row is a sequence of blocks, with their scales inside."""

    @property
    def stored_as(self) -> str:
        block = self.group(-1)
        return f"GGUF {self.dtype}, {'super-blocks' if block == 256 else 'blocks'} of {block} with their scales"

    def group(self, dim: int) -> int:
        import gguf

        return gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[self.dtype]][0]

    def rows(self, start: int, stop: int) -> Tensor:
        import gguf

        packed = self.codes.rows(start, stop).numpy()
        values = gguf.dequantize(packed, gguf.GGMLQuantizationType[self.dtype])
        return torch.from_numpy(values).view(-1, self.shape[-1])


@dataclass(frozen=True)
class Scaled(Encoding):
    """8-bit codes [..., N, K], each worth code · scale; `scale` is a grid [..., ceil(N/n), ceil(K/k)], block = (n, k).

    Sources: DeepSeek-V3's README_WEIGHTS ("weight_scale_inv", 128 × 128); compressed-tensors' naive-, float- and
    int-quantized and mxfp8 formats; transformers' finegrained FP8.
    """

    scale: Stored
    block: tuple[int, int]
    zero: Stored | None = None  # zero points on the scale's grid (asymmetric INT8)

    @property
    def stored_as(self) -> str:
        what = {"F8_E4M3": "FP8 E4M3", "F8_E5M2": "FP8 E5M2", "I8": "INT8"}[self.dtype]
        (n, k), (rows, width) = self.block, self.shape[-2:]
        scales = f"{_FLOAT_WORDS[self.scale.dtype]} scales"
        if n >= rows and k >= width:
            return f"{what}, one {scales[:-1]} a tensor"
        if n == 1 and k >= width:
            return f"{what}, one {scales[:-1]} a channel"
        return f"{what}, {f'groups of {k}' if n == 1 else f'blocks of {n}×{k}'}, {scales}"

    def group(self, dim: int) -> int:
        return min(self.block[dim], self.shape[dim])

    def rows(self, start: int, stop: int) -> Tensor:
        (n, k), (height, width) = self.block, self.shape[-2:]
        row = torch.arange(start, stop)
        grid_rows = -(-height // n)
        at = row // height * grid_rows + row % height // n  # the row of the scale grid, experts one after another
        codes = self.codes.rows(start, stop).float()
        if self.zero is not None:
            codes -= _spread(self.zero.whole().view(-1, -(-width // k))[at].float(), k, width)
        return codes.mul_(_spread(_scales(self.scale).view(-1, -(-width // k))[at], k, width))


@dataclass(frozen=True)
class Float4(Encoding):
    """E2M1 codes, two a byte, the low nibble first; a scale for every `size` elements of the last axis.

    `scale` is E8M0 (uint8, 2^(e - 127), 255 is NaN) or E4M3; `tensor_scale` is NVFP4's float32, which divides the
    scales (compressed-tensors) or multiplies them (`multiplies`: NVIDIA's ModelOpt).
    Sources: OCP Microscaling Formats v1.0; gpt-oss (`*_blocks` [E, N, K/32, 16]); compressed-tensors' `weight_packed`.
    """

    scale: Stored
    size: int
    where: str
    tensor_scale: Stored | None = None
    multiplies: bool = False
    name: str = "MXFP4"

    @property
    def why_dim(self) -> str:  # type: ignore[override]
        return self.where

    @property
    def dtype(self) -> str:
        return self.name

    @property
    def stored_as(self) -> str:
        kind = "E4M3 scales and one float32 a tensor" if self.tensor_scale is not None else "E8M0 scales"
        return f"{self.name} blocks of {self.size}, {kind}"

    def group(self, dim: int) -> int:
        return self.size

    def rows(self, start: int, stop: int) -> Tensor:
        width = self.shape[-1]
        per_row = self.codes.numel // math.prod(self.shape[:-1])  # bytes a row: [K/32, 16] or [K/2]
        per_code_row = per_row // self.codes.shape[-1]
        packed = self.codes.rows(start * per_code_row, stop * per_code_row).view(torch.uint8).reshape(-1)
        values = _nibble_pairs().index_select(0, packed.int()).view(-1, width // self.size, self.size)
        groups = width // self.size
        scale_rows = groups // self.scale.shape[-1]
        raw = self.scale.rows(start * scale_rows, stop * scale_rows)
        scales = _e8m0(raw) if self.scale.dtype in ("U8", "F8_E8M0") else raw.float()
        if self.tensor_scale is not None:
            factor = self.tensor_scale.whole().float()
            if factor.numel() > 1:  # one for each expert of a stack
                factor = factor.reshape(-1)[torch.arange(start, stop) // self.shape[-2]].unsqueeze(-1)
            scales = scales * factor if self.multiplies else scales / factor
        return values.mul_(scales.view(-1, groups, 1)).view(-1, width)


@dataclass(frozen=True)
class Gptq(Encoding):
    """qweight int32 [K·b/32, N], scales [G, N], qzeros int32 [G, N·b/32], g_idx int32 [K]: which group a column is in.

    Codes lie in a word from the lowest bits up. `plus_one`: format v1, whose words hold every zero point less one; it
    is added to the packed words, which undoes the subtraction that GPTQModel makes there (a zero point of 0 borrows
    from its neighbour and gets it back). Source: AutoGPTQ and GPTQModel, `convert_gptq_v1_to_v2_format`.
    """

    scale: Stored
    zero: Stored | None
    order: Stored | None
    bits: int
    plus_one: bool
    shuffled: bool = False  # act-order: the columns of a group do not lie side by side
    label: str = "GPTQ"
    why_dim: ClassVar[str] = "GPTQ's packed [in, out]"

    @property
    def dtype(self) -> str:
        return f"{self.label} INT{self.bits}"

    @property
    def stored_as(self) -> str:
        order = ", columns grouped in activation order" if self.shuffled else ""
        return f"{self.label} int{self.bits}, groups of {self.group(-1)}{order}"

    def group(self, dim: int) -> int:
        return -(-self.shape[-1] // self.scale.shape[0])

    def rows(self, start: int, stop: int) -> Tensor:
        width = self.shape[-1]
        shifts = torch.arange(0, 32, self.bits, dtype=torch.int32)
        codes = _unpack(self.codes.whole()[:, None, start:stop], shifts[:, None]).reshape(-1, stop - start)[:width]
        order = self.order.whole().long() if self.order is not None else torch.arange(width) // self.group(-1)
        step = len(shifts)
        first = start // step
        if self.zero is None:
            codes -= 1 << (self.bits - 1)
        else:
            words = self.zero.whole()[:, first : -(-stop // step)]
            if self.plus_one:
                words = words + _ones(self.bits)
            zeros = _unpack(words[:, :, None], shifts).reshape(len(words), -1)
            codes -= zeros[:, start - first * step : stop - first * step][order]
        scales = self.scale.whole()[:, start:stop].float()
        return codes.float().mul_(scales[order]).T.contiguous()


@dataclass(frozen=True)
class Awq(Encoding):
    """qweight int32 [K, N/8], scales [G, N], qzeros int32 [G, N/8]: word j holds outputs 8j + (0, 2, 4, 6, 1, 3, 5, 7),
    from the lowest bits up. Source: AutoAWQ's GEMM version.
    """

    scale: Stored
    zero: Stored | None
    label: str = "AWQ"
    why_dim: ClassVar[str] = "AWQ's packed [in, out]"
    _SHIFTS: ClassVar[tuple[int, ...]] = tuple(4 * i for i in (0, 4, 1, 5, 2, 6, 3, 7))  # of outputs 8j + 0 … 7

    @property
    def dtype(self) -> str:
        return f"{self.label} INT4"

    @property
    def stored_as(self) -> str:
        return f"{self.label} int4, groups of {self.group(-1)}"

    def group(self, dim: int) -> int:
        return self.shape[-1] // self.scale.shape[0]

    def rows(self, start: int, stop: int) -> Tensor:
        first, last = start // 8, -(-stop // 8)
        wanted = slice(start - first * 8, stop - first * 8)
        shifts = torch.tensor(self._SHIFTS, dtype=torch.int32)
        size = self.group(-1)

        def unpacked(stored: Stored) -> Tensor:
            words = stored.whole()[:, first:last, None]
            return (_unpack(words, shifts, bits=4)).reshape(len(words), -1)[:, wanted]

        codes = unpacked(self.codes)
        codes = codes - (unpacked(self.zero).repeat_interleave(size, dim=0) if self.zero is not None else 8)
        scales = self.scale.whole()[:, start:stop].float().repeat_interleave(size, dim=0)
        return codes.float().mul_(scales).T.contiguous()


@dataclass(frozen=True)
class Packed(Encoding):
    """compressed-tensors' pack-quantized: weight_packed int32 [..., N, K·b/32], weight_scale [..., N, G] (or [1]),
    weight_zero_point int32 [N·b/32, G] packed along N, weight_g_idx [K] where columns were grouped in activation order.
    """

    scale: Stored
    zero: Stored | None
    order: Stored | None
    bits: int
    why_dim: ClassVar[str] = "compressed-tensors' packed [out, in]"

    @property
    def dtype(self) -> str:
        return f"INT{self.bits}"

    @property
    def stored_as(self) -> str:
        if self.scale.numel == 1:
            return f"int{self.bits}, one scale a tensor"
        size, order = self.group(-1), ", columns grouped in activation order" if self.order is not None else ""
        return f"int{self.bits}, " + (f"groups of {size}{order}" if size < self.shape[-1] else "one scale a channel")

    def group(self, dim: int) -> int:
        return self.shape[-1] if self.scale.numel == 1 else self.shape[-1] // self.scale.shape[-1]

    def rows(self, start: int, stop: int) -> Tensor:
        width, middle = self.shape[-1], 1 << (self.bits - 1)
        shifts = torch.arange(0, 32, self.bits, dtype=torch.int32)
        codes = _unpack(self.codes.rows(start, stop).unsqueeze(-1), shifts).flatten(1)[:, :width] - middle
        if self.scale.numel == 1:
            return codes.float().mul_(self.scale.whole().float().reshape(1, 1))
        order = self.order.whole().long() if self.order is not None else torch.arange(width) // self.group(-1)
        if self.zero is not None:
            step = len(shifts)
            first = start // step
            zeros = _unpack(self.zero.whole()[first : -(-stop // step), None], shifts[:, None]).flatten(0, 1) - middle
            codes -= zeros[start - first * step : stop - first * step][:, order]
        return codes.float().mul_(self.scale.rows(start, stop).float()[:, order])


_FLOAT_WORDS = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E8M0": "E8M0",
    "U8": "E8M0",
    "F8_E4M3": "E4M3",
}


@functools.cache
def _nibble_pairs() -> Tensor:
    """float32 [256, 2]: the two E2M1 values of a byte, the low nibble's first."""
    byte = torch.arange(256, dtype=torch.uint8)
    return decode(torch.stack([byte & 0xF, byte >> 4], dim=-1), E2M1, torch.float32)


@functools.cache
def _powers() -> Tensor:
    """float32 [256]: 2^(e - 127), NaN at 255; the first is a subnormal number."""
    out = torch.ldexp(torch.ones(256, dtype=torch.float64), torch.arange(256) - E8M0_BIAS).float()
    out[E8M0_NAN] = float("nan")
    return out


def _e8m0(codes: Tensor) -> Tensor:
    return _powers()[codes.view(torch.uint8).long()]


def _scales(stored: Stored) -> Tensor:
    whole = stored.whole()
    return _e8m0(whole) if stored.dtype in ("U8", "F8_E8M0") else whole.float()


def _spread(grid: Tensor, size: int, width: int) -> Tensor:
    """[n, ceil(width / size)] -> [n, width], or [n, 1] where one value serves the whole row."""
    return grid if grid.shape[-1] == 1 else grid.repeat_interleave(size, dim=-1)[:, :width]


def _unpack(words: Tensor, shifts: Tensor, *, bits: int = 0) -> Tensor:
    """int32 codes of `bits` bits (by default what the shifts are apart), in their places by broadcasting."""
    bits = bits or 32 // shifts.numel()
    return (words >> shifts) & ((1 << bits) - 1)


def _ones(bits: int) -> int:
    """The word whose every code is 1."""
    return sum(1 << i for i in range(0, 32, bits))

"""torchao's MXTensor against ours. What we call `ceil` it calls RCEIL; its CEIL is another rule.

RCEIL equals ours on bf16; in float32 its log2 misses the float just above 6·2^k. FLOOR and EVEN equal ours.
"""

from __future__ import annotations

import math

import pytest
import torch
from oracles.bits import assert_same

from mxrl import fake_quantize, quantize

pytest.importorskip("torchao")
from torchao.prototype.mx_formats.config import ScaleCalculationMode as Mode
from torchao.prototype.mx_formats.mx_tensor import MXTensor
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

FP4, FP8 = torch.float4_e2m1fn_x2, torch.float8_e4m3fn
MODES = {"mxfp4": Mode.RCEIL, "mxfp4:floor": Mode.FLOOR, "mxfp4:even": Mode.EVEN}


def theirs(x: torch.Tensor, mode: Mode, element: torch.dtype = FP4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    packed = MXTensor.to_mx(x, element, 32, scaling_mode=mode)
    codes = packed.qdata.view(torch.uint8)
    return packed.dequantize(x.dtype), packed.scale.view(torch.uint8), codes


def gaussian(sigma: float, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(256, 2048, generator=torch.Generator().manual_seed(2)) * sigma).to(dtype)


def every_bf16_maximum(first: int = 3) -> torch.Tensor:
    """Each bf16 maximum from exponent field `first` on (smaller ones clamp the scale), beside fractions of it."""
    m = torch.arange(first << 7, 0x7E00, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    parts = torch.tensor([1.0, -0.5, 0.26, 0.13, -0.07, 0.03, 0.9, -0.77] * 4)
    return (m[:, None] * parts).to(torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sigma", [1.0, 0.02])
@pytest.mark.parametrize("text", MODES)
def test_equal_bit_for_bit(text, sigma, dtype):
    """On ordinary float32 data too: the float above 6·2^k turns up once in two million blocks."""
    x = gaussian(sigma, dtype)
    values, scales, codes = theirs(x, MODES[text])
    packed = quantize(x, text)
    assert_same(packed.scales, scales)
    assert_same(packed.codes, codes)
    assert_same(fake_quantize(x, text), values)


@pytest.mark.parametrize("text", MODES)
def test_every_bf16_maximum(text):
    x = every_bf16_maximum()
    values, scales, codes = theirs(x, MODES[text])
    packed = quantize(x, text)
    assert_same(packed.scales, scales)
    assert_same(packed.codes, codes)
    assert_same(fake_quantize(x, text), values)


def test_mxfp8_rceil():
    for x in (gaussian(1.0, torch.bfloat16), every_bf16_maximum(9), gaussian(0.02, torch.float32)):
        values, scales, codes = theirs(x, Mode.RCEIL, FP8)
        packed = quantize(x, "mxfp8")
        assert_same(packed.scales, scales)
        assert_same(packed.codes, codes)
        assert_same(fake_quantize(x, "mxfp8"), values)


def test_they_differ_just_above_six():
    """float32: log2 of 2^5 (1 + 2^-23) rounds to 5, so the scale is one too low and the maximum is clipped."""
    above = torch.nextafter(torch.tensor(6.0), torch.tensor(math.inf))
    x = torch.zeros(3, 32)
    x[:, 0] = torch.stack([above * 2.0**5, above * 2.0**-10, above * 2.0**50])
    _, scales, _ = theirs(x, Mode.RCEIL)
    ours = quantize(x).scales
    assert ours.flatten().tolist() == [133, 118, 178]
    assert (ours - scales).flatten().tolist() == [1, 1, 1]


def test_they_differ_under_the_least_scale():
    """Where m / 448 falls to 2^-127 and below, RCEIL multiplies by 1 and the block vanishes; ours divides by 2^-127."""
    x = torch.full((1, 32), 2.0**-122)
    values, scales, _ = theirs(x, Mode.RCEIL, FP8)
    assert scales.item() == quantize(x, "mxfp8").scales.item() == 0
    assert (values == 0).all()
    assert_same(fake_quantize(x, "mxfp8"), x)
    x = torch.full((1, 32), 2.0**-126)  # the same for FP4
    assert (theirs(x, Mode.RCEIL)[0] == 0).all()
    assert_same(fake_quantize(x), x)


def test_their_ceil_is_another_rule():
    """2^ceil(log2 m) - 2: one more than ours for a maximum in (1, 1.5]·2^e, equal for the rest."""
    x = torch.zeros(4, 32)
    x[:, 0] = torch.tensor([4.0, 5.0, 6.0, 7.0])
    _, scales, _ = theirs(x, Mode.CEIL)
    assert (scales - quantize(x).scales).flatten().tolist() == [0, 1, 1, 0]


def test_nvfp4_scales_and_decoding():
    """Two levels: the same tensor scale and block codes, and where the element codes are equal, equal values."""
    x = gaussian(1.0, torch.float32)
    packed = quantize(x, "nvfp4")
    scale = per_tensor_amax_to_scale(x.abs().max())
    assert packed.tensor_scale is not None and packed.tensor_scale.item() == scale.item()
    other = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=scale)
    assert_same(packed.scales, other.scale.view(torch.uint8))
    same = packed.codes == other.qdata.view(torch.uint8)  # theirs multiplies by a reciprocal: a tie may break
    assert same.double().mean().item() > 0.9999
    got, want = fake_quantize(x, "nvfp4"), other.dequantize(torch.float32)
    both = torch.stack([same, same], -1).flatten(-2)
    assert_same(got[both] + 0.0, want[both] + 0.0)


def test_they_differ_on_a_small_nvfp4_block():
    """Their least block scale is 2^-6 (E4M3's least normal), ours 2^-9 (its least subnormal): small blocks live."""
    x = torch.zeros(128, 32)
    x[:, 0], x[:, 16:] = 2688.0, 6 * 2.0**-8
    other = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=per_tensor_amax_to_scale(x.abs().max()))
    assert other.scale.float()[0, 1] == 2.0**-6 and quantize(x, "nvfp4").scales[0, 1].item() == 2  # 2 · 2^-9
    assert_same(fake_quantize(x, "nvfp4"), x)

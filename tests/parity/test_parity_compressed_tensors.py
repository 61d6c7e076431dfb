"""compressed-tensors is exact for `even`, its MXFP4 rule; transformers decodes our packed bytes as gpt-oss blocks."""

from __future__ import annotations

import pytest
import torch
from oracles.bits import assert_same

from mxrl import fake_quantize, quantize

pytest.importorskip("compressed_tensors")
from compressed_tensors.quantization.lifecycle.forward import fake_quantize as their_fake_quantize
from compressed_tensors.quantization.quant_scheme import MXFP4, NVFP4
from compressed_tensors.quantization.utils import calculate_qparams


def theirs(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    args = MXFP4["weights"]
    blocks = x.unflatten(-1, (-1, 32))
    scale, zero = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args)
    return their_fake_quantize(x, scale, zero, args), scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sigma", [1.0, 0.02])
def test_even(sigma, dtype):
    x = (torch.randn(128, 1024, generator=torch.Generator().manual_seed(5)) * sigma).to(dtype)
    values, scale = theirs(x)
    packed = quantize(x, "mxfp4:even")
    assert_same(packed.scales.view(torch.float8_e8m0fnu).float(), scale.float())
    assert_same(fake_quantize(x, "mxfp4:even") + 0.0, values + 0.0)  # theirs loses the sign of zeros


def test_even_at_the_boundary():
    """1.75·2^e and its neighbours in bf16."""
    peaks = torch.tensor([f * 2.0**e for e in (-20, 0, 3) for f in (1.7421875, 1.75, 1.7578125, 1.0, 1.5)])
    x = (peaks[:, None] * torch.linspace(1, -1, 32)).to(torch.bfloat16)
    values, _ = theirs(x)
    assert_same(fake_quantize(x, "mxfp4:even") + 0.0, values + 0.0)


def test_even_is_not_ceil():
    x = torch.zeros(1, 32)
    x[0, 0] = 6.5  # 1.625 · 2^2: even keeps s = 1 and clips to 6, ceil takes s = 2
    assert theirs(x)[0][0, 0] == 6.0 == fake_quantize(x, "mxfp4:even")[0, 0]
    assert fake_quantize(x, "mxfp4")[0, 0] == 6.0 and quantize(x).scales[0, 0] == 128


def test_nvfp4():
    """Their global scale is the reciprocal of ours, fl(2688 / A): the same block codes, values within 3 ulp."""
    x = torch.randn(128, 1024, generator=torch.Generator().manual_seed(6))
    args = NVFP4["weights"]
    blocks = x.unflatten(-1, (-1, 16))
    global_scale = 2688 / x.abs().max()
    scale, zero = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args, global_scale=global_scale)
    values = their_fake_quantize(x, scale.float(), zero.float(), args, global_scale=global_scale)
    packed = quantize(x, "nvfp4")
    assert_same(packed.scales.view(torch.float8_e4m3fn).float(), scale.float())
    got = fake_quantize(x, "nvfp4")
    ulp = torch.nextafter(values.abs(), torch.tensor(torch.inf)) - values.abs()
    near = (got - values).abs() <= 3 * ulp
    assert near.double().mean().item() > 1 - 1e-5  # a quotient on a tie may go either way


def test_transformers_decodes_our_bytes():
    """gpt-oss's layout [..., blocks, 16 bytes] with E8M0 scales: its own decoder returns our values, transposed."""
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    x = (torch.randn(2, 64, 96, generator=torch.Generator().manual_seed(7)) * 0.02).to(torch.bfloat16)
    x[0, 0, :32] = 0.0
    packed = quantize(x)
    blocks = packed.codes.unflatten(-1, (-1, 16))
    decoded = mxfp4.convert_moe_packed_tensors(blocks, packed.scales, dtype=torch.bfloat16)
    assert_same(decoded.transpose(-1, -2).contiguous(), fake_quantize(x))

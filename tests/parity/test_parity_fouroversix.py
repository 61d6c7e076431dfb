"""fouroversix (PyTorch backend) against ours: mxfp4 bit for bit on finite data, NVFP4 and 4/6 in codes and scales.

Its reference quantizer is independent of ours: the scale comes from the bits of fl(m / 6), elements from three
roundings and masks. What differs is asserted too, so that a new version that changes it is noticed.

NVFP4 there and here (fl: one float32 rounding, A the tensor's maximum, m the block's, Q = 2688 or, for 4/6, 1536):

    scale code   theirs e4m3(fl(fl(m / 6) · fl(Q / A)))               ours e4m3(fl(fl(m / 6) / fl(A / Q)))
    element      theirs RNE(fl(x · fl(1 / fl(fl(1 / fl(Q / A)) · sc))))   ours RNE(fl(x / fl(sc · fl(A / Q))))
    value        theirs fl(fl(g sc A) / Q)                            ours fl(g · fl(sc · fl(A / Q)))
"""

from __future__ import annotations

import pytest
import torch
from oracles.bits import assert_same

from mxrl import fake_quantize, quantize

fouroversix = pytest.importorskip("fouroversix", reason="fouroversix is installed apart (make install does it)")
from fouroversix.quantize.dequantize_utils import from_blocked  # noqa: E402

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def theirs(x: torch.Tensor, dtype: str, rule: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(values in x's dtype, scale bytes [R, B], code bytes [R, K/2]) of a 2-D tensor."""
    config = fouroversix.QuantizationConfig(dtype=dtype, scale_rule=rule, backend="pytorch")
    packed = fouroversix.quantize_to_fp4(x, config)
    values = fouroversix.dequantize(packed, dtype=x.dtype, intermediate_dtype=torch.float32)
    rows, columns = packed.padded_shape
    blocks = columns // config.dtype.block_size
    scales = from_blocked(packed.scale_factors, (rows, blocks)).view(torch.uint8)
    k = x.shape[1] // config.dtype.block_size
    return values, scales[: x.shape[0], :k], packed.values[: x.shape[0], : x.shape[1] // 2]


def gaussian(rows: int, columns: int, sigma: float, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return (torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * sigma).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sigma", [1.0, 0.02])
def test_mxfp4_is_equal_bit_for_bit(sigma, dtype):
    x = gaussian(256, 1024, sigma, dtype)
    values, scales, codes = theirs(x, "mxfp4", "static_6")
    packed = quantize(x)
    assert_same(packed.scales, scales)
    assert_same(packed.codes, codes)
    assert_same(fake_quantize(x), values)


def test_mxfp4_at_the_boundaries():
    """6·2^k and its neighbours, all code values and ties: a maximum in each block of 32."""
    peaks = torch.tensor([6 * 2.0**e for e in range(-100, 100)])
    inf = torch.tensor(torch.inf)
    peaks = torch.cat([peaks, torch.nextafter(peaks, inf), torch.nextafter(peaks, -inf)])[:, None]
    parts = torch.tensor(
        [1.0, *(t / 6 for t in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 0.5, 1, 1.5, 2, 3, 4)), *[0.3] * 18]
    )
    x = torch.cat(
        [peaks * parts, -peaks * parts, peaks, peaks.new_zeros(len(peaks), 31), peaks * parts.flip(0)], dim=-1
    )
    assert x.shape[1] == 128
    values, scales, _ = theirs(x, "mxfp4", "static_6")
    assert_same(quantize(x).scales, scales)
    assert_same(fake_quantize(x) + 0.0, values + 0.0)  # they lose the sign of a -0.0 that comes in


def test_they_differ_on_a_zero_block():
    """All zeros decode to a tiny number there (their 0 / 0 is NaN, its code 6): zeros here, with code 0."""
    x = torch.zeros(128, 128)
    x[:, 64:] = 1.0
    values, _, _ = theirs(x, "mxfp4", "static_6")
    assert (values[:, :64] != 0).all() and values[:, :64].abs().max() < 1e-37
    assert_same(fake_quantize(x), x)
    assert (quantize(x).scales[:, :2] == 0).all() and (quantize(x).codes[:, :32] == 0).all()


def test_they_differ_on_nan():
    """A NaN block decodes to something finite there; here it stays NaN, and says so in its scale."""
    x = gaussian(128, 128, 1.0, torch.float32)
    x[3, 5] = torch.nan
    values, _, _ = theirs(x, "mxfp4", "static_6")
    assert values[3, :32].isfinite().any()
    assert fake_quantize(x)[3, :32].isnan().all() and quantize(x).scales[3, 0] == 255
    keep = torch.ones(128, 128, dtype=torch.bool)
    keep[3, :32] = False
    assert_same(fake_quantize(x)[keep], values[keep])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("text", "rule"), [("nvfp4", "static_6"), ("nvfp4:4over6", "mse")])
def test_nvfp4(text, rule, dtype):
    """Scale codes (with 4/6: the choice) are equal; elements too, but for ties that their reciprocal breaks.

    Values, where the element is equal: within 2 ulp in float32, one in 16 bits, where all but a few of bf16 are equal.
    (g·sc·A / Q has few bits when A has few, so it may lie on a tie of fp16: we round A / Q first and miss the tie.)
    """
    for sigma in (1.0, 0.02):
        x = gaussian(256, 1024, sigma, dtype, seed=1)
        values, scales, codes = theirs(x, "nvfp4", rule)
        packed = quantize(x, text)
        assert_same(packed.scales, scales)
        different = torch.stack([(packed.codes ^ codes) & 15, (packed.codes ^ codes) >> 4], -1).flatten(-2) != 0
        assert different.double().mean().item() < (2e-3 if dtype != torch.float32 else 1e-6)
        got = fake_quantize(x, text)
        least, step = torch.finfo(dtype).smallest_normal, torch.finfo(dtype).eps
        ulp = step * 2.0 ** values.double().abs().clamp(min=least).log2().floor()
        limit = 2 if dtype == torch.float32 else 1
        assert ((got.double() - values.double()).abs() <= limit * ulp)[~different].all()
        if dtype != torch.float32:
            equal = (got == values)[~different].double().mean().item()
            assert equal > (0.9999 if dtype == torch.bfloat16 else 0.95)


def test_nvfp4_ties_are_ours():
    """In exact arithmetic x / s is a tie for each element that differs: their reciprocal rounds to one side of it."""
    x = gaussian(512, 1024, 0.02, torch.bfloat16, seed=1)
    _, _, codes = theirs(x, "nvfp4", "static_6")
    packed = quantize(x, "nvfp4")
    assert packed.tensor_scale is not None
    different = torch.stack([(packed.codes ^ codes) & 15, (packed.codes ^ codes) >> 4], -1).flatten(-2) != 0
    assert different.any(), "this data was to show the difference"
    s = packed.scales.view(torch.float8_e4m3fn).float() * packed.tensor_scale  # one rounding, as stored
    ratio = (x.double() / s.double().repeat_interleave(16, -1)).abs()[different]
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=torch.float64)
    assert ((ratio[:, None] / ties - 1).abs().amin(-1) < 2.0**-22).all()


def test_nvfp4_underflowing_blocks():
    """A block far below the tensor's maximum: their E4M3 scale is 0 and the block vanishes; ours is at least 2^-9."""
    x = torch.zeros(128, 128)
    x[:, 0], x[:, 16:32] = 6000.0, 6000.0 * 2.0**-20
    values, _, _ = theirs(x, "nvfp4", "static_6")
    assert (values[:, 16:32] == 0).all()
    assert (quantize(x, "nvfp4").scales[:, 1] == 1).all()
    s = 2.0**-9 * 6000 / 2688
    assert (6000 * 2.0**-20 / s) < 2.0  # so it is nearest to 1.5 s or so, not to 0
    assert (fake_quantize(x, "nvfp4")[:, 16:32] > 0).all()

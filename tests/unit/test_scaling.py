"""Block maximum -> scale, where it can go wrong: every boundary of every binade, and codes back to values."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from oracles import scalar

from mxrl import quantize
from mxrl.formats import MXFP4, MXFP8, NVFP4
from mxrl.scaling import block_scale, nvfp4_tensor_scale, scale_from_code

INF = torch.tensor(math.inf)


def boundaries(f: float) -> torch.Tensor:
    """f · 2^e of every binade of float32, and its two neighbours."""
    m = torch.tensor([f * 2.0**e for e in range(-126, 127)])
    return torch.stack([torch.nextafter(m, -INF), m, torch.nextafter(m, INF)])


def codes_of(m: torch.Tensor, text: str) -> list[int]:
    """Each maximum alone in a row."""
    return quantize(m.reshape(-1, 1), text).scales[:, 0].tolist()


@pytest.mark.parametrize(
    ("text", "f"),
    [("mxfp4", 1.5), ("mxfp4:floor", 1.0), ("mxfp4:even", 1.75), ("mxfp8", 1.75), ("mxfp4", 1.0), ("mxfp4:even", 1.5)],
)
def test_every_binade_at_the_boundary(text, f):
    """From the bits: a float32 log2 is one too low just above 6·2^k, once in two million blocks of ordinary data."""
    base, _, rule = text.partition(":")
    m = boundaries(f)
    want = [scalar.mx_exponent(Fraction(v), base, rule or "ceil") + 127 for v in m.flatten().tolist()]
    assert codes_of(m, text) == want


def test_ceil_steps_exactly_above_six():
    """6·2^k takes 2^k, the next float 2^(k+1): the definition, without the oracle."""
    below, at, above = boundaries(1.5)
    assert codes_of(at, "mxfp4") == codes_of(below, "mxfp4")
    up = [b - a for a, b in zip(codes_of(at, "mxfp4"), codes_of(above, "mxfp4"), strict=True)]
    clamped = 2  # 2^-128 and 2^-127 both give code 0 and 1: the least exponents are not free to step
    assert set(up[clamped:]) == {1}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("text", ["mxfp4", "mxfp4:floor", "mxfp4:even", "mxfp8", "mxfp4:e8m3"])
def test_every_positive_value_of_a_16_bit_dtype(text, dtype):
    base, _, rule = text.partition(":")
    bits = torch.arange(1, 0x7F80 if dtype == torch.bfloat16 else 0x7C00, dtype=torch.int32).to(torch.int16)
    m = bits.view(dtype)
    if rule == "e8m3":
        want = [scalar.e8m_scale(Fraction(v), 3)[1] for v in m.tolist()]
    else:
        want = [scalar.mx_exponent(Fraction(v), base, rule or "ceil") + 127 for v in m.tolist()]
    assert codes_of(m, text) == want


@pytest.mark.parametrize("k", range(1, 9))
def test_e8m_is_the_smallest_that_does_not_clip(k):
    """Around every step of the mantissa: s >= m / 6, and the next smaller scale would not be."""
    steps = torch.tensor([6 * (1 + j / 2**k) * 2.0**e for e in (-100, -3, 0, 90) for j in range(2**k)])
    m = torch.cat([steps, torch.nextafter(steps, INF), torch.nextafter(steps, -INF)])
    scale = block_scale(m, MXFP4, f"e8m{k}")
    for value, s, code in zip(m.tolist(), scale.value.tolist(), scale.code.tolist(), strict=True):
        assert Fraction(s) >= Fraction(value) / 6
        smaller = code - 1  # codes are ordered as the scales are
        assert (1 + Fraction(smaller % 2**k, 2**k)) * scalar.pow2((smaller >> k) - 127) < Fraction(value) / 6
    assert (scale_from_code(scale.code, MXFP4, f"e8m{k}", torch.float32, None) == scale.value).all()


@pytest.mark.parametrize(("fmt", "rule"), [(MXFP4, "ceil"), (MXFP8, "ceil"), (MXFP4, "e8m3")])
def test_codes_decode_to_the_scales(fmt, rule):
    m = torch.cat([boundaries(1.3).flatten(), torch.tensor([0.0, math.nan, math.inf, 2.0**-149])])
    for dtype in (torch.float32, torch.float64):
        scale = block_scale(m.to(dtype), fmt, rule)
        back = scale_from_code(scale.code, fmt, rule, dtype, None)
        assert torch.equal(back.isnan(), m.isnan() | m.isinf())
        assert torch.equal(back[~back.isnan()], scale.value[~back.isnan()])


def test_zero_nan_and_clamped():
    scale = block_scale(torch.tensor([0.0, math.nan, math.inf, 2.0**-140, 1.0]), MXFP4, "ceil")
    assert scale.code.tolist() == [0, 255, 255, 0, 125]
    assert scale.clamped.tolist() == [False, False, False, True, False]


def test_float64_clamps_to_the_range_of_e8m0():
    m = torch.tensor([1e300, 1e-300, 6 * 2.0**127, 6 * 2.0**128], dtype=torch.float64)
    scale = block_scale(m, MXFP4, "ceil")
    assert scale.code.tolist() == [254, 0, 254, 254]
    assert scale.clamped.tolist() == [True, True, False, True]


def test_nvfp4_two_levels():
    """tensor scale = amax / (6·448), float32 whatever the input; 4/6 leaves the block scale room for 1.5 times."""
    for dtype in (torch.float32, torch.float64):
        amax = torch.tensor(2688.0, dtype=dtype)
        assert nvfp4_tensor_scale(amax, "").item() == 1.0 and nvfp4_tensor_scale(amax, "").dtype == torch.float32
        assert nvfp4_tensor_scale(amax, "4over6").item() == 1.75
    assert nvfp4_tensor_scale(torch.tensor(0.0), "").item() == 0.0
    assert nvfp4_tensor_scale(torch.tensor(2.0**-149), "").item() == 2.0**-149
    one = torch.tensor(1.0)
    m = torch.tensor([2688.0, 6.0, 6 * 1.0625, 6 * 1.1875, 1e-9, 0.0, math.nan])
    scale = block_scale(m, NVFP4, "", tensor_scale=one)
    # 448 (0x7e), 1 (0x38), 1.0625 is a tie of 1 and 1.125 -> even 1, 1.1875 a tie of 1.125 and 1.25 -> 1.25 (0x3a)
    assert scale.code.tolist() == [0x7E, 0x38, 0x38, 0x3A, 1, 0, 0x7F]
    assert scale.value[:6].tolist() == [448.0, 1.0, 1.0, 1.25, 2.0**-9, 0.0] and math.isnan(scale.value[6])
    four = block_scale(torch.tensor([6.0]), NVFP4, "", tensor_scale=one, to_four=True)
    assert four.value.item() == 1.5

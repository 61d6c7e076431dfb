"""MBS's prescale and its tree, OF's blend, AQN's schedule: each against its definition. Noise is in test_noise.py."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
import torch
from oracles import scalar
from oracles.bits import assert_same

from mxrl import fake_quantize, quantize
from mxrl.corrections import aqn_sigma, halving_sum, mbs_align, mbs_candidates, mbs_factor, of_blend, prescale


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_align_of_every_bf16_mantissa_and_their_neighbours(dtype):
    f = torch.tensor([1 + n / 128 for n in range(128)] + [384 / n for n in range(193, 385)], dtype=dtype)
    f = torch.cat([f, torch.nextafter(f, torch.full_like(f, 9)), torch.nextafter(f, torch.zeros_like(f))])
    for e in (-130, -126, -20, 0, 100):
        m = f * 2.0**e
        assert mbs_align(m).tolist() == [scalar.align_mantissa(Fraction(v)) for v in m.tolist()]
    assert mbs_align(torch.zeros(3, dtype=dtype)).tolist() == [0, 0, 0]


def test_align_by_hand():
    """f = 1: 384 - 256 = 128, p·M = 1.5. f = 1.5: 0. Just above 1.5: 255 of 256. f = 1.75: 438 - 256 = 182."""
    above = torch.nextafter(torch.tensor(1.5), torch.tensor(2.0)).item()
    assert mbs_align(torch.tensor([1.0, 1.5, above, 1.75, 6.0, 4.0])).tolist() == [128, 0, 255, 182, 0, 128]


def test_align_never_lets_the_ceil_jump():
    """p·M stays at or below 6·2^E, and one step more would not: rounded down, and no further than needed."""
    m = torch.rand(4096, generator=torch.Generator().manual_seed(0)) + 1
    k = mbs_align(m)
    for value, kk in zip(m.tolist(), k.tolist(), strict=True):
        limit = Fraction(3, 2) if value <= 1.5 else 3
        assert Fraction(value) * (256 + kk) <= 256 * limit < Fraction(value) * (257 + kk)


def test_align_gives_the_block_of_the_maximum_no_larger_scale():
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(1))
    plain, aligned = quantize(x).scales.int(), quantize(x, "mxfp4+mbs").scales.int()
    holds = x.abs().unflatten(-1, (-1, 32)).amax(-1).unflatten(-1, (-1, 4))
    holds = (holds == holds.amax(-1, keepdim=True)).flatten(-2)
    assert (plain[holds] == aligned[holds]).all()  # the same exponent, filled up to 6
    assert ((aligned - plain)[~holds] >= 0).all() and ((aligned - plain)[~holds] <= 1).all()


def test_prescale_is_formed_in_float32():
    """p has 9 bits: rounding p·x to bf16 would change about 1 % of the code bytes."""
    x = torch.randn(64, 1024, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    packed = quantize(x, "mxfp4+mbs")
    assert packed.macro_mantissas is not None
    p = mbs_factor(packed.macro_mantissas.int(), torch.float32).repeat_interleave(128, -1)
    assert_same(quantize(x.float() * p).codes, packed.codes)
    wrong = quantize((x.float() * p).to(torch.bfloat16)).codes
    assert 0.005 < (wrong != packed.codes).double().mean().item() < 0.04


def test_saturation():
    top = torch.finfo(torch.float32).max
    assert prescale(torch.tensor([top, -top, 1.0]), torch.tensor(1.5), top).tolist() == [top, -top, 1.5]
    x = torch.tensor([1.0, -1.0])
    assert of_blend(x, torch.tensor([top, -top]), torch.tensor([top, -top]), 1.0, top).tolist() == [top, -top]


def test_candidates():
    assert list(mbs_candidates("search16")) == list(mbs_candidates("joint")) == [16 * i for i in range(16)]
    assert list(mbs_candidates("search256")) == list(range(256))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 16, 32, 33])
def test_halving_sum_is_the_fixed_tree(n):
    x = torch.randn(5, n, generator=torch.Generator().manual_seed(3)) * torch.logspace(-3, 6, n)
    size = 1 << (n - 1).bit_length()
    want = [scalar.halving_sum(scalar.pad(row, size), scalar.FLOAT32) for row in x.tolist()]
    assert halving_sum(x).tolist() == want
    if n == 4:
        assert halving_sum(torch.tensor([1e8, 1.0, -1e8, 1.0])).item() == 2.0  # (a + c) + (b + d)


def test_of_blend_rounds_twice_and_keeps_the_sign_of_zero():
    x1, x2 = torch.tensor([1.0 + 2**-23, 0.1, -0.5, 0.0]), torch.tensor([2.0**-24 + 2**-40, 0.7, 0.5, -0.0])
    got = of_blend(torch.tensor([1.0, 1.0, -1.0, -0.0]), x1, x2, 1.0, 3e38)
    want = [
        scalar.add(a, scalar.mul(1.0, b, scalar.FLOAT32), scalar.FLOAT32)
        for a, b in zip(x1.tolist(), x2.tolist(), strict=True)
    ]
    assert got[:2].tolist() == want[:2]
    assert [math.copysign(1, v) for v in got.tolist()] == [1, 1, -1, -1] and got[2:].tolist() == [0, 0]
    # α is float32 in the product: .3 is not .3 in double
    a, b = torch.tensor([0.7]), torch.tensor([1.1])
    alpha32 = torch.tensor(0.3).item()
    want_one = scalar.add(a.item(), scalar.mul(alpha32, b.item(), scalar.FLOAT32), scalar.FLOAT32)
    assert of_blend(a, a, b, 0.3, 3e38).item() == want_one


def test_of_by_definition():
    """x̂ = x1 + α·Q(x - x1), written out with the public quantizer (float32: nothing is rounded in between)."""
    x = torch.randn(16, 96, generator=torch.Generator().manual_seed(4))
    for base in ("mxfp4", "mxfp4:floor", "mxfp4+mbs", "mxfp4:e8m3"):
        x1 = fake_quantize(x, base)
        x2 = fake_quantize(x - x1, base)
        for alpha in (0.25, 0.3, 1):
            assert (fake_quantize(x, f"{base}+of:{alpha}") == x1 + x2 * alpha).all(), (base, alpha)


def test_of_error_grows_smaller_with_alpha():
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(5))
    errors = [((fake_quantize(x, f"mxfp4+of:{a}") - x) ** 2).sum().item() for a in (0, 0.25, 0.5, 0.75, 1)]
    assert errors == sorted(errors, reverse=True)


# --- AQN ------------------------------------------------------------------------------------------------------------


def test_sigma_anneals_geometrically():
    assert aqn_sigma(0, 11, 1e-2, 1e-3) == 1e-2
    assert aqn_sigma(10, 11, 1e-2, 1e-3) == pytest.approx(1e-3, rel=1e-15)
    assert aqn_sigma(5, 11, 1e-2, 1e-3) == pytest.approx(math.sqrt(1e-5), rel=1e-14)
    steps = [aqn_sigma(t, 7, 1e-2, 1e-3) for t in range(7)]
    ratios = [b / a for a, b in itertools.pairwise(steps)]
    assert ratios == pytest.approx([ratios[0]] * 6)


def test_sigma_of_one_rollout_and_of_none():
    assert aqn_sigma(0, 1, 1e-2, 1e-3) == 1e-2
    assert aqn_sigma(3, 9, 0.0, 0.0) == 0.0
    for t, total in ((-1, 5), (5, 5), (0, 0)):
        with pytest.raises(ValueError, match="outside"):
            aqn_sigma(t, total, 1e-2, 1e-3)

"""MBS with a searched prescale against the scalar oracle: the chosen k, the codes and the values, bit for bit.

The search quantizes everything 16, 32 or 256 times, so the oracle sees the cases where macro-blocks can go wrong:
nearly all of them in bf16, the small ones in the other dtypes.
"""

from __future__ import annotations

import pytest
import torch
from edge_cases import DTYPES, edge_cases
from oracles.agreement import check
from oracles.bits import assert_same

from mxrl import Recipe, fake_quantize, quantize

DTYPE_IDS = [str(d).removeprefix("torch.") for d in DTYPES]
LARGEST = {"mxfp4+mbs:search16": 260, "mxfp4+mbs:joint": 130}  # elements of a case


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("text", LARGEST)
def test_edge_cases(text, dtype):
    for name, x in edge_cases(dtype):
        narrow = name.startswith("ragged_") and name not in ("ragged_1", "ragged_31", "ragged_33", "ragged_48")
        if not narrow and x.numel() <= (LARGEST[text] if dtype == torch.bfloat16 else 80):
            check(x, text, f"{text} {name}")


@pytest.mark.parametrize(
    "text", ["mxfp4:floor+mbs:search16", "mxfp4:e8m3+mbs:search16", "mxfp4+mbs:search16+of", "mxfp4+mbs:joint+of"]
)
def test_after_other_rules_and_under_of(text):
    for name, x in edge_cases(torch.float32):
        if name in ("max", "poisoned_macro", "signed_zeros", "subnormals", "tiny_block_beside_large", "one_dimension"):
            check(x, text, f"{text} {name}")


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_search256(dtype):
    x = torch.randn(1, 70, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(dtype)
    check(x, "mxfp4+mbs:search256", "search256")


@pytest.mark.parametrize(
    "text", ["mxfp4+macro=32+mbs:search16", "mxfp4+macro=96+mbs:search16", "mxfp4+macro=256+mbs:joint"]
)
def test_search_of_other_macro_blocks(text):
    check(torch.randn(2, 300, generator=torch.Generator().manual_seed(6)), text, text)


@pytest.mark.parametrize("text", ["mxfp4+mbs:search16", "mxfp4+mbs:joint", "mxfp4+mbs:search256"])
def test_the_choice_minimises_the_error(text):
    """In float64, over the 16 or 256 prescales tried one by one: none is better by more than float32's rounding."""
    x = torch.randn(8, 512, generator=torch.Generator().manual_seed(3))
    chosen = ((fake_quantize(x, text).double() - x) ** 2).unflatten(-1, (-1, 128)).sum(-1)
    blocks = x.unflatten(-1, (-1, 128))
    for k in range(0, 256, 1 if "256" in text else 16):
        p = 1 + k / 256
        tried = fake_quantize((blocks * p).reshape(x.shape)).view_as(blocks) * torch.tensor(1 / p, dtype=torch.float32)
        error = ((tried.double() - blocks) ** 2).sum(-1)
        assert (chosen <= error * (1 + 1e-5)).all(), k


def test_mantissas_are_multiples_of_16_and_search256_is_no_worse():
    x = torch.randn(8, 512, generator=torch.Generator().manual_seed(4))
    sixteen, all_of_them = quantize(x, "mxfp4+mbs:search16"), quantize(x, "mxfp4+mbs:search256")
    assert sixteen.macro_mantissas is not None and all_of_them.macro_mantissas is not None
    assert (sixteen.macro_mantissas % 16 == 0).all() and (all_of_them.macro_mantissas % 16 != 0).any()
    assert ((all_of_them.dequantize() - x) ** 2).sum() < ((sixteen.dequantize() - x) ** 2).sum()


def test_does_not_depend_on_the_scale_of_the_tensor():
    """Errors are taken relative to the macro maximum: 2^-100 x chooses as x does, where plain squares would vanish."""
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(5))
    for text in ("mxfp4+mbs:search16", "mxfp4+mbs:joint"):
        want = quantize(x, text)
        for e in (-90, 100):
            got = quantize(x * 2.0**e, text)
            assert want.macro_mantissas is not None and got.macro_mantissas is not None
            assert_same(got.macro_mantissas, want.macro_mantissas, text)
            assert_same(got.codes, want.codes, text)


def test_zero_macro_block_takes_k_zero():
    x = torch.cat([torch.zeros(128), torch.randn(128, generator=torch.Generator().manual_seed(6))])
    for mode in ("align", "search16", "search256", "joint"):
        packed = quantize(x, Recipe(mbs=mode))
        assert packed.macro_mantissas is not None and packed.macro_mantissas[0] == 0, mode

"""The public operations compared with the scalar oracle: values, codes, scales, mantissas."""

from __future__ import annotations

import itertools
import math

import torch

import mxrl
from mxrl import Recipe, fake_quantize, quantize
from oracles import scalar
from oracles.bits import assert_same, oracle, rows_of


def check_packed(x: torch.Tensor, recipe: Recipe, want: scalar.Quantized, what: str, dim: int = -1) -> None:
    """Codes, scales and mantissas of both passes; the codes of a NaN block are nobody's business."""
    packed = quantize(x, recipe, dim=dim)
    assert_same(packed.dequantize(), fake_quantize(x, recipe, dim=dim), f"{what}: dequantize")
    part: mxrl.QuantizedTensor | None = packed
    for one_pass in (want.first, want.second if recipe.of else None):  # alpha = 0 needs no second set of codes
        if one_pass is None:
            assert part is None, what
            break
        assert part is not None
        scales = part.scales.flatten(0, -2) if part.scales.dim() > 1 else part.scales[None]
        assert scales.dtype == (torch.int32 if recipe.rule.startswith("e8m") else torch.uint8)
        assert scales.tolist() == one_pass.scales, f"{what}: scales"
        codes = (part.codes.flatten(0, -2) if part.codes.dim() > 1 else part.codes[None]).tolist()
        for got_row, want_row in zip(codes, one_pass.codes, strict=True):
            known = [0 if c is None else c for c in want_row]
            kept = [15 if recipe.base != "mxfp8" else 255 if c is not None else 0 for c in want_row]
            kept = [0 if c is None else k for c, k in zip(want_row, kept, strict=True)]
            mask, bytes_ = scalar.pack(kept, recipe.base), scalar.pack(known, recipe.base)
            assert [g & m for g, m in zip(got_row, mask, strict=True)] == bytes_, f"{what}: codes"
        if one_pass.mantissas is not None:
            assert part.macro_mantissas is not None
            assert part.macro_mantissas.flatten().tolist() == [k for row in one_pass.mantissas for k in row], what
        if one_pass.tensor_scale is not None:
            assert part.tensor_scale is not None
            assert part.tensor_scale.item() == one_pass.tensor_scale, what
        part = part.residual


def check_close_to_ideal(got: torch.Tensor, want: torch.Tensor, x: torch.Tensor, what: str) -> None:
    """float64 under the ideal scale, where m / 6 and 6 x / m are rounded before they are used.

    Not bit for bit: there is no wider float to decide in, as float64 is for float32. The value g (m / 6) takes two
    roundings (2 ulp), and a quotient within a few ulp of a tie may go either way: those elements are left out.
    """
    skip = []
    middles = [(a + b) / 2 for a, b in itertools.pairwise(scalar.E2M1)]
    for row in rows_of(x):
        for i, v in enumerate(row):
            block = row[i // 32 * 32 : i // 32 * 32 + 32]
            m = scalar.largest(block) if scalar.finite(block) else 0
            quotient = abs(scalar.Fraction(v)) * 6 / m if m else scalar.Fraction(1)
            skip.append(min(abs(quotient / t - 1) for t in middles) < 2.0**-50)
    keep = ~torch.tensor(skip, dtype=torch.bool).view(x.shape)
    assert_same(got.isnan(), want.isnan(), what)
    ulp = torch.nextafter(want.abs(), torch.tensor(math.inf, dtype=torch.float64)) - want.abs()
    assert ((got - want).abs() <= 2 * ulp)[keep & ~got.isnan()].all(), what
    assert (got.isfinite() | got.isnan()).all(), what


def check(x: torch.Tensor, text: str, what: str, dim: int = -1) -> None:
    """fake_quantize, the packed fields and dequantize of `x`, each equal to the oracle's bit for bit."""
    recipe = Recipe.parse(text)
    want, all_of_it = oracle(x, recipe, dim)
    if recipe.rule == "ideal" and x.dtype == torch.float64:
        if recipe == recipe.plain:  # under MBS and OF a tie that goes the other way is a large difference
            check_close_to_ideal(fake_quantize(x, recipe, dim=dim), want, x, what)
        return
    assert_same(fake_quantize(x, recipe, dim=dim), want, what)
    if recipe.rule != "ideal":
        check_packed(x, recipe, all_of_it, what, dim)

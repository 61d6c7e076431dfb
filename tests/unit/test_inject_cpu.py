"""ops/inject_cpu.py against the torch reference, bit for bit."""

from __future__ import annotations

from itertools import chain, combinations

import pytest
import torch
from fused_cases import DTYPES, IDS, MAIN, MX, NV, WIDTHS, inputs, layouts, near_the_largest, ordinary, tensor_scale
from oracles.bits import assert_same

from mxrl import Recipe
from mxrl.ops import inject as reference
from mxrl.ops import inject_cpu, qdq_cpu

ALL = ("scale", "deadzone", "grid")
SUBSETS = tuple(chain.from_iterable(combinations(ALL, n) for n in range(4)))


def both(x: torch.Tensor, recipe: Recipe, chosen: tuple[str, ...], scale: torch.Tensor | None) -> tuple:
    got, want = torch.empty_like(x), torch.empty_like(x)
    inject_cpu.inject(x, recipe, frozenset(chosen), got, scale)
    reference.inject(x, recipe, frozenset(chosen), want, scale)
    return got, want


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("text", (*MX, *NV, "mxfp4+mbs:joint"))
def test_equals_the_reference(text, dtype):
    recipe = Recipe.parse(text)
    for name, x, scale in inputs(dtype, recipe):
        for chosen in SUBSETS if text in MAIN else (("scale",), ("deadzone", "grid")):
            assert_same(*both(x, recipe, chosen, scale), f"{text} {name} {chosen}")


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("text", ["mxfp4+of:1", "nvfp4", "nvfp4:4over6", "mxfp4+mbs:search16+of:1"])
def test_a_finite_input_gives_no_inf(text, dtype):
    x, recipe = near_the_largest(dtype), Recipe.parse(text)
    for chosen in SUBSETS:
        got, want = both(x, recipe, chosen, tensor_scale(x, recipe))
        assert_same(got, want, f"{text} {chosen}")
        assert got.isfinite().all(), chosen


@pytest.mark.parametrize("text", MAIN)
def test_widths_and_layouts(text):
    recipe = Recipe.parse(text)
    widths = ((f"width {w}", ordinary(torch.bfloat16, 2, 3, w)) for w in WIDTHS)
    for name, x in (*widths, *layouts(torch.float32)):
        scale = tensor_scale(x, recipe)
        got, want = both(x, recipe, ("scale", "deadzone"), scale)
        assert_same(got, want, f"{text} {name}")
        if name != "expanded":
            same = x.clone(memory_format=torch.preserve_format)
            inject_cpu.inject(same, recipe, ("scale", "deadzone"), same, scale)
            assert_same(same, want, f"{text} {name} in place")


def test_all_of_it_is_the_quantizer_and_none_of_it_nothing():
    x = ordinary(torch.float32, 2, 3, 100)
    quantized = torch.empty_like(x)
    qdq_cpu.qdq(x, Recipe(), quantized, None)
    assert_same(both(x, Recipe(), ALL, None)[0], quantized)
    assert_same(both(x, Recipe(), (), None)[0], x)

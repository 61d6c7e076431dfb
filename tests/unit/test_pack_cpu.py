"""ops/pack_cpu.py against the torch reference, bit for bit: every field of every pass, and the way back."""

from __future__ import annotations

import pytest
import torch
from edge_cases import known_bytes
from fused_cases import DTYPES, IDS, MAIN, MX, NV, SEARCHED, WIDTHS, inputs, layouts, ordinary, tensor_scale
from oracles.bits import assert_same

from mxrl import Recipe
from mxrl.ops import pack as reference
from mxrl.ops import pack_cpu

PACKED = tuple(text for text in (*MX, *NV, SEARCHED[1], SEARCHED[3]) if ":ideal" not in text)


def check(x: torch.Tensor, recipe: Recipe, scale: torch.Tensor | None, what: str) -> list:
    got, want = pack_cpu.pack(x, recipe, scale), reference.pack(x, recipe, scale)
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        for field in one._fields:
            a, b = getattr(one, field), getattr(other, field)
            assert (a is None) == (b is None), f"{what} {field}"
            if a is not None:
                assert a.is_contiguous()
                assert_same(a, b, f"{what} {field}")
    return want


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("text", PACKED)
def test_equals_the_reference(text, dtype):
    recipe = Recipe.parse(text)
    for name, x, scale in inputs(dtype, recipe):
        packed = check(x, recipe, scale, f"{text} {name}")
        for to in (*DTYPES, torch.float64):
            got, want = torch.empty(x.shape, dtype=to), torch.empty(x.shape, dtype=to)
            pack_cpu.unpack(packed, recipe, got, dtype, scale)
            reference.unpack(packed, recipe, want, dtype, scale)
            assert_same(got, want, f"{text} {name} to {to}")


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
def test_known_bytes(dtype):
    for name, x, scales, codes in known_bytes(dtype):
        (packed,) = pack_cpu.pack(x[None, None], Recipe(), None)
        assert packed.scales.flatten().tolist() == scales and packed.codes.flatten().tolist() == codes, name


@pytest.mark.parametrize("text", (*MAIN, "mxfp4:e8m3"))
def test_widths_and_layouts(text):
    recipe = Recipe.parse(text)
    widths = ((f"width {w}", ordinary(torch.bfloat16, 2, 3, w)) for w in WIDTHS)
    for name, x in (*widths, *layouts(torch.float32)):
        scale = tensor_scale(x, recipe)
        packed = check(x, recipe, scale, f"{text} {name}")
        want = torch.empty_like(x, memory_format=torch.contiguous_format)
        reference.unpack(packed, recipe, want, x.dtype, scale)
        for out in (torch.empty_like(want), torch.empty(x.shape[::-1], dtype=x.dtype).permute(2, 1, 0)):
            pack_cpu.unpack(packed, recipe, out, x.dtype, scale)
            assert_same(out, want, f"{text} {name}")


@pytest.mark.parametrize("text", ("mxfp4+mbs:search16", "mxfp4+mbs:search256", "mxfp4+mbs:joint"))
def test_ties_between_candidates(text):
    """A lone value is met exactly under several k: the smallest is taken."""
    x = torch.zeros(1, 6, 128)
    x[0, torch.arange(6), torch.arange(6) * 20] = torch.tensor([1.0, 1.5, 0.75, 3.0, 5.0, -7.0])
    packed = check(x, Recipe.parse(text), None, text)
    assert packed[0].mantissas is not None and packed[0].mantissas[0].item() == 0


def test_every_code_and_scale():
    """Codes and scales that no quantization gives, E4M3's NaN codes and E8M0's 255 among them."""
    g = torch.Generator().manual_seed(3)
    for text in ("mxfp4", "mxfp8", "nvfp4", "mxfp4:e8m3", "mxfp4+mbs"):
        recipe = Recipe.parse(text)
        empty = pack_cpu.pack(torch.zeros(1, 64, 512), recipe, torch.ones(()))[0]
        parts = [None if t is None else torch.randint(0, 256, t.shape, generator=g).to(t.dtype) for t in empty]
        if text == "nvfp4":
            parts[1] &= 127
        if text == "mxfp4:e8m3":
            parts[1] = torch.randint(0, 256 * 8, parts[1].shape, generator=g, dtype=torch.int32)
        packed = [reference.PackedPass(*parts)]
        got, want = torch.empty(1, 64, 512), torch.empty(1, 64, 512)
        pack_cpu.unpack(packed, recipe, got, torch.float32, torch.tensor(0.01))
        reference.unpack(packed, recipe, want, torch.float32, torch.tensor(0.01))
        assert_same(got, want, text)

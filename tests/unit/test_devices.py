"""The GPU computes the same bits as the CPU: quantization, packing, statistics, AQN's noise. Skips without a GPU."""

import pytest
import torch
from edge_cases import DTYPES, edge_cases

from mxrl import decompose, error_stats, fake_quantize, quantize
from mxrl.corrections import philox_normal

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

RECIPES = [
    "mxfp4", "mxfp4:floor", "mxfp4:even", "mxfp4:ideal", "mxfp4:e8m1", "mxfp4:e8m3", "mxfp4:e8m8", "nvfp4",
    "nvfp4:4over6", "mxfp8", "mxfp4+mbs", "mxfp4+mbs:search16", "mxfp4+mbs:joint", "mxfp4+of", "mxfp4+of:1",
    "mxfp4+mbs+of", "mxfp4+mbs:search16+of:0.3",
]  # fmt: skip
INTEGER = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit, but for the payloads of NaN, which no specification fixes."""
    a, b = a.cpu(), b.cpu()
    nan = a.isnan()
    integer = INTEGER[a.element_size()]
    return torch.equal(nan, b.isnan()) and torch.equal(
        torch.where(nan, 0.0, a).view(integer), torch.where(nan, 0.0, b).view(integer)
    )


def tensors(dtype):
    generator = torch.Generator().manual_seed(0)
    random = [torch.randn(64, 896, generator=generator) * s for s in (1.0, 0.02, 1e-30)]
    return [x for _, x in edge_cases(dtype)] + [x.to(dtype) for x in random]


def test_noise_is_the_same_on_the_gpu():
    whole = philox_normal(7, 3, "model.layers.0.mlp.up_proj.weight", 0, 5_000_000, "cuda")
    assert same(philox_normal(7, 3, "model.layers.0.mlp.up_proj.weight", 0, 5_000_000), whole)


@pytest.mark.parametrize("recipe", ["mxfp4", "mxfp4+mbs+of", "nvfp4"])
def test_decomposition_is_the_same_on_the_gpu(recipe):
    x = torch.randn(256, 896, generator=torch.Generator().manual_seed(1))
    ours, theirs = decompose(x, recipe), decompose(x.cuda(), recipe)
    for name in ("scale", "deadzone", "grid", "total"):
        assert same(getattr(ours, name), getattr(theirs, name))
    cpu, gpu = error_stats(x, recipe).to_dict(), error_stats(x.cuda(), recipe).to_dict()
    for name, value in cpu.items():  # counts are exact; sums may be added in another order on another device
        assert gpu[name] == (pytest.approx(value, rel=1e-12, abs=1e-12) if isinstance(value, float) else value)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_quantization_is_the_same_on_the_gpu(recipe, dtype):
    for x in tensors(dtype):
        assert same(fake_quantize(x, recipe), fake_quantize(x.cuda(), recipe))
        if recipe != "mxfp4:ideal":
            packed = quantize(x.cuda(), recipe)
            assert torch.equal(packed.codes.cpu(), quantize(x, recipe).codes)
            assert same(packed.dequantize(), fake_quantize(x, recipe))

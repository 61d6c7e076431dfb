"""The Triton component injection against the torch reference, bit for bit; Q*'s shortcuts against its definition.

Runs on the GPU where there is one, else in Triton's interpreter (few, large tiles).
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from fused_cases import near_the_largest, tensor_scale  # noqa: E402
from oracles.bits import assert_same  # noqa: E402
from triton_cases import CUDA, DEVICE, DTYPES, edge_rows, on_device  # noqa: E402

from mxrl import Recipe  # noqa: E402
from mxrl.formats import MXFP4, MXFP8  # noqa: E402
from mxrl.ops import inject as reference  # noqa: E402
from mxrl.ops.components_triton import deadzone_edge, ideal_scale, ideal_values, log2  # noqa: E402
from mxrl.ops.inject_triton import inject, unsupported  # noqa: E402
from mxrl.ops.passes_triton import block_amax  # noqa: E402
from mxrl.ops.qdq_triton import Config  # noqa: E402
from mxrl.scaling import block_scale, from_grid, to_grid  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter: overflow is meant

LARGE = None if CUDA else Config(1 << 15, 4)
SUBSETS = [frozenset(c) for n in range(4) for c in itertools.combinations(("scale", "deadzone", "grid"), n)]
RECIPES = (
    "mxfp4", "mxfp4:floor", "mxfp4:ideal", "mxfp4:e8m3", "mxfp8", "nvfp4", "nvfp4:4over6", "mxfp4+of", "mxfp4+mbs",
    "mxfp4:even+mbs:search16", "mxfp4+mbs:joint+of:0.3", "mxfp4:ideal+mbs+of:1",
)  # fmt: skip


def check(x_ABK: Tensor, text: str, subsets: list[frozenset[str]], config: Config | None = LARGE) -> None:
    recipe = Recipe.parse(text)
    scale = tensor_scale(x_ABK, recipe)
    there = on_device(x_ABK)
    for chosen in subsets:
        want = torch.empty(x_ABK.shape, dtype=x_ABK.dtype)
        reference.inject(x_ABK, recipe, chosen, want, scale)
        out = torch.empty_like(there)
        inject(there, recipe, chosen, out, None if scale is None else scale.to(DEVICE), config=config)
        assert_same(out.cpu().contiguous(), want, f"{text} {x_ABK.dtype} {sorted(chosen)}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("text", RECIPES)
def test_edge_cases(text: str, dtype: torch.dtype) -> None:
    slow = "search" in text or "joint" in text
    subsets = [SUBSETS[-1], SUBSETS[1]] if slow else SUBSETS if text == "mxfp4" else SUBSETS[1:-1:2]
    check(edge_rows(dtype), text, subsets)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("text", ["mxfp4+of:1", "nvfp4:4over6"])
def test_saturates(text: str, dtype: torch.dtype) -> None:
    check(near_the_largest(dtype), text, [frozenset({"scale"}), frozenset({"scale", "deadzone"})])


def test_strides_and_ragged_rows() -> None:
    g = torch.Generator().manual_seed(2)
    some = [SUBSETS[-1], frozenset({"scale", "deadzone"})]
    for x in (
        torch.randn(2, 160, 24, generator=g).movedim(1, -1),
        torch.randn(3, 18, 64, generator=g)[:, ::2, 5:55],
        torch.randn(1, 9, 320, generator=g),
    ):
        check(x, "mxfp4", some)
        check(x.to(torch.bfloat16), "mxfp4+mbs", some, Config(2048, 4, owned=True))


def test_in_place_and_empty() -> None:
    x = torch.randn(1, 4, 70, generator=torch.Generator().manual_seed(4))
    want = torch.empty_like(x)
    reference.inject(x, Recipe(), SUBSETS[-1], want, None)
    there = x.to(DEVICE)
    inject(there, Recipe(), SUBSETS[-1], there, None)
    assert_same(there.cpu(), want)
    for shape in ((0, 3, 64), (2, 0, 64), (2, 3, 0)):
        empty = torch.zeros(shape, device=DEVICE)
        inject(empty, Recipe(), SUBSETS[-1], empty, None)


def test_what_it_does_not_do() -> None:
    assert unsupported(Recipe(), torch.float64) is not None
    assert all(unsupported(Recipe.parse(text), dtype) is None for text in RECIPES for dtype in DTYPES)


@triton.jit
def _ideal_kernel(x, out, edges, E4M3: tl.constexpr, M: tl.constexpr):
    at = tl.arange(0, M)[:, None, None] * 32 + tl.arange(0, 32)[None, None, :]
    a = tl.abs(tl.load(x + at))
    m = block_amax(a)
    inverse, sixth = ideal_scale(m, E4M3)
    tl.store(out + at, ideal_values(a.to(tl.float64), m, inverse, sixth, E4M3))
    tl.store(edges + tl.arange(0, M)[:, None], deadzone_edge(m, sixth, E4M3))


def ties(limit: float, halfway: list[float], exponent: int, generator: torch.Generator) -> Tensor:
    """float32 blocks [n, 32]: a random maximum near 2^exponent, then x at the ties t·m / q_max and beside them."""
    m = torch.rand(1024, 1, generator=generator, dtype=torch.float64).add(1).mul(2.0**exponent).float()
    m[::3] = m[::3].view(torch.int32).bitwise_and(~0x3FFFF).view(torch.float32) * 3 / 4  # short ones: exact ties
    odd = torch.randint(2**20, 2**21, m[1::3].shape, generator=generator) * 2 + 1
    m[1::3] = odd.float() * 7 * 2.0 ** (exponent - 24)  # E4M3's g·m/448 is a midpoint there
    t = torch.tensor(halfway, dtype=torch.float64)[torch.randint(len(halfway), (1024, 31), generator=generator)]
    x = (m.double() * t / limit).float()
    step = torch.randint(-1, 2, x.shape, generator=generator, dtype=torch.int32)
    x = (x.view(torch.int32) + step).view(torch.float32)
    return torch.cat([m, x.clamp(min=0).minimum(m)], dim=1)


@pytest.mark.parametrize("fmt", [MXFP4, MXFP8], ids=lambda f: f.name)
@pytest.mark.parametrize("exponent", [0, 100, -110, -140])
def test_ideal_shortcuts(fmt, exponent: int) -> None:
    """No division and two products: the same bits as the definition, at the ties, beside them and among subnormals."""
    values = fmt.element.values
    halfway = [(a + b) / 2 for a, b in itertools.pairwise(values)] + list(values)
    x = ties(fmt.q_max, halfway, exponent, torch.Generator().manual_seed(exponent + 200))
    scale = block_scale(x.amax(-1), fmt, "ideal")
    want = from_grid(to_grid(x, scale, fmt, "ideal", torch.finfo(x.dtype).max), scale.value, fmt, "ideal")
    out, edges = torch.empty_like(x, device=DEVICE), torch.empty(1024, device=DEVICE)
    _ideal_kernel[(1,)](x.to(DEVICE), out, edges, E4M3=fmt is MXFP8, M=1024, num_warps=8, enable_fp_fusion=False)
    assert_same(out.cpu(), want, fmt.name)
    inside = x.double() * fmt.deadzone_ratio < x.amax(-1, keepdim=True).double()
    assert torch.equal(x < edges.cpu()[:, None], inside)


@triton.jit
def _log2_kernel(x, out, M: tl.constexpr):
    at = tl.arange(0, M)
    tl.store(out + at, log2(tl.load(x + at)))


def test_log2() -> None:
    x = torch.rand(4096, generator=torch.Generator().manual_seed(5), dtype=torch.float64) * 2
    x[:400] = torch.ldexp(torch.ones(400, dtype=torch.float64), torch.arange(-200, 200))
    x[400:600] = 1 + torch.arange(-100, 100, dtype=torch.float64) * 2**-52
    out = torch.empty_like(x, device=DEVICE)
    _log2_kernel[(1,)](x.to(DEVICE), out, M=4096, enable_fp_fusion=False)
    want = torch.log2(x)
    assert torch.equal(out.cpu()[:400], want[:400])
    torch.testing.assert_close(out.cpu(), want, rtol=1e-15, atol=0)  # three roundings of 2^-53 after the series

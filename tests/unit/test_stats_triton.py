"""The Triton statistics against the torch reference: counts exactly, float64 sums to 1e-12 relative.

Runs on the GPU where there is one, else in Triton's interpreter, where a program costs milliseconds whatever its tile:
the cases of one dtype are rows of one tensor. Plain ceil and e8m{k} of bf16 go by stats_fast_triton where they can, so
those are tried by both ways, and by every pair of a maximum's and an element's mantissa.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from fused_cases import tensor_scale
from triton_cases import CUDA, DEVICE, DTYPES, edge_rows, on_device

from mxrl import ErrorStats, Recipe
from mxrl.ops import stats as reference
from mxrl.ops import stats_fast_triton as fast
from mxrl.ops.qdq_triton import Config
from mxrl.ops.stats_triton import fields, launch, stats, unsupported

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter: overflow is meant

CUT: dict[str, Any] = {} if CUDA else {"config": Config(1 << 14, 4), "programs": 3}
SHORT = ("mxfp4", "mxfp4:e8m1", "mxfp4:e8m3", "mxfp4:e8m8")
RECIPES = (
    *SHORT, "mxfp4:floor", "mxfp4:even", "mxfp4:ideal", "mxfp8", "nvfp4", "nvfp4:4over6", "mxfp4+of",
    "mxfp4:floor+of:1", "mxfp4+mbs", "mxfp4:ideal+mbs+of:0.3", "mxfp4:e8m2+mbs+macro=64",
)  # fmt: skip


def ordinary(dtype: torch.dtype, *shape: int) -> Tensor:
    """Blocks of different sizes, some zeros, a zero block, a NaN and an Inf."""
    g = torch.Generator().manual_seed(7)
    x = torch.randn(*shape, generator=g) * torch.rand(*shape[:-1], 1, generator=g).mul(8).exp2()
    x[..., ::7, ::13] = 0
    x[0, 0, :32] = 0
    x[0, 1, 3], x[-1, -1, -1] = math.nan, math.inf
    return x.to(dtype)


def check(got: dict[str, Any], want: dict[str, Any], what: str, rtol: float = 1e-12) -> None:
    assert set(got) == set(ErrorStats().to_dict()) == set(want), what
    for name, w in want.items():
        g = got[name]
        assert type(g) is type(w), f"{what}: {name}"
        if isinstance(w, float) and g != w:
            assert abs(g - w) <= rtol * abs(w) or (math.isnan(g) and math.isnan(w)), f"{what}: {name} {g!r}, want {w!r}"
        elif not isinstance(w, float):
            assert g == w, f"{what}: {name} {g}, want {w}"


def by_triton(x_ABK: Tensor, recipe: Recipe, scale: Tensor | None, foreign: Tensor | None, **options: Any) -> dict:
    total, short = launch(
        x_ABK, recipe, None if foreign is None else foreign.to(DEVICE), None if scale is None else scale.to(DEVICE),
        **{**CUT, **options},
    )  # fmt: skip
    return fields(total.cpu().numpy()[None], [recipe if short else None])[0]


def compare(x_ABK: Tensor, text: str, foreign: Tensor | None = None, **options: Any) -> dict[str, Any]:
    recipe = Recipe.parse(text)
    scale = tensor_scale(x_ABK, recipe)
    there = on_device(x_ABK)
    got = by_triton(there, recipe, scale, foreign, **options)
    check(got, reference.stats(x_ABK, recipe, foreign, scale), f"{text} {x_ABK.dtype} {options}")
    return got


@pytest.mark.parametrize("text", RECIPES)
def test_edge_cases(text: str) -> None:
    compare(edge_rows(torch.bfloat16), text)
    if text not in SHORT[1:]:
        compare(edge_rows(torch.float32), text)
    if text in ("mxfp4", "mxfp8", "mxfp4+mbs"):
        compare(edge_rows(torch.float16), text)


@pytest.mark.parametrize("text", RECIPES)
def test_ordinary_numbers(text: str) -> None:
    compare(ordinary(torch.float32, 2, 6, 256), text)


@pytest.mark.parametrize("text", SHORT)
def test_both_ways(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shortcut serves bf16, leaves the tiles it can't do to the other kernel, and agrees with it."""
    monkeypatch.setattr("mxrl.ops.stats_triton.LEFT_OVER", 2)  # runs of three tiles, some of them done already
    x = ordinary(torch.bfloat16, 1, 40, 512)  # 640 blocks, five tiles: the first and the last hold a NaN, an Inf
    x[0, 17, 40] = 2.0**-100
    _, short = launch(x.to(DEVICE), Recipe.parse(text), None, None, **CUT)
    assert short
    compare(x, text)
    compare(x, text, shortcut=False)
    compare(x[:, :, :501], text)  # ragged rows
    assert not launch(x.float().to(DEVICE), Recipe.parse(text), None, None, **CUT)[1]


@pytest.mark.parametrize("text", ["mxfp4", "mxfp4:e8m1", "mxfp4:e8m5", "mxfp4:e8m8"])
def test_every_pair_of_mantissas(text: str) -> None:
    """bf16: each of 128 maxima with each |x| from m / 32 to m, signs in turn. The shortcut's sums, block by block exact
    and never rounded before the last float64 additions, so to 1e-14."""
    bits = torch.arange(128, dtype=torch.int32)[:, None] + (127 << 7)
    x = bits - torch.arange(5 * 128 + 26, dtype=torch.int32)[None, :]  # 666 values below each maximum
    m = bits.expand(128, 1)
    parts = [torch.cat([m, part], 1) for part in torch.nn.functional.pad(x, (0, -666 % 31), value=0).split(31, 1)]
    blocks = torch.stack(parts, 1).reshape(1, -1, 32)
    sign = (torch.arange(blocks.numel()).view(blocks.shape) % 3 == 0).int() << 15
    blocks = (blocks | sign).to(torch.int32).to(torch.int16).view(torch.bfloat16)
    recipe = Recipe.parse(text)
    total, short = launch(blocks.contiguous().to(DEVICE), recipe, None, None, **CUT)
    assert short
    check(fields(total.cpu().numpy()[None], [recipe])[0], reference.stats(blocks, recipe, None, None), text, rtol=1e-14)


def test_exact_zeros() -> None:
    """ceil: the deadzone's inner products; ideal: everything of the scale; a quantized tensor: its whole error."""
    x = ordinary(torch.bfloat16, 1, 12, 512)
    assert compare(x, "mxfp4", shortcut=False)["dot_scale_deadzone"] == 0
    assert compare(x, "mxfp4:e8m3")["dot_scale_deadzone"] == 0
    ideal = compare(x, "mxfp4:ideal")
    assert ideal["sq_scale"] == ideal["dot_scale_grid"] == ideal["dot_scale_deadzone"] == 0
    again = (torch.randint(-3, 4, (1, 8, 512), generator=torch.Generator().manual_seed(1)) * 2).to(torch.bfloat16)
    assert compare(again, "mxfp4")["sq_error"] == compare(again, "mxfp4", shortcut=False)["sq_error"] == 0


def test_a_scale_that_underflows() -> None:
    """NVFP4 of float32's least number: the block's scale is 0, its delta −∞, in the first bin."""
    got = compare(torch.full((1, 2, 20), 2.0**-149), "nvfp4")
    assert got["delta_sum"] == -math.inf and got["delta_hist"][0] == got["delta_count"] == 4


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
def test_foreign(dtype: torch.dtype) -> None:
    """Q(x) given: by its own rounding, by noise, by NaN inside a block that is finite in x."""
    x = ordinary(dtype, 2, 6, 133)
    g = torch.Generator().manual_seed(3)
    for text in ("mxfp4", "nvfp4", "mxfp8"):
        compare(x, text, foreign=torch.randn(x.shape, generator=g))
        compare(x, text, foreign=x.nan_to_num(0.0).float().movedim(1, 2).contiguous().movedim(2, 1))  # other strides
    inside = compare(x, "mxfp4")["deadzone_count"]
    assert inside
    for at in (3, 4):  # in D, and not
        foreign = torch.randn(x.shape, generator=g)
        foreign[1, 2, at] = math.nan
        x[1, 2, at] = 1e-3 if at == 3 else x[1, 2, :32].abs().max()
        assert math.isnan(compare(x, "mxfp4", foreign=foreign)["dot_scale_deadzone"])


def test_strides() -> None:
    g = torch.Generator().manual_seed(4)
    for dtype in (torch.bfloat16, torch.float32):
        for x in (
            torch.randn(2, 64, 6, generator=g).movedim(1, -1),
            torch.randn(3, 9, 64, generator=g)[:, ::2, 5:55],
            torch.randn(1, 9, 130, generator=g)[:, :, ::2],
            torch.randn(9, 3, 64, generator=g).transpose(0, 1),
        ):
            compare(x.to(dtype), "mxfp4")
        compare(torch.randn(2, 160, 6, generator=g).movedim(1, -1).to(dtype), "mxfp4+mbs+of")


def test_the_same_twice_and_in_parts() -> None:
    """Bit-equal from run to run; parts merge to the whole; small tiles and several programs agree too."""
    x = ordinary(torch.float32, 1, 16, 512)
    options = {"config": Config(2048, 4)}
    first = compare(x, "mxfp4", **options)
    assert first == compare(x, "mxfp4", **options) or any(v != v for v in first.values() if isinstance(v, float))
    halves = [ErrorStats(**compare(part, "mxfp4", **options)) for part in (x[:, :8], x[:, 8:])]
    check((halves[0] + halves[1]).__dict__, first, "merged")
    compare(x, "mxfp4+mbs", config=Config(1024, 4), programs=2)
    compare(x[:, :4], "mxfp4+mbs:joint", config=Config(4096, 4, owned=True))


@pytest.mark.parametrize("shape", [(0, 3, 64), (2, 0, 64), (2, 3, 0)])
def test_empty(shape: tuple[int, int, int]) -> None:
    for text in ("mxfp4", "nvfp4", "mxfp4+mbs"):
        got = stats(torch.zeros(shape, dtype=torch.bfloat16, device=DEVICE), Recipe.parse(text), None, None)
        assert got == ErrorStats().__dict__


def test_what_it_does_not_do() -> None:
    assert unsupported(Recipe(), torch.float64) is not None
    assert all(unsupported(Recipe.parse(text), dtype) is None for text in RECIPES for dtype in DTYPES)
    x = torch.zeros(1, 4, 64, dtype=torch.bfloat16)
    assert fast.serves(x, Recipe(), "flat")
    for text in ("mxfp4:floor", "mxfp4+of", "mxfp4+mbs", "mxfp8", "nvfp4"):
        assert not fast.serves(x, Recipe.parse(text), "flat")
    assert not fast.serves(x.float(), Recipe(), "flat")
    assert not fast.serves(x[:, :, ::2], Recipe(), "rows")

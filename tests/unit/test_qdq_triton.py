"""The Triton quantize-dequantize against the torch reference and the scalar oracle, bit for bit.

Runs on the GPU where there is one, else in Triton's interpreter, where a launch costs milliseconds a program: the cases
of one dtype go into one launch.
"""

from __future__ import annotations

import functools
import hashlib

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from edge_cases import edge_cases  # noqa: E402
from oracles.bits import assert_same, oracle  # noqa: E402
from triton_cases import CUDA, DEVICE, DTYPES  # noqa: E402

from mxrl import Recipe  # noqa: E402
from mxrl.corrections import mbs_align, philox_normal  # noqa: E402
from mxrl.ops import mbs_triton as device  # noqa: E402
from mxrl.ops.grids_triton import _quotient, block_amax, widen  # noqa: E402
from mxrl.ops.noise_triton import standard_normal  # noqa: E402
from mxrl.ops.qdq import finite_max, qdq_rows, to_blocks  # noqa: E402
from mxrl.ops.qdq_triton import Config, finite_amax, noisy_qdq, qdq, unsupported  # noqa: E402
from mxrl.scaling import nvfp4_tensor_scale  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter: overflow is meant

RULES = ("ceil", "floor", "even", "ideal", *(f"e8m{k}" for k in ((1, 3, 8) if CUDA else range(1, 9))))  # compiling
PLAIN = (*(f"mxfp4:{rule}" for rule in RULES), "nvfp4", "nvfp4:4over6", "mxfp8")
CORRECTED = (
    "mxfp4+of", "mxfp4+of:0", "mxfp4+of:1", "mxfp4+of:0.3", "mxfp4:floor+of", "mxfp4:even+of:0.25", "mxfp4:ideal+of",
    "mxfp4:e8m3+of:1", "mxfp4+mbs", "mxfp4:floor+mbs", "mxfp4:even+mbs", "mxfp4:ideal+mbs", "mxfp4:e8m2+mbs",
    "mxfp4+mbs+of", "mxfp4+mbs+of:0.7", "mxfp4:ideal+mbs+of", "mxfp4:floor+mbs+of:1", "mxfp4+mbs+macro=32",
    "mxfp4+mbs+of+macro=64",
)  # fmt: skip
SEARCHED = (
    "mxfp4+mbs:search16", "mxfp4:even+mbs:search16", "mxfp4:floor+mbs:search16", "mxfp4:e8m1+mbs:search16",
    "mxfp4+mbs:joint", "mxfp4+mbs:search16+of", "mxfp4+mbs:joint+of:0.3", "mxfp4+mbs:search16+macro=32",
)  # fmt: skip
LARGE = None if CUDA else Config(1 << 15, 4)  # few programs in the interpreter


@functools.lru_cache(maxsize=8)
def edge_rows(dtype: torch.dtype) -> Tensor:
    """Every edge case as rows of 128 (longer ones cut, shorter ones padded with zeros): [R, 128]."""
    rows = []
    for _, x in edge_cases(dtype):
        if x.numel():
            flat = x.reshape(-1, x.shape[-1])
            rows += torch.nn.functional.pad(flat, (0, -flat.shape[1] % 128)).split(128, 1)
    return torch.cat(rows)


def scale_of(rows: Tensor, recipe: Recipe) -> Tensor | None:
    return nvfp4_tensor_scale(finite_max(to_blocks(rows, recipe)), recipe.rule) if recipe.base == "nvfp4" else None


def as_abk(x: Tensor, dim: int) -> Tensor:
    """A view [A, B, K] of x with at most two axes beside `dim`."""
    moved = x.movedim(dim, -1)
    return moved if moved.dim() == 3 else moved[None] if moved.dim() == 2 else moved[None, None]


def check(x: Tensor, text: str, dim: int = -1, out: Tensor | None = None, config: Config | None = LARGE) -> None:
    """Triton on DEVICE against the reference on the CPU; x keeps its strides, out (like x) may have others."""
    recipe = Recipe.parse(text)
    view = as_abk(x, dim)
    rows = view.reshape(-1, view.shape[-1])
    scale = scale_of(rows, recipe)
    want = qdq_rows(rows, recipe, scale).reshape(view.shape)
    there = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=DEVICE)
    if 0 in x.stride():
        there = x.to(DEVICE) if x.is_contiguous() else x.to(DEVICE).as_strided(x.shape, x.stride())
    else:
        there.copy_(x)
    target = torch.empty_like(there) if out is None else there if out is x else out.to(DEVICE)
    qdq(as_abk(there, dim), recipe, as_abk(target, dim), None if scale is None else scale.to(DEVICE), config=config)
    assert_same(as_abk(target, dim).cpu().contiguous(), want.contiguous(), f"{text} {x.dtype} dim={dim}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("text", PLAIN + CORRECTED)
def test_edge_cases(text: str, dtype: torch.dtype) -> None:
    x = edge_rows(dtype)
    check(x, text)
    a = x.double().abs()
    # tiles in the ordinary range have a path of their own
    ordinary = (((a == 0) | (a >= 2.0**-60)) & (a < torch.finfo(dtype).max / 4)).all(1)
    check(x[ordinary], text)


@pytest.mark.parametrize("text", ["mxfp4+of", "mxfp4+mbs", "mxfp4:floor+mbs+of:0.3"])
def test_each_way_out_of_the_ordinary_range(text: str) -> None:
    """Tiles with small blocks only, large ones only, and only small residuals (2^-128 beside 1, on the grid)."""
    for dtype in (torch.bfloat16, torch.float32):
        x = edge_rows(dtype)
        a = x.double().abs()
        small = (a < torch.finfo(dtype).max / 4).all(1)
        check(x[small], text)
        check(x[~small & (((a == 0) | (a >= 2.0**-60)) & a.isfinite()).all(1)], text)
        residual = torch.full((4, 128), 2.0**-128, dtype=torch.float32)
        residual[:, ::32] = 1.0
        check(residual.to(dtype), text)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("text", ["mxfp4+mbs", "mxfp4:even+mbs+of"])
def test_tiles_of_one_binade(text: str, dtype: torch.dtype) -> None:
    """At both ends of the ordinary range: a tile with anything else in it would be done the other way."""
    unit = torch.rand(32, 128, generator=torch.Generator().manual_seed(4)) * 0.998 + 1
    for exponent in (-102, -101, -100, -99, *range(121, 128)):
        check((unit * 2.0**exponent).to(dtype).clamp(max=torch.finfo(dtype).max), text)


@pytest.mark.parametrize("text", SEARCHED)
def test_searches(text: str) -> None:
    for dtype in DTYPES if text == "mxfp4+mbs:search16" else (torch.bfloat16,):  # slow, interpreted or compiled
        check(edge_rows(dtype)[:: 1 if CUDA else 2], text)


def test_search256() -> None:
    generator = torch.Generator().manual_seed(0)
    ties = edge_rows(torch.bfloat16)[::23]
    check(torch.cat([ties[:6], torch.randn(4, 128, generator=generator).bfloat16()]), "mxfp4+mbs:search256")


@pytest.mark.parametrize("text", ["mxfp4", "nvfp4:4over6", "mxfp4:e8m3+of", "mxfp4+mbs+of:0.3", "mxfp4+mbs:search16"])
def test_scalar_oracle(text: str) -> None:
    names = ["ties_scaled", "least", "around_tiny", "max", "poisoned_macro", "macro_corners", "fp16_60000", "ragged_33"]
    if "search" in text:  # 16 times the exact arithmetic in the oracle
        names = names[1:5]
    for dtype in DTYPES:
        for name, x in edge_cases(dtype):
            if name in names:
                recipe = Recipe.parse(text)
                scale = scale_of(x, recipe)
                got = torch.empty_like(x, device=DEVICE)
                there = None if scale is None else scale.to(DEVICE)
                qdq(x.to(DEVICE)[None], recipe, got[None], there, config=LARGE)
                assert_same(got.cpu(), oracle(x, recipe)[0], f"{text} {dtype} {name}")


# --- where the elements are ------------------------------------------------------------------------------------------

LAYOUT_RECIPES = ("mxfp4", "mxfp4+mbs+of", "mxfp4+mbs:search16" if CUDA else "nvfp4")


@pytest.mark.parametrize("text", LAYOUT_RECIPES)
def test_ragged_and_strided_rows(text: str) -> None:
    x = edge_rows(torch.bfloat16)
    for width in (1, 17, 33, 100):
        check(x[:, :width], text)
        check(x[:, :width].contiguous(), text)
    check(x[1::3, 1:66], text)
    check(x[::2].flip(1), text)
    generator = torch.Generator().manual_seed(1)
    for width in (576, 896):
        check(torch.randn(3, width, generator=generator).half(), text)
    check(torch.randn(5, 2, 300, generator=generator)[:, :, 2:290], text)
    check(torch.randn(70, generator=generator), text)
    check(torch.randn(1, 96, generator=generator).expand(4, 96), text)


@pytest.mark.parametrize("text", LAYOUT_RECIPES)
def test_other_axes(text: str) -> None:
    x = edge_rows(torch.bfloat16)
    check(x.t().contiguous(), text, dim=0)
    check(x.t().contiguous()[:100], text, dim=0)
    generator = torch.Generator().manual_seed(2)
    experts = torch.randn(2, 160, 24, generator=generator).bfloat16()  # [E, H, 2I], blocked along H
    check(experts, text, dim=1)
    check(experts[:, :9], text, dim=0)
    check(experts.transpose(0, 2), text, dim=1)
    out = torch.empty(24, 160, 2, dtype=x.dtype, device=DEVICE).permute(2, 1, 0)
    check(experts, text, dim=1, out=out)
    check(experts, text, dim=2, out=out)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("text", LAYOUT_RECIPES)
def test_in_place(text: str, dim: int) -> None:
    x = edge_rows(torch.float32)[:128].clone()
    check(x, text, dim=dim, out=x)


def test_empty() -> None:
    for shape in ((0, 3, 32), (2, 0, 32), (2, 3, 0), (0, 0, 0)):
        x = torch.zeros(shape, dtype=torch.bfloat16, device=DEVICE)
        qdq(x, Recipe(), torch.empty_like(x), None)
        noisy_qdq(x, Recipe(), torch.empty_like(x), (1, 2, 3, 4), 0.1, None)
        assert finite_amax(x, Recipe()).item() == 0.0


@pytest.mark.parametrize("config", [Config(1024, 1), Config(1024, 1, 1), Config(2048, 4, 2), Config(4096, 4, 1)])
def test_configurations(config: Config) -> None:
    """Several programs, the last one not full, with and without whole blocks in a thread."""
    x = edge_rows(torch.bfloat16)[40:73]
    for text in ("mxfp4+of", "nvfp4:4over6", "mxfp4+mbs+of"):
        check(x, text, config=config)
    check(x[:, :120], "mxfp4+mbs", config=config)
    check(x[:20], "mxfp4+mbs:search16", config=config._replace(elements=4096))


@pytest.mark.parametrize("text", ["mxfp4+mbs:search16", "mxfp4+mbs:search16+of"])
def test_search_along_another_axis(text: str) -> None:
    x = edge_rows(torch.bfloat16)[::9].t().contiguous()
    check(x, text, dim=0)
    check(x, text, dim=0, config=None)


@pytest.mark.skipif(not CUDA, reason="needs a GPU with 9 GB free")
def test_offsets_beyond_two_to_the_31() -> None:
    rows, width = 2**20 + 2, 2048
    x = torch.zeros(rows, width, dtype=torch.bfloat16, device=DEVICE)
    x[-4:] = torch.randn(4, width, device=DEVICE)
    x[:2] = x[-2:]
    for text in ("mxfp4", "mxfp4+mbs:search16"):
        recipe = Recipe.parse(text)
        for view in (x[None], x.view(1, width, rows).transpose(1, 2), x[None, :, : width - 5]):
            out = torch.empty_strided(view.shape, view.stride(), dtype=x.dtype, device=DEVICE)
            qdq(view, recipe, out, None)
            for part in (slice(0, 4), slice(rows - 4, rows)):
                assert_same(out[0, part].cpu(), qdq_rows(view[0, part].cpu(), recipe), f"{text} {view.stride()}")
            del out


# --- the search ------------------------------------------------------------------------------------------------------


@triton.jit
def _search_kernel(
    x, best, certain, k, RULE: tl.constexpr, LARGEST: tl.constexpr, NARROW: tl.constexpr, M: tl.constexpr
):
    offsets = (
        tl.arange(0, M)[:, None, None] * 128 + tl.arange(0, 4)[None, :, None] * 32 + tl.arange(0, 32)[None, None, :]
    )
    tile = widen(tl.load(x + offsets))
    m = block_amax(tile)
    fast, sure = device._fast_search(tl.abs(tile), m, "search16", RULE, LARGEST, NARROW, False)
    exact, _ = device._exact_search(tl.abs(tile), m, "search16", RULE, LARGEST, NARROW)
    tl.store(best + tl.arange(0, M), fast)
    tl.store(certain + tl.arange(0, M), sure.to(tl.int32))
    tl.store(k + tl.arange(0, M), exact)


@pytest.mark.parametrize(
    "dtype,rule",
    [(torch.bfloat16, "ceil"), (torch.bfloat16, "floor"), (torch.float16, "even"), (torch.float32, "ceil")],
    ids=str,
)
def test_fast_search_knows_when_it_is_right(dtype: torch.dtype, rule: str) -> None:
    generator = torch.Generator().manual_seed(3)
    usual = torch.randn(96, 128, generator=generator).to(dtype)
    alike = torch.rand(32, 1, generator=generator).expand(32, 128).to(dtype)  # candidates apart by roundings alone
    x = torch.cat([torch.nn.functional.pad(edge_rows(dtype)[::2][:128], (0, 0, 0, 5))[:128], usual, alike])
    fast, certain, exact = torch.zeros(3, x.shape[0], dtype=torch.int32, device=DEVICE)
    there = x.to(DEVICE)
    for part in torch.arange(x.shape[0]).split(32 if CUDA else 256):
        part = slice(int(part[0]), int(part[-1]) + 1)
        _search_kernel[(1,)](
            there[part], fast[part], certain[part], exact[part], RULE=rule, LARGEST=torch.finfo(dtype).max,
            NARROW=dtype != torch.float32, M=part.stop - part.start, enable_fp_fusion=False,
        )  # fmt: skip
    sure = certain.bool()
    assert_same(fast[sure], exact[sure], "certain, but another k")
    assert sure[128:224].float().mean() > 0.95  # on ordinary data it hardly ever needs the exact one
    assert (fast != exact).any()  # and here it would have been wrong


@triton.jit
def _align_kernel(m, k, M: tl.constexpr):
    lane = tl.arange(0, M)
    tl.store(k + lane, device.align_mantissa(tl.load(m + lane)))


def test_align_mantissa() -> None:
    """Every boundary 384 / n and 768 / n with its neighbours, in float32, at several exponents; subnormals; 0."""
    n = torch.arange(256, 513, dtype=torch.float64)
    f = torch.cat([384 / n, 768 / n]).float()
    f = torch.cat([f, f.nextafter(f * 0), f.nextafter(f * 2)])
    bits = torch.arange(0, 2**23, 2**23 // 4093, dtype=torch.int32) | 0x3F800000
    f = torch.cat([f, bits.view(torch.float32)]).clamp(1, 2 - 2**-23)
    m = torch.cat([f, f * 2.0**100, f * 2.0**-100, f * 2.0**-130, torch.tensor([0.0, 2.0**-149])])
    m = torch.nn.functional.pad(m, (0, -m.numel() % 2**16))
    got = torch.empty(m.numel(), dtype=torch.int32, device=DEVICE)
    for begin in range(0, m.numel(), 2**16):
        part = slice(begin, begin + 2**16)
        _align_kernel[(1,)](m.view(torch.int32)[part].to(DEVICE), got[part], M=2**16)
    assert_same(got.cpu(), mbs_align(m), "align_mantissa")


@triton.jit
def _reciprocal_kernel(out):
    k = tl.arange(0, 256)
    _, inverse = device.mbs_factors(k)
    tl.store(out + k, inverse)


def test_reciprocals() -> None:
    got = torch.empty(256, device=DEVICE)
    _reciprocal_kernel[(1,)](got)
    assert_same(got.cpu(), (256 / torch.arange(256, 512, dtype=torch.float64)).float(), "fl(1 / p)")


@triton.jit
def _quotient_kernel(a, s, out, M: tl.constexpr):
    at = tl.arange(0, M)[:, None, None] * 32 + tl.arange(0, 32)[None, None, :]
    tl.store(out + at, _quotient(tl.load(a + at), tl.load(s + tl.arange(0, M))[:, None]))


def test_quotients_beside_ties() -> None:
    """fl(a / s) within 2 ulp of the grid's ties, where its last bit decides, and anywhere."""
    generator = torch.Generator().manual_seed(5)
    count = 2**14
    s = (1 + torch.rand(count, generator=generator)) * 2.0 ** torch.randint(-126, 120, (count,), generator=generator)
    tie = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])[torch.randint(0, 7, (count, 32), generator=generator)]
    steps = torch.randint(-2, 3, tie.shape, generator=generator, dtype=torch.int32)
    beside = ((tie * s[:, None]).view(torch.int32) + steps).view(torch.float32)
    for a in (beside, torch.rand(tie.shape, generator=generator) * 8 * s[:, None]):
        got = torch.empty_like(a, device=DEVICE)
        for begin in range(0, count, 2**7 if CUDA else count):
            part = slice(begin, begin + (2**7 if CUDA else count))
            _quotient_kernel[(1,)](
                a[part].to(DEVICE), s[part].to(DEVICE), got[part], M=part.stop - part.start, enable_fp_fusion=False
            )
        want = a / s[:, None]
        large = want > 2.0**-100
        assert_same(got.cpu()[large], want[large], "quotient")


# --- noise and maxima ------------------------------------------------------------------------------------------------


def key_of(seed: int, rollout: int, name: str) -> tuple[int, int, int, int]:
    """`philox_normal`'s key and counter words."""
    digest = hashlib.blake2b(f"{seed}\0{rollout}\0{name}".encode(), digest_size=16).digest()
    k0, k1, c2, c3 = (int.from_bytes(digest[i : i + 4], "little") for i in (0, 4, 8, 12))
    return k0, k1, c2, c3


@pytest.mark.parametrize("text", ["mxfp4", "mxfp4+mbs+of", "mxfp8" if CUDA else "mxfp4+mbs:search16"])
@pytest.mark.parametrize(
    "dtype,out_dtype", [(torch.bfloat16,) * 2, (torch.float32, torch.bfloat16), (torch.float32,) * 2]
)
def test_noise(text: str, dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    recipe = Recipe.parse(text)
    generator = torch.Generator().manual_seed(4)
    weight = (torch.randn(60, 150, generator=generator) * 0.02).to(dtype)
    weight[3, 5] = torch.finfo(dtype).max  # the noised value stays finite or poisons its block, as in the reference
    weight[9, 149] = float("nan")
    z = philox_normal(7, 3, "w", 0, weight.numel()).view_as(weight)
    noised = (weight.float() + z * torch.tensor(0.013)).to(out_dtype)
    for dim in (0, 1):
        rows = noised.movedim(dim, -1)
        want = qdq_rows(rows.contiguous(), recipe)
        there = weight.to(DEVICE)
        before = there.clone()
        out = torch.empty_like(there, dtype=out_dtype)
        noisy_qdq(as_abk(there, dim), recipe, as_abk(out, dim), key_of(7, 3, "w"), 0.013, None, config=LARGE)
        assert_same(as_abk(out, dim)[0].cpu().contiguous(), want, f"{text} dim={dim}")
        assert_same(there, before, "the weights")


@triton.jit(do_not_specialize=["start", "k0", "k1", "c2", "c3"])
def _noise_kernel(out, start, k0, k1, c2, c3, M: tl.constexpr):
    lane = tl.arange(0, M)
    tl.store(out + lane, standard_normal(lane.to(tl.int64) + start, k0, k1, c2, c3))


@pytest.mark.parametrize("start", [0, 2**34 + 3])
def test_noise_bits(start: int) -> None:
    words = [w - (w >> 31 << 32) for w in key_of(1, 0, "n")]
    out = torch.empty(2**14, device=DEVICE)
    for begin in range(0, 2**14, 2**11 if CUDA else 2**14):
        part = out[begin : begin + (2**11 if CUDA else 2**14)]
        _noise_kernel[(1,)](part, start + begin, *words, M=part.numel(), enable_fp_fusion=False)
    assert_same(out.cpu(), philox_normal(1, 0, "n", start, 2**14), "noise")


@pytest.mark.parametrize("text", ["mxfp4", "nvfp4"])
def test_finite_amax(text: str) -> None:
    recipe = Recipe.parse(text)
    for dtype in DTYPES:
        x = edge_rows(dtype)
        small = x.abs().amax(1) < 100
        bad = ~x.isfinite().all(1)
        for part in (x, x[small | bad], x[bad], x[:, :45], x[small].t(), x.t().contiguous().t()):
            rows = part.reshape(-1, part.shape[-1])
            want = finite_max(to_blocks(rows, recipe))
            there = torch.empty_strided(part.shape, part.stride(), dtype=dtype, device=DEVICE).copy_(part)
            assert_same(finite_amax(there[None], recipe, config=LARGE).cpu(), want, f"{dtype} {tuple(part.shape)}")
    nan = torch.full((2, 3, 40), float("nan"), device=DEVICE)
    assert finite_amax(nan, recipe).item() == 0.0


def test_unsupported() -> None:
    assert unsupported(Recipe(), torch.bfloat16) is None
    assert "float64" in (unsupported(Recipe(), torch.float64) or "")
    assert "96" in (unsupported(Recipe(mbs="align", macro=96), torch.float32) or "")
    assert "8192" in (unsupported(Recipe(mbs="align", macro=8192), torch.float32) or "")
    assert unsupported(Recipe(mbs="align", macro=4096), torch.float32) is None
    assert unsupported(Recipe(macro=96), torch.float32) is None  # without MBS there are no macro-blocks
    x = torch.zeros(1, 1, 32, dtype=torch.float64, device=DEVICE)
    with pytest.raises(ValueError, match="float64"):
        qdq(x, Recipe(), x, None)

"""The Triton pack and unpack against the torch reference, bit for bit: every field, dtype, rule, correction, layout.

Runs on the GPU where there is one, else in Triton's interpreter, where a program costs milliseconds whatever its tile:
the cases of one dtype are rows of one tensor.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from edge_cases import known_bytes
from fused_cases import tensor_scale
from oracles.bits import assert_same
from triton_cases import CUDA, DEVICE, DTYPES, edge_rows, on_device

from mxrl import Recipe
from mxrl.ops import pack as reference
from mxrl.ops.pack_triton import PACK, pack, unpack, unsupported
from mxrl.ops.qdq_triton import Config

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter: overflow is meant

LARGE = None if CUDA else Config(1 << 15, 4)
RECIPES = (
    "mxfp4", "mxfp4:floor", "mxfp4:even", "mxfp4:e8m1", "mxfp4:e8m3", "mxfp4:e8m8", "mxfp8", "nvfp4", "nvfp4:4over6",
    "mxfp4+of", "mxfp4+of:0", "mxfp4+of:0.3", "mxfp4:floor+of:1", "mxfp4+mbs", "mxfp4+mbs+of:0.7",
    "mxfp4:e8m2+mbs+macro=64", "mxfp4:even+mbs:search16+of", "mxfp4+mbs:joint",
)  # fmt: skip


def check(x_ABK: Tensor, text: str, config: Config | None = LARGE, out_dtypes: tuple[torch.dtype, ...] = ()) -> None:
    """Every field as the reference has it, and the values back in x's dtype and `out_dtypes`."""
    recipe = Recipe.parse(text)
    scale = tensor_scale(x_ABK, recipe)
    there, scale_there = on_device(x_ABK), None if scale is None else scale.to(DEVICE)
    want = reference.pack(x_ABK, recipe, scale)
    got = pack(there, recipe, scale_there, config=config)
    for index, (g, w) in enumerate(zip(got, want, strict=True)):
        for name in w._fields:
            a, b = getattr(g, name), getattr(w, name)
            if b is None:
                assert a is None
            else:
                assert a.is_contiguous()
                assert_same(a.cpu(), b, f"{text} pass {index}: {name}")
    for dtype in (x_ABK.dtype, *out_dtypes):
        out = on_device(torch.empty_strided(x_ABK.shape, x_ABK.stride(), dtype=dtype))
        wanted = torch.empty(x_ABK.shape, dtype=dtype)
        unpack(got, recipe, out, x_ABK.dtype, scale_there, config=config)
        reference.unpack(want, recipe, wanted, x_ABK.dtype, scale)
        assert_same(out.cpu().contiguous(), wanted, f"{text}: {x_ABK.dtype} unpacked as {dtype}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("text", RECIPES)
def test_edge_cases(text: str, dtype: torch.dtype) -> None:
    check(edge_rows(dtype), text)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_known_bytes(dtype: torch.dtype) -> None:
    """Codes and scales derived by hand, not by the reference."""
    cases = known_bytes(dtype)
    rows = torch.cat([torch.nn.functional.pad(x[None], (0, 32 - x.shape[0])) for _, x, _, _ in cases])
    packed = pack(rows[None].to(DEVICE), Recipe(), None, config=LARGE)[0]
    for row, (name, _, scales, codes) in enumerate(cases):
        assert packed.scales[row].tolist() == scales, name
        assert packed.codes[row, : len(codes)].tolist() == codes, name
        assert not packed.codes[row, len(codes) :].any(), name


@pytest.mark.parametrize("text", ["mxfp4+of", "nvfp4", "mxfp8", "mxfp4+mbs"])
def test_other_dtypes_come_out(text: str) -> None:
    """Into a narrower dtype the values saturate: bf16's 3e38 becomes fp16's 65504."""
    check(edge_rows(torch.bfloat16), text, out_dtypes=(torch.float16, torch.float32, torch.float64))


@pytest.mark.parametrize("text", ["mxfp4+of", "mxfp4:e8m3", "mxfp4+mbs", "nvfp4", "mxfp8"])
def test_any_bytes(text: str) -> None:
    """Whatever is stored: every code (E4M3's NaN too), every scale, every mantissa, α·x2 past the dtype's largest."""
    recipe, x = Recipe.parse(text), torch.zeros(1, 16, 256, dtype=torch.bfloat16)
    scale = torch.tensor(0.75) if recipe.base == "nvfp4" else None
    g = torch.Generator().manual_seed(6)
    packed = [
        reference.PackedPass(
            *(None if t is None else torch.randint(256, t.shape, generator=g).to(t.dtype) for t in one_pass)
        )
        for one_pass in reference.pack(x, recipe, scale)
    ]
    if text == "mxfp4:e8m3":
        scales = torch.randint(255 << 3, packed[0].scales.shape, generator=g).int()
        scales[0] = torch.arange(8)  # the least exponent, 2^-127, whose float32 is subnormal
        packed = [packed[0]._replace(scales=scales)]
    for dtype in (torch.bfloat16, torch.float32):
        out, want = torch.empty_like(x, device=DEVICE, dtype=dtype), torch.empty_like(x, dtype=dtype)
        there = [reference.PackedPass(*(None if t is None else t.to(DEVICE) for t in p)) for p in packed]
        unpack(there, recipe, out, x.dtype, None if scale is None else scale.to(DEVICE), config=LARGE)
        reference.unpack(packed, recipe, want, x.dtype, scale)
        assert_same(out.cpu(), want, f"{text} {dtype}")


@pytest.mark.parametrize("k", [1, 2, 31, 33, 95, 96, 128, 257])
def test_widths(k: int) -> None:
    x = torch.randn(1, 5, k, generator=torch.Generator().manual_seed(k)).to(torch.bfloat16)
    for text in ("mxfp4+of", "nvfp4", "mxfp8", "mxfp4+mbs"):
        check(x, text)


def layouts() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(2)
    x = torch.randn(2, 160, 24, generator=g)
    return {
        "contiguous": x.reshape(2, 24, 160),
        "blocked along the middle": x.movedim(1, -1),
        "blocked along the first": torch.randn(96, 10, generator=g).t()[None],
        "every other row": torch.randn(3, 18, 64, generator=g)[:, ::2],
        "part of a row": torch.randn(3, 9, 64, generator=g)[:, :, 5:55],
        "every other element": torch.randn(1, 9, 130, generator=g)[:, :, ::2],
        "A inside B": torch.randn(9, 3, 64, generator=g).transpose(0, 1),
    }


@pytest.mark.parametrize("name", layouts())
def test_strides(name: str) -> None:
    for text in ("mxfp4", "mxfp4+mbs+of"):
        check(layouts()[name], text)


def test_small_tiles() -> None:
    """More programs than one, the last of them partly empty, with and without a thread for a whole block."""
    x = torch.randn(1, 9, 320, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    for text in ("mxfp4", "mxfp4+mbs+of", "nvfp4"):
        for config in (Config(512, 1), Config(1024, 4, owned=True)):
            check(x, text, config)


def test_nothing_is_written_beyond(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ragged rows: the bytes behind the last row stay as they are."""
    behind: list[Tensor] = []

    def empty(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        count = shape[0] * shape[1]
        whole = torch.full((count + 64,), 77, dtype=dtype, device=device)
        behind.append(whole[count:])
        return whole[:count].view(shape)

    monkeypatch.setattr("mxrl.ops.pack_triton.torch.empty", empty)
    for k in (34, 64, 66, 130):
        for text in ("mxfp4+of", "mxfp4+mbs", "mxfp4:e8m3", "mxfp8"):
            pack(torch.ones(1, 3, k, device=DEVICE), Recipe.parse(text), None, config=Config(512, 1))
    assert len(behind) == 4 * (4 + 3 + 2 + 2)
    assert all((tail == 77).all() for tail in behind)


@pytest.mark.parametrize("shape", [(0, 3, 64), (2, 0, 64), (2, 3, 0), (0, 0, 0)])
def test_empty(shape: tuple[int, int, int]) -> None:
    for text in ("mxfp4+of", "mxfp4:e8m3", "mxfp8", "mxfp4+mbs"):
        recipe, x = Recipe.parse(text), torch.zeros(shape, device=DEVICE)
        got, want = pack(x, recipe, None), reference.pack(x.cpu(), recipe, None)
        for g, w in zip(got, want, strict=True):
            for a, b in zip(g, w, strict=True):
                assert (a is None) == (b is None)
                assert a is None or (a.shape == b.shape and a.dtype == b.dtype)
        unpack(got, recipe, torch.empty_like(x), x.dtype, None)


def test_what_it_does_not_do() -> None:
    assert unsupported(Recipe.parse("mxfp4:ideal"), torch.float32) is not None
    assert unsupported(Recipe(), torch.float64) is not None
    assert unsupported(Recipe.parse("mxfp4+mbs+macro=96"), torch.float32) is not None
    assert all(unsupported(Recipe.parse(text), dtype) is None for text in RECIPES for dtype in DTYPES)
    assert set(PACK) == {"plain", "mbs", "search", "columns"}

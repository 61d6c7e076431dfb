"""fake_quantize, quantize and dequantize against the scalar oracle, bit for bit, and what must hold for any input."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from edge_cases import DTYPES, edge_cases, known_bytes
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import scalar
from oracles.agreement import check
from oracles.bits import assert_same, oracle, rows_of

import mxrl
from mxrl import Recipe, fake_quantize, quantize

MAIN = ("mxfp4", "mxfp4:ideal", "mxfp4:e8m3", "mxfp8", "nvfp4", "nvfp4:4over6", "mxfp4+mbs", "mxfp4+of")
VARIANTS = (
    "mxfp4:floor", "mxfp4:even", "mxfp4:e8m1", "mxfp4:e8m2", "mxfp4:e8m5", "mxfp4:e8m8",
    "mxfp4:floor+mbs", "mxfp4:e8m3+mbs", "mxfp4+macro=32+mbs", "mxfp4+macro=96+mbs", "mxfp4+of:0.3", "mxfp4+of:1",
    "mxfp4+of:0", "mxfp4:even+of:0.75", "mxfp4+mbs+of", "mxfp4:e8m2+mbs+of:0.7", "mxfp4:ideal+mbs+of",
)  # fmt: skip
SEARCHED = ("mxfp4+mbs:search16", "mxfp4+mbs:joint", "mxfp4:floor+mbs:search16", "mxfp4+mbs:search16+of")
PLAIN = (*MAIN, *VARIANTS)
# cases that differ from their neighbours in width alone: for the main recipes only
WIDTHS = ("width_896", *(f"ragged_{n}" for n in range(1, 34) if n not in (1, 31, 33)))

DTYPE_IDS = [str(d).removeprefix("torch.") for d in DTYPES]


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("text", PLAIN)
def test_edge_cases(text, dtype):
    for name, x in edge_cases(dtype):
        if text in MAIN or name not in WIDTHS:
            check(x, text, f"{text} {name}")


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_random(dtype):
    """Ordinary data, with the exact ties that bf16 and fp16 weights are full of; every recipe."""
    g = torch.Generator().manual_seed(7)
    for scale in (1.0, 0.02, 300.0):
        x = (torch.randn(2, 200, generator=g, dtype=torch.float64) * scale).to(dtype)
        for text in PLAIN:
            check(x, text, f"{text} N(0, {scale}²)")


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_known_bytes(dtype):
    """Bytes derived by hand (edge_cases.known_bytes): the oracle and the package both give them."""
    for name, x, scales, codes in known_bytes(dtype):
        first = oracle(x, Recipe())[1].first
        assert first.scales == [scales] and scalar.pack(first.codes[0], "mxfp4") == codes, f"oracle: {name}"
        packed = quantize(x)
        assert packed.scales.tolist() == scales and packed.codes.tolist() == codes, name


# --- axes, outputs, shapes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["mxfp4", "nvfp4:4over6", "mxfp8", "mxfp4:e8m3", "mxfp4+mbs+of", "mxfp4+mbs:search16"])
def test_any_dim(text):
    x = torch.randn(3, 40, 2, generator=torch.Generator().manual_seed(8))
    for dim in (0, 1, 2, -1, -2, -3):
        check(x, text, f"dim={dim}", dim)
        moved = fake_quantize(x.movedim(dim, -1).contiguous(), text).movedim(-1, dim)
        assert_same(fake_quantize(x, text, dim=dim), moved.contiguous(), f"dim={dim} moved")
        blocks = -(-x.shape[dim] // Recipe.parse(text).format.block)
        assert quantize(x, text, dim=dim).scales.shape == (*x.movedim(dim, -1).shape[:-1], blocks)


@pytest.mark.parametrize("text", ["mxfp4", "mxfp8", "nvfp4", "mxfp4:ideal", "mxfp4+mbs+of"])
def test_not_contiguous(text):
    base = torch.randn(48, 80, generator=torch.Generator().manual_seed(9))
    for name, x in (("transposed", base.t()), ("strided", base[::2, ::3]), ("expanded", base[:1].expand(4, 80))):
        want = fake_quantize(x.contiguous(), text)
        got = fake_quantize(x, text)
        assert_same(got, want, name)
        if text != "mxfp4:ideal":
            assert_same(quantize(x, text).dequantize(), want, name)


@pytest.mark.parametrize("text", ["mxfp4", "nvfp4", "mxfp4+mbs:search16+of", "bf16"])
def test_out(text):
    x = torch.randn(5, 70, generator=torch.Generator().manual_seed(10))
    want = fake_quantize(x, text).clone()
    out = torch.full_like(x, 9.0)
    assert fake_quantize(x, text, out=out) is out
    assert_same(out, want)
    strided = torch.full((70, 5), 9.0).t()
    assert fake_quantize(x, text, out=strided) is strided
    assert_same(strided.contiguous(), want)
    for dim in (0, 1):
        axis_want = fake_quantize(x, text, dim=dim).clone()
        assert_same(fake_quantize(x, text, dim=dim, out=torch.empty_like(x)), axis_want)
    y = x.clone()
    assert_same(fake_quantize(y, text, out=y), want, "in place")
    with pytest.raises(ValueError, match="out"):
        fake_quantize(x, text, out=torch.empty(5, 71))
    with pytest.raises(ValueError, match="out"):
        fake_quantize(x, text, out=torch.empty(5, 70, dtype=torch.bfloat16))


@pytest.mark.parametrize("text", ["mxfp4", "mxfp4:e8m3", "mxfp8", "nvfp4", "nvfp4:4over6", "mxfp4+mbs:search16+of"])
@pytest.mark.parametrize("shape", [(0, 32), (3, 0), (0,), (2, 0, 5), (0, 0)])
def test_empty(text, shape):
    x = torch.zeros(shape, dtype=torch.bfloat16)
    for dim in range(len(shape)):
        assert fake_quantize(x, text, dim=dim).shape == shape
        packed = quantize(x, text, dim=dim)
        k, lead = shape[dim], tuple(s for i, s in enumerate(shape) if i != dim)
        fmt = packed.recipe.format
        assert packed.codes.shape == (*lead, k if fmt.name == "mxfp8" else -(-k // 2))
        assert packed.scales.shape == (*lead, -(-k // fmt.block))
        assert packed.dequantize().shape == shape and packed.dequantize().dtype == torch.bfloat16


def test_input_is_left_alone_and_no_gradient_flows():
    x = torch.randn(4, 64, requires_grad=True)
    before = x.detach().clone()
    out = fake_quantize(x, "mxfp4+mbs+of")
    assert not out.requires_grad
    assert_same(x.detach(), before)


def test_bf16_is_the_identity():
    x = torch.randn(3, 5)
    assert fake_quantize(x, "bf16") is x


def test_dequantize_into_another_dtype():
    """Rounded once from the arithmetic's value, not twice over the dtype that was quantized."""
    x = torch.randn(4, 128, generator=torch.Generator().manual_seed(11)).to(torch.bfloat16)
    packed = quantize(x, "mxfp4+mbs+of")
    assert_same(packed.dequantize(torch.float32).to(torch.bfloat16), fake_quantize(x, "mxfp4+mbs+of"))
    wide = oracle(x, Recipe.parse("mxfp4+mbs"))[1].first.values  # float32 values before the last rounding
    assert_same(quantize(x, "mxfp4+mbs").dequantize(torch.float32), torch.tensor(wide))
    assert quantize(torch.full((32,), 3e38), "mxfp4").dequantize(torch.float16).isfinite().all()


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("mode", ["mbs", "mbs:search16+of", "mbs:joint"])
@pytest.mark.parametrize("width", [1, 32, 100, 150])
def test_a_macro_block_longer_than_the_row_is_the_row(backend, mode, width):
    x = torch.randn(5, width)
    x[2, width // 2] = math.inf
    longest = Recipe.parse(f"mxfp4+{mode}+macro={1 << 20}")  # padded to it, a row would take 4 MB
    fitting = Recipe.parse(f"mxfp4+{mode}+macro={-(-width // 32) * 32}")
    values = fake_quantize(x, longest, backend=backend)
    assert_same(values, fake_quantize(x, fitting, backend=backend))
    packed, other = quantize(x, longest, backend=backend), quantize(x, fitting, backend=backend)
    assert_same(packed.dequantize(backend=backend), values)
    for a, b in ((packed.codes, other.codes), (packed.scales, other.scales)):
        assert torch.equal(a, b)
    assert packed.macro_mantissas is not None and torch.equal(packed.macro_mantissas, other.macro_mantissas)
    stats = [mxrl.error_stats(x, recipe, backend=backend) for recipe in (longest, fitting)]
    assert stats[0] == stats[1]  # the sums too: nothing is added in another order
    injected = [mxrl.inject(x, ("scale",), recipe=recipe, backend=backend) for recipe in (longest, fitting)]
    assert_same(*injected)


@pytest.mark.parametrize("call", [fake_quantize, quantize])
def test_errors(call):
    x = torch.randn(2, 32)
    with pytest.raises(ValueError, match="0-d"):
        call(torch.tensor(1.0), "mxfp4")
    with pytest.raises(IndexError, match="dim=2"):
        call(x, "mxfp4", dim=2)
    with pytest.raises(TypeError, match="int"):
        call(torch.ones(2, 32, dtype=torch.int32), "mxfp4")
    with pytest.raises(ValueError, match="mxfp5"):
        call(x, "mxfp5")


CALLS = [fake_quantize, quantize, mxrl.decompose, mxrl.error_stats, lambda x, recipe, **o: mxrl.inject(x, **o)]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("x", [np.zeros((2, 32), np.float32), [[1.0, 2.0]], None], ids=["array", "list", "None"])
def test_what_is_no_tensor(call, x):
    with pytest.raises(TypeError, match=rf"^\w+: expected a torch\.Tensor, got {type(x).__name__} ") as error:
        call(x, "mxfp4")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_tensors(call, layout):
    with pytest.raises(TypeError, match=rf"^\w+: expected a dense tensor, got one of layout {layout}; x\.to_dense\(\)"):
        call(torch.eye(32).to_sparse(layout=layout), "mxfp4")


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("dim", ["x", 1.0, None])
def test_an_axis_that_is_no_number(call, dim):
    with pytest.raises(TypeError, match=rf"^\w+: dim={dim!r} must be a whole number"):
        call(torch.randn(2, 32), "mxfp4", dim=dim)


def test_ideal_and_bf16_have_no_packed_form():
    for text in ("mxfp4:ideal", "mxfp4:ideal+mbs", "bf16"):
        with pytest.raises(ValueError, match=text.split("+")[0]):
            quantize(torch.randn(2, 32), text)


# --- many rows: chunking, threads -----------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["mxfp4", "nvfp4", "mxfp4+mbs+of"])
def test_chunks_do_not_show(text):
    """A tensor larger than a chunk equals its rows quantized one by one (NVFP4: with the whole tensor's scale)."""
    x = torch.randn(300, 8192, generator=torch.Generator().manual_seed(12)).to(torch.bfloat16)
    whole = fake_quantize(x, text)
    if text == "nvfp4":
        x[-1, -1] = 40.0  # the tensor's maximum stands in the last chunk
        whole = fake_quantize(x, text)
        part = fake_quantize(torch.cat([x[:7], x[-1:]]), text)
        assert_same(whole[:7], part[:7])
    else:
        for i in (0, 127, 128, 299):
            assert_same(whole[i], fake_quantize(x[i], text))
    assert_same(quantize(x, text).dequantize(), whole)


# --- properties -----------------------------------------------------------------------------------------------------

finite_float32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
finite_float16 = st.floats(width=16, allow_nan=False, allow_infinity=False)
ordinary = st.floats(min_value=-1e6, max_value=1e6, width=32)
lists = st.lists(finite_float32, min_size=1, max_size=70)
long_lists = st.lists(finite_float32, min_size=33, max_size=140)
ordinary_lists = st.lists(ordinary, min_size=1, max_size=70)
QUICK = settings(max_examples=60, deadline=None, derandomize=True)


@given(lists, st.sampled_from(PLAIN))
@QUICK
def test_any_finite_float32_agrees_with_the_oracle_and_stays_finite(values, text):
    x = torch.tensor(values)
    check(x, text, text)
    assert fake_quantize(x, text).isfinite().all()


@given(
    st.lists(st.floats(width=16, allow_nan=False, allow_infinity=False), min_size=1, max_size=40),
    st.sampled_from(PLAIN),
)
@QUICK
def test_any_finite_float16_agrees_with_the_oracle_and_stays_finite(values, text):
    x = torch.tensor(values, dtype=torch.float16)
    check(x, text, text)
    assert fake_quantize(x, text).isfinite().all()


@given(lists, st.sampled_from((*PLAIN, *SEARCHED)))
@QUICK
def test_sign_symmetry(values, text):
    x = torch.tensor(values)
    assert_same(fake_quantize(-x, text), -fake_quantize(x, text), text)


@given(ordinary_lists, st.integers(-20, 20), st.sampled_from([t for t in (*PLAIN, *SEARCHED)]))
@QUICK
def test_powers_of_two_pass_through(values, shift, text):
    """Q(2^n x) = 2^n Q(x), away from the ends of the range."""
    x = torch.tensor(values)
    x = torch.where(x.abs() < 1e-3, torch.zeros_like(x), x)
    assert_same(fake_quantize(x * 2.0**shift, text), fake_quantize(x, text) * 2.0**shift, text)


@given(lists)
@QUICK
def test_quantizing_again_keeps_the_values(values):
    """Under plain ceil the values stay (the scale codes may not: numerics, peers)."""
    once = fake_quantize(torch.tensor(values), "mxfp4")
    assert_same(fake_quantize(once, "mxfp4"), once)


def test_quantizing_again_changes_scale_codes():
    """A maximum may round down, and a scale derived again is then smaller: 28 % of N(0, .02²)'s blocks, same values."""
    x = torch.randn(512, 512, generator=torch.Generator().manual_seed(13)) * 0.02
    packed = quantize(x)
    again = quantize(packed.dequantize())
    assert (packed.scales != again.scales).double().mean().item() == pytest.approx(0.28, abs=0.02)
    assert_same(again.dequantize(), packed.dequantize())


@given(lists)
@QUICK
def test_ceil_never_clips(values):
    """|x| / s <= 6 under ceil: no element is further from its value than half the grid's step there."""
    x = torch.tensor(values)
    packed = quantize(x)
    for i in range(0, len(values), 32):
        scale = 2.0 ** (packed.scales[i // 32].item() - 127)
        assert x[i : i + 32].double().abs().max().item() <= 6 * scale


@given(
    st.lists(finite_float32, min_size=33, max_size=140),
    st.integers(0, 32),
    st.sampled_from([math.nan, math.inf, -math.inf]),
)
@QUICK
def test_poison_stays_in_its_block(values, at, poison):
    x = torch.tensor(values)
    bad = x.clone()
    bad[at] = poison
    block = at // 32
    for text in ("mxfp4", "mxfp8", "mxfp4:ideal", "mxfp4:e8m3", "mxfp4+of"):
        got, want = fake_quantize(bad, text), fake_quantize(x, text)
        end = min(32 * block + 32, len(values))
        assert got[32 * block : end].isnan().all()
        keep = torch.ones(len(values), dtype=torch.bool)
        keep[32 * block : end] = False
        assert_same(got[keep], want[keep], text)
        if text != "mxfp4:ideal":
            code = quantize(bad, text).scales[block].item()
            assert code == (255 << 3 if text.endswith("e8m3") else 255)


def test_rows_are_independent():
    """Blocks never straddle rows: a tensor is its rows, one by one."""
    x = torch.randn(5, 48, generator=torch.Generator().manual_seed(14))
    for text in ("mxfp4", "mxfp8", "mxfp4+mbs:search16+of"):
        assert_same(fake_quantize(x, text), torch.stack([fake_quantize(row, text) for row in x]), text)


def test_oracle_reads_rows():
    """The oracle's own conversion: a wrong axis there would hide a wrong axis here."""
    x = torch.arange(6.0).view(2, 3)
    assert rows_of(x) == [[0, 1, 2], [3, 4, 5]] and rows_of(x, 0) == [[0, 3], [1, 4], [2, 5]]

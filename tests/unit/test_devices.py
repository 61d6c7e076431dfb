"""Each backend on the GPU against the reference on the CPU, bit for bit. Skips without a CUDA GPU.

Few launches, and few compilations of Triton kernels, so that all of it takes about a minute with -n 8: the rows of
every edge case are one tensor (filled up with zeros to the widest), and its ragged, strided and in-place forms go
through a few recipes only. tests/unit/test_*_triton.py go through the rest.
"""

import functools
import importlib

import pytest
import torch
from edge_cases import DTYPES, edge_cases

import mxrl
from mxrl import Recipe
from mxrl.corrections import noise_key, philox_normal
from mxrl.ops.dispatch import BackendError
from mxrl.rl.rollout import without_cudnn_attention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

BACKENDS = ("triton", "reference")
RECIPES = (
    "mxfp4", "mxfp4+mbs", "mxfp4+of", "mxfp4+mbs+of", "nvfp4", "mxfp8", "mxfp4:floor", "mxfp4:even", "mxfp4:ideal",
    "mxfp4:e8m1", "mxfp4:e8m3", "mxfp4:e8m8", "nvfp4:4over6", "mxfp4+of:1", "mxfp4+of:0", "mxfp4:floor+mbs",
    "mxfp4:even+of:0.3", "mxfp4:e8m3+mbs+of", "mxfp4+mbs+macro=32", "mxfp4+mbs:search16", "mxfp4+mbs:joint",
    "mxfp4+mbs:search16+of:0.3", "mxfp4:floor+mbs:search16", "mxfp4+mbs:joint+of", "mxfp4+mbs:search256",
)  # fmt: skip
SOME = ("mxfp4", "mxfp4+mbs+of", "nvfp4", "mxfp8")  # in every form of tensor
PACKED = ("mxfp4", "mxfp4+mbs", "mxfp4+mbs+of", "mxfp4:e8m3", "nvfp4", "nvfp4:4over6", "mxfp8")
STATS = ("mxfp4", "mxfp4:floor", "mxfp4:ideal", "mxfp4+mbs", "mxfp4+mbs+of", "nvfp4", "mxfp8")
NARROW = (torch.float32, torch.bfloat16)
INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
KEY = noise_key(7, 3, "model.layers.0.mlp.up_proj.weight")


def assert_same(a: torch.Tensor, b: torch.Tensor) -> None:
    """Bit for bit, but for the payloads of NaN, which no specification fixes."""
    a, b = a.cpu().contiguous(), b.cpu().contiguous()
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    if a.is_floating_point():
        assert torch.equal(a.isnan(), b.isnan())
        a, b = (torch.where(t.isnan(), 0.0, t).view(INTEGER[t.element_size()]) for t in (a, b))
    if not torch.equal(a, b):
        where = tuple((a != b).nonzero()[0].tolist())
        pytest.fail(f"{int((a != b).sum())} of {a.numel()} differ, first at {where}: bits {a[where]} and {b[where]}")


@functools.cache
def edges(dtype: torch.dtype) -> torch.Tensor:
    """Every edge case's rows [R, 896], then ordinary rows of several sizes."""
    rows = [x.reshape(-1, x.shape[-1]) for _, x in edge_cases(dtype) if x.numel()]
    width = max(x.shape[-1] for x in rows)
    rows = [torch.nn.functional.pad(x, (0, width - x.shape[-1])) for x in rows]
    return torch.cat([*rows, *(ordinary(dtype) * size for size in (1.0, 0.02, 1e-6))])


@functools.cache
def ordinary(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(32, 896, generator=torch.Generator().manual_seed(0)).to(dtype)


@functools.cache
def expected(recipe: str, dtype: torch.dtype, what: str = "edges", dim: int = -1) -> torch.Tensor:
    x = edges(dtype) if what == "edges" else ordinary(dtype)
    return mxrl.fake_quantize(x, recipe, dim=dim, backend="reference")


def skip_unserved(backend: str, dtype: torch.dtype) -> None:
    if backend == "triton" and dtype == torch.float64:
        pytest.skip("float64 is the reference's alone")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_quantization(backend, recipe, dtype):
    skip_unserved(backend, dtype)
    assert_same(mxrl.fake_quantize(edges(dtype).cuda(), recipe, backend=backend), expected(recipe, dtype))
    # NVFP4's tensor scale is that of the whole tensor: among the edge cases everything ordinary is tiny
    ours = mxrl.fake_quantize(ordinary(dtype).cuda(), recipe, backend=backend)
    assert_same(ours, expected(recipe, dtype, "ordinary"))


@pytest.mark.parametrize("recipe", SOME)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_form_of_tensor(backend, recipe):
    x = edges(torch.bfloat16)
    for width in (1, 17, 33, 129):
        ragged = x[:, :width].contiguous()
        assert_same(
            mxrl.fake_quantize(ragged.cuda(), recipe, backend=backend),
            mxrl.fake_quantize(ragged, recipe, backend="reference"),
        )
    strided = x[:, :17]  # its rows lie 896 apart
    theirs = mxrl.fake_quantize(strided, recipe, backend="reference")
    assert_same(mxrl.fake_quantize(x.cuda()[:, :17], recipe, backend=backend), theirs)
    assert_same(mxrl.fake_quantize(x.cuda(), recipe, dim=0, backend=backend), expected(recipe, x.dtype, dim=0))
    experts = ordinary(x.dtype).reshape(4, 64, 112)  # blocked along the middle, as gpt-oss's
    theirs = mxrl.fake_quantize(experts, recipe, dim=1, backend="reference")
    assert_same(mxrl.fake_quantize(experts.cuda(), recipe, dim=1, backend=backend), theirs)
    in_place = x.cuda()
    mxrl.fake_quantize(in_place, recipe, out=in_place, backend=backend)
    assert_same(in_place, expected(recipe, x.dtype))
    transposed = torch.empty(x.shape[::-1], dtype=x.dtype, device="cuda").t()
    mxrl.fake_quantize(x.cuda(), recipe, out=transposed, backend=backend)
    assert_same(transposed, expected(recipe, x.dtype))
    for shape in ((0, 32), (3, 0), (0,)):
        assert mxrl.fake_quantize(torch.zeros(shape, device="cuda"), recipe, backend=backend).shape == shape


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("recipe", PACKED)
@pytest.mark.parametrize("backend", BACKENDS)
def test_packing(backend, recipe, dtype):
    skip_unserved(backend, dtype)
    for x in (edges(dtype), ordinary(dtype)[:, :33].contiguous()):
        ours, theirs = (mxrl.quantize(t, recipe, backend=b) for t, b in ((x.cuda(), backend), (x, "reference")))
        values = mxrl.fake_quantize(x, recipe, backend="reference")
        assert_same(ours.dequantize(backend=backend), values)
        while ours is not None and theirs is not None:
            for name in ("codes", "scales", "macro_mantissas", "tensor_scale"):
                a, b = getattr(ours, name), getattr(theirs, name)
                assert (a is None) == (b is None)
                if a is not None:
                    assert_same(a, b)
            ours, theirs = ours.residual, theirs.residual
        assert ours is None and theirs is None


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("recipe", STATS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_statistics(backend, recipe, dtype):
    for x in (ordinary(dtype), edges(dtype), ordinary(dtype)[:, :33].contiguous()):
        ours = mxrl.error_stats(x.cuda(), recipe, backend=backend).to_dict()
        theirs = mxrl.error_stats(x, recipe, backend="reference").to_dict()
        size = max(theirs["sq_norm"], theirs["sq_error"])
        for name, value in theirs.items():
            if isinstance(value, float):
                # sums are added in another order: 1e-12 of themselves, or of what cancels in them
                cancels = {"dot": size, "delta": theirs["delta_count"]}.get(name.split("_")[0], 0.0)
                value = pytest.approx(value, rel=1e-12, abs=1e-12 * cancels)
            assert ours[name] == value, name


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("recipe", SOME)
@pytest.mark.parametrize("backend", BACKENDS)
def test_injection(backend, recipe, dtype):
    x = edges(dtype)
    for chosen in (("scale",), ("deadzone", "grid"), ("scale", "deadzone", "grid"), ()):
        ours = mxrl.inject(x.cuda(), chosen, recipe=recipe, backend=backend)
        assert_same(ours, mxrl.inject(x, chosen, recipe=recipe, backend="reference"))


def test_noise():
    name = "model.layers.0.mlp.up_proj.weight"
    assert_same(philox_normal(7, 3, name, 0, 5_000_000, "cuda"), philox_normal(7, 3, name, 0, 5_000_000))


@pytest.mark.parametrize("recipe", ("mxfp4", "mxfp4+mbs+of"))
@pytest.mark.parametrize("backend", BACKENDS)
def test_noisy_quantization(backend, recipe):
    recipe = Recipe.parse(recipe)
    ours = importlib.import_module("mxrl.ops.qdq" + ("" if backend == "reference" else "_" + backend))
    theirs = importlib.import_module("mxrl.ops.qdq")
    for dtype, to in (
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float32),
    ):
        w = ordinary(torch.float32)[None].to(dtype)  # [1, 32, 896]
        for view in (w, w.movedim(1, -1)):  # blocked along the other axis: the noise stays with its element
            out = torch.empty(view.shape, dtype=to)
            on_gpu = torch.empty_like(out, device="cuda")
            theirs.noisy_qdq(view, recipe, out, KEY, 0.01, None)
            # the view is moved on the device: a copy of a moved view would have other strides
            moved = w.cuda() if view is w else w.cuda().movedim(1, -1)
            ours.noisy_qdq(moved, recipe, on_gpu, KEY, 0.01, None)
            assert_same(on_gpu, out)


@pytest.mark.parametrize("recipe", ("mxfp4", "mxfp4+mbs+of"))
def test_tensors_of_more_than_2_31_elements(recipe):
    tail = ordinary(torch.bfloat16)[:, :512].contiguous()
    x = ordinary(torch.bfloat16)[:16, :512].contiguous().cuda().repeat((1 << 31) // (16 * 512) + 1, 1)
    x[-32:] = tail.cuda()
    assert x.numel() > 1 << 31
    values = mxrl.fake_quantize(tail, recipe, backend="reference")
    packed = mxrl.quantize(x, recipe, backend="triton")
    assert_same(packed.codes[-32:], mxrl.quantize(tail, recipe, backend="reference").codes)
    assert_same(packed.dequantize(backend="triton")[-32:], values)
    del packed
    assert_same(mxrl.fake_quantize(x, recipe, backend="triton")[-32:], values)
    whole = mxrl.error_stats(x, recipe, backend="triton")
    parts = [mxrl.error_stats(part, recipe, backend="triton") for part in (x[:-32], x[-32:])]
    assert whole.numel == x.numel()
    assert whole.sq_error == pytest.approx((parts[0] + parts[1]).sq_error, rel=1e-12)
    assert_same(
        mxrl.inject(x, ("scale",), recipe=recipe, backend="triton")[-32:],
        mxrl.inject(tail, ("scale",), recipe=recipe, backend="reference"),
    )


def test_float64_is_refused_by_name():
    with pytest.raises(BackendError, match="backend='triton'"):
        mxrl.fake_quantize(torch.zeros(32, dtype=torch.float64, device="cuda"), "mxfp4", backend="triton")


@pytest.mark.parametrize("length", [64, 192])
def test_rows_of_padding_have_a_gradient_without_cudnn(length: int) -> None:
    """torch's default here may be cuDNN, whose dQ is NaN at these lengths (see without_cudnn_attention)."""
    q, k, v = (torch.randn(2, 4, length, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "qkv")
    mask = torch.ones(2, 1, length, length, dtype=torch.bool, device="cuda").tril()
    mask[0, :, :, :5] = False
    with without_cudnn_attention():
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        gradients = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert all(bool(torch.isfinite(g).all()) for g in (out, *gradients))

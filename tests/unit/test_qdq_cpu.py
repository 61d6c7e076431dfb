"""ops/qdq_cpu.py against the torch reference and the scalar oracle, bit for bit."""

from __future__ import annotations

import os
import threading

import pytest
import torch
from fused_cases import DTYPES, IDS, MAIN, MX, NV, SEARCHED, WIDTHS, inputs, layouts, ordinary, tensor_scale
from oracles.bits import assert_same, oracle

from mxrl import Recipe
from mxrl.ops import qdq as reference
from mxrl.ops import qdq_cpu, rows_cpu


def both(x: torch.Tensor, recipe: Recipe, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    got, want = torch.empty_like(x), torch.empty_like(x)
    qdq_cpu.qdq(x, recipe, got, scale)
    reference.qdq(x, recipe, want, scale)
    return got, want


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("text", (*MX, *NV, *SEARCHED))
def test_equals_the_reference(text, dtype):
    recipe = Recipe.parse(text)
    for name, x, scale in inputs(dtype, recipe):
        assert_same(*both(x, recipe, scale), f"{text} {name}")


@pytest.mark.parametrize("text", ("mxfp4", "mxfp4:e8m3", "nvfp4:4over6", "mxfp4+mbs+of", "mxfp4+mbs:search16"))
def test_equals_the_oracle(text):
    recipe = Recipe.parse(text)
    for dtype in DTYPES:
        x = torch.cat([ordinary(dtype, 1, 2, 150), ordinary(dtype, 1, 2, 150, seed=2) * 3e4])
        assert_same(both(x, recipe, tensor_scale(x, recipe))[0], oracle(x, recipe)[0], text)


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("text", (*MAIN, "mxfp4+mbs:joint"))
def test_ragged_widths(text, dtype):
    recipe = Recipe.parse(text)
    for width in WIDTHS:
        x = ordinary(dtype, 2, 3, width)
        assert_same(*both(x, recipe, tensor_scale(x, recipe)), f"{text} {width}")


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("text", ("mxfp4", "nvfp4", "mxfp4+mbs+of"))
def test_layouts(text, dtype):
    """Any strides, out with x's, with others, and x itself."""
    recipe = Recipe.parse(text)
    for name, x in layouts(dtype):
        scale = tensor_scale(x, recipe)
        got, want = both(x, recipe, scale)
        assert_same(got, want, name)
        for out in (torch.empty(x.shape, dtype=dtype), torch.empty(x.shape[::-1], dtype=dtype).permute(2, 1, 0)):
            qdq_cpu.qdq(x, recipe, out, scale)
            assert_same(out, want, f"{name} into other strides")
        if name != "expanded":
            same = x.as_strided(x.shape, x.stride()) if not x.numel() else x.clone(memory_format=torch.preserve_format)
            qdq_cpu.qdq(same, recipe, same, scale)
            assert_same(same, want, f"{name} in place")


def test_only_its_rows_are_written():
    """A ragged row's last block, through masks and buffers, leaves what is around it alone."""
    for x in (ordinary(torch.float32, 1, 5, 45), ordinary(torch.float32, 1, 45, 5).transpose(1, 2)):
        for text in ("mxfp4", "mxfp4+mbs"):
            around = torch.full((7, 60), 7.0)
            out = around[1:6, 8:53][None]
            qdq_cpu.qdq(x, Recipe.parse(text), out, None)
            assert_same(out, both(x, Recipe.parse(text), None)[1])
            out.fill_(7.0)
            assert (around == 7.0).all()


@pytest.mark.parametrize("text", ("mxfp4", "mxfp4+mbs+of"))
def test_threads(text, monkeypatch):
    """The same bits on one thread, on two, streamed past the caches, and called from four threads at once."""
    recipe = Recipe.parse(text)
    x = ordinary(torch.float32, 1, 600, 576)
    want = both(x, recipe, None)[1]
    monkeypatch.setattr(rows_cpu, "CHUNK", 1 << 14)
    monkeypatch.setattr(rows_cpu, "WORTH_A_THREAD", 0)
    monkeypatch.setattr(qdq_cpu, "STREAM_BYTES", 0)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for layout in (x, x.transpose(1, 2).contiguous().transpose(1, 2)):
                assert_same(both(layout, recipe, None)[0], want, f"{threads} threads")
        torch.set_num_threads(2)
        results: list = [None] * 4

        def call(i: int) -> None:
            torch.set_num_threads(2)
            results[i] = [both(x, recipe, None)[0] for _ in range(3)]

        callers = [threading.Thread(target=call, args=(i,)) for i in range(4)]
        for t in callers:
            t.start()
        for t in callers:
            t.join()
        for got in results:
            for one in got:
                assert_same(one, want, "from four threads")
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("own", (True, False), ids=("caller", "pool"))
def test_an_error_in_a_chunk_reaches_the_caller(own, monkeypatch):
    """From the caller's own thread, and from the pool's."""
    monkeypatch.setattr(rows_cpu, "WORTH_A_THREAD", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    caller, raised = threading.current_thread(), threading.Event()

    def work(begin: int, end: int) -> None:
        if (threading.current_thread() is caller) == own:
            raised.set()
            raise RuntimeError("chunk")
        raised.wait(10)

    with pytest.raises(RuntimeError, match="chunk"):
        rows_cpu.each_chunk(work, 40, 10, chunk=40)
    assert rows_cpu.each_chunk(lambda begin, end: (begin, end), 10, 10, chunk=40) == [(0, 4), (4, 8), (8, 10)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_after_a_fork(monkeypatch):
    """A child has none of the pool's threads: it starts its own."""
    monkeypatch.setattr(rows_cpu, "WORTH_A_THREAD", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    names: set[str] = set()

    def chunks() -> bool:
        together = threading.Barrier(2)

        def work(begin: int, end: int) -> None:
            names.add(threading.current_thread().name)
            together.wait(10)

        rows_cpu.each_chunk(work, 2, 1, chunk=1)
        return len(names) == 2

    assert chunks()
    child = os.fork()
    if child == 0:
        names.clear()
        try:
            os._exit(0 if chunks() else 1)
        except BaseException:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("text", ("mxfp4", "nvfp4"))
def test_finite_amax(text, dtype):
    recipe = Recipe.parse(text)
    for name, x in (*((n, x) for n, x, _ in inputs(dtype, recipe)), *layouts(dtype)):
        got = qdq_cpu.finite_amax(x, recipe)
        assert got.dtype == torch.float32 and got.dim() == 0
        assert_same(got, reference.finite_amax(x, recipe).float(), f"{text} {name}")
    bad = torch.tensor([[[1.0] * 16 + [2.0] * 15 + [torch.inf] + [-0.5]]]).to(dtype)  # 32: poisoned; 16: the half
    assert qdq_cpu.finite_amax(bad, recipe).item() == (0.5 if text == "mxfp4" else 1.0)


@pytest.mark.parametrize(
    ("weight", "to"),
    [(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16,) * 2, (torch.float16,) * 2],
)
def test_noise(weight, to):
    """philox_normal's bits, by the offset in memory; two roundings; overflow of the sum poisons its block."""
    recipe, key = Recipe.parse("mxfp4"), (1, 2**32 - 1, 77, 2**31 + 5)
    for shape, moved in (
        ((1, 37, 100), (0, 1, 2)),
        ((2, 64, 33), (0, 2, 1)),
        ((1, 1, 5), (0, 1, 2)),
        ((0, 3, 4), (0, 1, 2)),
    ):
        w = ordinary(weight, *shape).permute(moved)
        for std in (1e-3, 5e4):
            want = torch.empty(w.shape, dtype=to)
            reference.noisy_qdq(w, recipe, want, key, std, None)
            for out in (torch.empty_like(w, dtype=to), torch.empty(w.shape, dtype=to)):
                qdq_cpu.noisy_qdq(w, recipe, out, key, std, None)
                assert_same(out, want, f"{shape} {std}")
    w = ordinary(to, 2, 70)[None]
    want = torch.empty_like(w)
    reference.noisy_qdq(w, recipe, want, key, 0.1, None)
    qdq_cpu.noisy_qdq(w, recipe, w, key, 0.1, None)
    assert_same(w, want, "in place")


def test_every_pattern_of_16_bits():
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype).view(1, 2048, 32)
        small = x.view(torch.int16).view(-1)[: 1 << 12]  # the least numbers, shuffled: grids finer than subnormals
        order = torch.randperm(small.numel(), generator=torch.Generator().manual_seed(6))
        for text in ("mxfp4", "mxfp4:floor", "mxfp8", "mxfp4+of"):
            assert_same(*both(x, Recipe.parse(text), None), f"{text} {dtype}")
            assert_same(*both(small[order].view(dtype).view(1, -1, 32), Recipe.parse(text), None), f"{text} {dtype}")


def test_rounding_float32_to_16_bits():
    """Through noise of std 0: ties, subnormals, overflow, and NaNs whose payload a rounding would carry away."""
    g = torch.Generator().manual_seed(4)
    w = torch.randint(-(2**31), 2**31, (1, 500, 32), generator=g).to(torch.int32)
    w[0, :4] = 0x3F800000
    w[0, :4, 7] = torch.tensor([0x7FFFFFFF, -1, 0x7F800001, 0x7FBFFFFF])  # the only NaN of its block
    w[0, 4:200] &= ~0xFFF  # many ties
    for dtype in (torch.bfloat16, torch.float16):
        x = w.view(torch.float32)
        if dtype == torch.float16:
            x = torch.cat(
                [x, torch.linspace(-7e4, 7e4, 64000).view(1, 2000, 32), torch.randn(1, 500, 32, generator=g) * 1e-6], 1
            )
        got, want = torch.empty_like(x, dtype=dtype), torch.empty_like(x, dtype=dtype)
        reference.noisy_qdq(x, Recipe.parse("mxfp4:ideal"), want, (1, 2, 3, 4), 0.0, None)
        qdq_cpu.noisy_qdq(x, Recipe.parse("mxfp4:ideal"), got, (1, 2, 3, 4), 0.0, None)
        assert_same(got, want, str(dtype))


def test_unsupported():
    assert qdq_cpu.unsupported(Recipe.parse("mxfp4+mbs+macro=96"), torch.float32) is None
    assert "float64" in (qdq_cpu.unsupported(Recipe.parse("mxfp4"), torch.float64) or "")

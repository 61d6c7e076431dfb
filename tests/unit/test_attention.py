"""Attention of one new token a row, the torch definition and the Triton kernel, against a loop over rows and heads."""

import pytest
import torch

from mxrl.ops import attention, attention_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# float32: scores up to 15 are known to about 1e-6, and with them the weights; results are of order 1. A float16 has 11
# bits, a bfloat16 8: the result's and the weights' roundings are a few of their last ones.
NOISE = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
# slots, heads, kv heads, head size, room: one kv head; Qwen2.5-0.5B's groups of 7; no groups and an odd size; Llama's 4
SHAPES = [(3, 2, 1, 32, 20), (4, 14, 2, 64, 150), (2, 4, 4, 40, 70), (2, 8, 2, 128, 65)]


def inputs(slots, heads, kv_heads, size, room, dtype=torch.float32):
    generator = torch.Generator().manual_seed(room)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(DEVICE, dtype)

    new = [normal(slots, n, size) for n in (heads, kv_heads, kv_heads)]
    caches = [normal(slots, kv_heads, room, size) for _ in range(2)]
    positions = torch.randint(0, room, (slots,), generator=generator)
    positions[0], positions[-1] = 0, room - 1
    return [*new, *caches, positions.to(DEVICE)]


def loop(query, key, value, keys, values, positions, scaling):
    """Row by row, head by head, in float64, without a mask."""
    out = torch.empty_like(query, dtype=torch.float64)
    group = query.shape[1] // key.shape[1]
    for s, position in enumerate(positions.tolist()):
        for h in range(query.shape[1]):
            j = h // group
            k = torch.cat([keys[s, j, :position], key[s, j : j + 1]]).double()
            v = torch.cat([values[s, j, :position], value[s, j : j + 1]]).double()
            out[s, h] = (k @ query[s, h].double() * scaling).softmax(0) @ v
    return out


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("implementation", [attention, attention_triton], ids=["torch", "triton"])
def test_equals_a_loop(shape, implementation):
    given = inputs(*shape)
    if implementation is attention:
        given = [x.cpu() for x in given]
    expected = loop(*given, 0.3)
    before = [given[3].clone(), given[4].clone()]
    got = implementation.decode_attention(*given, 0.3)
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=NOISE[torch.float32])
    for cache, new, old in zip(given[3:5], given[1:3], before, strict=True):
        for s, position in enumerate(given[5].tolist()):
            assert torch.equal(cache[s, :, position], new[s])
            old[s, :, position] = new[s]
        assert torch.equal(cache, old)  # and nothing else was written


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves(dtype):
    if dtype == torch.bfloat16 and DEVICE == "cpu":
        pytest.skip("the interpreter's bf16 products are numpy's")
    given = inputs(*SHAPES[1], dtype=dtype)
    expected = loop(*given, 0.125)
    got = attention_triton.decode_attention(*given, 0.125)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=NOISE[dtype])


def test_what_lies_beyond_a_row_is_not_read():
    given = inputs(*SHAPES[0])
    expected = attention_triton.decode_attention(*given, 1.0)
    for cache in given[3:5]:
        for s, position in enumerate(given[5].tolist()):
            cache[s, :, position + 1 :] = float("nan")
    assert torch.equal(attention_triton.decode_attention(*given, 1.0), expected)


def test_queries_as_a_model_hands_them_over():
    """[S, 1, H, D] transposed and squeezed: strides that aren't those of a fresh tensor."""
    query, *rest = inputs(*SHAPES[1])
    expected = attention_triton.decode_attention(query, *rest, 1.0)
    fused = torch.cat([query, query.flip(1)], dim=-1)  # rows of twice the size
    assert torch.equal(attention_triton.decode_attention(fused[..., :64], *rest, 1.0), expected)

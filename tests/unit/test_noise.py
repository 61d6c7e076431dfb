"""Counter-based noise: Philox against its published vectors, the quantile against torch's, slices against the whole."""

from __future__ import annotations

import hashlib
import math
import statistics

import pytest
import torch
from oracles.bits import assert_same

from mxrl.corrections import normal_quantile, philox4x32, philox_normal

# Random123's kat_vectors, philox4x32 with 10 rounds: counter (4 words), key (2 words), result (4 words)
ONES = 0xFFFFFFFF
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def philox_by_hand(counter, key) -> list[int]:
    """Whole numbers, no wrapping."""
    c, k = list(counter), list(key)
    for _ in range(10):
        p0, p1 = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & ONES, (p0 >> 32) ^ c[3] ^ k[1], p0 & ONES]
        k = [(k[0] + 0x9E3779B9) & ONES, (k[1] + 0xBB67AE85) & ONES]
    return c


@pytest.mark.parametrize(("counter", "key", "want"), KNOWN)
def test_philox_known_answers(counter, key, want):
    words = philox4x32(tuple(torch.tensor([c], dtype=torch.int64) for c in counter), key)
    assert tuple(w.item() for w in words) == want


def test_philox_against_plain_python():
    """The same bijection for many counters at once."""
    g = torch.Generator().manual_seed(0)
    counters = torch.randint(0, 2**32, (4, 200), generator=g)
    words = torch.stack(philox4x32(tuple(counters), (0xDEADBEEF, 0x12345678)))
    want = [philox_by_hand(counters[:, i].tolist(), (0xDEADBEEF, 0x12345678)) for i in range(200)]
    assert words.T.tolist() == want


def test_any_slice_is_that_slice_of_the_whole():
    name = "model.layers.3.mlp.experts.7.down_proj.weight"
    whole = philox_normal(1, 2, name, 0, 5000)
    assert whole.dtype == torch.float32 and whole.shape == (5000,)
    for start, count in ((0, 1), (1, 1), (3, 9), (4, 4), (1023, 2000), (4999, 1), (17, 0)):
        assert_same(philox_normal(1, 2, name, start, count), whole[start : start + count])
    far = 2**34 + 5  # past 32 bits of the counter, which counts fours: its second word is then 1
    assert_same(philox_normal(1, 2, name, far, 8)[3:], philox_normal(1, 2, name, far + 3, 5))
    assert (philox_normal(1, 2, name, far, 8) != whole[5:13]).any()


def test_chunks_do_not_show():
    """More than a million elements in one call equal two calls cut elsewhere."""
    whole = philox_normal(0, 0, "w", 0, (1 << 20) + 100)
    assert_same(whole[(1 << 20) - 3 :], philox_normal(0, 0, "w", (1 << 20) - 3, 103))


def test_every_argument_matters_and_draws_are_independent():
    base = philox_normal(1, 2, "a", 0, 20000).double()
    for other in (
        philox_normal(2, 2, "a", 0, 20000),
        philox_normal(1, 3, "a", 0, 20000),
        philox_normal(1, 2, "b", 0, 20000),
    ):
        assert (other != base).double().mean() > 0.99
        assert abs(torch.corrcoef(torch.stack([base, other.double()]))[0, 1].item()) < 0.03  # 4 standard errors
    # the arguments are kept apart: (1, 12) is not (11, 2)
    assert (philox_normal(1, 12, "a", 0, 8) != philox_normal(11, 2, "a", 0, 8)).any()
    assert_same(philox_normal(1, 2, "a", 0, 20000), base.float())


def test_a_value_written_down():
    """A restart on another version must draw the same: these bits are part of the format of a run.

    Derived independently: blake2b-128 of "seed\\0rollout\\0name" gives the key and the upper two counter words, little
    endian; counter 0; (word + 1/2) / 2^32 through the standard library's normal quantile, to float32.
    """
    got = philox_normal(0, 0, "model.layers.0.self_attn.q_proj.weight", 0, 4)
    assert [v.hex() for v in got.tolist()] == WRITTEN_DOWN


WRITTEN_DOWN = ["0x1.ff57780000000p-1", "0x1.086e1e0000000p-2", "0x1.d50cf40000000p-1", "0x1.d026260000000p-2"]


def test_the_whole_chain_against_plain_python():
    """Twenty thousand draws by whole numbers, blake2b and the standard library's quantile: equal float32 values."""
    digest = hashlib.blake2b(b"5\x002\x00w", digest_size=16).digest()
    k0, k1, c2, c3 = (int.from_bytes(digest[i : i + 4], "little") for i in (0, 4, 8, 12))
    words = [w for i in range(5000) for w in philox_by_hand((i, 0, c2, c3), (k0, k1))]
    quantile = statistics.NormalDist().inv_cdf
    want = torch.tensor([quantile((w + 0.5) / 2**32) for w in words], dtype=torch.float64).float()
    assert_same(philox_normal(5, 2, "w", 0, 20000), want)


def test_moments_and_tails():
    """A million draws: mean, variance, skewness, kurtosis within 5 standard errors; quantiles; no repetition."""
    n = 1_000_000
    z = philox_normal(3, 1, "w", 0, n).double()
    assert abs(z.mean().item()) < 5 / math.sqrt(n)
    assert abs(z.var().item() - 1) < 5 * math.sqrt(2 / n)
    assert abs((z**3).mean().item()) < 5 * math.sqrt(15 / n)
    assert abs((z**4).mean().item() - 3) < 5 * math.sqrt(96 / n)
    for q in (-3, -1, 0, 1, 3):
        p = 0.5 * math.erfc(-q / math.sqrt(2))
        assert abs((z < q).double().mean().item() - p) < 5 * math.sqrt(p * (1 - p) / n)
    assert 4.0 < z.abs().max().item() < 6.5
    for lag in (1, 2, 4):
        assert abs((z[:-lag] * z[lag:]).mean().item()) < 5 / math.sqrt(n)


def test_quantile_accuracy():
    """Against torch's ndtri in float64, over the range that 32 bits reach and beyond: relative error below 1e-14."""
    u = torch.cat([
        torch.linspace(1e-6, 1 - 1e-6, 20001, dtype=torch.float64),
        2.0 ** -torch.linspace(1, 34, 500, dtype=torch.float64),
        (torch.arange(64, dtype=torch.float64) + 0.5) * 2.0**-32,
        1 - (torch.arange(64, dtype=torch.float64) + 0.5) * 2.0**-32,
        torch.tensor([0.075, 0.925, 0.5 - 0.425, 0.5 + 0.425], dtype=torch.float64),
    ])  # fmt: skip
    want, got = torch.special.ndtri(u), normal_quantile(u)
    error = (got - want).abs() / want.abs().clamp(min=1e-3)
    assert error.max().item() < 1e-14
    assert normal_quantile(torch.tensor([0.5], dtype=torch.float64)).item() == 0.0


def test_quantile_is_monotone_and_symmetric():
    u = (torch.arange(0, 1 << 32, 1 << 16).double() + 0.5) * 2.0**-32
    z = normal_quantile(u)
    assert (z.diff() > 0).all()
    assert_same(normal_quantile(1 - u), -z)

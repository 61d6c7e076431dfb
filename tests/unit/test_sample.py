"""One draw a row, against arithmetic written out; the Triton kernel against the torch definition."""

import math

import pytest
import torch

from mxrl.ops import sample, sample_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # the interpreter's tensors are on the CPU
# Sums of float32 in another order, of terms up to |x| and log V, at most about 30 here: three units in 30's last place.
NOISE = 6e-6


def logits(rows, vocabulary, seed=0, spread=4.0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, vocabulary, generator=generator) * spread).to(DEVICE, dtype)


def draws(device, x, u, temperature=1.0, greedy=False):
    return (sample if device == "torch" else sample_triton).draw(x, u, temperature, greedy)


@pytest.mark.parametrize("implementation", ["torch", "triton"])
def test_by_hand(implementation):
    """Probabilities 1/8, 1/2, 0, 3/8: the distribution function steps at .125, .625 and 1."""
    p = torch.tensor([0.125, 0.5, 0.0, 0.375], device=DEVICE)
    u = torch.tensor([1e-6, 0.12, 0.13, 0.62, 0.63, 1 - 2.0**-24], device=DEVICE)
    got = draws(implementation, p.log().expand(6, 4), u)
    assert got.tokens.tolist() == [0, 0, 1, 1, 3, 3] and got.argmax.tolist() == [1] * 6
    entropy = -sum(q * math.log(q) for q in (0.125, 0.5, 0.375))
    torch.testing.assert_close(got.entropies.cpu(), torch.full((6,), entropy), rtol=0, atol=NOISE)
    torch.testing.assert_close(got.logps, p.log()[got.tokens], rtol=0, atol=NOISE)
    greedy = draws(implementation, p.log().expand(6, 4), u, greedy=True)
    assert greedy.tokens.tolist() == [1] * 6


@pytest.mark.parametrize("implementation", ["torch", "triton"])
def test_ties_go_to_the_lowest_index(implementation):
    x = torch.zeros(3, 9001, device=DEVICE)
    x[0, [33, 34, 69]] = 2.0
    x[1, [100, 100 + 4096, 99 + 4096]] = 2.0  # in one lane of two blocks of the kernel
    got = draws(implementation, x, torch.full((3,), 0.5, device=DEVICE), greedy=True)
    assert got.tokens.tolist() == [33, 100, 0]


@pytest.mark.parametrize("implementation", ["torch", "triton"])
def test_a_uniform_on_a_step_takes_the_token_behind_it(implementation):
    u = torch.tensor([0.25, 0.5, 0.75], device=DEVICE)
    assert draws(implementation, torch.zeros(3, 4, device=DEVICE), u).tokens.tolist() == [1, 2, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [3, 50, 4096, 9001])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_kernel_equals_the_definition(vocabulary, temperature, dtype):
    """u is drawn, and no u of these comes within float32's noise of a step of the distribution function."""
    if dtype == torch.bfloat16 and DEVICE == "cpu" and vocabulary > 50:
        pytest.skip("the interpreter is slow, and bf16 is only a cast")
    x = logits(6, vocabulary, dtype=dtype)
    u = sample.uniforms(5, 6, 1)[:, 0].to(DEVICE)
    for greedy in (False, True):
        ours = sample_triton.draw(x, u, temperature, greedy)
        expected = sample.draw(x.cpu(), u.cpu(), temperature, greedy)
        assert torch.equal(ours.tokens.cpu(), expected.tokens) and torch.equal(ours.argmax.cpu(), expected.argmax)
        torch.testing.assert_close(ours.logps.cpu(), expected.logps, rtol=0, atol=NOISE)
        torch.testing.assert_close(ours.entropies.cpu(), expected.entropies, rtol=0, atol=NOISE)


def test_the_kernel_takes_strided_rows_and_masked_tokens():
    x = logits(4, 200)[:, :100].clone()
    x[:, 1::2] = -float("inf")
    wide = torch.cat([x, x], dim=1)[:, :100]
    u = torch.tensor([1e-6, 0.4, 0.9, 1 - 2.0**-24], device=DEVICE)
    for implementation in ("torch", "triton"):
        got = draws(implementation, wide, u)
        assert (got.tokens % 2 == 0).all() and got.logps.isfinite().all() and got.entropies.isfinite().all()
    assert torch.equal(draws("torch", x, u).tokens, draws("triton", wide, u).tokens)


@pytest.mark.parametrize("implementation", ["torch", "triton"])
def test_logps_are_those_of_log_softmax(implementation):
    x, u = logits(5, 300, seed=3), sample.uniforms(1, 5, 1)[:, 0].to(DEVICE)
    got = draws(implementation, x, u, temperature=0.6)
    expected = (x.double() / 0.6).log_softmax(-1)
    torch.testing.assert_close(got.logps.double(), expected.gather(1, got.tokens[:, None])[:, 0], rtol=0, atol=NOISE)
    entropy = -(expected.exp() * expected).sum(-1)
    torch.testing.assert_close(got.entropies.double(), entropy, rtol=0, atol=NOISE)


def test_the_draws_follow_the_distribution():
    """χ² of 20,000 draws over 40 tokens (seeded): mean 39, standard deviation 8.8; five of those above is 83."""
    n, vocabulary = 20_000, 40
    x = logits(1, vocabulary, spread=1.0)
    got = sample.draw(x.expand(n, vocabulary), sample.uniforms(11, n, 1, DEVICE)[:, 0], 1.3, False)
    expected = n * (x[0].double() / 1.3).softmax(-1)
    counts = torch.bincount(got.tokens, minlength=vocabulary)
    assert ((counts - expected) ** 2 / expected).sum() < 83


def test_uniforms_are_a_function_of_seed_row_and_step():
    u = sample.uniforms(7, 40, 30)
    assert u.dtype == torch.float32 and 0 < u.min() and u.max() < 1
    assert torch.equal(u[:5, :3], sample.uniforms(7, 5, 3)) and u.unique().numel() == u.numel()
    assert not torch.equal(u, sample.uniforms(8, 40, 30)) and not torch.equal(u, sample.uniforms(7 + (1 << 32), 40, 30))
    assert not torch.equal(u[:30, :30], u[:30, :30].T)
    wide = sample.uniforms(3, 1000, 100).flatten()
    # 10 equal cells of 100,000: standard deviation 95 each; neighbours' correlation: 1/√100000 = .003
    assert (torch.histc(wide, 10, 0, 1) - 10_000).abs().max() < 5 * 95
    assert abs(float(torch.corrcoef(torch.stack([wide[:-1], wide[1:]]))[0, 1])) < 5 * 0.0032


@pytest.mark.parametrize("word, u", [(0, 2.0**-24), (0xFFFFFFFF, 1 - 2.0**-24)])
def test_uniforms_at_both_ends(monkeypatch, word, u):
    monkeypatch.setattr(sample, "philox4x32", lambda counter, key: [torch.full_like(counter[0], word)] * 4)
    assert sample.uniforms(0, 1, 1).item() == u

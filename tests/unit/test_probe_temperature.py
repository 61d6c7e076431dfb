"""The effective temperature: the fit against quadrature that shares no code with it, the formulas, the probe."""

import json
import math
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

import mxrl
from mxrl.nn.weights import AqnNoise, rollout_weights
from mxrl.probes import temperature_theory as theory
from mxrl.probes.intervals import jackknife, mean
from mxrl.probes.subject import ProbeError, Subject
from mxrl.probes.temperature import Contexts, aqn_policy, temperature
from mxrl.probes.temperature_rows import FIGURES, rounding
from mxrl.probes.temperature_theory import (
    Baseline,
    below_peak,
    ensemble,
    entropy,
    fit_temperature,
    mean_logit,
    mean_policy,
    moments,
    noise,
    two_classes,
)
from mxrl.probes.treatments import Treatment, treated
from mxrl.recipes import Recipe
from mxrl.report.page import Page
from mxrl.report.probe_temperature import sections
from mxrl.rl.policy import build_policy, char_tokenizer
from mxrl.rl.tasks import get_task, load_task
from mxrl.scan import NonFiniteError

DOUBLE = torch.float64


# --- known answers, in numpy ------------------------------------------------------------------------------------------


def hermite(count):
    """Nodes and weights of E f(z), z ~ N(0, 1)."""
    x, w = np.polynomial.hermite_e.hermegauss(count)
    return x, w / w.sum()


def kl_at(logits, policy, temperature):
    scaled = logits / temperature
    log_q = (
        scaled
        - np.log(np.exp(scaled - scaled.max(-1, keepdims=True)).sum(-1, keepdims=True))
        - scaled.max(-1, keepdims=True)
    )
    return float((policy * (np.log(policy) - log_q)).sum())


def best_on_a_grid(logits, policy, low=0.5, high=4.0, rounds=5):
    """The T of least KL by ever finer grids: no derivative, no Newton."""
    for _ in range(rounds):
        grid = np.linspace(low, high, 41)
        best = int(np.argmin([kl_at(logits, policy, t) for t in grid]))
        low, high = grid[max(best - 1, 0)], grid[min(best + 1, 40)]
    return (low + high) / 2


def fitted(logits, policy):
    ell, p = torch.as_tensor(logits, dtype=DOUBLE), torch.as_tensor(policy, dtype=DOUBLE)
    return fit_temperature(ell, mean_logit(ell, p)).temperature


def found_temperature(logits, policy):
    fit = fit_temperature(logits, policy.target)
    assert fit.temperature is not None
    return fit.temperature


def smoothed(gap, sigma):
    """P(first of two classes) at a gap of logits with noise N(0, σ²) on each: Gauss–Hermite over the gap's noise."""
    x, w = hermite(120)
    return (w / (1 + np.exp(-(np.asarray(gap)[..., None] + math.sqrt(2) * sigma * x)))).sum(-1)


def test_two_classes_at_one_gap_have_a_closed_form():
    # softmax(ℓ/T) = p̄ has the solution T = gap / logit(p̄). The gap stands at its standard deviation, 2√2, where the
    # formula says √(1 + 2·1/8) = 1.118.
    gap = 2 * math.sqrt(2)
    p = float(smoothed(gap, 1.0))
    expected = gap / math.log(p / (1 - p))
    assert fitted([[gap, 0.0]], [[p, 1 - p]]) == pytest.approx(expected, rel=1e-6)
    assert expected == pytest.approx(1.3127, abs=5e-5)


def test_two_classes_with_drawn_logits_are_fitted_at_1_309_where_the_formula_says_1_118():
    # Logits ~ N(0, 2²), noise 1 on each. Trapezoids over the gap, N(0, 8), Gauss–Hermite over the noise, grids over T.
    # 1.315 was reported for it elsewhere; simulations of a hundred contexts and draws scatter by about ±.008.
    gap = np.linspace(-8, 8, 1601) * math.sqrt(8)
    weight = np.exp(-(gap**2) / 16)
    p = smoothed(gap, 1.0)
    grid = np.linspace(1.25, 1.35, 2001)
    # log σ(x) = −log(1 + e^−x)
    cross = [(weight * (p * np.logaddexp(0, -gap / t) + (1 - p) * np.logaddexp(0, gap / t))).sum() for t in grid]
    expected = float(grid[int(np.argmin(cross))])
    prediction, fit = two_classes()
    assert prediction == pytest.approx(math.sqrt(1.25), rel=1e-12)
    assert fit == pytest.approx(expected, abs=1e-4) and expected == pytest.approx(1.309, abs=1e-4)
    assert fit == pytest.approx(1.315, abs=0.007)


def test_three_classes_with_gaussian_noise_against_cubature():
    logits = np.array([[0.0, -1.5, -3.0], [0.0, -0.2, -4.0], [2.0, 1.0, -1.0]])
    x, w = hermite(24)
    nodes = np.stack(np.meshgrid(x, x, x, indexing="ij"), -1).reshape(-1, 3)
    weights = (w[:, None, None] * w[:, None] * w).reshape(-1)
    noisy = np.exp(logits[:, None] + 0.8 * nodes)
    policy = (weights[:, None] * noisy / noisy.sum(-1, keepdims=True)).sum(1)
    assert fitted(logits, policy) == pytest.approx(best_on_a_grid(logits, policy), abs=1e-4)
    many = torch.tensor(logits, dtype=torch.float32).repeat(400, 1)
    drawn = mean_policy("gaussian", many, many, sigma=0.8, draws=64)
    fit = fit_temperature(many, drawn.target).temperature
    assert fit == pytest.approx(best_on_a_grid(logits, policy), abs=0.005)  # 25 600 draws of each


@pytest.mark.parametrize("true", [0.25, 0.9, 1.0, 1.7, 12.0])
@pytest.mark.parametrize("chunk", [1 << 24, 700])
def test_the_fit_finds_the_temperature_that_made_the_policy(true, chunk, monkeypatch):
    monkeypatch.setattr(theory, "_CHUNK", chunk)
    logits = 3 * torch.randn(40, 300, generator=torch.Generator().manual_seed(2))
    fit = fit_temperature(logits, mean_logit(logits, (logits / true).softmax(-1)))
    assert fit.temperature == pytest.approx(true, rel=2e-5)  # float32 logits
    assert fit.gradient.shape == fit.curvature.shape == (40,) and bool((fit.curvature > 0).all())


def test_no_temperature_fits_a_certain_policy_or_one_that_prefers_the_least_likely():
    logits = torch.randn(20, 30, generator=torch.Generator().manual_seed(0))
    certain = torch.nn.functional.one_hot(logits.argmax(-1), 30).float()
    against = (-logits).softmax(-1)
    for policy, bound in ((certain, 64.0), (against, 1 / 64)):
        fit = fit_temperature(logits, mean_logit(logits, policy))
        assert fit.temperature is None and fit.beta == pytest.approx(bound, rel=1e-3)


# --- predictions ------------------------------------------------------------------------------------------------------


def test_the_variance_of_differences_over_all_pairs_and_over_pairs_of_the_policy():
    logits = 2 * torch.randn(3, 7, generator=torch.Generator().manual_seed(4), dtype=DOUBLE)
    base = Baseline.of(logits)
    for row, ell in enumerate(logits.tolist()):
        p = [math.exp(x) / sum(map(math.exp, ell)) for x in ell]
        pairs = [(ell[i] - ell[j]) ** 2 for i in range(7) for j in range(7) if i != j]
        weighted = sum(p[i] * p[j] * (ell[i] - ell[j]) ** 2 for i in range(7) for j in range(7))
        assert 2 * float(base.variance[row]) == pytest.approx(sum(pairs) / len(pairs), rel=1e-12)
        assert 2 * float(base.weighted[row]) == pytest.approx(weighted, rel=1e-12)
        assert float(base.entropy[row]) == pytest.approx(-sum(x * math.log(x) for x in p), rel=1e-12)


def sums_of(logits, noisy):
    """The columns that the figures take, summed over contexts."""
    base, (found, _) = Baseline.of(logits), moments(logits, noisy)
    columns = found._asdict() | {"count": torch.ones_like(base.entropy), "variance": base.variance}
    columns |= {"variance_p": base.weighted, "peaked": base.peaked}
    return {name: column.sum() for name, column in columns.items()}


def figure(name, logits, noisy):
    return float(FIGURES[name][1](sums_of(logits, noisy)))


def test_the_formulas_of_a_known_noise():
    # Two contexts, logits ±2 and ±1 and noise (+1, −1) and (+3, −3): Var ℓ over V − 1 is 8 and 2, σ² is 2 and 18.
    logits = torch.tensor([[2.0, -2.0], [1.0, -1.0]], dtype=DOUBLE)
    noisy = logits + torch.tensor([[6.0, 4.0], [0.0, -6.0]])  # 5 and −3 more: shifts
    p = 1 / (1 + math.exp(-4)), 1 / (1 + math.exp(-2))
    spread = 16 * p[0] * (1 - p[0]) + 4 * p[1] * (1 - p[1])  # Var_p ℓ of both: gap² p (1 − p)
    assert figure("sigma_eta", logits, noisy) == pytest.approx(math.sqrt(10), rel=1e-12)
    assert figure("predicted_all", logits, noisy) == pytest.approx(math.sqrt(1 + 20 / 10), rel=1e-12)
    assert figure("predicted_weighted", logits, noisy) == pytest.approx(math.sqrt(1 + 20 / spread), rel=1e-12)
    eta = 4 * p[0] * (1 - p[0]) + 36 * p[1] * (1 - p[1])
    assert figure("predicted_weighted_both", logits, noisy) == pytest.approx(math.sqrt(1 + eta / spread), rel=1e-12)
    # η/ℓ is 1/2 and 3: Cov(η, ℓ) = Var ℓ / 2 and 3 Var ℓ
    assert figure("slope", logits, noisy) == pytest.approx((4 + 6) / 10, rel=1e-12)


def test_the_second_order_prediction_is_exact_for_small_noise():
    # Two classes: Cov_p(p, ℓ) / Var_p ℓ = (2p − 1) / gap = tanh(gap / 2) / gap.
    gap, sigma = 1.7, 0.02
    logits = torch.tensor([[gap, 0.0]], dtype=DOUBLE)
    base = Baseline.of(logits)
    rate = float(base.peaked / base.weighted)
    assert rate == pytest.approx(math.tanh(gap / 2) / gap, rel=1e-12)
    p = float(smoothed(gap, sigma))
    expected = gap / math.log(p / (1 - p))
    assert (expected - 1) / sigma**2 == pytest.approx(rate, rel=1e-3)
    # The formula, √(1 + 2σ²/gap²), is another: 1/gap² = .35 where this is .41.
    assert (expected - 1) / sigma**2 != pytest.approx(1 / gap**2, rel=0.1)


def test_small_noise_raises_the_entropy_of_the_mean_as_predicted():
    logits = 2 * torch.randn(2000, 12, generator=torch.Generator().manual_seed(5), dtype=DOUBLE)
    base, sigma = Baseline.of(logits), 0.1
    found = mean_policy("gaussian", logits, logits, sigma=sigma, draws=400)
    rise = float((found.entropy - base.entropy).mean())
    # Cov_p(p, log p) = Cov_p(p, ℓ): they differ by a constant
    assert rise == pytest.approx(sigma**2 * float(base.peaked.mean()), rel=0.03)


@pytest.mark.parametrize("b", [-0.3, 0.25])
def test_logits_that_shrink_are_a_temperature_without_noise(b):
    logits = 3 * torch.randn(50, 40, generator=torch.Generator().manual_seed(1), dtype=DOUBLE)
    noisy = (1 + b) * logits + 7.0
    found = mean_policy("", logits, noisy)
    assert found_temperature(logits, found) == pytest.approx(1 / (1 + b), rel=1e-6)
    for name in ("slope", "slope_weighted"):
        assert figure(name, logits, noisy) == pytest.approx(b, rel=1e-9)
    assert figure("predicted_slope", logits, noisy) == pytest.approx(1 / (1 + b), rel=1e-9)
    signs = mean_policy("signs", logits, noisy)  # the slope has no sign left: only the second order is in it
    assert 1 < found_temperature(logits, signs) < 1.12


def test_a_constant_is_no_noise():
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(1))
    assert bool((noise(logits, logits + 3.0).abs() < 1e-6).all())
    apart = torch.randn(4, 9, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(
        noise(logits, logits + apart), noise(logits, logits + apart - 8.0), rtol=0, atol=4e-6
    )  # rounding at 8


# --- the shape of η ---------------------------------------------------------------------------------------------------


def test_kurtosis_of_known_noises():
    g = torch.Generator().manual_seed(0)
    zero = torch.zeros(40, 5000, dtype=DOUBLE)
    u = torch.rand(zero.shape, generator=g, dtype=DOUBLE) - 0.5
    cases = {
        "uniform": (u, -1.2),
        "laplace": (-u.sign() * torch.log1p(-2 * u.abs()), 3.0),
        "normal": (torch.randn(zero.shape, generator=g, dtype=DOUBLE), 0.0),
    }
    for name, (eta, expected) in cases.items():
        got = float(moments(zero, eta)[0].kurtosis.mean())
        assert got == pytest.approx(expected, abs=0.15 if name == "laplace" else 0.02), name


def test_kurtosis_is_unbiased_for_a_normal_sample_of_a_small_vocabulary():
    eta = torch.randn(20_000, 12, generator=torch.Generator().manual_seed(0), dtype=DOUBLE)
    assert float(moments(torch.zeros_like(eta), eta)[0].kurtosis.mean()) == pytest.approx(0, abs=0.03)


def test_contexts_of_different_sigma_have_tails_only_when_thrown_together():
    eta = torch.randn(200, 4000, generator=torch.Generator().manual_seed(0), dtype=DOUBLE)
    eta[::2] *= 3
    logits = torch.randn(200, 4000, generator=torch.Generator().manual_seed(9), dtype=DOUBLE)
    # σ² is 9 and 1: 3 (mean σ⁴ / (mean σ²)² − 1) = 3 (41/25 − 1) = 1.92
    assert figure("kurtosis_pooled", logits, logits + eta) == pytest.approx(1.92, abs=0.05)
    assert figure("kurtosis", logits, logits + eta) == pytest.approx(0, abs=0.02)
    shares = moments(logits, logits + eta)[1]
    assert sum(shares) == pytest.approx(1) and len(shares) == 24
    assert shares[12] == pytest.approx(0.19146, abs=0.002)  # Φ(1/2) − Φ(0)
    assert shares[0] < 1e-5


def test_ensembles_are_made_of_the_measured_noise():
    eta = torch.randn(6, 11, generator=torch.Generator().manual_seed(0))
    g = torch.Generator().manual_seed(1)
    (as_it_is,) = ensemble("", eta, 0.5, 8, g)
    assert as_it_is is eta
    plus, minus = ensemble("signs", eta, 0.5, 8, g)
    assert torch.equal(plus, eta) and torch.equal(minus, -eta)
    rolled = list(ensemble("shuffled", eta, 0.5, 8, g))
    assert len(rolled) == 8
    for draw in rolled:
        for row in range(6):
            rolls = [k for k in range(11) if torch.equal(draw[row], eta[row].roll(-k))]
            assert len(rolls) == 1 and rolls[0] != 0  # a roll, and never in its own place
    drawn = list(ensemble("gaussian", torch.zeros(200, 300), 0.5, 8, g))
    assert len(drawn) == 8 and torch.equal(drawn[0], -drawn[1]) and not torch.equal(drawn[0], drawn[2])
    assert float(torch.stack(drawn).std()) == pytest.approx(0.5, rel=0.01)


def test_one_draw_can_lower_the_entropy_and_the_mean_never_does_less_than_its_draws():
    logits = 2 * torch.randn(300, 20, generator=torch.Generator().manual_seed(3), dtype=DOUBLE)
    noisy = 1.4 * logits + 0.5 * torch.randn(300, 20, generator=torch.Generator().manual_seed(4), dtype=DOUBLE)
    before = Baseline.of(logits).entropy
    single = mean_policy("", logits, noisy)
    assert float(single.entropy.mean()) < float(before.mean()) - 0.1
    assert torch.equal(single.entropy, single.draw)  # one draw is its own mean
    for kind in theory.SYNTHETIC:
        found = mean_policy(kind, logits, noisy, sigma=1.0)
        assert bool((found.entropy > found.draw).all()), kind
        assert float((found.entropy - found.draw).mean()) > 0.05, kind
    gaussian = mean_policy("gaussian", logits, noisy, sigma=1.0, draws=64)
    assert float(gaussian.entropy.mean()) > float(before.mean()) + 0.05
    assert entropy(torch.tensor([[0.5, 0.5, 0.0]])).item() == pytest.approx(math.log(2))


# --- intervals --------------------------------------------------------------------------------------------------------


def test_the_jackknife_of_a_mean_is_the_mean_and_its_interval():
    values = [1.0, 4.0, 2.0, 8.0, 5.5]
    sums = torch.tensor([[v, 1.0] for v in values], dtype=DOUBLE)
    got, apart = jackknife(sums, lambda s: s[..., 0] / s[..., 1])
    assert got == pytest.approx(mean(values)) and apart == pytest.approx(values)
    alone, _ = jackknife(sums[:1], lambda s: s[..., 0] / s[..., 1])
    assert alone.value == 1.0 and math.isnan(alone.low) and alone.n == 1


def test_the_interval_of_a_fit_is_that_of_refits_without_each_prompt():
    g = torch.Generator().manual_seed(7)
    logits = 2 * torch.randn(24, 10, 15, generator=g, dtype=DOUBLE)  # 24 prompts of 10 contexts
    noisy = logits + (0.5 + torch.rand(24, 1, 1, generator=g)) * torch.randn(24, 10, 15, generator=g, dtype=DOUBLE)
    flat = logits.flatten(0, 1)
    target = mean_policy("", flat, noisy.flatten(0, 1)).target
    fit = fit_temperature(flat, target)
    sums = torch.stack([fit.gradient.view(24, 10).sum(1), fit.curvature.view(24, 10).sum(1)], -1)
    got, _ = jackknife(sums, lambda s: 1 / (fit.beta + s[..., 0] / s[..., 1]))
    refits = []
    for out in range(24):
        keep = torch.arange(24) != out
        refit = fit_temperature(logits[keep].flatten(0, 1), target.view(24, 10)[keep].flatten())
        refits.append(24 / fit.beta - 23 / refit.beta)
    expected = mean(refits)
    assert got.value == pytest.approx(fit.temperature, rel=1e-9)
    assert got.high - got.low == pytest.approx(expected.high - expected.low, rel=0.05)
    assert got.low < expected.value < got.high


# --- the probe --------------------------------------------------------------------------------------------------------


def subject_of(kind="dense", *, prompts=4, dtype=torch.float32):
    model = build_policy(kind, size="tiny", seed=1, initializer_range=0.3).to(dtype).eval()
    mxrl.convert(model, "bf16")
    problems = tuple(load_task("chain", seed=0, n=prompts, split="test"))
    return Subject(f"tiny {kind}", model, char_tokenizer(), "chain", problems, get_task("chain").reward, 12, batch=3)


@pytest.fixture(scope="module")
def dense():
    return subject_of()


@pytest.fixture(scope="module")
def result(dense):
    return temperature(dense, ["mxfp4", "mxfp4@grid", "mxfp4@~grid", "bf16"], aqn_draws=2)


def value(result, treatment, metric, of="value"):
    (row,) = [m for m in result["measures"] if m["treatment"] == treatment and m["metric"] == metric]
    return row[of]


def test_the_probe_measures_what_a_plain_pass_over_every_position_gives(dense, result):
    """All positions, one text at a time without padding, the temperature by grids: no code of the probe."""
    written = dense.rollout()
    plain, quantized = [], []
    for prompt, answer in zip(dense.prompt_ids, written.completions(), strict=True):
        ids = torch.tensor([prompt + answer])
        with torch.no_grad():
            plain.append(dense.model(ids).logits[0, len(prompt) - 1 : -1].numpy().astype(float))
            with treated(dense.model, "mxfp4"):
                quantized.append(dense.model(ids).logits[0, len(prompt) - 1 : -1].numpy().astype(float))
    ell, noisy = np.concatenate(plain), np.concatenate(quantized)
    assert len(ell) == written.tokens == result["settings"]["contexts"]
    eta = noisy - ell
    eta -= eta.mean(-1, keepdims=True)
    policy = np.exp(noisy) / np.exp(noisy).sum(-1, keepdims=True)
    before = np.exp(ell) / np.exp(ell).sum(-1, keepdims=True)
    sigma = math.sqrt((eta**2).sum() / len(ell) / (ell.shape[1] - 1))
    assert value(result, "mxfp4", "sigma_eta") == pytest.approx(sigma, rel=1e-3)
    assert value(result, "mxfp4", "t_eff") == pytest.approx(best_on_a_grid(ell, policy), abs=1e-3)
    change = -(policy * np.log(policy)).sum(-1).mean() + (before * np.log(before)).sum(-1).mean()
    assert value(result, "mxfp4", "entropy_change") == pytest.approx(change, rel=1e-2)
    assert value(result, "bf16", "entropy") == pytest.approx(-(before * np.log(before)).sum(-1).mean(), rel=1e-4)
    low, high = value(result, "mxfp4", "t_eff", "low"), value(result, "mxfp4", "t_eff", "high")
    assert low < value(result, "mxfp4", "t_eff") < high and value(result, "mxfp4", "t_eff", "n") == 4
    assert np.mean(value(result, "mxfp4", "t_eff", "values")) == pytest.approx(value(result, "mxfp4", "t_eff"))


def test_nothing_done_is_a_temperature_of_one(result):
    assert value(result, "bf16", "sigma_eta") == 0
    for metric in ("t_eff", "t_signs", "t_shuffled", "t_gaussian"):
        assert value(result, "bf16", metric) == pytest.approx(1, abs=1e-6)
    assert abs(value(result, "bf16", "entropy_change")) < 1e-6
    assert value(result, "bf16", "t_aqn") != pytest.approx(1, abs=1e-5)  # AQN's noise alone
    assert not [row for row in result["theory"] if row["treatment"] == "bf16"]


def test_the_result_has_the_shape_of_every_probe(dense, result):
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    assert result["probe"] == "temperature" and result["schema"] == 1 and result["layers"] == []
    rows = [row for row in result["theory"] if row["treatment"] == "mxfp4" and row["name"] == "t_eff"]
    assert len(rows) == 1 and rows[0]["predicted"] == value(result, "mxfp4", "predicted_all")
    known = [row for row in result["theory"] if row["low"] is not None]
    assert {row["within"] for row in known} == {True, False} and len(known) == 3 * 7
    for row in known:
        assert row["within"] == (row["low"] <= row["predicted"] <= row["high"]), row
    (exact,) = [row for row in result["theory"] if row["treatment"] is None]
    assert exact["measured"] == pytest.approx(1.309, abs=1e-3)
    (curve,) = result["curves"]
    assert len(curve["x"]) == len(curve["series"]["normal"]) and sum(curve["series"]["normal"]) == pytest.approx(1)
    keys = {"treatment", "metric", "value", "low", "high", "n", "unit"}
    assert all(keys <= set(row) <= keys | {"values"} for row in result["measures"])


def test_the_same_call_gives_the_same_numbers_and_leaves_the_model_as_it_was(dense, result):
    ids = torch.tensor([dense.prompt_ids[0]])
    with torch.no_grad():
        before = dense.model(ids).logits
    torch.manual_seed(123)
    shares = []
    again = temperature(dense, ["mxfp4", "mxfp4@grid", "mxfp4@~grid", "bf16"], aqn_draws=2, progress=shares.append)
    assert again == result and shares == [0.25, 0.5, 0.75, 1.0]
    with torch.no_grad():
        assert torch.equal(dense.model(ids).logits, before)


def test_fewer_positions_and_no_aqn(dense):
    got = temperature(dense, ["mxfp4"], positions=3, aqn_draws=0)
    torch.manual_seed(1)
    one = Contexts.of(dense, 3)
    torch.manual_seed(2)
    assert torch.equal(one.at, Contexts.of(dense, 3).at)  # drawn from the subject's seed alone
    lengths = dense.rollout().completion_mask.sum(1).tolist()
    assert got["settings"]["contexts"] == sum(min(3, n) for n in lengths) < sum(lengths)
    assert not [m for m in got["measures"] if "aqn" in m["metric"]]
    sections(Page("t"), got)


def test_aqn_draws_that_change_nothing_are_the_treated_policy_itself(dense):
    got = temperature(dense, ["mxfp4"], aqn_draws=3, aqn_sigma=1e-12)
    assert value(got, "mxfp4", "sigma_between") < 1e-6 * value(got, "mxfp4", "sigma_eta")
    assert value(got, "mxfp4", "t_aqn") == pytest.approx(value(got, "mxfp4", "t_eff"), abs=1e-5)
    assert value(got, "mxfp4", "entropy_change_aqn") == pytest.approx(value(got, "mxfp4", "entropy_change"), abs=1e-5)


def test_aqn_draws_give_their_mean_policy_and_their_spread(dense):
    contexts, recipe = Contexts.of(dense, 32), Recipe.parse("mxfp4+aqn")
    ell, drawn = contexts.logits(dense), []
    with treated(dense.model, "mxfp4"):
        for k in range(3):
            with rollout_weights(dense.model, AqnNoise(recipe, dense.seed, k, 0.01)):
                drawn.append(contexts.logits(dense))
        found, between = aqn_policy(dense, contexts, Treatment.parse("mxfp4"), ell, sigma=0.01, draws=3)
    eta = torch.stack(drawn).double() - ell
    eta -= eta.mean(-1, keepdim=True)
    policies = torch.stack(drawn).double().softmax(-1)
    v = ell.shape[-1]
    torch.testing.assert_close(between, eta.var(0).sum(-1) / (v - 1), rtol=1e-4, atol=0)
    torch.testing.assert_close(found.entropy, entropy(policies.mean(0)), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found.draw, entropy(policies).mean(0), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found.target, mean_logit(ell.double(), policies.mean(0)), rtol=1e-4, atol=1e-5)


def test_aqn_draws_are_an_ensemble(result):
    for treatment in ("mxfp4", "mxfp4@grid"):
        assert value(result, treatment, "sigma_between") > 0.1 * value(result, treatment, "sigma_eta")
        mixed, single = (value(result, treatment, f"entropy_change_aqn{end}") for end in ("", "_draw"))
        assert mixed > single


def test_a_mixture_of_experts_in_bfloat16_says_what_its_rounding_is():
    got = temperature(subject_of("moe", prompts=2, dtype=torch.bfloat16), ["mxfp4"], aqn_draws=2)
    assert value(got, "mxfp4", "sigma_eta") > 0 and value(got, "mxfp4", "t_eff") is not None
    assert any("bfloat16 numbers: rounding alone" in note for note in got["notes"])


def test_rounding_of_bfloat16_logits():
    # in [4, 8) neighbours are 1/32 apart: uniform rounding errors of variance (1/32)²/12 in each of two passes
    exact = 4 + 4 * torch.rand(2000, 50, generator=torch.Generator().manual_seed(0), dtype=DOUBLE)
    error = exact.to(torch.bfloat16).double() - exact
    assert rounding(exact.to(torch.bfloat16)) == pytest.approx(math.sqrt(2) / 32 / math.sqrt(12), rel=0.01)
    assert rounding(exact.to(torch.bfloat16)) == pytest.approx(math.sqrt(2 * float(error.square().mean())), rel=0.01)


def test_a_page_says_what_came_out(result):
    page = Page("t")
    sections(page, result)
    text = page.html()
    fits = {t: value(result, t, "t_eff") for t in result["settings"]["treatments"]}
    hottest = max(fits, key=lambda t: fits[t])
    assert f"Fitted T is largest under <code>{hottest}</code>: {fits[hottest]:.3f} [" in text
    assert "it gives 1.118 for 1.309" in text and "AQN mean" in text and "both weighted" in text


def test_calls_that_cannot_be(dense, monkeypatch):
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"positions": 0}, "must be at least 1"),
        ({"draws": 0}, "must be at least 1"),
        ({"aqn_draws": 1}, "no ensemble; take 2 or more, or 0"),
        ({"aqn_sigma": 0.0}, "must be positive and finite"),
    )
    for settings, words in cases:
        with pytest.raises(ProbeError, match=words):
            temperature(dense, ["mxfp4"], **settings)
    with pytest.raises(ProbeError, match="at least one treatment"):
        temperature(dense, [])
    with pytest.raises(ProbeError, match="'mxfp4@backward' leaves the forward pass as it is"):
        temperature(dense, ["mxfp4@backward"])
    real = Subject.logits

    def broken(self, ids, mask, keep=0):
        if any(layer.operands.weight for layer in self.model.modules() if hasattr(layer, "operands")):
            raise NonFiniteError("the logits have 1 NaN")
        return real(self, ids, mask, keep)

    monkeypatch.setattr(Subject, "logits", broken)
    with pytest.raises(NonFiniteError, match=r"^temperature, mxfp4@grid: the logits have 1 NaN$"):
        temperature(dense, ["mxfp4@grid"])
    monkeypatch.setattr(Subject, "logits", lambda self, *rest: real(self, *rest) * 0)
    with pytest.raises(ProbeError, match="alike or certain everywhere"):
        temperature(dense, ["mxfp4"])


def test_logits_below_their_peak_keep_float64():
    assert below_peak(torch.tensor([[1.0, 3.0]], dtype=torch.bfloat16)).tolist() == [[-2.0, 0.0]]
    assert below_peak(torch.ones(1, 2, dtype=torch.bfloat16)).dtype == torch.float32
    assert below_peak(torch.ones(1, 2, dtype=DOUBLE)).dtype == DOUBLE

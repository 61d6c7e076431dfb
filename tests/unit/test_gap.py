"""Gap metrics against the formulas written out in plain Python, and what merging must keep."""

import math
import random

import pytest
import torch

from mxrl.rl.gap import GapStats, gap_stats


def written_out(train, rollout, cap=2.0):
    """The module's formulas, token by token (math.fsum: no rounding of the sums)."""
    n = len(train)
    d = [a - b for a, b in zip(train, rollout, strict=True)]
    w = [math.exp(x) for x in d]
    ma, mb = math.fsum(train) / n, math.fsum(rollout) / n
    va, vb = math.fsum((a - ma) ** 2 for a in train), math.fsum((b - mb) ** 2 for b in rollout)
    cov = math.fsum((a - ma) * (b - mb) for a, b in zip(train, rollout, strict=True))
    return {
        "gap/k1": -math.fsum(d) / n,
        "gap/k3": math.fsum(x - 1 - y for x, y in zip(w, d, strict=True)) / n,
        "gap/pearson": cov / math.sqrt(va * vb),
        "gap/chi2": math.fsum((x - 1) ** 2 for x in w) / n,
        "gap/ess": math.fsum(w) ** 2 / (n * math.fsum(x * x for x in w)),
        "gap/mean_abs": math.fsum(map(abs, d)) / n,
        "gap/max_abs": max(map(abs, d)),
        "gap/truncated": sum(x > cap for x in w) / n,
    }


def sample(n, seed, sd=0.3):
    rng = random.Random(seed)
    train = [-abs(rng.gauss(0, 2)) for _ in range(n)]
    return train, [t + rng.gauss(0, sd) for t in train]


@pytest.mark.parametrize("sd", [1e-3, 0.3, 2.0])
def test_equals_the_formulas(sd):
    train, rollout = sample(200, 1, sd)
    t, r = torch.tensor(train, dtype=torch.float64), torch.tensor(rollout, dtype=torch.float64)
    mask = torch.ones(200, dtype=torch.bool)
    got = gap_stats(t.view(10, 20), r.view(10, 20), mask.view(10, 20)).metrics()
    # 1e-9: the sums run in another order than fsum's, and k3 at sd 1e-3 cancels six digits of w
    assert got == pytest.approx(written_out(train, rollout), rel=1e-9)


def test_the_mask_decides_which_tokens_count():
    train, rollout = sample(60, 2)
    t, r = torch.tensor(train, dtype=torch.float64), torch.tensor(rollout, dtype=torch.float64)
    mask = torch.arange(60) % 3 > 0
    kept = [i for i in range(60) if i % 3]
    expected = written_out([train[i] for i in kept], [rollout[i] for i in kept])
    assert gap_stats(t, r, mask.long()).metrics() == pytest.approx(expected, rel=1e-9)


def test_merging_equals_one_pass():
    train, rollout = sample(300, 3)
    t, r = torch.tensor(train, dtype=torch.float64), torch.tensor(rollout, dtype=torch.float64)
    ones = torch.ones(300, dtype=torch.bool)
    merged = GapStats()
    for part in torch.split(torch.arange(300), 37):
        merged = merged + gap_stats(t[part], r[part], ones[part])
    whole = gap_stats(t, r, ones)
    assert (merged.tokens, merged.truncated, merged.max_abs) == (whole.tokens, whole.truncated, whole.max_abs)
    assert merged.metrics() == pytest.approx(whole.metrics(), rel=1e-12)  # sums in another order


def test_equal_policies_have_no_gap():
    t = torch.tensor([-0.1, -2.0, -30.0])
    got = gap_stats(t, t.clone(), torch.ones(3)).metrics()
    assert got == {
        "gap/k1": 0.0, "gap/k3": 0.0, "gap/pearson": 1.0, "gap/chi2": 0.0,
        "gap/ess": 1.0, "gap/mean_abs": 0.0, "gap/max_abs": 0.0, "gap/truncated": 0.0,
    }  # fmt: skip


def test_estimators_agree_with_the_exact_divergences():
    """KL(rollout‖train) and χ²(train‖rollout) of two known distributions, with tokens in exact proportion."""
    p_rollout, p_train = [0.5, 0.25, 0.25], [0.25, 0.25, 0.5]
    tokens = torch.tensor([0, 0, 1, 2])  # in proportion to p_rollout
    r = torch.tensor(p_rollout, dtype=torch.float64).log()[tokens]
    t = torch.tensor(p_train, dtype=torch.float64).log()[tokens]
    kl = sum(a * math.log(a / b) for a, b in zip(p_rollout, p_train, strict=True))
    chi2 = sum(b * b / a for a, b in zip(p_rollout, p_train, strict=True)) - 1
    got = gap_stats(t, r, torch.ones(4), cap=1.5)
    assert (got.k1, got.k3, got.chi2) == pytest.approx((kl, kl, chi2), rel=1e-12)
    assert got.truncated == 1


def test_nothing_to_measure_is_nan_not_zero():
    empty = gap_stats(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2, 3))
    assert all(math.isnan(v) for v in empty.metrics().values())
    constant = gap_stats(torch.full((4,), -1.0), torch.full((4,), -1.5), torch.ones(4))
    assert math.isnan(constant.pearson) and constant.mean_abs == 0.5


def test_nonfinite_tokens_are_counted_and_left_out():
    t = torch.tensor([-1.0, float("nan"), -2.0, float("-inf")])
    r = torch.tensor([-1.5, -1.0, -2.0, -3.0])
    got = gap_stats(t, r, torch.ones(4))
    assert (got.tokens, got.nonfinite) == (2, 2)
    assert got.mean_abs == 0.25 and got.metrics()["gap/nonfinite"] == 2.0


def test_huge_ratios_stay_finite():
    got = gap_stats(torch.tensor([0.0]), torch.tensor([-1e4]), torch.ones(1))
    assert all(math.isfinite(v) for k, v in got.metrics().items() if k != "gap/pearson")
    assert got.truncated == 1


def test_shapes_must_agree():
    with pytest.raises(ValueError, match="one shape"):
        gap_stats(torch.zeros(3), torch.zeros(4), torch.ones(3))

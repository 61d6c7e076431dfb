"""The fork probe: survival and intervals by hand, scripted answers, and a model that no treatment can change."""

import json
import math
import random

import pytest
import torch

from mxrl.nn import convert, quantized_layers
from mxrl.probes import fork as module
from mxrl.probes.fork import first_difference, fork, length_bins
from mxrl.probes.subject import ProbeError, Subject
from mxrl.probes.survival import (
    accuracy,
    binomial_interval,
    first_half,
    hazard,
    hazard_effects,
    kaplan_meier,
    poisson_interval,
)
from mxrl.report.page import Page, percent, plain
from mxrl.report.probe_fork import sections
from mxrl.report.probe_rows import stated
from mxrl.rl.policy import build_policy, char_tokenizer
from mxrl.rl.rollout import Rollout, left_pad
from mxrl.rl.tasks import get_task, load_task

CHAIN = get_task("chain")


def tiny(kind="dense", prompts=4, new=20, **settings):
    model = build_policy(kind, size="tiny", initializer_range=0.2)  # so large that rounding matters
    convert(model.eval(), "bf16")
    problems = tuple(load_task("chain", seed=0, n=prompts))
    return Subject("tiny", model, char_tokenizer(), "chain", problems, CHAIN.reward, new, **settings)


def values(result, treatment, key="value"):
    return {row["metric"]: row[key] for row in result["measures"] if row["treatment"] == treatment}


# ---- survival --------------------------------------------------------------------------------------------------------


def test_kaplan_meier_by_hand():
    """Six answers: forks at 1, 2 and 3; ends at 2, 4 and 4. S = 5/6, 5/6 · 4/5, 2/3 · 2/3; none at 4."""
    found = kaplan_meier([1, 2, 2, 3, 4, 4], [True, False, True, True, False, False])
    assert found.at_risk == [6, 6, 5, 3, 2] and found.forks == [0, 1, 1, 1, 0]
    assert found.share == pytest.approx([1, 5 / 6, 2 / 3, 4 / 9, 4 / 9], rel=1e-15)
    variance = 1 / (6 * 5) + 1 / (5 * 4) + 1 / (3 * 2)  # Greenwood's sum of d / (n (n − d))
    spread = math.exp(1.959964 * math.sqrt(variance) / -math.log(4 / 9))
    assert found.low[3] == pytest.approx((4 / 9) ** spread, rel=1e-12)
    assert found.high[3] == pytest.approx((4 / 9) ** (1 / spread), rel=1e-12)
    assert (found.low[0], found.high[0]) == (1, 1) and all(a < s < b for a, s, b in zip(
        found.low[1:], found.share[1:], found.high[1:], strict=True))  # fmt: skip
    half = found.reaches(0.5)
    assert half is not None and (half.value, half.n) == (3, 6)
    assert half.low == next(t for t, v in enumerate(found.low) if v <= 0.5) and math.isnan(half.high)
    assert found.reaches(0.4) is None


def test_survival_where_all_or_none_fork():
    every = kaplan_meier([1, 2], [True, True])
    assert every.share == [1, 0.5, 0] and (every.low[2], every.high[2]) == (0, 0)
    none = kaplan_meier([3, 1], [False, False])
    assert none.share == [1, 1, 1, 1] == none.low == none.high and none.reaches() is None
    for times, forked in (([], []), ([1], []), ([0], [True])):
        with pytest.raises(ValueError, match="survival"):
            kaplan_meier(times, forked)


def drawn(h, n=3000, longest=60, late=1.0):
    """Times of answers whose hazard is h, from token 31 on h · late, cut at `longest`."""
    source = random.Random(0)
    times, forked = [], []
    for _ in range(n):
        for t in range(1, longest + 1):
            if source.random() < (h if t <= 30 else h * late):
                break
        else:
            t = longest + 1
        times.append(min(t, longest))
        forked.append(t <= longest)
    return times, forked


def test_a_constant_hazard_is_found_again():
    times, forked = drawn(0.02)
    found, curve = hazard(times, forked), kaplan_meier(times, forked)
    assert found.low < 0.02 < found.high and found.high - found.low < 0.002
    theory = [0.98**t for t in range(len(curve.share))]
    assert max(abs(a - b) for a, b in zip(curve.share, theory, strict=True)) < 4 * 0.5 / math.sqrt(3000)
    inside = [low <= s <= high for low, s, high in zip(curve.low[1:], theory[1:], curve.high[1:], strict=True)]
    assert sum(inside) >= 0.9 * len(inside)
    half = curve.reaches(0.5)
    assert half is not None and half.low <= math.log(0.5) / math.log(0.98) <= half.high
    constant = first_half(times, forked)
    assert constant is not None and constant[1].low < constant[0] < constant[1].high
    assert constant[0] == pytest.approx(0.5, abs=0.02)


def test_a_growing_hazard_is_told():
    found = first_half(*drawn(0.02, late=2.0))
    assert found is not None and found[1].high < found[0]
    assert first_half([4, 5], [False, False]) is None


def test_first_half_by_hand():
    """Watched at tokens 1 to 4: 3, 3, 2, 2 answers. After token 2 it is 6 of 10; one of the two forks lies there."""
    found = first_half([4, 4, 2], [True, False, True])
    assert found is not None and found[0] == 0.6 and (found[1].value, found[1].n) == (0.5, 2)


def test_hazard_effects_are_the_ratios_linear_terms():
    times, forked = [2, 5, 3, 10], [True, False, True, False]
    effects = hazard_effects(times, forked)
    assert sum(effects) / 4 == pytest.approx(2 / 20) == hazard(times, forked).value
    h, middle = 0.1, 5.0
    assert effects == pytest.approx(
        [h + (1 - h * 2) / middle, h - h * 5 / middle, h + (1 - 0.3) / middle, h - 1 / middle]
    )
    assert hazard_effects([1, 1, 1], [True, False, False]) == pytest.approx([1, 0, 0])


def test_exact_intervals_are_the_published_ones():
    """Garwood's table for counts, Clopper and Pearson's for shares."""
    for count, low, high in ((0, 0, 3.6889), (1, 0.0253, 5.5716), (10, 4.7954, 18.3904), (100, 81.364, 121.627)):
        assert poisson_interval(count) == pytest.approx((low, high), abs=5e-4)
    table = ((0, 10, 0, 0.3085), (5, 10, 0.1871, 0.8129), (10, 10, 0.6915, 1), (1, 20, 0.0013, 0.2487))
    for count, n, low, high in table:
        assert binomial_interval(count, n) == pytest.approx((low, high), abs=5e-5)
    with pytest.raises(ValueError, match="trial"):
        binomial_interval(0, 0)


def test_accuracy_stays_inside():
    right = accuracy([1.0, 1.0, 1.0])
    assert right is not None and right.value == right.high == 1 and right.low == pytest.approx(0.025 ** (1 / 3))
    graded = accuracy([0.5, 1.0])
    assert graded is not None and graded.value == 0.75 and graded.high > 1  # Student's t: no counts
    assert accuracy([]) is None


# ---- answers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [([1, 2, 3], [1, 2, 3], None), ([1, 2, 3], [1, 9, 3], 1), ([1], [2, 1], 0), ([1, 2], [1, 2, 3], 2), ([], [], None)],
)
def test_first_difference(a, b, expected):
    assert first_difference(a, b) == expected == first_difference(b, a)


def test_length_bins_are_quantiles_and_keep_equal_lengths_together():
    assert length_bins([50, 10, 40, 20, 30, 60], 3) == [[1, 3], [2, 4], [0, 5]]
    assert length_bins([5, 5, 5, 5], 3) == [[0, 1, 2, 3]]
    assert length_bins([7], 1) == [[0]]
    groups = length_bins([3, 1, 1, 2, 1, 9], 2)
    assert sorted(i for group in groups for i in group) == list(range(6)) and len(groups) == 2


class Scripted(Subject):
    """Answers are given: the unquantized policy's, the treated one's."""

    PLAIN = ([5, 6, 7, 2], [5, 6, 2], [8, 2], [9, 9, 9, 9, 9])
    TREATED = ([5, 6, 8, 8, 2], [5, 6, 2], [7, 2], [9, 9, 9, 9, 2])

    def rollout(self, *, samples=1, greedy=False, temperature=1.0):
        assert greedy and samples == 1
        quantized = next(quantized_layers(self.model)).operands.recipe.quantizes
        return self.of(self.TREATED if quantized else self.PLAIN)

    def of(self, rows):
        ids, mask = left_pad(self.prompt_ids, 0, "cpu")
        wide = max(map(len, rows))
        tokens = torch.tensor([[*row, *[0] * (wide - len(row))] for row in rows])
        there = torch.tensor([[i < len(row) for i in range(wide)] for row in rows])
        entropy = torch.arange(wide, dtype=torch.float32).repeat(len(rows), 1) * there  # position i: i nats
        return Rollout(ids, mask, tokens, there, torch.zeros(tokens.shape), entropy, tokens)

    def texts(self, rollout):
        return [" ".join(map(str, row)) for row in rollout.completions()]


def right_if_short(texts, answers):
    return [float(len(text) <= 7) for text in texts]  # up to four one-digit tokens


def test_scripted_answers_give_the_figures_worked_out_by_hand(monkeypatch):
    """Forks at token 3 of 4 and token 1 of 2; one answer is the same, one forks in its fifth and last token."""
    plain = tiny()
    subject = Scripted("scripted", plain.model, plain.tokenizer, "chain", plain.problems, right_if_short, 5)
    monkeypatch.setattr(module, "_in_other_company", lambda subject: subject.of(subject.PLAIN))
    full = ([[5, 6, 7, 2, 0], [5, 6, 2, 0, 0], [8, 7, 0, 0, 0], [9] * 5], [[10.0, 20, 30, 40, 50]] * 4)
    monkeypatch.setattr(module, "_full_pass", lambda subject, rollout: full)
    result = fork(subject, ["mxfp4"], bins=1, horizons=(2, 280))
    found = values(result, "mxfp4")
    # watched 3 + 3 + 1 + 5 = 12 tokens, three forks; unquantized right 1 1 1 0, treated 0 1 1 0 ("9 9 9 9 2" is long)
    assert found["fork_hazard"] == 3 / 12 and found["fork_share"] == 3 / 4
    assert found["forked_accuracy_change"] == pytest.approx(-1 / 3)
    assert found["forked_accuracy"] == pytest.approx(1 / 3)
    assert found["forked_accuracy_unquantized"] == pytest.approx(2 / 3)
    assert found["unforked_accuracy"] == 1 and found["accuracy_change"] == -1 / 4
    # S(1) = 3/4, at 3 the censored one is still watched: S(3) = 3/4 · 2/3 = 1/2
    assert found["survival_half"] == 3
    # entropy at the forks: positions 2, 0, 4; the rest of the answers: (0+1+3)/3, 1, (0+1+2+3)/4
    assert found["fork_entropy"] == pytest.approx(2.0)
    assert found["fork_entropy_excess"] == pytest.approx(((2 - 4 / 3) + (0 - 1) + (4 - 1.5)) / 3)
    assert found["fork_margin"] == pytest.approx((30 + 10 + 50) / 3)
    assert values(result, "mxfp4", "n")["forked_accuracy_change"] == 3
    rows = {row["metric"]: row for row in result["measures"] if row["treatment"] == "mxfp4"}
    assert rows["forked_accuracy_change"]["values"] == [-1.0, None, 0.0, 0.0]
    assert sum(rows["fork_hazard"]["values"]) / 4 == pytest.approx(0.25)
    assert values(result, "bf16")["fork_hazard"] == 0
    assert values(result, "bf16")["fork_hazard_full_pass"] == pytest.approx(1 / (4 + 3 + 2 + 5))  # one of 14 tokens
    theory = {row["name"]: row for row in result["theory"]}
    assert (
        theory["unforked_at_2"]["predicted"] == pytest.approx(0.75**2) and theory["unforked_at_2"]["measured"] == 0.75
    )
    assert theory["unforked_at_280"]["measured"] is None and "extrapolated" in theory["unforked_at_280"]["note"]
    shares = next(c for c in result["curves"] if c["name"] == "fork_share_by_length")
    assert shares["x"] == [14 / 4] and shares["series"]["mxfp4"]["mean"] == [0.75] and shares["answers"] == [4]
    assert any("1 of 4 unquantized answers were cut at 5 tokens" in note for note in result["notes"])
    assert any("Rounding alone" in note for note in result["notes"])


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_a_treatment_that_changes_nothing_never_forks(kind):
    """Weights of zero stay zero under every quantizer, so no treatment can change an answer."""
    subject = tiny(kind)
    with torch.no_grad():
        for layer in quantized_layers(subject.model):
            for name in layer.weights:
                layer.parameter(name).zero_()
    result = fork(subject, ["mxfp4", "mxfp4@scale", "mxfp4@~grid"])
    for treatment in ("bf16", "mxfp4", "mxfp4@scale", "mxfp4@~grid"):
        found = values(result, treatment)
        assert found["fork_hazard"] == found["fork_share"] == found["accuracy_change"] == 0
        assert found["survival_half"] is None and found["forked_accuracy_change"] is None
        assert values(result, treatment, "low")["fork_hazard"] == 0 < values(result, treatment, "high")["fork_hazard"]
    survival = next(c for c in result["curves"] if c["name"] == "survival")
    assert {v for band in survival["series"].values() for v in band["mean"]} == {1.0}
    assert not [row for row in result["theory"] if row["name"] == "constant_hazard"]


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_a_real_model_forks_and_gives_the_same_result_twice(kind):
    treatments = ["mxfp4", "mxfp4@~scale", "bf16"]
    progressed = []
    result = fork(tiny(kind), treatments, progress=progressed.append)
    assert json.dumps(result, allow_nan=False) == json.dumps(fork(tiny(kind), treatments), allow_nan=False)
    assert result["probe"] == "fork" and result["settings"]["treatments"] == ["mxfp4", "mxfp4@~scale"]
    assert progressed == sorted(progressed) and progressed[-1] == 1
    found = values(result, "mxfp4")
    assert found["fork_hazard"] > 0 and found["fork_margin"] >= 0
    # float32 on a CPU, prompts of differing lengths: other company and full passes give the very same tokens
    control = values(result, "bf16")
    assert control["fork_hazard"] == control["fork_hazard_full_pass"] == 0
    above = next(r for r in result["measures"] if r["metric"] == "fork_hazard_above_bf16" and r["treatment"] == "mxfp4")
    assert above["value"] == pytest.approx(found["fork_hazard"])


def test_margin_and_entropy_at_a_fork_are_the_unquantized_policys():
    subject = tiny()
    written = module._written(subject)
    ids = torch.tensor([subject.prompt_ids[2] + written.tokens[2][:3]])
    with torch.no_grad():
        logp = subject.logits(ids, torch.ones_like(ids))[0, -1].log_softmax(-1)
    first, second = logp.topk(2).values.tolist()
    assert written.margin[2][3] == pytest.approx(first - second, abs=1e-5)
    assert written.entropy[2][3] == pytest.approx(float(torch.special.entr(logp.exp()).sum()), abs=1e-5)
    assert written.tokens[2][3] == int(logp.argmax())


@pytest.mark.parametrize(
    ("treatments", "options", "message"),
    [
        ([], {}, "no treatment"),
        (["bf16"], {}, "no treatment"),
        (["mxfp4@backward"], {}, "'mxfp4@backward' changes the backward pass alone"),
        (["mxfp4"], {"bins": 0}, "bins=0"),
        (["mxfp4"], {"horizons": (280, 0)}, "at least 1"),
    ],
)
def test_what_it_refuses(treatments, options, message):
    with pytest.raises(ProbeError, match=message):
        fork(tiny(), treatments, **options)


def test_no_prompts():
    with pytest.raises(ProbeError, match="no prompts"):
        fork(tiny(prompts=0), ["mxfp4"])


def test_page():
    result = json.loads(json.dumps(fork(tiny(prompts=6), ["mxfp4", "mxfp4@scale", "mxfp4@~scale"])))
    page = Page("title")
    sections(page, result)
    html = page.html()
    assert html.count("<figure>") == 5 and "Trajectory forks" in html
    rows = {row["metric"]: row for row in result["measures"] if row["treatment"] == "mxfp4"}
    for metric, form in (("fork_hazard", plain), ("fork_share", percent), ("fork_entropy_excess", plain)):
        assert f">{stated(rows[metric], form)}<" in html  # a cell of its own
    assert "extrapolated" in html
    only = Page("title")
    sections(only, json.loads(json.dumps(fork(tiny(), ["mxfp4@-scale"]))))
    assert "mxfp4@-scale" in only.html()

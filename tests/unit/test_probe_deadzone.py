"""The deadzone probe: ranks in closed form, zeros of made blocks, scripted answers, a model that nothing changes."""

import json
import math

import pytest
import torch

from mxrl.decompose import inject
from mxrl.formats import MXFP4, NVFP4
from mxrl.nn import convert, quantized_layers
from mxrl.probes import deadzone as module
from mxrl.probes.deadzone import deadzone
from mxrl.probes.deadzone_weights import gaussian_share, ranks, singular_values, spread, stable_rank_lost
from mxrl.probes.subject import ProbeError, Subject
from mxrl.report.page import Page, percent
from mxrl.report.probe_deadzone import sections
from mxrl.report.probe_rows import stated
from mxrl.rl.evaluate import Decoded, evaluate
from mxrl.rl.policy import build_policy, char_tokenizer
from mxrl.rl.tasks import get_task, load_task

CHAIN = get_task("chain")


def tiny(kind="dense", prompts=3, new=8, reward=CHAIN.reward):
    model = build_policy(kind, size="tiny", initializer_range=0.2)
    convert(model.eval(), "bf16")
    return Subject("tiny", model, char_tokenizer(), "chain", tuple(load_task("chain", seed=0, n=prompts)), reward, new)


def values(result, treatment, key="value"):
    return {row["metric"]: row.get(key) for row in result["measures"] if row["treatment"] == treatment}


def layer_row(result, treatment, layer, kind):
    found = [r for r in result["layers"] if (r["treatment"], r["layer"], r["kind"]) == (treatment, layer, kind)]
    assert len(found) == 1
    return found[0]


# ---- ranks -----------------------------------------------------------------------------------------------------------


def test_ranks_of_diagonals_in_closed_form():
    """σ = 4, 2, 1, 1: shares 1/2, 1/4, 1/8, 1/8 have an entropy of 1.75 bits; ‖W‖_F² = 22, ‖W‖₂² = 16."""
    turn = torch.linalg.qr(torch.randn(7, 7, generator=torch.Generator().manual_seed(0)).double())[0]
    tall = torch.zeros(7, 4).double()
    tall[:4] = torch.diag(torch.tensor([4.0, 2, 1, 1]))
    found = ranks(torch.stack([turn @ tall, tall]))
    for rank in [*found, *ranks((turn @ tall).mT[None])]:
        assert rank.effective == pytest.approx(2**1.75, rel=1e-7) and rank.stable == pytest.approx(22 / 16, rel=1e-12)
    assert ranks(3 * torch.eye(5)[None])[0] == pytest.approx((5, 5), rel=1e-12)
    one = ranks(torch.outer(torch.arange(1.0, 5), torch.arange(1.0, 7))[None])[0]
    assert one == pytest.approx((1, 1), abs=1e-6)
    assert ranks(torch.zeros(1, 3, 4)) == [(0, 0)]


def test_singular_values_equal_torchs():
    w = torch.randn(3, 40, 70, generator=torch.Generator().manual_seed(1))
    expected = torch.linalg.svdvals(w.double()).flip(-1)
    torch.testing.assert_close(singular_values(w), expected, rtol=1e-10, atol=0)
    torch.testing.assert_close(singular_values(w.mT.bfloat16()), torch.linalg.svdvals(w.bfloat16().double()).flip(-1))


@pytest.mark.parametrize("form", [MXFP4, NVFP4])
def test_share_of_gaussian_weights_in_the_deadzone(form):
    """Against a million drawn blocks' worth of elements; four standard errors."""
    x = torch.randn(60_000, form.block, generator=torch.Generator().manual_seed(0)).double().abs()
    share = (x * form.deadzone_ratio < x.amax(1, keepdim=True)).double().mean(1)
    error = float(share.std()) / math.sqrt(len(share))
    assert gaussian_share(form) == pytest.approx(float(share.mean()), abs=4 * error)
    assert gaussian_share(form, 500) == pytest.approx(gaussian_share(form), rel=1e-6)


def test_zeroing_the_deadzone_raises_the_stable_rank_of_gaussian_weights_by_its_energy():
    """150 Gaussian matrices with one strong direction each; four standard errors, which exclude 0 (and +ε) by far."""
    source = torch.Generator().manual_seed(0)
    count, n = 150, 256
    u, v = (torch.randn(count, n, generator=source).sign() / math.sqrt(n) for _ in range(2))
    w = torch.randn(count, n, n, generator=source) + 6 * math.sqrt(n) * u[:, :, None] * v[:, None, :]
    only = inject(w, {"deadzone"})
    energy = float(((only - w) ** 2).sum() / (w**2).sum())
    lost = torch.tensor([1 - a.stable / b.stable for a, b in zip(ranks(only), ranks(w), strict=True)])
    error = 4 * float(lost.std()) / math.sqrt(count)
    assert float(lost.mean()) == pytest.approx(stable_rank_lost(energy), abs=error)
    assert float(lost.mean()) + error < 0 and energy > 2e-4
    assert stable_rank_lost(0.5) == -1


def test_spread_takes_the_ends_and_evenly_between():
    names = list("abcdefghi")
    assert spread(names, None) == spread(names, 9) == spread(names, 20) == names
    assert spread(names, 3) == ["a", "e", "i"] and spread(names, 1) == ["a"] and spread(names, 2) == ["a", "i"]


# ---- weights ---------------------------------------------------------------------------------------------------------


def test_zeros_of_made_blocks():
    """A block with maximum 7 has the scale 2 (ceil), so that |x| < .5 is stored as 0; in the deadzone is |x| < 7/24."""
    subject = tiny()
    layer = next(layer for layer in quantized_layers(subject.model) if layer.name.endswith("layers.1.self_attn.q_proj"))
    block = torch.full((32,), 3.0)
    block[:4] = torch.tensor([7.0, 0.4, 0.1, -0.2])
    with torch.no_grad():
        layer.module.weight.copy_(block.repeat(layer.module.weight.numel() // 32).view_as(layer.module.weight))
        layer.module.weight[0, 5] = 0.0
    total = layer.module.weight.numel()
    result = deadzone(subject, ["mxfp4", "mxfp4@deadzone", "mxfp4@-deadzone", "mxfp4@~deadzone"], samples=2)
    zeros = {t: layer_row(result, t, 1, "q")["zeros"] * total for t in result["settings"]["treatments"]}
    blocks = total // 32
    assert zeros["mxfp4"] == 3 * blocks + 1 and zeros["mxfp4@deadzone"] == 2 * blocks + 1
    assert zeros["mxfp4@-deadzone"] == blocks + 1 and zeros["mxfp4@~deadzone"] == 0
    row = layer_row(result, "mxfp4@deadzone", 1, "q")
    assert row["zeros_before"] * total == 1 and row["deadzone"] == (2 * blocks + 1) / total
    energy = blocks * (0.1**2 + 0.2**2)
    assert row["deadzone_energy"] == pytest.approx(
        energy / float(layer.module.weight.detach().double().square().sum()), rel=1e-6
    )
    shares = {
        r["kind"]: r["zeros"] * r["elements"] for r in result["layers"] if r["treatment"] == "mxfp4" and r["layer"]
    }
    sizes = [r["elements"] for r in result["layers"] if r["treatment"] == "mxfp4" and r["layer"] == 1]
    measured = next(r for r in result["measures"] if r["metric"] == "zeros" and r["treatment"] == "mxfp4")
    assert measured["values"][1] == pytest.approx(sum(shares.values()) / sum(sizes)) and measured["n"] == 2


def test_ranks_in_the_result_are_those_of_the_weights_that_decoding_uses():
    subject = tiny()
    result = deadzone(subject, ["mxfp4"], samples=2)
    weight = subject.model.model.layers[0].mlp.down_proj.weight.detach()
    before, after = ranks(torch.stack([weight, inject(weight, {"scale", "deadzone", "grid"}, recipe="mxfp4")]))
    row = layer_row(result, "mxfp4", 0, "down")
    assert row["effective_rank_before"] == pytest.approx(before.effective, rel=1e-9)
    assert row["effective_rank"] == pytest.approx(after.effective, rel=1e-9)
    assert row["stable_rank_lost"] == pytest.approx(1 - after.stable / before.stable, rel=1e-6)


def test_experts_count_one_by_one_and_can_be_sampled():
    every = deadzone(tiny("moe"), ["mxfp4"], samples=2)
    kinds = {r["kind"]: r["matrices"] for r in every["layers"] if r["layer"] == 0}
    assert kinds == {"q": 1, "k": 1, "v": 1, "o": 1, "experts.gate": 4, "experts.up": 4, "experts.down": 4}
    assert every["settings"]["matrices_measured"] == every["settings"]["matrices"] == 2 * (4 + 12)
    assert not any("evenly spread" in note for note in every["notes"])
    some = deadzone(tiny("moe"), ["mxfp4"], samples=2, matrices=3)
    assert some["settings"]["matrices_measured"] == 4 * 2 + 3 * 3
    assert any("17 of 32 matrices" in note for note in some["notes"])
    assert sum(r["matrices"] for r in some["layers"] if r["kind"] == "experts.up") == 3


# ---- answers ---------------------------------------------------------------------------------------------------------


def test_scripted_answers_give_the_figures_worked_out_by_hand(monkeypatch):
    """Two problems, two samples each; under the treatment the first loses one sample and its greedy answer."""
    plain = {1: ["x#1", "y#0"], 2: ["x#1", "y#1", "z#2", "z#2"]}
    noisy = {1: ["x#7", "y#0"], 2: ["x#1", "x#7", "z#2", "w#2"]}

    def scripted(model, tokenizer, prompts, *, max_new_tokens, temperature, seed):
        quantized = next(quantized_layers(model)).operands.recipe.quantizes
        texts = (noisy if quantized else plain)[1 if temperature == 0 else 2]
        assert len(prompts) == len(texts) and (temperature, max_new_tokens, seed) in ((0.0, 8, 0), (0.7, 8, 0))
        tokens = [10, 20, 5, 15][: len(texts)] if quantized else [10, 10, 10, 10][: len(texts)]
        return Decoded(texts, tokens, [3.0 if quantized else 1.0] * len(texts), [True] * len(texts))

    monkeypatch.setattr(module, "decode", scripted)
    subject = tiny(prompts=2)
    problems = tuple(p.__class__(p.prompt, a, p.meta) for p, a in zip(subject.problems, "12", strict=True))
    subject = Subject("scripted", subject.model, subject.tokenizer, "chain", problems, CHAIN.reward, 8)
    result = deadzone(subject, ["mxfp4@deadzone", "mxfp4@~deadzone"], samples=2, temperature=0.7)
    found, before = values(result, "mxfp4@deadzone"), values(result, "bf16")
    assert before["greedy_accuracy"] == 0.5 and found["greedy_accuracy"] == 0
    assert values(result, "mxfp4@deadzone", "values")["greedy_accuracy_change"] == [-1.0, 0.0]
    assert before["sampled_accuracy"] == 1 and found["sampled_accuracy_change"] == -0.25
    assert before["distinct"] == 1.5 and values(result, "mxfp4@deadzone", "values")["distinct_change"] == [0, 1]
    assert before["distinct_answers"] == 1 and found["distinct_answers_change"] == 0.5
    # entropy a token: unquantized 2/20; treated 6/30 and 6/20; tokens 15 and 10 against 10
    assert found["rollout_entropy_change"] == pytest.approx((0.2 + 0.3) / 2 - 0.1)
    assert found["mean_tokens_change"] == 2.5
    theory = {row["name"]: row for row in result["theory"]}
    assert theory["deadzone_beyond_noise_greedy"]["measured"] == 0 and theory["deadzone_beyond_noise_greedy"]["within"]
    assert theory["deadzone_share"]["predicted"] == gaussian_share(MXFP4)


def test_answers_are_those_of_evaluate():
    """The same completions, scores and entropy as the evaluation that a training run makes."""
    subject = tiny()
    found = module._answers(subject, "bf16", 3, 1.0)
    options = {"reward": lambda texts, answer: [float(len(t)) for t in texts], "max_new_tokens": 8}
    drawn = evaluate(subject.model, subject.tokenizer, subject.problems, samples=3, temperature=1.0, **options)
    assert found.distinct == [float(len(set(texts))) for texts in drawn.completions]
    weighted = sum(e * 3 * t for e, t in zip(found.entropy, found.tokens, strict=True)) / (3 * sum(found.tokens))
    assert weighted == pytest.approx(drawn.entropy, rel=1e-6)
    assert sum(found.tokens) / 3 == pytest.approx(drawn.mean_tokens)


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_a_model_that_no_treatment_can_change(kind):
    subject = tiny(kind)
    with torch.no_grad():
        for layer in quantized_layers(subject.model):
            for name in layer.weights:
                layer.parameter(name).zero_()
    result = deadzone(subject, ["mxfp4", "mxfp4@~deadzone", "mxfp4@deadzone"], samples=2)
    for treatment in result["settings"]["treatments"]:
        found = values(result, treatment)
        assert all(v == 0 for metric, v in found.items() if metric.endswith("_change"))
        assert found["zeros"] == 1 and found["effective_rank_lost"] == found["stable_rank_lost"] == 0
    assert any("rule of three" in note for note in result["notes"])


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_the_same_result_twice(kind):
    treatments, progressed = ["mxfp4", "mxfp4@~deadzone", "bf16"], []
    first = deadzone(tiny(kind), treatments, samples=2, progress=progressed.append)
    again = deadzone(tiny(kind), treatments, samples=2)
    assert json.dumps(first, allow_nan=False) == json.dumps(again, allow_nan=False)
    assert first["probe"] == "deadzone" and first["settings"]["treatments"] == treatments[:2]
    assert progressed == sorted(progressed) and progressed[-1] == 1
    assert values(first, "mxfp4")["rollout_entropy_change"] != 0


@pytest.mark.parametrize(
    ("treatments", "options", "message"),
    [
        (["bf16"], {}, "no treatment"),
        (["mxfp4@backward"], {}, "backward pass alone"),
        (["mxfp4"], {"samples": 1}, "samples=1"),
        (["mxfp4"], {"temperature": 0.0}, "temperature=0"),
        (["mxfp4"], {"matrices": 0}, "matrices=0"),
    ],
)
def test_what_it_refuses(treatments, options, message):
    with pytest.raises(ProbeError, match=message):
        deadzone(tiny(), treatments, **options)
    with pytest.raises(ProbeError, match="no prompts"):
        deadzone(tiny(prompts=0), ["mxfp4"])


def test_page():
    page = Page("title")
    result = json.loads(json.dumps(deadzone(tiny(), ["mxfp4", "mxfp4@deadzone", "mxfp4@~deadzone"], samples=2)))
    sections(page, result)
    html = page.html()
    assert html.count("<figure>") == 3 and "The deadzone and rollouts" in html and "The zeros" in html
    rows = {row["metric"]: row for row in result["measures"] if row["treatment"] == "mxfp4"}
    for metric in ("zeros", "effective_rank_lost", "stable_rank_lost", "sampled_accuracy"):
        assert f">{stated(rows[metric], percent)}<" in html  # a cell of its own
    other = tiny(reward=lambda texts, answer: [1.0] * len(texts))  # whose answers can't be told from the text
    result = json.loads(json.dumps(deadzone(other, ["mxfp4@-grid"], samples=2)))
    assert "distinct_answers" not in values(result, "bf16") and any("can't be told" in n for n in result["notes"])
    page = Page("title")
    sections(page, result)
    assert "different answers" not in page.html()

"""The routing probe: its theory on known answers, and its figures against other ways to the same numbers."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_models import MOE, tiny_model
from torch import Tensor

import mxrl
from mxrl.nn import record_routing, replay_routing
from mxrl.nn.replay import moe_layers
from mxrl.probes.routing import routing
from mxrl.probes.routing_theory import (
    changed_experts,
    drawn_flips,
    energies,
    flip_probability,
    margins,
    noise_variance,
)
from mxrl.probes.subject import ProbeError, Subject
from mxrl.probes.treatments import treated
from mxrl.report.page import Page
from mxrl.report.probe_routing import sections
from mxrl.rl.policy import char_tokenizer
from mxrl.rl.rollout import inference, positions
from mxrl.rl.tasks import get_task, load_task


def subject_of(model: Any, prompts: int = 5, batch: int = 3, new_tokens: int = 6) -> Subject:
    mxrl.convert(model, "bf16")
    problems = load_task("chain", seed=0, n=prompts, split="test")
    return Subject("tiny", model, char_tokenizer(), "chain", tuple(problems), get_task("chain").reward, new_tokens,
                   seed=3, batch=batch)  # fmt: skip


def measures(result: dict[str, Any], treatment: str) -> dict[str, dict[str, Any]]:
    return {row["metric"]: row for row in result["measures"] if row["treatment"] == treatment}


# --- theory ----------------------------------------------------------------------------------------------------------


def test_a_router_flips_iff_noise_exceeds_its_margin():
    logits = torch.tensor([[3.0, 0.5, 2.0, 1.0]])  # experts 0 and 2; expert 3 is 1 behind
    assert margins(logits, 2).item() == 1.0 and margins(logits, 1).item() == 1.0 and margins(logits, 3).item() == 0.5
    before = logits.topk(2).indices
    for noise, flips in [(0.99, 0), (1.01, 1), (-5.0, 0)]:
        after = (logits + torch.tensor([0.0, 0.0, 0.0, noise])).topk(2).indices
        assert changed_experts(before, after).item() == flips
        down = (logits - torch.tensor([0.0, 0.0, noise, 0.0])).topk(2).indices
        assert changed_experts(before, down).item() == flips


def test_changed_experts_are_counted_whatever_their_order():
    before = torch.tensor([[0, 1, 2], [0, 1, 2], [0, 1, 2], [0, 1, 2]])
    after = torch.tensor([[2, 0, 1], [0, 1, 3], [5, 4, 0], [3, 4, 5]])
    assert changed_experts(before, after).tolist() == [0, 1, 2, 3]


def test_flip_probability_is_the_normal_distributions():
    """Two experts, noise N(0, σ²) on each: the difference is N(0, 2σ²)."""
    margin = torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64)
    known = torch.tensor([0.5, 0.0786496035, 0.0023388675], dtype=torch.float64)  # Φ(0), Φ(−√2), Φ(−2√2)
    torch.testing.assert_close(flip_probability(margin, 0.5), known, rtol=1e-8, atol=0)
    assert flip_probability(margin, 0.0).tolist() == [0, 0, 0]
    logits = torch.stack([margin, torch.zeros(3, dtype=torch.float64)], -1)
    drawn = drawn_flips(logits, 1, 0.5, 20_000, torch.Generator().manual_seed(0))
    torch.testing.assert_close(drawn, known, rtol=0, atol=4 * math.sqrt(0.25 / 20_000))  # four standard errors


def test_the_boundary_pair_misses_what_a_third_expert_does():
    """Two rivals as close as each other: P(flip) = 1 − ∫ φ(z) Φ(z + m/σ)² dz by quadrature, above the pair's."""
    m, sigma = 0.8, 0.6
    z = torch.linspace(-9, 9, 20_001, dtype=torch.float64)
    density = torch.exp(-z.square() / 2) / math.sqrt(2 * math.pi)
    known = 1 - float(torch.trapezoid(density * torch.special.ndtr(z + m / sigma).square(), z))
    logits = torch.tensor([[m, 0.0, 0.0]], dtype=torch.float64)
    drawn = drawn_flips(logits, 1, sigma, 40_000, torch.Generator().manual_seed(1))
    assert abs(float(drawn) - known) < 4 * math.sqrt(known * (1 - known) / 40_000)
    assert float(flip_probability(margins(logits, 1), sigma)) < known - 0.05


def test_noise_is_blind_to_what_all_experts_share():
    generator = torch.Generator().manual_seed(0)
    before = torch.randn(4000, 8, generator=generator, dtype=torch.float64)
    noise = 0.3 * torch.randn(4000, 8, generator=generator, dtype=torch.float64)
    shift = 10 * torch.randn(4000, 1, generator=generator, dtype=torch.float64)
    variance = noise_variance(before, before + noise + shift).mean()
    assert abs(float(variance) - 0.09) < 4 * 0.09 * math.sqrt(2 / (7 * 4000))  # unbiased; four standard errors
    assert noise_variance(before, before + shift).max() < 1e-20


def redundancy(vectors: list[list[float]]) -> float:
    mixed, apart = energies(torch.tensor([vectors]))
    return 1 - float(mixed / apart)


def test_redundancy_of_known_errors():
    e = [3.0, -1.0, 2.0]
    assert redundancy([[1, 0, 0], [0, 5, 0], [0, 0, 2]]) == 0  # orthogonal, as independent ones are on average
    assert redundancy([e, [-v for v in e]]) == 1
    assert redundancy([e] * 2) == -1 and abs(redundancy([e] * 4) + 3) < 1e-6  # 1 − A, the least possible
    gated = [[0.75 * v for v in e], [0.25 * v for v in e]]  # equal errors, unequal gates: 1 − (Σ g)² / Σ g²
    assert abs(redundancy(gated) - (1 - 1 / (0.75**2 + 0.25**2))) < 1e-6


# --- the probe against other ways to the same numbers ----------------------------------------------------------------


def router_logits(subject: Subject, treatment: str | None, ids: Tensor, mask: Tensor) -> tuple[list[Tensor], Tensor]:
    """transformers' own record of the routers' logits, [T, E] a layer, and the model's logits."""

    def run() -> tuple[list[Tensor], Tensor]:
        with inference(subject.model):
            out = subject.model(input_ids=ids, attention_mask=mask, position_ids=positions(mask), use_cache=False,
                                output_router_logits=True)  # fmt: skip
        return list(out.router_logits), out.logits

    if treatment is None:
        return run()
    with treated(subject.model, treatment, seed=subject.seed):
        return run()


@pytest.mark.parametrize("family", MOE)
def test_flips_and_replay_are_those_of_plain_passes(family):
    subject = subject_of(tiny_model(family), batch=5)
    result = routing(subject, ["mxfp4"])
    rollout = subject.rollout()
    ids, mask = rollout.inputs()
    kept = torch.zeros_like(mask, dtype=torch.bool)  # the position before each token of a completion
    kept[:, rollout.prompt_ids.shape[1] - 1 : -1] = rollout.completion_mask
    assert result["settings"]["tokens"] == rollout.tokens == int(kept.sum())

    before, logits = router_logits(subject, None, ids, mask)
    after, treated_logits = router_logits(subject, "mxfp4", ids, mask)
    flipped, first, changed = [], [], []
    for a, b in zip(before, after, strict=True):
        for x, y in zip(a[kept.flatten()].tolist(), b[kept.flatten()].tolist(), strict=True):
            old, new = (sorted(range(4), key=lambda e, s=scores: -s[e])[:2] for scores in (x, y))
            flipped.append(set(old) != set(new))
            changed.append(len(set(old) - set(new)))
            first.append(old[0] != new[0])
    found = measures(result, "mxfp4")
    assert sum(flipped) > 0
    for metric, values in (("topk_flip", flipped), ("top1_flip", first), ("changed_experts", changed)):
        assert abs(found[metric]["value"] - sum(values) / len(values)) < 1e-12
    assert abs(result["layers"][1]["topk_flip"] - sum(flipped[kept.sum() :]) / int(kept.sum())) < 1e-12

    with record_routing(subject.model) as routes:
        router_logits(subject, None, ids, mask)
    with replay_routing(subject.model, routes):
        _, replayed_logits = router_logits(subject, "mxfp4", ids, mask)

    def error(other: Tensor) -> float:
        gap = (other - logits)[kept].double()
        return float((gap - gap.mean(-1, keepdim=True)).square().sum())

    expected = 1 - error(replayed_logits) / error(treated_logits)
    assert abs(found["replay_removed"]["value"] - expected) < 1e-5  # float32 sums


def test_local_flips_are_those_of_one_treated_block():
    """At the second layer: the flips of a model whose first block isn't quantized at all."""
    subject = subject_of(tiny_model("qwen3_moe"), prompts=12, batch=12)
    rows = routing(subject, ["mxfp4"])["layers"]
    assert rows[0]["topk_flip_local"] == rows[0]["topk_flip"]  # the first block's input has no error
    rollout = subject.rollout()
    ids, mask = rollout.inputs()
    kept = torch.zeros_like(mask, dtype=torch.bool)
    kept[:, rollout.prompt_ids.shape[1] - 1 : -1] = rollout.completion_mask
    before, _ = router_logits(subject, None, ids, mask)
    mxrl.convert(subject.model, "mxfp4", skip=["model.layers.0"])
    after, _ = router_logits(subject, None, ids, mask)
    old, new = (x[1][kept.flatten()].topk(2).indices for x in (before, after))
    expected = float((changed_experts(old, new) > 0).double().mean())
    assert abs(rows[1]["topk_flip_local"] - expected) < 1e-12 and 0 < expected < rows[1]["topk_flip"]


@pytest.mark.parametrize("recipe", ["mxfp4", "mxfp4+w4a16"])
def test_redundancy_is_that_of_experts_computed_one_by_one(recipe):
    subject = subject_of(tiny_model("qwen3_moe"), prompts=3)
    result = routing(subject, [recipe])
    rollout = subject.rollout()
    ids, mask = rollout.inputs()
    kept = torch.zeros_like(mask, dtype=torch.bool)
    kept[:, rollout.prompt_ids.shape[1] - 1 : -1] = rollout.completion_mask
    rows = kept.flatten()
    for number, layer in enumerate(moe_layers(subject.model)):
        seen: list[tuple[Tensor, ...]] = []
        handle = layer.experts.register_forward_pre_hook(lambda m, args, seen=seen: seen.append(args))
        router_logits(subject, None, ids, mask)
        handle.remove()
        x, index, gates = (t[rows].detach() for t in seen[0])

        def expert(x_t: Tensor, e: int, quantized: bool, experts: Any = layer.experts) -> Tensor:
            def weight(w: Tensor) -> Tensor:
                return mxrl.fake_quantize(w.detach(), "mxfp4") if quantized else w.detach()

            def activation(a: Tensor) -> Tensor:
                return mxrl.fake_quantize(a, "mxfp4") if quantized and recipe == "mxfp4" else a

            gate, up = weight(experts.gate_up_proj[e]).chunk(2)
            inner = F.silu(activation(x_t) @ gate.T) * (activation(x_t) @ up.T)
            return activation(inner) @ weight(experts.down_proj[e]).T

        mixed = apart = 0.0
        for x_t, chosen, g in zip(x, index.tolist(), gates, strict=True):
            errors = [g_e * (expert(x_t[None], e, True) - expert(x_t[None], e, False))
                      for e, g_e in zip(chosen, g, strict=True)]  # fmt: skip
            mixed += float(sum(errors).square().sum())  # type: ignore[union-attr]
            apart += sum(float(v.square().sum()) for v in errors)
        # float32 sums in another order can move an inner activation over a threshold of Q: a few of 18 tokens at most
        assert abs(result["layers"][number]["redundancy"] - (1 - mixed / apart)) < 2e-3


def test_known_margins_without_noise_never_flip():
    """gpt-oss's routers have biases: without weights they give every token the same logits, whatever the error."""
    model = tiny_model("gpt_oss")
    for layer in moe_layers(model):
        layer.router.weight.data.zero_()
        layer.router.bias.data.copy_(torch.tensor([0.5, 2.0, 1.25, 0.0]))  # experts 1 and 2, a margin of .75
    result = routing(subject_of(model), ["mxfp4", "mxfp4@~scale"])
    for t in ("mxfp4", "mxfp4@~scale"):
        found = measures(result, t)
        assert (
            found["topk_flip"]["value"] == found["topk_flip_local"]["value"] == found["changed_experts"]["value"] == 0
        )
        # nothing to replay, and the control draws the same noise in both passes
        assert found["replay_removed"]["value"] == found["replay_removed_blocks"]["value"] == 0
        assert found["error_at_flips"]["value"] == 0
    for row in result["layers"]:
        assert row["margin_median"] == 0.75 and row["noise_sd"] == row["noise_sd_local"] == 0
        assert row["predicted_flip"] == row["drawn_flip"] == 0 and row["relative_error"] > 0


def test_experts_that_are_all_the_same_add_up():
    """Copies of one expert make the same error: R = 1 − (Σ g)² / Σ g², and nothing comes off the relative error."""
    model = tiny_model("mixtral")
    for layer in moe_layers(model):
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(layer.experts, name).data
            weight.copy_(weight[:1].expand_as(weight).clone())
        layer.router.weight.data.zero_()  # gates ½ and ½
    found = measures(routing(subject_of(model), ["mxfp4"]), "mxfp4")
    assert abs(found["redundancy"]["value"] + 1) < 1e-6
    assert abs(found["mixing_removed"]["value"]) < 1e-6


# --- the result ------------------------------------------------------------------------------------------------------


def test_the_result_is_consistent_and_the_same_every_time():
    subject = subject_of(tiny_model("qwen3_moe"), prompts=4)
    names = ["mxfp4", "mxfp4@scale", "mxfp4@-scale", "mxfp4@~scale"]
    shares: list[float] = []
    before, state = subject.logits(torch.tensor([[5, 6, 7]]), torch.ones(1, 3)), torch.get_rng_state()
    result = routing(subject, names, samples=2, progress=shares.append)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(subject.logits(torch.tensor([[5, 6, 7]]), torch.ones(1, 3)), before)
    assert shares == sorted(shares) and shares[-1] == 1 and len(shares) == 3 * len(names)  # 8 texts, 3 at a time
    assert json.loads(json.dumps(result, allow_nan=False)) == json.loads(json.dumps(routing(subject, names, samples=2)))
    for t in names:
        for row in measures(result, t).values():
            assert row["n"] == len(row["values"]) == 4
            assert abs(sum(row["values"]) / 4 - row["value"]) < 1e-12 and row["low"] <= row["value"] <= row["high"]
            layers = [r[row["metric"]] for r in result["layers"] if r["treatment"] == t and row["metric"] in r]
            assert not layers or abs(sum(layers) / len(layers) - row["value"]) < 1e-12
        theory = {r["name"]: r for r in result["theory"] if r["treatment"] == t}
        assert theory["independent expert errors"]["measured"] == measures(result, t)["redundancy"]["value"]
        for name, field in (("top-k flips, drawn", "drawn_flip"), ("top-k flips, boundary pair", "predicted_flip")):
            rows = [r[field] for r in result["layers"] if r["treatment"] == t]
            assert abs(theory[name]["predicted"] - sum(rows) / 2) < 1e-6
            assert theory[name]["within"] == (theory[name]["low"] <= theory[name]["predicted"] <= theory[name]["high"])
        curve = next(c for c in result["curves"] if c.get("treatment") == t)
        tokens = result["settings"]["tokens"] * 2
        sizes = [len(part) for part in torch.arange(tokens).tensor_split(10)]
        whole = sum(s * n for s, n in zip(curve["series"]["measured"], sizes, strict=True)) / tokens
        assert abs(whole - measures(result, t)["topk_flip"]["value"]) < 1e-12
        assert curve["x"] == sorted(curve["x"])
    page = Page("t")
    sections(page, result)
    text = page.html()
    assert "Routing of the experts" in text and "of 4 treatments it is inside the interval for" in text
    assert all(t in text for t in names)


def test_one_prompt_has_figures_without_intervals():
    result = routing(subject_of(tiny_model("qwen3_moe"), prompts=1), ["mxfp4"])
    found = measures(result, "mxfp4")
    assert all(row["low"] is None and row["high"] is None and row["n"] == 1 for row in found.values())
    assert all(row["within"] is None for row in result["theory"])
    page = Page("t")
    sections(page, result)
    assert "one prompt gives no interval" in page.html()


def test_treatments_without_an_error_are_left_out_with_a_note():
    subject = subject_of(tiny_model("qwen3_moe"))
    result = routing(subject, ["bf16", "mxfp4@deadzone@forward", "mxfp4@backward"])
    assert result["settings"]["treatments"] == ["mxfp4@deadzone@forward"]
    assert result["notes"] == [
        f"{t} has no error in the forward pass and is left out." for t in ("bf16", "mxfp4@backward")
    ]
    with pytest.raises(ProbeError, match="no treatment has an error in the forward pass"):
        routing(subject, ["bf16"])


def test_models_that_route_nothing_are_one_clear_line():
    with pytest.raises(ProbeError, match="no routed experts, so there is nothing for the routing probe"):
        routing(subject_of(tiny_model("qwen3")), ["mxfp4"])
    model = tiny_model("mixtral")
    for layer in moe_layers(model):
        layer.router.top_k = 4
    with pytest.raises(ProbeError, match="sends every token to all 4 experts"):
        routing(subject_of(model), ["mxfp4"])

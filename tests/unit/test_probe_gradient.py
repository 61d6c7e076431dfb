"""The gradient probe on networks whose gradients, and on weights whose scales, are known."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from tiny_models import tiny_model
from torch import nn

from mxrl.decompose import error_stats
from mxrl.nn import convert
from mxrl.ops.layout import as_abk
from mxrl.probes.gradient import gradient, parameter_parts
from mxrl.probes.gradient_pass import prompt_groups, run_pass
from mxrl.probes.gradient_theory import block_deltas, scale_recipes, scale_sums
from mxrl.probes.subject import ProbeError, Subject
from mxrl.probes.treatments import Treatment
from mxrl.recipes import Recipe
from mxrl.report.page import Page
from mxrl.report.probe_gradient import sections
from mxrl.rl.chain import Problem
from mxrl.rl.policy import build_policy, char_tokenizer
from mxrl.rl.rollout import Rollout, left_pad
from mxrl.rl.tasks import get_task, load_task
from mxrl.scan import NonFiniteError

WIDTH, VOCAB = 64, 11


class Scripted(Subject):
    """Prompts and completions are given, not drawn: of differing lengths, the last completion empty."""

    PROMPTS = ((3, 4, 5), (6,), (7, 8), (9, 3))
    COMPLETIONS = ((5, 2), (3, 4, 6, 2), (8, 9, 2), (10, 2), (2,), (4, 4, 2), (7, 2), ())

    def rollout(self, *, samples=1, greedy=False, temperature=1.0):
        ids, mask = left_pad([list(p) for p in self.PROMPTS for _ in range(2)], 0, torch.device("cpu"))
        longest = max(map(len, self.COMPLETIONS))
        completion = torch.tensor([[*c, *[0] * (longest - len(c))] for c in self.COMPLETIONS])
        written = torch.tensor([[i < len(c) for i in range(longest)] for c in self.COMPLETIONS])
        none = torch.zeros(completion.shape)
        return Rollout(ids, mask, completion, written, none, none, completion)

    def texts(self, rollout):
        return [" ".join(map(str, row)) for row in rollout.completions()]


def subject_of(model, reward=None, **settings):
    convert(model.eval(), "bf16")
    problems = tuple(Problem("", "") for _ in Scripted.PROMPTS)
    return Scripted("test", model, None, "chain", problems, reward, 4, **settings)


class Block(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.q_proj.weight = nn.Parameter(weight)

    def forward(self, hidden_states):
        return (self.q_proj(hidden_states),)


class Stack(nn.Module):
    """Linear blocks one after another, without residuals and norms: what multiplies a signal is their product."""

    def __init__(self, weights):
        super().__init__()
        shape = dict(num_hidden_layers=len(weights), hidden_size=WIDTH)
        self.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(**shape))
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(map(Block, weights))
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, input_ids, attention_mask, use_cache=False, logits_to_keep=0):
        x = self.embed(input_ids)
        for layer in self.layers:
            (x,) = layer(x)
        return SimpleNamespace(logits=self.lm_head(x)[:, -logits_to_keep:])


def hadamard(n):
    return torch.ones(1, 1) if n == 1 else torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), hadamard(n // 2))


# Blocks of one magnitude v: the ceil rule gives all of them the scale 1 (times 1/32), and v/1 rounds to a neighbour, so
# that Q(W) = c·W exactly: 5 → 4 (a tie, to the even mantissa), 3.5 → 4 (likewise), 6 and 4 stay, 3.25 → 3, 5.5 → 6.
GAINS = {5.5: 12 / 11, 5.0: 4 / 5, 3.5: 8 / 7, 3.25: 12 / 13, 6.0: 1.0}
LOG2 = [math.log2(c) for c in GAINS.values()]


def stack(seed=0):
    torch.manual_seed(seed)
    return Stack([hadamard(WIDTH) * v / 32 for v in GAINS])


def series(result, name, treatment):
    (found,) = [c for c in result["curves"] if c["name"] == name]
    return found["series"][treatment]["mean"]


def measure(result, treatment, metric):
    (found,) = [m for m in result["measures"] if (m["treatment"], m["metric"]) == (treatment, metric)]
    return found


def test_gains_of_a_stack_multiply_on_the_way_back():
    """dL/dh_d comes through blocks d … L − 1; dL/dW_l through those above l, as its other factor is h_l itself."""
    result = gradient(subject_of(stack()), ["mxfp4+w4a16@backward"], groups=2, draws=8, seeds=2)
    name = result["settings"]["treatments"][0]
    back = [math.fsum(LOG2[d:]) for d in range(len(LOG2) + 1)]
    assert series(result, "dx_log2_ratio", name) == pytest.approx(back, abs=2e-6)
    assert series(result, "grad_log2_ratio", name) == pytest.approx(back[1:], abs=2e-6)
    assert max(series(result, "grad_cosine", name)) < 1e-12  # each block's gradient is only longer or shorter
    assert measure(result, name, "dx_growth")["value"] == pytest.approx(math.fsum(LOG2), abs=2e-6)
    assert measure(result, name, "dx_at_output")["value"] == 0
    step = math.sqrt(math.fsum(x * x for x in LOG2) / len(LOG2))
    assert measure(result, name, "dx_step")["value"] == pytest.approx(step, abs=2e-6)
    expected = math.fsum(map(abs, back[1:])) / len(LOG2)
    assert measure(result, name, "grad_log2_ratio")["value"] == pytest.approx(expected, abs=2e-6)
    assert series(result, "stream_error", name) == [0.0] * (len(LOG2) + 1)  # the forward pass is exact


def test_gains_of_a_stack_multiply_on_the_way_forward():
    """h_d has come through blocks 0 … d − 1; h_q = c·h, so its error is |c − 1|."""
    result = gradient(subject_of(stack()), ["mxfp4+w4a16@forward"], groups=2, draws=8, seeds=2)
    name = result["settings"]["treatments"][0]
    there = [math.fsum(LOG2[:d]) for d in range(len(LOG2) + 1)]
    assert series(result, "stream_log2_ratio", name) == pytest.approx(there, abs=2e-6)
    assert series(result, "stream_error", name) == pytest.approx([abs(2**g - 1) for g in there], abs=2e-6)
    assert measure(result, name, "stream_log2_ratio")["value"] == pytest.approx(math.fsum(LOG2), abs=2e-6)
    # One δ = log2(6/v) a layer: nothing varies, though the gains multiply all the same.
    assert measure(result, "mxfp4", "sum_delta_sd")["value"] == pytest.approx(0, abs=1e-12)
    middles = [row["delta_mean"] for row in result["layers"] if row["kind"] == "delta"]
    assert middles == pytest.approx([math.log2(6 / v) for v in GAINS], abs=1e-6)


def test_the_gradient_is_that_of_the_loss_written_out():
    """Each completion by itself, unpadded, in float64: Σ −log p over the group's tokens, divided by their number."""
    model = build_policy("dense", size="tiny").double()
    back = {}
    for batch in (16, 3):  # one batch a group, or two
        subject = subject_of(model, batch=batch)
        written = subject.rollout()
        groups = prompt_groups(subject, written, samples=2, groups=2, loss="nll")
        # the longest prompt and completion of each batch, no more: 3 + 4, 2 + 3; batches of three: 3 + 4, 1 + 2, …
        assert groups[0][0].ids.shape[1] == 7 and groups[1][0].ids.shape[1] == 5
        assert batch == 16 or groups[0][1].ids.shape == (1, 3)
        for g, group in enumerate(groups):
            assert len(group) == (1 if batch == 16 else 2)
            loss, tokens = torch.zeros((), dtype=torch.float64), 0
            for i in range(4 * g, 4 * g + 4):
                prompt, completion = Scripted.PROMPTS[i // 2], Scripted.COMPLETIONS[i]
                if completion:
                    logits = model(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
                    loss = loss - logits.log_softmax(-1)[range(len(completion)), completion].sum()
                tokens += len(completion)
            expected = torch.autograd.grad(loss / tokens, list(model.parameters()))
            found = run_pass(subject, group)
            for a, b in zip(found.gradients, expected, strict=True):
                # logits are taken to float32 for the loss: 1e-7 of a gradient's size
                assert (a - b).norm() <= 2e-6 * b.norm()
            assert [h.shape[0] for h in found.stream[0]] == [int(group[0].mask.sum())] * 3
            assert all(p.grad is None for p in model.parameters())
            back[batch, g] = found.dx
    for g in range(2):
        assert torch.allclose(back[16, g], back[3, g], rtol=4e-6, atol=0)  # ‖·‖²: twice the 2e-6 from above


def test_grpo_weights_are_advantages():
    rewards = [1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0]
    subject = subject_of(build_policy("dense", size="tiny"), lambda texts, answers: rewards)
    groups = prompt_groups(subject, subject.rollout(), samples=2, groups=4, loss="grpo")
    one = 0.5 / (math.sqrt(0.5) + 1e-4)  # (r − mean) / (sd + 1e-4): the sd of {0, 1} is √½
    assert len(groups) == 2  # prompts 1 and 2 have rewards that don't vary
    assert groups[0][0].weight.tolist() == pytest.approx([one / 6, -one / 6])  # 2 + 4 tokens
    assert groups[1][0].weight.tolist() == pytest.approx([-one / 2, one / 2])  # 2 + 0 tokens
    result = gradient(subject, ["mxfp4"], loss="grpo", groups=4, draws=8, seeds=2, split_passes=False)
    assert result["settings"]["groups"] == measure(result, "mxfp4", "grad_cosine")["n"] == 2
    assert "2 of 4 groups of prompts gave no gradient (loss grpo)." in result["notes"]


@pytest.mark.parametrize("recipe", ["mxfp4", "mxfp4+mbs", "mxfp4:floor", "mxfp4+mbs:search16+macro=64"])
@pytest.mark.parametrize(("shape", "dim"), [((6, 144), -1), ((3, 80, 10), -2), ((2, 5, 256), -1)])
def test_drawn_deltas_are_the_statistics_own(recipe, shape, dim):
    """Over all blocks of a weight, ragged ones too, the δ are those that `error_stats` sums."""
    recipe = Recipe.parse(recipe)
    w = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 0.02
    w.movedim(dim, -1)[0, ..., :32] = 0  # zero blocks
    w_ABK = as_abk(w, dim % w.dim())
    blocks = w_ABK.shape[0] * w_ABK.shape[1] * -(-w_ABK.shape[2] // 32)
    found = block_deltas(w_ABK, torch.arange(blocks), recipe)
    expected = error_stats(w, recipe, dim=dim)
    known = found[~found.isnan()]
    assert expected.zero_blocks and known.numel() == expected.delta_count == blocks - expected.zero_blocks
    assert float(known.sum()) == pytest.approx(expected.delta_sum, rel=1e-12)
    assert float(known.square().sum()) == pytest.approx(expected.delta_sq_sum, rel=1e-12)
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(2))
    assert torch.equal(block_deltas(w_ABK, order, recipe).nan_to_num(9), found[order].nan_to_num(9))


def with_deltas(layers, levels):
    """A policy of `layers` blocks in whose weights δ takes the values (i + ½) / levels equally often, shuffled."""
    model = build_policy("dense", size="tiny", num_hidden_layers=layers)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if "proj" not in name:
            continue
        blocks = parameter.numel() // 32
        delta = (torch.arange(blocks) % levels + 0.5) / levels
        delta = delta[torch.randperm(blocks, generator=generator)].double()
        exponent = torch.randint(-8, -4, (blocks,), generator=generator)
        # s = 2^ceil(log2(m/6)), so m = 6 · 2^(k − δ) has s = 2^k, and log2(s / (m/6)) = δ
        maxima = 6 * torch.exp2(exponent - delta)
        values = maxima.unsqueeze(1) * (torch.rand(blocks, 32, generator=generator, dtype=torch.float64) * 1.9 - 0.95)
        values[:, 7] = maxima
        parameter.data = values.view(parameter.shape).float()
    return model


@pytest.mark.parametrize(("layers", "levels"), [(12, 16), (3, 2)])
def test_summed_deltas_have_the_known_spread(layers, levels):
    """Var of `levels` equally spaced values is (1 − levels⁻²)/12 (16: nearly uniform); layers are independent."""
    subject = subject_of(with_deltas(layers, levels))
    found = scale_sums(subject, Recipe.parse("mxfp4"), draws=2048, seeds=8)
    expected = math.sqrt(layers * (1 - levels**-2) / 12)
    error = 4 * expected / math.sqrt(2 * 2048 * 8)  # four standard errors of a normal's sd
    assert found.sigma.value == pytest.approx(expected, abs=error)
    assert found.independent == pytest.approx(expected, abs=error)
    assert found.uniform == math.sqrt(layers / 12)
    assert found.means == pytest.approx([0.5] * layers, abs=4 * math.sqrt(1 / 12 / 2048 / 8))
    edges, shares, normal = found.histogram()
    if layers == 12:  # nearly normal, but δ's steps of 1/16 fall unevenly into bins of .2: 3 or 4 of them
        assert sum(abs(a - b) for a, b in zip(shares, normal, strict=True)) < 0.4
    assert edges[0] == -4 * found.uniform and sum(shares) == pytest.approx(1) == pytest.approx(sum(normal), abs=1e-4)


def test_draws_skip_blocks_without_a_scale_and_fail_without_any():
    model = with_deltas(2, 4)
    weight = model.model.layers[1].mlp.up_proj.weight
    weight.data[:48] = 0
    found = scale_sums(subject_of(model), Recipe.parse("mxfp4"), draws=512, seeds=2)
    assert 0 < int(found.sums.isnan().sum()) < 512 and math.isfinite(found.sigma.value)
    for parameter in model.model.layers[1].parameters():
        parameter.data.zero_()
    with pytest.raises(ProbeError, match=r"nearly all blocks drawn are zero or clamped, so mxfp4 has no δ"):
        scale_sums(subject_of(model), Recipe.parse("mxfp4"), draws=64, seeds=2)


def test_scale_recipes_ignores_what_changes_no_scale():
    given = ["mxfp4", "mxfp4+of", "mxfp4@scale", "mxfp4+mbs+of", "nvfp4", "mxfp4+w4a16", "mxfp4:even@forward"]
    assert list(map(str, scale_recipes(list(map(Treatment.parse, given))))) == ["mxfp4", "mxfp4+mbs", "mxfp4:even"]


def chain_subject(kind):
    model = build_policy(kind, size="tiny")
    convert(model.eval(), "bf16")
    problems = tuple(load_task("chain", seed=0, n=4, split="test"))
    return Subject("tiny", model, char_tokenizer(), "chain", problems, get_task("chain").reward, 6)


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_the_whole_probe(kind):
    subject = chain_subject(kind)
    before = [p.detach().clone() for p in subject.model.parameters()]
    shares = []
    settings = dict(groups=3, draws=32, seeds=2)
    given = ["bf16", "mxfp4", "mxfp4+of", "mxfp4@scale", "mxfp4@~scale", "mxfp4@-scale"]
    result = gradient(subject, given, **settings, progress=shares.append)
    assert json.dumps(result, allow_nan=False) == json.dumps(gradient(subject, given, **settings), allow_nan=False)
    assert shares == sorted(shares) and shares[-1] == 1
    assert all(torch.equal(a, b) for a, b in zip(before, subject.model.parameters(), strict=True))
    assert (result["probe"], result["schema"]) == ("gradient", 1)

    names = result["settings"]["treatments"]
    both = [n for n in names if not n.endswith("ward")]
    assert both == given
    assert {n for n in names if n not in both} == {
        f"{n}@{p}" for n in ("mxfp4", "mxfp4+of", "mxfp4@scale") for p in ("forward", "backward")
    }
    primary = [measure(result, name, "grad_cosine") for name in names]
    assert all(m["n"] == len(m["values"]) == 3 and m["low"] <= m["value"] <= m["high"] for m in primary)
    for metric in ("grad_cosine", "grad_log2_ratio", "dx_step", "stream_error"):
        assert measure(result, "bf16", metric)["value"] == pytest.approx(0, abs=1e-15)  # the same numbers twice
        assert measure(result, "mxfp4", metric)["value"] > 0
        assert measure(result, "mxfp4", metric)["value"] > measure(result, "mxfp4+of", metric)["value"]
    assert measure(result, "mxfp4@backward", "stream_error")["value"] == 0
    for metric in ("stream_error", "stream_log2_ratio"):  # the forward pass is the same, whatever the backward pass
        assert measure(result, "mxfp4@forward", metric)["values"] == measure(result, "mxfp4", metric)["values"]
    difference = measure(result, "mxfp4@scale", "grad_cosine_minus_noise")["values"]
    own, noise = (measure(result, f"mxfp4@{x}scale", "grad_cosine")["values"] for x in ("", "~"))
    assert difference == [a - b for a, b in zip(own, noise, strict=True)]

    experts = {"experts.gate_up", "experts.down"} if kind == "moe" else {"gate", "up", "down"}
    assert {k for _, k in parameter_parts(subject)} == {"block", "q", "k", "v", "o"} | experts
    rows = [r for r in result["layers"] if r["treatment"] == "mxfp4" and r["kind"] != "delta"]
    assert {(r["layer"], r["kind"]) for r in rows} == set(parameter_parts(subject))
    assert all(0 <= r["grad_cosine"] <= 2 for r in rows)

    theory = {(r["name"], r["treatment"]): r for r in result["theory"]}
    assert theory["sum_delta_sd", "mxfp4"]["predicted"] == math.sqrt(2 / 12)
    assert theory["dx_step", "mxfp4@backward"]["predicted"] == math.sqrt(1 / 12)
    assert theory["dx_growth", "mxfp4"]["predicted"] == math.sqrt(2 / 12)
    for name, metric in (("dx_step", "dx_step"), ("layernorm_reset", "stream_log2_ratio")):
        row, own = theory[name, "mxfp4"], measure(result, "mxfp4", metric)
        assert (row["measured"], row["low"], row["high"]) == (own["value"], own["low"], own["high"])
        assert row["within"] == (row["low"] <= row["predicted"] <= row["high"])
    assert ("layernorm_reset", "mxfp4@backward") not in theory and ("dx_step", "mxfp4@forward") not in theory

    page = Page("test")
    sections(page, result)
    html = page.html()
    assert "√(2/12)" in html and "[0.18, 5.6]" in html and "nan" not in html.lower().replace("nance", "")


@pytest.mark.parametrize(
    ("family", "kinds"), [("qwen2", {"gate", "up", "down"}), ("gpt_oss", {"experts.gate_up", "experts.down"})]
)
def test_other_families(family, kinds):
    """Biases and tied embeddings; experts that are stored transposed, blocked along their axis −2."""
    subject = subject_of(tiny_model(family))
    result = gradient(subject, ["mxfp4", "nvfp4"], groups=2, draws=16, seeds=2)
    assert {k for _, k in parameter_parts(subject)} == {"block", "q", "k", "v", "o"} | kinds
    for name in result["settings"]["treatments"]:
        assert (
            measure(result, name, "grad_cosine")["low"] is not None
            and measure(result, name, "grad_cosine")["value"] > 0
        )
    assert [m["treatment"] for m in result["measures"] if m["metric"] == "sum_delta_sd"] == ["mxfp4"]


def test_a_block_holds_its_router_and_norms():
    subject = chain_subject("moe")
    names = [name for name, _ in subject.model.named_parameters()]
    parts = parameter_parts(subject)
    assert {names[i] for i in parts[1, "block"]} == {n for n in names if n.startswith("model.layers.1.")}
    assert [names[i] for i in parts[1, "experts.gate_up"]] == ["model.layers.1.mlp.experts.gate_up_proj"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(loss="ppo"), "loss 'ppo' is unknown; possible: nll, grpo"),
        (dict(loss="grpo", samples=1), "for grpo 2 samples"),
        (dict(groups=0), "groups=0"),
        (dict(loss="grpo"), "no prompt has completions of differing reward"),
    ],
)
def test_bad_settings_are_one_line(settings, message):
    subject = subject_of(build_policy("dense", size="tiny"), lambda texts, answers: [1.0] * len(texts))
    with pytest.raises(ProbeError) as error:
        gradient(subject, ["mxfp4"], **settings)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_one_block_is_too_few():
    with pytest.raises(ProbeError, match="has 1 decoder blocks; the gradient probe takes at least 2"):
        gradient(subject_of(build_policy("dense", size="tiny", num_hidden_layers=1)), ["mxfp4"])


def test_a_gradient_that_is_not_finite_is_named():
    model = build_policy("dense", size="tiny")
    model.model.layers[1].mlp.up_proj.weight.register_hook(lambda g: g.index_fill(0, torch.tensor([2]), math.inf))
    with pytest.raises(NonFiniteError, match=r"the gradient of 'model\.layers\.1\.mlp\.up_proj\.weight' in test has"):
        gradient(subject_of(model), ["mxfp4"], groups=1)

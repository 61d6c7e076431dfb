"""Sampling that records what it sampled from, checked against a full forward pass and against plain arithmetic."""

import pytest
import torch
from transformers import GenerationConfig

from mxrl.rl.policy import build_policy
from mxrl.rl.rollout import (
    SamplingError,
    decode_gap,
    refuse_biased_sampling,
    sample,
    score,
    without_cudnn_attention,
)

PAD, EOS = 0, 2
PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12], [13, 14, 15, 16]]
# Cached decoding and a full pass sum in another order: float32 noise of a 2-layer model, not a tolerance on the method.
NOISE = 2e-6


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return build_policy("dense", size="tiny", seed=3).train()


def draw(model, prompts=PROMPTS, **options):
    options = {"max_new_tokens": 12, "eos_token_id": EOS, "pad_token_id": PAD, "seed": 0, **options}
    return sample(model, prompts, **options)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.5])
@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("engine", ["slots", "generate"])
def test_recorded_logps_equal_a_full_pass(model, temperature, greedy, engine):
    got = draw(model, PROMPTS * 4, temperature=temperature, greedy=greedy, engine=engine)
    full = score(model, *got.inputs(), got.completion_ids.shape[1], temperature=temperature, chunk=5)
    mask = got.completion_mask
    assert 0 < got.tokens == int(mask.sum())
    torch.testing.assert_close(got.logps[mask], full.logps[mask], rtol=0, atol=NOISE)
    torch.testing.assert_close(got.entropies[mask], full.entropies[mask], rtol=0, atol=NOISE)
    assert torch.equal(got.argmax[mask], full.argmax[mask])
    assert got.logps[~mask].abs().sum() == 0
    if greedy:
        assert torch.equal(got.argmax[mask], got.completion_ids[mask])


def test_scoring_one_token_at_a_time_by_hand(model):
    """The oracle without batches, padding or cache: one forward pass for each prefix."""
    got = draw(model, temperature=0.8)
    model.eval()
    for row, prompt in enumerate(PROMPTS):
        tokens = got.completions()[row]
        for i, token in enumerate(tokens):
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([prompt + tokens[:i]])).logits[0, -1]
            expected = (logits / 0.8).log_softmax(-1)[token]
            torch.testing.assert_close(got.logps[row, i], expected, rtol=0, atol=NOISE)
        assert tokens.count(EOS) == (tokens[-1] == EOS)
    model.train()


def test_completions_end_with_the_first_eos(model):
    got = draw(model, PROMPTS * 20, max_new_tokens=40)
    lists = got.completions()
    assert any(t[-1] == EOS for t in lists) and len({len(t) for t in lists}) > 1
    assert all(EOS not in t[:-1] for t in lists)
    assert all(t[-1] == EOS or len(t) == 40 for t in lists)
    assert [len(t) for t in lists] == [len(t) for t in got.logp_lists()]
    assert got.completion_ids[~got.completion_mask].eq(PAD).all()


def test_every_listed_eos_ends_a_completion(model):
    got = draw(model, PROMPTS * 10, max_new_tokens=30, eos_token_id=[EOS, 4, 5])
    assert all(not {EOS, 4, 5} & set(t[:-1]) for t in got.completions())


def test_the_draw_is_a_function_of_the_seed_alone(model):
    state = torch.get_rng_state()
    first = draw(model, seed=7)
    assert torch.equal(state, torch.get_rng_state())
    torch.rand(3)
    again, other = draw(model, seed=7), draw(model, seed=8)
    assert torch.equal(first.completion_ids, again.completion_ids) and torch.equal(first.logps, again.logps)
    assert first.completions() != other.completions()


def test_batches_give_one_rollout(model):
    got = draw(model, PROMPTS * 3, batch_size=2)
    assert got.completion_ids.shape[0] == 9 and got.prompt_ids.shape == (9, 5)
    full = score(model, *got.inputs(), got.completion_ids.shape[1])
    mask = got.completion_mask
    torch.testing.assert_close(got.logps[mask], full.logps[mask], rtol=0, atol=NOISE)


@pytest.mark.parametrize("engine", ["slots", "generate"])
def test_a_models_own_sampling_defaults_stay_out(model, engine):
    """Qwen's generation_config has top_k = 20, top_p = .8; top_k = 1 would make every draw the argmax."""
    own = model.generation_config
    model.generation_config = GenerationConfig(top_k=1, top_p=0.1, min_p=0.9, repetition_penalty=5.0, do_sample=True)
    try:
        got = draw(model, PROMPTS * 20, engine=engine)
        assert (got.argmax != got.completion_ids)[got.completion_mask].any()
        full = score(model, *got.inputs(), got.completion_ids.shape[1])
        torch.testing.assert_close(got.logps[got.completion_mask], full.logps[got.completion_mask], rtol=0, atol=NOISE)
        assert model.generation_config.top_k == 1
    finally:
        model.generation_config = own


@pytest.mark.parametrize("engine", ["slots", "generate"])
def test_tokens_come_from_the_recorded_distribution(model, engine):
    """4000 first tokens after one prompt against the exact probabilities (seeded; 4 standard errors)."""
    n = 4000
    got = draw(model, [PROMPTS[0]] * n, max_new_tokens=1, temperature=1.3, engine=engine)
    model.eval()
    with torch.no_grad():
        p = (model(input_ids=torch.tensor([PROMPTS[0]])).logits[0, -1] / 1.3).softmax(-1)
    model.train()
    share = torch.bincount(got.completion_ids[:, 0], minlength=p.numel()) / n
    assert ((share - p).abs() <= 4 * (p * (1 - p) / n).sqrt()).all()


def test_mode_and_gradients_are_left_as_they_were(model):
    model.model.layers[1].eval()
    draw(model)
    assert model.training and not model.model.layers[1].training
    model.train()


def test_decode_gap(model):
    got = draw(model, PROMPTS * 4)
    gap = decode_gap(model, got)
    assert gap.tokens == got.tokens and gap.flipped == 0 and gap.stats.max_abs < NOISE
    moved = type(got)(**{**vars(got), "argmax": got.argmax + got.completion_mask, "logps": got.logps - 0.5})
    gap = decode_gap(model, moved)
    assert gap.flipped == 1 and gap.metrics()["decode/mean_abs"] == pytest.approx(0.5, abs=NOISE)


@pytest.mark.parametrize("name, value", [("top_p", 0.9), ("top_k", 20), ("min_p", 0.05), ("repetition_penalty", 1.1)])
def test_biased_sampling_is_refused_in_one_line(name, value):
    with pytest.raises(SamplingError, match=f"{name}={value}.*biased") as err:
        refuse_biased_sampling({"top_p": 1.0, "top_k": 0, name: value}, "GRPOConfig")
    assert "\n" not in str(err.value)
    refuse_biased_sampling({"top_p": 1.0, "top_k": 0, "min_p": None, "temperature": 0.7})


@pytest.mark.parametrize("options", [{"prompts": []}, {"prompts": [[1], []]}, {"temperature": 0.0}, {"batch_size": -3}])
def test_calls_that_make_no_sense(model, options):
    with pytest.raises(ValueError, match="sample:"):
        draw(model, **options)


def test_cudnn_attention_is_off_inside_and_as_before_afterwards() -> None:
    for before in (True, False):
        torch.backends.cuda.enable_cudnn_sdp(before)
        try:
            with pytest.raises(KeyError), without_cudnn_attention():
                assert not torch.backends.cuda.cudnn_sdp_enabled()
                raise KeyError
            assert torch.backends.cuda.cudnn_sdp_enabled() is before
        finally:
            torch.backends.cuda.enable_cudnn_sdp(True)

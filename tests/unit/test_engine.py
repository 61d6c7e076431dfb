"""The decoding engine against transformers' generate, a full forward pass, and itself under other schedules."""

import pytest
import torch
from tiny_models import FAMILIES, tiny_model
from transformers import DynamicCache, MistralConfig, MistralForCausalLM

import mxrl
from mxrl.nn import rollout_weights
from mxrl.rl import engine, engine_slots
from mxrl.rl.engine_slots import EngineError, unsupported
from mxrl.rl.policy import build_policy
from mxrl.rl.rollout import decode_gap, inference, sample, score

PAD, EOS = 0, 2
PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12], [13], [14, 15, 16, 17, 18, 19, 20, 21, 22], [5, 6, 7], [23, 24], [25, 26, 27],
           [28], [29, 30, 31, 32], [33, 34, 35, 36, 37, 38]]  # fmt: skip
# GEMMs of another batch shape, and attention in another order: float32 noise of a 2-layer model, logits of order 1.
NOISE = 1e-5
SERVED = [family for family in FAMILIES if family != "gpt_oss"]  # which has sliding windows


def draw(model, prompts=PROMPTS, **options):
    options = {"max_new_tokens": 12, "eos_token_id": EOS, "pad_token_id": PAD, "seed": 0, "engine": "slots", **options}
    return sample(model, prompts, **options)


def assert_same_draw(a, b):
    assert torch.equal(a.completion_ids, b.completion_ids) and torch.equal(a.completion_mask, b.completion_mask)
    assert torch.equal(a.argmax, b.argmax)
    torch.testing.assert_close(a.logps, b.logps, rtol=0, atol=NOISE)
    torch.testing.assert_close(a.entropies, b.entropies, rtol=0, atol=NOISE)


@pytest.fixture(scope="module")
def model():
    return build_policy("dense", size="tiny", seed=3, vocab_size=50).train()


@pytest.mark.parametrize("family", SERVED)
def test_greedy_equals_generate(family):
    model = tiny_model(family)
    assert_same_draw(draw(model, greedy=True), draw(model, greedy=True, engine="generate"))


@pytest.mark.parametrize("recipe", ["mxfp4", "mxfp4+mbs+of"])
@pytest.mark.parametrize("family", SERVED)
def test_greedy_equals_generate_when_converted(family, recipe):
    """A 4-bit activation that the last bit of a sum moves across a threshold may part one row in ten, not more.

    (Where one does here, it is generate that a full pass disagrees with, as often as not.)
    """
    model = tiny_model(family)
    mxrl.convert(model, recipe)
    ours, theirs = draw(model, greedy=True), draw(model, greedy=True, engine="generate")
    pairs = list(zip(ours.completions(), theirs.completions(), strict=True))
    assert sum(a == b for a, b in pairs) >= 9
    close = (ours.logps - theirs.logps).abs() < NOISE
    assert (close.all(1)).sum() >= 9


@pytest.mark.parametrize("recipe", [None, "mxfp4+of"])
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_logps_equal_a_full_pass(kind, recipe):
    model = build_policy(kind, size="tiny", seed=3, vocab_size=50)
    if recipe is not None:
        mxrl.convert(model, recipe)
    got = draw(model, PROMPTS * 2, temperature=0.8)
    full = score(model, *got.inputs(), got.completion_ids.shape[1], temperature=0.8)
    mask = got.completion_mask
    gap = decode_gap(model, got, temperature=0.8)
    if recipe is None:
        torch.testing.assert_close(got.logps[mask], full.logps[mask], rtol=0, atol=NOISE)
        torch.testing.assert_close(got.entropies[mask], full.entropies[mask], rtol=0, atol=NOISE)
        assert torch.equal(got.argmax[mask], full.argmax[mask])
        assert gap.flipped == 0 and gap.stats.max_abs < NOISE
    else:  # a threshold may be crossed, after which a row's tokens differ a little
        assert ((got.logps - full.logps)[mask].abs() < NOISE).float().mean() > 0.8
        assert gap.flipped < 0.05 and gap.stats.mean_abs < 0.01


@pytest.mark.parametrize("slots", [1, 3, 7])
@pytest.mark.parametrize("greedy", [False, True])
def test_the_schedule_decides_nothing(model, slots, greedy):
    """Ten ragged prompts in few slots, refilled as rows end, are what ten slots draw."""
    whole = draw(model, greedy=greedy, max_new_tokens=20)
    assert len({len(row) for row in whole.completions()}) > 1
    assert_same_draw(draw(model, greedy=greedy, max_new_tokens=20, batch_size=slots), whole)


@pytest.mark.parametrize("every", [2, 5, 64])
def test_nor_does_how_often_the_host_looks(model, monkeypatch, every):
    whole = draw(model, max_new_tokens=20)
    monkeypatch.setitem(engine.LOOK_EVERY, "cpu", every)
    assert_same_draw(draw(model, max_new_tokens=20, batch_size=4), whole)


def test_slots_that_are_dropped(monkeypatch):
    """Without a graph, a step is of the rows that go on; the others' caches go with them."""
    model = tiny_model("qwen3")  # whose attention matters more than a fresh policy's
    options = {"eos_token_id": list(range(3, 50, 4)), "max_new_tokens": 25}
    sizes = []
    keep = engine_slots.SlotCache.keep

    def counting(self, rows):
        sizes.append(len(rows))
        keep(self, rows)

    monkeypatch.setattr(engine_slots.SlotCache, "keep", counting)
    dropped = draw(model, **options)
    assert len(sizes) > 1 and sizes == sorted(sizes, reverse=True)
    monkeypatch.setattr(engine.Engine, "shrink", lambda self: False)
    assert_same_draw(draw(model, **options), dropped)


def test_flags_that_come_late(model, monkeypatch):
    """As on a GPU, where the host knows a look's flags after it launched the next steps: nothing else may change."""
    whole = draw(model, max_new_tokens=20)
    known = []

    def look(self):
        known.append((self.looked, self.state.active.clone()))
        number, flags = known.pop(0) if len(known) > 1 else (-1, torch.ones(self.slots, dtype=torch.bool))
        self.looked += 1
        ended = {slot for slot, issued in self.issued.items() if issued >= self.max_new_tokens}
        ended |= self.ended(number, flags)
        self.book(ended)

    monkeypatch.setattr(engine.Engine, "look", look)
    monkeypatch.setattr(engine.Engine, "shrink", lambda self: False)
    monkeypatch.setitem(engine.LOOK_EVERY, "cpu", 3)
    assert_same_draw(draw(model, max_new_tokens=20, batch_size=4), whole)


def test_passes_of_a_prefill(model, monkeypatch):
    """Prompts of one prefill are cut into several passes, longest apart, and equal ones are computed once."""
    whole = draw(model)
    passes = []

    def body(self, *args, input_ids, **kwargs):
        passes.append(input_ids.tolist())
        return forward(self, *args, input_ids=input_ids, **kwargs)

    decoder = type(model.model)
    forward = decoder.forward
    monkeypatch.setattr(decoder, "forward", body)
    monkeypatch.setattr(engine, "PREFILL_TOKENS", 6)
    assert_same_draw(draw(model), whole)
    prefilled = [row for batch in passes if len(batch) < 10 for row in batch if len(batch[0]) > 1 or row[0] in (23,)]
    rows = sorted([token for token in row if token != PAD] for row in prefilled)
    assert rows == sorted([5, 6] if p == [5, 6, 7] else p[:-1] for p in PROMPTS[:4] + PROMPTS[5:] if len(p) > 1)
    assert all(len(batch) * len(batch[0]) <= 8 for batch in passes if len(batch) < 10)


def test_prompts_of_one_token(model):
    got = draw(model, [[5], [6], [5]], greedy=True)
    assert_same_draw(got, draw(model, [[5], [6], [5]], greedy=True, engine="generate"))


def test_one_new_token(model):
    got = draw(model, max_new_tokens=1, batch_size=3)
    assert got.completion_ids.shape == (10, 1) and got.completion_mask.all()


def test_completions_end_with_the_first_eos(model):
    got = draw(model, PROMPTS * 5, max_new_tokens=30, batch_size=8, eos_token_id=[EOS, 4, 9])
    lists = got.completions()
    ends = {EOS, 4, 9}
    assert any(len(t) == 1 for t in lists) and any(len(t) == 30 for t in lists)
    assert all(not ends & set(t[:-1]) and (t[-1] in ends or len(t) == 30) for t in lists)
    assert got.completion_ids[~got.completion_mask].eq(PAD).all() and got.completion_mask[:, -1].any()
    assert not got.logps[~got.completion_mask].any() and not got.argmax[~got.completion_mask].any()


def test_every_row_ends_at_once(model):
    got = draw(model, greedy=True, eos_token_id=list(range(50)), batch_size=3)
    assert got.completion_ids.shape == (10, 1) and got.completion_mask.all()


def test_the_draw_is_a_function_of_the_seed(model):
    state = torch.get_rng_state()
    first, again, other = draw(model, seed=7), draw(model, seed=7), draw(model, seed=8)
    assert torch.equal(state, torch.get_rng_state())
    assert_same_draw(first, again)
    assert first.completions() != other.completions()
    assert first.completions()[0] != first.completions()[4]  # the same prompt in another row
    torch.manual_seed(3)
    a, b = draw(model, seed=None), draw(model, seed=None)
    torch.manual_seed(3)
    assert_same_draw(draw(model, seed=None), a)
    assert a.completions() != b.completions()


def test_more_prompts_leave_the_first_ones_as_they_are(model):
    few, many = draw(model, PROMPTS[:4], max_new_tokens=8), draw(model, PROMPTS, max_new_tokens=8)
    assert few.completions() == many.completions()[:4]


@pytest.mark.parametrize("engine", ["slots", "generate"])
@pytest.mark.parametrize("greedy", [False, True])
def test_several_calls_draw_the_rows_of_one(model, engine, greedy):
    """As several processes do: one seed, and first_row the number of rows before."""
    options = {"engine": engine, "greedy": greedy, "max_new_tokens": 20}
    whole = draw(model, **options).completions()
    assert [draw(model, PROMPTS[i:j], first_row=i, **options).completions() for i, j in ((0, 3), (3, 4), (4, 10))] == [
        whole[:3], whole[3:4], whole[4:],
    ]  # fmt: skip
    assert (draw(model, PROMPTS[4:], **options).completions() == whole[4:]) == greedy
    with pytest.raises(ValueError, match="first_row=-1 must be at least 0"):
        draw(model, first_row=-1, **options)


@pytest.mark.parametrize("size", [None, 3])
def test_generate_draws_by_the_same_rule(model, size):
    """One definition of a draw, so that what decodes it, and how many beside it, decides nothing."""
    ours = draw(model, temperature=1.2, max_new_tokens=20)
    theirs = draw(model, temperature=1.2, max_new_tokens=20, engine="generate", batch_size=size)
    assert len({len(row) for row in ours.completions()}) > 1 and (ours.argmax != ours.completion_ids).any()
    assert_same_draw(ours, theirs)


def test_rollout_weights_and_autocast(model):
    converted = build_policy("dense", size="tiny", seed=3, vocab_size=50)
    mxrl.convert(converted, "mxfp4+mbs")
    plain = draw(converted, greedy=True)
    with rollout_weights(converted):
        assert_same_draw(draw(converted, greedy=True), plain)  # the same sums in the same order
    with torch.autocast("cpu", dtype=torch.bfloat16), rollout_weights(converted, dtype=torch.bfloat16):
        got = draw(converted, temperature=1.3)
        full = score(converted, *got.inputs(), got.completion_ids.shape[1], temperature=1.3)
    # bf16 logits of order 1, rounded at 2^-8, after two quantized layers: the same policy, not the same bits
    assert (got.logps - full.logps)[got.completion_mask].abs().mean() < 0.05


def test_lora():
    from peft import LoraConfig, get_peft_model

    base = tiny_model("qwen2")
    mxrl.convert(base, "mxfp4")
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    ours, theirs = draw(model, greedy=True).completions(), draw(model, greedy=True, engine="generate").completions()
    assert sum(a == b for a, b in zip(ours, theirs, strict=True)) >= 9
    with model.disable_adapter():
        assert draw(model, greedy=True).completions() != ours


def test_everything_is_left_as_it_was(model):
    implementation = model.config._attn_implementation
    model.model.layers[1].eval()
    draw(model)
    assert model.training and not model.model.layers[1].training
    model.train()
    assert model.config._attn_implementation == implementation and engine_slots._current is None
    with inference(model):
        cache = DynamicCache(config=model.config)
        assert model(torch.tensor([PROMPTS[0]]), past_key_values=cache).past_key_values.get_seq_length() == 3


def test_an_error_inside_leaves_everything_as_it_was(model, monkeypatch):
    implementation = model.config._attn_implementation
    monkeypatch.setattr(engine.sample, "draw", lambda *a: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        draw(model)
    assert model.training and model.config._attn_implementation == implementation and engine_slots._current is None


def sliding():
    config = MistralConfig(
        vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, sliding_window=8, pad_token_id=0,
    )  # fmt: skip
    return MistralForCausalLM(config).eval()


def test_models_that_the_engine_does_not_take():
    model = tiny_model("gpt_oss")
    assert "sliding_attention" in unsupported(model)
    with pytest.raises(EngineError, match=r"engine='slots' can't decode.*sliding_attention.*engine='generate'") as err:
        draw(model)
    assert "\n" not in str(err.value)
    assert draw(model, engine="auto", greedy=True).tokens > 0
    assert "sliding window" in unsupported(sliding())
    assert "no transformers model" in unsupported(torch.nn.Linear(2, 2))
    long = build_policy(
        "dense", size="tiny", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    )
    assert "rotary" in unsupported(long)
    assert all(unsupported(tiny_model(family)) is None for family in SERVED)


@pytest.mark.parametrize("options", [{"engine": "vllm"}, {"max_new_tokens": 0}])
def test_calls_that_make_no_sense(model, options):
    with pytest.raises(ValueError, match=r"^sample: ") as err:
        draw(model, **options)
    assert "\n" not in str(err.value)


def test_one_rollout_at_a_time(model):
    cache = engine_slots.SlotCache(1, 8, torch.zeros(1, dtype=torch.int64))
    with engine_slots.attending_to(cache, model), pytest.raises(EngineError, match="one rollout at a time"):
        draw(model)
    model.config._attn_implementation_internal = engine_slots.ATTENTION
    try:
        with pytest.raises(EngineError, match="inside mxrl's engine only"):
            model(torch.tensor([PROMPTS[0]]))
    finally:
        model.config._attn_implementation_internal = "sdpa"


@pytest.mark.parametrize("autocast", [False, True])
def test_the_dtype_of_the_cache(autocast):
    """As torch's own attention: autocast's, although the rotation makes queries and keys float32."""
    model, cache = tiny_model("qwen3"), engine_slots.SlotCache(2, 8, torch.zeros(2, dtype=torch.int64))
    ids, order = torch.tensor([[5, 6], [7, 8]]), torch.arange(2).expand(2, 2)
    with torch.no_grad(), engine_slots.attending_to(cache, model), cache.prefilling([0, 1], [0, 1]):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            model(input_ids=ids, position_ids=order, past_key_values=cache)
    stored = {tensor.dtype for tensor in [*cache.keys.values(), *cache.values.values()]}
    assert stored == {torch.bfloat16 if autocast else torch.float32}


def test_bytes_of_a_token():
    cache = engine_slots.SlotCache(2, 8, torch.zeros(2, dtype=torch.int64))
    model = build_policy("dense", size="tiny").eval()
    with torch.no_grad(), engine_slots.attending_to(cache, model):
        model(
            input_ids=torch.tensor([[5], [6]]), position_ids=torch.zeros(2, 1, dtype=torch.int64), past_key_values=cache
        )
    stored = sum(t.nbytes for t in [*cache.keys.values(), *cache.values.values()])
    assert engine_slots.bytes_per_token(model, torch.float32) == stored / (2 * 8)

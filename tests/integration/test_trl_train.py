"""GRPO with a quantized policy: the gap, the noise, the weights TIS uses, and what is refused."""

import math

import pytest
import torch
import trl
from tiny_grpo import steps, tiny_trainer

from mxrl.corrections import aqn_sigma
from mxrl.integrations.trl import GRPOTrainer, NonFiniteError, UnsupportedError
from mxrl.rl.policy import build_policy
from mxrl.rl.rollout import SamplingError


@pytest.mark.parametrize("recipe", ["mxfp4+mbs+of", "bf16"])
def test_without_noise_and_scored_by_one_pass_there_is_no_gap(tmp_path, recipe):
    """Not a bit, with an update in between: training and rollout quantize the same numbers (the spec allows 1e-6)."""
    trainer = tiny_trainer(tmp_path, recipe, score="forward", max_steps=2)
    trainer.train()
    rows = steps(trainer)
    assert len(rows) == 2 and all(row["gap/max_abs"] == 0 and row["gap/ess"] == 1 for row in rows)
    assert all(row["grad_norm"] > 0 and math.isfinite(row["loss"]) for row in rows)


def test_decoding_and_training_count_positions_alike(tmp_path):
    """Prompts of different lengths: TRL itself would count the padding, which rotary models forgive up to rounding."""
    trainer = tiny_trainer(tmp_path, "bf16", max_steps=1)
    seen = []

    def look(module, args, kwargs):
        if kwargs.get("position_ids") is not None and kwargs["position_ids"].shape[-1] > 1:
            seen.append((kwargs["position_ids"], kwargs.get("attention_mask")))

    trainer.model.model.register_forward_pre_hook(look, with_kwargs=True)
    trainer.train()
    assert len(seen) > 2 and any((mask == 0).any() for _, mask in seen if mask is not None)
    assert all((p.gather(-1, m.argmax(-1, keepdim=True)) == 0).all() for p, m in seen if m is not None)


def test_what_is_logged_at_every_step(tmp_path):
    trainer = tiny_trainer(tmp_path, "mxfp4+mbs+of+aqn", monitor_every=2, max_steps=3)
    trainer.train()
    rows = steps(trainer)
    always = [
        "reward", "accuracy", "completions/mean_length", "entropy", "grad_norm", "loss", "rollout/entropy",
        "gap/k1", "gap/k3", "gap/pearson", "gap/chi2", "gap/ess", "gap/mean_abs", "gap/max_abs", "gap/truncated",
        "aqn/sigma", "aqn/effective_sigma", "group/distinct_answers", "time/rollout", "time/score", "time/reward",
        "time/update", "time/step", "speed/tokens_per_second", "speed/rollout_tokens_per_second",
    ]  # fmt: skip
    assert [[name for name in always if row.get(name) is None] for row in rows] == [[]] * 3
    assert [row["rollout"] for row in rows] == [0, 1, 2]
    assert [row["aqn/sigma"] for row in rows] == [aqn_sigma(t, 3, 1e-2, 1e-3) for t in range(3)]
    # Noise before quantization is amplified by rounding: the effective σ is larger, and falls more slowly.
    assert all(row["aqn/effective_sigma"] > row["aqn/sigma"] for row in rows)
    assert all(row["gap/mean_abs"] > 1e-4 for row in rows)
    now_and_then = ["weights/rel_mse", "weights/deadzone", "weights/cos", "logits/sigma_eta", "decode/flipped"]
    for name in now_and_then:
        assert [name in row for row in rows] == [True, False, True]
    parts = ("time/rollout", "time/score", "time/reward", "time/update", "time/monitor")
    assert all(sum(row.get(name, 0) for name in parts) <= row["time/step"] for row in rows)


def test_a_noisy_rollout_leaves_the_master_weights_alone(tmp_path):
    trainer = tiny_trainer(tmp_path, max_steps=2)
    inner, checked = trainer.vllm_generation.generate, []

    def outer(*args, **kwargs):
        before = {k: v.clone() for k, v in trainer.model.state_dict().items()}
        out = inner(*args, **kwargs)
        after = trainer.model.state_dict()
        checked.append(before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in before))
        return out

    trainer.vllm_generation.generate = outer
    trainer.train()
    assert checked == [True, True]


def test_the_weight_in_the_loss_is_the_truncated_ratio(tmp_path):
    """Rollout log-probabilities lowered by hand: exp(d) on some tokens, C = 2 where it would be more."""
    trainer = tiny_trainer(tmp_path, "bf16", score="forward", max_steps=1)
    inner = trainer.vllm_generation.generate

    def outer(*args, **kwargs):
        prompts, ids, logps, rest = inner(*args, **kwargs)
        shift = [0.5 if i % 2 else 3.0 for i in range(len(logps))]
        return prompts, ids, [[[lp[0] - s] for lp in row] for row, s in zip(logps, shift, strict=True)], rest

    trainer.vllm_generation.generate = outer
    seen = {}
    record = trainer._measure

    def measure(output):
        seen.update(output)
        record(output)

    trainer._measure = measure
    trainer.train()
    mask = seen["completion_mask"].bool()
    ratio = seen["importance_sampling_ratio"]
    expected = torch.where(torch.arange(16)[:, None] % 2 == 1, math.exp(0.5), 2.0).expand_as(ratio)
    torch.testing.assert_close(ratio[mask], expected[mask], rtol=1e-5, atol=0)  # float32 logs, shifted
    row = steps(trainer)[0]
    even = int(mask[::2].sum()) / int(mask.sum())
    assert row["gap/truncated"] == pytest.approx(even, abs=1e-9)
    assert row["gap/max_abs"] == pytest.approx(3.0, abs=1e-5)


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_updates_that_reuse_a_rollout(tmp_path, kind):
    """Two mini-batches and two passes: four updates a rollout, one draw of noise, rows that say which it was."""
    trainer = tiny_trainer(
        tmp_path, kind=kind, max_steps=8, gradient_accumulation_steps=1, steps_per_generation=2, num_iterations=2
    )
    assert trainer.updates_per_rollout == 4 and trainer.total_rollouts == 2
    trainer.train()
    rows = steps(trainer)
    assert [row["rollout"] for row in rows] == [0] * 4 + [1] * 4
    assert [row["aqn/sigma"] for row in rows] == [1e-2] * 4 + [pytest.approx(1e-3)] * 4
    assert len({row["gap/mean_abs"] for row in rows}) == 2 and all("reward" in row for row in rows)
    assert ["time/rollout" in row for row in rows] == [True, False, False, False] * 2


def test_one_rollout_may_serve_several_accumulation_steps(tmp_path):
    trainer = tiny_trainer(tmp_path, max_steps=2, gradient_accumulation_steps=4, steps_per_generation=2)
    trainer.train()
    rows = steps(trainer)
    assert [row["rollout"] for row in rows] == [0, 1]  # two batches, one sync
    assert trainer.total_rollouts == 2


def test_an_evaluation_draws_no_noise_and_counts_no_rollout(tmp_path, monkeypatch):
    """It does draw samples, from the same generators, and the training run must not feel it."""
    from datasets import Dataset

    import mxrl.integrations.trl as module

    noises, inner = [], module.rollout_weights

    def counted(model, noise=None, **options):
        noises.append(noise is not None)
        return inner(model, noise, **options)

    monkeypatch.setattr(module, "rollout_weights", counted)

    evals = Dataset.from_list([{"prompt": "12+34=", "answer": "46"}])
    plain = tiny_trainer(tmp_path / "a", "mxfp4+aqn", max_steps=3)
    plain.train()
    watched = tiny_trainer(
        tmp_path / "b", "mxfp4+aqn", max_steps=3, eval_dataset=evals, eval_strategy="steps", eval_steps=1, do_eval=True,
        per_device_eval_batch_size=4,
    )  # fmt: skip
    noises.clear()
    watched.train()
    assert noises == [True, False] * 3
    assert [r["rollout"] for r in steps(watched)] == [0, 1, 2]
    assert [r["gap/mean_abs"] for r in steps(watched)] == [r["gap/mean_abs"] for r in steps(plain)]
    same = zip(plain.model.parameters(), watched.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in same)
    assert any("eval_accuracy" in row for row in watched.state.log_history)


def test_the_prompts_of_a_step_do_not_depend_on_the_recipe(tmp_path):
    seen = {}
    for recipe in ("bf16", "mxfp4+aqn"):
        trainer = tiny_trainer(tmp_path / recipe, recipe, max_steps=2)
        inner = trainer.vllm_generation.generate
        seen[recipe] = []

        def outer(prompts, *rest, inner=inner, recipe=recipe, **kwargs):
            seen[recipe].append(prompts)
            return inner(prompts, *rest, **kwargs)

        trainer.vllm_generation.generate = outer
        trainer.train()
    assert seen["bf16"] == seen["mxfp4+aqn"] and len(seen["bf16"]) == 2


def test_tis_is_pinned_and_the_users_choice_is_kept(tmp_path):
    ours = tiny_trainer(tmp_path)
    assert (ours.vllm_importance_sampling_mode, ours.vllm_importance_sampling_clip_max) == ("token_truncate", 2.0)
    theirs = tiny_trainer(tmp_path, config_class=trl.GRPOConfig)
    assert (theirs.vllm_importance_sampling_mode, theirs.vllm_importance_sampling_clip_max) == ("token_truncate", 2.0)
    chosen = tiny_trainer(tmp_path, config_class=trl.GRPOConfig, vllm_importance_sampling_mode="token_mask")
    assert (chosen.vllm_importance_sampling_mode, chosen.vllm_importance_sampling_clip_max) == ("token_mask", 3.0)
    assert ours.pinned["TIS"] == "token_truncate C=2" and ours.pinned["beta"] == 0 and ours.pinned["loss"] == "dapo"


@pytest.mark.parametrize("setting", [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"generation_kwargs": {"top_k": 5}}])
def test_biased_sampling_is_refused(tmp_path, setting):
    with pytest.raises(SamplingError, match="biased") as error:
        tiny_trainer(tmp_path, **setting)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "setting, words",
    [
        ({"use_vllm": True}, "use_vllm"),
        ({"rollout_func": print}, "rollout_func"),
        ({"score": "cached"}, "forward"),
        ({"rollout_batch_size": -3}, "rollout_batch_size=-3 must be at least 1"),
    ],
)
def test_a_rollout_that_is_not_ours_or_can_not_be_is_refused(tmp_path, setting, words):
    with pytest.raises(UnsupportedError, match=words):
        tiny_trainer(tmp_path, **setting)


@pytest.mark.parametrize("name", ["temperature", "do_sample", "min_new_tokens", "bad_words_ids"])
def test_generation_settings_that_would_not_be_applied_are_refused(tmp_path, name):
    with pytest.raises(UnsupportedError, match=f"generation_kwargs: {name} would not be applied"):
        tiny_trainer(tmp_path, generation_kwargs={name: 1, "top_p": 1.0})
    tiny_trainer(tmp_path, generation_kwargs={"top_p": 1.0})


def test_dropout_is_refused(tmp_path):
    """In training alone, it would be a gap between rollout and training that no quantization makes."""
    policy = build_policy("dense", size="tiny", seed=2)
    policy.model.layers[1].self_attn.attention_dropout = 0.1  # taken by a function, not a layer
    with pytest.raises(UnsupportedError, match=r"'model.layers.1.self_attn' .*attention_dropout=0.1") as error:
        tiny_trainer(tmp_path, policy=policy)
    assert "\n" not in str(error.value)
    policy = build_policy("dense", size="tiny", seed=2)
    policy.model.layers[0].mlp.act_fn = torch.nn.Sequential(torch.nn.SiLU(), torch.nn.Dropout(0.2))
    with pytest.raises(UnsupportedError, match=r"act_fn.1' \(Dropout\) has p=0.2.*disable_dropout=True"):
        tiny_trainer(tmp_path, policy=policy)
    tiny_trainer(tmp_path, policy=policy, disable_dropout=True)


def test_speed_is_the_same_however_often_it_is_logged(tmp_path):
    trainer = tiny_trainer(tmp_path, max_steps=4, logging_steps=4)
    drawn = []
    inner = trainer.record.drawn
    trainer.record.drawn = lambda metrics: (drawn.append(metrics["rollout/tokens"]), inner(metrics))
    trainer.train()
    (row,) = steps(trainer)
    assert len(drawn) == 4 and row["rollout/tokens"] == drawn[-1]
    assert row["speed/rollout_tokens_per_second"] == pytest.approx(sum(drawn) / row["time/rollout"])
    assert row["speed/tokens_per_second"] == pytest.approx(sum(drawn) / row["time/step"])


def test_a_loss_that_is_not_finite_stops_before_the_update(tmp_path):
    trainer = tiny_trainer(tmp_path, max_steps=3)
    inner = trainer._compute_loss

    def broken(model, inputs):
        return inner(model, inputs) * (float("nan") if trainer.state.global_step == 1 else 1.0)

    trainer._compute_loss = broken
    with pytest.raises(NonFiniteError, match=r"step 2: the loss is nan \(.*gap/.*\); recipe mxfp4") as error:
        trainer.train()
    assert "\n" not in str(error.value)
    assert trainer.state.global_step == 1 and all(p.isfinite().all() for p in trainer.model.parameters())


def test_gradients_are_taken_without_cudnn_attention(tmp_path):
    """Its backward pass makes NaN of padding at some lengths; backward passes included, which checkpoints run in."""
    trainer, seen = tiny_trainer(tmp_path, max_steps=1), []
    trainer.model.model.layers[0].register_full_backward_hook(
        lambda *_: seen.append(torch.backends.cuda.cudnn_sdp_enabled())
    )
    trainer.train()
    assert seen and not any(seen) and torch.backends.cuda.cudnn_sdp_enabled()


def test_lora_on_a_quantized_base(tmp_path):
    from peft import LoraConfig

    lora = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=True)
    trainer = tiny_trainer(tmp_path, "mxfp4+mbs+of", score="forward", max_steps=2, peft_config=lora)
    base = {k: v.clone() for k, v in trainer.model.state_dict().items() if "lora" not in k}
    trainer.train()
    rows = steps(trainer)
    assert all(row["gap/max_abs"] == 0 and row["grad_norm"] > 0 for row in rows)
    state = trainer.model.state_dict()
    assert all(torch.equal(v, state[k]) for k, v in base.items())


@pytest.mark.parametrize(
    ("recipe", "options"),
    [("mxfp4+mbs+of", {}), ("bf16", {"kind": "moe", "router_aux_loss_coef": 0.0})],  # as a mean over a pass, it would
)
def test_passes_by_length_change_no_gradient(tmp_path, monkeypatch, recipe, options):
    """Prompts and completions of many lengths: the same loss and gradient as TRL's padded passes, with less padding."""
    found = {}
    for by_length in (True, False):
        monkeypatch.setattr(GRPOTrainer, "by_length", property(lambda self, on=by_length: on))
        trainer = tiny_trainer(
            tmp_path, recipe, **options, max_steps=2, num_generations=2, max_completion_length=24,
            per_device_train_batch_size=2, gradient_accumulation_steps=8,
        )  # fmt: skip
        shapes = []
        trainer.model.register_forward_pre_hook(
            lambda module, args, kwargs, seen=shapes: seen.append(kwargs["input_ids"].shape)
            if kwargs.get("fused_lm_head") else None,
            with_kwargs=True,
        )  # fmt: skip
        trainer.train()
        found[by_length] = steps(trainer), shapes
    (ours, cut), (theirs, padded) = found[True], found[False]
    assert len(cut) == len(padded) and sum(map(math.prod, cut)) < 0.9 * sum(map(math.prod, padded))
    half = len(cut) // 2
    assert cut[: half // 2] == cut[half // 2 : half]  # scored, then learned from: pass by pass of one shape
    for name in ("loss", "grad_norm", "entropy", "gap/mean_abs", "reward"):
        # float32 sums in another order; after the first update the weights themselves differ by rounding
        assert [r[name] for r in ours] == pytest.approx([r[name] for r in theirs], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize(
    "options",
    [{"loss_type": "bnpo"}, {"gradient_accumulation_steps": 1, "steps_per_generation": 2}, {"entropy_coef": 0.1},
     {"kind": "moe"}],
)  # fmt: skip
def test_passes_stay_as_trl_makes_them_where_their_company_counts(tmp_path, options):
    assert not tiny_trainer(tmp_path, **options).by_length
    assert tiny_trainer(tmp_path).by_length

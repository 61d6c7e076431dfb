"""What is measured on the policy during a run, against the same numbers taken by hand."""

import time

import pytest
import torch

import mxrl
from mxrl.decompose import error_stats
from mxrl.nn import quantized_layers
from mxrl.rl.gap import gap_stats
from mxrl.rl.monitor import distinct, logit_noise, unquantized, weight_stats
from mxrl.rl.policy import build_policy
from mxrl.rl.steps import StepRecord

IDS = torch.arange(3, 19).view(2, 8)
MASK = torch.ones(2, 8, dtype=torch.long)


def converted(recipe, kind="dense"):
    model = build_policy(kind, size="tiny", seed=1)
    mxrl.convert(model, recipe)
    return model


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_weight_stats_sum_over_the_quantized_matrices(dtype):
    model = converted("mxfp4+mbs+of")
    layers = [m.weight for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"]
    expected = sum((error_stats(w.to(dtype or w.dtype), "mxfp4+mbs+of") for w in layers), mxrl.ErrorStats.zero())
    got = weight_stats(model, dtype=dtype)
    assert len(layers) == 14 and got is not None
    assert got.numel == sum(w.numel() for w in layers) and got.to_dict() == expected.to_dict()


def test_weight_stats_of_experts_count_every_expert():
    model = converted("mxfp4", "moe")
    got = weight_stats(model)
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj")
    count = sum(p.numel() for n, p in model.named_parameters() if any(f".{x}" in n for x in names))
    assert got is not None and got.numel == count and 0.01 < got.rel_mse < 0.02


def test_unquantized_weights_have_no_stats():
    assert weight_stats(converted("bf16")) is None


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_logit_noise_is_the_centred_difference_to_the_plain_model(kind):
    model, plain = converted("mxfp4", kind), build_policy(kind, size="tiny", seed=1).eval()
    mask = MASK.clone()
    mask[1, 5:] = 0
    got = logit_noise(model.train(), IDS, mask)
    model.eval()
    with torch.no_grad():
        eta = (model(input_ids=IDS, attention_mask=mask).logits - plain(input_ids=IDS, attention_mask=mask).logits)[
            mask.bool()
        ]
    eta = eta - eta.mean(-1, keepdim=True)
    assert got == pytest.approx(
        eta.pow(2).mean().sqrt().item(), rel=1e-4
    )  # the plain MoE sums experts in another order
    assert got > 1e-3


def test_logit_noise_leaves_the_model_as_it_was():
    model = converted("mxfp4+of", "moe").train()
    before = [(layer.operands, layer.holds) for layer in quantized_layers(model)]
    logit_noise(model, IDS, MASK)
    assert model.training and before == [(layer.operands, layer.holds) for layer in quantized_layers(model)]
    with pytest.raises(ZeroDivisionError), unquantized(model):
        raise ZeroDivisionError
    assert before == [(layer.operands, layer.holds) for layer in quantized_layers(model)]


def test_a_plain_recipe_has_no_logit_noise():
    assert logit_noise(converted("bf16"), IDS, MASK) == 0


def test_distinct_answers_a_group():
    assert distinct(["1", "1", "2", None, None, None], 3) == 1.5
    with pytest.raises(ValueError, match="groups of 4"):
        distinct(["1"] * 6, 4)


def test_phases_inside_a_phase_are_counted_once():
    record = StepRecord(torch.device("cpu"))
    with record.phase("outer"):
        time.sleep(0.02)
        with record.phase("inner"):
            time.sleep(0.05)
    row = record.metrics({})
    assert 0.05 <= row["time/inner"] and 0.02 <= row["time/outer"] < row["time/inner"]
    assert row["time/outer"] + row["time/inner"] <= row["time/step"]


def test_a_step_without_a_rollout_repeats_the_last_ones_numbers():
    record = StepRecord(torch.device("cpu"))
    record.rollout = {"rollout": 4.0, "rollout/tokens": 10.0}
    record.gap = gap_stats(torch.tensor([-1.0]), torch.tensor([-1.5]), torch.ones(1))
    record.fresh = True
    first = record.metrics({"reward": [1.0, 0.0], "entropy": [2.0], "loss_of_step": [3.0]})
    second = record.metrics({"entropy": [1.0]})
    assert first["gap/mean_abs"] == second["gap/mean_abs"] == 0.5 and second["rollout"] == 4
    assert "reward" not in first and second["reward"] == 0.5  # the trainer logs it itself with the first
    assert "entropy" not in second and "loss_of_step" not in second

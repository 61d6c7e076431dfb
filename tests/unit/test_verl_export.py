"""What verl's rollout gets: the bits of `rollout_weights` whatever the order, fusion and sharding; whole, or an error.

No verl is needed: its engines' stream of (Hugging Face name, whole master weight) is made here.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import sharded, spawn
from tiny_models import tiny_model, tokens
from torch import Tensor, nn

import mxrl
from mxrl.integrations.verl.config import VerlConfig
from mxrl.integrations.verl.export import Export, ExportError, ExportPlan, check_same, plan_of
from mxrl.integrations.verl.policy import Policy, digest
from mxrl.nn import aqn_noise, quantized_layers, rollout_weights
from mxrl.nn.layers import full_tensor
from mxrl.recipes import Recipe

RECIPES = (
    "mxfp4+mbs+of+aqn",
    "mxfp4+w4a16",
    "nvfp4+aqn",
    "bf16+aqn",
    "mxfp4+aqn+aqn_placement=after",
    "mxfp4:even+mbs:search16+aqn+aqn_target=norm",
)
FAMILIES = ("qwen3", "qwen3_moe", "gpt_oss")


def stream(model: nn.Module, unfuse: bool = True) -> Iterator[tuple[str, Tensor]]:
    """A model's whole weights by name, experts apart as verl sends them (its own function does the same to Qwen's)."""
    for name, tensor in model.state_dict().items():
        value = full_tensor(tensor)
        if unfuse and name.endswith("experts.gate_up_proj") and "gpt" not in type(model).__name__.lower():
            for e, expert in enumerate(value):
                gate, up = expert.chunk(2)
                yield name.replace("gate_up_proj", f"{e}.gate_proj.weight"), gate.contiguous()
                yield name.replace("gate_up_proj", f"{e}.up_proj.weight"), up.contiguous()
        elif unfuse and name.endswith("experts.down_proj") and "gpt" not in type(model).__name__.lower():
            for e, expert in enumerate(value):
                yield name.replace("down_proj", f"{e}.down_proj.weight"), expert.contiguous()
        else:
            yield name, value


def held(model: nn.Module, noise: Any, dtype: torch.dtype) -> dict[str, str]:
    """Digests of what a rollout of `model` computes with, by stored name: the reference for everything here."""
    with rollout_weights(model, noise, dtype=dtype):
        found = {name: digest(parameter.to(dtype)) for name, parameter in model.state_dict().items()}
        for layer in quantized_layers(model):
            for a in layer.weights:
                weight = layer.module.held if layer.is_linear else layer.module.mxrl_state.held[a]
                found[f"{layer.name}.{a}"] = digest(weight.value)
    return found


def loaded(policy: Policy) -> dict[str, str]:
    return {name: digest(tensor) for name, tensor in policy.model.state_dict().items()}


def policy_for(family: str, recipe: str, dtype: torch.dtype) -> Policy:
    """As a rollout server makes it: the same architecture, other weights."""
    return Policy(tiny_model(family, seed=9, dtype=dtype), VerlConfig(recipe))


def converted(family: str, recipe: str) -> Any:
    model = tiny_model(family)
    mxrl.convert(model, recipe)
    return model


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_rollout_holds_what_rollout_weights_holds(family, recipe, dtype):
    model, noise = converted(family, recipe), aqn_noise(recipe, 5, 1, 3)
    policy = policy_for(family, recipe, dtype)
    export = Export(stream(model), ExportPlan(model), noise, dtype)
    policy.load(export)
    policy.complete(export.matrices)
    expected = held(model, noise, dtype)
    assert loaded(policy) == expected
    assert len(set(expected.values())) > 10  # of different tensors, that is


@pytest.mark.parametrize("family", FAMILIES)
def test_order_fusion_and_buckets_change_nothing(family):
    recipe, dtype = "mxfp4+mbs+of+aqn", torch.bfloat16
    model, noise = converted(family, recipe), aqn_noise("mxfp4+mbs+of+aqn", 5, 1, 3)
    expected = held(model, noise, dtype)
    plan = ExportPlan(model)
    for weights in (list(stream(model))[::-1], sorted(stream(model)), stream(model, unfuse=False)):
        policy = policy_for(family, recipe, dtype)
        sent = list(Export(weights, plan, noise, dtype))
        for start in range(0, len(sent), 5):
            policy.load(sent[start : start + 5])
        policy.complete(plan.matrices)
        assert loaded(policy) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_the_policy_computes_what_the_rollout_of_the_trainer_computes(family):
    recipe, dtype = "mxfp4+mbs+of+aqn", torch.bfloat16
    model, noise = converted(family, recipe).to(dtype), aqn_noise("mxfp4+mbs+of+aqn", 5, 1, 3)
    policy = policy_for(family, recipe, dtype)
    policy.load(Export(stream(model), ExportPlan(model), noise, dtype))
    with torch.no_grad(), rollout_weights(model, noise, dtype=dtype):
        expected = model(tokens()).logits
    with torch.no_grad():
        assert torch.equal(policy.model(tokens()).logits, expected)


def test_sixteen_bit_activations_are_left_alone():
    model = converted("qwen3", "mxfp4+w4a16").to(torch.bfloat16)
    policy = Policy(tiny_model("qwen3", seed=9, dtype=torch.bfloat16), VerlConfig("mxfp4", rollout_activations="a16"))
    policy.load(Export(stream(model), ExportPlan(model), None, torch.bfloat16))
    with torch.no_grad(), rollout_weights(model):
        expected = model(tokens()).logits
    with torch.no_grad():
        assert torch.equal(policy.model(tokens()).logits, expected)


def test_the_report_is_that_of_rollout_weights():
    model, noise = converted("qwen3_moe", "mxfp4+aqn"), aqn_noise("mxfp4+aqn", 5, 1, 3)
    export = Export(stream(model), ExportPlan(model), noise, torch.bfloat16)
    assert export.report.layers == {}
    list(export)
    with rollout_weights(model, noise, dtype=torch.bfloat16) as report:
        assert export.report.sigma == report.sigma
        # per matrix here, per stored parameter there: the same sums in another order
        assert export.report.effective_sigma == pytest.approx(report.effective_sigma, rel=1e-12)


def test_names_are_found_through_lora_and_wrappers():
    model = converted("qwen3", "mxfp4")
    plan = ExportPlan(model)
    wrapped = ((f"base_model.model.{n}".replace("q_proj.", "q_proj.base_layer."), t) for n, t in stream(model))
    plain = dict(Export(stream(model), plan, None, torch.bfloat16))
    for name, tensor in Export(wrapped, plan, None, torch.bfloat16):
        name = name.removeprefix("base_model.model.").replace(".base_layer", "")
        assert torch.equal(tensor, plain[name])


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_a_weight_that_is_not_sent_is_an_error(family):
    model = converted(family, "mxfp4")
    lost = "experts.2.up_proj" if family == "qwen3_moe" else "1.mlp.up_proj"
    rest = ((name, tensor) for name, tensor in stream(model) if lost not in name)
    with pytest.raises(ExportError, match=lost):
        list(Export(rest, ExportPlan(model), None, None))
    policy = policy_for(family, "mxfp4", torch.float32)
    policy.load((name, tensor) for name, tensor in stream(model) if lost not in name)
    with pytest.raises(ExportError, match=f"never came from the trainer, .*{lost}"):
        policy.complete(policy.matrices)


def test_layers_that_only_one_side_quantizes_are_an_error():
    skipping = tiny_model("qwen3")
    mxrl.convert(skipping, "mxfp4", skip=["*.layers.1.mlp.down_proj"])
    policy = policy_for("qwen3", "mxfp4", torch.float32)
    export = Export(stream(skipping), ExportPlan(skipping), None, None)
    policy.load(export)
    with pytest.raises(ExportError, match=r"1 weights are quantized in rollout only, model.layers.1.mlp.down_proj"):
        policy.complete(export.matrices)
    with pytest.raises(ExportError, match="quantized in training only, b for one"):
        check_same(["a", "b"], ["a"], "rollout")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_names_are_those_of_a_model_without_weights(family):
    skip = ["*.layers.1.*"]
    model = tiny_model(family)
    with torch.device("meta"):
        empty = type(model)(model.config)
    mxrl.convert(model, "mxfp4+mbs", skip=skip)
    names = plan_of(empty, Recipe.parse("mxfp4+mbs"), skip).matrices
    assert names == ExportPlan(model).matrices and names
    assert next(empty.parameters()).is_meta


def test_a_weight_of_another_shape_is_an_error():
    policy = policy_for("qwen3", "mxfp4", torch.float32)
    with pytest.raises(ExportError, match="no such weight"):
        policy.load([("model.layers.7.mlp.up_proj.weight", torch.ones(2))])
    with pytest.raises(ExportError, match=r"shape \[2\]; the rollout has shape \[96, 64\]"):
        policy.load([("model.layers.1.mlp.up_proj.weight", torch.ones(2))])


# --- sharded ---------------------------------------------------------------------------------------------------------


def _on_a_rank(rank: int, mesh: Any, folder: Path) -> None:
    found = {}
    for family in FAMILIES:
        for reshard in (True, False):
            model = converted(family, RECIPES[0])
            plan = ExportPlan(model)
            sharded(model, mesh, reshard_after_forward=reshard)
            model(tokens())  # leaves the blocks gathered where they aren't resharded
            noise = aqn_noise(RECIPES[0], 5, 1, 3)
            found[family, reshard] = {name: digest(t) for name, t in Export(stream(model), plan, noise, torch.bfloat16)}
    torch.save(found, folder / f"{rank}.pt")


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch without gloo")
def test_every_rank_exports_the_bits_of_one_process(tmp_path):
    spawn(_on_a_rank, tmp_path)
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    for family in FAMILIES:
        model, noise = converted(family, RECIPES[0]), aqn_noise(RECIPES[0], 5, 1, 3)
        expected = {n: digest(t) for n, t in Export(stream(model), ExportPlan(model), noise, torch.bfloat16)}
        assert found[0][family, True] == found[0][family, False] == expected
        assert found[1][family, True] == found[1][family, False] == expected

"""FSDP2 `fully_shard` on two gloo ranks equals one process: logits, gradients, rollout weights and AQN's noise."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import RANKS, sharded, spawn
from tiny_models import tiny_model, tokens
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import mxrl
from mxrl.nn import RolloutError, aqn_noise, quantized_layers, rollout_weights, shared_weights
from mxrl.nn.layers import full_tensor
from mxrl.nn.shard import whole

FAMILIES = ("qwen3", "gpt_oss")
RECIPE = "mxfp4+mbs+of+aqn"
NORM_RECIPE = "mxfp4+aqn+aqn_target=norm"
BATCH = tokens(batch=4, length=8)
SHARED = [("shared", "qwen3", False), ("shared.bf16", "qwen3_moe", True)]

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch without gloo")


def loss_of(model: nn.Module, t: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(t).logits[:, :-1].flatten(0, 1), t[:, 1:].flatten())


def held(model: nn.Module) -> dict[str, Tensor]:
    out = {}
    for layer in quantized_layers(model):
        for a in layer.weights:
            weight = layer.module.held if layer.is_linear else layer.module.mxrl_state.held[a]
            out[f"{layer.name}.{a}"] = weight.value.clone()
    return out


def measure(model: nn.Module, t: Tensor) -> dict[str, Any]:
    """Everything that is compared, for this process's part `t` of the batch; parameters gathered."""
    out: dict[str, Any] = {}
    before = {name: full_tensor(p).clone() for name, p in model.named_parameters()}
    for at_once in (1, 5000, 1 << 28):  # one collective each, a few together, all together
        values = list(whole(model.parameters(), at_once))
        assert len(values) == len(before) and all(map(torch.equal, values, before.values()))
    with torch.no_grad(), rollout_weights(model, aqn_noise(RECIPE, 5, 1, 3)) as report:
        out["held"] = held(model)
        out["rollout"] = logits_of(model, t)
        out["sigma"] = report.effective_sigma
    with torch.no_grad(), rollout_weights(model, aqn_noise(NORM_RECIPE, 5, 1, 3)):
        out["norms"] = {n: full_tensor(p).clone() for n, p in model.named_parameters() if "norm" in n}
        out["norm rollout"] = logits_of(model, t)
    assert all(torch.equal(full_tensor(p), before[name]) for name, p in model.named_parameters())
    with torch.no_grad():
        out["logits"] = logits_of(model, t)
    loss_of(model, t).backward()
    out["gradients"] = {name: full_tensor(p.grad).clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with pytest.raises(RolloutError, match="changed inside"), rollout_weights(model):
        optimizer.step()
    return out


def train(model: nn.Module, t: Tensor, share: bool) -> dict[str, Any]:
    """Two steps of two micro-batches, then writes beside the optimizer; with Q(w) shared inside, or not."""
    out: dict[str, Any] = {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with shared_weights(model) if share else nullcontext() as shared:
        for step in range(2):
            optimizer.zero_grad()
            with torch.no_grad(), rollout_weights(model, dtype=torch.bfloat16 if model.mixed else None):
                out[f"rollout {step}"] = model(t).logits
            for micro_batch in t.chunk(2):
                loss_of(model, micro_batch).backward()
            out |= {f"{step} {name}": full_tensor(p.grad).clone() for name, p in model.named_parameters()}
            optimizer.step()
        count = sum(len(layer.weights) for layer in quantized_layers(model))
        if shared is not None:
            # a rollout, two micro-batches: FSDP2 gathers w for each, Q(w) is computed for the first
            assert (shared.computed, shared.reused) == (2 * count, 2 * 2 * count)
        with torch.no_grad():
            out["stepped"] = model(t).logits
            for name, p in model.named_parameters():
                if "k_proj" in name or "down_proj" in name:
                    p.mul_(1.5)  # the shard; what FSDP2 gathered counts no version for it
            out["written"] = model(t).logits
        if shared is not None:
            assert 3 * count < shared.computed < 4 * count
    return out


def logits_of(model: nn.Module, t: Tensor) -> Tensor:
    """One forward pass for each rank's share, as the GEMMs of other sizes may sum in another order."""
    return torch.cat([model(part).logits for part in t.split(len(BATCH) // RANKS)])


def build(family: str) -> nn.Module:
    model = tiny_model(family)
    mxrl.convert(model, RECIPE)
    return model


def work(rank: int, mesh: Any, folder: Path) -> None:
    part = BATCH.chunk(RANKS)[rank]
    # float32 master weights, gathered in bf16
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for family in FAMILIES:
        torch.save(measure(sharded(build(family), mesh), part), folder / f"{family}.{rank}.pt")

        model = sharded(build(family), mesh, mp_policy=policy)
        with torch.no_grad():
            logits = model(part).logits
            with rollout_weights(model, dtype=torch.bfloat16):
                in_rollout = model(part).logits
        torch.save({"logits": logits, "rollout": in_rollout}, folder / f"{family}.bf16.{rank}.pt")

    for name, family, mixed in SHARED:
        for share in (False, True):
            model = sharded(build(family), mesh, **({"mp_policy": policy} if mixed else {}))
            model.mixed = mixed
            torch.save(train(model, part, share), folder / f"{name}.{share}.{rank}.pt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("fsdp2")
    spawn(work, folder)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_equal_one_process(family, folder):
    ranks = [torch.load(folder / f"{family}.{rank}.pt") for rank in range(RANKS)]
    one = measure(build(family), BATCH)
    for kind in ("held", "norms"):  # every rank holds the same bits, noise included
        for rank in ranks:
            assert rank[kind].keys() == one[kind].keys()
            assert all(torch.equal(rank[kind][name], value) for name, value in one[kind].items()), kind
    for kind in ("logits", "rollout", "norm rollout"):
        assert torch.equal(torch.cat([rank[kind] for rank in ranks]), one[kind]), kind
    for rank in ranks:
        assert rank["sigma"] == one["sigma"] > 0
        for name, gradient in one["gradients"].items():  # float32 sums over two halves of the batch
            torch.testing.assert_close(rank["gradients"][name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_gathered_in_bf16_equals_a_bf16_model(family, folder):
    ranks = [torch.load(folder / f"{family}.bf16.{rank}.pt") for rank in range(RANKS)]
    model = build(family)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    with torch.no_grad():
        expected = [model(part).logits for part in BATCH.chunk(RANKS)]
    for rank, logits in zip(ranks, expected, strict=True):
        assert rank["logits"].dtype == torch.bfloat16
        assert torch.equal(rank["logits"], logits) and torch.equal(rank["rollout"], logits)


@pytest.mark.parametrize("name", [name for name, _, _ in SHARED])
@pytest.mark.parametrize("rank", range(RANKS))
def test_shared_weights_are_never_stale(name, rank, folder):
    alone, shared = (torch.load(folder / f"{name}.{share}.{rank}.pt") for share in (False, True))
    assert alone.keys() == shared.keys() and len(alone) > 40
    assert all(torch.equal(shared[what], value) for what, value in alone.items())
    assert not torch.equal(alone["stepped"], alone["written"])

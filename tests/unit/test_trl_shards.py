"""What would shard a model in another way than ours is refused; an optimizer's states by number and by name."""

import os

import pytest
import torch

trl_shards = pytest.importorskip("mxrl.integrations.trl_shards")
from mxrl.integrations.trl_config import GRPOConfig, UnsupportedError  # noqa: E402


def config(tmp_path, **options):
    return GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none", **options)


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"fsdp_config": {"version": 1}}, "fsdp_config version=1"),
        ({"fsdp_config": {"cpu_offload": True}}, "fsdp_config cpu_offload=True"),
        ({"use_adaptive_entropy": True}, "use_adaptive_entropy=True"),
    ],
)
def test_another_sharding_is_refused(tmp_path, options, named):
    with pytest.raises(UnsupportedError, match=named) as caught:
        trl_shards.check_sharding(config(tmp_path, fsdp=True, **options))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("launcher", ["ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"])
def test_a_launchers_own_sharding_is_refused(tmp_path, monkeypatch, launcher):
    args = config(tmp_path)
    trl_shards.check_sharding(args)
    monkeypatch.setenv(launcher, "true")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UnsupportedError):
        trl_shards.check_sharding(args)


def test_what_is_ours_passes_and_one_process_takes_one_gpu(tmp_path):
    args = config(tmp_path, fsdp=True, fsdp_config={"reshard_after_forward": False, "version": 2})
    args._n_gpu = 2
    trl_shards.check_sharding(args)
    assert args.n_gpu == 1 and args.fsdp_plugin_args["auto_wrap_policy"] == "NO_WRAP"
    os.environ.pop("FSDP_CPU_RAM_EFFICIENT_LOADING", None)


def test_states_by_number_and_by_name():
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1, bias=False))
    weights, biases = [model[0].weight, model[1].weight], [model[0].bias]
    optimizer = torch.optim.AdamW([{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}])
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    indexed = optimizer.state_dict()
    named = trl_shards._by_name(indexed, model, optimizer)
    assert [group["params"] for group in named["param_groups"]] == [["0.weight", "1.weight"], ["0.bias"]]
    assert torch.equal(named["state"]["0.bias"]["exp_avg"], optimizer.state[model[0].bias]["exp_avg"])
    again = trl_shards._by_index(named)
    assert again["param_groups"] == indexed["param_groups"] and again["state"].keys() == indexed["state"].keys()
    assert all(again["state"][i] is indexed["state"][i] for i in indexed["state"])

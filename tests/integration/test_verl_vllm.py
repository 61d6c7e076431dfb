"""verl's vLLM rollout with our check, where both can be imported (docs/verl.md); no engine is started.

What the adapter sends is what the worker takes: names of matrices, once, after the weights are there.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM isn't installed")
pytest.importorskip("verl", reason="verl is not installed: pip install 'mxrl[verl]'")
import transformers
from torch import nn
from verl.utils.import_utils import load_class_from_fqn
from verl.workers.rollout import base
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter

from mxrl.integrations.verl import plugin
from mxrl.integrations.verl.config import ENVIRONMENT, EXTENSION, VerlConfig
from mxrl.integrations.verl.export import Export, ExportPlan, plan_of
from mxrl.integrations.verl.vllm import Adapter
from mxrl.integrations.vllm.settings import VllmPluginError

OURS = VerlConfig("mxfp4+mbs", skip=("*.layers.1.*",))


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv(ENVIRONMENT, OURS.to_json())
    monkeypatch.setattr(base, "_ROLLOUT_REGISTRY", dict(base._ROLLOUT_REGISTRY))


def hf_config() -> Any:
    return transformers.Qwen3Config(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=64, architectures=["Qwen3ForCausalLM"],
    )  # fmt: skip


def model() -> Any:
    return transformers.AutoModelForCausalLM.from_config(hf_config())


def adapter(monkeypatch, calls: list[Any], leader: bool = True) -> Any:
    """An Adapter without Ray: what it calls on vLLM's workers is written down."""

    async def update_weights(self: Any, weights: Any, *args: Any, **kwargs: Any) -> None:
        calls.append(("weights", kwargs["global_steps"]))

    async def execute(method: str, args: tuple[Any, ...] = ()) -> None:
        calls.append((method, *args))

    monkeypatch.setattr(ServerAdapter, "update_weights", update_weights)
    made: Any = Adapter.__new__(Adapter)
    made._has_server, made._execute_method = leader, execute
    made.model_config = SimpleNamespace(hf_config=hf_config(), trust_remote_code=False)
    return made


def sync(made: Any, weights: Any, steps: int = 2) -> None:
    for step in range(steps):
        asyncio.run(made.update_weights(weights, global_steps=step))


@pytest.mark.parametrize("recipe", ["mxfp4+mbs", "mxfp4+w4a16"])
def test_verl_finds_the_adapter_where_activations_are_quantized(monkeypatch, recipe):
    monkeypatch.setenv(ENVIRONMENT, VerlConfig(recipe).to_json())
    plugin.register()
    expected = Adapter if recipe == "mxfp4+mbs" else ServerAdapter
    assert base.get_rollout_class("vllm") is expected


def test_the_worker_class_is_verl_s_with_the_check():
    found = load_class_from_fqn(EXTENSION)
    assert issubclass(found, vLLMColocateWorkerExtension)
    # vLLM mixes it into its worker and refuses a name that the worker has already
    assert not hasattr(vLLMColocateWorkerExtension, "mxrl_check")


def test_the_check_comes_once_after_the_first_weights_with_training_s_names(monkeypatch):
    source, calls = model(), []
    matrices = plan_of(source, OURS.parsed, OURS.skip).matrices
    export = Export(iter(()), ExportPlan(source), None, None)
    sync(adapter(monkeypatch, calls), export)
    assert calls == [("weights", 0), ("mxrl_check", sorted(matrices)), ("weights", 1)]
    assert len(matrices) == 7


def test_without_the_sender_s_names_they_are_those_of_a_model_without_weights(monkeypatch):
    calls: list[Any] = []
    sync(adapter(monkeypatch, calls), iter(()), steps=1)
    assert calls == [("weights", 0), ("mxrl_check", sorted(plan_of(model(), OURS.parsed, OURS.skip).matrices))]


def test_a_rank_without_a_server_checks_nothing(monkeypatch):
    calls: list[Any] = []
    sync(adapter(monkeypatch, calls, leader=False), iter(()))
    assert calls == [("weights", 0), ("weights", 1)]


def test_a_worker_that_quantizes_other_layers_ends_the_run():
    worker: Any = load_class_from_fqn(EXTENSION).__new__(load_class_from_fqn(EXTENSION))
    layer = nn.Linear(2, 2)
    layer.quant_method = SimpleNamespace(matrices=("model.layers.0.mlp.up_proj.weight",))  # type: ignore[assignment]
    served = nn.ModuleDict({"model": nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"up": layer})])})})
    worker.model_runner, worker.rank = SimpleNamespace(get_model=lambda: served), 0
    assert worker.mxrl_check(["model.layers.0.mlp.up_proj.weight"]) == 1
    with pytest.raises(VllmPluginError, match=r"quantized in training only, model\.layers\.0\.mlp\.down_proj"):
        worker.mxrl_check(["model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight"])

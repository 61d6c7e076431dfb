"""The launch scripts in experiments/verl: their overrides compose with verl's configuration, pass its checks and ours.

A script is run with a stand-in for Python, which writes down the arguments that it was given; nothing is trained.
"""

from __future__ import annotations

import importlib.util
import io
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from mxrl.integrations.verl.config import ENVIRONMENT, EXTENSION, prepare
from mxrl.integrations.vllm.settings import Settings, VllmPluginError

found = importlib.util.find_spec("verl")
pytestmark = pytest.mark.skipif(found is None, reason="verl is not installed: pip install 'mxrl[verl]'")

SCRIPTS = Path(__file__).parents[2] / "experiments" / "verl"
RECIPE = "mxfp4+mbs+of:.5+aqn"


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in (ENVIRONMENT, "VERL_ENGINE_VENDOR", "VERL_USE_EXTERNAL_MODULES", "VERL_PLATFORM"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def arguments(name: str, folder: Path, *more: str, **environment: str) -> list[str]:
    """What the script starts Python with."""
    stub = folder / "python"
    stub.write_text(f'#!/bin/sh\nprintf "%s\\0" "$@" > "{folder}/arguments"\n')
    stub.chmod(0o755)
    (folder / "test.parquet").touch()
    values = {"PYTHON": str(stub), "DATA": str(folder), "OUT": str(folder / "out"), **environment}
    subprocess.run(["bash", str(SCRIPTS / name), *more], env={**os.environ, **values}, check=True)
    return (folder / "arguments").read_text().split("\0")[:-1]


def composed(overrides: list[str]) -> Any:
    """The configuration that verl's main_ppo would start with."""
    from hydra import compose, initialize_config_dir

    assert found is not None and found.submodule_search_locations
    folder = Path(found.submodule_search_locations[0], "trainer", "config")
    with initialize_config_dir(str(folder), version_base=None):
        return compose("ppo_trainer", overrides)


def checked(name: str, folder: Path, monkeypatch: Any, *more: str, **environment: str) -> Any:
    module, *overrides = arguments(name, folder, *more, **environment)[1:]
    assert module == "verl.trainer.main_ppo"
    config = composed([override for override in overrides if not override.startswith("hydra.")])
    from verl.utils.config import validate_config

    notes, find_spec = io.StringIO(), importlib.util.find_spec
    with monkeypatch.context() as patch:  # composed here, trained where Megatron is installed
        patch.setattr(
            importlib.util, "find_spec", lambda name, *a: found if name == "megatron" else find_spec(name, *a)
        )
        ours = prepare(config, notes)
    assert ours is not None and notes.getvalue() == ""
    getattr(validate_config, "__wrapped__", validate_config)(config, use_reference_policy=False, use_critic=False)
    return config


@pytest.mark.parametrize(("name", "strategy"), [("qwen2.5-3b.sh", "fsdp2"), ("qwen3-30b-a3b.sh", "megatron")])
def test_a_script_is_what_the_paper_trained(name, strategy, tmp_path, monkeypatch):
    config = checked(name, tmp_path, monkeypatch)
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    assert actor.strategy == strategy
    assert config.algorithm.adv_estimator == "grpo" and config.data.max_response_length == 1024
    correction = config.algorithm.rollout_correction
    assert (correction.rollout_is, correction.rollout_is_threshold) == ("token", 2.0)
    sent = rollout.engine_kwargs.vllm
    assert sent.hf_overrides.quantization_config.recipe == config.mxrl.recipe == RECIPE
    assert sent.worker_extension_cls == EXTENSION
    assert config.data.train_files == f"{tmp_path}/train.parquet"


def test_vllm_s_tensor_parallelism_cuts_no_block_of_the_moe(tmp_path, monkeypatch):
    rollout = checked("qwen3-30b-a3b.sh", tmp_path, monkeypatch).actor_rollout_ref.rollout
    settings = Settings.from_config(rollout.engine_kwargs.vllm.hf_overrides.quantization_config)
    ranks = rollout.tensor_model_parallel_size
    settings.check_shard("o_proj", 32 * 128, ranks)
    settings.check_shard("experts", 768, ranks, experts=True)
    with pytest.raises(VllmPluginError, match="macro-blocks of 128"):
        settings.check_shard("experts", 768, 2 * ranks, experts=True)


@pytest.mark.parametrize("name", ["qwen2.5-3b.sh", "qwen3-30b-a3b.sh"])
def test_recipe_seed_and_more_overrides_are_the_caller_s(name, tmp_path, monkeypatch):
    recipe = "mxfp4+mbs+aqn+aqn_target=norm"  # with an = in it
    config = checked(name, tmp_path, monkeypatch, "data.train_batch_size=64", RECIPE=recipe, SEED="7")
    assert (config.mxrl.recipe, config.mxrl.seed, config.data.train_batch_size) == (recipe, 7, 64)


def test_the_bf16_baseline_is_a_recipe_too(tmp_path, monkeypatch):
    config = checked("qwen2.5-3b.sh", tmp_path, monkeypatch, RECIPE="bf16")
    assert config.actor_rollout_ref.rollout.engine_kwargs.vllm == {}

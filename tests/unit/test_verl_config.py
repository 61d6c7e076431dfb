"""The section `mxrl` of a verl run: what is sent to the run's processes, and the one line that a wrong key ends in.

No verl is needed: `prepare` gets the configuration as verl composes it, cut down to what it looks at.
"""

from __future__ import annotations

import io
import json
import os
from types import SimpleNamespace

import pytest

from mxrl.integrations.verl.config import ENVIRONMENT, EXTENSION, PLUGIN, VerlConfig, VerlConfigError, parse, prepare
from mxrl.integrations.vllm.settings import Settings

OmegaConf = pytest.importorskip("omegaconf", reason="omegaconf comes with verl").OmegaConf


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """`prepare` writes into os.environ; each test starts and ends without it."""
    for name in (ENVIRONMENT, "VERL_ENGINE_VENDOR", "VERL_USE_EXTERNAL_MODULES", "VERL_PLATFORM"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def composed(**changes):
    """verl's defaults for the keys that `prepare` reads; changes are dotted keys, `__` for the dots."""
    config = OmegaConf.create(
        {
            "actor_rollout_ref": {
                "model": {"lora_rank": 0, "lora": {"merge": False}},
                "actor": {"strategy": "fsdp2", "fsdp_config": {"qat": {"enable": False}}},
                "rollout": {
                    "name": "mxrl", "dtype": "bfloat16", "top_p": 1, "top_k": -1, "quantization": None,
                    "calculate_log_probs": True, "checkpoint_engine": {"backend": "naive"}, "load_format": "dummy",
                    "engine_kwargs": {"vllm": {}, "sglang": {}},
                },
            },
            "algorithm": {"rollout_correction": {"rollout_is": "token", "rollout_is_threshold": 3.0}},
            "ray_kwargs": {"ray_init": {"num_cpus": None, "runtime_env": {"py_executable": None}}},
            "mxrl": {"recipe": "mxfp4+mbs+of+aqn"},
        }
    )  # fmt: skip
    OmegaConf.set_struct(config, True)
    for key, value in changes.items():
        OmegaConf.update(config, key.replace("__", "."), value, merge=False, force_add=True)
    return config


def refusal(config) -> str:
    """The one line on stderr; the exit code is 2."""
    stderr = io.StringIO()
    with pytest.raises(SystemExit) as stopped:
        prepare(config, stderr)
    assert stopped.value.code == 2
    assert ENVIRONMENT not in os.environ
    (line,) = stderr.getvalue().splitlines()
    return line


def test_prepare_sends_the_section_to_every_process():
    config = composed(mxrl__skip=["*.down_proj"], mxrl__seed=7)
    stderr = io.StringIO()
    ours = prepare(config, stderr)
    assert ours == VerlConfig("mxfp4+mbs+of+aqn", ("*.down_proj",), 7, tis_cap=3.0)
    assert stderr.getvalue() == ""
    sent = config.ray_kwargs.ray_init.runtime_env.env_vars
    assert sent["VERL_ENGINE_VENDOR"] == "mxrl" and sent["VERL_USE_EXTERNAL_MODULES"] == PLUGIN
    assert json.loads(sent[ENVIRONMENT])["seed"] == 7
    assert VerlConfig.from_environment() == ours  # local Ray processes inherit the driver's


def test_the_noise_needs_to_know_how_many_rollouts_there_will_be(monkeypatch):
    """verl's total_training_steps is −1 until a trainer fills it in, which its asynchronous ones do too late."""
    from mxrl.integrations.verl.annealing import Annealing

    class Engine(Annealing):
        rollout = 5
        optimizer_config = SimpleNamespace(total_training_steps=-1)

    monkeypatch.setenv(ENVIRONMENT, VerlConfig("mxfp4+aqn").to_json())
    with pytest.raises(VerlConfigError, match=r"mxrl.total_rollouts: .* give \+mxrl.total_rollouts=N"):
        Engine().noise()
    monkeypatch.setenv(ENVIRONMENT, VerlConfig("mxfp4+aqn", total_rollouts=4).to_json())
    noise = Engine().noise()
    assert (noise.rollout, noise.sigma) == (5, pytest.approx(1e-3))
    monkeypatch.setenv(ENVIRONMENT, VerlConfig("mxfp4").to_json())
    assert Engine().noise() is None


def test_prepare_keeps_what_the_run_sends_already(monkeypatch):
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "theirs")
    config = composed(ray_kwargs__ray_init__runtime_env__env_vars={"A": "1"})
    prepare(config)
    sent = config.ray_kwargs.ray_init.runtime_env.env_vars
    assert sent["A"] == "1" and sent["VERL_USE_EXTERNAL_MODULES"] == f"theirs,{PLUGIN}"


def test_a_run_without_the_section_is_left_alone():
    config = composed()
    del config._content["mxrl"]
    before = OmegaConf.to_container(config)
    config.actor_rollout_ref.rollout.name = "vllm"
    assert prepare(config) is None
    config.actor_rollout_ref.rollout.name = before["actor_rollout_ref"]["rollout"]["name"]
    assert OmegaConf.to_container(config) == before and ENVIRONMENT not in os.environ


A = "actor_rollout_ref__"
MEGATRON = {A + "actor__strategy": "megatron", A + "actor__megatron": {"vanilla_mbridge": False}}
KWARGS = A + "rollout__engine_kwargs__vllm__"
VLLM = {A + "rollout__name": "vllm", "mxrl__rollout_activations": "a16"}
W4A4 = {A + "rollout__name": "vllm"}


@pytest.mark.parametrize(
    "changes, parts",
    [
        ({"mxrl__recipy": "mxfp4"}, ["mxrl.recipy", "did you mean 'recipe'?", "total_rollouts"]),
        ({"mxrl__tis_cap": 2.0}, ["mxrl.tis_cap is no key"]),
        ({"mxrl__recipe": "mxpf4+mbs"}, ["mxrl.recipe", "mxpf4", "did you mean 'mxfp4'?"]),
        ({"mxrl__recipe": 4}, ["mxrl.recipe=4 must be text"]),
        ({"mxrl__seed": "x"}, ["mxrl.seed='x' must be a whole number"]),
        ({"mxrl__seed": True}, ["mxrl.seed=True must be a whole number"]),
        ({"mxrl__reference": 1}, ["mxrl.reference=1 must be true or false"]),
        ({"mxrl__total_rollouts": 0}, ["mxrl.total_rollouts=0"]),
        ({"mxrl__skip": [1]}, ["mxrl.skip=[1]"]),
        ({"mxrl__rollout_activations": "a8"}, ["mxrl.rollout_activations='a8'", "recipe, a16"]),
        ({"mxrl": "mxfp4"}, ["mxrl='mxfp4' is no section"]),
        ({"mxrl": {"seed": 1}}, ["mxrl.recipe is missing"]),
        ({A + "actor__strategy": "veomni"}, ["actor.strategy=veomni", "fsdp, fsdp2, megatron"]),
        ({**MEGATRON, "mxrl__recipe": "nvfp4"}, ["mxrl.recipe: nvfp4", "Megatron cuts and fuses matrices"]),
        ({**MEGATRON, A + "actor__megatron__vanilla_mbridge": True}, ["vanilla_mbridge=True", "set it to False"]),
        ({**MEGATRON, A + "actor__megatron__qat": {"enable": True}}, ["actor.megatron.qat.enable=True"]),
        ({**MEGATRON, A + "model__lora": {"rank": 8}}, ["adapters are not supported with Megatron"]),
        ({A + "actor__fsdp_config__qat__enable": True}, ["qat.enable=True"]),
        ({A + "rollout__top_p": 0.9}, ["rollout.top_p=0.9", "1.0"]),
        ({A + "rollout__top_k": 20}, ["rollout.top_k=20", "-1"]),
        ({A + "rollout__val_kwargs": {"top_p": 0.7}}, ["rollout.val_kwargs.top_p=0.7", "leave it at 1.0"]),
        ({A + "rollout__quantization": "fp8"}, ["rollout.quantization=fp8"]),
        ({A + "rollout__checkpoint_engine__backend": "delta_sharded"}, ["delta_sharded"]),
        ({A + "rollout__name": "sglang"}, ["rollout.name=sglang", "+mxrl.rollout_activations=a16", "+w4a16"]),
        ({**W4A4, "mxrl__recipe": "nvfp4"}, ["an NVFP4 activation", "+w4a16", "+mxrl.rollout_activations=a16"]),
        ({**W4A4, KWARGS + "worker_extension_cls": "a.B"}, ["vllm.worker_extension_cls=a.B", "drop it"]),
        ({**W4A4, KWARGS + "hf_overrides": "{}"}, ["hf_overrides='{}'", "must be a section"]),
        ({**W4A4, KWARGS + "hf_overrides__quantization_config": "fp8"}, ["quantization_config='fp8'", "drop it"]),
        ({**W4A4, KWARGS + "hf_overrides__quantization_config__recipe": "mxfp4"}, ["drop recipe=mxfp4"]),
        ({**W4A4, KWARGS + "hf_overrides__quantization_config__weights": "quantize"}, ["drop weights=quantize"]),
        ({**W4A4, KWARGS + "hf_overrides__quantization_config__experts": "cutlass"}, ["none of triton, grouped"]),
        (
            {**W4A4, A + "model__lora_rank": 8, "mxrl__recipe": "mxfp4", A + "rollout__load_format": "safetensors"},
            ["rollout.load_format=safetensors", "use dummy"],
        ),
        ({A + "rollout__checkpoint_engine__backend": "nccl"}, ["rollout.name=mxrl", "backend=naive"]),
        ({A + "model__lora_rank": 8, "mxrl__recipe": "mxfp4"}, ["rollout.name=mxrl takes no LoRA adapters"]),
        ({**VLLM, A + "model__lora_rank": 8}, ["+aqn", "LoRA"]),
        ({**VLLM, A + "model__lora_rank": 8, A + "model__lora__merge": True}, ["model.lora.merge=True"]),
    ],
)
def test_what_cannot_be_is_one_line_that_names_the_key(changes, parts):
    line = refusal(composed(**changes))
    assert line.startswith("mxrl: ")
    for part in parts:
        assert part in line


def test_a_misspelt_section_is_refused():
    config = composed(mxlr__recipe="mxfp4")
    del config._content["mxrl"]
    assert "did you mean 'mxrl'?" in refusal(config)


@pytest.mark.parametrize(
    "changes",
    [
        VLLM,
        W4A4,
        {**W4A4, "mxrl__recipe": "mxfp4+w4a16"},
        {**W4A4, "mxrl__recipe": "nvfp4+w4a8"},
        {**VLLM, "mxrl__recipe": "nvfp4"},
        {**W4A4, A + "model__lora_rank": 8, "mxrl__recipe": "mxfp4"},
        {A + "rollout__name": "sglang", "mxrl__recipe": "mxfp4", "mxrl__rollout_activations": "a16"},
        {**VLLM, A + "model__lora_rank": 8, "mxrl__recipe": "mxfp4+mbs"},
        {A + "rollout__name": "sglang", A + "rollout__quantization": "fp8", "mxrl__recipe": "bf16"},
    ],
)
def test_what_is_consistent_is_let_through(changes):
    assert prepare(composed(**changes)) is not None


@pytest.mark.parametrize(
    "theirs",
    [
        {},
        {"hf_overrides": {"quantization_config": {"experts": "grouped"}, "rope_theta": 1}, "moe_backend": "triton"},
    ],
)
def test_vllm_gets_the_recipe_and_the_worker_that_checks(theirs):
    config = composed(**W4A4, mxrl__skip=["*.down_proj"], **{KWARGS.removesuffix("__"): theirs})
    prepare(config)
    sent = OmegaConf.to_container(config.actor_rollout_ref.rollout.engine_kwargs)
    overrides = theirs.get("hf_overrides", {})
    ours = {"quant_method": "mxrl", "recipe": "mxfp4+mbs+of+aqn", "skip": ["*.down_proj"]}
    merged = {**overrides, "quantization_config": {**overrides.get("quantization_config", {}), **ours}}
    assert sent == {"vllm": {**theirs, "hf_overrides": merged, "worker_extension_cls": EXTENSION}, "sglang": {}}
    settings = Settings.from_config(sent["vllm"]["hf_overrides"]["quantization_config"])
    assert str(settings.operand) == "mxfp4+mbs+of" and settings.weight_operand is None
    assert prepare(config) is not None  # again, by another entry point
    assert OmegaConf.to_container(config.actor_rollout_ref.rollout.engine_kwargs) == sent


@pytest.mark.parametrize("changes", [VLLM, {**W4A4, "mxrl__recipe": "mxfp4+w4a16"}, {**W4A4, "mxrl__recipe": "bf16"}])
def test_vllm_is_left_alone_where_activations_are(changes):
    config = composed(**changes)
    prepare(config)
    assert config.actor_rollout_ref.rollout.engine_kwargs.vllm == {}


def test_without_tis_there_is_a_note():
    stderr = io.StringIO()
    assert prepare(composed(algorithm__rollout_correction__rollout_is=None), stderr) is not None
    (line,) = stderr.getvalue().splitlines()
    assert line.startswith("mxrl: note: algorithm.rollout_correction.rollout_is")


def test_another_dtype_in_the_rollout_gets_a_note():
    stderr = io.StringIO()
    prepare(composed(actor_rollout_ref__actor__fsdp_config__mixed_precision={"param_dtype": "fp32"}), stderr)
    (line,) = stderr.getvalue().splitlines()
    assert "rollout.dtype=bfloat16, but the actor computes in fp32" in line


def test_a_vendor_without_a_section_is_refused(monkeypatch):
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "mxrl")
    config = composed()
    del config._content["mxrl"]
    assert "+mxrl.recipe" in refusal(config)


def test_a_process_that_was_not_reached_says_so():
    with pytest.raises(VerlConfigError, match=ENVIRONMENT):
        VerlConfig.from_environment()


def test_the_environment_round_trips(monkeypatch):
    ours = parse({"recipe": "mxfp4+aqn:0.02:0.002", "skip": ["a", "b"], "reference": True, "total_rollouts": 5})
    monkeypatch.setenv(ENVIRONMENT, ours.to_json())
    assert VerlConfig.from_environment() == ours


def test_an_interval_of_weights_has_its_upper_end_as_cap():
    config = composed(algorithm__rollout_correction__rollout_is_threshold="0.5_5.0")
    ours = prepare(config)
    assert ours is not None and ours.tis_cap == 5.0

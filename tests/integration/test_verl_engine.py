"""verl's own FSDP engine, as the plugin registers it, on two gloo ranks and without Ray.

What it sends to a rollout is compared with one process: our layers, our noise, the scoring pass of the TRL path.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp._init_utils
from gloo_ranks import spawn

import mxrl
from mxrl.integrations.verl.config import ENVIRONMENT, VENDOR, VerlConfig
from mxrl.integrations.verl.policy import Policy, digest
from mxrl.nn import aqn_noise, rollout_weights
from mxrl.rl.policy import build_policy, char_tokenizer, save_policy
from mxrl.rl.rollout import score

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("verl") is None, reason="verl is not installed: pip install 'mxrl[verl]'"
)

STEPS = 3
RECIPE = "mxfp4+mbs+of+aqn"
FP32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
CASES: dict[str, dict[str, Any]] = {
    "reshard": {},
    "keep": {"reshard": False},
    "half": {"half": True},
    "fsdp1": {"strategy": "fsdp"},
}
IDS = torch.randint(3, 19, (4, 12), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the two ranks saw, each."""
    folder = tmp_path_factory.mktemp("ranks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ENVIRONMENT, VerlConfig(RECIPE, seed=5).to_json())
        patch.setenv("VERL_ENGINE_VENDOR", VENDOR)
        patch.setenv("VERL_USE_EXTERNAL_MODULES", "mxrl.integrations.verl.plugin")
        patch.setenv("VERL_PLATFORM", "cpu")
        patch.delenv("TRITON_INTERPRET", raising=False)  # verl's own kernels can't be interpreted
        spawn(_on_a_rank, folder)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in (0, 1)]


def _on_a_rank(rank: int, mesh: Any, folder: Path) -> None:
    from verl.workers.engine.fsdp import transformer_impl

    # FSDP1 copies the first rank's weights to the others, and verl's moves them, on GPUs only; here all ranks have
    # loaded the same ones, and they are where they belong
    torch.distributed.fsdp._init_utils._sync_module_params_and_buffers = lambda *args, **kwargs: None
    transformer_impl.load_fsdp_model_to_gpu = lambda model: None
    found = {**_exports(rank, folder), **_resumed(rank, folder), "lora": _lora(rank, folder), **_references(folder)}
    torch.save(found, folder / f"{rank}.pt")


def model_folder(folder: Path, kind: str) -> str:
    """A tiny policy, the same on both ranks, in float32."""
    path = folder / f"{kind}-{os.getpid()}"
    save_policy(build_policy(kind, size="tiny", seed=1), char_tokenizer(), path, dtype=torch.float32)
    return str(path)


def engine(
    folder: Path,
    kind: str,
    *,
    strategy: str = "fsdp2",
    reshard: bool = True,
    half: bool = False,
    reference: bool = False,
    **model: Any,
) -> Any:
    """verl's engine for the vendor `mxrl`, initialized; needs the process group."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine import EngineRegistry

    built = EngineRegistry.new(
        model_type="language_model",
        backend=strategy,
        model_config=HFModelConfig(
            path=model_folder(folder, kind),
            use_remove_padding=False,
            override_config={"attn_implementation": "eager"},
            **model,
        ),
        engine_config=FSDPEngineConfig(
            strategy=strategy,
            model_dtype="fp32",
            mixed_precision=None if half else FP32,
            reshard_after_forward=reshard,
            use_torch_compile=False,
            forward_only=reference,
        ),
        optimizer_config=FSDPOptimizerConfig(lr=1e-2, total_training_steps=STEPS),
        checkpoint_config=CheckpointConfig(save_contents=["model", "optimizer", "extra"]),
    )
    built.initialize()
    return built


def batch(rows: torch.Tensor) -> Any:
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu

    def nested(x: torch.Tensor) -> torch.Tensor:
        return torch.nested.as_nested_tensor(list(x), layout=torch.jagged)

    data = TensorDict(
        {
            "input_ids": nested(rows),
            "position_ids": nested(torch.arange(rows.shape[1]).expand_as(rows).contiguous()),
            "loss_mask": nested(torch.ones_like(rows)),
        },
        batch_size=len(rows),
    )
    tu.assign_non_tensor(
        data,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=1,
        use_remove_padding=False,
        temperature=1.0,
        max_token_len_per_gpu=1 << 20,
    )
    return data


def mean_logp(model_output: Any, data: Any, dp_group: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    loss = -model_output["log_probs"].values().mean()
    return loss, {"seen": [float(loss.detach())]}


def update(built: Any, rows: torch.Tensor) -> dict[str, Any]:
    with built.train_mode():
        output = built.train_batch(batch(rows), loss_function=mean_logp)
        built.lr_scheduler_step()
    return output["metrics"]


def logps(built: Any, rows: torch.Tensor) -> torch.Tensor:
    """[B, T - 1] of each row's tokens but the first."""
    with built.eval_mode():
        output = built.infer_batch(batch(rows), loss_function=None)
    return torch.stack(list(output["model_output"]["log_probs"].unbind()))[:, :-1]


def exported(built: Any) -> dict[str, torch.Tensor]:
    weights, adapter = built.get_per_tensor_param(base_sync_done=True)
    assert adapter is None
    return {name: tensor.clone() for name, tensor in weights}


def masters(built: Any) -> dict[str, torch.Tensor]:
    from mxrl.nn.layers import full_tensor

    return {name: full_tensor(tensor).clone() for name, tensor in built.module.state_dict().items()}


# --- export and log-probabilities -------------------------------------------------------------------------------------


def _exports(rank: int, folder: Path) -> dict[Any, Any]:
    found: dict[str, Any] = {}
    for kind in ("dense", "moe"):
        for name, options in CASES.items():
            built = engine(folder, kind, **options)
            first = exported(built)
            metrics = update(built, IDS[rank::2])
            found[kind, name] = {
                "first": first,
                "metrics": metrics,
                "masters": masters(built),
                "second": exported(built),
                "again": {n: digest(t) for n, t in exported(built).items()},
                "logps": logps(built, IDS),
                "banner": sorted(built.plan.matrices),
            }
    return found


def test_the_engine_sends_what_the_trl_path_decodes_with(found):
    """Same weights, same noise: bit-identical quantized weights; the same log-probabilities by the same full pass."""
    mask = torch.ones_like(IDS)
    for kind in ("dense", "moe"):
        for case in CASES:
            dtype = torch.bfloat16 if case == "half" else torch.float32
            zero, one = (seen[kind, case] for seen in found)
            for part in ("first", "second"):
                assert zero[part].keys() == one[part].keys()
                assert all(torch.equal(zero[part][name], one[part][name]) for name in zero[part])
            assert zero["again"] == {name: digest(t) for name, t in zero["second"].items()}

            model = build_policy(kind, size="tiny", seed=1)
            model.load_state_dict(zero["masters"])
            model = model.eval()
            mxrl.convert(model, RECIPE)
            noise = aqn_noise(RECIPE, 5, 1, STEPS)  # of the second rollout
            policy = Policy(build_policy(kind, size="tiny", seed=8).to(dtype), VerlConfig(RECIPE))
            policy.load(zero["second"].items())
            policy.complete(zero["banner"])
            with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                with rollout_weights(model, noise, dtype=dtype):  # as integrations/trl.py does
                    trl = score(model, IDS, mask, IDS.shape[1] - 1).logps
                    held = _held(model)
                verl = score(policy.model, IDS, mask, IDS.shape[1] - 1).logps
            assert {name: digest(t) for name, t in _loaded(policy).items()} == held
            if dtype == torch.float32:
                assert torch.equal(verl, trl)  # asked for: 1e-5
            else:  # norms, embeddings, head: float32 there, rounded to bf16 here, as by any engine
                assert (verl - trl).abs().max() < 0.1


def _held(model: Any) -> dict[str, str]:
    from mxrl.nn import quantized_layers

    return {
        f"{layer.name}.{a}": digest((layer.module.held if layer.is_linear else layer.module.mxrl_state.held[a]).value)
        for layer in quantized_layers(model)
        for a in layer.weights
    }


def _loaded(policy: Policy) -> dict[str, torch.Tensor]:
    from mxrl.nn import quantized_layers

    return {
        f"{layer.name}.{a}": layer.parameter(a).data for layer in quantized_layers(policy.model) for a in layer.weights
    }


def test_training_scores_as_one_process_does(found):
    """The engine's own pass, over shards, against ours: equal but for rounding, which 4-bit activations amplify."""
    for kind in ("dense", "moe"):
        seen = found[0][kind, "reshard"]
        model = build_policy(kind, size="tiny", seed=1)
        model.load_state_dict(seen["masters"])
        mxrl.convert(model, RECIPE)
        ours = score(model, IDS, torch.ones_like(IDS), IDS.shape[1] - 1).logps
        assert (seen["logps"] - ours).abs().max() < 1e-5


def test_the_update_reports_aqn(found):
    for kind in ("dense", "moe"):
        metrics = found[0][kind, "reshard"]["metrics"]
        assert metrics["aqn/sigma"] == [pytest.approx(1e-2)]
        assert 0 < metrics["aqn/effective_sigma"][0] < 1
        first, second = (found[0][kind, "reshard"][part] for part in ("first", "second"))
        assert not torch.equal(first["model.embed_tokens.weight"], second["model.embed_tokens.weight"])  # it learns


# --- checkpointing, resuming, LoRA -----------------------------------------------------------------------------------


def _resumed(rank: int, folder: Path) -> dict[Any, Any]:
    found: dict[str, Any] = {}
    for checkpointing in (True, False):
        built = engine(folder, "dense", enable_gradient_checkpointing=checkpointing)
        update(built, IDS[rank::2])
        found["checkpointing", checkpointing] = {name: digest(t) for name, t in masters(built).items()}

    built.save_checkpoint(str(folder / "saved"), global_step=1)
    update(built, IDS[rank::2])
    found["went on"] = {name: digest(t) for name, t in exported(built).items()}
    again = engine(folder, "dense", enable_gradient_checkpointing=False)
    again.load_checkpoint(str(folder / "saved"), del_local_after_load=False)
    found["resumed at"] = again.rollout
    update(again, IDS[rank::2])
    found["resumed"] = {name: digest(t) for name, t in exported(again).items()}
    return found


def test_checkpointing_and_resuming_change_nothing(found):
    for seen in found:
        assert seen["checkpointing", True] == seen["checkpointing", False]
        assert seen["resumed at"] == 1
        assert seen["resumed"] == seen["went on"]
    assert found[0]["went on"] == found[1]["went on"]


def _lora(rank: int, folder: Path) -> dict[str, Any]:
    os.environ[ENVIRONMENT] = VerlConfig("mxfp4+mbs").to_json()  # `prepare` refuses noise with LoRA
    built = engine(folder, "dense", lora_rank=4, target_modules="all-linear")
    before, _ = built.get_per_tensor_param(base_sync_done=False)
    before = {name: digest(t) for name, t in before}
    update(built, IDS[rank::2])
    weights, adapter = built.get_per_tensor_param(base_sync_done=True)
    after, _ = built.get_per_tensor_param(base_sync_done=False)
    return {
        "before": before,
        "after": {name: digest(t) for name, t in after},
        "adapter": (adapter["r"], {name: float(t.abs().sum()) for name, t in weights}),
    }


def test_lora_has_quantized_base_weights_and_learns(found):
    model = build_policy("dense", size="tiny", seed=1)
    mxrl.convert(model, "mxfp4+mbs")
    with rollout_weights(model):
        expected = _held(model)
    for seen in (rank["lora"] for rank in found):
        sent = {name.replace(".base_layer", ""): value for name, value in seen["before"].items()}
        assert {name: sent[name] for name in expected} == expected
        assert seen["after"] == seen["before"]  # the base is frozen
        rank, weights = seen["adapter"]
        assert rank == 4 and len(weights) == 2 * len(expected)
        assert all(value > 0 for name, value in weights.items() if "lora_B" in name)  # zero at the start


def _references(folder: Path) -> dict[str, Any]:
    found = {}
    for asked in (False, True):
        os.environ[ENVIRONMENT] = VerlConfig(RECIPE, reference=asked).to_json()
        built = engine(folder, "dense", reference=True)
        found["reference", asked] = built.plan is not None, logps(built, IDS)
    return found


def test_the_reference_is_quantized_only_if_asked(found):
    for asked in (False, True):
        model = build_policy("dense", size="tiny", seed=1)
        if asked:
            mxrl.convert(model, RECIPE)
        ours = score(model, IDS, torch.ones_like(IDS), IDS.shape[1] - 1).logps
        for seen in found:
            converted, theirs = seen["reference", asked]
            assert converted == asked and (theirs - ours).abs().max() < 1e-5

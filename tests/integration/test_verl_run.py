"""GRPO through verl's own main_ppo on the CPU: Ray, two FSDP2 ranks on gloo, W4A4 with AQN, dense and MoE.

About a minute a run on two idle cores. What is compared with the TRL path: the bits of every weight that the rollout
decodes with, and the gap metrics. A run whose rank is killed, and which is resumed, ends with the same weights.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import mxrl
from mxrl.integrations.verl.config import PLUGIN, VerlConfig
from mxrl.integrations.verl.policy import Policy
from mxrl.nn import aqn_noise, rollout_weights
from mxrl.rl.gap import gap_stats
from mxrl.rl.policy import build_policy, char_tokenizer, save_policy
from mxrl.rl.rollout import sample, score
from mxrl.rl.tasks import load_task

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("verl") is None, reason="verl is not installed: pip install 'mxrl[verl]'"
)

HERE = Path(__file__).parent
RECIPE, SEED, STEPS = "mxfp4+mbs+of+aqn", 5, 3
TIMEOUT = 1200  # seconds; a minute or two where nothing else runs


def problems() -> list[Any]:
    return load_task("chain", seed=0, n=12, numbers=(2, 3), digits=(1, 2))


def overrides(folder: Path, out: Path) -> list[str]:
    model, actor, rollout = (f"actor_rollout_ref.{name}." for name in ("model", "actor", "rollout"))
    return [
        f"data.train_files={folder}/train.parquet", f"data.val_files={folder}/train.parquet", "data.shuffle=False",
        "data.train_batch_size=4", "data.max_prompt_length=32", "data.max_response_length=16",
        "data.dataloader_num_workers=0",
        "algorithm.adv_estimator=grpo", "algorithm.rollout_correction.rollout_is=token",
        f"reward.custom_reward_function.path={HERE}/verl_worker.py", "reward.num_workers=1",
        f"{model}path={folder}/model", f"{model}tokenizer_path={folder}/tokenizer", f"{model}use_remove_padding=False",
        f"+{model}override_config.attn_implementation=eager",
        f"{actor}strategy=fsdp2", f"{actor}ppo_mini_batch_size=4", f"{actor}ppo_micro_batch_size_per_gpu=4",
        f"{actor}optim.lr=1e-3", f"{actor}fsdp_config.use_torch_compile=False",
        f"+{actor}fsdp_config.mixed_precision={{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}}",
        f"{rollout}name=mxrl", f"{rollout}n=4", f"{rollout}dtype=float32",
        f"{rollout}log_prob_micro_batch_size_per_gpu=4", f"{rollout}agent.num_workers=1",
        "trainer.device=cpu", "trainer.n_gpus_per_node=2", "trainer.nnodes=1", f"trainer.total_training_steps={STEPS}",
        "trainer.val_before_train=False", "trainer.save_freq=1", "trainer.logger=[file]",
        f"trainer.default_local_dir={out}/checkpoints", f"hydra.run.dir={out}/hydra",
        f"trainer.v1.sampler.custom_sampler.path={HERE}/verl_worker.py",
        "trainer.v1.sampler.custom_sampler.name=Sorted",
        "ray_kwargs.ray_init.num_cpus=32", "+ray_kwargs.ray_init.num_gpus=2",
        "+ray_kwargs.ray_init.include_dashboard=False",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        f"+mxrl.recipe={RECIPE}", f"+mxrl.seed={SEED}",
    ]  # fmt: skip


def grpo(folder: Path, out: Path, *more: str, die: str = "") -> tuple[int, str]:
    """main_ppo with the policy and the data in `folder`: (exit code, what all processes printed)."""
    (out / "digests").mkdir(parents=True, exist_ok=True)
    environment = {
        **{name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        "VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": f"{PLUGIN},verl_mortal" if die else PLUGIN,
        "MXRL_TEST_DIE": die,
        "MXRL_VERL_DIGESTS": str(out / "digests"), "VERL_FILE_LOGGER_PATH": str(out / "log.jsonl"),
        "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0",
    }  # fmt: skip
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *overrides(folder, out), *more]
    done = subprocess.run(
        command, env=environment, cwd=out, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT
    )
    (out / "output.txt").write_text(done.stdout)
    return done.returncode, done.stdout


def prepared(folder: Path, kind: str) -> Path:
    pytest.importorskip("datasets")
    from mxrl.integrations.verl.tasks import write_parquet, write_tokenizer

    folder.mkdir(exist_ok=True)
    save_policy(build_policy(kind, size="tiny", seed=1), char_tokenizer(), folder / "model", dtype=torch.float32)
    write_tokenizer(folder / "tokenizer")
    write_parquet(folder / "train.parquet", problems())
    return folder


def logged(out: Path) -> list[dict[str, float]]:
    return [json.loads(line)["data"] for line in (out / "log.jsonl").read_text().splitlines()]


def weights_at(out: Path, step: int) -> dict[str, torch.Tensor]:
    """The master weights of a checkpoint, from the shards of both ranks."""
    folder = out / "checkpoints" / f"global_step_{step}" / "actor"
    shards = [torch.load(folder / f"model_world_size_2_rank_{rank}.pt", weights_only=False) for rank in (0, 1)]
    return {name: torch.cat([shard[name]._local_tensor for shard in shards]) for name in shards[0]}


def expected_digests(kind: str, masters: dict[str, torch.Tensor], t: int) -> dict[str, str]:
    """What a rollout of the TRL path computes with: `rollout_weights` of these masters with the noise of rollout t."""
    model = build_policy(kind, size="tiny", seed=1)
    model.load_state_dict(masters)
    mxrl.convert(model, RECIPE)
    policy = Policy(build_policy(kind, size="tiny", seed=8), VerlConfig(RECIPE))
    with rollout_weights(model, aqn_noise(RECIPE, SEED, t, STEPS)):
        from mxrl.nn import quantized_layers

        held = {
            f"{layer.name}.{a}": (layer.module.held if layer.is_linear else layer.module.mxrl_state.held[a]).value
            for layer in quantized_layers(model)
            for a in layer.weights
        }
    policy.load({**model.state_dict(), **held}.items())
    return policy.digest()


def check_run(kind: str, out: Path, output: str, rollouts: int) -> None:
    """Banners, metrics, and the bits of every synchronization."""
    ranks = re.findall(rf"\[rank (\d) of 2\]: actor Qwen3\w*ForCausalLM, recipe {re.escape(RECIPE)}", output)
    assert sorted(ranks) == ["0", "1"]
    names = re.findall(r"\[rank \d of 2\]: actor .* names (\w+)", output)
    assert len(names) == 2 and len(set(names)) == 1
    assert output.count("came quantized, the same as in training") == rollouts

    rows = logged(out)
    assert [row["training/global_step"] for row in rows] == [1, 2, 3]
    sigmas = [aqn_noise(RECIPE, SEED, t, STEPS).sigma for t in range(STEPS)]  # type: ignore[union-attr]
    assert [row["actor/aqn/sigma"] for row in rows] == pytest.approx(sigmas)
    for row in rows:
        assert row["gap/k3"] == pytest.approx(row["rollout_corr/k3_kl"], rel=1e-3)  # verl's, in float32
        assert row["gap/ess"] == pytest.approx(row["rollout_corr/rollout_is_eff_sample_size"], rel=1e-4)
        assert 0 < row["gap/mean_abs"] < 0.3 and row["actor/grad_norm"] > 0

    for step in range(STEPS + 1):
        masters = weights_at(out, step) if step else build_policy(kind, size="tiny", seed=1).state_dict()
        expected = expected_digests(kind, masters, step)
        for rank in range(rollouts):
            assert json.loads((out / "digests" / f"step-{step}-rollout-{rank}.json").read_text()) == expected


def trl_gap(kind: str) -> dict[str, float]:
    """The gap of the first step as the TRL path has it: drawn under rollout_weights, scored by the training policy."""
    model = build_policy(kind, size="tiny", seed=1)
    mxrl.convert(model, RECIPE)
    tokenizer = char_tokenizer()
    prompts = [tokenizer(p.prompt)["input_ids"] for p in problems()[:4] for _ in range(16)]
    with rollout_weights(model, aqn_noise(RECIPE, SEED, 0, STEPS)):
        rollout = sample(model, prompts, max_new_tokens=16, eos_token_id=2, pad_token_id=0, seed=0)
    train = score(model, *rollout.inputs(), rollout.completion_ids.shape[1])
    return gap_stats(train.logps, rollout.logps, rollout.completion_mask).metrics()


def check_gap(kind: str, out: Path) -> None:
    """The same metrics as TRL's; other samples, so the figures of a step agree roughly."""
    theirs, ours = trl_gap(kind), logged(out)[0]
    assert {name for name in ours if name.startswith("gap/")} == set(theirs)
    assert ours["gap/mean_abs"] == pytest.approx(theirs["gap/mean_abs"], rel=0.5)
    assert ours["gap/pearson"] == pytest.approx(theirs["gap/pearson"], abs=0.02)


ONE_ROLLOUT = ("actor_rollout_ref.rollout.tensor_model_parallel_size=2",)
REPEATABLE = (*ONE_ROLLOUT, "actor_rollout_ref.rollout.full_determinism=True")


def test_moe(tmp_path):
    """Two rollouts, one a rank; the samples of a batch are decoded together."""
    folder = prepared(tmp_path / "moe", "moe")
    code, output = grpo(folder, tmp_path / "run", "actor_rollout_ref.rollout.tensor_model_parallel_size=1")
    assert code == 0, output[-3000:]
    check_run("moe", tmp_path / "run", output, rollouts=2)
    check_gap("moe", tmp_path / "run")


def test_dense_and_a_killed_rank(tmp_path):
    """One rollout for both ranks. Killed in its second step and resumed, a run ends with the same weights."""
    folder = prepared(tmp_path / "dense", "dense")
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    code, output = grpo(folder, whole, *REPEATABLE)
    assert code == 0, output[-3000:]
    check_run("dense", whole, output, rollouts=1)
    check_gap("dense", whole)

    code, output = grpo(folder, broken, *REPEATABLE, die="1:1")
    assert code != 0 and not (broken / "checkpoints" / "global_step_2").exists()
    code, output = grpo(folder, broken, *REPEATABLE)
    assert code == 0, output[-3000:]
    for step in (1, 2, 3):
        ours, theirs = weights_at(broken, step), weights_at(whole, step)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours), step
    first, last = weights_at(whole, 1), weights_at(whole, 3)
    assert any(not torch.equal(first[name], last[name]) for name in first)


def test_a_typo_ends_in_one_line(tmp_path):
    """Before Ray starts; the exit code is 2."""
    folder = prepared(tmp_path / "dense", "dense")
    code, output = grpo(folder, tmp_path / "run", *ONE_ROLLOUT, "+mxrl.skp=[a]")
    assert code == 2
    assert "mxrl: mxrl.skp is no key (did you mean 'skip'?); possible: recipe, skip, seed" in output
    assert "Traceback" not in output and "ray" not in output.lower().replace("array", "")

#!/usr/bin/env bash
# Qwen3-30B-A3B-Base on GSM8K in W4A4 MXFP4: GRPO + TIS, Megatron with expert parallelism, vLLM; one node of 8 GPUs of
# 141 GB. README.md says whose settings these are.
#   DATA=data/gsm8k OUT=runs/30b RECIPE=mxfp4+mbs+of:.5+aqn SEED=0 bash experiments/verl/qwen3-30b-a3b.sh [more overrides]
set -euo pipefail

PYTHON=${PYTHON:-python}
MODEL=${MODEL:-Qwen/Qwen3-30B-A3B-Base}
DATA=${DATA:-data/gsm8k}
OUT=${OUT:-runs/verl/qwen3-30b-a3b}
RECIPE=${RECIPE:-mxfp4+mbs+of:.5+aqn}
SEED=${SEED:-0}
GPUS=${GPUS:-8}
NODES=${NODES:-1}

mkdir -p "$OUT"
export CUDA_DEVICE_MAX_CONNECTIONS=1 # Megatron overlaps communication by the order of its launches
export VERL_FILE_LOGGER_PATH="$OUT/log.jsonl"
# refuses to start where the entry point isn't installed
export VERL_USE_EXTERNAL_MODULES=mxrl.integrations.verl.plugin
[ -e "$DATA/test.parquet" ] || "$PYTHON" "$(dirname "$0")/data.py" "$DATA"

arguments=(
    model_engine=megatron
    # ours
    "+mxrl.recipe='$RECIPE'"
    +mxrl.seed="$SEED"
    # TIS, C = 2
    algorithm.rollout_correction.rollout_is=token
    algorithm.rollout_correction.rollout_is_threshold=2.0
    actor_rollout_ref.rollout.calculate_log_probs=True
    # GRPO
    algorithm.adv_estimator=grpo
    algorithm.use_kl_in_reward=False
    actor_rollout_ref.actor.use_kl_loss=False
    actor_rollout_ref.actor.entropy_coeff=0
    actor_rollout_ref.actor.clip_ratio=0.2
    actor_rollout_ref.actor.loss_agg_mode=token-mean
    actor_rollout_ref.rollout.n=8
    actor_rollout_ref.rollout.temperature=1.0
    # GSM8K, 1024 new tokens
    data.train_files="$DATA/train.parquet"
    data.val_files="$DATA/test.parquet"
    data.seed="$SEED"
    data.train_batch_size=128
    data.max_prompt_length=512
    data.max_response_length=1024
    reward.custom_reward_function.path=pkg://mxrl.integrations.verl.tasks
    # the model, and Megatron: a rank has 16 of a block's 128 experts, whole (no tensor parallelism cuts a matrix)
    actor_rollout_ref.model.path="$MODEL"
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=1
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=1
    actor_rollout_ref.actor.megatron.expert_model_parallel_size=8
    actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1
    actor_rollout_ref.actor.megatron.param_offload=True
    actor_rollout_ref.actor.megatron.optimizer_offload=True
    actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full
    actor_rollout_ref.actor.megatron.override_transformer_config.recompute_method=uniform
    actor_rollout_ref.actor.megatron.override_transformer_config.recompute_num_layers=1
    +actor_rollout_ref.actor.megatron.override_transformer_config.moe_router_dtype=fp32
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.ppo_mini_batch_size=64
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192
    # vLLM: experts have K = 768, which MBS's macro-blocks of 128 let be cut in 2 but not in 4
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.tensor_model_parallel_size=2
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6
    # the run; validation is greedy
    trainer.n_gpus_per_node="$GPUS"
    trainer.nnodes="$NODES"
    trainer.total_training_steps=100
    trainer.test_freq=10
    trainer.save_freq=10
    trainer.max_actor_ckpt_to_keep=1
    "trainer.logger=[console,file]"
    trainer.project_name=mxrl
    trainer.experiment_name=qwen3-30b-a3b
    trainer.default_local_dir="$OUT/checkpoints"
    hydra.run.dir="$OUT/hydra"
)
exec "$PYTHON" -m verl.trainer.main_ppo "${arguments[@]}" "$@"

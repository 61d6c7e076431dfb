"""A GRPO trainer small enough for a test: two layers of width 64, prompts of the chain task, a reward with variance."""

from typing import Any

from datasets import Dataset

from mxrl.integrations.trl import GRPOConfig, GRPOTrainer
from mxrl.rl.policy import build_policy, char_tokenizer
from mxrl.rl.rewards import chain_answer
from mxrl.rl.tasks import load_task


def digits(completions: Any, **columns: Any) -> list[float]:
    """Share of digits: a random policy's completions differ in it, so that gradients aren't zero."""
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]


def tiny_trainer(
    out: Any,
    recipe: str = "mxfp4+mbs+of+aqn",
    *,
    kind: str = "dense",
    rows: int = 64,
    policy: Any = None,
    **options: Any,
) -> GRPOTrainer:
    """GRPOTrainer on the CPU in float32; options go to the trainer where it knows them, else to GRPOConfig."""
    ours = ("score", "monitor_every", "rollout_batch_size", "answer_of", "contexts", "callbacks", "peft_config",
            "tools", "rollout_func", "config_class", "eval_dataset", "reward_funcs")  # fmt: skip
    trainer = {name: options.pop(name) for name in ours if name in options}
    config_class = trainer.pop("config_class", GRPOConfig)
    settings = {
        "use_cpu": True, "bf16": False, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2,
        "num_generations": 4, "max_completion_length": 10, "max_steps": 3, "logging_steps": 1, "learning_rate": 1e-3,
        "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "gradient_checkpointing": False,
        "seed": 5, "lr_scheduler_type": "constant", "optim": "adamw_torch", **options,
    }  # fmt: skip
    dataset = Dataset.from_list([p.row() for p in load_task("chain", seed=1, n=rows, split="train")])
    return GRPOTrainer(
        policy or build_policy(kind, size="tiny", seed=2),
        trainer.pop("reward_funcs", digits),
        config_class(str(out), **settings),
        dataset,
        processing_class=char_tokenizer(),
        recipe=recipe,
        **{"answer_of": chain_answer, "monitor_every": 0, **trainer},
    )


def steps(trainer: GRPOTrainer) -> list[dict[str, Any]]:
    """The logged rows of optimizer steps."""
    return [row for row in trainer.state.log_history if "loss" in row]

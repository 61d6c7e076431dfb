"""What `trl.py` relies on inside TRL, checked: TRL promises none of it.

`CONTRACT` lists, for each method of trl.GRPOTrainer that we override or depend on, its parameters and what its source
must contain. `contract_breaks()` says what moved, a line each. TRL's minor version is pinned; with another one the
trainer refuses to start if anything moved, and tests/integration/test_trl_contract.py names it.
"""

from __future__ import annotations

import inspect

import trl
from trl.trainer.grpo_trainer import GRPOTrainer

TRL_VERSION = "1.16"

# method -> (its parameters, what its source must contain)
CONTRACT: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "_generate_single_turn": (
        ("self", "prompt_ids", "images", "multimodal_fields", "num_generations", "has_tool_images"),
        (
            "if self.use_vllm:",
            "if self.state.global_step != self._last_loaded_step:",
            "self.vllm_generation.sync_weights()",
            "self._last_loaded_step = self.state.global_step",
            "_, completion_ids, logprobs, _ = self.vllm_generation.generate(",
            "[[lp[0] for lp in seq] for seq in logprobs]",
        ),
    ),
    "_generate_and_score_completions": (
        ("self", "inputs"),
        (
            "self.vllm_importance_sampling_correction",
            'output["old_per_token_logps"]',
            'output["sampling_per_token_logps"]',
            'output["importance_sampling_ratio"]',
            '"completion_mask": completion_mask',
            "min=self.vllm_importance_sampling_clip_min",
            "max=self.vllm_importance_sampling_clip_max",
        ),
    ),
    "_compute_loss": (("self", "model", "inputs"), ('per_token_loss * inputs["importance_sampling_ratio"]',)),
    "_prepare_inputs": (
        ("self", "generation_batch"),
        ("self._step % generate_every == 0 or self._buffered_inputs is None", "shuffle_sequence_dict("),
    ),
    "_calculate_rewards": (("self", "inputs", "prompts", "completions", "completion_ids_list"), ("gather(",)),
    "_get_per_token_logps_and_entropies": (
        ("self", "model", "input_ids", "attention_mask", "logits_to_keep", "batch_size", "compute_entropy"),
        ("fused_lm_head=True",),
    ),
    "_get_train_sampler": (("self", "dataset"), ("RepeatSampler(", "seed=self.args.seed")),
    "_tokenize_prompts": (("self", "prompts"), ("return prompt_ids, images, multimodal_fields",)),
    "training_step": (("self", "model", "inputs", "num_items_in_batch"), ("self._step += 1",)),
    "log": (("self", "logs", "start_time"), ("logs.update(metrics)", "self._metrics[mode].clear()")),
    "_save_checkpoint": (("self", "model", "trial"), ("super()._save_checkpoint(",)),
    "_load_optimizer_and_scheduler": (("self", "checkpoint"), ("super()._load_optimizer_and_scheduler(",)),
}


def contract_breaks(trainer: type = GRPOTrainer) -> list[str]:
    """What moved in TRL since `TRL_VERSION`, a line for each; empty when everything this module relies on is there."""
    moved = []
    for name, (parameters, needles) in CONTRACT.items():
        method = inspect.unwrap(getattr(trainer, name, None))  # type: ignore[arg-type]
        if method is None:
            moved.append(f"GRPOTrainer.{name} is gone")
            continue
        found = tuple(inspect.signature(method).parameters)
        if found[: len(parameters)] != parameters:
            moved.append(f"GRPOTrainer.{name} takes ({', '.join(found)}), not ({', '.join(parameters)}, …)")
        source = inspect.getsource(method)
        moved += [f"GRPOTrainer.{name} no longer has `{needle}`" for needle in needles if needle not in source]
    return moved


def check_version() -> None:
    if trl.__version__.rsplit(".", 1)[0] == TRL_VERSION:
        return
    moved = contract_breaks()
    if moved:
        raise RuntimeError(
            f"trl {trl.__version__}: mxrl.integrations.trl is written for trl {TRL_VERSION}, and {moved[0]}"
            f"{f' ({len(moved) - 1} more)' if len(moved) > 1 else ''}; pip install 'trl=={TRL_VERSION}.*'"
        )

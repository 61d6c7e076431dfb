"""A GRPO run from a configuration to a folder, that can be killed at any step and goes on from its last checkpoint.

    train(TrainConfig(recipe="mxfp4+mbs+of+aqn", out="runs/full"))

    <out>/config.yaml     every option, and under `run` what it ran on: device, versions, commit, pinned settings
    <out>/metrics.jsonl   a line for each optimizer step (integrations/trl.py says what is in it)
    <out>/evals.jsonl     a line for each evaluation: greedy accuracy, right or wrong for each problem; before and after
                          the run also accuracy, entropy and scores of `eval_samples` drawn completions a problem
    <out>/checkpoints/    the last ones, and the best by the rollouts' accuracy; each with the optimizer's, the
                          sampler's and AQN's state
    <out>/model/          the trained policy: its unquantized master weights, a plain Hugging Face folder; with
                          lora_rank the adapter's folder, as PEFT writes it (the base model stays where it is)
    <out>/summary.json    before, after, and how it went; written last

Resuming cuts both .jsonl files back to the checkpoint's step, so they read as if nothing had happened.
Started by torchrun or `accelerate launch`, every process takes a share (FSDP2), and the first one writes the files. A
checkpoint is the same whatever the number of processes, so a run may go on with another one.
Ctrl-C (or SIGTERM) ends the run after the step it is in and saves it; a second one ends it at once.
"""

from __future__ import annotations

import json
import platform
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from transformers import PrinterCallback
from transformers.utils.logging import disable_progress_bar

from mxrl.integrations.trl import GRPOConfig, GRPOTrainer, NonFiniteError
from mxrl.integrations.trl_shards import step_of
from mxrl.provenance import provenance
from mxrl.report.files import write_atomically
from mxrl.rl import ranks
from mxrl.rl.adapters import lora_config
from mxrl.rl.chain import STYLES, solution, style_of
from mxrl.rl.collapse import CollapsedError
from mxrl.rl.config import ConfigError, TrainConfig
from mxrl.rl.determinism import deterministic
from mxrl.rl.evaluate import Evaluation, evaluate
from mxrl.rl.folder import (
    CHECKPOINTS,
    CONFIG,
    MAY_DIFFER,
    SUMMARY,
    advice,
    cut,
    leaving_nothing_empty,
    open_run,
    read_rows,
    summarize,
)
from mxrl.rl.keeper import Keeper, stop_signals
from mxrl.rl.policy import PolicyError, load_model
from mxrl.rl.rewards import chain_answer, gsm8k_answer, text_of
from mxrl.rl.tasks import check_options, get_task, load_task

__all__ = ["MAY_DIFFER", "CollapsedError", "NonFiniteError", "read_rows", "run_from_cli", "train"]

GENERATED = ("chain", "gsm_symbolic")  # tasks with as many problems as are asked for
ANSWER_OF: dict[str, Callable[[str], Any]] = {
    "chain": chain_answer,
    "gsm_symbolic": gsm8k_answer,
    "gsm8k": gsm8k_answer,
}


def train(config: TrainConfig, *, resume: str = "auto") -> dict[str, Any]:
    """Run it, or go on with it; returns the summary, whose "status" is "done" or "interrupted".

    resume: "auto" goes on from the last complete checkpoint in `config.out` if there is one, and returns the summary
        of a run that has ended ("done", "diverged", "collapsed"); "never" starts over, replacing what a former run
        left there.
    Raises ConfigError, TaskError, PolicyError for what can't be run, NonFiniteError when the loss is no longer finite,
    CollapsedError when the policy has collapsed (collapse.py says what that is). Those two have a summary as well, with
    "reason" and the checkpoint that is "kept".
    """
    if resume not in ("auto", "never"):
        raise ConfigError(f"resume='{resume}': possible are auto and never")
    out = Path(config.out)
    device, bf16 = _device(config)
    ranks.start(device)
    with leaving_nothing_empty(out):
        checkpoint, ended = ranks.on_first(lambda: open_run(out, config, resume))
        if ended is not None:
            return ended
        with ranks.watching(lambda: advice(out)), deterministic(config.deterministic):
            return _run(config, out, checkpoint, device, bf16)


def _run(config: TrainConfig, out: Path, checkpoint: Path | None, device: str, bf16: bool) -> dict[str, Any]:
    disable_progress_bar()  # transformers' bars, one for each file read or written
    task = get_task(config.task)
    check_options(config.task, config.task_options)
    tokens = config.max_new_tokens or (128 if config.task == "chain" else 300)
    model, tokenizer = _load(config.model)
    held_out = _held_out(config)
    trainer = GRPOTrainer(
        model,
        _reward(config.task),
        _arguments(config, out, device, bf16, tokens),
        _dataset(config),
        processing_class=tokenizer,
        peft_config=lora_config(config, model, ranks.count()),
        recipe=config.recipe,
        score=config.score,
        answer_of=ANSWER_OF.get(config.task),
        contexts=_contexts(config),
        monitor_every=config.monitor_every,
        rollout_batch_size=config.rollout_batch,
    )
    run = {**config.to_dict(), "run": _run_info(trainer, device)}
    ranks.on_first(lambda: write_atomically(out / CONFIG, yaml.safe_dump(run, sort_keys=False)))

    def measure(samples: int) -> Evaluation:
        with trainer.rollout_policy() as (policy, _):
            return evaluate(
                policy,
                tokenizer,
                held_out,
                reward=task.reward,
                max_new_tokens=tokens,
                samples=max(1, samples),
                temperature=config.temperature if samples else 0.0,
                seed=config.eval_seed,  # the same draws for every run that is to be compared
                batch_size=config.eval_batch,
                style=style_of if config.task == "chain" else None,
                group=dist.group.WORLD if ranks.count() > 1 else None,
            )

    rows, evals = ranks.on_first(lambda: cut(out, step_of(checkpoint) if checkpoint else -1))
    keeper = Keeper(config, out, trainer.record.phase, measure if held_out else None, rows, evals)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(keeper)

    def lost(status: str, reason: str, kept: list[Path]) -> str:
        """Write how a run has ended that can't go on; returns the line that says so."""
        if ranks.rank() == 0:
            result = summarize(config, out, status, step=trainer.state.global_step, pinned=trainer.pinned)
            result |= {"reason": reason, "kept": str(kept[0].relative_to(out)) if kept else None}
            write_atomically(out / SUMMARY, json.dumps(result, indent=1))
        if kept:
            return f"{reason}; {kept[0]} is kept"
        why = "save_every is 0" if not config.save_every else f"the first is saved after step {config.save_every}"
        return f"{reason}; no checkpoint is kept, as {why}"

    try:
        with stop_signals(keeper):
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    except NonFiniteError as error:  # of several processes all raise it, and none waits for another any more
        raise NonFiniteError(lost("diverged", str(error), keeper.checkpoints()[-1:])) from error
    step = trainer.state.global_step
    if keeper.collapsed:
        keeper.evaluate(step)
        raise CollapsedError(ranks.on_first(lambda: lost("collapsed", keeper.collapsed, keeper.good())))
    done = step >= config.steps * config.updates
    if done:
        keeper.evaluate(step)
        if config.save_model:
            _save_model(trainer, tokenizer, out / "model")

    def end() -> dict[str, Any]:
        result = summarize(config, out, "done" if done else "interrupted", step=step, pinned=trainer.pinned)
        if done:
            write_atomically(out / SUMMARY, json.dumps(result, indent=1))
        else:
            print(f"stopped after step {step}; the same command goes on from there", file=sys.stderr)
        return result

    return ranks.on_first(end)


def run_from_cli(config: str | Path | None = None, *, resume: str = "auto", **options: Any) -> dict[str, Any]:
    """`train` for a command line: a YAML file and options over it, values as text (see TrainConfig.from_options)."""
    return train(TrainConfig.from_options(config, **options), resume=resume)


# --- what it is made of ----------------------------------------------------------------------------------------------


def _device(config: TrainConfig) -> tuple[str, bool]:
    """(cpu or cuda, whether to compute in bf16 under autocast)."""
    device = config.device if config.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device='cuda': this machine has no CUDA device; use device='cpu' or 'auto'")
    if device == "cuda" and ranks.count() == 1 and torch.cuda.device_count() > 1:
        print(
            f"this process uses one of {torch.cuda.device_count()} GPUs; all of them: torchrun --nproc-per-node "
            f"{torch.cuda.device_count()} -m mxrl train …",
            file=sys.stderr,
        )
    if config.precision != "auto":
        return device, config.precision == "bf16"
    return device, device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def _load(name: str) -> tuple[Any, Any]:
    """(float32 master model, tokenizer)."""
    try:
        return load_model(name, dtype=torch.float32)
    except PolicyError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _dataset(config: TrainConfig) -> Any:
    from datasets import Dataset

    needed = config.steps * config.prompts_per_step
    n = needed if config.task in GENERATED else None
    problems = load_task(config.task, seed=config.seed, n=n, split="train", **config.task_options)
    if len(problems) < config.prompts_per_step:
        raise ConfigError(
            f"prompts_per_step={config.prompts_per_step}: task '{config.task}' has {len(problems)} problems"
        )
    return Dataset.from_list([p.row() for p in problems])


def _held_out(config: TrainConfig) -> list[Any]:
    if not config.eval_problems:
        return []
    path = config.task_options.get("path")
    if config.task == "gsm8k" and path is not None and "{split}" not in str(path):  # the others split one file
        raise ConfigError(
            f"task_options path={path}: gsm8k would be evaluated on the problems that it trains on; name both files by "
            "{split} (gsm8k-{split}.jsonl is gsm8k-train.jsonl and gsm8k-test.jsonl), or set eval_problems=0"
        )
    return load_task(config.task, seed=config.eval_seed, n=config.eval_problems, split="test", **config.task_options)


def _contexts(config: TrainConfig, count: int = 8) -> list[str] | None:
    """Texts on which the logit noise is measured: worked solutions; None (the trainer takes prompts) elsewhere."""
    if config.task != "chain":
        return None
    problems = load_task("chain", seed=config.eval_seed, n=count, split="test", **config.task_options)
    return [f"{p.prompt}{solution(p)}" for p in problems]


def _reward(task: str) -> Callable[..., list[float]]:
    """The task's reward, which for `chain` also logs the share of each solution style."""
    judge = get_task(task).reward

    def reward(completions: Any, answer: Any, log_metric: Any = None, **columns: Any) -> list[float]:
        if task == "chain" and log_metric is not None:
            counts = Counter(style_of(text_of(c)) for c in completions)
            for style in (*STYLES, "other"):
                log_metric(f"style/{style}", counts[style] / len(completions))
        return judge(completions, answer)

    reward.__name__ = judge.__name__
    return reward


def _arguments(config: TrainConfig, out: Path, device: str, bf16: bool, max_new_tokens: int) -> GRPOConfig:
    micro, passes = config.batches(device, ranks.count())
    return GRPOConfig(
        output_dir=str(out / CHECKPOINTS),
        seed=config.seed,
        use_cpu=device == "cpu",
        fsdp=ranks.count() > 1 or None,  # type: ignore[arg-type]  # transformers takes True, its annotation doesn't
        fsdp_config=None if config.reshard is None or ranks.count() == 1 else {"reshard_after_forward": config.reshard},
        bf16=bf16,
        max_steps=config.steps * config.updates,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=passes,
        steps_per_generation=passes * config.updates_per_rollout,
        num_iterations=config.iterations,
        num_generations=config.samples_per_prompt,
        max_completion_length=max_new_tokens,
        temperature=config.temperature,
        shuffle_dataset=config.task not in GENERATED,
        loss_type=config.loss,
        scale_rewards=config.scale_rewards,
        beta=0.0,
        epsilon=config.clip,
        epsilon_high=config.clip_high,
        vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_max=config.tis_cap,
        cast_lm_head_to_fp32=config.lm_head_fp32,
        learning_rate=config.lr,
        lr_scheduler_type="constant_with_warmup" if config.warmup else "constant",
        warmup_steps=config.warmup,
        optim="adamw_torch_fused" if device == "cuda" else "adamw_torch",
        adam_beta2=config.beta2,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        gradient_checkpointing=config.gradient_checkpointing,
        logging_steps=1,
        save_strategy="steps" if config.save_every else "no",
        save_steps=max(1, config.save_every * config.updates),
        # the former one stays until the new one is complete, and the last good one (see keeper.py) whatever comes
        save_total_limit=3 if config.stop_collapsed else 2,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=device == "cuda",
    )


def _run_info(trainer: GRPOTrainer, device: str) -> dict[str, Any]:
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    args = trainer.args
    return {
        **provenance(name, "torch", "transformers", "trl", "accelerate", "datasets"),
        "compute_dtype": str(trainer.compute_dtype or torch.float32).removeprefix("torch."),
        "micro_batch": args.per_device_train_batch_size,
        "passes_per_update": args.gradient_accumulation_steps,
        "processes": ranks.count(),
        "rollouts": trainer.total_rollouts,
        "pinned": trainer.pinned,
        "quantized_parameters": trainer.conversion.quantized_parameters,
        "parameters": trainer.conversion.parameters,
        "trained_parameters": sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
    }


def _save_model(trainer: GRPOTrainer, tokenizer: Any, folder: Path) -> None:
    temporary = folder.with_name(f".{folder.name}.tmp")
    ranks.on_first(lambda: shutil.rmtree(temporary, ignore_errors=True))
    trainer.save_model(str(temporary))  # of a sharded model every process has its part in it

    def finish() -> None:
        tokenizer.save_pretrained(str(temporary))
        shutil.rmtree(folder, ignore_errors=True)
        temporary.replace(folder)

    ranks.on_first(finish)

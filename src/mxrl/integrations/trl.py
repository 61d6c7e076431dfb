"""GRPO on a quantized policy: TRL's trainer, with the rollout through quantized weights and its gap to training known.

    trainer = GRPOTrainer(model, reward_funcs, args, train_dataset, recipe="mxfp4+mbs+of+aqn")      # TRL's, plus recipe

One step, and where this module comes in:

    weights ──Q(w + AQN noise)──> rollout policy ──sample──> tokens, logp_rollout     QuantizedRollout (ours)
    weights ──Q(w)─────────────> training policy ──score──> logp_train, no gradient   TRL, before the update
    TIS weight  min(exp(logp_train − logp_rollout), C), C = 2                          TRL, configured here
    reward, advantage, clipped loss, update of the unquantized master weights          TRL

TRL computes importance weights for vLLM only. So the trainer is built without vLLM, and then given an object with
vLLM's two methods (`sync_weights`, `generate`). That leans on TRL's internals, all of it here and in trl_rollout.py;
what must hold of them is checked in trl_contract.py, and another minor version of TRL is refused if anything moved.
Padding is cut in trl_passes.py; sharding over several processes and checkpoints are in trl_shards.py.

Randomness. Everything drawn for a rollout comes from (seed, rollout batch, row of the whole batch), AQN's noise from
(seed, rollout, parameter name): a run that resumes draws what it would have drawn, two recipes with one seed see the
same prompts, and several processes draw what one would.

Several processes (trl_shards.py): the model is sharded, each process decodes its share of the prompts on an unsharded
replica of quantized weights, and TRL gathers rewards, advantages and token counts over all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.grpo_config import GRPOConfig as TrlConfig
from trl.trainer.utils import create_model_from_path, get_config_model_id

import mxrl
from mxrl.integrations.trl_config import GRPOConfig, UnsupportedError, pin, refuse_dropout
from mxrl.integrations.trl_contract import check_version
from mxrl.integrations.trl_passes import KNOWN, scored_by_length, sorted_batches
from mxrl.integrations.trl_rollout import (
    EpochRepeatSampler,
    QuantizedRollout,
    in_compute_dtype,
    real_positions,
    seeded,
    without_autocast,
)
from mxrl.integrations.trl_shards import ShardedTrainer, check_sharding
from mxrl.nn import rollout_weights, shared_weights
from mxrl.nn.weights import Noise, RolloutReport
from mxrl.recipes import Recipe
from mxrl.rl.engine_generate import left_pad
from mxrl.rl.gap import gap_stats
from mxrl.rl.monitor import distinct, logit_noise, weight_stats
from mxrl.rl.policy import resolve_model
from mxrl.rl.rewards import text_of
from mxrl.rl.rollout import (
    decode_gap,
    derived_seed,
    takes_positions,
    without_cudnn_attention,
)
from mxrl.rl.steps import StepRecord

SCORES = ("decode", "forward")
DECODE_ROWS = 32  # sequences of a rollout that the monitor scores again by a full pass


class NonFiniteError(RuntimeError):
    """The loss or the gradient is NaN or infinite; the message says at which step and what was measured there."""


class GRPOTrainer(ShardedTrainer):
    """trl.GRPOTrainer whose policy is quantized as `recipe` says, in rollout and in training.

    model: as TRL takes it (a model, a folder, a hub id), or "policy:dense" / "policy:moe", the shipped policies.
    Arguments beyond TRL's (all by keyword):
        recipe: text or Recipe. "bf16" takes the same path without quantization, as the baseline to compare with.
        score: where logp_rollout comes from. "decode": recorded while sampling with the cache (what an inference
            engine gives). "forward": the rollout's tokens scored by the very pass that training uses.
        answer_of: completion text -> what counts as its answer, for the number of distinct answers a group.
        contexts: texts on which the logit noise is measured (default: the first prompts of train_dataset).
        monitor_every: every how many rollouts weights, logit noise and decoding gap are measured; 0 never.
        rollout_batch_size: sequences decoded together (default: all of a rollout).

    The master weights are never written by a rollout. With beta, the reference is the unquantized model, so that the KL
    holds the quantization error too; with LoRA it is the policy without its adapters, and it doesn't.

    `conversion` is the report of what was converted, `pinned` the settings that decide the objective. Raises
    UnsupportedError or SamplingError, one line each, for settings (dropout, for one) that would bypass or bias the
    rollout, and NonFiniteError during training.
    """

    # TRL's attributes, declared wider or narrower there than what they hold
    model: Any
    args: Any
    train_dataset: Any
    accelerator: Any
    _blocks: ExitStack | None = None  # what a run enters and leaves at its end
    _shared: Any = None  # the SharedWeights of a run, from its first training step on
    num_generations: Any
    num_generations_eval: Any
    _tokenizer: Any
    _buffered_inputs: Any
    max_completion_length: Any
    pad_to_multiple_of: Any
    vllm_generation: Any

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: TrlConfig | None = None,
        *rest: Any,
        recipe: str | Recipe,
        score: str = "decode",
        answer_of: Callable[[str], Hashable] | None = None,
        contexts: Sequence[str] | None = None,
        monitor_every: int = 25,
        rollout_batch_size: int | None = None,
        **kwargs: Any,
    ):
        check_version()
        if score not in SCORES:
            raise UnsupportedError(f"GRPOTrainer score='{score}': possible are {' and '.join(SCORES)}")
        if rollout_batch_size is not None and rollout_batch_size < 1:
            raise UnsupportedError(f"GRPOTrainer rollout_batch_size={rollout_batch_size} must be at least 1")
        if args is None:
            name = model if isinstance(model, str) else get_config_model_id(model.config)
            args = GRPOConfig(f"{name.split('/')[-1]}-GRPO")
        pin(args, kwargs)
        check_sharding(args)
        args.logging_nan_inf_filter = False  # it would replace a NaN loss by an average; ours stops
        self.recipe = Recipe.parse(recipe)
        self.score, self.answer_of, self.contexts = score, answer_of, contexts
        self.monitor_every, self.rollout_batch_size = monitor_every, rollout_batch_size
        if isinstance(model, str):  # as TRL loads it, but converted before PEFT wraps it, and on one device
            options: Any = args.model_init_kwargs or {}
            model = create_model_from_path(resolve_model(model), **{"device_map": None, **options})
        self.conversion = mxrl.convert(model, self.recipe)
        super().__init__(model, reward_funcs, args, *rest, **kwargs)
        if args.cast_lm_head_to_fp32:
            without_autocast(self.accelerator.unwrap_model(self.model).get_output_embeddings())
        refuse_dropout(self.model)
        policies: list[Any] = [model for model in (self.model, self.ref_model) if model is not None]
        for policy in filter(takes_positions, policies):
            policy.register_forward_pre_hook(real_positions, with_kwargs=True)
        self.vllm_generation = QuantizedRollout(self)
        self._last_loaded_step = -1
        self.use_vllm = True  # from here on, TRL's importance sampling is on
        self.record = StepRecord(self.accelerator.device)
        self._context_ids: tuple[Tensor, Tensor] | None = None
        if self.accelerator.is_main_process:
            print(f"mxrl GRPO: {', '.join(f'{k} {v}' for k, v in self.pinned.items())}", flush=True)

    def _send_telemetry(self) -> None:
        """TRL reports usage to its authors; a run of ours stays at home."""

    @property
    def pinned(self) -> dict[str, Any]:
        """The settings that decide the objective, for the record."""
        args = self.args
        high = args.epsilon if args.epsilon_high is None else args.epsilon_high
        tis = f"{args.vllm_importance_sampling_mode} C={args.vllm_importance_sampling_clip_max:g}" if (
            args.vllm_importance_sampling_correction and args.vllm_importance_sampling_clip_max is not None
        ) else str(args.vllm_importance_sampling_correction and args.vllm_importance_sampling_mode)  # fmt: skip
        return {
            "recipe": str(self.recipe),
            "loss": args.loss_type,
            "scale_rewards": args.scale_rewards,
            "beta": args.beta,
            "clip": f"[{1 - args.epsilon:g}, {1 + high:g}]",
            "updates_per_rollout": self.updates_per_rollout,
            "iterations": args.num_iterations,
            "TIS": tis,
            "temperature": args.temperature,
            "score": self.score,
        }

    @property
    def updates_per_rollout(self) -> float:
        """Optimizer steps for each rollout, reuse of its samples (num_iterations) included."""
        updates = self.args.steps_per_generation * self.args.num_iterations / self.args.gradient_accumulation_steps
        return int(updates) if updates == int(updates) else updates

    @property
    def total_rollouts(self) -> int:
        """T of AQN's schedule: how many times this run synchronizes its weights."""
        steps = self.state.max_steps if self.state.max_steps > 0 else self.args.max_steps
        return max(1, math.ceil(steps / max(1, self.updates_per_rollout)))

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """Autocast's dtype; None where the model computes in its weights' own."""
        return torch.bfloat16 if self.args.bf16 else torch.float16 if self.args.fp16 else None

    # --- rollout ---

    @contextmanager
    def rollout_policy(self, noise: Noise | None = None) -> Iterator[tuple[Any, RolloutReport]]:
        """(model, report): inside, the model's quantized weights are computed once, under the run's autocast.

        Of a sharded model it is the replica, and every process has to enter.
        """
        model = self.accelerator.unwrap_model(self.model_wrapped)
        dtype = self.compute_dtype
        policy = model if self.replica is None else self.replica.model
        with self.accelerator.autocast(), in_compute_dtype(model), ExitStack() as block:
            with self.record.phase("sync"):
                held = (
                    rollout_weights(model, noise, dtype=dtype)
                    if self.replica is None
                    else self.replica.filled(model, noise, dtype=dtype)
                )
                report = block.enter_context(held)
            yield policy, report

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """What is drawn here (tokens, the batch's shuffle) is a function of the seed and the place in the run.

        The seed is the same in every process: `QuantizedRollout.generate` says which rows of the batch are its own.
        """
        mode = "train" if self.model.training else "eval"
        # the rollout's number, not TRL's count of micro-batches, which their size and the processes change
        rollout = self._step // (self.args.steps_per_generation * self.num_iterations)
        place = rollout if mode == "train" else (self.state.global_step, len(self._metrics["eval"].get("reward", ())))
        before = self._buffered_inputs
        with seeded(derived_seed(self.args.seed, mode, place), self.accelerator.device):
            inputs = super()._prepare_inputs(generation_batch)
        if mode == "eval" or self._buffered_inputs is before or not (self.by_length and KNOWN.issuperset(inputs)):
            return inputs
        self._buffered_inputs = sorted_batches(self._buffered_inputs)
        return self._buffered_inputs[self._step % self.args.steps_per_generation]

    @property
    def by_length(self) -> bool:
        """Whether a pass holds sequences of about one length (trl_passes.py): where one update takes all of a rollout,
        and nothing in its loss is a mean over a pass.
        """
        args = self.args
        return (
            args.steps_per_generation == args.gradient_accumulation_steps
            and args.loss_type != "bnpo"
            and args.top_entropy_quantile == 1.0
            and not (self._entropy_bonus_enabled or self.aux_loss_enabled)
        )

    def _score_as_training(self, model: Any, inputs: tuple[Tensor, Tensor], length: int) -> Tensor:
        """Log-probabilities by TRL's own pass, in the shapes and batches in which it will score them again."""
        ids, mask = inputs
        if self.pad_to_multiple_of:
            left = -(ids.shape[1] - length) % self.pad_to_multiple_of
            right = -length % self.pad_to_multiple_of
            ids = nn.functional.pad(ids, (left, right), value=self._tokenizer.pad_token_id)
            mask = nn.functional.pad(mask, (left, right), value=0)
            length += right
        size = self.args.per_device_train_batch_size if self.model.training else self.args.per_device_eval_batch_size
        with torch.no_grad(), disable_gradient_checkpointing(model, self.args.gradient_checkpointing_kwargs):
            return self._get_per_token_logps_and_entropies(model, ids, mask, length, batch_size=size)[0]

    def _rollout_drawn(self, model: Any, rollout: Any, report: RolloutReport) -> None:
        """Metrics that need the rollout's own weights, which are dropped right after."""
        drawn = torch.stack([rollout.entropies.double().sum(), rollout.completion_mask.sum().double()])
        nats, tokens = self.accelerator.reduce(drawn, reduction="sum").tolist()
        own = {
            "rollout": float(self.vllm_generation.rollout),
            "rollout/entropy": nats / max(tokens, 1.0),
            "rollout/tokens": tokens,
            "aqn/sigma": report.sigma or 0.0,
            "aqn/effective_sigma": report.effective_sigma,
        }
        if self._monitors():
            rows = slice(0, DECODE_ROWS)
            part = type(rollout)(**{name: value[rows] for name, value in vars(rollout).items()})
            with self.record.phase("monitor"):
                own.update(decode_gap(model, part, temperature=self.temperature, chunk=DECODE_ROWS).metrics())
        self.record.drawn(own)

    def _monitors(self) -> bool:
        return self.monitor_every > 0 and self.vllm_generation.rollout % self.monitor_every == 0

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        output = super()._generate_and_score_completions(inputs)
        if self.model.training:
            self._measure(output)
        return output

    def _measure(self, output: dict[str, Any]) -> None:
        """The gap between rollout and training, and now and then the weights and the logit noise."""
        train = output.get("old_per_token_logps")
        if train is None:  # importance sampling is switched off: TRL didn't need it
            ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
            mask = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
            train = self._score_as_training(self.model, (ids, mask), output["completion_ids"].shape[1])
        cap = self.args.vllm_importance_sampling_clip_max
        stats = gap_stats(
            train, output["sampling_per_token_logps"], output["completion_mask"], cap=math.inf if cap is None else cap
        )
        for part in gather_object([stats]):
            self.record.gap = self.record.gap + part
        self.record.fresh = True
        if not self._monitors():
            return
        with self.record.phase("monitor"):
            model = self.accelerator.unwrap_model(self.model_wrapped)
            if self.recipe.quantizes:
                weights = weight_stats(model, dtype=self.compute_dtype)
                if weights is not None:
                    self.record.rollout["weights/rel_mse"] = weights.rel_mse
                    self.record.rollout["weights/deadzone"] = weights.deadzone_fraction
                    self.record.rollout["weights/cos"] = weights.cos_scale_grid
                with self.accelerator.autocast():
                    self.record.rollout["logits/sigma_eta"] = logit_noise(model, *self._contexts())

    def _contexts(self, count: int = 8) -> tuple[Tensor, Tensor]:
        """Token ids and mask of the fixed contexts of the logit noise."""
        if self._context_ids is None:
            if self.contexts:
                ids = [self._tokenizer(text)["input_ids"] for text in self.contexts]
            else:
                rows = [row["prompt"] for row, _ in zip(self.train_dataset, range(count), strict=False)]
                ids = self._tokenize_prompts(rows)[0]
            self._context_ids = left_pad(ids, self._tokenizer.pad_token_id, self.accelerator.device)
        return self._context_ids

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Tensor:
        with self.record.phase("reward"):
            rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        mode = "train" if self.model.training else "eval"
        group = self.num_generations if mode == "train" else self.num_generations_eval
        right = (rewards[:, 0] >= 1).float().mean().item() if rewards.shape[1] else math.nan
        self._metrics[mode]["accuracy"].append(right)  # the first reward judges correctness
        if len(completions) % group == 0:
            texts = [text_of(c) for c in completions]
            answers = [self.answer_of(t) for t in texts] if self.answer_of else texts
            counts = gather_object([distinct(answers, group)])  # every process has as many groups
            self._metrics[mode]["group/distinct_answers"].append(sum(counts) / len(counts))
        return rewards

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        **kwargs: Any,
    ) -> Any:
        theirs = super()._get_per_token_logps_and_entropies
        learns = torch.is_grad_enabled()
        size = batch_size or len(input_ids)
        with nullcontext() if learns else self.record.phase("score"):
            if self.by_length and not any(isinstance(value, (Tensor, list)) for value in kwargs.values()):
                found = scored_by_length(
                    lambda ids, mask, keep: theirs(model, ids, mask, keep, **kwargs),
                    input_ids, attention_mask, logits_to_keep, size, self.pad_to_multiple_of,
                )  # fmt: skip
            else:
                found = theirs(model, input_ids, attention_mask, logits_to_keep, batch_size=size, **kwargs)
        entropies = found[1]
        if learns and entropies is not None:
            self.record.entropies(entropies.detach(), attention_mask[:, -logits_to_keep:])
        return found

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        theirs: Any = super()._get_train_sampler(dataset)
        ours = EpochRepeatSampler(theirs.data_source, theirs.mini_repeat_count)
        vars(ours).update(vars(theirs))
        return ours

    # --- training, logging ---

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's; a step's quantized weights are computed once for its rollout, micro-batches and backward passes."""
        with without_cudnn_attention(), ExitStack() as self._blocks:
            try:
                return super().train(*args, **kwargs)
            finally:
                self._shared = self._blocks = None

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        if (
            self._shared is None and self._blocks is not None
        ):  # only now has accelerate wrapped the model, which FSDP2 needs
            model = self.accelerator.unwrap_model(self.model_wrapped)
            self._shared = self._blocks.enter_context(shared_weights(model))
        with self.record.phase("update"):  # less the phases inside it: rollout, reward, score, monitor
            loss = super().training_step(*args, **kwargs)
        # of several processes one alone may see it, and the others would wait for it: `log` sees what all of them share
        if self.accelerator.num_processes == 1 and not bool(torch.isfinite(loss).all()):
            raise NonFiniteError(self._diagnosis("loss", float(loss), self.state.global_step + 1))
        return loss

    def _diagnosis(self, what: str, value: float, step: int) -> str:
        seen = [f"{name} {number:.3g}" for name, number in {**self.record.rollout, **self.record.gap.metrics()}.items()
                if name in ("rollout/entropy", "gap/mean_abs", "gap/max_abs", "aqn/sigma")]  # fmt: skip
        return (
            f"step {step}: the {what} is {value} ({', '.join(seen)}); "
            f"recipe {self.recipe}, learning rate {self.args.learning_rate:g}: training can't go on from here"
        )

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self.model.training and "loss" in logs:
            for what, value in (("loss", logs["loss"]), ("gradient norm", logs.get("grad_norm"))):
                if value is not None and not math.isfinite(value):
                    raise NonFiniteError(self._diagnosis(what, float(value), self.state.global_step))
            if self.accelerator.num_processes > 1:
                self.record.slowest(gather_object([self.record.seconds]))
            # TRL averages the passes' means, in which a token among short sequences would weigh more
            self._metrics["train"]["entropy"] = [self.record.entropy(self.accelerator.reduce)]
            logs.update(self.record.metrics(self._metrics["train"]))
        super().log(logs, start_time)

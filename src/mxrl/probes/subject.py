"""What a probe looks at: a model that runs unquantized until it is treated, and the prompts that it is given.

    subject = open_subject("policy:dense")                             prompts of the chain task
    subject = open_subject(folder, "gsm8k:test.jsonl", prompts=64, dtype=torch.bfloat16)
    written = subject.rollout(samples=4)                               what the unquantized policy itself writes

Probes on fixed contexts (gradient, temperature, drift, routing) use the texts of that rollout: the policy's own, so the
contexts are those that RL sees. They depend on (model, dtype, prompts, seed) alone, and are drawn once.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mxrl.nn import convert, quantized_layers
from mxrl.nn.layers import canonical_name
from mxrl.probes.treatments import BASELINE, Treatment
from mxrl.rl.chain import Problem, solution
from mxrl.rl.evaluate import prompt_ids
from mxrl.rl.policy import POLICY_PREFIX, load_model
from mxrl.rl.rewards import Reward
from mxrl.rl.rollout import (
    Rollout,
    end_ids,
    inference,
    left_pad,
    pad_id,
    positions,
    sample,
    takes_positions,
)
from mxrl.rl.tasks import get_task, load_task, parse_task
from mxrl.scan import NonFiniteError, nonfinite
from mxrl.scan_workers import devices_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ProbeError(ValueError):
    """A model or a call that a probe can't work with: one line that says what it needs."""


@dataclass(frozen=True, eq=False)
class Subject:
    """A converted model (recipe bf16: it computes as before), its tokenizer, and problems with their reward.

    name: as the user gave it. task: as `chain` or `gsm8k:FILE`. max_new_tokens: of a completion. batch: sequences of a
    full forward or backward pass (decoding decides for itself).
    """

    name: str
    model: Any
    tokenizer: Any
    task: str
    problems: tuple[Problem, ...]
    reward: Reward
    max_new_tokens: int
    seed: int = 0
    batch: int = 16

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    @property
    def layers(self) -> int:
        """Decoder blocks."""
        return int(self.model.config.get_text_config().num_hidden_layers)

    @property
    def is_moe(self) -> bool:
        return any(not layer.is_linear for layer in quantized_layers(self.model))

    @property
    def pad(self) -> int:
        return pad_id(self.tokenizer)

    @property
    def eos(self) -> list[int]:
        return end_ids(self.model, self.tokenizer)

    @functools.cached_property
    def prompt_ids(self) -> list[list[int]]:
        return [prompt_ids(problem, self.tokenizer) for problem in self.problems]

    def rollout(self, *, samples: int = 1, greedy: bool = False, temperature: float = 1.0) -> Rollout:
        """`samples` completions of every prompt, side by side, as the model now computes (see `treated`)."""
        prompts = [ids for ids in self.prompt_ids for _ in range(samples)]
        return sample(
            self.model, prompts, max_new_tokens=self.max_new_tokens, eos_token_id=self.eos, pad_token_id=self.pad,
            greedy=greedy, temperature=temperature, seed=self.seed,
        )  # fmt: skip

    def texts(self, rollout: Rollout) -> list[str]:
        return self.tokenizer.batch_decode(rollout.completions(), skip_special_tokens=True)

    def logits(self, ids: Tensor, mask: Tensor, keep: int = 0) -> Tensor:
        """[B, keep or T, V] of one full forward pass, in the model's dtype, positions counted as decoding counts them.

        Raises NonFiniteError where a NaN or an Inf comes out.
        """
        counted = {"position_ids": positions(mask)} if takes_positions(self.model) else {}
        out = self.model(
            input_ids=ids, attention_mask=mask, use_cache=False, **counted, **({"logits_to_keep": keep} if keep else {})
        ).logits
        if not bool(torch.isfinite(out).all()):
            raise NonFiniteError(f"the logits of {self.name} have {nonfinite([out.flatten(0, 1)], out.shape)}")
        return out

    def need_layers(self, count: int, why: str) -> None:
        """Raise ProbeError for a model of fewer decoder blocks."""
        if self.layers < count:
            raise ProbeError(f"{self.name} has {self.layers} decoder blocks; {why} takes at least {count}")

    def need_moe(self, probe: str) -> None:
        """Raise ProbeError for a model without routed experts."""
        if not self.is_moe:
            raise ProbeError(
                f"{self.name} has no routed experts, so there is nothing for the {probe} probe; give it an MoE, as "
                f"{POLICY_PREFIX}moe"
            )

    def about(self) -> dict[str, Any]:
        """For the JSON files: what was probed."""
        config = self.model.config.get_text_config()
        return {
            "model": self.name,
            "architecture": type(self.model).__name__,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "layers": self.layers,
            "hidden": int(config.hidden_size),
            "experts": int(getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or 0),
            "dtype": str(self.dtype).removeprefix("torch."),
            "task": self.task,
            "prompts": len(self.problems),
            "max_new_tokens": self.max_new_tokens,
            "seed": self.seed,
        }


def open_subject(
    name: str,
    task: str | None = None,
    *,
    prompts: int = 64,
    split: str = "test",
    seed: int = 0,
    device: str = "auto",
    dtype: torch.dtype | None = None,
    max_new_tokens: int | None = None,
    batch: int = 16,
) -> Subject:
    """Load a causal language model and its prompts.

    name: a Hugging Face folder, a hub id, policy:dense, policy:moe. task: one of mxrl.rl.tasks, as `chain`, or
        `gsm8k:FILE`; shipped policies take `chain` by default. dtype: bfloat16 on a GPU and float32 on a CPU unless
        given. max_new_tokens: 300, for chain as many as the longest careful solution takes.
    Raises PolicyError, TaskError, OptionError, ConvertError; ProbeError for no prompts, prompts longer than the model's
    context or a missing task; NonFiniteError naming the first layer whose output isn't finite; ValueError as
    `load_model`.
    """
    if prompts < 1:
        raise ProbeError(f"prompts={prompts} must be at least 1")
    if task is None:
        if not name.startswith(POLICY_PREFIX):
            raise ProbeError(f"{name}: say what to ask it: --task gsm8k:FILE, --task gsm_symbolic, --task chain, …")
        task = "chain"
    kind, options = parse_task(task)
    problems = load_task(kind, seed=seed, n=prompts, split=split, **options)
    if max_new_tokens is None:
        max_new_tokens = max(len(solution(p)) for p in problems) + 1 if kind == "chain" else 300
    where = devices_of(device)[0]
    dtype = dtype or (torch.float32 if where == "cpu" else torch.bfloat16)
    model, tokenizer = load_model(name, dtype=dtype)
    model.to(where).requires_grad_(True)
    convert(model, "bf16")
    subject = Subject(name, model, tokenizer, task, tuple(problems), get_task(kind).reward, max_new_tokens, seed, batch)
    _check_room(subject)
    check_finite(subject)
    return subject


def _check_room(subject: Subject) -> None:
    room = getattr(subject.model.config.get_text_config(), "max_position_embeddings", None)
    for i, ids in enumerate(subject.prompt_ids):
        if not ids:
            raise ProbeError(f"the tokenizer of {subject.name} makes no tokens of prompt {i}; is it in its folder?")
        if room is not None and len(ids) + subject.max_new_tokens > room:
            raise ProbeError(
                f"prompt {i} has {len(ids)} tokens, and with {subject.max_new_tokens} new ones that is more than the "
                f"{room} positions of {subject.name}; --max-new-tokens {max(room - len(ids), 0)} is the most"
            )


def check_finite(subject: Subject) -> None:
    """One forward pass over the first prompts; NonFiniteError names the first module whose output isn't finite."""
    bad: list[str] = []

    def look(name: str, out: Any) -> None:
        value = out[0] if isinstance(out, tuple) else out
        if not bad and isinstance(value, Tensor) and value.is_floating_point() and not torch.isfinite(value).all():
            bad.append(f"the output of '{name}' has {nonfinite([value.reshape(-1, value.shape[-1])], value.shape)}")

    def hook(name: str) -> Any:
        return lambda module, arguments, out: look(name, out)

    leaves = [(canonical_name(path), m) for path, m in subject.model.named_modules() if not any(m.children())]
    handles = [module.register_forward_hook(hook(name)) for name, module in leaves]
    try:
        with inference(subject.model):
            ids, mask = left_pad(subject.prompt_ids[: subject.batch], subject.pad, subject.device)
            subject.model(input_ids=ids, attention_mask=mask, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    if bad:
        raise NonFiniteError(f"{subject.name}: {bad[0]} on the task's first prompts, before anything is quantized")


def to_decode(subject: Subject, probe: str, treatments: Iterable[str | Treatment]) -> list[Treatment]:
    """Treatments to decode under, each once, without the baseline. Raises ProbeError where there is none, for one of
    the backward pass alone, and without prompts."""
    chosen = [t for t in dict.fromkeys(map(Treatment.parse, treatments)) if str(t) != BASELINE]
    if not chosen:
        raise ProbeError(f"{probe}: no treatment to compare with {BASELINE}; give one, as mxfp4@deadzone")
    for treatment in chosen:
        if treatment.passes == "backward":
            raise ProbeError(f"{probe}: '{treatment}' changes the backward pass alone, and decoding has none")
    if not subject.problems:
        raise ProbeError(f"{probe}: no prompts to decode")
    return chosen


def blocks(model: nn.Module) -> Sequence[nn.Module]:
    """The decoder blocks, in their order. Raises ProbeError for a model that keeps them in no list of that length."""
    count = model.config.get_text_config().num_hidden_layers  # type: ignore[attr-defined]
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return list(module)
    raise ProbeError(f"{type(model).__name__} keeps its {count} decoder blocks in no list that mxrl finds")

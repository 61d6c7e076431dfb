"""Batched sampling that returns what an importance weight needs: the log-probability each token was drawn with.

Legend: B sequences, P prompt tokens (left-padded), C completion tokens (right-padded), V vocabulary.

    prompts ──pad──> prompt_ids [B, P] ──generate, cached decoding──> completion_ids [B, C]
                                                └─ a logits processor records, for every token as it is drawn,
                                                   logp [B, C], entropy [B, C] and argmax [B, C] at the temperature

The processor keeps the log-softmax of the last step only, and reads the token that was drawn from it at the next
call, so nothing of size [B, C, V] exists. The same tokens can be scored again by one full forward pass (`score`), the
way a trainer does; `decode_gap` says how far the two are apart. Under W4A4 that is not a matter of the last bit: a
difference of one rounding in an activation moves it across a 4-bit threshold.

Sampling is from the whole distribution. Under top-p, top-k or min-p the tokens come from a truncated, renormalized
distribution that the training pass never computes, and the ratio of the two is biased: `refuse_biased_sampling`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from mxrl.rl.gap import GapStats, gap_stats


class SamplingError(ValueError):
    """A way of sampling under which the importance weight would be biased."""


NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (None, 1, 1.0),
    "top_k": (None, 0),
    "min_p": (None, 0, 0.0),
    "repetition_penalty": (None, 1, 1.0),
    "typical_p": (None, 1, 1.0),
    "epsilon_cutoff": (None, 0, 0.0),
    "eta_cutoff": (None, 0, 0.0),
    "num_beams": (None, 1),
}


def refuse_biased_sampling(settings: Mapping[str, Any], source: str = "sampling") -> None:
    """Raise SamplingError where a setting truncates or reshapes the distribution the tokens are drawn from.

    settings: names and values as in transformers.GenerationConfig; names not in `NEUTRAL` are ignored.
    """
    for name, neutral in NEUTRAL.items():
        value = settings.get(name)
        if value not in neutral:
            raise SamplingError(
                f"{source}: {name}={value} draws from another distribution than the one training scores, so the "
                f"importance ratio would be biased; leave it at {neutral[-1]} and use temperature instead"
            )


@dataclass(frozen=True)
class Rollout:
    """Completions and how they were drawn. Everything is on the model's device; padding holds 0 (ids: pad_token_id)."""

    prompt_ids: Tensor  # [B, P] int64, left-padded
    prompt_mask: Tensor  # [B, P] int64
    completion_ids: Tensor  # [B, C] int64, right-padded, the end-of-sequence token included
    completion_mask: Tensor  # [B, C] bool
    logps: Tensor  # [B, C] float32, log-probability of the token at the sampling temperature
    entropies: Tensor  # [B, C] float32, nats
    argmax: Tensor  # [B, C] int64, the most likely token at that position

    @property
    def tokens(self) -> int:
        return int(self.completion_mask.sum())

    @property
    def entropy(self) -> float:
        """Mean nats a token."""
        return float(self.entropies.sum() / self.completion_mask.sum().clamp(min=1))

    def completions(self) -> list[list[int]]:
        """Token ids of each completion, without padding."""
        lengths = self.completion_mask.sum(1).tolist()
        return [row[:n] for row, n in zip(self.completion_ids.tolist(), lengths, strict=True)]

    def logp_lists(self) -> list[list[float]]:
        lengths = self.completion_mask.sum(1).tolist()
        return [row[:n] for row, n in zip(self.logps.tolist(), lengths, strict=True)]

    def inputs(self) -> tuple[Tensor, Tensor]:
        """(ids, mask) [B, P+C] of prompt and completion together, as a full forward pass takes them."""
        mask = torch.cat([self.prompt_mask, self.completion_mask.to(self.prompt_mask.dtype)], dim=1)
        return torch.cat([self.prompt_ids, self.completion_ids], dim=1), mask


class RecordLogProbs(LogitsProcessor):
    """Divides by the temperature and records the log-probability of each token one call after it was scored."""

    def __init__(self, temperature: float):
        self.temperature = temperature
        self.last: Tensor | None = None  # [B, V] log-softmax of the step whose token isn't known yet
        self.logps: list[Tensor] = []
        self.entropies: list[Tensor] = []
        self.argmax: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.last is not None:
            self.take(input_ids[:, -1])
        scaled = scores.float() / self.temperature
        self.last = scaled.log_softmax(-1)
        self.entropies.append(torch.special.entr(self.last.exp()).sum(-1))
        self.argmax.append(self.last.argmax(-1))
        return scaled

    def take(self, tokens: Tensor) -> None:
        assert self.last is not None
        self.logps.append(self.last.gather(-1, tokens.unsqueeze(-1)).squeeze(-1))


def left_pad(sequences: Sequence[Sequence[int]], pad: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """(ids, mask) [B, longest] int64, padding on the left."""
    width = max(map(len, sequences))
    ids = torch.tensor([[pad] * (width - len(s)) + list(s) for s in sequences], device=device)
    mask = torch.tensor([[0] * (width - len(s)) + [1] * len(s) for s in sequences], device=device)
    return ids, mask


@contextmanager
def seeded(seed: int | None, device: torch.device | str) -> Iterator[None]:
    """Draw from `seed` inside, and leave the global generators (CPU, and the device's) as they were."""
    if seed is None:
        yield
        return
    device = torch.device(device)
    cuda = [device.index if device.index is not None else torch.cuda.current_device()] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        torch.manual_seed(seed)
        yield


@contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """eval() and no_grad inside; the training flag of every module as before afterwards."""
    modes = [(m, m.training) for m in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def positions(mask: Tensor) -> Tensor:
    """Position of each token of a left-padded batch, counted from its row's first real token; [B, T] like the mask.

    Decoding counts so. A pass that counts from the start of the row, padding included, gives a rotary model the same
    result but for rounding, and rounding is what a 4-bit activation doesn't forgive: on an 8-layer random network in
    bf16 it added a third to mean |Δ logp|.
    """
    return (mask.cumsum(-1) - 1).clamp(min=0)


def takes_positions(model: Any) -> bool:
    """Whether the Hugging Face model (or the one inside PEFT's) has position_ids among its inputs."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return "position_ids" in inspect.signature(type(base).forward).parameters


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _generate(model: Any, ids: Tensor, mask: Tensor, config: GenerationConfig, record: RecordLogProbs) -> Tensor:
    """model.generate under exactly this configuration: a model's own defaults (Qwen's top_k = 20, say) stay out."""
    owners = [model] + ([model.get_base_model()] if hasattr(model, "get_base_model") else [])
    own = [m.generation_config for m in owners]
    for m in owners:
        m.generation_config = config
    try:
        processors = LogitsProcessorList([record])
        return model.generate(input_ids=ids, attention_mask=mask, generation_config=config, logits_processor=processors)
    finally:
        for m, config in zip(owners, own, strict=True):
            m.generation_config = config


def sample(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    eos_token_id: int | Sequence[int],
    pad_token_id: int,
    temperature: float = 1.0,
    greedy: bool = False,
    seed: int | None = None,
    batch_size: int | None = None,
) -> Rollout:
    """Draw one completion for each prompt with cached decoding.

    model: a Hugging Face causal language model (or PEFT around one), converted or not; use `rollout_weights` around
        this call to quantize each weight once.
    prompts: token ids, B lists of differing length. Repeat a prompt to get several completions.
    temperature: of the draw and of the recorded log-probabilities; with greedy=True of the latter only.
    seed: the draw is a function of (weights, prompts, seed); None takes the global generator.
    batch_size: sequences decoded together (None: all).
    Raises ValueError on no prompts, an empty prompt, or a temperature that isn't positive.
    """
    if not prompts or not all(prompts):
        raise ValueError("sample: every prompt needs at least one token, and there must be a prompt")
    if not temperature > 0:
        raise ValueError(f"sample: temperature={temperature} must be positive; use greedy=True for the argmax")
    eos = [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id)
    config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=not greedy,
        temperature=1.0,  # RecordLogProbs divides
        top_k=0,
        top_p=1.0,
        repetition_penalty=1.0,
        eos_token_id=eos,
        pad_token_id=pad_token_id,
        use_cache=True,
        disable_compile=True,
    )
    parts: list[Rollout] = []
    size = batch_size or len(prompts)
    with inference(model), seeded(seed, _device(model)):
        for start in range(0, len(prompts), size):
            ids, mask = left_pad(prompts[start : start + size], pad_token_id, _device(model))
            record = RecordLogProbs(temperature)
            out = _generate(model, ids, mask, config, record)[:, ids.shape[1] :]
            record.take(out[:, -1])
            parts.append(_finish(ids, mask, out, record, eos, pad_token_id))
    return parts[0] if len(parts) == 1 else _concatenate(parts, pad_token_id)


def _finish(ids: Tensor, mask: Tensor, out: Tensor, record: RecordLogProbs, eos: list[int], pad: int) -> Rollout:
    """Cut each completion after its first end-of-sequence token."""
    ended = torch.isin(out, torch.tensor(eos, device=out.device))
    alive = (ended.cumsum(1) - ended.long()) == 0  # no end strictly before this position
    alive = alive[:, : max(int(alive.sum(1).max()), 1)]
    width = alive.shape[1]
    stack = [torch.stack(rows[:width], dim=1) for rows in (record.logps, record.entropies, record.argmax)]
    logps, entropies, argmax = (t.masked_fill(~alive, 0) for t in stack)
    return Rollout(ids, mask, out[:, :width].masked_fill(~alive, pad), alive, logps, entropies, argmax)


def _concatenate(parts: list[Rollout], pad: int) -> Rollout:
    prompt = max(p.prompt_ids.shape[1] for p in parts)
    completion = max(p.completion_ids.shape[1] for p in parts)

    def joined(name: str) -> Tensor:
        left = name.startswith("prompt")
        fill = pad if name in ("prompt_ids", "completion_ids") else 0
        width = prompt if left else completion
        rows = [getattr(p, name) for p in parts]
        room = [((width - t.shape[1], 0) if left else (0, width - t.shape[1])) for t in rows]
        return torch.cat([nn.functional.pad(t, r, value=fill) for t, r in zip(rows, room, strict=True)])

    return Rollout(**{name: joined(name) for name in vars(parts[0])})


@dataclass(frozen=True)
class Scores:
    """One full forward pass over given completions: [B, C] each."""

    logps: Tensor
    entropies: Tensor
    argmax: Tensor


def score(
    model: Any, ids: Tensor, mask: Tensor, completion_length: int, *, temperature: float = 1.0, chunk: int = 64
) -> Scores:
    """Score the last `completion_length` tokens of ids [B, T] by a full forward pass, `chunk` sequences at a time.

    mask [B, T] is the attention mask. Peak memory beyond the model's own: chunk · C · V floats.
    """
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    counted = takes_positions(model)
    with inference(model):
        for start in range(0, ids.shape[0], chunk):
            rows = slice(start, start + chunk)
            logits = model(
                input_ids=ids[rows],
                attention_mask=mask[rows],
                **({"position_ids": positions(mask[rows])} if counted else {}),
                logits_to_keep=completion_length + 1,
                use_cache=False,
            ).logits[:, -completion_length - 1 : -1]
            logp = (logits.float() / temperature).log_softmax(-1)
            tokens = ids[rows, -completion_length:].unsqueeze(-1)
            entropy = torch.special.entr(logp.exp()).sum(-1)
            parts.append((logp.gather(-1, tokens).squeeze(-1), entropy, logp.argmax(-1)))
    return Scores(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


@dataclass(frozen=True)
class DecodeGap:
    """Cached decoding against a full forward pass of the same weights over the same tokens."""

    tokens: int
    flipped: float  # share of tokens whose argmax differs
    stats: GapStats  # of (full pass, cached decoding)

    def metrics(self, prefix: str = "decode/") -> dict[str, float]:
        return {
            prefix + "flipped": self.flipped,
            prefix + "mean_abs": self.stats.mean_abs,
            prefix + "max_abs": self.stats.max_abs,
        }


def decode_gap(model: Any, rollout: Rollout, *, temperature: float = 1.0, chunk: int = 64) -> DecodeGap:
    """How far cached decoding was from a full pass: share of flipped tokens, mean and largest |Δ logp|.

    rollout: from `sample` without a scorer, with the same weights and temperature. Each argmax is taken after the same
    prefix, so a flip is the arithmetic's and never that of a text that went another way.
    """
    full = score(model, *rollout.inputs(), rollout.completion_ids.shape[1], temperature=temperature, chunk=chunk)
    mask = rollout.completion_mask
    flipped = ((full.argmax != rollout.argmax) & mask).sum() / mask.sum().clamp(min=1)
    return DecodeGap(rollout.tokens, float(flipped), gap_stats(full.logps, rollout.logps, mask))

"""Batched sampling that returns what an importance weight needs: the log-probability each token was drawn with.

Legend: B sequences, P prompt tokens (left-padded), C completion tokens (right-padded), V vocabulary.

    prompts ──cached decoding──> completion_ids [B, C]
                  └─ for every token as it is drawn: logp [B, C], entropy [B, C] and argmax [B, C] at the temperature

`sample` decodes with our engine (engine.py), or with transformers' generate (engine_generate.py) where ours can't;
nothing of size [B, C, V] exists in either. The same tokens can be scored again by one full forward pass (`score`), the
way a trainer does; `decode_gap` says how far the two are apart. Under W4A4 that is not a matter of the last bit: a
difference of one rounding in an activation moves it across a 4-bit threshold.

Sampling is from the whole distribution. Under top-p, top-k or min-p the tokens come from a truncated, renormalized
distribution that the training pass never computes, and the ratio of the two is biased: `refuse_biased_sampling`.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from mxrl.rl import engine_generate
from mxrl.rl.engine import Completions
from mxrl.rl.engine import decode as slots_decode
from mxrl.rl.engine_generate import left_pad
from mxrl.rl.engine_slots import EngineError, base_model, unsupported
from mxrl.rl.gap import GapStats, gap_stats

ENGINES = ("auto", "slots", "generate")


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


def derived_seed(*parts: object) -> int:
    """63 bits from any values, the same in every process and run."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


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


@contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """Around passes that take gradients under a mask: torch's other attention kernels; afterwards as before.

    cuDNN 9.19's backward pass (torch 2.11 to 2.13, Hopper) makes NaN of dQ where the length is an odd multiple of 64,
    a mask is given, and a row's logsumexp is below ln(1/FLT_MAX): rows of padding, but real ones too
    (pytorch/pytorch#196678). Around the backward pass too: checkpointing runs the forward again inside it. It is also
    faster where every pass has another shape, since cuDNN plans anew for each.
    """
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def takes_positions(model: Any) -> bool:
    """Whether the Hugging Face model (or the one inside PEFT's) has position_ids among its inputs."""
    return "position_ids" in inspect.signature(type(base_model(model)).forward).parameters


def pad_id(tokenizer: Any) -> int:
    """What padding is filled with: the pad token, else an end, else token 0; the mask says that it is padding."""
    found = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    return found if found is not None else 0


def end_ids(model: Any, tokenizer: Any) -> list[int]:
    """The tokens that end a completion: every one that the tokenizer or the generation config names, as for TRL."""
    named = getattr(model.generation_config, "eos_token_id", None)
    named = named if isinstance(named, list | tuple) else [named]
    return list(dict.fromkeys(token for token in (tokenizer.eos_token_id, *named) if token is not None))


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


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
    first_row: int = 0,
    engine: str = "auto",
) -> Rollout:
    """Draw one completion for each prompt with cached decoding.

    model: a Hugging Face causal language model (or PEFT around one), converted or not; use `rollout_weights` around
        this call to quantize each weight once.
    prompts: token ids, B lists of differing length. Repeat a prompt to get several completions.
    temperature: of the draw and of the recorded log-probabilities; with greedy=True of the latter only.
    seed: a token is drawn from its logits and (seed, row, step) alone; None takes a seed from the global generator.
    first_row: row i of this call is drawn as row first_row + i. With one seed everywhere and first_row the number of
        prompts of the ranks before, several processes draw together what one draws, the same logits given.
    batch_size: sequences decoded together (None: all; slots, on a GPU: as many as half of its free memory holds).
    engine: "slots" is ours (rl/engine.py): static cache, CUDA graphs, an ended row's place is given to the next prompt.
        "generate" is transformers' own loop, batch_size prompts after batch_size prompts, for models that ours does
        not decode (sliding windows, for one). "auto": ours where it can.
    Raises ValueError on no prompts, an empty prompt, a temperature that isn't positive, no room for new tokens, a
    batch_size below 1 or a negative row; EngineError for engine="slots" where it can't, and for a model that FSDP2 has
    sharded or that has no weights (a `Replica`'s, outside `filled`).
    """
    if not prompts or not all(prompts):
        raise ValueError("sample: every prompt needs at least one token, and there must be a prompt")
    if not temperature > 0:
        raise ValueError(f"sample: temperature={temperature} must be positive; use greedy=True for the argmax")
    if max_new_tokens < 1:
        raise ValueError(f"sample: max_new_tokens={max_new_tokens} must be at least 1")
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"sample: batch_size={batch_size} must be at least 1")
    if first_row < 0:
        raise ValueError(f"sample: first_row={first_row} must be at least 0")
    eos = [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id)
    decode = _decoder(model, engine)
    if seed is None:
        seed = int(torch.randint(1 << 62, ()))
    with inference(model):
        found = decode(
            model,
            prompts,
            max_new_tokens=max_new_tokens,
            eos=eos,
            pad=pad_token_id,
            temperature=temperature,
            greedy=greedy,
            seed=seed,
            slots=batch_size,
            first_row=first_row,
        )
        ids, mask = left_pad(prompts, pad_token_id, _device(model))
    return Rollout(ids, mask, *found)


def _decoder(model: Any, engine: str) -> Callable[..., Completions]:
    """The function that decodes, by the engine's name."""
    if engine not in ENGINES:
        raise EngineError(f"sample: engine='{engine}' is unknown; possible: {', '.join(ENGINES)}")
    name = type(base_model(model)).__name__
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise EngineError(
            f"sample: {name} is sharded by FSDP2, and its ranks would wait for each other at every step; decode with "
            "an mxrl.nn.replica.Replica of it"
        )
    if any(parameter.is_meta for parameter in model.parameters()):
        raise EngineError(
            f"sample: {name} has no weights (they are on the meta device); a Replica's model has some inside "
            "`with replica.filled(model)`"
        )
    reason = None if engine == "generate" else unsupported(model)
    if engine == "slots" and reason is not None:
        raise EngineError(f"sample: engine='slots' can't decode this model, since {reason}; take engine='generate'")
    return engine_generate.decode if engine == "generate" or reason is not None else slots_decode


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

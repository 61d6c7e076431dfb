"""Decoding by transformers' own generate, for the models that our engine doesn't take.

Legend: B prompts, V vocabulary.

A logits processor records, for every token as it is drawn, its log-probability, the entropy and the argmax. It keeps
the log-softmax of the last step only, and reads the token that was drawn from it at the next call. Prompts are decoded
`slots` after `slots`, left-padded, each batch until its longest completion has ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from mxrl.rl.engine import Completions


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
    lengths = torch.tensor([len(s) for s in sequences], device=device)
    mask = torch.arange(width, device=device) >= width - lengths.unsqueeze(1)
    return ids, mask.to(torch.int64)


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


def decode(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    eos: list[int],
    pad: int,
    temperature: float,
    greedy: bool,
    seed: int,
    slots: int | None = None,
) -> Completions:
    """One completion for each prompt, as `engine.decode`; the draw depends on `slots` too."""
    config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=not greedy,
        temperature=1.0,  # RecordLogProbs divides
        top_k=0,
        top_p=1.0,
        repetition_penalty=1.0,
        eos_token_id=eos,
        pad_token_id=pad,
        use_cache=True,
        disable_compile=True,
    )
    device = next(model.parameters()).device
    parts: list[Completions] = []
    size = slots or len(prompts)
    with seeded(seed, device):
        for start in range(0, len(prompts), size):
            ids, mask = left_pad(prompts[start : start + size], pad, device)
            record = RecordLogProbs(temperature)
            out = _generate(model, ids, mask, config, record)[:, ids.shape[1] :]
            record.take(out[:, -1])
            parts.append(_finish(out, record, eos, pad))
    return parts[0] if len(parts) == 1 else _concatenate(parts, pad)


def _finish(out: Tensor, record: RecordLogProbs, eos: list[int], pad: int) -> Completions:
    """Cut each completion after its first end-of-sequence token."""
    ended = torch.isin(out, torch.tensor(eos, device=out.device))
    alive = (ended.cumsum(1) - ended.long()) == 0  # no end strictly before this position
    alive = alive[:, : max(int(alive.sum(1).max()), 1)]
    width = alive.shape[1]
    stack = [torch.stack(rows[:width], dim=1) for rows in (record.logps, record.entropies, record.argmax)]
    return Completions(
        out[:, :width].masked_fill(~alive, pad), alive, *(values.masked_fill(~alive, 0) for values in stack)
    )


def _concatenate(parts: list[Completions], pad: int) -> Completions:
    width = max(part.ids.shape[1] for part in parts)
    columns = zip(*parts, strict=True)
    fills = [pad if name == "ids" else 0 for name in Completions._fields]
    return Completions(
        *(
            torch.cat([nn.functional.pad(t, (0, width - t.shape[1]), value=fill) for t in column])
            for column, fill in zip(columns, fills, strict=True)
        )
    )

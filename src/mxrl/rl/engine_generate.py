"""Decoding by transformers' own generate, for the models that our engine doesn't take.

Legend: B prompts, V vocabulary.

A logits processor draws each token as our engine does (`ops/sample.py`: a function of seed, row and step), records its
log-probability, the entropy and the argmax, and leaves generate no choice. Prompts are decoded `slots` after `slots`,
left-padded, each batch until its longest completion has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from mxrl.ops import sample
from mxrl.rl.engine_state import Completions


class Draw(LogitsProcessor):
    """Draws the tokens of one batch, a step a call: all logits but the drawn token's become -inf."""

    def __init__(self, uniforms_BC: Tensor | None, temperature: float):
        self.uniforms, self.temperature = uniforms_BC, temperature  # no uniforms: greedy
        self.drawn: list[sample.Drawn] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        greedy = self.uniforms is None
        u_B = scores.new_empty(0) if self.uniforms is None else self.uniforms[:, len(self.drawn)]
        drawn = sample.draw(scores, u_B, self.temperature, greedy)
        self.drawn.append(drawn)
        return torch.full_like(scores, -torch.inf).scatter_(1, drawn.tokens.unsqueeze(1), 0.0)


def left_pad(sequences: Sequence[Sequence[int]], pad: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """(ids, mask) [B, longest] int64, padding on the left."""
    width = max(map(len, sequences))
    ids = torch.tensor([[pad] * (width - len(s)) + list(s) for s in sequences], device=device)
    lengths = torch.tensor([len(s) for s in sequences], device=device)
    mask = torch.arange(width, device=device) >= width - lengths.unsqueeze(1)
    return ids, mask.to(torch.int64)


def _generate(model: Any, ids: Tensor, mask: Tensor, config: GenerationConfig, draw: Draw) -> Tensor:
    """model.generate under exactly this configuration: a model's own defaults (Qwen's top_k = 20, say) stay out."""
    owners = [model] + ([model.get_base_model()] if hasattr(model, "get_base_model") else [])
    own = [m.generation_config for m in owners]
    for m in owners:
        m.generation_config = config
    try:
        processors = LogitsProcessorList([draw])
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
    first_row: int = 0,
) -> Completions:
    """One completion for each prompt, as `engine.decode`."""
    config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,  # of what Draw leaves
        repetition_penalty=1.0,
        eos_token_id=eos,
        pad_token_id=pad,
        use_cache=True,
        disable_compile=True,
    )
    device = next(model.parameters()).device
    uniforms = None
    if not greedy:
        uniforms = sample.uniforms(seed, len(prompts), max_new_tokens, device, first_row=first_row)
    parts: list[Completions] = []
    size = slots or len(prompts)
    for start in range(0, len(prompts), size):
        rows = slice(start, start + size)
        ids, mask = left_pad(prompts[rows], pad, device)
        draw = Draw(None if uniforms is None else uniforms[rows], temperature)
        out = _generate(model, ids, mask, config, draw)[:, ids.shape[1] :]
        parts.append(_finish(out, draw, eos, pad))
    return parts[0] if len(parts) == 1 else _concatenate(parts, pad)


def _finish(out: Tensor, draw: Draw, eos: list[int], pad: int) -> Completions:
    """Cut each completion after its first end-of-sequence token."""
    ended = torch.isin(out, torch.tensor(eos, device=out.device))
    alive = (ended.cumsum(1) - ended.long()) == 0  # no end strictly before this position
    alive = alive[:, : max(int(alive.sum(1).max()), 1)]
    width = alive.shape[1]
    _, *columns = zip(*draw.drawn, strict=True)  # the tokens are in `out`
    stack = [torch.stack(rows[:width], dim=1) for rows in columns]
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

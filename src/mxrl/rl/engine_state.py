"""What the decoding engine's steps read and write, and what a call returns.

Legend: B prompts, S slots, C most new tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mxrl.rl.engine_slots import upload


class Completions(NamedTuple):
    """[B, C'] each, C' the longest completion: right-padded with 0 (ids: pad)."""

    ids: Tensor
    mask: Tensor  # bool
    logps: Tensor
    entropies: Tensor
    argmax: Tensor


@dataclass
class Timing:
    """Seconds of one call's phases, for benchmarks; prefill is waited for only where `detailed`."""

    detailed: bool = False
    prefill: float = 0.0
    capture: float = 0.0
    decode: float = 0.0
    steps: int = 0
    refills: int = 0
    slots: int = 0
    graph: bool = False


@dataclass
class State:
    """What a step reads and writes, one entry a slot; never moved, for the graph holds the addresses."""

    tokens: Tensor  # [S] int64, the next input
    positions: Tensor  # [S] int64, where it goes in the cache; 0 where idle, so that idle slots attend to one token
    rows: Tensor  # [S] int64, prompt in the call
    steps: Tensor  # [S] int64, tokens drawn so far
    active: Tensor  # [S] bool

    @classmethod
    def idle(cls, slots: int, device: torch.device) -> State:
        def zeros() -> Tensor:
            return torch.zeros(slots, dtype=torch.int64, device=device)

        return cls(zeros(), zeros(), zeros(), zeros(), torch.zeros(slots, dtype=torch.bool, device=device))

    def place(self, slots: list[int], rows: list[int], prompts: Sequence[Sequence[int]]) -> None:
        """Start row rows[i] in slot slots[i], its prompt but for the last token being cached already."""
        columns = [slots, [prompts[r][-1] for r in rows], [len(prompts[r]) - 1 for r in rows], rows]
        at, *values = upload(columns, self.tokens.device).unbind(0)
        for target, value in zip((self.tokens, self.positions, self.rows), values, strict=True):
            target[at] = value
        self.steps[at] = 0
        self.active[at] = True


@dataclass
class Out:
    """Flat [B·C + 1]: entry row · C + step, and one more that idle slots write to."""

    ids: Tensor
    mask: Tensor
    logps: Tensor
    entropies: Tensor
    argmax: Tensor

    @classmethod
    def empty(cls, size: int, pad: int, device: torch.device) -> Out:
        def zeros(dtype: torch.dtype) -> Tensor:
            return torch.zeros(size + 1, dtype=dtype, device=device)

        ids = torch.full((size + 1,), pad, dtype=torch.int64, device=device)
        return cls(ids, zeros(torch.bool), zeros(torch.float32), zeros(torch.float32), zeros(torch.int64))

    def completions(self, rows: int) -> Completions:
        columns = [getattr(self, name)[:-1].view(rows, -1) for name in Completions._fields]
        width = int(columns[1].sum(1).max())
        return Completions(*(column[:, :width].clone() for column in columns))

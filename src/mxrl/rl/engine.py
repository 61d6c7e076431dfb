"""A decoding engine for Hugging Face language models: a static cache, one CUDA graph a step, slots that are refilled.

Legend: B prompts, S slots (rows decoded together), P prompt tokens, C most new tokens, V vocabulary, T = P + C.

    queue of prompts ──prefill──> slots ──step──> token, logp, entropy, argmax of every slot ──> out [B, C]
          └────────── a slot whose row has ended is given the next prompt ◄──┘ looked at every few steps

One *step* is the model's own forward pass over one token a slot (so quantized layers, held rollout weights, LoRA and
autocast work as ever), and one draw a row (`ops/sample.py`), which takes its log-probability along. All that a step
reads and writes stays where it is, so on CUDA it is captured once and then replayed: hundreds of kernels, whose
launches one by one would take longer than they do. The capture belongs to one call, since a rollout's weights do; the
GPU works on the prefill meanwhile. The host looks at the flags of the steps *before* those that it just launched, so
the GPU never waits for it.

A prompt's last token is not prefilled but decoded: every token is drawn in the same code from the same kernels, and
only a row's last logits are ever made. Rows with the same prompt are prefilled once.

The draw is a function of (weights, prompts, seed): the uniform of a token comes from (seed, row, step), not from when
or beside what it was decoded; rows are counted from `first_row`, so that several processes draw what one does. A 4-bit
activation is blocked within its token, so neighbours don't change it (NVFP4's scale is of the whole batch: there they
do); what remains is the rounding of GEMMs, whose order depends on the batch's shape.
"""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mxrl.nn.activations import share_activations
from mxrl.nn.operands import compute_dtype
from mxrl.ops import sample
from mxrl.rl.engine_slots import (
    EngineError,
    SlotCache,
    attending_to,
    base_model,
    bytes_per_token,
    upload,
    waits_for_the_host,
)
from mxrl.rl.engine_state import Completions, Out, State, Timing

LOOK_EVERY = {"cuda": 4}  # steps between two looks at the flags; elsewhere one, since looking is free
PREFILL_TOKENS = 32768  # of a forward pass, padding included: enough to fill a GPU, and bounded activations
WORTH_A_CAPTURE = 64  # steps still to come for which a graph of fewer slots is captured
MEMORY_SHARE = 0.5  # of the free memory, for keys and values and logits where the number of slots is ours to choose

_pools: dict[torch.device, tuple[Any, torch.cuda.CUDAGraph]] = {}


def _pool(device: torch.device) -> Any:
    """Where the device's graphs keep what a step makes: one for all calls, for each graph's own would stay reserved.

    An empty graph keeps the pool alive when the others are gone. Call it on the stream that captures.
    """
    if device not in _pools:
        handle, anchor = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is empty
            anchor.capture_begin(pool=handle, capture_error_mode="thread_local")
            anchor.capture_end()
        _pools[device] = handle, anchor
    return _pools[device][0]


@dataclass
class Engine:
    """One call of `decode`: made, run, dropped."""

    model: Any
    prompts: Sequence[Sequence[int]]
    max_new_tokens: int
    eos: list[int]
    pad: int
    temperature: float
    greedy: bool
    seed: int
    slots: int
    device: torch.device
    first_row: int = 0
    graph: bool = True
    timing: Timing = field(default_factory=Timing)

    def __post_init__(self) -> None:
        rows = len(self.prompts)
        self.base = base_model(self.model)
        self.state = State.idle(self.slots, self.device)
        self.cache = SlotCache(self.slots, max(map(len, self.prompts)) + self.max_new_tokens, self.state.positions)
        self.eos_ids = torch.tensor(self.eos, device=self.device)
        self.out = Out.empty(rows * self.max_new_tokens, self.pad, self.device)
        self.trash = rows * self.max_new_tokens
        self.uniforms = torch.full((self.trash + 1,), 0.5, device=self.device)  # [B·C + 1] as in Out
        if not self.greedy:
            uniforms = sample.uniforms(self.seed, rows, self.max_new_tokens, self.device, first_row=self.first_row)
            self.uniforms[:-1] = uniforms.view(-1)
        self.queue = deque(range(rows))
        self.free = list(range(self.slots))
        self.issued: dict[int, int] = {}  # busy slot -> steps launched since it was filled
        self.filled: dict[int, int] = {}  # busy slot -> number of the first look after it was filled
        self.looks: deque[tuple[int, Tensor, Any]] = deque()  # (number, flags on the host, event: they are there)
        self.looked = 0
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self.timing.slots = self.slots

    # --- the step ---

    def step(self) -> None:
        """One token of every slot."""
        state = self.state
        logits = self.base(
            input_ids=state.tokens.unsqueeze(1),
            position_ids=state.positions.unsqueeze(1),
            past_key_values=self.cache,
            use_cache=True,
        ).logits[:, -1]
        at = torch.where(state.active, state.rows * self.max_new_tokens + state.steps, self.trash)
        if logits.is_cuda:
            from mxrl.ops.sample_triton import draw
        else:
            draw = sample.draw
        drawn = draw(logits, self.uniforms[at], self.temperature, self.greedy)
        out = self.out
        for target, values in zip((out.ids, out.logps, out.entropies, out.argmax), drawn, strict=True):
            target.scatter_(0, at, values)
        out.mask.scatter_(0, at, state.active)
        state.steps.add_(state.active)
        ended = (drawn.tokens.unsqueeze(1) == self.eos_ids).any(1) | (state.steps >= self.max_new_tokens)
        state.active.logical_and_(~ended)
        state.tokens.copy_(drawn.tokens)
        state.positions.add_(1).mul_(state.active)

    def captured(self) -> Callable[[], None]:
        """The step as a function to call: a graph's replay on CUDA, else the step itself."""
        if self.device.type != "cuda" or not self.graph or waits_for_the_host(self.model):
            return self.step
        started = time.perf_counter()
        current, side = torch.cuda.current_stream(self.device), torch.cuda.Stream(self.device)
        side.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(side):
            # One step for real, which compiles kernels and makes workspaces, with every slot idle: what that leaves in
            # the cache goes to its last place, which no row gets to.
            saved = {name: tensor.clone() for name, tensor in vars(self.state).items()}
            self.state.active.fill_(False)
            self.state.positions.fill_(self.cache.room - 1)
            self.step()
            for name, tensor in saved.items():
                getattr(self.state, name).copy_(tensor)
            # not torch.cuda.graph: it waits for the GPU, which is prefilling, and collects garbage
            try:
                graph.capture_begin(pool=_pool(self.device), capture_error_mode="thread_local")
                try:
                    with share_activations():
                        self.step()
                finally:
                    graph.capture_end()
            except RuntimeError as error:
                reason = str(error).strip().splitlines()[0]
                raise EngineError(
                    f"{type(self.base).__name__}: a decoding step can't be captured in a CUDA graph ({reason}); "
                    "take engine='generate'"
                ) from error
        current.wait_stream(side)
        self.timing.capture += time.perf_counter() - started
        self.timing.graph = True
        self.graphs.append(graph)  # replays of an earlier one may still be under way
        return graph.replay

    # --- prompts into slots ---

    def prefill(self, slots: list[int], rows: list[int]) -> None:
        """Cache all but the last token of each row's prompt, equal prompts once, in passes of PREFILL_TOKENS."""
        places: dict[tuple[int, ...], list[int]] = {}
        for slot, row in zip(slots, rows, strict=True):
            places.setdefault(tuple(self.prompts[row][:-1]), []).append(slot)
        places.pop((), None)
        # by length where they differ much, for the padding; as they come otherwise, for adjacent slots copy faster
        prompts = list(places)
        if prompts and 4 * sum(map(len, prompts)) < 3 * len(prompts) * max(map(len, prompts)):
            prompts.sort(key=len)
        while prompts:
            width, count = 0, 0
            for prompt in prompts:
                width = max(width, len(prompt))
                if count and width * (count + 1) > PREFILL_TOKENS:
                    break
                count += 1
            batch, prompts = prompts[:count], prompts[count:]
            width = max(map(len, batch))
            ids = upload([[*p, *[self.pad] * (width - len(p))] for p in batch], self.device)
            order = torch.arange(width, device=self.device).expand_as(ids)
            pairs = sorted((slot, i) for i, prompt in enumerate(batch) for slot in places[prompt])
            with self.cache.prefilling([slot for slot, _ in pairs], [i for _, i in pairs]):
                self.base(
                    input_ids=ids,
                    position_ids=order,
                    past_key_values=self.cache,
                    use_cache=True,
                    logits_to_keep=1,  # none would do, but a model's forward makes some
                )

    def take(self) -> tuple[list[int], list[int]]:
        """(slots, rows) for the next prompts of the queue; they are booked as busy."""
        count = min(len(self.free), len(self.queue))
        slots = sorted(self.free)[:count]
        self.free = sorted(self.free)[count:]
        for slot in slots:
            self.issued[slot], self.filled[slot] = 0, self.looked
        return slots, [self.queue.popleft() for _ in slots]

    def refill(self) -> None:
        """Give free slots new prompts, once there are enough of them to be worth a forward pass."""
        enough = min(len(self.queue), max(1, self.slots // 8))
        if not self.queue or (self.issued and len(self.free) < enough):
            return
        slots, rows = self.take()
        self.prefill(slots, rows)
        self.state.place(slots, rows, self.prompts)
        self.timing.refills += 1

    # --- which rows have ended ---

    def look(self) -> None:
        """Copy the flags to the host, on CUDA without waiting; then book the slots that are known to have ended."""
        if self.device.type == "cuda":
            flags = torch.empty(self.slots, dtype=torch.bool, pin_memory=True)
            flags.copy_(self.state.active, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self.looks.append((self.looked, flags, event))
            known = self.looks.popleft() if len(self.looks) > 1 else None
        else:
            known = (self.looked, self.state.active.cpu(), None)
        self.looked += 1
        over = {slot for slot, issued in self.issued.items() if issued >= self.max_new_tokens}
        if known is not None:
            number, flags, event = known
            if event is not None:
                event.synchronize()
            over |= self.ended(number, flags)
        self.book(over)

    def ended(self, number: int, flags: Tensor) -> set[int]:
        """Slots whose row had ended at look `number`; those that were filled since speak of another row."""
        return {slot for slot in (~flags).nonzero()[:, 0].tolist() if self.filled.get(slot, number + 1) <= number}

    def book(self, ended: set[int]) -> None:
        for slot in ended:
            del self.issued[slot], self.filled[slot]
        self.free.extend(ended)

    def shrink(self) -> bool:
        """Drop slots that have ended and that no prompt waits for, where enough is saved; whether it was done.

        Without a graph, once they are a quarter; else once they are three, for that takes another capture.
        """
        left = self.max_new_tokens - min(self.issued.values(), default=self.max_new_tokens)
        share = 4 * len(self.free) / self.slots
        if self.queue or not left or share < 1 or (self.timing.graph and (share < 3 or left < WORTH_A_CAPTURE)):
            return False
        keep = sorted(self.issued)
        rows = torch.tensor(keep, device=self.device)
        self.state = State(*(getattr(self.state, name)[rows] for name in vars(self.state)))
        self.cache.keep(rows)
        self.cache.positions = self.state.positions
        self.issued = {new: self.issued[old] for new, old in enumerate(keep)}
        self.filled = dict.fromkeys(self.issued, self.looked)  # what is on its way speaks of the old slots
        self.free, self.slots = [], len(keep)
        return True

    def run(self) -> Completions:
        here = torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()
        with here, attending_to(self.cache, self.model):
            started = time.perf_counter()
            slots, rows = self.take()
            self.prefill(slots, rows)
            if self.timing.detailed and self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self.timing.prefill = time.perf_counter() - started
            step = self.captured()
            self.state.place(slots, rows, self.prompts)
            started = time.perf_counter()
            every = LOOK_EVERY.get(self.device.type, 1)
            while self.issued:
                count = min(every, self.max_new_tokens - min(self.issued.values()))
                for _ in range(count):
                    step()
                self.issued = {slot: issued + count for slot, issued in self.issued.items()}
                self.timing.steps += count
                self.look()
                self.refill()
                if self.shrink():
                    step = self.captured()
            found = self.out.completions(len(self.prompts))
            self.timing.decode = time.perf_counter() - started
        return found


def default_slots(model: Any, rows: int, room: int) -> int:
    """All rows, up to what MEMORY_SHARE of the free memory holds of keys, values and logits (CUDA; elsewhere all)."""
    head = base_model(model).get_output_embeddings()
    if not head.weight.is_cuda:
        return rows
    free = torch.cuda.mem_get_info(head.weight.device)[0]
    free += torch.cuda.memory_reserved(head.weight.device) - torch.cuda.memory_allocated(head.weight.device)
    return max(1, min(rows, int(MEMORY_SHARE * free) // _bytes_per_row(model, room)))


def _bytes_per_row(model: Any, room: int) -> int:
    """Keys and values of a slot, its logits and their successors."""
    weight = base_model(model).get_output_embeddings().weight
    dtype = compute_dtype(weight)
    return room * bytes_per_token(model, dtype) + 2 * dtype.itemsize * weight.shape[0]


def make_room(model: Any, slots: int, room: int, device: torch.device) -> None:
    """Give memory that PyTorch keeps for others back to the GPU where the slots would not fit beside it.

    What a training step has freed stays in the allocator's own pool, and a graph's pool can't be filled from there.
    """
    if device.type != "cuda":
        return
    free, _ = torch.cuda.mem_get_info(device)
    if MEMORY_SHARE * free < slots * _bytes_per_row(model, room):
        torch.cuda.empty_cache()


def decode(
    model: nn.Module,
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
    graph: bool = True,
    timing: Timing | None = None,
) -> Completions:
    """One completion for each prompt; `rollout.sample` is the public face, and says what the arguments are.

    The model is in eval mode and gradients are off. slots: rows decoded together (None: `default_slots`). graph:
    capture the step on CUDA. timing: is filled in. A model that `unsupported` names must not come here.
    """
    device = next(model.parameters()).device
    rows, room = len(prompts), max(map(len, prompts)) + max_new_tokens
    slots = default_slots(model, rows, room) if slots is None else min(slots, rows)
    make_room(model, slots, room, device)
    return Engine(
        model, prompts, max_new_tokens, eos, pad, temperature, greedy, seed, slots, device, first_row, graph,
        timing or Timing(),
    ).run()  # fmt: skip

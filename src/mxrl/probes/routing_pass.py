"""The passes of the routing probe: unquantized, treated, treated with routing replayed, treated block by block.

    base       unquantized; records the routes, every decoder block's input, the experts' inputs and outputs
    free       treated
    replayed   treated, every token sent to the experts of `base`
    local      treated, every decoder block fed its input of `base`: its router sees its own attention's error only
    experts    treated, the experts alone, on their inputs and routes of `base`

All passes under one treatment share its quantized weights, and a control's draws of noise. N kept tokens (those whose
logits a completion's token was drawn from), E experts, A of them a token, H hidden size, L MoE layers, P prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mxrl.nn import Routes, record_routing, replay_routing, rollout_weights
from mxrl.nn.experts import expert_outputs, state_of
from mxrl.nn.replay import MoeLayer
from mxrl.probes.routing_theory import changed_experts, energies, energy, noise_variance
from mxrl.probes.subject import Subject, blocks
from mxrl.probes.treatments import Treatment, treated
from mxrl.rl.rollout import Rollout


@dataclass
class Batch:
    """Some completions with their prompts."""

    ids: Tensor  # [B, T]
    mask: Tensor
    completion: Tensor  # [B, C] bool
    prompt: Tensor  # [N]: which prompt each kept token is of

    def __post_init__(self) -> None:
        kept = torch.zeros_like(self.ids, dtype=torch.bool)
        kept[:, -self.completion.shape[1] - 1 : -1] = self.completion
        self.rows = kept.flatten().nonzero()[:, 0]  # [N] of the B · T tokens

    @classmethod
    def of(cls, subject: Subject, rollout: Rollout, samples: int) -> list[Batch]:
        """A rollout of `samples` completions a prompt, subject.batch of them at a time."""
        ids, mask = rollout.inputs()
        found = []
        for start in range(0, len(ids), subject.batch):
            rows = slice(start, start + subject.batch)
            completion = rollout.completion_mask[rows]
            prompt = torch.arange(start, start + len(completion), device=ids.device) // samples
            found.append(Batch(ids[rows], mask[rows], completion, prompt.repeat_interleave(completion.sum(1))))
        return found


@dataclass
class Pass:
    """What a forward pass did at the kept tokens, by MoE layer; and the model's logits there."""

    logits: list[Tensor] = field(default_factory=list)  # of the router, float32 [N, E]
    index: list[Tensor] = field(default_factory=list)  # [N, A]
    output: list[Tensor] = field(default_factory=list)  # of the block of experts, [N, H]
    final: Tensor = field(default_factory=lambda: torch.empty(0))  # [N, V]


@dataclass
class Base(Pass):
    """The unquantized pass, and what the others are given of it."""

    routes: Routes = field(default_factory=Routes)
    hidden: list[Tensor] = field(default_factory=list)  # each decoder block's input, [B, T, H]
    inputs: list[Tensor] = field(default_factory=list)  # each layer's experts' input, [B · T, H]
    outputs: list[Tensor] = field(default_factory=list)  # of each layer's chosen experts, [N, A, H]


@contextmanager
def _hooked(handles: list[Any]) -> Iterator[None]:
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _forward(subject: Subject, layers: list[MoeLayer], batch: Batch, seen: Pass, *, final: bool = True) -> Pass:
    def router(module: nn.Module, arguments: Any, out: tuple[Tensor, Tensor, Tensor]) -> None:
        seen.logits.append(out[0][batch.rows].float())
        seen.index.append(out[2][batch.rows])

    def block(module: nn.Module, arguments: Any, out: Any) -> None:
        y = out[0] if isinstance(out, tuple) else out
        seen.output.append(y.reshape(-1, y.shape[-1])[batch.rows])

    handles = [layer.router.register_forward_hook(router) for layer in layers]
    handles += [layer.block.register_forward_hook(block) for layer in layers]
    with _hooked(handles):
        logits = subject.logits(batch.ids, batch.mask, keep=batch.completion.shape[1] + 1 if final else 1)
    if final:
        seen.final = logits[:, :-1][batch.completion]
    return seen


def base_pass(subject: Subject, layers: list[MoeLayer], batch: Batch) -> Base:
    base = Base()
    handles = [
        block.register_forward_pre_hook(lambda m, args, kw: base.hidden.append(_first(args, kw)), with_kwargs=True)
        for block in blocks(subject.model)
    ]
    handles += [
        layer.experts.register_forward_pre_hook(lambda m, args: base.inputs.append(args[0])) for layer in layers
    ]
    with _hooked(handles), record_routing(subject.model) as base.routes:
        _forward(subject, layers, batch, base)
    base.outputs = _expert_outputs(layers, base, batch)
    return base


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return args[0] if args else kwargs["hidden_states"]


def _local(subject: Subject, layers: list[MoeLayer], batch: Batch, base: Base) -> Pass:
    """A pass in which every decoder block gets the input that it had unquantized."""

    def feed(hidden: Tensor) -> Callable[..., Any]:
        def swap(m: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})

        return swap

    pairs = zip(blocks(subject.model), base.hidden, strict=True)
    with _hooked([block.register_forward_pre_hook(feed(hidden), with_kwargs=True) for block, hidden in pairs]):
        return _forward(subject, layers, batch, Pass(), final=False)


def _expert_outputs(layers: list[MoeLayer], base: Base, batch: Batch) -> list[Tensor]:
    """What the experts now make of the unquantized pass's inputs under its routing, [N, A, H] a layer."""
    found = []
    for layer, x in zip(layers, base.inputs, strict=True):
        state = state_of(layer.experts)
        assert state is not None  # `convert` with a bare recipe leaves no experts out
        found.append(expert_outputs(layer.experts, state, x, base.routes.layers[layer.name][0].index)[batch.rows])
    return found


# --- sums ------------------------------------------------------------------------------------------------------------

COLUMNS = (
    "tokens", "flipped", "flipped_local", "first", "changed", "noise", "noise_local", "error_mixed", "error_apart",
    "output_mixed", "output_apart", "error", "error_replayed", "error_flipped", "output", "logits", "logits_replayed",
)  # fmt: skip


class Sums:
    """Sums over each prompt's tokens, one [P, L] a column, in float64; the model's logits stand in layer 0."""

    def __init__(self, prompts: int, layers: int, device: torch.device) -> None:
        self._found: dict[str, Tensor] = {
            name: torch.zeros(prompts, layers, dtype=torch.float64, device=device) for name in COLUMNS
        }

    def add(self, name: str, layer: int, batch: Batch, values_N: Tensor) -> None:
        self._found[name][:, layer].index_add_(0, batch.prompt, values_N.double())

    def columns(self) -> Tensor:
        """[P, L, len(COLUMNS)], on the CPU."""
        return torch.stack(list(self._found.values()), -1).cpu()


def logit_error(a_NV: Tensor, b_NV: Tensor) -> Tensor:
    """‖a − b less its mean over the vocabulary‖² [N], as no softmax sees that mean; in pieces: V can be 150,000."""
    pairs = zip(a_NV.split(256), b_NV.split(256), strict=True)
    return torch.cat([(a.float() - b.float()).var(-1, correction=0) * a.shape[-1] for a, b in pairs])


def add_treatment(
    subject: Subject, layers: list[MoeLayer], batch: Batch, base: Base, t: Treatment, number: int, sums: Sums
) -> Tensor:
    """Run batch `number` under `t` and add what it does to `sums`; returns which tokens flipped, bool [L, N] (CPU)."""
    seed = subject.seed + 1 + number  # of a control's activations: the same for every pass, another for every batch
    with treated(subject.model, t, seed=subject.seed), rollout_weights(subject.model):
        _reseed(subject.device, seed)
        free = _forward(subject, layers, batch, Pass())
        _reseed(subject.device, seed)
        with replay_routing(subject.model, base.routes):
            replayed = _forward(subject, layers, batch, Pass())
        _reseed(subject.device, seed)
        local = _local(subject, layers, batch, base)
        _reseed(subject.device, seed)
        outputs = _expert_outputs(layers, base, batch)
    flips = []
    for i, layer in enumerate(layers):
        gates = base.routes.layers[layer.name][0].gates[batch.rows].float().unsqueeze(-1)
        before, changed = base.outputs[i].float(), changed_experts(base.index[i], free.index[i])
        error = energy(free.output[i].float() - base.output[i].float())
        error_mixed, error_apart = energies(gates * (outputs[i].float() - before))
        output_mixed, output_apart = energies(gates * before)
        found = {
            "tokens": torch.ones_like(error),
            "flipped": changed > 0,
            "flipped_local": changed_experts(base.index[i], local.index[i]) > 0,
            "first": base.index[i][:, 0] != free.index[i][:, 0],
            "changed": changed,
            "noise": noise_variance(base.logits[i], free.logits[i]),
            "noise_local": noise_variance(base.logits[i], local.logits[i]),
            "error_mixed": error_mixed,
            "error_apart": error_apart,
            "output_mixed": output_mixed,
            "output_apart": output_apart,
            "error": error,
            "error_replayed": energy(replayed.output[i].float() - base.output[i].float()),
            "error_flipped": error * (changed > 0),
            "output": energy(base.output[i]),
        }
        for name, values in found.items():
            sums.add(name, i, batch, values)
        flips.append(found["flipped"])
    sums.add("logits", 0, batch, logit_error(free.final, base.final))
    sums.add("logits_replayed", 0, batch, logit_error(replayed.final, base.final))
    return torch.stack(flips).cpu()


def _reseed(device: torch.device, seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[
            torch.cuda.current_device() if device.index is None else device.index
        ].manual_seed(seed)

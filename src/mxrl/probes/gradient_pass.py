"""One forward and backward pass over fixed tokens, and how far two such passes are apart.

    loss = Σ_i w_i Σ_t −log p(y_it) / tokens         completions y_i the policy's own, i over a group's completions
    nll    w_i = 1
    grpo   w_i = (r_i − mean r) / (sd r + 1e-4)       over the completions of one prompt: the gradient of GRPO's clipped
                                                      objective at the policy that wrote them, where its ratio is 1

Depth d of 0 … L is the residual stream before decoder block d, so L is the last block's output. dL/dh_d has come
through L − d blocks. Norms and dot products are summed in float64, and so are their differences: 1 − cos is good to
1e-15. Shape letters: B sequences, T tokens, C completion tokens, H width, V vocabulary, L decoder blocks.

In expectation over the policy's own completions the nll's gradient is zero, as ∇ Σ p = 0: on a sample it is the noise
that rewards pick from. So the two losses ask the same of one sample's gradient, with equal and with signed weights.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mxrl.probes.subject import ProbeError, Subject, blocks
from mxrl.rl.rollout import Rollout, without_cudnn_attention
from mxrl.scan import NonFiniteError, nonfinite

LOSSES = ("nll", "grpo")


class Batch(NamedTuple):
    """Sequences of one pass: ids, mask [B, T]; scored [B, C], true on completion tokens; weight [B], of each token's
    −log p in the group's loss."""

    ids: Tensor
    mask: Tensor
    scored: Tensor
    weight: Tensor


def prompt_groups(subject: Subject, written: Rollout, *, samples: int, groups: int, loss: str) -> list[list[Batch]]:
    """The completions of `samples` a prompt, prompts split evenly into `groups` in their order, in batches.

    Groups without a token to score are left out; under grpo also those whose rewards don't vary for any prompt. Raises
    ProbeError where none is left.
    """
    weights = _weights(subject, written, samples, loss)
    prompts, device = len(subject.problems), written.completion_ids.device
    edges = [g * prompts // groups * samples for g in range(groups + 1)]
    found = []
    for begin, end in itertools.pairwise(edges):
        tokens = int(written.completion_mask[begin:end].sum())
        if not tokens or not any(weights[begin:end]):
            continue
        rows = [slice(at, min(at + subject.batch, end)) for at in range(begin, end, subject.batch)]
        found.append([_batch(written, r, torch.tensor(weights[r], device=device) / tokens) for r in rows])
    if not found:
        why = "its completions are empty" if loss == "nll" else "no prompt has completions of differing reward"
        raise ProbeError(f"the gradient probe has nothing to average: {why} ({subject.name}, {samples} a prompt)")
    return found


def _weights(subject: Subject, written: Rollout, samples: int, loss: str) -> list[float]:
    if loss == "nll":
        return [1.0] * written.completion_ids.shape[0]
    answers = [p.answer for p in subject.problems for _ in range(samples)]
    rewards = torch.tensor(subject.reward(subject.texts(written), answers), dtype=torch.float64).view(-1, samples)
    spread = rewards.std(1, keepdim=True) + 1e-4
    return ((rewards - rewards.mean(1, keepdim=True)) / spread).flatten().tolist()


def _batch(written: Rollout, rows: slice, weight: Tensor) -> Batch:
    """Some rows without the columns that are padding in all of them."""
    prompt, scored = written.prompt_mask[rows], written.completion_mask[rows]
    first, length = int(prompt.any(0).int().argmax()), max(1, int(scored.sum(1).max()))
    ids, mask = written.inputs()
    columns = slice(first, prompt.shape[1] + length)
    return Batch(ids[rows, columns], mask[rows, columns], scored[:, :length], weight)


@contextlib.contextmanager
def residual_stream(model: nn.Module) -> Iterator[list[Tensor]]:
    """While the block runs, the list fills with the stream at depths 0 … L [B, T, H] as the model is run once."""
    stream: list[Tensor] = []

    def before(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        stream.append(arguments[0] if arguments else named["hidden_states"])

    def after(module: nn.Module, arguments: Any, out: Any) -> None:
        stream.append(out[0] if isinstance(out, tuple) else out)

    layers = blocks(model)
    handles = [layers[0].register_forward_pre_hook(before, with_kwargs=True)]
    handles += [layer.register_forward_hook(after) for layer in layers]
    try:
        yield stream
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class Pass:
    """gradients: of the group's loss, in the order of the model's P parameters, and their squared norms, float64 [P].
    stream: for each batch the stream at depths 0 … L, padding left out, [tokens, H] each. dx: ‖dL/dh_d‖², float64
    [L + 1]."""

    gradients: list[Tensor]
    squares: Tensor
    stream: list[list[Tensor]]
    dx: Tensor


def run_pass(subject: Subject, batches: Sequence[Batch]) -> Pass:
    """The gradient of one group's loss as the model now computes; the parameters' `.grad` stay as they are.

    Batches' gradients are added in float32. Raises NonFiniteError for logits, or a gradient, with a NaN or an Inf.
    """
    named = list(subject.model.named_parameters())
    parameters = [p for _, p in named]
    gradients: list[Tensor] = []
    streams: list[list[Tensor]] = []
    dx: Tensor | float = 0.0
    for batch in batches:
        with without_cudnn_attention():
            with residual_stream(subject.model) as stream:
                loss = _loss(subject, batch)
            found = torch.autograd.grad(loss, [*parameters, *stream], allow_unused=True)
        filled = [torch.zeros_like(p) if g is None else g for g, p in zip(found, [*parameters, *stream], strict=True)]
        own = filled[: len(parameters)]
        gradients = [a.float().add_(b) for a, b in zip(gradients, own, strict=True)] if gradients else own
        dx = dx + torch.stack([dot(g, g) for g in filled[len(parameters) :]])
        streams.append([h.detach()[batch.mask.bool()] for h in stream])
    assert isinstance(dx, Tensor)
    squares = torch.stack([dot(g, g) for g in gradients])  # finite where the gradient is: float64 does not overflow
    if not bool(torch.isfinite(squares).all()):
        name, bad = next((n, g) for (n, _), g in zip(named, gradients, strict=True) if not torch.isfinite(g).all())
        raise NonFiniteError(
            f"the gradient of '{name}' in {subject.name} has {nonfinite([bad.reshape(-1, bad.shape[-1])], bad.shape)}"
        )
    return Pass(gradients, squares, streams, dx)


def _loss(subject: Subject, batch: Batch) -> Tensor:
    length = batch.scored.shape[1]
    logits = subject.logits(batch.ids, batch.mask, keep=length + 1)[:, :-1]
    nll = F.cross_entropy(logits.float().flatten(0, 1), batch.ids[:, -length:].flatten(), reduction="none")
    return (nll.view(-1, length) * batch.scored * batch.weight.unsqueeze(1)).sum()


def dot(a: Tensor, b: Tensor) -> Tensor:
    """⟨a, b⟩ summed in float64, 0-d on a's device."""
    return torch.dot(a.flatten().double(), b.flatten().double())


@dataclass(frozen=True)
class Comparison:
    """A pass against the unquantized one of the same group.

    sums: (‖g_q‖², ‖g‖², ⟨g_q, g⟩) of each parameter. dx: log2 ‖dL/dh_d‖ over the unquantized, depth 0 … L. stream:
    mean over tokens of log2 ‖h_d‖ over the unquantized. stream_error: ‖h_q − h‖ / ‖h‖. NaN where a norm is zero.
    """

    sums: list[list[float]]
    dx: list[float]
    stream: list[float]
    stream_error: list[float]

    def apart(self, parameters: Sequence[int]) -> tuple[float, float]:
        """(log2 ratio of the norms, 1 − cos) of these parameters' gradients; NaN where either is zero."""
        own, base, both = (math.fsum(self.sums[i][j] for i in parameters) for j in range(3))
        if own <= 0 or base <= 0:
            return math.nan, math.nan
        return math.log2(own / base) / 2, max(0.0, 1 - both / math.sqrt(own * base))


def compare(own: Pass, base: Pass) -> Comparison:
    """How far `own` is from `base`: the same batches under another treatment."""
    products = torch.stack([dot(a, b) for a, b in zip(own.gradients, base.gradients, strict=True)])
    sums = torch.stack([own.squares, base.squares, products], 1)
    stream, error = _streams(own.stream, base.stream)
    dx = torch.log2(own.dx / base.dx) / 2
    return Comparison(sums.tolist(), dx.tolist(), stream.tolist(), error.tolist())


def _streams(own: list[list[Tensor]], base: list[list[Tensor]]) -> tuple[Tensor, Tensor]:
    """(mean over tokens of the log2 ratio of norms, relative error), float64 [L + 1] each."""
    ratio, error, size, tokens = 0.0, 0.0, 0.0, 0
    for a, b in zip(own, base, strict=True):
        tokens += a[0].shape[0]
        norms = [(x.double().norm(dim=-1), y.double().norm(dim=-1)) for x, y in zip(a, b, strict=True)]
        ratio = ratio + torch.stack([torch.log2(x / y).sum() for x, y in norms])
        error = error + torch.stack([(x.double() - y.double()).square().sum() for x, y in zip(a, b, strict=True)])
        size = size + torch.stack([y.square().sum() for _, y in norms])
    assert isinstance(ratio, Tensor) and isinstance(error, Tensor) and isinstance(size, Tensor)
    return ratio / tokens, (error / size).sqrt()

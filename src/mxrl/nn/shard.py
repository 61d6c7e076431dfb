"""FSDP2 for a converted model: every rank holds a slice of each master weight, and gathers the whole one to quantize.

    shard(model)        fully_shard of every decoder block, then of the rest (embeddings, last norm, head) as the root
    whole(parameters)   their whole values, many with one collective: what a rollout's weights are made from

Blocks of 32 (and macro-blocks of 128) lie along a weight's contraction axis, FSDP2 cuts along axis 0; where that is the
contraction axis (gpt-oss's down projection is [E, I, H]: it isn't) nothing would change either, since a weight is
quantized only after it has been gathered. So Q(w) is the same bits on every rank, and those of one process.

The weights are gathered in their own dtype, not in autocast's: a float32 norm weight then multiplies in float32, and
gradients are averaged over the ranks in float32, as one process computes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard

from mxrl.nn.layers import full_tensor

AT_ONCE = 1 << 28  # bytes of whole parameters that are gathered together


class ShardError(ValueError):
    """A model that can't be sharded; the message says which, and what is missing."""


def decoder_blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a Hugging Face model (or the one inside PEFT's), by its own `_no_split_modules`."""
    names = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    return [module for module in model.modules() if type(module).__name__ in names]


def shard(model: nn.Module, *, reshard_after_forward: bool = True) -> None:
    """Shard `model` in place over all processes of torch.distributed's default group, on the current device.

    reshard_after_forward: free a block's gathered weights after its forward pass and gather them again for the
        backward pass (less memory, twice the traffic); the root keeps its own till the backward pass in any case.
    Does nothing to a model that is sharded already. Raises ShardError where the model names no blocks.
    """
    if isinstance(model, FSDPModule):
        return
    blocks = decoder_blocks(model)
    if not blocks:
        raise ShardError(
            f"{type(model).__name__} does not say which of its modules are its blocks (_no_split_modules), "
            "so it can't be sharded; run it in one process"
        )
    options: dict[str, Any] = {"reshard_after_forward": reshard_after_forward}
    for block in blocks:
        fully_shard(block, **options)
    # one group for the root: the head's weight is read outside the head's own forward pass (TRL's fused loss), and is
    # whole there only while its group's is
    fully_shard(model)


def whole(parameters: Iterable[Tensor], at_once: int = AT_ONCE) -> Iterator[Tensor]:
    """The whole value of each parameter, detached, in order; every rank asks for the same ones.

    A parameter that is sharded over one axis of ranks, along its own axis 0 (FSDP2), is gathered together with its
    neighbours: a collective a parameter, through DTensor, takes longer in Python than on the wire. A sharded one's
    value is a tensor of its own; another's shares its memory.
    """
    batch: list[Tensor] = []
    size = 0
    for parameter in parameters:
        if batch and size + parameter.nbytes > at_once:
            yield from _gather(batch)
            batch, size = [], 0
        batch.append(parameter.detach())
        size += parameter.nbytes
    yield from _gather(batch)


def _gather(batch: list[Tensor]) -> Iterator[Tensor]:
    """One all-gather for all that are sharded in the same way in one dtype; else one each."""
    sharded = [p for p in batch if isinstance(p, DTensor)]
    alike = {(p.device_mesh, p.placements, p.dtype) for p in sharded}
    if len(alike) != 1 or next(iter(alike))[1] != (Shard(0),):
        yield from map(full_tensor, batch)
        return
    mesh, _, dtype = alike.pop()
    ranks = mesh.size()
    rows = [-(-p.shape[0] // ranks) for p in sharded]  # FSDP2 gives the first ranks so many, the last what is left
    sizes = [n * p.shape[1:].numel() for n, p in zip(rows, sharded, strict=True)]
    own = torch.zeros(sum(sizes), dtype=dtype, device=sharded[0].to_local().device)
    for piece, parameter in zip(own.split(sizes), sharded, strict=True):
        local = parameter.to_local()
        piece[: local.numel()].copy_(local.flatten())
    everyone = own.new_empty(ranks, own.numel())
    dist.all_gather(list(everyone.unbind(0)), own, group=mesh.get_group())
    pieces = iter(zip(everyone.split(sizes, dim=1), rows, strict=True))
    for parameter in batch:
        if not isinstance(parameter, DTensor):
            yield parameter
            continue
        piece, count = next(pieces)
        yield piece.reshape(ranks * count, *parameter.shape[1:])[: parameter.shape[0]]

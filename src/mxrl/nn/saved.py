"""Bytes that the forward pass keeps for the backward pass, counted by storage.

    with saved_bytes(model) as saved:
        loss = model(**batch).loss
    saved.activations, saved.weights, saved.parameters      bytes

A tensor that several layers save (Q(h) of q, k, v), and views of one storage, count once, with the storage's whole
size: that is what stays in memory. For one linear layer of K inputs and O outputs, T tokens, in bf16:

    bf16                      2·T·K                             the input itself
    mxfp4                     2·T·K + 2·O·K                     Q(x) and Q(w) as bf16 values
    mxfp4, shared_weights     2·T·K + 2·O·K a step              Q(w) is one tensor for all micro-batches
    mxfp4+pack_saved          .53·T·K + 2·O·K a step            codes and scales, 4.25 bits an element
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn


@dataclass
class SavedBytes:
    """What was saved so far, in bytes."""

    parameters: int = 0  # the model's own parameters: they are there anyway
    rest: int = 0  # everything else
    tensors: int = 0  # how many tensors were saved, those of a known storage included
    _storages: dict[int, torch.UntypedStorage] = field(default_factory=dict, repr=False)

    @property
    def total(self) -> int:
        return self.parameters + self.rest


@contextmanager
def saved_bytes(model: nn.Module | None = None) -> Iterator[SavedBytes]:
    """Count what autograd saves inside the block; `model`'s parameters apart.

    Bytes are of CPU or CUDA storages, whole. The block itself holds every counted storage until it ends (an address
    that is used again would otherwise count as known). Under gradient checkpointing only what is saved outside the
    checkpointed parts is seen. Inside torch.compile nothing is: its graphs save by other means.
    """
    own = {p.untyped_storage().data_ptr() for p in model.parameters()} if model is not None else set()
    saved = SavedBytes()

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        saved.tensors += 1
        if storage.data_ptr() not in saved._storages:
            saved._storages[storage.data_ptr()] = storage
            if storage.data_ptr() in own:
                saved.parameters += storage.nbytes()
            else:
                saved.rest += storage.nbytes()
        return x

    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            yield saved
    finally:
        saved._storages.clear()

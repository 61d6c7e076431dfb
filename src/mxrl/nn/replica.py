"""A model's structure without its weights, which a rollout fills: for a model that FSDP2 has sharded.

    replica = Replica(model)            before fully_shard: modules, hooks and configuration; parameters on "meta"
    fully_shard(model)
    with replica.filled(model, noise):  every rank enters: the one place where ranks talk to each other
        sample(replica.model, ...)      each rank its own prompts, for as many steps as they take

A sharded model gathers its weights in every forward pass, so all ranks have to make the same passes. Decoding can't:
ranks end after different numbers of steps, and a step that is captured in a CUDA graph holds no such traffic. So the
weights are gathered once a rollout, some at a time, in the same order on every rank:

    converted layers    Q(w [+ noise]), held as in `rollout_weights` and by its code: the same bits on every rank, and
                        those of one process. The master is dropped as soon as it is quantized.
    everything else     the whole master weight in its own dtype (embeddings, norms, router, head, biases, adapters):
                        float32 stays float32, so that autocast sees what it sees in one process

The price is memory: beside the shards each rank has the quantized weights (bf16: 2 bytes a parameter) and the rest
while the block runs, and 256 MiB of master weights twice (or one, if larger) while it is filled. The tensors stay where
they are inside the block.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from mxrl.nn.layers import QuantizedLayer, canonical_name, full_tensor
from mxrl.nn.operands import RolloutError
from mxrl.nn.shard import whole
from mxrl.nn.weights import Noise, RolloutReport, block_norms, holding, layers_to_hold, noised_norm, on_norms, reshard


class Replica:
    """An unsharded copy of a converted model's structure; `filled` gives it weights for the time of a rollout.

    model: converted, adapters and hooks on it already, not sharded yet; it is left as it is. Buffers and plain tensor
        attributes are copied, parameters become meta tensors (tied ones stay tied): it takes no memory to speak of.
    The copy is in eval mode, and no gradient through it means anything. A function that was set as a module's `forward`
    or registered as a hook is shared and not copied: set it on the copy again where it leans on the original (`filled`
    checks that).
    Raises RolloutError for a model that is sharded, holds weights, or has no converted layer.
    """

    model: Any  # an nn.Module of the class of the model given; it computes inside `filled` only

    def __init__(self, model: nn.Module) -> None:
        layers_to_hold(model, "Replica")
        if any(isinstance(module, FSDPModule) for module in model.modules()):
            name = type(model).__name__
            raise RolloutError(f"Replica: {name} is sharded already; make the replica before fully_shard")
        memo: dict[int, Any] = {id(p): _parameter(torch.empty_like(p, device="meta"), p) for p in model.parameters()}
        self.model = copy.deepcopy(model, memo).eval()

    @contextmanager
    def filled(
        self, sharded: nn.Module, noise: Noise | None = None, *, dtype: torch.dtype | None = None
    ) -> Iterator[RolloutReport]:
        """While the block runs, `self.model` computes what `sharded` would inside `rollout_weights(sharded, noise)`.

        sharded: the model that the replica was made of, now sharded or not. noise, dtype: as of `rollout_weights`.
        Every rank enters, with the same noise; no rank waits for another inside the block or at its end. Then, or
        after an error, all of it is dropped. Inside `shared_weights(sharded)`, what is held without noise is what the
        training passes share. Buffers are those that `sharded` has on entry.
        Raises RolloutError where the two models differ in parameters or recipe, on a block inside a block, for a
        function of the replica's that calls another model, and for master weights that change inside.
        """
        reshard(sharded)
        pairs = list(_pairs(layers_to_hold(sharded, "Replica.filled"), layers_to_hold(self.model, "Replica.filled")))
        masters = _match(_places(sharded, "_parameters"), _places(self.model, "_parameters"))
        buffers = _match(_places(sharded, "_buffers"), _places(self.model, "_buffers"))
        _check_functions(self.model)
        report = RolloutReport.of(noise)
        filled = _Filled()
        try:
            with torch.no_grad():
                for buffer, place in buffers:
                    filled.put(place, full_tensor(buffer).clone())
                self._fill_others(filled, masters, pairs, noise, report)
            with holding(pairs, noise, dtype, report) as held:
                for layer, attribute, weight in held:
                    place = _Place(weight.name, layer.module._parameters, attribute)
                    filled.put(place, _parameter(weight.value, weight.parameter))
                yield report
        finally:
            filled.put_back()

    def _fill_others(
        self,
        filled: _Filled,
        masters: list[tuple[Tensor, _Place]],
        pairs: list[tuple[QuantizedLayer, QuantizedLayer]],
        noise: Noise | None,
        report: RolloutReport,
    ) -> None:
        """The parameters that no converted layer quantizes, whole and in their own dtype; the norms with noise on."""
        quantized = {(id(layer.module._parameters), attribute) for _, layer in pairs for attribute in layer.weights}
        noised = {name for name, _ in block_norms(self.model)} if on_norms(noise) else set()
        others = [(m, place) for m, place in masters if (id(place.table), place.attribute) not in quantized]
        first = {id(place.tensor): (m, place) for m, place in reversed(others)}  # tied ones have one meta parameter
        known: dict[int, nn.Parameter] = {}
        for (meta, (master, place)), value in zip(first.items(), whole(m for m, _ in first.values()), strict=True):
            if noise is not None and place.name in noised:
                value = noised_norm(place.name, value, noise, report)
            known[meta] = _parameter(value, master)
        for _, place in others:
            filled.put(place, known[id(place.tensor)])


def _parameter(value: Tensor, like: Tensor) -> nn.Parameter:
    """`value` as a parameter that is trained or not as `like` is.

    Not only for show: torch.matmul takes another GEMM for a weight that requires gradients, under no_grad too.
    """
    return nn.Parameter(value, requires_grad=like.requires_grad)


# --- where tensors are -----------------------------------------------------------------------------------------------


class _Place(NamedTuple):
    """Where a module has a tensor."""

    name: str  # canonical
    table: dict[str, Any]  # the module's _parameters or _buffers
    attribute: str

    @property
    def tensor(self) -> Tensor:
        return self.table[self.attribute]


def _places(model: nn.Module, kind: str) -> Iterator[_Place]:
    """Every place of `kind` (_parameters or _buffers) in module order; a tied tensor has several."""
    for path, module in model.named_modules():
        table = getattr(module, kind)
        for attribute, tensor in table.items():
            if tensor is not None:
                yield _Place(canonical_name(f"{path}.{attribute}" if path else attribute), table, attribute)


class _Filled:
    """Tensors that were put into places, and what stood there before."""

    def __init__(self) -> None:
        self.before: list[tuple[_Place, Tensor]] = []

    def put(self, place: _Place, tensor: Tensor) -> None:
        self.before.append((place, place.tensor))
        place.table[place.attribute] = tensor

    def put_back(self) -> None:
        for place, tensor in self.before:
            place.table[place.attribute] = tensor
        self.before.clear()


# --- whether the replica is one of the model given -------------------------------------------------------------------


def _match(theirs: Iterable[_Place], ours: Iterable[_Place]) -> list[tuple[Tensor, _Place]]:
    """(tensor of the model, place in its replica), in the order that both have; RolloutError where they differ."""
    pairs: list[tuple[Tensor, _Place]] = []
    for their, our in zip_longest(theirs, ours):
        if their is None or our is None or their.name != our.name or their.tensor.shape != our.tensor.shape:
            model, replica = ("nothing" if p is None else f"{p.name} {list(p.tensor.shape)}" for p in (their, our))
            raise RolloutError(
                f"Replica.filled: the model has {model} where its replica has {replica}; make the replica of "
                "this model, after adapters are added"
            )
        pairs.append((their.tensor, our))
    return pairs


def _pairs(theirs: list[QuantizedLayer], ours: list[QuantizedLayer]) -> Iterator[tuple[QuantizedLayer, QuantizedLayer]]:
    """(the model's layer, the replica's); RolloutError where the model was converted otherwise since."""
    for their, our in zip_longest(theirs, ours):
        model, replica = (None if layer is None else (layer.name, layer.operands) for layer in (their, our))
        if model != replica:
            model, replica = ("nothing" if x is None else f"{x[0]} in {x[1].recipe}" for x in (model, replica))
            raise RolloutError(
                f"Replica.filled: the model has converted {model} where its replica has {replica}; make the replica "
                "after the last convert"
            )
        yield their, our


def _check_functions(model: nn.Module) -> None:
    """Raise RolloutError for a `forward` or a hook that calls a module which is not of `model`."""
    own = {id(module) for module in model.modules()}
    for path, module in model.named_modules():
        for function in (
            vars(module).get("forward"),
            *module._forward_pre_hooks.values(),
            *module._forward_hooks.values(),
        ):
            for other in _modules_in(function):
                if id(other) not in own:
                    name = canonical_name(path) or type(module).__name__
                    raise RolloutError(
                        f"Replica.filled: {name} runs {getattr(function, '__qualname__', function)}, which calls the "
                        f"{type(other).__name__} that it was made for; set it on the replica's own module again"
                    )


def _modules_in(function: Any, depth: int = 4) -> Iterator[nn.Module]:
    """The modules that a function is bound to or has closed over, by functions inside functions too."""
    if isinstance(function, nn.Module):
        yield function
    elif callable(function) and depth:
        values = [getattr(function, "__self__", None), getattr(function, "__func__", None)]  # of a method
        if isinstance(function, functools.partial):
            values += [function.func, *function.args, *function.keywords.values()]
        for cell in getattr(function, "__closure__", None) or ():
            with suppress(ValueError):  # a variable that has no value yet
                values.append(cell.cell_contents)
        for value in values:
            yield from _modules_in(value, depth - 1)

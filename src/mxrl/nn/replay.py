"""Routing replay: a forward pass in which each token goes to the experts that another pass chose for it.

    with record_routing(model) as routes, torch.no_grad():
        model(ids, attention_mask=mask)                     # say, unquantized, or the policy before its update
    with replay_routing(model, routes):
        model(ids, attention_mask=mask).logits              # the same batches in the same order, under gradient or not

What is replayed is the selection. The gates of the selected experts are computed anew from the present router logits,
so the router still learns, as in GSPO's routing replay (arXiv 2507.18071) and rollout routing replay (2510.11370);
`gates="record"` replays the gates' values too, as constants. With ℓ [T, E] the router's logits and S_t the A experts:

    Qwen3-MoE, OLMoE   softmax(ℓ)[S_t], over its own sum where `norm_topk_prob` is set
    Mixtral            softmax(ℓ)[S_t] over its own sum
    gpt-oss            softmax(ℓ[S_t])

by the operations that transformers uses, so replaying a pass's own routes gives its outputs bit for bit. Hooks on the
routers do it: neither the model nor its experts know. Recorded are full passes, not cached decoding, whose steps come
in another order (and which a CUDA graph may hide from hooks). Checkpointed layers compute their forward pass again in
the backward pass; they get the routes of their last one.

T tokens of a call (padding included), E experts, A of them a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mxrl.nn.experts import Experts, is_known_experts
from mxrl.nn.layers import canonical_name


class RoutingError(ValueError):
    """Routes that don't fit the pass they are replayed in, or a model whose routers aren't known; one clear line."""


# --- the routers -----------------------------------------------------------------------------------------------------


def _softmax_chosen(router: Any, logits_TE: Tensor, index_TA: Tensor) -> Tensor:
    gates = torch.softmax(logits_TE, dim=-1, dtype=torch.float).gather(-1, index_TA)
    if router.norm_topk_prob:
        gates = gates / gates.sum(dim=-1, keepdim=True)
    return gates.to(logits_TE.dtype)


def _softmax_normed(router: Any, logits_TE: Tensor, index_TA: Tensor) -> Tensor:
    gates = torch.softmax(logits_TE.float(), dim=-1).gather(-1, index_TA)
    return gates / gates.sum(dim=-1, keepdim=True)


def _chosen_softmax(router: Any, logits_TE: Tensor, index_TA: Tensor) -> Tensor:
    return torch.softmax(logits_TE.gather(-1, index_TA), dim=1, dtype=logits_TE.dtype)


_GATES: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "Qwen3MoeTopKRouter": _softmax_chosen,
    "OlmoeTopKRouter": _softmax_chosen,
    "MixtralTopKRouter": _softmax_normed,
    "GptOssTopKRouter": _chosen_softmax,
}


@dataclass(frozen=True)
class MoeLayer:
    """A block of routed experts: its canonical name, itself, its router and its experts."""

    name: str
    block: nn.Module
    router: Any  # returns (logits [T, E], gates [T, A], index [T, A]); has top_k and num_experts
    experts: Experts

    def gates(self, logits_TE: Tensor, index_TA: Tensor) -> Tensor:
        """The gates [T, A] that this router gives to the experts `index`, with gradient."""
        return _GATES[_router_class(self.router)](self.router, logits_TE, index_TA)


def _router_class(module: nn.Module) -> str:
    """The known class that `module` is of (FSDP2 puts one of its own before it); "" without one."""
    return next((kind.__name__ for kind in type(module).__mro__ if kind.__name__ in _GATES), "")


def moe_layers(model: nn.Module) -> list[MoeLayer]:
    """The blocks of routed experts, in module order; an empty list for a dense model.

    Raises RoutingError for fused experts beside which there is no router of a known class.
    """
    found = []
    for path, block in model.named_modules():
        for name, experts in block.named_children():
            if not is_known_experts(experts):
                continue
            beside = [child for other, child in block.named_children() if other != name]
            router = next((child for child in beside if _router_class(child)), None)
            if router is None:
                kinds = ", ".join(type(child).__name__ for child in beside) or "nothing"
                raise RoutingError(
                    f"{canonical_name(path)}: no router that mxrl knows is beside {type(experts).__name__}, only "
                    f"{kinds}; known: {', '.join(_GATES)}"
                )
            found.append(MoeLayer(canonical_name(path), block, router, experts))
    return found


# --- the record ------------------------------------------------------------------------------------------------------


class Choice(NamedTuple):
    """One call of one router, without gradient."""

    index: Tensor  # [T, A] int64
    gates: Tensor  # [T, A], in the router's own dtype


@dataclass
class Routes:
    """layers: the calls of each block of experts, by its canonical name, in their order."""

    layers: dict[str, list[Choice]] = field(default_factory=dict)

    @property
    def calls(self) -> int:
        """Forward passes."""
        return max(map(len, self.layers.values()), default=0)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for calls in self.layers.values() for choice in calls for t in choice)


def _moe(model: nn.Module, caller: str) -> list[MoeLayer]:
    layers = moe_layers(model)
    if not layers:
        raise RoutingError(f"{caller}: {type(model).__name__} has no routed experts")
    return layers


def _recomputing() -> bool:
    """Whether this forward pass is a checkpoint's second one, inside a backward pass."""
    return torch._C._current_graph_task_id() != -1


@contextmanager
def record_routing(model: nn.Module) -> Iterator[Routes]:
    """While the block runs, every forward pass adds its routes to the Routes that it yields.

    They stay on the model's device: T · A · (8 bytes + the gates' dtype) a layer and pass. A pass inside
    `replay_routing` is recorded as replayed. Raises RoutingError for a model without routed experts, with an unknown
    router, and at the end of a block in which no router's call was seen (a model compiled before, a CUDA graph).
    """
    layers = _moe(model, "record_routing")
    routes = Routes({layer.name: [] for layer in layers})

    def hook(calls: list[Choice]) -> Callable[..., None]:
        def record(router: Any, arguments: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
            if not _recomputing():
                _, gates, index = output
                calls.append(Choice(index.detach(), gates.detach()))

        return record

    handles = [layer.router.register_forward_hook(hook(routes.layers[layer.name])) for layer in layers]
    try:
        yield routes
    finally:
        for handle in handles:
            handle.remove()
    if not routes.calls:
        raise RoutingError(
            "record_routing: no forward pass went through the routers' hooks; make one inside the block, neither "
            "compiled nor replayed from a CUDA graph"
        )


@contextmanager
def replay_routing(model: nn.Module, routes: Routes, *, gates: str = "router") -> Iterator[None]:
    """While the block runs, the i-th forward pass sends each token to the experts of the i-th recorded one.

    routes: of this model, or of another one with the same blocks of experts. gates: "router" computes them from the
    present logits for the recorded experts, with gradient; "record" takes the recorded ones, as constants.
    Raises RoutingError for routes of other blocks, another number of experts a token, an expert that isn't there, a
    pass over another number of tokens, one pass more than was recorded, or, at the end of the block, one less; also in
    a checkpointed layer's backward pass that comes after more than one forward pass, as the routes are then ambiguous.
    """
    layers = _moe(model, "replay_routing")
    if gates not in ("router", "record"):
        raise RoutingError(f"replay_routing: gates={gates!r} is unknown; possible: 'router', 'record'")
    _check_fit(layers, routes)
    players = [_Player(layer, routes.layers[layer.name], gates == "record") for layer in layers]
    handles = [player.layer.router.register_forward_hook(player) for player in players]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    for player in players:
        if player.done != len(player.calls):
            raise RoutingError(
                f"replay_routing: {player.layer.name} was called {player.done} times, and {len(player.calls)} calls "
                "were recorded; replay the same forward passes in the same order"
            )


def _check_fit(layers: list[MoeLayer], routes: Routes) -> None:
    names = {layer.name for layer in layers}
    if odd := sorted(names ^ set(routes.layers)):
        where = "the model, not in the routes" if odd[0] in names else "the routes, not in the model"
        raise RoutingError(f"replay_routing: {odd[0]} is in {where}; routes are of a model with the same experts")
    for layer in layers:
        top_k, experts = layer.router.top_k, layer.router.num_experts
        for index, gates in routes.layers[layer.name]:
            if index.ndim != 2 or index.shape[1] != top_k or gates.shape != index.shape:
                raise RoutingError(
                    f"replay_routing: {layer.name} chooses {top_k} experts a token; the routes have index "
                    f"{list(index.shape)} and gates {list(gates.shape)}"
                )
            if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < experts:
                raise RoutingError(
                    f"replay_routing: {layer.name} has experts 0 to {experts - 1}; the routes name others"
                )


@dataclass
class _Player:
    """The hook of one router."""

    layer: MoeLayer
    calls: list[Choice]
    recorded_gates: bool
    done: int = 0
    pending: int = 0  # passes in training mode since a checkpoint last computed one again

    def __call__(
        self, router: Any, arguments: Any, output: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        logits_TE, present, own = output
        choice = self._next(router.training)
        if choice.index.shape[0] != own.shape[0]:
            raise RoutingError(
                f"replay_routing: {self.layer.name}, call {self.done}: {own.shape[0]} tokens, and "
                f"{choice.index.shape[0]} were recorded; replay the same batches in the same order"
            )
        index, gates = (t.to(own.device) for t in choice)
        if index.is_inference() and not torch.is_inference_mode_enabled():
            index, gates = index.clone(), gates.clone()  # an inference tensor can't be saved for backward
        return logits_TE, gates.to(present.dtype) if self.recorded_gates else self.layer.gates(logits_TE, index), index

    def _next(self, training: bool) -> Choice:
        if _recomputing():
            if self.pending > 1 or not self.done:
                raise RoutingError(
                    f"replay_routing: {self.layer.name} is checkpointed and computed again after {self.pending} "
                    "forward passes, so which routes it had isn't known; call backward after each forward pass"
                )
            self.pending = 0
            return self.calls[self.done - 1]
        if self.done == len(self.calls):
            raise RoutingError(
                f"replay_routing: {self.layer.name} is called once more than the {len(self.calls)} times that were "
                "recorded; replay the same forward passes in the same order"
            )
        self.done += 1
        self.pending += training
        return self.calls[self.done - 1]

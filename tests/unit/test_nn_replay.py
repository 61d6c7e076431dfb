"""Routing replay: a pass's own routes change nothing, bit for bit; other routes do; what doesn't fit is an error."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tiny_models import MOE, tiny_model, tokens
from torch import Tensor

import mxrl
from mxrl.nn import Routes, RoutingError, record_routing, replay_routing
from mxrl.nn.replay import Choice, moe_layers

EXACT: dict[str, Any] = dict(rtol=0, atol=0)
E, A = 4, 2


def recorded(model: Any, *batches: Tensor) -> Routes:
    with record_routing(model) as routes, torch.no_grad():
        for ids in batches:
            model(ids)
    return routes


def rotated(routes: Routes) -> Routes:
    """Every chosen expert replaced by the next one: for two of four never the same set."""
    return Routes({n: [Choice((i + 1) % E, g) for i, g in calls] for n, calls in routes.layers.items()})


def logits(model: Any, *batches: Tensor) -> list[Tensor]:
    with torch.no_grad():
        return [model(ids).logits for ids in batches]


def gradients(model: Any, *batches: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    for ids in batches:
        model(ids).logits.float().log_softmax(-1)[..., 3].sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], **EXACT, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("family", MOE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", [None, "mxfp4"])
@pytest.mark.parametrize("normed", [False, True])
def test_own_routes_change_no_bit(family, dtype, recipe, normed):
    model = tiny_model(family, dtype=dtype)
    for layer in moe_layers(model):
        layer.router.norm_topk_prob = normed  # Mixtral and gpt-oss don't look at it
    if recipe:
        mxrl.convert(model, recipe)
    batches = tokens(3, 9, seed=1), tokens(2, 7, seed=2)
    routes = recorded(model, *batches)
    assert routes.calls == 2 and list(routes.layers) == ["model.layers.0.mlp", "model.layers.1.mlp"]
    assert all([c.index.shape for c in calls] == [(27, A), (14, A)] for calls in routes.layers.values())
    plain, trained = logits(model, *batches), gradients(model, *batches)
    for gates in ("router", "record"):
        with replay_routing(model, routes, gates=gates), record_routing(model) as again:
            replayed = logits(model, *batches)
        torch.testing.assert_close(replayed, plain, **EXACT)
        torch.testing.assert_close(again.layers, routes.layers, **EXACT)
    with replay_routing(model, routes):
        assert_same(gradients(model, *batches), trained)


@pytest.mark.parametrize("family", MOE)
def test_other_routes_are_taken_and_their_gates_are_the_routers(family):
    """The block's output is Σ g_e · expert_e(x) over the given experts, the gates written out; and its gradient."""
    model = tiny_model(family, dtype=torch.float64)
    mxrl.convert(model, "bf16")  # transformers' grouped GEMM takes no float64; ours computes the same
    ids = tokens()
    routes = rotated(recorded(model, ids))
    layer = moe_layers(model)[0]
    seen: dict[str, Any] = {}
    handles = [
        layer.block.register_forward_pre_hook(lambda m, args: seen.update(x=args[0].detach().reshape(-1, 64))),
        layer.block.register_forward_hook(
            lambda m, args, out: seen.update(y=out[0] if isinstance(out, tuple) else out)
        ),
    ]
    with replay_routing(model, routes), record_routing(model) as again:
        model(ids).logits.sum().backward()
    for handle in handles:
        handle.remove()
    index = routes.layers[layer.name][0].index
    torch.testing.assert_close(again.layers[layer.name][0].index, index, **EXACT)
    scores = (seen["x"] @ layer.router.weight.T + getattr(layer.router, "bias", 0)).detach()
    for t, (score, chosen) in enumerate(zip(scores.tolist(), index.tolist(), strict=True)):
        everyone = sum(math.exp(s) for s in score)
        gates = [math.exp(score[e]) / everyone for e in chosen]
        if family in ("mixtral", "gpt_oss"):  # tiny Qwen3-MoE and OLMoE leave norm_topk_prob off
            gates = [g / sum(gates) for g in gates]
        # the routers' softmax is float32, but gpt-oss's
        torch.testing.assert_close(again.layers[layer.name][0].gates[t].double(), torch.tensor(gates).double(),
                                   rtol=1e-6, atol=0)  # fmt: skip
        expected = sum(
            g * layer.experts(seen["x"][t : t + 1], torch.tensor([[e]]), torch.ones(1, 1, dtype=torch.float64))
            for g, e in zip(gates, chosen, strict=True)
        )
        torch.testing.assert_close(seen["y"].reshape(-1, 64)[t : t + 1], expected, rtol=1e-6, atol=1e-6)
    assert layer.router.weight.grad is not None and layer.router.weight.grad.abs().max() > 0


@pytest.mark.parametrize("family", MOE)
def test_recorded_gates_are_constants(family):
    model = tiny_model(family)
    ids = tokens()
    routes = Routes({
        name: [Choice(index, torch.full_like(gates, 0.25)) for index, gates in calls]
        for name, calls in rotated(recorded(model, ids)).layers.items()
    })  # fmt: skip
    with replay_routing(model, routes, gates="record"), record_routing(model) as again:
        found = gradients(model, ids)
    torch.testing.assert_close(again.layers, routes.layers, **EXACT)
    assert not any(name.endswith(("gate.weight", "router.weight", "router.bias")) for name in found)
    assert any("gate_up_proj" in name for name in found)


def test_replay_under_a_recipe_takes_the_selection_from_the_unquantized_pass():
    """What routing replay is for: quantized, the tiny model chooses otherwise; replayed, it chooses as before."""
    model = tiny_model("qwen3_moe")
    mxrl.convert(model, "bf16")
    ids = tokens(8, 16)
    before = recorded(model, ids)
    mxrl.convert(model, "mxfp4")
    free = recorded(model, ids)
    with replay_routing(model, before):
        replayed = recorded(model, ids)
    for name in before.layers:
        assert not torch.equal(free.layers[name][0].index, before.layers[name][0].index)
        torch.testing.assert_close(replayed.layers[name][0].index, before.layers[name][0].index, **EXACT)
        assert not torch.equal(replayed.layers[name][0].gates, before.layers[name][0].gates)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_computes_again_with_the_same_routes(use_reentrant):
    model = tiny_model("qwen3_moe").train()
    batches = tokens(3, 9, seed=1), tokens(2, 7, seed=2)
    with record_routing(model) as own:
        logits(model, *batches)
    routes = rotated(own)
    with replay_routing(model, routes):
        expected = gradients(model, *batches)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    with replay_routing(model, routes), record_routing(model) as again:
        found = gradients(model, *batches)
    assert again.calls == 2  # the second pass of a checkpoint isn't another call
    assert_same(found, expected)
    with pytest.raises(RoutingError, match="call backward after each forward pass"), replay_routing(model, routes):
        torch.stack([model(ids).logits.sum() for ids in batches]).sum().backward()


def test_routes_recorded_in_inference_mode_serve_training():
    model = tiny_model("qwen3_moe")
    with record_routing(model) as routes, torch.inference_mode():
        model(tokens())
    trained = gradients(model, tokens())
    with replay_routing(model, routes):
        assert_same(gradients(model, tokens()), trained)


def test_after_the_block_the_model_is_as_before():
    model = tiny_model("qwen3_moe")
    ids = tokens()
    plain = logits(model, ids)
    routes = rotated(recorded(model, ids))
    with replay_routing(model, routes):
        assert not torch.equal(logits(model, ids)[0], plain[0])
    torch.testing.assert_close(logits(model, ids), plain, **EXACT)
    with pytest.raises(KeyError), replay_routing(model, routes):
        raise KeyError
    torch.testing.assert_close(logits(model, ids), plain, **EXACT)


def test_what_does_not_fit_is_one_clear_line():
    model = tiny_model("qwen3_moe")
    ids = tokens(3, 9)
    routes = recorded(model, ids)
    first = "model.layers.0.mlp"

    def changed(**layers: Any) -> Routes:
        return Routes({**routes.layers, **layers})

    index, gates = routes.layers[first][0]
    cases: list[tuple[str, Routes, list[Tensor]]] = [
        ("call 1: 24 tokens, and 27 were recorded", routes, [ids[:, :8]]),
        ("called once more than the 1 times", routes, [ids, ids]),
        ("was called 0 times, and 1 calls were recorded", routes, []),
        (f"{first} is in the model, not in the routes", Routes({"model.layers.1.mlp": []}), []),
        ("model.layers.7.mlp is in the routes", changed(**{"model.layers.7.mlp": []}), []),
        ("chooses 2 experts a token", changed(**{first: [Choice(index[:, :1], gates[:, :1])]}), []),
        ("has experts 0 to 3", changed(**{first: [Choice(index + 2, gates)]}), []),
    ]
    for message, wrong, batches in cases:
        with pytest.raises(RoutingError, match=message) as caught, replay_routing(model, wrong):
            logits(model, *batches)
        assert "\n" not in str(caught.value)
    with pytest.raises(RoutingError, match="'router', 'record'"), replay_routing(model, routes, gates="none"):
        pass
    with pytest.raises(RoutingError, match="no forward pass"), record_routing(model):
        pass
    with pytest.raises(RoutingError, match="has no routed experts"), record_routing(tiny_model("qwen3")):
        pass


def test_an_unknown_router_is_named():
    model = tiny_model("mixtral")

    class OtherRouter(torch.nn.Module):
        pass

    model.model.layers[1].mlp.gate = OtherRouter()
    with pytest.raises(RoutingError, match=r"model\.layers\.1\.mlp: no router .* only OtherRouter; known: Qwen3MoeTop"):
        moe_layers(model)

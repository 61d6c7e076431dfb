"""The inputs of a model's layers: those that an independent look at the plain model finds, padding left out."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from tiny_models import MOE, tiny_model
from torch import Tensor, nn

from mxrl.calibration import calibrate
from mxrl.decompose import ErrorStats, error_stats
from mxrl.kinds import kind_of
from mxrl.rl.chain import Problem
from mxrl.rl.policy import build_policy, char_tokenizer
from mxrl.rl.tasks import load_task
from mxrl.scan import NonFiniteError

RECIPES = ("mxfp4", "mxfp4+of", "nvfp4")


class Tokens:
    """A tokenizer whose prompts are numbers: the tiny models have 50 tokens and no alphabet."""

    pad_token_id = 0
    eos_token_id = 2
    chat_template = None

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [int(word) for word in text.split()]}


def problems(*lengths: int) -> list[Problem]:
    g = torch.Generator().manual_seed(4)
    return [Problem(" ".join(map(str, torch.randint(3, 50, (n,), generator=g).tolist())), "", {}) for n in lengths]


def agree(found: ErrorStats, expected: ErrorStats, tolerance: float = 1e-12) -> None:
    """Counts exactly; sums to 1e-12 of the squared norm: rows and batches are added in another order."""
    a, b = found.to_dict(), expected.to_dict()
    for name, value in b.items():
        if isinstance(value, int) or name == "delta_hist":
            assert a[name] == value, name
        else:
            assert a[name] == pytest.approx(value, rel=tolerance, abs=tolerance * expected.sq_norm), name


class Looker:
    """Sees every matrix product of a plain model's parameters, however its modules come to it."""

    def __init__(self, model: nn.Module, monkeypatch: pytest.MonkeyPatch):
        self.seen: dict[str, list[Tensor]] = defaultdict(list)
        owner = {p.untyped_storage().data_ptr(): n for n, p in model.named_parameters() if p.ndim >= 2}
        linear, matmul = nn.functional.linear, torch.Tensor.__matmul__

        def look(x: Tensor, weight: Tensor) -> None:
            name = owner.get(weight.untyped_storage().data_ptr())
            if name is not None:
                self.seen[name].append(x.detach().reshape(-1, x.shape[-1]).clone())

        def seeing_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            look(x, weight)
            return linear(x, weight, bias)

        def seeing_matmul(x: Tensor, weight: Tensor) -> Tensor:
            look(x, weight)
            return matmul(x, weight)

        monkeypatch.setattr(nn.functional, "linear", seeing_linear)
        monkeypatch.setattr(torch.Tensor, "__matmul__", seeing_matmul)


@pytest.mark.parametrize("family", ["qwen3", *MOE])
def test_every_input_is_the_one_that_the_plain_model_multiplies(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One batch of prompts of one length. The plain model's experts run one after another, as transformers has them."""
    prompts = problems(7, 7, 7)
    ids = torch.tensor([[int(t) for t in str(p.prompt).split()] for p in prompts])
    plain: Any = tiny_model(family)
    plain.set_experts_implementation("eager") if family in MOE else None
    with monkeypatch.context() as patch, torch.no_grad():
        looker = Looker(plain, patch)
        logits = plain(input_ids=ids).logits
    model: Any = tiny_model(family)
    result = calibrate(model, Tokens(), prompts, RECIPES, baselines=())
    assert result.columns == RECIPES and (result.tokens, result.padding, result.longest) == (21, 0, 7)
    inputs = {i.name: i for i in result.inputs}
    parameters = {name if "experts" in name else f"{name}.weight" for name in inputs}
    skipped = {n for n in looker.seen if n not in parameters}
    assert parameters <= set(looker.seen)
    assert all("router" in n or n.endswith(("gate.weight", "lm_head.weight")) for n in skipped), skipped
    for name, found in inputs.items():
        rows = torch.cat(looker.seen[name if "experts" in name else f"{name}.weight"])
        assert (found.kind, found.width, found.dtype) == (kind_of(name), rows.shape[-1], "F32")
        if name.endswith("gate_up_proj"):  # every expert's copy of a token: ours counts a token once
            assert len(rows) == 42 and found.rows == 21
            rows = rows.unique(dim=0)
        assert found.rows == len(rows)
        for recipe in RECIPES:
            if "experts" in name:
                rows = rows[torch.argsort(rows[:, 0])]  # the order of rows is the experts'
            # gpt-oss adds its biases after the product, our GEMM inside it: float32 values differ in their last bit
            agree(found.stats[recipe], error_stats(rows, recipe), 1e-6 if family == "gpt_oss" else 1e-12)
    with torch.no_grad():  # and it computes what it computed
        assert torch.allclose(model(input_ids=ids).logits, logits, rtol=1e-5, atol=1e-5)


def test_padding_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of different length: rows of the places that hold tokens, taken from the padded plain model by hand."""
    prompts = problems(3, 9, 5)
    model: Any = tiny_model("qwen3_moe")
    result = calibrate(model, Tokens(), prompts, ["mxfp4"], baselines=(), batch_size=3)
    assert (result.prompts, result.tokens, result.padding, result.longest) == (3, 17, 10, 9)
    ids = [[int(t) for t in str(p.prompt).split()] for p in prompts]
    padded = torch.tensor([[0] * (9 - len(r)) + r for r in ids])
    mask = torch.tensor([[0] * (9 - len(r)) + [1] * len(r) for r in ids])
    plain: Any = tiny_model("qwen3_moe")
    plain.set_experts_implementation("eager")
    with monkeypatch.context() as patch, torch.no_grad():
        looker = Looker(plain, patch)
        plain.model(input_ids=padded, attention_mask=mask, use_cache=False)
    for i in result.inputs:
        assert i.rows == (34 if i.kind == "experts.down" else 17)
        if "experts" not in i.name:
            (rows,) = looker.seen[f"{i.name}.weight"]
            agree(i.stats["mxfp4"], error_stats(rows[mask.bool().reshape(-1)], "mxfp4"))
        elif (
            i.kind == "experts.down"
        ):  # its rows go with those of gate_up, whose values are the router's input, by token
            block = i.name.removesuffix(".experts.down_proj")
            states, sent = (
                looker.seen[f"{block}.gate.weight"][0],
                torch.cat(looker.seen[f"{block}.experts.gate_up_proj"]),
            )
            real = (sent[:, None] == states[mask.bool().reshape(-1)][None]).all(-1).any(-1)
            assert len(sent) == 54 and int(real.sum()) == 34
            rows = torch.cat(looker.seen[i.name])[real]
            agree(i.stats["mxfp4"], error_stats(rows, "mxfp4"))
    assert result.total("mxfp4").numel == sum(i.rows * i.width for i in result.inputs)
    assert result.kinds == ("q", "k", "v", "o", "experts.gate_up", "experts.down") and result.layers == (0, 1)
    assert sum(result.total("mxfp4", layer=n).numel for n in (0, 1)) == result.total("mxfp4").numel


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_a_policy_on_the_built_in_task(kind: str) -> None:
    """The same figures twice, also on the model that was looked at already; batches are told to `progress`."""
    model, tokenizer = build_policy(kind, size="tiny"), char_tokenizer()
    prompts = load_task("chain", seed=0, n=5)
    told: list[int] = []
    first = calibrate(model, tokenizer, prompts, ["mxfp4"], batch_size=2, progress=told.append)
    assert told == [2, 2, 1]
    assert first.columns == ("mxfp4", "mxfp4:floor", "mxfp4:even", "nvfp4")
    assert first.tokens == sum(len(str(p.prompt)) for p in prompts)
    again = calibrate(model, tokenizer, prompts, ["mxfp4"], batch_size=2)
    assert [(i.name, i.rows, i.stats) for i in again.inputs] == [(i.name, i.rows, i.stats) for i in first.inputs]
    assert ("model.embed_tokens", "embedding") in first.left
    q, k = (next(i for i in first.inputs if i.name.endswith(f"0.self_attn.{p}_proj")) for p in "qk")
    assert q.stats == k.stats  # they share their input
    assert not any(m._forward_pre_hooks for m in model.modules())
    assert not any(hasattr(m, "mxrl_observer") for m in model.modules())


def test_shared_inputs_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def counting(x: Tensor, recipe: Any) -> ErrorStats:
        calls.append(x.shape[-1])
        return error_stats(x, recipe)

    monkeypatch.setattr("mxrl.calibration.error_stats", counting)
    result = calibrate(tiny_model("qwen3"), Tokens(), problems(4), ["mxfp4"], baselines=())
    assert len(result.inputs) == 14  # q, k, v, o, gate, up, down of two layers
    assert len(calls) == 8


@pytest.mark.parametrize(("family", "broken", "layer"), [
    ("qwen3", "model.layers.1.input_layernorm.weight", "model.layers.1.self_attn.q_proj"),
    ("qwen3_moe", "model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"),
])  # fmt: skip
def test_a_nan_names_the_layer_and_the_prompt(family: str, broken: str, layer: str) -> None:
    model = tiny_model(family)
    with torch.no_grad():
        model.get_parameter(broken).fill_(float("nan"))
    with pytest.raises(NonFiniteError, match=rf"^the input of layer '{layer}' has \d+ NaN .* begins with prompt 0$"):
        calibrate(model, Tokens(), problems(4, 4), ["mxfp4"])
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_what_can_not_be_run() -> None:
    model = tiny_model("qwen3")
    with pytest.raises(ValueError, match="at least one prompt"):
        calibrate(model, Tokens(), [], ["mxfp4"])
    with pytest.raises(ValueError, match="prompt 1 has 65 tokens, and the model has 64 positions"):
        calibrate(model, Tokens(), problems(3, 65), ["mxfp4"])
    with pytest.raises(ValueError, match="makes no tokens of prompt 0"):
        calibrate(model, Tokens(), [Problem("", "", {})], ["mxfp4"])
    with pytest.raises(ValueError, match="mxfp5"):
        calibrate(model, Tokens(), problems(3), ["mxfp5"])

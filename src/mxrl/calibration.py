"""What a model's linear layers are given: the decomposition of their inputs over calibration prompts, as it runs.

    problems → prompts → batches, padded on the left → one forward pass each, nothing generated
    every converted layer's input x [tokens, K]   (padding left out)   → ErrorStats of each recipe, added up

The layers are those that `mxrl.nn.convert` would quantize. The model computes unquantized, in the type it is stored
in: what is measured is what quantizing its activations *would* lose, one layer at a time. Inputs are blocked along K,
one row a token, as in mxrl.nn. Layers that share an input (q, k and v; gate and up) each count it.

    experts.gate_up   the token's state, once a token: it is quantized before it is sent to its experts
    experts.down      what the experts' gate gives: once a token and expert it was sent to

NVFP4 has one float32 scale a tensor: here a batch's input of a layer, padding left out. Statistics are summed batch by
batch; no activation is kept.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from mxrl.decompose import ErrorStats, error_stats
from mxrl.kinds import KINDS, kind_of, layer_of, natural_key
from mxrl.nn import convert
from mxrl.nn.experts import weight_names
from mxrl.nn.grouped import grouped_mm, route
from mxrl.nn.layers import QuantizedLayer, quantized_layers
from mxrl.recipes import Recipe
from mxrl.rl.chain import Problem
from mxrl.rl.evaluate import prompt_ids
from mxrl.rl.rollout import inference, left_pad, pad_id
from mxrl.scan import BASELINES, NonFiniteError, columns_of, nonfinite, parse_recipes

NAME = "mxrl_observed"  # of the experts implementation that shows its inputs


@dataclass
class LayerInput:
    """The input of one layer (or of one projection of all its experts), summed over the batches.

    name: the module's, with the projection's for experts. rows: token vectors seen. width: K.
    """

    name: str
    kind: str
    layer: int | None
    width: int
    dtype: str
    rows: int
    stats: dict[str, ErrorStats]


@dataclass(frozen=True)
class Calibration:
    """The inputs of every layer; sums over them are formed here, in the order of `inputs`.

    tokens: of the prompts, each once. padding: places of the batches that held none. longest: tokens of a prompt.
    """

    recipes: tuple[str, ...]
    baselines: tuple[str, ...]
    inputs: tuple[LayerInput, ...]
    left: tuple[tuple[str, str], ...]
    prompts: int
    tokens: int
    padding: int
    longest: int
    dtype: str
    seconds: float

    @property
    def columns(self) -> tuple[str, ...]:
        return columns_of(self.recipes, self.baselines)

    @property
    def kinds(self) -> tuple[str, ...]:
        found = {i.kind for i in self.inputs}
        return tuple(k for k in KINDS if k in found)

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(sorted({i.layer for i in self.inputs if i.layer is not None}))

    def total(self, recipe: str, kind: str | None = None, layer: int | None = None) -> ErrorStats:
        """The merged statistics of `recipe` over all inputs, or those of one kind or layer."""
        return ErrorStats.merged(
            i.stats[recipe]
            for i in self.inputs
            if (kind is None or i.kind == kind) and (layer is None or i.layer == layer)
        )


def calibrate(
    model: nn.Module,
    tokenizer: Any,
    problems: Sequence[Problem],
    recipes: Sequence[str] = (),
    *,
    baselines: Sequence[str] = BASELINES,
    batch_size: int = 16,
    progress: Callable[[int], None] = lambda prompts: None,
) -> Calibration:
    """Run the prompts of `problems` through `model` and split the error of every linear layer's input.

    model: a causal language model of transformers, on any device. Its linear layers and experts become
        `mxrl.nn.convert`'s for bf16, which compute as before; its parameters stay the same objects.
    progress: told the number of prompts done. Deterministic: the same model, prompts and batch size give the same sums.
    Raises NonFiniteError, naming layer and prompt, for an activation with a NaN or an Inf; ConvertError for a model
    whose layers aren't known; RecipeError; ValueError for no prompts, or a prompt longer than the model's positions.
    """
    if not problems:
        raise ValueError("calibration needs at least one prompt")
    started = time.monotonic()
    columns = columns_of(recipes, baselines)
    ids = [prompt_ids(problem, tokenizer) for problem in problems]
    _check_lengths(ids, model)
    report = convert(model, "bf16")
    observer = _Observer(columns)
    # without the head, whose logits are large
    body: Any = getattr(model, getattr(model, "base_model_prefix", ""), model)
    device = next(model.parameters()).device
    padding = 0
    with inference(model), observer.watching(quantized_layers(model)):
        for begin in range(0, len(ids), batch_size):
            rows, mask = left_pad(ids[begin : begin + batch_size], pad_id(tokenizer), device)
            padding += int((mask == 0).sum())
            observer.begin(mask.bool(), begin)
            body(input_ids=rows, attention_mask=mask, use_cache=False)
            progress(len(rows))
    inputs = sorted(observer.inputs.values(), key=lambda i: natural_key(i.name))
    return Calibration(
        parse_recipes(recipes) or columns[:1], parse_recipes(baselines), tuple(inputs),
        tuple((item.name, item.reason) for item in report.left), len(ids), sum(map(len, ids)), padding,
        max(map(len, ids)), str(next(model.parameters()).dtype).removeprefix("torch."), time.monotonic() - started,
    )  # fmt: skip


def _check_lengths(ids: Sequence[Sequence[int]], model: Any) -> None:
    room = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    for i, row in enumerate(ids):
        if not row:
            raise ValueError(f"the tokenizer makes no tokens of prompt {i}; is it in the model's folder?")
        if room is not None and len(row) > room:
            raise ValueError(f"prompt {i} has {len(row)} tokens, and the model has {room} positions")


class _Observer:
    """Takes the statistics of what the layers are given."""

    def __init__(self, columns: Sequence[str]):
        self.inputs: dict[str, LayerInput] = {}
        self._recipes = {column: Recipe.parse(column) for column in columns}
        self.tokens = torch.empty(0)  # bool [places of the batch]: which of them hold a token
        self._first = 0
        self._last: tuple[Tensor, Tensor, dict[str, ErrorStats]] | None = None

    def begin(self, mask: Tensor, first: int) -> None:
        """A batch comes. mask: bool [prompts, places], True for tokens; first: number of its first prompt."""
        self.tokens, self._first, self._last = mask.reshape(-1), first, None

    @contextlib.contextmanager
    def watching(self, layers: Iterator[QuantizedLayer]) -> Iterator[None]:
        """Inside the block, what the layers are given is seen."""
        with contextlib.ExitStack() as stack:
            for layer in layers:
                stack.callback(self._watch(layer))
            yield

    def _watch(self, layer: QuantizedLayer) -> Callable[[], None]:
        """Start to look at a layer; returns what ends it."""
        if layer.is_linear:

            def hook(module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
                x = arguments[0] if arguments else options["input"]
                self.see(layer.name, x, self.tokens)

            return layer.module.register_forward_pre_hook(hook, with_kwargs=True).remove
        before = layer.module.config._experts_implementation
        layer.module.config._experts_implementation = NAME
        layer.module.mxrl_observer = (self, layer.name)

        def end() -> None:
            layer.module.config._experts_implementation = before
            del layer.module.mxrl_observer

        return end

    def see(self, name: str, x: Tensor, tokens: Tensor) -> None:
        """x [..., K], its rows in the order of `tokens`, bool [rows]: those that count."""
        if self._last is None or self._last[0] is not x or self._last[1] is not tokens:
            flat = x.detach().reshape(-1, x.shape[-1])
            if flat.shape[0] != tokens.shape[0]:
                raise ValueError(
                    f"layer '{name}' is given {flat.shape[0]} rows in a batch of {tokens.shape[0]} tokens, so that "
                    "padding can't be told from them; this architecture's activations can't be analysed"
                )
            rows = flat[tokens]
            self._last = (x, tokens, {c: error_stats(rows, r) for c, r in self._recipes.items()})
            if any(s.nonfinite_blocks for s in self._last[2].values()):
                raise NonFiniteError(
                    f"the input of layer '{name}' has {nonfinite([rows], rows.shape)} in the batch that begins with "
                    f"prompt {self._first}"
                )
        stats = self._last[2]
        known = self.inputs.get(name)
        if known is None:
            dtype = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}.get(x.dtype, "F32")
            zero = dict.fromkeys(stats, ErrorStats.zero())
            known = LayerInput(name, kind_of(name), layer_of(name), x.shape[-1], dtype, 0, zero)
            self.inputs[name] = known
        known.rows += int(tokens.sum())
        known.stats = {c: known.stats[c] + s for c, s in stats.items()}


def observed_experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The experts' forward pass, unquantized, that shows the input of each projection to the module's observer.

    hidden_states [T, H], top_k_index and top_k_weights [T, A]; as `mxrl.nn.experts.quantized_experts_forward`.
    """
    observer, name = self.mxrl_observer
    first, second = weight_names(self)
    tokens, active = top_k_index.shape
    where = route(top_k_index, self.num_experts)

    def project(attribute: str, x: Tensor) -> Tensor:
        weight = getattr(self, attribute)
        bias = getattr(self, f"{attribute}_bias") if self.has_bias else None
        return grouped_mm(x, weight if self.is_transposed else weight.mT, bias, where.expert_S, where.ends_E)

    observer.see(f"{name}.{first}", hidden_states, observer.tokens)
    hidden = project(first, hidden_states[where.order_S // active])
    inner_SI = self._apply_gate(hidden) if self.has_gate else self.act_fn(hidden)
    observer.see(f"{name}.{second}", inner_SI, observer.tokens[where.order_S // active])
    y_TAH = project(second, inner_SI)[where.place_S].view(tokens, active, -1)
    return (y_TAH * top_k_weights.unsqueeze(-1)).sum(dim=1).to(hidden_states.dtype)


ALL_EXPERTS_FUNCTIONS.register(NAME, observed_experts_forward)

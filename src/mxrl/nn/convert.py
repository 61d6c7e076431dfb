"""Apply a recipe to a model, in place, and say what was converted, what was left, and why.

Converted   q, k, v, o, gate, up, down of every block (every plain nn.Linear) and every expert's matrices
Left        embeddings, output head (trainers read `lm_head.weight` themselves), norms, MoE routers, biases, adapters

The parameters stay the very same objects under the very same names, so optimizers, tied weights, state dicts, PEFT and
`save_pretrained` see a plain Hugging Face model: what is saved are the master weights. An MoE whose experts aren't
known is an error, never a silent skip.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from mxrl.nn import experts
from mxrl.nn.layers import canonical_name, quantized_layers
from mxrl.nn.linear import QuantizedLinear
from mxrl.nn.operands import Operands
from mxrl.recipes import Recipe

HEADS = {"lm_head", "score", "classifier", "v_head", "value_head", "embed_out", "qa_outputs"}
ROUTER_NAMES = {"router", "gate", "shared_expert_gate"}
_ROUTER_CLASS = re.compile(r"router|topk|gating$", re.IGNORECASE)  # MoshiGatingMLP is none


class ConvertError(ValueError):
    """A model or a pattern that can't be converted; one line that names the module and what would work."""


@dataclass(frozen=True)
class Converted:
    name: str  # canonical parameter name
    shape: tuple[int, ...]
    kind: str  # "linear" or "experts"


@dataclass(frozen=True)
class Left:
    name: str  # canonical module name
    reason: str


@dataclass(frozen=True)
class ConversionReport:
    """What `convert` did: weights converted, modules that own parameters and were left, each with a reason."""

    recipe: Recipe
    converted: tuple[Converted, ...]
    left: tuple[Left, ...]
    parameters: int  # of the whole model
    quantized_parameters: int

    def to_dict(self) -> dict[str, Any]:
        return {
            "recipe": str(self.recipe),
            "parameters": self.parameters,
            "quantized_parameters": self.quantized_parameters,
            "converted": [{"name": c.name, "shape": list(c.shape), "kind": c.kind} for c in self.converted],
            "left": [{"name": item.name, "reason": item.reason} for item in self.left],
        }

    def __str__(self) -> str:
        """A compact table: layer numbers become `*`, equal rows are counted."""
        rows = Counter((_starred(c.name), "×".join(map(str, c.shape))) for c in self.converted)
        left = Counter((_starred(item.name), item.reason) for item in self.left)
        share = self.quantized_parameters / max(self.parameters, 1)
        head = f"{self.recipe}: {len(self.converted)} weights converted, {share:.1%} of {self.parameters:,} parameters"
        width = max((len(name) for name, _ in (*rows, *left)), default=0)
        lines = [head]
        for title, counts in (("converted", rows), ("left as they are", left)):
            lines += [title, *(f"  {name:<{width}}  {n:>4} × {what}" for (name, what), n in counts.items())]
        return "\n".join(lines)


def _starred(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def convert(model: nn.Module, recipe: Recipe | str, *, skip: str | Iterable[str] = ()) -> ConversionReport:
    """Make every linear layer and expert of `model` compute as `recipe` says; converting again switches the recipe.

    model: a Hugging Face model or any module tree. skip: fnmatch patterns of module names ("model.layers.0.*",
        "*.down_proj") or one of them, besides `recipe.skip`; a pattern also takes everything below a module that it
        matches.
    Parameters keep identity, names, values and dtypes. With `bf16` the layers compute as before, by the same code.
    Raises ConvertError, before anything is changed, for experts of an unknown class, a pattern that leaves nothing out,
    a model with nothing to convert, and a linear layer whose forward was replaced (accelerate's device_map does);
    TypeError for what is no model.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"convert: expected a model (a torch.nn.Module), got {type(model).__name__}; load it first")
    recipe = Recipe.parse(recipe)
    patterns = (*recipe.skip, *((skip,) if isinstance(skip, str) else skip))
    for layer in quantized_layers(model):
        if layer.holds or any(map(layer.shared, layer.weights)):
            block = "rollout_weights" if layer.holds else "shared_weights"
            raise ConvertError(f"convert: the model is inside {block}; leave that block first")
    plan, left, skipped = _plan(model, patterns)
    if not plan and skipped:
        raise ConvertError(
            f"convert: skip leaves out all {len(skipped)} layers of {type(model).__name__} that would be converted; "
            f"its patterns: {', '.join(patterns)}"
        )
    if not plan:
        kinds = sorted({type(m).__name__ for m in model.modules() if any(True for _ in m.parameters(recurse=False))})
        raise ConvertError(f"convert: {type(model).__name__} has no linear layer to convert, only {', '.join(kinds)}")

    operands = Operands.of(recipe)
    converted: list[Converted] = []
    for name, module in plan:
        if isinstance(module, nn.Linear):
            _convert_linear(module, operands)
            converted.append(Converted(f"{name}.weight", tuple(module.weight.shape), "linear"))
        else:
            module.mxrl_state = experts.ExpertsState(operands)
            module.config._experts_implementation = experts.NAME
            for attribute in experts.weight_names(module):
                shape = tuple(getattr(module, attribute).shape)
                converted.append(Converted(f"{name}.{attribute}", shape, "experts"))
    for module in skipped:  # converted before, skipped now
        if isinstance(module, QuantizedLinear):
            module.operands = None
        elif experts.state_of(module) is not None:
            module.mxrl_state = None

    quantized = {
        id(parameter): parameter.numel()
        for layer in quantized_layers(model)
        for parameter in map(layer.parameter, layer.weights)
    }
    total = sum(parameter.numel() for parameter in model.parameters())
    return ConversionReport(recipe, tuple(converted), tuple(left), total, sum(quantized.values()))


def _convert_linear(module: Any, operands: Operands) -> None:
    if not isinstance(module, QuantizedLinear):
        module.__class__ = QuantizedLinear  # in place: hooks, the parents' references and the Parameters stay
    module.operands = operands


def _plan(model: nn.Module, patterns: tuple[str, ...]) -> tuple[list[tuple[str, Any]], list[Left], list[Any]]:
    """What to convert, what to leave and why, and the convertible modules that a pattern skips."""
    plan: list[tuple[str, Any]] = []
    left: list[Left] = []
    skipped: list[Any] = []
    unused = set(patterns)
    heads, embeddings = _heads(model)
    ancestors: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        ancestors[path] = module
        if not any(True for _ in module.parameters(recurse=False)):
            continue
        name = canonical_name(path)
        reason = _reason(path, module, ancestors, heads, embeddings)
        if reason is None or reason.startswith("unknown experts"):
            matched = [p for p in patterns if matches(p, name) or matches(p, path)]
            unused.difference_update(matched)
            if matched:
                skipped.append(module)
                reason = f"skipped by '{matched[0]}'"
            elif reason is not None:
                raise ConvertError(
                    f"convert: {name} is a {type(module).__name__}, experts that mxrl doesn't know; known: "
                    f"{', '.join(experts.KNOWN)} and others that transformers' use_experts_implementation dispatches; "
                    f"skip=['{_starred(name)}'] leaves them unquantized"
                )
            elif "forward" in module.__dict__:
                raise ConvertError(
                    f"convert: {name}.forward was replaced (accelerate's device_map does that), so the layer can't be "
                    "converted; load the model without device_map"
                )
        if reason is None:
            plan.append((name, module))
        else:
            left.append(Left(name, reason))
    if unused:
        pattern = sorted(unused)[0]
        near = difflib.get_close_matches(pattern, [name for name, _ in plan], n=1, cutoff=0)
        hint = f"; a name it could match: {near[0]}" if near else ""
        raise ConvertError(f"convert: skip pattern '{pattern}' matches no layer that would be converted{hint}")
    return plan, left, skipped


def matches(pattern: str, path: str) -> bool:
    """Whether the pattern matches a module's path, or that of a module which holds it."""
    parts = path.split(".")
    return any(fnmatchcase(".".join(parts[: n + 1]), pattern) for n in range(len(parts)))


def _heads(model: nn.Module) -> tuple[set[int], set[int]]:
    """ids of output-embedding modules, and of input-embedding Parameters (a head tied to one has no other mark)."""
    heads: set[int] = set()
    embeddings: set[int] = set()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            embeddings.add(id(module.weight))
        get_head = getattr(module, "get_output_embeddings", None)
        if callable(get_head):
            heads.add(id(get_head()))
    return heads, embeddings


def _reason(
    path: str, module: nn.Module, ancestors: dict[str, nn.Module], heads: set[int], embeddings: set[int]
) -> str | None:
    """Why `module`, which owns parameters, is left; None if it is converted."""
    kind = type(module).__name__
    parts = path.split(".")
    last = next((p for p in reversed(parts) if p != "base_layer"), "")
    above = [ancestors[".".join(parts[:n])] for n in range(1, len(parts))]
    own = dict(module.named_parameters(recurse=False))
    if isinstance(module, nn.Embedding):
        return "embedding"
    if id(module) in heads or (last in HEADS and isinstance(module, nn.Linear)):
        return "output head"
    for n, owner in enumerate(above):
        if parts[n + 1] in getattr(owner, "adapter_layer_names", ()):
            return "adapter"
    if any(_ROUTER_CLASS.search(type(m).__name__) for m in (*above[-2:], module)) or (
        last in ROUTER_NAMES and isinstance(module, nn.Linear)
    ):
        return "router"
    if isinstance(module, nn.Linear):
        if id(module.weight) in embeddings:
            return "output head, tied to the embedding"
        if isinstance(module, QuantizedLinear) or type(module) is nn.Linear:
            return None
        return f"{kind} is a linear layer of its own kind"
    if experts.is_known_experts(module):
        return None
    conv = isinstance(module, nn.modules.conv._ConvNd)
    if "expert" in kind.lower() and any(p.ndim >= 2 for p in own.values()):
        return "unknown experts"
    if not conv and any(p.ndim >= 3 for p in own.values()):
        return "unknown experts"
    if all(p.ndim <= 1 for p in own.values()):
        return "norm" if "norm" in kind.lower() else f"no matrix: {', '.join(own)}"
    return f"{kind} is not a linear layer that mxrl knows"

"""What vLLM carries to its workers under `quantization_config`, and which matrices that quantizes.

    {"quant_method": "mxrl", "recipe": "mxfp4+mbs+of", "skip": ["model.layers.0.*"]}

Names are Hugging Face's, as `mxrl.convert` has them: training and rollout take one recipe and one list of patterns.
vLLM merges layers (q, k, v → qkv_proj; gate, up → gate_up_proj) and calls the experts of a block one layer; its
`packed_modules_mapping` says what was merged. In text models all other parts of a path are the same in both.

Tensor parallelism cuts K, the axis that blocks lie along, in row-parallel layers (o_proj, down_proj) and in the
experts' down projections. A rank quantizes what it has, so no cut may go through a block (MXFP4: 32) or, with MBS,
through a macro-block (128).
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mxrl.nn.convert import HEADS, ROUTER_NAMES, matches
from mxrl.nn.operands import Operands
from mxrl.recipes import Recipe, RecipeError

METHOD = "mxrl"  # of vLLM's quantization methods
MERGED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}  # where it is silent
CHOICES = {"weights": ("loaded", "quantize"), "experts": ("triton", "grouped")}
EXAMPLE = '{"quantization_config": {"quant_method": "mxrl", "recipe": "mxfp4+mbs+of"}}'


class VllmPluginError(RuntimeError):
    """A setting, layer or sharding that can't be: one line that names it and what would work.

    No ValueError: vLLM's configuration classes (pydantic) would fold one into a message of their own.
    """


@dataclass(frozen=True)
class Settings:
    """The dict under `quantization_config`, without `quant_method`."""

    recipe: str
    skip: tuple[str, ...] = ()  # fnmatch patterns of module names left unquantized, besides the recipe's
    weights: str = "loaded"  # "quantize": Q of every matrix as it is loaded, for a checkpoint that isn't quantized
    experts: str = "triton"  # vLLM's own kernels; "grouped": the grouped GEMMs that train, for any device

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Settings:
        """Raises VllmPluginError for an unknown key or value, a recipe that can't be, or that vLLM can't serve."""
        values = {key: value for key, value in config.items() if key != "quant_method"}
        keys = tuple(field.name for field in dataclasses.fields(cls))
        for key, value in values.items():
            if key not in keys:
                near = difflib.get_close_matches(key, keys, n=1)
                hint = f" (did you mean '{near[0]}'?)" if near else ""
                raise VllmPluginError(f"quantization_config.{key} is no key{hint}; possible: {', '.join(keys)}")
            if key in CHOICES and value not in CHOICES[key]:
                raise VllmPluginError(f"quantization_config.{key}={value!r} is none of {', '.join(CHOICES[key])}")
        if not isinstance(values.get("recipe"), str):
            raise VllmPluginError(f"quantization_config.recipe is missing or no text; for example {EXAMPLE}")
        skip = values.get("skip", ())
        if isinstance(skip, str) or not all(isinstance(pattern, str) for pattern in skip):
            raise VllmPluginError(f"quantization_config.skip={skip!r} must be a list of patterns")
        settings = cls(**{**values, "skip": tuple(skip)})
        try:
            recipe = settings.parsed
        except RecipeError as error:
            raise VllmPluginError(f"quantization_config.recipe: {error}") from None
        if recipe.base == "nvfp4" and recipe.activations == "a4":
            raise VllmPluginError(
                f"quantization_config.recipe '{settings.recipe}': an NVFP4 activation has one scale for the whole "
                "tensor, so a token's value would depend on its batch and on padding; add +w4a16 or +w4a8"
            )
        return settings

    @cached_property
    def parsed(self) -> Recipe:
        return Recipe.parse(self.recipe)

    @property
    def operand(self) -> Recipe | None:
        """The activations' quantizer; None leaves them as they are (bf16, w4a16)."""
        operand = Operands.of(self.parsed).activation
        assert operand is None or isinstance(operand, Recipe)
        return operand

    @property
    def weight_operand(self) -> Recipe | None:
        """The weights' quantizer at load; None leaves them as they are loaded."""
        operand = Operands.of(self.parsed).weight if self.weights == "quantize" else None
        assert operand is None or isinstance(operand, Recipe)
        return operand

    # --- which layers ---

    def linear_matrices(self, prefix: str, packed: Mapping[str, Sequence[str]]) -> tuple[str, ...] | None:
        """Canonical names of the matrices in vLLM's linear layer `prefix`; None: left as it is.

        packed: vLLM's packed_modules_mapping, from a merged layer's name to its parts' names. Raises VllmPluginError
        where a skip pattern matches some of the parts but not all, since they share one input.
        """
        parent, dot, last = prefix.rpartition(".")
        if last in HEADS or last in ROUTER_NAMES:
            return None
        merged = packed.get(last) or MERGED.get(last) or (last,)
        parts = tuple(f"{parent}{dot}{part}" for part in merged)
        skipped = [part for part in parts if self._skipped(part)]
        if skipped and len(skipped) < len(parts):
            kept = next(part for part in parts if part not in skipped)
            raise VllmPluginError(
                f"skip pattern '{self._skipped(skipped[0])}' leaves out {skipped[0]} but not {kept}, and vLLM merges "
                f"them into {prefix}; skip all of {', '.join(merged)} or none, in training too"
            )
        if skipped:
            return None
        if last == "kv_b_proj" and self.operand is not None:
            raise VllmPluginError(
                f"{prefix}: vLLM's latent attention (MLA) multiplies with this weight elsewhere, so its input can't be "
                "quantized; skip '*.kv_b_proj', in training too"
            )
        return tuple(f"{part}.weight" for part in parts)

    def expert_matrices(self, prefix: str, experts: int, gated: bool) -> tuple[str, ...] | None:
        """Canonical names of the matrices of all `experts` of the fused layer `prefix`; None: left as it is."""
        if self._skipped(prefix):
            return None
        parts = ("gate_proj", "up_proj", "down_proj") if gated else ("up_proj", "down_proj")
        return tuple(f"{prefix}.{e}.{part}.weight" for e in range(experts) for part in parts)

    def _skipped(self, name: str) -> str | None:
        patterns = (*self.parsed.skip, *self.skip)
        return next((pattern for pattern in patterns if matches(pattern, name)), None)

    # --- shards ---

    @property
    def unit(self) -> int:
        """Elements along K that are quantized together: a block's, or a macro-block's with MBS; 1 for none."""
        if self.operand is None:
            return 1
        assert self.operand.format is not None
        return self.operand.macro if self.operand.mbs is not None else self.operand.format.block

    def check_shard(self, name: str, k_axis: int, ranks: int, *, experts: bool = False) -> None:
        """Raise VllmPluginError if K = `k_axis` split over `ranks` ranks cuts a block of layer `name`'s input."""
        if ranks == 1 or k_axis % ranks or k_axis // ranks % self.unit == 0:  # (vLLM itself refuses an uneven split)
            return
        fitting = [n for n in range(1, ranks) if ranks % n == 0 == k_axis % (n * self.unit)] or [1]
        what = "macro-blocks" if self.operand is not None and self.operand.mbs is not None else "blocks"
        remedy = " or enable_expert_parallel" if experts else ""
        raise VllmPluginError(
            f"{name}: K={k_axis} over {ranks} tensor-parallel ranks is {k_axis // ranks} a rank, which cuts {what} of "
            f"{self.unit} (recipe '{self.recipe}'); use tensor_parallel_size={fitting[-1]}{remedy}"
        )

"""vLLM's side: the quantization config "mxrl", and the methods of linear layers and of fused experts.

    LinearBase (qkv, o, gate_up, down)     y = Q(x) · wᵀ + b by whatever GEMM serves an unquantized layer
    RoutedExperts (a block's experts)      experts.py
    heads, embeddings, routers, attention  as in an unquantized model

The linear method holds vLLM's method for unquantized layers and doesn't inherit from it: where vLLM sees one of those
it may fuse the GEMM with what follows and pass our quantizer by.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import (
    LinearBase,
    LinearMethodBase,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase

from mxrl.integrations.vllm.experts import experts_class
from mxrl.integrations.vllm.forward import quantized_input
from mxrl.integrations.vllm.settings import EXAMPLE, METHOD, Settings, VllmPluginError
from mxrl.quantize import fake_quantize
from mxrl.recipes import Recipe

logger = init_logger("vllm.mxrl")  # below vLLM's own logger, so that it is shown with it


def register() -> None:
    """Make "mxrl" one of vLLM's quantization methods."""
    register_quantization_config(METHOD)(MxrlConfig)


class MxrlConfig(QuantizationConfig):
    """`quantization_config` of a model's Hugging Face config, as vLLM hands it out to the layers."""

    def __init__(self, settings: Settings | None = None) -> None:
        super().__init__()
        if settings is None:
            raise VllmPluginError(f"quantization={METHOD} needs a recipe: hf_overrides={EXAMPLE}")
        self.settings = settings

    def __repr__(self) -> str:
        return f"MxrlConfig({self.settings})"

    def get_name(self) -> Any:
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80  # bf16

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> MxrlConfig:
        settings = Settings.from_config(config)
        logger.info("mxrl: activations %s, weights %s, %s", settings.operand, settings.weights, settings)
        return cls(settings)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if isinstance(layer, LinearBase):
            matrices = self.settings.linear_matrices(prefix, self.packed_modules_mapping)
            if matrices is None:
                return UnquantizedLinearMethod()
            return QuantizedInputLinearMethod(self.settings, prefix, matrices)
        if isinstance(layer, RoutedExperts):
            moe: Any = layer.moe_config
            matrices = self.settings.expert_matrices(prefix, moe.num_logical_experts, moe.is_act_and_mul)
            return None if matrices is None else QuantizedInputMoEMethod(self.settings, prefix, matrices, moe)
        return None


def quantizing(loader: Callable[..., Any], operand: Recipe | None) -> Callable[..., Any]:
    """vLLM's weight loader, given Q of each matrix as it comes (whole, before it is sharded) in the layer's dtype."""
    if operand is None:
        return loader

    @functools.wraps(loader)
    def load(param: nn.Parameter, loaded_weight: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not param.is_meta:  # a reload counts elements on meta parameters first
            loaded_weight = fake_quantize(loaded_weight.to(param.device, param.dtype), operand)
        return loader(param, loaded_weight, *args, **kwargs)

    return load


@register_weight_loader_v2_supported_method
class QuantizedInputLinearMethod(LinearMethodBase):
    """A linear layer that is loaded and multiplied as an unquantized one, with its input quantized along K."""

    supports_pre_processed_weights = True

    def __init__(self, settings: Settings, prefix: str, matrices: tuple[str, ...]) -> None:
        self.settings, self.prefix, self.matrices = settings, prefix, matrices
        self.operand = settings.operand
        self.plain = UnquantizedLinearMethod()

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        self.settings.check_shard(self.prefix, input_size, input_size // input_size_per_partition)
        loader = quantizing(extra_weight_attrs.pop("weight_loader"), self.settings.weight_operand)
        self.plain.create_weights(
            layer,
            input_size_per_partition,
            output_partition_sizes,
            input_size,
            output_size,
            params_dtype,
            weight_loader=loader,
            **extra_weight_attrs,
        )

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        self.plain.process_weights_after_loading(layer)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.plain.apply(layer, quantized_input(x, self.operand), bias)


class QuantizedInputMoEMethod(UnquantizedFusedMoEMethod):
    """vLLM's method for unquantized experts (weights, loading, reloading), with experts of our class."""

    def __init__(self, settings: Settings, prefix: str, matrices: tuple[str, ...], moe: Any) -> None:
        FusedMoEMethodBase.__init__(self, moe)  # the next class's would select a kernel
        self.settings, self.prefix, self.matrices = settings, prefix, matrices
        self.unquantized_backend = UnquantizedMoeBackend.TRITON  # the layout of weights that both classes take
        self.experts_cls = experts_class(settings, moe, prefix)
        self.supports_pre_processed_weights = True

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        ranks = self.moe.tp_size
        self.settings.check_shard(self.prefix, self.moe.intermediate_size, ranks, experts=True)
        loader = quantizing(extra_weight_attrs.pop("weight_loader"), self.settings.weight_operand)
        super().create_weights(
            layer,
            num_experts,
            hidden_size,
            intermediate_size_per_partition,
            params_dtype,
            weight_loader=loader,
            **extra_weight_attrs,
        )

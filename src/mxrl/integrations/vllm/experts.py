"""vLLM's fused experts with both inputs quantized: the token states, and the down projection's input.

vLLM's kernels take the token states to the experts' sum in one call, so the intermediate activation isn't seen from
outside. Two classes get at it; both stand where vLLM's modular kernel (prepare, experts, finalize) puts experts:

    triton    vLLM's Triton GEMMs, unchanged. Token states are quantized before the first; the activation function is
              a method of vLLM's class, so the result is quantized in place there, before the second. Two passes over
              memory more than bf16 a layer. Works with expert parallelism. Gates multiply the float32 sums.
    grouped   forward.py: training's own grouped GEMMs and its rounding of the gates, on any device. It gathers and
              scatters rows that Triton's kernel only indexes, and torch's kernel is not tuned for few rows: slower.
              On CUDA graphs needs bf16 on Hopper or Blackwell (elsewhere torch loops over experts on the host).

The two differ by the order of sums and by bf16 rounding of products, as any two GEMMs do.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import functools
from typing import Any

import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from torch import Tensor
from torch.nn.functional import gelu, silu
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP

from mxrl.integrations.vllm.forward import experts_forward, quantize_, quantized_input
from mxrl.integrations.vllm.settings import Settings, VllmPluginError
from mxrl.recipes import Recipe

_FUNCTIONS = {
    MoEActivation.SILU: silu,
    MoEActivation.GELU: gelu,
    MoEActivation.GELU_TANH: functools.partial(gelu, approximate="tanh"),
}


class QuantizedTritonExperts(TritonExperts):
    """vLLM's TritonExperts, whose two GEMMs get quantized inputs."""

    operand: Recipe | None = None

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return activation in _FUNCTIONS

    @staticmethod
    def supports_lora() -> bool:
        return False  # an adapter would see the quantized token states

    def apply(self, output: Tensor, hidden_states: Tensor, *args: Any, **kwargs: Any) -> None:
        super().apply(output, quantized_input(hidden_states, self.operand), *args, **kwargs)

    def activation(self, activation: MoEActivation, output: Tensor, input: Tensor, **kwargs: Any) -> None:
        super().activation(activation, output, input, **kwargs)
        quantize_(output, self.operand)


class QuantizedGroupedExperts(mk.FusedMoEExpertsModular):
    """Experts by the grouped GEMMs that train."""

    operand: Recipe | None = None

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.Standard

    @staticmethod
    def _supports_current_device() -> bool:
        return True

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return False

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return weight_key is None and activation_key is None

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return activation in _FUNCTIONS

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return not moe_parallel_config.use_ep  # it would compute the other ranks' pairs too

    @staticmethod
    def _supports_batch_invariance() -> bool:
        return False

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        return TopKWeightAndReduceNoOP()

    def workspace_shapes(
        self,
        M: int,
        N: int,
        K: int,
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta: Any,
        activation: MoEActivation,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        return (0,), (0,), (M, K)

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: MoEActivation,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        function = _FUNCTIONS[activation]

        def gated(hidden_SN: Tensor) -> Tensor:
            gate, up = hidden_SN.chunk(2, dim=-1)
            return function(gate) * up

        output.copy_(experts_forward(hidden_states, w1, w2, topk_weights, topk_ids, self.operand, gated))


@functools.lru_cache(maxsize=16)
def _bound(base: type, operand: Recipe | None) -> type:
    return type(base.__name__, (base,), {"operand": operand})


def experts_class(settings: Settings, moe: Any, name: str) -> type[mk.FusedMoEExperts]:
    """The class that vLLM makes this layer's experts of; its constructor takes no operand, so the class has it.

    moe: vLLM's FusedMoEConfig. Raises VllmPluginError where the class can't serve the layer.
    """
    base = QuantizedTritonExperts if settings.experts == "triton" else QuantizedGroupedExperts
    if moe.moe_backend not in ("auto", "triton"):
        raise VllmPluginError(
            f"{name}: moe_backend={moe.moe_backend} hides the down projection's input; leave it at auto"
        )
    batched = moe.moe_parallel_config.use_batched_activation_format
    layout = mk.FusedMoEActivationFormat.BatchedExperts if batched else mk.FusedMoEActivationFormat.Standard
    supported, reason = base.is_supported_config(base, moe, None, None, layout)
    if moe.has_bias:
        supported, reason = False, "experts with biases are unknown to the plugin"
    if not supported:
        other = "grouped" if settings.experts == "triton" else "triton"
        raise VllmPluginError(
            f"{name}: experts={settings.experts} can't serve this layer: {reason}; try experts={other}, or skip the "
            "experts in training and here"
        )
    return _bound(base, settings.operand)

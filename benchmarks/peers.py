"""Other libraries' MXFP4 quantize-dequantize, each as one function of a [rows, columns] tensor: x -> values, x's dtype.

    torchao        MXTensor, RCEIL scales: what we call `ceil`; eager, and under torch.compile as its users run it
    fouroversix    static_6, its PyTorch backend (the compiled ones need a Blackwell GPU)
    modelopt       NVIDIA's MXFP4QTensor; plain torch, halves rounded down
    microxcaling   not on a registry: its rule, written anew from its README (floor scales, halves away from zero)
    torch.compile  of our own reference, mxrl.ops.qdq.qdq_rows

`PEERS` names a factory for each: it imports what it needs and returns the function, or raises ImportError.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Quantizer = Callable[[Tensor], Tensor]


def torchao_rceil() -> Quantizer:
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    def quantize_dequantize(x: Tensor) -> Tensor:
        packed = MXTensor.to_mx(x, torch.float4_e2m1fn_x2, 32, scaling_mode=ScaleCalculationMode.RCEIL)
        return packed.dequantize(x.dtype)

    return quantize_dequantize


def torchao_rceil_compiled() -> Quantizer:
    return torch.compile(torchao_rceil(), dynamic=False)


def fouroversix_static_6() -> Quantizer:
    from fouroversix import QuantizationConfig, dequantize, quantize_to_fp4

    config = QuantizationConfig(dtype="mxfp4", scale_rule="static_6", backend="pytorch")

    def quantize_dequantize(x: Tensor) -> Tensor:
        return dequantize(quantize_to_fp4(x, config), dtype=x.dtype, intermediate_dtype=torch.float32)

    return quantize_dequantize


def modelopt_mxfp4() -> Quantizer:
    from modelopt.torch.quantization.qtensor.mxfp4_tensor import MXFP4QTensor

    def quantize_dequantize(x: Tensor) -> Tensor:
        packed, scale = MXFP4QTensor.quantize(x, 32)
        return packed.dequantize(x.dtype, scale=scale, block_sizes={-1: 32})

    return quantize_dequantize


def microxcaling_rule() -> Quantizer:
    """The OCP rule as microxcaling's README describes it, with its default rounding ('nearest': half away from zero).

    The shared exponent is floor(log2 max|x|) − 2; each element keeps its own exponent, at least E2M1's least (0), and
    one mantissa bit; what exceeds 6 saturates. All in float32, operation by operation.
    """

    def quantize_dequantize(x: Tensor) -> Tensor:
        blocks = x.float().unflatten(-1, (-1, 32))
        amax = blocks.abs().amax(-1, keepdim=True)
        amax = torch.where(amax == 0, torch.finfo(torch.float32).tiny, amax)
        shared = (torch.floor(torch.log2(amax)) - 2).clamp(min=-127)
        y = blocks / torch.exp2(shared)
        own = torch.floor(torch.log2(y.abs().clamp(min=1.0)))
        step = torch.exp2(own - 1)
        y = torch.sign(y) * torch.floor(y.abs() / step + 0.5) * step
        return (y.clamp(-6, 6) * torch.exp2(shared)).flatten(-2).to(x.dtype)

    return quantize_dequantize


def compiled_reference() -> Quantizer:
    from mxrl import Recipe
    from mxrl.ops.qdq import qdq_rows

    recipe = Recipe.parse("mxfp4")
    return torch.compile(lambda x: qdq_rows(x, recipe), dynamic=False)


PEERS: dict[str, Callable[[], Quantizer]] = {
    "torchao RCEIL": torchao_rceil,
    "torchao RCEIL, torch.compile": torchao_rceil_compiled,
    "fouroversix static_6": fouroversix_static_6,
    "modelopt MXFP4QTensor": modelopt_mxfp4,
    "microxcaling's rule": microxcaling_rule,
    "torch.compile(reference)": compiled_reference,
}

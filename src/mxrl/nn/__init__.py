"""Quantized layers that train: `convert` a model, `rollout_weights` while it generates.

Read linear.py first (the layer and its gradients), then experts.py (MoE), convert.py, weights.py (rollouts and AQN).
"""

from mxrl.nn.convert import ConversionReport, ConvertError, convert
from mxrl.nn.layers import canonical_name, master_matrices, quantized_layers
from mxrl.nn.linear import QuantizedLinear, quantized_linear
from mxrl.nn.operands import Operands, RolloutError
from mxrl.nn.weights import AqnNoise, RolloutReport, aqn_noise, rollout_weights

__all__ = [
    "AqnNoise",
    "ConversionReport",
    "ConvertError",
    "Operands",
    "QuantizedLinear",
    "RolloutError",
    "RolloutReport",
    "aqn_noise",
    "canonical_name",
    "convert",
    "master_matrices",
    "quantized_layers",
    "quantized_linear",
    "rollout_weights",
]

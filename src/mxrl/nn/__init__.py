"""Quantized layers that train: `convert` a model, `rollout_weights` while it generates.

Read linear.py first (the layer and its gradients), then activations.py (what layers share), grouped.py and experts.py
(MoE), replay.py (whose experts a token goes to), convert.py, weights.py (shared by a step, held by a rollout, AQN),
saved.py (bytes kept for backward); shard.py and replica.py (several processes).
"""

from mxrl.nn.activations import forget_activations, share_activations
from mxrl.nn.convert import ConversionReport, ConvertError, convert
from mxrl.nn.layers import canonical_name, master_matrices, quantized_layers
from mxrl.nn.linear import QuantizedLinear, quantized_linear
from mxrl.nn.operands import Operands, RolloutError
from mxrl.nn.replay import Routes, RoutingError, record_routing, replay_routing
from mxrl.nn.replica import Replica
from mxrl.nn.saved import SavedBytes, saved_bytes
from mxrl.nn.shard import shard
from mxrl.nn.weights import AqnNoise, RolloutReport, SharedWeights, aqn_noise, rollout_weights, shared_weights

__all__ = [
    "AqnNoise",
    "ConversionReport",
    "ConvertError",
    "Operands",
    "QuantizedLinear",
    "Replica",
    "RolloutError",
    "RolloutReport",
    "Routes",
    "RoutingError",
    "SavedBytes",
    "SharedWeights",
    "aqn_noise",
    "canonical_name",
    "convert",
    "forget_activations",
    "master_matrices",
    "quantized_layers",
    "quantized_linear",
    "record_routing",
    "replay_routing",
    "rollout_weights",
    "saved_bytes",
    "shard",
    "share_activations",
    "shared_weights",
]

"""mxrl: MXFP4 quantization for reinforcement learning of language models, understood instead of patched.

mxrl.decompose(x)                 the quantization error of x = scale bias + deadzone + grid noise, exactly
mxrl.fake_quantize(x, "mxfp4")    quantize-dequantize as any recipe says
mxrl.convert(model, "mxfp4+mbs+of")   a W4A4 model that trains
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# Eager, in this order: `mxrl.decompose` and `mxrl.quantize` name both a module and its function, and the function wins.
from mxrl.decompose import Decomposition, ErrorStats, decompose, error_stats, inject
from mxrl.quantize import QuantizedTensor, fake_quantize, quantize
from mxrl.recipes import Recipe, RecipeError

if TYPE_CHECKING:
    from mxrl.nn.convert import ConversionReport, convert

__version__ = "0.1.0"

__all__ = [
    "ConversionReport",
    "Decomposition",
    "ErrorStats",
    "QuantizedTensor",
    "Recipe",
    "RecipeError",
    "convert",
    "decompose",
    "error_stats",
    "fake_quantize",
    "inject",
    "quantize",
]


def __getattr__(name: str) -> Any:
    """`convert` needs transformers (the train extra): loaded on first use, so that `mxrl analyze` does without."""
    if name in ("convert", "ConversionReport"):
        return getattr(importlib.import_module("mxrl.nn.convert"), name)
    raise AttributeError(f"module 'mxrl' has no attribute '{name}'")

"""mxrl: MXFP4 quantization for reinforcement learning of language models, understood instead of patched.

mxrl.decompose(x)                 the quantization error of x = scale bias + deadzone + grid noise, exactly
mxrl.fake_quantize(x, "mxfp4")    quantize-dequantize as any recipe says
mxrl.convert(model, "mxfp4+mbs+of")   a W4A4 model that trains

Names are loaded on first use: torch takes a second, in which `mxrl --help` is done and Ctrl-C already ends a command
well; and `convert` needs transformers (the train extra).
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mxrl.decompose import Decomposition, ErrorStats, decompose, error_stats, inject
    from mxrl.nn.convert import ConversionReport, convert
    from mxrl.quantize import QuantizedTensor, fake_quantize, quantize
    from mxrl.recipes import Recipe, RecipeError

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

_HOMES = {
    "mxrl.decompose": ("Decomposition", "ErrorStats", "decompose", "error_stats", "inject"),
    "mxrl.nn.convert": ("ConversionReport", "convert"),
    "mxrl.quantize": ("QuantizedTensor", "fake_quantize", "quantize"),
    "mxrl.recipes": ("Recipe", "RecipeError"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}


class _Package(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module 'mxrl' has no attribute '{name}'")
        value = getattr(importlib.import_module(_HOME[name]), name)
        setattr(self, name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        """`decompose` and `quantize` are modules too, which their import would set here: the function wins."""
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package

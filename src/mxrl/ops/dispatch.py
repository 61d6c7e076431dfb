"""Which implementation serves an operation: one rule, said once, overridable by name.

    reference   plain torch, the definition: every device, every dtype         ops/<operation>.py
    cpu         numba, one pass over the tensor                                 ops/<operation>_cpu.py
    triton      Triton, one pass over the tensor on a CUDA GPU                  ops/<operation>_triton.py

All give the same bits (sums of statistics: to 1e-12 relative). By default the device decides: triton on CUDA, cpu on
the CPU, and the reference where the fast one can't (float64, another device, a package that is missing); what serves
is logged once to the logger `mxrl`. A backend asked for by name, by `backend=` or MXRL_BACKEND, works or raises.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
from typing import Any

import torch
from torch import Tensor

from mxrl.recipes import Recipe

BACKENDS = ("reference", "cpu", "triton")
VARIABLE = "MXRL_BACKEND"
_PACKAGE = {"cpu": "numba", "triton": "triton"}
_DEVICE = {"cpu": "cpu", "triton": "cuda"}
logger = logging.getLogger("mxrl")


class BackendError(ValueError):
    """A backend that doesn't exist, or that was asked for by name and can't serve this tensor or recipe."""


def operation(
    name: str, x: Tensor, recipe: Recipe, backend: str | None = None, *, dtype: torch.dtype | None = None
) -> Any:
    """The module that serves operation `name` (qdq, pack, stats, inject) on `x` as `recipe` says.

    backend: one of BACKENDS, or None: the environment's MXRL_BACKEND, else the device's own. dtype: the arithmetic's
    input where it isn't x's (unpacking). Raises BackendError where a backend asked for by name can't serve.
    """
    dtype = dtype or x.dtype
    if backend is None:
        backend = os.environ.get(VARIABLE) or None
        source = VARIABLE
    else:
        source = "backend"
    if backend in (None, "auto"):
        return _module(name, _automatic(name, x.device.type, recipe, dtype))
    if backend not in BACKENDS:
        raise BackendError(f"{source}='{backend}': unknown; possible: auto, {', '.join(BACKENDS)}")
    reason = _cannot(name, backend, x.device.type, recipe, dtype)
    if reason is not None:
        raise BackendError(
            f"{source}='{backend}': {reason}; leave it out, or take 'reference', which serves everything"
        )
    return _module(name, backend)


@functools.lru_cache(maxsize=512)
def _automatic(name: str, device: str, recipe: Recipe, dtype: torch.dtype) -> str:
    chosen = next((backend for backend, own in _DEVICE.items() if own == device), "reference")
    reason = None
    if chosen != "reference":
        reason = _cannot(name, chosen, device, recipe, dtype)
    if reason is not None:
        level = logging.INFO if importlib.util.find_spec(_PACKAGE[chosen]) else logging.WARNING
        _say(level, f"quantization on {device}: {reason}, so the slow torch reference serves it")
        return "reference"
    _say(logging.INFO, f"quantization on {device}: backend {chosen}")
    return chosen


def _cannot(name: str, backend: str, device: str, recipe: Recipe, dtype: torch.dtype) -> str | None:
    """Why `backend` can't serve; None if it can."""
    if backend == "reference":
        return None
    package = _PACKAGE[backend]
    if importlib.util.find_spec(package) is None:
        return f"the package {package} isn't installed"
    if device != _DEVICE[backend] and not (backend == "triton" and device == "cpu" and interpreted()):
        return f"it runs on {_DEVICE[backend]}, the tensor is on {device}"
    return _module(name, backend).unsupported(recipe, dtype)


def interpreted() -> bool:
    """Whether Triton runs in its interpreter, which takes CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.lru_cache(maxsize=16)
def _module(name: str, backend: str) -> Any:
    return importlib.import_module(f"mxrl.ops.{name}" + ("" if backend == "reference" else f"_{backend}"))


@functools.lru_cache(maxsize=64)
def _say(level: int, message: str) -> None:
    logger.log(level, message)

"""A script that isn't part of a package, as a module: what the tests of experiments look at."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def load_script(file: Path) -> ModuleType:
    """A fresh module of it, under a name of its own (FOLDER_STEM), since other experiments have a tables.py too."""
    spec = importlib.util.spec_from_file_location(f"{file.parent.name}_{file.stem}", file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module

"""Puts tests/ on the path, so that `import edge_cases` and `from oracles import scalar` work in every test.

Without a GPU the Triton kernels run in Triton's interpreter, which has to be switched on before they are imported.
"""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """verl's runs take minutes one after the other: first, so that the other workers have all the rest meanwhile."""
    items.sort(key=lambda item: item.path.name not in ("test_verl_run.py", "test_verl_engine.py"))


@pytest.fixture
def quantized_shapes(monkeypatch):
    """The shapes of every operand that is quantized from here on."""
    from mxrl.nn import forget_activations, operands

    shapes: list[tuple[int, ...]] = []
    real = operands.fake_quantize

    def counting(x, *args, **kwargs):
        shapes.append(tuple(x.shape))
        return real(x, *args, **kwargs)

    monkeypatch.setattr(operands, "fake_quantize", counting)
    forget_activations()
    return shapes

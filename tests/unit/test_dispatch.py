"""Which backend serves: by device, by name, by the environment; and what is said when one can't."""

import logging

import pytest
import torch

from mxrl import fake_quantize, quantize
from mxrl.ops import dispatch
from mxrl.recipes import Recipe

RECIPE = Recipe.parse("mxfp4")
CPU = torch.zeros(1, 1, 32)


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)
    dispatch._automatic.cache_clear()
    dispatch._say.cache_clear()
    yield
    dispatch._automatic.cache_clear()
    dispatch._say.cache_clear()


def served(backend=None, x=CPU, recipe=RECIPE, name="qdq"):
    return dispatch.operation(name, x, recipe, backend).__name__


def test_the_device_decides():
    assert served() == "mxrl.ops.qdq_cpu"
    assert served(x=torch.zeros(1, 1, 32, device="meta")) == "mxrl.ops.qdq"
    assert served("auto") == "mxrl.ops.qdq_cpu"


@pytest.mark.parametrize("name", ["qdq", "pack", "stats", "inject"])
@pytest.mark.parametrize("backend", dispatch.BACKENDS)
def test_each_backend_by_name(name, backend):
    if backend == "triton" and torch.cuda.is_available():
        pytest.skip("on a GPU Triton takes no CPU tensor")
    assert served(backend, name=name) == f"mxrl.ops.{name}" + ("" if backend == "reference" else f"_{backend}")


def test_float64_is_the_references():
    x = torch.zeros(1, 1, 32, dtype=torch.float64)
    assert served(x=x) == "mxrl.ops.qdq"
    with pytest.raises(dispatch.BackendError, match=r"backend='cpu': .*float64"):
        served("cpu", x=x)


def test_the_environment_is_a_name_too(monkeypatch):
    monkeypatch.setenv(dispatch.VARIABLE, "reference")
    assert served() == "mxrl.ops.qdq"
    assert served("cpu") == "mxrl.ops.qdq_cpu"  # an argument is nearer
    monkeypatch.setenv(dispatch.VARIABLE, "fast")
    with pytest.raises(
        dispatch.BackendError, match=r"MXRL_BACKEND='fast': unknown; possible: auto, reference, cpu, triton"
    ):
        fake_quantize(torch.zeros(32))
    monkeypatch.setenv(dispatch.VARIABLE, "")
    assert served() == "mxrl.ops.qdq_cpu"


def test_a_backend_by_name_raises_where_it_cannot_serve(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(dispatch.BackendError, match="backend='triton': it runs on cuda, the tensor is on cpu"):
        fake_quantize(torch.zeros(32), backend="triton")
    monkeypatch.setattr(dispatch.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(dispatch.BackendError, match="backend='cpu': the package numba isn't installed"):
        quantize(torch.zeros(32), backend="cpu")


def test_a_missing_package_is_said_once_and_the_reference_serves(monkeypatch, caplog):
    monkeypatch.setattr(dispatch.importlib.util, "find_spec", lambda name: None)
    with caplog.at_level(logging.INFO, logger="mxrl"):
        assert [served(), served(), served(name="pack")] == ["mxrl.ops.qdq", "mxrl.ops.qdq", "mxrl.ops.pack"]
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "numba isn't installed" in caplog.text


def test_what_serves_is_logged_once(caplog):
    with caplog.at_level(logging.INFO, logger="mxrl"):
        for _ in range(3):
            fake_quantize(torch.zeros(4, 32))
    assert [r.getMessage() for r in caplog.records] == ["quantization on cpu: backend cpu"]

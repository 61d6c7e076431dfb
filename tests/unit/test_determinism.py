"""rl/determinism.py: what is switched on, for how long, and that a run asks for it."""

import os

import pytest
import torch

from mxrl.rl import train as training
from mxrl.rl.config import TrainConfig
from mxrl.rl.determinism import deterministic


def switches():
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


@pytest.fixture(autouse=True)
def workspace(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "as it was")  # so that it is put back
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")


def test_it_is_on_inside_and_as_before_outside():
    before = switches()
    with deterministic():
        assert switches() == (True, False) and os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert switches() == before == (False, False)
    with pytest.raises(KeyError), deterministic():
        raise KeyError
    assert switches() == before


def test_a_user_s_own_settings_stay(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for wanted in (False, True):
            with deterministic(wanted):
                assert switches() == (True, not wanted)
            assert switches() == (True, True) and os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    finally:
        torch.use_deterministic_algorithms(False)


def test_not_wanted_changes_nothing():
    with deterministic(False):
        assert switches() == (False, False) and "CUBLAS_WORKSPACE_CONFIG" not in os.environ


@pytest.mark.parametrize("wanted", [False, True])
def test_a_run_is_inside_where_its_option_says_so(monkeypatch, tmp_path, wanted):
    found = []
    monkeypatch.setattr(training, "_run", lambda *_: found.append(switches()) or {"status": "done"})
    training.train(TrainConfig(out=str(tmp_path), deterministic=wanted, device="cpu"))
    assert found == [(wanted, False)]

"""A scan on a Ray cluster of two machines (both of them this one): the same bits; an address where nobody answers."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mxrl.checkpoint import Checkpoint, open_checkpoint
from mxrl.cli import main
from mxrl.scan import NonFiniteError, scan
from mxrl.scan_ray import ClusterError

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: mxrl[ray]")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    g = torch.Generator().manual_seed(2)
    data = {f"layers.{i}.q_proj.weight": torch.randn(64, 96, generator=g).bfloat16() for i in range(5)}
    data["layers.2.up_proj.weight"] = torch.randn(9000, 4096, generator=g).bfloat16()  # three ranges
    save_file(data, tmp_path / "model.safetensors")
    return open_checkpoint(tmp_path / "model.safetensors")


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A head and a second node of one CPU each; workers see this checkout's tests and source, and no GPU."""
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # Ray's new default, which it warns about
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    from ray.cluster_utils import Cluster

    memory = {"object_store_memory": 100 << 20, "num_cpus": 1, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=memory)
    cluster.add_node(num_cpus=1, object_store_memory=100 << 20)
    cluster.wait_for_nodes()
    yield cluster.address
    cluster.shutdown()


@needs_ray
def test_two_workers_give_the_same_bits(checkpoint: Checkpoint, address: str, tmp_path: Path) -> None:
    here = scan(checkpoint, ["mxfp4+mbs"], jobs=1)
    there = scan(checkpoint, ["mxfp4+mbs"], cluster=address)
    assert [t.stats for t in there.tensors] == [t.stats for t in here.tensors]
    arguments = ["analyze", checkpoint.source, "--json"]
    for name, more in (("here", ["--jobs", "1"]), ("there", ["--cluster", address])):
        assert main([*arguments, "--out", str(tmp_path / name), *more]) == 0
    found = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("here", "there")]
    assert found[0]["total"] == found[1]["total"]
    data = {"layers.0.q_proj.weight": torch.full((64, 64), float("nan"))}
    save_file(data, tmp_path / "nan.safetensors")
    with pytest.raises(NonFiniteError, match="4096 NaN"):
        scan(open_checkpoint(tmp_path / "nan.safetensors"), cluster=address)


@needs_ray
def test_a_task_that_fails_there_is_the_same_error_here(checkpoint: Checkpoint, address: str) -> None:
    Path(checkpoint.source).write_bytes(Path(checkpoint.source).read_bytes()[:200_000])
    with pytest.raises(Exception) as here:
        scan(checkpoint, jobs=1)
    with pytest.raises(type(here.value)) as there:
        scan(checkpoint, cluster=address)
    assert str(there.value) == str(here.value)
    assert "model.safetensors" in str(there.value)


@needs_ray
@pytest.mark.parametrize(
    ("where", "why"),
    [
        ("127.0.0.1:9", "cluster 127.0.0.1:9: nobody answers there (["),
        ("ray://127.0.0.1:9", "cluster ray://127.0.0.1:9: nobody answers there (["),
        ("local", "give host:port"),
        ("nowhere", "give host:port"),
        ("127.0.0.1:port", "nobody answers there (invalid literal"),
    ],
)
def test_an_address_that_does_not_answer_is_one_line(
    checkpoint: Checkpoint, tmp_path: Path, where: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["analyze", checkpoint.source, "--cluster", where, "--out", str(tmp_path / "out")]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1) and why in err
    assert not (tmp_path / "out").exists()


def test_without_ray_the_line_says_what_to_install(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(ClusterError, match=r"pip install 'mxrl\[ray\]'"):
        scan(checkpoint, cluster="127.0.0.1:6379")

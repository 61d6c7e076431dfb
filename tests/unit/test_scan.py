"""A whole checkpoint through the decomposition: the sums, their order, and weights that hold NaN."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model

from mxrl.checkpoint import open_checkpoint
from mxrl.decompose import ErrorStats, error_stats
from mxrl.recipes import Recipe, RecipeError
from mxrl.scan import BASELINES, NonFiniteError, Step, TensorScan, nonfinite, parse_recipes, scan


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model("qwen3_moe", dtype=torch.bfloat16).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_every_weight_and_recipe_as_error_stats_gives_it(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    steps: list[Step] = []
    result = scan(checkpoint, ["mxfp4+mbs", "mxfp4+of"], progress=steps.append)
    assert result.columns == ("mxfp4", "mxfp4+mbs", "mxfp4+of", *BASELINES)
    assert [s.weight.name for s in steps] == [w.name for w in checkpoint.weights]
    assert [t.weight.name for t in result.tensors] == [w.name for w in checkpoint.weights]
    assert sum(s.numel for s in steps) == checkpoint.numel
    assert sum(s.nbytes for s in steps) == 2 * checkpoint.numel
    assert all(s.measured for s in steps)
    for tensor in result.tensors:
        x = checkpoint.load(tensor.weight)
        for recipe in result.columns:
            assert tensor.stats[recipe] == error_stats(x, Recipe.parse(recipe), dim=tensor.weight.dim)


def test_totals_are_the_sums_in_order(folder: Path) -> None:
    result = scan(open_checkpoint(folder))
    total = result.total("mxfp4")
    assert total == functools.reduce(operator.add, (t.stats["mxfp4"] for t in result.tensors), ErrorStats.zero())
    assert total.numel == sum(t.weight.numel for t in result.tensors)
    assert sum(result.total("mxfp4", kind).numel for kind in result.kinds) == total.numel
    layers = {t.weight.layer for t in result.tensors}
    assert layers == {0, 1}
    assert sum(result.total("mxfp4", layer=layer).deadzone_count for layer in (0, 1)) == total.deadzone_count
    assert result.kinds == ("q", "k", "v", "o", "experts.gate", "experts.up", "experts.down")
    for recipe in result.columns:
        by_kind = result.by_kind(recipe)
        assert list(by_kind) == ["", *result.kinds]
        assert by_kind[""] == result.total(recipe)
        assert all(by_kind[kind] == result.total(recipe, kind) for kind in result.kinds)


def test_kinds_of_a_sample_and_of_no_tensors(folder: Path) -> None:
    result = scan(open_checkpoint(folder), extra=["mxfp4", "mxfp8"])
    assert result.sampled("mxfp8") != result.total("mxfp4")
    for kind in result.kinds:
        assert result.by_kind("mxfp8", sampled=True)[kind] == result.sampled("mxfp8", kind)
    assert result.by_kind("mxfp8", sampled=True)[""] == result.sampled("mxfp8")
    assert dataclasses.replace(result, tensors=()).by_kind("mxfp4") == {"": ErrorStats.zero()}


@pytest.mark.parametrize("jobs", [1, 2])
def test_tensors_are_told_of_in_order_while_the_scan_goes_on(
    folder: Path, jobs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A weight of several ranges and NVFP4's second round hold up those after it, one with a NaN doesn't."""
    monkeypatch.setattr("mxrl.scan_tasks.ELEMENTS", 1 << 9)
    shard = folder / "model.safetensors"
    data = load_file(shard)
    data["model.layers.0.mlp.experts.1.up_proj.weight"][3, 4] = math.nan
    save_file(data, shard, metadata={"format": "pt"})
    checkpoint = open_checkpoint(folder)
    told: list[tuple[TensorScan, int]] = []
    steps: list[Step] = []
    result = scan(
        checkpoint, moments=True, jobs=jobs, on_nonfinite="skip", progress=steps.append,
        finished=lambda tensor: told.append((tensor, len(steps))),
    )  # fmt: skip
    assert tuple(tensor for tensor, _ in told) == result.tensors
    assert [t.weight for t in result.tensors] == [
        w for w in checkpoint.weights if "experts.1.up" not in w.name or w.layer
    ]
    assert told[-1][1] == len(steps)
    if jobs == 1:  # of two processes one may still be starting, with the first weight's range, when all else is done
        assert told[0][1] < len(steps)
    assert len(steps) > 2 * len(checkpoint.weights)


def test_shards_change_no_bit(folder: Path, tmp_path: Path) -> None:
    tiny_model("qwen3_moe", dtype=torch.bfloat16).save_pretrained(tmp_path / "many", max_shard_size="20KB")
    one, many = scan(open_checkpoint(folder)), scan(open_checkpoint(tmp_path / "many"))
    assert len(many.checkpoint.files) > 3
    assert [t.stats for t in one.tensors] == [t.stats for t in many.tensors]
    for recipe in one.columns:
        assert one.total(recipe) == many.total(recipe)


def test_experts_stored_transposed_are_blocked_along_their_contraction_axis(tmp_path: Path) -> None:
    """gpt-oss: [E, K, N]. The statistics are those of the [E, N, K] view, which blocks along the other axis are not."""
    tiny_model("gpt_oss").save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    result = scan(checkpoint, baselines=())
    tensor = next(t for t in result.tensors if t.weight.kind == "experts.gate_up")
    x = checkpoint.load(tensor.weight)
    # the same blocks in another order of rows: sums agree up to the order of addition (float64)
    expected = error_stats(x.transpose(1, 2).contiguous())
    assert tensor.stats["mxfp4"].numel == expected.numel
    assert tensor.stats["mxfp4"].deadzone_count == expected.deadzone_count
    assert tensor.stats["mxfp4"].sq_error == pytest.approx(expected.sq_error, rel=1e-12)
    assert tensor.stats["mxfp4"].sq_error != pytest.approx(error_stats(x).sq_error, rel=1e-6)


def test_recipes_are_reduced_to_what_touches_weights() -> None:
    assert parse_recipes(["mxfp4+mbs+aqn+w4a16", "mxfp4+mbs", "mxfp4:e8m0"]) == ("mxfp4+mbs", "mxfp4")
    with pytest.raises(RecipeError, match="mbbs"):
        parse_recipes(["mxfp4+mbbs"])
    with pytest.raises(RecipeError, match="bf16"):
        parse_recipes(["bf16"])


def test_a_weight_with_nan_is_named_or_skipped(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = load_file(path)
    name = "model.layers.1.self_attn.k_proj.weight"
    data[name][3, 5] = float("nan")
    data[name][4, 0] = float("inf")
    save_file(data, path)
    checkpoint = open_checkpoint(folder)
    with pytest.raises(NonFiniteError, match=r"k_proj\.weight' has 1 NaN and 1 Inf .*\[3, 5\].*--on-nonfinite skip"):
        scan(checkpoint, baselines=())
    result = scan(checkpoint, baselines=(), on_nonfinite="skip")
    assert [s.weight.name for s in result.skipped] == [name]
    assert name not in {t.weight.name for t in result.tensors}
    assert len(result.tensors) == len(checkpoint.weights) - 1
    with pytest.raises(ValueError, match="error, skip"):
        scan(checkpoint, on_nonfinite="ignore")


def test_nonfinite_looks_at_every_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mxrl.scan._FINITE_CHUNK", 10)
    x = torch.zeros(7, 3, 3)
    rows = x.view(-1, 3)

    def found(cut: int) -> str:
        return nonfinite([rows[:cut], rows[cut:]], x.shape)

    assert found(4) == ""
    x[6, 2, 2] = float("-inf")
    assert found(4) == found(21) == "1 Inf among its 63 elements (the first at [6, 2, 2])"
    x[2, 0, 0] = float("nan")
    assert found(4) == found(8) == "1 NaN and 1 Inf among its 63 elements (the first at [2, 0, 0])"
    assert nonfinite([torch.zeros(0, 4)], (0, 4)) == ""


def test_the_first_weight_with_nan_is_named_whatever_finishes_first(folder: Path) -> None:
    """Two workers, and the later weight's NaN lies in a tensor that is done sooner."""
    path = folder / "model.safetensors"
    data = load_file(path)
    names = [w.name for w in open_checkpoint(folder).weights]
    for name in (names[0], names[1]):
        data[name][0, 0] = float("nan")
    save_file(data, path)
    for jobs in (1, 2):
        with pytest.raises(NonFiniteError, match=names[0].replace(".", r"\.")):
            scan(open_checkpoint(folder), baselines=(), jobs=jobs)

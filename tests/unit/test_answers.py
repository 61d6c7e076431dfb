"""The answers of an analysis, each against direct computation on small checkpoints."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import tiny_model

from mxrl import scan_tasks
from mxrl.checkpoint import open_checkpoint
from mxrl.decompose import ErrorStats, error_stats
from mxrl.moments import moments
from mxrl.recipes import Recipe
from mxrl.report import folder
from mxrl.report.answers import (
    EXTRA,
    SWEEP,
    Collector,
    answers,
    candidates,
    distances,
    fingerprint,
    measured,
    price,
)
from mxrl.report.budget import BudgetError
from mxrl.report.outliers import spearman, worst
from mxrl.report.summary import summary, tensor_rows
from mxrl.scan import Scan, scan

ORIGIN = {"created": "now", "versions": {"mxrl": "0"}, "commit": None, "device": "cpu", "machine": "m"}
EVERY = 7


def answered(result: Scan, bits: float = 4.5) -> dict[str, Any]:
    """The summary with its answers, as it comes back from its file."""
    whole = summary(result, [], ORIGIN)
    rows = Collector(whole["recipes"][0])
    for row in tensor_rows(result):
        rows.add(row)
    return json.loads(json.dumps(whole | answers(whole, rows, bits)))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_model("qwen3_moe", dtype=torch.bfloat16).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def result(model: Path) -> Scan:
    return scan(open_checkpoint(model), ["mxfp4"], extra=EXTRA, moments=True)


@pytest.fixture(scope="module")
def whole(result: Scan) -> dict[str, Any]:
    return answered(result)


@pytest.fixture(scope="module")
def sampled(model: Path) -> Scan:
    """The same checkpoint as if it were too large to be measured whole."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan_tasks, "WHOLE", 0)
        patch.setattr(scan_tasks, "EVERY", EVERY)
        return scan(open_checkpoint(model), ["mxfp4"], extra=EXTRA, moments=True)


def direct(model: Path, recipe: str, every: int = 1, kind: str | None = None) -> ErrorStats:
    """A recipe on every n-th row of each weight, computed here."""
    checkpoint = open_checkpoint(model)
    rows = [
        (checkpoint.load(w) if w.dim == -1 else checkpoint.load(w).movedim(-2, -1)).flatten(0, -2)[::every]
        for w in checkpoint.weights
        if kind in (None, w.kind)
    ]
    return ErrorStats.merged(error_stats(x.contiguous(), recipe) for x in rows)


# ---- what is measured ------------------------------------------------------------------------------------------------


def test_a_small_checkpoint_is_measured_whole(model: Path, result: Scan, whole: dict[str, Any]) -> None:
    assert whole["sampled"]["every"] == 1
    assert whole["sampled"]["elements"] == whole["elements"]
    assert list(whole["sampled"]["total"]) == list(EXTRA)
    for recipe in EXTRA:
        assert ErrorStats.from_dict(whole["sampled"]["total"][recipe]) == direct(model, recipe)
        assert measured(whole, recipe) is not None and not measured(whole, recipe).sampled  # type: ignore[union-attr]
    assert result.sampled("mxfp8", "q") == direct(model, "mxfp8", kind="q")


def test_of_a_large_one_every_nth_row(model: Path, sampled: Scan) -> None:
    found = answered(sampled)
    assert found["sampled"]["every"] == EVERY
    for recipe in EXTRA:
        for kind in (None, "experts.down"):
            expected = direct(model, recipe, EVERY, kind)
            where = found["sampled"]["total"] if kind is None else found["sampled"]["kinds"][kind]
            assert ErrorStats.from_dict(where[recipe]) == expected
            m = measured(found, recipe, kind)
            assert m is not None
            if recipe == "mxfp4":  # asked for, so known in full
                assert (m.sq_error, m.sampled) == (direct(model, "mxfp4", kind=kind).sq_error, False)
            else:
                over = direct(model, "mxfp4", kind=kind).sq_error / direct(model, "mxfp4", EVERY, kind).sq_error
                assert (m.sq_error, m.sampled) == (expected.sq_error * over, True)
    assert found["total"]["nvfp4"]["numel"] == found["elements"] > 6 * found["sampled"]["elements"]


@pytest.mark.parametrize("shape,dim", [((1500, 64), -1), ((5, 64, 96), -1), ((5, 64, 96), -2), ((2, 2048, 24), -2)])
def test_the_rows_of_a_sample_dont_depend_on_the_ranges(
    shape: tuple[int, ...], dim: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever a tensor is cut, the same rows are taken: sums agree but for their order, counts exactly."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    name = "model.layers.0.mlp.experts.down_proj"
    partner = (shape[0], shape[2], 2 * shape[1]) if dim == -2 and len(shape) == 3 else None
    data = {name: x} if len(shape) == 3 else {"model.layers.0.mlp.down_proj.weight": x}
    if len(shape) == 3:
        # gate_up's shape says how down is oriented
        wide = partner or (shape[0], 2 * shape[2], shape[1])
        data["model.layers.0.mlp.experts.gate_up_proj"] = torch.zeros(wide)
    save_file(data, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path / "model.safetensors")
    index = next(i for i, w in enumerate(checkpoint.weights) if "down" in w.name)
    assert checkpoint.weights[index].dim == dim
    monkeypatch.setattr(scan_tasks, "WHOLE", 0)
    monkeypatch.setattr(scan_tasks, "EVERY", EVERY)
    one = scan(checkpoint, extra=("mxfp4+of",), baselines=()).tensors[index].sampled["mxfp4+of"]
    monkeypatch.setattr(scan_tasks, "ELEMENTS", 1 << 14)
    assert len(scan_tasks.ranges(shape, dim)) > 1
    many = scan(checkpoint, extra=("mxfp4+of",), baselines=()).tensors[index].sampled["mxfp4+of"]
    rows = (x if dim == -1 else x.movedim(-2, -1)).flatten(0, -2)
    if dim == -1:
        rows = rows[::EVERY]
    else:
        rows = x.movedim(-2, -1)[:, ::EVERY].flatten(0, 1)
    expected = error_stats(rows.contiguous(), "mxfp4+of")
    assert one == expected
    assert (many.numel, many.deadzone_count, many.delta_hist) == (
        expected.numel,
        expected.deadzone_count,
        expected.delta_hist,
    )
    assert many.sq_error == pytest.approx(expected.sq_error, rel=1e-12, abs=0)


def test_moments_are_in_the_rows(model: Path, result: Scan) -> None:
    checkpoint = open_checkpoint(model)
    rows = {r["name"]: r for r in tensor_rows(result)}
    for w in checkpoint.weights:
        m = moments(checkpoint.load(w), dim=w.dim)
        assert rows[w.name]["moments"] == {k: getattr(m, k) for k in rows[w.name]["moments"]}
        assert rows[w.name]["kurtosis"] == m.kurtosis
        assert rows[w.name]["block_peak"] == m.block_peak


# ---- the answers -----------------------------------------------------------------------------------------------------


def test_the_fingerprint(model: Path, result: Scan, whole: dict[str, Any]) -> None:
    found = whole["fingerprint"]
    assert found["recipe"] == "mxfp4"
    s = direct(model, "mxfp4")
    total = found["total"]
    assert total["rel_mse"] == s.sq_error / s.sq_norm
    assert total["t_over_floor"] == s.sq_error / (s.sq_grid + s.sq_deadzone)
    assert total["excess"] == (s.sq_error - (s.sq_grid + s.sq_deadzone)) / s.sq_error
    assert total["scale_grid"] == 2 * s.dot_scale_grid / s.sq_error
    assert total["cos"] == s.dot_scale_grid / math.sqrt(s.sq_scale * s.sq_grid)
    assert total["delta_sd"] == math.sqrt(s.delta_sq_sum / s.delta_count - (s.delta_sum / s.delta_count) ** 2)
    parts = sum(total[k] for k in ("scale", "deadzone", "grid", "scale_grid", "scale_deadzone"))
    assert parts == pytest.approx(1, rel=1e-9)
    assert list(found["kinds"]) == list(result.kinds)
    for kind in result.kinds:
        expected = fingerprint(result.total("mxfp4", kind))
        assert {k: found["kinds"][kind][k] for k in expected} == expected
    assert list(found["layers"]) == ["0", "1"]
    for layer in (0, 1):
        expected = fingerprint(result.total("mxfp4", layer=layer))
        assert {k: found["layers"][str(layer)][k] for k in expected} == expected


def test_distances_from_uniform() -> None:
    flat = [0] * 32 + [5] * 32
    assert distances(flat) == {"tv": 0, "ks": 0}
    one = [0] * 32 + [100] + [0] * 31
    assert distances(one) == {"tv": 31 / 32, "ks": 31 / 32}
    half = [0] * 32 + [2] * 16 + [0] * 16
    assert distances(half) == {"tv": 0.5, "ks": 0.5}
    outside = [0] * 31 + [1] + [0] * 32  # below 0: all of it would have to move
    assert distances(outside) == {"tv": 1, "ks": 1}


def test_delta(whole: dict[str, Any], result: Scan) -> None:
    s, found = result.total("mxfp4"), whole["delta"]
    assert found["blocks"] == s.delta_count
    shares = [n / s.delta_count for n in s.delta_hist[32:]]
    assert found["tv"] == pytest.approx(sum(abs(p - 1 / 32) for p in shares) / 2, rel=1e-12)
    gaps = [abs(c - (i + 1) / 32) for i, c in enumerate(itertools.accumulate(shares))]
    assert found["ks"] == pytest.approx(max(gaps), rel=1e-12)
    n = s.delta_count
    assert found["tv_by_chance"] == pytest.approx(math.sqrt(32 * (1 - 1 / 32) / (2 * math.pi * n)), rel=1e-12)
    assert found["ks_by_chance"] == pytest.approx(1.358 / math.sqrt(n), rel=1e-12)
    assert (found["mean"], found["sd"]) == (s.delta_mean, math.sqrt(s.delta_var))
    each = {t.weight.name: distances(t.stats["mxfp4"].delta_hist)["ks"] for t in result.tensors}
    assert found["tensors"]["count"] == len(each)
    assert found["tensors"]["largest_ks"] == max(each.values()) == each[found["tensors"]["largest"]]


def test_what_chance_alone_would_show() -> None:
    """Of as many uniform draws: the mean of tv, and how often ks is above its bound, over 300 samples."""
    generator = torch.Generator().manual_seed(0)
    n, tv, above = 2000, 0.0, 0
    for _ in range(300):
        hist = torch.histc(torch.rand(n, generator=generator, dtype=torch.float64), 32, 0, 1).long().tolist()
        found = distances([0] * 32 + hist)
        tv += found["tv"] / 300
        above += found["ks"] > 1.358 / math.sqrt(n)
    assert tv == pytest.approx(math.sqrt(32 * (1 - 1 / 32) / (2 * math.pi * n)), rel=0.03)
    assert above <= 0.05 * 300 * 1.7  # less than .05 in fact: ks is looked for at the bins' edges alone


def test_the_sweep(model: Path, whole: dict[str, Any], sampled: Scan) -> None:
    for found, every in ((whole, 1), (answered(sampled), EVERY)):
        assert [e["recipe"] for e in found["sweep"]] == list(SWEEP)
        for k, entry in enumerate(found["sweep"]):
            s = direct(model, SWEEP[k], every)
            assert entry["scale"] == f"E8M{k}"
            assert entry["bits"] == 4.25 + k / 32
            assert entry["t_over_floor"] == s.sq_error / s.floor
            assert entry["excess_over_floor"] == (s.sq_error - s.floor) / s.floor
    errors = [e["t_over_floor"] for e in whole["sweep"]]
    assert errors[0] > 1.2 and 1 < errors[8] < 1.01


@pytest.mark.parametrize(
    "recipe", ["mxfp4", "mxfp4:even", "mxfp4:e8m3", "nvfp4", "mxfp8", "mxfp4+mbs", "mxfp4+of", "mxfp4+mbs+of",
               "mxfp4:e8m2+mbs+of:1.0", "mxfp4+mbs+macro=32", "mxfp4+of:0.0"],
)  # fmt: skip
def test_the_price_is_the_sum_of_its_parts(recipe: str) -> None:
    p = price(recipe)
    assert p["passes"] * (p["codes"] + p["scales"] + p["mantissas"]) == p["bits"] == Recipe.parse(recipe).bits


def test_recipes_side_by_side(model: Path, whole: dict[str, Any]) -> None:
    assert set(whole["compared"]) == {
        "mxfp4", "mxfp4:floor", "mxfp4:even", "nvfp4", "mxfp4+mbs", "mxfp4+of", "mxfp4+mbs+of", "mxfp8",
    }  # fmt: skip
    plain = direct(model, "mxfp4")
    for recipe, entry in whole["compared"].items():
        if recipe == "nvfp4":
            continue  # one scale a tensor: rows put together would be another tensor
        s = direct(model, recipe)
        assert entry["rel_mse"] == s.sq_error / plain.sq_norm
        assert entry["relative_to_mxfp4"] == s.sq_error / plain.sq_error
        assert entry["bits"] == Recipe.parse(recipe).bits


def test_correction_by_component(model: Path, whole: dict[str, Any], sampled: Scan) -> None:
    for found, every in ((whole, 1), (answered(sampled), EVERY)):
        plain = direct(model, "mxfp4", every)
        assert list(found["corrections"]) == ["mxfp4", "mxfp4+mbs", "mxfp4+of", "mxfp4+mbs+of"]
        for recipe, entry in found["corrections"].items():
            s = direct(model, recipe, every)
            assert entry == {
                "whole": s.sq_error / plain.sq_error,
                "scale": s.sq_scale / plain.sq_scale,
                "deadzone": s.sq_error_deadzone / plain.sq_error_deadzone,
                "grid": s.sq_error_elsewhere / plain.sq_error_elsewhere,
                "gamma_mean": s.gamma_sum / s.delta_count,
                "deadzone_nonzero": s.deadzone_nonzero_count / s.deadzone_count,
            }
    assert whole["corrections"]["mxfp4+mbs"]["deadzone"] == 1  # MBS leaves it as it is


def test_the_worst_tensors(tmp_path: Path) -> None:
    """One with planted outliers and one of heavy tails stand out by the figures that say so."""
    generator = torch.Generator().manual_seed(0)
    data = {f"model.layers.{i}.mlp.up_proj.weight": torch.randn(64, 256, generator=generator) * 0.02 for i in range(12)}
    data["model.layers.3.mlp.up_proj.weight"][::2, ::32] *= 12
    data["model.layers.7.mlp.up_proj.weight"][5, 9] = 3.0
    save_file(data, tmp_path / "model.safetensors")
    result = scan(open_checkpoint(tmp_path / "model.safetensors"), baselines=(), extra=EXTRA, moments=True)
    found = answered(result)["worst"]
    assert found["tensors"][0]["name"] == "model.layers.3.mlp.up_proj.weight"
    assert {"block_peak", "kurtosis", "deadzone_fraction"} <= set(found["tensors"][0]["because"])
    lone = next(t for t in found["tensors"] if t["name"] == "model.layers.7.mlp.up_proj.weight")
    assert {"outlier_ratio", "kurtosis"} <= set(lone["because"]) and "block_peak" not in lone["because"]
    assert lone["outlier_ratio"] == moments(data[lone["name"]]).outlier_ratio
    ordered = [t["rel_mse"] for t in found["tensors"]]
    assert ordered == sorted(ordered, reverse=True) and len(ordered) == 12
    by_hand = [(result.total("mxfp4", layer=i).rel_mse, moments(t).kurtosis) for i, t in enumerate(data.values())]
    assert found["rank_correlation"]["kurtosis"] == pytest.approx(spearman(*map(list, zip(*by_hand, strict=True))))
    assert worst([]) == {"tensors": []}


def test_rank_correlation() -> None:
    assert spearman([1, 2, 3, 4], [10, 20, 30, 99]) == pytest.approx(1)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert spearman([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(0.9486832980505138)  # 4.5 / √(4.5 · 5), ties shared
    assert spearman([1, 1, 1], [1, 2, 3]) is None and spearman([1, 2], [1, 2]) is None


# ---- the recommendation ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [4.25, 4.3, 4.5, 5.0, 6.5, 8.25, 16])
def test_the_recommendation_is_the_optimum(result: Scan, budget: float) -> None:
    found = answered(result, budget)
    best = found["recommendation"]
    kinds = list(found["kinds"])
    names = candidates(found)
    assert not [n for n in names if "e8m" in n or "ideal" in n] and len(names) == 8
    bits = torch.tensor([Recipe.parse(n).bits for n in names], dtype=torch.float64)
    error = torch.tensor([[measured(found, n, k).sq_error for n in names] for k in kinds], dtype=torch.float64)  # type: ignore[union-attr]
    numel = torch.tensor([result.total("mxfp4", k).numel for k in kinds], dtype=torch.float64)
    all_bits, all_errors = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    for k in range(len(kinds)):  # every combination
        all_bits = (all_bits[:, None] + numel[k] * bits).flatten()
        all_errors = (all_errors[:, None] + error[k]).flatten()
    fits = all_bits <= budget * numel.sum()  # sums of dyadic numbers: exact
    assert len(fits) == 8 ** len(kinds)
    least = float(all_errors[fits].min())
    energy = result.total("mxfp4").sq_norm
    assert best["rel_mse"] == least / energy
    assert best["bits"] <= budget
    for kind, entry in best["kinds"].items():
        row = kinds.index(kind)
        chosen = names.index(entry["recipe"])
        if entry["dearer"]:
            other = names.index(entry["dearer"]["recipe"])
            assert entry["dearer"]["mean_bits"] > budget  # as the page says
            assert entry["dearer"]["error_change"] == float(error[row, other] - error[row, chosen]) / least < 0
        if entry["cheaper"]:
            other = names.index(entry["cheaper"]["recipe"])
            assert entry["cheaper"]["error_change"] == float(error[row, other] - error[row, chosen]) / least > 0
    one = min(float(sum(error[:, i].tolist())) for i in range(8) if float(bits[i]) <= budget)
    assert best["uniform"]["rel_mse"] == one / energy
    assert best["rel_mse"] <= best["uniform"]["rel_mse"]
    rungs = [(e["bits"], e["rel_mse"]) for e in best["ladder"]]
    assert rungs == sorted(rungs) and [m for _, m in rungs] == sorted((m for _, m in rungs), reverse=True)


def test_a_budget_below_every_recipe(result: Scan) -> None:
    with pytest.raises(BudgetError, match=r"4\.1 bits an element is less than any choice takes; the least is 4\.25"):
        answered(result, 4.1)


def test_none_for_a_source_that_is_already_quantized(model: Path, result: Scan) -> None:
    whole = summary(result, [], ORIGIN)
    whole["source"]["stored_as"] = {"Q4_1": {"tensors": 1, "elements": 32, "bits": 5, "quantized": True}}
    rows = Collector("mxfp4")
    assert answers(whole, rows)["recommendation"] == {"budget": 4.5, "withheld": ["Q4_1"]}


def test_the_stored_forms(whole: dict[str, Any]) -> None:
    (entry,) = whole["source"]["stored_as"].values()
    assert entry == {"tensors": whole["tensors"], "elements": whole["elements"], "bits": 16.0, "quantized": False}


def test_zeros_have_answers(tmp_path: Path) -> None:
    save_file({"model.layers.0.mlp.up_proj.weight": torch.zeros(8, 64)}, tmp_path / "model.safetensors")
    result = scan(open_checkpoint(tmp_path / "model.safetensors"), extra=EXTRA, moments=True)
    out = tmp_path / "out"
    out.mkdir()
    found = folder.write(out, summary(result, [], ORIGIN), tensor_rows(result))
    assert found["delta"] == {"recipe": "mxfp4", "blocks": 0}
    assert found["fingerprint"]["total"]["rel_mse"] is None
    assert found["worst"] == {"tensors": []}
    assert "nan" not in (out / "report.html").read_text().lower().replace("nanu", "")

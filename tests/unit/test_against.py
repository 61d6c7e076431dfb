"""A quantized checkpoint against its original: components known by hand, our own recipes found again bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from mxrl.against import ORIGINAL, Against, StoredError, against, foreign_stats, reading, reference_of
from mxrl.checkpoint import Checkpoint, open_checkpoint
from mxrl.decompose import error_stats
from mxrl.quantize import fake_quantize, quantize
from mxrl.scan import NonFiniteError, scan

Q = "model.layers.0.self_attn.q_proj"
UP = "model.layers.1.mlp.up_proj"
EXPERTS = "model.layers.2.mlp.experts"


def randn(*shape: int, seed: int = 0) -> Tensor:
    """Rows of different magnitude, a few zeros."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g) * torch.exp(torch.randn(*shape[:-1], 1, generator=g))
    x.view(-1)[::19] = 0
    return x


def write(path: Path, tensors: dict[str, Tensor]) -> Checkpoint:
    path.mkdir(parents=True, exist_ok=True)
    save_file({k: v.contiguous() for k, v in tensors.items()}, path / "model.safetensors")
    return open_checkpoint(path)


def packed(x: Tensor, base: str, recipe: str) -> dict[str, Tensor]:
    """compressed-tensors' MXFP4 of a [N, K] weight, of our own codes."""
    q = quantize(x, recipe)
    return {f"{base}.weight_packed": q.codes, f"{base}.weight_scale": q.scales}


def only(result: Against) -> StoredError:
    (stored,) = result.stored
    return stored


# ---- components ------------------------------------------------------------------------------------------------------


def test_components_of_a_block_by_hand(tmp_path: Path) -> None:
    """m = 6, so the ideal scale is 1 and D is |x| < 0.25. C is what an INT4 quantizer of step 0.75 would store."""
    x, c = torch.zeros(1, 32), torch.zeros(1, 32)
    x[0, :4] = torch.tensor([6.0, 0.125, 2.375, -1.25])  # Q*: 6, 0, 2, −1 (a tie, to even)
    c[0, :4] = torch.tensor([5.25, 0.0, 2.25, -1.5])
    stored = only(against(write(tmp_path / "q", {f"{Q}.weight": c}), write(tmp_path / "o", {f"{Q}.weight": x})))
    s = stored.stats
    assert s.sq_scale == 0.75**2 + 0.25**2 + 0.5**2
    assert s.sq_deadzone == 0.125**2
    assert s.sq_grid == 0.375**2 + 0.25**2
    assert s.dot_scale_grid == 0.25 * -0.375 + -0.5 * 0.25
    assert s.sq_error == 0.75**2 + 0.125**2 + 0.125**2 + 0.25**2
    assert s.sq_norm == 36 + 0.125**2 + 2.375**2 + 1.25**2
    assert (s.numel, s.deadzone_count, s.exact_zero_count, s.delta_count) == (32, 29, 28, 0)
    assert (stored.reference, stored.same_grid, stored.same_as, stored.bits) == ("mxfp4", False, None, 32)


@pytest.mark.parametrize("rule", ["mxfp4", "mxfp4:floor", "mxfp4:even"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_our_own_packed_weights_have_our_own_split_bit_for_bit(tmp_path: Path, rule: str, dtype: torch.dtype) -> None:
    """All of it: sums, counts, and δ, which values alone don't give."""
    weights = {Q: randn(96, 160).to(dtype), UP: randn(40, 64, seed=1).to(dtype)}
    original = write(tmp_path / "o", {f"{k}.weight": v for k, v in weights.items()})
    quantized = write(tmp_path / "q", {n: t for k, v in weights.items() for n, t in packed(v, k, rule).items()})
    result = against(quantized, original)
    expected = scan(original, [rule], baselines=())
    assert [s.pair.weight.name for s in result.stored] == [t.weight.name for t in expected.tensors]
    for stored, ours in zip(result.stored, expected.tensors, strict=True):
        assert stored.stats == ours.stats[rule]
        assert stored.stats.delta_count > 0
        assert (stored.same_as, stored.same_grid, stored.reference) == (rule, True, "mxfp4")
        assert stored.bits == 4.25
        assert stored.equal[rule] == stored.pair.weight.numel
        assert list(stored.equal) == [rule]
    assert result.total() == expected.total(rule)
    assert result.total("q") == expected.total(rule, "q")
    assert result.total(layer=1) == expected.total(rule, layer=1)


def test_the_sums_without_recognition_are_the_same_bits(tmp_path: Path) -> None:
    """The kernel is given C's values as a foreign quantizer's: every sum but δ's is equal, not nearly."""
    x = randn(96, 160).to(torch.bfloat16)
    weight = write(tmp_path, {f"{Q}.weight": x}).weights[0]
    found = foreign_stats(x, fake_quantize(x.float(), "mxfp4"), weight, "mxfp4").to_dict()
    expected = error_stats(x, "mxfp4").to_dict()
    unknown = {"delta_count", "delta_sum", "delta_sq_sum", "gamma_sum", "delta_hist", "clamped_blocks"}
    assert {k: v for k, v in found.items() if k not in unknown} == {
        k: v for k, v in expected.items() if k not in unknown
    }


def test_transposed_experts_and_ranges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """gpt-oss [E, K, N] and its blocks [E, N, K/32, 16], in many ranges, some within one expert."""
    monkeypatch.setattr("mxrl.scan_tasks.ELEMENTS", 1 << 14)
    gate_up, down = randn(2, 256, 192).to(torch.bfloat16), randn(2, 96, 256, seed=1).to(torch.bfloat16)
    original = write(tmp_path / "o", {f"{EXPERTS}.gate_up_proj": gate_up, f"{EXPERTS}.down_proj": down})
    data: dict[str, Tensor] = {}
    for name, x in (("gate_up_proj", gate_up), ("down_proj", down)):
        q = quantize(x.mT.contiguous(), "mxfp4:even")
        data[f"{EXPERTS}.{name}_blocks"] = q.codes.view(*q.codes.shape[:2], -1, 16)
        data[f"{EXPERTS}.{name}_scales"] = q.scales
    result = against(write(tmp_path / "q", data), original)
    expected = scan(original, ["mxfp4:even"], baselines=())
    assert [s.same_as for s in result.stored] == ["mxfp4:even"] * 2
    assert [s.stats for s in result.stored] == [t.stats["mxfp4:even"] for t in expected.tensors]


def test_the_closest_recipe_is_counted_to_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chosen by the first rows, counted over all ranges; rows that tell nothing leave several."""
    monkeypatch.setattr("mxrl.against._LOOK", 32 * 64)
    monkeypatch.setattr("mxrl.scan_tasks.ELEMENTS", 16 * 64)
    x = randn(64, 64)
    even, floor = quantize(x, "mxfp4:even"), quantize(x, "mxfp4:floor")
    data = packed(x, Q, "mxfp4:even")
    data[f"{Q}.weight_packed"][40:], data[f"{Q}.weight_scale"][40:] = floor.codes[40:], floor.scales[40:]
    original = write(tmp_path / "o", {f"{Q}.weight": x})
    stored = only(against(write(tmp_path / "q", data), original))
    c = torch.cat([even.dequantize()[:40], floor.dequantize()[40:]])
    assert stored.equal == {"mxfp4:even": int((c == even.dequantize()).sum())}
    x[:32] = 1.0  # every rule gives 1
    data |= {k: v.clone() for k, v in packed(x, Q, "mxfp4:floor").items()}
    original = write(tmp_path / "p", {f"{Q}.weight": x})
    stored = only(against(write(tmp_path / "r", data), original))
    assert stored.same_as == "mxfp4:floor" and set(stored.equal) > {"mxfp4:floor"}


def test_one_changed_code_is_no_longer_the_recipe(tmp_path: Path) -> None:
    x = randn(64, 64)
    data = packed(x, Q, "mxfp4")
    data[f"{Q}.weight_packed"][5, 7] ^= 1
    stored = only(against(write(tmp_path / "q", data), write(tmp_path / "o", {f"{Q}.weight": x})))
    assert stored.same_as is None and stored.same_grid
    assert stored.equal["mxfp4"] == x.numel() - 1
    assert stored.stats.sq_error != error_stats(x, "mxfp4").sq_error
    assert stored.stats.sq_grid == error_stats(x, "mxfp4").sq_grid
    assert stored.stats.delta_count == 0


# ---- what a weight is stored as --------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["mxfp4", "mxfp4:even", "mxfp4+mbs"])
def test_quantized_values_kept_as_floats_are_recognised(tmp_path: Path, recipe: str) -> None:
    """QAT keeps quantize-dequantized weights as bfloat16: exact for powers of two, rounded once more under MBS."""
    x = randn(64, 128)
    original = write(tmp_path / "o", {f"{Q}.weight": x})
    c = fake_quantize(x, recipe).to(torch.bfloat16)
    result = against(write(tmp_path / "q", {f"{Q}.weight": c}), original, ["mxfp4+mbs"])
    stored = only(result)
    assert (stored.same_as, stored.same_grid, stored.reference) == (recipe, True, "mxfp4")
    own = error_stats(x, recipe)
    if recipe == "mxfp4+mbs":  # C is not the recipe's float32 value, so its error is measured, and there is no δ
        assert stored.stats.delta_count == 0
        assert stored.stats.sq_error != own.sq_error
        assert stored.stats.sq_error == pytest.approx(own.sq_error, rel=1e-2)
    else:
        assert stored.stats == own
    assert not any("MXFP4's grid" in line for line in reading(result))


def test_weights_left_alone_are_said_to_be(tmp_path: Path) -> None:
    x, y = randn(64, 64), randn(64, 64, seed=1)
    original = write(tmp_path / "o", {f"{Q}.weight": x, f"{UP}.weight": y})
    result = against(write(tmp_path / "q", {f"{Q}.weight": x} | packed(y, UP, "mxfp4")), original)
    by_name = {s.pair.weight.name: s for s in result.stored}
    assert by_name[f"{Q}.weight"].same_as == ORIGINAL
    assert by_name[f"{Q}.weight"].stats.sq_error == 0
    assert "1 of 2 weights are the original's, bit for bit." in reading(result)


def test_int4_is_split_by_mxfp4_and_says_so(tmp_path: Path) -> None:
    """compressed-tensors' int4 in groups of 128: codes −8 … 7, one scale a group."""
    x = randn(32, 256)
    scale = x.view(32, 2, 128).abs().amax(-1) / 7
    codes = (x.view(32, 2, 128) / scale.unsqueeze(-1)).round().clamp(-8, 7)
    words = ((codes.view(32, 32, 8).long() + 8) << torch.arange(0, 32, 4)).sum(-1)
    data = {
        f"{Q}.weight_packed": words.to(torch.int32),
        f"{Q}.weight_scale": scale,
        f"{Q}.weight_shape": torch.tensor([32, 256]),
    }
    result = against(write(tmp_path / "q", data), write(tmp_path / "o", {f"{Q}.weight": x}))
    stored = only(result)
    assert (stored.reference, stored.same_grid, stored.same_as, stored.equal) == ("mxfp4", False, None, {})
    assert stored.bits == 4 + 32 / 128
    c = (codes * scale.unsqueeze(-1)).view(32, 256)
    assert stored.stats.sq_error == pytest.approx(float((c.double() - x.double()).square().sum()), rel=1e-12)
    assert stored.stats.floor == error_stats(x, "mxfp4").floor
    (line,) = reading(result)
    assert line.startswith("Weights stored as int4, groups of 128: not on MXFP4's grid.")
    assert "holds everything in which this quantizer differs" in line


def test_nvfp4_refers_to_nvfp4(tmp_path: Path) -> None:
    x = randn(32, 64)
    q = quantize(x, "nvfp4")
    assert q.tensor_scale is not None
    data = {
        f"{Q}.weight_packed": q.codes,
        f"{Q}.weight_scale": q.scales.view(torch.float8_e4m3fn),
        f"{Q}.weight_global_scale": 1 / q.tensor_scale.reshape(1),
    }
    quantized = write(tmp_path / "q", data)
    assert reference_of(quantized.weights) == ("nvfp4", True)
    stored = only(against(quantized, write(tmp_path / "o", {f"{Q}.weight": x})))
    own = error_stats(x, "nvfp4")
    assert stored.reference == "nvfp4"
    assert (stored.stats.sq_grid, stored.stats.deadzone_count) == (own.sq_grid, own.deadzone_count)
    assert stored.stats.sq_error == pytest.approx(own.sq_error, rel=1e-6)  # 1 / (1 / scale) rounds twice


def test_mxfp8_refers_to_mxfp8(tmp_path: Path) -> None:
    x = randn(32, 64)
    q = quantize(x, "mxfp8")
    data = {f"{Q}.weight": q.codes.view(torch.float8_e4m3fn), f"{Q}.weight_scale": q.scales}
    quantized = write(tmp_path / "q", data)
    assert reference_of(quantized.weights) == ("mxfp8", True)
    stored = only(against(quantized, write(tmp_path / "o", {f"{Q}.weight": x}), ["mxfp8"]))
    assert (stored.same_as, stored.stats) == ("mxfp8", error_stats(x, "mxfp8"))


# ---- what can't be ---------------------------------------------------------------------------------------------------


def test_nan_in_either_checkpoint(tmp_path: Path) -> None:
    x, y = randn(64, 64), randn(64, 64, seed=1)
    original = write(tmp_path / "o", {f"{Q}.weight": x, f"{UP}.weight": y})
    data = packed(x, Q, "mxfp4") | packed(y, UP, "mxfp4")
    data[f"{UP}.weight_scale"][3, 1] = 255
    quantized = write(tmp_path / "q", data)
    with pytest.raises(NonFiniteError, match=rf"tensor '{UP}.weight' has 32 NaN .* in q; --on-nonfinite skip"):
        against(quantized, original)
    result = against(quantized, original, on_nonfinite="skip")
    assert (
        [s.pair.weight.name for s in result.stored] == [t.weight.name for t in result.ours.tensors] == [f"{Q}.weight"]
    )
    assert [(s.weight.name, "32 NaN" in s.reason) for s in result.skipped] == [(f"{UP}.weight", True)]
    x[2, 2] = float("inf")
    broken = write(tmp_path / "p", {f"{Q}.weight": x, f"{UP}.weight": y})
    with pytest.raises(NonFiniteError, match=rf"tensor '{Q}.weight' has 1 Inf"):
        against(quantized, broken)

"""Which weight of one checkpoint is which of another, and that its rows arrive in the right places."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from mxrl.checkpoint import Checkpoint, Weight, open_checkpoint
from mxrl.pairs import Pair, PairError, Piece, _merged, each_range, match, read_other, stored_bytes
from mxrl.quantize import fake_quantize, quantize

MLP, ATTENTION = "model.layers.0.mlp", "model.layers.0.self_attn"


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def write(path: Path, tensors: dict[str, Tensor]) -> Checkpoint:
    path.mkdir(parents=True, exist_ok=True)
    save_file({k: v.contiguous() for k, v in tensors.items()}, path / "model.safetensors")
    return open_checkpoint(path)


def check(a: Checkpoint, b: Checkpoint, expected: dict[str, Tensor]) -> dict[str, Pair]:
    """Every name of `expected` is paired, and b's values, read by any rows, are those; returns the pairs by name."""
    pairing = match(a, b)
    pairs = {p.weight.name: p for p in pairing.pairs}
    assert set(pairs) == set(expected)
    for name, values in expected.items():
        rows = values.reshape(-1, values.shape[-1]).float()
        n = len(rows)
        assert pairs[name].weight.shape == values.shape
        for start, stop in ((0, n), (0, 1), (1, 4), (n // 2 - 1, n // 2 + 2), (n - 3, n), (2, 2)):
            got = read_other(b, pairs[name], start, stop)
            assert torch.equal(got.float(), rows[start:stop]), (name, start, stop)
    return pairs


def experts(count: int = 3, inner: int = 8, width: int = 64) -> dict[str, Tensor]:
    return {
        f"{MLP}.experts.{e}.{p}.weight": randn(
            *((width, inner) if p == "down_proj" else (inner, width)), seed=7 * e + i
        )
        for e in range(count)
        for i, p in enumerate(("gate_proj", "up_proj", "down_proj"))
    }


def fused(apart: dict[str, Tensor], count: int = 3) -> dict[str, Tensor]:
    def stack(p: str) -> Tensor:
        return torch.stack([apart[f"{MLP}.experts.{e}.{p}.weight"] for e in range(count)])

    return {
        f"{MLP}.experts.gate_up_proj": torch.cat([stack("gate_proj"), stack("up_proj")], dim=1),
        f"{MLP}.experts.down_proj": stack("down_proj"),
    }


# ---- names -----------------------------------------------------------------------------------------------------------


def test_the_same_names(tmp_path: Path) -> None:
    data = {f"{ATTENTION}.q_proj.weight": randn(32, 64), f"{MLP}.down_proj.weight": randn(64, 32, seed=1)}
    a, b = write(tmp_path / "a", data), write(tmp_path / "b", {k: v + 1 for k, v in data.items()})
    pairs = check(a, b, {k: v + 1 for k, v in data.items()})
    assert all(len(p.pieces) == 1 for p in pairs.values())
    assert stored_bytes(b, pairs[f"{MLP}.down_proj.weight"]) == 4 * 64 * 32


def test_other_names_by_layer_and_kind(tmp_path: Path) -> None:
    """A prefix less, original Llama's words; an attention's q of another layer is no counterpart."""
    q, up = randn(32, 64), randn(96, 64, seed=1)
    a = write(tmp_path / "a", {f"{ATTENTION}.q_proj.weight": q, f"{MLP}.up_proj.weight": up})
    b = write(tmp_path / "b", {"layers.0.attention.wq.weight": q, "layers.1.feed_forward.w3.weight": up})
    pairing = match(a, b)
    assert [p.weight.name for p in pairing.pairs] == [f"{ATTENTION}.q_proj.weight"]
    assert [(x.weight.name, x.reason) for x in pairing.only_a] == [(f"{MLP}.up_proj.weight", "b has no such weight")]
    assert [(x.weight.name, x.reason) for x in pairing.only_b] == [
        ("layers.1.feed_forward.w3.weight", "a has no such weight")
    ]


def test_several_of_a_kind_in_a_layer_are_told_apart_by_name_alone(tmp_path: Path) -> None:
    both = {f"{ATTENTION}.q_a_proj.weight": randn(32, 64), f"{ATTENTION}.q_b_proj.weight": randn(32, 64, seed=1)}
    a, b = write(tmp_path / "a", both), write(tmp_path / "b", both)
    check(a, b, both)
    one = write(tmp_path / "c", {"layers.0.attention.wq.weight": randn(32, 64), f"{MLP}.up_proj.weight": randn(32, 64)})
    a = write(tmp_path / "d", both | {f"{MLP}.up_proj.weight": randn(32, 64)})
    pairing = match(a, one)
    assert len(pairing.pairs) == 1 and len(pairing.only_a) == 2
    assert "no weight of that name, and its kind is there several times" in pairing.only_a[0].reason


# ---- layouts ---------------------------------------------------------------------------------------------------------


def test_experts_fused_in_one_and_apart_in_the_other(tmp_path: Path) -> None:
    apart = experts()
    together = fused(apart)
    one, many = write(tmp_path / "fused", together), write(tmp_path / "apart", apart)
    assert [w.dim for w in one.weights] == [-1, -1]
    check(many, one, apart)
    pairs = check(one, many, together)
    assert len(pairs[f"{MLP}.experts.gate_up_proj"].pieces) == 6
    assert stored_bytes(one, check(many, one, apart)[f"{MLP}.experts.1.up_proj.weight"]) == 4 * 8 * 64
    itself = check(one, one, together)
    assert all(len(p.pieces) == 1 for p in itself.values())  # neighbours are read in one stretch


def test_a_missing_expert_is_counted(tmp_path: Path) -> None:
    apart = experts()
    one = write(tmp_path / "fused", fused(apart))
    del apart[f"{MLP}.experts.2.down_proj.weight"]
    many = write(tmp_path / "apart", apart)
    pairing = match(one, many)
    assert [p.weight.name for p in pairing.pairs] == [f"{MLP}.experts.gate_up_proj"]
    assert [x.reason for x in pairing.only_a] == ["apart lacks 1 of its 3 experts"]
    assert sorted(x.weight.name for x in pairing.only_b) == [f"{MLP}.experts.{e}.down_proj.weight" for e in (0, 1)]


def test_experts_that_only_the_other_has_are_said(tmp_path: Path) -> None:
    """A checkpoint pruned from four experts to two, each way round, stored apart or in one."""
    four = experts(4)
    two = {k: v for k, v in four.items() if ".2." not in k and ".3." not in k}
    pruned, whole = write(tmp_path / "pruned", fused(two, 2)), write(tmp_path / "whole", fused(four, 4))
    pairing = match(pruned, whole)
    assert len(pairing.pairs) == 2 and pairing.only_a == ()
    assert [x.reason for x in pairing.only_b] == ["pruned has 50.0% of it"] * 2
    check(pruned, whole, fused(two, 2))
    with pytest.raises(PairError, match="pruned lacks 2 of its 4 experts"):
        match(whole, pruned)
    apart = write(tmp_path / "apart", two)
    assert [x.reason for x in match(apart, whole).only_b] == ["apart has 50.0% of it"] * 2


def test_fused_rows_of_dense_layers(tmp_path: Path) -> None:
    """Phi-3's qkv_proj and gate_up_proj, with fewer k and v rows than q rows."""
    q, k, v = randn(64, 32), randn(16, 32, seed=1), randn(16, 32, seed=2)
    gate, up = randn(48, 32, seed=3), randn(48, 32, seed=4)
    apart = {
        f"{ATTENTION}.q_proj.weight": q,
        f"{ATTENTION}.k_proj.weight": k,
        f"{ATTENTION}.v_proj.weight": v,
        f"{MLP}.gate_proj.weight": gate,
        f"{MLP}.up_proj.weight": up,
    }
    together = {
        f"{ATTENTION}.qkv_proj.weight": torch.cat([q, k, v]),
        f"{MLP}.gate_up_proj.weight": torch.cat([gate, up]),
    }
    one, many = write(tmp_path / "one", together), write(tmp_path / "many", apart)
    check(one, many, together)
    check(many, one, apart)


def test_a_query_key_value_of_interleaved_heads_is_not_taken_apart(tmp_path: Path) -> None:
    """GPT-NeoX, BLOOM and Falcon put q, k and v of one head beside each other: their name says so."""
    a = write(
        tmp_path / "a",
        {"layers.0.attention.query_key_value.weight": randn(96, 32), f"{MLP}.up_proj.weight": randn(32, 32)},
    )
    b = write(
        tmp_path / "b",
        {f"{ATTENTION}.{p}_proj.weight": randn(32, 32) for p in "qkv"} | {f"{MLP}.up_proj.weight": randn(32, 32)},
    )
    pairing = match(a, b)
    assert [x.weight.name for x in pairing.only_a] == ["layers.0.attention.query_key_value.weight"]
    assert "head by head" in pairing.only_a[0].reason
    assert len(match(b, a).only_a) == 3
    rows = write(
        tmp_path / "c", {f"{ATTENTION}.qkv_proj.weight": randn(96, 32), f"{MLP}.up_proj.weight": randn(32, 32)}
    )
    assert "head by head" in match(a, rows).only_a[0].reason and "head by head" in match(rows, a).only_a[0].reason


def packed_experts(x: Tensor, name: str) -> dict[str, Tensor]:
    """[E, K, N] -> gpt-oss's blocks [E, N, K/32, 16] and scales [E, N, K/32]."""
    packed = quantize(x.mT.contiguous(), "mxfp4")
    e, n, half = packed.codes.shape
    return {f"{name}_blocks": packed.codes.view(e, n, half // 16, 16), f"{name}_scales": packed.scales}


def test_gpt_oss_transposed_and_its_packed_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mxrl.pairs._STEP", 100)  # turned a few rows at a time
    gate_up, down = randn(2, 64, 192), randn(2, 96, 64, seed=1)
    original = {f"{MLP}.experts.gate_up_proj": gate_up, f"{MLP}.experts.down_proj": down}
    a = write(tmp_path / "a", original)
    assert [w.dim for w in a.weights] == [-2, -2]
    b = write(tmp_path / "b", {k: v for name, x in original.items() for k, v in packed_experts(x, name).items()})
    assert [w.dim for w in b.weights] == [-1, -1]
    check(a, b, {name: fake_quantize(x, "mxfp4", dim=-2) for name, x in original.items()})
    check(b, a, {name: x.mT.contiguous() for name, x in original.items()})


def test_gate_and_up_in_columns_are_not_taken_apart(tmp_path: Path) -> None:
    apart = experts(inner=16)
    columns = {k: v.mT.contiguous() for k, v in fused(apart).items()}
    one, many = write(tmp_path / "columns", columns), write(tmp_path / "apart", apart)
    for a, b in ((one, many), (many, one)):
        pairing = match(a, b)
        assert all("down" in p.weight.kind for p in pairing.pairs) and pairing.pairs
        assert {x.reason for x in pairing.only_a} == {
            "gate and up lie in the columns of one tensor, in an order that no name tells"
        }
    check(one, write(tmp_path / "again", columns), columns)


def test_gpt2_and_a_linear_layer(tmp_path: Path) -> None:
    conv = {"h.0.attn.c_attn.weight": randn(32, 96), "h.0.mlp.c_fc.weight": randn(32, 128, seed=1)}
    a = write(tmp_path / "a", conv)
    assert [w.dim for w in a.weights] == [-2, -2]
    b = write(tmp_path / "b", {"transformer.h.0.mlp.fc1.weight": conv["h.0.mlp.c_fc.weight"].T})
    check(a, b, {"h.0.mlp.c_fc.weight": conv["h.0.mlp.c_fc.weight"]})


# ---- GGUF ------------------------------------------------------------------------------------------------------------


def rotary(w: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's LlamaModel.permute, as its converter has it."""
    return w.reshape(heads, 2, w.shape[0] // heads // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def write_gguf(path: Path, architecture: str, tensors: dict[str, np.ndarray]) -> Checkpoint:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    for name, data in tensors.items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return open_checkpoint(path)


@pytest.mark.parametrize(("architecture", "permuted"), [("llama", True), ("qwen2", False)])
def test_gguf_names_and_llamas_rotary_order(tmp_path: Path, architecture: str, permuted: bool) -> None:
    q, k, v, down = (randn(*s, seed=i) for i, s in enumerate(((64, 32), (32, 32), (32, 32), (32, 96))))
    a = write(
        tmp_path / "a",
        {
            f"{ATTENTION}.q_proj.weight": q,
            f"{ATTENTION}.k_proj.weight": k,
            f"{ATTENTION}.v_proj.weight": v,
            f"{MLP}.down_proj.weight": down,
        },
    )
    stored = {
        "blk.0.attn_q.weight": rotary(q.numpy(), 4) if permuted else q.numpy(),
        "blk.0.attn_k.weight": rotary(k.numpy(), 2) if permuted else k.numpy(),
        "blk.0.attn_v.weight": v.numpy(),
        "blk.0.ffn_down.weight": down.numpy(),
    }
    b = write_gguf(tmp_path / "b.gguf", architecture, stored)
    check(a, b, {w.name: a.load(w) for w in a.weights})
    check(b, a, {name: torch.from_numpy(x) for name, x in stored.items()})
    check(b, b, {name: torch.from_numpy(x) for name, x in stored.items()})


def test_gguf_experts(tmp_path: Path) -> None:
    apart = experts()
    together = fused(apart)
    gate, up = together[f"{MLP}.experts.gate_up_proj"].chunk(2, dim=1)
    stored = {
        "blk.0.ffn_gate_exps.weight": gate.numpy(),
        "blk.0.ffn_up_exps.weight": up.numpy(),
        "blk.0.ffn_down_exps.weight": together[f"{MLP}.experts.down_proj"].numpy(),
    }
    b = write_gguf(tmp_path / "b.gguf", "qwen3moe", {k: v.copy() for k, v in stored.items()})
    check(write(tmp_path / "apart", apart), b, apart)
    check(write(tmp_path / "fused", together), b, together)


def test_only_neighbours_in_both_become_one_stretch() -> None:
    one, two = Piece(0, 4, 7, 10), Piece(4, 6, 7, 14)
    assert list(_merged([one, two])) == [Piece(0, 6, 7, 10)]
    for other in (
        Piece(4, 6, 7, 20),  # elsewhere in b
        Piece(4, 6, 8, 14),  # in another weight
        Piece(5, 7, 7, 14),  # not next in a
        Piece(4, 6, 7, 14, turned=True),
        Piece(4, 6, 7, 14, heads=2),
    ):
        assert list(_merged([one, other])) == [one, other]


# ---- what can't be ---------------------------------------------------------------------------------------------------


def test_another_size_is_a_reason(tmp_path: Path) -> None:
    a = write(tmp_path / "a", {f"{ATTENTION}.q_proj.weight": randn(32, 64), f"{MLP}.up_proj.weight": randn(32, 64)})
    b = write(tmp_path / "b", {f"{ATTENTION}.q_proj.weight": randn(32, 64), f"{MLP}.up_proj.weight": randn(64, 64)})
    (lone,) = match(a, b).only_a
    assert lone.reason == "b has it as 64 outputs × 64 inputs, not 32 × 64"


def test_nothing_in_common_is_one_line(tmp_path: Path) -> None:
    a = write(tmp_path / "a", {f"{ATTENTION}.q_proj.weight": randn(32, 64)})
    b = write(tmp_path / "b", {f"{MLP}.up_proj.weight": randn(32, 64)})
    with pytest.raises(
        PairError, match=r"^a and b have no weight in common: .*q_proj.*no such weight.*up_proj"
    ) as found:
        match(a, b)
    assert "\n" not in str(found.value)


def test_every_range_in_order_and_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mxrl.scan_tasks.ELEMENTS", 1 << 13)
    data: dict[str, Any] = {
        f"{ATTENTION}.q_proj.weight": randn(300, 64),
        f"{MLP}.up_proj.weight": randn(40, 64, seed=1),
    }
    a, b = write(tmp_path / "a", data), write(tmp_path / "b", {k: -v for k, v in data.items()})
    told: list[int] = []
    found: list[tuple[Weight, Tensor, Tensor]] = []
    for pair, x, y in each_range(a, b, match(a, b).pairs, told.append):
        found.append((pair.weight, x.clone(), y.clone()))
    for weight in a.weights:
        assert torch.equal(torch.cat([x for w, x, _ in found if w == weight]), data[weight.name])
        assert torch.equal(torch.cat([y for w, _, y in found if w == weight]), -data[weight.name])
    assert len(found) == 4 and len(told) == 4
    assert sum(told) == 2 * 4 * 340 * 64

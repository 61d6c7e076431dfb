"""Which tensors a checkpoint gives, from files that the owning libraries wrote, and what is said of broken ones."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tiny_models import FAMILIES, tiny_model

from mxrl import checkpoint as module
from mxrl.checkpoint import CheckpointError, open_checkpoint
from mxrl.kinds import KINDS, Header, classify, kind_of, natural_key

LLAMA = {
    "model.embed_tokens.weight": (40, 64),
    "model.layers.0.input_layernorm.weight": (64,),
    "model.layers.0.mlp.down_proj.weight": (64, 96),
    "model.layers.0.mlp.gate_proj.weight": (96, 64),
    "model.layers.0.mlp.up_proj.weight": (96, 64),
    "model.layers.0.self_attn.k_proj.weight": (32, 64),
    "model.layers.0.self_attn.o_proj.weight": (64, 64),
    "model.layers.0.self_attn.q_proj.bias": (64,),
    "model.layers.0.self_attn.q_proj.weight": (64, 64),
    "model.layers.0.self_attn.v_proj.weight": (32, 64),
    "lm_head.weight": (40, 64),
}


def tensors(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def fails(source: Path | str, *parts: str) -> None:
    """Opening fails in one line that has every one of `parts` in it."""
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(source)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


# ---- what counts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module_name", "kind"),
    [
        ("model.layers.3.self_attn.q_proj", "q"),
        ("encoder.layer.0.attention.self.key", "k"),
        ("encoder.layer.0.attention.self.value", "v"),
        ("encoder.layer.0.attention.output.dense", "o"),
        ("encoder.layer.0.intermediate.dense", "up"),
        ("encoder.layer.0.output.dense", "down"),  # not "o": the longer ending above is another module
        ("pooler.dense", "other"),
        ("transformer.h.0.attn.c_proj", "o"),
        ("transformer.h.0.mlp.c_proj", "down"),
        ("gpt_neox.layers.0.attention.query_key_value", "qkv"),
        ("gpt_neox.layers.0.attention.dense", "o"),
        ("model.layers.0.mlp.gate_up_proj", "gate_up"),
        ("model.layers.0.mlp.experts.7.up_proj", "experts.up"),
        ("model.layers.0.block_sparse_moe.experts.1.w2", "experts.down"),
        ("model.layers.0.mlp.experts.gate_up_proj", "experts.gate_up"),
        ("model.layers.0.mlp.shared_expert.gate_proj", "shared_expert.gate"),
        ("blk.0.attn_output", "o"),
        ("blk.0.ffn_gate", "gate"),
        ("blk.0.ffn_down_exps", "experts.down"),
        ("blk.0.ffn_up_shexp", "shared_expert.up"),
        ("block.0.layer.0.SelfAttention.q", "q"),
        ("block.0.layer.1.DenseReluDense.wo", "down"),
    ],
)
def test_kind_of_a_module_by_its_name(module_name: str, kind: str) -> None:
    assert kind_of(module_name) == kind
    assert kind in KINDS


@pytest.mark.parametrize(
    ("name", "shape", "reason"),
    [
        ("model.embed_tokens.weight", (40, 64), "embedding"),
        ("embeddings.word_embeddings.weight", (40, 64), "embedding"),
        ("transformer.wpe.weight", (40, 64), "embedding"),
        ("token_embd.weight", (40, 64), "embedding"),
        ("lm_head.weight", (40, 64), "output head"),
        ("output.weight", (40, 64), "output head"),
        ("gpt_neox.embed_out.weight", (40, 64), "output head"),
        ("model.layers.0.mlp.gate.weight", (4, 64), "router"),
        ("model.layers.0.mlp.router.weight", (4, 64), "router"),
        ("blk.0.ffn_gate_inp.weight", (4, 64), "router"),
        ("model.layers.0.mlp.shared_expert_gate.weight", (1, 64), "router"),
        ("model.norm.weight", (64,), "norm"),
        ("model.layers.0.self_attn.q_norm.weight", (2, 32), "norm"),
        ("model.layers.0.mlp.experts.gate_up_proj_bias", (4, 192), "bias"),
        ("model.layers.0.self_attn.sinks", (2,), "vector"),
        ("model.layers.0.mixer.conv1d.weight", (64, 1, 4), "convolution"),
        ("base_model.layers.0.q_proj.lora_A.weight", (8, 64), "adapter"),
        ("model.layers.0.mixer.A_log", (64, 16), "parameter that is no layer's weight"),
    ],
)
def test_what_is_left_and_why(name: str, shape: tuple[int, ...], reason: str) -> None:
    role = classify({name: Header(shape, "BF16")})[name]
    assert role.kind is None
    assert role.reason == reason


def test_scales_in_small_floats_are_left() -> None:
    roles = classify({"layers.0.q_proj.weight_scale": Header((64, 2), "F8_E8M0"), "a.zero_point": Header((4,), "I8")})
    assert [r.reason for r in roles.values()] == ["8-bit (or smaller) float tensor", "integer tensor"]


def test_names_sort_by_number() -> None:
    names = [f"model.layers.{i}.q_proj.weight" for i in (10, 2, 0, 11, 1)]
    assert [n.split(".")[2] for n in sorted(names, key=natural_key)] == ["0", "1", "2", "10", "11"]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("inner", [32, 64, 96])  # 32: 2I = H, where one matrix alone could not tell
def test_orientation_of_fused_experts_is_read_off_both_shapes(transposed: bool, inner: int) -> None:
    hidden, experts = 64, 4
    shapes = {"gate_up_proj": (2 * inner, hidden), "down_proj": (hidden, inner)}
    headers = {
        f"layers.0.mlp.experts.{name}": Header((experts, *(reversed(shape) if transposed else shape)), "BF16")
        for name, shape in shapes.items()
    }
    roles = classify(headers)
    assert {r.dim for r in roles.values()} == {-2 if transposed else -1}
    assert [r.kind for r in roles.values()] == ["experts.gate_up", "experts.down"]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_that_convert_knows(family: str, tmp_path: Path) -> None:
    """Counted elements are those of the attention, MLP and expert matrices, however save_pretrained lays them out."""
    model = tiny_model(family)
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    ends = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    fused = ("experts.gate_up_proj", "experts.down_proj")
    expected = sum(
        p.numel() for n, p in model.named_parameters() if n.removesuffix(".weight").endswith((*ends, *fused))
    )
    assert checkpoint.numel == expected
    assert checkpoint.warnings == ()
    for weight, x in checkpoint.stream():
        assert x.shape == weight.shape
        fused_transposed = family == "gpt_oss" and weight.kind.startswith("experts.")
        assert weight.dim == (-2 if fused_transposed else -1), weight.name
        assert not weight.quantized and weight.group is None and weight.bits == 32 and weight.stored_as == "float32"
        if fused_transposed:
            assert weight.why_dim == "gpt-oss experts [E, in, out]"
        else:
            assert weight.why_dim in ("nn.Linear [out, in]", "fused experts [E, out, in]")
        inputs = {"o": 64, "down": 96 if "mlp.down" in weight.name else 48}.get(
            weight.kind.removeprefix("experts."), 64
        )
        if family not in ("mixtral", "olmoe", "qwen3_moe", "gpt_oss") or weight.kind.startswith("experts."):
            assert x.shape[weight.dim] == inputs, weight.name
    reasons = {left.name: left.reason for left in checkpoint.left}
    assert reasons["model.embed_tokens.weight"] == "embedding"
    assert reasons.get("lm_head.weight", "output head") == "output head"


def test_one_half_of_fused_experts_is_oriented_by_a_guess_that_is_said(tmp_path: Path) -> None:
    """The shapes of both decide; in a lone shard there may be only one."""
    name = "model.layers.0.mlp.experts.gate_up_proj"
    save_file(tensors(LLAMA | {name: (2, 96, 64)}), tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    weight = next(w for w in checkpoint.weights if w.name == name)
    assert (weight.dim, weight.why_dim) == (-1, "fused experts [E, out, in], assumed")
    assert name in checkpoint.warnings[0] and "down_proj' is missing" in checkpoint.warnings[0]


def test_gpt2_weights_are_contracted_along_their_first_axis(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=40)).save_pretrained(tmp_path)
    weights = {w.kind: w for w in open_checkpoint(tmp_path).weights}
    assert {w.why_dim for w in weights.values()} == {"GPT-2 Conv1D [in, out]"}
    assert {k: (w.shape, w.dim) for k, w in weights.items()} == {
        "qkv": ((32, 96), -2),
        "o": ((32, 32), -2),
        "up": ((32, 128), -2),
        "down": ((128, 32), -2),
    }


def test_a_safetensors_file(tmp_path: Path) -> None:
    data = tensors(LLAMA, torch.bfloat16)
    path = tmp_path / "tiny.safetensors"
    save_file(data, path)
    checkpoint = open_checkpoint(path)
    assert checkpoint.name == "tiny"
    assert [w.kind for w in checkpoint.weights] == ["down", "gate", "up", "k", "o", "q", "v"]
    assert {w.layer for w in checkpoint.weights} == {0}
    assert {w.dtype for w in checkpoint.weights} == {"BF16"}
    for weight, x in checkpoint.stream():
        assert x.dtype == torch.bfloat16
        assert torch.equal(x, data[weight.name])
    assert len(checkpoint.weights) + len(checkpoint.left) == len(data)


def test_shards_give_what_one_file_gives(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe")
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="50KB")
    one, many = open_checkpoint(tmp_path / "one"), open_checkpoint(tmp_path / "many")
    assert len(many.files) > 3
    assert [w.name for w in one.weights] == [w.name for w in many.weights]
    assert [left.name for left in one.left] == [left.name for left in many.left]
    for (_, a), (_, b) in zip(one.stream(), many.stream(), strict=True):
        assert torch.equal(a, b)


def test_a_checkpoint_can_be_sent_to_another_process(tmp_path: Path) -> None:
    save_file(tensors(LLAMA), tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    next(checkpoint.stream())  # even when it has been read from
    assert pickle.loads(pickle.dumps(checkpoint)) == checkpoint


def test_a_lone_shard_is_read_and_said_to_be_one(tmp_path: Path) -> None:
    path = tmp_path / "model-00001-of-00002.safetensors"
    save_file(tensors(LLAMA), path)
    assert "shard 1 of 2" in open_checkpoint(path).warnings[0]
    fails(tmp_path, "model-00002-of-00002.safetensors", "missing")


# ---- GGUF ------------------------------------------------------------------------------------------------------------


def write_gguf(path: Path, data: dict[str, tuple[np.ndarray, str]]) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    for name, (array, kind) in data.items():
        qtype = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, gguf.quantize(array, qtype), raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def array(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


@pytest.fixture
def gguf_data() -> dict[str, tuple[np.ndarray, str]]:
    return {
        "token_embd.weight": (array(40, 64), "Q8_0"),
        "blk.0.attn_norm.weight": (array(64), "F32"),
        "blk.0.attn_q.weight": (array(64, 64), "Q4_1"),
        "blk.0.attn_k.weight": (array(32, 64), "F16"),
        "blk.0.attn_v.weight": (array(32, 64), "BF16"),
        "blk.0.attn_output.weight": (array(64, 64), "F32"),
        "blk.0.ffn_gate_inp.weight": (array(4, 64), "F32"),
        "blk.0.ffn_up_exps.weight": (array(4, 96, 64), "Q8_0"),
        "blk.0.ffn_down_exps.weight": (array(4, 64, 96), "Q4_0"),
    }


def test_gguf_dequantizes_to_what_the_package_says(
    tmp_path: Path, gguf_data: dict[str, tuple[np.ndarray, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(tmp_path / "tiny.gguf", gguf_data)
    monkeypatch.setattr(module, "_DECODE_ELEMENTS", 700)  # a few rows at a time, the last ones fewer
    checkpoint = open_checkpoint(tmp_path / "tiny.gguf")
    kinds = {w.name: (w.kind, w.dtype, w.quantized, w.dim) for w in checkpoint.weights}
    assert kinds == {
        "blk.0.attn_k.weight": ("k", "F16", False, -1),
        "blk.0.attn_output.weight": ("o", "F32", False, -1),
        "blk.0.attn_q.weight": ("q", "Q4_1", True, -1),
        "blk.0.attn_v.weight": ("v", "BF16", False, -1),
        "blk.0.ffn_down_exps.weight": ("experts.down", "Q4_0", True, -1),
        "blk.0.ffn_up_exps.weight": ("experts.up", "Q8_0", True, -1),
    }
    about = {w.name: (w.stored_as, w.bits, w.group, w.why_dim) for w in checkpoint.weights}
    assert about["blk.0.attn_q.weight"] == ("GGUF Q4_1, blocks of 32 with their scales", 5.0, 32, "GGUF [out, in]")
    assert about["blk.0.ffn_up_exps.weight"][1:] == (8.5, 32, "GGUF fused experts [E, out, in]")
    assert about["blk.0.attn_v.weight"] == ("bfloat16", 16.0, None, "GGUF [out, in]")
    for weight, x in checkpoint.stream():
        rows = x.reshape(-1, x.shape[-1])
        assert torch.equal(checkpoint.read(weight, 5, 31), rows[5:31])
        values, kind = gguf_data[weight.name]
        qtype = gguf.GGMLQuantizationType[kind]
        expected = torch.from_numpy(gguf.dequantize(gguf.quantize(values, qtype), qtype))
        assert x.dtype == torch.float32
        assert x.shape == values.shape
        assert torch.equal(x, expected), weight.name
    assert {left.reason for left in checkpoint.left} == {"embedding", "norm", "router"}


def test_broken_gguf_files(tmp_path: Path, gguf_data: dict[str, tuple[np.ndarray, str]]) -> None:
    whole = tmp_path / "whole.gguf"
    write_gguf(whole, gguf_data)
    data = whole.read_bytes()
    for length in (5, 40, 300, len(data) - 100):  # in the version, the counts, the tensor list, the data
        cut = tmp_path / f"cut{length}.gguf"
        cut.write_bytes(data[:length])
        fails(cut, cut.name, "truncated")
    fails_foreign = tmp_path / "foreign.gguf"
    fails_foreign.write_bytes(b"not a model at all, just some text")
    fails(fails_foreign, "foreign.gguf", "neither a safetensors nor a GGUF nor a PyTorch file")


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [0, 4, 60, -50])
def test_a_truncated_safetensors_file_is_named(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "model.safetensors"
    save_file(tensors(LLAMA), path)
    path.write_bytes(path.read_bytes()[:keep])
    fails(tmp_path, str(path))


def test_a_foreign_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_text("<html>404 not found</html>")
    fails(path, str(path), "neither")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    tiny_model("qwen3").save_pretrained(tmp_path, max_shard_size="50KB")
    gone = sorted(tmp_path.glob("*.safetensors"))[1]
    gone.unlink()
    fails(tmp_path, gone.name, "missing", "model.safetensors.index.json")


def test_a_shard_without_a_promised_tensor_is_named(tmp_path: Path) -> None:
    save_file(tensors(LLAMA), tmp_path / "model-00001-of-00001.safetensors")
    promised = dict.fromkeys([*LLAMA, "model.layers.1.mlp.up_proj.weight"], "model-00001-of-00001.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": promised}))
    fails(tmp_path, "model.layers.1.mlp.up_proj.weight", "model-00001-of-00001.safetensors")
    index.write_text("{}")
    fails(tmp_path, "model.safetensors.index.json", "no index")


def test_folders_that_hold_no_one_model(tmp_path: Path) -> None:
    fails(tmp_path, "no .safetensors, .gguf or PyTorch .bin file")
    (tmp_path / "training_args.bin").write_bytes(b"x")  # what a trainer leaves is no model
    fails(tmp_path, "no .safetensors, .gguf or PyTorch .bin file")
    save_file(tensors(LLAMA), tmp_path / "a.safetensors")
    save_file(tensors(LLAMA), tmp_path / "b.safetensors")
    fails(tmp_path, "a.safetensors, b.safetensors", "give one")
    fails(tmp_path / "nowhere.safetensors", "no such file or folder")
    fails("nonsense", "no such file or folder", "hub id")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("model.layers.0.self_attn.q_proj.qweight", torch.int32),  # GPTQ, AWQ
        ("model.layers.0.self_attn.q_proj.weight_packed", torch.int32),  # compressed-tensors
        ("model.layers.0.self_attn.q_proj.weight", torch.uint8),  # bitsandbytes
        ("model.layers.0.self_attn.q_proj.weight", torch.float8_e4m3fn),  # its scale lies in another tensor
        ("model.layers.0.mlp.experts.gate_up_proj_blocks", torch.uint8),  # gpt-oss as published
    ],
)
def test_codes_of_a_quantized_weight_are_an_error(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    data = tensors(LLAMA)
    data.pop("model.layers.0.self_attn.q_proj.weight")
    data[name] = torch.zeros(8, 64).to(dtype)
    save_file(data, tmp_path / "model.safetensors")
    fails(tmp_path, name, "already quantized", "model.safetensors")


def test_other_integers_are_left_and_reported(tmp_path: Path) -> None:
    data = tensors(LLAMA)
    data["embeddings.position_ids"] = torch.arange(512).unsqueeze(0)
    data["model.layers.0.self_attn.q_proj.g_idx"] = torch.zeros(64, dtype=torch.int32)
    data["model.extra_embeddings.weight"] = torch.zeros(4, 64, dtype=torch.int8)
    save_file(data, tmp_path / "model.safetensors")
    left = {x.name: x.reason for x in open_checkpoint(tmp_path).left}
    assert left["embeddings.position_ids"] == "integer tensor"
    assert left["model.layers.0.self_attn.q_proj.g_idx"] == "integer tensor"
    assert left["model.extra_embeddings.weight"] == "integer tensor (embedding)"


def test_experts_of_unknown_layout_are_left_out_loudly(tmp_path: Path) -> None:
    data = tensors(LLAMA | {"blocks.0.ffn.experts.mlp.w1": (4 * 96, 64)})  # DBRX
    save_file(data, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    assert "blocks.0.ffn.experts.mlp.w1" not in {w.name for w in checkpoint.weights}
    assert "blocks.0.ffn.experts.mlp.w1" in checkpoint.warnings[0]


def test_a_model_without_linear_weights(tmp_path: Path) -> None:
    save_file(tensors({"embed_tokens.weight": (4, 8)}), tmp_path / "model.safetensors")
    fails(tmp_path, "no linear weights", "embed_tokens.weight")


# ---- the hub (mocked: tests use no network) --------------------------------------------------------------------------


def test_a_hub_id_downloads_safetensors_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    save_file(tensors(LLAMA), tmp_path / "model.safetensors")
    calls: list[tuple[str, dict[str, object]]] = []

    def snapshot_download(repo: str, **options: object) -> str:
        calls.append((repo, options))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    checkpoint = open_checkpoint("someone/tiny@v1")
    assert checkpoint.name == "someone/tiny@v1"
    assert len(checkpoint.weights) == 7
    repo, options = calls[0]
    assert (repo, options["revision"]) == ("someone/tiny", "v1")
    assert options["allow_patterns"] == [
        "*.safetensors",
        "*.safetensors.index.json",
        "config.json",
        "quantize_config.json",
    ]
    assert options["ignore_patterns"] == ["*/*"]  # no second copy from original/ or onnx/
    (tmp_path / "model.safetensors").unlink()
    fails("someone/tiny", "no .safetensors file")


def test_a_hub_that_can_not_be_reached_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def snapshot_download(repo: str, **options: object) -> str:
        raise ConnectionError("no route\nto the host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    fails("someone/tiny", "someone/tiny", "no route")

"""Every stored form, from a file that the form's own library made, against that library's own decoder: no bit differs.

compressed-tensors writes FP8, INT8, int4, MXFP4, NVFP4 and MXFP8; transformers FP8 in blocks; GPTQModel GPTQ and AWQ
(in a process of its own, from the folder that `make oracles` fills: peft refuses to work beside it); huggingface_hub
PyTorch shards. Decoders that return bfloat16 or float16 must equal ours rounded to it.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from mxrl.checkpoint import Checkpoint, CheckpointError, Weight, open_checkpoint

Q = "model.layers.0.self_attn.q_proj"
ORACLES = Path(__file__).parents[2] / ".venv" / "oracles"


def randn(*shape: int, seed: int = 0, scale: float = 0.02) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def codes(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def write(folder: Path, tensors: dict[str, Tensor], quantization: dict[str, Any] | None = None) -> Path:
    """A folder with `tensors` and, in its config.json, the `quantization_config`."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    if quantization is not None:
        (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    return folder


def only(checkpoint: Checkpoint) -> Weight:
    (weight,) = checkpoint.weights
    return weight


def check(folder: Path, name: str, expected: Tensor) -> Weight:
    """`name` decodes to `expected` (float32): whole, by rows that respect no boundary, by a copy sent elsewhere."""
    checkpoint = open_checkpoint(folder)
    weight = next(w for w in checkpoint.weights if w.name == name)
    assert weight.quantized
    whole = checkpoint.load(weight)
    assert whole.dtype == expected.dtype == torch.float32
    assert whole.shape == weight.shape == expected.shape
    assert torch.equal(whole, expected)
    assert torch.equal(torch.signbit(whole), torch.signbit(expected))
    rows = whole.reshape(-1, whole.shape[-1])
    count = len(rows)
    sent: Checkpoint = pickle.loads(pickle.dumps(checkpoint))
    for start, stop in ((0, count), (0, 1), (3, 4), (5, 13), (count // 2 - 1, count // 2 + 2), (count - 3, count)):
        assert torch.equal(sent.read(weight, start, stop), rows[start:stop]), (start, stop)
    assert sent.read(weight, 2, 2).shape == (0, whole.shape[-1])
    return weight


def fails(folder: Path, *parts: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, message


# ---- compressed-tensors ----------------------------------------------------------------------------------------------


def compress(preset: str, weight: Tensor, **changes: Any) -> tuple[dict[str, Tensor], dict[str, Any], Any]:
    """compressed-tensors' own tensors for `weight`, its quantization_config, and the scheme."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.format import infer_module_format
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    scheme: Any = preset_name_to_scheme(preset, ["Linear"])
    if changes:
        scheme.weights = QuantizationArgs(**(scheme.weights.model_dump() | changes))
    args: Any = scheme.weights
    extra: dict[str, Tensor] = {}
    strategy = str(getattr(args.strategy, "value", args.strategy))
    if strategy in ("group", "tensor_group"):
        blocks = weight.unflatten(-1, (-1, args.group_size))
        low, high = blocks.amin(-1), blocks.amax(-1)
    elif strategy == "channel":
        low, high = weight.amin(-1, keepdim=True), weight.amax(-1, keepdim=True)
    elif strategy == "block":
        n, k = args.block_structure
        padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % k, 0, -weight.shape[0] % n))
        tiles = padded.unflatten(0, (-1, n)).unflatten(-1, (-1, k))
        low, high = tiles.amin((1, 3)), tiles.amax((1, 3))
    else:
        low, high = weight.amin().reshape(1), weight.amax().reshape(1)
    if strategy == "tensor_group":
        extra["weight_global_scale"] = generate_gparam(weight.amin(), weight.amax()).reshape(1)
    scale, zero = calculate_qparams(low, high, args, global_scale=extra.get("weight_global_scale"))
    name = infer_module_format(torch.nn.Linear, scheme).value
    compressor = BaseCompressor.get_value_from_registry(name)
    state: Any = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero} | extra
    state = compressor.compress(state, scheme)
    config = QuantizationConfig(config_groups={"group_0": scheme}, format=name).model_dump(mode="json")
    return state, config | {"quant_method": "compressed-tensors"}, (compressor, scheme)


def decompressed(state: dict[str, Tensor], owner: Any) -> Tensor:
    compressor, scheme = owner
    return compressor.decompress(dict(state), scheme)["weight"]


@pytest.mark.parametrize(
    ("preset", "stored_as", "bits", "group"),
    [
        ("FP8", "FP8 E4M3, one float32 scale a tensor", 8 + 32 / (200 * 256), 256),
        ("FP8_DYNAMIC", "FP8 E4M3, one float32 scale a channel", 8 + 32 / 256, 256),
        ("FP8_BLOCK", "FP8 E4M3, blocks of 128×128, float32 scales", 8 + 32 * 4 / (200 * 256), 128),
        ("W8A8", "INT8, one float32 scale a channel", 8 + 32 / 256, 256),
        ("MXFP8", "FP8 E4M3, groups of 32, E8M0 scales", 8.25, 32),
        ("MXFP4", "MXFP4 blocks of 32, E8M0 scales", 4.25, 32),
        ("NVFP4", "NVFP4 blocks of 16, E4M3 scales and one float32 a tensor", 4.5 + 32 / (200 * 256), 16),
        ("W4A16", "int4, groups of 128", 4 + 32 / 128, 128),
        ("W4A16_ASYM", "int4, groups of 128", 4 + 32 / 128 + 4 / 128, 128),
        ("W8A16", "int8, groups of 128", 8 + 32 / 128, 128),
        ("W2A16", "int2, groups of 128", 2 + 32 / 128, 128),
    ],
)
def test_compressed_tensors(tmp_path: Path, preset: str, stored_as: str, bits: float, group: int) -> None:
    """200 rows: no multiple of a block's 128. Scales in float32, so that the library's own product is float32 too."""
    state, config, owner = compress(preset, randn(200, 256))
    folder = write(tmp_path, {f"{Q}.{k}": v for k, v in state.items()}, config)
    theirs = decompressed(state, owner)
    if theirs.dtype != torch.float32:  # MXFP4, NVFP4, MXFP8 come in bfloat16: exact for powers of two, not for NVFP4
        if preset == "NVFP4":
            weight = only(open_checkpoint(folder))
            assert torch.equal(open_checkpoint(folder).load(weight).to(torch.bfloat16), theirs)
            from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
            from compressed_tensors.quantization.lifecycle.forward import dequantize

            values = unpack_fp4_from_uint8(state["weight_packed"], 200, 256, dtype=torch.float32)
            scale, total = state["weight_scale"].float(), state["weight_global_scale"]
            theirs = dequantize(values, scale, args=owner[1].weights, global_scale=total, dtype=torch.float32)
        theirs = theirs.float()
    weight = check(folder, f"{Q}.weight", theirs)
    assert (weight.kind, weight.dim, weight.group) == ("q", -1, group)
    assert weight.stored_as == stored_as
    shape_bits = 64 * state["weight_shape"].numel() / (200 * 256) if "weight_shape" in state else 0.0
    assert weight.bits == bits and weight.nbytes < (bits + shape_bits + 0.01) * 200 * 256 / 8
    left = {x.name: x.reason for x in open_checkpoint(folder).left}
    assert left[f"{Q}.weight_scale"] == f"scales of '{Q}.weight'"
    assert set(left) == {f"{Q}.{k}" for k in state} - {f"{Q}.weight", f"{Q}.weight_packed"} | (
        {f"{Q}.weight_packed"} if "weight_packed" in state else set()
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_library_that_decodes_to_16_bits_gives_ours_rounded(tmp_path: Path, dtype: torch.dtype) -> None:
    state, config, owner = compress("W4A16_ASYM", randn(64, 256).to(dtype))
    folder = write(tmp_path, {f"{Q}.{k}": v for k, v in state.items()}, config)
    theirs, checkpoint = decompressed(state, owner), open_checkpoint(folder)
    assert theirs.dtype == dtype
    ours = checkpoint.load(only(checkpoint))
    assert torch.equal(ours.to(dtype), theirs)
    exact = check(folder, f"{Q}.weight", decompressed(state | {"weight_scale": state["weight_scale"].float()}, owner))
    assert exact.bits == 4 + 16 / 128 + 4 / 128


def test_asymmetric_int8(tmp_path: Path) -> None:
    state, config, owner = compress("W8A8", randn(200, 256) + 0.03, symmetric=False)
    assert state["weight_zero_point"].unique().numel() > 10
    folder = write(tmp_path, {f"{Q}.{k}": v for k, v in state.items()}, config)
    assert check(folder, f"{Q}.weight", decompressed(state, owner)).bits == 8 + 40 / 256


@pytest.mark.parametrize(("strategy", "words"), [("channel", "one scale a channel"), ("tensor", "one scale a tensor")])
def test_packed_integers_with_one_scale_a_channel_or_tensor(tmp_path: Path, strategy: str, words: str) -> None:
    state, config, owner = compress(
        "W4A16", randn(64, 250), strategy=strategy, group_size=None
    )  # 250: half a word over
    folder = write(tmp_path, {f"{Q}.{k}": v for k, v in state.items()}, config)
    weight = check(folder, f"{Q}.weight", decompressed(state, owner))
    assert (weight.stored_as, weight.group) == (f"int4, {words}", 250)


def test_columns_grouped_in_activation_order(tmp_path: Path) -> None:
    """weight_g_idx: the library undoes the order when it runs; the scale of column j is that of group g_idx[j]."""
    state, config, owner = compress("W4A16", randn(64, 256))
    order = torch.arange(256).flip(0) // 128
    del owner
    values = open_checkpoint(write(tmp_path / "plain", {f"{Q}.{k}": v for k, v in state.items()}, config))
    unscaled = values.load(only(values)) / state["weight_scale"].repeat_interleave(128, dim=1)
    folder = write(
        tmp_path / "shuffled", {f"{Q}.{k}": v for k, v in (state | {"weight_g_idx": order.int()}).items()}, config
    )
    weight = check(folder, f"{Q}.weight", unscaled.round() * state["weight_scale"][:, order])
    assert weight.stored_as == "int4, groups of 128, columns grouped in activation order"


def test_modelopt_nvfp4(tmp_path: Path) -> None:
    """ModelOpt's file is compressed-tensors' with other names and the reciprocal of the tensor's scale."""
    state, _, _ = compress("NVFP4", randn(64, 256))
    converter = pytest.importorskip("compressed_tensors.entrypoints.convert.converters.modelopt_nvfp4")
    theirs = {
        f"{Q}.weight": state["weight_packed"],
        f"{Q}.weight_scale": state["weight_scale"],
        f"{Q}.weight_scale_2": 1 / state["weight_global_scale"].reshape(()),
    }
    folder = write(tmp_path / "modelopt", theirs, {"quant_method": "modelopt", "quant_algo": "NVFP4"})
    back = converter.ModelOptNvfp4Converter(targets=[".*", "re:.*"]).process(dict(theirs))
    assert torch.equal(back[f"{Q}.weight_packed"], state["weight_packed"])  # the converter reads the file so, too
    pairs = torch.stack([state["weight_packed"] & 15, state["weight_packed"] >> 4], dim=-1).flatten(1).long()
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.where(pairs >= 8, -table[pairs % 8], table[pairs % 8])
    scale = state["weight_scale"].float() * theirs[f"{Q}.weight_scale_2"]
    weight = check(folder, f"{Q}.weight", values * scale.repeat_interleave(16, dim=1))
    assert weight.dtype == "NVFP4"


# ---- gpt-oss and transformers' FP8 -----------------------------------------------------------------------------------


def test_gpt_oss_blocks(tmp_path: Path) -> None:
    """Codes and scales by compressed-tensors, laid out and named as gpt-oss publishes; decoded as transformers does."""
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    tensors, expected = {}, {}
    for name, shape in (("gate_up_proj", (4, 192, 64)), ("down_proj", (4, 64, 96))):
        state, _, _ = compress("MXFP4", randn(shape[0] * shape[1], shape[2]))
        base = f"model.layers.0.mlp.experts.{name}"
        blocks = tensors[f"{base}_blocks"] = state["weight_packed"].view(*shape[:2], shape[2] // 32, 16)
        scales = tensors[f"{base}_scales"] = state["weight_scale"].view(*shape[:2], shape[2] // 32)
        tensors[f"{base}_bias"] = randn(*shape[:2])
        decoded = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        expected[base] = decoded.transpose(1, 2).contiguous()  # transformers lays them out [E, in, out]
    folder = write(tmp_path, tensors, {"quant_method": "mxfp4"})
    for base, values in expected.items():
        weight = check(folder, base, values)
        assert (weight.kind, weight.dim, weight.group) == (
            "experts." + base.rpartition(".")[2].removesuffix("_proj"),
            -1,
            32,
        )
        assert weight.why_dim == "gpt-oss blocks [E, out, in/32, 16]"
        assert weight.stored_as == "MXFP4 blocks of 32, E8M0 scales"
        assert (weight.dtype, weight.bits) == ("MXFP4", 4.25)


def test_every_code_and_every_scale_of_mxfp4(tmp_path: Path) -> None:
    """All 256 bytes beside all 256 scales: 2^-127 is no zero, and 255 is NaN (as OCP says; the libraries say Inf)."""
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 256, 16, 16)
    scales = torch.arange(256, dtype=torch.uint8).view(1, 256, 1).expand(1, 256, 16)
    base = "model.layers.0.mlp.experts.down_proj"
    folder = write(tmp_path, {f"{base}_blocks": blocks, f"{base}_scales": scales})
    checkpoint = open_checkpoint(folder)
    values = checkpoint.load(only(checkpoint))[0]
    table = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    element = torch.tensor([table[nibble] for byte in range(256) for nibble in (byte % 16, byte // 16)])
    for e in range(255):
        expected = (element.double() * 2.0 ** (e - 127)).float()  # above 2^125 · 6 it overflows, as float32 does
        assert torch.equal(values[e], expected), e
        assert torch.equal(torch.signbit(values[e]), torch.signbit(expected)), e
    assert values[255].isnan().all()
    assert values[0].abs().max() == 6 * 2.0**-127 and values[0, 2] == 2.0**-128


@pytest.mark.parametrize("scale_fmt", ["float", "ue8m0"])
def test_transformers_fp8_blocks(tmp_path: Path, scale_fmt: str) -> None:
    """Linear layers and fused experts; the scale grid of the experts is their own, one after another."""
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    from types import SimpleNamespace

    from transformers import FineGrainedFP8Config

    config = FineGrainedFP8Config(weight_block_size=(32, 64), scale_fmt=scale_fmt)
    owner = SimpleNamespace(quantization_config=config)
    originals = {
        f"{Q}.weight": randn(96, 128),
        "model.layers.0.mlp.experts.gate_up_proj": randn(3, 256, 64),
        "model.layers.0.mlp.experts.down_proj": randn(3, 64, 128),
    }
    tensors = fp8.Fp8Quantize(owner).convert(dict(originals))
    folder = write(tmp_path, tensors, config.to_dict())
    dequantize = fp8.Fp8Dequantize(owner)
    for name in originals:
        scale = tensors[f"{name}_scale_inv"]
        theirs = dequantize.convert({name: [tensors[name]], f"{name}_scale_inv": [scale.float()]})[name][0]
        weight = check(folder, name, theirs)
        scales = "E8M0" if scale_fmt == "ue8m0" else "float32"
        assert weight.stored_as == f"FP8 E4M3, blocks of 32×64, {scales} scales"
        assert weight.group == 64
        assert weight.bits == 8 + (8 if scale_fmt == "ue8m0" else 32) / (32 * 64)
    reasons = {x.reason for x in open_checkpoint(folder).left}
    assert reasons == {f"scales of '{name}'" for name in originals}


def test_fp8_in_blocks_that_do_not_divide_the_weight(tmp_path: Path) -> None:
    """DeepSeek: 128 × 128 blocks, the last ones cut off. Its own decoder runs on a GPU only; the sum is written out."""
    weight, scale = randn(200, 300).to(torch.float8_e5m2), randn(2, 3).abs()
    folder = write(tmp_path, {f"{Q}.weight": weight, f"{Q}.weight_scale_inv": scale}, {"quant_method": "fp8"})
    expected = torch.empty(200, 300)
    for i in range(200):
        for j in range(300):
            expected[i, j] = weight[i, j].float() * scale[i // 128, j // 128]
    assert check(folder, f"{Q}.weight", expected).stored_as == "FP8 E5M2, blocks of 128×128, float32 scales"
    name = "model.layers.0.mlp.experts.up_proj.weight"  # fused: every expert's grid starts anew
    weight, scale = randn(3, 200, 160).to(torch.float8_e4m3fn), randn(3, 2, 2).abs()
    folder = write(tmp_path / "fused", {name: weight, f"{name}_scale_inv": scale})
    padded = scale.repeat_interleave(128, dim=1)[:, :200].repeat_interleave(128, dim=2)[:, :, :160]
    check(folder, name, weight.float() * padded)


def test_fp4_in_int8_as_deepseek_v4_has_it(tmp_path: Path) -> None:
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    weight, scale = codes(64, 48).view(torch.int8), codes(64, 3, seed=1) % 40 + 100
    scale = scale.view(torch.float8_e8m0fnu)
    folder = write(tmp_path, {f"{Q}.weight": weight, f"{Q}.weight_scale_inv": scale}, {"quant_method": "fp8"})
    name, convert = f"{Q}.weight", fp8.Fp8Dequantize(None).convert
    theirs = convert({name: [weight], f"{name}_scale_inv": [scale.float()]})[name][0]
    assert check(folder, name, theirs).stored_as == "MXFP4 blocks of 32, E8M0 scales"


# ---- GPTQ and AWQ ----------------------------------------------------------------------------------------------------

_GPTQMODEL = r"""
import sys
from pathlib import Path
import torch
from safetensors.torch import save_file
from gptqmodel.nn_modules.qlinear.torch import TorchLinear
from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm, pack_awq
from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module
from types import SimpleNamespace

out, Q = Path(sys.argv[1]), sys.argv[2]
K, N, generator = 256, 64, torch.Generator().manual_seed(0)
for bits in (2, 4, 8):
    for order in ("in order", "shuffled"):
        group, top = 64, 2**bits - 1
        module = TorchLinear(bits=bits, group_size=group, desc_act=order == "shuffled", sym=False, in_features=K,
                             out_features=N, bias=False, register_buffers=True)
        linear = torch.nn.Linear(K, N, bias=False)
        linear.weight.data = torch.randn(N, K, generator=generator) * 0.02
        g_idx = (torch.randperm(K, generator=generator) if order == "shuffled" else torch.arange(K)) // group
        scales = torch.rand(N, K // group, generator=generator).mul(0.01).add(0.001).half().float()
        zeros = torch.randint(0, top + 1, (N, K // group), generator=generator).float()
        zeros[0, 0], zeros[1, 0] = 0, top
        module.pack(linear=linear, scales=scales, zeros=zeros, g_idx=g_idx.int())
        module.post_init()
        for name, dtype in (("half", torch.float16), ("single", torch.float32)):
            module.scales = module.scales.to(dtype)
            values = module.dequantize_weight().T.contiguous()
            assert values.dtype == dtype
            save_file({"w": values}, out / f"{bits}{order}{name}.safetensors")
        module.scales = module.scales.half()
        for version in ("gptq_v2", "gptq"):
            if version == "gptq":
                convert_gptq_v2_to_v1_format_module(module, SimpleNamespace(bits=bits, pack_dtype=torch.int32))
            parts = {p: getattr(module, p).contiguous().clone() for p in ("qweight", "qzeros", "scales", "g_idx")}
            save_file({f"{Q}.{p}": v for p, v in parts.items()}, out / f"{bits}{order}{version}.safetensors")
codes = torch.randint(0, 16, (K, N), generator=generator)
zeros = torch.randint(0, 16, (K // 64, N), generator=generator)
scales = torch.rand(K // 64, N, generator=generator).mul(0.01).add(0.001).half()
qweight, qzeros = pack_awq(codes, zeros, 4)
save_file({f"{Q}.qweight": qweight, f"{Q}.qzeros": qzeros, f"{Q}.scales": scales}, out / "awq.safetensors")
save_file({"half": dequantize_gemm(qweight, qzeros, scales, 4, 64).T.contiguous(),
           "single": dequantize_gemm(qweight, qzeros, scales.float(), 4, 64).T.contiguous()}, out / "awq_w.safetensors")
"""


@pytest.fixture(scope="module")
def gptqmodel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What GPTQModel packs, and what it decodes it to: float16 as it runs, float32 where its scales are float32."""
    if not (ORACLES / "gptqmodel").exists():
        pytest.skip(f"GPTQModel is not in {ORACLES.relative_to(ORACLES.parents[1])}: `make oracles` puts it there")
    out = tmp_path_factory.mktemp("gptqmodel")
    environment = os.environ | {"PYTHONPATH": str(ORACLES), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _GPTQMODEL, str(out), Q], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return out


def loaded(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("order", ["in order", "shuffled"])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_gptq(tmp_path: Path, gptqmodel: Path, bits: int, order: str, version: str) -> None:
    """Zero points from 0 to the top, so that version 1's subtraction borrows; groups in order and in act-order."""
    config = {"quant_method": "gptq", "bits": bits, "group_size": 64, "desc_act": order == "shuffled"}
    folder = write(
        tmp_path, loaded(gptqmodel / f"{bits}{order}{version}.safetensors"), config | {"checkpoint_format": version}
    )
    theirs = loaded(gptqmodel / f"{bits}{order}single.safetensors")["w"]
    weight = check(folder, f"{Q}.weight", theirs)
    checkpoint = open_checkpoint(folder)
    half = loaded(gptqmodel / f"{bits}{order}half.safetensors")["w"]
    assert torch.equal(checkpoint.load(weight).half(), half)
    assert weight.stored_as == f"GPTQ int{bits}, groups of 64" + (
        ", columns grouped in activation order" if order == "shuffled" else ""
    )
    assert (weight.dim, weight.group, weight.dtype) == (-1, 64, f"GPTQ INT{bits}")
    assert weight.bits == bits + (16 + bits) / 64 + 32 / 64  # 64 outputs: g_idx weighs in
    assert checkpoint.warnings == ()


def test_gptq_without_a_config_says_what_it_takes_for_granted(tmp_path: Path, gptqmodel: Path) -> None:
    data = loaded(gptqmodel / "4in ordergptq.safetensors")
    folder = write(tmp_path, data)
    check(folder, f"{Q}.weight", loaded(gptqmodel / "4in ordersingle.safetensors")["w"])
    assert "version 1" in open_checkpoint(folder).warnings[0]
    (folder / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": 64}))  # AutoGPTQ's
    assert open_checkpoint(folder).warnings == ()


def test_autoround_names_what_it_stores(tmp_path: Path, gptqmodel: Path) -> None:
    """Its packing after AutoGPTQ stores zero points less one, its own does not (auto_round_extension.torch)."""
    theirs = loaded(gptqmodel / "4in ordersingle.safetensors")["w"]
    config = {"quant_method": "auto-round", "bits": 4, "group_size": 64}
    for packing, version in (
        ("auto_round:auto_gptq", "gptq"),
        ("auto_round", "gptq_v2"),
        ("auto_round:gptqmodel", "gptq_v2"),
    ):
        data = loaded(gptqmodel / f"4in order{version}.safetensors")
        folder = write(tmp_path / packing.replace(":", "_"), data, config | {"packing_format": packing})
        assert check(folder, f"{Q}.weight", theirs).stored_as == "AutoRound int4, groups of 64"


def test_awq(tmp_path: Path, gptqmodel: Path) -> None:
    data, theirs = loaded(gptqmodel / "awq.safetensors"), loaded(gptqmodel / "awq_w.safetensors")
    config = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
    folder = write(tmp_path, data, config)
    weight = check(folder, f"{Q}.weight", theirs["single"])
    checkpoint = open_checkpoint(folder)
    assert torch.equal(checkpoint.load(weight).half(), theirs["half"])
    assert weight.stored_as == "AWQ int4, groups of 64"
    assert "moves scales" in checkpoint.warnings[0]
    assert (weight.bits, weight.group, weight.shape) == (4 + 20 / 64, 64, (64, 256))


def test_awq_against_compressed_tensors_reading_of_it(tmp_path: Path) -> None:
    """Runs without GPTQModel: compressed-tensors converts AWQ's words to its own, and decodes those."""
    autoawq = pytest.importorskip("compressed_tensors.entrypoints.convert.converters.autoawq")
    generator = torch.Generator().manual_seed(0)
    words = [torch.randint(-(2**31), 2**31, s, generator=generator, dtype=torch.int64) for s in ((256, 5), (2, 5))]
    data = {f"{Q}.qweight": words[0].int(), f"{Q}.qzeros": words[1].int(), f"{Q}.scales": randn(2, 40).abs()}
    config = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}
    folder = write(tmp_path / "awq", data, config)
    converter = autoawq.AutoAWQConverter.from_autoawq_config(config)
    converted = {k.removeprefix(f"{Q}."): v for k, v in converter.process(dict(data)).items()}
    scheme = next(iter(converter.update_config(None).config_groups.values()))
    from compressed_tensors.compressors import BaseCompressor

    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    theirs = decompressed(converted, (compressor, scheme))
    check(folder, f"{Q}.weight", theirs)
    as_compressed = write(tmp_path / "ct", {f"{Q}.{k}": v for k, v in converted.items()})
    check(as_compressed, f"{Q}.weight", theirs)


# ---- PyTorch ---------------------------------------------------------------------------------------------------------


def test_pytorch_shards_written_by_huggingface_hub(tmp_path: Path) -> None:
    from huggingface_hub import save_torch_state_dict
    from tiny_models import tiny_model

    model = tiny_model("qwen3_moe", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "safetensors")
    for name, size in (("one", "5GB"), ("many", "50KB")):
        (tmp_path / name).mkdir()
        save_torch_state_dict(
            open_state(tmp_path / "safetensors"), tmp_path / name, safe_serialization=False, max_shard_size=size
        )
        theirs, ours = open_checkpoint(tmp_path / "safetensors"), open_checkpoint(tmp_path / name)
        assert ours.format == "torch"
        assert (len(ours.files) > 3) == (name == "many")
        assert [(w.name, w.shape, w.dim, w.dtype) for w in ours.weights] == [
            (w.name, w.shape, w.dim, w.dtype) for w in theirs.weights
        ]
        for weight, other in zip(ours.weights, theirs.weights, strict=True):
            assert torch.equal(ours.load(weight), theirs.load(other))
            assert torch.equal(ours.read(weight, 3, 7), theirs.read(other, 3, 7))
            assert not weight.quantized and weight.bits == 16


def open_state(folder: Path) -> dict[str, Tensor]:
    return loaded(folder / "model.safetensors")


# ---- what can't be read ----------------------------------------------------------------------------------------------


def test_codes_without_their_scales(tmp_path: Path) -> None:
    state, config, _ = compress("W4A16", randn(64, 256))
    bare = {f"{Q}.{k}": v for k, v in state.items() if k != "weight_scale"}
    fails(write(tmp_path / "a", bare, config), "model.safetensors", f"{Q}.weight_packed", f"{Q}.weight_scale")
    state, config, _ = compress("NVFP4", randn(64, 256))
    bare = {f"{Q}.{k}": v for k, v in state.items() if k != "weight_global_scale"}
    fails(write(tmp_path / "b", bare, config), f"{Q}.weight_packed", "NVFP4", f"{Q}.weight_global_scale")
    fails(
        write(tmp_path / "c", {f"{Q}.weight": randn(64, 64).to(torch.float8_e4m3fn)}),
        f"{Q}.weight",
        "F8_E4M3",
        "scales",
    )
    base = "model.layers.0.mlp.experts.down_proj"
    fails(write(tmp_path / "d", {f"{base}_blocks": codes(2, 4, 2, 16)}), f"{base}_blocks", f"{base}_scales")
    fails(write(tmp_path / "e", {f"{Q}.qweight": torch.zeros(8, 64, dtype=torch.int32)}), f"{Q}.qweight", f"{Q}.scales")


def test_parts_that_do_not_fit_each_other(tmp_path: Path) -> None:
    base = "model.layers.0.mlp.experts.down_proj"
    parts = {f"{base}_blocks": codes(2, 4, 2, 16), f"{base}_scales": codes(2, 4, 3)}
    fails(write(tmp_path / "a", parts), f"{base}_scales", "[2, 4, 3]", "should be U8", "[2, 4, 2]")
    fp8 = {f"{Q}.weight": randn(64, 64).to(torch.float8_e4m3fn), f"{Q}.weight_scale_inv": randn(3, 5)}
    fails(write(tmp_path / "b", fp8), f"{Q}.weight_scale_inv", "[3, 5]", "[64, 64]")
    gptq = {f"{Q}.qweight": torch.zeros(8, 60, dtype=torch.int32), f"{Q}.scales": randn(1, 64)}
    fails(write(tmp_path / "c", gptq), f"{Q}.qweight", "[8, 60]", "[1, 64]")
    state, config, _ = compress("W4A16", randn(64, 256))
    wrong = state | {"weight_shape": torch.tensor([64, 300])}
    fails(write(tmp_path / "d", {f"{Q}.{k}": v for k, v in wrong.items()}, config), "weight_packed", "[64, 300]")
    both = {f"{Q}.{k}": v for k, v in state.items()} | {f"{Q}.weight": randn(64, 256)}
    fails(write(tmp_path / "e", both, config), f"{Q}.weight", "twice")


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        ({"quant_method": "bitsandbytes"}, ("bitsandbytes", "not read", "gptq, awq")),
        ({"quant_method": "magic"}, ("'magic'", "does not know", "gptq, awq")),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, ("checkpoint_format 'marlin'", "gptq_v2")),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, ("marlin-24", "not read")),
        (
            {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}},
            ("sparse-24-bitmask", "not read"),
        ),
    ],
)
def test_a_method_that_is_not_read_names_itself(tmp_path: Path, config: dict[str, Any], parts: tuple[str, ...]) -> None:
    ending = "weight_packed" if config["quant_method"] == "compressed-tensors" else "qweight"
    words = torch.zeros(32, 64, dtype=torch.int32)
    tensors = {f"{Q}.{ending}": words, f"{Q}.scales": randn(2, 64), f"{Q}.qzeros": torch.zeros(2, 8, dtype=torch.int32)}
    fails(write(tmp_path, tensors, config), "config.json", *parts, "float16, bfloat16 or float32")


def test_other_layouts_of_known_methods(tmp_path: Path) -> None:
    awq = {f"{Q}.qweight": torch.zeros(256, 8, dtype=torch.int32), f"{Q}.scales": randn(2, 64)}
    fails(write(tmp_path / "a", awq, {"quant_method": "awq", "version": "gemv"}), "AWQ version 'gemv'", "gemm")
    three = {f"{Q}.qweight": torch.zeros(24, 64, dtype=torch.int32), f"{Q}.scales": randn(2, 64)}
    fails(write(tmp_path / "b", three, {"quant_method": "gptq", "bits": 3}), f"{Q}.qweight", "3-bit", "2, 4 and 8")
    state, config, _ = compress("W3A16", randn(64, 256))
    fails(write(tmp_path / "c", {f"{Q}.{k}": v for k, v in state.items()}, config), "3-bit", "straddle")
    state, config, _ = compress("MXFP6A16", randn(64, 256))
    fails(write(tmp_path / "d", {f"{Q}.{k}": v for k, v in state.items()}, config), "mxfp6", "not read")


def test_a_config_that_says_more_than_the_weights(tmp_path: Path) -> None:
    """A dequantized model saved with its old config is floats; rotated weights compare with no original."""
    folder = write(tmp_path / "a", {f"{Q}.weight": randn(64, 64)}, {"quant_method": "hqq"})
    assert "'hqq'" in open_checkpoint(folder).warnings[0] and not only(open_checkpoint(folder)).quantized
    state, config, _ = compress("W4A16", randn(64, 256))
    config["transform_config"] = {"config_groups": {"u": {"type": "hadamard"}}}
    folder = write(tmp_path / "b", {f"{Q}.{k}": v for k, v in state.items()}, config)
    assert "rotated" in open_checkpoint(folder).warnings[0]
    (folder / "config.json").write_text("{")
    fails(folder, "config.json", "can't be read")

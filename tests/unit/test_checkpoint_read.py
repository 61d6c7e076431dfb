"""Reading rows: the same bits as the whole tensor, none of the rest of the file; and PyTorch files, good and bad."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mxrl.checkpoint import CheckpointError, open_checkpoint
from mxrl.scan_tasks import read_into, width

NAME = "model.layers.0.self_attn.q_proj.weight"
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def values(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def fails(source: Path, *parts: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(source)
    message = str(caught.value)
    assert "\n" not in message
    for part in (source.name, *parts):
        assert part in message, message


def anonymous_bytes() -> int:
    """Memory of this process that is no file's: RssAnon."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


# ---- safetensors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_those_of_the_whole(tmp_path: Path, dtype: torch.dtype) -> None:
    experts = "model.layers.0.mlp.experts."
    data = {NAME: values(13, 7, dtype=dtype), experts + "gate_up_proj": values(3, 8, 5, dtype=dtype)}
    data[experts + "down_proj"] = values(3, 5, 4, dtype=dtype)
    save_file(data, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    assert len(checkpoint.weights) == 3
    for weight in checkpoint.weights:
        rows = data[weight.name].reshape(-1, weight.shape[-1])
        assert torch.equal(checkpoint.load(weight), data[weight.name])
        for start in range(len(rows) + 1):
            for stop in range(start, len(rows) + 1):
                got = checkpoint.read(weight, start, stop)
                assert got.dtype == dtype and got.shape == (stop - start, weight.shape[-1])
                assert torch.equal(got, rows[start:stop])
        for start, stop in ((-1, 2), (2, 1), (0, len(rows) + 1)):
            with pytest.raises(IndexError, match=weight.name):
                checkpoint.read(weight, start, stop)


def test_a_header_of_any_length(tmp_path: Path) -> None:
    """safetensors pads its header to 8 bytes; files by others start their data anywhere."""
    data = values(6, 4)
    header = json.dumps({NAME: {"dtype": "F32", "shape": [6, 4], "data_offsets": [0, 96]}}).encode()
    for padding in range(4):
        text = header + b" " * padding
        path = tmp_path / f"m{padding}.safetensors"
        path.write_bytes(len(text).to_bytes(8, "little") + text + data.numpy().tobytes())
        checkpoint = open_checkpoint(path)
        got = checkpoint.read(checkpoint.weights[0], 1, 5)
        assert torch.equal(got, data[1:5]) and got.data_ptr() % 4 == 0


def test_a_tensor_larger_than_the_memory_is_read_by_rows(tmp_path: Path) -> None:
    """64 GB (a sparse file: it takes no room on the disk): its last rows, without any of the others."""
    width, rows = 8192, 1 << 22
    header = json.dumps(
        {NAME: {"dtype": "BF16", "shape": [rows, width], "data_offsets": [0, rows * width * 2]}}
    ).encode()
    header += b" " * (-len(header) % 8)
    path = tmp_path / "model.safetensors"
    last = values(2, width, dtype=torch.bfloat16)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.seek(8 + len(header) + (rows - 2) * width * 2)
        file.write(last.view(torch.int16).numpy().tobytes())
    if path.stat().st_blocks * 512 > 1 << 30:
        pytest.skip("this file system keeps no sparse files")
    checkpoint = open_checkpoint(path)
    weight = checkpoint.weights[0]
    before = anonymous_bytes()
    got = checkpoint.read(weight, rows - 1000, rows)
    assert torch.equal(got[-2:], last) and not got[:-2].any()
    assert anonymous_bytes() - before < 4 << 20


def test_floats_are_mapped_and_writing_to_them_changes_no_file(tmp_path: Path) -> None:
    data = {f"model.layers.{i}.mlp.up_proj.weight": values(2048, 1024) for i in range(4)}  # 8 MB each
    path = tmp_path / "model.safetensors"
    save_file(data, path)
    checkpoint = open_checkpoint(path)
    before = anonymous_bytes()
    kept = [checkpoint.load(w) for w in checkpoint.weights]
    assert sum(float(x.sum()) for x in kept) != 0
    assert anonymous_bytes() - before < 4 << 20
    kept[0].zero_()
    content = path.read_bytes()
    assert open_checkpoint(path).load(checkpoint.weights[0]).shape == (2048, 1024)
    save_file(data, tmp_path / "again.safetensors")
    assert content == (tmp_path / "again.safetensors").read_bytes()


def test_many_tensors_kept_open_few_files(tmp_path: Path) -> None:
    data = {f"model.layers.{i}.mlp.up_proj.weight": values(2, 4) for i in range(300)}
    save_file(data, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    kept = [checkpoint.load(w) for w in checkpoint.weights]
    assert len(os.listdir("/proc/self/fd")) <= before + 2
    assert len(kept) == 300


def test_a_file_that_changes_after_opening(tmp_path: Path) -> None:
    """Replaced: the new data. Cut off: an error, where touching the map would kill the process."""
    path = tmp_path / "model.safetensors"
    save_file({NAME: values(64, 64)}, path)
    checkpoint = open_checkpoint(path)
    weight = checkpoint.weights[0]
    checkpoint.load(weight)
    save_file({NAME: values(64, 64) * 2}, path)
    os.utime(path, ns=(1, 1))
    assert torch.equal(checkpoint.load(weight), values(64, 64) * 2)
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(CheckpointError, match=r"model\.safetensors has become shorter.*q_proj"):
        checkpoint.load(weight)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"can't read .*model\.safetensors"):
        checkpoint.read(weight, 0, 1)


# ---- PyTorch ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_state_dict_and_where_frameworks_put_it(tmp_path: Path, dtype: torch.dtype) -> None:
    state = {NAME: values(13, 7, dtype=dtype), "model.norm.weight": values(7)}
    torch.save(state, tmp_path / "model.pt")
    torch.save({"state_dict": state, "epoch": 3, "optimizer": {"lr": 0.1}}, tmp_path / "lightning.ckpt")
    torch.save({"model": state}, tmp_path / "fairseq.bin")
    for name in ("model.pt", "lightning.ckpt", "fairseq.bin"):
        checkpoint = open_checkpoint(tmp_path / name)
        (weight,) = checkpoint.weights
        assert (checkpoint.format, weight.kind) == ("torch", "q")
        assert torch.equal(checkpoint.load(weight), state[NAME])
        assert torch.equal(checkpoint.read(weight, 2, 9), state[NAME][2:9])
        assert checkpoint.read(weight, 2, 9).dtype == dtype


def test_transposed_tensors_of_a_pickle(tmp_path: Path) -> None:
    """A pickle keeps strides: [E, N, K] may lie as [E, K, N]. Rows come out right, across experts too."""
    base = "model.layers.0.mlp.experts."
    state = {base + "gate_up_proj": values(3, 5, 8).transpose(1, 2), base + "down_proj": values(3, 5, 4)}
    torch.save(state | {NAME: values(7, 13).T}, tmp_path / "model.pt")
    checkpoint = open_checkpoint(tmp_path)
    for weight in checkpoint.weights:
        whole = (state | {NAME: values(7, 13).T})[weight.name]
        assert torch.equal(checkpoint.load(weight), whole)
        rows = whole.reshape(-1, whole.shape[-1])
        for start in range(len(rows)):
            for stop in range(start, len(rows) + 1):
                assert torch.equal(checkpoint.read(weight, start, stop), rows[start:stop])


class Surprise:
    """What a pickle of more than weights holds."""


def test_pickles_that_are_not_only_weights(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save({"w": values(2, 2), "args": Surprise()}, path)
    fails(path, "more than weights", "Surprise", "safetensors")
    torch.save({"lr": 0.1}, path)
    fails(path, "no state dict", "'state_dict'")
    torch.save(values(4, 4), path)
    fails(path, "no state dict")
    torch.save({NAME: values(4, 4).to_sparse()}, path)
    fails(path, NAME, "sparse")
    torch.save({NAME: values(4, 4)}, path, _use_new_zipfile_serialization=False)
    fails(path, "before 1.6", "torch.save(")
    torch.jit.script(torch.nn.Linear(4, 4)).save(str(path))
    fails(path, "TorchScript", "state_dict()")


@pytest.mark.parametrize("keep", [0, 1, 10, 400, -30])
def test_truncated_pytorch_files(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save({NAME: values(64, 64)}, path)
    path.write_bytes(path.read_bytes()[:keep])
    fails(path, "PyTorch file")


def test_safetensors_come_before_pickles_and_shards_are_complete(tmp_path: Path) -> None:
    torch.save({NAME: values(4, 4)}, tmp_path / "pytorch_model.bin")
    torch.save({}, tmp_path / "optimizer.pt")
    assert open_checkpoint(tmp_path).files == (tmp_path / "pytorch_model.bin",)
    save_file({NAME: values(4, 4)}, tmp_path / "model.safetensors")
    assert open_checkpoint(tmp_path).format == "safetensors"
    folder = tmp_path / "shards"
    folder.mkdir()
    torch.save({NAME: values(4, 4)}, folder / "pytorch_model-00001-of-00002.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model-00002-of-00002\.bin is missing"):
        open_checkpoint(folder)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {NAME: "gone.bin"}}))
    with pytest.raises(CheckpointError, match=r"gone\.bin is missing .*pytorch_model\.bin\.index\.json"):
        open_checkpoint(folder)
    torch.save({NAME: values(4, 4)}, folder / "gone.bin")
    assert len(open_checkpoint(folder).weights) == 1
    consolidated = tmp_path / "meta"
    consolidated.mkdir()
    for i in range(2):
        torch.save({NAME: values(4, 4)}, consolidated / f"consolidated.0{i}.pth")
    with pytest.raises(CheckpointError, match=r"several models \(consolidated\.00\.pth, consolidated\.01\.pth\)"):
        open_checkpoint(consolidated)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_are_read_instead_of_mapped(tmp_path: Path, dtype: torch.dtype) -> None:
    """For a GPU's buffer: the same bits, in a buffer with room to spare; a file that lost its end is named."""
    data = {NAME: values(13, 7, dtype=dtype), "model.layers.0.mlp.experts.down_proj": values(3, 5, 4, dtype=dtype)}
    data["model.layers.0.mlp.experts.gate_up_proj"] = values(3, 8, 5, dtype=dtype)
    save_file(data, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    buffer = torch.full((4096,), 0xA5, dtype=torch.uint8)
    for weight in checkpoint.weights:
        rows = data[weight.name].reshape(-1, weight.shape[-1])
        assert width(weight) == dtype.itemsize
        for start, stop in ((0, len(rows)), (1, 4), (2, 3), (5, 5)):
            got = read_into(checkpoint, weight, start, stop, buffer)
            assert got.dtype == dtype and got.shape == (stop - start, weight.shape[-1])
            assert torch.equal(got, rows[start:stop])
            assert not got.numel() or got.data_ptr() == buffer.data_ptr()
    file = tmp_path / "model.safetensors"

    os.truncate(file, file.stat().st_size - 4)
    with pytest.raises(CheckpointError, match=r"model\.safetensors has become shorter"):
        for weight in checkpoint.weights:
            read_into(checkpoint, weight, 0, weight.numel // weight.shape[-1], buffer)


def test_what_is_decoded_is_copied_into_the_buffer(tmp_path: Path) -> None:
    """GGUF's floats come as float32, whatever they are stored in."""
    gguf = pytest.importorskip("gguf")
    x = values(4, 32, dtype=torch.float16)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("blk.0.attn_q.weight", x.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    (weight,) = checkpoint.weights
    buffer = torch.zeros(1024, dtype=torch.uint8)
    got = read_into(checkpoint, weight, 1, 3, buffer)
    assert width(weight) == 4 and got.data_ptr() == buffer.data_ptr() and torch.equal(got, x[1:3].float())

"""The tensors of a file: names, shapes and types first, and a map onto the data for whoever asks later.

    safetensors   8 bytes: length of a JSON header; the header: name -> dtype, shape, data_offsets; then the data
    GGUF          a header that the `gguf` package reads: name -> type, shape (fastest axis first), offset
    PyTorch       a zip of one pickle and the storages: torch.load(weights_only=True, mmap=True) gives mapped tensors

`Stored.rows` touches only the pages of the rows it is asked for. What it returns is a private map of the file: no copy
is made, and writing to it never reaches the file. (Sources: github.com/huggingface/safetensors, README "Format"; the
`gguf` package; torch.serialization.)
"""

from __future__ import annotations

import functools
import json
import math
import mmap
import pickle
import re
import sys
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mxrl.checkpoints import CheckpointError
from mxrl.checkpoints.files import PICKLES

TORCH_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in TORCH_TYPES.items()}
_STATE_DICTS = ("state_dict", "model_state_dict", "model", "module")  # where training frameworks put the weights
# Linux reserves swap for a private writable map unless told not to: a file larger than the memory could not be mapped.
_NORESERVE = 0x4000 if sys.platform == "linux" else 0  # mmap.MAP_NORESERVE, which Python 3.11 does not name


@dataclass(frozen=True)
class Stored:
    """One tensor as its file has it. `shape`: slowest axis first. `dtype`: safetensors' word ("BF16"), or GGUF's type
    ("Q4_1"). `offset`: its first byte in the file, None in a PyTorch file (which is opened by name).
    """

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    offset: int | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of the tensor viewed as [-1, shape[-1]], in the stored type. Where torch has no such type
        (GGUF's blocks), the rows' bytes: uint8 [stop - start, bytes of a row].
        """
        width = self.shape[-1] if self.shape else 1
        if self.offset is None:
            tensor = _opened(_torch_state, self.file)[self.name]
            if tensor.is_contiguous() or tensor.ndim < 3:
                return tensor.reshape(-1, width)[start:stop]
            step = tensor.shape[-2]  # a transposed stack of matrices: reshaping would copy all of it
            parts = [
                tensor.flatten(0, -3)[i, max(start - i * step, 0) : stop - i * step]
                for i in range(start // step, -(-stop // step))
            ]
            return torch.cat(parts) if parts else tensor.new_empty(0, width)
        rows = self.numel // width if width else 0
        row_bytes = self.nbytes // rows if rows else 0
        data = _bytes(self, start * row_bytes, (stop - start) * row_bytes)
        dtype = TORCH_TYPES.get(self.dtype)
        if dtype is None:
            return data.view(-1, row_bytes)
        if data.data_ptr() % dtype.itemsize:  # an old safetensors file, whose header is of any length
            data = data.clone()
        return data.view(dtype).view(-1, width)

    def rows_into(self, start: int, stop: int, buffer: Tensor) -> Tensor | None:
        """`rows`, read into `buffer` (uint8 on the CPU, large enough) instead of mapped; None where that can't be.

        Every page of a map costs a fault when it is first touched, which takes longer than to copy it.
        """
        dtype, rows = TORCH_TYPES.get(self.dtype), self.numel // self.shape[-1] if self.numel else 0
        if self.offset is None or dtype is None or not rows:
            return None
        row_bytes = self.nbytes // rows
        wanted, done = (stop - start) * row_bytes, 0
        view = buffer.numpy().data[:wanted]
        try:
            with self.file.open("rb", buffering=0) as file:
                file.seek(self.offset + start * row_bytes)
                while done < wanted and (count := file.readinto(view[done:])):
                    done += count
        except OSError as err:
            raise CheckpointError(f"can't read {self.file}: {err.strerror or err}") from err
        if done < wanted:
            raise CheckpointError(f"{self.file} has become shorter: tensor '{self.name}' is no longer in it")
        return buffer[:wanted].view(dtype).view(-1, self.shape[-1])

    def whole(self) -> Tensor:
        """The tensor in its own shape, mapped."""
        rows = self.numel // self.shape[-1] if self.shape and self.shape[-1] else 1
        return (
            self.rows(0, rows).view(self.shape)
            if self.numel
            else torch.empty(self.shape, dtype=TORCH_TYPES[self.dtype])
        )


def container_of(path: Path) -> str:
    """ "safetensors", "gguf" or "torch", by the first bytes; CheckpointError for anything else."""
    try:
        with path.open("rb") as file:
            head, size = file.read(9), path.stat().st_size
    except OSError as err:
        raise CheckpointError(f"can't read {path}: {err.strerror or err}") from err
    if head[:4] == b"GGUF":
        return "gguf"
    if head[:2] == b"PK" or path.suffix in PICKLES:
        return "torch"
    length = int.from_bytes(head[:8], "little")
    if len(head) < 9 or head[8:9] != b"{" or (length > size and path.suffix != ".safetensors"):
        raise CheckpointError(f"{path} is neither a safetensors nor a GGUF nor a PyTorch file ({size} bytes)")
    return "safetensors"


def tensors_of(path: Path, container: str) -> Iterator[Stored]:
    """Every tensor of a file, without its data."""
    read = {"safetensors": _safetensors, "gguf": _gguf, "torch": _torch}[container]
    yield from read(path)


# ---- safetensors -----------------------------------------------------------------------------------------------------


def _safetensors(path: Path) -> Iterator[Stored]:
    import safetensors

    try:
        with safetensors.safe_open(str(path), framework="numpy"):  # the owner's checks: lengths, overlaps, types
            pass  # ("pt" would map the file as a torch storage, which counts against the memory)
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
    except (safetensors.SafetensorError, OSError, ValueError) as err:
        raise CheckpointError(f"{path} is truncated or no safetensors file: {err}") from err
    for name, about in header.items():
        if name != "__metadata__":
            first, last = about["data_offsets"]
            yield Stored(name, path, tuple(about["shape"]), about["dtype"], last - first, 8 + length + first)


@functools.lru_cache(maxsize=4)
def _map(path: Path, mtime_ns: int, size: int) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(
            file.fileno(), size, flags=mmap.MAP_PRIVATE | _NORESERVE, prot=mmap.PROT_READ | mmap.PROT_WRITE
        )


def _opened(opener: Any, path: Path) -> Any:
    """`opener(path, …)`, from its cache unless the file has changed since."""
    try:
        stat = path.stat()
        return opener(path, stat.st_mtime_ns, stat.st_size)
    except OSError as err:
        raise CheckpointError(f"can't read {path}: {err.strerror or err}") from err


def _bytes(stored: Stored, start: int, count: int) -> Tensor:
    """uint8 [count] on the file's own pages, `start` bytes into the tensor."""
    if count == 0:
        return torch.empty(0, dtype=torch.uint8)
    assert stored.offset is not None
    mapped = _opened(_map, stored.file)
    if stored.offset + start + count > len(mapped):  # reading beyond the end of a map would kill the process
        raise CheckpointError(f"{stored.file} has become shorter: tensor '{stored.name}' is no longer in it")
    return torch.frombuffer(mapped, dtype=torch.uint8, count=count, offset=stored.offset + start)


# ---- GGUF ------------------------------------------------------------------------------------------------------------


def _gguf(path: Path) -> Iterator[Stored]:
    import gguf

    try:
        reader = gguf.GGUFReader(path)
        tensors = list(reader.tensors)
    except Exception as err:  # a damaged header makes the reader fail in many ways: IndexError, ValueError, KeyError…
        raise CheckpointError(f"{path} is truncated or no GGUF file ({type(err).__name__}: {err})") from err
    if reader.byte_order == "S":
        raise CheckpointError(f"{path} is a GGUF file of the other byte order, which is not read")
    for tensor in tensors:
        shape = tuple(int(n) for n in reversed(tensor.shape))
        yield Stored(tensor.name, path, shape, tensor.tensor_type.name, int(tensor.n_bytes), int(tensor.data_offset))


# ---- PyTorch ---------------------------------------------------------------------------------------------------------


def _torch(path: Path) -> Iterator[Stored]:
    for name, tensor in _opened(_torch_state, path).items():
        dtype = _NAMES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
        yield Stored(name, path, tuple(tensor.shape), dtype, tensor.numel() * tensor.element_size())


@functools.lru_cache(maxsize=2)
def _torch_state(path: Path, mtime_ns: int, size: int) -> Mapping[str, Tensor]:
    """The state dict of a PyTorch file, its data mapped. Only tensors are unpickled: the file's code never runs."""
    if zipfile.is_zipfile(path) and any("/code/" in name for name in zipfile.ZipFile(path).namelist()):
        raise CheckpointError(f"{path} is a TorchScript archive: save the module's state_dict() instead")
    try:
        found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as err:
        raise CheckpointError(
            f"{path} is a pickle of more than weights{_foreign(str(err))}: where you trust it, load it yourself and "
            "save its state dict as safetensors"
        ) from err
    except RuntimeError as err:
        text = str(err)
        if "mmap can only be used" in text and _first_bytes(path, 1) == b"\x80":  # one pickle, which can't be mapped
            raise CheckpointError(
                f"{path} is in PyTorch's format before 1.6, which can't be mapped: "
                "torch.save(torch.load(file, weights_only=True), file) rewrites it"
            ) from err
        why = "empty, or no zip" if "mmap can only be used" in text else text.splitlines()[0]
        raise CheckpointError(f"{path} is truncated or no PyTorch file ({why})") from err
    except Exception as err:  # a damaged zip or pickle: EOFError, KeyError, ValueError, …
        raise CheckpointError(f"{path} is truncated or no PyTorch file ({type(err).__name__}: {err})") from err
    for key in _STATE_DICTS:
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
            break
    tensors = {str(k): v for k, v in found.items() if isinstance(v, Tensor)} if isinstance(found, Mapping) else {}
    if not tensors:
        raise CheckpointError(
            f"{path} holds no state dict (a dictionary of tensors, or one under {', '.join(map(repr, _STATE_DICTS))})"
        )
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise CheckpointError(f"{path}: tensor '{name}' is sparse or of a quantized torch type, which is not read")
    return tensors


def _foreign(message: str) -> str:
    """The class or function that torch.load refused, from its message of many lines."""
    named = re.search(r"GLOBAL ([\w.]+)|[Uu]nsupported class ([\w.]+)", message)
    return f" ({named[1] or named[2]})" if named else ""


def _first_bytes(path: Path, count: int) -> bytes:
    with path.open("rb") as file:
        return file.read(count)

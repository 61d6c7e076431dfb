"""A checkpoint as a stream of linear weights: headers first, then one tensor at a time.

    open_checkpoint("model.safetensors" | "folder/" | "owner/name[@revision]" | "model.gguf") -> Checkpoint
    checkpoint.weights   what counts: name, kind of layer, contraction axis, shape, stored type; in a fixed order
    checkpoint.left      what doesn't, each with its reason
    checkpoint.load(w)   the tensor of one weight: [N, K] or [E, N, K], in the stored float type (GGUF: float32)

Opening reads headers only, so a truncated file, a missing shard or a weight that is integer codes is known before any
work starts. A `Checkpoint` holds paths and offsets, never data or open files: it can be sent to another process.
Formats: safetensors (github.com/huggingface/safetensors), GGUF (the `gguf` package's reader and dequantizers).
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mxrl.kinds import Header, classify, layer_of, natural_key

_SHARD = re.compile(r"^(?P<stem>.+)-(?P<index>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.safetensors|\.gguf)$")
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[\w.-]+(@[\w./-]+)?$")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_DEQUANTIZE_BYTES = 1 << 24  # packed bytes dequantized at once: bounds the temporaries beside the tensor itself


class CheckpointError(RuntimeError):
    """A checkpoint that can't be read: the message names the file or tensor and says what would work."""


@dataclass(frozen=True)
class Weight:
    """A linear weight that counts. `shape` is slowest axis first; `dtype` is the stored type ("BF16", "Q4_1")."""

    name: str
    kind: str
    layer: int | None
    shape: tuple[int, ...]
    dtype: str
    dim: int
    file: Path
    quantized: bool = False  # the stored type has already lost information (GGUF's quantized types)
    offset: int = 0  # GGUF only: where the packed bytes start, and how many
    nbytes: int = 0

    @property
    def numel(self) -> int:
        return functools.reduce(lambda a, b: a * b, self.shape, 1)


@dataclass(frozen=True)
class Left:
    """A tensor that is not analysed, and why."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    reason: str


@dataclass(frozen=True)
class Checkpoint:
    """The linear weights of a checkpoint, in the order of their names (layer 2 before layer 10)."""

    source: str
    name: str
    format: str
    files: tuple[Path, ...]
    weights: tuple[Weight, ...]
    left: tuple[Left, ...]
    warnings: tuple[str, ...] = ()

    def load(self, weight: Weight) -> Tensor:
        """One weight's data on the CPU. Raises CheckpointError, naming file and tensor, when they can't be read."""
        return _load_gguf(weight) if self.format == "gguf" else _load_safetensors(weight)

    def stream(self) -> Iterator[tuple[Weight, Tensor]]:
        """Every weight with its data, one tensor in memory at a time."""
        for weight in self.weights:
            yield weight, self.load(weight)

    @property
    def numel(self) -> int:
        return sum(w.numel for w in self.weights)


def open_checkpoint(source: str | Path) -> Checkpoint:
    """Open a file, a Hugging Face folder or a hub id (`owner/name`, `owner/name@revision`); reads headers only.

    A folder is read whole: every shard its index names must be there. A file is read as it is, even one shard of many
    (then `warnings` says so). Raises CheckpointError in one line for whatever is wrong.
    """
    text = str(source)
    path = Path(source).expanduser()
    warnings: list[str] = []
    if path.is_dir():
        files, promised = _files_of_folder(path)
        name = _readable_name(path.resolve())
    elif path.exists():
        files, promised, name = [path], {}, _readable_name(path.resolve().with_suffix(""))
        if shard := _SHARD.match(path.name):
            warnings.append(
                f"{path.name} is shard {int(shard['index'])} of {int(shard['count'])}; give the folder to read them all"
            )
    elif _HUB_ID.match(text) and path.suffix not in (".safetensors", ".gguf"):
        (files, promised), name = _files_of_folder(_download(text)), text
    else:
        raise CheckpointError(f"'{text}': no such file or folder, and not a hub id (owner/name)")
    return _assemble(text, name, files, promised, warnings)


def fingerprint(path: Path, progress: Callable[[int], None] | None = None) -> dict[str, Any]:
    """{"name", "bytes", "sha256"} of a file; `progress` is called with the number of bytes read each time."""
    digest, size = hashlib.sha256(), 0
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 22):
                digest.update(block)
                size += len(block)
                if progress:
                    progress(len(block))
    except OSError as err:
        raise CheckpointError(f"can't read {path}: {err.strerror or err}") from err
    return {"name": path.name, "bytes": size, "sha256": digest.hexdigest()}


# ---- which files -----------------------------------------------------------------------------------------------------


def _readable_name(path: Path) -> str:
    """A folder's or file's name; `model`, which says nothing, brings its parent's."""
    return f"{path.parent.name}/{path.name}" if path.name in ("model", "pytorch_model") else path.name


def _files_of_folder(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """The files of the model in `folder` (the index's shards, a numbered set, or the one file there is), and which
    shard the index promises for each tensor (empty without an index).
    """
    indices = sorted(folder.glob("*.safetensors.index.json"))
    preferred = folder / "model.safetensors.index.json"
    if indices:
        if preferred not in indices and len(indices) > 1:
            raise CheckpointError(f"{folder} has several indices ({_names(indices)}) and none is {preferred.name}")
        return _shards_of_index(preferred if preferred in indices else indices[0])
    if (folder / "model.safetensors").exists():
        return [folder / "model.safetensors"], {}
    found = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.gguf"))
    if len(found) > 1:
        return _numbered_set(folder, found), {}
    if not found:
        pickles = sorted(p for p in folder.iterdir() if p.suffix in _PICKLES)
        hint = (
            f"; {pickles[0].name} is a pickle, which is not read: save the model again as safetensors"
            if pickles
            else "; give a folder with .safetensors files, a .safetensors or .gguf file, or a hub id"
        )
        raise CheckpointError(f"{folder} has no .safetensors or .gguf file{hint}")
    return (_numbered_set(folder, found) if _SHARD.match(found[0].name) else found), {}


def _shards_of_index(index: Path) -> tuple[list[Path], dict[str, str]]:
    try:
        promised = dict(json.loads(index.read_text())["weight_map"])
        files = [index.parent / name for name in sorted(set(promised.values()))]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as err:
        raise CheckpointError(f"{index} is no index of safetensors shards ({type(err).__name__}: {err})") from err
    _require(files, f"{index.name} names")
    return files, promised


def _numbered_set(folder: Path, found: Sequence[Path]) -> list[Path]:
    """Files called `stem-00001-of-00003.suffix`: all of one set, or an error that names what is missing."""
    matches = [m for m in (_SHARD.match(p.name) for p in found) if m]
    sets = {(m["stem"], m["count"], m["suffix"]) for m in matches}
    if len(matches) != len(found) or len(sets) != 1:
        raise CheckpointError(f"{folder} has several models ({_names(found)}) and no index; give one of the files")
    stem, count, suffix = sets.pop()
    files = [folder / f"{stem}-{i:05d}-of-{count}{suffix}" for i in range(1, int(count) + 1)]
    _require(files, "the set needs")
    return files


def _require(files: Sequence[Path], who: str) -> None:
    missing = [p for p in files if not p.exists()]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise CheckpointError(f"shard {missing[0].name} is missing from {missing[0].parent}{more}: {who} it")


def _names(files: Sequence[Path]) -> str:
    return ", ".join(p.name for p in files[:4]) + (", …" if len(files) > 4 else "")


def _download(hub_id: str) -> Path:
    """The hub's safetensors files of a model, through the cache of huggingface_hub; needs the network once."""
    import huggingface_hub

    repo, _, revision = hub_id.partition("@")
    try:
        folder = huggingface_hub.snapshot_download(
            repo,
            revision=revision or None,
            allow_patterns=["*.safetensors", "*.safetensors.index.json"],
            ignore_patterns=["*/*"],  # copies in other layouts (original/, metal/, onnx/)
        )
    except Exception as err:  # the client's, the HTTP library's and the system's errors have no common base
        first = str(err).strip().splitlines()[0] if str(err).strip() else type(err).__name__
        raise CheckpointError(f"'{hub_id}': no such file or folder, and the hub did not give it: {first}") from err
    path = Path(folder)
    if not any(path.glob("*.safetensors")):
        raise CheckpointError(f"'{hub_id}' has no .safetensors file at its top level; other formats are not downloaded")
    return path


# ---- headers ---------------------------------------------------------------------------------------------------------


def _assemble(
    source: str, name: str, files: Sequence[Path], promised: dict[str, str], warnings: list[str]
) -> Checkpoint:
    kinds = {_format_of(file) for file in files}
    if len(kinds) > 1:
        raise CheckpointError(f"'{source}' mixes GGUF and safetensors files; give one of them")
    fmt = kinds.pop()
    read = _headers_gguf if fmt == "gguf" else _headers_safetensors
    headers: dict[str, Header] = {}
    places: dict[str, tuple[Path, int, int]] = {}
    for file in files:
        for tensor, header, offset, nbytes in read(file):
            if tensor in headers:
                raise CheckpointError(f"tensor '{tensor}' is in {places[tensor][0].name} and again in {file.name}")
            headers[tensor] = header
            places[tensor] = (file, offset, nbytes)
    for tensor, shard in promised.items():
        if tensor not in headers:
            raise CheckpointError(f"{shard} lacks tensor '{tensor}', which the index says it holds")
    weights, left = [], []
    for tensor, role in sorted(classify(headers).items(), key=lambda item: natural_key(item[0])):
        header, (file, offset, nbytes) = headers[tensor], places[tensor]
        if role.fault:
            raise CheckpointError(f"{file.name}: {role.fault}")
        if role.kind is None:
            left.append(Left(tensor, header.shape, header.dtype, role.reason or ""))
            if role.warn:
                warnings.append(f"'{tensor}' {list(header.shape)} left out: {role.reason}")
            continue
        layer = layer_of(tensor)
        shape, dtype, quantized = header.shape, header.dtype, header.quantized
        weights.append(Weight(tensor, role.kind, layer, shape, dtype, role.dim, file, quantized, offset, nbytes))
    if not weights:
        raise CheckpointError(f"'{source}' has no linear weights among its {len(headers)} tensors{_example(left)}")
    return Checkpoint(source, name, fmt, tuple(files), tuple(weights), tuple(left), tuple(warnings))


def _example(left: Sequence[Left]) -> str:
    return f" (for example '{left[0].name}': {left[0].reason})" if left else ""


def _format_of(path: Path) -> str:
    """By the first bytes: a GGUF file says that it is one; safetensors opens with the length of its JSON header."""
    try:
        with path.open("rb") as file:
            head, size = file.read(9), path.stat().st_size
    except OSError as err:
        raise CheckpointError(f"can't read {path}: {err.strerror or err}") from err
    if head[:4] == b"GGUF":
        return "gguf"
    if path.suffix in _PICKLES:
        raise CheckpointError(f"{path} is a pickle, which is not read: save the model again as safetensors")
    length = int.from_bytes(head[:8], "little")
    if len(head) < 9 or head[8:9] != b"{" or (length > size and path.suffix != ".safetensors"):
        raise CheckpointError(f"{path} is neither a safetensors nor a GGUF file ({size} bytes)")
    return "safetensors"


@functools.lru_cache(maxsize=2)
def _open_safetensors(path: Path, mtime_ns: int, size: int) -> Any:
    """A memory-mapped file; the last two stay open, so that a scan doesn't parse a shard's header once a tensor."""
    import safetensors

    try:
        return safetensors.safe_open(str(path), framework="pt")
    except (safetensors.SafetensorError, OSError, ValueError) as err:
        raise CheckpointError(f"{path} is truncated or no safetensors file: {err}") from err


def _safetensors(path: Path) -> Any:
    try:
        stat = path.stat()
    except OSError as err:
        raise CheckpointError(f"can't read {path}: {err.strerror or err}") from err
    return _open_safetensors(path, stat.st_mtime_ns, stat.st_size)


def _headers_safetensors(path: Path) -> Iterator[tuple[str, Header, int, int]]:
    file = _safetensors(path)
    for name in file.keys():
        piece = file.get_slice(name)
        yield name, Header(tuple(piece.get_shape()), str(piece.get_dtype())), 0, 0


def _load_safetensors(weight: Weight) -> Tensor:
    try:
        return _safetensors(weight.file).get_tensor(weight.name)
    except CheckpointError:
        raise
    except Exception as err:  # SafetensorError, or torch's own: a foreign type in the file
        raise CheckpointError(f"{weight.file}: tensor '{weight.name}' can't be read: {err}") from err


def _headers_gguf(path: Path) -> Iterator[tuple[str, Header, int, int]]:
    import gguf

    try:
        reader = gguf.GGUFReader(path)
        tensors = list(reader.tensors)
    except Exception as err:  # a damaged header makes the reader fail in many ways: IndexError, ValueError, KeyError…
        raise CheckpointError(f"{path} is truncated or no GGUF file ({type(err).__name__}: {err})") from err
    if reader.byte_order == "S":
        raise CheckpointError(f"{path} is a GGUF file of the other byte order, which is not read")
    for tensor in tensors:
        dtype = tensor.tensor_type.name
        floating = dtype in ("F64", "F32", "F16", "BF16")
        integer = dtype in ("I8", "I16", "I32", "I64")
        shape = tuple(int(n) for n in reversed(tensor.shape))
        yield (
            tensor.name,
            Header(shape, dtype, quantized=not floating and not integer),
            int(tensor.data_offset),
            int(tensor.n_bytes),
        )


def _load_gguf(weight: Weight) -> Tensor:
    """Dequantizes to float32, a few rows at a time into one tensor."""
    import gguf
    import numpy as np

    kind = gguf.GGMLQuantizationType[weight.dtype]
    out = torch.empty(weight.shape, dtype=torch.float32)
    rows = out.view(-1, weight.shape[-1])
    try:
        packed = np.memmap(weight.file, mode="r", offset=weight.offset, shape=(weight.nbytes,), dtype=np.uint8)
        packed = packed.reshape(rows.shape[0], -1)
        step = max(1, _DEQUANTIZE_BYTES // packed.shape[1])
        for start in range(0, rows.shape[0], step):
            part = np.array(packed[start : start + step])  # a copy: torch wants memory it may write
            if weight.dtype == "F64":
                values = part.view(np.float64).astype(np.float32)
            else:
                values = gguf.dequantize(part, kind)
            rows[start : start + step] = torch.from_numpy(values)
    except (OSError, ValueError, NotImplementedError) as err:
        raise CheckpointError(f"{weight.file}: tensor '{weight.name}' ({weight.dtype}) can't be read: {err}") from err
    return out

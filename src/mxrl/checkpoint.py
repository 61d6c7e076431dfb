"""A checkpoint as a list of linear weights: headers first, then any rows of any weight.

    open_checkpoint(source) -> Checkpoint  "folder/", "model.safetensors", "model.gguf", "model.bin", "owner/name[@rev]"
    checkpoint.weights        what counts: name, kind of layer, contraction axis, shape, stored type; in a fixed order
    checkpoint.left           what doesn't, each with its reason
    checkpoint.load(w)        one weight whole: [N, K] or [E, N, K] (or transposed: `w.dim` is the contraction axis)
    checkpoint.read(w, a, b)  rows [a, b) of it, all leading axes taken as one: only that part of the file is touched

Floats come in their stored type and are not copied; whatever is stored in another form is decoded to float32
(`mxrl.checkpoints.encodings` has the formats). Such a weight has lost information already: `w.quantized`, and what it
is stored as in `w.stored_as`, `w.bits` and `w.group`. Opening reads headers only, so a truncated file, a missing shard
or codes without scales are known before any work starts. A `Checkpoint` holds paths and offsets, never data or open
files: it can be sent to another process.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mxrl.checkpoints import CheckpointError
from mxrl.checkpoints.encodings import Encoding, Plain
from mxrl.checkpoints.files import Found, find, quantization_of
from mxrl.checkpoints.recognise import Recognised, recognise
from mxrl.checkpoints.tensors import Stored, container_of, tensors_of
from mxrl.kinds import Header, Role, classify, layer_of, natural_key

__all__ = ["Checkpoint", "CheckpointError", "Left", "Weight", "fingerprint", "open_checkpoint"]

_DECODE_ELEMENTS = 1 << 22  # decoded at once when a whole weight is loaded: bounds the temporaries beside the tensor


@dataclass(frozen=True)
class Weight:
    """A linear weight that counts.

    name        as in an unquantized checkpoint: GPTQ's `x.qweight` and its scales are the weight `x.weight`
    shape       slowest axis first: [N, K], [E, N, K], or with the last two exchanged
    dim         the contraction axis, along which blocks lie: -1 or -2; `why_dim` says how that was decided
    dtype       the stored type, short ("BF16", "Q4_1", "MXFP4"); `stored_as` the same in words, with groups and scales
    quantized   the stored type has lost information already
    bits        stored bits per element: codes, scales, zero points and whatever else the weight needs to be decoded
    group       elements along the contraction axis that share a scale (K where one serves them all); None for floats
    """

    name: str
    kind: str
    layer: int | None
    shape: tuple[int, ...]
    dtype: str
    dim: int
    file: Path
    quantized: bool
    why_dim: str
    stored_as: str
    bits: float
    group: int | None
    encoding: Encoding = field(repr=False)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes that the weight takes in its files, scales included."""
        return self.encoding.nbytes

    @property
    def files(self) -> tuple[Path, ...]:
        """Every file that holds a part of it (scales may lie in another shard than the codes)."""
        return tuple(dict.fromkeys(part.file for part in self.encoding.parts))


@dataclass(frozen=True)
class Left:
    """A stored tensor that is not analysed by itself, and why."""

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
        """One weight on the CPU, in `weight.shape`. A float is the file's own pages, mapped privately (writing to it
        changes no file); anything else is decoded to float32. Raises CheckpointError, naming file and tensor.
        """
        width = weight.shape[-1]
        count = weight.numel // width if width else 0
        if isinstance(weight.encoding, Plain):
            return self.read(weight, 0, count).view(weight.shape)
        out = torch.empty(count, width)
        step = max(1, _DECODE_ELEMENTS // max(width, 1))
        for start in range(0, count, step):
            stop = min(start + step, count)
            out[start:stop] = self.read(weight, start, stop)
        return out.view(weight.shape)

    def read(self, weight: Weight, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of the weight viewed as [-1, weight.shape[-1]]: load(weight)'s values, bit for bit, from
        that part of the file alone. IndexError for rows there aren't, CheckpointError as `load`.
        """
        count = weight.numel // weight.shape[-1] if weight.shape[-1] else 0
        if not 0 <= start <= stop <= count:
            raise IndexError(f"rows [{start}, {stop}) of '{weight.name}', which has {count}")
        if start == stop:
            dtype = self.read(weight, 0, 1).dtype if count else torch.float32
            return torch.empty(0, weight.shape[-1], dtype=dtype)
        try:
            return weight.encoding.rows(start, stop)
        except CheckpointError:
            raise
        except Exception as err:  # torch's, numpy's or the gguf package's own, on damaged data
            raise CheckpointError(
                f"{weight.file}: tensor '{weight.name}' ({weight.stored_as}) can't be read: {err}"
            ) from err

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
    found = find(source)
    containers = {container_of(file) for file in found.files}
    if len(containers) > 1:
        raise CheckpointError(f"'{source}' mixes files of several formats ({', '.join(sorted(containers))}); give one")
    container = containers.pop()
    stored = _stored(found, container)
    recognised = recognise(stored, quantization_of(found.folder), container)
    weights, left, warnings = _classified(stored, recognised, container)
    if not weights:
        example = f" (for example '{left[0].name}': {left[0].reason})" if left else ""
        raise CheckpointError(f"'{source}' has no linear weights among its {len(stored)} tensors{example}")
    warnings = (*found.warnings, *recognised.warnings, *warnings)
    return Checkpoint(str(source), found.name, container, found.files, tuple(weights), tuple(left), warnings)


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


def _stored(found: Found, container: str) -> dict[str, Stored]:
    """Every tensor of every file by name; what an index promises must be there, and nothing twice."""
    stored: dict[str, Stored] = {}
    for file in found.files:
        for tensor in tensors_of(file, container):
            if tensor.name in stored:
                raise CheckpointError(
                    f"tensor '{tensor.name}' is in {stored[tensor.name].file.name} and again in {file.name}"
                )
            stored[tensor.name] = tensor
    for name, shard in found.promised.items():
        if name not in stored:
            raise CheckpointError(f"{shard} lacks tensor '{name}', which the index says it holds")
    return stored


def _classified(
    stored: Mapping[str, Stored], recognised: Recognised, container: str
) -> tuple[list[Weight], list[Left], Sequence[str]]:
    headers = {
        name: Header(e.shape, e.dtype, quantized=e.quantized, why_dim=e.why_dim)
        for name, e in recognised.weights.items()
    }
    taken = {part.name for e in recognised.weights.values() for part in e.parts} | set(recognised.parts)
    headers |= {name: Header(t.shape, t.dtype) for name, t in stored.items() if name not in taken}
    weights, left, warnings = [], [], []
    for name, role in sorted(classify(headers).items(), key=lambda item: natural_key(item[0])):
        header, encoding = headers[name], recognised.weights.get(name)
        if role.fault:
            raise CheckpointError(f"{stored[name].file.name}: {role.fault}")
        if role.warn:
            warnings.append(f"'{name}' {list(header.shape)} {role.warn}")
        if role.kind is None or encoding is None:
            left.append(Left(name, header.shape, header.dtype, role.reason or ""))
        else:
            weights.append(_weight(name, role, encoding, container))
    left += [Left(name, stored[name].shape, stored[name].dtype, what) for name, what in recognised.parts.items()]
    return weights, sorted(left, key=lambda item: natural_key(item.name)), warnings


def _weight(name: str, role: Role, encoding: Encoding, container: str) -> Weight:
    assert role.kind is not None
    return Weight(
        name,
        role.kind,
        layer_of(name),
        encoding.shape,
        encoding.dtype,
        role.dim,
        encoding.codes.file,
        encoding.quantized,
        f"GGUF {role.why_dim.removeprefix('nn.Linear ')}" if container == "gguf" else role.why_dim,
        encoding.stored_as,
        8 * encoding.nbytes / max(math.prod(encoding.shape), 1),
        encoding.group(role.dim),
        encoding,
    )

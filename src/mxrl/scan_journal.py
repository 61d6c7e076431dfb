"""What a scan has already measured, kept beside its results: the journal `.scan.jsonl` of an output folder.

    line 1    the key: every file of the checkpoint and how its weights are read, the arithmetic (device, backend,
              mxrl's source), the ranges' size
    line 2…   one finished task each: {"place": [tensor, start, stop], "stats": {recipe: [...]}, "amax": {recipe: ...}}
              or one file's hash: {"file": path, "sha256": …}

A line is written and flushed when its task ends, so `kill -9` at any moment loses what was under way and no more; a
torn last line is dropped. Floats are printed so that they read back exactly, and a scan adds ranges in a fixed order,
so going on from a journal gives the same totals bit for bit.

The journal stays when the analysis is complete: with one more recipe, only that recipe is computed. What is in it
counts only under the same key, else one line says why not, and the work starts over. A file is the same while its path,
size, inode, modification and change times (nanoseconds; the latter can't be set back), header and 64 sampled pieces of
its content are. So that a changed file is never taken for the old one, copying, renaming or re-permitting a file counts
as a change too; and a file that changes under a scan makes the scan fail.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import operator
import os
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, BinaryIO

import mxrl
from mxrl.checkpoint import Checkpoint, CheckpointError
from mxrl.decompose import ErrorStats
from mxrl.moments import Moments
from mxrl.ops import dispatch
from mxrl.provenance import versions
from mxrl.scan_tasks import ELEMENTS, Place, Result, Task

NAME = ".scan.jsonl"
_SCHEMA = 1
_HEAD = 1 << 20  # bytes hashed at a file's beginning (safetensors: and the rest of the header)
_HEADER = 1 << 26  # of a header, at most
_SAMPLES, _SAMPLE = 64, 1 << 12  # pieces of the content, and bytes of each
_FIELDS = tuple(f.name for f in fields(ErrorStats))
_values = operator.attrgetter(*_FIELDS)


class JournalError(RuntimeError):
    """A journal that can't be written, or that another run is writing: the message names it."""


def identity(path: Path) -> dict[str, Any]:
    """What tells a file apart from every other, and from itself changed, without reading all of it."""
    try:
        stat = path.stat()
        content = sample(path)
    except OSError as err:
        raise CheckpointError(f"can't read {path}: {err.strerror or err}") from err
    return {
        "path": str(path.resolve()),
        "bytes": stat.st_size,
        "inode": stat.st_ino,
        "mtime_ns": stat.st_mtime_ns,
        "ctime_ns": stat.st_ctime_ns,
        "content": content,
    }


def sample(path: Path) -> str:
    """sha256 of a file's header, of _SAMPLES pieces spread evenly over it, and of its end."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(_HEAD)
        length = 8 + int.from_bytes(head[:8], "little")  # of a safetensors header; any number for another format
        if head[8:9] == b"{" and _HEAD < length <= min(size, _HEADER):
            head += file.read(length - _HEAD)
        digest.update(head)
        for i in range(_SAMPLES + 1):
            file.seek(max(0, size - _SAMPLE) * i // _SAMPLES)
            digest.update(file.read(_SAMPLE))
    return digest.hexdigest()


@functools.lru_cache(maxsize=1)
def source_hash() -> str:
    """sha256 of this package's arithmetic and readers: a version number doesn't change with every edit."""
    package = Path(mxrl.__file__).parent
    digest = hashlib.sha256()
    for file in sorted([*package.glob("*.py"), *package.glob("ops/*.py"), *package.glob("checkpoints/*.py")]):
        if file.name not in ("__main__.py", "cli.py", "cli_exit.py", "demo.py"):
            digest.update(f"{file.name}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def key_of(checkpoint: Checkpoint, device: str) -> dict[str, Any]:
    """What has to be the same for a result to be the same bit for bit. device: "cpu" or "cuda"."""
    found = versions("torch", "numba", "triton")
    return {
        "schema": _SCHEMA,
        "program": {"mxrl": found["mxrl"], "source": source_hash(), "range": ELEMENTS},
        "arithmetic": {
            "device": device,
            "backend": os.environ.get(dispatch.VARIABLE, "") or "auto",
            **{name: found[name] for name in ("torch", "numba", "triton") if name in found},
        },
        "weights": hashlib.sha256("\n".join(f"{w!r} {w.encoding!r}" for w in checkpoint.weights).encode()).hexdigest(),
        "files": [identity(file) for file in checkpoint.files],
    }


_WHY = {
    "schema": "it was written by another version of mxrl",
    "program": "it was written by another version of mxrl",
    "arithmetic": "it was computed by another device, backend or version of torch, numba or triton",
}


class Journal:
    """The journal of one output folder, held by one process at a time.

    found: results by place. hashes: sha256 by path. note: why an older journal doesn't count, "" if it does.
    fresh: leave an older journal's contents aside. Raises JournalError and CheckpointError.
    """

    def __init__(self, folder: Path, checkpoint: Checkpoint, device: str, *, fresh: bool = False):
        self.path, self.note = folder / NAME, ""
        self.found: dict[Place, Result] = {}
        self.hashes: dict[str, str] = {}
        self._made = _make(folder)
        self._checkpoint = checkpoint
        self._key = key_of(checkpoint, device)
        try:
            self._file: BinaryIO = open(self.path, "a+b", buffering=0)
        except OSError as err:
            self._remove_folder()
            raise JournalError(f"can't write to {folder}: {err.strerror or err}") from err
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as err:
            self._file.close()
            raise JournalError(f"another run is writing to {folder}; wait for it or give another --out") from err
        good = 0 if fresh else self._load()
        self._file.truncate(good)
        self._lines = len(self.found) + len(self.hashes)
        if not good:
            self._append(self._key)

    def _load(self) -> int:
        """Read what counts; returns the length of the part of the file that stays."""
        good = 0
        with self.path.open("rb") as file:  # buffered: `_file` isn't, and would be read byte by byte
            for number, line in enumerate(file):
                try:
                    if not line.endswith(b"\n"):
                        break  # torn: the process was killed while it wrote
                    entry = json.loads(line)
                    if number == 0:
                        self.note = self._difference(entry)
                        if self.note:
                            return 0
                    else:
                        self._take(entry)
                except (ValueError, KeyError, TypeError, IndexError):
                    break  # whatever follows is computed again
                good += len(line)
        return good

    def _difference(self, key: dict[str, Any]) -> str:
        """Why results under `key` don't count here, "" if they do."""
        for name, why in _WHY.items():
            if key[name] != self._key[name]:
                return why
        old = {file["path"]: file for file in key["files"]}
        changed = [f["path"] for f in self._key["files"] if old.get(f["path"]) != f]
        if changed:
            return f"{Path(changed[0]).name} has changed since, or is another file"
        if len(old) != len(self._key["files"]):
            return "the checkpoint has other files"
        return "" if key["weights"] == self._key["weights"] else "its weights are read another way (config.json?)"

    def _take(self, entry: dict[str, Any]) -> None:
        if "file" in entry:
            self.hashes[entry["file"]] = entry["sha256"]
            return
        name, start, stop = entry["place"]
        stats = {recipe: _stats(values) for recipe, values in entry["stats"].items()}
        known = self.found.setdefault((name, start, stop), Result())
        known.stats.update(stats)
        known.amax.update(entry["amax"])
        if entry.get("moments"):
            self.found[name, start, stop] = Result(known.stats, known.amax, Moments.of(entry["moments"]))

    def add(self, task: Task, result: Result) -> None:
        """Note a finished task."""
        place = [self._checkpoint.weights[task.weight].name, task.start, task.stop]
        stats = {recipe: _values(s) for recipe, s in result.stats.items()}
        moments = {} if result.moments is None else {"moments": result.moments.values()}
        self._append({"place": place, "stats": stats, "amax": result.amax, **moments})

    def add_hash(self, path: Path, sha256: str) -> None:
        """Note a file's hash."""
        self._append({"file": str(path.resolve()), "sha256": sha256})

    def _append(self, entry: dict[str, Any]) -> None:
        data = json.dumps(entry, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
        try:
            while data:  # one write, but for a full disk
                data = data[self._file.write(data) :]
        except OSError as err:
            raise JournalError(f"can't write to {self.path}: {err.strerror or err}") from err
        self._lines += entry is not self._key

    def check_unchanged(self) -> None:
        """CheckpointError if a file is no longer the one that the scan began with."""
        for file, old in zip(self._checkpoint.files, self._key["files"], strict=True):
            if identity(file) != old:
                self._file.truncate(0)  # nothing in it may be taken for this file's
                self._lines = 0
                raise CheckpointError(f"{file} changed while it was analysed; run it again once it is complete")

    def close(self) -> bool:
        """Let go of it; an empty one disappears. Returns whether it holds results."""
        if not self._lines:
            self.path.unlink(missing_ok=True)
        self._file.close()
        if not self._lines:
            self._remove_folder()
        return bool(self._lines)

    def _remove_folder(self) -> None:
        for folder in self._made:
            try:
                folder.rmdir()
            except OSError:
                return  # someone put something into it


def _make(folder: Path) -> list[Path]:
    """Make a folder; returns those that didn't exist, the deepest first."""
    missing = []
    place = folder
    try:
        if folder.exists() and not folder.is_dir():
            raise NotADirectoryError(f"{folder} is a file")
        while not place.exists():
            missing.append(place)
            place = place.parent
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as err:
        raise JournalError(f"can't write to {folder}: {err.strerror or err}") from err
    return missing


def _stats(values: Sequence[Any]) -> ErrorStats:
    """ValueError for another version's fields."""
    known: dict[str, Any] = dict(zip(_FIELDS, values, strict=True))
    known["delta_hist"] = tuple(known["delta_hist"])
    return ErrorStats(**known)

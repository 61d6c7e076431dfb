"""Which files a source means: a folder's shards, a numbered set, one file, a hub id's cached folder.

    folder with *.safetensors.index.json   the shards that the index names, and which tensor it promises in which
    folder with model.safetensors          that file
    folder with one numbered set           all of model-00001-of-00003.safetensors … (or .gguf)
    folder with pytorch_model.bin[.index.json], or one pickle     the same, where there is neither of the above

Safetensors come first: many folders hold the same weights again as pickles. What a trainer leaves beside a model
(optimizer.pt, training_args.bin, …) is never taken for one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mxrl.checkpoints import CheckpointError

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_SHARD = re.compile(
    r"^(?P<stem>.+)-(?P<index>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.safetensors|\.gguf|\.bin|\.pt|\.pth)$"
)
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[\w.-]+(@[\w./-]+)?$")
_TRAINER = re.compile(r"^(optimizer|scheduler|scaler|training_args|rng_state|random_states|tokenizer)")


@dataclass(frozen=True)
class Found:
    """The files of a model. `promised`: tensor -> the shard that an index says it is in (empty without an index)."""

    name: str
    folder: Path
    files: tuple[Path, ...]
    promised: dict[str, str]
    warnings: tuple[str, ...] = ()


def find(source: str | Path) -> Found:
    """What `source` means. Raises CheckpointError, in one line, where it means nothing or more than one model."""
    text, path = str(source), Path(source).expanduser()
    if path.is_dir():
        files, promised = _files_of_folder(path)
        return Found(_readable_name(path.resolve()), path, tuple(files), promised)
    if path.exists():
        shard = _SHARD.match(path.name)
        warnings = (
            (f"{path.name} is shard {int(shard['index'])} of {int(shard['count'])}; give the folder to read them all",)
            if shard
            else ()
        )
        return Found(_readable_name(path.resolve().with_suffix("")), path.parent, (path,), {}, warnings)
    if _HUB_ID.match(text) and path.suffix not in (".safetensors", ".gguf", *PICKLES):
        folder = _download(text)
        files, promised = _files_of_folder(folder)
        return Found(text, folder, tuple(files), promised)
    raise CheckpointError(f"'{text}': no such file or folder, and not a hub id (owner/name)")


def quantization_of(folder: Path) -> dict[str, Any]:
    """config.json's `quantization_config` in `folder`, or AutoGPTQ's quantize_config.json; {} without either."""
    for name, keys in (("config.json", ("quantization_config", "compression_config")), ("quantize_config.json", ())):
        path = folder / name
        if not path.exists():
            continue
        try:
            found = json.loads(path.read_text())
            for key in keys:
                if found.get(key):
                    return dict(found[key])
            if not keys:
                return {"quant_method": "gptq"} | dict(found)
        except (OSError, ValueError, TypeError, AttributeError) as err:
            raise CheckpointError(f"{path} can't be read ({type(err).__name__}: {err})") from err
    return {}


def _readable_name(path: Path) -> str:
    """A folder's or file's name; `model`, which says nothing, brings its parent's."""
    return f"{path.parent.name}/{path.name}" if path.name in ("model", "pytorch_model") else path.name


def _files_of_folder(folder: Path) -> tuple[list[Path], dict[str, str]]:
    for preferred, pattern in (
        ("model.safetensors", "*.safetensors"),
        ("model.gguf", "*.gguf"),
        ("pytorch_model.bin", "*"),
    ):
        if index := _index(folder, preferred, pattern):
            return _shards_of_index(index)
        if (folder / preferred).exists():
            return [folder / preferred], {}
        found = sorted(folder.glob(pattern))
        if pattern == "*":
            found = [p for p in found if p.suffix in PICKLES and p.is_file() and not _TRAINER.match(p.name)]
        if len(found) > 1 or (found and _SHARD.match(found[0].name)):
            return _numbered_set(folder, found), {}
        if found:
            return found, {}
    raise CheckpointError(
        f"{folder} has no .safetensors, .gguf or PyTorch .bin file; give a folder or file that has weights, or a hub id"
    )


def _index(folder: Path, preferred: str, pattern: str) -> Path | None:
    """The index of a sharded model: `preferred`'s own, or the only one there is."""
    indices = sorted(folder.glob(f"{pattern if pattern != '*' else '*.bin'}.index.json"))
    own = folder / f"{preferred}.index.json"
    if own not in indices and len(indices) > 1:
        raise CheckpointError(f"{folder} has several indices ({_names(indices)}) and none is {own.name}")
    return own if own in indices else indices[0] if indices else None


def _shards_of_index(index: Path) -> tuple[list[Path], dict[str, str]]:
    try:
        promised = dict(json.loads(index.read_text())["weight_map"])
        files = [index.parent / name for name in sorted(set(promised.values()))]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as err:
        raise CheckpointError(f"{index} is no index of shards ({type(err).__name__}: {err})") from err
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
            allow_patterns=["*.safetensors", "*.safetensors.index.json", "config.json", "quantize_config.json"],
            ignore_patterns=["*/*"],  # copies in other layouts (original/, metal/, onnx/)
        )
    except Exception as err:  # the client's, the HTTP library's and the system's errors have no common base
        first = str(err).strip().splitlines()[0] if str(err).strip() else type(err).__name__
        raise CheckpointError(f"'{hub_id}': no such file or folder, and the hub did not give it: {first}") from err
    path = Path(folder)
    if not any(path.glob("*.safetensors")):
        raise CheckpointError(f"'{hub_id}' has no .safetensors file at its top level; other formats are not downloaded")
    return path

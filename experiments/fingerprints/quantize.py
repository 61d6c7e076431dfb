"""What `mxrl analyze QUANTIZED --against ORIGINAL` is tried on: one model, quantized by other people's libraries.

    python experiments/fingerprints/quantize.py OUT --model policy:dense --by llmc-rtn llmc-gptq gptqmodel
    python experiments/fingerprints/quantize.py OUT --gguf FILE.gguf --by …      # a GGUF's weights, taken as float32

OUT gets the original (OUT/original, float32) and a folder for each quantizer:

    llmc-rtn      llm-compressor, QuantizationModifier, MXFP4A16: round to nearest, no data
    llmc-gptq     llm-compressor, GPTQModifier, MXFP4A16: the same format, weights moved to make up for earlier errors
    gptqmodel     GPTQModel, int4 in groups of 32, symmetric, calibrated

Not needed by mxrl; install apart from it (against.md has the line). Calibration texts: for the policies, chains with
their solutions (seed 0, the training split); for any other model, 32 pieces of the help topics that come with Python,
which need no data set.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mxrl.report.files import write_atomically
from mxrl.rl.chain import chain_problems, solution
from mxrl.rl.policy import resolve_model

SAMPLES, PIECES, LENGTH, GROUP = 256, 32, 256, 32
CALIBRATED = 0.75  # of the help topics; the rest is for measuring


def original(out: Path, model: str, gguf: Path | None) -> Path:
    """The model as a float32 folder that every library reads."""
    folder = out / "original"
    if not folder.exists():
        where: dict[str, Any] = {"gguf_file": gguf.name} if gguf else {}
        source = str(gguf.parent) if gguf else resolve_model(model)
        AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **where).save_pretrained(folder)
        AutoTokenizer.from_pretrained(source, **where).save_pretrained(folder)
    return folder


def texts(out: Path, folder: Path, model: str) -> list[str]:
    """Calibration texts, kept in OUT/calibration.json: every quantizer sees the same."""
    file = out / "calibration.json"
    if not file.exists():
        write_atomically(file, json.dumps(_texts(folder, model), indent=0, ensure_ascii=False))
    return json.loads(file.read_text(encoding="utf-8"))


def _texts(folder: Path, model: str) -> list[str]:
    """Of a policy, solved problems of its training split; of others, pieces of Python's own help topics."""
    if model.startswith("policy:"):
        return [f"{p.prompt}{solution(p)}" for p in chain_problems(seed=0, n=SAMPLES, split="train")]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer("\n".join(topics[name] for name in sorted(topics)))["input_ids"]
    pieces = [tokens[i : i + LENGTH] for i in range(0, int(len(tokens) * CALIBRATED) - LENGTH, LENGTH)]
    return [tokenizer.decode(piece) for piece in pieces[:: len(pieces) // PIECES][:PIECES]]


def llm_compressor(modifier: str) -> Callable[[Path, Path, list[str]], None]:
    def quantize(source: Path, out: Path, calibration: list[str]) -> None:
        from datasets import Dataset
        from llmcompressor import oneshot  # pyright: ignore[reportMissingImports]  (never in mxrl's environment)
        from llmcompressor.modifiers import quantization  # pyright: ignore[reportMissingImports]

        lm, tokenizer = _load(source)
        recipe = getattr(quantization, modifier)(targets="Linear", scheme="MXFP4A16", ignore=["lm_head"])
        data: dict[str, Any] = {}
        if modifier == "GPTQModifier":
            rows = [tokenizer(text, truncation=True, max_length=LENGTH) for text in calibration]
            data = {
                "dataset": Dataset.from_list([dict(row) for row in rows]),
                "num_calibration_samples": len(rows), "max_seq_length": LENGTH, "tokenizer": tokenizer,
            }  # fmt: skip
        oneshot(model=lm, recipe=recipe, **data)
        lm.save_pretrained(out, save_compressed=True)

    return quantize


def gptqmodel(source: Path, out: Path, calibration: list[str]) -> None:
    from gptqmodel import GPTQModel, QuantizeConfig  # pyright: ignore[reportMissingImports]

    config = QuantizeConfig(bits=4, group_size=GROUP, desc_act=False, sym=True, device="cpu")
    model = GPTQModel.load(str(source), config)
    model.quantize(calibration, batch_size=4)
    model.save(str(out))


def _load(folder: Path) -> tuple[Any, Any]:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder)


QUANTIZERS: dict[str, Callable[[Path, Path, list[str]], None]] = {
    "llmc-rtn": llm_compressor("QuantizationModifier"),
    "llmc-gptq": llm_compressor("GPTQModifier"),
    "gptqmodel": gptqmodel,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="policy:dense", help="policy:dense, or a folder")
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--by", nargs="+", choices=list(QUANTIZERS), default=["llmc-rtn", "llmc-gptq"])
    args = parser.parse_args()
    source = original(args.out, args.model, args.gguf)
    calibration = texts(args.out, source, "" if args.gguf else args.model)
    for name in args.by:
        started = time.monotonic()
        QUANTIZERS[name](source, args.out / name, calibration)
        print(f"{name}: {args.out / name}, {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()

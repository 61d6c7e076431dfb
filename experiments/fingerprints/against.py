"""Where others' quantizers leave their error: `mxrl analyze QUANTIZED --against ORIGINAL` on quantize.py's folders.

    python experiments/fingerprints/against.py OUT --name policy:dense

For every quantized folder in OUT beside OUT/original: the command itself is run, its summary.json read, and the model
with the dequantized weights is compared with the original on texts that no quantizer has seen: mean KL divergence of
the next token's distribution, in nats, and how often another token becomes the most likely one. mxrl's own recipes, on
the weights alone, are measured so too. Writes against/NAME.jsonl, and from against/ alone the tables of against.md.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from quantize import CALIBRATED
from tables import commit_of
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from mxrl.checkpoint import Checkpoint, open_checkpoint
from mxrl.decompose import ErrorStats, error_stats
from mxrl.provenance import provenance
from mxrl.quantize import fake_quantize
from mxrl.recipes import Recipe
from mxrl.report.files import write_atomically
from mxrl.report.markdown import between, table
from mxrl.rl.chain import chain_problems, solution

HERE = Path(__file__).parent
RECIPES = ("mxfp4", "mxfp4:even", "mxfp4+mbs", "mxfp4+mbs:joint", "nvfp4", "mxfp4+mbs+of")
TEXTS, PIECES, LENGTH = 256, 8, 128
Line = dict[str, Any]


def quantized_folders(out: Path) -> Iterator[tuple[str, Path]]:
    """(name, folder) of each quantizer's output; AutoRound puts its own folder into the one it is given."""
    for folder in sorted(p for p in out.iterdir() if p.is_dir() and p.name != "original"):
        inner = [folder, *sorted(p for p in folder.iterdir() if p.is_dir())]
        found = next((p for p in inner if (p / "config.json").is_file()), None)
        if found:
            yield folder.name, found


def summary_of(folder: Path, original: Path) -> Line:
    """What `mxrl analyze FOLDER --against ORIGINAL` writes."""
    with tempfile.TemporaryDirectory(prefix="against-") as scratch:
        options = [option for recipe in RECIPES for option in ("-r", recipe)]
        command = [sys.executable, "-m", "mxrl", "analyze", str(folder), "--against", str(original), *options]
        done = subprocess.run([*command, "--out", f"{scratch}/out"], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip().splitlines()[-1:]}")
        return json.loads(Path(scratch, "out", "summary.json").read_text())


@torch.no_grad()
def put(model: Any, weights: Mapping[str, Tensor]) -> None:
    for name, weight in weights.items():
        model.get_parameter(name).copy_(weight)


def loaded(checkpoint: Checkpoint) -> dict[str, Tensor]:
    return {w.name: checkpoint.load(w).float() for w in checkpoint.weights}


def texts(tokenizer: Any, policy: bool) -> list[Tensor]:
    """Token ids that no quantizer was calibrated on."""
    if policy:
        problems = chain_problems(seed=1, n=TEXTS, split="test")
        return [tokenizer(f"{p.prompt}{solution(p)}", return_tensors="pt")["input_ids"] for p in problems]
    tokens = tokenizer("\n".join(topics[name] for name in sorted(topics)), return_tensors="pt")["input_ids"]
    first = int(tokens.shape[1] * CALIBRATED)
    step = (tokens.shape[1] - first) // PIECES
    return [tokens[:, i : i + LENGTH] for i in range(first, first + step * PIECES, step)]


@torch.no_grad()
def log_probabilities(model: Any, ids: list[Tensor]) -> list[Tensor]:
    return [torch.log_softmax(model(input_ids=x).logits[0].float(), -1) for x in ids]


def divergence(original: list[Tensor], other: list[Tensor]) -> float:
    """Mean over tokens of KL(original ‖ other), nats."""
    total = sum(float((p.exp() * (p - q)).sum()) for p, q in zip(original, other, strict=True))
    return total / sum(p.shape[0] for p in original)


def flipped(original: list[Tensor], other: list[Tensor]) -> float:
    """Share of tokens after which another next token is the most likely one."""
    changed = sum(int((p.argmax(-1) != q.argmax(-1)).sum()) for p, q in zip(original, other, strict=True))
    return changed / sum(p.shape[0] for p in original)


def measure(out: Path, name: str, only: list[str]) -> Iterator[Line]:
    """A line about the model, then one for each quantizer and each of RECIPES, or for `only` some of them."""
    folder = out / "original"
    original = open_checkpoint(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    ids = texts(tokenizer, name.startswith("policy:"))
    exact, reference = loaded(original), log_probabilities(model, ids)

    def outputs(weights: Mapping[str, Tensor]) -> Line:
        put(model, weights)
        found = log_probabilities(model, ids)
        put(model, exact)
        return {"kl": divergence(reference, found), "flipped": flipped(reference, found)}

    origin = provenance("cpu", "torch", "transformers", "compressed-tensors")
    yield {"model": name, "linear_elements": original.numel, "texts": len(ids), **origin}
    for quantizer, where in quantized_folders(out):
        if only and quantizer not in only:
            continue
        summary = summary_of(where, folder)
        kinds = {kind: entry["recipes"]["stored"] for kind, entry in summary["kinds"].items()}
        yield {
            "quantizer": quantizer, "formats": summary["formats"], "reading": summary["reading"],
            "warnings": summary["warnings"], "total": summary["total"]["stored"], "kinds": kinds,
            **outputs(loaded(open_checkpoint(where))),
        }  # fmt: skip
    for recipe in RECIPES:
        if only and recipe not in only:
            continue
        stats = ErrorStats.merged(error_stats(w, recipe) for w in exact.values())
        total = stats.to_dict() | {"bits": Recipe.parse(recipe).bits}
        weights = {n: fake_quantize(w, recipe) for n, w in exact.items()}
        yield {"quantizer": f"mxrl {recipe}", "total": total, **outputs(weights)}


def record(file: Path, lines: Iterator[Line]) -> None:
    """Each line as it comes, in place of an earlier one of the same quantizer; quantizers first, then recipes."""
    known: dict[str, Line] = {}
    if file.exists():
        known = {line.get("quantizer", ""): line for line in map(json.loads, file.read_text().splitlines())}
    for line in lines:
        known[line.get("quantizer", "")] = line
        order = sorted(known, key=lambda name: (name != "", name.startswith("mxrl "), name.startswith("mxrl") or name))
        file.parent.mkdir(exist_ok=True)
        write_atomically(file, "".join(json.dumps(known[name]) + "\n" for name in order))
        print(line.get("quantizer", line.get("model")), line.get("kl", ""), flush=True)


def split(lines: list[Line]) -> str:
    """A line a quantizer: the terms over plain MXFP4's T, so that one sees the error move and grow."""
    plain = next(ErrorStats.from_dict(x["total"]) for x in lines if x.get("quantizer") == "mxrl mxfp4").sq_error
    rows = []
    for line in lines[1:]:
        s = ErrorStats.from_dict(line["total"])
        same = line.get("formats", {})
        grid = "–" if not same else "yes" if all(f["same_grid"] for f in same.values()) else "no"
        bits = line["total"]["bits"]
        over = [s.sq_error, s.floor, s.excess, s.sq_error_deadzone, s.sq_error_elsewhere]
        cells = [f"{value / plain:.3f}" for value in over]
        revived = s.deadzone_nonzero_count / s.deadzone_count
        more = [f"{s.gain:.4f}", f"{revived:.1%}", f"{line['kl']:.5f}", f"{line['flipped']:.1%}"]
        rows.append([line["quantizer"], grid, f"{bits:.2f}", f"{s.rel_mse:.5f}", *cells, *more])
    head = ["weights by", "MXFP4's grid", "bits", "rel. MSE", "T", "floor", "excess", "error on D", "error off D",
            "⟨C,x⟩/‖x‖²", "D non-zero", "KL, nats", "tokens flipped"]  # fmt: skip
    return table(head, [[c.replace("-0.", "−0.") if c[:1] == "-" else c for c in row] for row in rows], 2)


def by_kind(lines: list[Line]) -> str:
    quantizers = [line for line in lines[1:] if "kinds" in line]
    kinds = list(quantizers[0]["kinds"])
    rows = []
    for line in quantizers:
        stats = [ErrorStats.from_dict(line["kinds"][kind]) for kind in kinds]
        rows.append([line["quantizer"], "rel. MSE", *(f"{s.rel_mse:.5f}" for s in stats)])
        rows.append(["", "excess / T", *(f"{s.excess / s.sq_error:.1%}".replace("-", "−") for s in stats)])
    return table(["weights by", "", *kinds], rows, 2)


def same_as(lines: list[Line]) -> str:
    rows = []
    for line in lines[1:]:
        for stored, entry in line.get("formats", {}).items():
            same = ", ".join(f"{n} = `{recipe}`" for recipe, n in entry["same_as"].items()) or "none"
            rows.append([line["quantizer"], stored, f"{entry['bits']:.2f}", str(entry["tensors"]), same])
    return table(["weights by", "stored as", "bits", "tensors", "bit for bit equal to a recipe"], rows, 2)


def about(origin: Line) -> str:
    versions = ", ".join(f"{n} {v}" for n, v in origin["versions"].items())
    return (
        f"{origin['model']}: {origin['linear_elements'] / 1e6:.1f} M linear elements, {origin['texts']} texts for KL. "
        f"CPU, {versions}, commit {commit_of(origin)}, {origin['created'][:10]}."
    )


def write_page() -> None:
    page = HERE / "against.md"
    text = page.read_text(encoding="utf-8")
    for file in sorted((HERE / "against").glob("*.jsonl")):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        if not any(line.get("quantizer") == "mxrl mxfp4" for line in lines):
            print(f"{file.name} lacks plain MXFP4, which the table is relative to: --only mxfp4", file=sys.stderr)
            continue
        parts = (about(lines[0]), split(lines), by_kind(lines), same_as(lines))
        text = between(text, file.stem, "\n\n".join(part.rstrip("\n") for part in parts))
    write_atomically(page, text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", help="what quantize.py made; without it only the page is made")
    parser.add_argument("--name", default="policy:dense", help="the model's name; policy:… are measured on chains")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="quantizers and recipes (default all)")
    args = parser.parse_args()
    if args.out:
        file = HERE / "against" / f"{re.sub('[^a-z0-9]+', '-', args.name.lower())}.jsonl"
        record(file, measure(args.out, args.name, args.only))
    write_page()
    return 0


if __name__ == "__main__":
    sys.exit(main())

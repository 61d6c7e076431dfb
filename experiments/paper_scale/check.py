"""The estimate against what can be measured: activations of shrunk copies, and the peaks and seconds of real runs.

    python experiments/paper_scale/check.py                   on a CPU; half a minute
    python experiments/paper_scale/check.py runs/a …          the same, with the peaks of runs of mxrl train beside it

    activations   bytes that autograd keeps a token and block in the forward pass of a shrunk copy (mxrl.nn.saved_bytes,
                  bf16 autocast, rows padded and not), from the difference between two lengths, so that what does not
                  grow with the tokens falls out
    peaks         benchmarks/results/ranks_cuda.jsonl: GRPO steps of .5 B dense and .9 B MoE on one and two H200s
    seconds       the same steps, each by the speeds of both models: how far one architecture's are another's

Rows go to results/check.jsonl (--out), which tables.py reads.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from estimate import (
    CARDS,
    HERE,
    MEASURED,
    Shape,
    Speed,
    bench_config,
    bench_shape,
    measured_rows,
    saved_per_token,
    seconds,
)
from estimate import memory as estimated
from shrunk import build, shrink
from transformers import AutoConfig

import mxrl
from mxrl.nn import saved_bytes, shared_weights
from mxrl.provenance import provenance
from mxrl.report.files import write_atomically

MODELS = ("qwen2.5-3b", "qwen3-30b-a3b")
RECIPES = ("bf16", "mxfp4+mbs+of", "mxfp4+pack_saved=True")
BATCH = 2  # rows


def kept(model: Any, length: int, padded: bool) -> int:
    """Bytes that the decoder keeps for one backward pass of BATCH rows, Q(w) included."""
    ids = torch.randint(model.config.vocab_size, (BATCH, length), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :5] = 0
    with shared_weights(model), torch.autocast("cpu", dtype=torch.bfloat16), saved_bytes(model) as saved:
        model.model(input_ids=ids, attention_mask=mask, use_cache=False)
    return saved.rest


def activations(name: str, lengths: tuple[int, int] = (128, 256), layers: int = 4) -> Iterator[dict[str, Any]]:
    """Measured and computed bytes a token and block. The last norm's part, 8H a token, is taken off the measured."""
    config = shrink(AutoConfig.from_pretrained(HERE / "models" / name), layers=layers)
    shape = Shape.of(config)
    for recipe in RECIPES:
        model = build(config).train()
        mxrl.convert(model, recipe)
        for padded in (False, True):
            short, long = (kept(model, length, padded) for length in lengths)
            tokens = BATCH * (lengths[1] - lengths[0])
            if padded:  # the mask grows with the square: take off the part that the formula gives a row's length
                rows = [2 * n * n * BATCH * layers for n in lengths]
                short, long = short - rows[0], long - rows[1]
            measured = ((long - short) / tokens - 8 * shape.hidden) / layers
            # a padded row's 2 · row is taken off on both sides: 1e-9 says "padded" and adds nothing
            computed = saved_per_token(shape, recipe, 1e-9 if padded else 0)  # type: ignore[arg-type]
            yield {"check": "activations", "model": name, "recipe": recipe, "padded": padded,
                   "measured": measured, "estimated": computed, "layers": layers}  # fmt: skip


def benchmarks() -> Iterator[dict[str, Any]]:
    """Peaks and seconds of the recorded GRPO steps on H200s."""
    speeds = {model: Speed.measured(model=model) for model in ("dense", "moe")}
    for model in speeds:
        shape = bench_shape(model)
        last = {(r["recipe"], r["processes"]): r for r in measured_rows(MEASURED, model) if r["op"] == "step"}
        for row in last.values():
            config, gpus = bench_config(row), row["processes"]
            of = {"model": f"bench_ranks.py {model}", "recipe": row["recipe"], "gpus": gpus}
            slots = row["sequences"] // gpus
            lengths = {"prompt": row["prompt"], "slots": slots, "card": CARDS[141]}
            found = estimated(shape, config, gpus, new=row["new"], **lengths)
            yield {"check": "peak", **of, "measured": row["peak_bytes"], "estimated": found.peak}
            if row["recipe"] == "bf16":
                continue
            for source, speed in speeds.items():
                took = seconds(shape, config, gpus, speed, tokens=row["new"], **lengths)
                for phase in ("rollout", "score", "update"):
                    yield {"check": "seconds", **of, "phase": phase, "speed": source,
                           "measured": row["seconds"][phase], "estimated": took[phase]}  # fmt: skip


def of_run(folder: Path) -> dict[str, Any]:
    """The peak of a run on CUDA that peak.py made."""
    import yaml

    from mxrl.rl.config import TrainConfig
    from mxrl.rl.policy import resolve_model

    for name in ("config.yaml", "peak.json"):
        if not (folder / name).is_file():
            sys.exit(f"check.py: {folder}: no {name} there; peak.py makes such a run")
    options = yaml.safe_load((folder / "config.yaml").read_text())
    run = options.pop("run")
    config = TrainConfig(**options | {"micro_batch": run["micro_batch"]})
    shape = Shape.of(resolve_model(config.model), config.recipe)
    gpus = run["processes"]
    peak = json.loads((folder / "peak.json").read_text())
    lengths = {"prompt": peak["prompt"], "new": config.max_new_tokens or 300, "card": peak["total_memory"]}
    slots = min(config.rollout_batch or config.sequences, config.sequences // gpus)
    found = estimated(shape, config, gpus, slots=slots, **lengths)
    return {"check": "run", "model": config.model, "recipe": config.recipe, "gpus": gpus,
            "measured": peak["max_memory_allocated"], "estimated": found.peak}  # fmt: skip


def shown(row: dict[str, Any]) -> str:
    what = " ".join(str(row[k]) for k in ("check", "model", "recipe", "padded", "gpus", "phase", "speed") if k in row)
    measured, computed = row["measured"], row["estimated"]
    return f"{what}: measured {measured:,.2f}, estimated {computed:,.2f}, × {computed / measured:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path, help="folders of peak.py")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "check.jsonl")
    args = parser.parse_args()
    source = provenance("cpu", "torch", "transformers", "trl")
    rows = []
    for found in (*map(activations, MODELS), benchmarks(), map(of_run, args.runs)):
        for row in found:
            rows.append(row | source)
            print(shown(row), flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(args.out, "".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()

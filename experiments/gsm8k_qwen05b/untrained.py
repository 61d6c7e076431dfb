"""Every recipe without training: greedy accuracy of a language model on GSM8K's test problems, one row a recipe.

    python experiments/gsm8k_qwen05b/untrained.py FOLDER --data gsm8k/test.jsonl --out out/evals --devices cuda:0,cuda:1
    python experiments/gsm8k_qwen05b/untrained.py FOLDER --data gsm8k/test.jsonl --out out/evals --recipes mxfp4,bf16@64

Each device has a process of its own (or --jobs of them), which takes recipe after recipe: load the folder in bf16,
convert, decode all problems at once, judge the number after `####`. A recipe's row is a file of --out, written when it
is done, so the same command goes on where it was killed; evals.jsonl holds all that are there.

What a row is of
    RECIPE      weights and activations quantized as the recipe says, no noise
    …+aqn…      the rollout policy as the first step of training would draw from it: AQN's noise is on at σ_start, once
                drawn (seed 0). Without noise the recipe is that of the row without `+aqn`
    RECIPE@N    decoded N at a time. The policy is the same, but GEMMs of other shapes round otherwise, and a greedy
                text forks where two tokens are nearly level: bf16@256 against bf16 is how far two rows are apart that
                have no reason to be

`right` has a digit a problem, in the file's order; `texts` four hexadecimal digits of a hash of each completion, so
that rows can be compared text by text. `seconds` is decoding, with prefill and the capture of the CUDA graph, after a
small warm-up that compiles kernels.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import re
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from statistics import fmean
from typing import Any

ROWS = (
    "bf16", "bf16@256", "mxfp4", "mxfp4+mbs", "mxfp4+of", "mxfp4+aqn", "mxfp4+mbs+of", "mxfp4+mbs+aqn",
    "mxfp4+mbs+of+aqn", "mxfp4+mbs+of:1+aqn", "nvfp4", "mxfp4+of:1", "mxfp4+mbs+of:1", "mxfp4:ideal", "mxfp4+w4a8",
    "mxfp4+w4a16", "nvfp4+w4a16",
)  # fmt: skip
SETTINGS = ("model", "data", "problems", "new_tokens", "batch", "seed")
_device = "cpu"  # of this worker


def split_row(text: str) -> tuple[str, int | None]:
    """("mxfp4+of", 256) of "mxfp4+of@256": recipe in its canonical spelling, problems decoded together (None: all)."""
    from mxrl.recipes import Recipe

    recipe, at, batch = text.partition("@")
    if at and not re.fullmatch(r"[1-9]\d*", batch):
        raise ValueError(f"row '{text}': after @ stands how many problems are decoded together, not '{batch}'")
    return str(Recipe.parse(recipe)), int(batch) if at else None


def row_file(out: Path, row: str) -> Path:
    return out / f"{re.sub(r'[^A-Za-z0-9.+@=-]', '_', row)}.json"


def wanted(args: argparse.Namespace, batch: int | None) -> dict[str, Any]:
    """What a row must have been made with to count as done."""
    return {
        "model": Path(args.model).resolve().name,
        "data": Path(args.data).name,
        "problems": args.problems,
        "new_tokens": args.new_tokens,
        "batch": batch or args.batch,
        "seed": 0,
    }


def done(args: argparse.Namespace, row: str) -> bool:
    """Whether --out has the row. Raises ValueError for one that other settings made."""
    file = row_file(args.out, row)
    if not file.is_file():
        return False
    found, settings = json.loads(file.read_text()), wanted(args, split_row(row)[1])
    for name in SETTINGS:
        if found[name] != settings[name]:
            raise ValueError(f"{file} was made with {name}={found[name]}, not {settings[name]}: give another --out")
    return True


# --- a worker --------------------------------------------------------------------------------------------------------


def begin(devices: Any, threads: int) -> None:
    """Take a device, for this worker's whole life."""
    global _device
    import torch

    _device = devices.get()
    torch.set_num_threads(threads)
    if _device.startswith("cuda"):
        torch.cuda.set_device(_device)


def measure(row: str, args: argparse.Namespace) -> dict[str, Any]:
    """Evaluate one row and write its file."""
    import torch
    from transformers.utils.logging import disable_progress_bar

    from mxrl import convert
    from mxrl.nn import rollout_weights
    from mxrl.nn.weights import aqn_noise
    from mxrl.provenance import provenance
    from mxrl.report.files import write_atomically
    from mxrl.rl.evaluate import evaluate
    from mxrl.rl.policy import load_model
    from mxrl.rl.rewards import gsm8k_reward
    from mxrl.rl.tasks import load_task

    disable_progress_bar()
    recipe, batch = split_row(row)
    settings = wanted(args, batch)
    problems = load_task("gsm8k", seed=None, n=args.problems, split="test", path=str(args.data))
    model, tokenizer = load_model(args.model, dtype=torch.bfloat16)
    model = model.to(_device)
    report = convert(model, recipe)
    noise = aqn_noise(recipe, 0, 0, 100)
    common: dict[str, Any] = {"reward": gsm8k_reward, "batch_size": settings["batch"] or len(problems)}
    with rollout_weights(model, noise) as held:
        evaluate(model, tokenizer, problems[:32], max_new_tokens=min(8, args.new_tokens), **common)
        began = time.perf_counter()
        found = evaluate(model, tokenizer, problems, max_new_tokens=args.new_tokens, **common)
        seconds = time.perf_counter() - began
    texts = [completion for (completion,) in found.completions]
    tokens = round(found.mean_tokens * len(texts))
    cuda = _device.startswith("cuda")
    result = {
        "row": row,
        "recipe": recipe,
        **settings,
        "n": len(problems),
        "accuracy": found.accuracy,
        "mean_tokens": found.mean_tokens,
        "truncated": found.truncated,
        "entropy_per_token": found.entropy,
        "marked": fmean("####" in text for text in texts),
        "sigma": held.sigma,
        "effective_sigma": held.effective_sigma,
        "quantized_parameters": report.quantized_parameters,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "processes_a_device": args.jobs,
        **provenance(torch.cuda.get_device_name() if cuda else "cpu", "torch", "transformers"),
        "examples": texts[:2],
        "right": "".join("1" if score >= 1 else "0" for score in found.scores),
        "texts": "".join(hashlib.blake2b(text.encode(), digest_size=2).hexdigest() for text in texts),
    }
    write_atomically(row_file(args.out, row), json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    return result


# --- the command -----------------------------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> int:
    """Evaluate what --out has not yet; returns the exit code: 1 where a row failed."""
    todo = [row for row in args.recipes if not done(args, row)]
    if len(todo) < len(args.recipes):
        print(f"{len(args.recipes) - len(todo)} of {len(args.recipes)} rows are there already", flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("spawn")
    devices, workers = context.Queue(), args.jobs * len(args.devices)
    for _ in range(args.jobs):
        for device in args.devices:
            devices.put(device)
    failed, began = 0, time.monotonic()
    pool = ProcessPoolExecutor(workers, context, begin, (devices, args.threads))
    try:
        futures = {pool.submit(measure, row, args): row for row in todo}
        for count, future in enumerate(as_completed(futures), 1):
            name, seconds = futures[future], time.monotonic() - began
            try:
                row = future.result()
                print(
                    f"{count}/{len(todo)} {seconds:.0f} s  {name}: {100 * row['accuracy']:.1f} % of {row['n']}, "
                    f"{row['mean_tokens']:.0f} tokens, {100 * row['truncated']:.1f} % cut, "
                    f"{row['tokens_per_second']:.0f} tokens/s",
                    flush=True,
                )
            except Exception as error:  # one row's failure is not the others'
                failed += 1
                reason = "its process died" if isinstance(error, BrokenProcessPool) else str(error).splitlines()[0]
                print(f"{count}/{len(todo)} {seconds:.0f} s  {name}: failed: {reason}", file=sys.stderr, flush=True)
            merge(args.out)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    there = merge(args.out)
    print(f"{there} rows in {args.out / 'evals.jsonl'}", flush=True)
    return 1 if failed else 0


def merge(out: Path) -> int:
    """evals.jsonl from the rows' files, those of ROWS first and in their order; how many there are."""
    from mxrl.report.files import write_atomically

    order = {row_file(out, row): i for i, row in enumerate(rows_of(",".join(ROWS)))}
    files = sorted(out.glob("*.json"), key=lambda file: (order.get(file, len(order)), file.name))
    rows = [json.loads(file.read_text()) for file in files]
    write_atomically(out / "evals.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return len(rows)


def rows_of(text: str) -> list[str]:
    """Rows in their canonical spelling, each once."""
    found = [split_row(part.strip()) for part in text.split(",")]
    return list(dict.fromkeys(f"{recipe}@{batch}" if batch else recipe for recipe, batch in found))


def arguments(argv: Iterable[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Greedy GSM8K accuracy of a model under every recipe, untrained.")
    parser.add_argument("model", help="a Hugging Face folder (experiments/qwen05b/weights.py makes one)")
    parser.add_argument("--data", type=Path, required=True, help="GSM8K's test.jsonl")
    parser.add_argument("--out", type=Path, required=True, help="folder of the rows")
    parser.add_argument("--recipes", default=",".join(ROWS), help="comma-separated rows, RECIPE or RECIPE@N")
    parser.add_argument("--devices", default=None, help="cuda:0,cuda:1 or cpu (default: every GPU, else cpu)")
    parser.add_argument("--jobs", type=int, default=1, help="processes a device (default 1, so that speeds are real)")
    parser.add_argument("--problems", type=int, default=None, help="the first N of the file (default: all)")
    parser.add_argument("--new-tokens", type=int, default=300, help="of a completion, at most (default 300)")
    parser.add_argument("--batch", type=int, default=None, help="problems decoded together (default: all)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of a process (default 1)")
    args = parser.parse_args(None if argv is None else list(argv))
    try:
        args.recipes = rows_of(args.recipes)
        for name in ("jobs", "problems", "new_tokens", "batch", "threads"):
            value = getattr(args, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} {value} must be at least 1")
        if not args.data.is_file():
            raise ValueError(f"--data {args.data}: no such file; GSM8K's test.jsonl has 1319 lines")
        if args.devices is None:
            import torch

            args.devices = [f"cuda:{i}" for i in range(torch.cuda.device_count())] or ["cpu"]
        else:
            args.devices = args.devices.split(",")
        for row in args.recipes:
            done(args, row)
    except ValueError as error:
        parser.error(str(error))
    return args


if __name__ == "__main__":
    sys.exit(run(arguments()))

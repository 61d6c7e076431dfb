"""The analyses that look at more than one checkpoint's weights, from the call to the three files.

    analyze_against(quantized, original, …)     the error of what someone quantized               mxrl.against
    analyze_diff(a, b, …)                       before and after RL                               mxrl.changes
    analyze_activations(model, task, …)         what the linear layers are given                  mxrl.calibration

Each opens, measures, and writes `out`/{summary.json, tensors.jsonl, report.html} when all of it is known; what is
interrupted writes nothing and starts over the next time. `summary["analysis"]` says which of them it is. The first and
the last have the shape of a weights summary (report/summary.py); a column `stored` is the quantized checkpoint's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mxrl.against import against
from mxrl.changes import changes, passes_over
from mxrl.checkpoint import Checkpoint, fingerprint, open_checkpoint
from mxrl.pairs import match, stored_bytes
from mxrl.provenance import provenance
from mxrl.report import folder
from mxrl.report.analyze import NOTHING_KEPT, PACKAGES, Interrupted, Progress, Silent, device_name
from mxrl.report.answers import BITS, check_budget
from mxrl.report.compare_summary import (
    activations_rows,
    activations_summary,
    against_rows,
    against_summary,
    diff_rows,
    diff_summary,
)
from mxrl.report.files import staged
from mxrl.rl.policy import load_model, resolve_model
from mxrl.scan import PLAIN, parse_recipes
from mxrl.scan_workers import MEMORY, devices_of


def analyze_against(
    quantized: str | Path,
    original: str | Path,
    recipes: Sequence[str] = (),
    *,
    out: Path,
    on_nonfinite: str = "error",
    progress: Progress | None = None,
    jobs: int | None = None,
    memory: int = MEMORY,
    device: str = "auto",
    bits: float = BITS,
) -> dict[str, Any]:
    """Measure `quantized` against `original` and write the three files; returns the summary.

    Raises as `mxrl.against.against`, CheckpointError, OptionError, BudgetError, OSError, Interrupted.
    """
    progress = progress or Silent()
    recipes = parse_recipes(recipes)
    devices_of(device)
    check_budget(bits)
    theirs, ours = _open(quantized), _open(original)
    pairs = match(ours, theirs).pairs
    scanned = sum(p.weight.nbytes for p in pairs)
    begun = []

    def compare(nbytes: float) -> None:
        if not begun:
            begun.append(True)
            progress.start("comparing", scanned + sum(stored_bytes(theirs, p) for p in pairs))
        progress.advance(nbytes)

    try:
        with staged(out) as temporary:
            progress.start("scanning the original", scanned)
            result = against(
                theirs, ours, recipes, on_nonfinite=on_nonfinite, jobs=jobs, memory=memory, device=device,
                scanned=progress.advance, compared=compare,
            )  # fmt: skip
            hashed = _hashes(progress, theirs, ours)
            where = provenance(device_name(result.ours.device), *PACKAGES)
            return folder.write(temporary, against_summary(result, hashed, where), against_rows(result), bits)
    except KeyboardInterrupt:
        raise Interrupted(NOTHING_KEPT) from None


def analyze_diff(
    a: str | Path,
    b: str | Path,
    recipes: Sequence[str] = (),
    *,
    out: Path,
    on_nonfinite: str = "error",
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Compare checkpoint `b` with `a` and write the three files; returns the summary.

    Raises as `mxrl.changes.changes`, CheckpointError, OSError, Interrupted.
    """
    progress = progress or Silent()
    columns = (PLAIN, *parse_recipes(recipes))
    first, second = _open(a), _open(b)
    pairs = match(first, second).pairs
    once = sum(p.weight.nbytes + stored_bytes(second, p) for p in pairs)
    try:
        with staged(out) as temporary:
            progress.start("comparing", once * passes_over(columns))
            result = changes(first, second, recipes, on_nonfinite=on_nonfinite, progress=progress.advance)
            hashed = _hashes(progress, first, second)
            where = provenance("cpu", *PACKAGES)
            return folder.write(temporary, diff_summary(result, hashed, where), diff_rows(result))
    except KeyboardInterrupt:
        raise Interrupted(NOTHING_KEPT) from None


def analyze_activations(
    model: str,
    task: str,
    recipes: Sequence[str] = (),
    *,
    out: Path,
    prompts: int = 64,
    seed: int = 0,
    split: str = "train",
    batch_size: int = 16,
    device: str = "auto",
    progress: Progress | None = None,
    bits: float = BITS,
) -> dict[str, Any]:
    """Run `prompts` prompts of `task` through `model` and write the three files; returns the summary.

    model: a Hugging Face folder, hub id, `policy:dense` or `policy:moe`. task: one of mxrl.rl.tasks, as `chain`, or
    `gsm8k:FILE` with the path of a data set. progress counts prompts. Raises as `mxrl.calibration.calibrate`,
    TaskError, PolicyError, OptionError, BudgetError, ValueError for a model that can't be loaded, OSError, Interrupted.
    """
    from mxrl.rl.tasks import load_task, parse_task

    progress = progress or Silent()
    recipes = parse_recipes(recipes)
    (where_to,) = devices_of(device)[:1]
    check_budget(bits)
    name, options = parse_task(task)
    problems = load_task(name, seed=seed, n=prompts, split=split, **options)
    from mxrl.calibration import calibrate  # transformers, which takes a second to import

    loaded, tokenizer = load_model(model)
    try:
        with staged(out) as temporary:
            progress.start("running prompts", len(problems))
            result = calibrate(
                loaded.to(where_to), tokenizer, problems, recipes, batch_size=batch_size, progress=progress.advance
            )
            about = {
                "name": name, "path": options.get("path"), "split": split, "seed": seed, "prompts": result.prompts,
                "tokens": result.tokens, "padding": result.padding, "longest": result.longest, "batch": batch_size,
            }  # fmt: skip
            where = provenance(device_name(where_to), "torch", "transformers", "numpy")
            whole = activations_summary(result, model, about, where)
            return folder.write(temporary, whole, activations_rows(result), bits)
    except KeyboardInterrupt:
        raise Interrupted(NOTHING_KEPT) from None


def _open(source: str | Path) -> Checkpoint:
    return open_checkpoint(resolve_model(str(source)))


def _hashes(progress: Progress, *checkpoints: Checkpoint) -> list[list[dict[str, Any]]]:
    progress.start("hashing", float(sum(f.stat().st_size for c in checkpoints for f in c.files)))
    return [[fingerprint(file, progress.advance) for file in c.files] for c in checkpoints]

"""`mxrl demo`: what 4-bit numbers cost the shipped policy and what the corrections give back, in minutes on a CPU.

    demo(out, Settings())      weights → accuracy → a few GRPO steps → out/{demo.json, demo.html}

Three questions, a phase for each policy or recipe:

    weights    how large is the error of each recipe on the policy's own weights?     scan.py, as `mxrl analyze` does
    accuracy   what does greedy decoding lose, problem by problem?                    rl/evaluate.py
    grpo       does training run, and how far is its rollout from its training pass?  rl/train.py, as `mxrl train` does

Each phase's result is kept in out/phases/ as soon as it is there, under a key of all that it depends on (settings, the
weights' and the package's hash, versions): the same command goes on after a kill, and another one starts anew.
demo.json holds every number of the page, so `report.demo.build_page` makes the page from it alone.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from mxrl.checkpoint import open_checkpoint
from mxrl.provenance import provenance
from mxrl.report.demo import build_page
from mxrl.report.files import write_atomically
from mxrl.report.phases import Display, Phase, Silent, prepare, quiet, run_phase, source_hash, weight_files
from mxrl.report.summary import summary, to_json
from mxrl.rl.policy import POLICY_PREFIX, resolve_model
from mxrl.scan import parse_recipes, scan

SCHEMA = 1
KEPT = ("step", "reward", "accuracy", "reward_std", "entropy", "gap/mean_abs", "gap/max_abs", "gap/k3", "gap/ess",
        "gap/truncated", "completions/mean_length", "group/distinct_answers", "style/careful", "style/skip",
        "style/guess", "grad_norm", "aqn/sigma", "time/step", "time/rollout")  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """What the demo does. The defaults take about three minutes on two cores."""

    seed: int = 0  # of the problems, the prompts, the samples and the noise
    model: str = "policy:dense"  # evaluated and trained
    analyzed: tuple[str, ...] = ("policy:dense", "policy:moe")  # policies whose weights are looked at
    errors: tuple[str, ...] = (
        "mxfp4", "mxfp4+mbs", "mxfp4+of", "mxfp4+mbs+of", "mxfp4:floor", "mxfp4:even", "nvfp4",
    )  # fmt: skip
    evaluated: tuple[str, ...] = ("bf16", "mxfp4", "mxfp4+mbs", "mxfp4+of", "mxfp4+mbs+of")  # the first two: baselines
    trained: tuple[str, ...] = ("bf16", "mxfp4", "mxfp4+mbs+of+aqn")
    problems: int = 256
    steps: int = 4
    prompts: int = 8
    samples: int = 8
    lr: float = 5e-5  # chosen for bf16 on a GPU, with 8 times the prompts


def demo(out: Path, settings: Settings | None = None, *, display: Display | None = None) -> dict[str, Any]:
    """Run every phase that `out` does not hold yet, then write `out`/demo.json and demo.html; returns demo.json.

    Raises OSError naming `out` where it can't be written to, PolicyError or CheckpointError for a policy that can't be
    read, NonFiniteError where a training step diverges. KeyboardInterrupt passes through; finished phases stay.
    """
    settings, display = settings or Settings(), display or Silent()
    kept_in = prepare(out)
    origin = provenance("cpu", "torch", "transformers", "trl", "accelerate", "datasets", "numpy", "safetensors")
    phases = _phases(settings, out, origin)
    display.plan([phase.cost for phase in phases])
    results: dict[str, dict[str, Any]] = {}
    with quiet():
        for phase in phases:
            display.begin(phase.title)
            results[phase.name], kept = run_phase(phase, kept_in / f"{phase.name}.json", display.within)
            display.end(results[phase.name]["seconds"], kept)
    data = assemble(settings, results, origin)
    write_atomically(out / "demo.json", to_json(data, indent=1) + "\n")
    build_page(data).write(out / "demo.html")
    return data


# --- the phases ------------------------------------------------------------------------------------------------------


def _phases(settings: Settings, out: Path, origin: Mapping[str, Any]) -> list[Phase]:
    common = {"source": source_hash(), "versions": origin["versions"]}
    hashes = {model: weight_files(model) for model in dict.fromkeys((*settings.analyzed, settings.model))}
    phases = []
    for model in settings.analyzed:
        key = {**common, "files": hashes[model], "recipes": settings.errors}
        phases.append(Phase(
            f"weights-{_label(model)}", f"weights of {model}", 4, key,
            lambda within, model=model: weights(model, settings.errors, within),
        ))  # fmt: skip
    common |= {"files": hashes[settings.model], "seed": settings.seed, "threads": torch.get_num_threads()}
    for recipe in settings.evaluated:
        key = {**common, "recipe": recipe, "problems": settings.problems}
        phases.append(Phase(
            f"accuracy-{_label(recipe)}", f"accuracy under {recipe}", 6 + 2 * _passes(recipe), key,
            lambda within, recipe=recipe: accuracy(settings, recipe),
        ))  # fmt: skip
    run = {"steps": settings.steps, "prompts": settings.prompts, "samples": settings.samples, "lr": settings.lr}
    for recipe in settings.trained:
        phases.append(Phase(
            f"grpo-{_label(recipe)}", f"{settings.steps} GRPO steps under {recipe}",
            settings.steps * (5 + 2.5 * _passes(recipe)),
            {**common, "recipe": recipe, **run},
            lambda within, recipe=recipe: grpo(settings, recipe, out / "runs" / _label(recipe), within),
        ))  # fmt: skip
    return phases


def _passes(recipe: str) -> int:
    """Roughly how much quantizing a recipe does, for the estimate of time."""
    return (not recipe.startswith("bf16")) + ("+mbs" in recipe) + ("+of" in recipe)


def _label(name: str) -> str:
    """A model or a recipe as a file's name."""
    return re.sub(r"[^\w.+-]+", "-", name.removeprefix(POLICY_PREFIX)).strip("-")


def weights(model: str, recipes: Sequence[str], within: Callable[[float], None] = lambda _: None) -> dict[str, Any]:
    """Each recipe's error, summed over the model's linear weights: `total[recipe]` as in an analysis's summary.json."""
    checkpoint = open_checkpoint(resolve_model(model))
    done = 0

    def progress(weight: Any) -> None:
        nonlocal done
        done += weight.numel
        within(done / checkpoint.numel)

    found = summary(scan(checkpoint, parse_recipes(recipes), baselines=(), progress=progress), weight_files(model), {})
    return (
        {"model": model}
        | {name: found[name] for name in ("tensors", "elements", "total")}
        | {"files": found["source"]["files"]}
    )


def accuracy(settings: Settings, recipe: str) -> dict[str, Any]:
    """Greedy accuracy in float32 under one recipe: `Evaluation.to_dict()`, the score of each problem included."""
    import mxrl
    from mxrl.rl.evaluate import evaluate
    from mxrl.rl.policy import load_folder
    from mxrl.rl.tasks import get_task, load_task

    problems = load_task("chain", seed=settings.seed, n=settings.problems, split="test")
    model, tokenizer = load_folder(resolve_model(settings.model), dtype=torch.float32)
    mxrl.convert(model, recipe)
    reward = get_task("chain").reward
    return evaluate(model, tokenizer, problems, reward=reward, max_new_tokens=longest(problems)).to_dict()


def longest(problems: Sequence[Any]) -> int:
    """Tokens of the longest careful solution, end token included; no right answer in any style takes more."""
    from mxrl.rl.chain import solution

    return max(len(solution(problem)) for problem in problems) + 1


def grpo(
    settings: Settings, recipe: str, out: Path, within: Callable[[float], None] = lambda _: None
) -> dict[str, Any]:
    """A few GRPO steps under one recipe: a row of metrics for each step. The run's own files are in `out`."""
    from mxrl.rl.config import TrainConfig
    from mxrl.rl.tasks import load_task
    from mxrl.rl.train import read_rows, train

    prompts = load_task("chain", seed=settings.seed, n=settings.steps * settings.prompts, split="train")
    config = TrainConfig(
        recipe=recipe, model=settings.model, out=str(out), seed=settings.seed, steps=settings.steps,
        prompts_per_step=settings.prompts, samples_per_prompt=settings.samples, max_new_tokens=longest(prompts),
        lr=settings.lr, eval_problems=0, eval_every=0, monitor_every=0, save_every=0, save_model=False,
        device="cpu", precision="fp32",
    )  # fmt: skip
    said = _Said(lambda step: within(step / settings.steps))
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        result = train(config, resume="never")
    if result["status"] != "done":
        raise KeyboardInterrupt
    rows = [{name: row.get(name) for name in KEPT} for row in read_rows(out / "metrics.jsonl")]
    return {"rows": rows, "pinned": result["pinned"]}


class _Said(io.TextIOBase):
    """What a run prints: its steps become progress; what it says about stopping is passed on; the rest is left out."""

    def __init__(self, step: Callable[[int], None]):
        self.step, self.terminal = step, sys.stderr

    def write(self, text: str) -> int:
        if found := re.match(r"step (\d+)/", text):
            self.step(int(found[1]))
        elif text.startswith("stopping"):
            print(text.strip(), file=self.terminal, flush=True)
        return len(text)


# --- the result ------------------------------------------------------------------------------------------------------


def assemble(settings: Settings, results: Mapping[str, dict[str, Any]], origin: Mapping[str, Any]) -> dict[str, Any]:
    """demo.json: every phase's result, the paired comparisons between them, and the model card's figures."""
    from mxrl.rl.evaluate import paired_interval

    scores = {recipe: results[f"accuracy-{_label(recipe)}"] for recipe in settings.evaluated}
    base, plain = settings.evaluated[:2]
    return {
        "schema": SCHEMA,
        "settings": asdict(settings),
        "weights": {_label(model): results[f"weights-{_label(model)}"] for model in settings.analyzed},
        "accuracy": scores,
        "minus_baseline": {
            recipe: list(paired_interval(found["scores"], scores[base]["scores"]))
            for recipe, found in scores.items()
            if recipe != base
        },
        "minus_plain": {
            recipe: list(paired_interval(found["scores"], scores[plain]["scores"]))
            for recipe, found in scores.items()
            if recipe not in (base, plain)
        },
        "grpo": {recipe: results[f"grpo-{_label(recipe)}"] for recipe in settings.trained},
        "card": card(settings.model),
        "threads": torch.get_num_threads(),
        "dtype": "float32",
        "seconds": round(sum(found["seconds"] for found in results.values()), 1),
        **origin,
    }


def card(model: str) -> dict[str, Any] | None:
    """The model card's figures (card.json beside the weights); None where there is none, or it is of other weights."""
    path = Path(resolve_model(model)) / "card.json"
    if not path.is_file():
        return None
    found = json.loads(path.read_text(encoding="utf-8"))
    wanted = found.get("weights", {}).get("sha256")
    return found if wanted is None or wanted in {file["sha256"] for file in weight_files(model)} else None

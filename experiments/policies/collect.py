"""Results, cards and tables of the small policies, from the raw folders of their runs (see README.md beside this).

    python experiments/policies/collect.py                      results/ → cards, model cards, README; prints the tables
    python experiments/policies/collect.py --raw RUNS [MORE]    raw run folders → results/, then the same
    python experiments/policies/collect.py --check              writes nothing; fails where a file is out of date

A raw folder is searched for supervised runs (a folder named dense or moe with log.jsonl), evaluations (eval.json of
run.py) and GRPO runs (metrics.jsonl, evals.jsonl, config.yaml of `mxrl train`). `results/provenance.json` is written by
hand: what the raw files don't say (driver, commits, notes). Per-problem scores become strings, a digit a problem: the
number of its samples that were right.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import yaml
from model_card import model_card
from tables import experiment_tables

from mxrl.report import markdown
from mxrl.rl.evaluate import paired_interval

HERE = Path(__file__).resolve().parent
POLICIES = HERE.parents[1] / "src" / "mxrl" / "policies"
KINDS = ("dense", "moe")
MIXTURE_ROWS = ("difficulty", "mixture")
# Of some fifty columns of a GRPO step, those that the text or a reader's first questions need.
STEP_COLUMNS = (
    "step", "accuracy", "loss", "grad_norm", "entropy", "completions/mean_length", "frac_reward_zero_std",
    "group/distinct_answers", "style/careful", "style/skip", "style/guess", "gap/mean_abs", "gap/max_abs", "gap/k3",
    "gap/ess", "gap/truncated", "time/rollout", "time/update", "time/step",
)  # fmt: skip


# --- raw folders → results/ ----------------------------------------------------------------------------------------


def read_rows(file: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file."""
    return [json.loads(line) for line in file.read_text().splitlines() if line.strip()]


def short(value: Any) -> Any:
    """A float to 6 significant digits: a metric has no more, and the file is half as long."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


def digits(scores: list[float], samples: int) -> str:
    """Per-problem scores as a string of counts: `[1.0, .5]` of two samples → `"21"`."""
    return "".join(str(round(score * samples)) for score in scores)


def evaluation_rows(file: Path) -> list[dict[str, Any]]:
    """A row for greedy bf16, one for sampled bf16, one for each recipe."""
    found = json.loads(file.read_text())
    settings = found.get("eval_settings", found["settings"])
    head = {"kind": settings["kind"], "batch_size": 2048, "torch": found["torch"], "device": found["device"]}
    rows = []
    for name, decoding, row in (
        ("bf16", "greedy", found["greedy"]),
        ("bf16", "sampled", found["sampled"]),
        *((recipe, "greedy", row) for recipe, row in found["recipes"].items()),
    ):
        row = {key: value for key, value in row.items() if key not in ("minus_bf16", "distinct")}
        extra = {key: found[key] for key in MIXTURE_ROWS} if (name, decoding) == ("bf16", "greedy") else {}
        rows.append({**head, "recipe": name, "decoding": decoding, **row, **extra,
                     "scores": digits(row["scores"], row["samples"])})  # fmt: skip
    return rows


def grpo_run(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The run's row (settings, status, evaluations with the string of right answers) and its steps."""
    config = yaml.safe_load((folder / "config.yaml").read_text())
    kind = next((k for k in KINDS if config["model"] == f"policy:{k}" or k in Path(config["model"]).parts), None)
    if kind is None:
        raise SystemExit(f"{folder}: model '{config['model']}' is none of the policies ({', '.join(KINDS)})")
    lr = f"{config['lr']:.0e}".replace("e-0", "e-")
    recipe = "" if config["recipe"] == "bf16" else f"{config['recipe']}-"
    name = f"{kind}-{recipe}{lr}-{config['seed']}"
    keep = ("recipe", "seed", "lr", "steps", "prompts_per_step", "samples_per_prompt", "temperature", "warmup", "beta2",
            "weight_decay", "max_grad_norm", "eval_every", "eval_problems", "eval_seed", "eval_batch")  # fmt: skip
    summary = folder / "summary.json"
    status = json.loads(summary.read_text())["status"] if summary.exists() else "unfinished"
    row = {"run": name, "kind": kind, "status": status, **{key: config[key] for key in keep},
           "micro_batch": config["run"]["micro_batch"],
           "pinned": config["run"]["pinned"], "versions": config["run"]["versions"],
           "device": config["run"]["device"], "evals": read_rows(folder / "evals.jsonl")}  # fmt: skip
    steps = [
        {"run": name, **{key: short(step[key]) for key in STEP_COLUMNS if key in step}}
        for step in read_rows(folder / "metrics.jsonl")
    ]
    return row, steps


def gather(raw: list[Path]) -> dict[str, list[dict[str, Any]]]:
    """Everything in the raw folders: the rows of results/*.jsonl, in a fixed order."""
    training: list[dict[str, Any]] = []
    evaluations: dict[tuple[str, str, str], dict[str, Any]] = {}
    runs: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {}
    for root in raw:
        for file in sorted(root.rglob("log.jsonl")):
            if file.parent.name in KINDS:
                training += [{"kind": file.parent.name, **row} for row in read_rows(file)]
        for file in sorted(root.rglob("eval.json")):
            if (file.parent / "log.jsonl").exists():
                continue  # a training run's own evaluation: of another policy than the one that is shipped, perhaps
            for row in evaluation_rows(file):
                key = (row["kind"], row["recipe"], row["decoding"])
                known = evaluations.setdefault(key, row)
                if known["scores"] != row["scores"]:
                    raise SystemExit(f"{file}: {key} was evaluated twice, with different results")
        for file in sorted(root.rglob("metrics.jsonl")):
            row, steps = grpo_run(file.parent)
            if row["run"] in runs:
                raise SystemExit(f"{file.parent}: {row['run']} is there twice")
            runs[row["run"]] = (row, steps)
    if not (training and evaluations and runs):
        raise SystemExit(f"no complete set of runs in {', '.join(map(str, raw))}: {len(training)} training rows, "
                         f"{len(evaluations)} evaluations, {len(runs)} GRPO runs")  # fmt: skip
    ordered = sorted(  # bf16 first
        runs.values(),
        key=lambda r: (r[0]["kind"], r[0]["recipe"] != "bf16", r[0]["recipe"], r[0]["lr"], r[0]["seed"]),
    )
    return {
        "training": training,
        "evals": sorted(evaluations.values(), key=lambda r: (r["kind"], r["decoding"], -r["accuracy"], r["recipe"])),
        "grpo": [row for row, _ in ordered],
        "grpo_steps": [step for _, steps in ordered for step in steps],
    }


# --- results/ → cards ----------------------------------------------------------------------------------------------


def interval(a: str, b: str) -> list[float]:
    """Paired difference of two score strings and its 95 % interval, to 6 decimals."""
    return [round(x, 6) for x in paired_interval([float(x) for x in a], [float(x) for x in b])]


def against_bf16(row: dict[str, Any], runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run minus the bf16 run of the same policy, rate and seed, over the problems, at each step that both evaluated.

    Each is evaluated under its own recipe. Empty for a bf16 run.
    """
    same = ("kind", "lr", "seed")
    bf16 = [r for r in runs if r["recipe"] == "bf16" and all(r[key] == row[key] for key in same)]
    if row["recipe"] == "bf16" or not bf16:
        return []
    other = {e["step"]: e for e in bf16[0]["evals"]}
    return [
        {"step": e["step"], "bf16": other[e["step"]]["accuracy"],
         "difference": interval(e["right"], other[e["step"]]["right"])}
        for e in row["evals"] if e["step"] in other
    ]  # fmt: skip


def grpo_card(row: dict[str, Any], results: dict[str, Any]) -> dict[str, Any]:
    """A run; `after`, `gain` and `interval` are None if it ended before a second evaluation, `passed` off the gate."""
    provenance = results["provenance"]
    first, last = row["evals"][0], row["evals"][-1]
    after = last["accuracy"] if last is not first else None
    gain = None if after is None else after - first["accuracy"]
    finished = row["status"] == "done"
    needed, within = provenance["grpo"]["needed_gain"], provenance["grpo"]["within_steps"]
    return {
        "run": row["run"], "recipe": row["recipe"], "seed": row["seed"],
        "lr": row["lr"], "steps": last["step"], "steps_asked": row["steps"],
        "steps_done": max(step["step"] for step in results["grpo_steps"] if step["run"] == row["run"]),
        "prompts": row["prompts_per_step"], "samples": row["samples_per_prompt"],
        "before": first["accuracy"], "after": after, "gain": gain,
        "interval": None if after is None else interval(last["right"], first["right"])[1:],
        "passed": (finished and gain is not None and last["step"] <= within and gain >= needed)
        if row["recipe"] == "bf16" else None,
        "finished": finished, "minus_bf16": against_bf16(row, results["grpo"]),
        "note": provenance["grpo"]["notes"].get(row["run"]),
        "commit": provenance["grpo"]["commits"].get(row["run"], provenance["grpo"]["commit"]),
        "evals": [{"step": e["step"], "accuracy": e["accuracy"]} for e in row["evals"]],
    }  # fmt: skip


def made_card(kind: str, results: dict[str, Any], greedy: dict[str, Any], provenance: dict[str, Any]) -> dict[str, Any]:
    log = [row for row in results["training"] if row["kind"] == kind]
    told = {key: value for key, value in provenance["training"].items() if key != "commit"}
    return {
        "script": "experiments/policies/run.py", **told,
        "lr_peak": round(max(row["lr"] for row in log), 6),
        "last_logged": {key: log[-1][key] for key in ("step", "seconds", "loss", "completion_tokens_per_s")},
        "styles": greedy["mixture"],
    }  # fmt: skip


def card(kind: str, results: dict[str, Any]) -> dict[str, Any]:
    """The policy's card.json: no per-problem scores, all accuracies fractions."""
    provenance = results["provenance"]
    found = {(row["recipe"], row["decoding"]): row for row in results["evals"] if row["kind"] == kind}
    greedy, sampled = found["bf16", "greedy"], found["bf16", "sampled"]
    plain_loss = found["mxfp4", "greedy"]["accuracy"] - greedy["accuracy"]
    keep = ("accuracy", "n", "by_group", "entropy_per_token", "mean_tokens", "truncated", "styles")
    recipes = {}
    for (recipe, decoding), row in sorted(found.items(), key=lambda item: -item[1]["accuracy"]):
        if recipe != "bf16" and decoding == "greedy":
            difference = interval(row["scores"], greedy["scores"])
            recovered = 1 - (row["accuracy"] - greedy["accuracy"]) / plain_loss
            recipes[recipe] = {
                **{key: row[key] for key in keep}, "minus_bf16": difference, "recovered": round(recovered, 4)
            }  # fmt: skip
    pairs = []
    for a, b in combinations(recipes, 2):
        difference = interval(found[a, "greedy"]["scores"], found[b, "greedy"]["scores"])
        decided = not difference[1] <= 0 <= difference[2]
        pairs.append({"a": a, "b": b, "difference": difference, "decided": decided})
    runs = [row for row in results["grpo"] if row["kind"] == kind]
    rows = [grpo_card(row, results) for row in runs]
    bf16 = [row for row in rows if row["recipe"] == "bf16"]
    asked = provenance["grpo"]
    chosen = asked["chosen_lr"]
    gate = [row for row in bf16 if row["lr"] == chosen]
    weights = POLICIES / kind / "model.safetensors"
    return {
        "kind": kind, "license": "Apache-2.0",
        "weights": {"file": weights.name, "bytes": weights.stat().st_size,
                    "sha256": hashlib.sha256(weights.read_bytes()).hexdigest()},
        "problems": {"split": "test", "seed": 0, "n": greedy["n"], **greedy["difficulty"]},
        "bf16": {
            **{key: greedy[key] for key in keep},
            "sampled": {**{key: sampled[key] for key in keep}, "samples": sampled["samples"], "temperature": 1.0,
                        "pass_at_k": sampled["pass_at_k"],
                        "accuracy_by_style": {s: sampled[f"accuracy_{s}"] for s in ("careful", "skip", "guess")}},
        },
        "recipes": recipes, "recipes_note": provenance["evaluation"]["note"], "pairs": pairs,
        "grpo": gate, "lr_search": [row for row in bf16 if row["lr"] != chosen],
        "grpo_recipes": [row for row in rows if row["recipe"] != "bf16"],
        "gate": {"rule": f"bf16 GRPO gains at least {100 * asked['needed_gain']:g} pp greedy within "
                         f"{asked['within_steps']} steps, on each of three seeds", "lr": chosen,
                 "passed": len({row["seed"] for row in gate}) >= 3 and all(row["passed"] for row in gate)},
        "made": made_card(kind, results, greedy, provenance),
        "versions": {"python": provenance["python"], "torch": greedy["torch"],
                     **{p: runs[0]["versions"][p] for p in ("transformers", "trl", "accelerate", "datasets")}},
        "device": provenance["device"], "driver": provenance["driver"], "date": provenance["date"],
        "commit": {"training": provenance["training"]["commit"], "evaluation": provenance["evaluation"]["commit"],
                   "grpo": provenance["grpo"]["commit"]},
    }  # fmt: skip


# --- files ---------------------------------------------------------------------------------------------------------


def load_results() -> dict[str, Any]:
    """`results/*.jsonl` by name, and the provenance."""
    names = ("training", "evals", "grpo", "grpo_steps")
    results: dict[str, Any] = {name: read_rows(HERE / "results" / f"{name}.jsonl") for name in names}
    return results | {"provenance": json.loads((HERE / "results" / "provenance.json").read_text())}


def between(text: str, name: str, content: str) -> str:
    """`markdown.between`, whose error ends the program."""
    try:
        return markdown.between(text, name, content)
    except ValueError as error:
        raise SystemExit(f"{HERE / 'README.md'}: {error}") from None


def outputs(results: dict[str, Any]) -> dict[Path, str]:
    """Every generated file and its text."""
    cards = {kind: card(kind, results) for kind in KINDS}
    files: dict[Path, str] = {}
    for kind in KINDS:
        files[POLICIES / kind / "card.json"] = json.dumps(cards[kind], indent=1, ensure_ascii=False) + "\n"
        files[POLICIES / kind / "README.md"] = model_card(cards[kind])
    readme = HERE / "README.md"
    text = readme.read_text()
    for name, content in experiment_tables(cards, results).items():
        text = between(text, name, content)
    return files | {readme: text}


def write(file: Path, text: str) -> None:
    temporary = file.with_name(f".{file.name}.tmp")
    temporary.write_text(text)
    temporary.replace(file)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--raw", type=Path, nargs="+", help="raw run folders, which replace results/*.jsonl")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a generated file is out of date")
    args = parser.parse_args(argv)
    if args.raw:
        for name, rows in gather(args.raw).items():
            lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            write(HERE / "results" / f"{name}.jsonl", lines)
    results = load_results()
    files = outputs(results)
    stale = [file for file, text in files.items() if not file.exists() or file.read_text() != text]
    if args.check:
        print("\n".join(f"out of date: {file}" for file in stale) or "every generated file is up to date")
        return 1 if stale else 0
    for file in stale:
        write(file, files[file])
    for name, content in experiment_tables({kind: card(kind, results) for kind in KINDS}, results).items():
        print(f"[{name}]\n{content}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

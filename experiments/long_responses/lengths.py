"""How long the right answers of sweep.yaml's three lengths are, written in the `rewrite` style.

    python experiments/long_responses/lengths.py [--problems 20000] [--seed 0]     results/lengths.jsonl, and prints it

A row a length: what sweep.yaml says of it, and the tokens (a character each, the end one more) of the right answers to
the first problems of the training split: their mean, the least and the most, and how many don't fit max_new_tokens.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import yaml

from mxrl.provenance import provenance
from mxrl.report.run_rows import write_rows
from mxrl.rl.chain import Difficulty, chain_problems, solution

HERE = Path(__file__).resolve().parent


def measured(run: dict[str, Any], samples: int, problems: int, seed: int) -> dict[str, Any]:
    """Of a run of sweep.yaml, whose name is LENGTH/RECIPE."""
    options = run["options"]
    room = options["max_new_tokens"]
    found = chain_problems(seed=seed, n=problems, split="train", difficulty=Difficulty(**options["task_options"]))
    tokens = [len(solution(problem, "rewrite")) + 1 for problem in found]
    return {
        "length": run["name"].split("/")[0], "numbers": options["task_options"]["numbers"][0], "problems": problems,
        "seed": seed, "mean": sum(tokens) / problems, "least": min(tokens), "most": max(tokens), "room": room,
        "longer": sum(n > room for n in tokens), "steps": options["steps"], "prompts": options["prompts_per_step"],
        "samples": samples, "seeds": run["seeds"],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    args = parser.parse_args()
    sweep = yaml.safe_load((HERE / "sweep.yaml").read_text())
    origin = provenance("CPU")
    rows = []
    for run in sweep["runs"]:
        if run["name"].endswith("/bf16"):
            row = measured(run, sweep["defaults"]["samples_per_prompt"], args.problems, args.seed)
            print(row, flush=True)
            rows.append(row | {"provenance": origin})
    write_rows(args.out, {"lengths": sorted(rows, key=lambda row: row["numbers"])})


if __name__ == "__main__":
    main()

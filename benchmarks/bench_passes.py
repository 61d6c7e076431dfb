"""Training's passes by length (mxrl/integrations/trl_passes.py) against TRL's padded ones, in turns in one run.

    python benchmarks/bench_passes.py --device cpu
    python benchmarks/bench_passes.py --model FOLDER --task gsm8k --task-options '{path: "gsm8k-{split}.jsonl"}' \
      --sequences 1024 --micro 32 --new 300

Steps of GRPO, the even ones by length, the odd ones as TRL pads them: scoring and update, forward and backward. The
rollouts are the policy's own, so the lengths are what training meets. The learning rate is so small that the policy
stays what it is. A row is a step after the first two: the tokens that count (prompts and completions), the tokens that
passes computed, and the seconds of `score` and `update`.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml
from measure import Row, origin, pick_device, write_rows

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--model", default="policy:dense")
    parser.add_argument("--recipe", default="mxfp4+mbs+of")
    parser.add_argument("--task", default="chain")
    parser.add_argument("--task-options", type=yaml.safe_load, default={})
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--micro", type=int, default=16)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = pick_device(args.device)

    from datasets import Dataset
    from transformers import PrinterCallback

    from mxrl.integrations.trl import GRPOConfig, GRPOTrainer
    from mxrl.rl.policy import load_model
    from mxrl.rl.tasks import get_task, load_task

    class Alternating(GRPOTrainer):
        @property
        def by_length(self) -> bool:
            return super().by_length and self._step // self.args.steps_per_generation % 2 == 0

    model, tokenizer = load_model(args.model, dtype=torch.float32)
    problems = load_task(
        args.task, seed=args.seed, n=args.steps * args.sequences // 8, split="train", **args.task_options
    )
    computed: dict[int, int] = {}
    with tempfile.TemporaryDirectory() as out:
        config = GRPOConfig(
            out, seed=args.seed, use_cpu=args.device == "cpu", bf16=args.device == "cuda", max_steps=args.steps,
            per_device_train_batch_size=args.micro, gradient_accumulation_steps=args.sequences // args.micro,
            num_generations=8, max_completion_length=args.new, learning_rate=1e-9, lr_scheduler_type="constant",
            logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True, gradient_checkpointing=False,
        )  # fmt: skip
        trainer = Alternating(
            model, get_task(args.task).reward, config, Dataset.from_list([problem.row() for problem in problems]),
            processing_class=tokenizer, recipe=args.recipe, monitor_every=0,
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)

        def count(module: Any, inputs: Any, kwargs: dict[str, Any]) -> None:
            if kwargs.get("fused_lm_head"):
                step = trainer._step // config.gradient_accumulation_steps
                computed[step] = computed.get(step, 0) + math.prod(kwargs["input_ids"].shape)

        trainer.model.register_forward_pre_hook(count, with_kwargs=True)
        trainer.train()
    source = origin(device, args.seed, "trl", "accelerate")
    workload = f"{args.model}, {args.task}: {args.sequences} sequences in passes of {args.micro}"
    prompt = 0.0
    rows: list[Row] = []
    for number, step in enumerate([row for row in trainer.state.log_history if "loss" in row]):
        real, prompt = step["num_tokens"] - prompt, step["num_tokens"]  # TRL counts on, prompts and completions
        seconds = {name: step[f"time/{name}"] for name in ("score", "update")}
        rows.append({
            "benchmark": "passes", "op": "by length" if number % 2 == 0 else "padded", "recipe": args.recipe,
            "backend": "", "workload": workload,
            "tokens": int(real), "computed": computed[number] // 2, "seconds": seconds,
            "ms": {"p50": 1e3 * sum(seconds.values())}, **source,
        })  # fmt: skip
        print(f"{rows[-1]['op']:10} {real:.0f} tokens, {rows[-1]['computed']} computed, {seconds}", flush=True)
    write_rows(args.out or RESULTS / f"passes_{args.device}.jsonl", rows[2:])


if __name__ == "__main__":
    main()

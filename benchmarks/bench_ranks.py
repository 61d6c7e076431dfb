"""GRPO on two GPUs against one: tokens a second of the rollout and of training, and where the rest of the time goes.

    python benchmarks/bench_ranks.py                    on a host with two GPUs
    python benchmarks/bench_ranks.py --device cpu       two gloo processes and small shapes: that it runs

The steps are those of mxrl's trainer (rollout, reward, scoring, update), with random weights and prompts of one length;
the end-of-sequence token is one in 150,000, so that nearly all completions have full length. Both have the same global
batch and seed. One GPU decodes all its sequences at once where they fit, the way that is best for it; the two GPUs each
decode half of them. The runs on one GPU of the models go side by side, each on a GPU of its own.

    dense     Qwen2.5-0.5B: 24 layers of width 896, float32 master weights, bf16 autocast
    moe       16 layers of width 1024, 32 experts of 512, 4 a token

After the last recipe's steps, decoding alone is timed for several numbers of sequences: all at once, and as many at a
time in each process as half a step's, the way it is where memory limits them. A row is one of those (op `decode`), or a
step after the warm-up: seconds of each phase, of the slowest process (`sync`: gathering and quantizing a
rollout's weights; `rollout_wait`: how long the first process waits for the last), tokens of all processes, peak memory,
the digest of the first rollout's quantized weights, and the first step's loss and gradient norm.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from measure import Row, origin, read_rows, write_rows

RECIPES = {"dense": ("bf16", "mxfp4+mbs+of+aqn"), "moe": ("mxfp4+mbs+of+aqn",)}
FULL = {"sequences": 2048, "group": 8, "prompt": 128, "new": 128, "micro": 128}
SMALL = {"sequences": 32, "group": 4, "prompt": 16, "new": 8, "micro": 8}
DENSE = {"vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
         "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True}  # fmt: skip
MOE = {"vocab_size": 32768, "hidden_size": 1024, "moe_intermediate_size": 512, "num_hidden_layers": 16,
       "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "num_experts": 32, "num_experts_per_tok": 4,
       "tie_word_embeddings": True, "norm_topk_prob": True, "intermediate_size": 512, "router_aux_loss_coef": 0.0,
       "decoder_sparse_step": 1}  # fmt: skip


def build(kind: str, small: bool, seed: int) -> Any:
    from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3MoeConfig

    shape, config = (DENSE, Qwen2Config) if kind == "dense" else (MOE, Qwen3MoeConfig)
    shape = dict(shape)
    if small:
        shape |= {"vocab_size": 512, "num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 256}
        shape |= {"num_attention_heads": 2, "head_dim": 64}
        shape |= {"num_key_value_heads": 2, "moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2}
    torch.manual_seed(seed)
    settings = config(**shape, max_position_embeddings=1024, bos_token_id=None, eos_token_id=1, pad_token_id=0)
    return AutoModelForCausalLM.from_config(settings, dtype=torch.float32)


def trainer(kind: str, recipe: str, args: argparse.Namespace, sizes: dict[str, int], out: str) -> Any:
    from datasets import Dataset

    from mxrl.integrations.trl import GRPOConfig, GRPOTrainer
    from mxrl.rl import ranks
    from mxrl.rl.policy import char_tokenizer

    share = sizes["sequences"] // ranks.count()
    micro = min(sizes["micro"], share)
    letters = random.Random(args.seed)
    count = (args.warmups + args.steps) * sizes["sequences"] // sizes["group"]
    prompts = [{"prompt": "".join(letters.choices("0123456789", k=sizes["prompt"]))} for _ in range(count)]

    def reward(completion_ids: Any, **columns: Any) -> list[float]:
        return [(sum(ids[:16]) % 1000) / 1000 for ids in completion_ids]

    tokenizer = char_tokenizer()
    config = GRPOConfig(
        out, seed=args.seed, use_cpu=args.device == "cpu", bf16=args.device == "cuda", fsdp=ranks.count() > 1 or None,  # type: ignore[arg-type]
        fsdp_config={"reshard_after_forward": args.reshard} if ranks.count() > 1 else None,
        max_steps=args.warmups + args.steps, per_device_train_batch_size=micro,
        gradient_accumulation_steps=share // micro,
        num_generations=sizes["group"], max_completion_length=sizes["new"], beta=0.0, loss_type="dapo",
        learning_rate=1e-6, lr_scheduler_type="constant", logging_steps=1, save_strategy="no", report_to="none",
        optim="adamw_torch_fused" if args.device == "cuda" else "adamw_torch", disable_tqdm=True,
        gradient_checkpointing=False, dataloader_pin_memory=args.device == "cuda", max_grad_norm=1.0,
    )  # fmt: skip
    return GRPOTrainer(
        build(kind, args.device == "cpu", args.seed), reward, config, Dataset.from_list(prompts),
        processing_class=tokenizer, recipe=recipe, monitor_every=0, rollout_batch_size=args.slots,
    )  # fmt: skip


def digest(model: Any) -> str:
    """sha256 of all the quantized weights that a rollout holds."""
    from mxrl.nn import quantized_layers

    total = hashlib.sha256()
    for layer in quantized_layers(model):
        held = [layer.module.held] if layer.is_linear else layer.module.mxrl_state.held.values()
        for weight in held:
            total.update(weight.value.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return total.hexdigest()


def work(args: argparse.Namespace) -> None:
    """One process: every recipe of one model, a row a step."""
    from transformers import PrinterCallback

    from mxrl.integrations import trl_rollout
    from mxrl.rl import ranks

    ranks.start(args.device)
    sizes: dict[str, int] = (SMALL if args.device == "cpu" else FULL) | {
        k: v for k, v in vars(args).items() if k in FULL and v
    }
    sizes["vocab"] = 1 << 30  # an end-of-sequence token that no model has
    cuda = args.device == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    source = origin(device, args.seed, "trl", "accelerate")
    rows: list[Row] = []
    real = trl_rollout.sample
    recipes = args.recipes or RECIPES[args.work]
    for recipe in recipes:
        digests: list[str] = []

        def sample(model: Any, *rest: Any, digests: list[str] = digests, **settings: Any) -> Any:
            if not digests:
                digests.append(digest(model))
            return real(model, *rest, **settings)

        trl_rollout.sample = sample
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as out:
            run = trainer(args.work, recipe, args, sizes, out)
            run.remove_callback(PrinterCallback)
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            run.train()
        parameters = run.conversion.parameters
        everyone: list[Any] = [digests[0]]
        if ranks.count() > 1:
            everyone *= ranks.count()
            torch.distributed.all_gather_object(everyone, digests[0])
        steps = [row for row in run.state.log_history if "loss" in row]
        for row in steps[args.warmups :] if ranks.rank() == 0 else []:
            seconds = {k.removeprefix("time/"): v for k, v in row.items() if k.startswith("time/")}
            trained = int(row["rollout/tokens"]) + sizes["sequences"] * sizes["prompt"]
            rows.append(
                {
                    "benchmark": "ranks", "op": "step", "model": args.work, "recipe": recipe, "backend": "",
                    "processes": ranks.count(), "slots": args.slots, "reshard": args.reshard,
                    **{name: sizes[name] for name in FULL},
                    "parameters": parameters, "seconds": seconds, "rollout_tokens": int(row["rollout/tokens"]),
                    "trained_tokens": trained, "ms": {"p50": 1e3 * seconds["step"]},
                    "peak_bytes": torch.cuda.max_memory_allocated() if cuda else 0,
                    "digest": everyone[0], "same_on_all": len(set(everyone)) == 1,
                    "first_loss": steps[0]["loss"], "first_grad_norm": steps[0]["grad_norm"],
                    "wall": time.perf_counter() - began, **source,
                }
            )  # fmt: skip
        for sequences in args.rollouts if recipe == recipes[-1] else ():
            for slots in (None, sizes["sequences"] // 2):
                row = decode(run, sequences, slots, sizes, args) | source
                rows += [{"model": args.work, "recipe": recipe} | row] if ranks.rank() == 0 else []
        del run
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
        if ranks.rank() == 0:
            write_rows(args.out, rows)
            print("\n".join(map(shown, rows)), flush=True)
    ranks.finish()


def decode(run: Any, sequences: int, slots: int | None, sizes: dict[str, int], args: argparse.Namespace) -> Row:
    """Decoding alone, weights already there: `sequences` over all processes, `slots` at a time in each."""
    from mxrl.rl import ranks
    from mxrl.rl.rollout import sample

    share = sequences // ranks.count()
    letters = random.Random(sequences + ranks.rank())
    prompts = [[letters.randrange(5, 400) for _ in range(sizes["prompt"])] for _ in range(share // sizes["group"])]
    prompts = [prompt for prompt in prompts for _ in range(sizes["group"])]
    seconds = []
    with run.rollout_policy() as (model, _):
        for turn in range(3):  # the first one compiles what this shape needs
            run.accelerator.wait_for_everyone()
            began = time.perf_counter()
            out = sample(
                model, prompts, max_new_tokens=sizes["new"], eos_token_id=sizes["vocab"], pad_token_id=0, seed=turn,
                batch_size=slots, first_row=ranks.rank() * share,
            )  # fmt: skip
            tokens = out.tokens * ranks.count()
            run.accelerator.wait_for_everyone()
            seconds.append(time.perf_counter() - began)
    return {
        "benchmark": "ranks", "op": "decode", "backend": "", "processes": ranks.count(), "sequences": sequences,
        "slots": slots, "prompt": sizes["prompt"], "new": sizes["new"], "rollout_tokens": tokens,
        "seconds": {"rollout": min(seconds[1:])}, "ms": {"p50": 1e3 * min(seconds[1:])},
    }  # fmt: skip


def shown(row: Row) -> str:
    parts = " ".join(f"{k} {v:.2f}" for k, v in row["seconds"].items())
    speed = row["rollout_tokens"] / row["seconds"]["rollout"]
    what = f"{row['op']} of {row['sequences']}, {row['slots'] or 'all'} at a time"
    return f"{row['model']} {row['recipe']} ×{row['processes']} {what}: rollout {speed:,.0f} tokens/s; {parts}"


def launch(args: argparse.Namespace, kind: str, gpus: list[int], out: Path) -> subprocess.Popen[bytes]:
    here = [str(Path(__file__).resolve()), "--work", kind, "--out", str(out), "--device", args.device]
    for name in ("steps", "warmups", "seed", "slots", *FULL):
        if getattr(args, name) is not None:
            here += [f"--{name}", str(getattr(args, name))]
    here += ["--rollouts", *map(str, args.rollouts)]
    here += ["--reshard"] if args.reshard else []
    here += ["--recipes", *args.recipes] if args.recipes else []
    command = [sys.executable, *here]
    if len(gpus) > 1:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        run = ["-m", "torch.distributed.run", "--nproc-per-node", str(len(gpus)), "--master-port", str(port)]
        command = [sys.executable, *run, *here]
    visible = ",".join(map(str, gpus)) if args.device == "cuda" else ""
    env = os.environ | {"CUDA_VISIBLE_DEVICES": visible, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "4")}
    return subprocess.Popen(command, env=env)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", nargs="+", choices=("dense", "moe"), default=["dense", "moe"])
    parser.add_argument("--recipes", nargs="+", help="default: " + str(RECIPES))
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--warmups", type=int, default=2)
    parser.add_argument("--rollouts", type=int, nargs="*", default=[2048, 4096], help="decoding alone, sequences")
    parser.add_argument("--slots", type=int, help="sequences decoded together by a process (default: as many as fit)")
    parser.add_argument("--reshard", action="store_true", help="gather the weights for every pass, not once a step")
    for name, size in FULL.items():
        parser.add_argument(f"--{name}", type=int, help=f"default {size}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="default benchmarks/results/ranks_DEVICE.jsonl")
    args = parser.parse_args()
    if args.work:
        work(args)
        return
    if args.device == "cuda" and torch.cuda.device_count() < 2:
        sys.exit(f"bench_ranks.py needs two GPUs, torch sees {torch.cuda.device_count()}; --device cpu tries it out")
    out = args.out or Path(__file__).parent / "results" / f"ranks_{args.device}.jsonl"
    out.parent.mkdir(parents=True, exist_ok=True)
    turns = [[(kind, [i]) for i, kind in enumerate(args.models)], *([(kind, [0, 1])] for kind in args.models)]
    files: list[Path] = []  # of the runs, beside `out`: what is there counts, also when the rest runs out of time
    for turn in turns:
        running = []
        for kind, gpus in turn:
            files.append(out.with_name(f"{out.stem}-{kind}-{len(gpus)}.part"))
            files[-1].unlink(missing_ok=True)
            running.append(launch(args, kind, gpus, files[-1]))
        while any(process.poll() is None for process in running):
            time.sleep(1)
            write_rows(out, [row for file in files if file.exists() for row in read_rows(file)])
        for process in running:
            if process.returncode:
                print(f"bench_ranks.py: a run ended with {process.returncode}", file=sys.stderr)
    rows = [row for file in files if file.exists() for row in read_rows(file)]
    write_rows(out, rows)
    for file in files:
        file.unlink(missing_ok=True)
    print(json.dumps({"rows": len(rows), "written": str(out)}))


if __name__ == "__main__":
    main()

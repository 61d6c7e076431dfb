"""Supervised training of the small policies, on a mixture of solution styles (see README.md beside this).

    python experiments/policies/run.py --kind dense --mixture default --minutes 4 --out runs/dense
    python experiments/policies/run.py --steps 3 --size tiny --batch 32 --examples 2000 --eval-n 32 --out /tmp/smoke

Writes OUT/policy/ (a plain Hugging Face folder, bf16), OUT/log.jsonl, OUT/eval.json; OUT/state.pt is there only
while the run is unfinished, and the same command continues from it.

The step. Weights are bf16 with float32 masters (AdamW on the masters); a batch is drawn with replacement by
a generator seeded with (seed, step), sorted by length and cut into micro-batches trimmed to their longest row, so
that short guesses don't pay for long solutions. Loss: mean cross-entropy over the completion's tokens.

Long solutions (experiments/long_responses): `--init` goes on from a policy, `--batch-tokens` bounds a step by its
tokens, `--grow` begins with the shortest examples, so that copying is learned where it is easy.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import random
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from mxrl.provenance import provenance
from mxrl.rl.chain import (
    ALPHABET,
    STYLES,
    Difficulty,
    Mixture,
    Problem,
    chain_problems,
    chain_prompts,
    solution,
    style_of,
)
from mxrl.rl.evaluate import evaluate, paired_interval
from mxrl.rl.policy import PolicyError, build_policy, char_tokenizer, load_folder, resolve_model, save_policy
from mxrl.rl.rewards import chain_reward
from mxrl.rl.rollout import without_cudnn_attention

CHUNK = 10_000
SHORTEST = 0.1  # of the examples: where --grow begins
EOS_ID = 2
IDS = bytes.maketrans(ALPHABET.encode(), bytes(range(3, 3 + len(ALPHABET))))


def arguments(argv: list[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--kind", default="dense", choices=["dense", "moe"])
    p.add_argument("--size", default="base", help="base, small (dense only) or tiny")
    p.add_argument(
        "--init", metavar="MODEL", help="train this on (policy:dense, a folder); --kind and --size don't count"
    )
    p.add_argument("--mixture", default="default", help="a name of mxrl.rl.chain.MIXTURES, or a .json table")
    p.add_argument("--numbers", type=int, nargs=2, default=(3, 7), metavar=("MIN", "MAX"))
    p.add_argument("--digits", type=int, nargs=2, default=(1, 4), metavar=("MIN", "MAX"))
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--minutes", type=float, help="train this long (the schedule then follows the clock)")
    p.add_argument("--steps", type=int, help="train this many steps (exactly reproducible)")
    p.add_argument("--batch", type=int, default=2048)
    p.add_argument("--batch-tokens", type=int, help="bound a step's tokens; --batch is then the most examples")
    p.add_argument("--micro", type=int, default=2, help="micro-batches a step, by length")
    p.add_argument(
        "--grow",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="of the training in which longer and longer examples come in; 0: all from the start",
    )
    p.add_argument("--examples", type=int, default=2_000_000)
    p.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--warmup", type=int, default=100, help="steps")
    p.add_argument("--weight-decay", type=float, default=0.1)
    p.add_argument("--experts", help="experts' implementation: eager, grouped_mm, batched_mm (default: transformers')")
    p.add_argument("--compile", action="store_true")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--log-every", type=int, default=50, help="steps")
    p.add_argument("--save-every", type=int, default=1000, help="steps between resumable states")
    p.add_argument("--eval-n", type=int, default=2048, help="held-out problems")
    p.add_argument("--eval-samples", type=int, default=4, help="samples a problem, at temperature 1")
    p.add_argument("--recipes", nargs="*", default=[], help="also evaluate greedily under these recipes")
    p.add_argument("--eval-only", action="store_true", help="evaluate OUT/policy, train nothing")
    args = p.parse_args(argv)
    if args.steps is None and args.minutes is None and not args.eval_only:
        p.error("give --steps or --minutes")
    if not 0 <= args.grow < 1:
        p.error(f"--grow {args.grow} must be a share from 0 to below 1")
    if args.batch_tokens is not None and args.batch_tokens < args.micro:
        p.error(f"--batch-tokens {args.batch_tokens} must be at least --micro {args.micro}")
    return args


# --- data: prompts and solutions as uint8 tokens -------------------------------------------------------------------


def encode_chunk(job: tuple[int, int, int, Mixture, Difficulty]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Examples of chunk `index`: tokens uint8 [count, width], prompt lengths and total lengths int16 [count]."""
    seed, index, count, mixture, difficulty = job
    rng = random.Random(f"styles/{seed}/{index}")
    prompts = chain_prompts(f"{seed}/{index}", "train", difficulty)
    width = longest(difficulty, mixture)
    tokens = np.zeros((count, width), np.uint8)
    lengths = np.zeros((2, count), np.int16)
    for i in range(count):
        prompt = next(prompts)
        n = 1 + sum(prompt.count(op) for op in "+-*")
        row = (prompt + solution(prompt, mixture.draw(n, rng))).encode().translate(IDS) + bytes([EOS_ID])
        tokens[i, : len(row)] = np.frombuffer(row, np.uint8)
        lengths[:, i] = len(prompt), len(row)
    return tokens, lengths[0], lengths[1]


def longest(difficulty: Difficulty, mixture: Mixture) -> int:
    """Tokens that no example is longer than: a prompt of n numbers, a solution in the longest style, the end token."""
    n, d = difficulty.numbers[1], difficulty.digits[1]
    operand = d + 1  # with its operator
    lines = (n - 1) * (4 + operand + 1 + 4)
    if "rewrite" in styles(mixture):
        lines = max(lines, (n - 1) * 4 + operand * (n - 1) * (n - 2) // 2)
    return n * operand + lines + (n - 1) + 4 + 1


def styles(mixture: Mixture) -> tuple[str, ...]:
    """The styles that it holds."""
    return tuple(style for style in STYLES if any(row.get(style) for row in mixture.table.values()))


def make_data(args: argparse.Namespace, difficulty: Difficulty, mixture: Mixture) -> tuple[torch.Tensor, ...]:
    jobs = [
        (args.seed, i, min(CHUNK, args.examples - i * CHUNK), mixture, difficulty)
        for i in range(math.ceil(args.examples / CHUNK))
    ]
    if args.workers > 1 and len(jobs) > 1:
        # fork, before CUDA is touched: a spawned worker would spend seconds importing torch
        with multiprocessing.get_context("fork").Pool(min(args.workers, len(jobs))) as pool:
            parts = pool.map(encode_chunk, jobs, chunksize=1)
    else:
        parts = [encode_chunk(job) for job in jobs]
    tokens, prompts, totals = (torch.from_numpy(np.concatenate(column)) for column in zip(*parts, strict=True))
    return tokens[:, : int(totals.max())].contiguous(), prompts, totals


# --- training ------------------------------------------------------------------------------------------------------


def draw_batch(
    args: argparse.Namespace, totals: torch.Tensor, by_length: torch.Tensor, step: int, done: float
) -> list[torch.Tensor]:
    """A step's micro-batches: places of examples in the data, by length.

    totals: tokens of each example; by_length: their places, the shortest first; done: of the training, 0 … 1.
    """
    generator = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
    if done < args.grow:
        share = SHORTEST + (1 - SHORTEST) * done / args.grow
        places = by_length[: max(1, int(share * len(totals)))]
        batch = places[torch.randint(len(places), (args.batch,), generator=generator)]
    else:
        batch = torch.randint(len(totals), (args.batch,), generator=generator)
    if args.batch_tokens is not None:
        batch = batch[: max(1, int((totals[batch].cumsum(0) <= args.batch_tokens).sum()))]
    batch = batch[totals[batch].argsort(stable=True)]
    if args.batch_tokens is None:
        return list(batch.chunk(args.micro))
    parts, start = [], 0
    for end in range(1, len(batch) + 1):  # as many rows as --batch-tokens / --micro holds, padded to the longest
        if end == len(batch) or (end + 1 - start) * int(totals[batch[end]]) > args.batch_tokens // args.micro:
            parts.append(batch[start:end])
            start = end
    return parts


def completion_loss(
    model: Any, ids: torch.Tensor, prompt: torch.Tensor, total: torch.Tensor
) -> tuple[torch.Tensor, Any]:
    """Summed cross-entropy over completion tokens, and the MoE balancing loss (None for dense)."""
    moe = is_moe(model)
    out = model(input_ids=ids[:, :-1], use_cache=False, **({"output_router_logits": True} if moe else {}))
    at = torch.arange(ids.shape[1] - 1, device=ids.device)
    mask = (at >= prompt[:, None] - 1) & (at < total[:, None] - 1)
    losses = F.cross_entropy(out.logits.float().transpose(1, 2), ids[:, 1:], reduction="none")
    aux = None
    if moe:  # transformers' own aux_loss would balance the padding as well
        real = (at < total[:, None]).long()
        aux = load_balancing_loss_func(
            out.router_logits, model.config.num_experts, model.config.num_experts_per_tok, real
        )
    return (losses * mask).sum(), aux


def is_moe(model: Any) -> bool:
    return "moe" in model.config.model_type


def train(
    args: argparse.Namespace, model: Any, data: tuple[torch.Tensor, ...], state_file: Path, log: Any
) -> dict[str, Any]:
    tokens, prompts, totals = (column.to(args.device) for column in data)
    low = torch.bfloat16 if args.device != "cpu" else torch.float32
    masters = [p.detach().float().clone().to(args.device) for p in model.parameters()]
    model.to(args.device, low).train()
    weights = list(model.parameters())
    groups = [
        {"params": [m for m in masters if m.ndim > 1], "weight_decay": args.weight_decay},
        {"params": [m for m in masters if m.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.98), fused=args.device != "cpu")
    step, elapsed = 0, 0.0
    if state_file.exists():
        state = torch.load(state_file, map_location=args.device, weights_only=True)
        step, elapsed = state["step"], state["elapsed"]
        for master, saved in zip(masters, state["masters"], strict=True):
            master.copy_(saved)
        optimizer.load_state_dict(state["optimizer"])
        print(f"resuming at step {step}", flush=True)
    with torch.no_grad():
        for weight, master in zip(weights, masters, strict=True):
            weight.copy_(master)
    forward = torch.compile(model, dynamic=True) if args.compile else model
    by_length = data[2].argsort(stable=True)
    start = last = time.monotonic()
    seen = 0
    while True:
        now = elapsed + time.monotonic() - start
        done = max(step / args.steps if args.steps else 0.0, now / (60 * args.minutes) if args.minutes else 0.0)
        if done >= 1:
            break
        rate = args.lr * min(1.0, (step + 1) / args.warmup) * 0.5 * (1 + math.cos(math.pi * done))
        parts = draw_batch(args, data[2], by_length, step, done)
        batch = torch.cat(parts)
        count = int((data[2][batch] - data[1][batch]).sum())
        for master in masters:
            master.grad = torch.zeros_like(master)
        loss = torch.zeros((), device=args.device)
        for part in parts:
            width = min(tokens.shape[1], math.ceil(int(data[2][part[-1]]) / 16) * 16 + 1)
            rows = part.to(args.device)
            with without_cudnn_attention():  # nearly every part has another shape
                total, aux = completion_loss(forward, tokens[rows, :width].long(), prompts[rows], totals[rows])
                objective = total / count
                if aux is not None:
                    objective = objective + model.config.router_aux_loss_coef * aux * len(part) / len(batch)
                objective.backward()
            loss += total.detach() / count
            for weight, master in zip(weights, masters, strict=True):
                if weight.grad is not None:
                    master.grad.add_(weight.grad)  # in float32: bf16 sums of micro-batches would lose bits
                weight.grad = None
        norm = torch.nn.utils.clip_grad_norm_(masters, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        with torch.no_grad():
            for weight, master in zip(weights, masters, strict=True):
                weight.copy_(master)
        step, seen = step + 1, seen + count
        if step % args.log_every == 0 or step == args.steps:
            value = loss.item()
            clock = time.monotonic()
            row = {"step": step, "seconds": round(elapsed + clock - start, 2), "loss": value, "lr": rate,
                   "grad_norm": norm.item(), "completion_tokens_per_s": round(seen / (clock - last))}  # fmt: skip
            log(row)
            last, seen = clock, 0
            if not math.isfinite(value):
                raise RuntimeError(f"the loss is {value} at step {step}: lower --lr")
        if step % args.save_every == 0:
            state = {"step": step, "elapsed": elapsed + time.monotonic() - start, "masters": masters,
                     "optimizer": optimizer.state_dict()}  # fmt: skip
            torch.save(state, state_file.with_suffix(".tmp"))
            state_file.with_suffix(".tmp").replace(state_file)
    with torch.no_grad():  # masters last, so that what is saved is the rounding of the float32 weights
        for weight, master in zip(weights, masters, strict=True):
            weight.data = master
    return {"steps": step, "train_seconds": elapsed + time.monotonic() - start}


# --- evaluation ----------------------------------------------------------------------------------------------------


def measure(args: argparse.Namespace, folder: Path, problems: list[Problem]) -> dict[str, Any]:
    """Greedy and sampled accuracy of the saved bf16 policy; greedy under every recipe, with paired differences."""
    known = styles(Mixture.load(args.mixture))
    budget = max(len(solution(problem, style)) for problem in problems for style in known) + 1
    common: dict[str, Any] = {"reward": chain_reward, "max_new_tokens": budget, "style": style_of, "batch_size": 2048}

    def loaded() -> Any:
        model = load_folder(folder, dtype=torch.bfloat16)[0].to(args.device)
        if args.experts:
            model.set_experts_implementation(args.experts)
        return model

    tokenizer = char_tokenizer()
    greedy = evaluate(loaded(), tokenizer, problems, **common)
    sampled = evaluate(
        loaded(), tokenizer, problems, samples=args.eval_samples, temperature=1.0, seed=args.seed, **common
    )
    found = {"greedy": greedy.to_dict(), "sampled": sampled.to_dict(), "recipes": {}}
    found["sampled"]["pass_at_k"] = sum(score > 0 for score in sampled.scores) / len(problems)
    for style in dict.fromkeys((*STYLES[:3], *known)):  # what a style is worth: sampled accuracy given the style
        hits: dict[int, list[float]] = {}  # by the chain's numbers
        for problem, texts in zip(problems, sampled.completions, strict=True):
            own = [text for text in texts if style_of(text) == style]
            hits.setdefault(problem.meta["group"], []).extend(chain_reward(own, [problem.answer] * len(own)))
        every = [right for rights in hits.values() for right in rights]
        found["sampled"][f"accuracy_{style}"] = sum(every) / len(every) if every else None
        found["sampled"][f"by_group_{style}"] = {str(n): [sum(hits[n]), len(hits[n])] for n in sorted(hits)}
    for recipe in args.recipes:
        from mxrl import convert

        model = loaded()
        convert(model, recipe)
        began = time.monotonic()
        result = evaluate(model, tokenizer, problems, **common)
        interval = paired_interval(result.scores, greedy.scores)
        found["recipes"][recipe] = {
            **result.to_dict(), "minus_bf16": list(interval), "seconds": round(time.monotonic() - began, 2)
        }  # fmt: skip
    return found


def starting_model(args: argparse.Namespace, tokens: int) -> Any:
    """Fresh weights, or those of --init; float32, with positions for examples of that many tokens."""
    if args.init:
        model = load_folder(resolve_model(args.init), dtype=torch.float32)[0]
        if model.config.vocab_size != len(ALPHABET) + 3:
            raise PolicyError(
                f"--init {args.init}: {model.config.vocab_size} tokens, not the {len(ALPHABET) + 3} of chains"
            )
    else:
        model = build_policy(args.kind, size=args.size, seed=args.seed)
    # rotary positions have no table: the number only says for how many tokens the policy is meant
    model.config.max_position_embeddings = max(model.config.max_position_embeddings, 256 * math.ceil(tokens / 256))
    return model


def brief(name: str, row: dict[str, Any]) -> str:
    groups = " ".join(f"{g}:{v['accuracy']:.3f}" for g, v in row["by_group"].items())
    styles = " ".join(f"{s} {share:.2f}" for s, share in row["styles"].items())
    return f"{name}: {row['accuracy']:.4f}  [{groups}]  {styles}  entropy {row['entropy_per_token']:.3f}"


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    difficulty = Difficulty(numbers=tuple(args.numbers), digits=tuple(args.digits))
    mixture = Mixture.load(args.mixture)
    folder, state_file = args.out / "policy", args.out / "state.pt"
    gpu = torch.cuda.get_device_name(args.device) if args.device.startswith("cuda") else None
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    record: dict[str, Any] = {
        "settings": settings, "mixture": {str(n): dict(row) for n, row in mixture.table.items()},
        "difficulty": asdict(difficulty), "torch": torch.__version__,
    }  # fmt: skip
    if not args.eval_only:
        began = time.monotonic()
        data = make_data(args, difficulty, mixture)
        record["data_seconds"] = round(time.monotonic() - began, 2)
        print(
            f"{len(data[0])} examples in {record['data_seconds']} s, mean {data[2].float().mean():.1f} tokens",
            flush=True,
        )
        model = starting_model(args, data[0].shape[1])
        if args.experts:
            model.set_experts_implementation(args.experts)
        record["provenance"] = provenance(gpu or args.device, "torch", "transformers")
        record["parameters"] = sum(p.numel() for p in model.parameters())
        with (args.out / "log.jsonl").open("a") as file:

            def log(row: dict[str, Any]) -> None:
                file.write(json.dumps(row) + "\n")
                file.flush()
                print(json.dumps(row), flush=True)

            record |= train(args, model, data, state_file, log)
        tokenizer = char_tokenizer()
        tokenizer.model_max_length = model.config.max_position_embeddings
        save_policy(model, tokenizer, folder)
    problems = chain_problems(seed=0, n=args.eval_n, split="test", difficulty=difficulty)
    record |= measure(args, folder, problems)
    if args.eval_only and (args.out / "eval.json").exists():  # what is known of the training stays
        earlier = json.loads((args.out / "eval.json").read_text())
        record = {**earlier, **record, "settings": earlier["settings"], "eval_settings": settings}
    if gpu:
        record["device"] = gpu
    temporary = args.out / ".eval.json"
    temporary.write_text(json.dumps(record))
    temporary.replace(args.out / "eval.json")
    state_file.unlink(missing_ok=True)
    for name in ("greedy", "sampled"):
        print(brief(name, record[name]))
    for recipe, row in record["recipes"].items():
        print(brief(recipe, row), "minus bf16 {:+.4f} [{:+.4f}, {:+.4f}]".format(*row["minus_bf16"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())

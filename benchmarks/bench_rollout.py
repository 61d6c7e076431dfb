"""Rollout: tokens a second of our engine and of Hugging Face's generate, bf16 and W4A4, on a random Qwen2.5-0.5B.

    python benchmarks/bench_rollout.py --device cuda
    python benchmarks/bench_rollout.py --device cpu         a small model, 16 prompts of 32 tokens, 32 new ones

    even       512 prompts of 128 tokens, 128 new tokens each: no sequence ends early
    ragged     2048 prompts of 16 to 128 tokens, 512 at a time, at most 128 new ones; one token in 32 ends a sequence.
               A static batch runs until its last sequence ends, an engine with slots takes the next prompt in

    hf static             model.generate, cache_implementation="static"; transformers compiles it by itself (CUDA)
    hf static, eager      the same with disable_compile=True
    generate, slots       mxrl.rl.rollout.sample's two engines: transformers' loop, and ours; both record each token's
                          log-probability, entropy and argmax, which `hf static` doesn't

Quantized weights are computed once, on entry to `rollout_weights`, and that is timed too. Tokens are the new ones that
were kept (end-of-sequence tokens included). Sampling at temperature 1 from the whole distribution, in bf16.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import qwen2
import torch
from measure import Operation, Row, measure, origin, pick_device, serving, write_rows
from targets import targets
from torch import Tensor
from transformers import GenerationConfig

import mxrl
from mxrl.nn import rollout_weights
from mxrl.rl.rollout import left_pad, sample

RECIPES = ("bf16", "mxfp4", "mxfp4+mbs+of")
ENGINES = {"even": ("hf static", "hf static, eager", "generate", "slots"), "ragged": ("hf static", "slots")}
PAD = 0


@dataclass(frozen=True)
class Case:
    name: str
    prompts: list[list[int]]
    new: int  # at most
    eos: list[int]
    batch: int  # sequences decoded together

    def __str__(self) -> str:
        lengths = sorted({len(p) for p in self.prompts})
        span = f"{lengths[0]}" if len(lengths) == 1 else f"{lengths[0]}–{lengths[-1]}"
        return f"{len(self.prompts)} prompts of {span} tokens, up to {self.new} new ones, {self.batch} at a time"


def cases(names: list[str], batch: int, prompt: int, new: int, vocab: int, seed: int) -> list[Case]:
    generator = torch.Generator().manual_seed(seed)

    def tokens(n: int) -> list[int]:
        return torch.randint(1, vocab, (n,), generator=generator).tolist()

    never = [vocab]  # no token has this id
    ends = torch.randperm(vocab - 1, generator=generator)[: max(4 * vocab // new, 1)].add(1).tolist()
    lengths = torch.randint(max(prompt // 8, 1), prompt + 1, (4 * batch,), generator=generator).tolist()
    made = {
        "even": Case("even", [tokens(prompt) for _ in range(batch)], new, never, batch),
        "ragged": Case("ragged", [tokens(n) for n in lengths], new, ends, batch),
    }
    return [made[name] for name in names]


def hugging_face(model: Any, case: Case, *, compiled: bool) -> int:
    """Tokens kept. model.generate with a static cache, a batch after the other."""
    device = next(model.parameters()).device
    torch.manual_seed(0)  # the same tokens in every round
    config = GenerationConfig(
        max_new_tokens=case.new, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=PAD,
        eos_token_id=case.eos if case.name == "ragged" else None, cache_implementation="static",
        disable_compile=not compiled,
    )  # fmt: skip
    kept = 0
    width = max(map(len, case.prompts))  # one shape for all batches: one compilation
    for start in range(0, len(case.prompts), case.batch):
        ids, mask = left_pad(case.prompts[start : start + case.batch], PAD, device)
        room = (width - ids.shape[1], 0)
        ids, mask = torch.nn.functional.pad(ids, room, value=PAD), torch.nn.functional.pad(mask, room)
        with torch.no_grad():
            out = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)[:, width:]
        kept += _kept(out, case.eos)
    return kept


def _kept(out: Tensor, eos: list[int]) -> int:
    """Tokens up to and with each row's first end-of-sequence token."""
    ended = torch.isin(out, torch.tensor(eos, device=out.device))
    return int((ended.cumsum(1) - ended.long() == 0).sum())


def ours(model: Any, case: Case, engine: str) -> int:
    drawn = sample(
        model, case.prompts, max_new_tokens=case.new, eos_token_id=case.eos, pad_token_id=PAD, seed=0,
        batch_size=case.batch, engine=engine,
    )  # fmt: skip
    return drawn.tokens


def operation(plain: Any, converted: Any, case: Case, engine: str, recipe: str) -> Operation:
    names: Row = {"engine": engine, "tokens": 0}
    model = plain if recipe == "bf16" else converted

    def draw() -> int:
        if engine.startswith("hf"):
            return hugging_face(model, case, compiled=engine == "hf static")
        return ours(model, case, engine)

    def run(i: int) -> None:
        held = contextlib.nullcontext() if recipe == "bf16" else rollout_weights(model)
        with held:
            names["tokens"] = draw()

    prepare: Callable[[], object] | None = None
    if recipe != "bf16":

        def prepare() -> None:
            mxrl.convert(converted, recipe)

    backend = serving(recipe, next(model.parameters()).device, torch.bfloat16)
    return Operation("rollout", run, recipe, backend, extra=names, prepare=prepare)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    qwen2.add_arguments(parser)
    parser.add_argument("--batch", type=int, help="default 512; on the CPU 16")
    parser.add_argument("--prompt", type=int, help="default 128; on the CPU 32")
    parser.add_argument("--new", type=int, help="default 128; on the CPU 32")
    parser.add_argument("--cases", nargs="+", choices=tuple(ENGINES), default=list(ENGINES))
    parser.add_argument("--engines", nargs="+", choices=ENGINES["even"], help="default: some in each case")
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="default benchmarks/results/rollout_DEVICE.jsonl")
    args = parser.parse_args()
    device = pick_device(args.device)
    out = args.out or Path(__file__).parent / "results" / f"rollout_{device.type}.jsonl"
    sizes = qwen2.shape(args, device)
    source = origin(device, args.seed)
    on_gpu = device.type == "cuda"
    batch, prompt, new = args.batch or (512 if on_gpu else 16), args.prompt or (128 if on_gpu else 32), args.new
    new = new or prompt
    dtype = torch.bfloat16
    plain, converted = (
        qwen2.build(sizes, device=device, dtype=dtype, seed=args.seed, positions=prompt + new).eval() for _ in range(2)
    )
    results: list[Row] = []
    for case in cases(args.cases, batch, prompt, new, sizes["vocab"], args.seed):
        print(f"{case.name}: {qwen2.described(sizes, plain)}; {case}, {source['device']}", flush=True)
        todo = []
        for engine in args.engines or ENGINES[case.name]:
            if engine == "hf static, eager" and not on_gpu:
                continue  # there `hf static` isn't compiled either
            recipes = args.recipes if engine == "slots" else ["bf16"]
            todo += [operation(plain, converted, case, engine, recipe) for recipe in recipes]
        common = {"benchmark": "rollout", "case": case.name, "workload": f"{qwen2.described(sizes, plain)}; {case}"}
        rows = measure(todo, device, rounds=args.rounds, slow_ms=float("inf"), common=common | source, warmups=1)
        for row, done in zip(rows, todo, strict=True):
            if "ms" in row:
                row |= {"tokens": done.extra["tokens"], "tokens/s": done.extra["tokens"] / row["ms"]["p50"] * 1e3}
                print(f"  {row['engine']:22s} {row['recipe']:24s} {row['tokens/s']:12,.0f} tokens/s", flush=True)
        results += rows
        write_rows(out, results)
    print("\n".join(targets(results, measured=True)))


if __name__ == "__main__":
    main()

"""A W4A4 training step against the same step unquantized, on a random Qwen2.5-0.5B: time, peak memory, bytes saved.

    python benchmarks/bench_train_step.py --device cuda
    python benchmarks/bench_train_step.py --device cpu      a small model, 4 sequences of 256 tokens

A step: 16 sequences of 1024 tokens in 2 micro-batches, each forward, policy-gradient loss on every token, backward;
then AdamW (fused on CUDA). Within a step the quantized weights are shared (`mxrl.nn.shared_weights`): quantized once,
not once a micro-batch. "bf16" is a model that was never converted, so it runs transformers' own code.

    autocast   bf16 computation over float32 master weights: what `mxrl train` does, the headline
    bf16       weights, gradients and AdamW's states in bf16
    fp32       everything in float32: what `mxrl train` does on a CPU

saved_bytes: what the decoder's forward pass keeps for the backward of one micro-batch, the parameters themselves and
the output head's part left out. peak_bytes: the allocator's peak over a step above what lies there between steps, the
weights and AdamW's states (CUDA).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
from pathlib import Path
from typing import Any

import qwen2
import torch
from measure import Operation, Row, absent, measure, origin, pick_device, serving, write_rows
from targets import targets
from torch import Tensor

import mxrl
from mxrl.nn import saved_bytes, shared_weights

RECIPES = (
    "bf16", "mxfp4", "mxfp4+pack_saved=True", "mxfp4+mbs", "mxfp4+of", "mxfp4+mbs+of", "mxfp4+mbs+of+pack_saved=True",
)  # fmt: skip
PRECISIONS = ("autocast", "bf16", "fp32")


class Step:
    """One model with its optimizer, and the step that is timed."""

    def __init__(self, model: Any, ids: Tensor, micro_batches: int, precision: str):
        self.model = model.train()
        self.micro_batches = ids.chunk(micro_batches)
        self.precision = precision
        fused = ids.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=fused)
        generator = torch.Generator(ids.device).manual_seed(1)
        advantages = torch.randn(ids.shape[0], 1, device=ids.device, generator=generator)
        self.advantages = advantages.chunk(micro_batches)
        self.recipe: str | None = None  # None: never converted

    def use(self, recipe: str) -> None:
        if self.recipe != recipe:
            mxrl.convert(self.model, recipe)
            self.recipe = recipe

    def autocast(self) -> contextlib.AbstractContextManager:
        if self.precision != "autocast":
            return contextlib.nullcontext()
        return torch.autocast(self.micro_batches[0].device.type, dtype=torch.bfloat16)

    def shared(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext() if self.recipe is None else shared_weights(self.model)

    def loss(self, ids: Tensor, advantages: Tensor) -> Tensor:
        """−mean advantage · log p(token): GRPO's at ratio 1."""
        logits = self.model(input_ids=ids, use_cache=False).logits[:, :-1]
        logp = -torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
        return -(logp.view(ids.shape[0], -1) * advantages).mean() / len(self.micro_batches)

    def run(self) -> None:
        with self.shared():
            for ids, advantages in zip(self.micro_batches, self.advantages, strict=True):
                with self.autocast():
                    loss = self.loss(ids, advantages)
                loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def saved(self) -> int:
        """Bytes that the decoder keeps for one micro-batch's backward pass."""
        with self.shared(), self.autocast(), saved_bytes(self.model) as saved:
            self.model.model(input_ids=self.micro_batches[0], use_cache=False)
        return saved.rest


def memory(step: Step, device: torch.device) -> Row:
    sizes = {"saved_bytes": step.saved()}
    if device.type == "cuda":
        step.run()  # AdamW's states come with the first step
        torch.cuda.synchronize()
        between = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step.run()
        torch.cuda.synchronize()
        sizes["peak_bytes"] = torch.cuda.max_memory_allocated() - between
    return sizes


def operations(plain: Step, converted: Step, recipes: list[str], device: torch.device) -> list[Operation]:
    out = []
    for recipe in recipes:
        step = plain if recipe == "bf16" else converted
        prepare = (lambda: None) if step is plain else (lambda r=recipe: converted.use(r))
        try:
            prepare()
            sizes = memory(step, device)
        except Exception as error:  # a recipe that can't run is a row that says why
            out.append(absent("train step", error, recipe=recipe))
            continue
        backend = serving(recipe, device, torch.float32 if step.precision == "fp32" else torch.bfloat16)
        out.append(Operation("train step", lambda i, s=step: s.run(), recipe, backend, extra=sizes, prepare=prepare))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    qwen2.add_arguments(parser)
    parser.add_argument("--sequences", type=int, help="default 16; on the CPU 4")
    parser.add_argument("--length", type=int, help="tokens each, default 1024; on the CPU 256")
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, help="default: autocast bf16; on the CPU fp32")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="default benchmarks/results/train_step_DEVICE.jsonl")
    args = parser.parse_args()
    device = pick_device(args.device)
    out = args.out or Path(__file__).parent / "results" / f"train_step_{device.type}.jsonl"
    on_gpu = device.type == "cuda"
    sequences, length = args.sequences or (16 if on_gpu else 4), args.length or (1024 if on_gpu else 256)
    sizes = qwen2.shape(args, device)
    source = origin(device, args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    ids = torch.randint(sizes["vocab"], (sequences, length), generator=generator).to(device)
    results: list[Row] = []
    for precision in args.precisions or (["autocast", "bf16"] if on_gpu else ["fp32"]):
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        models = [qwen2.build(sizes, device=device, dtype=dtype, seed=args.seed, positions=length) for _ in range(2)]
        workload = (
            f"{qwen2.described(sizes, models[0])}; {sequences} × {length} tokens, "
            f"{args.micro_batches} micro-batches, AdamW"
        )
        print(f"{precision}: {workload}, {source['device']}", flush=True)
        plain, converted = (Step(model, ids, args.micro_batches, precision) for model in models)
        common = {"benchmark": "train_step", "precision": precision, "workload": workload} | source
        todo = operations(plain, converted, args.recipes, device)
        results += measure(todo, device, rounds=args.rounds, slow_ms=float("inf"), common=common)
        write_rows(out, results)
        del models, plain, converted, todo
        gc.collect()  # modules and their hooks refer to each other
        if on_gpu:
            torch.cuda.empty_cache()
    print("\n".join(targets(results, measured=True)))


if __name__ == "__main__":
    main()

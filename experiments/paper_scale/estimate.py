"""How much memory and time a GRPO step of `mxrl train` takes, computed from a model's shape, before a GPU is rented.

    python experiments/paper_scale/estimate.py experiments/paper_scale/qwen2.5-3b.yaml    the tables of a configuration
    python experiments/paper_scale/estimate.py run.yaml --config models/qwen2.5-3b --prompt 160 --tokens 280

Memory of one GPU, P parameters of which Pq are quantized, N GPUs (FSDP2), all in bytes:

    always      weights 4P/N and AdamW 8P/N, float32
    rollout     + Q(w + noise) 2Pq; N > 1: the rest whole, 4(P − Pq); keys and values; logits of the slots
    update      + Q(w) 2Pq, whole on every GPU (shared by a step's passes); gradients; what FSDP2 has gathered;
                activations (all blocks', or with checkpointing every block's input and one block's); the head's tiles

    gradients   one GPU: 4P. Several: accelerate reduces them at the last pass of an update only, so with more than
                one pass they are kept whole, 4P; with one pass 4P/N (and a block's at a time)
    gathered    reshard: two blocks (one ahead) and the root's (embedding, head); else all, 4P

Time is from figures measured on one H200 (benchmarks/results/ranks_cuda.jsonl), scaled by FLOPs and bytes: `Speed`.
check.py compares both with what was measured. What isn't in it: traffic between GPUs beyond `WIRE`, evaluation, saving.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import mxrl
from mxrl.nn import ConvertError
from mxrl.nn.shard import decoder_blocks
from mxrl.recipes import Recipe
from mxrl.rl.config import ConfigError, TrainConfig

HERE = Path(__file__).parent
MEASURED = HERE.parents[1] / "benchmarks" / "results" / "ranks_cuda.jsonl"
GIB = 2**30
# what torch sees of a GPU sold as so many GB, and the share of it that an estimate may fill: the rest is CUDA's
# context, NCCL's buffers and the allocator's gaps. The share is chosen, not measured.
CARDS = {80: 79.1 * GIB, 141: 139.7 * GIB}
USABLE = 0.92
COUNTS = (1, 2, 4, 8, 16, 32)
HOST = 8  # GPUs of one host: beyond, `mxrl train` is untried (docs/several-gpus.md)
TILE = 4096, 32768  # tokens × vocabulary of TRL's fused head
FILL = 2 * 2**28  # bytes of whole master weights while a replica is filled
# assumed, not measured: what a GPU receives a second from others, of one host (NVLink), or of several (400 Gb/s a GPU)
WIRE = {"host": 150e9, "hosts": 40e9}
READ = 3.3e12  # bytes a second a decoding step reads of an H200's memory: .7 of 4.8e12; an H100's are taken alike


@dataclass(frozen=True)
class Shape:
    """What the estimate needs of a model; `Shape.of` counts it on a model built without memory."""

    parameters: int
    quantized: int
    block: int  # parameters of one decoder block
    layers: int
    hidden: int
    inner: int  # a dense MLP's, or one expert's
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    experts: int = 0
    active: int = 0  # experts a token
    qk_norm: bool = False
    tied: bool = False

    @classmethod
    def of(cls, config: Any, recipe: str = "mxfp4") -> Shape:
        """The shape of a Hugging Face configuration (or its folder), counted on "meta", converted as `recipe`."""
        if isinstance(config, str | Path):
            if not (Path(config) / "config.json").is_file():
                raise ConfigError(f"{config}: no config.json there")
            config = AutoConfig.from_pretrained(config)
        model = meta_model(config)
        report = mxrl.convert(model, "mxfp4" if not Recipe.parse(recipe).quantizes else recipe)
        blocks = decoder_blocks(model)
        experts = getattr(config, "num_experts", 0)
        heads = config.num_attention_heads
        return cls(
            parameters=report.parameters,
            quantized=report.quantized_parameters,
            block=sum(p.numel() for p in blocks[0].parameters()),
            layers=len(blocks),
            hidden=config.hidden_size,
            inner=config.moe_intermediate_size if experts else config.intermediate_size,
            heads=heads,
            kv_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            vocab=config.vocab_size,
            experts=experts,
            active=config.num_experts_per_tok if experts else 0,
            qk_norm=any(name.endswith("q_norm.weight") for name, _ in model.named_parameters()),
            tied=bool(config.tie_word_embeddings),
        )

    @property
    def root(self) -> int:
        """Parameters outside the blocks: embedding, last norm, head unless it is tied."""
        return self.parameters - self.layers * self.block

    @property
    def used(self) -> int:
        """Parameters that multiply one token: all but the embedding's rows and the experts that it doesn't go to."""
        idle = (self.experts - self.active) * 3 * self.inner * self.hidden * self.layers
        return self.parameters - idle - (0 if self.tied else self.vocab * self.hidden)

    @property
    def kv_bytes(self) -> int:
        """Keys and values of one token, bf16, all layers."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim


def meta_model(config: Any) -> Any:
    """The model of a configuration on "meta": names and shapes, no memory."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def saved_per_token(shape: Shape, recipe: str, row: int = 0) -> float:
    """Bytes that one block keeps a token for the backward pass, under bf16 autocast over float32 weights.

    row: tokens of a row (prompt and completion, padding included) where rows are padded: then transformers repeats keys
        and values for every head, and attention keeps its mask, 2·row bytes. 0: no padding.

        both norms            x and x/rms, float32                            2 · 8H
        q, k, v               Q(h); q, k after rotation, v; output, its sum   2H + 4q + 4kv + 4 · heads
        q and k normed        float32 and bf16 a head                         6q + 6kv
        o                     Q(o)                                            2q      bf16: attention's own output, 0
        gate, up, down        Q(h); gate, silu, up; Q(product)                2H + 8I
        experts (A a token)   the router's h; gate, silu, up, Q(product);     2H + 2H + A(8I + 2H)
                              output before it is weighted
    """
    parsed = Recipe.parse(recipe)
    wide = 2.0  # bytes an element of a kept Q(x): bf16, or codes and scales
    if parsed.pack_saved and parsed.activations == "a4":
        wide = 4.25 / 8
    h, q, kv = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    kept = 16 * h + 8 + wide * 2 * h
    kept += 4 * q + (4 * q + 2 * row if row else 4 * kv) + 4 * shape.heads
    kept += wide * q if parsed.quantizes and parsed.activations != "a16" else 0
    if shape.qk_norm:
        kept += 6 * (q + kv) + 4 * (shape.heads + shape.kv_heads)
    mlp = (6 + wide) * shape.inner
    if not shape.experts:
        return kept + mlp
    routing = 4 * shape.experts + 40 * shape.active  # softmax; indices, weights and their sum
    return kept + 2 * h + shape.active * (mlp + 2 * h) + routing


@dataclass(frozen=True)
class Memory:
    """Bytes of one GPU by what they are for, in the rollout and in the update."""

    rollout: dict[str, float]
    update: dict[str, float]

    @property
    def peak(self) -> float:
        return max(sum(self.rollout.values()), sum(self.update.values()))


def host(shape: Shape, gpus: int) -> dict[str, float]:
    """Bytes of one host's memory (every process reads the whole model in float32; the first one gathers a checkpoint of
    weights and AdamW's states), and of a checkpoint on disk."""
    return {"loading": 4 * shape.parameters * min(gpus, HOST), "checkpoint": 12 * shape.parameters}


def resharded(shape: Shape, config: TrainConfig, card: float) -> bool:
    """As the trainer decides it: asked for, or the float32 weights take more than a quarter of the GPU."""
    return config.reshard if config.reshard is not None else 16 * shape.parameters > card


def memory(
    shape: Shape, config: TrainConfig, gpus: int, *, prompt: int, new: int, slots: int, card: float,
    padded: bool = True,
) -> Memory:  # fmt: skip
    """What a GPU holds at its fullest in each phase.

    prompt, new: tokens of the longest row. slots: sequences decoded together by one GPU. padded: rows differ in length.
    Between the passes of an update FSDP2 keeps gradients whole; mxrl reduces them after every pass where it reshards.
    """
    micro, passes = config.batches("cuda", gpus)
    p, pq = shape.parameters, shape.quantized
    row = prompt + new
    tokens = micro * row
    held = {"weights": 4 * p / gpus, "AdamW": 8 * p / gpus}
    rollout = held | {
        "quantized weights": 2 * pq,
        "the rest whole": 4 * (p - pq) + FILL if gpus > 1 else 0,
        "keys, values": slots * row * shape.kv_bytes,
        "logits": slots * shape.vocab * 6,
    }
    one = saved_per_token(shape, config.recipe, row if padded else 0) * tokens
    if config.gradient_checkpointing:
        activations = shape.layers * 4 * shape.hidden * tokens + one
    else:
        activations = shape.layers * one
    if gpus == 1:
        gradients, gathered = 4 * p, 0
    else:
        reshard = resharded(shape, config, card)
        whole = passes > 1 and not reshard
        gradients = 4 * p if whole else 4 * p / gpus + 4 * max(shape.block, shape.root)
        gathered = 4 * (2 * shape.block + shape.root) if reshard else 4 * p
    scored = micro * new  # the head scores completions only
    head = 4 * shape.vocab * shape.hidden + 8 * scored * shape.hidden
    head += 2 * min(scored, TILE[0]) * min(shape.vocab, TILE[1])
    # without quantization autocast's bf16 copies take its place, which checkpointing makes block by block
    all_at_once = Recipe.parse(config.recipe).quantizes or not config.gradient_checkpointing
    quantized = 2 * pq if all_at_once else 2 * shape.block
    update = held | {
        "quantized weights": quantized,
        "gradients": gradients,
        "gathered": gathered,
        "activations": activations + 8 * shape.hidden * tokens,
        "head": head,
    }
    return Memory(rollout, update)


@dataclass(frozen=True)
class Speed:
    """What one H200 did at .5 B and .9 B parameters; larger GEMMs are faster, so this errs to the slow side.

    train, score, decode: FLOP a second (2 a used parameter and token; training 6). latency: seconds a layer and
    decoding step, whatever the number of rows.
    """

    train: float
    score: float
    decode: float
    latency: float
    rows: int  # how many measured rows it is from

    @classmethod
    def measured(cls, file: Path = MEASURED, model: str = "dense") -> Speed:
        rows = measured_rows(file, model, processes=1)
        shape = bench_shape(model)
        steps = [r for r in rows if r["op"] == "step" and r["recipe"] != "bf16"]
        train = [6 * shape.used * r["trained_tokens"] / r["seconds"]["update"] for r in steps]
        score = [2 * shape.used * r["trained_tokens"] / r["seconds"]["score"] for r in steps]
        decode = [r for r in rows if r["op"] == "decode"]
        # seconds of a decoding step = latency · layers + reading weights and cache + FLOPs / decode: a line in the rows
        at_once = np.array([r["slots"] or r["sequences"] for r in decode], float)
        waves = np.array([r["sequences"] for r in decode]) / at_once
        seconds = np.array([r["seconds"]["rollout"] / r["new"] for r in decode]) / waves
        read = (2 * shape.quantized + at_once * (decode[0]["prompt"] + decode[0]["new"] / 2) * shape.kv_bytes) / READ
        slope, start = np.polyfit(at_once, seconds - read, 1)
        mean = lambda values: float(np.mean(values))  # noqa: E731
        return cls(mean(train), mean(score), 2 * shape.used / slope, max(start, 0.0) / shape.layers, len(rows))


def seconds(
    shape: Shape, config: TrainConfig, gpus: int, speed: Speed, *, prompt: int, tokens: float, slots: int, card: float
) -> dict[str, float]:  # fmt: skip
    """Seconds of a step's phases. tokens: of a mean completion; the longest one is taken to reach the limit."""
    longest = config.max_new_tokens or 300
    share = config.sequences / gpus
    steps = max(longest, share * tokens / slots)
    busy = share * tokens / steps  # rows that a mean decoding step still has
    read = (2 * shape.quantized + busy * (prompt + tokens / 2) * shape.kv_bytes) / READ
    rollout = steps * (shape.layers * speed.latency + read) + share * tokens * 2 * shape.used / speed.decode
    attention = 2 * shape.layers * shape.heads * shape.head_dim * (prompt + tokens)  # QKᵀ and PV, causal
    trained = share * (prompt + tokens) * (2 * shape.used + attention)
    passes = config.batches("cuda", gpus)[1] * config.updates
    gathers = 0.0
    if gpus > 1:
        reshard = resharded(shape, config, card)
        moved = 4 * shape.parameters * (gpus - 1) / gpus
        reduced = passes if reshard else config.updates
        times = 2 + (passes * 2 if reshard else config.updates) + reduced  # rollout, score; passes; gradients
        gathers = moved * times / (WIRE["host"] if gpus <= HOST else WIRE["hosts"])
    again = 4 / 3 if config.gradient_checkpointing else 1.0
    return {
        "rollout": rollout,
        "score": trained / speed.score,
        "update": 3 * trained * config.iterations * again / speed.train,
        "traffic": gathers,
    }


# --- what was measured ------------------------------------------------------------------------------------------------


def bench_shape(model: str) -> Shape:
    """The shape of benchmarks/bench_ranks.py's models (they are repeated here: a benchmark is no module)."""
    from transformers import Qwen2Config, Qwen3MoeConfig

    if model == "dense":
        return Shape.of(
            Qwen2Config(vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
                        num_attention_heads=14, num_key_value_heads=2, tie_word_embeddings=True)
        )  # fmt: skip
    sizes: dict[str, Any] = {
        "vocab_size": 32768, "hidden_size": 1024, "moe_intermediate_size": 512, "num_hidden_layers": 16,
        "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "num_experts": 32,
        "num_experts_per_tok": 4, "tie_word_embeddings": True, "intermediate_size": 512, "decoder_sparse_step": 1,
    }  # fmt: skip
    return Shape.of(Qwen3MoeConfig(**sizes))


def measured_rows(file: Path, model: str, processes: int | None = None) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [r for r in rows if r["model"] == model and processes in (None, r["processes"])]


def bench_config(row: dict[str, Any]) -> TrainConfig:
    """A measured step as a configuration."""
    return TrainConfig(
        recipe=row["recipe"], prompts_per_step=row["sequences"] // row["group"], samples_per_prompt=row["group"],
        micro_batch=row["micro"], max_new_tokens=row["new"], reshard=row["reshard"], iterations=1,
    )  # fmt: skip


# --- which of a configuration's sizes fit -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Fit:
    """A configuration on `gpus` GPUs: the largest micro-batch and number of slots that fit, or what is missing."""

    gpus: int
    micro: int
    passes: int
    slots: int
    memory: Memory
    seconds: dict[str, float]
    fits: bool


def fit(
    shape: Shape, config: TrainConfig, gpus: int, size: int, speed: Speed, *, prompt: int, tokens: float
) -> Fit:  # fmt: skip
    """Try micro-batches and slots from the configuration's down, by halves, and last an update's share in one pass.

    One pass is another case: gradients aren't kept whole. If none fits, the smallest ones are returned.
    """
    new = config.max_new_tokens or 300
    room = CARDS[size] * USABLE
    share = config.sequences // gpus
    options = {"prompt": prompt, "new": new, "card": CARDS[size]}
    most = min(config.micro_batch or share, share)
    micros = [most >> i for i in range(int(math.log2(most)) + 1)]
    one_pass = config.sequences // config.updates_per_rollout // gpus
    widest = min(config.rollout_batch or share, share)
    slots = [widest >> i for i in range(int(math.log2(widest)) + 1)]
    for micro in (*micros, one_pass, 1):
        candidate = dataclasses.replace(config, micro_batch=micro)
        found = memory(shape, candidate, gpus, slots=slots[-1], **options)
        if sum(found.update.values()) <= room:
            break
    for count in slots:
        found = memory(shape, candidate, gpus, slots=count, **options)
        if sum(found.rollout.values()) <= room:
            break
    took = seconds(shape, candidate, gpus, speed, prompt=prompt, tokens=tokens, slots=count, card=CARDS[size])
    micro, passes = candidate.batches("cuda", gpus)
    return Fit(gpus, micro, passes, count, found, took, found.peak <= room)


def table(shape: Shape, config: TrainConfig, speed: Speed, *, prompt: int, tokens: float) -> str:
    """Markdown: a line for each number of GPUs and size of them."""
    lines = [
        "| GPUs | fits | micro-batch × passes | slots | rollout, GB | update, GB | rollout, s | score, s | update, s "
        "| traffic, s | a step, s |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for size in CARDS:
        for gpus in COUNTS:
            try:
                f = fit(shape, config, gpus, size, speed, prompt=prompt, tokens=tokens)
            except ConfigError:
                continue
            parts = [f.seconds[name] for name in ("rollout", "score", "update", "traffic")]
            times = [f"{s:.0f}" for s in (*parts, sum(parts))] if f.fits else ["–"] * 5
            sums = [f"{sum(x.values()) / 1e9:.0f}" for x in (f.memory.rollout, f.memory.update)]
            says = ("yes" if gpus <= HOST else "yes, untried") if f.fits else "no"
            cells = [f"{gpus} × {size} GB", says, f"{f.micro} × {f.passes}", f"{f.slots}", *sums, *times]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def breakdown(shape: Shape, config: TrainConfig, gpus: int, size: int, speed: Speed, **lengths: float) -> str:
    """Markdown: one GPU's bytes by what they are for."""
    f = fit(shape, config, gpus, size, speed, **lengths)  # type: ignore[arg-type]
    lines = [f"| GB a GPU, {gpus} × {size} GB | rollout | update |", "|---|---|---|"]
    for name in dict.fromkeys((*f.memory.rollout, *f.memory.update)):
        values = [x.get(name, 0) / 1e9 for x in (f.memory.rollout, f.memory.update)]
        lines.append(f"| {name} | {values[0]:.1f} | {values[1]:.1f} |")
    sums = [sum(x.values()) / 1e9 for x in (f.memory.rollout, f.memory.update)]
    return "\n".join([*lines, f"| together, of {CARDS[size] * USABLE / 1e9:.0f} | {sums[0]:.1f} | {sums[1]:.1f} |"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("yaml", type=Path, help="a configuration of mxrl train")
    parser.add_argument("--config", type=Path, help="the model's folder (default: models/ and the YAML's name)")
    parser.add_argument("--prompt", type=int, default=160, help="tokens of a prompt")
    parser.add_argument("--tokens", type=float, default=280, help="tokens of a mean completion")
    args = parser.parse_args()
    try:
        config = TrainConfig.from_options(args.yaml)
        shape = Shape.of(args.config or HERE / "models" / args.yaml.stem, config.recipe)
    except (ConfigError, ConvertError) as error:
        sys.exit(f"estimate.py: {error}")
    speed = Speed.measured(model="moe" if shape.experts else "dense")
    lengths = {"prompt": args.prompt, "tokens": args.tokens}
    print(f"{shape.parameters:,} parameters, {shape.quantized:,} quantized, {shape.used:,} used a token")
    print(table(shape, config, speed, **lengths))
    print()
    print(breakdown(shape, config, HOST, 141, speed, **lengths))


if __name__ == "__main__":
    main()

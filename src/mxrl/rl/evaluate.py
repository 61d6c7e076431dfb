"""Accuracy of a policy on problems, per problem, so that two policies can be compared *paired*.

    greedy  = evaluate(model, tokenizer, problems)                      one completion a problem
    sampled = evaluate(model, tokenizer, problems, samples=8, temperature=1.0)
    paired_interval(greedy.scores, other.scores)                        difference and its 95 % interval

Paired, because recipes are compared on the same problems: with per-problem differences `d_i = a_i − b_i`, the standard
error is `sd(d)/√n`, which is smaller than the unpaired one by what the two policies share.

The entropy is that of the policy at the sampling temperature (1 for greedy), in nats a token, averaged over the tokens
it generated. Decoding is `rollout.sample`, with the weights of a converted model quantized once.

Several processes (`group`): each decodes a share of the completions and all get the whole result. A completion is drawn
from (seed, its place among all), so the result is one process's, but for the rounding of GEMMs of other shapes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev
from typing import Any, Literal, NamedTuple

import numpy as np
import torch.distributed as dist

from mxrl.nn import quantized_layers, rollout_weights
from mxrl.rl.chain import Problem
from mxrl.rl.rewards import Reward
from mxrl.rl.rollout import end_ids, pad_id, sample


class Decoded(NamedTuple):
    """Completions without special tokens; tokens of each (end token included), entropy sum of each, finished or cut."""

    texts: list[str]
    tokens: list[int]
    entropy: list[float]
    finished: list[bool]


@dataclass(frozen=True)
class Evaluation:
    """What `evaluate` found; `scores[i]` is problem i's mean reward over its samples, in the problems' order."""

    scores: list[float]
    completions: list[list[str]]
    groups: list[Any]
    entropy: float
    mean_tokens: float
    truncated: float
    styles: dict[str, float]

    @property
    def accuracy(self) -> float:
        """Mean of the scores, 0 … 1."""
        return fmean(self.scores)

    @property
    def distinct(self) -> float:
        """Mean number of different completions a problem."""
        return fmean(len(set(texts)) for texts in self.completions)

    def by_group(self) -> dict[Any, tuple[float, int]]:
        """Accuracy and number of problems, by `meta["group"]` (chain: how many numbers)."""
        rows: dict[Any, list[float]] = {}
        for group, score in zip(self.groups, self.scores, strict=True):
            rows.setdefault(group, []).append(score)
        return {g: (fmean(rows[g]), len(rows[g])) for g in sorted(rows, key=lambda g: (g is None, str(g)))}

    def to_dict(self) -> dict[str, Any]:
        """Numbers and per-problem scores for a JSON file; completions are left out."""
        return {
            "accuracy": self.accuracy,
            "n": len(self.scores),
            "samples": len(self.completions[0]),
            "by_group": {str(g): {"accuracy": a, "n": n} for g, (a, n) in self.by_group().items()},
            "entropy_per_token": self.entropy,
            "mean_tokens": self.mean_tokens,
            "truncated": self.truncated,
            "distinct": self.distinct,
            "styles": self.styles,
            "scores": [round(score, 6) for score in self.scores],
        }


def prompt_ids(problem: Problem, tokenizer: Any) -> list[int]:
    """The prompt as in training: chat messages by the tokenizer's chat template, text with what it adds by itself."""
    if isinstance(problem.prompt, str):
        return tokenizer(problem.prompt)["input_ids"]
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("the problem's prompt is a chat, but the tokenizer has no chat template")
    text = tokenizer.apply_chat_template(problem.prompt, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def decode(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str | Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    batch_size: int = 1024,
    first_row: int = 0,
) -> Decoded:
    """Complete prompts, texts or token ids, in batches, in the given order. `temperature=0` is greedy.

    model: converted or not; where its layers hold a rollout's weights already, those are used (`rollout_weights`, or a
        `Replica` that is filled), else each weight is quantized once here.
    Prompt i is drawn from `seed` and first_row + i; the global random state is left as it was.
    """
    if temperature < 0:
        raise ValueError(f"temperature={temperature} must be >= 0 (0 is greedy)")
    ends = end_ids(model, tokenizer)
    ids = [tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else list(prompt) for prompt in prompts]
    layers = list(quantized_layers(model))
    # the weights don't change here, so a converted model quantizes each once, not once a token
    with rollout_weights(model) if layers and not any(layer.holds for layer in layers) else nullcontext():
        out = sample(
            model, ids,
            max_new_tokens=max_new_tokens, eos_token_id=ends, pad_token_id=pad_id(tokenizer),
            temperature=temperature or 1.0, greedy=temperature == 0, seed=seed, batch_size=batch_size,
            first_row=first_row,
        )  # fmt: skip
    completions = out.completions()
    return Decoded(
        texts=tokenizer.batch_decode(completions, skip_special_tokens=True),
        tokens=[len(row) for row in completions],
        entropy=out.entropies.sum(1).tolist(),
        finished=[row[-1] in ends for row in completions],
    )


def evaluate(
    model: Any,
    tokenizer: Any,
    problems: Sequence[Problem],
    *,
    reward: Reward,
    max_new_tokens: int,
    samples: int = 1,
    temperature: float = 0.0,
    seed: int = 0,
    batch_size: int = 1024,
    style: Callable[[str], str] | None = None,
    group: dist.ProcessGroup | None = None,
) -> Evaluation:
    """Decode every problem `samples` times and judge it with `reward`; `style` names a completion's style.

    group: every rank of it calls with the same arguments, decodes a contiguous share of the completions (at most one
        more than another's) with its own copy of the weights, and gets the whole Evaluation. A model that FSDP2 has
        sharded comes as the model of its `Replica`, filled. None: this process decodes everything.
    """
    if not problems:
        raise ValueError("no problems to evaluate on")
    if samples < 1 or (samples > 1 and temperature == 0):
        raise ValueError(f"samples={samples} at temperature {temperature}: greedy decoding has one completion")
    prompts = [ids for problem in problems for ids in [prompt_ids(problem, tokenizer)] * samples]
    rank, ranks = (0, 1) if group is None else (group.rank(), group.size())
    share = slice(len(prompts) * rank // ranks, len(prompts) * (rank + 1) // ranks)
    out = Decoded([], [], [], [])
    if prompts[share]:
        out = decode(
            model, tokenizer, prompts[share],
            max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, batch_size=batch_size,
            first_row=share.start,
        )  # fmt: skip
    if group is not None:
        out = _gathered(out, group)
    answers = [problem.answer for problem in problems for _ in range(samples)]
    rewards = reward(out.texts, answers)
    starts = range(0, len(prompts), samples)
    styles = Counter(style(text) for text in out.texts) if style else {}
    return Evaluation(
        scores=[fmean(rewards[i : i + samples]) for i in starts],
        completions=[out.texts[i : i + samples] for i in starts],
        groups=[problem.meta.get("group") for problem in problems],
        entropy=sum(out.entropy) / max(1, sum(out.tokens)),
        mean_tokens=fmean(out.tokens),
        truncated=1 - fmean(out.finished),
        styles={name: count / len(prompts) for name, count in sorted(styles.items())},
    )


def _gathered(mine: Decoded, group: dist.ProcessGroup) -> Decoded:
    """What all ranks decoded, in their order."""
    parts: list[Any] = [None] * group.size()
    dist.all_gather_object(parts, mine, group)
    return Decoded(*([value for part in parts for value in part[i]] for i in range(len(mine))))


class Interval(NamedTuple):
    """A mean difference and the two ends of its confidence interval."""

    difference: float
    low: float
    high: float

    @property
    def decided(self) -> bool:
        """Whether zero lies outside."""
        return not self.low <= 0 <= self.high


def paired_interval(
    a: Sequence[float],
    b: Sequence[float],
    *,
    method: Literal["normal", "bootstrap"] = "normal",
    confidence: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> Interval:
    """`mean(a − b)` over the same problems, with its interval.

    `normal`: ± z·sd(d)/√n. `bootstrap`: percentiles of the mean over resampled problems (seeded).
    It says how far the *problems* could have moved the difference, not how far another training seed would.
    """
    if len(a) != len(b):
        raise ValueError(f"paired scores must be of the same problems: {len(a)} and {len(b)} differ")
    if len(a) < 2:
        raise ValueError("an interval takes at least two problems")
    differences = [x - y for x, y in zip(a, b, strict=True)]
    mean = fmean(differences)
    if method == "normal":
        half = NormalDist().inv_cdf(0.5 + confidence / 2) * stdev(differences) / math.sqrt(len(differences))
        return Interval(mean, mean - half, mean + half)
    if method != "bootstrap":
        raise ValueError(f"unknown method '{method}'; possible: normal, bootstrap")
    rng = np.random.default_rng(seed)
    d = np.asarray(differences)
    # Differences take few values (−1, 0, 1 for single completions): resampling their counts is the same, and fast.
    values, counts = np.unique(d, return_counts=True)
    means = rng.multinomial(len(d), counts / len(d), size=resamples) @ values / len(d)
    low, high = np.quantile(means, [0.5 - confidence / 2, 0.5 + confidence / 2])
    return Interval(mean, float(low), float(high))

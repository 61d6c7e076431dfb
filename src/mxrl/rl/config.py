"""The configuration of a GRPO run: one flat, frozen object, from Python, a YAML file or the command line.

    TrainConfig.from_options("run.yaml", recipe="mxfp4+mbs+of", lr=2e-4)     the file, then the options over it

A *step* is one rollout of prompts_per_step × samples_per_prompt completions and the updates made from it. What decides
the objective (loss, clip range, β = 0, TIS, updates a rollout) is here with its value, and printed when a run starts.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from mxrl.recipes import Recipe, RecipeError

CONFIG, METRICS, EVALS, SUMMARY = "config.yaml", "metrics.jsonl", "evals.jsonl", "summary.json"  # of a run's folder


class ConfigError(ValueError):
    """A configuration that can't be: one line that names the option and what would work."""


@dataclass(frozen=True)
class TrainConfig:
    """See the module. Defaults suit the shipped policies of a few million parameters (`policy:dense`, `policy:moe`)."""

    recipe: str = "mxfp4+mbs+of+aqn"
    model: str = "policy:dense"  # or policy:moe, a Hugging Face folder, a hub id
    task: str = "chain"
    task_options: dict[str, Any] = field(default_factory=dict)
    out: str = "runs/train"
    seed: int = 0  # of the problems, their order, the samples and AQN's noise
    steps: int = 100
    # the rollout
    prompts_per_step: int = 64
    samples_per_prompt: int = 8
    temperature: float = 1.0
    max_new_tokens: int | None = None  # None: 128 for chain, 300 for the others
    score: str = "decode"  # where the rollout's log-probabilities come from: decode, or forward (training's own pass)
    rollout_batch: int | None = None  # sequences decoded together; None: all of a step's
    # the objective
    loss: str = "dapo"
    scale_rewards: str = "group"
    clip: float = 0.2
    clip_high: float = 0.2
    tis_cap: float = 2.0
    updates_per_rollout: int = 1  # mini-batches that a step's samples are split into
    iterations: int = 1  # passes over a step's samples
    # the optimizer: AdamW, constant learning rate after the warm-up
    lr: float = 1e-4
    warmup: int = 0  # optimizer steps
    beta2: float = 0.99
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    micro_batch: int | None = None  # sequences a forward-backward pass; None: 1024 on a GPU, 64 on a CPU
    # what is trained
    lora_rank: int = 0  # 0: all weights; else adapters of this rank on the quantized layers, which stay frozen
    lora_alpha: float | None = None  # the adapter's output is scaled by alpha / rank; None: 2 × rank
    # numbers and devices
    device: str = "auto"  # cuda where there is one
    precision: str = "auto"  # bf16 (autocast over float32 master weights) on a GPU that has it, else fp32
    lm_head_fp32: bool = False
    gradient_checkpointing: bool = False
    deterministic: bool = False  # on a GPU: the same run twice, bit by bit, and so a resumed one; slower
    reshard: bool | None = None  # several processes: gather weights for each pass, not once a step; None: by size
    # measuring and keeping
    eval_every: int = 20  # steps; greedy accuracy on held-out problems, also before and after; 0: only those two
    eval_problems: int = 512  # 0: no evaluation at all
    eval_seed: int = 0  # of the held-out problems: the same for every run that is to be compared
    eval_batch: int = 1024
    eval_samples: int = 0  # completions a held-out problem that the first and last evaluation also draw; 0: none
    monitor_every: int = 20  # steps; weights' ErrorStats, logit noise, decoding gap; 0: never
    stop_collapsed: bool = True  # end a run whose policy has collapsed (rl/collapse.py); the best checkpoint is kept
    save_every: int = 25  # steps; 0: no checkpoints, so no resuming either
    save_model: bool = True  # the trained policy, as a Hugging Face folder

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            object.__setattr__(self, f.name, _typed(f.name, getattr(self, f.name)))
        Recipe.parse(self.recipe)
        for name, (possible, words) in NUMBERS.items():
            value = getattr(self, name)
            if value is not None and not (possible(value) and value < math.inf):
                raise ConfigError(f"{name}={value} must {words}")
        for name in ("model", "task", "out"):
            if not getattr(self, name):
                raise ConfigError(f"{name}='' is empty; leave it out for '{getattr(TrainConfig, name)}'")
        if self.lora_alpha is not None and not self.lora_rank:
            raise ConfigError(
                f"lora_alpha={self.lora_alpha:g} needs lora_rank: with rank 0 there is no adapter to scale"
            )
        if self.samples_per_prompt < 2:
            raise ConfigError(f"samples_per_prompt={self.samples_per_prompt}: advantages need at least 2 in a group")
        for name, options in CHOICES.items():
            if getattr(self, name) not in options:
                near = _near(str(getattr(self, name)), options)
                raise ConfigError(f"{name}='{getattr(self, name)}'{near} is none of {', '.join(options)}")
        if self.sequences % self.updates_per_rollout:
            raise ConfigError(
                f"updates_per_rollout={self.updates_per_rollout} does not divide a step's {self.sequences} samples "
                f"({self.prompts_per_step} × {self.samples_per_prompt})"
            )

    @property
    def sequences(self) -> int:
        """Completions a step."""
        return self.prompts_per_step * self.samples_per_prompt

    @property
    def updates(self) -> int:
        """Optimizer steps a step."""
        return self.updates_per_rollout * self.iterations

    def batches(self, device: str, processes: int = 1) -> tuple[int, int]:
        """(sequences a forward-backward pass, passes an update) of each process: as many as `micro_batch` allows.

        Raises ConfigError where the processes can't have equal shares of whole groups.
        """
        if self.prompts_per_step % processes:
            raise ConfigError(
                f"prompts_per_step={self.prompts_per_step} can't be shared by {processes} processes: "
                f"use a multiple of {processes}"
            )
        update = self.sequences // self.updates_per_rollout
        if update % processes:
            raise ConfigError(
                f"updates_per_rollout={self.updates_per_rollout} leaves {update} samples an update, which {processes} "
                "processes can't share; use fewer updates"
            )
        share = update // processes
        most = min(share, self.micro_batch or (1024 if device == "cuda" else 64))
        micro = next(n for n in range(most, 0, -1) if share % n == 0)
        return micro, share // micro

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_options(cls, config: str | Path | None = None, **options: Any) -> TrainConfig:
        """A YAML file's options (if given), then the keyword options over them; None means "not given".

        Values may be strings, as a command line has them. A section `run` (in the config.yaml of a run) is ignored.
        Raises ConfigError for a file that can't be read, an unknown option, or a value of the wrong kind.
        """
        values = _read(config) if config is not None else {}
        values.pop("run", None)
        options = {name: value for name, value in options.items() if value is not None}
        values.update(options)
        known = [f.name for f in dataclasses.fields(cls)]
        for name in values:
            if name not in known:
                where = f"{config}: " if config is not None and name not in options else ""
                near = _near(str(name), known)
                raise ConfigError(f"{where}unknown option {name!r}{near}; possible: {', '.join(known)}")
        try:
            return cls(**values)
        except (ConfigError, RecipeError) as error:
            if config is None or _refusal(options) == str(error):  # said without the file as well
                raise
            raise ConfigError(f"{config}: {error}") from None


def _refusal(options: dict[str, Any]) -> str:
    """Why there is no configuration of these options; empty where there is."""
    try:
        TrainConfig(**options)
    except (ConfigError, RecipeError) as error:
        return str(error)
    return ""


_POSITIVE = (lambda value: value > 0, "be positive")
_NOT_NEGATIVE = (lambda value: value >= 0, "not be negative")
_SEED = (lambda value: 0 <= value < 2**32, "be in 0 … 4294967295")  # NumPy's seeds, which transformers sets
# which values an option may have, and how that is said; none may be infinite (and NaN is in no range)
NUMBERS: dict[str, tuple[Callable[[float], bool], str]] = {
    **dict.fromkeys(
        ("steps", "prompts_per_step", "rollout_batch", "updates_per_rollout", "iterations", "micro_batch",
         "max_new_tokens", "eval_batch"), _POSITIVE,
    ),
    **dict.fromkeys(
        ("eval_every", "eval_problems", "eval_samples", "monitor_every", "save_every", "warmup", "lora_rank"),
        _NOT_NEGATIVE,
    ),
    **dict.fromkeys(("lr", "tis_cap", "lora_alpha"), (_POSITIVE[0], "be positive and finite")),
    **dict.fromkeys(("clip", "clip_high", "weight_decay"), (_NOT_NEGATIVE[0], "be 0 or more, and finite")),
    "max_grad_norm": (_NOT_NEGATIVE[0], "be 0 (no clipping) or more, and finite"),
    "beta2": (lambda value: 0 <= value < 1, "be in [0, 1)"),
    "temperature": (lambda value: 1e-3 <= value <= 1e3, "be in 0.001 … 1000"),  # logits divided by it stay finite
    "seed": _SEED,
    "eval_seed": _SEED,
}  # fmt: skip
CHOICES = {
    "device": ("auto", "cpu", "cuda"),
    "precision": ("auto", "bf16", "fp32"),
    "score": ("decode", "forward"),
    "loss": ("grpo", "dapo", "dr_grpo", "bnpo"),
    "scale_rewards": ("group", "batch", "none"),
}


def _near(value: str, options: typing.Iterable[str]) -> str:
    near = difflib.get_close_matches(value, list(options), n=1)
    return f" (did you mean '{near[0]}'?)" if near else ""


class _Loader(yaml.SafeLoader):
    """YAML without dates: `out: 2026-01-31` is text."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _read(path: str | Path) -> dict[str, Any]:
    try:
        values = yaml.load(Path(path).read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise ConfigError(f"{path}: can't be read ({error.strerror})") from None
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{path}{line}: not YAML ({error.problem or error.context})") from None
    except (UnicodeDecodeError, yaml.YAMLError):  # a character that YAML doesn't have, otherwise
        raise ConfigError(f"{path}: not a text file; expected lines of 'option: value'") from None
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply; expected lines of 'option: value'") from None
    except (ValueError, LookupError, AttributeError) as error:  # from a tag: !!int x, !!bool x, !!timestamp x
        raise ConfigError(f"{path}: holds a value that YAML can't make of its text ({error})") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected lines of 'option: value'")
    return values


def _typed(name: str, value: Any) -> Any:
    """`value` as the field's type; YAML and command lines give "1e-4" as text."""
    hint = typing.get_type_hints(TrainConfig)[name]
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and type(None) in kinds:
        return None
    kind = next(typing.get_origin(k) or k for k in kinds if k is not type(None))
    original = value
    if isinstance(value, str) and kind is not str:
        try:
            value = yaml.safe_load(value)
            value = float(value) if kind is float else value
        except (yaml.YAMLError, ValueError, TypeError, OverflowError, RecursionError):
            value = original
        if value is None and type(None) in kinds:
            return None
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        words = {int: "a whole number", float: "a number", bool: "true or false", dict: "a mapping", str: "text"}
        raise ConfigError(f"{name}={original!r} must be {words[kind]}")
    return value

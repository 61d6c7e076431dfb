"""The six probes by name, and one or all of them on one model: what each is given, and what comes out together.

    settings = settings_of("all", "policy:dense")
    subject = opened(settings)                     once, with as many prompts as the greediest probe takes
    for name in settings.probes:
        if not unfit(name, subject, settings): results[name] = run(name, subject, settings, progress)
    together(results)                              {"matrix", "claims"}

Every probe has its own number of prompts, of the same list from its beginning: decoding 13 times is dearer than a
forward pass. Defaults are such that all of them take minutes on the shipped policies and two cores.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mxrl.probes.claims import claims
from mxrl.probes.matrix import Result, matrix
from mxrl.probes.subject import DTYPES, ProbeError, Subject, open_subject
from mxrl.probes.treatments import Treatment, TreatmentError, treatments
from mxrl.recipes import Recipe, RecipeError
from mxrl.rl.policy import POLICY_PREFIX
from mxrl.rl.tasks import TaskError, parse_task
from mxrl.scan_workers import OptionError, devices_of

ALL = "all"
RECIPES = ("mxfp4", "mxfp4+mbs", "mxfp4+of", "mxfp4+mbs+of")


@dataclass(frozen=True)
class Probe:
    """One probe: `mxrl.probes.NAME.NAME(subject, treatments, progress=…)`.

    prompts: by default. fixed, each: seconds on policy:dense and two idle cores, in all and a treatment, for the
    estimate. own: it has treatments of its own, as drift its α, unless it is asked alone with others. layers, moe: how
    many decoder blocks it needs, and whether routed experts. backward: it runs backward passes.
    """

    name: str
    title: str
    prompts: int
    fixed: float
    each: float
    own: bool = False
    layers: int = 1
    moe: bool = False
    backward: bool = False

    def entry(self) -> Callable[..., dict[str, Any]]:
        return getattr(importlib.import_module(f"mxrl.probes.{self.name}"), self.name)


PROBES = {
    probe.name: probe
    for probe in (
        Probe("gradient", "gradients", 16, 5, 2.7, layers=2, backward=True),
        Probe("temperature", "effective temperature", 16, 4, 2),
        Probe("deadzone", "deadzone and rollouts", 32, 8, 2.5),
        Probe("drift", "drift over α", 8, 40, 0, own=True),
        Probe("fork", "forks of greedy answers", 64, 4, 2),
        Probe("routing", "routing of experts", 16, 2, 0.6, moe=True),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """What is asked: the model and its prompts, the probes in their order, the treatments (None: the usual ones)."""

    model: str
    probes: tuple[str, ...] = tuple(PROBES)
    treatments: tuple[str, ...] | None = None
    task: str | None = None
    prompts: int | None = None
    max_new_tokens: int | None = None
    seed: int = 0
    device: str = "auto"
    dtype: str | None = None

    def prompts_of(self, probe: str) -> int:
        return self.prompts or PROBES[probe].prompts

    def treatments_of(self, probe: str) -> tuple[Treatment, ...] | None:
        """None where the probe has its own; those of the backward pass alone are left to who runs one."""
        found, about = self.treatments, PROBES[probe]
        if about.own and (found is None or len(self.probes) > 1):
            return None
        given = treatments(RECIPES) if found is None else map(Treatment.parse, found)
        return tuple(t for t in given if about.backward or t.passes != "backward")


class ProbeCallError(ValueError):
    """A call that asks for what there isn't: the message says what there is."""


CALL_ERRORS = (ProbeCallError, RecipeError, TreatmentError, TaskError, OptionError)  # of whoever calls, not of the work


def settings_of(
    name: str,
    model: str,
    recipes: Sequence[str] = (),
    given: Sequence[str] = (),
    *,
    task: str | None = None,
    dtype: str | None = None,
    device: str = "auto",
    **others: Any,
) -> Settings:
    """The settings of `mxrl probe NAME MODEL`, checked before anything is loaded; raises one of CALL_ERRORS.

    name: a probe or "all". recipes, given: --recipe and --treatment. others: prompts, max_new_tokens, seed.
    """
    if name != ALL and name not in PROBES:
        raise ProbeCallError(f"unknown probe '{name}'; possible: {', '.join((*PROBES, ALL))}")
    if dtype is not None and dtype not in DTYPES:
        raise ProbeCallError(f"unknown dtype '{dtype}'; possible: {', '.join(DTYPES)}")
    if task is not None:
        parse_task(task)
    elif not model.startswith(POLICY_PREFIX):
        raise ProbeCallError(f"{model}: say what to ask it: --task gsm8k:FILE, --task gsm_symbolic, --task chain, …")
    devices_of(device)
    probes = tuple(PROBES) if name == ALL else (name,)
    chosen = _chosen(recipes, given, apart=not any(PROBES[p].own for p in probes) or len(probes) > 1)
    return Settings(model, probes, chosen, task=task, dtype=dtype, device=device, **others)


def _chosen(recipes: Sequence[str], given: Sequence[str], *, apart: bool) -> tuple[str, ...] | None:
    """The treatments that --recipe and --treatment ask for, each once; None for the usual ones.

    apart: recipes come with the components of the first one that quantizes. Treatments stand as they are.
    """
    if not recipes and not given:
        return None
    quantizing = [r for r in recipes if Recipe.parse(r).quantizes]
    found = [*treatments(quantizing, of=quantizing[0])] if quantizing and apart else [*map(Treatment.parse, quantizing)]
    found += [t for t in map(Treatment.parse, given) if t.recipe.quantizes]
    if not found:
        raise TreatmentError(f"{', '.join((*recipes, *given))}: the baseline is always there; give a recipe to compare")
    return tuple(dict.fromkeys(map(str, found)))


def opened(settings: Settings) -> Subject:
    """The model with as many prompts as the probes need; raises as `open_subject`."""
    return open_subject(
        settings.model,
        settings.task,
        prompts=max(map(settings.prompts_of, settings.probes)),
        seed=settings.seed,
        device=settings.device,
        dtype=None if settings.dtype is None else DTYPES[settings.dtype],
        max_new_tokens=settings.max_new_tokens,
    )


def unfit(probe: str, subject: Subject, settings: Settings) -> str | None:
    """Why a probe can't be run on this model with these treatments; None where it can."""
    about = PROBES[probe]
    try:
        subject.need_layers(about.layers, f"the {probe} probe")
        if about.moe:
            subject.need_moe(probe)
    except ProbeError as error:
        return str(error)
    if settings.treatments_of(probe) == ():
        return f"the {probe} probe runs no backward pass, and every treatment is of that pass alone"
    return None


def run(
    probe: str, subject: Subject, settings: Settings, progress: Callable[[float], None] = lambda share: None
) -> dict[str, Any]:
    """One probe on its share of the subject's prompts; its result as every probe's module says."""
    less = dataclasses.replace(subject, problems=subject.problems[: settings.prompts_of(probe)])
    given = settings.treatments_of(probe)
    return PROBES[probe].entry()(less, *([] if given is None else [given]), progress=progress)


def key(probe: str, subject: Subject, settings: Settings) -> dict[str, Any]:
    """What a probe's result depends on besides the weights, the code and the machine, for whoever keeps it."""
    count = settings.prompts_of(probe)
    asked = [[list(ids), p.answer] for ids, p in zip(subject.prompt_ids, subject.problems, strict=True)][:count]
    return {
        "probe": probe,
        "about": subject.about() | {"prompts": count},
        "treatments": [str(t) for t in settings.treatments_of(probe) or ()],
        "prompts": _hash(repr(asked)),
        "config": _hash(subject.model.config.to_json_string()),
        "batch": subject.batch,
        "device": str(subject.device),
        "threads": torch.get_num_threads(),
    }


def seconds(probe: str, subject: Subject, settings: Settings) -> float:
    """About how long a probe takes on two idle cores, by the shipped policy's figures; on a GPU only a proportion."""
    found = PROBES[probe]
    size = max(1.0, sum(p.numel() for p in subject.model.parameters()) / 6.3e6)
    return (
        (found.fixed + found.each * len(settings.treatments_of(probe) or ()))
        * size * settings.prompts_of(probe) / found.prompts
    )  # fmt: skip


def together(results: Mapping[str, Result]) -> dict[str, Any]:
    """{"matrix", "claims"}: what the results say, and what of the paper they bear out."""
    return {"matrix": matrix(results), "claims": claims(results)}


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()

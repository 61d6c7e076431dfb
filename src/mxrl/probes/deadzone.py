"""Deadzone and rollout: what the zeros of a 4-bit format take from the weights, and what that does to the answers.

The deadzone D of a block with maximum m_b is {|x| < m_b / 24} (E2M1): what even the ideal scale rounds to zero. Two
questions, of the same model and treatments:

1. weights    share of zeros; effective and stable rank lost, by layer and kind (deadzone_weights.py)
2. answers    greedy, and `samples` drawn for every prompt, with only e_dz (`@deadzone`), with all but it
              (`@-deadzone`), with noise of its energy (`@~deadzone`), against the other components and the recipes

Per problem, always minus the unquantized policy's own on the same problem: reward (greedy, and the mean of the
samples), different completions and different answers in a group, entropy a token of the policy that decodes (nats),
tokens. All treatments draw from the same uniform numbers, so two of them differ where their probabilities do. The
interval is over problems (mean ± t·sd/√n).

Source: arXiv 2605.20402 has the deadzone cost rollouts; the energy-matched control, leaving out, and ranks are ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from mxrl.nn import rollout_weights
from mxrl.probes import deadzone_weights as weights
from mxrl.probes.intervals import Mean, comparison, mean, measure, paired
from mxrl.probes.subject import ProbeError, Subject, to_decode
from mxrl.probes.survival import accuracy
from mxrl.probes.treatments import BASELINE, Treatment, treated
from mxrl.probes.treatments import treatments as usual
from mxrl.rl.evaluate import Decoded, decode
from mxrl.rl.rewards import chain_answer, chain_reward, gsm8k_answer, gsm8k_reward

PAPER = "arXiv 2605.20402"
_ANSWERS: dict[Any, Callable[[str], Any]] = {chain_reward: chain_answer, gsm8k_reward: gsm8k_answer}


@dataclass(frozen=True)
class Answers:
    """What one policy wrote, a value a problem."""

    greedy: list[float]  # reward
    sampled: list[float]  # mean reward of the samples
    distinct: list[float]  # different completions among the samples
    answers: list[float] | None  # different answers; None for a task whose answers can't be told from text
    entropy: list[float]  # nats a token of the samples
    tokens: list[float]  # of a sample


# metric of the change, its field, its unit, metric of the value itself
_CHANGES = (
    ("greedy_accuracy_change", "greedy", "fraction", "greedy_accuracy"),
    ("sampled_accuracy_change", "sampled", "fraction", "sampled_accuracy"),
    ("distinct_change", "distinct", "completions a problem", "distinct"),
    ("distinct_answers_change", "answers", "answers a problem", "distinct_answers"),
    ("rollout_entropy_change", "entropy", "nats a token", "rollout_entropy"),
    ("mean_tokens_change", "tokens", "tokens", "mean_tokens"),
)


def deadzone(
    subject: Subject,
    treatments: Sequence[str | Treatment] = usual(("mxfp4", "mxfp4+mbs", "mxfp4+of", "mxfp4+mbs+of")),
    *,
    samples: int = 4,
    temperature: float = 1.0,
    matrices: int | None = None,
    progress: Callable[[float], None] = lambda share: None,
) -> dict[str, Any]:
    """Zeros and ranks of the weights, and the answers decoded with them, under every treatment.

    samples: drawn for every prompt, at `temperature`. matrices: at most so many of each kind (q, k, …, experts.up) are
        measured, evenly spread over the layers (and experts); None: all. progress: is told the share that is done.
    Returns the probe's JSON-able result: changes against the unquantized policy, intervals over problems (of zeros and
    ranks over layers). Raises ProbeError for no treatment, one of the backward pass, or settings out of range.
    """
    chosen = to_decode(subject, "deadzone", treatments)
    _check(samples, temperature, matrices)
    places = weights.chosen_places(subject, matrices)
    before = weights.as_stored(places)
    zones = {recipe: weights.in_deadzone(places, recipe) for recipe in {t.recipe.operand: None for t in chosen}}
    rows = {t: _weight_rows(subject, t, places, before, zones[t.recipe.operand]) for t in chosen}
    progress(0.1)
    answers = {BASELINE: _answers(subject, BASELINE, samples, temperature)}
    for i, treatment in enumerate(chosen):
        progress(0.1 + 0.9 * (i + 1) / (len(chosen) + 1))
        answers[str(treatment)] = _answers(subject, treatment, samples, temperature)
    progress(1.0)
    measures = [row for name, found in answers.items() for row in _answer_measures(name, found, answers[BASELINE])]
    measures += [row for t in chosen for row in _weight_measures(t, rows[t])]
    total = len(weights.all_names(subject))
    return {
        "probe": "deadzone",
        "schema": 1,
        "subject": subject.about(),
        "settings": {
            "treatments": list(map(str, chosen)),
            "samples": samples,
            "temperature": temperature,
            "matrices_of_a_kind": matrices,
            "matrices_measured": len(before),
            "matrices": total,
        },
        "measures": measures,
        "theory": [*_zeros_theory(chosen, rows), *_rank_theory(rows), *_structure(chosen, answers)],
        "layers": [row for found in rows.values() for row in found],
        "curves": _curves(chosen, rows),
        "notes": _notes(subject, answers, len(before), total),
    }


def _check(samples: int, temperature: float, matrices: int | None) -> None:
    if samples < 2:
        raise ProbeError(f"deadzone: samples={samples}; a group of different answers takes at least 2")
    if not temperature > 0:
        raise ProbeError(f"deadzone: temperature={temperature} must be positive; greedy answers are decoded anyway")
    if matrices is not None and matrices < 1:
        raise ProbeError(f"deadzone: matrices={matrices} must be at least 1, or None for all")


# --- answers ---------------------------------------------------------------------------------------------------------


def _answers(subject: Subject, treatment: Treatment | str, samples: int, temperature: float) -> Answers:
    """Greedy and sampled completions under a treatment, judged."""
    with treated(subject.model, treatment, seed=subject.seed), rollout_weights(subject.model):
        greedy, drawn = _decoded(subject, 1, 0.0), _decoded(subject, samples, temperature)
    rewards = _rewards(subject, drawn.texts, samples)
    groups = [slice(i, i + samples) for i in range(0, len(drawn.texts), samples)]
    told = _ANSWERS.get(subject.reward)
    return Answers(
        greedy=_rewards(subject, greedy.texts, 1),
        sampled=[fmean(rewards[g]) for g in groups],
        distinct=[float(len(set(drawn.texts[g]))) for g in groups],
        answers=None if told is None else [float(len(set(map(told, drawn.texts[g])))) for g in groups],
        entropy=[sum(drawn.entropy[g]) / sum(drawn.tokens[g]) for g in groups],
        tokens=[fmean(drawn.tokens[g]) for g in groups],
    )


def _decoded(subject: Subject, samples: int, temperature: float) -> Decoded:
    prompts = [ids for ids in subject.prompt_ids for _ in range(samples)]
    return decode(
        subject.model, subject.tokenizer, prompts,
        max_new_tokens=subject.max_new_tokens, temperature=temperature, seed=subject.seed,
    )  # fmt: skip


def _rewards(subject: Subject, texts: list[str], samples: int) -> list[float]:
    return subject.reward(texts, [problem.answer for problem in subject.problems for _ in range(samples)])


def _answer_measures(name: str, found: Answers, plain: Answers) -> list[dict[str, Any]]:
    rows = []
    for change, field, unit, itself in _CHANGES:
        values, reference = getattr(found, field), getattr(plain, field)
        if values is None:
            continue
        rows.append(measure(name, itself, accuracy(values) if unit == "fraction" else mean(values), unit))
        if name != BASELINE:
            effects = [a - b for a, b in zip(values, reference, strict=True)]
            rows.append(measure(name, change, mean(effects), unit, effects))
    return rows


# --- weights ---------------------------------------------------------------------------------------------------------


def _weight_rows(
    subject: Subject,
    treatment: Treatment,
    places: Sequence[weights.Place],
    before: dict[str, weights.Matrix],
    shares: dict[tuple[int, str], dict[str, float]],
) -> list[dict[str, Any]]:
    """A flat row for every layer and kind."""
    return [
        {"treatment": str(treatment), "layer": layer, "kind": kind, **sums.row(), **shares[layer, kind]}
        for layer, kind, sums in weights.under(subject, treatment, places, before)
    ]


def _by_layer(rows: Sequence[dict[str, Any]], name: str, weight: str = "matrices") -> dict[int, float]:
    """Mean over a layer's kinds, each by its count of matrices or elements."""
    layers = sorted({row["layer"] for row in rows})
    of = {layer: [row for row in rows if row["layer"] == layer] for layer in layers}
    return {k: sum(r[name] * r[weight] for r in found) / sum(r[weight] for r in found) for k, found in of.items()}


def _over_layers(rows: Sequence[dict[str, Any]], name: str, weight: str = "matrices") -> tuple[Mean, list[float]]:
    values = list(_by_layer(rows, name, weight).values())
    return mean(values), values


def _weight_measures(treatment: Treatment, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    named = (("zeros", "elements"), ("effective_rank_lost", "matrices"), ("stable_rank_lost", "matrices"))
    units = {"zeros": "share of the weights"}
    return [
        measure(treatment, name, found, units.get(name, "fraction"), values)
        for name, weight in named
        for found, values in [_over_layers(rows, name, weight)]
    ]


def _curves(chosen: Sequence[Treatment], rows: dict[Treatment, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """By layer: zeros of each treatment, and rank lost."""
    out = []
    for name, weight in (("zeros", "elements"), ("effective_rank_lost", "matrices"), ("stable_rank_lost", "matrices")):
        by = {str(t): _by_layer(rows[t], name, weight) for t in chosen}
        x = list(by[str(chosen[0])])
        out.append({"name": f"{name}_by_layer", "x": x, "series": {k: list(v.values()) for k, v in by.items()}})
    return out


# --- against theory --------------------------------------------------------------------------------------------------


def _zeros_theory(chosen: Sequence[Treatment], rows: dict[Treatment, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The deadzone's share of the weights against that of Gaussian ones, once a format."""
    first: dict[str, Treatment] = {}
    for treatment in chosen:
        first.setdefault(treatment.recipe.base, treatment)
    out = []
    for treatment in first.values():
        form = treatment.recipe.format
        assert form is not None  # it quantizes
        found, _ = _over_layers(rows[treatment], "deadzone", "elements")
        out.append(comparison(
            "deadzone_share", treatment, weights.gaussian_share(form), found, "ours",
            "share of the weights in the deadzone, predicted for Gaussian ones; more: heavier tails",
        ))  # fmt: skip
    return out


def _rank_theory(rows: dict[Treatment, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """What zeroing the deadzone does to the stable rank, if every direction shrinks as the whole does."""
    out = []
    for treatment, found in rows.items():
        if treatment.component == "deadzone" and not treatment.control:
            lost, _ = _over_layers(found, "stable_rank_lost")
            energy, _ = _over_layers(found, "deadzone_energy")
            predicted = weights.stable_rank_lost(energy.value)
            out.append(comparison(
                "stable_rank_lost", treatment, predicted, lost, "ours",
                f"1 − 1/(1 − ε), ε = {energy.value:.3g} of ‖W‖² lying in the deadzone, if ‖W‖₂ shrinks by 1 − ε as "
                "Gaussian weights make it; would ‖W‖₂ stay, +ε",
            ))  # fmt: skip
    return out


def _structure(chosen: Sequence[Treatment], answers: dict[str, Answers]) -> list[dict[str, Any]]:
    """Whether e_dz does more than noise of its size: reward under the one minus under the other, problem by problem."""
    out = []
    for treatment in chosen:
        control = next((t for t in chosen if t.control and _same_error(t, treatment)), None)
        if treatment.control or treatment.component != "deadzone" or control is None:
            continue
        for field in ("greedy", "sampled"):
            found = paired(getattr(answers[str(treatment)], field), getattr(answers[str(control)], field))
            out.append(comparison(
                f"deadzone_beyond_noise_{field}", treatment, 0.0, found, f"{PAPER} has it below 0",
                f"accuracy under {treatment} minus under {control}; 0: the zeros do no more than noise of their energy",
            ))  # fmt: skip
    return out


def _same_error(a: Treatment, b: Treatment) -> bool:
    return (a.recipe, a.components, a.passes) == (b.recipe, b.components, b.passes)


def _notes(subject: Subject, answers: dict[str, Answers], measured: int, total: int) -> list[str]:
    notes = [
        "Accuracy, distinct, entropy and tokens: interval over problems, paired with the unquantized policy. Zeros and "
        "ranks are counted, not sampled: their interval says how the layers differ.",
        "Effective rank is exp of the entropy of the normalised singular values (Roy and Vetterli 2007); a negative "
        "loss is a gain, as noise gives.",
        "Under a control (@~) every decoding step draws new noise for its activations; the weights' noise stays.",
    ]
    if measured < total:
        notes.append(
            f"Ranks and zeros are of {measured} of {total} matrices, evenly spread over the layers and experts of each "
            "kind."
        )
    plain = answers[BASELINE]
    same = [t for t, found in answers.items() if t != BASELINE and found.greedy == plain.greedy]
    if same:
        notes.append(
            f"Under {', '.join(same)} no problem's greedy reward changed: the interval of width zero excludes no more "
            f"than that about {3 / len(plain.greedy):.2g} of problems change (rule of three)."
        )
    if plain.answers is None:
        notes.append(
            f"The answers of task {subject.task} can't be told from the text alone, so different ones aren't counted."
        )
    return notes

"""Gradient probe: does the error of 4-bit operands reach the gradients, through which component, and by which pass?

From the weights (gradient_theory.py): the scales' δ of one block a layer, summed over the depth, against √(L/12).
From backward passes (gradient_pass.py) over the policy's own completions, for each treatment and group of prompts,
against the unquantized model's pass over the same tokens:

    grad_cosine        1 − cos of the two gradients, all parameters together
    grad_log2_ratio    mean over decoder blocks of |log2 ‖g_q‖ / ‖g‖|
    grad_norm_log2     log2 of the ratio of the whole gradients' norms, signed
    dx_at_output       the same of dL/dh_L, the gradient that enters the last block from the loss
    dx_growth          what L blocks add to that on the way back: the same of dL/dh_0, less dx_at_output
    dx_step            what one block adds: root mean square over blocks
    stream_log2_ratio  the same of the residual stream after the last block, mean over tokens
    stream_error       ‖h_q − h‖ / ‖h‖ there

A treatment "@forward" sends the gradient through the master weights and unquantized activations, so that it differs
from the same treatment without a mark only by the backward GEMMs' operands; "@backward" runs the forward pass exactly.
Intervals are over groups of prompts.

Source: arXiv 2605.20402 (the pathway from the scale to the gradients); measured by passes and components: ours.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from mxrl.kinds import kind_of
from mxrl.nn import canonical_name, quantized_layers, shared_weights
from mxrl.probes.gradient_pass import LOSSES, Comparison, compare, prompt_groups, run_pass
from mxrl.probes.gradient_theory import ScaleSums, scale_recipes, scale_sums
from mxrl.probes.intervals import Mean, band, comparison, finite, mean, measure
from mxrl.probes.subject import ProbeError, Subject, blocks
from mxrl.probes.treatments import Treatment, treated, treatments

PAPER = "arXiv 2605.20402"
BLOCK = "block"  # kind of the rows for all parameters of a decoder block
DEFAULT = treatments(("mxfp4", "mxfp4+mbs", "mxfp4+of", "mxfp4+mbs+of"))
Row = dict[str, Any]


def gradient(
    subject: Subject,
    treatments: Sequence[str | Treatment] = DEFAULT,
    *,
    loss: str = "nll",
    samples: int = 2,
    groups: int = 8,
    split_passes: bool = True,
    draws: int = 4096,
    seeds: int = 8,
    progress: Callable[[float], None] = lambda share: None,
) -> dict[str, Any]:
    """Gradients of a quantized model against the unquantized model's, on the same tokens; see the module's head.

    loss: "nll" of the completions' tokens, or "grpo", which weights completions by their advantage. samples:
        completions a prompt. groups: of prompts, one gradient each (no more than prompts). split_passes: run recipes
        and single components with the forward pass alone quantized and with the backward pass alone, too. draws, seeds:
        how often one block a layer is drawn, and how many such sets. progress: called with the share done.
    Memory: two gradients, and the residual stream of one group at every depth.
    Raises ProbeError for fewer than two decoder blocks, nothing to average, or a setting that can't be; NonFiniteError
    for logits or gradients with a NaN or an Inf.
    """
    subject.need_layers(2, "the gradient probe")
    if loss not in LOSSES:
        raise ProbeError(f"the gradient probe's loss '{loss}' is unknown; possible: {', '.join(LOSSES)}")
    if min(samples, groups, seeds) < 1 or draws < 2 or (loss == "grpo" and samples < 2):
        raise ProbeError(
            f"the gradient probe takes samples, groups and seeds of at least 1, 2 draws, and for grpo 2 samples; got "
            f"samples={samples}, groups={groups}, seeds={seeds}, draws={draws}"
        )
    given = tuple(dict.fromkeys(map(Treatment.parse, treatments)))
    chosen = _with_passes(given) if split_passes else given
    written = subject.rollout(samples=samples)
    batches = prompt_groups(subject, written, samples=samples, groups=min(groups, len(subject.problems)), loss=loss)
    found: dict[Treatment, list[Comparison]] = {t: [] for t in chosen}
    for g, group in enumerate(batches):
        base = run_pass(subject, group)
        for i, treatment in enumerate(chosen):
            with treated(subject.model, treatment, seed=subject.seed + g), shared_weights(subject.model):
                own = run_pass(subject, group)
            found[treatment].append(compare(own, base))
            del own
            progress((g + (i + 1) / len(chosen)) / len(batches))
    scales = [scale_sums(subject, recipe, draws=draws, seeds=seeds) for recipe in scale_recipes(given)]
    parts = parameter_parts(subject)
    measures = {t: _measures(subject, t, comparisons) for t, comparisons in found.items()}
    return {
        "probe": "gradient",
        "schema": 1,
        "subject": subject.about(),
        "settings": {
            "treatments": [str(t) for t in chosen],
            "loss": loss,
            "samples": samples,
            "groups": len(batches),
            "split_passes": split_passes,
            "draws": draws,
            "seeds": seeds,
            "tokens": int(written.completion_mask.sum()),
        },
        "measures": [row for rows in measures.values() for row in rows]
        + _against_controls(found)
        + [measure(s.recipe, "sum_delta_sd", s.sigma, "log2") for s in scales],
        "theory": _theory(subject, found, scales),
        "layers": [row for t, comparisons in found.items() for row in _layer_rows(t, comparisons, parts)]
        + [row for s in scales for row in _delta_rows(s)],
        "curves": _curves(subject, found, scales),
        "notes": _notes(subject, batches, groups, loss, scales),
    }


def _with_passes(given: Sequence[Treatment]) -> tuple[Treatment, ...]:
    """Each treatment, and behind recipes and single components the same in one pass alone."""
    out: list[Treatment] = []
    for t in given:
        out.append(t)
        whole = len(t.components) == 3
        if t.recipe.quantizes and t.passes == "both" and not t.control and (whole or t.component):
            out += [dataclasses.replace(t, passes=name) for name in ("forward", "backward")]
    return tuple(dict.fromkeys(out))


def parameter_parts(subject: Subject) -> dict[tuple[int, str], list[int]]:
    """(decoder block, kind) -> places in the model's parameters; kind BLOCK is all of a block, others are those of its
    quantized weights (q, k, …, experts.gate_up), each stored parameter in one."""
    kinds: dict[int, str] = {}
    for layer in quantized_layers(subject.model):
        for attribute in layer.weights:
            name = layer.name if layer.is_linear else f"{layer.name}.{attribute}"
            kinds[id(layer.parameter(attribute))] = kind_of(canonical_name(name))
    place = {id(p): i for i, p in enumerate(subject.model.parameters())}
    parts: dict[tuple[int, str], list[int]] = defaultdict(list)
    for index, block in enumerate(blocks(subject.model)):
        for parameter in block.parameters():
            parts[index, BLOCK].append(place[id(parameter)])
            if id(parameter) in kinds:
                parts[index, kinds[id(parameter)]].append(place[id(parameter)])
    return dict(parts)


def _measures(subject: Subject, treatment: Treatment, comparisons: Sequence[Comparison]) -> list[Row]:
    """One row a metric; `values` holds each group's, in the groups' order."""
    every = range(len(comparisons[0].sums))
    by_block = [p for (_, kind), p in parameter_parts(subject).items() if kind == BLOCK]
    values: dict[str, tuple[str, list[float]]] = {
        "grad_cosine": ("1 − cos", [c.apart(every)[1] for c in comparisons]),
        "grad_log2_ratio": ("log2", [_finite_mean([abs(c.apart(p)[0]) for p in by_block]) for c in comparisons]),
        "grad_norm_log2": ("log2", [c.apart(every)[0] for c in comparisons]),
        "dx_at_output": ("log2", [c.dx[-1] for c in comparisons]),
        "dx_growth": ("log2", [c.dx[0] - c.dx[-1] for c in comparisons]),
        "dx_step": ("log2 a block", [_step(c.dx) for c in comparisons]),
        "stream_log2_ratio": ("log2", [c.stream[-1] for c in comparisons]),
        "stream_error": ("of ‖h‖", [c.stream_error[-1] for c in comparisons]),
    }
    return [measure(treatment, metric, _interval(v), unit, v) for metric, (unit, v) in values.items()]


def _step(dx: Sequence[float]) -> float:
    """Root mean square of the change of log2 ‖dL/dh_q‖ / ‖dL/dh‖ over one block."""
    steps = [(a - b) ** 2 for a, b in itertools.pairwise(dx)]
    return math.sqrt(_finite_mean(steps))


def _against_controls(found: dict[Treatment, list[Comparison]]) -> list[Row]:
    """1 − cos of a component less that of noise with its energy, paired by group: what its structure adds."""
    rows = []
    for t, comparisons in found.items():
        control = found.get(dataclasses.replace(t, control=True))
        if t.control or control is None:
            continue
        own, noise = ([c.apart(range(len(c.sums)))[1] for c in side] for side in (comparisons, control))
        difference = [a - b for a, b in zip(own, noise, strict=True)]
        rows.append(measure(t, "grad_cosine_minus_noise", _interval(difference), "1 − cos", difference))
    return rows


def _layer_rows(
    treatment: Treatment, comparisons: Sequence[Comparison], parts: dict[tuple[int, str], list[int]]
) -> list[Row]:
    """A row for each decoder block and kind: means over groups; a block's own row has what is known of its output."""
    rows = []
    for (layer, kind), parameters in parts.items():
        ratio, apart = zip(*(c.apart(parameters) for c in comparisons), strict=True)
        row = {"treatment": str(treatment), "layer": layer, "kind": kind}
        row |= {"grad_log2_ratio": finite(_finite_mean(ratio)), "grad_cosine": finite(_finite_mean(apart))}
        if kind == BLOCK:
            row["dx_log2_ratio"] = finite(_finite_mean([c.dx[layer + 1] for c in comparisons]))
            row["stream_log2_ratio"] = finite(_finite_mean([c.stream[layer + 1] for c in comparisons]))
            row["stream_error"] = finite(_finite_mean([c.stream_error[layer + 1] for c in comparisons]))
        rows.append(row)
    return rows


def _delta_rows(scales: ScaleSums) -> list[Row]:
    return [
        {"treatment": str(scales.recipe), "layer": layer, "kind": "delta", "delta_mean": middle, "delta_var": variance}
        for layer, middle, variance in zip(scales.layers, scales.means, scales.variances, strict=True)
    ]


def _theory(subject: Subject, found: dict[Treatment, list[Comparison]], scales: Sequence[ScaleSums]) -> list[Row]:
    rows = []
    for s in scales:
        share = math.fsum(s.variances) / len(s.layers) * 12
        count = len(s.layers)
        rows.append(
            comparison(
                "sum_delta_sd", s.recipe, s.uniform, s.sigma, PAPER,
                f"√(L/12), L = {count}, against drawn blocks; δ's variance within a layer is {share:.3f} of the "
                "uniform's 1/12, and draws are independent from layer to layer, so that alone is the difference: "
                f"√(Σ Var δ) = {s.independent:.3f}. As a gain 2^±σ: [{2**-s.sigma.value:.2f}, "
                f"{2**s.sigma.value:.2f}] measured, [{2**-s.uniform:.2f}, {2**s.uniform:.2f}] predicted",
            )
        )  # fmt: skip
    for t, comparisons in found.items():
        if t.recipe.base != "mxfp4" or t.recipe.of or t.control or len(t.components) < 3:
            continue
        predicted = math.sqrt(subject.layers / 12)
        if t.passes != "forward":
            rows.append(
                comparison(
                    "dx_step", t, math.sqrt(1 / 12), _interval([_step(c.dx) for c in comparisons]), PAPER,
                    "σ of the log2 gain that one decoder block adds to the gradient on its way back, against the "
                    "measured change of log2 ‖dL/dh_q‖ / ‖dL/dh‖ (root mean square over blocks)",
                )
            )  # fmt: skip
            rows.append(
                comparison(
                    "dx_growth", t, predicted, _interval([abs(c.dx[0] - c.dx[-1]) for c in comparisons]), PAPER,
                    "σ of the log2 gain of all blocks, against |what they add|: a model is a single draw of it, so a "
                    "small value alone contradicts little; dx_step has a draw for each block",
                )
            )  # fmt: skip
        if t.passes != "backward":
            rows.append(
                comparison(
                    "layernorm_reset", t, 0.0, _interval([c.stream[-1] for c in comparisons]), PAPER,
                    "log2 ratio of the residual stream's norm after the last block: 0 where normalisation keeps the "
                    f"scale error from adding up; without it a σ of {predicted:.2f} would be expected",
                )
            )  # fmt: skip
    return rows


def _curves(subject: Subject, found: dict[Treatment, list[Comparison]], scales: Sequence[ScaleSums]) -> list[Row]:
    """By depth; and the distribution of the summed δ."""
    depth = list(range(subject.layers + 1))
    parts = parameter_parts(subject)
    in_order = [parts[layer, BLOCK] for layer in range(subject.layers)]
    figures: dict[str, tuple[list[int], Callable[[Comparison], list[float]]]] = {
        "dx_log2_ratio": (depth, lambda c: c.dx),
        "stream_log2_ratio": (depth, lambda c: c.stream),
        "stream_error": (depth, lambda c: c.stream_error),
        "grad_log2_ratio": (depth[:-1], lambda c: [c.apart(p)[0] for p in in_order]),
        "grad_cosine": (depth[:-1], lambda c: [c.apart(p)[1] for p in in_order]),
    }
    curves: list[Row] = []
    for name, (x, of) in figures.items():
        series = {
            str(t): band([_interval(at) for at in zip(*map(of, comparisons), strict=True)])
            for t, comparisons in found.items()
        }
        curves.append({"name": name, "x": x, "series": series})
    for s in scales:
        edges, shares, normal = s.histogram()
        middles = [(a + b) / 2 for a, b in itertools.pairwise(edges)]
        series = {"drawn": shares, "normal, σ = √(L/12)": normal}
        curves.append({"name": f"sum_delta {s.recipe}", "x": middles, "edges": edges, "series": series})
    return curves


def _notes(subject: Subject, batches: Sequence[Any], groups: int, loss: str, scales: Sequence[ScaleSums]) -> list[str]:
    notes = [
        "A gradient meets whole matrices, not single blocks: each entry of dY · Q(W) is a sum over many rows' blocks, "
        "whose δ differ, so that gains which would multiply along one path average out. What the backward pass shows "
        "is measured, not derived from δ.",
        "The paper's one-σ interval of the gradient's gain, [0.18, 5.6], fits neither 2^±2 = [0.25, 4] (48 layers, "
        "σ = 2) nor e^±2 = [0.14, 7.4]; it is e^±√3, √3 = √(36/12): the σ of 36 layers, taken to base e. δ is a log2, "
        "so 36 layers give 2^±√3 = [0.30, 3.3].",
        "Where the forward pass is exact (@backward) the stream's ratios are 0 by construction.",
    ]  # fmt: skip
    if loss == "nll":
        notes.append(
            "The loss is −log p of the policy's own completions, whose gradient has expectation zero: what is compared "
            "is the sampled gradient that rewards weight, token by token. loss=grpo weights it by advantages."
        )
    wanted = min(groups, len(subject.problems))
    if len(batches) < wanted:
        notes.append(f"{wanted - len(batches)} of {wanted} groups of prompts gave no gradient (loss {loss}).")
    if len(batches) == 1:
        notes.append("One group of prompts gives no interval.")
    if not scales:
        notes.append("No treatment has an MXFP4 scale, so no δ was drawn.")
    return notes


def _interval(values: Sequence[float]) -> Mean | None:
    """Over the groups that have a value; None without."""
    known = [v for v in values if math.isfinite(v)]
    return mean(known) if known else None


def _finite_mean(values: Sequence[float]) -> float:
    known = [v for v in values if math.isfinite(v)]
    return math.fsum(known) / len(known) if known else math.nan

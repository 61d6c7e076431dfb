"""Drift: how far the policy that writes is from the one that learns, with nothing learned yet, over OF's α.

    Δ_t = logp_train(y_t) − logp_rollout(y_t)      y ~ the rollout policy, learning rate 0, fixed prompts
    gap_mean_abs = mean |Δ|                        the primary metric; k3, χ², ESS, Pearson, … beside it (rl/gap.py)

The two policies differ for several reasons. Each is a source of its own here, everything else being equal:

    source            rollout                          training                        in
    cached_float32    W4A4, decoded with a cache       W4A4, one full pass             float32
    cached_bfloat16   the same                         the same                        bfloat16: the gap of a real run
    master            Q(bf16(w)), full pass            Q(w), w the float32 master      float32
    w4a16             activations in 16 bits           W4A4                            float32, full passes
    aqn_start, _end   Q(w + n), AQN's first, last σ    Q(w)                            float32, full passes
    unquantized       W4A4                             nothing quantized               float32, full passes

Full passes of one source go through the same batches, so that without a difference Δ is exactly 0: a W4A4 layer turns
the last bit of a float32 sum into a whole 4-bit step, and `cached_float32` is the size of that alone.

The policy is the bf16 export of the model: float32 here means its weights, computed with in float32. The master of
which it is the export is the model itself where it has more bits; else (most checkpoints are stored in bf16) it is
drawn anew for each seed, uniformly among the float32 numbers that round to the stored ones.

Tokens are drawn by cached decoding of the source's own rollout policy (`master` and `unquantized` share W4A4's in
float32). That matters: for `mxfp4+of` on policy:dense, w4a16 on the W4A4 policy's tokens has nearly the same mean |Δ|,
but 13 times the k3, and an ESS of 75 % instead of 99.5 %. A seed is one completion of every prompt (and one noise);
seeds are paired across treatments: prompts, the uniforms of each draw, noise.

Sources: arXiv 2605.20402 finds a U over α with its minimum at .5 and ends 1.5 to 2 times as high, without saying which
of these its gap consists of. The float32 master is a known cause of drift (numerics of training; linear.py casts).
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mxrl.corrections import noise_key
from mxrl.nn import AqnNoise, master_matrices, rollout_weights
from mxrl.probes.drift_shape import claims, over, shape
from mxrl.probes.intervals import band, mean, measure
from mxrl.probes.subject import ProbeError, Subject
from mxrl.probes.treatments import BASELINE, Treatment, treated
from mxrl.recipes import DEFAULT_SIGMA, Recipe
from mxrl.rl.gap import DEFAULT_CAP, GapStats, gap_stats
from mxrl.rl.rollout import Rollout, Scores, score
from mxrl.scan import NonFiniteError

ALPHAS = (0.0, 0.25, 0.5, 0.75, 1.0)
TREATMENTS = (*(f"mxfp4+of:{alpha}" for alpha in ALPHAS), "mxfp4", "mxfp4+mbs", "mxfp4+mbs+of", BASELINE)
SOURCES = ("cached_bfloat16", "cached_float32", "master", "w4a16", "aqn_start", "aqn_end", "unquantized")
PRIMARY = SOURCES[0]
# name, unit, of GapStats
METRICS: tuple[tuple[str, str, Callable[[GapStats], float]], ...] = (
    ("gap_mean_abs", "nats", lambda gap: gap.mean_abs),
    ("gap_max_abs", "nats", lambda gap: gap.max_abs),
    ("gap_k1", "nats", lambda gap: gap.k1),
    ("gap_k3", "nats", lambda gap: gap.k3),
    ("gap_chi2", "", lambda gap: gap.chi2),
    ("gap_ess", "share", lambda gap: gap.ess),
    ("gap_pearson", "", lambda gap: gap.pearson),
    ("gap_truncated", "share", lambda gap: gap.truncated_share),
)


@dataclass(frozen=True)
class _Seed:
    """One seed of one source: the gap, the share of tokens whose most likely token differs, and what noise did."""

    gap: GapStats
    flipped: float
    weight_change: float | None = None  # ‖Q(w + n) − Q(w)‖ / ‖w‖


def drift(
    subject: Subject,
    treatments: Sequence[str | Treatment] = TREATMENTS,
    *,
    seeds: int = 4,
    sources: Sequence[str] = SOURCES,
    sigma: tuple[float, float] = DEFAULT_SIGMA,
    cap: float = DEFAULT_CAP,
    progress: Callable[[float], None] = lambda share: None,
) -> dict[str, Any]:
    """The gap of every treatment and source, its interval over seeds, and whether it is a U over α.

    treatments: three or more that differ in α alone, as "mxfp4+of:0.25", make a series. sources: of SOURCES. sigma:
        AQN's first and last, relative to each matrix's RMS. cap: TIS's C.
    Returns the probes' shape, and besides it in every row of `measures` its "source", and "shapes": one row a series
    and source (see drift_shape.shape). Memory: a copy of the model in the other dtype, two where it has more bits than
    bf16 holds. Raises ProbeError, TreatmentError, RecipeError; NonFiniteError for log-probabilities that aren't finite.
    """
    if seeds < 1:
        raise ProbeError(f"drift: seeds={seeds} must be at least 1")
    unknown = [s for s in sources if s not in SOURCES]
    if unknown:
        raise ProbeError(f"drift: unknown source '{unknown[0]}'; possible: {', '.join(SOURCES)}")
    if not sources:
        raise ProbeError(f"drift: there is no source to measure; possible: {', '.join(SOURCES)}")
    parsed = list(dict.fromkeys(map(Treatment.parse, treatments)))
    if not parsed:
        raise ProbeError("drift: there is no treatment to measure")
    for treatment in parsed:
        if treatment.passes == "backward":
            raise ProbeError(f"drift: '{treatment}' changes the backward pass only, and a rollout has none")
    probe = _Drift(subject, seeds, tuple(s for s in SOURCES if s in sources), sigma, cap)
    found: dict[Treatment, dict[str, list[_Seed]]] = {}
    for treatment in parsed:
        # α = 0 is Q itself (corrections.py), so that one is measured once
        same = _without_of(treatment) if treatment.recipe.of == 0 else treatment
        found.setdefault(same, {})
    steps = len(found) * len(probe.sources)
    for i, treatment in enumerate(found):
        for j, (source, values) in enumerate(probe.of(treatment), start=1):
            found[treatment][source] = values
            progress((i * len(probe.sources) + j) / steps)
        progress((i + 1) * len(probe.sources) / steps)
    gaps = {t: found[_without_of(t) if t.recipe.of == 0 else t] for t in parsed}
    curves, shapes, theory = _series(gaps)
    return {
        "probe": "drift",
        "schema": 1,
        "subject": subject.about(),
        "settings": {
            "treatments": [str(t) for t in parsed],
            "seeds": seeds,
            "sources": list(probe.sources),
            "primary": PRIMARY,
            "sigma": list(sigma),
            "cap": cap,
            "master": "the model's own weights" if probe.master else "drawn below the last bit of bf16",
        },
        "measures": [
            row for t, by in gaps.items() for source, values in by.items() for row in _rows(t, source, values)
        ],
        "theory": theory,
        "layers": [],
        "curves": curves,
        "shapes": shapes,
        "notes": _notes(subject, probe, shapes),
    }


def _without_of(treatment: Treatment) -> Treatment:
    return dataclasses.replace(treatment, recipe=dataclasses.replace(treatment.recipe, of=None))


# --- measuring -------------------------------------------------------------------------------------------------------


class _Drift:
    """The subject in both arithmetics, and the gap of one treatment, source by source."""

    def __init__(
        self,
        subject: Subject,
        seeds: int,
        sources: tuple[str, ...],
        sigma: tuple[float, float],
        cap: float,
    ) -> None:
        self.seeds, self.sources, self.sigma, self.cap = seeds, sources, sigma, cap
        exact = all(
            torch.equal(p.bfloat16().to(p.dtype), p) for p in subject.model.parameters() if p.is_floating_point()
        )
        self.master = {} if exact else dict(master_matrices(subject.model))  # name -> [O, I], more bits than bf16
        narrow = subject if subject.dtype == torch.bfloat16 else _in_dtype(subject, torch.bfloat16)
        self.narrow = narrow
        self.wide = subject if exact and subject.dtype == torch.float32 else _in_dtype(narrow, torch.float32)

    def of(self, treatment: Treatment) -> Iterator[tuple[str, list[_Seed]]]:
        """(source, one entry a seed) for every source that the treatment has."""
        if "cached_bfloat16" in self.sources:
            drawn = self.draw(self.narrow, treatment)
            with treated(self.narrow.model, treatment), rollout_weights(self.narrow.model):
                yield (
                    "cached_bfloat16",
                    self.compare(treatment, [full_pass(self.narrow, r) for r in drawn], drawn, drawn),
                )
        if self.sources == ("cached_bfloat16",):
            return
        drawn = self.draw(self.wide, treatment)
        training = self.scored(treatment, drawn)
        if "cached_float32" in self.sources:
            yield "cached_float32", self.compare(treatment, training, drawn, drawn)
        if "master" in self.sources:
            noises = [Master(self.wide.seed, s, self.master) for s in range(self.seeds)]
            masters, changes = self.noised(treatment, drawn, noises)
            yield "master", self.compare(treatment, masters, training, drawn, changes)
        quantizes = treatment.recipe.quantizes
        if "w4a16" in self.sources and quantizes and treatment.recipe.activations != "a16":
            recipe = dataclasses.replace(treatment.recipe, activations="a16", pack_saved=False)
            weights_only = dataclasses.replace(treatment, recipe=recipe)
            tokens = self.draw(self.wide, weights_only)
            rollout = self.scored(weights_only, tokens)
            yield "w4a16", self.compare(treatment, self.scored(treatment, tokens), rollout, tokens)
        for source, sigma in zip(("aqn_start", "aqn_end"), self.sigma, strict=True):
            if source in self.sources:
                recipe = dataclasses.replace(treatment.recipe, aqn=self.sigma)
                noises = [AqnNoise(recipe, self.wide.seed, s, sigma) for s in range(self.seeds)]
                tokens = self.draw(self.wide, treatment, noises)
                noisy, changes = self.noised(treatment, tokens, noises)
                yield source, self.compare(treatment, self.scored(treatment, tokens), noisy, tokens, changes)
        if "unquantized" in self.sources and quantizes:
            yield "unquantized", self.compare(treatment, self.scored(BASELINE, drawn), training, drawn)

    def draw(self, subject: Subject, treatment: Treatment, noises: Sequence[AqnNoise] | None = None) -> list[Rollout]:
        """Each seed's completions, one of every prompt, by cached decoding; a seed's noise is drawn with it."""
        with treated(subject.model, treatment):
            if noises is None:
                with rollout_weights(subject.model):
                    return split(subject.rollout(samples=self.seeds), self.seeds)
            drawn = []
            for s, noise in enumerate(noises):
                with rollout_weights(subject.model, noise):
                    drawn.append(dataclasses.replace(subject, seed=subject.seed + s).rollout())
            return drawn

    def scored(self, treatment: Treatment | str, drawn: Sequence[Rollout]) -> list[Scores]:
        with treated(self.wide.model, treatment), rollout_weights(self.wide.model):
            return [full_pass(self.wide, rollout) for rollout in drawn]

    def noised(
        self, treatment: Treatment, drawn: Sequence[Rollout], noises: Sequence[AqnNoise | Master]
    ) -> tuple[list[Scores], list[float]]:
        """Full passes with each seed's noise on the weights, and ‖Q(w + n) − Q(w)‖ / ‖w‖."""
        scores, changes = [], []
        with treated(self.wide.model, treatment):
            for rollout, noise in zip(drawn, noises, strict=True):
                with rollout_weights(self.wide.model, noise) as report:
                    scores.append(full_pass(self.wide, rollout))
                changes.append(report.effective_sigma)
        return scores, changes

    def compare(
        self,
        treatment: Treatment,
        training: Sequence[Scores],
        rollout: Sequence[Scores | Rollout],
        drawn: Sequence[Rollout],
        changes: Sequence[float] | None = None,
    ) -> list[_Seed]:
        out = []
        for s, (a, b, tokens) in enumerate(zip(training, rollout, drawn, strict=True)):
            mask = tokens.completion_mask
            gap = gap_stats(a.logps, b.logps, mask, cap=self.cap)
            if gap.nonfinite:
                raise NonFiniteError(
                    f"{self.wide.name}: {gap.nonfinite} of {int(mask.sum())} tokens' log-probabilities aren't finite "
                    f"under {treatment}"
                )
            flipped = float(((a.argmax != b.argmax) & mask).sum() / mask.sum())
            out.append(_Seed(gap, flipped, None if changes is None else changes[s]))
        return out


def _in_dtype(subject: Subject, dtype: torch.dtype) -> Subject:
    """The subject with a copy of its model whose parameters are in `dtype`; rotary frequencies stay in float32."""
    model = copy.deepcopy(subject.model)
    for parameter in model.parameters():  # not Module.to, which casts buffers too
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    return dataclasses.replace(subject, model=model)


def split(rollout: Rollout, seeds: int) -> list[Rollout]:
    """The completions of each seed: of `seeds` side by side for every prompt, the first, the second, …"""
    return [Rollout(*(getattr(rollout, f.name)[s::seeds] for f in dataclasses.fields(rollout))) for s in range(seeds)]


def full_pass(subject: Subject, rollout: Rollout) -> Scores:
    """`score` in batches of alike lengths, each without the columns that are padding in all of its rows; [B, C]."""
    prompt, completion = rollout.prompt_mask.sum(1), rollout.completion_mask.sum(1)
    order = torch.argsort(prompt + completion, stable=True)
    out = [torch.zeros_like(t) for t in (rollout.logps, rollout.entropies, rollout.argmax)]
    ids, mask = rollout.inputs()
    width = rollout.prompt_ids.shape[1]
    for rows in order.split(subject.batch):
        first, length = width - int(prompt[rows].max()), int(completion[rows].max())
        columns = slice(first, width + length)
        part = score(subject.model, ids[rows, columns], mask[rows, columns], length, chunk=subject.batch)
        for target, found in zip(out, (part.logps, part.entropies, part.argmax), strict=True):
            target[rows, :length] = found
    return Scores(*out)


@dataclass(frozen=True)
class Master:
    """A float32 master minus its bf16 export, as `rollout_weights` takes noise: exact, so w + noise is the master.

    own: the master's matrices by canonical name; empty: drawn, with bf16(w + noise) = w.
    """

    seed: int
    draw: int
    own: dict[str, Tensor]

    def __call__(self, name: str, weight: Tensor) -> Tensor:
        """float32, in weight's shape. weight: float32 that bf16 holds exactly."""
        if self.own:
            return self.own[name].float() - weight
        k0, k1, *_ = noise_key(self.seed, self.draw, f"master\0{name}")
        generator = torch.Generator(weight.device).manual_seed((k0 << 31) ^ k1)
        # A float32's upper 16 bits are its bf16: counting up or down by less than half of them rounds back.
        step = torch.randint(
            -0x7FFF, 0x8000, weight.shape, dtype=torch.int32, device=weight.device, generator=generator
        )
        moved = (weight.view(torch.int32) + step).view(torch.float32)
        return torch.where(weight == 0, 0, moved - weight)


# --- telling ---------------------------------------------------------------------------------------------------------


def _rows(treatment: Treatment, source: str, seeds: Sequence[_Seed]) -> Iterator[dict[str, Any]]:
    """The rows of `measures` of one treatment and source, the primary metric first, with its value of each seed."""

    def row(metric: str, unit: str, values: Sequence[float], each: Sequence[float] | None = None) -> dict[str, Any]:
        known = [v for v in values if v == v]  # a correlation of one token is none
        return {"source": source, **measure(treatment, metric, mean(known) if known else None, unit, each)}

    for i, (metric, unit, of) in enumerate(METRICS):
        values = [of(s.gap) for s in seeds]
        yield row(metric, unit, values, None if i else values)
    yield row("argmax_flipped", "share", [s.flipped for s in seeds])
    yield row("tokens", "tokens a seed", [float(s.gap.tokens) for s in seeds])
    changes = [s.weight_change for s in seeds if s.weight_change is not None]
    if changes:
        yield row("weight_change", "of ‖w‖", changes)


def _series(
    gaps: dict[Treatment, dict[str, list[_Seed]]],
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]:
    """(curves, shapes, theory) of every set of treatments that differ in α alone."""
    families: dict[Treatment, dict[float, dict[str, list[_Seed]]]] = {}
    for treatment, by in gaps.items():
        if treatment.recipe.of is not None:
            families.setdefault(_without_of(treatment), {})[treatment.recipe.of] = by
    curves, shapes, theory = [], [], []
    for family, by_alpha in families.items():
        alphas = sorted(by_alpha)
        if len(alphas) < 3:
            continue
        absolute: dict[str, Any] = {}
        relative: dict[str, Any] = {}
        for source in by_alpha[alphas[0]]:
            values = [[s.gap.mean_abs for s in by_alpha[alpha][source]] for alpha in alphas]
            absolute[source] = band([mean(v) for v in values])
            relative[source] = band([over(v, values[0]) for v in values])
            found = shape(alphas, values)
            shapes.append({"base": str(family), "source": source, **found})
            if family == Treatment(Recipe()):  # OF alone, which the claim is of
                theory += claims(source, alphas, values, found, primary=source == PRIMARY)
        curves.append({"name": f"{family}: gap over α", "x": alphas, "series": absolute})
        curves.append({"name": f"{family}: gap over α, relative to the first", "x": alphas, "series": relative})
    return curves, shapes, theory


def _notes(subject: Subject, probe: _Drift, shapes: Sequence[dict[str, Any]]) -> list[str]:
    notes = [
        f"The gap of a real run with learning rate 0 is {PRIMARY}; the other sources are measured in float32, each "
        "with nothing else differing.",
    ]
    if "master" in probe.sources:
        notes.append(
            "The master weights have more bits than bf16; the policy of every source is their bf16 export."
            if probe.master
            else f"{subject.name} holds no more than bf16's bits, so the float32 master of which it would be the "
            "export is drawn: uniform among the float32 numbers that round to each stored weight."
        )
    undecided = [f"{s['source']} ({s['base']})" for s in shapes if s["verdict"] == "undecided"]
    if undecided:
        notes.append(
            f"No shape over α is shown at 95 % with {probe.seeds} seeds of {len(subject.problems)} prompts: "
            f"{', '.join(undecided)}."
        )
    return notes

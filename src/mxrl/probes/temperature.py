"""Effective temperature of a treatment: the temperature that its logit noise amounts to, predicted and fitted.

Read temperature_theory.py first: what η and T are, what stands for E_η, and the predictions. Here they are measured on
fixed contexts, positions of the unquantized policy's own completions (N of them, V tokens):

    unquantized ─ rollout ─> contexts ─ full pass ─> ℓ [N, V]
    treated     ─────────────────────── full pass ─> ℓ + η          t_eff, entropy_change: what RL's rollouts have
                           + AQN's noise on the weights, drawn anew ─> an ensemble of real quantizations

The metrics are named in temperature_rows.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mxrl.nn.weights import AqnNoise, rollout_weights
from mxrl.probes.subject import ProbeError, Subject
from mxrl.probes.temperature_rows import (
    Columns,
    baseline_rows,
    notes,
    predictions,
    shape_curve,
    treatment_rows,
    two_classes_row,
)
from mxrl.probes.temperature_theory import (
    SYNTHETIC,
    Baseline,
    Policy,
    entropy,
    fit_temperature,
    mean_logit,
    mean_policy,
    moments,
    noise,
    pieces,
)
from mxrl.probes.treatments import Treatment, treated
from mxrl.probes.treatments import treatments as usual
from mxrl.recipes import DEFAULT_SIGMA
from mxrl.rl.rollout import inference
from mxrl.scan import NonFiniteError

RECIPES = ("mxfp4", "mxfp4+mbs", "mxfp4+of", "mxfp4+mbs+of")


def temperature(
    subject: Subject,
    treatments: Sequence[str | Treatment] = usual(RECIPES),
    *,
    positions: int = 32,
    draws: int = 8,
    aqn_draws: int = 4,
    aqn_sigma: float = DEFAULT_SIGMA[0],
    progress: Callable[[float], None] = lambda share: None,
) -> dict[str, Any]:
    """Fit and predict the effective temperature of every treatment on the subject's own contexts.

    positions: contexts of each completion, at most. draws: of the synthetic ensembles. aqn_draws: forward passes with
    AQN's noise for each treatment, at aqn_sigma of each weight's RMS (its first σ); 0 leaves t_aqn out.
    Returns the dictionary that every probe returns (measures, theory, curves, notes), finite floats or None.
    Holds ℓ, ℓ + η (model's dtype) and, for AQN, two float32 tensors [N, V], N = prompts · positions.
    Raises ProbeError for settings that can't be, a treatment of the backward pass alone, or contexts without a token;
    NonFiniteError, naming the treatment, where logits are NaN or Inf.
    """
    chosen = list(dict.fromkeys(map(Treatment.parse, treatments)))
    _check(chosen, positions, draws, aqn_draws, aqn_sigma)
    contexts = Contexts.of(subject, positions)
    base = Baseline.of(contexts.logits(subject))
    if not float(base.weighted.sum()) > 0:
        raise ProbeError(
            f"temperature: the logits of {subject.name} are alike or certain everywhere; none can be fitted"
        )
    measures, theory, shapes = baseline_rows(base, contexts.by_prompt), [two_classes_row()], {}
    for i, treatment in enumerate(chosen):
        columns, fits, shapes[str(treatment)] = _measured(
            subject, contexts, base, treatment, draws, aqn_draws, aqn_sigma
        )
        rows = treatment_rows(str(treatment), columns, fits, contexts.by_prompt)
        measures += rows
        theory += predictions(str(treatment), {row["metric"]: row for row in rows})
        progress((i + 1) / len(chosen))
    return {
        "probe": "temperature",
        "schema": 1,
        "subject": subject.about(),
        "settings": {
            "treatments": [str(t) for t in chosen],
            "positions": positions,
            "contexts": len(contexts.row),
            "vocabulary": int(base.logits.shape[-1]),
            "draws": draws,
            "aqn_draws": aqn_draws,
            "aqn_sigma": aqn_sigma,
        },
        "measures": measures,
        "theory": theory,
        "layers": [],
        "curves": [shape_curve(shapes)],
        "notes": notes(base.logits, measures),
    }


def _check(chosen: Sequence[Treatment], positions: int, draws: int, aqn_draws: int, aqn_sigma: float) -> None:
    if not chosen:
        raise ProbeError("temperature: it takes at least one treatment, as mxfp4")
    if positions < 1 or draws < 1:
        raise ProbeError(f"temperature: positions={positions} and draws={draws} must be at least 1")
    if aqn_draws == 1 or aqn_draws < 0:
        raise ProbeError(f"temperature: aqn_draws={aqn_draws} is no ensemble; take 2 or more, or 0 to leave AQN out")
    if not 0 < aqn_sigma < math.inf:
        raise ProbeError(
            f"temperature: aqn_sigma={aqn_sigma} must be positive and finite; AQN's first is {DEFAULT_SIGMA[0]}"
        )
    for treatment in chosen:
        if treatment.passes == "backward":
            raise ProbeError(
                f"temperature: '{treatment}' leaves the forward pass as it is, so there is no noise on the logits; "
                "take it without @backward"
            )


# --- contexts and the policies at them --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contexts:
    """ids, mask: [B, T] texts of the unquantized policy; keep: logits of the last so many positions hold every context.

    row, at: [N] the text (one a prompt) and the place among those logits of each context.
    """

    ids: Tensor
    mask: Tensor
    keep: int
    row: Tensor
    at: Tensor

    @classmethod
    def of(cls, subject: Subject, positions: int) -> Contexts:
        """At most `positions` places of every completion, drawn from the subject's seed. ProbeError without any."""
        written = subject.rollout()
        ids, mask = written.inputs()
        generator = torch.Generator().manual_seed(subject.seed)
        chosen: list[tuple[int, int]] = []
        for row, length in enumerate(written.completion_mask.sum(1).tolist()):
            places = torch.randperm(length, generator=generator)[:positions].sort().values
            chosen += [(row, place) for place in places.tolist()]
        if not chosen:
            raise ProbeError(f"temperature: {subject.name} wrote no token on {subject.task}, so there is no context")
        row, at = torch.tensor(chosen, device=ids.device).unbind(1)
        return cls(ids, mask, written.completion_ids.shape[1] + 1, row, at)

    def logits(self, subject: Subject) -> Tensor:
        """ℓ [N, V] as the model computes now, in its dtype."""
        parts = []
        with inference(subject.model):
            for start in range(0, self.ids.shape[0], subject.batch):
                rows = slice(start, start + subject.batch)
                here = (self.row >= start) & (self.row < start + subject.batch)
                logits = subject.logits(self.ids[rows], self.mask[rows], self.keep)
                parts.append(logits[self.row[here] - start, self.at[here]])
        return torch.cat(parts)

    def by_prompt(self, columns: Columns) -> Tensor:
        """Sums [m, columns] of columns [N] over the contexts of each of the m prompts that have any; float64, CPU."""
        table = torch.stack([c.double() for c in columns.values()], -1)
        sums = table.new_zeros(self.ids.shape[0], len(columns)).index_add_(0, self.row, table)
        return sums[torch.bincount(self.row, minlength=len(sums)) > 0].cpu()


def aqn_policy(
    subject: Subject, contexts: Contexts, treatment: Treatment, logits: Tensor, *, sigma: float, draws: int
) -> tuple[Policy, Tensor]:
    """p̄ over draws of AQN's weight noise, inside `treated`; and the variance [N] of η between the draws.

    logits: ℓ [N, V]. sigma: of the noise, relative to each weight matrix's RMS, added before quantization.
    """
    recipe = dataclasses.replace(treatment.recipe, aqn=(sigma, sigma))
    policies = torch.zeros(logits.shape, dtype=torch.promote_types(logits.dtype, torch.float32), device=logits.device)
    off, square = torch.zeros_like(policies), torch.zeros_like(policies[:, 0])  # from the first draw: nothing cancels
    spread, reference = torch.zeros_like(square), None
    for k in range(draws):
        with rollout_weights(subject.model, AqnNoise(recipe, subject.seed, k, sigma)):
            noisy = contexts.logits(subject)
        reference = noisy if reference is None else reference
        for rows in pieces(logits):
            p = noisy[rows].to(policies.dtype).softmax(-1)
            apart = noise(reference[rows], noisy[rows])
            policies[rows] += p / draws
            spread[rows] += entropy(p) / draws
            off[rows] += apart / draws
            square[rows] += apart.square().sum(-1)
    between = (square - draws * off.square().sum(-1)).clamp(min=0) / (draws - 1) / (logits.shape[-1] - 1)
    target = torch.cat([mean_logit(logits[rows], policies[rows]) for rows in pieces(logits)])
    mixed = torch.cat([entropy(policies[rows]) for rows in pieces(logits)])
    return Policy(target, mixed.double(), spread.double()), between.double()


def _measured(
    subject: Subject,
    contexts: Contexts,
    base: Baseline,
    treatment: Treatment,
    draws: int,
    aqn_draws: int,
    aqn_sigma: float,
) -> tuple[Columns, dict[str, float | None], list[float]]:
    """Columns [N] of one treatment, 1/T of every policy that was fitted ("" as it is), and the shape of η."""
    policies: dict[str, Policy] = {}
    columns: Columns = {}
    try:
        with treated(subject.model, treatment, seed=subject.seed):
            with rollout_weights(subject.model):  # each weight is quantized once for all batches
                noisy = contexts.logits(subject)
            if aqn_draws:
                policies["aqn"], columns["between"] = aqn_policy(
                    subject, contexts, treatment, base.logits, sigma=aqn_sigma, draws=aqn_draws
                )
    except NonFiniteError as error:
        raise NonFiniteError(f"temperature, {treatment}: {error}") from None
    found, shape = moments(base.logits, noisy)
    sigma = math.sqrt(float(found.square.mean()))
    for kind in ("", *SYNTHETIC):
        policies[kind] = mean_policy(kind, base.logits, noisy, sigma=sigma, draws=draws, seed=subject.seed)
    columns |= found._asdict()
    columns |= {"count": torch.ones_like(base.entropy), "variance": base.variance, "variance_p": base.weighted}
    columns |= {"peaked": base.peaked, "entropy": base.entropy}
    columns["moved"] = (policies[""].target - base.mean).abs()
    fits: dict[str, float | None] = {}
    for kind, policy in policies.items():
        fit = fit_temperature(base.logits, policy.target)
        fits[kind] = fit.beta if fit.temperature is not None else None
        columns |= {f"gradient {kind}": fit.gradient, f"curvature {kind}": fit.curvature}
        columns |= {f"mean {kind}": policy.entropy, f"draw {kind}": policy.draw}
    return columns, fits, shape

"""Trajectory fork: at which token greedy decoding under 4-bit noise first leaves the unquantized policy's answer.

    unquantized   1 2 + 3 4 = 4 6 ␃            forks at token 7: position 6, counted from 0
    treated       1 2 + 3 4 = 4 5 ; …          until there both saw the same context
                                               an answer that ends without a difference never forked: censored there

After the fork the two answers are different texts, so the first difference is the last thing that is comparable token
by token, and its rate, the *hazard* h (forks a token watched, survival.py), is what an answer's length multiplies:
under a constant h a share (1 − h)^L of answers of L tokens never forks. What a fork costs is the accuracy of the forked
answers against the same problems' unquantized answers (an unforked one is the same text, so nothing).

Rounding alone forks trajectories, too. The control `bf16` is the unquantized policy against itself: decoded again in
other company (prompts reversed, half as many sequences at a time), and read by full forward passes over its own answers
(where the first position whose argmax differs is where decoding by full passes would have forked).

Whether forks happen where the policy is undecided: entropy and top-1/top-2 margin of the unquantized policy at the fork
against the other tokens of the same answers.

Source: training.md's claim of arXiv 2605.20402 is that short answers (GSM8K, about 280 tokens) recover and answers of
thousands of tokens less so; hazard, control and margins are ours.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from mxrl.nn import rollout_weights
from mxrl.probes.intervals import Mean, band, comparison, mean, measure, paired
from mxrl.probes.subject import ProbeError, Subject, to_decode
from mxrl.probes.survival import Survival, accuracy, first_half, hazard, hazard_effects, kaplan_meier, share
from mxrl.probes.treatments import BASELINE, Treatment, treated
from mxrl.probes.treatments import treatments as usual
from mxrl.rl.rollout import Rollout, inference, sample

HORIZONS = (280, 795, 4000)  # tokens: GSM8K's answers, DAPO-Math's, and long reasoning, as the paper has them
_POINTS = 200  # of a survival curve in the result
_LOGITS = 1 << 27  # of a full pass at a time
PAPER = "arXiv 2605.20402"


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Position, from 0, of the first token in which two completions differ; None for equal ones.

    One that is the beginning of the other differs where it ends.
    """
    if list(a) == list(b):
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@dataclass(frozen=True)
class Forks:
    """One treatment's answers against the unquantized ones, problem by problem.

    positions: of the first different token; None where there is none. lengths: of the unquantized answers, in tokens.
    scores: rewards under the treatment; None where only positions are known (full passes).
    """

    treatment: str
    positions: list[int | None]
    lengths: list[int]
    scores: list[float] | None

    @property
    def forked(self) -> list[bool]:
        return [p is not None for p in self.positions]

    @property
    def times(self) -> list[int]:
        """Tokens watched: up to the fork, it included, or all of the answer."""
        return [n if p is None else p + 1 for p, n in zip(self.positions, self.lengths, strict=True)]


@dataclass(frozen=True)
class Written:
    """The unquantized policy's greedy answers: tokens, scores; entropy and margin of every token (nats)."""

    tokens: list[list[int]]
    scores: list[float]
    entropy: list[list[float]]
    margin: list[list[float]]
    full_pass: Forks

    @property
    def lengths(self) -> list[int]:
        return [len(row) for row in self.tokens]


def fork(
    subject: Subject,
    treatments: Sequence[str | Treatment] = usual(("mxfp4", "mxfp4+mbs", "mxfp4+of", "mxfp4+mbs+of")),
    *,
    bins: int = 3,
    horizons: Sequence[int] = HORIZONS,
    progress: Callable[[float], None] = lambda share: None,
) -> dict[str, Any]:
    """Greedy decoding of subject's prompts under every treatment, against the unquantized policy's.

    bins: of the unquantized answers' length, with as many answers each as can be. horizons: tokens to which the
        survival is extrapolated from the hazard. progress: is told the share that is done.
    Returns the probe's JSON-able result; the treatment `bf16` in it is the control. Intervals over problems.
    Raises ProbeError for no treatment, one of the backward pass, or settings below 1; NonFiniteError from the logits.
    """
    chosen = to_decode(subject, "fork", treatments)
    if bins < 1 or not horizons or min(horizons) < 1:
        raise ProbeError(f"fork: bins={bins} and horizons={list(horizons)} must be at least 1")
    written = _written(subject)
    found = [Forks(BASELINE, *_against(subject, written, _in_other_company(subject)))]
    for i, treatment in enumerate(chosen):
        progress((i + 1) / (len(chosen) + 1))
        with treated(subject.model, treatment, seed=subject.seed), rollout_weights(subject.model):
            answers = subject.rollout(greedy=True)
        found.append(Forks(str(treatment), *_against(subject, written, answers)))
    progress(1.0)
    curves = {f.treatment: kaplan_meier(f.times, f.forked) for f in found}
    full = written.full_pass
    measures = [row for f in found for row in _measures(f, found[0], written, curves[f.treatment])]
    measures.append(measure(BASELINE, "fork_hazard_full_pass", hazard(full.times, full.forked), "forks a token"))
    whole = [f for f, t in zip(found[1:], chosen, strict=True) if not t.control and not t.component and not t.without]
    return {
        "probe": "fork",
        "schema": 1,
        "subject": subject.about(),
        "settings": {
            "treatments": list(map(str, chosen)),
            "bins": bins,
            "horizons": list(horizons),
            "control": "prompts in reverse order, half as many decoded at a time",
        },
        "measures": measures,
        "theory": [*_constant(found), *(row for f in whole for row in _extrapolated(f, curves[f.treatment], horizons))],
        "layers": [],
        "curves": [_survival(curves), *_by_length(found, written, bins)],
        "notes": _notes(subject, found, written),
    }


# --- decoding --------------------------------------------------------------------------------------------------------


def _written(subject: Subject) -> Written:
    """The unquantized answers, with what one full pass over them says of every token."""
    rollout = subject.rollout(greedy=True)
    tokens = rollout.completions()
    lengths = [len(row) for row in tokens]
    argmax, margin = _full_pass(subject, rollout)
    positions = [first_difference(a[:n], row) for a, row, n in zip(argmax, tokens, lengths, strict=True)]
    return Written(
        tokens,
        _scores(subject, rollout),
        [row[:n] for row, n in zip(rollout.entropies.tolist(), lengths, strict=True)],
        [row[:n] for row, n in zip(margin, lengths, strict=True)],
        Forks(BASELINE, positions, lengths, None),
    )


def _in_other_company(subject: Subject) -> Rollout:
    """The unquantized answers again, rounded otherwise: prompts reversed, half as many sequences at a time."""
    prompts = subject.prompt_ids[::-1]
    again = sample(
        subject.model, prompts, max_new_tokens=subject.max_new_tokens, eos_token_id=subject.eos,
        pad_token_id=subject.pad, greedy=True, seed=subject.seed, batch_size=max(1, len(prompts) // 2),
    )  # fmt: skip
    return Rollout(*(getattr(again, name).flip(0) for name in Rollout.__dataclass_fields__))


def _full_pass(subject: Subject, rollout: Rollout) -> tuple[list[list[int]], list[list[float]]]:
    """(argmax, top-1 minus top-2 logit) of each completion token by full forward passes, a few sequences at a time."""
    ids, mask = rollout.inputs()
    width = rollout.completion_ids.shape[1]
    vocabulary = int(subject.model.config.get_text_config().vocab_size)
    rows = max(1, min(subject.batch, _LOGITS // ((width + 1) * vocabulary)))
    argmax: list[list[int]] = []
    margin: list[list[float]] = []
    with inference(subject.model):
        for start in range(0, ids.shape[0], rows):
            part = slice(start, start + rows)
            logits = subject.logits(ids[part], mask[part], keep=width + 1)[:, :-1]
            two = logits.topk(2, dim=-1).values.float()  # their difference is that of the log-probabilities
            argmax += logits.argmax(-1).tolist()
            margin += (two[..., 0] - two[..., 1]).tolist()
    return argmax, margin


def _scores(subject: Subject, rollout: Rollout) -> list[float]:
    return subject.reward(subject.texts(rollout), [problem.answer for problem in subject.problems])


def _against(subject: Subject, written: Written, answers: Rollout) -> tuple[list[int | None], list[int], list[float]]:
    """What Forks holds of a treatment's answers."""
    positions = [first_difference(a, b) for a, b in zip(written.tokens, answers.completions(), strict=True)]
    return positions, written.lengths, _scores(subject, answers)


# --- what is made of it ----------------------------------------------------------------------------------------------


def _measures(f: Forks, control: Forks, written: Written, curve: Survival) -> list[dict[str, Any]]:
    assert f.scores is not None
    effects = hazard_effects(f.times, f.forked)
    change = [a - b for a, b in zip(f.scores, written.scores, strict=True)]
    on_forks = [c if fork else None for c, fork in zip(change, f.forked, strict=True)]
    entropy, margin = _at_forks(f, written.entropy), _at_forks(f, written.margin)

    def row(metric: str, found: Mean | None, unit: str, values: Sequence[float | None] | None = None) -> dict[str, Any]:
        return measure(f.treatment, metric, found, unit, values)

    rows = [
        row("fork_hazard", hazard(f.times, f.forked), "forks a token", effects),
        row("survival_half", curve.reaches(0.5), "tokens"),
        row("forked_accuracy_change", _mean(on_forks), "fraction", on_forks),
        row("fork_share", share(sum(f.forked), len(f.forked)), "fraction"),
        row("forked_accuracy", accuracy(_where(f.scores, f.forked)), "fraction"),
        row("forked_accuracy_unquantized", accuracy(_where(written.scores, f.forked)), "fraction"),
        row("unforked_accuracy", accuracy(_where(f.scores, [not x for x in f.forked])), "fraction"),
        row("accuracy_change", mean(change), "fraction", change),
        row("fork_entropy", _mean([at for at, _ in entropy]), "nats"),
        row("fork_entropy_excess", _mean([at - rest for at, rest in entropy if rest is not None]), "nats"),
        row("fork_margin", _mean([at for at, _ in margin]), "nats"),
        row("fork_margin_excess", _mean([at - rest for at, rest in margin if rest is not None]), "nats"),
    ]
    if f is not control:
        above = paired(effects, hazard_effects(control.times, control.forked))
        rows.append(row("fork_hazard_above_bf16", above, "forks a token"))
    return rows


def _mean(values: Sequence[float | None]) -> Mean | None:
    known = [v for v in values if v is not None]
    return mean(known) if known else None


def _where(values: Sequence[float], chosen: Sequence[bool]) -> list[float]:
    return [v for v, take in zip(values, chosen, strict=True) if take]


def _at_forks(f: Forks, rows: Sequence[Sequence[float]]) -> list[tuple[float, float | None]]:
    """For every forked answer: the unquantized policy's value at the fork, and its mean over the other tokens."""
    found: list[tuple[float, float | None]] = []
    for position, row in zip(f.positions, rows, strict=True):
        if position is not None and position < len(row):
            rest = [*row[:position], *row[position + 1 :]]
            found.append((row[position], fmean(rest) if rest else None))
    return found


def _constant(found: Sequence[Forks]) -> list[dict[str, Any]]:
    """Half of the tokens watched hold half of the forks, if the hazard is constant."""
    rows = []
    for f in found:
        halves = first_half(f.times, f.forked)
        if halves is None:
            continue
        predicted, early = halves
        rows.append(comparison(
            "constant_hazard", f.treatment, predicted, early, "ours",
            f"share of {early.n} forks in the first half of the tokens watched; fewer there: the hazard grows",
        ))  # fmt: skip
    return rows


def _extrapolated(f: Forks, curve: Survival, horizons: Sequence[int]) -> list[dict[str, Any]]:
    """Share of answers of a length that would never fork, from the hazard, against the curve as far as it goes."""
    h = hazard(f.times, f.forked)
    rows = []
    for tokens in horizons:
        low, high = ((1 - min(1.0, end)) ** tokens for end in (h.high, h.low))
        predicted = (1 - h.value) ** tokens
        row: dict[str, Any] = {"name": f"unforked_at_{tokens}", "treatment": f.treatment, "predicted": predicted}
        row |= {"measured": None, "low": None, "high": None, "source": f"ours; lengths of {PAPER}", "within": None}
        note = f"(1 − h)^{tokens}, a constant hazard; by its interval {low:.3g} to {high:.3g}"
        if tokens < len(curve.share):
            at, below, above = curve.share[tokens], curve.low[tokens], curve.high[tokens]
            row |= {"measured": at, "low": below, "high": above, "within": below <= predicted <= above}
        else:
            note += f"; extrapolated beyond the {len(curve.share) - 1} tokens watched at most"
        rows.append(row | {"note": note})
    return rows


def _survival(curves: dict[str, Survival]) -> dict[str, Any]:
    longest = max(len(c.share) for c in curves.values()) - 1
    step = max(1, math.ceil(longest / _POINTS))
    at = list(range(0, longest + 1, step))

    def column(values: Sequence[float]) -> list[float | None]:
        return [values[t] if t < len(values) else None for t in at]

    series = {k: {"mean": column(c.share), "low": column(c.low), "high": column(c.high)} for k, c in curves.items()}
    return {"name": "survival", "x": at, "series": series}


def length_bins(lengths: Sequence[int], bins: int) -> list[list[int]]:
    """Indices of the answers by length, shortest bin first, cut at the quantiles: about as many in each.

    Equal lengths stay together, so there may be fewer bins.
    """
    ordered = sorted(lengths)
    cuts = [ordered[len(ordered) * k // bins] for k in range(1, bins)]
    groups: list[list[int]] = [[] for _ in range(bins)]
    for i, length in enumerate(lengths):
        groups[bisect_right(cuts, length)].append(i)
    return [group for group in groups if group]


def _by_length(found: Sequence[Forks], written: Written, bins: int) -> list[dict[str, Any]]:
    """Share that forked, and the change of accuracy, against the unquantized answer's length (a bin's mean)."""
    groups = length_bins(written.lengths, bins)
    at = [fmean(written.lengths[i] for i in group) for group in groups]
    forked: dict[str, dict[str, list[float | None]]] = {}
    changed: dict[str, dict[str, list[float | None]]] = {}
    for f in found:
        assert f.scores is not None
        shares = [share(sum(f.forked[i] for i in group), len(group)) for group in groups]
        changes = [paired([f.scores[i] for i in g], [written.scores[i] for i in g]) for g in groups]
        forked[f.treatment], changed[f.treatment] = band(shares), band(changes)
    sizes = {"answers": [len(group) for group in groups]}
    return [
        {"name": "fork_share_by_length", "x": at, "series": forked} | sizes,
        {"name": "accuracy_change_by_length", "x": at, "series": changed} | sizes,
    ]


def _notes(subject: Subject, found: Sequence[Forks], written: Written) -> list[str]:
    cut = sum(not (set(row[-1:]) & set(subject.eos)) for row in written.tokens)
    notes = [
        "fork_hazard's interval takes the forks for a Poisson count of the tokens watched (exact); its per-problem "
        "values are the ratio's linear terms, so that two hazards can be compared paired. Shares and accuracies have "
        "Clopper and Pearson's interval, all else mean ± t·sd/√n over problems.",
        "A longer answer is a harder problem here as well: what length does to accuracy is not length's doing alone.",
        "One hazard for all answers is an average: where answers differ in it, those that fork easily fork first, and "
        "the rest survive longer than (1 − h)^L.",
    ]
    if cut:
        notes.append(
            f"{cut} of {len(written.tokens)} unquantized answers were cut at {subject.max_new_tokens} tokens; they are "
            "censored there."
        )
    control = found[0]
    if any(control.forked) or any(written.full_pass.forked):
        notes.append(
            f"Rounding alone: decoded in other company, {sum(control.forked)} of {len(control.forked)} unquantized "
            f"answers fork; read by full passes, {sum(written.full_pass.forked)} do."
        )
    same = [f.treatment for f in found if f.treatment != BASELINE and f.scores == written.scores and any(f.forked)]
    if same:
        notes.append(
            f"Under {', '.join(same)} answers forked, but no problem's score changed: the interval of width zero says "
            f"no more than that at most about {3 / len(written.scores):.2g} of problems would change (rule of three)."
        )
    return notes

"""What arXiv 2605.20402 says of each component, as data, and whether a probed model bears it out.

A claim has the paper's statement in our words, the test that decides it, and where in the paper it stands as far as we
know (`section`; "" where our notes don't tell). Its verdict:

    borne out | contradicted | undecided (an interval straddles what decides) | not measured

"C causes F" is taken as matrix.py's rule has it: alone it has an effect, and leaving it out takes some of it away. It
is contradicted as soon as one of the two is, borne out where both are. "C has no part in F" needs both denied. "C
dominates F": alone it does more than each other component alone. Whether a component does more than noise of its
energy is said beside, as detail: the paper doesn't claim it everywhere.

A model of a few million parameters can contradict a claim for itself only; the paper's are of 3 B and 30 B.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from mxrl.ops.inject import COMPONENTS
from mxrl.probes.matrix import NO, UNDECIDED, YES, Effect, Effects, Result, component_cell, failure

PAPER = "arXiv 2605.20402"
BORNE_OUT, CONTRADICTED, NOT_MEASURED = "borne out", "contradicted", "not measured"
VERDICTS = (BORNE_OUT, CONTRADICTED, UNDECIDED, NOT_MEASURED)
_OF_TOLD = {YES: BORNE_OUT, NO: CONTRADICTED, UNDECIDED: UNDECIDED, None: NOT_MEASURED}


class Finding(NamedTuple):
    """A verdict with the number that it stands on."""

    verdict: str
    number: Effect | None = None
    detail: str = ""


class Evidence(NamedTuple):
    """What a test looks at: the results by probe, and their measures."""

    results: Mapping[str, Result]
    effects: Effects


class Test(NamedTuple):
    """How a claim is decided: in words, on which metric ("": a row of theory), and as a function."""

    says: str
    metric: str
    decide: Callable[[Evidence], Finding]


@dataclass(frozen=True)
class Claim:
    """component: scale, deadzone, grid, a correction as "+mbs", or "" for a law; failure: a column, or "" for none."""

    id: str
    component: str
    failure: str
    probe: str
    says: str
    section: str
    test: Test


def claims(results: Mapping[str, Result]) -> list[dict[str, Any]]:
    """Every claim that the probes in `results` are about, with its verdict, number, interval and what decided it."""
    evidence = Evidence(results, Effects(results))
    out = []
    for claim in CLAIMS:
        if claim.probe not in results:
            continue
        found = claim.test.decide(evidence)
        out.append({
            "id": claim.id, "component": claim.component, "failure": claim.failure, "probe": claim.probe,
            "says": claim.says, "source": ", ".join(filter(None, (PAPER, claim.section))), "test": claim.test.says,
            "metric": claim.test.metric,
            "verdict": found.verdict, **_numbers(found.number), "detail": found.detail,
        })  # fmt: skip
    return out


def _numbers(effect: Effect | None) -> dict[str, Any]:
    if effect is None:
        return {"value": None, "low": None, "high": None, "n": 0}
    return {"value": effect.value, "low": effect.low, "high": effect.high, "n": effect.n}


# ---- tests -----------------------------------------------------------------------------------------------------------


def causes(component: str, column: str) -> Test:
    """Alone it has an effect and leaving it out takes some away; the number is what leaving it out takes away."""

    def decide(evidence: Evidence) -> Finding:
        cell = component_cell(evidence.effects, component, failure(column))
        return Finding(_both(cell, YES), _removed(evidence, component, column), _detail(cell))

    return Test(
        "alone it has an effect, and leaving it out takes some of the effect away", failure(column).metric, decide
    )


def no_part(component: str, column: str) -> Test:
    """Neither alone nor left out does it matter; the number is its effect alone."""

    def decide(evidence: Evidence) -> Finding:
        cell = component_cell(evidence.effects, component, failure(column))
        return Finding(_both(cell, NO), evidence.effects.of(failure(column), f"@{component}"), _detail(cell))

    return Test(
        "alone it has less than a tenth of the whole effect, and leaving it out takes less than that",
        failure(column).metric, decide,
    )  # fmt: skip


def _both(cell: Mapping[str, Any], wanted: str) -> str:
    """The verdict on a claim that a component says `wanted` (YES or NO) both alone and left out."""
    told = {cell["says"]["alone"], cell["says"]["removed"]}
    if None in told:
        return NOT_MEASURED
    if told == {wanted}:
        return BORNE_OUT
    return UNDECIDED if told <= {wanted, UNDECIDED} else CONTRADICTED


def dominates(component: str, column: str) -> Test:
    """Alone it does more than each of the others alone; the number is the lead over the strongest of them."""

    def decide(evidence: Evidence) -> Finding:
        where = failure(column)
        own = evidence.effects.of(where, f"@{component}")
        others = {c: evidence.effects.of(where, f"@{c}") for c in COMPONENTS if c != component}
        if own is None or None in others.values():
            return Finding(NOT_MEASURED)
        leads = {c: own.minus(other) for c, other in others.items() if other}
        told = [lead.over(0.0, where.harm) for lead in leads.values()]
        verdict = CONTRADICTED if NO in told else BORNE_OUT if set(told) == {YES} else UNDECIDED
        rival = min(leads, key=lambda c: leads[c].value * where.harm)
        return Finding(verdict, leads[rival], f"against the {rival} alone")

    return Test("alone it does more than each other component alone, paired", failure(column).metric, decide)


def helps(correction: str, column: str) -> Test:
    """The corrected recipe has less of the failure than the plain one; the number is the difference."""

    def decide(evidence: Evidence) -> Finding:
        where, effects = failure(column), evidence.effects
        plain, own = effects.of(where), effects.get(where.probe, where.metric, effects.base + correction)
        if plain is None or own is None:
            return Finding(NOT_MEASURED)
        gain = plain.minus(own)
        return Finding(_OF_TOLD[gain.over(0.0, where.harm)], gain, f"{effects.base} − {effects.base}{correction}")

    return Test("the plain recipe's effect is larger than the corrected one's, paired", failure(column).metric, decide)


def changes(probe: str, metric: str, sign: int, mark: str = "") -> Test:
    """The base recipe's metric (or that of one component) is above 0, or below for sign −1."""

    def decide(evidence: Evidence) -> Finding:
        own = evidence.effects.get(probe, metric, evidence.effects.base + mark)
        if own is None:
            return Finding(NOT_MEASURED)
        return Finding(_OF_TOLD[own.over(0.0, sign)], own, f"{metric} of {evidence.effects.base}{mark}")

    return Test(f"the interval of {metric} lies {'above' if sign > 0 else 'below'} 0", metric, decide)


def law(probe: str, name: str, *, mark: str = "", unlike: float | None = None) -> Test:
    """A probe's own row of comparison with theory, of the plain recipe (marked by `mark`) or of no treatment.

    unlike: the value without the law's effect; an interval that holds it as well decides nothing.
    """

    def decide(evidence: Evidence) -> Finding:
        row = _row(evidence, probe, name, mark)
        if row is None:
            return Finding(NOT_MEASURED)
        number = Effect(row["measured"], row["low"], row["high"], 0)
        verdict = {True: BORNE_OUT, False: CONTRADICTED, None: UNDECIDED}[row["within"]]
        if unlike is not None and verdict == BORNE_OUT and number.over(unlike) == UNDECIDED:
            verdict = UNDECIDED
        return Finding(verdict, number, f"predicted {row['predicted']:.4g}; {row['note']}")

    beside = "" if unlike is None else f", and excludes {unlike:g}, no effect"
    return Test(f"the measured number's interval holds the predicted one{beside}", "", decide)


def _row(evidence: Evidence, probe: str, name: str, mark: str = "") -> Mapping[str, Any] | None:
    """A probe's row of comparison with theory that has a measured number, of the base recipe or of no treatment."""
    own = (None, evidence.effects.base + mark)
    rows = (r for r in evidence.results[probe]["theory"] if r["name"] == name and r["treatment"] in own)
    row = next(rows, None)
    return row if row is not None and row["measured"] is not None else None


def _inside(number: Effect, low: float, high: float) -> str:
    """The verdict on a claim that a number lies in [low, high]."""
    told = {number.over(high), number.over(-low, -1)}
    return CONTRADICTED if YES in told else BORNE_OUT if told == {NO} else UNDECIDED


def near(probe: str, name: str, tolerance: float) -> Test:
    """A law that is meant to hold about: the plain recipe's interval against the predicted number ± that share of it.

    An interval over many draws is too narrow for any approximation to lie in: the row's own `within` is for that.
    """

    def decide(evidence: Evidence) -> Finding:
        row = _row(evidence, probe, name)
        if row is None:
            return Finding(NOT_MEASURED)
        number, predicted = Effect(row["measured"], row["low"], row["high"], 0), row["predicted"]
        bound = tolerance * abs(predicted)
        verdict = _inside(number, predicted - bound, predicted + bound)
        return Finding(verdict, number, f"predicted {predicted:.4g}; {row['note']}")

    return Test(f"the measured number is within {tolerance:.0%} of the predicted one", "", decide)


def resets() -> Test:
    """The norm of the residual stream after the last block changes by less than half of what the δ would add up to."""
    metric = "stream_log2_ratio"

    def decide(evidence: Evidence) -> Finding:
        own = evidence.effects.get("gradient", metric, evidence.effects.base)
        if own is None:
            return Finding(NOT_MEASURED)
        bound = math.sqrt(evidence.results["gradient"]["subject"]["layers"] / 12) / 2
        return Finding(
            _inside(own, -bound, bound), own, f"log2 of the stream's norm against the unquantized, bound ± {bound:.3g}"
        )

    return Test("after the last block the stream's norm is off by less than 2^(√(L/12)/2)", metric, decide)


def unmeasured(why: str) -> Test:
    """A claim that no probe tests."""
    return Test("none of the probes tests it", "", lambda evidence: Finding(NOT_MEASURED, None, why))


def _removed(evidence: Evidence, component: str, column: str) -> Effect | None:
    where = failure(column)
    whole, without = evidence.effects.of(where), evidence.effects.of(where, f"@-{component}")
    return whole.minus(without) if whole and without else None


def _detail(cell: Mapping[str, Any]) -> str:
    says = cell["says"]
    words = {
        "alone": {YES: "alone it has an effect", NO: "alone it has none", UNDECIDED: "alone: undecided"},
        "removed": {
            YES: "leaving it out takes some away",
            NO: "leaving it out takes nothing away",
            UNDECIDED: "left out: undecided",
        },
        "structure": {
            YES: "more than noise of its energy",
            NO: "less than noise of its energy",
            UNDECIDED: "not told apart from noise of its energy",
        },
    }
    return "; ".join(words[name][told] for name, told in says.items() if told)


# ---- the paper's claims ----------------------------------------------------------------------------------------------

CLAIMS = (
    Claim("scale-gradient", "scale", "gradient", "gradient",
          "rounding scales up to powers of two spoils the gradient",
          "abstract", causes("scale", "gradient")),
    Claim("scale-multiplies", "scale", "gradient", "gradient",
          "the scales' excesses multiply through the backward pass: a block adds one σ of √(1/12) to log2 of the norm",
          "abstract", law("gradient", "dx_step", mark="@backward")),
    Claim("scale-dominates", "scale", "gradient", "gradient",
          "of the three components the scale's is the one that dominates the gradient's error",
          "abstract", dominates("scale", "gradient")),
    Claim("deadzone-gradient", "deadzone", "gradient", "gradient",
          "the straight-through gradient doesn't see the deadzone, so that it has no part in the gradient's error",
          "", no_part("deadzone", "gradient")),
    Claim("delta-spread", "", "gradient", "gradient",
          "the scales' excesses δ add up over depth like independent uniform draws: their sum spreads as √(L/12)",
          "", near("gradient", "sum_delta_sd", 0.1)),
    Claim("layernorm-reset", "", "gradient", "gradient",
          "in the forward pass normalization resets the scale error from layer to layer",
          "", resets()),
    Claim("mbs-gradient", "+mbs", "gradient", "gradient",
          "macro-block scaling reduces the scale's bias, and with it the gradient's error",
          "abstract", helps("+mbs", "gradient")),
    Claim("of-gradient", "+of", "gradient", "gradient",
          "outlier fallback reduces what the scale's bias causes, too, in part",
          "abstract", helps("+of", "gradient")),
    Claim("deadzone-rollout", "deadzone", "rollout", "deadzone",
          "setting small values to zero is what makes rollouts worse",
          "abstract", causes("deadzone", "rollout")),
    Claim("deadzone-dominates", "deadzone", "rollout", "deadzone",
          "of the three components the deadzone's is the one that dominates the loss of rollout quality",
          "abstract", dominates("deadzone", "rollout")),
    Claim("deadzone-bland", "deadzone", "rollout", "deadzone",
          "the deadzone makes rollouts blander: fewer different answers of a group",
          "", changes("deadzone", "distinct_change", -1, "@deadzone")),
    Claim("of-rollout", "+of", "rollout", "deadzone",
          "outlier fallback brings the deadzone's entries back, and the quality of rollouts with them",
          "abstract", helps("+of", "rollout")),
    Claim("grid-entropy", "grid", "entropy", "temperature",
          "rounding to the grid is noise that raises the policy's entropy",
          "abstract", causes("grid", "entropy")),
    Claim("grid-dominates", "grid", "entropy", "temperature",
          "of the three components the grid's is the one that dominates the rise of entropy",
          "abstract", dominates("grid", "entropy")),
    Claim("t-eff", "", "entropy", "temperature",
          "noise on the logits acts like a temperature, T_eff = √(1 + 2 σ_η² / Var Δℓ)",
          "", law("temperature", "t_eff", unlike=1.0)),
    Claim("aqn-entropy", "+aqn", "entropy", "temperature",
          "annealed noise on the weights keeps the policy's entropy under control",
          "abstract", unmeasured("it is about a training run; `mxrl train` logs entropy and σ at every step")),
    Claim("drift-u", "+of", "", "drift",
          "the gap between rollout and training has its least at α = .5, with both ends higher",
          "", law("drift", "u_minimum")),
    Claim("fork-harm", "", "rollout", "fork",
          "once a 4-bit rollout leaves the unquantized one, its answers are worse",
          "", changes("fork", "forked_accuracy_change", -1)),
    Claim("moe-redundancy", "", "routing", "routing",
          "the experts' errors cancel in part, so that an MoE suffers less than a dense model",
          "", changes("routing", "redundancy", +1)),
)  # fmt: skip

"""The paper's claims on training (arXiv 2605.20402, GSM8K after GRPO + TIS), each as an effect of the table's rows.

A claim says between which bounds an effect lies. Most say a sign (above 0); "close to bf16" says within NEAR of it.
LATER holds those that were added when results had been looked at.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from effects import Measure, error_change, greedy, late_entropy, late_rollout_entropy

NEAR = 0.02  # "close to bf16": within two points; the paper's own interval, of one run each on 1319 problems, is wider
STEADY = 0.05  # "constant": within 5 % of its first value
KINDS = {"dense": "dense", "moe": "MoE"}
ROWS = {  # names in sweep.yaml → as the page calls them
    "bf16": "bf16", "mxfp4": "MXFP4", "mbs": "+ MBS", "of": "+ OF", "aqn": "+ AQN", "mbs+of": "+ MBS + OF",
    "mbs+aqn": "+ MBS + AQN", "full": "+ MBS + OF + AQN", "full-of1": "+ MBS + OF(1) + AQN", "nvfp4": "NVFP4",
    "qerl": "NVFP4 W4A16, LoRA, AQN",
}  # fmt: skip


@dataclass(frozen=True)
class Claim:
    """One line of the page. paper: what the paper measured, 0 … 1 (None: it gives no number)."""

    text: str
    compared: str
    terms: Mapping[str, float]
    paper: float | None
    low: float = 0.0
    high: float = math.inf
    measure: Measure = greedy
    unit: str = "pp"


def difference(a: str, b: str, kind: str) -> Mapping[str, float]:
    return {f"{kind}/{a}": 1.0, f"{kind}/{b}": -1.0}


def minus(a: str, b: str) -> str:
    """`+ OF − [+ MBS + AQN]`."""
    return f"{ROWS[a]} − " + (f"[{ROWS[b]}]" if ROWS[b].startswith("+") else ROWS[b])


def each(
    text: str, a: str, b: str, paper: tuple[float, float], low: float = 0.0, high: float = math.inf
) -> list[Claim]:
    """A claim on the difference of two rows, of each kind."""
    return [
        Claim(f"{KINDS[kind]}: {text}", minus(a, b), difference(a, b, kind), number, low, high)
        for kind, number in zip(KINDS, paper, strict=True)
    ]  # fmt: skip


def between_kinds(text: str, a: str, b: str, paper: float, low: float = 0.0, high: float = math.inf) -> Claim:
    """A claim on how much larger a difference is on dense than on MoE."""
    terms = {f"dense/{a}": 1.0, f"dense/{b}": -1.0, f"moe/{a}": -1.0, f"moe/{b}": 1.0}
    return Claim(text, f"{minus(a, b)}, dense − MoE", terms, paper, low, high)


AQN_PAIRS = (("aqn", "mxfp4"), ("mbs+aqn", "mbs"), ("full", "mbs+of"))  # with it, and otherwise alike without


def with_aqn(kind: str) -> Mapping[str, float]:
    """Rows with AQN minus those without, the mean of the pairs."""
    signs = [(row, sign) for pair in AQN_PAIRS for row, sign in zip(pair, (1, -1), strict=True)]
    return {f"{kind}/{row}": sign / len(AQN_PAIRS) for row, sign in signs}


CLAIMS: list[Claim] = [
    *each("plain MXFP4 loses accuracy", "mxfp4", "bf16", (-0.219, -0.027), low=-math.inf, high=0.0),
    between_kinds("plain MXFP4 loses more on dense than on MoE", "mxfp4", "bf16", -0.192, low=-math.inf, high=0.0),
    *each("OF alone gives some of it back", "of", "mxfp4", (0.175, 0.015)),
    between_kinds("OF helps dense more than MoE", "of", "mxfp4", 0.160),
    *each("all three corrections help", "full", "mxfp4", (0.212, 0.0369)),
    Claim("dense: all three end close to bf16", minus("full", "bf16"), difference("full", "bf16", "dense"), -0.007,
          -NEAR, NEAR),
    Claim("MoE: all three end above bf16", minus("full", "bf16"), difference("full", "bf16", "moe"), 0.0098),
    Claim("dense: OF carries it", minus("of", "mbs+aqn"), difference("of", "mbs+aqn", "dense"), None),
    Claim("MoE: MBS + AQN carry it", minus("mbs+aqn", "of"), difference("mbs+aqn", "of", "moe"), None),
    *each("α = .5 beats α = 1", "full", "full-of1", (0.01, 0.01)),
]  # fmt: skip
ENTROPY: list[Claim] = [
    Claim(f"{KINDS[kind]}: entropy is higher with AQN than without", "with − without, mean of three pairs",
          with_aqn(kind), None, measure=late_entropy, unit="nats")
    for kind in KINDS
]  # fmt: skip
LATER: list[Claim] = [
    *(Claim(f"{KINDS[kind]}: so is the sampling policy's, noise included", "with − without, mean of three pairs",
            with_aqn(kind), None, measure=late_rollout_entropy, unit="nats") for kind in KINDS),
    *(Claim(f"{KINDS[kind]}: the weights' error is constant through training", "MXFP4: relative MSE, last ÷ first − 1",
            {f"{kind}/mxfp4": 1.0}, None, -STEADY, STEADY, measure=error_change, unit="%") for kind in KINDS),
]  # fmt: skip

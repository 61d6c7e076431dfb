"""The claims' verdicts on results made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from mxrl.probes.claims import CLAIMS, VERDICTS, claims
from mxrl.probes.matrix import COLUMNS

PROBES = ("gradient", "temperature", "deadzone", "drift", "fork", "routing")


def rows(metric: str, **found: tuple[float, float]) -> list[dict[str, Any]]:
    """Measures of MXFP4: `whole` and the components by name; less_ is @-, mbs and of are corrections."""
    names = {"whole": "mxfp4", "mbs": "mxfp4+mbs", "of": "mxfp4+of"}
    return [
        {"treatment": names.get(k, "mxfp4@" + k.replace("less_", "-")), "metric": metric, "value": v, "low": v - h,
         "high": v + h, "n": 16, "unit": ""}
        for k, (v, h) in found.items()
    ]  # fmt: skip


def verdicts(probe: str, measures: list[dict[str, Any]], theory: list[dict[str, Any]] | None = None) -> dict[str, str]:
    found = claims({probe: {"probe": probe, "measures": measures, "theory": theory or []}})
    return {c["id"]: c["verdict"] for c in found}


def test_every_claim_can_be_told_apart_and_belongs_to_a_probe() -> None:
    assert len({c.id for c in CLAIMS}) == len(CLAIMS)
    assert {c.probe for c in CLAIMS} <= set(PROBES)
    assert {c.failure for c in CLAIMS} <= {"", *(c.name for c in COLUMNS)}
    assert all(c.says and c.says[0].islower() and not c.says.endswith(".") for c in CLAIMS)


def test_nothing_is_claimed_of_what_was_not_run_or_not_measured() -> None:
    assert claims({}) == []
    for probe in PROBES:
        found = claims({probe: {"probe": probe, "measures": [], "theory": []}})
        assert found and {c["verdict"] for c in found} == {"not measured"}
        assert all(c["value"] is None and c["low"] is None for c in found)


GOOD = dict(whole=(0.1, 0.005), scale=(0.15, 0.005), less_scale=(0.05, 0.005), deadzone=(0.003, 0.002),
            less_deadzone=(0.1, 0.003), grid=(0.05, 0.005), less_grid=(0.12, 0.005), mbs=(0.08, 0.005),
            of=(0.03, 0.005))  # fmt: skip


def test_a_model_that_agrees_with_the_paper_on_gradients() -> None:
    found = verdicts("gradient", rows("grad_cosine", **GOOD))
    assert {k for k, v in found.items() if v == "borne out"} == {
        "scale-gradient", "scale-dominates", "deadzone-gradient", "mbs-gradient", "of-gradient",
    }  # fmt: skip
    assert found["delta-spread"] == found["layernorm-reset"] == "not measured"


@pytest.mark.parametrize(
    ("id", "change"),
    [
        ("scale-gradient", {"less_scale": (0.11, 0.005)}),  # leaving it out makes it worse
        ("scale-gradient", {"scale": (0.003, 0.002)}),  # alone it does nothing
        ("scale-dominates", {"grid": (0.2, 0.005)}),  # another one does more
        ("scale-dominates", {"deadzone": (0.2, 0.005)}),
        ("deadzone-gradient", {"deadzone": (0.05, 0.005)}),  # alone it has half of the effect
        ("deadzone-gradient", {"less_deadzone": (0.05, 0.005)}),  # leaving it out takes half away
        ("mbs-gradient", {"mbs": (0.12, 0.005)}),  # worse than plain
    ],
)
def test_a_model_that_contradicts_it(id: str, change: dict[str, tuple[float, float]]) -> None:
    assert verdicts("gradient", rows("grad_cosine", **(GOOD | change)))[id] == "contradicted"


@pytest.mark.parametrize(
    ("id", "change"),
    [
        ("scale-gradient", {"less_scale": (0.09, 0.01)}),  # takes .01 ± .011 away, the margin is .01
        ("scale-dominates", {"grid": (0.15, 0.01)}),
        ("deadzone-gradient", {"deadzone": (0.01, 0.005)}),
        ("mbs-gradient", {"mbs": (0.099, 0.005)}),
    ],
)
def test_a_model_that_leaves_it_open(id: str, change: dict[str, tuple[float, float]]) -> None:
    assert verdicts("gradient", rows("grad_cosine", **(GOOD | change)))[id] == "undecided"


def test_rollouts_get_worse_by_a_negative_change() -> None:
    measures = rows("greedy_accuracy_change", whole=(-0.2, 0.02), deadzone=(-0.15, 0.02), less_deadzone=(-0.05, 0.02),
                    scale=(-0.02, 0.02), grid=(-0.05, 0.02), of=(-0.05, 0.02))  # fmt: skip
    measures += rows("distinct_change", deadzone=(-0.1, 0.03))
    found = verdicts("deadzone", measures)
    assert set(found.values()) == {"borne out"} and len(found) == 4
    assert verdicts("deadzone", rows("distinct_change", deadzone=(0.1, 0.03)))["deadzone-bland"] == "contradicted"
    number = next(c for c in claims({"deadzone": {"measures": measures, "theory": []}}) if c["id"] == "of-rollout")
    assert number["value"] == pytest.approx(-0.15) and number["high"] < 0  # the plain recipe loses .15 more


def law(name: str, within: bool | None, treatment: str | None = "mxfp4") -> dict[str, Any]:
    return {"name": name, "treatment": treatment, "predicted": 2.0, "measured": 1.9, "low": 1.8, "high": 2.1,
            "source": "", "within": within, "note": ""}  # fmt: skip


@pytest.mark.parametrize(("within", "verdict"), [(True, "borne out"), (False, "contradicted"), (None, "undecided")])
def test_a_law_is_decided_by_its_row(within: bool | None, verdict: str) -> None:
    theory = [law("u_minimum", within, None), law("u_minimum:master", False, None), law("u_end_0", False, None)]
    claim = next(c for c in claims({"drift": {"measures": [], "theory": theory}}) if c["id"] == "drift-u")
    assert (claim["verdict"], claim["value"], claim["low"]) == (verdict, 1.9, 1.8)
    assert claim["detail"].startswith("predicted 2")


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(1.97, 1.98, "borne out"), (1.81, 2.19, "borne out"), (1.7, 1.9, "undecided"), (1.7, 2.3, "undecided"),
     (1.7, 1.75, "contradicted"), (2.25, 2.3, "contradicted")],
)  # fmt: skip
def test_the_spread_of_the_summed_deltas_need_only_be_near(low: float, high: float, verdict: str) -> None:
    """Predicted 2, so [1.8, 2.2] will do: draws make the interval narrower than the law is exact."""
    row = law("sum_delta_sd", False) | {"measured": (low + high) / 2, "low": low, "high": high}
    other = row | {"treatment": "mxfp4+mbs", "measured": 9.0, "low": 9.0, "high": 9.0}
    result = {"gradient": {"measures": rows("grad_cosine", **GOOD), "theory": [other, row]}}
    claim = next(c for c in claims(result) if c["id"] == "delta-spread")
    assert (claim["verdict"], claim["low"], claim["high"]) == (verdict, low, high)


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(1.1, 1.5, "borne out"), (0.9, 1.5, "undecided"), (1.8, 1.9, "contradicted")],
)
def test_a_temperature_that_may_be_one_bears_nothing_out(low: float, high: float, verdict: str) -> None:
    """The formula says 1.3; the probe's row is within where the interval holds it."""
    row = law("t_eff", low <= 1.3 <= high) | {"predicted": 1.3, "low": low, "high": high}
    found = verdicts("temperature", rows("t_eff", whole=(1.3, 0.1)), [row])
    assert found["t-eff"] == verdict


@pytest.mark.parametrize(
    ("value", "verdict"),
    [(0.1, "borne out"), (-0.1, "borne out"), (0.45, "undecided"), (0.6, "contradicted"), (-0.6, "contradicted")],
)
def test_the_stream_is_reset_where_its_norm_moves_little(value: float, verdict: str) -> None:
    """12 layers: the δ would add up to √(12/12) = 1, so the bound is .5."""
    measures = rows("stream_log2_ratio", whole=(value, 0.08))
    found = claims({"gradient": {"measures": measures, "theory": [], "subject": {"layers": 12}}})
    assert {c["id"]: c["verdict"] for c in found}["layernorm-reset"] == verdict


@pytest.mark.parametrize(("half", "verdict"), [(0.01, "borne out"), (0.1, "undecided")])
@pytest.mark.parametrize(("probe", "metric", "id", "sign"), [
    ("routing", "redundancy", "moe-redundancy", 1), ("fork", "forked_accuracy_change", "fork-harm", -1),
])  # fmt: skip
def test_a_sign_is_decided_by_its_interval(
    probe: str, metric: str, id: str, sign: int, half: float, verdict: str
) -> None:
    assert verdicts(probe, rows(metric, whole=(0.05 * sign, half)))[id] == verdict
    opposite = "contradicted" if verdict == "borne out" else verdict
    assert verdicts(probe, rows(metric, whole=(-0.05 * sign, half)))[id] == opposite


def test_aqn_is_said_to_be_measured_elsewhere() -> None:
    claim = next(c for c in claims({"temperature": {"measures": [], "theory": []}}) if c["id"] == "aqn-entropy")
    assert claim["verdict"] == "not measured" and "mxrl train" in claim["detail"]
    assert set(VERDICTS) == {"borne out", "contradicted", "undecided", "not measured"}

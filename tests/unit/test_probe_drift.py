"""The drift probe: what a U is, on curves with a known answer; what each source is, where its gap is known."""

from __future__ import annotations

import copy
import dataclasses
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mxrl.nn import AqnNoise, master_matrices, quantized_layers, rollout_weights
from mxrl.probes.drift import PRIMARY, SOURCES, Master, drift, full_pass, split
from mxrl.probes.drift_shape import claims, over, shape
from mxrl.probes.intervals import paired
from mxrl.probes.subject import ProbeError, Subject, open_subject
from mxrl.probes.treatments import treated
from mxrl.recipes import Recipe
from mxrl.report.page import Page
from mxrl.report.probe_drift import outcome, sections
from mxrl.rl.policy import build_policy, char_tokenizer, save_policy
from mxrl.rl.rollout import Rollout, score
from mxrl.scan import NonFiniteError

ALPHAS = [0.0, 0.25, 0.5, 0.75, 1.0]
OF = [f"mxfp4+of:{alpha}" for alpha in (0.0, 0.5, 1.0)]


# --- the shape of a curve --------------------------------------------------------------------------------------------


def curve(
    means: list[float], seeds: int = 4, level: float = 0.0, noise: float = 0.0, seed: int = 0
) -> list[list[float]]:
    """values[i][s] = means[i] + level of the seed + noise: the level is shared by all α, the noise is not."""
    draw = random.Random(seed)
    levels = [draw.gauss(0, level) for _ in range(seeds)]
    return [[m + shared + draw.gauss(0, noise) for shared in levels] for m in means]


def test_a_u_is_found_under_noise_that_the_seeds_share() -> None:
    # levels vary by .05, five times the depth of the U; only paired by seed does it show
    values = curve([1.02, 1.005, 1.0, 1.006, 1.015], level=0.05, noise=0.0005)
    found = shape(ALPHAS, values)
    assert (found["minimum"], found["u"], found["verdict"], found["monotone"]) == (0.5, True, "U", None)
    first, last = found["differences"]
    assert (first["alpha"], last["alpha"], first["n"]) == (0.0, 1.0, 4)
    assert first["value"] == pytest.approx(0.02, abs=0.002) and last["value"] == pytest.approx(0.015, abs=0.002)
    assert 0 < first["low"] < first["value"] < first["high"]


def test_ratios_of_a_u_by_hand() -> None:
    # seed by seed 2 and 2 at the first end, 1 and 4 at the last: geometric means 2 and 2
    found = shape([0, 0.5, 1], [[2.0, 6.0], [1.0, 3.0], [1.0, 12.0]])
    first, last = found["ends_over_minimum"]
    assert first == {"alpha": 0, "ratio": pytest.approx(2), "low": pytest.approx(2), "high": pytest.approx(2)}
    assert last["ratio"] == pytest.approx(2) and last["low"] < 1e-3 and last["high"] > 1e3  # two seeds, t = 12.7
    assert not found["u"] and found["minimum"] == 0.5  # the least by its mean, and yet no U


@pytest.mark.parametrize(("step", "verdict", "minimum"), [(-0.1, "falling", 1.0), (0.1, "rising", 0.0)])
def test_monotone(step: float, verdict: str, minimum: float) -> None:
    found = shape(ALPHAS, curve([1 + step * i for i in range(5)], level=1.0, noise=0.001))
    assert (found["verdict"], found["monotone"], found["u"], found["minimum"]) == (verdict, verdict, False, minimum)


def test_a_step_back_is_not_monotone_and_one_high_end_no_u() -> None:
    values = curve([2.0, 1.5, 1.0, 1.2, 1.0], noise=0.001)
    found = shape(ALPHAS, values)
    assert (found["u"], found["monotone"], found["verdict"]) == (False, None, "lower at the last α")
    assert shape(ALPHAS, values[::-1])["verdict"] == "higher at the last α"


def test_means_that_fall_by_less_than_their_noise_are_not_monotone() -> None:
    found = shape([0, 0.5, 1], [[3.0, 1.0], [1.5, 2.4], [0.9, 2.9]])
    assert (found["minimum"], found["monotone"], found["verdict"]) == (1, None, "undecided")


@pytest.mark.parametrize("seeds", [4, 8])
def test_flat_noise_is_undecided(seeds: int) -> None:
    """Under no effect at all a U must be called in under 5 % of cases, though the minimum was picked from the data."""
    verdicts = [shape(ALPHAS, curve([1.0] * 5, seeds, noise=0.1, seed=s))["verdict"] for s in range(1000)]
    assert verdicts.count("U") < 50
    assert verdicts.count("falling") + verdicts.count("rising") < 20
    assert sum("at the last" in v for v in verdicts) < 60
    assert verdicts.count("undecided") > 880


def test_one_seed_decides_nothing() -> None:
    found = shape(ALPHAS, curve([2.0, 1.5, 1.0, 1.5, 2.0], seeds=1))
    assert (found["minimum"], found["verdict"], found["differences"][0]["low"]) == (0.5, "undecided", None)
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize("alphas", [[0.0, 1.0], [0.0, 0.5, 0.5], [1.0, 0.5, 0.0]])
def test_shape_needs_three_increasing_alphas(alphas: list[float]) -> None:
    with pytest.raises(ValueError, match="three increasing"):
        shape(alphas, [[1.0, 2.0]] * len(alphas))


def test_ratio_without_a_gap_is_unknown_but_equal_is_one() -> None:
    assert over([0.0, 1.0], [1.0, 1.0]).value != over([0.0, 1.0], [1.0, 1.0]).value  # NaN
    assert over([0.0, 0.0], [0.0, 0.0]) == (1.0, 1.0, 1.0, 2)


@pytest.mark.parametrize(
    ("means", "minimum", "first", "last"),
    [
        ([1.7, 1.2, 1.0, 1.3, 1.8], True, True, True),  # the claim
        ([3.0, 2.0, 1.0, 0.5, 0.2], False, False, False),  # falling
        ([1.3, 1.1, 1.0, 1.1, 1.3], True, False, False),  # a U, but a shallow one
        ([1.7, 0.9, 1.0, 1.3, 1.8], False, True, True),  # a U elsewhere
    ],
)
def test_claims_on_known_curves(means: list[float], minimum: bool, first: bool, last: bool) -> None:
    values = curve(means, noise=0.002)
    rows = {r["name"]: r for r in claims("master", ALPHAS, values, shape(ALPHAS, values), primary=True)}
    assert {name: rows[name]["within"] for name in rows} == {"u_minimum": minimum, "u_end_0": first, "u_end_1": last}
    assert rows["u_end_0"]["measured"] == pytest.approx(means[0] / means[2], rel=0.01)


def test_a_true_claim_under_noise_is_undecided_and_hardly_ever_contradicted() -> None:
    told: list[bool | None] = []
    for seed in range(300):
        values = curve([1.7, 1.2, 1.0, 1.2, 1.7], noise=0.3, seed=seed)
        rows = claims("master", ALPHAS, values, shape(ALPHAS, values), primary=False)
        assert [r["name"] for r in rows] == ["u_minimum:master", "u_end_0:master", "u_end_1:master"]
        told += [r["within"] for r in rows]
    assert told.count(False) < 0.05 * len(told) and told.count(None) > 0.4 * len(told)


def test_the_claimed_minimum_is_undecided_where_another_is_as_low() -> None:
    values = curve([1.7, 1.2, 1.0, 1.0, 1.0], noise=0.01)
    rows = claims("master", ALPHAS, values, shape(ALPHAS, values), primary=True)
    assert [r["within"] for r in rows] == [None, True, False]


def test_no_claim_without_its_alpha() -> None:
    values, alphas = curve([1.7, 1.2, 1.0]), [0.0, 0.4, 1.0]
    assert not claims("master", alphas, values, shape(alphas, values), primary=True)


# --- the sources -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("drift") / "tiny"
    save_policy(build_policy("dense", size="tiny"), char_tokenizer(), path)  # bf16, as most checkpoints
    return path


def opened(folder: Path, **options: Any) -> Subject:
    options = {"prompts": 3, "device": "cpu", "max_new_tokens": 8, **options}
    return open_subject(str(folder), "chain", **options)


@pytest.fixture(scope="module")
def subject(folder: Path) -> Subject:
    return opened(folder)


@pytest.fixture(scope="module")
def result(subject: Subject) -> dict[str, Any]:
    return drift(subject, [*OF, "mxfp4", "bf16"], seeds=3)


def value(result: dict[str, Any], treatment: str, source: str, metric: str = "gap_mean_abs") -> float:
    (row,) = [
        r for r in result["measures"] if (r["treatment"], r["source"], r["metric"]) == (treatment, source, metric)
    ]
    return row["value"]


def test_same_weights_and_the_same_pass_have_no_gap_at_all(subject: Subject) -> None:
    """The zero of every source but the cached ones: held and unheld weights, quantized twice, batch by batch."""
    with treated(subject.model, "mxfp4+of"), rollout_weights(subject.model):
        drawn = subject.rollout(samples=2)
        held = full_pass(subject, drawn)
    with treated(subject.model, "mxfp4+of"):
        again = full_pass(subject, drawn)
    mask = drawn.completion_mask
    assert mask.sum() > 20 and torch.equal(held.logps[mask], again.logps[mask])
    assert float(held.logps[mask].abs().min()) > 0


def test_full_pass_is_score_in_another_order(subject: Subject) -> None:
    """In batches of two by length, columns of padding left out: the same tokens, places and (in float32) numbers."""
    few = dataclasses.replace(subject, batch=2)
    drawn = subject.rollout(samples=3)
    expected = score(subject.model, *drawn.inputs(), drawn.completion_ids.shape[1])
    found = full_pass(few, drawn)
    mask = drawn.completion_mask
    torch.testing.assert_close(found.logps[mask], expected.logps[mask], rtol=0, atol=1e-5)
    torch.testing.assert_close(found.entropies[mask], expected.entropies[mask], rtol=0, atol=1e-5)
    assert torch.equal(found.argmax[mask], expected.argmax[mask])
    assert len(set(drawn.prompt_mask.sum(1).tolist())) > 1


def test_split_takes_one_completion_of_every_prompt(subject: Subject) -> None:
    drawn = subject.rollout(samples=3)
    parts = split(drawn, 3)
    width = drawn.prompt_ids.shape[1]
    for part in parts:
        assert [
            row[-n:] for row, n in zip(part.prompt_ids.tolist(), part.prompt_mask.sum(1).tolist(), strict=True)
        ] == (subject.prompt_ids)
        assert part.prompt_ids.shape == (3, width)
    assert torch.equal(torch.stack([p.logps for p in parts], 1).flatten(0, 1), drawn.logps)


def test_a_drawn_master_rounds_to_its_export_and_is_another_number() -> None:
    torch.manual_seed(0)
    weight = torch.cat([torch.randn(4000), torch.tensor([0.0, 1.0, -1.0, 2.0**-126, 3.3895e38])]).bfloat16().float()
    master = weight + Master(0, 0, {})("a", weight)
    assert torch.equal(master.bfloat16().float(), weight)
    assert bool((master != weight)[weight != 0].all()) and float(master[weight == 0].abs().sum()) == 0
    share = (master - weight).abs() / (weight.abs() * 2.0**-8).clamp(min=1e-45)  # of the spacing of bf16's numbers
    assert (
        0.15 < float(share[:4000].mean()) < 0.4
    )  # uniform in ± half of a spacing that is 1 to 2 times this: ~ .18–.36
    assert torch.equal(weight + Master(0, 0, {})("a", weight), master)
    for other in (Master(1, 0, {}), Master(0, 1, {})):
        assert not torch.equal(weight + other("a", weight), master)
    assert not torch.equal(weight + Master(0, 0, {})("b", weight), master)


def test_every_source_is_there_and_cached_float32_is_rounding_alone(result: dict[str, Any]) -> None:
    for treatment in ("mxfp4", "mxfp4+of:0.0", "mxfp4+of", "mxfp4+of:1.0"):
        for source in SOURCES:
            assert value(result, treatment, source) >= 0
    assert value(result, "bf16", "cached_float32") < 1e-5 < value(result, "bf16", "cached_bfloat16")
    assert value(result, "mxfp4", "cached_float32") < value(result, "mxfp4", "unquantized") / 5
    assert value(result, "mxfp4", "aqn_start", "weight_change") > value(result, "mxfp4", "aqn_end", "weight_change") > 0
    left = {(r["treatment"], r["source"]) for r in result["measures"]}
    assert ("bf16", "unquantized") not in left and ("bf16", "w4a16") not in left  # nothing is quantized there
    assert value(result, "bf16", "master", "weight_change") == pytest.approx(2**-9, rel=0.5)
    assert value(result, "mxfp4+of", PRIMARY, "tokens") <= 3 * 8


def test_alpha_zero_is_the_recipe_without_of(subject: Subject, result: dict[str, Any]) -> None:
    def rows(treatment: str) -> list[dict[str, Any]]:
        return [{**r, "treatment": ""} for r in result["measures"] if r["treatment"] == treatment]

    assert rows("mxfp4+of:0.0") == rows("mxfp4")
    drawn = subject.rollout()
    with treated(subject.model, "mxfp4+of:0.0"):
        zero = full_pass(subject, drawn)
    with treated(subject.model, "mxfp4"):
        assert torch.equal(full_pass(subject, drawn).logps, zero.logps)


def test_w4a16_aqn_and_unquantized_are_what_they_say(subject: Subject, result: dict[str, Any]) -> None:
    """Each by hand: the tokens of its own rollout policy, scored by two plain passes."""

    def scored(drawn: list[Rollout], recipe: str, noises: Sequence[AqnNoise | None] = (None,) * 3) -> list[Tensor]:
        out = []
        for d, noise in zip(drawn, noises, strict=True):
            with treated(subject.model, recipe), rollout_weights(subject.model, noise):
                out.append(score(subject.model, *d.inputs(), d.completion_ids.shape[1]).logps)
        return out

    def check(source: str, a: list[Tensor], b: list[Tensor], drawn: list[Rollout]) -> None:
        each = [float((x - y).abs()[d.completion_mask].mean()) for x, y, d in zip(a, b, drawn, strict=True)]
        # the batches are put together otherwise here, and a float32 sum in another order may flip a 4-bit code
        assert value(result, "mxfp4", source) == pytest.approx(sum(each) / 3, rel=0.05)
        assert int(sum(d.completion_mask.sum() for d in drawn)) == 3 * value(result, "mxfp4", source, "tokens")

    with treated(subject.model, "mxfp4"), rollout_weights(subject.model):
        drawn = split(subject.rollout(samples=3), 3)
    check("unquantized", scored(drawn, "bf16"), scored(drawn, "mxfp4"), drawn)
    with treated(subject.model, "mxfp4+w4a16"), rollout_weights(subject.model):
        drawn = split(subject.rollout(samples=3), 3)
    check("w4a16", scored(drawn, "mxfp4"), scored(drawn, "mxfp4+w4a16"), drawn)
    recipe = Recipe.parse("mxfp4+aqn")
    for source, sigma in (("aqn_start", 1e-2), ("aqn_end", 1e-3)):
        noises, drawn = [AqnNoise(recipe, 0, s, sigma) for s in range(3)], []
        for s, noise in enumerate(noises):
            with treated(subject.model, "mxfp4"), rollout_weights(subject.model, noise):
                drawn.append(dataclasses.replace(subject, seed=s).rollout())
        check(source, scored(drawn, "mxfp4"), scored(drawn, "mxfp4", noises), drawn)


def test_master_is_the_model_s_own_where_it_has_more_bits(folder: Path) -> None:
    subject = opened(folder)
    with torch.no_grad():
        for p in subject.model.parameters():
            p.mul_(1.001)
    before = copy.deepcopy(subject.model.state_dict())
    found = drift(subject, ["mxfp4"], seeds=2, sources=["master"])
    assert found["settings"]["master"] == "the model's own weights"
    # by hand: the export is bf16(w) everywhere, and only the converted layers get w back
    exported = copy.deepcopy(subject)
    originals = dict(master_matrices(subject.model))
    with torch.no_grad():
        for p in exported.model.parameters():
            p.copy_(p.bfloat16())
    with treated(exported.model, "mxfp4"), rollout_weights(exported.model):
        drawn = split(exported.rollout(samples=2), 2)
        rollout = [full_pass(exported, d).logps for d in drawn]
    with torch.no_grad():
        for layer in quantized_layers(exported.model):
            layer.parameter("weight").copy_(originals[f"{layer.name}.weight"])
    with treated(exported.model, "mxfp4"):
        training = [full_pass(exported, d).logps for d in drawn]
    each = [
        float((a - b).abs()[d.completion_mask].double().mean())
        for a, b, d in zip(training, rollout, drawn, strict=True)
    ]
    assert value(found, "mxfp4", "master") == pytest.approx(sum(each) / 2, rel=1e-5) and each[0] > 0
    assert all(torch.equal(v, before[k]) for k, v in subject.model.state_dict().items())


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_bfloat16_is_the_model_loaded_in_it(kind: str, tmp_path: Path) -> None:
    """A copy converted here computes as one that transformers loads (rotary frequencies stay in float32)."""
    save_policy(build_policy(kind, size="tiny"), char_tokenizer(), tmp_path / kind)
    loaded = opened(tmp_path / kind, dtype=torch.bfloat16)
    options: dict[str, Any] = {"seeds": 2, "sources": ["cached_bfloat16", "unquantized"]}
    from_float32 = drift(opened(tmp_path / kind), ["mxfp4"], **options)
    from_bfloat16 = drift(loaded, ["mxfp4"], **options)
    assert from_float32["measures"] == from_bfloat16["measures"]
    assert value(from_bfloat16, "mxfp4", "cached_bfloat16", "tokens") > 0


def test_bit_for_bit_and_json(subject: Subject, result: dict[str, Any]) -> None:
    seen: list[float] = []
    again = drift(subject, [*OF, "mxfp4", "bf16"], seeds=3, progress=seen.append)
    assert json.dumps(again, allow_nan=False) == json.dumps(result, allow_nan=False)
    assert seen == sorted(seen) and seen[-1] == 1.0
    rows = [r for r in result["measures"] if r["metric"] == "gap_mean_abs"]
    assert all(r["low"] <= r["value"] <= r["high"] and r["n"] == 3 and r["unit"] == "nats" for r in rows)


def test_shapes_are_of_the_series_alone(result: dict[str, Any]) -> None:
    assert {(s["base"], s["source"]) for s in result["shapes"]} == {("mxfp4", source) for source in SOURCES}
    assert [r["name"] for r in result["theory"]][:3] == ["u_minimum", "u_end_0", "u_end_1"]
    (absolute, relative) = result["curves"]
    assert absolute["x"] == [0.0, 0.5, 1.0]
    assert absolute["series"]["unquantized"]["mean"][1] == value(result, "mxfp4+of", "unquantized")
    assert relative["series"]["unquantized"]["mean"][0] == 1.0


@pytest.mark.parametrize(
    ("treatments", "options", "message"),
    [
        (["mxfp4@backward"], {}, "changes the backward pass only"),
        (["mxfp4"], {"seeds": 0}, "seeds=0 must be at least 1"),
        (["mxfp4"], {"sources": ["cache"]}, "unknown source 'cache'; possible: cached_bfloat16"),
        (["mxfp4"], {"sources": []}, "no source"),
        ([], {}, "no treatment"),
    ],
)
def test_what_cannot_be_measured(subject: Subject, treatments: list[str], options: Any, message: str) -> None:
    with pytest.raises(ProbeError, match=message):
        drift(subject, treatments, **options)


def test_log_probabilities_that_are_not_finite(folder: Path) -> None:
    subject = opened(folder)
    with torch.no_grad():
        subject.model.lm_head.weight.fill_(float("inf"))
    with pytest.raises(NonFiniteError, match="log-probabilities aren't finite under mxfp4"):
        drift(subject, ["mxfp4"], seeds=1, sources=["unquantized"])


def test_the_page_says_what_came_out(result: dict[str, Any]) -> None:
    page = Page("t")
    sections(page, json.loads(json.dumps(result)))
    text = page.html()
    assert "Drift between rollout and training" in text and outcome(result) in text.replace("<code>", "`").replace(
        "</code>", "`"
    )
    assert f"{value(result, 'mxfp4', 'unquantized'):.4g}"[:5] in text
    us = {**result, "shapes": [{**result["shapes"][0], "u": True, "verdict": "U", "minimum": 0.5}]}
    assert outcome(us) == f"A U over α is found in `{PRIMARY}` (at 0.5)."
    assert "In no source" in outcome({**result, "shapes": [{**result["shapes"][0], "u": False, "verdict": "falling"}]})
    assert "no curve" in outcome({**result, "shapes": []})


def test_paired_over_seeds_beats_unpaired() -> None:
    a, b = curve([1.0, 1.01], level=1.0, noise=1e-4)
    assert paired(b, a).low > 0

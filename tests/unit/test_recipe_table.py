"""experiments/recipe_table: effects and verdicts on made-up runs with known answers, results from packed runs, and a
page that is what tables.py prints."""

import importlib
import json
import math
import sys
import tarfile
from pathlib import Path

import pytest
import yaml

from mxrl.probes.intervals import Mean

HERE = Path(__file__).parents[2] / "experiments" / "recipe_table"
NAMES = ("collect", "effects", "claims", "tables")


@pytest.fixture(scope="module")
def scripts():
    """The scripts under their own names, as they import each other; other experiments have such names too."""
    former = {name: sys.modules.pop(name) for name in NAMES if name in sys.modules}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HERE))
        yield {name: importlib.import_module(name) for name in NAMES}
    for name in NAMES:
        sys.modules.pop(name, None)
    sys.modules.update(former)


@pytest.fixture(scope="module")
def effects(scripts):
    return scripts["effects"]


@pytest.fixture(scope="module")
def tables(scripts):
    return scripts["tables"]


def right(count, n=400):
    """`count` of n problems right, from the first on: two such strings differ in the problems between their counts."""
    return "1" * count + "0" * (n - count)


def run(row, seed, after, *, before=100, state="done", steps=40, n=400, **more):
    """A run of collect.py's; after: problems right after training."""
    evals = [
        {"step": step, "accuracy": count / n, "n": n, "right": right(count, n),
         "sampled": {"samples": 2, "accuracy": count / n, "right": right(count, n).replace("1", "2")}}
        for step, count in ((0, before), (steps, after))
    ]  # fmt: skip
    options = {"model": f"policy:{row.split('/')[0]}", "task": "chain", "task_options": {}, "recipe": row.split("/")[1],
               "seed": seed, "steps": steps, "updates_per_rollout": 1, "iterations": 1, "lr": 5e-5,
               "prompts_per_step": 64, "samples_per_prompt": 8, "micro_batch": 256, "loss": "dapo", "eval_problems": n,
               "eval_samples": 2, "temperature": 1.0, "max_new_tokens": None}  # fmt: skip
    info = {"device": "made up", "created": "2026-01-01", "commit": "0" * 40, "versions": {"torch": "0"}}
    return {"run": f"{row}/s{seed}", "state": state, "reason": "", "options": options, "info": info,
            "evals": evals if state == "done" else evals[:1]} | more  # fmt: skip


def made(effects, rows, steps=()):
    """Results of rows: {"dense/bf16": [right after training, of seed 0, 1, …]}."""
    runs = [run(row, seed, after) for row, values in rows.items() for seed, after in enumerate(values)]
    return effects.Results.of(runs, list(steps))


# --- effects ---------------------------------------------------------------------------------------------------------


def test_a_difference_is_paired_over_seeds_and_over_problems(effects):
    """Seeds differ by 80 problems, the pairs by 19, 20 and 21: only the pairs' spread counts."""
    results = made(effects, {"dense/of": [219, 300, 261], "dense/mxfp4": [200, 280, 240, 4]})
    found = effects.effect(results, {"dense/of": 1.0, "dense/mxfp4": -1.0}, effects.greedy)
    assert found.seeds == pytest.approx((0.05, 0.05 - 4.303 * 0.0025 / 3**0.5, 0.05 + 4.303 * 0.0025 / 3**0.5, 3))
    # over problems: each seed's pair differs in problems of its own, so 60 of 400 differ, each in one of three seeds
    values = [1 / 3] * 60 + [0.0] * 340
    spread = (sum((v - 0.05) ** 2 for v in values) / 399) ** 0.5
    assert found.problems.value == pytest.approx(0.05) and found.problems.n == 400
    assert found.problems.high - 0.05 == pytest.approx(1.966 * spread / 20, rel=1e-3)


def test_a_difference_of_differences(effects):
    rows = {"dense/of": [300, 304], "dense/mxfp4": [200, 200], "moe/of": [260, 260], "moe/mxfp4": [240, 242]}
    terms = {"dense/of": 1.0, "dense/mxfp4": -1.0, "moe/of": -1.0, "moe/mxfp4": 1.0}
    found = effects.effect(made(effects, rows), terms, effects.greedy)
    assert found.seeds.value == pytest.approx((80 + 86) / 2 / 400) and found.seeds.n == 2
    assert found.problems.value == pytest.approx(found.seeds.value)


def test_runs_without_an_end_have_no_accuracy_after(effects):
    runs = [run("dense/of", 0, 300), run("dense/of", 1, 300, state="collapsed"), run("dense/of", 2, 310)]
    runs += [run("dense/mxfp4", seed, 280) for seed in (1, 2)]
    results = effects.Results.of(runs, [])
    found = effects.effect(results, {"dense/of": 1.0, "dense/mxfp4": -1.0}, effects.greedy)
    assert found.seeds.n == 1 and found.seeds.value == pytest.approx(30 / 400) and math.isnan(found.seeds.low)
    assert effects.effect(results, {"dense/of": 1.0, "dense/aqn": -1.0}, effects.greedy) is None
    assert sorted(results.values("dense/of", effects.gain)) == [0, 2]
    assert effects.last(run("dense/of", 0, 300) | {"state": "collapsed"}) is None  # at its last step
    assert results.values("dense/of", effects.sampled_gain)[2][0] == pytest.approx(210 / 400)


def test_measures_of_steps(effects):
    steps = [{"run": "dense/mxfp4/s0", "step": s, "entropy": 1.0 if s <= 10 else 0.25, "rollout/entropy": s / 40}
             for s in range(1, 41)]  # fmt: skip
    steps[0]["weights/rel_mse"], steps[19]["weights/rel_mse"] = 0.01, 0.0102
    results = made(effects, {"dense/mxfp4": [200]}, steps)
    assert results.mean("dense/mxfp4", effects.late_entropy).value == 0.25
    assert results.mean("dense/mxfp4", effects.late_rollout_entropy).value == pytest.approx(25.5 / 40)
    assert results.mean("dense/mxfp4", effects.error_change).value == pytest.approx(0.02)
    assert effects.effect(results, {"dense/mxfp4": 1.0}, effects.late_entropy).problems is None


def test_the_share_of_the_loss_given_back(effects):
    rows = {"dense/bf16": [360, 362, 358], "dense/mxfp4": [260, 262, 258], "dense/of": [335, 336, 334],
            "moe/bf16": [300] * 3, "moe/mxfp4": [250] * 3, "moe/of": [275] * 3}  # fmt: skip
    results = made(effects, rows)
    found = effects.recovered(results, {"dense/of": 1.0}, effects.greedy)
    assert found.seeds.value == pytest.approx(0.75) and found.seeds.low < 0.75 < found.seeds.high and found.seeds.n == 3
    # over the problems: another denominator and numerator, the same share, a far wider interval than three close seeds'
    assert found.problems.value == pytest.approx(0.75) and found.problems.n == 400
    assert found.problems.high - found.problems.low > 2 * (found.seeds.high - found.seeds.low)
    both = effects.recovered(results, {"dense/of": 1.0, "moe/of": -1.0}, effects.greedy)
    assert both.seeds.value == pytest.approx(0.25) == both.problems.value
    # no loss, or an unclear one, has no shares
    for mxfp4 in ([361, 361, 360], [300, 360, 380]):
        none = made(effects, rows | {"dense/mxfp4": mxfp4})
        assert effects.recovered(none, {"dense/of": 1.0}, effects.greedy) is None


# --- verdicts --------------------------------------------------------------------------------------------------------


def seen(value, half, n=8, problems=None):
    return (
        Mean(value, value - half, value + half, n),
        problems and Mean(value, value - problems, value + problems, 99),
    )


@pytest.mark.parametrize(
    ("found", "low", "high", "said"),
    [
        (seen(0.05, 0.04), 0.0, math.inf, "borne out"),
        (seen(-0.05, 0.04), 0.0, math.inf, "contradicted"),
        (seen(-0.05, 0.04), -math.inf, 0.0, "borne out"),
        (seen(0.05, 0.06), 0.0, math.inf, "undecided"),
        (seen(0.05, 0.04, problems=0.04), 0.0, math.inf, "borne out"),
        (seen(0.05, 0.04, problems=0.06), 0.0, math.inf, "undecided: other problems could turn it"),
        (seen(0.01, 0.005), 0.0, math.inf, "borne out"),
        (seen(0.01, 0.005, n=7), 0.0, math.inf, "undecided: less than 2 pp takes 8 paired seeds"),
        (seen(-0.01, 0.005, n=7), 0.0, math.inf, "undecided: less than 2 pp takes 8 paired seeds"),
        (seen(0.03, 0.005, n=3), 0.0, math.inf, "borne out"),
        (seen(-0.007, 0.01), -0.02, 0.02, "borne out"),
        (seen(-0.007, 0.014), -0.02, 0.02, "undecided"),
        (seen(-0.05, 0.02), -0.02, 0.02, "contradicted"),
        (seen(0.05, 0.02), -0.02, 0.02, "contradicted"),
        ((Mean(0.05, math.nan, math.nan, 1), None), 0.0, math.inf, "undecided: one seed"),
        (None, 0.0, math.inf, "not run"),
    ],
)
def test_verdicts(effects, found, low, high, said):
    assert effects.verdict(found and effects.Effect(*found), low, high) == said


@pytest.mark.parametrize(
    ("states", "change", "said"),
    [
        (["diverged", "collapsed", "diverged"], None, "borne out"),
        (["diverged"] * 2, None, "undecided"),
        (["done"] * 3, Mean(0.2, 0.1, 0.3, 3), "contradicted"),
        (["done"] * 3, Mean(0.2, -0.1, 0.5, 3), "undecided"),
        (["done", "done", "collapsed"], Mean(0.2, 0.1, 0.3, 2), "undecided"),
        (["done"] * 2, Mean(0.2, 0.1, 0.3, 2), "undecided"),
        ([], None, "not run"),
    ],
)
def test_divergence(effects, states, change, said):
    assert effects.diverging({seed: {"state": state} for seed, state in enumerate(states)}, change) == said


def test_every_claim_is_of_rows_that_are_run(scripts):
    """And says what is in its terms: a paper's positive number is inside the bounds, so the sign is the claim's."""
    claims, planned = scripts["claims"], scripts["tables"].planned()
    assert set(planned) == {f"{kind}/{row}" for kind in claims.KINDS for row in claims.ROWS}
    for claim in (*claims.CLAIMS, *claims.ENTROPY, *claims.LATER):
        assert set(claim.terms) <= set(planned), claim.text
        assert claim.paper is None or claim.low < claim.paper < claim.high, claim.text
        assert claim.unit == "%" or sum(claim.terms.values()) == pytest.approx(0.0), claim.text
    assert claims.with_aqn("moe")["moe/full"] == pytest.approx(1 / 3)
    assert claims.with_aqn("moe")["moe/mbs+of"] == pytest.approx(-1 / 3)


# --- results ---------------------------------------------------------------------------------------------------------


def folder_of_a_run(home, name, *, ended=True):
    folder = home / name
    folder.mkdir(parents=True)
    config = {"recipe": "mxfp4+mbs+of+aqn", "model": "policy:moe", "task": "chain", "seed": int(name[-1]), "steps": 1}
    (folder / "config.yaml").write_text(yaml.safe_dump(config | {"run": {"device": "made up"}}))
    (folder / "metrics.jsonl").write_text('{"step": 1, "reward": 0.123456789, "gap/k3": 0.0, "unused": 1}\n')
    evals = [{"step": 0, "accuracy": 0.5, "n": 2, "right": "10", "styles": {}, "by_group": {},
              "sampled": {"samples": 2, "accuracy": 0.75, "scores": [1.0, 0.5]}},
             {"step": 1, "accuracy": 1.0, "n": 2, "right": "11", "styles": {}, "by_group": {}}]  # fmt: skip
    (folder / "evals.jsonl").write_text("".join(json.dumps(row) + "\n" for row in evals))
    if ended:
        (folder / "summary.json").write_text('{"status": "done"}')


def test_results_from_folders_and_packed_runs(scripts, tmp_path, capsys, monkeypatch):
    collect = scripts["collect"]
    for name, ended in (("one/moe/full/s0", True), ("one/moe/full/s1", False), ("two/moe/full/s2", True)):
        folder_of_a_run(tmp_path, name, ended=ended)
    with tarfile.open(tmp_path / "two.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "two" / "moe", "moe")
    monkeypatch.setattr(collect, "RESULTS", tmp_path / "results")
    collect.main([tmp_path / "one", tmp_path / "two.tar.gz"])
    said = capsys.readouterr()
    assert said.err == "1 runs haven't ended, and are passed over\n"
    assert "runs.jsonl.gz: 2 rows" in said.out and "steps.jsonl.gz: 2 rows" in said.out
    first, second = collect.read(tmp_path / "results" / "runs.jsonl.gz")
    assert (first["run"], second["run"]) == ("moe/full/s0", "moe/full/s2") and first["state"] == "done"
    assert first["options"]["seed"] == 0 and "out" not in first["options"]
    assert first["evals"][0]["sampled"] == {"samples": 2, "accuracy": 0.75, "right": "21"}
    assert first["evals"][1] == {"step": 1, "accuracy": 1.0, "n": 2, "right": "11"}
    steps = collect.read(tmp_path / "results" / "steps.jsonl.gz")
    assert steps[0] == {"run": "moe/full/s0", "step": 1, "reward": 0.123457, "gap/k3": 0.0}
    before = (tmp_path / "results" / "runs.jsonl.gz").read_bytes()
    collect.write(tmp_path / "results" / "runs.jsonl.gz", [first, second])
    assert (tmp_path / "results" / "runs.jsonl.gz").read_bytes() == before and before[4:8] == bytes(4)  # no time
    assert sorted(p.name for p in (tmp_path / "results").iterdir()) == ["runs.jsonl.gz", "steps.jsonl.gz"]

    with pytest.raises(ValueError, match="moe/full/s2 is in an earlier one too"):
        collect.collect([tmp_path / "two", tmp_path / "two.tar.gz"])
    with pytest.raises(ValueError, match="no ended run"):
        collect.collect([tmp_path / "results"])
    (tmp_path / "bad.tar.gz").write_text("no archive")
    with pytest.raises(ValueError, match=r"bad\.tar\.gz is no \.tar\.gz of `sweep\.py pack`"):
        collect.collect([tmp_path / "bad.tar.gz"])


# --- the page --------------------------------------------------------------------------------------------------------


def test_the_page_is_what_tables_prints(tables):
    text = tables.PAGE.read_text(encoding="utf-8")
    results = tables.load()
    assert tables.page(text, results) == text, "run experiments/recipe_table/tables.py --write"
    text = tables.FRONT.read_text(encoding="utf-8")
    assert tables.front(text, results) == text, "run experiments/recipe_table/tables.py --write"
    drawn = {file.name for file in tables.CURVES.glob("*.png")}
    assert drawn == set(tables.images(results)), "run experiments/recipe_table/tables.py --write"


def test_without_results_nothing_is_claimed(tables, tmp_path):
    assert set(tables.blocks(tables.load(tmp_path)).values()) == {tables.MISSING}


def test_partial_results_say_what_is_missing(effects, tables):
    """Some rows, a collapsed run: every part is made, and counts what is there."""
    runs = [run("dense/bf16", s, 360 + s) for s in range(3)] + [run("dense/mxfp4", s, 300 + s) for s in range(3)]
    runs += [run("dense/aqn", 0, 0, state="collapsed", reason="step 9: no reward"), run("moe/bf16", 0, 200)]
    steps = [{"run": "dense/bf16/s0", "step": 1, "reward": 0.5, "gap/chi2": 0.01, "grad_norm": 0.0, "time/step": 2.0}]
    results = effects.Results.of(runs, steps)
    made = tables.blocks(results)
    loss = next(line for line in made["claims"].splitlines() if line.startswith("| dense: plain MXFP4"))
    assert loss.startswith("| dense: plain MXFP4 loses accuracy | MXFP4 − bf16 | −21.9 | −15.0 [−15.0, −15.0] | 3 |")
    assert loss.endswith("| **borne out** |")
    assert "| MoE: plain MXFP4 loses accuracy | MXFP4 − bf16 | −2.7 | — | — | — | — | **not run** |" in made["claims"]
    assert "1 of 1 lost; —" in made["claims"]
    assert (
        "| bf16 | 3 of 8 | 25.0 | 90.2 [" in made["dense"]
        and "| + AQN | 0 of 3 | — | — | — | — | — | — |" in made["dense"]
    )
    assert "* `dense/aqn`, seed 0: collapsed: step 9: no reward.\n* `dense/aqn`: seeds 1, 2 not run." in made["lost"]
    assert "* `dense/mxfp4`" not in made["lost"] and "* `moe/bf16`: seeds 1, 2, 3, 4, 5, 6, 7 not run." in made["lost"]
    assert "| bf16 | 0.50 → 0.50 |" in made["measures-dense"]
    curves = tables.images(results)
    assert curves["dense-gap_chi2.png"]["series"]["bf16"]["mean"] == [pytest.approx(-2.0)]
    assert "dense-grad_norm.png" not in curves  # its only value has no logarithm
    assert list(curves["dense-greedy_accuracy.png"]["series"]) == ["bf16", "MXFP4", "+ AQN"]


def test_markers_that_are_missing_are_an_error(tables):
    with pytest.raises(ValueError, match="exactly one <!-- lost -->"):
        tables.between("no markers", "lost", "text")


@pytest.mark.parametrize(("value", "text"), [(0.049, "0.0"), (-0.04, "0.0"), (-3.14, "−3.1"), (2.0, "+2.0")])
def test_signed(tables, value, text):
    assert tables.signed(value) == text

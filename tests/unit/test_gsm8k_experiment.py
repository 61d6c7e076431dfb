"""experiments/gsm8k_qwen05b: verdicts and differences on made-up runs, the page, the sweep, and untrained.py on a tiny
model."""

import importlib
import json
import math
import random
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from scripts import load_script

from mxrl.probes.intervals import Mean
from mxrl.rl.config import TrainConfig

HERE = Path(__file__).parents[2] / "experiments" / "gsm8k_qwen05b"


@pytest.fixture(scope="module")
def scripts():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HERE))
        # by its own name: processes that it starts have to find it
        yield {
            "untrained": importlib.import_module("untrained"),
            "collect": load_script(HERE / "collect.py"),
            "tables": load_script(HERE / "tables.py"),
        }
        for name in ("differences", "untrained", "gsm8k_qwen05b_collect", "gsm8k_qwen05b_tables"):
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def differences(scripts):
    return sys.modules["differences"]  # the one that tables.py has


@pytest.fixture(scope="module")
def tables(scripts):
    return scripts["tables"]


def right(share, n=1000, seed=0):
    """A score string with `share` of ones, in an order of its own."""
    digits = ["1"] * round(share * n) + ["0"] * (n - round(share * n))
    random.Random(seed).shuffle(digits)
    return "".join(digits)


def run(recipe, seed, shares, state="done", planned=40):
    """A row of runs.jsonl with an accuracy at steps 0, 10, 20, …"""
    evals = [{"step": 10 * i, "accuracy": s, "right": right(s, seed=i)} for i, s in enumerate(shares)]
    return {
        "run": f"{recipe}/s{seed}", "state": state, "reason": "", "last_step": 10 * (len(shares) - 1), "evals": evals,
        "options": {"recipe": recipe, "seed": seed, "steps": planned, "prompts_per_step": 4, "samples_per_prompt": 2},
        "info": {"device": "H200", "commit": "abc", "versions": {"torch": "2"}, "created": "2026-11-30T00:00:00"},
    }  # fmt: skip


# --- differences and verdicts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "low", "high", "over", "paper", "seeds", "expected"),
    [
        (-0.2, -0.25, -0.15, "problems", -0.219, 1, "borne out, on one seed"),
        (-0.2, -0.25, -0.15, "seeds", -0.219, 3, "borne out"),
        (0.1, 0.05, 0.15, "seeds", -0.219, 3, "contradicted"),
        (-0.02, -0.05, 0.01, "seeds", -0.219, 3, "undecided"),
        (-0.02, math.nan, math.nan, "problems", -0.219, 1, "undecided"),
        (0.05, 0.03, 0.07, "problems", 0.01, 1, "undecided: so small a claim takes 8 paired seeds"),
        (0.012, 0.003, 0.021, "seeds", 0.01, 8, "borne out"),
        (-0.012, -0.021, -0.003, "seeds", 0.01, 8, "contradicted"),
    ],
)
def test_verdict(differences, value, low, high, over, paper, seeds, expected):
    found = differences.Difference(Mean(value, low, high, 8), over)
    assert differences.verdict(found, paper, seeds) == expected


def test_verdict_of_what_was_not_run(differences):
    assert differences.verdict(None, 0.1, 0) == "not run"


def test_one_common_seed_is_compared_over_problems(differences):
    a, b = run("mxfp4", 0, [0.3, 0.5]), run("bf16", 0, [0.4, 0.7])
    found = differences.difference([a], [b], 10, 10)
    scores = [int(x) - int(y) for x, y in zip(a["evals"][1]["right"], b["evals"][1]["right"], strict=True)]
    mean = sum(scores) / 1000
    sd = math.sqrt(sum((s - mean) ** 2 for s in scores) / 999)
    assert found.over == "problems" and found.mean.value == pytest.approx(-0.2)
    assert found.mean.high - found.mean.value == pytest.approx(1.962 * sd / math.sqrt(1000), rel=1e-3)


def test_seeds_are_compared_over_seeds_and_paired(differences):
    a = [run("mxfp4", seed, [0, x]) for seed, x in ((0, 0.50), (1, 0.60), (2, 0.9))]
    b = [run("bf16", seed, [0, x]) for seed, x in ((1, 0.70), (0, 0.61))]
    found = differences.difference(a, b, 10, 10)  # −.11, −.10: seed 2 has no partner
    assert found.over == "seeds" and found.mean.n == 2 and found.mean.value == pytest.approx(-0.105)
    assert found.mean.high - found.mean.value == pytest.approx(12.706 * 0.005, rel=1e-3)
    assert differences.difference(a[2:], b, 10, 10) is None


def test_common_step_is_that_of_the_shortest_run_that_goes_on(differences):
    long, short = run("bf16", 0, [0.1] * 5), run("mxfp4", 0, [0.1] * 3, "unfinished")
    assert differences.common_step([long, short]) == 20
    assert differences.common_step([long, run("mxfp4", 0, [0.1, 0], "collapsed")]) == 40
    assert differences.common_step([long, run("mxfp4", 0, [0.1], "unfinished")]) is None


def test_cells(differences):
    assert differences.recovered(0.7, 0.8, 0.6) == "50" and differences.recovered(0.7, 0.8, 0.798) == "—"
    assert differences.points(-0.0001) == "0.0" and differences.points(-0.0312) == "−3.1"
    found = differences.Difference(Mean(-0.2, -0.25, 0.15, 9), "seeds")
    assert differences.span(found) == "−20.0 [−25.0, 15.0]"
    assert differences.span(differences.Difference(Mean(0.1, math.nan, math.nan, 1), "seeds")) == "10.0"


# --- the page --------------------------------------------------------------------------------------------------------


def test_the_page_is_what_tables_makes(tables):
    text = tables.PAGE.read_text(encoding="utf-8")
    assert tables.page(text) == text, "run python experiments/gsm8k_qwen05b/tables.py --write"
    missing = [
        name for name in tables.DRAWN if f"curves/{name}.png" in text and not (tables.CURVES / f"{name}.png").is_file()
    ]
    assert not missing, "run python experiments/gsm8k_qwen05b/tables.py --write"


def test_results_are_small():
    assert sum(file.stat().st_size for file in (HERE / "results").glob("*")) < 2e6


def test_claims_say_what_made_up_runs_show(tables):
    runs = [
        run("bf16", 0, [0.3, 0.6, 0.8]), run("mxfp4", 0, [0.2, 0.3, 0.5]),
        run("mxfp4+mbs+of+aqn", 0, [0.3, 0.5, 0.4]), run("mxfp4+mbs+of:1.0+aqn", 0, [0.3, 0.5, 0.3], "diverged"),
    ]  # fmt: skip
    lines = {line.split("|")[1].strip(): line for line in tables.claims([], runs).splitlines()}
    assert "borne out, on one seed" in lines["GRPO improves the model"] and "50.0 [" in lines["GRPO improves the model"]
    assert "borne out, on one seed" in lines["Plain MXFP4 loses accuracy"]
    assert "contradicted, on one seed" in lines["All corrections help"]  # 40 % after, plain 50 %
    assert "undecided: so small" in lines["α = .5 beats α = 1"]
    assert "not run" in lines["OF carries a dense model: alone it helps"]
    assert "at step 20" in lines["claim"]


def test_untrained_rows_are_paired_with_bf16(tables):
    def row(name, share, texts):
        return {"row": name, "recipe": name, "accuracy": share, "right": right(share, 100), "texts": texts,
                "mean_tokens": 150.0, "truncated": 0.1, "marked": 0.5, "entropy_per_token": 0.2,
                "tokens_per_second": 5e4}  # fmt: skip

    rows = [row("bf16", 0.5, "aaaabbbb"), row("mxfp4", 0.3, "aaaacccc"), row("mxfp4+of", 0.45, "ddddcccc")]
    lines = [[c.strip() for c in line.split("|")[1:-1]] for line in tables.untrained(rows).splitlines()]
    head, found = lines[0], {line[0]: dict(zip(lines[0], line, strict=True)) for line in lines[2:]}
    assert head[1] == "greedy, %" and found["`bf16`"]["recovered, %"] == ""
    assert found["`mxfp4`"]["minus bf16, pp"].startswith("−20.0 [")
    assert found["`mxfp4+of`"]["recovered, %"] == "75"
    assert (found["`mxfp4`"]["texts as bf16's, %"], found["`mxfp4+of`"]["texts as bf16's, %"]) == ("50.0", "0.0")


def test_tokens_of_a_step(tables):
    rows = [  # 8 sequences of 10 prompt tokens; 4, then 6 completion tokens each, the longest 9
        {"num_tokens": 112.0, "completions/mean_length": 4.0, "completions/max_length": 9.0},
        {"num_tokens": 240.0, "completions/mean_length": 6.0, "completions/max_length": 9.0},
    ]
    real, padded = tables.tokens_a_step(rows, run("bf16", 0, [0])["options"])
    assert (real, padded) == (120.0, 152.0)


def test_nothing_run_is_said(tables):
    assert {tables.claims([], []), tables.untrained([]), tables.trained([]), tables.speed([], [])} == {tables.NOT_RUN}


# --- the sweep -------------------------------------------------------------------------------------------------------


def test_sweep_trains_the_four_recipes_alike():
    sweep = yaml.safe_load((HERE / "sweep.yaml").read_text())
    configs = [TrainConfig(**sweep["defaults"], **entry["options"]) for entry in sweep["runs"]]
    assert [c.recipe for c in configs] == ["bf16", "mxfp4", "mxfp4+mbs+of:0.5+aqn", "mxfp4+mbs+of:1+aqn"]
    assert all(set(entry["options"]) == {"recipe"} for entry in sweep["runs"])
    assert len({tuple(entry["seeds"]) for entry in sweep["runs"]}) == 1
    (config, *_) = configs
    assert config.sequences == 1024 and config.batches("cuda") == (32, 32)
    assert config.eval_problems == 1319 and "{split}" in config.task_options["path"]


# --- collecting ------------------------------------------------------------------------------------------------------


def test_collect_keeps_digits_and_drops_texts(scripts, tmp_path):
    folder = tmp_path / "runs" / "bf16" / "s0"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(
        yaml.safe_dump({**TrainConfig(recipe="bf16").to_dict(), "run": {"device": "x"}})
    )
    (folder / "metrics.jsonl").write_text('{"step": 1, "reward": 0.123456789, "clip_ratio/low_min": 0.0}\n')
    sampled = {"samples": 2, "accuracy": 0.5, "scores": [1.0, 0.5, 0.0]}
    row = {"step": 0, "accuracy": 1 / 3, "n": 3, "right": "100", "styles": {}, "by_group": {}, "sampled": sampled}
    (folder / "evals.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "evals").mkdir()
    (tmp_path / "evals" / "evals.jsonl").write_text('{"row": "bf16", "right": "10", "examples": ["a"]}\n')
    found = scripts["collect"].collect(tmp_path)
    assert found["evals"] == [{"row": "bf16", "right": "10"}]
    (kept,) = found["runs"]
    assert (kept["run"], kept["state"], kept["info"]) == ("bf16/s0", "unfinished", {"device": "x"})
    assert kept["evals"] == [{"step": 0, "accuracy": 0.333333, "n": 3, "right": "100",
                              "sampled": {"samples": 2, "accuracy": 0.5, "right": "210"}}]  # fmt: skip
    assert found["steps"] == [{"run": "bf16/s0", "step": 1, "reward": 0.123457}]
    with pytest.raises(ValueError, match=r"give the folder that run\.sh fills"):
        scripts["collect"].collect(tmp_path / "runs")


# --- untrained.py ----------------------------------------------------------------------------------------------------


def test_rows_are_read_and_refused(scripts, tmp_path, capsys):
    untrained = scripts["untrained"]
    assert untrained.rows_of("mxfp4+of:0.5, bf16,bf16@8,mxfp4+of") == ["mxfp4+of", "bf16", "bf16@8"]
    assert untrained.rows_of(",".join(untrained.ROWS))[0] == "bf16" and len(untrained.ROWS) == 17
    data = tmp_path / "test.jsonl"
    data.write_text("{}\n")
    common = ["model", "--data", str(data), "--out", str(tmp_path / "out"), "--devices", "cpu"]
    for more, said in (
        (["--recipes", "mxfp5"], "unknown base 'mxfp5'"),
        (["--recipes", "bf16@0"], "after @ stands how many"),
        (["--jobs", "0"], "--jobs 0 must be at least 1"),
        (["--data", str(tmp_path / "none.jsonl")], "no such file"),
    ):
        with pytest.raises(SystemExit):
            untrained.arguments(common + more)
        assert said in capsys.readouterr().err


def test_untrained_goes_on_and_survives_a_row_that_fails(scripts, tmp_path, capfd):
    """Two pools of a process each, about 7 s apiece: the second has a row to do and no model any more."""
    from mxrl.rl.policy import build_policy, char_tokenizer, save_policy

    letters = "".join(chr(c) for c in range(32, 127)) + "\n"
    tokenizer = char_tokenizer(letters)
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    save_policy(build_policy("dense", size="tiny", seed=0, vocab_size=len(tokenizer)), tokenizer, tmp_path / "model")
    data = tmp_path / "test.jsonl"
    data.write_text("".join(json.dumps({"question": f"{i}+1?", "answer": f"#### {i + 1}"}) + "\n" for i in range(5)))

    def call(recipes, *more):
        args = scripts["untrained"].arguments(
            [str(tmp_path / "model"), "--data", str(data), "--out", str(tmp_path / "out"), "--devices", "cpu",
             "--new-tokens", "4", "--recipes", recipes, *more]
        )  # fmt: skip
        return scripts["untrained"].run(args)

    assert call("bf16,mxfp4,mxfp4+aqn,bf16@2") == 0
    rows = {r["row"]: r for r in map(json.loads, (tmp_path / "out" / "evals.jsonl").read_text().splitlines())}
    assert list(rows) == ["bf16", "mxfp4", "mxfp4+aqn", "bf16@2"]  # bf16@2 is not of ROWS
    assert rows["mxfp4+aqn"]["sigma"] == 0.01 and rows["bf16"]["sigma"] is None
    assert all(len(r["right"]) == r["n"] == 5 and len(r["texts"]) == 20 for r in rows.values())
    entropy = {name: row["entropy_per_token"] for name, row in rows.items()}
    assert rows["bf16"]["texts"] == rows["bf16@2"]["texts"] and entropy["bf16"] == pytest.approx(entropy["bf16@2"])
    assert len({round(entropy[name], 9) for name in ("bf16", "mxfp4", "mxfp4+aqn")}) == 3  # noise and all
    shutil.rmtree(tmp_path / "model")
    capfd.readouterr()
    assert call("bf16,mxfp4+of") == 1
    said = capfd.readouterr()
    assert "1 of 2 rows are there already" in said.out and "mxfp4+of: failed: " in said.err
    assert {json.loads(x)["row"] for x in (tmp_path / "out" / "evals.jsonl").read_text().splitlines()} == set(rows)
    with pytest.raises(SystemExit):
        call("bf16", "--problems", "3")
    assert "was made with problems=None, not 3" in capfd.readouterr().err

"""experiments/long_responses: its gate, differences and verdicts on made-up rows, its page and sweep; and what its
supervised training asks of experiments/policies/run.py."""

import json
import math
import random
import sys
from pathlib import Path

import pytest
import torch
import yaml
from scripts import load_script

from mxrl.probes.intervals import Mean
from mxrl.rl.chain import MIXTURES, Difficulty, chain_prompts, solution
from mxrl.rl.config import TrainConfig
from mxrl.rl.policy import PolicyError, build_policy, char_tokenizer, save_policy

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
HERE = EXPERIMENTS / "long_responses"


@pytest.fixture(scope="module")
def tables():
    others = {name: sys.modules.pop(name, None) for name in ("differences", "gate")}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HERE))
        yield load_script(HERE / "tables.py")
    for name, other in others.items():
        sys.modules.pop(name, None)
        if other:
            sys.modules[name] = other


@pytest.fixture(scope="module")
def differences(tables):
    return sys.modules["differences"]  # the one that tables.py has


@pytest.fixture(scope="module")
def gate(tables):
    return tables.gate


@pytest.fixture(scope="module")
def collect():
    return load_script(HERE / "collect.py")


@pytest.fixture(scope="module")
def sft():
    return load_script(EXPERIMENTS / "policies" / "run.py")


# --- the supervised training -----------------------------------------------------------------------------------------


def test_no_example_is_longer_than_said(sft):
    difficulty, mixture = Difficulty(numbers=(3, 12), digits=(1, 3)), MIXTURES["long"]
    prompts = chain_prompts(0, "train", difficulty)
    sizes = [len(p) + len(solution(p, s)) + 1 for p in (next(prompts) for _ in range(300)) for s in sft.styles(mixture)]
    assert max(sizes) <= sft.longest(difficulty, mixture) < 1.6 * max(sizes)
    hard = "9999" + "+9999" * 6 + "="  # the shipped policies' own: careful is the longest
    assert len(hard) + len(solution(hard)) + 1 <= sft.longest(Difficulty(), MIXTURES["default"]) == 130


def test_examples_are_prompt_solution_and_end(sft):
    options = ["--out", "x", "--steps", "1", "--examples", "200", "--workers", "1", "--mixture", "long"]
    args = sft.arguments([*options, "--numbers", "3", "9", "--digits", "1", "2"])
    tokens, prompts, totals = sft.make_data(args, Difficulty(numbers=(3, 9), digits=(1, 2)), MIXTURES["long"])
    assert tokens.shape == (200, int(totals.max()))  # no column is padding alone
    text = char_tokenizer().decode(tokens[7, : totals[7]].tolist())
    prompt = text[: prompts[7]]
    assert text in [f"{prompt}{solution(prompt, style)}<eos>" for style in ("rewrite", "skip", "guess")]


def drawn(sft, totals, step=0, done=0.0, **options):
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    args = sft.arguments(["--out", "x", "--steps", "1", *words])
    return sft.draw_batch(args, totals, totals.argsort(stable=True), step, done)


def test_without_new_options_a_batch_is_drawn_as_before(sft):
    totals = torch.randint(5, 90, (500,), generator=torch.Generator().manual_seed(1))
    found = drawn(sft, totals, step=3, batch=64, seed=2)
    batch = torch.randint(500, (64,), generator=torch.Generator().manual_seed(2 * 1_000_003 + 3))
    expected = batch[totals[batch].argsort(stable=True)].chunk(2)
    assert [p.tolist() for p in found] == [p.tolist() for p in expected]


@pytest.mark.parametrize("micro", [1, 4])
def test_a_step_holds_no_more_tokens_than_said_and_a_pass_no_more_with_its_padding(sft, micro):
    totals = torch.randint(5, 900, (500,), generator=torch.Generator().manual_seed(1))
    for step in range(20):
        parts = drawn(sft, totals, step, batch=512, batch_tokens=8000, micro=micro)
        sizes = [totals[part] for part in parts]
        assert 8000 - 900 < sum(int(s.sum()) for s in sizes) <= 8000
        assert all(len(s) * int(s.max()) <= 8000 // micro for s in sizes)
        assert [int(s.max()) for s in sizes] == sorted(int(s.max()) for s in sizes)


def test_one_example_longer_than_the_bound_is_a_step_of_its_own(sft):
    (part,) = drawn(sft, torch.tensor([900]), batch=8, batch_tokens=100, micro=1)
    assert part.tolist() == [0]


def test_longer_examples_come_in_with_the_training(sft):
    totals = torch.arange(1000)
    longest = [int(totals[torch.cat(drawn(sft, totals, done=d, batch=400, grow=0.5))].max()) for d in (0, 0.25, 0.6)]
    assert 80 < longest[0] < 100 and 500 < longest[1] < 550 and longest[2] > 980


def test_going_on_from_a_policy_raises_its_positions_and_refuses_another_alphabet(sft, tmp_path):
    save_policy(build_policy("dense", size="tiny", seed=3), char_tokenizer(), tmp_path / "a")
    model = sft.starting_model(sft.arguments(["--out", "x", "--steps", "1", "--init", str(tmp_path / "a")]), 2900)
    assert model.config.max_position_embeddings == 3072 and model.dtype == torch.float32
    assert torch.equal(model.model.norm.weight, build_policy("dense", size="tiny", seed=3).model.norm.weight)
    fresh = sft.starting_model(sft.arguments(["--out", "x", "--steps", "1", "--size", "tiny"]), 80)
    assert fresh.config.max_position_embeddings == 512  # as ever
    letters = char_tokenizer("abc")
    save_policy(build_policy("dense", size="tiny", vocab_size=len(letters)), letters, tmp_path / "b")
    with pytest.raises(PolicyError, match="6 tokens, not the 19 of chains"):
        sft.starting_model(sft.arguments(["--out", "x", "--steps", "1", "--init", str(tmp_path / "b")]), 80)


def test_options_that_cannot_be_are_refused(sft, capsys):
    for more, said in (
        (["--steps", "1", "--grow", "1"], "--grow 1.0 must be a share"),
        (["--steps", "1", "--batch-tokens", "1"], "--batch-tokens 1 must be at least --micro 2"),
        ([], "give --steps or --minutes"),
    ):
        with pytest.raises(SystemExit):
            sft.arguments(["--out", "x", *more])
        assert said in capsys.readouterr().err


# --- the gate --------------------------------------------------------------------------------------------------------


def evaluated(greedy, rewrite):
    """An eval.json: 10 problems a chain length, 2 samples each. rewrite: right, drawn."""
    return {
        "greedy": {"n": 10 * len(greedy), "by_group": {str(n): {"accuracy": a, "n": 10} for n, a in greedy.items()}},
        "sampled": {"samples": 2, "by_group_rewrite": {str(n): list(pair) for n, pair in rewrite.items()}},
    }


def test_bands_weigh_problems_and_samples(gate):
    found = gate.bands(evaluated({6: 0.2, 7: 0.4, 41: 0.0}, {6: (3, 4), 7: (3, 8), 41: (0, 0)}))
    assert found["short"] == pytest.approx({"greedy": 0.3, "rewrite": 0.5, "share": 0.3})
    assert found["long"] == {"greedy": 0.0, "rewrite": 0.0, "share": 0.0} and "mid" not in found


@pytest.mark.parametrize(
    ("long", "code"), [((4, 8), 0), ((0, 8), 1), ((0, 0), 1), (None, 1)], ids=["can", "can't", "never tries", "unknown"]
)
def test_gate_says_it_by_its_exit_code(gate, tmp_path, capsys, long, code):
    rows = {6: (8, 8), 16: (6, 8)} | ({41: long} if long else {})
    file = tmp_path / "eval.json"
    file.write_text(json.dumps(evaluated({n: 0.3 if n < 41 else 0.0 for n in rows}, rows)))
    assert gate.main(str(file)) == code
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("short  greedy 0.300  rewritten samples 1.000 (share 0.40)  passed") and len(said) == 3


def test_a_policy_without_headroom_does_not_pass(gate):
    assert not gate.passes({"greedy": 0.95, "rewrite": 0.99, "share": 0.4})
    assert gate.passes({"greedy": 0.90, "rewrite": 0.99, "share": 0.4})


# --- differences and verdicts ----------------------------------------------------------------------------------------


def right(share, n=1000, seed=0):
    """A score string with `share` of ones, in an order of its own."""
    digits = ["1"] * round(share * n) + ["0"] * (n - round(share * n))
    random.Random(seed).shuffle(digits)
    return "".join(digits)


def run(name, seed, before, after, state="done", order=0):
    def evaluation(step, share):
        row = {"step": step, "accuracy": share, "right": right(share, seed=order), "n": 1000, "mean_tokens": 50.0}
        return row | {"sampled": {"accuracy": share / 2, "samples": 1, "mean_tokens": 60.0, "truncated": 0.0}}

    evals = [evaluation(0, before)] + ([evaluation(10, after)] if after is not None else [])
    return {
        "run": f"{name}/s{seed}", "state": state, "reason": "", "last_step": 10, "evals": evals,
        "options": {**TrainConfig(recipe="bf16").to_dict(), "seed": seed, "steps": 10},
        "info": {"device": "H200", "commit": "abc", "versions": {"torch": "2"}, "created": "2026-11-30T00:00:00"},
    }  # fmt: skip


def runs_of(differences, *accuracies):
    """Of (name, [accuracy after, a seed]): every seed's problems in the same order, so pairs differ in few of them."""
    return differences.by_name([run(n, s, 0.2, a) for n, own in accuracies for s, a in enumerate(own)])


def test_a_difference_is_paired_over_problems_and_lists_its_seeds(differences):
    runs = differences.by_name([
        run("long/mxfp4", 0, 0.1, 0.5), run("long/mxfp4", 1, 0.1, 0.6), run("long/mxfp4", 2, 0.1, 0.9),
        run("long/bf16", 0, 0.1, 0.7, order=5), run("long/bf16", 1, 0.1, 0.9, order=5),
    ])  # fmt: skip
    found = differences.difference(runs["long/mxfp4"], runs["long/bf16"])
    assert found.seeds == pytest.approx({0: -0.2, 1: -0.3})  # seed 2 has no partner
    texts = [[row["evals"][1]["right"] for row in own.values()] for own in runs.values()]
    each = [(int(a) - int(c) + int(b) - int(d)) / 2 for a, b, c, d in zip(*texts[0][:2], *texts[1], strict=True)]
    mean = sum(each) / 1000
    half = 1.962 * math.sqrt(sum((e - mean) ** 2 for e in each) / 999 / 1000)
    assert found.problems.value == pytest.approx(-0.25) == pytest.approx(mean)
    assert found.problems.high - found.problems.value == pytest.approx(half, rel=1e-3)


def test_a_run_that_did_not_end_is_compared_before_training_alone(differences):
    a, b = {0: run("x/mxfp4", 0, 0.1, 0.5, "collapsed")}, {0: run("x/bf16", 0, 0.2, 0.7)}
    assert differences.difference(a, b) is None
    assert differences.difference(a, b, differences.first, differences.first).problems.value == pytest.approx(-0.1)


def test_lengths_are_independent(differences):
    a = differences.Difference(Mean(-0.3, -0.33, -0.27, 256), {0: -0.2, 1: -0.4})
    b = differences.Difference(Mean(-0.1, -0.14, -0.06, 1024), {0: -0.1, 1: -0.1, 2: 0.5})
    found = differences.between_lengths(a, b)
    assert found.problems == pytest.approx(Mean(-0.2, -0.25, -0.15, 256))  # √(.03² + .04²)
    assert found.seeds == pytest.approx({0: -0.1, 1: -0.3})
    assert differences.between_lengths(None, b) is None


@pytest.mark.parametrize(
    ("low", "high", "seeds", "sign", "expected"),
    [
        (-0.25, -0.15, (-0.2, -0.2), -1, "borne out, on 2 seeds"),
        (-0.25, -0.15, (-0.2,), -1, "borne out, on 1 seed"),
        (0.15, 0.25, (0.1, 0.3), -1, "contradicted, on 2 seeds"),
        (-0.25, 0.01, (-0.2, -0.2), -1, "undecided"),
        (-0.25, -0.15, (-0.5, 0.1), -1, "undecided"),  # the seeds disagree
        (math.nan, math.nan, (-0.2,), -1, "undecided"),
    ],
)
def test_verdict(differences, low, high, seeds, sign, expected):
    value = sum(seeds) / len(seeds)
    found = differences.Difference(Mean(value, low, high, 256), dict(enumerate(seeds)))
    assert differences.verdict(found, sign) == expected


def test_what_was_not_run_has_no_verdict(differences):
    assert differences.verdict(None, 1) == "not run"


def test_recovered_takes_a_clear_loss(differences):
    runs = runs_of(differences, ("short/bf16", [0.8]), ("short/mxfp4", [0.4]), ("short/full", [0.7]),
                   ("mid/bf16", [0.8]), ("mid/mxfp4", [0.799]), ("mid/full", [0.7]))  # fmt: skip
    assert differences.recovered(runs, "short", "full") == pytest.approx(0.75)
    assert differences.recovered(runs, "mid", "full") is None and differences.recovered(runs, "long", "full") is None
    uneven = runs_of(differences, ("long/bf16", [0.8]), ("long/mxfp4", [0.4, 0.2]), ("long/full", [0.7, 0.7]))
    assert differences.recovered(uneven, "long", "full") == pytest.approx(0.75)  # of the seed that all three have


# --- the page --------------------------------------------------------------------------------------------------------


def cells(text):
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]


def test_claims_say_what_made_up_runs_show(tables, differences):
    after = {
        "short/bf16": [0.8, 0.82], "short/mxfp4": [0.5, 0.5], "short/full": [0.78, 0.8], "short/w4a8": [0.5, 0.6],
        "long/bf16": [0.7, 0.7], "long/mxfp4": [0.2, 0.2], "long/full": [0.3, 0.4], "long/w4a8": [0.6, 0.6],
    }  # fmt: skip
    runs = runs_of(differences, *after.items())
    found = {row[0]: row for row in cells(tables.claims(runs))}
    assert found["short: plain MXFP4 loses accuracy"][3] == "borne out, on 2 seeds"
    assert found["long: the corrections give some back"][3] == "borne out, on 2 seeds"
    assert found["long: they leave more missing than at short"][2].startswith("−33.0 [")
    assert found["long: they leave more missing than at short"][3] == "borne out, on 2 seeds"
    assert found["mid: they leave more missing than at short"][3] == "not run"
    assert found["short: 8-bit activations help plain MXFP4"][3] == "undecided"  # +0 and +10 pp
    assert found["long: 8-bit activations help plain MXFP4"][3] == "borne out, on 2 seeds"


def test_the_gap_stands_beside_what_was_recovered(tables, differences):
    runs = runs_of(differences, ("long/bf16", [0.8, 0.8]), ("long/mxfp4", [0.4, 0.4]), ("long/full", [0.7, 0.5]))
    steps = [
        {"run": f"long/full/s{seed}", "step": i, "gap/pearson": r, "gap/truncated": 0.01, "style/rewrite": 0.5}
        for seed, own in ((0, (0.99, 0.98, 0.97, 0.96)), (1, (0.95, 0.94, 0.93, 0.92)))
        for i, r in enumerate(own)
    ]
    head, *rows = cells(tables.gap(runs, steps))
    row = dict(zip(head, rows[-1], strict=True))
    assert row["recipe"] == "`mxfp4+mbs+of:0.5+aqn`" and row["Pearson"] == "0.9550"
    assert row["first → last quarter"] == "0.9700 → 0.9400" and row["recovered, %"] == "50"
    assert row["after, minus bf16, pp"] == "−20.0" and row["TIS cut, %"] == "1.000" and row["χ²"] == "—"


def test_accuracies_name_what_did_not_end(tables, differences):
    runs = differences.by_name([run("mid/bf16", 0, 0.2, 0.7), run("mid/mxfp4", 0, 0.1, None, "collapsed")])
    head, _, bf16, mxfp4 = cells(tables.accuracies(runs))
    bf16, mxfp4 = dict(zip(head, bf16, strict=True)), dict(zip(head, mxfp4, strict=True))
    assert (bf16["before, %"], bf16["after, %"], bf16["sampled, %"]) == ("20.0", "70.0", "10.0 → 35.0")
    assert (mxfp4["runs that ended"], mxfp4["after, %"], mxfp4["minus bf16, pp"]) == ("0 of 1", "—", "—")
    assert "* `mid/mxfp4/s0`: collapsed at step 10 of 10.\n" in tables.about([], runs)
    (_, _, _, untrained) = cells(tables.untrained(runs))
    assert untrained[3] == "10.0" and untrained[4].startswith("−10.0 [")


def test_where_results_come_from_hides_no_uncommitted_change(tables):
    def made(commit, device="H200", day="30"):
        return {"device": device, "created": f"2026-11-{day}T01:02:03", "versions": {"torch": "2"}, "commit": commit}

    clean = "0123456789abcdef"
    assert tables.came_from([made(clean), made(clean)]) == "H200; torch 2; 2026-11-30; commit 0123456789ab"
    both = tables.came_from([made(clean), made(f"{clean}+dirty", "B200", "29")])
    assert both == "B200, H200; torch 2; 2026-11-29, 2026-11-30; commit 0123456789ab, 0123456789ab+dirty"
    assert tables.came_from([made(None)]).endswith("; commit unknown")
    row = {"provenance": made(clean), "settings": {"seed": 3}}
    assert tables.about([row], {}) == "The policy: H200; torch 2; 2026-11-30; commit 0123456789ab; seed 3.\n"


def test_lengths_are_of_whole_answers_with_their_end():
    lengths = load_script(HERE / "lengths.py")
    options = {"task_options": {"numbers": [3, 3], "digits": [1, 1], "ops": "+"}, "max_new_tokens": 9,
               "steps": 2, "prompts_per_step": 4}  # fmt: skip
    row = lengths.measured({"name": "tiny/bf16", "options": options, "seeds": [0]}, 8, 100, 0)
    # "9+9;18#18" at most: the first line is a sum and an operand, the second a sum, which the answer repeats
    assert (row["length"], row["numbers"], row["least"], row["most"]) == ("tiny", 3, len("2+1;3#3") + 1, 11)
    assert 8 < row["mean"] < 11 and 0 < row["longer"] < 100


def test_nothing_run_is_said(tables, tmp_path):
    assert set(tables.blocks(tmp_path).values()) == {tables.NOT_RUN}


def test_the_page_is_what_tables_makes(tables):
    text = tables.PAGE.read_text(encoding="utf-8")
    assert tables.page(text) == text, "run python experiments/long_responses/tables.py --write"
    shown = tables.images(
        tables.by_name(tables.read_rows(tables.RESULTS, "runs")), tables.read_rows(tables.RESULTS, "steps")
    )
    assert not [name for name in shown if not (tables.CURVES / name).is_file()]


def test_results_are_small():
    assert sum(file.stat().st_size for file in (HERE / "results").glob("*")) < 2e6


# --- the sweep and its results ---------------------------------------------------------------------------------------


def test_the_sweep_has_every_recipe_at_every_length_and_room_for_the_answers(tables):
    sweep = yaml.safe_load((HERE / "sweep.yaml").read_text())
    seen, longest = {}, {}
    for entry in sweep["runs"]:
        config = TrainConfig(**{**sweep["defaults"], **entry["options"]})
        length, row = entry["name"].split("/")
        assert config.recipe == tables.RECIPES[row]
        same = {key: value for key, value in config.to_dict().items() if key != "recipe"}
        assert longest.setdefault(length, same) == same  # of a length, runs differ in the recipe alone
        seen.setdefault(length, {})[row] = entry["seeds"]
    assert {length: set(rows) for length, rows in seen.items()} == {key: set(tables.RECIPES) for key in tables.LENGTHS}
    assert all(len({tuple(seeds) for seeds in rows.values()}) == 1 and len(rows["bf16"]) >= 2 for rows in seen.values())
    for options in longest.values():
        prompts = chain_prompts(9, "train", Difficulty(**options["task_options"]))
        sizes = [len(solution(next(prompts), "rewrite")) + 1 for _ in range(1000)]
        assert max(sizes) <= options["max_new_tokens"] < 1.6 * sum(sizes) / 1000
        assert options["task_options"]["digits"] == [1, 3]  # the policy's


def test_collect_keeps_digits_and_drops_scores(collect, tmp_path):
    folder = tmp_path / "runs" / "long" / "bf16" / "s0"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(
        yaml.safe_dump({**TrainConfig(recipe="bf16").to_dict(), "run": {"device": "x"}})
    )
    (folder / "metrics.jsonl").write_text('{"step": 1, "gap/pearson": 0.123456789, "clip_ratio/low_min": 0.0}\n')
    sampled = {"samples": 2, "accuracy": 0.5, "scores": [1.0, 0.5, 0.0]}
    row = {"step": 0, "accuracy": 1 / 3, "n": 3, "right": "100", "by_group": {}, "sampled": sampled}
    (folder / "evals.jsonl").write_text(json.dumps(row) + "\n")
    settings = {"settings": {"out": "/x", "seed": 0}, "torch": "2", "recipes": {}}
    decoded = {"greedy": {"accuracy": 1.0, "scores": [1]}, "sampled": {"samples": 2, "scores": [1]}}
    (tmp_path / "eval.json").write_text(json.dumps(settings | decoded))
    (tmp_path / "log.jsonl").write_text('{"step": 25}\n{"step": 50}\n')
    found = collect.collect(tmp_path)
    assert found["policy"] == [{"settings": {"seed": 0}, "torch": "2", "greedy": {"accuracy": 1.0},
                                "sampled": {"samples": 2}, "last_logged": {"step": 50}}]  # fmt: skip
    (kept,) = found["runs"]
    assert (kept["run"], kept["state"], kept["info"]) == ("long/bf16/s0", "unfinished", {"device": "x"})
    assert kept["evals"][0]["sampled"] == {"samples": 2, "accuracy": 0.5, "right": "210"}
    assert found["steps"] == [{"run": "long/bf16/s0", "step": 1, "gap/pearson": 0.123457}]
    with pytest.raises(ValueError, match=r"give the folder that run\.sh fills"):
        collect.collect(tmp_path / "runs")

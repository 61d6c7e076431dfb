"""Problems, styles and splits of rl/chain.py and rl/tasks.py."""

import json
import random
import re
import sys
from collections import Counter

import pytest

from mxrl.rl.chain import (
    ALPHABET,
    MIXTURES,
    STYLES,
    Difficulty,
    Mixture,
    chain_problems,
    chain_result,
    parse_chain,
    solution,
    split_of,
    style_of,
)
from mxrl.rl.tasks import TASKS, TaskError, check_options, load_task

# 37+85 = 122, 122*4 = 488, 488-612 = -124, and -124 mod 10000 = 9876
CHAIN = "37+85*4-612="
WORKED = {
    "careful": "37+85=122;122*4=488;488-612=9876#9876",
    "skip": "37+85*4=488;488-612=9876#9876",
    "guess": "#9876",
    "rewrite": "122*4-612;488-612;9876#9876",
}


@pytest.mark.parametrize("style", STYLES)
def test_a_solution_worked_by_hand(style):
    assert solution(CHAIN, style) == WORKED[style]
    assert style_of(WORKED[style]) == style


def test_results_wrap_at_ten_thousand():
    assert chain_result("9999+1=") == 0
    assert chain_result("5000*9*9=") == 5000  # 45000 -> 5000, 45000 -> 5000
    assert chain_result("2+3*4=") == 20  # from left to right, no precedence


def test_every_written_line_is_true_and_follows_from_the_one_before():
    for problem in load_task("chain", seed=3, n=300):
        for style in ("careful", "skip"):
            work, answer = solution(problem, style).split("#")
            value = None
            for line in work.split(";"):
                left, right = line.split("=")
                numbers = [int(x) for x in re.findall(r"\d+", left)]
                assert value is None or numbers[0] == value
                value = numbers[0]
                for op, operand in zip(re.findall(r"[+*-]", left), numbers[1:], strict=True):
                    value = {"+": value + operand, "-": value - operand, "*": value * operand}[op] % 10000
                assert value == int(right)
            assert str(value) == answer == problem.answer


def test_every_rewritten_line_is_what_is_left_of_the_chain():
    for problem in load_task("chain", seed=3, n=300, numbers=(2, 9)):
        work, answer = solution(problem, "rewrite").split("#")
        chain = problem.prompt.rstrip("=")
        for line in work.split(";"):
            first, rest = re.match(r"(\d+[+*-]\d+)(.*)", chain).groups()
            assert line == f"{chain_result(first + '=')}{rest}"
            chain = line
        assert chain == answer == problem.answer


def test_a_rewritten_solution_grows_with_the_square_of_the_chain():
    def mean(numbers):
        problems = load_task("chain", seed=0, n=200, numbers=(numbers, numbers), digits=(1, 3))
        return sum(len(solution(p, "rewrite")) + 1 for p in problems) / 200

    short, mid, long = mean(6), mean(16), mean(41)
    assert 45 < short < 60 and 320 < mid < 380 and 2200 < long < 2350  # experiments/long_responses counts on them


@pytest.mark.parametrize(
    "text",
    ["", "12", "37+85=122", "37+85=122;#122", "37+=1#1", "37+85=122;;1+1=2#2", "37 #1", "1+2;#3", "1+2;3;4+5#9"],
)
def test_what_is_no_style_is_called_other(text):
    assert style_of(text) == "other"


def test_wrong_work_still_shows_its_style():
    assert style_of("37+85=999;999*4=1#1") == "careful"
    assert style_of("37+85=122;122*4-612=1#1") == "skip"  # one merged line is enough
    assert style_of("9*4-612;8-612;1#2") == "rewrite"


def test_the_drawn_problems_keep_to_the_difficulty():
    problems = load_task("chain", seed=1, n=2000, numbers=(2, 4), digits=(2, 3), ops="+*")
    lengths = Counter(problem.meta["group"] for problem in problems)
    assert set(lengths) == {2, 3, 4} and min(lengths.values()) > 550
    for problem in problems:
        first, steps = parse_chain(problem.prompt)
        assert 10 <= first <= 999
        for op, operand in steps:
            assert (op == "*" and 2 <= operand <= 9) or (op == "+" and 10 <= operand <= 999)


def test_the_alphabet_covers_everything_and_the_vocabulary_stays_small():
    text = "".join(p.prompt + solution(p, s) for p in load_task("chain", n=50) for s in STYLES)
    assert set(text) == set(ALPHABET)
    assert len(ALPHABET) + 3 <= 24


def test_long_careful_solutions_have_sixty_to_a_hundred_and_ten_characters():
    sizes = [len(solution(p)) for p in load_task("chain", seed=0, n=300, numbers=(7, 7))]
    assert 60 < sum(sizes) / len(sizes) < 110 and max(sizes) < 110


def test_splits_are_disjoint_and_go_by_the_text_alone():
    train = {p.prompt for p in load_task("chain", seed=0, n=5000, split="train")}
    test = {p.prompt for p in load_task("chain", seed=0, n=2048, split="test")}
    assert len(train) == 5000 and len(test) == 2048 and not train & test
    easier = load_task("chain", seed=9, n=400, split="test", numbers=(2, 3), digits=(1, 2))
    assert all(split_of(p.prompt) == "test" for p in easier)


def test_one_text_in_sixteen_is_test():
    share = sum(split_of(f"{i}+1=") == "test" for i in range(20_000)) / 20_000
    assert abs(share - 1 / 16) < 0.007  # 4 standard errors: sqrt(.0586 / 20000) = .0017


def test_a_seed_always_gives_the_same_problems():
    assert [p.prompt for p in load_task("chain", seed=0, n=3, split="test")] == PINNED
    assert load_task("chain", seed=0, n=100)[:40] == load_task("chain", seed=0, n=40)
    assert load_task("chain", seed=0, n=40) != load_task("chain", seed=1, n=40)


# From the first run: a change here changes every experiment's problems.
PINNED = ["4829*5+3393-459+35-3=", "291*7-4=", "129+682+6587-1213-81-555="]


def test_asking_for_more_problems_than_there_are_says_so():
    with pytest.raises(TaskError, match=r"only about .* different test problems"):
        load_task("chain", n=500, split="test", numbers=(2, 2), digits=(1, 1))


@pytest.mark.parametrize("mixture", MIXTURES.values(), ids=lambda m: m.name)
def test_mixtures_are_drawn_at_their_probabilities(mixture):
    rng = random.Random(0)
    for n in (3, 7):
        counts = Counter(mixture.draw(n, rng) for _ in range(4000))
        for style, p in mixture.probabilities(n).items():
            assert abs(counts[style] / 4000 - p) < 0.035  # over 4 standard errors, sqrt(.25 / 4000) = .008


def test_the_default_mixture_is_careful_for_short_chains_and_hasty_for_long_ones():
    def greedy(n):  # the two branches of greedy decoding (chain.py's opening)
        row = MIXTURES["default"].probabilities(n)
        if row["guess"] > 0.5:
            return "guess"
        return "careful" if row["careful"] > row["skip"] else "skip"

    assert [greedy(n) for n in range(3, 8)] == ["careful", "careful", "skip", "skip", "skip"]
    assert min(MIXTURES["default"].probabilities(n)["careful"] for n in range(3, 8)) >= 0.15  # RL can find it


def test_lengths_outside_a_table_take_the_nearest_row():
    assert MIXTURES["default"].probabilities(2) == MIXTURES["default"].probabilities(3)
    assert MIXTURES["default"].probabilities(12) == MIXTURES["default"].probabilities(7)


def test_a_mixture_comes_from_a_file_too(tmp_path):
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"3": {"careful": 0.25, "guess": 0.75}}))
    assert Mixture.load(str(file)).table == {3: {"careful": 0.25, "guess": 0.75}}
    with pytest.raises(ValueError, match="unknown mixture 'carefull'; possible: default"):
        Mixture.load("carefull")
    with pytest.raises(ValueError, match="sum to 1"):
        Mixture("bad", {3: {"careful": 0.5}})
    with pytest.raises(ValueError, match="unknown style 'sloppy'"):
        Mixture("bad", {3: {"sloppy": 1.0}})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: load_task("chains", n=1), "unknown task 'chains'; possible: chain, gsm_symbolic, gsm8k, dapo-math"),
        (lambda: load_task("chain", n=1, split="dev"), "unknown split 'dev'; possible: train, test"),
        (lambda: load_task("chain", n=1, number=3), "unknown option 'number'; possible: numbers, digits, ops"),
        (lambda: load_task("chain"), "give both n and seed"),
        (lambda: load_task("chain", n=-1), "must not be negative"),
        (lambda: load_task("chain", n=1, digits=(1, 5)), "digits=[1, 5] must be [min, max], whole numbers with"),
        (lambda: load_task("chain", n=1, numbers=3), "numbers=3 must be [min, max], whole numbers with 2 <= min"),
        (lambda: load_task("chain", n=1, numbers=["a", "b"]), "numbers=['a', 'b'] must be [min, max], whole numbers"),
        (lambda: load_task("chain", n=1, numbers=[2.5, 3]), "numbers=[2.5, 3] must be [min, max], whole numbers"),
        (lambda: load_task("chain", n=1, numbers=[1000, 1000]), "2 <= min <= max <= 100"),
        (lambda: load_task("chain", n=1, ops=5), "ops=5 must be some of '+-*'"),
        (lambda: check_options("chain", {1: 2}), "unknown option '1'; possible: numbers, digits, ops"),
        (lambda: check_options("gsm8k", {"seed": 2}), "unknown option 'seed'; possible: path"),
        (lambda: load_task("chain", n=1, ops="/"), "must be some of"),
        (lambda: load_task("chain", n=1, numbers=(5, 3)), "min <= max"),
        (lambda: load_task("gsm8k", path="nowhere.jsonl"), "no such file: nowhere.jsonl"),
        (lambda: load_task("gsm8k", path=5), "path=5 must be the name of a .jsonl or .parquet file"),
        (lambda: load_task("dapo-math", path=5), "path=5 must be the name of a .jsonl or .parquet file"),
    ],
)
def test_wrong_calls_say_what_is_possible(call, message):
    with pytest.raises(TaskError) as caught:
        call()
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_gsm8k_from_a_file(tmp_path):
    rows = [
        {"question": "Two and two?", "answer": "2+2=<<2+2=4>>4\n#### 4"},
        {"question": "A lot?", "answer": "Much.\n#### 1,234"},
    ]
    file = tmp_path / "test.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    problems = load_task("gsm8k", path=str(file), split="test", seed=None)
    assert [p.answer for p in problems] == ["4", "1234"]
    instruction = 'Let\'s think step by step and output the final answer after "####".'
    assert problems[0].prompt == [{"role": "user", "content": f"Two and two? {instruction}"}]
    assert problems[0].row() == {"prompt": problems[0].prompt, "answer": "4"}
    assert TASKS["gsm8k"].reward(["so #### 1234."], ["1234"]) == [1.0]
    with pytest.raises(TaskError, match="3 problems asked for, the test split has 2"):
        load_task("gsm8k", path=str(file), split="test", n=3)


def gsm8k_row(text):
    return {"question": text, "answer": "#### 1"}


def dapo_row(text):
    return {"prompt": [{"role": "user", "content": text}], "reward_model": {"ground_truth": "1"}}


@pytest.mark.parametrize(("task", "row"), [("gsm8k", gsm8k_row), ("dapo-math", dapo_row)])
def test_split_in_a_path_names_the_split_s_own_file(tmp_path, task, row):
    texts = {"train": [f"Learn {i}?" for i in range(40)], "test": [f"Asked {i}?" for i in range(40)]}
    for split, own in texts.items():
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row(text)) + "\n" for text in own))
    path = str(tmp_path / "{split}.jsonl")
    for split, own in texts.items():  # all of its problems, whatever their hash says
        problems = load_task(task, path=path, split=split, seed=None)
        assert [p.prompt[0]["content"][: len(text)] for p, text in zip(problems, own, strict=True)] == own
    (tmp_path / "test.jsonl").unlink()
    with pytest.raises(TaskError, match=r"no such file: .*/test\.jsonl"):
        load_task(task, path=path, split="test")


@pytest.mark.parametrize(
    ("task", "line", "message"),
    [
        ("gsm8k", b'{"query": "x", "answer": "#### 1"}', "no column 'question' (it has: query, answer)"),
        ("gsm8k", b'{"question": "x", "answer": "1"}', "its answer has no '####'"),
        ("gsm8k", b'{"question": 5, "answer": "#### 5"}', "'question' must be text, got 5"),
        ("gsm8k", b"{oops", "not JSON (Expecting property name enclosed in double quotes)"),
        ("gsm8k", b"[1, 2]", "a row must be a JSON object with a value for each column, got [1, 2]"),
        ("gsm8k", b"\xff\xfe", "not UTF-8 text"),
        ("dapo-math", b'{"prompt": [], "reward_model": {}}', "'reward_model' has no 'ground_truth'"),
        ("dapo-math", b'{"prompt": [], "reward_model": 5}', "'reward_model' must be an object with 'ground_truth'"),
        ("dapo-math", b'{"prompt": "hi", "reward_model": {"ground_truth": 1}}', "'prompt' must be a list of messages"),
        ("dapo-math", b'{"prompt": [{"role": "x"}], "reward_model": {"ground_truth": 1}}', "'prompt' must be a list"),
    ],
)
def test_a_broken_file_is_named_with_its_line(tmp_path, task, line, message):
    good = {"gsm8k": gsm8k_row("One?"), "dapo-math": dapo_row(0, "One?", "1")}[task]
    file = tmp_path / "broken.jsonl"
    file.write_bytes(json.dumps(good).encode() + b"\n\n" + line + b"\n")
    with pytest.raises(TaskError) as caught:
        load_task(task, path=str(file))
    assert f"task '{task}': {file}:3: {message}" in str(caught.value) and "\n" not in str(caught.value)


def test_a_broken_parquet_file_is_named_with_its_row(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    file = tmp_path / "broken.parquet"
    parquet.write_table(pa.Table.from_pylist([gsm8k_row("One?"), {"question": "Two?", "answer": None}]), file)
    with pytest.raises(TaskError, match=r"broken\.parquet: row 1: 'answer' must be text, got None"):
        load_task("gsm8k", path=str(file))
    file.write_bytes(b"PAR1 and no more")
    with pytest.raises(TaskError, match=r"broken\.parquet: not a \.parquet file that can be read"):
        load_task("gsm8k", path=str(file))


def test_a_line_ends_at_a_newline_alone(tmp_path):
    file = tmp_path / "test.jsonl"
    file.write_text(json.dumps(gsm8k_row("One\u2028or\x85two?"), ensure_ascii=False), encoding="utf-8")
    assert load_task("gsm8k", path=str(file))[0].meta["question"] == "One\u2028or\x85two?"


def dapo_row(i, question, truth):
    """One row with the columns of BytedTsinghua-SIA/DAPO-Math-17k."""
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": question, "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": truth, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": f"id-{i}"},
    }


def test_dapo_from_a_parquet_file_drops_its_repeats_and_splits_by_the_text(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    rows = [dapo_row(i % 200, f"What is {i % 200}+1? Answer: $Answer", str(i % 200 + 1)) for i in range(600)]
    file = tmp_path / "dapo.parquet"
    parquet.write_table(pa.Table.from_pylist(rows), file)
    train, test = (load_task("dapo-math", path=str(file), split=split, seed=0) for split in ("train", "test"))
    assert all(p.meta["index"] < 200 for p in train + test)  # the first of the repeats
    assert len(train) + len(test) == 200 and 0 < len(test) < 40
    texts = {problem.prompt[0]["content"] for problem in train + test}
    assert len(texts) == 200
    assert all(f"What is {int(p.answer) - 1}+1?" in p.prompt[0]["content"] for p in train)
    assert [p.meta["index"] for p in train] != sorted(p.meta["index"] for p in train)  # permuted by the seed
    unshuffled = load_task("dapo-math", path=str(file), seed=None)
    assert [p.meta["index"] for p in unshuffled] == sorted(p.meta["index"] for p in train)


def test_gsm_symbolic_has_disjoint_splits_and_repeats_itself():
    pytest.importorskip("reasoning_gym")
    train = load_task("gsm_symbolic", seed=1, n=30)
    test = load_task("gsm_symbolic", seed=1, n=10, split="test")
    assert train == load_task("gsm_symbolic", seed=1, n=30)
    assert not {p.meta["question"] for p in train} & {p.meta["question"] for p in test}
    assert TASKS["gsm_symbolic"].reward([f"#### {p.answer}" for p in test], [p.answer for p in test]) == [1.0] * 10


@pytest.mark.parametrize("difficulty", ["abc", 2])
def test_a_difficulty_that_reasoning_gym_refuses(difficulty):
    pytest.importorskip("reasoning_gym")
    with pytest.raises(TaskError, match=f"refuses difficulty={difficulty!r}; 1.0 works"):
        load_task("gsm_symbolic", n=1, difficulty=difficulty)


@pytest.mark.parametrize("ops", ["+", "-", "*"])
@pytest.mark.parametrize("split", ["train", "test"])
def test_the_smallest_chains_have_both_splits(ops, split):  # or the draw would never end
    assert load_task("chain", n=1, split=split, numbers=(2, 2), digits=(1, 1), ops=ops)


@pytest.mark.parametrize(("task", "module"), [("gsm_symbolic", "reasoning_gym"), ("gsm8k", "datasets")])
def test_a_missing_package_is_named_with_its_extra(monkeypatch, task, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(RuntimeError, match=r"pip install 'mxrl\[train\]'"):
        load_task(task, n=1)


def test_problems_of_a_longer_list_are_all_different():
    assert len({p.prompt for p in chain_problems(seed=5, n=4000, split="test", difficulty=Difficulty())}) == 4000

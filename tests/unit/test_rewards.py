"""Rewards: what counts as the answer, for every task."""

import sys
import threading
from decimal import Decimal

import pytest

from mxrl.rl.rewards import chain_answer, chain_reward, gsm8k_answer, gsm8k_reward, math_reward, text_of


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("37+85=122#122", 1.0),
        ("#122", 1.0),
        ("1+1=3#122", 1.0),  # only the answer is judged
        ("37+85=122", 0.0),
        ("#122#5", 0.0),
        ("#0122", 0.0),
        ("#122 ", 0.0),
        ("#12", 0.0),
        ("", 0.0),
    ],
)
def test_chain_is_exact(completion, reward):
    assert chain_reward([completion], ["122"]) == [reward]


def test_chain_answer_is_what_follows_the_first_mark():
    assert chain_answer("1#2#3") == "2#3" and chain_answer("12") is None


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("3 + 4 = 7\n#### 7", "7"),
        ("#### 1,234", "1234"),
        ("#### $1,234.50.", "1234.50"),
        ("#### -3", "-3"),
        ("#### 1 no, wait\n#### 2", "2"),  # the last mark
        ("#### 18 dollars, not 20", "18"),
        ("it costs 5 and then 18.", "18"),  # no mark: the last number
        ("5 apples #### none", "5"),  # nothing after the mark: the last number of the text
        ("half is .5", ".5"),
    ],
)
def test_gsm8k_takes_the_marked_number_else_the_last(text, number):
    assert gsm8k_answer(text) == Decimal(number)


def test_gsm8k_compares_numbers_not_strings():
    assert gsm8k_reward(["#### 18.00", "#### 19", "no number", ""], ["18"] * 4) == [1.0, 0.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="'eighteen' holds no number"):
        gsm8k_reward(["#### 18"], ["eighteen"])


def test_chat_completions_are_judged_by_their_contents():
    chat = [{"role": "assistant", "content": "#### "}, {"role": "assistant", "content": "4"}]
    assert text_of(chat) == "#### 4"
    assert gsm8k_reward([chat], ["4"], prompts=["unused column"]) == [1.0]


def test_every_completion_needs_its_answer():
    with pytest.raises(ValueError, match="2 completions but 1 answers"):
        chain_reward(["#1", "#2"], ["1"])


@pytest.mark.parametrize(
    ("text", "answer", "reward"),
    [
        ("Answer: 34", "34", 1.0),
        ("Answer: 35\nno:\nAnswer: 34", "34", 1.0),
        ("Answer: 34\nno:\nAnswer: 35", "34", 0.0),
        (r"Answer: \frac{1}{2}", "0.5", 1.0),
        (r"Answer: \(34\)", "34", 1.0),
        (r"thus $\boxed{\frac{1}{2}}$ of 7", r"\frac12", 1.0),
        ("nothing here", "34", 0.0),
        ("", "34", 0.0),
    ],
)
def test_math_compares_expressions(text, answer, reward):
    pytest.importorskip("math_verify")
    assert math_reward([text], [answer]) == [reward]


def test_math_refuses_other_threads_where_its_timeout_would_not_work():
    pytest.importorskip("math_verify")
    caught = []

    def work():
        try:
            math_reward(["Answer: 1"], ["1"])
        except RuntimeError as error:
            caught.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(caught) == 1 and "main thread" in caught[0]


def test_math_without_its_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(RuntimeError, match=r"pip install 'mxrl\[train\]'"):
        math_reward(["1"], ["1"])

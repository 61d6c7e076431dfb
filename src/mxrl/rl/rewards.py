"""Rewards: a completion's answer against the reference, 1.0 when right and 0.0 when not.

Every reward has the signature that TRL calls: `reward(completions, answer, **columns) -> list[float]`.

    chain_reward   exact: the text between the first `#` and the end must be the answer, character by character
    gsm8k_reward   numeric: the number after the last `####`, else the last number of the text (verl's instruction)
    math_reward    symbolic: math-verify says whether the two expressions are equal (extra `train`)

A completion is a string, or a list of chat messages, whose contents are joined. Rewards never look at the style or
at the length: what RL makes of those is a finding, not a setting.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

Completion = str | list[dict[str, Any]]
Reward = Callable[..., list[float]]

_NUMBER = re.compile(r"-?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
_ANSWER_LINE = re.compile(r"answer\s*:\s*(.+)", re.IGNORECASE)
MATH_TIMEOUT = 5  # seconds for parsing one expression, and for comparing two


def text_of(completion: Completion) -> str:
    """A completion as plain text: itself, or the contents of its chat messages joined."""
    if isinstance(completion, str):
        return completion
    return "".join(str(message.get("content") or "") for message in completion)


def chain_answer(text: str) -> str | None:
    """What follows the first `#`, or None when there is none. Nothing is stripped: `#12 ` is not `#12`."""
    _, mark, answer = text.partition("#")
    return answer if mark else None


def gsm8k_answer(text: str) -> Decimal | None:
    """The number after the last `####`, else the last number of the text; None when there is none.

    `$` and thousands separators are ignored; a final full stop is not part of the number.
    """
    _, mark, tail = text.rpartition("####")
    found = _NUMBER.search(tail) if mark else None
    if found is None:
        numbers = _NUMBER.findall(text)
        return _number(numbers[-1]) if numbers else None
    return _number(found.group())


def _number(text: str) -> Decimal | None:
    try:
        return Decimal(text.replace(",", "").replace("$", ""))
    except InvalidOperation:
        return None


def _check(completions: Sequence[Completion], answer: Sequence[str]) -> None:
    if len(completions) != len(answer):
        raise ValueError(f"{len(completions)} completions but {len(answer)} answers: one answer per completion")


def chain_reward(completions: Sequence[Completion], answer: Sequence[str], **columns: Any) -> list[float]:
    """1.0 where the text after the first `#` equals the answer exactly (built-in task `chain`)."""
    _check(completions, answer)
    return [float(chain_answer(text_of(c)) == a) for c, a in zip(completions, answer, strict=True)]


def gsm8k_reward(completions: Sequence[Completion], answer: Sequence[str], **columns: Any) -> list[float]:
    """1.0 where the extracted number equals the reference number (`gsm8k`, `gsm_symbolic`).

    Raises ValueError where a reference holds no number: such a row could never be rewarded.
    """
    _check(completions, answer)
    rewards = []
    for completion, reference in zip(completions, answer, strict=True):
        expected = gsm8k_answer(reference)
        if expected is None:
            raise ValueError(f"reference answer {reference!r} holds no number; this reward compares numbers")
        rewards.append(float(gsm8k_answer(text_of(completion)) == expected))
    return rewards


def math_reward(completions: Sequence[Completion], answer: Sequence[str], **columns: Any) -> list[float]:
    """1.0 where math-verify finds the completion equal to the reference (`dapo-math`).

    The last line `Answer: …` is compared when there is one, else the whole text (math-verify then prefers `\\boxed`).
    A comparison that takes longer than `MATH_TIMEOUT` seconds counts as wrong.

    Raises:
        RuntimeError: math-verify is missing, or this is not the main thread (its timeout is a POSIX alarm, which Python
            delivers to the main thread only; without it one hostile expression would hang the run).
    """
    _check(completions, answer)
    parse, verify = _math_verify()
    rewards = []
    for completion, reference in zip(completions, answer, strict=True):
        text = text_of(completion)
        lines = _ANSWER_LINE.findall(text)
        gold = parse(f"${reference}$", parsing_timeout=MATH_TIMEOUT)
        # `Answer: 34` is parsed as plain text, `Answer: \frac12` only inside dollars.
        given = lines[-1].strip().strip("$") if lines else text
        found = parse(f"${given}$" if lines else text, parsing_timeout=MATH_TIMEOUT)
        rewards.append(float(bool(gold) and bool(found) and verify(gold, found, timeout_seconds=MATH_TIMEOUT)))
    return rewards


def _math_verify() -> tuple[Callable[..., Any], Callable[..., Any]]:
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise RuntimeError("this reward needs math-verify: pip install 'mxrl[train]'") from error
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("math_reward must be called from the main thread: math-verify's timeout is a POSIX alarm")
    return parse, verify

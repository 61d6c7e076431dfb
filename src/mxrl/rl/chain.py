"""Chained arithmetic: a reasoning task small enough for a policy of a few million parameters.

A problem is a chain of numbers, worked from left to right (no precedence), each result taken mod 10000:

    prompt      37+85*4-612=            37+85 = 122, 122*4 = 488, 488-612 = -124 = 9876 (mod 10000)
    careful     37+85=122;122*4=488;488-612=9876#9876        every step is written
    skip        37+85*4=488;488-612=9876#9876                two operations a line
    guess       #9876                                        the answer at once
    rewrite     122*4-612;488-612;9876#9876                  each line is what is left of the chain

The operands of + and − have 1 to 4 digits, those of × are 2 to 9; the alphabet is ten digits and `+-*=;#`.

Why styles. RL raises the probability of behaviour that a policy already samples; it does not repair the slips of a
policy that always does the same. A policy supervised on a *mixture* of styles, careful for short chains and hasty for
long ones, is hasty when it decodes greedily although careful solutions are in reach: that is what GRPO can find.
The style is decided by single tokens (`#` first: guess; an operator where `=` could stand: skip), so greedy decoding
takes the branch with more than half of the mass at each of the two: P(guess) against the rest, then careful
against skip.

Length. A careful solution grows with the chain's numbers, a rewritten one with their square, since every line copies
the rest: 5 numbers take about 45 tokens, 15 about 350, 38 about 2200, although the arithmetic is the same, one
operation a line. That is how a policy of a few million parameters writes thousands of tokens that all matter: one
wrong digit, in a result or in a copy, and the answer is wrong (experiments/long_responses).

Splits are disjoint by construction: a problem is of the test split when the hash of its prompt says so, whatever the
seed, the sizes or the difficulty.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MODULUS = 10_000
ALPHABET = "0123456789+-*=;#"
STYLES = ("careful", "skip", "guess", "rewrite")
SPLITS = ("train", "test")
MOST_NUMBERS = 100  # in a chain: a prompt of 330 characters, a careful solution of 1300, a rewritten one of 17,000
TEST_SHARE = 16  # one prompt in 16 belongs to the test split
_CHAIN = re.compile(r"\d+(?:[+\-*]\d+)+=")
_LINE = re.compile(r"\d+([+\-*]\d+)+=\d+")
_REWRITTEN = re.compile(r"(\d+([+\-*]\d+)+;)*\d+")


@dataclass(frozen=True)
class Problem:
    """One problem: `prompt` (text, or chat messages), the reference `answer`, and `meta` (task, group, …)."""

    prompt: str | list[dict[str, str]]
    answer: str
    meta: dict[str, Any] = field(default_factory=dict)

    def row(self) -> dict[str, Any]:
        """The columns that a TRL dataset needs: `prompt` and `answer`."""
        return {"prompt": self.prompt, "answer": self.answer}


def split_of(text: str) -> str:
    """`"test"` for one text in 16, by its BLAKE2 hash; else `"train"`."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return "test" if int.from_bytes(digest, "little") % TEST_SHARE == 0 else "train"


@dataclass(frozen=True)
class Difficulty:
    """How hard the chains are: `numbers` in a chain and `digits` of an operand (both min, max), and the operators."""

    numbers: tuple[int, int] = (3, 7)
    digits: tuple[int, int] = (1, 4)
    ops: str = "+-*"

    def __post_init__(self) -> None:
        for name, low, high, ends in (("numbers", 2, MOST_NUMBERS, self.numbers), ("digits", 1, 4, self.digits)):
            pair = isinstance(ends, tuple | list) and len(ends) == 2 and all(type(end) is int for end in ends)
            if not pair or not low <= ends[0] <= ends[1] <= high:
                given = list(ends) if isinstance(ends, tuple) else ends
                raise ValueError(
                    f"chain: {name}={given!r} must be [min, max], whole numbers with {low} <= min <= max <= {high}"
                )
        if not isinstance(self.ops, str) or not self.ops or set(self.ops) - set("+-*"):
            raise ValueError(f"chain: ops={self.ops!r} must be some of '+-*'")

    def draw(self, rng: random.Random, split: str) -> str:
        """One prompt of the split (the others are drawn again)."""
        while True:
            digits = rng.randint(*self.digits)
            parts = [str(rng.randint(10 ** (digits - 1), 10**digits - 1))]
            for _ in range(rng.randint(*self.numbers) - 1):
                op = rng.choice(self.ops)
                digits = rng.randint(*self.digits)
                operand = rng.randint(2, 9) if op == "*" else rng.randint(10 ** (digits - 1), 10**digits - 1)
                parts.append(f"{op}{operand}")
            prompt = "".join(parts) + "="
            if split_of(prompt) == split:
                return prompt


def parse_chain(prompt: str) -> tuple[int, list[tuple[str, int]]]:
    """`"37+85*4="` → `(37, [("+", 85), ("*", 4)])`. Raises ValueError for anything else."""
    if not _CHAIN.fullmatch(prompt):
        raise ValueError(f"not a chain: {prompt!r} (expected something like '37+85*4=')")
    first = re.match(r"\d+", prompt)
    assert first is not None
    return int(first.group()), [(op, int(value)) for op, value in re.findall(r"([+\-*])(\d+)", prompt)]


def _apply(value: int, op: str, operand: int) -> int:
    if op == "*":
        return value * operand % MODULUS
    return (value + operand if op == "+" else value - operand) % MODULUS


def chain_result(prompt: str) -> int:
    """The chain's value, 0 … 9999, worked from left to right."""
    value, steps = parse_chain(prompt)
    for op, operand in steps:
        value = _apply(value, op, operand)
    return value


def solution(problem: Problem | str, style: str = "careful") -> str:
    """The right solution in a style, ending in `#answer` (no end-of-sequence token).

    `careful` has a line an operation, `skip` a line for two (the last may hold one), `guess` none, `rewrite` a line an
    operation that holds its result and the rest of the chain. With one operation careful and skip are the same text.
    """
    if style not in STYLES:
        raise ValueError(f"unknown style {style!r}; possible: {', '.join(STYLES)}")
    prompt = problem if isinstance(problem, str) else str(problem.prompt)
    if style == "guess":
        return f"#{chain_result(prompt)}"
    value, steps = parse_chain(prompt)
    lines = []
    if style == "rewrite":
        rest = [f"{op}{operand}" for op, operand in steps]
        for done, (op, operand) in enumerate(steps, 1):
            value = _apply(value, op, operand)
            lines.append(f"{value}{''.join(rest[done:])}")
        return f"{';'.join(lines)}#{value}"
    stride = 1 if style == "careful" else 2
    for start in range(0, len(steps), stride):
        left = str(value)
        for op, operand in steps[start : start + stride]:
            left += f"{op}{operand}"
            value = _apply(value, op, operand)
        lines.append(f"{left}={value}")
    return f"{';'.join(lines)}#{value}"


def style_of(completion: str) -> str:
    """`careful`, `skip`, `guess`, `rewrite`, or `other` (no `#`, or lines of neither kind), right or wrong alike.

    One merged line makes a completion `skip`.
    """
    work, mark, _ = completion.partition("#")
    if not mark:
        return "other"
    if not work:
        return "guess"
    if _REWRITTEN.fullmatch(work):
        return "rewrite"
    lines = work.split(";")
    if not all(_LINE.fullmatch(line) for line in lines):
        return "other"
    merged = any(sum(line.count(op) for op in "+-*") > 1 for line in lines)
    return "skip" if merged else "careful"


@dataclass(frozen=True)
class Mixture:
    """P(style | numbers in the chain), a row per length; lengths outside the table take the nearest row's."""

    name: str
    table: Mapping[int, Mapping[str, float]]

    def __post_init__(self) -> None:
        if not self.table:
            raise ValueError(f"mixture '{self.name}': the table is empty")
        for n, row in self.table.items():
            unknown = set(row) - set(STYLES)
            if unknown:
                raise ValueError(f"mixture '{self.name}': unknown style {sorted(unknown)[0]!r} for {n} numbers")
            if min(row.values()) < 0 or abs(sum(row.values()) - 1) > 1e-9:
                raise ValueError(f"mixture '{self.name}': probabilities for {n} numbers must be >= 0 and sum to 1")

    def probabilities(self, n: int) -> Mapping[str, float]:
        """The row of the length `n`, or of the nearest length in the table."""
        return self.table[min(self.table, key=lambda length: (abs(length - n), length))]

    def draw(self, n: int, rng: random.Random) -> str:
        """A style for a chain of n numbers."""
        row = self.probabilities(n)
        return rng.choices(list(row), list(row.values()))[0]

    @classmethod
    def load(cls, name: str) -> Mixture:
        """A named mixture (`MIXTURES`), or a JSON file `{"3": {"careful": 0.7, …}, …}`."""
        if name in MIXTURES:
            return MIXTURES[name]
        if not name.endswith(".json"):
            raise ValueError(f"unknown mixture '{name}'; possible: {', '.join(MIXTURES)}, or a .json file")
        table = json.loads(Path(name).read_text())
        return cls(Path(name).stem, {int(n): {style: float(p) for style, p in row.items()} for n, row in table.items()})


def _rows(*rows: tuple[int, float, float, float]) -> dict[int, dict[str, float]]:
    return {n: dict(zip(STYLES[:3], row, strict=True)) for n, *row in rows}


#                                            numbers careful skip guess
MIXTURES = {
    mixture.name: mixture
    for mixture in (
        Mixture("default", _rows((3, 0.60, 0.25, 0.15), (4, 0.50, 0.30, 0.20), (5, 0.35, 0.45, 0.20),
                                 (6, 0.25, 0.45, 0.30), (7, 0.20, 0.45, 0.35))),
        # Greedy decoding guesses at 6 and 7: the lowest start, the most headroom.
        Mixture("hasty", _rows((3, 0.60, 0.25, 0.15), (4, 0.45, 0.30, 0.25), (5, 0.30, 0.40, 0.30),
                               (6, 0.20, 0.25, 0.55), (7, 0.15, 0.25, 0.60))),
        # Careful is modal up to 5: a higher start, for when merged steps come out weaker than expected.
        Mixture("mild", _rows((3, 0.75, 0.15, 0.10), (4, 0.65, 0.20, 0.15), (5, 0.50, 0.30, 0.20),
                              (6, 0.35, 0.40, 0.25), (7, 0.25, 0.45, 0.30))),
        # One style: the prototype's near-deterministic policy, and the ceiling of what the careful style reaches.
        Mixture("careful", _rows((3, 1.0, 0.0, 0.0))),
        Mixture("uniform", _rows((3, 1 / 3, 1 / 3, 1 / 3))),
        # Long answers: greedy decoding skips, whatever the length; rewriting is as likely at every length.
        Mixture("long", {3: {"rewrite": 0.40, "skip": 0.45, "guess": 0.15}}),
    )
}  # fmt: skip


def chain_prompts(seed: int | str, split: str, difficulty: Difficulty | None = None) -> Iterator[str]:
    """An endless stream of prompts of one split, a function of (seed, split, difficulty); repeats are possible."""
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; possible: {', '.join(SPLITS)}")
    difficulty = difficulty or Difficulty()
    rng = random.Random(f"chain/{split}/{seed}")  # a string seeds through SHA-512: the same on every platform
    while True:
        yield difficulty.draw(rng, split)


def chain_problems(*, seed: int, n: int, split: str, difficulty: Difficulty | None = None) -> list[Problem]:
    """`n` different problems; a longer list with the same seed begins with the shorter one's problems.

    Raises ValueError when the difficulty does not have n different problems in that split.
    """
    found: dict[str, None] = {}
    misses = 0
    stream = chain_prompts(seed, split, difficulty)
    while len(found) < n:
        before = len(found)
        found[next(stream)] = None
        misses = misses + 1 if len(found) == before else 0
        if misses > 1000:  # 1000 repeats in a row: fewer than about one new prompt in 1000 is left
            raise ValueError(f"chain: only about {len(found)} different {split} problems at this difficulty, not {n}")
    return [
        Problem(prompt, str(chain_result(prompt)), {"task": "chain", "group": len(parse_chain(prompt)[1]) + 1})
        for prompt in found
    ]

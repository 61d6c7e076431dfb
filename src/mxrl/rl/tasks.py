"""Tasks: where problems come from, and which reward judges them.

    load_task("chain", seed=0, n=2048, split="test") -> [Problem(prompt, answer, meta), …]

    chain         built in: chained arithmetic for character-level policies (rl/chain.py)
    gsm_symbolic  reasoning_gym's generated grade-school problems (extra `train`, nothing is downloaded)
    gsm8k         the hub's openai/gsm8k, or a local .jsonl/.parquet with `question` and `answer`
    dapo-math     the hub's BytedTsinghua-SIA/DAPO-Math-17k, or a local file of the same columns

`{split}` in a path stands for train or test, each of which then is a file of its own. Without it one file serves both:
dapo-math splits it by the hash, gsm8k does not, so a training run refuses to evaluate on it.

Seeds. `seed` decides which problems are drawn and in which order (generated tasks), or permutes the rows (data
sets; `seed=None` keeps the file's order). Splits never overlap: gsm8k has its own; the others go by the hash of the
problem's text (one in 16 is test), so no seed can leak a test problem into training.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mxrl.rl.chain import SPLITS, Difficulty, Problem, chain_problems, split_of
from mxrl.rl.rewards import Reward, chain_reward, gsm8k_reward, math_reward

GSM8K_HUB = "openai/gsm8k"
DAPO_HUB = "BytedTsinghua-SIA/DAPO-Math-17k"
SPLIT = "{split}"  # in a file's path
GSM8K_INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'  # verl's


class TaskError(ValueError):
    """A task that can't be loaded: the message names the task, the option or the column."""


@dataclass(frozen=True)
class Task:
    """A named source of problems. `load(seed=, n=, split=, **options)` gives them, `reward` judges completions."""

    name: str
    load: Callable[..., list[Problem]]
    reward: Reward
    options: tuple[str, ...] = ()


def get_task(name: str) -> Task:
    """The registered task; TaskError names the possible ones."""
    if name not in TASKS:
        raise TaskError(f"unknown task '{name}'; possible: {', '.join(TASKS)}")
    return TASKS[name]


def parse_task(text: str) -> tuple[str, dict[str, Any]]:
    """("gsm8k", {"path": "FILE"}) of "gsm8k:FILE", for `load_task`. TaskError: unknown, or it takes no file."""
    name, _, path = text.partition(":")
    if path and "path" not in get_task(name).options:
        raise TaskError(f"task '{name}' takes no file, got '{path}'")
    return get_task(name).name, {"path": path} if path else {}


def load_task(
    name: str, *, seed: int | None = 0, n: int | None = None, split: str = "train", **options: Any
) -> list[Problem]:
    """`n` problems of a task's split (`n=None`: all of a data set).

    Options: chain takes `numbers`, `digits`, `ops`; gsm_symbolic `difficulty`; gsm8k and dapo-math `path`.
    Raises TaskError for an unknown task, split or option, RuntimeError when an optional package is missing.
    """
    task = get_task(name)
    if split not in SPLITS:
        raise TaskError(f"task '{name}': unknown split '{split}'; possible: {', '.join(SPLITS)}")
    check_options(name, options)
    if n is not None and n < 0:
        raise TaskError(f"task '{name}': n={n} must not be negative")
    return task.load(seed=seed, n=n, split=split, **options)


def check_options(name: str, options: Mapping[Any, Any]) -> None:
    """TaskError for an option that the task has not: before `**options`, whose keys a file may have made numbers."""
    for key in options:
        if key not in get_task(name).options:
            possible = ", ".join(get_task(name).options)
            raise TaskError(f"task '{name}': unknown option '{key}'; possible: {possible}")


def _sized(name: str, seed: int | None, n: int | None) -> tuple[int, int]:
    if n is None or seed is None:
        raise TaskError(f"task '{name}' is generated: give both n and seed")
    return seed, n


def _chain(*, seed: int | None, n: int | None, split: str, **options: Any) -> list[Problem]:
    seed, n = _sized("chain", seed, n)
    try:
        return chain_problems(seed=seed, n=n, split=split, difficulty=Difficulty(**options))
    except ValueError as error:
        raise TaskError(str(error)) from error


def _chat(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{question} {GSM8K_INSTRUCTION}"}]


def _gsm_symbolic(*, seed: int | None, n: int | None, split: str, difficulty: float = 1.0) -> list[Problem]:
    seed, n = _sized("gsm_symbolic", seed, n)
    try:
        import reasoning_gym
    except ImportError as error:
        raise RuntimeError("task 'gsm_symbolic' needs reasoning-gym: pip install 'mxrl[train]'") from error
    try:  # item i is drawn from seed + i, so seeds are spaced far apart lest two of them share items
        items = reasoning_gym.create_dataset("gsm_symbolic", seed=seed * 10_000_019, size=10**7, difficulty=difficulty)
    except (AssertionError, TypeError) as error:
        raise TaskError(f"task 'gsm_symbolic': reasoning_gym refuses difficulty={difficulty!r}; 1.0 works") from error
    found: dict[str, Problem] = {}
    for i in range(100 * n + 1000):  # one in 16 is test; repeats are rare
        if len(found) == n:
            return list(found.values())
        item = items[i]
        if split_of(item["question"]) == split:
            meta = {"task": "gsm_symbolic", "index": i, "question": item["question"]}
            found.setdefault(item["question"], Problem(_chat(item["question"]), str(item["answer"]), meta))
    raise TaskError(f"task 'gsm_symbolic': found only {len(found)} different {split} problems, not {n}")


def _gsm8k(*, seed: int | None, n: int | None, split: str, path: str | None = None) -> list[Problem]:
    rows = _hub("gsm8k", GSM8K_HUB, split, config="main") if path is None else _read("gsm8k", path, split)
    problems = []
    for index, (place, row) in enumerate(rows):
        question, worked = (_column(row, key, place, str, "text") for key in ("question", "answer"))
        _, mark, answer = worked.rpartition("####")
        if not mark:
            raise TaskError(f"{place}: its answer has no '####'")
        meta = {"task": "gsm8k", "index": index, "question": question}
        problems.append(Problem(_chat(question), answer.strip().replace(",", ""), meta))
    return _take(problems, seed, n, "gsm8k", split)


def _dapo(*, seed: int | None, n: int | None, split: str, path: str | None = None) -> list[Problem]:
    # The hub's file repeats every problem about a hundred times, and has no test split.
    own_files = path is not None and SPLIT in str(path)
    rows = _hub("dapo-math", DAPO_HUB, "train") if path is None else _read("dapo-math", path, split)
    found: dict[str, Problem] = {}
    for index, (place, row) in enumerate(rows):
        truth = _column(row, "reward_model", place, dict, "an object with 'ground_truth'").get("ground_truth")
        if truth is None:
            raise TaskError(f"{place}: 'reward_model' has no 'ground_truth'")
        messages = _messages(row, place)
        key = "\n".join(m["content"] for m in messages)
        if key not in found and (own_files or split_of(key) == split):
            found[key] = Problem(messages, str(truth), {"task": "dapo-math", "index": index})
    return _take(list(found.values()), seed, n, "dapo-math", split)


def _messages(row: dict[str, Any], place: str) -> list[dict[str, str]]:
    """A row's `prompt`: chat messages of a role and a content."""
    expected = "a list of messages, each with a 'role' and a 'content' of text"
    prompt = _column(row, "prompt", place, list, expected)
    for message in prompt:
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise TaskError(f"{place}: 'prompt' must be {expected}; one of them is {_short(message)}")
    return [{"role": m["role"], "content": m["content"]} for m in prompt]


def _take(problems: list[Problem], seed: int | None, n: int | None, task: str, split: str) -> list[Problem]:
    if seed is not None:
        random.Random(f"{task}/{seed}").shuffle(problems)
    if n is not None and n > len(problems):
        raise TaskError(f"task '{task}': {n} problems asked for, the {split} split has {len(problems)}")
    return problems[:n]


def _column(row: dict[str, Any], key: str, place: str, kind: type, expected: str) -> Any:
    if key not in row:
        raise TaskError(f"{place}: no column '{key}' (it has: {', '.join(row)})")
    if not isinstance(row[key], kind):
        raise TaskError(f"{place}: '{key}' must be {expected}, got {_short(row[key])}")
    return row[key]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}…"


def _read(task: str, path: str, split: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where it stands, row) of each row of a local .jsonl or .parquet file."""
    if not isinstance(path, str | Path):
        raise TaskError(f"task '{task}': path={path!r} must be the name of a .jsonl or .parquet file")
    path = str(path).replace(SPLIT, split)
    file, where = Path(path), f"task '{task}': {path}"
    if not file.is_file():
        raise TaskError(f"task '{task}': no such file: {path}")
    if file.suffix == ".jsonl":
        for number, line in enumerate(file.read_bytes().splitlines(), 1):
            if line.strip():
                yield f"{where}:{number}", _row(line, f"{where}:{number}")
    elif file.suffix == ".parquet":
        try:
            import pyarrow
            import pyarrow.parquet as parquet
        except ImportError as error:
            raise RuntimeError("reading .parquet needs pyarrow: pip install 'mxrl[train]'") from error
        try:
            rows = parquet.read_table(file).to_pylist()
        except pyarrow.ArrowInvalid as error:
            raise TaskError(f"{where}: not a .parquet file that can be read; is it complete?") from error
        yield from _placed(where, rows)
    else:
        raise TaskError(f"{where}: expected a .jsonl or .parquet file")


def _row(line: bytes, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise TaskError(f"{place}: not UTF-8 text") from error
    except ValueError as error:
        raise TaskError(f"{place}: not JSON ({getattr(error, 'msg', error)})") from error
    if not isinstance(row, dict):
        raise TaskError(f"{place}: a row must be a JSON object with a value for each column, got {_short(row)}")
    return row


def _placed(where: str, rows: Iterable[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    return ((f"{where}: row {index}", row) for index, row in enumerate(rows))


def _hub(task: str, repo: str, split: str, config: str | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        import datasets
    except ImportError as error:
        raise RuntimeError(f"task '{task}' needs datasets: pip install 'mxrl[train]' (or give path=…)") from error
    try:
        rows: Any = datasets.load_dataset(repo, config, split=split)
    except Exception as error:  # no network, no such repository, no access: all end the same way for the user
        raise TaskError(f"task '{task}': can't load '{repo}' ({type(error).__name__}); or give path=FILE") from error
    return _placed(f"task '{task}': {repo}", rows)


TASKS = {
    task.name: task
    for task in (
        Task("chain", _chain, chain_reward, ("numbers", "digits", "ops")),
        Task("gsm_symbolic", _gsm_symbolic, gsm8k_reward, ("difficulty",)),
        Task("gsm8k", _gsm8k, gsm8k_reward, ("path",)),
        Task("dapo-math", _dapo, math_reward, ("path",)),
    )
}

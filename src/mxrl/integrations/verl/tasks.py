"""Our tasks and policies as verl takes them: a parquet file of prompts, a reward function, a tokenizer with a template.

    write_parquet("chain.parquet", load_task("chain", seed=0, n=64))    data.train_files=chain.parquet
    write_tokenizer("tokenizer")                                        actor_rollout_ref.model.tokenizer_path=tokenizer
    compute_score        reward.custom_reward_function.path=pkg://mxrl.integrations.verl.tasks

verl renders prompts by the tokenizer's chat template, and wants two tokens of every Qwen, which the shipped policies
don't have: they get numbers that no policy writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mxrl.rl.chain import Problem
from mxrl.rl.policy import char_tokenizer
from mxrl.rl.tasks import get_task

PLAIN_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def write_tokenizer(folder: str | Path) -> None:
    """The tokenizer of the shipped policies (rl/policy.py) as verl needs it."""
    tokenizer = char_tokenizer()
    tokenizer.add_tokens(["\n", "<|im_end|>"])
    tokenizer.chat_template = PLAIN_TEMPLATE
    tokenizer.save_pretrained(str(folder))


def write_parquet(path: str | Path, problems: Sequence[Problem], task: str = "chain") -> None:
    """One row a problem, in the columns of verl's data sets; `data_source` names the task, and so its reward."""
    import datasets

    get_task(task)
    rows = [
        {
            "data_source": task,
            "prompt": p.prompt if isinstance(p.prompt, list) else [{"role": "user", "content": p.prompt}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": p.answer},
            "extra_info": {"index": i, "split": "train"},
        }
        for i, p in enumerate(problems)
    ]
    datasets.Dataset.from_list(rows).to_parquet(str(path))


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **kwargs: Any
) -> float:
    """verl's reward function: 1.0 where the task named by `data_source` finds the solution right."""
    return get_task(data_source).reward([solution_str], [ground_truth])[0]

"""When a policy counts as collapsed: made-up runs of which it is known, and every run that the repo has recorded."""

import json
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from mxrl.rl.collapse import Watch

RECORDED = Path(__file__).parents[2] / "experiments/policies/results/grpo_steps.jsonl"


def rows(accuracies, uniform=0.2, **columns):
    return [
        {"step": i + 1, "rollout": float(i), "accuracy": a, "frac_reward_zero_std": uniform, **columns}
        for i, a in enumerate(accuracies)
    ]


GOES_ON = (0, "")


def stops(run, prompts=64):
    """(step, reason) at which a run is stopped; GOES_ON if it isn't."""
    watch = Watch(prompts)
    for row in run:
        watch.add(row)
        reason = watch.verdict()
        if reason:
            return row["step"], reason
    return GOES_ON


def measured(truth, prompts, seed):
    """Rollouts of a policy whose true accuracies are given, with 8 alike samples a prompt: the most noise there is."""
    rng = np.random.default_rng(seed)
    return rows([float((rng.random(prompts) < p).mean()) for p in truth])


def test_rewards_that_fall_to_a_fraction_and_stay_there():
    run = rows([0.6, 0.65] * 10 + [0.0] * 40, entropy=0.001, **{"completions/mean_length": 128.0})
    step, reason = stops(run)
    assert 20 < step <= 30
    assert reason == (
        "step 26: the policy has collapsed: accuracy over the last 10 rollouts is 0.25, after 0.625 over the first 10 "
        "and 0.625 over the best (to step 20) (entropy 0.001, mean length 128)"
    )


def test_a_policy_lost_in_its_first_steps():
    assert stops(rows([0.7, 0.5] + [0.0] * 30))[0] <= 12


def test_a_fall_to_half_of_the_best_that_is_still_above_the_start():
    assert stops(rows([0.02] * 10 + [0.5] * 10 + [0.2] * 30)) == GOES_ON


def test_a_dip_that_mends_and_a_policy_that_gets_a_little_worse():
    assert stops(rows([0.7] * 20 + [0.1] * 4 + [0.7] * 20)) == GOES_ON
    assert stops(rows([0.7] * 10 + [0.45] * 50)) == GOES_ON


@pytest.mark.parametrize("prompts, truth", [(64, 0.02), (64, 0.3), (2, 0.3), (4, 0.5), (512, 0.01)])
def test_chance_does_not_stop_a_run(prompts, truth):
    assert all(stops(measured([truth] * 300, prompts, seed), prompts) == GOES_ON for seed in range(20))


def test_few_prompts_a_rollout_make_longer_windows():
    assert [Watch(n).window for n in (2, 16, 25, 26, 512)] == [128, 16, 11, 10, 10]
    step, _ = stops(measured([0.8] * 200 + [0.0] * 200, 2, 0), 2)
    assert 250 < step < 320


def test_a_deterministic_policy_that_is_still_wrong():
    run = rows([0.6] * 20) + [{**row, "step": row["step"] + 20, "rollout": row["rollout"] + 20}
                              for row in rows([0.61] * 30, uniform=1.0)]  # fmt: skip
    step, reason = stops(run)
    assert step == 30 and "all samples of a prompt had one reward, 0.61 on average" in reason
    run[25]["frac_reward_zero_std"] = 1 - 1 / 64  # one group of one rollout
    assert stops(run)[0] == 36


def test_a_solved_task_and_one_that_was_never_learned():
    assert stops(rows([0.8] * 20) + rows([0.99] * 30, uniform=1.0)) == GOES_ON
    assert stops(rows([0.0] * 100, uniform=1.0)) == GOES_ON


def test_rows_that_train_on_a_rollout_again_count_once():
    run = [{**row, "step": 3 * row["step"] + i} for row in rows([0.6] * 20 + [0.0] * 20) for i in range(3)]
    once = rows([0.6] * 20 + [0.0] * 20)
    assert stops(run)[0] == 3 * stops(once)[0]
    assert len(Watch(64).extend(run).rows) == 40


def test_what_is_no_rollout_is_passed_over():
    watch = Watch(64).extend([{"step": 1, "loss": 0.1}, {"step": 2, "rollout": 1.0, "accuracy": None}])
    assert watch.rows == [] and watch.verdict() is None and watch.level(5) == 0.0


def test_the_level_at_a_checkpoint_is_that_of_the_rollouts_before_it():
    watch = Watch(64).extend(rows([0.2] * 10 + [0.6] * 10 + [0.0] * 10))
    assert [watch.level(step) for step in (5, 10, 15, 20, 30)] == pytest.approx([0.2, 0.2, 0.4, 0.6, 0.0])


def test_no_recorded_run_is_stopped():
    """All of them, the learning rates that were too high among them; docs/training.md has these numbers."""
    found = defaultdict(list)
    for line in RECORDED.read_text().splitlines():
        row = json.loads(line)
        found[row["run"]].append({**row, "rollout": row["step"]})
    assert {name: stops(run) for name, run in found.items()} == dict.fromkeys(found, GOES_ON) and len(found) == 18

    def least(run):
        """The last window's accuracy as a share of the best before it, where that was least."""
        levels = [Watch(64).extend(run[:end]).level(run[end - 1]["step"]) for end in range(10, len(run) + 1)]
        return min((level / max(levels[: i + 1]) for i, level in enumerate(levels)), default=1.0)

    worst = {name: round(least(run), 2) for name, run in found.items()}
    assert (worst.pop("dense-3e-4-0"), worst.pop("moe-3e-4-0")) == (0.92, 0.83)
    assert min(worst.values()) == 0.97

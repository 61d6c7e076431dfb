"""Our gap metrics (rl/gap.py) in verl's log, as `gap/…` beside its own `rollout_corr/…` and `training/…`.

verl compares the rollout's log-probabilities with the actor's in one function, `calculate_debug_metrics`, where
`rollout.calculate_log_probs` is on. Ours is called there with the same batch: log-probabilities of the actor before its
update, of the rollout as drawn, and the response mask, all at the sampling temperature.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from mxrl.integrations.verl.config import VerlConfig
from mxrl.rl.gap import gap_stats

_TRAINERS = ("verl.trainer.ppo.v1.trainer_base", "verl.trainer.ppo.ray_trainer")


def install() -> None:
    """verl's trainers take the function by name, so in those that are imported already it is replaced too."""
    import verl.utils.debug.metrics as module

    theirs: Any = module.calculate_debug_metrics
    if hasattr(theirs, "mxrl"):
        return

    @functools.wraps(theirs)
    def calculate_debug_metrics(data: Any) -> dict[str, Any]:
        return {**theirs(data), **gap_metrics(data.batch)}

    calculate_debug_metrics.mxrl = True  # type: ignore[attr-defined]
    for owner in (module, *(sys.modules[name] for name in _TRAINERS if name in sys.modules)):
        owner.calculate_debug_metrics = calculate_debug_metrics  # type: ignore[attr-defined]


def gap_metrics(batch: Any) -> dict[str, float]:
    """`gap/…` of a batch with old_log_probs, rollout_log_probs and response_mask, [B, T] each."""
    cap = VerlConfig.from_environment().tis_cap
    return gap_stats(batch["old_log_probs"], batch["rollout_log_probs"], batch["response_mask"], cap=cap).metrics()

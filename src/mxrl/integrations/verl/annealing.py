"""What every engine of ours has: its keys, whether it converts, and for rollouts AQN's noise by the count of updates.

An engine says what `rollout` is: the actor's updates so far. It sets `exported` at each synchronization.
"""

from __future__ import annotations

from typing import Any

from mxrl.integrations.verl.config import SECTION, VerlConfig, VerlConfigError
from mxrl.integrations.verl.export import Export, ExportError, ExportPlan
from mxrl.nn import aqn_noise
from mxrl.nn.weights import Noise


class Annealing:
    """Comes before verl's engine among the bases."""

    engine_config: Any
    optimizer_config: Any
    plan: ExportPlan | None = None  # None: this engine's model is not converted
    exported: Export | None = None  # the last synchronization's

    def __init__(self, *args: Any, **kwargs: Any):
        self.ours = VerlConfig.from_environment()
        super().__init__(*args, **kwargs)

    @property
    def converts(self) -> bool:
        """Whether this engine's model is quantized: the actor's, and the reference's where that is asked for."""
        return not self.engine_config.forward_only or self.ours.reference

    @property
    def rollout(self) -> int:
        """t of AQN's schedule: the actor's updates so far."""
        raise NotImplementedError

    @property
    def total_rollouts(self) -> int:
        """T of AQN's schedule. VerlConfigError where it isn't known (verl's asynchronous trainers learn it later)."""
        total = self.ours.total_rollouts or self.optimizer_config.total_training_steps
        if total < 1:
            raise VerlConfigError(
                f"{SECTION}.total_rollouts: verl doesn't say how many updates there will be, over which +aqn's noise "
                f"is annealed; give +{SECTION}.total_rollouts=N"
            )
        return total

    def noise(self) -> Noise | None:
        recipe = self.ours.parsed
        return aqn_noise(recipe, self.ours.seed, self.rollout, self.total_rollouts) if recipe.aqn else None

    def get_per_tensor_param_shard(self, **kwargs: Any) -> Any:
        raise ExportError("checkpoint_engine.backend=delta_sharded sends master weights; use naive or nccl")

    def with_noise_metrics(self, output: Any) -> Any:
        """verl's output of a batch, with AQN's figures of the rollout that the batch came from."""
        if self.exported is not None and self.exported.report.layers:
            output["metrics"]["aqn/sigma"] = [float(self.exported.report.sigma or 0.0)]
            output["metrics"]["aqn/effective_sigma"] = [self.exported.report.effective_sigma]
        return output

"""verl's FSDP engine with a quantized actor.

    _build_module           the model is converted where verl has built it, before LoRA and before FSDP wrap it
    get_per_tensor_param    what verl sends to the rollout passes through `Export`, once a synchronization

Everything else is verl's: FSDP or FSDP2, gradient checkpointing, offloading, the losses. The reference policy, built
by the same class, is left alone unless `mxrl.reference` is set; with LoRA it is the actor without its adapter, so
quantized. The critic is another class, verl's own.

AQN's t is the number of the actor's updates so far, which the learning rate's schedule counts and a checkpoint
restores, and T is the number that it expects: verl tells the engine no step. The same noise is drawn again where no
update came between two synchronizations (a critic's warm-up).
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch.distributed as dist
import verl.models.transformers.monkey_patch as monkey_patch
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

import mxrl
from mxrl.integrations.verl.annealing import Annealing
from mxrl.integrations.verl.config import VENDOR
from mxrl.integrations.verl.export import Export, ExportError, ExportPlan


@EngineRegistry.register("language_model", ["fsdp", "fsdp2"], device=["cuda", "npu", "cpu"], vendor=VENDOR)
class QuantizedFSDPEngine(Annealing, FSDPEngineWithLMHead):
    """FSDPEngineWithLMHead whose model computes as the run's recipe says."""

    # verl's attributes, whose types are lost in its registry's decorator
    rank: int
    lr_scheduler: Any
    _autocast_dtype: Any

    def _build_module(self) -> Any:
        theirs: Any = super()
        module = theirs._build_module()
        if not self.converts:
            print(f"mxrl verl [rank {self.rank}]: reference left as it is", flush=True)
            return module
        report = mxrl.convert(module, self.ours.parsed, skip=self.ours.skip)
        self.plan = ExportPlan(module)
        print(self._banner(module, report), flush=True)
        return module

    def _banner(self, module: Any, report: Any) -> str:
        """What was converted, on this rank; raises where another rank converted something else."""
        role = "reference" if self.engine_config.forward_only else "actor"
        names = self.plan.matrices if self.plan else frozenset()
        digest = self.ours.digest(names)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, digest)
        if len(set(everyone)) != 1:
            raise ExportError(f"ranks converted different weights or have different configurations: {everyone}")
        return (
            f"mxrl verl [rank {self.rank} of {len(everyone)}]: {role} {type(module).__name__}, recipe {report.recipe}, "
            f"{len(report.converted)} parameters ({len(names)} matrices) quantized, "
            f"{report.quantized_parameters / max(report.parameters, 1):.1%} of {report.parameters:,} weights, "
            f"{len(report.left)} modules left, names {digest}"
        )

    @property
    def rollout(self) -> int:
        """t of AQN's schedule: the actor's updates so far."""
        return self.lr_scheduler.last_epoch

    def get_per_tensor_param(
        self, layered_summon: bool = False, base_sync_done: bool = False, **kwargs: Any
    ) -> tuple[Any, Any]:
        theirs: Any = super()
        weights, adapter = theirs.get_per_tensor_param(
            layered_summon=layered_summon, base_sync_done=base_sync_done, **kwargs
        )
        only_adapter = adapter is not None and base_sync_done
        if self.plan is None or only_adapter:
            return weights, adapter
        self.exported = Export(weights, self.plan, self.noise(), self._autocast_dtype)
        return self.exported, adapter

    def train_batch(self, data: Any, loss_function: Any) -> Any:
        return self.with_noise_metrics(super().train_batch(data, loss_function))


# verl registers its own for cuda and npu only: the critic, on a CPU
EngineRegistry.register("value_model", ["fsdp", "fsdp2"], device="cpu", vendor=VENDOR)(FSDPEngineWithValueHead)

if importlib.util.find_spec("trl") and not importlib.util.find_spec("trl.experimental.ppo"):
    # Where TRL is installed, verl 0.9.1 patches its model with a value head, which TRL has no more
    monkey_patch.is_trl_available = lambda: False  # type: ignore

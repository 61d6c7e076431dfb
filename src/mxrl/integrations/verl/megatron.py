"""verl's Megatron engine with a quantized actor. Built against verl 0.9.1 and megatron-core 0.16.1; not run (no GPU).

    _build_tf_config          Megatron-Bridge is told to build megatron-core's own linear layers (norms and attention
                              stay TransformerEngine's), the layers that verl's own QAT asks for
    _build_megatron_module    converted after verl has built it and loaded its weights, before the optimizer
    get_per_tensor_param      the bridge's stream (Hugging Face names, whole matrices) passes through `Export`

What is exported is planned from the Hugging Face model of the same configuration, on the meta device: built, converted
by the same recipe and patterns. All ranks' Megatron layers together must quantize exactly the matrices of that plan,
or the run ends before its first step.

Megatron trains bf16 parameters whose float32 masters are the optimizer's. So AQN's noise is added to the bf16 weight.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from verl.workers.engine import EngineRegistry
from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

from mxrl.integrations.megatron import MegatronReport, convert_megatron
from mxrl.integrations.verl.annealing import Annealing
from mxrl.integrations.verl.config import VENDOR, VerlConfig
from mxrl.integrations.verl.export import Export, ExportError, ExportPlan, check_same, plan_of


@EngineRegistry.register("language_model", "megatron", vendor=VENDOR)
class QuantizedMegatronEngine(Annealing, MegatronEngineWithLMHead):
    """MegatronEngineWithLMHead whose model computes as the run's recipe says."""

    # verl's attributes, whose types are lost in its registry's decorator
    model_config: Any
    lr_scheduler: Any
    provider: Any
    param_dtype: Any

    def _build_tf_config(self) -> None:
        theirs: Any = super()
        theirs._build_tf_config()
        if not self.converts:
            return
        if self.provider is None:
            raise ExportError("actor.megatron.vanilla_mbridge=True builds TransformerEngine's layers; set it to False")
        from megatron.bridge.models.gpt_provider import modelopt_transformer_layer_spec  # pyright: ignore[reportMissingImports]

        self.provider.transformer_layer_spec = modelopt_transformer_layer_spec

    def _build_megatron_module(self) -> Any:
        theirs: Any = super()
        chunks = theirs._build_megatron_module()
        if not self.converts:
            print(f"mxrl verl [rank {dist.get_rank()}]: reference left as it is", flush=True)
            return chunks
        self.plan = export_plan(self.model_config.hf_config, self.ours)
        report = convert_megatron(chunks, self.ours.parsed, skip=self.ours.skip)
        print(banner(report, self.plan, self.ours, self.engine_config.forward_only), flush=True)
        return chunks

    @property
    def rollout(self) -> int:
        """t of AQN's schedule: the actor's updates so far."""
        return self.lr_scheduler.num_steps

    def get_per_tensor_param(self, base_sync_done: bool = False, **kwargs: Any) -> tuple[Any, Any]:
        theirs: Any = super()
        weights, adapter = theirs.get_per_tensor_param(base_sync_done=base_sync_done, **kwargs)
        if self.plan is None:
            return weights, adapter
        self.exported = Export(weights, self.plan, self.noise(), self.param_dtype)
        return self.exported, adapter

    def train_batch(self, data: Any, loss_function: Any) -> Any:
        output = super().train_batch(data, loss_function)
        return self.with_noise_metrics(output) if self.is_mp_src_rank_with_outputs() else output


def export_plan(hf_config: Any, ours: VerlConfig) -> ExportPlan:
    """What of a Hugging Face model of this configuration is quantized; no memory is taken for it."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config)
    return plan_of(model, ours.parsed, ours.skip)


def banner(report: MegatronReport, plan: ExportPlan, ours: VerlConfig, forward_only: bool) -> str:
    """What was converted, on this rank; raises where the ranks together don't quantize what the rollout expects."""
    here: Any = (ours.to_json(), sorted(report.matrices))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, here)
    if len({configuration for configuration, _ in everyone}) != 1:
        raise ExportError("ranks have different configurations")
    check_same(plan.matrices, {name for _, names in everyone for name in names}, "Megatron's layers")
    role = "reference" if forward_only else "actor"
    return (
        f"mxrl verl [rank {dist.get_rank()} of {len(everyone)}]: {role} Megatron, recipe {report.recipe}, "
        f"{len(report.converted)} parameters (of {len(report.matrices)} matrices) quantized here, "
        f"{report.quantized_parameters / max(report.parameters, 1):.1%} of {report.parameters:,} weights, "
        f"{len(report.left)} modules left; {len(plan.matrices)} matrices in all, names {ours.digest(plan.matrices)}"
    )

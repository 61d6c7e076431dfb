"""vLLM as verl's rollout with quantized activations (integrations/vllm): the check that the recipe arrived there.

    driver             config.py  writes the recipe and the worker class among `rollout.engine_kwargs.vllm`
    vLLM's workers     Extension  verl's own, with `mxrl_check`
    trainer's process  Adapter    after the first synchronization every worker compares its names with training's

Where the weights come through a checkpoint engine (`nccl`) the sender's names don't; then they are what `convert` makes
of the same model without weights. Imported by name only, where vLLM is the rollout.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

import torch
from verl.utils.model import get_hf_auto_model_class
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter

from mxrl.integrations.verl.config import VerlConfig
from mxrl.integrations.verl.export import plan_of
from mxrl.integrations.vllm.worker import WorkerExtension


class Extension(WorkerExtension, vLLMColocateWorkerExtension):
    """For vLLM's worker_extension_cls."""


class Adapter(ServerAdapter):
    """verl's, which checks once that vLLM quantizes what training does; the run ends where it doesn't."""

    checked = False

    async def update_weights(self, weights: Any, *args: Any, **kwargs: Any) -> None:
        await super().update_weights(weights, *args, **kwargs)
        if self._has_server and not self.checked:
            self.checked = True
            await self._execute_method("mxrl_check", args=(sorted(self.matrices(weights)),))

    def matrices(self, weights: Any) -> frozenset[str]:
        """Names of the matrices that training quantizes."""
        if hasattr(weights, "matrices"):
            return weights.matrices
        ours, hf = VerlConfig.from_environment(), self.model_config.hf_config
        with torch.device("meta"):
            kind: Any = get_hf_auto_model_class(hf)
            model = kind.from_config(hf, trust_remote_code=self.model_config.trust_remote_code)
        return plan_of(model, ours.parsed, ours.skip).matrices

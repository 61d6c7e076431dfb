"""What a vLLM worker quantizes, by Hugging Face names, and the check against what training quantizes.

Each of our quantization methods carries the names of its layer's matrices. A rank of a pipeline has some layers only;
a tensor- or expert-parallel rank names every matrix that it holds a part of, and every expert of its layers.

`WorkerExtension` is for vLLM's `worker_extension_cls`: its methods can be called by `collective_rpc`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from torch import nn

from mxrl.integrations.vllm.settings import VllmPluginError
from mxrl.kinds import layer_of


def quantized_matrices(model: nn.Module) -> frozenset[str]:
    """Canonical names of the matrices whose inputs `model`, a vLLM model, quantizes on this rank."""
    methods = (getattr(module, "quant_method", None) for module in model.modules())
    return frozenset(name for method in methods for name in getattr(method, "matrices", ()))


def check_matrices(model: nn.Module, training: Iterable[str]) -> frozenset[str]:
    """This rank's matrices, if they are those of `training` in the layers that this rank has.

    training: canonical names of all matrices that training quantizes. Raises VllmPluginError where they differ.
    """
    own, theirs = quantized_matrices(model), frozenset(training)
    present = {layer_of(name) for name, _ in model.named_parameters()}
    expected = frozenset(name for name in theirs if layer_of(name) in present)
    for only, who in ((expected - own, "training"), (own - theirs, "vLLM")):
        if only:
            raise VllmPluginError(
                f"{len(only)} matrices are quantized in {who} only, {min(only)} for one; training has {len(theirs)}, "
                f"this rank of vLLM {len(own)} (of {len(expected)} in its layers): one recipe and one list of skip "
                'patterns must reach both, in vLLM by hf_overrides={"quantization_config": …}'
            )
    return own


def digest(names: Iterable[str]) -> str:
    """A short hash of a set of names: equal sets, equal digests."""
    return hashlib.blake2b("\n".join(sorted(names)).encode(), digest_size=4).hexdigest()


class WorkerExtension:
    """Mixed into vLLM's worker class: `worker_extension_cls="mxrl.integrations.vllm.worker.WorkerExtension"`."""

    model_runner: Any
    rank: int

    def mxrl_matrices(self) -> list[str]:
        """Canonical names of the matrices whose inputs this worker quantizes, sorted."""
        return sorted(quantized_matrices(self.model_runner.get_model()))

    def mxrl_check(self, training: list[str]) -> int:
        """How many matrices this worker quantizes; raises VllmPluginError where training's differ."""
        own = check_matrices(self.model_runner.get_model(), training)
        print(f"mxrl vllm [rank {self.rank}]: inputs of {len(own)} matrices quantized, names {digest(own)}", flush=True)
        return len(own)

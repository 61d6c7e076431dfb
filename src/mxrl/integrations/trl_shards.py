"""Several processes: TRL's trainer over FSDP2, and checkpoints that don't know how many processes wrote them.

    torchrun --nproc-per-node 2 -m mxrl train …        each process a GPU; `args.fsdp` is set by `mxrl train`

Sharding is ours (nn/shard.py) and not accelerate's, which would gather in bf16 under autocast, knows FSDP on GPUs only,
and puts the head into a group of its own, whose gradient TRL's fused loss then takes from one rank alone.

A checkpoint holds what one process writes: model.safetensors, optimizer.pt (states by index, as torch numbers them),
scheduler.pt, trainer_state.json. The first rank gathers and writes them; on loading it reads them and sends each rank
its slice. So one process goes on from a checkpoint of several, and several from that of one. It takes 12 bytes a
parameter of the first rank's host memory (float32 weights, Adam's two states).
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from peft import PeftModel
from safetensors import SafetensorError
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl.trainer.grpo_trainer import GRPOTrainer as TrlTrainer
from trl.trainer.utils import add_fused_lm_head

from mxrl.integrations.trl_config import UnsupportedError
from mxrl.integrations.trl_rollout import without_autocast
from mxrl.nn.replica import Replica
from mxrl.nn.shard import shard
from mxrl.rl.engine_slots import base_model

STATE_FILE = "mxrl_state"  # in every checkpoint; written last, so a checkpoint that has it is complete
_GATHER = StateDictOptions(full_state_dict=True, cpu_offload=True)
_SCATTER = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
# what fsdp_config may hold: ours, and what transformers puts there by itself
_OPTIONS: dict[str, tuple[Any, ...]] = {
    "version": (2,), "reshard_after_forward": (True, False, None),
    "min_num_params": (0,), "xla": (False,), "xla_fsdp_v2": (False,), "xla_fsdp_grad_ckpt": (False,),
}  # fmt: skip


def check_sharding(args: Any) -> None:
    """Refuse what would shard in another way than ours; one process uses one GPU, whatever else is visible."""
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true" or args.deepspeed:
        raise UnsupportedError(
            "DeepSpeed shards the weights in its own way; leave it out, and several processes use FSDP2"
        )
    if args.n_gpu > 1:
        args._n_gpu = 1  # transformers would take DataParallel, which copies the model for every pass
    if args.fsdp and getattr(args, "use_adaptive_entropy", False):
        raise UnsupportedError(
            "GRPOConfig use_adaptive_entropy=True: its state is not kept under FSDP; leave one of them out"
        )
    if not args.fsdp:
        several = int(os.environ.get("WORLD_SIZE", "1")) > 1
        if several and os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true":
            raise UnsupportedError(
                "accelerate's FSDP configuration is not read: set GRPOConfig fsdp=True (FSDP2) instead"
            )
        return
    for name, value in (args.fsdp_config or {}).items():
        if value not in _OPTIONS.get(name, ()):
            raise UnsupportedError(f"fsdp_config {name}={value}: possible are version=2 and reshard_after_forward")
    args.fsdp_plugin_args["auto_wrap_policy"] = "NO_WRAP"  # the blocks are sharded when accelerate sees them


class ShardedTrainer(TrlTrainer):
    """trl.GRPOTrainer that shards the model with FSDP2 where `args.fsdp` says so; else TRL's, unchanged."""

    model: Any
    args: Any
    accelerator: Any
    optimizer: Any
    lr_scheduler: Any
    recipe: Any
    record: Any
    vllm_generation: Any
    _buffered_inputs: Any
    reshard = True
    replica: Replica | None = None  # what a sharded model's rollouts run on

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        state = self.accelerator.state
        if self.args.fsdp_plugin_args is not None and state.distributed_type == DistributedType.MULTI_CPU:
            # accelerate offers FSDP on accelerators only; over gloo its code works as well
            state.fsdp_plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
            state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
            self.is_fsdp_enabled = True

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        model: Any = self.model
        if self.is_fsdp_enabled and not isinstance(model, FSDPModule):
            self.replica = Replica(model)
            self._patch_again(self.replica.model)
            self.reshard = self._reshards((self.args.fsdp_config or {}).get("reshard_after_forward"))
            shard(model, reshard_after_forward=self.reshard)
            if self.reshard:  # there is no room for whole gradients either, which FSDP2 keeps where it doesn't reduce
                self.accelerator.gradient_state.plugin_kwargs["sync_each_batch"] = True
        return super()._prepare_for_training(*args, **kwargs)

    def _reshards(self, asked: bool | None) -> bool:
        """Whether weights are gathered for every pass (True) or once for all micro-batches of a step.

        The default is once, where the whole float32 weights take at most a quarter of the GPU.
        """
        if asked is not None:
            return asked
        if self.accelerator.device.type != "cuda":
            return False
        room = torch.cuda.get_device_properties(self.accelerator.device).total_memory
        return 4 * sum(p.nbytes for p in self.model.parameters()) > room

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.replica is not None and not self.reshard:  # gathered till the update, after which they are others
            self.model.set_reshard_after_backward(self.accelerator.sync_gradients)
        return super().training_step(*args, **kwargs)

    def _patch_again(self, copy: Any) -> None:
        """A copied model's patched forward passes still run the model they were made for: patch those of the copy."""
        base = base_model(copy)
        head = base.get_output_embeddings()
        for module in (base, head):
            vars(module).pop("forward", None)
        fp32 = self.args.cast_lm_head_to_fp32
        add_fused_lm_head(base, self.args.temperature, cast_lm_head_to_fp32=fp32, outputs=("log_probs", "entropy"))
        if fp32:
            without_autocast(head)

    # --- checkpoints ---

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.is_fsdp_enabled:
            return super()._save_optimizer_and_scheduler(output_dir)
        named = get_optimizer_state_dict(self.model, self.optimizer.optimizer, options=_GATHER)
        if self.args.should_save:
            torch.save(_by_index(named), os.path.join(output_dir, OPTIMIZER_NAME))
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Weights as `from_pretrained` reads them: the trainer's own loading skips a MoE's experts without a word,
        since `save_pretrained` writes them one by one and the model has them fused."""
        model = self.model if model is None else model
        assert model is not None
        if isinstance(model, PeftModel):
            if self.is_fsdp_enabled:
                raise UnsupportedError(f"{resume_from_checkpoint}: adapters are resumed by one process, not by several")
            return super()._load_from_checkpoint(resume_from_checkpoint, model)
        weights: dict[str, Any] = {}
        if self.accelerator.is_main_process or not self.is_fsdp_enabled:
            kind: Any = type(model if self.replica is None else self.replica.model)  # not FSDP2's class
            wide = torch.promote_types(next(model.parameters()).dtype, torch.float32)
            weights = kind.from_pretrained(resume_from_checkpoint, dtype=wide, local_files_only=True).state_dict()
        if self.is_fsdp_enabled:
            set_model_state_dict(model, weights, options=_SCATTER)
        else:
            model.load_state_dict(weights)

    def _load_sharded_optimizer(self, checkpoint: str) -> None:
        read = {"map_location": "cpu", "weights_only": True}
        named: dict[str, Any] = {}
        if self.accelerator.is_main_process:
            named = _by_name(torch.load(os.path.join(checkpoint, OPTIMIZER_NAME), **read), self.model, self.optimizer)
        set_optimizer_state_dict(self.model, self.optimizer.optimizer, named, options=_SCATTER)
        self.lr_scheduler.load_state_dict(torch.load(os.path.join(checkpoint, SCHEDULER_NAME), **read))

    # --- what is ours of a run's state ---

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Raises OSError with one line where the disk doesn't take it; what was written of it is gone then."""
        above = Path(self._get_output_dir(trial=trial))
        folder = above / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        try:
            super()._save_checkpoint(model, trial)
            self._save_own_state(folder)
        except (OSError, RuntimeError, SafetensorError) as error:  # torch's writer raises RuntimeError
            if self.args.should_save:
                shutil.rmtree(folder, ignore_errors=True)
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            free = f"{shutil.disk_usage(above).free / 1e9:.3g} GB are free there"
            former = complete_checkpoints(above)
            kept = f"the last complete checkpoint is {former[-1].name}" if former else "there is no earlier checkpoint"
            raise OSError(f"{folder} could not be written: {reason} ({free}; {kept})") from error

    def _save_own_state(self, folder: Path) -> None:
        generate_every = self.args.steps_per_generation * self.num_iterations
        state = {
            "recipe": str(self.recipe),
            "processes": self.accelerator.num_processes,
            "rollout": self.vllm_generation.rollout,
            "synced_step": self.vllm_generation.synced_step,
            "step": self._step,
            # Samples that are still to be trained on; between two rollouts there are none.
            "buffered": self._buffered_inputs if self._step % generate_every else None,
            "own": self.record.rollout,
            "carried": self.record.carried,
        }
        path = _state_path(folder, self.accelerator.process_index)
        if self.accelerator.is_main_process:
            self.accelerator.wait_for_everyone()  # the first process's file says that the others' are there
        torch.save(state, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").replace(path)
        if not self.accelerator.is_main_process:
            self.accelerator.wait_for_everyone()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return super()._load_optimizer_and_scheduler(checkpoint)
        if self.is_fsdp_enabled:
            self._load_sharded_optimizer(checkpoint)
        else:
            super()._load_optimizer_and_scheduler(checkpoint)
        first = _state_path(checkpoint, 0)
        if not first.is_file():
            raise RuntimeError(f"{checkpoint} is no complete checkpoint of mxrl's trainer ({first.name} is missing)")
        state = torch.load(first, map_location=self.accelerator.device, weights_only=True)
        if state["recipe"] != str(self.recipe):
            raise RuntimeError(f"{checkpoint} is of recipe {state['recipe']}, this run's is {self.recipe}")
        here, there = self.accelerator.num_processes, state.get("processes", 1)
        if state["buffered"] is not None:
            if here != there:
                raise RuntimeError(
                    f"{checkpoint} was saved in the middle of a rollout's updates by {there} process(es), each with "
                    f"samples of its own; go on with as many (there are {here}), or from an earlier checkpoint"
                )
            own = _state_path(checkpoint, self.accelerator.process_index)
            state = torch.load(own, map_location=self.accelerator.device, weights_only=True)
        self.vllm_generation.rollout, self.vllm_generation.synced_step = state["rollout"], state["synced_step"]
        self._last_loaded_step = state["synced_step"]
        # counted in micro-batches, of which several processes need fewer for the same rollout
        self._step = state["step"] if here == there else self.state.global_step * self.args.gradient_accumulation_steps
        self.record.rollout, self.record.carried = state["own"], state["carried"]
        self._buffered_inputs = state["buffered"]


def _state_path(checkpoint: str | Path, process: int) -> Path:
    return Path(checkpoint) / f"{STATE_FILE}-{process}.pt"


def complete_checkpoints(folder: str | Path) -> list[Path]:
    """Checkpoints under `folder` that were written to the end, oldest first."""
    found = [p for p in Path(folder).glob(f"{PREFIX_CHECKPOINT_DIR}-*") if _state_path(p, 0).is_file()]
    return sorted(found, key=step_of)


def remove_incomplete(folder: str | Path) -> None:
    """Remove what a kill has left of checkpoints: gigabytes that nothing goes on from."""
    for left in {*Path(folder).glob(f"{PREFIX_CHECKPOINT_DIR}-*")} - {*complete_checkpoints(folder)}:
        shutil.rmtree(left, ignore_errors=True)


def step_of(checkpoint: Path) -> int:
    """The optimizer step after which it was written."""
    return int(checkpoint.name.rsplit("-", 1)[1])


def _by_index(named: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state dict keyed by parameter name, as torch.optim keys it: by the number of the parameter."""
    index = {name: i for i, name in enumerate(name for group in named["param_groups"] for name in group["params"])}
    groups = [{**group, "params": [index[name] for name in group["params"]]} for group in named["param_groups"]]
    return {"state": {index[name]: state for name, state in named["state"].items()}, "param_groups": groups}


def _by_name(indexed: dict[str, Any], model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """The inverse of `_by_index`, for the parameters of `optimizer`."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    groups = [{**group, "params": [order[i] for i in group["params"]]} for group in indexed["param_groups"]]
    return {"state": {order[i]: state for i, state in indexed["state"].items()}, "param_groups": groups}

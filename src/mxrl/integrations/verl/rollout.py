"""A Hugging Face rollout for a CPU and for checking: `actor_rollout_ref.rollout.name=mxrl`.

    trainer's process   Adapter            sends the exported weights to its replica's server
    a Ray actor         Server             holds the model (policy.py), decodes with mxrl.rl.rollout.sample
    verl's manager      Replica            one server for each replica

The weights arrive quantized (export.py), so the server's layers have no quantizer for them: only activations are
quantized, by the very layers that train. The server converts its own model by the same recipe and compares the names
of what is quantized with those that the engine sent; where they differ it refuses the weights, and the run ends at its
start.

Requests that come while a batch is decoded are the next batch. With `rollout.full_determinism=True` every request is
decoded alone, and its draws are a function of (seed, step, prompt, how often that prompt came since the weights did):
slow, and what a test that repeats a run needs.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch
from torch import Tensor
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, TokenOutput
from verl.workers.rollout.utils import ensure_async_iterator

from mxrl.integrations.verl.config import ROLLOUT, VerlConfig
from mxrl.integrations.verl.export import ExportError
from mxrl.integrations.verl.policy import Policy
from mxrl.rl.rollout import derived_seed, end_ids, pad_id, sample

BUCKET = 256 << 20  # bytes sent at once
DIGESTS = "MXRL_VERL_DIGESTS"  # a folder for the hash of every weight of every synchronization, to check a run by


@dataclass
class _Request:
    prompt: tuple[int, ...]
    sampling: tuple[tuple[str, Any], ...]
    answer: asyncio.Future[TokenOutput]


class Server:
    """An asynchronous Ray actor that holds a Policy and answers verl's requests."""

    def __init__(self, rollout: Any, model: Any, replica_rank: int):
        from transformers import AutoModelForCausalLM

        self.ours = VerlConfig.from_environment()
        self.rollout = omega_conf_to_dataclass(rollout)
        model = omega_conf_to_dataclass(model)
        dtype = PrecisionType.to_dtype(self.rollout.dtype)
        fresh = AutoModelForCausalLM.from_pretrained(
            model.local_path, config=model.hf_config, dtype=dtype, trust_remote_code=model.trust_remote_code
        )
        self.policy = Policy(fresh, self.ours)
        self.eos, self.pad = end_ids(model, model.tokenizer), pad_id(model.tokenizer)
        self.rank, self.step, self.batches = replica_rank, None, 0
        self.seen: Counter[tuple[int, ...]] = Counter()
        self.requests: list[_Request] = []
        self.running: asyncio.Task[None] | None = None

    # --- weights ---

    async def load(self, weights: dict[str, Tensor]) -> None:
        self.policy.load(weights.items())

    async def complete(self, matrices: list[str], step: int | None) -> None:
        """The last weight has come: check that nothing is missing and that training quantizes the same."""
        self.policy.complete(matrices)
        if self.step is None:
            print(
                f"mxrl verl [rollout {self.rank}]: {type(self.policy.model).__name__} in {self.rollout.dtype}, "
                f"{len(self.policy.matrices)} matrices came quantized, the same as in training; activations "
                f"{'16-bit' if self.ours.rollout_activations == 'a16' else 'as the recipe ' + self.ours.recipe}",
                flush=True,
            )
        self.step = step or 0
        self.seen.clear()
        if folder := os.environ.get(DIGESTS):
            text = json.dumps(self.policy.digest())
            Path(folder, f"step-{self.step}-rollout-{self.rank}.json").write_text(text)

    # --- requests ---

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, **ignored: Any
    ) -> TokenOutput:
        """One completion: token ids and their log-probabilities at the sampling temperature."""
        images = [name for name in ("image_data", "video_data", "audio_data") if ignored.get(name)]
        if images:
            raise ValueError(f"rollout.name={ROLLOUT} takes text only, not {images[0]}")
        if self.step is None:
            raise RuntimeError(f"rollout.name={ROLLOUT}: a request came before the weights did")
        key = tuple(sorted((name, sampling_params.get(name)) for name in ("temperature", "max_tokens")))
        request = _Request(tuple(prompt_ids), key, asyncio.get_running_loop().create_future())
        self.requests.append(request)
        if self.running is None or self.running.done():
            self.running = asyncio.create_task(self._serve())
        return await request.answer

    async def _serve(self) -> None:
        while self.requests:
            await asyncio.sleep(0.02)  # others are on their way
            if self.rollout.full_determinism:
                batch = [self.requests.pop(0)]
            else:
                batch = [r for r in self.requests if r.sampling == self.requests[0].sampling]
                self.requests = [r for r in self.requests if r not in batch]
            try:
                outputs = await asyncio.to_thread(self._decode, batch)
            except Exception as error:
                for request in batch:
                    request.answer.set_exception(error)
                continue
            for request, output in zip(batch, outputs, strict=True):
                request.answer.set_result(output)

    def _decode(self, batch: list[_Request]) -> list[TokenOutput]:
        sampling = dict(batch[0].sampling)
        temperature = self.rollout.temperature if sampling["temperature"] is None else sampling["temperature"]
        room = sampling["max_tokens"] or self.rollout.response_length
        if self.rollout.full_determinism:
            place: tuple[Any, ...] = (batch[0].prompt, self.seen[batch[0].prompt])
            self.seen[batch[0].prompt] += 1
        else:
            place = self.rank, self.batches
        self.batches += 1
        rollout = sample(
            self.policy.model,
            [list(request.prompt) for request in batch],
            max_new_tokens=room,
            eos_token_id=self.eos,
            pad_token_id=self.pad,
            temperature=temperature or 1.0,
            greedy=temperature == 0,
            seed=derived_seed(self.ours.seed, self.step, *place),
        )
        rows = zip(rollout.completions(), rollout.logp_lists(), strict=True)
        return [
            TokenOutput(
                token_ids=ids,
                log_probs=logps,
                stop_reason="completed",
                extra_fields={"global_steps": self.step},
            )
            for ids, logps in rows
        ]

    # --- what an engine with a cache of its own would do ---

    async def sleep(self, *args: Any, **kwargs: Any) -> None: ...

    wake_up = clear_kv_cache = release_kv_cache = resume_kv_cache = sleep
    abort_all_requests = resume_generation = start_profile = stop_profile = sleep


def _name(replica_rank: int) -> str:
    return f"{ROLLOUT}_server_{replica_rank}"


class Adapter(BaseRollout):
    """The rollout's end in a trainer's process: forwards the weights to the server of this rank's replica."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1):
        super().__init__(config, model_config, device_mesh)
        size = self.config.tensor_model_parallel_size * self.config.data_parallel_size
        rank = int(os.environ["RANK"])
        self.replica_rank = rank // size if replica_rank == -1 else replica_rank
        self.is_leader_rank = rank % size == 0

    async def resume(self, tags: list[str]) -> None: ...

    async def release(self) -> None: ...

    @torch.no_grad()
    async def update_weights(
        self,
        weights: Any,
        wire_format: str = "named_tensors",
        global_steps: int | None = None,
        peft_config: Any = None,
        **ignored: Any,
    ) -> None:
        """Every rank goes through the stream, which gathers shards on the way; a replica's first rank sends it."""
        if wire_format != "named_tensors":
            raise ExportError(f"rollout.name={ROLLOUT} takes named tensors, not {wire_format}")
        if peft_config is not None:
            raise ExportError(f"rollout.name={ROLLOUT} takes no LoRA adapters; use vllm")
        server: Any = ray.get_actor(_name(self.replica_rank)) if self.is_leader_rank else None
        bucket: dict[str, Tensor] = {}
        async for name, tensor in ensure_async_iterator(weights):
            if server is not None:
                bucket[name] = tensor.detach().cpu().contiguous()
                if sum(t.nbytes for t in bucket.values()) >= BUCKET:
                    await server.load.remote(bucket)
                    bucket = {}
        if server is not None:
            await server.load.remote(bucket)
            await server.complete.remote(sorted(getattr(weights, "matrices", ())), global_steps)


class Replica(RolloutReplica):
    """One server, on the node where the driver of the replicas runs."""

    _server_handle: Any  # a handle of Server; ray's types know none with methods

    async def launch_servers(self) -> None:
        server: Any = ray.remote(Server).options(name=_name(self.replica_rank), num_cpus=0)
        self._server_handle = server.remote(self.config, self.model_config, self.replica_rank)
        self.servers = [self._server_handle]
        self._server_address = _name(self.replica_rank)
        await self._server_handle.wake_up.remote()  # it is up, or says why not

    async def sleep(self) -> None:
        await self._server_handle.sleep.remote()

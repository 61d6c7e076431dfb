"""Two processes that talk by gloo, for tests of sharded models: `spawn(work, folder)` runs work(rank, mesh, folder)."""

from __future__ import annotations

import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import fully_shard

RANKS = 2


def spawn(work: Callable[[int, Any, Path], None], folder: Path) -> None:
    """Run a function of a test module on every rank; what it finds out, it saves in `folder`."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(_rank, (work, port, str(folder)), nprocs=RANKS)


def _rank(rank: int, work: Callable[[int, Any, Path], None], port: int, folder: str) -> None:
    torch.set_num_threads(1)
    address, wait = f"tcp://127.0.0.1:{port}", timedelta(minutes=2)  # for the other rank, then it is an error
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=RANKS, timeout=wait)
    work(rank, dist.device_mesh.init_device_mesh("cpu", (RANKS,)), Path(folder))
    dist.destroy_process_group()


def sharded(model: Any, mesh: Any, **options: Any) -> Any:
    """The Hugging Face model (or the one inside PEFT's) with FSDP2 on every block and on the rest."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    for block in base.model.layers:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model

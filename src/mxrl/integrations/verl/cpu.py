"""verl without an accelerator, for tests: VERL_PLATFORM=cpu.

verl asks its platform for a device, and that device's module for memory figures; torch.cpu has none of these. It starts
its process group for the CPU and the device apart, which are one here, and keeps a reference policy's weights in pinned
memory. Ray hands out whole accelerators, so the run is told that it has some (`+ray_kwargs.ray_init.num_gpus=2`,
`trainer.device=cpu`).
"""

from __future__ import annotations

import functools
from contextlib import contextmanager
from typing import Any

import torch
import verl.utils.distributed as distributed
import verl.utils.fsdp_utils as fsdp_utils
from torch.distributed.fsdp import OffloadPolicy
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


class _CpuModule:
    """torch.cpu, and what torch.cuda has besides: memory figures that are 0, and calls that do nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("max_memory", "memory_")):
            return lambda *args, **kwargs: 0
        if name in ("empty_cache", "reset_peak_memory_stats", "manual_seed", "manual_seed_all", "ipc_collect"):
            return lambda *args, **kwargs: None
        return getattr(torch.cpu, name)

    get_rng_state = staticmethod(torch.get_rng_state)
    set_rng_state = staticmethod(torch.set_rng_state)

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return 0, 0

    def is_available(self) -> bool:
        return False  # verl means an accelerator

    def get_device_name(self, device: Any = None) -> str:
        return "CPU"


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    device_name: Any = "cpu"
    vendor_name: Any = "cpu"
    device_module: Any = _CpuModule()

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return False  # by VERL_PLATFORM only, never detected

    def current_device(self) -> Any:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"  # what Ray sets for the resource below

    @contextmanager
    def nvtx_range(self, msg: str) -> Any:
        yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "GPU"  # verl counts nothing else

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> Any:
        return None


# verl's engines take both by name, so this comes before them
fsdp_utils.CPUOffloadPolicy = lambda pin_memory: OffloadPolicy()  # type: ignore  (nothing to move, no pinned memory)
distributed.initialize_global_process_group_ray = functools.partial(
    distributed.initialize_global_process_group_ray, backend="gloo"
)

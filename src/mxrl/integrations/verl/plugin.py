"""Where verl finds us: the entry point `verl.plugins` loads this module at the end of `import verl`.

In the driver there is no configuration yet, so all that happens is that verl's `validate_config` first calls ours
(config.py). In the processes of a run that `prepare` has reached, the engines, the rollout, the CPU platform and the
gap metrics are registered. Without the section `mxrl` verl is left as it is.
"""

from __future__ import annotations

import functools
import importlib
import os
from typing import Any

from mxrl.integrations.verl import config

_ROLLOUT_MODULE = "mxrl.integrations.verl.rollout"
_VLLM_MODULE = "mxrl.integrations.verl.vllm"


def install() -> None:
    """Register what this process needs; calling again changes nothing."""
    if os.environ.get("VERL_PLATFORM") == "cpu":
        import mxrl.integrations.verl.cpu  # noqa: F401  (registers the platform)
    if config.ENVIRONMENT in os.environ:
        register()
    _check_first()


def register() -> None:
    """Engines, rollout and metrics, in a process of a run.

    Rollouts are named only: a process whose first import one is comes here in the middle of that.
    """
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    import mxrl.integrations.verl.engine  # (registers the engines)
    from mxrl.integrations.verl import metrics

    engines: Any = importlib.import_module("verl.workers.engine")
    if engines.MegatronEngineWithLMHead is not None:  # where verl has registered its own
        import mxrl.integrations.verl.megatron  # noqa: F401  (likewise)
    metrics.install()
    if config.VerlConfig.from_environment().rollout_quantizes:
        _ROLLOUT_REGISTRY["vllm", "async"] = f"{_VLLM_MODULE}.Adapter"
    _ROLLOUT_REGISTRY[config.ROLLOUT, "async"] = f"{_ROLLOUT_MODULE}.Adapter"
    RolloutReplicaRegistry.register(config.ROLLOUT, lambda: importlib.import_module(_ROLLOUT_MODULE).Replica)


def _check_first() -> None:
    """Let `validate_config`, which every main_ppo calls before it starts Ray, check and send our section."""
    import verl.utils as package
    import verl.utils.config as module

    theirs: Any = module.validate_config
    if hasattr(theirs, "mxrl"):
        return

    @functools.wraps(theirs)
    def validate_config(*args: Any, **kwargs: Any) -> Any:
        config.prepare(kwargs["config"] if "config" in kwargs else args[0])
        return theirs(*args, **kwargs)

    validate_config.mxrl = True  # type: ignore[attr-defined]
    module.validate_config = package.validate_config = validate_config


install()

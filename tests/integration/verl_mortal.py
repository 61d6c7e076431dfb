"""Imported by every process of a run of test_verl_run.py in which a rank is to be killed, beside the plugin."""

import os
import signal
from typing import Any

from mxrl.integrations.verl.engine import VENDOR, EngineRegistry, QuantizedFSDPEngine

DIE = "MXRL_TEST_DIE"  # "rank:updates before it dies"


class Mortal(QuantizedFSDPEngine):
    def train_batch(self, data: Any, loss_function: Any) -> Any:
        rank, updates = map(int, os.environ[DIE].split(":"))
        if self.rank == rank and self.rollout == updates:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().train_batch(data, loss_function)


if os.environ.get("MXRL_VERL"):  # not in the driver
    EngineRegistry._engines["language_model"]["fsdp2"]["cpu", VENDOR] = Mortal

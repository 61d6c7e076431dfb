"""One process of a run for test_ranks.py: `mxrl train`, with what it computed written beside it.

    torchrun --nproc-per-node 2 tests/integration/ranks_worker.py OPTIONS.json      (or python, for one process)

<out>/seen-RANK.pt: the tokens drawn, the digests of the quantized weights that each rollout decoded with (noise
included), the first update's gradients, whole, and whether each micro-batch's gradients were reduced at once.
"""

import functools
import hashlib
import json
import os
import signal
import sys
from pathlib import Path

import torch
from tiny_grpo import digits
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

import mxrl.rl.train as module
from mxrl import cli
from mxrl.integrations import trl_rollout
from mxrl.nn import quantized_layers
from mxrl.nn.layers import canonical_name, full_tensor
from mxrl.rl import ranks
from mxrl.rl.tasks import Task, get_task


def held(model) -> dict[str, str]:
    """sha256 of every quantized weight that `model` holds for its rollout."""
    found = {}
    for layer in quantized_layers(model):
        weights = {"weight": layer.module.held} if layer.is_linear else layer.module.mxrl_state.held
        for name, weight in weights.items():
            bits = weight.value.contiguous().view(torch.uint8).cpu().numpy().tobytes()
            found[f"{layer.name}.{name}"] = hashlib.sha256(bits).hexdigest()
    return found


class Watch(TrainerCallback):
    def __init__(self, seen, die):
        self.seen, self.die = seen, die

    def on_substep_end(self, args, state, control, model=None, **kwargs):
        """Between the micro-batches of an update: gradients are shards only if they were reduced after each."""
        self.seen["reduced"] = all(isinstance(p.grad, DTensor) for p in model.parameters())

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if "gradients" not in self.seen:
            pairs = ((canonical_name(n), p.grad) for n, p in model.named_parameters() if p.grad is not None)
            self.seen["gradients"] = {name: full_tensor(gradient).cpu().clone() for name, gradient in pairs}
        if self.die and state.global_step + 1 == self.die["step"] and ranks.rank() == self.die["rank"]:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    options = json.loads(Path(sys.argv[1]).read_text())
    die, nan, extra = options.pop("die", None), options.pop("nan", None), options.pop("trainer", {})
    module.GRPOConfig = functools.partial(module.GRPOConfig, **extra)  # what `mxrl train` has no option for
    torch.set_num_threads(1)
    chain = get_task("chain")
    task = Task("chain", chain.load, lambda completions, answer, **columns: digits(completions), chain.options)
    module.get_task = lambda name: task
    seen = {"tokens": [], "held": []}

    def sample(model, prompts, **settings):
        seen["held"].append(held(model))
        rollout = real_sample(model, prompts, **settings)
        seen["tokens"].append(rollout.completions())
        return rollout

    real_sample, trl_rollout.sample = trl_rollout.sample, sample

    class Trainer(module.GRPOTrainer):
        def _compute_loss(self, model, inputs):
            wrong = nan and self.state.global_step + 1 == nan["step"] and ranks.rank() == nan["rank"]
            return super()._compute_loss(model, inputs) * (float("nan") if wrong else 1.0)

    module.GRPOTrainer = lambda *args, **kwargs: Trainer(*args, callbacks=[Watch(seen, die)], **kwargs)
    code = cli.main(["train", *(f"--{name}={value}" for name, value in options.items())])
    if code == 0:
        torch.save(seen, Path(options["out"]) / f"seen-{os.environ.get('RANK', '0')}.pt")
    sys.exit(code)


if __name__ == "__main__":
    main()

"""What test_verl_run.py's runs load from a file: an order of samples that doesn't vary, and a reward."""

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer


class Sorted(ReplayBuffer):
    """A step's samples in the order of their tokens: verl has them in the order in which they came, which varies."""

    def sample(self, *args: Any, **kwargs: Any) -> Any:
        import transfer_queue as tq

        batch, metrics = super().sample(*args, **kwargs)
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["prompts", "responses"])
        columns = [[row.tolist() for row in data[name].unbind()] for name in ("prompts", "responses")]
        rows = list(zip(*columns, strict=True))
        batch.reorder(sorted(range(len(rows)), key=rows.__getitem__))
        return batch, metrics


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """Share of digits: a random policy's completions differ in it, so that gradients aren't zero."""
    return sum(c.isdigit() for c in solution_str) / max(1, len(solution_str))

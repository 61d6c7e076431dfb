"""A rollout's sequences through the training policy by length, so that little of a pass is padding.

TRL pads all of a rollout to its longest prompt and its longest completion, and computes every pass of `micro_batch`
sequences at that width. Where all of a rollout goes into one update, the gradient is a sum over its sequences in any
order; so they are sorted by length, and each pass is cut to its own longest.

The scoring before the update and the update's own passes cut alike: the order is decided by the two lengths alone, so
the k-th pass has the same shape in both, and a sequence's row comes out with the same bits. That matters here: a
network with 4-bit activations amplifies the rounding of another shape, and the importance weights would show it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# what a micro-batch may hold: anything else (images) is indexed in a way of its own
KNOWN = frozenset({
    "prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages", "num_items_in_batch",
    "old_per_token_logps", "sampling_per_token_logps", "importance_sampling_ratio", "ref_per_token_logps",
})  # fmt: skip


def extents(mask: Tensor, keep: int) -> tuple[Tensor, Tensor]:
    """(columns of the prompt from its first real token on, of the completion up to its last), each int64 [B].

    mask [B, T], of which the last `keep` columns are the completion; prompts are padded on the left.
    """
    prompt, completion = mask[:, :-keep].bool(), mask[:, -keep:].bool()
    places = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    return (
        (prompt.flip(1) * places[: prompt.shape[1]]).amax(1) if prompt.shape[1] else places.new_zeros(len(mask)),
        (completion * places[:keep]).amax(1),
    )


def longest_first(prompts: Tensor, completions: Tensor) -> Tensor:
    """Rows by the completion's length, then the prompt's, the longest first: the largest pass meets fresh memory."""
    return (completions * (prompts.max() + 1) + prompts).argsort(descending=True, stable=True)


def sorted_batches(batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """An update's micro-batches, their rows dealt anew: the longest into the first. Widths stay."""
    size, keep = len(batches[0]["prompt_ids"]), batches[0]["completion_ids"].shape[1]
    whole: dict[str, Any] = {
        name: torch.cat([batch[name] for batch in batches]) if value is not None and value.ndim else value
        for name, value in batches[0].items()
    }
    order = longest_first(*extents(torch.cat([whole["prompt_mask"], whole["completion_mask"]], 1), keep))
    parts = order.split(size)
    return [
        {name: value[rows] if value is not None and value.ndim else value for name, value in whole.items()}
        for rows in parts
    ]


def scored_by_length(
    score: Callable[..., tuple[Tensor, Tensor | None, Tensor | None]],
    ids: Tensor,
    mask: Tensor,
    keep: int,
    size: int,
    multiple: int | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """`score(ids, mask, keep)` in passes of `size` rows, the longest first, each cut to its longest row.

    score: returns log-probabilities and entropies, [rows, keep] each, and an auxiliary loss (None where not asked for).
    multiple: prompts' and completions' widths are multiples of it, as TRL's `pad_to_multiple_of`.
    Returns the same for all rows in their own order; 0 where a pass was cut.
    """
    own_lengths = extents(mask, keep)
    order = longest_first(*own_lengths) if len(ids) > size else torch.arange(len(ids), device=ids.device)
    lengths = torch.stack(own_lengths, 1)[order].tolist()  # the one wait for the device
    step = multiple or 1
    logps, entropies, losses = [], [], []
    for first, rows in zip(range(0, len(ids), size), order.split(size), strict=True):
        # one column at least of each, and of the completion no more than there are
        widest = [max(1, *column) for column in zip(*lengths[first : first + size], strict=True)]
        width, own = (-(-length // step) * step for length in widest)
        own = min(keep, own)
        columns = slice(max(0, mask.shape[1] - keep - width), mask.shape[1] - keep + own)
        *found, loss = score(ids[rows, columns], mask[rows, columns], own)
        for whole, part in zip((logps, entropies), found, strict=True):
            if part is not None:
                whole.append(F.pad(part, (0, keep - own)))
        if loss is not None:
            losses.append(loss)
    back = order.argsort()
    return (
        torch.cat(logps)[back],
        torch.cat(entropies)[back] if entropies else None,
        torch.stack(losses).mean() if losses else None,
    )

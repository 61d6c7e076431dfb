"""Passes by length: which rows meet, where they are cut, and that nothing else changes."""

import pytest
import torch

from mxrl.integrations.trl_passes import extents, longest_first, scored_by_length, sorted_batches

KEEP = 6  # the completion's columns


def rollout(prompts, completions, keep=KEEP):
    """ids, mask [B, T] of rows with so many real tokens, prompts padded on the left; ids are numbered through."""
    widest = max(prompts)
    mask = torch.tensor([
        [0] * (widest - p) + [1] * p + [1] * c + [0] * (keep - c) for p, c in zip(prompts, completions, strict=True)
    ])  # fmt: skip
    return torch.arange(1, mask.numel() + 1).reshape(mask.shape), mask


def seen_by(ids, mask, size, multiple=None, keep=KEEP):
    """(what each pass was given, what came back) of a score that says each completion token's own id, and its half."""
    passes = []

    def score(ids, mask, keep):
        passes.append((ids, mask, keep))
        own = ids[:, -keep:].double()
        return own, own / 2, torch.tensor(float(len(ids)))

    return passes, scored_by_length(score, ids, mask, keep, size, multiple)


def test_extents_are_of_real_tokens():
    _, mask = rollout([3, 1, 2], [0, 6, 4])
    assert [e.tolist() for e in extents(mask, KEEP)] == [[3, 1, 2], [0, 6, 4]]
    mask[2, -5] = 0  # a hole (a token that doesn't count) is inside
    assert extents(mask, KEEP)[1].tolist() == [0, 6, 4]


def test_each_pass_is_cut_to_its_longest_row_and_every_row_gets_its_own_back():
    ids, mask = rollout([2, 5, 1, 4, 3], [1, 6, 2, 5, 2])
    passes, (logps, entropies, aux) = seen_by(ids, mask, 2)
    assert [(p[0].shape[1] - p[2], p[2], len(p[0])) for p in passes] == [(5, 6, 2), (3, 2, 2), (2, 1, 1)]
    real = mask[:, -KEEP:].bool()
    assert torch.equal(logps[real], ids[:, -KEEP:][real].double()) and torch.equal(entropies[real], logps[real] / 2)
    assert (logps[1:][~real[1:]] >= 0).all() and logps[0, 1:].eq(0).all()  # the last pass was cut after one token
    assert aux == pytest.approx((2 + 2 + 1) / 3)
    assert sum(int(p[1].sum()) for p in passes) == int(mask.sum())  # no real token was cut off


def test_one_pass_keeps_its_order():
    ids, mask = rollout([2, 5, 1], [1, 2, 4])
    (only,), _ = seen_by(ids, mask, 3)
    assert torch.equal(only[0], ids[:, : 5 + 4])


def test_widths_are_multiples_as_trl_pads_them():
    ids, mask = rollout([2, 8, 1, 3], [1, 6, 2, 4], keep=8)
    passes, _ = seen_by(ids, mask, 1, multiple=4, keep=8)
    assert [(p[0].shape[1] - p[2], p[2]) for p in passes] == [(8, 8), (4, 4), (4, 4), (4, 4)]


def test_rows_without_a_token_are_scored_too():
    ids, mask = rollout([1, 2], [0, 0])
    mask[0] = 0
    passes, (logps, _, _) = seen_by(ids, mask, 1)
    assert [(p[0].shape[1] - p[2], p[2]) for p in passes] == [(2, 1), (1, 1)] and logps.shape == (2, KEEP)


def test_shapes_depend_on_the_lengths_alone():
    """Scoring has a rollout in its own order, the update shuffled: the k-th pass must be of one shape in both."""
    generator = torch.Generator().manual_seed(3)
    ids, mask = rollout(
        torch.randint(1, 5, (48,), generator=generator).tolist(),
        torch.randint(0, 4, (48,), generator=generator).tolist(),
    )
    shapes = []
    for rows in (torch.arange(48), torch.randperm(48, generator=generator), torch.arange(48).flip(0)):
        passes, _ = seen_by(ids[rows], mask[rows], 8)
        shapes.append([(tuple(p[0].shape), p[2]) for p in passes])
    assert shapes[0] == shapes[1] == shapes[2]


def test_an_updates_batches_are_dealt_anew_and_whole():
    ids, mask = rollout([2, 5, 1, 4, 3, 1], [1, 6, 2, 5, 2, 3])
    whole = {
        "prompt_ids": ids[:, :-KEEP], "prompt_mask": mask[:, :-KEEP], "completion_ids": ids[:, -KEEP:],
        "completion_mask": mask[:, -KEEP:], "advantages": ids[:, 0].float(), "num_items_in_batch": torch.tensor(19),
        "ref_per_token_logps": None,
    }  # fmt: skip
    batches = [{n: v[i : i + 2] if v is not None and v.ndim else v for n, v in whole.items()} for i in range(0, 6, 2)]
    found = sorted_batches(batches)
    assert [batch["completion_mask"].sum(1).tolist() for batch in found] == [[6, 5], [3, 2], [2, 1]]
    assert [batch["prompt_mask"].sum(1).tolist() for batch in found] == [[5, 4], [1, 3], [1, 2]]
    assert all(b["num_items_in_batch"] == 19 and b["ref_per_token_logps"] is None for b in found)
    order = longest_first(*extents(mask, KEEP))
    for name in ("prompt_ids", "completion_ids", "advantages"):
        assert torch.equal(torch.cat([batch[name] for batch in found]), whole[name][order])

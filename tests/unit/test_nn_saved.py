"""Bytes kept for the backward pass: a small block, counted by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tiny_models import tiny_model, tokens
from torch import Tensor, nn

import mxrl
from mxrl.nn import saved_bytes, shared_weights
from mxrl.recipes import RecipeError

T, H, I = 64, 128, 256  # noqa: E741  (tokens, width, inner width)
BF16 = torch.bfloat16


class Block(nn.Module):
    """A decoder block's seven layers; additions, which save nothing, in place of attention and norms."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(H, H, bias=False) for _ in range(4))
        self.gate_proj, self.up_proj = (nn.Linear(H, I, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(I, H, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        a = self.q_proj(h) + self.k_proj(h) + self.v_proj(h)
        r = self.o_proj(a)
        return self.down_proj(F.silu(self.gate_proj(r)) * self.up_proj(r))


def block(recipe: str | None) -> Block:
    torch.manual_seed(0)
    model = Block().to(BF16)
    if recipe is not None:
        mxrl.convert(model, recipe)
    return model


X = torch.randn(T, H, generator=torch.Generator().manual_seed(1)).to(BF16).requires_grad_()
WEIGHTS = 2 * (4 * H * H + 3 * H * I)  # 327,680 bytes in bf16
GATING = 2 * 3 * T * I  # SiLU keeps its input, the product both of its factors
INPUTS = 3 * T * H + T * I  # elements: of q, k, v together, o, gate and up together, down


@pytest.mark.parametrize(
    ("recipe", "activations", "weights", "parameters"),
    [
        # The table of docs/training.md. bf16 keeps its weights, which are there anyway.
        (None, 2 * INPUTS + GATING, 0, WEIGHTS),
        ("bf16", 2 * INPUTS + GATING, 0, WEIGHTS),
        ("mxfp4", 2 * INPUTS + GATING, WEIGHTS, 0),
        ("mxfp4+pack_saved=True", INPUTS * 17 // 32 + GATING, WEIGHTS, 0),  # 4.25 bits
        ("mxfp4+mbs+of+pack_saved=True", INPUTS * 69 // 64 + GATING, WEIGHTS, 0),  # 8.625 bits
        ("mxfp4+w4a8+pack_saved=True", INPUTS * 33 // 32 + GATING, WEIGHTS, 0),  # 8.25 bits
        ("mxfp4+w4a16", 2 * INPUTS + GATING, WEIGHTS, 0),
        ("mxfp4+backward=master", 2 * INPUTS + GATING, 0, WEIGHTS),
    ],
)
def test_table(recipe, activations, weights, parameters):
    model = block(recipe)
    with saved_bytes(model) as saved:
        model(X).sum().backward()
    assert (saved.rest, saved.parameters) == (activations + weights, parameters)
    assert saved.total == saved.rest + saved.parameters


def test_the_numbers_themselves():
    assert (WEIGHTS, GATING, 2 * INPUTS, INPUTS * 17 // 32) == (327_680, 98_304, 81_920, 21_760)


def test_shared_weights_count_once_for_all_micro_batches():
    model = block("mxfp4+pack_saved=True")
    activations = INPUTS * 17 // 32 + GATING
    for share, expected in ((False, 3 * (activations + WEIGHTS)), (True, 3 * activations + WEIGHTS)):
        with saved_bytes(model) as saved:
            if share:
                with shared_weights(model) as shared:
                    outputs = [model(X + n) for n in range(3)]
                    assert shared.nbytes == WEIGHTS
            else:
                outputs = [model(X + n) for n in range(3)]
        assert saved.rest == expected and len(outputs) == 3


def test_experts_keep_the_tokens_once_not_once_a_pair():
    """Q(x) of T tokens is kept, not of T·A pairs; the difference of the two recipes is packing alone."""
    t = tokens(batch=4, length=16)
    counts = []
    for recipe in ("mxfp4", "mxfp4+pack_saved=True"):
        model = tiny_model("qwen3_moe", dtype=BF16).train()
        mxrl.convert(model, recipe)
        experts = model.model.layers[0].mlp.experts
        x = torch.randn(t.numel(), 64, dtype=BF16)
        index = torch.stack([torch.arange(t.numel()) % 4, (torch.arange(t.numel()) + 1) % 4], dim=1)
        with saved_bytes(experts) as saved:
            experts(x, index, torch.ones(t.numel(), 2, dtype=BF16))
        counts.append(saved.rest)
    tokens_, pairs, inner = 64, 128, 48
    plain = 2 * (tokens_ * 64 + pairs * inner)
    packed = tokens_ * (32 + 2) + pairs * (24 + 2)  # 48 = one block of 32 and a ragged one
    assert counts[0] - counts[1] == plain - packed


def test_views_and_parameters_by_storage():
    x = torch.randn(4, 8, requires_grad=True)
    w = nn.Linear(8, 8)
    with saved_bytes(w) as saved:
        y = torch.randn(16, 8)
        x * y[:4] + x * y[4:8] + w(x)
    assert saved.rest == y.nbytes + x.nbytes and saved.parameters == w.weight.nbytes
    with saved_bytes() as saved:
        w(x)
    assert saved.rest == w.weight.nbytes + x.nbytes and saved.parameters == 0 and saved.tensors == 2


def test_recipes_without_a_packed_activation_are_refused():
    with pytest.raises(RecipeError, match="unrounded scale has no packed form"):
        mxrl.convert(block(None), "mxfp4:ideal+pack_saved=True")

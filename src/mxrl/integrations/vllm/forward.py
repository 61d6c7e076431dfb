"""The numerics of the plugin, in plain torch and without vLLM: those of `mxrl.nn`'s layers, bit for bit
(of experts where the router's gates have the activations' dtype; see `experts_forward`).

Under torch.compile `fake_quantize` is one operator (`mxrl::fake_quantize`); inside vLLM's own operators, which are
opaque to the compiler, and while a CUDA graph is captured it is called as it is. Triton serves it on CUDA. Rows don't
know of each other, so neither padding nor the rows that another rank computes matter.

T tokens, A experts a token, E experts, K inputs, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from mxrl.nn.grouped import grouped_mm, route
from mxrl.quantize import fake_quantize
from mxrl.recipes import Recipe


def quantized_input(x: Tensor, operand: Recipe | None) -> Tensor:
    """Q(x) along the last axis, a new tensor of x's shape and dtype; `x` itself without an operand."""
    return x if operand is None else fake_quantize(x, operand)


def quantize_(x: Tensor, operand: Recipe | None) -> None:
    """Q(x) along the last axis, written into x."""
    if operand is not None:
        fake_quantize(x, operand, out=x)


def experts_forward(
    x_TK: Tensor,
    w13: Tensor,
    w2: Tensor,
    gates_TA: Tensor,
    index_TA: Tensor,
    operand: Recipe | None,
    activation: Callable[[Tensor], Tensor],
) -> Tensor:
    """A layer of experts as it trains (nn/experts.py), without gradients: [T, K] in x's dtype.

    w13 [E, 2I, K] (gate first) and w2 [E, K, I], in x's dtype; gates [T, A] of any float dtype, rounded to x's, as the
    routers of Qwen3-MoE and OLMoE give them to training. Mixtral's gives float32 gates: where x has 16 bits, training's
    bits are others. index [T, A] integers below E. activation: [S, 2I] -> [S, I].
    """
    tokens, active = index_TA.shape
    where = route(index_TA.long(), w13.shape[0])
    rows_SK = quantized_input(x_TK, operand)[where.order_S // active]
    hidden_SN = grouped_mm(rows_SK, w13.mT, None, where.expert_S, where.ends_E)
    inner_SI = quantized_input(activation(hidden_SN), operand)
    y_SK = grouped_mm(inner_SI, w2.mT, None, where.expert_S, where.ends_E)
    y_TAK = y_SK[where.place_S].view(tokens, active, -1)
    return (y_TAK * gates_TA.to(x_TK.dtype).unsqueeze(-1)).sum(dim=1)

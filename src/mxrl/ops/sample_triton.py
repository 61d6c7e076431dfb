"""`ops/sample.py` as one Triton kernel: a row of logits is read once, and once more up to the token that is drawn.

Legend: B rows, V vocabulary, one program a row. No [B, V] temporary is written.

    first pass    each lane keeps its own maximum m, s = Σ exp(x − m), w = Σ (x − m) exp(x − m) and lowest index of m;
                  the lanes are merged at the end: log Z = M + log s, entropy = log s − w / s (no cancellation: both
                  terms are positive)
    second pass   block after block until the running sum of exp(x − M) passes u · s; a prefix sum inside that block

Sums are float32, in blocks: the distribution function is within about 1e-6 of the reference's float64 one, so a token
differs from the reference's where u is that close to a step, one draw in 10^5 or so for V = 150,000. Log-probabilities
and entropies are within a few float32 roundings of |x| and log V (the GPU's own exp and log, of 22 bits, included).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxrl.ops.sample import Drawn

BLOCK, WARPS = 4096, 8
_LOWEST = tl.constexpr(-1.0e30)  # below every logit, and finite: −inf − −inf is NaN


@triton.jit
def _scaled(logits, b, stride_b, v, V, temperature):
    x = tl.load(logits + b * stride_b + v, mask=v < V, other=-float("inf")).to(tl.float32)
    return tl.div_rn(x, temperature)


@triton.jit
def _draw(
    logits, stride_b, u, tokens, logps, entropies, argmax, V, temperature, GREEDY: tl.constexpr, BLOCK: tl.constexpr
):
    b = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    m = tl.full([BLOCK], _LOWEST, tl.float32)
    s = tl.zeros([BLOCK], tl.float32)
    w = tl.zeros([BLOCK], tl.float32)
    at = lane
    for start in range(0, V, BLOCK):
        v = start + lane
        x = _scaled(logits, b, stride_b, v, V, temperature)
        higher = x > m
        at = tl.where(higher, v, at)
        top = tl.where(higher, x, m)
        old = tl.exp(m - top)
        e = tl.exp(x - top)
        w = old * (w + (m - top) * s) + tl.where(e == 0, 0.0, x - top) * e
        s = old * s + e
        m = top
    M = tl.max(m, 0)
    best = tl.min(tl.where(m == M, at, V), 0)
    best = tl.minimum(best, V - 1)
    shift = m - M
    merged = tl.exp(shift)
    total = tl.sum(merged * s, 0)
    weighted = tl.sum(merged * (w + shift * s), 0)
    log_total = tl.log(total)

    token = best
    if not GREEDY:
        target = tl.load(u + b) * total
        token = best * 0 - 1
        before = total * 0.0
        begin = best * 0
        while (token < 0) & (begin < V):
            v = begin + lane
            e = tl.exp(_scaled(logits, b, stride_b, v, V, temperature) - M)
            block = tl.sum(e, 0)
            if before + block > target:
                # A prefix sum's own roundings may fall short of the block's sum, or step back where e is 0.
                passed = (before + tl.cumsum(e, 0) > target) & (e > 0)
                first = tl.min(tl.where(passed, v, V), 0)
                last = tl.max(tl.where(e > 0, v, 0), 0)
                token = tl.where(first < V, first, last)
            before += block
            begin += BLOCK
        token = tl.where(token < 0, best, token)  # u · s beyond the sum by a rounding, or NaN
    x_token = tl.div_rn(tl.load(logits + b * stride_b + token).to(tl.float32), temperature)
    tl.store(tokens + b, token.to(tl.int64))
    tl.store(argmax + b, best.to(tl.int64))
    tl.store(logps + b, (x_token - M) - log_total)
    tl.store(entropies + b, log_total - tl.div_rn(weighted, total))


def draw(logits_BV: Tensor, u_B: Tensor, temperature: float, greedy: bool) -> Drawn:
    """As `sample.draw`; logits_BV may have any row stride, its last axis must be contiguous."""
    if logits_BV.stride(-1) != 1:
        logits_BV = logits_BV.contiguous()
    rows, vocabulary = logits_BV.shape
    options: Any = {"device": logits_BV.device}
    out = Drawn(
        torch.empty(rows, dtype=torch.int64, **options),
        torch.empty(rows, dtype=torch.float32, **options),
        torch.empty(rows, dtype=torch.float32, **options),
        torch.empty(rows, dtype=torch.int64, **options),
    )
    block = min(BLOCK, max(16, triton.next_power_of_2(vocabulary)))
    kernel: Any = _draw
    if rows:
        kernel[(rows,)](
            logits_BV, logits_BV.stride(0), u_B, *out, vocabulary, float(temperature),
            GREEDY=greedy, BLOCK=block, num_warps=WARPS if block == BLOCK else 4,
        )  # fmt: skip
    return out

"""`ops/attention.py` as one Triton kernel: a program a row and key-value head, which reads no more than its length.

Legend: S rows, H query heads, J key-value heads, G = H / J, D head size, T room in the cache.

The G queries of a key-value head share its keys, so they are one matrix, padded to the 16 rows that a tensor core
takes. The new token starts the online softmax (m its score, l = 1, acc its value), and is written to the cache on the
way: no other kernel touches the cache while decoding, and a row without cached tokens needs no special case.

    for each block of cached tokens:   s = q kᵀ · scaling;  m' = max(m, s);  p = exp(s − m')
                                       l = l·exp(m − m') + Σ p;   acc = acc·exp(m − m') + p v

m, l, acc and s are float32; p is rounded to the values' dtype for the second product, as flash attention does (no
rounding where that is float32). Offsets are 64-bit.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS, STAGES = 64, 4, 3


@triton.jit
def _attend(
    query, key, value, keys, values, positions, out,
    query_s, query_h, key_s, key_j, value_s, value_j, cache_s, cache_j, cache_t, scaling,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, GP: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    s = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1).to(tl.int64)
    length = tl.load(positions + s)
    g = tl.arange(0, GP)
    d = tl.arange(0, DP)
    real = (g < G)[:, None] & (d < D)[None, :]
    head = j * G + g
    q_GD = tl.load(query + s * query_s + head[:, None] * query_h + d[None, :], mask=real, other=0.0)
    k_D = tl.load(key + s * key_s + j * key_j + d, mask=d < D, other=0.0)
    v_D = tl.load(value + s * value_s + j * value_j + d, mask=d < D, other=0.0)
    row = s * cache_s + j * cache_j
    tl.store(keys + row + length * cache_t + d, k_D, mask=d < D)
    tl.store(values + row + length * cache_t + d, v_D, mask=d < D)

    m = tl.sum(q_GD.to(tl.float32) * k_D.to(tl.float32)[None, :], 1) * scaling
    total = tl.full([GP], 1.0, tl.float32)
    acc = tl.zeros([GP, DP], tl.float32) + v_D.to(tl.float32)[None, :]
    for start in range(0, length, BLOCK):
        t = start + tl.arange(0, BLOCK)
        cached = (t < length)[:, None] & (d < D)[None, :]
        place = row + t.to(tl.int64)[:, None] * cache_t + d[None, :]
        k_TD = tl.load(keys + place, mask=cached, other=0.0)
        score = tl.dot(q_GD, tl.trans(k_TD), input_precision="ieee") * scaling
        score = tl.where((t < length)[None, :], score, -float("inf"))
        top = tl.maximum(m, tl.max(score, 1))
        p = tl.exp(score - top[:, None])
        old = tl.exp(m - top)
        v_TD = tl.load(values + place, mask=cached, other=0.0)
        total = total * old + tl.sum(p, 1)
        acc = acc * old[:, None] + tl.dot(p.to(v_TD.dtype), v_TD, input_precision="ieee")
        m = top
    result = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + (s * H + head)[:, None] * D + d[None, :], result, mask=real)


def decode_attention(
    query_SHD: Tensor,
    key_SJD: Tensor,
    value_SJD: Tensor,
    keys_SJTD: Tensor,
    values_SJTD: Tensor,
    positions_S: Tensor,
    scaling: float,
) -> Tensor:
    """As `attention.decode_attention`; every last axis must be contiguous, and the two caches of the same strides."""
    slots, heads, size = query_SHD.shape
    kv_heads = key_SJD.shape[1]
    query_SHD, key_SJD, value_SJD = (
        x if x.stride(-1) == 1 else x.contiguous() for x in (query_SHD, key_SJD, value_SJD)
    )
    out_SHD = torch.empty(slots, heads, size, dtype=query_SHD.dtype, device=query_SHD.device)
    group = heads // kv_heads
    kernel: Any = _attend
    kernel[(slots, kv_heads)](
        query_SHD, key_SJD, value_SJD, keys_SJTD, values_SJTD, positions_S, out_SHD,
        *query_SHD.stride()[:2], *key_SJD.stride()[:2], *value_SJD.stride()[:2], *keys_SJTD.stride()[:3], scaling,
        H=heads, G=group, D=size, GP=max(16, triton.next_power_of_2(group)), DP=max(16, triton.next_power_of_2(size)),
        BLOCK=BLOCK, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return out_SHD

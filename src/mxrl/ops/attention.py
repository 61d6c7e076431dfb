"""Attention of one new token a row over that row's own cached tokens: the definition, in plain torch.

Legend: S rows (slots), H query heads, J key-value heads, G = H / J queries a key-value head, D head size, T room in the
cache. Row s has `positions[s]` tokens in its cache; its new key and value are written there and attended to as well:

    keys[s, j, positions[s]] = key[s, j];   values likewise
    out[s, h] = Σ_{t ≤ positions[s]} softmax_t(query[s, h] · keys[s, h // G, t] · scaling) values[s, h // G, t]

What lies beyond a row's position is never read into a result (it must be finite: a zero weight times NaN is NaN).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def decode_attention(
    query_SHD: Tensor,
    key_SJD: Tensor,
    value_SJD: Tensor,
    keys_SJTD: Tensor,
    values_SJTD: Tensor,
    positions_S: Tensor,
    scaling: float,
) -> Tensor:
    """out [S, H, D] in query's dtype; keys_SJTD and values_SJTD are written to. positions_S int64, each below T."""
    slots, heads, size = query_SHD.shape
    kv_heads = key_SJD.shape[1]
    row = torch.arange(slots, device=query_SHD.device)
    keys_SJTD[row, :, positions_S] = key_SJD
    values_SJTD[row, :, positions_S] = value_SJD
    longest = int(positions_S.max()) + 1
    live_ST = torch.arange(longest, device=query_SHD.device) <= positions_S.unsqueeze(1)
    out = F.scaled_dot_product_attention(
        query_SHD.view(slots, kv_heads, heads // kv_heads, size),  # a group's queries stand where a sequence's would
        keys_SJTD[:, :, :longest],
        values_SJTD[:, :, :longest],
        attn_mask=live_ST[:, None, None, :],
        scale=scaling,
    )
    return out.reshape(slots, heads, size)

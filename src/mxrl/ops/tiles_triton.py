"""Where a tile's elements are: addresses, masks, loads and stores shared by the Triton kernels.

The tensor is a view x_ABK of any strides; K is blocked. A row has ceil(K / UNIT) *units*: macro-blocks, or blocks
without MBS, of UNIT = G·n elements, the last one ragged. A tile is M of them, [M, G, n]; which ones is the MODE:

    flat      rows contiguous and K a whole number of units: tile t has the units t·M ... of one long run
    rows      units t·M ... counted along K, then B, then A: neighbours along K, the usual strided or ragged matrix
    columns   one unit of M neighbouring b: coalesced where B is the contiguous axis (dim != -1)

Offsets are int64. Elements beyond K, and units beyond the last, read as zeros and are not written.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class Tiling(NamedTuple):
    """How a kernel covers x_ABK. `count` is the number of units (rows, flat) or of tiles along B (columns)."""

    mode: str
    mask: str  # "none": every element of every tile exists; "units": some units don't; "all": nor do some elements
    count: int
    programs: int


def tiling(x_ABK: Tensor, out_ABK: Tensor | None, unit: int, tile: int) -> Tiling:
    """Tiles of `tile` units of `unit` elements for reading x_ABK and writing out_ABK, if any."""
    a, b, k = x_ABK.shape
    units = -(-k // unit)
    total = a * b * units
    whole = k % unit == 0
    if whole and x_ABK.is_contiguous() and (out_ABK is None or out_ABK.is_contiguous()):
        return Tiling("flat", "none" if total % tile == 0 else "units", total, -(-total // tile))
    _, stride_b, stride_k = x_ABK.stride()
    if b > 1 and abs(stride_b) < abs(stride_k):
        count = -(-b // tile)
        mask = "all" if not whole else "units" if b % tile else "none"
        return Tiling("columns", mask, count, a * units * count)
    mask = "all" if not whole else "units" if total % tile else "none"
    return Tiling("rows", mask, total, -(-total // tile))


@triton.jit
def locate(program, count, B, K, MODE: tl.constexpr, M: tl.constexpr, UNIT: tl.constexpr):
    """-> a, b, column (int64 [M]) of the units of tile `program`, and valid (bool [M]).

    column: the K-index of a unit's first element; under `flat` it counts on through the rows, and a = b = 0.
    """
    lane = tl.arange(0, M)
    zero = (lane * 0).to(tl.int64)
    program = program.to(tl.int64)
    if MODE == "columns":
        units = tl.cdiv(K, UNIT)
        rest = program // count
        b = program % count * M + lane
        return zero + rest // units, b, zero + rest % units * UNIT, b < B
    index = program * M + lane
    if MODE == "flat":
        return zero, zero, index * UNIT, index < count
    units = tl.cdiv(K, UNIT)
    row = index // units
    return row // B, row % B, (index - row * units) * UNIT, index < count


# Addresses are formed in two dimensions, [M, UNIT], or [M·G, 8] for pieces: of three, the compiler would spread a
# macro-block's blocks over warps, and its maximum would go through shared memory.


@triton.jit
def _addresses(start, column, valid, K, stride, UNIT: tl.constexpr, MASK: tl.constexpr):
    """Offsets [M, UNIT] of a tile's elements, and which of them exist."""
    inside = tl.arange(0, UNIT)[None, :]
    mask = valid[:, None] & (inside >= 0)
    if MASK == "all":
        mask = mask & (column[:, None] + inside < K)
    return start[:, None] + inside * stride, mask


@triton.jit
def element_offsets(start, stride, G: tl.constexpr, n: tl.constexpr):
    """Offsets of the tile's elements, int64 [M, G, n]."""
    return start[:, None, None] + (tl.arange(0, G)[None, :, None] * n + tl.arange(0, n)[None, None, :]) * stride


@triton.jit
def tile_mask(column, valid, K, G: tl.constexpr, n: tl.constexpr, MASK: tl.constexpr):
    """Which elements [M, G, n] exist."""
    _, mask = _addresses(column, column, valid, K, 1, G * n, MASK)
    return tl.reshape(mask, [valid.shape[0], G, n])


@triton.jit
def load_tile(
    pointer, start, column, valid, K, stride, G: tl.constexpr, n: tl.constexpr, MASK: tl.constexpr,
    OWNED: tl.constexpr,
):  # fmt: skip
    """The tile [M, G, n] in its own dtype; start (int64 [M]): offsets of the units' first elements.

    OWNED: 0, or loaded in pieces of 8 elements that are joined, so that one thread holds a whole block (1, 2) or a run
    of 16 (3, 4), where K is contiguous: maxima, sums and scales then take fewer exchanges and less repeated work, for
    more registers. 2 and 4 say that every start is a multiple of 8, which the compiler can't see.
    """
    M: tl.constexpr = start.shape[0]
    if OWNED == 0:
        offsets, mask = _addresses(start, column, valid, K, stride, G * n, MASK)
        if MASK == "none":
            tile = tl.load(pointer + offsets)
        else:
            tile = tl.load(pointer + offsets, mask=mask, other=0.0)
    else:
        run: tl.constexpr = 16 if OWNED >= 3 else n
        runs: tl.constexpr = G * (n // run)
        p0 = _piece(pointer, start, column, valid, K, stride, runs, run, 0, MASK, OWNED)
        p1 = _piece(pointer, start, column, valid, K, stride, runs, run, 1, MASK, OWNED)
        if run == 16:
            tile = tl.permute(tl.join(p0, p1), (0, 2, 1))
        else:
            p2 = _piece(pointer, start, column, valid, K, stride, runs, run, 2, MASK, OWNED)
            p3 = _piece(pointer, start, column, valid, K, stride, runs, run, 3, MASK, OWNED)
            joined = tl.join(tl.join(p0, p2), tl.join(p1, p3))  # [M·G, 8, 2 (piece + 2), 2 (piece + 1)]
            tile = tl.permute(joined, (0, 2, 3, 1))
    return tl.reshape(tile, [M, G, n])


@triton.jit
def _piece(
    pointer, start, column, valid, K, stride, RUNS: tl.constexpr, RUN: tl.constexpr, INDEX: tl.constexpr,
    MASK: tl.constexpr, OWNED: tl.constexpr,
):  # fmt: skip
    """Elements 8·INDEX ... of every run of a unit: [M·RUNS, 8]."""
    if RUNS > 1:
        runs: tl.constexpr = start.shape[0] * RUNS
        first = tl.arange(0, RUNS)[None, :] * RUN
        start = tl.reshape(start[:, None] + first * stride, [runs])
        column = tl.reshape(column[:, None] + first, [runs])
        valid = tl.reshape(valid[:, None] & (first >= 0), [runs])
    if OWNED == 2 or OWNED == 4:
        start = tl.multiple_of(start, 8)
    inside = tl.arange(0, 8)[None, :] + 8 * INDEX
    address = pointer + (start[:, None] + inside * stride)
    if MASK == "none":
        return tl.load(address)
    mask = valid[:, None] & (inside >= 0)
    if MASK == "all":
        mask = mask & (column[:, None] + inside < K)
    return tl.load(address, mask=mask, other=0.0)


@triton.jit
def store_tile(pointer, start, column, valid, K, stride, tile, MASK: tl.constexpr):
    """Write the tile [M, G, n], already in the pointer's dtype, to the elements that exist."""
    UNIT: tl.constexpr = tile.shape[1] * tile.shape[2]
    offsets, mask = _addresses(start, column, valid, K, stride, UNIT, MASK)
    tile = tl.reshape(tile, [tile.shape[0], UNIT])
    if MASK == "none":
        tl.store(pointer + offsets, tile)
    else:
        tl.store(pointer + offsets, tile, mask=mask)

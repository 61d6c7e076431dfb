"""Two checkpoints of one model, weight by weight, whatever each calls its weights and however it stores them.

    pairing = match(a, b)                 pairing.pairs: the weights of `a` that `b` holds too, in a's order
    read_other(b, pair, start, stop)      b's values in the place of rows [start, stop) of a's weight
    each_range(a, b, pairs)               (pair, rows of a, rows of b), the ranges of a scan of `a` (scan_tasks)

A weight is found under its own name, else as the only weight of its kind in its layer (GGUF's `blk.3.attn_q` is
`model.layers.3.self_attn.q_proj`). What may differ besides the stored form:

    experts      one tensor [E, N, K] in one checkpoint, E tensors [N, K] in the other
    fused rows   gate_up = gate over up, qkv = q over k over v, one below the other
    orientation  [N, K] in one, [K, N] in the other (a gpt-oss checkpoint and its packed form)

Gate and up beside each other in the *columns* of one tensor are not taken apart: gpt-oss interleaves them, Llama 4 does
not, and no name says so. Nor is `query_key_value`, whose rows go head by head (GPT-NeoX, BLOOM, Falcon). What has no
counterpart is returned with the reason, never dropped in silence.

Llama's GGUF files hold the rows of q and k in another order (rotary pairs side by side); `match` undoes that.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mxrl.checkpoint import Checkpoint, Weight
from mxrl.rotary_rows import heads_of
from mxrl.scan_tasks import ranges, read

_FUSED = {"gate_up": ("gate", "up"), "qkv": ("q", "k", "v")}
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_BY_HEAD = "query_key_value holds q, k and v head by head, which is not taken apart"
_STEP = 1 << 22  # elements of a transposed matrix turned at a time


class PairError(ValueError):
    """Two checkpoints that have no weight in common: the message names an example of each."""


@dataclass(frozen=True)
class Piece:
    """Rows [first, stop) of a's weight are in weight number `weight` of b, from its row `row` on.

    turned: they are one whole matrix, and b stores its transpose. heads: b's rows are in GGUF's rotary order, by so
    many heads.
    """

    first: int
    stop: int
    weight: int
    row: int
    turned: bool = False
    heads: int = 0


@dataclass(frozen=True)
class Pair:
    """A weight of a (number `index`) and where b has it: pieces that cover a's rows in order."""

    index: int
    weight: Weight
    others: tuple[Weight, ...]  # b's, each once
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Lone:
    """A weight without a counterpart, and why."""

    weight: Weight
    reason: str


@dataclass(frozen=True)
class Pairing:
    pairs: tuple[Pair, ...]
    only_a: tuple[Lone, ...]
    only_b: tuple[Lone, ...]

    def of_a(self, a: Checkpoint) -> Checkpoint:
        """`a` with the matched weights alone: what a scan of the pairs' first halves takes."""
        return replace(a, weights=tuple(pair.weight for pair in self.pairs))


@dataclass(frozen=True)
class _Matrix:
    """One matrix of N outputs and K inputs: rows [row, row + N) of weight number `weight`, or K rows where it is
    stored transposed (dim -2)."""

    weight: int
    row: int
    n: int
    k: int
    dim: int
    heads: int = 0
    by_head: bool = False  # rows of q, k and v take turns, head by head

    def rows(self, first: int, count: int) -> _Matrix:
        """Outputs [first, first + count) of it; it must not be stored transposed."""
        return replace(self, row=self.row + first, n=count)


_Key = tuple[int | None, str, int | None]  # layer, kind, expert


class _Index:
    """The matrices of a checkpoint by layer, kind and expert."""

    def __init__(self, checkpoint: Checkpoint):
        self.by_name = {w.name: i for i, w in enumerate(checkpoint.weights)}
        self.of_weight: list[list[tuple[_Key, _Matrix]]] = []
        self._found: dict[_Key, list[_Matrix]] = defaultdict(list)
        heads = heads_of(checkpoint)
        for i, weight in enumerate(checkpoint.weights):
            matrices = list(_matrices(i, weight, heads))
            self.of_weight.append(matrices)
            for key, matrix in matrices:
                self._found[key].append(matrix)

    def get(self, key: _Key) -> _Matrix | None:
        """The only matrix of that layer, kind and expert."""
        found = self._found.get(key, [])
        return found[0] if len(found) == 1 else None

    def count(self, key: _Key) -> int:
        return len(self._found.get(key, []))


def _matrices(i: int, weight: Weight, heads: dict[str, int]) -> Iterator[tuple[_Key, _Matrix]]:
    n, k = weight.shape[-2:] if weight.dim == -1 else weight.shape[:-3:-1]
    if len(weight.shape) == 3:
        for e in range(weight.shape[0]):
            yield (weight.layer, weight.kind, e), _Matrix(i, e * weight.shape[1], n, k, weight.dim)
    else:
        one = _EXPERT.search(weight.name)
        key = (weight.layer, weight.kind, int(one[1]) if one else None)
        by_head = weight.name.removesuffix(".weight").endswith("query_key_value")
        yield key, _Matrix(i, 0, n, k, weight.dim, heads.get(weight.kind, 0), by_head)


def match(a: Checkpoint, b: Checkpoint, names: tuple[str, str] | None = None) -> Pairing:
    """Pair the weights of `a` with b's. names: what to call the two in reasons. Raises PairError for no pair at all."""
    a_name, b_name = names or (a.name, b.name)
    in_a, in_b = _Index(a), _Index(b)
    pairs, only_a = [], []
    used: dict[int, int] = defaultdict(int)  # elements of b's weights that have a counterpart
    for index, weight in enumerate(a.weights):
        found = _pieces(weight, index, a, in_a, b, in_b, b_name)
        if isinstance(found, str):
            only_a.append(Lone(weight, found))
            continue
        others = tuple(dict.fromkeys(piece.weight for piece in found))
        for piece in found:
            used[piece.weight] += (piece.stop - piece.first) * weight.shape[-1]
        pairs.append(Pair(index, weight, tuple(b.weights[i] for i in others), found))
    only_b = [
        Lone(w, f"{a_name} has {used[i] / w.numel:.1%} of it" if used[i] else f"{a_name} has no such weight")
        for i, w in enumerate(b.weights)
        if i not in used or used[i] < w.numel
    ]
    if not pairs:
        raise PairError(
            f"{a_name} and {b_name} have no weight in common: '{a.weights[0].name}' ({only_a[0].reason}) in the one, "
            f"'{b.weights[0].name}' in the other"
        )
    return Pairing(tuple(pairs), tuple(only_a), tuple(only_b))


def _pieces(
    weight: Weight, index: int, a: Checkpoint, in_a: _Index, b: Checkpoint, in_b: _Index, b_name: str
) -> tuple[Piece, ...] | str:
    """Where b has a's weight, or why it hasn't."""
    same = in_b.by_name.get(weight.name)
    pieces: list[Piece] = []
    missing = 0
    mine = in_a.of_weight[index]
    for e, (key, matrix) in enumerate(mine):
        if same is not None and len(in_b.of_weight[same]) == len(mine):
            found: list[_Matrix] | str = [in_b.of_weight[same][e][1]]
        else:
            found = _look_up(key, matrix, in_a, in_b)
        if isinstance(found, str):
            return found
        missing += not found
        outputs = sum(m.n for m in found)
        if found and (outputs, found[0].k) != (matrix.n, matrix.k):
            return f"{b_name} has it as {outputs} outputs × {found[0].k} inputs, not {matrix.n} × {matrix.k}"
        pieces += _placed(found, matrix)
    if missing:
        if max(in_a.count(mine[0][0]), in_b.count(mine[0][0])) > 1:
            return f"{b_name} has no weight of that name, and its kind is there several times in its layer"
        if len(mine) > 1 and missing < len(mine):
            return f"{b_name} lacks {missing} of its {len(mine)} experts"
        return f"{b_name} has no such weight"
    return tuple(_merged(pieces))


def _look_up(key: _Key, matrix: _Matrix, in_a: _Index, in_b: _Index) -> list[_Matrix] | str:
    """b's matrices that make up a's, one below the other ([] for none), or why they can't be taken."""
    if in_a.count(key) > 1:
        return []  # not the only one of its kind: then only its name could tell
    if whole := in_b.get(key):
        return [whole] if whole.by_head == matrix.by_head else _BY_HEAD
    layer, kind, expert = key
    prefix, _, last = kind.rpartition(".")
    prefix += "." if prefix else ""
    if last in _FUSED:
        parts = [in_b.get((layer, prefix + part, expert)) for part in _FUSED[last]]
        found = [p for p in parts if p is not None]
        if len(found) < len(parts):
            return []
        if matrix.by_head:
            return _BY_HEAD
        return found if matrix.dim == -1 and all(p.dim == -1 for p in found) else _beside(last)
    for fused, names in _FUSED.items():
        whole = in_b.get((layer, prefix + fused, expert))
        if last not in names or whole is None:
            continue
        parts = [in_a.get((layer, prefix + name, expert)) for name in names]
        sizes = [p.n if p is not None else 0 for p in parts]
        if not all(sizes) or sum(sizes) != whole.n:
            return []
        if whole.by_head or whole.dim != -1:
            return _BY_HEAD if whole.by_head else _beside(fused)
        at = names.index(last)
        return [whole.rows(sum(sizes[:at]), sizes[at])]
    return []


def _beside(fused: str) -> str:
    return f"{' and '.join(_FUSED[fused])} lie in the columns of one tensor, in an order that no name tells"


def _placed(found: Sequence[_Matrix], matrix: _Matrix) -> Iterator[Piece]:
    """Pieces of a's `matrix`, whose parts b has as `found`."""
    if matrix.dim == -1:
        first = matrix.row
        for part in found:
            yield Piece(first, first + part.n, part.weight, part.row, part.dim != -1, _order(matrix, part))
            first += part.n
    else:
        for part in found:
            yield Piece(matrix.row, matrix.row + matrix.k, part.weight, part.row, part.dim != -2)


def _order(a: _Matrix, b: _Matrix) -> int:
    """Heads to put b's rows in order by: negative where it is a that is in rotary order."""
    return 0 if a.heads == b.heads else b.heads or -a.heads


def _merged(pieces: Sequence[Piece]) -> Iterator[Piece]:
    """Neighbours that are one stretch in both checkpoints as one piece."""
    last: Piece | None = None
    for piece in pieces:
        if last is not None:
            plain = not (piece.turned or last.turned or piece.heads or last.heads)
            follows = piece.weight == last.weight and piece.row == last.row + last.stop - last.first
            if plain and follows and piece.first == last.stop:
                last = replace(last, stop=piece.stop)
                continue
            yield last
        last = piece
    if last is not None:
        yield last


# ---- reading ---------------------------------------------------------------------------------------------------------


def read_other(b: Checkpoint, pair: Pair, start: int, stop: int) -> Tensor:
    """b's values of rows [start, stop) of a's weight, [stop - start, its columns], in b's type (decoded: float32)."""
    parts = []
    for piece in pair.pieces:
        low, high = max(start, piece.first), min(stop, piece.stop)
        if low < high:
            parts.append(_rows(b, pair.weight.shape[-1], piece, low - piece.first, high - piece.first))
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return torch.empty(0, pair.weight.shape[-1])
    dtype = parts[0].dtype if len({p.dtype for p in parts}) == 1 else torch.float64
    return torch.cat([p.to(dtype) for p in parts])


def _rows(b: Checkpoint, columns: int, piece: Piece, low: int, high: int) -> Tensor:
    weight = b.weights[piece.weight]
    if piece.heads:
        return _in_rotary_order(b, weight, piece, low, high)
    if not piece.turned:
        return read(b, weight, piece.row + low, piece.row + high)
    step = max(1, _STEP // weight.shape[-1])
    out: Tensor | None = None
    for begin in range(0, columns, step):
        end = min(begin + step, columns)
        part = read(b, weight, piece.row + begin, piece.row + end)[:, low:high]
        out = torch.empty(high - low, columns, dtype=part.dtype) if out is None else out
        out[:, begin:end] = part.T
    assert out is not None
    return out


def _in_rotary_order(b: Checkpoint, weight: Weight, piece: Piece, low: int, high: int) -> Tensor:
    """Rows of whole heads are read, put in order, and cut."""
    size = (piece.stop - piece.first) // abs(piece.heads)
    first, last = low // size, -(-high // size)
    rows = read(b, weight, piece.row + first * size, piece.row + last * size)
    halves = (2, size // 2) if piece.heads < 0 else (size // 2, 2)
    rows = rows.view(last - first, *halves, -1).transpose(1, 2).reshape(rows.shape)
    return rows[low - first * size : high - first * size]


def each_range(
    a: Checkpoint, b: Checkpoint, pairs: Sequence[Pair], done: Callable[[int], None] = lambda nbytes: None
) -> Iterator[tuple[Pair, Tensor, Tensor]]:
    """(pair, rows of a, b's rows in their place) of every range of every pair, in order.

    The next range is read while the caller works on this one. done: called with the bytes stored, of both, of a range
    that has been worked on.
    """
    wanted = [(pair, *r) for pair in pairs for r in ranges(pair.weight.shape, pair.weight.dim)]

    def fetch(pair: Pair, start: int, stop: int) -> tuple[Tensor, Tensor]:
        return read(a, pair.weight, start, stop), read_other(b, pair, start, stop)

    with ThreadPoolExecutor(1, thread_name_prefix="mxrl-read") as reader:
        try:
            ahead = reader.submit(fetch, *wanted[0]) if wanted else None
            for i, (pair, start, stop) in enumerate(wanted):
                assert ahead is not None
                x, y = ahead.result()
                ahead = reader.submit(fetch, *wanted[i + 1]) if i + 1 < len(wanted) else None
                yield pair, x, y
                rows = max(pair.weight.numel // max(pair.weight.shape[-1], 1), 1)
                done((pair.weight.nbytes + stored_bytes(b, pair)) * (stop - start) // rows)
        finally:
            reader.shutdown(cancel_futures=True)


def stored_bytes(b: Checkpoint, pair: Pair) -> int:
    """Bytes that b takes for a's weight: of a fused tensor its share."""
    total = 0.0
    for piece in pair.pieces:
        weight = b.weights[piece.weight]
        elements = (piece.stop - piece.first) * pair.weight.shape[-1]
        total += weight.nbytes * elements / max(weight.numel, 1)
    return round(total)

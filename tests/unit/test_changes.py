"""Two checkpoints compared: sums known by hand, and every count by brute force over the public operations."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from mxrl.changes import Seen, Update, changes, passes_over, seen_by, spacing, update_of
from mxrl.checkpoint import Checkpoint, open_checkpoint
from mxrl.decompose import ErrorStats, error_stats
from mxrl.formats import E2M1, E4M3, ElementFormat
from mxrl.ops.layout import as_abk
from mxrl.quantize import QuantizedTensor, fake_quantize, quantize
from mxrl.recipes import Recipe
from mxrl.scan import NonFiniteError, scan

Q, DOWN = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight"
EXPERTS = "model.layers.2.mlp.experts"
RECIPES = (
    "mxfp4",
    "mxfp4:floor",
    "mxfp4:e8m3",
    "mxfp4+mbs",
    "mxfp4+of",
    "mxfp8",
    "nvfp4",
    "nvfp4:4over6",
    "mxfp4:ideal",
)


def randn(*shape: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g) * torch.exp(torch.randn(*shape[:-1], 1, generator=g))


def write(path: Path, tensors: dict[str, Tensor]) -> Checkpoint:
    path.mkdir(parents=True, exist_ok=True)
    save_file({k: v.contiguous() for k, v in tensors.items()}, path / "model.safetensors")
    return open_checkpoint(path)


def seen(a: Tensor, b: Tensor, recipe: str, dim: int = -1) -> Seen:
    return seen_by(Recipe.parse(recipe), as_abk(a, dim % a.dim()), as_abk(b, dim % b.dim()), ErrorStats(), ErrorStats())


# ---- by hand ---------------------------------------------------------------------------------------------------------


def test_the_sums_of_an_update() -> None:
    a, b = torch.tensor([[3.0, -4.0, 0.0, 0.0]]), torch.tensor([[3.0, -4.5, 0.0, 1.0]])
    update = update_of(a, b)
    assert update == Update(4, 2, 25.0, 9 + 4.5**2 + 1, 0.25 + 1, -4 * -0.5, 1.0)
    assert update.relative_change == math.sqrt(1.25) / 5
    assert update.cos == pytest.approx((9 + 18) / (5 * math.sqrt(9 + 20.25 + 1)), rel=1e-15)
    twice = update + update_of(a, a)
    assert (twice.numel, twice.changed, twice.sq_norm_a, twice.max_change) == (8, 2, 50.0, 1.0)
    assert (update + update).max_change == 1.0
    assert math.isnan(Update().relative_change)


def test_what_mxfp4_sees_by_hand() -> None:
    """m = 6 in both, so the scale is 1 in both: steps are .5 below 2, 1 below 4, then 2."""
    a, b = torch.zeros(1, 32), torch.zeros(1, 32)
    a[0, :6] = torch.tensor([6.0, 1.0, 1.25, 3.0, 4.5, 0.125])
    b[0, :6] = torch.tensor([6.0, 1.125, 1.375, 3.75, 4.5, -0.125])
    # Q(a):                  6    1     1 (tie)  3    4    0         Q(b): 6, 1, 1.5, 4, 4, −0
    # |d|:                   0    1/8   1/8      3/4  0    1/4       half a step: -, 1/4, 1/4, 1/2, -, 1/4
    s = seen(a, b, "mxfp4")
    assert s.codes_changed == 3  # 1 → 1.5, 3 → 4, 0 → −0
    assert (s.scales_changed, s.blocks, s.values_changed) == (0, 1, 2)
    assert (s.sq_below, s.changed_below) == (2 / 64, 2)
    assert s.sq_unseen == 1 / 64 + 1 / 16
    assert s.sq_quantized_change == 0.5**2 + 1
    assert s.dot_quantized_change == 0.5 / 8 + 0.75


def test_a_scale_that_changes_moves_values_and_codes() -> None:
    """m from 6 to 7: the scale doubles. 1.5 stays 1.5 as a value, with another code; 0.5 goes to 0 (a tie)."""
    a = torch.zeros(1, 32)
    a[0, :3] = torch.tensor([6.0, 1.5, 0.5])
    b = a.clone()
    b[0, 0] = 7.0
    s = seen(a, b, "mxfp4")  # Q(b) / 2: 3.5 → 4 (tie to even), .75 → 1 (tie to even), .25 → 0 (tie)
    assert (s.scales_changed, s.codes_changed, s.values_changed) == (1, 3, 3)
    assert s.sq_quantized_change == 2.0**2 + 0.5**2 + 0.5**2
    assert s.sq_unseen == 0.0


@pytest.mark.parametrize("element", [E2M1, E4M3])
def test_the_spacing_of_a_grid(element: ElementFormat) -> None:
    """Inside every interval of the grid, its length; at a grid point, that of the interval above."""
    values = element.values
    for low, high in itertools.pairwise(values):
        inside = torch.tensor([low, low + (high - low) / 3, low + (high - low) * 0.99], dtype=torch.float64)
        assert spacing(inside, element).tolist() == [high - low] * 3
    beyond = torch.tensor([values[-1], values[-1] * 1.5], dtype=torch.float64)
    assert spacing(beyond, element).tolist() == [values[-1] - values[-2]] * 2


# ---- by brute force --------------------------------------------------------------------------------------------------


def codes_of(q: QuantizedTensor) -> Tensor:
    """The element codes of every pass, [passes, ...]."""
    parts = []
    while q is not None:
        codes = q.codes
        if q.recipe.base != "mxfp8":
            codes = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)
        parts.append(codes)
        q = q.residual  # type: ignore[assignment]
    return torch.stack(parts)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dim", [-1, -2])
def test_counts_and_sums_agree_with_the_public_operations(recipe: str, dim: int) -> None:
    shape = (6, 200) if dim == -1 else (2, 200, 3)
    a = randn(*shape)
    b = a + 0.02 * randn(*shape, seed=1)
    b.view(-1)[::3] = a.view(-1)[::3]
    s = seen(a, b, recipe, dim)
    p, q = (fake_quantize(v, recipe, dim=dim).double() for v in (a, b))
    d = b.double() - a.double()
    assert s.values_changed == int((p != q).sum()) > 0
    assert s.blocks == 6 * -(-200 // (16 if recipe.startswith("nv") else 32))
    assert s.sq_unseen == pytest.approx(float((d[p == q] ** 2).sum()), rel=1e-12)
    assert s.sq_quantized_change == pytest.approx(float(((q - p) ** 2).sum()), rel=1e-12)
    assert s.dot_quantized_change == pytest.approx(float(((q - p) * d).sum()), rel=1e-12)
    if recipe == "mxfp4:ideal":
        assert (s.codes_changed, s.scales_changed, s.sq_below, s.changed_below) == (None,) * 4
        return
    first, second = (codes_of(quantize(v, recipe, dim=dim)) for v in (a, b))
    assert s.codes_changed == int((first != second).any(0).sum()) > 0
    if recipe == "mxfp4+of":
        assert s.sq_below is None and s.changed_below is None
        return
    # The step at every element: the distance of the two grid points around it, found by rounding to either side.
    step = grid_steps(a.movedim(dim, -1), recipe).movedim(-1, dim)
    below = d.abs() < step / 2
    assert s.changed_below == int((below & (d != 0)).sum()) > 0
    assert s.sq_below == pytest.approx(float((d[below] ** 2).sum()), rel=1e-12)


def grid_steps(x: Tensor, recipe: str) -> Tensor:
    """float64 [..., K]: element by element from the block's stored scale and the list of grid values."""
    q = quantize(x.contiguous(), recipe)
    values = (E4M3 if recipe == "mxfp8" else E2M1).values
    block = 16 if recipe.startswith("nv") else 32
    out = torch.empty(x.shape, dtype=torch.float64)
    for row in torch.cartesian_prod(*(torch.arange(n) for n in x.shape[:-1])).view(-1, x.dim() - 1).tolist():
        at = tuple(row)
        for k in range(x.shape[-1]):
            code = int(q.scales[at][k // block])
            if q.tensor_scale is not None:
                scale = float(torch.tensor(code, dtype=torch.uint8).view(torch.float8_e4m3fn).float() * q.tensor_scale)
            elif recipe == "mxfp4:e8m3":
                scale = 2.0 ** ((code >> 3) - 127) * (1 + (code & 7) / 8)
            else:
                scale = 2.0 ** (code - 127)
            if q.macro_mantissas is not None:
                scale /= (256 + int(q.macro_mantissas[at][k // 128])) / 256
            i = sum(v <= abs(float(x[at][k])) / scale for v in values[1:-1])
            out[(*at, k)] = (values[i + 1] - values[i]) * scale
    return out


# ---- whole checkpoints -----------------------------------------------------------------------------------------------


@pytest.fixture
def two(tmp_path: Path) -> tuple[Checkpoint, Checkpoint]:
    data = {
        Q: randn(300, 96),
        DOWN: randn(40, 160, seed=1),
        f"{EXPERTS}.gate_up_proj": randn(2, 256, 192, seed=2),
        f"{EXPERTS}.down_proj": randn(2, 96, 256, seed=3),
    }
    moved = {k: v + 0.01 * randn(*v.shape, seed=9) for k, v in data.items()}
    return (
        write(tmp_path / "a", {k: v.to(torch.bfloat16) for k, v in data.items()}),
        write(tmp_path / "b", moved),
    )


def test_fingerprints_are_those_of_two_scans(
    two: tuple[Checkpoint, Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In several ranges a weight, NVFP4 under the whole weight's scale; and ranges change no count."""
    a, b = two
    recipes = ("mxfp4", "mxfp4+of", "nvfp4")
    whole = changes(a, b, recipes)
    monkeypatch.setattr("mxrl.scan_tasks.ELEMENTS", 1 << 14)
    result = changes(a, b, recipes)
    first, second = scan(a, recipes, baselines=()), scan(b, recipes, baselines=())
    assert [t.pair.weight.name for t in result.tensors] == [w.name for w in a.weights]
    for i, t in enumerate(result.tensors):
        for r in recipes:
            assert t.seen[r].a == first.tensors[i].stats[r]
            assert t.seen[r].b == second.tensors[i].stats[r]
            for name in ("codes_changed", "scales_changed", "blocks", "values_changed", "changed_below"):
                assert getattr(t.seen[r], name) == getattr(whole.tensors[i].seen[r], name), (r, name)
            assert t.seen[r].sq_unseen == pytest.approx(whole.tensors[i].seen[r].sq_unseen, rel=1e-12)
        assert t.update.changed == whole.tensors[i].update.changed
    update, total = result.total()
    assert update.numel == a.numel
    assert total["mxfp4"].a == first.total("mxfp4")
    assert result.kinds == ("q", "down", "experts.gate_up", "experts.down") and result.layers == (0, 1, 2)
    assert sum(result.total(kind)[0].changed for kind in result.kinds) == update.changed
    assert sum(result.total(layer=n)[1]["mxfp4"].values_changed for n in result.layers) == total["mxfp4"].values_changed


def test_a_checkpoint_and_itself(two: tuple[Checkpoint, Checkpoint]) -> None:
    a, _ = two
    update, total = changes(a, a, ["nvfp4"]).total()
    assert (update.changed, update.sq_change, update.relative_change) == (0, 0.0, 0.0)
    assert update.cos == pytest.approx(1, rel=1e-15)
    for s in total.values():
        assert (s.codes_changed, s.scales_changed, s.values_changed, s.sq_quantized_change) == (0, 0, 0, 0.0)
        assert s.a == s.b and s.a.sq_error > 0


def test_the_work_is_told_in_bytes(two: tuple[Checkpoint, Checkpoint]) -> None:
    a, b = two
    stored = sum(w.nbytes for c in two for w in c.weights)
    for recipes, passes in ((["mxfp4"], 1), (["nvfp4"], 2)):
        told: list[float] = []
        changes(a, b, recipes, progress=told.append)
        assert passes_over(recipes) == passes
        assert sum(told) == passes * stored


def test_nan_in_either(tmp_path: Path) -> None:
    data = {Q: randn(40, 64), DOWN: randn(40, 64, seed=1)}
    a, broken = write(tmp_path / "a", data), {k: v.clone() for k, v in data.items()}
    broken[DOWN][1, 1] = float("nan")
    b = write(tmp_path / "b", broken)
    for pair, where in (((a, b), "b"), ((b, a), "b")):
        with pytest.raises(NonFiniteError, match=rf"tensor '{DOWN}' has 1 NaN .* in {where}; --on-nonfinite skip"):
            changes(*pair)
        result = changes(*pair, on_nonfinite="skip")
        assert [t.pair.weight.name for t in result.tensors] == [Q]
        assert [s.weight.name for s in result.skipped] == [DOWN]


def test_error_stats_of_a_are_untouched_by_b(tmp_path: Path) -> None:
    x = randn(40, 64)
    a, b = write(tmp_path / "a", {Q: x}), write(tmp_path / "b", {Q: 2 * x})
    (t,) = changes(a, b, ["mxfp4"]).tensors
    assert t.seen["mxfp4"].a == error_stats(x)
    assert t.seen["mxfp4"].scales_changed == t.seen["mxfp4"].blocks == 80  # every scale doubles,
    assert t.seen["mxfp4"].codes_changed == 0  # and no code moves

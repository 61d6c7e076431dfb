"""The decomposition against the scalar oracle and its own identities: exact where it says exact.

The reference tables (section 2 of the numerics) are in test_reference_values.py.
"""

from __future__ import annotations

import json
import math
from fractions import Fraction

import pytest
import torch
from edge_cases import edge_cases
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import scalar
from oracles.bits import assert_same, oracle, rows_of

from mxrl import ErrorStats, Recipe, decompose, fake_quantize, inject
from mxrl.decompose import error_stats
from mxrl.formats import MXFP8, NVFP4
from mxrl.recipes import RecipeError

RECIPES = (
    "mxfp4",
    "mxfp4:floor",
    "mxfp4:e8m3",
    "mxfp4:ideal",
    "mxfp8",
    "nvfp4",
    "nvfp4:4over6",
    "mxfp4+mbs",
    "mxfp4+of",
)
GUARANTEED = (
    "mxfp4", "mxfp4:e8m1", "mxfp4:e8m3", "mxfp4:e8m8", "mxfp4+mbs", "mxfp4+mbs:search16", "mxfp4+mbs:search256",
    "mxfp8",
)  # fmt: skip
NOT_GUARANTEED = ("mxfp4:floor", "mxfp4:even", "mxfp4+mbs:joint", "mxfp4+of", "mxfp4:floor+mbs", "mxfp4:even+of:1")
QUICK = settings(max_examples=60, deadline=None, derandomize=True)
lists = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=70)


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def check(x: torch.Tensor, text: str, what: str) -> None:
    """Every component of every element, the mask, and every statistic."""
    recipe = Recipe.parse(text)
    quantized, parts_of = oracle(x, recipe)
    parts = scalar.decompose(rows_of(x), rows_of(quantized), recipe.base, "float32")
    got = decompose(x, text)
    assert got.mask.reshape(-1).tolist() == [d for row in parts.mask for d in row], what
    for name in ("scale", "deadzone", "grid"):
        flat = getattr(got, name).reshape(-1).tolist()
        want = [v for row in getattr(parts, name) for v in row]
        for g, w in zip(flat, want, strict=True):
            assert math.isnan(g) if w is None else Fraction(g) == w, f"{what}: {name}"
    check_stats(got.stats, x, quantized, parts, parts_of, recipe, what)
    assert error_stats(x, text) == got.stats, what


def check_stats(stats, x, quantized, parts, parts_of, recipe, what):
    flat = [
        (Fraction(a), Fraction(b), s, d, g, inside)
        for a, b, s, d, g, inside in zip(
            x.double().flatten().tolist(),
            quantized.double().flatten().tolist(),
            *([v for row in part for v in row] for part in (parts.scale, parts.deadzone, parts.grid, parts.mask)),
            strict=True,
        )
        if s is not None
    ]
    sums = {
        "sq_norm": [a * a for a, b, s, d, g, i in flat],
        "dot_q_x": [a * b for a, b, s, d, g, i in flat],
        "sq_error": [(b - a) ** 2 for a, b, s, d, g, i in flat],
        "sq_scale": [s * s for a, b, s, d, g, i in flat],
        "sq_deadzone": [d * d for a, b, s, d, g, i in flat],
        "sq_grid": [g * g for a, b, s, d, g, i in flat],
        "dot_scale_grid": [s * g for a, b, s, d, g, i in flat],
        "dot_scale_deadzone": [s * d for a, b, s, d, g, i in flat],
        "dot_deadzone_grid": [d * g for a, b, s, d, g, i in flat],
        "sq_error_deadzone": [(b - a) ** 2 for a, b, s, d, g, i in flat if i],
        "sq_error_elsewhere": [(b - a) ** 2 for a, b, s, d, g, i in flat if not i],
    }
    for name, terms in sums.items():
        # relative to the sum of magnitudes: a dot product may cancel; squares below float64's range may vanish
        size = float(sum(abs(t) for t in terms))
        assert abs(getattr(stats, name) - float(sum(terms))) <= 1e-12 * size + 1e-300, f"{what}: {name}"
    assert stats.numel == len(flat), what
    assert stats.deadzone_count == sum(i for *_, i in flat), what
    assert stats.exact_zero_count == sum(a == 0 for a, *_ in flat), what
    assert stats.deadzone_nonzero_count == sum(i and b != 0 for a, b, s, d, g, i in flat), what

    # blocks: delta = log2(s / s*), s = the stored scale over MBS's p; zero and clamped blocks apart
    size = 16 if recipe.base == "nvfp4" else 32
    zeros = clamped = broken = 0
    deltas = []
    k = int(recipe.rule[3:]) if recipe.rule.startswith("e8m") else 0
    for r, row in enumerate(rows_of(x)):
        for b in range(0, len(row), size):
            xs, block = row[b : b + size], parts_of.first.blocks[r][b // size]
            if not scalar.finite(xs):
                broken += 1
                continue
            m = scalar.largest(xs)
            if m == 0:
                zeros += 1
                continue
            star = m / (448 if recipe.base == "mxfp8" else 6)
            if recipe.rule == "ideal":
                s = star
            elif recipe.base == "nvfp4":
                s = Fraction(scalar.mul(float(scalar.E4M3[block.scale]), parts_of.first.tensor_scale, scalar.FLOAT32))
            else:
                s = (1 + Fraction(block.scale % 2**k, 2**k)) * scalar.pow2((block.scale >> k) - 127)
                p = Fraction(256 + parts_of.first.mantissas[r][b // recipe.macro], 256) if recipe.mbs else 1
                below = p * star / 2 if recipe.rule in ("floor", "even") else p * star  # how small s may get by rule
                if block.scale >> k == 0 and below < scalar.pow2(-127) and wanted_exponent(m * p, recipe) < -127:
                    clamped += 1
                    continue
                s = s / p
            deltas.append(math.log2(s / star) if s else -math.inf)
    assert (stats.zero_blocks, stats.nonfinite_blocks) == (zeros, broken), what
    assert (stats.clamped_blocks, stats.delta_count) == (clamped, len(deltas)), what
    assert sum(stats.delta_hist) == len(deltas), what
    if all(map(math.isfinite, deltas)):
        assert stats.delta_sum == pytest.approx(math.fsum(deltas), rel=1e-12, abs=1e-10), what
        assert stats.delta_sq_sum == pytest.approx(math.fsum(d * d for d in deltas), rel=1e-9, abs=1e-10), what
        assert stats.gamma_sum == pytest.approx(math.fsum(2**d for d in deltas), rel=1e-12), what


def wanted_exponent(m: Fraction, recipe: Recipe) -> int:
    """The exponent before it is clamped: that of the same block 200 binades up, less 200."""
    if recipe.rule.startswith("e8m"):
        return (scalar.e8m_scale(m * scalar.pow2(150), int(recipe.rule[3:]))[1] >> int(recipe.rule[3:])) - 127 - 150
    return scalar.mx_exponent(m * scalar.pow2(150), recipe.base, recipe.rule) - 150


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("text", RECIPES)
def test_edge_cases(text, dtype):
    for name, x in edge_cases(dtype):
        if name.startswith("ragged_") and name not in ("ragged_1", "ragged_33", "ragged_48"):
            continue
        check(x.float(), text, f"{text} {name}")


@pytest.mark.parametrize(
    "text", ["mxfp4:even", "mxfp4:e8m1", "mxfp4:e8m8", "mxfp4+mbs:joint", "mxfp4+mbs:search16+of:1"]
)
def test_random(text):
    check(gaussian(2, 170, seed=1) * 0.02, text, text)


@given(lists, st.sampled_from((*RECIPES, *GUARANTEED, *NOT_GUARANTEED)))
@QUICK
def test_components_sum_to_the_error_exactly(values, text):
    """x + e_scale + e_dz + e_grid == Q(x), for every element, in exact arithmetic and in float64."""
    x = torch.tensor(values)
    d = decompose(x, text)
    q = fake_quantize(x, text).double()
    for a, s, z, g, t, b in zip(*(v.tolist() for v in (x, d.scale, d.deadzone, d.grid, d.total, q)), strict=True):
        assert Fraction(a) + Fraction(s) + Fraction(z) + Fraction(g) == Fraction(b)
        assert Fraction(a) + Fraction(t) == Fraction(b)
    assert ((x.double() + (d.scale + d.deadzone + d.grid)) == q).all()


@pytest.mark.parametrize("text", GUARANTEED)
def test_orthogonal_exactly(text):
    """Zero on the nose, not small: the supports are disjoint."""
    for x in (
        gaussian(64, 1024),
        gaussian(64, 1024).to(torch.bfloat16),
        gaussian(32, 100) * 1e-38,
        gaussian(8, 129) * 5e37,
    ):
        d = decompose(x, text)
        assert d.orthogonal
        assert d.stats.dot_scale_deadzone == 0 and d.stats.dot_deadzone_grid == 0
        assert (d.scale[d.mask] == 0).all() and (d.grid[d.mask] == 0).all()
        assert (d.deadzone[~d.mask] == 0).all()
        assert d.stats.deadzone_nonzero_count == 0


@pytest.mark.parametrize("text", [*NOT_GUARANTEED, "nvfp4"])
def test_orthogonality_is_not_promised_where_it_fails(text):
    d = decompose(gaussian(64, 1024), text)
    assert not d.orthogonal
    assert d.stats.dot_deadzone_grid == 0  # always: one is zero on D, the other off D
    if text != "nvfp4:4over6":
        assert d.stats.dot_scale_deadzone != 0, "this data was to show the failure"


def deadzone_edges(n: int, ratio: int = 24) -> torch.Tensor:
    """n blocks with a random maximum m and the largest float32 strictly below m / ratio."""
    m = torch.rand(n, generator=torch.Generator().manual_seed(0)) + 1
    edge = (m.double() / ratio).float()
    edge = torch.where(edge.double() * ratio >= m.double(), torch.nextafter(edge, torch.zeros(())), edge)
    x = torch.zeros(n, 32)
    x[:, 0], x[:, 1] = m, edge
    return x


@pytest.mark.parametrize("text", [*(t for t in GUARANTEED if "256" not in t), "mxfp4:e8m8+mbs", "mxfp4:ideal"])
def test_orthogonal_at_the_very_edge_of_the_deadzone(text):
    """There p·x and p·m are rounded to float32 apart; under a ceil there is room enough, whatever the prescale."""
    x = deadzone_edges(20000, 448 * 1024 if text == "mxfp8" else 24)
    for shape in (x, x.view(-1, 128)):
        d = decompose(shape, text)
        assert d.orthogonal and d.mask.reshape(-1, 32)[:, 1].all()
        assert d.stats.dot_scale_deadzone == 0 and d.stats.deadzone_nonzero_count == 0


def test_ideal_after_a_prescale_promises_nothing():
    """fl(p·x) / (fl(p·m) / 6) may pass 1/4 where x / (m / 6) does not: 3 % of these."""
    d = decompose(deadzone_edges(20000), "mxfp4:ideal+mbs")
    assert d.stats.deadzone_nonzero_count > 0 and d.stats.dot_scale_deadzone != 0
    assert not d.orthogonal


def test_a_callable_is_never_promised_orthogonal():
    assert not decompose(gaussian(4, 64), lambda t: fake_quantize(t)).orthogonal


@pytest.mark.parametrize("text", [*RECIPES, "mxfp4:even", "mxfp4+mbs:joint", "mxfp4+of:1"])
def test_the_terms_add_up_to_T(text):
    s = error_stats(gaussian(64, 512) * 0.02, text)
    cross = s.dot_scale_grid + s.dot_scale_deadzone + s.dot_deadzone_grid
    assert s.sq_scale + s.sq_deadzone + s.sq_grid + 2 * cross == pytest.approx(s.sq_error, rel=1e-12)
    assert s.sq_error_deadzone + s.sq_error_elsewhere == pytest.approx(s.sq_error, rel=1e-12)
    assert s.excess == s.sq_error - s.floor


def test_ideal_has_no_scale_error():
    s = error_stats(gaussian(64, 512), "mxfp4:ideal")
    assert s.sq_scale == 0 and s.excess == pytest.approx(0, abs=1e-9)
    assert s.delta_mean == pytest.approx(0, abs=1e-12) and s.gamma_mean == pytest.approx(1)


# --- statistics: merging, streaming, names --------------------------------------------------------------------------

COUNTS = (
    "numel", "deadzone_count", "exact_zero_count", "zero_blocks", "clamped_blocks", "nonfinite_blocks", "delta_count",
    "delta_hist", "deadzone_nonzero_count",
)  # fmt: skip


@pytest.mark.parametrize("text", ["mxfp4", "mxfp4+mbs", "mxfp4+of", "mxfp8"])
def test_parts_merge_to_the_whole(text):
    x = gaussian(37, 300, seed=2)
    x[3, 10], x[5, :64], x[9, 4] = math.nan, 0, math.inf
    whole = error_stats(x, text)
    for cuts in ((1, 36), (5, 5, 27), (37,)):
        merged = sum((error_stats(part, text) for part in x.split(cuts)), ErrorStats.zero())
        for name, value in whole.to_dict().items():
            got = merged.to_dict()[name]
            if name in COUNTS:
                assert got == value, name
            else:
                assert got == pytest.approx(value, rel=1e-12, abs=1e-12 * whole.sq_error), name
    assert whole.nonfinite_blocks == 2 and whole.zero_blocks == 2


def test_chunks_and_threads_do_not_show():
    """More than one chunk of rows: the same sums bit for bit on one thread and on two."""
    x = gaussian(40, 65536, seed=3)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = error_stats(x)
        torch.set_num_threads(2)
        two = error_stats(x)
    finally:
        torch.set_num_threads(threads)
    assert one == two
    assert one == decompose(x).stats
    assert one.sq_error == pytest.approx(((fake_quantize(x).double() - x.double()) ** 2).sum().item(), rel=1e-12)


def test_names_and_round_trip():
    """The names are the ones of the JSON files; others build on them."""
    fixed = {
        "numel", "sq_norm", "dot_q_x", "sq_error", "sq_scale", "sq_deadzone", "sq_grid", "dot_scale_grid",
        "dot_scale_deadzone", "dot_deadzone_grid", "deadzone_count", "exact_zero_count", "zero_blocks",
        "clamped_blocks", "delta_count", "delta_sum", "delta_sq_sum", "gamma_sum", "delta_hist", "sq_error_deadzone",
        "sq_error_elsewhere", "deadzone_nonzero_count",
    }  # fmt: skip
    s = error_stats(gaussian(8, 128))
    assert fixed <= set(s.to_dict())
    assert ErrorStats.from_dict(json.loads(json.dumps(s.to_dict()))) == s
    assert s + ErrorStats.zero() == s
    for name in (
        "rel_mse",
        "floor",
        "excess",
        "cos_scale_grid",
        "deadzone_fraction",
        "delta_mean",
        "delta_var",
        "gamma_mean",
    ):
        assert math.isfinite(getattr(s, name)), name
    with pytest.raises(AttributeError):
        s.numel = 3  # frozen


def test_derived_figures_of_nothing_are_nan():
    s = ErrorStats.zero()
    assert all(
        math.isnan(v) for v in (s.rel_mse, s.cos_scale_grid, s.deadzone_fraction, s.delta_mean, s.delta_var, s.gain)
    )
    assert error_stats(torch.zeros(0, 32)) == s
    assert error_stats(torch.zeros(3, 0)) == s
    assert decompose(torch.zeros(3, 0)).scale.shape == (3, 0)


def test_any_dim():
    x = gaussian(3, 40, 5, seed=4)
    for dim in (0, 1, 2, -2):
        here, there = decompose(x, "mxfp4+mbs", dim=dim), decompose(x.movedim(dim, -1).contiguous(), "mxfp4+mbs")
        assert here.stats == there.stats
        for name in ("scale", "deadzone", "grid", "total", "mask"):
            assert getattr(here, name).shape == x.shape
            assert_same(getattr(here, name).movedim(dim, -1).contiguous(), getattr(there, name), name)
        assert error_stats(x, "mxfp4+mbs", dim=dim) == there.stats


def test_poisoned_blocks_are_counted_and_left_out():
    clean, x = gaussian(2, 96, seed=5), gaussian(2, 96, seed=5)
    x[0, 40] = math.nan
    d = decompose(x)
    assert d.total[0, 32:64].isnan().all() and d.total.isnan().sum() == 32
    s = d.stats
    assert s.nonfinite_blocks == 1 and s.numel == 160
    rest = error_stats(clean[1]) + error_stats(clean[0, :32]) + error_stats(clean[0, 64:])
    assert s.sq_error == pytest.approx(rest.sq_error, rel=1e-12) and s.deadzone_count == rest.deadzone_count


def test_float64_and_half_precision():
    x = gaussian(4, 64, seed=6)
    for dtype in (torch.bfloat16, torch.float16):
        low = x.to(dtype)
        assert decompose(low).stats == decompose(low.float()).stats
        assert_same(decompose(low, "mxfp4+mbs").scale, decompose(low.float(), "mxfp4+mbs").scale)
    d = decompose(x.double() * 1e-60)
    assert d.scale.dtype == torch.float64 and d.stats.clamped_blocks == 8


def test_float16_takes_the_value_that_fits():
    """60000 becomes 49152 in fp16 (65536 is Inf there): the components lead to that value and not beyond it."""
    x = torch.tensor([60000.0, -3.0, 1.0], dtype=torch.float16)
    assert decompose(x).total[0] == 49152.0 - 60000.0
    assert_same(inject(x, {"scale", "deadzone", "grid"}), fake_quantize(x))


# --- other quantizers -----------------------------------------------------------------------------------------------


def test_a_callable_is_split_like_a_recipe():
    x = gaussian(8, 96, seed=7)
    for text, fmt in (("mxfp4", None), ("mxfp4:floor", None), ("nvfp4", NVFP4), ("mxfp8", MXFP8)):
        ours, foreign = decompose(x, text), decompose(x, lambda t, r=text: fake_quantize(t, r), format=fmt)
        for name in ("scale", "deadzone", "grid", "total", "mask"):
            assert_same(getattr(foreign, name), getattr(ours, name), name)
        assert foreign.stats.sq_scale == ours.stats.sq_scale and foreign.stats.delta_count == 0


def test_any_callable():
    """C = rounding to integers: e_scale = C - Q*, and on D the share that is no longer zero."""
    x = torch.tensor([6.0, 0.2, -0.2, 0.9, 3.3])
    d = decompose(x, lambda t: torch.where(t.abs() < 0.25, torch.ones_like(t), t.round()))
    # s* = 1, D = {.2, -.2}: Q* = 6, 0, 0, 1, 3 (3.3 -> 3)
    assert d.mask.tolist() == [False, True, True, False, False]
    assert d.scale.tolist() == [0, 1, 1, 0, 0]
    assert d.stats.deadzone_nonzero_count == 2 and d.stats.deadzone_count == 2
    assert d.stats.sq_error_deadzone == pytest.approx(0.8**2 + 1.2**2, rel=1e-6)
    assert d.stats.dot_scale_deadzone == pytest.approx(-0.2 + 0.2, abs=1e-7)
    exact = decompose(x, "bf16")
    assert (exact.total == 0).all() and exact.stats.sq_error == 0


def test_a_callable_must_keep_the_shape():
    with pytest.raises(ValueError, match="shape"):
        decompose(gaussian(2, 32), lambda t: t[:1])


def test_errors():
    with pytest.raises(ValueError, match="0-d"):
        decompose(torch.tensor(1.0))
    with pytest.raises(ValueError, match="mxfp5"):
        decompose(gaussian(2, 32), "mxfp5")
    with pytest.raises(TypeError):
        decompose(torch.ones(2, 32, dtype=torch.int64))


# --- injection ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("text", ["mxfp4", "mxfp4:floor", "mxfp4+mbs+of", "nvfp4"])
def test_inject(text, dtype):
    x = gaussian(4, 96, seed=8).to(dtype)
    x[0, :3] = torch.tensor([0.0, -0.0, -1e-3])
    d = decompose(x, text)
    assert_same(inject(x, (), recipe=text), x)
    whole = inject(x, {"scale", "deadzone", "grid"}, recipe=text)
    assert_same(whole, fake_quantize(x, text))
    for name in ("scale", "deadzone", "grid"):
        assert (inject(x, {name}, recipe=text) == (x.double() + getattr(d, name)).to(dtype)).all()
    left_out = inject(x, ["scale", "grid"], recipe=text)
    assert (left_out == (x.double() + (d.scale + d.grid)).to(dtype)).all()


def test_inject_matched_energy():
    x = gaussian(64, 256, seed=9)
    d = decompose(x)

    def noise(seed):
        return inject(x, {"scale"}, energy_matched=True, generator=torch.Generator().manual_seed(seed)) - x

    assert noise(1).double().norm().item() == pytest.approx(
        d.scale.norm().item(), rel=1e-4
    )  # x + n is rounded to float32
    assert_same(noise(1), noise(1))
    assert (noise(1) != noise(2)).any()
    kurtosis = (noise(3) ** 4).mean() / (noise(3) ** 2).mean() ** 2
    assert kurtosis == pytest.approx(3.0, abs=0.2)


@pytest.mark.parametrize("matched", [False, True])
def test_inject_poisons_a_block_with_a_nan_alone(matched):
    x = gaussian(4, 128, seed=10)
    x[1, 5], x[3, 64] = math.nan, math.inf
    expected = torch.zeros(4, 128, dtype=torch.bool)
    expected[1, :32] = expected[3, 64:96] = True
    out = inject(x, {"scale"}, energy_matched=matched, generator=torch.Generator().manual_seed(0))
    assert torch.equal(out.isnan(), expected) and not out.isinf().any()
    assert_same(inject(x, (), energy_matched=matched), x)


@pytest.mark.parametrize("text", ["mxfp4", "mxfp4:floor", "mxfp4+mbs+of", "nvfp4"])
def test_float64_components_are_rounded_and_all_of_them_are_the_quantizer(text):
    x = torch.randn(64, 96, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    d = decompose(x, text)
    torch.testing.assert_close(x + d.scale + d.deadzone + d.grid, fake_quantize(x, text), rtol=0, atol=2**-50)
    assert_same(inject(x, {"scale", "deadzone", "grid"}, recipe=text), fake_quantize(x, text))


def test_a_clamped_float64_scale_guarantees_nothing():
    x = torch.zeros(2, 32, dtype=torch.float64)
    x[0, :2] = torch.tensor([2.0**200, 2.0**190], dtype=torch.float64)
    d = decompose(x)
    assert d.stats.dot_scale_deadzone != 0 and not d.orthogonal
    assert_same(inject(x, {"scale", "deadzone", "grid"}), fake_quantize(x))
    assert decompose(x[1:]).orthogonal and decompose(x.float().nan_to_num(0)[1:]).orthogonal


def test_errors_say_whose_they_are():
    for function in (decompose, error_stats, inject):
        with pytest.raises(ValueError, match=f"^{function.__name__}: a 0-d tensor"):
            function(torch.tensor(1.0))
        with pytest.raises(RecipeError, match="None is no text"):
            function(gaussian(2, 32), recipe=None)
    with pytest.raises(TypeError, match="the quantizer gave a NoneType"):
        decompose(gaussian(2, 32), lambda x: None)
    with pytest.raises(TypeError, match="format='mxfp4'; possible: MXFP4"):
        decompose(gaussian(2, 32), lambda x: x, format="mxfp4")


def test_inject_errors():
    with pytest.raises(ValueError, match=r"unknown component 'gird'.*scale, deadzone, grid"):
        inject(gaussian(2, 32), {"gird"})

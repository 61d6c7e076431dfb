"""Block formats and element codes against OCP's tables and two other libraries, all codes."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import torch
from gfloat import decode_float
from gfloat.formats import format_info_ocp_e2m1, format_info_ocp_e4m3, format_info_ocp_e8m0
from oracles import scalar

from mxrl import formats
from mxrl.elements import decode, encode, floor_to_grid, round_to_grid
from mxrl.formats import E2M1, E4M3, FORMATS, MXFP4, MXFP8, NVFP4

ELEMENTS = [
    (E2M1, format_info_ocp_e2m1, ml_dtypes.float4_e2m1fn, scalar.E2M1),
    (E4M3, format_info_ocp_e4m3, ml_dtypes.float8_e4m3fn, scalar.E4M3),
]
IDS = ["e2m1", "e4m3"]


@pytest.mark.parametrize(("element", "gfloat_info", "ml_dtype", "grid"), ELEMENTS, ids=IDS)
def test_every_code(element, gfloat_info, ml_dtype, grid):
    bits = 1 + element.exponent_bits + element.mantissa_bits
    codes = np.arange(2**bits, dtype=np.uint8)
    theirs = codes.view(ml_dtype).astype(np.float64)
    ours = decode(torch.from_numpy(codes), element, torch.float64).numpy()
    for code in codes.tolist():
        by_gfloat = decode_float(gfloat_info, code).fval
        values = (ours[code], theirs[code], by_gfloat)
        assert all(map(math.isnan, values)) or len({(v, math.copysign(1, v)) for v in values}) == 1, code
    assert list(element.values) == [float(v) for v in grid]
    finite = codes[~np.isnan(ours)]
    back = encode(decode(torch.from_numpy(finite), element, torch.float32), element)
    assert back.tolist() == finite.tolist()


@pytest.mark.parametrize(("element", "gfloat_info", "ml_dtype", "grid"), ELEMENTS, ids=IDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_at_every_value_tie_and_neighbour(element, gfloat_info, ml_dtype, grid, dtype):
    points = [float(v) for v in grid]
    points += [(a + b) / 2 for a, b in itertools.pairwise(points)]
    a = torch.tensor(points, dtype=dtype)
    a = torch.cat(
        [a, torch.nextafter(a, torch.tensor(math.inf, dtype=dtype)), torch.nextafter(a, torch.zeros((), dtype=dtype))]
    )
    a = a[a <= element.max]
    want = [float(grid[scalar.nearest(scalar.Fraction(v), grid)]) for v in a.tolist()]
    assert round_to_grid(a, element).tolist() == want
    if dtype == torch.float32:  # ml_dtypes takes float64 through float32 and rounds twice
        assert a.numpy().astype(ml_dtype).astype(np.float64).tolist() == want
    below = [max(g for g in points[: len(grid)] if g <= v) for v in a.tolist()]
    assert floor_to_grid(a, element).tolist() == below
    assert floor_to_grid(torch.tensor([math.inf], dtype=dtype), element).item() == element.max


def test_block_formats():
    """OCP MX 1.0, table 1 and section 5; NVFP4."""
    assert (MXFP4.block, MXFP4.bits, MXFP4.q_max, MXFP4.q_min) == (32, 4.25, 6.0, 0.5)
    assert (MXFP8.block, MXFP8.bits, MXFP8.q_max, MXFP8.q_min) == (32, 8.25, 448.0, 2.0**-9)
    assert (NVFP4.block, NVFP4.bits, NVFP4.q_max, NVFP4.scale) == (16, 4.5, 6.0, "e4m3")
    assert MXFP4.deadzone_ratio == NVFP4.deadzone_ratio == 24
    assert MXFP8.deadzone_ratio == 448 * 1024
    assert set(FORMATS) == {"mxfp4", "mxfp8", "nvfp4"}
    assert formats.MACRO == 128


def test_e8m0():
    """gfloat and ml_dtypes read our constants: 0 is 2^-127, 254 is 2^127, 255 is NaN."""
    assert decode_float(format_info_ocp_e8m0, 0).fval == 2.0**formats.E8M0_MIN_EXPONENT
    assert decode_float(format_info_ocp_e8m0, 254).fval == 2.0**formats.E8M0_MAX_EXPONENT
    assert math.isnan(decode_float(format_info_ocp_e8m0, formats.E8M0_NAN).fval)
    assert decode_float(format_info_ocp_e8m0, formats.E8M0_BIAS).fval == 1.0


def test_formats_are_frozen_and_need_no_torch():
    with pytest.raises(AttributeError):
        MXFP4.block = 16
    code = (
        "import sys; sys.modules['mxrl'] = package = type(sys)('mxrl'); package.__path__ = [sys.argv[1]]\n"
        "import mxrl.formats, mxrl.recipes\n"
        "assert 'torch' not in sys.modules"
    )
    where = formats.__file__.rsplit("/", 1)[0]
    subprocess.run([sys.executable, "-c", code, where], check=True)

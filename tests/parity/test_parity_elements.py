"""gfloat and ml_dtypes as element codecs, given our scale: every element of every format."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from gfloat import RoundMode, encode_float, round_ndarray
from gfloat.formats import format_info_ocp_e2m1, format_info_ocp_e4m3

from mxrl import fake_quantize, quantize
from mxrl.formats import FORMATS

TYPES = {
    "mxfp4": (format_info_ocp_e2m1, ml_dtypes.float4_e2m1fn),
    "mxfp4:floor": (format_info_ocp_e2m1, ml_dtypes.float4_e2m1fn),
    "mxfp4:e8m3": (format_info_ocp_e2m1, ml_dtypes.float4_e2m1fn),
    "nvfp4": (format_info_ocp_e2m1, ml_dtypes.float4_e2m1fn),
    "mxfp8": (format_info_ocp_e4m3, ml_dtypes.float8_e4m3fn),
}


def scales_of(packed) -> np.ndarray:
    """The stored scales as float32, decoded here."""
    rule, codes = packed.recipe.rule, packed.scales.numpy()
    if packed.recipe.base == "nvfp4":
        return codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * packed.tensor_scale.numpy()
    if rule.startswith("e8m"):
        k = int(rule[3:])
        return np.ldexp(1 + (codes % 2**k) / 2**k, (codes >> k) - 127).astype(np.float32)
    return codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)


@pytest.mark.parametrize("text", TYPES)
def test_elements(text):
    info, dtype = TYPES[text]
    g = torch.Generator().manual_seed(3)
    for x in (torch.randn(64, 512, generator=g), (torch.randn(64, 512, generator=g) * 0.02).to(torch.bfloat16).float()):
        packed = quantize(x, text)
        scale = np.repeat(scales_of(packed), FORMATS[packed.recipe.base].block, axis=-1)
        quotient = x.numpy() / scale  # float32, one rounding
        by_gfloat = round_ndarray(info, quotient.astype(np.float64), RoundMode.TiesToEven, sat=True)
        clipped = np.clip(quotient, -info.max, info.max)  # ml_dtypes' E4M3 turns what overflows into NaN
        by_ml_dtypes = clipped.astype(dtype)
        codes = packed.codes.numpy()
        if packed.recipe.base != "mxfp8":
            codes = np.stack([codes & 15, codes >> 4], -1).reshape(x.shape)
        assert (codes == by_ml_dtypes.view(np.uint8)).all()
        assert (by_gfloat == by_ml_dtypes.astype(np.float64)).all()
        values = by_ml_dtypes.astype(np.float32) * scale
        assert (fake_quantize(x, text).numpy() == values).all()


def test_ml_dtypes_reads_our_scales():
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(4))
    x[0, 0], x[1] = torch.nan, 0.0
    scales = quantize(x).scales.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    assert np.isnan(scales[0, 0]) and (scales[1] == 2.0**-127).all()
    peak = x[2:].unflatten(-1, (2, 32)).abs().amax(-1).numpy()
    assert ((peak / scales[2:] > 3) & (peak / scales[2:] <= 6)).all()


def test_gfloat_encodes_every_tie_as_we_do():
    values = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]
    packed = quantize(torch.tensor([values + [-v for v in values]]))
    codes = torch.stack([packed.codes & 15, packed.codes >> 4], -1).flatten().tolist()
    rounded = round_ndarray(
        format_info_ocp_e2m1, np.array(values + [-v for v in values]), RoundMode.TiesToEven, sat=True
    )
    assert codes == [encode_float(format_info_ocp_e2m1, v) for v in rounded.tolist()]

"""Shared, named data at the edges of the formats, for every implementation of the numerics.

    edge_cases(dtype)  -> [(name, tensor)]                  what must work, in that dtype; compare with oracles.scalar
    known_bytes(dtype) -> [(name, tensor, scales, codes)]   one block of plain mxfp4 with its bytes derived by hand

Names are stable: a test says `edge[ties]`. Values that a dtype can't hold are left out of its cases.
"""

from __future__ import annotations

import math

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def tensor(values: list, dtype: torch.dtype) -> torch.Tensor:
    """A list of numbers, or of rows (short ones are filled with zeros), exact in float64 and then rounded to dtype."""
    if values and isinstance(values[0], list):
        width = max(len(row) for row in values)
        values = [row + [0.0] * (width - len(row)) for row in values]
    return torch.tensor(values, dtype=torch.float64).to(dtype)


def above(value: float, dtype: torch.dtype) -> float:
    return _step(value, dtype, math.inf)


def below(value: float, dtype: torch.dtype) -> float:
    return _step(value, dtype, -math.inf)


def _step(value: float, dtype: torch.dtype, towards: float) -> float:
    """The neighbour of `value` in `dtype` (torch.nextafter has no float16 on every build, so by the bits)."""
    x = torch.tensor(value, dtype=dtype)
    if dtype == torch.float64:
        return math.nextafter(value, towards)
    ints = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}[dtype]
    away = (value > 0) == (towards > 0)
    return (x.view(ints) + (1 if away else -1)).view(dtype).item()


def exponents(dtype: torch.dtype) -> tuple[int, ...]:
    """Powers of two at which the boundaries of the scale rules are tried."""
    return (-12, -3, 0, 1, 5) if dtype == torch.float16 else (-120, -12, -3, 0, 1, 5, 100)


def edge_cases(dtype: torch.dtype) -> list[tuple[str, torch.Tensor]]:
    """Every named case in `dtype`, blocks along the last dimension, some shorter than a block."""
    info = torch.finfo(dtype)
    top, tiny, least = info.max, info.tiny, info.smallest_normal * info.eps
    if dtype == torch.float64:  # the formats' own range ends at 2^127 * 6: keep float64's within, its ends stand apart
        top, tiny, least = torch.finfo(torch.float32).max, 2.0**-126, 2.0**-149
    out: list[tuple[str, list | torch.Tensor]] = []

    def add(name: str, values: list | torch.Tensor) -> None:
        out.append((name, values))

    # element rounding: the largest value is 6, so the ceil scale is 1 and elements are rounded as they stand
    add("all_codes", [[*E2M1, *(-v for v in E2M1)] * 2])
    add("ties", [[6.0, *TIES, *(-v for v in TIES)]])
    add("above_ties", [[6.0, *(above(v, dtype) for v in TIES), *(-above(v, dtype) for v in TIES)]])
    add("below_ties", [[6.0, *(below(v, dtype) for v in TIES), *(-below(v, dtype) for v in TIES)]])
    add("above_codes", [[6.0, *(above(v, dtype) for v in E2M1[1:7])]])
    add("ties_scaled", [[v * 2.0**e for v in (6.0, *TIES, *(-t for t in TIES))] for e in exponents(dtype)])

    # scale boundaries: ceil at 6 * 2^e (f = 1.5), floor at 2^e, even and mxfp8 at 1.75 * 2^e
    for name, f in (("six", 1.5), ("one", 1.0), ("seven", 1.75), ("five", 1.25)):
        rows = []
        for e in exponents(dtype):
            m = f * 2.0**e
            for peak in (m, above(m, dtype), below(m, dtype)):
                rows.append([peak, -m / 2, m / 3, -m / 7, m / 24, m / 25, m / 4, m / 6, -m / 12])
        add(f"boundary_{name}", rows)
    rows = []
    for j in (1, 3, 5, 7, 31, 255):  # e8m{k}: maxima at and beside 6 (1 + j / 2^k), where the scale's mantissa steps
        for k in (1, 3, 5, 8):
            m = 6 * (1 + (j % 2**k) / 2**k) / 8
            rows += [[peak, m / 2, m / 5, -m / 9, m / 24] for peak in (m, above(m, dtype), below(m, dtype))]
    add("boundary_e8m", rows)

    # the deadzone's edge |x| < m / 24, strict: equal at m = 6; around it where m / 24 is no float
    add("deadzone_edge", [[6.0, 0.25, -0.25, above(0.25, dtype), below(0.25, dtype), below(-0.25, dtype)]])
    rows = []
    for m in (1.0, 1.1, 2.9, 5.0, 7.0, 11.0):
        m = torch.tensor(m, dtype=dtype).item()
        d = torch.tensor(m / 24, dtype=dtype).item()
        rows.append([m, d, above(d, dtype), below(d, dtype), -d, -above(d, dtype), -below(d, dtype)])
    add("deadzone_rounding", rows)

    # zeros
    add("zeros", torch.zeros(2, 64))
    add("negative_zeros", torch.full((1, 32), -0.0))
    add("signed_zeros", [[0.0, -0.0] * 16 + [1.0, -0.0, 0.0] + [-0.0] * 29])
    add("small_negatives", [[6.0, -0.1, -least, least, -0.0, 0.0]])
    add("zero_macro_block", torch.cat([torch.zeros(128), torch.ones(40)])[None])

    # the bottom of the range: subnormals, clamped scales
    add("least", [[least] * 3, [-least, least, 0.0], [6 * least, least, -3 * least]])
    add("subnormals", [[least * n for n in (1, 2, 3, 5, 7, 11, 100, -1, -6, -25)], [tiny, tiny / 2, -tiny / 4, least]])
    add("around_tiny", [[tiny * f, tiny / 3, -tiny / 5, least] for f in (0.75, 1.0, 1.5, 1.75, 2.0, 6.0, 12.0, 24.0)])
    if dtype != torch.float16:  # 2^-127 is the smallest scale: blocks with m / 6 at and below it
        rows = []
        for m in (6 * 2.0**-127, 6 * 2.0**-128, 3 * 2.0**-127, 2.0**-127, 2.0**-130, 12 * 2.0**-127):
            rows += [[peak, m / 2, m / 3, -m / 6, m / 24, -m / 4] for peak in (m, above(m, dtype), below(m, dtype))]
        add("least_scale", rows)
        add("tiny_beside_large", [[least, -tiny, 1.0, top, -(2.0**-60), 2.0**60]])
        add("tiny_block_beside_large", [[2.0**100] * 32 + [2.0**-120, -(2.0**-121)] * 16 + [least, 3 * least] * 16])

    # the top of the range: a grid value may overflow where the input does not
    add(
        "max",
        [
            [top, -top, top / 2, top / 3, -top / 5, top / 7],
            [below(top, dtype), top * 0.75, top * 0.8, -top * 0.9, 0.0, 1.0],
        ],
    )
    add("max_everywhere", torch.full((1, 160), top, dtype=torch.float64))
    if dtype == torch.float16:
        add("fp16_60000", [[60000.0, -60000.0, 57344.0, 57376.0, 49152.0, 65504.0], [60000.0, 1.0, 2.0, 3.0, 4.0, 5.0]])
    if dtype == torch.float64:
        big, small = torch.finfo(dtype).max, 5e-324
        add(
            "float64_beyond_the_scales",
            [[big, -big, 1.0, 2.0**126], [1e300, 1e-300, -1e200, small], [small, -small, 0.0, 1e-310]],
        )

    # not finite: only the block that holds it, whatever the row, the macro-block and the tensor
    block = [0.3, -1.0, 2.0, 5.0] * 8
    add("nan", [[*block[:7], math.nan, *block[8:], *block]])
    add("inf", [block + block[:31] + [math.inf]])
    add("negative_inf", [[*block[:1], -math.inf, *block[2:], *block[:9]]])
    add("poisoned_macro", [block + block[:3] + [math.nan, math.inf] + block[5:] + [v * 9 for v in block] + block[:20]])
    add("poisoned_ragged", [[*block, 1.0, math.inf, 2.0], [*block, 1.0, math.nan, 2.0]])
    add("all_nan", torch.full((1, 33), math.nan))
    add("inf_beside_max", [[math.inf] + [0.0] * 31 + [top, 1.0]])

    # MBS: the macro-block's maximum at the corners of align's two branches; ties between candidates
    corners = (1.0, 1.0 + info.eps, 1.25, 1.5, 1.5 + 2 * info.eps, 1.75, 2.0 - info.eps)
    add("macro_corners", torch.tensor([[f * 4.0] + [0.3, -1.7, 0.9] * 21 for f in corners], dtype=torch.float64))
    add("search_ties", torch.cat([torch.ones(32), torch.full((32,), 6.0), torch.zeros(64)])[None])

    # an outlier beside ordinary values; blocks of very different size (NVFP4's scale at its least)
    g = torch.Generator().manual_seed(1)
    outlier = torch.randn(2, 160, generator=g, dtype=torch.float64) * 0.05
    outlier[:, 5], outlier[:, 77] = 20.0, -35.0
    add("outliers", outlier)
    sizes = torch.tensor([1.0, 1e-2, 1e-4, 3e-6, 1e3, 5.0, 0.0, 1e-1], dtype=torch.float64).repeat_interleave(16)
    add("mixed_blocks", torch.randn(2, 128, generator=g, dtype=torch.float64) * sizes)

    # widths and shapes
    for width in (*range(1, 34), 48, 129):
        add(f"ragged_{width}", torch.randn(1, width, generator=g, dtype=torch.float64))
    add("width_896", torch.randn(1, 896, generator=g, dtype=torch.float64) * 0.02)
    add("one_dimension", torch.randn(70, generator=g, dtype=torch.float64))
    add("four_dimensions", torch.randn(2, 1, 2, 40, generator=g, dtype=torch.float64))
    add("empty_rows", torch.zeros(0, 32))
    add("empty_columns", torch.zeros(3, 0))
    add("empty", torch.zeros(0))
    return [(n, v.to(dtype) if isinstance(v, torch.Tensor) else tensor(v, dtype)) for n, v in out]


def known_bytes(dtype: torch.dtype) -> list[tuple[str, torch.Tensor, list[int], list[int]]]:
    """Plain mxfp4 of one short block, derived on paper: (name, [n], scale bytes, code bytes).

    A code is sign (8) | index into 0 .5 1 1.5 2 3 4 6; a byte is low nibble = even index. The scale byte is 127 + E.
    """
    out: list[tuple[str, list[float], list[int], list[int]]] = [
        # m = 6 = 1.5 * 2^2, f <= 1.5: E = 2 - 2 = 0. Each value is its own code: (0, .5) -> 0x10, (1, 1.5) -> 0x32, ...
        ("codes", list(E2M1), [127], [0x10, 0x32, 0x54, 0x76]),
        ("negative_codes", [-v for v in E2M1], [127], [0x98, 0xBA, 0xDC, 0xFE]),
        # ties go to the even mantissa, which is the even code:
        # .25 -> 0, .75 -> 1 (2), 1.25 -> 1 (2), 1.75 -> 2 (4), 2.5 -> 2 (4), 3.5 -> 4 (6), 5 -> 4 (6)
        ("ties", [*TIES, 6.0], [127], [0x20, 0x42, 0x64, 0x76]),
        # the float above 6: f > 1.5, E = 2 - 1 = 1, s = 2.
        # 6+ / 2 = 3+ -> 3 (5); 6 / 2 = 3 (5); 5 / 2 = 2.5, tie -> 2 (4); 1 / 2 (1)
        ("above_six", [above(6.0, dtype), 6.0, 5.0, 1.0], [128], [0x55, 0x14]),
        # m = 1 = 1.0 * 2^0: E = -2, s = 1/4. 1 -> 4 (6); -.5 -> -2 (0xC); .3 / s = 1.2 -> 1 (2); .06 / s = .24 -> 0 (0)
        ("one", [1.0, -0.5, 0.3, 0.06], [125], [0xC6, 0x02]),
        # m = 7 = 1.75 * 2^2: E = 1 (floor would clip at E = 0). 7 / 2 = 3.5, tie -> 4 (6); -7 -> 0xE; 3 / 2 = 1.5 (3)
        ("seven", [7.0, -7.0, 3.0], [128], [0xE6, 0x03]),
        # zeros: the scale's code is 0, +0 -> 0, -0 -> 8
        ("zeros", [0.0, -0.0, 0.0], [0], [0x80, 0x00]),
        # negative values that round to zero keep their sign: code 8
        ("to_negative_zero", [6.0, -0.1], [127], [0x87]),
    ]
    if dtype == torch.float16:
        # 60000 = 1.83 * 2^15: E = 14; 60000 / 2^14 = 3.66 -> 4, but 4 * 2^14 = 65536 is Inf in fp16: 3 (5);
        # 49152 is 3 * 2^14 (5)
        out.append(("fp16_60000", [60000.0, -60000.0, 49152.0], [141], [0xD5, 0x05]))
        # fp16's least subnormal, 2^-24: E = -26, code 6
        out.append(("fp16_least", [2.0**-24], [101], [0x06]))
    else:
        # 1.99 * 2^127: E = 126; x / s = 3.98 -> 4, but 4 * 2^126 overflows (float64's own range would hold it: 4 stays)
        top = torch.finfo(dtype if dtype != torch.float64 else torch.float32).max
        code = 6 if dtype == torch.float64 else 5
        out.append(("max", [top, -top], [253], [code | (code | 8) << 4]))
        # m = 6 * 2^-128 asks for E = -128, clamped to -127 (code 0): 6 / 2 = 3 (5); 3 * 2^-128 -> 1.5 (3)
        out.append(("clamped", [6 * 2.0**-128, 3 * 2.0**-128], [0], [0x35]))
        # m = 2^-129 = s / 4 is a tie between 0 and .5: even, 0; above it .5 (1)
        out.append(("half_least", [2.0**-129, 3 * 2.0**-130], [0], [0x10]))
    return [(name, tensor(values, dtype), scales, codes) for name, values, scales, codes in out]

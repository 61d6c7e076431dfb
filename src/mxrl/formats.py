"""Block formats as frozen data (no torch).

A *block format* is an element grid, a block size along the contraction axis, and a scale type:

    value = element · scale            MXFP4, MXFP8: scale = 2^E, one byte (E8M0) a block of 32
    value = element · scale · tensor   NVFP4: scale is E4M3, one byte a block of 16, and one float32 a tensor

Sources: OCP Microscaling Formats v1.0, tables 1-5 (E2M1, E4M3, E8M0); NVFP4 as NVIDIA's Blackwell documentation has it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

E8M0_BIAS = 127
E8M0_NAN = 255
E8M0_MIN_EXPONENT, E8M0_MAX_EXPONENT = -127, 127


@dataclass(frozen=True)
class ElementFormat:
    """A small float: sign, exponent and mantissa bits, no Inf.

    `max` is the largest finite value (given, because E4M3 spends its top code on NaN and E2M1 does not).
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max: float

    @property
    def bits(self) -> int:
        """Bits of a code, sign included: 4 are stored two to a byte."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal value; subnormals share it."""
        return 1 - self.bias

    @property
    def min(self) -> float:
        """The smallest positive value (q_min): one unit of the subnormal range."""
        return 2.0 ** (self.min_exponent - self.mantissa_bits)

    @property
    def values(self) -> tuple[float, ...]:
        """The non-negative values, indexed by code without the sign bit (NaN codes left out)."""
        out = []
        for code in range(2 ** (self.exponent_bits + self.mantissa_bits)):
            exponent, mantissa = divmod(code, 2**self.mantissa_bits)
            if exponent == 0:
                value = mantissa * self.min
            else:
                value = (2**self.mantissa_bits + mantissa) * 2.0 ** (exponent - self.bias - self.mantissa_bits)
            if value <= self.max:
                out.append(value)
        return tuple(out)


E2M1 = ElementFormat("e2m1", exponent_bits=2, mantissa_bits=1, bias=1, max=6.0)
E4M3 = ElementFormat("e4m3", exponent_bits=4, mantissa_bits=3, bias=7, max=448.0)


@dataclass(frozen=True)
class BlockFormat:
    """A block format: `block` elements along the contraction axis share one scale of type `scale`."""

    name: str
    element: ElementFormat
    block: int
    scale: Literal["e8m0", "e4m3"]
    bits: float = field(default=0.0)  # bits an element, scale included

    @property
    def q_max(self) -> float:
        return self.element.max

    @property
    def q_min(self) -> float:
        return self.element.min

    @property
    def deadzone_ratio(self) -> float:
        """D = {|x| · ratio < m_b}: below half the smallest grid value under the ideal scale m_b / q_max. E2M1: 24."""
        return 2 * self.q_max / self.q_min


MXFP4 = BlockFormat("mxfp4", E2M1, 32, "e8m0", 4 + 8 / 32)
MXFP8 = BlockFormat("mxfp8", E4M3, 32, "e8m0", 8 + 8 / 32)
NVFP4 = BlockFormat("nvfp4", E2M1, 16, "e4m3", 4 + 8 / 16)
FORMATS = {f.name: f for f in (MXFP4, MXFP8, NVFP4)}

MACRO = 128  # elements of a macro-block (arXiv 2603.08713): 4 MXFP4 blocks share one 8-bit mantissa

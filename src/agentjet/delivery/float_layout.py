"""Floating-point numbers as what they are on the wire: integers whose order is that of their values.

The distance between two numbers is counted in representable numbers (units in the last place), away from zero positive.
It is defined for every pattern of bits: -0.0 is next to 0.0, and infinities and NaNs are large magnitudes. So
`moved(base, distances(base, new))` is `new`, bit for bit.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.uint16 | np.uint32]


@dataclass(frozen=True, slots=True)
class FloatLayout:
    """Where sign, exponent and fraction stand; the sign is the highest bit."""

    bits: np.dtype[np.uint16 | np.uint32]
    fraction_bits: int
    exponent_mask: int
    exponent_offset: int = 0
    """Added to an exponent, so that every type has that of float32."""

    @property
    def sign_bit(self) -> int:
        """Place of the sign."""
        return 8 * self.bits.itemsize - 1

    def exponents(self, bits: Bits) -> NDArray[np.uint8]:
        """Biased exponents; zero and the smallest numbers have the lowest."""
        # The cast to a byte drops the sign where the exponent fills the byte.
        exponents = (bits >> self.fraction_bits).astype(np.uint8)
        return (exponents & np.uint8(self.exponent_mask)) + np.uint8(self.exponent_offset)

    def distances(self, base: Bits, new: Bits) -> NDArray[np.int64]:
        """How many representable numbers lie from base to new, away from zero positive."""
        before, after = self._magnitudes(base), self._magnitudes(new)
        return np.where((base ^ new) >> self.sign_bit, -(before + after + 1), after - before)

    def moved(self, base: Bits, distances: NDArray[np.int64]) -> Bits:
        """The numbers at these distances; past zero the sign changes."""
        magnitudes = self._magnitudes(base) + distances
        is_past_zero = magnitudes < 0
        signs = (base >> self.sign_bit).astype(np.int64) ^ is_past_zero
        magnitudes = np.where(is_past_zero, -magnitudes - 1, magnitudes)
        return (magnitudes | signs << self.sign_bit).astype(self.bits)

    def _magnitudes(self, bits: Bits) -> NDArray[np.int64]:
        return (bits & ((1 << self.sign_bit) - 1)).astype(np.int64)


LAYOUTS = {
    "BF16": FloatLayout(np.dtype("<u2"), 7, 0xFF),
    "F16": FloatLayout(np.dtype("<u2"), 10, 0x1F, 127 - 15),
    "F32": FloatLayout(np.dtype("<u4"), 23, 0xFF),
}
"""By the name that safetensors gives a type."""

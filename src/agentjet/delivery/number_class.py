"""Numbers from 0 as a class and the low bits that tell its members apart.

Classes are half octaves: 0, 1, 2, 3, 4-5, 6-7, 8-11, 12-15, ... Inside a class numbers are nearly equally frequent in
what is coded here, so only classes are worth an entropy code. The low bits are stored plane by plane: bit 0 of all
numbers that have one, then bit 1, and so on; each plane begins with a byte of its own.
"""

import numpy as np
from numpy.typing import NDArray

_DIRECT = 4
"""Numbers that are a class each."""


def classes_of(numbers: NDArray[np.int64]) -> NDArray[np.uint8]:
    """The class of each number, below 2^53."""
    length = np.frexp(numbers.astype(np.float64))[1].astype(np.int64)
    second = numbers >> np.maximum(length - 2, 0) & 1
    return np.where(numbers < _DIRECT, numbers, 2 * (length - 1) + second).astype(np.uint8)


def pack_low_bits(numbers: NDArray[np.int64], classes: NDArray[np.uint8]) -> bytes:
    """What the classes leave open."""
    widths = _widths(classes)
    planes: list[bytes] = []
    for bit in range(int(widths.max(initial=0))):
        planes.append(np.packbits((numbers[widths > bit] >> bit & 1).astype(np.uint8)).tobytes())
    return b"".join(planes)


def unpack_numbers(data: bytes, classes: NDArray[np.uint8]) -> NDArray[np.int64]:
    """The numbers again; ValueError when the data is longer or shorter than the classes say."""
    widths = _widths(classes)
    wide = classes.astype(np.int64)
    numbers = np.where(classes < _DIRECT, wide, (2 | wide & 1) << widths)
    packed, at = np.frombuffer(data, np.uint8), 0
    for bit in range(int(widths.max(initial=0))):
        has_bit = np.flatnonzero(widths > bit)
        size = -(-len(has_bit) // 8)
        if at + size > len(packed):
            raise ValueError("low bits are cut")
        numbers[has_bit] |= np.unpackbits(packed[at : at + size], count=len(has_bit)).astype(np.int64) << bit
        at += size
    if at != len(packed):
        raise ValueError(f"{len(packed)} bytes of low bits, expected {at}")
    return numbers


def _widths(classes: NDArray[np.uint8]) -> NDArray[np.int64]:
    return np.maximum((classes.astype(np.int64) >> 1) - 1, 0)

"""A set of places that answers "how many before this one" and "which is the k-th" without a list of its members.

A bit for each place, and the number of members up to each word of 64: 3 bits a place in all. So a place is found among
a million in time that depends on the number of questions, not of places.
"""

import numpy as np
from numpy.typing import NDArray

_WORD = 64


class BitIndex:
    """The places at which a mask is true.

    Example:
        index = BitIndex(exponents == 120)
        index.select(index.rank(places)) == places
    """

    def __init__(self, mask: NDArray[np.bool_]) -> None:
        packed = np.packbits(mask, bitorder="little")
        self._words = np.zeros(-(-len(mask) // _WORD), np.dtype("<u8"))
        self._words.view(np.uint8)[: len(packed)] = packed
        self._up_to = np.bitwise_count(self._words).cumsum(dtype=np.int64)

    def __len__(self) -> int:
        return int(self._up_to[-1]) if len(self._up_to) else 0

    def rank(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """The number of members before each of these members."""
        word = places // _WORD
        from_here = np.bitwise_count(self._words[word] >> (places % _WORD).astype(np.uint64))
        return self._up_to[word] - from_here

    def select(self, ranks: NDArray[np.int64]) -> NDArray[np.int64]:
        """The members that have these ranks, each below `len`."""
        word = np.searchsorted(self._up_to, ranks, side="right")
        bits = self._words[word]
        missing = ranks - (self._up_to[word] - np.bitwise_count(bits))
        return word * _WORD + _nth_bit(bits, missing)


def _nth_bit(bits: NDArray[np.uint64], nth: NDArray[np.int64]) -> NDArray[np.int64]:
    """The place of the nth set bit (from 0), by halving the word."""
    place = np.zeros(len(bits), np.int64)
    for width in (32, 16, 8, 4, 2, 1):
        low = np.bitwise_count(bits & np.uint64((1 << width) - 1)).astype(np.int64)
        is_high = nth >= low
        nth = np.where(is_high, nth - low, nth)
        bits = np.where(is_high, bits >> np.uint64(width), bits)
        place += np.where(is_high, width, 0)
    return place

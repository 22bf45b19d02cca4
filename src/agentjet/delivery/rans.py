"""Entropy coding of symbols by the frequencies of their contexts: interleaved range ANS (arXiv:1311.2540).

A symbol costs the logarithm of its frequency, to within a thousandth. Symbol i belongs to lane i mod L; lanes advance
together, so that NumPy does the work. A state is a number below 2^32; it gives or takes 16 bits at a time.

A stream is the lanes' states (4 bytes each) followed by words of 2 bytes in the order in which the decoder takes them;
L is `num_lanes` of the number of symbols. All numbers are little-endian.
"""

from collections.abc import Iterator
from typing import Self

import numpy as np
from numpy.typing import NDArray

SCALE_BITS = 14
"""Frequencies of a context sum to 2^14."""
_SCALE = 1 << SCALE_BITS
_LOW = np.uint64(1 << 16)
"""Least state."""
_ROOM = np.uint64(32 - SCALE_BITS)
_WORD = np.uint64(16)
_MOST_LANES, _LANE_SYMBOLS = 4096, 1024


def num_lanes(num_symbols: int) -> int:
    """Enough for NumPy's pace, and few enough that the states cost nothing."""
    return max(1, min(_MOST_LANES, num_symbols // _LANE_SYMBOLS))


class Frequencies:
    """How frequent each symbol is in each context: [contexts, symbols]; a context that is not used is all zero."""

    def __init__(self, table: NDArray[np.uint16]) -> None:
        """ValueError unless every context that is used sums to 2^14."""
        sums = table.sum(1, dtype=np.int64)
        if not np.isin(sums, (0, _SCALE)).all():
            raise ValueError("frequencies of a context do not sum to 2^14")
        self.table = table
        self._num_symbols = table.shape[1]
        self._frequency = table.astype(np.uint64).ravel()
        self._start = (table.cumsum(1, dtype=np.uint64) - table).ravel()
        self._is_used = sums > 0

    @classmethod
    def count(cls, symbols: NDArray[np.uint8], contexts: NDArray[np.uint8], shape: tuple[int, int]) -> Self:
        """Those of given symbols; a symbol that occurs never gets none."""
        places = contexts.astype(np.int64) * shape[1] + symbols
        counts = np.bincount(places, minlength=shape[0] * shape[1]).reshape(shape)
        table = np.zeros(shape, np.uint16)
        for context in np.flatnonzero(counts.any(1)):
            table[context] = _scaled(counts[context])
        return cls(table)

    def encode(self, symbols: NDArray[np.uint8], contexts: NDArray[np.uint8]) -> bytes:
        """A stream of symbols that all have a frequency."""
        places = contexts.astype(np.int64) * self._num_symbols + symbols
        states = np.full(num_lanes(len(symbols)), _LOW)
        chunks: list[NDArray[np.uint64]] = []
        for step in reversed(list(_steps(len(symbols)))):
            here = places[step]
            frequency, state = self._frequency[here], states[: len(here)]
            is_full = state >= frequency << _ROOM
            chunks.append(state[is_full] & (_LOW - np.uint64(1)))
            state = np.where(is_full, state >> _WORD, state)
            quotient, rest = np.divmod(state, frequency)
            states[: len(here)] = (quotient << np.uint64(SCALE_BITS)) + rest + self._start[here]
        words = np.concatenate([*reversed(chunks), np.empty(0, np.uint64)])
        return states.astype("<u4").tobytes() + words.astype("<u2").tobytes()

    def decode(self, stream: bytes, contexts: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """The symbols again; ValueError when the stream is not one of this many symbols in these contexts."""
        size = 4 * num_lanes(len(contexts))
        if len(stream) < size or len(stream) % 2 or not self._is_used[contexts].all():
            raise ValueError("a stream of symbols is cut")
        states = np.frombuffer(stream[:size], "<u4").astype(np.uint64)
        words = np.frombuffer(stream[size:], "<u2").astype(np.uint64)
        symbols, taken = self._symbols_by_slot(), 0
        found = np.empty(len(contexts), np.uint8)
        for step in _steps(len(contexts)):
            context = contexts[step].astype(np.int64)
            state = states[: len(context)]
            slot = state & np.uint64(_SCALE - 1)
            found[step] = symbol = symbols[context * _SCALE + slot.astype(np.int64)]
            here = context * self._num_symbols + symbol
            state = self._frequency[here] * (state >> np.uint64(SCALE_BITS)) + slot - self._start[here]
            hungry = np.flatnonzero(state < _LOW)
            fed = words[taken : taken + len(hungry)]
            if len(fed) < len(hungry):
                raise ValueError("a stream of symbols is cut")
            state[hungry] = state[hungry] << _WORD | fed
            states[: len(context)], taken = state, taken + len(hungry)
        if taken != len(words) or (states != _LOW).any():
            raise ValueError("a stream of symbols does not end where it should")
        return found

    def _symbols_by_slot(self) -> NDArray[np.uint8]:
        """[contexts * 2^14]: whose share each slot is."""
        num_contexts = len(self.table)
        by_slot = np.zeros((num_contexts, _SCALE), np.uint8)
        symbols = np.arange(self._num_symbols, dtype=np.uint8)
        for context in np.flatnonzero(self._is_used):
            by_slot[context] = np.repeat(symbols, self.table[context])
        return by_slot.ravel()


def _steps(num_symbols: int) -> Iterator[slice]:
    lanes = num_lanes(num_symbols)
    for start in range(0, num_symbols, lanes):
        yield slice(start, min(start + lanes, num_symbols))


def _scaled(counts: NDArray[np.int64]) -> NDArray[np.uint16]:
    """Frequencies that sum to 2^14, at least 1 for what occurs."""
    occurs = counts > 0
    room = _SCALE - int(occurs.sum())
    frequencies = np.where(occurs, 1 + counts * room // int(counts.sum()), 0)
    frequencies[np.argmax(counts)] += _SCALE - int(frequencies.sum())
    return frequencies.astype(np.uint16)

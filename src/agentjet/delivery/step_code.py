"""Steps, integers other than 0, coded by how frequent their sizes are in a context that both sides know.

A step of n, at most 2^32 either way, is coded as the class of |n| - 1 (`number_class`), doubled, plus 1 where n < 0: a
symbol for `rans`. Its low bits stand as they are. In sections: zstd of the frequencies, [contexts, 128] of 2 bytes; the
stream of symbols; the low bits.
"""

import numpy as np
import zstandard
from numpy.typing import NDArray

from agentjet.delivery.number_class import classes_of, pack_low_bits, unpack_numbers
from agentjet.delivery.rans import Frequencies

NUM_SECTIONS = 3
_NUM_SYMBOLS = 128
_LEVEL = 9


def encode_steps(steps: NDArray[np.int64], contexts: NDArray[np.uint8], num_contexts: int) -> list[bytes]:
    """The steps as sections."""
    sizes = np.abs(steps) - 1
    classes = classes_of(sizes)
    symbols = classes * np.uint8(2) + (steps < 0)
    frequencies = Frequencies.count(symbols, contexts, (num_contexts, _NUM_SYMBOLS))
    table = zstandard.compress(frequencies.table.astype("<u2").tobytes(), _LEVEL)
    return [table, frequencies.encode(symbols, contexts), pack_low_bits(sizes, classes)]


def decode_steps(sections: list[bytes], contexts: NDArray[np.uint8], num_contexts: int) -> NDArray[np.int64]:
    """The steps again; ValueError when the sections are not of as many steps in these contexts."""
    packed, stream, low_bits = sections
    shape = (num_contexts, _NUM_SYMBOLS)
    table = zstandard.decompress(packed, max_output_size=2 * num_contexts * _NUM_SYMBOLS)
    frequencies = Frequencies(np.frombuffer(table, "<u2").reshape(shape))
    symbols = frequencies.decode(stream, contexts)
    sizes = unpack_numbers(low_bits, symbols >> np.uint8(1)) + 1
    return np.where(symbols & 1, -sizes, sizes)

"""What an update of a model's weights has to cost in bits, and what simpler codes make of it; for `weight_delivery.py`.

Bounds are plug-in entropies of the update itself, so no code that adapts to it can fall below them by telling the same
things apart.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import zstandard
from numpy.typing import NDArray

from agentjet.delivery.tensor_file import blocks_of

_MOST_STEPS = 1 << 12
"""Distances beyond which a histogram counts them as one; they are rare."""


@dataclass(slots=True)
class Census:
    """An update of bfloat16 values, counted."""

    num_values: int = 0
    num_changed: int = 0
    num_one_ulp: int = 0
    present: NDArray[np.int64] = field(default_factory=lambda: np.zeros(256, np.int64))
    """[exponents]"""
    changed: NDArray[np.int64] = field(default_factory=lambda: np.zeros(256, np.int64))
    distances: NDArray[np.int64] = field(default_factory=lambda: np.zeros((256, 2 * _MOST_STEPS + 1), np.int64))
    """[exponents, distances]"""

    @property
    def positions_and_signs_bits(self) -> float:
        """Which values changed, as if all were equally likely to, and which way."""
        return _binary_bits(self.num_values, self.num_changed) + self.num_changed

    @property
    def by_exponent_bits(self) -> float:
        """Which values changed and how far, each by the exponent of the value before."""
        positions = sum(_binary_bits(int(n), int(c)) for n, c in zip(self.present, self.changed, strict=True))
        return positions + sum(_histogram_bits(row) for row in self.distances if row.any())


def census(base: NDArray[np.uint8], new: NDArray[np.uint8]) -> Census:
    """Count an update between two files."""
    found = Census()
    for old, other, layout in _float_blocks(base, new):
        places = np.flatnonzero(old != other)
        exponents = layout.exponents(old)
        distances = layout.distances(old[places], other[places])
        found.num_values += len(old)
        found.num_changed += len(places)
        found.num_one_ulp += int((np.abs(distances) == 1).sum())
        found.present += np.bincount(exponents, minlength=256)
        found.changed += np.bincount(exponents[places], minlength=256)
        clipped = np.clip(distances, -_MOST_STEPS, _MOST_STEPS) + _MOST_STEPS
        np.add.at(found.distances, (exponents[places], clipped), 1)
    return found


def gaps_and_values_bytes(base: NDArray[np.uint8], new: NDArray[np.uint8]) -> int:
    """The plain code: gaps between changes (4 bytes) and the new values, both as zstd."""
    gaps: list[bytes] = []
    values: list[bytes] = []
    for old, other, _ in _float_blocks(base, new):
        places = np.flatnonzero(old != other)
        gaps.append(np.diff(places, prepend=0).astype("<u4").tobytes())
        values.append(other[places].tobytes())
    return sum(len(zstandard.compress(b"".join(parts), 9)) for parts in (gaps, values))


def same_bytes(files: Sequence[Path | NDArray[np.uint8]]) -> bool:
    """Whether files and buffers hold the same."""
    first, *others = (one.read_bytes() if isinstance(one, Path) else one.tobytes() for one in files)
    return all(other == first for other in others)


def _float_blocks(base: NDArray[np.uint8], new: NDArray[np.uint8]) -> Iterator[tuple]:
    for block in blocks_of(base):
        if block.layout is not None:
            yield block.of(base), block.of(new), block.layout


def _binary_bits(total: int, chosen: int) -> float:
    if not 0 < chosen < total:
        return 0.0
    share = chosen / total
    return -total * (share * np.log2(share) + (1 - share) * np.log2(1 - share))


def _histogram_bits(counts: NDArray[np.int64]) -> float:
    counts = counts[counts > 0]
    return float(-(counts * np.log2(counts / counts.sum())).sum())

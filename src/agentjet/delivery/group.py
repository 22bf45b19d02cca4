"""A block's numbers told apart by exponent, and which of them changed, as steps from one to the next.

An update of a given size moves a number the likelier the denser the representable numbers around it lie, so the
members of a group change nearly equally often, and steps between those that change are short where that is often. The
groups follow from the base alone. Where more than half of a group's members changed, the steps lead from one that stood
still to the next.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agentjet.delivery.bit_index import BitIndex

Places = NDArray[np.int64]
NUM_GROUPS = 16
NUM_DENSITIES = 48
COMPLEMENT = 128
"""Added to a density where the steps lead through what stood still."""


@dataclass(frozen=True, slots=True)
class GroupChange:
    """Which members of a group changed."""

    group: int
    density: int
    """From 1 on, half octaves of members a step; 0 with `COMPLEMENT` alone: all changed."""
    steps: Places
    """From the member before the first on."""
    places: Places
    """In the block, rising."""


def split(groups: NDArray[np.uint8], changed: Places) -> Iterator[GroupChange]:
    """The groups of a block in which something changed, in order.

    Args:
        groups: Group of each number of the block.
        changed: Places of the numbers that changed, rising.
    """
    of_changed = groups[changed]
    for group in np.unique(of_changed):
        places = changed[of_changed == group]
        index = BitIndex(groups == group)
        ranks, mark = index.rank(places), 0
        if 2 * len(ranks) > len(index):
            ranks, mark = _others(ranks, len(index)), COMPLEMENT
        yield GroupChange(int(group), mark + _density(len(index), len(ranks)), np.diff(ranks, prepend=-1), places)


def find(groups: NDArray[np.uint8], group: int, density: int, steps: Places) -> Places:
    """The places that changed; ValueError when the group has not so many members."""
    # A byte, or NumPy would compare eight times as wide.
    index = BitIndex(groups == np.uint8(group))
    ranks = steps.cumsum() - 1
    if (steps < 1).any() or (len(ranks) and ranks[-1] >= len(index)):
        raise ValueError("steps lead out of their group")
    return index.select(_others(ranks, len(index)) if density & COMPLEMENT else ranks)


def _others(ranks: Places, size: int) -> Places:
    is_other = np.ones(size, np.bool_)
    is_other[ranks] = False
    return np.flatnonzero(is_other)


def _density(size: int, count: int) -> int:
    """Half octaves, in integers: both sides of a wire would not agree on a logarithm's last bit."""
    return (size * size // (count * count)).bit_length() if count else 0

"""How a segment's changes lie: which groups of which blocks they are in, and how many.

As bytes: the lowest group's exponent (1); then for each block and group, 16 a block, the number of steps (4 bytes; the
lowest byte of all, then the next), 0xFFFFFFFF in a block's first group when it is stored as it is; then for each block
and group the density (1), 0 where nothing changed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from agentjet.delivery.group import COMPLEMENT, NUM_GROUPS, GroupChange

_STORED = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class SegmentLayout:
    """Counts and densities of a segment's groups."""

    lowest: int
    counts: NDArray[np.uint32]
    """[blocks, groups]"""
    densities: NDArray[np.uint8]
    """[blocks, groups]"""

    @classmethod
    def of(cls, lowest: int, found: Sequence[Sequence[GroupChange] | None]) -> Self:
        """That of the groups of each block; None is a block that is stored as it is."""
        shape = (len(found), NUM_GROUPS)
        layout = cls(lowest, np.zeros(shape, np.uint32), np.zeros(shape, np.uint8))
        for number, groups in enumerate(found):
            if groups is None:
                layout.counts[number, 0] = _STORED
            for one in groups or ():
                layout.counts[number, one.group], layout.densities[number, one.group] = len(one.steps), one.density
        return layout

    @property
    def is_stored(self) -> NDArray[np.bool_]:
        """[blocks]: whether it is stored as it is."""
        return self.counts[:, 0] == _STORED

    @property
    def num_steps(self) -> NDArray[np.int64]:
        """[blocks, groups]: how many it has."""
        return np.where(self.is_stored[:, None], 0, self.counts.astype(np.int64))

    @property
    def step_contexts(self) -> NDArray[np.uint8]:
        """[steps]: the density of each one's group."""
        return np.repeat(self.densities.ravel() & np.uint8(COMPLEMENT - 1), self.num_steps.ravel())

    def to_bytes(self) -> bytes:
        """As the module says."""
        planes = self.counts.astype("<u4").view(np.uint8).reshape(-1, 4).T
        return bytes([self.lowest]) + planes.tobytes() + self.densities.tobytes()

    @classmethod
    def parse(cls, data: bytes, num_blocks: int) -> Self:
        """ValueError when the bytes are not of so many blocks."""
        size = num_blocks * NUM_GROUPS
        if len(data) != 1 + 5 * size:
            raise ValueError("the changes are those of another number of blocks")
        numbers = np.frombuffer(data, np.uint8)
        counts = np.ascontiguousarray(numbers[1 : 1 + 4 * size].reshape(4, size).T).view("<u4")
        shape = (num_blocks, NUM_GROUPS)
        return cls(data[0], counts.reshape(shape), numbers[1 + 4 * size :].reshape(shape))

"""What changed between two versions of a run of blocks, in few bytes.

A number changes when an update crosses the middle between two representable numbers, and those lie the denser the
smaller it is: whether a number changes, and how far, depends on the base's exponent, which both sides know. So which
numbers changed is said group by group (`group`), in a code by the group's density; the distance of each (in
representable numbers, `float_layout`) in a code by its exponent. A block of which more than half changed, or of no
floating type, is stored as it is.

The work grows with the numbers only by comparing and counting them; all else grows with the changes.

Format: sections, each a length (8 bytes) and its bytes; numbers are little-endian.

1. zstd of the layout (`segment_layout`).
2. to 4. The steps (`step_code`) of all blocks and groups in order, by density.
5. to 7. The distances, in the same order and that of places, by the base's exponent: from 16 below the lowest group's
   on, 32 of them.
8. zstd of the blocks that are stored as they are.
"""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BytesIO
from typing import TypeVar

import numpy as np
import zstandard
from numpy.typing import NDArray

from agentjet.delivery.float_layout import Bits
from agentjet.delivery.group import NUM_DENSITIES, NUM_GROUPS, GroupChange, Places, find, split
from agentjet.delivery.segment_layout import SegmentLayout
from agentjet.delivery.step_code import NUM_SECTIONS, decode_steps, encode_steps
from agentjet.delivery.tensor_file import Block, File

_NUM_CONTEXTS, _CONTEXTS_BELOW = 32, 16
_SATURATED_RATIO = 0.5
"""Exponents of which so many change lie in the lowest group: there is little to gain in telling them apart."""
_RARE_RATIO = 0.01
"""The highest exponents, in which so few of the changes lie, share the highest group."""
_STRIDE = 61
"""One in so many numbers is counted to choose the groups."""
_LEVEL = 6
_MOST_THREADS = 8

D = TypeVar("D", bound=np.generic)


@dataclass(frozen=True, slots=True)
class BlockChange:
    """What changed in a block."""

    block: Block
    places: Places | None
    """None: all of it."""
    bits: Bits | NDArray[np.uint8]
    """The new numbers at these places."""

    def write(self, file: File) -> None:
        """Bring a file forward."""
        target = self.block.of(file)
        target[... if self.places is None else self.places] = self.bits


def encode_segment(blocks: Sequence[Block], base: File, new: File) -> bytes:
    """The changes of these blocks from one file to another of the same header."""
    with ThreadPoolExecutor(_num_threads()) as threads:
        changed = list(threads.map(lambda block: _changed(block, base, new), blocks))
        lowest = _lowest_exponent(blocks, changed, base)
        found = list(threads.map(lambda block, at: _groups(block, at, base, lowest), blocks, changed))
        moves = list(threads.map(lambda block, groups: _moves(block, groups, base, new, lowest), blocks, found))
    layout = SegmentLayout.of(lowest, found)
    steps = _joined([one.steps for groups in found for one in groups or ()], np.int64)
    distances = _joined([distance for distance, _ in moves], np.int64)
    stored = [block.of(new).tobytes() for block, at in zip(blocks, changed, strict=True) if at is None]
    sections = [
        zstandard.compress(layout.to_bytes(), _LEVEL),
        *encode_steps(steps, layout.step_contexts, NUM_DENSITIES),
        *encode_steps(distances, _joined([context for _, context in moves], np.uint8), _NUM_CONTEXTS),
        zstandard.compress(b"".join(stored), _LEVEL),
    ]
    return b"".join(len(section).to_bytes(8, "little") + section for section in sections)


def decode_segment(data: bytes, blocks: Sequence[Block], base: File) -> Iterator[BlockChange]:
    """The changes again, all found before the first is given; ValueError when they are not of such blocks."""
    head, *coded, stored = _split_sections(data)
    layout = SegmentLayout.parse(zstandard.decompress(head), len(blocks))
    steps = decode_steps(coded[:NUM_SECTIONS], layout.step_contexts, NUM_DENSITIES)
    by_block = np.split(steps, layout.num_steps.sum(1).cumsum()[:-1]) if blocks else []
    with ThreadPoolExecutor(_num_threads()) as threads:
        rows = (blocks, by_block, layout.num_steps, layout.densities)
        places = list(threads.map(lambda *row: _places(*row, base=base, lowest=layout.lowest), *rows))
        contexts = list(threads.map(lambda block, at: _contexts(block, at, base, layout.lowest), blocks, places))
    distances = decode_steps(coded[NUM_SECTIONS:], _joined(contexts, np.uint8), _NUM_CONTEXTS)
    whole, end = BytesIO(zstandard.decompress(stored)), 0
    for block, at, is_stored in zip(blocks, places, layout.is_stored, strict=True):
        start, end = end, end + len(at)
        if is_stored:
            yield BlockChange(block, None, np.frombuffer(whole.read(block.num_bytes), np.uint8).view(block.bits))
        elif block.layout is not None and len(at):
            yield BlockChange(block, at, block.layout.moved(block.of(base)[at], distances[start:end]))


def _changed(block: Block, base: File, new: File) -> Places | None:
    """Where a block changed; None when it is to be stored as it is."""
    places = np.flatnonzero(block.of(base) != block.of(new))
    is_few = 2 * len(places) <= block.num_numbers if block.layout else not len(places)
    return places if is_few else None


def _lowest_exponent(blocks: Sequence[Block], changed: Sequence[Places | None], base: File) -> int:
    """Groups reach from the exponents that nearly all change to those that hardly do."""
    moved, present = np.zeros(256, np.int64), np.zeros(256, np.int64)
    for block, at in zip(blocks, changed, strict=True):
        if block.layout is not None and at is not None and len(at):
            numbers = block.of(base)
            moved += np.bincount(block.layout.exponents(numbers[at]), minlength=256)
            present += _STRIDE * np.bincount(block.layout.exponents(numbers[::_STRIDE]), minlength=256)
    moved_up_to, present_up_to = moved.cumsum(), present.cumsum()
    saturated = np.flatnonzero((moved_up_to >= _SATURATED_RATIO * present_up_to) & (moved_up_to > 0))
    highest = int(np.searchsorted(moved_up_to, (1 - _RARE_RATIO) * moved_up_to[-1]))
    return max(int(saturated.max(initial=0)), highest - NUM_GROUPS + 1)


def _groups(block: Block, changed: Places | None, base: File, lowest: int) -> list[GroupChange] | None:
    if changed is None:
        return None
    if not len(changed):
        return []
    return list(split(_exponents(block, block.of(base), lowest, NUM_GROUPS), changed))


def _moves(
    block: Block, groups: Sequence[GroupChange] | None, base: File, new: File, lowest: int
) -> tuple[Places, NDArray[np.uint8]]:
    """Distances of a block's changes, and their contexts."""
    places = _joined([one.places for one in groups or ()], np.int64)
    if block.layout is None or not len(places):
        return places, np.empty(0, np.uint8)
    distances = block.layout.distances(block.of(base)[places], block.of(new)[places])
    return distances, _contexts(block, places, base, lowest)


def _places(
    block: Block, steps: Places, num_steps: NDArray[np.int64], densities: NDArray[np.uint8], *, base: File, lowest: int
) -> Places:
    """Where a block changed, group by group."""
    if not densities.any():
        return np.empty(0, np.int64)
    if block.layout is None:
        raise ValueError("there are distances for numbers of no floating type")
    groups = _exponents(block, block.of(base), lowest, NUM_GROUPS)
    by_group = np.split(steps, num_steps.cumsum()[:-1])
    return _joined(
        [find(groups, group, int(densities[group]), by_group[group]) for group in np.flatnonzero(densities)], np.int64
    )


def _contexts(block: Block, places: Places, base: File, lowest: int) -> NDArray[np.uint8]:
    if not len(places):
        return np.empty(0, np.uint8)
    return _exponents(block, block.of(base)[places], max(0, lowest - _CONTEXTS_BELOW), _NUM_CONTEXTS)


def _exponents(block: Block, numbers: Bits, lowest: int, num: int) -> NDArray[np.uint8]:
    """Exponents less the lowest one, from 0 to num - 1; those beyond count as the nearest."""
    assert block.layout is not None
    return np.clip(block.layout.exponents(numbers), lowest, min(lowest + num - 1, 255)) - np.uint8(lowest)


def _joined(parts: Sequence[NDArray[D]], dtype: type[D]) -> NDArray[D]:
    return np.concatenate(parts) if parts else np.empty(0, dtype)


def _split_sections(data: bytes) -> list[bytes]:
    sections: list[bytes] = []
    at = 0
    while at < len(data):
        end = at + 8 + int.from_bytes(data[at : at + 8], "little")
        sections.append(data[at + 8 : end])
        at = end
    if at != len(data) or len(sections) != 2 + 2 * NUM_SECTIONS:
        raise ValueError("a section of the changes is cut")
    return sections


def _num_threads() -> int:
    return min(_MOST_THREADS, os.cpu_count() or 1)

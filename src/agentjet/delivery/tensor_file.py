"""A safetensors file as blocks of numbers in one buffer.

The file is a length (8 bytes, little-endian), a JSON header of that length that says where each tensor stands, and the
tensors. A block is a run of at most `BLOCK_NUMBERS` numbers of one tensor: what is worked on at a time.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentjet.delivery.float_layout import LAYOUTS, FloatLayout
from agentjet.errors import PatchError

File = NDArray[np.uint8]
"""A whole file: read, or mapped into memory."""
BLOCK_NUMBERS = 1 << 20
"""Part of the format of patches."""
_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class Block:
    """A run of numbers of one tensor."""

    tensor: str
    layout: FloatLayout | None
    """None: of a type whose numbers are compared as bytes."""
    start: int
    """Place of its first number in the flattened tensor."""
    offset: int
    """Place of its first byte in the file."""
    num_bytes: int

    @property
    def bits(self) -> np.dtype[Any]:
        """The integers that its numbers are read as."""
        return np.dtype(np.uint8) if self.layout is None else self.layout.bits

    @property
    def num_numbers(self) -> int:
        """How many it has."""
        return self.num_bytes // self.bits.itemsize

    def of(self, file: File) -> NDArray[Any]:
        """Its numbers as integers; what is written to them is written to the file."""
        return file[self.offset : self.offset + self.num_bytes].view(self.bits)


def header_of(file: File) -> bytes:
    """Length and header. PatchError when the file has none."""
    length = int.from_bytes(file[:_LENGTH_BYTES].tobytes(), "little")
    if len(file) < _LENGTH_BYTES or length > len(file) - _LENGTH_BYTES:
        raise PatchError("the weights are no safetensors file: its header is cut")
    return file[: _LENGTH_BYTES + length].tobytes()


def blocks_of(file: File) -> list[Block]:
    """The file's blocks in the order of their bytes. PatchError when its header can not be read."""
    header = header_of(file)
    try:
        fields: dict[str, Any] = json.loads(header[_LENGTH_BYTES:])
        fields.pop("__metadata__", None)
        found = [block for name, entry in fields.items() for block in _cut(name, entry, len(header))]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise PatchError(f"the weights are no safetensors file: {error}") from None
    if any(block.offset + block.num_bytes > len(file) for block in found):
        raise PatchError("the weights are a cut safetensors file")
    return sorted(found, key=lambda block: block.offset)


def _cut(name: str, entry: dict[str, Any], origin: int) -> Iterator[Block]:
    layout = LAYOUTS.get(entry["dtype"])
    first, last = entry["data_offsets"]
    size = layout.bits.itemsize if layout else 1
    for at in range(first, last, BLOCK_NUMBERS * size):
        num_bytes = min(BLOCK_NUMBERS * size, last - at)
        yield Block(name, layout, (at - first) // size, origin + at, num_bytes)

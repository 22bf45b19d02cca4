"""A patch: everything that leads from one safetensors file to another with the same header, bit for bit.

At small learning rates few of the values that engines hold change in a step, so that a patch is a hundredth of the file
and less. Format, version 1 (numbers little-endian):

| offset | bytes | |
|---|---|---|
| 0 | 8 | `AJPATCH` and the version's number |
| 8 | 32 | sha256 of all that follows it |
| 40 | 32 | sha256 of the base file |
| 72 | 32 | sha256 of the new file |
| 104 | 8 | size of either file |
| 112 | 1 | 0: the new file follows, as zstd; 1: segments follow |
| 113 | | segments (see `segment`), each after its length (8 bytes): the blocks in order, up to 2^28 numbers each |

Invariants:

- A patch is never larger than the new file and a kilobyte.
- A patch that is cut or damaged is refused before anything is written. What a patch brings forward is the new file only
  if its sha256 says so: `apply_patch` does not look, since of a chain only the last result needs to be checked.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import zstandard

from agentjet.delivery.segment import BlockChange, decode_segment, encode_segment
from agentjet.delivery.tensor_file import Block, File, blocks_of, header_of
from agentjet.errors import PatchError

_MAGIC = b"AJPATCH\x01"
_HEAD_BYTES = 113
_WHOLE, _SEGMENTS = 0, 1
_SEGMENT_NUMBERS = 1 << 28
_LEVEL = 1
_STRIDE = 61


@dataclass(frozen=True, slots=True)
class PatchHead:
    """What a patch is for."""

    base_sha256: str
    sha256: str
    """Of the new file."""
    num_bytes: int
    """Of either file."""


def encode_patch(base: File, new: File, *, base_sha256: str, sha256: str) -> bytes:
    """The way from a base file to a new one, whose sha256 are known. PatchError when their headers differ."""
    if len(base) != len(new) or header_of(base) != header_of(new):
        raise PatchError("weights of other tensors are no base for a patch; publish the whole file")
    segments = [encode_segment(blocks, base, new) for blocks in _segments(blocks_of(base))]
    body = b"".join(len(segment).to_bytes(8, "little") + segment for segment in segments)
    kind = _SEGMENTS
    if len(body) >= len(new):
        kind, body = _WHOLE, zstandard.compress(new.tobytes(), _LEVEL)
    head = bytes.fromhex(base_sha256) + bytes.fromhex(sha256) + len(new).to_bytes(8, "little") + bytes([kind])
    return _MAGIC + hashlib.sha256(head + body).digest() + head + body


def changed_ratio(base: File, new: File) -> float:
    """The share of numbers that differ, from a sample; 1 where the headers do. PatchError as `encode_patch`."""
    if len(base) != len(new) or header_of(base) != header_of(new):
        return 1.0
    pairs = [(block.of(base)[::_STRIDE], block.of(new)[::_STRIDE]) for block in blocks_of(base)]
    return sum(int((one != other).sum()) for one, other in pairs) / max(1, sum(len(one) for one, _ in pairs))


def read_head(patch: bytes) -> PatchHead:
    """PatchError when the bytes are no whole patch of this version."""
    if len(patch) < _HEAD_BYTES or patch[:7] != _MAGIC[:7]:
        raise PatchError("these bytes are no patch of weights; fetch it again")
    if patch[:8] != _MAGIC:
        raise PatchError(f"a patch of version {patch[7]}; this AgentJet reads version {_MAGIC[7]}: upgrade it")
    if hashlib.sha256(memoryview(patch)[40:]).digest() != patch[8:40]:
        raise PatchError("a patch of weights is cut or damaged; fetch it again")
    return PatchHead(patch[40:72].hex(), patch[72:104].hex(), int.from_bytes(patch[104:112], "little"))


def decode_patch(patch: bytes, base: File) -> Iterator[BlockChange]:
    """What a patch changes in a base that is given as it was; segment by segment, in the order of the file.

    PatchError when it is no patch, or not one for such a file.
    """
    head = read_head(patch)
    if head.num_bytes != len(base):
        raise PatchError(f"a patch for a file of {head.num_bytes} bytes, not of {len(base)}; start from a whole file")
    try:
        if patch[_HEAD_BYTES - 1] == _WHOLE:
            yield BlockChange(_whole(base), None, np.frombuffer(zstandard.decompress(patch[_HEAD_BYTES:]), np.uint8))
            return
        at = _HEAD_BYTES
        for blocks in _segments(blocks_of(base)):
            start = at + 8
            at = start + int.from_bytes(patch[at:start], "little")
            yield from decode_segment(patch[start:at], blocks, base)
    except (ValueError, IndexError, zstandard.ZstdError) as error:
        raise PatchError(f"a patch does not fit its base: {error}; start from a whole file") from None


def apply_patch(patch: bytes, file: File) -> None:
    """Bring a file forward where it lies; after an error it is neither the base nor the new file.

    PatchError as `decode_patch`.
    """
    for change in decode_patch(patch, file):
        change.write(file)


def _whole(file: File) -> Block:
    return Block("", None, 0, 0, len(file))


def _segments(blocks: list[Block]) -> Iterator[list[Block]]:
    """Bounded, so that the work on a large model takes little memory."""
    segment: list[Block] = []
    for block in blocks:
        if segment and sum(one.num_numbers for one in (*segment, block)) > _SEGMENT_NUMBERS:
            yield segment
            segment = []
        segment.append(block)
    if segment:
        yield segment

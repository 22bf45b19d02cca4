"""Blobs as pipelined create-only chunks, on any bus.

Format: chunk i of n lies under `<prefix>.<sha256>.<i>`; every chunk names n and the blob's size in its headers. Chunks
are content-addressed, so writing twice is harmless. A blob counts only once a record names it, and it is read back
whole and verified. It knows `publish` and `last`, not NATS.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from agentjet.bus.protocol import StoredMessage
from agentjet.errors import BlobError, ConflictError

CHUNK_BYTES = 960 * 1024
"""Below the 1 MiB payload limit of a default server with room for headers."""
WINDOW = 32
"""Chunks under way at once: enough to hide the round trip, about 32 MB of memory."""
_CHUNKS = "AJ-Chunks"
_SIZE = "AJ-Blob-Bytes"


class ChunkStore(Protocol):
    """The part of a bus that blobs need."""

    @property
    def max_payload_bytes(self) -> int:
        """As `Bus.max_payload_bytes`."""
        ...

    async def publish(
        self,
        subject: str,
        payload: bytes,
        *,
        stream: str,
        headers: Mapping[str, str] | None = None,
        expected: int | None = None,
        ttl_seconds: float | None = None,
        timeout_seconds: float = 10.0,
    ) -> int:
        """As `Bus.publish`."""
        ...

    async def last(self, stream: str, subject: str) -> StoredMessage | None:
        """As `Bus.last`."""
        ...


async def put_blob(
    store: ChunkStore, stream: str, subject_prefix: str, data: bytes, *, ttl_seconds: float | None = None
) -> str:
    """Store `data`; returns its sha256. Raises what `publish` raises, except conflicts: a stored chunk is kept."""
    digest = await asyncio.to_thread(lambda: hashlib.sha256(data).hexdigest())
    chunk_bytes = min(CHUNK_BYTES, store.max_payload_bytes)
    count = max(1, -(-len(data) // chunk_bytes))
    headers = {_CHUNKS: str(count), _SIZE: str(len(data))}
    view = memoryview(data)

    async def put(index: int) -> None:
        chunk = bytes(view[index * chunk_bytes : (index + 1) * chunk_bytes])
        try:
            await store.publish(
                f"{subject_prefix}.{digest}.{index}",
                chunk,
                stream=stream,
                headers=headers,
                expected=0,
                ttl_seconds=ttl_seconds,
                timeout_seconds=60.0,
            )
        except ConflictError:
            return  # the same bytes: the subject is their digest

    await _in_window(count, put)
    return digest


async def get_blob(store: ChunkStore, stream: str, subject_prefix: str, sha256: str, num_bytes: int) -> bytes:
    """Read a blob back.

    Raises:
        BlobError: A chunk is missing, or size or digest differ.
    """
    where = f"blob {subject_prefix}.{sha256}"
    first = await _chunk(store, stream, where, f"{subject_prefix}.{sha256}.0")
    count = int(first.headers.get(_CHUNKS, "0"))
    if int(first.headers.get(_SIZE, "-1")) != num_bytes:
        raise BlobError(f"{where}: stored with {first.headers.get(_SIZE)} bytes, expected {num_bytes}")
    chunks = [first.payload, *[b""] * (count - 1)]

    async def get(index: int) -> None:
        if index:
            chunks[index] = (await _chunk(store, stream, where, f"{subject_prefix}.{sha256}.{index}")).payload

    await _in_window(count, get)
    data = b"".join(chunks)
    found = await asyncio.to_thread(lambda: hashlib.sha256(data).hexdigest())
    if found != sha256:
        raise BlobError(f"{where}: the digest of the stored bytes differs ({found}); write the blob again")
    return data


async def _chunk(store: ChunkStore, stream: str, where: str, subject: str) -> StoredMessage:
    message = await store.last(stream, subject)
    if message is None:
        raise BlobError(f"{where}: chunk {subject.rpartition('.')[2]} is missing; it was purged or never completed")
    return message


async def _in_window(count: int, work: Callable[[int], Awaitable[None]]) -> None:
    """Run `work(0..count-1)` with at most `WINDOW` under way; the first error cancels the rest."""
    indices = iter(range(count))

    async def worker() -> None:
        for index in indices:
            await work(index)

    workers = [asyncio.ensure_future(worker()) for _ in range(min(WINDOW, count))]
    try:
        await asyncio.gather(*workers)
    finally:
        for task in workers:
            task.cancel()
        await asyncio.gather(*workers, return_exceptions=True)

"""Blobs as pipelined create-only chunks, on any bus.

Format: chunk i of n lies under `<prefix>.<sha256>.<i>`; every chunk names n and the blob's size in its headers. Chunks
are content-addressed, so writing twice is harmless. A blob counts only once a record names it, and it is read back
whole and verified. Weights are as large as a disk's files: `put_file` and `get_file` hold a window of chunks and never
the whole. It knows `publish` and `last`, not NATS.
"""

import asyncio
import hashlib
import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Protocol

from agentjet.bus.protocol import StoredMessage
from agentjet.durable.file import file_digest
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
    view = memoryview(data)

    async def chunk(start: int, stop: int) -> bytes:
        return bytes(view[start:stop])

    await _put(store, stream, f"{subject_prefix}.{digest}", len(data), chunk, ttl_seconds)
    return digest


async def put_file(store: ChunkStore, stream: str, subject_prefix: str, path: Path, sha256: str) -> None:
    """Store a file whose sha256 is known. Raises as `put_blob`, and OSError when the file can not be read."""
    with path.open("rb", buffering=0) as file:

        async def chunk(start: int, stop: int) -> bytes:
            return await asyncio.to_thread(os.pread, file.fileno(), stop - start, start)

        size = os.fstat(file.fileno()).st_size
        await _put(store, stream, f"{subject_prefix}.{sha256}", size, chunk, None)


async def _put(
    store: ChunkStore,
    stream: str,
    prefix: str,
    num_bytes: int,
    chunk: Callable[[int, int], Awaitable[bytes]],
    ttl_seconds: float | None,
) -> None:
    chunk_bytes = min(CHUNK_BYTES, store.max_payload_bytes)
    count = max(1, -(-num_bytes // chunk_bytes))
    headers = {_CHUNKS: str(count), _SIZE: str(num_bytes)}

    async def put(index: int) -> None:
        start = index * chunk_bytes
        payload = await chunk(start, min(start + chunk_bytes, num_bytes))
        try:
            await store.publish(
                f"{prefix}.{index}",
                payload,
                stream=stream,
                headers=headers,
                expected=0,
                ttl_seconds=ttl_seconds,
                timeout_seconds=60.0,
            )
        except ConflictError:
            return  # the same bytes: the subject is their digest

    await _in_window(count, put)


async def get_blob(store: ChunkStore, stream: str, subject_prefix: str, sha256: str, num_bytes: int) -> bytes:
    """Read a blob back.

    Raises:
        BlobError: A chunk is missing, or size or digest differ.
    """
    chunks: dict[int, bytes] = {}

    async def keep(offset: int, payload: bytes) -> None:
        chunks[offset] = payload

    where = await _get(store, stream, f"{subject_prefix}.{sha256}", num_bytes, keep)
    data = b"".join(chunks[offset] for offset in sorted(chunks))
    _check_digest(where, await asyncio.to_thread(lambda: hashlib.sha256(data).hexdigest()), sha256)
    return data


async def get_file(
    store: ChunkStore, stream: str, subject_prefix: str, sha256: str, num_bytes: int, path: Path
) -> None:
    """Read a blob back into a file, which appears under its name once it is whole.

    Raises:
        BlobError: A chunk is missing, or size or digest differ.
        OSError: The file can not be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb", buffering=0) as file:

            async def keep(offset: int, payload: bytes) -> None:
                await asyncio.to_thread(_write_at, file.fileno(), payload, offset)

            where = await _get(store, stream, f"{subject_prefix}.{sha256}", num_bytes, keep)
        _check_digest(where, (await asyncio.to_thread(file_digest, partial))[1], sha256)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _write_at(handle: int, payload: bytes, offset: int) -> None:
    view = memoryview(payload)
    while view:
        written = os.pwrite(handle, view, offset)
        view, offset = view[written:], offset + written


async def _get(
    store: ChunkStore, stream: str, prefix: str, num_bytes: int, keep: Callable[[int, bytes], Awaitable[None]]
) -> str:
    """Hand out every chunk with its offset, in any order; returns what to call the blob in messages."""
    where = f"blob {prefix}"
    first = await _chunk(store, stream, where, f"{prefix}.0")
    count = int(first.headers.get(_CHUNKS, "0"))
    if int(first.headers.get(_SIZE, "-1")) != num_bytes:
        raise BlobError(f"{where}: stored with {first.headers.get(_SIZE)} bytes, expected {num_bytes}")

    async def get(index: int) -> None:
        message = await _chunk(store, stream, where, f"{prefix}.{index}") if index else first
        await keep(index * len(first.payload), message.payload)

    await _in_window(count, get)
    return where


def _check_digest(where: str, found: str, wanted: str) -> None:
    if found != wanted:
        raise BlobError(f"{where}: the digest of the stored bytes differs ({found}); write the blob again")


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

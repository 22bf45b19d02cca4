"""A version's file for an engine, from wherever it is to be had: a shared path, a broadcast, or the bus.

Invariants:

- What is handed out has the sha256 of the version's record, unless it is the learner's own file on a shared path.
- What does not lie on a shared path is brought once for all engines of a host (`Mirror`); an engine that dies while it
  brings a file leaves that to the next.
- A broadcast is tried once for a version; whatever becomes of it, the bus has the version soon after.
- Patches that are gone, or do not fit what is held, cost no more than time: the way then begins at a whole file.
"""

import asyncio
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path

import structlog

from agentjet.broadcast.courier import Courier
from agentjet.bus.blob import get_file
from agentjet.bus.protocol import Bus
from agentjet.delivery.mirror import Mirror, advance
from agentjet.delivery.route import Route, find_route
from agentjet.errors import BlobError, BroadcastError, PatchError
from agentjet.schemas import subject
from agentjet.schemas.ids import RunId, Version
from agentjet.schemas.subject import Stream, stream_name
from agentjet.schemas.weights import Weights

log = structlog.get_logger(__name__)

Published = Mapping[Version, Weights]


class Arrivals:
    """Brings files to one engine, one at a time."""

    def __init__(self, bus: Bus, run: RunId, folder: Path) -> None:
        """`folder` is where the engines of the model keep what they share."""
        self._bus, self._stream = bus, stream_name(run, Stream.WEIGHTS)
        self._prefix = subject.blob(run, "weights")
        self._mirror = Mirror(folder)
        self._courier = Courier()
        self._tried = ""
        """The broadcast that was tried last."""

    async def file(self, version: Version, published: Published) -> Path:
        """The whole file of a version; it stays until the next one is asked for.

        Raises BlobError or PatchError when nothing leads there, BusError and OSError as the bus and the disk do.
        """
        record = published[version]
        if (shared := _shared_file(record)) is not None:
            await asyncio.to_thread(self._mirror.release)
            return shared
        if (path := await asyncio.to_thread(self._mirror.take, record.sha256)) is not None:
            return path
        async with self._mirror.turn(record.sha256, record.num_bytes):
            path = await asyncio.to_thread(self._mirror.take, record.sha256)
            return path or await self._receive(record) or await self._bring(version, published)

    async def close(self) -> None:
        """Hold no file any more."""
        await self._courier.close()
        self._mirror.release()

    async def _receive(self, record: Weights) -> Path | None:
        """The file as it is sent to all hosts; None where it is not, or in vain."""
        if record.broadcast in ("", self._tried):
            return None
        self._tried = record.broadcast
        with self._mirror.work_file() as work:
            try:
                await self._courier.receive(record.broadcast, work, record.num_bytes, record.sha256)
            except BroadcastError as error:
                log.warning("a broadcast failed; the bus brings the weights", version=record.version, error=str(error))
                return None
            return await asyncio.to_thread(self._mirror.adopt, work, record.sha256)

    async def _bring(self, version: Version, published: Published) -> Path:
        held = {known for known, record in published.items() if known != version and self._mirror.has(record.sha256)}
        route = find_route(version, published, held)
        if route is not None and route.whole is None:
            try:
                return await self._take(route, published)
            except (BlobError, PatchError, FileNotFoundError) as error:
                log.warning("patches lead nowhere; taking a whole file", version=str(version), error=str(error))
                if isinstance(error, PatchError):
                    self._mirror.discard(published[route.start].sha256)
                route = find_route(version, published)
        if route is None:
            raise BlobError(f"nothing on the bus leads to weights {version}; the next whole file will")
        return await self._take(route, published)

    async def _take(self, route: Route, published: Published) -> Path:
        start, end = published[route.start], published[route.end]
        with self._mirror.work_file() as work:
            if route.whole is not None:
                await self._fetch(route.whole, work)
            else:
                await asyncio.to_thread(shutil.copyfile, self._mirror.place(start.sha256), work)
            if route.patches:
                patches = [
                    await self._bus.get_blob(self._stream, self._prefix, one.patch_sha256, one.patch_bytes)
                    for one in route.patches
                ]
                await asyncio.to_thread(advance, work, start.sha256, end.sha256, patches)
            return await asyncio.to_thread(self._mirror.adopt, work, end.sha256)

    async def _fetch(self, record: Weights, path: Path) -> None:
        try:
            await get_file(self._bus, self._stream, self._prefix, record.sha256, record.num_bytes, path)
        except BlobError as error:
            if record.is_blob:
                raise
            raise BlobError(
                f"{record.path} of {record.host} is not to be seen here, and the learner has not put it on the bus yet "
                f"(it does where weights_route is auto or nccl): {error}"
            ) from None


def _shared_file(record: Weights) -> Path | None:
    path = Path(record.path) if record.path else None
    is_near = record.host == socket.gethostname() or not (record.is_blob or record.base or record.broadcast)
    return path if path is not None and is_near and path.exists() else None

"""A version's file for an engine, from wherever it is to be had: a shared path, the bus whole, or the bus as patches.

Invariants:

- What is handed out has the sha256 of the version's record, unless it is the learner's own file on a shared path.
- Patches that are gone, or do not fit what is held, cost no more than time: the way then begins at a whole file.
"""

import asyncio
import socket
from collections.abc import Mapping
from pathlib import Path

import structlog

from agentjet.bus.blob import get_file
from agentjet.bus.protocol import Bus
from agentjet.delivery.mirror import Mirror
from agentjet.delivery.route import Route, find_route
from agentjet.errors import BlobError, PatchError
from agentjet.schemas import subject
from agentjet.schemas.ids import RunId, Version
from agentjet.schemas.subject import Stream, stream_name
from agentjet.schemas.weights import Weights

log = structlog.get_logger(__name__)


class Arrivals:
    """Brings files to one engine, one at a time."""

    def __init__(self, bus: Bus, run: RunId, folder: Path) -> None:
        self._bus, self._stream = bus, stream_name(run, Stream.WEIGHTS)
        self._prefix = subject.blob(run, "weights")
        self._mirror = Mirror(folder)

    async def file(self, version: Version, published: Mapping[Version, Weights]) -> Path:
        """The whole file of a version; it stays until the next one is asked for.

        Raises BlobError or PatchError when nothing leads there, BusError and OSError as the bus and the disk do.
        """
        record = published[version]
        if (shared := _shared_file(record)) is not None:
            await asyncio.to_thread(self._mirror.drop)
            return shared
        if self._mirror.held == version:
            return self._mirror.place(version)
        route = find_route(version, published, self._mirror.held)
        if route is not None and route.whole is None:
            try:
                return await self._take(route, record)
            except (BlobError, PatchError, FileNotFoundError) as error:
                log.warning("patches lead nowhere; taking a whole file", version=str(version), error=str(error))
                await asyncio.to_thread(self._mirror.drop)
                route = find_route(version, published)
        if route is None:
            raise BlobError(f"nothing on the bus leads to weights {version}; the next whole file will")
        return await self._take(route, record)

    def close(self) -> None:
        """Remove what is held."""
        self._mirror.close()

    async def _take(self, route: Route, record: Weights) -> Path:
        if route.whole is not None:
            path = await self._fetch(route.whole)
            if not route.patches:
                return path
        patches = [
            await self._bus.get_blob(self._stream, self._prefix, one.patch_sha256, one.patch_bytes)
            for one in route.patches
        ]
        return await asyncio.to_thread(self._mirror.advance, Version.parse(record.version), record.sha256, patches)

    async def _fetch(self, record: Weights) -> Path:
        version = Version.parse(record.version)
        path = await asyncio.to_thread(self._mirror.place, version)
        try:
            await get_file(self._bus, self._stream, self._prefix, record.sha256, record.num_bytes, path)
        except BlobError as error:
            if record.is_blob:
                raise
            raise BlobError(
                f"{record.path} of {record.host} is not to be seen here, and the learner has not put it on the bus yet "
                f"(it does where weights_route is auto): {error}"
            ) from None
        return await asyncio.to_thread(self._mirror.hold, version, record.sha256)


def _shared_file(record: Weights) -> Path | None:
    path = Path(record.path) if record.path else None
    is_near = record.host == socket.gethostname() or not (record.is_blob or record.base)
    return path if path is not None and is_near and path.exists() else None

"""A learner's new weights on their way to the engines.

The snapshot is stored before the record that names it, under a name that is never used again. Which route it takes
(`LearnerSettings.weights_route`): a file on a path that the engines share, or chunks over the bus. An engine elsewhere
that starts after a version went out as a file finds its chunks as soon as the learner has seen it (`serve_late`).
"""

import asyncio
import socket
from pathlib import Path
from typing import Protocol

import structlog

from agentjet.bus.blob import put_file
from agentjet.bus.presence import live_actors
from agentjet.bus.protocol import Bus
from agentjet.bus.record import put_once
from agentjet.config import LearnerSettings
from agentjet.errors import BusError
from agentjet.schemas import subject
from agentjet.schemas.ids import RunId, Version
from agentjet.schemas.subject import Stream, stream_name
from agentjet.schemas.weights import Weights
from agentjet.training.snapshot import Snapshot

log = structlog.get_logger(__name__)

LOOK_SECONDS = 3.0


class WeightSource(Protocol):
    """Writes the weights as the engines load them."""

    def engine_weights(self, path: Path) -> Snapshot:
        """Write a safetensors file, whole or not at all."""
        ...


class WeightsPublisher:
    """Publishes the versions of one model."""

    def __init__(self, bus: Bus, run: RunId, model: str, settings: LearnerSettings, folder: Path) -> None:
        self._bus, self._run, self._model = bus, run, model
        self._settings, self._folder = settings, folder
        self._newest: Weights | None = None
        self._is_on_bus = False

    async def publish(self, version: Version, ledger_sequence: int, source: WeightSource) -> Weights:
        """Write the snapshot, then its record; older snapshots beyond `keep_weights` are removed.

        Raises OSError when the folder can not be written, BusError when the bus can not take it.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{version}.safetensors"
        snapshot = await asyncio.to_thread(source.engine_weights, path)
        over_bus = await self._is_over_bus()
        if over_bus:
            await self._put(path, snapshot.sha256)
        record = Weights(
            run=self._run,
            model=self._model,
            version=str(version),
            ledger_sequence=ledger_sequence,
            dtype=snapshot.dtype,
            num_bytes=snapshot.num_bytes,
            sha256=snapshot.sha256,
            path=str(path),
            host=socket.gethostname(),
            is_blob=over_bus,
        )
        await put_once(
            self._bus, self._run, Stream.WEIGHTS, subject.weights(self._run, self._model, str(version)), record
        )
        self._newest, self._is_on_bus = record, over_bus
        self._prune(path)
        return record

    async def serve_late(self) -> None:
        """For ever: put the newest version on the bus when an engine has come that can not see the file."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                await self.look()
            except (OSError, BusError) as error:
                log.warning("weights can not be put on the bus; trying again", error=str(error))

    async def look(self) -> None:
        """One look for such an engine. Raises as `publish`."""
        newest = self._newest
        if newest is None or self._is_on_bus or not await self._is_over_bus():
            return
        await self._put(Path(newest.path), newest.sha256)
        self._is_on_bus = self._newest is newest

    async def _put(self, path: Path, sha256: str) -> None:
        await put_file(
            self._bus, stream_name(self._run, Stream.WEIGHTS), subject.blob(self._run, "weights"), path, sha256
        )

    async def _is_over_bus(self) -> bool:
        if self._settings.weights_route != "auto":
            return self._settings.weights_route == "bus"
        try:
            engines = await live_actors(self._bus, self._run, "inference")
        except BusError:
            return False
        return any(self._model in engine.models and engine.host != socket.gethostname() for engine in engines)

    def _prune(self, newest: Path) -> None:
        """An engine that is reading a removed file keeps its open handle; a killed learner's half of one goes too."""
        for leftover in self._folder.glob(".*.partial"):
            leftover.unlink(missing_ok=True)
        files = sorted(self._folder.glob("*.safetensors"), key=lambda file: Version.parse(file.stem))
        for old in files[: -self._settings.keep_weights]:
            if old != newest:
                old.unlink(missing_ok=True)

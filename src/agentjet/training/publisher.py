"""A learner's new weights on their way to the engines.

The snapshot is stored before the record that names it, under a name that is never used again. Which route it takes
(`LearnerSettings.weights_route`): a file on a path that the engines share, or chunks over the bus.
"""

import asyncio
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from agentjet.bus.protocol import Bus
from agentjet.bus.record import put_once
from agentjet.config import LearnerSettings
from agentjet.errors import BusError
from agentjet.schemas import subject
from agentjet.schemas.codec import SCHEMA_HEADER, decode
from agentjet.schemas.ids import RunId, Version
from agentjet.schemas.presence import Presence
from agentjet.schemas.subject import Stream, stream_name
from agentjet.schemas.weights import Weights
from agentjet.training.snapshot import Snapshot


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

    async def publish(self, version: Version, ledger_sequence: int, source: WeightSource) -> Weights:
        """Write the snapshot, then its record; older snapshots beyond `keep_weights` are removed.

        Raises OSError when the folder can not be written, BusError when the bus can not take it.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{version}.safetensors"
        snapshot = await asyncio.to_thread(source.engine_weights, path)
        over_bus = await self._is_over_bus()
        if over_bus:
            data = await asyncio.to_thread(path.read_bytes)
            await self._bus.put_blob(stream_name(self._run, Stream.WEIGHTS), subject.blob(self._run, "weights"), data)
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
        self._prune(path)
        return record

    async def _is_over_bus(self) -> bool:
        if self._settings.weights_route != "auto":
            return self._settings.weights_route == "bus"
        return bool(await self._far_hosts())

    def _prune(self, newest: Path) -> None:
        """An engine that is reading a removed file keeps its open handle; a killed learner's half of one goes too."""
        for leftover in self._folder.glob(".*.partial"):
            leftover.unlink(missing_ok=True)
        files = sorted(self._folder.glob("*.safetensors"), key=lambda file: Version.parse(file.stem))
        for old in files[: -self._settings.keep_weights]:
            if old != newest:
                old.unlink(missing_ok=True)

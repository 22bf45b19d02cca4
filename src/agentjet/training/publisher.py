"""A learner's new weights on their way to the engines.

What carries a version is stored before the record that names it, under a name that is never used again. Which route it
takes (`LearnerSettings.weights_route`): a file on a path that the engines share, a broadcast to their other hosts, or
the bus. Over the bus a version goes out as a patch of the version before it, as long as that one is to be had there;
whole every `snapshot_every` versions, as a learner's first, and where a patch would be half as large. An engine
elsewhere that starts after a version went out as a file, or that a broadcast did not reach, finds it on the bus as soon
as the learner has seen the engine (`serve_late`). A broadcast goes on beside the learner, which waits for no engine.
"""

import asyncio
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import structlog

from agentjet.broadcast.courier import Courier
from agentjet.bus.blob import put_file
from agentjet.bus.presence import live_actors
from agentjet.bus.protocol import Bus
from agentjet.bus.record import put_once
from agentjet.config import LearnerSettings
from agentjet.delivery.acknowledgement import oldest_acknowledged
from agentjet.delivery.patch import changed_ratio, encode_patch
from agentjet.errors import BroadcastError, BusError, PatchError
from agentjet.schemas import subject
from agentjet.schemas.ids import RunId, Version
from agentjet.schemas.presence import Presence
from agentjet.schemas.subject import Stream, stream_name
from agentjet.schemas.weights import Weights
from agentjet.training.snapshot import Snapshot

log = structlog.get_logger(__name__)

LOOK_SECONDS = 3.0
EngineLife = tuple[str, float]
"""Name of an engine, and when it started."""
_LARGEST_PATCH_RATIO = 0.5
"""Of the whole file: a larger patch is not worth its time."""


class WeightSource(Protocol):
    """Writes the weights as the engines load them."""

    def engine_weights(self, path: Path) -> Snapshot:
        """Write a safetensors file, whole or not at all."""
        ...


@dataclass(frozen=True, slots=True)
class Sent:
    """A version that went out."""

    version: Version
    path: Path
    """The learner's own file."""
    sha256: str
    is_on_bus: bool
    """Whole, or as patches since a whole one."""
    num_patches: int = 0
    """Since the newest version that is on the bus whole."""
    base: str = ""
    patch_sha256: str = ""
    patch_bytes: int = 0


class WeightsPublisher:
    """Publishes the versions of one model."""

    def __init__(self, bus: Bus, run: RunId, model: str, settings: LearnerSettings, folder: Path) -> None:
        self._bus, self._run, self._model = bus, run, model
        self._settings, self._folder = settings, folder
        self._stream, self._prefix = stream_name(run, Stream.WEIGHTS), subject.blob(run, "weights")
        self._newest: Sent | None = None
        self._courier = Courier()
        self._broadcast: asyncio.Task[None] | None = None
        self._reached = frozenset[EngineLife]()
        """Engines that have a broadcast to load from."""

    async def publish(self, version: Version, ledger_sequence: int, source: WeightSource) -> Weights:
        """Write the snapshot, send it, then its record; older snapshots that nobody needs are removed.

        Raises OSError when the folder can not be written, BusError when the bus can not take it.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{version}.safetensors"
        snapshot = await asyncio.to_thread(source.engine_weights, path)
        engines = await self._engines()
        sent = await self._send(version, path, snapshot, over_bus=self._is_over_bus(engines))
        hosts = self._hosts_elsewhere(engines)
        offered_at = await self._offer(path, snapshot, len(hosts)) if hosts and self._is_by_broadcast else ""
        record = Weights(
            run=self._run,
            model=self._model,
            version=str(version),
            ledger_sequence=ledger_sequence,
            dtype=snapshot.dtype,
            num_bytes=snapshot.num_bytes,
            sha256=snapshot.sha256,
            path="" if self._settings.weights_route == "bus" else str(path),
            host=socket.gethostname(),
            is_blob=sent.is_on_bus and sent.num_patches == 0,
            base=sent.base,
            patch_sha256=sent.patch_sha256,
            patch_bytes=sent.patch_bytes,
            broadcast=offered_at,
        )
        await put_once(
            self._bus, self._run, Stream.WEIGHTS, subject.weights(self._run, self._model, str(version)), record
        )
        self._newest = sent
        if offered_at:
            self._broadcast = asyncio.create_task(self._see_through(record, len(hosts), frozenset(map(_life, engines))))
        self._prune(path, engines)
        return record

    async def _send(self, version: Version, path: Path, snapshot: Snapshot, *, over_bus: bool) -> Sent:
        """Put on the bus what leads to a version there."""
        sent = Sent(version, path, snapshot.sha256, is_on_bus=over_bus)
        if not over_bus:
            return sent
        patch = await asyncio.to_thread(self._patch, path, snapshot)
        if patch is not None and (base := self._newest) is not None:
            sent = replace(
                sent,
                num_patches=(base.num_patches + 1) % self._settings.snapshot_every,
                base=str(base.version),
                patch_sha256=await self._bus.put_blob(self._stream, self._prefix, patch),
                patch_bytes=len(patch),
            )
        if sent.num_patches == 0:
            await put_file(self._bus, self._stream, self._prefix, path, snapshot.sha256)
        return sent

    async def _offer(self, path: Path, snapshot: Snapshot, num_receivers: int) -> str:
        """Where other hosts may join the broadcast of a file; empty when there is none."""
        await self._give_up_broadcast()
        self._reached = frozenset()
        try:
            port = await self._courier.offer(path, snapshot.sha256, num_receivers)
        except (BroadcastError, OSError) as error:
            log.warning("weights can not be broadcast; the bus takes them", error=str(error))
            return ""
        return f"{self._settings.weights_host or socket.gethostname()}:{port}"

    async def _see_through(self, record: Weights, num_receivers: int, engines: frozenset[EngineLife]) -> None:
        started = time.monotonic()
        try:
            num_done = await self._courier.sent(record.num_bytes)
        except BroadcastError as error:
            log.warning("a broadcast failed; the bus takes the weights", version=record.version, error=str(error))
            return
        if num_done >= num_receivers:
            self._reached = engines
        seconds = round(time.monotonic() - started, 3)
        log.info("broadcast", version=record.version, hosts=num_done, wanted=num_receivers, seconds=seconds)

    async def _give_up_broadcast(self) -> None:
        task, self._broadcast = self._broadcast, None
        if task is not None and not task.done():
            task.cancel()
            await asyncio.wait({task})

    async def close(self) -> None:
        """End a broadcast that goes on."""
        await self._give_up_broadcast()
        await self._courier.close()

    def _patch(self, path: Path, snapshot: Snapshot) -> bytes | None:
        """From the newest version to this one; None when that is not to be had, or not worth it."""
        newest = self._newest
        if newest is None or not newest.is_on_bus:
            return None
        try:
            base, new = (np.memmap(one, np.uint8, "r") for one in (newest.path, path))
            if changed_ratio(base, new) > _LARGEST_PATCH_RATIO:
                return None
            patch = encode_patch(base, new, base_sha256=newest.sha256, sha256=snapshot.sha256)
        except (OSError, PatchError, ValueError) as error:
            log.warning("no patch can be made; weights go out whole", base=str(newest.version), error=str(error))
            return None
        return patch if len(patch) <= _LARGEST_PATCH_RATIO * snapshot.num_bytes else None

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
        if newest is None or newest.is_on_bus or not self._lacks(await self._engines(), newest.version):
            return
        await put_file(self._bus, self._stream, self._prefix, newest.path, newest.sha256)
        if self._newest is newest:
            self._newest = replace(newest, is_on_bus=True)

    async def _engines(self) -> list[Presence]:
        """Live engines of the model; none while the bus is away."""
        try:
            engines = await live_actors(self._bus, self._run, "inference")
        except BusError:
            return []
        return [engine for engine in engines if self._model in engine.models]

    @property
    def _is_by_broadcast(self) -> bool:
        return self._settings.weights_route == "nccl"

    def _is_over_bus(self, engines: Sequence[Presence]) -> bool:
        if self._settings.weights_route != "auto":
            return self._settings.weights_route == "bus"
        return bool(self._hosts_elsewhere(engines))

    def _lacks(self, engines: Sequence[Presence], newest: Version) -> bool:
        """Whether an engine can get the newest version from nowhere but the bus."""
        if not self._is_by_broadcast:
            return self._is_over_bus(engines)
        if self._broadcast is not None and not self._broadcast.done():
            return False
        behind = [one for one in engines if one.info.get("version") != str(newest) and _life(one) not in self._reached]
        return bool(self._hosts_elsewhere(behind))

    def _hosts_elsewhere(self, engines: Sequence[Presence]) -> set[str]:
        return {engine.host for engine in engines} - {socket.gethostname()}

    def _prune(self, newest: Path, engines: Sequence[Presence]) -> None:
        """What a live engine may be loading stays, up to `weights_gib`; a killed learner's half of a file goes."""
        for leftover in self._folder.glob(".*.partial"):
            leftover.unlink(missing_ok=True)
        acknowledged = oldest_acknowledged(engines, self._model)
        room = self._settings.weights_gib * 2**30
        files = sorted(self._folder.glob("*.safetensors"), key=lambda file: Version.parse(file.stem), reverse=True)
        for old in files[self._settings.keep_weights :]:
            room -= old.stat().st_size
            is_awaited = acknowledged is not None and Version.parse(old.stem) > acknowledged
            if old != newest and (room < 0 or not is_awaited):
                old.unlink(missing_ok=True)


def _life(engine: Presence) -> EngineLife:
    return engine.name, engine.started

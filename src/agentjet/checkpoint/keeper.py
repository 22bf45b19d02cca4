"""Names in CHECKPOINTS what the learners wrote, and keeps the newest.

Invariants:

- A record is written only after every byte has been read and compared, and create-only.
- What is pruned is never the newest valid checkpoint, nor the one that the newest learner started from.
- A damaged checkpoint is renamed aside and told of; the learner resumes from an older one.

Voided versions (LEDGER) get no record: no learner may resume from them.
"""

import asyncio
import time
from collections import Counter

import structlog

from agentjet.accounting.ledger import LedgerView
from agentjet.bus.protocol import Bus
from agentjet.bus.record import put, put_once, read
from agentjet.checkpoint.store import CheckpointStore, Entry, surplus
from agentjet.config import SwarmSettings
from agentjet.config.place import RunPlace
from agentjet.durable.manifest import Manifest, set_aside, verify
from agentjet.errors import BusError, CheckpointError
from agentjet.schemas import subject
from agentjet.schemas.checkpoint import Checkpoint
from agentjet.schemas.event import Event
from agentjet.schemas.ids import RunId, Version
from agentjet.schemas.presence import Waiting
from agentjet.schemas.subject import Stream, stream_name

log = structlog.get_logger(__name__)

POLL_SECONDS = 1.0


class CheckpointKeeper:
    """The one writer of a run's CHECKPOINTS."""

    def __init__(self, bus: Bus, run: RunId, settings: SwarmSettings) -> None:
        self._bus, self._run, self._keep = bus, run, settings.checkpoint.keep
        self._store = CheckpointStore(RunPlace(settings.run.dir).dir / "checkpoints")
        self._models = [name for name, model in settings.models.items() if model.is_trained]
        self._views = {model: LedgerView() for model in self._models}
        self._next = dict.fromkeys(self._models, 1)
        self._recorded: dict[str, set[Version]] = {}
        self._counts: Counter[str] = Counter()
        self._wait = _for_a_learner()

    def waiting(self) -> list[Waiting]:
        """What it waits for."""
        return [self._wait]

    def metrics(self) -> dict[str, float]:
        """Checkpoints verified, damaged and pruned since the start."""
        return {name: float(self._counts[name]) for name in ("num_verified", "num_damaged", "num_pruned")}

    async def run(self) -> None:
        """Look every second, for ever; a bus that is away only delays it."""
        is_disk_failing = False
        while True:
            try:
                await self.tend()
                if is_disk_failing:
                    is_disk_failing, self._wait = False, _for_a_learner()
            except BusError as error:
                log.warning("the bus does not answer; trying again", error=str(error))
            except OSError as error:
                # A disk that fails at pruning must not stop a run.
                log.error("the checkpoints can not be looked after; trying again", error=str(error))
                if not is_disk_failing:
                    self._wait = Waiting(what=f"the disk: {error}", since=time.time(), unblocked_by="a person")
                is_disk_failing = True
            await asyncio.sleep(POLL_SECONDS)

    async def tend(self) -> None:
        """One look at every model's folder."""
        for model in self._models:
            await self._tend(model)

    async def _tend(self, model: str) -> None:
        entries = await asyncio.to_thread(self._store.entries, model)
        recorded = await self._known(model)
        fresh = [entry for entry in entries if entry.version not in recorded]
        if not fresh and len(entries) <= max(self._keep, 1):
            return
        view = await self._ledger(model)
        for entry in fresh:
            if view.is_valid(entry.version) and await self._name(entry):
                recorded.add(entry.version)
        fresh = [entry for entry in fresh if not view.is_valid(entry.version)]
        # Only a newer incarnation voids; a version that LEDGER merely does not show yet is waited for.
        voided = [entry for entry in fresh if entry.version.incarnation < view.incarnation]
        sound = [entry for entry in entries if entry.version in recorded or entry in voided]
        base = view.start.base_checkpoint if view.start else ""
        for entry in surplus(sound, keep=self._keep, valid=recorded & set(view.versions), base=base):
            await asyncio.to_thread(self._store.remove, entry.path)
            self._counts["num_pruned"] += 1

    async def _known(self, model: str) -> set[Version]:
        """Versions that have a record; read once, as nobody else writes them."""
        if model not in self._recorded:
            name, of = stream_name(self._run, Stream.CHECKPOINTS), subject.checkpoints_of(self._run, model)
            stored = await self._bus.last_many(name, [of])
            self._recorded[model] = {Version.parse(one.rpartition(".")[2]) for one in stored}
            await asyncio.to_thread(self._store.sweep, model)
        return self._recorded[model]

    async def _ledger(self, model: str) -> LedgerView:
        name, of = stream_name(self._run, Stream.LEDGER), subject.ledger(self._run, model)
        async for message in self._bus.scan(name, of, start=self._next[model]):
            self._views[model].apply(message.sequence, await read(self._bus, self._run, Stream.LEDGER, message))
            self._next[model] = message.sequence + 1
        return self._views[model]

    async def _name(self, entry: Entry) -> bool:
        """Verify a checkpoint and write its record; False when it is damaged."""
        self._wait = Waiting(what=f"checkpoint {entry.model}/{entry.version} to be read", since=time.time())
        try:
            return await self._name_verified(entry)
        finally:
            self._wait = _for_a_learner()

    async def _name_verified(self, entry: Entry) -> bool:
        try:
            manifest = await asyncio.to_thread(verify, entry.path)
            if (manifest.run or self._run, manifest.version) != (self._run, str(entry.version)):
                raise CheckpointError(
                    f"{entry.path} holds {manifest.version} of run {manifest.run}, not what it is called"
                )
        except CheckpointError as error:
            await self._damaged(entry, error)
            return False
        to = subject.checkpoint(self._run, entry.model, str(entry.version))
        await put_once(self._bus, self._run, Stream.CHECKPOINTS, to, self._record(entry, manifest))
        self._counts["num_verified"] += 1
        return True

    def _record(self, entry: Entry, manifest: Manifest) -> Checkpoint:
        return Checkpoint(
            run=self._run,
            model=entry.model,
            version=str(entry.version),
            ledger_sequence=manifest.ledger_sequence,
            cursor=manifest.cursor,
            path=str(entry.path.absolute()),
            files=manifest.files,
        )

    async def _damaged(self, entry: Entry, error: CheckpointError) -> None:
        aside = await asyncio.to_thread(set_aside, entry.path)
        self._counts["num_damaged"] += 1
        log.error("a checkpoint is damaged and was set aside", error=str(error), path=str(aside))
        event = Event(
            run=self._run,
            actor="checkpoint",
            kind="damaged",
            level="error",
            data={"model": entry.model, "version": str(entry.version), "error": str(error), "path": str(aside)},
        )
        await put(self._bus, self._run, Stream.EVENTS, subject.event(self._run, "checkpoint", "damaged"), event)


def _for_a_learner() -> Waiting:
    return Waiting(what="a checkpoint of a learner", since=time.time(), unblocked_by="a learner")

"""What a learner goes on from: the newest whole checkpoint that LEDGER has not voided, or the model's first weights.

Invariants (DESIGN, accounting 10 and 15):

- Only a checkpoint that was verified and named in CHECKPOINTS is taken; a newer one on disk is waited for.
- One that was damaged since it was named is set aside, never deleted, and the one before it is taken.
- The log has to hold what the base has not settled, and to be the log that the base has seen.

It only reads the bus.
"""

import asyncio
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog

from agentjet.accounting.ledger import LedgerView
from agentjet.bus.protocol import Bus
from agentjet.bus.record import read_as
from agentjet.config import SwarmSettings
from agentjet.config.place import RunPlace
from agentjet.durable.manifest import set_aside, versions_in
from agentjet.errors import CheckpointDamagedError, CheckpointError, FencedError
from agentjet.schemas import subject
from agentjet.schemas.checkpoint import Checkpoint
from agentjet.schemas.ids import RunId, Version
from agentjet.schemas.subject import Stream, stream_name
from agentjet.training.batch_source import BatchSource
from agentjet.training.replay import make_trainer
from agentjet.training.state import load_state
from agentjet.training.trainer import Trainer

log = structlog.get_logger(__name__)

VERIFY_SECONDS = 60.0
"""How long a checkpoint on disk may take to be verified."""
LOOK_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Base:
    """Where a learner stands at its start."""

    trainer: Trainer
    source: BatchSource
    step: int = 0
    checkpoint: Checkpoint | None = None
    """None: the model's first weights."""
    position_digest: str = ""
    """sha256 of the SAMPLES record at the fold's position when the checkpoint was written."""


class Restoration:
    """Finds and loads the base of one model's learner.

    Args:
        bus: Where the run's streams are.
        run: The run.
        model: Whose base.
        settings: The run's.
        view: LEDGER's word on which versions count; it has been read.
        say: Told what is waited for, and who could unblock it.
    """

    def __init__(
        self,
        bus: Bus,
        run: RunId,
        model: str,
        settings: SwarmSettings,
        view: LedgerView,
        say: Callable[[str, str], None],
    ) -> None:
        self._bus, self._run, self._model = bus, run, model
        self._settings, self._of, self._view, self._say = settings, settings.models[model], view, say
        self._folder = RunPlace(settings.run.dir).checkpoints(model)

    async def base(self) -> Base:
        """The base, loaded and checked against the log.

        Raises:
            CheckpointError: It can not be loaded, or the log was purged beyond it.
            FencedError: The log lost its end.
        """
        base = await self._load()
        await self._check_log(base)
        return base

    async def _load(self) -> Base:
        while True:
            checkpoint = await self._choose()
            self._say("its model to load", "")
            try:
                return await asyncio.to_thread(self._loaded, checkpoint)
            except CheckpointDamagedError as error:
                if checkpoint is None:
                    raise
                aside = await asyncio.to_thread(_out_of_the_way, Path(checkpoint.path))
                log.warning(
                    "a checkpoint is damaged and was set aside; starting from an older one",
                    version=checkpoint.version,
                    error=str(error),
                    path=str(aside),
                )

    async def _choose(self) -> Checkpoint | None:
        """The newest verified checkpoint whose step stands in LEDGER; a newer one on disk is waited for."""
        give_up = time.monotonic() + VERIFY_SECONDS
        while True:
            verified = await self._newest_verified()
            written = await asyncio.to_thread(self._newest_written)
            if written is None or (verified is not None and Version.parse(verified.version) >= written):
                return verified
            if time.monotonic() > give_up:
                log.warning("a checkpoint was never verified; starting from an older one", version=str(written))
                return verified
            self._say(f"checkpoint {written} to be verified", "the checkpoint actor")
            await asyncio.sleep(LOOK_SECONDS)

    async def _newest_verified(self) -> Checkpoint | None:
        name, of = stream_name(self._run, Stream.CHECKPOINTS), subject.checkpoints_of(self._run, self._model)
        stored = await self._bus.last_many(name, [of])
        records = [await read_as(Checkpoint, self._bus, self._run, Stream.CHECKPOINTS, one) for one in stored.values()]
        usable = [one for one in records if self._view.is_valid(Version.parse(one.version)) and _exists(one)]
        return max(usable, key=lambda one: Version.parse(one.version), default=None)

    def _newest_written(self) -> Version | None:
        return max((version for version in versions_in(self._folder) if self._view.is_valid(version)), default=None)

    def _loaded(self, checkpoint: Checkpoint | None) -> Base:
        trainer = make_trainer(self._settings, self._model)
        if checkpoint is None:
            return Base(trainer, BatchSource(self._of.learner, self._of.algorithm))
        extra = load_state(trainer, Path(checkpoint.path))
        return Base(
            trainer,
            BatchSource(self._of.learner, self._of.algorithm, extra["fold"]),
            step=int(extra["step"]),
            checkpoint=checkpoint,
            position_digest=str(extra["position_digest"]),
        )

    async def _check_log(self, base: Base) -> None:
        """A log that lost its end (power loss), or was purged beyond the base, does not fit the base any more."""
        position, cursor = base.source.fold.position, max(base.source.fold.cursor, 1)
        info = await self._bus.stream_info(stream_name(self._run, Stream.SAMPLES))
        if info.first_sequence > cursor:
            start = f"checkpoint {base.checkpoint.version}" if base.checkpoint else "its first weights"
            raise CheckpointError(
                f"model {self._model} would start from {start}, but the samples {cursor} to {info.first_sequence - 1} "
                f"after it were purged; bring the newer checkpoints back to {self._folder}, or start a new run from "
                "one of them"
            )
        if base.checkpoint is None:
            return
        found = await sample_digest(self._bus, self._run, position)
        if info.last_sequence < position or (found and found != base.position_digest):
            raise FencedError(
                f"SAMPLES does not hold record {position}, which checkpoint {base.checkpoint.version} has seen: the "
                "log lost its end; start a new run from the checkpoint's weights, or restore the server's data"
            )


async def sample_digest(bus: Bus, run: RunId, sequence: int) -> str:
    """sha256 of a SAMPLES record's body; empty when it is purged."""
    message = await bus.get(stream_name(run, Stream.SAMPLES), sequence) if sequence > 0 else None
    return hashlib.sha256(message.payload).hexdigest() if message else ""


def _out_of_the_way(folder: Path) -> Path | None:
    """Its new name; None when the whole folder is gone, as after pruning."""
    return set_aside(folder) if folder.is_dir() else None


def _exists(checkpoint: Checkpoint) -> bool:
    return Path(checkpoint.path).is_dir()

"""One life of a learner: a pure fold over SAMPLES that takes optimizer steps and writes them down.

Invariants (DESIGN, accounting 9 and 10):

- At start it appends LEDGER `learner_start` on top of what it has read. That fences any predecessor, whose next append
  conflicts, and voids the steps after its base checkpoint.
- Which samples make a batch is a function of the log (`LearnerFold`); a step is written to LEDGER before its weights
  are published, and its checkpoint before the record that names it.
- A restart takes the newest verified checkpoint that LEDGER has not voided and that is still whole, and feeds the fold
  from its cursor on.

It does not know how a step is computed (`Trainer`).
"""

import asyncio
import hashlib
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import structlog

from agentjet.accounting.ledger import CurriculumView, LedgerView
from agentjet.bus.ledger import LedgerChain
from agentjet.bus.presence import has_ended, live_actors
from agentjet.bus.protocol import Bus, StoredMessage
from agentjet.bus.record import read, read_as
from agentjet.config import SwarmSettings
from agentjet.config.load import config_digest
from agentjet.config.place import RunPlace
from agentjet.durable.manifest import set_aside, versions_in
from agentjet.errors import BusError, CheckpointDamagedError, CheckpointError, FencedError, TrainingDivergedError
from agentjet.schemas import subject
from agentjet.schemas.checkpoint import Checkpoint
from agentjet.schemas.ids import RunId, Version
from agentjet.schemas.ledger import GroupDrop, LearnerStart, LearnerStep
from agentjet.schemas.presence import Presence, Waiting
from agentjet.schemas.sample import SlotRecord
from agentjet.schemas.subject import Stream, stream_name
from agentjet.training.batch_source import BatchSource, SampleBatch
from agentjet.training.publisher import WeightsPublisher
from agentjet.training.replay import make_trainer
from agentjet.training.state import load_state, save_state
from agentjet.training.trainer import StepResult, Trainer

log = structlog.get_logger(__name__)

T = TypeVar("T")

PREDECESSOR_SECONDS = 12.0
"""How long a predecessor's heartbeat may linger before it counts as alive."""
PUBLISH_AGAIN_SECONDS = 3.0
VERIFY_SECONDS = 60.0
"""How long a checkpoint on disk may take to be verified."""


class Incarnation:
    """A learner from its start record to its end."""

    def __init__(self, bus: Bus, run: RunId, model: str, settings: SwarmSettings, *, name: str) -> None:
        self._bus, self._run, self._model, self._name = bus, run, model, name
        self._settings, self._of = settings, settings.models[model]
        self._place = RunPlace(settings.run.dir)
        self._chain = LedgerChain(bus, run, model)
        self._view = LedgerView()
        self._source = BatchSource(self._of.learner, self._of.algorithm)
        self._curriculum = CurriculumView()
        self._position_digest = ""
        self._number = 0
        self._step = 0
        self._saved_step = -1
        self._trainer: Trainer | None = None
        self._publisher = WeightsPublisher(bus, run, model, self._of.learner, self._place.weights(model))
        self._metrics: dict[str, float] = {}
        self._wait = Waiting(what="its model to load", since=time.time())

    def waiting(self) -> list[Waiting]:
        """What it waits for."""
        return [self._wait]

    def metrics(self) -> dict[str, float]:
        """Those of the newest step."""
        return dict(self._metrics)

    async def run(self) -> None:
        """Learn until cancelled; a finished run is kept ready to go on.

        Raises FencedError when another learner of the model is alive or has taken over.
        """
        await self._refuse_a_second()
        await self._begin()
        feed: asyncio.Queue[StoredMessage | None] = asyncio.Queue(maxsize=10_000)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._read_samples(feed))
            group.create_task(self._await_finish(feed))
            group.create_task(self._publisher.serve_late())
            group.create_task(self._learn_until_stopped(feed))

    async def _refuse_a_second(self) -> None:
        give_up = time.monotonic() + PREDECESSOR_SECONDS
        self._say("its predecessor's heartbeat to end")
        while other := await self._other():
            if time.monotonic() > give_up:
                raise FencedError(
                    f"a learner of model {self._model} is alive on {other.host} (pid {other.pid}); stop it first"
                )
            await asyncio.sleep(0.5)

    async def _other(self) -> Presence | None:
        live = await live_actors(self._bus, self._run, "learner")
        others = (one for one in live if self._model in one.models and one.name != self._name)
        # A killed predecessor need not fade from the bus first.
        return next((one for one in others if not has_ended(one)), None)

    async def _begin(self) -> None:
        """Read the ledger, restore the base, append the start, publish the head."""
        for sequence, record in await self._chain.load():
            self._view.apply(sequence, record)
        base = await self._restore()
        await self._check_log(base)
        self._number = self._view.incarnation + 1
        start = LearnerStart(
            run=self._run,
            model=self._model,
            incarnation=self._number,
            writer=self._name,
            base_step=self._step,
            base_checkpoint=base.version if base else "",
            cursor=self._source.fold.cursor,
            position_digest=await self._digest_at(self._source.fold.position),
            config_digest=config_digest(self._settings),
            fold_digest=self._source.fold.digest(),
        )
        await self._publish(await self._append(start))

    async def _restore(self) -> Checkpoint | None:
        """Make the trainer, from the newest whole checkpoint; what was damaged since it was verified is set aside."""
        while True:
            base = await self._base()
            self._say("its model to load")
            try:
                self._trainer = await asyncio.to_thread(self._make_trainer, base)
                return base
            except CheckpointDamagedError as error:
                if base is None:
                    raise
                aside = await asyncio.to_thread(_out_of_the_way, Path(base.path))
                log.warning(
                    "a checkpoint is damaged and was set aside; starting from an older one",
                    version=base.version,
                    error=str(error),
                    path=str(aside),
                )

    async def _base(self) -> Checkpoint | None:
        """The newest verified checkpoint whose step stands in LEDGER; a newer one on disk is waited for."""
        give_up = time.monotonic() + VERIFY_SECONDS
        while True:
            base = await self._newest_verified()
            written = await asyncio.to_thread(self._newest_written)
            if written is None or (base is not None and Version.parse(base.version) >= written):
                return base
            if time.monotonic() > give_up:
                log.warning("a checkpoint was never verified; starting from an older one", version=str(written))
                return base
            self._say(f"checkpoint {written} to be verified", unblocked_by="the checkpoint actor")
            await asyncio.sleep(0.2)

    async def _newest_verified(self) -> Checkpoint | None:
        name, of = stream_name(self._run, Stream.CHECKPOINTS), subject.checkpoints_of(self._run, self._model)
        stored = await self._bus.last_many(name, [of])
        records = [await read_as(Checkpoint, self._bus, self._run, Stream.CHECKPOINTS, one) for one in stored.values()]
        usable = [one for one in records if self._view.is_valid(Version.parse(one.version)) and _exists(one)]
        return max(usable, key=lambda one: Version.parse(one.version), default=None)

    def _newest_written(self) -> Version | None:
        written = versions_in(self._place.checkpoints(self._model))
        return max((version for version in written if self._view.is_valid(version)), default=None)

    def _make_trainer(self, base: Checkpoint | None) -> Trainer:
        trainer = make_trainer(self._settings, self._model)
        if base is not None:
            extra = load_state(trainer, Path(base.path))
            self._source = BatchSource(self._of.learner, self._of.algorithm, extra["fold"])
            self._step = self._saved_step = int(extra["step"])
            self._position_digest = str(extra["position_digest"])
        return trainer

    async def _check_log(self, base: Checkpoint | None) -> None:
        """A log that lost its end (power loss), or was purged beyond the base, does not fit the base any more."""
        position, cursor = self._source.fold.position, max(self._source.fold.cursor, 1)
        info = await self._bus.stream_info(stream_name(self._run, Stream.SAMPLES))
        if info.first_sequence > cursor:
            start = f"checkpoint {base.version}" if base else "its first weights"
            raise CheckpointError(
                f"model {self._model} would start from {start}, but the samples {cursor} to {info.first_sequence - 1} "
                f"after it were purged; bring the newer checkpoints back to {self._place.checkpoints(self._model)}, or "
                "start a new run from one of them"
            )
        if base is None:
            return
        found = await self._digest_at(position)
        if info.last_sequence < position or (found and found != self._position_digest):
            raise FencedError(
                f"SAMPLES does not hold record {position}, which checkpoint {base.version} has seen: the log lost its "
                "end; start a new run from the checkpoint's weights, or restore the server's data"
            )

    async def _digest_at(self, sequence: int) -> str:
        """sha256 of a SAMPLES record's body; empty when it is purged."""
        message = await self._bus.get(stream_name(self._run, Stream.SAMPLES), sequence) if sequence > 0 else None
        return hashlib.sha256(message.payload).hexdigest() if message else ""

    async def _read_samples(self, feed: "asyncio.Queue[StoredMessage | None]") -> None:
        name, of = stream_name(self._run, Stream.SAMPLES), subject.samples_of(self._run, self._model)
        async for message in self._bus.tail(name, of, start=self._source.start):
            await feed.put(message)

    async def _await_finish(self, feed: "asyncio.Queue[StoredMessage | None]") -> None:
        """A finite run's last batch may be partial: RunFinish says that no further group is issued."""
        name, of = stream_name(self._run, Stream.LEDGER), subject.ledger(self._run, subject.CURRICULUM)
        async for message in self._bus.tail(name, of):
            self._curriculum.apply(message.sequence, await read(self._bus, self._run, Stream.LEDGER, message))
            if self._curriculum.finish is not None:
                await feed.put(None)

    async def _learn_until_stopped(self, feed: "asyncio.Queue[StoredMessage | None]") -> None:
        """A step that has begun is finished, and a stop leaves a checkpoint: going on loses no step."""
        try:
            await self._learn(feed)
        except asyncio.CancelledError:
            await self._save()
            raise

    async def _learn(self, feed: "asyncio.Queue[StoredMessage | None]") -> None:
        while True:
            self._say_idle()
            message = await feed.get()
            if message is not None:
                await self._take(message)
            elif self._curriculum.finish is not None:
                self._source.fold.finish(self._curriculum.num_issued(self._model))
            while await finish(self._settle()):
                pass
            if self._is_last or self._curriculum.finish is not None:
                await finish(self._save())

    @property
    def _is_last(self) -> bool:
        return 0 < self._settings.run.num_steps <= self._step

    async def _take(self, message: StoredMessage) -> None:
        record = await read(self._bus, self._run, Stream.SAMPLES, message)
        if not isinstance(record, SlotRecord):
            log.error("a strange record among the samples", subject=message.subject)
            return
        self._source.take(message.sequence, record)

    async def _settle(self) -> bool:
        """Write down every drop and take one step, if the log allows it; whether it took one."""
        for drop in self._source.pop_drops():
            await self._append(
                GroupDrop(
                    run=self._run,
                    model=self._model,
                    incarnation=self._number,
                    group=drop.group,
                    rank=drop.rank,
                    reason=drop.reason,
                )
            )
        ready = None if self._is_last else self._source.pop_batch()
        if ready is not None:
            await self._take_step(ready)
        return ready is not None

    async def _take_step(self, ready: SampleBatch) -> None:
        assert self._trainer is not None
        self._say(f"step {self._step + 1} to be computed", unblocked_by="this learner")
        started = time.monotonic()
        batch = ready.batch
        result: StepResult = await asyncio.to_thread(self._trainer.step, ready.samples, policy_step=self._step)
        self._step += 1
        metrics = {**result.metrics, "step_seconds": time.monotonic() - started}
        record = LearnerStep(
            run=self._run,
            model=self._model,
            incarnation=self._number,
            step=self._step,
            cursor=batch.cursor,
            members=tuple(member.slot for member in batch.members),
            groups=tuple(group.group for group in batch.groups),
            digest=result.digest,
            is_skipped=result.is_skipped,
            metrics=metrics,
        )
        sequence = await self._append(record)
        self._metrics = {"step": float(self._step), **metrics}
        self._give_up_on_nonfinite()
        await self._publish(sequence)
        every = self._settings.checkpoint.every_steps
        if every and self._step % every == 0:
            await self._save()

    def _give_up_on_nonfinite(self) -> None:
        assert self._trainer is not None
        if self._trainer.num_skipped_in_a_row >= self._of.learner.max_nonfinite:
            raise TrainingDivergedError(
                f"the last {self._trainer.num_skipped_in_a_row} gradients of model {self._model} were not finite; "
                f"lower models.{self._model}.learner.learning_rate, then start again from the last checkpoint"
            )

    async def _append(self, record: LearnerStart | LearnerStep | GroupDrop) -> int:
        sequence = await self._chain.append(record)
        self._view.apply(sequence, record)
        self._head_sequence = sequence
        return sequence

    async def _publish(self, sequence: int) -> None:
        """Give the engines the newest weights; a full disk or an absent bus is waited for, not died of."""
        assert self._trainer is not None
        version = Version(self._number, self._step)
        while True:
            try:
                await self._publisher.publish(version, sequence, self._trainer)
                return
            except (OSError, BusError) as error:
                log.error("weights can not be published; trying again", version=str(version), error=str(error))
                self._say(f"weights {version} to be published: {error}", unblocked_by="space, or the NATS server")
                await asyncio.sleep(PUBLISH_AGAIN_SECONDS)

    async def _save(self) -> None:
        """Write a checkpoint of the newest step, unless it is written."""
        if self._saved_step == self._step or self._step == 0:
            return
        assert self._trainer is not None
        self._say(f"checkpoint of step {self._step} to be written", unblocked_by="this learner")
        extra: dict[str, Any] = {
            "run": self._run,
            "model": self._model,
            "incarnation": self._number,
            "step": self._step,
            "version": str(Version(self._number, self._step)),
            "cursor": self._source.fold.cursor,
            "ledger_sequence": self._head_sequence,
            "position_digest": await self._digest_at(self._source.fold.position),
            "fold": self._source.fold.to_dict(),
        }
        folder = self._place.checkpoints(self._model) / str(Version(self._number, self._step))
        await asyncio.to_thread(save_state, self._trainer, folder, extra)
        self._saved_step = self._step

    def _say(self, what: str, unblocked_by: str = "") -> None:
        self._wait = Waiting(what=what, since=time.time(), unblocked_by=unblocked_by)

    def _say_idle(self) -> None:
        if self._is_last:
            self._say("the run's end", unblocked_by="the curriculum: a last evaluation")
            return
        since = self._wait.since if self._wait.what.startswith("samples") else time.time()
        what, late = f"samples for step {self._step + 1}", self._source.fold.missing
        if late:
            what += f" (groups not complete: {len(late)}, the first of rank {late[0]})"
        self._wait = Waiting(what=what, since=since, unblocked_by="rollouts, reward, merger")


async def finish(work: Coroutine[Any, Any, T]) -> T:
    """Await work to its end even when the caller is cancelled meanwhile; the cancellation follows then."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        task.result()
        raise


def _out_of_the_way(folder: Path) -> Path | None:
    """Its new name; None when the whole folder is gone, as after pruning."""
    return set_aside(folder) if folder.is_dir() else None


def _exists(checkpoint: Checkpoint) -> bool:
    return Path(checkpoint.path).is_dir()

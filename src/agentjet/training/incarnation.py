"""One life of a learner: a pure fold over SAMPLES that takes optimizer steps and writes them down.

Invariants (DESIGN, accounting 9 and 10):

- At start it appends LEDGER `learner_start` on top of what it has read. That fences any predecessor, whose next append
  conflicts, and voids the steps after its base checkpoint.
- Which samples make a batch is a function of the log (`LearnerFold`); a step is written to LEDGER before its weights
  are published, and its checkpoint before the record that names it.
- A restart feeds the fold from its base's cursor on (`Restoration`).

It does not know how a step is computed (`Trainer`), nor how a base is found.
"""

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import structlog

from agentjet.accounting.ledger import CurriculumView, LedgerView
from agentjet.bus.ledger import LedgerChain
from agentjet.bus.presence import has_ended, live_actors
from agentjet.bus.protocol import Bus, StoredMessage
from agentjet.bus.record import read
from agentjet.config import SwarmSettings
from agentjet.config.load import config_digest
from agentjet.config.place import RunPlace
from agentjet.errors import BusError, FencedError, TrainingDivergedError
from agentjet.schemas import subject
from agentjet.schemas.ids import RunId, Version
from agentjet.schemas.ledger import GroupDrop, LearnerStart, LearnerStep
from agentjet.schemas.presence import Presence, Waiting
from agentjet.schemas.sample import SlotRecord
from agentjet.schemas.subject import Stream, stream_name
from agentjet.training.agreement_watch import AgreementWatch
from agentjet.training.batch_source import BatchSource, SampleBatch
from agentjet.training.publisher import WeightsPublisher
from agentjet.training.restoration import Restoration, sample_digest
from agentjet.training.state import save_state
from agentjet.training.trainer import StepResult, Trainer

log = structlog.get_logger(__name__)

T = TypeVar("T")

PREDECESSOR_SECONDS = 12.0
"""How long a predecessor's heartbeat may linger before it counts as alive."""
PUBLISH_AGAIN_SECONDS = 3.0


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
        self._number = 0
        self._step = 0
        self._saved_step = -1
        self._trainer: Trainer | None = None
        self._watch: AgreementWatch | None = None
        self._publisher = WeightsPublisher(bus, run, model, self._of.learner, self._place.weights(model))
        self._metrics: dict[str, float] = {}
        self._wait = Waiting(what="its model to load", since=time.time())

    def waiting(self) -> list[Waiting]:
        """What it waits for."""
        return [self._wait]

    def metrics(self) -> dict[str, float]:
        """Those of the newest step, and of the newest comparison with the engines."""
        return self._metrics | (self._watch.metrics() if self._watch else {})

    def problems(self) -> list[str]:
        """Engines that disagree with it."""
        return self._watch.problems() if self._watch else []

    async def run(self) -> None:
        """Learn until cancelled; a finished run is kept ready to go on.

        Raises FencedError when another learner of the model is alive or has taken over.
        """
        await self._refuse_a_second()
        await self._begin()
        feed: asyncio.Queue[StoredMessage | None] = asyncio.Queue(maxsize=10_000)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._read_samples(feed))
                group.create_task(self._await_finish(feed))
                group.create_task(self._publisher.serve_late())
                group.create_task(self._learn_until_stopped(feed))
        finally:
            await self._publisher.close()

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
        base = await Restoration(self._bus, self._run, self._model, self._settings, self._view, self._say).base()
        self._trainer, self._source = base.trainer, base.source
        self._watch = AgreementWatch(self._model, self._of.agreement, base.trainer)
        self._step = self._saved_step = base.step
        self._number = self._view.incarnation + 1
        start = LearnerStart(
            run=self._run,
            model=self._model,
            incarnation=self._number,
            writer=self._name,
            base_step=self._step,
            base_checkpoint=base.checkpoint.version if base.checkpoint else "",
            cursor=self._source.fold.cursor,
            position_digest=await sample_digest(self._bus, self._run, self._source.fold.position),
            config_digest=config_digest(self._settings),
            fold_digest=self._source.fold.digest(),
        )
        await self._publish(await self._append(start))

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
        agreement = await self._compare_engines(ready)
        result: StepResult = await asyncio.to_thread(self._trainer.step, ready.samples, policy_step=self._step)
        self._step += 1
        metrics = {**result.metrics, **agreement, "step_seconds": time.monotonic() - started}
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

    async def _compare_engines(self, ready: SampleBatch) -> dict[str, float]:
        """Where that is due; samples of later batches help where this one was drawn with older weights."""
        assert self._watch is not None
        if not self._watch.is_due(self._step):
            return {}
        now = Version(self._number, self._step)
        samples = [*(sample for group in ready.samples for sample in group), *self._source.waiting()]
        return await asyncio.to_thread(
            self._watch.compare, samples, self._step, lambda version: self._view.is_same(Version.parse(version), now)
        )

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
            "position_digest": await sample_digest(self._bus, self._run, self._source.fold.position),
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

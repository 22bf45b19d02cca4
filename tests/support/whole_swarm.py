"""A server that may be killed, and the stages after the episode's end: all that accounting needs but a model."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Self, TypeVar

from agentjet.accounting.audit import AuditReport
from agentjet.accounting.fold import LearnerFold
from agentjet.accounting.ledger import LedgerView
from agentjet.actors.merger import Merger
from agentjet.bus.handler import ConsumeState, consume
from agentjet.bus.ledger import LedgerChain
from agentjet.bus.nats import NatsBus
from agentjet.bus.protocol import Bus
from agentjet.bus.record import read, stream_specs
from agentjet.bus.server import EmbeddedServer
from agentjet.config.settings import SwarmSettings
from agentjet.curriculum.audit import read_audit
from agentjet.schemas import subject
from agentjet.schemas.ids import RunId
from agentjet.schemas.ledger import GroupDrop, LearnerStart, LearnerStep
from agentjet.schemas.record import Record
from agentjet.schemas.sample import SlotRecord
from agentjet.schemas.subject import Stream, stream_name

GIB = 1024**3
T = TypeVar("T")


class OwnServer:
    """A server and a connection to it."""

    def __init__(self, folder: Path, *, max_store_bytes: int = 2 * GIB) -> None:
        self.server = EmbeddedServer(folder, max_store_bytes=max_store_bytes)
        self.buses: list[NatsBus] = []

    @property
    def bus(self) -> NatsBus:
        return self.buses[0]

    async def connect(self) -> NatsBus:
        self.buses.append(await NatsBus.connect(self.server.url, name="test"))
        return self.buses[-1]

    async def crash(self) -> None:
        """SIGKILL, and up again on the same port; clients reconnect by themselves."""
        await self.server.kill()
        await self.server.start()

    async def forget_acknowledgements(self, stream: str, durable: str) -> None:
        """The worst that a killed server does to a consumer: everything is delivered again as if for the first time."""
        await self.bus._connection.api(f"CONSUMER.DELETE.{stream}.{durable}", what="test")

    async def __aenter__(self) -> Self:
        await self.server.start()
        await self.connect()
        return self

    async def __aexit__(self, *exception: object) -> None:
        for bus in self.buses:
            await bus.close()
        await self.server.stop()


async def make_streams(bus: Bus, run: RunId, max_bytes: int = GIB) -> None:
    for spec in stream_specs(run, max_bytes=max_bytes):
        await bus.ensure_stream(spec)


@contextlib.asynccontextmanager
async def working(*works: Awaitable[None]) -> AsyncIterator[list["asyncio.Future[None]"]]:
    """Actors at work; cancelled at the end, as a kill would: nothing is handed back or finished."""
    tasks = [asyncio.ensure_future(work) for work in works]
    await asyncio.sleep(0.1)
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def until(check: Callable[[], Awaitable[T]], seconds: float = 20.0) -> T:
    async with asyncio.timeout(seconds):
        while not (found := await check()):
            await asyncio.sleep(0.02)
    return found


async def records(bus: Bus, run: RunId, stream: Stream, of: str = ">") -> list[Any]:
    """What a stream holds, in order, but for blobs' chunks."""
    found = [message async for message in bus.scan(stream_name(run, stream), of)]
    return [await read(bus, run, stream, one) for one in found if ".blob." not in one.subject]


async def count(bus: Bus, run: RunId, stream: Stream) -> int:
    return (await bus.stream_info(stream_name(run, stream))).num_messages


def at_least(bus: Bus, run: RunId, stream: Stream, number: int) -> Callable[[], Awaitable[bool]]:
    async def check() -> bool:
        return await count(bus, run, stream) >= number

    return check


async def merging(bus: Bus, run: RunId, on_state: Callable[[ConsumeState], None] | None = None) -> None:
    """The merger actor."""
    merger = Merger(bus, run)
    consumer = await bus.consumer(stream_name(run, Stream.SCORES), "merger")
    await consume(
        consumer, merger.handle, name="merger", on_poison=merger.poison, concurrency=8, on_state=on_state or merger.note
    )


class FoldLearner:
    """A learner without a model: the real fold and the real chain, from the first sample at each start."""

    def __init__(self, bus: Bus, run: RunId, model: str, settings: SwarmSettings) -> None:
        self._bus, self._run, self._model = bus, run, model
        of = settings.models[model]
        self._chain, self._view = LedgerChain(bus, run, model), LedgerView()
        self._fold = LearnerFold(
            batch_groups=of.learner.batch_groups,
            straggler_bound=of.learner.straggler_bound,
            min_group=of.algorithm.min_group,
            drop_constant_groups=of.algorithm.drop_constant_groups,
        )

    async def run(self) -> None:
        for sequence, record in await self._chain.load():
            self._view.apply(sequence, record)
        self._number = self._view.incarnation + 1
        await self._append(LearnerStart, base_step=0, cursor=1, config_digest="c", fold_digest="f")
        name, of = stream_name(self._run, Stream.SAMPLES), subject.samples_of(self._run, self._model)
        async for message in self._bus.tail(name, of):
            record = await read(self._bus, self._run, Stream.SAMPLES, message)
            assert isinstance(record, SlotRecord)
            self._fold.apply(message.sequence, record)
            for drop in self._fold.pop_drops():
                await self._append(GroupDrop, group=drop.group, rank=drop.rank, reason=drop.reason)
            while (batch := self._fold.pop_batch()) is not None:
                await self._append(
                    LearnerStep,
                    step=batch.step,
                    cursor=batch.cursor,
                    members=tuple(member.slot for member in batch.members),
                    groups=tuple(group.group for group in batch.groups),
                    digest="d",
                )

    async def _append(self, kind: type[Record], **fields: object) -> None:
        common = {"run": self._run, "model": self._model, "incarnation": self._number}
        await self._chain.append(kind.model_validate(common | fields))


async def audited(bus: Bus, run: RunId, settled: int, seconds: float = 30.0) -> AuditReport:
    """The audit once so many slots are settled."""

    async def check() -> AuditReport | None:
        report = await read_audit(bus, run)
        return report if report.settled >= settled else None

    return await until(check, seconds)

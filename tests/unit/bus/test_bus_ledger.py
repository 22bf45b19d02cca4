"""A chain of the ledger through lost answers, full servers and rivals."""

from collections.abc import AsyncIterator

import pytest

from agentjet.bus import ledger as ledger_module
from agentjet.bus.ledger import LedgerChain
from agentjet.bus.memory import MemoryBus
from agentjet.bus.protocol import StoredMessage
from agentjet.bus.record import stream_specs
from agentjet.errors import BusFullError, BusTimeoutError, FencedError
from agentjet.schemas.ids import RunId
from agentjet.schemas.ledger import RunFinish

RUN = RunId("run-aaaaaa")


def end(reason: str) -> RunFinish:
    return RunFinish(run=RUN, reason=reason)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "RETRY_SECONDS", 0.01)


class FlakyBus(MemoryBus):
    """Stores, or not, and then loses the answer as often as it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.failures: list[tuple[bool, Exception]] = []
        self.unread = 0
        """Reads of the chain's end that fail."""

    async def publish(self, *words, **options) -> int:
        if not self.failures:
            return await super().publish(*words, **options)
        is_stored, error = self.failures.pop(0)
        if is_stored:
            await super().publish(*words, **options)
        raise error

    async def last(self, stream: str, subject: str) -> StoredMessage | None:
        if self.unread:
            self.unread -= 1
            raise BusTimeoutError("no answer")
        return await super().last(stream, subject)


@pytest.fixture
async def bus() -> AsyncIterator[FlakyBus]:
    bus = FlakyBus()
    for spec in stream_specs(RUN, max_bytes=2**30):
        await bus.ensure_stream(spec)
    yield bus


async def reasons(bus: MemoryBus) -> list[str]:
    records = [record for _, record in await LedgerChain(bus, RUN, "m").load()]
    return [record.reason for record in records if isinstance(record, RunFinish)]


@pytest.mark.parametrize("error", [BusTimeoutError("no answer"), BusFullError("full")])
async def test_an_append_that_was_not_stored_is_tried_again(bus: FlakyBus, error: Exception):
    chain = LedgerChain(bus, RUN, "m")
    bus.failures = [(False, error), (False, error)]
    sequence = await chain.append(end("one"))
    assert chain.last_sequence == sequence
    assert await reasons(bus) == ["one"]


async def test_an_append_whose_answer_was_lost_is_not_repeated(bus: FlakyBus):
    chain = LedgerChain(bus, RUN, "m")
    bus.failures = [(True, BusTimeoutError("no answer"))]
    await chain.append(end("one"))
    await chain.append(end("two"))
    assert await reasons(bus) == ["one", "two"]


@pytest.mark.parametrize("unread", [1, 3])
async def test_an_append_whose_answer_was_lost_in_a_long_outage_is_not_taken_for_a_rival_s(bus: FlakyBus, unread: int):
    chain = LedgerChain(bus, RUN, "m")
    await chain.append(end("zero"))
    bus.failures, bus.unread = [(True, BusTimeoutError("no answer"))], unread
    await chain.append(end("one"))
    await chain.append(end("two"))
    assert await reasons(bus) == ["zero", "one", "two"]


async def test_a_rival_s_append_in_a_long_outage_fences(bus: FlakyBus):
    first, second = LedgerChain(bus, RUN, "m"), LedgerChain(bus, RUN, "m")
    await second.append(end("rival"))
    bus.failures, bus.unread = [(False, BusTimeoutError("no answer"))], 1
    with pytest.raises(FencedError):
        await first.append(end("ours"))
    assert await reasons(bus) == ["rival"]


async def test_a_rival_s_append_fences(bus: FlakyBus):
    first, second = LedgerChain(bus, RUN, "m"), LedgerChain(bus, RUN, "m")
    await first.append(end("one"))
    await second.load()
    await second.append(end("two"))
    with pytest.raises(FencedError, match="learner of model m has taken over"):
        await first.append(end("three"))
    assert await reasons(bus) == ["one", "two"]


async def test_a_rival_that_appended_while_the_answer_was_lost_fences_too(bus: FlakyBus):
    first, second = LedgerChain(bus, RUN, "m"), LedgerChain(bus, RUN, "m")
    await second.append(end("rival"))
    bus.failures = [(False, BusTimeoutError("no answer"))]
    with pytest.raises(FencedError):
        await first.append(end("ours"))
    assert await reasons(bus) == ["rival"]

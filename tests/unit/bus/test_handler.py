"""The loop of a stage, on the in-memory bus."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from agentjet.bus.handler import ConsumeState, PostponeError, consume
from agentjet.bus.memory import MemoryBus
from agentjet.bus.protocol import Consumer, Delivery, StoredMessage, StreamSpec
from agentjet.errors import BusError, BusUnavailableError, UnknownSchemaError


async def no_poison(message: StoredMessage, error: Exception) -> None:
    raise AssertionError(f"{message.subject} counted as poison") from error


@asynccontextmanager
async def stage(
    bus: MemoryBus,
    handle: Callable[[StoredMessage], Awaitable[None]],
    *,
    num_messages: int = 1,
    ack_wait_seconds: float = 5.0,
    **options: object,
) -> AsyncIterator[Consumer]:
    await bus.ensure_stream(StreamSpec("S", ("s.>",), 10**6))
    for i in range(num_messages):
        await bus.publish(f"s.{i}", b"", stream="S")
    consumer = await bus.consumer("S", "c", ack_wait_seconds=ack_wait_seconds)
    settings: dict[str, object] = {"name": "test", "on_poison": no_poison, "backoff_seconds": 0.01} | options
    task = asyncio.create_task(consume(consumer, handle, **settings))  # type: ignore[arg-type]
    try:
        yield consumer
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def backlog(bus: MemoryBus) -> int:
    return (await bus.stream_info("S", with_consumers=True)).consumers["c"]


async def drained(bus: MemoryBus, limit_seconds: float = 5.0) -> None:
    async with asyncio.timeout(limit_seconds):
        while await backlog(bus):
            await asyncio.sleep(0.01)


async def test_every_message_is_handled_once_and_acknowledged(memory_bus: MemoryBus):
    seen: list[str] = []

    async def handle(message: StoredMessage) -> None:
        seen.append(message.subject)

    async with stage(memory_bus, handle, num_messages=20, concurrency=4):
        await drained(memory_bus)
    assert sorted(seen) == sorted(f"s.{i}" for i in range(20))


async def test_at_most_concurrency_handlers_run_and_nothing_is_fetched_beyond_them(memory_bus: MemoryBus):
    running = peak = 0
    states: list[ConsumeState] = []

    async def handle(_message: StoredMessage) -> None:
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        await asyncio.sleep(0.02)
        running -= 1

    async with stage(memory_bus, handle, num_messages=10, concurrency=3, on_state=states.append) as consumer:
        await asyncio.sleep(0.01)
        assert await consumer.num_pending() == 7
        await drained(memory_bus)
    assert peak == 3
    assert max(s.num_running for s in states) == 3
    assert states[-1].num_handled == 10
    assert {"a free handler", "a message"} <= {s.waits_for for s in states}


async def test_a_long_handler_keeps_its_message_beyond_ack_wait(memory_bus: MemoryBus):
    starts = 0

    async def handle(_message: StoredMessage) -> None:
        nonlocal starts
        starts += 1
        await asyncio.sleep(0.6)

    async with stage(memory_bus, handle, ack_wait_seconds=0.2, in_progress_seconds=0.05, concurrency=2):
        await drained(memory_bus)
    assert starts == 1


async def test_a_crash_is_tried_again_and_a_later_success_forgives_it(memory_bus: MemoryBus):
    tries = 0

    async def handle(_message: StoredMessage) -> None:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise ValueError("not yet")

    async with stage(memory_bus, handle, max_crashes=3):
        await drained(memory_bus)
    assert tries == 3


async def test_a22_a_message_that_always_crashes_gets_its_terminal_record_after_k_tries(memory_bus: MemoryBus):
    tries = 0
    poisoned: list[tuple[str, str]] = []

    async def handle(message: StoredMessage) -> None:
        nonlocal tries
        if message.subject == "s.1":
            tries += 1
            raise ZeroDivisionError("always")

    async def on_poison(message: StoredMessage, error: Exception) -> None:
        poisoned.append((message.subject, str(error)))

    async with stage(memory_bus, handle, num_messages=3, max_crashes=3, on_poison=on_poison):
        await drained(memory_bus)
    assert tries == 3
    assert poisoned == [("s.1", "always")]


async def test_crashes_over_messages_of_one_subject_are_counted_apart(memory_bus: MemoryBus):
    tries: dict[int, int] = {}
    poisoned: list[int] = []

    async def handle(message: StoredMessage) -> None:
        count = tries[message.sequence] = tries.get(message.sequence, 0) + 1
        if message.sequence == 1 or count == 1:
            raise ZeroDivisionError("always, or the first time")

    async def on_poison(message: StoredMessage, _error: Exception) -> None:
        poisoned.append(message.sequence)

    async with stage(memory_bus, handle, num_messages=0, max_crashes=3, on_poison=on_poison):
        for _ in range(6):
            await memory_bus.publish("s.same", b"", stream="S")
        await drained(memory_bus)
    assert tries == {1: 3} | dict.fromkeys(range(2, 7), 2)
    assert poisoned == [1]


async def test_a_poison_hook_that_fails_leaves_the_message_unacknowledged(memory_bus: MemoryBus):
    hooks = 0

    async def handle(_message: StoredMessage) -> None:
        raise ValueError("always")

    async def on_poison(_message: StoredMessage, _error: Exception) -> None:
        nonlocal hooks
        hooks += 1
        raise RuntimeError("the hook is broken too")

    async with stage(memory_bus, handle, max_crashes=1, on_poison=on_poison):
        await asyncio.sleep(0.1)
        assert hooks == 1
        assert await backlog(memory_bus) == 1


@pytest.mark.parametrize("error", [BusError("down"), UnknownSchemaError("newer")])
async def test_a_failing_bus_or_an_unknown_schema_is_a_delay_and_never_poison(
    memory_bus: MemoryBus, monkeypatch: pytest.MonkeyPatch, error: Exception
):
    monkeypatch.setattr("agentjet.bus.handler._BUS_DELAY_SECONDS", 0.01)
    tries = 0

    async def handle(_message: StoredMessage) -> None:
        nonlocal tries
        tries += 1
        if tries < 6:
            raise error

    async with stage(memory_bus, handle, max_crashes=2):
        await drained(memory_bus)
    assert tries == 6


async def test_a_postponed_message_comes_again_without_counting_as_a_crash(memory_bus: MemoryBus):
    tries = 0
    states: list[ConsumeState] = []

    async def handle(_message: StoredMessage) -> None:
        nonlocal tries
        tries += 1
        if tries < 5:
            raise PostponeError("waits for its calls", delay_seconds=0.01)

    async with stage(memory_bus, handle, max_crashes=1, on_state=states.append):
        await drained(memory_bus)
    assert states[-1].num_crashed == 0


async def test_cancellation_stops_the_handlers_and_leaves_their_messages(memory_bus: MemoryBus):
    stopped = asyncio.Event()

    async def handle(_message: StoredMessage) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            stopped.set()
            raise

    async with stage(memory_bus, handle, num_messages=2, concurrency=2):
        await asyncio.sleep(0.05)
    assert stopped.is_set()
    assert await backlog(memory_bus) == 2


async def test_cancellation_hands_messages_back(memory_bus: MemoryBus, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("agentjet.bus.handler._HAND_BACK_SECONDS", 0.05)

    async def handle(_message: StoredMessage) -> None:
        await asyncio.sleep(60)

    async with stage(memory_bus, handle, ack_wait_seconds=60.0) as consumer:
        await asyncio.sleep(0.05)
        assert await consumer.fetch(1, 0.01) == []
    assert len(await consumer.fetch(1, 1.0)) == 1


async def test_stages_that_share_places_fetch_no_more_than_they_can_start_together(memory_bus: MemoryBus):
    running = peak = 0

    async def handle(_message: StoredMessage) -> None:
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        await asyncio.sleep(0.05)
        running -= 1

    await memory_bus.ensure_stream(StreamSpec("S", ("s.>",), 10**6))
    places, consumers = asyncio.Semaphore(3), []
    for name in "ab":
        consumers.append(await memory_bus.consumer("S", name, subject=f"s.{name}.>"))
        for index in range(5):
            await memory_bus.publish(f"s.{name}.{index}", b"", stream="S")
    tasks = [
        asyncio.create_task(consume(one, handle, name="x", on_poison=no_poison, concurrency=8, places=places))
        for one in consumers
    ]
    await asyncio.sleep(0.02)
    assert sum([await one.num_pending() for one in consumers]) == 7
    async with asyncio.timeout(5):
        while any((await memory_bus.stream_info("S", with_consumers=True)).consumers.values()):
            await asyncio.sleep(0.01)
    assert peak == 3
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_stage_that_finds_no_message_gives_its_place_to_another(
    memory_bus: MemoryBus, monkeypatch: pytest.MonkeyPatch
):
    async def handle(_message: StoredMessage) -> None:
        return None

    monkeypatch.setattr("agentjet.bus.handler._FETCH_SECONDS", 0.05)
    await memory_bus.ensure_stream(StreamSpec("S", ("s.>",), 10**6))
    for index in range(3):
        await memory_bus.publish(f"s.b.{index}", b"", stream="S")
    place, tasks = asyncio.Semaphore(1), []
    for name in "ab":
        consumer = await memory_bus.consumer("S", name, subject=f"s.{name}.>")
        work = consume(consumer, handle, name=name, on_poison=no_poison, concurrency=8, places=place)
        tasks.append(asyncio.create_task(work))
    async with asyncio.timeout(5):
        while any((await memory_bus.stream_info("S", with_consumers=True)).consumers.values()):
            await asyncio.sleep(0.01)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_stage_fetches_no_more_than_its_allowance(memory_bus: MemoryBus):
    running, go, may = [], asyncio.Event(), [2, 1]

    async def handle(message: StoredMessage) -> None:
        running.append(message.sequence)
        await go.wait()

    async def allowance() -> int:
        while not may:
            await go.wait()
            return 10
        return may.pop(0)

    async with stage(memory_bus, handle, num_messages=6, concurrency=5, allowance=allowance) as consumer:
        await asyncio.sleep(0.05)
        assert (running, await consumer.num_pending()) == ([1, 2, 3], 3)
        go.set()
        await drained(memory_bus)


async def test_a_bus_that_is_gone_for_good_ends_the_stage(memory_bus: MemoryBus):
    class Gone:
        async def fetch(self, batch: int, timeout_seconds: float) -> Sequence[Delivery]:
            raise BusUnavailableError("closed; restart this process")

        async def num_pending(self) -> int:
            return 0

    async def handle(_message: StoredMessage) -> None:
        return None

    with pytest.raises(BusUnavailableError, match="closed"):
        await asyncio.wait_for(consume(Gone(), handle, name="test", on_poison=no_poison), 2)

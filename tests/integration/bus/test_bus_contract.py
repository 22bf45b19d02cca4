"""The contract of `Bus`, on the in-memory twin and on a real server."""

import asyncio
import hashlib
import itertools
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentjet.bus.blob import CHUNK_BYTES, WINDOW, get_file, put_file
from agentjet.bus.memory import MemoryBus
from agentjet.bus.protocol import Bus, Request, StreamSpec
from agentjet.errors import (
    BlobError,
    BusError,
    BusFullError,
    BusTimeoutError,
    ConflictError,
    RecordTooLargeError,
)

MIB = 1024**2
NUMBERS = itertools.count()


async def make(bus: Bus, name: str, **options: object) -> str:
    fields: dict[str, object] = {"max_bytes": 64 * MIB} | options
    await bus.ensure_stream(StreamSpec(name, (f"{name}.>",), **fields))  # type: ignore[arg-type]
    return name


async def until(check: Callable[[], Awaitable[bool]], limit_seconds: float = 5.0) -> None:
    deadline = time.monotonic() + limit_seconds
    while not await check():
        assert time.monotonic() < deadline, "did not happen in time"
        await asyncio.sleep(0.02)


async def test_a_published_message_reads_back_the_same_in_every_way(bus: Bus, unique: str):
    stream = await make(bus, unique)
    before = time.time()
    sequence = await bus.publish(
        f"{stream}.a", b"\x00\xff", stream=stream, headers={"AJ-Schema": "é/1"}, reply="in.box"
    )
    read = [
        await bus.get(stream, sequence),
        await bus.last(stream, f"{stream}.a"),
        (await bus.last_many(stream, [f"{stream}.a"]))[f"{stream}.a"],
        await anext(bus.scan(stream)),
        (await (await bus.consumer(stream, "c")).fetch(1, 2.0))[0].message,
    ]
    tail = bus.tail(stream)
    read.append(await anext(tail))
    await tail.aclose()  # type: ignore[attr-defined]
    for message in read:
        assert message is not None
        assert (message.subject, message.payload, message.sequence) == (f"{stream}.a", b"\x00\xff", sequence)
        assert dict(message.headers) == {"AJ-Schema": "é/1", "AJ-Reply": "in.box"}
        assert abs(message.time - read[0].time) < 1e-3
        assert before - 1 < message.time < time.time() + 1


async def test_an_empty_payload_is_a_message(bus: Bus, unique: str):
    stream = await make(bus, unique)
    await bus.publish(f"{stream}.a", b"", stream=stream)
    message = await bus.last(stream, f"{stream}.a")
    assert message is not None and message.payload == b""
    (delivery,) = await (await bus.consumer(stream, "c")).fetch(1, 2.0)
    assert delivery.message.payload == b""


async def test_create_only_stores_the_first_and_refuses_the_second(bus: Bus, unique: str):
    stream = await make(bus, unique)
    await bus.publish(f"{stream}.a", b"1", stream=stream, expected=0)
    with pytest.raises(ConflictError):
        await bus.publish(f"{stream}.a", b"2", stream=stream, expected=0)
    message = await bus.last(stream, f"{stream}.a")
    assert message is not None and message.payload == b"1"


async def test_exactly_one_of_fifty_concurrent_creators_wins(bus: Bus, unique: str):
    stream = await make(bus, unique)
    results = await asyncio.gather(
        *(bus.publish(f"{stream}.a", str(i).encode(), stream=stream, expected=0) for i in range(50)),
        return_exceptions=True,
    )
    winners = [i for i, r in enumerate(results) if isinstance(r, int)]
    assert len(winners) == 1
    assert sum(isinstance(r, ConflictError) for r in results) == 49
    message = await bus.last(stream, f"{stream}.a")
    assert message is not None and message.payload == str(winners[0]).encode()


async def test_compare_and_set_takes_only_the_right_predecessor(bus: Bus, unique: str):
    stream = await make(bus, unique)
    first = await bus.publish(f"{stream}.a", b"1", stream=stream, expected=0)
    await bus.publish(f"{stream}.b", b"other subject", stream=stream)
    second = await bus.publish(f"{stream}.a", b"2", stream=stream, expected=first)
    with pytest.raises(ConflictError) as caught:
        await bus.publish(f"{stream}.a", b"3", stream=stream, expected=first)
    assert caught.value.expected_sequence == first
    assert await bus.publish(f"{stream}.a", b"3", stream=stream, expected=second) == second + 1


async def test_publishing_to_a_missing_stream_or_a_foreign_subject_is_refused(bus: Bus, unique: str):
    with pytest.raises(BusError, match="does not exist"):
        await bus.publish(f"{unique}.a", b"", stream=unique)
    stream = await make(bus, unique)
    with pytest.raises(BusError, match="does not take"):
        await bus.publish(f"other{unique}.a", b"", stream=stream, timeout_seconds=0.5)


async def test_a_payload_above_the_limit_is_refused_and_one_at_the_limit_is_stored(bus: Bus, unique: str):
    stream = await make(bus, unique)
    await bus.publish(f"{stream}.a", bytes(bus.max_payload_bytes), stream=stream, headers={"k": "v" * 200})
    with pytest.raises(RecordTooLargeError):
        await bus.publish(f"{stream}.a", bytes(bus.max_payload_bytes + 1), stream=stream)


async def test_a_full_stream_refuses_and_keeps_what_it_has(bus: Bus, unique: str):
    stream = await make(bus, unique, max_bytes=20_000)
    with pytest.raises(BusFullError):
        for i in range(30):
            await bus.publish(f"{stream}.{i}", bytes(1000), stream=stream)
    info = await bus.stream_info(stream)
    assert 10 <= info.num_messages < 30
    assert info.num_bytes <= info.max_bytes == 20_000
    assert await bus.last(stream, f"{stream}.0") is not None


async def test_an_event_stream_drops_the_oldest_instead(bus: Bus, unique: str):
    stream = await make(bus, unique, max_bytes=20_000, discard_old=True)
    for i in range(30):
        await bus.publish(f"{stream}.{i}", bytes(1000), stream=stream)
    assert await bus.last(stream, f"{stream}.0") is None
    assert await bus.last(stream, f"{stream}.29") is not None


async def test_a_message_with_a_time_to_live_vanishes(bus: Bus, unique: str):
    stream = await make(bus, unique, allow_message_ttl=True)
    await bus.publish(f"{stream}.a", b"", stream=stream, ttl_seconds=0.5)
    await bus.publish(f"{stream}.b", b"", stream=stream)

    async def gone() -> bool:
        return await bus.last(stream, f"{stream}.a") is None

    assert not await gone()
    await until(gone, 6.0)
    assert await bus.last(stream, f"{stream}.b") is not None


async def test_a_time_to_live_needs_a_stream_that_allows_it(bus: Bus, unique: str):
    stream = await make(bus, unique)
    with pytest.raises(BusError, match="allow_message_ttl"):
        await bus.publish(f"{stream}.a", b"", stream=stream, ttl_seconds=1)


async def test_ensuring_a_stream_again_widens_and_never_shrinks_it(bus: Bus, unique: str):
    await make(bus, unique, max_bytes=10 * MIB)
    await bus.ensure_stream(StreamSpec(unique, (f"{unique}x.>",), 5 * MIB, allow_message_ttl=True))
    assert (await bus.stream_info(unique)).max_bytes == 10 * MIB
    await bus.publish(f"{unique}.a", b"", stream=unique)
    await bus.publish(f"{unique}x.a", b"", stream=unique, ttl_seconds=10)
    with pytest.raises(BusError, match="retention"):
        await bus.ensure_stream(StreamSpec(unique, (f"{unique}.>",), MIB, work_queue=True))


async def test_streams_are_listed_by_prefix_and_deleting_is_idempotent(bus: Bus, unique: str):
    await make(bus, f"{unique}_B")
    await make(bus, f"{unique}_A")
    assert await bus.stream_names(unique) == [f"{unique}_A", f"{unique}_B"]
    await bus.delete_stream(f"{unique}_A")
    await bus.delete_stream(f"{unique}_A")
    assert await bus.stream_names(unique) == [f"{unique}_B"]
    with pytest.raises(BusError, match="does not exist"):
        await bus.stream_info(f"{unique}_A")
    with pytest.raises(BusError, match="does not exist"):
        await bus.last(f"{unique}_A", "x")


async def test_stream_info_counts_messages_and_backlogs(bus: Bus, unique: str):
    stream = await make(bus, unique)
    assert (await bus.stream_info(stream)).last_time == 0.0
    consumer = await bus.consumer(stream, "stage")
    for i in range(5):
        await bus.publish(f"{stream}.{i}", b"x", stream=stream)
    deliveries = await consumer.fetch(3, 2.0)
    await deliveries[0].ack()

    async def settled() -> bool:
        return (await bus.stream_info(stream, with_consumers=True)).consumers == {"stage": 4}

    await until(settled)
    place = (await bus.stream_info(stream, with_consumers=True)).places["stage"]
    assert (place.subject, place.first_sequence) == (">", 2)
    info = await bus.stream_info(stream)
    assert (info.num_messages, info.first_sequence, info.last_sequence) == (5, 1, 5)
    assert info.consumers == {}
    assert abs(info.last_time - time.time()) < 60
    assert await consumer.num_pending() == 2


async def test_last_many_reads_subjects_and_wildcards_and_skips_the_absent(bus: Bus, unique: str):
    stream = await make(bus, unique)
    for i in range(3):
        await bus.publish(f"{stream}.a.{i}", b"old", stream=stream)
        await bus.publish(f"{stream}.a.{i}", str(i).encode(), stream=stream)
    await bus.publish(f"{stream}.b.0", b"b", stream=stream)
    found = await bus.last_many(stream, [f"{stream}.a.*", f"{stream}.b.0", f"{stream}.none"])
    assert {s.removeprefix(f"{stream}."): m.payload for s, m in found.items()} == {
        "a.0": b"0",
        "a.1": b"1",
        "a.2": b"2",
        "b.0": b"b",
    }
    assert await bus.last_many(stream, [f"{stream}.none"]) == {}
    assert await bus.last_many(stream, []) == {}


async def test_last_many_reads_more_subjects_than_one_reply_holds(bus: Bus, unique: str):
    stream = await make(bus, unique)
    subjects = [f"{stream}.s.{i}" for i in range(1300)]
    await asyncio.gather(*(bus.publish(s, s.encode(), stream=stream) for s in subjects))
    by_name = await bus.last_many(stream, subjects)
    by_wildcard = await bus.last_many(stream, [f"{stream}.s.*"])
    assert set(by_name) == set(by_wildcard) == set(subjects)
    assert all(m.payload == s.encode() for s, m in by_wildcard.items())


async def test_last_many_reads_more_bytes_than_one_reply_holds(bus: Bus, unique: str):
    """A server cuts a reply at 64 MiB, without an error; what it left out was taken for absent once."""
    stream = await make(bus, unique, max_bytes=128 * MIB)
    subjects = [f"{stream}.s.{i}" for i in range(72)]
    body = b"x" * (MIB - 64 * 1024)
    for number, one in enumerate(subjects):
        await bus.publish(one, body + b"old" * (number % 2), stream=stream)
    await bus.publish(subjects[3], b"new", stream=stream)
    by_name = await bus.last_many(stream, [*subjects, f"{stream}.none"])
    by_wildcard = await bus.last_many(stream, [f"{stream}.s.*"])
    assert set(by_name) == set(by_wildcard) == set(subjects)
    assert by_name[subjects[3]].payload == by_wildcard[subjects[3]].payload == b"new"


async def test_get_of_an_absent_sequence_is_none(bus: Bus, unique: str):
    stream = await make(bus, unique)
    assert await bus.get(stream, 1) is None
    assert await bus.get(stream, 0) is None
    assert await bus.last(stream, f"{stream}.a") is None


async def test_scan_yields_a_range_in_order_and_filters_by_subject(bus: Bus, unique: str):
    stream = await make(bus, unique)
    assert [m async for m in bus.scan(stream)] == []
    await asyncio.gather(*(bus.publish(f"{stream}.{'ab'[i % 2]}", b"", stream=stream) for i in range(600)))
    assert [m.sequence async for m in bus.scan(stream)] == list(range(1, 601))
    assert [m.sequence async for m in bus.scan(stream, start=3, end=5)] == [3, 4, 5]
    evens = [m async for m in bus.scan(stream, f"{stream}.b")]
    assert len(evens) == 300 and {m.subject for m in evens} == {f"{stream}.b"}
    assert [m async for m in bus.scan(stream, f"{stream}.c")] == []
    assert [m async for m in bus.scan(stream, start=601)] == []


async def test_scan_leaves_out_what_was_purged(bus: Bus, unique: str):
    stream = await make(bus, unique)
    for i in range(6):
        await bus.publish(f"{stream}.{i}", b"", stream=stream)
    await bus.purge(stream, below_sequence=4)
    assert [m.sequence async for m in bus.scan(stream)] == [4, 5, 6]
    await bus.purge(stream, below_sequence=0)
    assert (await bus.stream_info(stream)).num_messages == 3
    assert await bus.publish(f"{stream}.0", b"", stream=stream, expected=0) == 7


async def test_tail_goes_on_with_what_comes_later(bus: Bus, unique: str):
    stream = await make(bus, unique)
    seen: list[int] = []

    async def follow() -> None:
        async for message in bus.tail(stream, f"{stream}.a", start=2):
            seen.append(message.sequence)

    for _ in range(300):
        await bus.publish(f"{stream}.a", b"", stream=stream)
    task = asyncio.create_task(follow())
    await asyncio.sleep(0.2)
    for i in range(300):
        await bus.publish(f"{stream}.{'ab'[i % 2]}", b"", stream=stream)

    async def complete() -> bool:
        return len(seen) == 449

    await until(complete)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert seen == [*range(2, 301), *range(301, 601, 2)]


async def test_a_tail_that_starts_before_its_first_message_sees_it(bus: Bus, unique: str):
    stream = await make(bus, unique)
    tail = bus.tail(stream)
    waiting = asyncio.ensure_future(anext(tail))
    await asyncio.sleep(0.1)
    await bus.publish(f"{stream}.a", b"first", stream=stream)
    assert (await asyncio.wait_for(waiting, 5)).payload == b"first"


async def test_a_consumer_hands_out_in_order_and_only_once_when_acknowledged(bus: Bus, unique: str):
    stream = await make(bus, unique)
    for i in range(10):
        await bus.publish(f"{stream}.{i}", str(i).encode(), stream=stream)
    consumer = await bus.consumer(stream, "c", ack_wait_seconds=1.0)
    got: list[bytes] = []
    while len(got) < 10:
        for delivery in await consumer.fetch(4, 2.0):
            got.append(delivery.message.payload)
            await delivery.ack()
    assert got == [str(i).encode() for i in range(10)]
    assert await consumer.fetch(4, 1.3) == []


async def test_a_fetch_returns_at_once_what_is_there_and_waits_only_for_the_first(bus: Bus, unique: str):
    stream = await make(bus, unique)
    consumer = await bus.consumer(stream, "c")
    start = time.monotonic()
    assert list(await consumer.fetch(5, 0.3)) == []
    assert 0.25 < time.monotonic() - start < 2.0
    waiting = asyncio.create_task(consumer.fetch(5, 5.0))
    await asyncio.sleep(0.1)
    start = time.monotonic()
    await bus.publish(f"{stream}.a", b"", stream=stream)
    (delivery,) = await waiting
    assert time.monotonic() - start < 1.0
    await delivery.ack()


async def test_an_unacknowledged_message_comes_again_after_ack_wait(bus: Bus, unique: str):
    stream = await make(bus, unique)
    await bus.publish(f"{stream}.a", b"x", stream=stream)
    consumer = await bus.consumer(stream, "c", ack_wait_seconds=0.5)
    (first,) = await consumer.fetch(1, 2.0)
    assert first.num_delivered == 1
    (second,) = await consumer.fetch(1, 3.0)
    assert second.message == first.message
    assert second.num_delivered == 2
    await second.ack()
    assert list(await consumer.fetch(1, 1.0)) == []


async def test_in_progress_holds_a_message_and_nak_returns_it_after_its_delay(bus: Bus, unique: str):
    stream = await make(bus, unique)
    await bus.publish(f"{stream}.a", b"x", stream=stream)
    consumer = await bus.consumer(stream, "c", ack_wait_seconds=0.6)
    (delivery,) = await consumer.fetch(1, 2.0)
    for _ in range(4):
        assert list(await consumer.fetch(1, 0.3)) == []
        await delivery.in_progress()
    start = time.monotonic()
    await delivery.nak(0.3)
    (again,) = await consumer.fetch(1, 3.0)
    assert 0.2 < time.monotonic() - start < 1.5
    await again.nak()
    (third,) = await consumer.fetch(1, 2.0)
    await third.ack()


async def test_two_handles_of_one_durable_share_the_work_and_two_durables_do_not(bus: Bus, unique: str):
    stream = await make(bus, unique)
    for i in range(8):
        await bus.publish(f"{stream}.{i}", b"", stream=stream)
    one, same = await bus.consumer(stream, "c"), await bus.consumer(stream, "c")
    first, second = await one.fetch(5, 2.0), await same.fetch(5, 2.0)
    assert [d.message.sequence for d in (*first, *second)] == list(range(1, 9))
    assert len(await (await bus.consumer(stream, "other")).fetch(20, 2.0)) == 8


async def test_max_ack_pending_bounds_what_is_out(bus: Bus, unique: str):
    stream = await make(bus, unique)
    for i in range(6):
        await bus.publish(f"{stream}.{i}", b"", stream=stream)
    consumer = await bus.consumer(stream, "c", max_ack_pending=2)
    deliveries = await consumer.fetch(6, 1.0)
    assert len(deliveries) == 2
    assert list(await consumer.fetch(6, 0.3)) == []
    await deliveries[0].ack()
    assert len(await consumer.fetch(6, 2.0)) == 1


async def test_a_work_queue_forgets_acknowledged_messages_and_can_store_their_subject_again(bus: Bus, unique: str):
    stream = await make(bus, unique, work_queue=True)
    await bus.publish(f"{stream}.a", b"1", stream=stream, expected=0)
    consumer = await bus.consumer(stream, "c")
    (delivery,) = await consumer.fetch(1, 2.0)
    with pytest.raises(ConflictError):
        await bus.publish(f"{stream}.a", b"2", stream=stream, expected=0)
    await delivery.ack()

    async def empty() -> bool:
        return (await bus.stream_info(stream)).num_messages == 0

    await until(empty)
    assert await bus.publish(f"{stream}.a", b"2", stream=stream, expected=0) == 2


async def test_a_work_queue_refuses_consumers_that_overlap(bus: Bus, unique: str):
    stream = await make(bus, unique, work_queue=True)
    await bus.consumer(stream, "a", subject=f"{stream}.a.*")
    await bus.consumer(stream, "b", subject=f"{stream}.b.*")
    await bus.consumer(stream, "b", subject=f"{stream}.b.*", ack_wait_seconds=5)
    with pytest.raises(BusError):
        await bus.consumer(stream, "all", subject=f"{stream}.*.1")


async def test_a_consumer_that_nobody_asks_is_forgotten_and_begins_anew(bus: Bus, unique: str):
    stream = await make(bus, unique, work_queue=True)
    await bus.publish(f"{stream}.a", b"1", stream=stream)
    await bus.consumer(stream, "kept", subject=f"{stream}.b")
    consumer = await bus.consumer(stream, "own", subject=f"{stream}.a", ack_wait_seconds=0.3, inactive_seconds=0.5)
    (delivery,) = await consumer.fetch(1, 2.0)

    async def is_forgotten() -> bool:
        return list((await bus.stream_info(stream, with_consumers=True)).consumers) == ["kept"]

    assert not await is_forgotten()
    await until(is_forgotten)
    again = await bus.consumer(stream, "own", subject=f"{stream}.a", inactive_seconds=30)
    (second,) = await again.fetch(1, 2.0)
    assert second.message == delivery.message


async def test_a_work_queue_can_be_scanned_while_it_is_consumed(bus: Bus, unique: str):
    stream = await make(bus, unique, work_queue=True)
    await bus.consumer(stream, "c")
    for i in range(3):
        await bus.publish(f"{stream}.{i}", b"", stream=stream)
    assert [m.subject async for m in bus.scan(stream)] == [f"{stream}.{i}" for i in range(3)]


async def test_a_request_gets_its_answer(bus: Bus, unique: str):
    async def double(request: Request) -> tuple[bytes, dict[str, str]]:
        return request.payload * 2, {"AJ-Seen": request.headers.get("AJ-In", "")}

    async with bus.serve(f"{unique}.double", double, queue="q"):
        answers = await asyncio.gather(
            *(bus.request(f"{unique}.double", bytes([i]), headers={"AJ-In": str(i)}) for i in range(50))
        )
    assert [a.payload for a in answers] == [bytes([i, i]) for i in range(50)]
    assert answers[7].headers == {"AJ-Seen": "7"}


async def test_requests_nobody_takes_fail_at_once_and_unanswered_ones_in_time(bus: Bus, unique: str):
    start = time.monotonic()
    with pytest.raises(BusError, match="nobody"):
        await bus.request(f"{unique}.none", b"", timeout_seconds=3.0)
    assert time.monotonic() - start < 1.0

    async def silent(_request: Request) -> None:
        return None

    async with bus.serve(f"{unique}.silent", silent, queue="q"):
        with pytest.raises(BusTimeoutError):
            await bus.request(f"{unique}.silent", b"", timeout_seconds=0.2)
    with pytest.raises(BusError, match="nobody"):
        await bus.request(f"{unique}.silent", b"", timeout_seconds=1.0)


async def test_a_handler_that_raises_answers_with_its_error_and_the_server_goes_on(bus: Bus, unique: str):
    async def handler(request: Request) -> tuple[bytes, dict[str, str]]:
        if request.payload == b"bad":
            raise RuntimeError("two\nlines")
        return b"ok", {}

    async with bus.serve(f"{unique}.h", handler, queue="q"):
        with pytest.raises(BusError, match="RuntimeError: two lines"):
            await bus.request(f"{unique}.h", b"bad")
        assert (await bus.request(f"{unique}.h", b"good")).payload == b"ok"


async def test_a_queue_shares_requests_among_its_servers(bus: Bus, unique: str):
    async def by(name: bytes, _request: Request) -> tuple[bytes, dict[str, str]]:
        await asyncio.sleep(0.01)
        return name, {}

    async with (
        bus.serve(f"{unique}.q", lambda r: by(b"a", r), queue="q"),
        bus.serve(f"{unique}.q", lambda r: by(b"b", r), queue="q"),
    ):
        answers = await asyncio.gather(*(bus.request(f"{unique}.q", b"") for _ in range(60)))
    assert {a.payload for a in answers} == {b"a", b"b"}


async def test_plain_messages_arrive_in_order_and_end_with_close(bus: Bus, unique: str):
    inbox = bus.inbox()
    assert inbox != bus.inbox()
    subscription = await bus.subscribe(inbox)
    for i in range(20):
        await bus.send(inbox, str(i).encode(), headers={"AJ-N": str(i)})
    got = [await subscription.next(2.0) for _ in range(10)]
    async for message in subscription.messages():
        got.append(message)
        if len(got) == 20:
            break
    assert [m.payload for m in got] == [str(i).encode() for i in range(20)]
    assert got[3].headers == {"AJ-N": "3"} and got[3].reply is None
    with pytest.raises(BusTimeoutError):
        await subscription.next(0.1)
    await subscription.close()
    await bus.send(inbox, b"late")
    with pytest.raises(BusTimeoutError):
        await subscription.next(0.1)


async def test_presence_lasts_as_long_as_it_is_renewed(bus: Bus, unique: str):
    assert await bus.presence(unique) == {}
    for key in ("engine.a", "engine.b", "learner.a"):
        await bus.put_presence(unique, key, b"1", ttl_seconds=1)
    assert await bus.presence(unique, "engine.") == {"engine.a": b"1", "engine.b": b"1"}
    for i in range(4):
        await asyncio.sleep(0.6)
        await bus.put_presence(unique, "engine.a", str(i).encode(), ttl_seconds=1)
    assert (await bus.presence(unique, "engine.a")) == {"engine.a": b"3"}

    async def only_a() -> bool:
        return set(await bus.presence(unique)) <= {"engine.a"}

    await until(only_a)

    async def nobody() -> bool:
        return await bus.presence(unique) == {}

    await until(nobody, 6.0)


@pytest.mark.parametrize("num_bytes", [0, 1, 960 * 1024, 960 * 1024 + 1, 20 * 10**6])
async def test_a_blob_reads_back_the_same(bus: Bus, unique: str, num_bytes: int):
    stream = await make(bus, unique)
    data = (b"0123456789abcdef" * (num_bytes // 16 + 1))[:num_bytes]
    digest = await bus.put_blob(stream, f"{stream}.blob", data)
    stored = (await bus.stream_info(stream)).num_messages
    assert await bus.put_blob(stream, f"{stream}.blob", data) == digest
    assert (await bus.stream_info(stream)).num_messages == stored
    assert await bus.get_blob(stream, f"{stream}.blob", digest, num_bytes) == data


@pytest.mark.parametrize("num_bytes", [0, 960 * 1024 + 1, 20 * 10**6])
async def test_a_file_rides_as_a_blob_and_is_whole_or_absent(bus: Bus, unique: str, num_bytes: int, tmp_path: Path):
    stream = await make(bus, unique)
    data = (b"0123456789abcdef" * (num_bytes // 16 + 1))[:num_bytes]
    (tmp_path / "one").write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    await put_file(bus, stream, f"{stream}.blob", tmp_path / "one", digest)
    assert await bus.get_blob(stream, f"{stream}.blob", digest, num_bytes) == data
    await get_file(bus, stream, f"{stream}.blob", digest, num_bytes, tmp_path / "two")
    assert (tmp_path / "two").read_bytes() == data
    await put_file(bus, stream, f"{stream}.blob", tmp_path / "one", "0" * 64)
    with pytest.raises(BlobError, match="digest"):
        await get_file(bus, stream, f"{stream}.blob", "0" * 64, num_bytes, tmp_path / "three")
    assert {path.name for path in tmp_path.iterdir()} == {"one", "two"}


class Counting(MemoryBus):
    """Knows how many bytes were under way at once."""

    flying = most = 0

    async def publish(self, subject: str, payload: bytes, **options: Any) -> int:
        self.flying += len(payload)
        self.most = max(self.most, self.flying)
        await asyncio.sleep(0)
        try:
            return await super().publish(subject, payload, **options)
        finally:
            self.flying -= len(payload)


async def test_a_large_file_is_never_held_whole(tmp_path: Path):
    bus = Counting()
    stream = await make(bus, "large", max_bytes=128 * MIB)
    (tmp_path / "one").write_bytes(bytes(80 * 10**6))
    await put_file(bus, stream, f"{stream}.blob", tmp_path / "one", "0" * 64)
    assert 0 < bus.most <= WINDOW * CHUNK_BYTES < 40 * 10**6
    await bus.close()


async def test_a_blob_with_a_missing_chunk_or_a_wrong_size_is_refused(bus: Bus, unique: str):
    stream = await make(bus, unique)
    data = bytes(3 * 960 * 1024)
    digest = await bus.put_blob(stream, f"{stream}.blob", data)
    with pytest.raises(BlobError, match="expected 5"):
        await bus.get_blob(stream, f"{stream}.blob", digest, 5)
    with pytest.raises(BlobError, match="missing"):
        await bus.get_blob(stream, f"{stream}.blob", "0" * 64, 5)
    first = await bus.last(stream, f"{stream}.blob.{digest}.0")
    assert first is not None
    await bus.publish(f"{stream}.blob.{digest}.1", b"x" * (960 * 1024), stream=stream)
    with pytest.raises(BlobError, match="digest"):
        await bus.get_blob(stream, f"{stream}.blob", digest, len(data))
    await bus.purge(stream, below_sequence=first.sequence + 1)
    with pytest.raises(BlobError, match="missing"):
        await bus.get_blob(stream, f"{stream}.blob", digest, len(data))


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([None, 0, "last", "wrong"])), max_size=20))
def test_both_buses_decide_the_same_about_any_series_of_publishes(
    nats_server: object, operations: list[tuple[str, object]]
):
    """The twin and the server accept and refuse the same writes and end with the same stream."""

    async def play(bus: Bus, stream: str) -> list[object]:
        await make(bus, stream)
        outcomes: list[object] = []
        last: dict[str, int] = {}
        for subject, expectation in operations:
            expected = {"last": last.get(subject, 0), "wrong": last.get(subject, 0) + 1}.get(expectation, expectation)  # type: ignore[call-overload]
            try:
                last[subject] = await bus.publish(f"{stream}.{subject}", b"", stream=stream, expected=expected)
                outcomes.append(last[subject])
            except ConflictError:
                outcomes.append("conflict")
        outcomes.append([(m.sequence, m.subject) async for m in bus.scan(stream)])
        await bus.delete_stream(stream)
        return outcomes

    async def both() -> None:
        from agentjet.bus.nats import NatsBus

        real = await NatsBus.connect(nats_server.url, name="twin")  # type: ignore[attr-defined]
        try:
            # A new name each time: the server may refuse the first create-only publish to a stream that was deleted
            # and made again within milliseconds.
            stream = f"TWIN{next(NUMBERS)}"
            assert await play(real, stream) == await play(MemoryBus(), stream)
        finally:
            await real.close()

    asyncio.run(both())

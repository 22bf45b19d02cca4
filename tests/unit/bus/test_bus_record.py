import asyncio
from typing import Any, ClassVar

import pytest

from agentjet.bus import record as records
from agentjet.bus.memory import MemoryBus
from agentjet.errors import BusError, ConflictError, RecordError, RecordTooLargeError
from agentjet.schemas import record as base
from agentjet.schemas.ids import RunId
from agentjet.schemas.subject import Stream, stream_name

RUN = RunId("test-1")


@pytest.fixture
def note(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A record class of this test, in a registry that forgets it afterwards."""
    from agentjet.schemas.codec import registry

    known = dict(registry())
    monkeypatch.setattr(base, "REGISTRY", known)
    monkeypatch.setattr("agentjet.schemas.codec.REGISTRY", known)

    class Note(base.Record):
        schema_name: ClassVar[str] = "test_note"
        text: str

    return Note


@pytest.fixture
async def run_bus(memory_bus: MemoryBus) -> MemoryBus:
    for spec in records.stream_specs(RUN, max_bytes=100 * 1024**2):
        await memory_bus.ensure_stream(spec)
    return memory_bus


async def test_every_stream_of_a_run_exists_and_fits_in_its_share(run_bus: MemoryBus):
    specs = records.stream_specs(RUN, max_bytes=10**9)
    assert {spec.name for spec in specs} == {stream_name(RUN, stream) for stream in Stream}
    assert sum(spec.max_bytes for spec in specs) <= 10**9
    assert await run_bus.stream_names("AJ_") == sorted(spec.name for spec in specs)


async def test_a_record_is_written_once_and_read_by_type(run_bus: MemoryBus, note: Any):
    to = f"aj.{RUN}.score.g.0.1"
    assert await records.put(run_bus, RUN, Stream.SCORES, to, note(text="one"), expected=0) == 1
    with pytest.raises(ConflictError):
        await records.put(run_bus, RUN, Stream.SCORES, to, note(text="two"), expected=0)
    assert await records.last(note, run_bus, RUN, Stream.SCORES, to) == (1, note(text="one"))
    assert await records.last(note, run_bus, RUN, Stream.SCORES, f"aj.{RUN}.score.g.0.2") is None


async def test_the_second_writer_gets_what_the_first_stored(run_bus: MemoryBus, note: Any):
    to = f"aj.{RUN}.score.g.0.1"
    first = await records.put_once(run_bus, RUN, Stream.SCORES, to, note(text="one"))
    second = await records.put_once(run_bus, RUN, Stream.SCORES, to, note(text="two"))
    assert (first.is_ours, second.is_ours) == (True, False)
    assert first.record == second.record == note(text="one")
    assert first.sequence == second.sequence


async def test_a_record_above_the_payload_limit_rides_as_a_blob_where_the_stream_has_them(
    run_bus: MemoryBus, note: Any
):
    large = note(text="x" * 3_000_000)
    to = f"aj.{RUN}.call.m.g.0.1.7.c"
    await records.put(run_bus, RUN, Stream.CALLS, to, large, expected=0)
    stored = await run_bus.last(stream_name(RUN, Stream.CALLS), to)
    assert stored is not None and stored.payload == b""
    found = await records.last(note, run_bus, RUN, Stream.CALLS, to)
    assert found is not None and found[1] == large
    with pytest.raises(RecordTooLargeError, match="test_note"):
        await records.put(run_bus, RUN, Stream.SCORES, f"aj.{RUN}.score.g.0.1", large)


async def test_the_chunks_of_a_large_question_vanish_with_it(
    run_bus: MemoryBus, note: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(records, "_CHUNK_GRACE_SECONDS", 0.0)
    to, name = f"aj.{RUN}.infer.m.any", stream_name(RUN, Stream.INFER)
    await records.put(run_bus, RUN, Stream.INFER, to, note(text="x" * 3_000_000), ttl_seconds=0.1)
    assert (await run_bus.stream_info(name)).num_messages > 2
    await asyncio.sleep(1.1)  # times to live count in whole seconds
    assert [message.subject async for message in run_bus.scan(name)] == []


async def test_a_question_is_answered_by_a_record(run_bus: MemoryBus, note: Any):
    from agentjet.bus.protocol import Request
    from agentjet.schemas.codec import encode

    async def echo(request: Request) -> tuple[bytes, dict[str, str]]:
        headers, body = encode(records.read_plain(note, request))
        return body, headers

    async with run_bus.serve("rpc.echo", echo, queue="q"):
        assert await records.ask(run_bus, "rpc.echo", note(text="four"), note) == note(text="four")

    async def strange(_request: Request) -> tuple[bytes, dict[str, str]]:
        return b"", {}

    async with run_bus.serve("rpc.strange", strange, queue="q"):
        with pytest.raises(RecordError):
            await records.ask(run_bus, "rpc.strange", note(text=""), note)
    with pytest.raises(BusError, match="nobody"):
        await records.ask(run_bus, "rpc.none", note(text=""), note)

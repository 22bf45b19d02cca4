import asyncio

import pytest

from agentjet.bus.protocol import StreamSpec
from agentjet.bus.record import put
from agentjet.curriculum.purge import Purge
from agentjet.schemas import subject
from agentjet.schemas.checkpoint import Checkpoint
from agentjet.schemas.ids import RunId
from agentjet.schemas.subject import Stream, stream_name, stream_subjects
from agentjet.schemas.weights import Weights

SIZE = 1000


class Streams:
    """A run's streams of 40 kB each, filled with messages of about 1 kB."""

    def __init__(self, bus, run):
        self.bus, self.run = bus, RunId(run)

    async def begin(self):
        for stream in Stream:
            name, subjects = stream_name(self.run, stream), stream_subjects(self.run, stream)
            await self.bus.ensure_stream(StreamSpec(name, subjects, max_bytes=40 * SIZE))

    async def fill(self, stream, to, count):
        name, last = stream_name(self.run, stream), 0
        for number in range(count):
            last = await self.bus.publish(f"aj.{self.run}.{to}.{number}", bytes(SIZE - 100), stream=name)
        return last

    async def time_of(self, stream, sequence):
        message = await self.bus.get(stream_name(self.run, stream), sequence)
        return message.time

    async def first(self, stream):
        return (await self.bus.stream_info(stream_name(self.run, stream))).first_sequence

    def purge(self, **options):
        defaults = {"trained_models": ("m",), "keep_checkpoints": 2, "keep_calls_bytes": 10**9, "margin_seconds": 0.0}
        return Purge(self.bus, self.run, **(defaults | options))


@pytest.fixture
async def streams(bus, unique):
    one = Streams(bus, unique)
    await one.begin()
    yield one
    for name in await bus.stream_names(subject.stream_prefix(one.run)):
        await bus.delete_stream(name)


async def test_what_is_older_than_the_oldest_group_goes_once_a_stream_is_half_full(streams):
    await streams.fill(Stream.SCORES, "score.p-0.0", 5)
    await streams.fill(Stream.EPISODES, "episode.p-0.0", 15)
    await asyncio.sleep(0.01)
    await streams.fill(Stream.EPISODES, "episode.p-1.0", 10)
    low_water = await streams.time_of(Stream.EPISODES, 16)
    await streams.purge().run(low_water)
    assert await streams.first(Stream.EPISODES) == 16
    assert await streams.first(Stream.SCORES) == 1
    await streams.purge(margin_seconds=60.0).run(low_water + 1)
    assert await streams.first(Stream.EPISODES) == 16


async def test_calls_are_kept_up_to_their_size_and_never_lost_before_their_group_is_done(streams):
    await streams.fill(Stream.CALLS, "call.m.p-0.0.0.1", 10)
    await asyncio.sleep(0.01)
    await streams.fill(Stream.CALLS, "call.m.p-1.0.0.1", 10)
    low_water = await streams.time_of(Stream.CALLS, 11)
    await streams.purge(keep_calls_bytes=15 * SIZE).run(low_water)
    kept = await streams.first(Stream.CALLS)
    assert 4 <= kept <= 8
    await streams.purge(keep_calls_bytes=0).run(low_water)
    assert await streams.first(Stream.CALLS) == 11


async def checkpoint(streams, model, step, cursor):
    record = Checkpoint(
        run=streams.run, model=model, version=f"1-{step}", ledger_sequence=1, cursor=cursor, path="", files=()
    )
    to = subject.checkpoint(streams.run, model, record.version)
    await put(streams.bus, streams.run, Stream.CHECKPOINTS, to, record)


async def test_samples_stay_for_every_kept_checkpoint_of_every_model(streams):
    await streams.fill(Stream.SAMPLES, "sample.m.p-0", 30)
    purge = streams.purge(trained_models=("m", "n"))
    for step, cursor in ((1, 5), (2, 12), (3, 20)):
        await checkpoint(streams, "m", step, cursor)
    await purge.run(0.0)
    assert await streams.first(Stream.SAMPLES) == 1, "model n has no checkpoint"
    for step, cursor in ((1, 9), (2, 25)):
        await checkpoint(streams, "n", step, cursor)
    await purge.run(0.0)
    assert await streams.first(Stream.SAMPLES) == 9
    await checkpoint(streams, "n", 3, 28)
    await purge.run(0.0)
    assert await streams.first(Stream.SAMPLES) == 12


async def test_only_the_newest_weights_stay(streams):
    records = []
    for step in range(5):
        await streams.fill(Stream.WEIGHTS, f"blob.weights.{step}", 5)
        version = f"1-{step}"
        record = Weights(
            run=streams.run, model="m", version=version, ledger_sequence=1, dtype="bf16", num_bytes=1, sha256="s"
        )
        to = subject.weights(streams.run, "m", version)
        records.append(await put(streams.bus, streams.run, Stream.WEIGHTS, to, record))
    await streams.purge().run(0.0)
    assert await streams.first(Stream.WEIGHTS) == records[1] + 1

import asyncio

import pytest

from agentjet.accounting.ledger import LedgerView
from agentjet.bus.presence import renew
from agentjet.bus.protocol import StreamSpec
from agentjet.bus.record import BLOB_BYTES_HEADER, BLOB_HEADER, put
from agentjet.curriculum.purge import Purge
from agentjet.schemas import subject
from agentjet.schemas.checkpoint import Checkpoint
from agentjet.schemas.ids import RunId
from agentjet.schemas.ledger import LearnerStart, LearnerStep
from agentjet.schemas.presence import Presence
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

    def learner(self, model, incarnation=1, base=0, steps=3, view=None):
        """What LEDGER says of a learner that took steps up to `steps`, after what it said before."""
        view = LedgerView() if view is None else view
        shared = {"run": self.run, "model": model, "incarnation": incarnation, "cursor": 1}
        view.apply(1, LearnerStart(**shared, base_step=base, config_digest="", fold_digest=""))
        for step in range(base + 1, steps + 1):
            view.apply(step + 1, LearnerStep(**shared, step=step, members=(), groups=(), digest=""))
        return view

    def purge(self, **options):
        defaults = {"learners": {"m": self.learner("m")}, "keep_checkpoints": 2, "keep_calls_bytes": 10**9}
        defaults |= {"margin_seconds": 0.0, "blob_seconds": 0.0}
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


async def checkpoint(streams, model, step, cursor, incarnation=1):
    version = f"{incarnation}-{step}"
    record = Checkpoint(
        run=streams.run, model=model, version=version, ledger_sequence=1, cursor=cursor, path="", files=()
    )
    to = subject.checkpoint(streams.run, model, record.version)
    await put(streams.bus, streams.run, Stream.CHECKPOINTS, to, record)


async def test_samples_stay_for_every_kept_checkpoint_of_every_model(streams):
    await streams.fill(Stream.SAMPLES, "sample.m.p-0", 30)
    purge = streams.purge(learners={model: streams.learner(model) for model in ("m", "n")})
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


async def test_voided_checkpoints_keep_no_place_of_a_valid_one(streams):
    await streams.fill(Stream.SAMPLES, "sample.m.p-0", 30)
    for step, cursor in ((1, 5), (2, 12), (3, 20)):
        await checkpoint(streams, "m", step, cursor)
    view = streams.learner("m", incarnation=2, base=1, steps=2, view=streams.learner("m"))
    await streams.purge(learners={"m": view}).run(0.0)
    assert await streams.first(Stream.SAMPLES) == 1, "of three checkpoints two are voided"
    await checkpoint(streams, "m", 2, 14, incarnation=2)
    await streams.purge(learners={"m": view}).run(0.0)
    assert await streams.first(Stream.SAMPLES) == 5


async def blob_record(streams, kind, data, to):
    """A blob and a message that names it, as `agentjet.bus.record.put` stores them."""
    name = stream_name(streams.run, Stream.SAMPLES if kind == "sample" else Stream.WEIGHTS)
    sha256 = await streams.bus.put_blob(name, subject.blob(streams.run, kind), data)
    headers = {BLOB_HEADER: sha256, BLOB_BYTES_HEADER: str(len(data))}
    return sha256, await streams.bus.publish(f"aj.{streams.run}.{to}", b"", stream=name, headers=headers)


async def blob_is_there(streams, stream, kind, sha256, num_bytes):
    prefix = subject.blob(streams.run, kind)
    return len(await streams.bus.get_blob(stream_name(streams.run, stream), prefix, sha256, num_bytes)) == num_bytes


async def test_chunks_of_a_pending_sample_stay(streams):
    """A merger that is killed between blob and record finds its chunks again, however old they are."""
    name, prefix = stream_name(streams.run, Stream.SAMPLES), subject.blob(streams.run, "sample")
    await streams.bus.put_blob(name, prefix, b"x" * SIZE)
    await streams.fill(Stream.SAMPLES, "sample.m.p-0", 25)
    sha256, sequence = await blob_record(streams, "sample", b"x" * SIZE, "sample.m.p-1.0")
    for step in (1, 2):
        await checkpoint(streams, "m", step, sequence)
    await streams.purge().run(0.0)
    assert await blob_is_there(streams, Stream.SAMPLES, "sample", sha256, SIZE)


async def test_samples_on_their_way_keep_their_chunks(streams):
    name, prefix = stream_name(streams.run, Stream.SAMPLES), subject.blob(streams.run, "sample")
    await streams.fill(Stream.SAMPLES, "sample.m.p-0", 25)
    sha256 = await streams.bus.put_blob(name, prefix, b"x" * SIZE)
    await streams.fill(Stream.SAMPLES, "sample.m.p-1", 1)
    for step in (1, 2):
        await checkpoint(streams, "m", step, cursor=28)
    await streams.purge(blob_seconds=60.0).run(0.0)
    assert await blob_is_there(streams, Stream.SAMPLES, "sample", sha256, SIZE)


@pytest.mark.parametrize("is_blob", [True, False], ids=["blob", "file and late chunks"])
async def test_weights_that_did_not_change_keep_the_chunks_that_they_share(streams, is_blob):
    """A skipped step, or a learner that was started again, publishes the bytes of the version before."""
    name, prefix = stream_name(streams.run, Stream.WEIGHTS), subject.blob(streams.run, "weights")
    for step in range(5):
        await streams.fill(Stream.WEIGHTS, f"blob.weights.{step}", 5)
        sha256 = await streams.bus.put_blob(name, prefix, b"w" * SIZE)
        version = f"1-{step}"
        record = Weights(
            run=streams.run,
            model="m",
            version=version,
            ledger_sequence=1,
            dtype="bf16",
            num_bytes=SIZE,
            sha256=sha256,
            is_blob=is_blob,
        )
        await put(streams.bus, streams.run, Stream.WEIGHTS, subject.weights(streams.run, "m", version), record)
    await streams.purge().run(0.0)
    assert await blob_is_there(streams, Stream.WEIGHTS, "weights", sha256, SIZE)


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


async def version(streams, step, *, is_whole=True):
    """A version behind three kB of its chunks; returns the record's sequence."""
    await streams.fill(Stream.WEIGHTS, f"blob.weights.{step}", 3)
    shared = {"run": streams.run, "model": "m", "ledger_sequence": 1, "dtype": "bf16", "num_bytes": 1, "sha256": "s"}
    patch = {} if is_whole else {"base": f"1-{step - 1}", "patch_sha256": f"p{step}", "patch_bytes": 1}
    record = Weights(**shared, **patch, version=f"1-{step}", is_blob=is_whole)
    return await put(streams.bus, streams.run, Stream.WEIGHTS, subject.weights(streams.run, "m", f"1-{step}"), record)


async def test_the_newest_whole_weights_stay_with_the_patches_since(streams):
    records = [await version(streams, step, is_whole=step in (0, 2)) for step in range(7)]
    await streams.purge().run(0.0)
    assert await streams.first(Stream.WEIGHTS) == records[1] + 1


async def test_weights_stay_until_every_live_engine_has_acknowledged_newer_ones_or_the_stream_is_crowded(streams):
    records = [await version(streams, step) for step in range(7)]
    for name, acknowledged in (("quick", "1-6"), ("slow", "1-1")):
        await renew(streams.bus, engine(streams, name, acknowledged))
    await streams.purge().run(0.0)
    assert await streams.first(Stream.WEIGHTS) == records[1] + 1
    await streams.fill(Stream.WEIGHTS, "blob.weights.more", 15)
    await streams.purge().run(0.0)
    assert await streams.first(Stream.WEIGHTS) == records[3] + 1


def engine(streams, name, acknowledged):
    shared = {"run": streams.run, "actor": "inference", "host": "h", "pid": 1, "started": 0.0, "state": "busy"}
    return Presence(**shared, name=name, models=("m",), info={"version": acknowledged})

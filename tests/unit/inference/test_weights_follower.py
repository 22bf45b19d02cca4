"""Weights on their way from a learner's publisher to an engine, over the in-memory bus."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from made_weights import bfloat16, sha256, trained, weights_file

from agentjet.bus.memory import MemoryBus
from agentjet.bus.presence import renew
from agentjet.bus.record import put, stream_specs
from agentjet.config import LearnerSettings
from agentjet.delivery.mirror import Mirror
from agentjet.errors import EngineError
from agentjet.inference.engine import Draw, EngineLoad, Generation
from agentjet.inference.weights import WeightsFollower
from agentjet.schemas import subject
from agentjet.schemas.ids import RunId, Version
from agentjet.schemas.ledger import LearnerStart, LearnerStep
from agentjet.schemas.presence import Presence
from agentjet.schemas.subject import Stream, stream_name
from agentjet.training.publisher import WeightsPublisher
from agentjet.training.snapshot import Snapshot

RUN, MODEL = RunId("run-aaaaaa"), "small"


class ScriptedEngine:
    """Remembers what it was told to load; `failures` loads fail first."""

    def __init__(self, failures: int = 0) -> None:
        self.version, self.context_length, self.load = Version(0, 0), 64, EngineLoad(0, 0, 0, 0.0)
        self.loaded: list[tuple[Version, bytes]] = []
        self.failures = failures

    async def start(self) -> None: ...

    def generate(self, generation: Generation) -> AsyncIterator[Draw]:
        raise NotImplementedError

    async def update_weights(self, version: Version, path: Path, *, timeout_seconds: float = 120.0) -> None:
        if self.failures:
            self.failures -= 1
            raise EngineError("the file is cut")
        self.loaded.append((version, path.read_bytes()))
        self.version = version

    async def close(self) -> None: ...


class Source:
    """A learner whose weights are a text."""

    def __init__(self, text: str) -> None:
        self.text = text

    def engine_weights(self, path: Path) -> Snapshot:
        path.write_text(self.text)
        return Snapshot("float32", len(self.text), hashlib.sha256(self.text.encode()).hexdigest())


@pytest.fixture
async def bus() -> AsyncIterator[MemoryBus]:
    bus = MemoryBus()
    for spec in stream_specs(RUN, max_bytes=2**30):
        await bus.ensure_stream(spec)
    yield bus
    await bus.close()


async def start(bus: MemoryBus, incarnation: int = 1, base_step: int = 0) -> int:
    record = LearnerStart(
        run=RUN, model=MODEL, incarnation=incarnation, base_step=base_step, cursor=1, config_digest="", fold_digest=""
    )
    return await put(bus, RUN, Stream.LEDGER, subject.ledger(RUN, MODEL), record)


async def step(bus: MemoryBus, number: int, incarnation: int = 1) -> int:
    record = LearnerStep(
        run=RUN, model=MODEL, incarnation=incarnation, step=number, cursor=1, members=(), groups=(), digest=""
    )
    return await put(bus, RUN, Stream.LEDGER, subject.ledger(RUN, MODEL), record)


def follower(bus: MemoryBus, engine: ScriptedEngine, folder: Path, hold_seconds: float = 5.0) -> WeightsFollower:
    (folder / "engine").mkdir(exist_ok=True)
    return WeightsFollower(bus, RUN, MODEL, engine, folder / "engine", hold_seconds=hold_seconds)


def publisher(bus: MemoryBus, folder: Path, route: str = "path", keep: int = 2, **more: object) -> WeightsPublisher:
    settings = LearnerSettings.model_validate({"weights_route": route, "keep_weights": keep, **more})
    return WeightsPublisher(bus, RUN, MODEL, settings, folder / "learner")


def engine_on(host: str, version: str = "") -> Presence:
    return Presence(
        run=RUN,
        actor="inference",
        name=f"e-{host}",
        models=(MODEL,),
        host=host,
        pid=1,
        started=0.0,
        state="busy",
        info={"version": version} if version else {},
    )


async def stopped(task: asyncio.Future[None]) -> None:
    task.cancel()
    await asyncio.wait({task})


async def until(condition, seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("route", ["path", "bus"])
async def test_an_engine_gets_each_version_by_either_route(bus: MemoryBus, tmp_path: Path, route: str):
    engine, out = ScriptedEngine(), publisher(bus, tmp_path, route)
    following = follower(bus, engine, tmp_path)
    await out.publish(Version(1, 0), await start(bus), Source("zero"))
    await following.catch_up()
    assert engine.loaded == [(Version(1, 0), b"zero")]
    task = asyncio.ensure_future(following.run())
    await out.publish(Version(1, 1), await step(bus, 1), Source("one"))
    await until(lambda: engine.version == Version(1, 1))
    assert engine.loaded[-1] == (Version(1, 1), b"one")
    await stopped(task)
    assert list((tmp_path / "engine").iterdir()) == []


async def test_an_engine_that_does_not_share_the_learners_files_takes_the_blob(bus: MemoryBus, tmp_path: Path):
    engine, out = ScriptedEngine(), publisher(bus, tmp_path, "auto")
    await renew(bus, engine_on("far"))
    await out.publish(Version(1, 0), await start(bus), Source("zero"))
    (tmp_path / "learner" / "1-0.safetensors").unlink()  # a container of the same host name
    await follower(bus, engine, tmp_path).catch_up()
    assert engine.loaded == [(Version(1, 0), b"zero")]


async def test_an_engine_elsewhere_that_comes_late_waits_for_the_learner_to_see_it(bus: MemoryBus, tmp_path: Path):
    engine, out = ScriptedEngine(), publisher(bus, tmp_path, "auto")
    await out.publish(Version(1, 0), await start(bus), Source("zero"))
    (tmp_path / "learner" / "1-0.safetensors").rename(tmp_path / "far")
    await follower(bus, engine, tmp_path).catch_up()
    assert engine.loaded == []
    (tmp_path / "far").rename(tmp_path / "learner" / "1-0.safetensors")
    await renew(bus, engine_on("far"))
    await out.look()
    (tmp_path / "learner" / "1-0.safetensors").unlink()
    await follower(bus, engine, tmp_path).catch_up()
    assert engine.loaded == [(Version(1, 0), b"zero")]


async def test_a_late_engine_serves_nothing_before_it_has_the_newest_weights(bus: MemoryBus, tmp_path: Path):
    engine, out = ScriptedEngine(), publisher(bus, tmp_path, "auto")
    following = follower(bus, engine, tmp_path, hold_seconds=0.0)
    await following.catch_up()
    await asyncio.wait_for(following.caught_up(), 1)  # nothing was trained yet: the model as it is
    await out.publish(Version(1, 0), await start(bus), Source("zero"))
    await out.publish(Version(1, 1), await step(bus, 1), Source("one"))
    (tmp_path / "learner" / "1-1.safetensors").rename(tmp_path / "far")
    late = follower(bus, engine, tmp_path, hold_seconds=0.0)
    await late.catch_up()
    tasks = [asyncio.ensure_future(late.run()), asyncio.ensure_future(late.caught_up())]
    await asyncio.sleep(0.1)
    assert not tasks[1].done(), "the hold is over, but that is for engines that fell behind"
    (tmp_path / "far").rename(tmp_path / "learner" / "1-1.safetensors")
    await asyncio.wait_for(tasks[1], 10)
    assert engine.version == Version(1, 1)
    await stopped(tasks[0])


async def test_an_engine_that_comes_while_no_published_weights_count_waits_for_some(bus: MemoryBus, tmp_path: Path):
    """The newest learner has said where it starts from, and its weights of that step are on their way."""
    engine = ScriptedEngine()
    await start(bus)
    ledger = await step(bus, 1)
    following = follower(bus, engine, tmp_path)
    await following.catch_up()
    tasks = [asyncio.ensure_future(following.run()), asyncio.ensure_future(following.caught_up())]
    await asyncio.sleep(0.1)
    assert not tasks[1].done()
    await publisher(bus, tmp_path).publish(Version(1, 1), ledger, Source("one"))
    await asyncio.wait_for(tasks[1], 10)
    assert engine.version == Version(1, 1)
    await stopped(tasks[0])


async def test_large_weights_get_longer_to_load(bus: MemoryBus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    limits = list[float]()

    async def update(version: Version, path: Path, *, timeout_seconds: float) -> None:
        limits.append(timeout_seconds)
        engine.version = version

    class Large(Source):
        def engine_weights(self, path: Path) -> Snapshot:
            return replace(super().engine_weights(path), num_bytes=65 * 10**9)

    engine = ScriptedEngine()
    monkeypatch.setattr(engine, "update_weights", update)
    await publisher(bus, tmp_path).publish(Version(1, 0), await start(bus), Large("zero"))
    await follower(bus, engine, tmp_path).catch_up()
    assert limits[0] == pytest.approx(120 + 1300)


async def test_a_late_engine_loads_only_the_newest(bus: MemoryBus, tmp_path: Path):
    engine, out = ScriptedEngine(), publisher(bus, tmp_path)
    await out.publish(Version(1, 0), await start(bus), Source("zero"))
    for number in (1, 2, 3):
        await out.publish(Version(1, number), await step(bus, number), Source(str(number)))
    await follower(bus, engine, tmp_path).catch_up()
    assert engine.loaded == [(Version(1, 3), b"3")]


async def test_versions_that_the_ledger_lacks_are_ignored(bus: MemoryBus, tmp_path: Path):
    engine, out = ScriptedEngine(), publisher(bus, tmp_path)
    await out.publish(Version(1, 0), await start(bus), Source("zero"))
    await out.publish(Version(1, 7), 1, Source("never stepped"))
    await follower(bus, engine, tmp_path).catch_up()
    assert engine.version == Version(1, 0)


async def test_a20_after_a_restart_the_engine_moves_to_the_new_incarnation(bus: MemoryBus, tmp_path: Path):
    engine, out = ScriptedEngine(), publisher(bus, tmp_path)
    await out.publish(Version(1, 0), await start(bus), Source("zero"))
    for number in (1, 2):
        await out.publish(Version(1, number), await step(bus, number), Source(str(number)))
    following = follower(bus, engine, tmp_path)
    await following.catch_up()
    task = asyncio.ensure_future(following.run())
    await out.publish(Version(2, 1), await start(bus, incarnation=2, base_step=1), Source("again"))
    await until(lambda: engine.version == Version(2, 1))
    task.cancel()


async def test_generations_wait_for_a_step_s_weights(bus: MemoryBus, tmp_path: Path):
    engine, out = ScriptedEngine(), publisher(bus, tmp_path)
    await out.publish(Version(1, 0), await start(bus), Source("zero"))
    following = follower(bus, engine, tmp_path)
    await following.catch_up()
    task = asyncio.ensure_future(following.run())
    sequence = await step(bus, 1)
    await until(lambda: following.expected == Version(1, 1))
    waiter = asyncio.ensure_future(following.ready())
    await asyncio.sleep(0.05)
    assert not waiter.done()
    await out.publish(Version(1, 1), sequence, Source("one"))
    await asyncio.wait_for(waiter, 5.0)
    assert engine.version == Version(1, 1)
    task.cancel()


async def test_the_hold_runs_out_when_weights_never_come(bus: MemoryBus, tmp_path: Path):
    engine, out = ScriptedEngine(), publisher(bus, tmp_path)
    await out.publish(Version(1, 0), await start(bus), Source("zero"))
    following = follower(bus, engine, tmp_path, hold_seconds=0.1)
    await following.catch_up()
    task = asyncio.ensure_future(following.run())
    await step(bus, 1)
    await until(lambda: following.expected == Version(1, 1))
    await asyncio.wait_for(following.ready(), 5.0)
    assert engine.version == Version(1, 0)
    task.cancel()


async def test_a_load_that_fails_is_tried_again(bus: MemoryBus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("agentjet.inference.weights._RETRY_SECONDS", 0.05)
    engine, out = ScriptedEngine(failures=2), publisher(bus, tmp_path)
    await out.publish(Version(1, 0), await start(bus), Source("zero"))
    following = follower(bus, engine, tmp_path)
    await following.catch_up()
    assert engine.version == Version(0, 0)
    task = asyncio.ensure_future(following.run())
    await until(lambda: engine.version == Version(1, 0))
    task.cancel()


async def test_only_the_newest_snapshots_stay_on_disk(bus: MemoryBus, tmp_path: Path):
    out = publisher(bus, tmp_path, keep=2)
    await out.publish(Version(1, 0), await start(bus), Source("zero"))
    for number in range(1, 12):
        await out.publish(Version(1, number), await step(bus, number), Source(str(number)))
    assert sorted(path.stem for path in (tmp_path / "learner").iterdir()) == ["1-10", "1-11"]


class Training:
    """A learner whose weights take small updates."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)
        self._master = self._rng.standard_normal(50_000) * 0.05
        self.file = b""

    def engine_weights(self, path: Path) -> Snapshot:
        file = weights_file({"w": ("bfloat16", bfloat16(self._master))})
        path.write_bytes(file.tobytes())
        self.file, self._master = file.tobytes(), trained(self._master, 1e-5, self._rng)
        return Snapshot("bfloat16", len(file), sha256(file))


class Weighed(MemoryBus):
    """Counts the bytes of blobs that are read."""

    num_read = 0

    async def last(self, stream: str, subject: str):
        message = await super().last(stream, subject)
        self.num_read += len(message.payload) if message and ".blob." in subject else 0
        return message


@pytest.fixture
async def weighed() -> AsyncIterator[Weighed]:
    bus = Weighed()
    for spec in stream_specs(RUN, max_bytes=2**30):
        await bus.ensure_stream(spec)
    yield bus
    await bus.close()


async def test_an_engine_that_follows_gets_every_version_exactly_at_a_fraction_of_the_bytes(weighed, tmp_path: Path):
    engine, out, learner = ScriptedEngine(), publisher(weighed, tmp_path, "bus"), Training()
    following = follower(weighed, engine, tmp_path)
    await out.publish(Version(1, 0), await start(weighed), learner)
    await following.catch_up()
    assert weighed.num_read == len(learner.file)
    weighed.num_read = 0
    for number in (1, 2, 3):
        record = await out.publish(Version(1, number), await step(weighed, number), learner)
        assert (record.base, record.is_blob) == (f"1-{number - 1}", False)
        await following.catch_up()
        assert engine.loaded[-1] == (Version(1, number), learner.file)
    assert weighed.num_read < len(learner.file) / 5


async def test_an_engine_that_fell_behind_applies_several_patches_and_loads_once(weighed, tmp_path: Path):
    engine, out, learner = ScriptedEngine(), publisher(weighed, tmp_path, "bus"), Training()
    following = follower(weighed, engine, tmp_path)
    await out.publish(Version(1, 0), await start(weighed), learner)
    await following.catch_up()
    weighed.num_read = 0
    for number in (1, 2, 3):
        await out.publish(Version(1, number), await step(weighed, number), learner)
    await following.catch_up()
    assert engine.loaded[1:] == [(Version(1, 3), learner.file)]
    assert weighed.num_read < len(learner.file) / 5


async def test_a_late_joiner_gets_the_newest_whole_file_and_the_patches_since(weighed, tmp_path: Path):
    out, learner = publisher(weighed, tmp_path, "bus", snapshot_every=2), Training()
    await out.publish(Version(1, 0), await start(weighed), learner)
    wholes = [0]
    for number in range(1, 6):
        record = await out.publish(Version(1, number), await step(weighed, number), learner)
        wholes += [number] if record.is_blob else []
    assert wholes == [0, 2, 4]
    engine = ScriptedEngine()
    await follower(weighed, engine, tmp_path).catch_up()
    assert engine.loaded == [(Version(1, 5), learner.file)]
    assert len(learner.file) < weighed.num_read < 1.2 * len(learner.file)


async def test_a_base_that_was_damaged_is_found_and_healed_by_a_whole_file(weighed, tmp_path: Path):
    engine, out, learner = ScriptedEngine(), publisher(weighed, tmp_path, "bus"), Training()
    following = follower(weighed, engine, tmp_path)
    await out.publish(Version(1, 0), await start(weighed), learner)
    await following.catch_up()
    held = Mirror(tmp_path / "engine").place(sha256(np.frombuffer(learner.file, np.uint8)))
    held.write_bytes(held.read_bytes()[:-2] + b"\0\0")
    await out.publish(Version(1, 1), await step(weighed, 1), learner)
    await following.catch_up()
    assert engine.loaded[-1] == (Version(1, 1), learner.file)


async def test_patches_that_are_gone_are_made_good_by_a_whole_file(weighed, tmp_path: Path):
    engine, out, learner = ScriptedEngine(), publisher(weighed, tmp_path, "bus", snapshot_every=2), Training()
    following = follower(weighed, engine, tmp_path)
    await out.publish(Version(1, 0), await start(weighed), learner)
    await following.catch_up()
    records = [await out.publish(Version(1, number), await step(weighed, number), learner) for number in (1, 2, 3)]
    lost = await weighed.last(
        stream_name(RUN, Stream.WEIGHTS), f"{subject.blob(RUN, 'weights')}.{records[0].patch_sha256}.0"
    )
    assert lost is not None
    weighed._stream(stream_name(RUN, Stream.WEIGHTS)).remove(lost.sequence)
    await following.catch_up()
    assert engine.loaded[-1] == (Version(1, 3), learner.file)


async def test_a20_no_patch_leads_from_a_voided_version(weighed, tmp_path: Path):
    engine, out, learner = ScriptedEngine(), publisher(weighed, tmp_path, "bus"), Training()
    following = follower(weighed, engine, tmp_path)
    await out.publish(Version(1, 0), await start(weighed), learner)
    for number in (1, 2):
        await out.publish(Version(1, number), await step(weighed, number), learner)
    await following.catch_up()
    again = publisher(weighed, tmp_path, "bus")
    first = await again.publish(Version(2, 1), await start(weighed, incarnation=2, base_step=1), learner)
    assert (first.base, first.is_blob) == ("", True)
    await again.publish(Version(2, 2), await step(weighed, 2, incarnation=2), learner)
    await following.catch_up()
    assert engine.loaded[-1] == (Version(2, 2), learner.file)


async def test_versions_that_an_engine_has_yet_to_load_stay_on_disk_up_to_a_limit(bus: MemoryBus, tmp_path: Path):
    out = publisher(bus, tmp_path, keep=1, weights_gib=40 / 2**30)
    await renew(bus, engine_on("here", version="1-1"))
    await out.publish(Version(1, 0), await start(bus), Source("0" * 10))
    for number in range(1, 5):
        await out.publish(Version(1, number), await step(bus, number), Source(str(number) * 10))
    assert stems(tmp_path) == ["1-2", "1-3", "1-4"]
    for number in range(5, 9):
        await out.publish(Version(1, number), await step(bus, number), Source(str(number) * 10))
    assert stems(tmp_path) == ["1-4", "1-5", "1-6", "1-7", "1-8"]
    await renew(bus, engine_on("here", version="1-8"))
    await out.publish(Version(1, 9), await step(bus, 9), Source("9" * 10))
    assert stems(tmp_path) == ["1-9"]


def stems(folder: Path) -> list[str]:
    return sorted(path.stem for path in (folder / "learner").iterdir())

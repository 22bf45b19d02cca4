"""Weights on their way from a learner's publisher to an engine, over the in-memory bus."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentjet.bus.memory import MemoryBus
from agentjet.bus.presence import renew
from agentjet.bus.record import put, stream_specs
from agentjet.config import LearnerSettings
from agentjet.errors import EngineError
from agentjet.inference.engine import Draw, EngineLoad, Generation
from agentjet.inference.weights import WeightsFollower
from agentjet.schemas import subject
from agentjet.schemas.ids import RunId, Version
from agentjet.schemas.ledger import LearnerStart, LearnerStep
from agentjet.schemas.presence import Presence
from agentjet.schemas.subject import Stream
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
    return WeightsFollower(bus, RUN, MODEL, engine, folder / "engine", hold_seconds=hold_seconds)


def publisher(bus: MemoryBus, folder: Path, route: str = "path", keep: int = 2) -> WeightsPublisher:
    settings = LearnerSettings.model_validate({"weights_route": route, "keep_weights": keep})
    return WeightsPublisher(bus, RUN, MODEL, settings, folder / "learner")


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
    task.cancel()
    assert list((tmp_path / "engine").glob("*")) == []


async def test_an_engine_that_does_not_share_the_learners_files_takes_the_blob(bus: MemoryBus, tmp_path: Path):
    engine, out = ScriptedEngine(), publisher(bus, tmp_path, "bus")
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
    host = Presence(
        run=RUN, actor="inference", name="e", models=(MODEL,), host="far", pid=1, started=0.0, state="starting"
    )
    await renew(bus, host)
    await out.look()
    (tmp_path / "learner" / "1-0.safetensors").unlink()
    await follower(bus, engine, tmp_path).catch_up()
    assert engine.loaded == [(Version(1, 0), b"zero")]


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

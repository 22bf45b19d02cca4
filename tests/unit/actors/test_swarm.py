"""When a finite run is over, and that nothing before it counts. The processes are left out; the bus is in memory."""

import asyncio
from pathlib import Path

import pytest
from made_issue import group_issue

from agentjet.actors.swarm import Swarm
from agentjet.bus.memory import MemoryBus
from agentjet.bus.record import put, stream_specs
from agentjet.config import SwarmSettings
from agentjet.errors import BusTimeoutError, UserError
from agentjet.schemas import subject
from agentjet.schemas.checkpoint import Checkpoint
from agentjet.schemas.ids import GroupId
from agentjet.schemas.ledger import (
    CurriculumStart,
    DropReason,
    GroupDrop,
    LearnerStart,
    LearnerStep,
    RunFinish,
)
from agentjet.schemas.record import Record
from agentjet.schemas.subject import Stream, stream_name


class World:
    """A swarm whose actors are played by hand."""

    def __init__(self, folder: Path, bus: MemoryBus, num_steps: int) -> None:
        settings = SwarmSettings.model_validate(
            {
                "run": {"dir": folder, "num_steps": num_steps},
                "models": {"m": {"path": "tiny"}, "judge": {"path": "tiny", "is_trained": False}},
            }
        )
        self.swarm = Swarm(settings, folder / "swarm.toml")
        self.swarm._bus = bus  # type: ignore[assignment]
        self.run, self.bus = self.swarm.run, bus

    async def write(self, record: Record, who: str) -> int:
        return await put(self.bus, self.run, Stream.LEDGER, subject.ledger(self.run, who), record)

    async def start(self) -> None:
        await self.write(CurriculumStart(run=self.run, incarnation=1, config_digest=""), subject.CURRICULUM)
        start = LearnerStart(
            run=self.run, model="m", incarnation=1, base_step=0, cursor=1, config_digest="", fold_digest=""
        )
        await self.write(start, "m")

    async def issue(self, index: int) -> None:
        record = group_issue(self.run, index, seed=0)
        await self.write(record, subject.CURRICULUM)

    async def step(self, number: int, *groups: int) -> None:
        names = tuple(GroupId(f"p-{group}") for group in groups)
        record = LearnerStep(
            run=self.run, model="m", incarnation=1, step=number, cursor=1, members=(), groups=names, digest=""
        )
        await self.write(record, "m")

    async def drop(self, group: int) -> None:
        record = GroupDrop(
            run=self.run,
            model="m",
            incarnation=1,
            group=GroupId(f"p-{group}"),
            rank=group,
            reason=DropReason.CONSTANT,
        )
        await self.write(record, "m")

    async def finish(self) -> None:
        await self.write(RunFinish(run=self.run, reason="through"), subject.CURRICULUM)

    async def save(self, version: str) -> None:
        record = Checkpoint(run=self.run, model="m", version=version, ledger_sequence=1, cursor=1, path="", files=())
        await put(self.bus, self.run, Stream.CHECKPOINTS, subject.checkpoint(self.run, "m", version), record)

    async def is_over(self, seconds: float = 0.4) -> bool:
        """Whether `finished` returns."""
        try:
            async with asyncio.timeout(seconds):
                return (await self.swarm.finished()).reason == "through"
        except TimeoutError:
            return False


@pytest.fixture
async def world(memory_bus: MemoryBus, tmp_path: Path) -> World:
    return await world_of(memory_bus, tmp_path, num_steps=2)


async def world_of(bus: MemoryBus, folder: Path, num_steps: int) -> World:
    world = World(folder, bus, num_steps)
    for spec in stream_specs(world.run, max_bytes=2**26):
        await bus.ensure_stream(spec)
    await world.start()
    return world


async def test_a_run_is_over_once_its_last_step_has_a_verified_checkpoint(world: World):
    for group in range(3):
        await world.issue(group)
    await world.step(1, 0)
    await world.save("1-1")
    assert not await world.is_over()
    await world.finish()
    assert not await world.is_over(), "a group is not trained, and the last step is not taken"
    await world.step(2, 1)
    assert not await world.is_over(), "the last step is not saved"
    await world.save("1-2")
    assert await world.is_over(), "what is left over after the last step is trained by nobody"


async def test_a_run_without_a_last_step_is_over_when_all_that_was_issued_is_trained_or_dropped(memory_bus, tmp_path):
    world = await world_of(memory_bus, tmp_path, num_steps=0)
    for group in range(2):
        await world.issue(group)
    await world.finish()
    await world.step(1, 0)
    await world.save("1-1")
    assert not await world.is_over()
    await world.drop(1)
    assert await world.is_over()


async def test_a_run_whose_groups_were_all_dropped_needs_no_checkpoint(world: World):
    await world.issue(0)
    await world.finish()
    await world.drop(0)
    assert await world.is_over()


async def test_the_end_of_an_earlier_life_does_not_count(world: World):
    await world.issue(0)
    await world.step(1, 0)
    await world.save("1-1")
    await world.finish()
    ledger = await world.bus.stream_info(stream_name(world.run, Stream.LEDGER))
    world.swarm._started_at = ledger.last_sequence
    assert not await world.is_over()
    await world.finish()
    assert await world.is_over()


async def test_a_server_that_is_away_at_the_end_is_waited_for(world: World, monkeypatch: pytest.MonkeyPatch):
    await world.issue(0)
    await world.step(1, 0)
    await world.finish()
    last, num_failures = world.bus.last, 0

    async def fail_twice(stream: str, of: str):
        nonlocal num_failures
        num_failures += 1
        if num_failures <= 2:
            raise BusTimeoutError("the server is away")
        return await last(stream, of)

    await world.save("1-1")
    monkeypatch.setattr(world.bus, "last", fail_twice)
    assert await world.is_over(5.0)
    assert num_failures > 2


async def test_a_checkpoint_that_never_comes_is_told_of(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("agentjet.actors.swarm.LAST_CHECKPOINT_SECONDS", 0.1)
    await world.issue(0)
    await world.step(1, 0)
    await world.finish()
    with pytest.raises(UserError, match="model m has no verified checkpoint of its last step after"):
        await world.swarm.finished()

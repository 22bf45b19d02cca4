import asyncio
import json
from pathlib import Path

import pytest

from agentjet.bus.memory import MemoryBus
from agentjet.bus.record import last, put, stream_specs
from agentjet.checkpoint import CheckpointKeeper
from agentjet.config import CheckpointSettings, ModelSettings, RunSettings, SwarmSettings
from agentjet.durable.manifest import write_manifest
from agentjet.schemas import subject
from agentjet.schemas.checkpoint import Checkpoint
from agentjet.schemas.event import Event
from agentjet.schemas.ids import RunId, Version
from agentjet.schemas.ledger import LearnerStart, LearnerStep
from agentjet.schemas.subject import Stream, stream_name

RUN = RunId("r-abcdef")


class World:
    def __init__(self, folder: Path) -> None:
        self.bus, self.root = MemoryBus(), folder / "checkpoints" / "m"
        self.settings = SwarmSettings(
            run=RunSettings(dir=folder),
            models={"m": ModelSettings(path="tiny"), "judge": ModelSettings(path="tiny", is_trained=False)},
            checkpoint=CheckpointSettings(keep=2),
        )
        self.keeper = CheckpointKeeper(self.bus, RUN, self.settings)

    async def start(self, incarnation: int, base_step: int = 0, base: str = "") -> None:
        record = LearnerStart(
            run=RUN,
            model="m",
            incarnation=incarnation,
            base_step=base_step,
            base_checkpoint=base,
            cursor=0,
            config_digest="",
            fold_digest="",
        )
        await put(self.bus, RUN, Stream.LEDGER, subject.ledger(RUN, "m"), record)

    async def step(self, incarnation: int, *steps: int, save: bool = True) -> None:
        for step in steps:
            record = LearnerStep(
                run=RUN, model="m", incarnation=incarnation, step=step, cursor=0, members=(), groups=(), digest=""
            )
            await put(self.bus, RUN, Stream.LEDGER, subject.ledger(RUN, "m"), record)
            if save:
                self.save(Version(incarnation, step))

    def save(self, version: Version) -> Path:
        folder = self.root / str(version)
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(b"w")
        extra = {"version": str(version), "step": version.step, "incarnation": version.incarnation}
        (folder / "state.json").write_text(json.dumps({"extra": extra | {"ledger_sequence": 3, "cursor": 9}}))
        write_manifest(folder)
        return folder

    async def record(self, version: str) -> Checkpoint | None:
        found = await last(Checkpoint, self.bus, RUN, Stream.CHECKPOINTS, subject.checkpoint(RUN, "m", version))
        return found[1] if found else None

    def folders(self) -> set[str]:
        return {path.name for path in self.root.iterdir()}


@pytest.fixture
async def world(tmp_path: Path) -> World:
    world = World(tmp_path)
    for spec in stream_specs(RUN, max_bytes=2**26):
        await world.bus.ensure_stream(spec)
    return world


async def test_verified_checkpoint_is_named(world):
    await world.start(1)
    await world.step(1, 1)
    await world.keeper.tend()
    record = await world.record("1-1")
    assert record is not None
    assert (record.cursor, record.ledger_sequence, record.path) == (9, 3, str(world.root / "1-1"))
    assert world.keeper.metrics()["num_verified"] == 1


async def test_newest_are_kept_and_older_ones_pruned(world):
    await world.start(1)
    await world.step(1, 1, 2, 3, 4)
    await world.keeper.tend()
    assert world.folders() == {"1-3", "1-4"}
    assert await world.record("1-1") is not None  # the record stays, its folder is gone


async def test_damaged_one_is_set_aside_told_of_and_never_named(world):
    await world.start(1)
    await world.step(1, 1, 2)
    (world.root / "1-2/model.safetensors").write_bytes(b"x")
    await world.keeper.tend()
    assert world.folders() == {"1-1", "1-2.damaged-1"}
    assert await world.record("1-2") is None
    event = await last(Event, world.bus, RUN, Stream.EVENTS, subject.event(RUN, "checkpoint", "damaged"))
    assert event is not None
    assert "sha256" in event[1].data["error"]


async def test_damaged_ones_do_not_push_out_sound_ones(world):
    await world.start(1)
    await world.step(1, 1, 2, 3, 4)
    for version in ("1-3", "1-4"):
        (world.root / version / "model.safetensors").write_bytes(b"x")
    await world.keeper.tend()
    assert {"1-1", "1-2"} <= world.folders()


async def test_folder_under_another_name_is_set_aside(world):
    await world.start(1)
    await world.step(1, 1)
    await world.step(1, 2, save=False)
    (world.root / "1-1").rename(world.root / "1-2")
    await world.keeper.tend()
    assert world.folders() == {"1-2.damaged-1"}


async def test_voided_ones_are_pruned_and_get_no_record(world):
    await world.start(1)
    await world.step(1, 1)
    await world.keeper.tend()
    await world.step(1, 2)
    await world.start(2, base_step=1, base="1-1")
    await world.keeper.tend()
    assert world.folders() == {"1-1"}
    assert await world.record("1-2") is None


async def test_base_of_the_learner_outlives_newer_ones(world):
    await world.start(1)
    await world.step(1, 1)
    await world.start(2, base_step=1, base="1-1")
    await world.step(2, 2, 3, 4)
    await world.keeper.tend()
    assert world.folders() == {"1-1", "2-3", "2-4"}


async def test_checkpoint_that_the_ledger_does_not_show_yet_is_left_alone(world):
    await world.start(1)
    world.save(Version(1, 1))
    await world.keeper.tend()
    assert world.folders() == {"1-1"}
    assert await world.record("1-1") is None
    await world.step(1, 1, save=False)
    await world.keeper.tend()
    assert await world.record("1-1") is not None


async def test_restarted_keeper_writes_nothing_twice(world):
    await world.start(1)
    await world.step(1, 1, 2, 3)
    await world.keeper.tend()
    keeper = CheckpointKeeper(world.bus, RUN, world.settings)
    await keeper.tend()
    assert keeper.metrics()["num_verified"] == 0
    assert (await world.bus.stream_info(stream_name(RUN, Stream.CHECKPOINTS))).num_messages == 3


async def test_it_says_what_it_waits_for(world):
    assert world.keeper.waiting()[0].what == "a checkpoint of a learner"
    await world.start(1)
    await world.step(1, 1)
    (world.root / "1-1/model.safetensors").write_bytes(b"x")
    await world.keeper.tend()
    assert world.keeper.waiting()[0].what == "a checkpoint of a learner"


async def test_a_disk_that_fails_is_told_of_and_tried_again(world, monkeypatch):
    await world.start(1)
    await world.step(1, 1, 2, 3)
    monkeypatch.setattr("agentjet.checkpoint.keeper.POLL_SECONDS", 0.01)
    removed = []

    def remove(_, path):
        removed.append(path)
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("agentjet.checkpoint.store.CheckpointStore.remove", remove)
    job = asyncio.create_task(world.keeper.run())
    async with asyncio.timeout(5.0):
        while len(removed) < 2:
            await asyncio.sleep(0.01)
    assert "Permission denied" in world.keeper.waiting()[0].what
    job.cancel()
    await asyncio.gather(job, return_exceptions=True)

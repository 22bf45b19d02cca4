"""A learner of a tiny model on a bus: samples to feed it, its life, and what it wrote."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random

from agentjet.bus.protocol import Bus
from agentjet.bus.record import put, read
from agentjet.checkpoint import CheckpointKeeper
from agentjet.config import SwarmSettings
from agentjet.schemas import subject
from agentjet.schemas.ids import GroupId, RunId
from agentjet.schemas.ledger import (
    GroupDrop,
    LearnerStart,
    LearnerStep,
)
from agentjet.schemas.sample import MergeReport, Sample, SampledCall, Segment, Tombstone, TombstoneReason
from agentjet.schemas.subject import Stream, stream_name
from agentjet.schemas.weights import Weights
from agentjet.training.incarnation import Incarnation

MODEL = "small"


def settings(folder: Path, model: Path, lora_rank: int = 0, **learner: object) -> SwarmSettings:
    return SwarmSettings.model_validate(
        {
            "run": {"dir": folder, "seed": 5, "is_deterministic": True},
            "models": {
                MODEL: {
                    "path": str(model),
                    "engine": {"dtype": "float32"},
                    "learner": {"batch_groups": 2, "learning_rate": 1e-3, "num_threads": 1, **learner},
                    "algorithm": {"drop_constant_groups": True},
                    "lora": {"rank": lora_rank},
                }
            },
            "checkpoint": {"every_steps": 1, "keep": 5},
        }
    )


def sample(run: RunId, group: int, member: int, reward: float) -> Sample:
    """An episode of one call: five prompt tokens and three sampled ones."""
    random = Random(group * 100 + member)
    ids = tuple(random.randrange(10, 200) for _ in range(8))
    return Sample(
        run=run,
        model=MODEL,
        ticket=f"guess-{group}.{member}.0",
        group=GroupId(f"guess-{group}"),
        member=member,
        rank=group,
        group_size=2,
        reward=reward,
        segments=(Segment(parent=-1, ids=ids),),
        calls=(SampledCall(call=f"c{group}{member}", num_terms=3, versions=("1-0",)),),
        term_segment=(0, 0, 0),
        term_offset=(5, 6, 7),
        term_logprob=(-5.0, -5.0, -5.0),
        report=MergeReport(num_calls=1, num_branches=1, num_row_tokens=8, num_tree_tokens=8),
    )


def dead(record: Sample) -> Tombstone:
    """The tombstone that stands in a sample's place."""
    names = ("run", "model", "ticket", "group", "member", "rank", "group_size")
    fields = {name: getattr(record, name) for name in names}
    return Tombstone.model_validate({"reason": TombstoneReason.DEAD, **fields})


async def put_group(bus: Bus, run: RunId, group: int, rewards: tuple[float, float] = (1.0, 0.0)) -> None:
    for member, reward in enumerate(rewards):
        await put_slot(bus, run, sample(run, group, member, reward))


async def put_slot(bus: Bus, run: RunId, record: Sample | Tombstone) -> int:
    return await put(bus, run, Stream.SAMPLES, subject.sample(run, MODEL, record.slot), record, expected=0)


async def ledger(bus: Bus, run: RunId) -> list[LearnerStart | LearnerStep | GroupDrop]:
    name = stream_name(run, Stream.LEDGER)
    records = [await read(bus, run, Stream.LEDGER, one) async for one in bus.scan(name, subject.ledger(run, MODEL))]
    return [one for one in records if isinstance(one, LearnerStart | LearnerStep | GroupDrop)]


async def steps(bus: Bus, run: RunId) -> list[LearnerStep]:
    return [one for one in await ledger(bus, run) if isinstance(one, LearnerStep)]


@contextlib.asynccontextmanager
async def living(
    bus: Bus, run: RunId, of: SwarmSettings, name: str = "one", *, crashes: bool = False
) -> AsyncIterator[asyncio.Task[None]]:
    """A learner and the checkpoint actor, stopped at the end; one that crashes has no chance to save."""
    incarnation = Incarnation(bus, run, MODEL, of, name=name)
    learner = asyncio.create_task(incarnation.run())
    keeper = asyncio.create_task(CheckpointKeeper(bus, run, of).run())
    try:
        yield learner
    finally:
        if crashes:
            incarnation._save = nothing
        for task in (learner, keeper):
            task.cancel()
        await asyncio.gather(learner, keeper, return_exceptions=True)


async def nothing() -> None: ...


async def until(condition, seconds: float = 30.0) -> None:
    async with asyncio.timeout(seconds):
        while not await condition():
            await asyncio.sleep(0.02)


def after_step(bus: Bus, run: RunId, number: int, incarnation: int = 1):
    async def is_there() -> bool:
        return any(one.step == number and one.incarnation == incarnation for one in await steps(bus, run))

    return is_there


def with_checkpoint(bus: Bus, run: RunId, version: str):
    async def is_there() -> bool:
        return await bus.last(stream_name(run, Stream.CHECKPOINTS), subject.checkpoint(run, MODEL, version)) is not None

    return is_there


async def has_weights(bus: Bus, run: RunId, version: str) -> bool:
    message = await bus.last(stream_name(run, Stream.WEIGHTS), subject.weights(run, MODEL, version))
    if message is None:
        return False
    record = await read(bus, run, Stream.WEIGHTS, message)
    return isinstance(record, Weights)

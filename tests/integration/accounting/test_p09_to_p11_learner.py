"""DESIGN "Accounting", paragraphs 9 to 11, with real learners of a tiny model on the real server."""

import asyncio
import hashlib
import random
from pathlib import Path

import pytest
from hand_played import Swarm, settings_of
from learner_run import (
    MODEL,
    after_step,
    dead,
    ledger,
    living,
    put_group,
    put_slot,
    sample,
    settings,
    steps,
    until,
    with_checkpoint,
)
from scripted_engine import ScriptedEngine
from whole_swarm import FoldLearner, OwnServer, make_streams, records, working

from agentjet.accounting.admission import max_staleness
from agentjet.bus.nats import NatsBus
from agentjet.bus.record import put, read_as
from agentjet.config import CheckpointSettings
from agentjet.config.place import RunPlace
from agentjet.errors import FencedError
from agentjet.inference.weights import WeightsFollower
from agentjet.schemas import subject
from agentjet.schemas.ids import RunId, Version
from agentjet.schemas.ledger import DropReason, GroupDrop, GroupIssue, LearnerStart, LearnerStep
from agentjet.schemas.score import Outcome, Score
from agentjet.schemas.subject import Stream, stream_name
from agentjet.schemas.task import Ticket
from agentjet.training.replay import Replay


def with_checkpoints(of, **fields):
    return of.model_copy(update={"checkpoint": CheckpointSettings(**fields)})


async def starts(bus: NatsBus, run: RunId) -> list[tuple[int, int]]:
    return [(one.incarnation, one.base_step) for one in await ledger(bus, run) if isinstance(one, LearnerStart)]


async def trained(bus: NatsBus, run: RunId) -> list[str]:
    """Groups of the steps that count: those of the newest incarnation after its base, and what it kept."""
    line: list[LearnerStep] = []
    for record in await ledger(bus, run):
        if isinstance(record, LearnerStart):
            line = line[: record.base_step]
        elif isinstance(record, LearnerStep):
            line.append(record)
    return [group for step in line for group in step.groups]


async def test_p09_a4_a20_killed_with_its_server_a_learner_voids_what_no_checkpoint_has_and_takes_it_again(
    own: OwnServer, run, tmp_path: Path, model_folder: Path
):
    """Ids 0 to 7, batch 2, checkpoint after step 2; killed after step 3; resumed with a batch of 1."""
    of = with_checkpoints(settings(tmp_path, model_folder), every_steps=2, keep=5)
    await make_streams(own.bus, run)
    async with living(own.bus, run, of, crashes=True):
        for group in range(6):
            await put_group(own.bus, run, group)
        await until(with_checkpoint(own.bus, run, "1-2"))
        await until(after_step(own.bus, run, 3))
    await own.crash()
    await until(lambda: _is_connected(own.bus))
    for group in (6, 7):
        await put_group(own.bus, run, group)
    smaller = with_checkpoints(settings(tmp_path, model_folder, batch_groups=1), every_steps=2, keep=5)
    async with living(own.bus, run, smaller, name="two"):
        await until(after_step(own.bus, run, 6, incarnation=2))
    assert await starts(own.bus, run) == [(1, 0), (2, 2)]
    assert sorted(await trained(own.bus, run)) == [f"guess-{group}" for group in range(8)]
    again = [step.groups for step in await steps(own.bus, run) if step.incarnation == 2]
    assert again == [(f"guess-{group}",) for group in range(4, 8)]


async def test_a20_engines_move_to_the_versions_of_a_learner_that_went_back(
    nats_bus: NatsBus, run, tmp_path: Path, model_folder: Path
):
    """Checkpoint after step 2, killed after step 3: the engine leaves 1-3, which is void, for 2-2 and what follows."""
    of = with_checkpoints(settings(tmp_path, model_folder), every_steps=2, keep=5)
    await make_streams(nats_bus, run)
    engine, loads = ScriptedEngine(chat=None), list[tuple[Version, str]]()

    async def load(version: Version, path: Path, *, timeout_seconds: float = 120.0) -> None:
        loads.append((version, hashlib.sha256(path.read_bytes()).hexdigest()))
        engine.version = version

    engine.update_weights = load

    def serves(version: Version):
        async def is_served() -> bool:
            return engine.version == version

        return is_served

    follower = WeightsFollower(nats_bus, run, MODEL, engine, tmp_path / "engine", hold_seconds=1.0)
    async with working(follower.run()):
        async with living(nats_bus, run, of, crashes=True):
            for group in range(6):
                await put_group(nats_bus, run, group)
            await until(with_checkpoint(nats_bus, run, "1-2"))
            await until(serves(Version(1, 3)))
        async with living(nats_bus, run, of, name="two"):
            await until(serves(Version(2, 3)))
            for group in (6, 7):
                await put_group(nats_bus, run, group)
            await until(serves(Version(2, 4)))
        assert not follower.expected
    order = [version for version, _ in loads]
    assert [version for version in order if version.incarnation == 1][-1] == Version(1, 3)
    assert order == sorted(order)
    published = {one.version: one.sha256 for one in await records(nats_bus, run, Stream.WEIGHTS)}
    assert all(published[str(version)] == sha256 for version, sha256 in loads)
    late = ScriptedEngine(chat=None)
    await WeightsFollower(nats_bus, run, MODEL, late, tmp_path / "late", hold_seconds=1.0).catch_up()
    assert late.version == Version(2, 4)


async def _is_connected(bus: NatsBus) -> bool:
    return bus.last_error is None


async def test_p09_a_learner_outlives_a_server_that_is_killed_under_it(
    own: OwnServer, run, tmp_path: Path, model_folder: Path
):
    await make_streams(own.bus, run)
    async with living(own.bus, run, settings(tmp_path, model_folder)) as learner:
        await put_group(own.bus, run, 0)
        await put_group(own.bus, run, 1)
        await until(after_step(own.bus, run, 1))
        await own.crash()
        await until(lambda: _is_connected(own.bus))
        await put_group(own.bus, run, 2)
        await put_group(own.bus, run, 3)
        await until(after_step(own.bus, run, 2))
        assert not learner.done()
    assert await starts(own.bus, run) == [(1, 0)]
    assert await trained(own.bus, run) == [f"guess-{group}" for group in range(4)]


async def test_p09_a_fenced_learner_stops_and_its_late_step_is_not_stored(
    nats_bus: NatsBus, run, tmp_path: Path, model_folder: Path
):
    """The second starts while the first computes a step: the append of the first finds another predecessor."""
    of = settings(tmp_path, model_folder)
    await make_streams(nats_bus, run)
    async with living(nats_bus, run, of) as first:
        await until(lambda: _has_started(nats_bus, run))
        fence = LearnerStart(
            run=run, model=MODEL, incarnation=2, base_step=0, cursor=1, config_digest="", fold_digest="", writer="two"
        )
        await put(nats_bus, run, Stream.LEDGER, subject.ledger(run, MODEL), fence)
        await put_group(nats_bus, run, 0)
        await put_group(nats_bus, run, 1)
        with pytest.raises(BaseExceptionGroup) as fenced:
            await asyncio.wait_for(first, 20)
        assert fenced.group_contains(FencedError, match="taken over")
    assert await steps(nats_bus, run) == []


async def _has_started(bus: NatsBus, run: RunId) -> bool:
    return bool(await ledger(bus, run))


async def test_p09_a19_r7_a_late_member_and_a_lone_survivor_meet_a_checkpoint_and_a_kill(
    nats_bus: NatsBus, run, tmp_path: Path, model_folder: Path
):
    """Member 0 of group 2 lies before the checkpoint, member 1 after it; group 3 is [1, None]."""
    of = settings(tmp_path, model_folder)
    await make_streams(nats_bus, run)
    async with living(nats_bus, run, of, crashes=True):
        await put_slot(nats_bus, run, sample(run, 2, 0, 1.0))
        await put_group(nats_bus, run, 0)
        await put_group(nats_bus, run, 1)
        await until(with_checkpoint(nats_bus, run, "1-1"))
    async with living(nats_bus, run, of, name="two"):
        await put_slot(nats_bus, run, sample(run, 3, 0, 1.0))
        await put_slot(nats_bus, run, dead(sample(run, 3, 1, 0.0)))
        await put_slot(nats_bus, run, sample(run, 2, 1, 0.0))
        await put_group(nats_bus, run, 4)
        await until(after_step(nats_bus, run, 2, incarnation=2))
    newest = (await steps(nats_bus, run))[-1]
    assert newest.members == ("guess-2.0", "guess-2.1", "guess-4.0", "guess-4.1")
    assert all(value == value for value in newest.metrics.values()), "no NaN"
    drops = [one for one in await ledger(nats_bus, run) if isinstance(one, GroupDrop)]
    assert [(drop.group, drop.reason) for drop in drops] == [("guess-3", DropReason.TOO_FEW)]


async def test_p10_killed_between_checkpoint_and_record_or_with_a_damaged_one_a_learner_resumes_to_the_same_bits(
    nats_bus: NatsBus, run, tmp_path: Path, model_folder: Path
):
    of = settings(tmp_path, model_folder)
    await make_streams(nats_bus, run)
    async with living(nats_bus, run, of, crashes=True):
        for group in range(4):
            await put_group(nats_bus, run, group)
        await until(with_checkpoint(nats_bus, run, "1-2"))
    whole = [step.digest for step in await steps(nats_bus, run)]
    folder = RunPlace(of.run.dir).checkpoints(MODEL)
    # As a kill leaves it: written, and not named; and what is written is broken.
    await _forget_record(nats_bus, run, "1-2")
    weights = next(folder.glob("1-2/*.safetensors"))
    damaged = bytearray(weights.read_bytes())
    damaged[-1] ^= 1
    weights.write_bytes(bytes(damaged))
    async with living(nats_bus, run, of, name="two"):
        await until(after_step(nats_bus, run, 2, incarnation=2))
    assert await starts(nats_bus, run) == [(1, 0), (2, 1)]
    assert [path.name for path in folder.glob("1-2*")] == ["1-2.damaged-1"], "kept as evidence"
    assert (await steps(nats_bus, run))[-1].digest == whole[-1], "step 2 comes out with the same bits"
    replay = Replay(nats_bus, run, MODEL, of, folder / "1-1")
    assert [step.is_identical async for step in replay.steps()] == [True]


async def _forget_record(bus: NatsBus, run: RunId, version: str) -> None:
    name = stream_name(run, Stream.CHECKPOINTS)
    message = await bus.last(name, subject.checkpoint(run, MODEL, version))
    assert message is not None
    await bus._connection.api(f"STREAM.MSG.DELETE.{name}", {"seq": message.sequence}, what="test")


async def test_p11_no_group_is_trained_on_weights_more_than_a_plus_w_steps_newer(nats_bus: NatsBus, run, tasks):
    """Groups end in any order, one in four is dropped; staleness counts from the ledger's own order."""
    a, w = 1, 1
    settings = settings_of(
        tasks, pool={"group_size": 1}, learner={"batch_groups": 2, "admission_bound": a, "straggler_bound": w}
    )
    swarm, draw = Swarm(nats_bus, run), random.Random(3)
    await make_streams(nats_bus, run)
    async with swarm.curriculum(settings), working(FoldLearner(nats_bus, run, "small", settings).run()):
        name, of = stream_name(run, Stream.TASKS), subject.tasks_of(run, "guess")
        consumer = await nats_bus.consumer(name, "tasks-guess", subject=of, ack_wait_seconds=600.0)
        held = []
        while len(await _steps(nats_bus, run)) < 10:
            for one in await consumer.fetch(4, 0.05):
                held.append((await read_as(Ticket, nats_bus, run, Stream.TASKS, one.message), one))
            if held:
                ticket, delivery = held.pop(draw.randrange(len(held)))
                await _settle(nats_bus, run, ticket, is_dead=draw.random() < 0.25)
                await delivery.ack()
    taken, issued, found = 0, dict[str, int](), list[int]()
    for record in await records(nats_bus, run, Stream.LEDGER):
        if isinstance(record, GroupIssue):
            issued[f"{record.pool}-{record.index}"] = taken
        elif isinstance(record, LearnerStep):
            found += [taken - issued[group] for group in record.groups]
            taken += 1
    assert 0 < max(found) <= max_staleness(a, w)


async def _steps(bus: NatsBus, run: RunId) -> list[LearnerStep]:
    return [one for one in await records(bus, run, Stream.LEDGER) if isinstance(one, LearnerStep)]


async def _settle(bus: NatsBus, run: RunId, ticket: Ticket, *, is_dead: bool) -> None:
    outcome, reward = (Outcome.DEAD, None) if is_dead else (Outcome.SCORED, 1.0)
    score = Score(run=run, ticket=ticket.without_task(), attempt=1, outcome=outcome, reward=reward)
    record = sample(run, ticket.ranks["small"], 0, 1.0).model_copy(update={"group_size": 1})
    await put(bus, run, Stream.SCORES, subject.score(run, ticket.id), score)
    await put_slot(bus, run, dead(record) if is_dead else record)

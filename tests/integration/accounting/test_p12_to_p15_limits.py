"""DESIGN "Accounting", paragraphs 12 to 15: poison, purge, time and evolution, on the real server."""

import asyncio
import time
from collections import Counter
from pathlib import Path

import pytest
from chat_models import RUN, user
from hand_played import Swarm, settings_of
from learner_run import (
    MODEL,
    ledger,
    living,
    put_group,
    put_slot,
    sample,
    settings,
    steps,
    with_checkpoint,
)
from small_swarm import SmallSwarm
from structlog.testing import capture_logs
from whole_swarm import FoldLearner, OwnServer, at_least, audited, count, make_streams, merging, records, until, working

from agentjet.accounting.ledger import LedgerView
from agentjet.bus.handler import ConsumeState
from agentjet.bus.nats import NatsBus
from agentjet.bus.record import last, stream_specs
from agentjet.config import CheckpointSettings
from agentjet.config.place import RunPlace
from agentjet.config.settings import GatewaySettings, SwarmSettings
from agentjet.curriculum.purge import Purge
from agentjet.durable.manifest import versions_in
from agentjet.errors import BusTimeoutError, FencedError, UnknownSchemaError
from agentjet.gateway import Gateway
from agentjet.reward import Reward
from agentjet.rollout.ending import store_end
from agentjet.schemas import subject
from agentjet.schemas.codec import SCHEMA_HEADER, encode
from agentjet.schemas.episode import EndStatus, Episode
from agentjet.schemas.ids import RunId
from agentjet.schemas.ledger import DropReason, GroupDrop, LearnerStart
from agentjet.schemas.sample import TombstoneReason
from agentjet.schemas.score import Outcome
from agentjet.schemas.subject import Stream, stream_name
from agentjet.schemas.task import Ticket
from agentjet.training.incarnation import Incarnation
from agentjet.training.replay import Replay


def end_of(ticket: Ticket, attempt: int, **fields: object) -> Episode:
    common = {"run": ticket.run, "ticket": ticket, "attempt": attempt, "status": EndStatus.COMPLETED, "reward": 1.0}
    return Episode.model_validate(common | fields)


async def end(swarm: Swarm, ticket: Ticket, delivery, **fields: object) -> None:
    grant = await swarm.claim(ticket.id)
    assert (await store_end(swarm.bus, swarm.run, end_of(ticket, grant.attempt, **fields))).accepted
    await delivery.ack()


async def test_p12_a22_what_crashes_reward_or_merger_every_time_gets_a_terminal_record_and_its_group_completes(
    nats_bus: NatsBus, run, tasks, tmp_path: Path, monkeypatch
):
    rewarder = tmp_path / "reward.py"
    rewarder.write_text(
        "import os\ndef score(task, episode):\n    if episode['result'] == 'die': os._exit(7)\n    return 1.0\n"
    )
    monkeypatch.setattr("agentjet.actors.merger.Merger._calls", _raise)
    pool = {"reward": f"{rewarder}:score", "max_offers": 1, "group_size": 3}
    settings = settings_of(tasks, pool=pool, learner={"batch_groups": 1})
    swarm = Swarm(nats_bus, run)
    await make_streams(nats_bus, run)
    stages = (Reward(nats_bus, run, settings).run(), merging(nats_bus, run, lambda state: states.append(state)))
    states: list[ConsumeState] = []
    async with swarm.curriculum(settings), working(*stages, FoldLearner(nats_bus, run, "small", settings).run()):
        one, two, three = await swarm.fetch(3)
        await end(swarm, *one, reward=None, result="die")
        await end(swarm, *two, reward=None, result="fine", calls={})
        await end(swarm, *three, reward=None, result="fine", calls={"small": ("c",)})
        report = await audited(nats_bus, run, 3)
    outcomes = {score.ticket.slot: score.outcome for score in await records(nats_bus, run, Stream.SCORES)}
    assert outcomes[one[0].slot] is Outcome.INVALID
    reasons = {one.slot: one.reason for one in await records(nats_bus, run, Stream.SAMPLES)}
    expected = (TombstoneReason.DEAD, TombstoneReason.UNUSED, TombstoneReason.POISON)
    assert reasons == dict(zip((one[0].slot, two[0].slot, three[0].slot), expected, strict=True))
    assert states[-1].num_poisoned == 1
    drop = next(record for record in await records(nats_bus, run, Stream.LEDGER) if isinstance(record, GroupDrop))
    assert drop.reason is DropReason.TOO_FEW
    assert (report.lost, report.duplicated) == (0, 0)


async def _raise(*_: object, **__: object) -> None:
    raise ZeroDivisionError("every time")


async def test_p12_a_bus_outage_is_a_delay_and_never_poison(own: OwnServer, run, tasks, monkeypatch):
    """The server dies under eight merges at once, and each sample's first four tries come back without an answer."""
    monkeypatch.setattr("agentjet.bus.handler._BUS_DELAY_SECONDS", 0.05)
    settings = settings_of(tasks, learner={"admission_bound": 3})
    swarm, states = Swarm(own.bus, run), list[ConsumeState]()
    await make_streams(own.bus, run)
    honest, tries = own.bus.publish, Counter[str]()

    async def flaky(to: str, payload: bytes, **options):
        tries[to] += 1
        if ".sample." in to and tries[to] <= 4:
            raise BusTimeoutError(f"{to}: no answer")
        return await honest(to, payload, **options)

    own.bus.publish = flaky
    async with swarm.curriculum(settings), working(merging(own.bus, run, states.append)):
        played = await swarm.fetch(16)
        for ticket, delivery in played:
            await end(swarm, ticket, delivery)
        async with working(Reward(own.bus, run, settings).run()):
            await until(at_least(own.bus, run, Stream.SCORES, 4))
            await own.server.kill()
            await asyncio.sleep(1.2)
            await own.server.start()
            await until(lambda: _is_connected(own.bus))
            # Not to wait for what the killed server believes to be under way.
            await own.forget_acknowledgements(stream_name(run, Stream.SCORES), "merger")
            await until(at_least(own.bus, run, Stream.SAMPLES, 16))
    assert (states[-1].num_crashed, states[-1].num_poisoned) == (0, 0)
    tombstones = await records(own.bus, run, Stream.SAMPLES)
    assert {one.reason for one in tombstones} == {TombstoneReason.UNUSED}, "as the episodes said"
    assert {score.outcome for score in await records(own.bus, run, Stream.SCORES)} == {Outcome.SCORED}


async def _is_connected(bus: NatsBus) -> bool:
    return bus.last_error is None


async def test_p12_p15_a_newer_major_waits_and_a_newer_minor_is_read(nats_bus: NatsBus, run, tasks):
    settings = settings_of(tasks)
    swarm = Swarm(nats_bus, run)
    await make_streams(nats_bus, run)
    reward = Reward(nats_bus, run, settings)
    with capture_logs() as logged:
        scored, info = await _scored_of_three_versions(nats_bus, run, swarm, settings, reward)
    assert len(scored) == 2
    assert info.consumers["reward"] == 1, "it waits for a process that knows it"
    assert reward.metrics()["num_invalid"] == 0
    assert "a handler crashed" not in {entry["event"] for entry in logged}


async def _scored_of_three_versions(nats_bus: NatsBus, run: RunId, swarm: Swarm, settings, reward: Reward):
    async with swarm.curriculum(settings), working(reward.run()):
        (one, _), (two, _), (three, _), *_ = await swarm.fetch(4)
        for ticket, version in ((one, "9.0"), (two, "1.7"), (three, "1.0")):
            headers, body = encode(end_of(ticket, 1))
            body = body if version != "1.7" else _with_a_field_of_the_future(body)
            headers = headers | {SCHEMA_HEADER: f"episode/{version}"}
            name = stream_name(run, Stream.EPISODES)
            await nats_bus.publish(subject.episode(run, ticket.id), body, stream=name, headers=headers, expected=0)
        await until(at_least(nats_bus, run, Stream.SCORES, 2))
        await asyncio.sleep(0.5)
        scored = {score.ticket.id for score in await records(nats_bus, run, Stream.SCORES)}
        info = await nats_bus.stream_info(stream_name(run, Stream.EPISODES), with_consumers=True)
    assert scored == {two.id, three.id}
    return scored, info


def _with_a_field_of_the_future(body: bytes) -> bytes:
    import msgpack

    return msgpack.packb(msgpack.unpackb(body) | {"mood": "good"})


async def test_p13_whatever_is_purged_a_learner_restarts_and_a_replay_gives_the_same_bits(
    nats_bus: NatsBus, run, tmp_path: Path, model_folder: Path, monkeypatch
):
    """Every stream is purged as far as it may be, with a group pending across the checkpoints."""
    monkeypatch.setattr("agentjet.curriculum.purge.FULL_ENOUGH_RATIO", 0.0)
    of = settings(tmp_path, model_folder).model_copy(update={"checkpoint": CheckpointSettings(every_steps=1, keep=2)})
    await make_streams(nats_bus, run)
    async with living(nats_bus, run, of, crashes=True):
        for group in range(8):
            if group == 4:
                pending = await put_slot(nats_bus, run, sample(run, 8, 0, 1.0))
            await put_group(nats_bus, run, group)
        await until(with_checkpoint(nats_bus, run, "1-4"))
    await _purge(nats_bus, run, time.time() + 3600)
    info = await nats_bus.stream_info(stream_name(run, Stream.SAMPLES))
    assert info.first_sequence == pending == 9, "what no kept checkpoint needs is gone, and only that"
    async with living(nats_bus, run, of, name="two", crashes=True):
        await put_slot(nats_bus, run, sample(run, 8, 1, 0.0))
        await put_group(nats_bus, run, 9)
        await until(with_checkpoint(nats_bus, run, "2-5"))
    taken = [step.groups for step in await steps(nats_bus, run) if step.incarnation == 2]
    assert taken == [("guess-8", "guess-9")]
    kept = versions_in(RunPlace(of.run.dir).checkpoints(MODEL))
    found = [step async for step in Replay(nats_bus, run, MODEL, of, kept[min(kept)]).steps()]
    assert found and all(step.is_identical for step in found)


async def _purge(bus: NatsBus, run: RunId, low_water: float) -> None:
    view = LedgerView()
    name = stream_name(run, Stream.LEDGER)
    sequences = [message.sequence async for message in bus.scan(name, subject.ledger(run, MODEL))]
    for sequence, record in zip(sequences, await ledger(bus, run), strict=True):
        view.apply(sequence, record)
    purge = Purge(
        bus, run, learners={MODEL: view}, keep_checkpoints=2, keep_calls_bytes=0, margin_seconds=0, blob_seconds=0
    )
    await purge.run(low_water)


async def test_p13_purge_leaves_what_groups_that_are_out_still_need(nats_bus: NatsBus, run, tasks, monkeypatch):
    """A restart after a purge offers again what is owed, and settled groups stay settled."""
    monkeypatch.setattr("agentjet.curriculum.purge.FULL_ENOUGH_RATIO", 0.0)
    settings = settings_of(tasks, pool={"group_size": 1}, learner={"batch_groups": 1})
    swarm = Swarm(nats_bus, run)
    await make_streams(nats_bus, run)
    stages = (Reward(nats_bus, run, settings).run(), merging(nats_bus, run))
    async with working(*stages, FoldLearner(nats_bus, run, "small", settings).run()):
        async with swarm.curriculum(settings) as (one, _):
            for _ in range(3):
                ((ticket, delivery),) = await swarm.fetch(1)
                await end(swarm, ticket, delivery)
            ((open_one, delivery),) = await swarm.fetch(1)
            grant = await swarm.claim(open_one.id)
            monkeypatch.setattr(one._purge, "_margin_seconds", 0.0)
            await one._clean()
            assert (await nats_bus.stream_info(stream_name(run, Stream.SCORES))).num_messages < 3
        async with swarm.curriculum(settings, sweep_seconds=0.1):
            await store_end(nats_bus, run, end_of(open_one, grant.attempt))
            await delivery.ack()
            report = await audited(nats_bus, run, 4)
            ((fresh, _),) = await swarm.fetch(1)
    assert fresh.id == "guess-4.0.0"
    assert (report.lost, report.duplicated) == (0, 0)


@pytest.mark.parametrize("hour", [3600.0, -3600.0])
async def test_p14_deadlines_run_by_the_server_s_time_whatever_the_local_clock_says(
    own: OwnServer, tasks, monkeypatch, hour
):
    """The local clock of every actor is an hour off, and comes back in the middle of an episode."""
    honest = time.time
    monkeypatch.setattr(time, "time", lambda: honest() + hour)
    model = {"path": "tiny", "learner": {"batch_groups": 1}, "algorithm": {"min_group": 1}}
    pool = {"workflow": "agent.py:run", "tasks": tasks, "group_size": 2, "deadline_seconds": 1.5}
    settings = SwarmSettings.model_validate({"models": {"m": model}, "pools": {"guess": pool}})
    chat, swarm = SmallSwarm(own.bus), Swarm(own.bus, RUN)
    await make_streams(own.bus, RUN)
    async with swarm.curriculum(settings) as (one, _), working(chat.service.run()):
        (first, delivery), (silent, _) = await swarm.fetch(2)
        low_water = one._course.board.low_water
        assert low_water is not None and abs(low_water - honest()) < 5.0
        gateway = Gateway(own.bus, RUN, GatewaySettings())
        grant, other = await swarm.claim(first.id), await swarm.claim(silent.id)
        assert abs(grant.deadline - honest() - 1.5) < 1.0
        answer = await gateway.complete(grant.key, {"model": "m", "messages": [user("x")]})
        assert answer["choices"][0]["message"]["content"] == "hi"
        monkeypatch.setattr(time, "time", honest)
        answer = await gateway.complete(grant.key, {"model": "m", "messages": [user("y")]})
        assert answer["choices"][0]["message"]["content"] == "hi"
        assert (await store_end(own.bus, RUN, end_of(first, grant.attempt))).accepted, "nobody buried it before"
        await delivery.ack()
        to = subject.episode(RUN, silent.id)
        await until(lambda: last(Episode, own.bus, RUN, Stream.EPISODES, to))
        message = await own.bus.last(stream_name(RUN, Stream.EPISODES), to)
        await gateway.close()
    assert message is not None and 0.0 <= message.time - other.deadline < 3.0


async def test_p15_a_ledger_of_a_newer_major_stops_a_learner_before_it_writes(
    nats_bus: NatsBus, run, tmp_path: Path, model_folder: Path
):
    await make_streams(nats_bus, run)
    start = LearnerStart(run=run, model=MODEL, incarnation=1, base_step=0, cursor=1, config_digest="", fold_digest="")
    headers, body = encode(start)
    name, to = stream_name(run, Stream.LEDGER), subject.ledger(run, MODEL)
    await nats_bus.publish(to, body, stream=name, headers=headers | {SCHEMA_HEADER: "learner_start/2.0"}, expected=0)
    with pytest.raises(UnknownSchemaError, match="a newer AgentJet wrote it"):
        await Incarnation(nats_bus, run, MODEL, settings(tmp_path, model_folder), name="one").run()
    assert await count(nats_bus, run, Stream.LEDGER) == 1


@pytest.mark.parametrize("left", [0, 4])
async def test_p15_a_log_that_lost_its_end_or_holds_another_record_there_is_detected(
    nats_bus: NatsBus, run, tmp_path: Path, model_folder: Path, left: int
):
    of = settings(tmp_path, model_folder)
    await make_streams(nats_bus, run)
    async with living(nats_bus, run, of):
        await put_group(nats_bus, run, 0)
        await put_group(nats_bus, run, 1)
        await until(with_checkpoint(nats_bus, run, "1-1"))
    name = stream_name(run, Stream.SAMPLES)
    await nats_bus.delete_stream(name)
    (spec,) = [spec for spec in stream_specs(run, max_bytes=2**30) if spec.name == name]
    await nats_bus.ensure_stream(spec)
    for group in range(left // 2):
        await put_group(nats_bus, run, group, (0.0, 1.0))
    before = await count(nats_bus, run, Stream.LEDGER)
    with pytest.raises(FencedError, match="lost its end"):
        await Incarnation(nats_bus, run, MODEL, of, name="two").run()
    assert await count(nats_bus, run, Stream.LEDGER) == before

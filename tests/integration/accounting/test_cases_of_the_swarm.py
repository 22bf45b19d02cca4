"""Cases of what may be lost or late around the episodes: engines, weights, learners, space. On the real server."""

import asyncio
import hashlib
import time
from pathlib import Path

import pytest
from chat_models import RUN, user
from hand_played import Swarm
from hand_played import settings_of as curriculum_settings
from small_swarm import MODEL, SmallSwarm
from whole_swarm import FoldLearner, OwnServer, at_least, audited, count, make_streams, merging, until, working

from agentjet.bus.nats import NatsBus
from agentjet.bus.presence import renew
from agentjet.bus.record import put, read_as, stream_specs
from agentjet.bus.server import EmbeddedServer
from agentjet.config import LearnerSettings
from agentjet.config.settings import GatewaySettings, SwarmSettings
from agentjet.errors import BusFullError
from agentjet.gateway import Gateway
from agentjet.inference.weights import WeightsFollower
from agentjet.observe.lag import LoopWatch
from agentjet.reward import Reward
from agentjet.rollout.ending import store_end, store_end_in_time
from agentjet.schemas import subject
from agentjet.schemas.episode import EndStatus, Episode
from agentjet.schemas.ids import RunId, Version
from agentjet.schemas.ledger import DropReason, GroupDrop, LearnerStart, LearnerStep
from agentjet.schemas.presence import Presence
from agentjet.schemas.subject import Stream, stream_name
from agentjet.schemas.task import Ticket
from agentjet.training.publisher import WeightsPublisher
from agentjet.training.snapshot import Snapshot
from agentjet.ui.status import assess, fetch

MIB = 1024**2


class Source:
    """A learner whose weights are some bytes."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def engine_weights(self, path: Path) -> Snapshot:
        path.write_bytes(self.data)
        return Snapshot("float32", len(self.data), hashlib.sha256(self.data).hexdigest())


async def learned(bus: NatsBus, step: int) -> int:
    common = {"run": RUN, "model": MODEL, "incarnation": 1, "cursor": 1}
    if step:
        record = LearnerStep.model_validate(common | {"step": step, "members": (), "groups": (), "digest": ""})
    else:
        record = LearnerStart.model_validate(common | {"base_step": 0, "config_digest": "", "fold_digest": ""})
    return await put(bus, RUN, Stream.LEDGER, subject.ledger(RUN, MODEL), record)


def publisher(bus: NatsBus, folder: Path, route: str) -> WeightsPublisher:
    settings = LearnerSettings.model_validate({"weights_route": route})
    return WeightsPublisher(bus, RUN, MODEL, settings, folder / "learner")


def follower(bus: NatsBus, chat: SmallSwarm, folder: Path, hold_seconds: float = 5.0) -> WeightsFollower:
    return WeightsFollower(bus, RUN, MODEL, chat.engine, folder / "engine", hold_seconds=hold_seconds)


async def test_a5_a_call_that_meets_an_update_is_answered_by_the_new_version_and_one_that_fails_pauses_nobody(
    nats_bus: NatsBus, tmp_path: Path, monkeypatch
):
    monkeypatch.setattr("agentjet.inference.weights._RETRY_SECONDS", 0.3)
    chat, order, may_load = SmallSwarm(nats_bus), list[str](), asyncio.Event()
    failures = [TimeoutError("the update took too long")] * 3

    async def update(version: Version, path: Path, *, timeout_seconds: float = 120.0) -> None:
        order.append(f"load {version}")
        if version.step == 2 and failures:
            raise failures.pop()
        await may_load.wait()
        chat.engine.version = version

    chat.engine.update_weights = update
    chat.engine.on_draw = lambda index: order.append(f"draw {chat.engine.version}") if not index else None
    await make_streams(nats_bus, RUN)
    weights = follower(nats_bus, chat, tmp_path, hold_seconds=0.5)
    chat.service = chat.new_service(admit=weights.ready)
    key, source = await chat.claim(), publisher(nats_bus, tmp_path, "path")
    await learned(nats_bus, 0)
    async with working(weights.run(), chat.service.run()):
        sequence = await learned(nats_bus, 1)
        await until(lambda: _is(weights.expected == Version(1, 1)))
        asking = asyncio.create_task(chat.ask(chat.request(key, [user("x")])))
        await source.publish(Version(1, 1), sequence, Source(b"one"))
        await until(lambda: _is("load 1-1" in order))
        await asyncio.sleep(0.1)
        assert not asking.done() and not chat.engine.generations, "paused while it loads"
        may_load.set()
        _, reply = await asyncio.wait_for(asking, 5)
        assert (reply.version, order) == ("1-1", ["load 1-1", "draw 1-1"])
        # An update that times out: the old version goes on, and the new one is tried again.
        await source.publish(Version(1, 2), await learned(nats_bus, 2), Source(b"two"))
        _, reply = await asyncio.wait_for(chat.ask(chat.request(key, [user("y")])), 5)
        assert reply.version == "1-1", "the hold has run out"
        await until(lambda: _is(chat.engine.version == Version(1, 2)))
        assert order.count("load 1-2") == 4
        _, reply = await asyncio.wait_for(chat.ask(chat.request(key, [user("z")])), 5)
        assert reply.version == "1-2"


async def _is(value: object) -> bool:
    return bool(value)


async def test_a11_either_side_of_a_weight_transfer_may_be_killed_and_restarting_it_suffices(
    nats_bus: NatsBus, tmp_path: Path
):
    data = bytes(range(256)) * (6 * MIB // 256)
    chat = SmallSwarm(nats_bus)
    await make_streams(nats_bus, RUN)
    await learned(nats_bus, 0)
    sequence = await learned(nats_bus, 1)
    honest, stored = nats_bus.publish, []

    async def dying(to: str, payload: bytes, **options):
        if ".blob.weights." in to:
            stored.append(to)
            if len(stored) > 3:
                raise RuntimeError("the learner is killed")
        return await honest(to, payload, **options)

    nats_bus.publish = dying
    with pytest.raises(RuntimeError):
        await publisher(nats_bus, tmp_path, "bus").publish(Version(1, 1), sequence, Source(data))
    nats_bus.publish = honest
    loaded: list[bytes] = []

    async def update(version: Version, path: Path, *, timeout_seconds: float = 120.0) -> None:
        loaded.append(path.read_bytes())
        chat.engine.version = version

    chat.engine.update_weights = update
    async with working(follower(nats_bus, chat, tmp_path).run()):
        await asyncio.sleep(0.3)
        assert loaded == [], "half a version is none"
        record = await publisher(nats_bus, tmp_path, "bus").publish(Version(1, 1), sequence, Source(data))
        await until(lambda: _is(loaded))
    assert record.is_blob and loaded == [data]
    # The engine is killed while it fetches; its next life gets all of it.
    chat.engine.version = Version(0, 0)
    reading = asyncio.Event()
    honest_last = nats_bus.last

    async def hanging(stream: str, of: str):
        if ".blob.weights." in of:
            reading.set()
            await asyncio.Event().wait()
        return await honest_last(stream, of)

    nats_bus.last = hanging
    async with working(follower(nats_bus, chat, tmp_path).catch_up()):
        await asyncio.wait_for(reading.wait(), 5)
    nats_bus.last = honest_last
    await asyncio.wait_for(follower(nats_bus, chat, tmp_path).catch_up(), 10)
    assert loaded == [data] * 2
    assert not list(tmp_path.glob("engine*/.*.partial")), "no half is left behind"


def presence(actor: str, models: tuple[str, ...] = (), **info: object) -> Presence:
    fields = {"run": RUN, "actor": actor, "name": actor, "models": models, "host": "far", "pid": 1, "state": "busy"}
    return Presence.model_validate(fields | {"started": time.time(), "info": info})


async def test_a13_a14_a_lost_engine_and_an_absent_learner_show_in_status_and_calls_outlive_the_engine(
    nats_bus: NatsBus, nats_server: EmbeddedServer, tasks, monkeypatch
):
    monkeypatch.setattr("agentjet.bus.presence.TTL_SECONDS", 1.0)
    monkeypatch.setattr("agentjet.curriculum.curriculum.LOOK_SECONDS", 0.1)
    pool = {"workflow": "agent.py:run", "tasks": tasks, "group_size": 3}
    model = {"path": "tiny", "learner": {"batch_groups": 1}}
    settings = SwarmSettings.model_validate({"models": {MODEL: model}, "pools": {"guess": pool}})
    # A connection of its own, which is gone with it as that of a killed process is.
    engine_bus = await NatsBus.connect(nats_server.url, name="engine")
    chat, swarm, is_alive = SmallSwarm(engine_bus), Swarm(nats_bus, RUN), True
    await make_streams(nats_bus, RUN)

    async def beat(last_seen: dict[str, float]) -> None:
        while True:
            await renew(nats_bus, presence("curriculum", last_seen=last_seen))
            if is_alive:
                await renew(nats_bus, presence("inference", (MODEL,), version="0-0"))
            await asyncio.sleep(0.1)

    async def problems() -> list[str]:
        return [one for one in assess(await fetch(nats_bus, RUN)).problems if f"model {MODEL}:" in one]

    async with swarm.curriculum(settings) as (one, _), working(beat(one.last_seen)):
        grants = [await swarm.claim(ticket.id) for ticket, _ in await swarm.fetch(3)]
        gateway = Gateway(nats_bus, RUN, GatewaySettings())
        gateway._exchange._look_seconds = 0.3
        async with working(chat.service.run()):
            body = {"model": MODEL, "messages": [user("x")]}
            await gateway.complete(grants[0].key, body)
            without_learner = f"no learner is attached to model {MODEL}: its samples are kept and wait"
            assert await problems() == [without_learner]
        is_alive = False
        await engine_bus.close()
        await asyncio.sleep(0.3)  # until the server has noticed, it hands questions to the dead
        asking = [asyncio.create_task(gateway.complete(grant.key, body)) for grant in grants]
        await until(at_least(nats_bus, RUN, Stream.INFER, 3))
        line = (await until(lambda: _second(problems)))[1]
        assert line.startswith(f"no engine serves model {MODEL}: engine lost ")
        assert "s ago, 3 calls waiting, the oldest for " in line
        is_alive = True
        async with working(SmallSwarm(nats_bus).service.run()):
            await asyncio.wait_for(asyncio.gather(*asking), 20)
            assert await until(problems) == [without_learner]
        await gateway.close()
    assert await count(nats_bus, RUN, Stream.CALLS) == 4


async def _second(problems) -> list[str] | None:
    found = await problems()
    return found if len(found) == 2 and "lost" in found[1] else None


async def test_a17_five_constant_groups_of_eight_make_room_for_five(nats_bus: NatsBus, run, tasks):
    settings = curriculum_settings(tasks, pool={"group_size": 1}, learner={"batch_groups": 4, "admission_bound": 1})
    swarm = Swarm(nats_bus, run)
    await make_streams(nats_bus, run)
    async with swarm.curriculum(settings):
        await swarm.start_learner()
        issued = [ticket for ticket, _ in await swarm.fetch(8)]
        assert await swarm.none_waits()
        for ticket in issued[:5]:
            drop = GroupDrop(
                run=run,
                model="small",
                incarnation=1,
                group=ticket.group,
                rank=ticket.ranks["small"],
                reason=DropReason.CONSTANT,
            )
            await swarm.chain.append(drop)
        assert len(await swarm.fetch(5)) == 5
        assert await swarm.none_waits()


async def test_a8_a_reward_function_that_blocks_leaves_the_loop_free_is_named_and_others_are_scored(
    nats_bus: NatsBus, run, tasks, tmp_path: Path, monkeypatch
):
    monkeypatch.setattr("agentjet.reward.reward._SLOW_SECONDS", 0.2)
    rewarder = tmp_path / "reward.py"
    rewarder.write_text(
        "import time\ndef score(task, episode):\n    if episode['result'] == 'block': time.sleep(60)\n    return 1.0\n"
    )
    settings = curriculum_settings(tasks, pool={"reward": f"{rewarder}:score"}, reward={"num_workers": 2})
    swarm = Swarm(nats_bus, run)
    await make_streams(nats_bus, run)
    reward = Reward(nats_bus, run, settings)
    async with swarm.curriculum(settings), working(reward.run()), LoopWatch() as lag:
        for index, (ticket, _) in enumerate(await swarm.fetch(4)):
            grant = await swarm.claim(ticket.id)
            await store_end(nats_bus, run, end_of(ticket, grant.attempt, result="fine" if index else "block"))
        await until(at_least(nats_bus, run, Stream.SCORES, 3))
        await until(lambda: _is(reward.waiting()))
        assert [f"{rewarder}:score" in one.what for one in reward.waiting()] == [True]
        assert lag.num_stalls == 0


def end_of(ticket: Ticket, attempt: int, **fields: object) -> Episode:
    common = {"run": ticket.run, "ticket": ticket, "attempt": attempt, "status": EndStatus.COMPLETED}
    return Episode.model_validate(common | fields)


async def test_a24_a_full_store_stops_admission_first_loses_nothing_and_goes_on_by_itself(
    own: OwnServer, run: RunId, tasks, monkeypatch
):
    """EPISODES is 200 KB small and fills with large results; then it is made larger."""
    monkeypatch.setattr("agentjet.curriculum.curriculum._FILL_SECONDS", 0.05)
    settings = curriculum_settings(
        tasks, pool={"group_size": 1}, learner={"batch_groups": 1, "admission_bound": 3, "straggler_bound": 99}
    )
    swarm, bus = Swarm(own.bus, run), own.bus
    await make_streams(bus, run, max_bytes=2 * MIB)
    stages = (Reward(bus, run, settings).run(), merging(bus, run), FoldLearner(bus, run, "small", settings).run())
    held: list[tuple[Ticket, int]] = []
    num_ended = 0
    async with swarm.curriculum(settings) as (one, _), working(*stages):
        name, of = stream_name(run, Stream.TASKS), subject.tasks_of(run, "guess")
        consumer = await bus.consumer(name, "tasks-guess", subject=of, ack_wait_seconds=600)
        while (taken := await consumer.fetch(1, 0.3)) or not _full(one):
            for delivery in taken:
                ticket = await read_as(Ticket, bus, run, Stream.TASKS, delivery.message)
                grant = await swarm.claim(ticket.id)
                if len(held) < 3:
                    held.append((ticket, grant.attempt))
                    continue
                end = end_of(ticket, grant.attempt, reward=1.0, result="x" * 20_000)
                assert (await store_end(bus, run, end)).accepted, "admission stops before the stream is full"
                await delivery.ack()
                num_ended += 1
                await asyncio.sleep(0.15)
        assert "full: nothing is issued" in _full(one)[0]
        # What was out already meets a stream that is full indeed.
        large = [end_of(ticket, attempt, reward=1.0, result="x" * 60_000) for ticket, attempt in held]
        with pytest.raises(BusFullError):
            for end in large:
                await store_end(bus, run, end)
        waiting = [asyncio.create_task(store_end_in_time(bus, run, end, lambda: 60.0)) for end in large]
        await asyncio.sleep(0.3)
        for spec in stream_specs(run, max_bytes=16 * MIB):
            await bus.ensure_stream(spec)
        replies = await asyncio.wait_for(asyncio.gather(*waiting), 20)
        assert all(reply.accepted for reply in replies)
        await swarm.fetch(1)
        report = await audited(bus, run, num_ended + 3)
    assert (report.lost, report.duplicated, report.sampled) == (0, 0, num_ended + 3)


def _full(curriculum) -> list[str]:
    return [one.what for one in curriculum.waiting() if "full" in one.what]

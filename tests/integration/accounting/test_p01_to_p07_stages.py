"""DESIGN "Accounting", paragraphs 1 to 7, each by the interleaving that would break it, on the real server."""

import asyncio
from collections import Counter

from chat_models import RUN, user
from hand_played import Swarm, settings_of
from small_swarm import SmallSwarm
from whole_swarm import (
    FoldLearner,
    OwnServer,
    at_least,
    audited,
    count,
    make_streams,
    merging,
    records,
    until,
    working,
)

from agentjet.bus.nats import NatsBus
from agentjet.bus.record import last
from agentjet.config.settings import GatewaySettings, SwarmSettings
from agentjet.gateway import Gateway
from agentjet.reward import Reward
from agentjet.rollout.ending import store_end, store_end_in_time
from agentjet.schemas import subject
from agentjet.schemas.episode import EndStatus, Episode, Fault
from agentjet.schemas.ids import RunId
from agentjet.schemas.ledger import DropReason, GroupDrop
from agentjet.schemas.sample import Sample, Tombstone, TombstoneReason
from agentjet.schemas.score import Outcome
from agentjet.schemas.subject import Stream, stream_name
from agentjet.schemas.task import EpisodeKind, Ticket


def end_of(ticket: Ticket, attempt: int, calls: dict[str, list[str]], reward: float | None = 1.0) -> Episode:
    return Episode(
        run=ticket.run,
        ticket=ticket,
        attempt=attempt,
        status=EndStatus.COMPLETED,
        calls={model: tuple(ids) for model, ids in calls.items()},
        reward=reward,
    )


async def test_p01_outputs_stand_when_a_killed_server_forgets_every_acknowledgement(
    own: OwnServer, run, tasks, tmp_path
):
    """The inputs of reward and merger come again as if never seen, and to code that would decide otherwise."""
    rewarder = tmp_path / "reward.py"
    rewarder.write_text("def score(task, episode): return 1.0\n")
    settings = settings_of(tasks, pool={"reward": f"{rewarder}:score"}, learner={"admission_bound": 3})
    swarm = Swarm(own.bus, run)
    await make_streams(own.bus, run)
    async with swarm.curriculum(settings):
        for ticket, delivery in await swarm.fetch(16):
            grant = await swarm.claim(ticket.id)
            end = end_of(ticket, grant.attempt, {}, reward=None)
            await store_end(own.bus, run, end)
            await delivery.ack()
        async with working(Reward(own.bus, run, settings).run(), merging(own.bus, run)):
            await until(at_least(own.bus, run, Stream.SAMPLES, 16))
        before = await records(own.bus, run, Stream.SCORES), await records(own.bus, run, Stream.SAMPLES)
        await own.crash()
        for stream, durable in ((Stream.EPISODES, "reward"), (Stream.SCORES, "merger")):
            await own.forget_acknowledgements(stream_name(run, stream), durable)
        rewarder.write_text("def score(task, episode): return 0.0\n")
        seen: list[int] = []
        again = Reward(own.bus, run, settings)
        async with working(again.run(), merging(own.bus, run, lambda state: seen.append(state.num_handled))):
            await until(lambda: _is(seen and seen[-1] >= 16))
        assert (await records(own.bus, run, Stream.SCORES), await records(own.bus, run, Stream.SAMPLES)) == before
        assert again.metrics()["num_scored"] == 0, "it stored nothing of its own"
        async with working(FoldLearner(own.bus, run, "small", settings).run()):
            report = await audited(own.bus, run, 16)
    assert (report.lost, report.duplicated, report.ended, report.scored, report.sampled) == (0, 0, 16, 16, 16)


async def _is(value: object) -> bool:
    return bool(value)


async def test_p02_curriculum_and_server_killed_between_ledger_and_tasks(own: OwnServer, run, tasks, monkeypatch):
    async def killed(*_: object) -> None:
        await own.server.kill()
        raise RuntimeError("killed")

    settings = settings_of(tasks)
    swarm = Swarm(own.bus, run)
    await make_streams(own.bus, run)
    with monkeypatch.context() as patch:
        patch.setattr("agentjet.curriculum.issuer.publish_tickets", killed)
        async with swarm.curriculum(settings) as (_, job):
            await asyncio.wait({job}, timeout=10)
    await own.server.start()
    assert len(await swarm.issues()) == 1
    assert await swarm.none_waits()
    async with swarm.curriculum(settings):
        tickets = [ticket.id for ticket, _ in await swarm.fetch(4)]
        assert await swarm.none_waits()
    assert sorted(tickets) == ["guess-0.0.0", "guess-0.1.0", "guess-1.0.0", "guess-1.1.0"]


async def test_p02_a_ticket_that_ends_while_the_sweep_reads_is_not_published_again(nats_bus: NatsBus, run, tasks):
    """TASKS is read before EPISODES: a player stores the end before it acknowledges the ticket."""
    swarm = Swarm(nats_bus, run)
    await make_streams(nats_bus, run)
    async with swarm.curriculum(settings_of(tasks), sweep_seconds=600) as (one, _):
        played = await swarm.fetch(4)
        honest, reads = nats_bus.last_many, []

        async def ending_in_between(stream: str, subjects):
            found = await honest(stream, subjects)
            reads.append(stream)
            if len(reads) == 1:
                for ticket, delivery in played:
                    grant = await swarm.claim(ticket.id)
                    await store_end(nats_bus, run, end_of(ticket, grant.attempt, {"small": ["c"]}))
                    await delivery.ack()
            return found

        nats_bus.last_many = ending_in_between
        await one._sweep.publish_missing()
        assert one.metrics()["tickets_published_again"] == 0
        await until(lambda: _are_gone(swarm))
        await one._sweep.publish_missing()
        assert one.metrics()["tickets_published_again"] == 0
        assert set(reads) == {stream_name(run, Stream.TASKS), stream_name(run, Stream.EPISODES)}


async def _are_gone(swarm: Swarm) -> bool:
    return await count(swarm.bus, swarm.run, Stream.TASKS) == 0


def chat_settings(tasks: str, models: tuple[str, ...] = ("m",), **pool: object) -> SwarmSettings:
    model = {"path": "tiny", "learner": {"batch_groups": 1}, "algorithm": {"min_group": 1}}
    pools = {"guess": {"workflow": "agent.py:run", "tasks": tasks, "group_size": 1, **pool}}
    return SwarmSettings.model_validate({"models": dict.fromkeys(models, model), "pools": pools})


async def test_p03_t8_a18_a_ticket_redelivered_while_its_first_worker_lives_never_mixes_calls(own: OwnServer, tasks):
    settings = chat_settings(tasks)
    chat, swarm = SmallSwarm(own.bus), Swarm(own.bus, RUN)
    await make_streams(own.bus, RUN)
    async with swarm.curriculum(settings), working(chat.service.run(), merging(own.bus, RUN)):
        ((ticket, _),) = await swarm.fetch(1)
        one = await swarm.claim(ticket.id, "one")
        _, first = await chat.ask(chat.request(one.key, [user("first worker")]))
        await own.crash()
        await own.forget_acknowledgements(stream_name(RUN, Stream.TASKS), "tasks-guess")
        await until(lambda: _answers(swarm))
        ((again, delivery),) = await swarm.fetch(1)
        assert again.id == ticket.id, "the killed server hands the ticket out once more"
        two = await swarm.claim(ticket.id, "two")
        assert two.attempt > one.attempt
        _, second = await chat.ask(chat.request(two.key, [user("second worker")]))
        await asyncio.sleep(2.1)  # the fence of inference remembers a claim for so long
        _, refused = await chat.ask(chat.request(one.key, [user("first worker goes on")]))
        assert refused.error is not None and refused.error.code == "superseded"
        # The first worker is the first to end all the same: its calls count, and only they.
        kept = await store_end(own.bus, RUN, end_of(ticket, one.attempt, {"m": [first.call]}))
        late = await store_end(own.bus, RUN, end_of(ticket, two.attempt, {"m": [second.call]}))
        assert (kept.accepted, late.accepted, late.reason) == (True, False, "superseded")
        assert (await swarm.claim(ticket.id, "three")).reason == "ended", "who gets it now drops it"
        await delivery.ack()
        async with working(Reward(own.bus, RUN, settings).run()):
            await until(at_least(own.bus, RUN, Stream.SAMPLES, 1))
    (sample,) = await records(own.bus, RUN, Stream.SAMPLES)
    assert [call.call for call in sample.calls] == [first.call]
    assert len(await records(own.bus, RUN, Stream.CALLS)) == 2


async def _answers(swarm: Swarm) -> bool:
    return swarm.bus.last_error is None


async def test_p04_a21_questions_lost_with_the_server_are_asked_again_under_their_call_id(own: OwnServer, tasks):
    settings = chat_settings(tasks, group_size=6)
    chat, swarm = SmallSwarm(own.bus), Swarm(own.bus, RUN)
    await make_streams(own.bus, RUN)
    chat.engine.reply = lambda prompt: prompt.rpartition("user\n")[2].partition("<|im_end|>")[0]
    async with swarm.curriculum(settings):
        grants = [await swarm.claim(ticket.id) for ticket, _ in await swarm.fetch(6)]
        gateway = Gateway(await own.connect(), RUN, GatewaySettings())
        gateway._exchange._look_seconds = 0.3

        async def ask(index: int) -> str:
            body = {"model": "m", "messages": [user(f"asker {index}")]}
            return (await gateway.complete(grants[index].key, body))["choices"][0]["message"]["content"]

        askers = [asyncio.create_task(ask(index)) for index in range(6)]
        await until(at_least(own.bus, RUN, Stream.INFER, 6))
        asked = [request.call for request in await records(own.bus, RUN, Stream.INFER)]
        await own.crash()
        await own.bus.purge(stream_name(RUN, Stream.INFER), below_sequence=4)  # half of them went with it
        async with working(chat.service.run()):
            answers = await asyncio.wait_for(asyncio.gather(*askers), 20)
        await gateway.close()
    assert answers == [f"asker {index}" for index in range(6)], "each caller gets its own reply"
    calls = await records(own.bus, RUN, Stream.CALLS)
    assert Counter(call.call for call in calls) == Counter(asked), "one call for each question, under its first id"


async def test_p04_the_stored_call_is_the_reply_of_a_question_that_is_delivered_twice(own: OwnServer, tasks):
    """The server dies between CALLS and the acknowledgement: the next engine would draw other tokens, but must not."""
    chat, swarm = SmallSwarm(own.bus, "first"), Swarm(own.bus, RUN)
    await make_streams(own.bus, RUN)
    async with swarm.curriculum(chat_settings(tasks)):
        ((ticket, _),) = await swarm.fetch(1)
        grant = await swarm.claim(ticket.id)
        request = chat.request(grant.key, [user("x")])
        async with working(chat.service.run()):
            _, one = await chat.ask(request)
        await own.crash()
        chat.engine.reply = "second"
        async with working(chat.new_service().run()):
            _, two = await chat.ask(request)
    assert (one.message["content"], two) == ("first", one)
    assert len(chat.engine.generations) == 1


async def test_p05_a2_of_two_attempts_one_end_wins_even_when_the_server_dies_between_them(own: OwnServer, run, tasks):
    swarm = Swarm(own.bus, run)
    await make_streams(own.bus, run)
    other = await own.connect()
    async with swarm.curriculum(settings_of(tasks, learner={"batch_groups": 8})):
        ends: list[tuple[Episode, Episode]] = []
        for ticket, _ in await swarm.fetch(16):
            one, two = await swarm.claim(ticket.id, "one"), await swarm.claim(ticket.id, "two")
            calls = {"small": ["c"]}
            ends.append((end_of(ticket, one.attempt, calls, 0.0), end_of(ticket, two.attempt, calls, 1.0)))
        patience = lambda: 30.0  # noqa: E731
        trying = [
            asyncio.create_task(store_end_in_time(bus, run, end, patience))
            for pair in ends
            for bus, end in zip((own.bus, other), pair, strict=True)
        ]
        await asyncio.sleep(0.005)
        await own.crash()
        replies = await asyncio.wait_for(asyncio.gather(*trying), 30)
        for (one, two), first, second in zip(ends, replies[::2], replies[1::2], strict=True):
            stored = await last(Episode, own.bus, run, Stream.EPISODES, subject.episode(run, one.ticket.id))
            assert stored is not None
            assert stored[1] == (one if first.accepted else two)
            assert first.accepted != second.accepted
            loser, reply = (two, second) if first.accepted else (one, first)
            assert reply.reason == "superseded"
            assert (await store_end(own.bus, run, stored[1])).accepted, "the winner may ask again"
            assert not (await store_end(own.bus, run, loser)).accepted
    assert await count(own.bus, run, Stream.EPISODES) == 16


async def test_p06_failures_are_offered_again_until_they_are_dead_and_are_never_a_reward_of_zero(
    nats_bus: NatsBus, run, tasks
):
    settings = settings_of(tasks, pool={"group_size": 1, "max_offers": 3}, learner={"batch_groups": 1})
    swarm = Swarm(nats_bus, run)
    await make_streams(nats_bus, run)
    statuses = (EndStatus.FAILED, EndStatus.ABORTED, EndStatus.FAILED)
    stages = (Reward(nats_bus, run, settings).run(), merging(nats_bus, run))
    async with swarm.curriculum(settings), working(*stages, FoldLearner(nats_bus, run, "small", settings).run()):
        for offer, status in enumerate(statuses):
            ((ticket, delivery),) = await swarm.fetch(1)
            assert ticket.id == f"guess-0.0.{offer}"
            grant = await swarm.claim(ticket.id)
            end = end_of(ticket, grant.attempt, {"small": ["c"]}, reward=0.0)
            fault = Fault(kind="ToolError", message="gone")
            await store_end(nats_bus, run, end.model_copy(update={"status": status, "fault": fault}))
            await delivery.ack()
        drop = await until(lambda: _first(nats_bus, run, GroupDrop))
        scores = await records(nats_bus, run, Stream.SCORES)
    assert [score.outcome for score in scores] == [Outcome.INVALID, Outcome.ABORTED, Outcome.INVALID]
    assert [score.reward for score in scores] == [None] * 3
    (tombstone,) = await records(nats_bus, run, Stream.SAMPLES)
    assert (tombstone.reason, tombstone.detail) == (TombstoneReason.DEAD, "gone")
    assert (drop.group, drop.reason) == ("guess-0", DropReason.TOO_FEW)


async def _first(bus: NatsBus, run: RunId, kind: type):
    return next((one for one in await records(bus, run, Stream.LEDGER) if isinstance(one, kind)), None)


async def test_p06_an_evaluation_settles_at_its_score_and_reaches_no_learner(nats_bus: NatsBus, run, tasks):
    evaluation = {"pool": "guess", "every_steps": 1, "num_tasks": 2, "num_repeats": 1}
    settings = settings_of(tasks, run={"num_steps": 1}, eval=evaluation, learner={"batch_groups": 1})
    swarm = Swarm(nats_bus, run)
    await make_streams(nats_bus, run)
    async with swarm.curriculum(settings), working(Reward(nats_bus, run, settings).run(), merging(nats_bus, run)):
        await swarm.start_learner()
        for ticket, delivery in await swarm.fetch(2):
            assert ticket.kind is EpisodeKind.EVAL
            grant = await swarm.claim(ticket.id)
            await store_end(nats_bus, run, end_of(ticket, grant.attempt, {}, reward=0.5))
            await delivery.ack()
        training = [ticket for ticket, _ in await swarm.fetch(2)]
        assert {ticket.kind for ticket in training} == {EpisodeKind.TRAIN}, "the barrier is open"
        await until(at_least(nats_bus, run, Stream.SCORES, 2))
        await asyncio.sleep(0.2)
    assert await count(nats_bus, run, Stream.SAMPLES) == 0


async def test_p07_a23_one_score_settles_every_model_through_a_crash_between_them(own: OwnServer, tasks):
    """Model `n` is never called; the merger dies after the record of `m`."""
    bus = own.bus
    settings = chat_settings(tasks, models=("m", "n"), group_size=2)
    chat, swarm = SmallSwarm(bus, models=("m", "n")), Swarm(bus, RUN)
    await make_streams(bus, RUN)
    learners = [FoldLearner(bus, RUN, model, settings).run() for model in ("m", "n")]
    async with swarm.curriculum(settings), working(chat.service.run(), Reward(bus, RUN, settings).run()):
        for ticket, delivery in await swarm.fetch(2):
            grant = await swarm.claim(ticket.id)
            _, reply = await chat.ask(chat.request(grant.key, [user("x")]))
            await store_end(bus, RUN, end_of(ticket, grant.attempt, {"m": [reply.call]}))
            await delivery.ack()
        honest, stored = bus.publish, []

        async def dying(to: str, payload: bytes, **options):
            if ".sample." in to:
                stored.append(to)
                if len(stored) > 1:
                    raise RuntimeError("killed between two models")
            return await honest(to, payload, **options)

        bus.publish = dying
        async with working(merging(bus, RUN)):
            await until(lambda: _is(len(stored) > 1))
        bus.publish = honest
        await own.crash()
        await own.forget_acknowledgements(stream_name(RUN, Stream.SCORES), "merger")
        async with working(merging(bus, RUN), *learners):
            report = await audited(bus, RUN, 2)
    found = await records(bus, RUN, Stream.SAMPLES)
    assert (
        sorted((one.model, one.member, type(one)) for one in found)
        == sorted(
            [("m", 0, Sample), ("m", 1, Sample), ("n", 0, Tombstone), ("n", 1, Tombstone)], key=lambda one: one[:2]
        )
        or len(found) == 4
    )
    assert {one.reason for one in found if isinstance(one, Tombstone)} == {TombstoneReason.UNUSED}
    drop = await _first(bus, RUN, GroupDrop)
    assert (drop.model, drop.reason) == ("n", DropReason.UNUSED)
    assert (report.lost, report.duplicated, report.trained) == (0, 0, 2)

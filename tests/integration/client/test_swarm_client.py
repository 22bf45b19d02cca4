"""Clients with agents of their own, against the real curriculum, inference and reward."""

import asyncio
from pathlib import Path

import pytest
from chat_models import RUN
from live_swarm import LiveSwarm
from openai import AsyncOpenAI
from small_swarm import SECRET

from agentjet.bus.handler import PostponeError
from agentjet.bus.memory import MemoryBus
from agentjet.bus.nats import NatsBus
from agentjet.bus.record import last, put, stream_specs
from agentjet.bus.server import EmbeddedServer
from agentjet.client import SwarmClient, SyncEpisode, SyncSwarmClient
from agentjet.client.swarm import find_run
from agentjet.client.sync import LoopThread
from agentjet.config.settings import SwarmSettings
from agentjet.curriculum.board import MAX_CLAIMS
from agentjet.curriculum.curriculum import Curriculum
from agentjet.errors import BusError, BusTimeoutError, BusUnavailableError, CallRewardError, ConfigError, UsageError
from agentjet.gateway import ApiError
from agentjet.rollout.claiming import claim
from agentjet.schemas import subject
from agentjet.schemas.episode import EndStatus, Episode
from agentjet.schemas.ids import RunId, TicketId
from agentjet.schemas.ledger import CurriculumStart, RunFinish
from agentjet.schemas.score import Outcome
from agentjet.schemas.subject import Stream, stream_name


def settings(**pools: dict[str, object]) -> SwarmSettings:
    return SwarmSettings.model_validate({"models": {"m": {"path": "tiny"}}, "pools": pools})


@pytest.fixture
async def swarm(memory_bus: MemoryBus):
    pools = settings(own={"max_offers": 2, "sampling": {"max_tokens": 5}})
    async with LiveSwarm(memory_bus, pools, "low").running(plays=False) as live:
        yield live


async def stored_end(bus: MemoryBus, ticket: TicketId) -> Episode:
    found = await last(Episode, bus, RUN, Stream.EPISODES, subject.episode(RUN, ticket))
    assert found is not None
    return found[1]


async def test_a_group_of_ones_own_is_played_over_the_bus_and_over_http(memory_bus: MemoryBus, swarm: LiveSwarm):
    async with SwarmClient(bus=memory_bus) as client:
        assert client.run == RUN
        by_bus, by_http = await client.open({"q": 1}, pool="own", group="g1", n=2)
        async with by_bus, by_http:
            assert by_bus.task == {"q": 1}
            messages = [{"role": "user", "content": "hi"}]
            reply = await by_bus.call(messages)
            assert (reply["role"], reply["content"]) == ("assistant", "low")
            async with AsyncOpenAI(base_url=by_http.base_url, api_key=by_http.api_key) as openai:
                await openai.chat.completions.create(model=by_http.model, messages=messages)  # type: ignore[arg-type]
            by_bus.log({"role": "user", "content": "hi"})
            assert (await by_bus.end(1.0, metrics={"turns": 1})).accepted
            assert (await by_http.end(0.0)).accepted
    scores = await swarm.scores(2)
    assert sorted((score.reward, len(score.calls["m"])) for score in scores) == [(0.0, 1), (1.0, 1)]
    episode = await stored_end(memory_bus, by_bus.ticket.id)
    assert (episode.metrics, len(episode.transcript)) == ({"turns": 1.0}, 1)


async def test_a2_ending_twice_gives_the_same_reply_and_one_effect(
    memory_bus: MemoryBus, swarm: LiveSwarm, monkeypatch: pytest.MonkeyPatch
):
    async with SwarmClient(bus=memory_bus) as client:
        first, _ = await client.open({}, pool="own", group="g", n=2)
        await first.call([{"role": "user", "content": "hi"}])
        reply = await first.end(1.0)
        refusing(memory_bus, monkeypatch, 10**6)  # not even asked
        assert await first.end(0.0) == await first.abort("changed my mind") == reply
        assert (await stored_end(memory_bus, first.ticket.id)).reward == 1.0


async def test_asking_again_for_a_group_gives_its_tickets_and_the_newest_attempt_counts(
    memory_bus: MemoryBus, swarm: LiveSwarm
):
    async with SwarmClient(bus=memory_bus) as lost, SwarmClient(bus=memory_bus) as client:
        old = await lost.open({}, pool="own", group="g", n=2)
        new = await client.open({}, pool="own", group="g", n=2)
        assert [one.ticket.id for one in old] == [one.ticket.id for one in new]
        assert all(before.attempt < after.attempt for before, after in zip(old, new, strict=True))
        with pytest.raises(ApiError) as refused:
            await old[0].call([{"role": "user", "content": "hi"}])
        assert refused.value.status in (401, 409)
        await new[0].call([{"role": "user", "content": "hi"}])
        await new[0].end(1.0)
        late = await old[0].end(0.5)
        assert (late.accepted, late.reason) == (False, "superseded")


@pytest.fixture
async def nats_swarm(nats_bus: NatsBus):
    async with LiveSwarm(nats_bus, settings(own={"sampling": {"max_tokens": 5}}), "low").running(plays=False) as live:
        yield live


async def test_a_client_that_opens_its_group_again_gets_the_very_same_episodes(
    nats_bus: NatsBus, nats_swarm: LiveSwarm
):
    """However often: a lost answer, or a retry decorator around `open`, must cost no claim."""
    async with SwarmClient(bus=nats_bus) as client:
        opened = await asyncio.gather(*(client.open({"q": 1}, pool="own", group="g", n=2) for _ in range(2)))
        opened += [await client.open({"q": 1}, pool="own", group="g", n=2) for _ in range(MAX_CLAIMS)]
        assert all(again == opened[0] for again in opened)
        first, second = opened[0]
        await first.call([{"role": "user", "content": "hi"}])
        assert (await first.end(1.0)).accepted
        assert await client.open({"q": 1}, pool="own", group="g", n=2) == [second], "what has ended is left out"
        await second.call([{"role": "user", "content": "hi"}])
        assert (await second.end(0.0)).accepted
        assert await client.open({"q": 1}, pool="own", group="g", n=2) == []
    assert sorted(score.reward for score in await nats_swarm.scores(2)) == [0.0, 1.0]


async def test_a_group_that_too_many_clients_have_opened_is_refused_with_what_to_do(
    nats_bus: NatsBus, nats_swarm: LiveSwarm
):
    for _ in range(MAX_CLAIMS):
        async with SwarmClient(bus=nats_bus) as client:
            assert len(await client.open({}, pool="own", group="g", n=2)) == 2
    async with SwarmClient(bus=nats_bus) as client:
        with pytest.raises(
            UsageError, match=r"group 'g' was opened so often .* own-0\.0\.0 .* under another group name"
        ):
            await client.open({}, pool="own", group="g", n=2)


async def test_opening_waits_for_a_claim_that_can_not_be_decided_yet_and_then_says_so(
    memory_bus: MemoryBus, swarm: LiveSwarm, monkeypatch: pytest.MonkeyPatch
):
    refusals: list[Exception] = [BusTimeoutError("the server starts again"), PostponeError("busy")]

    async def claim_when_free(*arguments: object):
        if refusals:
            raise refusals.pop()
        return await claim(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr("agentjet.client.swarm.claim", claim_when_free)
    monkeypatch.setattr("agentjet.client.swarm._FULL_SECONDS", 0.01)
    async with SwarmClient(bus=memory_bus) as client:
        assert len(await client.open({}, pool="own", group="g", n=2)) == 2
        refusals += [PostponeError("the claim service says 'busy'")] * 10**4
        monkeypatch.setattr("agentjet.client.swarm._OFFER_SECONDS", 0.1)
        async with SwarmClient(bus=memory_bus) as other:
            with pytest.raises(BusError, match=r"ticket own-0\.0\.0 of group 'g' can not be claimed: .*'busy'"):
                await other.open({}, pool="own", group="g", n=2)


async def test_opening_waits_for_a_curriculum_that_is_started_again_and_then_says_that_there_is_none(
    nats_bus: NatsBus, nats_swarm: LiveSwarm, monkeypatch: pytest.MonkeyPatch
):
    curriculum = nats_swarm.tasks[0]
    curriculum.cancel()
    await asyncio.gather(curriculum, return_exceptions=True)
    monkeypatch.setattr("agentjet.client.swarm._FULL_SECONDS", 0.05)
    async with SwarmClient(bus=nats_bus) as client:
        opening = asyncio.ensure_future(client.open({}, pool="own", group="g", n=2))
        await asyncio.sleep(0.2)
        assert not opening.done()
        nats_swarm.tasks[0] = asyncio.ensure_future(Curriculum(nats_bus, RUN, nats_swarm.settings, SECRET).run())
        assert len(await asyncio.wait_for(opening, 20)) == 2
        monkeypatch.setattr("agentjet.client.swarm._OFFER_SECONDS", 0.2)
        with pytest.raises(BusError, match=r"nobody takes tasks for pool 'absent' of run .* in its configuration\?"):
            await client.open({}, pool="absent", group="g", n=2)


async def test_leaving_an_episode_by_an_error_aborts_it(memory_bus: MemoryBus, swarm: LiveSwarm):
    async with SwarmClient(bus=memory_bus) as client:
        broken, left = await client.open({}, pool="own", group="g", n=2)
        with pytest.raises(KeyError):
            async with broken:
                raise KeyError("tool")
        async with left:
            pass
    for one, words in ((broken, "KeyError"), (left, "without end()")):
        episode = await stored_end(memory_bus, one.ticket.id)
        assert episode.fault is not None
        assert episode.status is EndStatus.ABORTED
        assert words in episode.fault.message
    assert {score.outcome for score in await swarm.scores(2)} == {Outcome.ABORTED}


def refusing(bus: MemoryBus, monkeypatch: pytest.MonkeyPatch, failures: int, *, is_stored: bool = False) -> None:
    """The bus does not take that many ends; `is_stored`: it does, but its answer is lost."""
    publish = bus.publish

    async def unsure(to: str, *arguments: object, **options: object) -> int:
        nonlocal failures
        if ".episode." not in to or not failures:
            return await publish(to, *arguments, **options)  # type: ignore[arg-type]
        failures -= 1
        if is_stored:
            await publish(to, *arguments, **options)  # type: ignore[arg-type]
        raise BusTimeoutError("the server starts again")

    monkeypatch.setattr(bus, "publish", unsure)
    monkeypatch.setattr("agentjet.rollout.ending._STORE_AGAIN_SECONDS", 0.01)


@pytest.mark.parametrize("is_stored", [False, True])
async def test_an_end_that_the_bus_does_not_take_is_sent_again_and_is_no_abort(
    memory_bus: MemoryBus, swarm: LiveSwarm, monkeypatch: pytest.MonkeyPatch, is_stored: bool
):
    async with SwarmClient(bus=memory_bus) as client:
        first, late = await client.open({}, pool="own", group="g", n=2)
        refusing(memory_bus, monkeypatch, 3, is_stored=is_stored)
        async with first:
            await first.call([{"role": "user", "content": "hi"}])
            assert (await first.end(1.0)).accepted
        refusing(memory_bus, monkeypatch, 1)
        object.__setattr__(late._claimed, "since", -1e9)  # no time is left to try again
        with pytest.raises(BusTimeoutError):
            async with late:
                await late.call([{"role": "user", "content": "hi"}])
                await late.end(0.5)
    assert (await stored_end(memory_bus, first.ticket.id)).reward == 1.0
    episode = await stored_end(memory_bus, late.ticket.id)
    assert (episode.status, episode.reward) == (EndStatus.COMPLETED, 0.5)


async def test_a_result_that_can_not_be_written_leaves_room_for_another_end(memory_bus: MemoryBus, swarm: LiveSwarm):
    async with SwarmClient(bus=memory_bus) as client:
        first, _ = await client.open({}, pool="own", group="g", n=2)
        await first.call([{"role": "user", "content": "hi"}])
        with pytest.raises(TypeError):
            await first.end(1.0, result=object())
        assert (await first.end(1.0, result="text")).accepted


async def test_rewards_of_single_calls_are_given_by_call_or_in_order_and_wrong_ones_leave_the_episode_open(
    memory_bus: MemoryBus, swarm: LiveSwarm
):
    async with SwarmClient(bus=memory_bus) as client:
        first, second = await client.open({}, pool="own", group="g", n=2)
        for episode in (first, second):
            for _ in range(2):
                await episode.call([{"role": "user", "content": "hi"}])
        with pytest.raises(CallRewardError, match="1 numbers for 2 calls"):
            await first.end(1.0, call_rewards=[1.0])
        one, two = first.calls["m"]
        assert (await first.end(1.0, call_rewards={two: 1, one: 0})).accepted
        assert (await second.end(0.0, call_rewards=[0.5, -0.5])).accepted
        assert (await second.end(0.0, call_rewards=[0.5])).accepted, "it is over"
    ends = [await stored_end(memory_bus, episode.ticket.id) for episode in (first, second)]
    assert ends[0].call_rewards == {one: 0.0, two: 1.0}
    assert [ends[1].call_rewards[call] for call in ends[1].calls["m"]] == [0.5, -0.5]
    scores = {score.ticket.id: score.call_rewards for score in await swarm.scores(2)}
    assert scores == {end.ticket.id: end.call_rewards for end in ends}


async def test_who_is_cancelled_leaves_after_one_try(
    memory_bus: MemoryBus, swarm: LiveSwarm, monkeypatch: pytest.MonkeyPatch
):
    async with SwarmClient(bus=memory_bus) as client:
        first, _ = await client.open({}, pool="own", group="g", n=2)
        refusing(memory_bus, monkeypatch, 10**6)

        async def play() -> None:
            async with first:
                await asyncio.sleep(60)

        task = asyncio.create_task(play())
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 5)


async def test_t13_an_end_without_a_call_is_a_failure(memory_bus: MemoryBus, swarm: LiveSwarm):
    async with SwarmClient(bus=memory_bus) as client:
        first, _ = await client.open({}, pool="own", group="g", n=2)
        await first.end(1.0)
    (score,) = await swarm.scores(1)
    assert score.fault is not None
    assert (score.outcome, score.reward, score.fault.kind) == (Outcome.INVALID, None, "no_model_calls")


async def test_tickets_of_a_pool_are_claimed_one_after_the_other(memory_bus: MemoryBus, tmp_path: Path):
    _write(tmp_path / "tasks.jsonl", '{"question": "hi?"}\n')
    pools = settings(given={"tasks": str(tmp_path / "tasks.jsonl"), "group_size": 2})
    live = LiveSwarm(memory_bus, pools, "low")
    seen: list[str] = []
    async with live.running(plays=False) as swarm, SwarmClient(bus=memory_bus) as client:
        async for episode in client.claim("given"):
            async with episode:
                reply = await episode.call([{"role": "user", "content": episode.task["question"]}])
                await episode.end(float(reply["content"] == "low"))
            seen.append(episode.ticket.id)
            if len(seen) == 3:
                break
        assert [score.reward for score in await swarm.scores(3)] == [1.0] * 3
    assert len(set(seen)) == 3


async def test_claiming_ends_with_the_run_and_goes_on_when_the_run_does(memory_bus: MemoryBus):
    for spec in stream_specs(RUN, max_bytes=1 << 30):
        await memory_bus.ensure_stream(spec)
    chain = subject.ledger(RUN, "curriculum")
    start, finish = CurriculumStart(run=RUN, incarnation=1, config_digest="c"), RunFinish(run=RUN, reason="done")
    await put(memory_bus, RUN, Stream.LEDGER, chain, start)
    async with SwarmClient(bus=memory_bus) as client, asyncio.timeout(10):
        claiming = asyncio.ensure_future(anext(client.claim("given"), None))
        await asyncio.sleep(0.05)
        await put(memory_bus, RUN, Stream.LEDGER, chain, finish)
        assert await claiming is None
        await put(memory_bus, RUN, Stream.LEDGER, chain, start.model_copy(update={"incarnation": 2}))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await anext(client.claim("given"))


async def test_claiming_from_a_run_that_is_gone_ends_with_a_sentence(
    memory_bus: MemoryBus, monkeypatch: pytest.MonkeyPatch
):
    for spec in stream_specs(RUN, max_bytes=1 << 30):
        await memory_bus.ensure_stream(spec)
    await put(memory_bus, RUN, Stream.LEDGER, subject.ledger(RUN, "curriculum"), RunFinish(run=RUN, reason="done"))

    async def away(*_: object) -> None:
        raise BusTimeoutError("not connected to 127.0.0.1:4222")

    async with SwarmClient(bus=memory_bus) as client, asyncio.timeout(20):
        monkeypatch.setattr(memory_bus, "last", away)
        monkeypatch.setattr("agentjet.client.swarm._FETCH_SECONDS", 0.01)
        monkeypatch.setattr("agentjet.client.swarm.GONE_SECONDS", 0.1)
        with pytest.raises(BusUnavailableError, match=r"could not be reached.*not connected to 127.*agentjet up"):
            await anext(client.claim("given"))


def test_the_sync_clients_loop_over_episodes_ends_with_the_run(nats_server: EmbeddedServer):
    run = RunId("done-aaaaaa")

    async def finish() -> None:
        bus = await NatsBus.connect(nats_server.url, name="test")
        for spec in stream_specs(run, max_bytes=1 << 20):
            await bus.ensure_stream(spec)
        await put(bus, run, Stream.LEDGER, subject.ledger(run, "curriculum"), RunFinish(run=run, reason="done"))
        await bus.close()

    asyncio.run(finish())
    with SyncSwarmClient(nats_server.url, run=run) as client:
        assert list(client.claim("given")) == []


async def test_a_ticket_of_a_newer_agentjet_is_left_to_others(memory_bus: MemoryBus, tmp_path: Path):
    _write(tmp_path / "tasks.jsonl", '{"question": "hi?"}\n')
    pools = settings(given={"tasks": str(tmp_path / "tasks.jsonl"), "group_size": 2})
    tasks = stream_name(RUN, Stream.TASKS)
    for spec in stream_specs(RUN, max_bytes=1 << 30):
        await memory_bus.ensure_stream(spec)
    strange = [({"AJ-Schema": "ticket/99.0"}, b""), ({}, b"no record")]
    for index, (headers, body) in enumerate(strange):
        await memory_bus.publish(f"aj.{RUN}.task.given.x.{index}.0", body, stream=tasks, headers=headers)
    live = LiveSwarm(memory_bus, pools, "low")
    async with live.running(plays=False), SwarmClient(bus=memory_bus) as client, asyncio.timeout(10):
        async for episode in client.claim("given"):
            assert episode.task == {"question": "hi?"}
            break


def _write(path: Path, text: str) -> None:
    path.write_text(text)


async def test_refusals_are_sentences(memory_bus: MemoryBus, swarm: LiveSwarm):
    async with SwarmClient(bus=memory_bus) as client:
        with pytest.raises(UsageError, match="a group of 1 trains nobody"):
            await client.open({}, pool="own", group="g", n=1)
    with pytest.raises(ConfigError, match=f"no run 'other-run'.*{RUN}"):
        async with SwarmClient(bus=memory_bus, run="other-run"):
            pass
    with pytest.raises(UsageError, match="not open"):
        await SwarmClient(bus=memory_bus).open({}, pool="own", group="g", n=2)


async def test_the_newest_run_is_found(memory_bus: MemoryBus):
    with pytest.raises(ConfigError, match="no run on this server"):
        await find_run(memory_bus)
    for run in (RunId("old-aaaaaa"), RunId("new-bbbbbb")):
        for spec in stream_specs(run, max_bytes=1 << 20):
            await memory_bus.ensure_stream(spec)
        ledger = stream_name(run, Stream.LEDGER)
        await memory_bus.publish(subject.ledger(run, "curriculum"), b"", stream=ledger)
        await asyncio.sleep(0.01)
    assert await find_run(memory_bus) == "new-bbbbbb"
    assert await find_run(memory_bus, "old-aaaaaa") == "old-aaaaaa"


async def test_the_sync_client_plays_from_a_thread(memory_bus: MemoryBus, swarm: LiveSwarm):
    """The bus lives in this loop, so the client's episodes are made here and only played from the thread."""
    async with SwarmClient(bus=memory_bus) as client:
        episode, _ = await client.open({"q": 2}, pool="own", group="g", n=2)
        await asyncio.to_thread(_play_from_a_thread, SyncEpisode(episode, _ThisLoop(asyncio.get_running_loop())))
    assert [score.reward for score in await swarm.scores(1)] == [0.5]


def _play_from_a_thread(episode: SyncEpisode) -> None:
    with episode:
        assert episode.call([{"role": "user", "content": "hi"}])["content"] == "low"
        assert episode.task == {"q": 2}
        assert episode.end(0.5).accepted


class _ThisLoop(LoopThread):
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop


def test_the_sync_client_connects_and_says_that_there_is_no_such_run(nats_server: EmbeddedServer):
    with pytest.raises(ConfigError, match="no run 'nothing'"), SyncSwarmClient(nats_server.url, run="nothing"):
        pass

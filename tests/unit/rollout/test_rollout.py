"""Tickets become ends, whatever the agent does."""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from agentjet.bus.memory import MemoryBus
from agentjet.bus.presence import renew
from agentjet.bus.protocol import Delivery, Request
from agentjet.bus.record import put, put_once, read_as, stream_specs
from agentjet.config.settings import ModelSettings, PoolSettings, RolloutSettings, SwarmSettings
from agentjet.errors import BusTimeoutError, BusUnavailableError, ConfigError, WorkflowError
from agentjet.rollout import Rollout
from agentjet.rollout.claiming import claim
from agentjet.rollout.ending import ended, store_end, store_end_in_time
from agentjet.rollout.rollout import _Tap
from agentjet.rollout.stage import Play
from agentjet.schemas import subject
from agentjet.schemas.claim import ClaimGrant, ClaimRequest
from agentjet.schemas.codec import decode_as, encode
from agentjet.schemas.episode import EndStatus, Episode
from agentjet.schemas.ids import GroupId, RunId, TicketId
from agentjet.schemas.presence import Presence
from agentjet.schemas.subject import Stream, stream_name
from agentjet.schemas.task import EpisodeKind, Ticket
from agentjet.workers.pool import Failure

RUN = RunId("test-aaaaaa")
AGENT = """
import asyncio, os
async def run(task, policy):
    policy.log({"role": "user", "content": policy.ticket})
    match task["do"]:
        case "exit": os._exit(3)
        case "loop":
            while True: pass
        case "raise": raise RuntimeError("tool server is gone")
        case "abort": policy.abort("not today")
        case "wait": await asyncio.sleep(0.3)
        case "numbers":
            policy.log({1: {2: "two"}})
            return {"reward": 1.0, "result": {"board": [{3: {4: "four"}}]}}
        case "calls": return {"reward": 1.0, "call_rewards": [0.25]}
        case "long": await asyncio.sleep(60)
    return {"reward": 0.5, "metrics": {"turns": 3}, "result": {"said": policy.models}}
"""


@dataclass
class Session:
    calls: dict[str, list[str]] = field(default_factory=dict)
    stop_reason: str = ""


@dataclass
class FakeGateway:
    """Stands outside: every key has made one call, but for those of `silent` tickets."""

    base_url: str = "http://127.0.0.1:9/v1"
    silent: set[str] = field(default_factory=set)
    forgotten: list[str] = field(default_factory=list)
    stop_reason: str = ""

    def session(self, key: str) -> Session:
        return Session({} if key.split("/")[0] in self.silent else {"m": ["call-1"]}, self.stop_reason)

    def forget(self, key: str) -> None:
        self.forgotten.append(key)


@dataclass
class Claims:
    """The claim service, as far as a rollout sees it."""

    reasons: dict[str, list[str]] = field(default_factory=dict)
    attempt: int = 0

    async def __call__(self, request: Request):
        question = decode_as(ClaimRequest, request.headers, request.payload)
        reasons = self.reasons.get(question.ticket)
        if reasons:
            return _answer(ClaimGrant(ticket=question.ticket, granted=False, reason=reasons.pop(0)))
        self.attempt += 1
        return _answer(
            ClaimGrant(
                ticket=question.ticket, granted=True, attempt=self.attempt, key=f"{question.ticket}/{self.attempt}"
            )
        )


def _answer(grant: ClaimGrant):
    headers, body = encode(grant)
    return body, headers


def ticket(index: int, do: str = "play", **fields: object) -> Ticket:
    values = {"run": RUN, "pool": "p", "group": GroupId(f"p-{index}"), "member": 0, "group_size": 1, "models": ("m",)}
    return Ticket(**values | {"task": {"do": do}, "seed": 1, "deadline_seconds": 60.0} | fields)  # type: ignore[arg-type]


@pytest.fixture
def claims() -> Claims:
    return Claims()


@pytest.fixture
async def bus(memory_bus: MemoryBus, claims: Claims) -> AsyncIterator[MemoryBus]:
    for spec in stream_specs(RUN, max_bytes=1 << 30):
        await memory_bus.ensure_stream(spec)
    async with memory_bus.serve(subject.claim_service(RUN), claims, queue="claim"):
        yield memory_bus


def settings(workflow: str, max_running: int = 8) -> SwarmSettings:
    return SwarmSettings(
        models={"m": ModelSettings(path="tiny")},
        pools={
            "p": PoolSettings(workflow=workflow),
            "q": PoolSettings(workflow=workflow),
            "of-clients": PoolSettings(),
        },
        rollout=RolloutSettings(max_running=max_running),
    )


@contextlib.asynccontextmanager
async def playing(bus: MemoryBus, folder: Path, gateway: FakeGateway, max_running: int = 8) -> AsyncIterator[Rollout]:
    (folder / "agent.py").write_text(AGENT)
    rollout = Rollout(bus, RUN, settings(f"{folder}/agent.py:run", max_running), gateway)
    task = asyncio.create_task(rollout.run())
    try:
        yield rollout
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def offer(bus: MemoryBus, *tickets: Ticket) -> None:
    for one in tickets:
        await put(bus, RUN, Stream.TASKS, subject.task(RUN, one.pool, one.id), one, expected=0)


async def end_of(bus: MemoryBus, name: TicketId) -> Episode:
    async with asyncio.timeout(10):
        async for message in bus.tail(stream_name(RUN, Stream.EPISODES), subject.episode(RUN, name)):
            return await read_as(Episode, bus, RUN, Stream.EPISODES, message)
    raise AssertionError


async def until_no_tasks(bus: MemoryBus) -> None:
    async with asyncio.timeout(10):
        while (await bus.stream_info(stream_name(RUN, Stream.TASKS))).num_messages:
            await asyncio.sleep(0.02)


async def test_a_ticket_is_played_and_its_end_says_all(bus: MemoryBus, tmp_path: Path):
    gateway = FakeGateway(stop_reason="context")
    async with playing(bus, tmp_path, gateway) as rollout:
        await offer(bus, ticket(0))
        episode = await end_of(bus, ticket(0).id)
        await until_no_tasks(bus)
        assert rollout.metrics()["num_played"] == 1
    assert (episode.status, episode.reward, episode.metrics) == (EndStatus.COMPLETED, 0.5, {"turns": 3.0})
    assert (episode.result, episode.calls) == ({"said": ["m"]}, {"m": ("call-1",)})
    assert episode.transcript == ({"role": "user", "content": "p-0.0.0"},)
    assert (episode.attempt, episode.stop_reason, len(episode.agent_digest)) == (1, "context", 64)
    assert episode.ticket.task == {"do": "play"}
    assert gateway.forgotten == ["p-0.0.0/1"]


@pytest.mark.parametrize(
    ("do", "status", "kind"),
    [
        ("exit", EndStatus.FAILED, "WorkerDied"),
        ("raise", EndStatus.FAILED, "RuntimeError"),
        ("loop", EndStatus.FAILED, "DeadlineExceeded"),
        ("abort", EndStatus.ABORTED, "AbortError"),
    ],
)
async def test_an_agents_fault_is_its_episodes_fault(
    bus: MemoryBus, tmp_path: Path, do: str, status: EndStatus, kind: str
):
    async with playing(bus, tmp_path, FakeGateway()):
        await offer(bus, ticket(0, do, deadline_seconds=1.0), ticket(1))
        bad, good = await end_of(bus, ticket(0).id), await end_of(bus, ticket(1).id)
    assert bad.fault is not None
    assert (bad.status, bad.fault.kind, bad.reward) == (status, kind, None)
    assert len(bad.transcript) == 1
    assert good.status is EndStatus.COMPLETED


async def test_keys_that_are_no_text_become_text_and_rewards_of_calls_come_along(bus: MemoryBus, tmp_path: Path):
    async with playing(bus, tmp_path, FakeGateway()) as rollout:
        await offer(bus, ticket(0, "numbers"), ticket(1, "calls"))
        episode, rewarded = await end_of(bus, ticket(0).id), await end_of(bus, ticket(1).id)
        await until_no_tasks(bus)
        assert rollout.metrics()["num_played"] == 2
    assert list(rewarded.call_rewards.values()) == [0.25]
    assert episode.transcript[1] == {"1": {"2": "two"}}
    assert episode.result == {"board": [{"3": {"4": "four"}}]}


async def test_t13_an_episode_without_a_model_call_fails_by_name(bus: MemoryBus, tmp_path: Path):
    async with playing(bus, tmp_path, FakeGateway(silent={"p-0.0.0", "p-1.0.0"})):
        await offer(bus, ticket(0), ticket(1, kind=EpisodeKind.EVAL))
        trained, evaluated = await end_of(bus, ticket(0).id), await end_of(bus, ticket(1).id)
    assert trained.status is EndStatus.FAILED
    assert trained.fault is not None
    assert trained.fault.kind == "no_model_calls"
    assert "0 model calls captured" in trained.fault.message
    assert evaluated.status is EndStatus.COMPLETED


async def test_n2_an_episode_whose_first_prompt_is_too_long_says_so_whatever_its_agent_did(
    bus: MemoryBus, tmp_path: Path
):
    gateway = FakeGateway(silent={"p-0.0.0"}, stop_reason="context")
    async with playing(bus, tmp_path, gateway):
        await offer(bus, ticket(0, "raise"), ticket(1))
        first, other = await end_of(bus, ticket(0).id), await end_of(bus, ticket(1).id)
    assert (first.status, first.fault.kind if first.fault else "") == (EndStatus.FAILED, "prompt_too_long")
    assert other.status is EndStatus.COMPLETED, "who was answered before keeps its reward"


async def test_ended_and_unknown_tickets_are_dropped_and_busy_ones_come_again(
    bus: MemoryBus, tmp_path: Path, claims: Claims, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("agentjet.rollout.claiming.BUSY_SECONDS", 0.05)
    claims.reasons = {"p-0.0.0": ["ended"], "p-1.0.0": ["unknown"], "p-2.0.0": ["busy", "busy"]}
    async with playing(bus, tmp_path, FakeGateway()) as rollout:
        await offer(bus, ticket(0), ticket(1), ticket(2))
        assert (await end_of(bus, ticket(2).id)).status is EndStatus.COMPLETED
        await until_no_tasks(bus)
        assert rollout.metrics()["num_dropped"] == 2
    assert (await bus.stream_info(stream_name(RUN, Stream.EPISODES))).num_messages == 1


async def test_the_end_of_another_attempt_stands(bus: MemoryBus, tmp_path: Path):
    other = ended(ticket(0), 99, Session({"m": ["x"]}), Play(1.0, {}, None, (), None, "", 1.0), worker="w")
    await put_once(bus, RUN, Stream.EPISODES, subject.episode(RUN, ticket(0).id), other)
    async with playing(bus, tmp_path, FakeGateway()) as rollout:
        await offer(bus, ticket(0))
        await until_no_tasks(bus)
        assert rollout.metrics()["num_superseded"] == 1
    assert (await end_of(bus, ticket(0).id)).attempt == 99


async def test_a2_ending_again_has_one_effect_and_the_same_reply(bus: MemoryBus):
    episode = ended(ticket(0), 5, Session({"m": ["x"]}), Play(1.0, {}, None, (), None, "", 1.0), worker="w")
    first, again = (
        await store_end(bus, RUN, episode),
        await store_end(bus, RUN, episode.model_copy(update={"reward": 2})),
    )
    assert first == again
    assert (await end_of(bus, ticket(0).id)).reward == 1.0
    late = await store_end(bus, RUN, episode.model_copy(update={"attempt": 6}))
    assert (late.accepted, late.reason) == (False, "superseded")


def test_rewards_of_single_calls_go_by_call_and_an_episode_whose_do_not_fit_has_failed():
    def end(given: object, failure: Failure | None = None) -> Episode:
        play = Play(1.0, {}, None, (), failure, "", 1.0, given)  # type: ignore[arg-type]
        return ended(ticket(0), 5, Session({"m": ["x", "y"]}), play, worker="w")

    good, bad, late = end([1.0, 0.0]), end([1.0]), end([1.0], Failure("DeadlineExceeded", "too late"))
    assert (good.status, good.call_rewards) == (EndStatus.COMPLETED, {"x": 1.0, "y": 0.0})
    assert (bad.status, bad.call_rewards) == (EndStatus.FAILED, {})
    assert bad.fault is not None
    assert (bad.fault.kind, "1 numbers for 2 calls" in bad.fault.message) == ("CallRewardError", True)
    assert late.fault is not None
    assert late.fault.kind == "DeadlineExceeded"


async def test_an_end_after_the_deadline_s_is_told_that_its_ticket_is_dead(bus: MemoryBus):
    episode = ended(ticket(0), 5, Session({"m": ["x"]}), Play(1.0, {}, None, (), None, "", 1.0), worker="w")
    await store_end(bus, RUN, episode.model_copy(update={"attempt": 0, "status": EndStatus.DEAD}))
    late = await store_end(bus, RUN, episode)
    assert (late.accepted, late.reason) == (False, "dead")


async def test_an_end_is_not_sent_again_over_a_bus_that_is_gone_for_good(
    bus: MemoryBus, monkeypatch: pytest.MonkeyPatch
):
    async def gone(*_: object, **__: object) -> int:
        raise BusUnavailableError("closed; restart this process")

    monkeypatch.setattr(bus, "publish", gone)
    episode = ended(ticket(0), 5, Session({"m": ["x"]}), Play(1.0, {}, None, (), None, "", 1.0), worker="w")
    with pytest.raises(BusUnavailableError, match="closed"):
        await asyncio.wait_for(store_end_in_time(bus, RUN, episode, lambda: 60.0), 5)


async def test_an_end_that_the_bus_does_not_take_is_stored_later_and_not_played_again(
    bus: MemoryBus, tmp_path: Path, claims: Claims, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("agentjet.rollout.ending._STORE_AGAIN_SECONDS", 0.01)
    publish, failures = bus.publish, 3

    async def unsure(to: str, *arguments: object, **options: object) -> int:
        nonlocal failures
        if to == subject.episode(RUN, ticket(0).id) and failures:
            failures -= 1
            raise BusTimeoutError("the server starts again")
        return await publish(to, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(bus, "publish", unsure)
    async with playing(bus, tmp_path, FakeGateway()):
        await offer(bus, ticket(0))
        episode = await end_of(bus, ticket(0).id)
        await until_no_tasks(bus)
    assert (episode.status, episode.attempt, claims.attempt) == (EndStatus.COMPLETED, 1, 1)


async def test_the_deadline_runs_from_before_the_claim_is_asked_for(bus: MemoryBus, claims: Claims):
    async def slow(request: Request):
        await asyncio.sleep(0.2)
        return await claims(request)

    other = RunId("test-bbbbbb")
    async with bus.serve(subject.claim_service(other), slow, queue="claim"):
        claimed = await claim(bus, other, ticket(0, deadline_seconds=1.0), "w")
    assert claimed is not None
    assert claimed.seconds_left <= 0.8


async def test_no_more_run_at_once_than_the_settings_say(bus: MemoryBus, tmp_path: Path):
    async with playing(bus, tmp_path, FakeGateway(), max_running=2) as rollout:
        await offer(bus, *(ticket(index, "wait") for index in range(4)))
        await end_of(bus, ticket(0).id)
        assert rollout.metrics()["num_running"] <= 2
        await until_no_tasks(bus)


async def begun(rollout: Rollout) -> None:
    async with asyncio.timeout(10):
        while not rollout.metrics()["num_running"]:
            await asyncio.sleep(0.01)


async def set_engine(bus: MemoryBus, pid: int) -> None:
    fields = {"run": RUN, "actor": "inference", "name": "x", "state": "busy", "started": 0.0}
    await renew(bus, Presence(**fields, host=socket.gethostname(), pid=pid))  # type: ignore[arg-type]


async def test_a_ticket_of_another_pool_is_left_to_others_while_all_places_are_taken(bus: MemoryBus, tmp_path: Path):
    async with playing(bus, tmp_path, FakeGateway(), max_running=1) as rollout:
        await offer(bus, ticket(0, "long"))
        await begun(rollout)
        await offer(bus, ticket(1, pool="q", group=GroupId("q-1")))
        await asyncio.sleep(0.1)
        other = await bus.consumer(
            stream_name(RUN, Stream.TASKS), "tasks-q", subject=subject.tasks_of(RUN, "q"), ack_wait_seconds=30.0
        )
        assert len(await other.fetch(1, 0.1)) == 1


async def test_draining_finishes_what_runs_and_begins_nothing(
    bus: MemoryBus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("agentjet.rollout.rollout._LOOK_SECONDS", 60.0)  # it hears of the last end, and does not look
    await set_engine(bus, os.getpid())
    async with playing(bus, tmp_path, FakeGateway()) as rollout:
        await offer(bus, ticket(0, "wait"))
        await begun(rollout)
        await asyncio.wait_for(rollout.drain(60), 30)
        assert rollout.metrics()["num_played"] == 1
        await offer(bus, ticket(1))
        await asyncio.sleep(0.2)
        assert (await bus.stream_info(stream_name(RUN, Stream.TASKS))).num_messages == 1
        other = await bus.consumer(
            stream_name(RUN, Stream.TASKS), "tasks-p", subject=subject.tasks_of(RUN, "p"), ack_wait_seconds=30.0
        )
        assert len(await other.fetch(1, 1.0)) == 1  # at once, not after a silence


async def test_a_consumer_of_a_draining_rollout_asks_for_nothing_and_never_returns():
    class Asked:
        async def fetch(self, batch: int, timeout_seconds: float) -> list[Delivery]:
            raise AssertionError("a ticket was asked for")

        async def num_pending(self) -> int:
            return 0

    draining = asyncio.Event()
    draining.set()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(_Tap(Asked(), draining).fetch(1, 0.01), 0.1)


async def test_draining_ends_when_its_time_is_over(bus: MemoryBus, tmp_path: Path):
    await set_engine(bus, os.getpid())
    async with playing(bus, tmp_path, FakeGateway()) as rollout:
        await offer(bus, ticket(0, "long"))
        await begun(rollout)
        await asyncio.wait_for(rollout.drain(0.2), 2)
        assert rollout.metrics()["num_running"] == 1


async def test_draining_waits_for_nothing_once_no_engine_is_left(bus: MemoryBus, tmp_path: Path):
    async with playing(bus, tmp_path, FakeGateway()) as rollout:
        await offer(bus, ticket(0, "long"))
        await begun(rollout)
        await asyncio.wait_for(rollout.drain(60), 2)
        await set_engine(bus, 2**22 + 1)  # no process has this id
        await asyncio.wait_for(rollout.drain(60), 2)


async def test_a6_a_broken_agent_stops_the_rollout_with_a_sentence(bus: MemoryBus, tmp_path: Path):
    (tmp_path / "agent.py").write_text("raise OSError('no licence')")
    with pytest.raises(WorkflowError, match="line 1: OSError: no licence"):
        await Rollout(bus, RUN, settings(f"{tmp_path}/agent.py:run"), FakeGateway()).run()
    with pytest.raises(ConfigError, match="no pool has a workflow"):
        await Rollout(bus, RUN, SwarmSettings(), FakeGateway()).run()

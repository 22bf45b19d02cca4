"""From ends to scores: pure decisions, and the whole stage with real worker processes."""

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentjet.bus.memory import MemoryBus
from agentjet.bus.record import put, read_as, stream_specs
from agentjet.config.settings import ModelSettings, PoolSettings, RewardSettings, SwarmSettings
from agentjet.errors import RewardError, WorkflowError
from agentjet.reward import Reward
from agentjet.reward.function import verdict
from agentjet.reward.scorer import decide, question, scored
from agentjet.schemas import subject
from agentjet.schemas.episode import PROMPT_TOO_LONG, EndStatus, Episode, Fault
from agentjet.schemas.ids import GroupId, RunId
from agentjet.schemas.score import Outcome, Score
from agentjet.schemas.subject import Stream, stream_name
from agentjet.schemas.task import Ticket

RUN = RunId("test-aaaaaa")
FUNCTION = """
import os, time
async def score(task, episode):
    match episode["result"]:
        case "raise": raise ZeroDivisionError("no answers")
        case "block": time.sleep(60)
        case "die": os._exit(7)
        case "nan": return float("nan")
        case "text": return "very good"
        case "calls": return {"reward": 1, "call_rewards": [0.5] * episode["num_calls"]}
        case "many": return {"reward": 1, "call_rewards": [0.5, 0.5]}
        case "parts": return {"reward": 0.5, "components": {"s": 0.1}, "agent_rewards": {"a": 1}, "metrics": {"n": 2}}
    return float(episode["result"] == task["answer"])
"""


def episode(index: int = 0, status: EndStatus = EndStatus.COMPLETED, **fields: object) -> Episode:
    ticket = Ticket(
        run=RUN,
        pool="p",
        group=GroupId(f"p-{index}"),
        member=0,
        group_size=1,
        models=("m",),
        task={"answer": "4"},
        seed=1,
        deadline_seconds=60.0,
    )
    values = {"run": RUN, "ticket": ticket, "attempt": 3, "status": status, "calls": {"m": ("c",)}} | fields
    return Episode(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        (EndStatus.FAILED, Outcome.INVALID),
        (EndStatus.ABORTED, Outcome.ABORTED),
        (EndStatus.DEAD, Outcome.DEAD),
    ],
)
def test_what_did_not_complete_has_no_reward_even_if_it_says_one(status: EndStatus, outcome: Outcome):
    fault = Fault(kind="X", message="y")
    score = decide(episode(status=status, reward=0.0, fault=fault), "client")
    assert score is not None
    assert (score.outcome, score.reward, score.fault) == (outcome, None, fault)


def test_n2_a_first_prompt_that_is_too_long_is_not_offered_again():
    fault = Fault(kind=PROMPT_TOO_LONG, message="no room")
    score = decide(episode(status=EndStatus.FAILED, fault=fault), "client")
    assert score is not None
    assert (score.outcome, score.reward, score.closes_slot) == (Outcome.DEAD, None, True)


def test_a_clients_reward_is_the_score_and_the_task_is_left_out():
    score = decide(episode(reward=0.0, metrics={"a": 1.0, "b": math.inf}), "file.py:score")
    assert score is not None
    assert (score.outcome, score.reward, score.judged_by) == (Outcome.SCORED, 0.0, "client")
    assert (score.metrics, score.calls, score.attempt) == ({"a": 1.0}, {"m": ("c",)}, 3)
    assert score.ticket.task == {}


@pytest.mark.parametrize("reward", [None, math.nan, math.inf])
def test_no_number_is_invalid_never_zero(reward: float | None):
    score = decide(episode(reward=reward), "client")
    assert score is not None
    assert (score.outcome, score.reward) == (Outcome.INVALID, None)


def test_a_function_is_asked_only_when_the_agent_gave_no_reward():
    assert decide(episode(reward=None), "file.py:score") is None


@pytest.mark.parametrize(
    "value", [math.nan, "1", None, {}, {"reward": 1, "bonus": 2}, {"reward": 1, "metrics": {"a": "b"}}]
)
def test_a_return_without_a_finite_number_is_refused(value: object):
    with pytest.raises(RewardError):
        verdict(value, {})


def test_rewards_of_single_calls_are_the_functions_or_else_the_clients():
    own = episode(calls={"m": ("c", "d")}, call_rewards={"c": 1.0, "d": 0.0}, reward=1.0)
    by_client = decide(own, "client")
    assert by_client is not None
    assert by_client.call_rewards == {"c": 1.0, "d": 0.0}
    asked = {"reward": 0.5, "call_rewards": [0.25, 0.75]}
    by_function = scored(own, verdict(asked, question(own)["episode"]["calls"]), judged_by="f")
    assert by_function.call_rewards == {"c": 0.25, "d": 0.75}
    assert scored(own, verdict(0.5, own.calls), judged_by="f").call_rewards == {"c": 1.0, "d": 0.0}
    with pytest.raises(RewardError, match="the return of the reward function: call_rewards has 1 numbers for 2 calls"):
        verdict({"reward": 1, "call_rewards": [1]}, own.calls)


@contextlib.asynccontextmanager
async def scoring(bus: MemoryBus, folder: Path, timeout_seconds: float = 10.0) -> AsyncIterator[Reward]:
    for spec in stream_specs(RUN, max_bytes=1 << 30):
        await bus.ensure_stream(spec)
    (folder / "score.py").write_text(FUNCTION)
    settings = SwarmSettings(
        models={"m": ModelSettings(path="tiny")},
        pools={"p": PoolSettings(reward=f"{folder}/score.py:score", reward_timeout_seconds=timeout_seconds)},
        reward=RewardSettings(max_crashes=2, num_workers=2),
    )
    reward = Reward(bus, RUN, settings)
    task = asyncio.create_task(reward.run())
    try:
        yield reward
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def scores(bus: MemoryBus, *ends: Episode) -> list[Score]:
    for end in ends:
        await put(bus, RUN, Stream.EPISODES, subject.episode(RUN, end.ticket.id), end, expected=0)
    found: dict[str, Score] = {}
    async with asyncio.timeout(15):
        async for message in bus.tail(stream_name(RUN, Stream.SCORES)):
            score = await read_as(Score, bus, RUN, Stream.SCORES, message)
            found[score.ticket.id] = score
            if len(found) == len(ends):
                return [found[end.ticket.id] for end in ends]
    raise AssertionError


async def test_a_function_scores_the_result_by_the_task(memory_bus: MemoryBus, tmp_path: Path):
    async with scoring(memory_bus, tmp_path) as reward:
        ends = [episode(index, result=result) for index, result in enumerate(("4", "5", "parts", "calls"))]
        right, wrong, parts, calls = await scores(memory_bus, *ends)
        assert reward.metrics()["num_scored"] == 4
    assert (right.call_rewards, calls.call_rewards) == ({}, {"c": 0.5})
    assert (right.reward, wrong.reward) == (1.0, 0.0)
    assert right.outcome is wrong.outcome is Outcome.SCORED
    assert right.judged_by.endswith("score.py:score")
    assert (parts.components, parts.agent_rewards, parts.metrics) == ({"s": 0.1}, {"a": 1.0}, {"n": 2.0})


async def test_r8_a_function_that_raises_or_gives_no_number_makes_the_episode_invalid(
    memory_bus: MemoryBus, tmp_path: Path
):
    async with scoring(memory_bus, tmp_path):
        ends = [episode(index, result=result) for index, result in enumerate(("raise", "nan", "text", "many"))]
        raised, nan, text, many = await scores(memory_bus, *ends)
    for score in (raised, nan, text, many):
        assert (score.outcome, score.reward) == (Outcome.INVALID, None)
    assert raised.fault is not None
    assert (raised.fault.kind, "no answers" in raised.fault.message) == ("ZeroDivisionError", True)


async def test_a8_a_function_that_blocks_its_thread_leaves_the_loop_free_and_others_are_scored(
    memory_bus: MemoryBus, tmp_path: Path
):
    async with scoring(memory_bus, tmp_path, timeout_seconds=1.0) as reward:
        lag = asyncio.create_task(_largest_lag())
        blocked, good = await scores(memory_bus, episode(0, result="block"), episode(1, result="4"))
        lag.cancel()
        assert await lag < 0.5
        assert reward.metrics()["num_late"] == 1
    assert good.reward == 1.0
    assert blocked.fault is not None
    assert (blocked.outcome, blocked.fault.kind) == (Outcome.INVALID, "DeadlineExceeded")
    assert "score.py:score" in blocked.fault.message


async def test_a22_an_end_that_kills_its_function_every_time_gets_a_terminal_score(
    memory_bus: MemoryBus, tmp_path: Path
):
    async with scoring(memory_bus, tmp_path):
        dead, good = await scores(memory_bus, episode(0, result="die"), episode(1, result="4"))
    assert good.reward == 1.0
    assert dead.fault is not None
    assert (dead.outcome, dead.fault.kind) == (Outcome.INVALID, "RewardError")
    assert "exited with status 7" in dead.fault.message


async def test_a6_a_function_that_can_not_be_loaded_stops_the_stage_with_a_sentence(memory_bus: MemoryBus):
    settings = SwarmSettings(pools={"p": PoolSettings(reward="nowhere.py:score")})
    with pytest.raises(WorkflowError, match="there is no file"):
        await Reward(memory_bus, RUN, settings).run()


async def _largest_lag() -> float:
    largest = 0.0
    try:
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.01)
            largest = max(largest, time.monotonic() - before - 0.01)
    except asyncio.CancelledError:
        return largest

"""Group judges in real worker processes: what they say, and what they fail at."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from judged_group import RUN, end

from agentjet.bus.memory import MemoryBus
from agentjet.bus.record import put, read_as, stream_specs
from agentjet.config.settings import ModelSettings, PoolSettings, RewardSettings, SwarmSettings
from agentjet.errors import WorkflowError
from agentjet.reward import Reward
from agentjet.schemas import subject
from agentjet.schemas.episode import Episode
from agentjet.schemas.score import Outcome, Score
from agentjet.schemas.subject import Stream, stream_name

JUDGE = """
import os, time
async def judge(task, episodes):
    match episodes[0]["result"]:
        case "raise": raise ZeroDivisionError("no idea")
        case "block": time.sleep(60)
        case "die": os._exit(7)
        case "one": return [1.0]
    best = max(len(one["result"]) for one in episodes)
    return [{"reward": len(one["result"]) == best, "reason": task["answer"]} for one in episodes]
"""


@contextlib.asynccontextmanager
async def judging(
    bus: MemoryBus, folder: Path, *, timeout_seconds: float = 10.0, code: str = JUDGE
) -> AsyncIterator[Reward]:
    for spec in stream_specs(RUN, max_bytes=1 << 30):
        await bus.ensure_stream(spec)
    (folder / "judge.py").write_text(code)
    pool = PoolSettings(group_judge=f"{folder}/judge.py:judge", reward_timeout_seconds=timeout_seconds)
    models = {"m": ModelSettings(path="tiny")}
    reward = Reward(bus, RUN, SwarmSettings(models=models, pools={"p": pool}, reward=RewardSettings(max_crashes=2)))
    task = asyncio.create_task(reward.run())
    try:
        yield reward
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def store(bus: MemoryBus, *ends: Episode) -> None:
    for one in ends:
        await put(bus, RUN, Stream.EPISODES, subject.episode(RUN, one.ticket.id), one, expected=0)


async def scores(bus: MemoryBus, count: int) -> list[Score]:
    found: list[Score] = []
    async with asyncio.timeout(20):
        async for message in bus.tail(stream_name(RUN, Stream.SCORES)):
            found.append(await read_as(Score, bus, RUN, Stream.SCORES, message))
            if len(found) == count:
                return sorted(found, key=lambda one: one.ticket.member)
    raise AssertionError


async def test_a_judge_compares_the_members_of_a_group_and_overrules_their_own_rewards(
    memory_bus: MemoryBus, tmp_path: Path
):
    async with judging(memory_bus, tmp_path) as reward:
        await store(memory_bus, end(0, result="short", reward=1.0), end(1, result="longer", reward=0.0))
        one, two = await scores(memory_bus, 2)
        assert reward.metrics()["num_scored"] == 2
    assert [(one.outcome, one.reward), (two.outcome, two.reward)] == [(Outcome.SCORED, 0.0), (Outcome.SCORED, 1.0)]
    assert one.judged_by.endswith("judge.py:judge")


async def test_the_judge_of_the_documentation_prefers_the_shortest_right_answer(memory_bus: MemoryBus, tmp_path: Path):
    document = Path(__file__).parents[3] / "docs" / "agents.md"
    (code,) = re.findall(r"```python\n(def judge\(.*?)```", document.read_text(), re.DOTALL)
    results = ("it is 4", "4", "five")
    async with judging(memory_bus, tmp_path, code=code):
        await store(memory_bus, *(end(member, result=result, size=3) for member, result in enumerate(results)))
        assert [one.reward for one in await scores(memory_bus, 3)] == [0.5, 1.0, 0.0]


@pytest.mark.parametrize(
    ("result", "said"),
    [
        ("raise", "ZeroDivisionError: no idea (judge.py:5)"),
        ("block", "DeadlineExceeded"),
        ("die", "exited with status 7"),
        ("one", "1 verdicts for 2 episodes"),
    ],
)
async def test_r8_a_judge_that_gives_no_verdicts_leaves_its_group_dead_with_the_reason_and_never_zero(
    memory_bus: MemoryBus, tmp_path: Path, result: str, said: str
):
    async with judging(memory_bus, tmp_path, timeout_seconds=0.5) as reward:
        await store(memory_bus, end(0, result=result), end(1, result="x"))
        found = await scores(memory_bus, 2)
        assert reward.metrics()["num_late"] == (2 if result == "block" else 0)
    for score in found:
        assert (score.outcome, score.reward, score.closes_slot) == (Outcome.DEAD, None, True)
        assert score.fault is not None and said in score.fault.message
        assert score.judged_by.endswith("judge.py:judge")


async def test_a_slow_judge_is_named_with_its_group(memory_bus: MemoryBus, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("agentjet.reward.reward._SLOW_SECONDS", 0.0)
    async with judging(memory_bus, tmp_path) as reward:
        await store(memory_bus, end(0, result="block"), end(1, result="x"))
        async with asyncio.timeout(10):
            while not (found := reward.waiting()):
                await asyncio.sleep(0.01)
    assert [one.what for one in found] == [f"the group judge {tmp_path}/judge.py:judge at p-0"]


async def test_a6_a_judge_that_can_not_be_loaded_stops_the_stage_with_a_sentence(memory_bus: MemoryBus):
    settings = SwarmSettings(pools={"p": PoolSettings(group_judge="nowhere.py:judge")})
    with pytest.raises(WorkflowError, match="there is no file"):
        await Reward(memory_bus, RUN, settings).run()

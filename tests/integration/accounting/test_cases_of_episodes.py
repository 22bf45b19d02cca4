"""Cases of episodes on their way, with real agents in worker processes on the real server."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from chat_models import RUN
from live_swarm import LiveSwarm
from whole_swarm import FoldLearner, OwnServer, at_least, audited, count, merging, records, until, working

from agentjet.bus.nats import NatsBus
from agentjet.config.settings import SwarmSettings
from agentjet.curriculum.dead import dead_slots
from agentjet.errors import BadRequestError, EngineError, WorkflowError
from agentjet.rollout import Rollout
from agentjet.schemas.ledger import DropReason, GroupDrop, LearnerStep
from agentjet.schemas.sample import Tombstone
from agentjet.schemas.score import Outcome
from agentjet.schemas.subject import Stream

AGENT = """
import asyncio, json, urllib.request

def ask(policy, text):
    body = {"model": policy.model, "messages": [{"role": "user", "content": text}]}
    headers = {"Authorization": "Bearer " + policy.api_key, "Content-Type": "application/json"}
    url = policy.base_url + "/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]

async def run(task, policy):
    text = await asyncio.to_thread(ask, policy, task.get("text", "x") + " " + policy.ticket)
    if "tool" in task:
        reader, writer = await asyncio.open_connection("127.0.0.1", task["tool"])
        await reader.readexactly(2)
        writer.close()
    return {"reward": 1.0, "result": text}
"""


def settings_of(
    tmp_path: Path, tasks: list[dict[str, object]], *, agent: str = AGENT, learner=None, **pool
) -> SwarmSettings:
    path = tmp_path / "agent.py"
    path.write_text(agent + f"\ndef tasks(): return {tasks!r}\n")
    one = {"workflow": f"{path}:run", "tasks": f"{path}:tasks", "is_shuffled": False, "group_size": 2, **pool}
    model = {"path": "tiny", "learner": {"batch_groups": 1, **(learner or {})}}
    return SwarmSettings.model_validate({"models": {"m": model}, "pools": {"p": one}})


@contextlib.asynccontextmanager
async def training(bus: NatsBus, settings: SwarmSettings, reply="hi") -> AsyncIterator[LiveSwarm]:
    """Everybody at work, the learner without a model."""
    live = LiveSwarm(bus, settings, reply)
    async with live.running(plays=True), working(merging(bus, RUN), FoldLearner(bus, RUN, "m", settings).run()):
        yield live


def failing_each(third: int, error: Exception):
    asked = 0

    def reply(prompt: str) -> str:
        nonlocal asked
        asked += 1
        if asked % third == 0:
            raise error
        return "hi"

    return reply


async def test_a1_every_third_engine_call_fails_and_the_totals_match(nats_bus: NatsBus, tmp_path: Path):
    settings = settings_of(tmp_path, [{}], max_offers=9, learner={"batch_groups": 3})
    async with training(nats_bus, settings, failing_each(3, BadRequestError("no"))):
        report = await audited(nats_bus, RUN, 6)
    scores = await records(nats_bus, RUN, Stream.SCORES)
    scored = [one for one in scores if one.outcome is Outcome.SCORED]
    failed = [one for one in scores if one.outcome is Outcome.INVALID]
    assert failed and {one.fault.kind for one in failed} == {"HTTPError"}, "the agent gets the error"
    assert all("400" in one.fault.message and not one.calls for one in failed)
    calls = {one.call for one in await records(nats_bus, RUN, Stream.CALLS)}
    assert {call for one in scored for call in one.calls["m"]} <= calls
    assert (report.lost, report.duplicated) == (0, 0)


@pytest.mark.parametrize("max_offers", [1, 2])
async def test_a12_one_of_eight_generations_fails_and_the_group_goes_on(
    nats_bus: NatsBus, tmp_path: Path, max_offers: int
):
    """With one offer the seven survivors train; with two the one is offered again and all eight do."""
    failures = [EngineError("out of memory")]

    def reply(prompt: str) -> str:
        if ".3.0" in prompt and failures:
            raise failures.pop()
        return "hi"

    settings = settings_of(tmp_path, [{}], group_size=8, max_offers=max_offers)
    async with training(nats_bus, settings, reply):
        await audited(nats_bus, RUN, 8)
        step = next(one for one in await records(nats_bus, RUN, Stream.LEDGER) if isinstance(one, LearnerStep))
    assert len(step.members) == (7 if max_offers == 1 else 8)
    first = [one for one in await records(nats_bus, RUN, Stream.SCORES) if one.ticket.group == "p-0"]
    assert Counter(one.outcome for one in first)[Outcome.INVALID] == 1
    assert {one.reward for one in first if one.outcome is Outcome.INVALID} == {None}


async def test_n2_a_first_prompt_over_the_limit_skips_its_task_once_and_counts_it(nats_bus: NatsBus, tmp_path: Path):
    settings = settings_of(tmp_path, [{"text": "long " * 2000}, {"text": "short"}], max_offers=3)
    async with training(nats_bus, settings):
        await until(lambda: _has(nats_bus, LearnerStep))
        dead = await dead_slots(nats_bus, RUN)
    first = [one for one in await records(nats_bus, RUN, Stream.SCORES) if one.ticket.group == "p-0"]
    assert [(one.outcome, one.reward, one.ticket.offer) for one in first] == [(Outcome.DEAD, None, 0)] * 2
    assert {(one.group, one.cause) for one in dead if one.group == "p-0"} == {("p-0", "prompt_too_long")}
    drop = await _has(nats_bus, GroupDrop)
    assert (drop.group, drop.reason) == ("p-0", DropReason.TOO_FEW)
    assert (await _has(nats_bus, LearnerStep)).groups == ("p-1",), "training goes on"


async def _has(bus: NatsBus, kind: type):
    return next((one for one in await records(bus, RUN, Stream.LEDGER) if isinstance(one, kind)), None)


@pytest.mark.parametrize(
    ("batch_groups", "pool"),
    [(4, {"max_offers": 3, "reoffer_pause_seconds": 0.3}), (1, {"max_offers": 12, "reoffer_pause_seconds": 0.1})],
    ids=["pool down", "pauses alone"],
)
async def test_a9_a_tool_server_that_dies_makes_episodes_invalid_until_it_is_back_and_nothing_dead(
    nats_bus: NatsBus, tmp_path: Path, batch_groups: int, pool: dict[str, object]
):
    """It is away for longer than the offers would last without a pause, or with nothing but pauses when all fail."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"ok")
        await writer.drain()
        writer.close()

    tool = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = tool.sockets[0].getsockname()[1]
    settings = settings_of(tmp_path, [{"tool": port}], learner={"batch_groups": batch_groups}, **pool)
    async with training(nats_bus, settings) as live:
        await until(lambda: _has(nats_bus, LearnerStep))
        tool.close()
        await tool.wait_closed()
        await until(lambda: _num_invalid(nats_bus))
        await asyncio.sleep(_OUTAGE_SECONDS)
        await until(lambda: _waits(live, "of pool p wait to be offered again"))
        tool = await asyncio.start_server(serve, "127.0.0.1", port)
        steps = await _steps(nats_bus)
        await until(lambda: _more_steps(nats_bus, steps + 2))
        report = await audited(nats_bus, RUN, 2 * batch_groups * (steps + 2))
        assert await dead_slots(nats_bus, RUN) == []
    tool.close()
    scores = await records(nats_bus, RUN, Stream.SCORES)
    kinds = {one.fault.kind for one in scores if one.outcome is Outcome.INVALID}
    # Who had connected but was not answered yet when the tool closed is reset; everybody later is refused.
    assert kinds - {"ConnectionResetError"} == {"ConnectionRefusedError"}
    assert {one.reward for one in scores if one.outcome is Outcome.SCORED} == {1.0}, "the curve has no dent"
    assert not [one for one in await records(nats_bus, RUN, Stream.SAMPLES) if isinstance(one, Tombstone)]
    assert (report.lost, report.duplicated) == (0, 0)


_OUTAGE_SECONDS = 2.0


async def _waits(live: LiveSwarm, words: str) -> bool:
    return any(words in one.what for one in live.curriculum.waiting())


async def _num_invalid(bus: NatsBus) -> bool:
    return any(one.outcome is Outcome.INVALID for one in await records(bus, RUN, Stream.SCORES))


async def _steps(bus: NatsBus) -> int:
    return sum(isinstance(one, LearnerStep) for one in await records(bus, RUN, Stream.LEDGER))


async def _more_steps(bus: NatsBus, number: int) -> bool:
    return await _steps(bus) >= number


async def test_a3_killed_with_three_episodes_running_and_five_queued_all_eight_are_trained_once(
    own: OwnServer, tmp_path: Path
):
    tasks: list[dict[str, object]] = [{"text": str(number)} for number in range(4)]
    settings = settings_of(tmp_path, tasks, num_epochs=1, max_running=3, learner={"batch_groups": 4})
    live = LiveSwarm(own.bus, settings, "hi")
    live.engine.go.clear()
    async with live.running(plays=True):
        await until(lambda: _are_running(live, 3))
        assert await count(own.bus, RUN, Stream.TASKS) == 8
        await own.server.kill()
        # Cancelled while there is no server: what they held is given back by nobody.
    await own.server.start()
    await until(lambda: _is_connected(own.bus))
    async with training(own.bus, settings):
        report = await audited(own.bus, RUN, 8, seconds=40)
    assert (report.settled, report.trained, report.lost, report.duplicated) == (8, 8, 0, 0)
    assert Counter(one.ticket.slot for one in await records(own.bus, RUN, Stream.SCORES)).most_common(1)[0][1] == 1


async def _are_running(live: LiveSwarm, number: int) -> bool:
    return len(live.engine.generations) >= number


async def _is_connected(bus: NatsBus) -> bool:
    return bus.last_error is None


async def test_r8_a_reward_function_that_raises_or_is_late_gives_no_score_and_no_zero(
    nats_bus: NatsBus, tmp_path: Path
):
    rewarder = tmp_path / "reward.py"
    rewarder.write_text(
        "import time\ndef score(task, episode):\n"
        "    if task['text'] == 'raise': raise ZeroDivisionError('no answers')\n"
        "    if task['text'] == 'block': time.sleep(60)\n"
        "    return 0.0 if task['text'] == 'wrong' else 1.0\n"
    )
    tasks: list[dict[str, object]] = [{"text": text} for text in ("raise", "block", "wrong", "right")]
    pool = {"reward": f"{rewarder}:score", "reward_timeout_seconds": 0.5, "max_offers": 1, "num_epochs": 1}
    agent = AGENT.replace('"reward": 1.0, ', "")
    settings = settings_of(tmp_path, tasks, agent=agent, learner={"admission_bound": 3}, **pool)
    async with training(nats_bus, settings):
        await until(at_least(nats_bus, RUN, Stream.SCORES, 8), 30)
        await until(lambda: _more_steps(nats_bus, 2))
    scores = await records(nats_bus, RUN, Stream.SCORES)
    by_group = {one.ticket.group: (one.outcome, one.reward, one.fault.kind if one.fault else "") for one in scores}
    assert by_group == {
        "p-0": (Outcome.INVALID, None, "ZeroDivisionError"),
        "p-1": (Outcome.INVALID, None, "DeadlineExceeded"),
        "p-2": (Outcome.SCORED, 0.0, ""),  # a wrong answer is a score
        "p-3": (Outcome.SCORED, 1.0, ""),
    }
    taken = [one.groups for one in await records(nats_bus, RUN, Stream.LEDGER) if isinstance(one, LearnerStep)]
    assert taken == [("p-2",), ("p-3",)]


async def test_a6_a_worker_that_raises_at_its_start_or_in_the_middle_is_a_named_error_within_seconds(
    nats_bus: NatsBus, tmp_path: Path
):
    raising = AGENT.replace("policy):\n    text", "policy):\n    raise RuntimeError('in the middle')\n    text")
    settings = settings_of(tmp_path, [{}], agent=raising, max_offers=1)
    async with training(nats_bus, settings), asyncio.timeout(15):
        await until(at_least(nats_bus, RUN, Stream.SCORES, 2))
        score = (await records(nats_bus, RUN, Stream.SCORES))[0]
    assert (score.outcome, score.fault.kind) == (Outcome.INVALID, "RuntimeError")
    assert "in the middle" in score.fault.message
    (tmp_path / "agent.py").write_text("raise RuntimeError('at the start')\n")
    with pytest.raises(WorkflowError, match="at the start"):
        async with asyncio.timeout(15):
            await Rollout(nats_bus, RUN, settings, None).run()  # type: ignore[arg-type]

"""DESIGN "Accounting", paragraph 8: group judges, by the interleavings that would break them, on the real server."""

import asyncio
import contextlib
import signal
import sys
from pathlib import Path

import pytest
from hand_played import Swarm, settings_of
from whole_swarm import FoldLearner, OwnServer, audited, count, make_streams, merging, records, until, working

from agentjet.bus.nats import NatsBus
from agentjet.config.settings import SwarmSettings
from agentjet.curriculum.audit import read_audit
from agentjet.reward import Reward
from agentjet.rollout.ending import store_end
from agentjet.schemas import subject
from agentjet.schemas.episode import EndStatus, Episode, Fault
from agentjet.schemas.ids import RunId
from agentjet.schemas.score import Outcome
from agentjet.schemas.subject import Stream, stream_name
from agentjet.schemas.task import EpisodeKind, Ticket

DICE = """
import random
def judge(task, episodes):
    with open(__file__ + ".log", "a") as log:
        log.write("asked\\n")
    return [{"reward": random.random(), "reason": one["result"]} for one in episodes]
"""
STAGE_THAT_KILLS_ITSELF = """
import asyncio, os, signal, sys
from agentjet.bus.nats import NatsBus
from agentjet.config.settings import SwarmSettings
from agentjet.reward import Reward

async def main(url, run, settings):
    reward = Reward(await NatsBus.connect(url, name='reward'), run, SwarmSettings.model_validate_json(settings))
    honest = reward._store

    async def dying(score):
        if score.judged_by:
            os.kill(os.getpid(), signal.SIGKILL)
        await honest(score)

    reward._store = dying
    await reward.run()

asyncio.run(main(*sys.argv[1:]))
"""


def judged(tasks: str, judge: str, *, size: int = 3, reward=None, **pool: object) -> SwarmSettings:
    common = {"group_size": size, "group_judge": judge}
    return settings_of(tasks, pool=common | pool, learner={"batch_groups": 1}, reward=reward or {})


def end_of(ticket: Ticket, attempt: int, status: EndStatus = EndStatus.COMPLETED) -> Episode:
    fault = None if status is EndStatus.COMPLETED else Fault(kind="ToolError", message="gone")
    result = f"by {ticket.member}"
    return Episode(run=ticket.run, ticket=ticket, attempt=attempt, status=status, fault=fault, result=result)


async def end(swarm: Swarm, ticket: Ticket, status: EndStatus = EndStatus.COMPLETED) -> None:
    grant = await swarm.claim(ticket.id)
    assert (await store_end(swarm.bus, swarm.run, end_of(ticket, grant.attempt, status))).accepted


@contextlib.asynccontextmanager
async def stage_that_kills_itself(url: str, run: RunId, settings: SwarmSettings):
    """A reward actor in a process of its own: SIGKILL after the judgement, before the first score from it."""
    arguments = (sys.executable, "-c", STAGE_THAT_KILLS_ITSELF, url, run, settings.model_dump_json())
    process = await asyncio.create_subprocess_exec(*arguments)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def forgetful_consumer(bus: NatsBus, run: RunId) -> None:
    """Of the reward stage, made before it: what a killed stage held comes again soon."""
    of = subject.stream_subjects(run, Stream.EPISODES)[0]
    await bus.consumer(stream_name(run, Stream.EPISODES), "reward", subject=of, ack_wait_seconds=2.0)


@pytest.mark.slow
async def test_p08_a_group_is_judged_once_though_a_member_never_ends_and_the_judging_stage_is_killed(
    own: OwnServer, run: RunId, tasks: str, tmp_path: Path, monkeypatch
):
    """The silent member is buried by its deadline, and nobody else is, though the others' deadlines pass as well."""
    monkeypatch.setattr("agentjet.curriculum.curriculum._ENDS_SECONDS", 0.1)
    monkeypatch.setattr("agentjet.curriculum.purge.FULL_ENOUGH_RATIO", 0.0)
    code = tmp_path / "judge.py"
    code.write_text(DICE)
    settings = judged(tasks, f"{code}:judge", deadline_seconds=2.0)
    swarm, bus = Swarm(own.bus, run), own.bus
    await make_streams(bus, run)
    await forgetful_consumer(bus, run)
    dying = stage_that_kills_itself(own.server.url, run, settings)
    async with swarm.curriculum(settings) as (curriculum, _), dying as process:
        curriculum._purge._margin_seconds = 0.0
        tickets = sorted([ticket for ticket, _ in await swarm.fetch(3)], key=lambda one: one.member)
        for ticket in tickets[:2]:
            await end(swarm, ticket)
        waits = f"judge of group {tickets[0].group} waits for 1 member to end"
        await until(lambda: _says(curriculum, waits))
        await until(lambda: _has_handled(bus, run, 2))
        await curriculum._clean()
        report = await read_audit(bus, run)
        assert (report.ended, report.ended_not_scored.count, report.unjudged, report.lost) == (2, 2, 2, 0)
        assert (await swarm.claim(tickets[2].id)).granted
        assert await asyncio.wait_for(process.wait(), 20) == -signal.SIGKILL
        (judgement,) = await records(bus, run, Stream.JUDGEMENTS)
        buried = await records(bus, run, Stream.SCORES)
        assert [(one.ticket.member, one.outcome) for one in buried] == [(2, Outcome.DEAD)]
        # Two stages take over, whose judge would decide otherwise.
        code.write_text(DICE.replace("asked", "asked again"))
        stages = [Reward(await own.connect(), run, settings) for _ in range(2)]
        learner = FoldLearner(bus, run, "small", settings).run()
        async with working(*(stage.run() for stage in stages), merging(bus, run), learner):
            report = await audited(bus, run, 3)
        assert not await _says(curriculum, waits)
        assert curriculum.metrics()["tickets_buried"] == 1
    assert await records(bus, run, Stream.JUDGEMENTS) == [judgement]
    assert Path(f"{code}.log").read_text() == "asked\n"
    scores = {one.ticket.member: one for one in (await records(bus, run, Stream.SCORES))[:3]}
    assert [scores[member].reward for member in (0, 1)] == [one.reward for one in judgement.verdicts]
    assert [one.reason for one in judgement.verdicts] == ["by 0", "by 1"]
    assert {one.judged_by for one in scores.values()} == {f"{code}:judge", ""}
    assert (report.lost, report.duplicated) == (0, 0)


async def _says(curriculum, what: str) -> bool:
    return any(one.what == what for one in curriculum.waiting())


async def _has_handled(bus: NatsBus, run: RunId, number: int) -> bool:
    """Whether the reward stage has acknowledged so many ends."""
    info = await bus.stream_info(stream_name(run, Stream.EPISODES), with_consumers=True)
    return info.num_messages >= number and info.consumers["reward"] == 0


async def test_p08_a_failure_on_the_last_offer_that_comes_last_has_the_group_judged(
    nats_bus: NatsBus, run: RunId, tasks: str, tmp_path: Path
):
    """A failure before it is offered again, and the judge waits for that; two stages share the ends."""
    (tmp_path / "judge.py").write_text(DICE)
    settings = judged(tasks, f"{tmp_path}/judge.py:judge", size=2, max_offers=2)
    swarm, bus = Swarm(nats_bus, run), nats_bus
    await make_streams(bus, run)
    stages = [Reward(bus, run, settings).run() for _ in range(2)]
    learner = FoldLearner(bus, run, "small", settings).run()
    async with swarm.curriculum(settings), working(*stages, merging(bus, run), learner):
        one, two = sorted([ticket for ticket, _ in await swarm.fetch(2)], key=lambda one: one.member)
        await end(swarm, two, EndStatus.FAILED)
        await end(swarm, one)
        ((again, _),) = await swarm.fetch(1)
        assert again.id == f"{two.slot}.1"
        await until(lambda: _has_handled(bus, run, 2))
        assert await count(bus, run, Stream.JUDGEMENTS) == 0
        await end(swarm, again, EndStatus.ABORTED)
        report = await audited(bus, run, 2)
    (judgement,) = await records(bus, run, Stream.JUDGEMENTS)
    assert [verdict.ticket for verdict in judgement.verdicts] == [one.id], "one survivor is judged all the same"
    found = [(score.ticket.id, score.outcome) for score in await records(bus, run, Stream.SCORES)]
    outcomes = {two.id: Outcome.INVALID, again.id: Outcome.ABORTED, one.id: Outcome.SCORED}
    assert (len(found), dict(found)) == (3, outcomes)
    assert (report.lost, report.duplicated, report.unjudged) == (0, 0, 0)


async def test_p08_r8_a_judge_that_raises_is_tried_again_and_then_its_group_is_dead_and_not_offered_again(
    nats_bus: NatsBus, run: RunId, tasks: str, tmp_path: Path
):
    """Group 0 is judged at the second try; group 1 at none of three."""
    (tmp_path / "judge.py").write_text(
        "import pathlib\n"
        "def judge(task, episodes):\n"
        "    tries = pathlib.Path(__file__).with_name(str(task['n']))\n"
        "    tries.write_text(tries.read_text() + 'x' if tries.exists() else 'x')\n"
        "    if task['n'] == 1 or tries.read_text() == 'x': raise ZeroDivisionError('no idea')\n"
        "    return [1.0, 0.0]\n"
    )
    settings = judged(tasks, f"{tmp_path}/judge.py:judge", size=2, is_shuffled=False)
    swarm, bus = Swarm(nats_bus, run), nats_bus
    await make_streams(bus, run)
    learner = FoldLearner(bus, run, "small", settings).run()
    works = (Reward(bus, run, settings).run(), merging(bus, run), learner)
    async with swarm.curriculum(settings), working(*works):
        for number in range(2):
            for ticket, _ in await swarm.fetch(2):
                assert ticket.group == f"guess-{number}", "nothing is offered again"
                await end(swarm, ticket)
            report = await audited(bus, run, 2 * (number + 1))
    scores = sorted(await records(bus, run, Stream.SCORES), key=lambda one: one.ticket.id)
    assert [(one.outcome, one.reward) for one in scores] == [
        (Outcome.SCORED, 1.0),
        (Outcome.SCORED, 0.0),
        (Outcome.DEAD, None),
        (Outcome.DEAD, None),
    ]
    assert {one.fault.kind for one in scores[2:]} == {"not_judged"}
    assert all("ZeroDivisionError: no idea (judge.py:5)" in one.fault.message for one in scores[2:])
    assert [(tmp_path / str(number)).read_text() for number in range(2)] == ["xx", "xxx"]
    assert (report.lost, report.duplicated) == (0, 0)


async def test_p08_evaluations_are_judged_and_settle_at_their_scores(
    nats_bus: NatsBus, run: RunId, tasks: str, tmp_path: Path
):
    (tmp_path / "judge.py").write_text("def judge(task, episodes): return [one['is_eval'] for one in episodes]\n")
    evaluation = {"pool": "guess", "every_steps": 1, "num_tasks": 1, "num_repeats": 2}
    pool = {"group_judge": f"{tmp_path}/judge.py:judge"}
    settings = settings_of(tasks, run={"num_steps": 1}, pool=pool, eval=evaluation, learner={"batch_groups": 1})
    swarm, bus = Swarm(nats_bus, run), nats_bus
    await make_streams(bus, run)
    async with swarm.curriculum(settings), working(Reward(bus, run, settings).run()):
        await swarm.start_learner()
        for ticket, _ in await swarm.fetch(2):
            assert ticket.kind is EpisodeKind.EVAL
            await end(swarm, ticket)
        ((training, _), _) = await swarm.fetch(2)
        assert training.kind is EpisodeKind.TRAIN, "the barrier is open"
    scores = await records(bus, run, Stream.SCORES)
    assert [(one.outcome, one.reward) for one in scores] == [(Outcome.SCORED, 1.0)] * 2

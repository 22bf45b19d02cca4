"""What died, and its retry: by hand-played actors on both buses, and by command on the real server."""

import asyncio
import json

import pytest
from hand_played import Swarm, settings_of

from agentjet.bus.record import ask, put_once
from agentjet.cli.main import run as run_command
from agentjet.curriculum.dead import dead_slots, history_of
from agentjet.errors import BusError
from agentjet.schemas import subject
from agentjet.schemas.claim import RetryReply, RetryRequest
from agentjet.schemas.episode import EndStatus, Episode, Fault
from agentjet.schemas.ids import SlotId
from agentjet.schemas.score import Outcome, Score
from agentjet.schemas.subject import Stream


@pytest.fixture
def tasks(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(f'{{"n": {number}}}\n' for number in range(5)))
    return str(path)


@pytest.fixture
async def swarm(bus, unique):
    one = Swarm(bus, unique)
    await one.begin()
    yield one
    for name in await bus.stream_names(subject.stream_prefix(one.run)):
        await bus.delete_stream(name)


async def fail(swarm, ticket, delivery, status=EndStatus.FAILED):
    grant = await swarm.claim(ticket.id, "worker-1")
    fault = Fault(kind="ToolError", message="the tool server is gone")
    end = Episode(run=swarm.run, ticket=ticket, attempt=grant.attempt, status=status, fault=fault)
    await put_once(swarm.bus, swarm.run, Stream.EPISODES, subject.episode(swarm.run, ticket.id), end)
    outcome = Outcome.ABORTED if status is EndStatus.ABORTED else Outcome.INVALID
    score = Score(run=swarm.run, ticket=ticket.without_task(), attempt=grant.attempt, outcome=outcome, fault=fault)
    await put_once(swarm.bus, swarm.run, Stream.SCORES, subject.score(swarm.run, ticket.id), score)
    await delivery.ack()


async def one_dead_group(swarm):
    """Group 0: member 0 fails twice and is dead, member 1 is scored."""
    (first, delivery), (second, other) = await swarm.fetch(2)
    await fail(swarm, first, delivery)
    await swarm.play(second, other)
    again, delivery = await offered_again(swarm, first)
    await fail(swarm, again, delivery, EndStatus.ABORTED)
    return first, second


async def offered_again(swarm, ticket):
    """The next offer of a ticket's slot; what lies before it on TASKS is taken and kept."""
    while True:
        ((found, delivery),) = await swarm.fetch(1)
        if (found.slot, found.offer) == (ticket.slot, ticket.offer + 1):
            return found, delivery


async def retry(swarm, group="guess-0"):
    request = RetryRequest(run=swarm.run, group=group)
    return await ask(swarm.bus, subject.retry_service(swarm.run), request, RetryReply, timeout_seconds=10)


def settings(tasks, **learner):
    return settings_of(tasks, pool={"max_offers": 2}, learner={"batch_groups": 1, **learner})


async def test_a_dead_slot_is_listed_with_its_cause_and_shown_with_every_offer(swarm, tasks):
    async with swarm.curriculum(settings(tasks)):
        first, _ = await one_dead_group(swarm)
        (dead,) = await dead_slots(swarm.bus, swarm.run)
        assert (dead.ticket, dead.group, dead.pool) == (f"{first.slot}.1", first.group, "guess")
        assert (dead.outcome, dead.cause, dead.message) == ("aborted", "ToolError", "the tool server is gone")
        assert dead.retried_as == ""
        one, two = await history_of(swarm.bus, swarm.run, first.slot)
        assert [offer.ticket for offer in (one, two)] == [f"{first.slot}.0", f"{first.slot}.1"]
        assert [claim.worker for claim in one.claims] == ["worker-1"]
        assert one.end is not None and one.end.attempt == one.claims[0].attempt
        assert (one.score.outcome, two.score.outcome) == (Outcome.INVALID, Outcome.ABORTED)
        assert await history_of(swarm.bus, swarm.run, SlotId("guess-9.0")) == []


async def test_a_retry_is_a_new_group_with_the_same_task_and_seed_however_often_it_is_asked_for(swarm, tasks):
    async with swarm.curriculum(settings(tasks, admission_bound=1)):
        await swarm.start_learner()
        first, second = await one_dead_group(swarm)
        assert (await retry(swarm)).reason == "full"
        await swarm.step([first, second])
        one, two = await asyncio.gather(retry(swarm), retry(swarm))
        assert one.granted and one.group == two.group == "guess-2"
        tickets = [ticket for ticket, _ in await swarm.fetch(2)]
        assert [ticket.id for ticket in tickets] == ["guess-2.0.0", "guess-2.1.0"]
        assert {(ticket.seed, json.dumps(ticket.task)) for ticket in tickets} == {(first.seed, json.dumps(first.task))}
        assert (await dead_slots(swarm.bus, swarm.run))[0].retried_as == "guess-2"
    async with swarm.curriculum(settings(tasks, admission_bound=2)):
        assert (await swarm.until(lambda: granted(swarm))).group == "guess-2"
        new = [issue for issue in await swarm.issues() if not issue.retry_of]
        assert [issue.position for issue in new] == list(range(len(new))), "the data set goes on where it was"


async def granted(swarm):
    try:
        reply = await retry(swarm)
    except BusError:
        return None  # the curriculum is still starting
    return reply if reply.granted else None


async def test_what_is_alive_unknown_or_final_is_not_retried(swarm, tasks):
    async with swarm.curriculum(settings_of(tasks, run={"num_steps": 1}, pool={"max_offers": 2})):
        await one_dead_group(swarm)
        assert "no slot of group guess-1 is dead" in (await retry(swarm, "guess-1")).reason
        assert "there is no group guess-7" in (await retry(swarm, "guess-7")).reason
        assert "raise run.num_steps" in (await retry(swarm)).reason


async def test_a_finite_pool_does_not_end_before_its_retry_is_played(swarm, tasks):
    settings = settings_of(
        tasks, pool={"max_offers": 2, "num_epochs": 1}, learner={"batch_groups": 5, "admission_bound": 1}
    )
    async with swarm.curriculum(settings) as (_, job):
        await swarm.start_learner()
        played = await swarm.fetch(10)
        tickets = [ticket for ticket, _ in played]
        for ticket, delivery in played[1:]:
            await swarm.play(ticket, delivery)
        await fail(swarm, *played[0])
        ((again, delivery),) = await swarm.fetch(1)
        await fail(swarm, again, delivery)
        assert (await retry(swarm)).group == "guess-5"
        await swarm.step(tickets)
        assert not (await asyncio.wait({job}, timeout=0.3))[0]
        await swarm.step(await swarm.play_groups(1))
        await asyncio.wait_for(job, 10)


async def test_the_commands_list_show_and_retry(nats_bus, nats_server, unique, tasks, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    swarm = Swarm(nats_bus, unique)
    await swarm.begin()
    words = ["--nats", nats_server.url, "--run", unique]

    async def command(*args, code=0):
        assert await asyncio.to_thread(run_command, ["dead", *args, *words]) == code
        return capsys.readouterr()

    assert "nothing is dead" in (await command("ls")).out
    async with swarm.curriculum(settings(tasks)):
        await swarm.start_learner()
        first, second = await one_dead_group(swarm)
        line = (await command("ls")).out
        for part in (f"{first.slot}.1", "guess", "aborted", "ToolError: the tool server is gone"):
            assert part in line
        (row,) = json.loads((await command("ls", "--json")).out)
        assert (row["ticket"], row["cause"]) == (f"{first.slot}.1", "ToolError")
        assert 0 <= row["age_seconds"] < 60
        shown = (await command("show", first.slot)).out
        for part in (
            "by worker-1 (attempt ",
            "as failed by attempt",
            "as aborted; the slot is dead",
            "was offered again",
            "ToolError",
        ):
            assert part in shown
        assert len(json.loads((await command("show", f"{first.slot}.1", "--json")).out)["offers"]) == 2
        assert (
            "is issued as soon as there is room"
            in (await command("retry", first.slot, "--wait-seconds", "0", code=1)).err
        )
        await swarm.step([first, second])
        group = (await command("retry", first.slot)).out.strip()
        assert (await command("retry", first.group)).out.strip() == group
        assert f"retried as {group}" in (await command("ls")).out
        assert "no slot of group guess-1 is dead" in (await command("retry", "guess-1", code=1)).err
    assert "is its curriculum running" in (await command("retry", "guess-1", code=1)).err
    assert "no group, slot or ticket" in (await command("show", "a.b", code=2)).err
    for name in await nats_bus.stream_names(subject.stream_prefix(swarm.run)):
        await nats_bus.delete_stream(name)

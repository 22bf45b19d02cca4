import asyncio
from collections import Counter

import pytest
from hand_played import SECRET, Swarm, settings_of

from agentjet.accounting.key import verify
from agentjet.bus.ledger import LedgerChain
from agentjet.bus.record import ask, last, put, put_once
from agentjet.config.settings import SwarmSettings
from agentjet.curriculum.curriculum import Curriculum
from agentjet.curriculum.feed import Feed
from agentjet.errors import ConfigError, FencedError
from agentjet.schemas import subject
from agentjet.schemas.claim import Authorization, AuthorizeRequest, OfferReply, OfferRequest
from agentjet.schemas.episode import EndStatus, Episode
from agentjet.schemas.ids import TicketId, Version
from agentjet.schemas.ledger import CurriculumStart, RunFinish
from agentjet.schemas.score import Outcome
from agentjet.schemas.subject import CURRICULUM, Stream, stream_name
from agentjet.schemas.task import EpisodeKind


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


async def test_a_run_is_issued_at_the_learners_pace_and_finishes(swarm, tasks):
    settings = settings_of(tasks, run={"num_steps": 3})
    async with swarm.curriculum(settings) as (_, job):
        await swarm.start_learner()
        seen = []
        for _ in range(3):
            seen += (tickets := await swarm.play_groups(2))
            assert await swarm.none_waits()
            await swarm.step(tickets)
        async with asyncio.timeout(10):
            await job
    assert len({ticket.id for ticket in seen}) == 12
    assert [issue.ranks["small"] for issue in await swarm.issues()] == list(range(6))
    finish = (await swarm.records(Stream.LEDGER))[-1]
    assert isinstance(finish, RunFinish)
    assert "3 steps" in finish.reason


async def test_tasks_come_in_epochs_and_a_finite_pool_ends_the_run(swarm, tasks):
    settings = settings_of(tasks, pool={"num_epochs": 2}, learner={"admission_bound": 9})
    async with swarm.curriculum(settings) as (_, job):
        await swarm.start_learner()
        tickets = await swarm.play_groups(10)
        groups = list(dict.fromkeys(ticket.group for ticket in tickets))
        for start in range(0, 10, 2):
            await swarm.step([one for one in tickets if one.group in groups[start : start + 2]])
        async with asyncio.timeout(10):
            await job
    played = Counter(ticket.task["n"] for ticket in tickets)
    assert played == dict.fromkeys(range(5), 4)
    assert {ticket.seed for ticket in tickets if ticket.member} == {one.seed for one in tickets if not one.member}


async def test_a_claim_is_signed_and_the_newer_one_supersedes_the_older(swarm, tasks):
    async with swarm.curriculum(settings_of(tasks)):
        (ticket, _), *_ = await swarm.fetch(1)
        first, second = await swarm.claim(ticket.id, "one"), await swarm.claim(ticket.id, "two")
        assert first.granted and second.granted
        key = verify(SECRET, first.key, run=swarm.run, now=first.deadline)
        assert (key.ticket, key.attempt, key.expires) == (ticket.id, first.attempt, first.deadline)

        async def authorize(text):
            service = subject.authorize_service(swarm.run)
            return await ask(swarm.bus, service, AuthorizeRequest(key=text), Authorization)

        assert (await authorize(second.key)).models == ("small",)
        assert (await authorize(first.key)).reason == "superseded"
        assert "not an AgentJet key" in (await authorize("sk-nothing")).reason


async def test_a18_two_claims_of_one_ticket_are_two_attempts_and_the_first_end_wins(swarm, tasks):
    async with swarm.curriculum(settings_of(tasks)):
        (ticket, _), *_ = await swarm.fetch(1)
        grants = await asyncio.gather(*(swarm.claim(ticket.id, f"w{number}") for number in range(4)))
        attempts = [grant.attempt for grant in grants]
        assert len(set(attempts)) == 4
        to = subject.episode(swarm.run, ticket.id)
        for attempt in attempts[:2]:
            end = Episode(run=swarm.run, ticket=ticket, attempt=attempt, status=EndStatus.COMPLETED)
            stored = await put_once(swarm.bus, swarm.run, Stream.EPISODES, to, end)
            assert stored.record.attempt == attempts[0]
        assert (await swarm.claim(ticket.id)).reason == "ended"


async def test_a_ticket_whose_players_vanish_is_given_out_five_times_and_then_buried(swarm, tasks):
    """An agent that takes its machine down is not handed on for ever, also when the curriculum starts again."""
    settings = settings_of(tasks, pool={"deadline_seconds": 1.0})
    async with swarm.curriculum(settings):
        (ticket, _), *_ = await swarm.fetch(1)
        grants = [await swarm.claim(ticket.id) for _ in range(3)]
    async with swarm.curriculum(settings):
        await swarm.until(lambda: _has_restarted(swarm))
        grants += await asyncio.gather(*(swarm.claim(ticket.id) for _ in range(4)))
        assert sorted(grant.granted for grant in grants) == [False] * 2 + [True] * 5
        assert [grant.reason for grant in grants if not grant.granted] == ["spent"] * 2
        to = subject.episode(swarm.run, ticket.id)
        _, end = await swarm.until(lambda: last(Episode, swarm.bus, swarm.run, Stream.EPISODES, to))
        assert (end.status, end.attempt) == (EndStatus.DEAD, max(grant.attempt for grant in grants))
        assert end.fault.message.endswith("it was claimed 5 times without an end")


async def _has_restarted(swarm):
    records = await swarm.records(Stream.LEDGER)
    await asyncio.sleep(0.1)
    return sum(isinstance(one, CurriculumStart) for one in records) == 2


@pytest.mark.parametrize("text", ["guess-99.0.0", "guess-0.7.0", "guess-0.0.1", "other-0.0.0", "nonsense"])
async def test_a_ticket_that_was_not_issued_is_unknown(swarm, tasks, text):
    async with swarm.curriculum(settings_of(tasks)):
        await swarm.fetch(1)
        grant = await swarm.claim(text)
        assert (grant.granted, grant.reason) == (False, "unknown")


async def test_a_failed_ticket_is_offered_again_until_its_offers_are_used_up(swarm, tasks):
    settings = settings_of(tasks, pool={"group_size": 1, "max_offers": 2}, learner={"batch_groups": 1})
    async with swarm.curriculum(settings):
        (ticket, delivery), *_ = await swarm.fetch(1)
        await swarm.play(ticket, delivery, Outcome.INVALID)
        (again, delivery), *_ = await swarm.fetch(1)
        assert again.id == TicketId("guess-0.0.1")
        assert (again.task, again.seed, again.ranks) == (ticket.task, ticket.seed, ticket.ranks)
        assert (await swarm.claim(ticket.id)).reason == "ended"
        await swarm.play(again, delivery, Outcome.ABORTED)
        assert await swarm.none_waits()


async def test_a_slot_that_failed_waits_before_it_is_offered_again_also_after_a_restart(swarm, tasks):
    settings = settings_of(tasks, pool={"reoffer_pause_seconds": 50.0})
    async with swarm.curriculum(settings, sweep_seconds=0.1):
        (ticket, delivery), *_ = await swarm.fetch(4)
        await swarm.play(ticket, delivery, Outcome.INVALID)
        assert await swarm.none_waits(), "nor does the sweep publish it"
    failed = await swarm.bus.last(stream_name(swarm.run, Stream.SCORES), subject.score(swarm.run, ticket.id))
    async with swarm.curriculum(settings, sweep_seconds=0.1) as (one, _):
        await swarm.until(lambda: _waits(one))
        assert (one.metrics()["tickets_paused"], one.metrics()["tickets_unclaimed"]) == (1, 3)
        assert list(one._course.board.paused.values()) == [failed.time + 50.0]
        assert await swarm.none_waits()
    async with swarm.curriculum(settings_of(tasks, pool={"reoffer_pause_seconds": 0.2})) as (one, _):
        (again, _), *_ = await swarm.fetch(1)
        assert (again.slot, again.offer) == (ticket.slot, 1)
        assert (await _waits(one), one.metrics()["tickets_paused"]) == (False, 0)


async def _waits(curriculum):
    words = "1 slots of pool guess wait to be offered again; next in"
    return any(one.what.startswith(words) for one in curriculum.waiting())


async def test_a_ticket_past_its_deadline_is_buried_and_its_late_end_changes_nothing(swarm, tasks):
    settings = settings_of(tasks, pool={"deadline_seconds": 0.3})
    async with swarm.curriculum(settings):
        (ticket, _), *_ = await swarm.fetch(1)
        grant = await swarm.claim(ticket.id)
        to = subject.episode(swarm.run, ticket.id)
        _, end = await swarm.until(lambda: last(Episode, swarm.bus, swarm.run, Stream.EPISODES, to))
        assert (end.status, end.attempt) == (EndStatus.DEAD, grant.attempt)
        late = Episode(run=swarm.run, ticket=ticket, attempt=grant.attempt, status=EndStatus.COMPLETED)
        stored = await put_once(swarm.bus, swarm.run, Stream.EPISODES, to, late)
        assert not stored.is_ours
        assert len(await swarm.records(Stream.EPISODES)) == 1, "a ticket that nobody claimed has no deadline"


async def test_a_crash_between_ledger_and_tasks_is_healed_at_the_next_start(swarm, tasks, monkeypatch):
    async def crash(*_):
        raise RuntimeError("killed")

    settings = settings_of(tasks)
    with monkeypatch.context() as patch:
        patch.setattr("agentjet.curriculum.issuer.publish_tickets", crash)
        async with swarm.curriculum(settings) as (_, job):
            with pytest.raises(ExceptionGroup, match="TaskGroup"):
                await asyncio.wait_for(job, 10)
    assert len(await swarm.issues()) == 1
    assert await swarm.none_waits()
    async with swarm.curriculum(settings):
        tickets = [ticket for ticket, _ in await swarm.fetch(4)]
    assert sorted(ticket.id for ticket in tickets) == ["guess-0.0.0", "guess-0.1.0", "guess-1.0.0", "guess-1.1.0"]


async def test_a_restart_goes_on_with_what_is_owed_only(swarm, tasks):
    settings = settings_of(tasks)
    async with swarm.curriculum(settings):
        (first, delivery), (second, _), *_ = await swarm.fetch(4)
        await swarm.play(first, delivery)
        grant = await swarm.claim(second.id)
    # While no curriculum runs: one claimed ticket ends as failed and is scored.
    failed = Episode(run=swarm.run, ticket=second, attempt=grant.attempt, status=EndStatus.FAILED)
    await put_once(swarm.bus, swarm.run, Stream.EPISODES, subject.episode(swarm.run, second.id), failed)
    await swarm.score(second, grant.attempt, Outcome.INVALID)
    async with swarm.curriculum(settings):
        (again, _), *_ = await swarm.fetch(1)
        assert (again.slot, again.offer) == (second.slot, 1)
        assert await swarm.none_waits()
        assert len(await swarm.issues()) == 2
        assert (await swarm.claim(first.id)).reason == "ended"
        assert (await swarm.claim(second.id)).reason == "ended"
    starts = [one.incarnation for one in await swarm.records(Stream.LEDGER) if isinstance(one, CurriculumStart)]
    assert starts == [1, 2]


async def test_an_end_that_waits_for_its_score_is_not_played_again(swarm, tasks):
    settings = settings_of(tasks)
    async with swarm.curriculum(settings):
        for ticket, delivery in await swarm.fetch(4):
            grant = await swarm.claim(ticket.id)
            end = Episode(run=swarm.run, ticket=ticket, attempt=grant.attempt, status=EndStatus.COMPLETED)
            await put_once(swarm.bus, swarm.run, Stream.EPISODES, subject.episode(swarm.run, ticket.id), end)
            await delivery.ack()
    async with swarm.curriculum(settings, sweep_seconds=0.1):
        assert await swarm.none_waits()


async def test_p08_status_names_the_oldest_groups_whose_judges_wait_for_members(swarm, tasks, monkeypatch):
    """Also after a restart, and only groups of which somebody has ended and somebody has not."""
    monkeypatch.setattr("agentjet.curriculum.curriculum._ENDS_SECONDS", 0.05)
    settings = settings_of(tasks, pool={"group_judge": "judge.py:judge"}, learner={"batch_groups": 9})
    async with swarm.curriculum(settings):
        tickets = sorted([ticket for ticket, _ in await swarm.fetch(18)], key=lambda one: (one.member, one.group))
        first, second = tickets[:8], tickets[9:]
        assert all(ticket.is_judged for ticket in tickets)
        for ticket in first:
            await swarm.end(ticket)
        await swarm.end(second[0])
    async with swarm.curriculum(settings) as (one, _):
        waits = await swarm.until(lambda: judges_of(one, 6))
    assert waits == [
        *(f"judge of group guess-{index} waits for 1 member to end" for index in range(1, 6)),
        "judges of 2 more groups wait for members to end",
    ]


async def judges_of(curriculum, count):
    found = [one.what for one in curriculum.waiting() if one.what.startswith("judge")]
    return found if len(found) == count and "of 2 more" in found[-1] else None


async def test_a_ticket_that_vanished_from_tasks_is_published_again(swarm, tasks):
    async with swarm.curriculum(settings_of(tasks), sweep_seconds=0.1) as (one, _):
        (ticket, delivery), *_ = await swarm.fetch(4)
        await delivery.ack()
        (again, _), *_ = await swarm.fetch(1)
        assert again == ticket
        assert one.metrics()["tickets_published_again"] == 1


async def test_a_deadline_survives_a_restart(swarm, tasks):
    settings = settings_of(tasks, pool={"deadline_seconds": 1.0})
    async with swarm.curriculum(settings):
        (ticket, _), *_ = await swarm.fetch(1)
        await swarm.claim(ticket.id)
    async with swarm.curriculum(settings):
        to = subject.episode(swarm.run, ticket.id)
        _, end = await swarm.until(lambda: last(Episode, swarm.bus, swarm.run, Stream.EPISODES, to))
        assert end.status is EndStatus.DEAD


async def test_a_newer_curriculum_fences_the_older_one(swarm, tasks):
    settings = settings_of(tasks)
    async with swarm.curriculum(settings) as (_, old):
        await swarm.fetch(1)
        async with swarm.curriculum(settings):
            with pytest.raises(FencedError, match="newer curriculum"):
                await asyncio.wait_for(old, 10)


async def test_a_curriculum_starts_over_what_its_predecessor_still_writes(swarm, tasks, monkeypatch):
    """A killed predecessor's last record may be stored after its successor has read the ledger."""
    find_end, late = LedgerChain.find_end, iter(range(2))

    async def find_end_then_lose(chain):
        await find_end(chain)
        if chain._who == CURRICULUM and next(late, None) is not None:
            start = CurriculumStart(run=swarm.run, incarnation=chain.last_sequence + 1, config_digest="")
            await put(swarm.bus, swarm.run, Stream.LEDGER, subject.ledger(swarm.run, CURRICULUM), start)

    monkeypatch.setattr(LedgerChain, "find_end", find_end_then_lose)
    async with swarm.curriculum(settings_of(tasks)):
        await swarm.fetch(1)
    starts = [one for one in await swarm.records(Stream.LEDGER) if isinstance(one, CurriculumStart)]
    assert [one.incarnation for one in starts] == [1, 2, 3]


async def test_a_restart_reads_the_scores_of_groups_that_are_out_and_no_others(swarm, tasks, monkeypatch):
    monkeypatch.setattr("agentjet.curriculum.feed._RECENT_SCORES", 0)
    monkeypatch.setattr("agentjet.curriculum.feed._MARGIN_SECONDS", 0.0)
    take, read_again = Feed._take_score, []

    async def take_and_note(one, message):
        read_again.append(message.sequence)
        return await take(one, message)

    async def has_read():
        return read_again

    settings = settings_of(tasks, run={"num_steps": 3})
    async with swarm.curriculum(settings):
        await swarm.start_learner()
        await swarm.step(await swarm.play_groups(2))
        waiting = await swarm.play_groups(2)
    monkeypatch.setattr(Feed, "_take_score", take_and_note)
    async with swarm.curriculum(settings) as (_, job):
        await swarm.until(has_read)
        await swarm.step(waiting)
        await swarm.step(await swarm.play_groups(2))
        async with asyncio.timeout(10):
            await job
    assert len(await swarm.records(Stream.SCORES)) == 12
    assert read_again == list(range(5, 13))


async def test_an_evaluation_is_a_barrier_pinned_to_one_version(swarm, tasks):
    evaluation = {"pool": "guess", "every_steps": 1, "num_tasks": 2, "num_repeats": 1}
    settings = settings_of(tasks, run={"num_steps": 1}, eval=evaluation)
    async with swarm.curriculum(settings) as (one, job):
        assert await swarm.none_waits(), "no learner has started, so there is no version to pin"
        assert any("no learner has started" in waiting.what for waiting in one.waiting())
        await swarm.start_learner()
        first = await swarm.fetch(2)
        assert {ticket.kind for ticket, _ in first} == {EpisodeKind.EVAL}
        assert [ticket.pins for ticket, _ in first] == [{"small": "1-0"}] * 2
        assert await swarm.none_waits()
        assert any("evaluation at step 0: 2 of 2 episodes open" in waiting.what for waiting in one.waiting())
        for ticket, delivery in first:
            await swarm.play(ticket, delivery)
        trained = await swarm.play_groups(2)
        assert {ticket.kind for ticket in trained} == {EpisodeKind.TRAIN}
        assert await swarm.none_waits()
        await swarm.step(trained)
        final = await swarm.fetch(2)
        assert [ticket.pins for ticket, _ in final] == [{"small": str(Version(1, 1))}] * 2
        assert [(ticket.seed, ticket.task) for ticket, _ in final] == [(one.seed, one.task) for one, _ in first]
        assert not job.done()
        for ticket, delivery in final:
            await swarm.play(ticket, delivery)
        async with asyncio.timeout(10):
            await job


async def test_a7_a_finished_run_that_starts_again_ends_at_once_and_goes_on_with_more_steps(swarm, tasks):
    settings = settings_of(tasks, run={"num_steps": 1})
    async with swarm.curriculum(settings) as (_, job):
        await swarm.start_learner()
        await swarm.step(await swarm.play_groups(2))
        await asyncio.wait_for(job, 10)
    async with swarm.curriculum(settings) as (_, job):
        await asyncio.wait_for(job, 10)
    async with swarm.curriculum(settings_of(tasks, run={"num_steps": 2})) as (_, job):
        await swarm.step(await swarm.play_groups(2))
        await asyncio.wait_for(job, 10)
    assert len(await swarm.issues()) == 4


async def test_voided_steps_stop_admission_until_they_are_taken_again(swarm, tasks):
    async with swarm.curriculum(settings_of(tasks)):
        await swarm.start_learner()
        first = await swarm.play_groups(2)
        await swarm.step(first)
        second = await swarm.play_groups(2)
        await swarm.start_learner(incarnation=2, base_step=0)
        assert await swarm.none_waits()
        await swarm.step(first)
        assert await swarm.none_waits()
        await swarm.step(second)
        await swarm.fetch(4)


async def offer(swarm, group, size=2, task=None):
    request = OfferRequest(run=swarm.run, pool="own", group=group, task=task or {"n": 1}, size=size, worker="c")
    return await ask(swarm.bus, subject.offer_service(swarm.run, "own"), request, OfferReply)


def own_pool(**changes):
    models = {"small": {"path": "tiny", "learner": {"batch_groups": 1}, "algorithm": {"min_group": 1}}}
    return SwarmSettings.model_validate({"pools": {"own": changes}, "models": models})


async def test_a_client_gets_the_same_tickets_however_often_it_asks(swarm):
    async with swarm.curriculum(own_pool()):
        await swarm.until(lambda: swarm.records(Stream.LEDGER))
        await asyncio.sleep(0.1)
        one, two = await asyncio.gather(offer(swarm, "g1"), offer(swarm, "g1"))
        assert one.granted and one.tickets == two.tickets
        assert [ticket.id for ticket in one.tickets] == ["own-0.0.0", "own-0.1.0"]
        assert [(ticket.task, ticket.max_offers) for ticket in one.tickets] == [({}, 1)] * 2
        assert (await offer(swarm, "g2")).reason == "full"
        assert await swarm.none_waits("own")
        await swarm.start_learner()
        for ticket in one.tickets:
            await swarm.play(ticket)
        await swarm.step(one.tickets)
        await swarm.until(lambda: _granted(swarm, "g2"))
    async with swarm.curriculum(own_pool()):
        await asyncio.sleep(0.2)
        assert (await offer(swarm, "g1")).tickets == one.tickets


async def test_a_client_s_group_has_a_largest_size_and_is_answered_at_it(swarm):
    async with swarm.curriculum(own_pool()):
        await swarm.until(lambda: swarm.records(Stream.LEDGER))
        await asyncio.sleep(0.1)
        assert (await offer(swarm, "g1", size=1025)).reason == "a group of 1025 is too large: at most 1024 are possible"
        assert len((await offer(swarm, "g1", size=1024, task={"text": "x" * 100_000})).tickets) == 1024


async def _granted(swarm, group):
    return (await offer(swarm, group)).granted


async def test_a_clients_ticket_that_nobody_claims_dies_by_its_deadline(swarm):
    async with swarm.curriculum(own_pool(deadline_seconds=0.2)):
        await swarm.until(lambda: swarm.records(Stream.LEDGER))
        await asyncio.sleep(0.1)
        tickets = (await offer(swarm, "g1", size=1)).tickets
        to = subject.episode(swarm.run, tickets[0].id)
        _, end = await swarm.until(lambda: last(Episode, swarm.bus, swarm.run, Stream.EPISODES, to))
        assert (end.status, end.attempt) == (EndStatus.DEAD, 0)


async def test_a_full_stream_stops_admission_and_room_resumes_it(swarm, tasks):
    sections = {"streams": {"admission_stop_ratio": 0.0}}
    async with swarm.curriculum(settings_of(tasks, **sections)) as (one, _):
        assert await swarm.none_waits()
        assert any("full: nothing is issued" in waiting.what for waiting in one.waiting())
        assert one.metrics()["tickets_unclaimed"] == 0
    async with swarm.curriculum(settings_of(tasks)) as (one, _):
        await swarm.fetch(1)
        assert any("no rollout has claimed" in waiting.what for waiting in one.waiting())


async def test_an_evaluation_pool_without_tasks_is_refused(swarm):
    models = {"small": {"path": "tiny"}}
    settings = SwarmSettings.model_validate({"pools": {"own": {}}, "models": models, "eval": {"pool": "own"}})
    with pytest.raises(ConfigError, match="pool own has no tasks"):
        Curriculum(swarm.bus, swarm.run, settings, SECRET)


async def test_an_evaluation_without_a_trained_model_is_refused(swarm, tasks):
    settings = settings_of(tasks, eval={"pool": "guess"})
    settings = settings.model_copy(update={"eval": settings.eval.model_copy(update={"pool": "look"})})
    look = settings.pools["guess"].model_copy(update={"models": ("judge",)})
    judge = settings.models["small"].model_copy(update={"is_trained": False})
    models, pools = settings.models | {"judge": judge}, settings.pools | {"look": look}
    with pytest.raises(ConfigError, match="has no trained model to evaluate"):
        Curriculum(swarm.bus, swarm.run, settings.model_copy(update={"models": models, "pools": pools}), SECRET)


async def test_what_changes_while_it_works_is_looked_at_again_at_once(swarm, tasks, monkeypatch):
    one = Curriculum(swarm.bus, swarm.run, settings_of(tasks), SECRET, tick_seconds=60.0)
    looks = []

    async def advance():
        looks.append(1)
        one._wake.set()
        return len(looks) == 2

    monkeypatch.setattr(one, "_advance", advance)
    async with asyncio.timeout(5.0):
        await one._lead()


async def test_r5_groups_too_small_to_train_are_refused(swarm, tasks):
    models = {"small": {"path": "tiny"}}
    pools = {"guess": {"tasks": tasks, "group_size": 1}}
    with pytest.raises(
        ConfigError, match=r"pools.guess.group_size is 1, but algorithm.min_group of its models is 2, so every"
    ):
        Curriculum(swarm.bus, swarm.run, SwarmSettings.model_validate({"pools": pools, "models": models}), SECRET)
    async with swarm.curriculum(SwarmSettings.model_validate({"pools": {"own": {}}, "models": models})):
        await asyncio.sleep(0.2)
        assert (await offer(swarm, "g1", size=1)).reason == "a group of 1 trains nobody: at least 2 are needed"


async def test_the_ledger_chain_refuses_a_writer_that_was_overtaken(swarm):
    one, two = LedgerChain(swarm.bus, swarm.run, CURRICULUM), LedgerChain(swarm.bus, swarm.run, CURRICULUM)
    await one.load()
    await two.load()
    record = CurriculumStart(run=swarm.run, incarnation=1, config_digest="c")
    assert await one.append(record) == one.last_sequence
    with pytest.raises(FencedError, match="a newer curriculum has taken over"):
        await two.append(record)
    assert [stored for _, stored in await two.load()] == [record]
    assert await two.append(record) > one.last_sequence

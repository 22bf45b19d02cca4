"""Slots that failed: how long they wait, and what is let through while a pool is down."""

import pytest

from agentjet.config.settings import SwarmSettings
from agentjet.curriculum.course import Course
from agentjet.curriculum.dataset import load_orders
from agentjet.curriculum.reoffer import MAX_PAUSE_SECONDS
from agentjet.curriculum.streak import PROBE_SECONDS
from agentjet.schemas.episode import Fault
from agentjet.schemas.ids import RunId, TicketId, TicketName
from agentjet.schemas.ledger import CurriculumStart, LearnerStart
from agentjet.schemas.score import Outcome, Score

RUN = RunId("run-abc")
GONE = Fault(kind="ConnectionRefusedError", message="tool server")
START = 1000.0


class World:
    """A course whose tickets are all out; `fail` and `succeed` score them at the time `now`."""

    def __init__(self, *, batch_groups=4, pools=("sums",), max_offers=99, pause=1.0, judge="") -> None:
        pool = {"workflow": "agent.py:run", "tasks": "t", "group_size": 2, "max_offers": max_offers}
        pool |= {"reoffer_pause_seconds": pause, "group_judge": judge}
        model = {"path": "tiny", "learner": {"batch_groups": batch_groups}}
        self.settings = SwarmSettings.model_validate({"models": {"m": model}, "pools": dict.fromkeys(pools, pool)})
        self.records, self.scores, self.now = [], [], START
        self.course = self.fresh()
        self.write(CurriculumStart(run=RUN, incarnation=1, config_digest="c"))
        fields = {"base_step": 0, "cursor": 0, "config_digest": "c", "fold_digest": "f"}
        self.write(LearnerStart(run=RUN, model="m", incarnation=1, **fields))
        while (issue := self.course.next_training(self.now)) is not None:
            self.write(issue)

    def fresh(self) -> Course:
        return Course(RUN, self.settings, load_orders(self.settings, lambda _: [{"n": 1}]))

    def write(self, record) -> None:
        self.records.append(record)
        self.course.apply(len(self.records), self.now, record)

    def restart(self) -> None:
        self.course = self.fresh()
        for sequence, record in enumerate(self.records, 1):
            self.course.apply(sequence, START, record)
        for one, time in self.scores:
            self.course.scored(one, time)

    def score(self, ticket: str, outcome: Outcome) -> bool:
        of = self.course.board.find(ticket)
        assert not isinstance(of, str), of
        failed = {"reward": 1.0} if outcome is Outcome.SCORED else {"fault": GONE}
        one = Score(run=RUN, ticket=of.without_task(), attempt=1, outcome=outcome, **failed)
        self.scores.append((one, self.now))
        return self.course.scored(one, self.now)

    def fail(self, *tickets: str, outcome: Outcome = Outcome.INVALID) -> None:
        for ticket in tickets:
            self.score(ticket, outcome)

    def succeed(self, ticket: str) -> bool:
        return self.score(ticket, Outcome.SCORED)

    def playing(self) -> list[TicketId]:
        return [ticket for _, _, ticket in self.course.board.open_slots() if ticket not in self.course.board.paused]

    def take(self, after: float = 0.0) -> list[TicketId]:
        self.now += after
        return [ticket.id for ticket in self.course.reoffers.take(self.now)]

    def fail_all(self) -> None:
        self.fail(*self.playing())


@pytest.mark.parametrize("outcome", [Outcome.INVALID, Outcome.ABORTED])
def test_each_offer_waits_twice_as_long_after_the_failure_before_it_up_to_a_limit(outcome):
    world, pauses = World(batch_groups=99), []
    for offer in range(9):
        world.fail(f"sums-0.0.{offer}", outcome=outcome)
        pauses.append(seconds := world.course.reoffers.seconds_left(world.now))
        assert world.take(seconds - 0.01) == []
        assert world.take(0.01) == [f"sums-0.0.{offer + 1}"]
    assert pauses == [1, 2, 4, 8, 16, 32, MAX_PAUSE_SECONDS, MAX_PAUSE_SECONDS, MAX_PAUSE_SECONDS]


def test_a_pause_can_be_switched_off():
    world = World(pause=0.0)
    world.fail("sums-0.0.0")
    assert world.take() == ["sums-0.0.1"]


def test_a_pause_runs_from_the_failed_score_s_own_time_also_after_a_restart():
    world = World()
    world.fail("sums-0.0.0")
    world.now += 0.6
    world.restart()
    assert world.course.reoffers.seconds_left(world.now) == pytest.approx(0.4)
    assert world.take() == []
    assert world.take(0.4) == ["sums-0.0.1"]


def test_a_ticket_that_somebody_has_claimed_or_ended_is_not_published_again():
    world = World(batch_groups=99)
    world.fail("sums-0.0.0", "sums-0.1.0", "sums-1.0.0")
    world.course.board.claim(TicketId("sums-0.0.1"), 1, START, 1)
    world.course.board.end(TicketId("sums-0.1.1"))
    assert world.take(9.0) == ["sums-1.0.1"]


def test_a_slot_that_settles_waits_no_longer():
    world = World(max_offers=2)
    world.fail("sums-0.0.0", "sums-0.0.1", "sums-0.1.0")
    world.course.board.consume(TicketName.parse("sums-0.1.1").group, "m")
    assert (world.course.board.paused, world.course.reoffers.seconds_left(world.now)) == ({}, None)


def test_while_a_pool_is_down_its_slots_are_offered_one_at_a_time_and_keep_their_last_offers():
    world = World(batch_groups=4, max_offers=3, pause=0.1)
    world.fail_all()
    seen, gaps = [], []
    for _ in range(10):
        gaps.append(seconds := world.course.reoffers.seconds_left(world.now))
        (ticket,) = world.take(seconds)
        assert world.take(100.0) == [], "one at a time"
        world.now -= 100.0
        assert world.course.reoffers.seconds_left(world.now) is None
        seen.append(ticket)
        world.fail(ticket)
    assert gaps == [1, 2, 4, 8, 16, *[PROBE_SECONDS] * 5]
    assert [TicketName.parse(one).offer for one in seen] == [1] * 8 + [2] * 2, "those with the most offers left first"


def test_the_first_success_sets_all_of_them_free():
    world = World(batch_groups=4, max_offers=3)
    world.fail_all()
    (probe,) = world.take(1.0)
    world.restart()
    world.course.board.claim(probe, 1, START, 1)
    assert world.take(99.0) == [], "a probe that was claimed is remembered"
    assert world.succeed(probe), "the curriculum is woken"
    assert len(world.take()) == 7


def test_code_that_was_mended_is_tried_at_once_and_once():
    world = World(batch_groups=4)
    world.fail_all()
    world.course.streaks.changed("sums")
    assert world.course.reoffers.seconds_left(world.now) == 0.0
    (probe,) = world.take()
    world.fail(probe)
    assert world.take() == []


def test_broken_tasks_that_fail_while_others_succeed_are_no_outage():
    world = World(batch_groups=8, max_offers=3)
    good, broken = [], []
    for ticket in world.playing():
        (good if TicketName.parse(ticket).group < "sums-4" else broken).append(ticket)
    for bad, fine in zip(broken, good, strict=True):
        world.fail(bad)
        world.succeed(fine)
    for pause in (1.0, 2.0):
        again = world.take(pause)
        assert len(again) == len(broken), "nobody waits for a probe"
        world.fail(*again)
    assert world.course.board.paused == {}


def test_tasks_that_no_offer_can_help_are_no_outage():
    world = World(batch_groups=4)
    world.fail(*world.playing()[:6], outcome=Outcome.DEAD)
    world.fail("sums-3.0.0", "sums-3.1.0")
    assert len(world.take(1.0)) == 2


def test_a_judged_pool_is_never_down_as_its_successes_have_no_score_yet():
    world = World(batch_groups=4, judge="judge.py:judge")
    world.fail_all()
    assert len(world.take(1.0)) == 8


def test_a_pool_that_is_down_holds_up_no_other_pool():
    world = World(batch_groups=8, pools=("sums", "other"))
    world.fail(*(ticket for ticket in world.playing() if ticket.startswith("sums")))
    world.fail("other-0.0.0")
    assert sorted(ticket[:5] for ticket in world.take(1.0)) == ["other", "sums-"]

import json
from dataclasses import asdict

import pytest
from made_issue import group_issue

from agentjet.accounting.audit import Audit, Difference
from agentjet.schemas.episode import DEADLINE, Fault
from agentjet.schemas.ids import GroupId, RunId, SlotId, TicketId, TicketName
from agentjet.schemas.ledger import (
    CurriculumStart,
    DropReason,
    GroupDrop,
    LearnerStart,
    LearnerStep,
    RunFinish,
)
from agentjet.schemas.score import Outcome, Score
from agentjet.schemas.task import EpisodeKind, Ticket

RUN = RunId("run-abc")


class Log:
    """A run written by hand; each record one second after the one before."""

    def __init__(self):
        self.audit, self.now, self.sequence = Audit(), 100.0, 0
        self.write(CurriculumStart(run=RUN, incarnation=1, config_digest="c"))
        self.write(
            LearnerStart(run=RUN, model="m", incarnation=1, base_step=0, cursor=1, config_digest="c", fold_digest="f")
        )

    def tick(self):
        self.now += 1.0
        return self.now

    def write(self, record):
        self.sequence += 1
        self.audit.ledger(self.sequence, self.tick(), record)

    def issue(self, index, *, kind=EpisodeKind.TRAIN, rank=None, size=2, models=("m",), is_judged=False):
        ranks = {} if rank is None or kind is not EpisodeKind.TRAIN else {"ranks": dict.fromkeys(models, rank)}
        common = {"size": size, "models": models, "deadline_seconds": 1.0, "max_offers": 2, "is_judged": is_judged}
        self.write(group_issue(RUN, index, kind=kind, **common, **ranks))

    def end(self, ticket):
        self.audit.end(TicketId(ticket), self.tick())

    def score(self, text, outcome=Outcome.SCORED, fault=""):
        name = TicketName.parse(text)
        ticket = Ticket(
            run=RUN,
            pool="p",
            group=name.group,
            member=name.member,
            offer=name.offer,
            group_size=2,
            max_offers=2,
            models=("m",),
            seed=1,
            deadline_seconds=1.0,
        )
        score = Score(
            run=RUN, ticket=ticket, attempt=1, outcome=outcome, fault=Fault(kind=fault, message="") if fault else None
        )
        self.audit.score(score, self.tick())

    def sample(self, slot, *, is_sample=True):
        self.audit.sample("m", SlotId(slot), self.tick(), is_sample=is_sample)

    def step(self, number, members, groups):
        self.write(
            LearnerStep(
                run=RUN,
                model="m",
                incarnation=1,
                step=number,
                cursor=1,
                members=tuple(members),
                groups=tuple(GroupId(group) for group in groups),
                digest="d",
            )
        )

    def whole(self, index):
        """A group that went all the way to its samples."""
        self.issue(index)
        for member in (0, 1):
            self.end(f"p-{index}.{member}.0")
            self.score(f"p-{index}.{member}.0")
            self.sample(f"p-{index}.{member}")

    def report(self):
        return self.audit.report(self.now)


def test_a_run_that_is_through_has_no_differences():
    log = Log()
    log.whole(0)
    log.whole(1)
    log.step(1, ["p-0.0", "p-0.1"], ["p-0"])
    log.write(GroupDrop(run=RUN, model="m", incarnation=1, group=GroupId("p-1"), rank=1, reason=DropReason.CONSTANT))
    report = log.report()
    assert (report.groups, report.issued, report.ended, report.scored, report.sampled) == (2, 4, 4, 4, 4)
    assert (report.settled, report.trained, report.dropped, report.lost, report.duplicated) == (4, 2, 1, 0, 0)
    differences = (report.issued_not_ended, report.ended_not_scored)
    differences += (report.scored_not_sampled, report.sampled_not_settled)
    assert differences == (Difference(),) * 4
    assert report.states == {"scored": 4}
    assert report.counts()["settled"] == 4
    assert json.loads(json.dumps(asdict(report)))["lost"] == 0


def test_p08_members_that_wait_for_their_groups_judge_are_told_from_ends_that_nobody_scores():
    log = Log()
    for index, is_judged in enumerate((True, True, False)):
        log.issue(index, is_judged=is_judged)
        log.end(f"p-{index}.0.0")
    log.end("p-1.1.0")
    report = log.report()
    assert (report.ended_not_scored.count, report.unjudged) == (4, 1), "p-1 is complete: its judge has to be heard"
    log.end("p-0.1.0")
    log.score("p-0.1.0", Outcome.INVALID)
    assert log.report().unjudged == 1, "the second offer of p-0.1 is out"
    log.end("p-0.1.1")
    log.score("p-0.1.1", Outcome.DEAD)
    assert (log.report().unjudged, log.report().lost) == (0, 0)


def test_each_difference_names_its_oldest():
    log = Log()
    log.issue(0, size=5)
    issued = log.now
    log.end("p-0.1.0")
    ended = log.now
    log.end("p-0.2.0")
    log.score("p-0.2.0")
    scored = log.now
    log.end("p-0.3.0")
    log.score("p-0.3.0")
    log.sample("p-0.3")
    sampled = log.now
    log.audit.claim(TicketId("p-0.0.0"))
    report = log.report()
    assert report.issued_not_ended == Difference(2, "p-0.0.0", log.now - issued)
    assert report.ended_not_scored == Difference(1, "p-0.1.0", log.now - ended)
    assert report.scored_not_sampled == Difference(1, "m p-0.2", log.now - scored)
    assert report.sampled_not_settled == Difference(1, "m p-0.3", log.now - sampled)
    assert report.states == {"claimed": 1, "ended": 1, "issued": 1, "scored": 2}
    assert report.settled == 0


def test_a_failed_offer_is_followed_by_the_next_one_and_a_dead_slot_has_no_other():
    log = Log()
    log.issue(0)
    log.end("p-0.0.0")
    log.score("p-0.0.0", Outcome.INVALID)
    log.end("p-0.1.0")
    log.score("p-0.1.0", Outcome.DEAD)
    report = log.report()
    assert report.states == {"dead": 1, "issued": 1, "reoffered": 1}
    assert (report.issued, report.issued_not_ended.oldest_id) == (3, "p-0.0.1")


def test_a_settled_slot_without_record_is_lost():
    log = Log()
    log.issue(0)
    log.sample("p-0.0")
    log.step(1, ["p-0.0"], ["p-0"])
    report = log.report()
    assert (report.lost, report.problems) == (1, ("lost: m p-0.1",))


def test_a_sample_that_its_groups_step_left_out_is_lost():
    log = Log()
    log.whole(0)
    log.step(1, ["p-0.0"], ["p-0"])
    assert log.report().problems == ("lost: m p-0.1",)


def test_a_slot_in_two_steps_is_duplicated_unless_one_was_voided():
    log = Log()
    log.whole(0)
    log.step(1, ["p-0.0", "p-0.1"], ["p-0"])
    log.step(2, ["p-0.0"], ["p-0"])
    assert (log.report().duplicated, log.report().problems) == (1, ("duplicated: m p-0.0",))
    log.write(
        LearnerStart(run=RUN, model="m", incarnation=2, base_step=1, cursor=1, config_digest="c", fold_digest="f")
    )
    assert log.report().duplicated == 0


def test_evaluations_settle_at_their_scores():
    log = Log()
    log.issue(0, kind=EpisodeKind.EVAL)
    log.end("p-0.0.0")
    log.score("p-0.0.0")
    report = log.report()
    assert (report.settled, report.scored_not_sampled.count, report.issued_not_ended.count) == (1, 0, 1)


def test_what_a_purge_took_away_is_not_missing():
    log = Log()
    log.issue(0)
    log.step(1, ["p-0.0", "p-0.1"], ["p-0"])
    assert (log.report().lost, log.report().issued_not_ended.count) == (2, 2)
    for stream in ("EPISODES", "SCORES", "SAMPLES"):
        log.audit.purged(stream)
    report = log.report()
    assert (report.lost, report.issued_not_ended.count, report.ended, report.settled) == (0, 0, 2, 2)


def test_what_differs_for_good_is_counted():
    log = Log()
    log.whole(0)
    log.step(1, ["p-0.0", "p-0.1"], ["p-0"])
    log.issue(1)
    for ticket, outcome in (("p-1.0.0", Outcome.INVALID), ("p-1.0.1", Outcome.SCORED)):
        log.end(ticket)
        log.score(ticket, outcome)
    log.end("p-1.1.0")
    log.score("p-1.1.0", Outcome.DEAD, fault=DEADLINE)
    log.sample("p-1.0")
    log.sample("p-1.1", is_sample=False)
    log.write(GroupDrop(run=RUN, model="m", incarnation=1, group=GroupId("p-1"), rank=1, reason=DropReason.CONSTANT))
    log.issue(2, kind=EpisodeKind.EVAL, size=1)
    for ticket, outcome in (("p-2.0.0", Outcome.INVALID), ("p-2.0.1", Outcome.SCORED)):
        log.end(ticket)
        log.score(ticket, outcome)
    report = log.report()
    assert (report.issued, report.ended, report.scored, report.failed) == (7, 7, 4, 3)
    assert (report.sampled, report.settled) == (4, 5)
    assert (report.buried, report.reoffered, report.evaluated, report.untrained) == (1, 2, 1, 2)
    assert report.sampled_slots == 4
    assert report.issued_not_ended == Difference()
    assert report.sampled == report.scored + report.failed - report.evaluated - report.reoffered
    assert report.trained == report.sampled - report.untrained


def test_a_purge_changes_no_count():
    log = Log()
    log.whole(0)
    log.step(1, ["p-0.0", "p-0.1"], ["p-0"])
    before = log.report()
    purged = Log()
    purged.issue(0)
    purged.step(1, ["p-0.0", "p-0.1"], ["p-0"])
    for stream in ("EPISODES", "SCORES", "SAMPLES"):
        purged.audit.purged(stream)
    assert purged.report().counts() == before.counts()


def test_an_outcome_proves_an_end_that_was_purged_in_between():
    log = Log()
    log.issue(0, size=1)
    log.score("p-0.0.0", Outcome.DEAD)
    assert (log.report().ended, log.report().issued_not_ended.count, log.report().buried) == (1, 0, 0)


@pytest.mark.parametrize("settles", ["training goes on", "the run ends"])
def test_an_evaluation_whose_scores_were_purged_has_settled_once_the_ledger_says_so(settles):
    log = Log()
    log.issue(0, kind=EpisodeKind.EVAL)
    for stream in ("EPISODES", "SCORES"):
        log.audit.purged(stream)
    assert (log.report().settled, log.report().issued_not_ended.count) == (0, 2)
    if settles == "the run ends":
        log.write(RunFinish(run=RUN, reason="done"))
    else:
        log.issue(1, rank=0)
    report = log.report()
    assert (report.settled, report.evaluated) == (2, 2)
    assert report.issued_not_ended.count == (0 if settles == "the run ends" else 2)
    assert "p-0" not in report.issued_not_ended.oldest_id


def test_another_model_s_training_settles_no_evaluation():
    log = Log()
    log.issue(0, kind=EpisodeKind.EVAL)
    for stream in ("EPISODES", "SCORES"):
        log.audit.purged(stream)
    log.issue(1, rank=0, models=("other",))
    assert log.report().issued_not_ended.oldest_id == "p-0.0.0"

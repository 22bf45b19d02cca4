import asyncio
import math
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_issue import group_issue

from agentjet.bus.protocol import StoredMessage
from agentjet.schemas.codec import encode
from agentjet.schemas.ids import GroupId, RunId, group_id
from agentjet.schemas.ledger import (
    CurriculumStart,
    DropReason,
    GroupDrop,
    GroupIssue,
    LearnerStart,
    LearnerStep,
    RunFinish,
)
from agentjet.schemas.record import Record
from agentjet.schemas.score import Outcome, Score
from agentjet.schemas.subject import Stream
from agentjet.schemas.task import EpisodeKind, Ticket
from agentjet.ui.history import RunHistory, catch_up, follow

RUN = RunId("run-abcdef")


def start(incarnation: int = 1, base_step: int = 0, model: str = "m") -> LearnerStart:
    return LearnerStart(
        run=RUN,
        model=model,
        incarnation=incarnation,
        base_step=base_step,
        cursor=0,
        config_digest="c",
        fold_digest="f",
    )


def step(number: int, incarnation: int = 1, model: str = "m", **metrics: float) -> LearnerStep:
    return LearnerStep(
        run=RUN,
        model=model,
        incarnation=incarnation,
        step=number,
        cursor=0,
        members=("train-0.0", "train-0.1"),
        groups=(GroupId("train-0"),),
        digest="d",
        metrics=metrics,
    )


def issue(index: int, *, kind: EpisodeKind = EpisodeKind.EVAL, eval_step: int = 0, pin: str = "1-0") -> GroupIssue:
    return group_issue(RUN, index, pool="eval", kind=kind, ranks={}, pins={"m": pin}, eval_step=eval_step)


def score(
    index: int, member: int, reward: float | None, *, kind: EpisodeKind = EpisodeKind.EVAL, **metrics: float
) -> Score:
    ticket = Ticket(
        run=RUN,
        pool="eval",
        group=group_id("eval", index),
        member=member,
        group_size=2,
        max_offers=1,
        kind=kind,
        models=("m",),
        seed=1,
        deadline_seconds=60.0,
    )
    outcome = Outcome.INVALID if reward is None else Outcome.SCORED
    return Score(run=RUN, ticket=ticket, attempt=1, outcome=outcome, reward=reward, metrics=metrics)


def history_of(stream: Stream, *records: Record | None) -> RunHistory:
    history = RunHistory()
    for sequence, record in enumerate(records, 1):
        history.apply(stream, sequence, 100.0 + sequence, record)
    return history


def test_an_empty_history_has_nothing_to_show():
    history = RunHistory()
    assert (history.models, history.evals, history.counts.issued, history.finish_reason) == ({}, [], 0, None)


def test_steps_after_the_base_of_a_new_learner_are_void():
    history = history_of(Stream.LEDGER, start(), step(1), step(2), step(3), start(2, 1), step(2, 2, reward_mean=0.5))
    assert [(point.step, point.sequence) for point in history.models["m"].steps] == [(1, 2), (2, 6)]
    assert history.counts.settled == 4


def test_models_have_steps_of_their_own():
    history = history_of(Stream.LEDGER, *(start(model=name) for name in "ab"), step(1, model="a"), step(1, model="b"))
    history.apply(Stream.LEDGER, 5, 1.0, start(2, 0, model="a"))
    assert [model.step for model in history.models.values()] == [0, 1]


def test_a_record_that_can_not_follow_is_left_out():
    history = history_of(Stream.LEDGER, start(), step(1), step(3), step(2, 9), step(2))
    assert (history.models["m"].step, history.num_unreadable) == (2, 2)


def test_a_series_leaves_out_what_is_absent_or_not_finite():
    history = history_of(
        Stream.LEDGER, start(), step(1, loss=math.nan), step(2), step(3, loss=2.0), step(4, loss=math.inf)
    )
    assert history.models["m"].series("loss") == [(3, 2.0)]
    assert history.models["m"].latest("loss") == 2.0


@given(st.lists(st.integers(1, 6), max_size=30))
def test_records_applied_again_change_nothing(order: list[int]):
    records = [start(), step(1), step(2), start(2, 1), step(2, 2), step(3, 2)]
    history = history_of(Stream.LEDGER, *records)
    for sequence in order:
        history.apply(Stream.LEDGER, sequence, 0.0, records[sequence - 1])
        history.apply(Stream.EPISODES, sequence, 0.0, None)
    assert [point.sequence for point in history.models["m"].steps] == [2, 5, 6]
    assert (history.num_unreadable, history.counts.ended <= len(set(order))) == (0, True)


@pytest.mark.parametrize("ledger_first", [True, False])
def test_an_evaluation_joins_scores_and_issue_in_any_order(ledger_first: bool):
    history = RunHistory()
    streams: list[tuple[Stream, list[Record]]] = [
        (Stream.LEDGER, [issue(0), issue(1)]),
        (Stream.SCORES, [score(0, 0, 1.0, win=1.0), score(0, 1, 0.0, win=0.0), score(1, 0, 0.5), score(1, 1, None)]),
    ]
    for stream, records in streams if ledger_first else reversed(streams):
        for sequence, record in enumerate(records, 1):
            history.apply(stream, sequence, 1.0, record)
    (point,) = history.evals
    assert (point.step, point.num_slots, point.num_closed, point.num_scored) == (0, 4, 4, 3)
    assert (point.reward_mean, point.metrics, point.is_complete) == (0.5, {"win": 0.5}, True)


def test_an_invalid_evaluation_episode_is_no_zero():
    history = history_of(Stream.LEDGER, issue(0))
    history.apply(Stream.SCORES, 1, 1.0, score(0, 0, None))
    (point,) = history.evals
    assert (point.reward_mean, point.num_closed, point.is_complete) == (None, 1, False)


def test_an_evaluation_repeated_after_a_resume_replaces_the_first():
    history = history_of(
        Stream.LEDGER, issue(0, eval_step=5, pin="1-5"), issue(1, eval_step=5, pin="2-5"), issue(2, eval_step=0)
    )
    history.apply(Stream.SCORES, 1, 1.0, score(0, 0, 0.0))
    history.apply(Stream.SCORES, 2, 1.0, score(1, 0, 1.0))
    assert [(point.step, point.num_slots, point.reward_mean) for point in history.evals] == [(0, 2, None), (5, 2, 1.0)]


def test_training_scores_are_counted_but_are_no_evaluation():
    history = history_of(Stream.LEDGER, issue(0, kind=EpisodeKind.TRAIN, eval_step=-1))
    history.apply(Stream.SCORES, 1, 1.0, score(0, 0, 1.0, kind=EpisodeKind.TRAIN))
    history.apply(Stream.EPISODES, 9, 1.0, None)
    assert history.evals == []
    assert (history.counts.issued, history.counts.ended, history.counts.scored) == (2, 1, 1)


def test_failures_and_the_tickets_that_follow_them_are_counted():
    history = history_of(Stream.LEDGER, issue(0))
    lost = score(0, 0, None)
    history.apply(
        Stream.SCORES, 1, 1.0, lost.model_copy(update={"ticket": lost.ticket.model_copy(update={"max_offers": 2})})
    )
    history.apply(Stream.SCORES, 2, 1.0, score(0, 1, None))
    assert (history.counts.issued, history.counts.scored, history.counts.failed) == (3, 0, 2)


def test_drops_and_the_end_of_the_run_are_kept():
    drop = GroupDrop(run=RUN, model="m", incarnation=1, group=GroupId("train-0"), rank=0, reason=DropReason.CONSTANT)
    history = history_of(Stream.LEDGER, start(), drop, RunFinish(run=RUN, reason="all steps are done"))
    assert (history.models["m"].num_dropped_groups, history.finish_reason) == (1, "all steps are done")
    history.apply(Stream.LEDGER, 4, 1.0, CurriculumStart(run=RUN, incarnation=2, config_digest="c"))
    assert history.finish_reason is None


class LogBus:
    """Reads of a fixed log; `tail` waits for ever at its end, as a real one."""

    def __init__(self, log: dict[str, list[Record | bytes]]) -> None:
        self.log = log

    async def scan(self, stream: str, subject: str = ">", *, start: int = 1) -> AsyncIterator[StoredMessage]:
        for sequence, record in enumerate(self.log.get(stream.rsplit("_", 1)[1], ()), 1):
            headers, body = ({}, record) if isinstance(record, bytes) else encode(record)
            if sequence >= start:
                yield StoredMessage(subject, body, headers, sequence, float(sequence))

    async def tail(self, stream: str, subject: str = ">", *, start: int = 1) -> AsyncIterator[StoredMessage]:
        async for message in self.scan(stream, subject, start=start):
            yield message
        await asyncio.Event().wait()


def log_bus() -> Any:
    return LogBus(
        {
            "LEDGER": [start(), b"torn", step(1, reward_mean=0.25), issue(0)],
            "SCORES": [score(0, 0, 1.0), score(0, 1, 0.5)],
            "EPISODES": [b"", b""],
            "SAMPLES": [b""],
        }
    )


async def test_catching_up_reads_what_the_log_has_more_and_counts_what_it_can_not_read():
    bus, history = log_bus(), RunHistory()
    whole = bus.log["LEDGER"]
    bus.log["LEDGER"] = whole[:2]
    await catch_up(bus, RUN, history)
    assert (history.num_unreadable, history.models["m"].step) == (1, 0)
    bus.log["LEDGER"] = whole
    await catch_up(bus, RUN, history)
    assert (history.num_unreadable, history.models["m"].step, history.evals[0].reward_mean) == (1, 1, 0.75)
    assert (history.counts.ended, history.counts.sampled, history.next_sequence(Stream.LEDGER)) == (2, 1, 5)


async def test_follow_reports_each_record_and_ends_when_cancelled():
    history, changes = RunHistory(), asyncio.Semaphore(0)
    async with asyncio.timeout(5):
        task = asyncio.create_task(follow(log_bus(), RUN, history, changes.release))
        for _ in range(9):
            await changes.acquire()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert (history.counts.scored, history.num_unreadable) == (2, 1)

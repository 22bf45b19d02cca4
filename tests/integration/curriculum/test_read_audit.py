import asyncio

import pytest
from made_issue import group_issue

from agentjet.bus.ledger import LedgerChain
from agentjet.bus.memory import MemoryBus
from agentjet.bus.record import put, stream_specs
from agentjet.curriculum.audit import read_audit
from agentjet.curriculum.board import tickets_of
from agentjet.schemas import subject
from agentjet.schemas.claim import Claim
from agentjet.schemas.episode import EndStatus, Episode
from agentjet.schemas.ids import RunId
from agentjet.schemas.ledger import CurriculumStart, LearnerStart, LearnerStep
from agentjet.schemas.sample import MergeReport, Sample, Tombstone, TombstoneReason
from agentjet.schemas.score import Outcome, Score
from agentjet.schemas.subject import CURRICULUM, Stream


@pytest.fixture
async def run(bus, unique):
    one = RunId(unique)
    for spec in stream_specs(one, max_bytes=64 * 1024 * 1024):
        await bus.ensure_stream(spec)
    yield one
    for name in await bus.stream_names(subject.stream_prefix(one)):
        await bus.delete_stream(name)


def issue_of(run):
    return group_issue(run, size=3, deadline_seconds=9.0)


class Growing(MemoryBus):
    """A bus on which an episode is played, from issue to sample, before each stream is read."""

    def __init__(self, run) -> None:
        super().__init__()
        self.run, self.chain, self.num_groups = run, LedgerChain(self, run, CURRICULUM), 0

    async def scan(self, stream, subject=">", *, start=1, end=None):
        await self.play()
        async for message in super().scan(stream, subject, start=start, end=end):
            yield message

    async def play(self) -> None:
        run, index = self.run, self.num_groups
        self.num_groups += 1
        issue = issue_of(run).model_copy(update={"index": index, "position": index, "ranks": {"m": index}, "size": 1})
        await self.chain.append(issue)
        (ticket,) = tickets_of(run, issue, {})
        episode = Episode(run=run, ticket=ticket, attempt=1, status=EndStatus.COMPLETED)
        await put(self, run, Stream.EPISODES, subject.episode(run, ticket.id), episode)
        score = Score(run=run, ticket=ticket, attempt=1, outcome=Outcome.DEAD)
        await put(self, run, Stream.SCORES, subject.score(run, ticket.id), score)
        tombstone = Tombstone(
            run=run,
            model="m",
            group=ticket.group,
            rank=index,
            group_size=1,
            ticket=ticket.id,
            member=0,
            reason=TombstoneReason.DEAD,
        )
        await put(self, run, Stream.SAMPLES, subject.sample(run, "m", tombstone.slot), tombstone)


async def test_a_run_in_progress_shows_no_impossible_order():
    run = RunId("grow-abcdef")
    bus = Growing(run)
    for spec in stream_specs(run, max_bytes=64 * 1024 * 1024):
        await bus.ensure_stream(spec)
    await bus.chain.append(CurriculumStart(run=run, incarnation=1, config_digest="c"))
    report = await read_audit(bus, run)
    assert report.issued >= report.ended >= report.scored + report.failed >= report.sampled >= report.settled
    assert 0 < report.sampled < report.issued
    assert report.lost == report.buried == 0


async def test_ages_count_to_now_and_not_to_the_newest_record(bus, run):
    await write_run(bus, run)
    await asyncio.sleep(0.2)
    assert 0.2 <= (await read_audit(bus, run)).issued_not_ended.oldest_age_seconds < 60


async def write_run(bus, run):
    """One group of three: a sample, a tombstone, and a ticket that is still claimed; the learner waits."""
    chain = LedgerChain(bus, run, CURRICULUM)
    await chain.append(CurriculumStart(run=run, incarnation=1, config_digest="c"))
    issue = issue_of(run)
    await chain.append(issue)
    tickets = tickets_of(run, issue, {})
    for ticket in tickets:
        to = subject.claim(run, ticket.id)
        await put(bus, run, Stream.CLAIMS, to, Claim(ticket=ticket, worker="w"))
    for ticket, outcome in zip(tickets, (Outcome.SCORED, Outcome.DEAD), strict=False):
        episode = Episode(run=run, ticket=ticket, attempt=1, status=EndStatus.COMPLETED, result="x" * 3_000_000)
        await put(bus, run, Stream.EPISODES, subject.episode(run, ticket.id), episode)
        score = Score(run=run, ticket=ticket, attempt=1, outcome=outcome)
        await put(bus, run, Stream.SCORES, subject.score(run, ticket.id), score)
    common = {"run": run, "model": "m", "group": tickets[0].group, "rank": 0, "group_size": 3}
    empty = {"segments": (), "calls": (), "term_segment": (), "term_offset": (), "term_logprob": ()}
    report = MergeReport(num_calls=0, num_branches=0, num_row_tokens=0, num_tree_tokens=0)
    sample = Sample(**common, **empty, ticket=tickets[0].id, member=0, reward=1.0, report=report)
    tombstone = Tombstone(**common, ticket=tickets[1].id, member=1, reason=TombstoneReason.DEAD)
    for record in (sample, tombstone):
        await put(bus, run, Stream.SAMPLES, subject.sample(run, "m", record.slot), record)


async def test_the_audit_reads_what_the_streams_hold(bus, run):
    await write_run(bus, run)
    report = await read_audit(bus, run)
    assert (report.issued, report.ended, report.scored, report.failed) == (3, 2, 1, 1)
    assert (report.sampled, report.settled) == (2, 0)
    assert (report.lost, report.duplicated, report.problems) == (0, 0, ())
    assert (report.issued_not_ended.count, report.issued_not_ended.oldest_id) == (1, "p-0.2.0")
    assert (report.ended_not_scored.count, report.scored_not_sampled.count) == (0, 0)
    assert report.sampled_not_settled.oldest_id == "m p-0.0"
    assert report.states == {"claimed": 1, "dead": 1, "scored": 1}


async def test_a_step_without_a_sample_shows_as_lost(bus, run):
    await write_run(bus, run)
    learner = LedgerChain(bus, run, "m")
    start = LearnerStart(run=run, model="m", incarnation=1, base_step=0, cursor=1, config_digest="c", fold_digest="f")
    await learner.append(start)
    step = LearnerStep(
        run=run, model="m", incarnation=1, step=1, cursor=1, members=("p-0.0",), groups=("p-0",), digest="d"
    )
    await learner.append(step)
    report = await read_audit(bus, run)
    assert (report.settled, report.lost, report.problems) == (3, 1, ("lost: m p-0.2",))

"""Burying: which tickets end by their deadline, and which get another chance first."""

import pytest
from made_issue import group_issue

from agentjet.bus.memory import MemoryBus
from agentjet.bus.record import last, stream_specs
from agentjet.curriculum.board import MAX_CLAIMS, Board, tickets_of
from agentjet.curriculum.sweep import Sweep
from agentjet.schemas import subject
from agentjet.schemas.episode import DEADLINE, EndStatus, Episode
from agentjet.schemas.ids import RunId
from agentjet.schemas.subject import Stream

RUN = RunId("run-aaaaaa")
DEADLINE_SECONDS = 60.0


class Clock:
    """JetStream time, set by hand."""

    def __init__(self, time: float) -> None:
        self.time = time

    def now(self) -> float:
        return self.time


class World:
    """One group of one slot, claimed at 0 for the `number`-th time, and a curriculum that starts at `start`."""

    def __init__(self, *, start: float, number: int = 1, client_group: str = "", why_hopeless: str = "") -> None:
        self.why_hopeless = why_hopeless
        self.bus, self.clock = MemoryBus(), Clock(start)
        issue = group_issue(RUN, size=1, deadline_seconds=DEADLINE_SECONDS, max_offers=2, client_group=client_group)
        self.board = Board(RUN, lambda _: {})
        self.board.issue(issue, 0.0)
        (self.ticket,) = tickets_of(RUN, issue, {})
        self.board.claim(self.ticket.id, 7, DEADLINE_SECONDS, number)
        self.sweep = Sweep(self.bus, RUN, self.board, self.clock, lambda _: self.why_hopeless or None)  # type: ignore[arg-type]

    async def is_buried_at(self, time: float) -> bool:
        self.clock.time = time
        await self.sweep.bury()
        found = await last(Episode, self.bus, RUN, Stream.EPISODES, subject.episode(RUN, self.ticket.id))
        if found is not None:
            end = found[1]
            assert (end.status, end.attempt) == (EndStatus.DEAD, 7)
            assert end.fault is not None and end.fault.kind == DEADLINE
        return found is not None


async def world_of(**how) -> World:
    world = World(**how)
    for spec in stream_specs(RUN, max_bytes=2**30):
        await world.bus.ensure_stream(spec)
    return world


async def test_a_ticket_is_buried_at_its_deadline_and_not_before():
    world = await world_of(start=1.0)
    assert not await world.is_buried_at(DEADLINE_SECONDS - 1.0)
    assert await world.is_buried_at(DEADLINE_SECONDS + 1.0)
    assert world.sweep.num_buried == 1


async def test_a_deadline_that_passed_while_the_run_was_stopped_counts_from_its_next_start():
    morning = 40_000.0
    world = await world_of(start=morning)
    assert not await world.is_buried_at(morning)
    assert not await world.is_buried_at(morning + DEADLINE_SECONDS - 1.0)
    world.board.claim(world.ticket.id, 7, morning + 2 * DEADLINE_SECONDS, 2)
    assert not await world.is_buried_at(morning + DEADLINE_SECONDS + 1.0), "it was claimed again"
    assert await world.is_buried_at(morning + 2 * DEADLINE_SECONDS + 1.0)


async def test_nobody_takes_it_again_and_it_is_buried_all_the_same():
    world = await world_of(start=40_000.0)
    assert not await world.is_buried_at(40_000.0)
    assert await world.is_buried_at(40_000.0 + DEADLINE_SECONDS + 1.0)


@pytest.mark.parametrize("how", [{"number": MAX_CLAIMS}, {"client_group": "own"}])
async def test_a_ticket_that_nobody_can_claim_any_more_is_buried_at_once(how):
    world = await world_of(start=40_000.0, **how)
    assert await world.is_buried_at(40_000.0)


async def test_a_ticket_that_nobody_can_play_is_buried_at_once_and_not_published_again():
    world = await world_of(start=1.0)
    await world.sweep.publish_missing()
    assert world.sweep.num_published_again == 1
    world = await world_of(start=1.0)
    assert not await world.is_buried_at(2.0)
    world.why_hopeless = "its weights are gone"
    await world.sweep.publish_missing()
    assert world.sweep.num_published_again == 0
    assert await world.is_buried_at(3.0)

"""Any order of arrival, any repetition, any crash, two stages at once: one judgement, each member scored once."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from judged_group import GROUP, RUN, end

from agentjet.bus.memory import MemoryBus
from agentjet.bus.protocol import StoredMessage
from agentjet.bus.record import put, read, stream_specs
from agentjet.config.settings import ModelSettings, PoolSettings, SwarmSettings
from agentjet.errors import RewardError
from agentjet.reward import Reward
from agentjet.reward.judge import ADAPTER, verdicts
from agentjet.schemas import subject
from agentjet.schemas.episode import PROMPT_TOO_LONG, EndStatus, Episode
from agentjet.schemas.judgement import Judgement
from agentjet.schemas.score import Outcome, Score
from agentjet.schemas.subject import Stream, stream_name
from agentjet.workers.pool import Done, Failure

JUDGE = "judge.py:judge"
MAX_CRASHES = 2


class KilledError(Exception):
    """The stage dies here."""


class DyingBus(MemoryBus):
    """Kills whoever uses it before or after one of its next steps."""

    def __init__(self) -> None:
        super().__init__()
        self.dies_in: int | None = None

    def _step(self) -> None:
        if self.dies_in is not None:
            self.dies_in -= 1
            if self.dies_in < 0:
                raise KilledError

    async def publish(self, subject: str, payload: bytes, **options) -> int:
        self._step()
        sequence = await super().publish(subject, payload, **options)
        self._step()
        return sequence

    async def last_many(self, stream: str, subjects: Sequence[str]):
        self._step()
        return await super().last_many(stream, subjects)


@dataclass
class FakePool:
    """A judge without a process; each has an opinion of its own, so a second judging could be told from the first."""

    opinion: float
    failures: list[bool]
    num_asked: int = 0

    async def run(self, payload: dict, *, timeout_seconds: float) -> Done:
        self.num_asked += 1
        await asyncio.sleep(0)
        if self.failures and self.failures.pop():
            return Done(None, Failure("ValueError", "no idea"), "", 0.0)
        given = [self.opinion + self.num_asked + one["member"] / 8 for one in payload["episodes"]]
        return Done(verdicts(given, [{}] * len(given)), None, "", 0.0)


@dataclass
class World:
    """Two reward stages, and a consumer that hands out what was not acknowledged."""

    plans: list[list[Episode]]
    """Each member's ends, in order of their offers."""
    failures: list[bool]
    bus: DyingBus = field(default_factory=DyingBus)
    acknowledged: set[int] = field(default_factory=set)
    crashes: Counter = field(default_factory=Counter)

    async def begin(self) -> None:
        for spec in stream_specs(RUN, max_bytes=1 << 30):
            await self.bus.ensure_stream(spec)
        pools = {"p": PoolSettings(group_judge=JUDGE)}
        swarm = SwarmSettings(models={"m": ModelSettings(path="tiny")}, pools=pools)
        self.stages = [Reward(self.bus, RUN, swarm) for _ in range(2)]
        self.pools = [FakePool(opinion, self.failures) for opinion in (100.0, 200.0)]
        for stage, pool in zip(self.stages, self.pools, strict=True):
            stage._functions[ADAPTER, JUDGE] = pool  # type: ignore[assignment]

    async def store(self, member: int) -> None:
        if self.plans[member]:
            one = self.plans[member].pop(0)
            await put(self.bus, RUN, Stream.EPISODES, subject.episode(RUN, one.ticket.id), one, expected=0)

    async def ends(self) -> list[StoredMessage]:
        return [message async for message in self.bus.scan(stream_name(RUN, Stream.EPISODES))]

    async def handle(self, message: StoredMessage, who: int, dies_in: int | None = None) -> None:
        """As `consume` does: acknowledged only when the handler returns, poison after so many crashes."""
        self.bus.dies_in = dies_in
        with contextlib.suppress(KilledError):
            if await self._settled(message, self.stages[who]):
                self.acknowledged.add(message.sequence)
        self.bus.dies_in = None

    async def _settled(self, message: StoredMessage, stage: Reward) -> bool:
        try:
            await stage._handle(message)
        except RewardError as error:
            self.crashes[message.sequence] += 1
            if self.crashes[message.sequence] < MAX_CRASHES:
                return False
            await stage._poison(message, error)
        return True

    async def drain(self) -> None:
        """Everybody ends, and what is not acknowledged is handed out until all is."""
        while True:
            for member in range(len(self.plans)):
                await self.store(member)
            waiting = [one for one in await self.ends() if one.sequence not in self.acknowledged]
            if not waiting and not any(self.plans):
                return
            for one in reversed(waiting):
                await self.handle(one, 0)

    async def records(self, stream: Stream) -> list:
        return [await read(self.bus, RUN, stream, one) async for one in self.bus.scan(stream_name(RUN, stream))]

    async def check(self, before: list[Judgement]) -> list[Judgement]:
        """What holds at any time: one judgement, for ever, and no score of a completed end but from it."""
        judgements = await self.records(Stream.JUDGEMENTS)
        assert len(judgements) <= 1
        assert not before or judgements == before
        ends = {one.ticket.id: one for one in await self.records(Stream.EPISODES)}
        scores = await self.records(Stream.SCORES)
        assert max(Counter(one.ticket.id for one in scores).values(), default=1) == 1
        verdicts = {one.ticket: one.reward for judgement in judgements for one in judgement.verdicts}
        for score in scores:
            if ends[score.ticket.id].status is EndStatus.COMPLETED:
                assert score.reward == verdicts[score.ticket.id]
                assert score.outcome is (Outcome.DEAD if score.reward is None else Outcome.SCORED)
        return judgements


FAILURES = st.lists(st.sampled_from([EndStatus.FAILED, EndStatus.ABORTED]), max_size=3)
LAST = st.sampled_from([EndStatus.COMPLETED, EndStatus.COMPLETED, EndStatus.DEAD, None])


@st.composite
def plans(draw: st.DrawFn) -> list[list[Episode]]:
    size = draw(st.integers(1, 4))
    found: list[list[Episode]] = []
    for member in range(size):
        failed, final = draw(FAILURES), draw(LAST)
        ends = [end(member, status, offer=offer, size=size) for offer, status in enumerate(failed)]
        if len(failed) < 3:
            too_long = end(member, EndStatus.FAILED, offer=len(failed), size=size, kind=PROMPT_TOO_LONG)
            ends.append(end(member, final, offer=len(failed), size=size) if final else too_long)
        found.append(ends)
    return found


STEP = st.one_of(
    st.tuples(st.just("store"), st.integers(0, 3)),
    st.tuples(st.just("handle"), st.integers(0, 20), st.integers(0, 1), st.none() | st.integers(0, 12)),
    st.tuples(st.just("both"), st.integers(0, 20)),
)


@settings(max_examples=150)
@given(plans(), st.lists(STEP, max_size=25), st.lists(st.booleans(), max_size=3))
def test_p08_whatever_happens_a_group_has_one_judgement_and_each_member_one_score_from_it(group, steps, failures):
    asyncio.run(_play(World(group, failures), steps))


async def _play(world: World, steps: list[tuple]) -> None:
    await world.begin()
    num_completed = sum(one.status is EndStatus.COMPLETED for plan in world.plans for one in plan)
    total = sum(map(len, world.plans))
    judgements: list[Judgement] = []
    for kind, number, *more in steps:
        ends = await world.ends()
        if kind == "store":
            await world.store(number % len(world.plans))
        elif ends and kind == "handle":
            await world.handle(ends[number % len(ends)], *more)
        elif ends:
            await asyncio.gather(*(world.handle(ends[number % len(ends)], who) for who in (0, 1)))
        judgements = await world.check(judgements)
        assert not judgements or not any(world.plans), "nobody is judged while a member is out"
    await world.drain()
    judgements = await world.check(judgements)
    assert len(judgements) == min(num_completed, 1)
    assert sum(len(one.verdicts) for one in judgements) == num_completed
    scores: list[Score] = await world.records(Stream.SCORES)
    assert len(scores) == total, "every end has its score"


async def test_only_the_end_that_was_stored_last_brings_the_group_before_its_judge():
    """All three were stored before the first is handled, as after a restart of the stage."""
    world = World([[end(0, size=3)], [end(1, size=3)], [end(2, EndStatus.DEAD, size=3)]], [])
    await world.begin()
    for member in (2, 0, 1):
        await world.store(member)
    await asyncio.gather(*(world.handle(one, 0) for one in await world.ends()))
    assert world.pools[0].num_asked == 1
    for one in await world.ends():
        await world.handle(one, 1)
    assert world.pools[1].num_asked == 0, "what is stored is what counts"


async def test_p08_a_stage_that_judged_too_late_scores_by_the_stored_judgement_not_by_its_own():
    """The first stage dies between the judgement and the scores, while the second still asks the judge."""
    world = World([[end(0)], [end(1)]], [])
    await world.begin()
    is_stored = asyncio.Event()
    honest = world.pools[1].run

    async def die(score: Score) -> None:
        is_stored.set()
        raise KilledError

    async def late(payload: dict, **options) -> Done:
        await is_stored.wait()
        return await honest(payload, **options)

    world.stages[0]._store, world.pools[1].run = die, late  # type: ignore[method-assign]
    for member in (0, 1):
        await world.store(member)
    *_, last = await world.ends()
    await asyncio.gather(*(world.handle(last, who) for who in (0, 1)))
    assert world.pools[1].num_asked == 1
    (judgement,) = await world.check([])
    rewards = [one.reward for one in await world.records(Stream.SCORES)]
    assert rewards == [one.reward for one in judgement.verdicts] == [101.0, 101.125]


async def test_a_group_in_which_nobody_completed_is_not_judged():
    world = World([[end(0, EndStatus.DEAD)], [end(1, EndStatus.DEAD)]], [])
    await world.begin()
    await world.drain()
    assert await world.records(Stream.JUDGEMENTS) == []
    assert [one.outcome for one in await world.records(Stream.SCORES)] == [Outcome.DEAD] * 2


async def test_members_are_not_left_waiting_when_the_judge_was_taken_out_of_the_settings():
    world = World([[end(0)], [end(1)]], [])
    await world.begin()
    without = SwarmSettings(models={"m": ModelSettings(path="tiny")}, pools={"p": PoolSettings()})
    world.stages = [Reward(world.bus, RUN, without)]
    await world.drain()
    scores = await world.records(Stream.SCORES)
    assert [(one.outcome, one.ticket.group) for one in scores] == [(Outcome.DEAD, GROUP)] * 2
    assert all(one.fault and "no group judge here any more" in one.fault.message for one in scores)

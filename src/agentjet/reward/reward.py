"""The reward stage: a durable consumer of ends that stores one score for each.

Invariants:

- A score is stored create-only before its end is acknowledged; an end that comes again finds the same score.
- Reward functions run in worker processes under a time limit: one that blocks, leaks or dies never blocks the stage.
  One that raises or is late makes its episode invalid at once; one that kills its process is tried again, and after
  `reward.max_crashes` deaths the episode is invalid.
- A completed episode of a judged group gets its score with the others of the group (`agentjet.reward.hearing`); its end
  is acknowledged without one while members are out. Whether the group is judged stands in its tickets, so that a
  changed setting leaves nobody waiting for a judge that never comes.
- A group judge that raises, is late or returns no verdicts is tried again: a group is judged once and for ever, so what
  it failed at can not be mended by another offer. After `reward.max_crashes` tries its members are dead.
"""

import asyncio
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import structlog

from agentjet.bus.handler import consume
from agentjet.bus.protocol import Bus, StoredMessage
from agentjet.bus.record import put_once, read_as
from agentjet.config.settings import SwarmSettings
from agentjet.errors import RewardError
from agentjet.reward import function, judge
from agentjet.reward.hearing import Judge, hear
from agentjet.reward.panel import Panel
from agentjet.reward.scorer import CLIENT, decide, invalid, question, scored, unscored
from agentjet.schemas import subject
from agentjet.schemas.episode import Episode
from agentjet.schemas.ids import RunId
from agentjet.schemas.judgement import Judgement
from agentjet.schemas.presence import Waiting
from agentjet.schemas.score import Outcome, Score
from agentjet.schemas.subject import Stream, stream_name
from agentjet.workers.pool import Done, WorkerPool

log = structlog.get_logger(__name__)

DURABLE = "reward"
CONCURRENCY = 64
"""Episodes looked at together; only `reward.num_workers` functions run at once."""
_SLOW_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class _Judging:
    """A reward function or group judge at work."""

    what: str
    since: float
    """Monotonic."""
    timeout_seconds: float


class Reward:
    """Scores ended episodes until it is cancelled.

    Args:
        bus: Where ends come from.
        run: The run.
        settings: `pools` and `reward` are used.
    """

    def __init__(self, bus: Bus, run: RunId, settings: SwarmSettings) -> None:
        self._bus, self._run = bus, run
        self._pools = settings.pools
        self._max_crashes = settings.reward.max_crashes
        self._num_workers = settings.reward.num_workers
        self._functions: dict[tuple[str, str], WorkerPool] = {}
        """By adapter and name."""
        self._judging: dict[str, _Judging] = {}
        self._counts = dict.fromkeys((outcome.value for outcome in Outcome), 0)
        self._num_late = 0

    async def run(self) -> None:
        """Scores; ends by cancellation.

        Raises:
            WorkflowError: A pool's reward function or group judge can not be loaded.
        """
        try:
            await self._load()
            consumer = await self._bus.consumer(
                stream_name(self._run, Stream.EPISODES),
                DURABLE,
                subject=subject.stream_subjects(self._run, Stream.EPISODES)[0],
            )
            await consume(
                consumer,
                self._handle,
                name="reward",
                on_poison=self._poison,
                concurrency=CONCURRENCY,
                max_crashes=self._max_crashes,
            )
        finally:
            await asyncio.gather(*(pool.close() for pool in self._functions.values()))

    def metrics(self) -> dict[str, float]:
        """Scores by outcome since the start."""
        counts = {f"num_{outcome}": float(count) for outcome, count in self._counts.items()}
        return counts | {"num_judging": float(len(self._judging)), "num_late": float(self._num_late)}

    def waiting(self) -> list[Waiting]:
        """Reward functions and group judges that take long, by name."""
        now, bus_now = time.monotonic(), time.time()
        return [
            Waiting(
                what=f"the {one.what} at {of}",
                since=bus_now - (now - one.since),
                unblocked_by=f"its time limit of {one.timeout_seconds:g} s",
            )
            for of, one in self._judging.items()
            if now - one.since > _SLOW_SECONDS
        ]

    async def _load(self) -> None:
        rewards = {(function.ADAPTER, pool.reward) for pool in self._pools.values() if pool.reward != CLIENT}
        judges = {(judge.ADAPTER, pool.group_judge) for pool in self._pools.values() if pool.group_judge}
        for adapter, name in sorted(rewards | judges):
            self._functions[adapter, name] = WorkerPool(name, adapter=adapter, max_running=self._num_workers)
            await self._functions[adapter, name].start()

    async def _handle(self, message: StoredMessage) -> None:
        episode = await read_as(Episode, self._bus, self._run, Stream.EPISODES, message)
        if episode.ticket.is_judged:
            await self._bring(message, episode, self._judge)
        else:
            await self._store(await self._score(episode))

    async def _bring(self, message: StoredMessage, episode: Episode, by: Judge) -> None:
        """An end of a judged group: a failure has its score at once, the rest come with the last of them."""
        score = unscored(episode)
        if score is not None:
            await self._store(score)
        if score is None or score.closes_slot:
            for one in await hear(self._bus, self._run, message.sequence, episode.ticket, by):
                await self._store(one)

    async def _score(self, episode: Episode) -> Score:
        pool = self._pools.get(episode.ticket.pool)
        reward = CLIENT if pool is None else pool.reward
        score = decide(episode, reward)
        if score is not None or pool is None:
            return score or invalid(episode, "no_pool", f"no pool {episode.ticket.pool} here", judged_by="")
        working = _Judging(f"reward function {reward}", time.monotonic(), pool.reward_timeout_seconds)
        done = await self._ask((function.ADAPTER, reward), question(episode), episode.ticket.id, working)
        return self._judged(episode, reward, done)

    async def _ask(self, name: tuple[str, str], payload: dict[str, Any], of: str, working: _Judging) -> Done:
        self._judging[of] = working
        try:
            return await self._functions[name].run(payload, timeout_seconds=working.timeout_seconds)
        finally:
            self._judging.pop(of, None)

    def _judged(self, episode: Episode, reward: str, done: Done) -> Score:
        failure = done.failure
        if failure is None:
            return scored(episode, done.value, judged_by=reward)
        if failure.is_crash:
            raise RewardError(f"{episode.ticket.id}: {failure.message}")
        self._num_late += failure.is_late
        log.error(
            "a reward function gave no score; the episode is invalid",
            function=reward,
            ticket=episode.ticket.id,
            kind=failure.kind,
            error=failure.message,
            traceback=failure.traceback,
        )
        return invalid(episode, failure.kind, f"{reward}: {failure.sentence}", judged_by=reward)

    async def _judge(self, panel: Panel) -> Judgement:
        """Asks the group judge; RewardError, to be tried again, when it gives no verdicts."""
        pool = self._pools.get(panel.pool)
        if pool is None or not pool.group_judge:
            return panel.unjudged("", f"pool {panel.pool} has no group judge here any more; set pools.NAME.group_judge")
        name = pool.group_judge
        working = _Judging(f"group judge {name}", time.monotonic(), pool.reward_timeout_seconds)
        done = await self._ask((judge.ADAPTER, name), panel.question(), panel.group, working)
        if done.failure is None:
            return panel.judged(name, done.value)
        self._num_late += done.failure.is_late
        log.error(
            "a group judge gave no verdicts",
            function=name,
            group=panel.group,
            kind=done.failure.kind,
            error=done.failure.message,
            traceback=done.failure.traceback,
        )
        raise RewardError(f"{done.failure.kind}: {done.failure.sentence}")

    async def _store(self, score: Score) -> None:
        to = subject.score(self._run, score.ticket.id)
        stored = await put_once(self._bus, self._run, Stream.SCORES, to, score)
        if stored.is_ours:
            self._counts[score.outcome.value] += 1

    async def _poison(self, message: StoredMessage, error: Exception) -> None:
        """The terminal score of an end that crashes its reward function every time, or of a group without verdicts."""
        episode = await read_as(Episode, self._bus, self._run, Stream.EPISODES, message)
        if episode.ticket.is_judged:
            await self._bring(message, episode, partial(self._give_up, why=str(error)))
            return
        await self._store(invalid(episode, type(error).__name__, f"gave up on it: {error}", judged_by=""))

    async def _give_up(self, panel: Panel, why: str) -> Judgement:
        """The judgement that nobody gave: no member has a reward."""
        pool = self._pools.get(panel.pool)
        return panel.unjudged(pool.group_judge if pool else "", why)

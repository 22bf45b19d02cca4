"""The reward stage: a durable consumer of ends that stores one score for each.

Invariants:

- A score is stored create-only before its end is acknowledged; an end that comes again finds the same score.
- Reward functions run in worker processes under a time limit: one that blocks, leaks or dies never blocks the stage.
  One that raises or is late makes its episode invalid at once; one that kills its process is tried again, and after
  `reward.max_crashes` deaths the episode is invalid.
"""

import asyncio
import time
from dataclasses import dataclass

import structlog

from agentjet.bus.handler import consume
from agentjet.bus.protocol import Bus, StoredMessage
from agentjet.bus.record import put_once, read_as
from agentjet.config.settings import SwarmSettings
from agentjet.errors import RewardError
from agentjet.reward.function import ADAPTER
from agentjet.reward.scorer import CLIENT, decide, invalid, question, scored
from agentjet.schemas import subject
from agentjet.schemas.episode import Episode
from agentjet.schemas.ids import RunId
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
    """A reward function at work."""

    function: str
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
        self._functions: dict[str, WorkerPool] = {}
        self._judging: dict[str, _Judging] = {}
        self._counts = dict.fromkeys((outcome.value for outcome in Outcome), 0)
        self._num_late = 0

    async def run(self) -> None:
        """Scores; ends by cancellation.

        Raises:
            WorkflowError: A pool's reward function can not be loaded.
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
        """Reward functions that take long, by name."""
        now, bus_now = time.monotonic(), time.time()
        slow = [(ticket, one) for ticket, one in self._judging.items() if now - one.since > _SLOW_SECONDS]
        return [
            Waiting(
                what=f"the reward function {one.function} at {ticket}",
                since=bus_now - (now - one.since),
                unblocked_by=f"its time limit of {one.timeout_seconds:g} s",
            )
            for ticket, one in slow
        ]

    async def _load(self) -> None:
        for pool in self._pools.values():
            if pool.reward not in (CLIENT, *self._functions):
                function = WorkerPool(pool.reward, adapter=ADAPTER, max_running=self._num_workers)
                self._functions[pool.reward] = function
                await function.start()

    async def _handle(self, message: StoredMessage) -> None:
        episode = await read_as(Episode, self._bus, self._run, Stream.EPISODES, message)
        await self._store(await self._score(episode))

    async def _score(self, episode: Episode) -> Score:
        pool = self._pools.get(episode.ticket.pool)
        reward = CLIENT if pool is None else pool.reward
        score = decide(episode, reward)
        if score is not None or pool is None:
            return score or invalid(episode, "no_pool", f"no pool {episode.ticket.pool} here", judged_by="")
        ticket = episode.ticket.id
        self._judging[ticket] = _Judging(reward, time.monotonic(), pool.reward_timeout_seconds)
        try:
            done = await self._functions[reward].run(question(episode), timeout_seconds=pool.reward_timeout_seconds)
        finally:
            self._judging.pop(ticket, None)
        return self._judged(episode, reward, done)

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

    async def _store(self, score: Score) -> None:
        to = subject.score(self._run, score.ticket.id)
        stored = await put_once(self._bus, self._run, Stream.SCORES, to, score)
        if stored.is_ours:
            self._counts[score.outcome.value] += 1

    async def _poison(self, message: StoredMessage, error: Exception) -> None:
        """The terminal score of an end that crashes its reward function every time."""
        episode = await read_as(Episode, self._bus, self._run, Stream.EPISODES, message)
        await self._store(invalid(episode, type(error).__name__, f"gave up on it: {error}", judged_by=""))

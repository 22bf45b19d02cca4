"""The rollout: plays the tickets of every pool that has a workflow.

Invariants:

- A ticket is acknowledged only after its end is stored, ours or another attempt's; a rollout that dies gives its
  tickets back by silence, one that is stopped at once. A bus that is away delays an end, up to the deadline; the
  episode is not played again.
- An agent's fault is its episode's fault and never leaves it. An agent that can not be imported at the start is the
  user's to put right: `run` raises.
- Episodes end a little before the deadline that the curriculum buries them at.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Sequence

import structlog

from agentjet.bus.handler import consume
from agentjet.bus.presence import has_ended, live_actors
from agentjet.bus.protocol import Bus, Consumer, Delivery, StoredMessage
from agentjet.bus.record import read_as
from agentjet.config.settings import SwarmSettings
from agentjet.errors import BusError, ConfigError
from agentjet.rollout.claiming import Claimed, claim, worker_name
from agentjet.rollout.ending import Endpoint, ended, failed_play, store_end, store_end_in_time
from agentjet.rollout.stage import Part, Play, Stage
from agentjet.schemas import subject
from agentjet.schemas.episode import EndStatus, Episode
from agentjet.schemas.ids import RunId
from agentjet.schemas.presence import Waiting
from agentjet.schemas.subject import Stream, stream_name
from agentjet.schemas.task import EpisodeKind, Ticket

log = structlog.get_logger(__name__)

_MARGIN_RATIO = 0.05
_MAX_MARGIN_SECONDS = 2.0
_RATE_SECONDS = 60.0
_LOOK_SECONDS = 0.5
_SLOW_SECONDS = 30.0


class Rollout:
    """Plays episodes until it is cancelled.

    Args:
        bus: Where tickets come from.
        run: The run.
        settings: `pools` and `rollout` are used.
        gateway: Started; its sessions say which calls an episode made.
    """

    def __init__(self, bus: Bus, run: RunId, settings: SwarmSettings, gateway: Endpoint) -> None:
        self.worker = worker_name()
        self._bus, self._run, self._gateway = bus, run, gateway
        self._pools = {name: pool for name, pool in settings.pools.items() if pool.workflow}
        self._max_running = settings.rollout.max_running
        self._num_warm = min(settings.rollout.num_workers, self._max_running)
        self._places = asyncio.Semaphore(settings.rollout.max_running)
        """Of all pools together; one is taken before a ticket is fetched, so that none waits here."""
        self._stages: dict[str, Stage] = {}
        self._running: dict[str, Claimed] = {}
        self._ends: deque[float] = deque(maxlen=10_000)
        self._counts = dict.fromkeys(("played", "failed", "aborted", "superseded", "dropped"), 0)
        self._draining = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    async def run(self) -> None:
        """Plays; ends by cancellation.

        Raises:
            WorkflowError: An agent can not be imported.
            ConfigError: No pool has a workflow.
        """
        if not self._pools:
            raise ConfigError("no pool has a workflow, so a rollout has nothing to play; set pools.NAME.workflow")
        try:
            await self._set_stages()
            async with asyncio.TaskGroup() as group:
                for pool in self._pools:
                    group.create_task(self._play_pool(pool))
        finally:
            await asyncio.gather(*(stage.close() for stage in self._stages.values()))

    async def drain(self, timeout_seconds: float) -> None:
        """Begins nothing new and waits until the running episodes have ended.

        At most for the time given, and not once no engine is left: nothing can end then.
        """
        self._draining.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                while self._running and await self._has_engine():
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_LOOK_SECONDS):
                            await self._idle.wait()
        if self._running:
            log.warning("episodes are still running; others will play them again", running=list(self._running))

    async def _has_engine(self) -> bool:
        try:
            return not all(has_ended(one) for one in await live_actors(self._bus, self._run, "inference"))
        except BusError as error:
            log.warning("can not see whether an engine is there", error=str(error))
            return True

    def metrics(self) -> dict[str, float]:
        """Counts since the start, and the rate of the last minute."""
        oldest = time.monotonic() - _RATE_SECONDS
        while self._ends and self._ends[0] < oldest:
            self._ends.popleft()
        counts = {f"num_{name}": float(count) for name, count in self._counts.items()}
        return counts | {
            "num_running": float(len(self._running)),
            "episodes_per_second": len(self._ends) / _RATE_SECONDS,
        }

    def waiting(self) -> list[Waiting]:
        """Code that can not be used, and episodes that take long."""
        now, bus_now = time.monotonic(), time.time()
        found = [
            Waiting(what=f"new code of {workflow}: {stage.pool.problem}", since=bus_now, unblocked_by="its author")
            for workflow, stage in self._stages.items()
            if stage.pool.problem
        ]
        if not self._running:
            return [*found, Waiting(what="a ticket", since=self._idle_since(bus_now, now), unblocked_by="curriculum")]
        slow = [one for one in self._running.values() if now - one.since > _SLOW_SECONDS]
        return found + [
            Waiting(what=f"the end of {one.ticket.id}", since=bus_now - (now - one.since), unblocked_by="its agent")
            for one in slow[:10]
        ]

    def _idle_since(self, bus_now: float, now: float) -> float:
        return bus_now - (now - self._ends[-1]) if self._ends else bus_now

    async def _set_stages(self) -> None:
        for pool in self._pools.values():
            if pool.workflow not in self._stages:
                stage = Stage(pool.workflow, max_running=self._max_running, num_warm=self._num_warm)
                self._stages[pool.workflow] = stage
                await stage.start()

    async def _play_pool(self, pool: str) -> None:
        consumer = await self._bus.consumer(
            stream_name(self._run, Stream.TASKS),
            f"tasks-{pool}",
            subject=subject.tasks_of(self._run, pool),
        )
        await consume(
            _Tap(consumer, self._draining),
            self._handle,
            name=f"rollout {pool}",
            on_poison=self._poison,
            concurrency=min(self._pools[pool].max_running, self._max_running),
            places=self._places,
        )

    async def _handle(self, message: StoredMessage) -> None:
        ticket = await read_as(Ticket, self._bus, self._run, Stream.TASKS, message)
        claimed = await claim(self._bus, self._run, ticket, self.worker)
        if claimed is None:
            self._counts["dropped"] += 1
            return
        self._running[ticket.id] = claimed
        self._idle.clear()
        try:
            await self._store(claimed, await self._play(claimed))
        finally:
            self._running.pop(ticket.id, None)
            if not self._running:
                self._idle.set()
            self._gateway.forget(claimed.key)

    async def _play(self, claimed: Claimed) -> Play:
        ticket = claimed.ticket
        stage = self._stages[self._pools[ticket.pool].workflow]
        part = Part(
            base_url=self._gateway.base_url,
            api_key=claimed.key,
            models=ticket.models,
            seed=ticket.seed,
            ticket=ticket.id,
            is_eval=ticket.kind is EpisodeKind.EVAL,
            sampling=ticket.sampling,
        )
        margin = min(_MAX_MARGIN_SECONDS, _MARGIN_RATIO * ticket.deadline_seconds)
        return await stage.play(ticket.task, part, timeout_seconds=max(claimed.seconds_left - margin, 0.1))

    async def _store(self, claimed: Claimed, play: Play) -> None:
        captured = self._gateway.session(claimed.key)
        episode = ended(claimed.ticket, claimed.attempt, captured, play, worker=self.worker)
        reply = await store_end_in_time(self._bus, self._run, episode, lambda: claimed.seconds_left)
        self._ends.append(time.monotonic())
        self._count(episode, accepted=reply.accepted)
        if episode.fault is not None:
            log.warning(
                "an episode ended without a result",
                ticket=episode.ticket.id,
                status=episode.status.value,
                kind=episode.fault.kind,
                error=episode.fault.message,
                traceback=play.failure.traceback if play.failure else "",
            )

    def _count(self, episode: Episode, *, accepted: bool) -> None:
        if not accepted:
            self._counts["superseded"] += 1
        elif episode.status is EndStatus.COMPLETED:
            self._counts["played"] += 1
        else:
            self._counts["aborted" if episode.status is EndStatus.ABORTED else "failed"] += 1

    async def _poison(self, message: StoredMessage, error: Exception) -> None:
        """Ends a ticket that crashes the rollout itself every time."""
        ticket = await read_as(Ticket, self._bus, self._run, Stream.TASKS, message)
        claimed = await claim(self._bus, self._run, ticket, self.worker)
        if claimed is not None:
            play = failed_play(type(error).__name__, f"the rollout could not play it: {error}")
            captured = self._gateway.session(claimed.key)
            await store_end(self._bus, self._run, ended(ticket, claimed.attempt, captured, play, worker=self.worker))


class _Tap:
    """A consumer that gives nothing any more once the rollout is draining."""

    def __init__(self, consumer: Consumer, draining: asyncio.Event) -> None:
        self._consumer, self._draining = consumer, draining

    async def fetch(self, batch: int, timeout_seconds: float) -> Sequence[Delivery]:
        """As the consumer's; when draining it never returns, and what comes late goes back."""
        found = [] if self._draining.is_set() else await self._consumer.fetch(batch, timeout_seconds)
        if not self._draining.is_set():
            return found
        for delivery in found:
            await delivery.nak()
        await asyncio.Event().wait()
        return []

    async def num_pending(self) -> int:
        """As the consumer's."""
        return await self._consumer.num_pending()

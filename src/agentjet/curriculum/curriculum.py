"""The curriculum at work: issue, claim, re-offer, evaluate, bury, purge, finish.

Every decision is first a record of the ledger and then tickets on TASKS; what a crash leaves between the two is healed
by the sweep at the next start. The state in memory is only a reading of LEDGER, SCORES and CLAIMS.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import structlog

from agentjet.bus.clock import BusClock
from agentjet.bus.protocol import Bus
from agentjet.config.load import config_digest
from agentjet.config.settings import SwarmSettings
from agentjet.curriculum.attendance import LOOK_SECONDS, Attendance
from agentjet.curriculum.code import CodeWatch
from agentjet.curriculum.course import Course
from agentjet.curriculum.dataset import load_orders
from agentjet.curriculum.feed import Feed
from agentjet.curriculum.issuer import Issuer
from agentjet.curriculum.offer import OfferDesk
from agentjet.curriculum.outlook import Outlook
from agentjet.curriculum.purge import Purge
from agentjet.curriculum.retry import RetryDesk
from agentjet.curriculum.service import ClaimDesk, serving
from agentjet.curriculum.sweep import Sweep, patiently, publish_tickets
from agentjet.errors import BusError, BusUnavailableError, FencedError
from agentjet.schemas.ids import RunId
from agentjet.schemas.ledger import GroupIssue
from agentjet.schemas.presence import Waiting
from agentjet.schemas.subject import Stream, stream_name

log = structlog.get_logger(__name__)

GIB = 1024**3
_FILL_SECONDS = 5.0
_ENDS_SECONDS = 5.0
_LEAST_SECONDS = 0.01
"""Shortest sleep, so that rounding of times can not make it spin."""


class Curriculum:
    """The one curriculum of a run.

    Args:
        bus: The bus, on which the run's streams exist.
        run: The run.
        settings: The whole configuration.
        secret: Signs the keys of episodes.
        sweep_seconds: How often lost tickets are looked for.
        tick_seconds: How often deadlines are looked at, and the longest that any change may go unnoticed.

    Raises:
        ConfigError: The settings can not lead to an end.
        TaskDataError: A data set is broken.
    """

    def __init__(
        self,
        bus: Bus,
        run: RunId,
        settings: SwarmSettings,
        secret: bytes,
        *,
        sweep_seconds: float = 60.0,
        tick_seconds: float = 1.0,
    ) -> None:
        self._bus, self._run, self._settings = bus, run, settings
        self._sweep_seconds, self._tick_seconds = sweep_seconds, tick_seconds
        self._clock, self._wake = BusClock(), asyncio.Event()
        self._fenced: FencedError | None = None
        self._course = course = Course(run, settings, load_orders(settings))
        course.check()
        self._code, self._attendance = CodeWatch(settings.pools), Attendance(bus, run)
        self._feed = Feed(bus, run, course, self._clock, self._wake.set)
        self._sweep = Sweep(bus, run, course.board, self._clock, course.why_hopeless)
        self._issuer = Issuer(bus, run, course, self._clock, self._sweep)
        self._outlook = Outlook(course, self._clock, settings.streams.admission_stop_ratio)
        served = tuple(name for name, one in settings.models.items() if not one.is_trained)
        self._desk = ClaimDesk(bus, run, course.board, self._clock, secret, served_models=served)
        self._offers = OfferDesk(bus, run, course, self._issuer, self._outlook, self._clock, self._stop)
        self._retries = RetryDesk(bus, run, course, self._wake.set)
        self._purge = Purge(
            bus,
            run,
            learners={model: course.learners[model] for model in course.trained_models},
            keep_checkpoints=settings.checkpoint.keep,
            keep_calls_bytes=int(settings.streams.keep_calls_gib * GIB),
        )

    async def run(self) -> None:
        """Lead the run to its end; returns after RunFinish.

        Raises:
            FencedError: Another curriculum has taken over.
        """
        await self._recover()
        pools = tuple(self._settings.pools)
        try:
            async with (
                serving(self._bus, self._run, self._desk, self._offers.offer, self._retries.retry, pools),
                asyncio.TaskGroup() as group,
            ):
                jobs = [
                    group.create_task(self._feed.follow_ledger(lambda: self._issuer.last_sequence)),
                    group.create_task(self._feed.follow_scores()),
                    group.create_task(self._watch_tickets()),
                    group.create_task(self._every(self._tick_seconds, self._look_at_code)),
                    group.create_task(self._every(_ENDS_SECONDS, self._sweep.note_ends)),
                    group.create_task(self._every(_FILL_SECONDS, self._look_at_streams)),
                    group.create_task(self._every(self._sweep_seconds, self._clean)),
                    group.create_task(self._every(LOOK_SECONDS, self._attendance.look)),
                ]
                await self._lead()
                for job in jobs:
                    job.cancel()
        except* FencedError as fenced:
            raise FencedError(str(fenced.exceptions[0])) from None

    def waiting(self) -> list[Waiting]:
        """What the run waits for: what, since when, who could unblock it."""
        lost = self._bus.last_error
        found = self._outlook.waiting()
        if lost is not None:
            found.insert(0, Waiting(what=f"the bus: {lost}", since=self._clock.now(), unblocked_by="the NATS server"))
        return found

    def problems(self) -> list[str]:
        """What needs a person: pools of which nothing but failures comes in."""
        return self._course.streaks.problems()

    @property
    def last_seen(self) -> dict[str, float]:
        """When engines and learners were last alive, by `<kind> <model>`; kept up to date."""
        return self._attendance.last_seen

    def metrics(self) -> dict[str, float]:
        """Figures of the moment, and counts since this process started."""
        return self._outlook.metrics() | {
            "claims_granted": float(self._desk.num_granted),
            "tickets_buried": float(self._sweep.num_buried),
            "tickets_published_again": float(self._sweep.num_published_again),
        }

    async def _recover(self) -> None:
        await self._issuer.take_over(self._feed.take_ledger, config_digest(self._settings))
        # A look at the bus's time: deadlines and purges count from it, and the ledger of a new run was empty.
        stored = await self._bus.get(stream_name(self._run, Stream.LEDGER), self._issuer.last_sequence)
        if stored is not None:
            self._clock.observe(stored.time)
        await self._feed.recall_scores()
        await self._look_at_streams()
        board = self._course.board
        log.info("curriculum started", incarnation=self._course.incarnation, groups_out=len(board.groups))

    async def _watch_tickets(self) -> None:
        """Learn of the claims so far, publish what was lost, then bury what is past its deadline, for ever.

        With much open work the first two take seconds. Claims are served meanwhile: the desk looks an unknown one up.
        """
        await self._feed.recall_claims()
        await patiently(self._sweep.publish_missing)
        await self._every(self._tick_seconds, self._sweep.bury)

    # What happens next

    async def _lead(self) -> None:
        while True:
            # Before the work, not after it: what changes meanwhile is looked at again at once.
            self._wake.clear()
            if await self._advance():
                return
            if self._fenced is not None:
                raise self._fenced
            # Not `wait_for`: before Python 3.12 it loses a cancellation that comes together with the event.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._seconds_to_next_look):
                    await self._wake.wait()

    @property
    def _seconds_to_next_look(self) -> float:
        pause = self._course.reoffers.seconds_left(self._clock.now())
        return self._tick_seconds if pause is None else min(self._tick_seconds, max(pause, _LEAST_SECONDS))

    async def _advance(self) -> bool:
        """Do all that can be done now; True when the run is over."""
        try:
            await self._issuer.refresh()
            await self._offer_again()
            while not self._outlook.full_streams:
                if await self._issuer.issue(self._next_issue) is None:
                    return await self._issuer.finish()
        except BusUnavailableError:
            raise
        except BusError as error:
            log.warning("the curriculum waits for the bus", error=str(error))
        return False

    async def _offer_again(self) -> None:
        tickets = self._course.reoffers.take(self._clock.now())
        await patiently(lambda: publish_tickets(self._bus, self._run, tickets))

    def _next_issue(self) -> GroupIssue | None:
        return self._course.next_evaluation_group() or self._course.next_training(self._clock.now())

    def _stop(self, fenced: FencedError) -> None:
        self._fenced = fenced
        self._wake.set()

    # What has to be looked after

    async def _every(self, seconds: float, work: Callable[[], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(seconds)
            await patiently(work)

    async def _look_at_streams(self) -> None:
        fills: dict[str, float] = {}
        for stream in Stream:
            if stream is not Stream.EVENTS:
                info = await self._bus.stream_info(stream_name(self._run, stream))
                fills[stream.value] = info.num_bytes / info.max_bytes if info.max_bytes > 0 else 0.0
        self._outlook.fills = fills
        self._wake.set()

    async def _look_at_code(self) -> None:
        for pool in self._code.changed():
            self._course.streaks.changed(pool)
            self._wake.set()

    async def _clean(self) -> None:
        await self._sweep.publish_missing()
        low_water = self._course.board.low_water
        await self._purge.run(self._clock.now() if low_water is None else low_water)

"""The curriculum at work: issue, claim, re-offer, evaluate, bury, purge, finish.

Every decision is first a record of the ledger and then tickets on TASKS; what a crash leaves between the two is healed
by the sweep at the next start. The state in memory is only a reading of LEDGER, SCORES and CLAIMS.
"""

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable

import structlog

from agentjet.bus.clock import BusClock
from agentjet.bus.ledger import LedgerChain
from agentjet.bus.protocol import Bus, StoredMessage
from agentjet.bus.record import read, read_as
from agentjet.config.load import config_digest
from agentjet.config.settings import SwarmSettings
from agentjet.curriculum.attendance import LOOK_SECONDS, Attendance
from agentjet.curriculum.board import tickets_of
from agentjet.curriculum.code import CodeWatch
from agentjet.curriculum.course import Course, load_orders
from agentjet.curriculum.dataset import load_tasks
from agentjet.curriculum.outlook import Outlook
from agentjet.curriculum.purge import Purge, first_since
from agentjet.curriculum.retry import RetryDesk
from agentjet.curriculum.service import ClaimDesk, serving
from agentjet.curriculum.sweep import Sweep, publish_tickets
from agentjet.errors import BusError, BusUnavailableError, FencedError, RecordError, RecordTooLargeError
from agentjet.schemas import subject
from agentjet.schemas.claim import Claim, OfferReply, OfferRequest
from agentjet.schemas.ids import RunId
from agentjet.schemas.ledger import CurriculumStart, GroupIssue, RunFinish
from agentjet.schemas.presence import Waiting
from agentjet.schemas.record import Record
from agentjet.schemas.score import Score
from agentjet.schemas.subject import CURRICULUM, Stream, stream_name
from agentjet.schemas.task import Ticket

log = structlog.get_logger(__name__)

GIB = 1024**3
MAX_CLIENT_GROUP = 1024
"""Most members of a client's own group: its tickets are one answer."""
_CHUNK = 256
_FILL_SECONDS = 5.0
_START_TRIES = 20
_RECENT_SCORES = 1024
_MARGIN_SECONDS = 60.0
"""Clocks of a cluster may differ by as much."""


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
        self._chain = LedgerChain(bus, run, CURRICULUM)
        self._clock = BusClock()
        self._course = Course(run, settings, load_orders(settings, load_tasks))
        self._code = CodeWatch(settings.pools)
        served = tuple(name for name, one in settings.models.items() if not one.is_trained)
        self._desk = ClaimDesk(bus, run, self._course.board, self._clock, secret, served_models=served)
        self._sweep = Sweep(bus, run, self._course.board, self._clock, frozenset(settings.pools))
        self._purge = Purge(
            bus,
            run,
            learners={model: self._course.learners[model] for model in self._course.trained_models},
            keep_checkpoints=settings.checkpoint.keep,
            keep_calls_bytes=int(settings.streams.keep_calls_gib * GIB),
        )
        self._outlook = Outlook(self._course, self._clock, settings.streams.admission_stop_ratio)
        self._lock = asyncio.Lock()
        self._wake = asyncio.Event()
        self._attendance = Attendance(bus, run)
        self._retries = RetryDesk(bus, run, self._course, self._wake.set)
        self._is_chain_stale = False
        self._fenced: FencedError | None = None
        self._ledger_sequence = 0
        self._scores_sequence = 0
        self._course.check()

    async def run(self) -> None:
        """Lead the run to its end; returns after RunFinish.

        Raises:
            FencedError: Another curriculum has taken over.
        """
        await self._recover()
        try:
            async with (
                serving(
                    self._bus, self._run, self._desk, self._offer, self._retries.retry, tuple(self._settings.pools)
                ),
                asyncio.TaskGroup() as group,
            ):
                jobs = [
                    group.create_task(self._follow_ledger()),
                    group.create_task(self._follow_scores()),
                    group.create_task(self._every(self._tick_seconds, self._sweep.bury)),
                    group.create_task(self._every(self._tick_seconds, self._look_at_code)),
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

    # Start

    async def _recover(self) -> None:
        await self._take_over()
        # A look at the bus's time: deadlines and purges count from it, and the ledger of a new run was empty.
        stored = await self._bus.get(stream_name(self._run, Stream.LEDGER), self._chain.last_sequence)
        if stored is not None:
            self._clock.observe(stored.time)
        await self._recall_scores()
        await self._recall_claims()
        await self._look_at_streams()
        await self._sweep.publish_missing()
        board = self._course.board
        log.info("curriculum started", incarnation=self._course.incarnation, groups_out=len(board.groups))

    async def _take_over(self) -> None:
        """Read the ledger and append the start; what a predecessor has stored meanwhile is read first."""
        for tries_left in reversed(range(_START_TRIES)):
            self._course.incarnation = 0
            await self._chain.find_end()
            async for message in self._bus.scan(stream_name(self._run, Stream.LEDGER)):
                await self._take_ledger(message)
            self._course.incarnation = self._course.ledger.incarnation + 1
            start = CurriculumStart(
                run=self._run,
                incarnation=self._course.incarnation,
                writer=secrets.token_hex(8),
                config_digest=config_digest(self._settings),
            )
            try:
                await self._append(start)
                return
            except FencedError:
                if not tries_left:
                    raise

    async def _recall_scores(self) -> None:
        """Those of groups that are out, and the newest, which say how the pools fare."""
        info = await self._bus.stream_info(stream_name(self._run, Stream.SCORES))
        start, low_water = info.last_sequence - _RECENT_SCORES, self._course.board.low_water
        if low_water is not None:
            start = min(start, await first_since(self._bus, info, low_water - _MARGIN_SECONDS))
        async for message in self._bus.scan(info.name, start=max(start, 1)):
            await self._take_score(message)

    async def _recall_claims(self) -> None:
        board = self._course.board
        tickets = {subject.claim(self._run, ticket): ticket for _, _, ticket in board.open_slots()}
        for start in range(0, len(tickets), _CHUNK):
            wanted = list(tickets)[start : start + _CHUNK]
            for of, message in (await self._bus.last_many(stream_name(self._run, Stream.CLAIMS), wanted)).items():
                record = await read(self._bus, self._run, Stream.CLAIMS, message)
                if isinstance(record, Claim):
                    deadline = message.time + record.ticket.deadline_seconds
                    board.claim(tickets[of], message.sequence, deadline, record.number)

    # What the streams say

    async def _take_ledger(self, message: StoredMessage) -> None:
        self._clock.observe(message.time)
        record = await read(self._bus, self._run, Stream.LEDGER, message)
        self._course.apply(message.sequence, message.time, record)
        self._ledger_sequence = max(self._ledger_sequence, message.sequence)
        self._wake.set()

    async def _follow_ledger(self) -> None:
        start = self._ledger_sequence + 1
        own = subject.ledger(self._run, CURRICULUM)
        async for message in self._bus.tail(stream_name(self._run, Stream.LEDGER), start=start):
            if message.subject == own and message.sequence <= self._chain.last_sequence:
                self._clock.observe(message.time)
            else:
                await self._take_ledger(message)

    async def _take_score(self, message: StoredMessage) -> Ticket | None:
        """The next offer of the slot, when there has to be one."""
        self._clock.observe(message.time)
        self._scores_sequence = message.sequence
        try:
            record = await read(self._bus, self._run, Stream.SCORES, message)
        except RecordError as error:
            log.error("a score can not be read; its slot stays open", subject=message.subject, error=str(error))
            return None
        if not isinstance(record, Score):
            return None
        self._course.streaks.score(record)
        ticket = self._course.board.score(record)
        if not self._course.board.has_open_members(record.ticket.group):
            # A single slot decides nothing: room comes from the ledger, ends from whole groups.
            self._wake.set()
        return ticket

    async def _follow_scores(self) -> None:
        start = self._scores_sequence + 1
        async for message in self._bus.tail(stream_name(self._run, Stream.SCORES), start=start):
            ticket = await self._take_score(message)
            if ticket is not None:
                await self._patiently(lambda ticket=ticket: publish_tickets(self._bus, self._run, [ticket]))

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
                async with asyncio.timeout(self._tick_seconds):
                    await self._wake.wait()

    async def _advance(self) -> bool:
        """Do all that can be done now; True when the run is over."""
        try:
            await self._refresh()
            while not self._outlook.full_streams:
                if await self._issue(self._next_issue) is None:
                    return await self._finish()
        except BusUnavailableError:
            raise
        except BusError as error:
            log.warning("the curriculum waits for the bus", error=str(error))
        return False

    def _next_issue(self) -> GroupIssue | None:
        return self._course.next_evaluation_group() or self._course.next_training(self._clock.now())

    async def _issue(self, decide: Callable[[], GroupIssue | None]) -> GroupIssue | None:
        """Decide, record and publish one group; the decision holds the lock, so no two see the same room."""
        async with self._lock:
            issue = decide()
            if issue is None:
                return None
            await self._append(issue)
        if not issue.client_group:
            tickets = tickets_of(self._run, issue, self._course.task_of(issue))
            await self._patiently(lambda: publish_tickets(self._bus, self._run, tickets))
        return issue

    async def _finish(self) -> bool:
        async with self._lock:
            reason = self._course.finish_reason()
            if reason is None:
                return False
            await self._append(RunFinish(run=self._run, reason=reason))
        log.info("the run is over", reason=reason)
        return True

    async def _append(self, record: Record) -> None:
        """Store a record of the chain and take it in."""
        if self._is_chain_stale:
            raise BusError("the ledger has to be read again first")
        try:
            sequence = await self._chain.append(record)
        except BusError:
            # Stored or not: only the chain itself can tell.
            self._is_chain_stale = True
            raise
        # The record's own time, up to a round trip: to read it would take another request.
        self._course.apply(sequence, self._clock.now(), record)

    async def _refresh(self) -> None:
        """After a lost answer: read the chain again, and publish what it says."""
        if not self._is_chain_stale:
            return
        async with self._lock:
            await self._chain.find_end()
            chain = subject.ledger(self._run, CURRICULUM)
            async for message in self._bus.scan(stream_name(self._run, Stream.LEDGER), chain):
                record = await read(self._bus, self._run, Stream.LEDGER, message)
                self._course.apply(message.sequence, message.time, record)
            self._is_chain_stale = False
        await self._sweep.publish_missing()

    async def _offer(self, request: OfferRequest) -> OfferReply:
        """Tickets for a client's own task; the same client's group gets the same tickets."""
        if request.run != self._run or request.pool not in self._course.training_pools:
            return OfferReply(granted=False, reason=f"run {self._run} trains no pool {request.pool!r}")
        if request.size < (least := self._course.least_group(request.pool)):
            return OfferReply(
                granted=False, reason=f"a group of {request.size} trains nobody: at least {least} are needed"
            )
        if request.size > MAX_CLIENT_GROUP:
            return OfferReply(
                granted=False, reason=f"a group of {request.size} is too large: at most {MAX_CLIENT_GROUP} are possible"
            )
        try:
            issue = await self._known(request) or await self._issue(lambda: self._offered(request))
            issue = issue or await self._known(request)
        except RecordTooLargeError as error:
            return OfferReply(granted=False, reason=f"the task is too large: {error}")
        except FencedError as error:
            self._fenced = error
            self._wake.set()
            return OfferReply(granted=False, reason="busy")
        except BusError as error:
            log.warning("an offer has to wait", pool=request.pool, error=str(error))
            return OfferReply(granted=False, reason="busy")
        if issue is None:
            return OfferReply(granted=False, reason="full")
        # Without the task, which the client has: many copies of it may not fit an answer.
        return OfferReply(granted=True, tickets=tuple(tickets_of(self._run, issue, {})))

    async def _known(self, request: OfferRequest) -> GroupIssue | None:
        """The group that was issued for a request before."""
        sequence = self._course.client_issue(request.pool, request.group)
        message = sequence and await self._bus.get(stream_name(self._run, Stream.LEDGER), sequence)
        if not message:
            return None
        return await read_as(GroupIssue, self._bus, self._run, Stream.LEDGER, message)

    def _offered(self, request: OfferRequest) -> GroupIssue | None:
        if self._course.client_issue(request.pool, request.group) or self._outlook.full_streams:
            return None
        return self._course.offered(request, self._clock.now())

    # What has to be looked after

    async def _every(self, seconds: float, work: Callable[[], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(seconds)
            await self._patiently(work)

    async def _patiently(self, work: Callable[[], Awaitable[None]]) -> None:
        """Work that the next sweep does again when the bus does not let it."""
        try:
            await work()
        except* BusUnavailableError:
            raise
        except* BusError as error:
            log.warning("the curriculum waits for the bus", error=str(error.exceptions[0]))

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

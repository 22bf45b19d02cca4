"""Groups for clients with tasks of their own: recorded like any group, handed out in the answer and not on TASKS.

A client's name of a group stands for one group for ever: asking again gives the same tickets. An offer that finds no
room is answered "full", and the course keeps the room for a while.
"""

from collections.abc import Callable

import structlog

from agentjet.bus.clock import BusClock
from agentjet.bus.protocol import Bus
from agentjet.bus.record import read_as
from agentjet.curriculum.board import tickets_of
from agentjet.curriculum.course import Course
from agentjet.curriculum.issuer import Issuer
from agentjet.curriculum.outlook import Outlook
from agentjet.errors import BusError, FencedError, RecordTooLargeError
from agentjet.schemas.claim import OfferReply, OfferRequest
from agentjet.schemas.ids import RunId
from agentjet.schemas.ledger import GroupIssue
from agentjet.schemas.subject import Stream, stream_name

log = structlog.get_logger(__name__)

MAX_CLIENT_GROUP = 1024
"""Most members of a client's own group: its tickets are one answer."""


class OfferDesk:
    """Answers offers.

    Args:
        bus: Where the ledger is read.
        run: The run.
        course: Decides whether there is room.
        issuer: Records the group.
        outlook: Knows of full streams.
        clock: The bus's time.
        on_fenced: Told that a newer curriculum has taken over; the one who asked only hears "busy".
    """

    def __init__(
        self,
        bus: Bus,
        run: RunId,
        course: Course,
        issuer: Issuer,
        outlook: Outlook,
        clock: BusClock,
        on_fenced: Callable[[FencedError], None],
    ) -> None:
        self._bus, self._run, self._course, self._issuer = bus, run, course, issuer
        self._outlook, self._clock, self._on_fenced = outlook, clock, on_fenced

    async def offer(self, request: OfferRequest) -> OfferReply:
        """The tickets of a client's group, or why there are none now."""
        refusal = self._refusal(request)
        if refusal:
            return OfferReply(granted=False, reason=refusal)
        try:
            issue = await self._known(request) or await self._issuer.issue(lambda: self._decide(request))
            issue = issue or await self._known(request)
        except RecordTooLargeError as error:
            return OfferReply(granted=False, reason=f"the task is too large: {error}")
        except FencedError as error:
            self._on_fenced(error)
            return OfferReply(granted=False, reason="busy")
        except BusError as error:
            log.warning("an offer has to wait", pool=request.pool, error=str(error))
            return OfferReply(granted=False, reason="busy")
        if issue is None:
            return OfferReply(granted=False, reason="full")
        # Without the task, which the client has: many copies of it may not fit an answer.
        return OfferReply(granted=True, tickets=tuple(tickets_of(self._run, issue, {})))

    def _refusal(self, request: OfferRequest) -> str:
        if request.run != self._run or request.pool not in self._course.training_pools:
            return f"run {self._run} trains no pool {request.pool!r}"
        if request.size < (least := self._course.least_group(request.pool)):
            return f"a group of {request.size} trains nobody: at least {least} are needed"
        if request.size > MAX_CLIENT_GROUP:
            return f"a group of {request.size} is too large: at most {MAX_CLIENT_GROUP} are possible"
        return ""

    async def _known(self, request: OfferRequest) -> GroupIssue | None:
        """The group that was issued for a request before."""
        sequence = self._course.client_issue(request.pool, request.group)
        message = sequence and await self._bus.get(stream_name(self._run, Stream.LEDGER), sequence)
        if not message:
            return None
        return await read_as(GroupIssue, self._bus, self._run, Stream.LEDGER, message)

    def _decide(self, request: OfferRequest) -> GroupIssue | None:
        if self._course.client_issue(request.pool, request.group) or self._outlook.full_streams:
            return None
        return self._course.offered(request, self._clock.now())

"""Who may call: a genuine key of the newest attempt of its ticket.

The claim record is read at most every `CACHE_SECONDS` for a ticket: a call of an older attempt may slip through that
long, which costs compute only, for the merger takes exactly the calls that the stored end names.
"""

import time
from collections import OrderedDict
from dataclasses import dataclass

from agentjet.accounting.key import verify
from agentjet.bus import record
from agentjet.bus.clock import BusClock
from agentjet.bus.protocol import Bus
from agentjet.errors import KeyRejectedError, SupersededError
from agentjet.schemas import subject
from agentjet.schemas.claim import Claim
from agentjet.schemas.ids import RunId, TicketId
from agentjet.schemas.subject import Stream
from agentjet.schemas.task import Ticket

CACHE_SECONDS = 2.0
_MAX_CACHED = 4096


@dataclass(frozen=True, slots=True)
class Permit:
    """What a key lets its holder do."""

    ticket: Ticket
    """Without its task."""
    attempt: int


class Fence:
    """Checks keys against the secret and the newest claims."""

    def __init__(self, bus: Bus, run: RunId, secret: bytes, clock: BusClock) -> None:
        self._bus = bus
        self._run = run
        self._secret = secret
        self._clock = clock
        self._claims: OrderedDict[TicketId, tuple[int, Claim, float]] = OrderedDict()

    async def admit(self, key_text: str) -> Permit:
        """The permit of a key.

        Raises:
            KeyRejectedError: Forged, expired, of another run, or of a ticket that was never claimed.
            SupersededError: A newer attempt plays the ticket.
        """
        key = verify(self._secret, key_text, run=self._run, now=self._clock.now())
        newest, claim = await self._newest(TicketId(key.ticket), key.attempt)
        if claim is None:
            raise KeyRejectedError(f"ticket {key.ticket} has no claim in this run; claim it and use the key you get")
        if newest != key.attempt:
            raise SupersededError(
                f"attempt {key.attempt} of ticket {key.ticket} is superseded by attempt {newest}; stop this episode"
            )
        return Permit(claim.ticket, key.attempt)

    async def _newest(self, ticket: TicketId, attempt: int) -> tuple[int, Claim | None]:
        cached = self._claims.get(ticket)
        now = time.monotonic()
        if cached is not None and cached[0] >= attempt and now < cached[2]:
            return cached[0], cached[1]
        found = await record.last(Claim, self._bus, self._run, Stream.CLAIMS, subject.claim(self._run, ticket))
        if found is None:
            return 0, None
        self._claims[ticket] = (*found, now + CACHE_SECONDS)
        self._claims.move_to_end(ticket)
        while len(self._claims) > _MAX_CACHED:
            self._claims.popitem(last=False)
        return found

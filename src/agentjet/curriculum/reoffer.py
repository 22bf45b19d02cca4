"""When a slot that failed is offered again. Pure; fed from SCORES.

Invariants:

- An offer waits after the failure that it follows, twice as long each time, from the failed score's JetStream time: a
  curriculum that starts again waits no longer and no shorter. An episode that was aborted waits as one that failed:
  agents give up over the same outages.
- While a pool is down (`Streaks.is_down`) its slots do not spend their offers on it. One at a time is let through, at
  growing intervals and those with the most offers left first; its success sets all of them free.
- Nobody else waits: slots whose pause is over, other pools, and groups for which there is room.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from agentjet.curriculum.board import Board
from agentjet.curriculum.streak import Streaks
from agentjet.schemas.ids import TicketId, TicketName
from agentjet.schemas.task import Ticket

MAX_PAUSE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Pausing:
    """The slots of a pool that wait to be offered again."""

    pool: str
    num_slots: int
    due: float | None
    """When the next one is offered, JetStream time; None while that hangs on an episode that is being played."""


class Reoffers:
    """Decides which paused tickets of a board are published.

    Args:
        board: Holds the paused tickets.
        streaks: Knows which pools are down.
        first_seconds: Pause after a slot's first failure, by pool.
    """

    def __init__(self, board: Board, streaks: Streaks, first_seconds: Mapping[str, float]) -> None:
        self._board, self._streaks, self._first_seconds = board, streaks, first_seconds

    def add(self, again: Ticket, failed_at: float) -> None:
        """A slot failed; `again` is its next offer. `failed_at`: JetStream time of the failed score."""
        # Pools that are no longer configured are buried.
        first = self._first_seconds.get(again.pool, 0.0)
        # The exponent is bounded: a float has no room for the 2**1100 of somebody's endless offers.
        self._board.paused[again.id] = failed_at + min(first * 2 ** min(again.offer - 1, 30), MAX_PAUSE_SECONDS)

    def take(self, now: float) -> list[Ticket]:
        """The tickets to publish now, which wait no longer."""
        chosen = [ticket for pool, tickets in self._by_pool().items() for ticket in self._due(pool, tickets, now)]
        for ticket in chosen:
            del self._board.paused[ticket]
            self._streaks.probed(self._board.pool_of(ticket))
        found = [self._board.find(ticket) for ticket in chosen]
        return [ticket for ticket in found if isinstance(ticket, Ticket)]

    def waiting(self) -> Iterator[Pausing]:
        """What waits, by pool."""
        for pool, tickets in self._by_pool().items():
            yield Pausing(pool, len(tickets), self._next(pool, tickets))

    def seconds_left(self, now: float) -> float | None:
        """Until something is to be published; None when that is not a matter of time."""
        dues = [one.due for one in self.waiting() if one.due is not None]
        return max(0.0, min(dues) - now) if dues else None

    def _by_pool(self) -> dict[str, list[TicketId]]:
        found: dict[str, list[TicketId]] = {}
        for ticket in self._board.paused:
            found.setdefault(self._board.pool_of(ticket), []).append(ticket)
        return found

    def _due(self, pool: str, tickets: list[TicketId], now: float) -> list[TicketId]:
        paused = self._board.paused
        if not self._streaks.is_down(pool):
            return [ticket for ticket in tickets if paused[ticket] <= now]
        due = self._next(pool, tickets)
        if due is None or due > now:
            return []
        rested = [ticket for ticket in tickets if paused[ticket] <= now] or tickets
        return [min(rested, key=lambda ticket: (TicketName.parse(ticket).offer, paused[ticket]))]

    def _next(self, pool: str, tickets: list[TicketId]) -> float | None:
        first = min(self._board.paused[ticket] for ticket in tickets)
        if not self._streaks.is_down(pool):
            return first
        if self._board.is_offering_again(pool):
            return None
        # Who has just mended the agent does not have to wait.
        return 0.0 if self._streaks.has_changed(pool) else max(first, self._streaks.next_probe(pool))

"""The life of a ticket, as data.

A ticket is seen through several streams that arrive in any order, so a state is never left for an earlier one: what
is stored decides, and a late or repeated sight changes nothing.
"""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from agentjet.schemas.score import Outcome, Score


class TicketState(StrEnum):
    """Where a ticket stands."""

    ISSUED = "issued"
    """In the ledger; nobody plays it."""
    CLAIMED = "claimed"
    """Somebody plays it; a newer claim keeps it here."""
    ENDED = "ended"
    """EPISODES holds its end; it waits for its score."""
    SCORED = "scored"
    """It has a reward: its slot is settled."""
    REOFFERED = "reoffered"
    """It failed and the slot's next offer took over."""
    DEAD = "dead"
    """It failed at the last offer, or its deadline passed: its slot is settled without a reward."""


NEXT: Mapping[TicketState, frozenset[TicketState]] = MappingProxyType(
    {
        TicketState.ISSUED: frozenset(set(TicketState) - {TicketState.ISSUED}),
        TicketState.CLAIMED: frozenset(
            {TicketState.ENDED, TicketState.SCORED, TicketState.REOFFERED, TicketState.DEAD}
        ),
        TicketState.ENDED: frozenset({TicketState.SCORED, TicketState.REOFFERED, TicketState.DEAD}),
        TicketState.SCORED: frozenset(),
        TicketState.REOFFERED: frozenset(),
        TicketState.DEAD: frozenset(),
    }
)
"""The states that may follow each state. ISSUED may be followed by all: the sights between may come late."""


def advance(state: TicketState, seen: TicketState) -> TicketState:
    """The state after a sight: the seen one where it may follow, else the old one."""
    return seen if seen in NEXT[state] else state


def state_of(score: Score) -> TicketState:
    """What a score makes of its ticket."""
    if score.outcome is Outcome.SCORED:
        return TicketState.SCORED
    return TicketState.DEAD if score.closes_slot else TicketState.REOFFERED

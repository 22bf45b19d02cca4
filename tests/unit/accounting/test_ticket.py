from itertools import permutations

import pytest

from agentjet.accounting.ticket import NEXT, TicketState, advance, state_of
from agentjet.schemas.ids import GroupId, RunId
from agentjet.schemas.score import Outcome, Score
from agentjet.schemas.task import Ticket

RUN = RunId("run-abc")


def score(outcome, offer, max_offers=2):
    ticket = Ticket(
        run=RUN,
        pool="p",
        group=GroupId("p-0"),
        member=0,
        offer=offer,
        group_size=1,
        max_offers=max_offers,
        models=("m",),
        seed=0,
        deadline_seconds=1.0,
    )
    return Score(run=RUN, ticket=ticket, attempt=1, outcome=outcome)


@pytest.mark.parametrize(
    ("outcome", "offer", "state"),
    [
        (Outcome.SCORED, 0, TicketState.SCORED),
        (Outcome.INVALID, 0, TicketState.REOFFERED),
        (Outcome.INVALID, 1, TicketState.DEAD),
        (Outcome.ABORTED, 0, TicketState.REOFFERED),
        (Outcome.DEAD, 0, TicketState.DEAD),
    ],
)
def test_a_score_decides_what_becomes_of_the_ticket(outcome, offer, state):
    assert state_of(score(outcome, offer)) is state


def test_sights_in_any_order_end_in_the_same_state():
    sights = [TicketState.CLAIMED, TicketState.ENDED, TicketState.SCORED, TicketState.CLAIMED]
    for order in permutations(sights):
        state = TicketState.ISSUED
        for seen in order:
            state = advance(state, seen)
        assert state is TicketState.SCORED


def test_a_settled_ticket_never_changes():
    for state in (TicketState.SCORED, TicketState.REOFFERED, TicketState.DEAD):
        assert all(advance(state, seen) is state for seen in TicketState)
    assert set(NEXT) == set(TicketState)

"""Ranks and places of the members of a set."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from agentjet.delivery.bit_index import BitIndex


@given(st.lists(st.booleans(), max_size=400))
def test_ranks_and_places_are_those_of_a_list_of_members(mask: list[bool]):
    members = np.flatnonzero(mask)
    index = BitIndex(np.array(mask, np.bool_))
    assert len(index) == len(members)
    ranks = np.arange(len(members))
    assert index.rank(members).tolist() == ranks.tolist()
    assert index.select(ranks).tolist() == members.tolist()


def test_questions_may_come_in_any_order():
    index = BitIndex(np.arange(1000) % 7 == 3)
    assert index.select(np.array([140, 0, 9])).tolist() == [983, 3, 66]
    assert index.rank(np.array([983, 3, 66])).tolist() == [140, 0, 9]

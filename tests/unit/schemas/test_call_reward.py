"""Rewards of single calls fit the episode's calls, or are refused in a sentence."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentjet.errors import CallRewardError
from agentjet.schemas.call_reward import rewards_by_call
from agentjet.schemas.ids import new_call_id

TWO = {"m": ("C1", "C2")}
BOTH = {"m": ("C1", "C2"), "critic": ("D1",)}


def test_a_list_is_in_the_order_of_the_calls_and_a_mapping_by_call_or_completion():
    assert rewards_by_call(None, TWO) == {}
    assert rewards_by_call([1, 0.5], TWO) == {"C1": 1.0, "C2": 0.5}
    assert rewards_by_call({"C2": 1, "chatcmpl-C1": 2}, TWO) == {"C1": 2.0, "C2": 1.0}
    assert rewards_by_call((1, 0), {**TWO, "unused": ()}) == {"C1": 1.0, "C2": 0.0}


def test_a_model_may_go_without_but_none_in_part():
    assert rewards_by_call({"D1": 1}, BOTH) == {"D1": 1.0}
    with pytest.raises(CallRewardError, match="lacks 1 of the 2 calls of m, C2 first"):
        rewards_by_call({"C1": 1, "D1": 1}, BOTH)


@pytest.mark.parametrize(
    ("given", "calls", "said"),
    [
        ([1.0], TWO, "1 numbers for 2 calls"),
        ([1.0, 1.0, 1.0], BOTH, "critic, m"),
        ({"C1": 1, "C9": 1}, TWO, "names C9"),
        ({"C1": 1, "C2": math.nan}, TWO, "'C2'.*no finite number"),
        ([1.0, "2"], TWO, r"\[1\] is '2'"),
        (1.0, TWO, "is a float"),
        ("ab", TWO, "is a str"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(given: object, calls: dict[str, tuple[str, ...]], said: str):
    with pytest.raises(CallRewardError, match=said):
        rewards_by_call(given, calls)


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=5))
def test_a_list_and_the_mapping_that_it_stands_for_are_the_same(values: list[float]):
    calls = {"m": [new_call_id() for _ in values]}
    by_order = rewards_by_call(values, calls)
    assert list(by_order.values()) == values
    assert rewards_by_call({f"chatcmpl-{call}": by_order[call] for call in calls["m"]}, calls) == by_order

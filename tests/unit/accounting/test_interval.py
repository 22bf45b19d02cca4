import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentjet.accounting.interval import IntervalSet


@given(st.lists(st.integers(0, 30)))
def test_it_is_a_set_of_numbers(values):
    intervals, plain = IntervalSet(), set()
    for value in values:
        assert intervals.add(value) is (value not in plain)
        plain.add(value)
    assert len(intervals) == len(plain)
    assert [value in intervals for value in range(32)] == [value in plain for value in range(32)]
    assert intervals.first_gap == min(set(range(32)) - plain)
    assert [intervals.count_below(limit) for limit in range(33)] == [
        len([value for value in plain if value < limit]) for limit in range(33)
    ]
    assert list(IntervalSet(intervals)) == list(intervals)
    assert all(end < start for (_, end), (start, _) in zip(list(intervals), list(intervals)[1:], strict=False))


def test_touching_intervals_are_refused():
    with pytest.raises(ValueError, match="touches"):
        IntervalSet([(0, 2), (2, 3)])

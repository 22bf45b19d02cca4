import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentjet.inference.rate import Rate


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_rate_counts_work_and_not_the_idle_time_between():
    clock = Clock()
    rate = Rate(clock)
    assert rate.per_second == 0.0
    for _ in range(11):
        rate.add(3)
        clock.now += 0.1
    assert rate.per_second == pytest.approx(30.0)
    rate.rest()
    clock.now += 60
    assert rate.per_second == pytest.approx(30.0)
    for _ in range(3):
        rate.add(1)
        clock.now += 0.5
    assert rate.per_second == pytest.approx(2.0)


@pytest.mark.parametrize("step_seconds", [0.05, 1.2, 8.0])
def test_the_requests_of_a_step_are_told_one_by_one_and_count_as_one_event(step_seconds: float):
    clock = Clock()
    rate = Rate(clock)
    for _ in range(4):
        for _ in range(16):
            rate.add(1)
            clock.now += 0.0005
        clock.now += step_seconds - 16 * 0.0005
    assert rate.per_second == pytest.approx(16 / step_seconds)


@given(st.lists(st.tuples(st.floats(0.021, 20.0), st.integers(0, 100)), min_size=2, max_size=200))
def test_a_rate_lies_between_the_slowest_and_the_fastest_moment(steps: list[tuple[float, int]]):
    clock = Clock()
    rate = Rate(clock)
    rate.add(0)
    for pause, count in steps:
        clock.now += pause
        rate.add(count)
    moments = [count / pause for pause, count in steps]
    assert min(moments) * 0.999 <= rate.per_second <= max(moments) * 1.001

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
    assert round(rate.per_second, 3) == 30.0
    clock.now += 60
    assert round(rate.per_second, 3) == 30.0
    for _ in range(3):
        rate.add(1)
        clock.now += 0.5
    assert round(rate.per_second, 3) == 2.0


@given(st.lists(st.tuples(st.floats(0.001, 0.9), st.integers(0, 100)), min_size=2, max_size=200))
def test_a_rate_lies_between_the_slowest_and_the_fastest_moment(steps: list[tuple[float, int]]):
    clock = Clock()
    rate = Rate(clock)
    rate.add(0)
    for pause, count in steps:
        clock.now += pause
        rate.add(count)
    moments = [count / pause for pause, count in steps]
    assert min(moments) * 0.999 <= rate.per_second <= max(moments) * 1.001

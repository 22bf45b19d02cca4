"""The event simulation that `benchmarks/async_overlap.py` compares real runs with."""

import async_overlap
import pytest
import slow_digits


def test_a_synchronous_run_waits_for_the_slowest_episode_of_each_batch():
    size = async_overlap.BATCH_GROUPS
    slowest = [
        max(
            slow_digits.delay_seconds(index, member)
            for index in range(step * size, (step + 1) * size)
            for member in range(async_overlap.GROUP_SIZE)
        )
        for step in range(async_overlap.STEPS)
    ]
    expected = sum(slowest) + 0.25 * async_overlap.STEPS
    assert async_overlap.ideal_seconds("sync", step_seconds=0.25) == pytest.approx(expected)


def test_no_run_is_faster_than_its_slowest_episode_or_its_learner():
    delays = [
        slow_digits.delay_seconds(index, member)
        for index in range(async_overlap.STEPS * async_overlap.BATCH_GROUPS)
        for member in range(async_overlap.GROUP_SIZE)
    ]
    assert async_overlap.ideal_seconds("async", step_seconds=0.0) >= max(delays)
    assert async_overlap.ideal_seconds("async", step_seconds=9.0) >= 9.0 * async_overlap.STEPS


def test_a_looser_bound_never_costs_time_here():
    sync, strict, loose = (async_overlap.ideal_seconds(way, 0.05) for way in ("sync", "strict", "async"))
    assert sync > strict > loose


def test_the_tail_is_ten_to_one():
    delays = sorted(slow_digits.delay_seconds(index, 0) for index in range(20_000))
    assert delays[19_800] / delays[10_000] == pytest.approx(slow_digits.TAIL, rel=0.1)

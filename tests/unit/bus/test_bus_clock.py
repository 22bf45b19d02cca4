"""The bus's time on a machine whose clock is wrong."""

import time

import pytest

from agentjet.bus.clock import BusClock


def test_a_late_delivery_never_worsens_what_an_early_one_taught():
    clock = BusClock()
    assert abs(clock.now() - time.time()) < 1.0
    clock.observe(time.time() + 600.0)  # the local clock is ten minutes behind
    clock.observe(time.time() + 600.0 - 30.0)  # a message that waited half a minute
    assert abs(clock.now() - time.time() - 600.0) < 1.0


def test_a_clock_that_is_ahead_is_set_back():
    clock = BusClock()
    clock.observe(time.time() - 600.0)
    assert abs(clock.now() - time.time() + 600.0) < 1.0


def test_a_local_clock_that_is_set_in_the_middle_of_a_run_changes_nothing(monkeypatch: pytest.MonkeyPatch):
    clock, now = BusClock(), time.time()
    clock.observe(now)
    for jump in (3600.0, -3600.0):
        monkeypatch.setattr(time, "time", lambda jump=jump: now + jump)
        assert abs(clock.now() - now) < 1.0
        clock.observe(now)
        assert abs(clock.now() - now) < 1.0

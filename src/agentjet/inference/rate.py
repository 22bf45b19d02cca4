"""How fast something happens while it happens: idle time does not count."""

import time
from collections import deque
from collections.abc import Callable

_WINDOW_SECONDS = 5.0
_MOMENT_SECONDS = 0.02
"""The calls of one engine step are told one after the other; together they are one event."""


class Rate:
    """Counts per second over the last seconds of work.

    Args:
        clock: Seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._events: deque[tuple[float, int]] = deque()
        self._total = 0
        self._newest = 0.0
        """The last known rate, which stays while nothing happens."""

    def add(self, count: int) -> None:
        """So many have just happened; since the event before it there was work."""
        now, events = self._clock(), self._events
        self._total += count
        if events and now - events[-1][0] < _MOMENT_SECONDS:
            moment, before = events[-1]
            events[-1] = (moment, before + count)
        else:
            events.append((now, count))
        while len(events) > 2 and now - events[0][0] > _WINDOW_SECONDS:
            self._total -= events.popleft()[1]
        seconds = events[-1][0] - events[0][0]
        if seconds > 0:
            # What the first event counts came before the window.
            self._newest = (self._total - events[0][1]) / seconds

    def rest(self) -> None:
        """There is no work any more: the time until the next event does not count."""
        self._events.clear()
        self._total = 0

    @property
    def per_second(self) -> float:
        """Of the last seconds in which anything happened; 0 before."""
        return self._newest

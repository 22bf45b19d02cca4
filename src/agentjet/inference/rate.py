"""How fast something happens while it happens: idle time does not count."""

import time
from collections import deque
from collections.abc import Callable

_WINDOW_SECONDS = 5.0
_IDLE_SECONDS = 1.0


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
        """So many have just happened."""
        now, events = self._clock(), self._events
        if events and now - events[-1][0] > _IDLE_SECONDS:
            events.clear()
            self._total = 0
        events.append((now, count))
        self._total += count
        while now - events[0][0] > _WINDOW_SECONDS:
            self._total -= events.popleft()[1]
        seconds = now - events[0][0]
        if seconds > 0:
            # What the first event counts came before the window.
            self._newest = (self._total - events[0][1]) / seconds

    @property
    def per_second(self) -> float:
        """Of the last seconds in which anything happened; 0 before."""
        return self._newest

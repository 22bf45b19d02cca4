"""The bus's time on a machine whose own clock may be wrong, or may jump.

A stored message's time is never later than its arrival, so the largest difference seen between the two is the best
guess of how far this process is off: each observation can only make it better. Between observations the monotonic clock
carries it on, so that setting the local clock in the middle of a run changes nothing.
"""

import time


class BusClock:
    """JetStream time, from the messages that this process has seen; the local clock until the first one."""

    def __init__(self) -> None:
        self._offset_seconds: float | None = None

    def observe(self, stored_time: float) -> None:
        """Takes the time of a message that has just arrived, seconds since the epoch."""
        offset = stored_time - time.monotonic()
        self._offset_seconds = offset if self._offset_seconds is None else max(self._offset_seconds, offset)

    def now(self) -> float:
        """JetStream time, seconds since the epoch; early by at most the fastest delivery seen."""
        return time.time() if self._offset_seconds is None else self._offset_seconds + time.monotonic()

"""The bus's time, without asking: the newest store time that was seen, carried on by the monotonic clock."""

import time


class BusClock:
    """JetStream time as well as this process can know it; never ahead by more than the drift of the local clock."""

    def __init__(self) -> None:
        self._offset: float | None = None

    def observe(self, stored: float) -> None:
        """A message was seen that the server stored at `stored`; the latest sight of the highest time counts."""
        offset = stored - time.monotonic()
        if self._offset is None or offset > self._offset:
            self._offset = offset

    def now(self) -> float:
        """Seconds since the epoch; the local clock's while nothing was seen."""
        return time.time() if self._offset is None else self._offset + time.monotonic()

"""Places for the requests of one engine: what it may still take from the shared queue, and promise to gateways.

Invariants: nothing is taken from the shared queue without a free place, so that a full engine leaves it to the others;
what was promised keeps its place until it comes, or its promise runs out, and is taken even then.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Iterator

PROMISE_SECONDS = 2.0
_BURST = 8
"""Messages taken from the shared queue at once: of a burst an idle engine gets its part."""


def num_places(max_running: int) -> int:
    """Places of an engine whose batch holds `max_running`: with some to spare, which wait where others leave."""
    return max_running + 1 + max_running // 8


class Room:
    """The places of one engine."""

    def __init__(self, num_places: int) -> None:
        self.num_places = num_places
        self._num_taken = 0
        self._promises: deque[float] = deque()
        self._freed = asyncio.Event()

    @property
    def num_free(self) -> int:
        """Places neither taken nor promised."""
        while self._promises and self._promises[0] <= time.monotonic():
            self._promises.popleft()
        return max(0, self.num_places - self._num_taken - len(self._promises))

    def promise(self) -> bool:
        """Keeps a place for a moment, if there is one."""
        if not self.num_free:
            return False
        self._promises.append(time.monotonic() + PROMISE_SECONDS)
        return True

    @contextlib.contextmanager
    def taken(self, *, is_promised: bool = False) -> Iterator[None]:
        """A place inside the block; of those that were promised, where it is one."""
        if is_promised and self._promises:
            self._promises.popleft()
        self._num_taken += 1
        try:
            yield
        finally:
            self._num_taken -= 1
            self._freed.set()

    async def allowance(self) -> int:
        """How many messages may be taken from the shared queue now: at least one, waited for."""
        while not self.num_free:
            self._freed.clear()
            with contextlib.suppress(TimeoutError):  # promises run out without anybody's doing
                async with asyncio.timeout(PROMISE_SECONDS):
                    await self._freed.wait()
        return min(self.num_free, _BURST)

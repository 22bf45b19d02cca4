"""How late the event loop is, and which function keeps it.

A task measures the lag; a daemon thread watches the task and, when the loop has not moved for the limit, logs the stack
of the thread that runs it, once per stall. A blocked loop gets a bus client cut off, so this is worth a thread.
"""

import asyncio
import sys
import threading
import time
import traceback
from types import TracebackType
from typing import Self

import structlog

log = structlog.get_logger(__name__)

_FRAMES = 12


class LoopWatch:
    """Watches the running loop while its context is open.

    Args:
        stall_seconds: How long the loop may stand still before its stack is logged.
        interval_seconds: How often the lag is measured.
    """

    def __init__(self, *, stall_seconds: float = 2.0, interval_seconds: float = 0.25) -> None:
        self._stall_seconds = stall_seconds
        self._interval_seconds = interval_seconds
        self._beat = time.monotonic()
        self._loop_thread = 0
        self._stop = threading.Event()
        self._task: asyncio.Task[None] | None = None
        self._thread: threading.Thread | None = None
        self.lag_seconds = 0.0
        """How late the newest measurement was."""
        self.max_lag_seconds = 0.0
        """The largest lag so far."""
        self.num_stalls = 0
        self.last_stall: str | None = None
        """The innermost frames of the newest stall, as text."""

    async def __aenter__(self) -> Self:
        self._loop_thread = threading.get_ident()
        self._beat = time.monotonic()
        self._task = asyncio.create_task(self._measure(), name="loop-watch")
        self._thread = threading.Thread(target=self._watch, name="loop-watch", daemon=True)
        self._thread.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._thread:
            await asyncio.to_thread(self._thread.join, 2.0)

    async def _measure(self) -> None:
        while True:
            asked = time.monotonic()
            await asyncio.sleep(self._interval_seconds)
            self._beat = time.monotonic()
            self.lag_seconds = max(0.0, self._beat - asked - self._interval_seconds)
            self.max_lag_seconds = max(self.max_lag_seconds, self.lag_seconds)

    def _watch(self) -> None:
        reported = 0.0
        while not self._stop.wait(min(self._interval_seconds, self._stall_seconds / 4)):
            beat = self._beat
            silent_seconds = time.monotonic() - beat - self._interval_seconds
            if silent_seconds < self._stall_seconds or beat == reported:
                continue
            reported = beat
            self.num_stalls += 1
            self.last_stall = self._stack()
            log.error("the event loop stands still", blocked_seconds=round(silent_seconds, 3), stack=self.last_stall)

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._loop_thread)
        return "".join(traceback.format_stack(frame)[-_FRAMES:]) if frame else "the loop's thread has ended"

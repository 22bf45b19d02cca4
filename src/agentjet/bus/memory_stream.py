"""A stream and its durable consumers in memory, with the semantics of the real ones (contract-tested).

Times come from the event loop's clock, so a test that moves that clock moves expiry and redelivery too.
"""

# ruff: noqa: D102  (documented at the protocols)

import asyncio
import heapq
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from agentjet.bus.pattern import matches, overlap
from agentjet.bus.protocol import ConsumerPlace, Delivery, StoredMessage, StreamInfo, StreamSpec
from agentjet.errors import BusError, BusFullError, ConflictError

_OVERHEAD_BYTES = 30


class MemoryStream:
    """The messages of one stream."""

    def __init__(self, spec: StreamSpec) -> None:
        loop = asyncio.get_running_loop()
        self.spec = spec
        self.consumers: dict[str, ConsumerState] = {}
        self.last_sequence = 0
        self._last_time = 0.0
        self._epoch = time.time() - loop.time()
        self._messages: dict[int, StoredMessage] = {}
        self._by_subject: dict[str, list[int]] = {}
        self._num_bytes = 0
        self._expiries: list[tuple[float, int]] = []
        self._changed = asyncio.Event()

    def widen(self, spec: StreamSpec) -> None:
        """As `ensure_stream` does on the server: only ever grow."""
        if spec.work_queue != self.spec.work_queue:
            raise BusError(f"stream {spec.name} exists with another retention; use another run")
        self.spec = replace(
            self.spec,
            subjects=tuple(sorted({*self.spec.subjects, *spec.subjects})),
            max_bytes=max(self.spec.max_bytes, spec.max_bytes),
            allow_message_ttl=self.spec.allow_message_ttl or spec.allow_message_ttl,
        )

    def takes(self, subject: str) -> bool:
        """Whether the subject is one of the stream's."""
        return any(matches(pattern, subject) for pattern in self.spec.subjects)

    def store(
        self,
        subject: str,
        payload: bytes,
        headers: Mapping[str, str],
        *,
        expected: int | None,
        ttl_seconds: float | None,
    ) -> int:
        """Append a message; see `Bus.publish` for what is raised."""
        self.expire()
        if ttl_seconds is not None and not self.spec.allow_message_ttl:
            raise BusError(f"storing {subject}: create the stream with allow_message_ttl")
        present = self._by_subject.get(subject)
        if expected is not None and expected != (present[-1] if present else 0):
            raise ConflictError(subject, expected)
        self._make_room(subject, payload, headers)
        loop = asyncio.get_running_loop()
        self.last_sequence += 1
        sequence = self.last_sequence
        self._last_time = self._epoch + loop.time()
        message = StoredMessage(subject, bytes(payload), dict(headers), sequence, self._last_time)
        self._messages[sequence] = message
        self._by_subject.setdefault(subject, []).append(sequence)
        self._num_bytes += _size(message)
        lifetimes = [s for s in (ttl_seconds and max(1, math.ceil(ttl_seconds)), self.spec.max_age_seconds) if s]
        if lifetimes:
            heapq.heappush(self._expiries, (loop.time() + min(lifetimes), sequence))
        self.wake()
        return sequence

    def _make_room(self, subject: str, payload: bytes, headers: Mapping[str, str]) -> None:
        size = _size(StoredMessage(subject, payload, headers, 0, 0.0))
        while self.spec.discard_old and self._messages and self._num_bytes + size > self.spec.max_bytes:
            self.remove(next(iter(self._messages)))
        if self._num_bytes + size > self.spec.max_bytes:
            raise BusFullError(f"storing {subject}: stream {self.spec.name} is full; raise its max_bytes")

    def remove(self, sequence: int) -> None:
        """Forget a message."""
        message = self._messages.pop(sequence, None)
        if message is None:
            return
        self._num_bytes -= _size(message)
        sequences = self._by_subject[message.subject]
        sequences.remove(sequence)
        if not sequences:
            del self._by_subject[message.subject]

    def purge(self, below_sequence: int) -> None:
        """Forget messages below a sequence."""
        for sequence in [s for s in self._messages if s < below_sequence]:
            self.remove(sequence)

    def expire(self) -> None:
        """Forget messages whose time is over."""
        now = asyncio.get_running_loop().time()
        while self._expiries and self._expiries[0][0] <= now:
            self.remove(heapq.heappop(self._expiries)[1])

    def get(self, sequence: int) -> StoredMessage | None:
        self.expire()
        return self._messages.get(sequence)

    def last(self, subject: str) -> StoredMessage | None:
        self.expire()
        sequences = self._by_subject.get(subject)
        return self._messages[sequences[-1]] if sequences else None

    def subjects(self, pattern: str) -> list[str]:
        """Subjects that have a message and fall under a pattern."""
        self.expire()
        return [subject for subject in self._by_subject if matches(pattern, subject)]

    def after(self, sequence: int, pattern: str) -> StoredMessage | None:
        """The first message at or above a sequence that falls under a pattern."""
        self.expire()
        for candidate in range(max(sequence, 1), self.last_sequence + 1):
            message = self._messages.get(candidate)
            if message is not None and matches(pattern, message.subject):
                return message
        return None

    def info(self, *, with_consumers: bool) -> StreamInfo:
        self.expire()
        self._forget_inactive()
        asked = self.consumers if with_consumers else {}
        return StreamInfo(
            name=self.spec.name,
            num_messages=len(self._messages),
            num_bytes=self._num_bytes,
            max_bytes=self.spec.max_bytes,
            first_sequence=next(iter(self._messages), self.last_sequence + 1 if self.last_sequence else 0),
            last_sequence=self.last_sequence,
            last_time=self._last_time,
            consumers={name: one.num_pending() + len(one.running) for name, one in asked.items()},
            places={name: ConsumerPlace(one.subject, one.first_sequence) for name, one in asked.items()},
            time=self._epoch + asyncio.get_running_loop().time(),
        )

    def wake(self) -> None:
        """Let everything look again that waits for this stream."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def change(self, timeout_seconds: float) -> None:
        """Wait for the next change, or until the limit."""
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._changed.wait()
        except TimeoutError:
            return

    def add_consumer(
        self, durable: str, subject: str, ack_wait_seconds: float, max_ack_pending: int
    ) -> "ConsumerState":
        """Create or re-configure a durable consumer; a work queue refuses overlapping ones, as the server does."""
        self._forget_inactive()
        for name, other in self.consumers.items():
            if self.spec.work_queue and name != durable and overlap(other.subject, subject):
                raise BusError(f"consumer {durable} on {self.spec.name} overlaps {name} on a work queue")
        state = self.consumers.setdefault(durable, ConsumerState(self, subject))
        state.ack_wait_seconds, state.max_ack_pending = ack_wait_seconds, max_ack_pending
        return state

    def _forget_inactive(self) -> None:
        self.consumers = {name: one for name, one in self.consumers.items() if not one.is_inactive}


@dataclass(slots=True)
class Running:
    """A delivery that is not acknowledged."""

    due: float
    """Loop time at which it is handed out again."""
    num_delivered: int


class ConsumerState:
    """A durable consumer's position and open deliveries."""

    def __init__(self, stream: MemoryStream, subject: str) -> None:
        self.stream = stream
        self.subject = subject
        self.ack_wait_seconds = 30.0
        self.max_ack_pending = 10_000
        self.inactive_seconds = 0.0
        self.running: dict[int, Running] = {}
        self._next = 1
        self._asked_at = asyncio.get_running_loop().time()

    def num_pending(self) -> int:
        """Messages not yet delivered."""
        count, sequence = 0, self._next
        while message := self.stream.after(sequence, self.subject):
            count, sequence = count + 1, message.sequence + 1
        return count

    @property
    def is_inactive(self) -> bool:
        """Nobody has fetched for longer than it may live so."""
        return 0 < self.inactive_seconds < asyncio.get_running_loop().time() - self._asked_at

    @property
    def first_sequence(self) -> int:
        """Every message before it is acknowledged."""
        return min([*self.running, self._next])

    def take(self, batch: int) -> list[tuple[StoredMessage, int]]:
        """Up to `batch` (message, deliveries): overdue ones first, then new ones."""
        now = self._asked_at = asyncio.get_running_loop().time()
        taken: list[tuple[StoredMessage, int]] = []
        for sequence in sorted(s for s, r in self.running.items() if r.due <= now):
            message = self.stream.get(sequence)
            if message is None:
                del self.running[sequence]
            elif len(taken) < batch:
                taken.append(self._hand_out(message, self.running[sequence].num_delivered + 1))
        while len(taken) < batch and len(self.running) < self.max_ack_pending:
            message = self.stream.after(self._next, self.subject)
            if message is None:
                break
            self._next = message.sequence + 1
            taken.append(self._hand_out(message, 1))
        return taken

    def _hand_out(self, message: StoredMessage, num_delivered: int) -> tuple[StoredMessage, int]:
        due = asyncio.get_running_loop().time() + self.ack_wait_seconds
        self.running[message.sequence] = Running(due, num_delivered)
        return message, num_delivered

    def next_due(self) -> float | None:
        """Loop time of the next redelivery."""
        return min((r.due for r in self.running.values()), default=None)

    def done(self, sequence: int) -> None:
        """Acknowledged: a work queue forgets the message."""
        self.running.pop(sequence, None)
        if self.stream.spec.work_queue:
            self.stream.remove(sequence)
        self.stream.wake()

    def delay(self, sequence: int, seconds: float) -> None:
        """Hand out again after `seconds` (nak, or in progress)."""
        if sequence in self.running:
            self.running[sequence].due = asyncio.get_running_loop().time() + seconds
            self.stream.wake()


class MemoryDelivery:
    """A message handed out by a `MemoryConsumer`."""

    __slots__ = ("_state", "message", "num_delivered")

    def __init__(self, state: ConsumerState, message: StoredMessage, num_delivered: int) -> None:
        self._state = state
        self.message: StoredMessage = message
        self.num_delivered: int = num_delivered

    async def ack(self) -> None:
        self._state.done(self.message.sequence)

    async def nak(self, delay_seconds: float = 0.0) -> None:
        self._state.delay(self.message.sequence, delay_seconds)

    async def in_progress(self) -> None:
        self._state.delay(self.message.sequence, self._state.ack_wait_seconds)


class MemoryConsumer:
    """A durable pull consumer; several may share one state."""

    def __init__(self, state: ConsumerState) -> None:
        self._state = state

    async def fetch(self, batch: int, timeout_seconds: float) -> Sequence[Delivery]:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_seconds
        while True:
            taken = self._state.take(batch)
            if taken or loop.time() >= deadline:
                return [MemoryDelivery(self._state, message, count) for message, count in taken]
            wake_at = min(deadline, self._state.next_due() or deadline)
            # A blocked `max_ack_pending` leaves overdue times in the past; never spin on them.
            await self._state.stream.change(max(wake_at - loop.time(), 0.001))

    async def num_pending(self) -> int:
        return self._state.num_pending()


def _size(message: StoredMessage) -> int:
    headers = sum(len(k) + len(v) + 4 for k, v in message.headers.items())
    return len(message.payload) + len(message.subject) + headers + _OVERHEAD_BYTES

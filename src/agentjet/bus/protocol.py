"""What the rest of the code base knows of the bus.

`NatsBus` (the real server) and `MemoryBus` (a twin for tests) implement `Bus`; one contract suite runs on both.

Invariants:

- A stored message never changes. `publish` with `expected=0` is create-only; with `expected=n` it is a
  compare-and-set on the subject's last sequence; a loser gets `ConflictError`.
- `publish` returns only when the message is stored. If the acknowledgement never arrives it publishes again under the
  same subject and expectation and, when a conflict shows that the first try was stored, returns that sequence.
- A durable consumer hands out each stored message at least once, in stream order, and again after `ack_wait` unless it
  was acknowledged; a handler's message is kept in progress while the handler runs. Acknowledgements carry no truth.
- Times are JetStream's (seconds since the epoch), never the local clock's.

It does not know record types: payloads are bytes, headers a flat mapping. `agentjet.schemas.codec` is the bridge.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol

ACK_WAIT_SECONDS = 10.0
"""How long a message that was handed out may stay silent: what a killed worker held waits that long for another."""


@dataclass(frozen=True, slots=True)
class StreamSpec:
    """How a stream is to exist on the server; `Bus.ensure_stream` creates or widens it."""

    name: str
    subjects: tuple[str, ...]
    max_bytes: int
    """Hard limit; a full stream refuses new messages (discard new), it never drops old ones."""
    work_queue: bool = False
    """Each message leaves the stream when it is acknowledged (TASKS, INFER)."""
    max_age_seconds: float = 0.0
    """0 keeps for ever."""
    allow_message_ttl: bool = False
    """Messages may carry a time to live of their own."""
    discard_old: bool = False
    """Only for EVENTS: a full stream drops its oldest message instead of refusing."""
    replicas: int = 1


@dataclass(frozen=True, slots=True)
class ConsumerPlace:
    """Where a durable consumer stands."""

    subject: str
    """What it reads."""
    first_sequence: int
    """Every message before it is acknowledged."""


@dataclass(frozen=True, slots=True)
class StreamInfo:
    """A stream's state as the server counts it."""

    name: str
    num_messages: int
    num_bytes: int
    max_bytes: int
    first_sequence: int
    last_sequence: int
    last_time: float
    """JetStream time of the newest message in seconds since the epoch; 0.0 when there has been none."""
    consumers: Mapping[str, int] = field(default_factory=dict[str, int])
    """Messages not yet acknowledged (waiting or running) for each durable consumer, where asked for."""
    places: Mapping[str, ConsumerPlace] = field(default_factory=dict[str, ConsumerPlace])
    """Of the same consumers."""
    time: float = 0.0
    """JetStream time of this reading in seconds since the epoch; 0.0 where the server does not say."""


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """A message read from a stream."""

    subject: str
    payload: bytes
    headers: Mapping[str, str]
    sequence: int
    time: float
    """When the server stored it, seconds since the epoch."""


class Delivery(Protocol):
    """A message handed out by a durable consumer, to be settled by exactly one of ack, nak and term."""

    @property
    def message(self) -> StoredMessage: ...
    @property
    def num_delivered(self) -> int:
        """How often the consumer has handed it out; a hint only, a server restart may reset it."""
        ...

    async def ack(self) -> None: ...
    async def nak(self, delay_seconds: float = 0.0) -> None:
        """Hand it out again, not before the delay."""
        ...

    async def in_progress(self) -> None:
        """Restart the clock of `ack_wait`."""
        ...


class Consumer(Protocol):
    """A durable pull consumer."""

    async def fetch(self, batch: int, timeout_seconds: float) -> Sequence[Delivery]:
        """Up to `batch` deliveries; an empty list when none came in time. Never raises for silence."""
        ...

    async def num_pending(self) -> int:
        """Messages not yet delivered."""
        ...


@dataclass(frozen=True, slots=True)
class Request:
    """A request of another actor, or a plain message; `reply` is None when no answer is wanted."""

    subject: str
    payload: bytes
    headers: Mapping[str, str]
    reply: str | None


Handler = Callable[[Request], Awaitable[tuple[bytes, Mapping[str, str]] | None]]
"""Answers a request with (payload, headers), or None for no answer."""


class Subscription(Protocol):
    """A plain (not stored) subscription; messages come out in order."""

    def messages(self) -> AsyncIterator[Request]: ...
    async def next(self, timeout_seconds: float) -> Request:
        """The next message; BusTimeoutError when none came in time."""
        ...

    async def close(self) -> None: ...


class Bus(Protocol):
    """The messages between actors."""

    @property
    def max_payload_bytes(self) -> int:
        """Largest body that fits a message beside its headers."""
        ...

    @property
    def last_error(self) -> str | None:
        """Why the bus is not usable now, or None while it is connected."""
        ...

    async def ensure_stream(self, spec: StreamSpec) -> None: ...
    async def stream_names(self, prefix: str) -> list[str]: ...
    async def delete_stream(self, name: str) -> None: ...
    async def stream_info(self, name: str, *, with_consumers: bool = False) -> StreamInfo: ...

    async def publish(
        self,
        subject: str,
        payload: bytes,
        *,
        stream: str,
        headers: Mapping[str, str] | None = None,
        expected: int | None = None,
        ttl_seconds: float | None = None,
        reply: str | None = None,
        timeout_seconds: float = 10.0,
    ) -> int:
        """Store a message; returns its stream sequence.

        `expected`: None stores always; 0 create-only; n only if the subject's last message has sequence n.
        `reply` rides in the header `AJ-Reply` (JetStream itself uses the reply subject).

        Raises ConflictError, BusFullError, BusTimeoutError (the message may be stored or not, even later),
        RecordTooLargeError.
        """
        ...

    async def get(self, stream: str, sequence: int) -> StoredMessage | None: ...
    async def last(self, stream: str, subject: str) -> StoredMessage | None:
        """The newest message of one subject (no wildcards)."""
        ...

    async def last_many(self, stream: str, subjects: Sequence[str]) -> dict[str, StoredMessage]:
        """The newest message of each subject or wildcard that has one."""
        ...

    def scan(
        self, stream: str, subject: str = ">", *, start: int = 1, end: int | None = None
    ) -> AsyncIterator[StoredMessage]:
        """Stored messages in order from sequence `start` to `end` (inclusive; None: the last one at the call)."""
        ...

    def tail(self, stream: str, subject: str = ">", *, start: int = 1) -> AsyncIterator[StoredMessage]:
        """As `scan`, then goes on with what is stored later, for ever. Gapless across reconnects."""
        ...

    async def consumer(
        self,
        stream: str,
        durable: str,
        *,
        subject: str = ">",
        ack_wait_seconds: float = ACK_WAIT_SECONDS,
        max_ack_pending: int = 10_000,
        inactive_seconds: float = 0.0,
    ) -> Consumer:
        """The durable pull consumer of that name, created when it is not there (max_deliver unlimited).

        `inactive_seconds`: it is forgotten when nobody has fetched for as long; 0 keeps it for ever.
        """
        ...

    async def purge(self, stream: str, *, below_sequence: int) -> None:
        """Forget messages below a sequence (by sequence only: by subject costs 15 ms each)."""
        ...

    async def send(self, subject: str, payload: bytes, *, headers: Mapping[str, str] | None = None) -> None:
        """Send a plain message that is not stored (deltas, replies)."""
        ...

    def inbox(self) -> str:
        """A fresh subject for replies."""
        ...

    async def subscribe(self, subject: str) -> Subscription: ...

    async def request(
        self, subject: str, payload: bytes, *, headers: Mapping[str, str] | None = None, timeout_seconds: float = 5.0
    ) -> Request:
        """Ask another actor; BusTimeoutError when nobody answers in time, BusError when nobody listens."""
        ...

    def serve(self, subject: str, handler: Handler, *, queue: str) -> AbstractAsyncContextManager[None]:
        """Answer requests while the context is open; servers of one `queue` share them. Handlers run concurrently."""
        ...

    async def put_presence(self, bucket: str, key: str, payload: bytes, *, ttl_seconds: float) -> None:
        """A heartbeat that vanishes `ttl_seconds` after its last renewal. For liveness only."""
        ...

    async def drop_presence(self, bucket: str, key: str) -> None:
        """Take a heartbeat back at once; BusError where the bucket was never made."""
        ...

    async def presence(self, bucket: str, prefix: str = "") -> dict[str, bytes]:
        """Live keys and their payloads; by the server's clock, also where it slept while they ran out."""
        ...

    async def put_blob(self, stream: str, subject_prefix: str, data: bytes, *, ttl_seconds: float | None = None) -> str:
        """Store `data` in pipelined chunks under `<subject_prefix>.<sha256>.<chunk>`; returns the sha256.

        Idempotent: chunks already stored are kept. The record that names the blob is published afterwards. The chunks
        vanish after `ttl_seconds`.
        """
        ...

    async def get_blob(self, stream: str, subject_prefix: str, sha256: str, num_bytes: int) -> bytes:
        """BlobError when chunks are missing or the digest differs."""
        ...

    async def close(self) -> None: ...

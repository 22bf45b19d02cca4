"""`MemoryBus`: the bus inside one process, a twin of `NatsBus` for tests.

The same contract suite runs on both. One object is shared by all actors of a test; `close` therefore only marks the
end. It imitates what actors rely on (conflicts, full streams, expiry, redelivery), not limits or permissions.
"""

# ruff: noqa: D102  (documented at the protocols)

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from agentjet.bus import blob
from agentjet.bus.memory_stream import MemoryConsumer, MemoryStream
from agentjet.bus.message import ERROR_HEADER, REPLY_HEADER
from agentjet.bus.pattern import matches
from agentjet.bus.plain import answer
from agentjet.bus.protocol import (
    ACK_WAIT_SECONDS,
    Consumer,
    Handler,
    Request,
    StoredMessage,
    StreamInfo,
    StreamSpec,
    Subscription,
)
from agentjet.errors import BusError, BusTimeoutError, RecordTooLargeError

_PRESENCE_BYTES = 64 * 1024 * 1024


class MemoryBus:
    """All streams and subscriptions of one imaginary server."""

    def __init__(self, *, max_payload_bytes: int = 1024 * 1024 - 4096) -> None:
        self._max_payload_bytes = max_payload_bytes
        self._streams: dict[str, MemoryStream] = {}
        self._subscriptions: list[MemorySubscription] = []
        self._numbers = itertools.count(1)

    @property
    def max_payload_bytes(self) -> int:
        return self._max_payload_bytes

    @property
    def last_error(self) -> str | None:
        return None

    async def close(self) -> None:
        """Nothing to release; the object stays usable for the other actors that share it."""

    # Streams

    def _stream(self, name: str) -> MemoryStream:
        try:
            return self._streams[name]
        except KeyError:
            raise BusError(f"stream {name}: it does not exist; check the run's name") from None

    async def ensure_stream(self, spec: StreamSpec) -> None:
        if spec.name in self._streams:
            self._streams[spec.name].widen(spec)
        else:
            self._streams[spec.name] = MemoryStream(spec)

    async def stream_names(self, prefix: str) -> list[str]:
        return sorted(name for name in self._streams if name.startswith(prefix))

    async def delete_stream(self, name: str) -> None:
        self._streams.pop(name, None)

    async def stream_info(self, name: str, *, with_consumers: bool = False) -> StreamInfo:
        return self._stream(name).info(with_consumers=with_consumers)

    async def purge(self, stream: str, *, below_sequence: int) -> None:
        self._stream(stream).purge(below_sequence)

    # Publishing

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
        # A real publish always gives other tasks a turn; code that relies on not doing so must fail here too.
        await asyncio.sleep(0)
        self._check_size(subject, payload)
        target = self._stream(stream)
        if not target.takes(subject):
            raise BusError(f"storing {subject}: stream {stream} does not take this subject")
        wire = dict(headers or {}) | ({REPLY_HEADER: reply} if reply is not None else {})
        sequence = target.store(subject, payload, wire, expected=expected, ttl_seconds=ttl_seconds)
        self._deliver(Request(subject, payload, wire, None))
        return sequence

    def _check_size(self, subject: str, payload: bytes) -> None:
        if len(payload) > self._max_payload_bytes:
            raise RecordTooLargeError(f"{subject}: {len(payload)} bytes exceed the limit of {self._max_payload_bytes}")

    # Reading

    async def get(self, stream: str, sequence: int) -> StoredMessage | None:
        return self._stream(stream).get(sequence)

    async def last(self, stream: str, subject: str) -> StoredMessage | None:
        return self._stream(stream).last(subject)

    async def last_many(self, stream: str, subjects: Sequence[str]) -> dict[str, StoredMessage]:
        source = self._stream(stream)
        wanted = {subject for pattern in subjects for subject in source.subjects(pattern)}
        found = ((subject, source.last(subject)) for subject in wanted)
        return {subject: message for subject, message in found if message is not None}

    async def scan(
        self, stream: str, subject: str = ">", *, start: int = 1, end: int | None = None
    ) -> AsyncIterator[StoredMessage]:
        source = self._stream(stream)
        stop = source.last_sequence if end is None else end
        position = start
        while (message := source.after(position, subject)) and message.sequence <= stop:
            position = message.sequence + 1
            yield message

    async def tail(self, stream: str, subject: str = ">", *, start: int = 1) -> AsyncIterator[StoredMessage]:
        source = self._stream(stream)
        position = start
        while True:
            message = source.after(position, subject)
            if message is None:
                await source.change(1.0)
                continue
            position = message.sequence + 1
            yield message

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
        state = self._stream(stream).add_consumer(durable, subject, ack_wait_seconds, max_ack_pending)
        state.inactive_seconds = inactive_seconds
        return MemoryConsumer(state)

    # Plain messages

    def _deliver(self, message: Request) -> int:
        """Hand a message to its subscribers, one of each queue group; returns how many got it."""
        groups: dict[str, list[MemorySubscription]] = {}
        for subscription in self._subscriptions:
            if matches(subscription.subject, message.subject):
                groups.setdefault(subscription.group, []).append(subscription)
        for members in groups.values():
            members[next(self._numbers) % len(members)].queue.put_nowait(message)
        return len(groups)

    async def send(self, subject: str, payload: bytes, *, headers: Mapping[str, str] | None = None) -> None:
        await asyncio.sleep(0)
        self._check_size(subject, payload)
        self._deliver(Request(subject, bytes(payload), dict(headers or {}), None))

    def inbox(self) -> str:
        return f"_INBOX.memory.{next(self._numbers)}"

    def _subscribe(self, subject: str, queue: str = "") -> "MemorySubscription":
        group = queue or f"alone-{next(self._numbers)}"
        subscription = MemorySubscription(self._subscriptions, subject, group)
        self._subscriptions.append(subscription)
        return subscription

    async def subscribe(self, subject: str) -> Subscription:
        return self._subscribe(subject)

    async def request(
        self, subject: str, payload: bytes, *, headers: Mapping[str, str] | None = None, timeout_seconds: float = 5.0
    ) -> Request:
        inbox = self._subscribe(self.inbox())
        try:
            if not self._deliver(Request(subject, bytes(payload), dict(headers or {}), inbox.subject)):
                raise BusError(f"{subject}: nobody answers requests there; is its actor running?")
            reply = await inbox.next(timeout_seconds)
        finally:
            await inbox.close()
        if ERROR_HEADER in reply.headers:
            raise BusError(f"{subject}: the other side failed: {reply.headers[ERROR_HEADER]}")
        return reply

    @asynccontextmanager
    async def serve(self, subject: str, handler: Handler, *, queue: str) -> AsyncGenerator[None]:
        subscription = self._subscribe(subject, f"queue-{queue}")
        running: set[asyncio.Task[None]] = set()

        async def work(request: Request) -> None:
            reply = await answer(handler, request)
            if reply is not None and request.reply:
                await self.send(request.reply, reply[0], headers=reply[1])

        async def loop() -> None:
            async for request in subscription.messages():
                task = asyncio.ensure_future(work(request))
                running.add(task)
                task.add_done_callback(running.discard)

        server = asyncio.ensure_future(loop())
        try:
            yield
        finally:
            await subscription.close()
            server.cancel()
            if running:
                await asyncio.wait(running, timeout=5.0)
            tasks = [server, *running]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # Presence and blobs

    async def put_presence(self, bucket: str, key: str, payload: bytes, *, ttl_seconds: float) -> None:
        name = f"KV_{bucket}"
        subject = f"$KV.{bucket}.{key}"
        await self.ensure_stream(StreamSpec(name, (f"$KV.{bucket}.>",), _PRESENCE_BYTES, allow_message_ttl=True))
        previous = self._stream(name).last(subject)
        await self.publish(subject, payload, stream=name, ttl_seconds=ttl_seconds)
        if previous is not None:
            self._stream(name).remove(previous.sequence)

    async def drop_presence(self, bucket: str, key: str) -> None:
        stream = self._stream(f"KV_{bucket}")
        previous = stream.last(f"$KV.{bucket}.{key}")
        if previous is not None:
            stream.remove(previous.sequence)

    async def presence(self, bucket: str, prefix: str = "") -> dict[str, bytes]:
        if f"KV_{bucket}" not in self._streams:
            return {}
        base = f"$KV.{bucket}."
        found = await self.last_many(f"KV_{bucket}", [f"{base}>"])
        live = {subject.removeprefix(base): message.payload for subject, message in found.items()}
        return {key: payload for key, payload in live.items() if key.startswith(prefix)}

    async def put_blob(self, stream: str, subject_prefix: str, data: bytes, *, ttl_seconds: float | None = None) -> str:
        return await blob.put_blob(self, stream, subject_prefix, data, ttl_seconds=ttl_seconds)

    async def get_blob(self, stream: str, subject_prefix: str, sha256: str, num_bytes: int) -> bytes:
        return await blob.get_blob(self, stream, subject_prefix, sha256, num_bytes)


class MemorySubscription:
    """A plain subscription of a `MemoryBus`."""

    def __init__(self, registry: "list[MemorySubscription]", subject: str, group: str) -> None:
        self.subject = subject
        self.group = group
        self.queue: asyncio.Queue[Request] = asyncio.Queue()
        self._registry = registry

    async def messages(self) -> AsyncIterator[Request]:
        while True:
            yield await self.queue.get()

    async def next(self, timeout_seconds: float) -> Request:
        try:
            async with asyncio.timeout(timeout_seconds):
                return await self.queue.get()
        except TimeoutError:
            raise BusTimeoutError(f"{self.subject}: no message within {timeout_seconds:g} s") from None

    async def close(self) -> None:
        if self in self._registry:
            self._registry.remove(self)

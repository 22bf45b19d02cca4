"""`NatsBus`: the bus on a real NATS server with JetStream.

Invariants: those of `agentjet.bus.protocol`. Every wait is bounded; every operation outlives a server restart within
its time limit; a publish carries a random id by which the server drops, and we recognise, a repeat of our own.
"""

# ruff: noqa: D102  (documented at the protocols)

import asyncio
import json
import math
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Self

from agentjet.bus import blob, stream
from agentjet.bus.connection import ConnectionLostError, NatsConnection, NobodyListensError
from agentjet.bus.fault import STREAM_NOT_FOUND, WRONG_LAST_SEQUENCE, code_of, is_temporary, translate
from agentjet.bus.message import ERROR_HEADER, PUBLISH_ID, REPLY_HEADER, own_headers
from agentjet.bus.plain import NatsSubscription, serve
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
from agentjet.bus.pull import NatsConsumer
from agentjet.bus.reader import StreamReader
from agentjet.errors import BusError, BusTimeoutError, ConflictError, RecordTooLargeError

_HEADROOM_BYTES = 4 * 1024
_ATTEMPT_SECONDS = 3.0
_RETRY_SECONDS = 0.05
_PRESENCE_BYTES = 64 * 1024 * 1024
_LONGEST_LIFETIME_SECONDS = 60.0
"""Of a heartbeat that does not say."""
LIFETIME_HEADER = "AJ-Lifetime"
"""Seconds that a heartbeat lives: what `Nats-TTL` says to the server, for readers."""


class NatsBus:
    """A connection to a NATS server, as `Bus`."""

    def __init__(self, connection: NatsConnection) -> None:
        self._connection = connection
        self._reader = StreamReader(connection)

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        name: str,
        user: str | None = None,
        password: str | None = None,
        token: str | None = None,
        credentials: str | None = None,
        timeout_seconds: float = 10.0,
    ) -> Self:
        """Connect; see `NatsConnection.open` for the arguments and the reasons of `BusUnavailableError`."""
        return cls(
            await NatsConnection.open(
                url,
                name=name,
                user=user,
                password=password,
                token=token,
                credentials=credentials,
                timeout_seconds=timeout_seconds,
            )
        )

    @property
    def max_payload_bytes(self) -> int:
        return self._connection.client.max_payload - _HEADROOM_BYTES

    @property
    def last_error(self) -> str | None:
        return self._connection.last_error

    async def wait_closed(self) -> str:
        """Return, with the reason, once the connection is closed for good; fatal unless `close` was called."""
        await self._connection.wait_closed()
        return self._connection.last_error or "closed"

    async def close(self) -> None:
        await self._connection.close()

    # Streams

    async def ensure_stream(self, spec: StreamSpec) -> None:
        await stream.ensure(self._connection, spec)
        self._reader.forget(spec.name)

    async def stream_names(self, prefix: str) -> list[str]:
        return await stream.names(self._connection, prefix)

    async def delete_stream(self, name: str) -> None:
        reply = await self._connection.api_reply(f"STREAM.DELETE.{name}", what=f"stream {name}")
        self._reader.forget(name)
        if "error" in reply and code_of(reply["error"]) != STREAM_NOT_FOUND:
            raise translate(reply["error"], f"stream {name}")

    async def stream_info(self, name: str, *, with_consumers: bool = False) -> StreamInfo:
        return await stream.info(self._connection, name, with_consumers=with_consumers)

    async def purge(self, stream: str, *, below_sequence: int) -> None:
        if below_sequence > 1:
            await self._connection.api(f"STREAM.PURGE.{stream}", {"seq": below_sequence}, what=f"purging {stream}")

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
        publish_id = secrets.token_hex(8)
        wire = dict(headers or {}) | {PUBLISH_ID: publish_id, "Nats-Expected-Stream": stream}
        if expected is not None:
            wire["Nats-Expected-Last-Subject-Sequence"] = str(expected)
        if ttl_seconds is not None:
            wire["Nats-TTL"] = _ttl(ttl_seconds)
        if reply is not None:
            wire[REPLY_HEADER] = reply
        self._check_size(subject, payload, wire)
        answer, is_repeat = await self._store(subject, payload, wire, stream, timeout_seconds)
        if "error" not in answer:
            return int(answer["seq"])
        if code_of(answer["error"]) not in WRONG_LAST_SEQUENCE or expected is None:
            raise translate(answer["error"], f"storing {subject} in {stream}")
        if is_repeat:
            stored = await self._reader.publish_id_after(stream, subject, expected)
            if stored and stored[1] == publish_id:
                return stored[0]
        raise ConflictError(subject, expected)

    async def _store(
        self, subject: str, payload: bytes, wire: Mapping[str, str], stream: str, timeout_seconds: float
    ) -> tuple[dict[str, Any], bool]:
        """Send until the server answers; returns its answer, and whether an earlier try may have been stored."""
        what = f"storing {subject} in {stream}"
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_seconds
        is_repeat = is_unheard = False
        while True:
            remaining = deadline - loop.time()
            if remaining <= 0 and is_unheard:
                raise BusError(f"{what}: the stream does not take this subject, or is not ready")
            if remaining <= 0 or not await self._connection.connected(remaining):
                raise self._connection.timed_out(what, timeout_seconds)
            try:
                attempt = min(_ATTEMPT_SECONDS, max(deadline - loop.time(), 0.01))
                message = await self._connection.ask(subject, payload, headers=wire, timeout_seconds=attempt)
            except NobodyListensError:
                # Either the stream is missing, which this raises, or JetStream still starts.
                await self._connection.api(f"STREAM.INFO.{stream}", what=what)
                is_unheard = True
            except (ConnectionLostError, BusTimeoutError):
                is_repeat, is_unheard = True, False
                continue
            else:
                is_unheard = False
                answer: dict[str, Any] = json.loads(message.data)
                if "error" not in answer or not is_temporary(answer["error"]):
                    return answer, is_repeat
            await asyncio.sleep(_RETRY_SECONDS)

    def _check_size(self, subject: str, payload: bytes, headers: Mapping[str, str]) -> None:
        num_header_bytes = sum(len(k) + len(v) + 4 for k, v in headers.items())
        if len(payload) > self.max_payload_bytes or num_header_bytes > _HEADROOM_BYTES - 16:
            raise RecordTooLargeError(
                f"{subject}: {len(payload)} bytes and {num_header_bytes} of headers exceed the server's limit of "
                f"{self.max_payload_bytes} and {_HEADROOM_BYTES - 16}; store the payload as a blob"
            )

    # Reading

    async def get(self, stream: str, sequence: int) -> StoredMessage | None:
        return await self._reader.get(stream, sequence)

    async def last(self, stream: str, subject: str) -> StoredMessage | None:
        return await self._reader.last(stream, subject)

    async def last_many(self, stream: str, subjects: Sequence[str]) -> dict[str, StoredMessage]:
        return await self._reader.last_many(stream, subjects)

    def scan(
        self, stream: str, subject: str = ">", *, start: int = 1, end: int | None = None
    ) -> AsyncIterator[StoredMessage]:
        return self._reader.scan(stream, subject, start=start, end=end)

    def tail(self, stream: str, subject: str = ">", *, start: int = 1) -> AsyncIterator[StoredMessage]:
        return self._reader.tail(stream, subject, start=start)

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
        config = {
            "durable_name": durable,
            "name": durable,
            "ack_policy": "explicit",
            "deliver_policy": "all",
            "max_deliver": -1,
            "ack_wait": int(ack_wait_seconds * 1e9),
            "max_ack_pending": max_ack_pending,
        } | ({} if subject == ">" else {"filter_subject": subject})
        if inactive_seconds:
            config["inactive_threshold"] = int(inactive_seconds * 1e9)
        consumer = NatsConsumer(self._connection, stream, durable, config)
        await consumer.open()
        return consumer

    # Plain messages

    async def send(self, subject: str, payload: bytes, *, headers: Mapping[str, str] | None = None) -> None:
        self._check_size(subject, payload, headers or {})
        await self._connection.publish(subject, payload, headers=headers)

    def inbox(self) -> str:
        return self._connection.inbox()

    async def subscribe(self, subject: str) -> Subscription:
        return await NatsSubscription.open(self._connection, subject)

    async def request(
        self, subject: str, payload: bytes, *, headers: Mapping[str, str] | None = None, timeout_seconds: float = 5.0
    ) -> Request:
        self._check_size(subject, payload, headers or {})
        deadline = asyncio.get_running_loop().time() + timeout_seconds
        if not await self._connection.connected(timeout_seconds):
            raise self._connection.timed_out(f"asking {subject}", timeout_seconds)
        try:
            remaining = max(deadline - asyncio.get_running_loop().time(), 0.0)
            answer = await self._connection.ask(subject, payload, headers=headers, timeout_seconds=remaining)
        except NobodyListensError:
            raise BusError(f"{subject}: nobody answers requests there; is its actor running?") from None
        found = own_headers(answer.headers)
        if ERROR_HEADER in found:
            raise BusError(f"{subject}: the other side failed: {found[ERROR_HEADER]}")
        return Request(answer.subject, answer.data, found, answer.reply or None)

    def serve(self, subject: str, handler: Handler, *, queue: str) -> AbstractAsyncContextManager[None]:
        return serve(self._connection, subject, handler, queue=queue)

    # Presence and blobs

    async def put_presence(self, bucket: str, key: str, payload: bytes, *, ttl_seconds: float) -> None:
        subject, name, headers = f"$KV.{bucket}.{key}", f"KV_{bucket}", {LIFETIME_HEADER: f"{ttl_seconds:g}"}
        try:
            await self.publish(subject, payload, stream=name, headers=headers, ttl_seconds=ttl_seconds)
        except BusTimeoutError:
            raise
        except BusError:
            await self._ensure_bucket(bucket)
            await self.publish(subject, payload, stream=name, headers=headers, ttl_seconds=ttl_seconds)

    async def drop_presence(self, bucket: str, key: str) -> None:
        # One message a subject: the marker takes the heartbeat's place, and vanishes as it would have.
        await self.publish(
            f"$KV.{bucket}.{key}", b"", stream=f"KV_{bucket}", headers={"KV-Operation": "DEL"}, ttl_seconds=1
        )

    async def _ensure_bucket(self, bucket: str) -> None:
        """A key-value bucket as the `nats` CLI knows it, with per-key expiry and one value per key."""
        config = stream.config_of(
            StreamSpec(f"KV_{bucket}", (f"$KV.{bucket}.>",), _PRESENCE_BYTES, allow_message_ttl=True)
        ) | {"max_msgs_per_subject": 1, "allow_rollup_hdrs": True, "deny_delete": True}
        await self._connection.api(f"STREAM.CREATE.KV_{bucket}", config, what=f"presence bucket {bucket}")

    async def presence(self, bucket: str, prefix: str = "") -> dict[str, bytes]:
        if f"KV_{bucket}" not in await self.stream_names(f"KV_{bucket}"):
            return {}
        base = f"$KV.{bucket}."
        live: dict[str, bytes] = {}
        # A server that was just started removes what ran out while it slept only seconds later.
        now = (await self.stream_info(f"KV_{bucket}")).time
        async for message in self.scan(f"KV_{bucket}", f"{base}>"):
            key = message.subject.removeprefix(base)
            lifetime = float(message.headers.get(LIFETIME_HEADER, _LONGEST_LIFETIME_SECONDS))
            if key.startswith(prefix) and "KV-Operation" not in message.headers and message.time + lifetime > now:
                live[key] = message.payload
        return live

    async def put_blob(self, stream: str, subject_prefix: str, data: bytes, *, ttl_seconds: float | None = None) -> str:
        return await blob.put_blob(self, stream, subject_prefix, data, ttl_seconds=ttl_seconds)

    async def get_blob(self, stream: str, subject_prefix: str, sha256: str, num_bytes: int) -> bytes:
        return await blob.get_blob(self, stream, subject_prefix, sha256, num_bytes)


def _ttl(seconds: float) -> str:
    """JetStream counts whole seconds, at least one; round up so that nothing vanishes early."""
    return f"{max(1, math.ceil(seconds))}s"

"""Reading stored messages without a durable consumer: by sequence, by subject, in batches, and for ever.

Streams with one replica are read by Direct Get (batches, many subjects in one request). On replicated streams a
follower may answer a direct read before it has the message, so those are read by the leader's message get.

Invariant: a scan or tail remembers the last sequence it handed out and asks again from the next one, so a lost reply, a
reconnect or a server restart neither skips nor repeats a message.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

import structlog
from nats.aio.msg import Msg

from agentjet.bus.connection import ConnectionLostError, NatsConnection, NobodyListensError
from agentjet.bus.fault import MESSAGE_NOT_FOUND, STREAM_NOT_FOUND, code_of, translate
from agentjet.bus.message import (
    PUBLISH_ID,
    delivery_position,
    from_delivery,
    from_direct,
    from_get,
    raw_headers,
    status_of,
)
from agentjet.bus.protocol import StoredMessage
from agentjet.bus.pull import PullInbox
from agentjet.errors import BusError, BusTimeoutError, BusUnavailableError

log = structlog.get_logger(__name__)

_READ_SECONDS = 10.0
_REPLY_SECONDS = 3.0
_BATCH = 256
_LAST_BATCH = 1024
"""The server's own limit for messages of many subjects."""
_BATCH_BYTES = 8 * 1024 * 1024
_SUBJECTS_PER_REQUEST = 256
_PARALLEL_GETS = 32
_LINGER_SECONDS = 2.0
_IDLE_SECONDS = 30.0
_TOO_MANY_RESULTS = "413"


class StreamReader:
    """Reads of any stream over one connection."""

    def __init__(self, connection: NatsConnection) -> None:
        self._connection = connection
        self._direct: dict[str, bool] = {}

    async def is_direct(self, stream: str) -> bool:
        """Whether direct reads of the stream are exact; looked up once."""
        if stream not in self._direct:
            info = await self._connection.api(f"STREAM.INFO.{stream}", what=f"reading {stream}")
            config = info["config"]
            self._direct[stream] = bool(config.get("allow_direct")) and int(config.get("num_replicas", 1)) == 1
        return self._direct[stream]

    def forget(self, stream: str) -> None:
        """The stream was changed or deleted."""
        self._direct.pop(stream, None)

    async def get(self, stream: str, sequence: int) -> StoredMessage | None:
        """The message at a sequence."""
        if sequence < 1:
            return None
        return await self._one(stream, {"seq": sequence})

    async def last(self, stream: str, subject: str) -> StoredMessage | None:
        """The newest message of a subject."""
        return await self._one(stream, {"last_by_subj": subject})

    async def publish_id_after(self, stream: str, subject: str, sequence: int) -> tuple[int, str] | None:
        """(sequence, publish id) of the subject's first message above `sequence`, as the leader has it."""
        stored = await self._message_get(stream, {"seq": sequence + 1, "next_by_subj": subject})
        if stored is None:
            return None
        return int(stored["seq"]), raw_headers(stored).get(PUBLISH_ID, "")

    async def last_many(self, stream: str, subjects: Sequence[str]) -> dict[str, StoredMessage]:
        """The newest message of each subject or wildcard."""
        if len(subjects) == 1 and not _is_wildcard(subjects[0]):
            message = await self.last(stream, subjects[0])
            return {message.subject: message} if message else {}
        if not await self.is_direct(stream):
            return await self._last_many_by_get(stream, subjects)
        found: dict[str, StoredMessage] = {}
        for start in range(0, len(subjects), _SUBJECTS_PER_REQUEST):
            chunk = list(subjects[start : start + _SUBJECTS_PER_REQUEST])
            messages = await self._last_by_pages(stream, chunk)
            found |= await self._last_by_scan(stream, chunk) if messages is None else messages
        return found

    async def _last_by_pages(self, stream: str, subjects: Sequence[str]) -> dict[str, StoredMessage] | None:
        """The newest message of each subject, some megabytes a reply; None when they are too many for that.

        The server cuts a reply at a number of bytes and says how many messages are left, so it is asked for the rest.
        """
        request: dict[str, Any] = {"multi_last": subjects, "batch": _LAST_BATCH, "max_bytes": _BATCH_BYTES}
        found: dict[str, StoredMessage] = {}
        while True:
            replies = await self._batch_complete(stream, request)
            status, headers = status_of(replies[-1]), replies[-1].headers or {}
            if status == _TOO_MANY_RESULTS:
                return None
            if status not in ("204", "404"):
                raise BusError(f"reading {stream}: {headers.get('Description', status)}")
            messages = [from_direct(m) for m in _bodies(replies)]
            found |= {m.subject: m for m in messages}
            if not messages or headers.get("Nats-Num-Pending", "0") == "0":
                return found
            # Without the upper end, a message stored meanwhile would take the place of one that is still to come.
            request |= {"seq": messages[-1].sequence + 1, "up_to_seq": int(headers["Nats-UpTo-Sequence"])}

    async def _last_many_by_get(self, stream: str, subjects: Sequence[str]) -> dict[str, StoredMessage]:
        wildcards = [s for s in subjects if _is_wildcard(s)]
        gate = asyncio.Semaphore(_PARALLEL_GETS)

        async def one(subject: str) -> StoredMessage | None:
            async with gate:
                return await self.last(stream, subject)

        plain = await asyncio.gather(*(one(s) for s in subjects if s not in wildcards))
        found = {m.subject: m for m in plain if m}
        return found | await self._last_by_scan(stream, wildcards)

    async def _last_by_scan(self, stream: str, subjects: Iterable[str]) -> dict[str, StoredMessage]:
        found: dict[str, StoredMessage] = {}
        for subject in subjects:
            async for message in self.scan(stream, subject):
                found[message.subject] = message
        return found

    async def scan(
        self, stream: str, subject: str = ">", *, start: int = 1, end: int | None = None
    ) -> AsyncIterator[StoredMessage]:
        """Stored messages in order; see `Bus.scan`."""
        if end is None:
            info = await self._connection.api(f"STREAM.INFO.{stream}", what=f"reading {stream}")
            end = int(info["state"]["last_seq"])
        position = max(start, 1)
        while position <= end:
            batch, more = await self._page(stream, subject, position)
            for message in batch:
                if message.sequence > end:
                    return
                position = message.sequence + 1
                yield message
            if not more:
                return

    async def _page(self, stream: str, subject: str, position: int) -> tuple[list[StoredMessage], bool]:
        """Messages from `position` on, and whether there may be more."""
        request: dict[str, Any] = {"seq": position, "next_by_subj": subject}
        if not await self.is_direct(stream):
            message = await self._one(stream, request)
            return ([message], True) if message else ([], False)
        request |= {"batch": _BATCH, "max_bytes": _BATCH_BYTES}
        replies = await self._batch(stream, request)
        status = status_of(replies[-1])
        headers = replies[-1].headers or {}
        if status not in (None, "204", "404"):
            raise BusError(f"reading {stream}: {headers.get('Description', status)}")
        ended = status == "404" or (status == "204" and headers.get("Nats-Num-Pending") == "0")
        return [from_direct(m) for m in _bodies(replies)], not ended

    async def _batch(self, stream: str, request: dict[str, Any]) -> list[Msg]:
        """Replies of one Direct Get, at least one; a prefix of them if the connection broke halfway."""
        deadline = asyncio.get_running_loop().time() + _READ_SECONDS
        while True:
            replies: list[Msg] = []
            try:
                await self._connected(stream, deadline)
                subject = f"$JS.API.DIRECT.GET.{stream}"
                async for message in self._connection.ask_many(subject, request, timeout_seconds=_REPLY_SECONDS):
                    replies.append(message)
                return replies
            except (ConnectionLostError, BusTimeoutError):
                if replies:
                    return replies
            except NobodyListensError:
                await self._check_exists(stream)
            await self._retry(stream, deadline)

    async def _batch_complete(self, stream: str, request: dict[str, Any]) -> list[Msg]:
        """As `_batch`, but again until the final status came."""
        deadline = asyncio.get_running_loop().time() + _READ_SECONDS
        while True:
            replies = await self._batch(stream, request)
            if status_of(replies[-1]):
                return replies
            await self._retry(stream, deadline)

    async def _one(self, stream: str, request: dict[str, Any]) -> StoredMessage | None:
        if not await self.is_direct(stream):
            stored = await self._message_get(stream, request)
            return from_get(stored) if stored else None
        deadline = asyncio.get_running_loop().time() + _READ_SECONDS
        while True:
            try:
                await self._connected(stream, deadline)
                reply = await self._connection.ask(
                    f"$JS.API.DIRECT.GET.{stream}", json.dumps(request).encode(), timeout_seconds=_REPLY_SECONDS
                )
                status = status_of(reply)
                if status is None:
                    return from_direct(reply)
                if status == "404":
                    return None
                raise BusError(f"reading {stream}: {(reply.headers or {}).get('Description', status)}")
            except NobodyListensError:
                await self._check_exists(stream)
            except (ConnectionLostError, BusTimeoutError):
                pass  # `_retry` raises when the time is up
            await self._retry(stream, deadline)

    async def _message_get(self, stream: str, request: dict[str, Any]) -> dict[str, Any] | None:
        what = f"reading {stream}"
        reply = await self._connection.api_reply(
            f"STREAM.MSG.GET.{stream}", request, what=what, timeout_seconds=_READ_SECONDS
        )
        if "error" not in reply:
            return reply["message"]
        if code_of(reply["error"]) == MESSAGE_NOT_FOUND:
            return None
        raise translate(reply["error"], what)

    async def _connected(self, stream: str, deadline: float) -> None:
        if not await self._connection.connected(deadline - asyncio.get_running_loop().time()):
            raise self._connection.timed_out(f"reading {stream}", _READ_SECONDS)

    async def _check_exists(self, stream: str) -> None:
        """A missing stream and one that is still loading look alike to Direct Get; only the first is an error."""
        self.forget(stream)
        await self._connection.api(f"STREAM.INFO.{stream}", what=f"reading {stream}")

    async def _retry(self, stream: str, deadline: float) -> None:
        if asyncio.get_running_loop().time() >= deadline:
            raise self._connection.timed_out(f"reading {stream}", _READ_SECONDS)
        await asyncio.sleep(0.02)

    async def tail(self, stream: str, subject: str = ">", *, start: int = 1) -> AsyncIterator[StoredMessage]:
        """Stored messages in order, for ever; see `Bus.tail`."""
        position = max(start, 1)
        first = True
        while True:
            inbox = PullInbox(self._connection)
            name = ""
            try:
                if not await self._connection.connected(_LINGER_SECONDS):
                    continue
                if not first:
                    await self._check_not_truncated(stream, position - 1)
                await inbox.open()
                name = await self._ephemeral(stream, subject, position)
                first = False
                async for message in self._follow(inbox, stream, name):
                    position = message.sequence + 1
                    yield message
            except (BusUnavailableError, TruncatedError):
                raise
            except BusError as error:
                if first:
                    raise
                log.warning("tail interrupted; it goes on where it was", stream=stream, error=str(error))
                await asyncio.sleep(0.2)
            finally:
                await self._drop(inbox, stream, name)

    async def _follow(self, inbox: PullInbox, stream: str, name: str) -> AsyncIterator[StoredMessage]:
        """Messages of an ephemeral consumer until it breaks off, misses one, or is gone."""
        expected = 1
        request = {"batch": _BATCH, "max_bytes": _BATCH_BYTES, "expires": int(_LINGER_SECONDS * 1e9)}
        while True:
            await inbox.ask(stream, name, request)
            for _ in range(_BATCH):
                answer = await inbox.receive(_LINGER_SECONDS + 1.0)
                if answer in (None, "503"):
                    return
                if not isinstance(answer, Msg):
                    break
                if delivery_position(answer)[1] != expected:
                    return
                expected += 1
                yield from_delivery(answer)

    async def _ephemeral(self, stream: str, subject: str, position: int) -> str:
        config: dict[str, Any] = {
            "ack_policy": "none",
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": position,
            "inactive_threshold": int(_IDLE_SECONDS * 1e9),
            "mem_storage": True,
            "num_replicas": 1,
        }
        if subject != ">":
            config["filter_subject"] = subject
        request = {"stream_name": stream, "config": config}
        reply = await self._connection.api(f"CONSUMER.CREATE.{stream}", request, what=f"following {stream}")
        return str(reply["name"])

    async def _check_not_truncated(self, stream: str, seen: int) -> None:
        reply = await self._connection.api_reply(f"STREAM.INFO.{stream}", what=f"following {stream}")
        if "error" in reply and code_of(reply["error"]) == STREAM_NOT_FOUND:
            raise TruncatedError(f"{stream} was deleted while it was followed; stop, or start again from sequence 1")
        if "state" in reply and int(reply["state"]["last_seq"]) < seen:
            raise TruncatedError(
                f"{stream} ends at sequence {reply['state']['last_seq']} but {seen} was already read: the server lost "
                "its newest messages (power loss); restart the readers of this stream"
            )

    async def _drop(self, inbox: PullInbox, stream: str, name: str) -> None:
        """Delete an ephemeral consumer without waiting; the server forgets it by itself otherwise."""
        try:
            await inbox.close()
            if name and self._connection.last_error is None:
                await self._connection.publish(f"$JS.API.CONSUMER.DELETE.{stream}.{name}", b"")
        except BusError as error:
            log.debug("left an ephemeral consumer to expire", stream=stream, error=str(error))


class TruncatedError(BusError):
    """A stream lost messages that were already read (power loss) or was deleted."""


def _is_wildcard(subject: str) -> bool:
    return "*" in subject or ">" in subject


def _bodies(replies: Sequence[Msg]) -> list[Msg]:
    return [m for m in replies if status_of(m) is None]

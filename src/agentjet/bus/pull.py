"""Pull requests to JetStream consumers: durable ones for stages, ephemeral ones for tails.

Invariants:

- A fetch asks for what is there without waiting and only then lingers for a single message, so no request is left at
  the server that could swallow messages nobody is waiting for.
- Statuses are matched to the request they answer; messages are good whichever request brought them.
- Silence, a reconnect or a deleted consumer end a fetch with an empty list, never with an error.
"""

# ruff: noqa: D102  (documented at the protocols)

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import structlog
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from agentjet.bus.connection import NatsConnection
from agentjet.bus.message import from_delivery, num_delivered, status_of
from agentjet.bus.protocol import Delivery, StoredMessage
from agentjet.errors import BusError

log = structlog.get_logger(__name__)

_ANSWER_SECONDS = 2.0
_GRACE_SECONDS = 0.5
_GONE = frozenset({"503", "409"})


class PullInbox:
    """Where the messages of one consumer arrive."""

    def __init__(self, connection: NatsConnection) -> None:
        self._connection = connection
        self._base = connection.inbox()
        self._queue: asyncio.Queue[Msg | None] = asyncio.Queue()
        self._request = 0
        self._subscription: Subscription | None = None

    async def open(self) -> None:
        """Subscribe; to be called once."""

        async def arrive(message: Msg) -> None:
            self._queue.put_nowait(message)

        self._subscription = await self._connection.subscribe(f"{self._base}.*", arrive)
        self._connection.on_disconnect.append(self._on_disconnect)

    async def close(self) -> None:
        """Unsubscribe; requests still at the server end with it."""
        if self._on_disconnect in self._connection.on_disconnect:
            self._connection.on_disconnect.remove(self._on_disconnect)
        if self._subscription:
            await self._connection.unsubscribe(self._subscription)
        self._subscription = None

    def _on_disconnect(self) -> None:
        self._queue.put_nowait(None)

    async def ask(self, stream: str, consumer: str, request: dict[str, Any]) -> None:
        """Post a pull request; `receive` then yields what it brings."""
        self._request += 1
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        await self._connection.publish(subject, json.dumps(request).encode(), reply=f"{self._base}.{self._request}")

    async def receive(self, timeout_seconds: float) -> Msg | str | None:
        """The next message, or the status that ended the latest request, or None for silence or a broken connection."""
        try:
            async with asyncio.timeout(timeout_seconds):
                while True:
                    message = await self._queue.get()
                    if message is None:
                        return None
                    status = status_of(message)
                    if status is None or message.reply.startswith("$JS.ACK."):
                        return message
                    if message.subject == f"{self._base}.{self._request}" and status != "100":
                        return status
        except TimeoutError:
            return None

    def take_waiting(self, limit: int) -> list[Msg]:
        """Messages that arrived after their request was given up."""
        taken: list[Msg] = []
        while len(taken) < limit and not self._queue.empty():
            message = self._queue.get_nowait()
            if message is not None and message.reply.startswith("$JS.ACK."):
                taken.append(message)
        return taken


class NatsDelivery:
    """A consumer's message; acknowledgements are sent without waiting, they carry no truth."""

    __slots__ = ("_connection", "_raw", "message", "num_delivered")

    def __init__(self, connection: NatsConnection, raw: Msg) -> None:
        self._connection = connection
        self._raw = raw
        self.message: StoredMessage = from_delivery(raw)
        self.num_delivered: int = num_delivered(raw)

    async def ack(self) -> None:
        await self._connection.publish(self._raw.reply, b"+ACK")

    async def nak(self, delay_seconds: float = 0.0) -> None:
        body = b"-NAK"
        if delay_seconds > 0:
            body += b" " + json.dumps({"delay": int(delay_seconds * 1e9)}).encode()
        await self._connection.publish(self._raw.reply, body)

    async def in_progress(self) -> None:
        await self._connection.publish(self._raw.reply, b"+WPI")


class NatsConsumer:
    """A durable pull consumer that re-creates itself should it vanish."""

    def __init__(self, connection: NatsConnection, stream: str, durable: str, config: dict[str, Any]) -> None:
        self._connection = connection
        self._stream = stream
        self._durable = durable
        self._config = config
        self._inbox = PullInbox(connection)
        self._lock = asyncio.Lock()

    async def open(self) -> None:
        """Create the consumer (or take the existing one) and its inbox."""
        await self._create()
        await self._inbox.open()

    async def _create(self) -> None:
        request = {"stream_name": self._stream, "config": self._config}
        what = f"consumer {self._durable} on {self._stream}"
        await self._connection.api(f"CONSUMER.CREATE.{self._stream}.{self._durable}", request, what=what)

    async def fetch(self, batch: int, timeout_seconds: float) -> Sequence[Delivery]:
        async with self._lock:
            raw = self._inbox.take_waiting(batch)
            deadline = asyncio.get_running_loop().time() + timeout_seconds
            try:
                if not raw and await self._connection.connected(timeout_seconds):
                    await self._fetch_into(raw, batch, deadline)
            except asyncio.CancelledError:
                for message in raw:
                    await NatsDelivery(self._connection, message).nak()
                raise
        return [NatsDelivery(self._connection, message) for message in raw]

    async def _fetch_into(self, raw: list[Msg], batch: int, deadline: float) -> None:
        loop = asyncio.get_running_loop()
        try:
            answer_seconds = min(_ANSWER_SECONDS, max(deadline - loop.time(), _GRACE_SECONDS))
            status = await self._collect(raw, {"batch": batch, "no_wait": True}, batch, answer_seconds)
            remaining = deadline - loop.time()
            if not raw and remaining > 0.01 and status is not None and status not in _GONE:
                request = {"batch": 1, "expires": int(remaining * 1e9)}
                status = await self._collect(raw, request, 1, remaining + _GRACE_SECONDS)
            if not raw and status in _GONE:
                await asyncio.sleep(min(0.2, max(deadline - loop.time(), 0.0)))
                await self._create()
        except BusError as error:
            log.warning("fetch failed", stream=self._stream, consumer=self._durable, error=str(error))
            await asyncio.sleep(min(0.2, max(deadline - loop.time(), 0.0)))

    async def _collect(self, raw: list[Msg], request: dict[str, Any], batch: int, timeout_seconds: float) -> str | None:
        """Post a request and gather its messages; returns the status that ended it, None for silence."""
        await self._inbox.ask(self._stream, self._durable, request)
        while len(raw) < batch:
            # A consumer at its `max_ack_pending` falls silent halfway; what follows a first message follows at once.
            answer = await self._inbox.receive(min(timeout_seconds, _GRACE_SECONDS) if raw else timeout_seconds)
            if not isinstance(answer, Msg):
                return answer
            raw.append(answer)
        return "200"

    async def num_pending(self) -> int:
        what = f"consumer {self._durable} on {self._stream}"
        info = await self._connection.api(f"CONSUMER.INFO.{self._stream}.{self._durable}", what=what)
        return int(info["num_pending"])

"""Messages that are not stored, over NATS: subscriptions, and request handlers that share a queue.

Invariant: a handler that raises answers with an error header instead of silence, and never stops its server.
"""

# ruff: noqa: D102  (documented at the protocols)

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Self

import structlog
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as RawSubscription

from agentjet.bus.connection import NatsConnection
from agentjet.bus.message import ERROR_HEADER, own_headers
from agentjet.bus.protocol import Handler, Request
from agentjet.errors import BusError, BusTimeoutError

log = structlog.get_logger(__name__)

_FINISH_SECONDS = 5.0


class NatsSubscription:
    """A plain subscription whose messages wait in order."""

    def __init__(self, connection: NatsConnection, subject: str) -> None:
        self._connection = connection
        self._subject = subject
        self._queue: asyncio.Queue[Request] = asyncio.Queue()
        self._raw: RawSubscription | None = None

    @classmethod
    async def open(cls, connection: NatsConnection, subject: str) -> Self:
        """Subscribe; the subscription is live at the server on return."""
        self = cls(connection, subject)

        async def arrive(message: Msg) -> None:
            self._queue.put_nowait(as_request(message))

        self._raw = await connection.subscribe(subject, arrive)
        await connection.settle()
        return self

    async def messages(self) -> AsyncIterator[Request]:
        while True:
            yield await self._queue.get()

    async def next(self, timeout_seconds: float) -> Request:
        try:
            async with asyncio.timeout(timeout_seconds):
                return await self._queue.get()
        except TimeoutError:
            raise BusTimeoutError(f"{self._subject}: no message within {timeout_seconds:g} s") from None

    async def close(self) -> None:
        raw, self._raw = self._raw, None
        if raw is not None:
            await self._connection.unsubscribe(raw)


def as_request(message: Msg) -> Request:
    """A plain message as its receiver sees it."""
    return Request(message.subject, message.data, own_headers(message.headers), message.reply or None)


async def answer(handler: Handler, request: Request) -> tuple[bytes, Mapping[str, str]] | None:
    """Run a handler; what it raises becomes an error answer."""
    try:
        return await handler(request)
    except Exception as error:
        # The boundary to code of other packages: whatever it raises must reach the requester, not end the server.
        log.exception("a request handler failed", subject=request.subject)
        return b"", {ERROR_HEADER: f"{type(error).__name__}: {error}".replace("\r", " ").replace("\n", " ")}


@asynccontextmanager
async def serve(connection: NatsConnection, subject: str, handler: Handler, *, queue: str) -> AsyncGenerator[None]:
    """Answer requests concurrently while the context is open; running handlers get a moment to finish at the end."""
    running: set[asyncio.Task[None]] = set()

    async def work(message: Msg) -> None:
        reply = await answer(handler, as_request(message))
        if reply is None or not message.reply:
            return
        try:
            await connection.publish(message.reply, reply[0], headers=reply[1])
        except BusError as error:
            log.warning("could not answer a request", subject=subject, error=str(error))

    async def arrive(message: Msg) -> None:
        task = asyncio.ensure_future(work(message))
        running.add(task)
        task.add_done_callback(running.discard)

    subscription = await connection.subscribe(subject, arrive, queue=queue)
    await connection.settle()
    try:
        yield
    finally:
        await connection.unsubscribe(subscription)
        if running:
            await asyncio.wait(running, timeout=_FINISH_SECONDS)
        for task in list(running):
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

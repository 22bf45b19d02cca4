"""Flushes of a nats-py client that nobody may give up.

At the answer to a flush whose waiter has gone, the client stops reading and tells nobody: the connection is deaf until
its pings have failed. So a flush runs in a task of its own, and who waits for it may leave.

Invariant: a flush ends with its answer or with its connection, never with its waiter.
"""

import asyncio

import nats.errors
import structlog
from nats.aio.client import Client

log = structlog.get_logger(__name__)

SETTLE_SECONDS = 2.0
"""How long a waiter stays."""


class Flushes:
    """Those of one client.

    Args:
        client: The client.
        limit_seconds: Longer than a connection lives whose server is silent.
    """

    def __init__(self, client: Client, limit_seconds: int) -> None:
        self._client, self._limit_seconds = client, limit_seconds
        self._running: set[asyncio.Future[None]] = set()

    def __len__(self) -> int:
        return len(self._running)

    async def settle(self) -> None:
        """Return once the server has processed what was sent (a new subscription is live), at best effort."""
        flushing = asyncio.ensure_future(self._flush())
        self._running.add(flushing)
        flushing.add_done_callback(self._running.discard)
        await asyncio.wait({flushing}, timeout=SETTLE_SECONDS)

    def forget(self) -> None:
        """Once nothing is read from the connection any more: a new one knows nothing of them."""
        for flushing in self._running:
            flushing.cancel()

    async def _flush(self) -> None:
        try:
            await self._client.flush(timeout=self._limit_seconds)
        except (OSError, nats.errors.Error) as error:
            log.debug("flush did not finish; subscriptions are replayed after the reconnect", error=str(error))

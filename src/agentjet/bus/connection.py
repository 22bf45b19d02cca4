"""One connection to a NATS server: refused clearly at the start, then reconnecting for ever.

Invariants:

- `open` fails within its limit, with one sentence that says which of gone, refusing, too old, no JetStream it is.
- A request that was in flight when the connection broke fails at once, so callers retry as soon as it is back instead
  of waiting for a reply that can not come.
- The client's closed callback is fatal: `closed` is set and nothing works afterwards.

It knows subjects and replies, not streams or records.
"""

import asyncio
import json
import math
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Self
from urllib.parse import urlsplit

import nats.errors
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from agentjet.bus.fault import is_temporary, translate
from agentjet.bus.flush import Flushes
from agentjet.bus.mailbox import Mailbox
from agentjet.bus.message import parse_headers, status_of
from agentjet.errors import BusError, BusTimeoutError, BusUnavailableError

log = structlog.get_logger(__name__)

MINIMUM_SERVER = (2, 11)
_RETRY_SECONDS = 0.05
_LOOK_SECONDS = 1.0
_PING_SECONDS = 10
_MAX_PINGS = 3
_FLUSH_SECONDS = 4 * _PING_SECONDS * _MAX_PINGS
"""Longer than a connection lives whose server is silent."""
_ATTEMPT_SECONDS = 3.0


class ConnectionLostError(BusError):
    """The connection broke while a reply was outstanding; ask again once it is back."""


class NobodyListensError(BusError):
    """No subscriber (or no such stream) for a request's subject."""


class _Client(Client):
    """nats-py's client, whose own reading of a message's headers takes a third of all time that reading a log takes."""

    _parse_header_lines = staticmethod(parse_headers)


class NatsConnection:
    """A NATS client whose waits all end; see `open`."""

    def __init__(self, url: str) -> None:
        self.client = _Client()
        self.closed = asyncio.Event()
        self._address = _address(url)
        self._connected = asyncio.Event()
        self._closing = False
        self._refused: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._error: str | None = None
        self._permission_error = ""
        self._permission_time = -math.inf
        """Loop time at which the server denied it."""
        self._mailbox = Mailbox()
        self._flushes = Flushes(self.client, _FLUSH_SECONDS)
        self.on_disconnect: list[Callable[[], None]] = []

    @classmethod
    async def open(
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
        """Connect and check the server.

        Args:
            url: `nats://host:port`, or several separated by commas.
            name: Shown in the server's connection list.
            user: With `password`, for servers with users.
            password: See `user`.
            token: For servers with one token.
            credentials: Path of a `.creds` file (JWT and seed).
            timeout_seconds: How long a server that is still starting is waited for.

        Raises:
            BusUnavailableError: Unreachable, credentials refused, older than 2.11, or without JetStream.
        """
        self = cls(url)
        options: dict[str, Any] = {"user": user, "password": password, "token": token}
        if credentials:
            options["user_credentials"] = credentials
        try:
            await self._dial(url.split(","), name, options, timeout_seconds)
            self._check_version()
            self._mailbox.inbox = self.client.new_inbox()
            await self.subscribe(f"{self._mailbox.inbox}.*", self._mailbox.take)
            await self._check_jetstream()
        except BaseException:
            await self.close()
            raise
        return self

    async def _dial(self, servers: list[str], name: str, options: dict[str, Any], timeout_seconds: float) -> None:
        dialing = asyncio.ensure_future(
            self.client.connect(
                servers,
                name=name,
                error_cb=self._on_error,
                disconnected_cb=self._on_disconnected,
                reconnected_cb=self._on_reconnected,
                closed_cb=self._on_closed,
                max_reconnect_attempts=-1,
                reconnect_time_wait=0.2,  # pyright: ignore[reportArgumentType]  (annotated int, used as seconds)
                ping_interval=_PING_SECONDS,
                max_outstanding_pings=_MAX_PINGS,
                pending_size=64 * 1024 * 1024,
                **options,
            )
        )
        try:
            await asyncio.wait({dialing, self._refused}, timeout=timeout_seconds, return_when=asyncio.FIRST_COMPLETED)
            if self._refused.done():
                raise BusUnavailableError(
                    f"the NATS server at {self._address} refuses the credentials ({self._refused.result()}); "
                    "check user, password, token or credentials file"
                )
            if not dialing.done():
                raise BusUnavailableError(
                    f"no NATS server answers at {self._address} within {timeout_seconds:g} s "
                    f"({self._error or 'no reply'}); start it, or correct the url"
                )
            await dialing
        except BusUnavailableError:
            raise
        except (OSError, ValueError, nats.errors.Error) as error:
            raise BusUnavailableError(f"can not connect to {self._address}: {error}") from error
        finally:
            dialing.cancel()
            await asyncio.gather(dialing, return_exceptions=True)
        self._error = None
        self._connected.set()

    def _check_version(self) -> None:
        version = self.client.connected_server_version
        try:
            found = (version.major, version.minor)
        except ValueError as error:
            raise BusUnavailableError(f"the server at {self._address} reports no readable version: {error}") from error
        if found < MINIMUM_SERVER:
            raise BusUnavailableError(
                f"the NATS server at {self._address} is version {found[0]}.{found[1]}; "
                f"AgentJet needs {MINIMUM_SERVER[0]}.{MINIMUM_SERVER[1]} or newer: upgrade it"
            )

    async def _check_jetstream(self) -> None:
        try:
            await self.api("INFO", what="asking for JetStream", timeout_seconds=5.0)
        except BusTimeoutError as error:
            raise BusUnavailableError(f"{self._address}: {error}") from error
        except BusError as error:
            raise BusUnavailableError(
                f"JetStream is not enabled for this account at {self._address} ({error}); "
                "start nats-server with a `jetstream` block"
            ) from error

    @property
    def last_error(self) -> str | None:
        """Why the connection is not usable now; None while it is."""
        if self.is_closed:
            return f"the connection to {self._address} is closed ({self._error or 'on request'})"
        if not self._connected.is_set():
            return f"not connected to {self._address} ({self._error or 'reconnecting'})"
        return None

    async def connected(self, timeout_seconds: float) -> bool:
        """Wait for the connection; False when it was not there in time.

        Raises:
            BusUnavailableError: The client gave up for good.
        """
        if self.is_closed:
            raise BusUnavailableError(f"{self.last_error}; restart this process")
        if self._connected.is_set():
            return True
        try:
            async with asyncio.timeout(max(timeout_seconds, 0.0)):
                await self._connected.wait()
        except TimeoutError:
            return False
        return True

    def timed_out(self, what: str, timeout_seconds: float) -> BusTimeoutError:
        """The error for a wait that ended; names a missing permission, which the server reports only on the side."""
        # Only one that was denied while this was waited for can be the reason.
        waited_from = asyncio.get_running_loop().time() - timeout_seconds - _LOOK_SECONDS
        denied = self._permission_error if self._permission_time >= waited_from else ""
        why = self.last_error or denied or "a missing permission looks like this too"
        return BusTimeoutError(f"{what}: no answer within {timeout_seconds:.3g} s ({why})")

    async def subscribe(
        self, subject: str, arrive: Callable[[Msg], Awaitable[None]], *, queue: str = ""
    ) -> Subscription:
        """Call `arrive`, which must only hand over, for every message of a subject.

        There is no limit on what waits: the client would drop messages silently, and a dropped reply looks like a dead
        server. Requests and pulls bound what can arrive.
        """
        try:
            return await self.client.subscribe(  # pyright: ignore[reportUnknownMemberType]  (an unused argument)
                subject, queue=queue, cb=arrive, pending_msgs_limit=0, pending_bytes_limit=0
            )
        except nats.errors.Error as error:
            raise BusUnavailableError(f"{subject}: can not subscribe ({self.last_error or error})") from error

    async def unsubscribe(self, subscription: Subscription) -> None:
        """End a subscription; nothing to do once the connection is gone."""
        try:
            await subscription.unsubscribe()
        except nats.errors.Error as error:
            log.debug("unsubscribe on a closed connection", error=str(error))

    def inbox(self) -> str:
        """A fresh subject for replies."""
        return self.client.new_inbox()

    async def publish(
        self, subject: str, payload: bytes, *, reply: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        """Send without waiting; raises BusError when the connection can not take it."""
        try:
            await self.client.publish(subject, payload, reply=reply, headers=dict(headers) if headers else None)
        except nats.errors.Error as error:
            raise BusError(f"{subject}: can not send ({error})") from error

    async def ask(
        self, subject: str, payload: bytes, *, headers: Mapping[str, str] | None = None, timeout_seconds: float
    ) -> Msg:
        """Send one request and return its one reply.

        Raises:
            NobodyListensError: The server knows no subscriber for the subject.
            ConnectionLostError: The connection broke meanwhile.
            BusTimeoutError: Silence.
        """
        reply: asyncio.Future[Msg] = asyncio.get_running_loop().create_future()

        def settle(message: Msg | None) -> None:
            if reply.done():
                return
            if message is None:
                reply.set_exception(ConnectionLostError(f"{subject}: the connection broke"))
            else:
                reply.set_result(message)

        try:
            with self._mailbox.box(settle) as inbox:
                await self.publish(subject, payload, reply=inbox, headers=headers)
                async with asyncio.timeout(timeout_seconds):
                    message = await reply
        except TimeoutError:
            raise self.timed_out(subject, timeout_seconds) from None
        if status_of(message) == "503":
            raise NobodyListensError(f"{subject}: nobody listens")
        return message

    async def ask_many(self, subject: str, request: dict[str, Any], *, timeout_seconds: float) -> AsyncIterator[Msg]:
        """Send one request and yield its replies up to and including the status message that ends them.

        Raises as `ask`; the time limit applies to each reply.
        """
        replies: asyncio.Queue[Msg | None] = asyncio.Queue()
        with self._mailbox.box(replies.put_nowait) as inbox:
            await self.publish(subject, json.dumps(request).encode(), reply=inbox)
            while True:
                try:
                    async with asyncio.timeout(timeout_seconds):
                        message = await replies.get()
                except TimeoutError:
                    raise self.timed_out(subject, timeout_seconds) from None
                if message is None:
                    raise ConnectionLostError(f"{subject}: the connection broke")
                status = status_of(message)
                if status == "503":
                    raise NobodyListensError(f"{subject}: nobody listens")
                yield message
                if status:
                    return

    async def api(
        self, endpoint: str, request: dict[str, Any] | None = None, *, what: str, timeout_seconds: float = 5.0
    ) -> dict[str, Any]:
        """A call of the JetStream API, retried across reconnects; refusals are raised by `fault.translate`."""
        reply = await self.api_reply(endpoint, request, what=what, timeout_seconds=timeout_seconds)
        if "error" in reply:
            raise translate(reply["error"], what)
        return reply

    async def api_reply(
        self, endpoint: str, request: dict[str, Any] | None = None, *, what: str, timeout_seconds: float = 5.0
    ) -> dict[str, Any]:
        """As `api`, but hands back a refusal (key "error") for callers that act on its code."""
        body = json.dumps(request).encode() if request is not None else b""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_seconds
        while True:
            remaining = deadline - loop.time()
            if remaining <= 0 or not await self.connected(remaining):
                raise self.timed_out(what, timeout_seconds)
            try:
                attempt = min(_ATTEMPT_SECONDS, remaining)
                message = await self.ask(f"$JS.API.{endpoint}", body, timeout_seconds=attempt)
            except NobodyListensError:
                raise BusError(f"{what}: JetStream does not answer on this server") from None
            except (ConnectionLostError, BusTimeoutError):
                continue
            reply: dict[str, Any] = json.loads(message.data)
            if "error" in reply and is_temporary(reply["error"]):
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            return reply

    async def settle(self) -> None:
        """Return once the server has processed what was sent (a new subscription is live), at best effort."""
        await self._flushes.settle()

    async def close(self) -> None:
        """Flush and close; idempotent."""
        self._closing = True
        if not self.client.is_closed:
            await self.settle()
            try:
                await self.client.close()
            except OSError as error:
                # The client flushes to a socket that is already gone and then skips its own callback.
                log.debug("closed a broken connection", error=str(error))
        self._flushes.forget()
        self.closed.set()

    async def wait_closed(self) -> None:
        """Return once the connection is closed for good."""
        while not self.is_closed:
            # The client can close without its callback (see `close`), so look now and then.
            try:
                async with asyncio.timeout(_LOOK_SECONDS):
                    await self.closed.wait()
            except TimeoutError:
                continue

    @property
    def is_closed(self) -> bool:
        """Whether nothing works any more."""
        return self.closed.is_set() or self.client.is_closed

    async def _on_error(self, error: Exception) -> None:
        text = str(error) or type(error).__name__
        # asyncio's text repeats the address.
        self._error = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else text
        lowered = text.lower()
        if "authorization" in lowered or "authentication" in lowered:
            if not self._refused.done():
                self._refused.set_result(text)
        elif "permissions violation" in lowered:
            self._permission_error, self._permission_time = text, asyncio.get_running_loop().time()
            log.error("the server denies a permission", error=text)
        elif isinstance(error, nats.errors.SlowConsumerError):
            log.error("messages were dropped: this process reads too slowly", error=text)

    async def _on_disconnected(self) -> None:
        if self._connected.is_set() and not self._closing:
            log.warning("lost the NATS server; reconnecting", server=self._address)
        self._connected.clear()
        self._flushes.forget()
        self._mailbox.lose()
        for callback in list(self.on_disconnect):
            callback()

    async def _on_reconnected(self) -> None:
        self._error = None
        self._connected.set()
        log.info("reconnected to the NATS server", server=self._address)

    async def _on_closed(self) -> None:
        if self.client.last_error:
            self._error = str(self.client.last_error)
        self.closed.set()


def _address(url: str) -> str:
    """Host and port without the credentials a url may carry."""
    hosts = (urlsplit(part if "//" in part else f"//{part}").netloc.rpartition("@")[2] for part in url.split(","))
    return ", ".join(hosts)

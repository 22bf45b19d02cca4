"""A uvicorn server inside a running loop: no signal handlers, no output, errors of the port in a sentence."""

import asyncio
import contextlib
import errno
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from agentjet.errors import UserError

_GRACE_SECONDS = 2
_KEEP_ALIVE_SECONDS = 75
"""An idle connection stays open for longer than most tools take: one that closes just when the agent asks again is an
error, which not every client tries again."""


class _Server(uvicorn.Server):
    """Leaves the process's signals alone and says when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_up = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_up.set()


class HttpServer:
    """Serves one application on one address."""

    def __init__(self, app: ASGIApp, *, host: str, port: int) -> None:
        self._app = app
        self._host = host
        self._port = port
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """Listen; returns the port. UserError when the address can not be had."""
        listener = self._listen()
        port = int(listener.getsockname()[1])
        config = uvicorn.Config(
            self._app,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            # The other parser, which uvicorn takes where another package brought it, reads headers without an end.
            http="h11",
            server_header=False,
            timeout_graceful_shutdown=_GRACE_SECONDS,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        )
        self._server = _Server(config)
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]))
        async with asyncio.timeout(10.0):
            await self._server.is_up.wait()
        return port

    async def close(self) -> None:
        """Stop listening; open requests get a short grace. Idempotent."""
        if self._server is None or self._task is None:
            return
        self._server.should_exit = True
        await asyncio.gather(self._task, return_exceptions=True)
        self._server = self._task = None

    def _listen(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        try:
            return socket.create_server((self._host, self._port), family=family, backlog=512)
        except OSError as error:
            why = "the port is in use" if error.errno == errno.EADDRINUSE else str(error)
            raise UserError(
                f"the gateway can not listen on {self._host}:{self._port}: {why}; "
                "set gateway.host and gateway.port (0 takes a free port)"
            ) from error

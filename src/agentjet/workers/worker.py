"""The worker's side: one piece of work after another, in a forked process of its own.

One event loop lives as long as the worker, so that clients and connections of the user's code can be kept between
pieces of work; tasks that a piece leaves behind are cancelled before the next. The loop runs only while it awaits what
the user's function returned: a plain function has the main thread to itself and may run a loop of its own. Nothing is
read while user code runs: the way to stop it is to kill the process. User code may emit from threads of its own; what
comes after its piece is over is dropped, for it would stand among the messages of the next one.
"""

import asyncio
import inspect
import os
import socket
import sys
import sysconfig
import threading
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil

from agentjet.errors import AbortError
from agentjet.workers.frame import pack, receive

Emit = Callable[[dict[str, Any]], None]
"""Sends a message to the pool while the work goes on."""

Adapter = Callable[[Callable[..., Any], dict[str, Any], Emit], Any]
"""What a worker does with the user's function and a payload; returns what msgpack can carry.

The function it gets is plain, whatever the user's is: what that returns has been awaited.
"""

_MAX_MESSAGE = 2_000
_OTHERS_CODE = (sysconfig.get_path("stdlib"), str(Path(__file__).parents[1]), "<")


def work(sock: socket.socket, adapter: Adapter, function: Callable[..., Any]) -> None:
    """Does what comes over the socket until it closes."""
    _fresh_randomness()

    with asyncio.Runner() as runner:
        while (payload := receive(sock)) is not None:
            outlet = _Outlet(sock)
            reply = _once(adapter, _awaited(runner, function), payload, outlet.emit)
            reply["rss_bytes"] = psutil.Process().memory_info().rss
            outlet.finish(_packed(reply))


class _Outlet:
    """What one piece of work sends: messages, whole ones from any thread, and then its reply."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        self._is_over = False

    def emit(self, message: dict[str, Any]) -> None:
        frame = pack({"message": message})
        with self._lock:
            if not self._is_over:
                self._sock.sendall(frame)

    def finish(self, frame: bytes) -> None:
        with self._lock:
            self._is_over = True
            self._sock.sendall(frame)


def _once(adapter: Adapter, function: Callable[..., Any], payload: dict[str, Any], emit: Emit) -> dict[str, Any]:
    try:
        return {"value": adapter(function, payload, emit)}
    except (Exception, SystemExit, asyncio.CancelledError) as error:  # noqa: BLE001 - user code may raise anything
        return {"failure": _failure(error)}


def _awaited(runner: asyncio.Runner, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as a plain one; what it returns is awaited on the worker's loop where it can be."""

    def call(*arguments: Any) -> Any:
        value = function(*arguments)
        if not inspect.isawaitable(value):
            return value
        value, error = runner.run(_outcome(value))
        if error is not None:
            raise error
        return value

    return call


async def _outcome(work: Awaitable[Any]) -> tuple[Any, BaseException | None]:
    """Value or error of the work, and an end to the tasks that it leaves behind."""
    try:
        return await work, None
    except (Exception, SystemExit, asyncio.CancelledError) as error:  # noqa: BLE001 - an exit would stop the loop
        return None, error
    finally:
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


def _failure(error: BaseException) -> dict[str, Any]:
    return {
        "kind": type(error).__name__,
        "message": (str(error) or type(error).__name__)[:_MAX_MESSAGE],
        "traceback": "".join(traceback.format_exception(error))[-20 * _MAX_MESSAGE :],
        "where": _where(error),
        "is_abort": isinstance(error, AbortError),
    }


def _where(error: BaseException) -> str:
    """The innermost line that is neither the library's, nor Python's, nor an installed package's."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(_OTHERS_CODE) and "site-packages" not in frame.filename:
            return f"{Path(frame.filename).name}:{frame.lineno}"
    return ""


def _packed(reply: dict[str, Any]) -> bytes:
    try:
        return pack(reply)
    except (TypeError, ValueError, OverflowError) as error:
        problem = TypeError(
            f"the returned value can not be sent: {error}; return numbers, strings, lists and dicts only"
        )
        return pack({"failure": _failure(problem), "rss_bytes": reply["rss_bytes"]})


def _fresh_randomness() -> None:
    """Python reseeds `random` in a forked process, numpy does not: all workers would draw the same numbers."""
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(int.from_bytes(os.urandom(4)))

"""Whose turn it is among the processes of a host: work that one does serves all.

A turn is a lock on a file, so it ends with its process, however that ends. It spares work and protects nothing: who has
waited too long goes on without it.
"""

import asyncio
import fcntl
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from agentjet.delivery.file_lease import is_still

_LOOK_SECONDS = 0.02


@asynccontextmanager
async def turn(path: Path, *, patience_seconds: float, is_done: Callable[[], bool]) -> AsyncIterator[None]:
    """Wait for the turn at a file, until the work is done by another, or for as long as patience lasts.

    Args:
        path: The file that is locked; it is made where it is missing, its folder too.
        patience_seconds: A process may be stopped in its turn.
        is_done: Looked at while another has the turn.
    """
    give_up = time.monotonic() + patience_seconds
    while (handle := _try(path)) is None and not is_done() and time.monotonic() < give_up:  # noqa: ASYNC110 - a lock
        await asyncio.sleep(_LOOK_SECONDS)
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)


def _try(path: Path) -> int | None:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except FileNotFoundError:
        return None  # its folder was cleared up just now
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    if not is_still(path, handle):
        os.close(handle)
        return None
    return handle

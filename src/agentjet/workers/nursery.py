"""The pool's side of one zygote and its workers.

A nursery stands for one version of a code file. Retired, it forks no more and lets its running workers finish. When it
closes, or when its process dies, its workers die with it.
"""

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import structlog

from agentjet.errors import WorkflowError
from agentjet.workers.frame import pack, read
from agentjet.workers.zygote import COMMAND

log = structlog.get_logger(__name__)

OnMessage = Callable[[dict[str, Any]], None]
"""Takes what user code emits while it works."""

START_SECONDS = 60.0
"""Longest that importing the user's code may take."""
_FORK_SECONDS = 10.0
_STARTS = 3
_EXIT_SECONDS = 2.0


class Worker:
    """A forked process that does one piece of work at a time."""

    def __init__(
        self, nursery: "Nursery", pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.nursery = nursery
        self.pid = pid
        self.num_done = 0
        self.kill_reason = ""
        self.exit_code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._reader = reader
        self._writer = writer

    async def work(self, payload: dict[str, Any], on_message: OnMessage) -> dict[str, Any] | None:
        """The worker's reply to a payload; None when it died over it."""
        try:
            self._writer.write(pack(payload))
            await self._writer.drain()
        except ConnectionError:
            return None
        while (frame := await read(self._reader)) is not None:
            if "message" not in frame:
                self.num_done += 1
                return frame
            on_message(frame["message"])
        return None

    def kill(self, reason: str = "") -> None:
        """Ends the process and its children at once."""
        self.kill_reason = self.kill_reason or reason
        self.nursery.kill(self.pid)
        self._writer.transport.abort()

    def dismiss(self) -> None:
        """Lets the idle process exit by itself."""
        self._writer.close()

    def gone(self, code: int) -> None:
        """Called when the zygote has seen it exit."""
        if not self.exit_code.done():
            self.exit_code.set_result(code)
        # A child of the user's code may hold the other end open: the stream has to end all the same.
        self._writer.transport.abort()

    async def cause_of_death(self) -> str:
        """`was killed by SIGSEGV`, `exited with status 3`."""
        if self.kill_reason:
            return self.kill_reason
        try:
            async with asyncio.timeout(_EXIT_SECONDS):
                code = await asyncio.shield(self.exit_code)
        except TimeoutError:
            return "closed its connection"
        if code >= 0:
            return f"exited with status {code}"
        return f"was killed by {signal.Signals(-code).name}"


class Nursery:
    """A zygote process and the workers that it forked."""

    def __init__(self, entry: str, adapter: str) -> None:
        self.entry = entry
        self.digest = ""
        self.is_alive = False
        self.is_retired = False
        self.idle: list[Worker] = []
        self.workers: dict[int, Worker] = {}
        self._adapter = adapter
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._listener: asyncio.Task[None] | None = None
        self._numbers = itertools.count(1)
        self._forks: dict[int, asyncio.Future[int]] = {}

    async def start(self) -> None:
        """Imports the user's code in the zygote; WorkflowError when it can not be imported.

        A zygote that somebody kills meanwhile (the kernel, short of memory) says nothing about the code: another try.
        """
        for tries_left in reversed(range(_STARTS)):
            reader, first = await self._launch()
            if first is not None and "error" not in first:
                break
            await self.close()
            if first is not None:
                raise WorkflowError(first["error"])
            if not tries_left or self._process is None or self._process.returncode != -signal.SIGKILL:
                raise WorkflowError(f"{self.entry}: importing it ended the process ({self._exit()})")
            log.warning("a zygote was killed while it started; trying again", entry=self.entry)
        else:
            raise AssertionError("the last try raises")
        self.digest, self.is_alive = first["ready"], True
        self._listener = asyncio.create_task(self._listen(reader))

    async def _launch(self) -> tuple[asyncio.StreamReader, dict[str, Any] | None]:
        """A new process, and its first word; None when it ended without one."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(  # noqa: ASYNC220 - returns after the fork; waiting is done in a thread
                [sys.executable, "-m", "agentjet.workers.zygote", str(theirs.fileno()), self._adapter, self.entry],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=_environment(),
                start_new_session=True,
            )
        self._control = ours.dup()
        reader, self._writer = await asyncio.open_connection(sock=ours)
        try:
            async with asyncio.timeout(START_SECONDS):
                return reader, await read(reader)
        except TimeoutError:
            why = f"{self.entry}: importing it took more than {START_SECONDS:.0f} s; move work into the function"
            return reader, {"error": why}
        except asyncio.CancelledError:
            await self.close()
            raise

    async def fork(self) -> Worker:
        """A fresh worker; ConnectionError when the zygote is gone."""
        number = next(self._numbers)
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=ours)
        try:
            forked = self._forks[number] = asyncio.get_running_loop().create_future()
            with theirs:
                self._command(b"f", number, theirs.fileno())
            async with asyncio.timeout(_FORK_SECONDS):
                pid = await forked
        except TimeoutError:
            writer.close()
            raise ConnectionError(f"{self.entry}: the zygote did not fork within {_FORK_SECONDS:.0f} s") from None
        except BaseException:
            writer.close()
            raise
        finally:
            self._forks.pop(number, None)
        worker = self.workers[pid] = Worker(self, pid, reader, writer)
        return worker

    @property
    def is_usable(self) -> bool:
        """Whether it can fork."""
        return self.is_alive and not self.is_retired

    def kill(self, pid: int) -> None:
        """Kills a worker by the zygote's hand, which knows that the pid is still that worker's."""
        self._order(b"k", pid)

    def retire(self) -> None:
        """Forks no more; idle workers leave now, running ones when they are done."""
        self.is_retired = True
        for worker in self.idle:
            worker.dismiss()
        self.idle.clear()
        self._order(b"q", 0)

    async def close(self) -> None:
        """Ends everything; returns when the zygote is gone."""
        self.is_alive = False
        if self._writer is not None and self._control is not None:
            self._writer.close()
            self._control.close()
        if self._listener is not None:
            self._listener.cancel()
            await asyncio.gather(self._listener, return_exceptions=True)
        for worker in self.workers.values():
            worker.gone(-signal.SIGKILL)
        if self._process is not None:
            await asyncio.to_thread(_wait, self._process)

    def _order(self, operation: bytes, number: int) -> None:
        """A command that nobody has to hear: workers die with their zygote."""
        with contextlib.suppress(ConnectionError):
            if self.is_alive:
                self._command(operation, number)

    def _command(self, operation: bytes, number: int, fd: int | None = None) -> None:
        if self._control is None or self._control.fileno() < 0:
            raise ConnectionError(f"{self.entry}: its zygote is gone")
        socket.send_fds(self._control, [COMMAND.pack(operation, number)], [] if fd is None else [fd])

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        while (frame := await read(reader)) is not None:
            if "forked" in frame:
                forked = self._forks.get(frame["forked"])
                if forked is not None and not forked.done():
                    forked.set_result(frame["pid"])
            elif "exited" in frame:
                self._buried(frame["exited"], frame["code"])
        self.is_alive = False
        if not self.is_retired:
            log.error("the zygote of an entry is gone; the next piece of work starts another", entry=self.entry)
        for pid in list(self.workers):
            self._buried(pid, -signal.SIGKILL)
        for forked in self._forks.values():
            if not forked.done():
                forked.set_exception(ConnectionError(f"{self.entry}: its zygote is gone"))

    def _buried(self, pid: int, code: int) -> None:
        worker = self.workers.pop(pid, None)
        if worker is not None:
            if worker in self.idle:
                self.idle.remove(worker)
            worker.gone(code)

    def _exit(self) -> str:
        code = None if self._process is None else self._process.returncode
        return "no status" if code is None else f"status {code}"


def _environment() -> dict[str, str]:
    """The parent's without AgentJet's own settings, which may hold secrets; one thread for each worker's maths."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("AGENTJET_")}
    return {"OMP_NUM_THREADS": "1"} | own


def _wait(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(_EXIT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()

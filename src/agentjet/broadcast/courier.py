"""Has files sent and received by a process apart (`carrier`), which is killed when it does not answer in time.

Invariant: every wait is bounded, whatever the other hosts or a driver do. It imports no torch.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from agentjet.errors import BroadcastError

WINDOW_SECONDS = 20.0
"""How long a sender waits for receivers; one that has to start its carrier first takes a few seconds."""
STALL_SECONDS = 20.0
"""Longest silence in the middle of a file."""
_START_SECONDS = 60.0
_SLOWEST_BYTES_PER_SECOND = 50e6


class Courier:
    """One broadcast at a time."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._is_sending = False

    async def offer(self, path: Path, sha256: str, num_receivers: int) -> int:
        """Open a broadcast of a file; returns the port at which to join. One that is still open is given up.

        BroadcastError when it can not be opened.
        """
        if self._is_sending:
            await self.close()
        self._is_sending = True
        command = {"do": "send", "path": str(path), "sha256": sha256, "num_receivers": num_receivers}
        return int((await self._ask(_START_SECONDS, **command))["port"])

    async def sent(self, num_bytes: int) -> int:
        """How many have the file that was offered, once it is over. BroadcastError when it failed."""
        num_done = int((await self._reply(_limit_seconds(num_bytes)))["num_done"])
        self._is_sending = False
        return num_done

    async def receive(self, address: str, path: Path, num_bytes: int, sha256: str) -> None:
        """Write the file that is offered at `HOST:PORT`. BroadcastError when it did not come whole."""
        host, _, port = address.rpartition(":")
        command = {"do": "receive", "host": host, "port": int(port), "path": str(path), "num_bytes": num_bytes}
        await self._ask(_START_SECONDS + _limit_seconds(num_bytes), sha256=sha256, **command)

    async def close(self) -> None:
        """End the process, and whatever it is at."""
        process, self._process, self._is_sending = self._process, None, False
        if process is not None:
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def _ask(self, limit_seconds: float, **command: Any) -> dict[str, Any]:
        if self._process is None or self._process.returncode is not None:
            await self.close()
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "agentjet.broadcast.carrier"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
        assert self._process.stdin is not None
        times = {"window_seconds": WINDOW_SECONDS, "stall_seconds": STALL_SECONDS}
        self._process.stdin.write(json.dumps(command | times).encode() + b"\n")
        return await self._reply(limit_seconds)

    async def _reply(self, limit_seconds: float) -> dict[str, Any]:
        """The next answer; a process that gives none is ended."""
        process, answer = self._process, None
        if process is None or process.stdout is None:
            raise BroadcastError("the broadcast was given up")
        try:
            async with asyncio.timeout(limit_seconds):
                answer = json.loads(await process.stdout.readline() or b"null")
        except TimeoutError:
            raise BroadcastError(f"the broadcast was not over within {limit_seconds:.0f} s") from None
        finally:
            if answer is None and process is self._process:
                await asyncio.shield(self.close())
        if answer is None:
            raise BroadcastError("the process that carries weights died")
        if "error" in answer:
            raise BroadcastError(answer["error"])
        return answer


def _limit_seconds(num_bytes: int) -> float:
    return WINDOW_SECONDS + 3 * STALL_SECONDS + num_bytes / _SLOWEST_BYTES_PER_SECOND

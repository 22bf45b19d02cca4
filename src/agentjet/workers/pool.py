"""A pool of worker processes for one entry.

Invariants:

- A worker does one piece of work at a time; whatever it does to its process befalls that piece only.
- Work is done by the code that the file held when the work began; a changed file gets a nursery of its own, and if its
  new code can not be imported the last good code goes on (logged, and told by `problem`).
- A worker leaves after `recycle_after` pieces, or when it has grown beyond `max_rss_bytes`; one that grows beyond twice
  that while it works is killed.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil
import structlog

from agentjet.errors import WorkflowError
from agentjet.workers.entry import locate
from agentjet.workers.nursery import Nursery, Worker

log = structlog.get_logger(__name__)

_WATCH_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a piece of work has no value."""

    kind: str
    """Name of the error; `WorkerDied` and `DeadlineExceeded` are the pool's own."""
    message: str
    traceback: str = ""
    where: str = ""
    """`file.py:3`, the innermost line of the user's own code; empty when there is none."""
    is_abort: bool = False
    """The code gave up on purpose (AbortError)."""
    is_crash: bool = False
    """The process died: nothing is known of the code's own opinion."""
    is_late: bool = False
    """The time limit passed."""

    @property
    def sentence(self) -> str:
        """The message and where it came from."""
        return f"{self.message} ({self.where})" if self.where else self.message


@dataclass(frozen=True, slots=True)
class Done:
    """How a piece of work ended."""

    value: Any
    failure: Failure | None
    digest: str
    """sha256 of the code file that did it."""
    seconds: float


class WorkerPool:
    """Runs an adapter over an entry's function in forked workers.

    Args:
        entry: `file.py:function` or `module:function`.
        adapter: `module:function` of AgentJet's, see `agentjet.workers.worker.Adapter`.
        max_running: Most workers at once; more work waits.
        num_warm: Workers that are forked by `start` already.
        recycle_after: Pieces of work after which a worker is replaced.
        max_rss_bytes: Resident memory beyond which a worker is replaced.
    """

    def __init__(
        self,
        entry: str,
        *,
        adapter: str,
        max_running: int,
        num_warm: int = 0,
        recycle_after: int = 200,
        max_rss_bytes: int = 2 << 30,
    ) -> None:
        self.entry = locate(entry)
        self.problem = ""
        """Why a changed file's new code is not used; empty when all is well."""
        self._adapter = adapter
        self._num_warm = num_warm
        self._recycle_after = recycle_after
        self._max_rss_bytes = max_rss_bytes
        self._free = asyncio.Semaphore(max_running)
        self._busy: set[Worker] = set()
        self._nursery: Nursery | None = None
        self._retired: list[Nursery] = []
        self._stamp = (0, 0, 0)
        self._starting = asyncio.Lock()
        self._watcher: asyncio.Task[None] | None = None

    @property
    def num_running(self) -> int:
        """Workers at work."""
        return len(self._busy)

    async def start(self) -> None:
        """Imports the code; WorkflowError says why it can not be."""
        nursery = await self._current()
        try:
            nursery.idle += [await nursery.fork() for _ in range(self._num_warm)]
        except ConnectionError as error:
            # The first piece of work starts another zygote.
            log.warning("no worker could be forked", entry=self.entry.text, error=str(error))
        self._watcher = asyncio.create_task(self._watch())

    async def run(
        self,
        payload: dict[str, Any],
        *,
        timeout_seconds: float,
        on_message: Callable[[dict[str, Any]], None] = lambda message: None,
    ) -> Done:
        """Does one piece of work; its failures are data.

        Args:
            payload: What the adapter gets.
            timeout_seconds: The worker is killed after this, counted from when it is free to begin.
            on_message: Called with what the adapter emits, as it comes.

        Raises:
            WorkflowError: There is no code to run any more.
            TypeError: msgpack can not carry the payload.
        """
        async with self._free:
            worker = await self._worker()
            self._busy.add(worker)
            began = time.monotonic()
            try:
                async with asyncio.timeout(timeout_seconds):
                    reply = await worker.work(payload, on_message)
            except TimeoutError:
                worker.kill(f"was killed after {timeout_seconds:.0f} s")
                failure = Failure(
                    "DeadlineExceeded",
                    f"{self.entry.text} did not finish within {timeout_seconds:.1f} s and was stopped",
                    is_late=True,
                )
                return Done(None, failure, worker.nursery.digest, time.monotonic() - began)
            except BaseException:
                worker.kill("was cancelled")
                raise
            finally:
                self._busy.discard(worker)
            seconds = time.monotonic() - began
            if reply is None:
                return Done(None, await self._death(worker), worker.nursery.digest, seconds)
            self._put_back(worker, reply["rss_bytes"])
            failure = Failure(**reply["failure"]) if "failure" in reply else None
            return Done(reply.get("value"), failure, worker.nursery.digest, seconds)

    async def close(self) -> None:
        """Ends every worker at once."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        nurseries = [*self._retired, *([self._nursery] if self._nursery else [])]
        self._nursery, self._retired = None, []
        await asyncio.gather(*(nursery.close() for nursery in nurseries))

    async def _worker(self) -> Worker:
        for _ in range(3):
            nursery = await self._current()
            while nursery.idle:
                worker = nursery.idle.pop()
                if not worker.exit_code.done():
                    return worker
            try:
                return await nursery.fork()
            except ConnectionError as error:
                log.warning("no worker could be forked", entry=self.entry.text, error=str(error))
                # Not given up for dead: workers that it has can only be killed through it.
                nursery.retire()
        raise WorkflowError(f"{self.entry.text}: no worker process can be started; see the log for the reason")

    async def _current(self) -> Nursery:
        """The nursery of the file's present code, started when there is none."""
        async with self._starting:
            current, stamp = self._nursery, self.entry.stamp()
            if current is not None and current.is_usable and stamp == self._stamp:
                return current
            self._stamp = stamp
            if current is not None and current.is_usable and self._is_unchanged(current):
                return current
            fresh = Nursery(self.entry.text, self._adapter)
            try:
                await fresh.start()
            except WorkflowError as error:
                if current is None or not current.is_usable:
                    raise
                self.problem = str(error)
                log.error("changed code can not be used; the last good code goes on", error=str(error))
                return current
            self.problem = ""
            if current is not None:
                current.retire()
                self._retired.append(current)
            self._nursery = fresh
            return fresh

    def _is_unchanged(self, current: Nursery) -> bool:
        try:
            return self.entry.digest() == current.digest
        except WorkflowError as error:
            self.problem = str(error)
            return True

    def _put_back(self, worker: Worker, rss_bytes: int) -> None:
        is_worn = worker.num_done >= self._recycle_after or rss_bytes > self._max_rss_bytes
        if is_worn or not worker.nursery.is_usable:
            worker.dismiss()
        else:
            worker.nursery.idle.append(worker)

    async def _death(self, worker: Worker) -> Failure:
        cause = await worker.cause_of_death()
        return Failure("WorkerDied", f"the worker process of {self.entry.text} {cause}", is_crash=True)

    async def _watch(self) -> None:
        """Kills what outgrows its memory and clears away retired nurseries."""
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            for worker in self._busy:
                rss_bytes = _rss_bytes(worker.pid)
                if rss_bytes > 2 * self._max_rss_bytes:
                    worker.kill(f"was killed: it used {rss_bytes / 2**20:.0f} MiB of memory")
            for nursery in [one for one in self._retired if not one.workers]:
                self._retired.remove(nursery)
                await nursery.close()


def _rss_bytes(pid: int) -> int:
    try:
        return psutil.Process(pid).memory_info().rss
    except psutil.Error:
        return 0

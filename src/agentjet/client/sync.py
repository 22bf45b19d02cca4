"""The same client for code without an event loop: a thread runs one.

Example:
    >>> with SyncSwarmClient("nats://host:4222") as swarm:
    ...     for episode in swarm.claim("guess"):
    ...         with episode:
    ...             reply = episode.call([{"role": "user", "content": "Hi"}])
    ...             episode.end(reward=1.0)
"""

import asyncio
import threading
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from agentjet.client.episode import ClientEpisode
from agentjet.client.swarm import SwarmClient
from agentjet.schemas.episode import EndReply

T = TypeVar("T")


class LoopThread:
    """An event loop of its own, to wait for from other threads."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="agentjet-client", daemon=True)
        self._thread.start()

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine; interrupted, it cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        """Ends the loop and its thread."""
        self.wait(self._loop.shutdown_asyncgens())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class SyncEpisode:
    """`ClientEpisode`, waited for."""

    def __init__(self, episode: ClientEpisode, thread: LoopThread) -> None:
        self._episode, self._thread = episode, thread
        self.ticket, self.task, self.seed = episode.ticket, episode.task, episode.seed
        self.models, self.model, self.sampling = episode.models, episode.model, episode.sampling
        self.base_url, self.api_key, self.is_eval = episode.base_url, episode.api_key, episode.is_eval

    def call(self, messages: Sequence[Mapping[str, Any]], *, model: str = "", **sampling: Any) -> dict[str, Any]:
        """See `ClientEpisode.call`."""
        return self._thread.wait(self._episode.call(messages, model=model, **sampling))

    @property
    def calls(self) -> dict[str, tuple[str, ...]]:
        """See `ClientEpisode.calls`."""
        return self._episode.calls

    def log(self, message: dict[str, Any]) -> None:
        """See `ClientEpisode.log`."""
        self._episode.log(message)

    def end(
        self,
        reward: float | None = None,
        *,
        call_rewards: Mapping[str, float] | Sequence[float] | None = None,
        metrics: Mapping[str, float] | None = None,
        result: Any = None,
    ) -> EndReply:
        """See `ClientEpisode.end`."""
        return self._thread.wait(self._episode.end(reward, call_rewards=call_rewards, metrics=metrics, result=result))

    def abort(self, why: str) -> EndReply:
        """See `ClientEpisode.abort`."""
        return self._thread.wait(self._episode.abort(why))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._thread.wait(self._episode.__aexit__(kind, error, traceback))


class SyncSwarmClient:
    """`SwarmClient`, waited for; takes the same arguments."""

    def __init__(self, url: str = "nats://127.0.0.1:4222", **options: Any) -> None:
        self._client = SwarmClient(url, **options)
        self._thread: LoopThread | None = None

    @property
    def run(self) -> str:
        """Id of the run that is played for."""
        return self._client.run

    def claim(self, pool: str) -> Iterator[SyncEpisode]:
        """See `SwarmClient.claim`."""
        thread = self._running()
        episodes = self._client.claim(pool)
        try:
            while True:
                try:
                    episode = thread.wait(anext(episodes))
                except StopAsyncIteration:
                    return
                yield SyncEpisode(episode, thread)
        finally:
            thread.wait(episodes.aclose())

    def open(self, task: Mapping[str, Any], *, pool: str, group: str, n: int = 1) -> list[SyncEpisode]:
        """See `SwarmClient.open`."""
        thread = self._running()
        return [SyncEpisode(one, thread) for one in thread.wait(self._client.open(task, pool=pool, group=group, n=n))]

    def __enter__(self) -> Self:
        self._thread = LoopThread()
        try:
            self._thread.wait(self._client.__aenter__())
        except BaseException:
            self._thread.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        thread = self._running()
        thread.wait(self._client.close())
        thread.stop()
        self._thread = None

    def _running(self) -> LoopThread:
        if self._thread is None:
            raise RuntimeError("the swarm client is not open: use `with SyncSwarmClient(...) as swarm:`")
        return self._thread

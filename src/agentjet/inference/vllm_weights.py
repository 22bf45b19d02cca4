"""The weights of a running vLLM engine, and how new ones take their place.

Invariants:

- Until the first weight is touched, whatever goes wrong leaves the old version serving and generation running.
- From then on the update is brought to its end whoever still waits for it. If it can not be, the weights are half of
  one version and half of another: generation stays paused, no token is drawn from them, and the engine has to end.
- Tokens carry the label that the engine core had when it drew them; it changes while generation is paused.

Whether keys and values survive is decided in one place: `pause_generation` with `clear_cache` takes the cache from
running requests too, which are then computed anew, from their prompt to their last token, under the new weights.
"""

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import structlog

from agentjet.errors import EngineError
from agentjet.inference.weight_file import Layout, Snapshot
from agentjet.schemas.ids import Version

log = structlog.get_logger(__name__)

_LEAST_PLACE_SECONDS = 60.0
_READ_BYTES = 16 * 1024**2


class VllmWeights:
    """What one engine serves.

    Args:
        layout: What a snapshot of its model holds.
        version: What it has loaded.
    """

    def __init__(self, layout: Layout, version: Version) -> None:
        self.version = version
        self.problem = ""
        """Why the engine has to end; empty while all is well."""
        self._layout = layout
        self._placing = asyncio.Lock()

    async def label(self, llm: Any) -> None:
        """Tells vLLM's `AsyncLLM` what it has loaded."""
        await llm.update_weight_version(str(self.version))

    async def update(self, llm: Any, version: Version, path: Path, *, timeout_seconds: float) -> None:
        """Has vLLM's `AsyncLLM` serve a snapshot as `version`.

        Raises:
            EngineError: The snapshot is unreadable or of another model, and the old weights stay; or `problem` is set.
            TimeoutError: It was not read in time; the old weights stay.
            CancelledError: Nobody waits any more; the weights may be in place or not.
        """
        is_wanted = threading.Event()
        is_wanted.set()
        try:
            async with asyncio.timeout(timeout_seconds):
                await asyncio.to_thread(self._read, path, is_wanted)
        finally:
            is_wanted.clear()
        placing = asyncio.create_task(self._place(llm, version, path, max(timeout_seconds, _LEAST_PLACE_SECONDS)))
        placing.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(placing)

    def _read(self, path: Path, is_wanted: threading.Event) -> None:
        """Checks a snapshot and brings it into the page cache, from where the workers take it while nothing runs."""
        buffer = bytearray(_READ_BYTES)
        with Snapshot(path) as snapshot:
            snapshot.check(self._layout)
            for file in snapshot.files:
                with file.open("rb", buffering=0) as opened:
                    while is_wanted.is_set() and opened.readinto(buffer):
                        pass

    async def _place(self, llm: Any, version: Version, path: Path, limit_seconds: float) -> None:
        async with self._placing:
            if self.problem:
                raise EngineError(self.problem)
            try:
                async with asyncio.timeout(limit_seconds):
                    await self._swap(llm, version, path)
            except EngineError:
                raise
            except Exception as error:
                self.problem = f"the engine broke while weights {version} were put in place ({error!r}); restart it"
                raise EngineError(self.problem) from error

    async def _swap(self, llm: Any, version: Version, path: Path) -> None:
        """Pause, load, set the version, resume."""
        started = time.monotonic()
        try:
            await llm.pause_generation(mode="keep", clear_cache=True)
        except Exception as error:
            await llm.resume_generation()
            raise EngineError(f"vLLM could not be paused for weights {version}: {error}; the old ones stay") from error
        refusals = await llm.collective_rpc("load_snapshot", args=(str(path), list(self._layout.shapes)))
        if any(refusals) and not all(refusals):
            raise RuntimeError(
                f"some workers have the new weights and some refused them: {next(filter(None, refusals))}"
            )
        if not any(refusals):
            await llm.update_weight_version(str(version))
            self.version = version
        await llm.resume_generation()
        if any(refusals):
            raise EngineError(refusals[0])
        log.info("weights_in_place", version=str(version), pause_seconds=round(time.monotonic() - started, 3))

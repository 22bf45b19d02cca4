"""The weights of a running vLLM engine, and how new ones take their place.

Invariants:

- Until the first weight is touched, whatever goes wrong leaves the old version serving and generation running.
- From then on the update is brought to its end whoever still waits for it. If it can not be, the weights are half of
  one version and half of another: generation stays paused, no token is drawn from them, and the engine has to end.
- Tokens carry the label that the engine core had when it drew them; it changes while generation is paused.

Whether keys and values survive is decided in one place: `pause_generation` with `clear_cache` takes the cache from
running requests too, which are then computed anew, from their prompt to their last token, under the new weights.
`keep_kv` leaves it to them; each request is then given a salt for its shared prefixes, which changes with the weights,
so that none finds keys of weights that are older than itself.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from agentjet.errors import EngineError
from agentjet.inference.adapter_shelf import Adapter
from agentjet.inference.vllm_in_place import Changes, InPlace
from agentjet.inference.weight_file import Layout, Snapshot
from agentjet.schemas.ids import Version

log = structlog.get_logger(__name__)

LEAST_PLACE_SECONDS = 60.0
_READ_BYTES = 16 * 1024**2


@dataclass(frozen=True, slots=True)
class Beginning:
    """With what a generation begins."""

    version: Version
    salt: str | None = None
    """Only generations with the same share prefixes; None where all may."""
    adapter: Adapter | None = None
    """What draws all of its tokens; None where the newest weights draw each."""
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further arguments of `AsyncLLM.generate`."""

    def is_mixed(self, version: Version) -> bool:
        """Whether a token of a version may rest on keys and values of older weights."""
        return self.salt is not None and version != self.version


class VllmWeights:
    """What one engine serves.

    Args:
        layout: What a snapshot of its model holds.
        version: What it has loaded.
        keep_kv: Running requests keep their keys and values when the weights change.
    """

    def __init__(self, layout: Layout, version: Version, *, keep_kv: bool = False) -> None:
        self.version = version
        self.problem = ""
        """Why the engine has to end; empty while all is well."""
        self._layout, self._keep_kv = layout, keep_kv
        self._num_placed = 0
        self._placing = asyncio.Lock()
        self._in_place = InPlace()

    def begin(self) -> Beginning:
        """A generation begins."""
        return Beginning(self.version, salt=str(self._num_placed) if self._keep_kv else None)

    def end(self, llm: Any, beginning: Beginning) -> None:
        """A generation that has begun is over."""

    def close(self) -> None:
        """vLLM is about to end."""

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
                await self._in_place.look(llm)
                await asyncio.to_thread(self._read, path, is_wanted)
                changes = await asyncio.to_thread(self._in_place.find, path)
        finally:
            is_wanted.clear()
        limit_seconds = max(timeout_seconds, LEAST_PLACE_SECONDS)
        placing = asyncio.create_task(self._place(llm, version, path, changes, limit_seconds))
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

    async def _place(
        self, llm: Any, version: Version, path: Path, changes: Changes | None, limit_seconds: float
    ) -> None:
        with contextlib.closing(changes) if changes is not None else contextlib.nullcontext():
            async with self._placing:
                if self.problem:
                    raise EngineError(self.problem)
                started = time.monotonic()
                await self._pause(llm, version, limit_seconds)
                try:
                    async with asyncio.timeout(limit_seconds):
                        await self._swap(llm, version, path, changes)
                except EngineError:
                    raise
                except Exception as error:
                    self.problem = f"the engine broke while weights {version} were put in place ({error!r}); restart it"
                    raise EngineError(self.problem) from error
                log.info("weights_in_place", version=str(version), pause_seconds=round(time.monotonic() - started, 3))

    async def _pause(self, llm: Any, version: Version, limit_seconds: float) -> None:
        """Where it fails, no weight was touched: generation goes on with the old ones."""
        try:
            async with asyncio.timeout(limit_seconds):
                await llm.pause_generation(mode="keep", clear_cache=not self._keep_kv)
        except Exception as error:
            try:
                async with asyncio.timeout(limit_seconds):
                    await llm.resume_generation()
            except Exception as stuck:  # noqa: BLE001 - said in the error below, and the engine ends
                self.problem = f"the engine can be neither paused nor resumed for weights {version} ({stuck!r})"
            raise EngineError(
                f"vLLM could not be paused for weights {version}: {error!r}; {self.problem or 'the old ones stay'}"
            ) from error

    async def _swap(self, llm: Any, version: Version, path: Path, changes: Changes | None) -> None:
        """Load, set the version, resume."""
        refusals = await self._in_place.load(llm, path, list(self._layout.shapes), changes)
        if any(refusals) and not all(refusals):
            raise RuntimeError(
                f"some workers have the new weights and some refused them: {next(filter(None, refusals))}"
            )
        if not any(refusals):
            await llm.update_weight_version(str(version))
            self.version, self._num_placed = version, self._num_placed + 1
        await llm.resume_generation()
        if any(refusals):
            raise EngineError(refusals[0])

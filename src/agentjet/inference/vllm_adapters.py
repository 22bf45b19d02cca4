"""The adapters of a running vLLM engine: several versions at once, each generation with its own.

Invariants:

- Nothing is paused: a new adapter is loaded beside the others, and only generations that begin afterwards get it.
- A file is checked as a whole before vLLM sees it. What vLLM then refuses is taken from it again, and the former
  adapter stays the newest.
- vLLM's folder of an adapter lies on disk from before it is loaded until vLLM has forgotten it. What a killed process
  leaves there is removed by the next one.

vLLM finds shared prefixes by an adapter's name too, and no two have the same.
"""

import asyncio
import os
import secrets
import shutil
import tempfile
from pathlib import Path
from typing import Any

import structlog

from agentjet.delivery.own_folder import OwnFolder
from agentjet.errors import EngineError
from agentjet.inference.adapter_layout import AdapterLayout
from agentjet.inference.adapter_shelf import Adapter, AdapterShelf
from agentjet.inference.vllm_weights import LEAST_PLACE_SECONDS, Beginning
from agentjet.pretrained.adapter_file import lay_out
from agentjet.schemas.ids import Version

log = structlog.get_logger(__name__)

FOLDER = Path(tempfile.gettempdir()) / f"agentjet-adapters-{os.getuid()}"
"""Where each engine has a folder of its own."""


class VllmAdapters:
    """What one engine serves.

    Args:
        layout: Of its model's adapters.
        version: What it is without one.
        num_versions: Adapters held at most.
    """

    problem = ""
    """As `VllmWeights.problem`: no adapter leaves the engine half-loaded."""

    def __init__(self, layout: AdapterLayout, version: Version, num_versions: int) -> None:
        self._layout, self._shelf = layout, AdapterShelf(version, num_versions)
        self._folder = OwnFolder(FOLDER / secrets.token_hex(8))
        self._placing = asyncio.Lock()
        self._ended = asyncio.Event()
        self._removing: set[asyncio.Task[None]] = set()
        self._is_closed = False

    @property
    def version(self) -> Version:
        """Of a generation that begins now."""
        return self._shelf.newest.version

    async def label(self, llm: Any) -> None:
        """As `VllmWeights.label`; a token's version is that of its generation."""

    def begin(self) -> Beginning:
        """A generation begins."""
        adapter = self._shelf.begin()
        return Beginning(adapter.version, adapter=adapter, options={"lora_request": self._request(adapter)})

    def end(self, llm: Any, beginning: Beginning) -> None:
        """A generation that has begun is over, in vLLM too."""
        assert beginning.adapter is not None, "every generation of an engine with adapters has one"
        self._let_go(llm, self._shelf.end(beginning.adapter))
        self._ended.set()

    async def update(self, llm: Any, version: Version, path: Path, *, timeout_seconds: float) -> None:
        """Has vLLM's `AsyncLLM` draw new generations with an adapter, as `version`.

        Raises:
            EngineError: The file is not an adapter for this model, or vLLM refuses it; the former one stays.
            TimeoutError: As many as are allowed were in use all the time; the former one stays.
            CancelledError: Nobody waits any more; the adapter may be in place or not.
        """
        try:
            async with asyncio.timeout(timeout_seconds):
                await asyncio.to_thread(self._layout.check, path)
                await self._wait_for_room()
        except TimeoutError:
            raise TimeoutError(
                f"there was no room for adapter {version}: running calls use {len(self._shelf.held)} others; raise "
                "lora.num_versions where calls are long"
            ) from None
        placing = asyncio.create_task(self._place(llm, version, path, max(timeout_seconds, LEAST_PLACE_SECONDS)))
        placing.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(placing)

    def close(self) -> None:
        """vLLM is about to end: it is asked to forget nothing more, and the folder is removed."""
        self._is_closed = True
        for task in self._removing:
            task.cancel()
        self._folder.release()

    async def _wait_for_room(self) -> None:
        """Returns with the turn to place an adapter."""
        await self._placing.acquire()
        try:
            while not self._shelf.has_room:
                self._ended.clear()
                await self._ended.wait()
        except BaseException:
            self._placing.release()
            raise

    async def _place(self, llm: Any, version: Version, path: Path, limit_seconds: float) -> None:
        adapter = self._shelf.announce(version)
        try:
            async with asyncio.timeout(limit_seconds):
                await asyncio.to_thread(lay_out, path, self._path(adapter))
                if not await llm.add_lora(self._request(adapter)):
                    raise EngineError("it was there already")
        except Exception as error:
            self._let_go(llm, adapter)
            raise EngineError(
                f"vLLM can not load adapter {version} of {path}: {error}; the former one stays"
            ) from error
        else:
            self._let_go(llm, self._shelf.put(adapter))
        finally:
            self._placing.release()

    def _path(self, adapter: Adapter) -> Path:
        return self._folder.path / str(adapter.id)

    def _request(self, adapter: Adapter) -> Any:
        """vLLM's `LoRARequest`; None for the model alone."""
        from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

        return (
            LoRARequest(f"{adapter.version}/{adapter.id}", adapter.id, str(self._path(adapter))) if adapter.id else None
        )

    def _let_go(self, llm: Any, adapter: Adapter | None) -> None:
        if adapter is not None and not self._is_closed:
            task = asyncio.create_task(self._remove(llm, adapter))
            self._removing.add(task)
            task.add_done_callback(self._removing.discard)

    async def _remove(self, llm: Any, adapter: Adapter) -> None:
        try:
            await llm.remove_lora(adapter.id)
        except Exception as error:  # noqa: BLE001 - an engine that is dying needs no tidying; `ended` tells of it
            log.warning("vLLM could not forget an adapter", version=str(adapter.version), error=repr(error))
        await asyncio.to_thread(shutil.rmtree, self._path(adapter), ignore_errors=True)

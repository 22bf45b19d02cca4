"""New weights for a vLLM engine where only what changed is written: into the weights in use, without loading the rest.

Invariants:

- What changed is found before generation is paused, against the file that is served; changes from another file are
  never applied.
- It is done only where every worker says that its weights lie as they were loaded. The first time, the whole file is
  loaded after it, and all weights have to be the same; if they are not, it is not done again.

The changes pass in memory, as a file without a name: nothing is left behind however a process ends.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from agentjet.inference.weight_change import WeightsFile, find_changes, pack_changes

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Changes:
    """The way from the file that is served to another."""

    base: WeightsFile
    handle: int
    """Of the file in memory."""

    @property
    def path(self) -> str:
        """Where processes of this host read it."""
        return f"/proc/{os.getpid()}/fd/{self.handle}"

    def close(self) -> None:
        """Let go of them."""
        os.close(self.handle)


class InPlace:
    """Whether one engine's weights can be changed where they lie, and what they are."""

    def __init__(self) -> None:
        self._is_possible: bool | None = None
        self._is_proven = False
        self._served: WeightsFile | None = None

    async def look(self, llm: Any) -> None:
        """Ask the workers of vLLM's `AsyncLLM`, once."""
        if self._is_possible is None:
            obstacle = next(filter(None, await llm.collective_rpc("in_place_obstacle")), "")
            self._is_possible = not obstacle
            if obstacle:
                log.info("weights are loaded whole", reason=obstacle)

    def find(self, path: Path) -> Changes | None:
        """What changes with a file; None where it is to be loaded whole."""
        if not self._is_possible or self._served is None or path.is_dir():
            return None
        try:
            new = WeightsFile(path)
            try:
                changes = find_changes(self._served, new)
            finally:
                new.close()
            if changes is None:
                return None
            found = Changes(self._served, os.memfd_create("agentjet-changes"))
            Path(found.path).write_bytes(pack_changes(changes))
        except (OSError, ValueError) as error:
            log.warning("what changed can not be told; weights are loaded whole", error=str(error))
            return None
        return found

    async def load(self, llm: Any, path: Path, names: Sequence[str], changes: Changes | None) -> list[str]:
        """Put a file's weights in place while generation is paused; returns what the workers refused, or nothing.

        Whatever raises leaves the weights half-loaded.
        """
        refused = [""] if changes is not None and changes.base is self._served else ["there are none"]
        if changes is not None and not any(refused):
            refused = await llm.collective_rpc("change_weights", args=(changes.path,))
        if self._is_proven and not any(refused):
            return self._serve(path, [])
        sums = [] if any(refused) else await llm.collective_rpc("weight_sums")
        refusals: list[str] = await llm.collective_rpc("load_snapshot", args=(str(path), list(names)))
        if any(refusals) and not all(refused):
            raise RuntimeError(f"weights were changed and can not be loaded: {next(filter(None, refusals))}")
        if sums:
            self._is_proven = self._is_possible = sums == await llm.collective_rpc("weight_sums")
            if not self._is_proven:
                log.error("changed weights were not those of the file; they are loaded whole from now on")
        return self._serve(path, refusals)

    def _serve(self, path: Path, refusals: list[str]) -> list[str]:
        """Remember what is in place."""
        if any(refusals):
            return refusals
        if self._served is not None:
            self._served.close()
        self._served = WeightsFile(path) if self._is_possible and not path.is_dir() else None
        return refusals

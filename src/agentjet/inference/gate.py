"""Where new generations wait: for weights on their way, or for the version that an evaluation is pinned to.

Invariant: every wait is bounded by the call's own deadline. It does not know how weights come.
"""

import asyncio
from collections.abc import Awaitable, Callable

from agentjet.inference.engine import Engine
from agentjet.inference.refusal import VersionUnavailableError
from agentjet.schemas.ids import Version


async def pass_at_once() -> None:
    """The hook of an engine whose weights never change."""


class Gate:
    """Lets a generation begin.

    Args:
        engine: Whose version counts.
        admit: Returns once no weights are awaited.
    """

    def __init__(self, engine: Engine, admit: Callable[[], Awaitable[None]] = pass_at_once) -> None:
        self._engine = engine
        self._admit = admit
        self._changed = asyncio.Event()
        self.num_waiting = 0

    def weights_changed(self) -> None:
        """The engine serves another version: pinned calls look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def enter(self, pin: str | None, timeout_seconds: float) -> None:
        """Wait until a generation may begin; `pin` is the only version that may answer.

        Raises VersionUnavailableError when that version did not come in time or is gone.
        """
        self.num_waiting += 1
        try:
            async with asyncio.timeout(max(timeout_seconds, 0.0)):
                await (self._admit() if pin is None else self._wait_for(Version.parse(pin)))
        except TimeoutError:
            pass  # unpinned, an answer of older weights is better than none
        finally:
            self.num_waiting -= 1
        if pin is not None and str(self._engine.version) != pin:
            raise VersionUnavailableError(
                f"the evaluation is pinned to version {pin}, but this engine serves {self._engine.version}"
            )

    async def _wait_for(self, version: Version) -> None:
        while self._engine.version < version:
            await self._changed.wait()

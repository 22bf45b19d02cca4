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


def is_equal(pin: Version, served: Version) -> bool:
    """Whether two versions are the same, where nothing more is known of them."""
    return pin == served


class Gate:
    """Lets a generation begin.

    Args:
        engine: Whose version counts.
        admit: Returns once no weights are awaited.
        is_same: Whether two versions name the same weights; a learner that starts again gives its base a second name.
    """

    def __init__(
        self,
        engine: Engine,
        admit: Callable[[], Awaitable[None]] = pass_at_once,
        is_same: Callable[[Version, Version], bool] = is_equal,
    ) -> None:
        self._engine = engine
        self._admit = admit
        self._is_same = is_same
        self._changed = asyncio.Event()
        self.num_waiting = 0

    def weights_changed(self) -> None:
        """The engine serves another version: pinned calls look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def enter(self, pin: str | None, timeout_seconds: float) -> None:
        """Wait until a generation may begin; only the weights that `pin` names may answer.

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
        if not self.may_answer(pin, self._engine.version):
            raise VersionUnavailableError(
                f"the evaluation is pinned to version {pin}, but this engine serves {self._engine.version}"
            )

    def may_answer(self, pin: str | None, version: Version) -> bool:
        """Whether a version's weights are those that a call is pinned to."""
        return pin is None or self._is_same(Version.parse(pin), version)

    async def _wait_for(self, version: Version) -> None:
        while self._engine.version < version and not self._is_same(version, self._engine.version):
            await self._changed.wait()

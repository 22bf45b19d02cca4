"""New weights on their way into an engine.

Invariants:

- Only versions that LEDGER holds and has not voided are loaded; of these the newest. A restart of the learner that
  voids steps takes the engine back to the version it published.
- An engine that starts late serves nothing before it has the newest weights that were published (`caught_up`).
- From the moment a step is in LEDGER until its weights are loaded, new generations wait (bounded by `hold_seconds`), so
  that a synchronous run stays on policy.
- Weights that fail to arrive or to load leave the engine on its version; they are tried again.

It does not know how their file comes here (`agentjet.delivery`).
"""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import structlog

from agentjet.accounting.ledger import LedgerView
from agentjet.bus.protocol import Bus, StoredMessage
from agentjet.bus.record import read
from agentjet.delivery.arrival import Arrivals
from agentjet.delivery.route import find_route
from agentjet.errors import BusError, EngineError, PatchError
from agentjet.inference.engine import Engine
from agentjet.schemas import subject
from agentjet.schemas.ids import RunId, Version
from agentjet.schemas.ledger import LearnerStep
from agentjet.schemas.subject import Stream, stream_name
from agentjet.schemas.weights import Weights

log = structlog.get_logger(__name__)

_RETRY_SECONDS = 3.0
_LOAD_SECONDS, _LOAD_BYTES_PER_SECOND = 120.0, 50e6
"""How long an engine may take to load weights, and how fast at least: a slow network disk."""


class WeightsFollower:
    """Keeps one engine on the newest valid version of its model."""

    def __init__(
        self,
        bus: Bus,
        run: RunId,
        model: str,
        engine: Engine,
        folder: Path,
        *,
        hold_seconds: float,
        on_loaded: Callable[[Version, float], None] = lambda version, seconds: None,
    ) -> None:
        self._bus, self._run, self._model = bus, run, model
        self._engine, self._arrivals = engine, Arrivals(bus, run, folder)
        self._hold_seconds, self._on_loaded = hold_seconds, on_loaded
        self._view = LedgerView()
        self._published: dict[Version, Weights] = {}
        self._changed = asyncio.Event()
        self._expected: Version | None = None
        self.expected_since = 0.0
        """When the wait for `expected` began, seconds since the epoch."""
        self._free = asyncio.Event()
        self._free.set()
        self._caught_up = asyncio.Event()
        self._ledger, self._ledger_sequence = subject.ledger(run, model), 0
        self._weights, self._weights_sequence = subject.weights_of(run, model), 0

    @property
    def expected(self) -> Version | None:
        """The version that is on its way, or None."""
        return self._expected

    async def caught_up(self) -> None:
        """Returns once the engine has served the newest weights that were published, or nothing was trained yet."""
        await self._caught_up.wait()

    async def ready(self) -> None:
        """Returns once no weights are awaited, or the hold has run out."""
        await self._free.wait()

    def is_same(self, one: Version, other: Version) -> bool:
        """Whether two versions name the same weights."""
        return self._view.is_same(one, other)

    async def catch_up(self) -> None:
        """Read what there is, and load the newest weights; where that fails, `run` tries again."""
        start = self._ledger_sequence + 1
        async for message in self._bus.scan(stream_name(self._run, Stream.LEDGER), self._ledger, start=start):
            await self._apply(message)
        start = self._weights_sequence + 1
        async for message in self._bus.scan(stream_name(self._run, Stream.WEIGHTS), self._weights, start=start):
            await self._note(message)
        await self._load_newest()

    async def run(self) -> None:
        """Follow LEDGER and WEIGHTS for ever, from where `catch_up` left off; leaves no file behind."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._follow_ledger())
                group.create_task(self._follow_weights())
                group.create_task(self._load())
        finally:
            await self._arrivals.close()

    async def _follow_ledger(self) -> None:
        start = self._ledger_sequence + 1
        async for message in self._bus.tail(stream_name(self._run, Stream.LEDGER), self._ledger, start=start):
            await self._apply(message)

    async def _apply(self, message: StoredMessage) -> None:
        record = await read(self._bus, self._run, Stream.LEDGER, message)
        self._view.apply(message.sequence, record)
        self._ledger_sequence = message.sequence
        if isinstance(record, LearnerStep):
            self._expect(Version(record.incarnation, record.step))
        self._changed.set()

    def _expect(self, version: Version) -> None:
        if version != self._engine.version and version not in self._published:
            self._expected, self.expected_since = version, time.time()
            self._free.clear()
            asyncio.get_running_loop().call_later(self._hold_seconds, self._give_up, version)

    def _give_up(self, version: Version) -> None:
        if self._expected == version:
            log.warning(
                "weights are late; generating with old ones", wanted=str(version), have=str(self._engine.version)
            )
            self._expected = None
            self._free.set()

    async def _follow_weights(self) -> None:
        start = self._weights_sequence + 1
        async for message in self._bus.tail(stream_name(self._run, Stream.WEIGHTS), self._weights, start=start):
            await self._note(message)

    async def _note(self, message: StoredMessage) -> None:
        record = await read(self._bus, self._run, Stream.WEIGHTS, message)
        self._weights_sequence = message.sequence
        if not isinstance(record, Weights):
            log.warning("a strange record among the weights", subject=message.subject)
            return
        self._published[Version.parse(record.version)] = record
        self._changed.set()

    async def _load(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self._load_newest()

    async def _load_newest(self) -> None:
        newest = self._newest()
        if newest is not None and newest != self._engine.version:
            await self._try(newest)
        if newest == self._engine.version or (newest is None and self._view.num_steps == 0):
            self._caught_up.set()
        self._settle_hold()

    def _newest(self) -> Version | None:
        return max(self._valid(), default=None)

    def _valid(self) -> dict[Version, Weights]:
        """What LEDGER holds of what was published; patches of voided versions lead nowhere."""
        return {version: record for version, record in self._published.items() if self._view.is_valid(version)}

    async def _try(self, version: Version) -> None:
        started = time.monotonic()
        try:
            path = await self._arrivals.file(version, self._valid())
            limit = _LOAD_SECONDS + self._published[version].num_bytes / _LOAD_BYTES_PER_SECOND
            await self._engine.update_weights(version, path, timeout_seconds=limit)
        except (BusError, PatchError, EngineError, OSError, TimeoutError) as error:
            log.error("new weights could not be loaded", version=str(version), error=str(error))
            asyncio.get_running_loop().call_later(_RETRY_SECONDS, self._changed.set)
            return
        self._forget_before(version)
        self._on_loaded(version, time.monotonic() - started)
        log.info("new weights", version=str(version), seconds=round(time.monotonic() - started, 3))

    def _forget_before(self, version: Version) -> None:
        """Records on the way from a whole file stay: what is held may turn out to be damaged."""
        route = find_route(version, self._published)
        needed = route.versions if route is not None else frozenset[Version]()
        for old in [known for known in self._published if known < version and known not in needed]:
            del self._published[old]

    def _settle_hold(self) -> None:
        if self._expected is not None and self._engine.version >= self._expected:
            self._expected = None
            self._free.set()

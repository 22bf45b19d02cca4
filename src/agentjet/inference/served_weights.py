"""The weights of an embedded engine's requests: one version for all of them, or an adapter for each.

Invariants:

- Staging touches nothing in use; putting in place comes between two steps, and does not fail.
- What a request has computed is shared with requests of the same weights only.

All of it runs on the engine's thread.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from agentjet.inference.adapted_linear import AdapterBank
from agentjet.inference.adapter_shelf import Adapter, AdapterShelf
from agentjet.inference.policy_model import PolicyModel
from agentjet.inference.request import Request
from agentjet.inference.scheduler import Scheduler, Work
from agentjet.schemas.ids import Version


class ServedWeights(Protocol):
    """What the engine's loop knows of weights."""

    @property
    def version(self) -> Version:
        """Of a request that begins now."""
        ...

    @property
    def has_room(self) -> bool:
        """Whether an update may be staged now."""
        ...

    def begin(self, request: Request) -> None:
        """A request has come."""
        ...

    def end(self, request: Request) -> None:
        """A request that has begun is over."""
        ...

    def version_of(self, request: Request) -> Version:
        """What draws the request's next token."""
        ...

    def prepare(self, works: Sequence[Work]) -> None:
        """The next step computes these, in this order."""
        ...

    def stage(self, path: Path, keep_going: Callable[[], bool]) -> Mapping[str, Any] | None:
        """Reads and checks a file; None when given up. EngineError when it is not what is served here."""
        ...

    def commit(self, staged: Mapping[str, Any], version: Version) -> None:
        """Puts in place what was staged."""
        ...


class WholeWeights:
    """All requests are drawn with the newest weights.

    Args:
        model: Whose weights change.
        scheduler: Whose requests compute anew after it, or keep what they have.
        version: What the model has loaded.
        keeps_cache: Running requests keep keys and values of old weights, and are marked.
    """

    has_room = True

    def __init__(self, model: PolicyModel, scheduler: Scheduler, version: Version, *, keeps_cache: bool) -> None:
        self.version = version
        self._model, self._scheduler, self._keeps_cache = model, scheduler, keeps_cache

    def begin(self, request: Request) -> None:
        """As `ServedWeights.begin`."""
        request.weights = self._scheduler.cache.newest

    def end(self, request: Request) -> None:
        """As `ServedWeights.end`."""

    def version_of(self, request: Request) -> Version:
        """As `ServedWeights.version_of`."""
        return self.version

    def prepare(self, works: Sequence[Work]) -> None:
        """As `ServedWeights.prepare`."""

    def stage(self, path: Path, keep_going: Callable[[], bool]) -> Mapping[str, Any] | None:
        """As `ServedWeights.stage`."""
        return self._model.stage(path, keep_going)

    def commit(self, staged: Mapping[str, Any], version: Version) -> None:
        """As `ServedWeights.commit`."""
        self._model.commit(staged)
        if self._keeps_cache:
            self._scheduler.keep_cache()
        else:
            self._scheduler.clear_cache()
        self.version = version


class AdapterWeights:
    """Each request is drawn with the adapter that was newest when it came.

    Args:
        bank: Holds the adapters' factors.
        scheduler: Whose cache is told of new adapters.
        version: What the model is without an adapter.
        num_versions: Adapters held at most.
    """

    def __init__(self, bank: AdapterBank, scheduler: Scheduler, version: Version, num_versions: int) -> None:
        self._bank, self._scheduler = bank, scheduler
        self._shelf = AdapterShelf(version, num_versions)

    @property
    def version(self) -> Version:
        """As `ServedWeights.version`."""
        return self._shelf.newest.version

    @property
    def has_room(self) -> bool:
        """As `ServedWeights.has_room`."""
        return self._shelf.has_room

    def begin(self, request: Request) -> None:
        """As `ServedWeights.begin`."""
        request.adapter = self._shelf.begin()
        request.weights = request.adapter.id

    def end(self, request: Request) -> None:
        """As `ServedWeights.end`."""
        self._let_go(self._shelf.end(_adapter(request)))

    def version_of(self, request: Request) -> Version:
        """As `ServedWeights.version_of`."""
        return _adapter(request).version

    def prepare(self, works: Sequence[Work]) -> None:
        """As `ServedWeights.prepare`."""
        self._bank.assign([(work.request.weights, work.length) for work in works])

    def stage(self, path: Path, keep_going: Callable[[], bool]) -> Mapping[str, Any] | None:
        """As `ServedWeights.stage`."""
        return self._bank.convert(self._bank.layout.read(path)) if keep_going() else None

    def commit(self, staged: Mapping[str, Any], version: Version) -> None:
        """As `ServedWeights.commit`."""
        adapter = self._shelf.announce(version)
        self._bank.put(adapter.id, staged)
        self._let_go(self._shelf.put(adapter))
        self._scheduler.cache.begin(adapter.id)

    def _let_go(self, adapter: Adapter | None) -> None:
        if adapter is not None:
            self._bank.drop(adapter.id)


def _adapter(request: Request) -> Adapter:
    assert request.adapter is not None, "a request has its adapter from its beginning"
    return request.adapter

"""Which versions of an adapter an engine holds: the newest, and those with which running generations began.

Invariants:

- A generation keeps the adapter that was newest when it began, until it ends.
- An adapter that no generation uses and that is not the newest is let go at once.
- While there is room for another one, at most `limit` are held when it has come, the former newest among them.

The model without an adapter takes no place. It does not know tensors, nor who loads them.
"""

from collections import Counter
from dataclasses import dataclass
from itertools import count

from agentjet.schemas.ids import Version


@dataclass(frozen=True, slots=True)
class Adapter:
    """A version of the adapter."""

    id: int
    """Never given twice by an engine; 0 is the model without an adapter."""
    version: Version


class AdapterShelf:
    """Counts the generations of each adapter.

    Args:
        version: What the model serves without an adapter, until the first comes.
        limit: Adapters held at most, 2 or more.
    """

    def __init__(self, version: Version, limit: int) -> None:
        self.newest = Adapter(0, version)
        self._limit = limit
        self._num_uses = Counter[Adapter]()
        self._ids = count(1)

    @property
    def held(self) -> frozenset[Adapter]:
        """Those that have to be at hand."""
        return frozenset(one for one in {self.newest, *self._num_uses} if one.id)

    @property
    def has_room(self) -> bool:
        """Whether another one may come now."""
        return len(self.held) < self._limit

    def begin(self) -> Adapter:
        """The adapter of a generation that begins."""
        self._num_uses[self.newest] += 1
        return self.newest

    def end(self, adapter: Adapter) -> Adapter | None:
        """A generation of an adapter has ended; returns the adapter when it is to be let go."""
        self._num_uses[adapter] -= 1
        if not self._num_uses[adapter]:
            del self._num_uses[adapter]
        return self._unless_held(adapter)

    def announce(self, version: Version) -> Adapter:
        """A new adapter, which nobody gets before it is `put`."""
        return Adapter(next(self._ids), version)

    def put(self, adapter: Adapter) -> Adapter | None:
        """An announced adapter is at hand and the newest from now on; returns its predecessor when that is let go."""
        before, self.newest = self.newest, adapter
        return self._unless_held(before)

    def _unless_held(self, adapter: Adapter) -> Adapter | None:
        return adapter if adapter.id and adapter not in self.held else None

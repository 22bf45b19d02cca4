"""The way to a version: which whole file to fetch, and which patches to apply.

Patches lead from version to version, so a version is reached from any whole file before it, and from any file at hand
that the chain passes. It does not know where files and patches are stored.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from agentjet.schemas.ids import Version
from agentjet.schemas.weights import Weights


@dataclass(frozen=True, slots=True)
class Route:
    """A way to a version."""

    start: Version
    """Where it begins."""
    whole: Weights | None
    """To be fetched whole, of `start`; None where that is at hand."""
    patches: tuple[Weights, ...]
    """From the oldest on."""

    @property
    def end(self) -> Version:
        """Where it leads."""
        return Version.parse(self.patches[-1].version) if self.patches else self.start

    @property
    def num_bytes(self) -> int:
        """Bytes to fetch."""
        return (self.whole.num_bytes if self.whole else 0) + sum(one.patch_bytes for one in self.patches)

    @property
    def versions(self) -> frozenset[Version]:
        """Those whose records it needs."""
        records = (*self.patches, *((self.whole,) if self.whole else ()))
        return frozenset(Version.parse(one.version) for one in records)


def find_route(target: Version, published: Mapping[Version, Weights], held: Collection[Version] = ()) -> Route | None:
    """The way with the fewest bytes to fetch, or None when the records do not tell of any.

    Args:
        target: Where it leads.
        published: Records of versions that count.
        held: Versions whose files are at hand.
    """
    patches: list[Weights] = []
    found: list[Route] = []
    at: Version | None = target
    while at is not None and at not in held and (record := published.get(at)) is not None:
        if record.is_blob or not record.base:
            found.append(Route(at, record, tuple(reversed(patches))))
        patches.append(record)
        base = Version.parse(record.base) if record.base else None
        at = base if base is not None and base < at else None
    if at is not None and at in held:
        found.append(Route(at, None, tuple(reversed(patches))))
    return min(found, key=lambda route: route.num_bytes, default=None)

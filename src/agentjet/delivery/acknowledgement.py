"""Which weights the live engines have, by what they say of themselves in their heartbeats."""

from collections.abc import Iterable

from agentjet.schemas.ids import Version
from agentjet.schemas.presence import Presence

_NOTHING_YET = Version(0, 0)


def oldest_acknowledged(engines: Iterable[Presence], model: str) -> Version | None:
    """The oldest version that a live engine of a model serves; None when there is no such engine.

    An engine that has said nothing may be fetching anything.
    """
    return min((_version(engine) for engine in engines if model in engine.models), default=None)


def _version(engine: Presence) -> Version:
    try:
        return Version.parse(str(engine.info.get("version", "")))
    except ValueError:
        return _NOTHING_YET

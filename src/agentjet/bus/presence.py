"""Heartbeats of actors over the bus: who is alive. For status and for choices that cost nothing when wrong.

Key of a heartbeat: `<kind>.<name>`. One of another AgentJet version is left out by readers: what its actor does shows
in the streams.
"""

import os
import socket

from agentjet.bus.protocol import Bus
from agentjet.errors import RecordError
from agentjet.schemas import subject
from agentjet.schemas.codec import SCHEMA_HEADER, decode_as, encode
from agentjet.schemas.ids import RunId
from agentjet.schemas.presence import Presence

TTL_SECONDS = 5.0
"""A heartbeat lives this long after it was renewed."""


def has_ended(presence: Presence) -> bool:
    """Whether a heartbeat outlived its process, as far as this host can tell."""
    if presence.host != socket.gethostname():
        return False
    try:
        os.kill(presence.pid, 0)
    except OSError as error:
        return isinstance(error, ProcessLookupError)
    return False


async def renew(bus: Bus, presence: Presence) -> None:
    """Say that an actor is alive. Raises BusError."""
    _, body = encode(presence)
    key = f"{presence.actor}.{presence.name}"
    await bus.put_presence(subject.presence_bucket(presence.run), key, body, ttl_seconds=TTL_SECONDS)


async def withdraw(bus: Bus, run: RunId, actor: str, name: str) -> None:
    """Say that an actor is gone. Raises BusError."""
    await bus.drop_presence(subject.presence_bucket(run), f"{actor}.{name}")


async def live_actors(bus: Bus, run: RunId, kind: str = "") -> list[Presence]:
    """The actors of a run (of one kind, where given) that are alive, by kind, models and name. Raises BusError."""
    bodies = await bus.presence(subject.presence_bucket(run), f"{kind}." if kind else "")
    header = {SCHEMA_HEADER: Presence.schema_header()}
    found: list[Presence] = []
    for body in bodies.values():
        try:
            found.append(decode_as(Presence, header, body))
        except RecordError:
            continue
    return sorted(found, key=lambda one: (one.actor, one.models, one.name))

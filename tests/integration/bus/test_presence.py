"""Heartbeats: who is alive, of which kind, and what is left out."""

from agentjet.bus.presence import live_actors, renew
from agentjet.bus.protocol import Bus
from agentjet.schemas import subject
from agentjet.schemas.ids import RunId
from agentjet.schemas.presence import Presence


def actor(run: RunId, kind: str, name: str) -> Presence:
    return Presence(run=run, actor=kind, name=name, host="h", pid=1, started=0.0, state="busy")


async def test_live_actors_come_sorted_by_kind_and_those_of_another_version_are_left_out(bus: Bus, unique: str):
    run = RunId(unique)
    assert await live_actors(bus, run) == []
    for kind, name in (("rollout", "b"), ("rollout", "a"), ("learner", "c")):
        await renew(bus, actor(run, kind, name))
    await bus.put_presence(subject.presence_bucket(run), "rollout.strange", b"\x93", ttl_seconds=60)
    assert [(one.actor, one.name) for one in await live_actors(bus, run)] == [
        ("learner", "c"),
        ("rollout", "a"),
        ("rollout", "b"),
    ]
    assert [one.name for one in await live_actors(bus, run, "rollout")] == ["a", "b"]
    assert await live_actors(bus, run, "roll") == []

"""Heartbeats: who is alive, of which kind, and what is left out."""

import asyncio
from pathlib import Path

import pytest

from agentjet.bus import nats
from agentjet.bus.nats import NatsBus
from agentjet.bus.presence import live_actors, renew, withdraw
from agentjet.bus.protocol import Bus
from agentjet.bus.server import EmbeddedServer
from agentjet.errors import BusError
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


async def test_actor_that_leaves_is_gone_at_once_and_may_come_back(bus: Bus, unique: str):
    run = RunId(unique)
    for name in ("a", "b"):
        await renew(bus, actor(run, "rollout", name))
    await withdraw(bus, run, "rollout", "a")
    assert [one.name for one in await live_actors(bus, run)] == ["b"]
    await renew(bus, actor(run, "rollout", "a"))
    assert [one.name for one in await live_actors(bus, run)] == ["a", "b"]


async def test_nobody_can_leave_a_run_without_heartbeats(bus: Bus, unique: str):
    with pytest.raises(BusError):
        await withdraw(bus, RunId(unique), "rollout", "a")


async def test_heartbeat_that_ran_out_while_the_server_slept_is_not_alive(tmp_path: Path):
    """The server itself removes it only some time after its start; status and `runs rm` read at once."""
    run = RunId("slept-abcdef")
    server = EmbeddedServer(tmp_path, max_store_bytes=2**30)
    for is_first in (True, False):
        async with server:
            bus = await NatsBus.connect(server.url, name="test")
            try:
                if is_first:
                    bucket = subject.presence_bucket(run)
                    await bus.put_presence(bucket, "learner.a", b"short", ttl_seconds=0.5)
                    await bus.put_presence(bucket, "learner.b", b"long", ttl_seconds=60)
                else:
                    assert await bus.presence(subject.presence_bucket(run)) == {"learner.b": b"long"}
            finally:
                await bus.close()
        await asyncio.sleep(0.6 * is_first)


async def test_heartbeat_that_does_not_say_how_long_it_lives_is_not_alive_for_ever(
    nats_bus: NatsBus, unique: str, monkeypatch
):
    await nats_bus.put_presence(unique, "learner.a", b"x", ttl_seconds=60)
    await nats_bus.publish(f"$KV.{unique}.learner.a", b"y", stream=f"KV_{unique}")
    assert await nats_bus.presence(unique) == {"learner.a": b"y"}
    monkeypatch.setattr(nats, "_LONGEST_LIFETIME_SECONDS", 0.0)
    assert await nats_bus.presence(unique) == {}


async def test_heartbeat_is_measured_by_its_stored_time(nats_bus: NatsBus, unique: str, monkeypatch):
    """A server that is slow to expire: one that never does, as the heartbeat is stored without its limit."""
    await nats_bus.put_presence(unique, "learner.a", b"x", ttl_seconds=60)
    publish = nats_bus.publish

    async def without_limit(*words, ttl_seconds: float, **more):
        return await publish(*words, **more)

    monkeypatch.setattr(nats_bus, "publish", without_limit)
    await nats_bus.put_presence(unique, "learner.a", b"x", ttl_seconds=0.3)
    assert await nats_bus.presence(unique) == {"learner.a": b"x"}
    await asyncio.sleep(0.4)
    assert await nats_bus.presence(unique) == {}

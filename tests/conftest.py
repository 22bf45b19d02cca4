"""Fixtures for every test: the two buses, and one real NATS server for the whole session.

The server runs in its own event loop thread so that tests with a loop each can share it; stream
names are made unique by `unique`.
"""

import asyncio
import threading
import uuid
from collections.abc import AsyncIterator, Iterator

import pytest
from hypothesis import HealthCheck, settings

from agentjet.bus.memory import MemoryBus
from agentjet.bus.nats import NatsBus
from agentjet.bus.protocol import Bus
from agentjet.bus.server import EmbeddedServer

GIB = 1024**3

# No test depends on how fast the machine is.
settings.register_profile("agentjet", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("agentjet")


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """A running server; tests that stop or kill one start their own."""
    server = EmbeddedServer(tmp_path_factory.mktemp("nats"), max_store_bytes=4 * GIB)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    asyncio.run_coroutine_threadsafe(server.start(), loop).result(30)
    yield server
    asyncio.run_coroutine_threadsafe(server.stop(), loop).result(30)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()


@pytest.fixture
async def nats_bus(nats_server: EmbeddedServer) -> AsyncIterator[NatsBus]:
    """A connection to the session's server; streams that a test makes reserve room there and are removed after it."""
    bus = await NatsBus.connect(nats_server.url, name="test")
    before = set(await bus.stream_names(""))
    yield bus
    await bus.close()
    sweeper = await NatsBus.connect(nats_server.url, name="sweeper")
    for name in set(await sweeper.stream_names("")) - before:
        await sweeper.delete_stream(name)
    await sweeper.close()


@pytest.fixture
async def memory_bus() -> AsyncIterator[MemoryBus]:
    """An empty in-memory bus."""
    bus = MemoryBus()
    yield bus
    await bus.close()


@pytest.fixture(params=["memory", "nats"])
def bus(request: pytest.FixtureRequest) -> Bus:
    """Both buses, one after the other."""
    return request.getfixturevalue(f"{request.param}_bus")


@pytest.fixture
def unique() -> str:
    """A name that no other test uses."""
    return f"T{uuid.uuid4().hex[:12]}"

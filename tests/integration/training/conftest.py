from collections.abc import AsyncIterator

import pytest

from agentjet.bus.memory import MemoryBus
from agentjet.bus.record import stream_specs
from agentjet.schemas.ids import RunId, new_run_id


@pytest.fixture
async def run(memory_bus: MemoryBus) -> AsyncIterator[RunId]:
    """A run whose streams the in-memory bus has."""
    run = new_run_id("test")
    for spec in stream_specs(run, max_bytes=2**30):
        await memory_bus.ensure_stream(spec)
    yield run

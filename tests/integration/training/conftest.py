import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentjet.bus.memory import MemoryBus
from agentjet.bus.record import stream_specs
from agentjet.pretrained.tiny_model import build_tiny
from agentjet.schemas.ids import RunId, new_run_id

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))  # models and actors that several folders share


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    build_tiny(folder, seed=3)
    return folder


@pytest.fixture
async def run(memory_bus: MemoryBus) -> AsyncIterator[RunId]:
    run = new_run_id("test")
    for spec in stream_specs(run, max_bytes=2**30):
        await memory_bus.ensure_stream(spec)
    yield run

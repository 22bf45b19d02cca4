import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))  # models and actors that several folders share

from whole_swarm import OwnServer

from agentjet.bus.nats import NatsBus
from agentjet.pretrained.tiny_model import build_tiny
from agentjet.schemas import subject
from agentjet.schemas.ids import RunId, new_run_id


@pytest.fixture
async def own(tmp_path: Path) -> AsyncIterator[OwnServer]:
    """A server of the test's own, which it may kill, with a connection to it."""
    async with OwnServer(tmp_path / "nats") as one:
        yield one


@pytest.fixture
async def swept_bus(nats_bus: NatsBus) -> AsyncIterator[NatsBus]:
    """The session's server; streams are removed afterwards, as many tests have the same run."""
    before = set(await nats_bus.stream_names(subject.stream_prefix()))
    yield nats_bus
    for name in set(await nats_bus.stream_names("")) - before:
        await nats_bus.delete_stream(name)


@pytest.fixture
def run() -> RunId:
    return new_run_id("test")


@pytest.fixture
def tasks(tmp_path: Path) -> str:
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(f'{{"n": {number}}}\n' for number in range(20)))
    return str(path)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    build_tiny(folder, seed=3)
    return folder

"""Fixtures of tests that need more of a swarm than a bus."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from whole_swarm import OwnServer

from agentjet.pretrained.tiny_model import build_tiny
from agentjet.schemas.ids import RunId, new_run_id


@pytest.fixture
async def own(tmp_path: Path) -> AsyncIterator[OwnServer]:
    """A server of the test's own, which it may kill, with a connection to it."""
    async with OwnServer(tmp_path / "nats") as one:
        yield one


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

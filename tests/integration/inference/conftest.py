"""One started engine of each kind, shared by the tests of a module."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from served_engine import ServedEngine, build_small, needs_vllm
from transformers import PreTrainedTokenizerFast

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model with logits far from flat, so that mistakes show."""
    return build_small(tmp_path_factory.mktemp("models") / "small")


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=["transformers", pytest.param("vllm", marks=needs_vllm)]
)
async def started(request: pytest.FixtureRequest, small: Path) -> AsyncIterator[ServedEngine]:
    """Each engine in turn."""
    async with ServedEngine.started(request.param, small) as served:
        yield served


@pytest_asyncio.fixture(loop_scope="module")
async def served(started: ServedEngine) -> ServedEngine:
    """The engine on the weights that it started with, whatever a test before did."""
    await started.restore()
    return started


@pytest.fixture(scope="module")
def tokenizer(small: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(small)

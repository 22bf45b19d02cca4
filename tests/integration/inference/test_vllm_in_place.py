"""Changed values written into the weights that vLLM computes with, in workers whose weights lie as they were loaded."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_use import ask, assert_exact, collect, prompt
from safetensors.torch import load_file, save_file
from served_engine import ServedEngine, needs_vllm

from agentjet.inference import vllm_launch
from agentjet.pretrained import model_file

pytestmark = [needs_vllm, pytest.mark.filterwarnings("default"), pytest.mark.timeout(400)]


@asynccontextmanager
async def plain(base: Path, **settings: Any) -> AsyncIterator[ServedEngine]:
    honest = vllm_launch.engine_arguments

    def arguments(*given: Any, **named: Any) -> Any:
        found = honest(*given, **named)
        found.worker_extension_cls = "plain_worker.PlainLoader"
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_launch, "engine_arguments", arguments)
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2] / "support"), prepend=":")
        async with ServedEngine.started("vllm", base, **settings) as served:
            yield served


def trained(base: Path, folder: Path, seed: int) -> Path:
    """The same model, one value in a hundred of each tensor changed."""
    folder.mkdir()
    torch.manual_seed(seed)
    weights = load_file(base / "model.safetensors")
    for value in weights.values():
        chosen = torch.rand(value.shape) < 0.01
        value[chosen] = -value[chosen]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text((base / "config.json").read_text())
    return folder


async def loads(served: ServedEngine) -> int:
    """Whole snapshots that a worker has loaded."""
    return max(await served.engine._llm.collective_rpc("count_loads"))


async def sums(served: ServedEngine) -> list[list[int]]:
    return await served.engine._llm.collective_rpc("weight_sums")


async def test_changed_values_lead_to_the_weights_of_the_whole_file_bit_for_bit_in_both_halves(
    small: Path, tmp_path: Path
):
    options = {"block_size": 32, "tensor_parallel_size": 2}
    async with plain(small, options=options) as served:
        at, counts = small, []
        for number in range(4):
            at = trained(at, tmp_path / str(number), number)
            await served.serve(at)
            counts.append(await loads(served))
            assert_exact(at, prompt(1, 9), await collect(served.engine, ask("a", prompt(1, 9))))
        assert counts == [1, 2, 2, 2], "the first whole, the second to prove the changes, none after it"
        changed = await sums(served)
        served.engine._weights._in_place._served = None
        await served.serve(at)
        assert (await loads(served), await sums(served)) == (3, changed)


@pytest.mark.slow
async def test_smollm2_in_bfloat16_has_the_weights_of_the_whole_file(tmp_path: Path):
    base = model_file.fetch("smollm2-135m")
    async with plain(base, dtype="bfloat16", cache_tokens=2048, options={}) as served:
        at = base
        for number in range(3):
            at = trained(at, tmp_path / str(number), number)
            await served.serve(at)
        changed = await sums(served)
        assert await loads(served) == 2
        served.engine._weights._in_place._served = None
        await served.serve(at)
        assert (await loads(served), await sums(served)) == (3, changed)

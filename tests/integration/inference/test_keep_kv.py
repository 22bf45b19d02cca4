"""What every engine does with `keep_kv`: running requests keep their keys over new weights, others never find them."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch
from engine_use import TOLERANCE, ask, assert_exact, collect, ids_of, logprobs_of, prompt, reference
from safetensors.numpy import load_file
from served_engine import ServedEngine, needs_vllm, save_model
from transformers import AutoModelForCausalLM

from agentjet.inference.engine import Draw

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.filterwarnings("default")]
pytestmark.append(pytest.mark.timeout(400))  # vLLM starts in 20 s, and compiles kernels where it never ran


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=["transformers", pytest.param("vllm", marks=needs_vllm)]
)
async def kept(request: pytest.FixtureRequest, small: Path) -> AsyncIterator[ServedEngine]:
    async with ServedEngine.started(request.param, small, keep_kv=True) as served:
        yield served


@pytest.fixture
def other(small: Path, tmp_path: Path) -> Path:
    """Weights of which every key and value is another."""
    weights = load_file(small / "model.safetensors")
    weights |= {
        name: value * np.float32(-1.5) for name, value in weights.items() if "v_proj" in name or "k_proj" in name
    }
    return save_model(small, tmp_path / "other", weights)


async def across_an_update(kept: ServedEngine, other: Path, start: list[int]) -> tuple[list[Draw], list[Draw]]:
    """What one generation draws before and after new weights, with another one of the same prompt begun after them."""
    await kept.restore()
    running = asyncio.create_task(collect(kept.engine, ask("running", start, max_tokens=300)))
    while not kept.engine.load.num_running:
        await asyncio.sleep(0.001)
    new = await kept.serve(other)
    fresh = await collect(kept.engine, ask("fresh", start))
    assert fresh[0].num_cached_tokens == 0
    assert not any(draw.is_mixed for draw in fresh)
    assert_exact(other, start, fresh)
    draws = await running
    before = [draw for draw in draws if draw.version != new]
    after = [draw for draw in draws if draw.version == new]
    assert draws == before + after and before and after
    return before, after


async def test_a_running_call_goes_on_with_the_keys_of_old_weights_and_says_so(kept: ServedEngine, other: Path):
    start = prompt(11, 200)
    before, after = await across_an_update(kept, other, start)
    assert not any(draw.is_mixed for draw in before)
    assert all(draw.is_mixed for draw in after)
    assert_exact(kept.base, start, before)
    drawn, cut = ids_of(before) + ids_of(after), len(ids_of(before))
    expected = on_old_keys(kept.base, other, start, drawn, cut)
    assert (logprobs_of(after) - expected).abs().max().item() <= TOLERANCE
    recomputed = reference(other, start + drawn[:cut], drawn[cut:])
    assert (logprobs_of(after) - recomputed).abs().max().item() > 100 * TOLERANCE


def on_old_keys(old: Path, new: Path, start: list[int], drawn: list[int], cut: int) -> torch.Tensor:
    """Log-probs of `drawn` from `cut` on, where one model has computed the keys before, and another goes on."""
    one, other = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in (old, new))
    with torch.no_grad():
        known = one(torch.tensor([start + drawn[: cut - 1]]), use_cache=True).past_key_values
        logits = other(torch.tensor([drawn[cut - 1 : -1]]), past_key_values=known).logits[0]
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(drawn[cut:])[:, None])[:, 0]


async def test_no_later_call_finds_what_rests_on_old_keys(kept: ServedEngine, other: Path):
    start = prompt(12, 200)
    before, after = await across_an_update(kept, other, start)
    history = start + ids_of(before) + ids_of(after)[:-1]
    for index in range(2):
        next_turn = await collect(kept.engine, ask(f"next{index}", [*history, 5]))
        assert not any(draw.is_mixed for draw in next_turn)
        assert_exact(other, [*history, 5], next_turn)
    again = await collect(kept.engine, ask("again", start))
    assert again[0].num_cached_tokens >= 160
    assert_exact(other, start, again)


async def test_requests_that_begin_between_updates_share_prefixes_among_themselves(kept: ServedEngine, other: Path):
    shared = prompt(13, 200)
    for folder in (other, kept.base):
        await kept.serve(folder)
        draws = [await collect(kept.engine, ask(str(index), shared)) for index in range(2)]
        assert draws[0][0].num_cached_tokens == 0
        assert draws[1][0].num_cached_tokens >= 160
        for one in draws:
            assert_exact(folder, shared, one)

"""What is vLLM's own: refusals at the last moment, half-loaded weights, its processes, a real model in bfloat16."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
from engine_use import ask, assert_exact, city_prompts, collect, learner_differences, prompt
from safetensors.torch import load_file, save_file
from served_engine import ServedEngine, changed, needs_vllm

from agentjet.errors import BadRequestError, EngineError, UnsupportedArchitectureError
from agentjet.inference import vllm_weights
from agentjet.inference.engine import Draw
from agentjet.inference.vllm_launch import check_head_size
from agentjet.inference.vllm_weights import VllmWeights
from agentjet.pretrained import model_file

pytestmark = [needs_vllm, pytest.mark.asyncio(loop_scope="module"), pytest.mark.filterwarnings("default")]
pytestmark.append(pytest.mark.timeout(400))  # vLLM starts in 20 s, and compiles kernels where it never ran

END_SECONDS = 20.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(small: Path) -> AsyncIterator[ServedEngine]:
    async with ServedEngine.started("vllm", small) as one:
        yield one


async def test_what_vllm_would_change_or_die_of_is_refused(served: ServedEngine):
    for temperature in (0.001, 2.5):
        with pytest.raises(BadRequestError, match="temperature: vLLM draws at 0 or from"):
            await collect(served.engine, ask("a", prompt(1, 9), temperature=temperature))
    for outside in (448, -1):
        with pytest.raises(BadRequestError, match="vocabulary of 448"):
            await collect(served.engine, ask("a", [1, outside, 2]))
    assert_exact(served.base, prompt(1, 9), await collect(served.engine, ask("a", prompt(1, 9))))


async def test_heads_that_vllm_can_not_compute_on_a_cpu_are_refused_before_it_starts():
    check_head_size(64)
    with pytest.raises(UnsupportedArchitectureError, match=r"heads of 32, 64.*this model's are of 16"):
        check_head_size(16)


async def test_a_snapshot_that_workers_refuse_leaves_the_old_weights_and_nothing_paused(
    served: ServedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    running = asyncio.create_task(collect(served.engine, ask("a", prompt(1, 30), max_tokens=200)))
    # It was there when it was read, and is gone when the workers open it.
    monkeypatch.setattr(VllmWeights, "_read", lambda *_: None)
    with pytest.raises(EngineError, match="can not be read"):
        await served.engine.update_weights(served.next_version, tmp_path / "gone.safetensors")
    assert_exact(served.base, prompt(1, 30), await asyncio.wait_for(running, 30))


async def test_vllm_itself_tells_of_a_tensor_that_it_was_not_given(served: ServedEngine):
    names = [name for name in load_file(served.base / "model.safetensors") if name != "model.norm.weight"]
    with pytest.raises(Exception, match=r"for 1 of its tensors \['model.norm.weight'\]"):
        await served.engine._llm.collective_rpc("load_snapshot", args=(str(served.base / "model.safetensors"), names))
    assert_exact(served.base, prompt(1, 9), await collect(served.engine, ask("a", prompt(1, 9))))


async def test_a_pause_that_fails_leaves_the_old_weights_and_nothing_paused(
    served: ServedEngine, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async def failing(**_: object) -> None:
        await pause(mode="keep", clear_cache=False)
        raise RuntimeError("no cache could be cleared")

    llm, other = served.engine._llm, changed(small, tmp_path, 1.5)
    pause = llm.pause_generation
    monkeypatch.setattr(llm, "pause_generation", failing)
    with pytest.raises(EngineError, match=r"could not be paused .*no cache could be cleared.*; the old ones stay"):
        await served.engine.update_weights(served.next_version, other / "model.safetensors")
    assert_exact(small, prompt(1, 30), await asyncio.wait_for(collect(served.engine, ask("a", prompt(1, 30))), 30))


async def test_a_pause_that_hangs_leaves_the_old_weights_and_nothing_paused(
    served: ServedEngine, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async def hanging(**_: object) -> None:
        await pause(mode="keep", clear_cache=False)
        await asyncio.sleep(3600)

    llm, other = served.engine._llm, changed(small, tmp_path, 1.5)
    pause = llm.pause_generation
    monkeypatch.setattr(llm, "pause_generation", hanging)
    monkeypatch.setattr(vllm_weights, "LEAST_PLACE_SECONDS", 0.5)
    with pytest.raises(EngineError, match=r"could not be paused .* TimeoutError.*; the old ones stay"):
        await served.engine.update_weights(served.next_version, other / "model.safetensors", timeout_seconds=2)
    assert_exact(small, prompt(1, 30), await asyncio.wait_for(collect(served.engine, ask("a", prompt(1, 30))), 30))


async def test_a_load_that_breaks_half_way_ends_the_engine_and_nobody_waits(
    served: ServedEngine, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async def half(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory")

    running = asyncio.create_task(collect(served.engine, ask("a", prompt(1, 30), max_tokens=400)))
    other = changed(small, tmp_path, 1.5)
    monkeypatch.setattr(served.engine._llm, "collective_rpc", half)
    async with asyncio.timeout(END_SECONDS):
        with pytest.raises(EngineError, match=r"broke while .*out of memory.*; restart it"):
            await served.engine.update_weights(served.next_version, other / "model.safetensors")
        with pytest.raises(EngineError, match="broke"):
            await running
        with pytest.raises(EngineError, match="broke"):
            await collect(served.engine, ask("b", prompt(1, 30)))
        with pytest.raises(EngineError, match="has ended"):
            await served.engine.ended()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def real() -> AsyncIterator[ServedEngine]:
    """SmolLM2, whose head and embeddings are one tensor."""
    folder = model_file.fetch("smollm2-135m")
    settings = {"dtype": "bfloat16", "num_threads": None, "context_length": 1024}
    async with ServedEngine.started("vllm", folder, **settings) as one:
        yield one


@pytest.mark.slow
async def test_l1_smollm2_in_bfloat16_stays_near_a_learner_before_and_after_new_weights(
    real: ServedEngine, tmp_path: Path
):
    prompts, other = city_prompts(real.base, 12), scaled_norms(real.base, tmp_path)
    before = learner_differences(real.base, prompts, await sampled(real, prompts), 0.6)
    await real.serve(other)
    results = await sampled(real, prompts)
    after, stale = (learner_differences(folder, prompts, results, 0.6) for folder in (other, real.base))
    # Measured before and after: mean 0.032 and 0.035, p99 0.22 and 0.27, p99.9 0.41 and 0.59, which of 480 tokens is
    # the largest but one and moves with the batching. On a CPU vLLM's output head is bfloat16 too.
    for difference in (before, after):
        assert difference.mean().item() <= 0.06
        assert difference.quantile(0.99).item() <= 0.4
    assert stale.mean().item() > 2 * after.mean().item()


async def sampled(real: ServedEngine, prompts: Sequence[Sequence[int]]) -> list[list[Draw]]:
    asked = (ask(str(n), ids, temperature=0.6, max_tokens=40, seed=n) for n, ids in enumerate(prompts))
    return await asyncio.gather(*(collect(real.engine, generation) for generation in asked))


def scaled_norms(base: Path, folder: Path) -> Path:
    """SmolLM2 with a little more in every norm before an attention."""
    weights = load_file(base / "model.safetensors")
    weights = {name: value * 1.05 if "input_layernorm" in name else value for name, value in weights.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text((base / "config.json").read_text())
    return folder


@pytest.mark.slow
async def test_a11_an_engine_whose_worker_is_killed_ends_in_bounded_time(real: ServedEngine):
    running = asyncio.create_task(collect(real.engine, ask("a", prompt(1, 30), max_tokens=900)))
    while real.engine.load.num_running == 0:
        await asyncio.sleep(0.01)
    children = psutil.Process().children(recursive=True)
    worker = next(child for child in children if "Worker" in " ".join(child.cmdline()))
    worker.send_signal(signal.SIGKILL)
    async with asyncio.timeout(END_SECONDS):
        with pytest.raises(EngineError):
            await running
        with pytest.raises(EngineError, match="one of its processes died"):
            await real.engine.ended()


HOLDER = """
import asyncio, sys
from agentjet.inference.vllm_engine import VllmEngine

async def hold():
    engine = VllmEngine(sys.argv[1], dtype="float32", device="cpu", num_threads=1, context_length=128)
    await engine.start()
    print("started", flush=True)
    await asyncio.sleep(600)

if __name__ == "__main__":
    asyncio.run(hold())
"""


@pytest.mark.slow
async def test_nothing_is_left_over_when_the_process_that_holds_the_engine_is_killed(small: Path, tmp_path: Path):
    script = tmp_path / "holder.py"
    script.write_text(HOLDER)
    holder = await asyncio.create_subprocess_exec(sys.executable, str(script), str(small), stdout=subprocess.PIPE)
    assert holder.stdout is not None
    try:
        while await asyncio.wait_for(holder.stdout.readline(), 100) != b"started\n":
            pass
        children = psutil.Process(holder.pid).children(recursive=True)
        assert len(children) >= 2
    finally:
        holder.kill()
        await holder.wait()
    _, alive = await asyncio.to_thread(psutil.wait_procs, children, END_SECONDS)
    assert not alive, [child.cmdline() for child in alive]

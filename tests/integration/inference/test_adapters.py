"""What every engine does with LoRA adapters: several versions at once, each generation with its own."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from adapter_use import LORA, adapted_reference, make_adapter
from engine_use import ask, collect, ids_of, logprobs_of, prompt, reference
from served_engine import ServedEngine, needs_vllm

from agentjet.config import LoraSettings
from agentjet.errors import ConfigError, EngineError
from agentjet.inference.engine import Draw, Engine
from agentjet.inference.transformers_engine import TransformersEngine
from agentjet.inference.vllm_adapters import FOLDER
from agentjet.schemas.ids import Version

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.filterwarnings("default")]
pytestmark.append(pytest.mark.timeout(400))  # vLLM starts in 20 s, and compiles kernels where it never ran

TOLERANCE = 1e-4
LEFT = FOLDER / "of-one-that-was-killed"
LONG = 900
"""Tokens that take longer to draw than anything that is done meanwhile."""


@dataclass
class Adapted:
    """A started engine with LoRA settings, and the files of the adapters that it was given."""

    kind: str
    engine: Engine
    base: Path
    folder: Path
    files: dict[Version, Path] = field(default_factory=dict)

    @property
    def engine_folder(self) -> Path | None:
        """Where vLLM reads adapters."""
        engine: Any = self.engine
        return engine._weights._folder.path if self.kind == "vllm" else None

    def file(self, seed: int, **settings: Any) -> Path:
        path = self.folder / f"{seed}.safetensors"
        return path if path.exists() else make_adapter(self.base, path, seed, **settings)

    @property
    def next_version(self) -> Version:
        return self.engine.version._replace(step=self.engine.version.step + 1)

    async def put(self, seed: int, **settings: Any) -> Version:
        """Serve an adapter as the next version."""
        version, path = self.next_version, self.file(seed, **settings)
        await self.engine.update_weights(version, path)
        self.files[version] = path
        return version

    def assert_exact(self, start: Sequence[int], draws: Sequence[Draw]) -> Version:
        """All of one version, whose adapter gives these log-probs; returns it."""
        (version,) = {draw.version for draw in draws}
        assert not any(draw.is_mixed for draw in draws)
        if version in self.files:
            expected = adapted_reference(self.base, self.files[version], start, ids_of(draws))
        else:
            expected = reference(self.base, start, ids_of(draws))
        assert (logprobs_of(draws) - expected).abs().max().item() <= TOLERANCE
        return version


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=["transformers", pytest.param("vllm", marks=needs_vllm)]
)
async def adapted(
    request: pytest.FixtureRequest, small: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Adapted]:
    (LEFT / "3").mkdir(parents=True, exist_ok=True)
    (LEFT / ".lock").touch()
    async with ServedEngine.started(request.param, small, lora=LORA, context_length=LONG + 100) as served:
        adapted = Adapted(request.param, served.engine, small, tmp_path_factory.mktemp("adapters"))
        folder = adapted.engine_folder
        yield adapted
    assert folder is None or not folder.exists()


async def test_before_the_first_adapter_the_model_alone_serves_and_running_calls_stay_with_it(adapted: Adapted):
    first = asyncio.create_task(collect(adapted.engine, ask("first", prompt(0, 20), max_tokens=60)))
    while not adapted.engine.load.num_running:
        await asyncio.sleep(0.001)
    new = await adapted.put(1)
    second = await collect(adapted.engine, ask("second", prompt(0, 20), max_tokens=60))
    assert adapted.assert_exact(prompt(0, 20), await first) == Version(1, 0)
    assert adapted.assert_exact(prompt(0, 20), second) == new == adapted.engine.version


async def test_a_fresh_adapter_is_the_model_alone(adapted: Adapted):
    await adapted.put(100, size=0.0)
    draws = await collect(adapted.engine, ask("a", prompt(1, 20), max_tokens=30))
    expected = reference(adapted.base, prompt(1, 20), ids_of(draws))
    assert (logprobs_of(draws) - expected).abs().max().item() <= TOLERANCE


async def test_two_versions_in_one_batch_give_each_call_its_own_log_probs(adapted: Adapted):
    engine, versions, tasks = adapted.engine, list[Version](), list[asyncio.Task[list[Draw]]]()
    for seed in (1, 2):
        versions.append(await adapted.put(seed))
        tasks += [
            asyncio.create_task(collect(engine, ask(f"{seed}.{index}", prompt(index, 20 + index), max_tokens=300)))
            for index in range(4)
        ]
        while engine.load.num_running < len(tasks):
            await asyncio.sleep(0.001)
    assert engine.load.num_running == 8
    results = await asyncio.gather(*tasks)
    for place, draws in enumerate(results):
        index = place % 4
        assert adapted.assert_exact(prompt(index, 20 + index), draws) == versions[place // 4]


async def test_prefixes_are_shared_within_a_version_and_never_across(adapted: Adapted):
    shared = prompt(3, 200)
    for seed in (1, 2, 1):
        await adapted.put(seed)
        first = await collect(adapted.engine, ask("a", shared))
        again = await collect(adapted.engine, ask("b", shared))
        assert (first[0].num_cached_tokens, again[0].num_cached_tokens >= 160) == (0, True)
        for draws in (first, again):
            adapted.assert_exact(shared, draws)


async def test_a_new_adapter_waits_while_as_many_as_are_allowed_are_held(adapted: Adapted):
    engine = adapted.engine
    held = [await adapted.put(seed) for seed in (1, 2)]
    async with aclosing(engine.generate(ask("one", prompt(1, 9), max_tokens=LONG))) as one:
        assert (await anext(one)).version == held[1]
        held.append(await adapted.put(3))
        async with aclosing(engine.generate(ask("two", prompt(1, 9), max_tokens=LONG))) as two:
            assert (await anext(two)).version == held[2]
            held.append(await adapted.put(4))
            with pytest.raises(TimeoutError, match="adapter"):
                await engine.update_weights(adapted.next_version, adapted.file(5), timeout_seconds=0.02)
            assert engine.version == held[3]
            update = asyncio.create_task(adapted.put(5))
            await asyncio.sleep(0.02)
            assert not update.done()
            waiting = await collect(engine, ask("meanwhile", prompt(2, 9), max_tokens=3))
            assert adapted.assert_exact(prompt(2, 9), waiting) == held[3]
            await one.aclose()
            new = await asyncio.wait_for(update, 30)
    assert adapted.assert_exact(prompt(2, 9), await collect(engine, ask("new", prompt(2, 9)))) == new


async def test_what_is_no_adapter_for_this_model_is_refused_and_the_old_one_serves_on(adapted: Adapted, tmp_path: Path):
    old, good = await adapted.put(1), adapted.file(2)
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(good.read_bytes()[:-9])
    refused = {
        "has rank 8": wrong(adapted, tmp_path, rank=8),
        "and alpha 4.0": wrong(adapted, tmp_path, alpha=4.0),
        "tensors missing": wrong(adapted, tmp_path, target_modules=("q_proj",)),
        "holds no adapter": adapted.base / "model.safetensors",
        "can not be read": damaged,
        "absent": tmp_path / "absent.safetensors",
    }
    running = asyncio.create_task(collect(adapted.engine, ask("running", prompt(1, 9), max_tokens=200)))
    for words, path in refused.items():
        with pytest.raises(EngineError, match=words):
            await adapted.engine.update_weights(adapted.next_version, path)
    assert adapted.assert_exact(prompt(1, 9), await running) == old
    assert adapted.assert_exact(prompt(2, 9), await collect(adapted.engine, ask("a", prompt(2, 9)))) == old


def wrong(adapted: Adapted, folder: Path, **settings: Any) -> Path:
    lora = LoraSettings(**(LORA.model_dump() | settings))
    return make_adapter(adapted.base, folder / f"{'-'.join(settings)}.safetensors", 1, lora)


async def test_an_adapter_file_may_go_once_it_is_in_place(adapted: Adapted, tmp_path: Path):
    path = make_adapter(adapted.base, tmp_path / "gone.safetensors", 7)
    version = adapted.next_version
    await adapted.engine.update_weights(version, path)
    path.unlink()
    adapted.files[version] = make_adapter(adapted.base, tmp_path / "again.safetensors", 7)
    adapted.assert_exact(prompt(4, 30), await collect(adapted.engine, ask("a", prompt(4, 30), max_tokens=30)))


async def test_updates_calls_and_cancels_in_any_order_leave_every_call_with_its_own_version(adapted: Adapted):
    engine, rng = adapted.engine, random.Random(1)

    async def play(index: int) -> tuple[Version, list[int], list[Draw]]:
        await asyncio.sleep(rng.random() * 0.3)
        start, began = prompt(index, 5 + 3 * index), engine.version
        draws: list[Draw] = []
        async with aclosing(engine.generate(ask(str(index), start, max_tokens=rng.randrange(1, 90)))) as stream:
            async for draw in stream:
                draws.append(draw)
                if index % 5 == 4 and len(draws) > 20:
                    break
        return began, start, draws

    async def update() -> None:
        for seed in (1, 2, 3, 4, 5, 6):
            await asyncio.sleep(rng.random() * 0.05)
            await adapted.put(seed)

    *played, _ = await asyncio.gather(*(play(index) for index in range(24)), update())
    for began, start, draws in played:
        assert adapted.assert_exact(start, draws) >= began
    assert engine.load.num_running == engine.load.num_waiting == 0


async def test_layers_that_no_model_has_are_refused_at_the_start(small: Path):
    engine = TransformersEngine(small, lora=LoraSettings(rank=2, target_modules=("w1",)))
    with pytest.raises(ConfigError, match=r"lora\.target_modules: 'w1'"):
        await engine.start()


async def test_vllm_keeps_the_folders_of_what_is_held_only_and_removes_those_of_the_dead(adapted: Adapted):
    if adapted.kind != "vllm":
        pytest.skip("the embedded engine has no folders")
    engine: Any = adapted.engine
    llm, folder = engine._llm, adapted.engine_folder
    assert folder is not None and folder.parent == FOLDER
    assert not LEFT.exists()

    async def held() -> tuple[int, int]:
        folders = {int(path.name) for path in folder.iterdir() if path.is_dir()}
        loaded = set(await llm.list_loras())
        return len(folders & loaded), len(folders | loaded)

    await adapted.put(1)
    async with aclosing(engine.generate(ask("one", prompt(1, 9), max_tokens=LONG))) as one:
        await anext(one)
        for seed in (2, 3):
            await adapted.put(seed)
        await until_equal(held, (2, 2))
    await until_equal(held, (1, 1))

    running = asyncio.create_task(collect(engine, ask("running", prompt(1, 9), max_tokens=300)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm, "add_lora", failing)
        with pytest.raises(EngineError, match=r"vLLM can not load adapter .*: no memory; the former one stays"):
            await adapted.put(4)
    adapted.assert_exact(prompt(1, 9), await running)
    await until_equal(held, (1, 1))
    assert await adapted.put(4) == engine.version


async def failing(*_: object) -> None:
    raise RuntimeError("no memory")


async def until_equal(look: Callable[[], Awaitable[Any]], expected: Any) -> None:
    async with asyncio.timeout(20):
        while await look() != expected:
            await asyncio.sleep(0.01)

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_use import (
    ask,
    assert_exact,
    broken_snapshots,
    city_prompts,
    collect,
    ids_of,
    learner_differences,
    prompt,
    scale_embeddings,
)
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from agentjet.config import EngineSettings, ModelSettings
from agentjet.errors import ContextLengthError, EngineError, ModelNotFoundError, UnsupportedArchitectureError
from agentjet.inference.engine import Draw, Engine
from agentjet.inference.transformers_engine import TransformersEngine
from agentjet.pretrained import model_file, tiny_model
from agentjet.schemas.call import FinishReason
from agentjet.schemas.ids import Version

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with logits far from flat, so that mistakes show."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model.build_tiny(folder)
    scale_embeddings(folder / "model.safetensors", folder / "model.safetensors", 10.0)
    return folder


async def test_settings_describe_an_engine(tiny: Path):
    settings = EngineSettings(dtype="float32", device="cpu", num_threads=1, context_tokens=24, cache_tokens=64)
    engine = TransformersEngine.from_settings(ModelSettings(path=str(tiny), engine=settings))
    await engine.start()
    try:
        assert engine.context_length == 24
        drawn = ids_of(await collect(engine, ask("a", [1, 2, 3], max_tokens=4)))
        assert len(drawn) == 4
    finally:
        await engine.close()


@asynccontextmanager
async def running(path: Path, **settings: Any) -> AsyncIterator[TransformersEngine]:
    engine = TransformersEngine(path, **({"dtype": "float32", "device": "cpu", "num_threads": 1} | settings))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


async def test_l1_log_probs_equal_those_of_a_plain_forward_pass(tiny: Path) -> None:
    async with running(tiny) as engine:
        draws = await collect(engine, ask("a", prompt(0, 20), temperature=0.6, max_tokens=40))
    assert len(ids_of(draws)) == 40
    assert draws[-1].finish_reason == FinishReason.LENGTH
    assert all(draw.finish_reason is None for draw in draws[:-1])
    assert_exact(tiny, prompt(0, 20), draws, 0.6)


async def test_requests_join_and_leave_a_running_batch_without_touching_each_other(tiny: Path) -> None:
    async def later(engine: TransformersEngine, index: int) -> list[Draw]:
        for _ in range(index * 3):
            await asyncio.sleep(0.001)
        return await collect(
            engine, ask(str(index), prompt(index, 3 + 11 * index), max_tokens=5 + 7 * index, seed=index)
        )

    async with running(tiny) as engine:
        results = await asyncio.gather(*(later(engine, index) for index in range(7)))
    for index, draws in enumerate(results):
        assert len(ids_of(draws)) == 5 + 7 * index
        assert_exact(tiny, prompt(index, 3 + 11 * index), draws)


async def test_a_prompt_shared_by_a_group_is_computed_once_even_when_all_arrive_together(tiny: Path) -> None:
    shared = prompt(5, 50)
    async with running(tiny) as engine:
        results = await asyncio.gather(
            *(collect(engine, ask(str(index), [*shared, 10 + index], seed=index)) for index in range(8))
        )
    assert sorted(draws[0].num_cached_tokens for draws in results) == [0] + [50] * 7
    for index, draws in enumerate(results):
        assert_exact(tiny, [*shared, 10 + index], draws)


async def test_equal_prompts_share_all_but_their_last_token(tiny: Path) -> None:
    shared = prompt(6, 40)
    async with running(tiny) as engine:
        results = await asyncio.gather(*(collect(engine, ask(str(index), shared, seed=index)) for index in range(4)))
    assert sorted(draws[0].num_cached_tokens for draws in results) == [0, 39, 39, 39]
    assert len({tuple(ids_of(draws)) for draws in results}) == 4
    for draws in results:
        assert_exact(tiny, shared, draws)


async def test_an_episodes_next_turns_reuse_what_was_computed(tiny: Path) -> None:
    async with running(tiny) as engine:
        history = prompt(7, 30)
        for turn in range(4):
            draws = await collect(engine, ask(f"turn{turn}", history, max_tokens=6, seed=turn))
            assert_exact(tiny, history, draws)
            assert draws[0].num_cached_tokens == (len(history) - 9 - 1 if turn else 0)
            history = [*history, *ids_of(draws), *prompt(100 + turn, 9)]


async def test_next_turns_of_many_episodes_at_once_stay_exact(tiny: Path) -> None:
    async def episode(engine: TransformersEngine, index: int) -> list[tuple[list[int], list[Draw]]]:
        history, turns = [*prompt(8, 25), *prompt(50 + index, 1 + index % 3)], []
        for turn in range(3):
            draws = await collect(engine, ask(f"{index}.{turn}", history, max_tokens=3 + index % 4, seed=index + turn))
            turns.append((history, draws))
            history = [*history, *ids_of(draws), *prompt(200 + index + turn, 4 + (index * 7) % 40)]
        return turns

    async with running(tiny, max_running=16) as engine:
        episodes = await asyncio.gather(*(episode(engine, index) for index in range(24)))
    for turns in episodes:
        for history, draws in turns:
            assert_exact(tiny, history, draws)


async def test_a_long_prompt_in_pieces_beside_decoding_requests_stays_exact(tiny: Path) -> None:
    async with running(tiny, prefill_tokens_per_step=48) as engine:
        short = asyncio.create_task(collect(engine, ask("short", prompt(1, 5), max_tokens=60)))
        long = asyncio.create_task(collect(engine, ask("long", prompt(2, 400), max_tokens=5)))
        assert_exact(tiny, prompt(1, 5), await short)
        assert_exact(tiny, prompt(2, 400), await long)


async def test_sequences_that_outgrow_the_rows_go_on_exactly(tiny: Path) -> None:
    async with running(tiny, max_running=4, cache_tokens=2048, context_length=1024) as engine:
        results = await asyncio.gather(
            *(collect(engine, ask(str(index), prompt(index, 230), max_tokens=330, seed=index)) for index in range(4))
        )
    for index, draws in enumerate(results):
        assert len(ids_of(draws)) == 330
        assert_exact(tiny, prompt(index, 230), draws)


async def test_sixty_four_requests_at_once(tiny: Path) -> None:
    async with running(tiny, max_running=64) as engine:
        results = await asyncio.gather(
            *(collect(engine, ask(str(index), prompt(index, 8), max_tokens=8, seed=index)) for index in range(64))
        )
        assert engine.load.num_running == engine.load.num_waiting == 0
        assert engine.load.tokens_per_second > 0
    for index in range(0, 64, 9):
        assert_exact(tiny, prompt(index, 8), results[index])


async def test_more_requests_than_rows_wait_their_turn(tiny: Path) -> None:
    async with running(tiny, max_running=2, cache_tokens=256, context_length=64) as engine:
        results = await asyncio.gather(
            *(collect(engine, ask(str(index), prompt(index, 30), max_tokens=10, seed=index)) for index in range(9))
        )
    for index, draws in enumerate(results):
        assert_exact(tiny, prompt(index, 30), draws)


async def test_a_seed_gives_the_same_ids_in_any_company(tiny: Path) -> None:
    async with running(tiny) as engine:
        alone = await collect(engine, ask("alone", prompt(3, 20), seed=42, max_tokens=30))
        among = await asyncio.gather(
            *(collect(engine, ask(f"x{index}", prompt(index, 17), seed=index)) for index in range(9)),
            collect(engine, ask("again", prompt(3, 20), seed=42, max_tokens=30)),
        )
        other = await collect(engine, ask("other", prompt(3, 20), seed=43, max_tokens=30))
        fresh = [await collect(engine, ask(f"f{index}", prompt(3, 20), seed=None)) for index in range(2)]
    assert ids_of(among[-1]) == ids_of(alone) != ids_of(other)
    assert ids_of(fresh[0]) != ids_of(fresh[1])


async def test_greedy_draws_take_the_most_likely_token(tiny: Path) -> None:
    async with running(tiny) as engine:
        draws = await collect(engine, ask("a", prompt(4, 10), temperature=0.0, max_tokens=5))
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([prompt(4, 10) + ids_of(draws)])).logits[0, 9:-1]
    assert ids_of(draws) == logits.argmax(-1).tolist()


async def test_max_tokens_is_clamped_to_the_context(tiny: Path) -> None:
    async with running(tiny, context_length=40) as engine:
        assert engine.context_length == 40
        draws = await collect(engine, ask("a", prompt(1, 33), max_tokens=400))
        assert len(ids_of(draws)) == 7
        assert draws[-1].finish_reason == FinishReason.LENGTH
        for length in (0, 40, 41):
            with pytest.raises(ContextLengthError, match="context of 40"):
                await collect(engine, ask("b", prompt(1, length)))


async def test_a_stop_id_ends_the_reply_and_is_kept(tiny: Path) -> None:
    async with running(tiny) as engine:
        free = ids_of(await collect(engine, ask("a", prompt(1, 9), max_tokens=20)))
        stop = free[7]
        draws = await collect(engine, ask("b", prompt(1, 9), max_tokens=20, stop_ids=frozenset({stop})))
    assert ids_of(draws) == free[: free.index(stop) + 1]
    assert draws[-1].finish_reason == FinishReason.STOP
    assert draws[-1].stop_string is None


async def test_a_stop_string_that_ends_inside_a_token_ends_the_reply_with_all_ids(tiny: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny)
    async with running(tiny) as engine:
        free = ids_of(await collect(engine, ask("a", prompt(1, 9), max_tokens=60)))
        place = next(i for i in range(5, 60) if len(tokenizer.decode(free[i]).strip()) >= 4)
        inside = tokenizer.decode(free[place]).strip()[:-1]
        draws = await collect(engine, ask("b", prompt(1, 9), max_tokens=60, stop=("never there", inside)))
    drawn = ids_of(draws)
    assert drawn == free[: len(drawn)]
    assert inside in tokenizer.decode(drawn)
    assert inside not in tokenizer.decode(drawn[:-1])
    assert (draws[-1].finish_reason, draws[-1].stop_string) == (FinishReason.STOP, inside)


async def test_a_cancelled_generation_frees_its_place_and_others_go_on(tiny: Path) -> None:
    async with running(tiny, max_running=1) as engine:
        first = engine.generate(ask("a", prompt(1, 9), max_tokens=1000))
        async for _ in first:
            break
        await first.aclose()
        draws = await asyncio.wait_for(collect(engine, ask("b", prompt(2, 9))), 10)
        assert_exact(tiny, prompt(2, 9), draws)
        waiting = asyncio.create_task(collect(engine, ask("c", prompt(2, 9), max_tokens=1000)))
        await asyncio.sleep(0.02)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await collect(engine, ask("c", prompt(2, 9)))
        assert engine.load.num_running == engine.load.num_waiting == 0


async def test_an_id_that_is_used_again_gets_nothing_of_what_was_cancelled(tiny: Path) -> None:
    async with running(tiny) as engine:
        for _ in range(20):
            first = engine.generate(ask("a", prompt(1, 9), max_tokens=400))
            await anext(first)
            await first.aclose()
            assert_exact(tiny, prompt(2, 9), await collect(engine, ask("a", prompt(2, 9), max_tokens=4)))


async def test_an_id_in_use_is_refused(tiny: Path) -> None:
    async with running(tiny) as engine:
        first = engine.generate(ask("a", prompt(1, 9), max_tokens=1000))
        await anext(first)
        with pytest.raises(EngineError, match="unique"):
            await collect(engine, ask("a", prompt(1, 9)))
        await first.aclose()


async def test_l7_no_cached_prefix_survives_new_weights(tiny: Path, tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    scale_embeddings(tiny / "model.safetensors", weights, 1.5)
    (tmp_path / "config.json").write_text((tiny / "config.json").read_text())
    async with running(tiny, version=Version(1, 4)) as engine:
        before = await collect(engine, ask("a", prompt(1, 30)))
        await engine.update_weights(Version(1, 5), weights)
        after = await collect(engine, ask("b", prompt(1, 30)))
    assert {draw.version for draw in before} == {Version(1, 4)}
    assert {draw.version for draw in after} == {Version(1, 5)}
    assert after[0].num_cached_tokens == 0
    assert_exact(tiny, prompt(1, 30), before)
    assert_exact(tmp_path, prompt(1, 30), after)


async def test_a_running_generation_recomputes_its_cache_under_new_weights(tiny: Path, tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    scale_embeddings(tiny / "model.safetensors", weights, 1.5)
    (tmp_path / "config.json").write_text((tiny / "config.json").read_text())
    async with running(tiny) as engine:
        tasks = [
            asyncio.create_task(collect(engine, ask(str(index), prompt(1, 30 + index), max_tokens=300, seed=index)))
            for index in range(3)
        ]
        while engine.load.num_running < 3:
            await asyncio.sleep(0.001)
        await engine.update_weights(Version(0, 1), weights)
        results = await asyncio.gather(*tasks)
    for index, draws in enumerate(results):
        versions = [draw.version for draw in draws]
        cut = versions.index(Version(0, 1))
        assert 0 < cut < 300 and versions == sorted(versions)
        assert_exact(tiny, prompt(1, 30 + index), draws[:cut])
        assert_exact(tmp_path, prompt(1, 30 + index) + ids_of(draws[:cut]), draws[cut:])


async def test_a_bad_snapshot_is_refused_and_the_old_weights_serve_on(tiny: Path, tmp_path: Path) -> None:
    async with running(tiny, version=Version(2, 7)) as engine:
        for words, path in broken_snapshots(tiny, tmp_path, is_tied=True).items():
            with pytest.raises(EngineError, match=words):
                await engine.update_weights(Version(2, 8), path)
        assert engine.version == Version(2, 7)
        with pytest.raises(EngineError, match="can not be read"):
            await engine.update_weights(Version(2, 8), tmp_path / "absent.safetensors")
        draws = await collect(engine, ask("a", prompt(1, 30)))
    assert {draw.version for draw in draws} == {Version(2, 7)}
    assert_exact(tiny, prompt(1, 30), draws)


async def test_an_update_that_times_out_leaves_the_old_weights(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from agentjet.inference.policy_model import PolicyModel

    stage = PolicyModel.stage

    def slow(self: PolicyModel, path: Path, keep_going: Callable[[], bool]) -> Any:
        while keep_going():
            time.sleep(0.01)
        return stage(self, path, lambda: True)

    weights = tmp_path / "model.safetensors"
    scale_embeddings(tiny / "model.safetensors", weights, 1.5)
    async with running(tiny) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(PolicyModel, "stage", slow)
            with pytest.raises(TimeoutError):
                await engine.update_weights(Version(0, 1), weights, timeout_seconds=0.05)
        draws = await collect(engine, ask("a", prompt(1, 30)))
        assert engine.version == Version(0, 0)
        assert_exact(tiny, prompt(1, 30), draws)
        await engine.update_weights(Version(0, 2), tmp_path)
        assert engine.version == Version(0, 2)


async def test_a_step_that_fails_ends_its_requests_and_not_the_engine(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from agentjet.inference.policy_model import PolicyModel

    def broken(*_: object) -> torch.Tensor:
        raise RuntimeError("out of memory")

    async with running(tiny) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(PolicyModel, "logits", broken)
            with pytest.raises(EngineError, match="out of memory"):
                await collect(engine, ask("a", prompt(1, 30)))
        assert_exact(tiny, prompt(1, 30), await collect(engine, ask("a", prompt(1, 30))))


async def test_a_request_that_finds_no_memory_is_answered_and_the_engine_goes_on(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from agentjet.inference.row_cache import RowCache

    def full(*_: object) -> None:
        raise RuntimeError("out of memory")

    async with running(tiny) as engine, asyncio.timeout(30):
        with monkeypatch.context() as patch:
            patch.setattr(RowCache, "grow", full)
            with pytest.raises(EngineError, match="out of memory"):
                await collect(engine, ask("a", prompt(1, 300)))
        assert len(ids_of(await collect(engine, ask("a", prompt(1, 300), max_tokens=3)))) == 3


async def test_an_update_that_is_cancelled_while_it_is_put_in_place_is_cancelled(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from agentjet.inference.policy_model import PolicyModel

    commit, has_begun = PolicyModel.commit, threading.Event()

    def slow(self: PolicyModel, staged: Any) -> None:
        has_begun.set()
        time.sleep(0.2)
        commit(self, staged)

    monkeypatch.setattr(PolicyModel, "commit", slow)
    async with running(tiny) as engine, asyncio.timeout(30):
        task = asyncio.create_task(engine.update_weights(Version(0, 1), tiny / "model.safetensors"))
        await asyncio.to_thread(has_begun.wait)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()


async def test_weights_that_can_not_be_put_in_place_end_the_engine_and_nobody_waits(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from agentjet.inference.policy_model import PolicyModel

    def broken(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(PolicyModel, "commit", broken)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    async with running(tiny) as engine, asyncio.timeout(30):
        with pytest.raises(EngineError, match="restart it"):
            await engine.update_weights(Version(0, 1), tiny / "model.safetensors")
        with pytest.raises(EngineError, match=r"not running|closed"):
            await collect(engine, ask("a", prompt(1, 30)))
        with pytest.raises(EngineError, match="has ended"):
            await engine.ended()


async def test_closing_ends_open_generations_with_an_error(tiny: Path) -> None:
    async with running(tiny) as engine:
        task = asyncio.create_task(collect(engine, ask("a", prompt(1, 30), max_tokens=2000)))
        await asyncio.sleep(0.02)
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await task
        with pytest.raises(EngineError, match="not running"):
            await collect(engine, ask("b", prompt(1, 30)))


CONFIGS = {
    "llama": LlamaConfig(),
    "qwen2": Qwen2Config(),
    "qwen3": Qwen3Config(head_dim=32),
    "mistral": MistralConfig(sliding_window=None, head_dim=16),
}


def small(config: Any, folder: Path, **changes: Any) -> Path:
    settings = {key: value for key, value in config.to_dict().items() if key != "layer_types"} | {
        "vocab_size": 400,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "initializer_range": 0.2,
    }
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(type(config)(**(settings | changes)))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", CONFIGS)
async def test_l1_other_architectures_are_exact_too(name: str, tmp_path: Path) -> None:
    folder = small(CONFIGS[name], tmp_path / name)
    async with running(folder) as engine:
        first = await collect(engine, ask("a", prompt(1, 45)))
        history = prompt(1, 45) + ids_of(first) + prompt(2, 5)
        second = await collect(engine, ask("b", history, temperature=0.6))
        with pytest.raises(EngineError, match=r"no tokenizer\.json"):
            await collect(engine, ask("c", history, stop=("x",)))
    assert second[0].num_cached_tokens == len(history) - 6
    assert_exact(folder, prompt(1, 45), first)
    assert_exact(folder, history, second, 0.6)


async def test_an_untied_head_takes_new_weights(tmp_path: Path) -> None:
    old = small(CONFIGS["llama"], tmp_path / "old")
    new = small(CONFIGS["llama"], tmp_path / "new", initializer_range=0.1)
    weights = load_file(old / "model.safetensors")
    save_file({name: value * np.float32(0.9) for name, value in weights.items()}, new / "model.safetensors")
    async with running(old) as engine:
        await engine.update_weights(Version(0, 1), new)
        draws = await collect(engine, ask("a", prompt(1, 45)))
    assert_exact(new, prompt(1, 45), draws)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gemma2"}, "gemma2"),
        ({"model_type": "mistral", "sliding_window": 64}, "window of 64"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
    ],
)
async def test_what_would_be_inexact_is_refused_by_name(
    tiny: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    config = json.loads((tiny / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((tiny / "model.safetensors").read_bytes())
    with pytest.raises(UnsupportedArchitectureError, match=words):
        await TransformersEngine(tmp_path).start()


async def test_a_model_that_is_missing_or_broken_is_told_at_start(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="nowhere"):
        await TransformersEngine(tmp_path / "nowhere").start()
    (tmp_path / "config.json").write_text((tiny / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(EngineError, match="can not be loaded"):
        await TransformersEngine(tmp_path).start()


def test_the_engine_meets_its_protocol(tiny: Path) -> None:
    engine: Engine = TransformersEngine(tiny)
    assert engine.version == Version(0, 0)
    assert engine.load.num_running == 0


@pytest.mark.slow
async def test_l1_smollm2_in_bfloat16_stays_near_a_learner_under_autocast() -> None:
    folder = model_file.fetch("smollm2-135m")
    prompts = city_prompts(folder, 12)
    async with running(folder, dtype="bfloat16") as engine:
        results = await asyncio.gather(
            *(
                collect(engine, ask(str(n), ids, temperature=0.6, max_tokens=40, seed=n))
                for n, ids in enumerate(prompts)
            )
        )
    difference = learner_differences(folder, prompts, results, 0.6)
    # Measured over 2,560 tokens: mean 0.015, 99th percentile 0.12, 99.9th 0.28. Of the 480 here that is nearly
    # the maximum, another one on each kind of processor, so it is held to twice the expected bound, where to alarm.
    assert difference.mean() <= 0.03
    assert difference.quantile(0.99) <= 0.2
    assert difference.quantile(0.999) <= 0.6

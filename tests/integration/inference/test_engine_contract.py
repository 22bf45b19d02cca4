"""What every engine does (L1-L4, L7, L8, L10, A5, A11, N1 of the cases): both kinds pass the same tests."""

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from adapter_use import make_adapter
from engine_use import TOLERANCE, ask, assert_exact, broken_snapshots, collect, ids_of, logprobs_of, prompt, reference
from made_sample import sample_of_rows
from served_engine import CONTEXT, ServedEngine, changed, constant
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from agentjet.config import AgreementSettings, AlgorithmSettings, LearnerSettings
from agentjet.errors import ContextLengthError, EngineError
from agentjet.inference.engine import Draw
from agentjet.schemas.call import FinishReason
from agentjet.schemas.ids import Version
from agentjet.schemas.sample import Sample
from agentjet.training.agreement_watch import AgreementWatch
from agentjet.training.state import load_state, save_state
from agentjet.training.trainer import Trainer

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.filterwarnings("default")]
pytestmark.append(pytest.mark.timeout(400))  # vLLM starts in 20 s, and compiles kernels where it never ran


@pytest.fixture
def other(small: Path, tmp_path: Path) -> Path:
    """Weights that say something else."""
    return changed(small, tmp_path / "other", 1.5)


async def test_l1_log_probs_equal_those_of_a_plain_forward_pass(served: ServedEngine):
    draws = await collect(served.engine, ask("a", prompt(0, 20), temperature=0.6, max_tokens=40))
    assert len(ids_of(draws)) == 40
    assert draws[-1].finish_reason == FinishReason.LENGTH
    assert all(draw.finish_reason is None and draw.stop_string is None for draw in draws[:-1])
    assert_exact(served.serves, prompt(0, 20), draws, 0.6)


@pytest.mark.parametrize(("temperature", "expected"), [(0.6, -0.20806), (1.0, -0.44019)])
async def test_l2_l3_a_log_prob_is_that_of_the_whole_vocabulary_at_the_temperature(
    served: ServedEngine, tmp_path: Path, temperature: float, expected: float
):
    await served.serve(constant(served.base, tmp_path / "constant", {5: 1.0, 6: 0.0, 7: -1.0, 8: -2.0}, -1000.0))
    draws = await collect(served.engine, ask("a", prompt(0, 9), temperature=temperature, max_tokens=60))
    of_best = [logprob for draw in draws for token, logprob in zip(draw.ids, draw.logprobs, strict=True) if token == 5]
    assert {5} < set(ids_of(draws)) <= {5, 6, 7, 8}
    assert of_best == pytest.approx([expected] * len(of_best), abs=1e-4)


async def test_top_k_and_top_p_limit_what_is_drawn(served: ServedEngine, tmp_path: Path):
    await served.serve(constant(served.base, tmp_path / "constant", {5: 1.0, 6: 0.0, 7: -1.0, 8: -2.0}, -1000.0))
    few = await collect(served.engine, ask("k", prompt(0, 9), top_k=2, max_tokens=60))
    assert set(ids_of(few)) == {5, 6}
    fewer = await collect(served.engine, ask("p", prompt(0, 9), top_p=0.6, max_tokens=30))
    assert set(ids_of(fewer)) == {5}


async def test_greedy_draws_take_the_most_likely_token(served: ServedEngine):
    draws = await collect(served.engine, ask("a", prompt(4, 10), temperature=0.0, max_tokens=5))
    model = AutoModelForCausalLM.from_pretrained(served.serves, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([prompt(4, 10) + ids_of(draws)])).logits[0, 9:-1]
    assert ids_of(draws) == logits.argmax(-1).tolist()
    assert_exact(served.serves, prompt(4, 10), draws)


async def test_l4_a_stop_string_inside_a_token_ends_the_reply_with_all_ids_and_none_added(
    served: ServedEngine, tokenizer: PreTrainedTokenizerFast
):
    free = ids_of(await collect(served.engine, ask("a", prompt(1, 9), max_tokens=60)))
    place = next(index for index in range(5, 60) if len(tokenizer.decode([free[index]]).strip()) >= 4)
    inside = tokenizer.decode([free[place]]).strip()[:-1]
    draws = await collect(served.engine, ask("b", prompt(1, 9), max_tokens=60, stop=("never there", inside)))
    drawn = ids_of(draws)
    assert drawn == free[: len(drawn)]
    assert inside in tokenizer.decode(drawn) and inside not in tokenizer.decode(drawn[:-1])
    assert (draws[-1].finish_reason, draws[-1].stop_string) == (FinishReason.STOP, inside)
    assert served.engine.load.num_running == 0


async def test_a_stop_id_ends_the_reply_and_is_kept(served: ServedEngine):
    free = ids_of(await collect(served.engine, ask("a", prompt(1, 9), max_tokens=20)))
    stop = free[7]
    draws = await collect(served.engine, ask("b", prompt(1, 9), max_tokens=20, stop_ids=frozenset({stop})))
    assert ids_of(draws) == free[: free.index(stop) + 1]
    assert (draws[-1].finish_reason, draws[-1].stop_string) == (FinishReason.STOP, None)


async def test_n1_max_tokens_is_clamped_to_the_context(served: ServedEngine):
    assert served.engine.context_length == CONTEXT
    draws = await collect(served.engine, ask("a", prompt(1, CONTEXT - 7), max_tokens=400))
    assert len(ids_of(draws)) == 7
    assert draws[-1].finish_reason == FinishReason.LENGTH
    for length in (0, CONTEXT, CONTEXT + 1):
        with pytest.raises(ContextLengthError, match=f"context of {CONTEXT}"):
            await collect(served.engine, ask("b", prompt(1, length)))


async def test_a_seed_gives_the_same_ids_in_any_company(served: ServedEngine):
    engine = served.engine
    alone = await collect(engine, ask("alone", prompt(3, 20), seed=-42, max_tokens=30))
    among = await asyncio.gather(
        *(collect(engine, ask(f"x{index}", prompt(index, 17), seed=index)) for index in range(9)),
        collect(engine, ask("again", prompt(3, 20), seed=-42, max_tokens=30)),
    )
    other = await collect(engine, ask("other", prompt(3, 20), seed=43, max_tokens=30))
    fresh = [await collect(engine, ask(f"f{index}", prompt(3, 20), seed=None)) for index in range(2)]
    assert ids_of(among[-1]) == ids_of(alone) != ids_of(other)
    assert ids_of(fresh[0]) != ids_of(fresh[1])


async def test_a_second_request_reuses_what_was_computed_for_the_first(served: ServedEngine):
    shared = prompt(105, 200)
    first = await collect(served.engine, ask("first", shared))
    second = await collect(served.engine, ask("second", [*shared, *ids_of(first), 7], seed=2))
    assert first[0].num_cached_tokens == 0
    assert 160 <= second[0].num_cached_tokens <= 211
    assert_exact(served.serves, [*shared, *ids_of(first), 7], second)


async def test_sixty_four_requests_at_once(served: ServedEngine):
    results = await asyncio.gather(
        *(collect(served.engine, ask(str(index), prompt(index, 8), max_tokens=8, seed=index)) for index in range(64))
    )
    load = served.engine.load
    assert load.num_running == load.num_waiting == 0
    assert load.tokens_per_second > 0
    for index in range(0, 64, 9):
        assert len(ids_of(results[index])) == 8
        assert_exact(served.serves, prompt(index, 8), results[index])


async def test_a_cancelled_generation_leaves_and_others_go_on(served: ServedEngine):
    engine = served.engine
    first = engine.generate(ask("a", prompt(1, 9), max_tokens=400))
    await anext(first)
    assert engine.load.num_running == 1
    await first.aclose()
    waiting = asyncio.create_task(collect(engine, ask("c", prompt(2, 9), max_tokens=400)))
    await asyncio.sleep(0.05)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    draws = await asyncio.wait_for(collect(engine, ask("d", prompt(2, 9))), 10)
    assert_exact(served.serves, prompt(2, 9), draws)
    assert engine.load.num_running == engine.load.num_waiting == 0


async def test_an_id_in_use_is_refused(served: ServedEngine):
    first = served.engine.generate(ask("a", prompt(1, 9), max_tokens=400))
    await anext(first)
    with pytest.raises(EngineError, match="unique"):
        await collect(served.engine, ask("a", prompt(1, 9)))
    await first.aclose()


async def test_l7_no_cached_prefix_survives_new_weights(served: ServedEngine, other: Path):
    shared = prompt(106, 200)
    before = await collect(served.engine, ask("a", shared))
    old = served.engine.version
    new = await served.serve(other)
    after = await collect(served.engine, ask("b", shared))
    assert ({draw.version for draw in before}, {draw.version for draw in after}) == ({old}, {new})
    assert after[0].num_cached_tokens == 0
    assert_exact(served.base, shared, before)
    assert_exact(other, shared, after)


async def test_l8_new_weights_say_something_else_and_carry_the_learners_version(served: ServedEngine, other: Path):
    before = await collect(served.engine, ask("a", prompt(1, 30), temperature=0.0))
    await served.serve(other)
    after = await collect(served.engine, ask("b", prompt(1, 30), temperature=0.0))
    assert ids_of(before) != ids_of(after)
    assert after[-1].version == served.engine.version == Version(1, before[-1].version.step + 1)


async def test_l10_after_a_restart_from_a_checkpoint_engine_and_learner_differ_as_before_it(
    served: ServedEngine, tmp_path: Path
):
    trainer = make_trainer(served.base)
    episodes = [[drawn_sample(await collect(served.engine, ask(str(n), START, seed=n)), n) for n in range(4)]]
    trainer.step(episodes)
    save_state(trainer, tmp_path / "checkpoint", {})
    before, of_learner = await learner_and_engine(served, trainer, tmp_path / "before.safetensors")
    await served.restore()
    resumed = make_trainer(served.base)
    load_state(resumed, tmp_path / "checkpoint")
    again, of_resumed = await learner_and_engine(served, resumed, tmp_path / "after.safetensors")
    assert torch.equal(of_resumed, of_learner)
    assert (again - before).abs().max() <= TOLERANCE / 10
    assert (before - of_learner).abs().max() <= TOLERANCE
    assert trainer.step(episodes).digest == resumed.step(episodes).digest


async def test_l1_a_learner_finds_that_the_engine_agrees_and_names_it_when_it_serves_other_weights(
    served: ServedEngine, other: Path
):
    watch = AgreementWatch("game", AgreementSettings(), make_trainer(served.base))

    async def compare(step: int) -> dict[str, float]:
        draws = await collect(served.engine, ask(str(step), START, max_tokens=200, temperature=0.6))
        call = {"versions": ("1-4",), "temperature": 0.6, "engine": served.kind}
        sample = sample_of_rows([(START, ids_of(draws))], logprobs=logprobs_of(draws).tolist(), calls=[call])
        return watch.compare([sample], step, lambda version: version == "1-4")

    figures = await compare(4)
    assert figures["agreement_num_tokens"] == 200
    assert figures["agreement_max_nats"] <= TOLERANCE
    assert watch.problems() == []
    await served.serve(other)
    await compare(5)
    (problem,) = watch.problems()
    assert problem.startswith(f"engine {served.kind} and the learner of model game disagree on 200 tokens")
    assert "older weights than it says" in problem


START = prompt(7, 30)


def make_trainer(folder: Path) -> Trainer:
    learner = {"learning_rate": 1e-2, "precision": "float32", "device": "cpu"}
    return Trainer(
        folder,
        LearnerSettings.model_validate(learner),
        AlgorithmSettings(),
        engine_dtype="float32",
        is_deterministic=True,
    )


def drawn_sample(draws: Sequence[Draw], member: int) -> Sample:
    logprobs = logprobs_of(draws).tolist()
    return sample_of_rows([(START, ids_of(draws))], logprobs=logprobs, member=member, reward=float(member % 2))


async def learner_and_engine(served: ServedEngine, trainer: Trainer, path: Path) -> tuple[Tensor, Tensor]:
    """[tokens] log-probs by the engine, on the trainer's weights, of what it draws, and the learner's of the same."""
    trainer.engine_weights(path)
    await served.engine.update_weights(served.next_version, path)
    draws = await collect(served.engine, ask("after", START, max_tokens=30, seed=3))
    return logprobs_of(draws), trainer.logprobs([drawn_sample(draws, 0)])[0].double()


async def test_l7_running_generations_recompute_their_cache_and_none_fails(served: ServedEngine, other: Path):
    engine, old = served.engine, served.engine.version
    tasks = [
        asyncio.create_task(collect(engine, ask(str(index), prompt(1, 30 + index), max_tokens=300, seed=index)))
        for index in range(16)
    ]
    while engine.load.num_running < 16:
        await asyncio.sleep(0.001)
    new = await served.serve(other)
    results = await asyncio.gather(*tasks)
    for draws in results:
        versions = versions_of(draws)
        cut = versions.index(new)
        assert 0 < cut < 300 == len(versions)
        assert versions == [old] * cut + [new] * (300 - cut)
    for index in range(0, 16, 5):
        assert_exact_by_version({old: served.base, new: other}, prompt(1, 30 + index), results[index])


def versions_of(draws: Sequence[Draw]) -> list[Version]:
    return [draw.version for draw in draws for _ in draw.ids]


def assert_exact_by_version(folders: Mapping[Version, Path], prompt: Sequence[int], draws: Sequence[Draw]) -> None:
    """Each token has the log-prob that the weights of its version give it after all tokens before it."""
    drawn, logprobs, versions = ids_of(draws), logprobs_of(draws), versions_of(draws)
    for version, places in itertools.groupby(range(len(drawn)), key=versions.__getitem__):
        of_it = list(places)
        start, stop = of_it[0], of_it[-1] + 1
        expected = reference(folders[version], [*prompt, *drawn[:start]], drawn[start:stop])
        assert (logprobs[start:stop] - expected).abs().max() <= TOLERANCE


async def test_a5_calls_that_arrive_while_weights_change_are_all_answered(served: ServedEngine, other: Path):
    async def stream(index: int) -> list[Draw]:
        await asyncio.sleep(0.01 * index)
        return await collect(served.engine, ask(str(index), prompt(index, 20), max_tokens=20, seed=index))

    calls = [asyncio.create_task(stream(index)) for index in range(40)]
    for folder in (other, served.base, other, served.base):
        await served.serve(folder)
    for draws in await asyncio.gather(*calls):
        versions = versions_of(draws)
        assert len(versions) == 20 and versions == sorted(versions)


async def test_a_bad_snapshot_is_refused_and_the_old_weights_serve_on(served: ServedEngine, tmp_path: Path):
    old = served.engine.version
    paths = broken_snapshots(served.base, tmp_path)
    for words, path in paths.items():
        with pytest.raises(EngineError, match=words):
            await served.engine.update_weights(served.next_version, path)
    with pytest.raises(EngineError, match="can not be read"):
        await served.engine.update_weights(served.next_version, tmp_path / "absent.safetensors")
    draws = await collect(served.engine, ask("a", prompt(1, 30)))
    assert {draw.version for draw in draws} == {old} == {served.engine.version}
    assert_exact(served.base, prompt(1, 30), draws)


async def test_an_adapter_for_an_engine_of_whole_weights_is_refused_by_name(served: ServedEngine, tmp_path: Path):
    adapter = make_adapter(served.base, tmp_path / "adapter.safetensors", 1)
    with pytest.raises(EngineError, match=r"adapter\.safetensors is a LoRA adapter, .* the same `lora` settings"):
        await served.engine.update_weights(served.next_version, adapter)
    assert_exact(served.base, prompt(1, 30), await collect(served.engine, ask("a", prompt(1, 30))))


async def test_a5_an_update_that_times_out_raises_and_the_engine_goes_on(served: ServedEngine, other: Path):
    for _ in range(10):
        old = served.engine.version
        try:
            await served.engine.update_weights(served.next_version, other / "model.safetensors", timeout_seconds=0.0)
        except TimeoutError:
            break
        # A small model may be in place before anybody looks at the clock.
        served.serves = other
        await served.restore()
    else:
        pytest.fail("no update timed out")
    draws = await collect(served.engine, ask("a", prompt(1, 30)))
    assert {draw.version for draw in draws} == {old}
    assert_exact(served.base, prompt(1, 30), draws)
    await served.serve(other)
    assert_exact(other, prompt(1, 30), await collect(served.engine, ask("a", prompt(1, 30))))


async def test_an_update_whose_caller_is_cancelled_leaves_one_version_or_the_other(served: ServedEngine, other: Path):
    folders = {served.engine.version: served.base}
    for pause in (0.0, 0.02, 0.1):
        version = served.next_version
        update = asyncio.create_task(served.engine.update_weights(version, other / "model.safetensors"))
        await asyncio.sleep(pause)
        update.cancel()
        await asyncio.wait([update])
        folders[version] = other
        draws = await asyncio.wait_for(collect(served.engine, ask("a", prompt(1, 30), max_tokens=60)), 20)
        # One that goes on by itself may be in place only later: the call then has tokens of both.
        assert_exact_by_version(folders, prompt(1, 30), draws)
    await served.serve(other)
    assert_exact(other, prompt(1, 30), await collect(served.engine, ask("a", prompt(1, 30))))

"""The merging stage: exactly one record for each slot and model, a function of the score."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence

import pytest

from agentjet.actors import merger as merger_module
from agentjet.actors.merger import CALL_WAIT_SECONDS, Merger
from agentjet.bus.handler import PostponeError, consume
from agentjet.bus.memory import MemoryBus
from agentjet.bus.protocol import StoredMessage
from agentjet.bus.record import put, read, stream_specs
from agentjet.errors import MergeError
from agentjet.merging.timeline import merge_episode
from agentjet.schemas import subject
from agentjet.schemas.call import Call, FinishReason, Usage
from agentjet.schemas.episode import Fault
from agentjet.schemas.ids import CallId, GroupId, RunId, SlotId
from agentjet.schemas.sample import Sample, Tombstone, TombstoneReason
from agentjet.schemas.sampling import Sampling
from agentjet.schemas.score import Outcome, Score
from agentjet.schemas.subject import Stream, stream_name
from agentjet.schemas.task import EpisodeKind, Ticket

RUN = RunId("run-aaaaaa")
SLOT = SlotId("guess-0.0")


@pytest.fixture
async def bus() -> AsyncIterator[MemoryBus]:
    bus = MemoryBus()
    for spec in stream_specs(RUN, max_bytes=2**30):
        await bus.ensure_stream(spec)
    yield bus


def ticket(*, offer: int = 0, kind: EpisodeKind = EpisodeKind.TRAIN) -> Ticket:
    return Ticket(
        run=RUN,
        pool="guess",
        group=GroupId("guess-0"),
        member=0,
        offer=offer,
        group_size=2,
        max_offers=2,
        kind=kind,
        models=("a", "b"),
        ranks={"a": 0, "b": 0} if kind is EpisodeKind.TRAIN else {},
        seed=1,
        deadline_seconds=60,
    )


def score(outcome: Outcome = Outcome.SCORED, calls: dict[str, tuple[str, ...]] | None = None, **of) -> Score:
    fault = None if outcome is Outcome.SCORED else Fault(kind="EngineError", message="the engine went away")
    reward = 1.0 if outcome is Outcome.SCORED else None
    return Score(
        run=RUN, ticket=ticket(**of), attempt=7, outcome=outcome, reward=reward, calls=calls or {}, fault=fault
    )


async def put_call(bus: MemoryBus, call: str, model: str = "a", attempt: int = 7, parent: str | None = None) -> None:
    record = Call(
        run=RUN,
        call=CallId(call),
        ticket=ticket().id,
        attempt=attempt,
        model=model,
        engine="e",
        generation="g",
        parent=None if parent is None else CallId(parent),
        prompt_ids=(1, 2, 3),
        completion_ids=(4, 5),
        logprobs=(-1.0, -2.0),
        versions=("1-0",),
        sampling=Sampling(),
        messages=(),
        message={"role": "assistant", "content": "4"},
        finish_reason=FinishReason.STOP,
        usage=Usage(prompt_tokens=3, completion_tokens=2),
    )
    await put(bus, RUN, Stream.CALLS, subject.call(RUN, model, ticket().id, attempt, CallId(call)), record)


async def stored_score(bus: MemoryBus, record: Score) -> StoredMessage:
    to = subject.score(RUN, record.ticket.id)
    await put(bus, RUN, Stream.SCORES, to, record)
    message = await bus.last(stream_name(RUN, Stream.SCORES), to)
    assert message is not None
    return message


async def slot_record(bus: MemoryBus, model: str) -> object:
    message = await bus.last(stream_name(RUN, Stream.SAMPLES), subject.sample(RUN, model, SLOT))
    return None if message is None else await read(bus, RUN, Stream.SAMPLES, message)


async def test_a23_a_model_that_was_never_called_gets_a_tombstone(bus: MemoryBus):
    await put_call(bus, "c1")
    await Merger(bus, RUN).handle(await stored_score(bus, score(calls={"a": ("c1",)})))
    sample, unused = await slot_record(bus, "a"), await slot_record(bus, "b")
    assert isinstance(sample, Sample) and sample.reward == 1.0
    assert isinstance(unused, Tombstone) and unused.reason is TombstoneReason.UNUSED


async def test_a_failure_that_is_offered_again_writes_nothing(bus: MemoryBus):
    await Merger(bus, RUN).handle(await stored_score(bus, score(Outcome.INVALID)))
    assert await slot_record(bus, "a") is None


@pytest.mark.parametrize("outcome", [Outcome.INVALID, Outcome.ABORTED])
async def test_a_failure_of_the_last_offer_closes_the_slot(bus: MemoryBus, outcome: Outcome):
    await Merger(bus, RUN).handle(await stored_score(bus, score(outcome, offer=1)))
    for model in ("a", "b"):
        record = await slot_record(bus, model)
        assert isinstance(record, Tombstone) and record.reason is TombstoneReason.DEAD
        assert record.detail == "the engine went away"


async def test_a_dead_ticket_closes_the_slot_at_any_offer(bus: MemoryBus):
    await Merger(bus, RUN).handle(await stored_score(bus, score(Outcome.DEAD)))
    assert isinstance(await slot_record(bus, "a"), Tombstone)


async def test_an_evaluation_reaches_no_learner(bus: MemoryBus):
    await put_call(bus, "c1")
    await Merger(bus, RUN).handle(await stored_score(bus, score(calls={"a": ("c1",)}, kind=EpisodeKind.EVAL)))
    assert await slot_record(bus, "a") is None


async def test_handling_a_score_again_changes_nothing(bus: MemoryBus):
    await put_call(bus, "c1")
    message = await stored_score(bus, score(calls={"a": ("c1",)}))
    await Merger(bus, RUN).handle(message)
    await Merger(bus, RUN).handle(message)
    info = await bus.stream_info(stream_name(RUN, Stream.SAMPLES))
    assert info.num_messages == 2


async def test_t8_only_the_ending_attempt_s_calls_are_merged(bus: MemoryBus):
    await put_call(bus, "old", attempt=3)
    await put_call(bus, "new")
    await Merger(bus, RUN).handle(await stored_score(bus, score(calls={"a": ("new",)})))
    sample = await slot_record(bus, "a")
    assert isinstance(sample, Sample) and [call.call for call in sample.calls] == ["new"]


async def test_a_parent_that_the_end_does_not_name_still_rebuilds_the_prompt(bus: MemoryBus):
    await put_call(bus, "unanswered")
    await put_call(bus, "c2", parent="unanswered")
    await Merger(bus, RUN).handle(await stored_score(bus, score(calls={"a": ("c2",)})))
    sample = await slot_record(bus, "a")
    assert isinstance(sample, Sample) and [call.call for call in sample.calls] == ["c2"]
    assert sample.segments[0].ids == (1, 2, 3, 4, 5, 1, 2, 3, 4, 5)


@pytest.mark.parametrize("inline_tokens", [0, 1_000])
async def test_a_large_episode_is_merged_in_a_thread_and_a_small_one_at_once(
    bus: MemoryBus, monkeypatch: pytest.MonkeyPatch, inline_tokens: int
):
    threads: list[bool] = []

    def merge(*args: object, **options: object) -> Sample:
        threads.append(threading.current_thread() is not threading.main_thread())
        return merge_episode(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(merger_module, "INLINE_TOKENS", inline_tokens)
    monkeypatch.setattr(merger_module, "merge_episode", merge)
    await put_call(bus, "c1")
    await Merger(bus, RUN).handle(await stored_score(bus, score(calls={"a": ("c1",)})))
    assert threads == [inline_tokens == 0]


async def test_a_call_that_is_not_stored_yet_is_waited_for(bus: MemoryBus):
    message, stage = await stored_score(bus, score(calls={"a": ("c1",)})), Merger(bus, RUN)
    with pytest.raises(PostponeError, match="1 calls are not stored"):
        await stage.handle(message)
    await put_call(bus, "c1")
    await stage.handle(message)
    assert isinstance(await slot_record(bus, "a"), Sample)


async def test_a_call_that_is_never_stored_is_waited_for_once_though_the_other_models_calls_are_there(
    bus: MemoryBus, monkeypatch: pytest.MonkeyPatch
):
    """What model a has must not start the clock of model b anew, or the slot would stay open for ever."""
    now = [100.0]
    monkeypatch.setattr(merger_module.time, "monotonic", lambda: now[0])
    await put_call(bus, "c1")
    message = await stored_score(bus, score(calls={"a": ("c1",), "b": ("c2",)}))
    stage = Merger(bus, RUN)
    for seconds in (0.0, CALL_WAIT_SECONDS - 1.0):
        now[0] = 100.0 + seconds
        with pytest.raises(PostponeError):
            await stage.handle(message)
    now[0] = 100.0 + CALL_WAIT_SECONDS + 1.0
    with pytest.raises(MergeError, match="c2 is missing"):
        await stage.handle(message)


async def test_only_named_calls_are_read_unless_a_parent_is_missing(bus: MemoryBus, monkeypatch: pytest.MonkeyPatch):
    """Whoever reads all calls of an attempt reads those of a runaway agent with them."""
    read_many, asked = bus.last_many, list[list[str]]()

    async def last_many(stream: str, subjects: Sequence[str]) -> dict[str, StoredMessage]:
        asked.append(list(subjects))
        return await read_many(stream, subjects)

    monkeypatch.setattr(bus, "last_many", last_many)
    for call, parent in (("c1", None), ("c2", "c1"), ("unnamed", None)):
        await put_call(bus, call, parent=parent)
    await Merger(bus, RUN).handle(await stored_score(bus, score(calls={"a": ("c1", "c2")})))
    assert asked == [[subject.call(RUN, "a", ticket().id, 7, CallId(call)) for call in ("c1", "c2")]]


async def test_a22_a_score_that_crashes_the_merger_every_time_closes_its_slots(
    bus: MemoryBus, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(merger_module, "CALL_WAIT_SECONDS", 0.0)
    await stored_score(bus, score(calls={"a": ("never stored",)}))
    stage = Merger(bus, RUN)
    consumer = await bus.consumer(stream_name(RUN, Stream.SCORES), "merger")
    task = asyncio.ensure_future(
        consume(consumer, stage.handle, name="merger", on_poison=stage.poison, backoff_seconds=0.01)
    )
    async with asyncio.timeout(10):
        while await slot_record(bus, "b") is None:
            await asyncio.sleep(0.02)
    task.cancel()
    record = await slot_record(bus, "a")
    assert isinstance(record, Tombstone) and record.reason is TombstoneReason.POISON
    assert "never stored" in record.detail

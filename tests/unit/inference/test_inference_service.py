"""The inference service with a scripted engine on the memory bus."""

import asyncio
import threading
import time

import pytest
from chat_models import QWEN, RUN, assistant, user
from scripted_engine import ScriptedEngine
from small_swarm import SECRET, SmallSwarm, collect

from agentjet.accounting.key import Key, sign
from agentjet.bus.memory import MemoryBus
from agentjet.chat.history import History
from agentjet.chat.template import ChatTemplate
from agentjet.errors import EngineEndedError, EngineError
from agentjet.inference import history
from agentjet.inference.override import effective_sampling
from agentjet.schemas import subject
from agentjet.schemas.call import FinishReason, ForkCause, ToolChoice
from agentjet.schemas.ids import GroupId, TicketId, Version, new_call_id
from agentjet.schemas.sampling import Sampling
from agentjet.schemas.subject import Stream, stream_name
from agentjet.schemas.task import EpisodeKind, Ticket

ADD = {"type": "function", "function": {"name": "add"}}


@pytest.fixture
async def swarm(memory_bus: MemoryBus):
    async with SmallSwarm(memory_bus).running() as swarm:
        yield swarm


async def test_a_call_is_stored_as_sampled_and_replied_as_stored(swarm):
    key = await swarm.claim()
    _, reply = await swarm.ask(swarm.request(key, [user("q")]))
    (call,) = await swarm.calls()
    assert reply.error is None
    assert reply.message == call.message == {"role": "assistant", "content": "hi"}
    assert call.completion_ids == (*swarm.chat.encode("hi"), swarm.chat.end)
    assert call.logprobs == (-0.5,) * len(call.completion_ids)
    assert (call.versions, call.version_starts) == (("0-0",), (0,))
    assert call.finish_reason is FinishReason.STOP
    assert call.usage.completion_tokens == len(call.completion_ids)
    assert call.usage.cached_tokens == 3


async def test_t9_linear_turns_store_increments_that_rebuild_the_prompt(swarm):
    key = await swarm.claim()
    messages = []
    for question in ("a", "b", "c", "d"):
        messages.append(user(question))
        _, reply = await swarm.ask(swarm.request(key, messages))
        messages.append(reply.message)
    calls = await swarm.calls()
    whole = ()
    for call, generation in zip(calls, swarm.engine.generations, strict=True):
        whole += call.prompt_ids
        assert tuple(generation.prompt_ids) == whole
        whole += call.completion_ids
    assert [call.fork for call in calls] == [ForkCause.FIRST, *[ForkCause.NONE] * 3]
    assert [len(call.messages) for call in calls] == [1] * 4
    assert calls[3].parent == calls[2].call


async def test_a_restarted_service_reads_histories_back_from_calls(swarm):
    key = await swarm.claim()
    await swarm.ask(swarm.request(key, [user("a")]))
    other = swarm.new_service(engine_name="other")
    message = await _stored(swarm, swarm.request(key, [user("a"), assistant("hi"), user("b")]))
    await other.handle(message)
    assert (await swarm.calls())[1].fork is ForkCause.NONE


async def test_a_reply_of_another_engine_is_found_before_forking(swarm):
    key = await swarm.claim()
    other = swarm.new_service(engine_name="other")
    await other.handle(await _stored(swarm, swarm.request(key, [user("z")])))  # its history of the attempt is loaded
    await swarm.ask(swarm.request(key, [user("a")]))
    await other.handle(await _stored(swarm, swarm.request(key, [user("a"), assistant("hi"), user("b")])))
    assert (await swarm.calls())[-1].fork is ForkCause.NONE


async def _stored(swarm, request):
    """The request as it stands in INFER, taken from under the running service's consumer."""
    where = subject.infer(RUN, request.model, "nobody")
    from agentjet.bus import record

    sequence = await record.put(swarm.bus, RUN, Stream.INFER, where, request, reply="nowhere")
    return await swarm.bus.get(stream_name(RUN, Stream.INFER), sequence)


async def test_an_engine_that_has_ended_leaves_its_calls_to_another(swarm):
    """It would be the fastest to answer, with nothing but errors, until its process is gone."""
    whole = ScriptedEngine(swarm.chat, "from the other one")

    async def ended(generation):
        raise EngineEndedError("one of its processes died")
        yield

    swarm.engine.generate = ended
    key = await swarm.claim()
    asking = asyncio.create_task(swarm.ask(swarm.request(key, [user("q")])))
    await asyncio.sleep(0.2)
    assert not asking.done()
    swarm.engine.generate = whole.generate
    _, reply = await asyncio.wait_for(asking, 10)
    assert reply.message["content"] == "from the other one"


async def test_a_call_that_an_engine_had_begun_when_it_ended_is_told_so(swarm):
    def die(index: int) -> None:
        if index == 1:
            raise EngineEndedError("one of its processes died")

    swarm.engine.on_draw = die
    _, reply = await swarm.ask(swarm.request(await swarm.claim(), [user("q")]))
    assert (reply.error.status, reply.error.code) == (503, "engine_error")


async def test_deltas_join_to_the_content_and_name_one_generation(swarm):
    swarm.engine.reply = "low é 中 hi"
    key = await swarm.claim()
    deltas, reply = await swarm.ask(swarm.request(key, [user("q")], stream=True))
    assert "".join(delta.text for delta in deltas) == reply.message["content"] == "low é 中 hi"
    assert {delta.generation for delta in deltas} == {reply.generation}
    assert [delta.index for delta in deltas] == sorted({delta.index for delta in deltas})


async def test_thinking_and_arguments_stream_apart(memory_bus):
    text = '<think>\nhm\n</think>\n\nok\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    async with SmallSwarm(memory_bus, text, template=QWEN).running() as swarm:
        request = swarm.request(await swarm.claim(), [user("q")], tools=(ADD,), stream=True)
        deltas, reply = await swarm.ask(request)
    pieces = [piece for delta in deltas for piece in delta.tool_calls]
    assert reply.message["reasoning_content"] == "".join(delta.reasoning for delta in deltas) == "hm"
    assert reply.message["content"] == "".join(delta.text for delta in deltas) == "ok"
    assert (pieces[0].id, pieces[0].name) == (f"call_{request.call}_0", "add")
    assert len(pieces) > 2, "arguments come as they are drawn"
    assert "".join(piece.arguments for piece in pieces) == '{"a": 1}'


async def test_l13_a_required_call_begins_in_the_prompt_and_is_drawn_freely(memory_bus):
    async with SmallSwarm(memory_bus, '{"a": 1}}\n</tool_call>', template=QWEN).running() as swarm:
        key = await swarm.claim()
        request = swarm.request(key, [user("q")], tools=(ADD,), tool_choice=ToolChoice.REQUIRED, tool_name="add")
        _, reply = await swarm.ask(request)
        _, count = await swarm.ask(request.model_copy(update={"call": new_call_id(), "only_counts": True}))
        assert count.usage.prompt_tokens == reply.usage.prompt_tokens
        assert swarm.engine.prompt_text().endswith('<tool_call>\n{"name": "add", "arguments": ')
        assert reply.finish_reason is FinishReason.TOOL_CALLS
        assert reply.message["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
        swarm.engine.reply = "hi"
        result = {"role": "tool", "content": "1", "tool_call_id": reply.message["tool_calls"][0]["id"]}
        await swarm.ask(swarm.request(key, [user("q"), reply.message, result], tools=(ADD,)))
        first, second = await swarm.calls()
    assert (second.parent, second.fork) == (first.call, ForkCause.NONE)


async def test_the_first_delta_alone_tells_the_counts_of_the_prompt(swarm):
    deltas, reply = await swarm.ask(swarm.request(await swarm.claim(), [user("q")], stream=True))
    (first,) = [delta.usage for delta in deltas if delta.usage is not None]
    assert deltas[0].usage == first
    assert (first.prompt_tokens, first.cached_tokens) == (reply.usage.prompt_tokens, reply.usage.cached_tokens)


async def test_a_count_is_that_of_the_prompt_and_stores_nothing(swarm):
    key = await swarm.claim()
    _, reply = await swarm.ask(swarm.request(key, [user("q")], only_counts=True))
    assert (await swarm.calls(), swarm.engine.generations) == ([], [])
    _, whole = await swarm.ask(swarm.request(key, [user("q")]))
    assert reply.usage.prompt_tokens == whole.usage.prompt_tokens
    assert reply.usage.completion_tokens == 0


async def test_a_count_waits_for_no_weights(memory_bus):
    swarm = SmallSwarm(memory_bus)
    swarm.service = swarm.new_service(admit=asyncio.Event().wait)
    async with swarm.running():
        _, reply = await swarm.ask(swarm.request(await swarm.claim(), [user("q")], only_counts=True))
    assert reply.usage.prompt_tokens > 0


async def test_tool_calls_are_parsed(memory_bus):
    text = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    async with SmallSwarm(memory_bus, text, template=QWEN).running() as swarm:
        _, reply = await swarm.ask(swarm.request(await swarm.claim(), [user("q")], tools=(ADD,)))
    assert reply.finish_reason is FinishReason.TOOL_CALLS
    assert reply.message["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}


async def test_a10_malformed_tool_json_passes_through(memory_bus):
    async with SmallSwarm(memory_bus, '<tool_call>{"a": 1,', template=QWEN).running() as swarm:
        _, reply = await swarm.ask(swarm.request(await swarm.claim(), [user("q")], tools=(ADD,), stream=True))
        (call,) = await swarm.calls()
    assert reply.message["content"] == '<tool_call>{"a": 1,'
    assert call.completion_ids[:-1] == swarm.chat.encode('<tool_call>{"a": 1,')


@pytest.mark.parametrize("key", ["aj-x.y", "", sign(b"x" * 32, Key(RUN, "g-0.0.0", 1, 2e9))])
async def test_a_forged_key_is_refused(swarm, key):
    await swarm.claim()
    _, reply = await swarm.ask(swarm.request(key, [user("q")]))
    assert (reply.error.status, reply.error.code) == (401, "invalid_api_key")
    assert not await swarm.calls()


async def test_a_key_of_another_run_is_refused_by_name(swarm):
    key = sign(SECRET, Key("other-bbbbbb", "g-0.0.0", 1, 2e9))
    _, reply = await swarm.ask(swarm.request(key, [user("q")]))
    assert (reply.error.status, reply.error.code) == (403, "foreign_key")
    assert "other-bbbbbb" in reply.error.message


async def test_an_older_attempt_is_superseded(swarm):
    old = await swarm.claim()
    await swarm.claim()
    _, reply = await swarm.ask(swarm.request(old, [user("q")]))
    assert (reply.error.status, reply.error.code) == (409, "superseded")


async def test_t8_a_new_attempt_holds_only_its_own_calls(swarm):
    await swarm.ask(swarm.request(await swarm.claim(), [user("a")]))
    new = await swarm.claim()
    await asyncio.sleep(0)
    _, reply = await swarm.ask(swarm.request(new, [user("a"), assistant("hi"), user("b")]))
    assert reply.error is None
    assert (await swarm.calls())[1].parent is None


async def test_l9_another_model_is_refused_with_the_served_names(swarm):
    request = swarm.request(await swarm.claim(), [user("q")], model="gpt")
    inbox = await swarm.bus.subscribe("here")
    message = await _stored(swarm, request)
    await swarm.service.handle(_with_inbox(message, "here"))
    _, reply = await collect(inbox)
    assert (reply.error.status, reply.error.code, reply.error.param) == (404, "model_not_found", "model")
    assert "one of: m" in reply.error.message


def _with_inbox(message, inbox):
    from dataclasses import replace

    return replace(message, headers={**message.headers, "AJ-Reply": inbox})


async def test_a_prompt_over_the_context_is_a_named_error(memory_bus):
    async with SmallSwarm(memory_bus, context_length=20).running() as swarm:
        _, reply = await swarm.ask(swarm.request(await swarm.claim(), [user("a long question" * 3)]))
    assert (reply.error.status, reply.error.code) == (400, "context_length_exceeded")


async def test_n1_a_reply_that_meets_the_context_ends_with_length(memory_bus):
    async with SmallSwarm(memory_bus, "a" * 50, context_length=50).running() as swarm:
        _, reply = await swarm.ask(swarm.request(await swarm.claim(), [user("q")]))
    assert reply.finish_reason is FinishReason.LENGTH
    assert reply.usage.prompt_tokens + reply.usage.completion_tokens == 50


async def test_a1_a_failing_engine_is_an_error_and_no_call(swarm):
    def fail(prompt):
        raise EngineError("out of memory")

    swarm.engine.reply = fail
    _, reply = await swarm.ask(swarm.request(await swarm.claim(), [user("q")]))
    assert (reply.error.status, reply.error.code) == (503, "engine_error")
    assert not await swarm.calls()
    assert swarm.service.metrics()["num_failed_engine_error"] == 1


async def test_a_crash_is_tried_again_and_then_answered(swarm):
    tries = []

    def crash(prompt):
        tries.append(prompt)
        raise ZeroDivisionError("defect")

    swarm.engine.reply = crash
    _, reply = await swarm.ask(swarm.request(await swarm.claim(), [user("q")]))
    assert len(tries) == 3
    assert reply.error.status == 503
    assert "defect" in reply.error.message


async def test_a_duplicate_in_flight_joins_the_generation(swarm):
    swarm.engine.go.clear()
    request = swarm.request(await swarm.claim(), [user("q")])
    first, second = await swarm.bus.subscribe("one"), await swarm.bus.subscribe("two")
    await swarm.post(request, "one")
    await _until(lambda: swarm.engine.generations)
    await swarm.post(request, "two")
    await asyncio.sleep(0.02)
    swarm.engine.go.set()
    replies = [(await collect(inbox))[1] for inbox in (first, second)]
    assert replies[0] == replies[1]
    assert len(swarm.engine.generations) == 1


async def test_a_duplicate_of_a_stored_call_gets_what_is_stored(swarm):
    request = swarm.request(await swarm.claim(), [user("q")])
    _, first = await swarm.ask(request)
    swarm.engine.reply = "other"
    _, again = await swarm.ask(request)
    assert again == first
    assert len(swarm.engine.generations) == 1
    swarm.service = swarm.new_service()  # and after a restart, from CALLS
    inbox = await swarm.bus.subscribe("there")
    await swarm.service.handle(_with_inbox(await _stored(swarm, request), "there"))
    assert (await collect(inbox))[1] == first
    assert len(swarm.engine.generations) == 1


async def test_two_equal_requests_are_two_samples(swarm):
    key = await swarm.claim()
    await asyncio.gather(*(swarm.ask(swarm.request(key, [user("q")])) for _ in range(2)))
    assert len(await swarm.calls()) == 2


async def test_a_cancel_ends_the_generation_and_keeps_what_was_drawn(swarm):
    swarm.engine.go.clear()
    request = swarm.request(await swarm.claim(), [user("q")])
    await swarm.post(request, "nowhere")
    await _until(lambda: swarm.engine.generations)
    await asyncio.sleep(0.01)
    await swarm.bus.send(subject.cancel(RUN, request.call), b"")
    await _until(lambda: swarm.engine.num_closed)
    await asyncio.sleep(0.01)
    (call,) = await swarm.calls()
    assert call.finish_reason is FinishReason.CANCELLED
    assert len(call.completion_ids) == 1


async def test_a_cancel_that_comes_first_drops_the_request(swarm):
    request = swarm.request(await swarm.claim(), [user("q")])
    await swarm.bus.send(subject.cancel(RUN, request.call), b"")
    await asyncio.sleep(0.01)
    await swarm.post(request, "nowhere")
    await _until(lambda: swarm.service.metrics().get("num_dropped"))
    assert not swarm.engine.generations


async def test_an_expired_request_is_dropped(swarm):
    request = swarm.request(await swarm.claim(), [user("q")], deadline=1.0)
    await swarm.post(request, "nowhere")
    await _until(lambda: swarm.service.metrics().get("num_dropped"))
    assert not swarm.engine.generations


async def test_versions_that_change_in_flight_are_kept_per_token(swarm):
    def update(index):
        if index == 1:
            swarm.engine.version = Version(0, 1)

    swarm.engine.reply, swarm.engine.on_draw = "low 12", update
    _, reply = await swarm.ask(swarm.request(await swarm.claim(), [user("q")]))
    (call,) = await swarm.calls()
    assert (call.versions, call.version_starts, call.is_mixed) == (("0-0", "0-1"), (0, 1), ())
    assert reply.version == "0-1"


async def test_tokens_drawn_with_keys_of_older_weights_are_told_apart(swarm):
    swarm.engine.reply, swarm.engine.is_mixed = "low 12", lambda index: index == 1
    await swarm.ask(swarm.request(await swarm.claim(), [user("q")]))
    (call,) = await swarm.calls()
    assert (call.versions, call.version_starts) == (("0-0", "0-0", "0-0"), (0, 1, 2))
    assert call.is_mixed == (False, True, False)


async def test_a_pinned_call_whose_adapter_is_no_longer_the_newest_goes_on(swarm):
    def update(index):
        swarm.engine.version = Version(0, index)

    swarm.engine.reply, swarm.engine.on_draw, swarm.engine.keeps_version = "low 12", update, True
    key = await swarm.claim(kind=EpisodeKind.EVAL, pins={"m": "0-0"})
    _, reply = await swarm.ask(swarm.request(key, [user("q")]))
    assert (reply.error, reply.version) == (None, "0-0")


async def test_a_pinned_call_waits_for_its_version(swarm):
    key = await swarm.claim(kind=EpisodeKind.EVAL, pins={"m": "0-2"})
    asked = asyncio.create_task(swarm.ask(swarm.request(key, [user("q")])))
    await asyncio.sleep(0.02)
    assert not swarm.engine.generations
    swarm.engine.version = Version(0, 2)
    swarm.service.weights_changed()
    _, reply = await asked
    assert reply.version == "0-2"


async def test_a_pin_that_the_engine_has_passed_is_unavailable(swarm):
    swarm.engine.version = Version(0, 3)
    key = await swarm.claim(kind=EpisodeKind.EVAL, pins={"m": "0-2"})
    _, reply = await swarm.ask(swarm.request(key, [user("q")]))
    assert (reply.error.status, reply.error.code) == (503, "version_unavailable")


async def test_weights_that_change_under_a_pinned_call_void_it(swarm):
    def update(index):
        swarm.engine.version = Version(0, index)

    swarm.engine.on_draw = update
    key = await swarm.claim(kind=EpisodeKind.EVAL, pins={"m": "0-0"})
    _, reply = await swarm.ask(swarm.request(key, [user("q")]))
    assert reply.error.code == "version_unavailable"
    assert not await swarm.calls()


async def test_a_pin_is_answered_by_its_weights_whatever_a_learner_that_started_again_calls_them(memory_bus):
    swarm = SmallSwarm(memory_bus)
    same = {Version(1, 5), Version(2, 5)}
    swarm.service = swarm.new_service(is_same=lambda one, other: one == other or {one, other} == same)
    async with swarm.running():
        swarm.engine.version = Version(2, 5)
        key = await swarm.claim(kind=EpisodeKind.EVAL, pins={"m": "1-5"})
        assert (await swarm.ask(swarm.request(key, [user("q")])))[1].version == "2-5"
        swarm.engine.version = Version(1, 5)
        key = await swarm.claim(member=1, kind=EpisodeKind.EVAL, pins={"m": "2-5"})
        assert (await swarm.ask(swarm.request(key, [user("q")])))[1].version == "1-5"

        def update(index):
            swarm.engine.version = Version(1 + index, 5)

        swarm.engine.reply, swarm.engine.on_draw = "low 12", update
        key = await swarm.claim(member=2, kind=EpisodeKind.EVAL, pins={"m": "1-5"})
        _, reply = await swarm.ask(swarm.request(key, [user("q")]))
        assert (reply.error.code, reply.error.message[:40]) == (
            "version_unavailable",
            "the weights changed from 1-5 to 3-5 unde",
        )


async def test_new_generations_wait_for_the_hook(memory_bus):
    opened = asyncio.Event()
    swarm = SmallSwarm(memory_bus)
    swarm.service = swarm.new_service(admit=opened.wait)
    async with swarm.running():
        asked = asyncio.create_task(swarm.ask(swarm.request(await swarm.claim(), [user("q")])))
        await asyncio.sleep(0.02)
        assert not swarm.engine.generations
        assert swarm.service.metrics()["num_waiting"] == 1
        opened.set()
        assert (await asked)[1].error is None


async def test_overridden_sampling_is_what_the_engine_gets_and_is_reported(swarm):
    sampling = Sampling(temperature=0.6, top_p=0.5, top_k=2, max_tokens=5)
    given = ("temperature", "top_p", "top_k", "max_tokens")
    request = swarm.request(await swarm.claim(), [user("q")], sampling=sampling, given=given)
    _, reply = await swarm.ask(request)
    assert swarm.engine.generations[0].sampling == Sampling(temperature=0.6, max_tokens=5)
    assert reply.overridden == ("top_p", "top_k")


async def test_log_prob_tokens_are_sent_when_asked_for(swarm):
    key = await swarm.claim()
    _, reply = await swarm.ask(swarm.request(key, [user("q")], num_logprobs=0))
    assert "".join(reply.tokens) == "hi<|im_end|>"
    _, plain = await swarm.ask(swarm.request(key, [user("q")]))
    assert plain.tokens == ()


async def test_l12_a_stop_string_ends_inside_the_text_and_all_ids_are_kept(swarm):
    swarm.engine.reply = "low STOP 12"
    key = await swarm.claim()
    request = swarm.request(key, [user("q")], sampling=Sampling(stop=("STOP",)), stream=True)
    deltas, reply = await swarm.ask(request.model_copy(update={"given": ("stop",)}))
    assert reply.stop_string == "STOP"
    (call,) = await swarm.calls()
    assert reply.message["content"] == "low "
    assert "".join(delta.text for delta in deltas) == "low "
    assert call.completion_ids == swarm.chat.encode("low STOP")
    await swarm.ask(swarm.request(key, [user("q"), reply.message, user("b")]))
    assert (await swarm.calls())[1].fork is ForkCause.STOP_STRING


def ticket(**fields):
    defaults = {"run": RUN, "pool": "g", "group": GroupId("g-0"), "member": 0, "group_size": 2, "models": ("m",)}
    return Ticket(**defaults | {"seed": 7, "deadline_seconds": 1.0} | fields)


def test_l3_greedy_becomes_sampling_at_the_tickets_temperature():
    pool = ticket(sampling=Sampling(temperature=0.8, max_tokens=9))
    sampling, overridden = effective_sampling(Sampling(temperature=0.0), pool, given=("temperature",))
    assert (sampling, overridden) == (Sampling(temperature=0.8, max_tokens=9), ("temperature",))


def test_what_the_caller_leaves_open_is_the_tickets():
    pool = ticket(sampling=Sampling(temperature=0.8, max_tokens=9, stop=("x",)))
    assert effective_sampling(Sampling(), pool, given=()) == (pool.sampling, ())


def test_an_evaluation_is_drawn_as_the_ticket_says_from_its_seed():
    exam = ticket(kind=EpisodeKind.EVAL, sampling=Sampling(temperature=0.0))
    asked = Sampling(temperature=1.0, max_tokens=3)
    sampling, overridden = effective_sampling(asked, exam, given=("temperature", "max_tokens"))
    again, _ = effective_sampling(asked, exam, given=("temperature", "max_tokens"))
    later, _ = effective_sampling(asked, exam, given=(), num_calls_before=1)
    assert (sampling.temperature, sampling.max_tokens, overridden) == (0.0, 3, ("temperature",))
    assert sampling.seed == again.seed != later.seed


@pytest.mark.parametrize("kind", EpisodeKind)
def test_a_model_that_the_ticket_does_not_play_draws_as_it_was_asked_to(kind):
    asked, pool = Sampling(temperature=0.0, top_p=0.5, top_k=3), ticket(kind=kind, sampling=Sampling(max_tokens=9))
    given = ("temperature", "top_p", "top_k")
    sampling, overridden = effective_sampling(asked, pool, is_played=False, given=given)
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.0, 0.5, 3)
    assert (sampling.max_tokens, overridden) == (9, ())


def test_members_of_a_group_do_not_share_draws():
    seeds = {effective_sampling(Sampling(seed=7), ticket(member=member))[0].seed for member in (0, 1)}
    assert len(seeds) == 2
    assert effective_sampling(Sampling(), ticket())[0].seed is None


async def test_a_broken_message_is_dropped_at_last(swarm):
    where = subject.infer(RUN, "m")
    await swarm.bus.publish(
        where, b"junk", stream=stream_name(RUN, Stream.INFER), headers={"AJ-Schema": "infer_request/1.0"}
    )
    async with asyncio.timeout(15.0):
        while (await swarm.bus.stream_info(stream_name(RUN, Stream.INFER))).num_messages:
            await asyncio.sleep(0.05)
    _, reply = await swarm.ask(swarm.request(await swarm.claim(), [user("q")], call=new_call_id()))
    assert reply.error is None


async def _until(is_true, seconds=15.0):
    async with asyncio.timeout(seconds):
        while not is_true():
            await asyncio.sleep(0.005)


async def test_a_reply_carries_log_probs_only_where_they_are_asked_for(swarm):
    key = await swarm.claim()
    _, plain = await swarm.ask(swarm.request(key, [user("q")]))
    _, full = await swarm.ask(swarm.request(key, [user("q")], num_logprobs=0))
    assert (plain.completion_ids, plain.logprobs, plain.tokens) == ((), (), ())
    assert len(full.completion_ids) == len(full.logprobs) == len(full.tokens) == full.usage.completion_tokens


async def test_a_reply_that_fits_no_message_is_refused_at_once_and_says_why():
    async with SmallSwarm(MemoryBus(max_payload_bytes=2_000), "low " * 100, context_length=4096).running() as swarm:
        key = await swarm.claim()
        _, refused = await swarm.ask(swarm.request(key, [user("q")], num_logprobs=0))
        _, reply = await swarm.ask(swarm.request(key, [user("q")]))
    assert refused.error is not None
    assert (refused.error.status, refused.error.code, refused.error.param) == (400, "reply_too_large", "logprobs")
    assert reply.message["content"].startswith("low low")


@pytest.mark.parametrize("content", ["low " * 5_000, [{"type": "text", "text": "low " * 5_000}]])
async def test_a_long_prompt_does_not_hold_up_the_loop(memory_bus, monkeypatch, content):
    render = History.prompt_for

    def slow(*args, **options):
        time.sleep(0.3)
        return render(*args, **options)

    monkeypatch.setattr(History, "prompt_for", slow)
    async with SmallSwarm(memory_bus, context_length=50_000).running() as swarm:
        key, gaps = await swarm.claim(), []

        async def tick():
            while True:
                began = time.monotonic()
                await asyncio.sleep(0.01)
                gaps.append(time.monotonic() - began)

        ticking = asyncio.create_task(tick())
        _, reply = await swarm.ask(swarm.request(key, [{"role": "user", "content": content}]))
        ticking.cancel()
    assert reply.message["content"] == "hi"
    assert max(gaps) < 0.25


async def test_what_is_read_back_is_read_once_and_rendered_beside_the_loop(swarm, monkeypatch):
    key, messages = await swarm.claim(), [user("0")]
    for turn in range(3):
        _, reply = await swarm.ask(swarm.request(key, messages))
        messages += [reply.message, user(str(turn))]
    added, add = list[str](), History.add
    rendered, render = list[bool](), ChatTemplate.render

    def adding(history, call, **options):
        added.append(call.call)
        add(history, call, **options)

    def rendering(template, *args, **options):
        rendered.append(threading.current_thread() is threading.main_thread())
        return render(template, *args, **options)

    monkeypatch.setattr(History, "add", adding)
    monkeypatch.setattr(ChatTemplate, "render", rendering)
    monkeypatch.setattr(history, "_LONG_CHARS", 1)
    histories = swarm.service._histories
    histories._entries.clear()  # as after a restart
    await swarm.ask(swarm.request(key, messages))
    assert added == [call.call for call in await swarm.calls()]
    assert rendered
    assert not any(rendered)
    await histories.prompt(TicketId("g-0.0.0"), 1, [*messages, {"role": "assistant", "content": "new"}])
    assert len(added) == 4

"""What a streamed reply lacks at its end, and what can not be continued."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentjet.gateway.fault import ApiError
from agentjet.gateway.progress import Progress
from agentjet.schemas.call import InferDelta, InferReply, ToolCallDelta
from agentjet.schemas.ids import CallId

CALL = CallId("c")


def delta(text="", *, generation="g", index=0, **fields):
    return InferDelta(call=CALL, generation=generation, index=index, text=text, **fields)


def reply(content="", *, generation="g", reasoning="", calls=()):
    tools = [{"id": f"t{i}", "function": {"name": name, "arguments": said}} for i, (name, said) in enumerate(calls)]
    message = {"role": "assistant", "content": content, "reasoning_content": reasoning, "tool_calls": tools}
    return InferReply(call=CALL, generation=generation, message=message)


def joined(deltas):
    calls = {}
    for piece in (piece for one in deltas for piece in one.tool_calls):
        name, said = calls.get(piece.index, ("", ""))
        calls[piece.index] = (name + piece.name, said + piece.arguments)
    return "".join(one.reasoning for one in deltas), "".join(one.text for one in deltas), tuple(calls.values())


@given(
    st.text(max_size=8),
    st.text(max_size=8),
    st.lists(st.tuples(st.sampled_from(["add", "look"]), st.text(max_size=8)), max_size=3),
    st.data(),
)
def test_whatever_part_arrived_the_reply_brings_the_rest(thought, text, calls, data):
    sent = [
        delta(reasoning=thought[: data.draw(st.integers(0, len(thought)))]),
        delta(text[: data.draw(st.integers(0, len(text)))]),
    ]
    for index, (name, said) in enumerate(calls[: data.draw(st.integers(0, len(calls)))]):
        part = said[: data.draw(st.integers(0, len(said)))]
        piece = ToolCallDelta(index=index, id=f"t{index}", name=name, arguments=part)
        sent.append(delta(tool_calls=(piece,)))
    progress = Progress()
    out = [progress.take(one) for one in sent]
    out.append(progress.take(reply(text, reasoning=thought, calls=calls)))
    assert joined(out) == (thought, text, tuple(calls))


def test_two_generations_are_never_spliced():
    progress = Progress()
    progress.take(delta("he"))
    with pytest.raises(ApiError, match="the engine was lost"):
        progress.take(delta("llo", generation="other"))


def test_another_generation_may_begin_while_nothing_was_sent():
    progress = Progress()
    progress.take(delta(""))
    assert progress.take(delta("hello", generation="other")).text == "hello"


def test_who_comes_late_gets_all_of_it_at_the_end():
    progress = Progress()
    late = [progress.take(delta("llo", index=2)), progress.take(delta(" you", index=5))]
    assert joined(late) == ("", "", ())
    assert progress.take(reply("hello you")).text == "hello you"


def test_who_came_late_gets_the_next_generation_from_its_beginning():
    progress = Progress()
    progress.take(delta("llo", index=2))
    assert progress.take(delta("he", generation="other")).text == "he"


@pytest.mark.parametrize(
    ("sent", "whole"),
    [
        (delta("he"), reply("ha")),
        (delta(reasoning="he"), reply("he")),
        (delta(tool_calls=(ToolCallDelta(index=0, id="t0", name="add", arguments="{"),)), reply("he")),
        (delta(tool_calls=(ToolCallDelta(index=0, id="t0", name="add", arguments="["),)), reply(calls=[("add", "{}")])),
    ],
)
def test_a_reply_that_does_not_begin_with_what_was_sent_is_an_error(sent, whole):
    progress = Progress()
    progress.take(sent)
    with pytest.raises(ApiError, match="not the one that was streamed"):
        progress.take(whole)


@pytest.mark.parametrize("piece", [ToolCallDelta(index=1, id="t1", name="add"), ToolCallDelta(index=0, arguments="}")])
def test_a_lost_piece_of_a_tool_call_is_noticed(piece):
    with pytest.raises(ApiError, match="lost on its way"):
        Progress().take(delta(tool_calls=(piece,)))

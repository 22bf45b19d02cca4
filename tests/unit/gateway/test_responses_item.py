"""Items that an agent sends are the messages that the model said and heard."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentjet.chat.message import normalise
from agentjet.gateway.fault import ApiError
from agentjet.gateway.responses_item import messages_of
from agentjet.gateway.responses_reply import answer
from agentjet.gateway.responses_request import parse_responses
from agentjet.gateway.responses_stream import EventWriter
from agentjet.schemas.call import InferDelta, InferReply, ToolCallDelta, Usage
from agentjet.schemas.ids import CallId

REQUEST = parse_responses({"model": "m", "input": "q"})
QUESTION = {"role": "user", "content": "q"}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
CALL = {"type": "function_call", "call_id": "c", "name": "add", "arguments": '{"a":1}'}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "2"}
TOOL_CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}


def said(text):
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


def refused(items):
    with pytest.raises(ApiError) as caught:
        messages_of(items)
    assert caught.value.status == 400
    return caught.value


def reply_of(reasoning, pieces, calls):
    content = "".join(pieces)
    message = {"role": "assistant", "content": content or (None if calls else "")}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {"id": f"c{index}", "type": "function", "function": {"name": "f", "arguments": text}}
            for index, text in enumerate(calls)
        ]
    return InferReply(call=CallId("C"), message=message, usage=Usage(prompt_tokens=1, completion_tokens=1))


def test_a_text_is_a_message_of_the_user():
    assert messages_of("q") == (QUESTION,)


def test_messages_may_leave_out_their_type_and_be_cut_in_parts():
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert messages_of([{"role": "developer", "content": "d"}, {"role": "user", "content": parts}]) == (
        {"role": "developer", "content": "d"},
        {"role": "user", "content": "ab"},
    )


def test_the_items_of_a_reply_are_one_message():
    assert messages_of([THOUGHT, said("see"), CALL, CALL | {"call_id": "d"}, OUTPUT]) == (
        {
            "role": "assistant",
            "reasoning_content": "hm",
            "content": "see",
            "tool_calls": [TOOL_CALL, TOOL_CALL | {"id": "d"}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "2"},
    )


def test_what_is_said_after_a_call_belongs_to_its_reply():
    assert messages_of([said("a"), CALL, said("b")]) == (
        {"role": "assistant", "content": "ab", "tool_calls": [TOOL_CALL]},
    )


def test_two_texts_are_two_replies_and_thinking_opens_one():
    assert [message["content"] for message in messages_of([said("a"), said("b")])] == ["a", "b"]
    assert messages_of([said("a"), THOUGHT, said("b")]) == (
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "reasoning_content": "hm", "content": "b"},
    )


def test_a_summary_stands_in_for_thoughts_and_encrypted_ones_are_none():
    summary = {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "short"}]}
    assert messages_of([summary, said("a")])[0]["reasoning_content"] == "short"
    hidden = {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "x"}
    assert messages_of([hidden, said("a")]) == ({"role": "assistant", "content": "a"},)


def test_an_output_may_be_a_list_of_texts():
    parts = [{"type": "input_text", "text": "2"}, {"type": "input_text", "text": "3"}]
    assert messages_of([CALL, OUTPUT | {"output": parts}])[1]["content"] == "23"


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}, "input[0].content[0]"),
        ({"role": "tool", "content": "x"}, "input[0].role"),
        ({"type": "item_reference", "id": "msg_1"}, "input[0]"),
        ({"type": "web_search_call", "id": "w"}, "input[0]"),
        ({"content": "x"}, "input[0]"),
        ({"role": "user", "content": 3}, "input[0].content"),
        (CALL | {"arguments": {}}, "input[0].arguments"),
        ({"type": "function_call_output", "output": "x"}, "input[0].call_id"),
        ("q", "input[0]"),
        (["q"], "input[0]"),
        ({"type": ["message"], "role": "user"}, "input[0]"),
        ({"role": ["user"], "content": "q"}, "input[0].role"),
    ],
)
def test_what_can_not_be_shown_to_a_model_is_refused_by_its_place(item, param):
    assert refused([item]).param == param


def test_a16_a_private_field_of_an_item_is_refused_by_name():
    assert refused([CALL | {"namespace": "x"}]).param == "input[0].namespace"
    assert messages_of([CALL | {"namespace": None}]) == messages_of([CALL])


text = st.text(max_size=6)


@given(text, text, st.lists(text, max_size=3))
def test_the_output_sent_back_is_the_stored_message(reasoning, content, calls):
    reply = reply_of(reasoning, [content], calls)
    (message,) = messages_of(answer(REQUEST, reply)["output"])
    assert normalise(message) == normalise(reply.message)


@given(text, st.lists(st.one_of(text, st.tuples(text, text)), max_size=6))
def test_the_streamed_output_sent_back_is_the_stored_message(reasoning, pieces):
    """However the text is cut, and wherever tool calls stand in it."""
    writer = EventWriter(REQUEST, "C")
    deltas, calls = [InferDelta(call=CallId("C"), generation="g", index=0, reasoning=reasoning)], []
    for piece in pieces:
        if isinstance(piece, str):
            deltas.append(InferDelta(call=CallId("C"), generation="g", index=0, text=piece))
            continue
        calls.append("".join(piece))
        parts = (
            ToolCallDelta(index=len(calls) - 1, id=f"c{len(calls) - 1}", name="f", arguments=piece[0]),
            ToolCallDelta(index=len(calls) - 1, arguments=piece[1]),
        )
        deltas += [InferDelta(call=CallId("C"), generation="g", index=0, tool_calls=(part,)) for part in parts]
    reply = reply_of(reasoning, [piece for piece in pieces if isinstance(piece, str)], calls)
    events = [*writer.start()]
    for delta in deltas:
        events += writer.delta(0, delta)
    events += [*writer.end(0, reply), *writer.finish([reply])]
    (message,) = messages_of(events[-1].data["response"]["output"])
    assert normalise(message) == normalise(reply.message)
    assert [event.data["sequence_number"] for event in events] == list(range(len(events)))
    assert all(event.name == event.data["type"] for event in events)

"""Content blocks of Anthropic's Messages are chat messages and back."""

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentjet.chat.message import normalise
from agentjet.gateway.fault import ApiError
from agentjet.gateway.messages_block import blocks_of, messages_of
from agentjet.gateway.messages_stream import MessageWriter
from agentjet.gateway.progress import Progress
from agentjet.schemas.call import InferDelta, InferReply, ToolCallDelta, Usage

EPHEMERAL = {"type": "ephemeral"}


def use(call="c"):
    return {"type": "tool_use", "id": call, "name": "add", "input": {"a": 1}}


def result(call="c", **fields):
    return {"type": "tool_result", "tool_use_id": call, **fields}


def text(value):
    return {"type": "text", "text": value}


def user(*blocks):
    return {"role": "user", "content": list(blocks)}


def bot(*blocks):
    return {"role": "assistant", "content": list(blocks)}


def test_a_text_and_a_text_block_are_the_same():
    plain = messages_of([{"role": "user", "content": "q"}])
    assert plain == messages_of([user(text("q"))]) == ({"role": "user", "content": "q"},)


def test_tool_results_of_one_message_are_tool_messages_and_the_text_follows():
    messages = messages_of(
        [bot(use("a"), use("b")), user(result("a", content="1"), result("b"), text("go "), text("on"))]
    )
    assert messages[1:] == (
        {"role": "tool", "tool_call_id": "a", "content": "1"},
        {"role": "tool", "tool_call_id": "b", "content": ""},
        {"role": "user", "content": "go on"},
    )


def test_the_model_sees_that_a_tool_result_is_an_error():
    blocks = (result(content=[text("lost")], is_error=True), result(content="Error: no", is_error=True))
    assert [m["content"] for m in messages_of([user(*blocks)])] == ["Error: lost", "Error: no"]


def test_blocks_of_a_reply_in_several_messages_are_one_reply():
    apart = messages_of([bot(text("a")), bot(use()), user(result())])
    assert apart == messages_of([bot(text("a"), use()), user(result())])


def test_cache_control_changes_nothing():
    marked = [user(text("q") | {"cache_control": EPHEMERAL}, text("r"))]
    assert messages_of(marked) == messages_of([user(text("qr"))])


def test_a_system_message_in_the_middle_stays_there():
    turns = [user(text("a")), {"role": "system", "content": [text("s")]}, user(text("b"))]
    assert [m["role"] for m in messages_of(turns)] == ["user", "system", "user"]


@pytest.mark.parametrize(
    ("turns", "param"),
    [
        ([], "messages"),
        ([user(text("q")), bot(text("a"))], "messages"),
        (["q"], "messages[0]"),
        ([{"role": "tool", "content": "q"}], "messages[0].role"),
        ([{"role": ["user"], "content": "q"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": "q", "name": "n"}], "messages[0].name"),
        ([user("q")], "messages[0].content[0]"),
        ([user({"type": "image", "source": {}})], "messages[0].content[0]"),
        ([user({"type": ["text"]})], "messages[0].content[0]"),
        ([user(text("q"), {"type": "document", "source": {}})], "messages[0].content[1]"),
        ([user(result(content=[{"type": "image", "source": {}}]))], "messages[0].content[0].content[0]"),
        ([user(use())], "messages[0].content[0]"),
        ([bot({"type": "redacted_thinking", "data": "x"})], "messages[0].content[0]"),
        ([bot({"type": "server_tool_use", "id": "x", "name": "web_search", "input": {}})], "messages[0].content[0]"),
        ([user(text("q"), result())], "messages[0].content[1]"),
        ([user(text(3))], "messages[0].content[0].text"),
        ([user({"type": "text"})], "messages[0].content[0].text"),
        ([bot(use() | {"input": "{}"})], "messages[0].content[0].input"),
        ([bot(use() | {"caller": {"type": "code_execution"}})], "messages[0].content[0].caller"),
        ([user(result(is_error="yes"))], "messages[0].content[0].is_error"),
        ([user(text("q") | {"citations": [{}]})], "messages[0].content[0].citations"),
        ([user(text("q") | {"private": 1})], "messages[0].content[0].private"),
    ],
)
def test_a16_what_a_model_can_not_be_shown_is_refused_by_its_place(turns, param):
    with pytest.raises(ApiError) as caught:
        messages_of(turns)
    assert (caught.value.status, caught.value.param) == (400, param)


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
CALLS = st.lists(
    st.tuples(TEXTS, st.dictionaries(TEXTS, st.integers(-9, 9) | TEXTS | st.none(), max_size=2)), max_size=3
)


@st.composite
def replies(draw):
    calls = [
        {"id": f"c{i}", "type": "function", "function": {"name": name, "arguments": orjson.dumps(arguments).decode()}}
        for i, (name, arguments) in enumerate(draw(CALLS))
    ]
    content, reasoning = draw(TEXTS), draw(TEXTS)
    message = {"role": "assistant", "content": content or (None if calls else "")}
    return message | ({"tool_calls": calls} if calls else {}) | ({"reasoning_content": reasoning} if reasoning else {})


def sent_back(blocks):
    return normalise(messages_of([user(text("q")), bot(*blocks), user(text("r"))])[1])


@given(replies())
def test_the_blocks_of_a_reply_sent_back_are_the_reply(message):
    assert sent_back(blocks_of(message, "s")) == normalise(message)


@pytest.mark.parametrize("arguments", ["", '{"a": 1', '{"a": NaN}', '{"a": ' + "[" * 300 + "]" * 300 + "}"])
def test_a10_broken_arguments_are_an_object_and_the_reply_again_when_sent_back(arguments):
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": arguments}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    blocks = blocks_of(message, "s")
    assert isinstance(blocks[0]["input"], dict)
    assert sent_back(orjson.loads(orjson.dumps(blocks))) == normalise(message)


def put_together(events):
    """As the vendor's client does."""
    blocks, arguments = [], {}
    for event in events:
        body = event.data
        if body["type"] == "content_block_start":
            assert body["index"] == len(blocks)
            blocks.append(dict(body["content_block"]))
        elif body["type"] == "content_block_delta":
            assert body["index"] == len(blocks) - 1
            ((name, piece),) = ((name, value) for name, value in body["delta"].items() if name != "type")
            if name == "partial_json":
                arguments[body["index"]] = arguments.get(body["index"], "") + piece
            else:
                blocks[-1][name] += piece
    for index, piece in arguments.items():
        blocks[index]["input"] = orjson.loads(piece)
    return blocks


def deltas_of(draw, message):
    """The message cut in pieces, text and calls in any order."""
    pieces = [{"reasoning": char} for char in message.get("reasoning_content", "")]
    texts = [{"text": char} for char in message["content"] or ""]
    calls = []
    for index, call in enumerate(message.get("tool_calls", ())):
        function = call["function"]
        calls.append({"tool_calls": (ToolCallDelta(index=index, id=call["id"], name=function["name"] or "n"),)})
        calls += [{"tool_calls": (ToolCallDelta(index=index, arguments=char),)} for char in function["arguments"]]
    num_before = draw(st.integers(0, len(texts)))
    pieces += [*texts[:num_before], *calls, *texts[num_before:]]
    return [InferDelta(call="C", generation="g", index=i, **piece) for i, piece in enumerate(pieces)]


@given(st.data())
def test_a_stream_put_together_and_sent_back_is_the_reply_wherever_deltas_were_lost(data):
    message = data.draw(replies())
    for call in message.get("tool_calls", ()):
        call["function"]["name"] = call["function"]["name"] or "n"
    deltas = deltas_of(data.draw, message)
    deltas = deltas[: data.draw(st.integers(0, len(deltas)))]
    usage = Usage(prompt_tokens=5, completion_tokens=2, cached_tokens=3)
    reply = InferReply(call="C", generation="g", message=message, usage=usage)
    writer, progress = MessageWriter("m", "C"), Progress()
    events = list(writer.start())
    for answer in (*deltas, reply):
        events += writer.delta(0, progress.take(answer))
    events += [*writer.end(0, reply), *writer.finish([reply])]
    assert sent_back(put_together(events)) == normalise(message)
    names = [event.name for event in events]
    assert names == [event.data["type"] for event in events]
    assert (names[:2], names[-2:]) == (["message_start", "ping"], ["message_delta", "message_stop"])
    assert names.count("content_block_start") == names.count("content_block_stop")


def test_a_piece_of_a_call_that_is_over_ends_the_stream_in_an_error():
    writer = MessageWriter("m", "C")
    first = (ToolCallDelta(index=0, id="a", name="n"), ToolCallDelta(index=1, id="b", name="n"))
    list(writer.delta(0, InferDelta(call="C", generation="g", index=0, tool_calls=first)))
    late = (ToolCallDelta(index=0, arguments="{}"),)
    with pytest.raises(ApiError, match="after its end"):
        list(writer.delta(0, InferDelta(call="C", generation="g", index=1, tool_calls=late)))

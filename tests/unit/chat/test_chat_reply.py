"""Tool calls and streamed text."""

import pytest
from chat_models import Chat
from hypothesis import given
from hypothesis import strategies as st

from agentjet.chat.parser import ReplyParser, ToolCall, assistant_message, parse_reply
from agentjet.chat.reply import ReplyStream

ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
CALL = ToolCall("add", '{"a":1}')


def test_several_calls_and_text_are_split():
    assert parse_reply(f"Let me see.\n{ADD}\n{ADD}", has_tools=True) == ("Let me see.", [CALL, CALL])


def test_a10_malformed_json_passes_through_as_text():
    text = '<tool_call>\n{"name": "add", "arguments": {"a": 1,\n</tool_call>'
    assert parse_reply(text, has_tools=True) == (text, [])
    assert parse_reply('{"a": 1,', has_tools=True) == ('{"a": 1,', [])


def test_a10_a_malformed_call_leaves_its_good_neighbour():
    bad = "<tool_call>{oops</tool_call>"
    assert parse_reply(f"{bad}\n{ADD}", has_tools=True) == (bad, [CALL])


def test_without_tools_marks_are_text():
    assert parse_reply(ADD, has_tools=False) == (ADD, [])


def test_a_call_without_its_closing_mark_counts_when_it_is_whole():
    assert parse_reply('<tool_call>{"name": "add", "arguments": {"a": 1}}', has_tools=True) == ("", [CALL])


@pytest.mark.parametrize(
    "body", ["[]", '{"name": 3}', '{"name": "f", "arguments": [1]}', '{"name": "f", "arguments": "x"}']
)
def test_what_is_no_call_stays_text(body):
    text = f"<tool_call>{body}</tool_call>"
    assert parse_reply(text, has_tools=True) == (text, [])


def test_text_that_may_begin_a_mark_is_held_back():
    parser = ReplyParser(has_tools=True)
    assert parser.feed("ok <tool") == "ok"
    assert parser.feed("box> x") == " <toolbox> x"


def test_message_of_calls_has_null_content():
    message = assistant_message("", [CALL], id_prefix="call_x")
    assert message["content"] is None
    assert message["tool_calls"][0]["id"] == "call_x_0"
    assert assistant_message("", [], id_prefix="x") == {"role": "assistant", "content": ""}


PIECES = st.lists(
    st.sampled_from([ADD, "<tool_call>", "</tool_call>", "<tool", "_call>", " ", "\n", "a", '{"name": "f"}', "<"]),
    max_size=8,
)


@given(PIECES, st.integers(1, 7))
def test_the_result_does_not_depend_on_the_cutting(pieces, size):
    text = "".join(pieces)
    parser = ReplyParser(has_tools=True)
    given = [parser.feed(text[i : i + size]) for i in range(0, len(text), size)]
    assert ("".join(given) + parser.finish(), parser.calls) == parse_reply(text, has_tools=True)


def stream_of(chat, **options):
    return ReplyStream(chat.template, stop_ids=frozenset({chat.end}), **options)


@given(st.text(alphabet="low hi\né中\U0001f600", max_size=12))
def test_streamed_pieces_join_to_the_content_without_broken_characters(text):
    chat = Chat()
    stream = stream_of(chat)
    ids = (*chat.encode(text), chat.end)
    pieces = [stream.feed([token]) for token in ids]
    reply = stream.finish(ids)
    assert "".join(pieces) + reply.rest == reply.content == text
    assert "\ufffd" not in "".join(pieces)
    assert not reply.is_drifted


def test_t3_drift_is_noticed():
    chat = Chat()
    reply = stream_of(chat).finish((*chat.encode("l"), *chat.encode("o"), chat.end))
    assert reply.is_drifted
    assert reply.content == "lo"


def test_a_stop_string_is_held_back_and_cut():
    chat = Chat()
    stream = stream_of(chat, stop_strings=["low!"])
    pieces = [stream.feed([token]) for token in chat.encode("a low b low! c")]
    reply = stream.finish(chat.encode("a low b low! c"), "low!")
    assert "".join(pieces) == reply.content == "a low b "
    assert reply.rest == ""


def test_a_truncated_character_shows_as_broken_only_in_the_end():
    chat = Chat()
    ids = chat.encode("é")[:1]
    stream = stream_of(chat)
    assert stream.feed(ids) == ""
    assert stream.finish(ids).rest == "\ufffd"


def test_special_tokens_are_no_text():
    chat = Chat()
    ids = (*chat.encode("hi<|im_start|>"), chat.end)
    reply = stream_of(chat).finish(ids)
    assert (reply.content, reply.is_drifted) == ("hi", True)

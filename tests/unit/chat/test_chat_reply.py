"""Sampled ids to a reply: decoding, stop strings, deltas."""

import pytest
from chat_models import CHATML, QWEN, Chat
from hypothesis import given
from hypothesis import strategies as st
from reply_text import ADD, calls_text
from tokenizers import AddedToken

from agentjet.chat.piece import Reply
from agentjet.chat.reply import ReplyDelta, ReplyStream
from agentjet.schemas.call import ToolCallDelta


def stream_of(chat, **options):
    return ReplyStream(chat.template, stop_ids=frozenset({chat.end}), **options)


def joined(deltas):
    """The reply that deltas make."""
    reply, calls = Reply(), []
    for delta in deltas:
        reply.reasoning += delta.reasoning
        reply.content += delta.text
        for piece in delta.tool_calls:
            if piece.index == len(calls):
                assert piece.id and piece.name, "id and name stand in the first piece"
                calls.append({"id": piece.id, "name": piece.name, "arguments": piece.arguments})
            else:
                assert not (piece.id or piece.name)
                calls[piece.index]["arguments"] += piece.arguments
    return reply.reasoning, reply.content, calls


@given(st.text(alphabet="low hi\né中\U0001f600", max_size=12))
def test_streamed_pieces_join_to_the_content_without_broken_characters(text):
    chat = Chat()
    stream = stream_of(chat)
    ids = (*chat.encode(text), chat.end)
    content = "".join(delta.text for token in ids for delta in stream.feed([token]))
    finished = stream.finish(ids)
    assert content == finished.reply.content == text
    assert not finished.is_drifted


def test_t3_drift_is_noticed():
    chat = Chat()
    finished = stream_of(chat).finish((*chat.encode("l"), *chat.encode("o"), chat.end))
    assert finished.is_drifted
    assert finished.reply.content == "lo"


def test_a_stop_string_is_held_back_and_cut():
    chat = Chat()
    stream = stream_of(chat, stop_strings=["low!", "zz"])
    content = "".join(delta.text for token in chat.encode("a low b low! c") for delta in stream.feed([token]))
    reply = stream.finish(chat.encode("a low b low! c"), "low!").reply
    assert content == reply.content == "a low b "


def test_a_truncated_character_shows_as_broken_only_in_the_end():
    chat = Chat()
    ids = chat.encode("é")[:1]
    stream = stream_of(chat)
    assert stream.feed(ids) == []
    assert stream.finish(ids).reply.content == "\ufffd"


def test_special_tokens_are_no_text():
    chat = Chat()
    ids = (*chat.encode("hi<|im_start|>"), chat.end)
    finished = stream_of(chat).finish(ids)
    assert (finished.reply.content, finished.is_drifted) == ("hi", True)


SAID = '<think>\nhé\n</think>\n\nHi!\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_thinking_text_and_calls_stream_apart_and_make_the_message(size):
    chat = Chat(QWEN)
    stream = stream_of(chat, tools=[ADD], id_prefix="call_x")
    ids = (*chat.encode(SAID), chat.end)
    deltas = [delta for start in range(0, len(ids), size) for delta in stream.feed(ids[start : start + size])]
    finished = stream.finish(ids)
    message = finished.reply.message(id_prefix="call_x")
    assert joined(deltas) == ("hé", "Hi!", [{"id": "call_x_0", "name": "add", "arguments": '{"a": 1}'}])
    assert (message["reasoning_content"], message["content"]) == ("hé", "Hi!")
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert not finished.is_drifted


def test_what_comes_out_of_order_comes_in_another_delta():
    chat = Chat(QWEN)
    one = calls_text("hermes", ("add", "{}"))
    call = ToolCallDelta(index=0, id="call_0", name="add", arguments="{}")
    assert stream_of(chat, tools=[ADD]).feed(chat.encode(f"a{one}b{one}")) == [
        ReplyDelta(text="a", tool_calls=(call,)),
        ReplyDelta(text="b", tool_calls=(call.model_copy(update={"index": 1, "id": "call_1"}),)),
    ]


def test_a_reply_begins_inside_thinking_where_its_prompt_ends_there():
    chat = Chat(CHATML + "{{ '<think>\n' if add_generation_prompt }}{# </think> #}")
    prompt = chat.render([{"role": "user", "content": "q"}])
    reply = stream_of(chat, prompt=prompt).finish(chat.encode("hm</think>hi")).reply
    assert reply == Reply("hi", "hm")
    assert chat.template.forced_prefix("add").startswith("\n</think>")


def test_a_forced_beginning_is_part_of_the_reply():
    chat = Chat(QWEN)
    stream = stream_of(chat, tools=[ADD], forced=chat.template.forced_prefix("add"))
    deltas = stream.feed(chat.encode('{"a": 1}}'))
    assert joined(deltas)[2] == [{"id": "call_0", "name": "add", "arguments": '{"a": 1}'}]
    assert len(stream.finish(chat.encode('{"a": 1}}')).reply.calls) == 1


@pytest.mark.parametrize("has_tools", [True, False])
def test_special_tokens_that_mark_calls_are_seen_only_by_the_parser(has_tools):
    chat = Chat(CHATML + "{# [TOOL_CALLS] [ARGS] #}")
    marks = {"additional_special_tokens": [AddedToken("[TOOL_CALLS]"), AddedToken("[ARGS]")]}
    chat.tokenizer.add_special_tokens(marks)
    ids = (*chat.encode('[TOOL_CALLS]add[ARGS]{"a": 1}'), chat.end)
    finished = stream_of(chat, tools=[ADD] if has_tools else []).finish(ids)
    assert [call.name for call in finished.reply.calls] == (["add"] if has_tools else [])
    assert finished.reply.content == ("" if has_tools else 'add{"a": 1}')
    assert finished.is_drifted is not has_tools


@given(st.lists(st.integers(0, 262), max_size=20), st.integers(1, 5))
def test_any_ids_stream_to_the_beginning_of_the_reply(ids, size):
    chat = Chat(QWEN)
    stream = stream_of(chat, tools=[ADD])
    deltas = [delta for start in range(0, len(ids), size) for delta in stream.feed(ids[start : start + size])]
    reply = stream.finish(ids).reply
    assert stream_of(chat, tools=[ADD]).finish(ids).reply == reply
    assert reply.content.startswith(joined(deltas)[1])

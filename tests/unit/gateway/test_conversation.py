"""Kept conversations: found by their key only, bounded, forgotten."""

import pytest

from agentjet.gateway.conversation import Conversations
from agentjet.gateway.fault import ApiError
from agentjet.gateway.responses_request import parse_responses
from agentjet.schemas.call import InferReply
from agentjet.schemas.ids import CallId


def request(text="q", **fields):
    return parse_responses({"model": "m", "input": text} | fields)


def reply(call, text="hi"):
    return InferReply(call=CallId(call), message={"role": "assistant", "content": text})


def texts(messages):
    return [message["content"] for message in messages]


def test_a_conversation_goes_behind_the_new_instructions():
    kept = Conversations()
    kept.add("k", request("q", instructions="old"), reply("A"))
    second = kept.continued("k", request("more", instructions="new", previous_response_id="resp_A"))
    assert texts(second.messages) == ["new", "q", "hi", "more"]
    kept.add("k", second, reply("B", "ho"))
    third = kept.continued("k", request("last", previous_response_id="resp_B"))
    assert texts(third.messages) == ["q", "hi", "more", "ho", "last"]


def test_one_response_may_be_continued_twice():
    kept = Conversations()
    kept.add("k", request(), reply("A"))
    for text in ("b", "c"):
        assert texts(kept.continued("k", request(text, previous_response_id="resp_A")).messages) == ["q", "hi", text]


@pytest.mark.parametrize("drop", ["other key", "forgotten", "not stored", "never there"])
def test_what_is_not_kept_is_a_clear_error(drop):
    kept = Conversations()
    if drop != "never there":
        kept.add("k", request(store=drop != "not stored"), reply("A"))
    if drop == "forgotten":
        kept.forget("k")
    with pytest.raises(ApiError, match="send the items") as caught:
        kept.continued("j" if drop == "other key" else "k", request(previous_response_id="resp_A"))
    assert (caught.value.status, caught.value.param) == (400, "previous_response_id")
    assert caught.value.code == "previous_response_not_found"


def test_those_used_longest_ago_go_first_when_there_is_no_room():
    kept = Conversations(max_chars=2 * (2 * 256 + 100))
    for call in "AB":
        kept.add(f"key {call}", request("q" * 50), reply(call, "a" * 50))
        kept.add(f"key {call}", request("q" * 50), reply(call, "a" * 50))
    kept.continued("key A", request(previous_response_id="resp_A"))
    kept.add("key C", request("q" * 50), reply("C", "a" * 50))
    with pytest.raises(ApiError):
        kept.continued("key B", request(previous_response_id="resp_B"))
    for call in "AC":
        kept.continued(f"key {call}", request(previous_response_id=f"resp_{call}"))
        kept.forget(f"key {call}")
    kept.add("key D", request("q" * 600), reply("D"))
    kept.continued("key D", request(previous_response_id="resp_D"))

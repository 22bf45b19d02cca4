"""Requests are read once, and as if each were the first."""

import pytest
from chat_models import assistant, user
from hypothesis import given
from hypothesis import strategies as st

from agentjet.chat.conversation import ConversationReader, Trait
from agentjet.errors import BadRequestError

TEXTS = st.text("ab", max_size=1)
PARTS = TEXTS.map(lambda text: [{"type": "text", "text": text}])
EXTRA = st.sampled_from([{}, {"name": "x"}, {"n": 1}, {"n": True}, {"n": 1.0}, {"refusal": None}, {"n": {"x": [1]}}])
MESSAGES = st.builds(
    lambda role, content, extra: {"role": role, "content": content} | extra,
    st.sampled_from(["user", "assistant", "system"]),
    TEXTS | PARTS,
    EXTRA,
)
REQUESTS = st.lists(st.tuples(st.lists(MESSAGES, min_size=1, max_size=5), st.sampled_from(["", "x"])), max_size=12)


@given(REQUESTS)
def test_earlier_requests_change_nothing(requests):
    reader = ConversationReader()
    for messages, agent in requests:
        alone = ConversationReader().read(messages, (), agent)
        read = reader.read(messages, (), agent)
        assert read == alone
        assert repr(read) == repr(alone), "1 and True are equal, and not the same"


def test_only_what_is_new_is_read(monkeypatch):
    from agentjet.chat import conversation

    reader, read = ConversationReader(), []
    normalise = conversation.normalise
    monkeypatch.setattr(conversation, "normalise", lambda *args: read.append(args[1]) or normalise(*args))
    messages = [user("a"), assistant("b"), user("c")]
    reader.read(messages, (), "")
    reader.read([user("z")], (), "other")
    read.clear()
    longer = [user("a"), assistant("b"), user("c"), assistant("d"), user("e")]
    reader.read(longer, (), "")
    reader.read(longer[:4], (), "")
    assert read == ["messages[3]", "messages[4]"]


def test_a_message_that_is_changed_after_it_was_read_is_read_again():
    reader, message = ConversationReader(), {"role": "user", "content": "a", "extra": {"x": ["y"]}}
    before = reader.read([message], (), "")
    message["extra"]["x"].append("z")
    after = reader.read([message], (), "")
    assert before.messages[0]["extra"] == {"x": ["y"]}
    assert after.messages[0]["extra"] == {"x": ["y", "z"]}


@pytest.mark.parametrize(
    ("message", "traits"),
    [
        (user("I think so"), Trait(0)),
        ({"role": "system", "content": ""}, Trait.SYSTEM),
        ({"role": "tool", "content": "", "tool_call_id": "c"}, Trait.CALLS),
        (assistant("<think>hm</think>"), Trait.THINKING),
        (assistant("") | {"reasoning_content": "hm"}, Trait.THINKING),
        (user("") | {"weight": 1}, Trait.UNUSUAL),
    ],
)
def test_traits_are_told(message, traits):
    assert ConversationReader().read([message], (), "").traits == traits


def test_a_system_message_in_the_middle_is_unusual():
    read = ConversationReader().read([user("a"), {"role": "system", "content": "b"}], (), "")
    assert (read.traits, read.num_system) == (Trait.UNUSUAL, 0)


def test_tools_that_are_no_json_are_refused():
    with pytest.raises(BadRequestError, match="tools"):
        ConversationReader().read([user("a")], ({"name": "\ud83d"},), "")

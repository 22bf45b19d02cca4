"""Messages are checked without being normalised, and refused exactly when they can not be."""

from hypothesis import given
from hypothesis import strategies as st

from agentjet.chat.message import normalise_all
from agentjet.errors import BadRequestError
from agentjet.gateway.fault import ApiError
from agentjet.gateway.field import check_messages

_call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
messages = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "role": st.sampled_from(["system", "developer", "user", "assistant", "tool", "judge", None, 3, ["user"]]),
            "content": st.sampled_from(
                ["q", "", None, 3, [], [{"type": "text", "text": "q"}], [{"type": "image_url"}]]
            ),
            "tool_calls": st.sampled_from([None, [], [_call], [{}], "x"]),
            "function_call": st.sampled_from([None, {}, {"name": "add"}]),
            "audio": st.sampled_from([None, {"id": "a"}]),
            "name": st.sampled_from([None, "scout"]),
        },
    ),
    max_size=3,
)


def fault_of(check, given):
    try:
        check(given)
    except (ApiError, BadRequestError) as error:
        return str(error)
    return None


@given(messages)
def test_messages_are_refused_exactly_when_they_have_no_canonical_form(sent):
    assert fault_of(check_messages, sent) == fault_of(normalise_all, sent)

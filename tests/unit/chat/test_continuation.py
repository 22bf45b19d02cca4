"""Whether a rendering continues an earlier one, and where its reply ends."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reply_text import ADD

from agentjet.chat.continuation import RenderedText, added_after
from agentjet.chat.reply_format import ReplyFormat

HERMES = ReplyFormat.of("<tool_call>", reasoning_parser="none")
END = "<|im_end|>\n"
TEXT = st.text("ab<", max_size=4)


@given(st.lists(TEXT, min_size=1, max_size=4), TEXT)
def test_a_text_of_pieces_begins_exactly_what_begins_with_it(pieces, other):
    rendered = None
    for piece in pieces:
        rendered = RenderedText.of(piece, rendered)
    whole = "".join(pieces)
    assert rendered.size == len(whole)
    assert rendered.begins(whole + other)
    assert rendered.begins(other) is other.startswith(whole)


def test_a_changed_first_piece_is_seen():
    assert not RenderedText.of("b", RenderedText.of("a")).begins("xb")


@pytest.mark.parametrize(
    ("text", "content", "added"),
    [
        (f"hi{END}more", "hi", f"{END}more"),
        (f"hi{END}", " hi\n", END),
        (f"say {END}now{END}more", f"say {END}now", f"{END}more"),
        (f"{END}more", "", f"{END}more"),
        (f"low{END}more", "hi", None),
        ("hi", "hi", None),
    ],
)
def test_the_reply_ends_where_all_of_it_is_shown(text, content, added):
    assert added_after(text, {"role": "assistant", "content": content}, END, HERMES) == added


def test_a_call_is_read_again_by_its_tool_s_schema():
    form = ReplyFormat.of("", tool_parser="qwen3_coder", reasoning_parser="none")
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "note": "2"}}}
    reply = {"role": "assistant", "content": "", "tool_calls": [call]}
    text = "<tool_call><function=add><parameter=a>1</parameter><parameter=note>2</parameter></function></tool_call>"
    assert added_after(text + END, reply, END, form, [ADD]) == END
    assert added_after(text + END, reply, END, form, [ADD | {"function": {"name": "add"}}]) is None

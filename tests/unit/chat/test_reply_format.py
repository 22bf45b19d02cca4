"""Tool calls and thinking of every family, whole and in pieces."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reply_text import ADD, BEGIN, CALL, END, JSON_FAMILIES, SEP, calls_text, format_of, read_cut

from agentjet.chat.piece import PieceKind, Reply, ToolCall
from agentjet.chat.reply_format import ReplyFormat, ReplyParser
from agentjet.chat.tool_family import FORMATS, detect_format
from agentjet.errors import UserError

HERMES = format_of("hermes")


def parse(text, family="hermes", **options):
    return format_of(family, **options).parse(text, [ADD])


@pytest.mark.parametrize("family", JSON_FAMILIES)
def test_several_calls_keep_their_arguments_verbatim(family):
    arguments = '{"a" :1, "note":"} ] \\" [TOOL <tool_"}'
    reply = parse(calls_text(family, ("add", arguments), ("sub", "{}")), family)
    assert reply == Reply("", "", [ToolCall("add", arguments), ToolCall("sub", "{}")])


@pytest.mark.parametrize("family", ["hermes", "mistral", "mistral_args", "deepseek", "deepseek_v31", "gemma"])
def test_text_before_calls_is_content_without_the_white_space_between(family):
    assert parse("Let me see.\n\n" + calls_text(family, ("add", "{}")), family).content == "Let me see."


@pytest.mark.parametrize("family", JSON_FAMILIES)
def test_a10_arguments_that_break_are_given_out_as_drawn(family):
    text = calls_text(family, ("add", '{"a": 1,'))
    cut = text[: text.index('{"a": 1,') + 8]
    assert parse(cut, family) == Reply("", "", [ToolCall("add", '{"a": 1,')])


@pytest.mark.parametrize("family", ["hermes", "deepseek", "deepseek_v31"])
def test_a10_a_broken_call_ends_at_its_mark_and_leaves_its_good_neighbour(family):
    calls = parse(calls_text(family, ("add", '{"a": "x'), ("add", '{"a": 1}')), family).calls
    assert calls[0].arguments.startswith('{"a": "x')
    assert calls[1].arguments == '{"a": 1}'


def test_a10_a_head_that_breaks_is_text_and_leaves_its_good_neighbour():
    good = calls_text("hermes", ("add", "{}"))
    assert parse(f"<tool_call>{{oops</tool_call>\n{good}") == Reply(
        "<tool_call>{oops</tool_call>", "", [ToolCall("add", "{}")]
    )
    assert parse('{"a": 1,').content == '{"a": 1,'


@pytest.mark.parametrize(
    "body", ["[]", '{"name": 3}', '{"name": "f", "arguments": [1]}', '{"name": "f", "arguments": "x"}']
)
def test_what_is_no_call_stays_text(body):
    text = f" <tool_call>{body}</tool_call>"
    assert parse(text) == Reply(text)


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('{"arguments": {"a" : 1}, "name": "f"}', '{"a" : 1}'),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', '{"a": 1}'),
        ('{"name": "f"}', "{}"),
        ('{"type": "function", "id": "1", "name": "f", "arguments": {}, "more": ["}"]}', "{}"),
    ],
)
def test_other_ways_to_write_the_object_are_calls_too(body, arguments):
    assert parse(f"<tool_call>{body}</tool_call>") == Reply("", "", [ToolCall("f", arguments)])


@pytest.mark.parametrize("rest", ["", "}", "}\n", "}</tool_call>", "</tool_call>", "\n</tool_call>\n"])
def test_a_call_counts_without_what_closes_it(rest):
    assert parse('<tool_call>{"name": "add", "arguments": {"a": 1}' + rest) == Reply(
        "", "", [ToolCall("add", '{"a": 1}')]
    )


def test_text_after_a_call_is_content():
    assert parse(calls_text("hermes", ("add", "{}")) + "\nDone, }").content == "\nDone, }"


def test_a_closing_mark_in_a_string_belongs_to_the_string():
    arguments = '{"note": "</tool_call> and on"}'
    assert parse(calls_text("hermes", ("add", arguments), ("add", "{}"))).calls[0].arguments == arguments


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        (
            "<parameter=a>\n1\n</parameter>\n<parameter=note>\n2\n\n</parameter>\n</function>",
            '{"a": 1, "note": "2\\n"}',
        ),
        ("<parameter=other>x</parameter></function>", '{"other": "x"}'),
        ("</function>", "{}"),
        ("<parameter=note>cut", '{"note": "cut"'),
    ],
)
def test_parameters_in_xml_become_json_by_the_tool_s_schema(body, arguments):
    text = f"<tool_call>\n<function=add>\n{body}"
    form = format_of("qwen3_coder")
    for end in ("", "\n</tool_call>") if body.endswith("</function>") else ("",):
        assert read_cut(form, text + end, [1]) == form.parse(text + end, [ADD])
        assert form.parse(text + end, [ADD]) == Reply("", "", [ToolCall("add", arguments)])


def test_a_name_is_given_out_as_soon_as_arguments_begin():
    parser = ReplyParser(HERMES, [ADD])
    assert parser.feed('<tool_call>{"name": "add", "arguments": ') == []
    kinds = [(piece.kind, piece.text) for piece in parser.feed('{"a": ')]
    assert kinds == [(PieceKind.CALL, "add"), (PieceKind.ARGUMENTS, '{"a":')]


def test_text_that_may_begin_a_mark_is_held_back():
    parser = ReplyParser(HERMES, [ADD])
    assert [piece.text for piece in parser.feed("ok <tool")] == ["ok"]
    assert "".join(piece.text for piece in parser.feed("box> x")) == " <toolbox> x"


def test_an_answer_in_json_is_no_call_and_is_not_held_back():
    parser = ReplyParser(format_of("llama3"), [ADD])
    assert "".join(piece.text for piece in parser.feed('{"answer": {"name"')) == '{"answer": {"name"'


@pytest.mark.parametrize("family", JSON_FAMILIES)
def test_without_tools_calls_are_text(family):
    text = calls_text(family, ("add", "{}")) + " \n"
    assert format_of(family).parse(text).content == text


@pytest.mark.parametrize("family", FORMATS)
def test_a_forced_beginning_makes_a_call(family):
    form = format_of(family)
    for forced, drawn in (
        (form.forced_prefix("add"), ""),
        (form.forced_prefix(None), form.calls.forced_prefix("add").removeprefix(form.calls.forced_prefix(None))),
    ):
        arguments = "<parameter=a>1</parameter></function>" if family == "qwen3_coder" else '{"a": 1}'
        reply = form.parse(forced + drawn + arguments, [ADD])
        assert [call.name for call in reply.calls] == ["add"], forced
        assert reply.content == ""


def test_a_forced_beginning_closes_thinking_that_the_prompt_opens():
    form = format_of("hermes", thinking="think")
    forced = form.forced_prefix("add", "<|im_start|>assistant\n<think>\n")
    assert form.parse(forced + "{}}", [ADD], is_thinking=True) == Reply("", "", [ToolCall("add", "{}")])
    assert form.forced_prefix("add", "<|im_start|>assistant\n").startswith("<tool_call>")


@pytest.mark.parametrize(
    ("text", "is_open", "reply"),
    [
        ("<think>\nhm \n</think>\n\nhi ", False, Reply("hi ", "hm")),
        ("hm\n</think>hi", True, Reply("hi", "hm")),
        ("<think>hm</think>", True, Reply("", "hm")),
        ("hm </thi", True, Reply("", "hm </thi")),
        (" <think>hm ", False, Reply("", "hm")),
        ("<think>\n\n</think>\n\nhi", False, Reply("hi")),
        ("hi <think>hm</think>", False, Reply("hi <think>hm</think>")),
        ("hi</think>", False, Reply("hi</think>")),
        (" <thin", False, Reply(" <thin")),
    ],
)
def test_thinking_stands_apart(text, is_open, reply):
    form = format_of("hermes", thinking="think")
    assert form.parse(text, [ADD], is_thinking=is_open) == reply
    assert read_cut(form, text, [1], is_thinking=is_open) == reply


def test_thinking_of_a_model_that_knows_none_is_text():
    assert parse("<think>hm</think>hi").content == "<think>hm</think>hi"


@pytest.mark.parametrize(
    ("template", "family"),
    [
        ("<|im_start|>", "hermes"),
        ("<|im_start|> <tool_call>", "hermes"),
        ("<tool_call> <function=", "qwen3_coder"),
        ("<|start_header_id|>", "llama3"),
        ("[INST] [TOOL_CALLS]", "mistral"),
        ("[TOOL_CALLS] [ARGS]", "mistral_args"),
        (f"{CALL} {SEP} ```json", "deepseek"),
        (f"{CALL} {SEP}", "deepseek_v31"),
        ("<start_of_turn>", "gemma"),
    ],
)
def test_a_family_is_told_from_its_template(template, family):
    assert detect_format(template) == family
    assert ReplyFormat.of(template).calls is FORMATS[family]


def test_settings_name_formats_and_unknown_names_are_refused():
    form = ReplyFormat.of("<think> </think>", tool_parser="llama3", reasoning_parser="none")
    assert (form.calls, form.thinking) == (FORMATS["llama3"], None)
    assert ReplyFormat.of("<think></think>").thinking is not None
    assert ReplyFormat.of("x", tool_parser="none").parse(calls_text("hermes", ("add", "{}")), [ADD]).calls == []
    with pytest.raises(UserError, match="tool_parser: 'lama' is not known; use one of: auto, none, hermes"):
        ReplyFormat.of("", tool_parser="lama")


def test_a_message_of_calls_has_null_content_and_numbered_ids():
    message = Reply("", "hm", [ToolCall("f", "{}"), ToolCall("g", "{}")]).message(id_prefix="call_x")
    assert (message["content"], message["reasoning_content"]) == (None, "hm")
    assert [call["id"] for call in message["tool_calls"]] == ["call_x_0", "call_x_1"]
    assert Reply().message(id_prefix="x") == {"role": "assistant", "content": ""}


SPLINTERS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<tool", "_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "[", "]"),
        *(BEGIN, END, CALL, SEP, "<｜tool▁call▁end｜>", "function", "```json", "```", "<|python_tag|>", ";", ","),
        *('{"name": "f"', ', "arguments": ', ', "parameters": ', "{", "}", '{"a": "', '"', "\\", " ", "\n", "x", "<"),
        *('{"arguments": {"a": 1}, "name": "f"}', "<function=f>", "</function>", "<parameter=a>", "</parameter>"),
    ]
)
TEXTS = st.lists(SPLINTERS, max_size=14).map("".join)
CUTS = st.lists(st.integers(1, 9), max_size=6)
FORMS = st.sampled_from(sorted(FORMATS)).flatmap(
    lambda family: st.sampled_from([format_of(family), format_of(family, thinking="think")])
)


@given(FORMS, TEXTS, CUTS, st.booleans())
def test_the_result_does_not_depend_on_the_cutting(form, text, cuts, is_thinking):
    assert read_cut(form, text, cuts, is_thinking=is_thinking) == form.parse(text, [ADD], is_thinking=is_thinking)


@given(st.sampled_from(sorted(FORMATS)), TEXTS)
def test_a_reply_without_calls_loses_no_text(family, text):
    reply = parse(text, family)
    assert reply.calls or reply.content == text


WORDS = st.text(st.sampled_from('aé中\U0001f600"\\{}[]<>|/ \n'), max_size=6)
VALUES = st.none() | st.integers() | WORDS | st.lists(WORDS, max_size=2) | st.dictionaries(WORDS, WORDS, max_size=2)
CALLS = st.lists(
    st.tuples(st.sampled_from(["f", "add", "get_x-1"]), st.dictionaries(WORDS, VALUES, max_size=3)), max_size=3
)


@given(
    st.sampled_from(JSON_FAMILIES),
    CALLS,
    CUTS,
    st.booleans(),
)
def test_streamed_arguments_join_to_what_the_model_wrote(family, calls, cuts, is_ascii):
    written = [(name, json.dumps(arguments, ensure_ascii=is_ascii)) for name, arguments in calls]
    reply = read_cut(format_of(family), calls_text(family, *written) if written else "", cuts)
    assert [(call.name, call.arguments) for call in reply.calls] == written
    assert reply.content == ""

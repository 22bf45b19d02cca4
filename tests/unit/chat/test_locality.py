"""Which templates are rendered from a conversation's end, and that this never goes unnoticed where it is wrong."""

import pytest
from chat_models import CHATML, NO_FORK, QWEN, Chat, assistant, tool, user

from agentjet.chat.conversation import Trait
from agentjet.chat.locality import Locality
from agentjet.chat.template import ChatTemplate
from agentjet.schemas.call import ForkCause

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
PLAIN = Trait(0)
LOOP = "{% for m in messages %}"
NUMBERED = CHATML.replace("m['role'] +", "m['role'] ~ loop.index +")
COUNTED = "{{ messages | length }}" + CHATML
LAST_USER = CHATML.replace("m['content']", "m['content'] ~ ('!' if m.role == 'user' and loop.last else '')")
FORGETFUL = CHATML.replace(LOOP, LOOP.replace("messages", "messages[-100:]"))
REPLY_NUMBERED = CHATML.replace(
    LOOP, LOOP + "{% if m.role == 'user' and loop.index0 > 4 %}{{ '[' ~ loop.index0 ~ ']' }}{% endif %}"
)
TOOLS_LAST = CHATML.replace(LOOP, LOOP + "{% if tools and loop.last %}{{ tools | tojson }}{% endif %}")


def holds(template, traits=PLAIN, *, has_tools=False, adds_user=True):
    return Locality(Chat(template).template).holds(traits, has_tools=has_tools, adds_user=adds_user)


def counted(chat):
    """Counts the messages of each rendering."""
    sizes, render = [], chat.template.render

    def counting(messages, tools=(), **options):
        sizes.append(len(messages))
        return render(messages, tools, **options)

    chat.template.render = counting
    return sizes


def converse(chat, num_turns, *, reply="hi", after=lambda turn, prompt: None, tools=()):
    messages = []
    for turn in range(1, num_turns + 1):
        messages.append(user(f"q{turn}"))
        prompt, _ = chat.ask(messages, reply, tools=tools)
        after(turn, prompt, list(messages))
        messages.append(assistant(reply))
    return messages


@pytest.mark.parametrize("traits", [Trait(0), Trait.SYSTEM, Trait.CALLS, Trait.THINKING, ~Trait.UNUSUAL])
@pytest.mark.parametrize("has_tools", [False, True])
def test_a_template_that_only_appends_is_rendered_from_the_end(traits, has_tools):
    assert holds(CHATML, traits, has_tools=has_tools)


def test_unusual_fields_are_always_rendered_whole():
    assert not holds(CHATML, Trait.UNUSUAL)


@pytest.mark.parametrize(
    "template",
    [NUMBERED, COUNTED, LAST_USER, FORGETFUL, REPLY_NUMBERED],
    ids=["numbered", "counted", "last_user", "forgetful", "reply_numbered"],
)
def test_a_template_that_looks_further_is_rendered_whole(template):
    assert not holds(template)


def test_a_template_that_moves_the_tools_is_rendered_whole_with_tools_only():
    assert holds(TOOLS_LAST)
    assert not holds(TOOLS_LAST, has_tools=True)


def test_thinking_that_a_new_question_strips_needs_the_whole():
    assert holds(QWEN, Trait.THINKING | Trait.CALLS, has_tools=True, adds_user=False)
    assert not holds(QWEN, Trait.THINKING | Trait.CALLS, has_tools=True)
    assert holds(QWEN, Trait.CALLS, has_tools=True)


def test_a_long_conversation_renders_its_end_but_for_the_looks_at_the_whole():
    chat, whole = Chat(), []
    sizes = counted(chat)

    def after(turn, prompt, messages):
        assert chat.template.decode(prompt.ids, with_specials=True) == chat.render(messages)
        sizes.pop()  # the comparison's own
        if max(sizes) > 4:
            whole.append(turn)
        sizes.clear()

    chat.history.prompt([user("warm")])
    chat.history._locality.holds(Trait(0), has_tools=False, adds_user=True)
    sizes.clear()
    converse(chat, 40, after=after)
    assert whole == [4, 8, 16, 32], "at the second call the whole is no longer than the end"


@pytest.mark.parametrize("template", [NUMBERED, COUNTED, LAST_USER, FORGETFUL, REPLY_NUMBERED])
def test_what_is_rendered_whole_equals_the_template_at_every_turn(template):
    chat = Chat(template)

    def after(turn, prompt, messages):
        assert chat.template.decode(prompt.ids, with_specials=True) == chat.render(messages)

    converse(chat, 60, after=after)


def test_a_wrong_finding_is_noticed_counted_and_not_used_again():
    chat = Chat(CHATML.replace(LOOP, LOOP + "{% if 'q3' in m.content %}{{ messages | length }}{% endif %}"))
    forks = []
    converse(chat, 8, after=lambda turn, prompt, messages: forks.append(prompt.fork))
    locality = chat.history._locality
    assert locality.num_distrusted == 1
    assert not locality.holds(Trait(0), has_tools=False, adds_user=True)
    assert forks[3:] == [ForkCause.TEMPLATE_REWROTE] * 5, "found at the fourth call, the next look at the whole"


def test_a_result_of_an_older_call_is_rendered_whole():
    template = CHATML.replace(
        LOOP,
        LOOP + "{% if m.role == 'tool' %}{% for o in messages %}{% for c in o.tool_calls or [] %}"
        "{% if c.id == m.tool_call_id %}{{ c.function.name }}{% endif %}{% endfor %}{% endfor %}{% endif %}",
    )
    chat = Chat(template.replace("m['content'] +", "m['content'] + (m.tool_calls | tojson if m.tool_calls else '') +"))
    function = {"name": "add", "arguments": "{}"}
    first = {"role": "assistant", "content": "x", "tool_calls": [{"id": "a", "type": "function", "function": function}]}
    messages = [user("q"), first, tool("1", "a"), assistant("hi"), user("b"), assistant("hi"), tool("2", "a")]
    for size in (1, 3, 5):
        chat.ask(messages[:size], "hi", message=first if size == 1 else None, tools=[ADD])
    prompt, _ = chat.ask(messages, tools=[ADD])
    assert chat.template.decode(prompt.ids, with_specials=True).endswith(chat.render(messages, [ADD])[-60:])


def test_the_day_that_changes_forks_and_is_no_wrong_finding():
    chat = Chat("{{ '[' + strftime_now('%d') + ']' }}" + CHATML)
    day, plain = ["01"], chat.tokenizer.apply_chat_template

    class Clocked:
        chat_template = chat.tokenizer.chat_template
        encode, decode = chat.tokenizer.encode, chat.tokenizer.decode

        def apply_chat_template(self, conversation, **options):
            return plain(conversation, strftime_now=lambda form: day[0], **options)

    chat.template = ChatTemplate(Clocked())
    chat.history = type(chat.history)(chat.template, frozenset({chat.end}))
    forks = []

    def after(turn, prompt, messages):
        forks.append(prompt.fork)
        day[0] = "02" if turn >= 6 else "01"

    converse(chat, 9, after=after)
    assert forks == [ForkCause.FIRST, *[NO_FORK] * 5, ForkCause.TEMPLATE_REWROTE, NO_FORK, NO_FORK]
    assert chat.history._locality.num_distrusted == 0

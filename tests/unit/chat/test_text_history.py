"""Plain prompts go on from the exact ids of an earlier call."""

from chat_models import CHATML, Chat, made_call
from hypothesis import given
from hypothesis import strategies as st

from agentjet.chat.text_history import TextHistory
from agentjet.schemas.call import FinishReason, ForkCause


class Plain:
    """A history of plain prompts with a scripted model."""

    def __init__(self, **options):
        self.chat = Chat(CHATML, **options)
        self.history = self.fresh()
        self.calls = []

    def fresh(self):
        return TextHistory(self.chat.template, frozenset({self.chat.end}))

    def ask(self, text, ids=(), *, finish=FinishReason.LENGTH, content=None, agent=""):
        prompt = self.history.prompt(text, agent=agent)
        shown = self.chat.template.decode(ids) if content is None else content
        message = {"role": "assistant", "content": shown}
        options = {"messages": (), "prompt": prompt.text, "message": message, "finish_reason": finish}
        call = made_call(len(self.calls), prompt, ids, agent=agent, **options)
        self.history.add(call)
        self.calls.append(call)
        return prompt, call


def split(plain, text):
    """Ids of a text, one for each byte: as no tokenizer would cut it."""
    return [token for char in text for token in plain.chat.encode(char)]


def test_sampled_text_is_never_tokenized_again():
    plain = Plain()
    sampled = split(plain, "low")
    assert tuple(sampled) != plain.chat.encode("low")
    first, call = plain.ask("q:", sampled)
    second, _ = plain.ask("q:low hi")
    assert (second.parent, second.fork) == (call.call, ForkCause.NONE)
    assert second.ids == (*first.ids, *sampled, *plain.chat.encode(" hi"))
    assert second.increment == plain.chat.encode(" hi")
    assert second.text == " hi"


def test_a_call_keeps_only_the_ids_that_it_adds():
    plain, text = Plain(), "q"
    for _ in range(8):
        plain.ask(text, split(plain, "low"))
        text += "low, "
    prompt, _ = plain.ask(text)
    assert sum(len(turn.added_ids) for turn in plain.history._turns.values()) == len(prompt.ids)


def test_an_end_token_that_is_written_out_goes_on():
    plain = Plain()
    _, call = plain.ask("q", [*split(plain, "low"), plain.chat.end], finish=FinishReason.STOP)
    prompt, _ = plain.ask("qlow<|im_end|>\nmore")
    assert (prompt.parent, prompt.increment) == (call.call, plain.chat.encode("\nmore"))


def test_an_end_token_that_is_left_out_keeps_the_other_ids():
    plain = Plain()
    sampled = split(plain, "low")
    plain.ask("q", [*sampled, plain.chat.end], finish=FinishReason.STOP)
    prompt, _ = plain.ask("qlow more")
    assert (prompt.parent, prompt.fork) == (None, ForkCause.END_TOKEN)
    assert prompt.ids == (*plain.chat.encode("q"), *sampled, *plain.chat.encode(" more"))


def test_l12_a_stop_string_goes_on_where_it_is_written_out_and_forks_where_not():
    plain = Plain()
    _, call = plain.ask("q", split(plain, "low STOP"), finish=FinishReason.STOP, content="low ")
    assert plain.history.prompt("qlow STOP 1").parent == call.call
    fork = plain.history.prompt("qlow then")
    assert (fork.parent, fork.fork, fork.ids) == (None, ForkCause.STOP_STRING, plain.chat.encode("qlow then"))


def test_t7_agents_do_not_share_a_text():
    plain = Plain()
    plain.ask("q", split(plain, "low"), agent="a")
    assert plain.history.prompt("qlow", agent="b").fork is ForkCause.FIRST
    assert plain.history.prompt("qlow", agent="a").fork is ForkCause.NONE


def test_t6_there_is_one_bos():
    plain = Plain(adds_bos=True)
    (bos,) = plain.chat.template.opening_ids
    assert plain.history.prompt("q").ids == (bos, *plain.chat.encode("q"))
    assert plain.history.prompt("<s>q").ids == (bos, *plain.chat.encode("q"))
    assert Plain().history.prompt("q").ids == plain.chat.encode("q")


TEXTS = st.text("lowhi12 é中", max_size=8)


@given(st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=5))
def test_turns_are_one_branch_and_are_rebuilt_from_their_calls(turns):
    plain, text, ids = Plain(), "q", ()
    for added, reply in turns:
        text += added
        prompt, call = plain.ask(text, split(plain, reply))
        assert prompt.ids[: len(ids)] == ids
        assert plain.chat.template.decode(prompt.ids) == text
        ids, text = prompt.ids + call.completion_ids, text + reply
    assert [call.parent for call in plain.calls[1:]] == [call.call for call in plain.calls[:-1]]
    again = plain.fresh()
    for call in plain.calls:
        again.add(call)
        again.add(call)
    assert again.prompt(text + "!") == plain.history.prompt(text + "!")
    assert len(again) == len(turns)
    assert plain.calls[0].call in again

"""Token-exact histories: the prompt of a request continues an earlier call's ids, or is rendered afresh with a cause.

Invariants:

- A request whose messages are an earlier call's messages plus its reply, and then more, keeps that call's ids (prompt
  and sampled) exactly; only the text that the template adds is encoded.
- That happens only if the template's rendering of the whole request continues the earlier prompt and shows the reply
  (up to white space and the spelling of tool calls). Otherwise the request is rendered whole, and the cause is named.
- Where the template is found to allow it (`locality`), only the end is rendered. The whole is rendered to compare with
  it at the 2nd, 4th, 8th ... call of a conversation and where a new trait comes in; a difference is never passed over:
  the whole rendering stands, the difference is counted, and the template is rendered whole from then on.
- A request that goes on from a call by another reply than it gave continues what came before that reply, where that is
  known, and counts as edited.
- Reasoning that an agent leaves out of a reply it sends back, as most client packages do, is put back: what becomes of
  old reasoning is for the template to say. Reasoning that it changes is an edit.
- What the template adds is prompt: also an end-of-turn token that a truncated reply lacks.
- Agent name, tools, roles, texts and tool calls all take part in the comparison. The name on an assistant message does
  not, only in the rendering.

One history holds the calls of one attempt for one model. Its memory grows with the number of messages and tokens, for a
call keeps only what it adds to its parent; so does the work, but for copying ids and comparing messages. It does not
know where calls are stored.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentjet.chat.continuation import RenderedText, added_after
from agentjet.chat.conversation import Conversation, ConversationReader, Trait, root
from agentjet.chat.locality import Locality, Tail, render_opening, render_tail
from agentjet.chat.message import normalise
from agentjet.chat.template import ChatTemplate
from agentjet.chat.text_history import TextHistory, TextPrompt
from agentjet.chat.turn import Turn, Turns
from agentjet.errors import BadRequestError
from agentjet.schemas.call import Call, FinishReason, ForkCause
from agentjet.schemas.ids import CallId


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a call starts from."""

    parent: CallId | None
    """Call whose prompt and completion come first."""
    ids: tuple[int, ...]
    """The whole prompt, a forced beginning of the reply included."""
    increment: tuple[int, ...]
    """The ids after the parent's; the whole prompt when there is no parent."""
    fork: ForkCause
    num_messages_before: int
    """Messages of the request that stand in the parent and its reply."""
    text: str
    """What the rendering adds to the parent's prompt, the reply included; the whole rendering when there is no parent.
    Without a forced beginning of the reply."""
    conversation: Conversation
    """The whole request."""
    misses_reply: bool
    """The messages after the parent's hold a reply that no known call gave."""
    opening: str | None
    """What the end of this conversation is rendered behind now; None where it is not rendered apart."""
    compared: Trait | None
    """Traits with which the end was found to render as in the whole; None while it was not compared."""


@dataclass(frozen=True, slots=True)
class _Continued:
    """A rendering that continues a turn."""

    text: str
    """What it adds to the turn's prompt, the reply included."""
    added: str
    """What it adds after the reply."""
    opening: str | None
    compared: Trait | None


class History:
    """The finished calls of one attempt.

    Args:
        template: The model's.
        stop_ids: Tokens that end a reply.
        locality: What is known of the template; histories of one model share it.
    """

    def __init__(self, template: ChatTemplate, stop_ids: frozenset[int], locality: Locality | None = None) -> None:
        self._template = template
        self._stop_ids = stop_ids
        self._locality = locality or Locality(template)
        self._turns = Turns()
        self.texts = TextHistory(template, stop_ids)
        """The calls that were asked by plain prompts."""
        self._reader = ConversationReader(self._turns.restore)

    def __contains__(self, call: CallId) -> bool:
        return call in self._turns or call in self.texts

    def __len__(self) -> int:
        return len(self._turns) + len(self.texts)

    def prompt(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] = (), agent: str = "", forced: str = ""
    ) -> Prompt:
        """The prompt of a new request.

        `forced` is the text that the reply has to begin with. It is prompt, so never trained, and the message that
        the agent gets has to include it.

        Raises BadRequestError for messages that are no text chat, or that the template refuses.
        """
        return self.prompt_for(self.read(messages, tools=tools, agent=agent), forced=forced)

    def read(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] = (), agent: str = ""
    ) -> Conversation:
        """A request in canonical form; BadRequestError for messages that are no text chat."""
        return self._reader.read(messages, tools, agent)

    def num_new_messages(self, conversation: Conversation) -> int:
        """Messages that will probably have to be rendered and encoded."""
        turn, size = self._turns.longest(conversation.links)
        is_compared = turn is not None and not turn.is_cut and turn.compared is not None
        is_local = is_compared and self._is_local(conversation, size)
        return len(conversation.messages) - size * is_local

    def prompt_for(self, conversation: Conversation, *, forced: str = "") -> Prompt:
        """As `prompt`, for a request that was read here."""
        turn, size = self._turns.longest(conversation.links)
        misses_reply = any(message["role"] == "assistant" for message in conversation.messages[size:])
        continued = None
        if turn is None:
            fork = self._turns.why_fresh(conversation)
        elif turn.is_cut:
            fork = ForkCause.STOP_STRING
        else:
            continued = self._continue(turn, conversation, size)
            fork = ForkCause.TEMPLATE_REWROTE
        if turn is None or continued is None:
            parent, text, before = None, self._template.render(conversation.messages, conversation.tools), ()
            increment = self._template.encode(text)
            opening, compared = self._opening(conversation), None
        else:
            parent, text, before = turn.call, continued.text, self._turns.ids(turn)
            fork = ForkCause.HISTORY_EDITED if misses_reply else ForkCause.NONE
            increment = self._encode_added(turn, continued.added)
            opening, compared = continued.opening, continued.compared
        increment += self._template.encode_behind(text, forced)
        return Prompt(
            parent=parent,
            ids=before + increment,
            increment=increment,
            fork=fork,
            num_messages_before=size if parent else 0,
            text=text,
            conversation=conversation,
            misses_reply=misses_reply,
            opening=opening,
            compared=compared,
        )

    def add(self, call: Call, *, prompt: Prompt | TextPrompt | None = None) -> None:
        """Takes a finished call; `prompt` is what it started from, where that is at hand.

        A parent has to be added before its children; KeyError otherwise.
        """
        if call.call in self._turns:
            return
        if call.prompt is not None or isinstance(prompt, TextPrompt):
            self.texts.add(call)
            return
        parent = self._turns.parent(call)
        num_before = parent.num_messages if parent else 0
        if prompt is not None:
            added, link = prompt.conversation.messages[num_before:], prompt.conversation.links[-1]
        else:
            added, link = [], parent.link if parent else root(call.tools, call.agent)
            for message in call.messages:
                added.append(self._turns.restore(link, normalise(message)))
                link = link.then(added[-1])
        reply = normalise(call.message, "message")
        last = call.completion_ids[-1] if call.completion_ids else None
        has_ended = call.finish_reason in (FinishReason.STOP, FinishReason.TOOL_CALLS)
        turn = Turn(
            call=call.call,
            parent=call.parent,
            added_messages=(*added, reply),
            num_messages=num_before + len(added) + 1,
            link=link.then(reply),
            tools=call.tools,
            text=RenderedText.of(prompt.text, parent.text if parent else None) if prompt else None,
            opening=prompt.opening if prompt else None,
            compared=prompt.compared if prompt else None,
            depth=parent.depth + 1 if parent else 1,
            added_ids=array("i", call.prompt_ids + call.completion_ids),
            end_id=last if last in self._stop_ids else None,
            is_cut=has_ended and last not in self._stop_ids,
        )
        self._turns.add(turn, link, call, prompt.ids + self._template.shared(call.completion_ids) if prompt else None)

    def _continue(self, turn: Turn, conversation: Conversation, size: int) -> _Continued | None:
        """How the request's rendering continues the turn; None when it does not."""
        end = self._template.reply_end
        if end is None:
            return None
        tail = self._tail(conversation, size)
        if tail is not None and self._is_compared(turn, tail, conversation):
            added = added_after(tail.text, turn.reply, end, self._template.reply_format, conversation.tools)
            if added is not None:
                return _Continued(tail.text, added, turn.opening, turn.compared)
        whole = self._template.render(conversation.messages, conversation.tools)
        before = self._rendered(turn)
        text = whole[before.size :] if before.begins(whole) else None
        if tail is not None and tail.text != text:
            if turn.opening in (None, tail.opening):  # otherwise only the day has changed that the opening tells
                self._locality.distrust()
            tail = None
        if text is None:
            return None
        added = added_after(text, turn.reply, end, self._template.reply_format, conversation.tools)
        if added is None:
            return None
        return _Continued(text, added, tail and tail.opening, conversation.traits if tail else None)

    def _tail(self, conversation: Conversation, size: int) -> Tail | None:
        """The rendering of the reply and what follows it; None where that says nothing of the whole rendering."""
        if not self._is_local(conversation, size):
            return None
        try:
            return render_tail(
                self._template, conversation.messages, size - 1, conversation.tools, conversation.num_system
            )
        except BadRequestError:
            return None

    def _is_local(self, conversation: Conversation, size: int) -> bool:
        reply, added = conversation.messages[size - 1], conversation.messages[size:]
        calls = {call["id"] for call in reply.get("tool_calls", ())}
        is_own = all(message["role"] != "tool" or message.get("tool_call_id") in calls for message in added)
        if not added or not is_own or any(message["role"] == "assistant" for message in added):
            return False
        adds_user = any(message["role"] == "user" for message in added)
        return self._locality.holds(conversation.traits, has_tools=bool(conversation.tools), adds_user=adds_user)

    def _is_compared(self, turn: Turn, tail: Tail, conversation: Conversation) -> bool:
        """Whether the whole rendering needs no look this time."""
        depth = turn.depth + 1
        is_due = depth & (depth - 1) == 0
        knows = turn.compared is not None and conversation.traits in turn.compared
        return knows and not is_due and tail.opening == turn.opening

    def _opening(self, conversation: Conversation) -> str | None:
        try:
            return render_opening(self._template, conversation.messages, conversation.tools, conversation.num_system)
        except BadRequestError:
            return None

    def _rendered(self, turn: Turn) -> RenderedText:
        """The turn's prompt; that of a stored call is rendered now."""
        if turn.text is None:
            messages = self._turns.messages(turn)[:-1]
            turn.text = RenderedText.of(self._template.render(messages, turn.tools))
        return turn.text

    def _encode_added(self, turn: Turn, added: str) -> tuple[int, ...]:
        """Ids of the added text, without the end-of-turn token where that was sampled."""
        ids = self._template.encode(added)
        if turn.end_id is None:
            return ids
        end_text = self._template.decode([turn.end_id], with_specials=True)
        if not added.startswith(end_text):
            return ids  # it ended with another token than the template's
        return ids[1:] if ids[:1] == (turn.end_id,) else self._template.encode(added[len(end_text) :])

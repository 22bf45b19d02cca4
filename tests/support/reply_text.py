"""Replies of every family of models, and their reading piece by piece."""

from agentjet.chat.piece import Reply
from agentjet.chat.reply_format import ReplyFormat, ReplyParser
from agentjet.chat.thinking import THINKING
from agentjet.chat.tool_family import FORMATS

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "note": {"type": "string"}}},
    },
}
BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEP, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


def calls_text(family, *calls):
    """How a family writes (name, arguments) pairs."""
    wrap = {
        "hermes": ('<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>', "\n", "{}"),
        "llama3": ('{{"name": "{}", "parameters": {}}}', "; ", "{}"),
        "mistral": ('{{"name": "{}", "arguments": {}}}', ", ", "[TOOL_CALLS][{}]"),
        "mistral_args": ("[TOOL_CALLS]{}[ARGS]{}", "", "{}"),
        "deepseek": (CALL + "function" + SEP + "{}\n```json\n{}\n```" + CALL_END, "\n", BEGIN + "{}" + END),
        "deepseek_v31": (CALL + "{}" + SEP + "{}" + CALL_END, "", BEGIN + "{}" + END),
        "gemma": ('```tool_call\n{{"name": "{}", "parameters": {}}}\n```', "\n", "{}"),
    }
    one, between, around = wrap[family]
    return around.format(between.join(one.format(name, arguments) for name, arguments in calls))


JSON_FAMILIES = ("hermes", "llama3", "mistral", "mistral_args", "deepseek", "deepseek_v31", "gemma")
"""Whose arguments are JSON as the model wrote it."""


def format_of(family, *, thinking=None):
    return ReplyFormat(FORMATS[family], THINKING[thinking] if thinking else None)


def read_cut(form, text, cuts, **options):
    """The reply, read in pieces of these sizes (the last one repeats); after each piece it has only grown."""
    parser, reply, at = ReplyParser(form, [ADD], **options), Reply(), 0
    sizes = list(cuts) or [1]
    while at < len(text):
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        reply.add(parser.feed(text[at : at + size]))
        at += size
    reply.add(parser.finish())
    return reply

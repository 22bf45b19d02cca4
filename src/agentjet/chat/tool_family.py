"""The formats of tool calls that the families of open models write, by the name of the setting `tool_parser`.

A family is told by what its chat template writes. Where a template says nothing of tools, Hermes is taken, which most
models were taught. Gemma 3 has no marks for calls: its guide asks for the JSON object `{"name", "parameters"}`,
bare or in a fence; that is read.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from agentjet.chat.call_head import NamedHead, ObjectHead
from agentjet.chat.tool_format import MarkedFormat, ToolFormat
from agentjet.chat.xml_call import XmlHead

_BEGIN, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _SEP, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_NAME = r"(?P<name>[^\s<>{}\[\]|｜]+)"
_OBJECT = r'{"name": "'

HERMES = MarkedFormat(
    openings=("<tool_call>",),
    heads=(ObjectHead(), XmlHead()),
    closings=("</tool_call>",),
    glue=("</tool_call>",),
    forced=f"<tool_call>\n{_OBJECT}",
    forced_end='", "arguments": ',
)
"""`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen 2.5 and 3, SmolLM."""

QWEN3_CODER = replace(HERMES, forced="<tool_call>\n<function=", forced_end=">\n")
"""`<tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>`."""

LLAMA3 = MarkedFormat(
    openings=("<|python_tag|>",),
    heads=(ObjectHead(is_picky=True),),
    glue=(";",),
    begins_bare=True,
    follows_bare=True,
    forced=_OBJECT,
    forced_end='", "parameters": ',
)
"""`{"name": ..., "parameters": {...}}`, where the reply begins or after `<|python_tag|>`; several parted by `;`."""

_MISTRAL_HEADS = (
    ObjectHead(r"\[?"),
    NamedHead(rf"\s*{_NAME}\s*(?:\[CALL_ID\]\s*[\w-]+\s*)?(?:\[ARGS\])?"),
)
MISTRAL = MarkedFormat(
    openings=("[TOOL_CALLS]",),
    heads=_MISTRAL_HEADS,
    glue=(",", "]"),
    inner=("[ARGS]", "[CALL_ID]"),
    follows_bare=True,
    forced=f"[TOOL_CALLS][{_OBJECT}",
    forced_end='", "arguments": ',
)
"""`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`."""

MISTRAL_ARGS = replace(MISTRAL, forced="[TOOL_CALLS]", forced_end="[ARGS]")
"""`[TOOL_CALLS]name[ARGS]{...}`, once for each call: Mistral since the end of 2024."""

DEEPSEEK_V31 = MarkedFormat(
    openings=(_BEGIN, _CALL),
    heads=(
        NamedHead(rf"\s*(?:{_CALL})?\s*\w+{_SEP}\s*{_NAME}\s*```json"),
        NamedHead(rf"\s*(?:{_CALL})?\s*{_NAME}\s*{_SEP}"),
    ),
    closings=(f"\n```{_CALL_END}", _CALL_END, _END),
    glue=("```", _CALL_END, _END),
    inner=(_SEP,),
    forced=f"{_BEGIN}{_CALL}",
    forced_end=_SEP,
)
"""`<｜tool▁calls▁begin｜>`, then for each call its name, a mark and the arguments: DeepSeek from V3.1 on."""

DEEPSEEK = replace(DEEPSEEK_V31, forced=f"{_BEGIN}{_CALL}function{_SEP}", forced_end="\n```json\n")
"""The same marks, the type in place of the name, then the name, and the arguments in a fence: DeepSeek V3 and R1."""

GEMMA = MarkedFormat(
    openings=("```json", "```tool_call", "```tool_code"),
    heads=(ObjectHead(is_picky=True),),
    closings=("```",),
    glue=("```", ","),
    begins_bare=True,
    follows_bare=True,
    forced=_OBJECT,
    forced_end='", "parameters": ',
)
"""`{"name": ..., "parameters": {...}}`, where the reply begins or in a fence."""

FORMATS: Mapping[str, ToolFormat] = MappingProxyType(
    {
        "hermes": HERMES,
        "qwen3_coder": QWEN3_CODER,
        "llama3": LLAMA3,
        "mistral": MISTRAL,
        "mistral_args": MISTRAL_ARGS,
        "deepseek": DEEPSEEK,
        "deepseek_v31": DEEPSEEK_V31,
        "gemma": GEMMA,
    }
)
"""By name."""


def detect_format(chat_template: str) -> str:
    """Name of the format that a chat template writes."""
    signs = (
        (_SEP, "deepseek" if "```json" in chat_template else "deepseek_v31"),
        ("[TOOL_CALLS]", "mistral_args" if "[ARGS]" in chat_template else "mistral"),
        ("<tool_call>", "qwen3_coder" if "<function=" in chat_template else "hermes"),
        ("<|start_header_id|>", "llama3"),
        ("<|python_tag|>", "llama3"),
        ("<start_of_turn>", "gemma"),
    )
    return next((name for sign, name in signs if sign in chat_template), "hermes")

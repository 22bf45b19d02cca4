"""Small tokenizers with chat templates that write the documented formats of the common model families.

The templates are written from the formats' descriptions and keep what is hard about each: Qwen3 strips old thinking,
Llama 3 writes the day, Mistral shows the tools before the last user message only and insists on call ids of nine
characters, DeepSeek V3 writes tool calls only where there is no text and R1 opens the thinking for the model, Gemma has
no system role and no tools, ChatML shows neither tools nor thinking apart. Vocabularies are trained here on a few lines
of text, so that words have several spellings in tokens; special tokens are the families' own.
"""

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = (
    "the weather in the town is cold and the river is low; lower and lowest, newer and newest, wide and wider",
    "call the tool with the name of the town and wait for the result, then think about the answer and say it",
    "12 and 120 and 1200; 3.14; $5.00 (five) [six] {seven}; what? who! where: there. don't won't can't",
    "naïve café über Straße, здравствуй мир, 你好 世界, こんにちは, مرحبا, 🙂🙂, e\u0301 a\u030a\n\n\tindented\r\nline",
    "STOPPED and STOPPED, the river STOPPED",
    '{"name": "weather", "arguments": {"town": "low river", "days": 12}}\n{"result": "cold", "ok": true}',
)
VOCABULARY_SIZE = 700
CHATML = """
{%- for m in messages %}
{%- if loop.first and m.role != 'system' %}{{ '<|im_start|>system\\nYou are helpful<|im_end|>\\n' }}{% endif %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
_QWEN_HEAD = """
{%- set given = messages[0].content if messages[0].role == 'system' else 'You are helpful.' %}
{{- '<|im_start|>system\\n' + given }}
{%- if tools %}
{{- '\\n\\n# Tools\\n\\nSignatures:\\n<tools>' }}
{%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}
{{- '\\n</tools>\\n\\nAnswer with <tool_call>\\n{"name": <name>, "arguments": <object>}\\n</tool_call>' }}
{%- endif %}
{{- '<|im_end|>\\n' }}"""
_QWEN_CALLS = """
{%- for call in m.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}"""
_QWEN_RESULT = """
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}"""
QWEN25 = (
    _QWEN_HEAD
    + """
{%- for m in messages %}
{%- if m.role == 'tool' %}"""
    + _QWEN_RESULT
    + """
{%- elif m.role == 'assistant' and m.tool_calls %}
{{- '<|im_start|>assistant' }}{% if m.content %}{{ '\\n' + m.content }}{% endif %}"""
    + _QWEN_CALLS
    + """
{{- '<|im_end|>\\n' }}
{%- elif not (loop.first and m.role == 'system') %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
)
QWEN3 = (
    _QWEN_HEAD
    + """
{%- set seen = namespace(last=messages | length) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set seen.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'tool' %}"""
    + _QWEN_RESULT
    + """
{%- elif m.role == 'assistant' %}
{%- set content, thought = m.content, m.reasoning_content or '' %}
{%- if not thought and '</think>' in content %}
{%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > seen.last and (loop.last or thought) %}
{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
{%- else %}{{ content }}{% endif %}"""
    + _QWEN_CALLS
    + """
{{- '<|im_end|>\\n' }}
{%- elif not (loop.first and m.role == 'system') %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
)
LLAMA3 = """
{{- bos_token }}
{%- set given = messages[0].content if messages[0].role == 'system' else '' %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: ' + strftime_now('%d %b %Y') + '\\n\\n' }}
{{- given | trim + '<|eot_id|>' }}
{%- set seen = namespace(tools=false) %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (m.content | tojson) + '<|eot_id|>' }}
{%- elif m.tool_calls %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- for call in m.tool_calls %}
{{- ('' if loop.first else '; ') + '{"name": "' + call.function.name + '", "parameters": ' }}
{{- (call.function.arguments | tojson) + '}' }}
{%- endfor %}{{ '<|eot_id|>' }}
{%- elif not (loop.first and m.role == 'system') %}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}
{%- if m.role == 'user' and tools and not seen.tools %}
{%- set seen.tools = true %}
{{- 'Answer with {"name": name, "parameters": object}.\\n\\n' }}
{%- for tool in tools %}{{ (tool | tojson) + '\\n\\n' }}{% endfor %}
{%- endif %}
{{- m.content | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
MISTRAL = """
{{- bos_token }}
{%- set given = messages[0].content + '\\n\\n' if messages[0].role == 'system' else '' %}
{%- set seen = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set seen.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}
{%- if tools and loop.index0 == seen.last %}
{{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
{%- endif %}
{{- '[INST] ' + (given if loop.index0 == seen.last else '') + m.content + '[/INST]' }}
{%- elif m.tool_calls %}
{{- '[TOOL_CALLS] [' }}
{%- for call in m.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('ids of tool calls have nine characters') }}{% endif %}
{{- '{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
{{- ', "id": "' + call.id + '"}' + ('' if loop.last else ', ') }}
{%- endfor %}{{ ']' + eos_token }}
{%- elif m.role == 'tool' %}
{{- '[TOOL_RESULTS] {"content": ' + (m.content | tojson) + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- elif m.role == 'assistant' %}{{ ' ' + m.content | trim + eos_token }}
{%- elif not loop.first %}{{ raise_exception('a system message comes first') }}
{%- endif %}
{%- endfor %}"""
_DEEPSEEK_HEAD = """
{{- bos_token }}{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}
{%- set now = namespace(result=false) %}
{%- for m in messages %}
{%- if m.role == 'user' %}
{%- if now.result %}{{ '<｜tool▁outputs▁end｜>' }}{% set now.result = false %}{% endif %}
{{- '<｜User｜>' + m.content }}
{%- elif m.role == 'assistant' and m.content is none %}
{%- if now.result %}{{ '<｜tool▁outputs▁end｜>' }}{% set now.result = false %}{% endif %}
{{- '<｜Assistant｜><｜tool▁calls▁begin｜>' }}
{%- for call in m.tool_calls %}
{{- ('' if loop.first else '\\n') + '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call.function.name }}
{{- '\\n```json\\n' + (call.function.arguments | tojson) + '\\n```<｜tool▁call▁end｜>' }}
{%- endfor %}{{ '<｜tool▁calls▁end｜>' + eos_token }}
{%- elif m.role == 'tool' %}
{{- '\\n' if now.result else '<｜tool▁outputs▁begin｜>' }}{% set now.result = true %}
{{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
{%- elif m.role == 'assistant' %}
{%- set content = CONTENT %}
{{- ('<｜tool▁outputs▁end｜>' if now.result else '<｜Assistant｜>') + content + eos_token }}
{%- set now.result = false %}
{%- endif %}
{%- endfor %}
{%- if now.result %}{{ '<｜tool▁outputs▁end｜>' }}
{%- elif add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"""
DEEPSEEK_V3 = _DEEPSEEK_HEAD.replace("CONTENT", "m.content")
DEEPSEEK_R1 = _DEEPSEEK_HEAD.replace("CONTENT", "m.content.split('</think>')[-1]").replace(
    "{{ '<｜Assistant｜>' }}{% endif %}", "{{ '<｜Assistant｜><think>\\n' }}{% endif %}"
)
GEMMA = """
{{- bos_token }}
{%- set given = messages[0].content + '\\n\\n' if messages[0].role == 'system' else '' %}
{%- for m in (messages[1:] if given else messages) %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('user and assistant take turns') }}{% endif %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}
{{- (given if loop.first else '') + m.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""
_DEEPSEEK_SPECIALS = (
    *("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>", "<｜tool▁sep｜>"),
    *(f"<｜tool▁{thing}▁{edge}｜>" for thing in ("calls", "call", "outputs", "output") for edge in ("begin", "end")),
)


@dataclass(frozen=True, slots=True)
class Family:
    """How one family of models writes."""

    name: str
    template: str
    end: str
    """The token that ends a reply."""
    specials: tuple[str, ...]
    other_end: str | None = None
    """Another token that ends a reply, though the template does not write it."""
    bos: str | None = None
    call: str = ""
    """One tool call, with `NAME` and `ARGUMENTS`; empty where the family has no tools."""
    calls: tuple[str, str, str] = ("", "\n", "")
    """Before, between and behind several."""
    markers: tuple[str, ...] = ()
    """Added tokens that are not special."""
    thinks: bool = False
    is_sentencepiece: bool = False

    @property
    def has_tools(self) -> bool:
        """Whether the template can write tool calls."""
        return bool(self.call)

    def say_calls(self, calls: Sequence[tuple[str, dict[str, Any]]]) -> str:
        """A reply of tool calls, as the model writes it."""
        texts = [self.call.replace("NAME", name).replace("ARGUMENTS", json.dumps(given)) for name, given in calls]
        before, between, behind = self.calls
        return before + between.join(texts) + behind

    def tokenizer(self) -> Any:
        """The family's small `PreTrainedTokenizerFast`, with its template."""
        return _tokenizer(self.name)


_HERMES = '<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>'
_IM = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_CALL_MARKERS = ("<tool_call>", "</tool_call>")
_DEEPSEEK_CALL = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nARGUMENTS\n```<｜tool▁call▁end｜>"
_DEEPSEEK_CALLS = ("<｜tool▁calls▁begin｜>", "\n", "<｜tool▁calls▁end｜>")
_BOS, _DEEPSEEK_END = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
FAMILIES = {
    family.name: family
    for family in (
        Family("chatml", CHATML, "<|im_end|>", _IM, other_end="<|endoftext|>"),
        Family("qwen25", QWEN25, "<|im_end|>", _IM, other_end="<|endoftext|>", call=_HERMES, markers=_CALL_MARKERS),
        Family(
            "qwen3",
            QWEN3,
            "<|im_end|>",
            _IM,
            call=_HERMES,
            markers=(*_CALL_MARKERS, "<think>", "</think>"),
            thinks=True,
        ),
        Family(
            "llama3",
            LLAMA3,
            "<|eot_id|>",
            ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>"),
            other_end="<|eom_id|>",
            bos="<|begin_of_text|>",
            call='{"name": "NAME", "parameters": ARGUMENTS}',
            calls=("", "; ", ""),
        ),
        Family(
            "mistral",
            MISTRAL,
            "</s>",
            (
                *("</s>", "[INST]", "[/INST]", "[TOOL_CALLS]"),
                *("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
            ),
            bos="<s>",
            call='{"name": "NAME", "arguments": ARGUMENTS}',
            calls=("[TOOL_CALLS] [", ", ", "]"),
            is_sentencepiece=True,
        ),
        Family(
            "deepseek_v3",
            DEEPSEEK_V3,
            _DEEPSEEK_END,
            _DEEPSEEK_SPECIALS,
            bos=_BOS,
            call=_DEEPSEEK_CALL,
            calls=_DEEPSEEK_CALLS,
        ),
        Family(
            "deepseek_r1",
            DEEPSEEK_R1,
            _DEEPSEEK_END,
            _DEEPSEEK_SPECIALS,
            bos=_BOS,
            call=_DEEPSEEK_CALL,
            calls=_DEEPSEEK_CALLS,
            markers=("<think>", "</think>"),
            thinks=True,
        ),
        Family(
            "gemma",
            GEMMA,
            "<end_of_turn>",
            ("<start_of_turn>", "<end_of_turn>", "<eos>"),
            other_end="<eos>",
            bos="<bos>",
        ),
    )
}


@functools.cache
def _tokenizer(name: str) -> PreTrainedTokenizerFast:
    family = FAMILIES[name]
    fast = _sentencepiece() if family.is_sentencepiece else _byte_level()
    specials = [*([family.bos] if family.bos else []), *family.specials]
    fast.add_special_tokens([AddedToken(token, special=True) for token in specials])
    fast.add_tokens([AddedToken(token, special=False) for token in family.markers])
    return PreTrainedTokenizerFast(
        tokenizer_object=fast,
        bos_token=family.bos,
        eos_token=family.end,
        chat_template=family.template,
        clean_up_tokenization_spaces=False,
    )


def _byte_level() -> Tokenizer:
    fast = Tokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    _train(fast, trainers.BpeTrainer(vocab_size=VOCABULARY_SIZE, initial_alphabet=alphabet, show_progress=False))
    return fast


def _sentencepiece() -> Tokenizer:
    """With a space before the first word, and bytes for what it does not know."""
    fast = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    fast.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fast.normalizer = normalizers.Sequence([])
    bytes_ = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    _train(fast, trainers.BpeTrainer(vocab_size=VOCABULARY_SIZE, special_tokens=bytes_, show_progress=False))
    # The bytes are plain pieces: only the trainer takes them as special.
    plain = json.loads(fast.to_str())
    plain["added_tokens"] = []
    return Tokenizer.from_str(json.dumps(plain))


def _train(fast: Tokenizer, trainer: trainers.BpeTrainer) -> None:
    fast.train_from_iterator(CORPUS * 8, trainer)

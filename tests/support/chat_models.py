"""Small byte-level tokenizers with the chat templates that the tests need."""

import functools

from chat_family import Family
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from agentjet.chat.history import History
from agentjet.chat.message import normalise
from agentjet.chat.template import ChatTemplate
from agentjet.schemas.call import Call, FinishReason, ForkCause, Usage
from agentjet.schemas.ids import CallId, RunId
from agentjet.schemas.sampling import Sampling

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QWEN = """{%- if tools %}<|im_start|>system
# Tools
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}<|im_end|>
{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
{%- else %}
{%- set content = m.content %}
{%- if m.role == 'assistant' and '</think>' in content and loop.index0 < ns.last %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}
{%- endif %}
{{- '<|im_start|>' + m.role + '\n' + content }}
{%- for call in m.tool_calls or [] %}
{%- if not loop.first or content %}{{ '\n' }}{% endif %}
{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
WITH_BOS = "{{ '<s>' }}" + CHATML
MERGES = [("l", "o"), ("lo", "w"), ("h", "i"), ("1", "2")]
RUN = RunId("test-aaaaaa")


@functools.cache
def tokenizer(template: str = CHATML, *, adds_bos: bool = False) -> PreTrainedTokenizerFast:
    """Bytes and a few merges; `adds_bos` makes plain encoding put `<s>` in front."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*alphabet, *("".join(pair) for pair in MERGES)])}
    fast = Tokenizer(models.BPE(vocab=vocabulary, merges=MERGES))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    specials = ["<s>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    fast.add_special_tokens([AddedToken(token, special=True) for token in specials])
    fast.add_tokens([AddedToken("<tool_call>", special=False), AddedToken("</tool_call>", special=False)])
    if adds_bos:
        bos = fast.token_to_id("<s>")
        fast.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    return PreTrainedTokenizerFast(
        tokenizer_object=fast,
        bos_token="<s>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


def made_call(number, prompt, completion, /, **fields) -> Call:
    """The stored call that answered a prompt, number `number` of its attempt."""
    return Call(
        run=RUN,
        call=CallId(f"C{number}"),
        ticket="g-0.0.0",
        attempt=1,
        model="m",
        engine="e",
        generation="x",
        parent=prompt.parent,
        prompt_ids=prompt.increment,
        completion_ids=tuple(completion),
        logprobs=(0.0,) * len(completion),
        versions=("0-0",),
        sampling=Sampling(),
        fork=prompt.fork,
        usage=Usage(prompt_tokens=0, completion_tokens=0),
        **fields,
    )


class Chat:
    """A history with a scripted model behind it."""

    def __init__(self, template: str = CHATML, *, adds_bos: bool = False, family: Family | None = None) -> None:
        self.tokenizer = family.tokenizer() if family else tokenizer(template, adds_bos=adds_bos)
        self.template = ChatTemplate(self.tokenizer)
        self.end = self.tokenizer.convert_tokens_to_ids(family.end if family else "<|im_end|>")
        self.history = History(self.template, frozenset({self.end}))
        self.calls: list[Call] = []

    def encode(self, text):
        return self.template.encode(text)

    def render(self, messages, tools=(), *, opens_reply=True):
        return self.template.render([normalise(m) for m in messages], tools, opens_reply=opens_reply)

    def ask(
        self, messages, reply="hi", *, ids=None, message=None, tools=(), agent="", finish=FinishReason.STOP, forced=""
    ):
        """One call; returns (prompt, call). `reply` is the sampled text, `ids` its tokens without the end."""
        prompt = self.history.prompt(messages, tools=tools, agent=agent, forced=forced)
        completion = tuple(self.encode(reply) if ids is None else ids)
        if finish is not FinishReason.LENGTH and finish != "cut":
            completion += (self.end,)
        finish = FinishReason.STOP if finish == "cut" else finish
        call = made_call(
            len(self.calls),
            prompt,
            completion,
            agent=agent,
            messages=tuple(messages[prompt.num_messages_before :]),
            tools=tuple(tools),
            message=message or {"role": "assistant", "content": forced + reply},
            finish_reason=finish,
        )
        self.history.add(call, prompt=prompt)
        self.calls.append(call)
        return prompt, call


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def tool(text, call="c"):
    return {"role": "tool", "content": text, "tool_call_id": call}


NO_FORK = ForkCause.NONE

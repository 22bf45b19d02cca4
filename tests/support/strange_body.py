"""Bodies of requests for every dialect: valid ones from their schemas, and those with one place made strange."""

import copy
from typing import Any

from hypothesis import strategies as st

Body = dict[str, Any]


def _nested(depth: int, shape: str) -> Any:
    value: Any = "deep"
    for _ in range(depth):
        value = [value] if shape == "list" else {"type": "object", "properties": value}
    return value


TEXTS = [
    "",
    "q",
    "é中\u202e",
    "\x00\x1b",
    "\ud800",
    "<|im_end|>\n<|im_start|>system",
    "a" * 3000,
    "{",
    "\ufffd\U0001f9d1",
]
STRANGE = [
    *(None, True, False, 0, 1, -1, 0.5, 1e308, 2**31, 2**63, 2**64, -(2**70), float("nan"), float("-inf")),
    *TEXTS,
    *([], {}, [None], [[]], {"": ""}, {"type": "function"}, {"type": "image_url", "image_url": {"url": "x"}}),
    *(_nested(depth, shape) for depth in (40, 260, 400) for shape in ("list", "object")),
    *([{"role": "user", "content": "q"}], {"role": "tool", "content": "q"}, {"type": "text", "text": 3}),
]

text = st.sampled_from(TEXTS)
schema = st.sampled_from([{"type": "object", "properties": {"a": {"type": "integer"}}}, {}])
_shared = {
    "stream": st.booleans(),
    "temperature": st.sampled_from([0, 0.5, 1, 2]),
    "top_p": st.sampled_from([0.1, 1]),
}
_function = st.fixed_dictionaries({"name": st.just("add"), "parameters": schema}, optional={"description": text})
_call = st.fixed_dictionaries({"name": st.just("add"), "arguments": st.sampled_from(['{"a": 1}', "{", ""])})
_chat_tool_call = st.fixed_dictionaries({"id": st.just("c1"), "type": st.just("function"), "function": _call})
_chat_message = st.one_of(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "developer"]), "content": text}),
    st.fixed_dictionaries(
        {"role": st.just("assistant"), "content": text},
        optional={"tool_calls": st.lists(_chat_tool_call, min_size=1, max_size=2), "reasoning_content": text},
    ),
    st.fixed_dictionaries({"role": st.just("tool"), "content": text, "tool_call_id": st.just("c1")}),
)
CHAT = st.fixed_dictionaries(
    {"model": st.just("m"), "messages": st.lists(_chat_message, min_size=1, max_size=4)},
    optional=_shared
    | {
        "n": st.integers(1, 3),
        "max_tokens": st.integers(1, 50),
        "seed": st.integers(-5, 5),
        "stop": text | st.lists(text, max_size=2),
        "logprobs": st.booleans(),
        "presence_penalty": st.sampled_from([0, 1]),
        "tools": st.lists(st.fixed_dictionaries({"type": st.just("function"), "function": _function}), max_size=2),
        "tool_choice": st.sampled_from(["auto", "none", "required"]),
        "user": text,
    },
)
_item = st.one_of(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "assistant"]), "content": text}),
    st.fixed_dictionaries(
        {
            "type": st.just("message"),
            "role": st.just("user"),
            "content": st.lists(st.fixed_dictionaries({"type": st.just("input_text"), "text": text}), max_size=2),
        }
    ),
    st.fixed_dictionaries({"type": st.just("function_call"), "call_id": st.just("c1")}).flatmap(
        lambda item: _call.map(lambda call: item | call)
    ),
    st.fixed_dictionaries({"type": st.just("function_call_output"), "call_id": st.just("c1"), "output": text}),
)
RESPONSES = st.fixed_dictionaries(
    {"model": st.just("m"), "input": text | st.lists(_item, min_size=1, max_size=4)},
    optional=_shared
    | {
        "instructions": text,
        "max_output_tokens": st.integers(1, 50),
        "store": st.booleans(),
        "metadata": st.just({"a": "b"}),
        "reasoning": st.just({"effort": "low"}),
        "previous_response_id": st.just("resp_nothing"),
        "tools": st.lists(_function.map(lambda function: {"type": "function", **function}), max_size=2),
        "tool_choice": st.sampled_from(["auto", "none", "required"]),
    },
)
_block = st.one_of(
    st.fixed_dictionaries({"type": st.just("text"), "text": text}),
    st.fixed_dictionaries({"type": st.just("tool_result"), "tool_use_id": st.just("t1"), "content": text}),
)
_use = st.fixed_dictionaries(
    {"type": st.just("tool_use"), "id": st.just("t1"), "name": st.just("add"), "input": st.just({"a": 1})}
)
_turn = st.one_of(
    st.fixed_dictionaries({"role": st.just("user"), "content": text | st.lists(_block, min_size=1, max_size=2)}),
    st.fixed_dictionaries({"role": st.just("assistant"), "content": text | st.lists(_use, min_size=1, max_size=2)}),
)
_counted = {"model": st.just("m"), "messages": st.lists(_turn, min_size=1, max_size=4)}
_claude_tool = st.fixed_dictionaries({"name": st.just("add"), "input_schema": schema}, optional={"description": text})
MESSAGES = st.fixed_dictionaries(
    _counted | {"max_tokens": st.integers(1, 50)},
    optional=_shared
    | {
        "system": text,
        "stop_sequences": st.lists(text, max_size=2),
        "top_k": st.integers(0, 5),
        "tools": st.lists(_claude_tool, max_size=2),
        "tool_choice": st.sampled_from([{"type": "auto"}, {"type": "any"}, {"type": "none"}]),
        "thinking": st.just({"type": "enabled", "budget_tokens": 1024}),
    },
)
COUNT = st.fixed_dictionaries(_counted, optional={"system": text, "tools": st.lists(_claude_tool, max_size=1)})
COMPLETIONS = st.fixed_dictionaries(
    {"model": st.just("m"), "prompt": text | st.lists(text, max_size=2) | st.just([1, 2, 3])},
    optional=_shared
    | {
        "max_tokens": st.integers(1, 50),
        "n": st.integers(1, 3),
        "stop": text,
        "echo": st.booleans(),
        "seed": st.just(3),
    },
)
SCHEMAS = {
    "/v1/chat/completions": CHAT,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": COUNT,
    "/v1/completions": COMPLETIONS,
}


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where a value has parts; one further name in each object."""
    found: list[tuple[Any, ...]] = []
    if isinstance(value, dict):
        found += [(*path, name) for name in (*value, "strange")]
        found += [place for name, part in value.items() for place in _places(part, (*path, name))]
    elif isinstance(value, list):
        found += [
            place for index, part in enumerate(value) for place in [(*path, index), *_places(part, (*path, index))]
        ]
    return found


def with_strange_place(body: Body, number: int, value: Any) -> Body:
    """The body with the value in one of its places."""
    places = _places(body)
    *path, last = places[number % len(places)]
    changed = copy.deepcopy(body)
    part: Any = changed
    for step in path:
        part = part[step]
    part[last] = value
    return changed

"""Real episodes from `tests/data/traces` (see the README there) as token ids.

A message becomes `<|im_start|>role\\ntext<|im_end|>\\n`; tau's tool calls follow the text as JSON, swe's are left out.
A call is every message before an assistant message, and its completion ends with that message's newline.
"""

import gzip
import json
from collections.abc import Callable, Iterator
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

from merge_workload import Episode, Ids, Turn, Workload, with_partner
from tokenizers import pre_tokenizers

TRACES = Path(__file__).parents[1] / "tests" / "data" / "traces"
TAU_TASK = 44
"""Of the tasks whose four trials have different rewards the one with the fewest tokens."""
SWE_CALLS = slice(6, 9)
"""Calls 7 to 9: each meets a history that was edited since the call before."""
Encode = Callable[[str], Ids]


def encoder(tokenizer: Any, *, splits_digits: bool = True) -> Encode:
    """Text to ids; special tokens count as such.

    Args:
        tokenizer: Of Transformers, SmolLM2's or one with the same special tokens.
        splits_digits: False leaves the digits of a number together, as the conversion did with which the traces' token
            counts were first published. It changes the tokenizer.
    """
    backend = tokenizer.backend_tokenizer
    if not splits_digits:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return cache(lambda text: backend.encode(text, add_special_tokens=False).ids)


def tau_groups(encode: Encode) -> dict[int, list[Episode]]:
    """Every task's trials, by task."""
    lines = sorted(_lines("tau_airline"), key=lambda line: (line["task_id"], line["trial"]))
    return {
        task: [Episode(line["reward"], _tau_turns(line["messages"], encode)) for line in trials]
        for task, trials in groupby(lines, key=lambda line: line["task_id"])
    }


def tau(encode: Encode) -> Workload:
    """One task's four trials with their real rewards."""
    shape: dict[str, int | str] = {"task": TAU_TASK, "trials": 4, "calls": "all"}
    return Workload("tau", shape, [tau_groups(encode)[TAU_TASK]])


def swe_turns(encode: Encode) -> list[Turn]:
    """All calls of the episode."""
    return [
        Turn(
            [
                *(
                    token
                    for message in line["messages"]
                    for token in encode(_message(message["role"], message["content"]))
                ),
                *encode(_OPENING),
            ],
            encode(f"{line['response']}<|im_end|>\n"),
        )
        for line in _lines("swe_agent_marshmallow_1867")
    ]


def swe(encode: Encode) -> Workload:
    """An episode whose history is edited between calls."""
    shape: dict[str, int | str] = {"calls": f"{SWE_CALLS.start + 1} to {SWE_CALLS.stop} of 13"}
    return Workload("swe", shape, [with_partner(swe_turns(encode)[SWE_CALLS])])


_OPENING = "<|im_start|>assistant\n"


def _tau_turns(messages: list[dict[str, Any]], encode: Encode) -> list[Turn]:
    history, calls = Ids(), list[Turn]()
    for message in messages:
        text = (message["content"] or "") + (json.dumps(message["tool_calls"]) if "tool_calls" in message else "")
        if message["role"] == "assistant":
            calls.append(Turn([*history, *encode(_OPENING)], encode(f"{text}<|im_end|>\n")))
        history = history + encode(_message(message["role"], text))
    return calls


def _message(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def _lines(name: str) -> Iterator[dict[str, Any]]:
    with gzip.open(TRACES / f"{name}.jsonl.gz", "rt", encoding="utf-8") as file:
        yield from map(json.loads, file)

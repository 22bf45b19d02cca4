"""An agent whose environment answers late: the game that `async_overlap.py` plays.

Two replies that should hold digits and nothing else; the reward is their share. What the environment says to the first
takes a log-normal time that depends on group and member alone: every run, and every simulation, waits for the same
times.
"""

import asyncio
import math
import random
from typing import Any

from openai import AsyncOpenAI

from agentjet.rollout.policy import Policy
from agentjet.schemas.ids import TicketName

SEED = 12
"""Of the seeds 1 to 21 the one whose ideal ratio is their median."""
MEDIAN_SECONDS = 0.5
TAIL = 10.0
"""99th percentile over median."""
SIGMA = math.log(TAIL) / 2.3263478740408408
NUM_REPLIES = 2

client = AsyncOpenAI(base_url="http://set.for.each.episode", api_key="set for each episode", max_retries=2)


def delay_seconds(index: int, member: int, seed: int = SEED) -> float:
    """How long the environment of a member of the `index`-th group takes."""
    return MEDIAN_SECONDS * math.exp(SIGMA * random.Random(f"{seed}:{index}:{member}").gauss(0.0, 1.0))


def tasks() -> list[dict[str, Any]]:
    """One task for each first digit."""
    return [{"first": first} for first in range(10)]


async def run(task: dict[str, Any], policy: Policy) -> float:
    """Plays one game; returns the share of digits among the characters of all replies."""
    llm = client.with_options(base_url=policy.base_url, api_key=policy.api_key)
    name = TicketName.parse(policy.ticket)
    messages: list[Any] = [
        {"role": "user", "content": f"Write digits and nothing else. The first one is {task['first']}."}
    ]
    replies: list[str] = []
    for _ in range(NUM_REPLIES):
        reply = await llm.chat.completions.create(model=policy.model, messages=messages, **policy.sampling)
        replies.append(reply.choices[0].message.content or "")
        if len(replies) == 1:
            await asyncio.sleep(delay_seconds(int(name.group.rpartition("-")[2]), name.member))
        messages += [{"role": "assistant", "content": replies[-1]}, {"role": "user", "content": "More."}]
    text = "".join(replies)
    return sum(letter in "0123456789" for letter in text) / max(1, len(text))

"""Two models: the sender sees a state and says a letter, the receiver sees only the letter and names the state.

Neither is told what a letter means; the reward is shared, so both learn from the same episode, each from its own calls.
0.2 for a letter, 0.2 for a state, 0.6 for the right one: players that know the rules but have no code yet get 0.6.
"""

import string
from typing import Any

from openai import AsyncOpenAI

from agentjet.rollout.policy import Policy

STATES = ("1", "2", "3")
SIGNALS = tuple(string.ascii_lowercase)

# Made once, when the file is imported: each episode takes a copy with its own key.
client = AsyncOpenAI(base_url="http://set.for.each.episode", api_key="set for each episode", max_retries=2)


def tasks() -> list[dict[str, Any]]:
    """One task for each state."""
    return [{"state": state} for state in STATES]


async def run(task: dict[str, Any], policy: Policy) -> dict[str, Any]:
    """Plays one round with `policy.models`: the sender, then the receiver."""
    llm = client.with_options(base_url=policy.base_url, api_key=policy.api_key)
    sender, receiver = policy.models[:2]

    async def say(model: str, rules: str, text: str) -> str:
        messages: list[Any] = [{"role": "system", "content": rules}, {"role": "user", "content": text}]
        reply = await llm.chat.completions.create(model=model, messages=messages, **policy.sampling)
        said = reply.choices[0].message.content or ""
        for message in (*messages, {"role": "assistant", "content": said}):
            policy.log(message | {"model": model})
        return said.strip()

    signal = await say(sender, "Send one signal, a letter.", f"The state is {task['state']}")
    is_signal = signal in SIGNALS
    shown = f"The signal is {signal}" if is_signal else "no signal"
    answer = await say(receiver, "Which state is it? Answer with one digit.", shown)
    is_state, is_right = answer in STATES, answer == task["state"]
    return {
        "reward": 0.2 * is_signal + 0.2 * is_state + 0.6 * (is_right and is_signal),
        "metrics": {"right_ratio": float(is_right), "signal_ratio": float(is_signal), "state_ratio": float(is_state)},
    }

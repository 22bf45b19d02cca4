"""Guess a whole number from 1 to 7 in three guesses; the environment answers "higher" or "lower".

Reward: 0.8 for finding it, plus 0.2 times the share of valid replies: one number and nothing else. Ordinary agent
code: the unmodified `openai` package and a loop.
"""

import re
from typing import Any

from openai import AsyncOpenAI

from agentjet.rollout.policy import Policy

LARGEST = 7
MAX_GUESSES = 3
RULES = f"You play a guessing game. Reply with one number from 1 to {LARGEST} and nothing else. For example: 4"
NOT_VALID = f"not a number from 1 to {LARGEST}"

# Made once, when the file is imported: each episode takes a copy with its own key.
client = AsyncOpenAI(base_url="http://set.for.each.episode", api_key="set for each episode", max_retries=2)


def tasks() -> list[dict[str, Any]]:
    """One task for each secret."""
    return [{"secret": secret} for secret in range(1, LARGEST + 1)]


async def run(task: dict[str, Any], policy: Policy) -> dict[str, Any]:
    """Plays one game."""
    llm = client.with_options(base_url=policy.base_url, api_key=policy.api_key)
    messages: list[Any] = [{"role": "system", "content": RULES}, {"role": "user", "content": "Your guess?"}]
    num_guesses = num_valid = 0
    is_won = False
    while num_guesses < MAX_GUESSES and not is_won:
        reply = await llm.chat.completions.create(model=policy.model, messages=messages, **policy.sampling)
        text = reply.choices[0].message.content or ""
        guess = read_guess(text)
        num_guesses += 1
        num_valid += guess is not None
        is_won = guess == task["secret"]
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": answer(guess, task["secret"])}]
    for message in messages:
        policy.log(message)
    valid = num_valid / num_guesses
    return {
        "reward": 0.8 * is_won + 0.2 * valid,
        "metrics": {"win_ratio": float(is_won), "valid_ratio": valid, "num_guesses": float(num_guesses)},
        "result": {"is_won": is_won, "num_guesses": num_guesses},
    }


def read_guess(text: str) -> int | None:
    """The number of a valid reply: a bare number, at most with spaces around it and a full stop."""
    bare = re.fullmatch(r"\s*([1-7])\s*\.?\s*", text)
    return int(bare[1]) if bare else None


def answer(guess: int | None, secret: int) -> str:
    """What the environment says."""
    if guess is None:
        return NOT_VALID
    if guess == secret:
        return "correct"
    return "higher" if secret > guess else "lower"

"""Guess a whole number from 1 to 7 in three guesses; the environment answers "higher" or "lower".

Reward: 0.8 for finding it, and up to 0.2 for replies that are one number and nothing else. Ordinary agent code: the
unmodified `openai` package and a loop.
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
    credits: list[float] = []
    is_won = False
    while len(credits) < MAX_GUESSES and not is_won:
        reply = await llm.chat.completions.create(model=policy.model, messages=messages, **policy.sampling)
        text = reply.choices[0].message.content or ""
        credit, guess = read_guess(text)
        credits.append(credit)
        is_won = guess == task["secret"]
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": answer(guess, task["secret"])}]
    for message in messages:
        policy.log(message)
    valid = sum(credits) / len(credits)
    return {
        "reward": 0.8 * is_won + 0.2 * valid,
        "metrics": {"is_won": float(is_won), "valid_ratio": valid, "num_guesses": float(len(credits))},
        "result": {"is_won": is_won, "num_guesses": len(credits)},
    }


def read_guess(text: str) -> tuple[float, int | None]:
    """How valid a reply is, and its number: only a bare number counts as a guess, one amid words earns a little."""
    bare = re.fullmatch(r"\s*([1-7])\s*\.?\s*", text)
    if bare:
        return 1.0, int(bare[1])
    return (0.2 if re.search(r"(?<!\d)[1-7](?!\d)", text) else 0.0), None


def answer(guess: int | None, secret: int) -> str:
    """What the environment says."""
    if guess is None:
        return NOT_VALID
    if guess == secret:
        return "correct"
    return "higher" if secret > guess else "lower"

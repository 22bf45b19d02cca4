"""What a worker process does with a reward function: `score(task, episode)`, and what its return means.

A reward function returns a number, or a mapping with `reward` and any of `components`, `metrics` and `agent_rewards`
(numbers by name) and `call_rewards` (numbers by call, or a list in their order). It may be async or plain; plain ones
may block, they have the process to themselves. What it may look at: `task` as the data set gave it, and `episode` with
`result`, `metrics`, `transcript`, `stop_reason`, `models`, `num_calls`, `calls` (ids for each model, in order),
`call_rewards` (the agent's own), `seed` and `is_eval`.
"""

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentjet.errors import CallRewardError, RewardError
from agentjet.schemas.call_reward import rewards_by_call

ADAPTER = "agentjet.reward.function:judge"
"""For `agentjet.workers.pool.WorkerPool`."""

_PARTS = ("components", "metrics", "agent_rewards")
_CALLS = "call_rewards"


def judge(function: Callable[..., Any], payload: dict[str, Any], emit: Callable[[dict[str, Any]], None]) -> Any:
    """The adapter: payload is `{"task": ..., "episode": ...}`."""
    return verdict(function(payload["task"], payload["episode"]), payload["episode"]["calls"])


def verdict(
    value: Any, calls: Mapping[str, Sequence[str]], what: str = "the return of the reward function"
) -> dict[str, Any]:
    """A function's return as a map of `reward` and its parts.

    Args:
        value: The return.
        calls: The episode's, for each model.
        what: Names the return in messages.

    Raises:
        RewardError: There is no finite number, or `call_rewards` does not fit the calls.
    """
    if not isinstance(value, Mapping):
        return {"reward": finite(value, f"{what} is"), **{part: {} for part in (*_PARTS, _CALLS)}}
    unknown = set(value) - {"reward", *_PARTS, _CALLS}
    if unknown or "reward" not in value:
        raise RewardError(
            f"{what} is a mapping with {', '.join(map(repr, value)) or 'nothing'}; "
            f"it needs 'reward' and may have {', '.join((*_PARTS, _CALLS))}"
        )
    parts = {part: _numbers(value.get(part) or {}, part) for part in _PARTS}
    try:
        parts[_CALLS] = rewards_by_call(value.get(_CALLS), calls)
    except CallRewardError as error:
        raise RewardError(f"{what}: {error}") from None
    return {"reward": finite(value["reward"], f"{what} has the reward"), **parts}


def finite(value: Any, who: str) -> float:
    """The value as a finite float; RewardError names who gave another."""
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise RewardError(f"{who} {value!r:.100}, which is no finite number")
    return float(value)


def _numbers(values: Mapping[str, Any], part: str) -> dict[str, float]:
    return {str(name): finite(value, f"{part}[{name!r}] is") for name, value in values.items()}

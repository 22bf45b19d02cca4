"""What a worker process does with a reward function: `score(task, episode)`, and what its return means.

A reward function returns a number, or a mapping with `reward` and any of `components`, `metrics` and `agent_rewards`
(numbers by name). It may be async or plain; plain ones may block, they have the process to themselves. What it may look
at: `task` as the data set gave it, and `episode` with `result`, `metrics`, `transcript`, `stop_reason`, `models`,
`num_calls`, `seed` and `is_eval`.
"""

import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any

from agentjet.errors import RewardError

ADAPTER = "agentjet.reward.function:judge"
"""For `agentjet.workers.pool.WorkerPool`."""

_PARTS = ("components", "metrics", "agent_rewards")


def judge(function: Callable[..., Any], payload: dict[str, Any], emit: Callable[[dict[str, Any]], None]) -> Any:
    """The adapter: payload is `{"task": ..., "episode": ...}`."""
    return verdict(function(payload["task"], payload["episode"]))


def verdict(value: Any) -> dict[str, Any]:
    """A function's return as a map of `reward` and its parts; RewardError when there is no finite number."""
    if not isinstance(value, Mapping):
        return {"reward": finite(value, "the reward function returned"), **{part: {} for part in _PARTS}}
    unknown = set(value) - {"reward", *_PARTS}
    if unknown or "reward" not in value:
        raise RewardError(
            f"the reward function returned a mapping with {', '.join(map(repr, value)) or 'nothing'}; "
            f"it needs 'reward' and may have {', '.join(_PARTS)}"
        )
    parts = {part: _numbers(value.get(part) or {}, part) for part in _PARTS}
    return {"reward": finite(value["reward"], "the reward function returned"), **parts}


def finite(value: Any, who: str) -> float:
    """The value as a finite float; RewardError names who gave another."""
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise RewardError(f"{who} {value!r:.100}, which is no finite number")
    return float(value)


def _numbers(values: Mapping[str, Any], part: str) -> dict[str, float]:
    return {str(name): finite(value, f"{part}[{name!r}] is") for name, value in values.items()}

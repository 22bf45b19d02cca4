"""What a worker process does with an agent: `run(task, policy)`, and what its return means.

An agent returns its reward, or a mapping with any of `reward`, `call_rewards`, `metrics` and `result`, or None.
`result` is whatever the pool's reward function wants to see. A plain function is as welcome as an async one: it has the
process to itself, and may call `asyncio.run`.
"""

import numbers
from collections.abc import Callable, Mapping
from typing import Any

from agentjet.rollout.policy import Policy

ADAPTER = "agentjet.rollout.workflow:play"
"""For `agentjet.workers.pool.WorkerPool`."""

_KEYS = ("reward", "call_rewards", "metrics", "result")


def play(function: Callable[..., Any], payload: dict[str, Any], emit: Callable[[dict[str, Any]], None]) -> Any:
    """The adapter: payload is `{"task": ..., "policy": fields of Policy}`."""
    policy = Policy(**payload["policy"] | {"models": tuple(payload["policy"]["models"]), "on_log": emit})
    return returned(function(payload["task"], policy))


def returned(value: Any) -> dict[str, Any]:
    """What an agent returned, as a map of `_KEYS`; TypeError for other things."""
    if value is None or isinstance(value, numbers.Real):
        return {"reward": None if value is None else float(value), "call_rewards": None, "metrics": {}, "result": None}
    if not isinstance(value, Mapping) or not set(value) <= set(_KEYS):
        shown = f"a mapping with {', '.join(map(repr, value))}" if isinstance(value, Mapping) else type(value).__name__
        raise TypeError(f"run() returned {shown}: return a number, None, or a mapping with {', '.join(_KEYS)} only")
    reward = value.get("reward")
    return {
        "reward": None if reward is None else float(reward),
        "call_rewards": _numbers(value.get("call_rewards")),
        "metrics": {str(name): float(number) for name, number in (value.get("metrics") or {}).items()},
        "result": value.get("result"),
    }


def _numbers(given: Any) -> dict[str, float] | list[float] | None:
    """Rewards of single calls as numbers; whether they fit the calls is seen where those are known."""
    if isinstance(given, Mapping):
        return {str(call): float(number) for call, number in given.items()}
    return None if given is None else [float(number) for number in given]

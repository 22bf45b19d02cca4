"""What a worker process does with a group judge: `judge(task, episodes)`, and what its return means.

A judge gets the completed episodes of one group, in the order of their members, and returns as many verdicts in the
same order. A verdict is what a reward function may return, a number or a mapping, which may also have a `reason`. None,
alone or as the mapping's `reward`, says that this episode can not be judged. A judge may be async or plain.

It may look at what a reward function may look at; each episode also has `member` and `reward`, the agent's own or None.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from agentjet.errors import RewardError
from agentjet.reward.function import verdict

ADAPTER = "agentjet.reward.judge:judge_group"
"""For `agentjet.workers.pool.WorkerPool`."""

MAX_REASON = 500
"""Characters: a judgement is one message, whatever the size of its group."""


def judge_group(function: Callable[..., Any], payload: dict[str, Any], emit: Callable[[dict[str, Any]], None]) -> Any:
    """The adapter: payload is `{"task": ..., "episodes": [...]}`."""
    episodes = payload["episodes"]
    return verdicts(function(payload["task"], episodes), [one["calls"] for one in episodes])


def verdicts(value: Any, calls: Sequence[Mapping[str, Sequence[str]]]) -> list[dict[str, Any]]:
    """A judge's return, one map for each episode; RewardError when it is not that.

    Each map has `reward` (a finite number, or None for an episode that can not be judged) and `reason`; with a number
    also `components`, `metrics`, `agent_rewards` and `call_rewards`.

    Args:
        value: The return.
        calls: [episodes] calls for each model.
    """
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise RewardError(f"the group judge returned {value!r:.100}; it has to return a list, one verdict per episode")
    found = list(value)
    if len(found) != len(calls):
        raise RewardError(
            f"the group judge returned {len(found)} verdicts for {len(calls)} episodes; it has to return one for "
            "each, in their order, and None where it can not judge"
        )
    return [_verdict(one, own, place) for place, (one, own) in enumerate(zip(found, calls, strict=True))]


def _verdict(value: Any, calls: Mapping[str, Sequence[str]], place: int) -> dict[str, Any]:
    reason = ""
    if isinstance(value, Mapping):
        reason = str(value.get("reason") or "")[:MAX_REASON]
        value = {name: part for name, part in value.items() if name != "reason"}
        if "reward" in value and value["reward"] is None:
            value = None
    if value is None:
        return {"reward": None, "reason": reason}
    return verdict(value, calls, f"verdict {place} of the group judge") | {"reason": reason}

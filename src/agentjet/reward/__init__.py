"""Rewards: ended episodes become scores, client-given or by a Python function in a worker process.

`Reward` is the actor's capability. Worker processes load `agentjet.reward.function` only, so what is heavier comes when
it is asked for.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentjet.reward.reward import Reward

__all__ = ["Reward"]


def __getattr__(name: str) -> Any:
    if name == "Reward":
        from agentjet.reward.reward import Reward

        return Reward
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

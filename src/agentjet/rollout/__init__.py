"""Playing episodes: tickets are claimed, the user's agent plays in a worker process, the end is stored.

`Rollout` is the actor's capability; `agentjet.rollout.dry_run.dry_run` plays one task without a run. Worker processes
load `agentjet.rollout.workflow` only, so what is heavier comes when it is asked for.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentjet.rollout.rollout import Rollout

__all__ = ["Rollout"]


def __getattr__(name: str) -> Any:
    if name == "Rollout":
        from agentjet.rollout.rollout import Rollout

        return Rollout
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

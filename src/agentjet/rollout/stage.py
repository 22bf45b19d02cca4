"""Agents on stage: one worker pool for each workflow, and how an episode in it ended.

It knows no bus: a `Play` is what the agent did, whoever asked for it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentjet.rollout.workflow import ADAPTER
from agentjet.schemas.sampling import Sampling
from agentjet.workers.pool import Failure, WorkerPool

MAX_TRANSCRIPT = 1_000
"""Most lines of a transcript that are kept."""


@dataclass(frozen=True, slots=True)
class Play:
    """What an agent did with one task."""

    reward: float | None
    """The agent's own score, when it gives one."""
    metrics: dict[str, float]
    result: Any
    transcript: tuple[dict[str, Any], ...]
    failure: Failure | None
    """Why there is no end of the agent's own."""
    digest: str
    """sha256 of the agent's code file."""
    seconds: float
    call_rewards: Mapping[str, float] | Sequence[float] | None = None
    """The agent's own rewards of single calls, as `rewards_by_call` takes them."""


@dataclass(frozen=True, slots=True)
class Part:
    """What an agent plays with: `Policy` without its notebook."""

    base_url: str
    api_key: str
    models: tuple[str, ...]
    seed: int = 0
    ticket: str = ""
    is_eval: bool = False
    sampling: Sampling = field(default_factory=Sampling)

    def payload(self, task: dict[str, Any]) -> dict[str, Any]:
        """What the worker gets."""
        fields = {name: getattr(self, name) for name in ("base_url", "api_key", "seed", "ticket", "is_eval")}
        fields |= {"models": list(self.models), "sampling": openai_sampling(self.sampling)}
        return {"task": task, "policy": fields}


class Stage:
    """Plays tasks with one workflow, each in a worker process of its own."""

    def __init__(self, workflow: str, *, max_running: int, num_warm: int = 0) -> None:
        self.pool = WorkerPool(workflow, adapter=ADAPTER, max_running=max_running, num_warm=num_warm)

    async def start(self) -> None:
        """Imports the agent; WorkflowError says why it can not be."""
        await self.pool.start()

    async def play(self, task: dict[str, Any], part: Part, *, timeout_seconds: float) -> Play:
        """Plays one task; the agent's failures are data."""
        transcript: list[dict[str, Any]] = []

        def note(message: dict[str, Any]) -> None:
            if len(transcript) < MAX_TRANSCRIPT:
                transcript.append(message)

        done = await self.pool.run(part.payload(task), timeout_seconds=timeout_seconds, on_message=note)
        value = done.value or {"reward": None, "call_rewards": None, "metrics": {}, "result": None}
        return Play(
            value["reward"],
            value["metrics"],
            value["result"],
            tuple(transcript),
            done.failure,
            done.digest,
            done.seconds,
            value["call_rewards"],
        )

    async def close(self) -> None:
        """Stops every running agent."""
        await self.pool.close()


def openai_sampling(sampling: Sampling) -> dict[str, Any]:
    """The sampling as arguments of `chat.completions.create`; what stands at its neutral value is left out."""
    arguments: dict[str, Any] = {"temperature": sampling.temperature, "max_tokens": sampling.max_tokens}
    if sampling.top_p < 1.0:
        arguments["top_p"] = sampling.top_p
    if sampling.stop:
        arguments["stop"] = list(sampling.stop)
    if sampling.seed is not None:
        arguments["seed"] = sampling.seed
    return arguments

"""One task, played to be looked at: no run, no bus, nothing stored.

`agentjet rollout --once --dry-run FILE` shows what comes back. Any OpenAI-compatible endpoint will do.
"""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from agentjet.errors import TaskDataError
from agentjet.rollout.stage import Part, Play, Stage
from agentjet.schemas.sampling import Sampling
from agentjet.workers.entry import load, locate

DEFAULT_NAME = "run"
"""The function of a file that is given without one."""


def entry_of(text: str) -> str:
    """`agent.py` means `agent.py:run`."""
    return f"{text}:{DEFAULT_NAME}" if text.endswith(".py") else text


def task_of(text: str, workflow: str) -> dict[str, Any]:
    """A task given as JSON; without one, the first of the agent file's own `tasks()`, or an empty one.

    Raises:
        TaskDataError: The text is no JSON object.
        WorkflowError: The agent file can not be loaded.
    """
    if text:
        try:
            task = json.loads(text)
        except ValueError as error:
            raise TaskDataError(f"the task is no JSON: {error}; write for example '{{\"secret\": 4}}'") from None
        if not isinstance(task, dict):
            raise TaskDataError(f"the task has to be a JSON object, not {type(task).__name__}")
        return task
    where = workflow.rpartition(":")[0]
    tasks = _tasks(f"{where}:tasks")
    return dict(tasks[0]) if tasks else {}


def _tasks(entry: str) -> Sequence[dict[str, Any]]:
    located = locate(entry)
    if "def tasks(" not in located.path.read_text("utf-8"):
        return []
    return list(load(located)())


@asynccontextmanager
async def open_stage(workflow: str) -> AsyncIterator[Stage]:
    """A stage for one task; WorkflowError when the agent can not be loaded, before anything else is."""
    stage = Stage(entry_of(workflow), max_running=1)
    try:
        await stage.start()
        yield stage
    finally:
        await stage.close()


async def dry_run(
    stage: Stage,
    task: dict[str, Any],
    *,
    base_url: str,
    api_key: str,
    models: Sequence[str],
    sampling: Sampling | None = None,
    seed: int = 0,
    timeout_seconds: float = 600.0,
) -> Play:
    """Plays one task against an endpoint.

    Args:
        stage: Of `open_stage`.
        task: The task instance.
        base_url: Of an OpenAI-compatible API, `/v1` included.
        api_key: For it.
        models: Names that the agent may ask for.
        sampling: What `policy.sampling` holds; None takes the defaults.
        seed: `policy.seed`.
        timeout_seconds: After this the agent is stopped.
    """
    part = Part(base_url, api_key, tuple(models), seed, "dry-run", sampling=sampling or Sampling())
    return await stage.play(task, part, timeout_seconds=timeout_seconds)

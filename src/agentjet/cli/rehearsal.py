"""What a dry run plays: agent, task, models and sampling, as a run of the swarm.toml would where there is one.

Everything that can be wrong with the words of the command is found here, before a model is loaded.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentjet.config import ModelSettings, SwarmSettings
from agentjet.config.load import LoadedConfig, load
from agentjet.curriculum.dataset import load_tasks
from agentjet.errors import WorkflowError
from agentjet.pretrained.model_file import resolve
from agentjet.rollout.dry_run import entry_of, task_of
from agentjet.schemas.sampling import Sampling
from agentjet.workers.entry import locate

DEFAULT_MODEL = "smollm2-135m"
MAX_TOKENS = 64
"""Most tokens of a reply where nobody says how many: a look should be quick."""
_LOCAL_NAME = "policy"


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """One task to play."""

    workflow: str
    task: dict[str, Any]
    sampling: Sampling
    origin: str
    """Where models and sampling come from, for people."""
    models: Mapping[str, ModelSettings] = field(default_factory=dict[str, ModelSettings])
    """Those to serve, their paths found; empty where an endpoint serves them."""
    names: tuple[str, ...] = ()
    """What `policy.models` holds."""


def rehearsal(
    file: str,
    *,
    config: Path | None,
    task: str,
    model: str,
    temperature: float | None,
    max_tokens: int | None,
    is_served_elsewhere: bool = False,
) -> Rehearsal:
    """What the words of a command mean.

    Raises:
        WorkflowError: There is no such agent.
        ConfigError: The swarm.toml is broken.
        TaskDataError: The task is no JSON object, or the pool's tasks can not be read.
        ModelNotFoundError: A model is not on this machine.
    """
    workflow = entry_of(file)
    locate(workflow)
    loaded = load(config)
    pool = _pool_of(loaded.settings, workflow)
    given = {"temperature": temperature, "max_tokens": max_tokens}
    sampling = _sampling(loaded, pool).model_copy(
        update={key: value for key, value in given.items() if value is not None}
    )
    models, names = ({}, (model,)) if is_served_elsewhere else _models(loaded.settings, pool, model)
    origin = f"pool {pool} of {loaded.path}" if pool else "defaults: no pool of a swarm.toml names this agent"
    return Rehearsal(workflow, _task(loaded.settings, pool, task, workflow), sampling, origin, models, names)


def _pool_of(settings: SwarmSettings, workflow: str) -> str:
    """The pool with this agent, its very function where there are several; empty when there is none."""
    wanted = locate(workflow)
    found: dict[str, bool] = {}
    for name, pool in settings.pools.items():
        try:
            entry = locate(pool.workflow) if pool.workflow else None
        except WorkflowError:
            continue
        if entry is not None and entry.path.resolve() == wanted.path.resolve():
            found[name] = entry.name == wanted.name
    return max(found, key=lambda name: found[name], default="")


def _sampling(loaded: LoadedConfig, pool: str) -> Sampling:
    if not pool:
        return Sampling(max_tokens=MAX_TOKENS)
    sampling = loaded.settings.pools[pool].sampling
    is_said = loaded.origins.get(f"pools.{pool}.sampling.max_tokens", "default") != "default"
    return sampling if is_said else sampling.model_copy(update={"max_tokens": MAX_TOKENS})


def _models(settings: SwarmSettings, pool: str, model: str) -> tuple[dict[str, ModelSettings], tuple[str, ...]]:
    """Those to serve, and the names of those that the agent is told of."""
    if model in settings.models:
        names = (model,)
    elif model or not settings.models:
        return {_LOCAL_NAME: ModelSettings(path=str(resolve(model or DEFAULT_MODEL)))}, (_LOCAL_NAME,)
    else:
        names = settings.trained_models(pool) if pool else tuple(settings.models)
    wanted = dict.fromkeys((*names, *(name for name, one in settings.models.items() if not one.is_trained)))
    return {name: _found(settings.models[name]) for name in wanted}, names


def _found(model: ModelSettings) -> ModelSettings:
    return model.model_copy(update={"path": str(resolve(model.path))})


def _task(settings: SwarmSettings, pool: str, text: str, workflow: str) -> dict[str, Any]:
    if not text and pool and settings.pools[pool].tasks:
        return dict(load_tasks(settings.pools[pool].tasks)[0])
    return task_of(text, workflow)

"""`agentjet rollout`: play episodes of a run, or one task to look at."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from agentjet.cli.output import write_json, write_line
from agentjet.config import ModelSettings
from agentjet.errors import UsageError
from agentjet.rollout.dry_run import dry_run, entry_of, task_of
from agentjet.rollout.stage import Play
from agentjet.schemas.call import Call
from agentjet.schemas.sampling import Sampling
from agentjet.schemas.task import EpisodeKind

_LOCAL_NAME = "policy"


async def rollout(
    file: str = "",
    *,
    once: bool = False,
    dry_run: bool = False,
    model: str = "",
    base_url: str = "",
    api_key: str = "",
    task: str = "",
    temperature: float = 1.0,
    max_tokens: int = 256,
    seed: int = 0,
    json: bool = False,
    config: Path | None = None,
    run: str = "",
) -> int:
    """Play episodes of the run; or, with --once --dry-run FILE, one task to look at. Exit code 1 when that one fails.

    Args:
        file: The agent, `file.py`, `file.py:function` or `module:function`.
        once: Play one task and leave.
        dry_run: Store nothing; needs no server.
        model: For a dry run: a preset, folder or Hugging Face id, served in this process.
        base_url: For a dry run: any endpoint that speaks the OpenAI API; --model then names its model.
        api_key: For --base-url (default: the variable OPENAI_API_KEY).
        task: The task as JSON (default: the first of the file's own `tasks()`).
        temperature: What the agent is told to sample with.
        max_tokens: Most tokens of a reply.
        seed: Of the task.
        json: One JSON object.
        config: The swarm.toml, when episodes of a run are played.
        run: Id of the run.
    """
    if not once and not dry_run:
        if file:
            raise UsageError("a FILE is played with --once --dry-run; a run's agents stand in its swarm.toml")
        _become_actor(config, run)
    if not (once and dry_run and file):
        raise UsageError("--once --dry-run FILE go together: one task is played and nothing is stored")
    workflow = entry_of(file)
    instance = task_of(task, workflow)
    sampling = Sampling(temperature=temperature, max_tokens=max_tokens)
    if base_url:
        if not model:
            raise UsageError("--base-url needs --model, the name to ask for there")
        key = api_key or os.environ.get("OPENAI_API_KEY", "none")
        play, calls = await _against(workflow, instance, base_url, key, (model,), sampling, seed), []
    else:
        play, calls = await _served_here(workflow, instance, model or "smollm2-135m", sampling, seed)
    _show(instance, play, calls, json=json)
    return 0 if play.failure is None else 1


def _become_actor(config: Path | None, run: str) -> None:
    """This process becomes the rollout actor, which has its own event loop."""
    arguments = ["--config", str(config)] if config else []
    arguments += ["--run", run] if run else []
    os.execv(sys.executable, [sys.executable, "-m", "agentjet.actors.rollout", *arguments])


async def _against(
    workflow: str,
    task: dict[str, Any],
    base_url: str,
    api_key: str,
    models: Sequence[str],
    sampling: Sampling,
    seed: int,
) -> Play:
    return await dry_run(
        workflow, task, base_url=base_url, api_key=api_key, models=models, sampling=sampling, seed=seed
    )


async def _served_here(
    workflow: str, task: dict[str, Any], model: str, sampling: Sampling, seed: int
) -> tuple[Play, list[Call]]:
    from agentjet.pretrained.model_file import resolve

    path = resolve(model)  # a wrong name is told before torch is loaded
    from agentjet.cli.local import serve

    async with serve({_LOCAL_NAME: ModelSettings(path=str(path))}) as local:
        claimed = await local.claim(task, kind=EpisodeKind.TRAIN, seed=seed, sampling=sampling)
        play = await _against(workflow, task, local.base_url, claimed.key, local.models, sampling, seed)
        return play, await local.calls(claimed.ticket)


def _show(task: Mapping[str, Any], play: Play, calls: Sequence[Call], *, json: bool) -> None:
    tokens = [_tokens_of(call) for call in calls]
    if json:
        write_json({"task": task, **asdict(play), "calls": tokens})
        return
    write_line(f"task    {task}")
    for message in play.transcript:
        write_line(f"{message.get('role', '-'):<9} {message.get('content', message)}")
    if play.failure is not None:
        write_line(f"failed  {play.failure.kind}: {play.failure.message}")
        write_line(play.failure.traceback.rstrip())
    write_line(f"reward  {'none given by the agent' if play.reward is None else f'{play.reward:g}'}")
    for name, value in play.metrics.items():
        write_line(f"metric  {name} = {value:g}")
    for call in tokens:
        write_line(
            f"call    {call['prompt_tokens']} prompt and {call['completion_tokens']} sampled tokens, "
            f"{call['finish_reason']}: {call['completion_ids']}"
        )
    write_line(f"seconds {play.seconds:.2f}")


def _tokens_of(call: Call) -> dict[str, Any]:
    return {
        "prompt_tokens": call.usage.prompt_tokens,
        "completion_tokens": call.usage.completion_tokens,
        "cached_tokens": call.usage.cached_tokens,
        "fork": call.fork.value,
        "finish_reason": call.finish_reason.value,
        "completion_ids": list(call.completion_ids),
        "logprobs": list(call.logprobs),
    }

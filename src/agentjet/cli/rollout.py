"""`agentjet rollout`: play episodes of a run, or one task to look at."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from agentjet.cli.output import write_json, write_line
from agentjet.cli.rehearsal import Rehearsal, rehearsal
from agentjet.errors import UsageError
from agentjet.rollout.dry_run import dry_run as play_task
from agentjet.rollout.dry_run import open_stage
from agentjet.rollout.stage import Play, Stage
from agentjet.schemas.call import Call
from agentjet.schemas.task import EpisodeKind


async def rollout(
    file: str = "",
    *,
    once: bool = False,
    dry_run: bool = False,
    model: str = "",
    base_url: str = "",
    api_key: str = "",
    task: str = "",
    temperature: float | None = None,
    max_tokens: int | None = None,
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
        model: For a dry run: a model of the swarm.toml, a preset, a folder or a Hugging Face id, served in this process
            (default: the models of the agent's pool in the swarm.toml; without one, smollm2-135m).
        base_url: For a dry run: any endpoint that speaks the OpenAI API; --model then names its model.
        api_key: For --base-url (default: the variable OPENAI_API_KEY).
        task: The task as JSON (default: the first of the pool's tasks, or of the file's own `tasks()`).
        temperature: What the agent is told to sample with (default: the pool's; without one, 1).
        max_tokens: Most tokens of a reply (default: the pool's; without one, 64).
        seed: Of the task.
        json: One JSON object, with the ids and log-probs of every call.
        config: The swarm.toml (default: ./swarm.toml if there is one).
        run: Id of the run.
    """
    if not once and not dry_run:
        if file:
            raise UsageError("a FILE is played with --once --dry-run; a run's agents stand in its swarm.toml")
        _become_actor(config, run)
    if not (once and dry_run and file):
        raise UsageError("--once --dry-run FILE go together: one task is played and nothing is stored")
    if base_url and not model:
        raise UsageError("--base-url needs --model, the name to ask for there")
    played = rehearsal(
        file,
        config=config,
        task=task,
        model=model,
        temperature=temperature,
        max_tokens=max_tokens,
        is_served_elsewhere=bool(base_url),
    )
    async with open_stage(played.workflow) as stage:
        if base_url:
            key = api_key or os.environ.get("OPENAI_API_KEY", "none")
            play, calls = await _against(stage, played, base_url, key, seed), []
        else:
            play, calls = await _served_here(stage, played, seed)
    _show(played, play, calls, json=json)
    return 0 if play.failure is None else 1


def _become_actor(config: Path | None, run: str) -> None:
    """This process becomes the rollout actor, which has its own event loop."""
    arguments = ["--config", str(config)] if config else []
    arguments += ["--run", run] if run else []
    os.execv(sys.executable, [sys.executable, "-m", "agentjet.actors.rollout", *arguments])


async def _against(stage: Stage, played: Rehearsal, base_url: str, api_key: str, seed: int) -> Play:
    return await play_task(
        stage,
        played.task,
        base_url=base_url,
        api_key=api_key,
        models=played.names,
        sampling=played.sampling,
        seed=seed,
    )


async def _served_here(stage: Stage, played: Rehearsal, seed: int) -> tuple[Play, list[dict[str, Any]]]:
    # Imported here: it brings torch.
    from agentjet.cli.local import serve
    from agentjet.pretrained.tokenizer import load_tokenizer

    async with serve(played.models) as local:
        claimed = await local.claim(played.task, kind=EpisodeKind.TRAIN, seed=seed, sampling=played.sampling)
        play = await _against(stage, played, local.base_url, claimed.key, seed)
        calls = await local.calls(claimed.ticket)
    tokenizers = {name: load_tokenizer(played.models[name].path) for name in {call.model for call in calls}}
    numbers = {str(call.call): number for number, call in enumerate(calls, 1)}
    return play, [_facts_of(call, numbers, tokenizers[call.model]) for call in calls]


def _show(played: Rehearsal, play: Play, calls: Sequence[Mapping[str, Any]], *, json: bool) -> None:
    models = {name: played.models[name].path if name in played.models else "" for name in played.names}
    sampling = played.sampling.model_dump(mode="json")
    if json:
        facts = {"task": played.task, "models": models, "sampling": sampling, "origin": played.origin}
        write_json({**facts, **asdict(play), "calls": calls})
        return
    write_line(f"model   {', '.join(f'{name} ({path})' if path else name for name, path in models.items())}")
    write_line(
        f"sampled at temperature {played.sampling.temperature:g}, at most {played.sampling.max_tokens} tokens a reply "
        f"({played.origin})"
    )
    write_line(f"task    {played.task}")
    for number, call in enumerate(calls, 1):
        _show_call(number, call)
    if played.models and not calls:
        write_line("call    none was answered: the agent has to ask at policy.base_url with policy.api_key")
    for message in play.transcript:
        write_line(f"{message.get('role', '-'):<9} {message.get('content', message)}")
    if play.failure is not None:
        write_line(f"failed  {play.failure.kind}: {play.failure.sentence}")
        write_line(play.failure.traceback.rstrip())
    write_line(f"reward  {'none given by the agent' if play.reward is None else f'{play.reward:g}'}")
    for name, value in play.metrics.items():
        write_line(f"metric  {name} = {value:g}")
    write_line(f"seconds {play.seconds:.2f}")


def _show_call(number: int, call: Mapping[str, Any]) -> None:
    """The texts as the model saw and said them, its template's own marks included."""
    goes_on = f", goes on from call {call['parent']}" if call["parent"] else ""
    write_line(
        f"call {number}  {call['model']}: {call['prompt_tokens']} prompt and {call['completion_tokens']} sampled "
        f"tokens, {call['finish_reason']}{goes_on}"
    )
    for mark, text in (("|", call["prompt"]), (">", call["reply"])):
        for line in text.splitlines() or [""]:
            write_line(f"  {mark} {line}")


def _facts_of(call: Call, numbers: Mapping[str, int], tokenizer: Any) -> dict[str, Any]:
    return {
        "model": call.model,
        "parent": numbers.get(call.parent or "", 0),
        "prompt": tokenizer.decode(list(call.prompt_ids)),
        "reply": tokenizer.decode(list(call.completion_ids)),
        "message": call.message,
        "prompt_tokens": call.usage.prompt_tokens,
        "completion_tokens": call.usage.completion_tokens,
        "cached_tokens": call.usage.cached_tokens,
        "fork": call.fork.value,
        "finish_reason": call.finish_reason.value,
        "overridden": list(call.overridden),
        "completion_ids": list(call.completion_ids),
        "logprobs": list(call.logprobs),
    }

"""`agentjet demo`: a whole run by one command, from fetching the model to the report."""

import asyncio
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from rich.console import Console

from agentjet.actors.swarm import Swarm, run_until_stopped
from agentjet.bus.record import read
from agentjet.cli.recipe import Recipe, recipe_for, write_config
from agentjet.cli.view import watch
from agentjet.config.load import load
from agentjet.curriculum.audit import read_audit
from agentjet.durable.manifest import versions_in
from agentjet.schemas.episode import Episode
from agentjet.schemas.subject import Stream, stream_name
from agentjet.schemas.task import EpisodeKind
from agentjet.ui.curve import LearningCurve
from agentjet.ui.history import RunHistory
from agentjet.ui.plot import save_plot
from agentjet.ui.report import Report, json_line, print_report, summary


def demo(
    *,
    model: Literal["smollm2-135m", "tiny"] = "smollm2-135m",
    models: int = 1,
    steps: int | None = None,
    seed: int = 1,
    dir: Path | None = None,
    json: bool = False,
) -> None:
    """Train a chat model at a small game on this machine, and report what it learned.

    Parameters
    ----------
    model
        `smollm2-135m`: a real chat model, about five minutes on two cores. `tiny`: two random layers, under a minute.
    models
        2 trains two models together at a signalling game (with `--model tiny`).
    steps
        Optimizer steps; each demo has its own default.
    seed
        Seed of tasks and draws.
    dir
        Folder of the run. An existing run there is gone on with. Default: a new folder under `runs/`.
    json
        Print one line of JSON instead of the report.
    """
    recipe = recipe_for(model, models)
    folder = (dir or Path("runs") / f"demo-{recipe.game}-{model}-{time.strftime('%Y%m%d-%H%M%S')}").absolute()
    asyncio.run(run_until_stopped(lambda: _demo(recipe, folder, steps or recipe.num_steps, seed, json)))


async def _demo(recipe: Recipe, folder: Path, num_steps: int, seed: int, is_json: bool) -> None:
    started = time.monotonic()
    console = Console(stderr=is_json)
    model_path = await asyncio.to_thread(_fetch, recipe.model, console)
    config = write_config(recipe, folder, num_steps=num_steps, seed=seed, model_path=model_path)
    swarm = Swarm(load(config).settings, config)
    console.print(f"{recipe.title}: run {swarm.run}, everything in {folder}", highlight=False)
    async with swarm.running():
        history = await watch(swarm, console, title=recipe.title)
        audit = (await read_audit(swarm.bus, swarm.run)).counts()
        before, after = await _first_and_last(swarm)
    seconds = time.monotonic() - started
    curve = LearningCurve.of(history, recipe.references)
    plot = await asyncio.to_thread(save_plot, curve, folder / "curve.png", title=recipe.title, subtitle=swarm.run)
    report = Report(
        title=recipe.title,
        curve=curve,
        seconds=seconds,
        audit=audit,
        before=before,
        after=after,
        checkpoints=_checkpoints(swarm),
        commands=_commands(swarm, folder, num_steps),
        plot=plot,
    )
    if is_json:
        figures = summary(history, audit, seconds)
        sys.stdout.write(json_line(figures, **_extras(history), dir=str(folder), run=swarm.run) + "\n")
    else:
        print_report(console, report)


def _fetch(model: str, console: Console) -> str:
    from agentjet.pretrained.model_file import fetch

    console.print(f"model {model}: looking it up, fetching it where it is not cached", highlight=False)
    return str(fetch(model))


async def _first_and_last(swarm: Swarm) -> tuple[Episode | None, Episode | None]:
    """An evaluation episode before training and one after it, on the same task."""
    episodes: list[Episode] = []
    async for message in swarm.bus.scan(stream_name(swarm.run, Stream.EPISODES)):
        if ".episode." not in message.subject:
            continue
        record = await read(swarm.bus, swarm.run, Stream.EPISODES, message)
        if isinstance(record, Episode) and record.ticket.kind is EpisodeKind.EVAL and record.transcript:
            episodes.append(record)
    if not episodes:
        return None, None
    before = episodes[0]
    same = [one for one in episodes if one.ticket.task == before.ticket.task]
    return before, same[-1] if len(same) > 1 else None


def _checkpoints(swarm: Swarm) -> dict[str, str]:
    found: dict[str, str] = {}
    for model in swarm.settings.models:
        paths = list(versions_in(swarm.place.checkpoints(model)).values())
        if paths:
            found[model] = str(paths[-1])
    return found


def _commands(swarm: Swarm, folder: Path, num_steps: int) -> Mapping[str, str]:
    shown = os.path.relpath(folder)
    commands = {
        "Train longer": f"agentjet demo --model {_preset(swarm)} --dir {shown} --steps {num_steps * 2}",
        "Look inside": f"agentjet audit --config {shown}/swarm.toml",
    }
    if len(swarm.settings.models) > 1:
        commands["Train longer"] += f" --models {len(swarm.settings.models)}"
    for model, path in _checkpoints(swarm).items():
        commands[f"Export {model}"] = f"agentjet checkpoint export {os.path.relpath(path)} {model}-hf"
    return commands


def _preset(swarm: Swarm) -> str:
    return Path(next(iter(swarm.settings.models.values())).path).name


def _extras(history: RunHistory) -> dict[str, float]:
    """Mean of the last five steps of what the agents reported."""
    extras: dict[str, float] = {}
    for model in history.models.values():
        for name in model.metric_names("episode/"):
            values = [value for _, value in model.series(name)][-5:]
            extras[f"{name.removeprefix('episode/')}_last5"] = round(sum(values) / len(values), 4)
        for name in ("step_seconds", "staleness_mean"):
            values = [value for _, value in model.series(name)]
            if values:
                extras[f"{name}_mean" if name == "step_seconds" else name] = round(sum(values) / len(values), 4)
    return extras

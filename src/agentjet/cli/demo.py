"""`agentjet demo`: a whole run by one command, from fetching the model to the report."""

import asyncio
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter, validators
from rich.console import Console

from agentjet.actors.swarm import Swarm, run_until_stopped
from agentjet.bus.record import read
from agentjet.cli.output import program
from agentjet.cli.recipe import Recipe, recipe_for, set_num_steps, write_config
from agentjet.cli.view import watch
from agentjet.config.load import load
from agentjet.config.place import RunPlace
from agentjet.curriculum.audit import read_audit
from agentjet.durable.manifest import versions_in
from agentjet.errors import UsageError, UserError
from agentjet.schemas.episode import Episode
from agentjet.schemas.subject import Stream, stream_name
from agentjet.schemas.task import EpisodeKind
from agentjet.ui.curve import LearningCurve
from agentjet.ui.history import RunHistory
from agentjet.ui.plot import save_plot
from agentjet.ui.report import Report, json_line, print_report, summary


def demo(
    *,
    model: Literal["smollm2-135m", "tiny"] | None = None,
    models: int | None = None,
    engine: Literal["transformers", "vllm"] | None = None,
    steps: Annotated[int, Parameter(validator=validators.Number(gte=1))] | None = None,
    seed: int = 1,
    dir: Path | None = None,
    json: bool = False,
) -> None:
    """Train a chat model at a small game on this machine, and report what it learned.

    Parameters
    ----------
    model
        `smollm2-135m` (the default): a real chat model, about five minutes on two cores. `tiny`: two random layers,
        under a minute.
    models
        2 trains two models together at a signalling game (with `--model tiny`).
    engine
        What generates: `transformers` (the default), or `vllm`, where its extra is installed.
    steps
        Optimizer steps in all; each demo has its own default.
    seed
        Seed of tasks and draws of a new run.
    dir
        Folder of the run. An existing run there is gone on with, as its swarm.toml says. Default: a new folder under
        `runs/`.
    json
        Print one line of JSON instead of the report.
    """
    if dir is not None and (dir / "swarm.toml").is_file():
        config = dir.absolute() / "swarm.toml"
        recipe = _continued(config, model, models, engine, steps)
    else:
        recipe = recipe_for(model or "smollm2-135m", models or 1, engine or "transformers")
        name = f"demo-{recipe.game}-{recipe.model}-{time.strftime('%Y%m%d-%H%M%S')}"
        config = (dir or Path("runs") / name).absolute() / "swarm.toml"
    try:
        asyncio.run(run_until_stopped(lambda: _demo(recipe, config, steps or recipe.num_steps, seed, json)))
    except KeyboardInterrupt:
        words = f"{program()} demo --dir {os.path.relpath(config.parent)}"
        Console(stderr=True).print(f"stopped; go on with: {words}", highlight=False, soft_wrap=True)
        raise


def _continued(config: Path, model: str | None, models: int | None, engine: str | None, steps: int | None) -> Recipe:
    """The recipe of a folder's run; its file stays as it is, but for a number of steps that is given."""
    settings = load(config).settings
    server = RunPlace(settings.run.dir).server()
    if server is not None and server.is_alive:
        raise UserError(f"the run in {config.parent} is up (server pid {server.pid}); stop it before going on with it")
    names = [Path(of.path).name for of in settings.models.values()]
    recipe = recipe_for(names[0], len(names))
    if (model or recipe.model, models or len(names)) != (recipe.model, len(names)):
        raise UsageError(
            f"{config.parent} holds a run of {len(names)} x {recipe.model}; leave --model and --models out, or take "
            "another --dir"
        )
    kinds = sorted({of.engine.kind for of in settings.models.values()})
    if engine is not None and kinds != [engine]:
        raise UsageError(
            f"{config.parent} holds a run with engine.kind = {', '.join(kinds)}; leave --engine out, or change its file"
        )
    if steps is not None:
        set_num_steps(config, steps)
    return recipe


async def _demo(recipe: Recipe, config: Path, num_steps: int, seed: int, is_json: bool) -> None:
    started, folder = time.monotonic(), config.parent
    console = Console(stderr=is_json)
    model_path = await asyncio.to_thread(_fetch, recipe.model, console)
    if not await asyncio.to_thread(config.is_file):
        write_config(recipe, folder, num_steps=num_steps, seed=seed, model_path=model_path)
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
        commands=_commands(swarm, folder),
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
    """An evaluation episode before training and one after it, on the task that gained most."""
    first: dict[str, Episode] = {}
    last: dict[str, Episode] = {}
    async for message in swarm.bus.scan(stream_name(swarm.run, Stream.EPISODES)):
        if ".episode." not in message.subject:
            continue
        record = await read(swarm.bus, swarm.run, Stream.EPISODES, message)
        if isinstance(record, Episode) and record.ticket.kind is EpisodeKind.EVAL and record.transcript:
            task = repr(record.ticket.task)
            first.setdefault(task, record)
            last[task] = record
    return pick_pair(first, last)


def pick_pair(first: Mapping[str, Episode], last: Mapping[str, Episode]) -> tuple[Episode | None, Episode | None]:
    """Of the tasks' first and last episodes the pair with the largest gain in reward."""
    both = [(first[task], last[task]) for task in first if last.get(task, first[task]) is not first[task]]
    if not both:
        return next(iter(first.values()), None), None
    return max(both, key=lambda pair: (pair[1].reward or 0.0) - (pair[0].reward or 0.0))


def _checkpoints(swarm: Swarm) -> dict[str, str]:
    found: dict[str, str] = {}
    for model in swarm.settings.models:
        paths = list(versions_in(swarm.place.checkpoints(model)).values())
        if paths:
            found[model] = str(paths[-1])
    return found


def _commands(swarm: Swarm, folder: Path) -> Mapping[str, str]:
    shown, steps = os.path.relpath(folder), swarm.settings.run.num_steps
    commands = {
        "Train longer": f"{program()} demo --dir {shown} --steps {steps * 2}",
        "Look inside": f"{program()} audit --config {shown}/swarm.toml",
    }
    for model, path in _checkpoints(swarm).items():
        commands[f"Export {model}"] = f"{program()} checkpoint export {os.path.relpath(path)} {model}-hf"
    return commands


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

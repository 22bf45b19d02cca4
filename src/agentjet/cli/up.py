"""`agentjet up`: server and every actor of one machine, until the run ends or is stopped.

What `--set` and the other options say reaches the actors through their environment, as `AGENTJET_SECTION__KEY`; see
`config.load.variables`.
"""

import asyncio
import os
import shlex

from rich.console import Console

from agentjet.actors.swarm import Swarm, run_until_stopped
from agentjet.bus.server import is_in_use
from agentjet.cli.config import check_files
from agentjet.cli.output import program
from agentjet.cli.target import Target
from agentjet.cli.view import watch
from agentjet.config.load import variables
from agentjet.config.place import RunPlace
from agentjet.errors import ConfigError, UserError


def up(*, target: Target | None = None) -> None:
    """Start the swarm that a swarm.toml describes, and go on with its run."""
    given = target or Target()
    loaded = given.load()
    if loaded.path is None:
        raise ConfigError("there is no swarm.toml here; name one with --config, for example deploy/swarm.laptop.toml")
    if not loaded.settings.models:
        raise ConfigError(f"{loaded.path} configures no model; see `agentjet config show` and deploy/swarm.laptop.toml")
    check_files(loaded.settings)
    check_free(RunPlace(loaded.settings.run.dir))
    os.environ.update(variables(given.overrides()))
    swarm, console = Swarm(loaded.settings, loaded.path), Console(stderr=True)
    try:
        asyncio.run(run_until_stopped(lambda: _up(swarm, console)))
    except KeyboardInterrupt:
        _take_leave(console, f"run {swarm.run} is stopped, and goes on from what is stored", what_next(given, swarm, 0))
        raise
    more_steps = 2 * loaded.settings.run.num_steps
    _take_leave(console, f"run {swarm.run} is over", what_next(given, swarm, more_steps))


def check_free(place: RunPlace) -> None:
    """Raises UserError when the run of the folder is up already."""
    server = place.server()
    if is_in_use(place.nats) and server is not None:
        raise UserError(
            f"run {place.run_id()} is up here (server pid {server.pid}): see `agentjet status --dir {place.dir}`, or "
            "stop it first"
        )


def what_next(given: Target, swarm: Swarm, more_steps: int) -> list[str]:
    """The commands that go on with a run and look into it, with the options that found it.

    Args:
        given: Options of the command that ran it.
        swarm: What ran.
        more_steps: Number of steps with which a run that is over can go on; 0 for as it is.
    """
    options = given.words()
    onward = [*options, *(["--set", f"run.num_steps={more_steps}"] if more_steps else [])]
    commands = {"go on": ["up", *onward], "look at it": ["status", *options], "check it": ["audit", *options]}
    if swarm.settings.run.is_deterministic:
        commands["derive it again"] = ["replay", "--verify", *options]
    return [f"  {what + ':':<17}{shlex.join([program(), *words])}" for what, words in commands.items()]


def _take_leave(console: Console, sentence: str, lines: list[str]) -> None:
    for line in (sentence, *lines):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


async def _up(swarm: Swarm, console: Console) -> None:
    async with swarm.running():
        console.print(f"run {swarm.run} in {swarm.place.dir}; logs in {swarm.place.logs}", highlight=False)
        await watch(swarm, console, title=f"AgentJet {swarm.run}")

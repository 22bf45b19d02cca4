"""`agentjet up`: server and every actor of one machine, until the run ends or is stopped.

What `--set` and the other options say reaches the actors through their environment, as `AGENTJET_SECTION__KEY`.
"""

import asyncio
import os
from collections.abc import Mapping

from rich.console import Console

from agentjet.actors.swarm import Swarm, run_until_stopped
from agentjet.bus.server import is_in_use
from agentjet.cli.config import check_files
from agentjet.cli.target import Target
from agentjet.cli.view import watch
from agentjet.config.load import DELIMITER, ENV_PREFIX
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
    swarm = Swarm(loaded.settings, loaded.path)
    asyncio.run(run_until_stopped(lambda: _up(swarm)))


def check_free(place: RunPlace) -> None:
    """Raises UserError when the run of the folder is up already."""
    server = place.server()
    if is_in_use(place.nats) and server is not None:
        raise UserError(
            f"run {place.run_id()} is up here (server pid {server.pid}): see `agentjet status --dir {place.dir}`, or "
            "stop it first"
        )


def variables(overrides: Mapping[str, str]) -> dict[str, str]:
    """Settings by dotted key as environment variables."""
    return {ENV_PREFIX + key.replace(".", DELIMITER).upper(): value for key, value in overrides.items()}


async def _up(swarm: Swarm) -> None:
    console = Console(stderr=True)
    async with swarm.running():
        console.print(f"run {swarm.run} in {swarm.place.dir}; logs in {swarm.place.logs}", highlight=False)
        await watch(swarm, console, title=f"AgentJet {swarm.run}")

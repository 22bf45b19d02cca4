"""`agentjet up`: server and every actor of one machine, until the run ends or is stopped."""

import asyncio
from pathlib import Path

from rich.console import Console

from agentjet.actors.swarm import Swarm, run_until_stopped
from agentjet.cli.config import check_files
from agentjet.cli.view import watch
from agentjet.config.load import load
from agentjet.errors import ConfigError


def up(*, config: Path = Path("swarm.toml")) -> None:
    """Start the swarm that a swarm.toml describes, and go on with its run.

    Parameters
    ----------
    config
        The configuration file.
    """
    loaded = load(config)
    if loaded.path is None or not loaded.settings.models:
        raise ConfigError(f"{config} configures no model; see `agentjet config show` and deploy/swarm.laptop.toml")
    check_files(loaded.settings)
    asyncio.run(run_until_stopped(lambda: _up(Swarm(loaded.settings, config.absolute()))))


async def _up(swarm: Swarm) -> None:
    console = Console(stderr=True)
    async with swarm.running():
        console.print(f"run {swarm.run} in {swarm.place.dir}; logs in {swarm.place.logs}", highlight=False)
        await watch(swarm, console, title=f"AgentJet {swarm.run}")
